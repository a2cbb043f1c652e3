//! `/openapi.json`: what is served here, for programs, as `OpenAPI` 3.1 has it.
//!
//! It is made of the table of addresses ([`super::routes`]), of what is asked and answered at each ([`super::operations`]), and of the
//! schemas that the protocols make of their own lists and types. It is the same for as long as the process lives, and made
//! when it is first asked for. Absent: what events of streams have in them, and whatever is told in words alone.

use std::sync::OnceLock;

use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use gantry_core::MAX_QUEUE_TIMEOUT_MS;
use gantry_openai::ErrorResponse;
use gantry_openai::parameters::{PARAMETERS, Place};
use schemars::SchemaGenerator;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use super::operations::{Answers, Asks, Operation};
use super::routes::{self, Protocol};

/// Where schemas lie in a document.
const SCHEMAS: &str = "/components/schemas";
/// Statuses that anything may have.
const OF_ANYTHING: [u16; 1] = [500];

pub(super) async fn document() -> Response {
    static DOCUMENT: OnceLock<Bytes> = OnceLock::new();
    let document = DOCUMENT.get_or_init(|| made().to_string().into()).clone();
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], document).into_response()
}

fn made() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| settings.definitions_path = SCHEMAS.into());
    let mut generator = SchemaGenerator::new(settings);
    let mut paths = Map::new();
    for (path, operations, needs_key, protocol) in routes::described() {
        let mut item = Map::new();
        for operation in operations {
            item.insert(operation.method.to_owned(), of(path, operation, needs_key, protocol, &mut generator));
        }
        paths.insert(path.to_owned(), Value::Object(item));
    }
    let errors = [Protocol::OpenAi, Protocol::Anthropic, Protocol::Generate]
        .map(|protocol| (protocol, error(protocol, &mut generator)));
    let mut schemas = generator.take_definitions(true);
    schemas.extend(places().map(|place| (place.schema_name().to_owned(), gantry_openai::schema(place))));
    schemas.extend(errors.map(|(protocol, schema)| (error_name(protocol).to_owned(), schema)));
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Gantry",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "What this server takes and answers. What is `null` in a body is as good as left out, and a name that \
                            is not listed is refused. A length in bytes is told as one in characters.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": KEYS},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": KEYS},
            },
        },
    })
}

const KEYS: &str = "One of the server's keys (--api-key, --api-key-file), where it has any.";

/// All places of parameters, once each.
fn places() -> impl Iterator<Item = Place> {
    let mut seen = Vec::new();
    PARAMETERS
        .iter()
        .flat_map(|parameter| parameter.places)
        .filter(move |place| {
            let is_new = !seen.contains(*place);
            if is_new {
                seen.push(**place);
            }
            is_new
        })
        .copied()
}

fn of(
    path: &str,
    operation: &Operation,
    needs_key: bool,
    protocol: Protocol,
    generator: &mut SchemaGenerator,
) -> Value {
    let words = path.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    let id: Vec<&str> = std::iter::once(operation.method).chain(words).collect();
    let mut told = json!({
        "operationId": id.join("_"),
        "summary": operation.summary,
        "parameters": parameters(path, operation),
        "responses": responses(operation, needs_key, protocol, generator),
    });
    if let Some(schema) = body(operation.asks, generator) {
        told["requestBody"] = json!({"required": true, "content": {"application/json": {"schema": schema}}});
    }
    if needs_key {
        // A server without keys asks for none.
        told["security"] = json!([{"bearer": []}, {"header": []}, {}]);
    }
    told
}

fn body(asks: Asks, generator: &mut SchemaGenerator) -> Option<Value> {
    match asks {
        Asks::Nothing | Asks::Query(_) => None,
        Asks::Place(place) => Some(reference(place.schema_name())),
        Asks::Body(schema) => Some(schema(generator).to_value()),
    }
}

fn reference(name: &str) -> Value {
    json!({"$ref": format!("#{SCHEMAS}/{name}")})
}

fn parameters(path: &str, operation: &Operation) -> Vec<Value> {
    let parameter = |place: &str, name: &str, schema: Value| json!({"name": name, "in": place, "required": place == "path", "schema": schema});
    let in_path = path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
    let mut all: Vec<Value> = in_path.map(|name| parameter("path", name, json!({"type": "string"}))).collect();
    match operation.asks {
        Asks::Nothing => {}
        Asks::Query(query) => all.extend(query().into_iter().map(|(name, schema)| parameter("query", name, schema))),
        Asks::Place(_) | Asks::Body(_) => all.extend([
            parameter("header", "x-gantry-priority", json!({"enum": ["high", "normal", "low"]})),
            parameter(
                "header",
                "x-gantry-queue-timeout-ms",
                json!({"type": "integer", "minimum": 1, "maximum": MAX_QUEUE_TIMEOUT_MS}),
            ),
        ]),
    }
    all
}

fn responses(operation: &Operation, needs_key: bool, protocol: Protocol, generator: &mut SchemaGenerator) -> Value {
    let json_of = |schema: Value| json!({"application/json": {"schema": schema}});
    let content = match operation.answers {
        Answers::Json(schema) => json_of(schema(generator).to_value()),
        Answers::JsonOrEvents(schema) => {
            let mut content = json_of(schema(generator).to_value());
            // Some programs hold the whole text against it, others each event.
            content["text/event-stream"] = json!({"schema": {"description": "Server-sent events."}});
            content
        }
        Answers::Text(kind) => json!({kind: {"schema": {"type": "string"}}}),
    };
    let mut all = Map::from_iter([("200".to_owned(), json!({"description": "The answer.", "content": content}))]);
    let own = operation.errors.iter().copied().chain(OF_ANYTHING).chain(needs_key.then_some(401));
    for status in own {
        let own = operation.own_error.filter(|_| operation.errors.contains(&status));
        let schema = own.map_or_else(|| reference(error_name(protocol)), |schema| schema(generator).to_value());
        let mut told = json!({"description": meaning(status), "content": json_of(schema)});
        if matches!(status, 429 | 503) {
            told["headers"] = json!({"Retry-After": {
                "description": "After how many seconds it may do well.", "schema": {"type": "integer", "minimum": 0},
            }});
        }
        all.insert(status.to_string(), told);
    }
    Value::Object(all)
}

/// What a status says here.
fn meaning(status: u16) -> &'static str {
    match status {
        400 => "What is asked is wrong, and the error names the parameter; or the model does no such work.",
        401 => "No key is shown, or none that is good.",
        404 => "The model, or the response, is not here.",
        408 => "It took longer than it may.",
        413 => "The body is too large.",
        415 => "The body is not declared as JSON.",
        422 => "The request ends the process that answers it.",
        429 => "As many requests wait as may wait.",
        500 => "The server failed.",
        503 => "It cannot be answered now.",
        _ => "It was refused.",
    }
}

fn error_name(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::OpenAi => "Error",
        Protocol::Anthropic => "MessagesError",
        Protocol::Generate | Protocol::Grpc => "GenerateError",
    }
}

fn error(protocol: Protocol, generator: &mut SchemaGenerator) -> Value {
    match protocol {
        Protocol::OpenAi => generator.subschema_for::<ErrorResponse>().to_value(),
        Protocol::Anthropic => gantry_anthropic::error_schema(generator).to_value(),
        // Of gRPC reflection tells.
        Protocol::Generate | Protocol::Grpc => gantry_generate::error_schema(generator).to_value(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeSet;

    use super::*;

    /// All references below a value.
    fn references<'a>(value: &'a Value, into: &mut BTreeSet<&'a str>) {
        match value {
            Value::Object(fields) => {
                into.extend(fields.get("$ref").and_then(Value::as_str));
                fields.values().for_each(|value| references(value, into));
            }
            Value::Array(items) => items.iter().for_each(|value| references(value, into)),
            _ => {}
        }
    }

    #[test]
    fn every_address_is_told_with_its_methods_and_every_reference_leads_somewhere() {
        let document = made();
        for (path, operations, ..) in routes::described() {
            assert!(!operations.is_empty(), "{path} says nothing of itself");
            for operation in operations {
                let told = &document["paths"][path][operation.method];
                assert!(told["responses"]["200"].is_object(), "{path}");
            }
        }
        let mut all = BTreeSet::new();
        references(&document, &mut all);
        assert!(all.len() > 30, "{all:?}");
        for reference in all {
            let pointer = reference.strip_prefix('#').unwrap();
            assert!(document.pointer(pointer).is_some(), "{reference} leads nowhere");
        }
    }

    #[test]
    fn operations_have_names_of_their_own_and_parameters_their_ranges() {
        let document = made();
        let paths = document["paths"].as_object().unwrap();
        let operations = || paths.values().flat_map(|item| item.as_object().unwrap().values());
        let names: BTreeSet<&str> = operations().map(|one| one["operationId"].as_str().unwrap()).collect();
        assert_eq!(names.len(), operations().count());
        let schemas = &document["components"]["schemas"];
        let of = |name: &str, property: &str| schemas[name]["properties"][property]["anyOf"][0].clone();
        assert_eq!(of("ChatRequest", "temperature"), json!({"type": "number", "minimum": 0.0, "maximum": 2.0}));
        assert_eq!(schemas["ChatRequest"]["required"], json!(["messages"]));
        assert_eq!(schemas["InfillRequest"]["required"], json!(["input_prefix", "input_suffix"]));
        assert_eq!(schemas["MessagesRequest"]["properties"]["top_p"]["exclusiveMinimum"], 0);
        assert_eq!(schemas["ResponsesRequest"]["properties"]["max_output_tokens"]["minimum"], 1);
        assert_eq!(schemas["ResponsesRequest"]["required"], json!(["input"]));
        let chat = &document["paths"]["/chat"]["post"]["requestBody"]["content"]["application/json"]["schema"];
        assert_eq!(chat["allOf"][1]["required"], json!(["messages"]));
        let key = &document["paths"]["/v1/messages"]["post"];
        assert_eq!(key["security"][0], json!({"bearer": []}));
        assert!(document["paths"]["/healthz"]["get"]["security"].is_null());
    }
}

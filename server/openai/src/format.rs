//! What the answer must look like: free text, JSON, JSON of a schema, or a grammar of llama.cpp's.
//!
//! Only sizes and types are checked here: whether a schema or a grammar can be followed is the engine's to say, which
//! compiles it.

use gantry_core::{ApiError, Constraint};
use serde_json::Value;

use crate::fields::{Fields, missing, wrong_type, wrong_value};
use crate::limits::{MAX_GRAMMAR_BYTES, MAX_SCHEMA_BYTES};
use crate::parameters::Place;

/// A JSON object, whatever is in it.
const ANY_OBJECT: &str = r#"{"type":"object"}"#;

/// What the body says that the answer must look like.
pub(crate) fn constraint(fields: &Fields<'_>) -> Result<Option<Constraint>, ApiError> {
    let format = fields.object("response_format")?.map(|object| response_format(&object)).transpose()?.flatten();
    let schema = match fields.get("json_schema") {
        Some(Value::Object(object)) if object.is_empty() => None,
        _ => schema(fields, "json_schema", false)?,
    };
    let grammar = grammar(fields)?;
    match (format, schema, grammar) {
        (format, None, None) => Ok(format),
        (None, schema, None) => Ok(schema),
        (None, None, grammar) => Ok(grammar),
        (_, None, Some(_)) => {
            Err(wrong_value(fields.path("grammar"), "may not be given together with a `response_format` of JSON"))
        }
        (_, Some(_), _) => Err(wrong_value(
            fields.path("json_schema"),
            "may not be given together with a `grammar` or a `response_format` of JSON",
        )),
    }
}

fn response_format(fields: &Fields<'_>) -> Result<Option<Constraint>, ApiError> {
    let expected = "must be one of text, json_object and json_schema";
    let kind = fields.string("type")?;
    if let Some(kind) = kind
        && !["text", "json_object", "json_schema"].contains(&kind)
    {
        return Err(wrong_value(fields.path("type"), expected));
    }
    fields.refuse(Place::ResponseFormat)?;
    match kind {
        // llama-server's clients put a schema here, too.
        Some("json_object") => match fields.get("schema") {
            Some(_) => required_schema(fields, false).map(Some),
            None => Ok(Some(Constraint::JsonSchema { schema: ANY_OBJECT.to_owned(), strict: true })),
        },
        Some("json_schema") => match fields.object("json_schema")? {
            Some(object) => {
                object.refuse(Place::JsonSchema)?;
                object.string("name")?;
                let strict = object.boolean("strict")?.unwrap_or(false);
                required_schema(&object, strict).map(Some)
            }
            None => Err(missing(fields.path("json_schema"), "an object with a `schema` is expected")),
        },
        Some(_) => Ok(None),
        None => Err(missing(fields.path("type"), "text, json_object or json_schema is expected")),
    }
}

fn grammar(fields: &Fields<'_>) -> Result<Option<Constraint>, ApiError> {
    match fields.string("grammar")? {
        None | Some("") => Ok(None),
        Some(grammar) if grammar.len() <= MAX_GRAMMAR_BYTES => Ok(Some(Constraint::Gbnf(grammar.to_owned()))),
        Some(grammar) => {
            let n = grammar.len();
            let message = format_args!("must have at most {MAX_GRAMMAR_BYTES} bytes, not {n}");
            Err(wrong_value(fields.path("grammar"), message))
        }
    }
}

fn required_schema(fields: &Fields<'_>, strict: bool) -> Result<Constraint, ApiError> {
    schema(fields, "schema", strict)?.ok_or_else(|| missing(fields.path("schema"), "a JSON schema is expected"))
}

fn schema(fields: &Fields<'_>, name: &str, strict: bool) -> Result<Option<Constraint>, ApiError> {
    match fields.get(name) {
        None => Ok(None),
        Some(schema @ Value::Object(_)) => {
            let text = schema.to_string();
            if text.len() <= MAX_SCHEMA_BYTES {
                return Ok(Some(Constraint::JsonSchema { schema: text, strict }));
            }
            let n = text.len();
            Err(wrong_value(fields.path(name), format_args!("must have at most {MAX_SCHEMA_BYTES} bytes, not {n}")))
        }
        Some(other) => Err(wrong_type(fields.path(name), "a JSON schema, which is an object", other)),
    }
}

/// The likeliest tokens that a chat wants to be told beside each one chosen; `None`: no log-probabilities at all.
pub(crate) fn chat_logprobs(fields: &Fields<'_>, most: u32) -> Result<Option<u32>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=most)?;
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        // Clients send the default.
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(wrong_value(fields.path("top_logprobs"), "may be given only with `logprobs: true`")),
    }
}

/// The same for a text, where one number says both.
pub(crate) fn text_logprobs(fields: &Fields<'_>, most: u32) -> Result<Option<u32>, ApiError> {
    match fields.get("logprobs") {
        // A chat's way to ask for nothing.
        Some(Value::Bool(false)) => Ok(None),
        _ => fields.integer("logprobs", 0..=most),
    }
}

//! What the answer must look like: free text, JSON, JSON of a schema, a regular expression, one of some texts, or a grammar of
//! llama.cpp's; by `OpenAI`'s names, llama-server's and vLLM's.
//!
//! Only sizes and types are checked here: whether something can be followed is the engine's to say, which compiles it.

use gantry_core::{ApiError, Constraint};
use serde_json::{Map, Value};

use crate::fields::{Fields, missing, wrong_type, wrong_value};
use crate::limits::{MAX_FORM_CHOICES, MAX_GRAMMAR_BYTES, MAX_REGEX_BYTES, MAX_SCHEMA_BYTES};
use crate::parameters::Place;

/// A JSON object, whatever is in it.
const ANY_OBJECT: &str = r#"{"type":"object"}"#;

/// What the body says that the answer must look like, and by which of its fields.
pub(crate) fn constraint(fields: &Fields<'_>) -> Result<Option<(Constraint, String)>, ApiError> {
    let mut asked: Vec<(Constraint, String)> = Vec::new();
    let mut add = |fields: &Fields<'_>, name: &str, constraint: Option<Constraint>| {
        asked.extend(constraint.map(|constraint| (constraint, fields.path(name))));
    };
    let format = fields.object("response_format")?.map(|object| response_format(&object)).transpose()?.flatten();
    add(fields, "response_format", format);
    let json_schema = match fields.get("json_schema") {
        Some(Value::Object(object)) if object.is_empty() => None,
        _ => schema(fields, "json_schema", false)?,
    };
    add(fields, "json_schema", json_schema);
    add(fields, "grammar", grammar(fields, "grammar")?);
    // vLLM's names, the older ones first.
    add(fields, "guided_json", json(fields, "guided_json")?);
    add(fields, "guided_regex", regex(fields, "guided_regex")?);
    add(fields, "guided_choice", choice(fields, "guided_choice")?);
    add(fields, "guided_grammar", grammar(fields, "guided_grammar")?);
    if let Some(outputs) = fields.object("structured_outputs")? {
        outputs.refuse(Place::StructuredOutputs)?;
        add(&outputs, "json", json(&outputs, "json")?);
        add(&outputs, "regex", regex(&outputs, "regex")?);
        add(&outputs, "choice", choice(&outputs, "choice")?);
        add(&outputs, "grammar", grammar(&outputs, "grammar")?);
        let object = outputs.boolean("json_object")?.unwrap_or(false).then(any_object);
        add(&outputs, "json_object", object);
    }
    match asked.as_slice() {
        [(_, first), (_, second), ..] => {
            Err(wrong_value(second.clone(), format_args!("may not be given together with `{first}`")))
        }
        _ => Ok(asked.pop()),
    }
}

fn any_object() -> Constraint {
    Constraint::JsonSchema { schema: ANY_OBJECT.to_owned(), strict: true }
}

/// A schema, or the text of one.
fn json(fields: &Fields<'_>, name: &str) -> Result<Option<Constraint>, ApiError> {
    let Some(text) = fields.get(name).and_then(Value::as_str) else { return schema(fields, name, false) };
    let object = serde_json::from_str::<Map<String, Value>>(text);
    let object = object.map_err(|error| {
        wrong_value(fields.path(name), format_args!("is a text that is no JSON schema, which is an object: {error}"))
    })?;
    let parsed = Map::from_iter([(name.to_owned(), Value::Object(object))]);
    schema(&Fields::new(&parsed, fields.path("")), name, false)
}

fn regex(fields: &Fields<'_>, name: &str) -> Result<Option<Constraint>, ApiError> {
    match fields.string(name)? {
        None | Some("") => Ok(None),
        Some(regex) if regex.len() <= MAX_REGEX_BYTES => Ok(Some(Constraint::Regex(regex.to_owned()))),
        Some(regex) => {
            let n = regex.len();
            Err(wrong_value(fields.path(name), format_args!("must have at most {MAX_REGEX_BYTES} bytes, not {n}")))
        }
    }
}

/// One of some texts, as a grammar.
fn choice(fields: &Fields<'_>, name: &str) -> Result<Option<Constraint>, ApiError> {
    let Some(texts) = fields.strings(name, 1..=MAX_FORM_CHOICES, 1..=MAX_GRAMMAR_BYTES)? else { return Ok(None) };
    let literals: Vec<String> = texts.iter().map(|text| literal(text)).collect();
    let grammar = format!("root ::= {}", literals.join(" | "));
    if grammar.len() > MAX_GRAMMAR_BYTES {
        let n = grammar.len();
        let message = format_args!("must have at most {MAX_GRAMMAR_BYTES} bytes as a grammar, not {n}");
        return Err(wrong_value(fields.path(name), message));
    }
    Ok(Some(Constraint::Gbnf(grammar)))
}

/// A text as a grammar writes it.
fn literal(text: &str) -> String {
    let mut literal = String::from("\"");
    for character in text.chars() {
        match character {
            '"' | '\\' => literal.extend(['\\', character]),
            control if control.is_control() => literal.push_str(&format!("\\u{:04x}", u32::from(control))),
            character => literal.push(character),
        }
    }
    literal.push('"');
    literal
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
            None => Ok(Some(any_object())),
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

fn grammar(fields: &Fields<'_>, name: &str) -> Result<Option<Constraint>, ApiError> {
    match fields.string(name)? {
        None | Some("") => Ok(None),
        Some(grammar) if grammar.len() <= MAX_GRAMMAR_BYTES => Ok(Some(Constraint::Gbnf(grammar.to_owned()))),
        Some(grammar) => {
            let n = grammar.len();
            let message = format_args!("must have at most {MAX_GRAMMAR_BYTES} bytes, not {n}");
            Err(wrong_value(fields.path(name), message))
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

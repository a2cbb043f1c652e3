//! What the answer must look like: free text, JSON, JSON of a schema, or a grammar of llama.cpp's.
//!
//! Only sizes and types are checked here: whether a schema or a grammar can be followed is the engine's to say, which
//! compiles it.

use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::fields::{Fields, missing, wrong_type, wrong_value};
use crate::limits::{MAX_GRAMMAR_BYTES, MAX_SCHEMA_BYTES};
use crate::parameters::Place;

/// What the answer must look like.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// Anything.
    #[default]
    Text,
    /// A JSON object.
    JsonObject,
    /// JSON of a schema.
    JsonSchema {
        /// The schema, which is JSON itself.
        schema: String,
        /// Whether a schema is refused that cannot be enforced as a whole.
        strict: bool,
    },
    /// A text of this grammar, in llama.cpp's GBNF.
    Grammar(String),
}

impl Format {
    pub(crate) fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        let format = fields.object("response_format")?.map(|object| response_format(&object)).transpose()?;
        let format = format.unwrap_or_default();
        let schema = match fields.get("json_schema") {
            Some(Value::Object(object)) if object.is_empty() => None,
            _ => schema(fields, "json_schema", false)?,
        };
        let grammar = grammar(fields)?;
        match (format, schema, grammar) {
            (format, None, None) => Ok(format),
            (Self::Text, Some(schema), None) => Ok(schema),
            (Self::Text, None, Some(grammar)) => Ok(grammar),
            (_, None, Some(_)) => {
                Err(wrong_value(fields.path("grammar"), "may not be given together with a `response_format` of JSON"))
            }
            (_, Some(_), _) => Err(wrong_value(
                fields.path("json_schema"),
                "may not be given together with a `grammar` or a `response_format` of JSON",
            )),
        }
    }

    /// The same on the wire.
    pub(crate) fn write(&self, object: &mut Map<String, Value>) {
        let (name, value) = match self {
            Self::Text => return,
            Self::JsonObject => ("response_format", json!({"type": "json_object"})),
            Self::JsonSchema { schema, strict } => {
                let schema: Value = serde_json::from_str(schema).unwrap_or_default();
                let named = json!({"name": "answer", "strict": strict, "schema": schema});
                ("response_format", json!({"type": "json_schema", "json_schema": named}))
            }
            Self::Grammar(grammar) => ("grammar", json!(grammar)),
        };
        object.insert(name.to_owned(), value);
    }

    /// The parameter that asked for it, to be named where the engine cannot follow it.
    #[must_use]
    pub fn param(&self) -> &'static str {
        match self {
            Self::Grammar(_) => "grammar",
            _ => "response_format",
        }
    }
}

fn response_format(fields: &Fields<'_>) -> Result<Format, ApiError> {
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
            Some(_) => required_schema(fields, false),
            None => Ok(Format::JsonObject),
        },
        Some("json_schema") => match fields.object("json_schema")? {
            Some(object) => {
                object.refuse(Place::JsonSchema)?;
                object.string("name")?;
                let strict = object.boolean("strict")?.unwrap_or(false);
                required_schema(&object, strict)
            }
            None => Err(missing(fields.path("json_schema"), "an object with a `schema` is expected")),
        },
        Some(_) => Ok(Format::Text),
        None => Err(missing(fields.path("type"), "text, json_object or json_schema is expected")),
    }
}

fn grammar(fields: &Fields<'_>) -> Result<Option<Format>, ApiError> {
    match fields.string("grammar")? {
        None | Some("") => Ok(None),
        Some(grammar) if grammar.len() <= MAX_GRAMMAR_BYTES => Ok(Some(Format::Grammar(grammar.to_owned()))),
        Some(grammar) => {
            let n = grammar.len();
            let message = format_args!("must have at most {MAX_GRAMMAR_BYTES} bytes, not {n}");
            Err(wrong_value(fields.path("grammar"), message))
        }
    }
}

fn required_schema(fields: &Fields<'_>, strict: bool) -> Result<Format, ApiError> {
    schema(fields, "schema", strict)?.ok_or_else(|| missing(fields.path("schema"), "a JSON schema is expected"))
}

fn schema(fields: &Fields<'_>, name: &str, strict: bool) -> Result<Option<Format>, ApiError> {
    match fields.get(name) {
        None => Ok(None),
        Some(schema @ Value::Object(_)) => {
            let text = schema.to_string();
            if text.len() <= MAX_SCHEMA_BYTES {
                return Ok(Some(Format::JsonSchema { schema: text, strict }));
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

//! What values parameters may have, as data, and the JSON Schema that says so.
//!
//! The schemas are made from the list of parameters, for those who describe the server to programs. They say no more than what is
//! checked here before anything is asked of a model, and less where a rule is about several parameters. A length in bytes is told
//! as one in characters, of which there are never more. Absent: what a parameter does, which `docs/configuration.md` tells.

use gantry_core::TOOL_NAME_PATTERN;
use serde_json::{Map, Value, json};

use crate::parameters::{Neutral, PARAMETERS, Parameter, Place, Treatment};

/// What a parameter may be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Shape {
    /// True or false.
    Boolean,
    /// That one of the two.
    Only(bool),
    /// An integer in a range, its ends included.
    Integer(i64, i64),
    /// A number in a range, its ends included.
    Number(f32, f32),
    /// A number above 0 and at most this.
    AboveZero(f32),
    /// A text.
    Text {
        /// Whether it may be empty.
        is_empty_taken: bool,
        /// The most bytes that it may have.
        most_bytes: usize,
    },
    /// The name of a tool.
    Name,
    /// One of these words.
    Words(&'static [&'static str]),
    /// An array of some of these words, each once and in their order.
    OrderedWords(&'static [&'static str]),
    /// An array of so many texts at least and at most, each of so many bytes at most.
    Texts(usize, usize, usize),
    /// An array of at most so many token ids.
    Tokens(usize),
    /// A text, an array of token ids, or an array of either.
    Inputs {
        /// The most texts and arrays.
        elements: usize,
        /// The most token ids in all of them.
        tokens: usize,
    },
    /// Token ids and what is added to their logits, as an object or as pairs: at most so many, each so far from 0 at most.
    Biases(usize, f32),
    /// A JSON schema, which is an object.
    Schema,
    /// An object of at most so many names, which are the client's.
    Map(usize),
    /// An object with the parameters of a place.
    Object(Place),
    /// An array of so many of these at least and at most.
    Objects(Place, usize, usize),
    /// An object that names a tool.
    NamedTool,
    /// An array of one and at most so many of these.
    NamedTools(usize),
    /// An array of one and at most so many documents, each a text or an object.
    Documents(usize),
    /// One of these.
    AnyOf(&'static [Shape]),
}

/// A token id as the name of something.
const TOKEN_NAME: &str = "^[0-9]{1,10}$";

impl Shape {
    /// Its schema.
    #[must_use]
    pub fn schema(self) -> Value {
        match self {
            Self::Boolean => json!({"type": "boolean"}),
            Self::Only(value) => json!({"type": "boolean", "const": value}),
            Self::Integer(least, most) => json!({"type": "integer", "minimum": least, "maximum": most}),
            Self::Number(least, most) => json!({"type": "number", "minimum": least, "maximum": most}),
            Self::AboveZero(most) => json!({"type": "number", "exclusiveMinimum": 0, "maximum": most}),
            Self::Text { is_empty_taken, most_bytes } => {
                let mut schema = json!({"type": "string", "maxLength": most_bytes});
                if !is_empty_taken {
                    schema["minLength"] = json!(1);
                }
                schema
            }
            Self::Name => json!({"type": "string", "pattern": TOOL_NAME_PATTERN}),
            Self::Words(words) => json!({"type": "string", "enum": words}),
            Self::OrderedWords(words) => {
                json!({"type": "array", "items": Self::Words(words).schema(), "uniqueItems": true})
            }
            Self::Texts(least, most, bytes) => {
                let text = json!({"type": "string", "maxLength": bytes});
                json!({"type": "array", "items": text, "minItems": least, "maxItems": most})
            }
            Self::Tokens(most) => json!({"type": "array", "items": token(), "maxItems": most}),
            Self::Inputs { elements, tokens } => {
                let text = || json!({"type": "string", "minLength": 1});
                let ids = || json!({"type": "array", "items": token(), "minItems": 1, "maxItems": tokens});
                let several =
                    |items: Value| json!({"type": "array", "items": items, "minItems": 1, "maxItems": elements});
                json!({"anyOf": [text(), ids(), several(json!({"anyOf": [text(), ids()]}))]})
            }
            Self::Biases(entries, bias) => {
                let bias = json!({"type": "number", "minimum": -bias, "maximum": bias});
                let by_name = json!({
                    "type": "object", "patternProperties": {TOKEN_NAME: bias}, "additionalProperties": false,
                    "maxProperties": entries,
                });
                let bias_or_ban = json!({"anyOf": [bias, {"type": "boolean", "const": false}]});
                let pair = json!({
                    "type": "array", "prefixItems": [token(), bias_or_ban], "items": false, "minItems": 2, "maxItems": 2,
                });
                json!({"anyOf": [by_name, {"type": "array", "items": pair, "maxItems": entries}]})
            }
            Self::Schema | Self::Map(usize::MAX) => json!({"type": "object"}),
            Self::Map(most) => json!({"type": "object", "maxProperties": most}),
            Self::Object(place) => reference(place),
            Self::Objects(place, least, most) => {
                json!({"type": "array", "items": reference(place), "minItems": least, "maxItems": most})
            }
            Self::NamedTool => {
                let name =
                    || json!({"type": "object", "properties": {"name": Self::Name.schema()}, "required": ["name"]});
                let function = json!({"type": "object", "properties": {"function": name()}, "required": ["function"]});
                json!({"anyOf": [name(), function]})
            }
            Self::NamedTools(most) => {
                json!({"type": "array", "items": Self::NamedTool.schema(), "minItems": 1, "maxItems": most})
            }
            Self::Documents(most) => {
                let text = json!({"type": "string", "minLength": 1});
                let document = json!({"anyOf": [text, reference(Place::Document)]});
                json!({"type": "array", "items": document, "minItems": 1, "maxItems": most})
            }
            Self::AnyOf(shapes) => json!({"anyOf": shapes.iter().map(|shape| shape.schema()).collect::<Vec<_>>()}),
        }
    }
}

fn token() -> Value {
    json!({"type": "integer", "minimum": 0, "maximum": i32::MAX})
}

fn reference(place: Place) -> Value {
    json!({"$ref": format!("#/components/schemas/{}", place.schema_name())})
}

/// The schema of what stands in a place, which refers to those of others by their [names](Place::schema_name) in the components of an
/// `OpenAPI` document.
#[must_use]
pub fn schema(place: Place) -> Value {
    let here = || PARAMETERS.iter().filter(|parameter| parameter.places.contains(&place));
    let properties: Map<String, Value> =
        here().map(|parameter| (parameter.name.to_owned(), property(parameter))).collect();
    let required: Vec<&str> = here().filter(|one| one.is_required).map(|one| one.name).collect();
    let mut schema = json!({"type": "object", "properties": properties, "additionalProperties": false});
    if !required.is_empty() {
        schema["required"] = json!(required);
    }
    if place == Place::Tokenize {
        // By llama-server's name or vLLM's.
        let one = |name: &str| json!({"required": [name], "properties": {name: {"type": "string"}}});
        schema["anyOf"] = json!([one("content"), one("prompt")]);
    }
    if place == Place::Message {
        // Who says nothing is an assistant that calls, or a tool that returned nothing.
        let said = json!({"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1}]});
        let returned = json!({"type": ["string", "array"]});
        schema["anyOf"] = json!([
            {"properties": {"role": {"const": "assistant"}}},
            {
                "properties": {"role": {"enum": ["system", "developer", "user"]}, "content": said},
                "required": ["content"],
            },
            {
                "properties": {"role": {"const": "tool"}, "content": returned, "tool_call_id": {"type": "string", "minLength": 1}},
                "required": ["content", "tool_call_id"],
            },
        ]);
    }
    if place == Place::Score {
        // Each side by one of its two names.
        let both = |one: &str, other: &str| {
            let given = json!({"type": ["string", "array"]});
            json!({"required": [one, other], "properties": {one: given, other: given}})
        };
        let (first, second) = (["text_1", "queries"], ["text_2", "documents"]);
        let pairs = first.iter().flat_map(|one| second.iter().map(move |other| both(one, other)));
        schema["anyOf"] = pairs.collect();
    }
    schema
}

fn property(parameter: &Parameter) -> Value {
    match (parameter.treatment, parameter.shape) {
        (Treatment::Obeyed, Some(shape)) if parameter.is_required => shape.schema(),
        (Treatment::Obeyed, shape) => or_null(shape.map_or_else(|| json!({}), Shape::schema)),
        (Treatment::NoEffect(reason), _) => json!({"description": format!("Changes nothing: {reason}.")}),
        (Treatment::Names(what), _) => json!({"description": format!("Names {what}.")}),
        (Treatment::Refused(neutral, instead), _) => {
            let mut schema = or_null(neutral_schema(neutral));
            let instead = if instead.is_empty() { String::new() } else { format!(" Instead: {instead}.") };
            schema["description"] = json!(format!("Refused, unless it asks for what happens anyway.{instead}"));
            schema
        }
    }
}

/// What asks for what happens anyway, but for `null`.
fn neutral_schema(neutral: Neutral) -> Value {
    match neutral {
        Neutral::Absent => json!({"type": "null"}),
        Neutral::Zero => json!({"const": 0}),
        Neutral::NotPositive => json!({"type": "number", "maximum": 0}),
        Neutral::MinusOne => json!({"const": -1}),
        Neutral::One => json!({"const": 1}),
        Neutral::Two => json!({"const": 2}),
        Neutral::False => Shape::Only(false).schema(),
        Neutral::True => Shape::Only(true).schema(),
        Neutral::Empty => json!({"enum": ["", [], {}]}),
        Neutral::Words(words) => Shape::Words(words).schema(),
        Neutral::OnlyText => json!({"type": "array", "items": {"const": "text"}}),
        Neutral::NoThought => json!({"enum": [false, "none", "off", "disabled"]}),
    }
}

/// What is `null` is as good as absent.
fn or_null(schema: Value) -> Value {
    if schema["type"] == "null" { schema } else { json!({"anyOf": [schema, {"type": "null"}]}) }
}

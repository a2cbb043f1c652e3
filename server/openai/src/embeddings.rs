//! `/v1/embeddings`: requests, checked, and answers. Absent: a model's own limits, which only it knows.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::base64;
use crate::error::ApiError;
use crate::fields::{Fields, missing, wrong_type, wrong_value};
use crate::limits::{MAX_EMBEDDING_INPUTS, MAX_EMBEDDING_TOKENS};
use crate::parameters::Place;
use crate::request::{Priority, check_model, model, parse_object};
use crate::response::EmbeddingUsage;

/// One thing to embed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EmbeddingInput {
    /// A text, not empty.
    Text(String),
    /// Token ids, at least one, none negative.
    Tokens(Vec<i32>),
}

/// How vectors are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EncodingFormat {
    /// As numbers.
    #[default]
    Float,
    /// As base64 of 32-bit floats, little-endian.
    Base64,
}

/// Texts to embed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValidEmbeddingsRequest {
    /// The model asked for; `None`: whichever is served.
    pub model: Option<String>,
    /// 1 to [`MAX_EMBEDDING_INPUTS`].
    pub inputs: Vec<EmbeddingInput>,
    /// How to write the vectors.
    pub encoding: EncodingFormat,
    /// The width asked for; see [`Self::check_dimensions`].
    pub dimensions: Option<u32>,
    /// `None`: the body does not say.
    pub priority: Option<Priority>,
}

impl ValidEmbeddingsRequest {
    /// Reads and checks a body.
    ///
    /// # Errors
    /// Names the first parameter that is missing, of the wrong type or out of range.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let object = parse_object(body)?;
        let fields = Fields::new(&object, "");
        fields.refuse(Place::Embeddings)?;
        let encoding = match fields.string("encoding_format")? {
            None | Some("float") => EncodingFormat::Float,
            Some("base64") => EncodingFormat::Base64,
            Some(_) => return Err(wrong_value("encoding_format".to_owned(), "must be float or base64")),
        };
        Ok(Self {
            model: model(&fields)?,
            inputs: inputs(&fields)?,
            encoding,
            dimensions: fields.integer("dimensions", 1..=u32::MAX)?,
            priority: Priority::read(&fields)?,
        })
    }

    /// The same request on the wire.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let input = |input: &EmbeddingInput| match input {
            EmbeddingInput::Text(text) => json!(text),
            EmbeddingInput::Tokens(tokens) => json!(tokens),
        };
        let mut object = Map::new();
        for (name, value) in [
            ("model", json!(self.model)),
            ("input", self.inputs.iter().map(input).collect()),
            ("encoding_format", json!(if self.encoding == EncodingFormat::Float { "float" } else { "base64" })),
            ("dimensions", json!(self.dimensions)),
            ("priority", json!(self.priority.map(Priority::as_str))),
        ] {
            object.insert(name.to_owned(), value);
        }
        Value::Object(object)
    }

    /// Refuses the request unless it asks for one of the names `served`, or for none.
    ///
    /// # Errors
    /// 404 `model_not_found`.
    pub fn check_model(&self, served: &[&str]) -> Result<(), ApiError> {
        check_model(self.model.as_deref(), served)
    }

    /// Refuses another width than the model's: a vector that is cut is worth something only where the model was
    /// trained for it, and files do not say so.
    ///
    /// # Errors
    /// 400 `invalid_value`.
    pub fn check_dimensions(&self, width: u32) -> Result<(), ApiError> {
        match self.dimensions {
            Some(asked) if asked != width => {
                let message =
                    format_args!("must be {width}, which is this model's width, not {asked}; or leave it out");
                Err(wrong_value("dimensions".to_owned(), message))
            }
            _ => Ok(()),
        }
    }
}

fn inputs(fields: &Fields<'_>) -> Result<Vec<EmbeddingInput>, ApiError> {
    let expected = "a string, an array of strings, an array of token ids or an array of those";
    let path = || fields.path("input");
    let value = fields.get("input").ok_or_else(|| missing(path(), &format!("{expected} is expected")))?;
    let mut tokens = 0;
    match value {
        Value::String(text) => Ok(vec![text_input(path(), text)?]),
        Value::Array(items) if items.first().is_some_and(Value::is_number) => {
            Ok(vec![token_input(&path(), items, &mut tokens)?])
        }
        Value::Array(items) if items.is_empty() || items.len() > MAX_EMBEDDING_INPUTS => {
            let n = items.len();
            Err(wrong_value(path(), format_args!("must have 1 to {MAX_EMBEDDING_INPUTS} elements, not {n}")))
        }
        Value::Array(items) => {
            let one = |(i, item): (usize, &Value)| {
                let path = format!("{}[{i}]", path());
                match item {
                    Value::String(text) => text_input(path, text),
                    Value::Array(ids) => token_input(&path, ids, &mut tokens),
                    other => Err(wrong_type(path, "a string or an array of token ids", other)),
                }
            };
            items.iter().enumerate().map(one).collect()
        }
        other => Err(wrong_type(path(), expected, other)),
    }
}

fn text_input(path: String, text: &str) -> Result<EmbeddingInput, ApiError> {
    if text.is_empty() {
        return Err(wrong_value(path, "must not be empty"));
    }
    Ok(EmbeddingInput::Text(text.to_owned()))
}

/// Reads token ids; `before` counts those of the whole request.
fn token_input(path: &str, items: &[Value], before: &mut usize) -> Result<EmbeddingInput, ApiError> {
    if items.is_empty() {
        return Err(wrong_value(path.to_owned(), "must not be empty"));
    }
    *before = before.saturating_add(items.len());
    if *before > MAX_EMBEDDING_TOKENS {
        let message = format_args!("is past the {MAX_EMBEDDING_TOKENS} tokens that one request may have; send several");
        return Err(wrong_value(path.to_owned(), message));
    }
    let id = |(i, item): (usize, &Value)| {
        let path = || format!("{path}[{i}]");
        match item.as_i64().map(i32::try_from) {
            Some(Ok(id)) if id >= 0 => Ok(id),
            _ if item.is_number() => Err(wrong_value(path(), "must be a token id: an integer of 0 and more")),
            _ => Err(wrong_type(path(), "a token id", item)),
        }
    };
    items.iter().enumerate().map(id).collect::<Result<_, _>>().map(EmbeddingInput::Tokens)
}

/// The answer to `/v1/embeddings`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EmbeddingList {
    /// `list`.
    pub object: String,
    /// One for each input, in their order.
    pub data: Vec<Embedding>,
    /// The served name.
    pub model: String,
    /// The tokens.
    pub usage: EmbeddingUsage,
}

/// See [`EmbeddingList`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Embedding {
    /// `embedding`.
    pub object: String,
    /// Which input.
    pub index: u32,
    /// The vector.
    pub embedding: EmbeddingVector,
}

/// A vector in one of its two shapes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum EmbeddingVector {
    /// [`EncodingFormat::Float`].
    Float(Vec<f32>),
    /// [`EncodingFormat::Base64`].
    Base64(String),
}

impl EmbeddingVector {
    fn new(floats: Vec<f32>, encoding: EncodingFormat) -> Self {
        match encoding {
            EncodingFormat::Float => Self::Float(floats),
            EncodingFormat::Base64 => Self::Base64(base64::encode_floats(&floats)),
        }
    }

    /// The numbers; `None` where they were not written by this protocol.
    #[must_use]
    pub fn floats(&self) -> Option<Vec<f32>> {
        match self {
            Self::Float(floats) => Some(floats.clone()),
            Self::Base64(text) => base64::decode_floats(text),
        }
    }
}

impl EmbeddingList {
    /// The answer with these vectors, one for each input in their order.
    #[must_use]
    pub fn new(model: String, vectors: Vec<Vec<f32>>, encoding: EncodingFormat, prompt_tokens: u32) -> Self {
        let data = (0..).zip(vectors).map(|(index, floats)| Embedding {
            object: "embedding".to_owned(),
            index,
            embedding: EmbeddingVector::new(floats, encoding),
        });
        Self { object: "list".to_owned(), data: data.collect(), model, usage: EmbeddingUsage::new(prompt_tokens) }
    }
}

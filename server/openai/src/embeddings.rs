//! `/v1/embeddings`: requests, checked, and answers. Absent: a model's own limits, which only it knows.

use gantry_core::{
    AnswerHead, ApiError, EncodeError, PooledEncoder, PooledOutput, PooledRequest, PooledSize, PooledTask, PooledWork,
    Priority, TextInput,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::base64;
use crate::fields::{Fields, wrong_value};
use crate::inputs::{Bounds, inputs, text_inputs};
use crate::limits::{MAX_EMBEDDING_INPUTS, MAX_EMBEDDING_TOKENS};
use crate::parameters::Place;
use crate::request::{model, parse_object, priority};
use crate::response::EmbeddingUsage;

/// How vectors are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EncodingFormat {
    /// As numbers.
    #[default]
    Float,
    /// As base64 of 32-bit floats, little-endian.
    Base64,
}

const BOUNDS: Bounds = Bounds { elements: MAX_EMBEDDING_INPUTS, tokens: MAX_EMBEDDING_TOKENS };

/// Texts to embed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValidEmbeddingsRequest {
    /// The model asked for; `None`: whichever is served.
    pub model: Option<String>,
    /// 1 to [`MAX_EMBEDDING_INPUTS`].
    pub inputs: Vec<TextInput>,
    /// How to write the vectors.
    pub encoding: EncodingFormat,
    /// The width asked for, which must be the model's, or less where its vectors may be cut.
    pub dimensions: Option<u32>,
    /// Who goes first.
    pub priority: Priority,
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
            inputs: inputs(&fields, "input", BOUNDS)?,
            encoding,
            dimensions: fields.integer("dimensions", 1..=u32::MAX)?,
            priority: priority(&fields)?,
        })
    }
}

/// Reads and checks a body.
///
/// # Errors
/// As [`ValidEmbeddingsRequest::parse`].
pub fn decode_embeddings(body: &[u8]) -> Result<(PooledRequest, EmbeddingsEncoder), ApiError> {
    let ValidEmbeddingsRequest { model, inputs, encoding, dimensions, priority } = ValidEmbeddingsRequest::parse(body)?;
    let encoder = EmbeddingsEncoder { encoding, dimensions, count: inputs.len() };
    let work = PooledTask::Work(PooledWork::Embed(inputs));
    Ok((PooledRequest { model, work, prompt_param: "input", priority }, encoder))
}

/// Checks texts to embed that another protocol has read, as its `input`.
///
/// # Errors
/// There are none, or too many, or one is empty.
pub fn embedding_inputs(texts: Vec<String>) -> Result<Vec<TextInput>, ApiError> {
    text_inputs("input", texts, BOUNDS)
}

/// Writes the answer to a request for embeddings.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingsEncoder {
    encoding: EncodingFormat,
    dimensions: Option<u32>,
    count: usize,
}

impl PooledEncoder for EmbeddingsEncoder {
    /// A vector that is cut is worth something only where the model was trained for it, which files do not say: the operator does.
    fn check(&self, width: u32, may_cut: bool) -> Result<(), ApiError> {
        match self.dimensions {
            Some(asked) if asked != width && !(may_cut && asked < width) => {
                let which = if may_cut { "at most this model's width" } else { "this model's width" };
                let message = format_args!("must be {width}, which is {which}, not {asked}; or leave it out");
                let way_out = "; vectors are cut where the server was started with --matryoshka";
                let more = if may_cut || asked > width { "" } else { way_out };
                Err(wrong_value("dimensions".to_owned(), format_args!("{message}{more}")))
            }
            _ => Ok(()),
        }
    }

    fn size(&self, width: u32) -> PooledSize {
        // What nobody makes is no size, however much of it is asked for.
        let each = self.dimensions.map_or(width, |dimensions| dimensions.min(width));
        PooledSize::Numbers(self.count.saturating_mul(each as usize))
    }

    fn whole(self, head: AnswerHead, output: PooledOutput) -> Result<Vec<u8>, EncodeError> {
        let mut vectors = output.vectors;
        if let Some(dimensions) = self.dimensions {
            vectors.iter_mut().for_each(|vector| cut(vector, dimensions as usize));
        }
        serde_json::to_vec(&EmbeddingList::new(head.model, vectors, self.encoding, output.prompt_tokens))
    }
}

/// Leaves the beginning of a vector, at unit length again.
fn cut(vector: &mut Vec<f32>, dimensions: usize) {
    if dimensions >= vector.len() {
        return;
    }
    vector.truncate(dimensions);
    let norm = vector.iter().map(|number| f64::from(*number).powi(2)).sum::<f64>().sqrt();
    if norm > 0.0 {
        vector.iter_mut().for_each(|number| *number = (f64::from(*number) / norm) as f32);
    }
}

/// The answer to `/v1/embeddings`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
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
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Embedding {
    /// `embedding`.
    pub object: String,
    /// Which input.
    pub index: u32,
    /// The vector.
    pub embedding: EmbeddingVector,
}

/// A vector in one of its two shapes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_model_does_not_make_is_no_size() {
        let size = |dimensions: Option<u32>, width| match (EmbeddingsEncoder {
            encoding: EncodingFormat::Float,
            dimensions,
            count: 3,
        })
        .size(width)
        {
            PooledSize::Numbers(numbers) => numbers,
            PooledSize::Bytes(_) => panic!("vectors are numbers"),
        };
        assert_eq!([size(None, 4), size(Some(2), 4), size(Some(u32::MAX), 4)], [12, 6, 12]);
        assert_eq!(size(Some(u32::MAX), 0), 0, "of a model that embeds nothing");
    }
}

//! `/v1/rerank` and `/v2/rerank`: documents in the order of their worth to a query, in the shape that Jina, Cohere and llama-server
//! share.

use gantry_core::{
    AnswerHead, ApiError, EncodeError, PooledEncoder, PooledOutput, PooledRequest, PooledSize, PooledTask, PooledWork,
    Priority,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::fields::{Fields, missing, wrong_type, wrong_value};
use crate::limits::MAX_RERANK_DOCUMENTS;
use crate::parameters::Place;
use crate::request::{model, parse_object, priority};
use crate::response::EmbeddingUsage;

/// About what a result takes on the wire beside its document's text.
const RESULT_BYTES: usize = 96;

/// Documents to rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValidRerankRequest {
    /// The model asked for; `None`: whichever is served.
    pub model: Option<String>,
    /// What they are ranked by; not empty.
    pub query: String,
    /// 1 to [`MAX_RERANK_DOCUMENTS`], none empty.
    pub documents: Vec<String>,
    /// The most results; at least 1. `None`: all.
    pub top_n: Option<u32>,
    /// Repeat the documents in the results.
    pub return_documents: bool,
    /// Who goes first.
    pub priority: Priority,
}

impl ValidRerankRequest {
    /// Reads and checks a body.
    ///
    /// # Errors
    /// Names the first parameter that is missing, of the wrong type or out of range.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let object = parse_object(body)?;
        let fields = Fields::new(&object, "");
        fields.refuse(Place::Rerank)?;
        let query = match fields.string("query")? {
            None => return Err(missing("query".to_owned(), "a string is expected")),
            Some("") => return Err(wrong_value("query".to_owned(), "must not be empty")),
            Some(query) => query.to_owned(),
        };
        Ok(Self {
            model: model(&fields)?,
            query,
            documents: documents(&fields)?,
            top_n: fields.integer("top_n", 1..=u32::MAX)?,
            return_documents: fields.boolean("return_documents")?.unwrap_or(false),
            priority: priority(&fields)?,
        })
    }

    /// About how many bytes [the answer](Self::answer) has on the wire: documents count where they are told again, as they are.
    #[must_use]
    pub fn answer_bytes(&self) -> usize {
        let told = if self.return_documents { self.documents.iter().map(String::len).sum() } else { 0 };
        self.documents.len().saturating_mul(RESULT_BYTES).saturating_add(told)
    }

    /// The answer, from the score of each document in their order: the best first, equals as they came, and a document
    /// without a finite score last.
    #[must_use]
    pub fn answer(&self, model: String, scores: &[f32], prompt_tokens: u32) -> RerankResponse {
        let worth = |score: f32| if score.is_finite() { score } else { f32::MIN };
        let mut results: Vec<RerankResult> = (0..)
            .zip(scores.iter().zip(&self.documents))
            .map(|(index, (score, document))| RerankResult {
                index,
                relevance_score: worth(*score),
                document: self.return_documents.then(|| RerankDocument { text: document.clone() }),
            })
            .collect();
        results.sort_by(|a, b| b.relevance_score.total_cmp(&a.relevance_score));
        results.truncate(self.top_n.map_or(usize::MAX, |n| n as usize));
        RerankResponse {
            id: String::new(),
            object: "list".to_owned(),
            model,
            results,
            usage: EmbeddingUsage::new(prompt_tokens),
        }
    }
}

/// Reads and checks a body.
///
/// # Errors
/// As [`ValidRerankRequest::parse`].
pub fn decode_rerank(body: &[u8]) -> Result<(PooledRequest, RerankEncoder), ApiError> {
    let valid = ValidRerankRequest::parse(body)?;
    let (model, priority) = (valid.model.clone(), valid.priority);
    let work = PooledWork::Rank { queries: vec![valid.query.clone()], documents: valid.documents.clone() };
    let work = PooledTask::Work(work);
    Ok((PooledRequest { model, work, prompt_param: "documents", priority }, RerankEncoder(valid)))
}

/// Writes the answer to a request for a ranking.
#[derive(Clone, Debug)]
pub struct RerankEncoder(ValidRerankRequest);

impl PooledEncoder for RerankEncoder {
    fn check(&self, _: u32, _: bool) -> Result<(), ApiError> {
        Ok(())
    }

    fn size(&self, _: u32) -> PooledSize {
        PooledSize::Bytes(self.0.answer_bytes())
    }

    fn whole(self, head: AnswerHead, output: PooledOutput) -> Result<Vec<u8>, EncodeError> {
        let score = |vector: &Vec<f32>| vector.first().copied().unwrap_or(f32::NAN);
        let scores: Vec<f32> = output.vectors.iter().map(score).collect();
        let answer = self.0.answer(head.model, &scores, output.prompt_tokens);
        serde_json::to_vec(&RerankResponse { id: format!("rerank-{}", head.id), ..answer })
    }
}

fn documents(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    let path = || fields.path("documents");
    let value = fields.get("documents").ok_or_else(|| missing(path(), "an array of strings is expected"))?;
    let items = value.as_array().ok_or_else(|| wrong_type(path(), "an array of strings", value))?;
    if items.is_empty() || items.len() > MAX_RERANK_DOCUMENTS {
        let n = items.len();
        return Err(wrong_value(path(), format_args!("must have 1 to {MAX_RERANK_DOCUMENTS} elements, not {n}")));
    }
    items.iter().enumerate().map(|(i, item)| document(format!("{}[{i}]", path()), item)).collect()
}

/// A string, or an object with a `text`.
fn document(path: String, item: &Value) -> Result<String, ApiError> {
    let text = match item {
        Value::String(text) => text.as_str(),
        Value::Object(object) => {
            let fields = Fields::new(object, format!("{path}."));
            fields.refuse(Place::Document)?;
            fields.string("text")?.ok_or_else(|| missing(fields.path("text"), "a string is expected"))?
        }
        other => return Err(wrong_type(path, "a string or an object with a `text`", other)),
    };
    if text.is_empty() { Err(wrong_value(path, "must not be empty")) } else { Ok(text.to_owned()) }
}

/// The answer to `/v1/rerank`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RerankResponse {
    /// `rerank-…`, as Cohere and vLLM have one.
    pub id: String,
    /// `list`.
    pub object: String,
    /// The served name.
    pub model: String,
    /// The best first.
    pub results: Vec<RerankResult>,
    /// The tokens.
    pub usage: EmbeddingUsage,
}

/// See [`RerankResponse`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RerankResult {
    /// Which document, in the order of the request.
    pub index: u32,
    /// The higher the better; what the numbers mean is the model's.
    pub relevance_score: f32,
    /// Where it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub document: Option<RerankDocument>,
}

/// See [`RerankResult`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RerankDocument {
    /// The text.
    pub text: String,
}

//! `/v1/score`: how near texts are to each other, pair by pair, in vLLM's shape: a reranker's score of each pair, and the cosine of
//! the angle between their vectors where a model embeds texts.

use gantry_core::{
    AnswerHead, ApiError, EncodeError, MAX_PROMPT_BYTES, PooledEncoder, PooledOutput, PooledRequest, PooledSize,
    PooledTask,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::fields::{Fields, missing, wrong_type, wrong_value};
use crate::limits::MAX_SCORE_PAIRS;
use crate::parameters::Place;
use crate::request::{model, parse_object, priority};
use crate::response::EmbeddingUsage;

/// About what a score takes on the wire.
const SCORE_BYTES: usize = 96;

/// Reads and checks a body: one text and several, or as many of each.
///
/// # Errors
/// Names the first parameter that is missing, of the wrong type or out of range.
pub fn decode_score(body: &[u8]) -> Result<(PooledRequest, ScoreEncoder), ApiError> {
    let object = parse_object(body)?;
    let fields = Fields::new(&object, "");
    fields.refuse(Place::Score)?;
    let (first, queries) = named(&fields, ["text_1", "queries"])?;
    let (second, documents) = named(&fields, ["text_2", "documents"])?;
    let is_one = |name| fields.get(name).is_some_and(Value::is_string);
    let names = [first, second].map(|name| Name { name, is_one: is_one(name) });
    if queries.len() != 1 && queries.len() != documents.len() {
        let (n, m) = (queries.len(), documents.len());
        let message = format_args!("must be one text, or as many as `{second}`, which has {m}, not {n}");
        return Err(wrong_value(first.to_owned(), message));
    }
    let encoder = ScoreEncoder { names, queries: queries.len(), pairs: documents.len() };
    let (model, priority) = (model(&fields)?, priority(&fields)?);
    Ok((
        PooledRequest { model, work: PooledTask::Score { queries, documents }, prompt_param: second, priority },
        encoder,
    ))
}

/// What one of two names is given for, and which.
fn named(fields: &Fields<'_>, names: [&'static str; 2]) -> Result<(&'static str, Vec<String>), ApiError> {
    let [name, other] = names;
    match (fields.get(name), fields.get(other)) {
        (Some(_), Some(_)) => {
            Err(wrong_value(other.to_owned(), format_args!("is another name of `{name}`: leave one of them out")))
        }
        (Some(value), None) => Ok((name, texts(fields, name, value)?)),
        (None, Some(value)) => Ok((other, texts(fields, other, value)?)),
        (None, None) => Err(missing(name.to_owned(), "a string or an array of strings is expected")),
    }
}

fn texts(fields: &Fields<'_>, name: &str, value: &Value) -> Result<Vec<String>, ApiError> {
    match value {
        Value::String(text) if text.is_empty() => Err(wrong_value(fields.path(name), "must not be empty")),
        Value::String(text) => Ok(vec![text.clone()]),
        Value::Array(_) => {
            let texts = fields.strings(name, 1..=MAX_SCORE_PAIRS, 1..=MAX_PROMPT_BYTES)?;
            texts.ok_or_else(|| missing(fields.path(name), "an array of strings is expected"))
        }
        other => Err(wrong_type(fields.path(name), "a string or an array of strings", other)),
    }
}

/// What the client calls the texts of one side.
#[derive(Clone, Copy, Debug)]
struct Name {
    name: &'static str,
    /// It is one text, not a list.
    is_one: bool,
}

impl Name {
    fn of(self, place: usize) -> String {
        if self.is_one { self.name.to_owned() } else { format!("{}[{place}]", self.name) }
    }
}

/// Writes the answer to a request for scores.
#[derive(Clone, Copy, Debug)]
pub struct ScoreEncoder {
    names: [Name; 2],
    queries: usize,
    pairs: usize,
}

impl ScoreEncoder {
    /// The score of each pair, of what a model gave: a score for each, or the vectors of all texts, the queries' first.
    fn scores(self, vectors: &[Vec<f32>]) -> Vec<f32> {
        let is_scored = vectors.len() == self.pairs;
        let score = |pair: usize| {
            if is_scored {
                return vectors[pair].first().copied().unwrap_or(f32::NAN);
            }
            let query = vectors.get(pair.min(self.queries - 1));
            query.zip(vectors.get(self.queries + pair)).map_or(f32::NAN, |(one, other)| cosine(one, other))
        };
        (0..self.pairs).map(score).map(|score| if score.is_finite() { score } else { f32::MIN }).collect()
    }
}

/// Of vectors of unit length.
fn cosine(one: &[f32], other: &[f32]) -> f32 {
    let product: f64 = one.iter().zip(other).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    product.clamp(-1.0, 1.0) as f32
}

impl PooledEncoder for ScoreEncoder {
    fn check(&self, _: u32, _: bool) -> Result<(), ApiError> {
        Ok(())
    }

    fn told_param(&self, param: &str) -> Option<String> {
        let [first, second] = self.names;
        let place = |list: &str| param.strip_prefix(list)?.strip_suffix(']')?.parse::<usize>().ok();
        if param == "query" {
            return Some(first.of(0));
        }
        if let Some(pair) = place("documents[") {
            return Some(second.of(pair));
        }
        let text = place("input[")?;
        Some(text.checked_sub(self.queries).map_or_else(|| first.of(text), |pair| second.of(pair)))
    }

    fn size(&self, _: u32) -> PooledSize {
        PooledSize::Bytes(self.pairs.saturating_mul(SCORE_BYTES))
    }

    fn whole(self, head: AnswerHead, output: PooledOutput) -> Result<Vec<u8>, EncodeError> {
        let data = (0..).zip(self.scores(&output.vectors)).map(|(index, score)| Score {
            index,
            object: "score".to_owned(),
            score,
        });
        serde_json::to_vec(&ScoreResponse {
            id: format!("score-{}", head.id),
            object: "list".to_owned(),
            created: head.created,
            model: head.model,
            data: data.collect(),
            usage: EmbeddingUsage::new(output.prompt_tokens),
        })
    }
}

/// The answer to `/v1/score`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ScoreResponse {
    /// `score-…`.
    pub id: String,
    /// `list`.
    pub object: String,
    /// Unix seconds.
    pub created: u64,
    /// The served name.
    pub model: String,
    /// One for each pair, in their order.
    pub data: Vec<Score>,
    /// The tokens.
    pub usage: EmbeddingUsage,
}

/// See [`ScoreResponse`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Score {
    /// Which pair.
    pub index: u32,
    /// `score`.
    pub object: String,
    /// The higher the nearer: what a reranker means by it is the model's; a cosine is from -1 to 1.
    pub score: f32,
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [Name; 2] = [Name { name: "text_1", is_one: true }, Name { name: "text_2", is_one: false }];

    #[test]
    fn a_text_that_is_refused_has_its_clients_name() {
        let encoder = ScoreEncoder { names: NAMES, queries: 1, pairs: 3 };
        let told = ["query", "documents[2]", "input[0]", "input[1]", "model"].map(|param| encoder.told_param(param));
        let told: Vec<&str> = told.iter().map(|told| told.as_deref().unwrap_or("-")).collect();
        assert_eq!(told, ["text_1", "text_2[2]", "text_1", "text_2[0]", "-"]);
    }

    #[test]
    fn scores_are_a_rerankers_or_the_cosines_of_vectors() {
        let scores =
            |queries, pairs, vectors: &[Vec<f32>]| ScoreEncoder { names: NAMES, queries, pairs }.scores(vectors);
        assert_eq!(scores(1, 2, &[vec![0.5], vec![f32::NAN]]), [0.5, f32::MIN]);
        let [east, north, west] = [vec![1.0, 0.0], vec![0.0, 1.0], vec![-1.0, 0.0]];
        let all = [east.clone(), east.clone(), north.clone(), west.clone()];
        assert_eq!(scores(1, 3, &all), [1.0, 0.0, -1.0]);
        assert_eq!(scores(2, 2, &[east.clone(), north, west, east]), [-1.0, 0.0]);
    }
}

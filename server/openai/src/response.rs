//! Answers: whole ones, chunks of streamed ones, and the list of models.
//!
//! Every type also reads back, for clients and tests. Fields that `OpenAI` always sends are always sent, as `null`
//! where there is nothing to say.

use gantry_core::{StopCause, ToolCallDelta};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::logprobs::{ChatLogprobs, PromptLogprobs, TextLogprobs};

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended it, or a stop string appeared.
    Stop,
    /// `max_tokens` or the context's end was reached.
    Length,
    /// The model ended it, and waits for what the tools that it calls return.
    ToolCalls,
}

/// Tokens of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Usage {
    /// Read.
    pub prompt_tokens: u32,
    /// Generated.
    pub completion_tokens: u32,
    /// Both.
    pub total_tokens: u32,
    /// Of those read.
    pub prompt_tokens_details: PromptTokensDetails,
    /// Of those generated; `None`: nothing can be thought there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionTokensDetails>,
}

/// See [`Usage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PromptTokensDetails {
    /// Needed no computation.
    pub cached_tokens: u32,
}

/// See [`Usage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CompletionTokensDetails {
    /// Of what the model thought.
    pub reasoning_tokens: u32,
}

/// What a caller asked for that ended an answer, as vLLM tells it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum StopReason {
    /// One of its stop tokens.
    Token(i32),
    /// One of its stop strings.
    Text(String),
}

impl StopReason {
    pub(crate) fn of(stop: Option<&StopCause>) -> Option<Self> {
        match stop? {
            StopCause::Text(text) => Some(Self::Text(text.clone())),
            StopCause::Token(token) => Some(Self::Token(*token)),
            StopCause::Line => None,
        }
    }
}

impl Usage {
    /// The sum is made here, so that it is right.
    #[must_use]
    pub fn new(prompt_tokens: u32, completion_tokens: u32, cached_tokens: u32) -> Self {
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens.saturating_add(completion_tokens),
            prompt_tokens_details: PromptTokensDetails { cached_tokens },
            completion_tokens_details: None,
        }
    }

    /// The same where so many of the tokens generated are of what was thought.
    #[must_use]
    pub fn with_reasoning(self, reasoning_tokens: u32) -> Self {
        Self { completion_tokens_details: Some(CompletionTokensDetails { reasoning_tokens }), ..self }
    }
}

/// Where the time of one answer went, for requests that ask for it with `timings`: llama-server's names where it has
/// them, times in milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Timings {
    /// From submission to the prompt's tokens: templating and tokenising.
    pub tokenize_ms: f64,
    /// From there to a sequence.
    pub queue_ms: f64,
    /// Tokens of the prompt that needed no computation.
    pub cache_n: u32,
    /// Tokens of the prompt that were computed.
    pub prompt_n: u32,
    /// From the sequence to the first token.
    pub prompt_ms: f64,
    /// Of those computed.
    pub prompt_per_token_ms: f64,
    /// Of those computed.
    pub prompt_per_second: f64,
    /// Tokens generated.
    pub predicted_n: u32,
    /// From the first token to the last.
    pub predicted_ms: f64,
    /// Of those after the first.
    pub predicted_per_token_ms: f64,
    /// Of those after the first.
    pub predicted_per_second: f64,
    /// The times between one token and the next.
    pub inter_token_ms: TimeHistogram,
}

/// Times, counted by bounds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TimeHistogram {
    /// The upper bounds, which belong to what is below; the last count has none.
    pub bounds_ms: Vec<f64>,
    /// How many fell into each, not cumulated: one more than there are bounds.
    pub counts: Vec<u32>,
}

/// Tokens of a request for embeddings or a ranking, which generates none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EmbeddingUsage {
    /// Read.
    pub prompt_tokens: u32,
    /// The same.
    pub total_tokens: u32,
}

impl EmbeddingUsage {
    /// So many.
    #[must_use]
    pub fn new(prompt_tokens: u32) -> Self {
        Self { prompt_tokens, total_tokens: prompt_tokens }
    }
}

/// The answer to `/v1/chat/completions`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ChatCompletion {
    /// `chatcmpl-…`.
    pub id: String,
    /// `chat.completion`.
    pub object: String,
    /// Unix seconds.
    pub created: u64,
    /// The served name.
    pub model: String,
    /// The version that answered.
    pub system_fingerprint: String,
    /// As many as were asked for.
    pub choices: Vec<ChatChoice>,
    /// The tokens of all of them, those of the prompt counted once.
    pub usage: Usage,
    /// Of each token of the prompt. `None`: not asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Vec<Option<PromptLogprobs>>>,
}

/// See [`ChatCompletion`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ChatChoice {
    /// Which one, from 0.
    pub index: u32,
    /// The answer.
    pub message: AssistantMessage,
    /// `None`: not asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// What of the caller's own ended it; `None`: nothing did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<StopReason>,
    /// `None`: not asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timings: Option<Timings>,
}

/// See [`ChatChoice`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct AssistantMessage {
    /// `assistant`.
    pub role: String,
    /// The text; `None` where tools are called and nothing is said.
    pub content: Option<String>,
    /// Never.
    pub refusal: Option<String>,
    /// What the model thought before, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The tools that it calls, if it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Vec<ToolCall>>,
}

/// See [`AssistantMessage`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ToolCall {
    /// What the answer to it repeats.
    pub id: String,
    /// `function`.
    #[serde(rename = "type")]
    pub kind: String,
    /// What is called.
    pub function: CalledFunction,
}

/// See [`ToolCall`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CalledFunction {
    /// The tool.
    pub name: String,
    /// JSON, unless the answer was cut off within it.
    pub arguments: String,
}

/// A piece of a streamed chat.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ChatChunk {
    /// The same in all chunks of an answer.
    pub id: String,
    /// `chat.completion.chunk`.
    pub object: String,
    /// Unix seconds, the same in all chunks.
    pub created: u64,
    /// The served name.
    pub model: String,
    /// The version that answers.
    pub system_fingerprint: String,
    /// One, or none in the chunk with the usage.
    pub choices: Vec<ChatChunkChoice>,
    /// `None`: not asked for. `Some(None)`: asked for and yet to come.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "present")]
    #[schemars(with = "Option<Usage>")]
    pub usage: Option<Option<Usage>>,
}

/// See [`ChatChunk`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ChatChunkChoice {
    /// Which one, from 0.
    pub index: u32,
    /// What is new.
    pub delta: Delta,
    /// `None`: not asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// In the last chunk with a choice.
    pub finish_reason: Option<FinishReason>,
    /// What of the caller's own ended it; `None`: nothing did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<StopReason>,
    /// There, too, where it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timings: Option<Timings>,
}

/// See [`ChatChunkChoice`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Delta {
    /// In the first chunk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// More text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// More of what the model thinks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// More of one call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Vec<ToolCallChunk>>,
}

/// See [`Delta`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ToolCallChunk {
    /// Which call, from 0.
    pub index: u32,
    /// In its first chunk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `function`, there.
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// What is called.
    pub function: FunctionChunk,
}

/// See [`ToolCallChunk`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FunctionChunk {
    /// The tool, in the first chunk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// More of the arguments.
    pub arguments: String,
}

impl ToolCallChunk {
    /// What is told of a call; `None`: nothing, as of its end.
    pub(crate) fn of(index: u32, delta: &ToolCallDelta) -> Option<Self> {
        let (id, kind, name, arguments) = match delta {
            ToolCallDelta::Begun { id, name } => {
                (Some(id.clone()), Some("function".to_owned()), Some(name.clone()), String::new())
            }
            ToolCallDelta::Arguments(more) => (None, None, None, more.clone()),
            ToolCallDelta::Ended => return None,
        };
        Some(Self { index, id, kind, function: FunctionChunk { name, arguments } })
    }
}

/// The answer to `/v1/completions`, and a chunk of it: both have this shape.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TextCompletion {
    /// `cmpl-…`.
    pub id: String,
    /// `text_completion`.
    pub object: String,
    /// Unix seconds.
    pub created: u64,
    /// The served name.
    pub model: String,
    /// The version that answered.
    pub system_fingerprint: String,
    /// As many as were asked for; one in a chunk, or none in the chunk with the usage.
    pub choices: Vec<TextChoice>,
    /// As in [`ChatChunk::usage`].
    #[serde(default, skip_serializing_if = "Option::is_none", with = "present")]
    #[schemars(with = "Option<Usage>")]
    pub usage: Option<Option<Usage>>,
}

/// See [`TextCompletion`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TextChoice {
    /// Which one, from 0.
    pub index: u32,
    /// The text.
    pub text: String,
    /// `None`: not asked for.
    pub logprobs: Option<TextLogprobs>,
    /// Of each token of the prompt. `None`: not asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Vec<Option<PromptLogprobs>>>,
    /// `None` in chunks before the last.
    pub finish_reason: Option<FinishReason>,
    /// What of the caller's own ended it; `None`: nothing did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<StopReason>,
    /// Where it was asked for, with the reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timings: Option<Timings>,
}

/// The answer to `/v1/models`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ModelList {
    /// `list`.
    pub object: String,
    /// What is served.
    pub data: Vec<Model>,
    /// Anthropic's, as the next two: whether there are more than these.
    pub has_more: bool,
    /// The first one's id.
    pub first_id: Option<String>,
    /// The last one's.
    pub last_id: Option<String>,
}

impl ModelList {
    /// All that there are.
    #[must_use]
    pub fn of(data: Vec<Model>) -> Self {
        let id = |model: Option<&Model>| model.map(|model| model.id.clone());
        let (first_id, last_id) = (id(data.first()), id(data.last()));
        Self { object: "list".to_owned(), data, has_more: false, first_id, last_id }
    }
}

/// One served model, in `OpenAI`'s form and Anthropic's, which have an address in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Model {
    /// The served name.
    pub id: String,
    /// `model`.
    pub object: String,
    /// Unix seconds: when it was loaded.
    pub created: u64,
    /// `gantry`.
    pub owned_by: String,
    /// `model`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The served name.
    pub display_name: String,
    /// The same time as `created`, as RFC 3339 writes it.
    pub created_at: String,
    /// `active`: where there is no other word for it, it is not shown.
    pub lifecycle: String,
    /// Tokens that a request may use, with its answer; vLLM's name.
    pub max_model_len: Option<u32>,
    /// Tokens that a prompt may have; Anthropic's name.
    pub max_input_tokens: Option<u32>,
    /// What it can be asked for: `completions`, `infill`, `chat`, `tools`, `reasoning`, `embeddings`, `rerank`, `score`.
    pub features: Vec<String>,
    /// What its file says of it; llama-server's name.
    pub meta: Option<ModelMeta>,
}

/// See [`Model`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ModelMeta {
    /// Tokens in its vocabulary.
    pub n_vocab: u32,
    /// Tokens that it was trained for.
    pub n_ctx_train: u32,
    /// Its weights.
    pub n_params: u64,
    /// Bytes that they take.
    pub size: u64,
}

/// Answers are counted to [`MAX_PROMPT_CHOICES`](crate::MAX_PROMPT_CHOICES).
pub(crate) fn wire_index(answer: usize) -> u32 {
    u32::try_from(answer).unwrap_or(u32::MAX)
}

/// An outer `None` is left out, an inner one is `null`.
mod present {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::Usage;

    pub(super) fn serialize<S: Serializer>(usage: &Option<Option<Usage>>, serializer: S) -> Result<S::Ok, S::Error> {
        usage.flatten().serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Option<Usage>>, D::Error> {
        Option::<Usage>::deserialize(from).map(Some)
    }
}

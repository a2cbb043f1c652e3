//! `POST /generate` and `/chat`: from a body to what is asked.

use gantry_core::{
    ApiError, Chat, GenerationParams, MAX_STOP_BYTES, MAX_STOP_STRINGS, MAX_TEMPERATURE, Message, Priority, Prompt,
    Role, TextRequest, from_objects, read_body, read_integer_of,
};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::answer::{ChatEncoder, GenerateEncoder};
use crate::limits::{DEFAULT_GENERATE_TOKENS, MAX_GENERATE_MESSAGES, MAX_GENERATE_MODEL_BYTES, MAX_GENERATE_TOKENS};

from_objects!(Body, GivenMessage);

/// What both addresses take; the one its `prompt`, the other its `messages`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[schemars(rename = "GenerateRequest")]
#[serde(remote = "Self", deny_unknown_fields)]
pub(crate) struct Body {
    #[schemars(length(min = 1))]
    pub(crate) prompt: Option<String>,
    #[schemars(length(min = 1, max = MAX_GENERATE_MESSAGES))]
    pub(crate) messages: Option<Vec<GivenMessage>>,
    #[schemars(range(min = 1, max = MAX_GENERATE_TOKENS))]
    #[serde(default, deserialize_with = "read_integer_of::<1, MAX_GENERATE_TOKENS, _>")]
    pub(crate) max_tokens: Option<u32>,
    #[schemars(range(min = 0, max = MAX_TEMPERATURE))]
    pub(crate) temperature: Option<f32>,
    #[schemars(range(max = 1), extend("exclusiveMinimum" = 0))]
    pub(crate) top_p: Option<f32>,
    #[schemars(length(max = MAX_STOP_STRINGS), inner(length(min = 1, max = MAX_STOP_BYTES)))]
    pub(crate) stop_sequences: Option<Vec<String>>,
    pub(crate) stream: Option<bool>,
    pub(crate) priority: Option<GivenPriority>,
    /// Whether each token is told with its log-probability, which streams have room for.
    pub(crate) logprobs: Option<bool>,
    pub(crate) seed: Option<u64>,
    #[schemars(length(max = MAX_GENERATE_MODEL_BYTES))]
    pub(crate) model: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "GenerateChatMessage")]
#[serde(remote = "Self", deny_unknown_fields)]
pub(crate) struct GivenMessage {
    pub(crate) role: Speaker,
    pub(crate) content: String,
}

#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[schemars(rename = "GenerateChatRole")]
#[serde(rename_all = "lowercase")]
pub(crate) enum Speaker {
    System,
    User,
    Assistant,
}

/// A priority by either spelling: clients that were generated from the names of its values send them as they are.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[schemars(rename = "GeneratePriority")]
pub(crate) enum GivenPriority {
    #[serde(rename = "low", alias = "Low")]
    Low,
    #[serde(rename = "normal", alias = "Normal")]
    Normal,
    #[serde(rename = "high", alias = "High")]
    High,
}

impl From<GivenPriority> for Priority {
    fn from(given: GivenPriority) -> Self {
        match given {
            GivenPriority::Low => Self::Low,
            GivenPriority::Normal => Self::Normal,
            GivenPriority::High => Self::High,
        }
    }
}

/// A body of `/generate`, for those who describe the server to programs.
pub fn generate_request_schema(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({"allOf": [generator.subschema_for::<Body>(), of("prompt", "string", "messages")]})
}

/// A body of `/chat`, likewise.
pub fn chat_request_schema(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({"allOf": [generator.subschema_for::<Body>(), of("messages", "array", "prompt")]})
}

/// That a body has this field, and not the other.
fn of(field: &str, kind: &str, other: &str) -> Value {
    json!({"required": [field], "properties": {field: {"type": kind}, other: {"type": "null"}}})
}

/// Reads and checks a body of `/generate`.
///
/// # Errors
/// Names the first field that is missing, of the wrong type, out of range or unknown.
pub fn decode_generate(body: &[u8]) -> Result<(TextRequest, GenerateEncoder), ApiError> {
    Ok((read_body::<Body>(body)?.generates()?, GenerateEncoder::default()))
}

/// Reads and checks a body of `/chat`.
///
/// # Errors
/// As [`decode_generate`].
pub fn decode_chat(body: &[u8]) -> Result<(TextRequest, ChatEncoder), ApiError> {
    Ok((read_body::<Body>(body)?.chats()?, ChatEncoder::default()))
}

impl Body {
    /// Checks what `/generate` is asked.
    pub(crate) fn generates(mut self) -> Result<TextRequest, ApiError> {
        if self.messages.is_some() {
            return Err(ApiError::wrong_value("messages", "are for /chat; /generate takes a `prompt`"));
        }
        let prompt = self.prompt.take().ok_or_else(|| ApiError::missing("prompt", "a text is expected"))?;
        if prompt.is_empty() {
            return Err(ApiError::wrong_value("prompt", "must not be empty"));
        }
        self.asks(Prompt::Text(prompt), "prompt")
    }

    /// Checks what `/chat` is asked.
    pub(crate) fn chats(mut self) -> Result<TextRequest, ApiError> {
        if self.prompt.is_some() {
            return Err(ApiError::wrong_value("prompt", "is for /generate; /chat takes `messages`"));
        }
        let messages = self.messages.take().ok_or_else(|| ApiError::missing("messages", "an array is expected"))?;
        if messages.is_empty() || messages.len() > MAX_GENERATE_MESSAGES {
            let n = messages.len();
            let message = format_args!("must have 1 to {MAX_GENERATE_MESSAGES} messages, not {n}");
            return Err(ApiError::wrong_value("messages", message));
        }
        let message = |GivenMessage { role, content }| {
            let role = match role {
                Speaker::System => Role::System,
                Speaker::User => Role::User,
                Speaker::Assistant => Role::Assistant,
            };
            Message::text(role, content)
        };
        let chat = Chat { messages: messages.into_iter().map(message).collect(), ..Chat::default() };
        self.asks(Prompt::chat(chat), "messages")
    }

    fn asks(self, prompt: Prompt, prompt_param: &'static str) -> Result<TextRequest, ApiError> {
        let max_tokens = self.max_tokens.unwrap_or(DEFAULT_GENERATE_TOKENS);
        if !(1..=MAX_GENERATE_TOKENS).contains(&max_tokens) {
            let message = format_args!("must be from 1 to {MAX_GENERATE_TOKENS}, not {max_tokens}");
            return Err(ApiError::wrong_value("max_tokens", message));
        }
        let temperature = self.temperature.unwrap_or(1.0);
        if !(0.0..=MAX_TEMPERATURE).contains(&temperature) {
            let message = format_args!("must be from 0 to {MAX_TEMPERATURE}, not {temperature}");
            return Err(ApiError::wrong_value("temperature", message));
        }
        let top_p = self.top_p.unwrap_or(1.0);
        if !(f32::MIN_POSITIVE..=1.0).contains(&top_p) {
            return Err(ApiError::wrong_value("top_p", format_args!("must be above 0 and up to 1, not {top_p}")));
        }
        let stop = self.stop_sequences.unwrap_or_default();
        check_stop(&stop)?;
        let model = meant(self.model)?;
        let params = GenerationParams {
            max_tokens: Some(max_tokens),
            temperature,
            top_p,
            stop,
            seed: self.seed,
            logprobs: self.logprobs.unwrap_or(false).then_some(0),
            priority: self.priority.map_or_else(Priority::default, Priority::from),
            ..GenerationParams::default()
        };
        let is_streamed = self.stream.unwrap_or(false);
        Ok(TextRequest {
            model,
            prompts: vec![prompt],
            prompt_param,
            params,
            choices: 1,
            best_of: 1,
            is_streamed,
            conversation: None,
        })
    }
}

/// The model that is meant, if any is.
pub(crate) fn meant(model: Option<String>) -> Result<Option<String>, ApiError> {
    let model = model.filter(|model| !model.is_empty());
    match model.as_ref().map(String::len).filter(|bytes| *bytes > MAX_GENERATE_MODEL_BYTES) {
        None => Ok(model),
        Some(bytes) => {
            let message = format_args!("must have at most {MAX_GENERATE_MODEL_BYTES} bytes, not {bytes}");
            Err(ApiError::wrong_value("model", message))
        }
    }
}

fn check_stop(stop: &[String]) -> Result<(), ApiError> {
    if stop.len() > MAX_STOP_STRINGS {
        let n = stop.len();
        let message = format_args!("must have at most {MAX_STOP_STRINGS} strings, not {n}");
        return Err(ApiError::wrong_value("stop_sequences", message));
    }
    match stop.iter().position(|stop| stop.is_empty() || stop.len() > MAX_STOP_BYTES) {
        None => Ok(()),
        Some(i) => {
            let message = format_args!("must have 1 to {MAX_STOP_BYTES} bytes, not {}", stop[i].len());
            Err(ApiError::wrong_value(format!("stop_sequences[{i}]"), message))
        }
    }
}

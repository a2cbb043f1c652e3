//! Calls: from a message to what is asked, by the checks of the same body as JSON.

use gantry_core::{ApiError, Priority, TextRequest};

use super::answer::{CallEncoder, CallEnd};
use super::{frame, proto};
use crate::answer::{Chatted, Generated};
use crate::request::{Body, GivenMessage, GivenPriority, Speaker, meant};

/// Texts to embed, of which nothing is checked but who goes first and which model is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EmbeddingsCall {
    /// The texts.
    pub input: Vec<String>,
    /// Who goes first.
    pub priority: Priority,
    /// The model that is meant; `None`: whichever is served.
    pub model: Option<String>,
}

/// Reads and checks a call of `Generate` or `GenerateStream`.
///
/// # Errors
/// Names the first field that is missing or out of range.
pub fn decode_generate(
    body: &[u8],
    is_streamed: bool,
    end: &CallEnd,
) -> Result<(TextRequest, CallEncoder<Generated>), ApiError> {
    let message: proto::GenerateRequest = frame::message(body)?;
    let asked = Body {
        prompt: Some(message.prompt),
        max_tokens: message.max_tokens,
        temperature: message.temperature,
        top_p: message.top_p,
        stop_sequences: Some(message.stop_sequences),
        stream: Some(is_streamed),
        priority: priority(message.priority)?,
        logprobs: Some(message.logprobs),
        seed: message.seed,
        model: Some(message.model),
        ..Body::default()
    };
    Ok((asked.generates()?, CallEncoder::new(end)))
}

/// Reads and checks a call of `Chat` or `ChatStream`.
///
/// # Errors
/// As [`decode_generate`].
pub fn decode_chat(
    body: &[u8],
    is_streamed: bool,
    end: &CallEnd,
) -> Result<(TextRequest, CallEncoder<Chatted>), ApiError> {
    let message: proto::ChatRequest = frame::message(body)?;
    let messages = message.messages.into_iter().enumerate().map(said).collect::<Result<_, _>>()?;
    let asked = Body {
        messages: Some(messages),
        max_tokens: message.max_tokens,
        temperature: message.temperature,
        top_p: message.top_p,
        stop_sequences: Some(message.stop_sequences),
        stream: Some(is_streamed),
        priority: priority(message.priority)?,
        logprobs: Some(message.logprobs),
        seed: message.seed,
        model: Some(message.model),
        ..Body::default()
    };
    Ok((asked.chats()?, CallEncoder::new(end)))
}

/// Reads a call of `Embeddings`.
///
/// # Errors
/// Names the first field that is out of range.
pub fn decode_embeddings(body: &[u8]) -> Result<EmbeddingsCall, ApiError> {
    let proto::EmbeddingsRequest { input, priority: given, model } = frame::message(body)?;
    let priority = priority(given)?.map_or_else(Priority::default, Priority::from);
    Ok(EmbeddingsCall { input, priority, model: meant(Some(model))? })
}

fn said((i, message): (usize, proto::ChatMessage)) -> Result<GivenMessage, ApiError> {
    use proto::chat_message::Role;
    let role = match Role::try_from(message.role) {
        Ok(Role::System) => Speaker::System,
        Ok(Role::User) => Speaker::User,
        Ok(Role::Assistant) => Speaker::Assistant,
        Ok(Role::Unspecified) | Err(_) => {
            return Err(ApiError::wrong_value(format!("messages[{i}].role"), "must be system, user or assistant"));
        }
    };
    Ok(GivenMessage { role, content: message.content })
}

fn priority(given: i32) -> Result<Option<GivenPriority>, ApiError> {
    match proto::Priority::try_from(given) {
        Ok(proto::Priority::Unspecified) => Ok(None),
        Ok(proto::Priority::Low) => Ok(Some(GivenPriority::Low)),
        Ok(proto::Priority::Normal) => Ok(Some(GivenPriority::Normal)),
        Ok(proto::Priority::High) => Ok(Some(GivenPriority::High)),
        Err(_) => Err(ApiError::wrong_value("priority", format_args!("must be low, normal or high, not {given}"))),
    }
}

//! An answer as it comes whole.

use std::marker::PhantomData;

use gantry_core::{Answer, AnswerHead, AnswerOutput, EncodeError, FinishReason, StopCause, TextEncoder, Usage};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::stream::TokenStream;

/// What an answer's text is part of.
pub trait TextOf: Copy + Send + 'static {
    /// One of the `choices`.
    type Choice: Serialize;
    /// The `object` of the answer.
    const OBJECT: &'static str;

    /// The first choice, and only one.
    fn choice(text: String, finish_reason: Ended) -> Self::Choice;
}

/// An answer to `/generate`.
#[derive(Clone, Copy, Debug)]
pub struct Generated;

/// An answer to `/chat`.
#[derive(Clone, Copy, Debug)]
pub struct Chatted;

/// Writes the answer to `/generate`.
pub type GenerateEncoder = Encoder<Generated>;
/// Writes the answer to `/chat`.
pub type ChatEncoder = Encoder<Chatted>;

/// Writes an answer whose text is part of this.
#[derive(Clone, Copy, Debug)]
pub struct Encoder<T>(PhantomData<T>);

impl<T> Default for Encoder<T> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "GenerateFinishReason")]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// The model ended it.
    Stop,
    /// `max_tokens` were generated, or the context is full.
    Length,
    /// One of `stop_sequences` appeared.
    StopSequence,
}

impl Ended {
    pub(crate) fn of(reason: FinishReason, stop: Option<&StopCause>) -> Self {
        match (reason, stop.and_then(StopCause::text)) {
            (FinishReason::Length, _) => Self::Length,
            (_, Some(_)) => Self::StopSequence,
            (FinishReason::Stop | FinishReason::Cancelled, None) => Self::Stop,
        }
    }
}

/// Tokens of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "GenerateUsage")]
pub struct Counted {
    /// Of its prompt.
    pub prompt_tokens: u32,
    /// Of its answer.
    pub completion_tokens: u32,
    /// Of both.
    pub total_tokens: u32,
}

impl From<Usage> for Counted {
    fn from(Usage { prompt_tokens, completion_tokens, .. }: Usage) -> Self {
        Self { prompt_tokens, completion_tokens, total_tokens: prompt_tokens.saturating_add(completion_tokens) }
    }
}

/// An answer as this protocol has it.
#[derive(Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "AnswerOf{C}")]
struct Told<C> {
    id: String,
    object: String,
    /// Unix seconds.
    created: u64,
    model: String,
    choices: Vec<C>,
    usage: Counted,
}

/// See [`Generated`].
#[derive(Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "GenerateChoice")]
pub struct GenerateChoice {
    text: String,
    index: u32,
    finish_reason: Ended,
}

/// See [`Chatted`].
#[derive(Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "GenerateChatChoice")]
pub struct ChatChoice {
    index: u32,
    message: Said,
    finish_reason: Ended,
}

#[derive(Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "GenerateChatSaid")]
struct Said {
    role: String,
    content: String,
}

impl TextOf for Generated {
    type Choice = GenerateChoice;
    const OBJECT: &'static str = "text_completion";

    fn choice(text: String, finish_reason: Ended) -> GenerateChoice {
        GenerateChoice { text, index: 0, finish_reason }
    }
}

impl TextOf for Chatted {
    type Choice = ChatChoice;
    const OBJECT: &'static str = "chat.completion";

    fn choice(text: String, finish_reason: Ended) -> ChatChoice {
        ChatChoice { index: 0, message: Said { role: "assistant".to_owned(), content: text }, finish_reason }
    }
}

/// The answer to `/generate`, for those who describe the server to programs.
pub fn generate_schema(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<Told<GenerateChoice>>()
}

/// The answer to `/chat`, likewise.
pub fn chat_schema(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<Told<ChatChoice>>()
}

/// An answer's id as a UUID with its hyphens; one that is none as it is.
pub(crate) fn id(head: &AnswerHead) -> String {
    Uuid::try_parse(&head.id).map_or_else(|_| head.id.clone(), |id| id.to_string())
}

impl<T: TextOf> TextEncoder for Encoder<T> {
    type Stream = TokenStream;

    fn whole(self, head: AnswerHead, answers: Vec<Answer>, usage: Usage) -> Result<Vec<u8>, EncodeError> {
        let choice = |Answer { output: AnswerOutput { text, .. }, reason, stop, .. }| {
            T::choice(text, Ended::of(reason, stop.as_ref()))
        };
        serde_json::to_vec(&Told {
            id: id(&head),
            object: T::OBJECT.to_owned(),
            created: head.created,
            model: head.model,
            choices: answers.into_iter().map(choice).collect(),
            usage: usage.into(),
        })
    }

    fn stream(self, _: AnswerHead, _: usize) -> Result<TokenStream, EncodeError> {
        Ok(TokenStream::default())
    }
}

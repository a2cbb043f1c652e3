//! The two shapes of an answer, whole and in chunks: chats and texts.

use std::time::{SystemTime, UNIX_EPOCH};

use gantry_engine::FinishReason as EngineReason;
use gantry_openai::{
    AssistantMessage, ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, Delta, FinishReason, TextChoice,
    TextCompletion, Usage, sse_event,
};
use serde_json::Value;

use crate::metrics::Route;
use crate::version::{Completion, Version};

/// Which shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Chat,
    Text,
}

impl Shape {
    pub(super) fn route(self) -> Route {
        match self {
            Self::Chat => Route::Chat,
            Self::Text => Route::Completions,
        }
    }

    /// The parameter that holds the prompt.
    pub(super) fn prompt_param(self) -> &'static str {
        match self {
            Self::Chat => "messages",
            Self::Text => "prompt",
        }
    }
}

/// What all pieces of one answer have in common.
#[derive(Clone)]
pub(super) struct Envelope {
    shape: Shape,
    id: String,
    created: u64,
    model: String,
    fingerprint: String,
    include_usage: bool,
}

impl Envelope {
    pub(super) fn new(shape: Shape, version: &Version, include_usage: bool) -> Self {
        let prefix = match shape {
            Shape::Chat => "chatcmpl",
            Shape::Text => "cmpl",
        };
        Self {
            shape,
            id: format!("{prefix}-{}", uuid::Uuid::new_v4().simple()),
            created: unix_seconds(),
            model: version.spec().served_name.clone(),
            fingerprint: version.spec().name.clone(),
            include_usage,
        }
    }

    /// The whole answer.
    pub(super) fn whole(&self, completion: Completion) -> Result<Value, serde_json::Error> {
        let usage = usage_of(completion.usage);
        let reason = reason_of(completion.reason);
        match self.shape {
            Shape::Chat => serde_json::to_value(ChatCompletion {
                id: self.id.clone(),
                object: "chat.completion".to_owned(),
                created: self.created,
                model: self.model.clone(),
                system_fingerprint: self.fingerprint.clone(),
                choices: vec![ChatChoice {
                    index: 0,
                    message: AssistantMessage { role: "assistant".to_owned(), content: completion.text, refusal: None },
                    logprobs: None,
                    finish_reason: reason,
                }],
                usage,
            }),
            Shape::Text => serde_json::to_value(self.text(Some((completion.text, Some(reason))), Some(Some(usage)))),
        }
    }

    /// The event that opens a stream; texts have none.
    pub(super) fn opening(&self) -> Result<Option<String>, serde_json::Error> {
        match self.shape {
            Shape::Chat => {
                let delta = Delta { role: Some("assistant".to_owned()), content: Some(String::new()) };
                sse_event(&self.chunk(Some((delta, None)), None)).map(Some)
            }
            Shape::Text => Ok(None),
        }
    }

    /// More text.
    pub(super) fn delta(&self, text: String) -> Result<String, serde_json::Error> {
        match self.shape {
            Shape::Chat => sse_event(&self.chunk(Some((Delta { role: None, content: Some(text) }, None)), None)),
            Shape::Text => sse_event(&self.text(Some((text, None)), self.no_usage_yet())),
        }
    }

    /// The end, and the usage where it was asked for.
    pub(super) fn closing(
        &self,
        reason: EngineReason,
        usage: gantry_engine::Usage,
    ) -> Result<String, serde_json::Error> {
        let reason = Some(reason_of(reason));
        let usage = Some(Some(usage_of(usage)));
        let (mut end, last) = match self.shape {
            Shape::Chat => {
                (sse_event(&self.chunk(Some((Delta::default(), reason)), None))?, sse_event(&self.chunk(None, usage))?)
            }
            Shape::Text => (
                sse_event(&self.text(Some((String::new(), reason)), self.no_usage_yet()))?,
                sse_event(&self.text(None, usage))?,
            ),
        };
        if self.include_usage {
            end.push_str(&last);
        }
        Ok(end)
    }

    fn no_usage_yet(&self) -> Option<Option<Usage>> {
        self.include_usage.then_some(None)
    }

    fn chunk(&self, choice: Option<(Delta, Option<FinishReason>)>, usage: Option<Option<Usage>>) -> ChatChunk {
        let choice =
            choice.map(|(delta, finish_reason)| ChatChunkChoice { index: 0, delta, logprobs: None, finish_reason });
        ChatChunk {
            id: self.id.clone(),
            object: "chat.completion.chunk".to_owned(),
            created: self.created,
            model: self.model.clone(),
            system_fingerprint: self.fingerprint.clone(),
            choices: choice.into_iter().collect(),
            usage: usage.or(self.no_usage_yet()),
        }
    }

    fn text(&self, choice: Option<(String, Option<FinishReason>)>, usage: Option<Option<Usage>>) -> TextCompletion {
        let choice = choice.map(|(text, finish_reason)| TextChoice { index: 0, text, logprobs: None, finish_reason });
        TextCompletion {
            id: self.id.clone(),
            object: "text_completion".to_owned(),
            created: self.created,
            model: self.model.clone(),
            system_fingerprint: self.fingerprint.clone(),
            choices: choice.into_iter().collect(),
            usage,
        }
    }
}

fn usage_of(usage: gantry_engine::Usage) -> Usage {
    Usage::new(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
}

/// A cancelled generation has nobody left to be told so; what it has is complete as far as it goes.
fn reason_of(reason: EngineReason) -> FinishReason {
    match reason {
        EngineReason::Stop | EngineReason::Cancelled => FinishReason::Stop,
        EngineReason::Length => FinishReason::Length,
    }
}

fn unix_seconds() -> u64 {
    // A clock before 1970 is told as 1970.
    SystemTime::now().duration_since(UNIX_EPOCH).map(|d| d.as_secs()).unwrap_or_default()
}

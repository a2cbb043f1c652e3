//! The two shapes of an answer, whole and in chunks: chats and texts.

use std::time::{SystemTime, UNIX_EPOCH};

use bytes::{BufMut, Bytes, BytesMut};
use gantry_core::{FinishReason as EngineReason, ITL_BUCKETS_MS, Timings as EngineTimings, TokenLogprob};
use gantry_openai::{
    ApiError, AssistantMessage, ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatLogprobs, ChunkHead,
    ChunkTemplate, Common, Delta, FinishReason, SSE_DONE, TextChoice, TextCompletion, TextLogprobs, TextOffset,
    TimeHistogram, Timings, TokenChance, Usage, write_sse_event,
};

use super::choices::{Gathered, sum_of};
use crate::limits::STREAM_BUFFER_BYTES;
use crate::metrics::Route;
use crate::version::Version;

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
    /// How many of the likeliest tokens are told; `None`: no log-probabilities.
    logprobs: Option<u32>,
    /// Whether it is told where the time went.
    timings: bool,
    /// Answers to each prompt.
    of_each_prompt: usize,
}

impl Envelope {
    pub(super) fn new(shape: Shape, version: &Version, common: &Common) -> Self {
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
            include_usage: common.streaming.include_usage,
            logprobs: common.params.logprobs,
            timings: common.timings,
            of_each_prompt: common.choices as usize,
        }
    }

    /// The tokens of all answers together.
    pub(super) fn sum_of(&self, usages: &[gantry_core::Usage]) -> gantry_core::Usage {
        sum_of(usages, self.of_each_prompt)
    }

    /// The whole answer, as JSON.
    pub(super) fn whole(&self, choices: Vec<Gathered>) -> Result<Vec<u8>, serde_json::Error> {
        let usages: Vec<_> = choices.iter().map(|choice| choice.usage).collect();
        let usage = usage_of(self.sum_of(&usages));
        match self.shape {
            Shape::Chat => {
                let choice = |(index, choice): (u32, Gathered)| ChatChoice {
                    index,
                    logprobs: self.logprobs.map(|_| chat_logprobs(&choice.logprobs)),
                    finish_reason: reason_of(choice.reason),
                    timings: self.timings(&choice.timings, &choice.usage),
                    message: AssistantMessage { role: "assistant".to_owned(), content: choice.text, refusal: None },
                };
                serde_json::to_vec(&ChatCompletion {
                    id: self.id.clone(),
                    object: "chat.completion".to_owned(),
                    created: self.created,
                    model: self.model.clone(),
                    system_fingerprint: self.fingerprint.clone(),
                    choices: (0..).zip(choices).map(choice).collect(),
                    usage,
                })
            }
            Shape::Text => {
                let choice = |(index, choice): (u32, Gathered)| TextChoice {
                    index,
                    logprobs: self.logprobs.map(|n| text_logprobs(&choice.logprobs, n, &mut TextOffset::default())),
                    finish_reason: Some(reason_of(choice.reason)),
                    timings: self.timings(&choice.timings, &choice.usage),
                    text: choice.text,
                };
                serde_json::to_vec(&self.text((0..).zip(choices).map(choice).collect(), Some(Some(usage))))
            }
        }
    }

    /// What writes the same as a stream of events.
    pub(super) fn events(self, choices: usize) -> Result<EventWriter, serde_json::Error> {
        let head = ChunkHead {
            id: &self.id,
            created: self.created,
            model: &self.model,
            system_fingerprint: &self.fingerprint,
        };
        let template = match self.shape {
            Shape::Chat => ChunkTemplate::chat(head, self.include_usage)?,
            Shape::Text => ChunkTemplate::text(head, self.include_usage)?,
        };
        Ok(EventWriter {
            envelope: self,
            template,
            buffer: BytesMut::with_capacity(STREAM_BUFFER_BYTES),
            choices: vec![ChoiceState::default(); choices],
        })
    }

    /// Where an answer's time went, for those who want to know.
    fn timings(&self, timings: &EngineTimings, usage: &gantry_core::Usage) -> Option<Timings> {
        self.timings.then(|| timings_of(timings, usage))
    }

    fn no_usage_yet(&self) -> Option<Option<Usage>> {
        self.include_usage.then_some(None)
    }

    fn chunk(&self, choices: Vec<ChatChunkChoice>, usage: Option<Option<Usage>>) -> ChatChunk {
        ChatChunk {
            id: self.id.clone(),
            object: "chat.completion.chunk".to_owned(),
            created: self.created,
            model: self.model.clone(),
            system_fingerprint: self.fingerprint.clone(),
            choices,
            usage,
        }
    }

    fn text(&self, choices: Vec<TextChoice>, usage: Option<Option<Usage>>) -> TextCompletion {
        TextCompletion {
            id: self.id.clone(),
            object: "text_completion".to_owned(),
            created: self.created,
            model: self.model.clone(),
            system_fingerprint: self.fingerprint.clone(),
            choices,
            usage,
        }
    }
}

/// Writes the events of one answer into a buffer, from which they are taken as often as there is somebody to send them.
///
/// The buffer's memory is shared with the pieces taken from it, so a token costs no allocation of its own.
pub(super) struct EventWriter {
    envelope: Envelope,
    template: ChunkTemplate,
    buffer: BytesMut,
    choices: Vec<ChoiceState>,
}

#[derive(Clone, Copy, Default)]
struct ChoiceState {
    offset: TextOffset,
    /// Once it has ended.
    usage: Option<gantry_core::Usage>,
}

impl EventWriter {
    /// Bytes that were not taken.
    pub(super) fn pending(&self) -> usize {
        self.buffer.len()
    }

    /// What was written since the last time.
    pub(super) fn take(&mut self) -> Bytes {
        self.buffer.split().freeze()
    }

    /// What opens a stream; texts have nothing.
    pub(super) fn opening(&mut self) -> Result<(), serde_json::Error> {
        if self.envelope.shape == Shape::Text {
            return Ok(());
        }
        for index in (0..).take(self.choices.len()) {
            let delta = Delta { role: Some("assistant".to_owned()), content: Some(String::new()) };
            let choice = ChatChunkChoice { index, delta, logprobs: None, finish_reason: None, timings: None };
            let chunk = self.envelope.chunk(vec![choice], self.envelope.no_usage_yet());
            write_sse_event((&mut self.buffer).writer(), &chunk)?;
        }
        Ok(())
    }

    /// More text of a choice.
    pub(super) fn delta(
        &mut self,
        choice: usize,
        text: &str,
        logprobs: &[TokenLogprob],
    ) -> Result<(), serde_json::Error> {
        let index = wire_index(choice);
        let Some(state) = self.choices.get_mut(choice) else { return Ok(()) };
        let out = (&mut self.buffer).writer();
        match (self.envelope.logprobs, self.envelope.shape) {
            (None, _) => self.template.write(out, index, text, None::<&ChatLogprobs>),
            (Some(_), Shape::Chat) => self.template.write(out, index, text, Some(&chat_logprobs(logprobs))),
            (Some(n), Shape::Text) => {
                self.template.write(out, index, text, Some(&text_logprobs(logprobs, n, &mut state.offset)))
            }
        }
    }

    /// The end of a choice. Returns the tokens of all of them once the last has ended.
    pub(super) fn finish(
        &mut self,
        choice: usize,
        reason: EngineReason,
        usage: gantry_core::Usage,
        timings: &EngineTimings,
    ) -> Result<Option<gantry_core::Usage>, serde_json::Error> {
        let (index, finish_reason) = (wire_index(choice), Some(reason_of(reason)));
        if let Some(state) = self.choices.get_mut(choice) {
            state.usage = Some(usage);
        }
        let timings = self.envelope.timings(timings, &usage);
        let usage = self.envelope.no_usage_yet();
        let out = (&mut self.buffer).writer();
        match self.envelope.shape {
            Shape::Chat => {
                let delta = Delta::default();
                let choice = ChatChunkChoice { index, delta, logprobs: None, finish_reason, timings };
                write_sse_event(out, &self.envelope.chunk(vec![choice], usage))?;
            }
            Shape::Text => {
                let choice = TextChoice { index, text: String::new(), logprobs: None, finish_reason, timings };
                write_sse_event(out, &self.envelope.text(vec![choice], usage))?;
            }
        }
        let ended: Option<Vec<_>> = self.choices.iter().map(|choice| choice.usage).collect();
        let Some(usages) = ended else { return Ok(None) };
        let sum = self.envelope.sum_of(&usages);
        self.closing(sum)?;
        Ok(Some(sum))
    }

    /// The usage where it was asked for, and the end of the stream.
    fn closing(&mut self, sum: gantry_core::Usage) -> Result<(), serde_json::Error> {
        if self.envelope.include_usage {
            let usage = Some(Some(usage_of(sum)));
            let out = (&mut self.buffer).writer();
            match self.envelope.shape {
                Shape::Chat => write_sse_event(out, &self.envelope.chunk(Vec::new(), usage))?,
                Shape::Text => write_sse_event(out, &self.envelope.text(Vec::new(), usage))?,
            }
        }
        self.buffer.put_slice(SSE_DONE.as_bytes());
        Ok(())
    }

    /// The error after which the stream ends without `[DONE]`.
    pub(super) fn broken(&mut self, error: &ApiError) {
        // An error object of strings can always be written.
        let _ = write_sse_event((&mut self.buffer).writer(), &error.to_response());
    }
}

/// Choices are counted to `MAX_PROMPT_CHOICES`.
fn wire_index(choice: usize) -> u32 {
    u32::try_from(choice).unwrap_or(u32::MAX)
}

fn chance(token: &gantry_core::TokenChance) -> TokenChance<'_> {
    TokenChance { bytes: &token.bytes, logprob: token.logprob }
}

fn chat_logprobs(tokens: &[TokenLogprob]) -> ChatLogprobs {
    let mut told = ChatLogprobs::default();
    for token in tokens {
        told.push(chance(&token.token), token.top.iter().map(chance));
    }
    told
}

fn text_logprobs(tokens: &[TokenLogprob], top: u32, offset: &mut TextOffset) -> TextLogprobs {
    let mut told = TextLogprobs::new(top);
    for token in tokens {
        told.push(chance(&token.token), token.top.iter().map(chance), offset);
    }
    told
}

fn usage_of(usage: gantry_core::Usage) -> Usage {
    Usage::new(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
}

fn timings_of(timings: &EngineTimings, usage: &gantry_core::Usage) -> Timings {
    // To the microsecond: what is finer is noise, and long to write.
    let round = |number: f64| (number * 1e3).round() / 1e3;
    let rates = |ms: f64, tokens: u32| {
        let tokens = f64::from(tokens);
        if ms > 0.0 && tokens > 0.0 { (round(ms / tokens), round(tokens / ms * 1e3)) } else { (0.0, 0.0) }
    };
    let prompt_n = usage.prompt_tokens.saturating_sub(usage.cached_tokens);
    let (prompt_per_token_ms, prompt_per_second) = rates(timings.prefill_ms, prompt_n);
    // The first token's time is the prompt's.
    let (predicted_per_token_ms, predicted_per_second) =
        rates(timings.decode_ms, usage.completion_tokens.saturating_sub(1));
    Timings {
        tokenize_ms: round(timings.tokenize_ms),
        queue_ms: round(timings.queue_ms),
        cache_n: usage.cached_tokens,
        prompt_n,
        prompt_ms: round(timings.prefill_ms),
        prompt_per_token_ms,
        prompt_per_second,
        predicted_n: usage.completion_tokens,
        predicted_ms: round(timings.decode_ms),
        predicted_per_token_ms,
        predicted_per_second,
        inter_token_ms: TimeHistogram { bounds_ms: ITL_BUCKETS_MS.to_vec(), counts: timings.itl.counts.to_vec() },
    }
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

#[cfg(test)]
#[path = "answer_tests.rs"]
mod tests;

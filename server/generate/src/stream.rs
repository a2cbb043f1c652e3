//! An answer as it comes piece by piece: an event for each piece, and one that ends it, well or not. Which ones there are is said
//! once; how they are put into bytes is a [`Wire`]'s.

use bytes::{BufMut, BytesMut};
use gantry_core::{ApiError, EncodeError, GenerationEvent, StreamEncoder, Usage};
use serde::Serialize;

use crate::answer::{Counted, Ended};

/// An event, as the JSON of its `data`.
#[derive(Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Event<'a> {
    /// More text.
    Token {
        /// Whole characters: the text of a token, or of several where one is no character by itself, or they came together.
        token: &'a str,
        /// How many such events there were before.
        index: u32,
        /// The natural logarithm of its probability: of several tokens the sum of theirs.
        #[serde(skip_serializing_if = "Option::is_none")]
        logprob: Option<f32>,
    },
    /// The end of an answer that went well.
    Done { finish_reason: Ended, usage: Counted },
    /// The end before that.
    Error { message: &'a str, code: &'a str },
}

/// How events are put into bytes.
pub trait Wire: Send + 'static {
    /// Whether comments may stand between them.
    const TAKES_COMMENTS: bool;

    /// Writes one.
    ///
    /// # Errors
    /// See [`EncodeError`].
    fn write(&self, event: &Event<'_>, out: &mut BytesMut) -> Result<(), EncodeError>;

    /// The answer has failed so, of which an event tells, too.
    fn failed(&self, error: &ApiError) {
        let _ = error;
    }
}

/// As server-sent events.
#[derive(Clone, Copy, Debug, Default)]
pub struct ServerSent;

/// Writes the events of an answer.
#[derive(Debug, Default)]
pub struct TokenStream<W = ServerSent> {
    told: u32,
    ended: Option<Ended>,
    wire: W,
}

impl<W> TokenStream<W> {
    pub(crate) fn of(wire: W) -> Self {
        Self { told: 0, ended: None, wire }
    }
}

impl Wire for ServerSent {
    const TAKES_COMMENTS: bool = true;

    fn write(&self, event: &Event<'_>, out: &mut BytesMut) -> Result<(), EncodeError> {
        out.put_slice(b"data: ");
        // JSON escapes line breaks, so one `data:` line holds all of it.
        serde_json::to_writer(out.writer(), event)?;
        out.put_slice(b"\n\n");
        Ok(())
    }
}

impl<W: Wire> StreamEncoder for TokenStream<W> {
    const TAKES_COMMENTS: bool = W::TAKES_COMMENTS;

    fn open(&mut self, _: &mut BytesMut) -> Result<(), EncodeError> {
        Ok(())
    }

    fn event(&mut self, _: usize, event: &GenerationEvent, out: &mut BytesMut) -> Result<(), EncodeError> {
        match event {
            GenerationEvent::Text { text, logprobs, .. } if !(text.is_empty() && logprobs.is_empty()) => {
                let logprob = (!logprobs.is_empty()).then(|| logprobs.iter().map(|one| one.token.logprob).sum());
                let index = self.told;
                self.told = self.told.saturating_add(1);
                self.wire.write(&Event::Token { token: text, index, logprob }, out)
            }
            GenerationEvent::Finished { reason, stop, .. } => {
                self.ended = Some(Ended::of(*reason, stop.as_ref()));
                Ok(())
            }
            GenerationEvent::Text { .. }
            | GenerationEvent::Started { .. }
            | GenerationEvent::Reasoning { .. }
            | GenerationEvent::ToolCall { .. }
            | GenerationEvent::Echo { .. }
            | GenerationEvent::Prompt(_)
            | GenerationEvent::Failed(_) => Ok(()),
        }
    }

    fn close(&mut self, usage: Usage, out: &mut BytesMut) -> Result<(), EncodeError> {
        let finish_reason = self.ended.unwrap_or(Ended::Stop);
        self.wire.write(&Event::Done { finish_reason, usage: usage.into() }, out)
    }

    fn fail(&mut self, error: &ApiError, out: &mut BytesMut) {
        // An object of strings can always be written.
        let _ = self.wire.write(&Event::Error { message: &error.message, code: error.code.as_str() }, out);
        self.wire.failed(error);
    }
}

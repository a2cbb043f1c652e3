//! An answer as it comes piece by piece: an event for each piece, and one that ends it, well or not.

use bytes::{BufMut, BytesMut};
use gantry_core::{ApiError, EncodeError, GenerationEvent, StreamEncoder, Usage};
use serde::Serialize;

use crate::answer::{Counted, Ended};

/// An event, as the JSON of its `data`.
#[derive(Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Event<'a> {
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

/// Writes the events of an answer.
#[derive(Debug, Default)]
pub struct TokenStream {
    told: u32,
    ended: Option<Ended>,
}

fn write(out: &mut BytesMut, event: &Event<'_>) -> Result<(), EncodeError> {
    out.put_slice(b"data: ");
    // JSON escapes line breaks, so one `data:` line holds all of it.
    serde_json::to_writer(out.writer(), event)?;
    out.put_slice(b"\n\n");
    Ok(())
}

impl StreamEncoder for TokenStream {
    fn open(&mut self, _: &mut BytesMut) -> Result<(), EncodeError> {
        Ok(())
    }

    fn event(&mut self, _: usize, event: &GenerationEvent, out: &mut BytesMut) -> Result<(), EncodeError> {
        match event {
            GenerationEvent::Text { text, logprobs, .. } if !(text.is_empty() && logprobs.is_empty()) => {
                let logprob = (!logprobs.is_empty()).then(|| logprobs.iter().map(|one| one.token.logprob).sum());
                let index = self.told;
                self.told = self.told.saturating_add(1);
                write(out, &Event::Token { token: text, index, logprob })
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
        write(out, &Event::Done { finish_reason, usage: usage.into() })
    }

    fn fail(&mut self, error: &ApiError, out: &mut BytesMut) {
        // An object of strings can always be written.
        let _ = write(out, &Event::Error { message: &error.message, code: error.code.as_str() });
    }
}

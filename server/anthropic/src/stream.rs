//! An answer as it comes piece by piece: events of blocks, each of which is begun, goes on and is ended before the next.

use bytes::{BufMut, BytesMut};
use gantry_core::{AnswerHead, ApiError, EncodeError, GenerationEvent, StopCause, StreamEncoder, ToolCallDelta, Usage};
use serde::Serialize;
use serde_json::{Value, json};

use crate::answer::{Told, id, stop_reason, usage_of};
use crate::error::error_body;

/// What the block is that goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Open {
    Thinking,
    Text,
    Call,
}

/// Writes the events of an answer.
#[derive(Debug)]
pub struct MessageStream {
    head: AnswerHead,
    has_begun: bool,
    open: Option<Open>,
    /// Blocks that were begun.
    blocks: usize,
    has_called: bool,
}

impl MessageStream {
    pub(crate) fn new(head: AnswerHead) -> Self {
        Self { head, has_begun: false, open: None, blocks: 0, has_called: false }
    }

    /// The event that begins a message, which says how many tokens it answers.
    fn begin(&mut self, prompt_tokens: u32, out: &mut BytesMut) -> Result<(), EncodeError> {
        if std::mem::replace(&mut self.has_begun, true) {
            return Ok(());
        }
        let message = Told {
            id: id(&self.head),
            kind: "message",
            role: "assistant",
            model: &self.head.model,
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            usage: usage_of(Usage { prompt_tokens, ..Usage::default() }),
        };
        write(out, "message_start", &json!({"type": "message_start", "message": message}))
    }

    /// Begins a block of this kind, unless it is the one that goes on.
    fn open(&mut self, kind: Open, block: impl FnOnce() -> Value, out: &mut BytesMut) -> Result<(), EncodeError> {
        self.begin(0, out)?;
        if self.open == Some(kind) && kind != Open::Call {
            return Ok(());
        }
        self.close_block(out)?;
        (self.open, self.blocks) = (Some(kind), self.blocks + 1);
        let start = json!({"type": "content_block_start", "index": self.blocks - 1, "content_block": block()});
        write(out, "content_block_start", &start)
    }

    fn delta(&self, delta: &Value, out: &mut BytesMut) -> Result<(), EncodeError> {
        let index = self.blocks.saturating_sub(1);
        write(out, "content_block_delta", &json!({"type": "content_block_delta", "index": index, "delta": delta}))
    }

    fn close_block(&mut self, out: &mut BytesMut) -> Result<(), EncodeError> {
        if self.open.take().is_none() {
            return Ok(());
        }
        let index = self.blocks - 1;
        write(out, "content_block_stop", &json!({"type": "content_block_stop", "index": index}))
    }
}

fn write<T: Serialize>(out: &mut BytesMut, event: &str, data: &T) -> Result<(), EncodeError> {
    out.put_slice(b"event: ");
    out.put_slice(event.as_bytes());
    // JSON escapes line breaks, so one `data:` line holds all of it.
    out.put_slice(b"\ndata: ");
    serde_json::to_writer(out.writer(), data)?;
    out.put_slice(b"\n\n");
    Ok(())
}

impl StreamEncoder for MessageStream {
    fn open(&mut self, _: &mut BytesMut) -> Result<(), EncodeError> {
        // What begins a message counts its prompt, of which nothing is known yet.
        Ok(())
    }

    fn event(&mut self, _: usize, event: &GenerationEvent, out: &mut BytesMut) -> Result<(), EncodeError> {
        match event {
            GenerationEvent::Started { prompt_tokens, .. } => self.begin(*prompt_tokens, out),
            GenerationEvent::Text { text, .. } if text.is_empty() => Ok(()),
            GenerationEvent::Text { text, .. } => {
                self.open(Open::Text, || json!({"type": "text", "text": ""}), out)?;
                self.delta(&json!({"type": "text_delta", "text": text}), out)
            }
            GenerationEvent::Reasoning { text, .. } => {
                let block = || json!({"type": "thinking", "thinking": "", "signature": ""});
                self.open(Open::Thinking, block, out)?;
                self.delta(&json!({"type": "thinking_delta", "thinking": text}), out)
            }
            GenerationEvent::ToolCall { delta, .. } => match delta {
                ToolCallDelta::Begun { id, name } => {
                    self.has_called = true;
                    let block = || json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                    self.open(Open::Call, block, out)
                }
                ToolCallDelta::Arguments(more) => {
                    self.delta(&json!({"type": "input_json_delta", "partial_json": more}), out)
                }
                ToolCallDelta::Ended if self.open == Some(Open::Call) => self.close_block(out),
                ToolCallDelta::Ended => Ok(()),
            },
            GenerationEvent::Finished { reason, stop, usage, .. } => {
                self.begin(usage.prompt_tokens, out)?;
                self.close_block(out)?;
                let stop_string = stop.as_ref().and_then(StopCause::text);
                let stop = stop_reason(*reason, stop_string, self.has_called);
                let delta = json!({"stop_reason": stop, "stop_sequence": stop_string});
                let delta = json!({"type": "message_delta", "delta": delta, "usage": usage_of(*usage)});
                write(out, "message_delta", &delta)
            }
            GenerationEvent::Echo { .. } | GenerationEvent::Prompt(_) | GenerationEvent::Failed(_) => Ok(()),
        }
    }

    fn close(&mut self, _: Usage, out: &mut BytesMut) -> Result<(), EncodeError> {
        write(out, "message_stop", &json!({"type": "message_stop"}))
    }

    fn fail(&mut self, error: &ApiError, out: &mut BytesMut) {
        // An object of strings can always be written.
        let _ = write(out, "error", &error_body(error, None));
    }
}

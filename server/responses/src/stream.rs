//! An answer as it comes piece by piece: numbered events of items, each of which is begun, goes on and is ended before the next.
//!
//! The protocol repeats each item whole when it ends, and all of them at the end, so that what has come is kept here.

use bytes::{BufMut, BytesMut};
use gantry_core::{AnswerHead, ApiError, EncodeError, GenerationEvent, StreamEncoder, ToolCall, ToolCallDelta, Usage};
use serde::Serialize;
use serde_json::{Value, json};

use crate::answer::{Asked, Status, call, failure, is_cut, item_id, message, open_call_status, part, reasoning, told};

/// The item that goes on, with what it has come to.
#[derive(Debug)]
enum Open {
    Thought(String),
    Text(String),
    Call(ToolCall),
}

/// Writes the events of an answer.
#[derive(Debug)]
pub struct ResponseStream {
    head: AnswerHead,
    asked: Asked,
    /// Events that were written.
    sequence: u64,
    open: Option<Open>,
    /// Those that have ended.
    items: Vec<Value>,
    status: Status,
    error: Option<Value>,
    /// Once all of it came.
    usage: Option<Usage>,
}

impl ResponseStream {
    pub(crate) fn new(head: AnswerHead, asked: Asked) -> Self {
        let status = if asked.background { Status::Queued } else { Status::InProgress };
        Self { head, asked, sequence: 0, open: None, items: Vec::new(), status, error: None, usage: None }
    }

    /// Its client does not want the rest.
    ///
    /// # Errors
    /// See [`EncodeError`].
    pub fn cancel(&mut self, out: &mut BytesMut) -> Result<(), EncodeError> {
        self.status = Status::Cancelled;
        self.end(Status::Incomplete, out)
    }

    /// Writes an event of these fields.
    fn write(&mut self, kind: &str, mut event: Value, out: &mut BytesMut) -> Result<(), EncodeError> {
        if let Some(fields) = event.as_object_mut() {
            fields.insert("type".to_owned(), kind.into());
            fields.insert("sequence_number".to_owned(), self.sequence.into());
        }
        self.sequence += 1;
        out.put_slice(b"event: ");
        out.put_slice(kind.as_bytes());
        // JSON escapes line breaks, so one `data:` line holds all of it.
        out.put_slice(b"\ndata: ");
        serde_json::to_writer((&mut *out).writer(), &event)?;
        out.put_slice(b"\n\n");
        Ok(())
    }

    /// The response as far as it has come.
    ///
    /// # Errors
    /// See [`EncodeError`].
    pub fn response(&self) -> Result<Vec<u8>, EncodeError> {
        serde_json::to_vec(&self.so_far())
    }

    fn so_far(&self) -> impl Serialize {
        told(&self.head, &self.asked, self.status, self.error.as_ref(), &self.items, self.usage)
    }

    /// An event that tells the response as far as it is.
    fn whole(&mut self, kind: &str, out: &mut BytesMut) -> Result<(), EncodeError> {
        let response = serde_json::to_value(self.so_far())?;
        self.write(kind, json!({"response": response}), out)
    }

    /// The id of the item that goes on, which is the next to end.
    fn id(&self, open: &Open) -> String {
        let kind = match open {
            Open::Thought(_) => "rs",
            Open::Text(_) => "msg",
            Open::Call(_) => "fc",
        };
        item_id(kind, &self.head, self.items.len())
    }

    /// Begins an item; a call that goes on is left as it is.
    fn begin(&mut self, open: Open, out: &mut BytesMut) -> Result<(), EncodeError> {
        let status = if self.is_in_call() { open_call_status(true) } else { Status::Completed };
        self.end(status, out)?;
        let (id, index) = (self.id(&open), self.items.len());
        let (item, part) = match &open {
            Open::Thought(_) => {
                (reasoning(&id, "", "in_progress"), Some(json!({"type": "reasoning_text", "text": ""})))
            }
            Open::Text(_) => (message(&id, None, "in_progress"), Some(part(""))),
            Open::Call(of) => (call(&id, of, "in_progress"), None),
        };
        self.write("response.output_item.added", json!({"output_index": index, "item": item}), out)?;
        if let Some(part) = part {
            let added = json!({"item_id": id, "output_index": index, "content_index": 0, "part": part});
            self.write("response.content_part.added", added, out)?;
        }
        self.open = Some(open);
        Ok(())
    }

    fn is_in_call(&self) -> bool {
        matches!(self.open, Some(Open::Call(_)))
    }

    /// Ends the item that goes on, if one does.
    fn end(&mut self, status: Status, out: &mut BytesMut) -> Result<(), EncodeError> {
        let Some(open) = self.open.take() else { return Ok(()) };
        let (id, index, status) = (self.id(&open), self.items.len(), status.word());
        let place = |more: Value| {
            let mut place = json!({"item_id": id, "output_index": index});
            if let (Some(fields), Value::Object(more)) = (place.as_object_mut(), more) {
                fields.extend(more);
            }
            place
        };
        let item = match open {
            Open::Thought(text) => {
                let whole = json!({"type": "reasoning_text", "text": text});
                self.write("response.reasoning_text.done", place(json!({"content_index": 0, "text": text})), out)?;
                self.write("response.content_part.done", place(json!({"content_index": 0, "part": whole})), out)?;
                reasoning(&id, &text, status)
            }
            Open::Text(text) => {
                let done = json!({"content_index": 0, "text": text, "logprobs": []});
                self.write("response.output_text.done", place(done), out)?;
                self.write("response.content_part.done", place(json!({"content_index": 0, "part": part(&text)})), out)?;
                message(&id, Some(&text), status)
            }
            Open::Call(of) => {
                let done = json!({"arguments": of.arguments, "name": of.name});
                self.write("response.function_call_arguments.done", place(done), out)?;
                call(&id, &of, status)
            }
        };
        self.write("response.output_item.done", json!({"output_index": index, "item": item}), out)?;
        self.items.push(item);
        Ok(())
    }

    /// More of the item that goes on.
    fn delta(&mut self, more: &str, out: &mut BytesMut) -> Result<(), EncodeError> {
        let Some(mut open) = self.open.take() else { return Ok(()) };
        let mut delta = json!({"item_id": self.id(&open), "output_index": self.items.len(), "delta": more});
        let kind = match &mut open {
            Open::Thought(text) => {
                text.push_str(more);
                delta["content_index"] = json!(0);
                "response.reasoning_text.delta"
            }
            Open::Text(text) => {
                text.push_str(more);
                (delta["content_index"], delta["logprobs"]) = (json!(0), json!([]));
                "response.output_text.delta"
            }
            Open::Call(call) => {
                call.arguments.push_str(more);
                "response.function_call_arguments.delta"
            }
        };
        self.open = Some(open);
        self.write(kind, delta, out)
    }
}

impl StreamEncoder for ResponseStream {
    fn open(&mut self, out: &mut BytesMut) -> Result<(), EncodeError> {
        self.whole("response.created", out)?;
        self.whole("response.in_progress", out)
    }

    fn event(&mut self, _: usize, event: &GenerationEvent, out: &mut BytesMut) -> Result<(), EncodeError> {
        match event {
            GenerationEvent::Text { text, .. } if text.is_empty() => Ok(()),
            GenerationEvent::Text { text, .. } => {
                if !matches!(self.open, Some(Open::Text(_))) {
                    self.begin(Open::Text(String::new()), out)?;
                }
                self.delta(text, out)
            }
            GenerationEvent::Reasoning { text, .. } => {
                if !matches!(self.open, Some(Open::Thought(_))) {
                    self.begin(Open::Thought(String::new()), out)?;
                }
                self.delta(text, out)
            }
            GenerationEvent::ToolCall { delta, .. } => match delta {
                ToolCallDelta::Begun { id, name } => {
                    let call = ToolCall { id: id.clone(), name: name.clone(), arguments: String::new() };
                    self.begin(Open::Call(call), out)
                }
                ToolCallDelta::Arguments(more) => self.delta(more, out),
                ToolCallDelta::Ended if self.is_in_call() => self.end(Status::Completed, out),
                ToolCallDelta::Ended => Ok(()),
            },
            GenerationEvent::Finished { reason, stop, .. } => {
                self.status = Status::of(*reason);
                let is_cut = is_cut(*reason, stop.as_ref());
                self.end(if self.is_in_call() { open_call_status(is_cut) } else { self.status }, out)
            }
            GenerationEvent::Started { .. } => {
                self.status = Status::InProgress;
                Ok(())
            }
            GenerationEvent::Echo { .. } | GenerationEvent::Prompt(_) | GenerationEvent::Failed(_) => Ok(()),
        }
    }

    fn close(&mut self, usage: Usage, out: &mut BytesMut) -> Result<(), EncodeError> {
        let kind = if self.status == Status::Incomplete { "response.incomplete" } else { "response.completed" };
        self.usage = Some(usage);
        self.whole(kind, out)
    }

    fn fail(&mut self, error: &ApiError, out: &mut BytesMut) {
        (self.status, self.error) = (Status::Failed, Some(failure(error)));
        // An object of strings can always be written.
        let _ = self.whole("response.failed", out);
    }

    fn kept(&self) -> Option<Result<Vec<u8>, EncodeError>> {
        Some(self.response())
    }
}

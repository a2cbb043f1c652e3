//! The events of a streamed answer that come once a token, written from a template.
//!
//! All that an answer's chunks have in common is escaped and joined once; a token then costs a few copies into a buffer
//! that its caller keeps, and no allocation. The bytes are those that [`ChatChunk`](crate::ChatChunk) and
//! [`TextCompletion`](crate::TextCompletion) would be written as, which a property test holds.

use std::io::Write;

use gantry_core::AnswerHead;
use serde::Serialize;

/// What all chunks of an answer say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkHead<'a> {
    /// `chatcmpl-…` or `cmpl-…`.
    pub id: &'a str,
    /// Unix seconds.
    pub created: u64,
    /// The served name.
    pub model: &'a str,
    /// The version that answers.
    pub system_fingerprint: &'a str,
}

impl<'a> ChunkHead<'a> {
    pub(crate) fn of(head: &'a AnswerHead) -> Self {
        Self { id: &head.id, created: head.created, model: &head.model, system_fingerprint: &head.version }
    }
}

/// Writes the chunks of one answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkTemplate {
    /// Up to the choice's index.
    head: Vec<u8>,
    /// From the index to the text.
    before_text: &'static [u8],
    /// From the text to the log-probabilities.
    after_text: &'static [u8],
    /// From there to the end.
    tail: &'static [u8],
}

impl ChunkTemplate {
    /// Of a chat; `usage` says whether a chunk with the usage is to come, which the others then announce.
    ///
    /// # Errors
    /// Only if memory cannot be had.
    pub fn chat(head: ChunkHead<'_>, usage: bool) -> Result<Self, serde_json::Error> {
        Ok(Self {
            head: joined("chat.completion.chunk", head)?,
            before_text: b",\"delta\":{\"content\":",
            after_text: b"},\"logprobs\":",
            tail: tail(usage),
        })
    }

    /// Of a text.
    ///
    /// # Errors
    /// Only if memory cannot be had.
    pub fn text(head: ChunkHead<'_>, usage: bool) -> Result<Self, serde_json::Error> {
        Ok(Self {
            head: joined("text_completion", head)?,
            before_text: b",\"text\":",
            after_text: b",\"logprobs\":",
            tail: tail(usage),
        })
    }

    /// Writes the event that brings more text to a choice; `logprobs` is of the shape that belongs to the answer.
    ///
    /// # Errors
    /// `out` takes no more.
    pub fn write(
        &self,
        mut out: impl Write,
        index: u32,
        text: &str,
        logprobs: Option<&impl Serialize>,
    ) -> Result<(), serde_json::Error> {
        let io = serde_json::Error::io;
        out.write_all(&self.head).map_err(io)?;
        serde_json::to_writer(&mut out, &index)?;
        out.write_all(self.before_text).map_err(io)?;
        serde_json::to_writer(&mut out, text)?;
        out.write_all(self.after_text).map_err(io)?;
        serde_json::to_writer(&mut out, &logprobs)?;
        out.write_all(self.tail).map_err(io)
    }
}

fn joined(object: &str, head: ChunkHead<'_>) -> Result<Vec<u8>, serde_json::Error> {
    let ChunkHead { id, created, model, system_fingerprint } = head;
    let (id, model, fingerprint) = (quoted(id)?, quoted(model)?, quoted(system_fingerprint)?);
    Ok(format!(
        "data: {{\"id\":{id},\"object\":\"{object}\",\"created\":{created},\"model\":{model},\
         \"system_fingerprint\":{fingerprint},\"choices\":[{{\"index\":"
    )
    .into_bytes())
}

fn quoted(text: &str) -> Result<String, serde_json::Error> {
    serde_json::to_string(text)
}

fn tail(usage: bool) -> &'static [u8] {
    if usage { b",\"finish_reason\":null}],\"usage\":null}\n\n" } else { b",\"finish_reason\":null}]}\n\n" }
}

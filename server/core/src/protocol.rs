//! What a protocol is to who carries its requests out: it has read what is asked, and writes what comes of it.
//!
//! Absent: how bytes are read, which each protocol does in its own way, and where they come from and go to.

use bytes::BytesMut;

use crate::api_error::ApiError;
use crate::event::{AnswerOutput, FinishReason, GenerationEvent, PooledOutput, ShownPrompt, StopCause, Timings, Usage};
use crate::order::Priority;
use crate::params::GenerationParams;
use crate::request::{PooledTask, Prompt};

/// Why an answer cannot be written: only for want of memory.
pub type EncodeError = serde_json::Error;

/// Text that is asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct TextRequest {
    /// The model asked for; `None`: whichever is served.
    pub model: Option<String>,
    /// From what; at least one.
    pub prompts: Vec<Prompt>,
    /// What the client calls them.
    pub prompt_param: &'static str,
    /// How, for the first answer to each.
    pub params: GenerationParams,
    /// Answers to each of them, at least one.
    pub choices: u32,
    /// How many to choose them from: those whose tokens are likeliest in the mean, which needs their log-probabilities.
    pub best_of: u32,
    /// Whether each piece is to be sent as it comes.
    pub is_streamed: bool,
    /// What the client calls the conversation that it belongs to, or its user; `None`: nothing.
    pub conversation: Option<String>,
}

/// Vectors or scores that are asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct PooledRequest {
    /// The model asked for; `None`: whichever is served.
    pub model: Option<String>,
    /// Of what.
    pub work: PooledTask,
    /// What the client calls its texts.
    pub prompt_param: &'static str,
    /// Who goes first.
    pub priority: Priority,
}

/// What all pieces of one answer have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnswerHead {
    /// Names the answer; no other one has it.
    pub id: String,
    /// Unix seconds.
    pub created: u64,
    /// The served name.
    pub model: String,
    /// The version that answers.
    pub version: String,
}

/// A whole answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// What it says and does.
    pub output: AnswerOutput,
    /// Why it ended.
    pub reason: FinishReason,
    /// What of the caller's own ended it, if something did.
    pub stop: Option<StopCause>,
    /// Its tokens.
    pub usage: Usage,
    /// Where its time went.
    pub timings: Timings,
}

/// Writes the answers to one request for text.
pub trait TextEncoder: Send + 'static {
    /// What writes them piece by piece.
    type Stream: StreamEncoder;

    /// Writes them whole, in their order; `usage` is the tokens of all of them.
    ///
    /// # Errors
    /// See [`EncodeError`].
    fn whole(self, head: AnswerHead, answers: Vec<Answer>, usage: Usage) -> Result<Vec<u8>, EncodeError>;

    /// Writes them as they come, so many of them.
    ///
    /// # Errors
    /// See [`EncodeError`].
    fn stream(self, head: AnswerHead, answers: usize) -> Result<Self::Stream, EncodeError>;
}

/// Writes the answers to one request as events, each piece at the end of a buffer.
pub trait StreamEncoder: Send + 'static {
    /// Whether comments as server-sent events have them may stand between its pieces, which tell that a silent stream is alive.
    const TAKES_COMMENTS: bool = true;

    /// What opens a stream.
    ///
    /// # Errors
    /// See [`EncodeError`].
    fn open(&mut self, out: &mut BytesMut) -> Result<(), EncodeError>;

    /// What one of the answers, counted from 0, has come to. Of its failure [`Self::fail`] is told.
    ///
    /// # Errors
    /// See [`EncodeError`].
    fn event(&mut self, answer: usize, event: &GenerationEvent, out: &mut BytesMut) -> Result<(), EncodeError>;

    /// The end, when all of them have ended well; `usage` is the tokens of all of them.
    ///
    /// # Errors
    /// See [`EncodeError`].
    fn close(&mut self, usage: Usage, out: &mut BytesMut) -> Result<(), EncodeError>;

    /// The end before that.
    fn fail(&mut self, error: &ApiError, out: &mut BytesMut);

    /// The answer as far as it has come, whole, for whoever keeps it; `None`: of this protocol nothing is kept.
    fn kept(&self) -> Option<Result<Vec<u8>, EncodeError>> {
        None
    }
}

/// Writes what a prompt is to the model, for a request that asks for no more.
pub trait PromptEncoder: Send + 'static {
    /// Writes it.
    ///
    /// # Errors
    /// See [`EncodeError`].
    fn whole(self, prompt: ShownPrompt) -> Result<Vec<u8>, EncodeError>;
}

/// How large an answer with vectors or scores is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PooledSize {
    /// It is so many numbers, which nobody sent.
    Numbers(usize),
    /// It is about so many bytes, most of which came with the request.
    Bytes(usize),
}

/// Writes the answer to one request for vectors or scores.
pub trait PooledEncoder: Send + 'static {
    /// Whether the model's vectors, of so many numbers, are what is asked for; `may_cut`: their beginnings are vectors, too.
    ///
    /// # Errors
    /// What is asked for instead.
    fn check(&self, width: u32, may_cut: bool) -> Result<(), ApiError>;

    /// What the client calls a text that a model refuses as `param` (`query`, `documents[2]`, `input[3]`); `None`: that.
    fn told_param(&self, param: &str) -> Option<String> {
        let _ = param;
        None
    }

    /// How large it is where vectors have so many numbers.
    fn size(&self, width: u32) -> PooledSize;

    /// Writes it.
    ///
    /// # Errors
    /// See [`EncodeError`].
    fn whole(self, head: AnswerHead, output: PooledOutput) -> Result<Vec<u8>, EncodeError>;
}

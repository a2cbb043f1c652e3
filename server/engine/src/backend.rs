//! The seam between scheduling and a model: what the scheduler and the tokenising pool need, and no more.
//!
//! Two implementations: [`llama`], and in tests a scripted model that runs thousands of steps a second and checks every
//! batch it is given.

pub(crate) mod llama;
#[cfg(test)]
pub(crate) mod scripted;

use crate::error::RequestError;

/// A token id.
pub(crate) type Token = i32;

/// What a backend allows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BackendLimits {
    /// Sequences, with ids from 0.
    pub(crate) sequences: u32,
    /// Tokens that one sequence may hold.
    pub(crate) positions: u32,
    /// Tokens in one batch.
    pub(crate) batch_tokens: u32,
    /// KV cells over all sequences.
    pub(crate) total_cells: u64,
}

/// One token of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchEntry {
    pub(crate) token: Token,
    pub(crate) position: u32,
    pub(crate) sequence: u32,
    /// Whether its logits are wanted.
    pub(crate) output: bool,
}

/// Why a batch was not decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BackendError {
    /// No room in the KV cache; nothing was decoded.
    NoKvCells,
    /// What the sequences of the batch hold is unknown.
    Failed(String),
}

/// A model's state and its computation; one owner.
pub(crate) trait Backend: Send {
    fn limits(&self) -> BackendLimits;
    /// Decodes a batch, whose entries stand in the order of their sequences.
    fn decode(&mut self, batch: &[BatchEntry]) -> Result<(), BackendError>;
    /// The logits after the entry at `index` of the last batch.
    fn logits(&mut self, index: usize) -> Option<&[f32]>;
    /// Drops all that a sequence holds.
    fn clear_sequence(&mut self, sequence: u32);
}

/// A chat as the template renders it.
pub(crate) struct RenderedChat {
    pub(crate) prompt: String,
    pub(crate) stops: Vec<String>,
}

/// A model's text side: immutable, shared by the tokenising pool and the scheduler.
pub(crate) trait Vocabulary: Send + Sync {
    fn size(&self) -> u32;
    /// Tokens of a prompt, special tokens in it parsed, BOS before it where the model wants one.
    fn tokenize(&self, text: &str) -> Result<Vec<Token>, RequestError>;
    fn render(&self, messages_json: &str) -> Result<RenderedChat, RequestError>;
    /// Appends the bytes of a token; nothing for a special one.
    fn piece(&self, token: Token, out: &mut Vec<u8>);
    /// The tokens that end a generation.
    fn end_tokens(&self) -> &[Token];
}

//! The seam between scheduling and a model: what the scheduler and the tokenising pool need, and no more.
//!
//! Two implementations: [`llama`], and in tests a scripted model that runs thousands of steps a second and checks every
//! batch it is given.

pub(crate) mod llama;
#[cfg(test)]
pub(crate) mod scripted;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use gantry_core::Chat;
use gantry_llama::{AnswerForm, CallGrammar, InfillTokens, Lead, SpecialTokens, TokenTexts};

use crate::error::RequestError;

/// A token id.
pub(crate) type Token = i32;

/// Tokens whose state is saved as one chunk: what the prefix cache shares and drops.
pub(crate) const BLOCK_TOKENS: u32 = crate::cache::BLOCK_TOKENS as u32;

/// What a backend allows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BackendLimits {
    /// Sequences, with ids from 0.
    pub(crate) sequences: u32,
    /// Tokens that one sequence may hold.
    pub(crate) positions: u32,
    /// Tokens in one batch.
    pub(crate) batch_tokens: u32,
    /// Rows of logits in one batch, but for those below.
    pub(crate) outputs: u32,
    /// Rows of logits, beside those, after tokens of prompts that are followed by another one.
    pub(crate) scored_rows: u32,
    /// KV cells over all sequences.
    pub(crate) total_cells: u64,
    /// Whether all sequences draw from one pool of cells and copies share them; otherwise each has its own.
    pub(crate) unified: bool,
    /// Tokens that the prompt may have which is read beside a pool, see [`Backend::stage`]; `None`: all are read in it.
    pub(crate) stage: Option<u32>,
    /// Whether attention is computed in one pass; otherwise as matrix products.
    pub(crate) flash_attention: bool,
    /// Rows that cost little more than one of them, where they are computed together: what is left over of whole groups is
    /// dear. 1 where there is nothing of the kind.
    pub(crate) group_rows: u32,
    /// Whether a sequence can be cut, copied in part, saved and restored. Where the model's state cannot (recurrent
    /// ones), nothing but the clearing of whole sequences is asked of it.
    pub(crate) reusable: bool,
    /// Bytes of one token's state; 0 where it cannot be saved.
    pub(crate) token_bytes: u64,
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

/// Why something was not done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BackendError {
    /// No room in the KV cache; nothing was decoded.
    #[error("there is no room in the KV cache")]
    NoKvCells,
    /// What the sequences concerned hold is unknown.
    #[error("{0}")]
    Failed(String),
}

/// The state of consecutive tokens of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chunk<'a> {
    pub(crate) tokens: u32,
    pub(crate) bytes: &'a [u8],
}

/// A model's state and its computation; one owner.
pub(crate) trait Backend: Send {
    fn limits(&self) -> BackendLimits;
    /// Ends the batch that is computed when it is raised, with [`BackendError::Failed`], and all that follow until it is
    /// lowered. `None`: a batch cannot be ended.
    fn interrupt(&self) -> Option<Arc<AtomicBool>>;
    /// Bytes of main memory that computing, and cells that are used for the first time, will take beside what is taken now,
    /// at most.
    fn untouched_bytes(&self) -> u64;
    /// Decodes a batch, whose entries stand in the order of their sequences; the last of these may come first, and the
    /// first last. In a pool those of one sequence may come last wherever it lies.
    fn decode(&mut self, batch: &[BatchEntry]) -> Result<(), BackendError>;
    /// The logits after the entry at `index` of the last batch.
    fn logits(&mut self, index: usize) -> Option<&[f32]>;
    /// Drops all that all sequences hold, and leaves nothing of it behind that others would be computed with.
    fn scrub(&mut self);
    /// Drops all that a sequence holds.
    fn clear_sequence(&mut self, sequence: u32);
    /// Drops what a sequence holds past its first `len` tokens.
    fn truncate(&mut self, sequence: u32, len: u32) -> Result<(), BackendError>;
    /// Makes `to`, which is empty, hold the first `len` tokens of `from`.
    fn copy(&mut self, from: u32, to: u32, len: u32) -> Result<(), BackendError>;
    /// The state of these tokens of a sequence, the first of which begins a block ([`BLOCK_TOKENS`]): a chunk for each full
    /// block, and one for the rest. Nothing of other tokens is copied.
    fn save(&mut self, sequence: u32, positions: Range<u32>) -> Result<Vec<Vec<u8>>, BackendError>;
    /// Makes a sequence, which is empty, hold these chunks, the first of which begins at token 0.
    fn restore(&mut self, sequence: u32, chunks: &[Chunk<'_>]) -> Result<(), BackendError>;
    /// The sequence whose prompt is read beside the pool: a part of its own in each batch, which may be read faster so.
    fn staged(&self) -> Option<u32>;
    /// Has the prompt of a sequence be read on there, where nobody's is. It goes into the pool with its first logits, or as
    /// soon as it is copied or saved. On failure it is read in the pool.
    fn stage(&mut self, sequence: u32) -> Result<(), BackendError>;
    /// Puts into the pool what has been read there. On failure it is there still.
    fn land(&mut self) -> Result<(), BackendError>;
}

/// What a pooled backend allows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PooledLimits {
    /// Texts in one batch.
    pub(crate) texts: usize,
    /// Tokens in one batch.
    pub(crate) batch_tokens: usize,
    /// Tokens in one text.
    pub(crate) text_tokens: usize,
}

/// A model's computation of vectors; one owner.
pub(crate) trait PooledBackend: Send {
    fn limits(&self) -> PooledLimits;
    /// Bytes of main memory that full batches will take beside what was taken before the first batch, at most.
    fn untouched_bytes(&self) -> u64;
    /// The vectors of whole texts, one for each in their order, not normalised. The reason where there are none.
    fn embed(&mut self, texts: &[&[Token]]) -> Result<Vec<Vec<f32>>, String>;
    /// Leaves nothing behind of what was computed.
    fn scrub(&mut self);
}

/// A chat as the template renders it.
pub(crate) struct RenderedChat {
    pub(crate) prompt: String,
    /// Places within what messages wrote and would be read as special tokens: see [`SpecialTokens::Unless`].
    pub(crate) text_at: Vec<usize>,
    pub(crate) stops: Vec<String>,
    /// What its answers look like, where they are more than text.
    pub(crate) answer: Option<Box<RenderedAnswer>>,
}

/// What answers to a chat look like.
pub(crate) struct RenderedAnswer {
    pub(crate) form: AnswerForm,
    /// The special tokens that they are read by.
    pub(crate) markup: Vec<Token>,
    /// How what is called is bound.
    pub(crate) calls: CallRules,
    /// The most tokens that may be thought.
    pub(crate) thinking_budget: Option<u32>,
    /// What ends a thought that has more; empty where that cannot be written.
    pub(crate) closing: Closing,
    /// What stands before what is said, or a call.
    pub(crate) lead: Lead,
    /// No tool may be called.
    pub(crate) drops_calls: bool,
}

/// The end of a thought, as it is written for the model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Closing {
    pub(crate) text: String,
    pub(crate) tokens: Vec<Token>,
}

/// How calls of tools are bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CallRules {
    /// None may come, or as the model writes them.
    Free,
    /// An answer calls tools and says nothing else; its grammar, in GBNF, with what its prompt ends with.
    Required(String),
    /// An answer may call tools; the grammar of that.
    Allowed {
        grammar: CallGrammar,
        /// Whether one of them must be called as its schema says, or not at all.
        is_strict: bool,
    },
    /// The same where no text tells that a call begins: the grammar of whole answers.
    Whole { grammar: String, is_strict: bool },
    /// An answer calls tools and says nothing else; the grammar of calls alone.
    Calls(String),
}

/// What is to be known of a chat's answers beside its prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reads {
    /// Nothing: none is written.
    Nothing,
    /// What is thought, said and called in them.
    All,
    /// The same of answers that must be of a form: where no tool may be called, none is looked for in them.
    Bound,
}

/// How long a chat may take to be rendered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// As long as chats of its length take.
    Quick,
    /// As long as any may, at the machine's leisure.
    Full,
}

/// A model's text side: immutable, shared by the tokenising pool and the scheduler.
pub(crate) trait Vocabulary: Send + Sync {
    fn size(&self) -> u32;
    /// Bytes of the longest text that is one token.
    fn longest_token(&self) -> usize;
    /// Tokens of a text, BOS before it where the model wants one.
    fn tokenize(&self, text: &str, specials: SpecialTokens<'_>) -> Result<Vec<Token>, RequestError>;
    /// The same without what the model wants around a text.
    fn tokenize_bare(&self, text: &str, specials: SpecialTokens<'_>) -> Result<Vec<Token>, RequestError>;
    /// Those for gaps within texts; `None`: the model fills none.
    fn infill_tokens(&self) -> Option<InfillTokens>;
    /// Tokens of a query and a document, as a reranker wants them.
    fn pair(&self, query: &str, document: &str) -> Result<Vec<Token>, RequestError>;
    /// The prompt of a chat. `None`: it takes longer than this pace, and may be tried at the full one.
    fn render(&self, chat: &Chat, reads: Reads, pace: Pace) -> Result<Option<RenderedChat>, RequestError>;
    /// Appends the bytes of a token; nothing for a special one.
    fn piece(&self, token: Token, out: &mut Vec<u8>);
    /// Appends the bytes of a token, a special one's name among them.
    fn shown_piece(&self, token: Token, out: &mut Vec<u8>);
    /// The texts of all tokens, for grammars; made at the first call, which is not for the engine's thread.
    fn texts(&self) -> &Arc<TokenTexts>;
    /// The same with the names of these special tokens; kept for the markup asked for last.
    fn texts_with(&self, markup: &[Token]) -> Arc<TokenTexts>;
    /// The tokens that end a generation.
    fn end_tokens(&self) -> &[Token];
}

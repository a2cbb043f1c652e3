//! What can go wrong at the border to llama.cpp, typed by operation.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::limits::{MAX_RUN_CHARS, MAX_RUN_WORK};

/// llama.cpp could not be initialised with the backends there are.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    /// The directory of backends cannot be used.
    #[error("the directory of backends {} cannot be used: {reason}", dir.display())]
    Directory {
        /// The directory.
        dir: PathBuf,
        /// Why.
        reason: String,
    },
    /// Its modules belong to another release of llama.cpp.
    #[error(
        "the backends in {} are not this program's: they were built for {found}, and it needs {wanted}; build them with \
         hack/backends.sh (and hack/cuda.sh) of the same checkout, or use the ones of its image",
        dir.display()
    )]
    Version {
        /// The directory.
        dir: PathBuf,
        /// What they were built for.
        found: String,
        /// What they must be built for.
        wanted: &'static str,
    },
    /// No CPU backend runs on this processor.
    #[error(
        "this processor lacks {missing}, which the CPU backend that is linked in needs, and no other can be used: {looked}; \
         give the machine such a processor (a virtual one may hide it), or add the variant x64 (VARIANTS=x64 \
         hack/backends.sh, and --backend-dir)"
    )]
    Processor {
        /// Instructions.
        missing: String,
        /// Where else was looked.
        looked: String,
    },
    /// llama.cpp is initialised, without this directory.
    #[error("{} cannot be loaded: this process has initialised llama.cpp without it", .0.display())]
    AlreadyInitialised(PathBuf),
    /// llama.cpp's own.
    #[error("llama.cpp cannot be initialised: {0}")]
    Other(String),
}

/// A model could not be loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// The path holds a NUL byte or is not UTF-8.
    #[error("the path {} cannot be passed to llama.cpp: it must be UTF-8 without NUL", .0.display())]
    Path(PathBuf),
    /// llama.cpp refused the file.
    #[error("llama.cpp refused the model: {0}")]
    Refused(String),
    /// The progress callback asked to stop.
    #[error("loading was aborted by the caller")]
    Aborted,
    /// The model is of a kind that does not generate text from left to right.
    #[error("the model cannot generate text: {0}")]
    NotGenerative(&'static str),
    /// llama.cpp could not be initialised.
    #[error("{0}")]
    Backend(#[from] BackendError),
    /// What was asked of GPUs cannot be had.
    #[error("{asked}, and {problem}. There is: {found}. {way_out}")]
    Gpu {
        /// What was asked for.
        asked: String,
        /// What stands against it.
        problem: String,
        /// What there is.
        found: String,
        /// What to do.
        way_out: &'static str,
    },
}

/// A context could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ContextError {
    /// A parameter is out of the range that llama.cpp asserts.
    #[error("{0}")]
    Params(String),
    /// llama.cpp refused, most often for want of memory.
    #[error("llama.cpp refused the context: {0}")]
    Refused(String),
    /// The model is an encoder: it gives vectors of texts and generates none.
    #[error("the model keeps no state between tokens, so it cannot generate")]
    Stateless,
}

/// A batch that llama.cpp must not see. The context is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// No tokens.
    #[error("the batch is empty")]
    Empty,
    /// More tokens than the context takes at once.
    #[error("the batch has {tokens} tokens, more than the context's {limit}")]
    TooManyTokens {
        /// Tokens in the batch.
        tokens: usize,
        /// The context's batch size.
        limit: usize,
    },
    /// More rows of logits than the context has room for.
    #[error("the batch asks for {outputs} rows of logits, more than the context's {limit}")]
    TooManyOutputs {
        /// Rows asked for.
        outputs: usize,
        /// The context's limit.
        limit: usize,
    },
    /// A token outside the vocabulary.
    #[error("token {token} at {index} is not in the vocabulary of {vocab_size}")]
    Token {
        /// Its place in the batch.
        index: usize,
        /// The token.
        token: i32,
        /// Tokens there are.
        vocab_size: u32,
    },
    /// A sequence id the context does not have.
    #[error("sequence {sequence} does not exist; the context has {limit}")]
    Sequence {
        /// The id.
        sequence: u32,
        /// Sequences there are.
        limit: u32,
    },
    /// A position that does not follow the last one of a sequence that holds some.
    #[error("sequence {sequence} is at position {expected}, but the batch continues it at {position}")]
    Position {
        /// The sequence.
        sequence: u32,
        /// The position that follows.
        expected: u32,
        /// The position in the batch.
        position: u32,
    },
    /// A position past what a sequence can hold.
    #[error("sequence {sequence} holds {limit} tokens; position {position} does not exist")]
    PastContext {
        /// The sequence.
        sequence: u32,
        /// The position.
        position: u32,
        /// Tokens a sequence holds.
        limit: u32,
    },
}

/// A step failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Refused before llama.cpp saw it; the context is unchanged.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// No room in the KV cache; the context is unchanged.
    #[error("no free cells in the KV cache")]
    NoKvCells,
    /// The abort flag of the context's parameters was raised; which tokens are in the cache must be read from it.
    #[error("the step was aborted")]
    Aborted,
    /// llama.cpp failed; which tokens are in the cache must be read from the context.
    #[error("llama.cpp failed to decode (code {code}): {reason}")]
    Failed {
        /// `llama_decode`'s code.
        code: i32,
        /// The last lines of its log.
        reason: String,
    },
}

/// A sequence's state could not be saved, restored or copied.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// The sequence does not exist.
    #[error(transparent)]
    Sequence(#[from] BatchError),
    /// The state of this model cannot be cut by tokens; it can be saved as a whole.
    #[error("the state of this model cannot be sliced; save it as a whole")]
    NotSliceable,
    /// What is asked for is not in the sequence.
    #[error("tokens {from} to {to} in blocks of {block} cannot be saved of a sequence of {held}")]
    Range {
        /// The first token asked for.
        from: u32,
        /// The one after the last.
        to: u32,
        /// Tokens in a block.
        block: u32,
        /// Tokens the sequence holds.
        held: u32,
    },
    /// The sequence to restore into holds tokens.
    #[error("sequence {sequence} holds {held} tokens; state is restored only into an empty one")]
    Occupied {
        /// The sequence.
        sequence: u32,
        /// Tokens it holds.
        held: u32,
    },
    /// More tokens than a sequence can hold.
    #[error("the chunks hold {tokens} tokens, a sequence at most {limit}")]
    TooLong {
        /// Tokens in the chunks.
        tokens: u64,
        /// Tokens a sequence holds.
        limit: u32,
    },
    /// Bytes that are not a state of this model in this kind of context.
    #[error("chunk {index}: {fault}")]
    Chunk {
        /// Its place among the chunks.
        index: usize,
        /// What is wrong with it.
        fault: ChunkFault,
    },
    /// llama.cpp refused, most often because no cells are free. The sequence is empty.
    #[error("llama.cpp refused the state: {0}")]
    Refused(String),
}

/// What is wrong with a chunk of saved state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChunkFault {
    /// Shorter than its head.
    #[error("it is cut short")]
    Truncated,
    /// Not written by this version of this function.
    #[error("it is not a chunk of this kind or version")]
    Foreign,
    /// The checksum does not fit.
    #[error("its bytes were damaged")]
    Damaged,
    /// Of another layout of layers, types or llama.cpp.
    #[error("it was saved with another layout: its fingerprint differs")]
    Fingerprint,
    /// Not the tokens that were announced, or not those that follow the chunk before it.
    #[error("it holds other tokens than those that belong here")]
    Tokens,
    /// The bytes are not as many as its tokens need.
    #[error("its length does not fit its tokens")]
    Length,
}

/// A text could not be tokenised, or a token not be turned into text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokenizeError {
    /// Longer than an `i32` can count.
    #[error("the text has {bytes} bytes, more than llama.cpp can tokenise")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// A run of characters on which this model's pre-tokeniser would recurse too deep.
    #[error(
        "the text has a run of {chars} characters without a break, more than the {MAX_RUN_CHARS} that this model's \
         tokeniser can take; break it, by a space or a line break"
    )]
    RunTooLong {
        /// Characters of the run and of what follows it, as far as they may be matched together.
        chars: usize,
    },
    /// Runs of digits or of spaces that this model's pre-tokeniser would take too long for.
    #[error(
        "the text has long runs of digits or spaces, for which this model's tokeniser takes quadratic time: the sum of \
         their squared lengths is {work}, more than {MAX_RUN_WORK}; shorten or break them"
    )]
    RunWork {
        /// The sum of their squared lengths.
        work: u64,
    },
    /// No thread with a stack that is deep enough for this text.
    #[error("there is no memory to tokenise this text with: {0}")]
    NoStack(String),
    /// llama.cpp failed.
    #[error("llama.cpp cannot tokenise this text")]
    Failed,
    /// A token of the text is not in the vocabulary.
    #[error(
        "the file's tokenizer (tokenizer.ggml.model) makes token {0} of a text, which is not in the file's vocabulary: it is \
         another model's; convert the model again"
    )]
    ForeignTokenizer(i32),
    /// The token is not in the vocabulary.
    #[error("token {0} is not in the vocabulary")]
    NoSuchToken(i32),
}

/// What bounds a chat template ([`crate::template_limits`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TemplateLimit {
    /// The time that it may compute.
    Time,
    /// The memory that it may take.
    Memory,
    /// How deep its macros may call, and its parts nest.
    Depth,
}

/// A chat could not be rendered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum ChatError {
    /// The messages are not what a chat template takes.
    #[error("messages: {0}")]
    Messages(String),
    /// The template cannot be parsed, or failed with these messages.
    #[error("the model's chat template failed: {0}")]
    Template(String),
    /// The template says itself that it does not take these messages.
    #[error("the model's chat template refuses the messages: {0}")]
    TemplateRefused(String),
    /// The template takes texts apart or puts them together, and of these it makes special tokens.
    #[error(
        "the model's chat template would make the special token {token:?} of what the messages say, which takes it apart or \
         puts it together; leave out the signs of that token (such as < | > [ ]) where they are no part of the text"
    )]
    Forged {
        /// The first one.
        token: String,
    },
    /// The template took too much.
    #[error("the model's chat template failed: {limit}{}{}", if at.is_some() { ", " } else { "" }, at.as_deref().unwrap_or_default())]
    TemplateLimit {
        /// Of what.
        limit: TemplateLimit,
        /// Where it was when that was seen, with the line; `None` where it could not be seen.
        at: Option<String>,
    },
    /// The process that renders cannot be had, or ended of something else than a limit.
    #[error("the process that renders the model's chat template failed: {0}")]
    TemplateProcess(String),
}

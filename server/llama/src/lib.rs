//! The only crate that calls llama.cpp: an owned model, context, batch and chat template behind a safe API.
//!
//! llama.cpp ends the process on a failed assertion, so everything that such an assertion looks at is checked here
//! first: [`Context::decode`] validates the whole [`Batch`], memory operations check their ranges, and what may throw
//! goes through a C++ shim that catches it (`shim/shim.cpp`). What remains (a malformed file, a bug in a kernel) is
//! why an engine runs in a process of its own.
//!
//! - [`Model`]: the weights and the vocabulary, shared through an `Arc`.
//! - [`Context`]: the KV cache and the compute graph; one owner, may move between threads. It saves and restores the
//!   state of sequences, and gives embeddings where it is made for them.
//! - [`Batch`]: tokens for one step, plain Rust until it is decoded.
//! - [`ChatTemplate`]: llama.cpp's own rendering of the model's template.
//! - [`Grammar`]: what a text must look like, from llama.cpp's GBNF or a JSON schema.
//! - [`init`], [`init_from`]: once per process, loads ggml's backends and routes llama.cpp's log to `tracing`.
//!
//! Absent: samplers (the engine samples in Rust on copied rows), LoRA.

mod backend;
mod batch;
mod chat;
mod chunk;
mod context;
mod error;
mod gpu;
mod grammar;
mod guard;
mod layout;
mod limits;
mod logs;
mod model;
mod neutral;
mod parts;
mod pretokenizer;
mod rerank;
mod shim;
mod specials;
mod tokenize;
mod vocabulary;

pub use backend::{
    BACKENDS_VERSION, BUILTIN_CPU, Backends, Device, DeviceKind, MAX_MODULES, default_dir, init, init_from,
    return_free_memory, return_large_blocks,
};
pub use batch::Batch;
pub use chat::{
    AnswerForm, AnswerParser, CallGrammar, ChatPrompt, ChatTemplate, Lead, ParsedAnswer, ParsedCall, SAMPLE_CHATS,
    SAMPLE_WORD, SampleChat, ShownCalls, TemplateSource, ThoughtForm, ThoughtStage, end_after_cpu, exit_on_limits,
    limit_of_exit, limits as template_limits, says_sample_word,
};
pub use context::{Context, ContextParams, KvType, MAX_SEQUENCES, Pooling};
pub use error::{
    BackendError, BatchError, ChatError, ChunkFault, ContextError, DecodeError, ModelError, StateError, TemplateLimit,
    TokenizeError,
};
pub use gpu::{ALL_LAYERS, GpuSplit, MAX_GPUS, SplitMode};
pub use grammar::{
    Grammar, GrammarError, MAX_GRAMMAR_ELEMENTS, MAX_GRAMMAR_NESTING, MAX_GRAMMAR_RULES, MAX_GRAMMAR_TEXT_BYTES,
    MAX_REPETITIONS, MAX_RULE_NAME_BYTES, MAX_STACKS, MAX_STEPS, TokenTexts,
};
pub use limits::{MAX_RUN_CHARS, MAX_RUN_WORK};
pub use model::{Model, ModelParams, Token};
pub use parts::SpecialTokens;
pub use vocabulary::{FIRST_COMPARED_TOKEN, InfillTokens, MAX_VOCABULARY_DIFFERENCE};

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
//! - [`init`]: once per process, routes llama.cpp's log to `tracing`.
//!
//! Absent: samplers (the engine samples in Rust on copied rows), LoRA, grammars.

mod backend;
mod batch;
mod chat;
mod chunk;
mod context;
mod error;
mod layout;
mod logs;
mod model;
mod shim;

pub use backend::{gpu_offload_supported, init};
pub use batch::Batch;
pub use chat::{ChatPrompt, ChatTemplate};
pub use context::{Context, ContextParams, KvType, MAX_SEQUENCES, Pooling};
pub use error::{BatchError, ChatError, ChunkFault, ContextError, DecodeError, ModelError, StateError, TokenizeError};
pub use model::{Model, ModelParams, Token};

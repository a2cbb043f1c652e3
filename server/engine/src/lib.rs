//! Continuous-batching inference over one GGUF model, usable as a library.
//!
//! ```no_run
//! use gantry_engine::{Engine, EngineConfig, GenerationParams, Message, Prompt, Role};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let engine = Engine::load(EngineConfig::new("model.gguf"), |_fraction| true)?;
//! let messages = vec![Message::text(Role::User, "What is the capital of Norway?")];
//! let answer = engine.generate(Prompt::chat(messages), GenerationParams::greedy(64))?;
//! println!("{} ({} tokens)", answer.text, answer.usage.completion_tokens);
//! # Ok(())
//! # }
//! ```
//!
//! [`Engine::submit`] streams instead: it takes a sink for [`GenerationEvent`]s, never blocks, and says
//! [`SubmitError::QueueFull`] when too many requests wait. Requests submitted at the same time are computed together.
//!
//! # How it works
//!
//! ```text
//! submit ─ permit ─▶ prepare ─────────────▶ scheduler ───────────────────────────▶ text ───────────────▶ sink
//!                    (pool: template,       (one thread: queue, plan, decode,      (thread: characters,
//!                     tokens, grammar,       greedy choice; the rest on a pool)     stop strings)
//!                     prefixes on disk)
//! ```
//!
//! - **Step** (`scheduler`): one token for every sequence that generates, then prompts within what the time aimed at
//!   leaves ([`EngineConfig::step_ms_target`]; what a step costs is measured). Short prompts come first, and one turn in
//!   four is the oldest's, so that none starves. Where more come at once than it pays to decode beside each other, they
//!   are read together and begin together, as many as fit a bound of time (`burst`).
//! - **Prefixes** (`kv`, `cache`): what a request leaves in the KV cache is reused by one that begins alike; what has
//!   to leave goes to main memory in blocks of 16 tokens and, where configured, to disk. Prompts that begin alike and
//!   come together are read once.
//! - **Pressure**: a full KV cache fails nobody. Leftovers go first; then the youngest sequence of the lowest priority
//!   gives its slot away and comes back. Memory moves the engine along [`DegradationLevel`].
//! - **Order** (`queue`): [`Priority`], within it the [`Turn`]s of clients, and of each the order of submission; waiting
//!   raises, and ends at a deadline. One
//!   whose beginning is in memory goes before a long prompt that must be read, within a bound.
//! - **Guesses** (`lookup`, `draft`): repetitions, and what a small model says, are guessed and checked in one step, while
//!   that pays.
//!
//! A request that is cancelled frees its slot within one step, and so does one that is paused ([`RequestHandle::pause`]),
//! which goes on later with the tokens that it would have had. A batch that fails is decoded again, each sequence by
//! itself, and who fails alone ends; an engine that cannot go on says so to [`Engine::probe`] and to submissions. A failed
//! assertion inside llama.cpp ends the process: run an engine in a process of its own.
//!
//! # Limits
//!
//! A sequence holds prompt and answer together: `ctx_size / parallel` tokens, as in llama-server, rounded up to a multiple
//! of 256 and at most what the model was trained for ([`ModelInfo::n_ctx_per_sequence`]); all of `ctx_size` with
//! [`KvLayout::Unified`].
//!
//! # Embeddings and rankings
//!
//! [`ModelHost`] puts an [`Embedder`] beside the engine, or in its place where the model is an encoder. It gathers texts of
//! several requests in a window (`window`), computes them together and gives a vector, or a score, for each.

mod answer;
mod backend;
mod binding;
mod budget;
mod burst;
mod cache;
mod cores;
mod draft;
mod embedder;
mod engine;
mod error;
mod event;
mod finite;
mod grammars;
mod handle;
mod host;
mod interrupt;
mod kv;
mod kv_plan;
mod ladder;
mod lines;
mod lookup;
mod memory;
mod monitor;
mod output;
mod params;
mod plan;
mod pooler;
mod prepare;
mod queue;
mod request;
mod ring;
mod sample_pool;
mod sampler;
mod scheduler;
mod sequence;
mod stats;
mod template;
mod text;
mod window;

#[cfg(test)]
mod engine_tests;
#[cfg(test)]
mod pooler_tests;
#[cfg(test)]
mod scheduler_tests;

pub use gantry_core::{Message, Part, Role, ToolCall};
/// The backends that compute: what a directory brings is loaded once in a process, before its first engine.
pub use gantry_llama::{
    ALL_LAYERS, BACKENDS_VERSION, BUILTIN_CPU, BackendError, Backends, ChatError, Device, DeviceKind,
    FIRST_COMPARED_TOKEN, GpuSplit, MAX_GPUS, MAX_VOCABULARY_DIFFERENCE, Pooling, SplitMode, TemplateLimit,
    TemplateSource, default_dir as default_backend_dir, init as backends, init_from as load_backends,
    return_large_blocks, template_limits::MAX_TEMPLATE_BYTES,
};

pub use cores::ThreadLimit;
pub use embedder::{Embedder, PooledHandle};
pub use engine::{Engine, GenerationOutput};
pub use error::{EngineError, LoadError, ParamError, ProbeError, RequestError, SubmitError};
pub use event::{
    Activity, ActivitySink, EngineStats, EventSink, FinishReason, GenerationEvent, ITL_BUCKETS_MS, ItlHistogram,
    ModelInfo, PooledEvent, PooledInfo, PooledOutput, PooledSink, PooledStats, StopCause, Timings, TokenChance,
    TokenLogprob, Usage,
};
pub use handle::RequestHandle;
pub use host::ModelHost;
pub use kv_plan::{
    AUTO_UNIFIED_MAX_CELLS, AUTO_UNIFIED_MAX_SEQUENCES, CacheType, KvLayout, KvPlan, LEFTOVER_SEQUENCES,
    MATRIX_ATTENTION_BATCH, MATRIX_ATTENTION_MAX_CELLS, MATRIX_ATTENTION_MIN_CELLS, SCORED_ROWS, SCORED_ROWS_GPU,
    STAGE_BATCH_TOKENS, STAGE_DIVISOR, STAGE_MIN_CELLS, scored_rows,
};
pub use ladder::DegradationLevel;
pub use params::{
    Constraint, DEFAULT_MAX_QUEUE, DEFAULT_PARALLEL, DEFAULT_POOLED_BATCH, DEFAULT_POOLED_TOKENS,
    DEFAULT_POOLED_WAIT_MS, DEFAULT_PREFILL_TOKENS_PER_STEP, DEFAULT_PREFIX_CACHE_DISK_BYTES,
    DEFAULT_PREFIX_CACHE_RAM_BYTES, DEFAULT_SPECULATION_TOKENS, DiskCacheConfig, DryParams, EngineConfig,
    FIRST_SLOT_PATIENCE_MS, GIVES_WAY_PERIOD_MS, GenerationParams, Infill, InfillFile, LEAST_STEP_LIMIT_MS,
    MAX_DRAFT_CATCH_UP_TOKENS, MAX_DRY_ALLOWED_LENGTH, MAX_DRY_BREAKER_BYTES, MAX_DRY_BREAKERS, MAX_DRY_FACTOR,
    MAX_GRAMMAR_BYTES, MAX_KEPT_GRAMMARS, MAX_LOGIT_BIAS, MAX_LOGIT_BIASES, MAX_PARALLEL, MAX_PENALTY,
    MAX_PENALTY_LAST_N, MAX_POOLED_BATCH, MAX_POOLED_INPUTS, MAX_POOLED_TOKENS, MAX_POOLED_WAIT_MS,
    MAX_PREFILL_TOKENS_PER_STEP, MAX_PROMPT_BYTES, MAX_QUEUE, MAX_REPEAT_PENALTY, MAX_RESUMES_AHEAD,
    MAX_SPECULATION_TOKENS, MAX_STEP_MS_TARGET, MAX_STOP_BYTES, MAX_STOP_STRINGS, MAX_TEMPERATURE, MAX_THREADS,
    MAX_TOP_LOGPROBS, MOST_STEP_LIMIT_MS, PooledConfig, PooledWork, PrefixCacheConfig, Priority, Prompt,
    STEP_LIMIT_FACTOR, SpeculationConfig, TextInput, Turn,
};
pub use queue::AGEING_STEP;
pub use template::{TemplateReport, check_template, limits as template_limits, serve_template};

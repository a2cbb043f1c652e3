//! What a caller hands in: the engine's configuration, and what a request is, which is `gantry-core`'s to say.
//!
//! Everything here crosses the worker's socket in a compact, not self-describing format: no field is skipped and no
//! enum is untagged. Parameters are validated once, at submission ([`GenerationParams::validate`]); the scheduler and
//! the sampler rely on that.

use std::path::PathBuf;

pub use gantry_core::{
    Constraint, DryParams, GenerationParams, Infill, InfillFile, MAX_DRY_ALLOWED_LENGTH, MAX_DRY_BREAKER_BYTES,
    MAX_DRY_BREAKERS, MAX_DRY_FACTOR, MAX_GRAMMAR_BYTES, MAX_LOGIT_BIAS, MAX_LOGIT_BIASES, MAX_PENALTY,
    MAX_PENALTY_LAST_N, MAX_POOLED_INPUTS, MAX_PROMPT_BYTES, MAX_REPEAT_PENALTY, MAX_STOP_BYTES, MAX_STOP_STRINGS,
    MAX_TEMPERATURE, MAX_TOP_LOGPROBS, PooledWork, Priority, Prompt, TextInput, Turn,
};
use gantry_llama::{GpuSplit, Pooling};
use serde::{Deserialize, Serialize};

use crate::kv_plan::{CacheType, KvLayout};

/// The most sequences one engine may run at once: llama.cpp's own limit of sequence ids.
pub const MAX_PARALLEL: u32 = 256;
/// The most requests an engine lets wait.
pub const MAX_QUEUE: usize = 65_536;
/// How often a paused request that has begun its answer goes on before those that came later and wait. Afterwards it takes its turn
/// as one that has just come, behind all of its client's, each time, or those that are paused again and again would keep everybody
/// else from a slot.
pub const MAX_RESUMES_AHEAD: u32 = 4;
/// How long a request whose client has no slot waits, in milliseconds, before one of a client that has several gives way to it:
/// several steps, in which a slot may become free by itself.
pub const FIRST_SLOT_PATIENCE_MS: u64 = 100;
/// The least time, in milliseconds, between two times that one sequence gives way to requests of clients that have none: its state
/// is copied, or computed again.
pub const GIVES_WAY_PERIOD_MS: u64 = 1000;
/// The most prompt tokens in one step.
pub const MAX_PREFILL_TOKENS_PER_STEP: u32 = 16_384;
/// The most threads an engine computes with: ggml's own limit.
pub const MAX_THREADS: u32 = 512;
/// The default of [`EngineConfig::max_queue`].
pub const DEFAULT_MAX_QUEUE: usize = 512;
/// The default of [`EngineConfig::prefill_tokens_per_step`].
pub const DEFAULT_PREFILL_TOKENS_PER_STEP: u32 = 512;
/// The default of [`EngineConfig::parallel`].
pub const DEFAULT_PARALLEL: u32 = 8;
/// The default of [`PrefixCacheConfig::ram_bytes`].
pub const DEFAULT_PREFIX_CACHE_RAM_BYTES: u64 = 1 << 30;
/// What `gantry-server` takes for [`DiskCacheConfig::max_bytes`] where it is not told.
pub const DEFAULT_PREFIX_CACHE_DISK_BYTES: u64 = 4 << 30;
/// The most tokens that may be guessed at a time.
pub const MAX_SPECULATION_TOKENS: u32 = 64;
/// Tokens that a draft model reads in one step, over all sequences, before it guesses: a text that it has not read is
/// read in such parts, and nothing is guessed for it until then.
pub const MAX_DRAFT_CATCH_UP_TOKENS: u32 = 128;
/// Grammars that are kept compiled; one more and the one used longest ago goes. The rules of the largest take 2 MiB.
pub const MAX_KEPT_GRAMMARS: usize = 16;
/// The longest step that may be aimed at, in milliseconds.
pub const MAX_STEP_MS_TARGET: u32 = 60_000;
/// The default of [`SpeculationConfig::max_tokens`] and [`SpeculationConfig::draft_tokens`].
pub const DEFAULT_SPECULATION_TOKENS: u32 = 8;

/// The most texts that are embedded or scored together.
pub const MAX_POOLED_BATCH: u32 = 256;
/// The longest that a text may wait for others to be computed with, in milliseconds.
pub const MAX_POOLED_WAIT_MS: u32 = 1000;
/// The most tokens of texts that are embedded or scored together.
pub const MAX_POOLED_TOKENS: u32 = 16_384;
/// How long a batch of several texts may take, in milliseconds, by how long those before it took: a request of a higher
/// priority waits for one batch at most. A text is computed whole, however long it takes.
pub const MAX_POOLED_BATCH_MS: u64 = 250;
/// The default of [`PooledConfig::max_batch`].
pub const DEFAULT_POOLED_BATCH: u32 = 32;
/// The default of [`PooledConfig::wait_ms`].
pub const DEFAULT_POOLED_WAIT_MS: u32 = 2;
/// The default of [`PooledConfig::batch_tokens`], which is llama-server's.
pub const DEFAULT_POOLED_TOKENS: u32 = 512;

/// Where prompts that were read before are kept, so that they need not be read again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefixCacheConfig {
    /// Whether prefixes are reused at all.
    pub enabled: bool,
    /// Bytes of main memory for prefixes that left the KV cache; 0: none.
    pub ram_bytes: u64,
    /// Prefixes unused for so long are dropped; `None`: never because of age.
    pub ttl_ms: Option<u64>,
    /// A directory for prefixes that outlive the process; `None`: none.
    pub disk: Option<DiskCacheConfig>,
}

/// The part of the prefix cache that survives a restart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskCacheConfig {
    /// Where; made when absent. Engines of different models may share it.
    pub dir: PathBuf,
    /// The most bytes that all entries together may take.
    pub max_bytes: u64,
}

impl Default for PrefixCacheConfig {
    fn default() -> Self {
        Self { enabled: true, ram_bytes: DEFAULT_PREFIX_CACHE_RAM_BYTES, ttl_ms: None, disk: None }
    }
}

/// Guessing several tokens and checking them in one step, which never changes what is generated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpeculationConfig {
    /// Guess from repetitions in the prompt and the answer.
    pub prompt_lookup: bool,
    /// The most tokens guessed at a time from repetitions, 1 to [`MAX_SPECULATION_TOKENS`].
    pub max_tokens: u32,
    /// Guess with a smaller model of the same tokens where nothing repeats itself; its GGUF file.
    pub draft_model: Option<PathBuf>,
    /// The most tokens guessed at a time with it, 1 to [`MAX_SPECULATION_TOKENS`].
    pub draft_tokens: u32,
}

impl Default for SpeculationConfig {
    fn default() -> Self {
        let most = DEFAULT_SPECULATION_TOKENS;
        Self { prompt_lookup: false, max_tokens: most, draft_model: None, draft_tokens: most }
    }
}

impl SpeculationConfig {
    /// The most tokens guessed at a time, whatever from.
    #[must_use]
    pub fn most_tokens(&self) -> u32 {
        let lookup = if self.prompt_lookup { self.max_tokens } else { 0 };
        lookup.max(if self.draft_model.is_some() { self.draft_tokens } else { 0 })
    }
}

/// How texts are embedded or scored, beside what is generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PooledConfig {
    /// `None`: what the model's file names.
    pub pooling: Option<Pooling>,
    /// The most texts that are computed together, 1 to [`MAX_POOLED_BATCH`].
    pub max_batch: u32,
    /// How long a text waits for others to be computed with, at most [`MAX_POOLED_WAIT_MS`].
    pub wait_ms: u32,
    /// The most tokens that are computed together, and so the longest text. Each takes a row of the vocabulary in memory.
    pub batch_tokens: u32,
}

impl Default for PooledConfig {
    fn default() -> Self {
        Self {
            pooling: None,
            max_batch: DEFAULT_POOLED_BATCH,
            wait_ms: DEFAULT_POOLED_WAIT_MS,
            batch_tokens: DEFAULT_POOLED_TOKENS,
        }
    }
}

/// How an engine is built. [`EngineConfig::new`] gives the defaults.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineConfig {
    /// The GGUF file.
    pub model_path: PathBuf,
    /// KV cells in total, as llama-server's `--ctx-size`: each of the `parallel` sequences gets an equal share,
    /// rounded up to a multiple of 256 and never used past the length the model was trained for. 0: as much in total
    /// as the model was trained for.
    pub ctx_size: u32,
    /// Sequences that may generate at once, 1 to [`MAX_PARALLEL`].
    pub parallel: u32,
    /// Threads that compute. `None`: one less than the processors this process may use, at least one.
    pub threads: Option<u32>,
    /// The element type of the KV cache.
    pub cache_type: CacheType,
    /// Layers to put on GPUs. `None`: all that llama.cpp can offload, where there is a GPU; 0: none. Any other number asks
    /// for a GPU, and without one the model is not loaded.
    pub gpu_layers: Option<u32>,
    /// How they are spread.
    pub gpu_split: GpuSplit,
    /// Requests that may wait for a slot, those being tokenised included; one more is refused with
    /// [`SubmitError::QueueFull`](crate::SubmitError::QueueFull).
    pub max_queue: usize,
    /// The most prompt tokens decoded in one step, over all requests, beside one token of each request that generates.
    pub prefill_tokens_per_step: u32,
    /// How long a step may take while requests generate: prompts get what fits beside their tokens. `None`: a few times
    /// as long as their tokens alone take.
    pub step_ms_target: Option<u32>,
    /// How the KV cells are shared out.
    pub kv_layout: KvLayout,
    /// Reuse of prompts that were read before.
    pub prefix_cache: PrefixCacheConfig,
    /// Guessing ahead.
    pub speculation: SpeculationConfig,
    /// Whether what stands after a gap within a text comes before what stands before it, as some models were taught.
    pub infill_suffix_first: bool,
    /// Names the model in what is kept of it on disk; `None`: the file's SHA-256, computed when it is
    /// loaded.
    pub model_digest: Option<String>,
    /// The most milliseconds that a request may wait for its first token; `None`: any.
    pub queue_timeout_ms: Option<u64>,
    /// With more requests waiting than this, further ones are refused until as few wait as `low_watermark`. `None`: at
    /// `max_queue`.
    pub high_watermark: Option<usize>,
    /// See `high_watermark`; `None`: three quarters of it.
    pub low_watermark: Option<usize>,
    /// Memory that the process may use, from which its degradation follows; `None`: that of its cgroup or the machine.
    pub memory_limit_bytes: Option<u64>,
    /// Cells of the KV cache take memory when they are first used. Else all of them do as the model is loaded: where models
    /// are loaded by what the machine has left, none is then promised what cells will take.
    pub lazy_cells: bool,
    /// Embed or score texts, too; see [`ModelHost`](crate::ModelHost). `None`: no.
    pub pooled: Option<PooledConfig>,
    /// A chat template in the place of the one in the model's file; it is tried as that would be. `None`: the file's.
    pub chat_template: Option<String>,
    /// The program that renders the model's chat template when it is called with `template`
    /// ([`serve_template`](crate::serve_template)). `None`: this process renders it, and a template that means harm ends it.
    pub template_program: Option<PathBuf>,
    /// The most memory that such a program may take for a chat that is rendered aside from the others, in bytes. `None`: as much as
    /// [`TEMPLATE_PROCESS_MAX_BYTES`](crate::template_limits::TEMPLATE_PROCESS_MAX_BYTES), which no figure passes.
    pub template_bytes: Option<u64>,
}

impl EngineConfig {
    /// The defaults for a model file: 8 sequences over the model's own context, an F16 cache, a queue of 512.
    #[must_use]
    pub fn new(model_path: impl Into<PathBuf>) -> Self {
        Self {
            model_path: model_path.into(),
            ctx_size: 0,
            parallel: DEFAULT_PARALLEL,
            threads: None,
            cache_type: CacheType::default(),
            gpu_layers: None,
            gpu_split: GpuSplit::default(),
            max_queue: DEFAULT_MAX_QUEUE,
            prefill_tokens_per_step: DEFAULT_PREFILL_TOKENS_PER_STEP,
            step_ms_target: None,
            kv_layout: KvLayout::default(),
            prefix_cache: PrefixCacheConfig::default(),
            speculation: SpeculationConfig::default(),
            infill_suffix_first: false,
            model_digest: None,
            queue_timeout_ms: None,
            high_watermark: None,
            low_watermark: None,
            memory_limit_bytes: None,
            lazy_cells: false,
            pooled: None,
            chat_template: None,
            template_program: None,
            template_bytes: None,
        }
    }
}

/// A step that takes so many times what was expected of it counts as one that hangs, within the two limits below.
pub const STEP_LIMIT_FACTOR: u32 = 10;
/// The least time in milliseconds after which a step may count as one that hangs.
pub const LEAST_STEP_LIMIT_MS: u64 = 30_000;
/// The time in milliseconds after which any step counts as one that hangs.
pub const MOST_STEP_LIMIT_MS: u64 = 120_000;

//! What a caller hands in: the engine's configuration, a prompt and the parameters of one generation.
//!
//! Everything here crosses the worker's socket in a compact, not self-describing format: no field is skipped and no
//! enum is untagged. Parameters are validated once, at submission ([`GenerationParams::validate`]); the scheduler and
//! the sampler rely on that. Absent: tools.

use std::path::PathBuf;

use gantry_llama::{GpuSplit, Pooling};
use serde::{Deserialize, Serialize};

use crate::error::ParamError;
use crate::kv_plan::{CacheType, KvLayout};
use crate::turn::Turn;

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
/// The most stop strings one request may name.
pub const MAX_STOP_STRINGS: usize = 16;
/// The longest stop string, in bytes. Up to this much generated text may be held back while a match is possible.
pub const MAX_STOP_BYTES: usize = 256;
/// The highest temperature accepted.
pub const MAX_TEMPERATURE: f32 = 5.0;
/// The most tokens whose log-probabilities are reported beside the chosen one's, as in `OpenAI`'s API.
pub const MAX_LOGPROBS: u32 = 20;
/// The most tokens with a bias.
pub const MAX_LOGIT_BIAS: usize = 1024;
/// The largest bias either way, as in `OpenAI`'s API; minus infinity bans a token.
pub const MAX_LOGIT_BIAS_VALUE: f32 = 100.0;
/// The most tokens that the penalties look back at.
pub const MAX_PENALTY_LAST_N: u32 = 1 << 20;
/// The highest repetition penalty.
pub const MAX_REPEAT_PENALTY: f32 = 100.0;
/// The largest frequency and presence penalty either way, as in `OpenAI`'s API.
pub const MAX_PENALTY: f32 = 2.0;
/// The highest multiplier and base of the DRY penalty.
pub const MAX_DRY_FACTOR: f32 = 100.0;
/// The longest repetition that the DRY penalty may leave free.
pub const MAX_DRY_ALLOWED_LENGTH: u32 = 1024;
/// The most strings that end a repetition for the DRY penalty.
pub const MAX_DRY_BREAKERS: usize = 32;
/// The longest of them, in bytes: where llama.cpp cuts them.
pub const MAX_DRY_BREAKER_BYTES: usize = 40;
/// The longest grammar or JSON schema, in bytes; what else bounds them stands below.
pub const MAX_GRAMMAR_BYTES: usize = 128 * 1024;
/// The most prompt text one request may carry, in bytes; a longer one is refused before it is tokenised.
pub const MAX_PROMPT_BYTES: usize = 8 * 1024 * 1024;
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

/// The most texts in one pooled request.
pub const MAX_POOLED_INPUTS: usize = 2048;
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

/// Texts to embed or score.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PooledWork {
    /// A vector for each.
    Embed(Vec<EmbedInput>),
    /// A score for each document.
    Rank {
        /// What they are scored by.
        query: String,
        /// The documents.
        documents: Vec<String>,
    },
}

impl PooledWork {
    /// Texts in it.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Embed(inputs) => inputs.len(),
            Self::Rank { documents, .. } => documents.len(),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One thing to embed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EmbedInput {
    /// Text, in which no special token is read; the model's own are put around it.
    Text(String),
    /// Token ids, taken as they are.
    Tokens(Vec<i32>),
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
    /// Embed or score texts, too; see [`ModelHost`](crate::ModelHost). `None`: no.
    pub pooled: Option<PooledConfig>,
    /// The program that renders the model's chat template when it is called with `template`
    /// ([`serve_template`](crate::serve_template)). `None`: this process renders it, and a template that means harm ends it.
    pub template_program: Option<PathBuf>,
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
            model_digest: None,
            queue_timeout_ms: None,
            high_watermark: None,
            low_watermark: None,
            memory_limit_bytes: None,
            pooled: None,
            template_program: None,
        }
    }
}

/// Who is served first. Within one priority clients have their [`Turn`]s and each client's requests the order of submission,
/// and waiting raises a request in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Priority {
    /// After everyone else; the first to be preempted.
    Low,
    /// The default.
    #[default]
    Normal,
    /// Before everyone else; the last that is still served when memory is short.
    High,
}

impl Priority {
    /// How many there are.
    pub const COUNT: usize = 3;

    /// Its place among them, the lowest first.
    #[must_use]
    pub const fn rank(self) -> usize {
        self as usize
    }
}

/// What the answer must look like.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Grammar {
    /// A grammar in llama.cpp's GBNF, whose start symbol is `root`.
    Gbnf(String),
    /// A JSON schema.
    JsonSchema {
        /// The schema, as JSON; `{}` allows any JSON.
        schema: String,
        /// Whether what cannot be enforced is refused; otherwise it is left to the model.
        strict: bool,
    },
}

/// The DRY penalty, which makes long repetitions unlikely; `multiplier` 0 is off.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DryParams {
    /// Scale of the penalty; 0 is off.
    pub multiplier: f32,
    /// The penalty grows by this factor with each token of the repetition past `allowed_length`.
    pub base: f32,
    /// Repetitions up to this many tokens are free.
    pub allowed_length: u32,
    /// Tokens looked back at; 0: the whole sequence.
    pub penalty_last_n: u32,
    /// Strings that end a repetition.
    pub sequence_breakers: Vec<String>,
}

impl Default for DryParams {
    /// llama.cpp's defaults.
    fn default() -> Self {
        let sequence_breakers = ["\n", ":", "\"", "*"].map(String::from).to_vec();
        Self { multiplier: 0.0, base: 1.75, allowed_length: 2, penalty_last_n: 0, sequence_breakers }
    }
}

/// A step that takes so many times what was expected of it counts as one that hangs, within the two limits below.
pub const STEP_LIMIT_FACTOR: u32 = 10;
/// The least time in milliseconds after which a step may count as one that hangs.
pub const LEAST_STEP_LIMIT_MS: u64 = 30_000;
/// The time in milliseconds after which any step counts as one that hangs.
pub const MOST_STEP_LIMIT_MS: u64 = 120_000;

/// What to generate from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Prompt {
    /// Text, and nothing else: no special token is read in it. A model that wants BOS gets it before.
    Text(String),
    /// Text in which the special tokens that it writes are those tokens. A model that wants BOS gets it before.
    Markup(String),
    /// A chat, rendered by the model's own template with the assistant's turn opened at its end.
    Chat {
        /// An `OpenAI` `messages` array, as JSON.
        messages_json: String,
    },
    /// Token ids, taken as they are.
    Tokens(Vec<i32>),
}

/// How to generate. `Default` is the model's plain distribution with a random seed and no limit but the context.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenerationParams {
    /// The most tokens to generate; `None`: until the model ends or its context is full.
    pub max_tokens: Option<u32>,
    /// 0 is greedy; up to [`MAX_TEMPERATURE`].
    pub temperature: f32,
    /// Nucleus sampling, above 0 and up to 1; 1 is off.
    pub top_p: f32,
    /// Keep the k likeliest tokens; 0 or less is off.
    pub top_k: i32,
    /// Drop tokens less likely than this share of the likeliest, 0 to 1; 0 is off.
    pub min_p: f32,
    /// Keep the tokens whose information is nearest to the expected, until their probabilities add up to this; 1 is off.
    pub typical_p: f32,
    /// The chance, at each token, to leave out the likeliest of those above `xtc_threshold` but the last; 0 is off.
    pub xtc_probability: f32,
    /// See `xtc_probability`; above 0.5 it is off.
    pub xtc_threshold: f32,
    /// Divides the logit of a token that came before (multiplies a negative one); 1 is off.
    pub repeat_penalty: f32,
    /// Tokens that the three penalties look back at, the prompt's included; 0: none, so they are off.
    pub repeat_last_n: u32,
    /// Taken from a token's logit once for each time that it came before; 0 is off.
    pub frequency_penalty: f32,
    /// Taken from a token's logit once if it came before; 0 is off.
    pub presence_penalty: f32,
    /// The DRY penalty.
    pub dry: DryParams,
    /// Added to the logits of these tokens; minus infinity bans one.
    pub logit_bias: Vec<(i32, f32)>,
    /// What the answer must look like.
    pub grammar: Option<Grammar>,
    /// Report the log-probability of each token, and of so many of the likeliest beside it; `None`: no report.
    pub logprobs: Option<u32>,
    /// The same seed, prompt and parameters give the same draws. `None`: a fresh seed.
    pub seed: Option<u64>,
    /// Strings that end the generation; none of them is emitted.
    pub stop: Vec<String>,
    /// Never choose a token that ends the generation: go on until `max_tokens`, a stop string or the context's end.
    pub ignore_eos: bool,
    /// Who goes first.
    pub priority: Priority,
    /// Whose it is, and its turn among those of the same priority.
    pub turn: Turn,
    /// The most milliseconds from submission to the first token; past that the request fails with
    /// [`RequestError::DeadlineExceeded`](crate::RequestError::DeadlineExceeded). `None`: the engine's own limit.
    pub queue_timeout_ms: Option<u64>,
}

impl Default for GenerationParams {
    fn default() -> Self {
        Self {
            max_tokens: None,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            typical_p: 1.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            dry: DryParams::default(),
            logit_bias: Vec::new(),
            grammar: None,
            logprobs: None,
            seed: None,
            stop: Vec::new(),
            ignore_eos: false,
            priority: Priority::default(),
            turn: Turn::default(),
            queue_timeout_ms: None,
        }
    }
}

impl GenerationParams {
    /// Greedy decoding of at most `max_tokens` tokens.
    #[must_use]
    pub fn greedy(max_tokens: u32) -> Self {
        Self { max_tokens: Some(max_tokens), temperature: 0.0, ..Self::default() }
    }

    /// Whether the engine can follow these parameters.
    ///
    /// # Errors
    /// Names the first parameter out of range, and the range.
    pub fn validate(&self) -> Result<(), ParamError> {
        let in_range = |param: &str, value: f32, low: f32, high: f32| {
            if (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(ParamError::new(param, format!("must be a number from {low} to {high}, not {value}")))
            }
        };
        if self.max_tokens == Some(0) {
            return Err(ParamError::new("max_tokens", "must be at least 1"));
        }
        in_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)?;
        in_range("top_p", self.top_p, f32::MIN_POSITIVE, 1.0)
            .map_err(|_| ParamError::new("top_p", format!("must be above 0 and at most 1, not {}", self.top_p)))?;
        in_range("min_p", self.min_p, 0.0, 1.0)?;
        self.validate_sampling(in_range)?;
        if self.stop.len() > MAX_STOP_STRINGS {
            let n = self.stop.len();
            return Err(ParamError::new("stop", format!("at most {MAX_STOP_STRINGS} stop strings, not {n}")));
        }
        for stop in &self.stop {
            if stop.is_empty() {
                return Err(ParamError::new("stop", "a stop string must not be empty"));
            }
            if stop.len() > MAX_STOP_BYTES {
                let n = stop.len();
                return Err(ParamError::new(
                    "stop",
                    format!("a stop string has at most {MAX_STOP_BYTES} bytes, not {n}"),
                ));
            }
        }
        Ok(())
    }

    fn validate_sampling(
        &self,
        in_range: impl Fn(&str, f32, f32, f32) -> Result<(), ParamError>,
    ) -> Result<(), ParamError> {
        let at_most = |param: &str, what: &str, value: usize, limit: usize| {
            if value <= limit {
                Ok(())
            } else {
                Err(ParamError::new(param, format!("at most {limit} {what}, not {value}")))
            }
        };
        let count = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
        in_range("typical_p", self.typical_p, f32::MIN_POSITIVE, 1.0).map_err(|_| {
            ParamError::new("typical_p", format!("must be above 0 and at most 1, not {}", self.typical_p))
        })?;
        in_range("xtc_probability", self.xtc_probability, 0.0, 1.0)?;
        in_range("xtc_threshold", self.xtc_threshold, 0.0, 1.0)?;
        in_range("repeat_penalty", self.repeat_penalty, 1.0 / MAX_REPEAT_PENALTY, MAX_REPEAT_PENALTY)?;
        in_range("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)?;
        in_range("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)?;
        at_most("repeat_last_n", "tokens", count(self.repeat_last_n), count(MAX_PENALTY_LAST_N))?;
        let dry = &self.dry;
        in_range("dry_multiplier", dry.multiplier, 0.0, MAX_DRY_FACTOR)?;
        in_range("dry_base", dry.base, 1.0, MAX_DRY_FACTOR)?;
        at_most("dry_allowed_length", "tokens", count(dry.allowed_length), count(MAX_DRY_ALLOWED_LENGTH))?;
        at_most("dry_penalty_last_n", "tokens", count(dry.penalty_last_n), count(MAX_PENALTY_LAST_N))?;
        at_most("dry_sequence_breakers", "strings", dry.sequence_breakers.len(), MAX_DRY_BREAKERS)?;
        for breaker in &dry.sequence_breakers {
            at_most("dry_sequence_breakers", "bytes in a string", breaker.len(), MAX_DRY_BREAKER_BYTES)?;
            if breaker.is_empty() {
                return Err(ParamError::new("dry_sequence_breakers", "a string must not be empty"));
            }
        }
        at_most("logit_bias", "tokens", self.logit_bias.len(), MAX_LOGIT_BIAS)?;
        for &(token, bias) in &self.logit_bias {
            if token < 0 {
                return Err(ParamError::new("logit_bias", format!("there is no token {token}")));
            }
            if bias != f32::NEG_INFINITY {
                in_range("logit_bias", bias, -MAX_LOGIT_BIAS_VALUE, MAX_LOGIT_BIAS_VALUE)?;
            }
        }
        at_most("top_logprobs", "tokens", count(self.logprobs.unwrap_or(0)), count(MAX_LOGPROBS))?;
        match &self.grammar {
            None => Ok(()),
            Some(Grammar::Gbnf(text)) => at_most("grammar", "bytes", text.len(), MAX_GRAMMAR_BYTES),
            Some(Grammar::JsonSchema { schema, .. }) => {
                at_most("response_format", "bytes", schema.len(), MAX_GRAMMAR_BYTES)
            }
        }
    }
}

#[cfg(test)]
#[path = "params_tests.rs"]
mod tests;

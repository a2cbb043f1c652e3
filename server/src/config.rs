//! Settings: the command line over the environment over the defaults, checked as a whole.
//!
//! Flags have llama-server's names and meanings where it has them. Every value is taken as text first, so that a start
//! with several mistakes names all of them at once ([`Problems`], exit code 2). `docs/configuration.md` is the
//! reference, and a test holds it to what is here. Absent: limits that nobody sets ([`crate::limits`]).

use std::fmt::{self, Display};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::builder::BoolishValueParser;
use clap::{ArgAction, Args, Parser, Subcommand};
use gantry_engine::{
    ALL_LAYERS, CacheType, DEFAULT_PREFIX_CACHE_DISK_BYTES, DiskCacheConfig, GpuSplit, KvLayout, MAX_GPUS,
    MAX_PARALLEL, MAX_POOLED_BATCH, MAX_POOLED_TOKENS, MAX_POOLED_WAIT_MS, MAX_SPECULATION_TOKENS, MAX_STEP_MS_TARGET,
    MAX_THREADS, PooledConfig, Pooling, SplitMode,
};

use crate::limits::{MAX_QUEUE, MAX_WORKERS};
use crate::version::{
    DispatchStrategy, DraftSettings, EngineTuning, RuntimeSettings, Scheduling, VersionSpec, processors,
};

/// The name of the version that `serve` loads.
pub const STANDALONE_VERSION: &str = "standalone";
/// The largest context in tokens that a flag may ask for.
const MAX_CTX_SIZE: u32 = 1 << 26;
/// The most layers that a flag may ask for.
const MAX_GPU_LAYERS: u32 = ALL_LAYERS;
/// The most main memory for prefixes that a flag may ask for, in MiB.
const MAX_CACHE_RAM_MIB: u32 = 1 << 24;
/// The most disk for prefixes that a flag may ask for, in MiB.
const MAX_CACHE_DISK_MIB: u32 = 1 << 24;
/// The longest time for which a flag may have unused prefixes kept, in seconds: a year.
const MAX_CACHE_TTL_SECONDS: u32 = 366 * 86_400;
/// The longest drain timeout, in seconds.
const MAX_DRAIN_SECONDS: u64 = 86_400;
/// The longest queue timeout, in seconds.
const MAX_QUEUE_TIMEOUT_SECONDS: u32 = 86_400;

/// Gantry's inference server.
#[derive(Debug, Parser)]
#[command(name = "gantry-server", version, about, max_term_width = 120)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// See [`Cli`].
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve one model file, without Kubernetes
    Serve(Box<ServeArgs>),
    /// Serve in a pod what an InferenceService asks for
    Pod(Box<PodArgs>),
    /// Check a GGUF file and say what it is and what memory it takes
    Validate(ValidateArgs),
    /// Say what there is to compute with: the CPU backend that fits this processor, and GPUs
    Devices(BackendArgs),
    /// Load and run one model for the server that started this process
    #[command(hide = true)]
    Worker(BackendArgs),
}

/// Flags of `serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// The GGUF file
    #[arg(short, long, env = "GANTRY_MODEL", value_name = "FILE")]
    pub model: PathBuf,
    /// Flags about listening
    #[command(flatten)]
    pub http: HttpArgs,
    /// KV cells in total, shared out equally among the sequences; 0: as the model was trained
    #[arg(
        short,
        long,
        env = "GANTRY_CTX_SIZE",
        default_value = "0",
        value_name = "TOKENS",
        allow_hyphen_values = true
    )]
    pub ctx_size: String,
    /// Sequences that generate at once
    #[arg(long, env = "GANTRY_PARALLEL", default_value = "8", value_name = "N", allow_hyphen_values = true)]
    pub parallel: String,
    /// Threads that compute, shared out among the workers; -1: one less than the processors there are
    #[arg(short, long, env = "GANTRY_THREADS", default_value = "-1", value_name = "N", allow_hyphen_values = true)]
    pub threads: String,
    /// Where ggml's backends are
    #[command(flatten)]
    pub backends: BackendArgs,
    /// Layers to put on GPUs; 0: none; -1 or auto: all that can be, where there is a GPU; all: those of the model, and
    /// that, as any number above 0, needs a GPU
    #[arg(
        long,
        visible_alias = "gpu-layers",
        env = "GANTRY_N_GPU_LAYERS",
        default_value = "-1",
        value_name = "N",
        allow_hyphen_values = true
    )]
    pub n_gpu_layers: String,
    /// GPUs to use, by the names that `gantry-server devices` tells, in this order; none: none [default: all]
    #[arg(long, env = "GANTRY_DEVICE", value_name = "NAME,...")]
    pub device: Option<String>,
    /// What is split among several GPUs: none (one has the whole model), layer or row
    #[arg(long, env = "GANTRY_SPLIT_MODE", default_value = "layer", value_name = "MODE")]
    pub split_mode: String,
    /// How much of the model each GPU gets, in whole numbers: 3,1 [default: by their free memory]
    #[arg(long, env = "GANTRY_TENSOR_SPLIT", value_name = "N,...")]
    pub tensor_split: Option<String>,
    /// The GPU that has the whole model with --split-mode none, counted from 0
    #[arg(long, env = "GANTRY_MAIN_GPU", default_value = "0", value_name = "N", allow_hyphen_values = true)]
    pub main_gpu: String,
    /// Element type of the KV cache's keys: f16, q8_0 or q4_0
    #[arg(long, env = "GANTRY_CACHE_TYPE_K", default_value = "f16", value_name = "TYPE")]
    pub cache_type_k: String,
    /// Element type of the KV cache's values; must be that of the keys [default: that of the keys]
    #[arg(long, env = "GANTRY_CACHE_TYPE_V", value_name = "TYPE")]
    pub cache_type_v: Option<String>,
    /// The model name that clients use [default: the file's name without .gguf]
    #[arg(short, long, env = "GANTRY_ALIAS", value_name = "NAME")]
    pub alias: Option<String>,
    /// Requests that may wait while all sequences are busy; one more is refused with 429
    #[arg(long, env = "GANTRY_MAX_QUEUE", default_value = "512", value_name = "N", allow_hyphen_values = true)]
    pub max_queue: String,
    /// With more requests waiting than this, further ones are refused until no more than the low watermark wait; -1: none
    #[arg(long, env = "GANTRY_HIGH_WATERMARK", default_value = "-1", value_name = "N", allow_hyphen_values = true)]
    pub high_watermark: String,
    /// See --high-watermark; -1: three quarters of it
    #[arg(long, env = "GANTRY_LOW_WATERMARK", default_value = "-1", value_name = "N", allow_hyphen_values = true)]
    pub low_watermark: String,
    /// Seconds that a request may wait for its first token before it fails with 408; -1: any
    #[arg(
        long,
        env = "GANTRY_QUEUE_TIMEOUT",
        default_value = "-1",
        value_name = "SECONDS",
        allow_hyphen_values = true
    )]
    pub queue_timeout: String,
    /// Processes that serve the model side by side; -1: 1
    #[arg(long, env = "GANTRY_WORKERS", default_value = "-1", value_name = "N", allow_hyphen_values = true)]
    pub workers: String,
    /// Which worker gets a request: round-robin, least-loaded, memory-aware or prefix-aware
    #[arg(long, env = "GANTRY_DISPATCH", default_value = "least-loaded", value_name = "STRATEGY")]
    pub dispatch: String,
    /// How the KV cells are shared out: auto, split (each sequence has its own) or unified (one pool)
    #[arg(long, env = "GANTRY_KV_LAYOUT", default_value = "auto", value_name = "LAYOUT")]
    pub kv_layout: String,
    /// MiB of main memory for prompts that left the KV cache; 0: none; -1: 1024, at most an eighth of the memory
    #[arg(long, env = "GANTRY_CACHE_RAM", default_value = "-1", value_name = "MIB", allow_hyphen_values = true)]
    pub cache_ram: String,
    /// A directory, made when absent, for prompts that are to outlive the process [default: none]
    #[arg(long, env = "GANTRY_CACHE_DISK_DIR", value_name = "DIR")]
    pub cache_disk_dir: Option<PathBuf>,
    /// MiB that the prompts in --cache-disk-dir may take; -1: 4096
    #[arg(long, env = "GANTRY_CACHE_DISK", default_value = "-1", value_name = "MIB", allow_hyphen_values = true)]
    pub cache_disk: String,
    /// Seconds after which a prompt that nobody began with again is dropped from all tiers; -1: never
    #[arg(long, env = "GANTRY_CACHE_TTL", default_value = "-1", value_name = "SECONDS", allow_hyphen_values = true)]
    pub cache_ttl: String,
    /// The most tokens guessed at a time from repetitions and checked in one step; 0: none
    #[arg(long, env = "GANTRY_PROMPT_LOOKUP", default_value = "0", value_name = "N", allow_hyphen_values = true)]
    pub prompt_lookup: String,
    /// A smaller model of the same tokens, which guesses what the model then checks in one step
    #[arg(long, visible_alias = "spec-draft-model", env = "GANTRY_MODEL_DRAFT", value_name = "FILE")]
    pub model_draft: Option<PathBuf>,
    /// The most tokens guessed at a time with --model-draft
    #[arg(
        long,
        visible_alias = "draft-max",
        env = "GANTRY_SPEC_DRAFT_N_MAX",
        default_value = "8",
        value_name = "N",
        allow_hyphen_values = true
    )]
    pub spec_draft_n_max: String,
    /// Embed texts on /v1/embeddings, too; with an encoder, nothing else
    #[arg(
        long,
        visible_alias = "embedding",
        env = "GANTRY_EMBEDDINGS",
        action = ArgAction::SetTrue,
        value_parser = BoolishValueParser::new()
    )]
    pub embeddings: bool,
    /// Rank documents on /v1/rerank; the model must be a reranker
    #[arg(
        long,
        visible_alias = "rerank",
        env = "GANTRY_RERANKING",
        action = ArgAction::SetTrue,
        value_parser = BoolishValueParser::new()
    )]
    pub reranking: bool,
    /// How the vectors of a text's tokens become one: mean, cls, last or rank [default: what the model's file names]
    #[arg(long, env = "GANTRY_POOLING", value_name = "POOLING")]
    pub pooling: Option<String>,
    /// Tokens of texts that are embedded together, and so the longest text
    #[arg(long, env = "GANTRY_UBATCH_SIZE", default_value = "512", value_name = "TOKENS", allow_hyphen_values = true)]
    pub ubatch_size: String,
    /// Texts that are embedded together
    #[arg(long, env = "GANTRY_EMBEDDING_BATCH", default_value = "32", value_name = "N", allow_hyphen_values = true)]
    pub embedding_batch: String,
    /// Milliseconds that a text waits for others to be embedded with
    #[arg(long, env = "GANTRY_EMBEDDING_WAIT_MS", default_value = "2", value_name = "MS", allow_hyphen_values = true)]
    pub embedding_wait_ms: String,
    /// Milliseconds that a step may take while requests generate; -1: 2.5 times as long as their tokens alone
    #[arg(long, env = "GANTRY_STEP_MS_TARGET", default_value = "-1", value_name = "MS", allow_hyphen_values = true)]
    pub step_ms_target: String,
}

/// Where ggml's backends are.
#[derive(Clone, Debug, Default, Args)]
pub struct BackendArgs {
    /// Where ggml's backends are [default: `backends` beside the program, or `../lib/gantry`; without, its own for the CPU]
    #[arg(long, env = "GANTRY_BACKEND_DIR", value_name = "DIR")]
    pub backend_dir: Option<PathBuf>,
}

impl BackendArgs {
    /// The directory, the one beside the program where none is given.
    #[must_use]
    pub fn dir(&self) -> Option<PathBuf> {
        self.backend_dir.clone().or_else(gantry_engine::default_backend_dir)
    }

    fn check(&self, check: &mut Check) {
        if let Some(dir) = &self.backend_dir
            && !dir.is_dir()
        {
            check.0.push(format!("--backend-dir must be a readable directory, and {dir:?} is not"));
        }
    }
}

/// Flags about listening and ending, which `serve` and `pod` share.
#[derive(Debug, Args)]
pub struct HttpArgs {
    /// The address to listen on [default: 127.0.0.1 for serve, 0.0.0.0 for pod]
    #[arg(long, env = "GANTRY_HTTP_HOST", value_name = "HOST")]
    pub host: Option<String>,
    // Not GANTRY_PORT: Kubernetes sets that in every pod beside a Service called gantry.
    /// The port to listen on; 0: any free one, which is printed
    #[arg(long, env = "GANTRY_HTTP_PORT", default_value = "8080", value_name = "PORT", allow_hyphen_values = true)]
    pub port: String,
    /// Seconds that requests in flight may take to end after SIGTERM
    #[arg(
        long,
        env = "GANTRY_DRAIN_TIMEOUT",
        default_value = "120",
        value_name = "SECONDS",
        allow_hyphen_values = true
    )]
    pub drain_timeout: String,
}

/// Flags of `pod`.
#[derive(Debug, Args)]
pub struct PodArgs {
    /// Flags about listening
    #[command(flatten)]
    pub http: HttpArgs,
    /// Where ggml's backends are
    #[command(flatten)]
    pub backends: BackendArgs,
    /// The InferenceService whose pod this is
    #[arg(long, env = "GANTRY_SERVICE", value_name = "NAME")]
    pub service: String,
    /// Its namespace
    #[arg(long, env = "GANTRY_NAMESPACE", value_name = "NAME")]
    pub namespace: String,
    /// This pod's name
    #[arg(long, env = "GANTRY_POD", value_name = "NAME")]
    pub pod: String,
    /// Where models are kept
    #[arg(long, env = "GANTRY_CACHE_DIR", default_value = "/var/cache/gantry", value_name = "DIR")]
    pub cache_dir: PathBuf,
}

/// Flags of `validate`.
#[derive(Debug, Args)]
pub struct ValidateArgs {
    /// The GGUF file
    pub file: PathBuf,
    /// KV cells in total, for the memory estimate; 0: as the model was trained
    #[arg(short, long, default_value_t = 0, value_name = "TOKENS")]
    pub ctx_size: u32,
    /// Sequences, for the memory estimate
    #[arg(long, default_value_t = 8, value_name = "N")]
    pub parallel: u32,
    /// Count what --embeddings takes in the memory estimate
    #[arg(long, visible_alias = "embedding")]
    pub embeddings: bool,
    /// Tokens of texts that are embedded together, for the memory estimate
    #[arg(long, default_value_t = gantry_engine::DEFAULT_POOLED_TOKENS, value_name = "TOKENS")]
    pub ubatch_size: u32,
}

/// How to listen and end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpSettings {
    /// The address to listen on.
    pub host: String,
    /// The port; 0: any.
    pub port: u16,
    /// How long requests in flight may take to end.
    pub drain_timeout: Duration,
}

/// What `serve` needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServeSettings {
    /// How to listen and end.
    pub http: HttpSettings,
    /// Where ggml's backends are, where it is not left to the program.
    pub backend_dir: Option<PathBuf>,
    /// What to load.
    pub version: VersionSpec,
}

/// Every mistake in the settings.
#[derive(Debug, PartialEq, Eq)]
pub struct Problems(Vec<String>);

impl Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "invalid settings:")?;
        for problem in &self.0 {
            writeln!(f, "  {problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// Gathers mistakes; a value that is wrong is replaced by one that nobody will see.
#[derive(Default)]
struct Check(Vec<String>);

impl Check {
    fn number<T>(&mut self, flag: &str, text: &str, low: T, high: T) -> T
    where
        T: FromStr + PartialOrd + Display + Copy,
    {
        match text.trim().parse::<T>() {
            Ok(number) if low <= number && number <= high => number,
            _ => {
                self.0.push(format!("--{flag} must be a whole number from {low} to {high}, not {text:?}"));
                low
            }
        }
    }

    /// As [`Check::number`], where -1 and `auto` leave the choice to the engine.
    fn automatic(&mut self, flag: &str, text: &str, low: u32, high: u32) -> Option<u32> {
        match text.trim() {
            "-1" | "auto" => None,
            number => match number.parse() {
                Ok(number) if (low..=high).contains(&number) => Some(number),
                _ => {
                    let message = format!("--{flag} must be -1 or a whole number from {low} to {high}, not {text:?}");
                    self.0.push(message);
                    None
                }
            },
        }
    }

    /// As llama-server has it.
    fn gpu_layers(&mut self, flag: &str, text: &str) -> Option<u32> {
        if text.trim() == "all" { Some(ALL_LAYERS) } else { self.automatic(flag, text, 0, MAX_GPU_LAYERS) }
    }

    fn gpu_split(&mut self, args: &ServeArgs) -> GpuSplit {
        let list = |text: &Option<String>| -> Vec<String> {
            text.iter().flat_map(|text| text.split(',')).map(|part| part.trim().to_owned()).collect()
        };
        let devices = list(&args.device);
        if devices.len() > MAX_GPUS || devices.iter().any(String::is_empty) {
            let text = args.device.as_deref().unwrap_or_default();
            self.0.push(format!("--device must be 1 to {MAX_GPUS} names with commas between them, not {text:?}"));
        }
        let parts = list(&args.tensor_split);
        let tensor_split: Vec<u32> = parts.iter().filter_map(|part| part.parse().ok()).collect();
        if tensor_split.len() != parts.len() || parts.len() > MAX_GPUS {
            let text = args.tensor_split.as_deref().unwrap_or_default();
            let wanted = format!("1 to {MAX_GPUS} whole numbers with commas between them, such as 3,1");
            self.0.push(format!("--tensor-split must be {wanted}, not {text:?}"));
        }
        let mode = match args.split_mode.trim().to_ascii_lowercase().as_str() {
            "none" => SplitMode::None,
            "layer" => SplitMode::Layer,
            "row" => SplitMode::Row,
            _ => {
                self.0.push(format!("--split-mode must be none, layer or row, not {:?}", args.split_mode));
                SplitMode::default()
            }
        };
        let last_gpu = u32::try_from(MAX_GPUS - 1).unwrap_or(u32::MAX);
        GpuSplit { devices, mode, tensor_split, main_gpu: self.number("main-gpu", &args.main_gpu, 0, last_gpu) }
    }

    fn cache_type(&mut self, flag: &str, text: &str) -> CacheType {
        match text.trim().to_ascii_lowercase().as_str() {
            "f16" => CacheType::F16,
            "q8_0" => CacheType::Q8_0,
            "q4_0" => CacheType::Q4_0,
            _ => {
                self.0.push(format!("--{flag} must be f16, q8_0 or q4_0, not {text:?}"));
                CacheType::F16
            }
        }
    }

    fn dispatch(&mut self, flag: &str, text: &str) -> DispatchStrategy {
        text.trim().to_ascii_lowercase().parse().unwrap_or_else(|()| {
            let names = "round-robin, least-loaded, memory-aware or prefix-aware";
            self.0.push(format!("--{flag} must be {names}, not {text:?}"));
            DispatchStrategy::default()
        })
    }

    fn kv_layout(&mut self, flag: &str, text: &str) -> KvLayout {
        match text.trim().to_ascii_lowercase().as_str() {
            "auto" => KvLayout::Auto,
            "split" => KvLayout::Split,
            "unified" => KvLayout::Unified,
            _ => {
                self.0.push(format!("--{flag} must be auto, split or unified, not {text:?}"));
                KvLayout::Auto
            }
        }
    }

    fn pooling(&mut self, flag: &str, text: &str) -> Option<Pooling> {
        let all = [Pooling::Mean, Pooling::Cls, Pooling::Last, Pooling::Rank];
        let found = all.into_iter().find(|pooling| pooling.as_str() == text.trim().to_ascii_lowercase());
        if found.is_none() {
            self.0.push(format!("--{flag} must be mean, cls, last or rank, not {text:?}"));
        }
        found
    }

    fn name(&mut self, flag: &str, text: &str) {
        if text.is_empty() || text.len() > 256 || text.chars().any(char::is_control) {
            self.0.push(format!("--{flag} must be 1 to 256 characters without control characters, not {text:?}"));
        }
    }

    fn finish<T>(self, settings: T) -> Result<T, Problems> {
        if self.0.is_empty() { Ok(settings) } else { Err(Problems(self.0)) }
    }
}

impl HttpArgs {
    fn check(&self, check: &mut Check, default_host: &str) -> HttpSettings {
        let seconds = check.number("drain-timeout", &self.drain_timeout, 0, MAX_DRAIN_SECONDS);
        HttpSettings {
            host: self.host.clone().unwrap_or_else(|| default_host.to_owned()),
            port: check.number("port", &self.port, 0, u16::MAX),
            drain_timeout: Duration::from_secs(seconds),
        }
    }
}

impl PodArgs {
    /// Checks all flags.
    ///
    /// # Errors
    /// Lists every mistake.
    pub fn settings(&self) -> Result<HttpSettings, Problems> {
        let mut check = Check::default();
        let http = self.http.check(&mut check, "0.0.0.0");
        self.backends.check(&mut check);
        for (flag, name) in [("service", &self.service), ("namespace", &self.namespace), ("pod", &self.pod)] {
            check.name(flag, name);
        }
        check.finish(http)
    }
}

impl ServeArgs {
    /// What is asked for beside text.
    fn pooled(&self, check: &mut Check) -> Option<PooledConfig> {
        let mut pooling = self.pooling.as_ref().and_then(|text| check.pooling("pooling", text));
        let config = PooledConfig {
            pooling: None,
            max_batch: check.number("embedding-batch", &self.embedding_batch, 1, MAX_POOLED_BATCH),
            wait_ms: check.number("embedding-wait-ms", &self.embedding_wait_ms, 0, MAX_POOLED_WAIT_MS),
            batch_tokens: check.number("ubatch-size", &self.ubatch_size, 1, MAX_POOLED_TOKENS),
        };
        if self.reranking {
            if pooling.is_some_and(|pooling| pooling != Pooling::Rank) {
                check.0.push("--pooling must be rank, or left out, with --reranking".to_owned());
            }
            pooling = Some(Pooling::Rank);
        }
        (self.embeddings || self.reranking).then_some(PooledConfig { pooling, ..config })
    }

    /// Checks all flags.
    ///
    /// # Errors
    /// Lists every mistake.
    pub fn settings(&self) -> Result<ServeSettings, Problems> {
        let mut check = Check::default();
        let http = self.http.check(&mut check, "127.0.0.1");
        self.backends.check(&mut check);
        let keys = check.cache_type("cache-type-k", &self.cache_type_k);
        let values = self.cache_type_v.as_ref().map(|text| check.cache_type("cache-type-v", text));
        if values.is_some_and(|values| values != keys) {
            check.0.push("--cache-type-v must be the same as --cache-type-k".to_owned());
        }
        let stem = self.model.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        let served_name = self.alias.clone().or(stem).unwrap_or_default();
        check.name("alias", &served_name);
        if !self.model.is_file() {
            check.0.push(format!("--model must be a readable file, and {:?} is not", self.model));
        }
        if let Some(draft) = self.model_draft.as_ref().filter(|draft| !draft.is_file()) {
            check.0.push(format!("--model-draft must be a readable file, and {draft:?} is not"));
        }
        let draft_tokens = check.number("spec-draft-n-max", &self.spec_draft_n_max, 1, MAX_SPECULATION_TOKENS);
        let max_queue = u32::try_from(MAX_QUEUE).unwrap_or(u32::MAX);
        let mut watermark = |flag: &str, text: &str| check.automatic(flag, text, 0, max_queue).map(|n| n as usize);
        let high_watermark = watermark("high-watermark", &self.high_watermark);
        let low_watermark = watermark("low-watermark", &self.low_watermark);
        let queue_timeout = check.automatic("queue-timeout", &self.queue_timeout, 1, MAX_QUEUE_TIMEOUT_SECONDS);
        let cache_ram = check.automatic("cache-ram", &self.cache_ram, 0, MAX_CACHE_RAM_MIB);
        let cache_disk = self.cache_disk(&mut check, cache_ram);
        let cache_ttl = check.automatic("cache-ttl", &self.cache_ttl, 1, MAX_CACHE_TTL_SECONDS);
        let runtime = RuntimeSettings {
            ctx_size: check.number("ctx-size", &self.ctx_size, 0, MAX_CTX_SIZE),
            parallel: check.number("parallel", &self.parallel, 1, MAX_PARALLEL),
            threads: check.automatic("threads", &self.threads, 1, MAX_THREADS),
            cache_type: keys,
            gpu_layers: check.gpu_layers("n-gpu-layers", &self.n_gpu_layers),
            gpu_split: check.gpu_split(self),
            workers: check.automatic("workers", &self.workers, 1, MAX_WORKERS),
            scheduling: Scheduling {
                max_queue: check.number("max-queue", &self.max_queue, 0, MAX_QUEUE),
                high_watermark,
                low_watermark,
                queue_timeout_ms: queue_timeout.map(|seconds| u64::from(seconds) * 1000),
                dispatch: check.dispatch("dispatch", &self.dispatch),
            },
            engine: EngineTuning {
                kv_layout: check.kv_layout("kv-layout", &self.kv_layout),
                cache_ram_bytes: cache_ram.map(|mib| u64::from(mib) << 20),
                cache_disk,
                cache_ttl_ms: cache_ttl.map(|seconds| u64::from(seconds) * 1000),
                prompt_lookup: check.number("prompt-lookup", &self.prompt_lookup, 0, MAX_SPECULATION_TOKENS),
                draft: self
                    .model_draft
                    .clone()
                    .map(|model_path| DraftSettings { model_path, max_tokens: draft_tokens }),
                step_ms_target: check.automatic("step-ms-target", &self.step_ms_target, 1, MAX_STEP_MS_TARGET),
            },
            pooled: self.pooled(&mut check),
        };
        // How they go together; the worker count depends on the machine, the trained context on the file.
        if check.0.is_empty()
            && let Err(error) = runtime.shares(processors(), 0)
        {
            check.0.push(format!("--{} {}", error.param.replace('_', "-"), error.message));
        }
        check.finish(ServeSettings {
            http,
            backend_dir: self.backends.backend_dir.clone(),
            version: VersionSpec {
                name: STANDALONE_VERSION.to_owned(),
                digest: String::new(),
                model_path: self.model.clone(),
                served_name,
                runtime,
            },
        })
    }

    fn cache_disk(&self, check: &mut Check, cache_ram_mib: Option<u32>) -> Option<DiskCacheConfig> {
        let mib = check.automatic("cache-disk", &self.cache_disk, 1, MAX_CACHE_DISK_MIB);
        let max_bytes = mib.map_or(DEFAULT_PREFIX_CACHE_DISK_BYTES, |mib| u64::from(mib) << 20);
        let Some(dir) = self.cache_disk_dir.clone() else {
            if mib.is_some() {
                check.0.push("--cache-disk must be given together with --cache-disk-dir".to_owned());
            }
            return None;
        };
        if cache_ram_mib == Some(0) {
            let why = "prompts go to disk and come back through memory";
            check.0.push(format!("--cache-disk-dir must have --cache-ram above 0: {why}"));
        }
        Some(DiskCacheConfig { dir, max_bytes })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use kube::CustomResourceExt;

    use super::*;

    /// A file that is there.
    const DRAFT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/main.rs");

    fn serve(args: &[&str]) -> Result<ServeSettings, Problems> {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        let all = ["gantry-server", "serve", "--model", file].into_iter().chain(args.iter().copied());
        match Cli::try_parse_from(all).unwrap().command {
            Command::Serve(args) => args.settings(),
            other => panic!("{other:?}"),
        }
    }

    /// The largest value that the API server takes for a field of the spec, as its rules say.
    fn api_maximum(path: &str) -> u64 {
        let crd = serde_json::to_value(gantry_crds::InferenceService::crd()).unwrap();
        let (parents, field) = path.rsplit_once('.').unwrap();
        let mut parent = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        for name in parents.split('.') {
            parent = &parent["properties"][name];
        }
        let maximum = |schema: &serde_json::Value, name: &str| {
            let rules = schema["x-kubernetes-validations"].as_array().cloned().unwrap_or_default();
            let bound = format!("{name} <= ");
            let after = |rule: &serde_json::Value| {
                let digits: String =
                    rule["rule"].as_str()?.split_once(&bound)?.1.chars().take_while(char::is_ascii_digit).collect();
                digits.parse().ok()
            };
            rules.iter().filter_map(after).min()
        };
        let of_field = maximum(&parent["properties"][field], "self");
        let of_parent = maximum(parent, &format!("self.{field}"));
        of_field.into_iter().chain(of_parent).min().unwrap_or_else(|| panic!("no rule bounds {path}"))
    }

    #[test]
    fn the_api_takes_nothing_that_the_server_refuses() {
        for (path, limit) in [
            ("spec.replicas", u64::try_from(gantry_crds::MAX_REPLICAS).unwrap()),
            ("spec.runtime.contextSize", MAX_CTX_SIZE.into()),
            ("spec.runtime.parallel", MAX_PARALLEL.into()),
            ("spec.runtime.threads", MAX_THREADS.into()),
            ("spec.runtime.workers", MAX_WORKERS.into()),
            ("spec.runtime.gpuLayers", MAX_GPU_LAYERS.into()),
            ("spec.runtime.gpuSplit.mainGpu", u64::try_from(MAX_GPUS - 1).unwrap()),
            ("spec.scheduling.maxQueue", u64::try_from(MAX_QUEUE).unwrap()),
        ] {
            let maximum = api_maximum(path);
            assert!(maximum <= limit, "{path} may be {maximum}, and the server takes up to {limit}");
        }
        let crd = serde_json::to_string(&gantry_crds::InferenceService::crd()).unwrap();
        let drain = format!("duration(self.drainTimeout) <= duration('{}h')", MAX_DRAIN_SECONDS / 3600);
        assert!(crd.contains(&drain), "{drain}");
    }

    #[test]
    fn flags_mean_what_they_mean_for_llama_server() {
        let settings = serve(&[
            "-c",
            "4096",
            "--parallel",
            "4",
            "-t",
            "3",
            "--gpu-layers",
            "0",
            "--device",
            "CUDA1, CUDA0",
            "--split-mode",
            "row",
            "--tensor-split",
            "3,1",
            "--main-gpu",
            "1",
            "--cache-type-k",
            "q8_0",
            "-a",
            "chat",
            "--max-queue",
            "20",
            "--high-watermark",
            "16",
            "--low-watermark",
            "8",
            "--queue-timeout",
            "30",
            "--workers",
            "1",
            "--dispatch",
            "prefix-aware",
            "--kv-layout",
            "split",
            "--cache-ram",
            "64",
            "--cache-disk-dir",
            "/var/cache/prompts",
            "--cache-disk",
            "100",
            "--cache-ttl",
            "600",
            "--prompt-lookup",
            "6",
            "--model-draft",
            DRAFT,
            "--spec-draft-n-max",
            "4",
            "--step-ms-target",
            "80",
            "--embedding",
            "--pooling",
            "last",
            "--ubatch-size",
            "1024",
            "--embedding-batch",
            "16",
            "--embedding-wait-ms",
            "5",
        ]);
        let settings = settings.unwrap();
        let expected = RuntimeSettings {
            ctx_size: 4096,
            parallel: 4,
            threads: Some(3),
            cache_type: CacheType::Q8_0,
            gpu_layers: Some(0),
            gpu_split: GpuSplit {
                devices: vec!["CUDA1".to_owned(), "CUDA0".to_owned()],
                mode: SplitMode::Row,
                tensor_split: vec![3, 1],
                main_gpu: 1,
            },
            workers: Some(1),
            scheduling: Scheduling {
                max_queue: 20,
                high_watermark: Some(16),
                low_watermark: Some(8),
                queue_timeout_ms: Some(30_000),
                dispatch: DispatchStrategy::PrefixAware,
            },
            engine: EngineTuning {
                kv_layout: KvLayout::Split,
                cache_ram_bytes: Some(64 << 20),
                cache_disk: Some(DiskCacheConfig { dir: "/var/cache/prompts".into(), max_bytes: 100 << 20 }),
                cache_ttl_ms: Some(600_000),
                prompt_lookup: 6,
                draft: Some(DraftSettings { model_path: DRAFT.into(), max_tokens: 4 }),
                step_ms_target: Some(80),
            },
            pooled: Some(PooledConfig { pooling: Some(Pooling::Last), max_batch: 16, wait_ms: 5, batch_tokens: 1024 }),
        };
        assert_eq!((settings.version.runtime, settings.version.served_name), (expected, "chat".to_owned()));
        assert_eq!(settings.http.port, 8080);
    }

    #[test]
    fn the_defaults_leave_the_choice_to_the_engine() {
        let settings = serve(&[]).unwrap();
        assert_eq!(settings.version.runtime, RuntimeSettings::default());
        assert_eq!(settings.version.served_name, "Cargo");
    }

    #[test]
    fn every_mistake_is_named_at_once() {
        let problems = serve(&[
            "--port",
            "70000",
            "--ctx-size",
            "many",
            "--parallel",
            "0",
            "--threads",
            "0",
            "--n-gpu-layers",
            "-2",
            "--device",
            "CUDA0,,CUDA1",
            "--split-mode",
            "column",
            "--tensor-split",
            "0.5,x",
            "--main-gpu",
            "16",
            "--backend-dir",
            "/nowhere",
            "--cache-type-k",
            "q5",
            "--max-queue",
            "-1",
            "--drain-timeout",
            "1.5",
            "--alias",
            "",
            "--high-watermark",
            "x",
            "--low-watermark",
            "-2",
            "--queue-timeout",
            "0",
            "--workers",
            "0",
            "--dispatch",
            "fastest",
            "--kv-layout",
            "round",
            "--cache-ram",
            "-2",
            "--cache-disk-dir",
            "/var/cache/prompts",
            "--cache-disk",
            "0",
            "--cache-ttl",
            "0",
            "--prompt-lookup",
            "65",
            "--model-draft",
            "/nowhere",
            "--spec-draft-n-max",
            "0",
            "--step-ms-target",
            "0",
            "--pooling",
            "none",
            "--ubatch-size",
            "0",
            "--embedding-batch",
            "257",
            "--embedding-wait-ms",
            "-1",
        ])
        .unwrap_err();
        let flags = [
            "port",
            "ctx-size",
            "parallel",
            "threads",
            "n-gpu-layers",
            "device",
            "split-mode",
            "tensor-split",
            "main-gpu",
            "backend-dir",
            "cache-type-k",
            "max-queue",
            "drain-timeout",
            "alias",
            "high-watermark",
            "low-watermark",
            "queue-timeout",
            "workers",
            "dispatch",
            "kv-layout",
            "cache-ram",
            "cache-disk",
            "cache-ttl",
            "prompt-lookup",
            "model-draft",
            "spec-draft-n-max",
            "step-ms-target",
            "pooling",
            "ubatch-size",
            "embedding-batch",
            "embedding-wait-ms",
        ];
        for flag in flags {
            let told = problems.0.iter().filter(|problem| problem.starts_with(&format!("--{flag} must be"))).count();
            assert_eq!(told, 1, "--{flag}: {problems}");
        }
        assert_eq!(problems.0.len(), flags.len(), "{problems}");
    }

    #[test]
    fn layers_may_be_left_to_the_engine_or_be_all() {
        for (text, layers) in
            [("auto", None), ("-1", None), ("0", Some(0)), ("33", Some(33)), ("all", Some(ALL_LAYERS))]
        {
            assert_eq!(serve(&["--n-gpu-layers", text]).unwrap().version.runtime.gpu_layers, layers, "{text}");
        }
    }

    #[test]
    fn settings_that_do_not_go_together_are_named() {
        for (args, flag) in [
            (["--max-queue", "4", "--high-watermark", "5"], "--high-watermark must be"),
            (["--high-watermark", "5", "--low-watermark", "5"], "--low-watermark must be"),
            (["--parallel", "1", "--workers", "2"], "--workers must be"),
            (["--reranking", "--pooling=mean", "--parallel", "2"], "--pooling must be rank"),
        ] {
            let problems = serve(&args).unwrap_err();
            assert!(problems.0.len() == 1 && problems.0[0].starts_with(flag), "{problems}");
        }
    }

    #[test]
    fn the_disk_tier_needs_a_directory_and_memory() {
        let disk = |args: &[&str]| serve(args).map(|settings| settings.version.runtime.engine.cache_disk);
        let dir = "--cache-disk-dir=/prompts";
        let defaults = DiskCacheConfig { dir: "/prompts".into(), max_bytes: DEFAULT_PREFIX_CACHE_DISK_BYTES };
        assert_eq!(disk(&[dir]).unwrap(), Some(defaults));
        for (args, flag) in [
            (&["--cache-disk", "100"][..], "--cache-disk must be"),
            (&[dir, "--cache-ram", "0"], "--cache-disk-dir must have"),
        ] {
            let problems = disk(args).unwrap_err();
            assert!(problems.0.len() == 1 && problems.0[0].starts_with(flag), "{problems}");
        }
    }

    #[test]
    fn reranking_is_rank_pooling_and_nothing_is_pooled_unasked() {
        let pooled = |args: &[&str]| serve(args).unwrap().version.runtime.pooled;
        assert_eq!(pooled(&["--pooling", "mean"]), None);
        assert_eq!(pooled(&["--embeddings"]), Some(PooledConfig::default()));
        for args in [&["--reranking"][..], &["--rerank", "--embeddings"], &["--rerank", "--pooling", "rank"]] {
            let rank = PooledConfig { pooling: Some(Pooling::Rank), ..PooledConfig::default() };
            assert_eq!(pooled(args), Some(rank), "{args:?}");
        }
    }

    #[test]
    fn keys_and_values_of_the_cache_have_one_type() {
        assert!(serve(&["--cache-type-k", "q8_0", "--cache-type-v", "q8_0"]).is_ok());
        assert!(serve(&["--cache-type-v", "q8_0"]).is_err());
    }
}

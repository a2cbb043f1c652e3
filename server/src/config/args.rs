//! The command line.

use std::path::{Path, PathBuf};

use clap::builder::BoolishValueParser;
use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};

/// What most people look for: flags of `serve`, what each is, and what it is left out, where the parser's default is not that
/// in words.
pub(super) const MOST_USED: &[(&str, &str, Option<&str>)] = &[
    ("model", "the GGUF file or its address, instead of FILE", None),
    ("host", "the address to listen on", Some(SERVE_HOST)),
    ("port", "the port to listen on", None),
    ("ctx-size", "context of all sequences together", Some("as the model was trained")),
    ("parallel", "requests that generate at once", None),
    ("threads", "threads that compute", Some("one less than the processors")),
    ("n-gpu-layers", "layers on GPUs", Some("all that can be")),
    ("alias", "the model's name for clients", Some("the file's")),
    ("embeddings", "embed texts on /v1/embeddings, too", None),
];

/// Where `serve` listens unless it is told.
pub(super) const SERVE_HOST: &str = "127.0.0.1";

/// What `check` ends with, for its help.
const CHECK_EXIT_CODES: &str = "Exit code: 0 if every gate let it through or was skipped, 1 if a gate refused it, 2 if it was not judged: \
                                a wrong command line or file of gates, a reference that cannot be loaded";

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
    /// Take a GGUF file through the gates of a rollout, beside the model that answers now, without a cluster
    #[command(after_help = CHECK_EXIT_CODES)]
    Check(Box<CheckArgs>),
    /// Say what there is to compute with: the CPU backend that fits this processor, and GPUs
    Devices(BackendArgs),
    /// Check a file of settings, or show the settings that `serve` would have
    Config(ConfigArgs),
    /// Load and run one model for the server that started this process
    #[command(hide = true)]
    Worker(WorkerArgs),
    /// Render a chat template for the worker that started this process
    #[command(hide = true)]
    Template,
}

/// Flags of `worker`.
#[derive(Debug, Args)]
pub struct WorkerArgs {
    /// Where ggml's backends are
    #[command(flatten)]
    pub backends: BackendArgs,
    /// The numbers of the processors to keep to [default: all]
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    pub processors: Vec<u32>,
}

/// Flags of `config`.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: ConfigCommand,
}

/// See [`ConfigArgs`].
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Say everything that is wrong with a file of settings, by itself: the environment is not read
    Check {
        /// The file, as `serve --config` takes it
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Print the settings that `serve` would have with these flags, as such a file, and where each comes from
    Show(Box<ServeArgs>),
}

/// Flags of `serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// The GGUF file, as --model names it
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// A file of settings in YAML, whose keys are the names of these flags; flags and variables go before it
    #[arg(long, env = "GANTRY_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// What is wrong with that file apart from the values
    #[arg(skip)]
    pub config_problems: Vec<String>,
    /// The GGUF file, or the first of those that the model is split into: a path, or an address (https://, hf://, s3://, oci://), which
    /// is fetched
    #[arg(short, long, env = "GANTRY_MODEL", value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Models that are named by an address
    #[command(flatten)]
    pub cache: CacheArgs,
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
    /// Memory that the workers may use, all together, in MiB: as it runs short, ever less is served; -1: what the cgroup
    /// allows, or the machine has
    #[arg(long, env = "GANTRY_MEMORY_LIMIT", default_value = "-1", value_name = "MIB", allow_hyphen_values = true)]
    pub memory_limit: String,
    /// Most memory of GPUs, all together, that the model takes, in MiB; needs a GPU. As many layers go there as fit, unless
    /// --n-gpu-layers says how many; -1: what there is
    #[arg(long, env = "GANTRY_GPU_MEMORY", default_value = "-1", value_name = "MIB", allow_hyphen_values = true)]
    pub gpu_memory: String,
    /// Element type of the KV cache's keys: f16, q8_0 or q4_0
    #[arg(long, env = "GANTRY_CACHE_TYPE_K", default_value = "f16", value_name = "TYPE")]
    pub cache_type_k: String,
    /// Element type of the KV cache's values; must be that of the keys [default: that of the keys]
    #[arg(long, env = "GANTRY_CACHE_TYPE_V", value_name = "TYPE")]
    pub cache_type_v: Option<String>,
    /// The model name that clients use, with commas between several [default: the file's name without .gguf]
    #[arg(short, long, env = "GANTRY_ALIAS", value_name = "NAME", value_delimiter = ',')]
    pub alias: Vec<String>,
    /// A chat template in the place of the one in the model's file: its text, not the name of one
    #[arg(long, env = "GANTRY_CHAT_TEMPLATE", value_name = "TEXT")]
    pub chat_template: Option<String>,
    /// A file with such a template
    #[arg(long, env = "GANTRY_CHAT_TEMPLATE_FILE", value_name = "FILE")]
    pub chat_template_file: Option<PathBuf>,
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
    /// Processes that serve the model side by side; -1: one, or one for each socket that the threads need
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
    /// A smaller model of the same tokens, which guesses what the model then checks in one step: a path or an address
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
    /// Let requests ask for the beginnings of vectors (`dimensions`): the model was trained so that these are vectors, too
    #[arg(
        long,
        env = "GANTRY_MATRYOSHKA",
        action = ArgAction::SetTrue,
        value_parser = BoolishValueParser::new()
    )]
    pub matryoshka: bool,
    /// Tokens of texts that are embedded together, and so the longest text
    #[arg(long, env = "GANTRY_UBATCH_SIZE", default_value = "512", value_name = "TOKENS", allow_hyphen_values = true)]
    pub ubatch_size: String,
    /// Texts that are embedded together
    #[arg(long, env = "GANTRY_EMBEDDING_BATCH", default_value = "32", value_name = "N", allow_hyphen_values = true)]
    pub embedding_batch: String,
    /// Milliseconds that a text waits for others to be embedded with
    #[arg(long, env = "GANTRY_EMBEDDING_WAIT_MS", default_value = "2", value_name = "MS", allow_hyphen_values = true)]
    pub embedding_wait_ms: String,
    /// Milliseconds that a step may take while requests generate; -1: 2.1 times as long as their tokens alone
    #[arg(long, env = "GANTRY_STEP_MS_TARGET", default_value = "-1", value_name = "MS", allow_hyphen_values = true)]
    pub step_ms_target: String,
    /// Where a gap within a text is filled, have the model read what follows it first, as some were taught
    #[arg(
        long,
        env = "GANTRY_SPM_INFILL",
        action = ArgAction::SetTrue,
        value_parser = BoolishValueParser::new()
    )]
    pub spm_infill: bool,
}

/// Flags of models that are named by an address.
#[derive(Clone, Debug, Default, Args)]
pub struct CacheArgs {
    /// The SHA-256 that the model's file must have, where --model is an address; the store's or the file's own, which is told, if left out
    #[arg(long, env = "GANTRY_SHA256", value_name = "DIGEST")]
    pub sha256: Option<String>,
    /// Where models are kept that are named by an address [default: gantry in $XDG_CACHE_HOME, or ~/.cache]
    #[arg(long, env = "GANTRY_CACHE_DIR", value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
    /// MiB that models may take there: those that were used last stay
    #[arg(long, env = "GANTRY_CACHE_SIZE", default_value = "102400", value_name = "MIB", allow_hyphen_values = true)]
    pub cache_size: String,
    /// Ask no store: a model that is named by an address is what it was last, and must be there
    #[arg(long, env = "GANTRY_OFFLINE", action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub offline: bool,
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
    /// A port of its own for /healthz, /readyz and /metrics, which no crowd on the other keeps from answering; 0: any free
    /// one, which the log tells; -1: none for serve, 8081 for pod
    #[arg(
        long,
        env = "GANTRY_HTTP_METRICS_PORT",
        default_value = "-1",
        value_name = "PORT",
        allow_hyphen_values = true
    )]
    pub metrics_port: String,
    /// A port for gRPC, where that is to be served; 0: any free one, which the log tells; -1: none
    #[arg(long, env = "GANTRY_GRPC_PORT", default_value = "-1", value_name = "PORT", allow_hyphen_values = true)]
    pub grpc_port: String,
    /// A key that clients must show, with commas between several [default: whoever reaches the server may ask]
    #[arg(
        long,
        env = "GANTRY_API_KEY",
        value_name = "KEY,...",
        value_delimiter = ',',
        hide_env_values = true,
        allow_hyphen_values = true
    )]
    pub api_key: Vec<String>,
    /// A file of such keys, one a line, or a directory of such files, as a Secret is mounted; read again when it changes
    #[arg(long, env = "GANTRY_API_KEY_FILE", value_name = "PATH")]
    pub api_key_file: Option<PathBuf>,
    /// Origins whose pages may ask, with commas between several, or * for all [default: no page may]
    #[arg(long, env = "GANTRY_CORS_ORIGINS", value_name = "LIST", value_delimiter = ',')]
    pub cors_origins: Vec<String>,
    /// Answer requests for whichever model they name
    #[arg(long, env = "GANTRY_ANY_MODEL", action = ArgAction::SetTrue, value_parser = BoolishValueParser::new())]
    pub any_model: bool,
    /// Where to keep responses of the Responses API, so that requests may refer to them: file:///DIRECTORY, which servers may
    /// share, or s3://BUCKET/PREFIX [default: none are kept]
    #[arg(long, env = "GANTRY_RESPONSE_STORE", value_name = "URL")]
    pub response_store: Option<String>,
    /// Seconds that they are kept
    #[arg(
        long,
        env = "GANTRY_RESPONSE_TTL",
        default_value = "2592000",
        value_name = "SECONDS",
        allow_hyphen_values = true
    )]
    pub response_ttl: String,
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
    /// Names by which clients may ask for the model beside the one that its version is served by, with commas between them
    #[arg(long, env = "GANTRY_ALIAS", value_name = "NAME", value_delimiter = ',')]
    pub alias: Vec<String>,
    /// Where models are kept
    #[arg(long, env = "GANTRY_CACHE_DIR", default_value = "/var/cache/gantry", value_name = "DIR")]
    pub cache_dir: PathBuf,
    /// Bytes that may be kept there, prompts included; as much as the service says if left out
    #[arg(long, env = "GANTRY_CACHE_BYTES", value_name = "BYTES")]
    pub cache_bytes: Option<u64>,
    /// What the operator calls the resources that this pod was made with: it prepares versions that are meant for these
    #[arg(long, env = "GANTRY_POD_RESOURCES", value_name = "HASH")]
    pub pod_resources: Option<String>,
    /// Which of the service's two sets of pods this pod is of, blue or green: one answers, the other one may prepare a version
    #[arg(long, env = "GANTRY_SIDE", value_name = "SIDE")]
    pub side: Option<String>,
    /// Whether models may be fetched from private addresses, as those of a cluster and its machines are
    #[arg(long, env = "GANTRY_PRIVATE_SOURCES", default_value_t = true, action = ArgAction::Set, value_name = "BOOL")]
    pub private_sources: bool,
}

impl ValidateArgs {
    /// Has this file looked at, instead of the one that was named.
    pub fn use_file(&mut self, path: PathBuf) {
        (self.file, self.model) = (Some(path), None);
    }

    /// The file to look at.
    #[must_use]
    pub fn file(&self) -> &Path {
        self.file.as_ref().or(self.model.as_ref()).map_or(Path::new(""), |file| file)
    }
}

/// In what form `validate` reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ReportFormat {
    /// For people
    Text,
    /// For programs: all of it as one object
    Json,
    /// For code scanning: SARIF 2.1.0
    Sarif,
}

/// Flags of `validate`.
#[derive(Debug, Args)]
pub struct ValidateArgs {
    /// The GGUF file, or the first of those that the model is split into: a path, or an address as `serve` takes it
    #[arg(value_name = "FILE", required_unless_present = "model")]
    pub file: Option<PathBuf>,
    /// The same, as `serve` has it
    #[arg(short, long, value_name = "FILE", conflicts_with = "file")]
    pub model: Option<PathBuf>,
    /// Models that are named by an address
    #[command(flatten)]
    pub cache: CacheArgs,
    /// KV cells in total, as `serve` would be started with; 0: as the model was trained
    #[arg(short, long, default_value_t = 0, value_name = "TOKENS")]
    pub ctx_size: u32,
    /// Sequences, as `serve` would be started with
    #[arg(long, default_value_t = 8, value_name = "N")]
    pub parallel: u32,
    /// In what form to report on standard output
    #[arg(long, visible_alias = "output-format", value_enum, default_value_t = ReportFormat::Text, value_name = "FORMAT")]
    pub format: ReportFormat,
    /// Look at the header and the tokenizer alone, not at the weights, and load nothing
    #[arg(long)]
    pub header_only: bool,
    /// Read all of the weights, not a sample: it takes as long as the disk does
    #[arg(long, conflicts_with = "header_only")]
    pub all_weights: bool,
    /// Do not have a worker load the model
    #[arg(long)]
    pub no_load: bool,
    /// Where ggml's backends are, for the worker that loads the model
    #[command(flatten)]
    pub backends: BackendArgs,
    /// The model is to embed texts, too
    #[arg(long, visible_alias = "embedding")]
    pub embeddings: bool,
    /// How texts become vectors, where the file does not name it: mean, cls, last or rank
    #[arg(long, value_name = "KIND", value_parser = pooling)]
    pub pooling: Option<gantry_engine::Pooling>,
    /// Tokens of texts that are embedded together
    #[arg(long, default_value_t = gantry_engine::DEFAULT_POOLED_TOKENS, value_name = "TOKENS")]
    pub ubatch_size: u32,
}

fn pooling(text: &str) -> Result<gantry_engine::Pooling, String> {
    let found = gantry_engine::Pooling::ALL.into_iter().find(|pooling| pooling.as_str() == text);
    found.ok_or_else(|| "use mean, cls, last or rank".to_owned())
}

/// In what form `check` reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CheckFormat {
    /// For people
    Text,
    /// For programs: the gates as a ModelVersion's status has them
    Json,
}

/// Flags of `check`.
#[derive(Debug, Args)]
pub struct CheckArgs {
    /// The candidate: a GGUF file, or the first of those that the model is split into, as a path or as an address as `serve` takes it
    #[arg(value_name = "CANDIDATE", required_unless_present = "model")]
    pub file: Option<PathBuf>,
    /// The same, as `serve` has it
    #[arg(short, long, value_name = "CANDIDATE", conflicts_with = "file")]
    pub model: Option<PathBuf>,
    /// The model that answers now, a path or an address; without it the gates Drift and Performance are skipped
    #[arg(long, value_name = "FILE")]
    pub reference: Option<PathBuf>,
    /// A file, YAML or JSON, with what stands at spec.rollout.gates of the InferenceService [default: the gates for which there is
    /// what they need, with the limits that they have where none is given]
    #[arg(long, value_name = "FILE")]
    pub gates: Option<PathBuf>,
    /// A file with the golden prompts, as the ConfigMap has them at prompts.jsonl
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// In what form to report on standard output
    #[arg(long, visible_alias = "output-format", value_enum, default_value_t = CheckFormat::Text, value_name = "FORMAT")]
    pub format: CheckFormat,
    /// Models that are named by an address
    #[command(flatten)]
    pub cache: CacheArgs,
    /// KV cells in total, shared out equally among the sequences, as spec.runtime.contextSize
    #[arg(short, long, default_value = "8192", value_name = "TOKENS", allow_hyphen_values = true)]
    pub ctx_size: String,
    /// Sequences that generate at once, as spec.runtime.parallel
    #[arg(long, default_value = "8", value_name = "N", allow_hyphen_values = true)]
    pub parallel: String,
    /// Threads that compute, as spec.runtime.threads; -1: one less than the processors there are
    #[arg(short, long, default_value = "-1", value_name = "N", allow_hyphen_values = true)]
    pub threads: String,
    /// Processes that serve each model, as spec.runtime.workers; -1: one, or one for each socket that the threads need
    #[arg(long, default_value = "-1", value_name = "N", allow_hyphen_values = true)]
    pub workers: String,
    /// Element type of the KV cache, as spec.runtime.cacheType: f16, q8_0 or q4_0
    #[arg(long, default_value = "f16", value_name = "TYPE")]
    pub cache_type_k: String,
    /// Layers to put on GPUs, as spec.runtime.gpuLayers; 0: none; -1 or auto: all, where there is a GPU
    #[arg(long, visible_alias = "gpu-layers", default_value = "-1", value_name = "N", allow_hyphen_values = true)]
    pub n_gpu_layers: String,
    /// Memory of the pod that it is checked for, in MiB, as spec.resources.memory: candidate and reference must fit into it together;
    /// -1: what the cgroup allows, or the machine has
    #[arg(long, default_value = "-1", value_name = "MIB", allow_hyphen_values = true)]
    pub memory_limit: String,
    /// The models are to embed texts, too, as with spec.runtime.embeddings
    #[arg(long, visible_alias = "embedding")]
    pub embeddings: bool,
    /// How texts become vectors, where the files do not name it, as spec.runtime.embeddings.pooling: mean, cls, last or rank
    #[arg(long, value_name = "KIND", value_parser = pooling, requires = "embeddings")]
    pub pooling: Option<gantry_engine::Pooling>,
    /// A file with a chat template in the place of the one in the models' files, as spec.runtime.chatTemplate
    #[arg(long, value_name = "FILE")]
    pub chat_template_file: Option<PathBuf>,
    /// Where ggml's backends are
    #[command(flatten)]
    pub backends: BackendArgs,
}

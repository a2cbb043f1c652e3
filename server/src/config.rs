//! Settings: the command line over the environment over a file over the defaults, checked as a whole.
//!
//! Flags have llama-server's names and meanings where it has them. Every value is taken as text first, so that a start
//! with several mistakes names all of them at once ([`Problems`], exit code 2). `docs/configuration.md` is the
//! reference, and a test holds it to what is here. Absent: limits that nobody sets ([`crate::limits`]).

mod args;
mod candidate;
mod check;
mod file;
#[cfg(test)]
mod file_tests;
mod habits;
mod line;
mod setting;
mod shown;
mod source;
mod template;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

use gantry_engine::{
    DEFAULT_PREFIX_CACHE_DISK_BYTES, DiskCacheConfig, GpuSplit, MAX_GPUS, MAX_PARALLEL, MAX_POOLED_BATCH,
    MAX_POOLED_TOKENS, MAX_POOLED_WAIT_MS, MAX_SPECULATION_TOKENS, MAX_STEP_MS_TARGET, MAX_THREADS, PooledConfig,
    Pooling, SplitMode,
};

pub use self::args::{
    BackendArgs, CacheArgs, CheckArgs, CheckFormat, Cli, Command, ConfigArgs, ConfigCommand, HttpArgs, PodArgs,
    ReportFormat, ServeArgs, ValidateArgs,
};
pub use self::candidate::{CheckSettings, NamedModel};
use self::check::Check;
pub use self::check::Problems;
pub use self::file::Place;
pub use self::line::{Line, check_file, read};
pub use self::setting::{Origin, Setting, show};
pub(crate) use self::shown::shown;
use self::shown::shown_path;
use self::source::Environment;
pub use self::source::{ModelCache, RemoteModel, RemoteModels};
use crate::api::{ModelNames, Origins};
use crate::fetch::Digest;
use crate::keys::KeySources;
use crate::limits::{MAX_QUEUE, MAX_WORKERS};
use crate::processors::Processors;
use crate::response_store::{ResponseStoreSettings, StorePlace};
use crate::version::{DraftSettings, EngineTuning, RuntimeSettings, Scheduling, VersionSpec};

/// The name of the version that `serve` loads.
pub const STANDALONE_VERSION: &str = "standalone";
/// The port of probes and metrics in a pod, where the operator has them looked for.
const POD_METRICS_PORT: u16 = 8081;
/// The largest context in tokens that a flag may ask for.
const MAX_CTX_SIZE: u32 = 1 << 26;
/// The least context in tokens that flags may leave to each request that runs at once.
const MIN_REQUEST_TOKENS: u32 = 16;
/// The most main memory for prefixes that a flag may ask for, in MiB.
const MAX_CACHE_RAM_MIB: u32 = 1 << 24;
/// The least main memory that a flag may limit the workers to, in MiB: a worker without a model takes about half of it, and
/// who asks for less meant another unit.
const MIN_MEMORY_LIMIT_MIB: u32 = 64;
/// The most main memory that a flag may limit the workers to, in MiB.
const MAX_MEMORY_LIMIT_MIB: u32 = 1 << 24;
/// The most memory of GPUs that a flag may name, in MiB.
const MAX_GPU_MEMORY_MIB: u32 = 1 << 24;
/// The most disk for prefixes that a flag may ask for, in MiB.
const MAX_CACHE_DISK_MIB: u32 = 1 << 24;
/// The most bytes of a file of gates, which a few lines are.
const MAX_GATES_FILE_BYTES: usize = 64 * 1024;
/// The most bytes of a file of golden prompts: what the API server lets a ConfigMap have.
const MAX_PROMPTS_FILE_BYTES: usize = 1 << 20;
/// The least disk for models from stores that a flag may ask for, in MiB.
const MIN_CACHE_SIZE_MIB: u32 = 1;
/// The most disk for models from stores that a flag may ask for, in MiB.
const MAX_CACHE_SIZE_MIB: u32 = 1 << 28;
/// The longest time for which a flag may have unused prefixes kept, in seconds: a year.
const MAX_CACHE_TTL_SECONDS: u32 = 366 * 86_400;
/// The longest drain timeout, in seconds.
const MAX_DRAIN_SECONDS: u64 = 86_400;
/// The longest queue timeout, in seconds.
const MAX_QUEUE_TIMEOUT_SECONDS: u32 = 86_400;
/// The shortest time for which a flag may have responses kept, in seconds: longer than one in the background is silent.
const MIN_RESPONSE_TTL_SECONDS: u64 = 60;
/// The longest time for which a flag may have responses kept, in seconds: ten years.
const MAX_RESPONSE_TTL_SECONDS: u64 = 10 * 366 * 86_400;
/// The most bytes of a file of settings: two of the longest chat templates fit.
const MAX_CONFIG_BYTES: usize = 2 << 20;
/// Mistakes of a file of settings that are told besides wrong values: a file with more is one of something else.
const MAX_CONFIG_PROBLEMS: usize = 64;
/// Fields of a file of gates that are told to be none: a file with more is one of something else.
const MAX_GATES_UNKNOWN_FIELDS: usize = 64;
/// Levels of a file of gates: no gate has a field deeper in it than four.
const MAX_GATES_DEPTH: usize = 16;
/// Characters of a value that stand in what is said of it.
const MAX_SHOWN_CHARS: usize = 512;
/// Characters of one mistake that are told.
const MAX_PROBLEM_CHARS: usize = 4096;
/// Mistakes that are told; of more, their number is.
const MAX_PROBLEMS: usize = 192;

/// How to listen and end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpSettings {
    /// The address to listen on.
    pub host: String,
    /// The port; 0: any.
    pub port: u16,
    /// The port of probes and metrics, if they have one of their own; 0: any.
    pub metrics_port: Option<u16>,
    /// The port of gRPC, if that is served; 0: any.
    pub grpc_port: Option<u16>,
    /// How long requests in flight may take to end.
    pub drain_timeout: Duration,
    /// Where the keys are named that clients must show.
    pub keys: KeySources,
    /// The pages that may ask.
    pub origins: Origins,
    /// Names of the model beside its own.
    pub names: ModelNames,
    /// Where responses are kept, if they are.
    pub responses: Option<ResponseStoreSettings>,
}

/// What `serve` needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServeSettings {
    /// How to listen and end.
    pub http: HttpSettings,
    /// Where ggml's backends are, where it is not left to the program.
    pub backend_dir: Option<PathBuf>,
    /// What to load, whose files are known once what is remote is brought.
    pub version: VersionSpec,
    /// How texts are embedded where the model is an encoder, which does nothing else, asked for or not.
    pub encoder: PooledConfig,
    /// What of it is named by an address.
    pub remote: RemoteModels,
}

impl ServeSettings {
    /// Takes these files for what was named by an address.
    pub fn use_files(&mut self, model: Option<PathBuf>, draft: Option<PathBuf>) {
        if let Some(model) = model {
            self.version.model_path = model;
        }
        if let (Some(path), Some(settings)) = (draft, &mut self.version.runtime.engine.draft) {
            settings.model_path = path;
        }
    }
}

impl BackendArgs {
    fn check(&self, check: &mut Check) {
        if let Some(dir) = &self.backend_dir
            && !dir.is_dir()
        {
            check.problem(format!("--backend-dir must be a readable directory, and {} is not", shown_path(dir)));
        }
    }
}

impl HttpArgs {
    fn check(&self, check: &mut Check, default_host: &str, default_metrics_port: Option<u16>) -> HttpSettings {
        let seconds = check.number("drain-timeout", &self.drain_timeout, 0, MAX_DRAIN_SECONDS);
        let port = check.number("port", &self.port, 0, u16::MAX);
        let given = check.automatic("metrics-port", &self.metrics_port, 0, u16::MAX.into());
        let metrics_port = given.and_then(|port| u16::try_from(port).ok()).or(default_metrics_port);
        if metrics_port.is_some_and(|metrics| metrics != 0 && metrics == port) {
            check.problem(format!("--metrics-port must be another than --port, and both are {port}"));
        }
        let grpc_port =
            check.automatic("grpc-port", &self.grpc_port, 0, u16::MAX.into()).and_then(|port| u16::try_from(port).ok());
        for (flag, other) in [("port", Some(port)), ("metrics-port", metrics_port)] {
            if let Some(port) = grpc_port.filter(|port| *port != 0 && Some(*port) == other) {
                check.problem(format!("--grpc-port must be another than --{flag}, and both are {port}"));
            }
        }
        let keys = KeySources::new(&self.api_key, self.api_key_file.as_deref()).unwrap_or_else(|problems| {
            problems.into_iter().for_each(|problem| check.problem(problem));
            KeySources::default()
        });
        let origins = Origins::parse(&self.cors_origins).unwrap_or_else(|problem| {
            check.problem(format!("--cors-origins: {problem}"));
            Origins::None
        });
        let ttl = check.number("response-ttl", &self.response_ttl, MIN_RESPONSE_TTL_SECONDS, MAX_RESPONSE_TTL_SECONDS);
        let place = self.response_store.as_ref().and_then(|url| {
            let place = StorePlace::parse(url.trim());
            place.map_err(|wrong| check.problem(format!("--response-store {wrong}"))).ok()
        });
        let time_to_live = Duration::from_secs(ttl);
        HttpSettings {
            responses: place.map(|place| ResponseStoreSettings { place, time_to_live }),
            keys,
            origins,
            names: ModelNames { aliases: Vec::new(), any: self.any_model },
            host: self.host.clone().unwrap_or_else(|| default_host.to_owned()),
            port,
            metrics_port,
            grpc_port,
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
        let mut http = self.http.check(&mut check, "0.0.0.0", Some(POD_METRICS_PORT));
        self.alias.iter().for_each(|name| check.name("alias", name));
        http.names.aliases.clone_from(&self.alias);
        self.backends.check(&mut check);
        for (flag, name) in [("service", &self.service), ("namespace", &self.namespace), ("pod", &self.pod)] {
            check.name(flag, name);
        }
        check.finish(http)
    }
}

impl CacheArgs {
    /// The models that are named by an address, of which a file of this machine is none. Those of the others that are not there
    /// are told. `model` is named by this flag. `environment`: what it says of stores and of the cache, if it is looked at.
    fn models(
        &self,
        check: &mut Check,
        environment: Option<Environment<'_>>,
        (flag, model): (&str, &mut PathBuf),
        draft: Option<&mut PathBuf>,
    ) -> RemoteModels {
        let sha256 = self.digest(check);
        let stores = environment.unwrap_or(Environment::EMPTY);
        let remote = |check: &mut Check, flag: &str, named: &mut PathBuf, sha256: Option<Digest>| {
            let remote = if source::is_address(named) {
                source::remote(check, stores, flag, named, sha256)?
            } else {
                check.file(flag, named);
                return None;
            };
            let Some(path) = remote.source.local_path() else { return Some(remote) };
            *named = path.to_owned();
            check.file(flag, named);
            None
        };
        // It need not be where settings are only looked at.
        let is_named = !model.as_os_str().is_empty();
        let model = if is_named { remote(check, flag, model, sha256) } else { None };
        let draft = draft.and_then(|draft| remote(check, "model-draft", draft, None));
        if sha256.is_some() && is_named && model.is_none() {
            check.problem(String::from("--sha256 must be left out where --model is a file of this machine"));
        }
        // Without an address it is of no use, and its directory need not be there.
        let cache = match model.is_some() || draft.is_some() {
            true => self.cache(check, environment),
            false => ModelCache { dir: PathBuf::new(), limit_bytes: 0, offline: self.offline },
        };
        RemoteModels { cache, model, draft }
    }
}

impl ValidateArgs {
    /// Looks whether there is a file at all, in the words of `serve`, and gives what is to be brought before it is.
    ///
    /// # Errors
    /// There is none.
    pub fn check(&self) -> Result<RemoteModels, Problems> {
        let mut check = Check::default();
        let mut file = self.file().to_owned();
        let models = self.cache.models(&mut check, Some(Environment::OWN), ("model", &mut file), None);
        check.finish(models)
    }
}

impl ServeArgs {
    fn gpu_split(&self, check: &mut Check) -> GpuSplit {
        let list = |text: &Option<String>| -> Vec<String> {
            text.iter().flat_map(|text| text.split(',')).map(|part| part.trim().to_owned()).collect()
        };
        let devices = list(&self.device);
        if devices.len() > MAX_GPUS || devices.iter().any(String::is_empty) {
            let text = self.device.as_deref().unwrap_or_default();
            check.problem(format!(
                "--device must be 1 to {MAX_GPUS} names with commas between them, not {}",
                shown(text)
            ));
        }
        let parts = list(&self.tensor_split);
        let tensor_split: Vec<u32> = parts.iter().filter_map(|part| part.parse().ok()).collect();
        if tensor_split.len() != parts.len() || parts.len() > MAX_GPUS {
            let text = self.tensor_split.as_deref().unwrap_or_default();
            let wanted = format!("1 to {MAX_GPUS} whole numbers with commas between them, such as 3,1");
            check.problem(format!("--tensor-split must be {wanted}, not {}", shown(text)));
        }
        let mode = match self.split_mode.trim().to_ascii_lowercase().as_str() {
            "none" => SplitMode::None,
            "layer" => SplitMode::Layer,
            "row" => SplitMode::Row,
            _ => {
                check.problem(format!("--split-mode must be none, layer or row, not {}", shown(&self.split_mode)));
                SplitMode::default()
            }
        };
        let last_gpu = u32::try_from(MAX_GPUS - 1).unwrap_or(u32::MAX);
        GpuSplit { devices, mode, tensor_split, main_gpu: check.number("main-gpu", &self.main_gpu, 0, last_gpu) }
    }

    /// How texts are embedded or ranked, if they are.
    fn pooled(&self, check: &mut Check) -> PooledConfig {
        let mut pooling = self.pooling.as_ref().and_then(|text| check.pooling("pooling", text));
        let config = PooledConfig {
            pooling: None,
            max_batch: check.number("embedding-batch", &self.embedding_batch, 1, MAX_POOLED_BATCH),
            wait_ms: check.number("embedding-wait-ms", &self.embedding_wait_ms, 0, MAX_POOLED_WAIT_MS),
            batch_tokens: check.number("ubatch-size", &self.ubatch_size, 1, MAX_POOLED_TOKENS),
        };
        if self.reranking {
            if pooling.is_some_and(|pooling| pooling != Pooling::Rank) {
                check.problem("--pooling must be rank, or left out, with --reranking".to_owned());
            }
            pooling = Some(Pooling::Rank);
        }
        PooledConfig { pooling, ..config }
    }

    /// Checks all flags, with those that a file gives.
    ///
    /// # Errors
    /// Lists every mistake.
    pub fn settings(&self) -> Result<ServeSettings, Problems> {
        let mut check = Check(self.config_problems.clone());
        // A file of which not all was understood may name one.
        if self.file.is_none() && self.model.is_none() && check.found_none() {
            let where_to = "on the command line, by GANTRY_MODEL, or as `model` in the file of --config";
            check.problem(format!(
                "no model is named: give its file or its address {where_to}; `gantry-server serve --help` lists all flags"
            ));
        }
        self.settings_after(check, Some(Environment::OWN))
    }

    /// As [`ServeArgs::settings`], but that no model need be named.
    ///
    /// # Errors
    /// Lists every mistake.
    pub fn check(&self) -> Result<(), Problems> {
        self.settings_after(Check(self.config_problems.clone()), Some(Environment::OWN)).map(drop)
    }

    /// As [`ServeArgs::check`], whatever the environment says of stores and of where the cache is.
    fn check_alone(&self) -> Result<(), Problems> {
        self.settings_after(Check(self.config_problems.clone()), None).map(drop)
    }

    fn settings_after(
        &self,
        mut check: Check,
        environment: Option<Environment<'_>>,
    ) -> Result<ServeSettings, Problems> {
        let mut http = self.http.check(&mut check, args::SERVE_HOST, None);
        self.backends.check(&mut check);
        let keys = check.cache_type("cache-type-k", &self.cache_type_k);
        let values = self.cache_type_v.as_ref().map(|text| check.cache_type("cache-type-v", text));
        if values.is_some_and(|values| values != keys) {
            check.problem("--cache-type-v must be the same as --cache-type-k".to_owned());
        }
        let (mut model, mut draft) = (self.model_file(&mut check), self.model_draft.clone());
        let remote = self.cache.models(&mut check, environment, ("model", &mut model), draft.as_mut());
        let mut names = self.alias.clone();
        names.iter().for_each(|name| check.name("alias", name));
        if names.is_empty() {
            names.extend(source::name_of(&model, remote.model.as_ref()));
            names.iter().for_each(|name| check.name_of_file("model", name));
        }
        let served_name = if names.is_empty() { String::new() } else { names.remove(0) };
        http.names.aliases = names;
        let draft_tokens = check.number("spec-draft-n-max", &self.spec_draft_n_max, 1, MAX_SPECULATION_TOKENS);
        let max_queue = u32::try_from(MAX_QUEUE).unwrap_or(u32::MAX);
        let mut watermark = |flag: &str, text: &str| check.automatic(flag, text, 0, max_queue).map(|n| n as usize);
        let high_watermark = watermark("high-watermark", &self.high_watermark);
        let low_watermark = watermark("low-watermark", &self.low_watermark);
        let queue_timeout = check.automatic("queue-timeout", &self.queue_timeout, 1, MAX_QUEUE_TIMEOUT_SECONDS);
        let cache_ram = check.automatic("cache-ram", &self.cache_ram, 0, MAX_CACHE_RAM_MIB);
        let memory_limit =
            check.automatic("memory-limit", &self.memory_limit, MIN_MEMORY_LIMIT_MIB, MAX_MEMORY_LIMIT_MIB);
        let gpu_memory = check.automatic("gpu-memory", &self.gpu_memory, 1, MAX_GPU_MEMORY_MIB);
        let cache_disk = self.cache_disk(&mut check, cache_ram);
        let cache_ttl = check.automatic("cache-ttl", &self.cache_ttl, 1, MAX_CACHE_TTL_SECONDS);
        let pooled = self.pooled(&mut check);
        let runtime = RuntimeSettings {
            ctx_size: check.number("ctx-size", &self.ctx_size, 0, MAX_CTX_SIZE),
            parallel: check.number("parallel", &self.parallel, 1, MAX_PARALLEL),
            threads: check.automatic("threads", &self.threads, 1, MAX_THREADS),
            cache_type: keys,
            gpu_layers: check.gpu_layers("n-gpu-layers", &self.n_gpu_layers),
            gpu_split: self.gpu_split(&mut check),
            gpu_memory_bytes: gpu_memory.map(|mib| u64::from(mib) << 20),
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
                memory_limit_bytes: memory_limit.map(|mib| u64::from(mib) << 20),
                prompt_lookup: check.number("prompt-lookup", &self.prompt_lookup, 0, MAX_SPECULATION_TOKENS),
                draft: draft.map(|model_path| DraftSettings { model_path, max_tokens: draft_tokens }),
                step_ms_target: check.automatic("step-ms-target", &self.step_ms_target, 1, MAX_STEP_MS_TARGET),
                chat_template: template::chat_template(
                    &mut check,
                    self.chat_template.as_deref(),
                    self.chat_template_file.as_deref(),
                ),
                infill_suffix_first: self.spm_infill,
                ..EngineTuning::default()
            },
            pooled: (self.embeddings || self.reranking).then_some(pooled),
            cuts_vectors: self.matryoshka,
        };
        let least = runtime.parallel.saturating_mul(MIN_REQUEST_TOKENS);
        if runtime.ctx_size != 0 && runtime.ctx_size < least {
            check.problem(format!(
                "--ctx-size must be 0 or at least {least}, {MIN_REQUEST_TOKENS} tokens for each of --parallel {}, and is {}",
                runtime.parallel, runtime.ctx_size
            ));
        }
        if runtime.gpu_memory_bytes.is_some() && runtime.asks_for_gpus() == Some(false) {
            check.problem("--gpu-memory must be left out where no layer goes on a GPU".to_owned());
        }
        // How they go together; the worker count depends on the machine, the trained context on the file.
        if check.found_none()
            && let Err(error) = runtime.shares(Processors::here(), 0)
        {
            check.problem(format!("--{} {}", error.param.replace('_', "-"), error.message));
        }
        check.finish(ServeSettings {
            http,
            backend_dir: self.backends.backend_dir.clone(),
            version: VersionSpec {
                name: STANDALONE_VERSION.to_owned(),
                digest: String::new(),
                model_path: model,
                served_name,
                runtime,
            },
            encoder: pooled,
            remote,
        })
    }

    /// The model's file, with a flag or without.
    fn model_file(&self, check: &mut Check) -> PathBuf {
        match (&self.file, &self.model) {
            (Some(file), Some(model)) if file != model => {
                let (one, other) = (shown_path(file), shown_path(model));
                check.problem(format!("two models are named, {one} and with --model {other}: one is served"));
                file.clone()
            }
            (file, model) => file.as_ref().or(model.as_ref()).cloned().unwrap_or_default(),
        }
    }

    fn cache_disk(&self, check: &mut Check, cache_ram_mib: Option<u32>) -> Option<DiskCacheConfig> {
        let mib = check.automatic("cache-disk", &self.cache_disk, 1, MAX_CACHE_DISK_MIB);
        let max_bytes = mib.map_or(DEFAULT_PREFIX_CACHE_DISK_BYTES, |mib| u64::from(mib) << 20);
        let Some(dir) = self.cache_disk_dir.clone() else {
            if mib.is_some() {
                check.problem("--cache-disk must be given together with --cache-disk-dir".to_owned());
            }
            return None;
        };
        if cache_ram_mib == Some(0) {
            let why = "prompts go to disk and come back through memory";
            check.problem(format!("--cache-disk-dir must have --cache-ram above 0: {why}"));
        }
        Some(DiskCacheConfig { dir, max_bytes })
    }
}

//! One model, loaded: its settings, its bounded queue and its supervised worker process.
//!
//! [`Version::load`] starts a [`supervisor`] task, which owns the worker ([`process`]) and the table of its requests,
//! and restarts it by the [`restart`] policy. [`Version::submit`] takes a place ([`admission`]) and returns a
//! [`Generation`]; the place is given back when the worker has let go of the request, not when the client has, so the
//! engine's queue can never be longer than the front believes. Absent: which version answers ([`crate::routing`]).

mod admission;
mod generation;
mod process;
mod restart;
mod supervisor;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use gantry_engine::{CacheType, EngineConfig, GenerationParams, ModelInfo, ParamError, Prompt};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot, watch};

use crate::protocol::Heartbeat;
use admission::{Admission, Refusal};
use supervisor::Command;

pub use generation::{Completion, Generation, GenerationError};
pub use process::WorkerConfig;

/// What to load, under which name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionSpec {
    /// The version's name, as responses carry it: a `ModelVersion`'s name in a pod.
    pub name: String,
    /// `sha256:<hex>` of the file, or empty where nobody computed it.
    pub digest: String,
    /// The GGUF file.
    pub model_path: PathBuf,
    /// The model name that clients use.
    pub served_name: String,
    /// How to run it.
    pub runtime: RuntimeSettings,
}

/// How a model is run; the names are llama-server's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuntimeSettings {
    /// KV cells in total, shared out equally among the sequences; 0: as the model was trained.
    pub ctx_size: u32,
    /// Sequences that generate at once.
    pub parallel: u32,
    /// Threads that compute; `None`: one less than the processors there are.
    pub threads: Option<u32>,
    /// The element type of the KV cache.
    pub cache_type: CacheType,
    /// Layers on a GPU; `None`: all that can be.
    pub gpu_layers: Option<u32>,
    /// Requests that may wait while all sequences are busy.
    pub max_queue: usize,
}

impl Default for RuntimeSettings {
    fn default() -> Self {
        Self {
            ctx_size: 0,
            parallel: gantry_engine::DEFAULT_PARALLEL,
            threads: None,
            cache_type: CacheType::default(),
            gpu_layers: None,
            max_queue: gantry_engine::DEFAULT_MAX_QUEUE,
        }
    }
}

impl VersionSpec {
    fn engine_config(&self) -> EngineConfig {
        let RuntimeSettings { ctx_size, parallel, threads, cache_type, gpu_layers, max_queue } = self.runtime;
        EngineConfig {
            ctx_size,
            parallel,
            threads,
            cache_type,
            gpu_layers,
            // Admission is the front's; the engine's own limit must never refuse what the front let in.
            max_queue: max_queue + parallel as usize,
            ..EngineConfig::new(&self.model_path)
        }
    }
}

/// What a request asks of a version.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// From what to generate.
    pub prompt: Prompt,
    /// How.
    pub params: GenerationParams,
}

/// The life of a version's worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerHealth {
    /// The first worker loads the model.
    Loading,
    /// A worker answers.
    Ready,
    /// The worker died and another one is on its way.
    Restarting {
        /// Crashes in the window, this one included.
        attempt: u32,
        /// What became of the last one.
        reason: String,
    },
    /// It crashed [`CRASH_LIMIT`](crate::limits::CRASH_LIMIT) times within
    /// [`CRASH_WINDOW`](crate::limits::CRASH_WINDOW), or never loaded; it is still tried again from time to time.
    Failed {
        /// What became of the last one.
        reason: String,
    },
    /// Retired; final.
    Stopped,
}

impl WorkerHealth {
    /// The one table of what may follow what.
    #[must_use]
    pub fn may_become(&self, next: &Self) -> bool {
        match (self, next) {
            (Self::Stopped, _) | (_, Self::Loading) => false,
            (_, Self::Stopped) => true,
            (Self::Loading, next) => matches!(next, Self::Ready),
            (Self::Ready, next) => matches!(next, Self::Restarting { .. } | Self::Failed { .. }),
            (Self::Restarting { .. } | Self::Failed { .. }, _) => true,
        }
    }

    /// A label for metrics and logs.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self {
            Self::Loading => "loading",
            Self::Ready => "ready",
            Self::Restarting { .. } => "restarting",
            Self::Failed { .. } => "failed",
            Self::Stopped => "stopped",
        }
    }
}

/// A version's figures, as of its worker's last heartbeat where they are the worker's.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VersionStats {
    /// Requests that wait for a sequence.
    pub queued: u32,
    /// Requests that hold a sequence.
    pub running: u32,
    /// Sequences there are.
    pub slots: u32,
    /// Requests that may wait.
    pub max_queue: usize,
    /// Tokens generated a second, over the last seconds.
    pub tokens_per_second: f64,
    /// The worker's process; `None` while there is none.
    pub worker_pid: Option<u32>,
    /// The worker's memory in RAM.
    pub worker_rss_bytes: u64,
    /// KV cells in use.
    pub kv_used_cells: u64,
    /// KV cells there are.
    pub kv_total_cells: u64,
    /// Prompt tokens read by this worker.
    pub prompt_tokens_total: u64,
    /// Tokens generated by this worker.
    pub generated_tokens_total: u64,
    /// Workers that died.
    pub restarts: u32,
}

/// A version could not be loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// The settings are out of range.
    #[error("{0}")]
    Settings(ParamError),
    /// The worker process could not be started.
    #[error("cannot start a worker process: {0}")]
    Spawn(String),
    /// The worker says that the model cannot be loaded.
    #[error("{0}")]
    Model(String),
    /// The worker died while it loaded the model.
    #[error("the worker died while it loaded the model: {0}")]
    WorkerDied(String),
}

/// A request was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// As many requests wait as may wait.
    #[error("{waiting} requests are waiting for this model, which is the limit; try again in {retry_after:?}")]
    QueueFull {
        /// The limit.
        waiting: usize,
        /// When a try is worth it, computed from the observed rate of service.
        retry_after: Duration,
    },
    /// No worker can take it now, but one may soon.
    #[error("the model worker is not available: {reason}")]
    Unavailable {
        /// Why.
        reason: String,
        /// When a try is worth it.
        retry_after: Duration,
    },
    /// The version is being retired: submit to the one that is active now.
    #[error("this version is being retired")]
    Retired,
    /// A parameter is out of its range.
    #[error("{0}")]
    InvalidParam(ParamError),
}

/// What the supervisor writes and everyone else reads.
struct Shared {
    spec: VersionSpec,
    admission: Arc<Admission>,
    health: watch::Sender<WorkerHealth>,
    heartbeat: watch::Sender<Heartbeat>,
    model: watch::Sender<Option<ModelInfo>>,
    /// Requests whose worker said `Started`; written by the supervisor alone.
    running: AtomicU32,
    /// 0: none.
    worker_pid: AtomicU32,
    restarts: AtomicU32,
    loaded_at: OnceLock<SystemTime>,
}

impl Shared {
    fn new(spec: VersionSpec) -> Arc<Self> {
        let slots = spec.runtime.parallel as usize;
        Arc::new(Self {
            admission: Arc::new(Admission::new(spec.runtime.max_queue + slots, slots)),
            spec,
            health: watch::Sender::new(WorkerHealth::Loading),
            heartbeat: watch::Sender::new(Heartbeat::default()),
            model: watch::Sender::new(None),
            running: AtomicU32::new(0),
            worker_pid: AtomicU32::new(0),
            restarts: AtomicU32::new(0),
            loaded_at: OnceLock::new(),
        })
    }

    /// Moves the worker's life on.
    fn move_to(&self, next: WorkerHealth) {
        self.health.send_modify(|health| {
            if health.may_become(&next) {
                *health = next;
            } else {
                tracing::error!(from = health.label(), to = next.label(), "a worker's life cannot go that way");
            }
        });
    }
}

/// A loaded model and its worker. Dropping it without [`Version::retire`] ends the worker once its last generation is
/// dropped too.
pub struct Version {
    shared: Arc<Shared>,
    /// Unbounded by type, bounded by admission: at most a submission and a cancellation for each place, and probes,
    /// which their callers await.
    commands: mpsc::UnboundedSender<Command>,
    next_id: AtomicU64,
}

impl Version {
    /// Starts a worker, has it load the model and waits until the first token is decoded. Dropping the future ends
    /// the worker. `progress` receives the share of the model that is read, 0 to 1.
    ///
    /// # Errors
    /// The settings are out of range, or the worker could not load the model, or died of it.
    pub async fn load(
        spec: VersionSpec,
        workers: &WorkerConfig,
        progress: watch::Sender<f32>,
    ) -> Result<Arc<Version>, LoadError> {
        check_settings(&spec.runtime)?;
        let shared = Shared::new(spec);
        let (commands, inbox) = mpsc::unbounded_channel();
        let (first, loaded) = oneshot::channel();
        tokio::spawn(supervisor::run(Arc::clone(&shared), workers.clone(), inbox, progress, first));
        loaded.await.unwrap_or_else(|_| Err(LoadError::WorkerDied("its supervisor ended".to_owned())))?;
        shared.loaded_at.get_or_init(SystemTime::now);
        Ok(Arc::new(Version { shared, commands, next_id: AtomicU64::new(1) }))
    }

    /// What was loaded.
    #[must_use]
    pub fn spec(&self) -> &VersionSpec {
        &self.shared.spec
    }

    /// The worker's life, now and as it changes.
    #[must_use]
    pub fn health(&self) -> watch::Receiver<WorkerHealth> {
        self.shared.health.subscribe()
    }

    /// What the worker says of the model.
    #[must_use]
    pub fn model(&self) -> Option<ModelInfo> {
        self.shared.model.borrow().clone()
    }

    /// When the model was first ready, in Unix seconds.
    #[must_use]
    pub fn loaded_at_unix_seconds(&self) -> u64 {
        let since = self.shared.loaded_at.get().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        since.map(|d| d.as_secs()).unwrap_or_default()
    }

    /// The figures as they are known now.
    #[must_use]
    pub fn stats(&self) -> VersionStats {
        let beat = *self.shared.heartbeat.borrow();
        let in_flight = u32::try_from(self.shared.admission.in_flight()).unwrap_or(u32::MAX);
        let running = self.shared.running.load(Ordering::Relaxed).min(in_flight);
        let pid = self.shared.worker_pid.load(Ordering::Relaxed);
        VersionStats {
            queued: in_flight - running,
            running,
            slots: self.shared.spec.runtime.parallel,
            max_queue: self.shared.spec.runtime.max_queue,
            tokens_per_second: beat.engine.tokens_per_second,
            worker_pid: (pid != 0).then_some(pid),
            worker_rss_bytes: beat.rss_bytes,
            kv_used_cells: beat.engine.kv_used_cells,
            kv_total_cells: beat.engine.kv_total_cells,
            prompt_tokens_total: beat.engine.prompt_tokens_total,
            generated_tokens_total: beat.engine.generated_tokens_total,
            restarts: self.shared.restarts.load(Ordering::Relaxed),
        }
    }

    /// Whether a token can be decoded now. Concurrent calls share one probe, and a success stands for
    /// [`PROBE_CACHE`](crate::limits::PROBE_CACHE).
    ///
    /// # Errors
    /// Says why not.
    pub async fn probe(&self) -> Result<(), String> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(Command::Probe(reply)).map_err(|_| "the version has ended".to_owned())?;
        answer.await.unwrap_or_else(|_| Err("the version has ended".to_owned()))
    }

    /// Hands a request to the worker. Dropping the [`Generation`] cancels it.
    ///
    /// # Errors
    /// The queue is full, no worker is ready, the version is being retired, or a parameter is out of its range.
    pub async fn submit(&self, request: GenerateRequest) -> Result<Generation, SubmitError> {
        request.params.validate().map_err(SubmitError::InvalidParam)?;
        match &*self.shared.health.borrow() {
            WorkerHealth::Ready => {}
            WorkerHealth::Stopped => return Err(SubmitError::Retired),
            other => return Err(unavailable(other)),
        }
        let place = self.shared.admission.enter().map_err(|refusal| match refusal {
            Refusal::Closed => SubmitError::Retired,
            Refusal::Full { retry_after } => {
                SubmitError::QueueFull { waiting: self.shared.spec.runtime.max_queue, retry_after }
            }
        })?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (events, receiver) = mpsc::channel(crate::limits::MAX_CLIENT_EVENT_BACKLOG);
        self.commands.send(Command::Submit { id, request, events, place }).map_err(|_| SubmitError::Retired)?;
        Ok(Generation::new(id, receiver, self.commands.clone()))
    }

    /// Takes no further request, lets those in flight end for at most `drain_timeout`, fails the rest and stops the
    /// worker. Returns when the worker is gone.
    pub async fn retire(self: Arc<Self>, drain_timeout: Duration) {
        self.shared.admission.close();
        let (done, ended) = oneshot::channel();
        if self.commands.send(Command::Retire { drain_timeout, done }).is_ok() {
            // An error means that the supervisor has ended already, which is what is waited for.
            let _ = ended.await;
        }
    }
}

fn check_settings(runtime: &RuntimeSettings) -> Result<(), LoadError> {
    let refuse =
        |param: &str, message: String| Err(LoadError::Settings(ParamError { param: param.to_owned(), message }));
    if runtime.parallel == 0 || runtime.parallel > gantry_engine::MAX_PARALLEL {
        return refuse("parallel", format!("must be 1 to {}, not {}", gantry_engine::MAX_PARALLEL, runtime.parallel));
    }
    if runtime.threads == Some(0) {
        return refuse("threads", "must be at least 1".to_owned());
    }
    if runtime.max_queue > crate::limits::MAX_QUEUE {
        return refuse("max_queue", format!("must be at most {}, not {}", crate::limits::MAX_QUEUE, runtime.max_queue));
    }
    Ok(())
}

fn unavailable(health: &WorkerHealth) -> SubmitError {
    let reason = match health {
        WorkerHealth::Restarting { attempt, reason } => {
            format!("it died ({reason}) and is restarted, attempt {attempt}")
        }
        WorkerHealth::Failed { reason } => format!("it keeps failing: {reason}"),
        other => other.label().to_owned(),
    };
    SubmitError::Unavailable { reason, retry_after: Duration::from_secs(crate::limits::RETRY_AFTER_MIN_SECONDS) }
}

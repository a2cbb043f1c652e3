//! One model, loaded: its settings, its bounded queue and its supervised worker processes.
//!
//! [`Version::load`] starts a [`supervisor`] task for each worker, which owns its process ([`process`]) and the table of
//! its requests, and restarts it by the [`restart`] policy. [`Version::submit`] takes a place ([`admission`]), picks a
//! worker ([`dispatch`], behind the lock of the [`desk`]) and returns a [`Generation`]; the place is given back when the
//! worker has let go of the request, not when the client has, so the engines' queues can never be longer than the front
//! believes. A request that no worker can take now, because its own died or none has the memory, is in the waiting
//! [`room`]. Absent: which version answers ([`crate::routing`]).

mod admission;
mod channel;
mod desk;
mod dispatch;
mod fair;
mod generation;
mod label;
mod load;
mod prefix;
mod process;
mod request;
mod restart;
mod room;
pub mod samples;
mod settings;
mod shared;
pub mod signals;
mod stats;
mod supervisor;
mod suspects;
mod threads;
mod trial;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use gantry_engine::{ModelInfo, ParamError, PooledWork, Pooling, Prompt};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use crate::limits::{RETRY_AFTER_MAX_SECONDS, RETRY_AFTER_MIN_SECONDS};
use crate::output::Output;
use crate::peer::Peer;
use crate::processors::Processors;
use crate::vital;

use admission::{Ask, QueuePlace, Refusal};
use desk::Lanes;
use dispatch::Demand;
use request::Request;
use room::Room;
use samples::Samples;
use shared::Shared;
use signals::Signals;
use supervisor::{Command, Post};
use suspects::{Digest, Standing};

pub use admission::QueueLimit;
pub use channel::Slowness;
pub use dispatch::DispatchStrategy;
pub(crate) use load::LoadClock;

pub use gantry_rollout::WorkerHealth;
pub use generation::{Completion, Generation, GenerationError, Pooled};
pub use label::label;
pub use process::WorkerConfig;
pub use request::{GenerateRequest, PoolRequest};
pub use settings::{DraftSettings, EngineTuning, RuntimeSettings, Scheduling, Share, VersionSpec};
pub use stats::{VersionStats, WorkerStats};
pub use trial::{Trial, TrialLimit};

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
    /// The worker says that the model's chat template cannot render chats.
    #[error("{0}")]
    Template(String),
    /// The worker says that the model is loaded and computes no numbers.
    #[error("{0}")]
    Numbers(String),
    /// The worker says that the model is loaded and could answer nobody.
    #[error("{0}")]
    Useless(String),
    /// There is no backend to run the model as asked: the worker says what there is.
    #[error("{0}")]
    Backend(String),
    /// A worker took more memory than the model was predicted to, and was ended.
    #[error("{0}")]
    Memory(String),
    /// The worker died while it loaded the model.
    #[error("the worker died while it loaded the model: {0}")]
    WorkerDied(String),
}

impl LoadError {
    /// What became of the worker, for those who know when it did.
    fn reason(&self) -> String {
        match self {
            Self::Model(reason)
            | Self::Template(reason)
            | Self::Numbers(reason)
            | Self::Useless(reason)
            | Self::Backend(reason)
            | Self::Memory(reason)
            | Self::WorkerDied(reason) => reason.clone(),
            Self::Settings(_) | Self::Spawn(_) => self.to_string(),
        }
    }
}

/// A request was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// As many requests wait as may wait.
    #[error(
        "{waiting} requests are waiting for this model{}, and {limit}; try again in {retry_after:?}",
        if *places > 1 { format!(", this one takes {places} places") } else { String::new() }
    )]
    QueueFull {
        /// How many wait.
        waiting: usize,
        /// How many places the request asks for.
        places: usize,
        /// How many may wait.
        limit: QueueLimit,
        /// When a try is worth it, computed from the observed rate of service.
        retry_after: Duration,
    },
    /// No worker can take it now, and none will within the time that it may wait.
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
    /// A worker died of a request that asks the same, not long ago.
    #[error("{}", GenerationError::EndsWorker)]
    EndsWorker,
    /// A parameter is out of its range.
    #[error("{0}")]
    InvalidParam(ParamError),
    /// The model is not served for such work.
    #[error("{0}")]
    Unsupported(&'static str),
}

/// How a client's requests are answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Nothing of an answer is sent to the client before its end, so that one whose worker dies is run again.
    pub is_whole: bool,
    /// Whoever submits them takes them back where the version makes room for another one ([`GenerationError::GaveWay`]).
    pub returns: bool,
    /// They have waited in line for this version, and are taken however many others wait.
    pub has_place: bool,
}

/// A loaded model and its workers. Dropping it without [`Version::retire`] ends the workers once its last generation is
/// dropped too.
pub struct Version {
    shared: Arc<Shared>,
    lanes: Arc<Lanes>,
    /// Cancelled when the waiting room has ended.
    room_ended: CancellationToken,
    trial: Option<Arc<Trial>>,
    output: Arc<Output>,
    next_id: AtomicU64,
}

impl Version {
    /// Starts the workers, has them load the model and waits until each has decoded its first token. Dropping the future
    /// ends them. `progress` receives the share of the model that is read, 0 to 1.
    ///
    /// # Errors
    /// The settings are out of range, or a worker could not load the model, or died of it; then the others have ended
    /// too.
    pub async fn load(
        spec: VersionSpec,
        workers: &WorkerConfig,
        progress: watch::Sender<f32>,
    ) -> Result<Arc<Version>, LoadError> {
        let trained_ctx = trained_ctx(&spec).await;
        let shares = spec.runtime.shares(Processors::here(), trained_ctx).map_err(LoadError::Settings)?;
        let shared = Shared::new(spec, shares, progress);
        let (room, waiting) = mpsc::unbounded_channel();
        let (supervisors, inboxes): (Vec<_>, Vec<_>) = shared.workers.iter().map(|_| mpsc::unbounded_channel()).unzip();
        let mut firsts = FuturesUnordered::new();
        let mut tasks = Vec::new();
        for (worker, inbox) in inboxes.into_iter().enumerate() {
            let (first, loaded) = oneshot::channel();
            firsts.push(loaded);
            let seat = workers.threads.join(shared.own_threads(worker));
            let post = Post { worker, inbox, room: room.clone(), first, seat };
            tasks.push(vital::spawn(
                "a worker's supervisor",
                supervisor::run(Arc::clone(&shared), workers.clone(), post),
            ));
        }
        let lanes = Arc::new(Lanes { desk: Arc::clone(&shared.desk), supervisors, room });
        while let Some(loaded) = firsts.next().await {
            let loaded = loaded.unwrap_or_else(|_| Err(LoadError::WorkerDied("its supervisor ended".to_owned())));
            if let Err(error) = loaded {
                // The end of their inboxes ends the others; what they hold is free when the caller learns of it.
                drop(lanes);
                futures::future::join_all(tasks).await;
                return Err(error);
            }
        }
        let room_ended = CancellationToken::new();
        let room = Room::new(&lanes, waiting, shared.health.subscribe(), room_ended.clone());
        vital::spawn("a version's waiting room", room.run());
        shared.loaded_at.get_or_init(SystemTime::now);
        let trial = workers.trial();
        trial.iter().for_each(|trial| trial.loaded());
        let output = workers.output();
        Ok(Arc::new(Version { shared, lanes, room_ended, trial, output, next_id: AtomicU64::new(1) }))
    }

    /// What was loaded.
    #[must_use]
    pub fn spec(&self) -> &VersionSpec {
        &self.shared.spec
    }

    /// The version's life, now and as it changes: `Ready` while one of its workers is.
    #[must_use]
    pub fn health(&self) -> watch::Receiver<WorkerHealth> {
        self.shared.health.subscribe()
    }

    /// Whether one of its workers answers now.
    #[must_use]
    pub fn is_up(&self) -> bool {
        *self.shared.health.borrow() == WorkerHealth::Ready
    }

    /// What a worker says of the model.
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
        VersionStats::of(&self.shared)
    }

    /// How the requests that ended lately went.
    #[must_use]
    pub fn signals(&self) -> Arc<Signals> {
        Arc::clone(&self.shared.signals)
    }

    /// Where requests are drawn from that another version is compared by.
    #[must_use]
    pub fn samples(&self) -> &Arc<Samples> {
        &self.shared.samples
    }

    /// Puts another scheduling in force without a reload: its limits hold for requests that are submitted from now on.
    ///
    /// # Errors
    /// Names a value that does not go with the others; then nothing changes.
    pub fn set_scheduling(&self, scheduling: &Scheduling) -> Result<(), ParamError> {
        scheduling.check()?;
        self.shared.set_scheduling(scheduling);
        Ok(())
    }

    /// The version answers from now on: the limits of its trial ([`WorkerConfig::on_trial`]) end.
    pub fn end_trial(&self) {
        self.trial.iter().for_each(|trial| trial.end());
    }

    /// The most requests that run and wait at a time.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.shared.scheduling.load().capacity(self.shared.spec.runtime.parallel)
    }

    /// When a request that was not served now may come again: where no worker is ready, when one will be, and else computed
    /// from the observed rate of service.
    #[must_use]
    pub fn retry_after(&self) -> Duration {
        match (&*self.shared.health.borrow(), self.load_left()) {
            (WorkerHealth::Ready, _) | (_, None) => self.shared.admission.retry_after(),
            (_, Some(left)) => retry_after_load(left),
        }
    }

    /// How long until the first of the workers that are loading is done, as far as can be told.
    fn load_left(&self) -> Option<Duration> {
        let now = Instant::now();
        self.shared.workers.iter().filter_map(|worker| worker.load().left(now)).min()
    }

    /// Whether a worker can decode a token now. Concurrent calls share a worker's probe, and a success stands for
    /// [`PROBE_CACHE`](crate::limits::PROBE_CACHE).
    ///
    /// # Errors
    /// Says why none can.
    pub async fn probe(&self) -> Result<(), String> {
        let ended = || "the version has ended".to_owned();
        let mut answers: FuturesUnordered<_> = self
            .lanes
            .supervisors
            .iter()
            .map(async |supervisor| {
                let (reply, answer) = oneshot::channel();
                supervisor.send(Command::Probe(reply)).map_err(|_| ended())?;
                answer.await.unwrap_or_else(|_| Err(ended()))
            })
            .collect();
        let mut reasons: Vec<String> = Vec::new();
        while let Some(answer) = answers.next().await {
            match answer {
                Ok(()) => return Ok(()),
                Err(reason) if reasons.contains(&reason) => {}
                Err(reason) => reasons.push(reason),
            }
        }
        Err(reasons.join("; "))
    }

    /// Hands a request to a worker, or has it wait for one. Dropping the [`Generation`] cancels it.
    ///
    /// # Errors
    /// The queue is full, no worker is ready, the version is being retired, or a parameter is out of its range.
    pub async fn submit(&self, request: GenerateRequest) -> Result<Generation, SubmitError> {
        let mut generations = self.submit_all(Peer::default(), vec![request], Terms::default()).await?;
        generations.pop().ok_or(SubmitError::Retired)
    }

    /// Hands several requests of a client to workers, all or none, or has them wait. Dropping a [`Generation`] cancels its request.
    ///
    /// # Errors
    /// As [`Version::submit`], for any of them.
    pub async fn submit_all(
        &self,
        client: Peer,
        requests: Vec<GenerateRequest>,
        terms: Terms,
    ) -> Result<Vec<Generation>, SubmitError> {
        let requests: Vec<GenerateRequest> =
            requests.into_iter().map(|request| self.shared.with_defaults(request)).collect();
        for request in &requests {
            request.params.validate().map_err(SubmitError::InvalidParam)?;
        }
        if self.shared.model.borrow().as_ref().is_some_and(|model| model.pooled_only) {
            return Err(SubmitError::Unsupported(
                "This model generates no text: it is an encoder, for /v1/embeddings or /v1/rerank.",
            ));
        }
        let fills =
            |request: &GenerateRequest| matches!(&*request.prompt, Prompt::Infill(infill) if infill.files.is_some());
        if requests.iter().any(fills) && self.shared.model.borrow().as_ref().is_some_and(|model| !model.infills) {
            return Err(SubmitError::Unsupported(
                "This model fills no gaps: its file names no tokens for what stands before and after one (fim_pre, fim_suf and \
                 fim_mid). Serve one that was trained to.",
            ));
        }
        let digests: Vec<Digest> = requests.iter().map(|request| self.shared.desk.digests.of_text(request)).collect();
        for digest in &digests {
            self.check_standing(*digest)?;
        }
        let answers = requests.len();
        // Several answers to one request have its priority.
        let priority = requests.first().map(|request| request.params.priority).unwrap_or_default();
        let tokens: Vec<u64> = requests.iter().map(GenerateRequest::fair_tokens).collect();
        let timeout_ms = requests.iter().filter_map(|request| request.params.queue_timeout_ms).min();
        let places = self.admit(Ask { client, priority, has_place: terms.has_place }, &tokens, timeout_ms)?;
        let submitted = requests.into_iter().zip(digests).zip(places);
        Ok(submitted.map(|((request, digest), place)| self.hand_over(request, digest, place, answers, terms)).collect())
    }

    /// `answers`: how many its client asked for at once.
    fn hand_over(
        &self,
        request: GenerateRequest,
        digest: Digest,
        place: QueuePlace,
        answers: usize,
        terms: Terms,
    ) -> Generation {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (events, receiver) = channel::channel(&self.output, answers);
        let demand = self.demand(&request);
        let mut request = Request::new(id, request, demand, events, place);
        request.digest = digest;
        request.is_whole = terms.is_whole;
        // Of several that are sent as they come some may have begun.
        request.returns().store(terms.returns && (terms.is_whole || answers == 1), Ordering::SeqCst);
        let generation = Generation::new(id, receiver, Arc::clone(&self.lanes), &request);
        self.lanes.submit(request);
        generation
    }

    /// Hands a client's request for vectors or scores to a worker, or has it wait for one. Dropping the [`Pooled`] cancels it.
    ///
    /// # Errors
    /// As [`Version::submit`], or the model is not served for such work.
    pub async fn pool(&self, client: Peer, mut request: PoolRequest, has_place: bool) -> Result<Pooled, SubmitError> {
        let pooling = self.shared.model.borrow().as_ref().map(|model| model.pooled.map(|pooled| pooled.pooling));
        // A version that has not said what it is says that it is not ready.
        if let Some(pooling) = pooling {
            pools(pooling, &request.work)?;
        }
        request.timeout_ms = request.timeout_ms.or(self.shared.queue_timeout_ms());
        let digest = self.shared.desk.digests.of_texts(&request);
        self.check_standing(digest)?;
        let ask = Ask { client, priority: request.priority, has_place };
        let place = self.admit(ask, &[request.fair_tokens()], request.timeout_ms)?.pop().ok_or(SubmitError::Retired)?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (reply, receiver) = oneshot::channel();
        let mut request = Request::pooled(id, request, reply, place);
        request.digest = digest;
        let pooled = Pooled::new(id, receiver, Arc::clone(&self.lanes), request.worker());
        self.lanes.submit(request);
        Ok(pooled)
    }

    /// Refuses what a worker died of.
    fn check_standing(&self, digest: Digest) -> Result<(), SubmitError> {
        match self.shared.desk.suspects().standing(digest, Instant::now()) {
            Standing::Convicted => Err(SubmitError::EndsWorker),
            Standing::Clear | Standing::Suspected { .. } => Ok(()),
        }
    }

    /// Places for requests that take so many tokens and may wait for so many milliseconds (`None`: any time), where a worker
    /// is ready or will be by then.
    fn admit(&self, ask: Ask, tokens: &[u64], timeout_ms: Option<u64>) -> Result<Vec<QueuePlace>, SubmitError> {
        let timeout = timeout_ms.map(Duration::from_millis);
        check_worker(&self.shared.health.borrow(), self.load_left(), timeout)?;
        self.shared.admission.enter_all(ask, tokens).map_err(|refusal| match refusal {
            Refusal::Closed => SubmitError::Retired,
            Refusal::Full { waiting, limit, retry_after } => {
                SubmitError::QueueFull { waiting, places: tokens.len(), limit, retry_after }
            }
        })
    }

    /// What the strategy wants to know of a request.
    fn demand(&self, request: &GenerateRequest) -> Demand {
        let priority = request.params.priority;
        match self.shared.scheduling.load().dispatch {
            DispatchStrategy::RoundRobin | DispatchStrategy::LeastLoaded => Demand { priority, ..Demand::default() },
            DispatchStrategy::MemoryAware => {
                let model = self.shared.model.borrow();
                let cells_per_sequence = model.as_ref().map_or(0, |model| u64::from(model.n_ctx_per_sequence));
                Demand { cells: request.cells(cells_per_sequence), prefixes: Vec::new(), priority }
            }
            // What nobody computed, no worker has.
            DispatchStrategy::PrefixAware if !request.is_computed() => Demand { priority, ..Demand::default() },
            DispatchStrategy::PrefixAware => Demand { cells: 0, prefixes: prefix::keys(&request.prompt), priority },
        }
    }

    /// As [`Version::retire`], to make room for another version: what has not begun is given back, where it may be, and what has
    /// not ended in time and of which nothing was sent.
    pub async fn give_way(self: Arc<Self>, drain_timeout: Duration) {
        self.shared.admission.close();
        self.shared.desk.start_giving_back();
        self.retire(drain_timeout).await;
    }

    /// How long a request that does not say so itself may wait.
    #[must_use]
    pub fn queue_timeout(&self) -> Option<Duration> {
        self.shared.queue_timeout_ms().map(Duration::from_millis)
    }

    /// What its workers took to load, as far as is known.
    #[must_use]
    pub fn usual_load(&self) -> Option<Duration> {
        self.shared.workers.iter().filter_map(|worker| worker.load().last()).max()
    }

    /// Takes no further request, lets those in flight end for at most `drain_timeout`, fails the rest and stops the
    /// workers. Returns when they are gone.
    pub async fn retire(self: Arc<Self>, drain_timeout: Duration) {
        self.shared.admission.close();
        let mut ends = Vec::new();
        for supervisor in &self.lanes.supervisors {
            let (done, ended) = oneshot::channel();
            if supervisor.send(Command::Retire { drain_timeout, done }).is_ok() {
                ends.push(ended);
            }
        }
        // An error means that a supervisor has ended already, which is what is waited for.
        futures::future::join_all(ends).await;
        self.room_ended.cancelled().await;
    }
}

/// The context that the model was trained for, where it is needed to share the cells out; 0 where the file does not say,
/// of which the workers then say more.
async fn trained_ctx(spec: &VersionSpec) -> u32 {
    if spec.runtime.ctx_size != 0 || spec.runtime.worker_count() <= 1 {
        return 0;
    }
    let path = spec.model_path.clone();
    let read = tokio::task::spawn_blocking(move || gantry_gguf::read_header(path)).await;
    read.ok().and_then(Result::ok).map_or(0, |header| header.summary().context_length)
}

/// Whether a model with this pooling does such work.
fn pools(pooling: Option<Pooling>, work: &PooledWork) -> Result<(), SubmitError> {
    let ranks = matches!(work, PooledWork::Rank { .. });
    let refusal = match pooling {
        Some(pooling) if ranks == (pooling == Pooling::Rank) => return Ok(()),
        Some(Pooling::Rank) => {
            "This model is served as a reranker, for /v1/rerank; for embeddings serve one that embeds."
        }
        Some(_) => {
            "This model is served for embeddings and ranks nothing: serve a reranker with --reranking, whose file names \
             rank pooling."
        }
        None if ranks => {
            "This server ranks nothing: start it with `gantry-server serve --reranking` on a reranker, whose file names \
             rank pooling."
        }
        None => {
            "This server computes no embeddings: start it with `gantry-server serve FILE --embeddings`, and with \
             `--pooling mean` where the file names no pooling."
        }
    };
    Err(SubmitError::Unsupported(refusal))
}

/// Whether a request that may wait for so long (`None`: any time) may wait for a worker. Who would be failed before there is
/// one learns so at once, and so does, once the version has failed, who named no time: nobody knows whether there will be one.
fn check_worker(
    health: &WorkerHealth,
    load_left: Option<Duration>,
    timeout: Option<Duration>,
) -> Result<(), SubmitError> {
    let left = load_left.unwrap_or_default();
    let reason = match health {
        WorkerHealth::Ready => return Ok(()),
        WorkerHealth::Stopped => return Err(SubmitError::Retired),
        WorkerHealth::Restarting { .. } if timeout.is_none_or(|timeout| left < timeout) => return Ok(()),
        WorkerHealth::Failed { .. } if timeout.is_some_and(|timeout| left < timeout) => return Ok(()),
        WorkerHealth::Restarting { attempt, reason } => {
            format!("it died ({reason}) and is restarted, attempt {attempt}")
        }
        WorkerHealth::Failed { reason } => format!("it keeps failing: {reason}"),
        other => other.label().to_owned(),
    };
    let until = match timeout {
        Some(timeout) if !matches!(health, WorkerHealth::Loading) => format!(
            "; the next one is expected in {} ms, and the request may wait for {} ms",
            left.as_millis(),
            timeout.as_millis()
        ),
        _ => String::new(),
    };
    Err(SubmitError::Unavailable { reason: reason + &until, retry_after: retry_after_load(left) })
}

/// When a try is worth it, where a load takes so much longer.
pub(crate) fn retry_after_load(left: Duration) -> Duration {
    let seconds = left.as_millis().div_ceil(1000).clamp(RETRY_AFTER_MIN_SECONDS.into(), RETRY_AFTER_MAX_SECONDS.into());
    Duration::from_secs(u64::try_from(seconds).unwrap_or(RETRY_AFTER_MAX_SECONDS))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn who_waits_for_a_worker_waits_by_its_own_time_and_by_how_far_the_load_is() {
        let restarting = WorkerHealth::Restarting { attempt: 1, reason: "no".to_owned() };
        let failed = WorkerHealth::Failed { reason: "no".to_owned() };
        let seconds = |s: u64| Some(Duration::from_secs(s));
        for (health, left, timeout, waits) in [
            (&WorkerHealth::Ready, seconds(9), seconds(1), true),
            (&restarting, seconds(900), None, true),
            (&restarting, seconds(900), seconds(901), true),
            (&restarting, seconds(900), seconds(900), false),
            (&restarting, None, seconds(1), true),
            (&failed, seconds(70), None, false),
            (&failed, seconds(70), seconds(71), true),
            (&failed, seconds(70), seconds(30), false),
            (&WorkerHealth::Loading, seconds(1), seconds(9), false),
        ] {
            assert_eq!(check_worker(health, left, timeout).is_ok(), waits, "{health:?} {left:?} {timeout:?}");
        }
        assert_eq!(check_worker(&WorkerHealth::Stopped, None, None), Err(SubmitError::Retired));
    }

    #[test]
    fn who_is_refused_while_a_worker_loads_is_told_when_it_will_be_there() {
        let health = WorkerHealth::Restarting { attempt: 1, reason: "no".to_owned() };
        let hasty = Some(Duration::from_millis(1));
        for (left_ms, seconds) in [(1, 1), (1_001, 2), (42_000, 42), (900_000, 60)] {
            let refused = check_worker(&health, Some(Duration::from_millis(left_ms)), hasty).unwrap_err();
            let told = format!("the next one is expected in {left_ms} ms, and the request may wait for 1 ms");
            assert!(refused.to_string().ends_with(&told), "{refused}");
            let SubmitError::Unavailable { retry_after, .. } = refused else { unreachable!() };
            assert_eq!(retry_after, Duration::from_secs(seconds));
        }
    }
}

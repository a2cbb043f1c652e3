//! What a version's supervisors write and everyone else reads.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::SystemTime;

use arc_swap::ArcSwap;
use gantry_engine::ModelInfo;
use tokio::sync::watch;

use super::admission::Admission;
use super::desk::Desk;
use super::load::LoadClock;
use super::samples::Samples;
use super::settings::{Scheduling, Share};
use super::signals::Signals;
use super::{VersionSpec, WorkerHealth};
use crate::processors::Processors;
use crate::protocol::Heartbeat;

/// See the module.
pub(super) struct Shared {
    pub(super) spec: VersionSpec,
    /// In force now: what `spec` says was so when the version was loaded.
    pub(super) scheduling: ArcSwap<Scheduling>,
    pub(super) admission: Arc<Admission>,
    pub(super) desk: Arc<Desk>,
    pub(super) workers: Vec<Worker>,
    /// The version's, which follows from `lives`.
    pub(super) health: watch::Sender<WorkerHealth>,
    /// Each worker's.
    lives: Mutex<Vec<WorkerHealth>>,
    pub(super) model: watch::Sender<Option<ModelInfo>>,
    pub(super) retries: AtomicU64,
    pub(super) signals: Arc<Signals>,
    pub(super) samples: Arc<Samples>,
    pub(super) loaded_at: OnceLock<SystemTime>,
    progress: watch::Sender<f32>,
}

/// One worker's figures, written by its supervisor alone.
pub(super) struct Worker {
    pub(super) share: Share,
    pub(super) heartbeat: watch::Sender<Heartbeat>,
    /// Requests of which the worker said `Started` and that are not paused.
    pub(super) running: AtomicU32,
    /// 0: none.
    pub(super) pid: AtomicU32,
    pub(super) restarts: AtomicU32,
    /// Those that it may compute with now.
    pub(super) threads: AtomicU32,
    /// When its figures came last, in unix milliseconds; 0: never.
    pub(super) heard_unix_ms: AtomicU64,
    /// Bits of an `f32`: the share of the model that is read.
    loaded: AtomicU32,
    load: Mutex<LoadClock>,
}

impl Worker {
    fn new(share: Share, threads: u32) -> Self {
        Self {
            share,
            heartbeat: watch::Sender::new(Heartbeat::default()),
            running: AtomicU32::new(0),
            pid: AtomicU32::new(0),
            restarts: AtomicU32::new(0),
            threads: AtomicU32::new(threads),
            heard_unix_ms: AtomicU64::new(0),
            loaded: AtomicU32::new(0.0_f32.to_bits()),
            load: Mutex::default(),
        }
    }

    /// How far its load is.
    pub(super) fn load(&self) -> MutexGuard<'_, LoadClock> {
        self.load.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    pub(super) fn new(spec: VersionSpec, shares: Vec<Share>, progress: watch::Sender<f32>) -> Arc<Self> {
        let (scheduling, slots) = (&spec.runtime.scheduling, spec.runtime.parallel as usize);
        Arc::new(Self {
            admission: Arc::new(Admission::new(scheduling, slots)),
            desk: Desk::new(scheduling.dispatch, shares.len()),
            lives: Mutex::new(vec![WorkerHealth::Loading; shares.len()]),
            workers: shares
                .into_iter()
                .map(|share| {
                    let threads = own_threads(&spec, &share);
                    Worker::new(share, threads)
                })
                .collect(),
            scheduling: ArcSwap::from_pointee(scheduling.clone()),
            spec,
            health: watch::Sender::new(WorkerHealth::Loading),
            model: watch::Sender::new(None),
            retries: AtomicU64::new(0),
            signals: Arc::default(),
            samples: Arc::default(),
            loaded_at: OnceLock::new(),
            progress,
        })
    }

    /// Threads that a worker is loaded for.
    pub(super) fn own_threads(&self, worker: usize) -> u32 {
        self.workers.get(worker).map_or(1, |worker| own_threads(&self.spec, &worker.share))
    }

    /// Each worker's life.
    pub(super) fn healths(&self) -> Vec<WorkerHealth> {
        self.lives.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Moves a worker's life on, and the version's with it.
    pub(super) fn move_to(&self, worker: usize, next: WorkerHealth) {
        let mut lives = self.lives.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(life) = lives.get_mut(worker) else { return };
        if !life.may_become(&next) {
            tracing::error!(worker, from = life.label(), to = next.label(), "a worker's life cannot go that way");
            return;
        }
        *life = next;
        let version = WorkerHealth::of_version(&lives);
        // Under the lock, so that the last change of a worker is the last of the version.
        self.health.send_if_modified(|health| {
            let changed = *health != version;
            *health = version;
            changed
        });
    }

    /// Notes how much of the model a worker has read, and tells the mean of all of them.
    pub(super) fn set_loaded(&self, worker: usize, share: f32) {
        if let Some(worker) = self.workers.get(worker) {
            worker.loaded.store(share.to_bits(), Ordering::Relaxed);
            worker.load().read(share);
        }
        let sum: f32 = self.workers.iter().map(|worker| f32::from_bits(worker.loaded.load(Ordering::Relaxed))).sum();
        self.progress.send_replace(sum / self.workers.len().max(1) as f32);
    }

    /// What the settings say of requests, put into one that says nothing itself.
    pub(super) fn with_defaults(&self, mut request: super::GenerateRequest) -> super::GenerateRequest {
        let timeout = &mut request.params.queue_timeout_ms;
        *timeout = timeout.or(self.queue_timeout_ms());
        request
    }

    /// How long a request that does not say so itself may wait.
    pub(super) fn queue_timeout_ms(&self) -> Option<u64> {
        self.scheduling.load().queue_timeout_ms
    }

    /// Puts another scheduling in force, for requests that are submitted from now on.
    pub(super) fn set_scheduling(&self, scheduling: &Scheduling) {
        if **self.scheduling.load() == *scheduling {
            return;
        }
        tracing::info!(
            version = %self.spec.name,
            max_queue = scheduling.max_queue,
            high_watermark = scheduling.high_watermark,
            low_watermark = scheduling.low_watermark,
            queue_timeout_ms = scheduling.queue_timeout_ms,
            dispatch = %scheduling.dispatch,
            "scheduling changes"
        );
        self.admission.set_limits(scheduling);
        self.desk.set_strategy(scheduling.dispatch);
        self.scheduling.store(Arc::new(scheduling.clone()));
    }
}

/// Threads that a worker with this share is loaded for; one that is not told how many takes those that the only one has.
fn own_threads(spec: &VersionSpec, share: &Share) -> u32 {
    share.threads.unwrap_or_else(|| spec.runtime.threads_of(1, Processors::here().count()))
}

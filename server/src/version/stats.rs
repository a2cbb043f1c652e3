//! A version's figures: sums over its workers, and each worker's own.
//!
//! A mapped file's pages are in RAM once however many processes read them: a version's memory is what the workers have
//! for themselves, their weights among it, added up, and the mapped pages of the one that has most of them.

use std::sync::atomic::Ordering;

use gantry_engine::{DegradationLevel, EngineStats, PooledStats};

use super::WorkerHealth;
use super::shared::{Shared, Worker};
use crate::protocol::Heartbeat;

/// A version's figures, as of its workers' last heartbeats where they are the workers'.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct VersionStats {
    /// Requests that wait for a sequence, or for a worker.
    pub queued: u32,
    /// Requests that hold a sequence.
    pub running: u32,
    /// Sequences there are.
    pub slots: u32,
    /// Requests that may wait.
    pub max_queue: usize,
    /// Whether the next request would be let in.
    pub accepting: bool,
    /// How far the service is cut down for want of memory: that of the worker that is cut down most.
    pub degradation: DegradationLevel,
    /// Tokens generated a second, over the last seconds.
    pub tokens_per_second: f64,
    /// The workers' memory in RAM; pages of files that several map count once.
    pub worker_rss_bytes: u64,
    /// KV cells in use.
    pub kv_used_cells: u64,
    /// KV cells there are.
    pub kv_total_cells: u64,
    /// Workers that died.
    pub restarts: u32,
    /// Requests that were given to another worker when theirs died.
    pub retries: u64,
    /// Each worker's own.
    pub workers: Vec<WorkerStats>,
}

/// One worker's figures.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerStats {
    /// Its life.
    pub health: WorkerHealth,
    /// Whether it gets requests: it is ready, was heard of lately, and passed its last probe.
    pub dispatchable: bool,
    /// Its process; `None` while there is none.
    pub pid: Option<u32>,
    /// Its memory in RAM, with all pages that it maps.
    pub rss_bytes: u64,
    /// Requests that it has.
    pub in_flight: u32,
    /// Requests that hold one of its sequences.
    pub running: u32,
    /// How often it died.
    pub restarts: u32,
    /// Threads that it may compute with now: fewer than it was loaded for while others compute beside it.
    pub threads: u32,
    /// When it was heard of last, in unix milliseconds; 0: never.
    pub heard_unix_ms: u64,
    /// Its engine's own, which begin anew with each process.
    pub engine: EngineStats,
    /// Its embedder's, likewise.
    pub pooled: PooledStats,
}

impl VersionStats {
    /// The processes of the workers that have one.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        self.workers.iter().filter_map(|worker| worker.pid).collect()
    }

    pub(super) fn of(shared: &Shared) -> Self {
        let beats: Vec<Heartbeat> = shared.workers.iter().map(|worker| *worker.heartbeat.borrow()).collect();
        let healths = shared.healths();
        let workers: Vec<WorkerStats> = shared
            .workers
            .iter()
            .zip(&beats)
            .zip(healths)
            .enumerate()
            .map(|(index, ((worker, beat), health))| WorkerStats::of(shared, index, worker, beat, health))
            .collect();
        let in_flight = u32::try_from(shared.admission.in_flight()).unwrap_or(u32::MAX);
        let running = workers.iter().map(|worker| worker.running).sum::<u32>().min(in_flight);
        Self {
            queued: in_flight - running,
            running,
            slots: shared.spec.runtime.parallel,
            max_queue: shared.scheduling.load().max_queue,
            accepting: shared.admission.is_accepting(),
            degradation: workers.iter().map(|worker| worker.engine.degradation).max().unwrap_or_default(),
            tokens_per_second: workers
                .iter()
                .map(|worker| worker.engine.tokens_per_second)
                .fold(0.0, |sum, rate| sum + rate),
            worker_rss_bytes: resident_bytes(&beats),
            kv_used_cells: workers.iter().map(|worker| worker.engine.kv_used_cells).sum(),
            kv_total_cells: workers.iter().map(|worker| worker.engine.kv_total_cells).sum(),
            restarts: workers.iter().map(|worker| worker.restarts).sum(),
            retries: shared.retries.load(Ordering::Relaxed),
            workers,
        }
    }
}

impl WorkerStats {
    fn of(shared: &Shared, index: usize, worker: &Worker, beat: &Heartbeat, health: WorkerHealth) -> Self {
        let pid = worker.pid.load(Ordering::Relaxed);
        let (dispatchable, in_flight) = shared.desk.figures(index);
        Self {
            health,
            dispatchable,
            pid: (pid != 0).then_some(pid),
            rss_bytes: beat.rss_bytes,
            in_flight,
            running: worker.running.load(Ordering::Relaxed),
            restarts: worker.restarts.load(Ordering::Relaxed),
            threads: worker.threads.load(Ordering::Relaxed),
            heard_unix_ms: worker.heard_unix_ms.load(Ordering::Relaxed),
            engine: beat.engine,
            pooled: beat.pooled,
        }
    }
}

/// The memory of several processes that map the same files.
fn resident_bytes(beats: &[Heartbeat]) -> u64 {
    let own: u64 = beats.iter().map(|beat| beat.rss_bytes.saturating_sub(beat.rss_file_bytes)).sum();
    own + beats.iter().map(|beat| beat.rss_file_bytes).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_pages_count_once() {
        let beat = |rss_bytes, rss_file_bytes| Heartbeat { rss_bytes, rss_file_bytes, ..Heartbeat::default() };
        assert_eq!(resident_bytes(&[]), 0);
        assert_eq!(resident_bytes(&[beat(10, 7)]), 10);
        assert_eq!(resident_bytes(&[beat(10, 7), beat(12, 8), Heartbeat::default()]), 3 + 4 + 8);
    }
}

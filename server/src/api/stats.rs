//! `/server/stats`: how the server does, at a glance, as one object. Its figures are those of `/metrics`, of which it is no other
//! source; who looks all the time is better served there.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;

use super::App;
use crate::gates::memory;
use crate::metrics::RecentFigures;
use crate::version::{VersionStats, WorkerStats};

/// What a server does, has done, and has.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct MetricsSnapshot {
    /// Requests that ended since the start, however they ended; those about the server itself are not counted.
    requests_total: u64,
    /// Requests that run or wait.
    requests_active: u64,
    /// Tokens generated a second, over the last seconds.
    tokens_per_second: f64,
    /// From a request's arrival to the first text of its answer, in the mean of the last answers.
    avg_ttft_ms: f64,
    /// From a request's arrival to the end of its answer, likewise.
    avg_latency_ms: f64,
    /// The same, which 99 in a hundred of the last answers took no longer than.
    p99_latency_ms: f64,
    /// Sequences, or texts to embed, that were computed together, in the mean since the workers' start.
    batch_size_avg: f64,
    /// The share of requests of whose tokens the prefix cache had a part, since the workers' start.
    cache_hit_rate: f64,
    queue_depth: QueueDepth,
    workers: Vec<WorkerStatus>,
}

/// Requests that wait: by priority those that workers have, as of their last heartbeats.
#[derive(Debug, Default, Serialize, JsonSchema)]
pub(super) struct QueueDepth {
    high: u64,
    normal: u64,
    low: u64,
    /// Those that no worker has yet included.
    total: u64,
}

/// A worker's state.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct WorkerStatus {
    id: u32,
    /// Batches that it computes now: one of sequences, and one of texts to embed.
    active_batches: u32,
    /// Requests that it has.
    active_requests: u32,
    /// Its memory in RAM, in bytes, with the pages that it shares.
    memory_used: u64,
    /// What may be used beside that, in bytes, of what it shares with others.
    memory_available: u64,
    /// Whether it gets requests.
    is_healthy: bool,
    /// When it was heard of last, in unix milliseconds; 0: never.
    last_health_check: u64,
}

pub(super) async fn stats(State(app): State<Arc<App>>) -> Json<MetricsSnapshot> {
    let routing = app.router.routing();
    let candidate = routing.canary.map(|(version, _)| version);
    let versions = [routing.active, candidate, routing.previous];
    let versions: Vec<VersionStats> = versions.into_iter().flatten().map(|version| version.stats()).collect();
    let free_bytes = memory::read().map_or(0, |memory| memory.available_bytes);
    Json(snapshot(&versions, app.router.held().waiting(), app.metrics.recent(), free_bytes))
}

/// `free_bytes`: of the process's memory, for workers that watch no limit of their own.
fn snapshot(versions: &[VersionStats], held: usize, recent: RecentFigures, free_bytes: u64) -> MetricsSnapshot {
    let workers = || versions.iter().flat_map(|version| &version.workers);
    let sum = |figure: fn(&WorkerStats) -> u64| workers().map(figure).sum::<u64>();
    let ratio = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
    let computed = sum(|worker| worker.engine.batch_rows_total + worker.pooled.texts_total);
    let batches = sum(|worker| worker.engine.steps + worker.pooled.batches_total);
    let hits = sum(|worker| {
        let engine = &worker.engine;
        engine.cache_device_hits_total + engine.cache_ram_hits_total + engine.cache_disk_hits_total
    });
    let lookups = hits + sum(|worker| worker.engine.cache_misses_total);
    let high = sum(|worker| worker.engine.waiting_high.into());
    let normal = sum(|worker| worker.engine.waiting_normal.into());
    let low = sum(|worker| worker.engine.waiting_low.into());
    let queued = versions.iter().map(|version| u64::from(version.queued)).sum::<u64>();
    let running = versions.iter().map(|version| u64::from(version.running)).sum::<u64>();
    let held = held as u64;
    MetricsSnapshot {
        requests_total: recent.ended,
        requests_active: queued + running + held,
        tokens_per_second: versions.iter().map(|version| version.tokens_per_second).fold(0.0, |sum, rate| sum + rate),
        avg_ttft_ms: recent.first_token_ms,
        avg_latency_ms: recent.whole_ms,
        p99_latency_ms: recent.whole_p99_ms,
        batch_size_avg: ratio(computed, batches),
        cache_hit_rate: ratio(hits, lookups),
        queue_depth: QueueDepth { high, normal, low, total: queued.max(high + normal + low) + held },
        workers: (0..).zip(workers()).map(|(id, worker)| status(id, worker, free_bytes)).collect(),
    }
}

fn status(id: u32, worker: &WorkerStats, free_bytes: u64) -> WorkerStatus {
    let engine = &worker.engine;
    let memory_available = match engine.memory_limit_bytes {
        0 => free_bytes,
        limit => limit.saturating_sub(engine.memory_used_bytes),
    };
    WorkerStatus {
        id,
        active_batches: u32::from(engine.slots_active > 0) + worker.pooled.computing,
        active_requests: worker.in_flight,
        memory_used: worker.rss_bytes,
        memory_available,
        is_healthy: worker.dispatchable,
        last_health_check: worker.heard_unix_ms,
    }
}

#[cfg(test)]
mod tests {
    use gantry_engine::EngineStats;

    use super::*;
    use crate::version::WorkerHealth;

    #[test]
    fn figures_are_those_of_all_workers_together() {
        let worker = |rows, memory_limit_bytes| WorkerStats {
            health: WorkerHealth::Ready,
            dispatchable: true,
            pid: Some(1),
            rss_bytes: 100,
            in_flight: 3,
            running: 1,
            restarts: 0,
            threads: 1,
            heard_unix_ms: 7,
            engine: EngineStats {
                slots_active: 1,
                steps: 10,
                batch_rows_total: rows,
                cache_device_hits_total: 3,
                cache_misses_total: 1,
                waiting_high: 1,
                waiting_low: 1,
                memory_limit_bytes,
                memory_used_bytes: 60,
                ..EngineStats::default()
            },
            pooled: Default::default(),
        };
        let version = VersionStats {
            queued: 5,
            running: 2,
            slots: 4,
            max_queue: 8,
            accepting: true,
            degradation: Default::default(),
            tokens_per_second: 12.0,
            worker_rss_bytes: 0,
            kv_used_cells: 0,
            kv_total_cells: 0,
            restarts: 0,
            retries: 0,
            workers: vec![worker(10, 0), worker(30, 80)],
        };
        let recent = RecentFigures { ended: 9, first_token_ms: 1.0, whole_ms: 2.0, whole_p99_ms: 3.0 };
        let told = snapshot(&[version], 2, recent, 50);
        assert_eq!((told.requests_total, told.requests_active, told.batch_size_avg), (9, 9, 2.0));
        let QueueDepth { high, normal, low, total } = told.queue_depth;
        assert_eq!(((high, normal, low, total), told.cache_hit_rate), ((2, 0, 2, 7), 0.75));
        let of = |status: &WorkerStatus| (status.id, status.active_batches, status.memory_available);
        assert_eq!(told.workers.iter().map(of).collect::<Vec<_>>(), [(0, 1, 50), (1, 1, 20)]);
        assert_eq!(snapshot(&[], 0, RecentFigures::default(), 0).cache_hit_rate, 0.0);
    }
}

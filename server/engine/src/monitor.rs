//! Watches memory on a thread of its own and moves what serves a model along its ladder of degradation.
//!
//! What a model takes once it is loaded (weights, KV cache, buffers) is taken for good and was judged before: a pod that
//! was sized to fit is nearly full from the start, and that is no reason to refuse anyone. Pressure is therefore what
//! the process grew by since then, over that and what is still free. It falls when something is given back. An engine and
//! an embedder of one process share the level ([`Pressure`]), and one of them has the thread ([`MemoryWatch`]).

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::event::EngineStats;
use crate::ladder::{DegradationLevel, Ladder};
use crate::memory::{MemoryGauge, MemoryUse, own_bytes};
use crate::params::PrefixCacheConfig;

/// How often memory is looked at.
pub(crate) const PERIOD: Duration = Duration::from_millis(500);
/// The prefix cache takes at most this part of the memory that there is,
const PREFIX_CACHE_SHARE: u64 = 8;
/// and this part of what is free when the model is loaded.
const PREFIX_CACHE_SHARE_OF_FREE: u64 = 4;
/// Growth that is no pressure: the heap of an engine with work.
const IGNORED_GROWTH_BYTES: u64 = 32 << 20;

/// What the watch found last: written by its thread, read by anyone without a lock.
#[derive(Debug, Default)]
pub(crate) struct Pressure {
    level: AtomicU8,
    looks: AtomicU64,
    used_bytes: AtomicU64,
    limit_bytes: AtomicU64,
}

impl Pressure {
    pub(crate) fn level(&self) -> DegradationLevel {
        DegradationLevel::ALL.get(usize::from(self.level.load(Relaxed))).copied().unwrap_or_default()
    }

    pub(crate) fn set_level(&self, level: DegradationLevel) {
        let at = DegradationLevel::ALL.iter().position(|l| *l == level).unwrap_or_default();
        // Five levels.
        self.level.store(u8::try_from(at).unwrap_or(u8::MAX), Relaxed);
    }

    /// How often memory was looked at.
    pub(crate) fn looks(&self) -> u64 {
        self.looks.load(Relaxed)
    }

    /// It was looked at once more.
    pub(crate) fn looked(&self) {
        self.looks.fetch_add(1, Relaxed);
    }

    /// The part of the counters that tells of it.
    pub(crate) fn stats(&self) -> EngineStats {
        EngineStats {
            degradation: self.level(),
            memory_used_bytes: self.used_bytes.load(Relaxed),
            memory_limit_bytes: self.limit_bytes.load(Relaxed),
            ..EngineStats::default()
        }
    }
}

/// The thread that watches; it ends when this is dropped.
pub(crate) struct MemoryWatch {
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl MemoryWatch {
    pub(crate) fn start(monitor: Monitor, pressure: Arc<Pressure>) -> io::Result<Self> {
        let ended = Arc::new(AtomicBool::new(false));
        let seen = ended.clone();
        let thread = std::thread::Builder::new().name(String::from("gantry-memory"));
        let thread = thread.spawn(move || monitor.run(&pressure, &seen))?;
        Ok(Self { ended, thread: Some(thread) })
    }
}

impl Drop for MemoryWatch {
    fn drop(&mut self) {
        self.ended.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("the watch over memory panicked");
            }
        }
    }
}

/// What is watched; nothing where the machine does not tell.
pub(crate) struct Monitor {
    gauge: Option<MemoryGauge>,
    /// What the process held when the model had been loaded and had decoded.
    loaded_bytes: u64,
}

impl Monitor {
    /// Made once the model is loaded.
    pub(crate) fn new(limit_bytes: Option<u64>) -> Self {
        let found = MemoryGauge::find(limit_bytes).and_then(|gauge| Ok((gauge, own_bytes()?)));
        let (gauge, loaded_bytes) = match found {
            Ok((gauge, loaded_bytes)) => (Some(gauge), loaded_bytes),
            Err(error) => {
                tracing::warn!(%error, "memory is not watched: the engine will not degrade before it runs out");
                (None, 0)
            }
        };
        Self { gauge, loaded_bytes }
    }

    /// The model has decoded. What the buffers in which it computes and its cells will still take is its own and no growth: at
    /// most so many bytes.
    pub(crate) fn loaded(&mut self, untouched_bytes: u64) {
        self.loaded_bytes = own_bytes().unwrap_or(self.loaded_bytes).saturating_add(untouched_bytes);
        let memory = self.gauge.as_ref().and_then(|gauge| gauge.read().ok());
        if let Some(MemoryUse { used_bytes, limit_bytes }) = memory.filter(|memory| free(*memory) == 0) {
            let mib = |bytes: u64| bytes.div_ceil(1 << 20);
            tracing::warn!(
                "the model as loaded takes {} MiB, and the limit is {} MiB: allow more (--memory-limit; in a pod \
                 spec.resources.memory), or lower the context size or the parallel sequences",
                mib(used_bytes),
                mib(limit_bytes)
            );
        }
    }

    /// The prefix cache's configuration, within what the memory allows beside so many bytes that are still to be taken.
    pub(crate) fn sized(&self, config: &PrefixCacheConfig, untouched_bytes: u64) -> PrefixCacheConfig {
        let memory = self.gauge.as_ref().and_then(|gauge| gauge.read().ok());
        let most = memory.map_or(u64::MAX, |memory| {
            let left = free(memory).saturating_sub(untouched_bytes);
            (memory.limit_bytes / PREFIX_CACHE_SHARE).min(left / PREFIX_CACHE_SHARE_OF_FREE)
        });
        PrefixCacheConfig { ram_bytes: config.ram_bytes.min(most), ..config.clone() }
    }

    /// Watches until it is told to end.
    fn run(self, pressure_seen: &Pressure, ended: &AtomicBool) {
        let Some(gauge) = self.gauge else { return };
        let mut ladder = Ladder::new(Instant::now());
        let mut failing = false;
        while !ended.load(Relaxed) {
            match read(&gauge, self.loaded_bytes, ladder.level()) {
                Ok((memory, pressure)) => {
                    failing = false;
                    if let Some(change) = ladder.observe(pressure, Instant::now()) {
                        let (from, to) = (change.from.as_str(), change.to.as_str());
                        tracing::warn!(from, to, pressure, "memory pressure changes what is served");
                        pressure_seen.set_level(change.to);
                    }
                    pressure_seen.used_bytes.store(memory.used_bytes, Relaxed);
                    pressure_seen.limit_bytes.store(memory.limit_bytes, Relaxed);
                }
                Err(error) if !failing => {
                    failing = true;
                    tracing::warn!(%error, "memory cannot be read: the degradation stays as it is");
                }
                Err(_) => {}
            }
            pressure_seen.looked();
            // Woken at its end.
            std::thread::park_timeout(PERIOD);
        }
    }
}

/// What is used, and the pressure. Where the service is cut down, or would be now, what the C library keeps of freed blocks
/// is given back first, each time: it is nobody's, and could hold the level where it is for ever.
fn read(gauge: &MemoryGauge, loaded_bytes: u64, level: DegradationLevel) -> io::Result<(MemoryUse, f64)> {
    let look = || -> io::Result<(MemoryUse, f64)> {
        let memory = gauge.read()?;
        Ok((memory, pressure(own_bytes()?.saturating_sub(loaded_bytes), free(memory))))
    };
    let seen = look()?;
    if level == DegradationLevel::Normal && DegradationLevel::of_pressure(seen.1) == DegradationLevel::Normal {
        return Ok(seen);
    }
    gantry_llama::return_free_memory();
    look()
}

fn free(memory: MemoryUse) -> u64 {
    memory.limit_bytes.saturating_sub(memory.used_bytes)
}

/// Of the memory that was free for the engine to grow into, the part that it has taken.
fn pressure(grown_bytes: u64, free_bytes: u64) -> f64 {
    let grown = grown_bytes.saturating_sub(IGNORED_GROWTH_BYTES);
    if grown == 0 { 0.0 } else { grown as f64 / (grown.saturating_add(free_bytes)) as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_that_was_sized_to_fit_is_under_no_pressure() {
        let mib = 1 << 20;
        for (grown_mib, free_mib, least, most) in [
            (0, 0, 0.0, 0.0),
            (10, 20, 0.0, 0.0),
            // The prefix cache is full: a quarter of the 400 MiB that were free.
            (132, 300, 0.2, 0.3),
            (132, 25, 0.79, 0.81),
            (1_032, 10, 0.98, 1.0),
            (1_032, 0, 1.0, 1.0),
        ] {
            let pressure = pressure(grown_mib * mib, free_mib * mib);
            assert!((least..=most).contains(&pressure), "{grown_mib} {free_mib}: {pressure}");
        }
    }
}

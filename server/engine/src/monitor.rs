//! Watches memory on a thread of its own and moves the engine along its ladder of degradation.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::ladder::Ladder;
use crate::memory::MemoryGauge;
use crate::params::PrefixCacheConfig;
use crate::stats::Stats;

/// How often memory is looked at.
const PERIOD: Duration = Duration::from_millis(500);
/// The prefix cache takes at most this part of the memory that there is.
const PREFIX_CACHE_SHARE: u64 = 8;

/// What is watched; nothing where the machine does not tell.
pub(crate) struct Monitor(Option<MemoryGauge>);

impl Monitor {
    pub(crate) fn new(limit_bytes: Option<u64>) -> Self {
        let gauge = MemoryGauge::find(limit_bytes);
        if let Err(error) = &gauge {
            tracing::warn!(%error, "memory is not watched: the engine will not degrade before it runs out");
        }
        Self(gauge.ok())
    }

    /// The prefix cache's configuration, within what the memory allows.
    pub(crate) fn sized(&self, config: &PrefixCacheConfig) -> PrefixCacheConfig {
        let limit = self.0.as_ref().and_then(|gauge| gauge.read().ok()).map(|memory| memory.limit_bytes);
        let most = limit.map_or(u64::MAX, |bytes| bytes / PREFIX_CACHE_SHARE);
        PrefixCacheConfig { ram_bytes: config.ram_bytes.min(most), ..config.clone() }
    }

    /// Watches until the engine shuts down.
    pub(crate) fn run(self, stats: &Stats) {
        let Some(gauge) = self.0 else { return };
        let mut ladder = Ladder::new(Instant::now());
        let mut failing = false;
        while !stats.shutting_down.load(Relaxed) {
            match gauge.read() {
                Ok(memory) => {
                    failing = false;
                    if let Some(change) = ladder.observe(memory.pressure(), Instant::now()) {
                        let (from, to, pressure) = (change.from.as_str(), change.to.as_str(), change.pressure);
                        tracing::warn!(from, to, pressure, "memory pressure changes what is served");
                        stats.set_level(change.to);
                    }
                    stats.memory_used_bytes.store(memory.used_bytes, Relaxed);
                    stats.memory_limit_bytes.store(memory.limit_bytes, Relaxed);
                }
                Err(error) if !failing => {
                    failing = true;
                    tracing::warn!(%error, "memory cannot be read: the degradation stays as it is");
                }
                Err(_) => {}
            }
            // Woken at shutdown.
            std::thread::park_timeout(PERIOD);
        }
    }
}

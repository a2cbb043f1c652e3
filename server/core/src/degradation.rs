//! How far a service is cut down for want of memory.
//!
//! | Pressure | Level | Means |
//! |---|---|---|
//! | below 0.7 | `Normal` | everything |
//! | from 0.7 | `ReducedBatch` | half as many sequences at once |
//! | from 0.8 | `EvictCache` | and the prefix cache is emptied of what nobody uses |
//! | from 0.9 | `HighPriorityOnly` | and only high priority is accepted |
//! | from 0.95 | `Emergency` | nothing new is accepted; what was before goes on |
//!
//! Absent: when a level is entered and left, and acting on it, which are the engine's.

use serde::{Deserialize, Serialize};

use crate::order::Priority;

/// The part of the usual batch that a reduced one is.
const REDUCED_BATCH_DIVISOR: u32 = 2;

/// How far the service is cut down, for want of memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum DegradationLevel {
    /// Everything is served.
    #[default]
    Normal,
    /// Half as many sequences at once.
    ReducedBatch,
    /// And no prefix is kept that is not in use.
    EvictCache,
    /// And only requests of high priority are accepted; those that wait already keep their places.
    HighPriorityOnly,
    /// Nothing new is accepted.
    Emergency,
}

impl DegradationLevel {
    /// From the least to the most.
    pub const ALL: [Self; 5] =
        [Self::Normal, Self::ReducedBatch, Self::EvictCache, Self::HighPriorityOnly, Self::Emergency];

    /// The pressure from which this level holds.
    #[must_use]
    pub fn begins_at(self) -> f64 {
        match self {
            Self::Normal => 0.0,
            Self::ReducedBatch => 0.7,
            Self::EvictCache => 0.8,
            Self::HighPriorityOnly => 0.9,
            Self::Emergency => 0.95,
        }
    }

    /// The level of the table for this pressure.
    #[must_use]
    pub fn of_pressure(pressure: f64) -> Self {
        Self::ALL.into_iter().rev().find(|level| pressure >= level.begins_at()).unwrap_or_default()
    }

    /// Sequences at once, of `max` usual ones; at least one. Those above it are not ended: no further ones start.
    #[must_use]
    pub fn batch_limit(self, max: u32) -> u32 {
        if self >= Self::ReducedBatch { (max / REDUCED_BATCH_DIVISOR).max(1) } else { max }
    }

    /// Whether prefixes that nobody uses are dropped.
    #[must_use]
    pub fn evicts_cache(self) -> bool {
        self >= Self::EvictCache
    }

    /// Whether a new request of this priority is accepted.
    #[must_use]
    pub fn admits(self, priority: Priority) -> bool {
        match self {
            Self::Normal | Self::ReducedBatch | Self::EvictCache => true,
            Self::HighPriorityOnly => priority == Priority::High,
            Self::Emergency => false,
        }
    }

    /// The name, for labels and messages.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Normal => "Normal",
            Self::ReducedBatch => "ReducedBatch",
            Self::EvictCache => "EvictCache",
            Self::HighPriorityOnly => "HighPriorityOnly",
            Self::Emergency => "Emergency",
        }
    }

    /// The next lower one.
    #[must_use]
    pub fn below(self) -> Self {
        Self::ALL.into_iter().rev().find(|&level| level < self).unwrap_or_default()
    }
}

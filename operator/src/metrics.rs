//! Metrics of the operator itself; those of a service are its pods' own.

use std::{sync::Mutex, time::Duration};

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use crate::decide::Transition;

/// Upper bounds in seconds: a settled reconcile takes microseconds, one with writes some round trips.
const DURATION_BUCKETS_SECONDS: [f64; 9] = [0.001, 0.005, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0];

/// How a reconcile ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum ReconcileOutcome {
    /// All is written that had to be.
    Done,
    /// A newer object was there: tried again with it.
    Stale,
    /// The API server refused a write.
    Refused,
    /// The API server could not be reached, or failed.
    Failed,
}

/// How a rollout went on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum RolloutOutcome {
    /// It began.
    Started,
    /// It was given up for the user's sake.
    Cancelled,
    /// Its version stays.
    Settled,
    /// Its version was refused.
    Rejected,
    /// Its version was taken back.
    RolledBack,
}

impl RolloutOutcome {
    /// The outcome that a transition counts as, if it is one.
    #[must_use]
    pub fn of(transition: &Transition) -> Option<Self> {
        match transition {
            Transition::Started { .. } => Some(Self::Started),
            Transition::Cancelled { .. } => Some(Self::Cancelled),
            Transition::Settled { .. } => Some(Self::Settled),
            Transition::Rejected { .. } => Some(Self::Rejected),
            Transition::RolledBack { .. } => Some(Self::RolledBack),
            Transition::Committed { .. } | Transition::Baking { .. } | Transition::RollingBack { .. } => None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReconcileLabels {
    outcome: ReconcileOutcome,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RolloutLabels {
    outcome: RolloutOutcome,
}

/// The operator's metrics, and their registry.
pub struct Metrics {
    registry: Mutex<Registry>,
    reconciles: Family<ReconcileLabels, Counter>,
    reconcile_seconds: Histogram,
    rollouts: Family<RolloutLabels, Counter>,
    leader: Gauge,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("gantry_operator");
        let reconciles = Family::<ReconcileLabels, Counter>::default();
        let reconcile_seconds = Histogram::new(DURATION_BUCKETS_SECONDS);
        let rollouts = Family::<RolloutLabels, Counter>::default();
        let leader = Gauge::default();
        registry.register("reconciles", "Reconciles of a service, by how they ended", reconciles.clone());
        registry.register("reconcile_duration_seconds", "Time a reconcile took", reconcile_seconds.clone());
        registry.register("rollouts", "Rollouts, by how they went on", rollouts.clone());
        registry.register("leader", "Whether this operator holds the lease and acts", leader.clone());
        Self { registry: Mutex::new(registry), reconciles, reconcile_seconds, rollouts, leader }
    }
}

impl Metrics {
    /// Counts a reconcile.
    pub fn reconciled(&self, outcome: ReconcileOutcome, took: Duration) {
        self.reconciles.get_or_create(&ReconcileLabels { outcome }).inc();
        self.reconcile_seconds.observe(took.as_secs_f64());
    }

    /// Counts a transition, if it is one that counts.
    pub fn transition(&self, transition: &Transition) {
        if let Some(outcome) = RolloutOutcome::of(transition) {
            self.rollouts.get_or_create(&RolloutLabels { outcome }).inc();
        }
    }

    /// Says whether this operator acts.
    pub fn leading(&self, leads: bool) {
        self.leader.set(i64::from(leads));
    }

    /// The metrics in the OpenMetrics text format.
    ///
    /// # Errors
    /// When a metric cannot be formatted.
    pub fn text(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        let registry = self.registry.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        encode(&mut text, &registry)?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_happens_is_counted() {
        let metrics = Metrics::default();
        metrics.reconciled(ReconcileOutcome::Done, Duration::from_millis(2));
        metrics.transition(&Transition::Settled { version: "chat-1".to_owned() });
        metrics.transition(&Transition::Committed { version: "chat-1".to_owned() });
        metrics.leading(true);
        let text = metrics.text().unwrap();
        for line in [
            "gantry_operator_reconciles_total{outcome=\"Done\"} 1",
            "gantry_operator_reconcile_duration_seconds_count 1",
            "gantry_operator_rollouts_total{outcome=\"Settled\"} 1",
            "gantry_operator_leader 1",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
    }
}

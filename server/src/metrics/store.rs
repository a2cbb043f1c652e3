//! What the store of responses is asked for, how that ends, and how long it takes.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::latency_histogram;

/// What a store is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreOperation {
    /// To look for an object, up to its first bytes.
    Find,
    /// To read all of one that was found.
    Read,
    /// To write one.
    Write,
    /// To delete one.
    Delete,
    /// To look for objects that have expired, and to delete them.
    Sweep,
}

impl StoreOperation {
    /// The label.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Find => "find",
            Self::Read => "read",
            Self::Write => "write",
            Self::Delete => "delete",
            Self::Sweep => "sweep",
        }
    }
}

/// How that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreOutcome {
    /// It was done.
    Ok,
    /// There is no such object.
    Missing,
    /// The object is larger than any may be.
    TooLarge,
    /// It took longer than it may.
    Late,
    /// The store refused.
    Refused,
}

impl StoreOutcome {
    /// The label.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Missing => "missing",
            Self::TooLarge => "too_large",
            Self::Late => "late",
            Self::Refused => "refused",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    operation: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabel {
    operation: &'static str,
}

/// What is counted of a store; clones count together.
#[derive(Clone)]
pub struct StoreMetrics {
    operations: Family<OutcomeLabels, Counter>,
    took: Family<OperationLabel, Histogram, fn() -> Histogram>,
}

impl Default for StoreMetrics {
    fn default() -> Self {
        let took = Family::new_with_constructor(latency_histogram as fn() -> Histogram);
        Self { operations: Family::default(), took }
    }
}

impl StoreMetrics {
    /// Notes an operation that ended.
    pub fn ended(&self, operation: StoreOperation, outcome: StoreOutcome, took: Duration) {
        let (operation, outcome) = (operation.as_str(), outcome.as_str());
        self.operations.get_or_create(&OutcomeLabels { operation, outcome }).inc();
        self.took.get_or_create(&OperationLabel { operation }).observe(took.as_secs_f64());
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "response_store_operations",
            "What the store of responses was asked for, by how that ended: ok, missing (no such object), too_large, late or \
             refused",
            self.operations.clone(),
        );
        registry.register(
            "response_store_operation_seconds",
            "Time that the store of responses took, however it ended",
            self.took.clone(),
        );
    }
}

//! What happens when a service is deleted: its pods end first, while they still have their identity and rights, so that
//! agents can finish; garbage collection removes the rest through the owner references.
//!
//! The wait is bounded by the drain timeout and by [`CLEANUP_TIMEOUT_MAX`]: then the finalizer goes in any case, so a
//! deletion never hangs on a node that is away.

use std::time::Duration;

use gantry_crds::{FINALIZER, InferenceService};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::apps::v1::Deployment;
use kube::ResourceExt;

use crate::{
    act::{Actor, Error},
    limits::{CLEANUP_TIMEOUT_MAX, TERMINATION_MARGIN},
    observe::Observed,
};

/// How far the cleanup is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cleanup {
    /// Pods are still ending.
    Waiting,
    /// The finalizer is removed; this many pods had not ended in time.
    Done {
        /// Pods that are left to garbage collection.
        pods_left: usize,
    },
    /// There is no finalizer of ours.
    NotOurs,
}

/// Goes one step on with the deletion of a service.
///
/// # Errors
/// When the API server cannot be reached or refuses.
pub async fn clean_up(
    actor: &Actor<'_>,
    service: &InferenceService,
    observed: &Observed,
    now: Timestamp,
) -> Result<Cleanup, Error> {
    if !service.finalizers().iter().any(|finalizer| finalizer == FINALIZER) {
        return Ok(Cleanup::NotOurs);
    }
    let being_deleted = |deployment: &Deployment| deployment.metadata.deletion_timestamp.is_some();
    if observed.deployment.as_ref().is_some_and(|deployment| !being_deleted(deployment)) {
        actor.delete::<Deployment>(&service.name_any()).await?;
    }
    let pods_left = observed.pods.iter().filter(|pod| !pod.over).count();
    let waits_for_deployment = observed.deployment.is_some();
    if (pods_left > 0 || waits_for_deployment) && now < give_up_at(service, now) {
        return Ok(Cleanup::Waiting);
    }
    match actor.set_finalizer(false).await {
        Err(error) if error.is_gone() => Ok(Cleanup::Done { pods_left }),
        other => other.map(|()| Cleanup::Done { pods_left }),
    }
}

/// When the finalizer goes whatever is left.
fn give_up_at(service: &InferenceService, now: Timestamp) -> Timestamp {
    let deleted_at = service.metadata.deletion_timestamp.as_ref().map_or(now, |time| time.0);
    let drain = service.spec.rollout.drain_timeout.to_std().unwrap_or(Duration::ZERO);
    let limit = drain.saturating_add(TERMINATION_MARGIN * 2).min(CLEANUP_TIMEOUT_MAX);
    let limit = SignedDuration::try_from(limit).unwrap_or(SignedDuration::ZERO);
    deleted_at.checked_add(limit).unwrap_or(now)
}

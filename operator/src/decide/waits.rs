//! Why pods cannot go on with a candidate, as they say themselves: said once for all pods that say the same.

use gantry_crds::status::{RolloutStatus, WaitReason};

use super::{World, candidate_report, is_prepared};

/// What keeps some pods from going on.
pub(super) struct Cause<'a> {
    /// In a word.
    pub(super) reason: WaitReason,
    /// In a sentence.
    pub(super) message: &'a str,
    /// Which pods.
    pub(super) pods: Vec<&'a str>,
}

/// Every cause, in the order of the first pod that names it.
pub(super) fn causes<'a>(world: &World<'a>, now: &RolloutStatus) -> Vec<Cause<'a>> {
    let mut causes: Vec<Cause> = Vec::new();
    for pod in world.judges().filter(|pod| !is_prepared(pod, now)) {
        let Some(candidate) = candidate_report(pod, now) else { continue };
        let Some(reason) = candidate.wait_reason else { continue };
        let message = candidate.message.as_deref().unwrap_or(reason.as_str());
        match causes.iter_mut().find(|cause| cause.reason == reason && cause.message == message) {
            Some(cause) => cause.pods.push(pod.name),
            None => causes.push(Cause { reason, message, pods: vec![pod.name] }),
        }
    }
    causes
}

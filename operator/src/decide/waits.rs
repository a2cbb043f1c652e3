//! Why pods cannot go on with a candidate, as they say themselves: said once for all pods that say the same.

use gantry_crds::status::{CandidatePhase, CandidateStatus, GateVerdict, RolloutStatus, WaitReason};

use super::{World, candidate_report, fleet, is_prepared};

/// What keeps some pods from going on.
pub(super) struct Cause<'a> {
    /// In a word.
    pub(super) reason: WaitReason,
    /// In a sentence.
    pub(super) message: &'a str,
    /// Which pods.
    pub(super) pods: Vec<&'a str>,
}

/// Every cause, in the order of the first pod that names it: first what pods wait for, then why some refused it, which stays.
pub(super) fn causes<'a>(world: &World<'a>, now: &RolloutStatus) -> Vec<Cause<'a>> {
    let judges_answer = fleet::judges_answer(world);
    let mut causes: Vec<Cause> = Vec::new();
    for pod in world.judges().filter(|pod| !is_prepared(pod, now)) {
        let Some(candidate) = candidate_report(pod, now) else { continue };
        // Who is not waited for refuses nothing.
        let refuses = candidate.phase == CandidatePhase::Failed && (pod.ready || !judges_answer);
        let refuses = refuses.then_some(WaitReason::GateFailed);
        let Some(reason) = candidate.wait_reason.or(refuses) else { continue };
        let message = said_by(candidate).unwrap_or(reason.as_str());
        match causes.iter_mut().find(|cause| cause.reason == reason && cause.message == message) {
            Some(cause) => cause.pods.push(pod.name),
            None => causes.push(Cause { reason, message, pods: vec![pod.name] }),
        }
    }
    causes.sort_by_key(|cause| cause.reason == WaitReason::GateFailed);
    causes
}

/// What pods wait for, in a word. That one refused it is nothing to wait for.
pub(super) fn awaited(now: &RolloutStatus) -> Option<WaitReason> {
    now.wait_reason.filter(|reason| *reason != WaitReason::GateFailed)
}

fn said_by(candidate: &CandidateStatus) -> Option<&str> {
    let of_gate = || {
        let failed = candidate.gates.iter().find(|gate| gate.verdict == GateVerdict::Fail);
        failed.and_then(|gate| gate.message.as_deref())
    };
    candidate.message.as_deref().or_else(of_gate)
}

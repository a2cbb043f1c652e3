//! HoldRequests: one pod after the other unloads what it answers with and loads the candidate, while requests that come to it wait.
//!
//! ```text
//!           Prepare                                            Commit, Bake
//!  a   v1   its turn: v1 goes, v2 comes, answers ══▶           v2
//!  b   v1   checks v2, answers ═══════════════════▶ its turn   v2
//! ```
//!
//! Every pod checks what can be known of the candidate before it is loaded; of those that have, one has the turn
//! ([`TurnStatus`]). It answers with the candidate as soon as that has passed its gates there, and with what it answered with before
//! if one refuses it; then it is the next one's turn. Pods that answer with the candidate are prepared, and whether they are enough, or
//! their refusals the version's, [`fleet`] says as for any strategy: in a fleet of one its word is the verdict, and where the first of
//! several refuses, a second one is asked before the version is latched. Going back is the same in every pod, at once.

use gantry_crds::{
    inference_service::RolloutStrategy,
    status::{AloneStatus, CandidatePhase, FitStatus, GateName, RolloutStatus, StrategyName, TurnStatus},
};

use super::{CountedPod, Failure, World, agents, candidate_report, is_prepared, serves, sides};

pub(super) fn is_hold(now: &RolloutStatus) -> bool {
    now.strategy() == StrategyName::HoldRequests
}

/// Whether the pod unloads and loads now. It may not be ready meanwhile, and is waited for all the same.
pub(super) fn is_in_turn(now: &RolloutStatus, pod: &CountedPod) -> bool {
    is_hold(now) && now.turn.as_ref().is_some_and(|turn| turn.pod == pod.name)
}

/// Whose turn it is: that of the pod that has it until it is through, then that of the first one that has checked the candidate. While
/// the user says that nobody is to switch, nobody's, but for the one that has begun.
pub(super) fn turn(world: &World, now: &RolloutStatus, held: bool) -> Option<TurnStatus> {
    let refused = |pod: &CountedPod| Failure::of_candidate(pod, now).is_some();
    let is_open = |pod: &CountedPod| !is_prepared(pod, now) && !refused(pod);
    let has_begun = |pod: &&CountedPod| pod.report.is_some_and(|report| report.version.is_none());
    let with_it = world.judges().find(|pod| is_in_turn(now, pod));
    // One that does not answer now is not called back, since that would be another load; nor is the next one's turn before it does,
    // be it with what it answered with before.
    let is_due = |pod: &&CountedPod| {
        let phase = candidate_report(pod, now).map(|candidate| candidate.phase);
        let asked_once_more = pod.report.is_some_and(|report| serves(report, &now.version));
        is_open(pod)
            && agents::lacks(world, pod, now).is_none()
            && (phase == Some(CandidatePhase::Checked) || asked_once_more)
    };
    let next = world.judges().filter(is_due).filter(|_| !held).min_by_key(|pod| (!pod.ready, pod.name));
    let with_it = with_it.filter(|pod| has_begun(pod) || (is_open(pod) && !held));
    let pod = with_it.or(next)?;
    let yields = world.pods.iter().any(|other| other.name != pod.name && other.ready);
    Some(TurnStatus { pod: pod.name.to_owned(), yields })
}

/// What the candidate takes where nothing else is loaded, as a pod says it.
pub(super) fn alone(fit: &FitStatus) -> Option<AloneStatus> {
    let (required, fits) = (fit.required.clone(), fit.fits_alone?);
    Some(AloneStatus { required, available: fit.available_alone.clone()?, fits })
}

/// The plan of Auto's last resort: the candidate has no room beside the active version, no second set of pods has any, and alone it
/// fits. `beside`: what the memory gate said.
pub(super) fn last_resort(world: &World, alone: Option<&AloneStatus>, beside: &str) -> Option<String> {
    let is_auto = world.spec.is_some_and(|spec| spec.strategy == RolloutStrategy::Auto);
    let AloneStatus { required, available, .. } = alone.filter(|alone| is_auto && alone.fits)?;
    Some(format!(
        "HoldRequests: {beside}: one pod after the other unloads the active one and loads it, {required} <= {available} then; \
         requests that come to that pod wait meanwhile"
    ))
}

/// Whether Auto can go on by it at once: the candidate lacks the memory beside the active version, and there cannot be a second set of
/// pods. One that is to be compared with the active version needs it beside it.
pub(super) fn helps(world: &World, now: &RolloutStatus, failure: &Failure) -> bool {
    let compares = world.spec.is_some_and(|spec| spec.compares);
    failure.gate == GateName::Memory && !compares && now.strategy() == StrategyName::InPlaceSwap && !sides::can_begin(world)
}

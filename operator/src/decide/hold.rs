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
    status::{
        AloneStatus, CandidatePhase, FitStatus, GateName, ReplicaHealth, ReplicaStatus, RolloutStatus, RolloutStep,
        StrategyName, TurnStatus,
    },
};

use super::{CountedPod, Failure, RolloutState, World, agents, candidate_report, is_prepared, serves, sides};
use crate::validate::ValidService;

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
    // The one before is through, and its probe says so in a moment: until then nobody else would answer.
    let comes = |pod: &CountedPod| {
        let is_healthy = pod.report.is_some_and(|report| report.health == ReplicaHealth::Healthy);
        !pod.ready && is_healthy && is_prepared(pod, now)
    };
    let leaves_none = |pod: &&CountedPod| {
        let mut others = world.pods.iter().filter(|other| other.name != pod.name);
        pod.ready && !others.clone().any(|other| other.ready) && others.any(comes)
    };
    // Who gets no requests for what it answers with goes first: its turn costs nobody an answer.
    let is_quarantined = |pod: &CountedPod| world.state.quarantined.iter().any(|name| name == pod.name);
    let order = |pod: &&CountedPod| (!is_quarantined(pod), !pod.ready, pod.name.to_owned());
    let next = world.judges().filter(is_due).filter(|_| !held).min_by_key(order);
    let next = next.filter(|next| !leaves_none(next));
    let with_it = with_it.filter(|pod| has_begun(pod) || (is_open(pod) && !held));
    let pod = with_it.or(next)?;
    let yields = world.pods.iter().any(|other| other.name != pod.name && other.ready);
    Some(TurnStatus { pod: pod.name.to_owned(), yields })
}

/// That a pod has checked the candidate and is not given its turn, where the user says that nobody is to switch.
pub(super) fn waits_for_leave(world: &World, now: &RolloutStatus) -> Option<String> {
    let held = world.spec.is_some_and(|spec| spec.holds(&now.version)) && is_hold(now) && now.turn.is_none();
    let is_checked = |pod: CountedPod| {
        candidate_report(&pod, now).is_some_and(|candidate| candidate.phase == CandidatePhase::Checked)
    };
    let waits = held && world.judges().any(|pod| is_checked(*pod));
    waits.then(|| {
        format!(
            "no pod unloads what it answers with while spec.rollout.paused: set it to false, or spec.rollout.promote to {}",
            now.version
        )
    })
}

/// How pods that are behind, and those that answer with what was given up, go over to the active version: as the last change was made,
/// as long as the spec does not ask for another way, and so where a pod says that it has no room for it beside what it answers with.
pub(super) fn goes_over_by(world: &World, state: &RolloutState) -> Option<StrategyName> {
    let holds = match (world.spec.map(|spec| spec.strategy), &state.rollout) {
        (Some(RolloutStrategy::HoldRequests), _) => true,
        (Some(RolloutStrategy::InPlaceSwap | RolloutStrategy::BlueGreen), _) => false,
        (_, Some(now)) if is_hold(now) => true,
        // By these it has got everywhere: both have room beside each other, or pods of their own.
        (_, Some(RolloutStatus { step: RolloutStep::Commit, .. })) => false,
        (_, now) => {
            // It is nobody's way any more once all have gone it.
            let goes_on = now.is_some() || any_is_behind(world, state);
            (goes_on && state.goes_over_by == Some(StrategyName::HoldRequests))
                || world.pods.iter().any(|pod| has_room_for_one(pod, state))
        }
    };
    holds.then_some(StrategyName::HoldRequests)
}

/// Whether pods are going over from one version to another by it, and can for the candidate: one that is to be compared with the active
/// version, or to share the requests with it, needs that beside it.
pub(super) fn is_under_way(world: &World, state: &RolloutState) -> bool {
    let prepares = |now: &RolloutStatus| is_hold(now) && now.step == RolloutStep::Prepare;
    let is_its_way = state.goes_over_by == Some(StrategyName::HoldRequests);
    let needs_both = world.spec.is_some_and(ValidService::needs_both);
    !needs_both && (state.rollout.as_ref().is_some_and(prepares) || (is_its_way && any_is_behind(world, state)))
}

/// Whether a pod answers with another version than the active one, or with none.
fn any_is_behind(world: &World, state: &RolloutState) -> bool {
    world.pods.iter().any(|pod| pod.report.is_some_and(|report| report.version != state.active))
}

/// Whether the pod answers with another version than the active one, which has no room beside that, and alone it has.
fn has_room_for_one(pod: &CountedPod, state: &RolloutState) -> bool {
    let answers_otherwise = |report: &&ReplicaStatus| report.version.is_some() && report.version != state.active;
    let line = pod.report.filter(answers_otherwise).and_then(|report| report.candidate.as_ref());
    let fit = line.filter(|line| state.active.as_ref() == Some(&line.version)).and_then(|line| line.fit.as_ref());
    fit.is_some_and(|fit| !fit.fits && fit.fits_alone == Some(true))
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
/// pods. One that is to be compared with the active version, or to share the requests with it, needs it beside it.
pub(super) fn helps(world: &World, now: &RolloutStatus, failure: &Failure) -> bool {
    let needs_both = world.spec.is_some_and(ValidService::needs_both);
    failure.gate == GateName::Memory
        && !needs_both
        && now.strategy() == StrategyName::InPlaceSwap
        && !sides::can_begin(world)
}

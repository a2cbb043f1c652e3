//! BlueGreen: a second set of pods takes over.
//!
//! ```text
//!            Prepare                    Commit, Bake                 (rest)
//!  Blue   v1 ══▶ Service             v1  loaded, the way back       no pods
//!  Green  v2     gates, answers      v2 ══▶ Service                 v2 ══▶ Service
//!                beside the Service
//! ```
//!
//! Pods of the other side prepare the candidate alone and answer with it as soon as each has let it through, so that a switch
//! is one flip of the Service's selector, which is not made before as many are ready as there should be. They ask for devices of
//! their own: what no node has room for is refused in time, and the side that answers holds none that it waits for. Until
//! the bake is over the old side stays as it was made, and going back is the same flip. Meanwhile no other version is prepared,
//! since both sides are in use.

use gantry_crds::{
    inference_service::RolloutStrategy,
    status::{GateName, RolloutProgress, RolloutStatus, RolloutStep, StrategyName},
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{
    Candidacy, CountedPod, Failure, RolloutState, SidesSeen, Step, World, after, agents, fleet, hold, serves, take_back,
};
use crate::{
    limits::{self, NO_READY_POD_PATIENCE, NO_ROOM_PATIENCE},
    validate::ValidService,
};

/// How the candidate that begins now is to replace the version that answers.
pub(super) fn strategy(world: &World, state: &RolloutState) -> StrategyName {
    let asked = world.spec.map(|spec| spec.strategy);
    match (asked, &state.active) {
        (Some(RolloutStrategy::BlueGreen), Some(_)) => StrategyName::BlueGreen,
        (Some(RolloutStrategy::HoldRequests), Some(_)) => StrategyName::HoldRequests,
        // Pods that are on their way have unloaded what would have answered beside it.
        (Some(RolloutStrategy::Auto), Some(_)) if hold::is_under_way(world, state) => StrategyName::HoldRequests,
        _ => StrategyName::InPlaceSwap,
    }
}

pub(super) fn is_blue_green(now: &RolloutStatus) -> bool {
    now.strategy() == StrategyName::BlueGreen
}

impl<'a> World<'a> {
    /// The world as it concerns who judges a candidate: the pods of the side on which it is prepared.
    pub(super) fn of_candidate(&self, now: &RolloutStatus) -> Self {
        if !is_blue_green(now) {
            return *self;
        }
        let sides = SidesSeen { judges_are_other: true, ..self.sides };
        World { pods: self.sides.other_pods, missing_pod: self.sides.missing_pod, sides, ..*self }
    }
}

/// Whether a second set of pods can be told from the first: not while pods answer that were made before there were two.
pub(super) fn can_begin(world: &World) -> bool {
    world.sides.is_labelled
}

/// Whether the memory that a candidate lacks beside the active version is what a second set of pods would have. One that is to be
/// compared with the active version, or to share the requests with it, needs it in its own pod.
pub(super) fn helps(world: &World, state: &RolloutState, now: &RolloutStatus, failure: &Failure) -> bool {
    let is_auto = world.spec.is_some_and(|spec| spec.strategy == RolloutStrategy::Auto);
    let lacks_room = failure.gate == GateName::Memory && state.active.is_some();
    let needs_both = world.spec.is_some_and(ValidService::needs_both);
    is_auto && lacks_room && !needs_both && now.strategy() == StrategyName::InPlaceSwap && can_begin(world)
}

/// Judges a candidate by the pods of its side: as many have to be ready with it as there should be, or more than half once the
/// time is over.
pub(super) fn judge_candidate(world: &World, now: &RolloutStatus) -> Candidacy {
    let held = world.spec.is_some_and(|spec| spec.holds(&now.version));
    let over = world.now >= now.deadline.0 && !held;
    let wanted = usize::try_from(world.target_replicas).unwrap_or(0);
    let is_ready = |pod: &&CountedPod| pod.ready && agents::has_prepared(world, pod, now);
    let ready = world.judges().filter(is_ready).count();
    match fleet::judge_candidate(world, now) {
        Candidacy::Ready if ready >= wanted || (over && ready * 2 > wanted) => Candidacy::Ready,
        Candidacy::Ready | Candidacy::Open if over => Candidacy::Refused(Failure::of_deadline(world, now, ready)),
        Candidacy::Ready | Candidacy::Open if finds_no_room(world, now) => {
            Candidacy::Refused(Failure::of_no_room(world, now))
        }
        Candidacy::Ready => Candidacy::Open,
        other => other,
    }
}

/// Whether no node has had room for a second set of pods for so long that Auto, which chose it, gives it up. Who asked for it
/// waits for the rollout's deadline: nodes may be on their way.
fn finds_no_room(world: &World, now: &RolloutStatus) -> bool {
    let is_auto = world.spec.is_some_and(|spec| spec.strategy == RolloutStrategy::Auto);
    // One that is made anew later may find a node yet: others have.
    is_auto && world.sides.has_no_node && world.judges().next().is_none() && world.now >= no_room_at(now)
}

/// When a lack of room is one for good.
pub(super) fn no_room_at(now: &RolloutStatus) -> Timestamp {
    after(now.started_at.0, NO_ROOM_PATIENCE)
}

/// Whether the spec asks for the other strategy than that of the attempt. Auto takes what has been begun.
pub(super) fn asks_for_another_way(world: &World, state: &RolloutState, now: &RolloutStatus) -> bool {
    let asked = world.spec.map(|spec| spec.strategy);
    let fits = match asked {
        Some(RolloutStrategy::BlueGreen) => is_blue_green(now) || !can_begin(world),
        Some(RolloutStrategy::InPlaceSwap) => now.strategy() == StrategyName::InPlaceSwap,
        Some(RolloutStrategy::HoldRequests) => hold::is_hold(now),
        _ => true,
    };
    state.active.is_some() && !fits
}

/// After the switch: whether requests have nobody to go to. The Service does not point to the new side yet, which is waited for;
/// or no pod there is ready. Then the clock is kept that ends it: requests go back where pods of the other side are ready.
pub(super) fn left_alone(world: &World, state: &mut RolloutState, now: &RolloutStatus) -> Option<Step> {
    if !is_blue_green(now) || world.target_replicas == 0 || is_deserted(world, state, now) {
        return None;
    }
    let is_ready = world.pods.iter().any(|pod| pod.ready);
    if is_ready && world.sides.is_flipped {
        return None;
    }
    let over = left_alone_until(now).is_some_and(|until| world.now >= until);
    let to = state.previous.clone().filter(|to| !is_ready && over && can_flip_back(world, now, to));
    if let Some(to) = to {
        return Some(take_back(world, state.clone(), now, to, Failure::of_no_ready_pod(world)));
    }
    let known = now.progress.as_ref().and_then(|progress| progress.paused_at.clone());
    let since = (!is_ready).then(|| known.unwrap_or(Time(world.now)));
    let progress = since.map(|since| RolloutProgress {
        figure: 0,
        at: since.clone(),
        since: since.clone(),
        pods: Vec::new(),
        to_come: 0,
        paused_at: Some(since),
    });
    let message = match (is_ready, world.missing_pod) {
        (true, _) => "waits for the Service to point to its pods".to_owned(),
        (false, None) => "waits for its pods to be ready".to_owned(),
        (false, Some(why)) => format!("waits for its pods to be ready: {why}"),
    };
    let message = Some(limits::message(&message));
    state.rollout = Some(RolloutStatus { progress, message, ..now.clone() });
    Some((state.clone(), None))
}

/// Whether no pod of the new side is ready, and none of the other side could answer instead: then there is nothing to wait for but
/// what a swap in place would, and an edit may be the cure.
pub(super) fn is_deserted(world: &World, state: &RolloutState, now: &RolloutStatus) -> bool {
    let goes_back = state.previous.as_ref().is_some_and(|to| can_flip_back(world, now, to));
    !world.pods.iter().any(|pod| pod.ready) && !goes_back
}

/// Until when pods of the new side may be without a ready one.
pub(super) fn left_alone_until(now: &RolloutStatus) -> Option<Timestamp> {
    let switched = matches!(now.step, RolloutStep::Commit | RolloutStep::Bake) && is_blue_green(now);
    let since = now.progress.as_ref().filter(|_| switched)?.paused_at.as_ref()?;
    Some(after(since.0, NO_READY_POD_PATIENCE))
}

/// Whether a version that failed is not taken back yet, since the pods that requests are to go to are on their way and it answers
/// meanwhile. At the end of the bake it is, in its own pods.
pub(super) fn waits_for_the_way_back(world: &World, state: &RolloutState, now: &RolloutStatus) -> bool {
    let Some(to) = state.previous.as_ref().filter(|_| is_blue_green(now)) else { return false };
    let answers = world.pods.iter().any(|pod| pod.ready);
    answers && !can_flip_back(world, now, to) && world.now < now.deadline.0
}

/// What pods say that are to have the version before again, and lack it.
pub(super) fn why_no_way_back(world: &World, to: &str) -> Option<String> {
    let says = |pod: &CountedPod| {
        let restored = pod.report?.candidate.as_ref().filter(|candidate| candidate.version == to)?;
        Some(format!("pod {}: {}", pod.name, restored.message.as_deref()?))
    };
    world.sides.other_pods.iter().find_map(says)
}

/// Whether requests can go back to the other side: its pods answer with the version that was active before.
pub(super) fn can_flip_back(world: &World, now: &RolloutStatus, to: &str) -> bool {
    let serves_it = |pod: &CountedPod| pod.ready && pod.report.is_some_and(|report| serves(report, to));
    is_blue_green(now) && world.sides.other_pods.iter().any(serves_it)
}

/// That the version which the spec asks for waits until both sides are not in use any more.
pub(super) fn waits_for_the_bake(world: &World, state: &RolloutState, now: &RolloutStatus) -> Option<String> {
    let waits = is_blue_green(now) && super::asks_for_another(world, state);
    let wanted = &world.spec.filter(|_| waits)?.wanted.name;
    Some(format!(
        "{wanted} is prepared once the bake is over, since the pods that would prepare it are the way back until then: to end it \
         now, set spec.rollout.promote to {}; to go back, ask for {} again",
        now.version,
        state.previous.as_deref().unwrap_or("the version before")
    ))
}

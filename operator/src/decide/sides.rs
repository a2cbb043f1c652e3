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
    status::{GateName, RolloutStatus, StrategyName},
};

use jiff::Timestamp;

use super::{Candidacy, CountedPod, Failure, RolloutState, SidesSeen, World, after, agents, fleet, serves};
use crate::limits::NO_ROOM_PATIENCE;

/// How the candidate that begins now is to replace the version that answers.
pub(super) fn strategy(world: &World, state: &RolloutState) -> StrategyName {
    let asked = world.spec.map(|spec| spec.strategy);
    match (asked, &state.active) {
        (Some(RolloutStrategy::BlueGreen), Some(_)) => StrategyName::BlueGreen,
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

/// Whether the memory that a candidate lacks beside the active version is what a second set of pods would have.
pub(super) fn helps(world: &World, state: &RolloutState, now: &RolloutStatus, failure: &Failure) -> bool {
    let is_auto = world.spec.is_some_and(|spec| spec.strategy == RolloutStrategy::Auto);
    let lacks_room = failure.gate == GateName::Memory && state.active.is_some();
    is_auto && lacks_room && !is_blue_green(now) && can_begin(world)
}

/// Judges a candidate by the pods of its side: as many have to be ready with it as there should be, or more than half once the
/// time is over.
pub(super) fn judge_candidate(world: &World, now: &RolloutStatus) -> Candidacy {
    let over = world.now >= now.deadline.0;
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
    is_auto && world.sides.has_no_node && world.now >= no_room_at(now)
}

/// When a lack of room is one for good.
pub(super) fn no_room_at(now: &RolloutStatus) -> Timestamp {
    after(now.started_at.0, NO_ROOM_PATIENCE)
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

//! The bake of the active version while the next one is prepared: the way back stays until something better is proved.
//!
//! An edit during Bake begins another candidate. Until that is committed, what answers is the version that bakes: it is
//! watched as before, and it is gone back from as before. When the candidate is given up, the bake is what is left; when
//! its time is over, the way back is let go. Whether it stays loaded beside both is each pod's to say: one in which the
//! candidate has no room unloads it, and loads it again if it has to go back.

use gantry_crds::status::{BakeStatus, RolloutStatus, RolloutStep};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{ABORTED, RolloutState, Step, World, after, fleet, go_back, hold, take_back};
use crate::validate::ValidService;

/// The bake that goes on beside a candidate which begins now.
pub(super) fn set_aside(world: &World, state: &RolloutState) -> Option<BakeStatus> {
    let now = state.rollout.as_ref()?;
    match now.step {
        RolloutStep::Bake if !fleet::is_watched_to_the_end(world, now) => Some(BakeStatus {
            to: state.way_back()?.to_owned(),
            attempt: now.attempt,
            plan: now.plan.clone(),
            started_at: now.started_at.clone(),
            deadline: now.deadline.clone(),
            judged: now.judged.clone(),
            strategy: now.strategy.filter(|_| hold::is_hold(now)),
        }),
        // Pods that were lost had prepared it: those that come bring it back, and it is watched like one that they have.
        RolloutStep::Commit => Some(BakeStatus {
            to: state.way_back()?.to_owned(),
            attempt: now.attempt,
            plan: now.plan.clone(),
            started_at: Time(world.now),
            deadline: Time(after(world.now, world.spec?.bake)),
            judged: now.judged.clone(),
            strategy: now.strategy.filter(|_| hold::is_hold(now)),
        }),
        RolloutStep::Prepare | RolloutStep::Canary => now.bake.clone(),
        _ => None,
    }
}

/// The candidate is given up: the bake is what is left, if there is one.
pub(super) fn resume(mut state: RolloutState) -> RolloutState {
    state.candidate = None;
    let bake = state.rollout.take().and_then(|rollout| rollout.bake);
    let (Some(bake), Some(active)) = (bake, state.active.clone()) else {
        state.previous = None;
        return state;
    };
    // During a bake, what is named beside the active version is the way back.
    state.versions.retain(|version| version.name == active || version.name == bake.to);
    state.rollout = Some(as_rollout(bake, active));
    state
}

/// Watches the active version while a candidate is prepared. Gives the step back, if it has failed.
pub(super) fn watch(world: &World, state: &mut RolloutState, rollout: &mut RolloutStatus) -> Option<Step> {
    let bake = rollout.bake.clone()?;
    let to = bake.to.clone();
    let baking = as_rollout(bake, state.active.clone()?);
    let over = fleet::is_watched_to_the_end(world, &baking);
    if let Some(failure) = fleet::judge_bake(world, &baking) {
        state.candidate = None;
        return Some(take_back(world, state.clone(), &baking, to, failure));
    }
    if over {
        (rollout.bake, state.previous) = (None, None);
        state.rollout = Some(rollout.clone());
    }
    None
}

/// What the user says of the active version while a candidate is prepared beside its bake: that it is to be given up, or to be
/// kept without a way back. Gives the step back, in the first case.
pub(super) fn by_hand(
    world: &World,
    spec: &ValidService,
    state: &mut RolloutState,
    rollout: &mut RolloutStatus,
) -> Option<Step> {
    let (bake, active) = (rollout.bake.clone()?, state.active.clone()?);
    if spec.aborts(&active) {
        let to = bake.to.clone();
        state.candidate = None;
        return Some(go_back(world, state.clone(), &as_rollout(bake, active), to, ABORTED));
    }
    if spec.promote.as_ref() == Some(&active) {
        (rollout.bake, state.previous) = (None, None);
        state.rollout = Some(rollout.clone());
    }
    None
}

fn as_rollout(bake: BakeStatus, version: String) -> RolloutStatus {
    let BakeStatus { attempt, plan, started_at, deadline, judged, strategy, .. } = bake;
    RolloutStatus {
        version,
        step: RolloutStep::Bake,
        attempt,
        strategy,
        plan,
        started_at,
        deadline,
        progress: None,
        message: None,
        wait_reason: None,
        judged,
        resources: None,
        restarts: 0,
        bake: None,
        turn: None,
        alone: None,
        canary: None,
    }
}

//! Canary: a share of the requests goes to the candidate before all do.
//!
//! ```text
//!            Prepare              Canary 5%          Canary 25%          Commit, Bake
//!  each pod  v1 ══▶ requests      v1 ══▶ 95%         v1 ══▶ 75%          v1  loaded, the way back
//!            v2  gates            v2 ══▶ 5%          v2 ══▶ 25%          v2 ══▶ requests
//! ```
//!
//! Both are loaded in every pod, so that the share is one of requests, with one pod as with many. The version before stays the active
//! one until the last step is over: to take the candidate back is to give it up, and pods do it at once. A step goes on as a
//! preparation does, with the same pods to be judged by: one that comes midway prepares the candidate and joins, an edit begins
//! with another one. Shares only rise: the step in force stays what it is whatever the spec says by now, and the next one is the
//! first of the spec with a larger share. No clock runs while the user says that nobody is to switch, nor without a pod. Where no pod can
//! have the version before, all go over at once. Where too few requests came to judge by, a step ends as a bake does: nothing was found.

use gantry_crds::{
    scalars::Percent,
    status::{
        CanaryStatus, GateName, RejectedOutcome, ReplicaCanary, ReplicaHealth, ReplicaStatus, RolloutStatus,
        RolloutStep, StrategyName,
    },
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{
    Candidacy, CountedPod, Failure, RolloutState, Step, Transition, World, after, fleet, is_current, latch, rollout,
    switch, waiting_for, waits,
};
use crate::{
    limits::{self, SWITCH_TIMEOUT},
    text::some_of,
    validate::{CanaryStep, RETRY_ANNOTATION, ValidService},
};

/// What the plan says of it.
pub(super) fn planned(spec: &ValidService) -> String {
    let shares: Vec<_> = spec.canary.iter().map(|step| step.share.0.as_str()).collect();
    if shares.is_empty() {
        String::new()
    } else {
        format!("; first {} of the requests go to it", shares.join(", then "))
    }
}

/// Whether a share of the requests goes to the version before all do: where it replaces one beside which it is loaded, and nobody
/// asks for all at once.
pub(super) fn comes(world: &World, spec: &ValidService, now: &RolloutStatus) -> bool {
    let replaces = world.state.active.is_some() && now.strategy() == StrategyName::InPlaceSwap;
    !spec.canary.is_empty() && replaces && !is_all_there_is(world) && spec.promote.as_ref() != Some(&now.version)
}

/// Whether no pod can have the version before, as where its source is away and all pods were lost: shares of no requests would keep
/// everybody without an answer until the last step is over. That it is still being loaded, or that its worker fails for now, is none of
/// this.
fn is_all_there_is(world: &World) -> bool {
    let cannot = |report: &ReplicaStatus| report.version.is_none() && report.health == ReplicaHealth::Failed;
    world.pods.iter().all(|pod| !pod.ready && pod.report.is_some_and(cannot))
}

/// Enough pods have prepared the candidate: the first share begins, or all requests go over.
pub(super) fn begin(world: &World, state: RolloutState, now: RolloutStatus) -> Step {
    let Some(spec) = world.spec else { return switch(world, state, now) };
    match spec.canary.first().filter(|_| comes(world, spec, &now)) {
        Some(step) => enter(world, state, now, spec, step),
        None => switch(world, state, now),
    }
}

/// What pods say of a candidate that answers a share of their requests.
pub(super) fn go_on(world: &World, mut state: RolloutState, mut now: RolloutStatus, spec: &ValidService) -> Step {
    let Some(mut canary) = now.canary.clone() else { return begin(world, state, now) };
    if let Some(failure) = fleet::judge_canary(world, &now) {
        return take_back(world, state, &now, failure);
    }
    let is_promoted = spec.promote.as_ref() == Some(&now.version);
    let is_held = spec.holds(&now.version);
    let stands = is_held || world.judges().next().is_none();
    let parts = canary.share.parts().unwrap_or(0);
    let own = spec.canary.iter().find(|step| step.parts == parts);
    if stands {
        canary.until = None;
    } else {
        let since = if canary.until.is_some() { canary.since.0 } else { world.now };
        // A step that the user makes shorter or longer is so at once; one that is taken out goes on as it began.
        let until = own.map(|step| after(since, step.bake)).or(canary.until.as_ref().map(|until| until.0));
        (canary.since, canary.until) = (Time(since), Some(Time(until.unwrap_or(world.now))));
    }
    set(&mut now, canary, spec);
    // While no clock runs nobody's time is up.
    let judged = if stands { RolloutStatus { deadline: Time(Timestamp::MAX), ..now.clone() } } else { now.clone() };
    match fleet::judge_candidate(world, &judged) {
        Candidacy::Refused(failure) => return take_back(world, state, &now, failure),
        Candidacy::Ready if is_promoted || (!is_held && is_all_there_is(world)) => return switch(world, state, now),
        Candidacy::Ready if is_over(&now, world.now) => {
            return match spec.canary.iter().find(|step| step.parts > parts) {
                Some(next) => enter(world, state, now, spec, next),
                None => switch(world, state, now),
            };
        }
        Candidacy::Ready | Candidacy::Open => {}
    }
    now.message = Some(message(world, &now, is_held));
    now.wait_reason = waits::causes(world, &now).first().map(|cause| cause.reason);
    state.rollout = Some(now);
    (state, None)
}

/// When the next share is due, if it is told by the clock.
pub(super) fn due(now: &RolloutStatus) -> Option<Timestamp> {
    now.canary.as_ref()?.until.as_ref().map(|until| until.0)
}

fn is_over(now: &RolloutStatus, at: Timestamp) -> bool {
    due(now).is_some_and(|until| at >= until)
}

fn enter(
    world: &World,
    mut state: RolloutState,
    mut now: RolloutStatus,
    spec: &ValidService,
    step: &CanaryStep,
) -> Step {
    if now.step != RolloutStep::Canary {
        now.started_at = Time(world.now);
    }
    (now.step, now.progress, now.wait_reason) = (RolloutStep::Canary, None, None);
    let until = Some(Time(after(world.now, step.bake)));
    set(&mut now, CanaryStatus { share: step.share.clone(), step: 0, steps: 0, since: Time(world.now), until }, spec);
    now.message = Some(message(world, &now, false));
    let (version, share) = (now.version.clone(), step.share.clone());
    let (number, count) = now.canary.as_ref().map_or((0, 0), |canary| (canary.step, canary.steps));
    state.rollout = Some(now);
    (state, Some(Transition::Canary { version, share, step: number, steps: count }))
}

/// Notes the share that is in force, and until when pods may bring the candidate back where they lost it.
fn set(now: &mut RolloutStatus, mut canary: CanaryStatus, spec: &ValidService) {
    let parts = canary.share.parts().unwrap_or(0);
    let number = spec.canary.iter().filter(|step| step.parts <= parts).count().max(1);
    let count = |number: usize| i32::try_from(number).unwrap_or(i32::MAX);
    (canary.step, canary.steps) = (count(number), count(spec.canary.len().max(number)));
    if let Some(until) = &canary.until {
        now.deadline = Time(after(until.0, spec.progress_deadline));
    }
    now.canary = Some(canary);
}

/// All pods are told to give up the candidate, which has answered. The bake of the active version goes on after that.
fn take_back(world: &World, mut state: RolloutState, now: &RolloutStatus, failure: Failure) -> Step {
    let (version, message) = (now.version.clone(), failure.message.clone());
    let to = state.active.clone().unwrap_or_default();
    state.rejected = Some(latch(world, &state, now, failure, RejectedOutcome::RolledBack));
    state.candidate = None;
    state.rollout = Some(RolloutStatus {
        attempt: now.attempt,
        strategy: now.strategy,
        bake: now.bake.clone(),
        ..rollout(world, &version, RolloutStep::Rollback, now.plan.clone(), SWITCH_TIMEOUT)
    });
    (state, Some(Transition::RollingBack { version, to, message }))
}

/// Whether requests still go to the candidate in this pod, as far as it has said.
pub(super) fn is_given_a_share(pod: &CountedPod, now: &RolloutStatus) -> bool {
    let canary = pod.report.and_then(|report| report.canary.as_ref());
    canary.is_some_and(|canary| canary.version == now.version && canary.share.is_some())
}

/// What the pod says in this attempt of the candidate that answers a share of its requests.
pub(super) fn report<'a>(pod: &CountedPod<'a>, now: &RolloutStatus) -> Option<&'a ReplicaCanary> {
    let report = pod.report.filter(|report| is_current(report, now))?;
    report.canary.as_ref().filter(|canary| canary.version == now.version)
}

fn message(world: &World, now: &RolloutStatus, is_held: bool) -> String {
    let Some(CanaryStatus { share: Percent(share), step, steps, .. }) = &now.canary else { return String::new() };
    let told = format!("{share} of the requests go to it (step {step} of {steps})");
    let held = is_held.then(|| {
        let version = &now.version;
        format!("stays so while spec.rollout.paused: set it to false, or spec.rollout.promote to {version}")
    });
    let too_few = world.judges().filter(|pod| report(pod, now).is_some_and(|canary| canary.too_few_requests));
    let too_few: Vec<_> = too_few.map(|pod| pod.name).collect();
    let too_few =
        (!too_few.is_empty()).then(|| format!("too few requests to judge it by in {}", some_of(&too_few, ", ")));
    let waits = waiting_for(world, now, false).map(|waits| format!("waits for pods: {waits}"));
    let all = [Some(told), held, fleet::left_out(world, now), too_few, waits].into_iter().flatten();
    limits::message(&all.collect::<Vec<_>>().join("; "))
}

/// Adds to why Auto's candidate has no room that another strategy would not do.
pub(super) fn no_other_way(spec: &ValidService, failure: Failure) -> Failure {
    let is_auto = spec.strategy == gantry_crds::inference_service::RolloutStrategy::Auto;
    if !is_auto || spec.canary.is_empty() || failure.gate != GateName::Memory {
        return failure;
    }
    let message = format!(
        "{}; Auto finds no other strategy, since spec.rollout.canary needs both models in a pod: leave it out, and annotate the \
         service with {RETRY_ANNOTATION}=<any new value>",
        failure.message
    );
    Failure { message: limits::message(&message), ..failure }
}

//! The rules that every write must keep, said without the code that keeps them.

use std::{collections::BTreeSet, time::Duration};

use gantry_crds::status::{
    CandidatePhase, GateName, GateVerdict, RejectedOutcome, RejectedStatus, ReplicaHealth, RolloutStep,
};
use gantry_operator::{
    decide::{CountedPod, Plan, RolloutState, World},
    limits::JUDGED_RESTARTS_MAX,
};
use proptest::{prelude::*, test_runner::TestCaseError};

/// The rules that every write must keep.
pub(super) fn check(world: &World, plan: &Plan, were_active: &BTreeSet<String>) -> Result<(), TestCaseError> {
    let (old, new) = (world.state, &plan.state);
    let step = new.rollout.as_ref().map(|rollout| rollout.step);
    if new.active != old.active {
        let active = new.active.as_ref().unwrap();
        match step {
            Some(RolloutStep::Commit) => {
                let wants_canary = world.spec.is_some_and(|spec| !spec.canary.is_empty()) && old.active.is_some();
                let had_one = old.rollout.as_ref().is_some_and(|rollout| rollout.step == RolloutStep::Canary);
                let has_it = |pod: &CountedPod| pod.report.is_some_and(|report| report.version == old.active);
                let is_lost = !world.pods.iter().any(has_it);
                prop_assert!(!wants_canary || had_one || is_lost, "all go over, and no share did before");
                // Older pods have no say, and are left behind only by a new one that answers with nothing else.
                let idle = |pod: &CountedPod| pod.report.is_some_and(|report| report.version.is_none());
                let mut newest = world.pods.iter().filter(|pod| !pod.outdated);
                let all_are = world.pods.iter().all(|pod| !pod.outdated);
                prop_assert!(all_are || newest.any(idle), "{:?}", world.pods);
                check_commit(world, active)?;
                prop_assert_eq!(&new.previous, &old.active, "the way back is kept");
                let ways_back = new.versions.iter().filter(|version| Some(&version.name) != new.active.as_ref());
                prop_assert!(ways_back.count() <= 1, "which one is the way back? {:?}", new.versions);
            }
            Some(RolloutStep::Rollback) => {
                prop_assert!(were_active.contains(active), "went back to what never answered");
                check_rollback(world)?;
            }
            other => prop_assert!(false, "active changed in {:?}", other),
        }
    }
    for name in [&new.active, &new.candidate, &new.previous].into_iter().flatten() {
        prop_assert!(new.versions.iter().any(|version| version.name == *name), "{} is not described", name);
        prop_assert!(!plan.delete.contains(name), "{} is deleted", name);
    }
    prop_assert_eq!(new.candidate.is_some(), step.is_some_and(RolloutStep::has_candidate));
    check_canary(world, new)?;
    let restarts = new.rollout.as_ref().map_or(0, |rollout| rollout.restarts);
    prop_assert!(restarts <= JUDGED_RESTARTS_MAX, "begun again for ever");
    check_bake(world, new)?;
    check_quarantine(world, new)?;
    check_rejection(world, new)?;
    if new.rejected.as_ref().is_some_and(|rejected| Some(&rejected.version) == new.active.as_ref()) {
        prop_assert!(false, "a version that was refused answers");
    }
    Ok(())
}

/// The way back of a version that bakes stays through the preparation of others, to the end of its time or until another
/// one is committed.
fn check_bake(world: &World, new: &RolloutState) -> Result<(), TestCaseError> {
    let end = |state: &RolloutState| {
        let rollout = state.rollout.as_ref()?;
        match rollout.step {
            RolloutStep::Bake => Some((rollout.deadline.clone(), rollout.attempt)),
            _ => rollout.bake.as_ref().map(|bake| (bake.deadline.clone(), bake.attempt)),
        }
    };
    let (Some(before), Some(rollout)) = (end(world.state), &new.rollout) else { return Ok(()) };
    if matches!(rollout.step, RolloutStep::Prepare | RolloutStep::Bake) && world.now < before.0.0 {
        prop_assert_eq!(end(new), Some(before), "the bake was not kept");
        let ways_back = new.versions.iter().filter(|version| {
            Some(&version.name) != new.active.as_ref() && Some(&version.name) != new.candidate.as_ref()
        });
        let is_candidate = rollout.bake.as_ref().is_some_and(|bake| Some(&bake.to) == new.candidate.as_ref());
        prop_assert_eq!(ways_back.count(), usize::from(!is_candidate), "{:?}", new.versions);
    }
    prop_assert!(new.versions.len() <= 4, "the API takes no more");
    Ok(())
}

/// A pod gets no requests only for a version that was refused or taken back, and where at least as many others answer with none such.
fn check_quarantine(world: &World, new: &RolloutState) -> Result<(), TestCaseError> {
    let version = |pod: &CountedPod| pod.report.and_then(|report| report.version.clone());
    let is_refused = |name: &String| {
        let of_history = world.stamped.iter().any(|stamped| stamped.version.name == *name && stamped.is_refused);
        of_history || new.rejected.as_ref().is_some_and(|rejected| rejected.version == *name)
    };
    let answers_well = |pod: &CountedPod| {
        let is_good = |name: String| new.active.as_ref() == Some(&name) || !is_refused(&name);
        pod.ready && version(pod).is_some_and(is_good) && !new.quarantined.iter().any(|name| name == pod.name)
    };
    for name in &new.quarantined {
        let of = world.pods.iter().find(|pod| pod.name == name).and_then(version);
        let is_bad = of.as_ref().is_some_and(|of| is_refused(of) && new.active.as_ref() != Some(of));
        prop_assert!(is_bad, "{} is quarantined with {:?}, and {:?} is active", name, of, new.active);
    }
    let good = world.pods.iter().filter(|pod| answers_well(pod)).count();
    prop_assert!(good >= new.quarantined.len(), "{} answer in the place of {:?}", good, new.quarantined);
    Ok(())
}

/// A share begins as a switch does, rises with each step and never falls, and the next one comes when its time is up.
fn check_canary(world: &World, new: &RolloutState) -> Result<(), TestCaseError> {
    let shared = |state: &RolloutState| {
        let rollout = state.rollout.clone()?;
        rollout.canary.clone().map(|canary| (rollout.attempt, canary))
    };
    let Some((attempt, after)) = shared(new) else { return Ok(()) };
    let step = new.rollout.as_ref().map(|rollout| rollout.step);
    prop_assert_eq!(step, Some(RolloutStep::Canary), "a share of no canary");
    match shared(world.state).filter(|(before, _)| *before == attempt) {
        Some((_, before)) => {
            let (was, is) = (before.share.parts().unwrap(), after.share.parts().unwrap());
            prop_assert!(was <= is, "the share falls from {} to {}", before.share, after.share);
            let over = before.until.is_some_and(|until| world.now >= until.0);
            prop_assert!(was == is || over, "{} comes before its time", after.share);
        }
        None => {
            let begun = world.state.rollout.as_ref().filter(|rollout| rollout.attempt == attempt);
            prop_assert!(begun.is_some(), "a share of what pods were not asked to prepare");
            check_commit(world, &new.rollout.as_ref().unwrap().version)?;
        }
    }
    Ok(())
}

/// A version may be switched to when all who answer have judged it or had their time, and more than half of them let it
/// through.
fn check_commit(world: &World, candidate: &String) -> Result<(), TestCaseError> {
    let now = world.state.rollout.as_ref().unwrap();
    let said = |pod: &CountedPod| pod.report.filter(|report| report.attempt == Some(now.attempt)).cloned();
    let prepared = |pod: &CountedPod| said(pod).is_some_and(|report| report.prepared.as_ref() == Some(candidate));
    let refusal = |pod: &CountedPod| {
        let candidate =
            said(pod)?.candidate.filter(|one| one.version == *candidate && one.phase == CandidatePhase::Failed);
        candidate?.gates.into_iter().find(|gate| gate.verdict == GateVerdict::Fail)
    };
    let nobody_answers = !world.pods.iter().any(|pod| pod.ready);
    let newest: Vec<_> = world.pods.iter().filter(|pod| !pod.outdated).collect();
    let silent = !newest.iter().any(|pod| pod.ready);
    let asked: Vec<_> = newest.iter().filter(|pod| pod.ready || silent || prepared(pod)).collect();
    let passed = asked.iter().filter(|pod| prepared(pod)).count();
    prop_assert!(passed > 0 && (nobody_answers || passed * 2 > asked.len()), "{} of {}", passed, asked.len());
    for pod in asked {
        let judged = prepared(pod) || refusal(pod).is_some();
        prop_assert!(judged || world.now >= now.deadline.0, "{} had not judged it", pod.name);
    }
    for pod in newest.iter().filter(|pod| !prepared(pod)) {
        let answers_badly = refusal(pod).is_some_and(|gate| gate.name == GateName::Prompts);
        prop_assert!(!answers_badly, "its answers were not good enough in {}", pod.name);
    }
    Ok(())
}

/// Before the time is up, a version that may fail for the sake of the pod is refused only by all, or by two and more than half,
/// of the fleet as it will be when older pods are replaced.
fn check_rejection(world: &World, new: &RolloutState) -> Result<(), TestCaseError> {
    let Some(now) = world.state.rollout.as_ref().filter(|now| now.step == RolloutStep::Prepare) else { return Ok(()) };
    let of_pods = |rejected: &&RejectedStatus| {
        rejected.outcome == RejectedOutcome::Rejected && rejected.gate == GateName::Load && rejected.at.0 == world.now
    };
    let deadline = new.rejected.as_ref().filter(of_pods).map(|_| now.progress.as_ref().map(|progress| progress.at.0));
    let Some(progress_at) = deadline else { return Ok(()) };
    let newest: Vec<_> = world.pods.iter().filter(|pod| !pod.outdated).collect();
    let judges_answer = newest.iter().any(|pod| pod.ready);
    let prepared = |pod: &CountedPod| {
        pod.report
            .is_some_and(|report| report.prepared.as_ref() == Some(&now.version) && report.attempt == Some(now.attempt))
    };
    let refuses = |pod: &CountedPod| {
        let report = pod.report.filter(|report| report.attempt == Some(now.attempt));
        let candidate = report.and_then(|report| report.candidate.as_ref()).filter(|one| one.version == now.version);
        candidate.is_some_and(|candidate| candidate.phase == CandidatePhase::Failed) && !prepared(pod)
    };
    let voices: Vec<_> = newest.iter().filter(|pod| pod.ready || !judges_answer || prepared(pod)).collect();
    let refusals = voices.iter().filter(|pod| refuses(pod)).count();
    let missing = usize::try_from(world.target_replicas).unwrap().saturating_sub(voices.len());
    let fleet = voices.len() + missing.min(world.pods.len() - newest.len());
    let over = progress_at.is_some_and(|at| world.now >= at + Duration::from_secs(900));
    prop_assert!(over || refusals == fleet || (refusals >= 2 && refusals * 2 > fleet), "{} of {}", refusals, fleet);
    Ok(())
}

/// A version is not taken back where it works, unless it fails in two pods at least and in more than half of them.
fn check_rollback(world: &World) -> Result<(), TestCaseError> {
    let bad = world.state.active.as_ref();
    let serving = |pod: &&CountedPod| pod.report.is_some_and(|report| report.version.as_ref() == bad);
    let failed = |pod: &&CountedPod| pod.report.is_some_and(|report| report.health == ReplicaHealth::Failed);
    let works = world.pods.iter().filter(|pod| pod.ready).filter(serving).filter(|pod| !failed(pod)).count();
    let answers = world.pods.iter().filter(|pod| pod.ready || serving(pod)).count();
    prop_assert!(works * 2 < answers.max(1) && (works == 0 || answers - works >= 2), "{} of {} work", works, answers);
    Ok(())
}

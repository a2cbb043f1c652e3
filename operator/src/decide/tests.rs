#![allow(clippy::unwrap_used)]
//! One test for each edge of the state machine, with a fleet of two pods.

use std::time::Duration;

use gantry_crds::{
    InferenceService,
    status::{CandidateStatus, GateResult},
};
use serde_json::json;

use super::*;
use crate::validate::validate;
use gantry_crds::status::{CandidatePhase, GateName, GateVerdict, ReplicaHealth};

pub(super) const START: i64 = 1_800_000_000;
/// Seconds in which pods must have switched.
pub(super) const SWITCH_SECONDS: i64 = SWITCH_TIMEOUT.as_secs() as i64;

/// The spec that asks for model number `model`.
pub(super) fn spec(model: u8) -> ValidService {
    spec_with(model, json!({}))
}

pub(super) fn spec_with(model: u8, mut rollout: serde_json::Value) -> ValidService {
    if rollout["strategy"].is_null() {
        rollout["strategy"] = json!("InPlaceSwap");
    }
    let digest = format!("{model:x}").repeat(64);
    let service = InferenceService::new(
        "chat",
        serde_json::from_value(json!({"replicas": 2, "rollout": rollout, "model": {"servedName": "chat",
            "source": {"uri": format!("https://models/{model}.gguf"), "sha256": digest}}}))
        .unwrap(),
    );
    validate(&service).unwrap()
}

pub(super) fn name(model: u8) -> String {
    spec(model).wanted.name
}

pub(super) fn time(seconds: i64) -> Timestamp {
    Timestamp::from_second(START + seconds).unwrap()
}

pub(super) fn report(pod: &str, at: i64) -> ReplicaStatus {
    ReplicaStatus {
        pod: pod.to_owned(),
        version: None,
        attempt: None,
        prepared: None,
        resident: None,
        health: ReplicaHealth::Healthy,
        state: None,
        message: None,
        candidate: None,
        breach: None,
        too_few_requests: false,
        canary: None,
        memory: None,
        degradation: None,
        agent: None,
        reported_at: Time(time(at)),
    }
}

pub(super) fn refused(version: &str) -> CandidateStatus {
    CandidateStatus {
        version: version.to_owned(),
        phase: CandidatePhase::Failed,
        wait_reason: None,
        progress: None,
        gates: vec![GateResult {
            name: GateName::Prompts,
            verdict: GateVerdict::Fail,
            value: Some("3% of 20 prompts, 100% wanted".to_owned()),
            message: Some("the answer to prompt 1 was empty; correct the prompts".to_owned()),
        }],
        gguf: None,
        fit: None,
        message: None,
    }
}

/// Whether the pod's own probe would say that it is ready.
pub(super) fn can_answer(report: &ReplicaStatus) -> bool {
    report.version.is_some() && report.health != ReplicaHealth::Failed
}

/// A world that a test changes and steps.
#[derive(Clone)]
pub(super) struct Scene {
    pub(super) spec: Option<ValidService>,
    pub(super) state: RolloutState,
    pub(super) reports: Vec<ReplicaStatus>,
    pub(super) counted: Vec<&'static str>,
    /// Pods that get no requests although they say that they could answer.
    pub(super) cut_off: Vec<&'static str>,
    /// Pods of an older template, with other resources.
    pub(super) outdated: Vec<&'static str>,
    stamped: Vec<StampedVersion>,
    /// Why a pod does not run.
    pub(super) missing_pod: Option<&'static str>,
    /// Pods of the side that does not answer.
    pub(super) other: Vec<&'static str>,
    /// Why one of these does not run.
    pub(super) missing_other: Option<&'static str>,
    /// Side that the Service points to.
    pub(super) points_to: Side,
    /// Whether pods say of which side they are.
    pub(super) is_labelled: bool,
    pub(super) replicas: i32,
    pub(super) now: i64,
}

impl Scene {
    /// Two pods that have not reported yet.
    pub(super) fn new(model: u8) -> Self {
        Self {
            spec: Some(spec(model)),
            state: RolloutState::default(),
            reports: Vec::new(),
            counted: vec!["a", "b"],
            cut_off: Vec::new(),
            outdated: Vec::new(),
            stamped: Vec::new(),
            missing_pod: None,
            other: Vec::new(),
            missing_other: None,
            points_to: Side::Blue,
            is_labelled: true,
            replicas: 2,
            now: 0,
        }
    }

    /// Two pods that serve model 1, settled.
    pub(super) fn serving() -> Self {
        Self::served_by(&["a", "b"])
    }

    /// Pods that serve model 1, settled.
    pub(super) fn served_by(pods: &[&'static str]) -> Self {
        let mut scene = Self::new(1);
        scene.counted = pods.to_vec();
        scene.step();
        scene.all(|report| report.prepared = Some(name(1)));
        scene.step();
        scene.all(|report| (report.version, report.prepared) = (Some(name(1)), None));
        assert!(matches!(scene.step(), Some(Transition::Settled { .. })));
        scene.settled();
        scene
    }

    /// Model 1 is served and all have prepared model 2 and are told to switch.
    pub(super) fn committed() -> Self {
        Self::committed_by(&["a", "b"])
    }

    pub(super) fn committed_by(pods: &[&'static str]) -> Self {
        let mut scene = Self::served_by(pods);
        scene.spec = Some(spec(2));
        scene.step();
        scene.all(|report| report.prepared = Some(name(2)));
        assert!(matches!(scene.step(), Some(Transition::Committed { .. })));
        scene
    }

    /// Model 2 is served and model 1 stays loaded.
    pub(super) fn baking() -> Self {
        Self::baked_by(&["a", "b"])
    }

    pub(super) fn baked_by(pods: &[&'static str]) -> Self {
        let mut scene = Self::committed_by(pods);
        scene.all(|report| (report.version, report.prepared) = (Some(name(2)), None));
        assert!(matches!(scene.step(), Some(Transition::Baking { .. })));
        scene
    }

    /// Model 1 is served, and model 2 was refused.
    pub(super) fn refusing() -> Self {
        let mut scene = Self::serving();
        scene.spec = Some(spec(2));
        scene.step();
        scene.all(|report| report.candidate = Some(refused(&name(2))));
        assert!(matches!(scene.step(), Some(Transition::Rejected { .. })));
        scene
    }

    pub(super) fn all(&mut self, change: impl Fn(&mut ReplicaStatus)) {
        for pod in self.counted.clone() {
            self.pod(pod, &change);
        }
    }

    pub(super) fn pod(&mut self, pod: &str, change: impl Fn(&mut ReplicaStatus)) {
        let (now, attempt) = (self.now, self.state.rollout.as_ref().map(|rollout| rollout.attempt));
        if !self.reports.iter().any(|report| report.pod == pod) {
            self.reports.push(report(pod, now));
        }
        let entry = self.reports.iter_mut().find(|report| report.pod == pod).unwrap();
        (entry.reported_at, entry.attempt) = (Time(time(now)), attempt);
        change(entry);
    }

    pub(super) fn plan(&self) -> Plan {
        let find = |pod: &str| self.reports.iter().find(|report| report.pod == pod);
        let counted = |pod: &&'static str| CountedPod {
            name: pod,
            ready: !self.cut_off.contains(pod) && find(pod).is_some_and(can_answer),
            report: find(pod),
            outdated: self.outdated.contains(pod),
        };
        let pods: Vec<_> = self.counted.iter().map(counted).collect();
        let other_pods: Vec<_> = self.other.iter().map(counted).collect();
        decide(&World {
            now: time(self.now),
            spec: self.spec.as_ref(),
            state: &self.state,
            pods: &pods,
            target_replicas: self.replicas,
            stamped: &self.stamped,
            missing_pod: self.missing_pod,
            sides: SidesSeen {
                other_pods: &other_pods,
                missing_pod: self.missing_other,
                has_no_node: self.missing_other.is_some(),
                is_flipped: self.points_to == self.state.active_side,
                is_labelled: self.is_labelled,
                judges_are_other: false,
            },
        })
    }

    /// Carries out a plan, a second later.
    pub(super) fn step(&mut self) -> Option<Transition> {
        self.now += 1;
        let plan = self.plan();
        for version in plan.stamp {
            let revision = 1 + self.stamped.iter().map(|stamped| stamped.revision).max().unwrap_or(0);
            self.stamped.push(StampedVersion { version, revision, is_refused: false });
        }
        self.stamped.retain(|stamped| !plan.delete.contains(&stamped.version.name));
        self.state = plan.state;
        plan.transition
    }

    /// The status of a version says that it was refused or taken back.
    pub(super) fn refuse(&mut self, version: &str) {
        let of_it = self.stamped.iter_mut().filter(|stamped| stamped.version.name == version);
        of_it.for_each(|stamped| stamped.is_refused = true);
    }

    pub(super) fn settled(&self) {
        let plan = self.plan();
        assert_eq!((&plan.state, plan.transition, plan.wake_at), (&self.state, None, None));
        assert!(plan.stamp.is_empty() && plan.delete.is_empty());
    }

    pub(super) fn step_now(&self) -> Option<RolloutStep> {
        self.state.rollout.as_ref().map(|rollout| rollout.step)
    }
}

#[test]
fn the_first_version_is_stamped_prepared_and_stays() {
    let mut scene = Scene::new(1);
    let plan = scene.plan();
    assert_eq!(plan.stamp.len(), 1);
    assert_eq!(plan.state.candidate, Some(name(1)));
    scene.step();
    scene.pod("a", |report| report.prepared = Some(name(1)));
    assert_eq!(scene.step(), None);
    assert_eq!(
        scene.state.rollout.as_ref().unwrap().message.as_deref(),
        Some("1 of 2 pods prepared; b has not reported")
    );
    scene.pod("b", |report| report.prepared = Some(name(1)));
    assert_eq!(scene.step(), Some(Transition::Committed { version: name(1) }));
    assert_eq!((scene.state.active.as_ref(), scene.state.previous.as_ref()), (Some(&name(1)), None));
    scene.pod("a", |report| report.version = Some(name(1)));
    assert_eq!(scene.step(), None);
    scene.pod("b", |report| report.version = Some(name(1)));
    assert_eq!(scene.step(), Some(Transition::Settled { version: name(1) }));
    scene.settled();
}

#[test]
fn a_change_goes_through_all_steps_and_keeps_the_way_back() {
    let mut scene = Scene::committed();
    assert_eq!((scene.state.active.clone(), scene.state.previous.clone()), (Some(name(2)), Some(name(1))));
    assert_eq!(scene.state.candidate, None);
    scene.all(|report| (report.version, report.prepared) = (Some(name(2)), None));
    assert_eq!(scene.step(), Some(Transition::Baking { version: name(2) }));
    assert_eq!(scene.state.previous, Some(name(1)));
    assert_eq!(scene.step(), None);
    scene.now += 600;
    assert_eq!(scene.step(), Some(Transition::Settled { version: name(2) }));
    assert_eq!(scene.state.previous, None);
    assert_eq!(scene.state.versions.len(), 1);
    scene.settled();
}

#[test]
fn a_refused_version_is_latched_until_what_it_is_judged_by_changes() {
    let mut scene = Scene::serving();
    scene.spec = Some(spec(2));
    scene.step();
    scene.pod("b", |report| report.candidate = Some(refused(&name(2))));
    let Some(Transition::Rejected { gate, message, .. }) = scene.step() else { panic!("{:?}", scene.state) };
    assert_eq!(gate, GateName::Prompts);
    assert_eq!(message, "Prompts gate on pod b: the answer to prompt 1 was empty; correct the prompts");
    assert_eq!(scene.state.active, Some(name(1)));
    let rejected = scene.state.rejected.clone().unwrap();
    assert_eq!(rejected.digest, Some(format!("sha256:{}", "2".repeat(64))));
    assert_eq!(rejected.outcome, RejectedOutcome::Rejected);
    scene.settled();
    // Other gates: it is tried again, and what the pod said before does not count.
    scene.spec = Some(spec_with(2, json!({"gates": {"memory": {"headroom": "1%"}}})));
    scene.now += 1;
    assert!(matches!(scene.step(), Some(Transition::Started { .. })));
    assert_eq!(scene.step(), None);
    assert_eq!(scene.state.rejected, None);
}

#[test]
fn going_back_to_the_active_version_clears_the_latch() {
    let mut scene = Scene::serving();
    scene.spec = Some(spec(2));
    scene.step();
    scene.pod("a", |report| report.candidate = Some(refused(&name(2))));
    scene.step();
    scene.spec = Some(spec(1));
    assert_eq!(scene.step(), None);
    assert_eq!(scene.state.rejected, None);
    scene.settled();
}

#[test]
fn where_half_of_the_pods_are_not_prepared_in_time_the_version_is_rejected() {
    let mut scene = Scene::serving();
    scene.spec = Some(spec(2));
    scene.step();
    scene.pod("a", |report| report.prepared = Some(name(2)));
    scene.now += 100;
    assert_eq!(scene.step(), None);
    scene.now += 899;
    assert_eq!(scene.step(), Some(Transition::Rejected {
        version: name(2),
        gate: GateName::Deadline,
        message: "1 of 2 pods prepared, none got on for 900s; b has not begun; correct that, or raise spec.rollout.progressDeadline; where that changes nothing here, annotate the service with gantry.dev/retry=<any new value>".to_owned(),
    }));
}

#[test]
fn a_deadline_that_is_moved_holds_for_the_rollout_in_progress() {
    let mut scene = Scene::serving();
    scene.spec = Some(spec(2));
    scene.step();
    scene.spec = Some(spec_with(2, json!({"progressDeadline": "1h"})));
    scene.now += 900;
    assert_eq!(scene.step(), None);
    scene.spec = Some(spec(2));
    assert!(matches!(scene.step(), Some(Transition::Rejected { gate: GateName::Deadline, .. })));
}

#[test]
fn time_without_a_pod_does_not_count() {
    let mut scene = Scene::new(1);
    scene.counted.clear();
    scene.step();
    scene.now += 10_000;
    assert_eq!(scene.step(), None);
    assert_eq!(scene.plan().wake_at, None);
    assert_eq!(scene.step_now(), Some(RolloutStep::Prepare));
}

#[test]
fn an_edit_replaces_the_candidate_and_one_back_cancels_it() {
    let mut scene = Scene::serving();
    scene.spec = Some(spec(2));
    scene.step();
    scene.spec = Some(spec(3));
    assert_eq!(scene.step(), Some(Transition::Started { version: name(3), instead_of: Some(name(2)) }));
    assert_eq!(scene.state.candidate, Some(name(3)));
    scene.spec = Some(spec(1));
    assert!(matches!(scene.step(), Some(Transition::Cancelled { .. })));
    assert_eq!((scene.state.candidate.as_ref(), scene.state.active.clone()), (None, Some(name(1))));
    scene.settled();
}

#[test]
fn a_change_of_gates_prepares_the_candidate_again() {
    let mut scene = Scene::serving();
    scene.spec = Some(spec(2));
    scene.step();
    scene.pod("a", |report| report.prepared = Some(name(2)));
    scene.spec = Some(spec_with(2, json!({"gates": {"memory": {"headroom": "50%"}}})));
    assert!(matches!(scene.step(), Some(Transition::Started { .. })));
    scene.pod("b", |report| report.prepared = Some(name(2)));
    // What pod a said was said about the old gates.
    assert_eq!(scene.step(), None);
    scene.pod("a", |report| report.prepared = Some(name(2)));
    assert!(matches!(scene.step(), Some(Transition::Committed { .. })));
}

#[test]
fn only_what_is_said_about_this_attempt_counts_whatever_the_clocks_show() {
    let mut scene = Scene::serving();
    scene.spec = Some(spec(2));
    scene.step();
    scene.all(|report| (report.prepared, report.reported_at) = (Some(name(2)), Time(time(3600))));
    scene.spec = Some(spec_with(2, json!({"gates": {"memory": {"headroom": "50%"}}})));
    assert!(matches!(scene.step(), Some(Transition::Started { .. })));
    scene.now += 60;
    assert_eq!(scene.step(), None, "the pods' clocks are ahead");
    scene.all(|report| report.reported_at = Time(time(-3600)));
    assert!(matches!(scene.step(), Some(Transition::Committed { .. })), "their clocks are behind");
}

#[test]
fn an_attempt_keeps_its_number_to_its_end_and_no_other_gets_it() {
    let number = |scene: &Scene| scene.state.rollout.as_ref().map(|rollout| rollout.attempt);
    let mut scene = Scene::baking();
    assert_eq!(number(&scene), Some(2), "the first version was attempt 1");
    scene.all(|report| report.health = ReplicaHealth::Failed);
    scene.step();
    assert_eq!((scene.step_now(), number(&scene)), (Some(RolloutStep::Rollback), Some(2)));
    scene.all(|report| (report.version, report.health) = (Some(name(1)), ReplicaHealth::Healthy));
    scene.step();
    scene.spec = Some(spec(3));
    scene.step();
    assert_eq!(number(&scene), Some(3));
    scene.spec = Some(spec(1));
    scene.step();
    assert_eq!(number(&scene), None, "it is cancelled");
    scene.spec = Some(spec(3));
    scene.step();
    assert_eq!(number(&scene), Some(4));
}

#[test]
fn workers_that_die_after_the_switch_take_the_version_back() {
    for mut scene in [Scene::committed(), Scene::baking()] {
        scene.all(|report| (report.version, report.health) = (Some(name(2)), ReplicaHealth::Failed));
        let Some(Transition::RollingBack { to, .. }) = scene.step() else { panic!("{:?}", scene.state) };
        assert_eq!(to, name(1));
        assert_eq!((scene.state.active.clone(), scene.state.previous.as_ref()), (Some(name(1)), None));
        scene.all(|report| (report.version, report.health) = (Some(name(1)), ReplicaHealth::Healthy));
        assert_eq!(scene.step(), Some(Transition::RolledBack { version: name(2) }));
        assert_eq!(scene.state.rejected.as_ref().unwrap().outcome, RejectedOutcome::RolledBack);
        scene.settled();
    }
}

#[test]
fn a_version_that_no_pod_switches_to_in_time_is_taken_back() {
    let mut scene = Scene::committed();
    scene.now += SWITCH_SECONDS - 2;
    assert_eq!(scene.step(), None);
    scene.step();
    assert_eq!(scene.step_now(), Some(RolloutStep::Rollback));
    assert_eq!(scene.state.rejected.as_ref().unwrap().value.as_deref(), Some("2 of 2 pods did not switch in 180s"));
}

#[test]
fn without_a_version_to_go_back_to_the_first_one_stays() {
    let mut scene = Scene::new(1);
    scene.step();
    scene.all(|report| report.prepared = Some(name(1)));
    scene.step();
    scene.all(|report| (report.version, report.health) = (Some(name(1)), ReplicaHealth::Failed));
    assert_eq!(scene.step(), Some(Transition::Settled { version: name(1) }));
}

#[test]
fn a_new_pod_neither_holds_up_a_switch_nor_takes_it_back() {
    let mut scene = Scene::committed();
    scene.counted.push("c");
    scene.pod("c", |report| report.candidate = Some(refused(&name(2))));
    scene.pod("a", |report| report.version = Some(name(2)));
    assert_eq!(scene.step(), None);
    scene.pod("b", |report| report.version = Some(name(2)));
    assert!(matches!(scene.step(), Some(Transition::Baking { .. })));
}

#[test]
fn an_edit_while_pods_go_back_waits_for_those_that_can_and_for_no_others() {
    let going_back = |resident: bool| {
        let mut scene = Scene::baked_by(&["a", "b", "c"]);
        let resident = resident.then(|| name(1));
        scene.all(|report| report.resident.clone_from(&resident));
        for pod in ["a", "b"] {
            scene.pod(pod, |report| report.health = ReplicaHealth::Failed);
        }
        assert!(matches!(scene.step(), Some(Transition::RollingBack { to, .. }) if to == name(1)));
        scene.now += 5;
        assert_eq!((scene.step(), scene.step_now()), (None, Some(RolloutStep::Rollback)), "c answers with it");
        scene.spec = Some(spec(3));
        scene
    };
    let begins = |mut scene: Scene| {
        assert_eq!(scene.step(), Some(Transition::RolledBack { version: name(2) }));
        assert!(matches!(scene.step(), Some(Transition::Started { version, .. }) if version == name(3)));
    };
    // Who would have to load it first may never: its source may be gone.
    begins(going_back(false));
    let mut scene = going_back(true);
    assert_eq!(scene.step(), None, "c is about to switch");
    scene.now += SWITCH_SECONDS;
    begins(scene);
    // Another try at what was taken back is an edit as well, and none is none.
    let mut scene = going_back(false);
    scene.spec = Some(spec(2));
    assert_eq!(scene.step(), None);
    scene.spec = Some(spec_with(2, json!({"gates": {"memory": {"headroom": "1%"}}})));
    assert_eq!(scene.step(), Some(Transition::RolledBack { version: name(2) }));
}

#[test]
fn that_no_pod_lacks_the_way_back_is_no_word_of_pods_that_are_not_there() {
    let time_of = |scene: &Scene| {
        let rollout = scene.state.rollout.as_ref().unwrap();
        assert_eq!(rollout.step, RolloutStep::Rollback);
        rollout.deadline.0.duration_since(rollout.started_at.0).as_secs()
    };
    let all_fail = |scene: &mut Scene| {
        scene.all(|report| (report.health, report.resident) = (ReplicaHealth::Failed, Some(name(1))));
    };
    let mut scene = Scene::baking();
    all_fail(&mut scene);
    scene.step();
    assert_eq!(time_of(&scene), SWITCH_SECONDS, "both have it loaded");
    let mut scene = Scene::baking();
    all_fail(&mut scene);
    scene.pod("b", |report| report.resident = None);
    scene.step();
    assert_eq!(time_of(&scene), 900, "b has to load it");
    // Nobody answers with what is taken back, and those that come have not said what they have.
    let mut scene = Scene::baking();
    scene.counted = vec!["new"];
    let load = |gate: &mut GateResult| gate.name = GateName::Load;
    scene.pod("new", |report| {
        report.candidate = Some(refused(&name(2)));
        report.candidate.iter_mut().flat_map(|candidate| &mut candidate.gates).for_each(load);
    });
    scene.step();
    assert_eq!(time_of(&scene), 900, "nobody has it");
}

#[test]
fn an_edit_back_while_baking_prepares_the_resident_version() {
    let mut scene = Scene::baking();
    scene.spec = Some(spec(1));
    assert!(matches!(scene.step(), Some(Transition::Started { .. })));
    assert_eq!(scene.state.candidate, Some(name(1)));
    scene.all(|report| report.prepared = Some(name(1)));
    assert_eq!(scene.step(), Some(Transition::Committed { version: name(1) }));
    assert_eq!(scene.state.previous, Some(name(2)));
}

#[test]
fn an_edit_while_switching_waits_for_the_switch() {
    let mut scene = Scene::committed();
    scene.spec = Some(spec(3));
    assert_eq!(scene.step(), None);
    scene.all(|report| (report.version, report.prepared) = (Some(name(2)), None));
    assert!(matches!(scene.step(), Some(Transition::Baking { .. })));
    assert!(matches!(scene.step(), Some(Transition::Started { .. })));
}

#[test]
fn without_residency_the_way_back_is_kept_by_name() {
    let mut scene = Scene::serving();
    scene.spec = Some(spec_with(2, json!({"rollback": {"keepResident": false}})));
    scene.step();
    scene.all(|report| report.prepared = Some(name(2)));
    scene.step();
    assert_eq!(scene.state.previous, Some(name(1)), "resident for the switch itself");
    scene.all(|report| (report.version, report.prepared) = (Some(name(2)), None));
    scene.step();
    assert_eq!((scene.step_now(), scene.state.previous.as_ref()), (Some(RolloutStep::Bake), None));
    scene.all(|report| report.health = ReplicaHealth::Failed);
    assert!(matches!(scene.step(), Some(Transition::RollingBack { to, .. }) if to == name(1)));
    let rollout = scene.state.rollout.as_ref().unwrap();
    assert_eq!(rollout.deadline.0, after(rollout.started_at.0, Duration::from_secs(900)), "it has to be loaded again");
}

#[test]
fn a_spec_that_cannot_be_carried_out_begins_nothing_and_gives_up_the_candidate() {
    let mut scene = Scene::serving();
    scene.spec = None;
    scene.settled();
    scene.spec = Some(spec(2));
    scene.step();
    scene.spec = None;
    assert!(matches!(scene.step(), Some(Transition::Cancelled { .. })));
    scene.settled();
    let mut scene = Scene::committed();
    scene.spec = None;
    scene.all(|report| report.version = Some(name(2)));
    assert!(matches!(scene.step(), Some(Transition::Baking { .. })), "what was begun is ended");
    let rollout = scene.state.rollout.as_ref().unwrap();
    assert_eq!(rollout.deadline.0, after(rollout.started_at.0, BAKE_WITHOUT_SPEC), "and watched");
    scene.all(|report| report.health = ReplicaHealth::Failed);
    assert!(matches!(scene.step(), Some(Transition::RollingBack { to, .. }) if to == name(1)));
}

#[test]
fn without_pods_to_be_nothing_is_validated() {
    let mut scene = Scene::serving();
    scene.spec = Some(spec(2));
    scene.replicas = 0;
    scene.settled();
    scene.replicas = 2;
    scene.step();
    scene.replicas = 0;
    assert!(matches!(scene.step(), Some(Transition::Cancelled { .. })));
}

#[test]
fn history_beyond_the_limit_is_deleted_oldest_first() {
    let mut scene = Scene::serving();
    let mut with_limit = spec(1);
    with_limit.history_limit = 2;
    scene.spec = Some(with_limit);
    for (model, revision) in [(9, 0), (8, 2), (7, 3), (6, 4)] {
        let wanted = spec(model).wanted;
        let version = NamedVersion { name: wanted.name, model: wanted.model, runtime: wanted.runtime };
        scene.stamped.push(StampedVersion { version, revision, is_refused: false });
    }
    assert_eq!(scene.plan().delete, [name(8), name(9)]);
    scene.step();
    scene.settled();
}

#[test]
fn history_is_trimmed_though_edits_come_faster_than_bakes_end() {
    let mut scene = Scene::baked_by(&["a"]);
    for (model, revision) in [(9, 1), (8, 2)] {
        let wanted = spec(model).wanted;
        let version = NamedVersion { name: wanted.name, model: wanted.model, runtime: wanted.runtime };
        scene.stamped.push(StampedVersion { version, revision, is_refused: false });
    }
    scene.spec.as_mut().unwrap().history_limit = 1;
    assert!(scene.state.rollout.is_some(), "it bakes");
    assert_eq!(scene.plan().delete, [name(9)]);
}

#[test]
fn a_version_that_somebody_deleted_is_stamped_again() {
    let mut scene = Scene::serving();
    scene.stamped.clear();
    assert_eq!(scene.plan().stamp.len(), 1);
    assert_eq!(scene.plan().stamp[0].name, name(1));
}

#[test]
fn another_address_of_the_same_file_is_handed_on() {
    let mut scene = Scene::serving();
    let mut moved = spec(1);
    moved.wanted.model.source.uri = Some("https://elsewhere/1.gguf".to_owned());
    scene.spec = Some(moved);
    assert_eq!(scene.step(), None);
    assert_eq!(scene.state.versions[0].model.source.uri.as_deref(), Some("https://elsewhere/1.gguf"));
    scene.settled();
}

#[test]
fn what_a_foreign_hand_left_is_repaired() {
    let mut scene = Scene::serving();
    scene.state.candidate = Some(name(3));
    scene.state.previous = Some(name(4));
    scene.step();
    assert_eq!((scene.state.candidate.as_ref(), scene.state.previous.as_ref()), (None, None));
    scene.settled();
}

#[test]
fn what_is_paused_is_prepared_and_not_switched_to_until_it_is_promoted_or_resumed() {
    for resumed in [json!({}), json!({"paused": true, "promote": name(2)})] {
        let mut scene = Scene::serving();
        scene.spec = Some(spec_with(2, json!({"paused": true})));
        scene.step();
        scene.all(|report| report.prepared = Some(name(2)));
        assert_eq!(scene.step(), None);
        let message = scene.state.rollout.as_ref().unwrap().message.clone().unwrap();
        assert!(message.contains(&format!("spec.rollout.promote to {}", name(2))), "{message}");
        scene.now += 10_000;
        assert_eq!(scene.step(), None, "no deadline counts for who has prepared it");
        scene.spec = Some(spec_with(2, resumed));
        assert_eq!(scene.step(), Some(Transition::Committed { version: name(2) }));
    }
}

#[test]
fn what_is_aborted_is_given_up_at_each_step_and_not_begun_with_until_the_spec_says_otherwise() {
    let aborted = || Some(spec_with(2, json!({"abort": name(2)})));
    let mut scene = Scene::serving();
    scene.spec = aborted();
    scene.settled();
    scene.spec = Some(spec(2));
    scene.step();
    scene.spec = aborted();
    assert!(matches!(scene.step(), Some(Transition::Cancelled { .. })));
    scene.settled();

    let mut scene = Scene::baking();
    scene.spec = aborted();
    let Some(Transition::RollingBack { to, .. }) = scene.step() else { panic!("{:?}", scene.state) };
    assert_eq!(to, name(1));
    scene.all(|report| report.version = Some(name(1)));
    assert!(matches!(scene.step(), Some(Transition::RolledBack { .. })));
    assert_eq!(scene.state.rejected, None, "nothing is held against it");
    scene.settled();
    scene.spec = Some(spec(2));
    assert!(matches!(scene.step(), Some(Transition::Started { .. })));
}

#[test]
fn a_promoted_version_bakes_no_longer() {
    let mut scene = Scene::baking();
    scene.spec = Some(spec_with(2, json!({"promote": name(2)})));
    assert_eq!(scene.step(), Some(Transition::Settled { version: name(2) }));
}

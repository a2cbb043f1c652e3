#![allow(clippy::unwrap_used)]
//! HoldRequests: whose turn it is, what is waited for, and what Auto falls back upon, with two pods.

use gantry_crds::status::{
    AgentStatus, CandidatePhase, CandidateStatus, FitStatus, GateName, GateResult, GateVerdict, ReplicaHealth,
    TurnStatus,
};
use serde_json::json;

use super::{
    tests::{Scene, name, refused, spec_with},
    *,
};

fn asks(model: u8, strategy: &str) -> Option<ValidService> {
    Some(spec_with(model, json!({"strategy": strategy})))
}

impl Scene {
    /// Two pods serve model 1 and are to load model 2 one after the other.
    fn holding() -> Self {
        let mut scene = Self::serving();
        scene.spec = asks(2, "HoldRequests");
        assert!(matches!(scene.step(), Some(Transition::Started { .. })));
        scene
    }

    fn checks(&mut self, pod: &str) {
        self.pod(pod, |report| {
            report.agent = Some(AgentStatus::of_this_release());
            report.candidate = Some(CandidateStatus { phase: CandidatePhase::Checked, ..in_progress() });
        });
    }

    /// Both pods check it, and it is the first one's turn.
    fn all_check(&mut self) {
        self.checks("a");
        self.checks("b");
        self.step();
        assert_eq!(self.turn(), Some(("a", true)));
    }

    /// The pod unloads what it answers with, and loads model 2.
    fn unloads(&mut self, pod: &str) {
        self.pod(pod, |report| {
            (report.version, report.health) = (None, ReplicaHealth::Starting);
            report.candidate = Some(CandidateStatus { phase: CandidatePhase::Loading, ..in_progress() });
        });
    }

    fn loads(&mut self, pod: &str) {
        self.pod(pod, |report| {
            (report.version, report.prepared) = (Some(name(2)), Some(name(2)));
            report.health = ReplicaHealth::Healthy;
        });
    }

    /// A gate refuses model 2 in the pod, and model 1 is back.
    fn goes_back(&mut self, pod: &str, gate: GateName) {
        self.pod(pod, |report| {
            (report.version, report.health) = (Some(name(1)), ReplicaHealth::Healthy);
            report.candidate = Some(CandidateStatus { gates: vec![failed(gate)], ..refused(&name(2)) });
        });
    }

    fn turn(&self) -> Option<(&str, bool)> {
        let turn = self.state.rollout.as_ref()?.turn.as_ref()?;
        Some((turn.pod.as_str(), turn.yields))
    }
}

fn in_progress() -> CandidateStatus {
    CandidateStatus { gates: Vec::new(), ..refused(&name(2)) }
}

fn failed(name: GateName) -> GateResult {
    GateResult { name, verdict: GateVerdict::Fail, value: None, message: Some("no".to_owned()) }
}

#[test]
fn one_pod_after_the_other_goes_over_and_then_it_bakes() {
    let mut scene = Scene::holding();
    assert_eq!(scene.rollout().strategy(), StrategyName::HoldRequests);
    assert_eq!((scene.step(), scene.turn()), (None, None), "no pod has checked it");
    scene.checks("b");
    assert_eq!((scene.step(), scene.turn()), (None, Some(("b", true))));
    scene.checks("a");
    scene.unloads("b");
    assert_eq!((scene.step(), scene.turn()), (None, Some(("b", true))), "it is through first");
    scene.loads("b");
    assert_eq!((scene.step(), scene.turn()), (None, Some(("a", true))));
    scene.unloads("a");
    scene.step();
    scene.loads("a");
    assert_eq!(scene.step(), Some(Transition::Committed { version: name(2) }));
    assert_eq!((scene.state.active.as_ref(), scene.state.previous.as_ref()), (Some(&name(2)), Some(&name(1))));
    assert_eq!(scene.step(), Some(Transition::Baking { version: name(2) }));
    assert_eq!(scene.rollout().strategy(), StrategyName::HoldRequests);
    scene.now += 600;
    assert_eq!(scene.step(), Some(Transition::Settled { version: name(2) }));
    scene.settled();
}

#[test]
fn the_only_pod_has_its_requests_wait_in_it() {
    let mut scene = Scene::holding();
    (scene.counted, scene.replicas) = (vec!["a"], 1);
    scene.checks("a");
    assert_eq!((scene.step(), scene.turn()), (None, Some(("a", false))));
    scene.unloads("a");
    scene.goes_back("a", GateName::Load);
    let Some(Transition::Rejected { gate, .. }) = scene.step() else { panic!("{:?}", scene.state) };
    assert_eq!((gate, scene.state.active.as_ref()), (GateName::Load, Some(&name(1))), "its word is the verdict");
}

#[test]
fn what_one_pod_cannot_load_another_one_is_asked_for() {
    let mut scene = Scene::holding();
    scene.all_check();
    scene.unloads("a");
    scene.step();
    let candidate = CandidateStatus { gates: vec![failed(GateName::Load)], ..refused(&name(2)) };
    scene.pod("a", |report| report.candidate = Some(candidate.clone()));
    assert_eq!((scene.step(), scene.turn()), (None, Some(("a", true))), "it answers with nothing yet");
    scene.goes_back("a", GateName::Load);
    assert_eq!((scene.step(), scene.turn()), (None, Some(("b", true))), "its trouble may be its own");
    scene.unloads("b");
    scene.goes_back("b", GateName::Load);
    assert!(matches!(scene.step(), Some(Transition::Rejected { gate: GateName::Load, .. })));
}

#[test]
fn answers_that_are_not_good_enough_in_one_pod_refuse_it_at_once() {
    let mut scene = Scene::holding();
    scene.all_check();
    scene.goes_back("a", GateName::Prompts);
    assert!(matches!(scene.step(), Some(Transition::Rejected { gate: GateName::Prompts, .. })));
    assert_eq!(scene.turn(), None);
}

#[test]
fn while_it_is_paused_it_is_nobodys_turn_that_has_not_begun() {
    let mut scene = Scene::holding();
    scene.checks("a");
    scene.spec = Some(spec_with(2, json!({"strategy": "HoldRequests", "paused": true})));
    assert_eq!((scene.step(), scene.turn()), (None, None));
    let told =
        "no pod unloads what it answers with while spec.rollout.paused: set it to false, or spec.rollout.promote to";
    let message = |scene: &Scene| scene.rollout().message.clone().unwrap_or_default();
    assert!(message(&scene).contains(told), "{}", message(&scene));
    scene.spec = asks(2, "HoldRequests");
    scene.step();
    assert!(!message(&scene).contains(told), "{}", message(&scene));
    scene.unloads("a");
    scene.spec = Some(spec_with(2, json!({"strategy": "HoldRequests", "paused": true})));
    scene.checks("b");
    assert_eq!((scene.step(), scene.turn()), (None, Some(("a", true))), "it would have to load the other one again");
    scene.loads("a");
    assert_eq!((scene.step(), scene.turn()), (None, None));
}

#[test]
fn who_gets_no_requests_for_what_it_answers_with_has_the_first_turn() {
    let mut scene = Scene::holding();
    scene.checks("a");
    scene.checks("b");
    (scene.cut_off, scene.state.quarantined) = (vec!["b"], vec!["b".to_owned()]);
    assert_eq!((scene.step(), scene.turn()), (None, Some(("b", true))), "a goes on answering");
}

#[test]
fn an_agent_that_does_not_know_it_gets_no_turn() {
    let mut scene = Scene::holding();
    scene.checks("a");
    scene.pod("a", |report| report.agent = None);
    scene.step();
    assert_eq!(scene.turn(), None);
    let message = scene.rollout().message.clone().unwrap();
    assert!(message.contains("the strategy HoldRequests"), "{message}");
}

#[test]
fn an_agent_that_does_not_know_it_refuses_nothing() {
    let mut scene = Scene::holding();
    scene.all(|report| {
        report.agent =
            Some(AgentStatus { strategies: vec![StrategyName::InPlaceSwap], ..AgentStatus::of_this_release() });
        report.candidate = Some(CandidateStatus { gates: vec![failed(GateName::Memory)], ..refused(&name(2)) });
    });
    assert_eq!((scene.step(), scene.turn()), (None, None), "it tried to load it beside the other one");
}

#[test]
fn nobody_begins_before_the_one_before_gets_requests() {
    let mut scene = Scene::holding();
    scene.all_check();
    scene.loads("a");
    scene.cut_off = vec!["a"];
    assert_eq!((scene.step(), scene.turn()), (None, None), "its probe has not said so yet");
    scene.cut_off.clear();
    assert_eq!((scene.step(), scene.turn()), (None, Some(("b", true))));
}

#[test]
fn pods_that_answer_with_what_was_given_up_go_back_as_they_came() {
    let mut scene = Scene::serving();
    (scene.spec, scene.is_labelled) = (asks(2, "Auto"), false);
    assert!(matches!(scene.step(), Some(Transition::Started { .. })));
    assert_eq!(scene.state.goes_over_by, None);
    without_room(&mut scene, Some(true));
    assert!(matches!(scene.step(), Some(Transition::Started { .. })));
    assert_eq!(scene.rollout().strategy(), StrategyName::HoldRequests);
    scene.all_check();
    scene.loads("a");
    scene.step();
    scene.goes_back("b", GateName::Prompts);
    assert!(matches!(scene.step(), Some(Transition::Rejected { .. })));
    let holds = Some(StrategyName::HoldRequests);
    assert_eq!(
        (&scene.state.rollout, &scene.state.goes_over_by),
        (&None, &holds),
        "beside model 2 there is no room for 1"
    );
    // An edit finds them on their way.
    scene.spec = asks(3, "Auto");
    scene.step();
    assert_eq!(scene.rollout().strategy(), StrategyName::HoldRequests);
    scene.spec = asks(3, "InPlaceSwap");
    scene.step();
    assert_eq!(scene.state.goes_over_by, None, "who asks for that gets it");
}

#[test]
fn each_pod_has_the_time_that_the_first_one_had() {
    let mut scene = Scene::holding();
    scene.all_check();
    let latest = |scene: &Scene| scene.rollout().progress.as_ref().unwrap().since.0;
    let since = latest(&scene);
    scene.now += 300;
    scene.unloads("a");
    scene.step();
    assert_eq!(latest(&scene), since);
    scene.now += 300;
    scene.loads("a");
    scene.step();
    assert!(latest(&scene).duration_since(since).as_secs() >= 600);
}

#[test]
fn going_back_is_waited_for_until_the_version_before_answers() {
    let mut scene = Scene::holding();
    for pod in ["a", "b"] {
        scene.checks(pod);
        scene.step();
        scene.loads(pod);
    }
    assert!(matches!(scene.step(), Some(Transition::Committed { .. })));
    scene.step();
    let breaks = |report: &mut ReplicaStatus| report.health = ReplicaHealth::Failed;
    scene.all(breaks);
    assert!(matches!(scene.step(), Some(Transition::RollingBack { .. })));
    let rollout = scene.state.rollout.clone().unwrap();
    assert_eq!((rollout.strategy(), rollout.step), (StrategyName::HoldRequests, RolloutStep::Rollback));
    assert_eq!(rollout.deadline.0, tests::time(scene.now + 900), "it has to be loaded");
    scene.all(|report| (report.version, report.health) = (None, ReplicaHealth::Starting));
    assert_eq!(scene.step(), None);
    scene.all(|report| (report.version, report.health) = (Some(name(1)), ReplicaHealth::Healthy));
    assert_eq!(scene.step(), Some(Transition::RolledBack { version: name(2) }));
    assert_eq!(scene.state.rejected.as_ref().unwrap().outcome, RejectedOutcome::RolledBack);
}

/// Both pods say that model 2 has no room beside model 1, and whether it has once it is alone.
fn without_room(scene: &mut Scene, fits_alone: Option<bool>) {
    let fit = FitStatus {
        required: "17Gi".to_owned(),
        available: "12Gi".to_owned(),
        fits: false,
        available_alone: fits_alone.map(|_| "28Gi".to_owned()),
        fits_alone,
    };
    let refused = CandidateStatus { gates: vec![failed(GateName::Memory)], fit: Some(fit), ..refused(&name(2)) };
    scene.all(|report| report.candidate = Some(refused.clone()));
}

#[test]
fn auto_holds_requests_where_nothing_else_is_left_and_gives_its_sum() {
    for (fits_alone, holds) in [(Some(true), true), (Some(false), false), (None, false)] {
        let mut scene = Scene::serving();
        scene.spec = asks(2, "Auto");
        scene.step();
        without_room(&mut scene, fits_alone);
        scene.step();
        assert_eq!(scene.rollout().strategy(), StrategyName::BlueGreen);
        scene.missing_other = Some("pod green-a finds no node: no GPU");
        assert_eq!(scene.step(), None);
        scene.now += 60;
        match scene.step() {
            Some(Transition::Started { .. }) if holds => {}
            Some(Transition::Rejected { gate: GateName::Deadline, .. }) if !holds => continue,
            other => panic!("{fits_alone:?}: {other:?}"),
        }
        let rollout = scene.rollout();
        let plan = "HoldRequests: candidate 17Gi > 12Gi left beside it, and there is no room for as many pods again (pod green-a \
                    finds no node: no GPU): one pod after the other unloads the active one and loads it, 17Gi <= 28Gi then; requests \
                    that come to that pod wait meanwhile";
        assert_eq!((rollout.strategy(), rollout.plan.as_str()), (StrategyName::HoldRequests, plan));
        scene.checks("a");
        scene.step();
        assert_eq!(scene.turn(), Some(("a", true)));
    }
}

#[test]
fn auto_holds_requests_at_once_where_there_cannot_be_two_sets_of_pods() {
    let mut scene = Scene::serving();
    (scene.spec, scene.is_labelled) = (asks(2, "Auto"), false);
    scene.step();
    without_room(&mut scene, Some(true));
    assert!(matches!(scene.step(), Some(Transition::Started { .. })));
    assert_eq!(scene.rollout().strategy(), StrategyName::HoldRequests);
}

#[test]
fn another_strategy_midway_begins_anew() {
    let mut scene = Scene::holding();
    for (strategy, name) in [("InPlaceSwap", StrategyName::InPlaceSwap), ("HoldRequests", StrategyName::HoldRequests)] {
        scene.spec = asks(2, strategy);
        assert!(matches!(scene.step(), Some(Transition::Started { .. })));
        assert_eq!(scene.rollout().strategy(), name);
    }
    assert_eq!(scene.state.rollout.as_ref().and_then(|rollout| rollout.turn.clone()), None::<TurnStatus>);
}

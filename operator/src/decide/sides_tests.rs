#![allow(clippy::unwrap_used)]
//! BlueGreen: each edge, and what must not happen on the way, with two pods on each side.

use gantry_crds::status::{
    AgentStatus, BreachStatus, CandidateStatus, FitStatus, GateName, GateResult, GateVerdict, ReplicaHealth,
};
use serde_json::{Value, json};

use super::{
    tests::{Scene, name, refused, spec_with},
    *,
};

const GREEN: [&str; 2] = ["green-a", "green-b"];

fn asks(model: u8, strategy: &str) -> Option<ValidService> {
    asks_with(model, json!({"strategy": strategy}))
}

fn asks_with(model: u8, rollout: Value) -> Option<ValidService> {
    Some(spec_with(model, rollout))
}

impl Scene {
    /// Two blue pods serve model 1, and two green ones run, which are to prepare model 2.
    fn blue_green() -> Self {
        let mut scene = Self::serving();
        scene.spec = asks(2, "BlueGreen");
        assert!(matches!(scene.step(), Some(Transition::Started { .. })));
        scene.other = GREEN.to_vec();
        scene
    }

    /// Both green pods answer with model 2 beside the Service.
    fn proved() -> Self {
        let mut scene = Self::blue_green();
        GREEN.iter().for_each(|pod| scene.proves(pod));
        scene
    }

    fn proves(&mut self, pod: &str) {
        self.pod(pod, |report| {
            (report.version, report.prepared) = (Some(name(2)), Some(name(2)));
            report.agent = Some(AgentStatus::of_this_release());
        });
    }

    /// What the operator does to the Service, and which pods are those of the side that answers.
    fn flip(&mut self) {
        assert_ne!(self.points_to, self.state.active_side, "nothing to flip");
        self.points_to = self.state.active_side;
    }

    /// Model 2 answers from the green pods, and the blue ones stay.
    fn baking_green() -> Self {
        let mut scene = Self::proved();
        assert_eq!(scene.step(), Some(Transition::Committed { version: name(2) }));
        std::mem::swap(&mut scene.counted, &mut scene.other);
        scene.flip();
        assert_eq!(scene.step(), Some(Transition::Baking { version: name(2) }));
        scene
    }

    pub(super) fn rollout(&self) -> &RolloutStatus {
        self.state.rollout.as_ref().unwrap()
    }
}

#[test]
fn a_second_set_of_pods_takes_over_and_the_first_one_stays_for_the_bake() {
    let mut scene = Scene::blue_green();
    assert_eq!((scene.rollout().strategy(), scene.state.active_side), (StrategyName::BlueGreen, Side::Blue));
    assert!(scene.rollout().plan.starts_with("BlueGreen: as many pods again load"), "{}", scene.rollout().plan);
    scene.proves("green-a");
    assert_eq!(scene.step(), None, "as many as there should be are waited for");
    assert_eq!(scene.rollout().message.as_deref(), Some("1 of 2 pods prepared; green-b has not reported"));
    scene.proves("green-b");
    assert_eq!(scene.step(), Some(Transition::Committed { version: name(2) }));
    assert_eq!((scene.state.active.as_ref(), scene.state.previous.as_ref()), (Some(&name(2)), Some(&name(1))));
    assert_eq!(scene.state.active_side, Side::Green);
    std::mem::swap(&mut scene.counted, &mut scene.other);
    assert_eq!(scene.step(), None, "the Service does not point there yet");
    scene.flip();
    assert_eq!(scene.step(), Some(Transition::Baking { version: name(2) }));
    assert_eq!(scene.state.previous, Some(name(1)), "the old side is the way back");
    scene.now += 600;
    assert_eq!(scene.step(), Some(Transition::Settled { version: name(2) }));
    assert_eq!((scene.state.previous.as_ref(), scene.state.active_side), (None, Side::Green));
    scene.other.clear();
    scene.settled();
}

#[test]
fn what_blue_pods_say_of_a_candidate_is_no_matter() {
    let mut scene = Scene::blue_green();
    scene.all(|report| report.prepared = Some(name(2)));
    assert_eq!(scene.step(), None);
    scene.all(|report| (report.prepared, report.candidate) = (None, Some(refused(&name(2)))));
    assert_eq!(scene.step(), None);
}

#[test]
fn a_gate_refuses_it_and_the_service_never_pointed_to_it() {
    let mut scene = Scene::blue_green();
    GREEN.iter().for_each(|pod| scene.pod(pod, |report| report.candidate = Some(refused(&name(2)))));
    assert!(matches!(scene.step(), Some(Transition::Rejected { gate: GateName::Prompts, .. })));
    assert_eq!((scene.state.active.as_ref(), scene.state.active_side), (Some(&name(1)), Side::Blue));
    assert_eq!(scene.state.rollout, None);
    scene.other.clear();
    scene.settled();
}

#[test]
fn pods_that_do_not_come_are_waited_for_no_longer_than_the_deadline() {
    let mut scene = Scene::blue_green();
    scene.other.clear();
    scene.missing_other = Some("pod green-a finds no node: no GPU");
    assert_eq!(scene.step(), None);
    assert_eq!(scene.rollout().message.as_deref(), Some("waits for a running pod: pod green-a finds no node: no GPU"));
    scene.now += 100;
    assert_eq!(scene.step(), None, "who asks for it waits for nodes to come");
    assert_eq!(scene.plan().wake_at, Some(scene.rollout().deadline.0), "and no event is needed to end it");
    scene.now += 900;
    let Some(Transition::Rejected { gate: GateName::Deadline, message, .. }) = scene.step() else { panic!() };
    assert!(message.contains("pod green-a finds no node: no GPU; put that right and annotate"), "{message}");
    assert_eq!((scene.state.active.as_ref(), scene.state.rollout.as_ref()), (Some(&name(1)), None));
}

#[test]
fn more_than_half_suffice_once_the_time_is_over() {
    let mut scene = Scene::serving();
    scene.replicas = 3;
    scene.spec = asks(2, "BlueGreen");
    scene.step();
    scene.other = GREEN.to_vec();
    GREEN.iter().for_each(|pod| scene.proves(pod));
    assert_eq!(scene.step(), None, "a third one is to come");
    assert_eq!(scene.rollout().message.as_deref(), Some("2 of 3 pods prepared"));
    scene.now += 901;
    assert_eq!(scene.step(), Some(Transition::Committed { version: name(2) }));
}

#[test]
fn one_that_fails_is_taken_back_by_the_same_flip() {
    let mut scene = Scene::baking_green();
    scene.all(|report| report.health = ReplicaHealth::Failed);
    assert!(matches!(scene.step(), Some(Transition::RollingBack { .. })));
    assert_eq!((scene.state.active.as_ref(), scene.state.active_side), (Some(&name(1)), Side::Blue));
    assert_eq!(scene.rollout().strategy(), StrategyName::BlueGreen);
    std::mem::swap(&mut scene.counted, &mut scene.other);
    assert_eq!(scene.step(), None, "the Service does not point back yet");
    scene.flip();
    assert_eq!(scene.step(), Some(Transition::RolledBack { version: name(2) }));
    assert_eq!(scene.state.rejected.as_ref().unwrap().outcome, RejectedOutcome::RolledBack);
    scene.other.clear();
    scene.settled();
}

#[test]
fn where_the_old_side_is_gone_the_pods_that_answer_go_back_by_themselves() {
    let mut scene = Scene::baking_green();
    scene.other.clear();
    scene.all(|report| report.health = ReplicaHealth::Failed);
    assert!(matches!(scene.step(), Some(Transition::RollingBack { .. })));
    assert_eq!((scene.state.active.as_ref(), scene.state.active_side), (Some(&name(1)), Side::Green));
    assert_eq!(scene.rollout().strategy(), StrategyName::InPlaceSwap, "requests go to no side without pods");
}

#[test]
fn asking_for_the_version_before_goes_back_at_once_and_holds_nothing_against_the_other() {
    let mut scene = Scene::baking_green();
    scene.spec = asks(1, "BlueGreen");
    let step = scene.step();
    assert_eq!(
        step,
        Some(Transition::RollingBack {
            version: name(2),
            to: name(1),
            message: "the spec asks for it again".to_owned()
        })
    );
    std::mem::swap(&mut scene.counted, &mut scene.other);
    scene.flip();
    assert!(matches!(scene.step(), Some(Transition::RolledBack { .. })));
    assert_eq!((scene.state.active.as_ref(), scene.state.rejected.as_ref()), (Some(&name(1)), None));
    scene.other.clear();
    scene.settled();
}

#[test]
fn another_version_waits_until_both_sides_are_not_in_use_any_more_and_says_so() {
    let mut scene = Scene::baking_green();
    scene.spec = asks(3, "BlueGreen");
    assert_eq!(scene.step(), None);
    let message = scene.rollout().message.clone().unwrap();
    assert!(message.starts_with(&format!("{} is prepared once the bake is over", name(3))), "{message}");
    assert!(message.contains(&format!("ask for {} again", name(1))), "{message}");
    // What the message says to do does it.
    assert!(message.contains(&format!("set spec.rollout.promote to {}", name(2))), "{message}");
    scene.spec = asks_with(3, json!({"strategy": "BlueGreen", "promote": name(2)}));
    assert_eq!(scene.step(), Some(Transition::Settled { version: name(2) }));
    scene.other.clear();
    assert!(matches!(scene.step(), Some(Transition::Started { .. })));
    assert_eq!(scene.state.active_side, Side::Green, "the next one is prepared in blue pods");
}

#[test]
fn an_edit_midway_is_prepared_by_the_same_pods_and_one_back_ends_it() {
    let mut scene = Scene::blue_green();
    scene.proves("green-a");
    scene.spec = asks(3, "BlueGreen");
    let Some(Transition::Started { instead_of, .. }) = scene.step() else { panic!("{:?}", scene.state) };
    assert_eq!(instead_of, Some(name(2)));
    assert_eq!(scene.step(), None, "what was said of the other one says nothing of this");
    scene.spec = asks(1, "BlueGreen");
    assert!(matches!(scene.step(), Some(Transition::Cancelled { .. })));
    assert_eq!((scene.state.rollout.as_ref(), scene.state.active_side), (None, Side::Blue));
}

#[test]
fn it_does_not_begin_while_pods_answer_that_do_not_say_of_which_side_they_are() {
    let mut scene = Scene::serving();
    scene.is_labelled = false;
    scene.spec = asks(2, "BlueGreen");
    assert_eq!(scene.step(), None);
    scene.is_labelled = true;
    assert!(matches!(scene.step(), Some(Transition::Started { .. })));
}

/// Both blue pods say that model 2 does not fit beside model 1.
fn without_room(scene: &mut Scene) {
    let result =
        GateResult { name: GateName::Memory, verdict: GateVerdict::Fail, value: None, message: Some("no".to_owned()) };
    let fit = FitStatus {
        required: "17Gi".to_owned(),
        available: "12Gi".to_owned(),
        fits: false,
        available_alone: None,
        fits_alone: None,
    };
    let refused = CandidateStatus { gates: vec![result], fit: Some(fit), ..refused(&name(2)) };
    scene.all(|report| report.candidate = Some(refused.clone()));
}

#[test]
fn auto_takes_more_pods_where_one_has_no_room_for_both_and_gives_its_sum() {
    let mut scene = Scene::serving();
    scene.spec = asks(2, "Auto");
    scene.step();
    assert_eq!(scene.rollout().strategy(), StrategyName::InPlaceSwap);
    without_room(&mut scene);
    assert!(matches!(scene.step(), Some(Transition::Started { .. })));
    assert_eq!(scene.rollout().strategy(), StrategyName::BlueGreen);
    assert_eq!(scene.rollout().plan, "BlueGreen: candidate 17Gi > 12Gi left beside it: as many pods again load it");
    scene.other = GREEN.to_vec();
    GREEN.iter().for_each(|pod| scene.proves(pod));
    assert_eq!(scene.step(), Some(Transition::Committed { version: name(2) }));
}

#[test]
fn auto_gives_up_what_no_node_has_room_for_and_tells_both_reasons() {
    let mut scene = Scene::serving();
    scene.spec = asks(2, "Auto");
    scene.step();
    without_room(&mut scene);
    scene.step();
    scene.missing_other = Some("pod green-a finds no node: no GPU");
    assert_eq!(scene.step(), None);
    let woken_at = scene.plan().wake_at.unwrap();
    scene.now += 60;
    assert!(tests::time(scene.now) >= woken_at, "time alone ends it");
    let Some(Transition::Rejected { message, .. }) = scene.step() else { panic!("{:?}", scene.state) };
    assert!(message.contains("17Gi > 12Gi") && message.contains("finds no node"), "{message}");
    assert_eq!(scene.state.active, Some(name(1)));
    scene.settled();
}

#[test]
fn who_asks_for_a_swap_in_place_gets_no_more_pods() {
    let mut scene = Scene::serving();
    scene.spec = asks(2, "InPlaceSwap");
    scene.step();
    without_room(&mut scene);
    assert!(matches!(scene.step(), Some(Transition::Rejected { gate: GateName::Memory, .. })));
}

#[test]
fn what_is_compared_with_the_active_version_gets_no_pods_without_it() {
    let mut scene = Scene::serving();
    scene.spec = asks_with(2, json!({"strategy": "Auto", "gates": {"drift": {}}}));
    scene.step();
    without_room(&mut scene);
    assert!(matches!(scene.step(), Some(Transition::Rejected { gate: GateName::Memory, .. })));
}

#[test]
fn the_first_version_needs_no_second_set_of_pods() {
    let mut scene = Scene::new(1);
    scene.spec = asks(1, "BlueGreen");
    scene.step();
    assert_eq!(scene.rollout().strategy(), StrategyName::InPlaceSwap);
}

#[test]
fn aborting_a_version_that_bakes_flips_back_and_it_is_not_begun_with_again() {
    let mut scene = Scene::baking_green();
    scene.spec = asks_with(2, json!({"strategy": "BlueGreen", "abort": name(2)}));
    assert!(matches!(scene.step(), Some(Transition::RollingBack { .. })));
    std::mem::swap(&mut scene.counted, &mut scene.other);
    scene.flip();
    assert!(matches!(scene.step(), Some(Transition::RolledBack { .. })));
    scene.other.clear();
    scene.settled();
    assert_eq!((scene.state.active.clone(), scene.state.rejected.clone()), (Some(name(1)), None));
}

#[test]
fn requests_go_back_when_no_pod_of_the_new_side_has_been_ready_for_a_while() {
    let mut scene = Scene::baking_green();
    scene.cut_off = GREEN.to_vec();
    assert_eq!(scene.step(), None, "a moment is no reason");
    let message = scene.rollout().message.clone().unwrap();
    assert_eq!(message, "waits for its pods to be ready");
    let until = scene.plan().wake_at.unwrap();
    scene.cut_off.clear();
    assert_eq!(scene.step(), None);
    assert_eq!((scene.rollout().progress.as_ref(), scene.rollout().message.as_ref()), (None, None), "it is over");
    scene.cut_off = GREEN.to_vec();
    scene.step();
    scene.now += 31;
    assert!(tests::time(scene.now) > until, "time alone ends it");
    let Some(Transition::RollingBack { to, message, .. }) = scene.step() else { panic!("{:?}", scene.state) };
    assert!(to == name(1) && message.contains("no pod that answers with it is ready"), "{message}");
    assert_eq!(scene.state.active_side, Side::Blue);
}

#[test]
fn the_way_back_is_not_let_go_while_no_pod_of_the_new_side_is_ready() {
    let mut scene = Scene::baking_green();
    scene.cut_off = GREEN.to_vec();
    scene.cut_off.extend(["a", "b"]);
    scene.now += 10_000;
    assert_eq!(scene.step(), None, "nobody answers on either side");
    assert_eq!(scene.state.previous, Some(name(1)));
    scene.spec = asks(3, "BlueGreen");
    assert!(matches!(scene.step(), Some(Transition::Started { .. })), "the edit may be the cure");
}

#[test]
fn a_version_that_fails_is_taken_back_when_the_pods_to_go_back_to_are_there_again() {
    let mut scene = Scene::baking_green();
    scene.cut_off = vec!["a", "b"];
    let breach = BreachStatus { signal: "errorRate".into(), value: "12%".into(), limit: "5%".into(), samples: 40 };
    scene.all(|report| report.breach = Some(breach.clone()));
    assert_eq!(scene.step(), None, "it answers meanwhile");
    let message = scene.rollout().message.clone().unwrap();
    assert!(message.starts_with(&format!("waits for the pods of {} to take it back: ", name(1))), "{message}");
    assert!(scene.rollout().wait_reason.is_some(), "conditions say so");
    scene.pod("a", |report| {
        report.version = None;
        report.candidate =
            Some(CandidateStatus { message: Some("its source is away".to_owned()), ..refused(&name(1)) });
    });
    scene.step();
    let message = scene.rollout().message.clone().unwrap();
    assert!(message.contains(&format!("{} (pod a: its source is away) to take it back", name(1))), "{message}");
    scene.pod("a", |report| (report.version, report.candidate) = (Some(name(1)), None));
    scene.cut_off.clear();
    assert!(matches!(scene.step(), Some(Transition::RollingBack { .. })));
    assert_eq!(scene.state.active_side, Side::Blue);
}

#[test]
fn the_first_pod_to_run_does_not_refuse_for_those_that_are_still_to_come() {
    let mut scene = Scene::serving();
    scene.replicas = 3;
    scene.spec = asks(2, "BlueGreen");
    scene.step();
    scene.other = vec!["green-a"];
    let result = GateResult { name: GateName::Load, verdict: GateVerdict::Fail, value: None, message: None };
    let refused = CandidateStatus { gates: vec![result], ..refused(&name(2)) };
    scene.pod("green-a", |report| report.candidate = Some(refused.clone()));
    assert_eq!(scene.step(), None);
    scene.other.push("green-b");
    scene.pod("green-b", |report| report.candidate = Some(refused.clone()));
    assert!(matches!(scene.step(), Some(Transition::Rejected { gate: GateName::Load, .. })), "two of three");
}

#[test]
fn no_clock_runs_while_it_is_paused_and_it_begins_anew() {
    let mut scene = Scene::proved();
    scene.spec = asks_with(2, json!({"strategy": "BlueGreen", "paused": true}));
    assert_eq!(scene.step(), None);
    scene.cut_off = vec!["green-a"];
    scene.now += 10_000;
    assert_eq!(scene.step(), None, "a pod that is away for a moment ends no rollout that somebody holds");
    scene.spec = asks(2, "BlueGreen");
    assert_eq!(scene.step(), None, "it has the time of a rollout again");
    scene.cut_off.clear();
    assert_eq!(scene.step(), Some(Transition::Committed { version: name(2) }));
}

#[test]
fn another_strategy_midway_begins_anew() {
    let mut scene = Scene::blue_green();
    scene.spec = asks(2, "InPlaceSwap");
    assert!(matches!(scene.step(), Some(Transition::Started { .. })));
    assert_eq!(scene.rollout().strategy(), StrategyName::InPlaceSwap);
}

#[test]
fn a_switch_that_leaves_nobody_on_either_side_ends_and_an_edit_is_taken_up() {
    for pods in [GREEN.to_vec(), Vec::new()] {
        let mut scene = Scene::proved();
        assert_eq!(scene.step(), Some(Transition::Committed { version: name(2) }));
        std::mem::swap(&mut scene.counted, &mut scene.other);
        scene.flip();
        scene.counted = pods;
        scene.other.clear();
        scene.all(|report| (report.version, report.prepared) = (None, None));
        scene.spec = asks(3, "BlueGreen");
        let mut steps = Vec::new();
        for _ in 0..10 {
            scene.now += 1_000;
            steps.extend(scene.step());
        }
        let begun = |step: &Transition| matches!(step, Transition::Started { version, .. } if *version == name(3));
        assert!(steps.iter().any(begun), "{steps:?}");
    }
}

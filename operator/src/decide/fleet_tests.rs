#![allow(clippy::unwrap_used)]
//! Whose failure a failure is: fleets of one to five pods of which some fail, lag, or come and go.

use gantry_crds::status::{
    AgentStatus, BreachStatus, CandidatePhase, CandidateStatus, GateName, GateResult, GateVerdict, Progress,
    ReplicaHealth, StrategyName, WaitReason,
};
use serde_json::json;

use super::{
    tests::{SWITCH_SECONDS, Scene, name, refused, spec, spec_with, time},
    *,
};

const FIVE: [&str; 5] = ["a", "b", "c", "d", "e"];

/// What a pod says of model 2 when `gate` refused it there.
fn refused_by(gate: GateName) -> CandidateStatus {
    let result = GateResult {
        name: gate,
        verdict: GateVerdict::Fail,
        value: Some("bad".to_owned()),
        message: Some("it went wrong".to_owned()),
    };
    CandidateStatus { gates: vec![result], ..refused(&name(2)) }
}

fn passed(gate: GateName) -> GateResult {
    GateResult { name: gate, verdict: GateVerdict::Pass, value: None, message: None }
}

/// The same of the file that was asked for: its digest is right.
fn file_refused_by(gate: GateName) -> CandidateStatus {
    let mut candidate = refused_by(gate);
    candidate.gates.insert(0, passed(GateName::Digest));
    candidate
}

pub(super) fn at(phase: CandidatePhase, bytes: i64) -> CandidateStatus {
    let progress = Some(Progress { bytes, ..Progress::default() });
    CandidateStatus { phase, progress, gates: Vec::new(), ..refused(&name(2)) }
}

/// Pods serve model 1 and prepare model 2.
pub(super) fn preparing(pods: &[&'static str]) -> Scene {
    let mut scene = Scene::served_by(pods);
    scene.spec = Some(spec(2));
    assert!(matches!(scene.step(), Some(Transition::Started { .. })));
    scene
}

pub(super) fn prepare(scene: &mut Scene, pods: &[&'static str]) {
    pods.iter().for_each(|pod| scene.pod(pod, |report| report.prepared = Some(name(2))));
}

fn refuse(scene: &mut Scene, pods: &[&'static str], gate: GateName) {
    pods.iter().for_each(|pod| scene.pod(pod, |report| report.candidate = Some(refused_by(gate))));
}

#[test]
fn a_gate_that_fails_in_a_minority_of_the_pods_is_their_problem() {
    use GateName::{Fetch, Load, Memory};
    for gate in [Fetch, Memory, Load] {
        for (pods, failing, committed) in [(3, 1, true), (4, 1, true), (5, 2, true), (5, 3, false), (3, 2, false)] {
            let mut scene = preparing(&FIVE[..pods]);
            refuse(&mut scene, &FIVE[..failing], gate);
            if committed {
                assert_eq!(scene.step(), None, "{gate:?}: {failing} of {pods} failed, the others are still at it");
                prepare(&mut scene, &FIVE[failing..pods]);
                assert!(matches!(scene.step(), Some(Transition::Committed { .. })), "{gate:?} {pods} {failing}");
            } else {
                let step = scene.step();
                assert!(matches!(step, Some(Transition::Rejected { .. })), "{gate:?} {pods} {failing}: {step:?}");
            }
        }
    }
}

#[test]
fn in_a_fleet_of_one_its_word_is_the_verdict_and_in_one_of_two_it_takes_both() {
    let mut scene = preparing(&["a"]);
    refuse(&mut scene, &["a"], GateName::Load);
    assert!(matches!(scene.step(), Some(Transition::Rejected { .. })));
    let mut scene = preparing(&["a", "b"]);
    refuse(&mut scene, &["a"], GateName::Load);
    assert_eq!(scene.step(), None);
    refuse(&mut scene, &["b"], GateName::Load);
    assert!(matches!(scene.step(), Some(Transition::Rejected { .. })));
}

#[test]
fn one_of_two_pods_that_fails_has_until_the_deadline_to_be_replaced() {
    let tie = || {
        let mut scene = preparing(&["a", "b"]);
        refuse(&mut scene, &["a"], GateName::Memory);
        prepare(&mut scene, &["b"]);
        scene.now += 60;
        assert_eq!(scene.step(), None);
        scene
    };
    let mut scene = tie();
    scene.now += 900;
    let Some(Transition::Rejected { gate, message, .. }) = scene.step() else { panic!("{:?}", scene.state) };
    assert_eq!(gate, GateName::Memory);
    assert_eq!(
        message,
        "1 of 2 pods refused it: Memory gate on pod a: it went wrong; if the trouble is theirs alone, delete them, and \
         annotate the service with gantry.dev/retry=<any new value>"
    );
    let mut scene = tie();
    scene.counted = vec!["b", "new"];
    assert!(matches!(scene.step(), Some(Transition::Committed { .. })), "who replaces it is not waited for");
}

#[test]
fn why_a_pod_refused_it_is_told_while_the_others_go_on() {
    let told = |scene: &mut Scene| {
        assert_eq!(scene.step(), None);
        let rollout = scene.state.rollout.as_ref().unwrap();
        (rollout.wait_reason, rollout.message.clone().unwrap())
    };
    let mut scene = preparing(&["a", "b"]);
    refuse(&mut scene, &["a"], GateName::Memory);
    let expected = "0 of 2 pods prepared; a: it went wrong; b has not begun";
    assert_eq!(told(&mut scene), (Some(WaitReason::GateFailed), expected.to_owned()));
    // What can be put right in time goes first.
    let waits = CandidateStatus {
        wait_reason: Some(WaitReason::FetchBackOff),
        message: Some("the host is away".to_owned()),
        ..at(CandidatePhase::Fetching, 0)
    };
    scene.pod("b", |report| report.candidate = Some(waits.clone()));
    let expected = "0 of 2 pods prepared; b: the host is away; a: it went wrong";
    assert_eq!(told(&mut scene), (Some(WaitReason::FetchBackOff), expected.to_owned()));
    // A pod that is not waited for refuses nothing.
    scene.cut_off.push("a");
    scene.pod("b", |report| report.candidate = Some(at(CandidatePhase::Fetching, 0)));
    let expected = "0 of 2 pods prepared; a is not ready and not waited for, b is Fetching";
    assert_eq!(told(&mut scene), (None, expected.to_owned()));
}

#[test]
fn what_is_in_a_file_and_what_it_answers_is_the_same_in_every_pod() {
    use GateName::{Format, Prompts, Template};
    for gate in [Format, Template, Prompts] {
        let mut scene = preparing(&FIVE);
        scene.pod("e", |report| report.candidate = Some(file_refused_by(gate)));
        assert!(matches!(scene.step(), Some(Transition::Rejected { .. })), "{gate:?}");
    }
    // Unless the file passed in another pod: a template may be slow in one that has much to do.
    for gate in [Format, Template] {
        let mut scene = preparing(&FIVE);
        scene.pod("e", |report| report.candidate = Some(file_refused_by(gate)));
        let further = CandidateStatus { gates: vec![passed(gate)], ..at(CandidatePhase::Loading, 0) };
        scene.pod("a", |report| report.candidate = Some(further.clone()));
        assert_eq!(scene.step(), None, "{gate:?}");
    }
}

#[test]
fn what_a_source_sent_to_one_pod_is_no_verdict_for_those_that_have_not_asked_it_yet() {
    use GateName::{Digest, Format};
    for gate in [Digest, Format] {
        let mut scene = preparing(&FIVE);
        refuse(&mut scene, &["a"], gate);
        assert_eq!(scene.step(), None, "{gate:?}: a page of a proxy, or half of the file");
        prepare(&mut scene, &FIVE[1..]);
        assert!(matches!(scene.step(), Some(Transition::Committed { .. })), "{gate:?}");
        // Where it is the file, the others get the same.
        let mut scene = preparing(&FIVE);
        refuse(&mut scene, &FIVE[..3], gate);
        assert!(matches!(scene.step(), Some(Transition::Rejected { .. })), "{gate:?}");
        let mut scene = preparing(&["a"]);
        refuse(&mut scene, &["a"], gate);
        assert!(matches!(scene.step(), Some(Transition::Rejected { .. })), "{gate:?}: there is nobody else to ask");
    }
}

#[test]
fn a_pod_without_requests_holds_nobody_up_as_long_as_others_get_them() {
    let mut scene = preparing(&["a", "b"]);
    scene.counted.push("new");
    scene.cut_off.push("b");
    prepare(&mut scene, &["a"]);
    assert!(matches!(scene.step(), Some(Transition::Committed { .. })), "b is on a node that is lost");
    let mut scene = Scene::new(2);
    scene.step();
    scene.pod("a", |report| report.prepared = Some(name(2)));
    assert_eq!(scene.step(), None, "nobody answers yet: both may be the first");
    scene.now += 60;
    assert_eq!(scene.step(), None);
    scene.now += 900;
    assert!(matches!(scene.step(), Some(Transition::Committed { .. })), "one is better than none");
}

#[test]
fn a_worker_that_dies_in_one_pod_and_works_in_the_others_is_that_pods_problem() {
    for (pods, failing, stays) in
        [(2, 1, true), (3, 1, true), (4, 2, true), (1, 1, false), (2, 2, false), (3, 2, false)]
    {
        for mut scene in [Scene::committed_by(&FIVE[..pods]), Scene::baked_by(&FIVE[..pods])] {
            for pod in &FIVE[..pods] {
                let health = if FIVE[..failing].contains(pod) { ReplicaHealth::Failed } else { ReplicaHealth::Healthy };
                scene.pod(pod, |report| {
                    (report.version, report.prepared, report.health) = (Some(name(2)), None, health);
                    report.message = Some("the worker keeps dying".to_owned());
                });
            }
            let step = scene.step();
            assert_eq!(!matches!(step, Some(Transition::RollingBack { .. })), stays, "{failing} of {pods}: {step:?}");
            if stays {
                let message = scene.state.rollout.as_ref().unwrap().message.clone().unwrap();
                assert!(message.starts_with("goes on without a: the worker keeps dying"), "{message}");
            }
        }
    }
}

#[test]
fn the_first_pod_to_switch_does_not_judge_for_all() {
    let mut scene = Scene::committed_by(&["a", "b"]);
    scene.pod("a", |report| (report.version, report.health) = (Some(name(2)), ReplicaHealth::Failed));
    assert_eq!(scene.step(), None, "b may show that it works");
    scene.now += SWITCH_SECONDS;
    assert!(matches!(scene.step(), Some(Transition::RollingBack { .. })), "nobody answers with it");
}

#[test]
fn a_pod_that_lags_behind_a_switch_is_left_behind() {
    let mut scene = Scene::committed_by(&["a", "b"]);
    scene.pod("a", |report| report.version = Some(name(2)));
    scene.now += SWITCH_SECONDS - 2;
    assert_eq!(scene.step(), None);
    assert_eq!(scene.step(), Some(Transition::Baking { version: name(2) }));
    let message = scene.state.rollout.as_ref().unwrap().message.clone();
    assert_eq!(message, Some(format!("goes on without b, which answers with {}", name(1))));
}

#[test]
fn a_pod_that_gets_no_requests_does_not_lag() {
    let mut scene = Scene::committed_by(&["a", "b"]);
    scene.cut_off.push("b");
    scene.pod("a", |report| report.version = Some(name(2)));
    assert_eq!(scene.step(), Some(Transition::Baking { version: name(2) }));
}

#[test]
fn pods_that_are_all_new_say_nothing_of_a_version_until_they_had_time_to_load_it() {
    let dies = || {
        let mut scene = Scene::committed_by(&["a"]);
        scene.counted = vec!["new"];
        scene.now += SWITCH_SECONDS;
        assert_eq!(scene.step(), None);
        scene
    };
    let mut scene = dies();
    assert_eq!(scene.plan().wake_at, Some(scene.state.rollout.as_ref().unwrap().deadline.0));
    scene.pod("new", |report| report.version = Some(name(2)));
    assert_eq!(scene.step(), Some(Transition::Baking { version: name(2) }));
    let mut scene = dies();
    scene.pod("new", |report| report.candidate = Some(refused_by(GateName::Fetch)));
    assert_eq!(scene.step(), None, "a source may come back");
    for gate in [GateName::Digest, GateName::Format] {
        scene.pod("new", |report| report.candidate = Some(refused_by(gate)));
        assert_eq!(scene.step(), None, "what its address answers with by now is not what was proved: {gate:?}");
    }
    scene.pod("new", |report| report.candidate = Some(refused_by(GateName::Load)));
    assert!(matches!(scene.step(), Some(Transition::RollingBack { .. })), "nobody has it, and nobody can load it");
    let mut scene = dies();
    scene.now += 900;
    assert!(matches!(scene.step(), Some(Transition::RollingBack { .. })));
    assert_eq!(scene.state.rejected.as_ref().unwrap().value.as_deref(), Some("no pod answered with it in 900s"));
}

#[test]
fn an_edit_of_a_version_that_all_pods_were_lost_with_is_prepared_and_the_way_back_stays() {
    let lost = || {
        let mut scene = Scene::committed_by(&["a"]);
        scene.counted = vec!["new"];
        scene.pod("new", |report| report.candidate = Some(refused_by(GateName::Fetch)));
        scene.spec = Some(spec(3));
        assert_eq!(scene.step(), None, "a pod that could switch would");
        assert_eq!(scene.plan().wake_at, Some(time(scene.now + SWITCH_SECONDS - 1)));
        scene.now += SWITCH_SECONDS;
        assert!(matches!(scene.step(), Some(Transition::Started { version, .. }) if version == name(3)));
        scene
    };
    let mut scene = lost();
    let bake = scene.state.rollout.as_ref().unwrap().bake.clone().unwrap();
    assert_eq!(
        (bake.to, scene.state.active.clone(), scene.state.previous.clone()),
        (name(1), Some(name(2)), Some(name(1)))
    );
    scene.pod("new", |report| report.prepared = Some(name(3)));
    assert!(matches!(scene.step(), Some(Transition::Committed { version }) if version == name(3)));
    // What the new pods cannot load is taken back, as without the edit.
    let mut scene = lost();
    scene.pod("new", |report| report.candidate = Some(refused_by(GateName::Load)));
    assert_eq!(scene.step(), None, "it is the word of another attempt");
    scene.spec = Some(spec(2));
    assert!(matches!(scene.step(), Some(Transition::Cancelled { .. })));
    scene.pod("new", |report| report.candidate = Some(refused_by(GateName::Load)));
    assert!(matches!(scene.step(), Some(Transition::RollingBack { to, .. }) if to == name(1)));
}

#[test]
fn a_bake_that_no_pod_saw_is_not_over() {
    let mut scene = Scene::baked_by(&["a"]);
    scene.counted = Vec::new();
    scene.now += 10_000;
    assert_eq!(scene.step(), None, "nobody has it");
    scene.counted = vec!["new"];
    assert_eq!((scene.step(), scene.step_now()), (None, Some(RolloutStep::Bake)), "nobody has it yet");
    let mut fails = scene.state.clone();
    scene.pod("new", |report| report.version = Some(name(2)));
    assert_eq!(scene.step(), Some(Transition::Settled { version: name(2) }));
    std::mem::swap(&mut scene.state, &mut fails);
    scene.pod("new", |report| (report.version, report.candidate) = (None, Some(refused_by(GateName::Load))));
    assert!(matches!(scene.step(), Some(Transition::RollingBack { to, .. }) if to == name(1)), "there is a way back");
    // An edit meanwhile keeps the way back as well.
    let mut scene = Scene::baked_by(&["a"]);
    scene.counted = vec!["new"];
    scene.now += 10_000;
    scene.spec = Some(spec(3));
    assert!(matches!(scene.step(), Some(Transition::Started { .. })));
    assert_eq!((scene.step(), scene.state.previous.clone()), (None, Some(name(1))));
    // Where there are to be no pods there is nothing to wait for.
    let mut scene = Scene::baked_by(&["a"]);
    (scene.counted, scene.replicas) = (Vec::new(), 0);
    scene.now += 10_000;
    assert_eq!(scene.step(), Some(Transition::Settled { version: name(2) }));
}

#[test]
fn a_new_pod_that_cannot_load_a_version_does_not_judge_for_those_that_still_do() {
    let mut scene = Scene::baked_by(&["a"]);
    scene.counted = vec!["new", "silent"];
    scene.pod("new", |report| report.candidate = Some(refused_by(GateName::Load)));
    assert_eq!(scene.step(), None, "one has not said anything yet");
    scene.pod("silent", |report| report.candidate = Some(at(CandidatePhase::Fetching, 0)));
    assert_eq!(scene.step(), None, "it may get it");
    scene.pod("silent", |report| report.candidate = Some(refused_by(GateName::Load)));
    assert!(matches!(scene.step(), Some(Transition::RollingBack { .. })), "nobody can load it");
}

#[test]
fn what_one_pod_refuses_is_not_taken_back_before_those_that_prepared_it_could_switch() {
    let mut scene = Scene::committed_by(&["a", "b", "c"]);
    scene.cut_off.extend(["b", "c"]);
    scene.pod("a", |report| report.candidate = Some(refused_by(GateName::Memory)));
    assert_eq!(scene.step(), None, "the others have prepared it");
    scene.pod("b", |report| report.version = Some(name(2)));
    assert_eq!(scene.step(), Some(Transition::Baking { version: name(2) }));
    assert_eq!(scene.step(), None, "b is about to be ready");
}

#[test]
fn an_agent_that_does_not_know_a_gate_does_not_pass_for_one_that_asked_it() {
    use GateName::{Digest, Fetch, Format, Load, Memory, Template};
    let mut scene = Scene::served_by(&["a", "b"]);
    scene.spec = Some(spec_with(2, json!({"gates": {"prompts": {"configMapRef": {"name": "golden"}}}})));
    scene.step();
    prepare(&mut scene, &["a", "b"]);
    let unknowing =
        AgentStatus { gates: vec![Fetch, Digest, Format, Memory, Template, Load], ..AgentStatus::of_this_release() };
    scene.pod("b", |report| report.agent = Some(unknowing.clone()));
    assert_eq!(scene.step(), None);
    let message = scene.state.rollout.as_ref().unwrap().message.clone().unwrap();
    assert_eq!(
        message,
        "1 of 2 pods prepared; the agent of b does not know the gate Prompts: replace the pods by ones of this release's \
         image (annotate the service with gantry.dev/restart=<any new value>)"
    );
    let mut newer = AgentStatus::of_this_release();
    newer.gates.push(GateName::Unknown("Toxicity"));
    newer.strategies.push(StrategyName::Unknown("Canary"));
    scene.pod("b", |report| report.agent = Some(newer.clone()));
    assert!(matches!(scene.step(), Some(Transition::Committed { .. })), "one that knows more knows enough");
    // Nor does one that compares nothing pass for one that has compared.
    let shadow = json!({"samplePercent": 5, "duration": "5m"});
    for (gate, named, asked) in
        [("drift", "Drift", json!({})), ("performance", "Performance", json!({})), ("shadow", "Shadow", shadow)]
    {
        let mut scene = Scene::served_by(&["a", "b"]);
        scene.spec = Some(spec_with(2, json!({"gates": {gate: asked}})));
        scene.step();
        prepare(&mut scene, &["a", "b"]);
        scene.all(|report| report.agent = Some(unknowing.clone()));
        assert_eq!(scene.step(), None, "{gate}");
        let message = scene.state.rollout.as_ref().unwrap().message.clone().unwrap();
        assert!(message.contains(&format!("does not know the gate {named}")), "{message}");
    }
    // A spec that asks for no prompts asks no agent for them.
    let mut scene = preparing(&["a"]);
    prepare(&mut scene, &["a"]);
    scene.pod("a", |report| report.agent = Some(unknowing.clone()));
    assert!(matches!(scene.step(), Some(Transition::Committed { .. })));
}

#[test]
fn an_agent_that_does_not_know_the_strategy_is_not_told_to_switch() {
    let mut scene = preparing(&["a"]);
    prepare(&mut scene, &["a"]);
    scene.pod("a", |report| report.agent = Some(AgentStatus { strategies: vec![], ..AgentStatus::of_this_release() }));
    assert_eq!(scene.step(), None);
    assert!(scene.state.rollout.as_ref().unwrap().message.as_ref().unwrap().contains("the strategy InPlaceSwap"));
}

#[test]
fn an_agent_that_does_not_know_a_signal_does_not_bake_unwatched() {
    let mut scene = preparing(&["a"]);
    scene.spec = Some(spec_with(2, json!({"rollback": {"signals": {"errorRate": "5%", "ttftP95": "2s"}}})));
    prepare(&mut scene, &["a"]);
    assert_eq!(scene.step(), None, "it says nothing of signals");
    let message = scene.state.rollout.as_ref().unwrap().message.clone().unwrap();
    assert!(message.contains("the agent of a does not know the signal errorRate: replace the pods"), "{message}");
    let agent = |signals: &[&str]| {
        let signals = signals.iter().map(|signal| (*signal).to_owned()).collect();
        Some(AgentStatus { signals, ..AgentStatus::of_this_release() })
    };
    scene.pod("a", |report| report.agent = agent(&["errorRate"]));
    assert_eq!(scene.step(), None);
    assert!(scene.state.rollout.as_ref().unwrap().message.as_ref().unwrap().contains("the signal ttftP95"));
    scene.pod("a", |report| report.agent = agent(&["errorRate", "ttftP95", "refusalRate"]));
    assert!(matches!(scene.step(), Some(Transition::Committed { .. })));
}

#[test]
fn a_gate_of_a_later_release_refuses_for_all() {
    let mut scene = preparing(&FIVE);
    refuse(&mut scene, &["e"], GateName::Unknown("Toxicity"));
    let Some(Transition::Rejected { gate, message, .. }) = scene.step() else { panic!("{:?}", scene.state) };
    assert_eq!(gate, GateName::Unknown("Toxicity"));
    assert!(message.starts_with("Toxicity gate on pod e: it went wrong"), "{message}");
    scene.settled();
}

#[test]
fn a_signal_that_passes_its_limit_in_most_pods_takes_the_version_back_and_in_one_of_them_does_not() {
    let breach =
        BreachStatus { signal: "errorRate".to_owned(), value: "12%".to_owned(), limit: "5%".to_owned(), samples: 40 };
    for (pods, breaching, taken_back) in [(1, 1, true), (2, 1, false), (2, 2, true), (3, 1, false), (3, 2, true)] {
        let mut scene = Scene::baked_by(&FIVE[..pods]);
        FIVE[..breaching].iter().for_each(|pod| scene.pod(pod, |report| report.breach = Some(breach.clone())));
        let step = scene.step();
        assert_eq!(matches!(step, Some(Transition::RollingBack { .. })), taken_back, "{breaching} of {pods}: {step:?}");
        if let Some(rejected) = &scene.state.rejected {
            assert_eq!((rejected.gate, rejected.value.as_deref()), (GateName::Health, Some("errorRate 12%")));
            let says = "pod a: 12% in 40 requests, at most 5% wanted (spec.rollout.rollback.signals.errorRate); change";
            assert!(rejected.message.starts_with(says), "{}", rejected.message);
        } else {
            let message = scene.state.rollout.as_ref().unwrap().message.clone().unwrap();
            assert!(message.starts_with("goes on without a: 12% in 40 requests"), "{message}");
        }
    }
}

#[test]
fn a_pod_without_requests_does_not_speak_for_a_version_that_answers_badly_in_another() {
    let breach =
        BreachStatus { signal: "errorRate".to_owned(), value: "12%".to_owned(), limit: "5%".to_owned(), samples: 40 };
    for (pods, silent, taken_back) in [(2, 1, true), (3, 2, true), (3, 1, false), (5, 3, false)] {
        let mut scene = Scene::baked_by(&FIVE[..pods]);
        FIVE[1..=silent].iter().for_each(|pod| scene.pod(pod, |report| report.too_few_requests = true));
        assert_eq!(scene.step(), None, "nothing passed a limit");
        scene.pod("a", |report| report.breach = Some(breach.clone()));
        let step = scene.step();
        assert_eq!(matches!(step, Some(Transition::RollingBack { .. })), taken_back, "{silent} of {pods}: {step:?}");
    }
    // That its worker dies in one of them is another matter: those that were asked nothing have one that lives.
    let mut scene = Scene::baked_by(&FIVE[..2]);
    scene.pod("a", |report| report.health = ReplicaHealth::Failed);
    scene.pod("b", |report| report.too_few_requests = true);
    assert_eq!(scene.step(), None);
}

#[test]
fn what_passed_its_limit_before_the_switch_is_no_matter_of_the_new_version() {
    let mut scene = Scene::baking();
    let breach =
        BreachStatus { signal: "errorRate".to_owned(), value: "12%".to_owned(), limit: "5%".to_owned(), samples: 40 };
    scene.all(|report| (report.breach, report.attempt) = (Some(breach.clone()), Some(1)));
    assert_eq!(scene.step(), None);
}

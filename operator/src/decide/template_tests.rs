#![allow(clippy::unwrap_used)]
//! Who judges while pods of an older template are replaced: `a` to `c` are old, `n1` to `n3` come for them.

use gantry_crds::status::{GateName, GateResult, GateVerdict, ReplicaHealth};

use super::{
    tests::{SWITCH_SECONDS, Scene, name, refused, spec},
    *,
};

const OLD: [&str; 3] = ["a", "b", "c"];

/// Pods serve model 1, and are replaced by others, which are to judge model 2.
fn replaced(old: &[&'static str]) -> Scene {
    let mut scene = Scene::served_by(old);
    scene.replicas = i32::try_from(old.len()).unwrap();
    scene.outdated = old.to_vec();
    scene.spec = Some(spec(2));
    assert!(matches!(scene.step(), Some(Transition::Started { .. })));
    scene
}

/// A pod comes, and answers with the active version if it `answers` at all.
fn comes(scene: &mut Scene, pod: &'static str, answers: bool) {
    scene.counted.push(pod);
    scene.pod(pod, |report| report.version = answers.then(|| name(1)));
}

fn goes(scene: &mut Scene, pod: &str) {
    scene.counted.retain(|other| *other != pod);
}

fn refuses(scene: &mut Scene, pod: &str, gate: GateName) {
    let result = GateResult { name: gate, verdict: GateVerdict::Fail, value: None, message: Some("no".to_owned()) };
    scene.pod(pod, |report| {
        report.candidate = Some(CandidateStatus { gates: vec![result.clone()], ..refused(&name(2)) });
    });
}

#[test]
fn the_pods_that_do_not_come_say_why() {
    let mut scene = replaced(&OLD);
    scene.missing_pod = Some("pod n1 finds no node: 1 Insufficient cpu");
    assert_eq!(scene.step(), None);
    assert_eq!(
        scene.state.rollout.as_ref().unwrap().message.as_deref(),
        Some(
            "3 older pods are replaced first: the spec asks for other resources or nodes than they have; pod n1 finds no node: 1 \
             Insufficient cpu"
        )
    );
    scene.counted.clear();
    assert_eq!(scene.step(), None);
    let message = scene.state.rollout.unwrap().message.unwrap();
    assert_eq!(message, "waits for a running pod: pod n1 finds no node: 1 Insufficient cpu");
}

#[test]
fn one_new_pod_does_not_refuse_for_those_that_are_to_come() {
    for gate in [GateName::Memory, GateName::Load, GateName::Fetch] {
        for answers in [true, false] {
            let mut scene = replaced(&OLD);
            comes(&mut scene, "n1", answers);
            refuses(&mut scene, "n1", gate);
            assert_eq!(scene.step(), None, "{gate:?}: one of three");
            goes(&mut scene, "a");
            comes(&mut scene, "n2", answers);
            assert_eq!(scene.step(), None);
            refuses(&mut scene, "n2", gate);
            assert!(matches!(scene.step(), Some(Transition::Rejected { .. })), "{gate:?}: two of three");
        }
    }
}

/// A pod that has come for an older one and answers nobody yet has no voice, and will have one.
#[test]
fn one_new_pod_does_not_refuse_for_one_that_has_come_and_says_nothing_yet() {
    let mut scene = replaced(&["a", "b"]);
    goes(&mut scene, "a");
    comes(&mut scene, "n1", true);
    comes(&mut scene, "n2", false);
    refuses(&mut scene, "n1", GateName::Fetch);
    assert_eq!(scene.step(), None, "one of two");
    scene.pod("n2", |report| report.version = Some(name(1)));
    refuses(&mut scene, "n2", GateName::Fetch);
    assert!(matches!(scene.step(), Some(Transition::Rejected { .. })), "two of two");
    // Where nobody is replaced any more, who answers nobody holds nobody up.
    let mut scene = replaced(&["a", "b"]);
    goes(&mut scene, "a");
    goes(&mut scene, "b");
    comes(&mut scene, "n1", true);
    comes(&mut scene, "n2", false);
    refuses(&mut scene, "n1", GateName::Fetch);
    assert!(matches!(scene.step(), Some(Transition::Rejected { .. })), "the one that answers");
}

#[test]
fn a_new_pod_that_refuses_alone_is_believed_when_the_time_is_up() {
    let mut scene = replaced(&OLD);
    comes(&mut scene, "n1", false);
    refuses(&mut scene, "n1", GateName::Memory);
    scene.step();
    scene.now += 900;
    let Some(Transition::Rejected { gate, message, .. }) = scene.step() else { panic!("{:?}", scene.state) };
    assert_eq!(gate, GateName::Memory);
    assert!(message.starts_with("1 of 3 pods refused it: Memory gate on pod n1: no"), "{message}");
}

#[test]
fn in_a_fleet_of_one_the_word_of_its_successor_is_the_verdict() {
    for answers in [true, false] {
        let mut scene = replaced(&["a"]);
        comes(&mut scene, "n1", answers);
        refuses(&mut scene, "n1", GateName::Load);
        assert!(matches!(scene.step(), Some(Transition::Rejected { .. })), "{answers}");
    }
}

#[test]
fn one_new_pod_that_answers_with_nothing_else_suffices_for_the_switch() {
    let mut scene = replaced(&OLD);
    goes(&mut scene, "a");
    comes(&mut scene, "n1", true);
    comes(&mut scene, "n2", false);
    scene.pod("n1", |report| report.prepared = Some(name(2)));
    assert_eq!(scene.step(), None, "n2 is at it");
    scene.pod("n2", |report| report.prepared = Some(name(2)));
    assert!(matches!(scene.step(), Some(Transition::Committed { .. })), "b and c wait for n2 to be ready");
    // Those that answer with the active version are ready: the next ones follow them.
    let mut scene = replaced(&OLD);
    comes(&mut scene, "n1", true);
    scene.pod("n1", |report| report.prepared = Some(name(2)));
    assert_eq!(scene.step(), None);
}

#[test]
fn while_older_pods_answer_more_than_half_of_the_new_ones_must_have_prepared() {
    let mut scene = replaced(&OLD);
    comes(&mut scene, "n1", false);
    comes(&mut scene, "n2", false);
    scene.pod("n1", |report| report.prepared = Some(name(2)));
    assert_eq!(scene.step(), None);
    scene.now += 900;
    let step = scene.step();
    assert!(matches!(step, Some(Transition::Rejected { gate: GateName::Deadline, .. })), "{step:?}");
}

#[test]
fn an_older_pod_that_stays_does_not_refuse_what_the_majority_prepared() {
    let mut scene = replaced(&OLD);
    for (old, new) in [("a", "n1"), ("b", "n2")] {
        goes(&mut scene, old);
        comes(&mut scene, new, true);
        scene.pod(new, |report| report.prepared = Some(name(2)));
    }
    assert_eq!(scene.step(), None, "c has the time of a rollout to be replaced");
    scene.now += 3600;
    let step = scene.step();
    assert!(matches!(step, Some(Transition::Committed { .. })), "{step:?}");
}

/// The first new pod answers with nothing else, so that it suffices for the switch, and the others answer with model 1.
fn committed_by_the_first() -> Scene {
    let mut scene = replaced(&OLD);
    comes(&mut scene, "n1", false);
    scene.pod("n1", |report| report.prepared = Some(name(2)));
    assert!(matches!(scene.step(), Some(Transition::Committed { .. })));
    scene
}

fn answers(scene: &mut Scene, pod: &str, health: ReplicaHealth) {
    scene.pod(pod, |report| {
        (report.version, report.prepared, report.health) = (Some(name(2)), None, health);
        report.message = Some("the worker keeps dying".to_owned());
    });
}

#[test]
fn the_first_new_pod_whose_worker_dies_does_not_take_back_for_those_that_are_to_come() {
    let mut scene = committed_by_the_first();
    answers(&mut scene, "n1", ReplicaHealth::Failed);
    scene.now += 2 * SWITCH_SECONDS;
    assert_eq!(scene.step(), None, "two more will come, and the older ones answer");
    goes(&mut scene, "a");
    comes(&mut scene, "n2", false);
    answers(&mut scene, "n2", ReplicaHealth::Healthy);
    assert_eq!(scene.step(), Some(Transition::Baking { version: name(2) }), "it works in the second");
    assert_eq!(scene.step(), None);
    answers(&mut scene, "n2", ReplicaHealth::Failed);
    assert!(matches!(scene.step(), Some(Transition::RollingBack { .. })), "two of three");
}

#[test]
fn where_nobody_comes_for_the_older_pods_the_first_ones_word_is_the_verdict_in_the_end() {
    let mut scene = committed_by_the_first();
    answers(&mut scene, "n1", ReplicaHealth::Failed);
    scene.now += 2 * SWITCH_SECONDS;
    assert_eq!(scene.step(), None);
    scene.now += 900;
    let Some(Transition::RollingBack { message, .. }) = scene.step() else { panic!("{:?}", scene.state) };
    assert!(message.contains("the worker keeps dying"), "{message}");
}

#[test]
fn where_no_older_pod_answers_what_is_to_come_is_not_waited_for() {
    let mut scene = committed_by_the_first();
    scene.cut_off.extend(OLD);
    answers(&mut scene, "n1", ReplicaHealth::Failed);
    assert!(matches!(scene.step(), Some(Transition::RollingBack { .. })));
}

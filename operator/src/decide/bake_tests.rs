#![allow(clippy::unwrap_used)]
//! Edits while a version bakes: model 2 answers, model 1 is the way back, and the user asks for model 3.

use gantry_crds::status::{BakeStatus, ReplicaHealth};
use serde_json::json;

use super::{
    tests::{Scene, name, refused, spec, spec_with},
    *,
};

/// Model 3 is prepared while model 2 bakes.
fn edited() -> Scene {
    let mut scene = Scene::baking();
    scene.all(|report| report.resident = Some(name(1)));
    scene.spec = Some(spec(3));
    assert!(matches!(scene.step(), Some(Transition::Started { instead_of: None, .. })));
    scene
}

fn bake(scene: &Scene) -> Option<BakeStatus> {
    scene.state.rollout.as_ref().and_then(|rollout| rollout.bake.clone())
}

fn named(scene: &Scene) -> Vec<String> {
    scene.state.versions.iter().map(|version| version.name.clone()).collect()
}

fn names(models: &[u8]) -> Vec<String> {
    let mut names: Vec<_> = models.iter().map(|model| name(*model)).collect();
    names.sort_unstable();
    names
}

#[test]
fn an_edit_keeps_the_way_back_and_the_bake() {
    let before = Scene::baking().state.rollout.unwrap();
    let scene = edited();
    assert_eq!((scene.state.active.clone(), scene.state.previous.clone()), (Some(name(2)), Some(name(1))));
    let bake = bake(&scene).unwrap();
    assert_eq!((bake.to.clone(), bake.attempt, bake.deadline.clone()), (name(1), 2, before.deadline));
    assert_eq!(named(&scene), names(&[1, 2, 3]));
    assert_eq!(scene.plan().wake_at, Some(bake.deadline.0), "the bake ends before the candidate's time is up");
}

#[test]
fn when_the_candidate_is_refused_the_bake_goes_on() {
    let mut scene = edited();
    let bake = bake(&scene).unwrap();
    scene.all(|report| report.candidate = Some(refused(&name(3))));
    assert!(matches!(scene.step(), Some(Transition::Rejected { .. })));
    let rollout = scene.state.rollout.clone().unwrap();
    assert_eq!((rollout.step, rollout.version.clone(), rollout.attempt), (RolloutStep::Bake, name(2), 2));
    assert_eq!((rollout.started_at, rollout.deadline, rollout.judged), (bake.started_at, bake.deadline, bake.judged));
    assert_eq!((scene.state.candidate.clone(), scene.state.previous.clone()), (None, Some(name(1))));
    assert_eq!(named(&scene), names(&[1, 2]));
    assert_eq!(scene.step(), None, "what was refused is not tried again");
    // And it still takes the version back that bakes.
    let mut failing = edited();
    failing.all(|report| report.candidate = Some(refused(&name(3))));
    failing.step();
    failing.all(|report| report.health = ReplicaHealth::Failed);
    assert!(matches!(failing.step(), Some(Transition::RollingBack { to, .. }) if to == name(1)));
    scene.now += 600;
    assert_eq!(scene.step(), Some(Transition::Settled { version: name(2) }));
    assert_eq!((scene.state.previous.as_ref(), scene.state.rejected.is_some()), (None, true));
    scene.settled();
}

#[test]
fn when_the_candidate_is_no_longer_asked_for_the_bake_goes_on() {
    for asked in [Some(spec(2)), None] {
        let mut scene = edited();
        scene.spec = asked;
        assert!(matches!(scene.step(), Some(Transition::Cancelled { .. })));
        assert_eq!((scene.step_now(), scene.state.previous.clone()), (Some(RolloutStep::Bake), Some(name(1))));
        assert_eq!(scene.step(), None);
    }
}

#[test]
fn going_back_to_what_bakes_lifts_the_latch() {
    let mut scene = edited();
    scene.all(|report| report.candidate = Some(refused(&name(3))));
    scene.step();
    scene.spec = Some(spec(2));
    assert_eq!(scene.step(), None);
    assert_eq!((scene.step_now(), scene.state.rejected.as_ref()), (Some(RolloutStep::Bake), None));
}

#[test]
fn a_failure_of_what_bakes_goes_back_while_a_candidate_is_prepared() {
    let mut scene = edited();
    scene.all(|report| report.health = ReplicaHealth::Failed);
    let Some(Transition::RollingBack { version, to, .. }) = scene.step() else { panic!("{:?}", scene.state) };
    assert_eq!((version, to), (name(2), name(1)));
    let rollout = scene.state.rollout.clone().unwrap();
    assert_eq!((rollout.step, rollout.attempt, scene.state.candidate.clone()), (RolloutStep::Rollback, 2, None));
    assert_eq!(rollout.deadline.0, after(rollout.started_at.0, SWITCH_TIMEOUT), "it is loaded");
    assert_eq!(scene.state.rejected.as_ref().unwrap().version, name(2));
    scene.all(|report| (report.version, report.health) = (Some(name(1)), ReplicaHealth::Healthy));
    assert_eq!(scene.step(), Some(Transition::RolledBack { version: name(2) }));
    assert!(
        matches!(scene.step(), Some(Transition::Started { version, .. }) if version == name(3)),
        "it is still asked for"
    );
}

#[test]
fn one_pod_that_has_unloaded_the_way_back_gets_the_time_to_load_it() {
    let mut scene = edited();
    scene.pod("b", |report| report.resident = None);
    scene.pod("a", |report| report.health = ReplicaHealth::Failed);
    assert_eq!(scene.step(), None, "b works");
    scene.pod("b", |report| report.health = ReplicaHealth::Failed);
    scene.cut_off.clear();
    scene.step();
    assert_eq!(scene.step_now(), Some(RolloutStep::Rollback));
}

/// A pod that fell silent says for ever what it said last.
#[test]
fn a_bake_goes_on_beyond_its_time_while_no_pod_answers() {
    let mut scene = Scene::baking();
    scene.cut_off = vec!["a", "b"];
    scene.missing_pod = Some("pod a is not heard of any more");
    scene.now += 6000;
    assert_eq!(scene.step(), None);
    let message = scene.state.rollout.clone().unwrap().message.unwrap();
    assert!(
        message.contains("no pod answers with it") && message.ends_with("pod a is not heard of any more"),
        "{message}"
    );
    assert_eq!((scene.step(), scene.state.previous.clone()), (None, Some(name(1))), "the way back stays");
    scene.cut_off = vec!["a"];
    assert_eq!(scene.step(), Some(Transition::Settled { version: name(2) }));
    // Where there are to be no pods nobody is waited for.
    let mut none = Scene::baking();
    (none.cut_off, none.replicas) = (vec!["a", "b"], 0);
    none.now += 6000;
    assert_eq!(none.step(), Some(Transition::Settled { version: name(2) }));
}

#[test]
fn the_way_back_is_let_go_when_the_bake_is_over() {
    let mut scene = edited();
    scene.now += 600;
    assert_eq!(scene.step(), None);
    assert_eq!((bake(&scene), scene.state.previous.as_ref()), (None, None));
    assert_eq!(named(&scene), names(&[2, 3]));
    scene.all(|report| report.health = ReplicaHealth::Failed);
    assert_eq!(scene.step(), None, "there is nothing to go back to, and the candidate may be the cure");
    scene.all(|report| report.candidate = Some(refused(&name(3))));
    scene.step();
    assert_eq!(scene.step_now(), None);
}

#[test]
fn one_edit_after_the_other_keeps_the_bake_and_names_no_more_versions() {
    let mut scene = edited();
    let first = bake(&scene);
    for model in [4, 5, 6] {
        scene.spec = Some(spec(model));
        assert!(matches!(scene.step(), Some(Transition::Started { instead_of: Some(_), .. })));
        assert_eq!(bake(&scene), first);
        assert_eq!(named(&scene), names(&[1, 2, model]));
    }
    scene.all(|report| report.prepared = Some(name(6)));
    assert_eq!(scene.step(), Some(Transition::Committed { version: name(6) }));
    assert_eq!(
        (scene.state.previous.clone(), bake(&scene)),
        (Some(name(2)), None),
        "what is proved is the new way back"
    );
    assert_eq!(named(&scene), names(&[2, 6]));
}

#[test]
fn a_way_back_that_is_not_kept_loaded_is_kept_by_name() {
    let mut scene = Scene::served_by(&["a", "b"]);
    let lean = json!({"rollback": {"keepResident": false}});
    scene.spec = Some(spec_with(2, lean.clone()));
    scene.step();
    scene.all(|report| report.prepared = Some(name(2)));
    scene.step();
    scene.all(|report| (report.version, report.prepared) = (Some(name(2)), None));
    scene.step();
    scene.spec = Some(spec_with(3, lean));
    scene.step();
    assert_eq!((scene.state.previous.as_ref(), named(&scene)), (None, names(&[1, 2, 3])));
    scene.all(|report| report.health = ReplicaHealth::Failed);
    assert!(matches!(scene.step(), Some(Transition::RollingBack { to, .. }) if to == name(1)));
}

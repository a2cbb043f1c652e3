//! Tests of [`super::quarantine`].
#![allow(clippy::unwrap_used)]

use gantry_crds::status::{GateName, RejectedOutcome, ReplicaHealth, RolloutStep};

use super::{
    tests::{Scene, name, spec},
    transition::Transition,
};

/// Of three pods that answer with model 2 the worker of two dies, so that it is taken back: `a` and `b` have model 1 loaded, and `c`,
/// which came later, has not.
fn going_back() -> Scene {
    let mut scene = Scene::baked_by(&["a", "b", "c"]);
    scene.replicas = 3;
    for pod in ["a", "b"] {
        scene.pod(pod, |report| (report.health, report.resident) = (ReplicaHealth::Failed, Some(name(1))));
    }
    assert!(matches!(scene.step(), Some(Transition::RollingBack { to, .. }) if to == name(1)));
    scene
}

fn answers_with(scene: &mut Scene, pod: &str, model: u8) {
    scene.pod(pod, |report| (report.version, report.health) = (Some(name(model)), ReplicaHealth::Healthy));
}

#[test]
fn who_answers_with_what_was_taken_back_gets_no_requests_where_as_many_others_answer() {
    let mut scene = going_back();
    assert_eq!(scene.state.quarantined, [""; 0], "a and b go back in a moment, and until then nobody else answers");
    answers_with(&mut scene, "a", 1);
    scene.step();
    assert_eq!(scene.state.quarantined, [""; 0], "one of three is too few for the requests of all");
    answers_with(&mut scene, "b", 1);
    scene.step();
    assert_eq!(scene.step_now(), Some(RolloutStep::Rollback));
    assert_eq!(scene.state.quarantined, ["c"], "it has to load it first, and its source may be gone");
    // Without requests it is the same pod.
    scene.cut_off = vec!["c"];
    scene.now += 3600;
    assert_eq!(scene.step(), Some(Transition::RolledBack { version: name(2) }));
    scene.step();
    assert_eq!(scene.state.quarantined, ["c"]);
    // And it answers again where the others do not.
    scene.cut_off = vec!["a", "b", "c"];
    scene.step();
    assert_eq!(scene.state.quarantined, [""; 0]);
    scene.cut_off = vec!["c"];
    scene.step();
    assert_eq!(scene.state.quarantined, ["c"]);
    answers_with(&mut scene, "c", 1);
    scene.step();
    assert_eq!(scene.state.quarantined, [""; 0]);
}

#[test]
fn who_has_the_way_back_loaded_goes_back_by_itself() {
    let mut scene = Scene::baking();
    scene.all(|report| (report.health, report.resident) = (ReplicaHealth::Failed, Some(name(1))));
    assert!(matches!(scene.step(), Some(Transition::RollingBack { .. })));
    answers_with(&mut scene, "a", 1);
    answers_with(&mut scene, "b", 2);
    scene.step();
    assert_eq!((scene.step_now(), scene.state.quarantined.len()), (Some(RolloutStep::Rollback), 0));
    scene.pod("b", |report| report.resident = None);
    scene.step();
    assert_eq!(scene.state.quarantined, ["b"]);
}

#[test]
fn a_verdict_about_room_or_time_is_none_about_what_answers() {
    for (gate, quarantined) in [(GateName::Prompts, 1), (GateName::Deadline, 0), (GateName::Memory, 0)] {
        let mut scene = going_back();
        for pod in ["a", "b"] {
            answers_with(&mut scene, pod, 1);
        }
        scene.now += 3600;
        scene.step();
        let rejected = scene.state.rejected.as_mut().unwrap();
        (rejected.outcome, rejected.gate) = (RejectedOutcome::Rejected, gate);
        scene.step();
        assert_eq!(scene.state.quarantined.len(), quarantined, "{gate:?}");
    }
}

#[test]
fn an_edit_does_not_have_it_answer_again() {
    let mut scene = going_back();
    for pod in ["a", "b"] {
        answers_with(&mut scene, pod, 1);
    }
    scene.step();
    scene.now += 3600;
    scene.step();
    scene.refuse(&name(2));
    scene.spec = Some(spec(3));
    assert!(matches!(scene.step(), Some(Transition::Started { .. })));
    assert_eq!(scene.state.quarantined, ["c"]);
    // Nor does it when nothing of it would be kept.
    scene.spec.as_mut().unwrap().history_limit = 0;
    for _ in 0..3 {
        scene.step();
    }
    assert_eq!(scene.state.quarantined, ["c"]);
}

#[test]
fn an_older_version_that_was_never_refused_answers_on() {
    let mut scene = Scene::committed();
    answers_with(&mut scene, "a", 2);
    scene.step();
    assert_eq!(scene.state.quarantined, [""; 0]);
}

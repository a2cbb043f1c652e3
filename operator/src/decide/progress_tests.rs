#![allow(clippy::unwrap_used)]
//! What counts as progress, and when the time is up.

use gantry_crds::status::{CandidatePhase, GateName, RolloutProgress};

use super::{
    fleet_tests::{at, prepare, preparing},
    tests::{START, Scene, name, spec},
    *,
};

fn fetches(scene: &mut Scene, pod: &str, mib: i64) {
    scene.pod(pod, |report| report.candidate = Some(at(CandidatePhase::Fetching, mib << 20)));
}

fn progress(scene: &Scene) -> RolloutProgress {
    scene.state.rollout.as_ref().unwrap().progress.clone().unwrap()
}

/// The message of the rejection that the next step has to be, by the deadline.
fn times_out(scene: &mut Scene) -> String {
    match scene.step() {
        Some(Transition::Rejected { gate: GateName::Deadline, message, .. }) => message,
        other => panic!("{other:?} {:#?}", scene.state.rollout),
    }
}

#[test]
fn the_deadline_counts_from_the_last_progress() {
    let mut scene = preparing(&["a", "b"]);
    for mib in 1..=3 {
        scene.now += 800;
        scene.pod("a", |report| report.candidate = Some(at(CandidatePhase::Fetching, mib << 20)));
        assert_eq!(scene.step(), None, "{mib}");
    }
    scene.now += 898;
    assert_eq!(scene.step(), None);
    assert!(matches!(scene.step(), Some(Transition::Rejected { gate: GateName::Deadline, .. })));
}

#[test]
fn what_is_loaded_and_answered_is_progress_as_well() {
    for (phase, told) in [(CandidatePhase::Loading, "loaded"), (CandidatePhase::Testing, "prompts")] {
        let mut scene = preparing(&["a", "b"]);
        let done = |scene: &mut Scene, permille: i64| {
            let mut candidate = at(phase, 100 << 20);
            let progress = candidate.progress.as_mut().unwrap();
            (progress.done_permille, progress.summary) = (Some(permille), Some(format!("{permille} {told}")));
            scene.pod("a", |report| report.candidate = Some(candidate.clone()));
        };
        // As many golden prompts as there may be, or weights from a slow disk, take longer than one deadline.
        for permille in 1..=3 {
            scene.now += 800;
            done(&mut scene, permille);
            assert_eq!(scene.step(), None, "{phase:?} {permille}");
        }
        let before = scene.state.clone();
        done(&mut scene, 3);
        scene.step();
        assert_eq!(scene.state, before, "a figure is no news to the fleet");
        scene.now += 900;
        let message = times_out(&mut scene);
        assert!(message.contains(&format!("a is {} (3 {told})", phase.as_str())), "{message}");
    }
}

#[test]
fn progress_extends_a_rollout_to_a_bound() {
    let mut scene = preparing(&["a", "b"]);
    let started = scene.now;
    for mib in 1.. {
        scene.now += 600;
        scene.pod("a", |report| report.candidate = Some(at(CandidatePhase::Fetching, mib << 20)));
        if scene.step().is_some() {
            break;
        }
    }
    assert_eq!(scene.step_now(), None);
    assert!((4 * 900..4 * 900 + 602).contains(&(scene.now - started)), "{}", scene.now - started);
}

#[test]
fn new_pods_neither_eat_into_a_deadline_nor_extend_it() {
    const NEW: [&str; 12] = ["n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8", "n9", "n10", "n11", "n12"];
    let mut scene = preparing(&["a"]);
    for new in NEW {
        // An autoscaler takes the last one away and brings another, which begins with the candidate.
        scene.counted = vec!["a", new];
        scene.pod(new, |report| report.candidate = Some(at(CandidatePhase::Fetching, 1 << 20)));
        scene.now += 74;
        assert_eq!(scene.step(), None);
    }
    scene.now += 100;
    assert!(matches!(scene.step(), Some(Transition::Rejected { gate: GateName::Deadline, .. })), "a made no progress");
}

#[test]
fn progress_is_noted_seldom_and_missed_never() {
    let mut scene = preparing(&["a"]);
    let mut notes = Vec::new();
    for mib in 1..=300 {
        scene.now += 1;
        scene.pod("a", |report| report.candidate = Some(at(CandidatePhase::Fetching, mib << 20)));
        scene.step();
        notes.push(scene.state.rollout.as_ref().unwrap().progress.as_ref().unwrap().at.clone());
    }
    notes.dedup();
    assert!(notes.len() <= 300 * 2 / 45 + 1, "{} notes in ten minutes", notes.len());
    // What was made after the last note is noted when its time has come.
    let due = scene.plan().wake_at.unwrap();
    let rollout = scene.state.rollout.clone().unwrap();
    assert!(due < rollout.deadline.0, "{due} {}", rollout.deadline.0);
    scene.now = due.as_second() - START;
    assert_eq!(scene.step(), None);
    assert!(scene.state.rollout.as_ref().unwrap().deadline.0 > rollout.deadline.0);
}

#[test]
fn a_pod_that_is_lost_hides_no_progress_of_another() {
    let mut scene = preparing(&["a", "b"]);
    fetches(&mut scene, "a", 500);
    fetches(&mut scene, "b", 600);
    scene.now += 600;
    assert_eq!(scene.step(), None);
    scene.counted = vec!["a"];
    for mib in 501..=502 {
        scene.now += 600;
        fetches(&mut scene, "a", mib);
        assert_eq!(scene.step(), None, "a got on: {mib} MiB");
    }
    let figures = progress(&scene).pods.into_iter().map(|one| (one.pod, one.figure % 1000)).collect::<Vec<_>>();
    assert_eq!(figures, [("a".to_owned(), 502), ("b".to_owned(), 600)], "the place of b is kept");
    scene.counted.push("new");
    fetches(&mut scene, "new", 599);
    scene.now += 899;
    assert!(times_out(&mut scene).contains("none got on for 900s"), "the new one repeats what b had done");
}

#[test]
fn a_lost_only_pod_forgets_neither_the_whole_time_nor_leaves_its_successor_without_any() {
    let mut scene = preparing(&["a"]);
    let (mut with_pods, mut without) = (0, 0);
    loop {
        fetches(&mut scene, "a", 100);
        scene.now += 700;
        with_pods += 701;
        if scene.step().is_some() {
            break;
        }
        // The pod dies, and another one comes half an hour later.
        scene.counted.clear();
        assert_eq!(scene.step(), None);
        with_pods += 1;
        scene.now += 1800;
        without += 1802;
        assert_eq!(scene.step(), None, "time without a pod does not count");
        scene.counted = vec!["a"];
        scene.pod("a", |report| report.candidate = None);
        assert_eq!(scene.step(), None);
        assert_eq!(
            scene.state.rollout.as_ref().unwrap().deadline.0.as_second() - START - scene.now,
            900.min(3600 - with_pods)
        );
        assert!(with_pods < 5000, "it never ends");
    }
    assert!(with_pods >= 3600 && without > 3600, "{with_pods} {without}");
}

#[test]
fn the_end_of_the_whole_time_is_told_as_that() {
    let mut scene = preparing(&["a", "b"]);
    prepare(&mut scene, &["b"]);
    for mib in 1.. {
        scene.now += 600;
        fetches(&mut scene, "a", mib);
        if progress(&scene).since.0.as_second() + 3600 <= START + scene.now + 1 {
            break;
        }
        assert_eq!(scene.step(), None);
    }
    let message = times_out(&mut scene);
    let wanted = "1 of 2 pods prepared, not all within 3600s; that is 4 times the deadline, the longest that pods may get on; a is \
                  Fetching; correct that, or raise spec.rollout.progressDeadline";
    assert!(message.starts_with(wanted), "{message}");
}

#[test]
fn each_pod_that_comes_for_an_older_one_has_the_time_of_the_first() {
    const OLD: [&str; 5] = ["a", "b", "c", "d", "e"];
    const NEW: [&str; 5] = ["n1", "n2", "n3", "n4", "n5"];
    let mut scene = Scene::served_by(&OLD);
    (scene.replicas, scene.outdated, scene.spec) = (5, OLD.to_vec(), Some(spec(2)));
    scene.step();
    let started = scene.now;
    for (old, new) in OLD.into_iter().zip(NEW) {
        // A node for it takes half an hour to come, and it is prepared a while after that.
        scene.counted.push(new);
        scene.pod(new, |report| report.version = Some(name(1)));
        assert_eq!(scene.step(), None, "{new}");
        scene.now += 600;
        fetches(&mut scene, new, 1);
        assert_eq!(scene.step(), None, "{new}");
        scene.now += 890;
        prepare(&mut scene, &[new]);
        let last = new == "n5" && scene.counted.len() == 6;
        assert_eq!(scene.step(), None, "{new}");
        scene.counted.retain(|pod| *pod != old);
        scene.now += if last { 0 } else { 300 };
    }
    assert!(scene.now - started > 2 * 3600);
    assert!(matches!(scene.step(), Some(Transition::Committed { .. })));
    // But each only once, and one that stands still ends it.
    let mut scene = Scene::served_by(&OLD);
    (scene.replicas, scene.outdated, scene.spec) = (5, OLD.to_vec(), Some(spec(2)));
    scene.step();
    for (index, new) in NEW.into_iter().cycle().enumerate() {
        scene.counted.retain(|pod| OLD.contains(pod));
        scene.counted.push(new);
        scene.pod(new, |report| (report.version, report.candidate) = (Some(name(1)), None));
        scene.now += 400;
        if scene.step().is_some() {
            break;
        }
        assert!(index < 20, "it never ends");
    }
}

#[test]
fn what_an_operator_of_before_noted_of_the_fleet_is_no_measure_for_a_pod() {
    let mut scene = preparing(&["a", "b"]);
    fetches(&mut scene, "a", 100);
    scene.step();
    let noted = scene.state.rollout.as_mut().unwrap().progress.as_mut().unwrap();
    (noted.figure, noted.pods) = (1_000_000_000, Vec::new());
    scene.now += 60;
    scene.step();
    scene.now += 800;
    fetches(&mut scene, "a", 101);
    assert_eq!(scene.step(), None);
    scene.now += 800;
    assert_eq!(scene.step(), None, "a got on");
}

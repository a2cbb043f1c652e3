//! One version for the other, in single situations; random lives are in the tests of the plan.

#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use gantry_crds::status::{CandidatePhase, GateName, ModelState};

use crate::desired::Desired;
use crate::limits::RETRY_IN_VAIN;
use crate::plan::Known;
use crate::plan::tests::{current, desired, holding, known, planned};
use crate::{Lines, Outcome, Phase, Refusal, Versions, WorkerHealth};

/// Version 1 is active, and version 2 is to replace it.
fn asked(has_turn: bool) -> Desired {
    holding(has_turn, desired(Some("v1"), Some(("v2", 1)), None))
}

#[test]
fn nothing_goes_before_its_turn_and_before_the_other_is_checked() {
    use Phase::{Checked, Preparing, Ready, Refused, Retiring};
    let serving = ("v1", known(Ready, None));
    let in_vain = Known { in_vain: true, retry_due: true, ..known(Refused, None) };
    type Case<'a> = (&'a str, Desired, &'a [(&'a str, Known)], &'a [&'a str]);
    let waits = Known { waits: true, ..known(Preparing, Some(1)) };
    let asked_once_more = Known { waits: true, ..known(Phase::Checking, Some(2)) };
    let cases: [Case<'_>; 11] = [
        (
            "as is what answers and was to be asked once more",
            holding(false, desired(Some("v1"), None, None)),
            &[("v1", asked_once_more)],
            &["cancel v1"],
        ),
        (
            "what is active by now, and waits for what candidates are judged by, is begun with anew",
            holding(false, desired(Some("v2"), None, Some("v1"))),
            &[serving.clone(), ("v2", waits)],
            &["cancel v2"],
        ),
        ("every pod checks it", asked(false), std::slice::from_ref(&serving), &["check v2"]),
        ("and waits", asked(false), &[serving.clone(), ("v2", known(Checked, Some(1)))], &[]),
        ("it is its turn, and not checked", asked(true), &[serving.clone(), ("v2", known(Preparing, Some(1)))], &[]),
        (
            "it was checked for another attempt",
            asked(true),
            &[serving.clone(), ("v2", known(Checked, Some(0)))],
            &["check v2"],
        ),
        ("it is its turn", asked(true), &[serving.clone(), ("v2", known(Checked, Some(1)))], &["hold v1", "retire v1"]),
        (
            "another one is unloaded",
            asked(true),
            &[serving.clone(), ("v2", known(Checked, Some(1))), ("v3", known(Retiring, None))],
            &[],
        ),
        ("it was refused here", asked(true), &[serving.clone(), ("v2", known(Refused, Some(1)))], &[]),
        (
            "what is active is checked before what answers goes for it",
            holding(false, desired(Some("v2"), None, Some("v1"))),
            std::slice::from_ref(&serving),
            &["check v2"],
        ),
        (
            "and that is not unloaded in vain again and again",
            holding(false, desired(Some("v2"), None, Some("v1"))),
            &[serving.clone(), ("v2", in_vain)],
            &[],
        ),
    ];
    for (what, desired, versions, plan) in cases {
        assert_eq!(planned(&desired, &current(Some("v1"), None, versions)), plan, "{what}");
    }
}

/// A pod with its own clock that serves version 1.
struct Pod {
    versions: Versions,
    lines: Lines,
    now: Instant,
}

impl Pod {
    fn serving() -> Self {
        let mut pod = Self { versions: Versions::default(), lines: Lines::new(), now: Instant::now() };
        let rest = desired(Some("v1"), None, None);
        pod.settle(&rest);
        pod.ends("v1", Outcome::Passed);
        pod.settle(&rest);
        assert_eq!(pod.says(&rest), (Some("v1".to_owned()), ModelState::Ready));
        pod
    }

    fn settle(&mut self, desired: &Desired) {
        let _ = self.versions.settle(desired, self.now, &mut self.lines);
    }

    fn ends(&mut self, version: &str, outcome: Outcome) {
        assert!(self.versions.ended(version, outcome, self.now, &mut self.lines), "{version} had no gates");
    }

    /// What it answers with, and its state.
    fn says(&self, desired: &Desired) -> (Option<String>, ModelState) {
        let snapshot = self.versions.snapshot(Some(desired), &self.lines, self.now);
        (snapshot.serving, snapshot.state)
    }

    fn phase(&self, version: &str) -> Option<Phase> {
        self.versions.get(version).map(|entry| entry.phase)
    }

    /// The other version is checked, and what answers has gone for it.
    fn goes_for(&mut self, other: &str, desired: &Desired) {
        self.settle(desired);
        self.ends(other, Outcome::Checked);
        let answers = self.versions.route().active.clone().unwrap();
        self.settle(desired);
        assert!(self.versions.retired(&answers, &mut self.lines));
        self.settle(desired);
    }

    fn cannot_load(&mut self, version: &str, desired: &Desired) {
        self.ends(version, Outcome::Refused(Refusal::new(GateName::Load, "no")));
        self.settle(desired);
    }

    /// Version 2 is checked, and version 1 has gone for it.
    fn switching() -> Self {
        let (mut pod, asked) = (Self::serving(), asked(true));
        pod.settle(&asked);
        pod.ends("v2", Outcome::Checked);
        pod.settle(&asked);
        assert_eq!((pod.says(&asked), pod.phase("v1")), ((None, ModelState::Switching), Some(Phase::Retiring)));
        assert!(pod.versions.route().is_held());
        assert!(pod.versions.retired("v1", &mut pod.lines));
        pod.settle(&asked);
        assert_eq!((pod.says(&asked), pod.phase("v2")), ((None, ModelState::Loading), Some(Phase::Preparing)));
        pod
    }
}

#[test]
fn who_waits_while_others_answer_yields_whatever_it_answered_with_before() {
    for active in ["v1", "v3"] {
        let mut pod = Pod::serving();
        let asked = Desired { yields: true, ..holding(true, desired(Some(active), Some(("v2", 1)), None)) };
        pod.goes_for("v2", &asked);
        assert!(pod.versions.route().is_held() && pod.versions.yields(&asked), "{active}");
    }
}

#[test]
fn what_has_passed_answers_and_says_that_it_is_prepared() {
    let (mut pod, asked) = (Pod::switching(), asked(true));
    pod.ends("v2", Outcome::Passed);
    pod.settle(&asked);
    let snapshot = pod.versions.snapshot(Some(&asked), &pod.lines, pod.now);
    assert_eq!((snapshot.serving.as_deref(), snapshot.prepared.as_deref()), (Some("v2"), Some("v2")));
    assert_eq!(snapshot.candidate.unwrap().phase, CandidatePhase::Prepared);
    // The turn is another pod's by now.
    pod.settle(&Desired { has_turn: false, ..asked });
    assert_eq!(pod.versions.route().active.as_deref(), Some("v2"));
    let committed = holding(false, desired(Some("v2"), None, Some("v1")));
    assert!(
        pod.versions.plan(&committed, pod.now, &pod.lines).is_empty(),
        "and it stays when that is made the active one"
    );
}

#[test]
fn what_is_refused_goes_and_the_one_before_answers_again() {
    let (mut pod, asked) = (Pod::switching(), asked(true));
    pod.cannot_load("v2", &asked);
    assert_eq!((pod.phase("v2"), pod.phase("v1")), (Some(Phase::Refused), Some(Phase::Preparing)));
    pod.ends("v1", Outcome::Passed);
    pod.settle(&asked);
    assert_eq!(pod.says(&asked), (Some("v1".to_owned()), ModelState::Ready));
    pod.now += Duration::from_secs(3600);
    pod.settle(&asked);
    assert_eq!(pod.phase("v1"), Some(Phase::Ready), "it is not tried again for the same attempt");
}

#[test]
fn a_candidate_whose_worker_fails_once_it_answers_is_refused() {
    let (mut pod, asked) = (Pod::switching(), asked(true));
    pod.ends("v2", Outcome::Passed);
    pod.settle(&asked);
    pod.versions.observe("v2", WorkerHealth::Failed { reason: "it died".to_owned() });
    pod.settle(&asked);
    assert_eq!((pod.phase("v2"), pod.phase("v1")), (Some(Phase::Refused), Some(Phase::Preparing)));
    assert!(pod.versions.route().is_held(), "requests wait for version 1");
}

#[test]
fn a_version_that_could_not_be_loaded_has_what_answers_unloaded_seldom() {
    let mut pod = Pod::serving();
    let asked = holding(false, desired(Some("v2"), None, Some("v1")));
    let tries = |pod: &mut Pod| {
        pod.settle(&asked);
        let begins = pod.phase("v2") == Some(Phase::Preparing);
        if begins {
            pod.goes_for("v2", &asked);
            pod.cannot_load("v2", &asked);
            pod.ends("v1", Outcome::Passed);
            pod.settle(&asked);
        }
        assert_eq!(pod.versions.route().active.as_deref(), Some("v1"), "nobody is left without an answer");
        begins
    };
    assert!(tries(&mut pod));
    pod.now += RETRY_IN_VAIN - Duration::from_secs(1);
    assert!(!tries(&mut pod));
    assert!(pod.versions.next_retry(pod.now).is_some());
    pod.now += Duration::from_secs(1);
    assert!(tries(&mut pod));
}

#[test]
fn a_pod_that_comes_up_has_what_the_status_says_first() {
    let asked = asked(true);
    assert_eq!(planned(&asked, &current(None, None, &[])), ["restore v1"]);
    let refused = [("v1", known(Phase::Refused, None))];
    assert_eq!(planned(&asked, &current(None, None, &refused)), ["try v2 1"], "unless that cannot be had");
    let trying =
        [("v1", Known { retry_due: true, ..known(Phase::Refused, None) }), ("v2", known(Phase::Preparing, Some(1)))];
    assert!(planned(&asked, &current(None, None, &trying)).is_empty(), "which goes on once it has begun");
    // The candidate may be what helps, and gets its turn once it is checked.
    let waits = holding(false, asked);
    assert_eq!(planned(&waits, &current(None, None, &refused)), ["check v2"]);
    let checking = [refused[0].clone(), ("v2", known(Phase::Preparing, Some(1)))];
    assert!(planned(&waits, &current(None, None, &checking)).is_empty());
}

#[test]
fn who_gives_a_candidate_up_goes_back_to_the_active_version() {
    let given_up = holding(false, desired(Some("v1"), None, None));
    let answers = [("v2", known(Phase::Ready, Some(1)))];
    assert_eq!(planned(&given_up, &current(Some("v2"), None, &answers)), ["check v1"]);
    let checked = [answers[0].clone(), ("v1", known(Phase::Checked, None))];
    assert_eq!(planned(&given_up, &current(Some("v2"), None, &checked)), ["hold v2", "retire v2"]);
    // What answers nobody any more is left at once.
    let down = [("v2", Known { worker_up: false, ..known(Phase::Ready, Some(1)) })];
    assert_eq!(planned(&given_up, &current(Some("v2"), None, &down)), ["hold v2", "retire v2"]);
}

#[test]
fn what_was_loaded_before_comes_back_though_the_status_has_forgotten_it() {
    let mut pod = Pod::serving();
    let mut asked = holding(false, desired(Some("v2"), None, None));
    asked.versions.remove("v1");
    pod.goes_for("v2", &asked);
    pod.cannot_load("v2", &asked);
    assert_eq!(pod.phase("v1"), Some(Phase::Preparing));
    pod.ends("v1", Outcome::Passed);
    pod.settle(&asked);
    assert_eq!(pod.says(&asked), (Some("v1".to_owned()), ModelState::Ready));
}

#[test]
fn the_load_of_what_answered_before_is_not_called_off_for_another_try() {
    let (mut pod, asked) = (Pod::switching(), asked(true));
    pod.ends("v2", Outcome::Passed);
    pod.settle(&asked);
    // It is taken back, and version 1 cannot be loaded.
    let back = holding(false, desired(Some("v1"), None, Some("v2")));
    pod.goes_for("v1", &back);
    pod.cannot_load("v1", &back);
    assert_eq!(pod.phase("v2"), Some(Phase::Preparing));
    pod.now += Duration::from_secs(300);
    pod.settle(&back);
    assert_eq!(pod.phase("v2"), Some(Phase::Preparing), "however long it takes");
    assert!(!pod.versions.is_stalled());
    pod.cannot_load("v2", &back);
    assert_eq!(pod.says(&back), (None, ModelState::Loading), "version 1 is tried again");
    pod.cannot_load("v1", &back);
    assert!(pod.versions.is_stalled(), "nothing is to be had");
    assert_eq!(pod.says(&back), (None, ModelState::Error));
}

//! What a pod says, from what became of its versions.

#![allow(clippy::unwrap_used)]

use gantry_crds::inference_service::{ModelSpec, RuntimeSpec};
use gantry_crds::status::GateVerdict;

use super::*;
use crate::desired::Candidate;

/// A pod that answers with v1 and is asked to prepare v2.
struct Pod {
    versions: Versions,
    lines: Lines,
    desired: Desired,
    now: Instant,
}

impl Pod {
    fn new() -> Self {
        let source = SourceSpec::default();
        let model = ModelSpec { served_name: "m".into(), source };
        let named =
            |name: &str| NamedVersion { name: name.into(), model: model.clone(), runtime: RuntimeSpec::default() };
        let versions = ["v1", "v2"].map(|name| (name.to_owned(), named(name)));
        let desired = Desired { active: Some("v1".into()), versions: versions.into(), ..Desired::default() };
        let mut pod = Self { versions: Versions::default(), lines: Lines::new(), desired, now: Instant::now() };
        pod.settle();
        pod.ended("v1", Outcome::Passed);
        pod.desired.candidate = Some(Candidate { version: "v2".into(), attempt: 3 });
        pod.settle();
        pod
    }

    fn settle(&mut self) -> Vec<Action> {
        self.versions.settle(&self.desired, self.now, &mut self.lines)
    }

    fn ended(&mut self, version: &str, outcome: Outcome) -> Snapshot {
        assert!(self.versions.ended(version, outcome, self.now, &mut self.lines), "{version} was at its gates");
        self.settle();
        self.says()
    }

    fn says(&self) -> Snapshot {
        self.versions.snapshot(Some(&self.desired), &self.lines, self.now)
    }
}

#[test]
fn a_candidate_whose_worker_dies_for_good_answers_no_share_any_more() {
    let mut pod = Pod::new();
    pod.desired.canary = crate::Share::of(&"5%".into());
    let says = pod.ended("v2", Outcome::Passed);
    let share = |says: &Snapshot| says.canary.as_ref().and_then(|canary| canary.share.clone()).map(|share| share.0);
    assert_eq!((share(&says).as_deref(), says.serving.as_deref()), (Some("5%"), Some("v1")));
    // While it is started again, the active version answers all.
    let restarting = WorkerHealth::Restarting { attempt: 1, reason: "it died".into() };
    pod.versions.observe("v2", restarting);
    assert!(matches!(&pod.settle()[..], [Action::Route(Route { canary: None, .. })]));
    assert_eq!(share(&pod.says()), None);
    pod.versions.observe("v2", WorkerHealth::Ready);
    pod.settle();
    assert_eq!(share(&pod.says()).as_deref(), Some("5%"));
    // It is out of the way before it is unloaded.
    pod.versions.observe("v2", failed());
    let done = pod.settle();
    assert!(matches!(&done[..], [Action::Route(Route { canary: None, .. }), Action::Drop { .. }]), "{done:?}");
    let says = pod.says();
    assert_eq!((says.canary, says.prepared, says.candidate.unwrap().phase), (None, None, CandidatePhase::Failed));
}

fn failed() -> WorkerHealth {
    WorkerHealth::Failed { reason: "it died".into() }
}

fn refused(gate: GateName) -> Outcome {
    Outcome::Refused(Refusal::new(gate, "no"))
}

#[test]
fn a_candidate_is_prepared_once_every_gate_of_its_attempt_let_it_through() {
    let mut pod = Pod::new();
    let says = pod.says();
    assert_eq!((says.serving.as_deref(), says.prepared), (Some("v1"), None));
    assert_eq!(says.candidate.unwrap().phase, CandidatePhase::Fetching);
    let says = pod.ended("v2", Outcome::Passed);
    assert_eq!(says.prepared.as_deref(), Some("v2"));
    assert_eq!(says.candidate.unwrap().phase, CandidatePhase::Prepared);
    // Another attempt judges it again.
    pod.desired.candidate = Some(Candidate { version: "v2".into(), attempt: 4 });
    pod.settle();
    assert_eq!(pod.says().prepared, None);
}

#[test]
fn a_refusal_is_told_and_one_for_want_of_room_waits_while_another_is_to_go() {
    let failing = |says: &Snapshot| {
        let candidate = says.candidate.clone().unwrap();
        let gate = candidate.gates.iter().find(|gate| gate.verdict == GateVerdict::Fail).map(|gate| gate.name);
        (candidate.phase, gate, candidate.wait_reason)
    };
    let says = Pod::new().ended("v2", refused(GateName::Memory));
    assert_eq!(failing(&says), (CandidatePhase::Failed, Some(GateName::Memory), None));
    assert_eq!((says.health, says.prepared), (ReplicaHealth::Healthy, None));
    let mut pod = Pod::new();
    pod.ended("v2", Outcome::Passed);
    // The switch: v1 is the way back, and takes the room.
    (pod.desired.active, pod.desired.previous) = (Some("v2".into()), Some("v1".into()));
    pod.desired.versions.insert("v3".into(), NamedVersion { name: "v3".into(), ..pod.desired.versions["v1"].clone() });
    pod.desired.candidate = Some(Candidate { version: "v3".into(), attempt: 4 });
    pod.settle();
    let says = pod.ended("v3", refused(GateName::Memory));
    assert_eq!(failing(&says), (CandidatePhase::Validating, None, Some(WaitReason::NoRoom)));
    assert_eq!((says.serving.as_deref(), says.resident), (Some("v2"), None), "the way back makes room");
}

#[test]
fn a_worker_that_fails_before_it_answers_is_a_refusal_and_later_a_matter_of_health() {
    let mut pod = Pod::new();
    pod.ended("v2", Outcome::Passed);
    pod.versions.observe("v2", failed());
    assert_eq!(pod.settle(), [Action::Drop { version: "v2".into() }]);
    let says = pod.says();
    assert_eq!((says.prepared, says.candidate.unwrap().phase), (None, CandidatePhase::Failed));
    pod.versions.observe("v1", failed());
    assert_eq!(pod.settle(), []);
    let says = pod.says();
    assert_eq!((says.serving.as_deref(), says.health), (Some("v1"), ReplicaHealth::Failed));
}

#[test]
fn a_version_that_cannot_be_brought_back_is_tried_again_and_told() {
    let mut pod = Pod::new();
    pod.ended("v2", Outcome::Passed);
    let mut new = Pod { versions: Versions::default(), lines: Lines::new(), ..pod };
    new.settle();
    let says = new.ended("v1", refused(GateName::Fetch));
    assert_eq!((says.serving, says.health), (None, ReplicaHealth::Failed));
    assert!(says.message.unwrap().contains("it is tried again"));
    assert_eq!(new.versions.get("v2").map(|entry| entry.phase), Some(Phase::Preparing), "the cure comes meanwhile");
    let due = new.versions.next_retry(new.now).unwrap();
    assert_eq!(due, new.now + RETRY_MIN);
    new.now = due;
    assert!(
        matches!(&new.settle()[..], [Action::Prepare { version, purpose: Purpose::Restore, .. }] if version == "v1")
    );
}

#![allow(clippy::unwrap_used)]
//! For each gate: a version that it refused stays refused while nothing changes, and is tried again and served once its user
//! has done what the message says.

use gantry_crds::{InferenceService, status::GateResult};
use kube::ResourceExt;
use serde_json::{Value, json};

use super::{
    judged::{Seen, Sighting},
    tests::{can_answer, report, time},
    *,
};
use crate::{
    limits::JUDGED_RESTARTS_MAX,
    validate::{ObjectKind, RESTART_ANNOTATION, RETRY_ANNOTATION, validate},
};
use gantry_crds::status::{AgentStatus, CandidatePhase, GateName, GateVerdict, ReplicaHealth};

/// A service as its user sees it, with the objects that it names.
struct User {
    service: Value,
    /// State of the ConfigMap and of the Secret.
    prompts: Option<u32>,
    token: Option<u32>,
    /// That of the ConfigMap with the source's authorities.
    authorities: Option<u32>,
}

impl User {
    fn new() -> Self {
        let source = json!({"uri": "https://h/m.gguf", "sha256": "a".repeat(64), "secretRef": {"name": "hf"},
            "ca": {"configMapRef": {"name": "roots"}}});
        let service = json!({
            "apiVersion": "gantry.dev/v1alpha1", "kind": "InferenceService", "metadata": {"name": "chat", "annotations": {}},
            "spec": {"replicas": 1, "resources": {"memory": "1Gi"}, "model": {"servedName": "m", "source": source},
                "rollout": {"gates": {"prompts": {"configMapRef": {"name": "golden"}}}}},
        });
        Self { service, prompts: Some(1), token: Some(1), authorities: Some(1) }
    }

    fn set(&mut self, pointer: &str, value: Value) {
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        let parent = parent.split('/').skip(1).fold(&mut self.service, |object, key| &mut object[key]);
        parent[key] = value;
    }

    fn retry(&mut self) {
        self.service["metadata"]["annotations"][RETRY_ANNOTATION] = json!("again");
    }

    /// What the operator makes of it.
    fn spec(&self) -> ValidService {
        let service: InferenceService = serde_json::from_value(self.service.clone()).unwrap();
        let mut spec = validate(&service).unwrap();
        assert_eq!(service.name_any(), "chat");
        let state = |kind| match kind {
            ObjectKind::ConfigMap => self.prompts,
            ObjectKind::Secret => self.token,
            ObjectKind::Authorities => self.authorities,
        };
        let seen = spec.wanted.objects.iter().cloned().map(|object| {
            let there = |version: u32| Seen::There {
                uid: "uid".to_owned(),
                resource_version: version.to_string(),
                names_hosts: true,
            };
            let seen = state(object.kind).map_or(Seen::Absent, there);
            Sighting { object, seen }
        });
        let seen: Vec<_> = seen.collect();
        spec.wanted.judge_by(&seen, &RolloutState::default());
        spec
    }
}

/// One service with one pod, and time.
struct Cluster {
    state: RolloutState,
    stamped: Vec<StampedVersion>,
    now: i64,
    pods: usize,
}

impl Cluster {
    fn step(&mut self, user: &User, says: impl Fn(&mut ReplicaStatus), outdated: bool) -> Option<Transition> {
        self.now += 1;
        let mut entry = report("a", self.now);
        entry.agent = Some(AgentStatus::of_this_release());
        entry.attempt = self.state.rollout.as_ref().map(|rollout| rollout.attempt);
        says(&mut entry);
        let pod = CountedPod { name: "a", ready: can_answer(&entry), report: Some(&entry), outdated };
        let pods = vec![pod; self.pods];
        let spec = user.spec();
        let world = World {
            now: time(self.now),
            spec: Some(&spec),
            state: &self.state,
            pods: &pods,
            target_replicas: 1,
            stamped: &self.stamped,
            missing_pod: None,
            sides: SidesSeen::default(),
        };
        let plan = decide(&world);
        self.stamped.extend(plan.stamp.into_iter().map(|version| StampedVersion {
            version,
            revision: 1,
            is_refused: false,
        }));
        self.state = plan.state;
        plan.transition
    }

    /// One that refused what the user asks for.
    fn refusing(user: &User, gate: GateName, message: &str) -> Self {
        let mut cluster = Self { state: RolloutState::default(), stamped: Vec::new(), now: 0, pods: 1 };
        assert!(matches!(cluster.step(user, |_| {}, false), Some(Transition::Started { .. })));
        let version = user.spec().wanted.name;
        let refused = if gate == GateName::Deadline {
            cluster.now += 900;
            cluster.step(user, |_| {}, false)
        } else {
            cluster.step(user, |report| report.candidate = Some(refused(&version, gate, message)), false)
        };
        let Some(Transition::Rejected { gate: by, .. }) = refused else { panic!("{gate:?}: {refused:?}") };
        assert_eq!(by, gate);
        for _ in 0..3 {
            assert_eq!(cluster.step(user, |_| {}, false), None, "{gate:?} latches");
        }
        cluster
    }

    /// Whether it is tried again, and is served when the pods find nothing wrong.
    fn ensure_served(&mut self, user: &User, what: &str) {
        let started = self.step(user, |_| {}, false);
        assert!(matches!(started, Some(Transition::Started { .. })), "{what}: {started:?} {:#?}", self.state.rejected);
        let version = user.spec().wanted.name;
        let committed = self.step(user, |report| report.prepared = Some(version.clone()), false);
        assert!(matches!(committed, Some(Transition::Committed { .. })), "{what}: {committed:?}");
        self.step(user, |report| report.version = Some(version.clone()), false);
        assert_eq!((self.state.active.as_ref(), &self.state.rejected), (Some(&version), &None), "{what}");
    }
}

fn refused(version: &str, gate: GateName, message: &str) -> CandidateStatus {
    let message = Some(message.to_owned());
    CandidateStatus {
        version: version.to_owned(),
        phase: CandidatePhase::Failed,
        wait_reason: None,
        progress: None,
        gates: vec![GateResult { name: gate, verdict: GateVerdict::Fail, value: None, message: message.clone() }],
        gguf: None,
        fit: None,
        message,
    }
}

type Advice = (&'static str, fn(&mut User));

#[test]
fn whoever_does_what_a_gate_says_is_tried_again() {
    const RETRY: Advice = ("annotate the service with gantry.dev/retry", User::retry);
    let cases: [(GateName, &str, &[Advice]); 10] = [
        (
            GateName::Fetch,
            "https://h/m.gguf is refused with 401; correct the token of Secret hf",
            &[
                ("the token", |user| user.token = Some(2)),
                ("the authorities", |user| user.authorities = Some(2)),
                ("the Secret, made anew", |user| user.token = None),
                ("the address", |user| user.set("/spec/model/source/uri", json!("https://h/n.gguf"))),
                ("spec.cache.sizeLimit", |user| user.set("/spec/cache", json!({"sizeLimit": "20Gi"}))),
                RETRY,
            ],
        ),
        (
            GateName::Digest,
            "correct the sha256 in the spec, or the address",
            &[
                ("the sha256", |user| user.set("/spec/model/source/sha256", json!("b".repeat(64)))),
                ("the address", |user| user.set("/spec/model/source/uri", json!("https://h/n.gguf"))),
                RETRY,
            ],
        ),
        (
            GateName::Format,
            "make the file again",
            &[("another file", |user| user.set("/spec/model/source/sha256", json!("b".repeat(64))))],
        ),
        (
            GateName::Memory,
            "give the pod more memory (spec.resources.memory), or lower contextSize or parallel",
            &[
                ("memory", |user| user.set("/spec/resources/memory", json!("2Gi"))),
                ("GPUs", |user| user.set("/spec/resources/gpu", json!({"count": 2}))),
                ("contextSize", |user| user.set("/spec/runtime", json!({"contextSize": 512}))),
                ("headroom", |user| user.set("/spec/rollout/gates/memory", json!({"headroom": "1%"}))),
                ("the queue", |user| user.set("/spec/scheduling", json!({"maxQueue": 8}))),
                RETRY,
            ],
        ),
        (
            GateName::Template,
            "correct the template, or serve a file with another one",
            &[("another file", |user| user.set("/spec/model/source/sha256", json!("b".repeat(64))))],
        ),
        (
            GateName::Load,
            "check the file, spec.runtime, and the pod's memory",
            &[
                ("runtime", |user| user.set("/spec/runtime", json!({"parallel": 1}))),
                ("memory", |user| user.set("/spec/resources/memory", json!("2Gi"))),
                RETRY,
            ],
        ),
        (
            GateName::Prompts,
            "correct the prompts, or use another model",
            &[
                ("the prompts", |user| user.prompts = Some(2)),
                ("minPass", |user| {
                    user.set(
                        "/spec/rollout/gates/prompts",
                        json!({"configMapRef": {"name": "golden"}, "minPass": "50%"}),
                    );
                }),
                ("other prompts", |user| {
                    user.set("/spec/rollout/gates/prompts", json!({"configMapRef": {"name": "silver"}}));
                }),
                RETRY,
            ],
        ),
        (
            GateName::Drift,
            "it predicts otherwise than the active version; serve another file, or lower spec.rollout.gates.drift.minAgreement",
            &[
                ("minAgreement", |user| user.set("/spec/rollout/gates/drift", json!({"minAgreement": "50%"}))),
                ("no such gate", |user| user.set("/spec/rollout/gates", json!({}))),
                ("another file", |user| user.set("/spec/model/source/sha256", json!("b".repeat(64)))),
                RETRY,
            ],
        ),
        (
            GateName::Performance,
            "it generates more slowly; lower spec.rollout.gates.performance.minDecodeRatio, or serve a smaller file",
            &[
                ("minDecodeRatio", |user| {
                    user.set("/spec/rollout/gates/performance", json!({"minDecodeRatio": "0.5"}));
                }),
                ("another file", |user| user.set("/spec/model/source/sha256", json!("b".repeat(64)))),
                RETRY,
            ],
        ),
        (
            GateName::Deadline,
            "",
            &[
                ("spec.rollout.progressDeadline", |user| user.set("/spec/rollout/progressDeadline", json!("1h"))),
                ("cpu", |user| user.set("/spec/resources/cpu", json!("4"))),
                ("let these pods onto a node that there is", |user| {
                    user.set("/spec/pod", json!({"tolerations": [{"key": "gpu", "operator": "Exists"}]}));
                }),
                ("spread them otherwise", |user| {
                    let anywhere =
                        json!([{"maxSkew": 9, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}]);
                    user.set("/spec/pod", json!({"topologySpreadConstraints": anywhere}));
                }),
                ("before others", |user| user.set("/spec/pod", json!({"priorityClassName": "high"}))),
                ("other pods", |user| user.service["metadata"]["annotations"][RESTART_ANNOTATION] = json!("now")),
                RETRY,
            ],
        ),
    ];
    for (gate, message, advice) in cases {
        for (what, follow) in advice {
            let mut user = User::new();
            let mut cluster = Cluster::refusing(&user, gate, message);
            follow(&mut user);
            cluster.ensure_served(&user, &format!("{gate:?}: {what}"));
        }
    }
}

/// Model, then what it is taken back for.
#[test]
fn a_version_that_was_taken_back_is_tried_again_when_what_it_ran_with_changes() {
    let changes: [Advice; 3] = [
        ("memory", |user| user.set("/spec/resources/memory", json!("2Gi"))),
        ("runtime", |user| user.set("/spec/runtime", json!({"parallel": 1, "contextSize": 4096}))),
        ("retry", User::retry),
    ];
    for (what, follow) in changes {
        let mut user = User::new();
        let mut cluster = Cluster { state: RolloutState::default(), stamped: Vec::new(), now: 0, pods: 1 };
        cluster.step(&user, |_| {}, false);
        let first = user.spec().wanted.name;
        cluster.step(&user, |report| report.prepared = Some(first.clone()), false);
        cluster.step(&user, |report| report.version = Some(first.clone()), false);
        user.set("/spec/model/source/sha256", json!("b".repeat(64)));
        let version = user.spec().wanted.name;
        cluster.step(&user, |report| report.version = Some(first.clone()), false);
        cluster.step(&user, |report| report.prepared = Some(version.clone()), false);
        let dies = |report: &mut ReplicaStatus| {
            (report.version, report.health) = (Some(version.clone()), ReplicaHealth::Failed);
        };
        let taken_back = cluster.step(&user, dies, false);
        let Some(Transition::RollingBack { message, .. }) = taken_back else { panic!("{taken_back:?}") };
        assert!(message.contains("spec.resources.memory") && message.contains(RETRY_ANNOTATION), "{message}");
        for _ in 0..3 {
            cluster.step(&user, |report| report.version = Some(first.clone()), false);
        }
        assert!(cluster.state.rejected.is_some() && cluster.state.rollout.is_none());
        follow(&mut user);
        cluster.ensure_served(&user, what);
    }
}

#[test]
fn what_nothing_was_judged_by_lifts_no_latch() {
    let user = User::new();
    for change in [
        |user: &mut User| user.set("/spec/replicas", json!(2)),
        |user: &mut User| user.set("/spec/revisionHistoryLimit", json!(2)),
        |user: &mut User| user.set("/spec/rollout/drainTimeout", json!("1s")),
        |user: &mut User| user.set("/spec/rollout/progressDeadline", json!("1h")),
        |user: &mut User| user.authorities = Some(2),
        |user: &mut User| user.set("/spec/pod", json!({"priorityClassName": "high"})),
    ] {
        let mut cluster = Cluster::refusing(&user, GateName::Prompts, "correct the prompts");
        let mut edited = User::new();
        change(&mut edited);
        assert_eq!(cluster.step(&edited, |_| {}, false), None, "{}", edited.service);
        assert!(cluster.state.rejected.is_some());
    }
}

/// A first version, refused for memory: the pod that refused it is still there when its user has given more.
#[test]
fn a_pod_without_what_the_spec_asks_for_judges_nothing() {
    let mut user = User::new();
    let mut cluster = Cluster::refusing(&user, GateName::Memory, "give more memory");
    user.set("/spec/resources/memory", json!("4Gi"));
    let version = user.spec().wanted.name;
    let refuses = |report: &mut ReplicaStatus| report.candidate = Some(refused(&version, GateName::Memory, "more"));
    assert!(matches!(cluster.step(&user, refuses, true), Some(Transition::Started { .. })));
    for seconds in [0, 10, 10_000] {
        cluster.now += seconds;
        assert_eq!(cluster.step(&user, refuses, true), None);
    }
    let message = cluster.state.rollout.as_ref().unwrap().message.clone().unwrap();
    assert_eq!(message, "1 older pod is replaced first: the spec asks for other resources or nodes than it has");
    // Nor is one that would let it through asked.
    assert_eq!(cluster.step(&user, |report| report.prepared = Some(version.clone()), true), None);
    let committed = cluster.step(&user, |report| report.prepared = Some(version.clone()), false);
    assert!(matches!(committed, Some(Transition::Committed { .. })), "{committed:?}");
}

/// Less memory, and a model that fits into it: the new pod cannot have the active version, and so is never ready before the
/// switch, for which the old one would have to wait for ever.
#[test]
fn a_smaller_model_and_less_memory_in_one_edit_leave_the_old_pods_behind() {
    let mut user = User::new();
    let mut cluster = Cluster { state: RolloutState::default(), stamped: Vec::new(), now: 0, pods: 1 };
    let first = user.spec().wanted.name;
    cluster.step(&user, |_| {}, false);
    cluster.step(&user, |report| report.prepared = Some(first.clone()), false);
    cluster.step(&user, |report| report.version = Some(first.clone()), false);
    user.set("/spec/model/source/sha256", json!("b".repeat(64)));
    user.set("/spec/resources/memory", json!("512Mi"));
    cluster.step(&user, |report| report.version = Some(first.clone()), true);
    let (spec, second) = (user.spec(), user.spec().wanted.name);
    assert_eq!(cluster.state.candidate.as_ref(), Some(&second));
    let attempt = cluster.state.rollout.as_ref().map(|rollout| rollout.attempt);
    let entry = |pod: &str, version: Option<&String>| {
        let mut entry = report(pod, 0);
        (entry.attempt, entry.version) = (attempt, version.cloned());
        entry
    };
    let mut step = |old: &ReplicaStatus, new: &ReplicaStatus, switched: bool| {
        cluster.now += 1;
        let pods = [(old, true, true), (new, switched, false)].map(|(report, ready, outdated)| CountedPod {
            name: &report.pod,
            ready,
            report: Some(report),
            outdated,
        });
        let plan = decide(&World {
            now: time(cluster.now),
            spec: Some(&spec),
            state: &cluster.state,
            pods: &pods,
            target_replicas: 1,
            stamped: &cluster.stamped,
            missing_pod: None,
            sides: SidesSeen::default(),
        });
        cluster.state = plan.state;
        plan.transition
    };
    let (old, mut new) = (entry("old", Some(&first)), entry("new", None));
    assert_eq!(step(&old, &new, false), None, "it has not prepared it");
    // One that answers with the active version is waited for like any other.
    let restored = ReplicaStatus { prepared: Some(second.clone()), ..entry("new", Some(&first)) };
    assert_eq!(step(&old, &restored, true), None, "old pods go when it is ready");
    new.prepared = Some(second.clone());
    assert!(matches!(step(&old, &new, false), Some(Transition::Committed { .. })));
    let mut old = old;
    old.candidate = Some(refused(&second, GateName::Memory, "it does not fit beside the active one"));
    let new = entry("new", Some(&second));
    assert!(matches!(step(&old, &new, true), Some(Transition::Baking { .. })), "what the old pod says does not count");
    assert_eq!(step(&old, &new, true), None);
}

/// Pods look for what they wait for now and then: the deadline must not come before they have seen it.
#[test]
fn what_pods_waited_for_gives_them_their_time_from_when_it_comes() {
    let mut user = User { prompts: None, ..User::new() };
    let mut cluster = Cluster { state: RolloutState::default(), stamped: Vec::new(), now: 0, pods: 1 };
    let version = user.spec().wanted.name;
    let waits = |report: &mut ReplicaStatus| {
        let waiting = refused(&version, GateName::Prompts, "ConfigMap golden is not there");
        report.candidate = Some(CandidateStatus { phase: CandidatePhase::Testing, gates: Vec::new(), ..waiting });
    };
    cluster.step(&user, waits, false);
    cluster.now += 60;
    cluster.step(&user, waits, false);
    let deadline = |cluster: &Cluster| cluster.state.rollout.as_ref().unwrap().deadline.0;
    let first = deadline(&cluster);
    cluster.now += 800;
    user.prompts = Some(1);
    assert_eq!(cluster.step(&user, waits, false), None);
    assert_eq!(deadline(&cluster), first + jiff::SignedDuration::from_secs(801));
    cluster.now += 890;
    assert_eq!(cluster.step(&user, waits, false), None, "a pod may see it now");
    cluster.now += 100;
    let ended = cluster.step(&user, waits, false);
    assert!(
        matches!(ended, Some(Transition::Rejected { gate: GateName::Deadline, .. })),
        "{ended:?} {:?}",
        cluster.state
    );
}

/// Prompts or a token that are renewed faster than pods prepare.
#[test]
fn what_changes_faster_than_pods_prepare_begins_so_many_attempts_and_no_more() {
    let rotations: [fn(&mut User, u32); 2] =
        [|user, state| user.prompts = Some(state), |user, state| user.token = Some(state)];
    for rotate in rotations {
        let mut user = User::new();
        let mut cluster = Cluster { state: RolloutState::default(), stamped: Vec::new(), now: 0, pods: 1 };
        for state in 1..12 {
            rotate(&mut user, state);
            cluster.now += 60;
            cluster.step(&user, |_| {}, false);
        }
        assert_eq!(cluster.state.attempts, i64::from(1 + JUDGED_RESTARTS_MAX));
        let message = cluster.state.rollout.as_ref().unwrap().message.clone().unwrap();
        let wanted = "what it is judged by (ConfigMap golden, Secret hf, ConfigMap roots) has changed 3 times while pods prepared: no \
                      further change begins another attempt";
        assert!(message.ends_with(wanted), "{message}");
        // Beyond that a change is not even written.
        let before = cluster.state.clone();
        rotate(&mut user, 12);
        assert_eq!((cluster.step(&user, |_| {}, false), &cluster.state), (None, &before));
        // A refusal rests on none of what is so unsteady, or the next change would lift it, and says what does.
        let version = user.spec().wanted.name;
        let refuses = |report: &mut ReplicaStatus| report.candidate = Some(refused(&version, GateName::Prompts, "no"));
        assert!(matches!(cluster.step(&user, refuses, false), Some(Transition::Rejected { .. })));
        let message = cluster.state.rejected.as_ref().unwrap().message.clone();
        assert!(message.contains("when they are steady, annotate the service with gantry.dev/retry="), "{message}");
        for state in 13..16 {
            rotate(&mut user, state);
            assert_eq!(cluster.step(&user, refuses, false), None);
        }
        // What the user changes begins attempts as ever.
        user.retry();
        assert!(matches!(cluster.step(&user, |_| {}, false), Some(Transition::Started { .. })));
        assert_eq!(cluster.state.rollout.as_ref().unwrap().restarts, 0);
    }
}

/// A token that is renewed every hour is not what there was no room for.
#[test]
fn what_a_refusal_cannot_be_about_does_not_lift_it() {
    let user = User::new();
    for gate in [GateName::Memory, GateName::Load, GateName::Template, GateName::Deadline] {
        let mut cluster = Cluster::refusing(&user, gate, "no");
        let renewed = User { token: Some(2), prompts: Some(2), ..User::new() };
        assert_eq!(cluster.step(&renewed, |_| {}, false), None, "{gate:?}");
    }
}

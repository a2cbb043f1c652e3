#![allow(clippy::unwrap_used)]
//! `decide` against a model of the cluster: random edits, pods that come, die and restart, workers that fail, nodes that are
//! lost and have troubles of their own, agents that lag, an operator that crashes before and after each write and decides from stale worlds.
//!
//! After each status write the safety rules are checked; after the events the world is left alone and must come to rest.

use std::collections::{BTreeMap, BTreeSet};

use gantry_crds::status::{GateName, ReplicaHealth};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use proptest::{prelude::*, strategy::ValueTree};
use serde_json::json;

use super::{
    tests::{name, refused, report, spec_with, time},
    *,
};

use rules::check;

mod rules;

const MODELS: u8 = 4;
/// Models that no pod can prepare.
const BAD: u8 = 3;
/// Steps in which a world that is left alone must come to rest: all deadlines of one rollout after another, at a minute
/// each step.
const REST_STEPS: usize = 200;

#[derive(Debug, Clone)]
enum Event {
    Edit {
        model: u8,
        variant: u8,
        valid: bool,
    },
    Scale(i32),
    PodComes,
    PodDies(usize),
    PodRestarts(usize),
    /// The Deployment's controller replaces pods of an older template.
    Deployment,
    WorkerFails(usize),
    /// The version that answers fails everywhere.
    VersionFails,
    WorkerRecovers(usize),
    /// Requests and the agent's words come to a pod and from it no more.
    NodeLost(usize),
    NodeBack(usize),
    /// Nothing more can be loaded in a pod.
    Trouble(usize),
    /// The Secret that versions are judged by gets another content.
    SecretChanges,
    Agent(usize),
    Operator {
        stale: usize,
        crash: Crash,
    },
    Time(i64),
}

/// Where an operator dies, or does not.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Crash {
    Never,
    BeforeStamp,
    BeforeStatus,
    BeforeDelete,
}

fn event() -> impl Strategy<Value = Event> {
    let crash = prop_oneof![
        6 => Just(Crash::Never),
        1 => Just(Crash::BeforeStamp),
        1 => Just(Crash::BeforeStatus),
        1 => Just(Crash::BeforeDelete),
    ];
    prop_oneof![
        4 => (1..=MODELS, 0..4u8, prop::bool::weighted(0.9)).prop_map(|(model, variant, valid)| Event::Edit { model, variant, valid }),
        1 => (0..4i32).prop_map(Event::Scale),
        2 => Just(Event::PodComes),
        1 => any::<usize>().prop_map(Event::PodDies),
        1 => any::<usize>().prop_map(Event::PodRestarts),
        3 => Just(Event::Deployment),
        1 => any::<usize>().prop_map(Event::WorkerFails),
        3 => Just(Event::VersionFails),
        1 => any::<usize>().prop_map(Event::WorkerRecovers),
        1 => any::<usize>().prop_map(Event::NodeLost),
        1 => any::<usize>().prop_map(Event::NodeBack),
        1 => any::<usize>().prop_map(Event::Trouble),
        1 => Just(Event::SecretChanges),
        12 => any::<usize>().prop_map(Event::Agent),
        12 => (0..3usize, crash).prop_map(|(stale, crash)| Event::Operator { stale, crash }),
        3 => prop_oneof![1..30i64, Just(61), Just(600), Just(900)].prop_map(Event::Time),
    ]
}

/// A pod with its agent.
#[derive(Debug, Clone, Default)]
struct Pod {
    name: String,
    /// No two clocks agree.
    clock_ahead_seconds: i64,
    serving: Option<String>,
    /// Loaded versions, with the attempt each was judged in.
    loaded: BTreeMap<String, Option<i64>>,
    /// The version that was refused, with the attempt it was judged in.
    refused: Option<(String, Option<i64>)>,
    failed: bool,
    /// It is of the template with much memory.
    large: bool,
    cut_off: bool,
    trouble: bool,
}

impl Pod {
    fn ready(&self) -> bool {
        self.serving.is_some() && !self.failed && !self.cut_off
    }
}

/// The object as the API server holds it.
#[derive(Debug, Clone, Default)]
struct Object {
    resource_version: u64,
    state: RolloutState,
    reports: Vec<ReplicaStatus>,
    spec: Option<ValidService>,
    replicas: i32,
}

struct Cluster {
    object: Object,
    /// What stale stores may still hold.
    past: Vec<Object>,
    stamped: Vec<StampedVersion>,
    pods: Vec<Pod>,
    pods_made: usize,
    /// State of the Secret.
    secret: u32,
    /// What the Deployment was told last: pods with much memory, and whether any answered, so that they go one by one.
    large: bool,
    answers: bool,
    now: i64,
    /// Versions that were active once: the only ones that may be gone back to without being prepared.
    were_active: BTreeSet<String>,
    /// Names of the transitions that were written.
    reached: BTreeSet<String>,
}

impl Cluster {
    fn new() -> Self {
        let object = Object { spec: Some(model_spec(1, 0)), replicas: 2, ..Object::default() };
        let mut cluster = Self {
            object,
            past: Vec::new(),
            stamped: Vec::new(),
            pods: Vec::new(),
            pods_made: 0,
            secret: 0,
            large: false,
            answers: false,
            now: 0,
            were_active: BTreeSet::new(),
            reached: BTreeSet::new(),
        };
        cluster.pod_comes();
        cluster.pod_comes();
        cluster
    }

    /// One in which model 2 answers and bakes, with model 1 to go back to: few random lives come so far.
    fn baking() -> Self {
        let mut cluster = Self::new();
        let go_on = |cluster: &mut Self, done: fn(&RolloutState) -> bool| {
            for _ in 0..8 {
                (0..cluster.pods.len()).for_each(|index| cluster.agent(index));
                cluster.operator(0, Crash::Never);
                if done(&cluster.object.state) {
                    return;
                }
            }
            panic!("it did not get on: {:#?}", cluster.object);
        };
        go_on(&mut cluster, |state| state.active.is_some() && state.rollout.is_none());
        cluster.write(|object| object.spec = Some(model_spec(2, 0)));
        go_on(&mut cluster, |state| state.rollout.as_ref().is_some_and(|rollout| rollout.step == RolloutStep::Bake));
        cluster
    }

    fn write(&mut self, change: impl FnOnce(&mut Object)) {
        self.past.push(self.object.clone());
        change(&mut self.object);
        self.object.resource_version += 1;
    }

    fn pod_comes(&mut self) {
        self.pods_made += 1;
        let name = format!("pod-{}", self.pods_made);
        let clock_ahead_seconds = [0, 3600, -3600][self.pods_made % 3];
        let large = self.large;
        self.pods.push(Pod { name, clock_ahead_seconds, large, ..Pod::default() });
    }

    /// One step of a rolling update: with an extra pod, and none missing of those that answer. All at once while none does.
    /// Says whether there was any to replace.
    fn replace_pods(&mut self) -> bool {
        let large = self.large;
        let older = |pod: &Pod| pod.large != large;
        let Some(oldest) = self.pods.iter().position(older) else { return false };
        let replicas = usize::try_from(self.object.replicas).unwrap();
        if !self.answers {
            self.pods.retain(|pod| !older(pod));
            while self.pods.len() < replicas {
                self.pod_comes();
            }
        } else if self.pods.iter().any(|pod| !older(pod) && pod.serving.is_none()) {
            // The next one follows when this one is ready.
        } else if self.pods.len() <= replicas {
            self.pod_comes();
        } else {
            self.pods.remove(oldest);
        }
        true
    }

    fn happen(&mut self, event: Event) {
        let pick = |index: usize, pods: &Vec<Pod>| (!pods.is_empty()).then(|| index % pods.len());
        match event {
            Event::Edit { model, variant, valid } => {
                self.write(|object| object.spec = valid.then(|| model_spec(model, variant)));
            }
            Event::Scale(replicas) => {
                self.write(|object| object.replicas = replicas);
                self.pods.truncate(usize::try_from(replicas).unwrap());
            }
            Event::PodComes => {
                if i32::try_from(self.pods.len()).unwrap() < self.object.replicas {
                    self.pod_comes();
                }
            }
            Event::PodDies(index) => {
                if let Some(index) = pick(index, &self.pods) {
                    self.pods.remove(index);
                }
            }
            Event::PodRestarts(index) => {
                if let Some(index) = pick(index, &self.pods) {
                    let Pod { name, clock_ahead_seconds, large, cut_off, trouble, .. } = self.pods[index].clone();
                    self.pods[index] = Pod { name, clock_ahead_seconds, large, cut_off, trouble, ..Pod::default() };
                }
            }
            Event::WorkerFails(_) | Event::WorkerRecovers(_) if self.pods.is_empty() => {}
            Event::WorkerFails(index) => {
                let index = index % self.pods.len();
                self.pods[index].failed = self.pods[index].serving.is_some();
            }
            Event::VersionFails => {
                for index in 0..self.pods.len() {
                    self.pods[index].failed = self.pods[index].serving.is_some();
                    if !self.pods[index].cut_off {
                        self.report(index);
                    }
                }
            }
            Event::WorkerRecovers(index) => {
                let index = index % self.pods.len();
                self.pods[index].failed = false;
            }
            Event::NodeLost(index) | Event::NodeBack(index) => {
                if let Some(index) = pick(index, &self.pods) {
                    self.pods[index].cut_off = matches!(event, Event::NodeLost(_));
                }
            }
            Event::Trouble(index) => {
                if let Some(index) = pick(index, &self.pods) {
                    self.pods[index].trouble = true;
                }
            }
            Event::SecretChanges => self.secret += 1,
            Event::Agent(index) => {
                if let Some(index) = pick(index, &self.pods) {
                    self.agent(index);
                }
            }
            Event::Deployment => {
                self.replace_pods();
            }
            Event::Operator { stale, crash } => self.operator(stale, crash),
            Event::Time(seconds) => self.now += seconds,
        }
    }

    /// An agent sees the newest object, does one thing and reports.
    fn agent(&mut self, index: usize) {
        let state = self.object.state.clone();
        let pod = &mut self.pods[index];
        if pod.cut_off {
            return;
        }
        let attempt = state.rollout.as_ref().filter(|rollout| rollout.step == RolloutStep::Prepare);
        // A pod that others come for prepares nothing.
        let has = model_spec(1, if pod.large { 2 } else { 0 }).pod.resources_hash();
        let attempt = attempt.filter(|rollout| rollout.resources.as_ref() == Some(&has));
        let attempt = attempt.map(|rollout| (rollout.version.clone(), rollout.attempt));
        let described = |version: &str| state.versions.iter().any(|named| named.name == version);
        let active = state.active.clone().filter(|active| pod.serving.as_ref() != Some(active));
        let loads = |pod: &Pod, version: &String| !pod.trouble || pod.loaded.contains_key(version);
        if let Some(active) = active.clone().filter(|active| loads(pod, active)) {
            assert!(described(&active), "the active version is described");
            // Loading a version as the active one asks no golden prompts, so it was no attempt.
            pod.loaded.entry(active.clone()).or_insert(None);
            pod.serving = Some(active);
            pod.failed = false;
        } else if let Some((version, attempt)) = attempt {
            assert!(described(&version), "the candidate is described");
            if version == name(BAD) || !loads(pod, &version) {
                pod.refused = Some((version, Some(attempt)));
            } else {
                pod.loaded.insert(version, Some(attempt));
            }
        } else if let Some(active) = active {
            pod.refused = Some((active, None));
        }
        let named = [&state.active, &state.candidate, &state.previous];
        let serving = pod.serving.clone();
        pod.loaded.retain(|version, _| named.contains(&&Some(version.clone())) || serving.as_ref() == Some(version));
        self.report(index);
    }

    fn report(&mut self, index: usize) {
        let pod = self.pods[index].clone();
        let attempt = self.object.state.rollout.as_ref().filter(|rollout| rollout.step == RolloutStep::Prepare);
        let judged_now = |version: &str, judged: i64| {
            attempt.is_some_and(|rollout| rollout.version == version && rollout.attempt == judged)
        };
        let mut entry = report(&pod.name, self.now + pod.clock_ahead_seconds);
        entry.attempt = self.object.state.rollout.as_ref().map(|rollout| rollout.attempt);
        entry.version.clone_from(&pod.serving);
        entry.prepared = pod
            .loaded
            .iter()
            .find(|(version, judged)| judged.is_some_and(|at| judged_now(version, at)))
            .map(|(version, _)| version.clone());
        let restores = |version: &String| {
            self.object.state.active.as_ref() == Some(version) && pod.serving.as_ref() != Some(version)
        };
        let judged = pod.refused.as_ref().filter(|(version, at)| match at {
            Some(at) => judged_now(version, *at) || restores(version),
            None => restores(version),
        });
        entry.candidate = judged.map(|(version, _)| {
            let mut refused = refused(version);
            if *version != name(BAD) {
                refused.gates[0].name = GateName::Load;
            }
            refused
        });
        entry.health = if pod.failed { ReplicaHealth::Failed } else { ReplicaHealth::Healthy };
        let same =
            |old: &ReplicaStatus| ReplicaStatus { reported_at: entry.reported_at.clone(), ..old.clone() } == entry;
        if self.object.reports.iter().any(|old| old.pod == entry.pod && same(old)) {
            return;
        }
        self.write(|object| {
            object.reports.retain(|old| old.pod != entry.pod);
            object.reports.push(entry);
        });
    }

    /// An operator decides from an object that may be `stale` writes old, and may die on the way.
    fn operator(&mut self, stale: usize, crash: Crash) {
        let seen = match stale {
            0 => self.object.clone(),
            _ => self.past.iter().rev().nth(stale - 1).unwrap_or(&self.object).clone(),
        };
        let pods: Vec<_> = self
            .pods
            .iter()
            .map(|pod| CountedPod {
                name: &pod.name,
                ready: pod.ready(),
                report: seen.reports.iter().find(|report| report.pod == pod.name),
                outdated: seen.spec.as_ref().is_some_and(|spec| is_large(spec) != pod.large),
            })
            .collect();
        let spec = seen.spec.as_ref().map(|spec| self.judged_by_secret(spec));
        let world = World {
            now: time(self.now),
            spec: spec.as_ref(),
            state: &seen.state,
            pods: &pods,
            target_replicas: seen.replicas,
            stamped: &self.stamped,
            missing_pod: None,
            sides: SidesSeen::default(),
        };
        let plan = decide(&world);
        // Children go first, from whatever was seen.
        if let Some(spec) = &seen.spec {
            self.large = is_large(spec);
            self.answers = pods.iter().any(|pod| pod.report.is_some_and(|report| report.version.is_some()));
        }
        if crash == Crash::BeforeStamp {
            return;
        }
        let checked = check(&world, &plan, &self.were_active);
        for version in plan.stamp {
            let revision = 1 + self.stamped.iter().map(|stamped| stamped.revision).max().unwrap_or(0);
            self.stamped.push(StampedVersion { version, revision });
        }
        if crash == Crash::BeforeStatus {
            return;
        }
        if plan.state != seen.state {
            // The API server refuses what was not decided from the newest object.
            if seen.resource_version != self.object.resource_version {
                return;
            }
            checked.unwrap();
            self.were_active.extend(plan.state.active.clone());
            let step = |state: &RolloutState| state.rollout.as_ref().map(|rollout| rollout.step);
            if step(&seen.state) == Some(RolloutStep::Prepare) && step(&plan.state) == Some(RolloutStep::Bake) {
                self.reached.insert("Resumed".to_owned());
            }
            let transition = plan.transition.map(|transition| format!("{transition:?}"));
            self.reached.extend(transition.and_then(|text| text.split(' ').next().map(str::to_owned)));
            self.write(|object| object.state = plan.state);
        }
        if crash == Crash::BeforeDelete {
            return;
        }
        self.stamped.retain(|stamped| !plan.delete.contains(&stamped.version.name));
        let lives: Vec<_> = self.pods.iter().map(|pod| pod.name.clone()).collect();
        if self.object.reports.iter().any(|report| !lives.contains(&report.pod)) {
            self.write(|object| object.reports.retain(|report| lives.contains(&report.pod)));
        }
    }

    /// The spec as the operator reads it, with what its version is judged by.
    fn judged_by_secret(&self, spec: &ValidService) -> ValidService {
        let mut spec = spec.clone();
        spec.wanted.judged = format!("{}+Secret:hf={}", spec.wanted.judged, self.secret);
        spec
    }

    /// Whether there is nothing left to do.
    fn rests(&self) -> bool {
        let state = &self.object.state;
        // Without a pod, a candidate waits for one, and so does a bake.
        let waits = state.rollout.as_ref().is_some_and(|rollout| match rollout.step {
            RolloutStep::Prepare => self.object.spec.is_some(),
            step => step == RolloutStep::Bake,
        });
        if waits && self.pods.is_empty() && self.object.replicas > 0 {
            return true;
        }
        let Some(spec) = &self.object.spec else { return state.rollout.is_none() };
        let wanted = &self.judged_by_secret(spec).wanted;
        let has_it = state.active.as_ref() == Some(&wanted.name);
        state.rollout.is_none() && (has_it || is_latched(state, wanted) || self.object.replicas == 0)
    }
}

fn is_large(spec: &ValidService) -> bool {
    spec.pod.memory.is_some()
}

fn model_spec(model: u8, variant: u8) -> ValidService {
    let headroom = ["5%", "6%"][usize::from(variant % 2)];
    let mut spec = spec_with(
        model,
        json!({"gates": {"memory": {"headroom": headroom}}, "rollback": {"keepResident": variant.is_multiple_of(2)}}),
    );
    if variant >= 2 {
        spec.pod.memory = Some(Quantity("2Gi".to_owned()));
        spec.wanted.judged = format!("2Gi {}", spec.wanted.judged);
    }
    spec.history_limit = 1;
    spec
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, ..ProptestConfig::default() })]

    #[test]
    fn no_unprepared_version_answers_and_every_rollout_ends(baking in any::<bool>(), rotates in any::<bool>(), events in prop::collection::vec(event(), 1..120)) {
        let mut cluster = if baking { Cluster::baking() } else { Cluster::new() };
        for event in events {
            cluster.happen(event);
        }
        // Left alone: no edit, no death, all agents and the operator alive, nodes back and sound, time going on. A Secret may be
        // renewed all the time.
        cluster.pods.iter_mut().for_each(|pod| (pod.cut_off, pod.trouble) = (false, false));
        let mut steps = 0;
        loop {
            for index in 0..cluster.pods.len() {
                cluster.agent(index);
            }
            cluster.secret += u32::from(rotates && !cluster.pods.is_empty());
            let before = (cluster.object.resource_version, cluster.stamped.len());
            cluster.operator(0, Crash::Never);
            let replaces = cluster.replace_pods();
            for index in 0..cluster.pods.len() {
                cluster.agent(index);
            }
            if cluster.rests() && !replaces && before == (cluster.object.resource_version, cluster.stamped.len()) {
                break;
            }
            cluster.now += 20;
            steps += 1;
            prop_assert!(steps < REST_STEPS, "never rests: {:#?}", cluster.object);
        }
        // Settled: whatever time passes, nothing is written.
        for seconds in [1, 60, 10_000] {
            cluster.now += seconds;
            cluster.secret += u32::from(rotates && !cluster.pods.is_empty());
            let before = (cluster.object.resource_version, cluster.stamped.clone());
            cluster.operator(0, Crash::Never);
            prop_assert_eq!(before, (cluster.object.resource_version, cluster.stamped.clone()), "{:#?}", cluster.object);
        }
        // History is bounded: what plays a part, and the limit.
        prop_assert!(cluster.object.spec.is_none() || cluster.object.state.rollout.is_some() || cluster.stamped.len() <= 4, "{:?}", cluster.stamped);
        // Every pod answers with the active version.
        if cluster.object.state.rollout.is_none() {
            for pod in &cluster.pods {
                prop_assert_eq!(&pod.serving, &cluster.object.state.active);
                prop_assert_eq!(pod.large, cluster.large, "{:?}", pod);
            }
        }
    }
}

/// The random lives are worth something only if they get everywhere.
#[test]
fn random_lives_reach_every_transition() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let lives = prop::collection::vec(event(), 1..120);
    let mut reached = BTreeSet::new();
    for life in 0..800 {
        let events = lives.new_tree(&mut runner).unwrap().current();
        let mut cluster = if life % 2 == 0 { Cluster::new() } else { Cluster::baking() };
        events.into_iter().for_each(|event| cluster.happen(event));
        reached.append(&mut cluster.reached);
    }
    let all =
        ["Baking", "Cancelled", "Committed", "Rejected", "Resumed", "RolledBack", "RollingBack", "Settled", "Started"];
    assert_eq!(reached.iter().map(String::as_str).collect::<Vec<_>>(), all);
}

/// And the rules are worth something only if they refuse.
#[test]
fn the_rules_refuse_what_must_not_happen() {
    let mut cluster = Cluster::new();
    let events = [Event::Operator { stale: 0, crash: Crash::Never }, Event::Agent(0), Event::Agent(1)];
    events.into_iter().for_each(|event| cluster.happen(event));
    let seen = cluster.object.clone();
    let pods = |count: usize| -> Vec<_> {
        let reports = seen.reports.iter();
        let pod = |report| CountedPod { name: "pod", ready: false, report: Some(report), outdated: false };
        let missing = (count..2).map(|_| CountedPod { name: "silent", ready: false, report: None, outdated: false });
        reports.take(count).map(pod).chain(missing).collect()
    };
    let (all, some) = (pods(2), pods(1));
    let spec = seen.spec.as_ref().map(|spec| cluster.judged_by_secret(spec));
    let world = |pods| World {
        now: time(1),
        spec: spec.as_ref(),
        state: &seen.state,
        pods,
        target_replicas: 2,
        stamped: &cluster.stamped,
        missing_pod: None,
        sides: SidesSeen::default(),
    };
    let commit = decide(&world(&all));
    assert!(matches!(commit.transition, Some(Transition::Committed { .. })));
    check(&world(&all), &commit, &BTreeSet::new()).unwrap();
    check(&world(&some), &commit, &BTreeSet::new()).unwrap_err();
    check(&world(&[]), &commit, &BTreeSet::new()).unwrap_err();
    let spoilt = |spoil: fn(&mut Plan)| {
        let mut plan = commit.clone();
        spoil(&mut plan);
        check(&world(&all), &plan, &BTreeSet::new()).unwrap_err();
    };
    spoilt(|plan| plan.state.versions.clear());
    spoilt(|plan| plan.state.rollout = None);
    spoilt(|plan| plan.state.previous = Some("another".to_owned()));
    spoilt(|plan| plan.state.candidate = plan.state.active.clone());
    spoilt(|plan| plan.delete.extend(plan.state.active.clone()));
}

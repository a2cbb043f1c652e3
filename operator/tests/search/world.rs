//! The world that is searched: the object in the API server, its pods with their agents, and an operator. Time stands still
//! but for jumps to the next deadline, after which all that is known of times is moved back instead: two moments from
//! which the same may follow are then one state.

use std::{
    collections::{BTreeSet, hash_map::DefaultHasher},
    hash::{Hash, Hasher},
    sync::Arc,
};

use gantry_crds::{
    InferenceServiceStatus,
    status::{
        CanaryStatus, CandidatePhase, CandidateStatus, GateName, RejectedOutcome, RejectedStatus, ReplicaHealth,
        ReplicaStatus, RolloutStep,
    },
};
use gantry_operator::decide::{self, CountedPod, Plan, RolloutState, StampedVersion, Transition, decide};
use gantry_rollout::{Phase, WorkerHealth};
use jiff::{SignedDuration, Timestamp};

use super::{
    digest::{earlier, hash_of_report, hash_of_state},
    event::Event,
    invariants::{Broken, Invariant, Violation},
    pod::{Asked, Pod},
    rules,
    scenario::{Ask, Nature, Scenario},
};

/// The present, always.
pub(super) const NOW: Timestamp = Timestamp::constant(1_800_000_000, 0);

/// An entry of the status, with what it comes to.
#[derive(Clone)]
struct Told {
    report: Arc<ReplicaStatus>,
    hash: u64,
}

/// The object as the API server holds it.
#[derive(Clone)]
pub(super) struct Object {
    resource_version: u64,
    pub(super) state: RolloutState,
    state_hash: u64,
    /// For pods with little and with much memory.
    asked: [Arc<Asked>; 2],
    reports: Vec<Told>,
    pub(super) ask: Option<Ask>,
    pub(super) replicas: i32,
}

impl Object {
    fn new(scenario: &Scenario, ask: Option<Ask>, replicas: i32) -> Self {
        let state = RolloutState::default();
        let (state_hash, asked) = (hash_of_state(&state), asked(scenario, &state));
        Self { resource_version: 1, state, state_hash, asked, reports: Vec::new(), ask, replicas }
    }

    fn set_state(&mut self, scenario: &Scenario, state: RolloutState) {
        (self.state_hash, self.asked) = (hash_of_state(&state), asked(scenario, &state));
        self.state = state;
    }

    fn report(&self, pod: &str) -> Option<&Told> {
        self.reports.iter().find(|told| told.report.pod == pod)
    }
}

fn asked(scenario: &Scenario, state: &RolloutState) -> [Arc<Asked>; 2] {
    let status = InferenceServiceStatus {
        active_version: state.active.clone(),
        candidate_version: state.candidate.clone(),
        previous_version: state.previous.clone(),
        rollout: state.rollout.clone(),
        versions: state.versions.clone(),
        attempts: state.attempts,
        goes_over_by: state.goes_over_by,
        quarantined: state.quarantined.clone(),
        ..InferenceServiceStatus::default()
    };
    [0, 1].map(|large| Asked::of(&status, &scenario.resources[large]))
}

/// A pod as the operator sees it.
#[derive(Debug, Clone, PartialEq)]
struct Seen {
    name: String,
    ready: bool,
    large: bool,
}

/// What the Deployment's controller does.
enum Replacement {
    /// A pod comes.
    Comes,
    /// The pod at this place goes.
    Goes(usize),
    /// All older pods go, and others come.
    All,
}

/// What an operator decides from.
struct View<'a> {
    object: &'a Object,
    stamped: &'a [StampedVersion],
    pods: &'a [Seen],
}

/// The object before its last change by the operator or the user.
#[derive(Clone)]
struct Past {
    object: Object,
    stamped: Vec<StampedVersion>,
}

#[derive(Clone)]
pub(super) struct World {
    pub(super) scenario: Arc<Scenario>,
    pub(super) object: Arc<Object>,
    past: Option<Arc<Past>>,
    stamped: Arc<Vec<StampedVersion>>,
    pub(super) pods: Vec<Arc<Pod>>,
    /// As they were before the last change of who is ready.
    past_pods: Arc<Vec<Seen>>,
    pods_made: usize,
    /// State of the Secret.
    secret: u32,
    /// What the Deployment was told last: pods with much memory, and whether any answered, so that they go one by one.
    large: bool,
    answers: bool,
    /// Faults and edits that may still happen.
    pub(super) faults: u8,
    pub(super) edits: u8,
    /// Nothing has gone wrong that did not have to.
    undisturbed: bool,
    /// Pods that have died.
    deaths: u8,
    /// Models that were active, and those that passed as a candidate in a pod.
    were_active: Arc<BTreeSet<String>>,
    validated: Arc<BTreeSet<String>>,
    /// Names of the steps that were written.
    pub(super) reached: Arc<BTreeSet<&'static str>>,
}

impl World {
    /// Pods that have nothing yet.
    pub(super) fn new(scenario: Scenario, faults: u8, edits: u8) -> Self {
        let scenario = Arc::new(scenario);
        let mut world = Self {
            object: Arc::new(Object::new(&scenario, Some(Ask::of(1)), scenario.pods)),
            past: None,
            stamped: Arc::default(),
            pods: Vec::new(),
            past_pods: Arc::default(),
            pods_made: 0,
            secret: 0,
            large: false,
            answers: false,
            faults: 0,
            edits: 0,
            undisturbed: true,
            deaths: 0,
            were_active: Arc::default(),
            validated: Arc::default(),
            reached: Arc::default(),
            scenario,
        };
        (0..world.object.replicas).for_each(|_| world.pod_comes());
        (world.faults, world.edits) = (faults, edits);
        world
    }

    /// The same, at rest with model 1.
    pub(super) fn settled(scenario: Scenario, faults: u8, edits: u8) -> Self {
        let (natural, broken) = (Scenario { broken: None, ..scenario }, scenario.broken);
        let mut world = Self::new(natural, 0, 0);
        while let Some(event) = world.events().first() {
            world = world.after(*event).unwrap();
        }
        world.check_rest().unwrap();
        Arc::get_mut(&mut world.scenario).unwrap().broken = broken;
        (world.faults, world.edits) = (faults, edits);
        (world.past, world.past_pods) = (None, Arc::new(world.seen()));
        world
    }

    fn seen(&self) -> Vec<Seen> {
        let seen = |pod: &Arc<Pod>| Seen { name: pod.name.clone(), ready: pod.ready(), large: pod.large };
        self.pods.iter().map(seen).collect()
    }

    fn pod_comes(&mut self) {
        self.pods_made += 1;
        self.pods.push(Arc::new(Pod::new(format!("pod-{}", self.pods_made), self.large, self.scenario.tight)));
    }

    fn asked(&self, pod: &Pod) -> &Arc<Asked> {
        &self.object.asked[usize::from(pod.large)]
    }

    fn has_entry(&self, pod: &Pod) -> bool {
        self.object.report(&pod.name).is_some()
    }

    /// What can happen: first what must without any fault, in the order in which it would if all were quick, then the rest.
    pub(super) fn events(&self) -> Vec<Event> {
        let plan = self.decide(&self.newest());
        self.events_with(&plan)
    }

    fn newest<'a>(&'a self) -> (View<'a>, Vec<Seen>) {
        let none = View { object: &self.object, stamped: &self.stamped, pods: &[] };
        (none, self.seen())
    }

    fn events_with(&self, plan: &Plan) -> Vec<Event> {
        let mut events = Vec::new();
        let pods = || (0_u8..).zip(&self.pods);
        let models = |names: Vec<&str>| names.into_iter().map(|name| self.scenario.model(name)).collect::<Vec<_>>();
        events.extend(pods().filter(|(_, pod)| pod.cut_off).map(|(at, _)| Event::NodeBack(at)));
        events.extend(pods().filter(|(_, pod)| pod.trouble).map(|(at, _)| Event::Sound(at)));
        for (at, pod) in pods() {
            let failed = pod.versions.iter().filter(|(name, entry)| {
                matches!(entry.health, Some(WorkerHealth::Failed { .. })) && self.scenario.nature(name) != Nature::Dies
            });
            events.extend(failed.map(|(name, _)| Event::WorkerBack(at, self.scenario.model(name))));
        }
        let behind = |pod: &Arc<Pod>| pod.is_behind(self.asked(pod), self.has_entry(pod));
        events.extend(pods().filter(|(_, pod)| behind(pod)).map(|(at, _)| Event::See(at)));
        for (at, pod) in pods() {
            events.extend(models(pod.at_gates().collect()).into_iter().map(|model| Event::GatesEnd(at, model)));
            events.extend(models(pod.retiring().collect()).into_iter().map(|model| Event::Retired(at, model)));
        }
        let replicas = u32::try_from(self.object.replicas).unwrap();
        events.extend(pods().filter(|(_, pod)| pod.news(replicas).is_some()).map(|(at, _)| Event::Write(at)));
        let dies = |pod: &Arc<Pod>| {
            answers_by_nature(pod, &self.scenario, Nature::Dies)
                .and_then(|name| pod.versions.get(name))
                .is_some_and(gantry_rollout::Entry::is_up)
        };
        let is_worse = |pod: &Arc<Pod>| {
            let shares = pod.canary().map(|canary| &canary.version);
            shares.is_some_and(|name| self.scenario.nature(name) == Nature::Worse)
        };
        events.extend(pods().filter(|(_, pod)| is_worse(pod)).map(|(at, _)| Event::Worse(at)));
        events.extend(pods().filter(|(_, pod)| dies(pod)).map(|(at, _)| Event::Dies(at)));
        events.extend(self.replacement().map(|_| Event::Deployment));
        events.extend(self.would_write(plan).then_some(Event::Operator));
        events.extend(pods().filter(|(_, pod)| pod.waits()).map(|(at, _)| Event::Wait(at)));
        let due = plan.wake_at.is_some() && self.scenario.broken != Some(Broken::ClockStandsStill);
        // What is tried again and again does not keep time from going on.
        if due && events.iter().all(|event| matches!(event, Event::Wait(_))) {
            events.insert(0, Event::Time);
        }
        if self.edits > 0 {
            let other = |ask: &&Option<Ask>| **ask != self.object.ask;
            events.extend(self.scenario.asks.iter().filter(other).map(|ask| Event::Edit(*ask)));
        }
        if self.faults > 0 {
            self.faults(due && !events.is_empty(), plan, &mut events);
        }
        events
    }

    fn faults(&self, slow: bool, plan: &Plan, events: &mut Vec<Event>) {
        events.extend(slow.then_some(Event::Slow));
        for (at, pod) in (0_u8..).zip(&self.pods) {
            let is_late = |past: &Arc<Past>| {
                let asked = &past.object.asked[usize::from(pod.large)];
                pod.seen < past.object.resource_version && pod.is_behind(asked, true)
            };
            events.extend(self.past.as_ref().is_some_and(is_late).then_some(Event::SeeLate(at)));
            for (name, entry) in pod.versions.iter() {
                let model = self.scenario.model(name);
                if entry.phase == Phase::Preparing && self.scenario.nature(name) != Nature::Refused(GateName::Prompts) {
                    let gates = [GateName::Fetch, GateName::Memory, GateName::Load];
                    let can = gates.into_iter().filter(|gate| *gate != GateName::Load || !pod.only_checks(name));
                    events.extend(can.map(|gate| Event::GateRefuses(at, model, gate)));
                    let may_wait = entry.attempt.is_some() && !pod.is_stuck(name);
                    events.extend(may_wait.then_some(Event::GatesWait(at, model)));
                }
                events.extend(entry.is_up().then_some(Event::WorkerFails(at, model)));
            }
            events.extend(pod.canary().is_some().then_some(Event::Breaches(at)));
            if pod.versions.iter().next().is_some() {
                events.push(Event::Restarts(at));
            }
            events.push(Event::PodDies(at));
            events.extend((!pod.cut_off).then_some(Event::NodeLost(at)));
            events.extend((!pod.trouble).then_some(Event::Trouble(at)));
        }
        let writes = self.writes(plan);
        events.extend((1..writes).map(Event::Crash));
        events.extend(self.past.is_some().then_some(Event::StaleObject));
        events.extend((*self.past_pods != self.seen()).then_some(Event::StalePods));
    }

    /// What follows from an event, if it may happen.
    pub(super) fn after(&self, event: Event) -> Result<Self, Violation> {
        let plan = match event {
            Event::Operator | Event::Crash(_) | Event::Time | Event::Slow => Some(self.decide(&self.newest())),
            _ => None,
        };
        self.after_with(event, plan.as_ref())
    }

    /// Every event with what follows from it, and whether the first one is one that must happen.
    pub(super) fn successors(&self) -> Vec<(Event, Result<Self, Violation>)> {
        let plan = self.decide(&self.newest());
        self.events_with(&plan).into_iter().map(|event| (event, self.after_with(event, Some(&plan)))).collect()
    }

    fn after_with(&self, event: Event, plan: Option<&Plan>) -> Result<Self, Violation> {
        let mut world = self.clone();
        let broken = self.scenario.broken;
        let scenario = Arc::clone(&self.scenario);
        if event.is_fault() {
            world.faults = world.faults.saturating_sub(1);
            world.undisturbed = false;
        }
        if event.is_users() {
            world.edits = world.edits.saturating_sub(1);
        }
        match event {
            Event::NodeBack(at) => world.pod(at).cut_off = false,
            Event::Sound(at) => world.pod(at).trouble = false,
            Event::WorkerBack(at, model) => world.pod(at).worker(scenario.name(model), true, broken)?,
            Event::See(at) => {
                let (asked, has_entry) =
                    (Arc::clone(self.asked(&self.pods[usize::from(at)])), self.has_entry(&self.pods[usize::from(at)]));
                world.pod(at).see(&asked, self.object.resource_version, has_entry, broken)?;
            }
            Event::SeeLate(at) => {
                let pod = world.pod(at);
                let past = self.past.as_ref().unwrap();
                let (asked, has_entry) =
                    (&past.object.asked[usize::from(pod.large)], past.object.report(&pod.name).is_some());
                pod.marked = true;
                pod.see(asked, past.object.resource_version, has_entry, broken)?;
            }
            Event::GatesEnd(at, model) => {
                let name = scenario.name(model);
                let by_nature = match scenario.nature(name) {
                    Nature::Refused(gate) => Some(gate),
                    Nature::Good | Nature::Dies | Nature::Worse => None,
                };
                let pod = world.pod(at);
                if pod.gates_end(name, pod.natural(name, by_nature), broken)? {
                    Arc::make_mut(&mut world.validated).insert(name.to_owned());
                }
            }
            Event::GateRefuses(at, model, gate) => {
                let pod = world.pod(at);
                pod.marked = true;
                pod.gates_end(scenario.name(model), Some(gate), broken)?;
            }
            Event::GatesWait(at, model) => {
                let pod = world.pod(at);
                pod.marked = true;
                pod.gates_wait(scenario.name(model), broken)?;
            }
            Event::Retired(at, model) => world.pod(at).retired(scenario.name(model), broken)?,
            Event::Write(at) => {
                let replicas = u32::try_from(self.object.replicas).unwrap();
                if let Some(entry) = self.pods[usize::from(at)].news(replicas) {
                    let told = Told { hash: hash_of_report(&entry), report: Arc::new(entry.clone()) };
                    let written = world.write(|object| {
                        object.reports.retain(|told| told.report.pod != entry.pod);
                        object.reports.push(told);
                    });
                    world.pod(at).written(entry, written);
                }
            }
            Event::Dies(at) | Event::WorkerFails(at, _) => {
                let pod = world.pod(at);
                let name = match event {
                    Event::WorkerFails(_, model) => Some(scenario.name(model).to_owned()),
                    _ => answers_by_nature(pod, &scenario, Nature::Dies).cloned(),
                };
                pod.marked |= event.is_fault();
                pod.worker(&name.unwrap(), false, broken)?;
            }
            Event::Worse(at) | Event::Breaches(at) => {
                let pod = world.pod(at);
                pod.marked |= event.is_fault();
                pod.breaches(broken)?;
            }
            Event::Deployment => world.deployment(),
            Event::Operator => world.pass(&self.newest(), plan.unwrap(), u8::MAX)?,
            Event::Crash(writes) => world.pass(&self.newest(), plan.unwrap(), writes)?,
            Event::StaleObject => {
                let past = Arc::clone(self.past.as_ref().unwrap());
                let view = (View { object: &past.object, stamped: &past.stamped, pods: &[] }, self.seen());
                world.pass(&view, &self.decide(&view), u8::MAX)?;
            }
            Event::StalePods => {
                let view = (View { object: &self.object, stamped: &self.stamped, pods: &[] }, self.past_pods.to_vec());
                world.pass(&view, &self.decide(&view), u8::MAX)?;
            }
            Event::Wait(at) => world.pod(at).wait(broken)?,
            Event::Time | Event::Slow => {
                if event == Event::Slow {
                    let late = |pod: &Arc<Pod>| {
                        pod.is_behind(self.asked(pod), self.has_entry(pod))
                            || pod.at_gates().next().is_some()
                            || pod.news(1).is_some()
                    };
                    for (pod, before) in world.pods.iter_mut().zip(&self.pods) {
                        if late(before) {
                            Arc::make_mut(pod).marked = true;
                        }
                    }
                }
                if let Some(at) = plan.and_then(|plan| plan.wake_at) {
                    world.time_goes_on(at.duration_since(NOW));
                }
            }
            Event::Edit(ask) => world.change(|object| object.ask = ask),
            Event::Scale(replicas) => {
                let (before, left) = (world.pods.len(), usize::try_from(replicas).unwrap());
                world.change(|object| object.replicas = replicas);
                world.pods.truncate(left);
                // What befell those that go, and that they go, befell the fleet.
                world.deaths = world.deaths.saturating_add(u8::try_from(before.saturating_sub(left)).unwrap());
            }
            Event::SecretChanges => world.secret += 1,
            Event::Restarts(at) => world.pod(at).restart(),
            Event::PodDies(at) => {
                world.pods.remove(usize::from(at));
                world.deaths = world.deaths.saturating_add(1);
            }
            Event::NodeLost(at) => {
                let pod = world.pod(at);
                (pod.cut_off, pod.marked) = (true, true);
            }
            Event::Trouble(at) => {
                let pod = world.pod(at);
                (pod.trouble, pod.marked) = (true, true);
            }
        }
        world.check_pods(self, event)?;
        let (before, now) = (self.seen(), world.seen());
        if before != now {
            world.past_pods = Arc::new(before);
        }
        Ok(world)
    }

    fn pod(&mut self, at: u8) -> &mut Pod {
        Arc::make_mut(&mut self.pods[usize::from(at)])
    }

    /// A write of an entry. Gives the resource version.
    fn write(&mut self, change: impl FnOnce(&mut Object)) -> u64 {
        let object = Arc::make_mut(&mut self.object);
        change(object);
        object.resource_version += 1;
        object.resource_version
    }

    /// A write of the spec or the operator's part of the status, of which stale stores may still hold what was before.
    fn change(&mut self, change: impl FnOnce(&mut Object)) {
        self.past = Some(Arc::new(Past { object: (*self.object).clone(), stamped: self.stamped.to_vec() }));
        self.write(change);
    }

    /// What the Deployment's controller does next: one step of a rolling update, with an extra pod, and none missing of those that
    /// answer. All at once while none does.
    fn replacement(&self) -> Option<Replacement> {
        let replicas = usize::try_from(self.object.replicas).unwrap();
        let comes = self.pods.iter().any(|pod| pod.large == self.large && !pod.ready());
        match self.pods.iter().position(|pod| pod.large != self.large) {
            None if self.pods.len() > replicas => Some(Replacement::Goes(self.pods.len() - 1)),
            Some(_) if !self.answers => Some(Replacement::All),
            _ if self.pods.len() < replicas => Some(Replacement::Comes),
            None => None,
            Some(_) if comes => None,
            Some(oldest) if self.pods.len() > replicas => Some(Replacement::Goes(oldest)),
            Some(_) => Some(Replacement::Comes),
        }
    }

    fn deployment(&mut self) {
        let marked = |pods: &[Arc<Pod>]| pods.iter().filter(|pod| pod.marked).count();
        let before = marked(&self.pods);
        match self.replacement() {
            None => {}
            Some(Replacement::Comes) => self.pod_comes(),
            Some(Replacement::Goes(at)) => drop(self.pods.remove(at)),
            Some(Replacement::All) => {
                let (large, replicas) = (self.large, usize::try_from(self.object.replicas).unwrap());
                self.pods.retain(|pod| pod.large == large);
                while self.pods.len() < replicas {
                    self.pod_comes();
                }
            }
        }
        // What befell one is not forgotten with it: its word was heard.
        self.deaths = self.deaths.saturating_add(u8::try_from(before - marked(&self.pods)).unwrap());
    }

    /// What an operator decides that sees this.
    fn decide(&self, (view, pods): &(View, Vec<Seen>)) -> Plan {
        self.decided(&View { object: view.object, stamped: view.stamped, pods }, decide)
    }

    /// Has `by` look at the world as an operator sees it.
    fn decided<T>(&self, view: &View, by: impl FnOnce(&decide::World) -> T) -> T {
        let View { object, stamped, pods } = view;
        let renewed = (self.secret > 0).then(|| {
            let mut spec = self.scenario.spec(object.ask?).clone();
            let (judged, _) = spec.wanted.judged.split_once('+')?;
            spec.wanted.judged = format!("{judged}+Secret:hf={}", self.secret);
            Some(spec)
        });
        let spec =
            renewed.as_ref().map_or_else(|| object.ask.map(|ask| self.scenario.spec(ask)), |renewed| renewed.as_ref());
        let now = object.state.rollout.as_ref();
        let lies: Vec<ReplicaStatus> = match (self.scenario.broken, now) {
            (Some(Broken::TakesAllForPrepared), Some(now)) if now.step == RolloutStep::Prepare => {
                let prepared = |told: &Told| ReplicaStatus {
                    attempt: Some(now.attempt),
                    prepared: Some(now.version.clone()),
                    candidate: None,
                    ..(*told.report).clone()
                };
                object.reports.iter().map(prepared).collect()
            }
            _ => Vec::new(),
        };
        let report = |name: &str| {
            let lie = lies.iter().find(|report| report.pod == name);
            lie.or_else(|| object.report(name).map(|told| &*told.report))
        };
        let counted = |pod: &'_ Seen| (pod.ready, object.ask.is_some_and(|ask| ask.is_large() != pod.large));
        let mut pods: Vec<_> = pods
            .iter()
            .map(|pod| {
                let (ready, outdated) = counted(pod);
                CountedPod { name: &pod.name, ready, report: report(&pod.name), outdated }
            })
            .collect();
        if self.scenario.broken == Some(Broken::HearsOnlyRefusals) {
            let refuses = |pod: &CountedPod| {
                let failed = |candidate: &CandidateStatus| candidate.phase == CandidatePhase::Failed;
                pod.report.is_some_and(|report| {
                    report.candidate.as_ref().is_some_and(failed) || report.health == ReplicaHealth::Failed
                })
            };
            if pods.iter().any(refuses) {
                pods.retain(refuses);
            }
        }
        by(&decide::World {
            now: NOW,
            spec,
            state: &object.state,
            pods: &pods,
            target_replicas: object.replicas,
            stamped,
            missing_pod: None,
            sides: decide::SidesSeen::default(),
        })
    }

    /// What the rules say of the next write, once it is spoilt, if only so many pods had reported.
    pub(super) fn judge(&self, reported: usize, spoil: impl FnOnce(&mut Plan)) -> (Option<Transition>, bool) {
        let newest = self.newest();
        let mut plan = self.decide(&newest);
        spoil(&mut plan);
        let mut pods = newest.1;
        pods.iter_mut().skip(reported).for_each(|pod| pod.name = "silent".to_owned());
        let view = View { pods: &pods, ..newest.0 };
        let holds = self.decided(&view, |world| rules::check(world, &plan, &BTreeSet::new())).is_ok();
        (plan.transition, holds)
    }

    /// Entries of pods that are gone, as an operator sees them.
    fn gone(&self) -> bool {
        self.object.reports.iter().any(|told| !self.pods.iter().any(|pod| pod.name == told.report.pod))
    }

    fn told_of_deployment(&self) -> (bool, bool) {
        let large = self.object.ask.map_or(self.large, Ask::is_large);
        let has = |pod: &Arc<Pod>| self.object.report(&pod.name).is_some_and(|told| told.report.version.is_some());
        let answers = self.pods.iter().any(has);
        if self.object.ask.is_some() { (large, answers) } else { (self.large, self.answers) }
    }

    fn would_write(&self, plan: &Plan) -> bool {
        self.writes(plan) > 0 || self.told_of_deployment() != (self.large, self.answers)
    }

    /// Writes of a pass: each group is one that may be done or not.
    fn writes(&self, plan: &Plan) -> u8 {
        u8::from(plan.state != self.object.state)
            + u8::from(!plan.stamp.is_empty())
            + u8::from(!plan.delete.is_empty())
            + u8::from(self.gone())
    }

    /// A pass that ends after so many `writes`, in the order of the controller's.
    fn pass(&mut self, (view, pods): &(View, Vec<Seen>), plan: &Plan, mut writes: u8) -> Result<(), Violation> {
        let view = View { object: view.object, stamped: view.stamped, pods };
        let plan = &self.with_broken_rule(&view, plan.clone());
        let goes_on = plan.transition.as_ref().is_some_and(|step| !matches!(step, Transition::Started { .. }));
        let mut may = |is_one: bool| {
            let may = is_one && writes > 0;
            writes -= u8::from(may);
            may
        };
        let changes = plan.state != view.object.state;
        if goes_on && !(may(changes) && self.write_state(&view, plan)?) {
            return Ok(());
        }
        if view.object.ask.is_some() {
            (self.large, self.answers) = self.told_of_deployment();
        }
        if may(!plan.stamp.is_empty()) {
            let mut stamped = self.stamped.to_vec();
            for version in &plan.stamp {
                let revision = 1 + stamped.iter().map(|stamped| stamped.revision).max().unwrap_or(0);
                if !stamped.iter().any(|stamped| stamped.version.name == version.name) {
                    stamped.push(StampedVersion { version: version.clone(), revision, is_refused: false });
                }
            }
            self.stamped = Arc::new(stamped);
        }
        if !goes_on && changes && !(may(true) && self.write_state(&view, plan)?) {
            return Ok(());
        }
        if may(!plan.delete.is_empty()) {
            let state = &self.object.state;
            let named = [&state.active, &state.candidate, &state.previous].into_iter().flatten();
            if let Some(name) = named.into_iter().find(|name| plan.delete.contains(name)) {
                return Err(Invariant::NothingThatServesIsDeleted.broken(format!("the operator deletes {name}")));
            }
            let mut stamped = self.stamped.to_vec();
            stamped.retain(|stamped| !plan.delete.contains(&stamped.version.name));
            self.stamped = Arc::new(stamped);
        }
        if may(self.gone()) {
            let lives: Vec<_> = self.pods.iter().map(|pod| pod.name.clone()).collect();
            self.write(|object| object.reports.retain(|told| lives.contains(&told.report.pod)));
        }
        Ok(())
    }

    fn with_broken_rule(&self, view: &View, mut plan: Plan) -> Plan {
        match self.scenario.broken {
            Some(Broken::DeletesTheRest) => {
                let wanted = view.object.ask.map(|ask| self.scenario.name(ask.model));
                let rest = view.stamped.iter().map(|stamped| stamped.version.name.clone());
                plan.delete.extend(rest.filter(|name| Some(name.as_str()) != wanted));
            }
            Some(Broken::ForgetsTheWayBack) => plan.state.previous = None,
            Some(Broken::QuarantinesAll) => {
                plan.state.quarantined = self.pods.iter().map(|pod| pod.name.clone()).collect();
            }
            Some(Broken::LetsSharesFall) => {
                if let Some(canary) = plan.state.rollout.as_mut().and_then(|rollout| rollout.canary.as_mut())
                    && canary.step == 2
                {
                    canary.share = "1%".into();
                }
            }
            Some(Broken::SharesAtOnce) => {
                if let Some(rollout) = plan.state.rollout.as_mut().filter(|now| now.step == RolloutStep::Prepare) {
                    rollout.step = RolloutStep::Canary;
                    let (since, until) = (rollout.started_at.clone(), Some(rollout.deadline.clone()));
                    rollout.canary = Some(CanaryStatus { share: "5%".into(), step: 1, steps: 2, since, until });
                }
            }
            _ => {}
        }
        plan
    }

    /// The API server refuses what was not decided from the newest object. Says whether it took it.
    fn write_state(&mut self, view: &View, plan: &Plan) -> Result<bool, Violation> {
        if view.object.resource_version != self.object.resource_version {
            return Ok(false);
        }
        let RolloutState { active, candidate, previous, .. } = &plan.state;
        if let Some(name) = [active, candidate, previous].into_iter().flatten().find(|name| plan.delete.contains(name))
        {
            return Err(Invariant::NothingThatServesIsDeleted.broken(format!("the operator is to delete {name}")));
        }
        let checked = self.decided(view, |world| rules::check(world, plan, &self.were_active));
        checked.map_err(|error| Invariant::EveryWriteKeepsTheRules.broken(error.to_string()))?;
        self.check_verdict(&plan.state)?;
        let step = |state: &RolloutState| state.rollout.as_ref().map(|rollout| rollout.step);
        if step(&self.object.state) == Some(RolloutStep::Prepare) && step(&plan.state) == Some(RolloutStep::Bake) {
            Arc::make_mut(&mut self.reached).insert("Resumed");
        }
        Arc::make_mut(&mut self.reached).extend(plan.transition.as_ref().map(word));
        if !plan.state.quarantined.is_empty() {
            Arc::make_mut(&mut self.reached).insert("Quarantined");
        }
        Arc::make_mut(&mut self.were_active).extend(plan.state.active.clone());
        let scenario = Arc::clone(&self.scenario);
        self.change(|object| object.set_state(&scenario, plan.state.clone()));
        // As the status of a ModelVersion says it.
        let mut stamped = self.stamped.to_vec();
        for one in &mut stamped {
            let is = |name: Option<&String>| name == Some(&one.version.name);
            let is_tried = is(plan.state.active.as_ref()) || is(plan.state.candidate.as_ref());
            let of_model = |rejected: &&RejectedStatus| {
                rejected.outcome == RejectedOutcome::RolledBack || decide::judges_the_model(rejected.gate)
            };
            one.is_refused |= is(plan.state.rejected.as_ref().filter(of_model).map(|rejected| &rejected.version));
            one.is_refused &= !is_tried;
        }
        self.stamped = Arc::new(stamped);
        Ok(true)
    }

    /// What befell one pod is not the fleet's verdict, unless nobody else answers: then nobody is waited for. In a fleet of two, which does not tell who is right when the time is
    /// up, a candidate that one of them has not is refused then (decision 16).
    fn check_verdict(&self, next: &RolloutState) -> Result<(), Violation> {
        let Some(rejected) = next.rejected.as_ref().filter(|one| Some(*one) != self.object.state.rejected.as_ref())
        else {
            return Ok(());
        };
        let befallen = self.pods.iter().filter(|pod| pod.marked).count() + usize::from(self.deaths);
        let over = self.object.state.rollout.as_ref().is_some_and(|rollout| rollout.deadline.0 <= NOW);
        let can_tell = self.scenario.pods >= if over { 3 } else { 2 };
        let is_good = self.scenario.nature(&rejected.version) == Nature::Good;
        let goes_back = rejected.outcome == RejectedOutcome::RolledBack;
        if goes_back && !self.pods.iter().any(|pod| pod.ready()) {
            return Ok(());
        }
        if is_good && befallen <= 1 && can_tell && self.object.replicas == self.scenario.pods {
            let how = format!("{} is good, and refused: {}", rejected.version, rejected.message);
            return Err(Invariant::OnePodIsNotTheFleet.broken(how));
        }
        Ok(())
    }

    fn check_pods(&self, before: &Self, event: Event) -> Result<(), Violation> {
        for pod in &self.pods {
            let Some(name) = pod.serving() else { continue };
            // Where one goes for the other, each pod answers with what it has proved itself.
            let was_active = self.were_active.contains(name) || self.scenario.holds;
            if !self.validated.contains(name) || !was_active {
                let how = format!("{} answers with {name}, which no pod has passed through its gates", pod.name);
                return Err(Invariant::OnlyValidatedAnswer.broken(how));
            }
        }
        if event.may_silence() {
            let answered = before.pods.iter().any(|pod| pod.ready());
            if event == Event::Deployment && answered && !self.pods.iter().any(|pod| pod.ready()) && before.answers {
                return Err(Invariant::SomeoneAnswers.broken("the last pod that answers is replaced"));
            }
            return Ok(());
        }
        // One whose turn it is takes itself out, since others answer, and so does one that answers with what was taken back.
        let gives_way = |pod: &&Arc<Pod>| {
            !self.pods.iter().any(|now| now.name == pod.name && (now.holds() || now.is_quarantined()))
        };
        // What a pod knows of the others may be old where some of them have gone, or have lost their workers since.
        let lost_a_worker = |pod: &Arc<Pod>| pod.serving().is_some() && !pod.is_quarantined() && !pod.ready();
        let is_old_news = self.pods.iter().any(|pod| pod.is_quarantined()) && self.pods.iter().any(lost_a_worker);
        if self.undisturbed
            && !is_old_news
            && before.pods.iter().any(|pod| pod.ready())
            && !self.pods.iter().any(|pod| pod.ready())
        {
            return Err(Invariant::SomeoneAnswers.broken("nobody answers any more"));
        }
        for pod in before.pods.iter().filter(|pod| pod.ready()).filter(gives_way) {
            if !self.pods.iter().any(|now| now.name == pod.name && now.ready()) {
                return Err(Invariant::SomeoneAnswers.broken(format!("{} answers no more", pod.name)));
            }
        }
        Ok(())
    }

    /// What must be where nothing happens any more.
    pub(super) fn check_rest(&self) -> Result<(), Violation> {
        let Object { state, ask, replicas, .. } = &*self.object;
        let wrong = |how: &str| Err(Invariant::ItEnds.broken(how));
        if self.pods.len() != usize::try_from(*replicas).unwrap() {
            return wrong("pods are missing");
        }
        // Without pods nothing is judged, and a bake is not watched.
        if state.rollout.is_some() {
            return wrong("a rollout is in progress for ever");
        }
        let parts = [&state.candidate, &state.previous];
        if parts.into_iter().any(Option::is_some) {
            return wrong("a version has a part to play for ever");
        }
        if let Some(ask) = ask.filter(|_| *replicas > 0) {
            let name = self.scenario.name(ask.model);
            let is_active = state.active.as_deref() == Some(name);
            let latched = state.rejected.as_ref().is_some_and(|rejected| rejected.version == name);
            if !is_active && !latched {
                return wrong("what is asked for has no verdict");
            }
            if is_active && matches!(self.scenario.nature(name), Nature::Refused(_)) {
                return wrong("a version that a gate refuses is active");
            }
            if is_active && self.undisturbed && self.scenario.shares && self.scenario.nature(name) == Nature::Worse {
                return wrong("a version that did worse in its canary is active");
            }
            if !is_active && self.undisturbed && self.scenario.nature(name) == Nature::Good {
                return wrong("nothing was wrong, and a good version is refused");
            }
        }
        for pod in &self.pods {
            let others = pod.versions.iter().any(|(name, _)| Some(name) != state.active.as_ref());
            let dies = state.active.as_ref().is_some_and(|active| self.scenario.nature(active) == Nature::Dies);
            if pod.serving() != state.active.as_ref() || others || state.active.is_some() && !pod.ready() && !dies {
                let how = format!("{} has {:?} at rest, and {:?} is active", pod.name, pod.serving(), state.active);
                return Err(Invariant::PodsAgree.broken(how));
            }
        }
        let limit = 4;
        if ask.is_some() && self.stamped.len() > limit {
            return wrong("versions pile up");
        }
        Ok(())
    }

    /// Moves all that is known of times back.
    fn time_goes_on(&mut self, by: SignedDuration) {
        let scenario = Arc::clone(&self.scenario);
        let mut state = self.object.state.clone();
        state.rollout = state.rollout.as_ref().map(|rollout| earlier(rollout, by));
        state.rejected = state.rejected.as_ref().map(|rejected| earlier(rejected, by));
        let object = Arc::make_mut(&mut self.object);
        object.set_state(&scenario, state);
        // Stale stores do not hold what is older than a deadline.
        self.past = None;
    }

    /// Of two worlds with the same hash the same is to be expected.
    pub(super) fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let Object { state, state_hash, ask, replicas, reports, .. } = &*self.object;
        (state_hash, ask, replicas, self.secret, self.large, self.answers).hash(&mut hasher);
        (self.faults, self.edits, self.undisturbed, self.deaths).hash(&mut hasher);
        (&self.were_active, &self.validated).hash(&mut hasher);
        self.stamped.iter().for_each(|stamped| (&stamped.version.name, stamped.is_refused).hash(&mut hasher));
        let past = self.past.as_ref().filter(|_| self.faults > 0);
        if let Some(past) = past {
            (past.object.state_hash, past.object.ask, past.object.replicas).hash(&mut hasher);
            past.stamped.iter().for_each(|stamped| (&stamped.version.name, stamped.is_refused).hash(&mut hasher));
        }
        let figures =
            state.rollout.as_ref().and_then(|rollout| rollout.progress.as_ref()).map(|progress| &progress.pods);
        let figure = |name: &str| figures.and_then(|all| all.iter().find(|one| one.pod == name)).map(|one| one.figure);
        let lives = |name: &str| self.pods.iter().any(|pod| pod.name == name);
        // Which pod is which is nothing to anybody.
        let mut pods: Vec<u64> = Vec::with_capacity(8);
        for pod in &self.pods {
            let mut hasher = DefaultHasher::new();
            pod.hash(&mut hasher);
            let turn = state.rollout.as_ref().and_then(|rollout| rollout.turn.as_ref());
            turn.filter(|turn| turn.pod == pod.name).map(|turn| turn.yields).hash(&mut hasher);
            state.quarantined.contains(&pod.name).hash(&mut hasher);
            self.object.report(&pod.name).map(|told| told.hash).hash(&mut hasher);
            figure(&pod.name).hash(&mut hasher);
            if let Some(past) = past {
                let turn = past.object.state.rollout.as_ref().and_then(|rollout| rollout.turn.as_ref());
                turn.filter(|turn| turn.pod == pod.name).map(|turn| turn.yields).hash(&mut hasher);
                past.object.state.quarantined.contains(&pod.name).hash(&mut hasher);
                (pod.seen < past.object.resource_version, past.object.report(&pod.name).is_some()).hash(&mut hasher);
            }
            if self.faults > 0 {
                self.past_pods
                    .iter()
                    .find(|seen| seen.name == pod.name)
                    .map(|seen| (seen.ready, seen.large))
                    .hash(&mut hasher);
            }
            pods.push(hasher.finish());
        }
        pods.extend(reports.iter().filter(|told| !lives(&told.report.pod)).map(|told| told.hash));
        let gone = figures.into_iter().flatten().filter(|one| !lives(&one.pod));
        pods.extend(gone.map(|one| u64::MAX - one.figure.unsigned_abs()));
        if self.faults > 0 {
            pods.extend(self.past_pods.iter().filter(|seen| !lives(&seen.name)).map(|seen| 1 + u64::from(seen.ready)));
        }
        pods.sort_unstable();
        pods.hash(&mut hasher);
        hasher.finish()
    }
}

/// The version of this nature that answers in the pod, or a share of its requests.
fn answers_by_nature<'a>(pod: &'a Pod, scenario: &Scenario, nature: Nature) -> Option<&'a String> {
    let shares = pod.canary().map(|canary| &canary.version);
    pod.serving().into_iter().chain(shares).find(|name| scenario.nature(name) == nature)
}

/// The step in a word.
fn word(transition: &Transition) -> &'static str {
    match transition {
        Transition::Started { .. } => "Started",
        Transition::Cancelled { .. } => "Cancelled",
        Transition::Canary { .. } => "Canary",
        Transition::Committed { .. } => "Committed",
        Transition::Baking { .. } => "Baking",
        Transition::Settled { .. } => "Settled",
        Transition::Rejected { .. } => "Rejected",
        Transition::RollingBack { .. } => "RollingBack",
        Transition::RolledBack { .. } => "RolledBack",
    }
}

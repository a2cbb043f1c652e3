//! The versions that a pod holds, and what follows from what becomes of them.
//!
//! Whoever carries out the plan tells this owner what it has begun and how that ended, and passes the lines that the gates
//! write ([`Lines`]) along; time comes as a value. Absent: gates, workers and requests themselves.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use gantry_crds::inference_service::SourceSpec;
use gantry_crds::status::{
    CandidatePhase, CandidateStatus, GateName, ModelState, NamedVersion, ReplicaCanary, ReplicaHealth, WaitReason,
};

use crate::desired::Desired;
use crate::health::WorkerHealth;
use crate::limits::{PLAN_ROUNDS_MAX, RESTORE_ALONE, RETRY_IN_VAIN, RETRY_MAX, RETRY_MIN};
use crate::line::{self, Lines, Refusal, blank};
use crate::phase::{Next, Phase, Step, next};
use crate::plan::{Action, Current, Known, Purpose, Route, plan};
use crate::snapshot::Snapshot;
use crate::told::{Told, refused_alike};

/// What to do about a pod whose release is older than what is asked of it.
const NEWER_IMAGE: &str = "update the server's image (annotate the service with gantry.dev/restart=<any new value>)";

/// The versions that a pod holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Versions {
    entries: BTreeMap<String, Entry>,
    route: Route,
    /// What the version is that answered before requests began to wait: the status may have forgotten it by the time that it is needed.
    held_from: Option<NamedVersion>,
    /// Requests wait for a version, and none could be loaded since.
    stalled: bool,
}

/// One version.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Where it is in its life.
    pub phase: Phase,
    /// What it was begun with.
    pub made_of: NamedVersion,
    /// When it was begun.
    pub begun: Instant,
    /// The attempt for which it is or was judged; `None` when that was to restore it as the active one.
    pub attempt: Option<i64>,
    /// Whether every gate of the attempt let it through.
    pub passed: bool,
    /// How its workers are; `None` while it is not loaded.
    pub health: Option<WorkerHealth>,
    /// Why it is not here.
    pub refusal: Option<Refusal>,
    /// When it is tried again.
    pub retry_at: Option<Instant>,
    /// Tries in a row that ended without it.
    pub failures: u32,
    /// A try that ended so had all other versions unloaded for it: until when they are not once more.
    pub in_vain_until: Option<Instant>,
    /// How the last try ended.
    pub told: Told,
}

/// How the gates of a version ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Every one let it through, and its worker answers.
    Passed,
    /// Those did that need nothing of it loaded, and more was not asked.
    Checked,
    /// One did not.
    Refused(Refusal),
    /// It was not wanted any more.
    Cancelled,
}

impl Versions {
    /// Which versions answer.
    #[must_use]
    pub fn route(&self) -> &Route {
        &self.route
    }

    /// Whether requests wait here for a candidate while other pods answer them, whatever this one answered with before. One that goes
    /// back from the candidate is there for them.
    #[must_use]
    pub fn yields(&self, desired: &Desired) -> bool {
        let is_candidate =
            |from: &String| desired.candidate.as_ref().is_some_and(|candidate| candidate.version == *from);
        desired.yields && self.route.is_held() && !self.route.held_from.as_ref().is_some_and(is_candidate)
    }

    /// Whether requests are to go to other pods: what this one answers with was refused or taken back.
    #[must_use]
    pub fn is_quarantined(&self, desired: &Desired) -> bool {
        desired.quarantined && self.route.active.is_some() && self.route.active != desired.active
    }

    /// A version of which something is there.
    #[must_use]
    pub fn get(&self, version: &str) -> Option<&Entry> {
        self.entries.get(version)
    }

    /// Every version of which something is there, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&String, &Entry)> {
        self.entries.iter()
    }

    /// Plans until there is nothing more to do, and notes that it is done. Gives what is to be carried out, in this order.
    #[must_use]
    pub fn settle(&mut self, desired: &Desired, now: Instant, lines: &mut Lines) -> Vec<Action> {
        let desired = &*self.with_way_back(desired);
        let mut done = self.refuse_failed(desired, now, lines);
        for round in 0.. {
            let actions = self.plan(desired, now, lines);
            if actions.is_empty() {
                break;
            }
            if round == PLAN_ROUNDS_MAX {
                let left = actions.len();
                tracing::error!(left, "the plan does not settle; it goes on with the next event");
                break;
            }
            done.extend(actions.into_iter().filter(|action| self.note(desired, action, now, lines)));
        }
        // Whatever is tried from here on, nobody is to count on it before it answers.
        let rests = |entry: &Entry| matches!(entry.phase, Phase::Refused | Phase::Checked);
        self.stalled = self.route.is_held() && (self.stalled || self.entries.values().all(rests));
        done
    }

    /// What there is to do.
    #[must_use]
    pub fn plan(&self, desired: &Desired, now: Instant, lines: &Lines) -> Vec<Action> {
        let desired = &*self.with_way_back(desired);
        plan(desired, &self.current(desired, now, lines))
    }

    /// What is asked, with what answered before requests began to wait.
    fn with_way_back<'a>(&self, desired: &'a Desired) -> Cow<'a, Desired> {
        match &self.held_from {
            Some(before) if !desired.versions.contains_key(&before.name) => {
                let mut desired = desired.clone();
                desired.versions.insert(before.name.clone(), before.clone());
                Cow::Owned(desired)
            }
            _ => Cow::Borrowed(desired),
        }
    }

    /// Whether requests wait for a version, and neither the next one nor the one before could be loaded.
    #[must_use]
    pub fn is_stalled(&self) -> bool {
        self.stalled
    }

    /// Notes that an action is carried out. Says whether it may be.
    fn note(&mut self, desired: &Desired, action: &Action, now: Instant, lines: &mut Lines) -> bool {
        match action {
            Action::Route(route) => {
                self.set_route(route.clone());
                true
            }
            Action::Prepare { version, purpose, .. } => match desired.versions.get(version) {
                Some(named) => self.prepare(named, purpose, now, lines),
                None => false,
            },
            Action::Cancel { version } => self.step(version, Step::Cancel, lines),
            Action::Retire { version } => {
                if let Some(entry) = self.entries.get_mut(version) {
                    entry.health = None;
                }
                self.step(version, Step::Retire, lines)
            }
            Action::Forget { version } => self.step(version, Step::Forget, lines),
            // No plan has it: see `refuse_failed`.
            Action::Drop { .. } => false,
        }
    }

    fn current(&self, desired: &Desired, now: Instant, lines: &Lines) -> Current {
        let known = |name: &String, entry: &Entry| Known {
            phase: entry.phase,
            attempt: entry.attempt,
            passed: entry.passed,
            worker_up: entry.is_up(),
            retry_due: entry.retry_at.is_some_and(|at| now >= at),
            outdated: desired.versions.get(name).is_some_and(|version| sources(version) != sources(&entry.made_of)),
            slow: entry.slow_at().is_some_and(|at| now >= at),
            in_vain: entry.in_vain_until.is_some_and(|until| now < until),
            waits: lines.get(name).is_some_and(|line| line.wait_reason.is_some()),
        };
        Current {
            route: self.route.clone(),
            versions: self.entries.iter().map(|(name, entry)| (name.clone(), known(name, entry))).collect(),
        }
    }

    /// When time alone may change the plan next.
    #[must_use]
    pub fn next_retry(&self, now: Instant) -> Option<Instant> {
        let times = self
            .entries
            .values()
            .flat_map(|entry| [entry.retry_at, entry.slow_at(), entry.in_vain_until].into_iter().flatten());
        times.filter(|at| *at > now).min()
    }

    /// Moves a version along the table of phases, and says whether the table has that step.
    fn step(&mut self, version: &str, step: Step, lines: &mut Lines) -> bool {
        let phase = self.entries.get(version).map(|entry| entry.phase);
        let (from, word) = (phase.map(Phase::as_str), step.as_str());
        match next(phase, step) {
            Some(Next::Phase(to)) => {
                tracing::info!(version, from, step = word, to = to.as_str(), "version moves");
                if let Some(entry) = self.entries.get_mut(version) {
                    entry.phase = to;
                }
                true
            }
            Some(Next::Gone) => {
                tracing::info!(version, from, step = word, "version is gone");
                self.entries.remove(version);
                lines.remove(version);
                true
            }
            None => {
                tracing::error!(version, from, step = word, "a step that must not be; it is left out");
                false
            }
        }
    }

    /// Notes which versions answer from now on.
    fn set_route(&mut self, route: Route) {
        if route.active != self.route.active {
            tracing::info!(from = self.route.active, to = route.active, previous = route.previous, "switched");
        }
        if route.canary != self.route.canary {
            let share = route.canary.as_ref().map(|canary| canary.share.percent().0);
            let version = route.canary.as_ref().or(self.route.canary.as_ref()).map(|canary| &canary.version);
            tracing::info!(version, share, "the share of a candidate changes");
        }
        let from = route.held_from.as_ref().filter(|_| route.is_held());
        let known = self.held_from.take().filter(|known| from == Some(&known.name));
        self.held_from =
            from.and_then(|from| known.or_else(|| self.entries.get(from).map(|entry| entry.made_of.clone())));
        self.route = route;
    }

    /// A version begins to pass its gates, with a new line. Says whether it may.
    fn prepare(&mut self, named: &NamedVersion, purpose: &Purpose, now: Instant, lines: &mut Lines) -> bool {
        let attempt = match purpose {
            Purpose::Restore => None,
            Purpose::Candidate { attempt } => Some(*attempt),
        };
        lines.insert(named.name.clone(), blank(&named.name, None));
        let entry = self.entries.entry(named.name.clone()).or_insert_with(|| Entry {
            // Only the table makes this a phase that anyone sees.
            phase: Phase::Waiting,
            made_of: named.clone(),
            begun: now,
            attempt: None,
            passed: false,
            health: None,
            refusal: None,
            retry_at: None,
            failures: 0,
            in_vain_until: None,
            told: Told::default(),
        });
        // Why it is not here is true until it is: what is tried again and again is told once.
        if entry.attempt != attempt || sources(&entry.made_of) != sources(named) {
            (entry.refusal, entry.told, entry.in_vain_until) = (None, Told::default(), None);
        }
        (entry.made_of, entry.begun) = (named.clone(), now);
        entry.attempt = attempt;
        entry.passed = false;
        entry.retry_at = None;
        self.step(&named.name, Step::Prepare, lines)
    }

    /// Notes that a version is unloaded now. Says whether it was on its way there.
    pub fn retired(&mut self, version: &str, lines: &mut Lines) -> bool {
        self.step(version, Step::Retired, lines)
    }

    /// Notes how the gates of a version ended. Says whether it had any.
    pub fn ended(&mut self, version: &str, outcome: Outcome, now: Instant, lines: &mut Lines) -> bool {
        let room_expected = self.entries.iter().any(|(name, entry)| {
            name != version
                && Some(name) != self.route.active.as_ref()
                && (entry.health.is_some() || entry.phase == Phase::Retiring)
        });
        let held = self.route.is_held();
        let Some(entry) = self.entries.get_mut(version) else { return false };
        let cancelling = entry.phase == Phase::Cancelling;
        let step = match outcome {
            Outcome::Passed => {
                entry.health.get_or_insert(WorkerHealth::Ready);
                entry.passed = !cancelling;
                (entry.refusal, entry.told) = (None, Told::default());
                (entry.failures, entry.in_vain_until) = (0, None);
                if let Some(line) = lines.get_mut(version) {
                    line::phase(line, CandidatePhase::Prepared);
                }
                Step::Passed
            }
            Outcome::Checked => {
                (entry.refusal, entry.told) = (None, Told::default());
                if let Some(line) = lines.get_mut(version) {
                    line::phase(line, CandidatePhase::Checked);
                }
                Step::Checked
            }
            // What is loaded already stays so, whatever was asked of it meanwhile.
            Outcome::Cancelled | Outcome::Refused(_) if cancelling && entry.health.is_some() => Step::Passed,
            Outcome::Cancelled => Step::Cancelled,
            Outcome::Refused(refusal) if refusal.gate == GateName::Memory && room_expected => {
                entry.retry_at = Some(now + retry_wait(entry.failures));
                entry.failures = entry.failures.saturating_add(1);
                if let Some(line) = lines.get_mut(version) {
                    line::phase(line, CandidatePhase::Validating);
                    let message = format!("waits until another version is unloaded: {}", refusal.message);
                    line::waits_for(line, WaitReason::NoRoom, &message);
                }
                entry.told.ended(lines.get(version));
                Step::NoRoom
            }
            Outcome::Refused(refusal) => {
                entry.refuse(refusal, now, lines);
                entry.in_vain_until = held.then_some(now + RETRY_IN_VAIN).or(entry.in_vain_until);
                Step::Refused
            }
        };
        if cancelling {
            entry.attempt = None;
        }
        self.step(version, step, lines)
    }

    /// Takes in how the workers of a loaded version are.
    pub fn observe(&mut self, version: &str, health: WorkerHealth) {
        if let Some(entry) = self.entries.get_mut(version).filter(|entry| entry.health.is_some()) {
            entry.health = Some(health);
        }
    }

    /// Refuses versions whose workers failed before they were made the active one: that is the operator's to judge.
    fn refuse_failed(&mut self, desired: &Desired, now: Instant, lines: &mut Lines) -> Vec<Action> {
        // A candidate that answers in its pod's turn is none yet.
        let on_trial = |name: &String| {
            let is_candidate = desired.candidate.as_ref().is_some_and(|candidate| candidate.version == *name);
            desired.holds && is_candidate && desired.active.as_ref().is_some_and(|active| active != name)
        };
        let failed = |(name, entry): (&String, &Entry)| match &entry.health {
            Some(WorkerHealth::Failed { reason })
                if entry.phase == Phase::Ready && (Some(name) != self.route.active.as_ref() || on_trial(name)) =>
            {
                Some((name.clone(), reason.clone()))
            }
            _ => None,
        };
        let failed: Vec<(String, String)> = self.entries.iter().filter_map(failed).collect();
        let mut done = Vec::new();
        for (version, reason) in failed {
            if self.route.previous.as_ref() == Some(&version) {
                self.set_route(Route { previous: None, ..self.route.clone() });
                done.push(Action::Route(self.route.clone()));
            }
            if self.route.canary.as_ref().is_some_and(|canary| canary.version == version) {
                // The active version answers its share from now on.
                self.set_route(Route { canary: None, ..self.route.clone() });
                done.push(Action::Route(self.route.clone()));
            }
            if self.route.active.as_ref() == Some(&version) {
                // Requests wait until the active version is back.
                let held_from = Some(version.clone());
                self.set_route(Route { active: None, canary: None, previous: None, held_from });
                done.push(Action::Route(self.route.clone()));
            }
            if let Some(entry) = self.entries.get_mut(&version) {
                let message =
                    format!("its worker keeps failing: {reason}; check the file, spec.runtime, and the pod's memory");
                entry.refuse(Refusal::new(GateName::Load, message).with_value("worker died"), now, lines);
                entry.health = None;
            }
            self.step(&version, Step::WorkerFailed, lines);
            done.push(Action::Drop { version });
        }
        done
    }

    /// What the pod says; without `desired` it has not heard yet what is asked of it.
    #[must_use]
    pub fn snapshot(&self, desired: Option<&Desired>, lines: &Lines, now: Instant) -> Snapshot {
        let loaded = |name: &Option<String>| {
            self.entries.get_key_value(name.as_ref()?).filter(|(_, entry)| entry.health.is_some())
        };
        let serving = loaded(&self.route.active);
        let resident = loaded(&self.route.previous).filter(|(_, entry)| entry.is_up()).map(|(name, _)| name.clone());
        let name = serving.map(|(name, _)| name.clone());
        let Some(desired) = desired else { return Snapshot { serving: name, resident, ..Snapshot::default() } };
        let (health, message) = self.health(desired, serving, now);
        Snapshot {
            serving: name,
            attempt: desired.attempt,
            prepared: self.prepared(desired),
            resident,
            state: self.state(desired),
            health,
            message,
            candidate: self.candidate(desired, lines),
            canary: self.route.canary.as_ref().map(|canary| ReplicaCanary {
                version: canary.version.clone(),
                share: Some(canary.share.percent()),
                breach: None,
                too_few_requests: false,
            }),
            // Whoever has the figures of its requests knows that.
            breach: None,
            too_few_requests: false,
        }
    }

    fn health(
        &self,
        desired: &Desired,
        serving: Option<(&String, &Entry)>,
        now: Instant,
    ) -> (ReplicaHealth, Option<String>) {
        let Some((name, Entry { health: Some(health), .. })) = serving else {
            let refusal = desired.active.as_ref().and_then(|active| self.entries.get(active)?.refusal.as_ref());
            return match refusal {
                Some(refusal) => {
                    let message = format!("{}: {}; it is tried again", refusal.gate.as_str(), refusal.message);
                    (ReplicaHealth::Failed, Some(message))
                }
                None => (ReplicaHealth::Starting, self.slow_restore(desired, now)),
            };
        };
        match health {
            WorkerHealth::Ready => {
                let without = desired.unknown.get(name).map(|fields| {
                    format!(
                        "answers with {name} without {}, which this release does not know: {NEWER_IMAGE}",
                        fields.join(", ")
                    )
                });
                (ReplicaHealth::Healthy, without)
            }
            WorkerHealth::Loading => (ReplicaHealth::Starting, None),
            // Which restart it is stands in the metrics: here, each would be a write.
            WorkerHealth::Restarting { reason, .. } => {
                (ReplicaHealth::Restarting, Some(format!("the worker died ({reason}) and is started again")))
            }
            WorkerHealth::Failed { reason } => {
                (ReplicaHealth::Failed, Some(format!("the worker keeps dying: {reason}")))
            }
            WorkerHealth::Stopped => (ReplicaHealth::Failed, Some("the worker was stopped".to_owned())),
        }
    }

    /// Where the pod is with the model that it answers with.
    fn state(&self, desired: &Desired) -> ModelState {
        let active = self.route.active.as_ref().and_then(|name| self.entries.get(name)?.health.as_ref());
        match active {
            Some(WorkerHealth::Ready) => return ModelState::Ready,
            Some(WorkerHealth::Loading | WorkerHealth::Restarting { .. }) => return ModelState::Loading,
            Some(WorkerHealth::Failed { .. } | WorkerHealth::Stopped) => return ModelState::Error,
            None => {}
        }
        if self.is_stalled() {
            return ModelState::Error;
        }
        if self.route.is_held() {
            let unloads = self.entries.values().any(|entry| entry.phase == Phase::Retiring);
            return if unloads { ModelState::Switching } else { ModelState::Loading };
        }
        // Tries that end alike tell the same while they go on.
        let refused = desired.active.as_ref().and_then(|active| self.entries.get(active)?.refusal.as_ref());
        match (&desired.active, refused) {
            (_, Some(_)) => ModelState::Error,
            (Some(_), None) => ModelState::Loading,
            (None, None) if desired.candidate.is_some() => ModelState::Loading,
            (None, None) => ModelState::Idle,
        }
    }

    /// That the active version is long in coming, where it is.
    fn slow_restore(&self, desired: &Desired, now: Instant) -> Option<String> {
        let active = desired.active.as_ref()?;
        let entry = self.entries.get(active).filter(|entry| entry.slow_at().is_some_and(|at| now >= at))?;
        let source = entry.made_of.model.source.uri.as_deref().map(gantry_crds::address::shown).unwrap_or_default();
        Some(format!("{active} is still being brought from {source}; a candidate is prepared beside it"))
    }

    fn prepared(&self, desired: &Desired) -> Option<String> {
        let wanted = desired.candidate.as_ref()?;
        let entry = self.entries.get(&wanted.version)?;
        let ready =
            entry.phase == Phase::Ready && entry.passed && entry.attempt == Some(wanted.attempt) && entry.is_up();
        // A version that answers has passed before; where each pod begins to answer by itself, maybe for another attempt.
        let answers = self.route.active.as_ref() == Some(&wanted.version) && !desired.holds;
        (ready || answers).then(|| wanted.version.clone())
    }

    fn candidate(&self, desired: &Desired, lines: &Lines) -> Option<CandidateStatus> {
        let answers = |version: &String| self.route.active.as_ref() == Some(version);
        // Where another side answers, what it is proved by is told for as long as it is no more than a candidate.
        let candidate =
            desired.candidate.as_ref().filter(|one| desired.stands_by || desired.holds || !answers(&one.version));
        let restored = desired.active.as_ref().filter(|version| !answers(version));
        match (candidate, restored) {
            (Some(candidate), _) => {
                let current =
                    self.entries.get(&candidate.version).filter(|entry| entry.attempt == Some(candidate.attempt));
                let line = current.and_then(|entry| entry.told.of(lines.get(&candidate.version)));
                Some(line.cloned().unwrap_or_else(|| self.not_begun(desired, &candidate.version)))
            }
            (None, Some(version)) => {
                let line = lines.get(version);
                self.entries.get(version).map_or(line, |entry| entry.told.of(line)).cloned()
            }
            (None, None) => None,
        }
    }

    /// What is told of a candidate that has not begun: why not.
    fn not_begun(&self, desired: &Desired, candidate: &str) -> CandidateStatus {
        let busy = self.entries.iter().find(|(name, entry)| {
            let rests = matches!(entry.phase, Phase::Ready | Phase::Checked | Phase::Refused | Phase::Waiting);
            name.as_str() != candidate && !rests
        });
        let too_old = desired.unknown.contains_key(candidate) || desired.unreadable.contains_key(candidate);
        // What is loaded or unloaded takes the room.
        let wait_reason = if too_old { Some(WaitReason::AgentTooOld) } else { busy.map(|_| WaitReason::NoRoom) };
        let message = match busy.filter(|_| !too_old) {
            Some((name, Entry { phase: Phase::Retiring, .. })) => format!("waits until {name} is unloaded"),
            Some((name, _)) => format!("waits until {name} is loaded"),
            None if desired.unreadable.contains_key(candidate) => format!(
                "this release cannot read what {candidate} is ({}): {NEWER_IMAGE}",
                desired.unreadable[candidate]
            ),
            None if desired.unknown.contains_key(candidate) => format!(
                "this release does not know {} of {candidate}: {NEWER_IMAGE}",
                desired.unknown[candidate].join(", ")
            ),
            None if !desired.versions.contains_key(candidate) => {
                format!("waits for status.versions to say what {candidate} is")
            }
            None => "begins".to_owned(),
        };
        CandidateStatus { wait_reason, ..blank(candidate, Some(message)) }
    }
}

/// Where the files of a version come from: whatever else is spelled otherwise in it is the same by its name.
fn sources(version: &NamedVersion) -> (&SourceSpec, Option<&SourceSpec>) {
    let draft = version.runtime.speculative.as_ref().and_then(|speculative| speculative.draft.as_ref());
    (&version.model.source, draft)
}

impl Entry {
    /// Whether its worker answers.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.health == Some(WorkerHealth::Ready)
    }

    /// When a candidate waits no longer for this version to be brought back, while it is.
    #[must_use]
    pub fn slow_at(&self) -> Option<Instant> {
        (self.phase == Phase::Preparing && self.attempt.is_none()).then(|| self.begun + RESTORE_ALONE)
    }

    fn refuse(&mut self, refusal: Refusal, now: Instant, lines: &mut Lines) {
        let version = self.made_of.name.as_str();
        tracing::warn!(
            version, gate = refusal.gate.as_str(), value = refusal.value, message = %refusal.message, "version refused"
        );
        if let Some(line) = lines.get_mut(version) {
            line::refuse(line, &refusal);
        }
        self.told.ended(lines.get(version));
        self.passed = false;
        self.retry_at = Some(now + retry_wait(self.failures));
        self.failures = self.failures.saturating_add(1);
        if self.refusal.as_ref().is_none_or(|told| !refused_alike(told, &refusal)) {
            self.refusal = Some(refusal);
        }
    }
}

fn retry_wait(failures: u32) -> Duration {
    RETRY_MIN.saturating_mul(1 << failures.min(10)).min(RETRY_MAX)
}

#[cfg(test)]
#[path = "versions_tests.rs"]
mod tests;

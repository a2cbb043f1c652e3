//! The owner of the versions: carries out the plan, and takes what becomes of it as events.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_crds::inference_service::SourceSpec;
use gantry_crds::status::{CandidatePhase, CandidateStatus, GateName, NamedVersion, ReplicaHealth, WaitReason};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::desired::Desired;
use super::phase::{Next, Phase, Step, next};
use super::plan::{Action, Current, Known, Purpose, Route, plan};
use super::snapshot::Snapshot;
use super::told::{Told, refused_alike};
use crate::gates::limits::{RESTORE_ALONE, RESTORE_PATIENCE};
use crate::gates::report::blank;
use crate::gates::{Board, Gates, Job, Loaded, Outcome, Refusal, Report};
use crate::routing::{Router, Routing};
use crate::version::signals::{Breach, Figures};
use crate::version::{Scheduling, WorkerHealth};

/// The wait before a version that could not be brought back, or had no room, is tried again; it doubles.
const RETRY_MIN: Duration = Duration::from_secs(2);
/// The longest such wait.
const RETRY_MAX: Duration = Duration::from_secs(60);
/// What to do about a pod whose release is older than what is asked of it.
const NEWER_IMAGE: &str = "update the server's image (annotate the service with gantry.dev/restart=<any new value>)";
/// How often the figures of a version that is watched are looked at.
const SIGNALS_PERIOD: Duration = Duration::from_millis(500);
/// Rounds of planning after one event; each does what the one before made possible.
const MAX_PLAN_ROUNDS: usize = 8;

/// Owns this pod's versions.
pub struct Manager {
    router: Arc<Router>,
    gates: Arc<Gates>,
    desired: watch::Receiver<Option<Arc<Desired>>>,
    board: Arc<Board>,
    snapshots: watch::Sender<Snapshot>,
    entries: BTreeMap<String, Entry>,
    route: Route,
    tasks: JoinSet<Done>,
    watch: Option<Watch>,
}

/// A version that answers since a switch and is watched.
struct Watch {
    version: String,
    /// What the figures of the version before were at the switch, where this pod answered with it.
    before: Option<Figures>,
    /// What passed its limit first: the operator takes it back, whatever comes after.
    breach: Option<Breach>,
}

/// One version.
struct Entry {
    phase: Phase,
    /// What it was begun with, and when.
    made_of: NamedVersion,
    begun: Instant,
    attempt: Option<i64>,
    /// Whether every gate of the attempt let it through.
    passed: bool,
    loaded: Option<Loaded>,
    refusal: Option<Refusal>,
    retry_at: Option<Instant>,
    failures: u32,
    cancel: CancellationToken,
    report: Report,
    /// How the last try ended.
    told: Told,
}

/// A task's end.
enum Done {
    Gates {
        version: String,
        outcome: Outcome,
    },
    Retired {
        version: String,
    },
    /// A worker's health changed, or (`ended`) will not change any more.
    Health {
        loaded: Loaded,
        ended: bool,
    },
    /// Something ended that no version waits for.
    Other,
}

impl Manager {
    /// A manager that follows `desired`, and what it publishes.
    #[must_use]
    pub fn new(
        router: Arc<Router>,
        gates: Arc<Gates>,
        desired: watch::Receiver<Option<Arc<Desired>>>,
    ) -> (Self, watch::Receiver<Snapshot>) {
        let (snapshots, seen) = watch::channel(Snapshot::default());
        let manager = Self {
            router,
            gates,
            desired,
            board: Arc::new(watch::channel(BTreeMap::new()).0),
            snapshots,
            entries: BTreeMap::new(),
            route: Route::default(),
            tasks: JoinSet::new(),
            watch: None,
        };
        (manager, seen)
    }

    /// Works until `stop`. The version that answers goes on answering after that, for as long as the router holds it.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut board = self.board.subscribe();
        loop {
            self.settle();
            let retry = self.next_retry();
            tokio::select! {
                () = stop.cancelled() => break,
                changed = self.desired.changed() => if changed.is_err() { break },
                Some(done) = self.tasks.join_next() => match done {
                    Ok(done) => self.on_done(done),
                    // Only a panic comes here, and its version would stay where it is for ever.
                    Err(error) => {
                        tracing::error!(%error, "a task of the rollout failed: the agent ends, and the process with it");
                        break;
                    }
                },
                Ok(()) = board.changed() => {}
                () = tokio::time::sleep_until(retry.into()) => {}
            }
        }
        for entry in self.entries.values() {
            entry.cancel.cancel();
        }
    }

    /// Plans and acts until there is nothing to do, and publishes what came of it.
    fn settle(&mut self) {
        let desired = self.desired.borrow_and_update().clone();
        if let Some(desired) = &desired {
            self.gates.fetcher.cache().set_limit_bytes(desired.settings.cache_limit_bytes);
            self.apply_scheduling(&desired.settings.scheduling);
            // A candidate answers whoever looks at it before it gets the service's requests.
            self.router.set_stands_by(desired.stands_by && desired.candidate.is_none());
            self.drop_failed_workers();
            for round in 0.. {
                let actions = plan(desired, &self.current(desired, Instant::now()));
                if actions.is_empty() {
                    break;
                }
                if round == MAX_PLAN_ROUNDS {
                    let left = actions.len();
                    tracing::error!(left, "the plan does not settle; it goes on with the next event");
                    break;
                }
                for action in actions {
                    self.act(desired, action);
                }
            }
            self.look_at_signals(desired, Instant::now());
        }
        let snapshot = self.snapshot(desired.as_deref());
        self.snapshots.send_replace(snapshot);
    }

    /// Looks whether the version that is watched passes a limit of the signals.
    fn look_at_signals(&mut self, desired: &Desired, now: Instant) {
        let answers = desired.watched.clone().filter(|watched| self.route.active.as_ref() == Some(watched));
        let (Some(version), Some(limits)) = (answers, &desired.settings.signals) else {
            if desired.watched.is_none() {
                self.watch = None;
            }
            return;
        };
        let signals = |name: &String| {
            self.entries.get(name).and_then(|entry| entry.loaded.as_ref()).map(|loaded| loaded.version.signals())
        };
        let figures = |name: &String| signals(name).map(|signals| signals.figures(limits.window, now));
        let before = self.route.previous.as_ref().and_then(figures);
        let Some(figures) = figures(&version) else { return };
        let watch = match self.watch.take().filter(|watch| watch.version == version) {
            Some(watch) => watch,
            None => Watch { version, before, breach: None },
        };
        let watch = self.watch.insert(watch);
        if watch.breach.is_none()
            && let Some(breach) = limits.breach(&figures, watch.before.as_ref())
        {
            let Breach { signal, value, limit, samples } = &breach;
            tracing::warn!(version = watch.version, signal, value, limit, samples, "a signal passed its limit");
            watch.breach = Some(breach);
        }
    }

    /// Puts the limits of the queue in force in every version that is loaded: they need no reload.
    fn apply_scheduling(&self, scheduling: &Scheduling) {
        for loaded in self.entries.values().filter_map(|entry| entry.loaded.as_ref()) {
            if let Err(error) = loaded.version.set_scheduling(scheduling) {
                let version = loaded.version.spec().name.as_str();
                tracing::warn!(version, %error, "spec.scheduling is not usable; the queue keeps its limits");
            }
        }
    }

    fn current(&self, desired: &Desired, now: Instant) -> Current {
        let known = |name: &String, entry: &Entry| Known {
            phase: entry.phase,
            attempt: entry.attempt,
            worker_up: entry.loaded.as_ref().is_some_and(is_up),
            retry_due: entry.retry_at.is_some_and(|at| now >= at),
            outdated: desired.versions.get(name).is_some_and(|version| sources(version) != sources(&entry.made_of)),
            slow: entry.slow_at().is_some_and(|at| now >= at),
        };
        Current {
            route: self.route.clone(),
            versions: self.entries.iter().map(|(name, entry)| (name.clone(), known(name, entry))).collect(),
        }
    }

    fn next_retry(&self) -> Instant {
        let now = Instant::now();
        let times = self.entries.values().flat_map(|entry| entry.retry_at.into_iter().chain(entry.slow_at()));
        let watches = self.watch.as_ref().is_some_and(|watch| watch.breach.is_none());
        let look = watches.then(|| now + SIGNALS_PERIOD);
        times.filter(|at| *at > now).chain(look).min().unwrap_or(now + RETRY_MAX)
    }

    /// Moves a version along the table of [`phase`](super::phase).
    fn step(&mut self, version: &str, step: Step) -> bool {
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
                if let Some(entry) = self.entries.remove(version) {
                    entry.report.remove();
                }
                true
            }
            None => {
                tracing::error!(version, from, step = word, "a step that must not be; it is left out");
                false
            }
        }
    }

    fn act(&mut self, desired: &Desired, action: Action) {
        match action {
            Action::Route(route) => self.set_route(route),
            Action::Prepare { version, purpose } => self.prepare(desired, &version, purpose),
            Action::Cancel { version } => {
                if self.step(&version, Step::Cancel)
                    && let Some(entry) = self.entries.get(&version)
                {
                    entry.cancel.cancel();
                }
            }
            Action::Retire { version } => {
                let loaded = self.entries.get_mut(&version).and_then(|entry| entry.loaded.take());
                if self.step(&version, Step::Retire) {
                    let drain = desired.settings.drain_timeout;
                    self.tasks.spawn(async move {
                        if let Some(loaded) = loaded {
                            loaded.version.retire(drain).await;
                        }
                        Done::Retired { version }
                    });
                }
            }
            Action::Forget { version } => {
                self.step(&version, Step::Forget);
            }
        }
    }

    fn set_route(&mut self, route: Route) {
        let version = |name: &Option<String>| {
            let entry = name.as_ref().and_then(|name| self.entries.get(name));
            entry.and_then(|entry| entry.loaded.as_ref()).map(|loaded| Arc::clone(&loaded.version))
        };
        let active = version(&route.active);
        active.iter().for_each(|active| active.end_trial());
        self.router.set(Routing { active, previous: version(&route.previous) });
        if route.active != self.route.active {
            tracing::info!(from = self.route.active, to = route.active, previous = route.previous, "switched");
        }
        self.route = route;
    }

    fn prepare(&mut self, desired: &Desired, version: &str, purpose: Purpose) {
        let Some(named) = desired.versions.get(version) else { return };
        let cancel = CancellationToken::new();
        let report = Report::new(Arc::clone(&self.board), version, None);
        let entry = self.entries.entry(version.to_owned()).or_insert_with(|| Entry {
            // Only the table makes this a phase that anyone sees.
            phase: Phase::Waiting,
            made_of: named.clone(),
            begun: Instant::now(),
            attempt: None,
            passed: false,
            loaded: None,
            refusal: None,
            retry_at: None,
            failures: 0,
            cancel: cancel.clone(),
            report: report.clone(),
            told: Told::default(),
        });
        let (attempt, prompts, patience) = match purpose {
            Purpose::Restore => (None, None, Some(RESTORE_PATIENCE)),
            Purpose::Candidate { attempt } => (Some(attempt), desired.settings.prompts.clone(), None),
        };
        // Why it is not here is true until it is: what is tried again and again is told once.
        if entry.attempt != attempt || sources(&entry.made_of) != sources(named) {
            (entry.refusal, entry.told) = (None, Told::default());
        }
        (entry.made_of, entry.begun) = (named.clone(), Instant::now());
        entry.attempt = attempt;
        entry.passed = false;
        entry.retry_at = None;
        entry.cancel = cancel.clone();
        entry.report = report.clone();
        let job = Job {
            version: named.clone(),
            loaded: entry.loaded.clone(),
            prompts,
            headroom_ratio: desired.settings.headroom_ratio,
            scheduling: desired.settings.scheduling.clone(),
            gpu: desired.settings.gpu,
            patience,
        };
        if self.step(version, Step::Prepare) {
            let gates = Arc::clone(&self.gates);
            let version = version.to_owned();
            self.tasks.spawn(async move {
                // In a task of its own, so that a panic is a refusal and not a version that is prepared for ever.
                let run = tokio::spawn(async move { gates.run(job, &report, &cancel).await });
                let outcome = run.await.unwrap_or_else(|error| {
                    let message = format!("the gates themselves failed ({error}); report this with the pod's log");
                    Outcome::Refused(Refusal { gate: GateName::Load, value: None, message })
                });
                Done::Gates { version, outcome }
            });
        }
    }

    fn on_done(&mut self, done: Done) {
        match done {
            Done::Gates { version, outcome } => self.on_outcome(&version, outcome),
            Done::Retired { version } => {
                self.step(&version, Step::Retired);
            }
            Done::Health { ended: true, .. } | Done::Other => {}
            Done::Health { loaded, ended: false } => self.watch_health(loaded),
        }
    }

    fn on_outcome(&mut self, version: &str, outcome: Outcome) {
        let room_expected = self.entries.iter().any(|(name, entry)| {
            name != version
                && Some(name) != self.route.active.as_ref()
                && (entry.loaded.is_some() || entry.phase == Phase::Retiring)
        });
        let Some(entry) = self.entries.get_mut(version) else { return };
        let cancelling = entry.phase == Phase::Cancelling;
        let step = match outcome {
            Outcome::Passed(loaded) => {
                let first = entry.loaded.is_none().then(|| loaded.clone());
                entry.loaded = Some(loaded);
                entry.passed = !cancelling;
                (entry.refusal, entry.told) = (None, Told::default());
                entry.failures = 0;
                if let Some(loaded) = first {
                    self.watch_health(loaded);
                }
                Step::Passed
            }
            // What is loaded already stays so, whatever was asked of it meanwhile.
            Outcome::Cancelled | Outcome::Refused(_) if cancelling && entry.loaded.is_some() => Step::Passed,
            Outcome::Cancelled => Step::Cancelled,
            Outcome::Refused(refusal) if refusal.gate == GateName::Memory && room_expected => {
                entry.retry_at = Some(Instant::now() + retry_wait(entry.failures));
                entry.failures = entry.failures.saturating_add(1);
                entry.report.phase(CandidatePhase::Validating);
                let message = format!("waits until another version is unloaded: {}", refusal.message);
                entry.report.waits_for(WaitReason::NoRoom, &message);
                entry.told.ended(self.board.borrow().get(version));
                Step::NoRoom
            }
            Outcome::Refused(refusal) => {
                entry.refuse(version, refusal);
                entry.told.ended(self.board.borrow().get(version));
                Step::Refused
            }
        };
        if cancelling && let Some(entry) = self.entries.get_mut(version) {
            entry.attempt = None;
        }
        self.step(version, step);
    }

    /// Waits for the next change of a worker's health.
    fn watch_health(&mut self, loaded: Loaded) {
        let mut health = loaded.version.health();
        let seen = health.borrow_and_update().clone();
        // What changed between this look and the last one is looked at with this event.
        self.tasks.spawn(async move {
            let ended = seen == WorkerHealth::Stopped || health.changed().await.is_err();
            Done::Health { loaded, ended }
        });
    }

    /// A version that fails before it ever answers is refused; the one that answers is the operator's to judge.
    fn drop_failed_workers(&mut self) {
        let failed: Vec<(String, String)> = self
            .entries
            .iter()
            .filter_map(|(name, entry)| {
                let health = entry.loaded.as_ref()?.version.health().borrow().clone();
                match health {
                    WorkerHealth::Failed { reason }
                        if entry.phase == Phase::Ready && Some(name) != self.route.active.as_ref() =>
                    {
                        Some((name.clone(), reason))
                    }
                    _ => None,
                }
            })
            .collect();
        for (version, reason) in failed {
            if self.route.previous.as_deref() == Some(&version) {
                self.set_route(Route { previous: None, ..self.route.clone() });
            }
            if let Some(entry) = self.entries.get_mut(&version) {
                let message =
                    format!("its worker keeps failing: {reason}; check the file, spec.runtime, and the pod's memory");
                entry
                    .refuse(&version, Refusal { gate: GateName::Load, value: Some("worker died".to_owned()), message });
                entry.told.ended(self.board.borrow().get(&version));
                if let Some(loaded) = entry.loaded.take() {
                    self.tasks.spawn(async move {
                        loaded.version.retire(Duration::ZERO).await;
                        Done::Other
                    });
                }
            }
            self.step(&version, Step::WorkerFailed);
        }
    }

    fn snapshot(&self, desired: Option<&Desired>) -> Snapshot {
        let loaded = |name: &Option<String>| {
            name.as_ref().and_then(|name| self.entries.get(name)).and_then(|entry| entry.loaded.clone())
        };
        let serving = loaded(&self.route.active);
        let resident = loaded(&self.route.previous).filter(is_up).map(|loaded| loaded.version.spec().name.clone());
        let Some(desired) = desired else { return Snapshot { serving, resident, ..Snapshot::default() } };
        let (health, message) = self.health(desired, serving.as_ref());
        Snapshot {
            attempt: desired.attempt,
            prepared: self.prepared(desired),
            candidate: self.candidate(desired),
            serving,
            resident,
            health,
            message,
            breach: self.watch.as_ref().and_then(|watch| watch.breach.clone()),
        }
    }

    fn health(&self, desired: &Desired, serving: Option<&Loaded>) -> (ReplicaHealth, Option<String>) {
        let Some(serving) = serving else {
            let refusal = desired.active.as_ref().and_then(|active| self.entries.get(active)?.refusal.as_ref());
            return match refusal {
                Some(refusal) => {
                    let message = format!("{}: {}; it is tried again", refusal.gate.as_str(), refusal.message);
                    (ReplicaHealth::Failed, Some(message))
                }
                None => (ReplicaHealth::Starting, self.slow_restore(desired)),
            };
        };
        let name = &serving.version.spec().name;
        match &*serving.version.health().borrow() {
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

    /// That the active version is long in coming, where it is.
    fn slow_restore(&self, desired: &Desired) -> Option<String> {
        let active = desired.active.as_ref()?;
        let entry = self.entries.get(active).filter(|entry| entry.slow_at().is_some_and(|at| Instant::now() >= at))?;
        let source = entry.made_of.model.source.uri.as_deref().map(gantry_crds::address::shown).unwrap_or_default();
        Some(format!("{active} is still being brought from {source}; a candidate is prepared beside it"))
    }

    fn prepared(&self, desired: &Desired) -> Option<String> {
        let wanted = desired.candidate.as_ref()?;
        let entry = self.entries.get(&wanted.version)?;
        let ready = entry.phase == Phase::Ready
            && entry.passed
            && entry.attempt == Some(wanted.attempt)
            && entry.loaded.as_ref().is_some_and(is_up);
        // A version that answers has passed before.
        let answers = self.route.active.as_ref() == Some(&wanted.version);
        (ready || answers).then(|| wanted.version.clone())
    }

    fn candidate(&self, desired: &Desired) -> Option<CandidateStatus> {
        let answers = |version: &String| self.route.active.as_ref() == Some(version);
        let candidate = desired.candidate.as_ref().map(|candidate| &candidate.version).filter(|v| !answers(v));
        let restored = desired.active.as_ref().filter(|v| !answers(v));
        let board = self.board.borrow();
        match (candidate, restored) {
            (Some(version), _) => {
                let entry = self.entries.get(version);
                let attempt = desired.candidate.as_ref().map(|candidate| candidate.attempt);
                let current = entry.is_some_and(|entry| entry.attempt == attempt);
                let line = board.get(version).filter(|_| current);
                let line = entry.filter(|_| current).map_or(line, |entry| entry.told.of(line));
                Some(line.cloned().unwrap_or_else(|| self.not_begun(desired, version)))
            }
            (None, Some(version)) => {
                let line = board.get(version);
                self.entries.get(version).map_or(line, |entry| entry.told.of(line)).cloned()
            }
            (None, None) => None,
        }
    }

    /// What is told of a candidate that has not begun: why not.
    fn not_begun(&self, desired: &Desired, candidate: &str) -> CandidateStatus {
        let busy = self.entries.iter().find(|(name, entry)| {
            name.as_str() != candidate && !matches!(entry.phase, Phase::Ready | Phase::Refused | Phase::Waiting)
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
    /// When a candidate waits no longer for this version to be brought back, while it is.
    fn slow_at(&self) -> Option<Instant> {
        (self.phase == Phase::Preparing && self.attempt.is_none()).then(|| self.begun + RESTORE_ALONE)
    }

    fn refuse(&mut self, version: &str, refusal: Refusal) {
        tracing::warn!(
            version, gate = refusal.gate.as_str(), value = refusal.value, message = %refusal.message, "version refused"
        );
        self.report.refuse(&refusal);
        self.passed = false;
        self.retry_at = Some(Instant::now() + retry_wait(self.failures));
        self.failures = self.failures.saturating_add(1);
        if self.refusal.as_ref().is_none_or(|told| !refused_alike(told, &refusal)) {
            self.refusal = Some(refusal);
        }
    }
}

fn retry_wait(failures: u32) -> Duration {
    RETRY_MIN.saturating_mul(1 << failures.min(10)).min(RETRY_MAX)
}

fn is_up(loaded: &Loaded) -> bool {
    *loaded.version.health().borrow() == WorkerHealth::Ready
}

//! The owner of the versions: carries out the plan, and takes what becomes of it as events.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_crds::status::{BreachStatus, CandidatePhase, GateName, ReplicaCanary};
use gantry_rollout::limits::RETRY_MAX;
use gantry_rollout::plan::{Action, Purpose, Route};
use gantry_rollout::{Desired, Lines, Phase, Snapshot, Versions, WorkerHealth};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::{Assignment, Settings};
use crate::gates::limits::RESTORE_PATIENCE;
use crate::gates::reference::Reference;
use crate::gates::{Board, Gates, Job, Loaded, Outcome, Refusal, Report};
use crate::gates::{drift, performance, shadow};
use crate::routing::{Router, Routing};
use crate::version::signals::{Figures, SignalLimits};
use crate::version::{Scheduling, Version};

/// How often the figures of a version that is watched are looked at.
const SIGNALS_PERIOD: Duration = Duration::from_millis(500);

/// What a pod says, and the version that it is about.
#[derive(Clone, Debug, Default)]
pub struct Published {
    /// What the pod says.
    pub snapshot: Snapshot,
    /// The version that answers.
    pub serving: Option<Loaded>,
}

/// Owns this pod's versions.
pub struct Manager {
    router: Arc<Router>,
    gates: Arc<Gates>,
    assigned: watch::Receiver<Option<Arc<Assignment>>>,
    /// The last of these that is carried out: a pod that ends begins nothing more.
    in_force: Option<Arc<Assignment>>,
    board: Arc<Board>,
    published: watch::Sender<Published>,
    versions: Versions,
    /// What is loaded of them.
    loaded: BTreeMap<String, Loaded>,
    /// Those of which requests are let end.
    retiring: BTreeMap<String, Arc<Version>>,
    /// Calls off their gates.
    cancels: BTreeMap<String, CancellationToken>,
    tasks: JoinSet<Done>,
    watch: Option<Watch>,
    /// The candidate that answers a share of the requests.
    canary: Option<Watch>,
}

/// A version that answers since a switch, or a share of the requests, and is watched.
struct Watch {
    version: String,
    /// Of a candidate: the attempt in which it does.
    attempt: Option<i64>,
    since: Instant,
    limits: SignalLimits,
    /// What the figures of the version before were at the switch, where this pod answered with it.
    before: Option<Figures>,
    /// What passed its limit first: the operator takes it back, whatever comes after.
    breach: Option<BreachStatus>,
    /// Whether there were enough requests to judge by, once.
    judged: bool,
}

impl Watch {
    fn new(version: &str, attempt: Option<i64>, limits: &SignalLimits, now: Instant) -> Self {
        let (version, limits) = (version.to_owned(), limits.clone());
        Self { version, attempt, since: now, limits, before: None, breach: None, judged: false }
    }

    /// Limits that the user makes others hold at once, also for what has passed one.
    fn follow(&mut self, limits: &SignalLimits) {
        if self.limits != *limits {
            (self.limits, self.breach, self.judged) = (limits.clone(), None, false);
        }
    }

    /// Takes in the figures, of which those of the version before are `before`.
    fn judge(&mut self, figures: &Figures, before: Option<&Figures>, now: Instant) {
        if self.breach.is_some() {
            return;
        }
        let watched_for = now.saturating_duration_since(self.since);
        self.judged |= self.limits.can_judge(figures);
        self.breach = self.limits.breach(figures, before, watched_for >= self.limits.window);
        if let Some(BreachStatus { signal, value, limit, samples }) = &self.breach {
            tracing::warn!(version = self.version, signal, value, limit, samples, "a signal passed its limit");
        }
    }

    fn is_without_requests(&self, now: Instant) -> bool {
        !self.judged && now.saturating_duration_since(self.since) >= self.limits.window
    }
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
    /// A manager that carries out what is `assigned`, and what it publishes.
    #[must_use]
    pub fn new(
        router: Arc<Router>,
        gates: Arc<Gates>,
        assigned: watch::Receiver<Option<Arc<Assignment>>>,
    ) -> (Self, watch::Receiver<Published>) {
        let (published, seen) = watch::channel(Published::default());
        let manager = Self {
            router,
            gates,
            assigned,
            in_force: None,
            board: Arc::new(watch::channel(BTreeMap::new()).0),
            published,
            versions: Versions::default(),
            loaded: BTreeMap::new(),
            retiring: BTreeMap::new(),
            cancels: BTreeMap::new(),
            tasks: JoinSet::new(),
            watch: None,
            canary: None,
        };
        (manager, seen)
    }

    /// Works until `stop`. The version that answers goes on answering after that, for as long as the router holds it; what is
    /// answered still by one that it took the place of is told so.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut board = self.board.subscribe();
        loop {
            self.settle();
            let now = Instant::now();
            let mut watched = self.watch.iter().chain(&self.canary);
            let look = watched.any(|watch| watch.breach.is_none()).then(|| now + SIGNALS_PERIOD);
            let retry = self.versions.next_retry(now).into_iter().chain(look).min().unwrap_or(now + RETRY_MAX);
            tokio::select! {
                () = stop.cancelled() => break,
                changed = self.assigned.changed() => if changed.is_err() { break },
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
        for cancel in self.cancels.values() {
            cancel.cancel();
        }
        // Without it their streams would break off without a word when the process ends.
        let retiring = self.retiring.into_values().map(|version| version.retire(Duration::ZERO));
        futures::future::join_all(retiring).await;
    }

    /// Does what there is to do, and publishes what came of it.
    fn settle(&mut self) {
        let assigned = self.assigned.borrow_and_update().clone();
        if !self.router.is_ending() {
            self.in_force = assigned;
        }
        let assigned = self.in_force.clone();
        for (name, loaded) in &self.loaded {
            self.versions.observe(name, loaded.version.health().borrow().clone());
        }
        if let Some(Assignment { desired, settings }) = assigned.as_deref() {
            self.gates.fetcher.cache().set_limit_bytes(settings.cache_limit_bytes);
            self.apply_scheduling(&settings.scheduling);
            // A candidate answers whoever looks at it before it gets the service's requests.
            self.router.set_stands_by(desired.stands_by && desired.candidate.is_none());
            self.look_at_canary(desired, settings, Instant::now());
            // What passes a limit gets no request more in this pod, whoever else is there to say so.
            let is_breached = self.canary.as_ref().is_some_and(|watch| watch.breach.is_some());
            let wanted = if is_breached { &desired.without_share() } else { desired };
            for action in self.note(|versions, lines| versions.settle(wanted, Instant::now(), lines)) {
                self.act(desired, settings, action);
            }
            if self.canary.is_none() {
                // It may have been given a share just now, and is looked at from here on.
                self.look_at_canary(desired, settings, Instant::now());
            }
            self.router.set_yields(self.versions.yields(desired));
            self.router.set_quarantined(self.versions.is_quarantined(desired));
            self.look_at_signals(desired, settings, Instant::now());
        }
        self.tell_who_waits(Instant::now());
        let desired = assigned.as_deref().map(|assigned| &assigned.desired);
        let mut snapshot = self.versions.snapshot(desired, &self.board.borrow(), Instant::now());
        snapshot.breach = self.watch.as_ref().and_then(|watch| watch.breach.clone());
        snapshot.too_few_requests = self.watch.as_ref().is_some_and(|watch| watch.is_without_requests(Instant::now()));
        snapshot.canary = self.canary_told(snapshot.canary);
        self.router.set_state(snapshot.state);
        let serving = snapshot.serving.as_ref().and_then(|name| self.loaded.get(name)).cloned();
        self.published.send_replace(Published { snapshot, serving });
    }

    /// How far the load is that requests wait for.
    fn tell_who_waits(&self, now: Instant) {
        if !self.versions.route().is_held() {
            return;
        }
        for line in self.board.borrow().values() {
            let is_under_way = self.versions.get(&line.version).is_some_and(|entry| entry.phase == Phase::Preparing);
            if is_under_way && matches!(line.phase, CandidatePhase::Loading | CandidatePhase::Testing) {
                let permille = line.progress.as_ref().and_then(|progress| progress.done_permille);
                let share = permille.filter(|_| line.phase == CandidatePhase::Loading).map(|done| done as f32 / 1e3);
                self.router.held().loads(&line.version, share, now);
            }
        }
    }

    /// Looks whether the version that is watched passes a limit of the signals, by the requests since it is watched.
    fn look_at_signals(&mut self, desired: &Desired, settings: &Settings, now: Instant) {
        let route = self.versions.route();
        let answers = desired.watched.as_ref().filter(|watched| route.active.as_ref() == Some(watched));
        let (Some(version), Some(limits)) = (answers, &settings.signals) else {
            self.watch = None;
            return;
        };
        let figures = |name: &String, window: Duration| {
            self.loaded.get(name).map(|loaded| loaded.version.signals().figures(window, now))
        };
        let known = self.watch.take().filter(|watch| watch.version == *version);
        let mut watch = known.unwrap_or_else(|| Watch {
            before: route.previous.as_ref().and_then(|previous| figures(previous, limits.window)),
            ..Watch::new(version, None, limits, now)
        });
        watch.follow(limits);
        let watched_for = now.saturating_duration_since(watch.since);
        if let Some(figures) = figures(version, limits.window.min(watched_for)) {
            let before = watch.before;
            watch.judge(&figures, before.as_ref(), now);
        }
        self.watch = Some(watch);
    }

    /// Looks whether the candidate that answers a share of the requests passes a limit, by the requests since it does, against those of
    /// the active version in the same time.
    fn look_at_canary(&mut self, desired: &Desired, settings: &Settings, now: Instant) {
        let known = self.canary.take();
        let asked = desired.candidate.as_ref().filter(|_| desired.canary.is_some());
        let (Some(candidate), Some(limits)) = (asked, &settings.signals) else { return };
        let attempt = Some(candidate.attempt);
        let is_it = |watch: &Watch| watch.version == candidate.version && watch.attempt == attempt;
        let route = self.versions.route();
        let gets_requests = route.canary.as_ref().is_some_and(|canary| canary.version == candidate.version);
        let new = || gets_requests.then(|| Watch::new(&candidate.version, attempt, limits, now));
        let Some(mut watch) = known.filter(is_it).or_else(new) else { return };
        watch.follow(limits);
        let loaded = |name: &String| self.loaded.get(name).map(|loaded| loaded.version.signals());
        if let Some(signals) = loaded(&watch.version) {
            let window = limits.window_of(&signals, now.saturating_duration_since(watch.since), now);
            let active = route.active.as_ref().and_then(loaded).map(|signals| signals.figures(window, now));
            watch.judge(&signals.figures(window, now), active.as_ref(), now);
        }
        self.canary = Some(watch);
    }

    /// What is told of the candidate that answers a share of the requests, or does not any more since it passed a limit.
    fn canary_told(&self, in_force: Option<ReplicaCanary>) -> Option<ReplicaCanary> {
        let Some(watch) = &self.canary else { return in_force };
        let told = in_force.filter(|canary| canary.version == watch.version);
        let share = told.and_then(|canary| canary.share);
        let (version, breach) = (watch.version.clone(), watch.breach.clone());
        let too_few_requests = watch.is_without_requests(Instant::now());
        Some(ReplicaCanary { version, share, breach, too_few_requests })
    }

    /// Has the owner of the versions take something in, with the lines of those on their way.
    fn note<T: Default>(&mut self, note: impl FnOnce(&mut Versions, &mut Lines) -> T) -> T {
        let (versions, mut noted) = (&mut self.versions, T::default());
        self.board.send_if_modified(|lines| {
            let before = lines.clone();
            noted = note(versions, lines);
            *lines != before
        });
        noted
    }

    /// Puts the limits of the queue in force in every version that is loaded: they need no reload.
    fn apply_scheduling(&self, scheduling: &Scheduling) {
        for loaded in self.loaded.values() {
            if let Err(error) = loaded.version.set_scheduling(scheduling) {
                let version = loaded.version.spec().name.as_str();
                tracing::warn!(version, %error, "spec.scheduling is not usable; the queue keeps its limits");
            }
        }
    }

    /// Carries out what the owner of the versions has noted already.
    fn act(&mut self, desired: &Desired, settings: &Settings, action: Action) {
        match action {
            Action::Route(route) => self.route(&route),
            Action::Prepare { version, purpose, loads } => self.prepare(desired, settings, version, &purpose, loads),
            Action::Cancel { version } => {
                if let Some(cancel) = self.cancels.get(&version) {
                    cancel.cancel();
                }
            }
            Action::Retire { version } => {
                let loaded = self.loaded.remove(&version);
                let drain = settings.drain_timeout;
                let gives_way = self.versions.route().is_held();
                if let Some(loaded) = &loaded {
                    self.retiring.insert(version.clone(), Arc::clone(&loaded.version));
                }
                self.tasks.spawn(async move {
                    match loaded {
                        Some(loaded) if gives_way => loaded.version.give_way(drain).await,
                        Some(loaded) => loaded.version.retire(drain).await,
                        None => {}
                    }
                    Done::Retired { version }
                });
            }
            Action::Drop { version } => {
                // Of those that a candidate had taken, whichever was told nothing is answered by another version.
                if let Some(loaded) = self.loaded.remove(&version) {
                    self.tasks.spawn(async move {
                        loaded.version.give_way(Duration::ZERO).await;
                        Done::Other
                    });
                }
            }
            Action::Forget { .. } => {}
        }
    }

    /// Puts a route in force.
    fn route(&self, Route { active, canary, previous, held_from }: &Route) {
        let version = |name: &Option<String>| {
            let loaded = name.as_ref().and_then(|name| self.loaded.get(name));
            loaded.map(|loaded| Arc::clone(&loaded.version))
        };
        let active = version(active);
        if let (None, Some(before)) = (&active, version(held_from)) {
            return self.router.hold(&before);
        }
        if active.is_none() && self.router.held().is_switching() {
            // Nothing that is loaded answered before: requests go on waiting.
            return;
        }
        let candidate =
            canary.as_ref().and_then(|canary| Some((version(&Some(canary.version.clone()))?, canary.share)));
        active.iter().chain(candidate.iter().map(|(candidate, _)| candidate)).for_each(|answers| answers.end_trial());
        self.router.set(Routing { active, canary: candidate, previous: version(previous) });
    }

    fn prepare(&mut self, desired: &Desired, settings: &Settings, version: String, purpose: &Purpose, loads: bool) {
        // What it was noted with: the status may have forgotten it.
        let Some(named) = self.versions.get(&version).map(|entry| &entry.made_of) else { return };
        let is_restored = matches!(purpose, Purpose::Restore);
        let asked = (!is_restored).then_some(settings);
        let reference = self.reference(desired, &version);
        let drift = asked.and_then(|asked| asked.drift.clone());
        let performance = asked.and_then(|asked| asked.performance.clone());
        let shadow = asked.and_then(|asked| asked.shadow.clone());
        let job = Job {
            version: named.clone(),
            loaded: self.loaded.get(&version).cloned(),
            prompts: asked.and_then(|asked| asked.prompts.clone()),
            shadow: shadow.map(|gate| shadow::Job { gate, drift: drift.clone(), reference: reference.clone() }),
            drift: drift.map(|gate| drift::Job { gate, reference: reference.clone() }),
            performance: performance.map(|gate| performance::Job { gate, reference }),
            headroom_ratio: settings.headroom_ratio,
            memory_bound: None,
            scheduling: settings.scheduling.clone(),
            gpu: settings.gpu,
            loads,
            beside: self.loaded.values().map(|loaded| Arc::clone(&loaded.version)).collect(),
            patience: is_restored.then_some(RESTORE_PATIENCE),
        };
        let cancel = CancellationToken::new();
        self.cancels.insert(version.clone(), cancel.clone());
        let report = Report::of(Arc::clone(&self.board), &version);
        let gates = Arc::clone(&self.gates);
        self.tasks.spawn(async move {
            // In a task of its own, so that a panic is a refusal and not a version that is prepared for ever.
            let run = tokio::spawn(async move { gates.run(job, &report, &cancel).await });
            let outcome = run.await.unwrap_or_else(|error| {
                let message = format!("the gates themselves failed ({error}); report this with the pod's log");
                Outcome::Refused(Refusal::new(GateName::Load, message))
            });
            Done::Gates { version, outcome }
        });
    }

    /// What a candidate is compared with.
    fn reference(&self, desired: &Desired, candidate: &str) -> Reference {
        match desired.active.as_deref().filter(|active| *active != candidate) {
            Some(version) => Reference::Here { version: version.to_owned(), serving: self.published.subscribe() },
            // Those that stand by are told of no active version, and there is one.
            None if desired.stands_by => Reference::Elsewhere,
            None => Reference::None,
        }
    }

    fn on_done(&mut self, done: Done) {
        match done {
            Done::Gates { version, outcome } => self.on_outcome(&version, outcome),
            Done::Retired { version } => {
                self.retiring.remove(&version);
                self.note(|versions, lines| versions.retired(&version, lines));
            }
            Done::Health { ended: true, .. } | Done::Other => {}
            Done::Health { loaded, ended: false } => self.watch_health(loaded),
        }
    }

    fn on_outcome(&mut self, version: &str, outcome: Outcome) {
        self.cancels.remove(version);
        let outcome = match outcome {
            Outcome::Passed(loaded) => {
                if self.loaded.insert(version.to_owned(), loaded.clone()).is_none() {
                    self.watch_health(loaded);
                }
                gantry_rollout::Outcome::Passed
            }
            Outcome::Checked => gantry_rollout::Outcome::Checked,
            Outcome::Refused(refusal) => gantry_rollout::Outcome::Refused(refusal),
            Outcome::Cancelled => gantry_rollout::Outcome::Cancelled,
        };
        self.note(|versions, lines| versions.ended(version, outcome, Instant::now(), lines));
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
}

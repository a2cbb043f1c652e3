//! A pod: the agent's own functions, with gates, workers and the watch played by the search.

use std::{
    collections::{BTreeSet, hash_map::DefaultHasher},
    hash::{Hash, Hasher},
    sync::{Arc, LazyLock},
    time::{Duration, Instant},
};

use gantry_crds::{
    InferenceServiceStatus,
    status::{
        BreachStatus, CandidateStatus, FitStatus, GateName, GateResult, GateVerdict, ReplicaCanary, ReplicaStatus,
        Side, WaitReason,
    },
};
use gantry_rollout::{
    Canary, Desired, Lines, Outcome, Phase, Refusal, Versions, WorkerHealth, line,
    plan::{Action, Route},
    report::{Cadence, Decision, Figures, entry},
};

use super::{
    invariants::{Broken, Invariant, Violation},
    world::NOW,
};

/// Longer than any wait of an agent, so that one jump of its clock makes all that it waits for due.
const LONG: Duration = Duration::from_secs(3600);
/// In the order in which a version passes them.
const GATES: [GateName; 7] = [
    GateName::Fetch,
    GateName::Digest,
    GateName::Format,
    GateName::Memory,
    GateName::Template,
    GateName::Load,
    GateName::Prompts,
];

/// When every agent began.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// What a status asks of pods, made once for all that see it.
#[derive(Debug)]
pub(super) struct Asked {
    desired: Desired,
    /// What is asked of pods of which something else is asked than of the others: of the one whose turn it is, and of those that are
    /// not to get requests.
    of_single: Vec<(String, Desired)>,
    hash: u64,
}

impl Asked {
    pub(super) fn of(status: &InferenceServiceStatus, resources: &str) -> Arc<Self> {
        let desired = Desired::of(status, "", Some(resources), Side::Blue);
        let turn = status.rollout.as_ref().and_then(|rollout| rollout.turn.as_ref());
        let single = turn.map(|turn| &turn.pod).into_iter().chain(&status.quarantined);
        let of_single =
            single.map(|pod| (pod.clone(), Desired::of(status, pod, Some(resources), Side::Blue))).collect();
        let mut hasher = DefaultHasher::new();
        (&desired.active, &desired.previous, desired.attempt).hash(&mut hasher);
        (desired.candidate.as_ref().map(|one| (&one.version, one.attempt)), &desired.kept).hash(&mut hasher);
        desired.versions.keys().for_each(|name| name.hash(&mut hasher));
        (desired.holds, desired.canary).hash(&mut hasher);
        Arc::new(Self { desired, of_single, hash: hasher.finish() })
    }

    /// What is asked of a pod.
    fn of_pod(&self, pod: &str) -> &Desired {
        let own = self.of_single.iter().find(|(name, _)| name == pod);
        own.map_or(&self.desired, |(_, desired)| desired)
    }
}

/// A pod with its agent.
#[derive(Clone)]
pub(super) struct Pod {
    pub(super) name: String,
    pub(super) versions: Versions,
    lines: Lines,
    /// What its watch brought last, and the resource version of that object.
    pub(super) asked: Option<Arc<Asked>>,
    pub(super) seen: u64,
    cadence: Cadence,
    /// Whether it has written since its process began.
    wrote: bool,
    clock: Instant,
    /// Neither requests nor the watch come to it, and nothing goes out.
    pub(super) cut_off: bool,
    /// Nothing more can be loaded in it.
    pub(super) trouble: bool,
    /// It is of the template with much memory.
    pub(super) large: bool,
    /// It has memory for one model.
    tight: bool,
    /// Versions of which the gates end before they are loaded.
    checks: BTreeSet<String>,
    /// The candidate whose figures passed a limit, and the attempt.
    breached: Option<(String, i64)>,
    /// Gates that a broken agent has not called off.
    leaked: Option<Versions>,
    /// Something befell it that befell no other: its word may be about itself.
    pub(super) marked: bool,
}

impl Pod {
    pub(super) fn new(name: String, large: bool, tight: bool) -> Self {
        Self {
            name,
            versions: Versions::default(),
            lines: Lines::new(),
            asked: None,
            seen: 0,
            cadence: Cadence::default(),
            wrote: false,
            clock: *START,
            cut_off: false,
            trouble: false,
            large,
            tight,
            checks: BTreeSet::new(),
            breached: None,
            leaked: None,
            marked: false,
        }
    }

    /// Its container begins anew: what was loaded is gone, and the entry in the status is not.
    pub(super) fn restart(&mut self) {
        let Self { name, cut_off, trouble, large, tight, .. } = self;
        *self = Self {
            cut_off: *cut_off,
            trouble: *trouble,
            marked: true,
            ..Self::new(std::mem::take(name), *large, *tight)
        };
    }

    pub(super) fn serving(&self) -> Option<&String> {
        self.versions.route().active.as_ref()
    }

    /// The candidate that a share of its requests goes to.
    pub(super) fn canary(&self) -> Option<&Canary> {
        self.versions.route().canary.as_ref()
    }

    /// The figures of the candidate that a share of its requests goes to pass a limit: the pod takes the share back by itself.
    pub(super) fn breaches(&mut self, broken: Option<Broken>) -> Result<(), Violation> {
        let candidate = self.asked.as_ref().and_then(|asked| asked.of_pod(&self.name).candidate.clone());
        self.breached = candidate.map(|candidate| (candidate.version, candidate.attempt));
        self.settle(broken)
    }

    /// Whether that has happened to what is asked of it.
    fn is_breached(&self, desired: &Desired) -> bool {
        let is_it = |(version, attempt): &(String, i64)| {
            let asked = desired.candidate.as_ref().filter(|_| desired.canary.is_some());
            asked.is_some_and(|asked| asked.version == *version && asked.attempt == *attempt)
        };
        self.breached.as_ref().is_some_and(is_it)
    }

    /// Whether requests that come to it are answered.
    pub(super) fn ready(&self) -> bool {
        let serving = self.serving().and_then(|name| self.versions.get(name));
        // Who waits gets an answer, and is not sent to where others give one.
        let yields = || self.asked.as_ref().is_some_and(|asked| self.versions.yields(asked.of_pod(&self.name)));
        let waits = self.versions.route().is_held() && !yields();
        !self.cut_off && !self.is_quarantined() && (waits || serving.is_some_and(gantry_rollout::Entry::is_up))
    }

    /// Whether others are to answer, since it answers with what was refused or taken back.
    pub(super) fn is_quarantined(&self) -> bool {
        self.asked.as_ref().is_some_and(|asked| self.versions.is_quarantined(asked.of_pod(&self.name)))
    }

    /// Whether requests wait in it for the next version.
    pub(super) fn holds(&self) -> bool {
        self.versions.route().is_held()
    }

    /// The watch brings an object, and the agent does what follows.
    pub(super) fn see(
        &mut self,
        asked: &Arc<Asked>,
        resource_version: u64,
        has_entry: bool,
        broken: Option<Broken>,
    ) -> Result<(), Violation> {
        (self.asked, self.seen) = (Some(Arc::clone(asked)), resource_version);
        if self.cadence.is_lost(has_entry, Some(resource_version)) {
            self.wrote = false;
        }
        self.settle(broken)
    }

    /// Whether the watch would bring news.
    pub(super) fn is_behind(&self, asked: &Arc<Asked>, has_entry: bool) -> bool {
        let same = |old: &Arc<Asked>| Arc::ptr_eq(old, asked) || old.of_pod(&self.name) == asked.of_pod(&self.name);
        !self.cut_off && (!self.asked.as_ref().is_some_and(same) || self.wrote && !has_entry)
    }

    fn settle(&mut self, broken: Option<Broken>) -> Result<(), Violation> {
        let Some(asked) = self.asked.clone() else { return Ok(()) };
        let asked = asked.of_pod(&self.name);
        if self.breached.is_some() && !self.is_breached(asked) {
            self.breached = None;
        }
        let desired = &if self.breached.is_some() { asked.without_share() } else { asked.clone() };
        let before = self.versions.clone();
        let actions = self.versions.settle(desired, self.clock, &mut self.lines);
        let switches = |action: &Action| matches!(action, Action::Route(_)) && before.route().active.is_some();
        match broken {
            Some(Broken::IgnoresSwitch) if self.name.ends_with('1') && actions.iter().any(switches) => {
                self.versions = before;
                return Ok(());
            }
            Some(Broken::KeepsTheShare)
                if before.route().canary.is_some() && desired.canary.is_none() && self.name.ends_with('1') =>
            {
                self.versions = before;
                return self.check_share(asked);
            }
            Some(Broken::BeginsTwice) if actions.iter().any(|action| matches!(action, Action::Cancel { .. })) => {
                self.leaked = Some(before.clone());
            }
            _ => {}
        }
        let mut answers = before.route().active.clone();
        for action in &actions {
            match action {
                Action::Route(Route { active, .. }) => answers.clone_from(active),
                Action::Prepare { version, loads: false, .. } => drop(self.checks.insert(version.clone())),
                Action::Prepare { version, .. } => drop(self.checks.remove(version)),
                Action::Retire { version } | Action::Forget { version } | Action::Drop { version }
                    if answers.as_ref() == Some(version) =>
                {
                    return Err(Invariant::NothingThatServesIsDeleted
                        .broken(format!("{} unloads {version}, which answers", self.name)));
                }
                _ => {}
            }
        }
        if broken == Some(Broken::UnloadsFirst) && desired.candidate.is_some() {
            self.versions = Versions::default();
            return self.check();
        }
        let left = self.versions.plan(desired, self.clock, &self.lines);
        if !left.is_empty() {
            return Err(Invariant::ItEnds.broken(format!("{} does not settle: {left:?}", self.name)));
        }
        self.check_share(asked)?;
        self.check()
    }

    /// A share goes to the candidate that is asked for, if it passed in this pod for that attempt, and to no other version.
    fn check_share(&self, asked: &Desired) -> Result<(), Violation> {
        let Some(Canary { version, share }) = self.canary() else { return Ok(()) };
        let candidate = asked.candidate.as_ref().filter(|candidate| candidate.version == *version);
        let passed = |attempt| {
            let entry = self.versions.get(version);
            entry.is_some_and(|entry| entry.passed && entry.is_up() && entry.attempt == Some(attempt))
        };
        let is_proved = candidate.is_some_and(|candidate| passed(candidate.attempt));
        if is_proved && asked.canary == Some(*share) && !self.is_breached(asked) {
            return Ok(());
        }
        let how = format!("{} gives {version} a share of {}, and is asked for {asked:?}", self.name, share.percent());
        Err(Invariant::SharesAreProved.broken(how))
    }

    fn check(&self) -> Result<(), Violation> {
        let on_trial: Vec<_> = self
            .leaked
            .iter()
            .chain([&self.versions])
            .flat_map(Versions::iter)
            .filter(|(_, entry)| entry.attempt.is_some() && matches!(entry.phase, Phase::Preparing | Phase::Checking))
            .map(|(name, _)| name.as_str())
            .collect();
        match on_trial.len() {
            0 | 1 => Ok(()),
            _ => Err(Invariant::OneCandidate.broken(format!("{} tries {}", self.name, on_trial.join(" and ")))),
        }
    }

    /// Versions whose gates are at it.
    pub(super) fn at_gates(&self) -> impl Iterator<Item = &str> {
        let at = |phase| matches!(phase, Phase::Preparing | Phase::Checking | Phase::Cancelling);
        let at_it = self.versions.iter().filter(move |(_, entry)| at(entry.phase)).map(|(name, _)| name.as_str());
        at_it.filter(|name| !self.is_stuck(name))
    }

    /// Whether the gates of a version wait for what never comes.
    pub(super) fn is_stuck(&self, version: &str) -> bool {
        let is_under_way = self.versions.get(version).is_some_and(|entry| entry.phase != Phase::Cancelling);
        is_under_way && self.lines.get(version).is_some_and(|line| line.wait_reason == Some(WaitReason::NoReference))
    }

    /// The gates of a version wait from now on.
    pub(super) fn gates_wait(&mut self, version: &str, broken: Option<Broken>) -> Result<(), Violation> {
        if let Some(line) = self.lines.get_mut(version) {
            line::waits_for(line, WaitReason::NoReference, "what it is to be compared with is not here");
        }
        self.settle(broken)
    }

    /// Whether the gates of a version end before it is loaded.
    pub(super) fn only_checks(&self, version: &str) -> bool {
        self.checks.contains(version)
    }

    /// Versions that are being unloaded.
    pub(super) fn retiring(&self) -> impl Iterator<Item = &str> {
        self.versions.iter().filter(|(_, entry)| entry.phase == Phase::Retiring).map(|(name, _)| name.as_str())
    }

    /// What the gates come to where nothing goes wrong in this pod alone. `refuses` is the gate that refuses the version.
    pub(super) fn natural(&self, version: &str, refuses: Option<GateName>) -> Option<GateName> {
        let entry = self.versions.get(version)?;
        // To restore it no golden prompts are asked.
        let refuses = refuses.filter(|gate| entry.attempt.is_some() || *gate != GateName::Prompts);
        if self.only_checks(version) {
            return refuses.filter(|gate| !matches!(gate, GateName::Load | GateName::Prompts));
        }
        let loads = entry.health.is_none();
        let refuses = refuses.filter(|gate| loads || *gate == GateName::Prompts);
        let beside = || self.versions.iter().any(|(name, entry)| name != version && entry.health.is_some());
        if self.tight && loads && beside() {
            return Some(GateName::Memory);
        }
        refuses.or((loads && self.trouble).then_some(GateName::Load))
    }

    /// The gates of a version end: one refuses it, or all let it through. Says whether it passed as a candidate.
    pub(super) fn gates_end(
        &mut self,
        version: &str,
        refuses: Option<GateName>,
        broken: Option<Broken>,
    ) -> Result<bool, Violation> {
        let Some(entry) = self.versions.get(version) else { return Ok(false) };
        let (phase, is_candidate) = (entry.phase, entry.attempt.is_some());
        let outcome = match refuses {
            _ if phase == Phase::Cancelling => Outcome::Cancelled,
            Some(gate) => Outcome::Refused(Refusal::new(gate, "no").with_value("0")),
            None if self.only_checks(version) => Outcome::Checked,
            None => Outcome::Passed,
        };
        let passed = outcome == Outcome::Passed && is_candidate;
        if let Some(line) = self.lines.get_mut(version) {
            line.fit = (self.tight && refuses == Some(GateName::Memory)).then(|| FitStatus {
                required: "2Gi".to_owned(),
                available: "1Gi".to_owned(),
                fits: false,
                available_alone: Some("3Gi".to_owned()),
                fits_alone: Some(true),
            });
            let before = GATES.into_iter().take_while(|gate| outcome != Outcome::Cancelled && refuses != Some(*gate));
            for name in before {
                line::gate(line, GateResult { name, verdict: GateVerdict::Pass, value: None, message: None });
            }
        }
        if !self.versions.ended(version, outcome, self.clock, &mut self.lines) {
            return Err(Invariant::ItEnds.broken(format!("{}: no step of the table ends {phase:?}", self.name)));
        }
        self.settle(broken)?;
        Ok(passed)
    }

    pub(super) fn retired(&mut self, version: &str, broken: Option<Broken>) -> Result<(), Violation> {
        self.versions.retired(version, &mut self.lines);
        self.settle(broken)
    }

    /// The workers of a loaded version fail for good, or answer again.
    pub(super) fn worker(&mut self, version: &str, up: bool, broken: Option<Broken>) -> Result<(), Violation> {
        let failed = || WorkerHealth::Failed { reason: "it died".to_owned() };
        self.versions.observe(version, if up { WorkerHealth::Ready } else { failed() });
        self.settle(broken)
    }

    /// Whether time alone would change something.
    pub(super) fn waits(&self) -> bool {
        let asked = self.asked.as_ref().map(|asked| asked.of_pod(&self.name));
        let later = |desired| !self.versions.plan(desired, self.clock + LONG, &self.lines).is_empty();
        self.versions.next_retry(self.clock).is_some() && asked.is_some_and(later)
    }

    pub(super) fn wait(&mut self, broken: Option<Broken>) -> Result<(), Violation> {
        self.clock += LONG;
        self.settle(broken)
    }

    /// What it would write now, if it is something else than what it wrote.
    pub(super) fn news(&self, replicas: u32) -> Option<ReplicaStatus> {
        if self.cut_off {
            return None;
        }
        let desired = self.asked.as_ref().map(|asked| asked.of_pod(&self.name))?;
        let mut snapshot = self.versions.snapshot(Some(desired), &self.lines, self.clock);
        if let Some((version, _)) = self.breached.clone().filter(|_| self.is_breached(desired)) {
            let (signal, value, limit) = ("errorRate".to_owned(), String::new(), String::new());
            let breach = Some(BreachStatus { signal, value, limit, samples: 20 });
            snapshot.canary = Some(ReplicaCanary { version, share: None, breach, too_few_requests: false });
        }
        let entry = entry(&self.name, &snapshot, Figures::default(), None, NOW);
        (self.cadence.decide(&entry, replicas, self.clock + LONG) == Decision::Write).then_some(entry)
    }

    pub(super) fn written(&mut self, entry: ReplicaStatus, resource_version: u64) {
        self.wrote = true;
        self.cadence.written(entry, Some(resource_version), 0.0, self.clock);
    }

    /// Of two pods with the same hash the same is to be expected.
    pub(super) fn hash(&self, hasher: &mut DefaultHasher) {
        (self.asked.as_ref().map(|asked| asked.hash), self.wrote).hash(hasher);
        let turn = self
            .asked
            .as_ref()
            .map(|asked| asked.of_pod(&self.name))
            .map(|own| (own.has_turn, own.yields, own.quarantined));
        (self.cut_off, self.trouble, self.large, self.marked, turn).hash(hasher);
        let Route { active, canary, previous, held_from } = self.versions.route();
        (active, previous, held_from, &self.checks, self.versions.is_stalled()).hash(hasher);
        (canary.as_ref().map(|canary| (&canary.version, canary.share)), &self.breached).hash(hasher);
        for (name, entry) in self.versions.iter() {
            (name, entry.phase, entry.attempt, entry.passed).hash(hasher);
            (entry.is_up(), entry.health.is_some()).hash(hasher);
            entry.refusal.as_ref().map(|refusal| refusal.gate.as_str()).hash(hasher);
            entry.retry_at.map(|at| at > self.clock).hash(hasher);
            entry.slow_at().map(|at| at > self.clock).hash(hasher);
            entry.in_vain_until.map(|at| at > self.clock).hash(hasher);
            for line in [self.lines.get(name), entry.told.last()] {
                line.is_some().hash(hasher);
                line.into_iter().for_each(|line| hash_line(line, hasher));
            }
        }
    }
}

fn hash_line(line: &CandidateStatus, hasher: &mut DefaultHasher) {
    (line.phase.as_str(), line.wait_reason.map(|reason| reason.as_str())).hash(hasher);
    for gate in &line.gates {
        (gate.name.as_str(), gate.verdict.as_str()).hash(hasher);
    }
}

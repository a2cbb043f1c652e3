//! What to do next, as a pure function: [`World`] in, [`Plan`] out. No clock, no cluster, no randomness.
//!
//! ```text
//!            start         enough prepared          enough switched           bake over
//!  (rest) ─────────▶ Prepare ──────────────▶ Commit ──────────────▶ Bake ─────────────▶ (rest)
//!    ▲                  │  │ (Canary, if asked) ▲  │ a worker failed or time up  │
//!    ├── rejected ◀─────┤  └──▶ 5% ──▶ 25% ─────┘  ▼                             ▼
//!    └── cancelled ◀────┘           └─ failed ─▶ Rollback ──────────────────▶ (rest, rejected)
//! ```
//!
//! One call makes at most one step: each step is one status write that agents act upon, and what may follow is decided
//! from what they then report. What fails in one pod and works in the others is that pod's and no reason to refuse a
//! version: `fleet` counts their voices. A status write is refused by the API server when the object it was decided from is no
//! longer the newest, so a decision from a stale world has no effect; a crash before or after the write is the same as
//! one late pass. A BlueGreen rollout takes the same steps with two sets of pods (`sides`). Absent: anything about children (see
//! `build`) and conditions (see `status`).

use std::time::Duration;

use gantry_crds::{
    InferenceServiceStatus,
    status::{
        CandidateStatus, FitStatus, GateName, NamedVersion, RejectedOutcome, RejectedStatus, ReplicaStatus,
        RolloutStatus, RolloutStep, Side, StrategyName, WaitReason,
    },
};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::{
    limits::{self, BAKE_WITHOUT_SPEC, JUDGED_RESTARTS_MAX, SWITCH_TIMEOUT},
    validate::{ValidService, WantedVersion},
};
use failure::{Failure, prepare_message, waiting_for};
use fleet::{Candidacy, Switched};
use judged::{Comparison, Verdict};

mod agents;
mod bake;
#[cfg(test)]
mod bake_tests;
mod canary;
#[cfg(test)]
mod canary_tests;
mod failure;
mod fleet;
#[cfg(test)]
mod fleet_tests;
mod hold;
#[cfg(test)]
mod hold_tests;
pub mod judged;
#[cfg(test)]
mod latch_tests;
mod progress;
#[cfg(test)]
mod progress_tests;
mod quarantine;
#[cfg(test)]
mod quarantine_tests;
mod sides;
#[cfg(test)]
mod sides_tests;
mod template;
#[cfg(test)]
mod template_tests;
#[cfg(test)]
mod tests;
mod transition;
mod waits;

pub use transition::Transition;

/// Why a version is given up that the user does not want any more.
const ABORTED: &str = "spec.rollout.abort names it";

/// All that a decision depends on.
#[derive(Debug, Clone, Copy)]
pub struct World<'a> {
    /// The present, in whole seconds: the API keeps no more.
    pub now: Timestamp,
    /// What the user asks for; `None` when it cannot be carried out.
    pub spec: Option<&'a ValidService>,
    /// Where the rollout stands.
    pub state: &'a RolloutState,
    /// Pods of the side that answers which run and are not being ended, with what they report.
    pub pods: &'a [CountedPod<'a>],
    /// What matters of the two sets of pods to a BlueGreen rollout.
    pub sides: SidesSeen<'a>,
    /// Pods that there should be.
    pub target_replicas: i32,
    /// ModelVersions that exist.
    pub stamped: &'a [StampedVersion],
    /// Why a pod that there should be does not run, in a sentence.
    pub missing_pod: Option<&'a str>,
}

impl<'a> World<'a> {
    /// The pods that judge a candidate: those that have what the spec asks for (`template` says why).
    fn judges(&self) -> impl Iterator<Item = &'a CountedPod<'a>> {
        self.pods.iter().filter(|pod| !pod.outdated)
    }

    /// Pods that are replaced by such.
    fn older_pods(&self) -> usize {
        self.pods.len() - self.judges().count()
    }
}

/// What matters of the two sets of pods to a BlueGreen rollout.
#[derive(Debug, Clone, Copy, Default)]
pub struct SidesSeen<'a> {
    /// Pods of the side that does not answer which run and are not being ended, with what they report.
    pub other_pods: &'a [CountedPod<'a>],
    /// Why a pod that there should be on that side does not run, in a sentence.
    pub missing_pod: Option<&'a str>,
    /// Whether that is for want of a node or of the right to make it.
    pub has_no_node: bool,
    /// Whether the Service points to the side that the state names.
    pub is_flipped: bool,
    /// Whether all pods of the side that answers say of which one they are.
    pub is_labelled: bool,
    /// Whether the world's pods are those of the side that does not answer, by which a candidate is judged.
    pub judges_are_other: bool,
}

/// A pod that a rollout waits for.
#[derive(Debug, Clone, Copy)]
pub struct CountedPod<'a> {
    /// Name.
    pub name: &'a str,
    /// Whether requests reach it.
    pub ready: bool,
    /// Its own entry in the status, once there is one.
    pub report: Option<&'a ReplicaStatus>,
    /// It is of an older template, with other resources than the spec asks for.
    pub outdated: bool,
}

/// A ModelVersion that exists.
#[derive(Debug, Clone, PartialEq)]
pub struct StampedVersion {
    /// Its frozen content.
    pub version: NamedVersion,
    /// Its number within the service.
    pub revision: i64,
    /// It was taken back when it was tried last, or refused for what it is: see [`judges_the_model`].
    pub is_refused: bool,
}

/// Whether a gate's verdict is about the model: others are about the room for it, its source, or the time that it had.
#[must_use]
pub fn judges_the_model(gate: GateName) -> bool {
    !matches!(gate, GateName::Fetch | GateName::Memory | GateName::Deadline | GateName::Unknown(_))
}

/// The part of the status that the rollout consists of.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RolloutState {
    /// Version that answers.
    pub active: Option<String>,
    /// Version that is prepared.
    pub candidate: Option<String>,
    /// Version that was active and stays loaded.
    pub previous: Option<String>,
    /// The set of pods that answers.
    pub active_side: Side,
    /// The rollout in progress.
    pub rollout: Option<RolloutStatus>,
    /// The latch.
    pub rejected: Option<RejectedStatus>,
    /// What the versions named here are.
    pub versions: Vec<NamedVersion>,
    /// Attempts that were begun so far.
    pub attempts: i64,
    /// How pods that are behind go over to the active version: see [`hold::goes_over_by`].
    pub goes_over_by: Option<StrategyName>,
    /// Pods that are not to get requests: see [`quarantine`].
    pub quarantined: Vec<String>,
}

impl From<&InferenceServiceStatus> for RolloutState {
    fn from(status: &InferenceServiceStatus) -> Self {
        Self {
            active: status.active_version.clone(),
            candidate: status.candidate_version.clone(),
            previous: status.previous_version.clone(),
            active_side: status.active_side.unwrap_or_default(),
            rollout: status.rollout.clone(),
            rejected: status.rejected.clone(),
            versions: status.versions.clone(),
            attempts: status.attempts,
            goes_over_by: status.goes_over_by,
            quarantined: status.quarantined.clone(),
        }
    }
}

impl RolloutState {
    /// The version that can be gone back to: the previous one or, when it was not kept loaded, the one that `versions`
    /// still describes for the time of the bake.
    fn way_back(&self) -> Option<&str> {
        let named = || self.versions.iter().map(|version| version.name.as_str());
        self.previous.as_deref().or_else(|| named().find(|name| Some(*name) != self.active.as_deref()))
    }

    /// Whether a version has a part to play, so that its ModelVersion has to stay.
    fn names(&self, version: &str) -> bool {
        self.versions.iter().any(|named| named.name == version)
            || self.rejected.as_ref().is_some_and(|rejected| rejected.version == version)
    }

    /// The state without what only a foreign hand can have left in it.
    fn repaired(mut self) -> Self {
        if let Some(rollout) = &self.rollout {
            let is_active = self.active.as_deref() == Some(rollout.version.as_str());
            let possible = match rollout.step {
                RolloutStep::Prepare | RolloutStep::Rollback => !is_active,
                RolloutStep::Canary => !is_active && self.active.is_some() && rollout.canary.is_some(),
                RolloutStep::Commit | RolloutStep::Bake => is_active,
                // Of a later release, which this one was put in the place of.
                RolloutStep::Unknown(_) => false,
            };
            if !possible {
                self.rollout = None;
            }
        }
        self.candidate = match &self.rollout {
            Some(rollout) if rollout.step.has_candidate() => Some(rollout.version.clone()),
            _ => None,
        };
        let bakes = |rollout: &RolloutStatus| !rollout.step.has_candidate() || rollout.bake.is_some();
        if !self.rollout.as_ref().is_some_and(bakes) {
            self.previous = None;
        }
        self
    }
}

/// What changes in the cluster besides the children.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The state to be written; the same as observed when there is nothing to do.
    pub state: RolloutState,
    /// The step that was made, if any.
    pub transition: Option<Transition>,
    /// ModelVersions to create before the state that names them is written.
    pub stamp: Vec<NamedVersion>,
    /// ModelVersions beyond the history limit.
    pub delete: Vec<String>,
    /// When to decide again if nothing happens before.
    pub wake_at: Option<Timestamp>,
}

/// Decides the next step.
#[must_use]
pub fn decide(world: &World) -> Plan {
    let state = world.state.clone().repaired();
    let (mut state, transition) = match state.rollout.clone() {
        None => rest(world, state),
        Some(rollout) => match rollout.step {
            RolloutStep::Prepare | RolloutStep::Canary => prepare(world, state, rollout),
            RolloutStep::Commit => commit(world, state, &rollout),
            RolloutStep::Bake => bake(world, state, &rollout),
            RolloutStep::Rollback => rollback(world, state, &rollout),
            RolloutStep::Unknown(_) => rest(world, state),
        },
    };
    state.goes_over_by = hold::goes_over_by(world, &state);
    state.quarantined = quarantine::pods(world, &state);
    state.versions = named_versions(world, &state);
    let missing = |version: &&NamedVersion| !world.stamped.iter().any(|stamped| stamped.version.name == version.name);
    Plan {
        stamp: state.versions.iter().filter(missing).cloned().collect(),
        delete: surplus(world, &state),
        wake_at: wake_at(world, &state),
        state,
        transition,
    }
}

/// The next moment at which time alone changes the decision.
fn wake_at(world: &World, state: &RolloutState) -> Option<Timestamp> {
    let rollout = state.rollout.as_ref()?;
    let prepares = rollout.step == RolloutStep::Prepare;
    let note = progress::note_due(&world.of_candidate(rollout), rollout).filter(|_| prepares);
    let no_room = (prepares && sides::is_blue_green(rollout)).then(|| sides::no_room_at(rollout));
    let bake = rollout.bake.as_ref().map(|bake| bake.deadline.0);
    let alone = sides::left_alone_until(rollout);
    let switches = matches!(rollout.step, RolloutStep::Commit | RolloutStep::Rollback);
    let switched = switches.then(|| switch_due(rollout));
    note.into_iter()
        .chain(alone)
        .chain(no_room)
        .chain(bake)
        .chain(canary::due(rollout))
        .chain(switched)
        .chain([rollout.deadline.0])
        .filter(|at| *at > world.now)
        .min()
}

type Step = (RolloutState, Option<Transition>);

/// No rollout: begins one when the spec asks for another version that is not latched.
fn rest(world: &World, mut state: RolloutState) -> Step {
    let Some(spec) = world.spec else { return (state, None) };
    let wanted = &spec.wanted;
    if state.active.as_deref() == Some(wanted.name.as_str()) {
        // The user went back to what is served: the latch has done its work.
        state.rejected = None;
        return (state, None);
    }
    // Without a pod a version can be neither validated nor refused.
    if is_latched(&state, wanted) || spec.aborts(&wanted.name) || world.target_replicas == 0 {
        return (state, None);
    }
    start(world, state, spec, 0)
}

/// Whether `wanted` was refused and nothing that it is judged by has changed since.
#[must_use]
pub fn is_latched(state: &RolloutState, wanted: &WantedVersion) -> bool {
    state.rejected.as_ref().is_some_and(|rejected| rejected.version == wanted.name && judged::stands(rejected, wanted))
}

/// Whether the spec asks for a version that is to be prepared as soon as pods have switched.
fn asks_for_another(world: &World, state: &RolloutState) -> bool {
    let is_other = |wanted: &WantedVersion| state.active.as_ref() != Some(&wanted.name) && !is_latched(state, wanted);
    let asks = |spec: &ValidService| is_other(&spec.wanted) && !spec.aborts(&spec.wanted.name);
    world.target_replicas > 0 && world.spec.is_some_and(asks)
}

/// Whether pods that can switch have switched and an edit may be the cure for the others. Not while both sides are in use.
fn is_overtaken(world: &World, state: &RolloutState, now: &RolloutStatus) -> bool {
    world.now >= switch_due(now) && asks_for_another(world, state) && !sides::is_blue_green(now)
}

/// When pods that can switch have switched.
fn switch_due(now: &RolloutStatus) -> Timestamp {
    after(now.started_at.0, SWITCH_TIMEOUT)
}

/// Begins an attempt, which is another one at the same version after so many `restarts`.
fn start(world: &World, state: RolloutState, spec: &ValidService, restarts: i32) -> Step {
    let strategy = sides::strategy(world, &state);
    if strategy == StrategyName::BlueGreen && !sides::can_begin(world) {
        return (state, None);
    }
    let candidate = &spec.wanted.name;
    let plan = match (strategy, &state.active) {
        (StrategyName::BlueGreen, Some(active)) => {
            format!(
                "BlueGreen: as many pods again load {candidate}, then the Service points to them and not to {active}"
            )
        }
        (StrategyName::HoldRequests, Some(active)) => format!(
            "HoldRequests: one pod after the other unloads {active} and loads {candidate}; requests that come to it wait meanwhile"
        ),
        (_, Some(active)) => {
            format!("InPlaceSwap: pods load {candidate} beside {active}, then switch{}", canary::planned(spec))
        }
        (_, None) => format!("InPlaceSwap: {candidate} is the first version, nothing is replaced"),
    };
    start_by(world, state, spec, restarts, (strategy, plan))
}

/// Begins it by this strategy, for the reason that its plan gives.
fn start_by(
    world: &World,
    mut state: RolloutState,
    spec: &ValidService,
    restarts: i32,
    (strategy, plan): (StrategyName, String),
) -> Step {
    let wanted = &spec.wanted;
    let instead_of = state.candidate.take();
    let bake = bake::set_aside(world, &state);
    if bake.is_none() {
        state.previous = None;
    }
    state.rejected = None;
    state.candidate = Some(wanted.name.clone());
    state.attempts = state.attempts.saturating_add(1);
    let mut rollout = rollout(world, &wanted.name, RolloutStep::Prepare, plan, spec.progress_deadline);
    (rollout.attempt, rollout.judged, rollout.bake) = (state.attempts, Some(wanted.judged.clone()), bake);
    (rollout.restarts, rollout.resources) = (restarts, Some(spec.pod.resources_hash()));
    rollout.strategy = Some(strategy);
    let judging = world.of_candidate(&rollout);
    let time = progress::time(spec, &rollout);
    progress::count(&judging, &mut rollout, time);
    rollout.message = Some(prepare_message(&judging, &rollout));
    state.rollout = Some(rollout);
    (state, Some(Transition::Started { version: wanted.name.clone(), instead_of }))
}

fn prepare(world: &World, mut state: RolloutState, mut rollout: RolloutStatus) -> Step {
    if let Some(back) = bake::watch(world, &mut state, &mut rollout) {
        return back;
    }
    let Some(spec) = world.spec else {
        return cancel(state, rollout.version, "the spec asks for something that cannot be carried out");
    };
    if let Some(back) = bake::by_hand(world, spec, &mut state, &mut rollout) {
        return back;
    }
    let wanted = &spec.wanted;
    if state.active.as_deref() == Some(wanted.name.as_str()) {
        return cancel(state, rollout.version, "the spec asks for the active version again");
    }
    if world.target_replicas == 0 {
        return cancel(state, rollout.version, "spec.replicas is 0, and only a pod can validate a version");
    }
    if spec.aborts(&wanted.name) {
        return cancel(state, rollout.version, ABORTED);
    }
    if sides::asks_for_another_way(world, &state, &rollout) {
        return start(world, state, spec, 0);
    }
    let begun_with = rollout.judged.clone().filter(|_| wanted.name == rollout.version);
    rollout.judged = Some(match begun_with.as_deref().map(|begun| judged::compare(begun, &wanted.judged)) {
        Some(Comparison::Holds { judged }) => {
            if begun_with.is_some_and(|begun| begun != judged) {
                // What pods waited for is there: they look for it now and then, and have their time from now on.
                progress::begin_anew(world, &mut rollout);
            }
            judged
        }
        // What changes faster than pods prepare would begin attempts for ever, and each change would be a write.
        // And who is answered by the candidate already is not to be answered by the other one again.
        Some(Comparison::OtherObjects)
            if rollout.restarts >= JUDGED_RESTARTS_MAX || rollout.step == RolloutStep::Canary =>
        {
            rollout.judged.clone().unwrap_or_default()
        }
        Some(Comparison::OtherObjects) => return start(world, state, spec, rollout.restarts + 1),
        Some(Comparison::OtherSpec) | None => return start(world, state, spec, 0),
    });
    if rollout.step == RolloutStep::Canary {
        return canary::go_on(world, state, rollout, spec);
    }
    let judging = &world.of_candidate(&rollout);
    let held = spec.holds(&rollout.version);
    rollout.turn = hold::is_hold(&rollout).then(|| hold::turn(judging, &rollout, held)).flatten();
    if held {
        // No clock runs for who is told to wait, and it begins anew when that is over.
        rollout.progress = None;
    } else {
        let time = progress::time(spec, &rollout);
        progress::count(judging, &mut rollout, time);
    }
    let candidacy = match rollout.strategy() {
        StrategyName::BlueGreen => sides::judge_candidate(judging, &rollout),
        _ => fleet::judge_candidate(judging, &rollout),
    };
    let fit = tightest_fit(judging.judges().filter_map(|pod| candidate_report(pod, &rollout))).cloned();
    match candidacy {
        Candidacy::Refused(failure) if sides::helps(world, &state, &rollout, &failure) => {
            let (why, alone) = (not_beside(fit.as_ref()), fit.as_ref().and_then(hold::alone));
            let plan = (StrategyName::BlueGreen, format!("BlueGreen: {why}: as many pods again load it"));
            let (mut state, _) = start_by(world, state, spec, rollout.restarts, plan);
            state.rollout.iter_mut().for_each(|begun| begun.alone.clone_from(&alone));
            return (state, Some(Transition::Started { version: rollout.version, instead_of: None }));
        }
        Candidacy::Refused(failure)
            if let Some(plan) = last_resort(world, &state, &rollout, &failure, fit.as_ref()) =>
        {
            let plan = (StrategyName::HoldRequests, plan);
            let (state, _) = start_by(world, state, spec, rollout.restarts, plan);
            return (state, Some(Transition::Started { version: rollout.version, instead_of: None }));
        }
        Candidacy::Refused(failure) if held && failure.gate == GateName::Deadline => {}
        Candidacy::Refused(failure) => {
            let failure = canary::no_other_way(spec, failure.where_unsteady(judging, &rollout));
            return reject(world, state, &rollout, failure);
        }
        Candidacy::Ready if held => {
            rollout.wait_reason = None;
            rollout.message = Some(limits::message(&format!(
                "prepared, and spec.rollout.paused: set it to false, or spec.rollout.promote to {}",
                rollout.version
            )));
            state.rollout = Some(rollout);
            return (state, None);
        }
        Candidacy::Ready => return canary::begin(world, state, rollout),
        Candidacy::Open => {}
    }
    rollout.message = Some(prepare_message(judging, &rollout));
    rollout.wait_reason = waits::causes(judging, &rollout).first().map(|cause| cause.reason);
    if let Some(fit) = fit.filter(|_| rollout.strategy() == StrategyName::InPlaceSwap) {
        let beside = if state.active.is_some() { " left beside the active one" } else { "" };
        let first = if state.active.is_some() { canary::planned(spec) } else { String::new() };
        rollout.plan = format!("InPlaceSwap: candidate {} <= {}{beside}{first}", fit.required, fit.available);
    }
    state.rollout = Some(rollout);
    (state, None)
}

/// Why the candidate has no room beside the active version.
fn not_beside(fit: Option<&FitStatus>) -> String {
    let sum = fit.map(|fit| format!("candidate {} > {} left beside it", fit.required, fit.available));
    sum.unwrap_or_else(|| "the candidate does not fit beside it".to_owned())
}

/// The plan of the strategy that is left where pods have no room for both versions, nor nodes for more pods: see [`hold`].
fn last_resort(
    world: &World,
    state: &RolloutState,
    now: &RolloutStatus,
    failure: &Failure,
    fit: Option<&FitStatus>,
) -> Option<String> {
    state.active.as_ref()?;
    if sides::is_blue_green(now) && failure.is_of_no_room() {
        return hold::last_resort(world, now.alone.as_ref(), &failure.why_no_room(world, now));
    }
    let alone = fit.and_then(hold::alone).filter(|_| hold::helps(world, now, failure));
    hold::last_resort(world, alone.as_ref(), &not_beside(fit))
}

fn has_prepared(report: &ReplicaStatus, version: &str) -> bool {
    report.prepared.as_deref() == Some(version)
}

/// Whether a report is about this attempt. Clocks have no say in it: the pod's may be another than the operator's.
fn is_current(report: &ReplicaStatus, now: &RolloutStatus) -> bool {
    report.attempt == Some(now.attempt)
}

/// What a pod says in this attempt about the version that is rolled out.
pub(crate) fn candidate_report<'a>(pod: &CountedPod<'a>, now: &RolloutStatus) -> Option<&'a CandidateStatus> {
    let report = pod.report.filter(|report| is_current(report, now))?;
    report.candidate.as_ref().filter(|candidate| candidate.version == now.version)
}

/// Whether a pod has prepared the version in this attempt.
pub(crate) fn is_prepared(pod: &CountedPod, now: &RolloutStatus) -> bool {
    pod.report.is_some_and(|report| has_prepared(report, &now.version) && is_current(report, now))
}

fn serves(report: &ReplicaStatus, version: &str) -> bool {
    report.version.as_deref() == Some(version)
}

/// The pods are prepared: one write makes the candidate active and keeps the way back.
fn switch(world: &World, mut state: RolloutState, rollout_now: RolloutStatus) -> Step {
    let version = rollout_now.version.clone();
    state.previous = state.active.replace(version.clone());
    state.candidate = None;
    if sides::is_blue_green(&rollout_now) {
        state.active_side = state.active_side.other();
    }
    // From here on, what is named beside the active version is the way back; of one before it there is no more to say.
    let (active, previous) = (&state.active, &state.previous);
    state.versions.retain(|named| [active, previous].contains(&&Some(named.name.clone())));
    state.rollout = Some(RolloutStatus {
        attempt: rollout_now.attempt,
        strategy: rollout_now.strategy,
        judged: rollout_now.judged,
        ..rollout(world, &version, RolloutStep::Commit, rollout_now.plan, SWITCH_TIMEOUT)
    });
    (state, Some(Transition::Committed { version }))
}

fn commit(world: &World, mut state: RolloutState, now: &RolloutStatus) -> Step {
    let version = now.version.as_str();
    let aborted = world.spec.is_some_and(|spec| spec.aborts(&now.version));
    if let Some(way_back) = state.way_back().filter(|_| aborted).map(str::to_owned) {
        return go_back(world, state, now, way_back, ABORTED);
    }
    if let Some(back) = sides::left_alone(world, &mut state, now) {
        return back;
    }
    let switched = fleet::judge_switch(world, now);
    let Some(way_back) = state.way_back().map(str::to_owned) else {
        // The first version: there is nothing to go back to, and nothing to keep.
        let open = matches!(switched, Switched::Open { .. }) && world.now < now.deadline.0;
        return if open { (state, None) } else { settle(state, version) };
    };
    match switched {
        Switched::Failed(failure) => take_back(world, state, now, way_back, failure),
        Switched::Done => {
            // A spec that became unusable meanwhile does not stop what was begun.
            let bake = world.spec.map_or(BAKE_WITHOUT_SPEC, |spec| spec.bake);
            if world.spec.is_some_and(|spec| !spec.keep_resident) {
                state.previous = None;
            }
            let mut baking = RolloutStatus {
                attempt: now.attempt,
                strategy: now.strategy,
                judged: now.judged.clone(),
                ..rollout(world, version, RolloutStep::Bake, now.plan.clone(), bake)
            };
            baking.message = fleet::left_behind(world, &baking);
            state.rollout = Some(baking);
            (state, Some(Transition::Baking { version: version.to_owned() }))
        }
        // Nobody has it, and those that could have switched have: the edit may be the cure.
        Switched::Open { .. } if is_overtaken(world, &state, now) => match world.spec {
            Some(spec) => start(world, state, spec, 0),
            None => (state, None),
        },
        Switched::Open { deadline } => {
            let message = fleet::left_behind(world, now);
            state.rollout = Some(RolloutStatus { deadline: Time(deadline), message, ..now.clone() });
            (state, None)
        }
    }
}

fn bake(world: &World, mut state: RolloutState, now: &RolloutStatus) -> Step {
    // A bake that the user makes shorter or longer is so at once.
    let deadline = world.spec.map_or(now.deadline.0, |spec| after(now.started_at.0, spec.bake));
    let now = &RolloutStatus { deadline: Time(deadline), ..now.clone() };
    let way_back = state.way_back().map(str::to_owned);
    if let (Some(failure), Some(way_back)) = (fleet::judge_bake(world, now), way_back.clone()) {
        if sides::waits_for_the_way_back(world, &state, now) {
            let why = sides::why_no_way_back(world, &way_back).map(|why| format!(" ({why})")).unwrap_or_default();
            let message = format!("waits for the pods of {way_back}{why} to take it back: {}", failure.message);
            let (message, wait_reason) = (Some(limits::message(&message)), Some(WaitReason::GateFailed));
            state.rollout = Some(RolloutStatus { message, wait_reason, ..now.clone() });
            return (state, None);
        }
        return take_back(world, state, now, way_back, failure);
    }
    if let Some(spec) = world.spec {
        if let Some(way_back) = way_back.clone().filter(|_| spec.aborts(&now.version)) {
            return go_back(world, state, now, way_back, ABORTED);
        }
        if spec.promote.as_ref() == Some(&now.version) {
            return settle(state, &now.version);
        }
    }
    if let Some(back) = sides::left_alone(world, &mut state, now) {
        return back;
    }
    if let Some(spec) = world.spec {
        if spec.wanted.name == now.version {
            // The user went back to what is served: the latch has done its work.
            state.rejected = None;
        } else if asks_for_another(world, &state) {
            // What waits for nothing but the edit goes on with it.
            if !sides::is_blue_green(now) || sides::is_deserted(world, &state, now) {
                return start(world, state, spec, 0);
            }
            if let Some(to) = way_back.filter(|to| *to == spec.wanted.name) {
                return go_back(world, state, now, to, "the spec asks for it again");
            }
        }
    }
    if fleet::is_watched_to_the_end(world, now) {
        return settle(state, &now.version);
    }
    let waits = sides::waits_for_the_bake(world, &state, now);
    let message = [waits, fleet::waits_for_an_answer(world, now), fleet::left_behind(world, now)]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>();
    let message = (!message.is_empty()).then(|| limits::message(&message.join("; ")));
    state.rollout = Some(RolloutStatus { message, wait_reason: None, progress: None, ..now.clone() });
    (state, None)
}

fn rollback(world: &World, state: RolloutState, now: &RolloutStatus) -> Step {
    // An edit may be the cure for a pod that has to load the way back first: for that it does not wait.
    if sides::is_blue_green(now) && !world.sides.is_flipped && world.now < now.deadline.0 {
        return (state, None);
    }
    let edited = asks_for_another(world, &state);
    let until = if edited { now.deadline.0.min(switch_due(now)) } else { now.deadline.0 };
    // Who answers nobody lags behind nobody.
    let lags = |pod: &CountedPod| {
        // It has to load the way back, which answers once it is loaded.
        if hold::is_hold(now) && !edited {
            return pod.report.is_none_or(|report| report.version != state.active);
        }
        let will_switch = |report: &ReplicaStatus| {
            serves(report, &now.version) && (!edited || report.resident.is_some() && report.resident == state.active)
        };
        pod.ready && (pod.report.is_some_and(will_switch) || canary::is_given_a_share(pod, now))
    };
    if world.pods.iter().any(lags) && world.now < until {
        return (state, None);
    }
    // A pod that is late still follows activeVersion by itself.
    (bake::resume(state), Some(Transition::RolledBack { version: now.version.clone() }))
}

fn settle(mut state: RolloutState, version: &str) -> Step {
    state.rollout = None;
    state.previous = None;
    (state, Some(Transition::Settled { version: version.to_owned() }))
}

fn cancel(state: RolloutState, version: String, why: &'static str) -> Step {
    (bake::resume(state), Some(Transition::Cancelled { version, why }))
}

fn reject(world: &World, mut state: RolloutState, now: &RolloutStatus, failure: Failure) -> Step {
    let message = failure.message.clone();
    let transition = Transition::Rejected { version: now.version.clone(), gate: failure.gate, message };
    state.rejected = Some(latch(world, &state, now, failure, RejectedOutcome::Rejected));
    (bake::resume(state), Some(transition))
}

fn take_back(world: &World, mut state: RolloutState, now: &RolloutStatus, to: String, failure: Failure) -> Step {
    let version = now.version.clone();
    let message = failure.message.clone();
    state.rejected = Some(latch(world, &state, now, failure, RejectedOutcome::RolledBack));
    let state = back_to(world, state, now, to.clone());
    (state, Some(Transition::RollingBack { version, to, message }))
}

/// Requests go back to the version before because the user says so: nothing is held against the one that they leave.
fn go_back(world: &World, state: RolloutState, now: &RolloutStatus, to: String, why: &str) -> Step {
    let version = now.version.clone();
    let state = back_to(world, state, now, to.clone());
    (state, Some(Transition::RollingBack { version, to, message: why.to_owned() }))
}

/// The state in which pods switch back, or requests go to the other side again.
fn back_to(world: &World, mut state: RolloutState, now: &RolloutStatus, to: String) -> RolloutState {
    // A pod may have unloaded it where a candidate had no room beside it.
    let has_it = |report: &ReplicaStatus| report.resident.as_ref() == Some(&to) || serves(report, &to);
    let goes_back = |pod: &&CountedPod| pod.ready || pod.report.is_some_and(|report| serves(report, &now.version));
    let mut back = world.pods.iter().filter(goes_back).peekable();
    // That none lacks it is no word of those who are not there.
    let is_any = back.peek().is_some();
    let resident = state.previous.is_some() && is_any && back.all(|pod| pod.report.is_some_and(has_it));
    let flips = state.previous.as_ref() == Some(&to) && sides::can_flip_back(world, now, &to);
    let time = match world.spec {
        Some(spec) if !resident && !flips => spec.progress_deadline,
        _ => SWITCH_TIMEOUT,
    };
    state.active = Some(to);
    state.previous = None;
    if flips {
        state.active_side = state.active_side.other();
    }
    state.rollout = Some(RolloutStatus {
        attempt: now.attempt,
        strategy: now.strategy.filter(|_| flips || !sides::is_blue_green(now)),
        ..rollout(world, &now.version, RolloutStep::Rollback, now.plan.clone(), time)
    });
    state
}

fn latch(
    world: &World,
    state: &RolloutState,
    now: &RolloutStatus,
    failure: Failure,
    outcome: RejectedOutcome,
) -> RejectedStatus {
    let named = state.versions.iter().find(|named| named.name == now.version);
    RejectedStatus {
        version: now.version.clone(),
        digest: named.and_then(|named| named.model.source.sha256.as_ref()).map(|digest| format!("sha256:{digest}")),
        // What was judged is what the rollout began with, not what the spec says by now.
        judged: judged::of_verdict(
            now.judged.as_deref().unwrap_or_default(),
            &Verdict {
                gate: failure.gate,
                waits: waits::awaited(now).is_some(),
                unsteady: now.restarts >= JUDGED_RESTARTS_MAX,
            },
            world.spec.map(|spec| &spec.wanted),
        ),
        gate: failure.gate,
        value: failure.value,
        message: failure.message,
        outcome,
        at: Time(world.now),
    }
}

fn rollout(world: &World, version: &str, step: RolloutStep, plan: String, time: Duration) -> RolloutStatus {
    RolloutStatus {
        version: version.to_owned(),
        step,
        attempt: 0,
        strategy: None,
        plan,
        started_at: Time(world.now),
        deadline: Time(after(world.now, time)),
        progress: None,
        message: None,
        wait_reason: None,
        judged: None,
        resources: None,
        restarts: 0,
        bake: None,
        turn: None,
        alone: None,
        canary: None,
    }
}

/// `time` after `start`, in whole seconds and never early.
fn after(start: Timestamp, time: Duration) -> Timestamp {
    let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
    let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
    start.checked_add(SignedDuration::from_secs(seconds)).unwrap_or(Timestamp::MAX)
}

/// The memory of the pod with the least room: of those where it does not fit, if there are any.
pub(crate) fn tightest_fit<'a>(candidates: impl Iterator<Item = &'a CandidateStatus>) -> Option<&'a FitStatus> {
    let available = |fit: &FitStatus| gantry_crds::quantity::parse(&fit.available).unwrap_or(f64::INFINITY);
    let fits = candidates.filter_map(|candidate| candidate.fit.as_ref());
    fits.min_by(|a, b| a.fits.cmp(&b.fits).then(available(a).total_cmp(&available(b))))
}

/// The frozen content of every version that agents may need, by name.
fn named_versions(world: &World, state: &RolloutState) -> Vec<NamedVersion> {
    let rollout = state.rollout.as_ref();
    let keeps_way_back = rollout.is_some_and(|rollout| matches!(rollout.step, RolloutStep::Commit | RolloutStep::Bake));
    let mut names: Vec<&str> =
        [&state.active, &state.candidate, &state.previous].into_iter().flatten().map(String::as_str).collect();
    names.extend(rollout.map(|rollout| rollout.version.as_str()));
    names.extend(rollout.and_then(|rollout| rollout.bake.as_ref()).map(|bake| bake.to.as_str()));
    if keeps_way_back {
        names.extend(state.versions.iter().map(|version| version.name.as_str()));
    }
    names.sort_unstable();
    names.dedup();
    let content = |name: &str| {
        // The spec goes first: the same version may have got another address, which pods to come should use.
        let wanted = world.spec.map(|spec| &spec.wanted).filter(|wanted| wanted.name == name).map(|wanted| {
            NamedVersion { name: name.to_owned(), model: wanted.model.clone(), runtime: wanted.runtime.clone() }
        });
        let stamped = || world.stamped.iter().map(|stamped| &stamped.version);
        wanted.or_else(|| state.versions.iter().chain(stamped()).find(|version| version.name == name).cloned())
    };
    names.into_iter().filter_map(content).collect()
}

/// The oldest versions beyond the history limit that play no part. Nothing is deleted while pods switch, or in a pass that
/// changes the state. While they prepare and bake it is: edits that come faster than bakes end leave no other time.
fn surplus(world: &World, state: &RolloutState) -> Vec<String> {
    let Some(spec) = world.spec else { return Vec::new() };
    let switches = state.rollout.as_ref().is_some_and(|now| !now.step.has_candidate() && now.step != RolloutStep::Bake);
    if switches || state != world.state {
        return Vec::new();
    }
    let plays_no_part = |stamped: &&StampedVersion| {
        let name = stamped.version.name.as_str();
        // That it was refused is to be known as long as a pod answers with it.
        let answers = |pod: &CountedPod| pod.report.is_some_and(|report| serves(report, name));
        !state.names(name) && name != spec.wanted.name && !(stamped.is_refused && world.pods.iter().any(answers))
    };
    let mut history: Vec<_> = world.stamped.iter().filter(plays_no_part).collect();
    history.sort_by_key(|stamped| std::cmp::Reverse(stamped.revision));
    history.into_iter().skip(spec.history_limit).map(|stamped| stamped.version.name.clone()).collect()
}

//! What a fleet says of a version, from what its pods say: whose failure a failure is.
//!
//! What fails in one pod and works in the others is that pod's. A version is refused or taken back when the failures are
//! the version's: when no pod does better, or when two at least and more than half of the pods fail ([`is_versions`]).
//! So in a fleet of one the pod's word is the verdict, and in a fleet of two it takes both; at the deadline a candidate that one of two
//! has refused is not proved, and goes. Gates that judge what is in the
//! file, and its answers, are no matter of numbers ([`one_is_enough`]). A pod that gets no requests holds nobody up as long as
//! others get them. Why: `docs/decisions/0016-a-fleet-judges.md`.

use std::time::Duration;

use gantry_crds::status::{BreachStatus, GateName, GateVerdict, ReplicaHealth, ReplicaStatus, RolloutStatus};
use jiff::Timestamp;

use super::{
    CountedPod, World, after, agents, canary, candidate_report,
    failure::{Failure, said_of},
    has_prepared, hold, is_prepared, serves, template,
};
use crate::{limits, text::some_of};

/// What the pods say of a candidate.
pub(super) enum Candidacy {
    /// Some are still at it.
    Open,
    /// It can be switched to.
    Ready,
    /// It is refused.
    Refused(Failure),
}

/// What the pods say of a version that they are to switch to.
pub(super) enum Switched {
    /// Some have not switched yet.
    Open {
        /// Until when they may.
        deadline: Timestamp,
    },
    /// It answers.
    Done,
    /// It has to be taken back.
    Failed(Failure),
}

/// Whether `failures` of `pods` are the version's and not the pods' own.
fn is_versions(failures: usize, pods: usize) -> bool {
    failures > 0 && (failures == pods || (failures >= 2 && failures * 2 > pods))
}

/// Whether any of the pods that judge a candidate gets requests: then one that does not is not waited for. While all
/// requests go to older pods, those that come for them are the ones to ask, as are those of another side.
pub(super) fn judges_answer(world: &World) -> bool {
    !world.sides.judges_are_other && world.judges().any(|pod| pod.ready)
}

/// Judges a candidate. More than half of the pods that are waited for must have prepared it; where no pod answers at
/// all, one is better than none. To refuse it takes as many as in the whole fleet: the voices of pods that older ones make room for
/// are still to come.
pub(super) fn judge_candidate(world: &World, now: &RolloutStatus) -> Candidacy {
    let judges_answer = judges_answer(world);
    let (mut prepared, mut at_it, mut refusals) = (0, 0, Vec::new());
    for pod in world.judges() {
        if agents::has_prepared(world, pod, now) {
            prepared += 1;
            continue;
        }
        // Who does not know that the other one goes first says whether there is room beside it.
        let judges = !hold::is_hold(now) || agents::knows_strategy(pod, now);
        match Failure::of_candidate(pod, now).filter(|_| judges) {
            Some(failure) if one_is_enough(world, now, pod, failure.gate) => return Candidacy::Refused(failure),
            // It gets no requests while others do: it takes up what they answer with when it can.
            _ if judges_answer && !pod.ready && !hold::is_in_turn(now, pod) => {}
            Some(failure) => refusals.push(failure),
            None => at_it += 1,
        }
    }
    let voices = prepared + at_it + refusals.len();
    let (refused, to_come) = (refusals.len(), template::to_be_heard(world, voices));
    if is_versions(refused, voices + to_come) {
        return Candidacy::Refused(refusals.swap_remove(0));
    }
    let over = world.judges().next().is_some() && world.now >= now.deadline.0;
    if at_it > 0 && !over {
        return Candidacy::Open;
    }
    // Pods of an older template would switch, too, and they are not what it was judged in. Where one of them stays, that is
    // not the version's fault: those that come for the others suffice in the end, as any majority does.
    let stays_behind = over && prepared * 2 > voices + to_come;
    let alone = world.older_pods() == 0 || template::needs_the_switch(world, now) || stays_behind;
    let answered = world.pods.iter().any(|pod| pod.ready);
    if prepared > 0 && (prepared * 2 > voices || !answered) && alone {
        return Candidacy::Ready;
    }
    match (over, refusals.into_iter().next()) {
        (false, _) => Candidacy::Open,
        (true, Some(failure)) => {
            Candidacy::Refused(failure.of_some(refused, world.judges().count() + template::to_come(world)))
        }
        (true, None) => Candidacy::Refused(Failure::of_deadline(world, now, prepared)),
    }
}

/// Judges a candidate that answers a share of the requests, by its figures: why it has to be taken back. The rule is that of a bake,
/// and what else pods say of a candidate is [`judge_candidate`]'s.
pub(super) fn judge_canary(world: &World, now: &RolloutStatus) -> Option<Failure> {
    let (mut breaches, mut refusals, mut fine) = (Vec::new(), 0, 0);
    for pod in world.judges() {
        let canary = canary::report(pod, now);
        match canary.and_then(|canary| canary.breach.as_ref()) {
            Some(breach) => breaches.push(Failure::of_breach(pod, breach)),
            None if Failure::of_candidate(pod, now).is_some() => refusals += 1,
            // One that was asked too little does not do better than one that was asked, and answered badly.
            None => {
                let can_tell = !canary.is_some_and(|canary| canary.too_few_requests);
                fine += usize::from(can_tell && agents::has_prepared(world, pod, now));
            }
        }
    }
    let failed = breaches.len() + refusals;
    let is_its_own = is_versions(failed, failed + fine + template::to_come(world));
    breaches.into_iter().next().filter(|_| is_its_own)
}

/// The pods that do without a candidate which answers a share of the requests, and why.
pub(super) fn left_out(world: &World, now: &RolloutStatus) -> Option<String> {
    let trouble = |pod: &CountedPod| {
        let breach = canary::report(pod, now)?.breach.as_ref()?;
        Some(format!("{}: {}", pod.name, said_of(breach)))
    };
    let left: Vec<_> = world.judges().filter_map(trouble).collect();
    (!left.is_empty()).then(|| format!("goes on without {}", some_of(&left, ", ")))
}

/// Whether one pod's refusal by this gate is the version's. What is in a file is the same in every pod, once its digest has
/// shown that it is this file, unless one of them found it otherwise: what comes from a source may be another thing in each, a
/// page of a proxy or the half of the file. Answers that are not good enough in one pod would be given there.
fn one_is_enough(world: &World, now: &RolloutStatus, pod: &CountedPod, gate: GateName) -> bool {
    let passed = |pod: &CountedPod, gate: GateName| {
        let passed = |report: &gantry_crds::status::CandidateStatus| {
            report.gates.iter().any(|one| one.name == gate && one.verdict == GateVerdict::Pass)
        };
        is_prepared(pod, now) || candidate_report(pod, now).is_some_and(passed)
    };
    match gate {
        GateName::Format | GateName::Template => {
            passed(pod, GateName::Digest) && !world.judges().any(|other| passed(other, gate))
        }
        // What this release does not know may be about anything.
        GateName::Prompts | GateName::Drift | GateName::Shadow | GateName::Unknown(_) => true,
        GateName::Fetch
        | GateName::Digest
        | GateName::Memory
        | GateName::Load
        | GateName::Performance
        | GateName::Deadline
        | GateName::Health => false,
    }
}

/// How the pods stand with a version that is active.
#[derive(Default)]
struct Tally {
    /// Its worker failed there, or its figures passed a limit.
    workers: Vec<Failure>,
    /// The pod answers with another version and cannot switch.
    refusals: Vec<Failure>,
    /// Pods without any version that cannot load this one. That a source is away, or answers with other bytes by now, is none of
    /// these: the version was proved from it before.
    unable: Vec<Failure>,
    /// Pods that get requests and answer with another version.
    late: Vec<String>,
    /// Pods that are still at it: new ones that load it, and those that get no requests and have not switched.
    at_it: usize,
    /// Pods that have it and do not say that it failed.
    has: usize,
    /// Those of them that were asked too little to say anything of its figures.
    silent: usize,
    /// Whether the figures of any pod passed a limit.
    is_breached: bool,
    /// Those of them that get requests.
    works: usize,
    /// Pods that get requests and answer them, with figures that passed a limit.
    answers_badly: usize,
    /// Pods that come for older ones, which have a voice each that has not been heard yet.
    to_come: usize,
    /// Whether any of the older ones gets requests and answers with another version: nobody is left without an answer.
    older_answer: bool,
}

impl Tally {
    fn of(world: &World, now: &RolloutStatus) -> Self {
        let mut tally = Self { to_come: template::to_come(world), ..Self::default() };
        for pod in world.pods {
            let Some(report) = pod.report else {
                tally.at_it += usize::from(!pod.outdated);
                continue;
            };
            // One that is being replaced need not switch any more, nor be able to.
            if pod.outdated && !serves(report, &now.version) {
                tally.older_answer |= pod.ready && report.version.is_some();
                continue;
            }
            match &report.version {
                Some(serving) if *serving == now.version => {
                    if report.health == ReplicaHealth::Failed {
                        tally.workers.push(Failure::of_worker(pod));
                    } else if let Some(breach) = breach(report, now) {
                        tally.workers.push(Failure::of_breach(pod, breach));
                        tally.is_breached = true;
                        tally.answers_badly += usize::from(pod.ready);
                    } else {
                        tally.has += 1;
                        tally.silent += usize::from(report.too_few_requests);
                        tally.works += usize::from(pod.ready);
                    }
                }
                // A pod without any version is new: it starts with the active one.
                serving => match (Failure::of_candidate(pod, now), serving) {
                    (Some(failure), Some(_)) => tally.refusals.push(failure),
                    (Some(failure), None) if !is_of_the_source(failure.gate) => tally.unable.push(failure),
                    (None, Some(_)) if pod.ready => tally.late.push(pod.name.to_owned()),
                    (None, None) if has_prepared(report, &now.version) => tally.late.push(pod.name.to_owned()),
                    _ => tally.at_it += 1,
                },
            }
        }
        tally
    }

    /// Pods that failed with it, whatever they answer with.
    fn failed(&self) -> usize {
        self.workers.len() + self.refusals.len()
    }

    /// Why it has to be taken back. That a pod cannot load it, or that its worker dies there, is the version's failure only as
    /// far as others do no better, and those that are still at it or come for older ones may, until the time is `over`.
    fn verdict(self, over: bool) -> Option<Failure> {
        let (workers, failed) = (self.workers.len(), self.failed());
        let to_come = if over { 0 } else { self.to_come };
        let at_it = if over { 0 } else { self.at_it + self.has - self.works + to_come };
        // Where nobody else answers, what may come is not waited for.
        let nobody_answers = self.works + self.answers_badly == 0 && (over || !self.older_answer);
        // A pod that was asked nothing does not do better than one that was, and answered badly.
        let fine = self.has - if self.is_breached { self.silent } else { 0 };
        let dies = is_versions(workers, workers + fine + to_come) || (workers > 0 && nobody_answers);
        // Where nobody can get it and nobody has it, nobody answers.
        let nobody = self.works + self.answers_badly == 0 && at_it == 0 && (failed > 0 || self.has == 0);
        let mut all = self.workers.into_iter().chain(self.refusals);
        if dies || nobody || is_versions(failed, failed + self.has + at_it) {
            return all.next().or_else(|| self.unable.into_iter().next());
        }
        None
    }
}

/// What the pod says of its figures since it switched in this attempt.
fn breach<'a>(report: &'a ReplicaStatus, now: &RolloutStatus) -> Option<&'a BreachStatus> {
    report.breach.as_ref().filter(|_| report.attempt >= Some(now.attempt))
}

/// Whether a gate judges what a source answers.
fn is_of_the_source(gate: GateName) -> bool {
    matches!(gate, GateName::Fetch | GateName::Digest | GateName::Format)
}

/// Judges a version that pods are told to switch to.
pub(super) fn judge_switch(world: &World, now: &RolloutStatus) -> Switched {
    let tally = Tally::of(world, now);
    let over = world.now >= now.deadline.0;
    let pods = tally.failed() + tally.has + tally.late.len() + tally.to_come;
    if is_versions(tally.failed(), pods) || tally.late.is_empty() {
        let has = tally.has;
        // Those that come for older ones come one after the other, which takes longer than a switch.
        let heard = over && (tally.to_come == 0 || world.now >= rollout_deadline(world, now));
        return match tally.verdict(heard) {
            Some(failure) => Switched::Failed(failure),
            None if has > 0 || world.pods.is_empty() => Switched::Done,
            None if over => without_anybody(world, now),
            None => Switched::Open { deadline: now.deadline.0 },
        };
    }
    if !over {
        return Switched::Open { deadline: now.deadline.0 };
    }
    let failed = tally.failed() + tally.late.len();
    if tally.works > 0 && !is_versions(failed, pods) {
        return Switched::Done;
    }
    let late = Failure::of_switch_deadline(world, now, &tally.late);
    Switched::Failed(tally.workers.into_iter().chain(tally.refusals).next().unwrap_or(late))
}

/// Every pod is new, and none has the version yet. They get the time of a rollout: whatever became of the pods that had
/// it, it says nothing of the version.
fn without_anybody(world: &World, now: &RolloutStatus) -> Switched {
    let deadline = rollout_deadline(world, now);
    if world.now < deadline {
        Switched::Open { deadline }
    } else {
        Switched::Failed(Failure::of_switch_deadline(world, now, &[]))
    }
}

/// When a rollout would be over that began with the switch.
fn rollout_deadline(world: &World, now: &RolloutStatus) -> Timestamp {
    after(now.started_at.0, world.spec.map_or(Duration::ZERO, |spec| spec.progress_deadline))
}

/// Why a version that bakes has to be taken back.
pub(super) fn judge_bake(world: &World, now: &RolloutStatus) -> Option<Failure> {
    Tally::of(world, now).verdict(is_watched_to_the_end(world, now))
}

/// Whether a bake is over. One that no pod answers with is not watched: it waits for one, unless there are to be none.
pub(super) fn is_watched_to_the_end(world: &World, now: &RolloutStatus) -> bool {
    // What one says that gets no requests may be what it said before it fell silent.
    let has_it = |pod: &CountedPod| pod.ready && pod.report.is_some_and(|report| serves(report, &now.version));
    world.now >= now.deadline.0 && (world.target_replicas == 0 || world.pods.iter().any(has_it))
}

/// That a bake goes on beyond its time, since no pod answers with the version.
pub(super) fn waits_for_an_answer(world: &World, now: &RolloutStatus) -> Option<String> {
    let waits = world.now >= now.deadline.0 && !is_watched_to_the_end(world, now);
    let why = world.missing_pod.map(|why| format!(": {why}")).unwrap_or_default();
    waits.then(|| format!("its time is over, and no pod answers with it: it goes on until one does{why}"))
}

/// The pods that the others go on without, and why.
pub(super) fn left_behind(world: &World, now: &RolloutStatus) -> Option<String> {
    let trouble = |pod: &CountedPod| {
        let report = pod.report?;
        let waits = || candidate_report(pod, now)?.message.clone();
        let refused = || Failure::of_candidate(pod, now).map(|failure| failure.message).or_else(waits);
        match &report.version {
            Some(_) if serves(report, &now.version) => {
                let failed = report.health == ReplicaHealth::Failed;
                let worker = || format!("{}: {}", pod.name, report.message.as_deref().unwrap_or("its worker failed"));
                let figures = || breach(report, now).map(|breach| format!("{}: {}", pod.name, said_of(breach)));
                failed.then(worker).or_else(figures)
            }
            Some(other) => {
                let why = refused().map(|why| format!(": {why}")).unwrap_or_default();
                Some(format!("{}, which answers with {other}{why}", pod.name))
            }
            None => refused().map(|why| format!("{}: {why}", pod.name)),
        }
    };
    let left: Vec<_> = world.pods.iter().filter_map(trouble).collect();
    let all = left.len() == world.pods.len();
    // Where nobody has it nobody goes on.
    let left = some_of(&left, ", ");
    let what = if all { left.clone() } else { format!("goes on without {left}") };
    (!left.is_empty()).then(|| limits::message(&what))
}

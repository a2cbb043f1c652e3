//! How far pods have come with a candidate, and the deadline that this moves.
//!
//! A rollout gets on when any pod gets further than it was: each is compared with itself, so that one that is lost takes
//! nothing from the others, and one that stands still hides behind none. A pod that comes later takes the place of one
//! that is gone, if there is one: what it repeats was reached before. One that comes for a pod of an older template starts the
//! time anew, and so is waited for like the first ones.
//!
//! ```text
//!   since                     at                    deadline
//!     ├──── got on ──── ... ───┼──── nobody gets on ───┤        at + progressDeadline
//!     └──────────────── at the latest ─────────────────┴─▶      since + 4 of them
//! ```
//!
//! Where pods go one after the other, each that has prepared it starts the four of them anew.
//! Time without any pod that could get on does not count, and forgets nothing.

use std::time::Duration;

use gantry_crds::status::{CandidatePhase, PodProgress, Progress, RolloutProgress, RolloutStatus};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{CountedPod, World, after, candidate_report, hold, is_prepared, template};
use crate::limits::{PROGRESS_DEADLINES_MAX, PROGRESS_NOTES};
use crate::validate::ValidService;

/// What a phase weighs in the figure of progress: more than the MiB of any download.
const PHASE_WEIGHT: i64 = 10_000_000;

/// The figure of a pod that has prepared the version.
const PREPARED: i64 = 6 * PHASE_WEIGHT;

/// The time in which pods have to get on: where what answers goes first, it may take its drain timeout for that.
pub(super) fn time(spec: &ValidService, now: &RolloutStatus) -> Duration {
    let drain = if hold::is_hold(now) { spec.pod.drain_timeout } else { Duration::ZERO };
    spec.progress_deadline.saturating_add(drain)
}

/// How far a pod has come with the version.
fn figure(pod: &CountedPod, now: &RolloutStatus) -> i64 {
    if is_prepared(pod, now) {
        return PREPARED;
    }
    let Some(candidate) = candidate_report(pod, now) else { return 0 };
    let of_phase =
        |figure: fn(&Progress) -> i64| candidate.progress.as_ref().map_or(0, figure).clamp(0, PHASE_WEIGHT - 1);
    let mib = of_phase(|progress| progress.bytes >> 20);
    let permille = of_phase(|progress| progress.done_permille.unwrap_or(0));
    match candidate.phase {
        CandidatePhase::Failed => 0,
        CandidatePhase::Fetching | CandidatePhase::Unknown(_) => PHASE_WEIGHT + mib,
        CandidatePhase::Validating => 2 * PHASE_WEIGHT,
        // It is as far as can be, for as long as it waits.
        CandidatePhase::Checked => 2 * PHASE_WEIGHT + 1,
        CandidatePhase::Loading => 3 * PHASE_WEIGHT + permille,
        CandidatePhase::Testing => 4 * PHASE_WEIGHT + permille,
        CandidatePhase::Prepared => 5 * PHASE_WEIGHT,
    }
}

fn figures(world: &World, now: &RolloutStatus) -> Vec<PodProgress> {
    world.judges().map(|pod| PodProgress { pod: pod.name.to_owned(), figure: figure(pod, now) }).collect()
}

/// Counts as progress that something came which pods waited for.
pub(super) fn begin_anew(world: &World, rollout: &mut RolloutStatus) {
    if let Some(progress) = &mut rollout.progress {
        progress.at.0 = world.now;
    }
}

/// Sets the deadline of Prepare: `time` after a pod made progress last, `PROGRESS_DEADLINES_MAX` times that in all and
/// once more for each pod that comes for an older one. A deadline that the user moves holds at once.
pub(super) fn count(world: &World, rollout: &mut RolloutStatus, time: Duration) {
    let reached = figures(world, rollout);
    let now = Time(world.now);
    let Some(mut progress) = rollout.progress.take() else {
        if !reached.is_empty() {
            let first = RolloutProgress {
                figure: furthest(&reached),
                at: now.clone(),
                since: now,
                pods: reached,
                to_come: to_come(world),
                paused_at: None,
            };
            keep(rollout, first, time);
        }
        return;
    };
    if reached.is_empty() {
        progress.paused_at.get_or_insert(now);
        rollout.progress = Some(progress);
        return;
    }
    if let Some(paused_at) = progress.paused_at.take() {
        // Whoever is there is new and begins, within what is left of the whole time.
        progress.since.0 += world.now.duration_since(paused_at.0);
        progress.at.0 = world.now;
        progress.pods = reached.clone();
    }
    if progress.pods.is_empty() {
        // An operator of before knew the fleet alone.
        progress.pods.clone_from(&reached);
    }
    take_in(world, &mut progress, &reached);
    if is_further(&progress, &reached) && world.now >= next_note(&progress, time) {
        progress.at.0 = world.now;
        if hold::is_hold(rollout) && has_prepared_more(&progress, &reached) {
            // They go one after the other: the next one gets the time that this one had.
            progress.since.0 = world.now;
        }
        for pod in &mut progress.pods {
            let figure = reached.iter().find(|one| one.pod == pod.pod).map_or(0, |one| one.figure);
            pod.figure = pod.figure.max(figure);
        }
        progress.figure = progress.figure.max(furthest(&reached));
    }
    keep(rollout, progress, time);
}

fn keep(rollout: &mut RolloutStatus, progress: RolloutProgress, time: Duration) {
    rollout.deadline.0 = after(progress.at.0, time).min(at_the_latest(&progress, time));
    rollout.progress = Some(progress);
}

/// Notes who has come and who has gone since.
fn take_in(world: &World, progress: &mut RolloutProgress, reached: &[PodProgress]) {
    let is_there = |name: &str| reached.iter().any(|one| one.pod == name);
    let known = |progress: &RolloutProgress, name: &str| progress.pods.iter().any(|one| one.pod == name);
    for new in reached.iter().filter(|one| !known(progress, &one.pod)).collect::<Vec<_>>() {
        let gone = progress.pods.iter_mut().filter(|one| !is_there(&one.pod)).max_by_key(|one| one.figure);
        match gone {
            Some(gone) => gone.pod.clone_from(&new.pod),
            None => progress.pods.push(PodProgress { pod: new.pod.clone(), figure: 0 }),
        }
    }
    // The place of a pod that is gone is kept for its successor, unless none will come.
    let places = reached.len().max(usize::try_from(world.target_replicas).unwrap_or(0));
    while progress.pods.len() > places
        && let Some(gone) = progress.pods.iter().position(|one| !is_there(&one.pod))
    {
        progress.pods.remove(gone);
    }
    let to_come = to_come(world);
    if to_come < progress.to_come {
        // Another one has come for an older one: it gets the time that the first ones had.
        (progress.to_come, progress.at.0, progress.since.0) = (to_come, world.now, world.now);
    }
}

fn to_come(world: &World) -> i32 {
    i32::try_from(template::to_come(world)).unwrap_or(i32::MAX)
}

fn furthest(reached: &[PodProgress]) -> i64 {
    reached.iter().map(|one| one.figure).max().unwrap_or(0)
}

/// Whether any pod got further than was noted of it.
fn is_further(progress: &RolloutProgress, reached: &[PodProgress]) -> bool {
    reached.iter().any(|one| noted(progress, one).is_some_and(|noted| one.figure > noted))
}

/// How far the pod was when that was noted last.
fn noted(progress: &RolloutProgress, reached: &PodProgress) -> Option<i64> {
    progress.pods.iter().find(|one| one.pod == reached.pod).map(|one| one.figure)
}

/// Whether a pod has prepared it of which that was not noted.
fn has_prepared_more(progress: &RolloutProgress, reached: &[PodProgress]) -> bool {
    reached.iter().any(|one| one.figure == PREPARED && noted(progress, one).is_some_and(|noted| noted < PREPARED))
}

/// When a rollout ends however well it gets on.
fn at_the_latest(progress: &RolloutProgress, time: Duration) -> Timestamp {
    after(progress.since.0, time.saturating_mul(PROGRESS_DEADLINES_MAX))
}

/// Since when it had to be done, where that and not a lack of progress is what the deadline comes from.
pub(super) fn used_up(now: &RolloutStatus, time: Duration) -> Option<Timestamp> {
    let progress = now.progress.as_ref()?;
    (after(progress.at.0, time) > now.deadline.0).then_some(progress.since.0)
}

/// When progress may be noted again: every note is a write that wakes each agent.
fn next_note(progress: &RolloutProgress, time: Duration) -> Timestamp {
    after(progress.at.0, time / PROGRESS_NOTES)
}

/// When progress has to be noted that was made too soon after the last note.
pub(super) fn note_due(world: &World, now: &RolloutStatus) -> Option<Timestamp> {
    let time = time(world.spec?, now);
    let progress = now.progress.as_ref().filter(|progress| is_further(progress, &figures(world, now)))?;
    Some(next_note(progress, time))
}

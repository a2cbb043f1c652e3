//! What this pod says about itself, and when: both pure.

use std::time::{Duration, Instant};

use gantry_crds::status::{AgentStatus, Degradation, ReplicaMemory, ReplicaStatus};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::limits::{
    DEGRADATION_TOLD, FIGURES_PERIOD_MIN, FIGURES_PERIOD_PER_REPLICA, MEMORY_CHANGE_MIN_BYTES, MEMORY_CHANGE_PERCENT,
    STATE_PERIOD, WRITE_BACKOFF_MAX, WRITE_BACKOFF_MIN,
};
use crate::snapshot::Snapshot;

/// What a pod measures of the version that answers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures {
    /// Its memory.
    pub memory: Option<ReplicaMemory>,
    /// What it does without for want of memory.
    pub degradation: Option<Degradation>,
}

/// The entry of `pod`. A `problem` with reading what is asked goes before what there is to say otherwise.
#[must_use]
pub fn entry(pod: &str, snapshot: &Snapshot, figures: Figures, problem: Option<&str>, now: Timestamp) -> ReplicaStatus {
    ReplicaStatus {
        pod: pod.to_owned(),
        version: snapshot.serving.clone(),
        attempt: snapshot.attempt,
        prepared: snapshot.prepared.clone(),
        resident: snapshot.resident.clone(),
        health: snapshot.health,
        state: Some(snapshot.state),
        message: problem.map(str::to_owned).or_else(|| snapshot.message.clone()),
        candidate: snapshot.candidate.clone(),
        breach: snapshot.breach.clone(),
        too_few_requests: snapshot.too_few_requests,
        canary: snapshot.canary.clone(),
        memory: figures.memory,
        degradation: figures.degradation,
        agent: Some(AgentStatus::of_this_release()),
        reported_at: Time(now),
    }
}

/// The entry without what may wait.
fn state(entry: &ReplicaStatus) -> ReplicaStatus {
    let mut state = entry.clone();
    state.memory = None;
    state.reported_at = Time(Timestamp::UNIX_EPOCH);
    if let Some(candidate) = &mut state.candidate {
        candidate.progress = None;
    }
    state
}

/// Whether `entry` has a state that `written` has not. That less is gone without is a figure: memory that moves about a threshold
/// would write twice with each turn.
fn is_changed(entry: &ReplicaStatus, written: &ReplicaStatus) -> bool {
    let (mut entry, written) = (state(entry), state(written));
    entry.degradation = entry.degradation.max(written.degradation);
    entry != written
}

/// Whether `entry` says what `written` does, but for the time of its writing and for memory that is about the same: what a
/// worker has in RAM moves with every request, and a write of it is news for nobody.
fn says_the_same(entry: &ReplicaStatus, written: &ReplicaStatus) -> bool {
    let mut entry = ReplicaStatus { reported_at: written.reported_at.clone(), ..entry.clone() };
    let both = entry.memory.as_mut().zip(written.memory.as_ref());
    if let Some((memory, old)) = both.filter(|(memory, old)| is_near(memory.measured_bytes, old.measured_bytes)) {
        memory.measured_bytes = old.measured_bytes;
    }
    entry == *written
}

fn is_near(measured: Option<i64>, written: Option<i64>) -> bool {
    let Some((measured, written)) = measured.zip(written) else { return false };
    let moved = measured.abs_diff(written);
    moved < MEMORY_CHANGE_MIN_BYTES
        || u128::from(moved) * 100 < u128::from(written.unsigned_abs()) * MEMORY_CHANGE_PERCENT
}

/// Which degradation is told: the worst one, for [`DEGRADATION_TOLD`] beyond its end. Memory that moves about a threshold would be two
/// writes with each turn, again and again; how it is at the moment is in the metrics.
#[derive(Clone, Copy, Debug, Default)]
pub struct ToldDegradation {
    told: Option<(Degradation, Instant)>,
}

impl ToldDegradation {
    /// What is told where this is measured; nothing is, and nothing of before counts, while no version answers.
    pub fn of(&mut self, measured: Option<Degradation>, now: Instant) -> Option<Degradation> {
        self.told = measured.map(|measured| match self.told {
            Some((told, at)) if told > measured && now.saturating_duration_since(at) < DEGRADATION_TOLD => (told, at),
            _ => (measured, now),
        });
        self.told.map(|(told, _)| told)
    }
}

/// What to do with an entry now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Write it.
    Write,
    /// Look again then, or when something changes.
    LookAgain(Instant),
}

/// When to write: changes of state at once, figures seldom, and nothing when nothing changed.
#[derive(Clone, Debug, Default)]
pub struct Cadence {
    written: Option<(ReplicaStatus, Instant)>,
    /// Resource version of the last write: an older object does not know it.
    written_version: Option<u64>,
    /// The random share by which this round's figures wait longer.
    jitter: f64,
    failures: u32,
    blocked_until: Option<Instant>,
}

impl Cadence {
    /// Decides about `entry` in a service with `replicas` pods.
    #[must_use]
    pub fn decide(&self, entry: &ReplicaStatus, replicas: u32, now: Instant) -> Decision {
        if let Some(until) = self.blocked_until.filter(|until| *until > now) {
            return Decision::LookAgain(until);
        }
        let Some((written, at)) = &self.written else { return Decision::Write };
        let figures_due = *at + figures_period(replicas).mul_f64(1.0 + self.jitter);
        let due = if is_changed(entry, written) {
            *at + STATE_PERIOD
        } else if !says_the_same(entry, written) {
            figures_due
        } else {
            return Decision::LookAgain(figures_due.max(now + STATE_PERIOD));
        };
        if now >= due { Decision::Write } else { Decision::LookAgain(due) }
    }

    /// Notes that `entry` stands in the status of the object with `resource_version`; `jitter` is for the next figures.
    pub fn written(&mut self, entry: ReplicaStatus, resource_version: Option<u64>, jitter: f64, now: Instant) {
        *self = Self {
            written: Some((entry, now)),
            written_version: resource_version,
            jitter,
            failures: 0,
            blocked_until: None,
        };
    }

    /// Notes that a write failed.
    pub fn failed(&mut self, now: Instant) {
        let wait = WRITE_BACKOFF_MIN.saturating_mul(1 << self.failures.min(8)).min(WRITE_BACKOFF_MAX);
        self.failures = self.failures.saturating_add(1);
        self.blocked_until = Some(now + wait.mul_f64(1.0 + self.jitter));
    }

    /// Takes in an object that was seen, and says whether it shows that the entry was removed: then it is written again.
    pub fn is_lost(&mut self, has_entry: bool, resource_version: Option<u64>) -> bool {
        let lost = !has_entry && self.written_version.is_some() && resource_version >= self.written_version;
        if lost {
            (self.written, self.written_version) = (None, None);
        }
        lost
    }
}

/// The time between two writes for figures alone.
fn figures_period(replicas: u32) -> Duration {
    FIGURES_PERIOD_PER_REPLICA.saturating_mul(replicas).max(FIGURES_PERIOD_MIN)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use gantry_crds::status::{CandidateStatus, Progress, ReplicaHealth};
    use proptest::prelude::*;

    use super::*;
    use crate::line::blank;

    /// An entry whose candidate is that far: a figure.
    fn entry(version: &str, fetched: i64) -> ReplicaStatus {
        let progress = Progress { bytes: fetched, ..Progress::default() };
        ReplicaStatus {
            pod: "p".into(),
            version: Some(version.into()),
            attempt: None,
            prepared: None,
            resident: None,
            health: ReplicaHealth::Healthy,
            state: None,
            message: None,
            candidate: Some(CandidateStatus { progress: Some(progress), ..blank("v9", None) }),
            breach: None,
            too_few_requests: false,
            canary: None,
            memory: None,
            degradation: None,
            agent: None,
            reported_at: Time(Timestamp::now()),
        }
    }

    fn after(cadence: &Cadence, entry: &ReplicaStatus, replicas: u32, start: Instant, millis: u64) -> bool {
        cadence.decide(entry, replicas, start + Duration::from_millis(millis)) == Decision::Write
    }

    #[test]
    fn changes_at_once_figures_seldom_and_nothing_for_nothing() {
        let start = Instant::now();
        let mut cadence = Cadence::default();
        assert!(after(&cadence, &entry("v1", 0), 2, start, 0), "the first entry");
        cadence.written(entry("v1", 0), Some(7), 0.0, start);
        let degraded = ReplicaStatus { degradation: Some(Degradation::EvictCache), ..entry("v1", 0) };
        for (what, now, replicas, millis, writes) in [
            ("a change, after others of the same moment", entry("v2", 0), 2, 100, false),
            ("a change", entry("v2", 0), 2, 250, true),
            ("a change in a large fleet", entry("v2", 0), 256, 250, true),
            ("figures too soon", entry("v1", 5), 2, 9_999, false),
            ("figures", entry("v1", 5), 2, 10_000, true),
            ("figures of a large fleet, too soon", entry("v1", 5), 256, 255_999, false),
            ("figures of a large fleet", entry("v1", 5), 256, 256_000, true),
            ("a degradation", degraded.clone(), 2, 250, true),
            ("a degradation in a large fleet", degraded, 256, 250, true),
            ("nothing", entry("v1", 0), 2, 3_600_000, false),
        ] {
            assert_eq!(after(&cadence, &now, replicas, start, millis), writes, "{what}");
        }
        for (has_entry, version, lost) in [(false, Some(6), false), (true, Some(7), false), (false, Some(7), true)] {
            assert_eq!(cadence.is_lost(has_entry, version), lost, "{has_entry} {version:?}");
            assert_eq!(after(&cadence, &entry("v1", 0), 2, start, 1), lost, "it is written again");
        }
    }

    #[test]
    fn a_degradation_is_told_at_once_and_that_it_is_over_with_the_figures() {
        let at = |level| ReplicaStatus { degradation: level, ..entry("v1", 0) };
        let start = Instant::now();
        let mut cadence = Cadence::default();
        cadence.written(at(Some(Degradation::EvictCache)), Some(7), 0.0, start);
        for (level, soon) in [
            (Some(Degradation::HighPriorityOnly), true),
            (Some(Degradation::ReducedBatch), false),
            (Some(Degradation::Normal), false),
            (None, false),
        ] {
            assert_eq!(after(&cadence, &at(level), 2, start, 250), soon, "{level:?}");
            assert!(after(&cadence, &at(level), 2, start, 10_000), "{level:?}");
        }
        let changed = ReplicaStatus { health: ReplicaHealth::Restarting, ..at(None) };
        assert!(after(&cadence, &changed, 2, start, 250), "another state is told of all the same");
    }

    #[test]
    fn memory_that_moves_about_a_threshold_is_told_once() {
        let (start, mut told) = (Instant::now(), ToldDegradation::default());
        let mut at = |seconds: u64, measured| told.of(measured, start + Duration::from_secs(seconds));
        assert_eq!(at(0, Some(Degradation::Normal)), Some(Degradation::Normal));
        for turn in 0..60 {
            let worse = Some(Degradation::EvictCache);
            assert_eq!((at(10 * turn, worse), at(10 * turn + 5, Some(Degradation::Normal))), (worse, worse));
        }
        let worst = Some(Degradation::Emergency);
        assert_eq!(at(600, worst), worst, "what is worse is told at once");
        let over = 600 + DEGRADATION_TOLD.as_secs();
        assert_eq!(at(over - 1, Some(Degradation::ReducedBatch)), worst);
        assert_eq!(at(over, Some(Degradation::ReducedBatch)), Some(Degradation::ReducedBatch));
        assert_eq!((at(over + 1, None), at(over + 2, Some(Degradation::Normal))), (None, Some(Degradation::Normal)));
    }

    #[test]
    fn memory_is_written_again_when_it_has_moved_much() {
        const MIB: i64 = 1 << 20;
        let measured = |mib: i64| {
            let memory = ReplicaMemory { measured_bytes: Some(mib * MIB), ..ReplicaMemory::default() };
            ReplicaStatus { memory: Some(memory), ..entry("v1", 0) }
        };
        let start = Instant::now();
        for (written, now, writes) in [
            (200, 263, false),
            (200, 264, true),
            (200, 136, true),
            (10_000, 10_999, false),
            (10_000, 9_001, false),
            (10_000, 11_000, true),
        ] {
            let mut cadence = Cadence::default();
            cadence.written(measured(written), Some(7), 0.0, start);
            assert!(!after(&cadence, &measured(now), 2, start, 9_999), "{written} to {now} MiB, too soon");
            assert_eq!(after(&cadence, &measured(now), 2, start, 10_000), writes, "{written} to {now} MiB");
        }
    }

    #[test]
    fn failed_writes_are_tried_again_ever_more_seldom() {
        let mut now = Instant::now();
        let mut cadence = Cadence::default();
        let mut waits = Vec::new();
        for _ in 0..8 {
            cadence.failed(now);
            let Decision::LookAgain(at) = cadence.decide(&entry("v1", 0), 1, now) else { panic!() };
            waits.push(at.duration_since(now).as_millis());
            now = at;
            assert_eq!(cadence.decide(&entry("v1", 0), 1, now), Decision::Write);
        }
        assert_eq!(waits, [500, 1000, 2000, 4000, 8000, 10_000, 10_000, 10_000]);
        cadence.written(entry("v1", 0), Some(7), 0.0, now);
        assert!(after(&cadence, &entry("v2", 0), 1, now, 250), "a success forgets the failures");
    }

    proptest! {
        /// A pod whose figures always move, and whose state moves now and then: the writes for figures stay rare.
        #[test]
        fn the_rate_of_figures_is_bounded(replicas in 1_u32..=256, jitter in 0.0..=0.2_f64, changes in proptest::collection::vec(1_u64..100_000, 0..5)) {
            let start = Instant::now();
            let span = Duration::from_secs(600);
            let mut cadence = Cadence::default();
            let (mut now, mut fetched, mut writes) = (start, 0, 0_u32);
            while now < start + span {
                let since = now.duration_since(start).as_millis() as u64;
                let version = changes.iter().filter(|at| **at <= since).count();
                fetched += 1;
                let current = entry(&format!("v{version}"), fetched);
                match cadence.decide(&current, replicas, now) {
                    Decision::Write => {
                        writes += 1;
                        cadence.written(current, Some(7), jitter, now);
                    }
                    Decision::LookAgain(at) => {
                        prop_assert!(at > now, "a decision to wait must lead on");
                        let next_change = changes.iter().map(|at| start + Duration::from_millis(*at)).filter(|at| *at > now).min();
                        now = next_change.map_or(at, |change| change.min(at));
                    }
                }
            }
            let period = replicas.max(10);
            let for_figures = 600 / period + 1;
            prop_assert!(writes <= 1 + for_figures + changes.len() as u32, "{writes} writes");
        }
    }
}

//! What is given up as memory runs short, step by step.
//!
//! What each [`DegradationLevel`] means stands there. One state machine: [`Ladder::observe`] takes the memory pressure, which is used over allowed, and answers with a
//! [`Transition`] when the level changes. Up at once, to the level of the table; down one level at a time, each after
//! [`MIN_DWELL`], and only once the pressure is [`MARGIN`] below where the level begins: a level that relieves the
//! pressure by itself would otherwise be left and entered again without end.
//!
//! Absent: measuring ([`memory`](crate::memory)), and acting on it: the scheduler and submission ask the level.

use std::time::{Duration, Instant};

pub use gantry_core::DegradationLevel;

/// The pressure is so far below the begin of a level before it is left.
pub(crate) const MARGIN: f64 = 0.03;
/// A level is held for so long before the next lower one.
pub(crate) const MIN_DWELL: Duration = Duration::from_secs(5);

/// A change of the level.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Transition {
    pub(crate) from: DegradationLevel,
    pub(crate) to: DegradationLevel,
    /// What led to it.
    pub(crate) pressure: f64,
}

/// The level, and since when it is held.
#[derive(Clone, Debug)]
pub(crate) struct Ladder {
    level: DegradationLevel,
    since: Instant,
}

impl Ladder {
    pub(crate) fn new(now: Instant) -> Self {
        Self { level: DegradationLevel::Normal, since: now }
    }

    pub(crate) fn level(&self) -> DegradationLevel {
        self.level
    }

    /// Takes note of the pressure; one that is not a number says nothing.
    pub(crate) fn observe(&mut self, pressure: f64, now: Instant) -> Option<Transition> {
        if pressure.is_nan() {
            return None;
        }
        let (from, wanted) = (self.level, DegradationLevel::of_pressure(pressure));
        let relieved = pressure < from.begins_at() - MARGIN;
        let held = now.saturating_duration_since(self.since);
        let to = match wanted {
            wanted if wanted > from => wanted,
            wanted if wanted < from && relieved && held >= MIN_DWELL => from.below(),
            _ => {
                // The dwell is time in which the pressure was lower, or a level at its edge would be left at once.
                if !relieved {
                    self.since = now;
                }
                return None;
            }
        };
        (self.level, self.since) = (to, now);
        Some(Transition { from, to, pressure })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::DegradationLevel::*;
    use super::*;
    use crate::params::Priority;

    #[test]
    fn the_table() {
        let cases = [
            (0.0, Normal),
            (0.699, Normal),
            (0.7, ReducedBatch),
            (0.799, ReducedBatch),
            (0.8, EvictCache),
            (0.9, HighPriorityOnly),
            (0.949, HighPriorityOnly),
            (0.95, Emergency),
            (7.0, Emergency),
            (-1.0, Normal),
        ];
        for (pressure, level) in cases {
            assert_eq!(DegradationLevel::of_pressure(pressure), level, "{pressure}");
        }
    }

    #[test]
    fn each_level_gives_up_what_the_one_below_it_does() {
        let admitted = |level: DegradationLevel| {
            [Priority::Low, Priority::Normal, Priority::High].map(|priority| level.admits(priority))
        };
        let meaning = DegradationLevel::ALL.map(|level| (level.batch_limit(9), level.evicts_cache(), admitted(level)));
        let (all, high, none) = ([true; 3], [false, false, true], [false; 3]);
        assert_eq!(meaning, [(9, false, all), (4, false, all), (4, true, all), (4, true, high), (4, true, none)]);
        assert_eq!(Emergency.batch_limit(1), 1);
    }

    #[test]
    fn up_at_once_and_down_step_by_step() {
        let start = Instant::now();
        let mut ladder = Ladder::new(start);
        let mut at = |pressure, after: Duration| {
            let transition = ladder.observe(pressure, start + after);
            (transition.map(|t| (t.from, t.to)), ladder.level())
        };
        let s = Duration::from_secs;
        assert_eq!(at(0.69, s(1)), (None, Normal));
        assert_eq!(at(0.96, s(2)), (Some((Normal, Emergency)), Emergency));
        // Below the level, but not by the margin.
        assert_eq!(at(0.93, s(30)), (None, Emergency));
        // By the margin, but not for long enough.
        assert_eq!(at(0.5, s(31)), (None, Emergency));
        assert_eq!(at(0.5, s(35)), (Some((Emergency, HighPriorityOnly)), HighPriorityOnly));
        assert_eq!(at(f64::NAN, s(36)), (None, HighPriorityOnly));
        assert_eq!(at(0.5, s(39)), (None, HighPriorityOnly));
        assert_eq!(at(0.5, s(40)), (Some((HighPriorityOnly, EvictCache)), EvictCache));
        assert_eq!(at(0.5, s(45)), (Some((EvictCache, ReducedBatch)), ReducedBatch));
        assert_eq!(at(0.91, s(46)), (Some((ReducedBatch, HighPriorityOnly)), HighPriorityOnly));
    }

    proptest! {
        /// Never less cut down than the table says, never more than the worst pressure of the time that it takes to
        /// come down, and every transition told.
        #[test]
        fn the_level_follows_the_pressure(
            steps in proptest::collection::vec((0.0_f64..1.1, 0_u64..4_000), 1..200), last in 0.0_f64..0.67,
        ) {
            let mut now = Instant::now();
            let mut ladder = Ladder::new(now);
            let mut worst = Normal;
            let mut last_change = None;
            for (pressure, wait_ms) in steps {
                now += Duration::from_millis(wait_ms);
                let before = ladder.level();
                let transition = ladder.observe(pressure, now);
                let level = ladder.level();
                worst = worst.max(DegradationLevel::of_pressure(pressure));
                prop_assert!(level >= DegradationLevel::of_pressure(pressure) && level <= worst);
                match transition {
                    None => prop_assert_eq!(level, before),
                    Some(t) => {
                        prop_assert_eq!((t.from, t.to, t.pressure), (before, level, pressure));
                        if level < before {
                            prop_assert_eq!(level, before.below());
                            prop_assert!(pressure < before.begins_at() - MARGIN);
                            prop_assert!(last_change.is_none_or(|at| now - at >= MIN_DWELL));
                        }
                        last_change = Some(now);
                    }
                }
            }
            for _ in 0..DegradationLevel::ALL.len() {
                now += MIN_DWELL;
                ladder.observe(last, now);
            }
            prop_assert_eq!(ladder.level(), Normal);
        }
    }
}

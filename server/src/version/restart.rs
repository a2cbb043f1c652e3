//! When a dead worker is replaced: a pure policy over the moments at which workers died.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::limits::{CRASH_LIMIT, CRASH_WINDOW, FAILED_RETRY_PERIOD, RESPAWN_BACKOFF_MAX, RESPAWN_BACKOFF_MIN};

/// What to do about a crash.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Start another worker after this long.
    Respawn {
        /// Crashes in the window, this one included.
        attempt: u32,
        /// How long to wait.
        after: Duration,
    },
    /// It crashed too often: call it failed, and try again only now and then.
    Failed {
        /// How long to wait.
        retry_after: Duration,
    },
}

/// The crashes that still count.
#[derive(Default)]
pub(super) struct Crashes(VecDeque<Instant>);

impl Crashes {
    /// Notes a crash at `now`.
    pub(super) fn record(&mut self, now: Instant) -> Verdict {
        self.add(now, now);
        let attempt = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        if self.0.len() >= CRASH_LIMIT {
            return Verdict::Failed { retry_after: FAILED_RETRY_PERIOD };
        }
        let after = RESPAWN_BACKOFF_MIN.saturating_mul(1 << attempt.saturating_sub(1).min(20)).min(RESPAWN_BACKOFF_MAX);
        Verdict::Respawn { attempt, after }
    }
}

impl Crashes {
    /// Notes a death at `now` that is no crash: a request may be why. The next life begins at once.
    pub(super) fn spare(&mut self, now: Instant) -> Verdict {
        self.forget_old(now);
        if self.0.len() >= CRASH_LIMIT {
            return Verdict::Failed { retry_after: FAILED_RETRY_PERIOD };
        }
        let attempt = u32::try_from(self.0.len()).unwrap_or(u32::MAX).max(1);
        Verdict::Respawn { attempt, after: Duration::ZERO }
    }

    /// Notes a crash of before, of which it was not known at the time that it was one.
    pub(super) fn add(&mut self, at: Instant, now: Instant) {
        self.0.push_back(at);
        self.0.make_contiguous().sort_unstable();
        self.forget_old(now);
    }

    fn forget_old(&mut self, now: Instant) {
        let is_old = |at: &Instant| now.saturating_duration_since(*at) > CRASH_WINDOW;
        while self.0.len() > CRASH_LIMIT || self.0.front().is_some_and(is_old) {
            self.0.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_wait_doubles_until_the_limit_of_crashes() {
        let (mut crashes, now) = (Crashes::default(), Instant::now());
        for i in 1..CRASH_LIMIT {
            let after = RESPAWN_BACKOFF_MIN * (1 << (i - 1));
            let attempt = u32::try_from(i).unwrap_or(0);
            assert_eq!(crashes.record(now), Verdict::Respawn { attempt, after });
        }
        assert_eq!(crashes.record(now), Verdict::Failed { retry_after: FAILED_RETRY_PERIOD });
        let later = now + CRASH_WINDOW + Duration::from_secs(1);
        assert_eq!(crashes.record(later), Verdict::Respawn { attempt: 1, after: RESPAWN_BACKOFF_MIN });
    }

    #[test]
    fn deaths_by_requests_neither_wait_nor_add_up_but_for_those_that_were_not() {
        let (mut crashes, now) = (Crashes::default(), Instant::now());
        for _ in 0..10 * CRASH_LIMIT {
            assert_eq!(crashes.spare(now), Verdict::Respawn { attempt: 1, after: Duration::ZERO });
        }
        for _ in 1..CRASH_LIMIT {
            crashes.add(now, now);
        }
        assert!(matches!(crashes.spare(now), Verdict::Respawn { after: Duration::ZERO, .. }));
        crashes.add(now, now);
        assert_eq!(crashes.spare(now), Verdict::Failed { retry_after: FAILED_RETRY_PERIOD });
        let later = now + CRASH_WINDOW + Duration::from_secs(1);
        assert_eq!(crashes.spare(later), Verdict::Respawn { attempt: 1, after: Duration::ZERO });
    }

    proptest! {
        #[test]
        fn failed_exactly_when_the_window_is_full(gaps in proptest::collection::vec(0_u64..400, 1..60)) {
            let (mut crashes, mut now) = (Crashes::default(), Instant::now());
            let mut times = Vec::new();
            for gap in gaps {
                now += Duration::from_secs(gap);
                times.push(now);
                let recent = times.iter().filter(|at| now.duration_since(**at) <= CRASH_WINDOW).count();
                match crashes.record(now) {
                    Verdict::Failed { .. } => prop_assert!(recent >= CRASH_LIMIT),
                    Verdict::Respawn { after, .. } => {
                        prop_assert!(recent < CRASH_LIMIT);
                        prop_assert!(after >= RESPAWN_BACKOFF_MIN && after <= RESPAWN_BACKOFF_MAX);
                    }
                }
            }
        }
    }
}

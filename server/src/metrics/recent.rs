//! The latencies of the last answers, and how many requests there were: what a glance at the server wants, where `/metrics` is for who
//! looks at it all the time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::limits::STATS_ANSWERS;

/// The last of some times.
#[derive(Default)]
struct Last {
    times: Vec<Duration>,
    /// Where the next one goes, once there are as many as are kept.
    next: usize,
}

impl Last {
    fn note(&mut self, time: Duration) {
        if self.times.len() < STATS_ANSWERS {
            self.times.push(time);
        } else if let Some(oldest) = self.times.get_mut(self.next) {
            *oldest = time;
            self.next = (self.next + 1) % STATS_ANSWERS;
        }
    }

    fn mean_ms(&self) -> f64 {
        let sum: f64 = self.times.iter().map(Duration::as_secs_f64).sum();
        if self.times.is_empty() { 0.0 } else { sum * 1e3 / self.times.len() as f64 }
    }

    /// The least time that so many in a hundred take no longer than.
    fn percentile_ms(&self, percent: usize) -> f64 {
        let mut times = self.times.clone();
        let rank = (times.len() * percent).div_ceil(100).saturating_sub(1);
        if times.is_empty() { 0.0 } else { times.select_nth_unstable(rank).1.as_secs_f64() * 1e3 }
    }
}

/// See the module.
#[derive(Default)]
pub(super) struct Recent {
    ended: AtomicU64,
    times: Mutex<(Last, Last)>,
}

/// What there was lately.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RecentFigures {
    /// Requests that ended since the start.
    pub ended: u64,
    /// Until the first text of an answer, in the mean of the last ones.
    pub first_token_ms: f64,
    /// Until the end of an answer, likewise.
    pub whole_ms: f64,
    /// The same, which 99 in a hundred of the last ones took no longer than.
    pub whole_p99_ms: f64,
}

impl Recent {
    pub(super) fn ended(&self) {
        self.ended.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn first_token(&self, took: Duration) {
        self.times().0.note(took);
    }

    pub(super) fn whole(&self, took: Duration) {
        self.times().1.note(took);
    }

    pub(super) fn figures(&self) -> RecentFigures {
        let ended = self.ended.load(Ordering::Relaxed);
        let times = self.times();
        let (first, whole) = &*times;
        RecentFigures {
            ended,
            first_token_ms: first.mean_ms(),
            whole_ms: whole.mean_ms(),
            whole_p99_ms: whole.percentile_ms(99),
        }
    }

    fn times(&self) -> MutexGuard<'_, (Last, Last)> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_of_the_last_answers_alone() {
        let recent = Recent::default();
        assert_eq!(recent.figures(), RecentFigures::default());
        for ms in 0..2 * STATS_ANSWERS as u64 {
            recent.whole(Duration::from_millis(ms));
            recent.first_token(Duration::from_millis(4));
            recent.ended();
        }
        let RecentFigures { ended, first_token_ms, whole_ms, whole_p99_ms } = recent.figures();
        assert_eq!((ended, first_token_ms.round()), (2 * STATS_ANSWERS as u64, 4.0));
        // From 1024 to 2047 ms.
        assert_eq!((whole_ms * 10.0).round(), 15355.0);
        assert_eq!(whole_p99_ms.round(), 2037.0);
    }
}

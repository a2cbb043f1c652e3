//! One line of a log for many of its kind: what recurs is told at most once in a while, with how often it was not.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// See the module.
pub struct Throttle {
    period: Duration,
    state: Mutex<State>,
}

struct State {
    told: Option<Instant>,
    untold: u64,
}

impl Throttle {
    /// Lets one pass in each `period`.
    #[must_use]
    pub const fn new(period: Duration) -> Self {
        Self { period, state: Mutex::new(State { told: None, untold: 0 }) }
    }

    /// Whether it is to be told now, and if so, how many were not since the last one that was.
    pub fn pass(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.told.is_some_and(|told| now.saturating_duration_since(told) < self.period) {
            state.untold = state.untold.saturating_add(1);
            return None;
        }
        state.told = Some(now);
        Some(std::mem::take(&mut state.untold))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_passes_in_each_period_and_says_how_many_did_not() {
        let second = Duration::from_secs(1);
        let (throttle, start) = (Throttle::new(second), Instant::now());
        assert_eq!(throttle.pass(start), Some(0));
        assert_eq!((throttle.pass(start), throttle.pass(start + second / 2)), (None, None));
        assert_eq!(throttle.pass(start + second), Some(2));
        assert_eq!(throttle.pass(start + second * 5), Some(0));
    }
}

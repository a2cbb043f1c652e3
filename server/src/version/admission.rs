//! The bounded queue of a version: how many requests are inside, who may enter, and when to come back.
//!
//! A [`Place`] is one admitted request and is given back when dropped. Absent: the order of service, which is the
//! engine's.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::limits::{RETRY_AFTER_MAX_SECONDS, RETRY_AFTER_MIN_SECONDS, SERVICE_RATE_SAMPLES, SERVICE_RATE_WINDOW};

/// Counts the requests inside, up to a limit.
pub(super) struct Admission {
    places: usize,
    slots: usize,
    inside: AtomicUsize,
    closed: AtomicBool,
    /// Bits of an `f64`: requests finished a second, 0 while unknown.
    rate: AtomicU64,
}

/// Why a request may not enter.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// All places are taken.
    Full {
        /// When a try is worth it.
        retry_after: Duration,
    },
    /// No further request is taken.
    Closed,
}

/// One admitted request.
pub(super) struct Place(Arc<Admission>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Admission {
    /// `places` in all, of which `slots` are served at once and the others wait.
    pub(super) fn new(places: usize, slots: usize) -> Self {
        Self {
            places,
            slots,
            inside: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            rate: AtomicU64::new(0.0_f64.to_bits()),
        }
    }

    /// Takes a place.
    pub(super) fn enter(self: &Arc<Self>) -> Result<Place, Refusal> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Refusal::Closed);
        }
        let entered = self
            .inside
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |inside| (inside < self.places).then_some(inside + 1));
        match entered {
            Ok(_) => Ok(Place(Arc::clone(self))),
            Err(inside) => Err(Refusal::Full { retry_after: self.retry_after(inside) }),
        }
    }

    /// Lets nobody in any more.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Requests inside.
    pub(super) fn in_flight(&self) -> usize {
        self.inside.load(Ordering::Acquire)
    }

    /// Notes the observed rate of service.
    pub(super) fn set_rate(&self, per_second: f64) {
        self.rate.store(per_second.to_bits(), Ordering::Relaxed);
    }

    /// The time in which half of those that wait are served: sooner, most of the clients that were refused together
    /// would be refused together again.
    fn retry_after(&self, inside: usize) -> Duration {
        let waiting = inside.saturating_sub(self.slots).max(1);
        let rate = f64::from_bits(self.rate.load(Ordering::Relaxed));
        let seconds = if rate > 0.0 { (waiting as f64 / 2.0 / rate).ceil() } else { 0.0 };
        let seconds = seconds.clamp(RETRY_AFTER_MIN_SECONDS as f64, RETRY_AFTER_MAX_SECONDS as f64);
        Duration::from_secs(seconds as u64)
    }
}

/// The rate of service, from the last requests that ended.
#[derive(Default)]
pub(super) struct ServiceRate {
    ended: VecDeque<Instant>,
}

impl ServiceRate {
    /// Notes that a request ended, and returns how many end a second; 0 while too few have.
    pub(super) fn record(&mut self, now: Instant) -> f64 {
        if self.ended.len() == SERVICE_RATE_SAMPLES {
            self.ended.pop_front();
        }
        self.ended.push_back(now);
        while self.ended.front().is_some_and(|at| now.saturating_duration_since(*at) > SERVICE_RATE_WINDOW) {
            self.ended.pop_front();
        }
        let Some(first) = self.ended.front() else { return 0.0 };
        let span = now.saturating_duration_since(*first).as_secs_f64();
        if span > 0.0 { (self.ended.len() - 1) as f64 / span } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_wait_follows_the_rate_of_service() {
        let admission = Arc::new(Admission::new(12, 2));
        let _places: Vec<_> = (0..12).map(|_| admission.enter().ok().unwrap()).collect();
        let wait = |rate: f64| {
            admission.set_rate(rate);
            match admission.enter().err().unwrap() {
                Refusal::Full { retry_after } => retry_after.as_secs(),
                Refusal::Closed => panic!("not closed"),
            }
        };
        assert_eq!(wait(0.0), RETRY_AFTER_MIN_SECONDS);
        assert_eq!(wait(100.0), RETRY_AFTER_MIN_SECONDS);
        assert_eq!(wait(0.5), 10);
        assert_eq!(wait(0.001), RETRY_AFTER_MAX_SECONDS);
    }

    #[test]
    fn closed_means_nobody_enters_and_those_inside_stay() {
        let admission = Arc::new(Admission::new(2, 1));
        let place = admission.enter().ok().unwrap();
        admission.close();
        assert_eq!(admission.enter().err().unwrap(), Refusal::Closed);
        assert_eq!(admission.in_flight(), 1);
        drop(place);
        assert_eq!(admission.in_flight(), 0);
    }

    #[test]
    fn the_rate_is_that_of_the_last_requests() {
        let mut rate = ServiceRate::default();
        let start = Instant::now();
        assert_eq!(rate.record(start), 0.0);
        for i in 1..=200_u32 {
            let seen = rate.record(start + Duration::from_millis(250) * i);
            assert!((seen - 4.0).abs() < 1e-6, "{seen}");
        }
        let much_later = start + Duration::from_secs(3600);
        assert_eq!(rate.record(much_later), 0.0, "a pause is no slowness");
    }

    proptest! {
        #[test]
        fn never_more_inside_than_places(places in 0_usize..20, moves in proptest::collection::vec(any::<bool>(), 0..200)) {
            let admission = Arc::new(Admission::new(places, 1));
            let mut held = Vec::new();
            for enter in moves {
                if enter {
                    match admission.enter() {
                        Ok(place) => held.push(place),
                        Err(_) => prop_assert_eq!(held.len(), places),
                    }
                } else {
                    held.pop();
                }
                prop_assert_eq!(admission.in_flight(), held.len());
                prop_assert!(held.len() <= places);
            }
        }
    }
}

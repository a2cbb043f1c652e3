//! Requests whose decoding is paused: they have neither a slot nor cells, and go on where they were.
//!
//! Whoever submitted a request sets and clears its flag ([`Signals::paused`](crate::output::Signals)), which each step looks at
//! before slots are given. One in a slot gives it up as those do that give way, its prompt read or not ([`super::pressure`]);
//! one that waits leaves the queue. One that is resumed waits as those that gave way do, by its ticket, and the time for
//! which it was paused lifts it nowhere. From some time on ([`MAX_RESUMES_AHEAD`]) it waits like one that has just come, and
//! behind its client's others: a few clients that read in sips would hold all slots by turns, and whoever came after them would never have one.
//!
//! Paused requests end as all others do. How many there are is bounded by the permits of submission, which they keep:
//! `EngineConfig::max_queue` and one for each slot. An engine that has nothing else sleeps.
//!
//! What was saved of their states counts with that of those that gave way. What is not saved stays in its cells as what a
//! request leaves behind that ended, for as long as nobody needs them, and is computed again after that.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::admission::Waiter;
use super::{MAINTENANCE_PERIOD, Scheduler};
use crate::backend::Backend;
use crate::params::MAX_RESUMES_AHEAD;
use crate::queue::Waiting;

/// One that would wait if it were not paused.
pub(super) struct Paused {
    pub(super) waiter: Waiter,
    at: Instant,
}

impl<B: Backend> Scheduler<B> {
    /// Whether there are requests that have to be told to go on.
    pub(crate) fn has_paused(&self) -> bool {
        !self.paused.is_empty()
    }

    /// How long a thread may sleep that has no work.
    pub(crate) fn may_sleep_for(&self, now: Instant) -> Duration {
        let due = self.paused.next_deadline().map(|due| due.saturating_duration_since(now));
        [due, self.relieves_in()].into_iter().flatten().fold(MAINTENANCE_PERIOD, Duration::min)
    }

    /// Takes their slots from those that are to pause, and lets those wait for one that are to go on.
    pub(super) fn pause_and_resume(&mut self, now: Instant) {
        for resumed in self.paused.remove_if(|paused| !paused.waiter.is_paused()) {
            self.wait_resumed(resumed, now);
        }
        for waiting in self.waiting.remove_if(Waiter::is_paused) {
            self.pause(waiting, now);
        }
        for slot in 0..self.slots.len() {
            if self.slots[slot].as_ref().is_some_and(|sequence| sequence.is_paused())
                && let Some((sequence, saved)) = self.vacate(slot, now)
            {
                self.pause(Waiter::preempted(sequence, saved, now), now);
            }
        }
    }

    /// Has one wait that was paused.
    fn wait_resumed(&mut self, mut resumed: Waiting<Paused>, now: Instant) {
        if let Waiter::Preempted(sequence, _) = &mut resumed.value.waiter {
            sequence.resumes += 1;
            if sequence.resumes > MAX_RESUMES_AHEAD {
                resumed.since = now;
                let least_tag = self.begun_tags[resumed.priority.rank()];
                let resumed = resumed.map(|paused| paused.waiter);
                self.waiting.push_behind_own(resumed, self.newest_ticket, least_tag);
                return;
            }
        }
        let paused_for = now.saturating_duration_since(resumed.value.at);
        resumed.since = resumed.since.checked_add(paused_for).unwrap_or(now);
        self.waiting.push(resumed.map(|paused| paused.waiter));
    }

    fn pause(&mut self, waiting: Waiting<Waiter>, now: Instant) {
        self.stats.pauses.fetch_add(1, Relaxed);
        self.paused.push(waiting.map(|waiter| Paused { waiter, at: now }));
    }

    /// Drops what was saved of those that are paused, which is computed again, until these bytes are free. How many are.
    pub(super) fn drop_paused_states(&mut self, bytes: u64) -> u64 {
        let mut dropped = 0;
        for paused in self.paused.values_mut() {
            if dropped >= bytes {
                break;
            }
            if let Waiter::Preempted(_, saved) = &mut paused.waiter {
                dropped += std::mem::take(saved).bytes();
            }
        }
        dropped
    }
}

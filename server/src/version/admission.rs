//! The bounded queue of a version: how many requests are inside, who may enter, and when to come back.
//!
//! A [`QueuePlace`] is one admitted request and is given back when dropped; a request keeps its place when its worker dies
//! and it is run again. With watermarks, refusing begins when more than the high one wait and ends when no more than the
//! low one do, so that a queue at its limit is not refused and let in by turns. Where other clients have filled the queue, one
//! that has no more than its equal part of the places, or none, is let in all the same, as long as no more than [`SHARED_PLACES`]
//! are. A place says whose [turn](super::fair) it is. Absent: what waits where, and the choice of a worker, which is the dispatcher's.

use std::collections::VecDeque;
use std::fmt::{self, Display};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gantry_engine::{Priority, Turn};

use super::fair::{Entry, Fair};
use super::settings::Scheduling;
use crate::limits::{
    RETRY_AFTER_MAX_SECONDS, RETRY_AFTER_MIN_SECONDS, SERVICE_RATE_SAMPLES, SERVICE_RATE_WINDOW, SHARED_PLACES,
};
use crate::peer::Peer;

/// Counts the requests inside, up to a limit.
pub(super) struct Admission(Mutex<State>);

struct State {
    gate: Gate,
    fair: Fair,
    rate: ServiceRate,
    closed: bool,
}

/// Who may enter: a pure state over entries and leavings.
#[derive(Clone, Debug)]
struct Gate {
    /// Requests that are served at once; the others wait.
    slots: usize,
    max_queue: usize,
    /// The high and the low one.
    watermarks: Option<(usize, usize)>,
    inside: usize,
    /// More than the high watermark waited, and not yet as few as the low one.
    refusing: bool,
}

/// What keeps a request out of the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueLimit {
    /// So many may wait.
    MaxQueue(usize),
    /// More than `high` waited, and since then there were always more than `low`.
    Watermarks {
        /// See `--high-watermark`.
        high: usize,
        /// See `--low-watermark`.
        low: usize,
    },
}

impl Display for QueueLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MaxQueue(most) => write!(f, "{most} may (--max-queue; in a pod spec.scheduling.maxQueue)"),
            Self::Watermarks { high, low } => write!(
                f,
                "once there are more than {high} (--high-watermark; in a pod spec.scheduling.highWatermark) none is taken \
                 until no more than {low} wait (--low-watermark; spec.scheduling.lowWatermark)"
            ),
        }
    }
}

/// Why a request may not enter.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// As many wait as may wait.
    Full {
        /// How many wait.
        waiting: usize,
        /// How many may.
        limit: QueueLimit,
        /// When a try is worth it.
        retry_after: Duration,
    },
    /// No further request is taken.
    Closed,
}

/// Who asks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ask {
    pub(super) client: Peer,
    pub(super) priority: Priority,
    /// It has waited in line for this version, and is let in however many others are.
    pub(super) has_place: bool,
}

/// One admitted request.
pub(super) struct QueuePlace {
    admission: Arc<Admission>,
    entry: Entry,
    used_tokens: Option<u64>,
    is_vacated: bool,
}

impl QueuePlace {
    pub(super) fn turn(&self) -> Turn {
        self.entry.turn()
    }

    /// The request has what it waited for. Said again it changes nothing.
    pub(super) fn begin(&mut self) {
        if !self.is_vacated {
            self.admission.state().fair.begin(&mut self.entry);
        }
    }

    /// Gives the place back though the request goes on; its turn is what it was.
    pub(super) fn vacate(&mut self) {
        if !std::mem::replace(&mut self.is_vacated, true) {
            let mut state = self.admission.state();
            state.gate.leave();
            state.fair.leave(&self.entry, self.used_tokens);
        }
    }

    /// What it has used, now that it has ended.
    pub(super) fn uses(&mut self, tokens: u64) {
        self.used_tokens = Some(tokens);
    }
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        self.vacate();
    }
}

impl Gate {
    fn new(scheduling: &Scheduling, slots: usize) -> Self {
        let watermarks = scheduling.watermarks();
        Self { slots, max_queue: scheduling.max_queue, watermarks, inside: 0, refusing: false }
    }

    fn set_limits(&mut self, scheduling: &Scheduling) {
        self.max_queue = scheduling.max_queue;
        self.watermarks = scheduling.watermarks();
        // Between two other marks nothing is known of the past: as few as the high one may wait.
        self.refusing = self.watermarks.is_some_and(|(high, _)| self.waiting() > high);
    }

    fn waiting(&self) -> usize {
        self.inside.saturating_sub(self.slots)
    }

    fn is_accepting(&self) -> bool {
        !self.refusing && self.inside < self.slots.saturating_add(self.max_queue)
    }

    /// What keeps the next one out.
    fn limit(&self) -> QueueLimit {
        match self.watermarks.filter(|_| self.refusing) {
            Some((high, low)) => QueueLimit::Watermarks { high, low },
            None => QueueLimit::MaxQueue(self.max_queue),
        }
    }

    /// Lets so many more in, all or none. They are let in where each of them would be, one after the other.
    fn enter(&mut self, count: usize) -> Result<(), QueueLimit> {
        let mut after = self.clone();
        for _ in 0..count {
            if !after.is_accepting() {
                return Err(after.limit());
            }
            after.inside += 1;
            after.look();
        }
        *self = after;
        Ok(())
    }

    /// Lets so many in of a client that has `own` inside, where others have filled the queue: as many as make its equal part, and
    /// one at least. Between watermarks that is its part of what is inside when others are let in again, or clients that have
    /// equal parts would be refused and let in by turns.
    fn enter_beside(&mut self, count: usize, own: usize, clients: usize) -> bool {
        // The one that crosses the high watermark is let in.
        let most = self.watermarks.map_or(self.max_queue, |(high, _)| self.max_queue.min(high.saturating_add(1)));
        let shared = self.watermarks.filter(|_| self.refusing).map_or(most, |(_, low)| low);
        let part = (self.slots.saturating_add(shared) / clients.max(1)).max(1);
        let places = self.slots.saturating_add(most).saturating_add(SHARED_PLACES);
        let is_let_in = clients > 1 && own.saturating_add(count) <= part && self.inside.saturating_add(count) <= places;
        if is_let_in {
            self.inside += count;
            self.look();
        }
        is_let_in
    }

    fn enter_in_any_case(&mut self, count: usize) {
        self.inside = self.inside.saturating_add(count);
        self.look();
    }

    fn leave(&mut self) {
        self.inside = self.inside.saturating_sub(1);
        self.look();
    }

    fn look(&mut self) {
        let Some((high, low)) = self.watermarks else { return };
        if self.waiting() > high {
            self.refusing = true;
        } else if self.waiting() <= low {
            self.refusing = false;
        }
    }
}

impl Admission {
    /// An empty queue before `slots` sequences.
    pub(super) fn new(scheduling: &Scheduling, slots: usize) -> Self {
        let gate = Gate::new(scheduling, slots);
        Self(Mutex::new(State { gate, fair: Fair::default(), rate: ServiceRate::default(), closed: false }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place.
    #[cfg(test)]
    pub(super) fn enter(self: &Arc<Self>) -> Result<QueuePlace, Refusal> {
        self.enter_all(Ask::default(), &[0])?.pop().ok_or(Refusal::Closed)
    }

    /// Takes places for requests that will take so many tokens, as far as is known, all or none: two who want several each must
    /// not take from each other what both then lack.
    pub(super) fn enter_all(self: &Arc<Self>, ask: Ask, tokens: &[u64]) -> Result<Vec<QueuePlace>, Refusal> {
        let count = tokens.len();
        let mut state = self.state();
        if state.closed {
            return Err(Refusal::Closed);
        }
        if ask.has_place {
            state.gate.enter_in_any_case(count);
        } else if let Err(limit) = state.gate.enter(count) {
            let (own, clients) = (state.fair.inside(ask.client), state.fair.clients_with(ask.client));
            if !state.gate.enter_beside(count, own, clients) {
                let (waiting, retry_after) = (state.gate.waiting(), state.retry_after());
                return Err(Refusal::Full { waiting, limit, retry_after });
            }
        }
        let place = |entry| QueuePlace { admission: Arc::clone(self), entry, used_tokens: None, is_vacated: false };
        let entries = tokens.iter().map(|&tokens| state.fair.enter(ask.client, ask.priority, tokens));
        Ok(entries.map(place).collect())
    }

    /// From now on the queue has these limits. Those inside stay, even where they are more than may wait now.
    pub(super) fn set_limits(&self, scheduling: &Scheduling) {
        self.state().gate.set_limits(scheduling);
    }

    /// Lets nobody in any more.
    pub(super) fn close(&self) {
        self.state().closed = true;
    }

    /// When a try is worth it, for one that was not served now.
    pub(super) fn retry_after(&self) -> Duration {
        self.state().retry_after()
    }

    /// Requests inside.
    pub(super) fn in_flight(&self) -> usize {
        self.state().gate.inside
    }

    /// Whether the next request would be let in.
    pub(super) fn is_accepting(&self) -> bool {
        let state = self.state();
        !state.closed && state.gate.is_accepting()
    }

    /// Notes that a worker is done with a request.
    pub(super) fn served(&self, now: Instant) {
        self.state().rate.record(now);
    }
}

impl State {
    /// The time in which half of those that wait are served: sooner, most of the clients that were refused together
    /// would be refused together again.
    fn retry_after(&self) -> Duration {
        let (waiting, per_second) = (self.gate.waiting().max(1), self.rate.per_second(Instant::now()));
        let seconds = if per_second > 0.0 { (waiting as f64 / 2.0 / per_second).ceil() } else { 0.0 };
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
    /// Notes that a request ended.
    pub(super) fn record(&mut self, now: Instant) {
        if self.ended.len() == SERVICE_RATE_SAMPLES {
            self.ended.pop_front();
        }
        self.ended.push_back(now);
    }

    /// How many end a second, up to now and not to the last one, so that a stall makes it slower; 0 while too few have.
    pub(super) fn per_second(&self, now: Instant) -> f64 {
        let recent = || self.ended.iter().filter(|at| now.saturating_duration_since(**at) <= SERVICE_RATE_WINDOW);
        let span = recent().next().map_or(0.0, |first| now.saturating_duration_since(*first).as_secs_f64());
        if span > 0.0 { recent().count().saturating_sub(1) as f64 / span } else { 0.0 }
    }
}

#[cfg(test)]
#[path = "admission_tests.rs"]
mod tests;

//! Requests that wait for a slot: who is next, who waited too long, and whether more are taken.
//!
//! Flow: submission asks [`Watermarks::observe`] → the scheduler [`push`](Queue::push)es what was accepted → each step
//! [`expire`](Queue::expire)s and [`remove_if`](Queue::remove_if)s what is over → a free slot [`pop`](Queue::pop)s.
//!
//! Order: higher priority first, and within one priority always by ticket, the order of submission. Each
//! [`AGEING_STEP`] of waiting lifts a request one level, to [`Priority::High`] at most, where the ticket decides. So
//! nothing starves: once a request has waited for two of them, only those submitted before it can go first, and those
//! only become fewer. (The scheduler may let others with less to read go first, a bounded number of them, and those that
//! were paused, a bounded number of times.) With its slot
//! it keeps the level that it got it at ([`Waiting::standing`]), or those it had waited for would take it back at once.
//!
//! Absent: threads and clocks (time is handed in), a limit on the length (submission's permits have it).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, btree_map};
use std::iter::Peekable;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::params::Priority;

/// So much waiting lifts a request one level.
pub const AGEING_STEP: Duration = Duration::from_secs(10);
/// The levels: [`Priority`]'s, by rank.
pub(crate) const LEVELS: usize = 3;
/// After so much waiting a request of any priority is at the highest level.
#[cfg(test)]
pub(crate) const AGEING_BOUND: Duration = AGEING_STEP.saturating_mul(2);
/// The part of the high watermark at which requests are taken again, unless it is configured.
const DEFAULT_LOW_WATERMARK: (usize, usize) = (3, 4);

/// A request in the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Waiting<T> {
    /// The order of submission. A preempted request keeps its own, and so comes before all that were submitted later.
    pub(crate) ticket: u64,
    pub(crate) priority: Priority,
    /// Since when it waits: its submission, or for a preempted one as long before its preemption as it had waited until
    /// then. What it ran is not waiting, or one that ran for long would drive out at once what it was preempted for.
    pub(crate) since: Instant,
    /// When it is given up. `None`: never, as for one that had its first token.
    pub(crate) deadline: Option<Instant>,
    pub(crate) value: T,
}

/// Requests waiting, by priority.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct QueueDepth {
    pub(crate) high: usize,
    pub(crate) normal: usize,
    pub(crate) low: usize,
}

impl<T> Waiting<T> {
    /// Its priority, as raised by its waiting.
    pub(crate) fn standing(&self, now: Instant) -> Priority {
        match aged_level(self.priority, now.saturating_duration_since(self.since)) {
            0 => Priority::Low,
            1 => Priority::Normal,
            _ => Priority::High,
        }
    }

    /// The same with another value.
    pub(crate) fn map<U>(self, value: impl FnOnce(T) -> U) -> Waiting<U> {
        let Self { ticket, priority, since, deadline, .. } = self;
        Waiting { ticket, priority, since, deadline, value: value(self.value) }
    }
}

impl QueueDepth {
    pub(crate) fn total(self) -> usize {
        self.high + self.normal + self.low
    }
}

/// A ticket, and the order of entry for those that share one.
type Key = (u64, u64);

/// The waiting requests. Taking one costs the logarithm of their number.
pub(crate) struct Queue<T> {
    /// By rank. Only the first of each can be next, so each stays in order whatever the clocks say.
    levels: [BTreeMap<Key, Waiting<T>>; LEVELS],
    deadlines: BTreeSet<(Instant, usize, Key)>,
    entered: u64,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { levels: Default::default(), deadlines: BTreeSet::new(), entered: 0 }
    }
}

impl<T> Queue<T> {
    /// Takes a request, also one that was preempted, at the place of its ticket.
    pub(crate) fn push(&mut self, request: Waiting<T>) {
        let ticket = request.ticket;
        self.push_at(request, ticket);
    }

    /// Takes a request at the place of another ticket, behind what is there.
    pub(crate) fn push_at(&mut self, request: Waiting<T>, ticket: u64) {
        let key = (ticket, self.entered);
        self.entered += 1;
        let rank = rank(request.priority);
        if let Some(deadline) = request.deadline {
            self.deadlines.insert((deadline, rank, key));
        }
        self.levels[rank].insert(key, request);
    }

    /// Takes out the request that is next.
    pub(crate) fn pop(&mut self, now: Instant) -> Option<Waiting<T>> {
        let first = |(rank, level): (usize, &BTreeMap<Key, Waiting<T>>)| {
            let (key, request) = level.first_key_value()?;
            Some((service_order(request, *key, now), rank, *key))
        };
        let (_, rank, key) = self.levels.iter().enumerate().filter_map(first).min_by_key(|&(order, _, _)| order)?;
        self.take(rank, key)
    }

    /// Takes out the first request, in the order of service, that `fits`: for a step in which the next one does not.
    pub(crate) fn pop_where(&mut self, now: Instant, fits: impl Fn(&Waiting<T>) -> bool) -> Option<Waiting<T>> {
        let (rank, key) = self.ordered(now).find(|(_, _, request)| fits(request)).map(|(rank, key, _)| (rank, key))?;
        self.take(rank, key)
    }

    /// The request that is next.
    #[cfg(test)]
    pub(crate) fn peek(&self, now: Instant) -> Option<&Waiting<T>> {
        self.iter(now).next()
    }

    /// All requests in the order in which they would be taken at this moment.
    pub(crate) fn iter(&self, now: Instant) -> impl Iterator<Item = &Waiting<T>> {
        self.ordered(now).map(|(_, _, request)| request)
    }

    /// Takes out the requests whose deadline is here, the earliest deadline first. Costs nothing when there is none.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<Waiting<T>> {
        let mut expired = Vec::new();
        while let Some(&(deadline, rank, key)) = self.deadlines.first() {
            if deadline > now {
                break;
            }
            self.deadlines.pop_first();
            expired.extend(self.levels[rank].remove(&key));
        }
        expired
    }

    /// When [`expire`](Self::expire) next finds something.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|&(deadline, _, _)| deadline)
    }

    /// Takes out the requests of which `gone` holds, such as cancelled ones. Looks at every request.
    pub(crate) fn remove_if(&mut self, mut gone: impl FnMut(&T) -> bool) -> Vec<Waiting<T>> {
        let mut removed = Vec::new();
        for (rank, level) in self.levels.iter_mut().enumerate() {
            for (key, request) in level.extract_if(.., |_, request| gone(&request.value)) {
                if let Some(deadline) = request.deadline {
                    self.deadlines.remove(&(deadline, rank, key));
                }
                removed.push(request);
            }
        }
        removed
    }

    /// What all of them have, in no order of service.
    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.levels.iter_mut().flat_map(BTreeMap::values_mut).map(|waiting| &mut waiting.value)
    }

    /// Takes out everything, in the order of service.
    pub(crate) fn drain(&mut self, now: Instant) -> Vec<Waiting<T>> {
        std::iter::from_fn(|| self.pop(now)).collect()
    }

    pub(crate) fn depth(&self) -> QueueDepth {
        let [low, normal, high] = self.levels.each_ref().map(BTreeMap::len);
        QueueDepth { high, normal, low }
    }

    pub(crate) fn len(&self) -> usize {
        self.depth().total()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.levels.iter().all(BTreeMap::is_empty)
    }

    fn take(&mut self, rank: usize, key: Key) -> Option<Waiting<T>> {
        let request = self.levels[rank].remove(&key)?;
        if let Some(deadline) = request.deadline {
            self.deadlines.remove(&(deadline, rank, key));
        }
        Some(request)
    }

    fn ordered(&self, now: Instant) -> Ordered<'_, T> {
        Ordered { levels: self.levels.each_ref().map(|level| level.iter().peekable()), now }
    }
}

/// The three levels merged.
struct Ordered<'a, T> {
    levels: [Peekable<btree_map::Iter<'a, Key, Waiting<T>>>; LEVELS],
    now: Instant,
}

impl<'a, T> Iterator for Ordered<'a, T> {
    type Item = (usize, Key, &'a Waiting<T>);

    fn next(&mut self) -> Option<Self::Item> {
        let now = self.now;
        let first = |(rank, level): (usize, &mut Peekable<btree_map::Iter<'a, Key, Waiting<T>>>)| {
            level.peek().map(|&(key, request)| (service_order(request, *key, now), rank))
        };
        let (_, rank) = self.levels.iter_mut().enumerate().filter_map(first).min()?;
        self.levels[rank].next().map(|(key, request)| (rank, *key, request))
    }
}

/// The lowest goes first.
fn service_order<T>(request: &Waiting<T>, key: Key, now: Instant) -> (Reverse<usize>, Key) {
    (Reverse(aged_level(request.priority, now.saturating_duration_since(request.since))), key)
}

/// The level of a request of this priority that has waited so long.
pub(crate) fn aged_level(priority: Priority, waited: Duration) -> usize {
    let lifted = waited.as_nanos() / AGEING_STEP.as_nanos();
    rank(priority).saturating_add(usize::try_from(lifted).unwrap_or(usize::MAX)).min(LEVELS - 1)
}

fn rank(priority: Priority) -> usize {
    match priority {
        Priority::Low => 0,
        Priority::Normal => 1,
        Priority::High => 2,
    }
}

/// Whether more requests are taken: not once more wait than `high`, and again when as few wait as `low`.
///
/// Every submission observes the depth that it finds, so several threads may. Two of them can see depths that are an
/// instant apart, and the state is then that of the later one until the next observation; the permits of submission,
/// which are exact, are what bounds the queue.
#[derive(Debug)]
pub(crate) struct Watermarks {
    high: usize,
    low: usize,
    accepting: AtomicBool,
}

impl Watermarks {
    /// `high` is at most `max_queue` and by default that, `low` at most `high` and by default three quarters of it.
    pub(crate) fn new(max_queue: usize, high: Option<usize>, low: Option<usize>) -> Self {
        let high = high.unwrap_or(max_queue).min(max_queue);
        let (part, of) = DEFAULT_LOW_WATERMARK;
        let low = low.unwrap_or(high / of * part + high % of * part / of).min(high);
        Self { high, low, accepting: AtomicBool::new(true) }
    }

    /// Takes note of how many wait, and says whether one more is taken.
    pub(crate) fn observe(&self, depth: usize) -> bool {
        if depth > self.high {
            self.accepting.store(false, Relaxed);
            false
        } else if depth <= self.low {
            self.accepting.store(true, Relaxed);
            true
        } else {
            self.is_accepting()
        }
    }

    /// The state that the last observation left.
    pub(crate) fn is_accepting(&self) -> bool {
        self.accepting.load(Relaxed)
    }
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;

//! Requests that wait for a slot: who is next, who waited too long, and whether more are taken.
//!
//! Flow: submission asks [`Watermarks::observe`] → the scheduler [`push`](Queue::push)es what was accepted → each step
//! [`expire`](Queue::expire)s and [`remove_if`](Queue::remove_if)s what is over → a free slot [`pop`](Queue::pop)s.
//!
//! Order: higher priority first, and within one priority by the start tags of [`Turn`]s, which share the service out among
//! clients, and then by ticket, the order of submission, which is that of each client. Each
//! [`AGEING_STEP`] of waiting lifts a request one level, to [`Priority::High`] at most, where the ticket decides. So
//! nothing starves: once a request has waited for two of them, only those submitted before it can go first, and those
//! only become fewer. (The scheduler may let others with less to read go first, a bounded number of them, and those that
//! were paused, a bounded number of times.) With its slot
//! it keeps the level that it got it at ([`Waiting::standing`]), or those it had waited for would take it back at once.
//!
//! Before a request of another client waiting lifts a request only as far as its client had nothing meanwhile: who has so many
//! waiting that the first of them have always waited for long would go before everybody else who has just come.
//!
//! Absent: threads and clocks (time is handed in), a limit on the length (submission's permits have it).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, btree_map};
use std::iter::Peekable;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::params::Priority;
use crate::turn::Turn;

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
    pub(crate) turn: Turn,
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
        let Self { ticket, turn, priority, since, deadline, .. } = self;
        Waiting { ticket, turn, priority, since, deadline, value: value(self.value) }
    }
}

impl QueueDepth {
    pub(crate) fn total(self) -> usize {
        self.high + self.normal + self.low
    }
}

/// A start tag, a ticket, and the order of entry for those that share them.
type Key = (u64, u64, u64);

/// What is known of a client of which something waits.
#[derive(Clone, Copy, Default)]
struct Client {
    waiting: usize,
    /// When one of its requests was taken last, while others of it waited.
    served: Option<Instant>,
}

/// The waiting requests. Taking one costs the logarithm of their number.
pub(crate) struct Queue<T> {
    /// By rank. Only the first of each can be next, so each stays in order whatever the clocks say.
    levels: [BTreeMap<Key, Waiting<T>>; LEVELS],
    deadlines: BTreeSet<(Instant, usize, Key)>,
    /// Those of whom something waits.
    clients: HashMap<u64, Client>,
    entered: u64,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { levels: Default::default(), deadlines: BTreeSet::new(), clients: HashMap::new(), entered: 0 }
    }
}

impl<T> Queue<T> {
    /// Takes a request, also one that was preempted, at the place of its ticket.
    pub(crate) fn push(&mut self, request: Waiting<T>) {
        let key = (request.turn.start_tag, request.ticket);
        self.push_at(request, key);
    }

    /// Takes a request as if it had this ticket, the newest, behind all that is there of its client.
    pub(crate) fn push_behind_own(&mut self, request: Waiting<T>, ticket: u64) {
        let level = &self.levels[rank(request.priority)];
        let own = level.values().filter(|other| other.turn.client == request.turn.client);
        let tag = own.map(|other| other.turn.start_tag).fold(request.turn.start_tag, u64::max);
        self.push_at(request, (tag, ticket));
    }

    fn push_at(&mut self, request: Waiting<T>, (tag, ticket): (u64, u64)) {
        let key = (tag, ticket, self.entered);
        self.entered += 1;
        let rank = rank(request.priority);
        self.clients.entry(request.turn.client).or_default().waiting += 1;
        if let Some(deadline) = request.deadline {
            self.deadlines.insert((deadline, rank, key));
        }
        self.levels[rank].insert(key, request);
    }

    /// Takes out the request that is next.
    pub(crate) fn pop(&mut self, now: Instant) -> Option<Waiting<T>> {
        let (rank, key, _) = self.ordered(now).next()?;
        self.serve(rank, key, now)
    }

    /// Takes out the first request, in the order of service, that `fits`: for a step in which the next one does not.
    pub(crate) fn pop_where(&mut self, now: Instant, fits: impl Fn(&Waiting<T>) -> bool) -> Option<Waiting<T>> {
        let (rank, key) = self.ordered(now).find(|(_, _, request)| fits(request)).map(|(rank, key, _)| (rank, key))?;
        self.serve(rank, key, now)
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
            expired.extend(self.take(rank, key));
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
                forget(&mut self.clients, request.turn.client);
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
        forget(&mut self.clients, request.turn.client);
        Some(request)
    }

    /// Takes one out that gets what it waited for.
    fn serve(&mut self, rank: usize, key: Key, now: Instant) -> Option<Waiting<T>> {
        let request = self.take(rank, key)?;
        if let Some(client) = self.clients.get_mut(&request.turn.client) {
            client.served = Some(now);
        }
        Some(request)
    }

    /// The clients of which something waits.
    pub(crate) fn clients(&self) -> impl Iterator<Item = u64> {
        self.clients.keys().copied()
    }

    fn ordered(&self, now: Instant) -> Ordered<'_, T> {
        Ordered { levels: self.levels.each_ref().map(|level| level.iter().peekable()), clients: &self.clients, now }
    }
}

fn forget(clients: &mut HashMap<u64, Client>, client: u64) {
    if let Some(known) = clients.get_mut(&client) {
        known.waiting -= 1;
        if known.waiting == 0 {
            clients.remove(&client);
        }
    }
}

/// The three levels merged.
struct Ordered<'a, T> {
    levels: [Peekable<btree_map::Iter<'a, Key, Waiting<T>>>; LEVELS],
    clients: &'a HashMap<u64, Client>,
    now: Instant,
}

impl<'a, T> Iterator for Ordered<'a, T> {
    type Item = (usize, Key, &'a Waiting<T>);

    fn next(&mut self) -> Option<Self::Item> {
        let (now, clients) = (self.now, self.clients);
        let first = |(rank, level): (usize, &mut Peekable<btree_map::Iter<'a, Key, Waiting<T>>>)| {
            level.peek().map(|&(key, request)| (rank, *key, request))
        };
        let firsts = self.levels.iter_mut().enumerate().filter_map(first);
        let (rank, ..) = firsts.reduce(|best, other| {
            let alike = best.2.turn.client == other.2.turn.client;
            let order = |&(_, key, request): &(usize, Key, &Waiting<T>)| {
                let served = clients.get(&request.turn.client).and_then(|client| client.served);
                service_order(request, key, served.filter(|_| !alike), now)
            };
            if order(&other) < order(&best) { other } else { best }
        })?;
        self.levels[rank].next().map(|(key, request)| (rank, *key, request))
    }
}

/// The lowest goes first. `served`: when its client had something last, where the other one is of another client.
fn service_order<T>(
    request: &Waiting<T>,
    (_, ticket, entered): Key,
    served: Option<Instant>,
    now: Instant,
) -> (Reverse<usize>, u64, u64) {
    let since = served.map_or(request.since, |served| request.since.max(served));
    (Reverse(aged_level(request.priority, now.saturating_duration_since(since))), ticket, entered)
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

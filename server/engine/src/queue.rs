//! Requests that wait for a slot: who is next, who waited too long, and whether more are taken.
//!
//! Flow: submission asks [`Watermarks::observe`] → the scheduler [`push`](Queue::push)es what was accepted → each step
//! [`expire`](Queue::expire)s and [`remove_if`](Queue::remove_if)s what is over → a free slot [`pop`](Queue::pop)s.
//!
//! Order: each priority has a line. Within it the start tags of [`Turn`]s decide, which share the service out among clients, then
//! whether a request has begun, and then the ticket, the order of submission, which is that of each client. Of the lines the one of
//! the highest level goes first, and of several the one whose oldest waits for longest. Each [`AGEING_STEP`] that the oldest
//! request of a line has waited lifts the line one level, to [`Priority::High`] at most. So no line starves; with one client no
//! request waits for those that came after it once it has waited for two of them, and with several each waits for what the tags
//! put before it. (The scheduler may let others with less to read go first, a bounded number of them, and those that
//! were paused, a bounded number of times.) With its slot a request keeps the level that it got it at ([`Queue::standing`]), or those
//! it had waited for would take it back at once.
//!
//! Before a request of another client waiting counts only as far as its client had nothing of that line meanwhile: who has so many
//! waiting that the first of them have always waited for long would go before everybody else who has just come.
//!
//! Absent: threads and clocks (time is handed in), a limit on the length (submission's permits have it).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, btree_map};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::params::{Priority, Turn};

/// So much waiting lifts a request one level.
pub const AGEING_STEP: Duration = Duration::from_secs(10);
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
    /// It had a slot: of one tag it goes before those that had none.
    pub(crate) has_begun: bool,
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
    /// The same with another value.
    pub(crate) fn map<U>(self, value: impl FnOnce(T) -> U) -> Waiting<U> {
        let Self { ticket, turn, priority, has_begun, since, deadline, .. } = self;
        Waiting { ticket, turn, priority, has_begun, since, deadline, value: value(self.value) }
    }
}

impl QueueDepth {
    pub(crate) fn total(self) -> usize {
        self.high + self.normal + self.low
    }
}

/// A start tag, whether it is still to begin, a ticket, and the order of entry for those that share them.
type Key = (u64, bool, u64, u64);

/// What of a client waits in a line.
#[derive(Default)]
struct Own {
    /// Since when each waits, and its order of entry.
    waits: BTreeSet<(Instant, u64)>,
    /// When one of them was taken last, while something of another client waited.
    served: Option<Instant>,
}

impl Own {
    /// Since when it has had nothing, and waited.
    fn oldest(&self) -> Option<Instant> {
        self.waits.first().map(|&(since, _)| self.counts_from(since))
    }

    fn counts_from(&self, since: Instant) -> Instant {
        self.served.map_or(since, |served| since.max(served))
    }
}

/// The requests of one priority.
struct Line<T> {
    requests: BTreeMap<Key, Waiting<T>>,
    /// Those of whom something waits here.
    clients: HashMap<u64, Own>,
}

impl<T> Default for Line<T> {
    fn default() -> Self {
        Self { requests: BTreeMap::new(), clients: HashMap::new() }
    }
}

impl<T> Line<T> {
    fn insert(&mut self, key: Key, request: Waiting<T>) {
        self.clients.entry(request.turn.client).or_default().waits.insert((request.since, key.3));
        self.requests.insert(key, request);
    }

    fn remove(&mut self, key: &Key) -> Option<Waiting<T>> {
        let request = self.requests.remove(key)?;
        forget(&mut self.clients, key, &request);
        Some(request)
    }

    /// Since when the waiting of a request counts: of the one that is next here that of the oldest, for which it stands.
    fn counts_from(&self, request: &Waiting<T>) -> Instant {
        let is_first = self.requests.first_key_value().is_some_and(|(_, first)| first.ticket == request.ticket);
        let oldest = || self.clients.values().filter_map(Own::oldest).min();
        let own = || self.clients.get(&request.turn.client).map(|own| own.counts_from(request.since));
        if is_first { oldest() } else { own() }.unwrap_or(request.since)
    }

    fn in_order(&self) -> InOrder<'_, T> {
        let mut in_order = InOrder { line: self, rest: self.requests.iter(), first: None };
        in_order.advance();
        in_order
    }
}

fn forget<T>(clients: &mut HashMap<u64, Own>, key: &Key, request: &Waiting<T>) {
    if let Some(own) = clients.get_mut(&request.turn.client) {
        own.waits.remove(&(request.since, key.3));
        if own.waits.is_empty() {
            clients.remove(&request.turn.client);
        }
    }
}

/// The waiting requests. Taking one costs the logarithm of their number, and a look at each client.
pub(crate) struct Queue<T> {
    /// By rank. Only the first of each can be next, so each stays in order whatever the clocks say.
    lines: [Line<T>; Priority::COUNT],
    deadlines: BTreeSet<(Instant, usize, Key)>,
    entered: u64,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self { lines: Default::default(), deadlines: BTreeSet::new(), entered: 0 }
    }
}

impl<T> Queue<T> {
    /// Takes a request, also one that was preempted, at the place of its turn and ticket.
    pub(crate) fn push(&mut self, request: Waiting<T>) {
        let place = (request.turn.start_tag, !request.has_begun, request.ticket);
        self.push_at(request, place);
    }

    /// Takes a request as if it had just come with this ticket, the newest: with no lower tag than `least_tag`, and behind all that
    /// is there of its client.
    pub(crate) fn push_behind_own(&mut self, request: Waiting<T>, ticket: u64, least_tag: u64) {
        let own = self.own_tags(request.turn.client, request.priority).max();
        let tag = request.turn.start_tag.max(least_tag).max(own.unwrap_or_default());
        self.push_at(request, (tag, true, ticket));
    }

    fn push_at(&mut self, request: Waiting<T>, (tag, is_new, ticket): (u64, bool, u64)) {
        let key = (tag, is_new, ticket, self.entered);
        self.entered += 1;
        let rank = request.priority.rank();
        if let Some(deadline) = request.deadline {
            self.deadlines.insert((deadline, rank, key));
        }
        self.lines[rank].insert(key, request);
    }

    /// The tags at which requests of a client wait.
    fn own_tags(&self, client: u64, priority: Priority) -> impl Iterator<Item = u64> {
        let requests = self.lines[priority.rank()].requests.iter();
        requests.filter(move |(_, other)| other.turn.client == client).map(|(key, _)| key.0)
    }

    /// The lowest tag at which a request of this client and priority waits.
    pub(crate) fn least_own_tag(&self, client: u64, priority: Priority) -> Option<u64> {
        self.own_tags(client, priority).next()
    }

    /// Takes out the request that is next.
    pub(crate) fn pop(&mut self, now: Instant) -> Option<Waiting<T>> {
        self.pop_where(now, |_| true)
    }

    /// Takes out the first request, in the order of service, that `fits`: for a step in which the next one does not.
    pub(crate) fn pop_where(&mut self, now: Instant, fits: impl Fn(&Waiting<T>) -> bool) -> Option<Waiting<T>> {
        let (rank, key, _) = self.ordered(now).find(|(_, _, request)| fits(request))?;
        let request = self.take(rank, key)?;
        let client = request.turn.client;
        let has_others = self.clients().any(|other| other != client);
        if let Some(own) = self.lines[rank].clients.get_mut(&client).filter(|_| has_others) {
            own.served = Some(now);
        }
        Some(request)
    }

    /// The level at which one that waits is served: its priority, as raised by the waiting that counts.
    pub(crate) fn standing(&self, request: &Waiting<T>, now: Instant) -> Priority {
        let counts_from = self.lines[request.priority.rank()].counts_from(request);
        match aged_level(request.priority, now.saturating_duration_since(counts_from)) {
            0 => Priority::Low,
            1 => Priority::Normal,
            _ => Priority::High,
        }
    }

    /// The request that is next.
    #[cfg(test)]
    pub(crate) fn peek(&self, now: Instant) -> Option<&Waiting<T>> {
        self.iter(now).next()
    }

    /// All requests in the order in which they would be taken at this moment, if what is taken meanwhile did not count.
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
        for (rank, Line { requests, clients }) in self.lines.iter_mut().enumerate() {
            for (key, request) in requests.extract_if(.., |_, request| gone(&request.value)) {
                if let Some(deadline) = request.deadline {
                    self.deadlines.remove(&(deadline, rank, key));
                }
                forget(clients, &key, &request);
                removed.push(request);
            }
        }
        removed
    }

    /// What all of them have, in no order of service.
    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.lines.iter_mut().flat_map(|line| line.requests.values_mut()).map(|waiting| &mut waiting.value)
    }

    /// Takes out everything, in the order of service.
    pub(crate) fn drain(&mut self, now: Instant) -> Vec<Waiting<T>> {
        std::iter::from_fn(|| self.pop(now)).collect()
    }

    pub(crate) fn depth(&self) -> QueueDepth {
        let [low, normal, high] = self.lines.each_ref().map(|line| line.requests.len());
        QueueDepth { high, normal, low }
    }

    pub(crate) fn len(&self) -> usize {
        self.depth().total()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lines.iter().all(|line| line.requests.is_empty())
    }

    fn take(&mut self, rank: usize, key: Key) -> Option<Waiting<T>> {
        let request = self.lines[rank].remove(&key)?;
        if let Some(deadline) = request.deadline {
            self.deadlines.remove(&(deadline, rank, key));
        }
        Some(request)
    }

    /// The clients of which something waits, each once for each priority.
    pub(crate) fn clients(&self) -> impl Iterator<Item = u64> {
        self.lines.iter().flat_map(|line| line.clients.keys()).copied()
    }

    fn ordered(&self, now: Instant) -> Ordered<'_, T> {
        Ordered { lines: self.lines.each_ref().map(Line::in_order), now }
    }
}

/// One line, with since when the waiting of its first counts.
struct InOrder<'a, T> {
    line: &'a Line<T>,
    rest: btree_map::Iter<'a, Key, Waiting<T>>,
    first: Option<(Key, &'a Waiting<T>, Instant)>,
}

impl<'a, T> InOrder<'a, T> {
    /// Takes the first, and looks at the next.
    fn advance(&mut self) -> Option<(Key, &'a Waiting<T>, Instant)> {
        let next = self.rest.next().map(|(key, request)| (*key, request, self.line.counts_from(request)));
        std::mem::replace(&mut self.first, next)
    }
}

/// The lines merged.
struct Ordered<'a, T> {
    lines: [InOrder<'a, T>; Priority::COUNT],
    now: Instant,
}

impl<'a, T> Iterator for Ordered<'a, T> {
    type Item = (usize, Key, &'a Waiting<T>);

    fn next(&mut self) -> Option<Self::Item> {
        let now = self.now;
        let order = |&(key, request, counts_from): &(Key, &Waiting<T>, Instant)| {
            let level = aged_level(request.priority, now.saturating_duration_since(counts_from));
            (Reverse(level), counts_from, key.2, key.3)
        };
        let firsts = self.lines.iter().enumerate().filter_map(|(rank, line)| Some((rank, order(line.first.as_ref()?))));
        let (rank, _) = firsts.min_by_key(|&(_, order)| order)?;
        let (key, request, _) = self.lines[rank].advance()?;
        Some((rank, key, request))
    }
}

/// The level of a request of this priority that has waited so long.
pub(crate) fn aged_level(priority: Priority, waited: Duration) -> usize {
    let lifted = waited.as_nanos() / AGEING_STEP.as_nanos();
    priority.rank().saturating_add(usize::try_from(lifted).unwrap_or(usize::MAX)).min(Priority::COUNT - 1)
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

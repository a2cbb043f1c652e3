//! Whose turn it is: start-time fair queueing between the clients of a version (Goyal, Vin and Cheng, 1996).
//!
//! Each request gets a start tag when it is let in: what its client has asked for before, or, where the client comes anew, the
//! clock of its priority. Wherever requests of one priority wait, the one with the lowest tag is next
//! ([`Turn`]), so each client that has requests waiting gets an equal part of the work, and one that had none is before all
//! that another one has in store. What is asked for is tokens: of the prompt, and of an answer as long as answers are thought
//! to be; once a request has ended, what it has used takes the place of that.
//!
//! The clock is the highest tag of those that have begun. And as each request leaves it moves by what that has used, as if all
//! clients had been served at once, each an equal part of it: else it would stand still while those whose tag it is are enough,
//! such as many who ask one thing after the other, and who has a second request inside would wait for ever. None moves it past
//! more than one tag that waits: whoever comes anew is not behind all that another one has in store because that one has used
//! more than was thought.
//!
//! A client is known while it has requests inside, and after that while it is ahead of the clock and anyone is inside: who asks for
//! one large thing after the other, and never has two inside, would else be as one who comes anew each time, and have the most of
//! what is served. How many are known is bounded by how many requests may be, and beside those by [`MAX_AHEAD_CLIENTS`], of which
//! the one that is least ahead is forgotten. Requests of one client have tags that never fall: where there is but one, the order is
//! that of submission. Absent: priorities, since
//! each has a clock of its own, and the places where requests wait.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound::{Excluded, Unbounded};

use gantry_engine::{Priority, Turn};

use crate::limits::MAX_AHEAD_CLIENTS;
use crate::peer::Peer;

/// Parts of a token that a clock moves by at least.
const CLOCK_FRACTIONS: u64 = 1 << 16;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Fair {
    /// Of each priority, by rank.
    clocks: [u64; Priority::COUNT],
    /// What is left over of parts of a token by which they are to move, in [`CLOCK_FRACTIONS`].
    fractions: [u64; Priority::COUNT],
    /// Of each priority, the tags of those that wait, and of how many.
    waiting: [BTreeMap<u64, usize>; Priority::COUNT],
    clients: HashMap<Peer, Client>,
    /// Those that have none inside, and have had more than their part.
    ahead: HashMap<Peer, Client>,
    /// Names that were given to clients; 0 is nobody's.
    names: u64,
}

#[derive(Debug, Default)]
struct Client {
    name: u64,
    inside: usize,
    /// Of each priority, the next tag as far as what was asked for goes,
    next: [u64; Priority::COUNT],
    /// and the last that was given.
    last: [u64; Priority::COUNT],
}

/// A request that was let in, until it [leaves](Fair::leave).
#[derive(Debug)]
pub(super) struct Entry {
    client: Peer,
    priority: Priority,
    /// What it will take, as far as is known.
    tokens: u64,
    turn: Turn,
    has_begun: bool,
}

impl Entry {
    pub(super) fn turn(&self) -> Turn {
        self.turn
    }
}

impl Fair {
    /// Lets a request in that will take so many tokens, as far as is known.
    pub(super) fn enter(&mut self, client: Peer, priority: Priority, tokens: u64) -> Entry {
        let rank = priority.rank();
        let names = &mut self.names;
        let before = self.ahead.remove(&client);
        let known = self.clients.entry(client).or_insert_with(|| {
            before.unwrap_or_else(|| {
                *names += 1;
                Client { name: *names, ..Client::default() }
            })
        });
        known.inside += 1;
        let start_tag = self.clocks[rank].max(known.next[rank]).max(known.last[rank]);
        known.last[rank] = start_tag;
        known.next[rank] = start_tag.saturating_add(tokens);
        *self.waiting[rank].entry(start_tag).or_default() += 1;
        Entry { client, priority, tokens, turn: Turn { client: known.name, start_tag }, has_begun: false }
    }

    /// A request has what it waited for, or was refused once it had been read. Said again it changes nothing.
    pub(super) fn begin(&mut self, entry: &mut Entry) {
        if !std::mem::replace(&mut entry.has_begun, true) {
            self.waits_no_more(entry);
            let clock = &mut self.clocks[entry.priority.rank()];
            *clock = entry.turn.start_tag.max(*clock);
        }
    }

    /// A request leaves. `used`: what it has, where that is known.
    pub(super) fn leave(&mut self, entry: &Entry, used: Option<u64>) {
        let used = used.unwrap_or(if entry.has_begun { entry.tokens } else { 0 });
        if entry.has_begun {
            self.advance(entry.priority, used);
        } else {
            self.waits_no_more(entry);
        }
        let Some(known) = self.clients.get_mut(&entry.client) else { return };
        let next = &mut known.next[entry.priority.rank()];
        *next = next.saturating_sub(entry.tokens).saturating_add(used);
        known.inside = known.inside.saturating_sub(1);
        if known.inside == 0 {
            let gone = self.clients.remove(&entry.client);
            gone.into_iter().for_each(|gone| self.depart(entry.client, gone));
        }
    }

    /// Remembers one that has nothing inside any more as long as it is ahead, and forgets those that the clocks have reached.
    fn depart(&mut self, peer: Peer, client: Client) {
        // The order among its own is nobody's concern any more: else those of its requests that were cancelled would hold back what
        // it asks for next.
        self.ahead.insert(peer, Client { last: [0; Priority::COUNT], ..client });
        // Where nobody is inside there is none whom one could be ahead of.
        let (clocks, anyone) = (self.clocks, !self.clients.is_empty());
        let by = |client: &Client| client.next.iter().zip(clocks).map(|(next, clock)| next.saturating_sub(clock)).max();
        self.ahead.retain(|_, client| anyone && by(client) > Some(0));
        if self.ahead.len() > MAX_AHEAD_CLIENTS
            && let Some(least) = self.ahead.iter().min_by_key(|(_, client)| by(client)).map(|(peer, _)| *peer)
        {
            self.ahead.remove(&least);
        }
    }

    /// So much was done for the clients that are inside.
    fn advance(&mut self, priority: Priority, tokens: u64) {
        let clients = u64::try_from(self.clients.len()).unwrap_or(u64::MAX).max(1);
        let (clock, waiting) = (&mut self.clocks[priority.rank()], &self.waiting[priority.rank()]);
        let next = waiting.range((Excluded(*clock), Unbounded)).next().map_or(u64::MAX, |(&tag, _)| tag);
        // Rounded up each time, many small requests would make it run ahead of what is used.
        let fraction = &mut self.fractions[priority.rank()];
        let part = tokens.saturating_mul(CLOCK_FRACTIONS) / clients + *fraction;
        *fraction = part % CLOCK_FRACTIONS;
        *clock = clock.saturating_add(part / CLOCK_FRACTIONS).min(next);
    }

    fn waits_no_more(&mut self, entry: &Entry) {
        let waiting = &mut self.waiting[entry.priority.rank()];
        if let Some(count) = waiting.get_mut(&entry.turn.start_tag) {
            *count -= 1;
            if *count == 0 {
                waiting.remove(&entry.turn.start_tag);
            }
        }
    }

    /// Requests of this client that are inside.
    pub(super) fn inside(&self, client: Peer) -> usize {
        self.clients.get(&client).map_or(0, |known| known.inside)
    }

    /// Clients that have requests inside, this one included.
    pub(super) fn clients_with(&self, client: Peer) -> usize {
        self.clients.len() + usize::from(!self.clients.contains_key(&client))
    }
}

#[cfg(test)]
#[path = "fair_tests.rs"]
mod tests;

//! Whose turn it is: start-time fair queueing between the clients of a version (Goyal, Vin and Cheng, 1996).
//!
//! Each request gets a start tag when it is let in: what its client has asked for before, or, where the client comes anew, the
//! tag of the request that was begun last. Wherever requests of one priority wait, the one with the lowest tag is next
//! ([`Turn`]), so each client that has requests waiting gets an equal part of the work, and one that had none is before all
//! that another one has in store. What is asked for is tokens: of the prompt, and of an answer as long as answers are thought
//! to be; once a request has ended, what it has used takes the place of that.
//!
//! A client is known while it has requests inside, so how many are known is bounded by how many requests may be. Requests of
//! one client have tags that never fall: where there is but one, the order is that of submission. Absent: priorities, since
//! each has a clock of its own, and the places where requests wait.

use std::collections::HashMap;

use gantry_engine::{Priority, Turn};

use crate::peer::Peer;

const PRIORITIES: usize = 3;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Fair {
    /// Of each priority, the highest tag of those that have begun.
    begun: [u64; PRIORITIES],
    clients: HashMap<Peer, Client>,
    /// Names that were given to clients; 0 is nobody's.
    names: u64,
}

#[derive(Debug, Default)]
struct Client {
    name: u64,
    inside: usize,
    /// Of each priority, the next tag as far as what was asked for goes,
    next: [u64; PRIORITIES],
    /// and the last that was given.
    last: [u64; PRIORITIES],
}

impl Fair {
    /// Lets a request in that will take so many tokens, as far as is known.
    pub(super) fn enter(&mut self, client: Peer, priority: Priority, tokens: u64) -> Turn {
        let at = priority as usize;
        let known = self.clients.entry(client).or_insert_with(|| {
            self.names += 1;
            Client { name: self.names, ..Client::default() }
        });
        known.inside += 1;
        let start_tag = self.begun[at].max(known.next[at]).max(known.last[at]);
        known.last[at] = start_tag;
        known.next[at] = start_tag.saturating_add(tokens);
        Turn { client: known.name, start_tag }
    }

    /// A request has what it waited for.
    pub(super) fn begin(&mut self, priority: Priority, turn: Turn) {
        let begun = &mut self.begun[priority as usize];
        *begun = turn.start_tag.max(*begun);
    }

    /// A request leaves that was thought to take `tokens`, and `used` so many.
    pub(super) fn leave(&mut self, client: Peer, priority: Priority, tokens: u64, used: u64) {
        let Some(known) = self.clients.get_mut(&client) else { return };
        let next = &mut known.next[priority as usize];
        *next = next.saturating_sub(tokens).saturating_add(used);
        known.inside = known.inside.saturating_sub(1);
        if known.inside == 0 {
            self.clients.remove(&client);
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

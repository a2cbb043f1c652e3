//! Requests that take turns: clients by turns, and within each the requests of that client by turns.

use std::collections::{HashMap, VecDeque};

/// A ring of tickets. Empty clients are in no part of it.
#[derive(Debug, Default)]
pub(crate) struct Ring {
    clients: VecDeque<u64>,
    tickets: HashMap<u64, VecDeque<u64>>,
}

impl Ring {
    pub(crate) fn is_empty(&self) -> bool {
        self.clients.is_empty()
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Whose turn it is.
    pub(crate) fn front(&self) -> Option<u64> {
        self.tickets.get(self.clients.front()?)?.front().copied()
    }

    /// Takes out whose turn it is; its client's next one has its turn after all other clients.
    pub(crate) fn pop_front(&mut self) -> Option<u64> {
        let client = self.clients.pop_front()?;
        let own = self.tickets.get_mut(&client)?;
        let ticket = own.pop_front();
        if own.is_empty() {
            self.tickets.remove(&client);
        } else {
            self.clients.push_back(client);
        }
        ticket
    }

    /// Takes a client's request, after what is there of that client.
    pub(crate) fn push_back(&mut self, client: u64, ticket: u64) {
        let own = self.tickets.entry(client).or_default();
        if own.is_empty() {
            self.clients.push_back(client);
        }
        own.push_back(ticket);
    }

    /// Takes out those that `leave`, in the order of their turns within each client.
    pub(crate) fn extract(&mut self, mut leave: impl FnMut(u64) -> bool) -> Vec<(u64, u64)> {
        let mut left = Vec::new();
        for client in std::mem::take(&mut self.clients) {
            let mut own = self.tickets.remove(&client).unwrap_or_default();
            own.retain(|&ticket| {
                let leaves = leave(ticket);
                if leaves {
                    left.push((client, ticket));
                }
                !leaves
            });
            if !own.is_empty() {
                self.clients.push_back(client);
                self.tickets.insert(client, own);
            }
        }
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_client_is_a_queue_and_several_take_turns_whatever_each_has() {
        let mut ring = Ring::default();
        (0..4).for_each(|ticket| ring.push_back(1, ticket));
        ring.push_back(2, 10);
        ring.push_back(3, 20);
        ring.push_back(3, 21);
        assert_eq!(ring.front(), Some(0));
        let turns: Vec<u64> = std::iter::from_fn(|| ring.pop_front()).collect();
        assert_eq!(turns, [0, 10, 20, 1, 21, 2, 3]);
        assert!(ring.is_empty() && ring.tickets.is_empty());
    }

    #[test]
    fn who_leaves_is_taken_out_and_the_others_keep_their_turns() {
        let mut ring = Ring::default();
        for (client, ticket) in [(1, 0), (1, 1), (2, 2), (1, 3)] {
            ring.push_back(client, ticket);
        }
        assert_eq!(ring.extract(|ticket| ticket != 1 && ticket != 3), [(1, 0), (2, 2)]);
        let turns: Vec<u64> = std::iter::from_fn(|| ring.pop_front()).collect();
        assert_eq!(turns, [1, 3]);
    }
}

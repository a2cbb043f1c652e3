//! Slots of clients that have several, for requests of clients that have none.
//!
//! The next free slot goes to whoever is next in the queue, and a client can have taken all slots for requests that run for
//! long. So a request that has waited for [`FIRST_SLOT_PATIENCE_MS`], and whose client has no slot, gets one of the client that
//! has most, as long as that one keeps another: the youngest of its own, of no higher priority, gives way, keeps its state in
//! main memory as others do ([`super::pressure`]), and comes back before what its client has not begun. That client has its
//! turn after those that came meanwhile, or it would take the next free slot from whoever it gave way to.
//!
//! Where all requests are one client's this does nothing. Further slots of a client are the queue's to give.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::{Scheduler, admission::Waiter};
use crate::backend::Backend;
use crate::params::{FIRST_SLOT_PATIENCE_MS, Priority};
use crate::queue::Waiting;

const FIRST_SLOT_PATIENCE: Duration = Duration::from_millis(FIRST_SLOT_PATIENCE_MS);

/// A slot in use.
#[derive(Clone, Copy, Debug)]
struct Held {
    slot: usize,
    client: u64,
    ticket: u64,
    priority: Priority,
}

impl<B: Backend> Scheduler<B> {
    /// Gives one request its client's first slot, where it has waited for long enough. One in a step: states are copied.
    pub(super) fn give_first_slot(&mut self, now: Instant) {
        let held = self.held_slots();
        let has_slot = |client: u64| held.iter().any(|held| held.client == client);
        // To look through the queue is work, in vain where all requests are one client's.
        if self.waiting.clients().all(has_slot) {
            return;
        }
        let is_due = |waiting: &&Waiting<Waiter>| {
            !has_slot(waiting.turn.client) && now.saturating_duration_since(waiting.since) >= FIRST_SLOT_PATIENCE
        };
        let Some(waiting) = self.waiting.iter(now).find(is_due) else { return };
        let (ticket, gives) = (waiting.ticket, giving(&held, waiting.priority));
        let suffice = (0..=gives.len()).find(|&count| {
            let stays = |ticket: u64| gives[..count].iter().all(|held| held.ticket != ticket);
            held.len() - count < self.slots_allowed() && self.fits(&waiting.value, |beside| stays(beside.ticket))
        });
        // Nobody gives way in vain.
        let Some(count) = suffice else { return };
        for held in &gives[..count] {
            if let Some(sequence) = &mut self.slots[held.slot] {
                let turn = &mut sequence.params.turn;
                turn.start_tag = turn.start_tag.max(self.begun_tags[held.priority as usize].saturating_add(1));
            }
            self.preempt_slot(held.slot, now);
        }
        if let Some(waiting) = self.waiting.pop_where(now, |waiting| waiting.ticket == ticket) {
            self.give_slot(waiting, now);
        }
    }

    fn held_slots(&self) -> Vec<Held> {
        let active = self.slots.iter().enumerate().filter_map(|(slot, sequence)| Some((slot, sequence.as_ref()?)));
        active
            .map(|(slot, sequence)| {
                let (client, priority) = (sequence.params.turn.client, sequence.priority());
                Held { slot, client, ticket: sequence.ticket, priority }
            })
            .collect()
    }
}

/// Who gives way to a request of this priority, one after the other: each time the youngest of the client that has most, until
/// each has one.
fn giving(held: &[Held], priority: Priority) -> Vec<Held> {
    let mut counts = HashMap::<u64, usize>::new();
    for held in held {
        *counts.entry(held.client).or_default() += 1;
    }
    let mut may: Vec<Held> = held.iter().copied().filter(|held| held.priority <= priority).collect();
    let mut gives = Vec::new();
    while let Some(at) = (0..may.len()).max_by_key(|&at| (counts[&may[at].client], may[at].ticket)) {
        if counts[&may[at].client] < 2 {
            break;
        }
        let next = may.swap_remove(at);
        counts.entry(next.client).and_modify(|count| *count -= 1);
        gives.push(next);
    }
    gives
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_most_gives_way_first_and_each_keeps_one() {
        let clients = [
            (1, Priority::Normal),
            (1, Priority::High),
            (1, Priority::Normal),
            (2, Priority::Low),
            (2, Priority::Normal),
        ];
        let held: Vec<Held> = clients
            .into_iter()
            .enumerate()
            .map(|(slot, (client, priority))| Held { slot, client, ticket: slot as u64, priority })
            .collect();
        let slots = |priority| giving(&held, priority).iter().map(|held| held.slot).collect::<Vec<_>>();
        assert_eq!(slots(Priority::High), [2, 4, 1]);
        assert_eq!(slots(Priority::Normal), [2, 4, 0], "one of high priority does not give way to others");
        assert_eq!(slots(Priority::Low), [3]);
    }
}

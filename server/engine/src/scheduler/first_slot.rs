//! Slots of clients that have several, for requests of clients that have none.
//!
//! The next free slot goes to whoever is next in the queue, and a client can have taken all slots for requests that run for
//! long. So a request that has waited for [`FIRST_SLOT_PATIENCE_MS`], and whose client has no slot, gets one of the client that
//! has most, as long as that one keeps another: the youngest of its own, of no higher priority, gives way, keeps its state in
//! main memory as others do ([`super::pressure`]), and comes back before what its client has not begun. That client has its
//! turn after those that came meanwhile, or it would take the next free slot from whoever it gave way to. How many newcomers go
//! before it is bounded by whoever gives them their tags, which rise with what is served.
//!
//! States are copied for that: one gives way in a step, and each no more often than once in [`GIVES_WAY_PERIOD_MS`]; nobody while
//! memory is short, where a slot is free, where it would not do, for a prompt that another one is reading, or while one of a
//! higher level waits. Where all requests are one client's this does nothing. Further slots of a client are the queue's to give.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::{Scheduler, admission::Waiter};
use crate::backend::Backend;
use crate::params::{FIRST_SLOT_PATIENCE_MS, GIVES_WAY_PERIOD_MS, Priority};
use crate::queue::Waiting;

const FIRST_SLOT_PATIENCE: Duration = Duration::from_millis(FIRST_SLOT_PATIENCE_MS);
const GIVES_WAY_PERIOD: Duration = Duration::from_millis(GIVES_WAY_PERIOD_MS);

/// A slot in use.
#[derive(Clone, Copy, Debug)]
struct Held {
    slot: usize,
    client: u64,
    ticket: u64,
    priority: Priority,
    /// It has not given way just now.
    may_give_way: bool,
}

impl<B: Backend> Scheduler<B> {
    /// Gives one request its client's first slot, where it has waited for long enough and somebody must give way for that.
    pub(super) fn give_first_slot(&mut self, now: Instant) {
        let held = self.held_slots(now);
        let has_slot = |client: u64| held.iter().any(|held| held.client == client);
        // To look through the queue is work, in vain where all requests are one client's.
        if self.stats.level().evicts_cache() || self.waiting.clients().all(has_slot) {
            return;
        }
        let Some(standing) = self.waiting.iter(now).next().map(|first| self.waiting.standing(first, now)) else {
            return;
        };
        let is_due = |waiting: &&Waiting<Waiter>| {
            !has_slot(waiting.turn.client)
                && now.saturating_duration_since(waiting.since) >= FIRST_SLOT_PATIENCE
                && self.is_ready(waiting, now)
        };
        let is_of_first_level = |waiting: &&Waiting<Waiter>| self.waiting.standing(waiting, now) == standing;
        let Some(waiting) = self.waiting.iter(now).take_while(is_of_first_level).find(is_due) else { return };
        let Some(gives) = who_gives_way(&held, waiting.priority) else { return };
        let has_room = held.len() < self.slots_allowed() && self.fits(&waiting.value, |_| true);
        let suffices =
            held.len() <= self.slots_allowed() && self.fits(&waiting.value, |beside| beside.ticket != gives.ticket);
        // Nobody gives way in vain.
        if has_room || !suffices {
            return;
        }
        let ticket = waiting.ticket;
        let after_newcomers = self.begun_tags[gives.priority.rank()].saturating_add(1);
        let before_own = self.waiting.least_own_tag(gives.client, gives.priority).unwrap_or(u64::MAX);
        if let Some(sequence) = &mut self.slots[gives.slot] {
            let turn = &mut sequence.params.turn;
            turn.start_tag = turn.start_tag.max(after_newcomers).min(before_own);
            sequence.gave_way_at = Some(now);
        }
        self.preempt_slot(gives.slot, now);
        if let Some(waiting) = self.waiting.pop_where(now, |waiting| waiting.ticket == ticket) {
            self.give_slot(waiting, standing, now);
        }
    }

    fn held_slots(&self, now: Instant) -> Vec<Held> {
        let active = self.slots.iter().enumerate().filter_map(|(slot, sequence)| Some((slot, sequence.as_ref()?)));
        active
            .map(|(slot, sequence)| {
                let (client, priority) = (sequence.params.turn.client, sequence.priority());
                let is_over = |at: Instant| now.saturating_duration_since(at) >= GIVES_WAY_PERIOD;
                let may_give_way = sequence.gave_way_at.is_none_or(is_over);
                Held { slot, client, ticket: sequence.ticket, priority, may_give_way }
            })
            .collect()
    }
}

/// Who gives way to a request of this priority: the youngest that may of the client that has most, which keeps another.
fn who_gives_way(held: &[Held], priority: Priority) -> Option<Held> {
    let mut counts = HashMap::<u64, usize>::new();
    for held in held {
        *counts.entry(held.client).or_default() += 1;
    }
    let may = |of: &&Held| of.may_give_way && of.priority <= priority && counts[&of.client] > 1;
    held.iter().filter(may).max_by_key(|of| (counts[&of.client], of.ticket)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_youngest_of_who_has_most_gives_way_and_keeps_one() {
        let (high, normal, low) = (Priority::High, Priority::Normal, Priority::Low);
        let mut held: Vec<Held> = [(1, normal), (1, high), (1, normal), (2, low), (2, normal), (3, low)]
            .into_iter()
            .enumerate()
            .map(|(slot, (client, priority))| Held { slot, client, ticket: slot as u64, priority, may_give_way: true })
            .collect();
        let slot = |held: &[Held], priority| who_gives_way(held, priority).map(|held| held.slot);
        assert_eq!((slot(&held, high), slot(&held, normal)), (Some(2), Some(2)));
        assert_eq!(slot(&held, low), Some(3), "who has but one keeps it, and none gives way to a lower priority");
        held[2].may_give_way = false;
        assert_eq!((slot(&held, high), slot(&held, normal)), (Some(1), Some(0)));
        held[3].may_give_way = false;
        assert_eq!(slot(&held, low), None);
        assert_eq!(slot(&[], high), None);
    }
}

//! What the next step is wanted for and what a step was, as [`crate::budget`] counts it: rows, tokens, the cells that they
//! look at, and how many parts llama.cpp computes them in.

use super::{Scheduler, Share};
use crate::backend::{Backend, BatchEntry};
use crate::budget::{Demand, PRODUCTS_LOOK, StepWork, kilocells};
use crate::burst::Asking;
use crate::params::Priority;
use crate::plan::{Need, sort_readers, split_parts};

impl<B: Backend> Scheduler<B> {
    /// What a batch is, before its sequences have it.
    pub(super) fn work(&self, shares: &[Share]) -> StepWork {
        let mut work = StepWork::default();
        // Behind how many others the rows of the longest stream stand, and prompts in all.
        let (mut longest, mut behind) = (0, 0_u32);
        for share in shares {
            let Some(sequence) = &self.slots[share.slot] else { continue };
            match sequence.need() {
                Need::Prefill { .. } => {
                    work.prefill_tokens += share.tokens;
                    work.scored_tokens += share.scored;
                    behind = behind.saturating_add(sequence.decoded);
                }
                Need::Decode { .. } => {
                    work.decode_rows += share.tokens;
                    longest = longest.max(sequence.decoded);
                }
            }
        }
        // Those of nobody's look at cells of others.
        work.decode_rows += self.fillers.rows();
        let looks =
            |entries: &mut dyn Iterator<Item = &BatchEntry>| entries.map(|entry| kilocells(entry.position)).sum();
        let (all, of_nobody): (f64, f64) = (looks(&mut self.batch.iter()), looks(&mut self.fillers.entries()));
        let of_tokens = all - of_nobody + self.fillers.kilocells;
        work.kilocells = of_tokens + self.part_looks() * (kilocells(longest) + kilocells(behind));
        let batch: Vec<(usize, u32)> = shares.iter().map(|share| (share.slot, share.tokens)).collect();
        work.further_parts = u32::try_from(self.parts(&batch).len().saturating_sub(1)).unwrap_or(u32::MAX);
        work
    }

    /// Whether attention takes many tokens together, see [`crate::plan::ATTENTION_TILE_TOKENS`].
    pub(super) fn computes_in_tiles(&self) -> bool {
        self.limits.unified && self.limits.flash_attention && self.limits.group_rows > 1
    }

    /// The tokens of what is computed together each time, given those of each sequence in the batch's order.
    pub(super) fn parts(&self, batch: &[(usize, u32)]) -> Vec<u32> {
        if !self.limits.unified {
            return split_parts(batch);
        }
        let (mut pool, mut beside) = (0, 0);
        for &(slot, tokens) in batch {
            *if self.is_staged(slot) { &mut beside } else { &mut pool } += tokens;
        }
        [pool, beside].into_iter().filter(|&tokens| tokens > 0).collect()
    }

    /// How many tokens more look at the cells of what is computed together, see [`PRODUCTS_LOOK`].
    pub(super) fn part_looks(&self) -> f64 {
        if self.limits.flash_attention { 0.0 } else { PRODUCTS_LOOK }
    }

    /// What a step is wanted for. All who have no stream yet count as prompts, whether or not they read now: the more wait,
    /// the more of a step is theirs.
    pub(super) fn demand(&self, asking: &[Asking], needs: impl Iterator<Item = Need>) -> Demand {
        let mut demand = Demand::default();
        let (mut unread, mut longest) = (Vec::new(), 0.0);
        let slots = self.slots.iter().enumerate().filter(|(_, slot)| slot.is_some()).map(|(slot, _)| slot);
        for ((asking, need), slot) in asking.iter().zip(needs).zip(slots) {
            let kilocells = kilocells(asking.read);
            match need {
                Need::Decode { .. } => {
                    demand.decode_rows += 1;
                    demand.row_kilocells += kilocells;
                    longest = f64::max(longest, kilocells);
                }
                Need::Prefill { remaining: 0, .. } => {}
                Need::Prefill { remaining, age, priority, .. } => {
                    unread.push(Unread { slot, remaining, age, priority });
                    demand.token_kilocells += kilocells;
                }
            }
        }
        demand.row_kilocells += self.part_looks() * longest;
        demand.filler_rows = self.expected_fillers(&demand, asking.len(), longest, !unread.is_empty());
        demand.token_kilocells /= f64::from(u32::try_from(unread.len().max(1)).unwrap_or(u32::MAX));
        demand.prompts =
            u32::try_from(asking.len() + self.waiting.len()).unwrap_or(u32::MAX).saturating_sub(demand.decode_rows);
        // Where nobody generates there is room for all that a step may have.
        if !self.limits.unified && demand.decode_rows > 0 {
            self.count_parts(&mut demand, unread);
        } else if demand.decode_rows > 0 {
            demand.prompt_parts = u32::from(unread.iter().any(|prompt| self.is_staged(prompt.slot)));
        }
        demand
    }

    /// Counts in how many parts a step computes the prompts that it has room for, in the order in which they are read. Of
    /// neighbours as many tokens of each are computed together.
    fn count_parts(&self, demand: &mut Demand, mut unread: Vec<Unread>) {
        sort_readers(&mut unread, self.prompt_steps, |prompt| (prompt.priority, prompt.remaining, prompt.age));
        let part_kilocells = self.part_looks() * demand.token_kilocells;
        let in_parts_of = |read: &[(usize, u32)], demand: &Demand| {
            let mut batch = read.to_vec();
            batch.sort_unstable();
            let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
            let part_kilocells = part_kilocells * f64::from(count(read.len()));
            Demand { prompt_parts: count(split_parts(&batch).len()), part_kilocells, ..*demand }
        };
        let (mut read, mut total) = (Vec::new(), 0);
        for Unread { slot, remaining, .. } in unread {
            read.push((slot, remaining));
            let with = in_parts_of(&read, demand);
            let room = self.budget.prefill_tokens(&with);
            if total + remaining <= room || read.len() == 1 {
                total += remaining.min(room);
                *demand = with;
                if total == room {
                    return;
                }
                continue;
            }
            // A beginning of it.
            read.pop();
            read.push((slot, room.saturating_sub(total)));
            let with = in_parts_of(&read, demand);
            if room > total && self.budget.prefill_tokens(&with) > total {
                *demand = with;
            } else {
                // There is room for more tokens, but not for the part that they would be.
                demand.most_tokens = Some(total);
            }
            return;
        }
    }
}

/// A prompt that is read.
struct Unread {
    slot: usize,
    remaining: u32,
    age: u64,
    priority: Priority,
}

//! What the next step is wanted for and what a step was, as [`crate::budget`] counts it: rows, tokens, the cells that they
//! look at, and how many parts llama.cpp computes them in.

use super::{Scheduler, Share};
use crate::backend::Backend;
use crate::budget::{Demand, PRODUCTS_LOOK, StepWork, kilocells};
use crate::burst::Asking;
use crate::plan::{Need, split_parts};

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
                    behind = behind.saturating_add(sequence.decoded);
                }
                Need::Decode { .. } => {
                    work.decode_rows += share.tokens;
                    longest = longest.max(sequence.decoded);
                }
            }
        }
        work.decode_rows += u32::try_from(self.fillers.len()).unwrap_or(u32::MAX);
        let of_tokens: f64 = self.batch.iter().map(|entry| kilocells(entry.position)).sum();
        work.kilocells = of_tokens + self.part_looks() * (kilocells(longest) + kilocells(behind));
        let batch: Vec<(usize, u32)> = shares.iter().map(|share| (share.slot, share.tokens)).collect();
        let parts = if self.limits.unified { 1 } else { split_parts(&batch).len() };
        work.further_parts = u32::try_from(parts.saturating_sub(1)).unwrap_or(u32::MAX);
        work
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
        for (asking, need) in asking.iter().zip(needs) {
            let kilocells = kilocells(asking.read);
            match need {
                Need::Decode { .. } => {
                    demand.decode_rows += 1;
                    demand.row_kilocells += kilocells;
                    longest = f64::max(longest, kilocells);
                }
                Need::Prefill { remaining: 0, .. } => {}
                Need::Prefill { remaining, .. } => {
                    unread.push(remaining);
                    demand.token_kilocells += kilocells;
                }
            }
        }
        demand.row_kilocells += self.part_looks() * longest;
        demand.token_kilocells /= f64::from(u32::try_from(unread.len().max(1)).unwrap_or(u32::MAX));
        demand.prompts =
            u32::try_from(asking.len() + self.waiting.len()).unwrap_or(u32::MAX).saturating_sub(demand.decode_rows);
        if !self.limits.unified && !unread.is_empty() {
            // One prompt after the other is read, those first of which least is left, so many as a step has room for.
            let part_kilocells = self.part_looks() * demand.token_kilocells;
            (demand.prompt_parts, demand.part_kilocells) = (1, part_kilocells);
            unread.sort_unstable();
            let mut room = self.budget.prefill_tokens(&demand);
            for &tokens in &unread[..unread.len() - 1] {
                let Some(left) = room.checked_sub(tokens).filter(|&left| left > 0) else { break };
                room = left;
                demand.prompt_parts += 1;
                demand.part_kilocells += part_kilocells;
            }
        }
        demand
    }
}

//! Rows of nobody's, which make those of the streams whole groups.
//!
//! The matrix products of a CPU take rows by so many ([`BackendLimits::group_rows`](crate::backend::BackendLimits)), and
//! each that is left over is a pass over the weights by itself: on two cores of Zen 5 seven rows of a model of 0.5B take
//! 55 ms and eight take 38. Which numbers of rows are dearer than a whole group is measured at the start, since it is not
//! so on each processor. There, tokens that no request asked for are decoded behind what idle sequences hold, and taken out
//! again after the step: what is left over in them stays as it was. Of a split cache they must lie beside the streams, and
//! must not have more cells looked at than those.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::Scheduler;
use super::probe::{PROBE_TOKEN, least_time};
use crate::backend::{Backend, BatchEntry};

/// A whole group is worth it where it takes at least so much less, as a part of what the rows alone take.
const LEAST_GAIN: f64 = 0.03;
/// llama.cpp looks at the cells of a sequence by so many, and of a split cache at as many of each as of the longest.
const CELLS_TOGETHER: u32 = 256;

/// The numbers of rows for which a whole group takes less.
#[derive(Default)]
pub(super) struct WorthFilling {
    /// By rows, up to the second whole group; with more it is as in the second.
    worth: Vec<bool>,
}

impl WorthFilling {
    /// From what so many rows take, from none on.
    fn new(group: u32, took: &[Duration]) -> Self {
        let is_worth = |(rows, alone): (usize, &Duration)| {
            let whole = took.get(rows.next_multiple_of(group as usize)).copied().unwrap_or(Duration::MAX);
            // One stream alone waits for the weights, and not for what others compute.
            rows > 1 && whole.as_secs_f64() < alone.as_secs_f64() * (1.0 - LEAST_GAIN)
        };
        Self { worth: took.iter().enumerate().map(is_worth).collect() }
    }

    /// How many rows more these should be.
    fn more(&self, rows: u32, group: u32) -> u32 {
        let left_over = rows % group;
        let as_if = if rows > group { group + left_over } else { rows };
        let is_worth = left_over > 0 && self.worth.get(as_if as usize) == Some(&true);
        if is_worth { group - left_over } else { 0 }
    }
}

/// What a step has of it: before the streams and behind them.
#[derive(Default)]
pub(super) struct Fillers {
    pub(super) before: Vec<BatchEntry>,
    pub(super) behind: Vec<BatchEntry>,
}

impl<B: Backend> Scheduler<B> {
    /// Measures which numbers of rows are worth filling.
    pub(super) fn measure_groups(&mut self) -> Result<(), String> {
        let (group, limits) = (self.limits.group_rows, self.limits);
        let rooms = [2 * group, limits.sequences, limits.outputs, limits.batch_tokens, limits.positions];
        let most = rooms.into_iter().min().unwrap_or(0).min(self.parallel.next_multiple_of(group));
        if group < 2 || self.parallel < 2 || most < group || !limits.reusable {
            return Ok(());
        }
        let mut took = vec![Duration::ZERO];
        for rows in 1..=most {
            took.push(least_time(|| self.decode_probe(rows, rows))?);
        }
        self.worth_filling = WorthFilling::new(group, &took);
        tracing::debug!(worth = ?self.worth_filling.worth, ?took, "numbers of rows that are worth filling to a whole group");
        Ok(())
    }

    /// Tokens of nobody's for a step in which these slots, in their order, have so many tokens each, and prompts so many.
    pub(super) fn fillers(&self, streams: &[(usize, u32)], prompt_tokens: u32) -> Fillers {
        let mut fillers = Fillers::default();
        let rows: u32 = streams.iter().map(|&(_, tokens)| tokens).sum();
        let more = if rows > 0 { self.worth_filling.more(rows, self.limits.group_rows) } else { 0 };
        let tokens = rows.saturating_add(prompt_tokens).saturating_add(more);
        if more == 0 || tokens > self.limits.batch_tokens || !self.suspects.is_empty() {
            return fillers;
        }
        let entry = |sequence, position| BatchEntry { token: PROBE_TOKEN, position, sequence, output: true };
        if self.limits.unified {
            // With prompts it is their tokens that come in whole groups. Nothing is dropped for the sake of this.
            let outputs = rows + more <= self.limits.outputs;
            if prompt_tokens > 0 || !outputs || self.kv.free_cells() < tokens.into() {
                return fillers;
            }
            let idle = self.idle().find(|&id| self.kv.len(id) + more <= self.limits.positions);
            let entries = idle.map(|id| (self.kv.len(id)..).map(move |at| entry(id, at)));
            fillers.behind = entries.into_iter().flatten().take(more as usize).collect();
            return fillers;
        }
        let (Some(&(first, _)), Some(&(last, _))) = (streams.first(), streams.last()) else { return fillers };
        let side_by_side = last - first + 1 == rows as usize && streams.len() == rows as usize;
        let cells = |id: usize| self.held(id).saturating_add(1).next_multiple_of(CELLS_TOGETHER);
        let looked_at = streams.iter().map(|&(slot, _)| cells(slot)).max().unwrap_or(0);
        let of_use = |id: usize| {
            self.slots.get(id).is_some_and(Option::is_none)
                && self.held(id) < self.limits.positions
                && cells(id) <= looked_at
        };
        let behind: Vec<usize> = (last + 1..).take_while(|&id| of_use(id)).take(more as usize).collect();
        let mut before: Vec<usize> =
            (0..first).rev().take_while(|&id| of_use(id)).take(more as usize - behind.len()).collect();
        before.reverse();
        if side_by_side && before.len() + behind.len() == more as usize {
            let entries = |ids: Vec<usize>| {
                let ids = ids.into_iter().filter_map(|id| u32::try_from(id).ok());
                ids.map(|id| entry(id, self.kv.len(id))).collect()
            };
            (fillers.before, fillers.behind) = (entries(before), entries(behind));
        }
        fillers
    }

    /// Takes them out of the cache again.
    pub(super) fn take_out_fillers(&mut self) {
        self.stats.filler_rows.fetch_add(self.fillers.len() as u64, Relaxed);
        for at in 0..self.fillers.len() {
            // The first of a sequence takes all of them out.
            self.kv.truncate(self.fillers[at].sequence, self.fillers[at].position);
        }
    }

    /// Takes out what a batch that failed may have left of them.
    pub(super) fn rewind_fillers(&mut self) {
        for BatchEntry { sequence, .. } in std::mem::take(&mut self.fillers) {
            if !self.kv.rewind(sequence) {
                self.kv.clear(sequence);
            }
        }
    }

    fn idle(&self) -> impl Iterator<Item = u32> {
        let ids = (0_u32..).zip(&self.slots);
        ids.filter(|(_, slot)| slot.is_none()).map(|(id, _)| id)
    }

    fn held(&self, slot: usize) -> u32 {
        self.kv.len(u32::try_from(slot).unwrap_or(u32::MAX))
    }

    /// Has two rows and more be worth it, or none, whatever was measured.
    #[cfg(test)]
    pub(crate) fn fills(&mut self, fills: bool) {
        let worth = (0..=2 * self.limits.group_rows).map(|rows| fills && rows > 1).collect();
        self.worth_filling = WorthFilling { worth };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many rows more so many become where one takes so many ms, two so many, and so on.
    fn more(took_ms: &[u64], rows: std::ops::RangeInclusive<u32>) -> Vec<u32> {
        let took: Vec<Duration> = [0].iter().chain(took_ms).copied().map(Duration::from_millis).collect();
        let worth = WorthFilling::new(4, &took);
        rows.map(|rows| worth.more(rows, 4)).collect()
    }

    #[test]
    fn rows_become_a_whole_group_where_that_takes_less() {
        // As measured with Zen 5, and with AVX2.
        let zen5 = [12, 23, 32, 28, 41, 48, 55, 38];
        assert_eq!(more(&zen5, 1..=8), [0, 0, 1, 0, 3, 2, 1, 0]);
        assert_eq!(more(&zen5, 13..=17), [3, 2, 1, 0, 3]);
        let avx2 = [24, 36, 55, 48, 75, 85, 94, 91];
        assert_eq!(more(&avx2, 1..=8), [0, 0, 1, 0, 0, 0, 1, 0]);
        // With four sequences nobody has more than four.
        assert_eq!(more(&zen5[..4], 1..=4), [0, 0, 1, 0]);
        assert_eq!(more(&zen5[..6], 3..=6), [1, 0, 0, 0]);
        assert_eq!(more(&[], 1..=3), [0, 0, 0]);
    }
}

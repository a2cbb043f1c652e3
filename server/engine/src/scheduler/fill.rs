//! Rows of nobody's, which make those of the streams whole groups.
//!
//! The matrix products of a CPU take rows by so many ([`BackendLimits::group_rows`](crate::backend::BackendLimits)), and
//! each that is left over is a pass over the weights by itself: on two cores of Zen 5 seven rows of a model of 0.5B take
//! 55 ms and eight take 38. Which numbers of rows are dearer than a whole group, and by how much, is measured
//! ([`super::measure`]), since it is not so on each processor. There, tokens that no request asked for are decoded behind what idle sequences
//! hold, and taken out again after the step: what is left over in them stays as it was. Of a split cache they must lie
//! beside the streams.
//!
//! What is gained is the same behind long sequences, and what a row takes is not: it looks at cells, too. A row is
//! computed for nobody only where it is thought to gain more than that.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::Scheduler;
use super::probe::PROBE_TOKEN;
use crate::backend::{Backend, BatchEntry};
use crate::budget::{Demand, StepWork, kilocells};

/// A whole group is worth it where it takes at least so much less, as a part of what the rows alone take: measured a few
/// times, they differ by some per cent without a reason.
const LEAST_GAIN: f64 = 0.08;
/// llama.cpp looks at the cells of a sequence by so many, and of a split cache at as many of each as of the longest.
const CELLS_TOGETHER: u32 = 256;
/// Cells cost a row so many times what the budget takes them to cost, which it learns from prompts: their tokens look at
/// the same cells together (six rows behind 1,000 others took 12 ms more than at the beginning on two cores of Zen 5, 2 ms
/// each, where a prompt's token took 1).
const ROW_LOOKS: f64 = 2.0;

/// By how many ms each number of rows takes longer than the whole group that it is a part of; 0 where that is not worth it.
#[derive(Default)]
pub(super) struct WorthFilling {
    pub(super) gains_ms: Vec<f64>,
    /// What a group was thought to take at that time.
    pub(super) group_ms: f64,
}

impl WorthFilling {
    /// From what so many rows take, from none on.
    pub(super) fn new(group: u32, took: &[Duration], group_ms: f64) -> Self {
        let gain_ms = |(rows, alone): (usize, &Duration)| {
            let whole = took.get(rows.next_multiple_of(group as usize))?;
            let gain = alone.as_secs_f64() - whole.as_secs_f64();
            // One stream alone waits for the weights, and not for what others compute.
            (rows > 1 && gain > alone.as_secs_f64() * LEAST_GAIN).then_some(gain * 1e3)
        };
        Self { gains_ms: took.iter().enumerate().map(|row| gain_ms(row).unwrap_or(0.0)).collect(), group_ms }
    }

    /// How many rows more these should be, and the ms that are gained by it.
    fn more(&self, rows: u32, group: u32) -> Option<(u32, f64)> {
        let left_over = rows % group;
        let measured = if rows > group { group + left_over } else { rows };
        let gain_ms = self.gains_ms.get(measured as usize).copied().filter(|&gain_ms| gain_ms > 0.0)?;
        (left_over > 0).then(|| (group - left_over, gain_ms))
    }
}

/// What a step has of it.
#[derive(Default)]
pub(super) struct Fillers {
    /// Before the streams.
    pub(super) before: Vec<BatchEntry>,
    /// Behind them.
    pub(super) behind: Vec<BatchEntry>,
    /// Cells that all of them look at, in thousands.
    pub(super) kilocells: f64,
}

impl Fillers {
    pub(super) fn rows(&self) -> u32 {
        u32::try_from(self.before.len() + self.behind.len()).unwrap_or(u32::MAX)
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = &BatchEntry> {
        self.before.iter().chain(&self.behind)
    }
}

impl<B: Backend> Scheduler<B> {
    /// Tokens of nobody's for a step in which these slots, in their order, have so many tokens each, and prompts so many, and so
    /// many more beside a pool.
    pub(super) fn fillers(&self, streams: &[(usize, u32)], prompt_tokens: u32, beside: u32) -> Fillers {
        let rows: u32 = streams.iter().map(|&(_, tokens)| tokens).sum();
        let fillers = if self.limits.unified {
            self.fillers_of_pool(rows, prompt_tokens, beside)
        } else {
            self.fillers_beside(streams)
        };
        let Some((fillers, gain_ms)) = fillers else { return Fillers::default() };
        let all = rows.saturating_add(fillers.rows());
        let tokens = all.saturating_add(prompt_tokens).saturating_add(beside);
        let is_room = all <= self.limits.outputs && tokens <= self.limits.batch_tokens;
        if is_room && self.suspects.is_empty() && self.looks_ms(fillers.kilocells) < gain_ms {
            fillers
        } else {
            Fillers::default()
        }
    }

    /// How many rows of nobody's there will be beside the streams of a step in which so many requests have a slot, where it is
    /// not known yet where the rows would lie. `longest`: thousands of cells of the longest stream.
    pub(super) fn expected_fillers(&self, demand: &Demand, active: usize, longest: f64, reads: bool) -> u32 {
        let Some((more, gain_ms)) = self.worth(demand.decode_rows) else { return 0 };
        let idle = self.slots.len() - active;
        let (is_room, looked_at) = match self.limits.unified {
            true => (!reads && idle > 0, 0.0),
            false => (idle >= more as usize, if self.limits.flash_attention { 0.0 } else { longest }),
        };
        if is_room && self.looks_ms(looked_at * f64::from(more)) < gain_ms { more } else { 0 }
    }

    /// How many rows more so many should be, and the ms that are gained by it, at the speed that the machine has now.
    fn worth(&self, rows: u32) -> Option<(u32, f64)> {
        let (more, gain_ms) = self.worth_filling.more(rows, self.limits.group_rows)?;
        Some((more, gain_ms * self.group_ms() / self.worth_filling.group_ms))
    }

    /// What a group is thought to take.
    pub(super) fn group_ms(&self) -> f64 {
        self.budget.cost().step_ms(StepWork::rows(self.limits.group_rows))
    }

    /// What it takes rows to look at so many thousands of cells.
    fn looks_ms(&self, kilocells: f64) -> f64 {
        ROW_LOOKS * kilocells * self.budget.cost().per_kilocell_ms
    }

    /// In a pool all that is computed is computed together. Beside prompts it is their tokens that come in whole groups.
    fn fillers_of_pool(&self, rows: u32, prompt_tokens: u32, beside: u32) -> Option<(Fillers, f64)> {
        let (more, gain_ms) = self.worth(rows)?;
        // Nothing is dropped for the sake of this, nor what it stands behind for that of others.
        if prompt_tokens > 0 || self.kv.free_cells() < u64::from(rows + more) + u64::from(beside) {
            return None;
        }
        let idle = self.slots.iter().enumerate().filter(|(_, slot)| slot.is_none()).map(|(slot, _)| slot);
        let shortest = idle.min_by_key(|&slot| self.held(slot))?;
        let held = self.held(shortest);
        if held + more > self.limits.positions {
            return None;
        }
        let behind: Vec<BatchEntry> = (held..held + more).map(|position| filler(shortest, position)).collect();
        let kilocells = behind.iter().map(|entry| kilocells(entry.position)).sum();
        Some((Fillers { behind, kilocells, ..Fillers::default() }, gain_ms))
    }

    /// Of a split cache the first tokens of neighbours are computed together, and guesses after those apart.
    fn fillers_beside(&self, streams: &[(usize, u32)]) -> Option<(Fillers, f64)> {
        let (&(first, _), &(last, _)) = (streams.first()?, streams.last()?);
        let side_by_side = last - first + 1 == streams.len();
        // With more of each, those of nobody's would take one of them into a part of its own.
        if !side_by_side || streams.iter().all(|&(_, tokens)| tokens > 1) {
            return None;
        }
        let rows = u32::try_from(streams.len()).unwrap_or(u32::MAX);
        let (more, gain_ms) = self.worth(rows)?;
        let cells = |slot: usize| self.held(slot).saturating_add(1).next_multiple_of(CELLS_TOGETHER);
        let longest = streams.iter().map(|&(slot, _)| cells(slot)).max().unwrap_or(0);
        let is_of_use = |slot: &usize| {
            let is_idle = self.slots.get(*slot).is_some_and(Option::is_none);
            // All look at as many cells as the longest of them.
            is_idle && self.held(*slot) < self.limits.positions && cells(*slot) <= longest
        };
        let entries =
            |slots: Vec<usize>| slots.into_iter().map(|slot| filler(slot, self.held(slot))).collect::<Vec<_>>();
        let behind: Vec<usize> = (last + 1..).take_while(is_of_use).take(more as usize).collect();
        let missing = more as usize - behind.len();
        let mut before: Vec<usize> = (0..first).rev().take_while(is_of_use).take(missing).collect();
        before.reverse();
        if before.len() < missing {
            return None;
        }
        let looks_at = |&slot: &usize| if self.limits.flash_attention { self.held(slot) } else { longest };
        let kilocells = before.iter().chain(&behind).map(|slot| kilocells(looks_at(slot))).sum();
        Some((Fillers { before: entries(before), behind: entries(behind), kilocells }, gain_ms))
    }

    /// Takes them out of the cache again.
    pub(super) fn take_out_fillers(&mut self) {
        self.stats.filler_rows.fetch_add(self.fillers.rows().into(), Relaxed);
        // Where a sequence has several, the first takes all of them out.
        for entry in self.fillers.entries() {
            self.kv.truncate(entry.sequence, entry.position);
        }
    }

    /// Takes out what a batch that failed may have left of them.
    pub(super) fn rewind_fillers(&mut self) {
        for BatchEntry { sequence, .. } in std::mem::take(&mut self.fillers).entries() {
            if !self.kv.rewind(*sequence) {
                self.kv.clear(*sequence);
            }
        }
    }

    fn held(&self, slot: usize) -> u32 {
        self.kv.len(u32::try_from(slot).unwrap_or(u32::MAX))
    }
}

fn filler(slot: usize, position: u32) -> BatchEntry {
    // A slot's index is its sequence id, below the u32 it came from.
    let sequence = u32::try_from(slot).unwrap_or(u32::MAX);
    // With logits: those are a product, too.
    BatchEntry { token: PROBE_TOKEN, position, sequence, output: true }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many rows more so many become where one takes so many ms, two so many, and so on.
    fn more(took_ms: &[u64], rows: std::ops::RangeInclusive<u32>) -> Vec<u32> {
        let took: Vec<Duration> = [0].iter().chain(took_ms).copied().map(Duration::from_millis).collect();
        let worth = WorthFilling::new(4, &took, 1.0);
        rows.map(|rows| worth.more(rows, 4).map_or(0, |(more, _)| more)).collect()
    }

    #[test]
    fn rows_become_a_whole_group_where_that_takes_less() {
        // As measured with Zen 5, and with AVX2, where two rows and six are guesses.
        let zen5 = [12, 23, 32, 28, 41, 48, 55, 38];
        assert_eq!(more(&zen5, 1..=8), [0, 0, 1, 0, 0, 2, 1, 0]);
        assert_eq!(more(&zen5, 13..=17), [0, 2, 1, 0, 0]);
        let avx2 = [24, 36, 55, 48, 75, 85, 94, 91];
        assert_eq!(more(&avx2, 1..=8), [0, 0, 1, 0, 0, 0, 0, 0]);
        // Where a whole group was not measured.
        assert_eq!(more(&zen5[..4], 1..=7), [0, 0, 1, 0, 0, 0, 0]);
        assert_eq!(more(&zen5[..6], 3..=6), [1, 0, 0, 0]);
        assert_eq!(more(&[], 1..=3), [0, 0, 0]);
    }

    #[test]
    fn the_gain_is_what_the_rows_alone_take_longer() {
        let took = [0, 12, 23, 32, 28].map(Duration::from_millis);
        let (more, gain_ms) = WorthFilling::new(4, &took, 1.0).more(3, 4).unwrap_or_default();
        assert_eq!((more, gain_ms.round()), (1, 4.0));
    }
}

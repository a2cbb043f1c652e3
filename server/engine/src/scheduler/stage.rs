//! Which prompt is read beside the pool.
//!
//! Of long prompts one at a time is read there ([`Backend::stage`]), in the order in which prompts go before each other in a
//! step, every fourth time the oldest ([`crate::plan::OLDEST_TURN`]). The others wait for it, unless they have a higher
//! priority or far less to read: those are read in the pool meanwhile, like short ones and those that are too long for it.

use super::Scheduler;
use crate::backend::Backend;
use crate::kv::Kv;
use crate::params::Priority;
use crate::plan::{Need, sort_readers};
use crate::sequence::Sequence;

/// Who has less to read than one part in so many of what is left of the one that is read does not wait for it.
const FAR_LESS: u32 = 2;
/// A prompt with fewer tokens is not worth the way of its state into the pool.
pub(crate) const LEAST_STAGED_TOKENS: u32 = 256;

/// A prompt that might be read there, by its place among the needs.
struct Candidate {
    at: usize,
    priority: Priority,
    remaining: u32,
    age: u64,
}

impl<B: Backend> Scheduler<B> {
    /// Whether the step reads this one's prompt beside the pool.
    pub(super) fn is_staged(&self, slot: usize) -> bool {
        self.staged.is_some_and(|staged| staged as usize == slot)
    }

    /// Puts into the pool what has been read, was given up, or has become too long to be read on beside it.
    pub(super) fn land_what_is_read(&mut self) {
        let (Some(cells), Some(staged)) = (self.limits.stage, self.kv.staged()) else { return };
        let goes_on = |sequence: &Sequence| matches!(sequence.need(), Need::Prefill { .. }) && sequence.len() <= cells;
        if !self.slots[staged as usize].as_ref().is_some_and(goes_on) {
            self.land();
        }
    }

    /// Puts into the pool what has been read; what does not get there is read again.
    pub(super) fn land(&mut self) {
        if let Some(staged) = self.kv.staged()
            && !self.kv.land()
            && let Some(sequence) = &mut self.slots[staged as usize]
        {
            sequence.decoded = 0;
        }
    }
}

/// Lets one of the prompts be read beside the pool if none is, and has others wait for it; `staged` counts those that were.
/// False: that is not possible.
pub(super) fn share_stage<B: Backend>(
    kv: &mut Kv<B>,
    cells: u32,
    staged: &mut u64,
    active: &[(usize, &Sequence)],
    needs: &mut [Need],
) -> bool {
    let candidate = |(at, (need, (_, sequence))): (usize, (&Need, &(usize, &Sequence)))| match *need {
        Need::Prefill { remaining, age, priority, scores } => {
            // Beside the pool there is a row of logits for a prompt's end alone.
            let may = remaining >= LEAST_STAGED_TOKENS && sequence.len() <= cells && !scores;
            may.then_some(Candidate { at, priority, remaining, age })
        }
        Need::Decode { .. } => None,
    };
    let mut candidates: Vec<Candidate> = needs.iter().zip(active).enumerate().filter_map(candidate).collect();
    let id = |at: usize| u32::try_from(active[at].0).unwrap_or(u32::MAX);
    if kv.staged().is_none() {
        sort_readers(&mut candidates, *staged, |c| (c.priority, c.remaining, c.age));
        let Some(first) = candidates.first() else { return true };
        if !kv.stage(id(first.at)) {
            return false;
        }
        *staged += 1;
    }
    let Some(reader) = (0..active.len()).find(|&at| Some(id(at)) == kv.staged()) else { return true };
    let Need::Prefill { remaining: left @ 1.., priority: standing, .. } = needs[reader] else { return true };
    for Candidate { at, priority, remaining, age } in candidates {
        if at != reader && priority <= standing && remaining >= left / FAR_LESS {
            needs[at] = Need::Prefill { remaining: 0, age, priority, scores: false };
        }
    }
    true
}

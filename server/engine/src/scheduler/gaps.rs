//! Keeps the streams of a split cache beside each other.
//!
//! Of a split cache llama.cpp computes together only sequences whose ids follow each other ([`crate::plan::split_parts`]):
//! each gap that an ended request leaves is one more part of every step, with a fixed cost of its own. On two cores 16
//! streams scattered over 31 slots took 360 ms a token, and 170 side by side. New requests take the lowest slots; where
//! that leaves a gap, or puts a prompt that is read among the streams, the highest stream changes places with it. Rows
//! are copied as they are (a megabyte takes less than a millisecond), so that answers stay the same, and so does what a
//! request left for others.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use super::Scheduler;
use crate::backend::Backend;
use crate::budget::StepWork;
use crate::plan::Need;

/// The longest sequence that is moved, in tokens: its copy holds up everyone.
const MAX_MOVED_TOKENS: u32 = 2_048;
/// Moves of one step take up to this part of what it takes to decode; there is always time for one.
const MOVING_SHARE: f64 = 0.05;

impl<B: Backend> Scheduler<B> {
    /// Moves the highest streams to the lowest places, some in each step.
    pub(super) fn close_gaps(&mut self) {
        if self.limits.unified || !self.limits.reusable {
            return;
        }
        let began = Instant::now();
        let active = u32::try_from(self.slots.iter().flatten().count()).unwrap_or(u32::MAX);
        let share_ms = self.budget.cost().step_ms(StepWork::rows(active)) * MOVING_SHARE;
        while let Some((place, stream)) = self.misplaced() {
            let moved = self.kv.exchange(stream, place);
            if moved.is_ok() {
                self.slots.swap(place as usize, stream as usize);
                self.stats.moves.fetch_add(1, Relaxed);
            }
            // What could not be put back is read again.
            for id in [place, stream] {
                if let Some(sequence) = &mut self.slots[id as usize] {
                    sequence.decoded = self.kv.len(id);
                }
            }
            if let Err(error) = moved {
                tracing::debug!(?error, "a sequence could not be moved");
                return;
            }
            if began.elapsed().as_secs_f64() * 1e3 >= share_ms {
                return;
            }
        }
    }

    /// The lowest place that no stream has, and the highest above it that one has.
    fn misplaced(&self) -> Option<(u32, u32)> {
        let streams = |slot: &Option<crate::sequence::Sequence>| {
            slot.as_ref().is_some_and(|sequence| matches!(sequence.need(), Need::Decode { .. }))
        };
        let place = u32::try_from(self.slots.iter().position(|slot| !streams(slot))?).ok()?;
        let stream = u32::try_from(self.slots.iter().rposition(streams)?).ok()?;
        let longest = self.kv.len(stream).max(self.kv.len(place));
        (place < stream && longest <= MAX_MOVED_TOKENS).then_some((place, stream))
    }
}

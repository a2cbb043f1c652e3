//! Keeps the streams of a split cache beside each other.
//!
//! Of a split cache llama.cpp computes together only sequences whose ids follow each other ([`crate::plan::split_parts`]):
//! each gap that an ended request leaves is one more part of every step, with a fixed cost of its own. On two cores 16
//! streams scattered over 31 slots took 360 ms a token, and 170 side by side. New requests take the lowest slots; where
//! that leaves a gap, or puts a prompt that is read among the streams, a stream changes places with it. Rows are copied
//! as they are (a megabyte takes less than a millisecond), so that answers stay the same, and so does what a request
//! left for others. While they are, a copy of both is in memory.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use super::Scheduler;
use crate::backend::Backend;
use crate::budget::StepWork;
use crate::plan::Need;
use crate::sequence::Sequence;

/// The longest sequence that is moved, in tokens: its copy holds up everyone.
const MAX_MOVED_TOKENS: u32 = 2_048;
/// Moves of one step take up to this part of what it takes to decode; there is always time for one.
const MOVING_SHARE: f64 = 0.05;

impl<B: Backend> Scheduler<B> {
    /// Moves streams beside each other, some in each step.
    pub(super) fn close_gaps(&mut self) {
        if self.limits.unified || !self.limits.reusable {
            return;
        }
        let began = Instant::now();
        let active = u32::try_from(self.slots.iter().flatten().count()).unwrap_or(u32::MAX);
        let share_ms = self.budget.cost().step_ms(StepWork::rows(active)) * MOVING_SHARE;
        while let Some((place, stream)) = self.misplaced() {
            // Each is taken out and put in.
            let tokens = self.kv.len(place) + self.kv.len(stream);
            if self.copies.room(tokens, 2) < tokens {
                return;
            }
            self.copied(tokens, 2);
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
                tracing::debug!(%error, "a sequence could not be moved");
                return;
            }
            if began.elapsed().as_secs_f64() * 1e3 >= share_ms {
                return;
            }
        }
    }

    /// A place that no stream has and a stream for it: of what brings all streams side by side with the fewest moves, a
    /// move of what is least to copy. Each leaves one fewer to be made.
    fn misplaced(&self) -> Option<(u32, u32)> {
        let is_stream: Vec<bool> = self.slots.iter().map(|slot| slot.as_ref().is_some_and(decodes)).collect();
        let streams = is_stream.iter().filter(|&&is| is).count();
        let (lowest, highest) = is_stream.iter().position(|&is| is).zip(is_stream.iter().rposition(|&is| is))?;
        if highest - lowest < streams {
            return None; // side by side
        }
        let ways = (0..=is_stream.len() - streams).filter_map(|first| {
            let is_place = |id: u32| (first..first + streams).contains(&(id as usize));
            let wrong = (0_u32..).zip(&is_stream).filter(|&(id, &stream)| stream != is_place(id)).map(|(id, _)| id);
            let (places, outside): (Vec<u32>, Vec<u32>) = wrong.partition(|&id| is_place(id));
            let lens = || outside.iter().chain(&places).map(|&id| self.kv.len(id));
            let next = (*places.first()?, *outside.last()?);
            (lens().max() <= Some(MAX_MOVED_TOKENS)).then(|| (outside.len(), lens().sum::<u32>(), next))
        });
        let way = ways.min_by_key(|&(moves, tokens, _)| (moves, tokens)).map(|(_, _, next)| next);
        way.or_else(|| self.apart(&is_stream))
    }

    /// Where long ones are in the way of that: the least to copy that leaves the streams in fewer groups.
    fn apart(&self, is_stream: &[bool]) -> Option<(u32, u32)> {
        let ids = |streams: bool| {
            let short = |id: u32| self.kv.len(id) <= MAX_MOVED_TOKENS;
            (0_u32..).zip(is_stream).filter(move |&(id, &is)| is == streams && short(id)).map(|(id, _)| id)
        };
        let beside = |id: u32, but: u32| {
            let is_one = |other: u32| other != but && is_stream.get(other as usize) == Some(&true);
            usize::from(id.checked_sub(1).is_some_and(is_one)) + usize::from(is_one(id + 1))
        };
        let pairs = ids(true).flat_map(|stream| ids(false).map(move |place| (place, stream)));
        // Without neighbours it was a group of its own; between two streams it makes two groups one.
        let joining = pairs.filter(|&(place, stream)| beside(stream, stream) < beside(place, stream));
        joining.min_by_key(|&(place, stream)| self.kv.len(place) + self.kv.len(stream))
    }
}

/// Whether it generates. One of a burst that was read to its last token waits for the others where it is.
fn decodes(sequence: &Sequence) -> bool {
    let asking = sequence.asking();
    asking.started && matches!(asking.need, Need::Decode { .. })
}

//! What answers hold in this process's memory until their clients have taken it: how much there is, and how much each may have.
//!
//! A streamed answer waits in its channel ([`crate::version`]). It may hold [`OUTPUT_PER_ANSWER_BYTES`], and no more than what
//! is left free of [`OUTPUT_BUDGET_BYTES`]: the dynamic threshold by which switches share a memory among their ports
//! (Choudhury and Hahne, 1998). So those who hold most are over it first, there is always something left, and since each may
//! hold [`OUTPUT_FLOOR_BYTES`] in any case, an answer that is read goes on however many are not. Who is over it pauses, and
//! goes on once it holds half of what it may. Absent: waiting, which is the channel's, and pausing, which is the worker's.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use gantry_engine::{GenerationEvent, TokenChance, TokenLogprob};

use crate::limits::{OUTPUT_BUDGET_BYTES, OUTPUT_FLOOR_BYTES, OUTPUT_OVERRUN_BYTES, OUTPUT_PER_ANSWER_BYTES};

// One answer alone may hold all that one may, and more than what it may in any case.
const _: () =
    assert!(OUTPUT_FLOOR_BYTES < OUTPUT_PER_ANSWER_BYTES && OUTPUT_PER_ANSWER_BYTES * 2 < OUTPUT_BUDGET_BYTES);

/// What is undelivered in this process, and what became of those whose clients do not take it.
#[derive(Debug, Default)]
pub struct Output {
    held_bytes: AtomicUsize,
    ended: AtomicU64,
}

impl Output {
    /// With nothing undelivered.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Bytes that wait for clients.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.held_bytes.load(Ordering::Relaxed)
    }

    /// Answers that ended, since their clients took none of what waited for them.
    #[must_use]
    pub fn ended(&self) -> u64 {
        self.ended.load(Ordering::Relaxed)
    }

    /// So much more waits. Returns how much does then.
    pub(crate) fn hold(&self, bytes: usize) -> usize {
        self.held_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes
    }

    /// So much was taken, or thrown away. Returns how much waits then.
    pub(crate) fn release(&self, bytes: usize) -> usize {
        self.held_bytes.fetch_sub(bytes, Ordering::Relaxed) - bytes
    }

    pub(crate) fn note_end(&self) {
        self.ended.fetch_add(1, Ordering::Relaxed);
    }
}

/// What is to become of a streamed answer of which more waits than before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pressure {
    /// It goes on, or stays as it is.
    None,
    /// Its sequence is to pause.
    Pause,
    /// It was told to pause, and more has come since than can have been on its way.
    Overrun,
}

/// Whether an answer that holds `own_bytes`, where all together hold `held_bytes`, holds more than it may.
pub(crate) fn pressure(own_bytes: usize, held_bytes: usize, is_paused: bool) -> Pressure {
    let over_bytes = own_bytes.saturating_sub(allowance(held_bytes));
    match (over_bytes, is_paused) {
        (0, _) => Pressure::None,
        (_, false) => Pressure::Pause,
        (OUTPUT_OVERRUN_BYTES.., true) => Pressure::Overrun,
        (_, true) => Pressure::None,
    }
}

/// Whether a paused answer that holds so little goes on. One that holds nothing always does.
pub(crate) fn may_resume(own_bytes: usize, held_bytes: usize) -> bool {
    own_bytes <= allowance(held_bytes) / 2
}

/// What one streamed answer may hold where all together hold so much.
fn allowance(held_bytes: usize) -> usize {
    OUTPUT_BUDGET_BYTES.saturating_sub(held_bytes).clamp(OUTPUT_FLOOR_BYTES, OUTPUT_PER_ANSWER_BYTES)
}

/// Bytes of memory that an event has beside itself.
pub(crate) fn allocated_by(event: &GenerationEvent) -> usize {
    let GenerationEvent::Delta { text, logprobs, .. } = event else { return 0 };
    let of_chance = |chance: &TokenChance| allocated(chance.bytes.capacity());
    let of_token = |token: &TokenLogprob| {
        let top: usize = token.top.iter().map(of_chance).sum();
        of_chance(&token.token) + allocated(token.top.capacity() * size_of::<TokenChance>()) + top
    };
    let of_tokens: usize = logprobs.iter().map(of_token).sum();
    allocated(text.capacity()) + allocated(logprobs.capacity() * size_of::<TokenLogprob>()) + of_tokens
}

/// What the C library takes for a block of so many bytes: a header of 8, in steps of 16, and 32 at the least.
fn allocated(bytes: usize) -> usize {
    if bytes == 0 { 0 } else { (bytes + 8).next_multiple_of(16).max(32) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_an_event_holds_is_counted_with_all_that_is_in_it() {
        let chance = || TokenChance { id: 1, bytes: vec![b'x'; 3], logprob: -1.0 };
        let delta = |top: usize, tokens: usize| GenerationEvent::Delta {
            text: "x".repeat(100),
            tokens: 1,
            logprobs: (0..tokens)
                .map(|_| TokenLogprob { token: chance(), top: (0..top).map(|_| chance()).collect() })
                .collect(),
        };
        assert_eq!(allocated_by(&GenerationEvent::Started { prompt_tokens: 1 }), 0);
        assert_eq!(allocated_by(&delta(0, 0)), 112);
        let token = size_of::<TokenLogprob>();
        assert_eq!(allocated_by(&delta(0, 1)), 112 + allocated(token) + 32);
        let chances = allocated(20 * size_of::<TokenChance>());
        assert_eq!(allocated_by(&delta(20, 2)), 112 + allocated(2 * token) + 2 * (32 + chances + 20 * 32));
    }

    #[test]
    fn who_holds_most_pauses_first_and_who_holds_little_never() {
        let full = OUTPUT_BUDGET_BYTES;
        assert_eq!(pressure(OUTPUT_PER_ANSWER_BYTES, OUTPUT_PER_ANSWER_BYTES, false), Pressure::None);
        assert_eq!(pressure(OUTPUT_PER_ANSWER_BYTES + 1, OUTPUT_PER_ANSWER_BYTES + 1, false), Pressure::Pause);
        let left = 100 << 10;
        assert_eq!(pressure(left, full - left, false), Pressure::None);
        assert_eq!(pressure(left + 1, full - left, false), Pressure::Pause);
        assert_eq!(pressure(OUTPUT_FLOOR_BYTES, 2 * full, false), Pressure::None);
        assert_eq!(pressure(left + 1, full - left, true), Pressure::None);
        assert_eq!(pressure(left + OUTPUT_OVERRUN_BYTES, full - left, true), Pressure::Overrun);
        assert!(may_resume(0, usize::MAX) && may_resume(left / 2, full - left));
        assert!(!may_resume(left / 2 + 1, full - left));
    }

    /// One of many answers, by the rules alone.
    #[derive(Clone, Default)]
    struct Answer {
        own_bytes: usize,
        is_paused: bool,
    }

    proptest! {
        /// Whatever is generated and taken in whatever order, an answer that is not over what it may hold goes on, those that
        /// are together hold no more than the budget and their floors and the last piece of each, and a client that takes all
        /// has its answer go on at once.
        #[test]
        fn what_waits_is_bounded_and_nobody_who_reads_starves(
            steps in proptest::collection::vec((0_usize..40, 1_usize..60_000, any::<bool>()), 1..800)
        ) {
            let mut answers = vec![Answer::default(); 40];
            let mut held_bytes = 0;
            for (index, bytes, takes) in steps {
                let answer = &mut answers[index];
                if takes {
                    let taken = answer.own_bytes.min(bytes);
                    answer.own_bytes -= taken;
                    held_bytes -= taken;
                    answer.is_paused &= !may_resume(answer.own_bytes, held_bytes);
                    prop_assert!(answer.own_bytes > 0 || !answer.is_paused);
                } else if !answer.is_paused {
                    answer.own_bytes += bytes;
                    held_bytes += bytes;
                    answer.is_paused = pressure(answer.own_bytes, held_bytes, false) == Pressure::Pause;
                    prop_assert!(answer.own_bytes > OUTPUT_FLOOR_BYTES || !answer.is_paused);
                }
                let most = OUTPUT_PER_ANSWER_BYTES + 60_000;
                prop_assert!(answers.iter().all(|answer| answer.own_bytes <= most));
                prop_assert!(held_bytes <= OUTPUT_BUDGET_BYTES + 40 * (OUTPUT_FLOOR_BYTES + 60_000));
            }
        }
    }
}

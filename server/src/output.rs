//! What answers hold in this process's memory until their clients have taken it: how much there is, and how much each may have.
//!
//! A streamed answer waits in its channel ([`crate::version`]). It may hold [`OUTPUT_PER_ANSWER_BYTES`], and no more than what
//! is left free of [its budget](crate::front): the dynamic threshold by which switches share a memory among their ports
//! (Choudhury and Hahne, 1998). So those who hold most are over it first, there is always something left, and since each may
//! hold [`OUTPUT_FLOOR_BYTES`] in any case, an answer that is read goes on however many are not. Who is over it pauses, and
//! goes on once it holds half of what it may.
//!
//! An answer that is not streamed cannot pause, since nothing of it is taken before its end: what is collected of it counts in
//! the same memory ([`Collected`]), and past what it may hold its request fails. Absent: waiting, which is the channel's, and pausing, which is the worker's.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use gantry_engine::{GenerationEvent, TokenChance, TokenLogprob};

use crate::limits::{
    OUTPUT_BUDGET_MIN_BYTES, OUTPUT_FLOOR_BYTES, OUTPUT_OVERRUN_BYTES, OUTPUT_PER_ANSWER_BYTES, WHOLE_ANSWER_BYTES,
    WHOLE_ANSWER_FLOOR_BYTES,
};

// One answer alone may hold all that one may, and more than what it may in any case.
const _: () =
    assert!(OUTPUT_FLOOR_BYTES < OUTPUT_PER_ANSWER_BYTES && OUTPUT_PER_ANSWER_BYTES * 2 < OUTPUT_BUDGET_MIN_BYTES);

/// What is undelivered in this process, and what became of those whose clients do not take it.
#[derive(Debug)]
pub struct Output {
    budget_bytes: usize,
    held_bytes: AtomicUsize,
    ended: AtomicU64,
}

impl Output {
    /// With nothing undelivered, of which so much may be.
    #[must_use]
    pub fn new(budget_bytes: usize) -> Arc<Self> {
        let (held_bytes, ended) = (AtomicUsize::new(0), AtomicU64::new(0));
        Arc::new(Self { budget_bytes, held_bytes, ended })
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

    /// What one streamed answer may hold where all together hold so much.
    pub(crate) fn allowance(&self, held_bytes: usize) -> usize {
        self.budget_bytes.saturating_sub(held_bytes).clamp(OUTPUT_FLOOR_BYTES, OUTPUT_PER_ANSWER_BYTES)
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

/// What becomes of an answer that holds `own_bytes` and may hold `allowed_bytes`.
pub(crate) fn pressure(own_bytes: usize, allowed_bytes: usize, is_paused: bool) -> Pressure {
    match (own_bytes.saturating_sub(allowed_bytes), is_paused) {
        (0, _) => Pressure::None,
        (_, false) => Pressure::Pause,
        (OUTPUT_OVERRUN_BYTES.., true) => Pressure::Overrun,
        (_, true) => Pressure::None,
    }
}

/// Whether a paused answer that holds so little of what it may goes on. One that holds nothing always does.
pub(crate) fn may_resume(own_bytes: usize, allowed_bytes: usize) -> bool {
    own_bytes <= allowed_bytes / 2
}

/// Why no more can be collected of answers that are not streamed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TooMuch {
    /// They hold what those to one request may.
    Own,
    /// All answers together hold what there is.
    Everyone,
}

/// What answers that are not streamed hold, from their first piece until their client has them. Given back when dropped.
pub(crate) struct Collected {
    output: Arc<Output>,
    bytes: usize,
}

impl Collected {
    pub(crate) fn new(output: &Arc<Output>) -> Self {
        Self { output: Arc::clone(output), bytes: 0 }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// So much more came.
    ///
    /// # Errors
    /// It is more than may be held.
    pub(crate) fn grow(&mut self, bytes: usize) -> Result<(), TooMuch> {
        self.bytes += bytes;
        let held_bytes = self.output.hold(bytes);
        let left_bytes = self.output.budget_bytes.saturating_sub(held_bytes);
        match self.bytes {
            own if own > WHOLE_ANSWER_BYTES => Err(TooMuch::Own),
            own if own > left_bytes.max(WHOLE_ANSWER_FLOOR_BYTES) => Err(TooMuch::Everyone),
            _ => Ok(()),
        }
    }

    /// They are written now, in so many bytes.
    pub(crate) fn become_written(&mut self, bytes: usize) {
        self.output.hold(bytes);
        self.output.release(std::mem::replace(&mut self.bytes, bytes));
    }
}

impl Drop for Collected {
    fn drop(&mut self) {
        self.output.release(self.bytes);
    }
}

/// Bytes of memory that an event has beside itself.
pub(crate) fn allocated_by(event: &GenerationEvent) -> usize {
    let GenerationEvent::Delta { text, logprobs, .. } = event else { return 0 };
    allocated(text.capacity())
        + allocated(logprobs.capacity() * size_of::<TokenLogprob>())
        + allocated_by_tokens(logprobs)
}

/// What a piece of an answer takes once it is put to the others, of whose memory up to half is empty.
pub(crate) fn collected_of(text: &str, logprobs: &[TokenLogprob]) -> usize {
    2 * (text.len() + size_of_val(logprobs)) + allocated_by_tokens(logprobs)
}

/// Bytes of memory that tokens have beside themselves.
fn allocated_by_tokens(logprobs: &[TokenLogprob]) -> usize {
    let of_chance = |chance: &TokenChance| allocated(chance.bytes.capacity());
    let of_token = |token: &TokenLogprob| {
        let top: usize = token.top.iter().map(of_chance).sum();
        of_chance(&token.token) + allocated(token.top.capacity() * size_of::<TokenChance>()) + top
    };
    logprobs.iter().map(of_token).sum()
}

/// What the C library takes for a block of so many bytes: a header of 8, in steps of 16, and 32 at the least.
fn allocated(bytes: usize) -> usize {
    if bytes == 0 { 0 } else { (bytes + 8).next_multiple_of(16).max(32) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::OUTPUT_BUDGET_BYTES;
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
        let output = Output::new(full);
        let pressure = |own, held, is_paused| pressure(own, output.allowance(held), is_paused);
        let may_resume = |own, held| may_resume(own, output.allowance(held));
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

    #[test]
    fn what_is_collected_is_held_until_it_is_dropped_and_bounded() {
        let output = Output::new(OUTPUT_BUDGET_BYTES);
        let mut one = Collected::new(&output);
        assert_eq!(one.grow(WHOLE_ANSWER_BYTES), Ok(()));
        assert_eq!(one.grow(1), Err(TooMuch::Own));
        let mut others: Vec<Collected> = (0..100).map(|_| Collected::new(&output)).collect();
        for other in &mut others {
            assert_eq!(other.grow(WHOLE_ANSWER_FLOOR_BYTES), Ok(()), "texts are collected however many there are");
        }
        let large: Vec<_> = others[..3].iter_mut().map(|other| other.grow(OUTPUT_BUDGET_BYTES / 6)).collect();
        assert_eq!(large, [Ok(()), Ok(()), Err(TooMuch::Everyone)], "and no one takes more than it leaves to others");
        one.become_written(1000);
        assert_eq!(one.bytes(), 1000);
        drop(others);
        assert_eq!(output.held_bytes(), 1000);
        drop(one);
        assert_eq!(output.held_bytes(), 0);
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
            let output = Output::new(OUTPUT_BUDGET_BYTES);
            let mut answers = vec![Answer::default(); 40];
            let mut held_bytes = 0;
            for (index, bytes, takes) in steps {
                let answer = &mut answers[index];
                if takes {
                    let taken = answer.own_bytes.min(bytes);
                    answer.own_bytes -= taken;
                    held_bytes -= taken;
                    answer.is_paused &= !may_resume(answer.own_bytes, output.allowance(held_bytes));
                    prop_assert!(answer.own_bytes > 0 || !answer.is_paused);
                } else if !answer.is_paused {
                    answer.own_bytes += bytes;
                    held_bytes += bytes;
                    answer.is_paused = pressure(answer.own_bytes, output.allowance(held_bytes), false) == Pressure::Pause;
                    prop_assert!(answer.own_bytes > OUTPUT_FLOOR_BYTES || !answer.is_paused);
                }
                let most = OUTPUT_PER_ANSWER_BYTES + 60_000;
                prop_assert!(answers.iter().all(|answer| answer.own_bytes <= most));
                prop_assert!(held_bytes <= OUTPUT_BUDGET_BYTES + 40 * (OUTPUT_FLOOR_BYTES + 60_000));
            }
        }
    }
}

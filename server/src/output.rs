//! What answers hold in this process's memory until their clients have taken it: how much there is, and how much each may have.
//!
//! A streamed answer waits in its channel ([`crate::version`]). It may hold [`OUTPUT_PER_ANSWER_BYTES`], and no more than what
//! is left free of [its budget](crate::front): the dynamic threshold by which switches share a memory among their ports
//! (Choudhury and Hahne, 1998). So those who hold most are over it first, there is always something left, and since each may
//! hold [`OUTPUT_FLOOR_BYTES`] as long as there is [a reserve](OUTPUT_RESERVE_BYTES), an answer that is read goes on however
//! many are not. Past that, too, each has one piece at a time. Who is over what it may hold pauses, and goes on once it holds
//! half of it, or nothing.
//!
//! What is left of an answer that has ended waits in the same memory with nobody but its client to look after it, so this does
//! ([`Leftover`]).
//!
//! An answer that is not streamed cannot pause, since nothing of it is taken before its end: what is collected of it counts in
//! the same memory ([`Collected`]), and past what it may hold its request fails. Until its client has it, it is taken at the same
//! least rate (`serve::connection`). Absent: waiting, which is the channel's, and pausing, which is the worker's.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use gantry_core::{
    GenerationEvent, PromptChance, PromptToken, ShownPrompt, StopCause, TokenChance, TokenLogprob, TokenPiece,
    ToolCallDelta,
};
use tokio::time::MissedTickBehavior;

use crate::limits::{
    OUTPUT_BUDGET_MIN_BYTES, OUTPUT_FLOOR_BYTES, OUTPUT_OVERRUN_BYTES, OUTPUT_PER_ANSWER_BYTES, OUTPUT_RESERVE_BYTES,
    SLOW_CLIENT_CROWDED_LIMIT, SLOW_CLIENT_END_LIMIT, SLOW_CLIENT_LIMIT, SUPERVISOR_TICK, WHOLE_ANSWER_BYTES,
    WHOLE_ANSWER_FLOOR_BYTES,
};

// One answer alone may hold all that one may, and more than what it may in any case.
const _: () =
    assert!(OUTPUT_FLOOR_BYTES < OUTPUT_PER_ANSWER_BYTES && OUTPUT_PER_ANSWER_BYTES * 2 < OUTPUT_BUDGET_MIN_BYTES);

/// The most that a token's id takes on the wire.
const TOLD_TOKEN_BYTES: usize = 11;
/// The same with what stands around its bytes.
const TOLD_PIECE_BYTES: usize = 32;
/// What a call of a tool takes beside its texts, held or written.
const TOLD_CALL_BYTES: usize = 256;

/// What is undelivered in this process, and what became of those whose clients do not take it.
#[derive(Debug)]
pub struct Output {
    budget_bytes: usize,
    reserve_bytes: usize,
    held_bytes: AtomicUsize,
    /// Since when the server is about to end, and waits for clients no longer than it has to.
    hurries_since: OnceLock<Instant>,
    ended: AtomicU64,
    leftovers: Mutex<Vec<Weak<dyn Leftover>>>,
}

/// What an answer that has ended left for its client.
pub(crate) trait Leftover: Send + Sync {
    /// Throws it away where the client takes too little of it for `limit`, as far as is known: to be asked time and again.
    /// True: nothing is left.
    fn is_over(&self, now: Instant, limit: Duration) -> bool;
}

impl Output {
    /// With nothing undelivered, of which so much may be.
    #[must_use]
    pub fn new(budget_bytes: usize) -> Arc<Self> {
        Arc::new(Self::with(budget_bytes, OUTPUT_RESERVE_BYTES))
    }

    fn with(budget_bytes: usize, reserve_bytes: usize) -> Self {
        let (held_bytes, ended, leftovers) = (AtomicUsize::new(0), AtomicU64::new(0), Mutex::default());
        Self { budget_bytes, reserve_bytes, held_bytes, hurries_since: OnceLock::new(), ended, leftovers }
    }

    /// Throws away, time and again, what answers left whose clients do not take it. Never ends.
    pub async fn watch(self: Arc<Self>) {
        let mut tick = tokio::time::interval(SUPERVISOR_TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            self.sweep(Instant::now());
        }
    }

    pub(crate) fn sweep(&self, now: Instant) {
        // Not under the lock, which whoever ends an answer takes.
        let mut left = std::mem::take(&mut *self.leftovers());
        let is_over =
            |left: &Weak<dyn Leftover>| left.upgrade().is_none_or(|left| left.is_over(now, SLOW_CLIENT_LIMIT));
        left.retain(|left| !is_over(left));
        self.leftovers().append(&mut left);
    }

    /// An answer has ended of which something waits.
    pub(crate) fn leave(&self, leftover: Weak<dyn Leftover>) {
        self.leftovers().push(leftover);
    }

    fn leftovers(&self) -> MutexGuard<'_, Vec<Weak<dyn Leftover>>> {
        self.leftovers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that wait for clients.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.held_bytes.load(Ordering::Relaxed)
    }

    /// Answers that ended, since their clients took too little of what waited for them.
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
        let floor_bytes = if self.is_used_up(held_bytes) { 0 } else { OUTPUT_FLOOR_BYTES };
        self.budget_bytes.saturating_sub(held_bytes).clamp(floor_bytes, OUTPUT_PER_ANSWER_BYTES)
    }

    fn is_used_up(&self, held_bytes: usize) -> bool {
        held_bytes > self.budget_bytes.saturating_add(self.reserve_bytes)
    }

    /// The server is about to end: from now on who takes too little has no longer than in a crowd, and who begins to do so later
    /// has what is left of that, or [`SLOW_CLIENT_END_LIMIT`].
    pub(crate) fn hurry(&self) {
        self.hurries_since.get_or_init(|| tokio::time::Instant::now().into_std());
    }

    pub(crate) fn hurries(&self) -> bool {
        self.hurries_since.get().is_some()
    }

    /// How long a client may take too little that does so since then, and has so long where there is memory, and time.
    pub(crate) fn patience(&self, limit: Duration, since: Instant) -> Duration {
        match self.hurries_since.get() {
            // Those whose turn comes when others have been given up would each add as much again.
            Some(&hurries) => {
                let left = (hurries + SLOW_CLIENT_CROWDED_LIMIT).saturating_duration_since(since);
                limit.min(left.max(SLOW_CLIENT_END_LIMIT))
            }
            None if self.is_used_up(self.held_bytes()) => limit.min(SLOW_CLIENT_CROWDED_LIMIT),
            None => limit,
        }
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
    ///
    /// # Errors
    /// It is more than before, and more than may be held.
    pub(crate) fn become_written(&mut self, bytes: usize) -> Result<(), TooMuch> {
        if bytes > self.bytes {
            return self.grow(bytes - self.bytes);
        }
        self.output.release(self.bytes - bytes);
        self.bytes = bytes;
        Ok(())
    }
}

impl Drop for Collected {
    fn drop(&mut self) {
        self.output.release(self.bytes);
    }
}

/// Bytes of memory that an event has beside itself.
pub(crate) fn allocated_by(event: &GenerationEvent) -> usize {
    match event {
        GenerationEvent::Text { text, logprobs, .. } => {
            allocated(text.capacity())
                + allocated(logprobs.capacity() * size_of::<TokenLogprob>())
                + allocated_by_tokens(logprobs)
        }
        GenerationEvent::Echo { text, tokens } => {
            allocated(text.capacity())
                + allocated(tokens.capacity() * size_of::<PromptToken>())
                + allocated_by_prompt_tokens(tokens)
        }
        GenerationEvent::Reasoning { text, .. } => allocated(text.capacity()),
        GenerationEvent::ToolCall { delta, .. } => match delta {
            ToolCallDelta::Begun { id, name } => allocated(id.capacity()) + allocated(name.capacity()),
            ToolCallDelta::Arguments(text) => allocated(text.capacity()),
            ToolCallDelta::Ended => 0,
        },
        GenerationEvent::Prompt(shown) => allocated_by_prompt(shown),
        GenerationEvent::Failed(error) => allocated(error.to_string().len()),
        GenerationEvent::Finished { stop, .. } => {
            allocated(stop.as_ref().and_then(StopCause::text).map_or(0, str::len))
        }
        GenerationEvent::Started { .. } => 0,
    }
}

fn allocated_by_prompt(shown: &ShownPrompt) -> usize {
    match shown {
        ShownPrompt::Text(text) => allocated(text.capacity()),
        ShownPrompt::Tokens(tokens) => allocated(tokens.capacity() * size_of::<i32>()),
        ShownPrompt::Pieces(pieces) => {
            let bytes: usize = pieces.iter().map(|piece| allocated(piece.bytes.capacity())).sum();
            allocated(pieces.capacity() * size_of::<TokenPiece>()) + bytes
        }
        ShownPrompt::Count(_) => 0,
    }
}

/// What a prompt takes that is told, with what is written of it.
pub(crate) fn told_of(shown: &ShownPrompt) -> usize {
    allocated_by_prompt(shown)
        + match shown {
            ShownPrompt::Text(text) => text.bytes().map(written).sum(),
            ShownPrompt::Tokens(tokens) => tokens.len() * TOLD_TOKEN_BYTES,
            ShownPrompt::Pieces(pieces) => {
                // Bytes that are no characters are told as numbers.
                pieces.iter().map(|piece| TOLD_PIECE_BYTES + 6 * piece.bytes.len()).sum()
            }
            ShownPrompt::Count(_) => TOLD_TOKEN_BYTES,
        }
}

/// What a piece of an answer takes once it is put to the others, of whose memory up to half is empty, or once it is written,
/// whichever is more.
pub(crate) fn collected_of(event: &GenerationEvent) -> usize {
    match event {
        GenerationEvent::Text { text, logprobs, .. } => {
            collected_of_text(text) + 2 * size_of_val(logprobs.as_slice()) + allocated_by_tokens(logprobs)
        }
        GenerationEvent::Echo { text, tokens } => {
            collected_of_text(text) + 2 * size_of_val(tokens.as_slice()) + allocated_by_prompt_tokens(tokens)
        }
        GenerationEvent::Reasoning { text, .. } => collected_of_text(text),
        GenerationEvent::ToolCall { delta, .. } => match delta {
            ToolCallDelta::Begun { id, name } => TOLD_CALL_BYTES + collected_of_text(id) + collected_of_text(name),
            ToolCallDelta::Arguments(text) => collected_of_text(text),
            ToolCallDelta::Ended => 0,
        },
        _ => 0,
    }
}

fn collected_of_text(text: &str) -> usize {
    (2 * text.len()).max(text.bytes().map(written).sum())
}

/// Bytes that a byte takes in a JSON string.
fn written(byte: u8) -> usize {
    match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 0x08 | 0x0c => 2,
        0..0x20 => 6,
        _ => 1,
    }
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

/// The same of a prompt's.
fn allocated_by_prompt_tokens(tokens: &[PromptToken]) -> usize {
    let of_chance = |chance: &PromptChance| {
        let top: usize = chance.top.iter().map(|chance| allocated(chance.bytes.capacity())).sum();
        allocated(chance.top.capacity() * size_of::<TokenChance>()) + top
    };
    let of_token =
        |token: &PromptToken| allocated(token.token.bytes.capacity()) + token.chance.as_ref().map_or(0, of_chance);
    tokens.iter().map(of_token).sum()
}

/// What the C library takes for a block of so many bytes: a header of 8, in steps of 16, and 32 at the least.
fn allocated(bytes: usize) -> usize {
    if bytes == 0 { 0 } else { (bytes + 8).next_multiple_of(16).max(32) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::limits::{OUTPUT_BUDGET_BYTES, WHOLE_ANSWER_BYTES};
    use gantry_core::{MAX_PROMPT_LOGPROBS, MAX_SHOWN_TEXT_BYTES, MAX_TOP_LOGPROBS};
    use gantry_openai::{MAX_TOKENIZE_BYTES, MAX_TOKENIZE_PIECES_BYTES};
    use proptest::prelude::*;

    /// What is refused for its size is refused by the worker, with the field that it came by.
    #[test]
    fn the_largest_that_a_prompt_may_be_told_is_an_answer_that_may_be_whole() {
        let ids = vec![i32::MAX; MAX_TOKENIZE_BYTES + 16];
        let pieces = vec![TokenPiece { id: 1, bytes: vec![0xff; 1] }; MAX_TOKENIZE_PIECES_BYTES + 16];
        for top in [0, 1, MAX_TOP_LOGPROBS] {
            let chance = TokenChance { id: 1, bytes: vec![b'x'; 8], logprob: -1.0 };
            let top = vec![chance; top as usize];
            let chance = Some(PromptChance { logprob: -1.0, rank: 1, top: top.clone() });
            let token = PromptToken { token: TokenPiece { id: 1, bytes: vec![b'x'; 8] }, chance };
            let tokens = vec![token; MAX_PROMPT_LOGPROBS / (2 + top.len())];
            assert!(collected_of(&GenerationEvent::Echo { text: String::new(), tokens }) <= WHOLE_ANSWER_BYTES);
        }
        for shown in [
            ShownPrompt::Text("\u{1}".repeat(MAX_SHOWN_TEXT_BYTES)),
            ShownPrompt::Tokens(ids),
            ShownPrompt::Pieces(pieces),
        ] {
            assert!(told_of(&shown) <= WHOLE_ANSWER_BYTES, "{}", told_of(&shown));
        }
    }

    #[test]
    fn what_an_event_holds_is_counted_with_all_that_is_in_it() {
        let chance = || TokenChance { id: 1, bytes: vec![b'x'; 3], logprob: -1.0 };
        let delta = |top: usize, tokens: usize| GenerationEvent::Text {
            text: "x".repeat(100),
            tokens: 1,
            logprobs: (0..tokens)
                .map(|_| TokenLogprob { token: chance(), top: (0..top).map(|_| chance()).collect() })
                .collect(),
        };
        assert_eq!(allocated_by(&GenerationEvent::Started { prompt_tokens: 1, files_left_out: 0 }), 0);
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
        let capped = full + OUTPUT_RESERVE_BYTES;
        assert_eq!(pressure(OUTPUT_FLOOR_BYTES, capped, false), Pressure::None);
        assert_eq!(pressure(1, capped + 1, false), Pressure::Pause);
        assert!(!may_resume(1, capped + 1));
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
        drop(others);
        assert_eq!(one.become_written(1000), Ok(()));
        assert_eq!((one.bytes(), output.held_bytes()), (1000, 1000));
        assert_eq!(one.become_written(WHOLE_ANSWER_BYTES + 1), Err(TooMuch::Own), "it took more than was thought");
        assert_eq!(one.become_written(1000), Ok(()));
        assert_eq!(output.held_bytes(), 1000);
        drop(one);
        assert_eq!(output.held_bytes(), 0);
    }

    /// A budget that forty answers use up, with half of it as the reserve.
    const SMALL_BYTES: usize = 256 << 10;
    /// What comes at once, at the most.
    const PIECE_BYTES: usize = 6 << 10;

    #[test]
    fn what_is_collected_is_counted_as_what_is_written_of_it() {
        let texts = ["plain", "\u{1}\u{2}\u{1b}", "\"\\\n\r\t\u{8}\u{c}\u{7f}", "\u{1f}é\u{2028}😀"];
        for text in texts {
            let written_bytes = serde_json::to_string(text).unwrap().len() - 2;
            assert_eq!(text.bytes().map(written).sum::<usize>(), written_bytes, "{text:?}");
            assert!(collected_of_text(text) >= written_bytes.max(2 * text.len()));
        }
        assert_eq!(collected_of_text(&"\u{1}".repeat(1000)), 6000);
    }

    /// What is left of an answer, of which one look remains.
    struct Left(AtomicUsize);

    impl Leftover for Left {
        fn is_over(&self, _now: Instant, limit: Duration) -> bool {
            assert_eq!(limit, SLOW_CLIENT_LIMIT);
            self.0.fetch_add(1, Ordering::Relaxed) == 1
        }
    }

    #[test]
    fn what_answers_left_is_looked_at_until_nothing_of_it_is_there() {
        let output = Output::new(OUTPUT_BUDGET_BYTES);
        let (kept, gone) = (Arc::new(Left(AtomicUsize::new(0))), Arc::new(Left(AtomicUsize::new(0))));
        for left in [&kept, &gone] {
            let left: Weak<Left> = Arc::downgrade(left);
            output.leave(left);
        }
        drop(gone);
        for (looks, left) in [(1, 1), (2, 0), (2, 0)] {
            output.sweep(Instant::now());
            assert_eq!((kept.0.load(Ordering::Relaxed), output.leftovers().len()), (looks, left));
        }
    }

    #[test]
    fn nobody_is_waited_for_as_long_once_the_reserve_is_used_up() {
        let output = Output::new(OUTPUT_BUDGET_BYTES);
        output.hold(OUTPUT_BUDGET_BYTES + OUTPUT_RESERVE_BYTES);
        let now = Instant::now();
        assert_eq!(output.patience(SLOW_CLIENT_LIMIT, now), SLOW_CLIENT_LIMIT);
        output.hold(1);
        assert_eq!(output.patience(SLOW_CLIENT_LIMIT, now), SLOW_CLIENT_CROWDED_LIMIT);
    }

    #[test]
    fn at_the_end_of_the_server_all_have_one_time_together_and_who_comes_late_a_moment() {
        let output = Output::new(OUTPUT_BUDGET_BYTES);
        output.hurry();
        let since = *output.hurries_since.get().unwrap();
        let ends_at = |began: Instant| began + output.patience(SLOW_CLIENT_LIMIT, began) - since;
        let (at, seconds) = (|seconds| since + Duration::from_secs(seconds), Duration::from_secs);
        assert_eq!([ends_at(since), ends_at(at(3))], [SLOW_CLIENT_CROWDED_LIMIT; 2]);
        for late in [8, 10, 100] {
            assert_eq!(ends_at(at(late)), seconds(late) + SLOW_CLIENT_END_LIMIT);
        }
        // Who has taken too little for almost as long as is given anyway has no more than that.
        let long_ago = since.checked_sub(SLOW_CLIENT_LIMIT - seconds(1)).unwrap();
        assert_eq!(output.patience(SLOW_CLIENT_LIMIT, long_ago), SLOW_CLIENT_LIMIT);
        // Told again, nothing begins anew.
        output.hurry();
        assert_eq!(*output.hurries_since.get().unwrap(), since);
    }

    /// One of many answers, by the rules alone.
    #[derive(Clone, Default)]
    struct Answer {
        own_bytes: usize,
        is_paused: bool,
    }

    proptest! {
        /// Whatever is generated and taken in whatever order, an answer that is not over what it may hold goes on, all hold no
        /// more than the budget and the reserve and the last piece of each, be it that each that pauses is followed by another,
        /// and a client that takes all has its answer go on at once.
        #[test]
        fn what_waits_is_bounded_and_nobody_who_reads_starves(
            steps in proptest::collection::vec((0_usize..40, 1_usize..=PIECE_BYTES, any::<bool>()), 1..800)
        ) {
            let output = Output::with(SMALL_BYTES, SMALL_BYTES / 2);
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
                    let is_full = held_bytes > SMALL_BYTES + SMALL_BYTES / 2;
                    prop_assert!(is_full || answer.own_bytes > OUTPUT_FLOOR_BYTES || !answer.is_paused);
                    prop_assert!(!is_full || answer.is_paused);
                }
                let most = OUTPUT_PER_ANSWER_BYTES + PIECE_BYTES;
                prop_assert!(answers.iter().all(|answer| answer.own_bytes <= most));
                prop_assert!(held_bytes <= SMALL_BYTES + SMALL_BYTES / 2 + 40 * PIECE_BYTES);
            }
        }
    }
}

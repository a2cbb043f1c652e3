//! Guessing ahead from repetitions: what followed the last time that the sequence ended as it ends now.
//!
//! Flow for a sequence: [`Indexer::index`] where its prompt is tokenised, or [`NgramIndex::of_prompt`] when it gets a slot →
//! [`NgramIndex::push`] each token of the answer → before a step, [`NgramIndex::propose`] a continuation →
//! [`Acceptance::drafts`] says how much of it is worth its place in the step → after the step, [`Acceptance::observe`] how
//! much of it was right. Drafts are checked by the model in the same step, so they change nothing but the rounding of its
//! rows: see "Determinism" in [`crate::sampler`].
//!
//! Absent: the check, and the draft model ([`crate::draft`]), for which an [`Acceptance`] of its own decides.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::backend::Token;
use crate::budget::{StepCost, StepWork};

/// Ends of a sequence that are looked up, the longest first: a longer one that came before says more.
const NGRAM_SIZES: [usize; 3] = [4, 3, 2];
/// Places in the index of a short sequence.
const MIN_SLOTS: usize = 256;
/// Places in the index of any sequence, 4 bytes each: past it, old n-grams are forgotten as new ones take their place.
const MAX_SLOTS: usize = 1 << 18;
/// An index has at least so many places for each token, until it has [`MAX_SLOTS`].
const SLOTS_PER_TOKEN: usize = 2 * NGRAM_SIZES.len();
/// No n-gram is here; positions start at 2, the first that something of n tokens comes before.
const EMPTY: u32 = 0;

/// Tokens of prompts that wait with their index made, which takes up to 52 bytes for each. An index for which there is no
/// room is made when its prompt gets a slot, by the engine's thread.
const MAX_WAITING_TOKENS: usize = 1 << 20;

/// Makes the indices of prompts that wait, as many as there is room for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Indexer {
    waiting: Arc<AtomicUsize>,
}

/// What a prompt that waits says of the guesses at its answer.
#[derive(Debug)]
pub(crate) struct Repeats {
    pub(crate) index: NgramIndex,
    pub(crate) acceptance: Acceptance,
    _room: Room,
}

/// Given back when dropped.
#[derive(Debug)]
struct Room {
    waiting: Arc<AtomicUsize>,
    tokens: usize,
}

impl Indexer {
    /// The index of a prompt, if there is room for it.
    pub(crate) fn index(&self, tokens: &[Token]) -> Option<Repeats> {
        let more = |n| Some(n + tokens.len()).filter(|&n| n <= MAX_WAITING_TOKENS);
        self.waiting.fetch_update(Relaxed, Relaxed, more).ok()?;
        let room = Room { waiting: self.waiting.clone(), tokens: tokens.len() };
        let (index, acceptance) = NgramIndex::of_prompt(tokens);
        Some(Repeats { index, acceptance, _room: room })
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.waiting.fetch_sub(self.tokens, Relaxed);
    }
}

/// Where the n-grams of a sequence last occurred. Each token costs a few table writes; memory is 4 bytes a token and at
/// most 1 MiB more.
#[derive(Clone, Debug)]
pub(crate) struct NgramIndex {
    tokens: Vec<Token>,
    /// By hash of an n-gram: the position after its latest occurrence that something follows. A place that two n-grams
    /// share holds the later one, which costs a guess and never a wrong one: the tokens are compared.
    slots: Vec<u32>,
}

impl NgramIndex {
    pub(crate) fn new(tokens: &[Token]) -> Self {
        let mut index = Self { tokens: Vec::with_capacity(tokens.len()), slots: vec![EMPTY; MIN_SLOTS] };
        index.extend(tokens);
        index
    }

    /// The index of a prompt, and what is to be expected of it: as much as it would have been right about the prompt itself,
    /// but no less than without a prompt. One that does not repeat itself may well be quoted.
    pub(crate) fn of_prompt(tokens: &[Token]) -> (Self, Acceptance) {
        let mut index = Self::new(&[]);
        let (mut right, mut wrong) = PRIOR;
        for &token in tokens {
            match index.next() {
                Some(guess) if guess == token => right += 1.0,
                Some(_) => wrong += 1.0,
                None => {}
            }
            index.push(token);
        }
        let weight = PRIOR.0 + PRIOR.1;
        let chance = f64::max(right / (right + wrong), PRIOR.0 / weight);
        (index, Acceptance { right: weight * chance, wrong: weight * (1.0 - chance), ..Acceptance::default() })
    }

    pub(crate) fn extend(&mut self, tokens: &[Token]) {
        for &token in tokens {
            self.push(token);
        }
    }

    pub(crate) fn push(&mut self, token: Token) {
        // Only now does something follow what the sequence ended with.
        self.enter(self.tokens.len());
        self.tokens.push(token);
        if self.tokens.len() * SLOTS_PER_TOKEN > self.slots.len() && self.slots.len() < MAX_SLOTS {
            self.slots = vec![EMPTY; self.slots.len() * 2];
            for end in 0..self.tokens.len() {
                self.enter(end);
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Up to `max` tokens that may come next: those after the latest earlier occurrence of the sequence's end. Past the
    /// sequence's own end it goes on with what it proposed, so that a short period is continued too.
    pub(crate) fn propose(&self, max: usize) -> Vec<Token> {
        let end = self.tokens.len();
        let Some(from) = self.position() else { return Vec::new() };
        let mut proposed: Vec<Token> = Vec::with_capacity(max);
        for at in from..from + max {
            let next = self.tokens.get(at).or_else(|| proposed.get(at - end)).copied();
            proposed.extend(next);
        }
        proposed
    }

    /// The first of them.
    fn next(&self) -> Option<Token> {
        self.tokens.get(self.position()?).copied()
    }

    /// Where what may come next begins.
    fn position(&self) -> Option<usize> {
        NGRAM_SIZES.into_iter().find_map(|n| self.find(n, self.tokens.len()))
    }

    /// The position after the latest earlier occurrence of the `n` tokens before `end`.
    fn find(&self, n: usize, end: usize) -> Option<usize> {
        let suffix = self.tokens.get(end.checked_sub(n)?..end)?;
        let at = self.slots[self.slot(suffix)] as usize;
        (at >= n && self.tokens[at - n..at] == *suffix).then_some(at)
    }

    /// Enters the n-grams that end before `end`.
    fn enter(&mut self, end: usize) {
        let Ok(position) = u32::try_from(end) else { return };
        for n in NGRAM_SIZES {
            if let Some(ngram) = end.checked_sub(n).and_then(|start| self.tokens.get(start..end)) {
                let slot = self.slot(ngram);
                self.slots[slot] = position;
            }
        }
    }

    fn slot(&self, ngram: &[Token]) -> usize {
        // FNV-1a over whole tokens, then a fold of the high bits, which are the mixed ones.
        let hash = ngram.iter().fold(0xcbf2_9ce4_8422_2325_u64 ^ ngram.len() as u64, |hash, &token| {
            (hash ^ u64::from(token.cast_unsigned())).wrapping_mul(0x0000_0100_0000_01b3)
        });
        // The number of slots is a power of two below 2^32.
        ((hash ^ hash >> 32) as usize) & (self.slots.len() - 1)
    }
}

/// Steps without drafts, although there were some to try, before a try. Each try in vain doubles them.
const FIRST_PROBE_AFTER: u32 = 32;
/// The most steps between tries.
const LAST_PROBE_AFTER: u32 = 512;
/// Tokens of a try.
const PROBE_TOKENS: u32 = 2;
/// A draft must promise so many times the tokens per time that the step gives without it: what is not in the cost model
/// (sampling more rows, taking back cells) has to be paid too.
const PAY_FACTOR: f64 = 1.05;
/// What one result keeps of the weight of those before it.
const MEMORY: f64 = 0.9;
/// What is assumed before anything is known: so many drafts right and so many wrong.
const PRIOR: (f64, f64) = (1.0, 1.0);

/// What drafts cost besides their rows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct DraftCost {
    /// What it takes to propose one: nothing for a look-up, a step of the draft model for that.
    pub(crate) each_ms: f64,
    /// What the first of a sequence brings along: a pass over the weights, where it is computed apart from others' rows.
    pub(crate) first_ms: f64,
}

/// How often the drafts of one sequence are right, and how many are worth making.
#[derive(Clone, Debug)]
pub(crate) struct Acceptance {
    right: f64,
    wrong: f64,
    idle_steps: u32,
    probe_after: u32,
    probing: bool,
}

impl Default for Acceptance {
    fn default() -> Self {
        Self { right: PRIOR.0, wrong: PRIOR.1, idle_steps: 0, probe_after: FIRST_PROBE_AFTER, probing: false }
    }
}

impl Acceptance {
    /// How many of `available` proposed tokens to draft in a step with so many decoding rows: as many as give the step
    /// the most tokens per time, none when that is without. Call it once for each step that has a proposal.
    pub(crate) fn drafts(&mut self, available: u32, decode_rows: u32, cost: StepCost, own: DraftCost) -> u32 {
        self.probing = false;
        if available == 0 {
            return 0;
        }
        let worth = |chance: f64| worthwhile(available, decode_rows, cost, own, chance);
        let drafts = worth(self.chance());
        if drafts > 0 {
            self.idle_steps = 0;
            return drafts;
        }
        self.idle_steps = self.idle_steps.saturating_add(1);
        // Where even drafts that are always right do not pay, there is nothing to find out but what a draft takes.
        let hopeless = worth(1.0) == 0 && (own.each_ms == 0.0 || self.idle_steps < LAST_PROBE_AFTER);
        if self.idle_steps < self.probe_after || hopeless {
            return 0;
        }
        self.idle_steps = 0;
        self.probing = true;
        available.min(PROBE_TOKENS)
    }

    /// Nothing came of what [`Self::drafts`] said: a try is made again in the next step.
    pub(crate) fn put_off(&mut self) {
        if std::mem::take(&mut self.probing) {
            self.idle_steps = self.probe_after;
        }
    }

    /// Of so many tokens drafted, the first `accepted` were right. Those after the first wrong one say nothing.
    pub(crate) fn observe(&mut self, drafted: u32, accepted: u32) {
        if drafted == 0 {
            return;
        }
        let accepted = accepted.min(drafted);
        if self.probing && accepted == drafted {
            // The text has changed: what was measured before is not of this part.
            *self = Self::default();
        } else if self.probing {
            self.probe_after = self.probe_after.saturating_mul(2).min(LAST_PROBE_AFTER);
        } else {
            self.probe_after = FIRST_PROBE_AFTER;
        }
        self.probing = false;
        self.right = self.right * MEMORY + f64::from(accepted);
        self.wrong = self.wrong * MEMORY + f64::from(u32::from(accepted < drafted));
    }

    /// The chance that a drafted token is right when those before it are.
    pub(crate) fn chance(&self) -> f64 {
        self.right / (self.right + self.wrong).max(f64::MIN_POSITIVE)
    }
}

/// The number of drafts with the most tokens per time, if that is enough more than without.
fn worthwhile(available: u32, decode_rows: u32, cost: StepCost, own: DraftCost, chance: f64) -> u32 {
    let rows = decode_rows.max(1);
    let (without, without_ms) = (f64::from(rows), cost.step_ms(StepWork::rows(rows)));
    let (mut tokens, mut ms) = (without, without_ms + own.first_ms);
    let mut reached = 1.0;
    let mut drafts = 0;
    while drafts < available {
        reached *= chance;
        // The next one is right so often, and takes so long: it must beat what the step gives up to here.
        let next_ms = cost.per_decode_row_ms + own.each_ms;
        if reached * ms < PAY_FACTOR * tokens * next_ms {
            break;
        }
        tokens += reached;
        ms += next_ms;
        drafts += 1;
    }
    // All of them must pay for what the first brings along.
    let pays = own.first_ms == 0.0 || tokens * without_ms >= PAY_FACTOR * without * ms;
    if pays { drafts } else { 0 }
}

#[cfg(test)]
#[path = "lookup_tests.rs"]
mod tests;

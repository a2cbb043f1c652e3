//! Guessing ahead with a small model of the same tokens, where a text does not repeat itself.
//!
//! Flow of a step: the scheduler decides how many tokens each sequence wants guessed ([`Ask`]) → [`Draft::propose`] has
//! the small model read what it lacks of each sequence, all in one batch, and then say the likeliest token after it,
//! one batch for each further token → the model itself checks them in its own step. So guesses never change what is
//! generated, and nothing that happens to a sequence (a wrong guess, a cancel, a slot that is lost and found again) has
//! to be told here: before each step what the small model holds is compared with what the sequence is, and cut to what
//! they have in common.
//!
//! A sequence that it has not read is read in parts of at most [`MAX_DRAFT_CATCH_UP_TOKENS`] a step, those that lack least
//! first, and nothing is guessed for it until then. A model that fails is given up; requests go on without.
//!
//! Absent: whether guessing pays ([`crate::lookup::Acceptance`]), sampling from the small model (it is always greedy).

use std::cmp::Reverse;
use std::time::{Duration, Instant};

use crate::backend::{Backend, BackendError, BackendLimits, BatchEntry, Token};
use crate::budget::{StepBudget, StepWork, kilocells};
use crate::finite::{NOT_FINITE, NoNumbers, is_lost, is_sound};
use crate::kv::common;
use crate::params::MAX_DRAFT_CATCH_UP_TOKENS;
use crate::sampler::argmax;

/// A sequence that wants tokens guessed.
pub(crate) struct Ask<'a> {
    /// Names the sequence.
    pub(crate) ticket: u64,
    /// Prompt and answer.
    pub(crate) tokens: &'a [Token],
    /// How many; at least one, and no more than [`Draft::room`] says.
    pub(crate) wanted: u32,
}

/// A sequence of the small model.
#[derive(Default)]
struct Seat {
    /// The ticket of the sequence that had it last.
    owner: Option<u64>,
    tokens: Vec<Token>,
}

/// What one ask gets in one step.
struct Run {
    ask: usize,
    seat: usize,
    /// Tokens of the ask that its seat holds.
    held: usize,
    /// And how many it reads now.
    reads: usize,
}

/// The small model, and what it has read.
pub(crate) struct Draft<B> {
    backend: B,
    limits: BackendLimits,
    /// Both models name the tokens below this, and name them alike.
    shared_vocab: u32,
    max_tokens: u32,
    /// By sequence id, as many as sequences may generate at once.
    seats: Vec<Seat>,
    budget: StepBudget,
    batch: Vec<BatchEntry>,
    spent: Duration,
}

impl<B: Backend> Draft<B> {
    /// Takes a backend that can cut its sequences, with one for each that may generate at once, of which a batch holds
    /// a token each beside [`MAX_DRAFT_CATCH_UP_TOKENS`].
    pub(crate) fn new(backend: B, shared_vocab: u32, max_tokens: u32) -> Self {
        let limits = backend.limits();
        Self {
            backend,
            limits,
            shared_vocab,
            max_tokens,
            seats: (0..limits.sequences).map(|_| Seat::default()).collect(),
            budget: StepBudget::new(None, MAX_DRAFT_CATCH_UP_TOKENS),
            batch: Vec::new(),
            spent: Duration::ZERO,
        }
    }

    /// See [`Backend::untouched_bytes`].
    pub(crate) fn untouched_bytes(&self) -> u64 {
        self.backend.untouched_bytes()
    }

    /// Tokens that may be guessed at a time after so many.
    pub(crate) fn room(&self, len: u32) -> u32 {
        self.max_tokens.min(self.limits.positions.saturating_sub(len))
    }

    /// What a guessed token takes where so many sequences want one, in ms.
    pub(crate) fn token_ms(&self, sequences: u32) -> f64 {
        self.budget.cost().step_ms(StepWork::rows(sequences)) / f64::from(sequences.max(1))
    }

    /// The time that it took since this was last asked.
    pub(crate) fn take_spent(&mut self) -> Duration {
        std::mem::take(&mut self.spent)
    }

    /// Reads so many tokens of nobody's, or as many as it has room for, and learns what they cost. Only when there is no work:
    /// what the first seat holds is gone then.
    pub(crate) fn measure(&mut self, tokens: u32) -> Result<(), NoNumbers> {
        let tokens = tokens.min(self.limits.positions).min(self.limits.batch_tokens);
        self.clear(0);
        self.batch.clear();
        let entry = |position| BatchEntry { token: 0, position, sequence: 0, output: position + 1 == tokens };
        self.batch.extend((0..tokens).map(entry));
        let decoded = self.decode(1, tokens.saturating_sub(1)).map_err(|error| NoNumbers::Failed(reason(error)));
        let row = self.batch.len().saturating_sub(1);
        let sound = decoded.map(|()| self.backend.logits(row).is_some_and(is_sound));
        self.clear(0);
        if sound? { Ok(()) } else { Err(NoNumbers::NotFinite) }
    }

    /// Guesses for each ask, in their order: as many tokens as it wants, or fewer. `active` are the tickets of all
    /// sequences that run.
    ///
    /// # Errors
    /// The small model failed; it cannot be used any more.
    pub(crate) fn propose(&mut self, asks: &[Ask<'_>], active: &[u64]) -> Result<Vec<Vec<Token>>, BackendError> {
        let mut guesses: Vec<Vec<Token>> = asks.iter().map(|_| Vec::new()).collect();
        let mut runs = self.plan(asks, active);
        if runs.is_empty() {
            return Ok(guesses);
        }
        self.batch.clear();
        let mut rows = Vec::new();
        let mut reads = 0;
        for run in &runs {
            let tokens = asks[run.ask].tokens;
            for at in run.held..run.held + run.reads {
                let output = at + 1 == tokens.len();
                if output {
                    rows.push((run.ask, self.batch.len()));
                } else {
                    reads += 1;
                }
                self.batch.push(entry(tokens[at], at, run.seat, output));
            }
        }
        self.decode(u32::try_from(rows.len()).unwrap_or(u32::MAX), reads)?;
        self.guess(&rows, &mut guesses)?;
        loop {
            // Those go on whose last guess is one, and that want more.
            runs.retain(|run| {
                let (ask, guessed) = (&asks[run.ask], &guesses[run.ask]);
                let is_done = run.held + run.reads < ask.tokens.len() || guessed.len() >= ask.wanted as usize;
                // Where the last batch gave no token, nothing was added to what the seat has read.
                !is_done && ask.tokens.len() + guessed.len() > self.seats[run.seat].tokens.len()
            });
            if runs.is_empty() {
                return Ok(guesses);
            }
            self.batch.clear();
            rows.clear();
            for run in &runs {
                let (ask, guessed) = (&asks[run.ask], &guesses[run.ask]);
                if let Some(&last) = guessed.last() {
                    rows.push((run.ask, self.batch.len()));
                    self.batch.push(entry(last, ask.tokens.len() + guessed.len() - 1, run.seat, true));
                }
            }
            self.decode(u32::try_from(rows.len()).unwrap_or(u32::MAX), 0)?;
            self.guess(&rows, &mut guesses)?;
        }
    }

    /// Which asks get something in this step, in the order of their seats.
    fn plan(&mut self, asks: &[Ask<'_>], active: &[u64]) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for (at, ask) in asks.iter().enumerate() {
            if ask.tokens.is_empty() || !ask.tokens.iter().all(|&token| self.is_shared(token)) {
                continue;
            }
            let Some(seat) = self.seat(ask, active) else { continue };
            let held = self.cut(seat, ask.tokens);
            runs.push(Run { ask: at, seat, held, reads: ask.tokens.len() - held });
        }
        runs.sort_by_key(|run| run.reads);
        let mut left = MAX_DRAFT_CATCH_UP_TOKENS as usize;
        for run in &mut runs {
            run.reads = run.reads.min(left);
            left -= run.reads;
        }
        runs.retain(|run| run.reads > 0);
        runs.sort_by_key(|run| run.seat);
        runs
    }

    /// The seat of a sequence: its own, or of those that nobody needs the one that holds most of it.
    fn seat(&mut self, ask: &Ask<'_>, active: &[u64]) -> Option<usize> {
        let own = self.seats.iter().position(|seat| seat.owner == Some(ask.ticket));
        let is_free = |seat: &Seat| seat.owner.is_none_or(|owner| !active.contains(&owner));
        let free = self.seats.iter().enumerate().filter(|(_, seat)| is_free(seat));
        let best = free.max_by_key(|(at, seat)| (common(&seat.tokens, ask.tokens), Reverse(*at))).map(|(at, _)| at);
        let seat = own.or(best)?;
        self.seats[seat].owner = Some(ask.ticket);
        Some(seat)
    }

    /// Cuts what a seat holds to what these tokens begin with, but for the last: it is read in any case, for the row
    /// after it. How much is left.
    fn cut(&mut self, seat: usize, tokens: &[Token]) -> usize {
        let agreed = common(&self.seats[seat].tokens, &tokens[..tokens.len() - 1]);
        if (agreed as usize) < self.seats[seat].tokens.len() {
            // A seat's index is its sequence id, below the u32 it came from.
            let sequence = u32::try_from(seat).unwrap_or(u32::MAX);
            if agreed == 0 || self.backend.truncate(sequence, agreed).is_err() {
                self.clear(sequence);
            }
            let held = &mut self.seats[seat].tokens;
            held.truncate(agreed as usize);
        }
        self.seats[seat].tokens.len()
    }

    fn clear(&mut self, sequence: u32) {
        self.backend.clear_sequence(sequence);
        if let Some(seat) = self.seats.get_mut(sequence as usize) {
            seat.tokens.clear();
        }
    }

    /// Decodes the batch and notes what the seats hold then.
    fn decode(&mut self, rows: u32, reads: u32) -> Result<(), BackendError> {
        let started = Instant::now();
        let decoded = self.backend.decode(&self.batch);
        let took = started.elapsed();
        self.spent += took;
        decoded?;
        let kilocells = self.batch.iter().map(|entry| kilocells(entry.position)).sum();
        self.budget
            .observe(StepWork { decode_rows: rows, prefill_tokens: reads, kilocells, ..StepWork::default() }, took);
        for entry in &self.batch {
            self.seats[entry.sequence as usize].tokens.push(entry.token);
        }
        Ok(())
    }

    /// Takes the likeliest token of each row, of those that both models have.
    fn guess(&mut self, rows: &[(usize, usize)], guesses: &mut [Vec<Token>]) -> Result<(), BackendError> {
        let shared = self.shared_vocab as usize;
        for &(ask, row) in rows {
            let Some(row) = self.backend.logits(row) else { continue };
            if is_lost(row) {
                // What it keeps is spoilt, for others as well.
                return Err(BackendError::Failed(String::from(NOT_FINITE)));
            }
            guesses[ask].extend(argmax(&row[..row.len().min(shared)]));
        }
        Ok(())
    }

    fn is_shared(&self, token: Token) -> bool {
        u32::try_from(token).is_ok_and(|token| token < self.shared_vocab)
    }
}

fn entry(token: Token, position: usize, seat: usize, output: bool) -> BatchEntry {
    // Both are below the limits of the backend, which are u32.
    let small = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    BatchEntry { token, position: small(position), sequence: small(seat), output }
}

/// Why the small model failed.
pub(crate) fn reason(error: BackendError) -> String {
    match error {
        BackendError::Failed(reason) => reason,
        BackendError::NoKvCells => String::from("its KV cache is full"),
    }
}

#[cfg(test)]
impl Draft<crate::backend::scripted::ScriptedBackend> {
    pub(crate) fn backend(&mut self) -> &mut crate::backend::scripted::ScriptedBackend {
        &mut self.backend
    }

    /// The books say what the backend holds.
    pub(crate) fn assert_books(&self) {
        for (sequence, seat) in (0..).zip(&self.seats) {
            assert_eq!(self.backend.tokens(sequence), seat.tokens, "sequence {sequence}");
        }
    }

    pub(crate) fn cost_is(&mut self, cost: crate::budget::StepCost) {
        self.budget.cost_is(cost);
    }
}

#[cfg(test)]
#[path = "draft_tests.rs"]
mod tests;

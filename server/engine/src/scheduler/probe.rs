//! Batches that no request asked for: the token that ends a load, and probes of a backend that has no work.

use std::time::{Duration, Instant};

use super::Scheduler;
use crate::backend::{Backend, BackendError, BatchEntry, Token};
use crate::error::ProbeError;
use crate::finite::{NoNumbers, WarmUpError, is_even, is_sound};
use crate::stats::StepRecord;

/// A step that ended within so much time shows that a token can be decoded now.
pub(crate) const PROBE_FRESH: Duration = Duration::from_secs(1);
/// The token decoded by a probe, by the warm-up, and where rows are filled up; every vocabulary has it, and its text is never looked at.
pub(super) const PROBE_TOKEN: Token = 0;
/// Tokens of a text that a load decodes, at the most: a chat of one word has as many with most templates.
const SAMPLE_TOKENS: usize = 32;
/// Tokens that are decoded where that one alone tells nothing.
const EVEN_PROBE_TOKENS: u32 = 8;

impl<B: Backend> Scheduler<B> {
    /// Decodes one token, the beginning of a prompt, and a token at the last position that there is: a model that cannot, or
    /// whose logits then are not finite or say nothing, is not handed out. What else is to be known of steps is measured
    /// when there is time ([`super::measure`]); until then the first token tells.
    pub(crate) fn warm_up(&mut self, text: &[Token]) -> Result<(), WarmUpError> {
        let started = Instant::now();
        self.decode_probe(1, 1)?;
        self.budget.guess(started.elapsed());
        self.look_for_meaning()?;
        self.look_at_positions(text)?;
        self.plan_measuring();
        self.draft.as_mut().map_or(Ok(()), |draft| draft.measure(1).map_err(WarmUpError::Draft))
    }

    /// Whether the logits after the token just decoded tell tokens apart. That one may be a vocabulary's padding, whose row of
    /// the embedding is zero in models that are well: then those after others, from all over the vocabulary, tell.
    fn look_for_meaning(&mut self) -> Result<(), NoNumbers> {
        let vocabulary = match self.kv.logits(0) {
            Some(row) if is_even(row) => row.len(),
            _ => return Ok(()),
        };
        let tokens = EVEN_PROBE_TOKENS.min(self.limits.positions).min(self.limits.batch_tokens);
        let token_at = |i: u32| Token::try_from(vocabulary * i as usize / tokens as usize).unwrap_or(PROBE_TOKEN);
        let Some(sequence) = self.empty_sequence(Instant::now()) else { return Ok(()) };
        self.decode_of(sequence, 0, tokens, 1, token_at)?;
        self.kv.clear(sequence);
        let last = tokens.saturating_sub(1) as usize;
        if self.kv.logits(last).is_some_and(is_even) { Err(NoNumbers::Even) } else { Ok(()) }
    }

    /// Whether there are numbers at other positions than the first, where nothing is rotated: what scales positions may
    /// leave those alone that come early.
    fn look_at_positions(&mut self, text: &[Token]) -> Result<(), NoNumbers> {
        let Some(sequence) = self.empty_sequence(Instant::now()) else { return Ok(()) };
        let most = SAMPLE_TOKENS.min(self.limits.positions as usize).min(self.limits.batch_tokens as usize);
        let text = &text[..text.len().min(most)];
        let last = self.limits.positions.saturating_sub(1);
        for (position, tokens) in [(0, text), (last, &[PROBE_TOKEN])] {
            let Ok(count @ 1..) = u32::try_from(tokens.len()) else { continue };
            self.decode_of(sequence, position, count, 1, |i| tokens.get(i as usize).copied().unwrap_or(PROBE_TOKEN))?;
            self.kv.clear(sequence);
        }
        Ok(())
    }

    /// Whether a step ended within the last [`PROBE_FRESH`].
    pub(crate) fn has_just_decoded(&self) -> bool {
        self.stats.broken.get().is_none() && self.stats.last_step_age().is_some_and(|age| age < PROBE_FRESH)
    }

    /// Decodes one token on a free sequence. Only when there is no work. As with batches, several failures in a row mean
    /// that the backend is broken.
    pub(crate) fn probe(&mut self) -> Result<(), ProbeError> {
        if let Some(reason) = self.stats.broken.get() {
            return Err(ProbeError::Broken(reason.clone()));
        }
        self.copies.begin();
        let started = Instant::now();
        self.stats.running.begin();
        let decoded = self.decode_probe(1, 1);
        self.stats.running.end();
        match decoded {
            Ok(()) => {
                self.consecutive_failures = 0;
                self.stats.step_done(&StepRecord {
                    decode: started.elapsed(),
                    batch_tokens: 1,
                    batch_rows: 1,
                    ..StepRecord::default()
                });
                Ok(())
            }
            Err(error) => {
                let reason = error.to_string();
                self.failed_once_more(&reason);
                Err(ProbeError::Broken(reason))
            }
        }
    }

    /// Decodes so many tokens, with logits for the last `rows` of them, which must be finite.
    pub(super) fn decode_probe(&mut self, tokens: u32, rows: u32) -> Result<(), NoNumbers> {
        let now = Instant::now();
        self.free_cells(tokens, now);
        let Some(sequence) = self.place_of_probe(tokens).or_else(|| self.empty_sequence(now)) else {
            return Err(NoNumbers::Failed(String::from("no sequence is free")));
        };
        let held = self.kv.len(sequence);
        self.decode_behind(sequence, tokens, rows)?;
        if held > 0 {
            self.kv.truncate(sequence, held);
        } else {
            self.kv.clear(sequence);
        }
        Ok(())
    }

    /// An empty sequence, or where there is none one to stand behind what is left over in it: that is of use again, and
    /// probes come every few seconds.
    pub(super) fn place_of_probe(&self, tokens: u32) -> Option<u32> {
        let has_room = |s: &u32| self.limits.reusable && self.kv.len(*s) + tokens <= self.limits.positions;
        self.kv.empty().or_else(|| self.kv.coldest().filter(has_room))
    }

    /// Decodes so many tokens behind what a sequence holds, with logits for the last `rows` of them. Where that
    /// fails it holds what it did, or nothing if that is unknown.
    pub(super) fn decode_behind(&mut self, sequence: u32, tokens: u32, rows: u32) -> Result<(), NoNumbers> {
        self.decode_of(sequence, self.kv.len(sequence), tokens, rows, |_| PROBE_TOKEN)
    }

    /// The same with tokens of the caller's, from a position on: that behind what the sequence holds, or any where it is
    /// empty.
    fn decode_of(
        &mut self,
        sequence: u32,
        position: u32,
        tokens: u32,
        rows: u32,
        token_at: impl Fn(u32) -> Token,
    ) -> Result<(), NoNumbers> {
        let held = self.kv.len(sequence);
        self.batch.clear();
        self.batch.extend((0..tokens).map(|i| BatchEntry {
            token: token_at(i),
            position: position + i,
            sequence,
            output: i + rows >= tokens,
        }));
        let decoded = self.kv.decode(&self.batch);
        let is_known = !matches!(decoded, Err(BackendError::Failed(_)));
        let done = match decoded {
            Ok(()) => self.look_at_rows(),
            Err(BackendError::NoKvCells) => {
                Err(NoNumbers::Failed(String::from("the KV cache is full although there should be room")))
            }
            Err(BackendError::Failed(reason)) => Err(NoNumbers::Failed(reason)),
        };
        match done {
            Ok(()) => {}
            Err(_) if held > 0 && is_known => _ = self.kv.truncate(sequence, held),
            Err(_) => self.kv.clear(sequence),
        }
        done
    }

    /// Whether the batch gave the rows that it asked for, and they are finite.
    fn look_at_rows(&mut self) -> Result<(), NoNumbers> {
        for row in self.batch.iter().enumerate().filter(|(_, entry)| entry.output).map(|(row, _)| row) {
            match self.kv.logits(row) {
                Some(logits) if is_sound(logits) => {}
                Some(_) => return Err(NoNumbers::NotFinite),
                None => return Err(NoNumbers::Failed(String::from("the backend gave no logits"))),
            }
        }
        Ok(())
    }
}

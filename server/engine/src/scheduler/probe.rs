//! Batches that no request asked for: the token that ends a load, and probes of a backend that has no work.

use std::time::{Duration, Instant};

use super::Scheduler;
use crate::backend::{Backend, BackendError, BatchEntry, Token};
use crate::error::ProbeError;
use crate::finite::{NoNumbers, WarmUpError, is_sound};
use crate::stats::StepRecord;

/// A step that ended within so much time shows that a token can be decoded now.
pub(crate) const PROBE_FRESH: Duration = Duration::from_secs(1);
/// The token decoded by a probe, by the warm-up, and where rows are filled up; every vocabulary has it, and its text is never looked at.
pub(super) const PROBE_TOKEN: Token = 0;

impl<B: Backend> Scheduler<B> {
    /// Decodes one token: a model that cannot, or whose logits then are not finite, is not handed out. What else is to be known of steps is measured when there is
    /// time ([`super::measure`]); until then this token tells.
    pub(crate) fn warm_up(&mut self) -> Result<(), WarmUpError> {
        let started = Instant::now();
        self.decode_probe(1, 1)?;
        self.budget.guess(started.elapsed());
        self.plan_measuring();
        self.draft.as_mut().map_or(Ok(()), |draft| draft.measure(1).map_err(WarmUpError::Draft))
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
        let held = self.kv.len(sequence);
        self.batch.clear();
        self.batch.extend((0..tokens).map(|i| BatchEntry {
            token: PROBE_TOKEN,
            position: held + i,
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

//! Batches that no request asked for: the warm-up, which tells what steps cost, and probes of a backend that has no work.

use std::time::{Duration, Instant};

use super::Scheduler;
use crate::backend::{Backend, BackendError, BatchEntry, Token};
use crate::budget::{CellSteps, StepWork, kilocells};
use crate::error::ProbeError;
use crate::stats::StepRecord;

/// A step that ended within so much time shows that a token can be decoded now.
pub(crate) const PROBE_FRESH: Duration = Duration::from_secs(1);
/// The token decoded by a probe, by the warm-up, and where rows are filled up; every vocabulary has it, and its text is never looked at.
pub(super) const PROBE_TOKEN: Token = 0;
/// Rows with logits of one of the batches of the warm-up: as many as tell a row's cost from a step's.
const WARM_UP_ROWS: u32 = 16;
/// Tokens that are read for that, in full batches: llama.cpp looks at 256 cells at least, so that fewer tell nothing.
const WARM_UP_DEPTH: u32 = 512;
/// Tokens of the batch that is decoded behind those and in their place, which tells what it costs to look at them.
const WARM_UP_BEHIND: u32 = 16;
/// How often such a small batch is decoded,
pub(super) const WARM_UP_TIMES: u32 = 3;
/// unless they have taken so long already.
const WARM_UP_TIME: Duration = Duration::from_millis(500);

impl<B: Backend> Scheduler<B> {
    /// Decodes one token and one full batch, so that the first request meets warm memory and compiled kernels, and then
    /// what tells the budget the costs of a step's parts.
    pub(crate) fn warm_up(&mut self) -> Result<(), String> {
        self.decode_probe(1, 1)?;
        let batch = self.limits.batch_tokens.min(self.limits.positions);
        let rows = WARM_UP_ROWS.min(self.limits.outputs).min(batch);
        let mut steps = Vec::new();
        let cells = self.batch_probes(batch, &mut steps)?;
        for tokens in [rows, 1] {
            let work = StepWork { decode_rows: tokens, kilocells: attended(0, tokens), ..StepWork::default() };
            steps.push((work, least_time(|| self.decode_probe(tokens, tokens))?));
        }
        self.budget.calibrate(&steps, cells);
        self.measure_groups()?;
        self.draft.as_mut().map_or(Ok(()), |draft| draft.warm_up().map_err(|e| format!("the draft model: {e}")))
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
        let started = Instant::now();
        match self.decode_probe(1, 1) {
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
            Err(reason) => {
                self.failed_once_more(&reason);
                Err(ProbeError::Broken(reason))
            }
        }
    }

    /// What a full batch takes, and where there is room a few tokens in its place, and behind it and more of them: they differ
    /// in nothing but the cells that they look at.
    fn batch_probes(&mut self, batch: u32, steps: &mut Vec<(StepWork, Duration)>) -> Result<Option<CellSteps>, String> {
        let reads = |tokens: u32| StepWork { decode_rows: 1, prefill_tokens: tokens - 1, ..StepWork::default() };
        let behind = WARM_UP_BEHIND.min(self.limits.positions - batch).min(batch);
        let batches = WARM_UP_DEPTH.min(self.limits.positions - behind).div_euclid(batch).max(1);
        let now = Instant::now();
        self.free_cells(batches * batch + behind, now);
        let sequence = self.empty_sequence(now).ok_or("no sequence is free")?;
        let started = Instant::now();
        self.decode_behind(sequence, batch, 1)?;
        // So many at once look at cells for next to nothing; few, as beside streams, do not.
        steps.push((reads(batch), started.elapsed()));
        let mut cells = None;
        let looks = self.part_looks();
        if behind > 0 && self.limits.reusable {
            for _ in 1..batches {
                self.decode_behind(sequence, batch, 1)?;
            }
            let mut few = |held: u32| {
                let took = least_time(|| {
                    self.kv.truncate(sequence, held);
                    self.decode_behind(sequence, behind, 1)
                })?;
                Ok::<_, String>((attended(held, behind) + looks * kilocells(held), took))
            };
            let (deep, near) = (few(batches * batch)?, few(0)?);
            steps.push((reads(behind), near.1));
            cells = Some(CellSteps { near, deep });
        }
        self.kv.clear(sequence);
        Ok(cells)
    }

    /// Decodes so many tokens, with logits for the last `rows` of them.
    pub(super) fn decode_probe(&mut self, tokens: u32, rows: u32) -> Result<(), String> {
        let now = Instant::now();
        self.free_cells(tokens, now);
        // Behind what is left over where no sequence is empty: it is of use again, and probes come every few seconds.
        let room = |s: &u32| self.limits.reusable && self.kv.len(*s) + tokens <= self.limits.positions;
        let behind = self.kv.coldest().filter(room).filter(|_| self.kv.empty().is_none());
        let Some(sequence) = behind.or_else(|| self.empty_sequence(now)) else {
            return Err(String::from("no sequence is free"));
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

    /// Decodes so many tokens behind what a sequence holds, with logits for the last `rows` of them. Where that
    /// fails it holds what it did, or nothing if that is unknown.
    fn decode_behind(&mut self, sequence: u32, tokens: u32, rows: u32) -> Result<(), String> {
        let held = self.kv.len(sequence);
        self.batch.clear();
        self.batch.extend((0..tokens).map(|i| BatchEntry {
            token: PROBE_TOKEN,
            position: held + i,
            sequence,
            output: i + rows >= tokens,
        }));
        let row = self.batch.len() - 1;
        let decoded = self.kv.decode(&self.batch);
        let is_known = !matches!(decoded, Err(BackendError::Failed(_)));
        let done = match decoded {
            Ok(()) if self.kv.logits(row).is_some() => Ok(()),
            Ok(()) => Err(String::from("the backend gave no logits")),
            Err(BackendError::NoKvCells) => Err(String::from("the KV cache is full although there should be room")),
            Err(BackendError::Failed(reason)) => Err(reason),
        };
        match done {
            Ok(()) => {}
            Err(_) if held > 0 && is_known => _ = self.kv.truncate(sequence, held),
            Err(_) => self.kv.clear(sequence),
        }
        done
    }
}

/// Cells that so many tokens look at behind `held` others, in thousands.
fn attended(held: u32, tokens: u32) -> f64 {
    (held..held + tokens).map(kilocells).sum()
}

/// What a probe takes, the shortest of some: who shares the machine makes it longer, and never shorter.
fn least_time(mut probe: impl FnMut() -> Result<(), String>) -> Result<Duration, String> {
    let began = Instant::now();
    let mut least = Duration::MAX;
    for time in 0..WARM_UP_TIMES {
        let started = Instant::now();
        if time > 0 && started - began > WARM_UP_TIME {
            break;
        }
        probe()?;
        least = least.min(started.elapsed());
    }
    Ok(least)
}

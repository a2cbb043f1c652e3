//! Continuous batching: which request holds which slot, and what each step decodes.
//!
//! Flow of a step: end what was cancelled → give free slots to the oldest waiting requests → plan (one token for each
//! sequence that generates, then prompts within the budget) → decode one batch → sample each row, end what is done.
//! One owner, no threads, no clock but for figures: tests run it step by step on a scripted backend.
//!
//! A batch that fails ends only the requests in it. Several in a row mean that the backend is broken: the scheduler then
//! fails everything, and its engine must be replaced. Absent: preemption, priorities, a prefix cache.

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use crate::backend::{Backend, BackendError, BackendLimits, BatchEntry, Token, Vocabulary};
use crate::error::{ProbeError, RequestError};
use crate::event::FinishReason;
use crate::plan::{Need, plan_step};
use crate::request::Request;
use crate::sequence::{Progress, Sequence};
use crate::stats::Stats;

/// Batches that may fail one after the other before the backend counts as broken.
const MAX_CONSECUTIVE_FAILURES: u32 = 3;
/// The token decoded by a probe and by the warm-up; every vocabulary has it, and its text is never looked at.
const PROBE_TOKEN: Token = 0;
/// The sequence that a probe uses: it runs only when every slot is free.
const PROBE_SEQUENCE: u32 = 0;

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepOutcome {
    /// There was nothing to decode.
    Idle,
    /// A batch was decoded.
    Decoded,
    /// A batch failed; its requests were ended.
    Failed,
}

/// A slot's part in the batch of this step.
struct Share {
    slot: usize,
    tokens: u32,
    /// The batch entry after which its logits are wanted.
    row: Option<usize>,
}

/// The owner of the backend and of every request that is past tokenising.
pub(crate) struct Scheduler<B> {
    backend: B,
    limits: BackendLimits,
    vocabulary: Arc<dyn Vocabulary>,
    stats: Arc<Stats>,
    prefill_tokens_per_step: u32,
    /// By sequence id. The lowest free one is taken: llama.cpp computes neighbouring sequences together.
    slots: Vec<Option<Sequence>>,
    /// By ticket. Bounded by the permits of submission.
    waiting: VecDeque<Request>,
    batch: Vec<BatchEntry>,
    consecutive_failures: u32,
}

impl<B: Backend> Scheduler<B> {
    pub(crate) fn new(
        backend: B,
        vocabulary: Arc<dyn Vocabulary>,
        stats: Arc<Stats>,
        prefill_tokens_per_step: u32,
    ) -> Self {
        let limits = backend.limits();
        Self {
            backend,
            limits,
            vocabulary,
            stats,
            prefill_tokens_per_step,
            slots: (0..limits.sequences).map(|_| None).collect(),
            waiting: VecDeque::new(),
            batch: Vec::new(),
            consecutive_failures: 0,
        }
    }

    /// Decodes one token and one full batch, so that the first request meets warm memory and compiled kernels.
    pub(crate) fn warm_up(&mut self) -> Result<(), String> {
        self.decode_probe(1)?;
        self.decode_probe(self.limits.batch_tokens.min(self.limits.positions))
    }

    /// Decodes one token on a free sequence. Only when there is no work. As with batches, several failures in a row mean
    /// that the backend is broken.
    pub(crate) fn probe(&mut self) -> Result<(), ProbeError> {
        if let Some(reason) = self.stats.broken.get() {
            return Err(ProbeError::Broken(reason.clone()));
        }
        let started = Instant::now();
        match self.decode_probe(1) {
            Ok(()) => {
                self.consecutive_failures = 0;
                self.stats.step_done(started.elapsed(), 0, 0);
                Ok(())
            }
            Err(reason) => {
                self.failed_once_more(&reason);
                Err(ProbeError::Broken(reason))
            }
        }
    }

    fn decode_probe(&mut self, tokens: u32) -> Result<(), String> {
        self.batch.clear();
        self.batch.extend((0..tokens).map(|position| BatchEntry {
            token: PROBE_TOKEN,
            position,
            sequence: PROBE_SEQUENCE,
            output: position + 1 == tokens,
        }));
        let decoded = self.backend.decode(&self.batch);
        let row = self.batch.len() - 1;
        let verdict = match decoded {
            Ok(()) if self.backend.logits(row).is_some() => Ok(()),
            Ok(()) => Err(String::from("the backend gave no logits")),
            Err(BackendError::NoKvCells) => Err(String::from("the KV cache is full although no request uses it")),
            Err(BackendError::Failed(reason)) => Err(reason),
        };
        self.backend.clear_sequence(PROBE_SEQUENCE);
        verdict
    }

    /// Takes a request; it waits by its ticket, whichever order tokenising finished in.
    pub(crate) fn enqueue(&mut self, request: Request) {
        if let Some(reason) = self.stats.broken.get() {
            fail_request(request, RequestError::Internal(reason.clone()));
            return;
        }
        let at = self.waiting.partition_point(|other| other.ticket < request.ticket);
        self.waiting.insert(at, request);
    }

    pub(crate) fn has_work(&self) -> bool {
        !self.waiting.is_empty() || self.slots.iter().any(Option::is_some)
    }

    pub(crate) fn shutting_down(&self) -> bool {
        self.stats.shutting_down.load(Relaxed)
    }

    /// One step, as the module describes it.
    pub(crate) fn step(&mut self) -> StepOutcome {
        let started = Instant::now();
        self.end_cancelled();
        self.admit();
        let shares = self.plan();
        if self.batch.is_empty() {
            return StepOutcome::Idle;
        }
        if let Err(e) = self.backend.decode(&self.batch) {
            self.decode_failed(e, &shares);
            return StepOutcome::Failed;
        }
        self.consecutive_failures = 0;
        let (mut prompt_tokens, mut generated) = (0, 0);
        for share in &shares {
            if let Some(sequence) = &mut self.slots[share.slot] {
                if matches!(sequence.need(), Need::Prefill { .. }) {
                    prompt_tokens += u64::from(share.tokens);
                }
                sequence.advance(share.tokens);
            }
        }
        self.publish();
        for share in &shares {
            if let Some(row) = share.row {
                generated += 1;
                self.accept_row(share.slot, row);
            }
        }
        self.stats.step_done(started.elapsed(), prompt_tokens, generated);
        StepOutcome::Decoded
    }

    /// Ends every request with this error, those that wait included.
    pub(crate) fn fail_all(&mut self, error: &RequestError) {
        for slot in 0..self.slots.len() {
            if let Some(sequence) = self.release(slot) {
                sequence.fail(error.clone());
            }
        }
        for request in std::mem::take(&mut self.waiting) {
            fail_request(request, error.clone());
        }
    }

    /// Declares the backend unusable and fails everything.
    pub(crate) fn break_down(&mut self, reason: String) {
        tracing::error!(reason, "the engine is broken; its worker must be replaced");
        self.fail_all(&RequestError::Internal(reason.clone()));
        // Only the first reason counts.
        let _ = self.stats.broken.set(reason);
    }

    fn end_cancelled(&mut self) {
        for slot in 0..self.slots.len() {
            if self.slots[slot].as_ref().is_some_and(Sequence::is_cancelled) {
                self.finish(slot, FinishReason::Cancelled);
            }
        }
        if self.waiting.iter().any(|request| request.emitter.is_cancelled()) {
            for request in std::mem::take(&mut self.waiting) {
                if request.emitter.is_cancelled() {
                    request.finish_cancelled();
                } else {
                    self.waiting.push_back(request);
                }
            }
        }
    }

    fn admit(&mut self) {
        for slot in &mut self.slots {
            if slot.is_none() {
                let Some(request) = self.waiting.pop_front() else { break };
                *slot = Some(Sequence::start(request, self.vocabulary.clone(), self.limits.positions));
            }
        }
        self.publish();
    }

    /// Fills the batch, in the order of the slots.
    fn plan(&mut self) -> Vec<Share> {
        let active: Vec<(usize, &Sequence)> =
            self.slots.iter().enumerate().filter_map(|(i, slot)| slot.as_ref().map(|s| (i, s))).collect();
        let needs: Vec<Need> = active.iter().map(|(_, sequence)| sequence.need()).collect();
        let grants = plan_step(&needs, self.limits.batch_tokens, self.prefill_tokens_per_step);
        self.batch.clear();
        let mut shares = Vec::with_capacity(active.len());
        for ((slot, sequence), tokens) in active.into_iter().zip(grants) {
            let mut row = None;
            for (token, position, output) in sequence.next_tokens(tokens) {
                if output {
                    row = Some(self.batch.len());
                }
                // A slot's index is its sequence id, below the u32 it came from.
                let sequence = u32::try_from(slot).unwrap_or(u32::MAX);
                self.batch.push(BatchEntry { token, position, sequence, output });
            }
            if tokens > 0 {
                shares.push(Share { slot, tokens, row });
            }
        }
        shares
    }

    fn accept_row(&mut self, slot: usize, row: usize) {
        let Some(sequence) = &mut self.slots[slot] else { return };
        let backend = &mut self.backend;
        // A bug in sampling or text harms this request only.
        let progress = std::panic::catch_unwind(AssertUnwindSafe(|| match backend.logits(row) {
            Some(logits) => sequence.accept_logits(logits),
            None => Progress::Failed(RequestError::Internal(String::from("the backend gave no logits"))),
        }));
        match progress {
            Ok(Progress::Continue) => {}
            Ok(Progress::Finished(reason)) => self.finish(slot, reason),
            Ok(Progress::Failed(error)) => self.fail(slot, error),
            Err(_) => self.fail(slot, RequestError::Internal(String::from("sampling panicked; see the server's log"))),
        }
    }

    fn decode_failed(&mut self, error: BackendError, shares: &[Share]) {
        match error {
            BackendError::NoKvCells => {
                // The youngest gives way, and the others go on with its cells.
                let youngest = shares
                    .iter()
                    .filter_map(|s| self.slots[s.slot].as_ref().map(|sequence| (sequence.ticket(), s.slot)))
                    .max();
                if let Some((_, slot)) = youngest {
                    self.fail(slot, RequestError::Internal(String::from("the KV cache is full")));
                }
            }
            BackendError::Failed(reason) => {
                for share in shares {
                    self.fail(share.slot, RequestError::Internal(format!("decoding failed: {reason}")));
                }
                self.failed_once_more(&reason);
            }
        }
    }

    fn failed_once_more(&mut self, reason: &str) {
        self.consecutive_failures += 1;
        tracing::error!(reason, failures = self.consecutive_failures, "a batch could not be decoded");
        if self.consecutive_failures >= MAX_CONSECUTIVE_FAILURES {
            self.break_down(format!("{MAX_CONSECUTIVE_FAILURES} batches in a row failed: {reason}"));
        }
    }

    fn finish(&mut self, slot: usize, reason: FinishReason) {
        if let Some(sequence) = self.release(slot) {
            sequence.finish(reason);
        }
    }

    fn fail(&mut self, slot: usize, error: RequestError) {
        if let Some(sequence) = self.release(slot) {
            sequence.fail(error);
        }
    }

    /// Frees a slot and its cells. The caller then ends the request, which so finds its slot free.
    fn release(&mut self, slot: usize) -> Option<Sequence> {
        let sequence = self.slots[slot].take()?;
        self.backend.clear_sequence(u32::try_from(slot).unwrap_or(u32::MAX));
        self.publish();
        Some(sequence)
    }

    fn publish(&self) {
        let active = self.slots.iter().flatten();
        self.stats.slots_active.store(u32::try_from(active.clone().count()).unwrap_or(u32::MAX), Relaxed);
        self.stats.kv_used_cells.store(active.map(|s| u64::from(s.decoded())).sum(), Relaxed);
    }

    #[cfg(test)]
    pub(crate) fn backend(&mut self) -> &mut B {
        &mut self.backend
    }
}

fn fail_request(mut request: Request, error: RequestError) {
    request.emitter.failed(error);
}

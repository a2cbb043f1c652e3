//! A second context beside a pool, in which one long prompt at a time is read.
//!
//! In a pool each token looks at every cell, if only at its mask, and ggml's flash attention goes token by token where fewer
//! than 64 are computed together: a prompt's token beside streams took 4.6 ms behind a thousand others in a pool of 7,680
//! cells, and one that looks at its own prompt alone, 128 together, takes 2.2 (two cores of Zen 5). When the prompt has been
//! read, its state goes into the pool, which takes some 20 ms for a thousand tokens.

use std::ops::Range;
use std::sync::Arc;

use gantry_llama::{Batch, Context, ContextError, ContextParams, Model, StateError};

use crate::backend::{BackendError, BatchEntry};
use crate::kv_plan::STAGE_BATCH_TOKENS;

/// The context, and whose prompt is in it.
pub(super) struct Stage {
    context: Context,
    batch: Batch,
    sequence: Option<u32>,
    /// Which entries of the last batch were computed here,
    entries: Range<usize>,
    /// and how many of them before the last call of llama.cpp.
    before: usize,
}

impl Stage {
    /// A context of so many cells beside a pool; `None` where the state of one does not fit the other.
    pub(super) fn new(
        model: &Arc<Model>,
        pool: &mut Context,
        pool_params: &ContextParams,
        cells: u32,
    ) -> Result<Option<Self>, ContextError> {
        let params = ContextParams {
            n_ctx: cells,
            n_batch: STAGE_BATCH_TOKENS,
            sequences: 1,
            outputs: None,
            kv_unified: false,
            ..pool_params.clone()
        };
        let mut context = Context::new(model, &params)?;
        context.share_threads(pool);
        let (batch, entries) = (Batch::new(), 0..0);
        let fits = pool.sliceable() && pool.state_fingerprint() == context.state_fingerprint();
        Ok(fits.then_some(Self { context, batch, sequence: None, entries, before: 0 }))
    }

    /// Tokens that a prompt in it may have.
    pub(super) fn positions(&self) -> u32 {
        self.context.n_ctx_per_sequence()
    }

    pub(super) fn untouched_bytes(&self) -> u64 {
        self.context.untouched_bytes()
    }

    pub(super) fn sequence(&self) -> Option<u32> {
        self.sequence
    }

    /// Has the prompt of a sequence be read on here; nobody's is. On failure it is not.
    pub(super) fn enter(&mut self, pool: &mut Context, sequence: u32) -> Result<(), StateError> {
        let held = pool.sequence_len(sequence);
        if held > 0 {
            let saved = pool.save(sequence, 0..held, held)?;
            let chunks: Vec<(u32, &[u8])> = saved.iter().map(|bytes| (held, bytes.as_slice())).collect();
            self.context.restore(0, &chunks)?;
        }
        self.sequence = Some(sequence);
        Ok(())
    }

    /// Forgets what it holds of a sequence.
    pub(super) fn leave(&mut self, sequence: u32) {
        if self.sequence == Some(sequence) {
            self.sequence = None;
            self.context.clear();
        }
    }

    /// Forgets whatever it holds, and leaves nothing of it behind.
    pub(super) fn scrub(&mut self) {
        self.sequence = None;
        self.context.scrub();
    }

    /// Drops what it holds past the first `len` tokens.
    pub(super) fn truncate(&mut self, len: u32) -> Result<(), BackendError> {
        super::cut(&mut self.context, 0, len)
    }

    /// Puts what it holds into the pool, behind what is there of it, by way of a spare sequence. On failure all is as it was.
    pub(super) fn land(&mut self, pool: &mut Context, spare: u32) -> Result<(), StateError> {
        let Some(sequence) = self.sequence else { return Ok(()) };
        let (there, held) = (pool.sequence_len(sequence), self.context.sequence_len(0));
        if held > there {
            let saved = self.context.save(0, there..held, held - there)?;
            let chunks: Vec<(u32, &[u8])> = saved.iter().map(|bytes| (held - there, bytes.as_slice())).collect();
            pool.restore_behind(sequence, &chunks, spare)?;
        }
        self.leave(sequence);
        Ok(())
    }

    /// Which entries of a batch are computed here.
    pub(super) fn entries_of(&mut self, batch: &[BatchEntry]) -> Range<usize> {
        let is_here = |entry: &BatchEntry| Some(entry.sequence) == self.sequence;
        let first = batch.iter().position(is_here).unwrap_or(batch.len());
        let count = batch[first..].iter().take_while(|entry| is_here(entry)).count();
        self.entries = first..first + count;
        self.entries.clone()
    }

    /// Decodes its entries of a batch.
    pub(super) fn decode(&mut self, batch: &[BatchEntry], threads: Option<u32>) -> Result<(), BackendError> {
        threads.inspect(|&threads| self.context.set_threads(threads));
        self.before = 0;
        let mut rest = &batch[self.entries.clone()];
        let most = self.context.n_batch() as usize;
        while !rest.is_empty() {
            let (part, after) = rest.split_at(rest.len().min(most));
            self.batch.clear();
            part.iter().for_each(|entry| self.batch.add(entry.token, entry.position, 0, entry.output));
            self.context.decode(&mut self.batch).map_err(|e| BackendError::Failed(e.to_string()))?;
            self.before += if after.is_empty() { 0 } else { part.len() };
            rest = after;
        }
        Ok(())
    }

    /// Where the logits after an entry of the last batch are, as a place among the pool's entries where they are not here.
    pub(super) fn place(&self, index: usize) -> Result<usize, usize> {
        match index {
            at if at < self.entries.start => Err(at),
            at if at < self.entries.end => Ok(at - self.entries.start),
            at => Err(at - self.entries.len()),
        }
    }

    pub(super) fn logits(&mut self, place: usize) -> Option<&[f32]> {
        self.context.logits(place.checked_sub(self.before)?)
    }
}

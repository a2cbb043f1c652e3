//! The KV cache and the compute graph of one engine: decodes validated batches, gives rows of logits.
//!
//! A context has one owner and may move between threads. Flash attention is fixed at creation (as asked for, unless the
//! architecture refuses it), because a context that chose by itself would make a quantised cache fail late.

mod params;
mod pooling;
mod state;
mod threads;

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use llama_cpp_sys_2 as sys;

use crate::batch::{Batch, BatchLimits};
use crate::error::{BatchError, ContextError, DecodeError, StateError};
use crate::model::Model;
use crate::{logs, shim};

pub use params::{ContextParams, KvType, MAX_SEQUENCES};
pub use pooling::Pooling;

/// `llama_decode`: no KV cells were free.
const NO_KV_CELLS: i32 = 1;
/// `llama_decode`: the abort callback said to stop.
const ABORTED: i32 = 2;

/// An inference context over a shared model.
#[derive(Debug)]
pub struct Context {
    ptr: NonNull<sys::llama_context>,
    memory: sys::llama_memory_t,
    limits: BatchLimits,
    kv_unified: bool,
    lazy_cells: bool,
    kv_type: KvType,
    flash_attention: bool,
    pooling: Option<Pooling>,
    n_ctx: u32,
    /// Which tokens of the last decoded batch have a row of logits.
    outputs: Vec<i8>,
    /// How this context's state is laid out, once it was looked at.
    knowledge: Option<state::Knowledge>,
    /// For the bytes of states.
    scratch: Vec<u8>,
    /// Read by llama.cpp while it computes.
    abort: Option<Arc<AtomicBool>>,
    /// What was asked for last, and the most.
    threads: (u32, u32),
    /// Used by llama.cpp while it computes.
    pool: Option<Arc<threads::ThreadPool>>,
    /// What it computed with before: llama.cpp pauses that when it next computes.
    former_pools: Vec<Arc<threads::ThreadPool>>,
    /// Declared last: the context goes first, in `drop`.
    model: Arc<Model>,
}

// SAFETY: a llama_context is used by one thread at a time but is bound to none; `&mut self` on everything that computes
// gives that. It is not Sync: reading logits reorders them in place.
unsafe impl Send for Context {}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: owned; the model it points into is dropped after this.
        unsafe { sys::llama_free(self.ptr.as_ptr()) };
    }
}

impl Context {
    /// Allocates the cache and the compute buffers.
    ///
    /// # Errors
    /// When a parameter is out of range, or llama.cpp refuses (most often: not enough memory).
    pub fn new(model: &Arc<Model>, params: &ContextParams) -> Result<Self, ContextError> {
        params.check()?;
        if let Some(pooling) = params.pooling {
            pooling::check(model, pooling)?;
        }
        logs::clear_recent_errors();
        let mut flash_attention = params.flash_attention;
        let mut ptr = params::create(model, params, flash_attention);
        if ptr.is_none() && flash_attention && params.kv_type == KvType::F16 {
            // An architecture without flash attention still works with a cache that is not quantised.
            flash_attention = false;
            ptr = params::create(model, params, flash_attention);
        }
        let ptr = ptr.ok_or_else(|| ContextError::Refused(logs::take_recent_errors()))?;
        // SAFETY: a context just made; these read fields.
        let (memory, n_ctx, n_ctx_seq, n_batch, n_seq_max) = unsafe {
            (
                sys::llama_get_memory(ptr.as_ptr()),
                sys::llama_n_ctx(ptr.as_ptr()),
                sys::llama_n_ctx_seq(ptr.as_ptr()),
                sys::llama_n_batch(ptr.as_ptr()),
                sys::llama_n_seq_max(ptr.as_ptr()),
            )
        };
        // A model that embeds may have a table of positions, which ends where its training did.
        let trained = if params.pooling.is_some() && model.n_ctx_train() > 0 { model.n_ctx_train() } else { u32::MAX };
        let limits = BatchLimits {
            tokens: n_batch as usize,
            outputs: params.output_rows() as usize,
            sequences: n_seq_max.min(params.sequences),
            positions: n_ctx_seq.min(trained),
            vocab_size: model.vocab_size(),
        };
        let context = Self {
            ptr,
            memory,
            limits,
            kv_unified: params.unified(),
            kv_type: params.kv_type,
            lazy_cells: params.lazy_cells,
            flash_attention,
            pooling: params.pooling,
            n_ctx,
            outputs: Vec::new(),
            knowledge: None,
            scratch: Vec::new(),
            abort: params.abort.clone(),
            threads: (params.threads, params.threads),
            pool: threads::ThreadPool::new(params.threads).map(Arc::new),
            former_pools: Vec::new(),
            model: model.clone(),
        };
        if let Some(pool) = &context.pool {
            pool.attach(ptr);
        }
        if context.memory.is_null() && params.pooling.is_none() {
            return Err(ContextError::Stateless);
        }
        if n_batch < params.sequences.max(params.outputs.unwrap_or(0)) {
            return Err(ContextError::Params(format!(
                "n_ctx of {n_ctx} is less than {} sequences and their outputs need",
                params.sequences
            )));
        }
        Ok(context)
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Whether attention is computed in one pass. Not for an architecture that cannot, whatever was asked for.
    #[must_use]
    pub fn flash_attention(&self) -> bool {
        self.flash_attention
    }

    /// KV cells in total.
    #[must_use]
    pub fn n_ctx(&self) -> u32 {
        self.n_ctx
    }

    /// Tokens that one sequence can hold.
    #[must_use]
    pub fn n_ctx_per_sequence(&self) -> u32 {
        self.limits.positions
    }

    /// Sequences there are.
    #[must_use]
    pub fn sequences(&self) -> u32 {
        self.limits.sequences
    }

    /// Tokens that one batch can hold.
    #[must_use]
    pub fn n_batch(&self) -> u32 {
        u32::try_from(self.limits.tokens).unwrap_or(u32::MAX)
    }

    /// Rows of logits that one batch may ask for.
    #[must_use]
    pub fn outputs(&self) -> u32 {
        u32::try_from(self.limits.outputs).unwrap_or(u32::MAX)
    }

    /// Bytes of main memory that are set aside to compute in: pages of it are taken as batches first need them.
    #[must_use]
    pub fn compute_bytes(&self) -> u64 {
        // SAFETY: the context is alive; this adds up sizes.
        unsafe { shim::gantry_compute_bytes(self.ptr.as_ptr()) }
    }

    /// Bytes of main memory that a context just made has set aside and not taken, at most: to compute in, and of cells that
    /// are [lazy](ContextParams::lazy_cells).
    #[must_use]
    pub fn untouched_bytes(&self) -> u64 {
        // SAFETY: this says how the program is linked.
        let is_lazy = self.lazy_cells && unsafe { shim::gantry_can_zero_lazily() };
        // SAFETY: the context is alive; this adds up sizes.
        let cells = if is_lazy { unsafe { shim::gantry_cell_bytes(self.ptr.as_ptr()) } } else { 0 };
        self.compute_bytes().saturating_add(cells)
    }

    /// Computes a batch; afterwards [`Context::logits`] gives the rows it asked for, or [`Context::embedding`] the
    /// vectors of its texts. A pooling context first drops what it holds.
    ///
    /// # Errors
    /// Refused batches and [`DecodeError::NoKvCells`] leave the context as it was.
    pub fn decode(&mut self, batch: &mut Batch) -> Result<(), DecodeError> {
        let pools = self.pooling.is_some();
        if pools {
            batch.ask_for_all();
        }
        // Texts are whole.
        let expected =
            |sequence| if pools { Some(0) } else { Some(self.next_position(sequence)).filter(|next| *next > 0) };
        batch.validate(&self.limits, expected)?;
        if pools {
            self.clear();
        }
        self.outputs.clear();
        logs::clear_recent_errors();
        let raw = batch.as_raw();
        let turn = self.pool.as_ref().map(|pool| pool.turn());
        // SAFETY: the batch is valid for this context (checked above: sizes, tokens, sequences, positions), `raw`'s
        // vectors are borrowed for the call, and the shim catches exceptions.
        let decode = || unsafe { shim::gantry_decode(self.ptr.as_ptr(), &raw const raw) };
        let code = logs::while_it_may_be_ended(self.abort.as_ref(), decode);
        drop(turn);
        match code {
            0 => {
                self.outputs.extend_from_slice(batch.outputs());
                Ok(())
            }
            NO_KV_CELLS => Err(DecodeError::NoKvCells),
            ABORTED => Err(DecodeError::Aborted),
            shim::THROWN => Err(DecodeError::Failed { code, reason: String::from("llama.cpp threw an exception") }),
            code => Err(DecodeError::Failed { code, reason: logs::take_recent_errors() }),
        }
    }

    /// Has this context compute with the threads of another one instead of its own, where it may use as many: the two then
    /// take turns. Threads of a context that has just computed spin for a while, which slows down those of the next.
    pub fn share_threads(&mut self, other: &Self) {
        if let Some(pool) = other.pool.as_ref().filter(|_| self.threads.1 <= other.threads.1) {
            pool.attach(self.ptr);
            self.former_pools.extend(self.pool.replace(pool.clone()));
        }
    }

    /// Has what is computed from now on use so many threads: at least one, and no more than the context was made with.
    pub fn set_threads(&mut self, threads: u32) {
        let threads = threads.clamp(1, self.threads.1);
        // llama.cpp logs each call.
        if threads == self.threads.0 {
            return;
        }
        self.threads.0 = threads;
        let threads = i32::try_from(threads).unwrap_or(1);
        // SAFETY: the context is alive, and its pool has at least as many threads.
        unsafe { sys::llama_set_n_threads(self.ptr.as_ptr(), threads, threads) };
    }

    /// How many of its threads compute now.
    #[must_use]
    pub fn threads(&self) -> u32 {
        self.threads.0
    }

    /// The logits that follow the token at `index` of the last decoded batch, one for each token of the vocabulary;
    /// `None` where that batch did not ask for them.
    pub fn logits(&mut self, index: usize) -> Option<&[f32]> {
        if self.pooling.is_some() || self.outputs.get(index).is_none_or(|&output| output == 0) {
            return None;
        }
        let i = i32::try_from(index).ok()?;
        // SAFETY: the last decode succeeded and asked for this row.
        let row = unsafe { sys::llama_get_logits_ith(self.ptr.as_ptr(), i) };
        if row.is_null() {
            return None;
        }
        // SAFETY: a row has as many floats as the vocabulary has tokens, and lives until the next decode, which needs
        // `&mut self` as this borrow does.
        Some(unsafe { std::slice::from_raw_parts(row, self.limits.vocab_size as usize) })
    }

    /// Tokens that a sequence holds; 0 for a sequence that does not exist.
    #[must_use]
    pub fn sequence_len(&self, sequence: u32) -> u32 {
        if sequence < self.limits.sequences { self.next_position(sequence) } else { 0 }
    }

    /// Drops a sequence's tokens from `from` on. False, and nothing is dropped, where the model's state cannot be cut
    /// there (recurrent models, a sliding window that is past it); the whole sequence (0) can always be dropped.
    ///
    /// # Errors
    /// When the sequence does not exist.
    pub fn remove(&mut self, sequence: u32, from: u32) -> Result<bool, BatchError> {
        let id = self.checked(sequence)?;
        if from > 0 && from < self.next_position(sequence) && !self.window_is_whole(id, from) {
            return Ok(false);
        }
        let from = i32::try_from(from).unwrap_or(i32::MAX);
        // SAFETY: the memory belongs to this context and the id is in range; -1: to the end.
        Ok(unsafe { sys::llama_memory_seq_rm(self.memory, id, from, -1) })
    }

    /// Makes `to` a copy of `from`'s first `len` tokens (all of them: `None`), sharing their cells where the cache is
    /// unified. What `to` held is dropped.
    ///
    /// # Errors
    /// When a sequence does not exist, both are the same, there are not as many tokens, or a part is asked of a state
    /// that cannot be cut. `to` is empty then, or as it was where the arguments are wrong.
    pub fn copy(&mut self, from: u32, to: u32, len: Option<u32>) -> Result<(), StateError> {
        let (source, target) = (self.checked(from)?, self.checked(to)?);
        let held = self.next_position(from);
        let len = len.unwrap_or(held);
        if from == to || len > held {
            return Err(BatchError::Position { sequence: to, expected: held, position: len }.into());
        }
        self.remove(to, 0)?;
        if len == 0 {
            return Ok(());
        }
        if !self.kv_unified {
            // llama.cpp's copy of streams moves all cells of a sequence, used or not, only at the next decode, and lets
            // nothing be saved or restored until then. Through the state (2.5 MB: 0.8 ms of a share of 25 MB that takes
            // 18 ms on the same busy CPU) it is there at once.
            return self.copy_state(from, to, held, len);
        }
        // llama.cpp would copy the state after the last token, or cells without those that a window still needs.
        if len < held && (self.model.is_recurrent() || !self.window_is_whole(source, len)) {
            return Err(StateError::NotSliceable);
        }
        let end = if len == held { -1 } else { i32::try_from(len).unwrap_or(i32::MAX) };
        // SAFETY: both ids are in range and differ; a part is copied only in a unified cache, which is what llama.cpp
        // asserts.
        unsafe { sys::llama_memory_seq_cp(self.memory, source, target, -1, end) };
        Ok(())
    }

    /// Drops every sequence.
    pub fn clear(&mut self) {
        // SAFETY: the memory belongs to this context; false: the buffers need not be zeroed.
        unsafe { sys::llama_memory_clear(self.memory, false) };
    }

    /// Drops every sequence and zeroes what they left: a cell that is masked is computed with all the same, and what is no
    /// number there spoils the rows of others.
    pub fn scrub(&mut self) {
        // SAFETY: the memory belongs to this context.
        params::zeroing(self.lazy_cells, || unsafe { sys::llama_memory_clear(self.memory, true) });
    }

    /// Whether what a sliding window at position `at` looks back on is still there. llama.cpp cuts such a sequence all
    /// the same, and computes on without it.
    fn window_is_whole(&self, id: i32, at: u32) -> bool {
        // SAFETY: a valid model; this reads a field.
        let window = u32::try_from(unsafe { sys::llama_model_n_swa(self.model.raw()) }).unwrap_or(0);
        // SAFETY: the memory belongs to this context and the id is in range; -1 stands for an empty sequence.
        let first = unsafe { sys::llama_memory_seq_pos_min(self.memory, id) };
        // A token sees itself and the `window - 1` before it.
        window == 0 || u32::try_from(first).is_ok_and(|first| first <= (at + 1).saturating_sub(window))
    }

    fn checked(&self, sequence: u32) -> Result<i32, BatchError> {
        let limit = self.limits.sequences;
        match i32::try_from(sequence) {
            Ok(id) if sequence < limit => Ok(id),
            _ => Err(BatchError::Sequence { sequence, limit }),
        }
    }

    /// The position after a sequence's last; the caller has checked the sequence.
    fn next_position(&self, sequence: u32) -> u32 {
        let Ok(id) = i32::try_from(sequence) else { return 0 };
        // SAFETY: the memory belongs to this context and the id is in range; -1 stands for an empty sequence.
        let last = unsafe { sys::llama_memory_seq_pos_max(self.memory, id) };
        u32::try_from(last.saturating_add(1)).unwrap_or(0)
    }
}

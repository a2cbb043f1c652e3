//! The KV cache and the compute graph of one engine: decodes validated batches, gives rows of logits.
//!
//! A context has one owner and may move between threads. Flash attention is fixed at creation (on, unless the
//! architecture refuses it), because a context that chose by itself would make a quantised cache fail late.

use std::ptr::NonNull;
use std::sync::Arc;

use llama_cpp_sys_2 as sys;

use crate::batch::{Batch, BatchLimits};
use crate::error::{BatchError, ContextError, DecodeError};
use crate::model::Model;
use crate::{logs, shim};

/// llama.cpp's limit of sequences in a context.
pub const MAX_SEQUENCES: u32 = 256;

/// `llama_decode`: no KV cells were free.
const NO_KV_CELLS: i32 = 1;

/// The element type of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvType {
    /// Half precision.
    F16,
    /// 8-bit blocks of 32.
    Q8_0,
    /// 4-bit blocks of 32.
    Q4_0,
}

impl KvType {
    fn raw(self) -> sys::ggml_type {
        match self {
            Self::F16 => sys::GGML_TYPE_F16,
            Self::Q8_0 => sys::GGML_TYPE_Q8_0,
            Self::Q4_0 => sys::GGML_TYPE_Q4_0,
        }
    }
}

/// How a context is made; every figure is explicit, since llama.cpp's defaults waste memory and threads.
#[derive(Clone, Debug)]
pub struct ContextParams {
    /// KV cells in total. Split over the sequences (each share rounded up to 256) unless `kv_unified`.
    pub n_ctx: u32,
    /// Tokens in one batch, which is also one ubatch; at least `sequences`.
    pub n_batch: u32,
    /// Sequences, 1 to [`MAX_SEQUENCES`]. A batch may ask for as many rows of logits.
    pub sequences: u32,
    /// Threads that compute.
    pub threads: u32,
    /// The element type of the KV cache.
    pub kv_type: KvType,
    /// One pool of cells for all sequences, which may then share prefixes, at more compute for each step.
    pub kv_unified: bool,
}

/// An inference context over a shared model.
#[derive(Debug)]
pub struct Context {
    ptr: NonNull<sys::llama_context>,
    memory: sys::llama_memory_t,
    limits: BatchLimits,
    kv_unified: bool,
    n_ctx: u32,
    /// Which tokens of the last decoded batch have a row of logits.
    outputs: Vec<i8>,
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
        check(params)?;
        logs::clear_recent_errors();
        let mut ptr = create(model, params, sys::LLAMA_FLASH_ATTN_TYPE_ENABLED);
        if ptr.is_none() && params.kv_type == KvType::F16 {
            // An architecture without flash attention still works with a cache that is not quantised.
            ptr = create(model, params, sys::LLAMA_FLASH_ATTN_TYPE_DISABLED);
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
        let limits = BatchLimits {
            tokens: n_batch as usize,
            outputs: params.sequences as usize,
            sequences: n_seq_max.min(params.sequences),
            positions: n_ctx_seq,
            vocab_size: model.vocab_size(),
        };
        let context = Self {
            ptr,
            memory,
            limits,
            kv_unified: params.kv_unified,
            n_ctx,
            outputs: Vec::new(),
            model: model.clone(),
        };
        if context.memory.is_null() {
            return Err(ContextError::Refused(String::from("the model keeps no state between tokens")));
        }
        if n_batch < params.sequences {
            return Err(ContextError::Params(format!(
                "n_ctx of {n_ctx} is less than {} sequences need",
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

    /// Computes a batch; afterwards [`Context::logits`] gives the rows it asked for.
    ///
    /// # Errors
    /// Refused batches and [`DecodeError::NoKvCells`] leave the context as it was.
    pub fn decode(&mut self, batch: &mut Batch) -> Result<(), DecodeError> {
        batch.validate(&self.limits, |sequence| self.next_position(sequence))?;
        self.outputs.clear();
        logs::clear_recent_errors();
        let raw = batch.as_raw();
        // SAFETY: the batch is valid for this context (checked above: sizes, tokens, sequences, positions), `raw`'s
        // vectors are borrowed for the call, and the shim catches exceptions.
        let code = unsafe { shim::gantry_decode(self.ptr.as_ptr(), &raw const raw) };
        match code {
            0 => {
                self.outputs.extend_from_slice(batch.outputs());
                Ok(())
            }
            NO_KV_CELLS => Err(DecodeError::NoKvCells),
            shim::THROWN => Err(DecodeError::Failed { code, reason: String::from("llama.cpp threw an exception") }),
            code => Err(DecodeError::Failed { code, reason: logs::take_recent_errors() }),
        }
    }

    /// The logits that follow the token at `index` of the last decoded batch, one for each token of the vocabulary;
    /// `None` where that batch did not ask for them.
    pub fn logits(&mut self, index: usize) -> Option<&[f32]> {
        if self.outputs.get(index).is_none_or(|&output| output == 0) {
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

    /// Drops a sequence's tokens from `from` on. False where the model's state cannot be cut there (recurrent models);
    /// the whole sequence (0) can always be dropped.
    ///
    /// # Errors
    /// When the sequence does not exist.
    pub fn remove(&mut self, sequence: u32, from: u32) -> Result<bool, BatchError> {
        let id = self.checked(sequence)?;
        let from = i32::try_from(from).unwrap_or(i32::MAX);
        // SAFETY: the memory belongs to this context and the id is in range; -1: to the end.
        Ok(unsafe { sys::llama_memory_seq_rm(self.memory, id, from, -1) })
    }

    /// Makes `to` a copy of `from`'s first `len` tokens (all of them: `None`), sharing their cells where the cache is
    /// unified. What `to` held is dropped.
    ///
    /// # Errors
    /// When a sequence does not exist, both are the same, or a part is asked of a cache that is split.
    pub fn copy(&mut self, from: u32, to: u32, len: Option<u32>) -> Result<(), BatchError> {
        let (source, target) = (self.checked(from)?, self.checked(to)?);
        let held = self.next_position(from);
        let len = len.unwrap_or(held);
        if from == to || len > held || (len < held && !self.kv_unified) {
            return Err(BatchError::Position { sequence: to, expected: held, position: len });
        }
        self.remove(to, 0)?;
        if len == 0 {
            return Ok(());
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

/// What llama.cpp asserts, or silently replaces.
fn check(params: &ContextParams) -> Result<(), ContextError> {
    let refuse = |what: String| Err(ContextError::Params(what));
    if params.sequences == 0 || params.sequences > MAX_SEQUENCES {
        return refuse(format!("sequences must be 1 to {MAX_SEQUENCES}, not {}", params.sequences));
    }
    if params.n_batch < params.sequences {
        return refuse(format!("n_batch is {}, less than the {} sequences", params.n_batch, params.sequences));
    }
    if params.n_ctx == 0 || i32::try_from(params.n_ctx).is_err() {
        return refuse(format!("n_ctx must be 1 to {}, not {}", i32::MAX, params.n_ctx));
    }
    if params.threads == 0 || i32::try_from(params.threads).is_err() {
        return refuse(format!("threads must be at least 1, not {}", params.threads));
    }
    Ok(())
}

fn create(
    model: &Arc<Model>,
    params: &ContextParams,
    flash_attention: sys::llama_flash_attn_type,
) -> Option<NonNull<sys::llama_context>> {
    let threads = i32::try_from(params.threads).unwrap_or(1);
    // SAFETY: plain data out.
    let mut raw = unsafe { sys::llama_context_default_params() };
    raw.n_ctx = params.n_ctx;
    raw.n_batch = params.n_batch;
    raw.n_ubatch = params.n_batch;
    raw.n_seq_max = params.sequences;
    raw.n_outputs_max = params.sequences;
    raw.n_outputs_max_per_seq = 1;
    raw.n_threads = threads;
    raw.n_threads_batch = threads;
    raw.flash_attn_type = flash_attention;
    raw.type_k = params.kv_type.raw();
    raw.type_v = params.kv_type.raw();
    raw.kv_unified = params.kv_unified;
    raw.no_perf = true;
    // SAFETY: the model is alive, and the context made here is kept with an Arc of it; `raw` outlives the call, holds no
    // pointers, and the shim catches exceptions.
    NonNull::new(unsafe { shim::gantry_context_new(model.raw(), &raw const raw) })
}

//! How a context is made, checked before llama.cpp sees it.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use llama_cpp_sys_2 as sys;

use super::pooling::{self, Pooling};
use crate::error::ContextError;
use crate::model::Model;
use crate::shim;

/// llama.cpp's limit of sequences in a context.
pub const MAX_SEQUENCES: u32 = 256;
/// ggml's limit of threads (`GGML_MAX_N_THREADS`).
pub const MAX_THREADS: u32 = 512;

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
    /// Tokens in one batch, which is one ubatch but for what a split cache cuts; at least `sequences`.
    pub n_batch: u32,
    /// Sequences, 1 to [`MAX_SEQUENCES`].
    pub sequences: u32,
    /// Rows of logits that a batch may ask for, whichever sequences they are of; `None`: as many as there are
    /// sequences, which is also the least. Each costs a row of the vocabulary in memory.
    pub outputs: Option<u32>,
    /// Threads that compute.
    pub threads: u32,
    /// The element type of the KV cache.
    pub kv_type: KvType,
    /// One pool of cells for all sequences, which may then share prefixes, at more compute for each step.
    pub kv_unified: bool,
    /// Attention in one pass, without its scores in memory. A quantised cache needs it; an architecture that refuses it
    /// does without, where the cache is not quantised.
    pub flash_attention: bool,
    /// The context gives embeddings instead of logits; see [`Pooling`]. Its cache is unified.
    pub pooling: Option<Pooling>,
    /// Cells take memory when they are first used, in a program that is linked with `link_args.rs`; otherwise all of them do at
    /// once, so that nobody else can have taken it by then.
    pub lazy_cells: bool,
    /// A flag that ends a running [`Context::decode`](super::Context::decode) within one tensor operation once it is
    /// raised (on a CPU; a GPU finishes its batch). It stays raised until the owner lowers it.
    pub abort: Option<Arc<AtomicBool>>,
}

impl Default for ContextParams {
    /// One sequence of 4,096 tokens on one thread.
    fn default() -> Self {
        Self {
            n_ctx: 4096,
            n_batch: 512,
            sequences: 1,
            outputs: None,
            threads: 1,
            kv_type: KvType::F16,
            kv_unified: false,
            flash_attention: true,
            pooling: None,
            lazy_cells: false,
            abort: None,
        }
    }
}

impl ContextParams {
    /// Rows of logits, or of the hidden state where they are pooled (every token is one).
    pub(super) fn output_rows(&self) -> u32 {
        if self.pooling.is_some() { self.n_batch } else { self.outputs.unwrap_or(self.sequences) }
    }

    /// Whether the sequences share one pool of cells. Pooling needs all of a text in one ubatch, and llama.cpp splits
    /// texts of different lengths where each sequence has a stream of its own.
    pub(super) fn unified(&self) -> bool {
        self.kv_unified || self.pooling.is_some()
    }

    /// What llama.cpp asserts, or silently replaces.
    pub(super) fn check(&self) -> Result<(), ContextError> {
        let refuse = |what: String| Err(ContextError::Params(what));
        if self.sequences == 0 || self.sequences > MAX_SEQUENCES {
            return refuse(format!("sequences must be 1 to {MAX_SEQUENCES}, not {}", self.sequences));
        }
        if self.n_batch < self.sequences {
            return refuse(format!("n_batch is {}, less than the {} sequences", self.n_batch, self.sequences));
        }
        if !self.flash_attention && self.kv_type != KvType::F16 {
            return refuse(format!("a cache of {:?} needs flash attention", self.kv_type));
        }
        let outputs = self.output_rows();
        if outputs < self.sequences || outputs > self.n_batch {
            return refuse(format!(
                "outputs must be {} (sequences) to {} (n_batch), not {outputs}",
                self.sequences, self.n_batch
            ));
        }
        if self.n_ctx == 0 || i32::try_from(self.n_ctx).is_err() {
            return refuse(format!("n_ctx must be 1 to {}, not {}", i32::MAX, self.n_ctx));
        }
        if self.threads == 0 || self.threads > MAX_THREADS {
            return refuse(format!("threads must be 1 to {}, not {}", MAX_THREADS, self.threads));
        }
        Ok(())
    }
}

/// Called by llama.cpp between tensor operations.
unsafe extern "C" fn aborted(data: *mut c_void) -> bool {
    // SAFETY: `data` is the flag of the context's parameters, which the context keeps alive.
    unsafe { &*data.cast::<AtomicBool>() }.load(Ordering::Relaxed)
}

/// Makes the context; `abort` of the parameters must be kept alive with it.
pub(super) fn create(
    model: &Arc<Model>,
    params: &ContextParams,
    flash_attention: bool,
) -> Option<NonNull<sys::llama_context>> {
    let threads = i32::try_from(params.threads).unwrap_or(1);
    // SAFETY: plain data out.
    let mut raw = unsafe { sys::llama_context_default_params() };
    raw.n_ctx = params.n_ctx;
    raw.n_batch = params.n_batch;
    raw.n_ubatch = params.n_batch;
    raw.n_seq_max = params.sequences;
    raw.n_outputs_max = params.output_rows();
    raw.n_outputs_max_per_seq = if params.output_rows() > params.sequences { params.output_rows() } else { 1 };
    raw.n_threads = threads;
    raw.n_threads_batch = threads;
    raw.flash_attn_type =
        if flash_attention { sys::LLAMA_FLASH_ATTN_TYPE_ENABLED } else { sys::LLAMA_FLASH_ATTN_TYPE_DISABLED };
    raw.type_k = params.kv_type.raw();
    raw.type_v = params.kv_type.raw();
    raw.kv_unified = params.unified();
    raw.no_perf = true;
    if let Some(pooling) = params.pooling {
        raw.embeddings = true;
        raw.pooling_type = pooling.raw();
        raw.cb_eval = Some(pooling::skip_logits);
    }
    if let Some(flag) = &params.abort {
        raw.abort_callback = Some(aborted);
        raw.abort_callback_data = Arc::as_ptr(flag).cast_mut().cast();
    }
    // SAFETY: the model is alive, and the context made here is kept with an Arc of it and of the abort flag, the only
    // pointer in `raw`, which outlives the call; the shim catches exceptions.
    NonNull::new(zeroing(params.lazy_cells, || unsafe { shim::gantry_context_new(model.raw(), &raw const raw) }))
}

/// Has llama.cpp do what may zero cells.
pub(super) fn zeroing<T>(lazily: bool, work: impl FnOnce() -> T) -> T {
    // SAFETY: these set a flag of this thread, on which llama.cpp zeroes cells.
    unsafe { shim::gantry_zero_lazily(lazily) };
    let result = work();
    // SAFETY: as above.
    unsafe { shim::gantry_zero_lazily(false) };
    result
}

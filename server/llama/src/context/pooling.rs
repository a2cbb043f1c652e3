//! Embeddings: one vector for each text instead of logits.
//!
//! A pooling context takes whole texts: each batch starts with empty sequences, every token of a text is in it, and
//! [`Context::embedding`] then gives a vector for each sequence. llama.cpp marks every token of such a batch as an output
//! and its graph computes logits for them although nobody reads them. [`skip_logits`] takes that one multiplication out
//! of the graph: 64 tokens through two layers of width 896 with a vocabulary of 151,936 took 1.9 s with it, 0.32 s
//! without, and 0.27 s with one row of logits. What remains is a buffer of `n_batch` rows of the vocabulary.

use std::ffi::{CStr, c_void};

use llama_cpp_sys_2 as sys;

use super::Context;
use crate::error::ContextError;
use crate::model::Model;

/// How the vectors of a text's tokens become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub enum Pooling {
    /// The mean of all.
    Mean,
    /// The first token's.
    Cls,
    /// The last token's.
    Last,
    /// The score of the model's classifier (rerankers), a few numbers instead of a vector.
    Rank,
}

impl Pooling {
    /// Each of them.
    pub const ALL: [Self; 4] = [Self::Mean, Self::Cls, Self::Last, Self::Rank];

    /// llama-server's word.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Mean => "mean",
            Self::Cls => "cls",
            Self::Last => "last",
            Self::Rank => "rank",
        }
    }

    pub(super) fn raw(self) -> sys::llama_pooling_type {
        match self {
            Self::Mean => sys::LLAMA_POOLING_TYPE_MEAN,
            Self::Cls => sys::LLAMA_POOLING_TYPE_CLS,
            Self::Last => sys::LLAMA_POOLING_TYPE_LAST,
            Self::Rank => sys::LLAMA_POOLING_TYPE_RANK,
        }
    }
}

impl Model {
    /// The pooling that the file names, if it is a model for embeddings or reranking.
    #[must_use]
    pub fn pooling(&self) -> Option<Pooling> {
        let architecture = self.metadata(c"general.architecture")?;
        let key = std::ffi::CString::new(format!("{architecture}.pooling_type")).ok()?;
        let named: i32 = self.metadata(&key)?.parse().ok()?;
        Pooling::ALL.into_iter().find(|pooling| pooling.raw() == named)
    }

    /// Numbers in what a context with this pooling gives for a text.
    #[must_use]
    pub fn embedding_len(&self, pooling: Pooling) -> usize {
        // SAFETY: a valid model; these read fields.
        let len = unsafe {
            match pooling {
                Pooling::Rank => i64::from(sys::llama_model_n_cls_out(self.raw())),
                _ => i64::from(sys::llama_model_n_embd_out(self.raw())),
            }
        };
        usize::try_from(len).unwrap_or(0)
    }
}

/// A score of a model without a classifier would be one number of its hidden state.
pub(super) fn check(model: &Model, pooling: Pooling) -> Result<(), ContextError> {
    if pooling == Pooling::Rank && model.pooling() != Some(Pooling::Rank) {
        return Err(ContextError::Params(String::from(
            "the model is no reranker, since its file names no rank pooling: leave out --reranking, or serve a reranker",
        )));
    }
    Ok(())
}

/// llama.cpp shows each operation before it computes the graph, and asks whether to stop after it (never). Every backend
/// skips an operation without the flag COMPUTE. Where an architecture names its logits otherwise, or computes more after
/// them, they are computed: slow, not wrong.
pub(super) unsafe extern "C" fn skip_logits(tensor: *mut sys::ggml_tensor, ask: bool, _data: *mut c_void) -> bool {
    // SAFETY: llama.cpp passes a tensor of the graph that it is about to compute on this thread; its name ends with NUL.
    unsafe {
        let name = CStr::from_ptr((&raw const (*tensor).name).cast());
        if ask && (*tensor).op == sys::GGML_OP_MUL_MAT && name == c"result_output" {
            (*tensor).flags &= !sys::GGML_TENSOR_FLAG_COMPUTE.cast_signed();
            #[cfg(test)]
            tests::note(&*tensor);
        }
    }
    false
}

impl Context {
    /// The vector of a sequence's text in the last decoded batch, not normalised; `None` where that batch had no such
    /// sequence, or the context has no [pooling](super::ContextParams::pooling).
    pub fn embedding(&mut self, sequence: u32) -> Option<&[f32]> {
        let pooling = self.pooling.filter(|_| !self.outputs.is_empty())?;
        let id = self.checked(sequence).ok()?;
        // SAFETY: the context is alive; null stands for a sequence that was not in the batch.
        let row = unsafe { sys::llama_get_embeddings_seq(self.ptr.as_ptr(), id) };
        if row.is_null() {
            return None;
        }
        // SAFETY: llama.cpp made it as long as the model says, and it lives until the next decode, which needs `&mut
        // self` as this borrow does.
        Some(unsafe { std::slice::from_raw_parts(row, self.model.embedding_len(pooling)) })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::cell::Cell;

    use super::super::ContextParams;
    use super::*;
    use crate::batch::Batch;
    use crate::model::ModelParams;

    thread_local! {
        /// Where the logits that were left out last would have been.
        static LEFT_OUT: Cell<Option<(*const f32, usize)>> = const { Cell::new(None) };
    }

    pub(super) fn note(tensor: &sys::ggml_tensor) {
        let numbers = usize::try_from(tensor.ne[0] * tensor.ne[1]).unwrap();
        LEFT_OUT.set(Some((tensor.data.cast_const().cast(), numbers)));
    }

    #[test]
    fn no_logits_are_computed_beside_a_vector() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../e2e/models/demo-draft.q8_0.gguf");
        let on_cpu = ModelParams { gpu_layers: Some(0), ..ModelParams::default() }; // else what is looked at below is not in RAM
        let model = Model::load(path.as_ref(), &on_cpu, &mut |_| true).unwrap();
        let params = ContextParams { n_ctx: 256, n_batch: 64, outputs: Some(8), ..ContextParams::default() };
        let mut batch = Batch::new();
        (0..8_u32).for_each(|i| batch.add(100 + i.cast_signed(), i, 0, true));

        let mut generating = Context::new(&model, &params).unwrap();
        generating.decode(&mut batch).unwrap();
        assert_eq!(LEFT_OUT.get(), None, "these are wanted");
        let logits: Vec<Vec<f32>> = (0..8).map(|i| generating.logits(i).unwrap().to_vec()).collect();

        let mut pooling = Context::new(&model, &ContextParams { pooling: Some(Pooling::Mean), ..params }).unwrap();
        pooling.decode(&mut batch).unwrap();
        assert!(pooling.embedding(0).unwrap().iter().all(|x| x.is_finite()));
        let (data, numbers) = LEFT_OUT.take().unwrap();
        let vocabulary = logits[0].len();
        assert_eq!(numbers, 8 * vocabulary);
        // SAFETY: the graph's buffer lives as long as its context, and nothing computes in it now.
        let there = unsafe { std::slice::from_raw_parts(data, numbers) };
        for (there, logits) in there.chunks(vocabulary).zip(&logits) {
            let close = there.iter().zip(logits).filter(|(a, b)| (*a - *b).abs() < 0.1).count();
            assert!(close < logits.len() / 2, "{close} numbers are the logits");
        }
    }
}

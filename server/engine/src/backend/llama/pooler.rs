//! The backend that embeds and scores: a llama.cpp context that pools what comes of texts.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use gantry_llama::{Batch, Context, ContextError, ContextParams, Pooling};

use super::{LlamaVocabulary, Opened, claim, context_refused, info, threads, unusable};
use crate::backend::{PooledBackend, PooledLimits, Token};
use crate::cores::{Cores, Work};
use crate::error::LoadError;
use crate::event::{ModelInfo, PooledInfo};
use crate::kv_plan::CELLS_MULTIPLE;
use crate::params::{EngineConfig, PooledConfig};

/// A context that pools.
pub(crate) struct LlamaPooler {
    context: Context,
    batch: Batch,
    limits: PooledLimits,
    untouched_bytes: u64,
    cores: Option<Arc<Cores>>,
}

/// A model that is ready to embed or score, but for its warm-up.
pub(crate) struct LoadedPooler {
    pub(crate) backend: LlamaPooler,
    pub(crate) vocabulary: LlamaVocabulary,
    pub(crate) pooled: PooledInfo,
    /// What is known of the model where it does nothing else.
    pub(crate) info: ModelInfo,
    /// Ends the computation in progress when raised.
    pub(crate) abort: Arc<AtomicBool>,
}

/// Makes a context that pools.
pub(crate) fn pooler(config: &EngineConfig, pooled: &PooledConfig, opened: &Opened) -> Result<LoadedPooler, LoadError> {
    let model = &opened.model;
    let pooling = pooled.pooling.or_else(|| model.pooling()).ok_or(LoadError::NoPooling)?;
    let abort = Arc::new(AtomicBool::new(false));
    let batch_tokens = pooled.batch_tokens.max(pooled.max_batch);
    let params = ContextParams {
        // Each batch begins with an empty cache.
        n_ctx: batch_tokens.next_multiple_of(CELLS_MULTIPLE),
        n_batch: batch_tokens,
        sequences: pooled.max_batch,
        threads: threads(config),
        pooling: Some(pooling),
        abort: Some(abort.clone()),
        ..ContextParams::default()
    };
    let context = Context::new(model, &params).map_err(|error| match error {
        // The model cannot do this, whatever the memory.
        ContextError::Params(reason) => unusable(config, &reason),
        error => context_refused(error),
    })?;
    let text_tokens = context.n_ctx_per_sequence().min(context.n_batch());
    let width = u32::try_from(model.embedding_len(pooling)).unwrap_or(0);
    let limits = PooledLimits {
        texts: context.sequences() as usize,
        batch_tokens: context.n_batch() as usize,
        text_tokens: text_tokens as usize,
    };
    // llama.cpp has a row of the vocabulary and of the width for each sequence from the start, and makes one for each
    // token of the largest batch so far.
    let row = u64::from(model.vocab_size()) + model.embedding_len(Pooling::Mean) as u64;
    let untouched_rows = u64::from(context.n_batch().saturating_sub(context.sequences()));
    let untouched_bytes = context.untouched_bytes() + size_of::<f32>() as u64 * row * untouched_rows;
    Ok(LoadedPooler {
        backend: LlamaPooler { context, batch: Batch::new(), limits, untouched_bytes, cores: opened.cores.clone() },
        vocabulary: LlamaVocabulary::new(model.clone(), None),
        pooled: PooledInfo { pooling, width, text_tokens },
        info: ModelInfo { pooled_only: true, ..info(config, opened, text_tokens) },
        abort,
    })
}

impl PooledBackend for LlamaPooler {
    fn limits(&self) -> PooledLimits {
        self.limits
    }

    fn untouched_bytes(&self) -> u64 {
        self.untouched_bytes
    }

    fn embed(&mut self, texts: &[&[Token]]) -> Result<Vec<Vec<f32>>, String> {
        self.batch.clear();
        for (sequence, text) in (0..).zip(texts) {
            (0..).zip(text.iter()).for_each(|(at, &token)| self.batch.add(token, at, sequence, true));
        }
        let claim = claim(self.cores.as_deref(), Work::Pooling, &mut self.context);
        self.context.decode(&mut self.batch).map_err(|e| e.to_string())?;
        drop(claim);
        let vector = |(sequence, _)| {
            let vector = self.context.embedding(sequence).map(<[f32]>::to_vec);
            vector.ok_or_else(|| String::from("llama.cpp computed a text and gave no vector"))
        };
        (0..).zip(texts).map(vector).collect()
    }

    fn scrub(&mut self) {
        self.context.scrub();
    }
}

//! How much memory a model takes under given settings, from its header alone.
//!
//! All sums saturate, so that absurd settings come out as "does not fit" and never as a small number. With
//! `cells = parallel × round_up(ctx_size / parallel, 256)`, the KV cache's length in llama.cpp's split mode:
//!
//! - weights = all tensors, + the embedding once more where it is the output as well and a GPU holds that, or a CPU computes
//!   with a copy in another order; + with AMX what such copies have beside each block
//! - KV cache = Σ over layers of kv_heads × (row(dk, type_k) + row(dv, type_v)) × cells
//!   \+ parallel × recurrent state
//! - compute = 4 bytes × ubatch × the wider of 4 × embedding + 3 × feed_forward and
//!   2 × embedding + 3 × heads × dk + 2 × kv_heads × dk + kv_heads × dv, the values alive together in one layer;
//!   \+ outputs × vocabulary × 4, the logits; + parallel × vocabulary × 4, the copy that sampling reads;
//!   \+ 4 bytes × ubatch × cells / parallel, the attention mask
//! - pooled, where texts are embedded too = the KV cache (f16) and compute of a context of one sequence and as many cells as
//!   its batch has tokens + 4 bytes × tokens × (vocabulary + embedding), the rows that llama.cpp keeps for outputs
//!   \+ a fixed [`CONTEXT_BASE_BYTES`]
//! - overhead = a fixed [`BASE_BYTES`] + [`VOCABULARY_BYTES_PER_TOKEN`] per token of the vocabulary
//!
//! Of layers on a GPU, weights and cells are there, and so is what a step computes; where the CPU has layers, too, both have
//! all of the latter. The copy of the logits is in main memory whoever computes. Layers count as llama.cpp does: the first
//! is the output, so that a model of 32 is all there with 33.
//!
//! An encoder has weights, overhead, and where texts are embedded the context for that, which then keeps no cells.
//!
//! Without flash attention, the latter of the two has heads × cells / parallel scores more. The constants
//! of compute follow from the buffers that llama.cpp reports; `tests/measured.rs` holds both against each other.
//!
//! Conservative on purpose: a sliding window is counted as full attention, and a hybrid model's recurrent layers as
//! attention where the header does not tell them apart. Absent: buffers of requests, what the kernel keeps of the
//! file that was read, which it gives back under pressure, and weights of the
//! CPU's layers that llama.cpp copies to a GPU for a large batch.

use serde::{Deserialize, Serialize};

use crate::bytes::human_bytes;
use crate::ggml::GgmlType;
use crate::summary::Summary;

/// llama.cpp rounds the cells of each sequence up to this.
const CELLS_MULTIPLE: u64 = 256;
/// What one worker process takes before it holds a model: code, allocator, thread stacks, graph nodes.
pub const BASE_BYTES: u64 = 24 * 1024 * 1024;
/// What a second context over the same weights takes before it holds anything: graph nodes, buffers' ends.
pub const CONTEXT_BASE_BYTES: u64 = 4 * 1024 * 1024;
/// What llama.cpp keeps of each token: its text three times over, hash nodes, merges.
pub const VOCABULARY_BYTES_PER_TOKEN: u64 = 512;

/// The settings that memory follows from, in llama-server's meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FitInput {
    /// Tokens of context over all sequences; 0 is the model's own.
    pub ctx_size: u32,
    /// Sequences decoded together; 0 counts as 1.
    pub parallel: u32,
    /// Sequences of one pool of cells, those included that are not decoded; 0: each of `parallel` has its own cells.
    pub pool_sequences: u32,
    /// Cells of a second cache beside such a pool, in which one prompt at a time is read; 0: there is none.
    pub stage_cells: u32,
    /// Tokens that are computed together there.
    pub stage_batch: u32,
    /// Element type of the cached keys.
    pub type_k: GgmlType,
    /// Element type of the cached values.
    pub type_v: GgmlType,
    /// Tokens in one logical batch.
    pub n_batch: u32,
    /// Tokens in one computed batch; at most `n_batch`.
    pub n_ubatch: u32,
    /// Tokens of one batch whose logits are computed; 0 is all of them.
    pub n_outputs_max: u32,
    /// Whether attention runs without materialised scores.
    pub flash_attention: bool,
    /// Layers on the GPU, the output being the first of them; more than the model has are all.
    pub gpu_layers: u32,
    /// Tokens of texts that a second context embeds together; 0: there is none.
    pub pooled_tokens: u32,
    /// Whether the CPU computes with AMX.
    pub amx: bool,
}

impl Default for FitInput {
    /// llama.cpp's defaults on a CPU, one sequence.
    fn default() -> Self {
        Self {
            ctx_size: 0,
            parallel: 1,
            pool_sequences: 0,
            stage_cells: 0,
            stage_batch: 0,
            type_k: GgmlType::F16,
            type_v: GgmlType::F16,
            n_batch: 2048,
            n_ubatch: 512,
            n_outputs_max: 0,
            flash_attention: true,
            gpu_layers: 0,
            pooled_tokens: 0,
            amx: false,
        }
    }
}

/// Predicted memory in bytes; `u64::MAX` stands for more than can be counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MemoryEstimate {
    /// Tensors.
    pub weights_bytes: u64,
    /// KV cache and recurrent state.
    pub kv_cache_bytes: u64,
    /// Activations, logits, masks.
    pub compute_bytes: u64,
    /// The process and the vocabulary.
    pub overhead_bytes: u64,
    /// The context that embeds: its cells, activations and rows.
    pub pooled_bytes: u64,
    /// All of it.
    pub total_bytes: u64,
    /// The part of the total on the GPU.
    pub device_bytes: u64,
    /// The part of the total in main memory.
    pub host_bytes: u64,
    /// Cells of the KV cache, all sequences together.
    pub cells: u64,
}

fn product(factors: &[u64]) -> u64 {
    factors.iter().fold(1, |product: u64, &factor| product.saturating_mul(factor))
}

fn sum(terms: &[u64]) -> u64 {
    terms.iter().fold(0, |sum: u64, &term| sum.saturating_add(term))
}

/// Predicts the memory of a model under the given settings.
#[must_use]
pub fn estimate(summary: &Summary, input: &FitInput) -> MemoryEstimate {
    let parallel = u64::from(input.parallel.max(1));
    let context = if input.ctx_size == 0 { summary.context_length } else { input.ctx_size };
    // 2^32 and 256 are far from overflow.
    let cells_each = u64::from(context).div_ceil(parallel).max(1).next_multiple_of(CELLS_MULTIPLE);
    let cells = product(&[cells_each, parallel]);

    let layers = u64::from(summary.layers.max(1));
    let offloaded = u64::from(input.gpu_layers.saturating_sub(1)).min(layers);
    let output_offloaded = input.gpu_layers > 0;
    let both_compute = output_offloaded && offloaded < layers;
    let copied = output_offloaded || summary.embedding_type.is_some_and(|kind| kind.is_repacked(input.amx));
    let second_embedding = if copied && summary.tied_output { summary.embedding_bytes } else { 0 };

    let beside_blocks =
        if input.amx { amx_bytes(summary).div_ceil(layers).saturating_mul(layers - offloaded) } else { 0 };
    let weights_bytes = sum(&[summary.tensor_bytes, second_embedding, beside_blocks]);
    let (stage_cache, stage_computes) = stage_bytes(summary, input);
    let kv_cache_bytes = sum(&[kv_cache_bytes(summary, input, cells, parallel), stage_cache]);
    // The mask has a column for each cell that a row could look at.
    let columns = if input.pool_sequences > 0 { cells } else { cells_each };
    let sequences = parallel.max(input.pool_sequences.into());
    // An encoder has no context but the one that embeds.
    let (step, copied_logits) = if summary.encoder {
        (0, 0)
    } else {
        (compute_bytes(summary, input, columns), product(&[4, sequences, summary.vocabulary]))
    };
    let overhead_bytes = sum(&[BASE_BYTES, product(&[summary.vocabulary, VOCABULARY_BYTES_PER_TOKEN])]);
    let (pooled_there, pooled_here) = pooled_bytes(summary, input);
    let twice = |bytes: u64| if both_compute { bytes } else { 0 };
    let compute_bytes = sum(&[step, twice(step), copied_logits, stage_computes]);
    let pooled_bytes = sum(&[pooled_there, twice(pooled_there), pooled_here]);
    let total_bytes = sum(&[weights_bytes, kv_cache_bytes, compute_bytes, overhead_bytes, pooled_bytes]);

    // Layers are alike enough in size that their share by number stands for their share by bytes.
    let share = |bytes: u64| bytes.div_ceil(layers).saturating_mul(offloaded).min(bytes);
    let output = if output_offloaded {
        let not_layers = summary.tensor_bytes.saturating_sub(summary.layer_bytes);
        sum(&[not_layers.saturating_sub(summary.embedding_bytes), second_embedding])
    } else {
        0
    };
    let compute_there = if output_offloaded { sum(&[step, pooled_there]) } else { 0 };
    let device_bytes = sum(&[share(summary.layer_bytes), share(kv_cache_bytes), output, compute_there]);
    MemoryEstimate {
        weights_bytes,
        kv_cache_bytes,
        compute_bytes,
        overhead_bytes,
        pooled_bytes,
        total_bytes,
        device_bytes,
        host_bytes: total_bytes.saturating_sub(device_bytes),
        cells,
    }
}

/// What the copies for AMX have beside the blocks, the one of a tied embedding included.
fn amx_bytes(summary: &Summary) -> u64 {
    let of = |kind: GgmlType, bytes: u64| (bytes / kind.block_bytes()).saturating_mul(kind.amx_bytes_per_block());
    let types = summary.types.iter().map(|&(kind, bytes)| of(kind, bytes));
    types.fold(0, u64::saturating_add)
}

fn kv_cache_bytes(summary: &Summary, input: &FitInput, cells: u64, parallel: u64) -> u64 {
    let per_head =
        sum(&[input.type_k.row_bytes(summary.head_dim_k.into()), input.type_v.row_bytes(summary.head_dim_v.into())]);
    sum(&[
        product(&[summary.kv_heads_total, per_head, cells]),
        product(&[summary.recurrent_bytes_per_sequence, parallel]),
    ])
}

/// What a step computes with, the logits of its outputs included.
fn compute_bytes(summary: &Summary, input: &FitInput, columns: u64) -> u64 {
    let ubatch = u64::from(input.n_ubatch.min(input.n_batch).max(1));
    let outputs = if input.n_outputs_max == 0 { ubatch } else { ubatch.min(input.n_outputs_max.into()) };
    let heads = u64::from(summary.heads);
    let (key, value) = (u64::from(summary.head_dim_k), u64::from(summary.head_dim_v));
    let (kv_heads, embedding) = (u64::from(summary.kv_heads), u64::from(summary.embedding_length));
    let attention = sum(&[
        product(&[2, embedding]),
        product(&[3, heads, key]),
        product(&[2, kv_heads, key]),
        product(&[kv_heads, value]),
    ]);
    let feed_forward = sum(&[product(&[4, embedding]), product(&[3, summary.feed_forward_length])]);
    let scores = if input.flash_attention { 0 } else { product(&[heads, columns]) };
    sum(&[
        product(&[4, ubatch, sum(&[attention, scores]).max(feed_forward)]),
        product(&[4, outputs, summary.vocabulary]),
        product(&[4, ubatch, columns]),
    ])
}

/// The cells of the context in which prompts are read beside a pool, and what it computes with. There is none where a GPU
/// computes.
fn stage_bytes(summary: &Summary, input: &FitInput) -> (u64, u64) {
    if input.stage_cells == 0 || summary.encoder {
        return (0, 0);
    }
    let cells = u64::from(input.stage_cells);
    let own =
        FitInput { parallel: 1, n_batch: input.stage_batch, n_ubatch: input.stage_batch, n_outputs_max: 1, ..*input };
    let computes = compute_bytes(summary, &own, cells);
    let copied_logits = product(&[4, summary.vocabulary]);
    let cache = kv_cache_bytes(summary, &own, cells, 1);
    // A state on its way from the one to the other is there twice more.
    (cache, sum(&[computes, copied_logits, CONTEXT_BASE_BYTES, product(&[2, cache])]))
}

/// The memory of a context that embeds: where it computes, and in main memory whatever computes.
fn pooled_bytes(summary: &Summary, input: &FitInput) -> (u64, u64) {
    if input.pooled_tokens == 0 {
        return (0, 0);
    }
    let tokens = u64::from(input.pooled_tokens);
    let cells = tokens.next_multiple_of(CELLS_MULTIPLE);
    let own = FitInput {
        parallel: 1,
        type_k: GgmlType::F16,
        type_v: GgmlType::F16,
        n_batch: input.pooled_tokens,
        n_ubatch: input.pooled_tokens,
        n_outputs_max: 1,
        ..*input
    };
    let computed = sum(&[kv_cache_bytes(summary, &own, cells, 1), compute_bytes(summary, &own, cells)]);
    // Nobody reads these logits and none is computed, but llama.cpp has a row for each token all the same.
    let rows = product(&[4, tokens, sum(&[summary.vocabulary, summary.embedding_length.into()])]);
    let copied_logits = product(&[4, summary.vocabulary]);
    (computed, sum(&[rows, copied_logits, CONTEXT_BASE_BYTES]))
}

/// Whether an amount of memory fits into another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Fit {
    /// Bytes that are needed.
    pub required: u64,
    /// Bytes that are there.
    pub available: u64,
    /// Bytes of those that may be used: what is there less the headroom.
    pub usable: u64,
    /// Whether the need fits into what may be used.
    pub fits: bool,
    /// The verdict in a sentence, with what to do.
    pub message: String,
}

/// Holds `required` against `available` bytes, of which the part `headroom_ratio` (0 to 1) stays free.
///
/// A ratio outside that range, or one that is no number, is taken as its nearest end (no number as 0).
#[must_use]
pub fn verdict(required: u64, available: u64, headroom_ratio: f64) -> Fit {
    let ratio = if headroom_ratio.is_nan() { 0.0 } else { headroom_ratio.clamp(0.0, 1.0) };
    // A float's 53 bits are exact to the byte below 8 PiB, and the cast saturates.
    let kept_free = (available as f64 * ratio).ceil() as u64;
    let usable = available.saturating_sub(kept_free);
    let fits = required <= usable;
    let percent = (ratio * 1e4).round() / 1e2;
    let (need, have, limit) = (human_bytes(required), human_bytes(available), human_bytes(usable));
    let message = if fits {
        format!("needs {need} of {have} ({limit} usable with {percent}% headroom)")
    } else {
        let short = human_bytes(required.saturating_sub(usable));
        format!(
            "needs {need}, but of {have} only {limit} are usable with {percent}% headroom: {short} short; \
             lower the context size or the parallel sequences, choose a smaller quantisation, or give more memory"
        )
    };
    Fit { required, available, usable, fits, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verdict_turns_exactly_at_the_usable_bytes() {
        assert!(verdict(95, 100, 0.05).fits);
        assert!(!verdict(96, 100, 0.05).fits);
        assert!(verdict(100, 100, 0.0).fits);
        assert!(verdict(0, 0, 0.5).fits);
        assert!(!verdict(1, u64::MAX, 1.0).fits);
        assert!(!verdict(u64::MAX, u64::MAX - 1, f64::NAN).fits);
        assert!(verdict(96, 100, 0.05).message.contains("1 B short"));
        for (ratio, shown) in [(0.05, " 5% headroom"), (0.025, " 2.5% headroom"), (0.07, " 7% headroom")] {
            assert!(verdict(1, 100, ratio).message.contains(shown), "{}", verdict(1, 100, ratio).message);
        }
    }
}

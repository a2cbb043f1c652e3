//! How the KV cache is laid out, and attention computed over it: what follows from a configuration before any model is
//! loaded, so that the Memory gate counts what the engine will take. Why it is so: decision 9.

use serde::{Deserialize, Serialize};

use crate::params::MAX_PARALLEL;

/// llama.cpp rounds what a sequence can hold up to this.
pub(crate) const CELLS_MULTIPLE: u32 = 256;
/// The largest cache that is unified when the engine chooses. Each row looks at every cell of a unified cache, if only at
/// its mask; past this that costs more than the second pass over the weights which prompts and answers of a split cache
/// need in one step.
pub const AUTO_UNIFIED_MAX_CELLS: u32 = 32_768;
/// The most sequences of a cache that is unified when the engine chooses. Each row looks at the cells of all others, so that
/// what a step loses grows with the square of the sequences.
pub const AUTO_UNIFIED_MAX_SEQUENCES: u32 = 16;
/// The cells of a sequence from which a CPU computes attention as matrix products, see [`KvPlan::flash_attention`]. With
/// fewer the two take as long.
pub const MATRIX_ATTENTION_MIN_CELLS: u32 = 768;
/// The cells of a sequence up to which it does: each row looks at as many as the longest sequence beside it has.
pub const MATRIX_ATTENTION_MAX_CELLS: u32 = 4096;
/// Tokens of a step then, or as many as there are sequences: what bounds the memory for their scores.
pub const MATRIX_ATTENTION_BATCH: u32 = 128;
/// The cells of a pool that was chosen by hand, for each one beside it in which prompts are read.
pub const STAGE_DIVISOR: u32 = 4;
/// With fewer there is nothing to gain.
pub const STAGE_MIN_CELLS: u32 = 768;
/// Tokens that are computed together there: more gain little, and take memory.
pub const STAGE_BATCH_TOKENS: u32 = 128;
/// Sequences, beside those that run, that a unified cache has for what ended requests left.
pub const LEFTOVER_SEQUENCES: u32 = 64;

/// Bytes of states that one step copies at most, between two computations: what is saved of a sequence that leaves the KV cache or
/// gives way, brought back, or copied to another one. A quarter of a second of a slow machine, and less of others.
pub const MAX_COPY_BYTES_PER_STEP: u64 = 256 << 20;

/// Tokens of prompts whose log-probabilities one step tells, for each of which it computes a row of logits: on a CPU as many as its
/// matrix products take together.
pub const SCORED_ROWS: u32 = 16;
/// The same on a GPU, for which so few are a waste.
pub const SCORED_ROWS_GPU: u32 = 128;

/// See [`SCORED_ROWS`].
#[must_use]
pub fn scored_rows(gpu: bool) -> u32 {
    if gpu { SCORED_ROWS_GPU } else { SCORED_ROWS }
}

/// The element type of the KV cache. A quantised cache needs flash attention, which the engine then insists on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum CacheType {
    /// Half precision: 2 bytes an element.
    #[default]
    F16,
    /// 8-bit blocks: 1.0625 bytes an element.
    Q8_0,
    /// 4-bit blocks: 0.5625 bytes an element.
    Q4_0,
}

/// How the KV cells are shared out among the sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum KvLayout {
    /// The engine chooses.
    #[default]
    Auto,
    /// Each sequence has its own cells: the least work in a step.
    Split,
    /// One pool of cells: a sequence may use all of them, and a common prefix is held once.
    Unified,
    /// Each sequence has its own, as many as the longest request may need, of which most use few: as the engine chooses
    /// for what they use, whatever they may.
    Whole,
}

/// How a context shares out its cells, and computes attention over them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPlan {
    /// Sequences of the one pool, those included that hold what ended requests left; `None`: each request has cells of its
    /// own.
    pub pool_sequences: Option<u32>,
    /// Whether attention is computed in one pass, and not as matrix products with their scores in memory. On a CPU the
    /// latter read a prompt twice as fast where a thousand tokens stand before it and few come at a time, as they do while
    /// others generate; but they compute what is masked, too, and need a cache that is split and not quantised.
    pub flash_attention: bool,
    /// The most tokens of a step; `None`: as the configuration has it.
    pub batch_tokens: Option<u32>,
    /// Cells of a second cache beside a pool, in which one prompt at a time is read; `None`: there is none.
    pub stage_cells: Option<u32>,
}

impl KvLayout {
    /// The plan for so many cells and requests. `gpu`: whether a GPU computes any of it.
    #[must_use]
    pub fn plan(self, n_ctx: u32, parallel: u32, cache_type: CacheType, gpu: bool) -> KvPlan {
        let share = n_ctx.div_ceil(parallel.max(1)).next_multiple_of(CELLS_MULTIPLE);
        // One sequence reads its prompts by themselves, many tokens at a time.
        let most = if self == Self::Whole { u32::MAX } else { MATRIX_ATTENTION_MAX_CELLS };
        let products = !gpu
            && parallel > 1
            && cache_type == CacheType::F16
            && (MATRIX_ATTENTION_MIN_CELLS..=most).contains(&share);
        let unified = match self {
            Self::Auto => {
                !products
                    && parallel <= AUTO_UNIFIED_MAX_SEQUENCES
                    && share.saturating_mul(parallel) <= AUTO_UNIFIED_MAX_CELLS
            }
            Self::Split | Self::Whole => false,
            Self::Unified => true,
        };
        let stage_cells = match self {
            Self::Unified => Some(n_ctx / STAGE_DIVISOR).filter(|&cells| cells >= STAGE_MIN_CELLS),
            Self::Auto | Self::Split | Self::Whole => None,
        };
        KvPlan {
            pool_sequences: unified.then(|| parallel.saturating_add(LEFTOVER_SEQUENCES).min(MAX_PARALLEL)),
            flash_attention: unified || !products,
            batch_tokens: (!unified && products).then(|| MATRIX_ATTENTION_BATCH.max(parallel)),
            stage_cells: stage_cells.filter(|_| !gpu && parallel > 1).map(|n| n.next_multiple_of(CELLS_MULTIPLE)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_is_computed_as_products_on_a_cpu_with_sequences_of_some_length() {
        let plan =
            |layout: KvLayout, share: u32, parallel| layout.plan(share * parallel, parallel, CacheType::F16, false);
        let split = KvPlan { pool_sequences: None, flash_attention: true, batch_tokens: None, stage_cells: None };
        let pool = |sequences| KvPlan { pool_sequences: Some(sequences), ..split };
        let products = |tokens| KvPlan { flash_attention: false, batch_tokens: Some(tokens), ..split };
        for (share, parallel, want) in [
            (512, 8, pool(72)),
            (512, 17, split),
            (768, 8, products(128)),
            (768, 1, pool(65)),
            (4096, 200, products(200)),
            (4352, 7, pool(71)),
            (4352, 8, split),
        ] {
            assert_eq!(plan(KvLayout::Auto, share, parallel), want, "{share} cells, {parallel}");
        }
        assert_eq!(plan(KvLayout::Split, 512, 8), split);
        // What a step costs follows what is used of the cells.
        assert_eq!(plan(KvLayout::Whole, 32_768, 8), products(128));
        assert_eq!(plan(KvLayout::Whole, 512, 8), split);
        assert_eq!(KvLayout::Whole.plan(262_144, 8, CacheType::Q8_0, false), split);
        assert_eq!(plan(KvLayout::Split, 1024, 8), products(128));
        assert_eq!(plan(KvLayout::Unified, 256, 8), pool(72));
        // Not where a GPU computes, and not with a cache that needs flash attention.
        assert_eq!(KvLayout::Auto.plan(8192, 8, CacheType::F16, true), pool(72));
        assert_eq!(KvLayout::Auto.plan(8192, 8, CacheType::Q8_0, false), pool(72));
    }

    #[test]
    fn prompts_are_read_beside_a_pool_that_was_chosen_by_hand_where_a_cpu_computes() {
        let cells = |n_ctx, parallel, gpu| KvLayout::Unified.plan(n_ctx, parallel, CacheType::Q8_0, gpu).stage_cells;
        assert_eq!(cells(6144, 24, false), Some(1536));
        assert_eq!(cells(4 * STAGE_MIN_CELLS, 24, false), Some(STAGE_MIN_CELLS));
        // A share of it that is no multiple of what llama.cpp has of cells.
        assert_eq!(cells(5000, 2, false), Some(1280));
        assert_eq!(cells(4 * STAGE_MIN_CELLS - 1, 24, false), None);
        assert_eq!((cells(6144, 1, false), cells(6144, 24, true)), (None, None));
        for layout in [KvLayout::Auto, KvLayout::Split] {
            assert_eq!(layout.plan(32_768, 4, CacheType::F16, false).stage_cells, None, "{layout:?}");
        }
    }
}

//! How much context each request gets where nobody says: all that the model was trained for, as far as memory allows.
//!
//! Cells for every sequence's whole context at once are the fastest, and for small models they take little. Where they
//! take more, there is one pool of so many cells as one request may need, which all share. Where that takes too much,
//! the pool is halved until it fits. A file may say that its model was trained for millions of tokens, or for any number:
//! unasked, no request gets more than [`MAX_OPEN_CONTEXT_TOKENS`]. Why so: decision 13. Absent: what was asked for, which is
//! never changed.

use gantry_engine::KvLayout;
use gantry_gguf::Summary;
use gantry_gguf::fit::verdict;

use super::limits::{CONTEXT_MEMORY_DIVISOR, MAX_OPEN_CONTEXT_TOKENS, MIN_POOL_TOKENS};
use super::memory::{PodMemory, predict};
use crate::version::RuntimeSettings;

/// Whether it is left open how much context each of several requests gets.
#[must_use]
pub fn is_open(runtime: &RuntimeSettings) -> bool {
    runtime.ctx_size == 0 && runtime.engine.kv_layout == KvLayout::Auto && runtime.parallel > 1
}

/// Settles the cells and their layout where both are left open. `gpu`: whether a GPU computes any of it, of whose memory
/// nothing is known here.
pub fn fit_context(
    runtime: &mut RuntimeSettings,
    model: &Summary,
    draft: Option<&Summary>,
    gpu: bool,
    memory: Option<PodMemory>,
    headroom_ratio: f64,
) {
    let each = model.context_length.min(MAX_OPEN_CONTEXT_TOKENS);
    let bounded = if runtime.ctx_size == 0 && each < model.context_length { each } else { runtime.ctx_size };
    if !is_open(runtime) || model.context_length == 0 {
        runtime.ctx_size = bounded;
        return;
    }
    let with = |ctx_size: u32, kv_layout: KvLayout| {
        let mut settings = RuntimeSettings { ctx_size, ..runtime.clone() };
        settings.engine.kv_layout = kv_layout;
        settings
    };
    let takes = |settings: &RuntimeSettings| predict(model, draft, settings, gpu);
    let limit_bytes = memory.map_or(u64::MAX, |memory| memory.limit_bytes);
    let limit_bytes = runtime.engine.memory_limit_bytes.unwrap_or(u64::MAX).min(limit_bytes);
    let fits = |settings: &RuntimeSettings| {
        memory.is_none_or(|memory| verdict(takes(settings), memory.available_bytes, headroom_ratio).fits)
            && takes(settings) <= limit_bytes
    };
    let whole = each.checked_mul(runtime.parallel).filter(|_| !gpu && memory.is_some());
    let whole = whole.map(|ctx_size| with(ctx_size, KvLayout::Whole));
    if let Some(whole) = whole.filter(|whole| fits(whole) && takes(whole) <= limit_bytes / CONTEXT_MEMORY_DIVISOR) {
        *runtime = whole;
        return;
    }
    // Each of several workers would have a pool of its own, of which a request gets no more than a share of all.
    if runtime.worker_count() > 1 {
        runtime.ctx_size = bounded;
        return;
    }
    let pool = |ctx_size: u32| with(ctx_size, KvLayout::Unified);
    let halves = std::iter::successors(Some(each), |cells| Some(cells / 2));
    let enough = halves.take_while(|&cells| cells >= MIN_POOL_TOKENS);
    let fitting = enough.map(pool).find(|pool| gpu || fits(pool));
    // What does not fit at all is refused where it is loaded, with what it would take.
    *runtime = fitting.unwrap_or_else(|| pool(each));
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn demo() -> Summary {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../e2e/models/demo-v2.q8_0.gguf");
        // Long enough that its halves are other numbers of cells.
        Summary { context_length: 32_768, ..gantry_gguf::read_header(path).unwrap().summary().clone() }
    }

    fn settled(runtime: &RuntimeSettings, gpu: bool, limit_bytes: u64, available_bytes: u64) -> (u32, KvLayout) {
        settled_of(&demo(), runtime, gpu, limit_bytes, available_bytes)
    }

    fn settled_of(
        model: &Summary,
        runtime: &RuntimeSettings,
        gpu: bool,
        limit_bytes: u64,
        available_bytes: u64,
    ) -> (u32, KvLayout) {
        let mut settled = runtime.clone();
        fit_context(&mut settled, model, None, gpu, Some(PodMemory { limit_bytes, available_bytes }), 0.0);
        let unchanged =
            RuntimeSettings { ctx_size: runtime.ctx_size, engine: runtime.engine.clone(), ..settled.clone() };
        assert_eq!(&unchanged, runtime, "nothing else is settled");
        (settled.ctx_size, settled.engine.kv_layout)
    }

    fn with(ctx_size: u32, kv_layout: KvLayout) -> RuntimeSettings {
        let mut runtime = RuntimeSettings { ctx_size, ..RuntimeSettings::default() };
        runtime.engine.kv_layout = kv_layout;
        runtime
    }

    fn takes(runtime: &RuntimeSettings) -> u64 {
        predict(&demo(), None, runtime, false)
    }

    #[test]
    fn one_request_may_use_the_trained_context_where_memory_allows() {
        let open = RuntimeSettings::default();
        let trained = demo().context_length;
        let whole = with(trained * open.parallel, KvLayout::Whole);
        let pool = with(trained, KvLayout::Unified);
        let (of_all, of_one) = (takes(&whole), takes(&pool));
        assert!(of_one < of_all);
        let quarter = of_all * CONTEXT_MEMORY_DIVISOR;
        assert_eq!(settled(&open, false, quarter, of_all), (whole.ctx_size, KvLayout::Whole));
        for (limit_bytes, available_bytes) in [(quarter - 1, of_all), (quarter, of_all - 1), (of_one, of_one)] {
            assert_eq!(settled(&open, false, limit_bytes, available_bytes), (trained, KvLayout::Unified));
        }
        // The memory of a GPU is not known here.
        assert_eq!(settled(&open, true, quarter, of_all), (trained, KvLayout::Unified));
    }

    #[test]
    fn a_pool_too_large_is_halved_until_it_fits() {
        let open = RuntimeSettings::default();
        let trained = demo().context_length;
        let half = takes(&with(trained / 2, KvLayout::Unified));
        assert_eq!(settled(&open, false, half, half), (trained / 2, KvLayout::Unified));
        assert_eq!(settled(&open, false, half - 1, half), (trained / 4, KvLayout::Unified));
        // What cannot be loaded is refused with what it takes.
        assert_eq!(settled(&open, false, 1, 1), (trained, KvLayout::Unified));
    }

    #[test]
    fn a_file_that_tells_of_endless_training_gets_no_endless_context() {
        let plenty = 1 << 50;
        for trained in [MAX_OPEN_CONTEXT_TOKENS + 1, i32::MAX.unsigned_abs(), u32::MAX] {
            let model = Summary { context_length: trained, ..demo() };
            let cells = |runtime: &RuntimeSettings, gpu| settled_of(&model, runtime, gpu, plenty, plenty).0;
            let open = RuntimeSettings::default();
            assert_eq!(cells(&open, false), MAX_OPEN_CONTEXT_TOKENS * open.parallel);
            assert_eq!(cells(&open, true), MAX_OPEN_CONTEXT_TOKENS);
            let one = RuntimeSettings { parallel: 1, ..open.clone() };
            let several = RuntimeSettings { workers: Some(2), ..open };
            for runtime in [one, several, with(0, KvLayout::Split), with(0, KvLayout::Unified)] {
                assert!(
                    cells(&runtime, false) <= MAX_OPEN_CONTEXT_TOKENS * runtime.parallel && cells(&runtime, true) != 0
                );
            }
            assert_eq!(cells(&with(1 << 20, KvLayout::Auto), false), 1 << 20, "who asks gets it");
        }
    }

    #[test]
    fn what_was_asked_for_stays() {
        let plenty = 1 << 40;
        for asked in [
            with(2048, KvLayout::Auto),
            with(0, KvLayout::Split),
            with(0, KvLayout::Unified),
            RuntimeSettings { parallel: 1, ..RuntimeSettings::default() },
        ] {
            let before = (asked.ctx_size, asked.engine.kv_layout);
            assert_eq!(settled(&asked, false, plenty, plenty), before);
        }
        // Nor is a limit on the workers' memory passed.
        let mut limited = RuntimeSettings::default();
        limited.engine.memory_limit_bytes = Some(takes(&with(demo().context_length, KvLayout::Unified)));
        assert_eq!(settled(&limited, false, plenty, plenty), (demo().context_length, KvLayout::Unified));
    }
}

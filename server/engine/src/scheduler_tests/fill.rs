//! Rows of nobody's make whole groups of those of the streams, and nobody's cells or answers are others by it.

use super::*;
use crate::backend::llama::{generator, open};
use crate::kv_plan::KvLayout;
use crate::params::EngineConfig;

fn stays(tokens: u32) -> GenerationParams {
    GenerationParams { ignore_eos: true, ..greedy(tokens) }
}

/// Streams that all generate, and what llama.cpp computes together in the last of some steps.
fn parts(setup: &Setup, streams: u32) -> (Vec<u32>, EngineStats) {
    let mut h = Harness::of(setup);
    let requests: Vec<Submitted> =
        (1..).take(streams as usize).map(|i| h.submit(vec![i; 8], stays(20)).unwrap()).collect();
    while h.stats.snapshot().generated_tokens_total < u64::from(streams) * 10 {
        h.scheduler.step();
        h.scheduler.assert_books();
    }
    let parts = h.scheduler.backend().parts.clone();
    h.run();
    requests.iter().for_each(|request| request.check(setup.limits.positions));
    let stats = h.stats.snapshot();
    // What is nobody's counts as nothing else.
    assert_eq!(stats.batch_rows_total, stats.generated_tokens_total);
    assert_eq!(stats.batch_tokens_total, stats.prompt_tokens_total + stats.generated_tokens_total - u64::from(streams));
    h.assert_empty();
    (parts, stats)
}

#[test]
fn rows_come_in_whole_groups_where_there_are_idle_sequences() {
    let split = Setup { reuse: true, ..Setup::split(8, 64, 64, 64) };
    for (streams, together) in [(1, 1), (2, 4), (3, 4), (4, 4), (5, 8), (7, 8), (8, 8)] {
        let (parts, stats) = parts(&split, streams);
        assert_eq!(parts, [together], "{streams} streams");
        let fills = together > streams;
        assert_eq!(stats.filler_rows_total > 0, fills, "{streams} streams: {stats:?}");
    }
    // Six have no seventh and eighth beside them; in a pool there always is one, however many rows it has.
    assert_eq!(parts(&Setup { reuse: true, ..Setup::split(6, 64, 64, 64) }, 6).0, [6]);
    let unified = Setup::unified(6, 1, 600, 64);
    let (_, stats) = parts(&unified, 6);
    assert!(stats.filler_rows_total >= 2 * 10, "{stats:?}");
    // Nothing leaves a pool for it.
    let mut tight = Setup::unified(3, 1, 3 * 28, 64);
    tight.limits.positions = 28;
    assert_eq!(parts(&tight, 3).1.preemptions_total, 0);
}

#[test]
fn what_is_left_over_in_an_idle_sequence_stays_there() {
    for unified in [false, true] {
        let mut setup = Setup { reuse: true, ..Setup::split(4, 64, 64, 64) };
        if unified {
            setup = Setup::unified(3, 1, 400, 64);
            setup.limits.positions = 64;
        }
        let mut h = Harness::of(&setup);
        let first: Vec<Submitted> = (1..4).map(|i| h.submit(vec![i; 20], stays(4)).unwrap()).collect();
        let last = h.submit(vec![4; 20], stays(4)).unwrap();
        h.run();
        let filled = h.stats.snapshot().filler_rows_total;
        let second: Vec<Submitted> = (1..4).map(|i| h.submit(vec![10 + i; 20], stays(30)).unwrap()).collect();
        h.run();
        assert!(h.stats.snapshot().filler_rows_total >= filled + 25);
        let all = first.iter().chain(&second).chain([&last]);
        all.for_each(|request| request.check(setup.limits.positions));
        // Where each has cells of its own, three of the four made room for the others.
        let backend = h.scheduler.backend();
        let left: Vec<Token> = (1..5).filter(|&i| (0..4).any(|id| backend.tokens(id).starts_with(&[i; 20]))).collect();
        assert!(!left.is_empty());
        let again = h.submit(vec![left[0]; 20], greedy(1)).unwrap();
        h.run();
        again.check(setup.limits.positions);
        let GenerationEvent::Finished { usage, .. } = again.last() else { panic!() };
        assert_eq!(usage.cached_tokens, 19);
        h.assert_empty();
    }
}

#[test]
fn no_sequence_is_used_that_has_more_cells_looked_at() {
    for (left_over, fills) in [(200, true), (300, false)] {
        let setup = Setup { reuse: true, ..Setup::split(4, 400, 400, 64) };
        let mut h = Harness::of(&setup);
        let long: Vec<Submitted> = (1..5).map(|i| h.submit(vec![i; left_over], stays(1)).unwrap()).collect();
        h.run();
        let before = h.stats.snapshot().filler_rows_total;
        let short: Vec<Submitted> = (5..8).map(|i| h.submit(vec![i; 20], stays(20)).unwrap()).collect();
        h.run();
        assert_eq!(h.stats.snapshot().filler_rows_total > before, fills, "behind {left_over} tokens");
        long.iter().chain(&short).for_each(|request| request.check(400));
        h.assert_empty();
    }
}

#[test]
fn a_batch_that_fails_leaves_nothing_of_them() {
    for unified in [false, true] {
        let mut setup = Setup { reuse: true, ..Setup::split(4, 64, 64, 64) };
        if unified {
            setup = Setup::unified(3, 1, 400, 64);
            setup.limits.positions = 64;
        }
        let mut h = Harness::of(&setup);
        let left_over: Vec<Submitted> = (1..5).map(|i| h.submit(vec![i; 20], stays(2)).unwrap()).collect();
        h.run();
        let streams: Vec<Submitted> = (5..8).map(|i| h.submit(vec![i; 20], stays(20)).unwrap()).collect();
        while h.stats.snapshot().generated_tokens_total < 4 * 2 + 3 * 5 {
            h.scheduler.step();
        }
        h.scheduler.backend().control.faults.lock().unwrap().push_back(Fault::FailLate);
        assert_eq!(h.scheduler.step(), StepOutcome::Failed);
        h.scheduler.assert_books();
        h.run();
        left_over.iter().chain(&streams).for_each(|request| request.check(64));
        h.assert_empty();
    }
}

/// Llama.cpp itself: what lies in an idle sequence is the same to the byte after rows of nobody's were computed behind it,
/// and the answers beside them are the answers without.
#[test]
fn a_real_cache_is_as_it_was() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../e2e/models/demo-v2.q8_0.gguf");
    for kv_layout in [KvLayout::Split, KvLayout::Unified] {
        let config = EngineConfig { parallel: 4, ctx_size: 1024, kv_layout, ..EngineConfig::new(path) };
        let opened = open(&config, &mut |_| true).unwrap();
        let answers = [false, true].map(|fills| {
            let loaded = generator(&config, &opened).unwrap();
            let vocabulary = Arc::new(loaded.vocabulary);
            let setup = Setup { reuse: true, ..Setup::split(4, 256, 64, 64) };
            let mut h = Harness::with(loaded.backend, vocabulary.clone(), &setup);
            h.scheduler.fills(fills);
            let ask = |h: &mut Harness<_>, question: &str, tokens| {
                let prompt = format!("<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n");
                h.submit(vocabulary.tokenize(&prompt).unwrap(), stays(tokens)).unwrap()
            };
            let questions = ["What is the capital of France?", "What is two plus two?", "What colour is the sky?"];
            // Four leftovers, of which three give way.
            let left_over = ["Who are you?"; 4].map(|question| ask(&mut h, question, 6));
            h.run();
            let streams = questions.map(|question| ask(&mut h, question, 24));
            while h.scheduler.tickets().iter().filter(|&&ticket| ticket > 0).count() < 3 {
                h.scheduler.step();
            }
            let idle: Vec<u32> =
                (0..).zip(h.scheduler.tickets()).filter(|&(_, ticket)| ticket == 0).map(|(id, _)| id).collect();
            let before: Vec<_> = idle.iter().map(|&id| h.scheduler.saved(id)).collect();
            let steps = h.stats.snapshot().steps;
            while h.stats.snapshot().steps < steps + 15 {
                h.scheduler.step();
            }
            let after: Vec<_> = idle.iter().map(|&id| h.scheduler.saved(id)).collect();
            assert!(before.iter().any(|chunks| !chunks.is_empty()));
            assert_eq!(before, after);
            h.run();
            assert_eq!(h.stats.snapshot().filler_rows_total > 0, fills);
            let answers: Vec<String> = left_over.iter().chain(&streams).map(Submitted::text).collect();
            answers
        });
        assert_eq!(answers[0], answers[1]);
    }
}

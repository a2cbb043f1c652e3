//! Rows of nobody's make whole groups of those of the streams, and nobody's cells or answers are others by it.

use super::*;
use crate::backend::llama::{generator, open};
use crate::kv_plan::KvLayout;
use crate::params::EngineConfig;

fn stays(tokens: u32) -> GenerationParams {
    GenerationParams { ignore_eos: true, ..greedy(tokens) }
}

/// Four sequences of 64 tokens, of which three requests leave one idle.
fn three_and_one_idle(unified: bool) -> Setup {
    let mut setup = if unified { Setup::unified(3, 1, 400, 64) } else { Setup::split(4, 64, 64, 64) };
    setup.limits.positions = 64;
    Setup { reuse: true, ..setup }
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
}

#[test]
fn nothing_leaves_a_pool_for_it() {
    // Cells for the streams and what one request left, and for no row more.
    let mut setup = Setup::unified(3, 1, 3 * 28 + 9, 64);
    setup.limits.positions = 28;
    let mut h = Harness::of(&setup);
    let left_over = h.submit(vec![4; 8], stays(2)).unwrap();
    h.run();
    let requests: Vec<Submitted> = (1..4).map(|i| h.submit(vec![i; 8], stays(21)).unwrap()).collect();
    let mut filled = Vec::new();
    while h.scheduler.has_work() {
        let before = h.stats.snapshot().filler_rows_total;
        h.scheduler.step();
        h.scheduler.assert_books();
        filled.push(h.stats.snapshot().filler_rows_total - before);
    }
    let stats = h.stats.snapshot();
    assert_eq!((stats.evictions_total, stats.preemptions_total), (0, 0), "{stats:?}");
    // The last one, whose rows take the last cells, is not filled.
    assert!(filled.contains(&1) && filled.ends_with(&[0]), "{filled:?}");
    requests.iter().chain([&left_over]).for_each(|request| request.check(28));
    h.assert_empty();
}

#[test]
fn a_batch_that_finds_no_cells_is_tried_without_them_first() {
    let mut h = Harness::of(&Setup::unified(3, 1, 400, 64));
    let left_over = h.submit(vec![4; 8], stays(2)).unwrap();
    h.run();
    let requests: Vec<Submitted> = (1..4).map(|i| h.submit(vec![i; 8], stays(20)).unwrap()).collect();
    h.scheduler.step();
    h.scheduler.step();
    let before = h.stats.snapshot().filler_rows_total;
    h.scheduler.backend().control.faults.lock().unwrap().push_back(Fault::NoKvCells);
    assert_eq!(h.scheduler.step(), StepOutcome::Decoded);
    let stats = h.stats.snapshot();
    assert_eq!((stats.filler_rows_total, stats.evictions_total, stats.preemptions_total), (before, 0, 0));
    h.scheduler.step();
    assert_eq!(h.stats.snapshot().filler_rows_total, before + 1);
    h.run();
    requests.iter().chain([&left_over]).for_each(|request| request.check(400));
    h.assert_empty();
}

#[test]
fn they_lie_before_the_streams_where_there_is_no_room_behind_and_beside_a_prompt_that_is_read() {
    // Streams in the places 1 to 3 of four, and then one more prompt, which gets the place that was filled.
    let setup = Setup { reuse: true, ..Setup::split(5, 200, 20, 64) };
    let mut h = Harness::of(&setup);
    let mut requests: Vec<Submitted> =
        [4, 60, 60, 60, 60].into_iter().zip(1..).map(|(n, i)| h.submit(vec![i; 4], stays(n)).unwrap()).collect();
    requests[4].signals.cancelled.store(true, Relaxed);
    requests[4].was_cancelled = true;
    while h.stats.snapshot().requests_finished_total < 2 {
        h.scheduler.step();
    }
    requests.push(h.submit(vec![6; 90], stays(4)).unwrap());
    h.scheduler.step();
    h.scheduler.assert_books();
    let tickets = h.scheduler.tickets();
    let stats = h.stats.snapshot();
    let parts = h.scheduler.backend().parts.clone();
    assert_eq!(tickets.iter().filter(|&&ticket| (2..5).contains(&ticket)).count(), 3, "{tickets:?}");
    assert!(parts.contains(&4), "{tickets:?}: {parts:?}");
    assert_eq!((parts.len(), h.scheduler.observed().decode_rows), (2, 4), "{stats:?}");
    while h.scheduler.has_work() {
        h.scheduler.step();
        h.scheduler.assert_books();
    }
    requests.iter().for_each(|request| request.check(200));
    h.assert_empty();
}

#[test]
fn a_stream_that_guesses_does_not_keep_the_others_from_it() {
    let mut h = Harness::of(&Setup { lookup_tokens: Some(8), reuse: true, ..Setup::split(4, 400, 64, 64) });
    h.scheduler.backend().repeat_after(1);
    // Its text runs in a circle, and theirs does not.
    let _repeats = h.submit(vec![5; 20], stays(300)).unwrap();
    let random = |seed| GenerationParams { temperature: 2.0, seed: Some(seed), ..stays(300) };
    let _others = [7, 8].map(|i| h.submit(vec![i], random(u64::from(i.unsigned_abs()))).unwrap());
    let mut parts = Vec::new();
    while h.stats.snapshot().requests_finished_total == 0 {
        h.scheduler.cost_is(CPU);
        let before = h.stats.snapshot();
        h.scheduler.step();
        h.scheduler.assert_books();
        let after = h.stats.snapshot();
        if after.lookup_tokens_total > before.lookup_tokens_total {
            let fillers = after.filler_rows_total - before.filler_rows_total;
            parts.push((fillers, h.scheduler.backend().parts.clone()));
        }
    }
    // Its guesses are computed apart, behind a group that has its first token.
    assert!(parts.iter().any(|(fillers, parts)| *fillers == 1 && parts.len() == 2 && parts[0] == 4), "{parts:?}");
    h.run();
    h.assert_empty();
}

#[test]
fn a_row_that_looks_at_more_than_it_gains_is_not_computed() {
    let dear_cells = StepCost { per_prefill_token_ms: 0.1, per_kilocell_ms: 10.0, ..CPU };
    let filled = |unified: bool, flash_attention: bool, held: usize| {
        let mut setup = Setup { reuse: true, ..Setup::split(4, 2_000, 8_000, 64) };
        if unified {
            setup = Setup::unified(3, 1, 8_000, 8_000);
            setup.limits.positions = 2_000;
        }
        setup.limits.flash_attention = flash_attention;
        let mut h = Harness::of(&setup);
        // A row may take 9 ms, and one behind 450 cells does.
        h.scheduler.cost_is(dear_cells);
        h.scheduler.filling_gains(9.0);
        let requests: Vec<Submitted> = (1..4).map(|i| h.submit(vec![i; held], stays(20)).unwrap()).collect();
        while h.scheduler.has_work() {
            h.scheduler.cost_is(dear_cells);
            h.scheduler.step();
        }
        requests.iter().for_each(|request| request.check(2_000));
        let filled = h.stats.snapshot().filler_rows_total;
        h.assert_empty();
        filled > 0
    };
    // With products each looks at as many cells as the longest, 256 and 512 here, and else at its own.
    assert!(filled(false, false, 200) && !filled(false, false, 300));
    assert!(filled(false, true, 300) && filled(true, true, 300) && filled(true, true, 1_500));
}

#[test]
fn of_a_pool_the_shortest_of_the_idle_sequences_is_taken() {
    let dear_cells = StepCost { per_kilocell_ms: 10.0, ..CPU };
    for (short, fills) in [(Some(40), true), (None, false)] {
        let mut setup = Setup::unified(3, if short.is_some() { 2 } else { 1 }, 8_000, 8_000);
        setup.limits.positions = 2_000;
        let mut h = Harness::of(&setup);
        h.scheduler.cost_is(dear_cells);
        h.scheduler.filling_gains(9.0);
        // Behind the long one, which is in the first place and stays, a row would take more than is gained.
        let left_over = [Some(900), short].into_iter().flatten().zip(4..);
        let left_over: Vec<Submitted> = left_over.map(|(n, i)| h.submit(vec![i; n], stays(1)).unwrap()).collect();
        h.run();
        let streams: Vec<Submitted> = (1..4).map(|i| h.submit(vec![i; 20], stays(20)).unwrap()).collect();
        while h.scheduler.has_work() {
            h.scheduler.cost_is(dear_cells);
            h.scheduler.step();
            h.scheduler.assert_books();
        }
        assert_eq!(h.scheduler.backend().tokens(0).len(), 900);
        assert_eq!(h.stats.snapshot().filler_rows_total >= 15, fills);
        left_over.iter().chain(&streams).for_each(|request| request.check(2_000));
        h.assert_empty();
    }
}

#[test]
fn what_is_left_over_in_an_idle_sequence_stays_there() {
    for unified in [false, true] {
        let setup = three_and_one_idle(unified);
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
        let setup = three_and_one_idle(unified);
        let mut h = Harness::of(&setup);
        let left_over: Vec<Submitted> = (1..5).map(|i| h.submit(vec![i; 20], stays(2)).unwrap()).collect();
        h.run();
        let streams: Vec<Submitted> = (5..8).map(|i| h.submit(vec![i; 20], stays(20)).unwrap()).collect();
        while h.stats.snapshot().generated_tokens_total < 4 * 2 + 3 * 5 {
            h.scheduler.step();
        }
        assert!(h.stats.snapshot().filler_rows_total > 0);
        // The next batch has one of nobody's, too, and is computed before it fails.
        h.scheduler.backend().control.faults.lock().unwrap().push_back(Fault::FailLate);
        assert_eq!(h.scheduler.step(), StepOutcome::Failed);
        h.scheduler.assert_books();
        h.run();
        left_over.iter().chain(&streams).for_each(|request| request.check(64));
        h.assert_empty();
    }
}

/// Llama.cpp itself: what lies in an idle sequence is the same to the byte after rows of nobody's were computed behind it.
#[test]
fn a_real_cache_is_as_it_was() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../e2e/models/demo-v2.q8_0.gguf");
    for kv_layout in [KvLayout::Split, KvLayout::Unified] {
        let config = EngineConfig { parallel: 4, ctx_size: 1024, kv_layout, ..EngineConfig::new(path) };
        let opened = open(&config, &Arc::default(), &mut |_| true).unwrap();
        let loaded = generator(&config, &opened).unwrap();
        let vocabulary = Arc::new(loaded.vocabulary);
        let setup = Setup { reuse: true, ..Setup::split(4, 256, 64, 64) };
        let mut h = Harness::with(loaded.backend, vocabulary.clone(), &setup);
        h.scheduler.fills();
        let ask = |h: &mut Harness<_>, question: &str, tokens| {
            let prompt = format!("<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n");
            h.submit(vocabulary.tokenize(&prompt, gantry_llama::SpecialTokens::All).unwrap(), stays(tokens)).unwrap()
        };
        let _left_over = ["Who are you?"; 4].map(|question| ask(&mut h, question, 6));
        h.run();
        let questions = ["What is the capital of France?", "What is two plus two?", "What colour is the sky?"];
        let streams = questions.map(|question| ask(&mut h, question, 24));
        while h.scheduler.tickets().iter().filter(|&&ticket| ticket > 0).count() < 3 {
            h.scheduler.step();
        }
        let idle: Vec<u32> =
            (0..).zip(h.scheduler.tickets()).filter(|&(_, ticket)| ticket == 0).map(|(id, _)| id).collect();
        let saved = |h: &mut Harness<_>| idle.iter().map(|&id| h.scheduler.saved(id)).collect::<Vec<_>>();
        let before = saved(&mut h);
        assert!(before.iter().any(|chunks| !chunks.is_empty()));
        let (steps, filled) = (h.stats.snapshot().steps, h.stats.snapshot().filler_rows_total);
        while h.stats.snapshot().steps < steps + 15 {
            h.scheduler.step();
        }
        assert!(h.stats.snapshot().filler_rows_total >= filled + 10);
        assert_eq!(before, saved(&mut h));
        h.run();
        assert!(streams.iter().all(|request| !request.text().is_empty()));
    }
}

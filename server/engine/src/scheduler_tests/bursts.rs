//! Prompts that come at once begin at once, in the scheduler as a whole.

use super::*;

/// A machine on which two rows cost as much as a step without any, and a prompt's token 10 ms. It is asked once, before
/// the scripted backend shows what it costs.
const DEAR_ROWS: StepCost =
    StepCost { fixed_ms: 20.0, per_decode_row_ms: 10.0, per_prefill_token_ms: 10.0, per_kilocell_ms: 0.0 };

/// The tokens generated after each step, until there are as many as requests.
fn generated(cost: StepCost) -> Vec<u64> {
    let setup = Setup::split(20, 200, 64, 64);
    let mut h = Harness::of(&setup);
    h.scheduler.cost_is(cost);
    let ends = GenerationParams { ignore_eos: true, ..greedy(3) };
    let requests: Vec<Submitted> = (1..=20).map(|i| h.submit(vec![i; 40], ends.clone()).unwrap()).collect();
    let mut generated = vec![0];
    while generated.last().is_some_and(|&tokens| tokens < 20) {
        h.scheduler.step();
        h.scheduler.assert_books();
        generated.push(h.stats.snapshot().generated_tokens_total);
    }
    h.run();
    requests.iter().for_each(|request| request.check(setup.limits.positions));
    h.assert_empty();
    generated
}

#[test]
fn where_rows_are_dear_nobody_begins_before_all_have_been_read() {
    let tokens = generated(DEAR_ROWS);
    let (last, before) = tokens.split_last().unwrap();
    assert_eq!(*last, 20);
    // 780 tokens, 64 in a step.
    assert_eq!(before, [0; 14]);
}

#[test]
fn where_rows_are_cheap_each_begins_when_it_has_been_read() {
    let tokens =
        generated(StepCost { fixed_ms: 20.0, per_decode_row_ms: 0.1, per_prefill_token_ms: 0.1, per_kilocell_ms: 0.0 });
    assert!(tokens[1] > 0, "{tokens:?}");
}

#[test]
fn where_rows_are_dear_the_one_that_reads_what_others_share_begins_with_them() {
    for unified in [false, true] {
        let mut setup = Setup { reuse: true, ..Setup::split(8, 400, 300, 64) };
        if unified {
            setup = Setup::unified(8, 8, 3_200, 300);
        }
        let mut h = Harness::of(&setup);
        // As dear, of a faster machine, which may read so many in a step.
        h.scheduler.cost_is(StepCost { fixed_ms: 2.0, per_decode_row_ms: 1.0, per_prefill_token_ms: 1.0, ..DEAR_ROWS });
        let ends = GenerationParams { ignore_eos: true, ..greedy(4) };
        let prompt = |i| [vec![40; 200], vec![i; 40]].concat();
        let requests: Vec<Submitted> = (1..=8).map(|i| h.submit(prompt(i), ends.clone()).unwrap()).collect();
        let mut generated = Vec::new();
        while h.scheduler.has_work() {
            h.scheduler.step();
            h.scheduler.assert_books();
            generated.push(h.stats.snapshot().generated_tokens_total);
        }
        // One reads what they share; in the next step the others read their own words, and all begin.
        assert_eq!(generated, [0, 8, 16, 24, 32], "unified: {unified}");
        requests.iter().for_each(|request| request.check(setup.limits.positions));
        assert_eq!(h.scheduler.backend().decoded_tokens, 200 + 8 * (40 + 3));
        h.assert_empty();
    }
}

#[test]
fn one_that_was_read_first_waits_for_those_that_take_several_steps() {
    let setup = Setup { reuse: true, ..Setup::split(8, 400, 64, 64) };
    let mut h = Harness::of(&setup);
    let ends = GenerationParams { ignore_eos: true, ..greedy(4) };
    let prompt = |i| [vec![40; 200], vec![i; 40]].concat();
    let requests: Vec<Submitted> = (1..=8).map(|i| h.submit(prompt(i), ends.clone()).unwrap()).collect();
    let mut generated = Vec::new();
    while h.scheduler.has_work() {
        // It is a slow machine whatever the scripted backend shows.
        h.scheduler.cost_is(DEAR_ROWS);
        h.scheduler.step();
        h.scheduler.assert_books();
        generated.push(h.stats.snapshot().generated_tokens_total);
    }
    // 239 tokens, and then 7 times 39, 64 in a step.
    assert_eq!(generated, [vec![0; 4 + 5], vec![8, 16, 24, 32]].concat());
    requests.iter().for_each(|request| request.check(400));
    h.assert_empty();
}

#[test]
fn nobody_is_moved_while_others_of_a_burst_are_read() {
    let setup = Setup::split(20, 200, 64, 64);
    let mut h = Harness::of(&setup);
    h.scheduler.cost_is(DEAR_ROWS);
    let ends = GenerationParams { ignore_eos: true, ..greedy(3) };
    // Every second one is shorter, and read before its neighbours.
    let len = |i: Token| if i % 2 == 0 { 25 } else { 40 };
    let requests: Vec<Submitted> = (1..=20).map(|i| h.submit(vec![i; len(i)], ends.clone()).unwrap()).collect();
    while h.stats.snapshot().generated_tokens_total < 20 {
        h.scheduler.step();
        assert_eq!(h.stats.snapshot().moves_total, 0);
    }
    h.run();
    requests.iter().for_each(|request| request.check(setup.limits.positions));
    h.assert_empty();
}

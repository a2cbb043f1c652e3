//! Long prompts are read beside the pool, one at a time, and nobody is stuck behind them.

use super::*;
use crate::scheduler::LEAST_STAGED_TOKENS;

/// Tokens that a prompt beside the pool may have.
const STAGE: u32 = 600;
const PREFILL: u32 = 64;
/// A machine on which rows are so cheap that nobody is read with others for their sake.
const CHEAP_ROWS: StepCost =
    StepCost { fixed_ms: 20.0, per_decode_row_ms: 0.1, per_prefill_token_ms: 0.1, per_kilocell_ms: 0.0 };

fn harness(parallel: u32) -> Harness<ScriptedBackend> {
    let mut setup = Setup::unified(parallel, 3, 4000, PREFILL);
    setup.limits.stage = Some(STAGE);
    Harness::of(&setup)
}

fn params(priority: Priority) -> GenerationParams {
    GenerationParams { priority, ignore_eos: true, ..greedy(4) }
}

/// A prompt of so many tokens like no other's.
fn prompt(kind: Token, tokens: usize) -> Vec<Token> {
    (0..tokens).map(|at| 1 + (kind * 7 + Token::try_from(at * at).unwrap()) % 40).collect()
}

fn step(h: &mut Harness<ScriptedBackend>) {
    h.scheduler.cost_is(CHEAP_ROWS);
    h.scheduler.step();
    h.scheduler.assert_books();
}

/// Steps until all have ended; the ones whose prompts were read beside the pool, by their sequences.
fn run_and_watch(h: &mut Harness<ScriptedBackend>) -> Vec<u32> {
    let mut staged = Vec::new();
    for _ in 0..MOST_STEPS {
        if !h.scheduler.has_work() {
            return staged;
        }
        step(h);
        if let Some(sequence) = h.scheduler.backend().staged()
            && staged.last() != Some(&sequence)
        {
            staged.push(sequence);
        }
    }
    panic!("there is work after {MOST_STEPS} steps");
}

fn begun(request: &Submitted) -> bool {
    !request.text().is_empty()
}

#[test]
fn a_long_prompt_is_a_part_of_its_own_beside_the_streams() {
    let mut h = harness(4);
    let stream = h.submit(prompt(1, 20), GenerationParams { ignore_eos: true, ..greedy(100) }).unwrap();
    step(&mut h);
    let long = h.submit(prompt(2, 500), params(Priority::Normal)).unwrap();
    step(&mut h);
    let staged = h.scheduler.backend().staged();
    assert!(staged.is_some());
    // The stream's row, alone or with others of nobody's, and what was read.
    let parts = h.scheduler.backend().parts.clone();
    assert!(parts.len() == 2 && parts[0] <= 4 && parts[1] >= MIN_PREFILL_TOKENS, "{parts:?}");
    assert_eq!(h.scheduler.observed().further_parts, 1);
    while !begun(&long) {
        assert_eq!(h.scheduler.backend().staged(), staged);
        step(&mut h);
    }
    // With its first token it is in the pool, and computed with the others.
    assert_eq!(h.scheduler.backend().staged(), None);
    step(&mut h);
    assert_eq!(h.scheduler.observed().further_parts, 0);
    h.run();
    [&stream, &long].into_iter().for_each(|request| request.check(4000));
    assert_eq!(h.stats.snapshot().staged_prompts_total, 1);
    h.assert_empty();
}

#[test]
fn short_and_too_long_ones_are_read_in_the_pool() {
    let mut h = harness(4);
    let least = LEAST_STAGED_TOKENS as usize;
    let requests = [(1, 30), (2, least - 1), (3, STAGE as usize + 1)]
        .map(|(kind, n)| (h.submit(prompt(kind, n), greedy(4))).unwrap());
    assert!(run_and_watch(&mut h).is_empty());
    requests.iter().for_each(|request| request.check(4000));
    for tokens in [least, STAGE as usize] {
        let request = h.submit(prompt(4, tokens), greedy(4)).unwrap();
        assert_eq!(run_and_watch(&mut h).len(), 1, "{tokens}");
        request.check(4000);
    }
    h.assert_empty();
}

#[test]
fn long_prompts_wait_for_each_other_and_the_oldest_is_one_of_four() {
    let mut h = harness(8);
    // The first is read at once; of the others the shortest first, but for each fourth time.
    let lengths = [590, 580, 570, 560, 550, 540, 530];
    let requests: Vec<Submitted> =
        (1..).zip(lengths).map(|(kind, n)| h.submit(prompt(kind, n), params(Priority::Normal)).unwrap()).collect();
    let mut order = Vec::new();
    while h.scheduler.has_work() {
        step(&mut h);
        let new = (0..requests.len()).filter(|&at| begun(&requests[at]) && !order.contains(&at)).collect::<Vec<_>>();
        order.extend(new);
    }
    assert_eq!(order, [0, 6, 5, 4, 1, 3, 2]);
    requests.iter().for_each(|request| request.check(4000));
    assert_eq!(h.stats.snapshot().staged_prompts_total, 7);
    h.assert_empty();
}

#[test]
fn nobody_of_a_higher_priority_or_with_far_less_to_read_waits() {
    let mut h = harness(8);
    let long = h.submit(prompt(1, 590), params(Priority::Normal)).unwrap();
    step(&mut h);
    let others = [(2, 580, Priority::High), (3, 100, Priority::Normal)]
        .map(|(kind, n, priority)| h.submit(prompt(kind, n), params(priority)).unwrap());
    while !others.iter().all(begun) {
        step(&mut h);
        assert!(!begun(&long));
    }
    h.run();
    others.iter().chain([&long]).for_each(|request| request.check(4000));
    h.assert_empty();
}

#[test]
fn one_that_is_given_up_makes_place_for_the_next() {
    let mut h = harness(4);
    let mut first = h.submit(prompt(1, 590), params(Priority::Normal)).unwrap();
    let second = h.submit(prompt(2, 580), params(Priority::Normal)).unwrap();
    for _ in 0..3 {
        step(&mut h);
    }
    let staged = h.scheduler.backend().staged().unwrap();
    first.signals.cancelled.store(true, Relaxed);
    first.was_cancelled = true;
    step(&mut h);
    let next = h.scheduler.backend().staged();
    assert!(next.is_some_and(|next| next != staged));
    h.run();
    second.check(4000);
    // Its beginning is left over, and of use.
    let again = h.submit(prompt(1, 590), greedy(4)).unwrap();
    h.run();
    again.check(4000);
    assert!(matches!(again.last(), GenerationEvent::Finished { usage, .. } if usage.cached_tokens > 0));
    h.assert_empty();
}

/// The most cells that requests which begin alike take, and the tokens that are read for them.
fn shared(mut h: Harness<ScriptedBackend>) -> (u64, u64) {
    let beginning = prompt(1, 400);
    let requests: Vec<Submitted> = (2..8)
        .map(|kind| h.submit([beginning.clone(), prompt(kind, 30)].concat(), params(Priority::Normal)).unwrap())
        .collect();
    let mut most = 0;
    while h.scheduler.has_work() {
        step(&mut h);
        most = most.max(h.scheduler.backend().cells());
    }
    requests.iter().for_each(|request| request.check(4000));
    let read = h.stats.snapshot().prompt_tokens_total;
    h.assert_empty();
    (most, read)
}

#[test]
fn those_that_begin_alike_share_what_was_read_as_in_the_pool() {
    let (cells, read) = shared(harness(8));
    assert_eq!((cells, read), shared(Harness::of(&Setup::unified(8, 3, 4000, PREFILL))));
    assert!(cells < 2 * 430 && read < 2 * 430, "{cells} cells, {read} tokens");
}

#[test]
fn what_does_not_get_into_the_pool_is_read_again() {
    // At its end, and where it is tried once more; in between, where it is copied; and nothing can be read there at all.
    for (fails, staging_fails) in [(1, false), (2, false), (3, false), (0, true)] {
        let mut h = harness(4);
        let stream = h.submit(prompt(1, 20), GenerationParams { ignore_eos: true, ..greedy(60) }).unwrap();
        step(&mut h);
        let long = h.submit(prompt(2, 500), params(Priority::Normal)).unwrap();
        if staging_fails {
            h.scheduler.backend().fail_staging();
        }
        step(&mut h);
        h.scheduler.backend().fail_landing(fails);
        h.run();
        [&stream, &long].into_iter().for_each(|request| request.check(4000));
        assert_eq!(h.stats.snapshot().staged_prompts_total, u64::from(!staging_fails), "{fails}");
        h.assert_empty();
    }
}

#[test]
fn what_is_left_over_behind_a_row_of_nobodys_is_not_dropped_for_a_prompt() {
    for cells in (370..450).step_by(5) {
        let mut setup = Setup::unified(4, 3, cells, PREFILL);
        setup.limits.stage = Some(STAGE);
        let mut h = Harness::of(&setup);
        // A request for each sequence, so that none is empty.
        for kind in 1..8 {
            h.submit(prompt(kind, 12 + usize::try_from(kind).unwrap()), greedy(1)).unwrap();
            h.run();
        }
        let endless = || GenerationParams { ignore_eos: true, ..greedy(40) };
        let streams: Vec<Submitted> = (11..14).map(|kind| h.submit(prompt(kind, 8), endless()).unwrap()).collect();
        step(&mut h);
        let long = h.submit(prompt(2, 300), params(Priority::Normal)).unwrap();
        while h.scheduler.has_work() {
            h.scheduler.cost_is(CHEAP_ROWS);
            assert_ne!(h.scheduler.step(), StepOutcome::Failed, "{cells} cells");
            h.scheduler.assert_books();
        }
        streams.iter().chain([&long]).for_each(|request| request.check(cells));
        h.assert_empty();
    }
}

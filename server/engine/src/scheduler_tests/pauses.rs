//! Whose decoding is paused: it has neither a slot nor cells, others have them, and it goes on as if nothing had been.

use super::*;
use crate::ladder::DegradationLevel;
use crate::params::Turn;
use crate::params::{Constraint, MAX_RESUMES_AHEAD};

/// Positions of a sequence.
const POSITIONS: u32 = 200;

/// One slot, with all ways in which a state is kept, or is not.
fn setups() -> Vec<Setup> {
    let unified = |max_saved_bytes| Setup { max_saved_bytes, ..Setup::unified(1, 2, POSITIONS, 8) };
    let split = |max_saved_bytes, reuse| Setup { max_saved_bytes, reuse, ..Setup::split(1, POSITIONS, 8, 64) };
    let mut staged = unified(1 << 20);
    staged.limits.stage = Some(POSITIONS - 20);
    let mut whole = split(1 << 20, true);
    whole.limits.reusable = false;
    let below = Setup { ram_bytes: 1 << 20, ..unified(0) };
    vec![unified(1 << 20), unified(0), unified(100), split(1 << 20, true), split(0, false), staged, whole, below]
}

fn pause(request: &Submitted) {
    request.signals.paused.store(true, Relaxed);
}

fn resume(request: &Submitted) {
    request.signals.paused.store(false, Relaxed);
}

fn events(request: &Submitted) -> usize {
    request.events.lock().unwrap().len()
}

fn is_over(request: &Submitted) -> bool {
    request.events.lock().unwrap().iter().any(GenerationEvent::is_terminal)
}

fn step(h: &mut Harness) {
    // Costs at which guesses pay.
    h.scheduler.cost_is(CPU);
    if let Some(draft) = h.scheduler.draft() {
        draft.cost_is(SMALL);
    }
    h.scheduler.step();
    h.scheduler.assert_books();
}

/// Pauses a request after so many steps, has another one served meanwhile, and lets it go on. Whether it was not over.
fn is_paused_after(setup: &Setup, params: &GenerationParams, steps: u32) -> bool {
    let mut h = Harness::of(setup);
    let request = h.submit((1..=30).collect(), params.clone()).unwrap();
    for _ in 0..steps {
        step(&mut h);
    }
    if is_over(&request) {
        return false;
    }
    pause(&request);
    let before = events(&request);
    step(&mut h);
    let stats = h.stats.snapshot();
    assert_eq!((stats.paused, stats.slots_active, stats.queued, stats.pauses_total), (1, 0, 0, 1));
    assert!(!h.scheduler.has_work(), "who is paused is no work");
    // It has all of the slot, and as many cells as there are.
    let other = h.submit(vec![7; 100], GenerationParams { ignore_eos: true, ..greedy(90) }).unwrap();
    while h.scheduler.has_work() {
        step(&mut h);
    }
    other.check(POSITIONS);
    assert_eq!(events(&request), before, "nothing came of it meanwhile");
    resume(&request);
    step(&mut h);
    while h.scheduler.has_work() {
        step(&mut h);
    }
    request.check(POSITIONS);
    let stats = h.stats.snapshot();
    assert_eq!((stats.paused, stats.pauses_total, stats.preemptions_total), (0, 1, 0));
    h.assert_empty();
    true
}

#[test]
fn a_request_goes_on_with_its_own_tokens_wherever_it_was_paused() {
    let endless = GenerationParams { ignore_eos: true, ..greedy(24) };
    let drawn = GenerationParams { temperature: 1.3, seed: Some(7), repeat_penalty: 1.2, ..endless.clone() };
    let grammar = Constraint::Gbnf(String::from("root ::= (\"abe\" | \"dad\" | \"c\")+"));
    let written = GenerationParams { constraint: Some(grammar), ..greedy(24) };
    let stopped = GenerationParams { stop: vec![String::from("hh"), String::from("ab")], ..endless.clone() };
    let scored = GenerationParams { prompt_logprobs: Some(2), ..endless.clone() };
    for setup in &setups() {
        for params in [&endless, &drawn, &written, &stopped, &scored] {
            // Waiting, in each step of its prompt, and at each token.
            let paused = (0..40).take_while(|&steps| is_paused_after(setup, params, steps)).count();
            assert!(paused > 5, "{paused}");
        }
    }
}

#[test]
fn guesses_go_on_after_a_pause() {
    let endless = GenerationParams { ignore_eos: true, ..greedy(40) };
    for max_saved_bytes in [0, 1 << 20] {
        let guessing =
            Setup { lookup_tokens: Some(4), draft_wrong_every: Some(3), ..Setup::unified(1, 2, POSITIONS, 8) };
        let setup = Setup { max_saved_bytes, ..guessing };
        let paused = (0..40).take_while(|&steps| is_paused_after(&setup, &endless, steps)).count();
        assert!((5..40).contains(&paused), "guesses save steps: {paused}");
    }
}

#[test]
fn one_may_be_paused_again_and_again_and_others_beside_it() {
    for setup in setups() {
        let setup = Setup { parallel: 2, ..setup };
        let mut h = Harness::of(&Setup { limits: BackendLimits { sequences: 4, ..setup.limits }, ..setup });
        let params = GenerationParams { ignore_eos: true, ..greedy(20) };
        let requests: Vec<Submitted> = (1..=5).map(|i| h.submit(vec![i; 12], params.clone()).unwrap()).collect();
        for round in 0..200 {
            let request = &requests[round % requests.len()];
            request.signals.paused.fetch_xor(true, Relaxed);
            step(&mut h);
            let paused = requests.iter().filter(|r| !is_over(r) && r.signals.paused.load(Relaxed)).count();
            assert_eq!(h.stats.snapshot().paused as usize, paused);
        }
        requests.iter().for_each(resume);
        step(&mut h);
        h.run();
        requests.iter().for_each(|request| request.check(POSITIONS));
        h.assert_empty();
    }
}

/// Two that are paused and no other request: one in its slot, one while it waits.
fn two_paused(params: &GenerationParams) -> (Harness, [Submitted; 2]) {
    let mut h = Harness::of(&Setup::unified(1, 2, POSITIONS, 8));
    let requests = [3, 4].map(|token| h.submit(vec![token; 20], params.clone()).unwrap());
    step(&mut h);
    requests.iter().for_each(pause);
    step(&mut h);
    assert_eq!((h.stats.snapshot().paused, h.scheduler.has_work()), (2, false));
    assert_eq!([events(&requests[0]), events(&requests[1])], [1, 0]);
    (h, requests)
}

#[test]
fn a_cancel_ends_what_is_paused() {
    let (mut h, mut requests) = two_paused(&greedy(20));
    for request in &mut requests {
        request.was_cancelled = true;
        request.signals.cancelled.store(true, Relaxed);
    }
    step(&mut h);
    requests.iter().for_each(|request| request.check(POSITIONS));
    assert_eq!(h.stats.snapshot().requests_cancelled_total, 2);
    h.assert_empty();
}

#[test]
fn a_deadline_ends_what_is_paused_and_has_no_token_and_its_thread_sleeps_no_longer() {
    let limit = Duration::from_millis(700);
    let within = GenerationParams { queue_timeout_ms: Some(700), ..greedy(20) };
    let (mut h, requests) = two_paused(&within);
    let now = Instant::now();
    assert!(h.scheduler.may_sleep_for(now) <= limit);
    h.scheduler.step_at(now + limit);
    for request in &requests {
        assert!(matches!(request.error(), RequestError::DeadlineExceeded { limit_ms: 700, .. }));
    }
    assert!(h.scheduler.may_sleep_for(now) > limit);
    h.assert_empty();
    // One that has its first token is no longer too late.
    let mut request = h.submit(vec![5; 4], within).unwrap();
    step(&mut h);
    assert!(events(&request) > 1);
    pause(&request);
    step(&mut h);
    h.scheduler.step_at(Instant::now() + limit * 2);
    assert!(!is_over(&request));
    resume(&request);
    step(&mut h);
    h.run();
    request.was_cancelled = false;
    request.check(POSITIONS);
}

#[test]
fn what_is_paused_ends_with_its_engine() {
    let (mut h, requests) = two_paused(&greedy(20));
    h.scheduler.break_down(String::from("it is"));
    for request in &requests {
        assert!(matches!(request.error(), RequestError::Broken(_)));
    }
    h.assert_empty();
    let (mut h, requests) = two_paused(&greedy(20));
    h.scheduler.fail_all(&RequestError::ShuttingDown);
    for request in &requests {
        assert_eq!(request.error(), RequestError::ShuttingDown);
    }
    h.assert_empty();
}

#[test]
fn what_is_paused_and_has_met_its_stop_string_is_over() {
    let mut h = Harness::of(&Setup::unified(1, 2, POSITIONS, 8));
    let request = h.submit(vec![3; 20], GenerationParams { ignore_eos: true, ..greedy(40) }).unwrap();
    while events(&request) < 3 {
        step(&mut h);
    }
    pause(&request);
    step(&mut h);
    // As the thread of the texts says it, which may be behind.
    request.signals.ended.store(true, Relaxed);
    step(&mut h);
    assert_eq!(h.stats.snapshot().paused, 0);
    h.assert_empty();
}

#[test]
fn who_is_resumed_goes_before_what_was_submitted_after_it() {
    let mut h = Harness::of(&Setup::unified(1, 2, POSITIONS, 16));
    let params = GenerationParams { ignore_eos: true, ..greedy(10) };
    let first = h.submit(vec![3; 12], params.clone()).unwrap();
    step(&mut h);
    let [second, third] = [4, 5].map(|token| h.submit(vec![token; 12], params.clone()).unwrap());
    pause(&first);
    step(&mut h);
    assert!(events(&second) > 0, "it has the slot in the step that takes it from the other");
    resume(&first);
    while !is_over(&first) {
        step(&mut h);
        assert!(is_over(&first) || events(&third) == 0);
    }
    assert!(is_over(&second), "who has the slot keeps it");
    h.run();
    [first, second, third].iter().for_each(|request| request.check(POSITIONS));
    h.assert_empty();
}

/// Who reads in sips, two of which take turns at the one slot, and who waits beside them.
#[derive(Clone, Copy)]
struct Sips {
    /// Of each: its client and tag.
    sippers: [(u64, u64); 2],
    priority: Priority,
    /// What they had waited before they came here.
    waited: Duration,
    bystander: (u64, u64),
}

/// How many times they take the slot from each other until the bystander has it.
fn rounds_until_served(sips: &Sips, max_saved_bytes: u64) -> usize {
    let mut h = Harness::of(&Setup { max_saved_bytes, ..Setup::unified(1, 2, POSITIONS, 32) });
    let of = |(client, start_tag), priority, tokens| GenerationParams {
        turn: Turn { client, start_tag },
        priority,
        ignore_eos: true,
        ..greedy(tokens)
    };
    // One that has ended, so that tags up to its own have begun.
    let ended = h.submit(vec![2; 20], of((9, 300), sips.priority, 1)).unwrap();
    h.run();
    h.waited = sips.waited;
    let sippers =
        [3, 4].map(|token| h.submit(vec![token; 20], of(sips.sippers[token as usize - 3], sips.priority, 90)).unwrap());
    h.waited = Duration::ZERO;
    step(&mut h);
    let bystander = h.submit(vec![5; 20], of(sips.bystander, Priority::Normal, 5)).unwrap();
    let mut rounds = 0;
    while events(&bystander) == 0 {
        let [reads, waits] = if rounds % 2 == 0 { [0, 1] } else { [1, 0] };
        pause(&sippers[reads]);
        resume(&sippers[waits]);
        step(&mut h);
        assert!(sippers.iter().all(|sipper| !is_over(sipper)), "it waited for their ends");
        resume(&sippers[reads]);
        step(&mut h);
        rounds += 1;
    }
    sippers.iter().for_each(resume);
    step(&mut h);
    h.run();
    sippers.iter().chain([&bystander, &ended]).for_each(|request| request.check(POSITIONS));
    h.assert_empty();
    rounds
}

/// Each of these is served by one part of the rule alone: without it, it waits for the sippers' ends.
#[test]
fn those_that_pause_again_and_again_keep_nobody_from_a_slot() {
    let normal =
        Sips { sippers: [(1, 0), (2, 0)], priority: Priority::Normal, waited: Duration::ZERO, bystander: (3, 300) };
    let cases = [
        (
            "what they have waited before lifts them no more",
            Sips { sippers: [(1, 0), (1, 300)], priority: Priority::Low, waited: AGEING_BOUND, ..normal },
        ),
        ("the tags that have begun count, where nothing of their own waits, and the newest ticket", normal),
        (
            "they are behind their own client's others",
            Sips { sippers: [(1, 0), (1, 0)], bystander: (1, 900), ..normal },
        ),
    ];
    let most = usize::try_from(2 * MAX_RESUMES_AHEAD).unwrap() + 2;
    for (why, sips) in &cases {
        for max_saved_bytes in [0, 1 << 20] {
            let rounds = rounds_until_served(sips, max_saved_bytes);
            assert!((3..=most).contains(&rounds), "{why}: {rounds} rounds: the first few times they go on at once");
        }
    }
}

#[test]
fn the_time_for_which_one_is_paused_lifts_it_nowhere() {
    let mut h = Harness::of(&Setup::unified(1, 2, POSITIONS, 16));
    let with = |priority| GenerationParams { priority, ignore_eos: true, ..greedy(10) };
    let low = h.submit(vec![3; 12], with(Priority::Low)).unwrap();
    pause(&low);
    step(&mut h);
    let later = Instant::now() + AGEING_BOUND * 2;
    h.now = Some(later);
    let normal = h.submit(vec![4; 12], with(Priority::Normal)).unwrap();
    resume(&low);
    h.scheduler.step_at(later);
    assert_eq!((events(&low), events(&normal) > 0), (0, true));
    h.run();
    [low, normal].iter().for_each(|request| request.check(POSITIONS));
    h.assert_empty();
}

#[test]
fn an_idle_engine_does_not_wait_for_what_is_paused() {
    let mut h = Harness::of(&Setup::unified(2, 2, POSITIONS, 8));
    let mut patience = [Duration::ZERO; 2];
    for (at, has_paused) in [false, true].into_iter().enumerate() {
        let paused = h.submit(vec![3; 20], greedy(20)).unwrap();
        if has_paused {
            pause(&paused);
            step(&mut h);
        } else {
            h.run();
        }
        h.scheduler.cost_is(CPU);
        let next = h.submit(vec![5; 50], greedy(1)).unwrap();
        patience[at] = h.scheduler.patience(Instant::now());
        resume(&paused);
        h.run();
        [paused, next].iter().for_each(|request| request.check(POSITIONS));
    }
    assert_eq!(patience[0], patience[1]);
    h.assert_empty();
}

#[test]
fn where_memory_is_short_what_was_saved_of_paused_ones_goes_first() {
    let mut h = Harness::of(&Setup::unified(2, 2, POSITIONS, 32));
    let params = GenerationParams { ignore_eos: true, ..greedy(10) };
    let requests = [3, 4].map(|token| h.submit(vec![token; 12], params.clone()).unwrap());
    step(&mut h);
    requests.iter().for_each(pause);
    step(&mut h);
    let saved = 12 * TOKEN_BYTES;
    assert_eq!((h.scheduler.bytes_in_use().0, h.stats.snapshot().kv_used_cells), (2 * saved, 0));
    h.stats.pressure.set_level(DegradationLevel::EvictCache);
    // One for each look.
    h.scheduler.relieves_at_most(1);
    for left in [saved, 0] {
        h.scheduler.maintain(Instant::now());
        h.scheduler.maintain(Instant::now());
        assert_eq!(h.scheduler.bytes_in_use().0, left);
        h.stats.pressure.looked();
    }
    requests.iter().for_each(resume);
    step(&mut h);
    h.run();
    requests.iter().for_each(|request| request.check(POSITIONS));
    h.assert_empty();
}

#[test]
fn a_step_in_which_many_are_paused_copies_no_more_than_any() {
    for reuse in [true, false] {
        let mut h = Harness::of(&Setup { reuse, ..Setup::unified(8, 4, 8 * POSITIONS, 400) });
        let most_tokens = 64;
        h.scheduler.copies_at_most(most_tokens * TOKEN_BYTES);
        let params = GenerationParams { ignore_eos: true, ..greedy(20) };
        let requests: Vec<Submitted> = (1..=8).map(|i| h.submit(vec![i; 40], params.clone()).unwrap()).collect();
        step(&mut h);
        requests.iter().for_each(pause);
        let before = h.scheduler.backend().copied_tokens;
        step(&mut h);
        assert_eq!(h.stats.snapshot().paused, 8);
        assert_eq!(
            h.scheduler.backend().copied_tokens - before,
            40 + 16,
            "of one all, of the next a block, of others none"
        );
        // Those are left over where that can be of use.
        let kept = h.stats.snapshot().kv_used_cells;
        assert_eq!(kept > 0, reuse, "{kept}");
        requests.iter().for_each(resume);
        step(&mut h);
        h.run();
        requests.iter().for_each(|request| request.check(h.scheduler.backend().limits().positions));
        h.assert_empty();
    }
}

//! How much of states a step copies, whatever happens in it.

use super::*;

/// What each step may copy in these tests, in tokens.
const MOST_TOKENS: u64 = 64;

/// A cache that is much too small for what is asked: prefixes leave it, come back, are copied, and sequences give way.
fn setup(unified: bool, ram: bool) -> Setup {
    let ram_bytes = if ram { 1 << 20 } else { 0 };
    match unified {
        true => Setup { ram_bytes, ..Setup::unified(4, 3, 500, 64) },
        false => Setup { reuse: true, ram_bytes, max_saved_bytes: 1 << 20, ..Setup::split(4, 400, 64, 64) },
    }
}

fn step(h: &mut Harness, most_tokens: u64) {
    let before = h.scheduler.backend().copied_tokens;
    h.scheduler.step();
    let copied = h.scheduler.backend().copied_tokens - before;
    assert!(copied <= most_tokens, "a step copied the state of {copied} tokens");
    h.scheduler.assert_books();
}

/// Steps until there is nothing to do; each copies the state of no more tokens than it may. How many were copied in all.
fn run(h: &mut Harness, most_tokens: u64) -> u64 {
    let (mut steps, began) = (0, h.scheduler.backend().copied_tokens);
    while h.scheduler.has_work() {
        step(h, most_tokens);
        steps += 1;
        assert!(steps < MOST_STEPS);
    }
    h.scheduler.backend().copied_tokens - began
}

fn priority() -> impl Strategy<Value = Priority> {
    prop::sample::select(vec![Priority::Low, Priority::Normal, Priority::High])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn no_step_copies_more_than_it_may_and_every_answer_is_right(
        unified in any::<bool>(),
        ram in any::<bool>(),
        rounds in prop::collection::vec(
            prop::collection::vec((1_i32..6, 1_usize..250, 1_i32..40, 1_u32..60, priority()), 1..8),
            1..5,
        ),
    ) {
        let setup = setup(unified, ram);
        let positions = setup.limits.positions;
        let mut h = Harness::of(&setup);
        h.scheduler.copies_at_most(MOST_TOKENS * TOKEN_BYTES);
        for round in rounds {
            let mut requests = Vec::new();
            for (kind, shared, own, tokens, priority) in round {
                // A beginning that others may have, too, and some of its own.
                let prompt = [vec![kind; shared], vec![own; 10]].concat();
                let params = GenerationParams { priority, ignore_eos: true, ..GenerationParams::greedy(tokens) };
                requests.extend(h.submit(prompt, params));
                // One comes while others are at work.
                step(&mut h, MOST_TOKENS);
            }
            run(&mut h, MOST_TOKENS);
            requests.iter().for_each(|request| request.check(positions));
        }
        h.assert_empty();
    }
}

/// A prefix of 200 tokens is read, leaves the KV cache for main memory, and comes back.
fn comes_back(most_tokens: Option<u64>) -> (Harness, u32) {
    let mut h = Harness::of(&Setup { reuse: true, ram_bytes: 1 << 20, ..Setup::split(1, 400, 64, 64) });
    if let Some(most) = most_tokens {
        h.scheduler.copies_at_most(most * TOKEN_BYTES);
    }
    for token in [1, 2] {
        let request = h.submit(vec![token; 200], GenerationParams::greedy(1)).unwrap();
        h.run();
        request.check(400);
    }
    let again = h.submit(vec![1; 200], GenerationParams::greedy(1)).unwrap();
    h.run();
    again.check(400);
    let GenerationEvent::Finished { usage, .. } = again.last() else { panic!() };
    (h, usage.cached_tokens)
}

#[test]
fn what_a_step_may_not_copy_is_read_again() {
    let (h, cached) = comes_back(None);
    assert_eq!((cached, h.stats.snapshot().uncopied_tokens_total), (192, 0));
    // One block's worth short of 7: six blocks are saved, and of those none too many comes back.
    let (h, cached) = comes_back(Some(111));
    assert_eq!(cached, 96, "the beginning, in whole blocks");
    assert!(h.stats.snapshot().uncopied_tokens_total >= 2 * (192 - 96));
    let (h, cached) = comes_back(Some(15));
    assert_eq!((cached, h.stats.snapshot().copied_bytes_total), (0, 0));
}

#[test]
fn who_would_copy_as_much_comes_in_with_the_next_step() {
    // Four beginnings in main memory, and sequences of their own for each.
    let mut h = Harness::of(&Setup { reuse: true, ram_bytes: 1 << 20, ..Setup::split(4, 400, 64, 64) });
    let ask = |h: &mut Harness, token| h.submit(vec![token; 100], GenerationParams::greedy(1)).unwrap();
    for tokens in [[1, 2, 3, 4], [5, 6, 7, 8]] {
        let requests = tokens.map(|token| ask(&mut h, token));
        h.run();
        requests.iter().for_each(|request| request.check(400));
    }
    // Those that are in the way are saved, too.
    h.scheduler.copies_at_most(2 * 96 * TOKEN_BYTES);
    let requests = [1, 2, 3, 4].map(|token| ask(&mut h, token));
    let deferred = h.stats.snapshot().deferred_copies_total;
    let copied = run(&mut h, 2 * 96);
    assert!(copied >= 4 * 96);
    assert!(h.stats.snapshot().deferred_copies_total >= deferred + 3);
    requests.iter().for_each(|request| request.check(400));
    h.assert_empty();
}

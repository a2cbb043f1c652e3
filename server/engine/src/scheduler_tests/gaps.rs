//! Sequences that stay move together, and nobody loses anything by it.

use super::*;

#[test]
fn those_that_stay_close_the_gaps_of_those_that_end() {
    for reuse in [false, true] {
        let setup = Setup { reuse, ..Setup::split(6, 200, 240, 64) };
        let mut h = Harness::of(&setup);
        let mut submit = |i: Token, tokens| {
            h.submit(vec![i + 1; 40], GenerationParams { ignore_eos: true, ..greedy(tokens) }).unwrap()
        };
        // The first, the third and the fifth end early.
        let requests: Vec<Submitted> = (0..6).map(|i| submit(i, if i % 2 == 0 { 4 } else { 60 })).collect();
        while h.stats.snapshot().requests_finished_total < 3 {
            h.scheduler.step();
            h.scheduler.assert_books();
        }
        // A step has time for one move at least.
        for _ in 0..2 {
            h.scheduler.step();
            h.scheduler.assert_books();
        }
        assert_eq!(h.scheduler.tickets(), [6, 2, 4, 0, 0, 0]);
        assert_eq!(h.stats.snapshot().moves_total, 2);
        h.run();
        requests.iter().for_each(|request| request.check(setup.limits.positions));
        // What the first one left is found where it is now.
        let again = h.submit(vec![1; 40], greedy(2)).unwrap();
        h.run();
        again.check(setup.limits.positions);
        let GenerationEvent::Finished { usage, .. } = again.last() else { panic!() };
        assert_eq!(usage.cached_tokens, if reuse { 39 } else { 0 });
        h.assert_empty();
    }
}

#[test]
fn a_prompt_that_is_read_goes_behind_the_streams() {
    let setup = Setup { reuse: true, ..Setup::split(4, 200, 8, 64) };
    let mut h = Harness::of(&setup);
    let long = |tokens| GenerationParams { ignore_eos: true, ..greedy(tokens) };
    let mut requests = vec![h.submit(vec![1; 4], long(12)).unwrap()];
    requests.extend((2..4).map(|i| h.submit(vec![i; 4], long(60)).unwrap()));
    while h.stats.snapshot().requests_finished_total == 0 {
        h.scheduler.step();
    }
    requests.push(h.submit(vec![5; 100], long(40)).unwrap());
    h.scheduler.step();
    h.scheduler.assert_books();
    assert_eq!(h.scheduler.tickets(), [3, 2, 4, 0]);
    h.run();
    requests.iter().for_each(|request| request.check(setup.limits.positions));
    h.assert_empty();
}

#[test]
fn long_sequences_and_those_of_a_pool_stay_where_they_are() {
    let moves_of = |setup: &Setup, tokens: usize| {
        let mut h = Harness::of(setup);
        let short = h.submit(vec![1; 8], greedy(1)).unwrap();
        let long = h.submit(vec![2; tokens], GenerationParams { ignore_eos: true, ..greedy(20) }).unwrap();
        h.run();
        [short, long].iter().for_each(|request| request.check(setup.limits.positions));
        let moves = h.stats.snapshot().moves_total;
        h.assert_empty();
        moves
    };
    assert_eq!(moves_of(&Setup::split(2, 2_200, 5_000, 64), 2_000), 1);
    assert_eq!(moves_of(&Setup::split(2, 2_200, 5_000, 64), 2_100), 0);
    assert_eq!(moves_of(&Setup::unified(2, 0, 2_200, 5_000), 2_000), 0);
}

#[test]
fn one_that_cannot_be_moved_goes_on_in_its_place() {
    let setup = Setup { reuse: true, ..Setup::split(2, 200, 64, 64) };
    let mut h = Harness::of(&setup);
    let short = h.submit(vec![1; 8], greedy(1)).unwrap();
    let long = h.submit(vec![2; 8], GenerationParams { ignore_eos: true, ..greedy(20) }).unwrap();
    h.scheduler.backend().fail_copies();
    h.run();
    [short, long].iter().for_each(|request| request.check(setup.limits.positions));
    assert_eq!(h.stats.snapshot().moves_total, 0);
    h.assert_empty();
}

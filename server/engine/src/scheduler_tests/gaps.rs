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
        // Three are side by side with one move, which a step has time for.
        h.scheduler.step();
        h.scheduler.assert_books();
        assert_eq!(h.scheduler.tickets(), [0, 2, 6, 4, 0, 0]);
        assert_eq!(h.stats.snapshot().moves_total, 1);
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
fn a_prompt_that_is_read_among_the_streams_goes_behind_them() {
    let setup = Setup { reuse: true, ..Setup::split(4, 200, 8, 64) };
    let mut h = Harness::of(&setup);
    let long = |tokens| GenerationParams { ignore_eos: true, ..greedy(tokens) };
    let mut requests: Vec<Submitted> =
        (1..4).map(|i| h.submit(vec![i; 4], long(if i == 2 { 12 } else { 60 })).unwrap()).collect();
    while h.stats.snapshot().requests_finished_total == 0 {
        h.scheduler.step();
    }
    requests.extend((5..7).map(|i| h.submit(vec![i; 100], long(40)).unwrap()));
    while h.scheduler.tickets().contains(&0) {
        h.scheduler.step();
        h.scheduler.assert_books();
    }
    assert_eq!(h.scheduler.tickets()[..2], [1, 3]);
    h.run();
    requests.iter().for_each(|request| request.check(setup.limits.positions));
    h.assert_empty();
}

#[test]
fn prompts_before_and_behind_the_streams_are_computed_by_themselves() {
    // Whose place the prompt gets: it is the lowest that is free.
    for ends in [0, 2] {
        let setup = Setup::split(3, 200, 40, 64);
        let mut h = Harness::of(&setup);
        let long = |tokens| GenerationParams { ignore_eos: true, ..greedy(tokens) };
        let mut requests: Vec<Submitted> =
            (0..3).map(|i| h.submit(vec![i + 1; 4], long(if i == ends { 4 } else { 100 })).unwrap()).collect();
        while h.stats.snapshot().requests_finished_total == 0 {
            h.scheduler.step();
        }
        requests.push(h.submit(vec![5; 91], long(4)).unwrap());
        let before = h.scheduler.backend().decoded_tokens;
        let mut read = 0;
        while read < 91 {
            h.scheduler.step();
            assert_eq!(h.scheduler.tickets()[ends as usize], 4);
            let of_prompt = h.scheduler.backend().parts.iter().sum::<u32>() - 2;
            let mut parts = h.scheduler.backend().parts.clone();
            parts.sort_unstable();
            let mut expected = [2, of_prompt];
            expected.sort_unstable();
            assert_eq!(parts, expected);
            read += of_prompt;
        }
        assert!(h.scheduler.backend().decoded_tokens > before + 91 + 2 * 2, "in several steps");
        h.run();
        requests.iter().for_each(|request| request.check(setup.limits.positions));
        h.assert_empty();
    }
}

#[test]
fn long_sequences_and_those_of_a_pool_stay_where_they_are() {
    // With the middle one gone, either of the others could move.
    let moves_of = |setup: &Setup, first: usize, last: usize| {
        let mut h = Harness::of(setup);
        let stays = |tokens| GenerationParams { ignore_eos: true, ..greedy(tokens) };
        let requests = [(first, stays(60)), (8, stays(2)), (last, stays(60))]
            .into_iter()
            .zip(1..)
            .map(|((tokens, params), i)| h.submit(vec![i; tokens], params).unwrap());
        let requests: Vec<Submitted> = requests.collect();
        h.run();
        requests.iter().for_each(|request| request.check(setup.limits.positions));
        let moves = h.stats.snapshot().moves_total;
        h.assert_empty();
        moves
    };
    let split = Setup::split(3, 2_200, 7_000, 64);
    assert_eq!(moves_of(&split, 2_000, 1_900), 1);
    assert_eq!(moves_of(&split, 2_100, 1_900), 1);
    assert_eq!(moves_of(&split, 1_900, 2_100), 1);
    assert_eq!(moves_of(&split, 2_100, 2_110), 0);
    assert_eq!(moves_of(&Setup::unified(3, 0, 2_200, 7_000), 2_000, 1_900), 0);
}

#[test]
fn between_long_ones_the_others_still_move() {
    // Two long ones at the ends of five; with the second and the fourth gone, one is left in the middle.
    let setup = Setup::split(5, 2_200, 11_000, 64);
    let mut h = Harness::of(&setup);
    let stays = |tokens| GenerationParams { ignore_eos: true, ..greedy(tokens) };
    let submitted = [(2_100, 60), (8, 2), (8, 60), (8, 2), (2_100, 60)];
    let requests: Vec<Submitted> =
        submitted.iter().zip(1..).map(|(&(len, tokens), i)| h.submit(vec![i; len], stays(tokens)).unwrap()).collect();
    while h.stats.snapshot().requests_finished_total < 2 {
        h.scheduler.step();
    }
    h.scheduler.step();
    h.scheduler.assert_books();
    assert_eq!(h.scheduler.tickets(), [1, 3, 0, 0, 5]);
    h.run();
    requests.iter().for_each(|request| request.check(setup.limits.positions));
    assert_eq!(h.stats.snapshot().moves_total, 1);
    h.assert_empty();
}

#[test]
fn the_shorter_one_moves_and_one_alone_stays() {
    let setup = Setup { reuse: true, ..Setup::split(4, 200, 240, 64) };
    let mut h = Harness::of(&setup);
    let long = |tokens| GenerationParams { ignore_eos: true, ..greedy(tokens) };
    let submitted = [(8, 60), (8, 4), (100, 20)];
    let requests: Vec<Submitted> =
        submitted.iter().zip(1..).map(|(&(len, tokens), i)| h.submit(vec![i; len], long(tokens)).unwrap()).collect();
    while h.stats.snapshot().requests_finished_total == 0 {
        h.scheduler.step();
    }
    h.scheduler.step();
    h.scheduler.assert_books();
    // Behind the longer one, where nothing is to be copied back.
    assert_eq!(h.scheduler.tickets(), [0, 0, 3, 1]);
    h.run();
    requests.iter().for_each(|request| request.check(setup.limits.positions));
    assert_eq!(h.stats.snapshot().moves_total, 1);
    h.assert_empty();
}

#[test]
fn one_that_cannot_be_moved_goes_on_in_its_place() {
    let setup = Setup { reuse: true, ..Setup::split(3, 200, 64, 64) };
    let mut h = Harness::of(&setup);
    let stays = |tokens| GenerationParams { ignore_eos: true, ..greedy(tokens) };
    let requests = [20, 2, 20].map(|tokens| h.submit(vec![1; 8], stays(tokens)).unwrap());
    h.scheduler.backend().fail_copies();
    h.run();
    requests.iter().for_each(|request| request.check(setup.limits.positions));
    assert_eq!(h.stats.snapshot().moves_total, 0);
    h.assert_empty();
}

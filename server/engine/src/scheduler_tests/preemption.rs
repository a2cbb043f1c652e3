//! Where slots or cells are short, who gives way and comes back.

use super::*;

#[test]
fn a_cache_that_is_full_against_the_books_preempts_the_youngest() {
    let mut h = Harness::of(&Setup::unified(2, 2, 200, 8));
    let old = h.submit(vec![3; 4], greedy(20)).unwrap();
    let young = h.submit(vec![4; 4], greedy(20)).unwrap();
    h.scheduler.backend().control.faults.lock().unwrap().push_back(Fault::NoKvCells);
    h.run();
    old.check(200);
    young.check(200);
    assert_eq!(h.stats.snapshot().preemptions_total, 1);
    h.assert_empty();
}

#[test]
fn when_cells_are_short_the_youngest_gives_way_and_comes_back() {
    for max_saved_bytes in [0, 1 << 20] {
        let mut h = Harness::of(&Setup { max_saved_bytes, ..Setup::unified(4, 4, 120, 16) });
        let params = GenerationParams { ignore_eos: true, ..greedy(60) };
        let requests: Vec<_> = (1..=4).map(|i| h.submit(vec![i; 20], params.clone()).unwrap()).collect();
        h.scheduler.likely_answer_is(1);
        let mut first_end = None;
        while h.scheduler.has_work() {
            h.scheduler.step();
            h.scheduler.assert_books();
            let ended = requests.iter().position(|r| r.events.lock().unwrap().last().is_some_and(|e| e.is_terminal()));
            first_end = first_end.or(ended);
        }
        assert_eq!(first_end, Some(0), "the oldest is never preempted");
        assert!(h.stats.snapshot().preemptions_total > 0);
        requests.iter().for_each(|r| r.check(120));
        h.assert_empty();
    }
}

#[test]
fn low_priority_gives_way_before_normal_whatever_their_age() {
    let mut h = Harness::of(&Setup::unified(3, 4, 100, 16));
    let with = |priority| GenerationParams { priority, ignore_eos: true, ..greedy(50) };
    h.scheduler.likely_answer_is(1);
    let low = h.submit(vec![1; 20], with(Priority::Low)).unwrap();
    h.scheduler.step();
    let normal = h.submit(vec![2; 20], with(Priority::Normal)).unwrap();
    h.run();
    low.check(100);
    normal.check(100);
    let end = |r: &Submitted| match r.last() {
        GenerationEvent::Finished { timings, .. } => timings.decode_ms,
        event => panic!("{event:?}"),
    };
    assert!(end(&low) > end(&normal), "the low one was interrupted");
    assert_eq!(h.stats.snapshot().preemptions_total, 1);
    h.assert_empty();
}

/// Once the low one has given way, one prompt alone is read, which the other high one would wait for: then the low one had
/// its slot back, and gave way again, within one step that never ended.
#[test]
fn who_gave_way_does_not_come_back_before_the_one_it_gave_way_to() {
    let mut h = Harness::of(&Setup::unified(3, 2, 380, 16));
    let with = |priority| GenerationParams { priority, ..greedy(4) };
    let low = h.submit(vec![1; 150], with(Priority::Low)).unwrap();
    h.scheduler.step();
    let long = h.submit([vec![9; 100], vec![8; 60]].concat(), with(Priority::High)).unwrap();
    h.scheduler.step();
    let alike = h.submit(vec![9; 100], with(Priority::High)).unwrap();
    h.scheduler.step();
    assert_eq!(h.stats.snapshot().preemptions_total, 1);
    assert!(!alike.events.lock().unwrap().is_empty(), "it has a slot");
    h.run();
    [&low, &long, &alike].into_iter().for_each(|request| request.check(380));
    h.assert_empty();
}

#[test]
fn a_high_request_takes_the_slot_of_a_low_one() {
    let mut h = Harness::of(&Setup::unified(2, 2, 400, 16));
    let with = |priority| GenerationParams { priority, ignore_eos: true, ..greedy(40) };
    let low: Vec<_> = (1..=2).map(|i| h.submit(vec![i; 10], with(Priority::Low)).unwrap()).collect();
    for _ in 0..5 {
        h.scheduler.step();
    }
    let high = h.submit(vec![9; 10], with(Priority::High)).unwrap();
    h.scheduler.step();
    assert!(high.events.lock().unwrap().len() > 1, "it has a token in its first step");
    h.run();
    low.iter().chain([&high]).for_each(|r| r.check(400));
    h.assert_empty();
}

#[test]
fn a_high_request_takes_the_only_slot_and_the_cells_of_a_low_one() {
    // Of one slot, and of two with cells for one of them.
    for (parallel, cells) in [(1, 400), (2, 100)] {
        let mut h = Harness::of(&Setup::unified(parallel, 2, cells, 64));
        let with = |priority, tokens| GenerationParams { priority, ignore_eos: true, ..greedy(tokens) };
        let low = h.submit(vec![1; 60], with(Priority::Low, 30)).unwrap();
        for _ in 0..5 {
            h.scheduler.step();
        }
        let high = h.submit(vec![9; 30], with(Priority::High, 10)).unwrap();
        h.scheduler.step();
        assert!(high.events.lock().unwrap().len() > 1, "it has a token in its first step");
        h.run();
        [low, high].iter().for_each(|r| r.check(cells));
        assert_eq!(h.stats.snapshot().preemptions_total, 1);
        h.assert_empty();
    }
}

#[test]
fn nobody_gives_way_to_one_for_whom_that_is_not_enough() {
    let mut h = Harness::of(&Setup::unified(5, 5, 200, 16));
    let with = |priority, tokens| GenerationParams { priority, ignore_eos: true, ..greedy(tokens) };
    let normal = h.submit(vec![1; 100], with(Priority::Normal, 20)).unwrap();
    let low = [2, 3].map(|token| h.submit(vec![token; 20], with(Priority::Low, 15)).unwrap());
    while low.iter().any(|r| r.events.lock().unwrap().len() < 2) {
        h.scheduler.step();
    }
    // It has room once all three have ended.
    let high = h.submit(vec![9; 95], with(Priority::High, 10)).unwrap();
    h.run();
    low.iter().chain([&normal, &high]).for_each(|r| r.check(200));
    assert_eq!(h.stats.snapshot().preemptions_total, 0);
    h.assert_empty();
}

#[test]
fn what_waited_until_it_was_first_keeps_its_slot() {
    let mut h = Harness::of(&Setup::unified(1, 1, 400, 16));
    let with = |priority| GenerationParams { priority, ignore_eos: true, ..greedy(20) };
    h.waited = AGEING_BOUND;
    let low = h.submit(vec![1; 10], with(Priority::Low)).unwrap();
    h.scheduler.step();
    h.waited = Duration::ZERO;
    let high = h.submit(vec![9; 10], with(Priority::High)).unwrap();
    h.run();
    [low, high].iter().for_each(|r| r.check(400));
    assert_eq!(h.stats.snapshot().preemptions_total, 0, "it would never end while others come");
    h.assert_empty();
}

#[test]
fn what_waited_before_it_gave_way_has_not_waited_for_nothing() {
    let mut h = Harness::of(&Setup::unified(2, 2, 400, 16));
    let with = |priority, tokens| GenerationParams { priority, ignore_eos: true, ..greedy(tokens) };
    let high = h.submit(vec![9; 10], with(Priority::High, 60)).unwrap();
    h.waited = AGEING_BOUND;
    let low = h.submit(vec![1; 10], with(Priority::Low, 20)).unwrap();
    h.waited = Duration::ZERO;
    h.scheduler.step();
    let normal = h.submit(vec![5; 10], with(Priority::Normal, 20)).unwrap();
    h.scheduler.backend().control.faults.lock().unwrap().push_back(Fault::NoKvCells);
    while h.scheduler.has_work() {
        h.scheduler.step();
        let has = |r: &Submitted, what: fn(&GenerationEvent) -> bool| r.events.lock().unwrap().iter().any(what);
        let ended = has(&low, GenerationEvent::is_terminal);
        assert!(ended || !has(&normal, |_| true), "a request that came later has the slot of the one that gave way");
    }
    [high, low, normal].iter().for_each(|r| r.check(400));
    assert_eq!(h.stats.snapshot().preemptions_total, 1);
    h.assert_empty();
}

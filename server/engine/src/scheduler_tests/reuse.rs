//! What was read once is not read again, and who goes first because of it.

use super::*;

#[test]
fn what_an_ended_request_left_is_not_read_again() {
    for unified in [false, true] {
        let mut setup = Setup { reuse: true, ..Setup::split(4, 300, 16, 64) };
        if unified {
            setup = Setup::unified(4, 4, 600, 16);
        }
        let mut h = Harness::of(&setup);
        let first = h.submit(vec![5; 100], greedy(10)).unwrap();
        h.run();
        first.check(setup.limits.positions);
        let read = h.scheduler.backend().decoded_tokens;
        let mut longer = vec![5; 100];
        longer.extend([7; 20]);
        let second = h.submit(longer, GenerationParams { ignore_eos: true, ..greedy(5) }).unwrap();
        h.run();
        second.check(setup.limits.positions);
        assert_eq!(h.scheduler.backend().decoded_tokens - read, 20 + 4, "unified: {unified}");
        let GenerationEvent::Finished { usage, .. } = second.last() else { panic!() };
        assert_eq!(usage.cached_tokens, 100);
        let stats = h.stats.snapshot();
        assert_eq!((stats.cache_device_hits_total, stats.cache_ram_hits_total, stats.cache_misses_total), (1, 0, 1));
        h.assert_empty();
    }
}

#[test]
fn a_probe_spoils_nothing_that_is_left_over() {
    let setup = Setup { reuse: true, ..Setup::split(1, 300, 16, 0) };
    let mut h = Harness::of(&setup);
    let first = h.submit(vec![5; 100], greedy(10)).unwrap();
    h.run();
    first.check(300);
    assert_eq!(h.scheduler.probe(), Ok(()));
    h.scheduler.assert_books();
    let read = h.scheduler.backend().decoded_tokens;
    let second = h.submit([vec![5; 100], vec![7; 20]].concat(), greedy(1)).unwrap();
    h.run();
    second.check(300);
    assert_eq!(h.scheduler.backend().decoded_tokens - read, 20);
    // A failed one takes with it what it was decoded behind.
    h.scheduler.backend().control.faults.lock().unwrap().push_back(Fault::Fail);
    assert!(h.scheduler.probe().is_err());
    assert_eq!(h.scheduler.probe(), Ok(()));
    h.assert_empty();
}

#[test]
fn prompts_that_begin_alike_are_read_once_even_when_they_come_together() {
    for unified in [false, true] {
        let mut setup = Setup { reuse: true, ..Setup::split(8, 400, 32, 64) };
        if unified {
            setup = Setup::unified(8, 8, 3_200, 32);
        }
        let mut h = Harness::of(&setup);
        let requests: Vec<_> = (1..=8)
            .map(|i| {
                let prompt = [vec![40; 256], vec![i; 32]].concat();
                h.submit(prompt, GenerationParams { ignore_eos: true, ..greedy(4) }).unwrap()
            })
            .collect();
        h.run();
        requests.iter().for_each(|r| r.check(setup.limits.positions));
        assert_eq!(h.scheduler.backend().decoded_tokens, 256 + 8 * (32 + 3), "unified: {unified}");
        h.assert_empty();
    }
}

/// The order in which requests get the only slot while one holds it: a long prompt that is new, two whose beginning is in
/// memory, of which the first was submitted `later` requests after it and has 30 tokens of its own and the second 10, and
/// a short one that is new.
fn order_behind_a_long_prompt(later: u64, known: Priority) -> Vec<usize> {
    let mut h = Harness::of(&Setup { reuse: true, ram_bytes: 1 << 20, ..Setup::split(1, 800, 64, 64) });
    h.submit(vec![5; 400], greedy(2)).unwrap();
    h.run();
    h.submit(vec![9; 400], greedy(2)).unwrap();
    h.scheduler.step();
    let with = |priority| GenerationParams { priority, ..greedy(2) };
    let long = h.submit(vec![6; 500], with(Priority::Normal)).unwrap();
    h.tickets += later - 1;
    let [more, less] = [30, 10].map(|own| h.submit([vec![5; 400], vec![7; own]].concat(), with(known)).unwrap());
    let short = h.submit(vec![8; 10], with(Priority::Normal)).unwrap();
    let waiting = [long, more, less, short];
    let mut order = Vec::new();
    while h.scheduler.has_work() {
        h.scheduler.step();
        let started = (0..waiting.len()).filter(|&i| !waiting[i].events.lock().unwrap().is_empty());
        order.extend(started.filter(|i| !order.contains(i)).collect::<Vec<_>>());
    }
    waiting.iter().for_each(|request| request.check(800));
    h.assert_empty();
    order
}

#[test]
fn one_whose_beginning_is_in_memory_goes_before_a_long_prompt_that_came_not_much_earlier() {
    assert_eq!(order_behind_a_long_prompt(1, Priority::Normal), [2, 1, 0, 3]);
    assert_eq!(order_behind_a_long_prompt(255, Priority::Normal), [2, 1, 0, 3]);
    assert_eq!(order_behind_a_long_prompt(256, Priority::Normal), [1, 0, 2, 3], "the one came too late for it");
    assert_eq!(order_behind_a_long_prompt(257, Priority::Normal), [0, 1, 2, 3]);
    assert_eq!(order_behind_a_long_prompt(1, Priority::Low), [0, 3, 1, 2]);
}

#[test]
fn what_left_the_kv_cache_comes_back_from_main_memory() {
    for unified in [false, true] {
        let mut setup = Setup { reuse: true, ..Setup::split(2, 400, 64, 64) };
        if unified {
            setup = Setup::unified(2, 1, 500, 64);
        }
        setup.ram_bytes = 1 << 20;
        let mut h = Harness::of(&setup);
        let prompts: Vec<Vec<Token>> = (1..=5).map(|i| [vec![i; 300], vec![47 - i; 20]].concat()).collect();
        for round in 0..3 {
            for prompt in &prompts {
                let before = h.scheduler.backend().decoded_tokens;
                let request = h.submit(prompt.clone(), GenerationParams { ignore_eos: true, ..greedy(3) }).unwrap();
                h.run();
                request.check(setup.limits.positions);
                let read = h.scheduler.backend().decoded_tokens - before;
                // All blocks of 16 tokens of the 320 but the last, which is needed for the logits after its last token.
                assert_eq!(read, if round == 0 { 320 } else { 16 } + 2, "unified: {unified}, round {round}");
            }
        }
        let stats = h.stats.snapshot();
        assert_eq!((stats.cached_ram_tokens_total, stats.cache_ram_hits_total), (10 * 304, 10));
        assert_eq!((stats.cache_device_hits_total, stats.cache_disk_hits_total, stats.cache_misses_total), (0, 0, 5));
        h.assert_empty();
    }
}

#[test]
fn streams_do_not_wait_for_all_copies_at_once() {
    for streams in [true, false] {
        let mut h = Harness::of(&Setup { reuse: true, ram_bytes: 1 << 20, ..Setup::split(4, 400, 64, 64) });
        h.scheduler.admits_for(Duration::ZERO);
        let long = || GenerationParams { ignore_eos: true, ..greedy(30) };
        let stream = h.submit(vec![9; 10], long()).unwrap();
        h.scheduler.step();
        if !streams {
            stream.signals.cancelled.store(true, Relaxed);
            h.scheduler.step();
        }
        let others: Vec<_> = (1..=3).map(|i| h.submit(vec![i; 100], long()).unwrap()).collect();
        let mut admitted = Vec::new();
        for _ in 0..3 {
            h.scheduler.step();
            admitted.push(h.scheduler.tickets().iter().filter(|&&ticket| ticket > 1).count());
        }
        assert_eq!(admitted, if streams { [1, 2, 3] } else { [3, 3, 3] });
        h.run();
        others.iter().for_each(|request| request.check(400));
        h.assert_empty();
    }
}

/// Whether a request that begins as one which is being read does, and is as urgent as `priority`, gets the free slot beside
/// that one, which has so many tokens of its own, and another one that is being read.
fn begins_beside_the_one_it_could_copy(own: usize, other: usize, priority: Priority) -> bool {
    let mut h = Harness::of(&Setup { reuse: true, ..Setup::split(3, 1200, 16, 64) });
    if other > 0 {
        h.submit(vec![9; other], greedy(2)).unwrap();
    }
    h.submit([vec![5; 200], vec![6; own]].concat(), greedy(2)).unwrap();
    h.scheduler.step();
    let with = GenerationParams { priority, ..greedy(2) };
    let request = h.submit([vec![5; 200], vec![7; 20]].concat(), with).unwrap();
    h.scheduler.step();
    let begins = !request.events.lock().unwrap().is_empty();
    h.run();
    request.check(1200);
    h.assert_empty();
    begins
}

#[test]
fn nobody_waits_for_a_prompt_that_is_read_after_others() {
    assert!(!begins_beside_the_one_it_could_copy(10, 400, Priority::Normal), "it is read before the other one");
    assert!(!begins_beside_the_one_it_could_copy(900, 0, Priority::Normal), "nothing else is read");
    assert!(begins_beside_the_one_it_could_copy(900, 400, Priority::Normal), "the other one goes before it");
    assert!(begins_beside_the_one_it_could_copy(10, 400, Priority::High), "it is less urgent");
}

//! What a running scheduler does when memory becomes short, and when it is no longer.

use super::*;
use crate::ladder::DegradationLevel;
use crate::monitor::PERIOD;
use crate::scheduler::MAINTENANCE_PERIOD;

#[test]
fn half_of_the_slots_are_given_while_batches_are_reduced() {
    let setup = Setup::split(4, 200, 64, 64);
    let mut h = Harness::of(&setup);
    let ends = GenerationParams { ignore_eos: true, ..greedy(20) };
    let requests: Vec<Submitted> = (1..=6).map(|i| h.submit(vec![i; 10], ends.clone()).unwrap()).collect();
    h.stats.pressure.set_level(DegradationLevel::ReducedBatch);
    h.scheduler.step();
    assert_eq!(h.stats.snapshot().slots_active, 2);
    h.stats.pressure.set_level(DegradationLevel::Normal);
    h.scheduler.step();
    assert_eq!(h.stats.snapshot().slots_active, 4);
    // Who has a slot keeps it.
    h.stats.pressure.set_level(DegradationLevel::Emergency);
    h.scheduler.step();
    assert_eq!(h.stats.snapshot().slots_active, 4);
    h.run();
    requests.iter().for_each(|request| request.check(setup.limits.positions));
    h.assert_empty();
}

#[test]
fn half_as_much_of_a_prompt_is_read_in_a_step_while_batches_are_reduced() {
    let mut h = Harness::of(&Setup::split(1, 400, 64, 64));
    let request = h.submit(vec![5; 300], greedy(2)).unwrap();
    let read = |h: &mut Harness<_>| {
        let before = h.scheduler.backend().decoded_tokens;
        h.scheduler.step();
        h.scheduler.backend().decoded_tokens - before
    };
    assert_eq!(read(&mut h), 64);
    h.stats.pressure.set_level(DegradationLevel::ReducedBatch);
    assert_eq!(read(&mut h), 32);
    h.run();
    request.check(400);
    h.assert_empty();
}

#[test]
fn what_main_memory_keeps_goes_when_memory_is_short() {
    let mut h = Harness::of(&Setup { reuse: true, ram_bytes: 1 << 20, ..Setup::split(1, 400, 64, 64) });
    for i in 1..=3 {
        h.submit(vec![i; 100], greedy(2)).unwrap();
        h.run();
    }
    h.scheduler.maintain(Instant::now());
    assert!(h.stats.snapshot().prefix_cache_bytes > 0);
    h.stats.pressure.set_level(DegradationLevel::EvictCache);
    h.scheduler.maintain(Instant::now());
    assert_eq!(h.stats.snapshot().prefix_cache_bytes, 0);
    h.assert_empty();
}

#[test]
fn where_memory_is_short_prefixes_leave_it_a_slice_for_each_look_and_in_each_step_where_it_is_all_but_gone() {
    const SLICE: u64 = 2_000;
    let mut h = Harness::of(&Setup { ram_bytes: 1 << 20, ..Setup::unified(1, 1, 400, 64) });
    h.scheduler.relieves_at_most(SLICE);
    // Each drives the one before it out of the KV cache.
    for token in 1..20 {
        let request = h.submit(vec![token; 300], greedy(1)).unwrap();
        h.run();
        request.check(400);
    }
    let stream = h.submit(vec![30; 4], GenerationParams { ignore_eos: true, ..greedy(300) }).unwrap();
    let bytes = |h: &Harness| h.stats.snapshot().prefix_cache_bytes;
    h.scheduler.step();
    let mut left = bytes(&h);
    assert!(left > 20 * SLICE, "{left}");
    assert_eq!(h.scheduler.may_sleep_for(Instant::now()), MAINTENANCE_PERIOD);
    h.stats.pressure.set_level(DegradationLevel::EvictCache);
    for look in 0..5 {
        // Whatever happens meanwhile.
        h.scheduler.step();
        h.scheduler.maintain(Instant::now());
        h.scheduler.step();
        let now = bytes(&h);
        assert!(now < left && left - now < SLICE + 1_000, "look {look}: {left} {now}");
        left = now;
        h.stats.pressure.looked();
    }
    assert_eq!(h.scheduler.may_sleep_for(Instant::now()), PERIOD, "an idle engine goes on as well");
    h.stats.pressure.set_level(DegradationLevel::HighPriorityOnly);
    assert_eq!(h.scheduler.may_sleep_for(Instant::now()), Duration::ZERO);
    let mut steps = 0;
    while bytes(&h) > 0 {
        h.scheduler.step();
        let now = bytes(&h);
        assert!(now < left && left - now < SLICE + 1_000, "{left} {now}");
        left = now;
        steps += 1;
    }
    assert!(steps > 10, "{steps}");
    assert_eq!(h.scheduler.may_sleep_for(Instant::now()), MAINTENANCE_PERIOD, "there is nothing more to give back");
    h.stats.pressure.set_level(DegradationLevel::Normal);
    h.run();
    stream.check(400);
    h.assert_empty();
}

//! What a running scheduler does when memory becomes short, and when it is no longer.

use super::*;
use crate::ladder::DegradationLevel;

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

//! Several clients: whose requests get which slot, and who gives way to whom.

use super::*;
use crate::params::FIRST_SLOT_PATIENCE_MS;
use crate::turn::Turn;

const POSITIONS: u32 = 200;

fn of(client: u64, start_tag: u64, max_tokens: u32) -> GenerationParams {
    GenerationParams { turn: Turn { client, start_tag }, ignore_eos: true, ..greedy(max_tokens) }
}

fn setups() -> Vec<Setup> {
    let unified = |max_saved_bytes| Setup { max_saved_bytes, ..Setup::unified(3, 5, 3 * POSITIONS, 8) };
    let split = |max_saved_bytes| Setup { max_saved_bytes, ..Setup::split(3, POSITIONS, 8, 64) };
    vec![unified(1 << 20), unified(0), split(1 << 20), split(0)]
}

/// A step of whoever has waited for long enough.
fn late_step(h: &mut Harness) {
    h.scheduler.step_at(Instant::now() + Duration::from_millis(FIRST_SLOT_PATIENCE_MS));
    h.scheduler.assert_books();
}

#[test]
fn the_next_free_slot_is_for_the_client_that_has_had_least() {
    let mut h = Harness::of(&Setup::split(1, POSITIONS, 8, 64));
    let running = h.submit(vec![1; 9], of(1, 0, 5)).unwrap();
    h.scheduler.step();
    let own: Vec<Submitted> = (1..4).map(|i| h.submit(vec![2; 9], of(1, i * 14, 5)).unwrap()).collect();
    let other = h.submit(vec![3; 9], of(2, 0, 5)).unwrap();
    while !other.events.lock().unwrap().iter().any(GenerationEvent::is_terminal) {
        h.scheduler.step();
    }
    assert!(running.last().is_terminal());
    assert!(own.iter().all(|request| request.events.lock().unwrap().is_empty()), "they came before, and are after it");
    h.run();
    h.assert_empty();
}

#[test]
fn who_has_no_slot_gets_one_of_who_has_several_and_nobody_loses_a_token() {
    for setup in setups() {
        let mut h = Harness::of(&setup);
        let crowd: Vec<Submitted> =
            (0..5).map(|i| h.submit(vec![i + 1; 20], of(1, u64::from(i.cast_unsigned()) * 60, 60)).unwrap()).collect();
        (0..6).for_each(|_| late_step(&mut h));
        assert_eq!(h.scheduler.tickets().iter().filter(|&&ticket| ticket > 0).count(), 3);
        assert_eq!(h.stats.snapshot().preemptions_total, 0, "all are one client's");
        let other = h.submit(vec![9; 20], of(2, 60, 4)).unwrap();
        h.scheduler.step();
        assert_eq!(h.stats.snapshot().preemptions_total, 0, "a slot may be free in a moment");
        late_step(&mut h);
        assert_eq!(h.stats.snapshot().preemptions_total, 1);
        let tickets = h.scheduler.tickets();
        assert!(
            tickets.contains(&1) && tickets.contains(&2) && tickets.contains(&6),
            "the youngest gave way: {tickets:?}"
        );
        // Of the same client a second one waits for its turn.
        let second = h.submit(vec![8; 20], of(2, 90, 4)).unwrap();
        late_step(&mut h);
        assert_eq!(h.stats.snapshot().preemptions_total, 1);
        h.run();
        crowd.iter().chain([&other, &second]).for_each(|request| request.check(setup.limits.positions));
        h.assert_empty();
    }
}

#[test]
fn nobody_gives_its_only_slot_and_none_of_a_higher_priority() {
    let mut h = Harness::of(&Setup::split(3, POSITIONS, 8, 64));
    let high = |turn| GenerationParams { priority: Priority::High, ..turn };
    for params in [of(1, 0, 50), of(2, 0, 50), high(of(2, 0, 50))] {
        h.submit(vec![1; 9], params).unwrap();
    }
    h.scheduler.step();
    h.submit(vec![2; 9], GenerationParams { priority: Priority::Low, ..of(3, 0, 5) }).unwrap();
    late_step(&mut h);
    assert_eq!(h.stats.snapshot().preemptions_total, 0, "of low priority");
    h.submit(vec![2; 9], of(4, 0, 5)).unwrap();
    late_step(&mut h);
    assert_eq!(h.stats.snapshot().preemptions_total, 1, "the second of those of client 2 that is not of high priority");
    let tickets = h.scheduler.tickets();
    assert!(tickets.contains(&1) && tickets.contains(&3) && tickets.contains(&5), "{tickets:?}");
    h.submit(vec![2; 9], of(5, 0, 5)).unwrap();
    late_step(&mut h);
    assert_eq!(h.stats.snapshot().preemptions_total, 1, "each has one");
    h.run();
    h.assert_empty();
}

#[test]
fn nobody_gives_way_in_vain_where_cells_are_short() {
    // Cells for three sequences of 60, not for one of 190 beside one.
    let mut setup = Setup::unified(3, 5, 190, 8);
    setup.limits.positions = 190;
    let mut h = Harness::of(&setup);
    h.scheduler.likely_answer_is(1);
    for i in 0..3 {
        h.submit(vec![i + 1; 50], of(1, 0, 8)).unwrap();
    }
    for _ in 0..30 {
        h.scheduler.step();
    }
    h.submit(vec![9; 180], of(2, 0, 4)).unwrap();
    let before = h.stats.snapshot().preemptions_total;
    late_step(&mut h);
    assert_eq!(h.stats.snapshot().preemptions_total, before);
    h.run();
    h.assert_empty();
}

//! Several clients: whose requests get which slot, and who gives way to whom.

use super::*;
use crate::ladder::DegradationLevel;
use crate::params::Turn;
use crate::params::{FIRST_SLOT_PATIENCE_MS, GIVES_WAY_PERIOD_MS};

const POSITIONS: u32 = 200;
const PATIENCE: Duration = Duration::from_millis(FIRST_SLOT_PATIENCE_MS);

fn of(client: u64, start_tag: u64, max_tokens: u32) -> GenerationParams {
    GenerationParams { turn: Turn { client, start_tag }, ignore_eos: true, ..greedy(max_tokens) }
}

fn setups() -> Vec<Setup> {
    let unified = |max_saved_bytes| Setup { max_saved_bytes, ..Setup::unified(3, 5, 3 * POSITIONS, 8) };
    let split = |max_saved_bytes| Setup { max_saved_bytes, ..Setup::split(3, POSITIONS, 8, 64) };
    vec![unified(1 << 20), unified(0), split(1 << 20), split(0)]
}

/// A step of whoever has waited for long enough, at a time that moves with each.
fn late_step(h: &mut Harness) {
    let now = h.now.unwrap_or_else(Instant::now) + PATIENCE;
    h.now = Some(now);
    h.scheduler.step_at(now);
    h.scheduler.assert_books();
}

fn has(h: &Harness, tickets: &[u64]) -> bool {
    tickets.iter().all(|ticket| h.scheduler.tickets().contains(ticket))
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
        h.scheduler.step_at(h.now.unwrap());
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
fn one_of_low_priority_does_not_go_before_one_of_high_priority_of_a_client_that_has_a_slot() {
    let mut h = Harness::of(&Setup::split(2, POSITIONS, 64, 64));
    h.submit(vec![1; 9], of(1, 0, 100)).unwrap();
    let short = h.submit(vec![2; 9], of(1, 20, 2)).unwrap();
    late_step(&mut h);
    let low = h.submit(vec![3; 9], GenerationParams { priority: Priority::Low, ..of(2, 0, 5) }).unwrap();
    let normal = h.submit(vec![4; 9], of(3, 20, 5)).unwrap();
    let high = h.submit(vec![5; 9], GenerationParams { priority: Priority::High, ..of(1, 0, 5) }).unwrap();
    // A slot becomes free, and they have waited for long enough to have one of client 1 otherwise.
    late_step(&mut h);
    assert!(short.last().is_terminal());
    late_step(&mut h);
    assert_eq!(h.stats.snapshot().preemptions_total, 0);
    assert!(has(&h, &[1, 5]), "{:?}", h.scheduler.tickets());
    h.run();
    [low, normal, high].iter().for_each(|request| request.check(POSITIONS));
    h.assert_empty();
}

#[test]
fn nobody_of_a_lower_level_is_given_a_slot_while_one_of_a_higher_waits() {
    let mut h = Harness::of(&Setup::split(2, POSITIONS, 64, 64));
    let high = |params| GenerationParams { priority: Priority::High, ..params };
    h.submit(vec![1; 9], high(of(1, 0, 30))).unwrap();
    h.submit(vec![2; 9], of(1, 0, 60)).unwrap();
    late_step(&mut h);
    h.submit(vec![3; 9], high(of(1, 60, 5))).unwrap();
    h.submit(vec![4; 9], of(2, 0, 5)).unwrap();
    late_step(&mut h);
    assert_eq!(h.stats.snapshot().preemptions_total, 0, "client 1 has one of high priority waiting");
    h.run();
    h.assert_empty();
}

#[test]
fn clients_with_one_long_beginning_do_not_each_read_it_themselves() {
    let mut h = Harness::of(&Setup::unified(4, 6, 4 * POSITIONS, 16));
    for i in 0..4 {
        h.submit(vec![i + 1; 20], of(1, 0, 100)).unwrap();
    }
    (0..10).for_each(|_| late_step(&mut h));
    // The texts of two clients with one system prompt of 120 tokens.
    let prompt = |last| [vec![9; 120], vec![last; 5]].concat();
    let first = h.submit(prompt(1), of(2, 0, 4)).unwrap();
    let second = h.submit(prompt(2), of(3, 0, 4)).unwrap();
    late_step(&mut h);
    assert_eq!(h.stats.snapshot().preemptions_total, 1);
    late_step(&mut h);
    assert!(has(&h, &[5]) && !has(&h, &[6]), "the first is being read: {:?}", h.scheduler.tickets());
    while first.events.lock().unwrap().len() < 2 {
        late_step(&mut h);
    }
    late_step(&mut h);
    h.run();
    let GenerationEvent::Finished { usage, .. } = second.last() else { panic!() };
    assert!(usage.cached_tokens >= 64, "{usage:?}");
    [first, second].iter().for_each(|request| request.check(POSITIONS));
    h.assert_empty();
}

#[test]
fn who_gave_way_comes_back_before_what_its_client_has_not_begun_and_after_those_it_gave_way_to() {
    let mut h = Harness::of(&Setup::split(3, POSITIONS, 64, 64));
    h.submit(vec![1; 9], of(1, 0, 150)).unwrap();
    let gives = h.submit(vec![2; 9], of(1, 60, 150)).unwrap();
    // Of another client, which is far ahead.
    h.submit(vec![3; 9], of(3, 500, 150)).unwrap();
    late_step(&mut h);
    let unstarted = h.submit(vec![4; 9], of(1, 120, 5)).unwrap();
    let other = h.submit(vec![5; 9], of(2, 500, 5)).unwrap();
    late_step(&mut h);
    assert!(has(&h, &[1, 3, 5]), "{:?}", h.scheduler.tickets());
    while !other.events.lock().unwrap().iter().any(GenerationEvent::is_terminal) {
        h.scheduler.step_at(h.now.unwrap());
    }
    h.scheduler.step_at(h.now.unwrap());
    assert!(has(&h, &[2]) && unstarted.events.lock().unwrap().is_empty(), "{:?}", h.scheduler.tickets());
    h.run();
    [gives, unstarted, other].iter().for_each(|request| request.check(POSITIONS));
    h.assert_empty();
}

#[test]
fn newcomers_go_before_who_gave_way_only_until_their_tags_have_risen() {
    let mut h = Harness::of(&Setup::split(2, POSITIONS, 64, 64));
    h.submit(vec![1; 9], of(1, 0, 180)).unwrap();
    h.submit(vec![2; 9], of(1, 60, 180)).unwrap();
    late_step(&mut h);
    // Tags as they rise with what is served.
    h.submit(vec![3; 9], of(2, 60, 3)).unwrap();
    late_step(&mut h);
    assert!(has(&h, &[1, 3]));
    h.submit(vec![4; 9], of(3, 60, 3)).unwrap();
    h.submit(vec![5; 9], of(4, 62, 3)).unwrap();
    let mut seen = Vec::new();
    while !has(&h, &[5]) {
        h.scheduler.step_at(h.now.unwrap());
        seen.extend(h.scheduler.tickets());
        seen.dedup();
    }
    let at = |ticket| seen.iter().position(|&other| other == ticket);
    assert!(at(4) < seen.iter().rposition(|&other| other == 2), "{seen:?}");
    assert!(seen.contains(&4) && seen[at(4).unwrap()..].contains(&2), "before the one whose tag is higher: {seen:?}");
    h.run();
    h.assert_empty();
}

#[test]
fn one_gives_way_in_a_step_and_each_no_more_often_than_once_in_a_period() {
    let mut h = Harness::of(&Setup::split(3, POSITIONS, 64, 64));
    for i in 0..3 {
        h.submit(vec![i + 1; 9], of(1, 0, 180)).unwrap();
    }
    late_step(&mut h);
    let mut now = h.now.unwrap();
    let (began, mut asked) = (now, 0);
    // Each is served in one step, and the next one comes.
    while now < began + 3 * Duration::from_millis(GIVES_WAY_PERIOD_MS) {
        let before = h.stats.snapshot().preemptions_total;
        h.now = Some(now);
        h.submit(vec![9; 9], of(2 + asked, asked * 10, 1)).unwrap();
        now += PATIENCE;
        h.scheduler.step_at(now);
        asked += 1;
        assert!(h.stats.snapshot().preemptions_total <= before + 1);
    }
    // Each of the three, in each of the three periods once; else one would in every other of the 30 steps.
    let times = h.stats.snapshot().preemptions_total;
    assert!((6..=9).contains(&times), "{times}");
    h.now = None;
    h.run();
    h.assert_empty();
}

#[test]
fn nobody_gives_way_where_one_is_not_enough_or_memory_is_short() {
    // Cells for three sequences of 63, and for one of 110 beside one of them. Half of the slots are more than are in use, and so
    // many may be whatever the memory is.
    let mut setup = Setup::unified(8, 10, 190, 64);
    setup.limits.positions = 190;
    for (prompt, level, most) in [
        (110, DegradationLevel::Normal, 0),
        (50, DegradationLevel::EvictCache, 0),
        (50, DegradationLevel::ReducedBatch, 1),
        (50, DegradationLevel::Normal, 1),
    ] {
        let mut h = Harness::of(&setup);
        h.scheduler.likely_answer_is(1);
        let crowd: Vec<Submitted> = (0..3).map(|i| h.submit(vec![i + 1; 50], of(1, 0, 13)).unwrap()).collect();
        while crowd.iter().any(|request| request.events.lock().unwrap().len() < 2) {
            h.scheduler.step();
        }
        assert_eq!(h.scheduler.tickets().iter().filter(|&&ticket| ticket > 0).count(), 3);
        h.stats.pressure.set_level(level);
        h.submit(vec![9; prompt], of(2, 0, 4)).unwrap();
        late_step(&mut h);
        assert_eq!(h.stats.snapshot().preemptions_total, most, "{prompt} {level:?}");
        h.stats.pressure.set_level(DegradationLevel::Normal);
        h.run();
        h.assert_empty();
    }
}

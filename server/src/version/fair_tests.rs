//! Turns as clients get them, and what each has had after a while.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::net::IpAddr;

use proptest::prelude::*;

use super::*;

const NORMAL: Priority = Priority::Normal;

fn peer(number: u16) -> Peer {
    let [high, low] = number.to_be_bytes();
    Peer::of(IpAddr::from([10, 0, high, low]))
}

#[test]
fn who_comes_anew_is_before_all_that_another_one_has_in_store() {
    let mut fair = Fair::default();
    let mut stored: Vec<Entry> = (0..5).map(|_| fair.enter(peer(1), NORMAL, 100)).collect();
    fair.begin(&mut stored[1]);
    let new = fair.enter(peer(2), NORMAL, 10).turn();
    assert_eq!(new.start_tag, stored[1].turn().start_tag);
    assert!(stored[2..].iter().all(|e| e.turn().start_tag > new.start_tag && e.turn().client != new.client));
    // And its second is after what it has asked for.
    assert_eq!(fair.enter(peer(2), NORMAL, 10).turn().start_tag, new.start_tag + 10);
    assert_eq!(fair.enter(peer(2), Priority::High, 10).turn().start_tag, 0, "each priority has its own clock");
}

#[test]
fn what_was_used_counts_in_place_of_what_was_asked_for() {
    let mut fair = Fair::default();
    let entries: Vec<Entry> = (0..3).map(|_| fair.enter(peer(1), NORMAL, 100)).collect();
    fair.leave(&entries[0], Some(1_000));
    assert_eq!(fair.enter(peer(1), NORMAL, 100).turn().start_tag, 1_200);
    // Who used less gets nothing before what it has waiting already.
    fair.leave(&entries[1], Some(0));
    fair.leave(&entries[2], None);
    let last = fair.enter(peer(1), NORMAL, 100).turn().start_tag;
    assert_eq!(last, 1_200);
}

#[test]
fn who_has_nothing_inside_is_not_known_and_what_waits_no_more_is_forgotten() {
    let mut fair = Fair::default();
    let mut entries = [fair.enter(peer(1), NORMAL, 7), fair.enter(peer(1), NORMAL, 7)];
    assert_eq!((fair.inside(peer(1)), fair.clients_with(peer(1)), fair.clients_with(peer(2))), (2, 1, 2));
    fair.begin(&mut entries[0]);
    entries.iter().for_each(|entry| fair.leave(entry, None));
    assert!(fair.clients.is_empty() && fair.waiting.iter().all(BTreeMap::is_empty));
    fair.leave(&entries[0], None);
}

#[test]
fn who_has_had_more_is_known_until_the_clock_is_there_or_nobody_else_is() {
    let mut fair = Fair::default();
    let beside = fair.enter(peer(2), NORMAL, 10);
    let mut large = fair.enter(peer(1), NORMAL, 1_000);
    fair.begin(&mut large);
    fair.leave(&large, None);
    // The clock has moved by its half.
    assert_eq!((fair.clocks[NORMAL.rank()], fair.clients_with(peer(1)), fair.inside(peer(1))), (500, 2, 0));
    assert_eq!(fair.enter(peer(1), NORMAL, 1).turn().start_tag, 1_000);
    fair.leave(&beside, None);
    let mut fair = Fair::default();
    let alone = fair.enter(peer(1), NORMAL, 1_000);
    fair.leave(&alone, Some(5_000));
    assert!(fair.clients.is_empty() && fair.ahead.is_empty());
    // Of very many, those that are most ahead.
    let _beside = fair.enter(peer(0), NORMAL, 10);
    for number in 1..=u16::try_from(MAX_AHEAD_CLIENTS).unwrap() + 50 {
        let entry = fair.enter(peer(number), NORMAL, 10);
        fair.leave(&entry, Some(1_000_000 - u64::from(number)));
    }
    assert_eq!(fair.ahead.len(), MAX_AHEAD_CLIENTS);
    assert!(fair.ahead.contains_key(&peer(1)));
}

#[test]
fn the_clock_moves_with_what_is_used_and_no_further_than_to_the_next_that_waits() {
    let mut fair = Fair::default();
    let mut served = fair.enter(peer(1), NORMAL, 100);
    let _stored: Vec<Entry> = (0..3).map(|_| fair.enter(peer(1), NORMAL, 100)).collect();
    fair.begin(&mut served);
    // Of two clients each has had half.
    let mut other = fair.enter(peer(2), NORMAL, 60);
    fair.begin(&mut other);
    fair.leave(&other, None);
    assert_eq!(fair.enter(peer(3), NORMAL, 1).turn().start_tag, 30);
    // It has used far more than it was thought to, and what its client has in store is still after whoever comes now.
    fair.leave(&served, Some(5_000));
    assert_eq!(fair.enter(peer(4), NORMAL, 1).turn().start_tag, 100);
}

/// Serves the lowest tag, one at a time, of those that always ask again, until the request of `peer(0)` that waits has begun:
/// what was used until then. `next`: who asks when so many have left.
fn used_until_begun(fair: &mut Fair, first: &[Peer], sizes: &[u64], next: impl Fn(usize, Peer) -> Peer) -> u64 {
    let mut waiting: BTreeMap<(u64, usize), Entry> = BTreeMap::new();
    let mut entered = 0;
    let mut enter = |fair: &mut Fair, waiting: &mut BTreeMap<(u64, usize), Entry>, client| {
        let entry = fair.enter(client, NORMAL, sizes[entered % sizes.len()]);
        waiting.insert((entry.turn().start_tag, entered), entry);
        entered += 1;
        entered
    };
    for &client in first {
        enter(fair, &mut waiting, client);
    }
    let second = enter(fair, &mut waiting, peer(0)) - 1;
    let mut used = 0;
    for left in 0..100_000 {
        let ((_, number), mut entry) = waiting.pop_first().unwrap();
        fair.begin(&mut entry);
        if number == second {
            return used;
        }
        used += entry.tokens;
        fair.leave(&entry, None);
        enter(fair, &mut waiting, next(left, entry.client));
    }
    panic!("after {used} tokens it still waits");
}

#[test]
fn what_was_cancelled_holds_back_nothing_that_its_client_asks_for_next() {
    let mut fair = Fair::default();
    let _beside = fair.enter(peer(2), NORMAL, 100);
    let mut stored: Vec<Entry> = (0..500).map(|_| fair.enter(peer(1), NORMAL, 1_000)).collect();
    fair.begin(&mut stored[0]);
    fair.leave(&stored[0], Some(1_500));
    stored[1..].iter().for_each(|entry| fair.leave(entry, None));
    // It is ahead by what it has used, and not by what it had in store.
    assert_eq!(fair.enter(peer(1), NORMAL, 1).turn().start_tag, 1_500);
}

/// Four clients that are refused once they have been read, and ask again, beside one that has each answer before it asks for
/// the next: how many were refused before each of its answers; `None` where one never came. `is_charged`: whether a
/// refusal begins the place.
fn refused_before_each_answer(is_charged: bool) -> Option<Vec<usize>> {
    const ANSWERS: usize = 6;
    const ASKED: [u64; 2] = [10, 1_000];
    let answered = peer(0);
    let mut fair = Fair::default();
    let mut waiting: BTreeMap<(u64, usize), Entry> = BTreeMap::new();
    let mut entered = 0;
    let mut enter = |fair: &mut Fair, waiting: &mut BTreeMap<(u64, usize), Entry>, client| {
        let entry = fair.enter(client, NORMAL, ASKED[usize::from(client != answered)]);
        waiting.insert((entry.turn().start_tag, entered), entry);
        entered += 1;
    };
    (0..5).for_each(|client| enter(&mut fair, &mut waiting, peer(client)));
    let (mut refused, mut before_each) = (0, Vec::new());
    for _ in 0..10_000 {
        let (_, mut entry) = waiting.pop_first().unwrap();
        let client = entry.client;
        if client == answered {
            fair.begin(&mut entry);
            before_each.push(std::mem::take(&mut refused));
            if before_each.len() == ANSWERS {
                return Some(before_each);
            }
        } else {
            refused += 1;
            if is_charged {
                fair.begin(&mut entry);
            }
        }
        fair.leave(&entry, None);
        enter(&mut fair, &mut waiting, client);
    }
    None
}

#[test]
fn clients_that_are_refused_after_they_were_read_take_turns_with_one_that_is_answered() {
    let before_each = refused_before_each_answer(true).unwrap();
    assert!(before_each.iter().all(|&refused| refused <= 4), "{before_each:?}");
    assert_eq!(refused_before_each_answer(false), None, "uncharged they would always be before it");
}

proptest! {
    /// Clients each of which asks again when it has its answer, and one of them twice at first: what is served before its
    /// second is its part of what is served, and no more than the largest of each beside that.
    #[test]
    fn a_second_request_begins_beside_those_that_ask_one_after_the_other(
        sizes in proptest::collection::vec(1_u64..500, 1..20), clients in 2_u16..12,
    ) {
        let first: Vec<Peer> = (0..clients).map(peer).collect();
        let used = used_until_begun(&mut Fair::default(), &first, &sizes, |_, client| client);
        let largest = sizes.iter().max().unwrap();
        prop_assert!(used <= 3 * u64::from(clients) * largest, "{} of {} and {}", used, clients, largest);
    }

    /// The same where each who asks is another one, whom nobody has known before.
    #[test]
    fn a_second_request_begins_beside_those_that_come_once(
        sizes in proptest::collection::vec(1_u64..500, 1..20), clients in 2_u16..12,
    ) {
        let first: Vec<Peer> = (0..clients).map(peer).collect();
        let next = |left: usize, _| peer(100 + u16::try_from(left % 60_000).unwrap());
        let used = used_until_begun(&mut Fair::default(), &first, &sizes, next);
        let largest = sizes.iter().max().unwrap();
        prop_assert!(used <= 3 * u64::from(clients + 1) * largest, "{} of {} and {}", used, clients, largest);
    }

    /// Who asks for one large thing after the other has no more of the service than who always has small ones waiting.
    #[test]
    fn large_requests_one_after_the_other_gain_nothing(large in 200_u64..5_000, small in 1_u64..50, waiting in 2_usize..5) {
        let mut fair = Fair::default();
        let mut queue: BTreeMap<(u64, usize), Entry> = BTreeMap::new();
        let mut entered = 0;
        let mut enter = |fair: &mut Fair, queue: &mut BTreeMap<(u64, usize), Entry>, client, tokens| {
            let entry = fair.enter(client, NORMAL, tokens);
            queue.insert((entry.turn().start_tag, entered), entry);
            entered += 1;
        };
        enter(&mut fair, &mut queue, peer(1), large);
        for _ in 0..waiting {
            enter(&mut fair, &mut queue, peer(2), small);
        }
        let mut had = [0, 0];
        for _ in 0..2_000 {
            let (_, mut entry) = queue.pop_first().unwrap();
            fair.begin(&mut entry);
            fair.leave(&entry, None);
            let is_large = entry.client == peer(1);
            had[usize::from(!is_large)] += entry.tokens;
            // It asks again when it has its answer.
            enter(&mut fair, &mut queue, entry.client, if is_large { large } else { small });
        }
        let [large_had, small_had] = had;
        prop_assert!(large_had <= small_had + 4 * large, "{} beside {}", large_had, small_had);
        prop_assert!(small_had <= large_had + 4 * large, "{} beside {}", small_had, large_had);
    }

    /// Clients that always have requests waiting, of whatever sizes, are served alike: none is further ahead of another than
    /// by the largest request of each.
    #[test]
    fn who_always_waits_has_had_as_much_as_the_others(
        sizes in proptest::collection::vec(proptest::collection::vec(1_u64..500, 30..60), 2..5),
    ) {
        let mut fair = Fair::default();
        let mut waiting: BTreeMap<(u64, usize, usize), Entry> = BTreeMap::new();
        for (client, sizes) in sizes.iter().enumerate() {
            for (number, &tokens) in sizes.iter().enumerate() {
                let entry = fair.enter(peer(client as u16), NORMAL, tokens);
                waiting.insert((entry.turn().start_tag, client, number), entry);
            }
        }
        let mut left: Vec<usize> = sizes.iter().map(Vec::len).collect();
        let mut had = vec![0; sizes.len()];
        let mut numbers = vec![0; sizes.len()];
        while left.iter().all(|&left| left > 0) {
            let ((_, client, number), mut entry) = waiting.pop_first().unwrap();
            prop_assert_eq!(number, numbers[client], "each client's in its order");
            fair.begin(&mut entry);
            fair.leave(&entry, None);
            numbers[client] += 1;
            left[client] -= 1;
            had[client] += entry.tokens;
            let spread = had.iter().max().unwrap() - had.iter().min().unwrap();
            prop_assert!(spread <= 1_000, "{:?}", had);
        }
    }

    /// With one client the tags never fall, whatever it asks for, uses and leaves: its order is that of submission.
    #[test]
    fn the_order_of_one_client_is_that_of_submission(
        moves in proptest::collection::vec((0_u64..300, 0_u64..900, any::<bool>(), any::<bool>()), 1..100),
    ) {
        let mut fair = Fair::default();
        let mut inside: Vec<Entry> = Vec::new();
        for (tokens, used, begins, leaves) in moves {
            let entry = fair.enter(peer(1), NORMAL, tokens);
            if let Some(before) = inside.last() {
                prop_assert!(before.turn().start_tag <= entry.turn().start_tag);
            }
            inside.push(entry);
            if begins {
                fair.begin(&mut inside[0]);
            }
            if leaves {
                fair.leave(&inside.remove(0), Some(used));
            }
        }
    }
}

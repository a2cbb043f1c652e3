//! Turns as clients get them, and what each has had after a while.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::net::IpAddr;

use proptest::prelude::*;

use super::*;

const NORMAL: Priority = Priority::Normal;

fn peer(number: u8) -> Peer {
    Peer::of(IpAddr::from([10, 0, 0, number]))
}

#[test]
fn who_comes_anew_is_before_all_that_another_one_has_in_store() {
    let mut fair = Fair::default();
    let stored: Vec<Turn> = (0..5).map(|_| fair.enter(peer(1), NORMAL, 100)).collect();
    fair.begin(NORMAL, stored[1]);
    let new = fair.enter(peer(2), NORMAL, 10);
    assert_eq!(new.start_tag, stored[1].start_tag);
    assert!(stored[2..].iter().all(|turn| turn.start_tag > new.start_tag && turn.client != new.client));
    // And its second is after what it has asked for.
    assert_eq!(fair.enter(peer(2), NORMAL, 10).start_tag, new.start_tag + 10);
    assert_eq!(fair.enter(peer(2), Priority::High, 10).start_tag, 0, "each priority has its own clock");
}

#[test]
fn what_was_used_counts_in_place_of_what_was_asked_for() {
    let mut fair = Fair::default();
    let turns: Vec<Turn> = (0..3).map(|_| fair.enter(peer(1), NORMAL, 100)).collect();
    fair.leave(peer(1), NORMAL, 100, 1_000);
    assert_eq!(fair.enter(peer(1), NORMAL, 100).start_tag, 1_200);
    // Who used less gets nothing before what it has waiting already.
    fair.leave(peer(1), NORMAL, 100, 0);
    fair.leave(peer(1), NORMAL, 100, 0);
    let last = fair.enter(peer(1), NORMAL, 100).start_tag;
    assert!(last >= 1_200 && last > turns[2].start_tag, "{last}");
}

#[test]
fn who_has_nothing_inside_is_not_known() {
    let mut fair = Fair::default();
    fair.enter(peer(1), NORMAL, 7);
    fair.enter(peer(1), NORMAL, 7);
    assert_eq!((fair.inside(peer(1)), fair.clients_with(peer(1)), fair.clients_with(peer(2))), (2, 1, 2));
    fair.leave(peer(1), NORMAL, 7, 7);
    fair.leave(peer(1), NORMAL, 7, 7);
    assert!(fair.clients.is_empty());
    fair.leave(peer(1), NORMAL, 7, 7);
}

proptest! {
    /// Clients that always have requests waiting, of whatever sizes, are served alike: none is further ahead of another than
    /// by the largest request of each.
    #[test]
    fn who_always_waits_has_had_as_much_as_the_others(
        sizes in proptest::collection::vec(proptest::collection::vec(1_u64..500, 30..60), 2..5),
    ) {
        let mut fair = Fair::default();
        let mut waiting: BTreeMap<(u64, usize, usize), (Turn, u64)> = BTreeMap::new();
        for (client, sizes) in sizes.iter().enumerate() {
            for (number, &tokens) in sizes.iter().enumerate() {
                let turn = fair.enter(peer(client as u8), NORMAL, tokens);
                waiting.insert((turn.start_tag, client, number), (turn, tokens));
            }
        }
        let mut left: Vec<usize> = sizes.iter().map(Vec::len).collect();
        let mut had = vec![0; sizes.len()];
        let mut numbers = vec![0; sizes.len()];
        while left.iter().all(|&left| left > 0) {
            let ((_, client, number), (turn, tokens)) = waiting.pop_first().unwrap();
            prop_assert_eq!(number, numbers[client], "each client's in its order");
            fair.begin(NORMAL, turn);
            fair.leave(peer(client as u8), NORMAL, tokens, tokens);
            numbers[client] += 1;
            left[client] -= 1;
            had[client] += tokens;
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
        let mut inside: Vec<(Turn, u64)> = Vec::new();
        for (tokens, used, begins, leaves) in moves {
            let turn = fair.enter(peer(1), NORMAL, tokens);
            if let Some((before, _)) = inside.last() {
                prop_assert!(before.start_tag <= turn.start_tag);
            }
            inside.push((turn, tokens));
            if begins {
                fair.begin(NORMAL, inside[0].0);
            }
            if leaves {
                let (_, tokens) = inside.remove(0);
                fair.leave(peer(1), NORMAL, tokens, used);
            }
        }
    }
}

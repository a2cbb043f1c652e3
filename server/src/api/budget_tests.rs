#![allow(clippy::unwrap_used)]
//! Nobody has all of the memory, and half-read bodies never wait for each other.

use std::net::IpAddr;

use proptest::prelude::*;

use super::*;
use crate::limits::BODY_BUDGET_BYTES;

const MIB: usize = 1 << 20;

fn peer(number: u8) -> Peer {
    Peer::of(IpAddr::from([10, 0, 0, number]))
}

#[test]
fn a_host_is_one_client_however_it_writes_its_address() {
    let of = |text: &str| Peer::of(text.parse().unwrap());
    assert_eq!(of("10.0.0.1"), of("::ffff:10.0.0.1"));
    assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:0:0:2"));
    assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
    assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
}

#[tokio::test]
async fn one_client_has_three_quarters_at_most_and_the_next_one_its_share_of_the_rest() {
    let budget = Budget::new(BODY_BUDGET_BYTES);
    let mut held = Vec::new();
    while let Ok(share) = budget.take(peer(1), MAX_BODY_BYTES, Duration::ZERO).await {
        held.push(share);
    }
    assert_eq!(budget.used_bytes(), BODY_BUDGET_BYTES / 4 * 3);
    let refused = budget.take(peer(1), MAX_BODY_BYTES, Duration::ZERO).await.err().unwrap();
    assert_eq!(refused.error.status, 503);
    assert!(refused.error.message.contains("your address"), "{}", refused.error.message);
    for client in 2..8 {
        assert!(budget.take(peer(client), MAX_BODY_BYTES, Duration::ZERO).await.is_ok());
    }
    drop(held);
    assert_eq!(budget.used_bytes(), 0);
}

#[tokio::test]
async fn of_half_read_bodies_the_first_is_always_read_to_its_end() {
    let budget = Budget::new(BODY_BUDGET_BYTES);
    // So many clients that no one of them has its share, each with a body that is half there.
    let mut bodies: Vec<Share> = (0..=255).map(|client| budget.open(peer(client))).collect();
    let mut short = None;
    'rounds: for _ in 0..MAX_BODY_BYTES / MIB {
        for body in &mut bodies {
            if let Err(why) = body.try_grow(MIB) {
                short = Some(why);
                break 'rounds;
            }
        }
    }
    assert_eq!(short, Some(Short::Everyone));
    assert!(BODY_BUDGET_BYTES - budget.used_bytes() >= MAX_BODY_BYTES);
    // The others wait, the first goes on, and when it has been read the second may.
    assert_eq!(bodies[1].try_grow(MIB), Err(Short::Everyone));
    let missing = MAX_BODY_BYTES - bodies[0].bytes;
    assert_eq!(bodies[0].try_grow(missing), Ok(()));
    let mut second = bodies.remove(1);
    let waiting = tokio::spawn(async move { second.grow(MIB, Duration::from_secs(60)).await.is_ok() });
    tokio::task::yield_now().await;
    assert!(!waiting.is_finished());
    bodies[0].complete();
    assert!(waiting.await.unwrap());
}

#[tokio::test]
async fn who_waits_in_vain_is_refused_in_time() {
    let budget = Budget::new(BODY_BUDGET_BYTES);
    let _all: Vec<Share> = {
        let mut all = Vec::new();
        for client in 0..=255 {
            while let Ok(share) = budget.take(peer(client), MAX_BODY_BYTES / 4, Duration::ZERO).await {
                all.push(share);
            }
        }
        all
    };
    let (began, patience) = (Instant::now(), Duration::from_millis(20));
    let refused = budget.take(peer(1), MAX_BODY_BYTES, patience).await.err().unwrap();
    assert_eq!(refused.error.status, 503);
    assert!(began.elapsed() >= patience);
}

proptest! {
    /// Whatever comes and goes, the sums hold, and no client has more than its share of what it found.
    #[test]
    fn the_ledger_adds_up(steps in prop::collection::vec((0_usize..40, 0_u8..5, 1_usize..9 * MIB), 1..400)) {
        let budget = Budget::new(BODY_BUDGET_BYTES);
        let mut shares: Vec<Share> = Vec::new();
        for (pick, client, bytes) in steps {
            let at = pick.min(shares.len());
            match shares.get_mut(at) {
                None => shares.push(budget.open(peer(client))),
                Some(share) if bytes % 3 == 0 => share.shrink(bytes / 2),
                Some(share) if bytes % 7 == 0 => share.complete(),
                Some(_) if bytes % 11 == 0 => drop(shares.swap_remove(at)),
                Some(share) => {
                    let taken = share.try_grow(bytes);
                    let peer = share.peer;
                    let (own, left) = budget.with(|ledger| {
                        (ledger.clients.get(&peer).copied().unwrap_or(0), BODY_BUDGET_BYTES - ledger.used_bytes)
                    });
                    prop_assert!(taken.is_err() || own <= (left * BODY_CLIENT_FACTOR).max(MAX_BODY_BYTES));
                }
            }
            let sum: usize = shares.iter().map(|share| share.bytes).sum();
            prop_assert_eq!(budget.used_bytes(), sum);
            prop_assert!(sum <= BODY_BUDGET_BYTES);
            let by_client: usize = budget.with(|ledger| ledger.clients.values().sum());
            prop_assert_eq!(by_client, sum);
        }
        drop(shares);
        let left = budget.with(|ledger| (ledger.used_bytes, ledger.clients.len(), ledger.unread.len()));
        prop_assert_eq!(left, (0, 0, 0));
    }
}

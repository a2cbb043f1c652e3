//! The queue against a plain count of who is inside.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

fn queue(max_queue: usize, high_watermark: Option<usize>, low_watermark: Option<usize>) -> Scheduling {
    Scheduling { max_queue, high_watermark, low_watermark, ..Scheduling::default() }
}

fn ask(host: u8) -> Ask {
    Ask { client: Peer::of(std::net::IpAddr::from([10, 0, 0, host])), ..Ask::default() }
}

/// What so many requests will take.
fn some(count: usize) -> Vec<u64> {
    vec![10; count]
}

#[test]
fn the_wait_follows_the_rate_of_service() {
    let admission = Arc::new(Admission::new(&queue(10, None, None), 2));
    let _places: Vec<_> = (0..12).map(|_| admission.enter().ok().unwrap()).collect();
    // As if one had ended so long ago, and another one now.
    let wait = |apart: Option<f64>| {
        let mut rate = ServiceRate::default();
        if let Some(apart) = apart {
            rate.record(Instant::now() - Duration::from_secs_f64(apart));
            rate.record(Instant::now());
        }
        admission.state().rate = rate;
        match admission.enter().err().unwrap() {
            Refusal::Full { retry_after, waiting, limit } => {
                assert_eq!((waiting, limit), (10, QueueLimit::MaxQueue(10)));
                retry_after.as_secs()
            }
            Refusal::Closed => panic!("not closed"),
        }
    };
    assert_eq!(wait(None), RETRY_AFTER_MIN_SECONDS);
    assert_eq!(wait(Some(0.01)), RETRY_AFTER_MIN_SECONDS);
    assert!((10..15).contains(&wait(Some(1.9))), "half of ten, one in two seconds");
    assert_eq!(wait(Some(SERVICE_RATE_WINDOW.as_secs_f64() - 1.0)), RETRY_AFTER_MAX_SECONDS);
}

#[test]
fn closed_means_nobody_enters_and_those_inside_stay() {
    let admission = Arc::new(Admission::new(&queue(1, None, None), 1));
    let place = admission.enter().ok().unwrap();
    assert!(admission.is_accepting());
    admission.close();
    assert!(!admission.is_accepting());
    assert_eq!(admission.enter().err().unwrap(), Refusal::Closed);
    assert_eq!(admission.in_flight(), 1);
    drop(place);
    assert_eq!(admission.in_flight(), 0);
}

#[test]
fn the_rate_is_that_of_the_last_requests() {
    let mut rate = ServiceRate::default();
    let start = Instant::now();
    rate.record(start);
    assert_eq!(rate.per_second(start), 0.0);
    for i in 1..=200_u32 {
        let now = start + Duration::from_millis(250) * i;
        rate.record(now);
        let seen = rate.per_second(now);
        assert!((seen - 4.0).abs() < 1e-6, "{seen}");
    }
    let last = start + Duration::from_secs(50);
    assert!(rate.per_second(last + Duration::from_secs(20)) < 3.0, "nothing ended since");
    let much_later = start + Duration::from_secs(3600);
    rate.record(much_later);
    assert_eq!(rate.per_second(much_later), 0.0, "a pause is no slowness");
}

#[test]
fn new_limits_hold_at_once_and_turn_nobody_out() {
    let admission = Arc::new(Admission::new(&queue(4, None, None), 1));
    let mut inside: Vec<_> = (0..5).map(|_| admission.enter().ok().unwrap()).collect();
    assert!(!admission.is_accepting());
    admission.set_limits(&queue(6, None, None));
    inside.push(admission.enter().ok().unwrap());
    admission.set_limits(&queue(2, None, None));
    assert!(admission.enter().is_err());
    assert_eq!(admission.in_flight(), 6, "they were let in");
    inside.truncate(2);
    inside.push(admission.enter().ok().unwrap());
    // A high watermark below what waits refuses from now on, and none any more lets in again.
    admission.set_limits(&queue(10, Some(1), Some(0)));
    assert!(!admission.is_accepting(), "two wait");
    inside.pop();
    assert!(!admission.is_accepting(), "one waits, and none may before it accepts");
    admission.set_limits(&queue(10, None, None));
    assert!(admission.is_accepting());
}

#[test]
fn once_above_the_high_watermark_it_refuses_down_to_the_low_one() {
    let admission = Arc::new(Admission::new(&queue(10, Some(4), Some(2)), 1));
    // One is served and five wait, the last of whom crosses the mark.
    let mut inside: Vec<_> = (0..6).map(|_| admission.enter().ok().unwrap()).collect();
    for waiting in [5, 4, 3] {
        let refusal = admission.enter().err().unwrap();
        let Refusal::Full { waiting: told, limit, .. } = refusal else { panic!("{refusal:?}") };
        assert_eq!((told, limit), (waiting, QueueLimit::Watermarks { high: 4, low: 2 }));
        inside.pop();
    }
    inside.push(admission.enter().ok().unwrap());
    assert!(admission.is_accepting(), "three wait again, and the high watermark was not crossed");
}

proptest! {
    #[test]
    fn never_more_inside_than_places(places in 1_usize..20, moves in proptest::collection::vec(any::<bool>(), 0..200)) {
        let admission = Arc::new(Admission::new(&queue(places - 1, None, None), 1));
        let mut held = Vec::new();
        for enter in moves {
            if enter {
                match admission.enter() {
                    Ok(place) => held.push(place),
                    Err(_) => prop_assert_eq!(held.len(), places),
                }
            } else {
                held.pop();
            }
            prop_assert_eq!(admission.in_flight(), held.len());
            prop_assert!(held.len() <= places);
        }
    }

    /// **Feature: distributed-inference-server, Property 7: Backpressure Hysteresis**
    /// **Validates: Requirements 3.1, 3.2**
    #[test]
    fn refusing_begins_above_the_high_watermark_and_ends_at_the_low_one(
        slots in 1_usize..4, high in 1_usize..12, gap in 1_usize..12, spare in 1_usize..6,
        moves in proptest::collection::vec(prop_oneof![3 => Just(true), 2 => Just(false)], 0..300),
    ) {
        let low = high.saturating_sub(gap);
        let admission = Arc::new(Admission::new(&queue(high + spare, Some(high), Some(low)), slots));
        let mut held = Vec::new();
        for enter in moves {
            let (depth_before, accepted_before) = (held.len().saturating_sub(slots), admission.is_accepting());
            if enter {
                match admission.enter() {
                    Ok(place) => {
                        prop_assert!(accepted_before);
                        held.push(place);
                    }
                    Err(_) => prop_assert!(!accepted_before),
                }
            } else {
                held.pop();
            }
            let (depth, accepting) = (held.len().saturating_sub(slots), admission.is_accepting());
            if depth > high {
                prop_assert!(!accepting, "{} wait", depth);
            }
            if depth < low || depth == 0 {
                prop_assert!(accepting, "{} wait", depth);
            }
            if accepting != accepted_before {
                prop_assert!(
                    (depth_before <= high && depth > high) || (depth_before > low && depth <= low),
                    "from {} to {}", depth_before, depth
                );
            }
        }
    }
}

#[test]
fn several_places_are_taken_all_or_none() {
    let scheduling = Scheduling { max_queue: 8, ..Scheduling::default() };
    let admission = Arc::new(Admission::new(&scheduling, 8));
    // Two requests of 16 answers, where 16 run and wait: one gets all of them, and the other one is refused as a whole.
    let all = admission.enter_all(Ask::default(), &some(16)).ok().unwrap();
    assert!(matches!(admission.enter_all(Ask::default(), &some(16)), Err(Refusal::Full { .. })));
    assert_eq!(admission.in_flight(), 16);
    drop(all);
    assert!(admission.enter_all(Ask::default(), &some(17)).is_err());
    assert_eq!(admission.in_flight(), 0, "what was refused holds nothing");
    let one = admission.enter_all(Ask::default(), &some(1)).ok().unwrap();
    assert!(admission.enter_all(Ask::default(), &some(16)).is_err());
    assert_eq!(admission.in_flight(), 1);
    drop(one);
    assert_eq!(admission.enter_all(Ask::default(), &some(16)).ok().unwrap().len(), 16);
}

proptest! {
    /// As if they came one by one, where all of them are let in; and nobody sees that they tried, where they are not.
    #[test]
    fn several_are_let_in_where_each_would_be(counts in proptest::collection::vec(1_usize..6, 0..30), high in 0_usize..6) {
        let scheduling =
            Scheduling { max_queue: 6, high_watermark: Some(high), low_watermark: Some(high / 2), ..Scheduling::default() };
        let (together, one_by_one) = (Arc::new(Admission::new(&scheduling, 2)), Arc::new(Admission::new(&scheduling, 2)));
        let (mut held, mut held_singly): (Vec<Vec<QueuePlace>>, Vec<Vec<QueuePlace>>) = Default::default();
        for (turn, count) in counts.into_iter().enumerate() {
            let singly: Vec<QueuePlace> = std::iter::from_fn(|| one_by_one.enter().ok()).take(count).collect();
            match together.enter_all(Ask::default(), &some(count)) {
                Ok(places) => {
                    prop_assert_eq!((places.len(), singly.len()), (count, count));
                    held.push(places);
                    held_singly.push(singly);
                }
                Err(_) => {
                    prop_assert!(singly.len() < count);
                    prop_assert_eq!(together.in_flight() + singly.len(), one_by_one.in_flight());
                    break;
                }
            }
            if turn % 3 == 2 {
                held.remove(0);
                held_singly.remove(0);
            }
        }
    }
}

#[test]
fn who_has_less_than_its_part_is_let_in_where_others_have_filled_the_queue() {
    let admission = Arc::new(Admission::new(&queue(8, None, None), 2));
    let crowd: Vec<_> = std::iter::from_fn(|| admission.enter_all(ask(1), &some(1)).ok()).collect();
    assert_eq!(crowd.len(), 10, "one client alone has all of it");
    let own = admission.enter_all(ask(2), &some(5)).ok().unwrap();
    assert!(admission.enter_all(ask(2), &some(1)).is_err(), "half of the places is its part");
    assert!(admission.enter_all(ask(1), &some(1)).is_err());
    let third = admission.enter_all(ask(3), &some(3)).ok().unwrap();
    assert!(admission.enter_all(ask(3), &some(1)).is_err());
    assert_eq!(admission.in_flight(), 18);
    drop((crowd, own, third));
    assert_eq!(admission.in_flight(), 0);
    assert!(admission.enter_all(ask(2), &some(10)).is_ok());
}

#[test]
fn watermarks_far_below_the_queue_hold_for_clients_that_have_their_part() {
    let admission = Arc::new(Admission::new(&queue(512, Some(5), Some(2)), 2));
    let mut crowds: Vec<_> =
        (0..8).map(|turn| admission.enter_all(ask(1 + turn % 2), &some(1)).ok().unwrap()).collect();
    // Six wait, one more than the mark; nobody who has two of the four up to the low one is let in until then.
    for waiting in [6, 5, 4, 3] {
        for host in [1, 2] {
            let Err(Refusal::Full { waiting: told, limit, .. }) = admission.enter_all(ask(host), &some(1)) else {
                panic!("client {host} was let in beside {waiting}")
            };
            assert_eq!((told, limit), (waiting, QueueLimit::Watermarks { high: 5, low: 2 }));
        }
        crowds.pop();
    }
    assert!(admission.enter_all(ask(1), &some(1)).is_ok());
    let mut inside: Vec<_> = std::iter::from_fn(|| admission.enter_all(ask(1), &some(1)).ok()).collect();
    assert_eq!(admission.in_flight(), 8);
    // And one who has none gets its part.
    inside.push(admission.enter_all(ask(3), &some(1)).ok().unwrap());
    assert!(admission.enter_all(ask(3), &some(1)).is_err(), "of three clients each has one");
    assert!(admission.enter_all(ask(1), &some(1)).is_err());
}

#[test]
fn with_more_clients_than_places_each_that_has_none_is_let_in() {
    let admission = Arc::new(Admission::new(&queue(3, None, None), 1));
    let crowd: Vec<_> = (0..4).map(|host| admission.enter_all(ask(host), &some(1)).ok().unwrap()).collect();
    assert!(admission.enter_all(ask(0), &some(1)).is_err());
    let others: Vec<_> = (4..=200).filter_map(|host| admission.enter_all(ask(host), &some(1)).ok()).collect();
    assert_eq!(others.len(), SHARED_PLACES, "and no more of them past the limit");
    assert_eq!(admission.in_flight(), crowd.len() + SHARED_PLACES);
}

#[test]
fn each_of_several_requests_counts_as_what_it_is() {
    let admission = Arc::new(Admission::new(&queue(8, None, None), 1));
    let places = admission.enter_all(ask(1), &[1000, 5, 5]).ok().unwrap();
    let tags: Vec<u64> = places.iter().map(|place| place.turn().start_tag).collect();
    assert_eq!(tags, [0, 1000, 1005]);
}

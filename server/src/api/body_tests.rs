#![allow(clippy::unwrap_used)]
//! Bodies that come slowly, in pieces or not at all, against those that come as they should.

use std::convert::Infallible;
use std::net::IpAddr;

use futures::{FutureExt, Stream, StreamExt, stream};
use tokio::task::JoinSet;

use super::*;
use crate::limits::BODY_BUDGET_BYTES;

/// A request from a client, whose body is `pieces`, and is declared to have so many bytes.
fn request(client: u8, declared: Option<usize>, pieces: impl Stream<Item = Bytes> + Send + 'static) -> Request {
    let mut request = Request::new(Body::from_stream(pieces.map(Ok::<_, Infallible>)));
    request.extensions_mut().insert(Peer::of(IpAddr::from([10, 0, 0, client])));
    if let Some(bytes) = declared {
        request.headers_mut().insert(header::CONTENT_LENGTH, bytes.into());
    }
    request
}

/// One byte, and never another.
fn one_byte() -> impl Stream<Item = Bytes> + Send + 'static {
    stream::once(async { Bytes::from_static(b"{") }).chain(stream::pending())
}

#[tokio::test]
async fn a_body_is_what_its_pieces_are_and_counts_as_what_it_is() {
    let budget = Budget::new(BODY_BUDGET_BYTES);
    let pieces: Vec<Bytes> = (0..1000_usize).map(|n| Bytes::from(vec![b'a' + (n % 26) as u8; n])).collect();
    let whole = pieces.concat();
    for declared in [Some(whole.len()), None] {
        let (body, share) = read(&budget, request(1, declared, stream::iter(pieces.clone()))).await.unwrap();
        assert!(body == whole);
        assert_eq!(share.bytes(), whole.len());
    }
    assert_eq!(budget.used_bytes(), 0);
}

#[test]
fn a_body_takes_as_much_as_has_come_twice_at_most_and_no_more_than_it_declares() {
    for most in [1, 100, BODY_CHUNK_BYTES, MAX_BODY_BYTES] {
        let mut capacity = 0;
        for needed in (1..=most).step_by(most.div_ceil(1000)) {
            capacity = grown(capacity, needed, most).unwrap_or(capacity);
            assert!(capacity >= needed && capacity <= most, "{needed} of {most}: {capacity}");
            assert!(capacity <= (2 * needed).max(BODY_CHUNK_BYTES), "{needed} of {most}: {capacity}");
        }
    }
}

#[tokio::test]
async fn what_is_declared_and_does_not_come_costs_nobody_else() {
    let budget = Budget::new(BODY_BUDGET_BYTES);
    // From as many addresses as there are: only what has come may count.
    let mut slow = JoinSet::new();
    for number in 0..500_usize {
        let (budget, request) = (budget.clone(), request((number % 250) as u8, Some(MAX_BODY_BYTES), one_byte()));
        slow.spawn(async move { read(&budget, request).await.is_ok() });
    }
    while budget.used_bytes() < 500 * BODY_CHUNK_BYTES {
        tokio::task::yield_now().await;
    }
    assert_eq!(budget.used_bytes(), 500 * BODY_CHUNK_BYTES);
    let whole = Bytes::from(vec![b' '; MAX_BODY_BYTES]);
    for client in [1, 249, 255] {
        for _ in 0..20 {
            let asked = request(client, Some(MAX_BODY_BYTES), stream::iter([whole.clone()]));
            // Nothing is waited for: it is done when it is first looked at.
            assert!(read(&budget, asked).now_or_never().unwrap().is_ok());
        }
    }
    slow.shutdown().await;
    assert_eq!(budget.used_bytes(), 0);
}

#[tokio::test]
async fn bodies_that_stop_a_byte_before_their_end_leave_room_for_others() {
    let budget = Budget::new(BODY_BUDGET_BYTES);
    let whole = Bytes::from(vec![b' '; MAX_BODY_BYTES]);
    let mut stuck = JoinSet::new();
    for _ in 0..500 {
        let almost = whole.slice(1..);
        let request = request(1, Some(MAX_BODY_BYTES), stream::once(async { almost }).chain(stream::pending()));
        let budget = budget.clone();
        stuck.spawn(async move { read(&budget, request).await.is_ok() });
    }
    while budget.used_bytes() < BODY_BUDGET_BYTES / 4 * 3 - MAX_BODY_BYTES {
        tokio::task::yield_now().await;
    }
    for client in 2..100 {
        let body = stream::iter([whole.clone()]);
        assert!(read(&budget, request(client, Some(MAX_BODY_BYTES), body)).now_or_never().unwrap().is_ok());
    }
}

#[test]
fn a_body_may_take_its_time_but_not_for_ever() {
    let start = Instant::now();
    let at = |seconds: u64| start + Duration::from_secs(seconds);
    let window = BODY_RATE_WINDOW.as_secs();
    let mut pace = Pace::new(start);
    for number in 1..=BODY_READ_LIMIT.as_secs() / window {
        // All that is needed comes in the last moment of each window.
        assert_eq!(pace.deadline(), at(number * window));
        pace.arrived(WINDOW_BYTES);
        let looked = pace.look(at(number * window));
        assert_eq!(looked.is_ok(), number * window < BODY_READ_LIMIT.as_secs(), "{number}");
    }

    let mut pace = Pace::new(start);
    pace.arrived(WINDOW_BYTES - 1);
    assert!(pace.look(at(window - 1)).is_ok());
    // While it waited for us, nobody could expect it to send.
    pace.pause(Duration::from_secs(5));
    assert!(pace.look(at(window + 4)).is_ok());
    let slow = pace.look(at(window + 5)).unwrap_err();
    assert_eq!(slow.status, 408);
    assert!(slow.message.contains(&format!("{} bytes came in {window} s", WINDOW_BYTES - 1)), "{}", slow.message);
}

#[tokio::test]
async fn what_is_too_large_is_refused_by_what_it_says_or_what_it_is() {
    let budget = Budget::new(BODY_BUDGET_BYTES);
    let said = request(1, Some(MAX_BODY_BYTES + 1), one_byte());
    assert_eq!(read(&budget, said).await.err().unwrap().error.status, 413);
    let megabyte = || stream::repeat(Bytes::from(vec![b' '; 1 << 20]));
    assert_eq!(read(&budget, request(1, None, megabyte())).await.err().unwrap().error.status, 413);
    assert_eq!(budget.used_bytes(), 0);
}

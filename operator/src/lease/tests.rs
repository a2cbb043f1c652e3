#![allow(clippy::unwrap_used)]
//! The election against the API server of `testing`.

use serde_json::json;

use super::*;
use crate::testing::FakeApi;

const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/system/leases/gantry";

fn elector(api: &FakeApi, identity: &str) -> Elector {
    Elector::new(api.client(), "system", "gantry".to_owned(), identity.to_owned())
}

fn spec(api: &FakeApi) -> LeaseSpec {
    api.get::<Lease>(LEASE).unwrap().spec.unwrap()
}

#[tokio::test(start_paused = true)]
async fn the_first_takes_it_and_the_second_waits() {
    let api = FakeApi::default();
    let held = elector(&api, "a").try_acquire(Instant::now()).await.unwrap();
    assert!(held.is_some());
    assert_eq!(api.writes(), ["POST /apis/coordination.k8s.io/v1/namespaces/system/leases"]);
    assert_eq!(spec(&api).holder_identity.as_deref(), Some("a"));
    assert_eq!(spec(&api).lease_transitions, Some(1));
    assert!(elector(&api, "b").try_acquire(Instant::now()).await.unwrap().is_none());
    assert_eq!(api.writes().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_nobody_renews_is_taken_after_its_duration_as_seen_here() {
    let api = FakeApi::default();
    elector(&api, "a").try_acquire(Instant::now()).await.unwrap();
    // Whatever the clock of the holder said.
    api.edit(LEASE, |lease| lease["spec"]["renewTime"] = json!("2001-01-01T00:00:00.000000Z"));
    let mut second = elector(&api, "b");
    let start = Instant::now();
    for (seconds, taken) in [(0, false), (14, false), (15, true)] {
        let held = second.try_acquire(start + Duration::from_secs(seconds)).await.unwrap();
        assert_eq!(held.is_some(), taken, "after {seconds}s");
    }
    assert_eq!(spec(&api).holder_identity.as_deref(), Some("b"));
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_renewed_is_not_taken() {
    let api = FakeApi::default();
    let first = elector(&api, "a");
    let mut held = elector(&api, "a").try_acquire(Instant::now()).await.unwrap().unwrap();
    let mut second = elector(&api, "b");
    let start = Instant::now();
    for seconds in (0..60).step_by(10) {
        held.lease = first.renew(&held.lease).await.unwrap().unwrap();
        assert!(second.try_acquire(start + Duration::from_secs(seconds)).await.unwrap().is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn of_two_that_take_it_at_once_one_gets_it() {
    let api = FakeApi::default();
    api.fail(&format!("GET {LEASE}"), 404, "NotFound");
    elector(&api, "a").try_acquire(Instant::now()).await.unwrap().unwrap();
    // The second has read that there was none.
    api.fail(&format!("GET {LEASE}"), 404, "NotFound");
    assert!(elector(&api, "b").try_acquire(Instant::now()).await.unwrap().is_none());
    assert_eq!(spec(&api).holder_identity.as_deref(), Some("a"));
}

#[tokio::test(start_paused = true)]
async fn a_restarted_container_goes_on_at_once_and_a_released_lease_is_taken_at_once() {
    let api = FakeApi::default();
    elector(&api, "a").try_acquire(Instant::now()).await.unwrap();
    let held = elector(&api, "a").try_acquire(Instant::now()).await.unwrap().unwrap();
    assert_eq!(spec(&api).lease_transitions, Some(1));
    elector(&api, "a").release(held).await;
    assert_eq!(spec(&api).holder_identity.as_deref(), Some(""));
    assert!(elector(&api, "b").try_acquire(Instant::now()).await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_finds_another_one_gives_up_at_once() {
    let api = FakeApi::default();
    let mut first = elector(&api, "a");
    let mut held = first.acquire(|| {}).await;
    api.edit(LEASE, |lease| lease["spec"]["holderIdentity"] = json!("b"));
    let start = Instant::now();
    assert!(matches!(first.hold(&mut held).await, Lost::Taken { holder, .. } if holder == "b"));
    assert!(start.elapsed() <= RENEW_PERIOD * 2);
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_cannot_renew_gives_up_before_the_lease_may_be_taken() {
    let api = FakeApi::default();
    let mut first = elector(&api, "a");
    let mut held = first.acquire(|| {}).await;
    for _ in 0..20 {
        api.fail(&format!("PUT {LEASE}"), 500, "InternalError");
    }
    let start = Instant::now();
    assert!(matches!(first.hold(&mut held).await, Lost::Expired(_)));
    assert!(start.elapsed() >= RENEW_DEADLINE && start.elapsed() < LEASE_DURATION, "{:?}", start.elapsed());
}

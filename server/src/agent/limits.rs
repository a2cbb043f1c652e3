//! Every limit of the agent, by name.

use std::time::Duration;

/// How often what the pod would report is looked at, should no event tell of a change: a degradation has none.
pub const LOOK_PERIOD: Duration = Duration::from_secs(1);
/// The largest random share by which the time between two writes for figures is prolonged, so that pods do not write together.
pub const FIGURES_JITTER: f64 = 0.2;
/// How long one write may take.
pub const WRITE_LIMIT: Duration = Duration::from_secs(10);
/// How long one watch lasts before it is renewed.
pub const WATCH_SECONDS: u32 = 120;
/// A connection to the API server on which nothing came for so long is dead: a watch that is renewed would have ended.
pub const READ_LIMIT: Duration = Duration::from_secs(150);
/// How long a connection to the API server may take to be made.
pub const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// The wait before a watch that failed is started again; it doubles.
pub const WATCH_BACKOFF_MIN: Duration = Duration::from_millis(500);
/// The longest such wait: a spec that changed while the API server was away is seen this soon after it is back.
pub const WATCH_BACKOFF_MAX: Duration = Duration::from_secs(5);
// What the operator counts on: a watch that lives is renewed before it is taken for dead, and an agent whose connection broke
// knows what is asked, and has said so, before it is called late.
const _: () = {
    assert!(WATCH_SECONDS as u64 + CONNECT_LIMIT.as_secs() < READ_LIMIT.as_secs());
    let blind = READ_LIMIT.as_secs() + WATCH_BACKOFF_MAX.as_secs() + CONNECT_LIMIT.as_secs() + WRITE_LIMIT.as_secs();
    assert!(blind <= gantry_crds::AGENT_BLIND_MAX.as_secs());
};
/// How often the cache is looked through for files that no revision names, besides when these change: one that was in use
/// then may be no more.
pub const TIDY_PERIOD: Duration = Duration::from_secs(60);

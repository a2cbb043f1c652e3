//! Waiting for conditions: with a deadline, and an error that says what was seen last.

use std::{fmt::Debug, time::Duration};

use anyhow::{Result, bail};
use futures::StreamExt;
use kube::{
    Api, Resource,
    runtime::{WatchStreamExt, watcher::watch_object},
};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, interval, timeout_at};

/// What a look at the world told.
pub enum Check<T> {
    /// The condition holds.
    Done(T),
    /// Not yet; this is what there is instead.
    Wait(String),
    /// It will never hold.
    Never(String),
}

impl Check<()> {
    /// Done when `holds`; otherwise `seen` is what there is instead.
    pub fn when(holds: bool, seen: impl FnOnce() -> String) -> Self {
        if holds { Self::Done(()) } else { Self::Wait(seen()) }
    }
}

/// Watches the object `name` until `check` is done; the object is `None` while it does not exist.
///
/// # Errors
/// When `check` says never, or `limit` is over: with `what` was awaited and what was seen last.
pub async fn await_object<K, T>(
    api: &Api<K>,
    name: &str,
    what: &str,
    limit: Duration,
    mut check: impl FnMut(Option<&K>) -> Check<T>,
) -> Result<T>
where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let deadline = Instant::now() + limit;
    let mut last = "nothing was seen of it".to_owned();
    let mut objects = Box::pin(watch_object(api.clone(), name).default_backoff());
    while let Ok(Some(object)) = timeout_at(deadline, objects.next()).await {
        match object.map(|object| check(object.as_ref())) {
            Ok(Check::Done(value)) => return Ok(value),
            Ok(Check::Wait(seen)) => last = seen,
            Ok(Check::Never(seen)) => bail!("{what}: it will not be: {seen}"),
            Err(error) => last = format!("{last} (then the watch broke: {error})"),
        }
    }
    bail!("{what}: not within {limit:?}; last seen: {last}")
}

/// Looks every `period` until `check` is done; an error of `check` counts as not yet.
///
/// # Errors
/// When `check` says never, or `limit` is over: with `what` was awaited and what was seen last.
pub async fn poll<T>(
    what: &str,
    limit: Duration,
    period: Duration,
    mut check: impl AsyncFnMut() -> Result<Check<T>>,
) -> Result<T> {
    let deadline = Instant::now() + limit;
    let mut last = "nothing was seen of it".to_owned();
    let mut tick = interval(period);
    loop {
        tick.tick().await;
        match timeout_at(deadline, check()).await {
            Ok(Ok(Check::Done(value))) => return Ok(value),
            Ok(Ok(Check::Wait(seen))) => last = seen,
            Ok(Ok(Check::Never(seen))) => bail!("{what}: it will not be: {seen}"),
            Ok(Err(error)) => last = format!("{error:#}"),
            Err(_) => bail!("{what}: not within {limit:?}; last seen: {last}"),
        }
        if Instant::now() >= deadline {
            bail!("{what}: not within {limit:?}; last seen: {last}");
        }
    }
}

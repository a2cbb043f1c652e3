//! Follows the one object: events in, the latest [`Assignment`] and what the writer needs to know of the object out.
//!
//! The object is taken as it comes and read here, so that one of another shape is an event like any other and not a
//! failed watch.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use gantry_crds::InferenceService;
use gantry_rollout::Desired;
use kube::core::{ApiResource, DynamicObject};
use kube::runtime::WatchStreamExt;
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use tokio::sync::watch;

use super::desired::{Asked, read};
use super::limits::{WATCH_BACKOFF_MAX, WATCH_BACKOFF_MIN, WATCH_SECONDS};
use super::{AgentConfig, Kept};
use crate::fetch::{Source, StoreSettings};
use crate::rollout::Assignment;

/// What the writer needs to know of the object.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Observed {
    /// Whether it is there.
    pub(super) exists: bool,
    /// Its resource version, where it is a number.
    pub(super) resource_version: Option<u64>,
    /// Whether this pod's entry stands in it.
    pub(super) has_entry: bool,
    /// Pods of the service.
    pub(super) replicas: u32,
    /// Why what it asks cannot be read.
    pub(super) problem: Option<String>,
}

/// The API of the object, without its type.
pub(super) fn api(client: Client, namespace: &str) -> Api<DynamicObject> {
    Api::namespaced_with(client, namespace, &ApiResource::erase::<InferenceService>(&()))
}

/// Follows the object for as long as it is polled.
pub(super) async fn follow(
    client: Client,
    config: AgentConfig,
    seen: watch::Sender<Observed>,
    asked: watch::Sender<Option<Arc<Assignment>>>,
    named: watch::Sender<Kept>,
) {
    // With a name in `resourceNames`, list and watch are allowed for exactly this selector.
    let only = watcher::Config::default().fields(&format!("metadata.name={}", config.service)).timeout(WATCH_SECONDS);
    let mut events = watcher(api(client, &config.namespace), only).backoff(WatchBackoff::default()).boxed();
    let mut listed = false;
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Init) => listed = false,
            Ok(Event::Apply(object) | Event::InitApply(object)) => {
                listed = true;
                take(object, &config, &seen, &asked, &named);
            }
            Ok(Event::InitDone) if listed => {}
            Ok(Event::InitDone | Event::Delete(_)) => {
                tracing::warn!(
                    service = config.service,
                    "the InferenceService is not there; what is loaded goes on answering"
                );
                seen.send_replace(Observed::default());
            }
            Err(error) if is_token_refused(&error) => tracing::error!(%error, "{TOKEN_REFUSED}"),
            Err(error) => tracing::warn!(%error, "cannot follow the InferenceService; it is tried again"),
        }
    }
}

/// What no further try mends.
const TOKEN_REFUSED: &str = "the API server does not know this pod's token: its ServiceAccount was deleted, or deleted and made anew. What is \
    loaded goes on answering, and nothing is heard of the service or reported to it any more. The operator replaces pods whose account it \
    made itself; others have to be: annotate the service with gantry.dev/restart=<any new value>";

/// Whether the API server does not know who asks.
fn is_token_refused(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut causes = std::iter::successors(Some(error), |error| error.source());
    causes.any(|cause| matches!(cause.downcast_ref(), Some(kube::Error::Api(status)) if status.code == 401))
}

/// Addresses that versions name without a digest.
fn unpinned(desired: &Desired) -> Vec<Source> {
    let sources = desired.versions.values().flat_map(|version| {
        let draft = version.runtime.speculative.as_ref().and_then(|speculative| speculative.draft.as_ref());
        std::iter::once(&version.model.source).chain(draft)
    });
    let sources = sources.filter(|source| source.sha256.is_none());
    sources.filter_map(|source| Source::unpinned(source.uri.as_deref()?, StoreSettings::of(source)).ok()).collect()
}

fn take(
    object: DynamicObject,
    config: &AgentConfig,
    seen: &watch::Sender<Observed>,
    asked: &watch::Sender<Option<Arc<Assignment>>>,
    named: &watch::Sender<Kept>,
) {
    let resource_version = object.metadata.resource_version.as_ref().and_then(|version| version.parse().ok());
    let observed = match read(object, &config.has) {
        Ok(Asked { assignment, entries, replicas, digests, keeps_prefixes }) => {
            let addresses = unpinned(&assignment.desired);
            asked.send_if_modified(|asked| {
                let changed = asked.as_deref() != Some(&assignment);
                if changed {
                    *asked = Some(Arc::new(assignment));
                }
                changed
            });
            let digests = digests.iter().filter_map(|digest| digest.parse().ok()).collect();
            let now = Kept { digests, addresses, prefixes: keeps_prefixes };
            named.send_if_modified(|kept| {
                let changed = *kept != now;
                if changed {
                    *kept = now;
                }
                changed
            });
            Observed {
                exists: true,
                resource_version,
                has_entry: entries.contains(&config.pod),
                replicas,
                problem: None,
            }
        }
        Err(error) => {
            tracing::error!(%error, "the InferenceService is left out");
            let before = seen.borrow().clone();
            // Whether the entry is there is not known either: it is written when it changes.
            Observed {
                exists: true,
                resource_version: None,
                has_entry: true,
                problem: Some(error.to_string()),
                ..before
            }
        }
    };
    seen.send_replace(observed);
}

/// Doubles with each failure, with a random share, up to a few seconds.
#[derive(Default)]
struct WatchBackoff {
    failures: u32,
}

impl Iterator for WatchBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let wait = WATCH_BACKOFF_MIN.saturating_mul(1 << self.failures.min(8)).min(WATCH_BACKOFF_MAX);
        self.failures = self.failures.saturating_add(1);
        // From half of it on: pods that lost the API server together do not come back together.
        Some(wait.mul_f64(rand::random_range(0.5..=1.0)))
    }
}

impl Backoff for WatchBackoff {
    fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn a_token_that_is_not_known_is_no_trouble_with_the_connection() {
        for (code, refused) in [(401, true), (403, false), (500, false)] {
            let answer = || kube::Error::Api(Box::new(Status { code, ..Status::default() }));
            for error in [watcher::Error::WatchStartFailed(answer()), watcher::Error::InitialListFailed(answer())] {
                assert_eq!(is_token_refused(&error), refused, "{error}");
            }
        }
    }
}

//! Why a pod's volume cannot be mounted: the kubelet says so in Events alone.
//!
//! They are asked for by the pod's name and only while it waits, a handful at once: a watch would be one of every Event of
//! the cluster. A look that fails, or takes long, shows nothing and holds nothing up.

use futures::future;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Event;
use kube::{Api, Client, api::ListParams};
use tokio::time::timeout;
use tracing::warn;

use crate::limits::{JUDGED_LOOK_TIMEOUT, POD_EVENTS_MAX, VOLUME_EVENT_AGE_MAX, VOLUME_MESSAGE_BYTES_MAX, shortened};

/// Reasons of Events about volumes, as kubelet and the attach/detach controller give them.
const REASONS: [&str; 3] = ["FailedMount", "FailedAttachVolume", "FailedMapVolume"];

/// What begins a text about one volume. Others sum up what several wait for, in an order that changes with every try.
const OF_ONE_VOLUME: [&str; 3] = ["MountVolume.", "AttachVolume.", "MapVolume."];

/// Of those of `pods` that a volume keeps from being made: their names, and what was said of the volume last.
pub async fn failures(client: &Client, namespace: &str, pods: Vec<String>, now: Timestamp) -> Vec<(String, String)> {
    let events: Api<Event> = Api::namespaced(client.clone(), namespace);
    let look = async |pod: String| {
        let fields = format!("involvedObject.kind=Pod,involvedObject.name={pod},type=Warning");
        let list = ListParams::default().fields(&fields).limit(POD_EVENTS_MAX);
        let told = |error: &dyn std::fmt::Display| warn!(namespace, pod, %error, "Events about a pod cannot be listed");
        match timeout(JUDGED_LOOK_TIMEOUT, events.list(&list)).await {
            Ok(Ok(events)) => failure(&events.items, now).map(|failure| (pod, failure)),
            Ok(Err(error)) => {
                told(&error);
                None
            }
            Err(elapsed) => {
                told(&elapsed);
                None
            }
        }
    };
    future::join_all(pods.into_iter().map(look)).await.into_iter().flatten().collect()
}

/// What these events say of a volume, on one line. Of several the one that comes first in the alphabet, so that it is the same
/// whichever was tried last.
fn failure(events: &[Event], now: Timestamp) -> Option<String> {
    let oldest = now - SignedDuration::try_from(VOLUME_EVENT_AGE_MAX).unwrap_or(SignedDuration::MAX);
    let is_of_now = |event: &&Event| {
        let series = event.series.as_ref().and_then(|series| series.last_observed_time.as_ref()).map(|time| time.0);
        let last = event.last_timestamp.as_ref().map(|time| time.0);
        let first = event.event_time.as_ref().map(|time| time.0);
        series.or(last).or(first).is_some_and(|seen| seen >= oldest)
    };
    let is_about_a_volume = |event: &&Event| event.reason.as_deref().is_some_and(|reason| REASONS.contains(&reason));
    let texts = events.iter().filter(is_about_a_volume).filter(is_of_now).filter_map(|event| event.message.as_deref());
    let text = texts.filter(|text| OF_ONE_VOLUME.iter().any(|start| text.starts_with(start))).min()?;
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    Some(shortened(&line, VOLUME_MESSAGE_BYTES_MAX))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use serde_json::json;

    use super::*;

    #[test]
    fn the_newest_word_about_one_volume_is_told_and_nothing_else() {
        let now: Timestamp = "2026-01-01T01:00:00Z".parse().unwrap();
        let event = |reason: &str, at: &str, message: &str| -> Event {
            serde_json::from_value(json!({"metadata": {}, "involvedObject": {}, "reason": reason, "message": message,
                "lastTimestamp": at}))
            .unwrap()
        };
        let mount = "MountVolume.SetUp failed for volume \"models\" : mount failed: exit status 32\nOutput: no route";
        let mut events = vec![
            event("BackOff", "2026-01-01T00:59:59Z", "MountVolume. is no word of this reason"),
            event("FailedMount", "2026-01-01T00:59:59Z", "Unable to attach or mount volumes: timed out"),
            event("FailedMount", "2026-01-01T00:30:00Z", "AttachVolume.Attach failed long ago"),
        ];
        assert_eq!(failure(&events, now), None);
        events.push(event("FailedMount", "2026-01-01T00:58:30Z", mount));
        let told = "MountVolume.SetUp failed for volume \"models\" : mount failed: exit status 32 Output: no route";
        assert_eq!(failure(&events, now).as_deref(), Some(told));
        events.insert(
            0,
            event("FailedAttachVolume", "2026-01-01T00:59:59Z", &format!("AttachVolume.Attach {}", "x".repeat(999))),
        );
        let told = failure(&events, now).unwrap();
        assert!(told.starts_with("AttachVolume.Attach x") && told.len() == VOLUME_MESSAGE_BYTES_MAX, "{told}");
    }
}

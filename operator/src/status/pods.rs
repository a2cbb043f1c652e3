//! Why pods do not answer, from what they say themselves: for the conditions of their service.

use gantry_crds::status::{ReplicaHealth, ReplicaStatus};

use super::ServiceInputs;
use crate::limits::MESSAGE_PODS_MAX;

/// Why pods are missing among those that answer, in a line: what the cluster says of them, then what they say.
pub(super) fn missing(inputs: &ServiceInputs) -> Option<String> {
    inputs.observed.trouble().or_else(|| own_words(inputs))
}

/// What pods that do not answer say of themselves.
fn own_words(inputs: &ServiceInputs) -> Option<String> {
    let status = inputs.service.status.as_ref()?;
    let silent = inputs.observed.pods.iter().filter(|pod| pod.counted && !pod.ready);
    let reports = silent.filter_map(|pod| status.replicas.iter().find(|report| report.pod == pod.name));
    let words: Vec<_> = reports.filter_map(trouble).collect();
    let shown = words.iter().take(MESSAGE_PODS_MAX).cloned().collect::<Vec<_>>().join("; ");
    match words.len().saturating_sub(MESSAGE_PODS_MAX) {
        _ if words.is_empty() => None,
        0 => Some(shown),
        more => Some(format!("{shown}; and {more} more")),
    }
}

/// What a pod lacks. A wait that is told in seconds is left out: a condition would be written at each try.
fn trouble(report: &ReplicaStatus) -> Option<String> {
    let restored = report.candidate.as_ref().and_then(|candidate| candidate.message.as_deref());
    let of_worker = || (report.health != ReplicaHealth::Healthy).then_some(restored).flatten();
    let why = report.message.as_deref().or_else(of_worker)?;
    let why = why.split("; tries again in ").next().unwrap_or(why);
    Some(format!("pod {}: {why}", report.pod))
}

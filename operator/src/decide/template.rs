//! Who may judge a version: only pods that have what the spec asks for.
//!
//! A change of the resources replaces the pods, and the active version answers from the old ones until the new ones do. A
//! version that comes with such a change is meant for the new resources: what an old pod says about it says nothing.

use gantry_crds::status::RolloutStatus;

use super::{CountedPod, World, is_prepared};

/// Pods that will judge once they have come for older ones: they have a voice each, which has not been heard yet. A pod
/// that comes beside those that there should be comes for one of these.
pub(super) fn to_come(world: &World) -> usize {
    to_be_heard(world, world.judges().count())
}

/// The same where so many have a voice: one that has come and answers nobody yet has none.
pub(super) fn to_be_heard(world: &World, voices: usize) -> usize {
    let missing = usize::try_from(world.target_replicas).unwrap_or(0).saturating_sub(voices);
    // Of another side all are still to come that are not there.
    if world.sides.judges_are_other { missing } else { world.older_pods().min(missing) }
}

/// Whether the switch need not wait for older pods: they stay until new ones answer, and a new one that cannot have the active
/// version, because it needs what it has not or its source is gone, will answer with the candidate alone. One suffices:
/// the older ones wait for it, whatever other new ones answer with.
pub(super) fn needs_the_switch(world: &World, now: &RolloutStatus) -> bool {
    let has_no_other = |pod: &CountedPod| pod.report.is_some_and(|report| report.version.is_none());
    world.judges().any(|pod| is_prepared(pod, now) && has_no_other(pod))
}

/// That older pods are replaced first, if there are any.
pub(super) fn waits_for_replacement(world: &World) -> Option<String> {
    let (pods, have) = match world.older_pods() {
        0 => return None,
        1 => ("1 older pod is".to_owned(), "it has"),
        more => (format!("{more} older pods are"), "they have"),
    };
    let gpu = world.spec.is_some_and(|spec| spec.pod.gpu.is_some());
    let how = if gpu { ", each before its successor comes, since no GPU is spare" } else { "" };
    let why_not = world.missing_pod.map(|why| format!("; {why}")).unwrap_or_default();
    Some(format!("{pods} replaced first{how}: the spec asks for other resources or nodes than {have}{why_not}"))
}

//! Who may judge a version: only pods that have what the spec asks for.
//!
//! A change of the resources replaces the pods, and the active version answers from the old ones until the new ones do. A
//! version that comes with such a change is meant for the new resources: what an old pod says about it says nothing.

use gantry_crds::status::RolloutStatus;

use super::{CountedPod, World, is_prepared};

/// The pods of the newest template, and how many there are of older ones.
pub(super) fn newest<'a>(world: &World<'a>) -> (Vec<CountedPod<'a>>, usize) {
    let newest: Vec<_> = world.pods.iter().filter(|pod| !pod.outdated).copied().collect();
    let older = world.pods.len() - newest.len();
    // A world that was narrowed before has none left to leave out.
    (newest, world.older_pods + older)
}

/// Whether the switch need not wait for older pods: they stay until new ones answer, and new ones that cannot have the active
/// version, because it needs what they have not or its source is gone, will answer with the candidate alone.
pub(super) fn needs_the_switch(world: &World, now: &RolloutStatus) -> bool {
    let has_no_other = |pod: &CountedPod| pod.report.is_some_and(|report| report.version.is_none());
    !world.pods.is_empty() && world.pods.iter().all(|pod| is_prepared(pod, now) && has_no_other(pod))
}

/// That older pods are replaced first, if there are any.
pub(super) fn waits_for_replacement(world: &World) -> Option<String> {
    let (pods, have) = match world.older_pods {
        0 => return None,
        1 => ("1 older pod is".to_owned(), "it has"),
        more => (format!("{more} older pods are"), "they have"),
    };
    let gpu = world.spec.is_some_and(|spec| spec.pod.gpu.is_some());
    let how = if gpu { ", each before its successor comes, since no GPU is spare" } else { "" };
    Some(format!("{pods} replaced first{how}: the spec asks for other resources than {have}"))
}

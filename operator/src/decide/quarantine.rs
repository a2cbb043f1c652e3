//! Which pods get no requests for what they answer with.
//!
//! A version that is taken back is gone from a pod as soon as that has the one before. A pod that has to load that first, or cannot have
//! it (its source is away, it has no room), would answer with the bad one until then. It does not where half of the pods that there
//! should be answer with a version that was neither refused nor taken back: its agent says that it is not ready, and goes on bringing the
//! active version. With fewer of those the service would break down under its requests, and with none nobody would answer them.

use gantry_crds::status::{RejectedOutcome, ReplicaStatus, RolloutStep};

use super::{RolloutState, World, judges_the_model};

/// The pods, by name.
pub(super) fn pods(world: &World, state: &RolloutState) -> Vec<String> {
    let is_latched = |version: &String| {
        let latched = state.rejected.as_ref().filter(|rejected| rejected.version == *version);
        latched.is_some_and(|latched| latched.outcome == RejectedOutcome::RolledBack || judges_the_model(latched.gate))
    };
    let is_refused = |version: &String| {
        let of_history = || world.stamped.iter().any(|stamped| stamped.version.name == *version && stamped.is_refused);
        state.active.as_ref() != Some(version) && (is_latched(version) || of_history())
    };
    let reports = || world.pods.iter().filter_map(|pod| Some((pod, pod.report?, pod.report?.version.as_ref()?)));
    let good = reports().filter(|(pod, _, version)| pod.ready && !is_refused(version)).count();
    let bad: Vec<_> = reports().filter(|(_, _, version)| is_refused(version)).collect();
    let wanted = usize::try_from(world.target_replicas).unwrap_or(0).max(good + bad.len());
    if 2 * good < wanted {
        return Vec::new();
    }
    // Those that have the way back loaded are through in a moment.
    let goes_back = state.rollout.as_ref().is_some_and(|rollout| rollout.step == RolloutStep::Rollback);
    let has_it = |report: &ReplicaStatus| report.resident.is_some() && report.resident == state.active;
    let stay = bad.into_iter().filter(|(_, report, _)| !(goes_back && has_it(report)));
    let mut names: Vec<_> = stay.map(|(pod, ..)| pod.name.to_owned()).collect();
    names.sort();
    names
}

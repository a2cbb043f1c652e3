//! Why a version is refused or taken back, and the sentences that say so: cause, figure, next action.

use gantry_crds::status::{CandidatePhase, GateName, GateVerdict, ReplicaHealth, RolloutStatus};

use super::{CountedPod, World, candidate_report, is_prepared, prepared_pods, serves, template};
use crate::{
    limits::{self, MESSAGE_PODS_MAX, SWITCH_TIMEOUT},
    validate::RETRY_ANNOTATION,
};

/// Why a version is refused or taken back.
pub(super) struct Failure {
    pub(super) gate: GateName,
    pub(super) value: Option<String>,
    pub(super) message: String,
}

impl Failure {
    /// A pod says that the candidate failed, in a report that is not left over from an earlier attempt.
    pub(super) fn of_candidate(pod: &CountedPod, now: &RolloutStatus) -> Option<Self> {
        let candidate = candidate_report(pod, now).filter(|candidate| candidate.phase == CandidatePhase::Failed)?;
        let gate = candidate.gates.iter().find(|gate| gate.verdict == GateVerdict::Fail);
        let name = gate.map_or(GateName::Load, |gate| gate.name);
        let value = gate.and_then(|gate| gate.value.clone());
        let why = gate.and_then(|gate| gate.message.clone()).or_else(|| candidate.message.clone());
        let at = format!("{} gate on pod {}", name.as_str(), pod.name);
        let message = match (&why, &value) {
            (Some(why), _) => format!("{at}: {why}"),
            (None, Some(value)) => format!("{at}: {value}"),
            (None, None) => format!("{at} gave no reason: see the pod's log"),
        };
        // What these gates say of a model ends with what to do about it.
        let advises = matches!(
            name,
            GateName::Digest | GateName::Format | GateName::Memory | GateName::Template | GateName::Prompts
        );
        let message = if advises && why.is_some() { limits::message(&message) } else { with_action(name, &message) };
        Some(Self { gate: name, value, message })
    }

    pub(super) fn of_deadline(world: &World, now: &RolloutStatus, prepared: usize) -> Self {
        let seconds = now.deadline.0.duration_since(now.started_at.0).as_secs();
        let value = format!("{prepared} of {} pods prepared in {seconds}s", world.pods.len());
        let message = [Some(value.clone()), waiting_for(world, now), template::waits_for_replacement(world)];
        let message = message.into_iter().flatten().collect::<Vec<_>>().join("; ");
        Self { gate: GateName::Deadline, value: Some(value), message: with_action(GateName::Deadline, &message) }
    }

    /// The worker of a pod that has switched died too often, or a pod lost the version before it could switch.
    pub(super) fn after_switch(pod: &CountedPod, now: &RolloutStatus) -> Option<Self> {
        let report = pod.report?;
        if serves(report, &now.version) && report.health == ReplicaHealth::Failed {
            let why = report.message.as_deref().unwrap_or("its worker died too often: see the pod's log");
            let message = format!("pod {}: {why}", pod.name);
            return Some(Self {
                gate: GateName::Health,
                value: Some("worker failed".to_owned()),
                message: with_action(GateName::Health, &message),
            });
        }
        // A pod without any version is new: that it cannot load the active one is no reason to change the others.
        report.version.as_ref().and_then(|_| Self::of_candidate(pod, now))
    }

    pub(super) fn of_switch_deadline(world: &World, version: &str) -> Self {
        let lags = |pod: &&CountedPod| !pod.report.is_some_and(|report| serves(report, version));
        let late: Vec<_> = world.pods.iter().filter(lags).map(|pod| pod.name.to_owned()).collect();
        let value =
            format!("{} of {} pods did not switch in {}s", late.len(), world.pods.len(), SWITCH_TIMEOUT.as_secs());
        let message = format!("{value}: {}", some_of(&late));
        Self { gate: GateName::Deadline, value: Some(value), message: with_action(GateName::Deadline, &message) }
    }
}

/// Adds the next action to the cause.
fn with_action(gate: GateName, cause: &str) -> String {
    // What these say may be put right without the spec, so that nothing here tells of it.
    let otherwise =
        format!("where that changes nothing here, annotate the service with {RETRY_ANNOTATION}=<any new value>");
    let action = match gate {
        GateName::Fetch | GateName::Load => format!("correct it; {otherwise}"),
        GateName::Deadline => format!("correct that, or raise spec.rollout.progressDeadline; {otherwise}"),
        GateName::Digest => format!("correct the sha256 in the spec, or the file; {otherwise}"),
        GateName::Memory => "use a smaller model or context, or raise spec.resources.memory".to_owned(),
        GateName::Health => format!("change spec.model, or raise spec.resources.memory; {otherwise}"),
        GateName::Template => "change spec.model".to_owned(),
        _ => "change spec.model or spec.rollout.gates".to_owned(),
    };
    limits::message(&format!("{}; {action}", cause.trim_end_matches(['.', ' '])))
}

/// How far the fleet is with a version that it prepares.
pub(super) fn prepare_message(world: &World, now: &RolloutStatus) -> String {
    let replacement = template::waits_for_replacement(world);
    if world.pods.is_empty() {
        return replacement.unwrap_or_else(|| "waits for a running pod".to_owned());
    }
    let prepared = prepared_pods(world, now);
    let summary = Some(format!("{prepared} of {} pods prepared", world.pods.len()));
    [summary, waiting_for(world, now), replacement].into_iter().flatten().collect::<Vec<_>>().join("; ")
}

/// The pods that are not prepared, if there are any, and how far each is.
fn waiting_for(world: &World, now: &RolloutStatus) -> Option<String> {
    let unprepared = world.pods.iter().filter(|pod| !is_prepared(pod, now)).map(|pod| match pod.report {
        Some(_) => match candidate_report(pod, now) {
            Some(candidate) => format!("{} is {:?}", pod.name, candidate.phase),
            None => format!("{} has not begun", pod.name),
        },
        None => format!("{} has not reported", pod.name),
    });
    let unprepared: Vec<_> = unprepared.collect();
    (!unprepared.is_empty()).then(|| some_of(&unprepared))
}

/// The first few of `items`, and how many more there are.
fn some_of(items: &[String]) -> String {
    let shown = items.iter().take(MESSAGE_PODS_MAX).cloned().collect::<Vec<_>>().join(", ");
    match items.len().saturating_sub(MESSAGE_PODS_MAX) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

//! Why a version is refused or taken back, and the sentences that say so: cause, figure, next action.

use gantry_crds::status::{BreachStatus, CandidatePhase, CandidateStatus, GateName, GateVerdict, RolloutStatus};
use jiff::Timestamp;

use super::{CountedPod, World, agents, candidate_report, fleet, hold, progress, template, waits};
use crate::{
    limits::{self, JUDGED_RESTARTS_MAX, MESSAGE_PODS_MAX, PROGRESS_DEADLINES_MAX},
    text::some_of,
    validate::{NamedObject, RETRY_ANNOTATION},
};

/// The figure of a rollout for whose pods no node has room.
const NO_ROOM: &str = "no room for more pods";

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
        use GateName::{Drift, Memory, Performance, Prompts, Shadow, Template};
        let advises = matches!(name, Memory | Template | Prompts | Drift | Performance | Shadow);
        let message = if advises && why.is_some() { limits::message(&message) } else { with_action(name, &message) };
        Some(Self { gate: name, value, message })
    }

    pub(super) fn of_deadline(world: &World, now: &RolloutStatus, prepared: usize) -> Self {
        let pods = world.judges().count();
        let got_on_at = now.progress.as_ref().map_or(now.started_at.0, |progress| progress.at.0);
        let seconds = |since: Timestamp| now.deadline.0.duration_since(since).as_secs();
        let used_up = world.spec.and_then(|spec| progress::used_up(now, progress::time(spec, now))).map(seconds);
        let value = match used_up {
            Some(seconds) => format!("{prepared} of {pods} pods prepared, not all within {seconds}s"),
            None => format!("{prepared} of {pods} pods prepared, none got on for {}s", seconds(got_on_at)),
        };
        let longest = used_up
            .map(|_| format!("that is {PROGRESS_DEADLINES_MAX} times the deadline, the longest that pods may get on"));
        let missing = world.missing_pod.filter(|_| pods < judges_wanted(world)).map(str::to_owned);
        let is_missing = missing.is_some();
        let replacement = template::waits_for_replacement(world);
        let message = [Some(value.clone()), longest, waiting_for(world, now, true), missing, replacement];
        let message = message.into_iter().flatten().collect::<Vec<_>>().join("; ");
        let message = if is_missing {
            // What kept them away is beside the spec, so that nothing tells when it is over.
            limits::message(&format!(
                "{message}; put that right and annotate the service with {RETRY_ANNOTATION}=<any new value>, or raise \
                 spec.rollout.progressDeadline"
            ))
        } else {
            with_action(GateName::Deadline, &message)
        };
        Self { gate: GateName::Deadline, value: Some(value), message }
    }

    /// Says of a verdict that only some pods reached how many did.
    pub(super) fn of_some(mut self, refusals: usize, pods: usize) -> Self {
        self.message = limits::message(&format!(
            "{refusals} of {pods} pods refused it: {}; if the trouble is theirs alone, delete them, and annotate the service \
             with {RETRY_ANNOTATION}=<any new value>",
            self.message
        ));
        self
    }

    /// Says what lifts a verdict on objects that changed too often for their next change to lift it.
    pub(super) fn where_unsteady(mut self, world: &World, now: &RolloutStatus) -> Self {
        use GateName::{Health, Load, Memory, Performance, Shadow, Template};
        // It rests on none of them.
        if matches!(self.gate, Memory | Template | Load | Performance | Shadow | Health) {
            return self;
        }
        if let Some(why) = unsteady(world, now) {
            self.message = limits::message(&format!(
                "{why}; when they are steady, annotate the service with {RETRY_ANNOTATION}=<any new value>: {}",
                self.message
            ));
        }
        self
    }

    /// The worker of a pod that has switched died too often.
    pub(super) fn of_worker(pod: &CountedPod) -> Self {
        let why = pod.report.and_then(|report| report.message.as_deref());
        let message = format!("pod {}: {}", pod.name, why.unwrap_or("its worker died too often: see the pod's log"));
        Self {
            gate: GateName::Health,
            value: Some("worker failed".to_owned()),
            message: with_action(GateName::Health, &message),
        }
    }

    /// The figures of a pod that has switched passed a limit.
    pub(super) fn of_breach(pod: &CountedPod, breach: &BreachStatus) -> Self {
        let message = limits::message(&format!(
            "pod {}: {}; change spec.model, or raise that limit and annotate the service with {RETRY_ANNOTATION}=<any new value>",
            pod.name,
            said_of(breach)
        ));
        Self { gate: GateName::Health, value: Some(format!("{} {}", breach.signal, breach.value)), message }
    }

    /// Requests went over to pods of which none is ready any more.
    pub(super) fn of_no_ready_pod(world: &World) -> Self {
        let why = world.missing_pod.unwrap_or("see their logs");
        let value = "no pod ready".to_owned();
        let message = format!("no pod that answers with it is ready: {why}");
        Self { gate: GateName::Health, value: Some(value), message: with_action(GateName::Health, &message) }
    }

    /// Whether nodes have no room for a second set of pods.
    pub(super) fn is_of_no_room(&self) -> bool {
        self.value.as_deref() == Some(NO_ROOM)
    }

    /// Why neither pods have room for both versions, nor nodes for more pods.
    pub(super) fn why_no_room(&self, world: &World, now: &RolloutStatus) -> String {
        let why = world.sides.missing_pod.unwrap_or("pods are not made");
        let beside = now.plan.trim_start_matches("BlueGreen: ").trim_end_matches(": as many pods again load it");
        format!("{beside}, and there is no room for as many pods again ({why})")
    }

    /// Nodes have no room for a second set of pods, which Auto would have used.
    pub(super) fn of_no_room(world: &World, now: &RolloutStatus) -> Self {
        let why = world.missing_pod.unwrap_or("pods are not made");
        let value = NO_ROOM.to_owned();
        let message = limits::message(&format!(
            "{}, and there is no room for these: {why}; or raise spec.resources.memory so that it fits beside the active one; where \
             that changes nothing here, annotate the service with {RETRY_ANNOTATION}=<any new value>",
            now.plan
        ));
        Self { gate: GateName::Deadline, value: Some(value), message }
    }

    pub(super) fn of_switch_deadline(world: &World, now: &RolloutStatus, late: &[String]) -> Self {
        let seconds = now.deadline.0.duration_since(now.started_at.0).as_secs();
        let (value, who) = if late.is_empty() {
            (
                format!("no pod answered with it in {seconds}s"),
                world.pods.iter().map(|pod| pod.name.to_owned()).collect(),
            )
        } else {
            (format!("{} of {} pods did not switch in {seconds}s", late.len(), world.pods.len()), late.to_vec())
        };
        // How long a switch may take is no field, and what pods do is in their logs.
        let message = limits::message(&format!(
            "{value}: {}; see their logs, or delete them, and then annotate the service with {RETRY_ANNOTATION}=<any new value>",
            some_of(&who, ", ")
        ));
        Self { gate: GateName::Deadline, value: Some(value), message }
    }
}

/// A figure and its limit, in words.
pub(super) fn said_of(breach: &BreachStatus) -> String {
    let BreachStatus { signal, value, limit, samples } = breach;
    format!("{value} in {samples} requests, at most {limit} wanted (spec.rollout.rollback.signals.{signal})")
}

/// Adds the next action to the cause.
fn with_action(gate: GateName, cause: &str) -> String {
    // What these say may be put right without the spec, so that nothing here tells of it.
    let otherwise =
        format!("where that changes nothing here, annotate the service with {RETRY_ANNOTATION}=<any new value>");
    let action = match gate {
        // What could not be fetched, or is another file, says itself what to correct.
        GateName::Fetch | GateName::Digest => otherwise,
        GateName::Load => format!("correct it; {otherwise}"),
        GateName::Deadline => format!("correct that, or raise spec.rollout.progressDeadline; {otherwise}"),
        // What a source answered in the place of the file may be another thing by now.
        GateName::Format => format!("change spec.model, or correct the file; {otherwise}"),
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
    let pods = world.judges().count();
    if pods == 0 {
        let why_not = world.missing_pod.map(|why| format!(": {why}")).unwrap_or_default();
        return limits::message(&replacement.unwrap_or_else(|| format!("waits for a running pod{why_not}")));
    }
    let prepared = world.judges().filter(|pod| agents::has_prepared(world, pod, now)).count();
    let wanted = judges_wanted(world);
    let summary = Some(format!("{prepared} of {wanted} pods prepared"));
    let missing = world.missing_pod.filter(|_| pods < wanted).map(str::to_owned);
    limits::message(
        &[
            summary,
            hold::waits_for_leave(world, now),
            waiting_for(world, now, false),
            missing,
            unsteady(world, now),
            replacement,
        ]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
        .join("; "),
    )
}

/// The pods that are waited for: of another side all, those that are not there included.
fn judges_wanted(world: &World) -> usize {
    let pods = world.judges().count();
    if world.sides.judges_are_other { usize::try_from(world.target_replicas).unwrap_or(pods) } else { pods }
}

/// That objects change too often for each change to begin another attempt, where they do.
fn unsteady(world: &World, now: &RolloutStatus) -> Option<String> {
    let spec = world.spec.filter(|_| now.restarts >= JUDGED_RESTARTS_MAX)?;
    let named = |object: &NamedObject| format!("{} {}", object.kind.as_str(), object.name);
    let objects: Vec<_> = spec.wanted.objects.iter().map(named).collect();
    Some(format!(
        "what it is judged by ({}) has changed {} times while pods prepared: no further change begins another attempt",
        some_of(&objects, ", "),
        now.restarts
    ))
}

/// The pods that are not prepared, if there are any, and how far each is: with `figures` where it is told once, since each change
/// of them would be a write.
pub(super) fn waiting_for(world: &World, now: &RolloutStatus, figures: bool) -> Option<String> {
    let figure = |candidate: &CandidateStatus| {
        let summary = candidate.progress.as_ref().and_then(|progress| progress.summary.as_ref()).filter(|_| figures);
        summary.map(|summary| format!(" ({summary})")).unwrap_or_default()
    };
    let judges_answer = fleet::judges_answer(world);
    let causes = waits::causes(world, now);
    let moves = |pod: &&CountedPod| !causes.iter().any(|cause| cause.pods.contains(&pod.name));
    let stands = |pod: &CountedPod| match (agents::lacks(world, pod, now), pod.report) {
        _ if judges_answer && !pod.ready && !hold::is_in_turn(now, pod) => {
            format!("{} is not ready and not waited for", pod.name)
        }
        (Some(lacks), _) => lacks,
        (None, Some(_)) => match candidate_report(pod, now) {
            Some(candidate) => format!("{} is {}{}", pod.name, candidate.phase.as_str(), figure(candidate)),
            None => format!("{} has not begun", pod.name),
        },
        (None, None) => format!("{} has not reported", pod.name),
    };
    let unprepared = world.judges().filter(|pod| !agents::has_prepared(world, pod, now)).filter(moves).map(stands);
    let unprepared: Vec<_> = unprepared.collect();
    let stuck =
        causes.iter().take(MESSAGE_PODS_MAX).map(|cause| format!("{}: {}", some_of(&cause.pods, ", "), cause.message));
    let moving = (!unprepared.is_empty()).then(|| some_of(&unprepared, ", "));
    let all: Vec<_> = stuck.chain(moving).collect();
    (!all.is_empty()).then(|| all.join("; "))
}

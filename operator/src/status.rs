//! What is reported: the status of a service and of its versions, from what was decided and observed.
//!
//! Pure: the same inputs give the same status, and figures that wander (memory) move only when they move much, so that a
//! settled service is written once and then left alone. Entries of `replicas` are never part of it: the agents own them.

mod pods;
mod version;

use std::collections::BTreeSet;

use gantry_crds::{
    InferenceService, InferenceServiceStatus,
    conditions::{ConditionType, NewCondition, Reason, set_condition},
    quantity::{human_bytes, parse},
    status::{MAX_DIGESTS, RejectedOutcome, RolloutStatus, RolloutStep, StrategyName},
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::ResourceExt;

use crate::{
    build,
    decide::{RolloutState, is_latched},
    limits::{self, MEMORY_CHANGE_PERCENT},
    observe::{Observed, Trouble},
    validate::{Problems, ValidService},
};

pub use pods::{PodsEvent, pods_events};
pub use version::{VersionInputs, version_status};

/// What a service's status is computed from.
pub struct ServiceInputs<'a> {
    /// The service as observed.
    pub service: &'a InferenceService,
    /// Its spec, or what is wrong with it.
    pub spec: Result<&'a ValidService, &'a Problems>,
    /// Where the rollout stands now.
    pub state: &'a RolloutState,
    /// Its children and pods.
    pub observed: &'a Observed,
    /// Pods that there should be.
    pub target_replicas: i32,
    /// Why children could not be written.
    pub unwritten: Option<Unwritten>,
    /// The present, in whole seconds.
    pub now: Timestamp,
}

/// Why children could not be written, and will not be until somebody acts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unwritten {
    /// Whether the name of one is somebody else's. Then the service is not what its spec asks for, whoever answers: requests to its
    /// name may go elsewhere.
    pub is_name_taken: bool,
    /// Cause and next action, in a sentence.
    pub message: String,
}

impl Unwritten {
    /// What a status says of the pass before.
    #[must_use]
    pub fn told(status: &InferenceServiceStatus) -> Option<Self> {
        let stalled = status.conditions.iter().find(|condition| condition.type_ == ConditionType::Stalled.as_str())?;
        let is_name_taken = stalled.reason == Reason::NameTaken.as_str();
        let is_told = is_name_taken || stalled.reason == Reason::ApplyFailed.as_str();
        is_told.then(|| Self { is_name_taken, message: stalled.message.clone() })
    }

    fn reason(&self) -> Reason {
        if self.is_name_taken { Reason::NameTaken } else { Reason::ApplyFailed }
    }
}

/// The operator's part of the status of a service.
#[must_use]
pub fn service_status(inputs: &ServiceInputs) -> InferenceServiceStatus {
    let old = inputs.service.status.clone().unwrap_or_default();
    let (state, side) = (inputs.state, inputs.state.active_side);
    let pods = || inputs.observed.pods_of(side);
    let ready = pods().filter(|pod| pod.ready).count();
    let name = inputs.service.name_any();
    let mut status = InferenceServiceStatus {
        observed_generation: inputs.service.metadata.generation,
        active_version: state.active.clone(),
        candidate_version: state.candidate.clone(),
        previous_version: state.previous.clone(),
        active_side: Some(side),
        endpoint: Some(build::endpoint(inputs.service)),
        rollout: state.rollout.clone(),
        rejected: state.rejected.clone(),
        versions: state.versions.clone(),
        digests: digests(inputs),
        attempts: state.attempts,
        goes_over_by: state.goes_over_by,
        quarantined: state.quarantined.clone(),
        replicas: Vec::new(),
        replica_count: count(pods().filter(|pod| !pod.over).count()),
        ready_replicas: count(ready),
        replica_summary: Some(format!("{ready}/{}", inputs.target_replicas)),
        selector: Some(build::selector_text(&name, inputs.observed.is_labelled(side).then_some(side))),
        memory: memory(&old),
        conditions: old.conditions,
    };
    for condition in conditions(inputs, ready) {
        let now = Time(inputs.now);
        set_condition(&mut status.conditions, condition, inputs.service.metadata.generation, &now);
    }
    status
}

/// Whether writing `new` would change what the operator owns of `old`.
#[must_use]
pub fn differs(old: Option<&InferenceServiceStatus>, new: &InferenceServiceStatus) -> bool {
    match old {
        Some(old) => InferenceServiceStatus { replicas: Vec::new(), ..old.clone() } != *new,
        None => true,
    }
}

/// Digests of the files that the versions of the state and of the history name: at most [`MAX_DIGESTS`], the newest ones.
fn digests(inputs: &ServiceInputs) -> Vec<String> {
    let living = inputs.observed.versions.iter().filter(|version| version.metadata.deletion_timestamp.is_none());
    let mut history: Vec<_> = living.map(|version| &version.spec).collect();
    history.sort_by_key(|spec| std::cmp::Reverse(spec.revision));
    let history = history.into_iter().map(|spec| (&spec.model, &spec.runtime));
    // What stores told pods of where the spec says nothing.
    let told = inputs.observed.versions.iter().filter_map(|version| version.status.as_ref()?.digest.as_ref());
    let told = told.filter_map(|digest| digest.strip_prefix("sha256:")).map(str::to_owned);
    let named = inputs.state.versions.iter().map(|version| (&version.model, &version.runtime));
    let sources = named.chain(history).flat_map(|(model, runtime)| {
        let draft = runtime.speculative.as_ref().and_then(|speculative| speculative.draft.as_ref());
        std::iter::once(&model.source).chain(draft)
    });
    let mut digests = BTreeSet::new();
    for source in sources {
        if digests.len() < MAX_DIGESTS as usize {
            digests.extend(source.sha256.as_ref().map(|sha256| sha256.0.clone()));
        }
    }
    for digest in told {
        if digests.len() < MAX_DIGESTS as usize {
            digests.insert(digest);
        }
    }
    digests.into_iter().collect()
}

fn count(number: usize) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

/// Measured memory of the largest pod against what it may use. The old text stays while the figure is near it.
fn memory(old: &InferenceServiceStatus) -> Option<String> {
    let memories = old.replicas.iter().filter_map(|replica| replica.memory.as_ref());
    let largest = memories.max_by_key(|memory| memory.measured_bytes)?;
    let measured = largest.measured_bytes?;
    let limit = largest.limit_bytes.map(|limit| format!("/{}", human_bytes(limit))).unwrap_or_default();
    let kept = old.memory.as_deref().filter(|text| {
        let (old_measured, old_limit) = text.split_at(text.find('/').unwrap_or(text.len()));
        let near = |old: f64| (old - measured as f64).abs() * 100.0 < old * MEMORY_CHANGE_PERCENT as f64;
        old_limit == limit && parse(old_measured).is_some_and(near)
    });
    Some(kept.map_or_else(|| format!("{}{limit}", human_bytes(measured)), str::to_owned))
}

fn conditions(inputs: &ServiceInputs, ready: usize) -> [NewCondition; 7] {
    let is_short = count(ready) < inputs.target_replicas;
    let trouble = pods::trouble(inputs, is_short);
    let available = available(inputs, ready, trouble.as_ref());
    let up_to_date = up_to_date(inputs);
    let stalled = stalled(inputs, trouble.as_ref());
    let waits = inputs.state.rollout.as_ref().is_some_and(|rollout| rollout.wait_reason.is_some());
    let (is_available, is_up_to_date) = (available.status == Some(true), up_to_date.status == Some(true));
    let ready_condition = match (is_available, is_up_to_date) {
        // It serves without a child that is refused, such as its NetworkPolicy: nobody else would tell. Without its Service nobody finds
        // it.
        (true, true) if stalled.reason == Reason::ApplyFailed && inputs.observed.endpoint.is_some() => {
            let message = format!("{}; {}", available.message, stalled.message);
            new(ConditionType::Ready, true, stalled.reason, message)
        }
        (true, true) if inputs.unwritten.is_none() => {
            let otherwise = if is_short { Reason::WaitingForPods } else { Reason::AsRequested };
            let reason = named(trouble.as_ref()).map_or(otherwise, |trouble| trouble.reason);
            new(ConditionType::Ready, true, reason, available.message.clone())
        }
        // What the user has to do goes first, then what pods wait for, what keeps it from answering, and from the newest version.
        _ if stalled.status == Some(true) => new(ConditionType::Ready, false, stalled.reason, stalled.message.clone()),
        _ if waits => new(ConditionType::Ready, false, up_to_date.reason, up_to_date.message.clone()),
        (false, _) => new(ConditionType::Ready, false, available.reason, available.message.clone()),
        (true, _) => {
            let trouble = named(trouble.as_ref());
            // That it rolls out says less than why it does not get on.
            let rolls_out = up_to_date.reason == Reason::RollingOut;
            let reason = trouble.filter(|_| rolls_out).map_or(up_to_date.reason, |trouble| trouble.reason);
            // A rollout says of the pods that it waits for what they lack.
            let beside = trouble.filter(|trouble| !up_to_date.message.contains(&trouble.message));
            let beside = beside.map(|trouble| format!("; {}", trouble.message)).unwrap_or_default();
            new(ConditionType::Ready, false, reason, format!("{}{beside}", up_to_date.message))
        }
    };
    let reconciling = reconciling(inputs, is_short, trouble.as_ref(), &stalled);
    let pods_ready = pods::condition(inputs, ready, trouble);
    [available, up_to_date, ready_condition, reconciling, stalled, pods_ready, supported(inputs)]
}

/// A trouble that has a name: no mere wait for pods that are on their way.
fn named(trouble: Option<&Trouble>) -> Option<&Trouble> {
    trouble.filter(|trouble| trouble.reason != Reason::WaitingForPods)
}

fn new(type_: ConditionType, status: bool, reason: Reason, message: impl AsRef<str>) -> NewCondition {
    NewCondition { type_, status: Some(status), reason, message: limits::message(message.as_ref()) }
}

fn available(inputs: &ServiceInputs, ready: usize, trouble: Option<&Trouble>) -> NewCondition {
    use ConditionType::Available;
    let of_target = pods::of_target(inputs, ready, trouble);
    if ready > 0 {
        return new(Available, true, Reason::PodsReady, of_target);
    }
    if inputs.target_replicas == 0 {
        return new(Available, false, Reason::NoPodReady, "spec.replicas is 0: raise it to serve");
    }
    if let Some(trouble) = named(trouble) {
        return new(Available, false, trouble.reason, of_target);
    }
    match (&inputs.state.active, &inputs.state.rollout) {
        (None, Some(rollout)) => {
            let waits = rollout.message.as_deref().unwrap_or("it is being prepared");
            new(Available, false, Reason::NoActiveVersion, format!("the first version is not validated yet: {waits}"))
        }
        (None, None) => new(Available, false, Reason::NoActiveVersion, "no version has passed its gates yet"),
        (Some(_), _) if trouble.is_some() => new(Available, false, Reason::NoPodReady, of_target),
        (Some(active), _) => new(Available, false, Reason::NoPodReady, format!("{of_target}; pods load {active}")),
    }
}

fn up_to_date(inputs: &ServiceInputs) -> NewCondition {
    use ConditionType::UpToDate;
    let state = inputs.state;
    let spec = match inputs.spec {
        Ok(spec) => spec,
        Err(problems) => return new(UpToDate, false, problem_reason(problems), NOT_CARRIED_OUT),
    };
    let wanted = &spec.wanted;
    let is_active = state.active.as_deref() == Some(wanted.name.as_str());
    match &state.rollout {
        // It is to be taken back, and waits for those who are to answer then.
        Some(RolloutStatus { step: RolloutStep::Bake, wait_reason: Some(_), message: Some(message), .. }) => {
            new(UpToDate, false, Reason::RolledBack, message)
        }
        Some(rollout) if rollout.step == RolloutStep::Bake && is_active => {
            new(UpToDate, true, Reason::AsRequested, answers(inputs, &wanted.name))
        }
        // A candidate was refused while the version before it bakes: that is what the user has to know.
        Some(rollout) if rollout.step == RolloutStep::Bake && is_latched(state, wanted) => {
            let (reason, message) = latch(state);
            new(UpToDate, false, reason, message)
        }
        Some(rollout) => {
            let waits = rollout.message.as_deref().map(|message| format!(": {message}")).unwrap_or_default();
            let holds = rollout.step.has_candidate() && spec.holds(&rollout.version);
            let otherwise = if holds { Reason::Paused } else { Reason::RollingOut };
            let of_other_side = || missing_other(inputs, rollout).map(|trouble| trouble.reason);
            let reason = rollout.wait_reason.map(Reason::from).or_else(of_other_side).unwrap_or(otherwise);
            new(UpToDate, false, reason, format!("{} of {}{waits}", rollout.step.as_str(), rollout.version))
        }
        None if is_active => {
            let others = pods::elsewhere(inputs).map(|others| format!("; {others}")).unwrap_or_default();
            let stamped = inputs.observed.versions.iter().find(|version| version.name_any() == wanted.name);
            let address = stamped.and_then(|version| version::readdressed(version, state));
            let address = address.map(|address| format!("; {address}")).unwrap_or_default();
            let answers = answers(inputs, &wanted.name);
            new(UpToDate, true, Reason::AsRequested, format!("{answers}{others}{address}"))
        }
        None if is_latched(state, wanted) => {
            let (reason, message) = latch(state);
            new(UpToDate, false, reason, message)
        }
        None if spec.aborts(&wanted.name) => {
            let message = format!(
                "{} is not rolled out: spec.rollout.abort names it; take it out, or change spec.model",
                wanted.name
            );
            new(UpToDate, false, Reason::Aborted, message)
        }
        None if inputs.target_replicas == 0 => {
            let message = format!("{} is validated once there is a pod: spec.replicas is 0", wanted.name);
            new(UpToDate, false, Reason::WaitingForPods, message)
        }
        None => new(UpToDate, false, Reason::RollingOut, format!("{} is about to be prepared", wanted.name)),
    }
}

fn answers(inputs: &ServiceInputs, version: &str) -> String {
    match inputs.target_replicas {
        0 => format!("{version} answers once there are pods: spec.replicas is 0"),
        _ => format!("{version} answers"),
    }
}

/// Why pods of the side on which a candidate is prepared are not there. No other condition tells of them.
fn missing_other(inputs: &ServiceInputs, now: &RolloutStatus) -> Option<Trouble> {
    let is_prepared_there = now.step == RolloutStep::Prepare && now.strategy() == StrategyName::BlueGreen;
    let side = inputs.state.active_side.other();
    is_prepared_there.then(|| inputs.observed.trouble(side, true, inputs.now)).flatten()
}

/// Why the latched version is not served.
fn latch(state: &RolloutState) -> (Reason, String) {
    use gantry_crds::status::GateName;
    let Some(rejected) = &state.rejected else { return (Reason::Pending, String::new()) };
    let reason = match (rejected.outcome, rejected.gate) {
        (RejectedOutcome::RolledBack, _) => Reason::RolledBack,
        (_, GateName::Deadline) => Reason::DeadlineExceeded,
        (_, _) => Reason::GateFailed,
    };
    let verb = match rejected.outcome {
        RejectedOutcome::RolledBack => "was taken back",
        RejectedOutcome::Rejected | RejectedOutcome::Unknown(_) => "was rejected",
    };
    (reason, format!("{} {verb}: {}", rejected.version, rejected.message))
}

/// What the other conditions say where Supported has the sentences: each stands once.
const NOT_CARRIED_OUT: &str = "the spec as it stands changes nothing: the condition Supported says why";

fn problem_reason(problems: &Problems) -> Reason {
    if problems.any_invalid() { Reason::InvalidSpec } else { Reason::NotSupported }
}

/// Whether nothing goes on before the object changes, or what its version was judged by, as kstatus means it. What pods wait
/// for may have to be put right by somebody, too; they go on by themselves then, and this says where it is told.
fn stalled(inputs: &ServiceInputs, trouble: Option<&Trouble>) -> NewCondition {
    use ConditionType::Stalled;
    if let Some(unwritten) = &inputs.unwritten {
        return new(Stalled, true, unwritten.reason(), &unwritten.message);
    }
    match inputs.spec {
        Err(problems) => new(Stalled, true, problem_reason(problems), NOT_CARRIED_OUT),
        Ok(spec) if stands_still(inputs.state) && is_latched(inputs.state, &spec.wanted) => {
            let (reason, message) = latch(inputs.state);
            new(Stalled, true, reason, message)
        }
        Ok(spec) if inputs.state.rollout.is_none() && spec.aborts(&spec.wanted.name) && !is_active(inputs, spec) => {
            new(Stalled, true, Reason::Aborted, "spec.rollout.abort names the version that the spec asks for")
        }
        Ok(_) => {
            let waits = inputs.state.rollout.as_ref().and_then(|rollout| rollout.wait_reason);
            let (reason, told) = match (waits, named(trouble)) {
                (Some(waits), _) => (waits.into(), "UpToDate"),
                (None, Some(trouble)) => (trouble.reason, "PodsReady"),
                (None, None) => return new(Stalled, false, Reason::AsRequested, "goes on by itself"),
            };
            let message = format!("goes on by itself once what {told} tells of is put right");
            new(Stalled, false, reason, message)
        }
    }
}

fn is_active(inputs: &ServiceInputs, spec: &ValidService) -> bool {
    inputs.state.active.as_deref() == Some(spec.wanted.name.as_str())
}

/// Whether no step of a rollout is due but the end of a bake.
fn stands_still(state: &RolloutState) -> bool {
    state.rollout.as_ref().is_none_or(|rollout| rollout.step == RolloutStep::Bake)
}

fn reconciling(
    inputs: &ServiceInputs,
    is_short: bool,
    trouble: Option<&Trouble>,
    stalled: &NewCondition,
) -> NewCondition {
    use ConditionType::Reconciling;
    let goes_on = stalled.status != Some(true) || !stands_still(inputs.state);
    if let Some(rollout) = inputs.state.rollout.as_ref().filter(|_| goes_on) {
        return new(Reconciling, true, Reason::RollingOut, format!("{} of {}", rollout.step.as_str(), rollout.version));
    }
    if stalled.status == Some(true) {
        let waits = match stalled.reason {
            Reason::ApplyFailed | Reason::NameTaken => {
                "waits until what Stalled tells of is put right, and looks every two minutes at most"
            }
            _ if inputs.state.rollout.is_some() => {
                "the version that answers bakes; the other waits for a change of what it was judged by"
            }
            _ => "waits for a change of what it was judged by",
        };
        return new(Reconciling, false, stalled.reason, waits);
    }
    if let Some(trouble) = trouble {
        return new(Reconciling, true, trouble.reason, &trouble.message);
    }
    if is_short {
        return new(Reconciling, true, Reason::WaitingForPods, "waits for pods to answer");
    }
    new(Reconciling, false, Reason::AsRequested, "nothing is left to do")
}

fn supported(inputs: &ServiceInputs) -> NewCondition {
    use ConditionType::Supported;
    match inputs.spec {
        Err(problems) => new(Supported, false, problem_reason(problems), problems.to_string()),
        Ok(_) => new(Supported, true, Reason::AsRequested, "every field of the spec is carried out"),
    }
}

/// What `new` says of a spec that cannot be carried out, or of a child that may not be written, and `old` did not: what an
/// Event is worth.
#[must_use]
pub fn refusal_event(old: Option<&InferenceServiceStatus>, new: &InferenceServiceStatus) -> Option<Condition> {
    let unwritten = [Reason::ApplyFailed, Reason::NameTaken].map(Reason::as_str);
    let refused = |status: &InferenceServiceStatus| {
        let is_refusal = |one: &&Condition| {
            let is = |type_: ConditionType, status: &str| one.type_ == type_.as_str() && one.status == status;
            is(ConditionType::Supported, "False")
                || (is(ConditionType::Stalled, "True") && unwritten.contains(&one.reason.as_str()))
        };
        status.conditions.iter().find(is_refusal).cloned()
    };
    let told = old.and_then(refused).map(|condition| condition.message);
    refused(new).filter(|condition| told.as_ref() != Some(&condition.message))
}

/// Conditions of a version, set like those of a service.
fn set_all(conditions: &mut Vec<Condition>, all: impl IntoIterator<Item = NewCondition>, now: Timestamp) {
    for condition in all {
        set_condition(conditions, condition, None, &Time(now));
    }
}

#[cfg(test)]
mod tests;

//! Why pods do not answer, from what the cluster and they themselves say: for conditions and Events of their service.

use gantry_crds::{
    InferenceServiceStatus,
    conditions::{ConditionType, NewCondition, Reason},
    status::{
        CandidatePhase, GateVerdict, ReplicaHealth, ReplicaStatus, RolloutStatus, RolloutStep, StrategyName, WaitReason,
    },
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::{ServiceInputs, count, new};
use crate::{observe::Trouble, text::some_of};

/// Why pods are not there: what the cluster says of them, what those say that cannot have the version that answers, also where
/// enough others do (a pod that comes for an older one), or, while too few answer, what the others say.
pub(super) fn trouble(inputs: &ServiceInputs, is_short: bool) -> Option<Trouble> {
    let own_words = || own_words(inputs).map(|message| Trouble { reason: Reason::WaitingForPods, message });
    let of_cluster = inputs.observed.trouble(inputs.state.active_side, is_short, inputs.now);
    let missing = of_cluster.or_else(|| failed(inputs).map(|trouble| of_older_spec(inputs, trouble)));
    let otherwise = answers_otherwise(inputs).map(|trouble| of_older_spec(inputs, trouble));
    let both = match (missing, otherwise) {
        // Whom requests reach that answers with something else is not to be overlooked for a pod that is not there.
        (Some(missing), Some(otherwise)) if !missing.message.contains(&otherwise.message) => {
            Some(Trouble { message: format!("{}; {}", missing.message, otherwise.message), ..missing })
        }
        (missing, otherwise) => missing.or(otherwise),
    };
    both.or_else(|| if is_short { own_words() } else { None })
}

/// What pods say that have failed, with the version that answers or at bringing it back, or that have been bringing it for long.
/// They try again by themselves, and say the same until they have it.
fn failed(inputs: &ServiceInputs) -> Option<Trouble> {
    let says = |health: ReplicaHealth| {
        let lacks = |report: &&ReplicaStatus| report.health == health && report.message.is_some();
        let lacking: Vec<_> = silent(inputs).filter(lacks).collect();
        let reason = match (health, &lacking.first()?.version) {
            (ReplicaHealth::Failed, None) => Reason::GateFailed,
            (ReplicaHealth::Failed, Some(_)) => Reason::WorkerFailed,
            _ => Reason::WaitingForPods,
        };
        let words = lacking.into_iter().filter_map(|report| of_report(inputs, report));
        Some(Trouble { reason, message: some_words(words)? })
    };
    says(ReplicaHealth::Failed).or_else(|| says(ReplicaHealth::Starting))
}

/// Says of an address that pods tell to correct in the spec, which is another version's by now, how that is done.
fn of_older_spec(inputs: &ServiceInputs, trouble: Trouble) -> Trouble {
    let active = inputs.state.active.as_deref().unwrap_or_default();
    let is_older = inputs.spec.is_ok_and(|spec| spec.wanted.name != active) && trouble.message.contains("in the spec");
    let told = |message| format!("{message}; that is of {active}: set spec.model back to it, with what is corrected");
    if is_older { Trouble { message: told(trouble.message), ..trouble } } else { trouble }
}

/// Why pods that answer with another version cannot have the one that is to answer. While they are told to switch to a new one that
/// is the rollout's to tell.
fn answers_otherwise(inputs: &ServiceInputs) -> Option<Trouble> {
    let step = inputs.state.rollout.as_ref().map(|rollout| rollout.step);
    if step == Some(RolloutStep::Commit) {
        return None;
    }
    let answers =
        |report: &'_ ReplicaStatus| Some(format!("pod {} answers with {}", report.pod, report.version.as_ref()?));
    let answering = answering(inputs).filter_map(|report| Some((report, answers(report)?)));
    let quarantined = silent(inputs).filter_map(|report| Some((report, quarantined(inputs, report)?)));
    let cannot = |(report, has): (&ReplicaStatus, String)| {
        let (reason, why) = lacks_active(inputs, report)?;
        Some((reason, format!("{has}: {why}")))
    };
    let all: Vec<_> = answering.chain(quarantined).filter_map(cannot).collect();
    let reason = all.first()?.0;
    Some(Trouble { reason, message: some_words(all.into_iter().map(|(_, words)| words))? })
}

/// Why a pod cannot have the version that is to answer, as it says while it tries, and the reason in a word.
fn lacks_active<'a>(inputs: &ServiceInputs, report: &'a ReplicaStatus) -> Option<(Reason, &'a str)> {
    let active = inputs.state.active.as_ref().filter(|active| report.version.as_ref() != Some(active))?;
    let candidate = report.candidate.as_ref().filter(|candidate| candidate.version == *active)?;
    let failed = (candidate.phase == CandidatePhase::Failed).then_some(Reason::GateFailed);
    // That another version ends its last requests first is how pods go over.
    let waits = candidate.wait_reason.filter(|reason| *reason != WaitReason::NoRoom);
    let reason = waits.map(Reason::from).or(failed)?;
    let of_gate = || {
        let gate = candidate.gates.iter().find(|gate| gate.verdict == GateVerdict::Fail);
        gate.and_then(|gate| gate.message.as_deref())
    };
    Some((reason, candidate.message.as_deref().or_else(of_gate)?))
}

/// The reports of pods that requests reach.
fn answering<'a>(inputs: &'a ServiceInputs) -> impl Iterator<Item = &'a ReplicaStatus> {
    let answering = inputs.observed.pods_of(inputs.state.active_side).filter(|pod| pod.ready);
    answering.filter_map(|pod| inputs.service.status.as_ref()?.report_of(&pod.name))
}

/// The reports of pods that run and do not answer.
fn silent<'a>(inputs: &'a ServiceInputs) -> impl Iterator<Item = &'a ReplicaStatus> {
    let silent = inputs.observed.pods_of(inputs.state.active_side).filter(|pod| pod.counted && !pod.ready);
    silent.filter_map(|pod| inputs.service.status.as_ref()?.report_of(&pod.name))
}

/// How many pods answer, and why others do not.
pub(super) fn of_target(inputs: &ServiceInputs, ready: usize, trouble: Option<&Trouble>) -> String {
    let why = trouble.map(|trouble| format!("; {}", trouble.message)).unwrap_or_default();
    match inputs.target_replicas {
        // Pods that end may answer for a while.
        0 => format!("no pod is asked for{why}"),
        target => format!("{ready} of {target} pods answer{why}"),
    }
}

/// Whether all pods are there, and else why not: also where others answer, or those that are to be replaced.
pub(super) fn condition(inputs: &ServiceInputs, ready: usize, trouble: Option<Trouble>) -> NewCondition {
    use ConditionType::PodsReady;
    let of_target = of_target(inputs, ready, trouble.as_ref());
    match trouble {
        // A pod that only takes long is no trouble where there are enough others.
        Some(trouble) if trouble.reason == Reason::WaitingForPods && count(ready) >= inputs.target_replicas => {
            new(PodsReady, true, Reason::AsRequested, of_target)
        }
        Some(trouble) => new(PodsReady, false, trouble.reason, of_target),
        None if count(ready) < inputs.target_replicas => new(PodsReady, false, Reason::WaitingForPods, of_target),
        None => new(PodsReady, true, Reason::AsRequested, of_target),
    }
}

/// The troubles with pods that `new` tells of and `old` did not, and that all are there by now: what Events are worth.
pub fn pods_events(
    old: Option<&InferenceServiceStatus>,
    new: &InferenceServiceStatus,
) -> impl Iterator<Item = PodsEvent> + use<> {
    let troubles = [ConditionType::PodsReady, ConditionType::UpToDate].map(|teller| of_new_trouble(old, new, teller));
    troubles.into_iter().flatten().chain(all_there(old, new))
}

/// That all pods answer that there should be, where some did not.
fn all_there(old: Option<&InferenceServiceStatus>, new: &InferenceServiceStatus) -> Option<PodsEvent> {
    let [old, new] = [old?, new].map(|status| condition_of(status, ConditionType::PodsReady));
    let message = new.filter(|new| new.status == "True")?.message.clone();
    (old?.status == "False").then_some(PodsEvent::AllThere { message })
}

/// The trouble with pods that a condition of `new` tells of, where that of `old` tells of none, or of another.
fn of_new_trouble(
    old: Option<&InferenceServiceStatus>,
    new: &InferenceServiceStatus,
    teller: ConditionType,
) -> Option<PodsEvent> {
    let condition = condition_of(new, teller).filter(|condition| tells_of_pods(new, teller, condition))?;
    let of_old =
        old.and_then(|old| condition_of(old, teller).filter(|condition| tells_of_pods(old, teller, condition)));
    let is_news = of_old.is_none_or(|old| old.reason != condition.reason);
    let Condition { reason, message, .. } = condition.clone();
    is_news.then_some(PodsEvent::Trouble { reason, message })
}

fn condition_of(status: &InferenceServiceStatus, type_: ConditionType) -> Option<&Condition> {
    status.conditions.iter().find(|condition| condition.type_ == type_.as_str())
}

/// Whether a condition tells of a trouble with pods: PodsReady of those that are to answer, UpToDate of those of another side on which
/// a candidate is prepared.
fn tells_of_pods(status: &InferenceServiceStatus, teller: ConditionType, condition: &Condition) -> bool {
    use Reason::{Paused, RollingOut, WaitingForPods};
    let of_other_side = |now: &RolloutStatus| {
        let waits_for_nothing_else = now.wait_reason.is_none();
        waits_for_nothing_else && now.step == RolloutStep::Prepare && now.strategy() == StrategyName::BlueGreen
    };
    let tells = teller == ConditionType::PodsReady || status.rollout.as_ref().is_some_and(of_other_side);
    tells
        && condition.status == "False"
        && ![Paused, RollingOut, WaitingForPods].map(Reason::as_str).contains(&condition.reason.as_str())
}

/// What an Event tells of a service's pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodsEvent {
    /// A pod that there should be is not there.
    Trouble {
        /// Why, in a word.
        reason: String,
        /// Why, and what to do.
        message: String,
    },
    /// All are there.
    AllThere {
        /// How many.
        message: String,
    },
}

/// What pods that do not answer say of themselves.
fn own_words(inputs: &ServiceInputs) -> Option<String> {
    some_words(silent(inputs).filter_map(|report| of_report(inputs, report)))
}

/// The first of these words, and how many more there are.
fn some_words(words: impl Iterator<Item = String>) -> Option<String> {
    let words: Vec<_> = words.collect();
    (!words.is_empty()).then(|| some_of(&words, "; "))
}

/// That requests do not go to a pod for the version that it has.
fn quarantined(inputs: &ServiceInputs, report: &ReplicaStatus) -> Option<String> {
    let version = report.version.as_ref().filter(|_| inputs.state.quarantined.contains(&report.pod))?;
    Some(format!("pod {} has {version}, which was refused or taken back, and requests go to the others", report.pod))
}

/// What a pod lacks.
fn of_report(inputs: &ServiceInputs, report: &ReplicaStatus) -> Option<String> {
    if let Some(has) = quarantined(inputs, report) {
        let why = lacks_active(inputs, report).map(|(_, why)| format!(": {why}")).unwrap_or_default();
        return Some(format!("{has}{why}"));
    }
    // The worker that it has may be that of a version which is to go.
    if let Some((_, why)) = lacks_active(inputs, report).filter(|_| report.version.is_some()) {
        return Some(format!("pod {}: {why}", report.pod));
    }
    let restored = report.candidate.as_ref().and_then(|candidate| candidate.message.as_deref());
    let of_worker = || (report.health != ReplicaHealth::Healthy).then_some(restored).flatten();
    let why = report.message.as_deref().or_else(of_worker);
    // How far it is would be a write with each percent.
    let is_at_it = || {
        let candidate = report.candidate.as_ref().filter(|_| report.version.is_none())?;
        Some(format!("{} is {}", candidate.version, candidate.phase.as_str()))
    };
    Some(format!("pod {}: {}", report.pod, why.map(str::to_owned).or_else(is_at_it)?))
}

/// Pods that answer with another version than the active one once a rollout is over.
pub(super) fn elsewhere(inputs: &ServiceInputs) -> Option<String> {
    let active = inputs.state.active.as_ref()?;
    let other = |report: &'_ ReplicaStatus| report.version.clone().filter(|other| other != active);
    let has_version = silent(inputs).filter(|report| inputs.state.quarantined.contains(&report.pod));
    let all = answering(inputs).chain(has_version);
    let words = all.filter_map(|report| Some(format!("pod {} with {}", report.pod, other(report)?)));
    let words: Vec<_> = words.collect();
    (!words.is_empty()).then(|| format!("{}, which cannot have it: see PodsReady", some_of(&words, ", ")))
}

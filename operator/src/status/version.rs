//! The status of one ModelVersion: what its service's pods say about it, the worst of them first.

use gantry_crds::{
    ModelVersion, ModelVersionStatus,
    conditions::{ConditionType, NewCondition, Reason},
    inference_service::{RuntimeSpec, SourceSpec},
    status::{
        CandidatePhase, CandidateStatus, GateName, GateResult, GateVerdict, Progress, RejectedOutcome, RejectedStatus,
        RolloutStatus, RolloutStep, VersionPhase, VersionRole, WaitReason,
    },
};
use jiff::Timestamp;
use kube::ResourceExt;

use super::set_all;
use crate::{
    decide::{CountedPod, RolloutState, candidate_report, is_prepared, tightest_fit},
    limits::{self, FIGURE_CHARS_MAX},
};

/// How many pods a gate has to let a version through in: `decide` says how many those are.
const PASSED: &str = "in enough pods";

/// What a version's status is computed from.
pub struct VersionInputs<'a> {
    /// The version as observed.
    pub version: &'a ModelVersion,
    /// Where the rollout stood when the pods reported.
    pub before: &'a RolloutState,
    /// Where it stands now.
    pub state: &'a RolloutState,
    /// Pods that are counted, with their reports.
    pub pods: &'a [CountedPod<'a>],
    /// Whether any pod of the service runs, of whatever template.
    pub any_runs: bool,
    /// Why pods are not there that would prepare a candidate, in a word.
    pub missing: Option<Reason>,
    /// The present, in whole seconds.
    pub now: Timestamp,
}

/// The status of a version.
#[must_use]
pub fn version_status(inputs: &VersionInputs) -> ModelVersionStatus {
    let name = inputs.version.name_any();
    let old = inputs.version.status.clone().unwrap_or_default();
    let is_candidate = |state: &RolloutState| state.candidate.as_deref() == Some(name.as_str());
    let rejected = inputs.state.rejected.as_ref().filter(|rejected| rejected.version == name);
    // Only a candidate is judged. A pod that joins later loads the active version too, but its trouble is its own.
    let reports =
        if is_candidate(inputs.before) || is_candidate(inputs.state) { reports(inputs, &name) } else { Vec::new() };
    let phase = phase(inputs, &name, &reports, &old);
    let gates = gates(&reports, &old, is_candidate(inputs.state), rejected);
    let (reason, message) = (reason(inputs, phase, rejected, &old), message(inputs, phase, rejected, &old));
    let mut status = ModelVersionStatus {
        phase: Some(phase),
        role: Some(role(inputs.state, &name)),
        digest: digest(inputs, &reports, &old),
        gguf: reports.iter().find_map(|report| report.gguf.clone()).or(old.gguf),
        fit: tightest_fit(reports.iter().copied()).cloned().or(old.fit),
        progress: if is_candidate(inputs.state) { furthest_behind(&reports) } else { None },
        gate_summary: gate_summary(&gates, rejected),
        gates,
        reason: Some(reason),
        message: Some(limits::message(&message)),
        conditions: old.conditions,
    };
    let waits =
        inputs.state.rollout.as_ref().and_then(|rollout| rollout.wait_reason).filter(|_| is_candidate(inputs.state));
    let all =
        conditions(&status, phase, rejected, waits, inputs.any_runs, |gate| passed_everywhere(inputs, &name, gate));
    set_all(&mut status.conditions, all, inputs.now);
    status
}

/// The digest of the version's file: that of the spec, or the one that its store told the pods of, which does not change.
fn digest(inputs: &VersionInputs, reports: &[&CandidateStatus], old: &ModelVersionStatus) -> Option<String> {
    let of_spec = inputs.version.spec.model.source.sha256.as_ref().map(|digest| format!("sha256:{digest}"));
    let told = || {
        let passed = reports.iter().flat_map(|report| &report.gates);
        let mut passed = passed.filter(|gate| gate.name == GateName::Digest && gate.verdict == GateVerdict::Pass);
        passed.find_map(|gate| gate.value.clone()).filter(|value| value.starts_with("sha256:"))
    };
    of_spec.or_else(|| old.digest.clone()).or_else(told)
}

/// The attempt at the version that the pods could know of.
fn attempt<'a>(inputs: &VersionInputs<'a>, name: &str) -> Option<&'a RolloutStatus> {
    inputs.before.rollout.as_ref().filter(|rollout| rollout.version == name)
}

/// What pods say about the version in this attempt.
fn reports<'a>(inputs: &VersionInputs<'a>, name: &str) -> Vec<&'a CandidateStatus> {
    let Some(attempt) = attempt(inputs, name) else { return Vec::new() };
    inputs.pods.iter().filter_map(|pod| candidate_report(pod, attempt)).collect()
}

/// Whether every pod has the candidate's `gate` behind it.
fn passed_everywhere(inputs: &VersionInputs, name: &str, gate: GateName) -> bool {
    let Some(attempt) = attempt(inputs, name) else { return false };
    let passed = |pod: &CountedPod| {
        let in_report = candidate_report(pod, attempt).is_some_and(|candidate| {
            candidate.gates.iter().any(|one| one.name == gate && one.verdict != GateVerdict::Fail)
        });
        in_report || is_prepared(pod, attempt)
    };
    !inputs.pods.is_empty() && inputs.pods.iter().all(passed)
}

fn role(state: &RolloutState, name: &str) -> VersionRole {
    let is = |role: &Option<String>| role.as_deref() == Some(name);
    if is(&state.active) {
        VersionRole::Active
    } else if is(&state.candidate) {
        VersionRole::Candidate
    } else if is(&state.previous) {
        VersionRole::Previous
    } else {
        VersionRole::History
    }
}

fn phase(inputs: &VersionInputs, name: &str, reports: &[&CandidateStatus], old: &ModelVersionStatus) -> VersionPhase {
    let state = inputs.state;
    // What bakes goes on baking while another one is prepared.
    let step = state.rollout.as_ref().and_then(|rollout| match &rollout.bake {
        _ if rollout.version == name => Some(rollout.step),
        bake => bake.as_ref().map(|_| RolloutStep::Bake),
    });
    match (role(state, name), step) {
        (VersionRole::Active, Some(RolloutStep::Commit)) => VersionPhase::Promoting,
        (VersionRole::Active, Some(RolloutStep::Bake)) => VersionPhase::Baking,
        (VersionRole::Active, _) => VersionPhase::Active,
        (VersionRole::Candidate, Some(RolloutStep::Canary)) => VersionPhase::Canary,
        (VersionRole::Candidate, _) => candidate_phase(inputs, name, reports),
        _ => match state.rejected.as_ref().filter(|rejected| rejected.version == name).map(|rejected| rejected.outcome)
        {
            Some(RejectedOutcome::Rejected) => VersionPhase::Rejected,
            Some(RejectedOutcome::RolledBack) => VersionPhase::RolledBack,
            None | Some(RejectedOutcome::Unknown(_)) => match old.phase {
                Some(ended @ (VersionPhase::Rejected | VersionPhase::RolledBack)) => ended,
                _ => VersionPhase::Superseded,
            },
        },
    }
}

/// How far the pod is that is furthest behind, of those that have begun.
fn candidate_phase(inputs: &VersionInputs, name: &str, reports: &[&CandidateStatus]) -> VersionPhase {
    let (pods, attempt) = (inputs.pods, attempt(inputs, name));
    let prepared = |pod: &CountedPod| attempt.is_some_and(|attempt| is_prepared(pod, attempt));
    if !pods.is_empty() && pods.iter().all(prepared) {
        return VersionPhase::Prepared;
    }
    match reports.iter().map(|report| report.phase).min() {
        None if pods.iter().any(prepared) => VersionPhase::Validating,
        None => VersionPhase::Pending,
        Some(CandidatePhase::Fetching) => VersionPhase::Fetching,
        Some(_) => VersionPhase::Validating,
    }
}

/// The worst verdict of each gate over the pods, in the order in which gates run.
fn gates(
    reports: &[&CandidateStatus],
    old: &ModelVersionStatus,
    is_candidate: bool,
    rejected: Option<&RejectedStatus>,
) -> Vec<GateResult> {
    let mut gates: Vec<GateResult> = Vec::new();
    for gate in reports.iter().flat_map(|report| &report.gates) {
        match gates.iter_mut().find(|known| known.name == gate.name) {
            Some(known) if rank(gate.verdict) < rank(known.verdict) => *known = gate.clone(),
            Some(_) => {}
            None => gates.push(gate.clone()),
        }
    }
    let old_failed = old.gates.iter().any(|gate| gate.verdict == GateVerdict::Fail);
    if gates.is_empty() && !(is_candidate && old_failed) {
        gates.clone_from(&old.gates);
    }
    // The latch outlives the pods' reports, so what it says holds even if none was seen here.
    if let Some(rejected) = rejected {
        gates.retain(|gate| gate.name != rejected.gate);
        gates.push(GateResult {
            name: rejected.gate,
            verdict: GateVerdict::Fail,
            value: rejected.value.clone(),
            message: Some(rejected.message.clone()),
        });
    }
    gates.sort_by_key(|gate| gate.name);
    gates
}

fn rank(verdict: GateVerdict) -> u8 {
    match verdict {
        GateVerdict::Fail => 0,
        GateVerdict::Unknown(_) => 1,
        GateVerdict::Pass => 2,
        GateVerdict::Skipped => 3,
    }
}

fn gate_summary(gates: &[GateResult], rejected: Option<&RejectedStatus>) -> Option<String> {
    let is_told = |gate: &&GateResult| rejected.is_none_or(|rejected| rejected.gate == gate.name);
    if let Some(failed) = gates.iter().filter(|gate| gate.verdict == GateVerdict::Fail).find(is_told) {
        let by_name = || format!("{} failed", failed.name.as_str());
        return Some(failed.value.as_deref().map_or_else(by_name, short_figure));
    }
    let asked = gates.iter().filter(|gate| gate.verdict != GateVerdict::Skipped).count();
    let passed = gates.iter().filter(|gate| gate.verdict == GateVerdict::Pass).count();
    (asked > 0).then(|| format!("{passed}/{asked}"))
}

/// As much of a figure as fits into a column, in whole words, but for a second one that is long: one word says too little.
fn short_figure(value: &str) -> String {
    let mut short = String::new();
    // What follows a comma says what was wanted.
    for (index, word) in value.split(',').next().unwrap_or_default().split_whitespace().enumerate() {
        let fits = short.chars().count() + 1 + word.chars().count() <= FIGURE_CHARS_MAX;
        if index > 1 && !fits {
            break;
        }
        if !short.is_empty() {
            short.push(' ');
        }
        short.push_str(word);
    }
    short.chars().take(FIGURE_CHARS_MAX).collect()
}

fn furthest_behind(reports: &[&CandidateStatus]) -> Option<Progress> {
    let goes_on = reports.iter().filter(|report| report.phase != CandidatePhase::Failed);
    let progresses = goes_on.filter_map(|report| Some((report.phase, report.progress.as_ref()?)));
    let furthest = progresses.min_by_key(|(phase, progress)| (*phase, progress.bytes, progress.done_permille));
    furthest.map(|(_, progress)| progress.clone())
}

/// Why it is where it is, in a word.
fn reason(
    inputs: &VersionInputs,
    phase: VersionPhase,
    rejected: Option<&RejectedStatus>,
    old: &ModelVersionStatus,
) -> String {
    let waits = inputs.state.rollout.as_ref().and_then(|rollout| rollout.wait_reason);
    match phase {
        VersionPhase::Pending
        | VersionPhase::Fetching
        | VersionPhase::Validating
        | VersionPhase::Prepared
        | VersionPhase::Canary => {
            waits.map(Reason::from).or(inputs.missing).unwrap_or(Reason::RollingOut).as_str().to_owned()
        }
        VersionPhase::Promoting | VersionPhase::Baking | VersionPhase::Active => {
            Reason::AsRequested.as_str().to_owned()
        }
        VersionPhase::Superseded => Reason::Superseded.as_str().to_owned(),
        VersionPhase::Unknown(_) => old.reason.clone().unwrap_or_else(|| Reason::Pending.as_str().to_owned()),
        VersionPhase::Rejected | VersionPhase::RolledBack => {
            match (rejected.map(|rejected| rejected.gate), &old.reason) {
                (Some(GateName::Deadline), _) => Reason::DeadlineExceeded.as_str().to_owned(),
                (Some(gate), _) => format!("{}Failed", gate.as_str()),
                (None, Some(old)) => old.clone(),
                (None, None) => Reason::GateFailed.as_str().to_owned(),
            }
        }
    }
}

/// The same in a sentence.
fn message(
    inputs: &VersionInputs,
    phase: VersionPhase,
    rejected: Option<&RejectedStatus>,
    old: &ModelVersionStatus,
) -> String {
    // An operator of before had the sentence as the reason.
    let (old_phase, old_message) = (old.phase, old.message.as_deref().or(old.reason.as_deref()));
    let state = inputs.state;
    let rollout = state.rollout.as_ref();
    let answers = if inputs.any_runs { "answers" } else { NO_POD };
    let elsewhere = || readdressed(inputs.version, state).map(|address| format!("; {address}")).unwrap_or_default();
    match phase {
        VersionPhase::Pending
        | VersionPhase::Fetching
        | VersionPhase::Validating
        | VersionPhase::Prepared
        | VersionPhase::Canary => {
            let message = rollout.and_then(|rollout| rollout.message.as_deref()).unwrap_or("waits for pods");
            format!("{message}{}", elsewhere())
        }
        VersionPhase::Promoting => "pods switch to it".to_owned(),
        VersionPhase::Baking => match (&state.previous, rollout.map(until)) {
            (Some(previous), Some(until)) => {
                format!("{answers}; watched until {until}, and gone back from to {previous} if it fails")
            }
            (None, Some(until)) => format!("{answers}; watched until {until}"),
            _ => answers.to_owned(),
        },
        VersionPhase::Active => format!("{answers}{}", elsewhere()),
        VersionPhase::Unknown(_) => old_message.unwrap_or_default().to_owned(),
        VersionPhase::Rejected | VersionPhase::RolledBack => match (rejected, old_message) {
            (Some(rejected), _) => rejected.message.clone(),
            (None, Some(old)) => old.to_owned(),
            (None, None) => "it was refused".to_owned(),
        },
        VersionPhase::Superseded => match old_message {
            // The first successor is the reason; later ones change nothing.
            Some(old) if old_phase == Some(VersionPhase::Superseded) => old.to_owned(),
            _ => {
                let by = state.candidate.as_ref().or(state.active.as_ref());
                let never = match old_phase {
                    Some(
                        VersionPhase::Active | VersionPhase::Baking | VersionPhase::Promoting | VersionPhase::Canary,
                    ) => "",
                    _ => " before it answered",
                };
                let by = if never.is_empty() { state.active.as_ref() } else { by };
                by.map_or_else(|| format!("given up{never}"), |by| format!("replaced by {by}{never}"))
            }
        },
    }
}

/// Instead of "answers".
const NO_POD: &str = "no pod runs that could answer with it";

/// From where pods to come have the version's file, where its service names another address than it was stamped with. It is
/// the same file, by its digest: none that is there is fetched again.
pub(super) fn readdressed(version: &ModelVersion, state: &RolloutState) -> Option<String> {
    let named = state.versions.iter().find(|named| named.name == version.name_any())?;
    let draft = |runtime: &RuntimeSpec| runtime.speculative.clone().and_then(|speculative| speculative.draft);
    let (now, stamped) = (&named.model.source, &version.spec.model.source);
    let other =
        |now: &SourceSpec, stamped: &SourceSpec| now.uri.clone().filter(|uri| stamped.uri.as_ref() != Some(uri));
    let of_draft = || draft(&named.runtime).zip(draft(&version.spec.runtime)).and_then(|(now, old)| other(&now, &old));
    let address = other(now, stamped).or_else(of_draft)?;
    Some(format!("a pod that has not its file has it from {} from now on", gantry_crds::address::shown(&address)))
}

/// When a bake is over.
fn until(rollout: &RolloutStatus) -> Timestamp {
    rollout.bake.as_ref().map_or(rollout.deadline.0, |bake| bake.deadline.0)
}

fn conditions(
    status: &ModelVersionStatus,
    phase: VersionPhase,
    rejected: Option<&RejectedStatus>,
    waits: Option<WaitReason>,
    any_runs: bool,
    passed_everywhere: impl Fn(GateName) -> bool,
) -> [NewCondition; 5] {
    let answered =
        matches!(phase, VersionPhase::Canary | VersionPhase::Promoting | VersionPhase::Baking | VersionPhase::Active);
    let of_gates = |type_: ConditionType, names: &[GateName]| {
        let was_true = || status.conditions.iter().any(|old| old.type_ == type_.as_str() && old.status == "True");
        let holds = || answered || was_true() || names.iter().all(|gate| passed_everywhere(*gate));
        let relevant: Vec<_> = status.gates.iter().filter(|gate| names.contains(&gate.name)).collect();
        let failed = relevant.iter().find(|gate| gate.verdict == GateVerdict::Fail);
        let (status, reason, message) = match failed {
            Some(gate) => (
                Some(false),
                Reason::GateFailed,
                gate.message.clone().or_else(|| gate.value.clone()).unwrap_or_default(),
            ),
            None if relevant.len() == names.len() && holds() => (Some(true), Reason::Passed, PASSED.to_owned()),
            None => (None, Reason::Pending, "not known yet".to_owned()),
        };
        NewCondition { type_, status, reason, message: limits::message(&message) }
    };
    let validated = match (rejected, phase) {
        (Some(rejected), _) if rejected.outcome == RejectedOutcome::Rejected => {
            let reason =
                if rejected.gate == GateName::Deadline { Reason::DeadlineExceeded } else { Reason::GateFailed };
            (Some(false), reason, rejected.message.clone())
        }
        (_, VersionPhase::Prepared) => (Some(true), Reason::Passed, PASSED.to_owned()),
        _ if answered || phase == VersionPhase::RolledBack => (Some(true), Reason::Passed, PASSED.to_owned()),
        _ if waits.is_some() && !matches!(phase, VersionPhase::Superseded | VersionPhase::Rejected) => {
            let reason = waits.map_or(Reason::Pending, Reason::from);
            (None, reason, status.message.clone().unwrap_or_default())
        }
        _ => {
            let known = status.conditions.iter().find(|condition| condition.type_ == ConditionType::Validated.as_str());
            match known.filter(|_| matches!(phase, VersionPhase::Superseded | VersionPhase::Rejected)) {
                Some(known) if known.status == "True" => (Some(true), Reason::Passed, known.message.clone()),
                Some(known) if known.status == "False" => (Some(false), Reason::GateFailed, known.message.clone()),
                _ => (None, Reason::Pending, "not known yet".to_owned()),
            }
        }
    };
    let serving = match phase {
        _ if answered && !any_runs => (Some(false), Reason::NoPodReady, NO_POD),
        VersionPhase::Canary => (Some(true), Reason::RollingOut, "it answers a share of the requests"),
        _ if answered => (Some(true), Reason::AsRequested, "it answers requests"),
        VersionPhase::RolledBack => (Some(false), Reason::RolledBack, "it was taken back"),
        VersionPhase::Rejected => (Some(false), Reason::GateFailed, "it never answered"),
        VersionPhase::Superseded => (Some(false), Reason::Superseded, "another version answers"),
        _ => (Some(false), Reason::Pending, "it is being prepared"),
    };
    let new = |type_, (status, reason, message): (Option<bool>, Reason, &str)| NewCondition {
        type_,
        status,
        reason,
        message: limits::message(message),
    };
    [
        of_gates(ConditionType::Fetched, &[GateName::Fetch]),
        of_gates(ConditionType::Verified, &[GateName::Digest, GateName::Format]),
        of_gates(ConditionType::Fits, &[GateName::Memory]),
        new(ConditionType::Validated, (validated.0, validated.1, &validated.2)),
        new(ConditionType::Serving, serving),
    ]
}

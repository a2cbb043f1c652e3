//! What people see of services: pure functions from objects to text.

// To texts, which takes whatever it is given.
use std::fmt::Write as _;

use console::{StyledObject, style};
use gantry_crds::{
    InferenceService, ModelVersion,
    conditions::ConditionType,
    quantity::human_bytes,
    status::{
        CandidateStatus, GateResult, GateVerdict, InferenceServiceStatus, RejectedOutcome, ReplicaHealth,
        ReplicaStatus, RolloutStatus, RolloutStep, StrategyName, VersionPhase,
    },
};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt;

use crate::text::{bar, columns, in_line, share_of_time, span};

/// A service and its versions, the oldest first.
#[derive(Debug, Clone)]
pub struct View {
    /// The service.
    pub service: InferenceService,
    /// Its versions.
    pub versions: Vec<ModelVersion>,
}

/// What became of what the spec asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The operator works on it, or has not seen it yet.
    Pending,
    /// The service answers with it.
    Ready,
    /// It was refused, or nothing goes on without the user; why.
    Refused(String),
}

impl View {
    fn status(&self) -> InferenceServiceStatus {
        self.service.status.clone().unwrap_or_default()
    }

    /// What became of what the spec asks for, as far as the operator has taken it in.
    #[must_use]
    pub fn outcome(&self) -> Outcome {
        let status = self.status();
        let is_true = |type_| condition(&status, type_).filter(|condition| condition.status == "True");
        if status.observed_generation != self.service.metadata.generation {
            return Outcome::Pending;
        }
        match (is_true(ConditionType::Ready), is_true(ConditionType::Stalled)) {
            (Some(_), _) => Outcome::Ready,
            (None, Some(stalled)) => Outcome::Refused(format!("{}: {}", stalled.reason, in_line(&stalled.message))),
            (None, None) => Outcome::Pending,
        }
    }

    /// A line without anything that moves by itself: it changes when something happened.
    #[must_use]
    pub fn summary(&self) -> String {
        let status = self.status();
        let mut line = self.service.name_any();
        let _ = match &status.rollout {
            Some(rollout) => write!(line, ": {} {}", rollout.step.as_str(), rollout.version),
            None => write!(line, ": {}", status.active_version.as_deref().unwrap_or("no version answers")),
        };
        if let Some(ready) = condition(&status, ConditionType::Ready) {
            let _ = write!(line, ": {}: {}", ready.reason, in_line(&ready.message));
        }
        line
    }

    /// The service, its rollout and its pods.
    #[must_use]
    pub fn panel(&self, now: Timestamp) -> String {
        let status = self.status();
        let mut text = self.head(&status);
        if let Some(rollout) = &status.rollout {
            text.push('\n');
            text.push_str(&steps(rollout, now));
        }
        if let Some(version) = status.candidate_version.as_deref().and_then(|name| self.version(name)) {
            let gates = version.status.as_ref().map(|status| status.gates.as_slice()).unwrap_or_default();
            if !gates.is_empty() {
                let _ = writeln!(text, "  gates      {}", gates.iter().map(gate).collect::<Vec<_>>().join("  "));
            }
        }
        text.push_str(&rejected(&status));
        if !status.replicas.is_empty() {
            text.push('\n');
            text.push_str(&pods(&status));
        }
        text
    }

    fn head(&self, status: &InferenceServiceStatus) -> String {
        let pods = status.replica_summary.as_deref().unwrap_or("0/?");
        let name = style(self.service.name_any()).bold();
        let endpoint = status.endpoint.as_deref().unwrap_or_default();
        let mut text = format!("{name}  {}  {pods} pods  {}\n", readiness(status), style(endpoint).dim());
        let roles = [
            ("active", &status.active_version),
            ("candidate", &status.candidate_version),
            ("previous", &status.previous_version),
        ];
        for (role, version) in roles {
            if let Some(name) = version {
                let _ = writeln!(text, "  {role:<9}  {}", self.version(name).map_or_else(|| name.clone(), describe));
            }
        }
        let told = [ConditionType::Ready, ConditionType::PodsReady].map(|type_| condition(status, type_));
        for condition in told.into_iter().flatten().filter(|condition| condition.status != "True") {
            let reason = style(&condition.reason).yellow();
            let _ =
                writeln!(text, "  {:<9}  {reason}: {}", condition.type_.to_lowercase(), in_line(&condition.message));
        }
        text
    }

    fn version(&self, name: &str) -> Option<&ModelVersion> {
        self.versions.iter().find(|version| version.name_any() == name)
    }

    /// Where the rollout is, why, what it waits for and until when, and what comes next.
    #[must_use]
    pub fn explanation(&self, now: Timestamp) -> String {
        let status = self.status();
        let mut text = self.panel(now);
        text.push('\n');
        let next = match (&status.rollout, &status.rejected) {
            (Some(rollout), _) => next_step(rollout),
            (None, Some(_)) => "It is tried again by itself once what it was judged by changes: the spec's model, runtime, resources, cache, \
                 scheduling or gates, and what its gate read. If what was wrong lay elsewhere: kubectl gantry rollout retry."
                .to_owned(),
            (None, None) if self.outcome() == Outcome::Ready => "Nothing is rolled out: it answers with what its spec asks for.".to_owned(),
            (None, None) => "No rollout is in progress.".to_owned(),
        };
        let _ = writeln!(text, "{next}");
        text
    }

    /// All versions, the oldest first.
    #[must_use]
    pub fn history(&self, now: Timestamp) -> String {
        let rows: Vec<_> = self.versions.iter().map(|version| history_row(version, now)).collect();
        columns(["REV", "VERSION", "MODEL", "SIZE", "PHASE", "GATES", "REASON", "AGE"], &rows)
    }
}

/// A line for each service.
#[must_use]
pub fn list(services: &[InferenceService]) -> String {
    let rows: Vec<_> = services
        .iter()
        .map(|service| {
            let status = service.status.clone().unwrap_or_default();
            let rollout = status.rollout.as_ref().map(step_name).unwrap_or_default();
            let why = condition(&status, ConditionType::Ready).map(|ready| in_line(&ready.reason)).unwrap_or_default();
            [
                service.namespace().unwrap_or_default(),
                service.name_any(),
                readiness(&status).to_string(),
                status.replica_summary.clone().unwrap_or_default(),
                status.active_version.clone().unwrap_or_default(),
                status.candidate_version.clone().unwrap_or_default(),
                rollout,
                status.memory.clone().unwrap_or_default(),
                why,
            ]
        })
        .collect();
    columns(["NAMESPACE", "NAME", "READY", "PODS", "ACTIVE", "CANDIDATE", "STEP", "MEMORY", "REASON"], &rows)
}

fn condition(status: &InferenceServiceStatus, type_: ConditionType) -> Option<&Condition> {
    status.conditions.iter().find(|condition| condition.type_ == type_.as_str())
}

/// `Ready`, `Degraded` where it answers with something else or with fewer pods, `Down` where it does not.
fn readiness(status: &InferenceServiceStatus) -> StyledObject<&'static str> {
    let is_true = |type_| condition(status, type_).is_some_and(|condition| condition.status == "True");
    let all_pods = condition(status, ConditionType::PodsReady).is_none_or(|condition| condition.status == "True");
    match (is_true(ConditionType::Ready), is_true(ConditionType::Available)) {
        (true, _) if all_pods => style("Ready").green(),
        (true, _) => style("Ready").yellow(),
        (false, true) => style("Answers").yellow(),
        (false, false) => style("Down").red(),
    }
}

fn describe(version: &ModelVersion) -> String {
    let mut parts =
        vec![version.name_any(), format!("rev {}", version.spec.revision), version.spec.model.served_name.clone()];
    let status = version.status.as_ref();
    if let Some(gguf) = status.and_then(|status| status.gguf.as_ref()) {
        parts.extend([
            in_line(&gguf.architecture),
            in_line(&gguf.parameters),
            in_line(&gguf.quantization),
            gguf.size.clone(),
        ]);
    }
    if let Some(phase) = status.and_then(|status| status.phase) {
        parts.push(phase_styled(phase).to_string());
    }
    parts.join("  ")
}

fn phase_styled(phase: VersionPhase) -> StyledObject<&'static str> {
    let name = style(phase.as_str());
    match phase {
        VersionPhase::Active => name.green(),
        VersionPhase::Rejected | VersionPhase::RolledBack => name.red(),
        VersionPhase::Superseded => name.dim(),
        _ => name.cyan(),
    }
}

/// The step in a word, and in a canary the share.
fn step_name(rollout: &RolloutStatus) -> String {
    let share = rollout.canary.as_ref().map(|canary| format!(" {}", canary.share)).unwrap_or_default();
    format!("{}{share}", rollout.step.as_str())
}

/// The steps, how far the present one is, and what it waits for.
fn steps(rollout: &RolloutStatus, now: Timestamp) -> String {
    let canary = rollout.canary.as_ref();
    let began = canary.map_or(rollout.started_at.0, |canary| canary.since.0);
    let deadline = canary.and_then(|canary| canary.until.as_ref()).map_or(rollout.deadline.0, |until| until.0);
    let all: &[RolloutStep] = match rollout.step {
        RolloutStep::Rollback => &[RolloutStep::Rollback],
        RolloutStep::Canary => &[RolloutStep::Prepare, RolloutStep::Canary, RolloutStep::Commit, RolloutStep::Bake],
        _ => &[RolloutStep::Prepare, RolloutStep::Commit, RolloutStep::Bake],
    };
    let mut is_behind = true;
    let line = all.iter().map(|&step| {
        if step == rollout.step {
            is_behind = false;
            return format!("{} {}", style(step_name(rollout)).bold(), bar(share_of_time(began, deadline, now)));
        }
        if is_behind { style(step.as_str()).green().to_string() } else { style(step.as_str()).dim().to_string() }
    });
    let mut text = format!("  {}\n", line.collect::<Vec<_>>().join(" → "));
    let _ = writeln!(text, "  strategy   {}", in_line(&rollout.plan));
    let since = span(now.duration_since(began));
    let left = span(deadline.duration_since(now));
    let _ = match rollout.step {
        RolloutStep::Canary if canary.is_some_and(|canary| canary.until.is_none()) => {
            writeln!(text, "  since      {since}; stays so until somebody lets it go on")
        }
        RolloutStep::Canary => writeln!(text, "  since      {since}; the next step in {left}"),
        RolloutStep::Bake => writeln!(text, "  since      {since}; kept for {left} more, to be gone back to"),
        // Nobody's clock runs while it is paused, whatever the last deadline was.
        RolloutStep::Prepare if deadline <= now => writeln!(text, "  since      {since}"),
        RolloutStep::Prepare => writeln!(text, "  since      {since}; given up in {left}, unless pods make progress"),
        _ => writeln!(text, "  since      {since}; given up in {left}"),
    };
    if let Some(turn) = &rollout.turn {
        let _ = writeln!(
            text,
            "  turn       {}: its requests wait while the one version ends and the other is loaded",
            turn.pod
        );
    }
    if let Some(message) = &rollout.message {
        let reason =
            rollout.wait_reason.map(|reason| format!("{}: ", style(reason.as_str()).yellow())).unwrap_or_default();
        let what = if rollout.step == RolloutStep::Canary { "share    " } else { "waits for" };
        let _ = writeln!(text, "  {what}  {reason}{}", in_line(message));
    }
    text
}

fn next_step(rollout: &RolloutStatus) -> String {
    let holds = rollout.strategy() == StrategyName::HoldRequests;
    let is_blue_green = rollout.strategy() == StrategyName::BlueGreen;
    match rollout.step {
        RolloutStep::Prepare if holds => "Each pod checks what can be known of the candidate while the active version answers. Then one after the other lets its \
             answers end, unloads the active version, loads the candidate and takes it through its gates; its requests wait meanwhile. Where a gate \
             refuses the candidate, the pod loads the active version again.",
        RolloutStep::Prepare if is_blue_green => "As many pods again fetch the candidate, take it through its gates and load it, while the others go on answering. When all \
             are ready, the Service goes over to them.",
        RolloutStep::Bake if holds => "All pods answer with it. The previous version is loaded no more; where pods with the new one fail, each loads it again by \
             itself, and requests wait meanwhile.",
        RolloutStep::Bake if is_blue_green => "The new pods answer. The old ones stay until the bake is over, and the Service goes back to them by itself where the new \
             ones fail.",
        RolloutStep::Rollback if holds => "Each pod loads the previous version again; its requests wait meanwhile.",
        RolloutStep::Prepare => "Each pod fetches the candidate, takes it through its gates and loads it beside the active version, which goes on answering. \
             When all have, all switch; one that a gate refuses is never switched to.",
        RolloutStep::Canary => "A share of the requests goes to the candidate in each pod, and the rest to the active version. Each step has more, and after \
             the last one all requests go over; where pods find it worse, all is taken back.",
        RolloutStep::Commit => "All pods have the candidate loaded and switch to it now; what has begun ends with the version that it began with.",
        RolloutStep::Bake => "All pods answer with it. The previous version stays loaded until the bake is over, and is gone back to by itself where pods with \
             the new one fail.",
        RolloutStep::Rollback => "All pods go back to the previous version: at once where it is still loaded, else once they have loaded it.",
        RolloutStep::Unknown(_) => "This step is of a later release than this plugin.",
    }
    .to_owned()
}

fn gate(result: &GateResult) -> String {
    let name = result.name.as_str();
    let value = result.value.as_deref().map(|value| format!(" {}", in_line(value))).unwrap_or_default();
    match result.verdict {
        GateVerdict::Pass => format!("{} {name}{value}", style("✓").green()),
        GateVerdict::Fail => format!("{} {name}{value}", style("✗").red()),
        _ => style(format!("- {name}")).dim().to_string(),
    }
}

fn rejected(status: &InferenceServiceStatus) -> String {
    let Some(rejected) = &status.rejected else { return String::new() };
    let what = match rejected.outcome {
        RejectedOutcome::Rejected => "was refused by",
        RejectedOutcome::RolledBack => "was taken back by",
        RejectedOutcome::Unknown(other) => other,
    };
    let value = rejected.value.as_deref().map(|value| format!(" ({})", in_line(value))).unwrap_or_default();
    format!(
        "\n{} {} {what} the gate {}{value}\n  {}\n",
        style("✗").red(),
        style(&rejected.version).bold(),
        rejected.gate.as_str(),
        in_line(&rejected.message)
    )
}

fn pods(status: &InferenceServiceStatus) -> String {
    let rows: Vec<_> = status.replicas.iter().map(pod_row).collect();
    columns(["POD", "ANSWERS WITH", "HEALTH", "MEMORY", "CANDIDATE"], &rows)
}

fn pod_row(pod: &ReplicaStatus) -> [String; 5] {
    let health = style(pod.health.as_str());
    let health = match pod.health {
        ReplicaHealth::Healthy => health.green(),
        ReplicaHealth::Failed => health.red(),
        _ => health.yellow(),
    };
    let memory = pod.memory.as_ref().map(|memory| {
        let [measured, limit] = [memory.measured_bytes, memory.limit_bytes].map(|bytes| bytes.map(human_bytes));
        [measured, limit].into_iter().flatten().collect::<Vec<_>>().join("/")
    });
    let candidate = match (&pod.candidate, &pod.message) {
        (Some(candidate), _) => candidate_text(candidate),
        (None, Some(message)) => in_line(message),
        (None, None) => String::new(),
    };
    [
        pod.pod.clone(),
        pod.version.clone().unwrap_or_default(),
        health.to_string(),
        memory.unwrap_or_default(),
        candidate,
    ]
}

fn candidate_text(candidate: &CandidateStatus) -> String {
    let mut text = candidate.phase.as_str().to_owned();
    if let Some(progress) = &candidate.progress {
        if let Some(total) = progress.total.filter(|&total| total > 0) {
            let _ = write!(text, " {}", bar(progress.bytes as f64 / total as f64));
        }
        let summary = progress.summary.clone().unwrap_or_else(|| human_bytes(progress.bytes));
        let _ = write!(text, " {}", in_line(&summary));
        if let Some(seconds) = progress.eta_seconds {
            let _ = write!(text, ", {} left", span(jiff::SignedDuration::from_secs(seconds)));
        }
    }
    if let Some(message) = &candidate.message {
        let _ = write!(text, ": {}", in_line(message));
    }
    text
}

fn history_row(version: &ModelVersion, now: Timestamp) -> [String; 8] {
    let status = version.status.clone().unwrap_or_default();
    let age = version.metadata.creation_timestamp.as_ref().map(|at| span(now.duration_since(at.0)));
    [
        version.spec.revision.to_string(),
        version.name_any(),
        version.spec.model.served_name.clone(),
        status.gguf.map(|gguf| gguf.size).unwrap_or_default(),
        status.phase.map(|phase| phase_styled(phase).to_string()).unwrap_or_default(),
        status.gate_summary.as_deref().map(in_line).unwrap_or_default(),
        status.reason.as_deref().map(in_line).unwrap_or_default(),
        age.unwrap_or_default(),
    ]
}

#[cfg(test)]
#[path = "panel_tests.rs"]
pub(crate) mod tests;

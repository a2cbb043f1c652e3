//! What is known of a version that does not answer yet, as the status says it: its line.

use std::collections::BTreeMap;

use gantry_crds::status::{CandidatePhase, CandidateStatus, GateName, GateResult, GateVerdict, WaitReason};

use crate::limits::MAX_MESSAGE_CHARS;

/// The line of each version on its way, by its name.
pub type Lines = BTreeMap<String, CandidateStatus>;

/// Why a version may not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The gate that refused it.
    pub gate: GateName,
    /// The figure.
    pub value: Option<String>,
    /// Why, and what to do.
    pub message: String,
}

impl Refusal {
    /// One without a figure.
    #[must_use]
    pub fn new(gate: GateName, message: impl Into<String>) -> Self {
        Self { gate, value: None, message: message.into() }
    }

    /// The same with a figure.
    #[must_use]
    pub fn with_value(self, value: impl Into<String>) -> Self {
        Self { value: Some(value.into()), ..self }
    }
}

/// A version of which nothing is known yet.
#[must_use]
pub fn blank(version: &str, message: Option<String>) -> CandidateStatus {
    CandidateStatus {
        version: version.to_owned(),
        phase: CandidatePhase::Fetching,
        wait_reason: None,
        progress: None,
        gates: Vec::new(),
        gguf: None,
        fit: None,
        message,
    }
}

/// The version is doing something else now.
pub fn phase(line: &mut CandidateStatus, phase: CandidatePhase) {
    (line.phase, line.wait_reason, line.message) = (phase, None, None);
    // A figure of the phase before.
    if let Some(progress) = line.progress.as_mut().filter(|progress| progress.done_permille.is_some()) {
        (progress.done_permille, progress.summary) = (None, None);
    }
}

/// Why it cannot go on, and what to do. The same text for every try that fails alike: each change of it is a write.
pub fn waits_for(line: &mut CandidateStatus, reason: WaitReason, message: &str) {
    (line.wait_reason, line.message) = (Some(reason), Some(clip(message)));
}

/// What a gate said, in the place of what it said before.
pub fn gate(line: &mut CandidateStatus, result: GateResult) {
    line.gates.retain(|gate| gate.name != result.name);
    line.gates.push(result);
}

/// A gate refused the version.
pub fn refuse(line: &mut CandidateStatus, refusal: &Refusal) {
    line.phase = CandidatePhase::Failed;
    line.wait_reason = None;
    line.message = Some(format!("{}: {}", refusal.gate.as_str(), clip(&refusal.message)));
    let (name, value) = (refusal.gate, refusal.value.clone());
    gate(line, GateResult { name, verdict: GateVerdict::Fail, value, message: Some(clip(&refusal.message)) });
}

/// The text, cut to what a message in a status may have.
#[must_use]
pub fn clip(text: &str) -> String {
    match text.char_indices().nth(MAX_MESSAGE_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

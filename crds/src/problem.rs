//! What of a spec cannot be carried out: the field, and what to do.
//!
//! The API server's rules are checked again here. An object may have been stored before a rule existed, and gates may stand in a
//! file that no API server has seen. Absent: what needs more of the spec than its gates, which is the operator's.

use std::fmt;

use crate::inference_service::{
    DriftGate, DriftReference, GatesSpec, OBJECT_NAME_RULE, PerformanceGate, PromptsGate, ShadowGate, is_object_name,
};
use crate::scalars::{Percent, Ratio};

/// One thing in the spec that cannot be carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Whether the value is wrong, or right but not supported yet.
    pub kind: ProblemKind,
    /// Path of the field.
    pub field: &'static str,
    /// What is wrong, or what to use instead.
    pub advice: String,
}

/// Why a field cannot be carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProblemKind {
    /// The value is wrong.
    Invalid,
    /// This release does not carry it out.
    NotSupported,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            ProblemKind::Invalid => write!(f, "{}: {}", self.field, self.advice),
            ProblemKind::NotSupported => write!(f, "{} is not supported yet: {}", self.field, self.advice),
        }
    }
}

/// What is wrong with the name of an object, which would break only when somebody asks for it; `None` where an object may have it.
#[must_use]
pub fn of_object_name(name: &str) -> Option<String> {
    (!is_object_name(name)).then(|| format!("{name:?} is no name of an object: use {OBJECT_NAME_RULE}"))
}

impl GatesSpec {
    /// Everything in these gates that cannot be carried out.
    #[must_use]
    pub fn problems(&self) -> Vec<Problem> {
        use ProblemKind::{Invalid, NotSupported};
        let mut problems = Vec::new();
        let mut problem = |kind, field, advice| problems.push(Problem { kind, field, advice });
        let Self { memory, prompts, drift, performance, shadow } = self;
        if let Err(error) = memory.headroom.ratio() {
            problem(Invalid, "spec.rollout.gates.memory.headroom", error.to_string());
        }
        if let Some(PromptsGate { config_map_ref, min_pass }) = prompts {
            if let Err(error) = min_pass.ratio() {
                problem(Invalid, "spec.rollout.gates.prompts.minPass", error.to_string());
            }
            if let Some(advice) = of_object_name(&config_map_ref.name) {
                problem(Invalid, "spec.rollout.gates.prompts.configMapRef.name", advice);
            }
        }
        if let Some(DriftGate { reference, min_agreement, max_kl, max_perplexity_ratio }) = drift {
            if let Some(Err(error)) = min_agreement.as_ref().map(Percent::ratio) {
                problem(Invalid, "spec.rollout.gates.drift.minAgreement", error.to_string());
            }
            if let Some(Err(error)) = max_kl.as_ref().map(Ratio::value) {
                problem(Invalid, "spec.rollout.gates.drift.maxKl", error.to_string());
            }
            if let Some(Err(error)) = max_perplexity_ratio.as_ref().map(Ratio::value) {
                problem(Invalid, "spec.rollout.gates.drift.maxPerplexityRatio", error.to_string());
            }
            if *reference != DriftReference::Active {
                problem(NotSupported, "spec.rollout.gates.drift.reference", "use Active".to_owned());
            }
        }
        if let Some(PerformanceGate { min_decode_ratio }) = performance
            && let Some(Err(error)) = min_decode_ratio.as_ref().map(Ratio::value)
        {
            problem(Invalid, "spec.rollout.gates.performance.minDecodeRatio", error.to_string());
        }
        if let Some(ShadowGate { sample_percent, duration }) = shadow {
            if !(1..=100).contains(sample_percent) {
                problem(Invalid, "spec.rollout.gates.shadow.samplePercent", "use a number from 1 to 100".to_owned());
            }
            if let Err(error) = duration.to_std() {
                problem(Invalid, "spec.rollout.gates.shadow.duration", error.to_string());
            }
        }
        problems
    }
}

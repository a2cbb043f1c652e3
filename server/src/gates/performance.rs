//! The performance gate: how fast a candidate generates, beside the version that is active.
//!
//! Both answer the questions of this release, greedily, with as many tokens each, one question at a time and in turns, so that what else the machine
//! does slows both. What counts of a question is the ratio of the two rates, from the first token to the last; the gate's figure is their
//! geometric mean, and its limit is passed only where that is beyond chance ([`ONE_SIDED_Z`]). [`judge`] is pure; [`measure`] asks.
//!
//! The active version answers users beside, whose tokens it computes in the same steps, and the candidate does not: under load the
//! candidate seems faster than it will be, never slower. Absent: rates under load, and the time to the first token; a limit on those is
//! `spec.rollout.rollback.signals`.

use std::sync::Arc;

use gantry_crds::inference_service::PerformanceGate;
use gantry_crds::status::{CandidatePhase, GateName};
use gantry_engine::{GenerationParams, Priority, Prompt};

use super::limits::{MIN_PERFORMANCE_ANSWERS, PERFORMANCE_ANSWER_TOKENS, PERFORMANCE_QUESTIONS};
use super::reference::{ONE_SIDED_Z, Reference, Unanswered, collect, in_time, of_release, patiently};
use super::report::{Refusal, Report};
use crate::version::Version;

/// The field that asks for it.
pub(super) const FIELD: &str = "spec.rollout.gates.performance";
/// The smallest ratio of rates where no limit is given: who changes a model expects it to be about as fast.
const DEFAULT_MIN_DECODE_RATIO: f64 = 0.8;

/// A comparison with the active version.
#[derive(Clone, Debug)]
pub struct Job {
    /// What the ratio may be.
    pub gate: PerformanceGate,
    /// The active version.
    pub reference: Reference,
}

impl Job {
    /// Compares how fast a version generates with how fast the active one does.
    ///
    /// # Errors
    /// It is too slow, cannot be compared, or the active version answers in other pods alone.
    pub async fn run(&self, version: &Arc<Version>, report: &Report) -> Result<(), Refusal> {
        report.phase(CandidatePhase::Testing);
        let Some(reference) = self.reference.found(GateName::Performance, FIELD, report).await? else { return Ok(()) };
        let least = match &self.gate.min_decode_ratio {
            Some(ratio) => ratio.value().map_err(|error| {
                Refusal::new(GateName::Performance, format!("{FIELD}.minDecodeRatio: {error}")).with_value("no limit")
            })?,
            None => DEFAULT_MIN_DECODE_RATIO,
        };
        let rates = measure(&reference, version, report).await?;
        report.pass(GateName::Performance, judge(&rates, least)?);
        Ok(())
    }
}

/// How fast both generated the answer to one question, in tokens a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// The active version.
    pub reference: f64,
    /// The candidate.
    pub candidate: f64,
}

fn logs(rates: &[Rates]) -> Vec<f64> {
    rates.iter().map(|rates| (rates.candidate / rates.reference).ln()).collect()
}

/// How many times as fast the candidate is; `None` where nothing was timed.
#[must_use]
pub fn ratio(rates: &[Rates]) -> Option<f64> {
    (!rates.is_empty()).then(|| (logs(rates).iter().sum::<f64>() / rates.len() as f64).exp())
}

/// Judges the rates of several answers. The value is what the gate reports, whichever way it goes.
///
/// # Errors
/// The candidate is slower than `least` times the active version, and not by chance; or there are too few answers to tell.
pub fn judge(rates: &[Rates], least: f64) -> Result<String, Refusal> {
    let count = rates.len() as f64;
    if rates.len() < MIN_PERFORMANCE_ANSWERS {
        let message = format!(
            "{count} questions were answered by both, and {MIN_PERFORMANCE_ANSWERS} are wanted to compare how fast they are; leave {FIELD} \
             out for this change of model"
        );
        return Err(Refusal::new(GateName::Performance, message).with_value("too few answers"));
    }
    let logs = logs(rates);
    let mean = logs.iter().sum::<f64>() / count;
    let squares: f64 = logs.iter().map(|log| (log - mean).powi(2)).sum();
    let margin = ONE_SIDED_Z * (squares / (count - 1.0) / count).sqrt();
    let (ratio, most) = (mean.exp(), (mean + margin).exp());
    let rate = rates.iter().map(|rates| rates.candidate).sum::<f64>() / count;
    let value = format!("x{ratio:.2}, {rate:.0} tokens/s");
    if most >= least {
        return Ok(value);
    }
    let active = rates.iter().map(|rates| rates.reference).sum::<f64>() / count;
    let message = format!(
        "it generates {ratio:.2} times as fast as the active version (at most {most:.2} but for one chance in a hundred), {rate:.1} tokens a \
         second to {active:.1}, and at least {least} is wanted ({FIELD}.minDecodeRatio), over {count} answers; choose a smaller model or \
         quantisation, or change that limit"
    );
    Err(Refusal::new(GateName::Performance, message).with_value(value))
}

/// Has both answer, one question after the other. `report` hears how many questions of how many are done.
///
/// # Errors
/// The candidate does not answer in this pod.
pub async fn measure(
    reference: &Arc<Version>,
    candidate: &Arc<Version>,
    report: &Report,
) -> Result<Vec<Rates>, Refusal> {
    let mut questions = of_release(reference);
    questions.truncate(PERFORMANCE_QUESTIONS);
    let mut all = Vec::new();
    for (number, question) in questions.iter().enumerate() {
        all.extend(rates(reference, candidate, question, number, report).await?);
        report.timed(number + 1, questions.len());
    }
    Ok(all)
}

/// Has both answer one question; `None` where one of them does not take it. `number`: how many there were before.
///
/// # Errors
/// As [`measure`].
pub(super) async fn rates(
    reference: &Arc<Version>,
    candidate: &Arc<Version>,
    question: &Prompt,
    number: usize,
    report: &Report,
) -> Result<Option<Rates>, Refusal> {
    // Neither is always the one that finds the machine as the other left it.
    let both = if number.is_multiple_of(2) {
        let active = of_active(reference, question, report).await;
        (active, of_candidate(candidate, question).await?)
    } else {
        let new = of_candidate(candidate, question).await?;
        (of_active(reference, question, report).await, new)
    };
    Ok(both.0.zip(both.1).map(|(reference, candidate)| Rates { reference, candidate }))
}

/// `None`: it does not take the question.
async fn of_active(version: &Arc<Version>, question: &Prompt, report: &Report) -> Option<f64> {
    patiently(report, || rate(version, question)).await.ok().flatten()
}

async fn of_candidate(version: &Arc<Version>, question: &Prompt) -> Result<Option<f64>, Refusal> {
    match in_time(rate(version, question)).await {
        Ok(rate) => Ok(rate),
        Err(Unanswered::Question(_)) => Ok(None),
        // Another pod may do better.
        Err(Unanswered::Here(why)) => {
            let message = format!("it does not answer while its speed is measured: {why}; check the pod's log");
            Err(Refusal::new(GateName::Load, message).with_value("no answer"))
        }
    }
}

/// Tokens a second from the first to the last; `None` where there are too few to tell.
async fn rate(version: &Arc<Version>, question: &Prompt) -> Result<Option<f64>, Unanswered> {
    let params = GenerationParams {
        min_tokens: PERFORMANCE_ANSWER_TOKENS,
        priority: Priority::Low,
        ..GenerationParams::greedy(PERFORMANCE_ANSWER_TOKENS)
    };
    let answer = collect(version, question.clone(), params).await?;
    let (steps, ms) = (f64::from(answer.usage.completion_tokens.saturating_sub(1)), answer.timings.decode_ms);
    Ok((steps >= f64::from(PERFORMANCE_ANSWER_TOKENS / 2) && ms > 0.0).then(|| steps * 1000.0 / ms))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn of(ratios: &[f64]) -> Vec<Rates> {
        ratios.iter().map(|ratio| Rates { reference: 100.0, candidate: 100.0 * ratio }).collect()
    }

    #[test]
    fn a_candidate_is_refused_where_it_is_slower_than_chance_explains() {
        assert_eq!(judge(&of(&[1.0; 8]), 0.8).unwrap(), "x1.00, 100 tokens/s");
        assert_eq!(judge(&of(&[0.81, 0.79, 0.8, 0.82, 0.8, 0.78]), 0.8).unwrap(), "x0.80, 80 tokens/s");
        let refused = judge(&of(&[0.5, 0.52, 0.49, 0.5, 0.51, 0.5]), 0.8).unwrap_err();
        assert_eq!((refused.gate, refused.value.as_deref()), (GateName::Performance, Some("x0.50, 50 tokens/s")));
        assert!(
            refused.message.contains("minDecodeRatio") && refused.message.contains("50.3 tokens a second to 100.0"),
            "{}",
            refused.message
        );
        // Some that are slow and some that are not are no slow model.
        assert!(judge(&of(&[0.3, 1.2, 0.4, 1.1, 0.9, 0.5]), 0.8).is_ok());
        let few = judge(&of(&[1.0; MIN_PERFORMANCE_ANSWERS - 1]), 0.8).unwrap_err();
        assert_eq!(few.value.as_deref(), Some("too few answers"));
    }

    proptest! {
        #[test]
        fn who_is_as_fast_as_wanted_in_each_answer_passes_and_who_is_slower_in_each_by_far_does_not(
            ratios in prop::collection::vec(0.8_f64..2.0, MIN_PERFORMANCE_ANSWERS..40),
            noise in prop::collection::vec(0.97_f64..1.03, MIN_PERFORMANCE_ANSWERS..40),
            slow in 0.05_f64..0.7,
        ) {
            prop_assert!(judge(&of(&ratios), 0.8).is_ok());
            let slower: Vec<f64> = noise.iter().map(|noise| slow * noise).collect();
            prop_assert!(judge(&of(&slower), 0.8).is_err());
        }
    }
}

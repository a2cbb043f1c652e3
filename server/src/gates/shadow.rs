//! The shadow gate: how far a candidate's predictions are from those of the active version on what users ask just now.
//!
//! For as long as the spec says, a share of the requests that the active version answers is drawn ([`crate::version::samples`]). When one
//! has been answered, the active version answers its prompt once more, greedily, and the candidate reads that and is timed on an answer of
//! its own: the comparison of [`super::drift`] and [`super::performance`] with the users' questions. All of it comes after everybody
//! else's requests; while one is compared, others are left out. No user gets any of it, and no prompt is kept or told.
//!
//! [`judge`] is pure; [`watch`] compares. Absent: what the user was answered, which is not looked at: it may have been drawn by chance, or
//! been bound by a schema.

use std::sync::Arc;
use std::time::Duration;

use gantry_crds::inference_service::{DriftGate, ShadowGate};
use gantry_crds::status::{CandidatePhase, GateName};
use gantry_engine::Prompt;
use tokio::time::Instant;

use super::drift::{self, AnswerDrift, Compared, DriftLimits};
use super::limits::SHADOW_STEPS;
use super::performance::{self, Rates};
use super::reference::Reference;
use super::report::{Refusal, Report};
use crate::version::Version;

/// The field that asks for it.
const FIELD: &str = "spec.rollout.gates.shadow";

/// A comparison with the active version on live requests.
#[derive(Clone, Debug)]
pub struct Job {
    /// Which requests, and how long.
    pub gate: ShadowGate,
    /// The limits, which are those of the drift gate; `None`: the ones that it has where none is given.
    pub drift: Option<DriftGate>,
    /// The active version.
    pub reference: Reference,
}

impl Job {
    /// Compares a version with the active one on live requests.
    ///
    /// # Errors
    /// It is too far from it, does not take what the other one takes, or the active version is not to be had in this pod.
    pub async fn run(&self, version: &Arc<Version>, report: &Report) -> Result<(), Refusal> {
        report.phase(CandidatePhase::Testing);
        let Some(reference) = self.reference.found(GateName::Shadow, FIELD, report).await? else { return Ok(()) };
        let unusable = |message| Refusal::new(GateName::Shadow, message).with_value("no limit");
        let given = self.drift.as_ref().map(DriftLimits::of).transpose();
        let limits = given.map_err(|(field, error)| unusable(format!("spec.rollout.gates.drift.{field}: {error}")))?;
        let duration = self.gate.duration.to_std().map_err(|error| unusable(format!("{FIELD}.duration: {error}")))?;
        let share = f64::from(self.gate.sample_percent) / 100.0;
        let found =
            watch(&reference, version, share, duration, |step| report.shadowed(step, &self.gate.duration)).await?;
        if found.requests() == 0 {
            report.skip(GateName::Shadow, &format!("no request was answered in {}", self.gate.duration));
        } else {
            report.pass(GateName::Shadow, judge(&found, &limits.unwrap_or_default())?);
        }
        Ok(())
    }
}

/// What live requests showed.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// Those that both took.
    pub answers: Vec<AnswerDrift>,
    /// How fast both answered some of them.
    pub rates: Vec<Rates>,
    /// Requests that the active version took and the candidate did not.
    pub not_taken: usize,
}

impl Found {
    fn requests(&self) -> usize {
        self.answers.len() + self.not_taken
    }
}

/// Judges what live requests showed. The value is what the gate reports, whichever way it goes.
///
/// # Errors
/// A figure is beyond its limit, and not by chance; or requests are not taken that the active version takes, which is none.
pub fn judge(found: &Found, limits: &DriftLimits) -> Result<String, Refusal> {
    let requests = found.requests();
    if found.not_taken > 0 {
        let value = format!("{} of {requests} requests not taken", found.not_taken);
        let message = format!(
            "{value} that the active version takes: they are longer than it has context for, or its chat template refuses them; compare \
             spec.runtime.contextSize and the templates of both, or leave {FIELD} out for this change of model"
        );
        return Err(Refusal::new(GateName::Shadow, message).with_value(value));
    }
    let speed = performance::ratio(&found.rates).map(|ratio| format!(", x{ratio:.2} as fast")).unwrap_or_default();
    let told = |value: &str| format!("{value}{speed}, {requests} requests");
    match drift::judge(&found.answers, limits) {
        Ok(value) => Ok(told(&value)),
        Err(refusal) => {
            let value = refusal.value.as_deref().map(told);
            Err(Refusal { gate: GateName::Shadow, value, ..refusal })
        }
    }
}

/// Compares the two on a share of the requests that the active version answers, for so long. `told` hears how much of the time has
/// passed, in parts of [`SHADOW_STEPS`], whenever that is another.
///
/// # Errors
/// They cannot be compared, or one of them does not answer in this pod.
pub async fn watch(
    reference: &Arc<Version>,
    candidate: &Arc<Version>,
    share: f64,
    duration: Duration,
    told: impl Fn(u32),
) -> Result<Found, Refusal> {
    let mut prompts = reference.samples().take(share);
    let (began, mut found, mut step) = (Instant::now(), Found::default(), 0);
    let until = began + duration;
    while Instant::now() < until {
        let next = began + duration / SHADOW_STEPS * (step + 1);
        let prompt = tokio::select! {
            prompt = prompts.recv() => prompt,
            () = tokio::time::sleep_until(next.min(until)) => None,
        };
        if let Some(prompt) = prompt {
            let number = found.requests();
            // What is not compared by then is left out.
            let compared = tokio::time::timeout_at(until, both(reference, candidate, &prompt, number)).await;
            match compared.ok().transpose()? {
                Some((Compared::Answer(answer), rates)) => {
                    found.answers.push(answer);
                    found.rates.extend(rates);
                }
                Some((Compared::NotTaken(_), _)) => found.not_taken += 1,
                Some((Compared::NotAnswered(_), _)) | None => {}
            }
        }
        let passed = (began.elapsed().as_secs_f64() / duration.as_secs_f64() * f64::from(SHADOW_STEPS)) as u32;
        if passed > step {
            step = passed.min(SHADOW_STEPS);
            told(step);
        }
    }
    Ok(found)
}

/// Compares the two on one prompt; `number`: how many there were before.
async fn both(
    reference: &Arc<Version>,
    candidate: &Arc<Version>,
    prompt: &Prompt,
    number: usize,
) -> Result<(Compared, Option<Rates>), Refusal> {
    let compared =
        drift::compared(reference, candidate, prompt, FIELD).await.map_err(|refusal| match refusal.gate {
            GateName::Drift => Refusal { gate: GateName::Shadow, ..refusal },
            _ => refusal,
        })?;
    let rates = match &compared {
        Compared::Answer(_) => performance::rates(reference, candidate, prompt, number).await?,
        Compared::NotAnswered(_) | Compared::NotTaken(_) => None,
    };
    Ok((compared, rates))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn limits() -> DriftLimits {
        DriftLimits::default()
    }

    #[test]
    fn who_does_not_take_what_the_active_version_takes_is_refused_whatever_else_it_says() {
        let found = Found { answers: vec![AnswerDrift::default(); 20], not_taken: 1, ..Found::default() };
        let refused = judge(&found, &limits()).unwrap_err();
        assert_eq!((refused.gate, refused.value.as_deref()), (GateName::Shadow, Some("1 of 21 requests not taken")));
        assert!(refused.message.contains("spec.runtime.contextSize"), "{}", refused.message);
    }

    #[test]
    fn the_figures_of_both_comparisons_are_told() {
        let rates = vec![Rates { reference: 100.0, candidate: 50.0 }; 3];
        let found = Found { answers: vec![AnswerDrift::default(); 3], rates, not_taken: 0 };
        let value = judge(&found, &DriftLimits { min_agreement: None, ..limits() }).unwrap();
        assert!(value.contains(" same tokens, ") && value.ends_with(", x0.50 as fast, 3 requests"), "{value}");
    }
}

//! The shadow gate: how far a candidate's predictions are from those of the active version on what users ask just now.
//!
//! For as long as the spec says, a share of the requests that the active version answers is drawn ([`crate::version::samples`]). When one
//! has been answered, the candidate says whether it takes it; the active version answers its prompt once more, greedily, and the
//! candidate reads that and is timed on an answer of its own: the comparison of [`super::drift`] and [`super::performance`] with the
//! users' questions. All of it comes after everybody else's requests; while one is compared, or users wait, others are left out. No user
//! gets any of it, and no text of it is told.
//!
//! [`judge`] is pure; [`watch`] compares. Absent: what the user was answered, which is not looked at: it may have been drawn by chance, or
//! been bound by a schema.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use gantry_core::{Extent, PromptForm, ShownPrompt};
use gantry_crds::inference_service::{DriftGate, ShadowGate};
use gantry_crds::scalars::DurationString;
use gantry_crds::status::{CandidatePhase, GateName};
use gantry_engine::{GenerationEvent, GenerationParams, Priority, Prompt};
use tokio::time::Instant;

use super::drift::{self, AnswerDrift, Compared, DriftLimits, OTHER_VOCABULARY, TooFar};
use super::limits::{MIN_SHADOW_ANSWERS, SHADOW_QUEUE_LIMIT, SHADOW_QUEUE_LOOK, SHADOW_REQUEST_LIMIT, SHADOW_STEPS};
use super::performance::{self, Rates};
use super::reference::{Reference, Unanswered, in_time, submit};
use super::report::{Refusal, Report};
use crate::version::Version;

/// The field that asks for it.
pub(super) const FIELD: &str = "spec.rollout.gates.shadow";

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
    /// It is too far from it, does not take what the other one takes, or the active version answers in other pods alone.
    pub async fn run(&self, version: &Arc<Version>, report: &Report) -> Result<(), Refusal> {
        report.phase(CandidatePhase::Testing);
        let Some(reference) = self.reference.found(GateName::Shadow, FIELD, report).await? else { return Ok(()) };
        let unusable = |message| Refusal::new(GateName::Shadow, message).with_value("no limit");
        let given = self.drift.as_ref().map(DriftLimits::of).transpose();
        let limits = given.map_err(|(field, error)| unusable(format!("spec.rollout.gates.drift.{field}: {error}")))?;
        let duration = self.gate.duration.to_std().map_err(|error| unusable(format!("{FIELD}.duration: {error}")))?;
        let share = f64::from(self.gate.sample_percent) / 100.0;
        let told = |step| report.shadowed(step, &self.gate.duration);
        let found = watch(&reference, version, (share, duration), told, report).await?;
        match judge(&found, &limits.unwrap_or_default(), self.drift.is_some())? {
            Some(value) => report.pass(GateName::Shadow, value),
            None => report.skip(GateName::Shadow, &found.too_few(&self.gate.duration)),
        }
        Ok(())
    }
}

/// What live requests showed.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// Requests that were drawn and looked at.
    pub drawn: usize,
    /// Those by which the two could be compared.
    pub answers: Vec<AnswerDrift>,
    /// How fast both answered some of them.
    pub rates: Vec<Rates>,
    /// Why the last one was left out that was.
    pub left_out: Option<String>,
    /// Why the candidate does not take one that the active version takes, and what to do.
    pub not_taken: Option<String>,
}

impl Found {
    fn too_few(&self, duration: &DurationString) -> String {
        let Self { drawn, answers, left_out, .. } = self;
        if *drawn == 0 {
            return format!("no request was drawn and answered in {duration}");
        }
        let why = left_out.as_ref().map(|why| format!(" ({why})")).unwrap_or_default();
        format!(
            "{} of {drawn} requests could be compared{why}, and {MIN_SHADOW_ANSWERS} are wanted: give it a longer duration, or a larger \
             samplePercent",
            answers.len()
        )
    }
}

/// Judges what live requests showed. The value is what the gate reports, whichever way it goes; `None`: they are too few to tell.
/// `has_drift`: the spec has a drift gate, whose limits these are.
///
/// # Errors
/// A figure is beyond its limit, and not by chance; or a request is not taken that the active version takes.
pub fn judge(found: &Found, limits: &DriftLimits, has_drift: bool) -> Result<Option<String>, Refusal> {
    let Found { drawn, answers, rates, left_out: _, not_taken } = found;
    if let Some(why) = not_taken {
        let message = format!("it does not take a request that the active version takes: {why}");
        let value = format!("1 of {drawn} requests not taken");
        return Err(Refusal::new(GateName::Shadow, message).with_value(value));
    }
    if answers.len() < MIN_SHADOW_ANSWERS {
        return Ok(None);
    }
    let speed = performance::ratio(rates).map(|ratio| format!(", x{ratio:.2} as fast")).unwrap_or_default();
    let told = |value: &str| format!("{value}{speed}, {} requests", answers.len());
    match drift::judge(answers, limits) {
        Ok(value) => Ok(Some(told(&value))),
        Err(TooFar { value, found, field }) => {
            let limit = if has_drift {
                "change that limit".to_owned()
            } else {
                format!("set {field}, which asks for the gate Drift, too, or leave {FIELD} out")
            };
            let message = format!("{found}; choose another model, or {limit}");
            Err(Refusal::new(GateName::Shadow, message).with_value(told(&value)))
        }
    }
}

/// Compares the two on a share of the requests that the active version answers, for so long, or until one is not taken. `told` hears how
/// much of the time has passed, in parts of [`SHADOW_STEPS`], whenever that is another.
///
/// # Errors
/// They cannot be compared, or the candidate does not answer in this pod.
pub async fn watch(
    reference: &Arc<Version>,
    candidate: &Arc<Version>,
    (share, duration): (f64, Duration),
    told: impl Fn(u32),
    report: &Report,
) -> Result<Found, Refusal> {
    let mut prompts = reference.samples().take(share);
    let (began, mut found, mut step) = (Instant::now(), Found::default(), 0);
    let until = began + duration;
    while Instant::now() < until && found.not_taken.is_none() {
        let next = began + duration / SHADOW_STEPS * (step + 1);
        tokio::select! {
            prompt = prompts.recv() => match prompt {
                Some(prompt) => look_at(reference, candidate, &prompt, until, &mut found, report).await?,
                // Somebody else has them drawn now.
                None => break,
            },
            () = tokio::time::sleep_until(next.min(until)) => {}
        }
        let passed = (began.elapsed().as_secs_f64() / duration.as_secs_f64() * f64::from(SHADOW_STEPS)) as u32;
        if passed > step {
            step = passed.min(SHADOW_STEPS);
            told(step);
        }
    }
    Ok(found)
}

/// Compares the two on one request, until then at most, and adds what is found.
async fn look_at(
    reference: &Arc<Version>,
    candidate: &Arc<Version>,
    prompt: &Prompt,
    until: Instant,
    found: &mut Found,
    report: &Report,
) -> Result<(), Refusal> {
    let until = until.min(Instant::now() + SHADOW_REQUEST_LIMIT);
    let outcome = match tokio::time::timeout_at(until, both(reference, candidate, prompt, found.drawn, report)).await {
        Ok(outcome) => outcome?,
        Err(_) => Outcome::LeftOut("not both had read it in time".to_owned()),
    };
    found.drawn += 1;
    match outcome {
        Outcome::Compared(answer, rates) => {
            found.answers.push(answer);
            found.rates.extend(rates);
        }
        Outcome::NotTaken(why) => found.not_taken = Some(why),
        Outcome::LeftOut(why) => found.left_out = Some(why),
    }
    Ok(())
}

/// What came of one request.
enum Outcome {
    Compared(AnswerDrift, Option<Rates>),
    /// The candidate does not take it: why, and what to do.
    NotTaken(String),
    LeftOut(String),
}

/// Compares the two on one prompt; `number`: how many there were before.
///
/// # Errors
/// The candidate does not answer in this pod, or no prompt can be compared.
async fn both(
    reference: &Arc<Version>,
    candidate: &Arc<Version>,
    prompt: &Prompt,
    number: usize,
    report: &Report,
) -> Result<Outcome, Refusal> {
    if let Some(why) = not_taken(candidate, prompt).await? {
        return Ok(Outcome::NotTaken(why));
    }
    // The candidate computes on the same machine. One that came a moment ago waits for the next step, as all do; a queue tells nobody
    // when it is empty.
    let users_wait = async {
        while reference.stats().queued > 0 {
            tokio::time::sleep(SHADOW_QUEUE_LOOK).await;
        }
    };
    if tokio::time::timeout(SHADOW_QUEUE_LIMIT, users_wait).await.is_err() {
        return Ok(Outcome::LeftOut("users waited for the active version".to_owned()));
    }
    match drift::compared(reference, candidate, prompt, report).await? {
        Compared::Answer(answer) => {
            Ok(Outcome::Compared(answer, performance::rates(reference, candidate, prompt, number, report).await?))
        }
        Compared::LeftOut(why) => Ok(Outcome::LeftOut(why)),
        // What it stands for may be what a user was told.
        Compared::OtherToken(other) => {
            let message = format!(
                "token {} is another one to it than to the active version: it has another vocabulary, and what it predicts cannot be \
                 compared: leave {FIELD} out for this change of model",
                other.id
            );
            Err(Refusal::new(GateName::Shadow, message).with_value(OTHER_VOCABULARY))
        }
    }
}

/// Why the candidate does not take a prompt, by its template and its context, and what to do; without words of the prompt. `None`:
/// it takes it.
///
/// # Errors
/// It does not answer in this pod.
async fn not_taken(candidate: &Arc<Version>, prompt: &Prompt) -> Result<Option<String>, Refusal> {
    let otherwise = format!("or leave {FIELD} out for this change of model");
    let tokens = match in_time(count(candidate, prompt)).await {
        Ok(tokens) => tokens,
        Err(Unanswered::Question(_)) => {
            return Ok(Some(format!(
                "its chat template refuses it, or it has no context for it: compare the templates and spec.runtime.contextSize of both, \
                 {otherwise}"
            )));
        }
        // Another pod may do better.
        Err(Unanswered::Here(why)) => {
            let message = format!("it does not say whether it takes a request: {why}; check the pod's log");
            return Err(Refusal::new(GateName::Load, message).with_value("no answer"));
        }
    };
    let context = candidate.model().map_or(usize::MAX, |model| model.n_ctx_per_sequence as usize);
    Ok((tokens >= context).then(|| {
        format!(
            "that has {tokens} tokens, and it has a context of {context} for each: give it a larger spec.runtime.contextSize, {otherwise}"
        )
    }))
}

/// How many tokens a prompt has to a version.
async fn count(version: &Arc<Version>, prompt: &Prompt) -> Result<usize, Unanswered> {
    let extent = Extent::Prompt(PromptForm::Count);
    let params = GenerationParams { extent, priority: Priority::Low, ..GenerationParams::greedy(0) };
    let mut generation = submit(version, prompt.clone(), params).await?;
    while let Some(event) = generation.next().await {
        match event.map_err(Unanswered::of)? {
            GenerationEvent::Prompt(ShownPrompt::Count(tokens)) => return Ok(tokens),
            GenerationEvent::Failed(error) => return Err(Unanswered::of(error.into())),
            _ => {}
        }
    }
    Err(Unanswered::Here("it says nothing".to_owned()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn limits() -> DriftLimits {
        DriftLimits::default()
    }

    fn found(answers: usize) -> Found {
        let rates = vec![Rates { reference: 100.0, candidate: 50.0 }; answers];
        Found { drawn: answers, answers: vec![AnswerDrift::default(); answers], rates, ..Found::default() }
    }

    #[test]
    fn who_does_not_take_what_the_active_version_takes_is_refused_whatever_else_it_says() {
        let found = Found { drawn: 21, not_taken: Some("its template refuses it".to_owned()), ..found(20) };
        let refused = judge(&found, &limits(), true).unwrap_err();
        assert_eq!((refused.gate, refused.value.as_deref()), (GateName::Shadow, Some("1 of 21 requests not taken")));
        assert!(refused.message.contains("its template refuses it"), "{}", refused.message);
    }

    #[test]
    fn the_figures_of_both_comparisons_are_told() {
        let value = judge(&found(12), &DriftLimits { min_agreement: None, ..limits() }, true).unwrap().unwrap();
        assert!(value.contains(" same tokens, ") && value.ends_with(", x0.50 as fast, 12 requests"), "{value}");
    }

    #[test]
    fn a_figure_beyond_its_limit_names_a_limit_that_can_be_changed() {
        for (has_drift, says) in [(true, "or change that limit"), (false, "which asks for the gate Drift, too")] {
            let refused = judge(&found(12), &limits(), has_drift).unwrap_err();
            let is_told = refused.message.contains(says) && refused.message.contains("gates.drift.minAgreement");
            assert!(refused.gate == GateName::Shadow && is_told, "{}", refused.message);
        }
    }

    #[test]
    fn of_few_requests_nothing_is_said() {
        let few = Found { left_out: Some("users wait".to_owned()), drawn: 40, ..found(11) };
        assert_eq!(judge(&few, &limits(), true).unwrap(), None);
        let duration = DurationString("5m".to_owned());
        let told = few.too_few(&duration);
        assert!(told.starts_with("11 of 40 requests could be compared (users wait), and 12 are wanted"), "{told}");
        assert_eq!(Found::default().too_few(&duration), "no request was drawn and answered in 5m");
    }
}

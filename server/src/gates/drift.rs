//! The drift gate: how far a candidate's predictions are from those of the version that is active, token by token.
//!
//! The active version answers questions greedily, and the candidate reads the same tokens: for each token of the answers both say how
//! likely every one was in its place. So they are compared on what users would get, and not on texts that neither would write.
//! Counted are places with the same likeliest token, the Kullback-Leibler divergence, and the ratio of perplexities. Each figure
//! is a mean with its error, answers being what is drawn, and a limit is passed only where that is beyond chance
//! ([`ONE_SIDED_Z`]). Asked are the golden prompts, and the questions of this release where these give few tokens. [`compare`] and [`judge`] are pure;
//! [`measure`] is the way between them.
//!
//! Only the likeliest tokens of each place are told ([`TOP`]), so that the divergence is a lower bound: what is not told is taken
//! as one token, and a token that only the reference tells as no likelier to the candidate than the last that it tells. Absent:
//! a reference that was recorded earlier, and where answers end, of which nothing is told.

use std::sync::Arc;

use futures::StreamExt as _;
use gantry_core::{Extent, MAX_PROMPT_LOGPROBS, PromptForm, PromptToken, ShownPrompt, TokenChance, TokenLogprob};
use gantry_crds::inference_service::DriftGate;
use gantry_crds::scalars::InvalidValue;
use gantry_crds::status::{CandidatePhase, GateName};
use gantry_engine::{GenerationEvent, GenerationParams, Priority, Prompt};

use super::limits::{
    DRIFT_ANSWER_TOKENS, DRIFT_ENOUGH_TOKENS, MAX_DRIFT_QUESTIONS, MAX_DRIFT_TOKENS, MIN_DRIFT_ANSWERS,
};
use super::prompts::GoldenPrompt;
use super::reference::{ONE_SIDED_Z, Reference, Unanswered, collect, in_time, of_release, patiently, submit};
use super::report::{Refusal, Report};
use crate::version::Version;

/// The field that asks for it.
pub(super) const FIELD: &str = "spec.rollout.gates.drift";
/// What is reported of a candidate with another vocabulary.
pub(super) const OTHER_VOCABULARY: &str = "another vocabulary";
/// The likeliest tokens that are told of each place.
const TOP: u32 = gantry_engine::MAX_TOP_LOGPROBS;
/// The smallest share of places with the same likeliest token where no limit is given. The demo model in four bits agrees with
/// the one that it was made of in 93 places of a hundred, another model in 76 and fewer.
const DEFAULT_MIN_AGREEMENT: f64 = 0.9;
/// The largest ratio of perplexities where no limit is given.
const DEFAULT_MAX_PERPLEXITY_RATIO: f64 = 1.1;
/// Stands for a log-probability that is no number, or of a token that cannot be.
const LEAST_LOGPROB: f64 = -100.0;

/// A comparison with the active version.
#[derive(Clone, Debug)]
pub struct Job {
    /// What the figures may be.
    pub gate: DriftGate,
    /// The active version.
    pub reference: Reference,
}

impl Job {
    /// Compares what a version predicts with what the active one does.
    ///
    /// # Errors
    /// It is too far from it, cannot be compared with it, or that answers in other pods alone.
    pub async fn run(&self, version: &Arc<Version>, golden: &[GoldenPrompt], report: &Report) -> Result<(), Refusal> {
        let Self { gate, reference } = self;
        report.phase(CandidatePhase::Testing);
        let Some(reference) = reference.found(GateName::Drift, FIELD, report).await? else { return Ok(()) };
        let limits = DriftLimits::of(gate).map_err(|(field, error)| {
            Refusal::new(GateName::Drift, format!("spec.rollout.gates.drift.{field}: {error}")).with_value("no limit")
        })?;
        let answers = measure(&reference, version, golden, report).await?;
        let value = judge(&answers, &limits).map_err(|TooFar { value, found, field: _ }| {
            let message = format!("{found}; choose another model, or change that limit");
            Refusal::new(GateName::Drift, message).with_value(value)
        })?;
        report.pass(GateName::Drift, value);
        Ok(())
    }
}

/// What the figures may be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DriftLimits {
    /// The smallest share of places with the same likeliest token.
    pub min_agreement: Option<f64>,
    /// The largest mean divergence, in nats.
    pub max_kl: Option<f64>,
    /// The largest ratio of perplexities, candidate over reference.
    pub max_perplexity_ratio: Option<f64>,
}

impl DriftLimits {
    /// Those of a spec; where it gives none, those of this release.
    ///
    /// # Errors
    /// A value is no number; with its field.
    pub fn of(gate: &DriftGate) -> Result<Self, (&'static str, InvalidValue)> {
        let DriftGate { reference: _, min_agreement, max_kl, max_perplexity_ratio } = gate;
        let limits = Self {
            min_agreement: min_agreement.as_ref().map(|v| v.ratio()).transpose().map_err(|e| ("minAgreement", e))?,
            max_kl: max_kl.as_ref().map(|v| v.value()).transpose().map_err(|e| ("maxKl", e))?,
            max_perplexity_ratio: max_perplexity_ratio
                .as_ref()
                .map(|v| v.value())
                .transpose()
                .map_err(|e| ("maxPerplexityRatio", e))?,
        };
        let none = Self { min_agreement: None, max_kl: None, max_perplexity_ratio: None };
        Ok(if limits == none { Self::default() } else { limits })
    }
}

impl Default for DriftLimits {
    fn default() -> Self {
        Self {
            min_agreement: Some(DEFAULT_MIN_AGREEMENT),
            max_kl: None,
            max_perplexity_ratio: Some(DEFAULT_MAX_PERPLEXITY_RATIO),
        }
    }
}

/// How two versions differ on one answer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AnswerDrift {
    /// Tokens of it.
    places: f64,
    /// Places with the same likeliest token.
    agreed: f64,
    /// Sum of the divergences, in nats.
    kl: f64,
    /// By how much the answer is less likely to the candidate, in nats.
    lost: f64,
}

/// The same id is another token to the candidate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("token {id} is \"{candidate}\" to it and \"{reference}\" to the active version: it has another vocabulary")]
pub struct OtherToken {
    /// Its id.
    pub(super) id: i32,
    candidate: String,
    reference: String,
}

/// Compares what two versions say of one answer. `candidate` are the tokens that it read, the question's first.
///
/// # Errors
/// A token is not the same to both.
pub fn compare(reference: &[TokenLogprob], candidate: &[PromptToken]) -> Result<AnswerDrift, OtherToken> {
    let answer = &candidate[candidate.len().saturating_sub(reference.len())..];
    let mut drift = AnswerDrift::default();
    for (reference, candidate) in reference.iter().zip(answer) {
        let (said, read) = (&reference.token, &candidate.token);
        if (said.id, &said.bytes) != (read.id, &read.bytes) {
            let (candidate, reference) = (shown(&read.bytes), shown(&said.bytes));
            return Err(OtherToken { id: said.id, candidate, reference });
        }
        let Some(chance) = &candidate.chance else { continue };
        drift.places += 1.0;
        let likeliest = reference.top.first().map(|token| token.id);
        drift.agreed += f64::from(likeliest.is_some() && likeliest == chance.top.first().map(|token| token.id));
        let told = |top: &[TokenChance]| top.iter().map(|token| (token.id, finite(token.logprob))).collect::<Vec<_>>();
        drift.kl += divergence(&told(&reference.top), &told(&chance.top));
        drift.lost += finite(said.logprob) - finite(chance.logprob);
    }
    Ok(drift)
}

fn shown(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).escape_debug().collect()
}

fn finite(logprob: f32) -> f64 {
    if logprob.is_nan() { LEAST_LOGPROB } else { f64::from(logprob).clamp(LEAST_LOGPROB, 0.0) }
}

/// A lower bound of the divergence of the candidate's distribution from the reference's, in nats, from the likeliest tokens of each
/// and their log-probabilities, the likeliest first.
fn divergence(reference: &[(i32, f64)], candidate: &[(i32, f64)]) -> f64 {
    let least_told = candidate.last().map_or(0.0, |(_, logprob)| *logprob);
    let (mut sum, mut p_told, mut q_told) = (0.0, 0.0, 0.0);
    for (id, p_log) in reference {
        let p = p_log.exp();
        let q_log = candidate.iter().find(|(other, _)| other == id).map(|(_, q_log)| *q_log);
        sum += p * (p_log - q_log.unwrap_or(least_told));
        p_told += p;
        q_told += q_log.map_or(0.0, f64::exp);
    }
    // All the others together, by the log sum inequality: to the candidate they are at most what is left.
    let (p_rest, q_rest) = (1.0 - p_told, (1.0 - q_told).max(LEAST_LOGPROB.exp()));
    if p_rest > 0.0 {
        sum += p_rest * (p_rest / q_rest).ln();
    }
    sum.max(0.0)
}

/// A mean over all places, and its standard error with answers as what is drawn: the places of one resemble each other.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Figure {
    mean: f64,
    error: f64,
}

impl Figure {
    fn of(answers: &[AnswerDrift], value: fn(&AnswerDrift) -> f64) -> Self {
        let places = places(answers);
        let mean = answers.iter().map(value).sum::<f64>() / places.max(1.0);
        let count = answers.len() as f64;
        let squares: f64 = answers.iter().map(|answer| (value(answer) - mean * answer.places).powi(2)).sum();
        // Of one nothing can be said about others.
        let error =
            if count < 2.0 { f64::INFINITY } else { (squares * count / (count - 1.0)).sqrt() / places.max(1.0) };
        Self { mean, error }
    }

    fn margin(&self) -> f64 {
        self.error * ONE_SIDED_Z
    }
}

fn places(answers: &[AnswerDrift]) -> f64 {
    answers.iter().map(|answer| answer.places).sum()
}

/// A figure that is beyond its limit, and not by chance.
#[derive(Clone, Debug)]
pub struct TooFar {
    /// The figures, as they are reported.
    pub value: String,
    /// Which, by how much and over how many answers.
    pub found: String,
    /// Path of the limit.
    pub field: String,
}

/// Judges what the answers showed. The value is what the gate reports, whichever way it goes.
///
/// # Errors
/// A figure is beyond its limit, and not by chance.
pub fn judge(answers: &[AnswerDrift], limits: &DriftLimits) -> Result<String, TooFar> {
    let places = places(answers);
    let agreement = Figure::of(answers, |answer| answer.agreed);
    let kl = Figure::of(answers, |answer| answer.kl);
    let lost = Figure::of(answers, |answer| answer.lost);
    let value = format!(
        "{} same tokens, KL {:.3}, perplexity x{:.3}, {places} tokens",
        percent(agreement.mean),
        kl.mean,
        lost.mean.exp()
    );
    let least = agreement.mean + agreement.margin();
    let most_kl = kl.mean - kl.margin();
    let most_ratio = (lost.mean - lost.margin()).exp();
    let (found, field) = if let Some(limit) = limits.min_agreement.filter(|limit| least < *limit) {
        let found = format!(
            "it finds the same token likeliest in {} of the places (at most {} but for one chance in a hundred), and {} is wanted",
            percent(agreement.mean),
            percent(least),
            percent(limit)
        );
        (found, "minAgreement")
    } else if let Some(limit) = limits.max_kl.filter(|limit| most_kl > *limit) {
        let found = format!(
            "the divergence from the active version is {:.3} nats (at least {most_kl:.3} but for one chance in a hundred), and at most \
             {limit} is wanted",
            kl.mean
        );
        (found, "maxKl")
    } else if let Some(limit) = limits.max_perplexity_ratio.filter(|limit| most_ratio > *limit) {
        let found = format!(
            "its perplexity is {:.3} times the active version's (at least {most_ratio:.3} but for one chance in a hundred), and at most \
             {limit} is wanted",
            lost.mean.exp()
        );
        (found, "maxPerplexityRatio")
    } else {
        return Ok(value);
    };
    let field = format!("{FIELD}.{field}");
    let found = format!("{found} ({field}), over {places} tokens of {} answers", answers.len());
    Err(TooFar { value, found, field })
}

fn percent(share: f64) -> String {
    format!("{:.1}%", share * 100.0)
}

/// What the active version answered.
struct Answer {
    /// The tokens of the question as its template renders it.
    question: Vec<i32>,
    /// What it said of each token of the answer, thoughts included.
    says: Vec<TokenLogprob>,
}

/// Has the reference answer, and the candidate read that, one question after the other, after everybody else's requests. `report`
/// hears how many questions of how many are done, each time that one is.
///
/// # Errors
/// They cannot be compared, or the candidate does not answer in this pod.
pub async fn measure(
    reference: &Arc<Version>,
    candidate: &Arc<Version>,
    golden: &[GoldenPrompt],
    report: &Report,
) -> Result<Vec<AnswerDrift>, Refusal> {
    let golden = golden.iter().take(MAX_DRIFT_QUESTIONS);
    let mut questions: Vec<Prompt> = golden.map(|golden| golden.prompt().clone()).collect();
    let mut answers: Vec<AnswerDrift> = Vec::new();
    let (mut done, mut has_all, mut left_out) = (0, false, None);
    while places(&answers) < MAX_DRIFT_TOKENS {
        if done == questions.len() {
            if has_all || places(&answers) >= DRIFT_ENOUGH_TOKENS {
                break;
            }
            questions.extend(of_release(reference));
            has_all = true;
        }
        match compared(reference, candidate, &questions[done], report).await? {
            Compared::Answer(answer) => answers.push(answer),
            Compared::LeftOut(why) => left_out = Some(why),
            Compared::OtherToken(other) => {
                let message =
                    format!("{other}; what it predicts cannot be compared: leave {FIELD} out for this change of model");
                return Err(Refusal::new(GateName::Drift, message).with_value(OTHER_VOCABULARY));
            }
        }
        done += 1;
        report.compared(done, questions.len());
    }
    if answers.len() < MIN_DRIFT_ANSWERS {
        let why = left_out.unwrap_or_else(|| "the active version says nothing".to_owned());
        let message = format!(
            "{} of {done} questions can be compared, and {MIN_DRIFT_ANSWERS} are wanted: {why}; leave spec.rollout.gates.drift out for \
             this change of model, or shorten the golden prompts",
            answers.len()
        );
        return Err(Refusal::new(GateName::Drift, message).with_value("too few answers"));
    }
    Ok(answers)
}

/// What came of one question.
pub(super) enum Compared {
    Answer(AnswerDrift),
    /// One of them does not take it or has no answer to it, and why.
    LeftOut(String),
    /// They cannot be compared by any question.
    OtherToken(OtherToken),
}

/// Has the reference answer one question, and the candidate read that.
///
/// # Errors
/// The candidate does not answer in this pod.
pub(super) async fn compared(
    reference: &Arc<Version>,
    candidate: &Arc<Version>,
    question: &Prompt,
    report: &Report,
) -> Result<Compared, Refusal> {
    let answer = match patiently(report, || answer(reference, question)).await {
        Ok(answer) if answer.says.is_empty() => {
            return Ok(Compared::LeftOut("the active version says nothing".to_owned()));
        }
        Ok(answer) => answer,
        Err(why) => return Ok(Compared::LeftOut(format!("the active version does not take one: {why}"))),
    };
    let ids = answer.question.iter().copied().chain(answer.says.iter().map(|token| token.token.id));
    let params =
        GenerationParams { prompt_logprobs: Some(TOP), priority: Priority::Low, ..GenerationParams::greedy(0) };
    let read = match in_time(collect(candidate, Prompt::Tokens(ids.collect()), params)).await {
        Ok(read) => read,
        Err(Unanswered::Question(why)) => return Ok(Compared::LeftOut(format!("it does not take one: {why}"))),
        // Another pod may do better.
        Err(Unanswered::Here(why)) => {
            let message = format!("it does not read what the active version answers: {why}; check the pod's log");
            return Err(Refusal::new(GateName::Load, message).with_value("not read"));
        }
    };
    Ok(match compare(&answer.says, &read.output.prompt_tokens) {
        Ok(drift) => Compared::Answer(drift),
        Err(other) => Compared::OtherToken(other),
    })
}

/// The most tokens of a question: the answer's beside, so many are told of with the likeliest of their places.
const MAX_QUESTION_TOKENS: usize = MAX_PROMPT_LOGPROBS / (2 + TOP as usize) - DRIFT_ANSWER_TOKENS as usize;

/// Has the question's tokens told first, and answers these: of a chat thoughts and calls of tools would come without what is said of
/// their tokens, and the candidate's template may render it otherwise.
async fn answer(reference: &Arc<Version>, question: &Prompt) -> Result<Answer, Unanswered> {
    let form = PromptForm::Tokens { adds_special: true, with_pieces: false };
    let tokens =
        GenerationParams { extent: Extent::Prompt(form), priority: Priority::Low, ..GenerationParams::greedy(0) };
    let mut generation = submit(reference, question.clone(), tokens).await?;
    let mut question = Vec::new();
    while let Some(event) = generation.next().await {
        match event.map_err(Unanswered::of)? {
            GenerationEvent::Prompt(ShownPrompt::Tokens(tokens)) => question = tokens,
            GenerationEvent::Failed(error) => return Err(Unanswered::of(error.into())),
            _ => {}
        }
    }
    if question.len() > MAX_QUESTION_TOKENS {
        let why = format!("{} tokens, and by at most {MAX_QUESTION_TOKENS} can be compared", question.len());
        return Err(Unanswered::Question(why));
    }
    let params = GenerationParams {
        logprobs: Some(TOP),
        priority: Priority::Low,
        ..GenerationParams::greedy(DRIFT_ANSWER_TOKENS)
    };
    let says = collect(reference, Prompt::Tokens(question.clone()), params).await?.output.logprobs;
    Ok(Answer { question, says })
}

#[cfg(test)]
mod tests;

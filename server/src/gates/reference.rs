//! The version that a candidate is compared with, and how both are asked: after everybody else's requests, and with patience for the
//! one that answers users beside. Absent: what is compared ([`super::drift`], [`super::performance`]).

use std::sync::Arc;

use gantry_core::{Message, Role};
use gantry_crds::status::{GateName, WaitReason};
use gantry_engine::{GenerationParams, Prompt};
use tokio::sync::watch;
use tokio::time::Instant;

use super::limits::{PROMPT_LIMIT, REFERENCE_PATIENCE, REFERENCE_RETRY};
use super::prompts::is_of_prompt;
use super::report::{Refusal, Report};
use crate::rollout::Published;
use crate::version::{Completion, GenerateRequest, Generation, GenerationError, SubmitError, Version};

/// Questions of several kinds and languages, one a line.
const QUESTIONS: &str = include_str!("questions.txt");
/// How many standard errors a figure must be beyond its limit: by chance alone that happens once in a hundred.
pub(super) const ONE_SIDED_Z: f64 = 2.326;

/// The version that a candidate is compared with.
#[derive(Clone, Debug)]
pub enum Reference {
    /// None is active.
    None,
    /// One is active in other pods alone.
    Elsewhere,
    /// The version of this name, which may be on its way into this pod.
    Here {
        /// Its name.
        version: String,
        /// What answers in this pod.
        serving: watch::Receiver<Published>,
    },
}

impl Reference {
    /// The version, once it answers in this pod, which is waited for; `None` where there is none to compare with, of which the gate says
    /// so.
    ///
    /// # Errors
    /// It answers in other pods alone, by the strategy.
    pub(super) async fn found(
        &self,
        gate: GateName,
        field: &str,
        report: &Report,
    ) -> Result<Option<Arc<Version>>, Refusal> {
        match self {
            Self::None => {
                report.skip(gate, "no version is active that it could be compared with");
                Ok(None)
            }
            Self::Elsewhere => {
                let message = format!(
                    "the active version, which it is to be compared with ({field}), answers in other pods alone: leave the gate out"
                );
                Err(Refusal::new(gate, message).with_value("no reference"))
            }
            Self::Here { version, serving } => Ok(Some(serves(version, serving.clone(), field, report).await)),
        }
    }
}

/// The version of this name, once it answers in this pod. Where its source is away it comes when that is back: what is not to be had
/// here says nothing of the candidate, and whoever rolls it out says for how long to wait.
async fn serves(name: &str, mut serving: watch::Receiver<Published>, field: &str, report: &Report) -> Arc<Version> {
    let mut waits = Waits::new(report);
    loop {
        let published = serving.borrow_and_update().clone();
        if let Some(loaded) = published.serving.filter(|it| it.version.spec().name == name) {
            return loaded.version;
        }
        let message = format!(
            "the active version, which it is to be compared with ({field}), is not loaded in this pod; correct what the condition \
             PodsReady says of that, or leave the gate out"
        );
        tokio::select! {
            changed = serving.changed() => if changed.is_err() { std::future::pending::<()>().await },
            () = waits.out_of_patience() => waits.tell(&message),
        }
    }
}

/// Says that a candidate waits for the active version once it has for [`REFERENCE_PATIENCE`], and that it goes on when this ends.
struct Waits<'a> {
    report: &'a Report,
    since: Instant,
    is_told: bool,
}

impl<'a> Waits<'a> {
    fn new(report: &'a Report) -> Self {
        Self { report, since: Instant::now(), is_told: false }
    }

    /// Ends once, when it is to be told.
    async fn out_of_patience(&self) {
        if self.is_told {
            std::future::pending::<()>().await;
        }
        tokio::time::sleep_until(self.since + REFERENCE_PATIENCE).await;
    }

    fn tell(&mut self, message: &str) {
        self.is_told = true;
        self.report.waits_for(WaitReason::NoReference, message);
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        if self.is_told {
            self.report.goes_on();
        }
    }
}

/// The questions of this release, as the version takes questions.
pub(super) fn of_release(version: &Version) -> Vec<Prompt> {
    let has_template = version.model().is_some_and(|model| model.template.is_some());
    let asked = |question: &str| match has_template {
        true => Prompt::chat(vec![Message::text(Role::User, question)]),
        false => Prompt::Text(question.to_owned()),
    };
    QUESTIONS.lines().map(asked).collect()
}

/// Why a version did not answer.
pub(super) enum Unanswered {
    /// It cannot be asked that anywhere.
    Question(String),
    /// It did not answer in this pod, now.
    Here(String),
}

impl Unanswered {
    pub(super) fn of(error: GenerationError) -> Self {
        if is_of_prompt(&error) { Self::Question(error.to_string()) } else { Self::Here(error.to_string()) }
    }
}

/// What the active version answers, or why it does not take the question. It answers users beside, and one that is busy or starts
/// again is waited for.
pub(super) async fn patiently<T, F>(report: &Report, ask: impl Fn() -> F) -> Result<T, String>
where
    F: Future<Output = Result<T, Unanswered>>,
{
    let mut waits = Waits::new(report);
    loop {
        let why = match in_time(ask()).await {
            Ok(answer) => return Ok(answer),
            Err(Unanswered::Question(why)) => return Err(why),
            Err(Unanswered::Here(why)) => why,
        };
        if waits.since.elapsed() >= REFERENCE_PATIENCE && !waits.is_told {
            waits.tell(&format!("the active version, which it is compared with, does not answer: {why}"));
        }
        // A full queue and a worker that is down tell nobody when they are so no more.
        tokio::time::sleep(REFERENCE_RETRY).await;
    }
}

pub(super) async fn submit(
    version: &Arc<Version>,
    prompt: Prompt,
    params: GenerationParams,
) -> Result<Generation, Unanswered> {
    let submitted = version.submit(GenerateRequest { prompt: Arc::new(prompt), params }).await;
    submitted.map_err(|error| match error {
        SubmitError::InvalidParam(_) | SubmitError::Unsupported(_) => Unanswered::Question(error.to_string()),
        error => Unanswered::Here(error.to_string()),
    })
}

pub(super) async fn collect(
    version: &Arc<Version>,
    prompt: Prompt,
    params: GenerationParams,
) -> Result<Completion, Unanswered> {
    submit(version, prompt, params).await?.collect().await.map_err(Unanswered::of)
}

pub(super) async fn in_time<T>(asked: impl Future<Output = Result<T, Unanswered>>) -> Result<T, Unanswered> {
    let late = |_| Err(Unanswered::Here(format!("it took longer than {PROMPT_LIMIT:?}")));
    tokio::time::timeout(PROMPT_LIMIT, asked).await.unwrap_or_else(late)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_of_many_kinds() {
        let questions: std::collections::BTreeSet<_> = QUESTIONS.lines().collect();
        assert_eq!((questions.len(), QUESTIONS.lines().count()), (32, 32));
        assert!(questions.iter().all(|question| question.len() > 20));
    }
}

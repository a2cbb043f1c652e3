//! The version that a candidate is compared with, and how both are asked: after everybody else's requests, and with patience for the
//! one that answers users beside. Absent: what is compared ([`super::drift`], [`super::performance`]).

use std::sync::Arc;
use std::time::Instant;

use gantry_core::{Message, Role};
use gantry_crds::status::GateName;
use gantry_engine::{GenerationParams, Prompt};
use tokio::sync::watch;

use super::limits::{PROMPT_LIMIT, REFERENCE_LIMIT, REFERENCE_LOAD_LIMIT, REFERENCE_RETRY};
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
    /// The version, once it answers in this pod; `None` where there is none to compare with, of which the gate says so.
    ///
    /// # Errors
    /// It is not to be had in this pod: a pod that cannot have it holds nobody up.
    pub(super) async fn found(
        &self,
        gate: GateName,
        field: &str,
        report: &Report,
    ) -> Result<Option<Arc<Version>>, Refusal> {
        let found = match self {
            Self::None => {
                report.skip(gate, "no version is active that it could be compared with");
                return Ok(None);
            }
            Self::Elsewhere => None,
            Self::Here { version, serving } => serves(version, serving.clone()).await,
        };
        found.map(Some).ok_or_else(|| {
            let message = format!(
                "the active version, which it is to be compared with ({field}), is not loaded in this pod, and what the service says of its \
                 pods has why: correct that, as its source, or leave the gate out"
            );
            Refusal::new(GateName::Load, message).with_value("no reference")
        })
    }
}

/// The version of this name, once it answers in this pod; `None` where it does not within [`REFERENCE_LOAD_LIMIT`].
async fn serves(name: &str, mut serving: watch::Receiver<Published>) -> Option<Arc<Version>> {
    let is_it = |published: &Published| published.serving.as_ref().is_some_and(|it| it.version.spec().name == name);
    let found = tokio::time::timeout(REFERENCE_LOAD_LIMIT, serving.wait_for(is_it)).await;
    found.ok()?.ok()?.serving.as_ref().map(|loaded| Arc::clone(&loaded.version))
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
///
/// # Errors
/// It has not answered for [`REFERENCE_LIMIT`].
pub(super) async fn patiently<T, F>(ask: impl Fn() -> F) -> Result<Result<T, String>, Refusal>
where
    F: Future<Output = Result<T, Unanswered>>,
{
    let until = Instant::now() + REFERENCE_LIMIT;
    loop {
        let why = match in_time(ask()).await {
            Ok(answer) => return Ok(Ok(answer)),
            Err(Unanswered::Question(why)) => return Ok(Err(why)),
            Err(Unanswered::Here(why)) => why,
        };
        if Instant::now() + REFERENCE_RETRY >= until {
            let message = format!(
                "the active version, which it is compared with, has not answered a question for {REFERENCE_LIMIT:?}: {why}; try \
                 again when it has fewer requests"
            );
            return Err(Refusal::new(GateName::Load, message).with_value("no reference"));
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

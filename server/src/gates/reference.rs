//! The version that a candidate is compared with, and how both are asked: after everybody else's requests, and with patience for the
//! one that answers users beside. Absent: what is compared ([`super::drift`], [`super::performance`]).

use std::sync::Arc;
use std::time::Duration;

use gantry_core::{Message, Role};
use gantry_crds::status::{GateName, WaitReason};
use gantry_engine::{GenerationParams, Prompt};
use tokio::sync::watch;
use tokio::time::Instant;

use super::limits::{PROMPT_LIMIT, REFERENCE_PATIENCE, REFERENCE_RETRY, RESTORE_PATIENCE};
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
    /// Waits until the version answers in this pod, if it is to.
    pub(super) async fn here(&self, field: &str, report: &Report) {
        if let Self::Here { version, serving } = self {
            serves(version, serving.clone(), field, report).await;
        }
    }

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
    let mut waits = Waits::new(report, RESTORE_PATIENCE);
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

/// Says that a candidate waits for the active version once it has for so long, and that it goes on when this ends.
struct Waits<'a> {
    report: &'a Report,
    until: Instant,
    is_told: bool,
}

impl<'a> Waits<'a> {
    fn new(report: &'a Report, patience: Duration) -> Self {
        Self { report, until: Instant::now() + patience, is_told: false }
    }

    /// Ends once, when it is to be told.
    async fn out_of_patience(&self) {
        if self.is_told {
            std::future::pending::<()>().await;
        }
        tokio::time::sleep_until(self.until).await;
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
    let mut waits = Waits::new(report, REFERENCE_PATIENCE);
    let mut last = "users' requests come first".to_owned();
    loop {
        let mut asked = std::pin::pin!(in_time(ask()));
        let outcome = loop {
            tokio::select! {
                outcome = &mut asked => break outcome,
                () = waits.out_of_patience() => waits.tell(&format!(
                    "the active version, which it is compared with, does not answer ({last}); it goes on when that does: see the pod's \
                     log, or leave the gate out"
                )),
            }
        };
        match outcome {
            Ok(answer) => return Ok(answer),
            Err(Unanswered::Question(why)) => return Err(why),
            Err(Unanswered::Here(why)) => last = why,
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
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::{AtomicUsize, Ordering};

    use gantry_rollout::line;

    use super::*;
    use crate::gates::Board;

    #[tokio::test(start_paused = true)]
    async fn a_version_that_does_not_answer_is_waited_for_and_told_of_until_it_does() {
        let board = Arc::new(Board::new([("v".to_owned(), line::blank("v", None))].into()));
        let report = Report::of(Arc::clone(&board), "v");
        let tries = AtomicUsize::new(0);
        let ask = || async {
            match tries.fetch_add(1, Ordering::Relaxed) {
                0 => Err(Unanswered::Here("its queue is full".to_owned())),
                1 => {
                    tokio::time::sleep(REFERENCE_PATIENCE * 2).await;
                    Ok(7)
                }
                _ => Err(Unanswered::Question("too long".to_owned())),
            }
        };
        let mut lines = board.subscribe();
        let told = lines.wait_for(|lines| lines["v"].wait_reason == Some(WaitReason::NoReference));
        let begun = Instant::now();
        let (answer, told) =
            tokio::join!(patiently(&report, ask), async { told.await.map(|lines| lines["v"].clone()) });
        assert_eq!(answer, Ok(7));
        let message = told.unwrap().message.unwrap_or_default();
        assert!(message.contains("(its queue is full)") && message.contains("leave the gate out"), "{message}");
        assert!(begun.elapsed() >= REFERENCE_PATIENCE * 2);
        let line = board.borrow()["v"].clone();
        assert_eq!((line.wait_reason, line.message), (None, None), "it goes on");
        assert_eq!(patiently(&report, ask).await, Err("too long".to_owned()), "another question may be taken");
    }

    #[test]
    fn questions_are_of_many_kinds() {
        let questions: std::collections::BTreeSet<_> = QUESTIONS.lines().collect();
        assert_eq!((questions.len(), QUESTIONS.lines().count()), (32, 32));
        assert!(questions.iter().all(|question| question.len() > 20));
    }
}

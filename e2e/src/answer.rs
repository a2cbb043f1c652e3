//! What a streamed chat answer must be: of one version from its header to its last chunk, whole, and with the text that
//! this version gives.
//!
//! [`AnswerCheck`] is fed the parts of a response in order and keeps no clock and no socket, so that each way in which a
//! server can go wrong is a unit test. It reads the wire with types of its own: a mistake in the server's types must not
//! hide itself.

use std::collections::HashMap;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

/// Response header that names the version.
pub const VERSION_HEADER: &str = "x-gantry-version";
/// What it says in a stream that was opened while its request waited for a model to be changed: its chunks name the version.
pub const PENDING_VERSION: &str = "pending";
/// Last event of a stream that went well.
pub const DONE: &str = "[DONE]";

/// A way in which a request can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailureKind {
    /// No response came.
    Connection,
    /// The response took too long.
    Timeout,
    /// The status was not 200.
    Status,
    /// The server ended the stream with an error event.
    ErrorEvent,
    /// The stream ended without `[DONE]`, or `[DONE]` came without a reason.
    Truncated,
    /// Something in the stream could not be read.
    Malformed,
    /// The header that names the version was missing.
    NoVersion,
    /// Header and chunks named different versions.
    MixedVersions,
    /// A version answered that must not exist.
    UnknownVersion,
    /// The text is not what this version answers.
    WrongText,
}

/// A failed request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Failure {
    /// In which way.
    pub kind: FailureKind,
    /// What was seen.
    pub detail: String,
}

impl Failure {
    /// A failure of `kind`.
    pub fn new(kind: FailureKind, detail: impl Into<String>) -> Self {
        Self { kind, detail: detail.into() }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.detail)
    }
}

impl std::error::Error for Failure {}

#[derive(Deserialize)]
struct Chunk {
    system_fingerprint: Option<String>,
    #[serde(default)]
    choices: Vec<Choice>,
    error: Option<WireError>,
}

#[derive(Deserialize)]
struct Choice {
    delta: Option<Delta>,
    text: Option<String>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Delta {
    content: Option<String>,
}

#[derive(Deserialize)]
struct WireError {
    message: String,
    #[serde(rename = "type")]
    kind: String,
    code: Option<String>,
}

/// The code and message of an OpenAI error object, for failures.
#[must_use]
pub fn describe_error(body: &str) -> String {
    #[derive(Deserialize)]
    struct Body {
        error: WireError,
    }
    match serde_json::from_str::<Body>(body) {
        Ok(Body { error }) => format!("{} ({}): {}", error.kind, error.code.unwrap_or_default(), error.message),
        Err(_) => format!("not an error object: {}", body.chars().take(200).collect::<String>()),
    }
}

/// What an event of a stream meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Text, possibly empty (the first chunk names the role only).
    Text(String),
    /// The stream is complete.
    Done,
}

/// A whole answer of one version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Version that gave it.
    pub version: String,
    /// The text.
    pub text: String,
    /// Why it ended.
    pub finish_reason: String,
}

/// Follows one streamed response.
#[derive(Debug)]
pub struct AnswerCheck {
    version: String,
    text: String,
    finish_reason: Option<String>,
    done: bool,
}

impl AnswerCheck {
    /// Starts from the response's head.
    ///
    /// # Errors
    /// When the version is not named.
    pub fn begin(version_header: Option<&str>) -> Result<Self, Failure> {
        match version_header {
            Some(version) if !version.is_empty() => {
                Ok(Self { version: version.to_owned(), text: String::new(), finish_reason: None, done: false })
            }
            _ => Err(Failure::new(FailureKind::NoVersion, format!("the response has no header {VERSION_HEADER}"))),
        }
    }

    /// The version that the header named.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Takes in the data of the next event.
    ///
    /// # Errors
    /// When the event is an error, cannot be read, comes after the end or is of another version.
    pub fn event(&mut self, data: &str) -> Result<Event, Failure> {
        if self.done {
            return Err(Failure::new(FailureKind::Malformed, format!("an event after {DONE}: {data}")));
        }
        if data == DONE {
            self.done = true;
            return Ok(Event::Done);
        }
        let chunk: Chunk = serde_json::from_str(data)
            .map_err(|error| Failure::new(FailureKind::Malformed, format!("{error} in the event {data}")))?;
        if chunk.error.is_some() {
            return Err(Failure::new(FailureKind::ErrorEvent, describe_error(data)));
        }
        match chunk.system_fingerprint {
            Some(version) if version == self.version => {}
            Some(version) if self.version == PENDING_VERSION && !version.is_empty() => self.version = version,
            other => {
                let detail = format!("the header says {}, a chunk says {other:?}", self.version);
                return Err(Failure::new(FailureKind::MixedVersions, detail));
            }
        }
        let mut new_text = String::new();
        for choice in chunk.choices {
            if let Some(text) = choice.delta.and_then(|delta| delta.content).or(choice.text) {
                new_text.push_str(&text);
            }
            self.finish_reason = choice.finish_reason.or(self.finish_reason.take());
        }
        self.text.push_str(&new_text);
        Ok(Event::Text(new_text))
    }

    /// The stream is over.
    ///
    /// # Errors
    /// When it ended too early.
    pub fn end(self) -> Result<Answer, Failure> {
        let Self { version, text, finish_reason, done } = self;
        match (done, finish_reason) {
            (true, Some(finish_reason)) => Ok(Answer { version, text, finish_reason }),
            (false, _) => Err(Failure::new(FailureKind::Truncated, format!("no {DONE} after {text:?}"))),
            (true, None) => Err(Failure::new(FailureKind::Truncated, format!("no finish_reason with {text:?}"))),
        }
    }
}

/// What each version answers to each question (by its id).
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct AnswerBook {
    versions: HashMap<String, HashMap<String, String>>,
}

impl AnswerBook {
    /// Adds the answers of `version`; of a version that is there already, those of other questions.
    #[must_use]
    pub fn with(mut self, version: &str, answers: impl IntoIterator<Item = (String, String)>) -> Self {
        self.versions.entry(version.to_owned()).or_default().extend(answers);
        self
    }

    /// Whether `answer` is what its version says to `question`. A question without an entry may have any answer.
    ///
    /// # Errors
    /// When the version is not in the book, or answers otherwise.
    pub fn check(&self, question: &str, answer: &Answer) -> Result<(), Failure> {
        let Some(answers) = self.versions.get(&answer.version) else {
            let detail = format!("{} answered {question} with {:?}", answer.version, answer.text);
            return Err(Failure::new(FailureKind::UnknownVersion, detail));
        };
        let text = answer.text.trim();
        match answers.get(question) {
            Some(expected) if expected != text => {
                let also =
                    self.versions.iter().find(|(_, other)| other.get(question).is_some_and(|other| other == text));
                let also = also.map(|(version, _)| format!(", which is what {version} answers")).unwrap_or_default();
                let detail = format!("{} answers {question} with {expected:?}; this is {text:?}{also}", answer.version);
                Err(Failure::new(FailureKind::WrongText, detail))
            }
            _ => Ok(()),
        }
    }
}

/// How much likelier than the next one, in natural logarithms, each token of a greedy answer has to be so that what else
/// is computed in its batch cannot change it: the kernels' rounding moves logits by some tenths at most.
pub const NEAR_TIE: f64 = 0.3;

/// The text of a greedy chat completion (not streamed, `top_logprobs` of 2), unless one of its tokens was a near tie. What
/// ends an answer has no text, and is not looked at.
///
/// # Errors
/// When the body is no such completion.
pub fn clear_text(body: &str) -> Result<Option<String>> {
    #[derive(Deserialize)]
    struct Completion {
        choices: Vec<Whole>,
    }
    #[derive(Deserialize)]
    struct Whole {
        message: Message,
        logprobs: Tokens,
    }
    #[derive(Deserialize)]
    struct Message {
        content: String,
    }
    #[derive(Deserialize)]
    struct Tokens {
        content: Vec<Token>,
    }
    #[derive(Deserialize)]
    struct Token {
        top_logprobs: Vec<Candidate>,
    }
    #[derive(Deserialize)]
    struct Candidate {
        logprob: f64,
    }
    let completion: Completion = serde_json::from_str(body)
        .with_context(|| format!("not a completion with logprobs: {}", describe_error(body)))?;
    let [Whole { message, logprobs }] = &completion.choices[..] else { bail!("not one choice: {body}") };
    let mut clear = true;
    for token in &logprobs.content {
        let [first, second] = &token.top_logprobs[..] else { bail!("not two candidates for each token: {body}") };
        clear &= first.logprob - second.logprob >= NEAR_TIE;
    }
    Ok((clear && !logprobs.content.is_empty()).then(|| message.content.trim().to_owned()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn chunk(version: &str, content: &str, finish: Option<&str>) -> String {
        let choice = serde_json::json!({"index": 0, "delta": {"content": content}, "finish_reason": finish});
        serde_json::json!({"id": "c", "system_fingerprint": version, "choices": [choice]}).to_string()
    }

    fn follow(header: Option<&str>, events: &[String]) -> Result<Answer, FailureKind> {
        let mut check = AnswerCheck::begin(header).map_err(|failure| failure.kind)?;
        for event in events {
            check.event(event).map_err(|failure| failure.kind)?;
        }
        check.end().map_err(|failure| failure.kind)
    }

    #[test]
    fn a_whole_answer_of_one_version_is_right() {
        let usage = r#"{"system_fingerprint":"v1","choices":[],"usage":{"prompt_tokens":3}}"#.to_owned();
        let answer = follow(
            Some("v1"),
            &[chunk("v1", "", None), chunk("v1", "Os", None), chunk("v1", "lo", Some("stop")), usage, DONE.to_owned()],
        );
        let expected = Answer { version: "v1".to_owned(), text: "Oslo".to_owned(), finish_reason: "stop".to_owned() };
        assert_eq!(answer, Ok(expected.clone()));
        let waited = [chunk("v1", "Oslo", Some("stop")), DONE.to_owned()];
        assert_eq!(follow(Some(PENDING_VERSION), &waited), Ok(expected), "the first chunk names it");
    }

    #[test]
    fn each_way_to_go_wrong_has_its_kind() {
        let error = r#"{"error":{"message":"m","type":"server_error","param":null,"code":"worker_died"}}"#.to_owned();
        let end = chunk("v1", "a", Some("stop"));
        let cases = [
            (None, vec![], FailureKind::NoVersion),
            (Some(""), vec![], FailureKind::NoVersion),
            (Some("v1"), vec![chunk("v1", "a", None), chunk("v2", "b", None)], FailureKind::MixedVersions),
            (Some("v2"), vec![end.clone(), DONE.to_owned()], FailureKind::MixedVersions),
            (Some(PENDING_VERSION), vec![chunk("v1", "a", None), chunk("v2", "b", None)], FailureKind::MixedVersions),
            (Some("v1"), vec![r#"{"choices":[]}"#.to_owned()], FailureKind::MixedVersions),
            (Some("v1"), vec![chunk("v1", "a", None), error], FailureKind::ErrorEvent),
            (Some("v1"), vec![end.clone()], FailureKind::Truncated),
            (Some("v1"), vec![chunk("v1", "a", None), DONE.to_owned()], FailureKind::Truncated),
            (Some("v1"), vec!["{".to_owned()], FailureKind::Malformed),
            (Some("v1"), vec![end.clone(), DONE.to_owned(), end], FailureKind::Malformed),
        ];
        for (header, events, kind) in cases {
            assert_eq!(follow(header, &events), Err(kind), "{header:?} {events:?}");
        }
    }

    #[test]
    fn the_text_must_be_that_of_the_version() {
        let pairs = |text: &str| [("q1".to_owned(), text.to_owned())];
        let book = AnswerBook::default().with("v1", pairs("one")).with("v2", pairs("two"));
        let check = |version: &str, question: &str, text: &str| {
            let answer =
                Answer { version: version.to_owned(), text: text.to_owned(), finish_reason: "stop".to_owned() };
            book.check(question, &answer).map_err(|failure| failure.kind)
        };
        assert_eq!(check("v1", "q1", " one\n"), Ok(()));
        assert_eq!(check("v1", "q2", "anything"), Ok(()));
        assert_eq!(check("v1", "q1", "two"), Err(FailureKind::WrongText));
        assert_eq!(check("v3", "q1", "one"), Err(FailureKind::UnknownVersion));
    }

    #[test]
    fn an_answer_is_clear_when_each_of_its_tokens_is() {
        let body = |margins: &[f64]| {
            let token =
                |margin: &f64| serde_json::json!({"top_logprobs": [{"logprob": -1.0}, {"logprob": -1.0 - margin}]});
            let logprobs = serde_json::json!({"content": margins.iter().map(token).collect::<Vec<_>>()});
            let choice = serde_json::json!({"message": {"content": " yes\n"}, "logprobs": logprobs});
            serde_json::json!({"choices": [choice]}).to_string()
        };
        assert_eq!(clear_text(&body(&[2.0, 0.5])).unwrap().as_deref(), Some("yes"));
        assert_eq!(clear_text(&body(&[2.0, 0.1, 2.0])).unwrap(), None);
        assert_eq!(clear_text(&body(&[])).unwrap(), None);
        let refused = r#"{"error": {"message": "no model", "type": "t", "code": "c"}}"#;
        assert!(clear_text(refused).unwrap_err().to_string().contains("no model"));
    }
}

//! The golden-prompts gate: questions with known answers, asked greedily of a version that does not serve yet.
//!
//! [`Job`] is the whole gate. [`parse`] and [`judge`] are pure; [`ask`] is the way between them. Answers are compared as text, spaces at the ends
//! aside. Absent: where the prompts come from ([`super::objects`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures::{StreamExt, stream};
use gantry_crds::scalars::Percent;
use gantry_crds::status::{CandidatePhase, GateName};
use gantry_engine::{GenerationParams, Prompt, RequestError};
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::limits::{
    DEFAULT_PROMPT_MAX_TOKENS, MAX_PROMPT_LINE_BYTES, MAX_PROMPT_MAX_TOKENS, MAX_PROMPTS, MAX_QUOTED_CHARS,
    PROMPT_LIMIT, PROMPTS_AT_ONCE,
};
use super::objects::PROMPTS_KEY;
use super::report::{Refusal, Report};
use crate::version::{GenerateRequest, GenerationError, SubmitError, Version};

/// Golden prompts that are to be answered.
#[derive(Clone, Debug)]
pub struct Job {
    /// Share of them that must be answered as expected.
    pub min_pass: Percent,
    /// Where they are from: a ConfigMap or a file.
    pub origin: String,
    /// They themselves, one JSON object a line.
    pub text: String,
}

impl Job {
    /// Asks them of a version, and gives them.
    ///
    /// # Errors
    /// Too few are answered as expected, or they cannot be read.
    pub async fn run(&self, version: &Arc<Version>, report: &Report) -> Result<Vec<GoldenPrompt>, Refusal> {
        let Self { min_pass, origin, text } = self;
        report.phase(CandidatePhase::Testing);
        let refuse = |message: String| Refusal::new(GateName::Prompts, message);
        let min_pass = min_pass.ratio().map_err(|error| refuse(format!("rollout.gates.prompts.minPass: {error}")))?;
        let prompts =
            parse(text).map_err(|error| refuse(format!("{origin}: {error}")).with_value("unreadable prompts"))?;
        report.answered(0, prompts.len());
        let answers = ask(version, &prompts, |answered| report.answered(answered, prompts.len())).await;
        report.pass(GateName::Prompts, judge(&prompts, &answers, min_pass)?);
        Ok(prompts)
    }
}

/// A question and what its answer must be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GoldenPrompt {
    /// Its line in the ConfigMap, from 1.
    pub line: usize,
    prompt: Prompt,
    wanted: Wanted,
    max_tokens: u32,
}

impl GoldenPrompt {
    /// The question.
    #[must_use]
    pub fn prompt(&self) -> &Prompt {
        &self.prompt
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Wanted {
    /// The whole answer.
    Whole(String),
    /// A part of it.
    Part(String),
}

impl Wanted {
    fn is_met_by(&self, answer: &str) -> bool {
        match self {
            Self::Whole(text) => answer.trim() == text.trim(),
            Self::Part(text) => answer.contains(text.as_str()),
        }
    }
}

#[derive(Deserialize)]
#[serde(remote = "Self", deny_unknown_fields)]
struct Line {
    /// A name, for who keeps the prompts.
    #[serde(default, rename = "id")]
    _id: IgnoredAny,
    messages: Option<serde_json::Value>,
    prompt: Option<String>,
    /// Whether special tokens that `prompt` writes are those tokens, as on `/v1/completions`.
    #[serde(default)]
    parse_special: bool,
    expected: Option<String>,
    contains: Option<String>,
    max_tokens: Option<u32>,
}

gantry_core::from_objects!(Line);

/// Reads `prompts.jsonl`. Empty lines are skipped.
///
/// # Errors
/// Names the line and what is wrong with it.
pub fn parse(text: &str) -> Result<Vec<GoldenPrompt>, String> {
    let mut prompts = Vec::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        let at = |what: String| format!("line {number} of {PROMPTS_KEY} {what}");
        if prompts.len() == MAX_PROMPTS {
            return Err(at(format!("is prompt {}, and at most {MAX_PROMPTS} are asked; remove some", MAX_PROMPTS + 1)));
        }
        if line.len() > MAX_PROMPT_LINE_BYTES {
            return Err(at(format!("has {} bytes, the limit is {MAX_PROMPT_LINE_BYTES}; shorten it", line.len())));
        }
        prompts.push(parse_line(line, number).map_err(at)?);
    }
    if prompts.is_empty() {
        return Err(format!("{PROMPTS_KEY} holds no prompts; add one JSON object a line"));
    }
    Ok(prompts)
}

fn parse_line(line: &str, number: usize) -> Result<GoldenPrompt, String> {
    // It is one line to whoever reads it as JSON.
    let unlike = |error: serde_json::Error| error.to_string().replace(" at line 1 column ", " at column ");
    let line: Line = serde_json::from_str(line)
        .map_err(|error| format!("is not the JSON object that is wanted: {}", unlike(error)))?;
    let prompt = match (line.messages, line.prompt) {
        (Some(messages), None) => {
            let list = messages.as_array().ok_or("has messages that are no list")?;
            if list.is_empty() || list.iter().any(|message| message.get("role").is_none()) {
                return Err("has messages without a role; write them as in /v1/chat/completions".to_owned());
            }
            let read = gantry_openai::parse_messages(messages);
            Prompt::chat(read.map_err(|error| format!("has messages that cannot be asked: {}", error.message))?)
        }
        (None, Some(text)) if !text.is_empty() && line.parse_special => Prompt::Markup(text),
        (None, Some(text)) if !text.is_empty() => Prompt::Text(text),
        _ => return Err("must have either messages or a prompt".to_owned()),
    };
    let wanted = match (line.expected, line.contains) {
        (Some(text), None) => Wanted::Whole(text),
        (None, Some(text)) if !text.is_empty() => Wanted::Part(text),
        _ => return Err("must have either expected or contains".to_owned()),
    };
    let max_tokens = line.max_tokens.unwrap_or(DEFAULT_PROMPT_MAX_TOKENS);
    if max_tokens == 0 || max_tokens > MAX_PROMPT_MAX_TOKENS {
        return Err(format!("has max_tokens {max_tokens}; use a number from 1 to {MAX_PROMPT_MAX_TOKENS}"));
    }
    Ok(GoldenPrompt { line: number, prompt, wanted, max_tokens })
}

/// What became of one prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// As wanted.
    Right,
    /// Another text.
    Wrong(String),
    /// None will come in any pod: the version does not take the prompt.
    Refused(String),
    /// None came in this pod, which says nothing of others.
    None(String),
}

/// Whether the error is the prompt's, and not the pod's.
pub(super) fn is_of_prompt(error: &GenerationError) -> bool {
    use RequestError::{ContextLengthExceeded, InvalidRequest};
    matches!(error, GenerationError::Request(InvalidRequest { .. } | ContextLengthExceeded { .. }))
}

/// Asks all prompts, a few at a time; the answers are in the prompts' order. Never more than the version decodes at once:
/// a prompt that its queue turns away would count against the model. `told` hears how many are answered, each time that one is.
pub async fn ask(version: &Arc<Version>, prompts: &[GoldenPrompt], told: impl Fn(usize) + Sync) -> Vec<Answer> {
    let slots = usize::try_from(version.spec().runtime.parallel).unwrap_or(PROMPTS_AT_ONCE);
    let at_once = PROMPTS_AT_ONCE.min(slots).max(1);
    let answered = AtomicUsize::new(0);
    let (answered, told) = (&answered, &told);
    let asked = prompts.iter().cloned().map(|prompt| {
        let version = Arc::clone(version);
        async move {
            let answer = ask_one(version, prompt).await;
            told(answered.fetch_add(1, Ordering::Relaxed) + 1);
            answer
        }
    });
    stream::iter(asked).buffered(at_once).collect().await
}

async fn ask_one(version: Arc<Version>, prompt: GoldenPrompt) -> Answer {
    let request = GenerateRequest {
        prompt: Arc::new(prompt.prompt.clone()),
        params: GenerationParams::greedy(prompt.max_tokens),
    };
    let answer = async {
        let generation = version.submit(request).await.map_err(|error| match error {
            SubmitError::InvalidParam(_) | SubmitError::Unsupported(_) => Answer::Refused(error.to_string()),
            error => Answer::None(error.to_string()),
        })?;
        generation.collect().await.map_err(|error| match error {
            error if is_of_prompt(&error) => Answer::Refused(error.to_string()),
            error => Answer::None(error.to_string()),
        })
    };
    match tokio::time::timeout(PROMPT_LIMIT, answer).await {
        Ok(Ok(whole)) if prompt.wanted.is_met_by(&whole.output.text) => Answer::Right,
        Ok(Ok(whole)) => Answer::Wrong(whole.output.text),
        Ok(Err(answer)) => answer,
        Err(_) => Answer::None(format!("it took longer than {PROMPT_LIMIT:?}")),
    }
}

/// Counts the answers. The value is what the gate reports, whichever way it goes. Where those that did not come could
/// have been enough, nothing is known of the answers, and it is the Load gate that refuses: what this pod cannot do others may.
///
/// # Errors
/// Too few are right: names the first that is not.
pub fn judge(prompts: &[GoldenPrompt], answers: &[Answer], min_pass_ratio: f64) -> Result<String, Refusal> {
    let right = answers.iter().filter(|answer| **answer == Answer::Right).count();
    let total = prompts.len();
    // Rounded down, so that 100% means all of them.
    let percent = right * 100 / total.max(1);
    let value = format!("{percent}% of {total} prompts");
    // Counted in whole prompts, so that 0.97 * 100 is 97 and not a hair more.
    let needed = (min_pass_ratio * total as f64 - 1e-9).ceil();
    if right as f64 >= needed {
        return Ok(value);
    }
    let wanted = format!("{}%", (min_pass_ratio * 1e4).round() / 1e2);
    let first_that = |is: fn(&Answer) -> bool| {
        let first = prompts.iter().zip(answers).find(|(_, answer)| is(answer));
        first.map(|(prompt, answer)| describe(prompt, answer)).unwrap_or_default()
    };
    let is_none = |answer: &Answer| matches!(answer, Answer::None(_));
    let unanswered = answers.iter().filter(|answer| is_none(answer)).count();
    if (right + unanswered) as f64 >= needed {
        let value = format!("{unanswered} of {total} prompts unanswered");
        let message = format!(
            "{unanswered} of {total} golden prompts got no answer in this pod, and {right} the expected one, of which {wanted} are wanted \
             (rollout.gates.prompts.minPass); {}; check the pod's log, and raise spec.resources where it is slow",
            first_that(is_none)
        );
        return Err(Refusal::new(GateName::Load, message).with_value(value));
    }
    let first = first_that(|answer| !matches!(answer, Answer::Right | Answer::None(_)));
    let message = format!(
        "{right} of {total} golden prompts were answered as expected, {wanted} are wanted (rollout.gates.prompts.minPass); \
         {first}; choose another model, or correct the prompts"
    );
    Err(Refusal::new(GateName::Prompts, message).with_value(format!("{value}, {wanted} wanted")))
}

fn describe(prompt: &GoldenPrompt, answer: &Answer) -> String {
    let wanted = match &prompt.wanted {
        Wanted::Whole(text) => format!("\"{}\"", quote(text)),
        Wanted::Part(text) => format!("something with \"{}\"", quote(text)),
    };
    match answer {
        Answer::Right => String::new(),
        Answer::Wrong(text) => {
            format!("line {} was answered with \"{}\" instead of {wanted}", prompt.line, quote(text))
        }
        Answer::Refused(reason) | Answer::None(reason) => format!("line {} was not answered: {reason}", prompt.line),
    }
}

/// The start of a text, on one line.
fn quote(text: &str) -> String {
    let mut quoted: String = text.trim().chars().take(MAX_QUOTED_CHARS).flat_map(char::escape_debug).collect();
    if text.trim().chars().nth(MAX_QUOTED_CHARS).is_some() {
        quoted.push('…');
    }
    quoted
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    use gantry_core::{Message, Role};

    const GOOD: &str = r#"{"messages": [{"role": "user", "content": "Hi"}], "expected": "Hello!", "id": "q1"}"#;

    #[test]
    fn lines_are_read() {
        let text = format!("{GOOD}\n\n{}\n", r#"{"prompt": "1, 2,", "contains": "3", "max_tokens": 8}"#);
        let prompts = parse(&text).unwrap();
        assert_eq!(
            prompts.iter().map(|prompt| (prompt.line, prompt.max_tokens)).collect::<Vec<_>>(),
            [(1, DEFAULT_PROMPT_MAX_TOKENS), (3, 8)]
        );
        assert_eq!(prompts[0].prompt, Prompt::chat(vec![Message::text(Role::User, "Hi")]));
    }

    #[test]
    fn special_tokens_of_a_prompt_are_parsed_where_its_line_says_so() {
        for (says, parsed) in
            [("", false), (r#", "parse_special": false"#, false), (r#", "parse_special": true"#, true)]
        {
            let prompts = parse(&format!(r#"{{"prompt": "</s>", "expected": "x"{says}}}"#)).unwrap();
            let wanted = if parsed { Prompt::Markup("</s>".into()) } else { Prompt::Text("</s>".into()) };
            assert_eq!(prompts[0].prompt, wanted);
        }
    }

    #[test]
    fn malformed_lines_are_named() {
        for (bad, says) in [
            ("nonsense", "JSON"),
            ("[]", "JSON"),
            (
                r#"{"prompt": "x", "expcted": "x"}"#,
                "unknown field `expcted`, expected one of `id`, `messages`, `prompt`, `parse_special`, `expected`, `contains`, \
                 `max_tokens` at column 25",
            ),
            (r#"{"prompt": "x", "expected": "x", "max_token": 8}"#, "unknown field `max_token`"),
            (r#"["x", null, "x"]"#, "an object"),
            (r#"{"expected": "x"}"#, "either messages or a prompt"),
            (r#"{"prompt": "", "expected": "x"}"#, "either messages or a prompt"),
            (r#"{"prompt": "x", "messages": [{"role": "user"}], "expected": "x"}"#, "either messages or a prompt"),
            (r#"{"prompt": "x"}"#, "either expected or contains"),
            (r#"{"prompt": "x", "contains": ""}"#, "either expected or contains"),
            (r#"{"prompt": "x", "expected": "x", "contains": "x"}"#, "either expected or contains"),
            (r#"{"messages": [], "expected": "x"}"#, "role"),
            (r#"{"messages": "x", "expected": "x"}"#, "list"),
            (r#"{"messages": [{"content": "x"}], "expected": "x"}"#, "role"),
            (r#"{"messages": [{"role": "user", "content": 7}], "expected": "x"}"#, "messages[0].content"),
            (r#"{"prompt": "x", "expected": "x", "max_tokens": 0}"#, "max_tokens"),
            (r#"{"prompt": "x", "expected": "x", "max_tokens": 1000000}"#, "max_tokens"),
        ] {
            let error = parse(&format!("{GOOD}\n{bad}")).unwrap_err();
            assert!(error.contains("line 2") && error.contains(says), "{bad}: {error}");
        }
        assert!(parse("\n \n").unwrap_err().contains("no prompts"));
        let long = format!("{{\"prompt\": \"{}\", \"expected\": \"x\"}}", "x".repeat(MAX_PROMPT_LINE_BYTES));
        assert!(parse(&long).unwrap_err().contains("bytes"));
        assert!(parse(&format!("{GOOD}\n").repeat(MAX_PROMPTS + 1)).unwrap_err().contains("at most"));
    }

    #[test]
    fn spaces_at_the_ends_do_not_count() {
        assert!(Wanted::Whole("Hello! ".into()).is_met_by(" Hello!\n"));
        assert!(!Wanted::Whole("Hello!".into()).is_met_by("Hello! You"));
        assert!(Wanted::Part("ell".into()).is_met_by("Hello"));
    }

    fn verdict(right: usize, total: usize, min: f64) -> Result<String, Refusal> {
        let prompts = parse(&format!("{GOOD}\n").repeat(total)).unwrap();
        let answers: Vec<_> =
            (0..total).map(|i| if i < right { Answer::Right } else { Answer::Wrong("No\nidea".into()) }).collect();
        judge(&prompts, &answers, min)
    }

    #[test]
    fn the_share_is_counted_in_whole_prompts() {
        assert_eq!(verdict(20, 20, 1.0).unwrap(), "100% of 20 prompts");
        assert_eq!(verdict(97, 100, 0.97).unwrap(), "97% of 100 prompts");
        assert_eq!(verdict(0, 5, 0.0).unwrap(), "0% of 5 prompts");
        let refusal = verdict(199, 200, 1.0).unwrap_err();
        assert_eq!(refusal.value.unwrap(), "99% of 200 prompts, 100% wanted");
        let refusal = verdict(1, 20, 0.975).unwrap_err();
        assert_eq!(refusal.value.unwrap(), "5% of 20 prompts, 97.5% wanted");
        assert!(
            refusal.message.contains(r#"line 2 was answered with "No\nidea" instead of "Hello!""#),
            "{}",
            refusal.message
        );
    }

    #[test]
    fn answers_that_did_not_come_are_no_verdict_on_those_that_would() {
        let right = || Answer::Right;
        let wrong = || Answer::Wrong("No".to_owned());
        let none = || Answer::None("it took longer than 300s".to_owned());
        let refused = || Answer::Refused("the prompt is too long".to_owned());
        for (answers, min, wanted) in [
            ([right(), right(), right(), none()], 1.0, Some(GateName::Load)),
            ([none(), none(), none(), none()], 1.0, Some(GateName::Load)),
            ([right(), right(), wrong(), none()], 0.75, Some(GateName::Load)),
            ([right(), none(), wrong(), wrong()], 0.75, Some(GateName::Prompts)),
            ([right(), right(), none(), wrong()], 1.0, Some(GateName::Prompts)),
            ([right(), right(), right(), refused()], 1.0, Some(GateName::Prompts)),
            ([right(), right(), right(), none()], 0.75, None),
        ] {
            let prompts = parse(&format!("{GOOD}\n").repeat(answers.len())).unwrap();
            let refusal = judge(&prompts, &answers, min).err();
            assert_eq!(refusal.as_ref().map(|refusal| refusal.gate), wanted, "{answers:?} {min}: {refusal:?}");
            let Some(Refusal { gate, message, .. }) = refusal else { continue };
            // What is told of is what the verdict is about.
            let of_the_pod = message.contains("took longer than 300s") && !message.contains("correct the prompts");
            assert_eq!(of_the_pod, gate == GateName::Load, "{message}");
        }
    }

    proptest! {
        #[test]
        fn exactly_the_wanted_share_is_enough(total in 1_usize..300, percent in 0_usize..=100) {
            let needed = (total * percent).div_ceil(100);
            prop_assert!(verdict(needed, total, percent as f64 / 100.0).is_ok());
            if needed > 0 {
                prop_assert!(verdict(needed - 1, total, percent as f64 / 100.0).is_err());
            }
        }

        #[test]
        fn whatever_stands_there_parse_answers(text in ".{0,200}") {
            let _ = parse(&text);
        }
    }
}

//! What is asked: every kind of request that the server knows, and some that it does not, from a seed.
//!
//! The references are greedy requests of which it is known what they get alone. Most requests are one of them, in one of
//! the ways in which it can be asked; the rest are random, wrong or too large, and are checked for their form.

use std::{ops::RangeInclusive, path::Path};

use anyhow::{Context, Result, ensure};
use rand::{Rng, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{
    SEQUENCE_TOKENS,
    exchange::{Answer, Choice, Logprob, Reply, Tokens},
};
use crate::prompts::{MODEL_NAME, read_bounded};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
/// The server's limit of a body.
const MAX_BODY_BYTES: usize = 8 << 20;
/// Long texts that prompts begin with; the caches hold some of them.
const PREFIXES: usize = 8;
/// The most references; a soak of few requests has fewer.
const MAX_REFERENCES: usize = 120;
/// The likeliest tokens that are told where a reference is asked alone: two may be ends, which are not allowed.
const ALONE_LOGPROBS: usize = 5;
/// Tokens that a prompt may have beside one for each of its bytes: a space before it, a beginning and an end.
const ADDED_TOKENS: u64 = 3;
/// The grammar of [`Wanted::Counted`].
const GRAMMAR: &str = r#"root ::= ("yes" | "no" | "maybe") " " [0-9] [0-9]"#;

/// What a request is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A reference, as it is.
    Reference,
    /// A reference, ended by a stop string.
    Stop,
    /// A reference, with log-probabilities.
    Logprobs,
    /// A reference, several times in one request.
    Choices,
    /// Random text.
    Sampled,
    /// A grammar.
    Grammar,
    /// A JSON schema.
    Schema,
    /// A reference that waits for a short time only.
    Deadline,
    /// A mistake.
    Wrong,
    /// More than the server takes.
    Huge,
}

/// What a request is to get.
#[derive(Debug, Clone, PartialEq)]
pub enum Wanted {
    /// What a reference got alone, up to the stop string.
    Alone {
        /// Which one.
        reference: usize,
        /// Where the text ends.
        stop: Option<String>,
    },
    /// Answers of so many tokens, or if not `exact` of at most as many.
    Tokens {
        /// Of each answer.
        tokens: u32,
        /// Whether the model may not end earlier.
        exact: bool,
    },
    /// A text of [`GRAMMAR`].
    Counted,
    /// An object of the schema.
    Object,
    /// An error.
    Error {
        /// The status.
        status: u16,
        /// The code, or none where it is not ours to know.
        code: Option<&'static str>,
    },
}

/// When a client leaves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Leave {
    /// After so many milliseconds, whatever came.
    AfterMs(u64),
    /// After so many pieces of text.
    AfterPieces(usize),
}

/// A request, and what it is to get.
#[derive(Debug, Clone)]
pub struct Request {
    /// Its number; the references have none.
    pub number: Option<u64>,
    /// What it is for.
    pub kind: Kind,
    /// Where it goes.
    pub path: &'static str,
    /// Headers beside the usual ones, or in place of them.
    pub headers: Vec<(&'static str, String)>,
    /// What is sent.
    pub body: Vec<u8>,
    /// Whether the answer comes as events.
    pub streamed: bool,
    /// Whether the answer tells its tokens.
    pub usage: bool,
    /// How many answers.
    pub choices: usize,
    /// The fewest and the most tokens that its prompt may have.
    pub prompt_tokens: RangeInclusive<u64>,
    /// The most that all its answers may have.
    pub most_completion_tokens: u64,
    /// How many of the likeliest tokens are told, if log-probabilities are.
    pub logprobs: Option<usize>,
    /// What comes back.
    pub wanted: Wanted,
    /// Whether it may fail because it waited.
    pub deadline: bool,
    /// Whether the client leaves.
    pub leave: Option<Leave>,
}

/// What a reference gets alone.
#[derive(Debug, Clone, PartialEq)]
pub struct Alone {
    /// The text.
    pub text: String,
    /// Why it ended.
    pub reason: String,
    /// Tokens read.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
    /// Those that were told with their log-probabilities.
    pub told: Vec<Sureness>,
    /// By how many nats the model preferred to end there, where it did and that was told.
    pub end_margin: Option<f64>,
}

/// How sure the model was of a token.
#[derive(Debug, Clone, PartialEq)]
pub struct Sureness {
    /// Where the token begins in the text, in bytes.
    pub begin: usize,
    /// Where it ends.
    pub end: usize,
    /// The next likeliest, the likeliest first: their texts, and by how many nats the token was likelier.
    pub others: Vec<(Vec<u8>, f64)>,
}

impl Sureness {
    /// By how much the token was likelier than any other.
    fn margin(&self) -> Option<f64> {
        self.others.first().map(|(_, margin)| *margin)
    }
}

impl Alone {
    /// From the answer of a server that had nothing else to do, with log-probabilities where there are some.
    ///
    /// # Errors
    /// When it is none.
    pub fn of(reply: Reply) -> Result<Self> {
        let (choice, usage) = only_choice(reply)?;
        let mut end = 0;
        let told = choice.logprobs.iter().map(|token| {
            let begin = end;
            end += token.bytes.len();
            // What is likelier than the token that was chosen was not allowed: the end, in a text that must go on.
            let others = token.top_logprobs.iter().skip_while(|other| other.logprob > token.logprob).skip(1);
            let others = others.map(|other| (other.bytes.clone(), token.logprob - other.logprob));
            Sureness { begin, end, others: others.collect() }
        });
        Ok(Self {
            told: told.take_while(|token| !token.others.is_empty()).collect(),
            end_margin: None,
            text: choice.text,
            reason: choice.reason.context("no reason")?,
            prompt_tokens: usage.prompt,
            completion_tokens: usage.completion,
        })
    }

    /// Learns how sure the end was, from the answer to the same request that had to go on for as many tokens as the end
    /// made of it: the likeliest in the place of the last one is the end.
    ///
    /// # Errors
    /// When it is no answer.
    pub fn learn_end(&mut self, gone_on: Reply) -> Result<()> {
        let (choice, _) = only_choice(gone_on)?;
        let last = choice.logprobs.last().filter(|_| choice.logprobs.len() as u64 == self.completion_tokens);
        let margin = |last: &Logprob| Some(last.top_logprobs.first()?.logprob - last.logprob);
        self.end_margin = last.and_then(margin).filter(|margin| *margin > 0.0);
        Ok(())
    }

    /// Whether the model was sure of each token.
    #[must_use]
    pub fn is_sure(&self, margin: f64) -> bool {
        self.told.iter().all(|token| token.margin().is_some_and(|of_token| of_token >= margin))
    }

    /// How sure the model was, alone, of the token from which on another text is another one: by how many nats. `None`
    /// where that was not told.
    #[must_use]
    pub fn margin_where_parted(&self, other: &str) -> Option<f64> {
        let same = self.text.bytes().zip(other.bytes()).take_while(|(one, other)| one == other).count();
        let mut least = f64::INFINITY;
        for token in &self.told {
            if token.end > same {
                return token.margin().map(|margin| margin.min(least));
            }
            // The texts may be alike for longer than the tokens: another one may have begun as this one did.
            let rest = &other.as_bytes()[token.begin..];
            let taken = token.others.iter().filter(|(bytes, _)| !bytes.is_empty() && rest.starts_with(bytes));
            least = taken.map(|(_, margin)| *margin).fold(least, f64::min);
        }
        self.end_margin.map(|margin| margin.min(least))
    }
}

fn only_choice(reply: Reply) -> Result<(Choice, Tokens)> {
    let Reply::Answer(Answer { mut choices, usage: Some(usage) }) = reply else {
        anyhow::bail!("no whole answer: {reply:?}");
    };
    Ok((choices.pop().context("no text")?, usage))
}

/// A request of which it is known what it gets.
#[derive(Debug, Clone)]
struct Reference {
    path: &'static str,
    fields: Map<String, Value>,
    max_tokens: u32,
}

/// Where requests come from.
#[derive(Debug)]
pub struct Asks {
    seed: u64,
    references: Vec<Reference>,
}

impl Asks {
    /// The references of a soak, with the questions in a file.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn new(questions: &Path, seed: u64, requests: u64) -> Result<Self> {
        let chats = read_bounded(questions)?
            .lines()
            .map(|line| Ok(serde_json::from_str::<Value>(line)?["messages"].take()))
            .collect::<Result<Vec<_>>>()
            .with_context(|| questions.display().to_string())?;
        ensure!(!chats.is_empty(), "{} has no questions", questions.display());
        let mut rng = StdRng::seed_from_u64(seed);
        let prefixes: Vec<String> = (0..PREFIXES).map(|number| prefix(&mut rng, number)).collect();
        let count = usize::try_from(requests / 8).unwrap_or(usize::MAX).clamp(16, MAX_REFERENCES);
        let references = (0..count).map(|number| reference(&mut rng, number, &chats, &prefixes)).collect();
        Ok(Self { seed, references })
    }

    /// How many references there are.
    #[must_use]
    pub fn references(&self) -> usize {
        self.references.len()
    }

    /// A reference, as it is asked alone.
    #[must_use]
    pub fn reference(&self, index: usize) -> Request {
        self.alone(index).build(false, true)
    }

    /// The same, that may not end and has so many tokens.
    #[must_use]
    pub fn gone_on(&self, index: usize, tokens: u64) -> Request {
        let mut draft = self.alone(index);
        draft.fields.extend([("ignore_eos".to_owned(), json!(true)), ("max_tokens".to_owned(), json!(tokens))]);
        draft.build(false, true)
    }

    fn alone(&self, index: usize) -> Draft {
        let wanted = Wanted::Alone { reference: index, stop: None };
        let mut draft = self.of_reference(index, &[], Kind::Reference, wanted);
        match draft.path {
            CHAT => draft.tell_logprobs(ALONE_LOGPROBS),
            _ => drop(draft.fields.insert("logprobs".to_owned(), json!(ALONE_LOGPROBS))),
        }
        draft
    }

    /// A request that takes all of a sequence's cells, which a worker that lost some cannot serve.
    #[must_use]
    pub fn whole_sequence(&self, number: u32) -> Request {
        // Most of it is read, which is quicker than to generate it.
        let prompt = format!("Number {number}:{}", " the".repeat(1_200));
        let fields = json!({"prompt": prompt, "ignore_eos": true, "temperature": 0, "max_tokens": SEQUENCE_TOKENS});
        let wanted = Wanted::Tokens { tokens: SEQUENCE_TOKENS, exact: false };
        Draft::text(Kind::Sampled, fields, wanted).build(false, true)
    }

    /// Request number `number`.
    #[must_use]
    pub fn request(&self, number: u64, alone: &[Alone]) -> Request {
        let mut rng = StdRng::seed_from_u64(self.seed ^ (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let rng = &mut rng;
        let mut request = match rng.random_range(0..100) {
            0..7 => wrong(rng),
            7 => huge(rng),
            _ => {
                let draft = self.draft(rng, alone);
                let streamed = rng.random_bool(0.6);
                draft.build(streamed, !streamed || rng.random_bool(0.8))
            }
        };
        request.number = Some(number);
        if !matches!(request.wanted, Wanted::Error { .. }) {
            if rng.random_bool(0.3) {
                let priority = ["high", "normal", "low"].choose(rng).copied().unwrap_or_default();
                request.headers.push(("x-gantry-priority", priority.to_owned()));
            }
            if rng.random_bool(0.04) {
                request.kind = Kind::Deadline;
                request.deadline = true;
                request.headers.push(("x-gantry-queue-timeout-ms", rng.random_range(1..80).to_string()));
            }
            if rng.random_bool(0.08) {
                request.leave = Some(match request.streamed && rng.random_bool(0.7) {
                    true => Leave::AfterPieces(rng.random_range(1..12)),
                    false => Leave::AfterMs(rng.random_range(0..150)),
                });
            }
        }
        request
    }

    fn draft(&self, rng: &mut StdRng, alone: &[Alone]) -> Draft {
        let index = rng.random_range(0..self.references.len());
        let wanted = Wanted::Alone { reference: index, stop: None };
        match rng.random_range(0..100) {
            0..56 => self.of_reference(index, alone, Kind::Reference, wanted),
            56..66 => match stop_of(rng, &alone[index].text) {
                Some(stop) => {
                    let wanted = Wanted::Alone { reference: index, stop: Some(stop.clone()) };
                    let mut draft = self.of_reference(index, alone, Kind::Stop, wanted);
                    draft.fields.insert("stop".to_owned(), json!([stop]));
                    draft
                }
                None => self.of_reference(index, alone, Kind::Reference, wanted),
            },
            66..74 => {
                let mut draft = self.of_reference(index, alone, Kind::Logprobs, wanted);
                let top = rng.random_range(0..4_usize);
                if draft.path == CHAT {
                    draft.tell_logprobs(top);
                } else {
                    // The other shape, of which only the text is looked at.
                    draft.fields.insert("logprobs".to_owned(), json!(top));
                }
                draft
            }
            74..80 => {
                let mut draft = self.of_reference(index, alone, Kind::Choices, wanted);
                draft.choices = rng.random_range(2..4);
                draft.fields.insert("n".to_owned(), json!(draft.choices));
                draft
            }
            80..90 => self.sampled(rng, index, alone),
            90..95 => {
                let fields = json!({"prompt": "Is it so?", "grammar": GRAMMAR, "max_tokens": 32, "temperature": 1.2});
                Draft::text(Kind::Grammar, fields, Wanted::Counted)
            }
            _ => {
                let schema = json!({
                    "type": "object", "required": ["answer", "sure"], "additionalProperties": false,
                    "properties": {"answer": {"enum": ["yes", "no"]}, "sure": {"type": "boolean"}},
                });
                let format = json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}});
                let fields = json!({"prompt": "Is it so?", "response_format": format, "max_tokens": 96});
                Draft::text(Kind::Schema, fields, Wanted::Object)
            }
        }
    }

    /// `alone` is empty where a reference is asked alone, and its tokens are not known yet.
    fn of_reference(&self, index: usize, alone: &[Alone], kind: Kind, wanted: Wanted) -> Draft {
        let Reference { path, fields, .. } = self.references[index].clone();
        let prompt_tokens =
            alone.get(index).map_or(1..=u64::from(SEQUENCE_TOKENS), |alone| alone.prompt_tokens..=alone.prompt_tokens);
        Draft { kind, path, fields, wanted, choices: 1, prompt_tokens, logprobs: None }
    }

    /// Draws from a reference's distribution with all that can be said about drawing.
    fn sampled(&self, rng: &mut StdRng, index: usize, alone: &[Alone]) -> Draft {
        let max_tokens = self.references[index].max_tokens;
        let exact = rng.random_bool(0.5);
        let random = json!({
            "temperature": rng.random_range(0.2..1.8), "top_p": rng.random_range(0.5..1.0), "seed": rng.random::<u32>(),
            "min_p": rng.random_range(0.0..0.1), "top_k": rng.random_range(-1..60), "ignore_eos": exact,
            "frequency_penalty": rng.random_range(-0.5..1.0), "repeat_penalty": rng.random_range(0.9..1.3),
            "dry_multiplier": if rng.random_bool(0.2) { 0.8 } else { 0.0 },
            "xtc_probability": if rng.random_bool(0.2) { 0.5 } else { 0.0 },
            "logit_bias": {"5": -100, "7": 1.5},
        });
        let wanted = Wanted::Tokens { tokens: max_tokens, exact };
        let mut draft = self.of_reference(index, alone, Kind::Sampled, wanted);
        draft.choices = if rng.random_bool(0.2) { rng.random_range(2..5) } else { 1 };
        draft.fields.extend(random.as_object().cloned().unwrap_or_default());
        draft.fields.insert("n".to_owned(), json!(draft.choices));
        draft
    }
}

/// A request that lacks only the way in which it is answered.
struct Draft {
    kind: Kind,
    path: &'static str,
    fields: Map<String, Value>,
    wanted: Wanted,
    choices: usize,
    prompt_tokens: RangeInclusive<u64>,
    logprobs: Option<usize>,
}

impl Draft {
    fn text(kind: Kind, fields: Value, wanted: Wanted) -> Self {
        let fields = fields.as_object().cloned().unwrap_or_default();
        let prompt_bytes = fields.get("prompt").and_then(Value::as_str).map_or(0, str::len) as u64;
        let prompt_tokens = 1..=prompt_bytes + ADDED_TOKENS;
        Self { kind, path: TEXT, fields, wanted, choices: 1, prompt_tokens, logprobs: None }
    }

    /// Asks for log-probabilities in the shape of chats.
    fn tell_logprobs(&mut self, top: usize) {
        self.fields.extend([("logprobs".to_owned(), json!(true)), ("top_logprobs".to_owned(), json!(top))]);
        self.logprobs = Some(top);
    }

    fn build(self, streamed: bool, usage: bool) -> Request {
        let Self { kind, path, mut fields, wanted, choices, prompt_tokens, logprobs } = self;
        let max_tokens = fields.get("max_tokens").and_then(Value::as_u64).unwrap_or_default();
        fields.insert("model".to_owned(), json!(MODEL_NAME));
        fields.insert("stream".to_owned(), json!(streamed));
        if streamed && usage {
            fields.insert("stream_options".to_owned(), json!({"include_usage": true}));
        }
        let body = Value::Object(fields).to_string().into_bytes();
        let (number, headers) = (None, Vec::new());
        Request {
            number,
            kind,
            path,
            headers,
            body,
            streamed,
            usage,
            choices,
            prompt_tokens,
            most_completion_tokens: max_tokens * choices as u64,
            logprobs,
            wanted,
            deadline: false,
            leave: None,
        }
    }
}

/// A text of some hundred tokens, other than its siblings from its first words on, after which the model is still sure of
/// its answers.
fn prefix(rng: &mut StdRng, number: usize) -> String {
    format!("You are assistant number {number}. {}", "Answer shortly. ".repeat(rng.random_range(10..120)))
}

fn reference(rng: &mut StdRng, number: usize, chats: &[Value], prefixes: &[String]) -> Reference {
    let mut messages = chats[rng.random_range(0..chats.len())].clone();
    let prefix = &prefixes[rng.random_range(0..prefixes.len())];
    // By turns, so that a soak of few requests has all of them: a question, one after a long text, and a text to go on
    // with.
    let (path, key, prompt, endless) = match number % 5 {
        0..2 => (CHAT, "messages", messages, false),
        2 | 3 => {
            if let Value::Array(messages) = &mut messages {
                messages.insert(0, json!({"role": "system", "content": prefix}));
            }
            (CHAT, "messages", messages, rng.random_bool(0.3))
        }
        _ => (TEXT, "prompt", json!(format!("{prefix} And {number}:")), true),
    };
    let max_tokens = if endless { rng.random_range(8..48) } else { 64 };
    let fields = json!({"temperature": 0, "max_tokens": max_tokens, "ignore_eos": endless});
    let mut fields = fields.as_object().cloned().unwrap_or_default();
    fields.insert(key.to_owned(), prompt);
    Reference { path, fields, max_tokens }
}

/// Some characters from the middle of a text.
fn stop_of(rng: &mut StdRng, text: &str) -> Option<String> {
    let chars: Vec<char> = text.chars().collect();
    let begin = rng.random_range(1..chars.len().checked_sub(4)?.max(2));
    let stop: String = chars[begin..].iter().take(rng.random_range(2..5)).collect();
    // Half a character would be told as another one.
    (!stop.trim().is_empty() && !stop.contains('\u{fffd}')).then_some(stop)
}

/// A mistake that somebody makes some day.
fn wrong(rng: &mut StdRng) -> Request {
    let hello = || json!({"model": MODEL_NAME, "messages": [{"role": "user", "content": "Hello!"}]});
    let with = |name: &str, value: Value| {
        let mut body = hello();
        body[name] = value;
        body.to_string().into_bytes()
    };
    let too_long = json!([{"role": "user", "content": "word ".repeat(rng.random_range(4_000..40_000))}]);
    let (path, body, status, code) = match rng.random_range(0..15) {
        0 => (CHAT, b"{\"messages\": [".to_vec(), 400, Some("invalid_json")),
        1 => (TEXT, b"\xff\xfe\x00".to_vec(), 400, Some("invalid_json")),
        2 => (CHAT, b"{}".to_vec(), 400, Some("missing_required_parameter")),
        3 => (CHAT, with("temperature", json!(3)), 400, Some("invalid_value")),
        4 => (CHAT, with("n", json!(17)), 400, Some("invalid_value")),
        5 => (CHAT, with("stop", json!([1])), 400, Some("invalid_type")),
        6 => (CHAT, with("priority", json!("urgent")), 400, Some("invalid_value")),
        7 => (CHAT, with("model", json!("gpt-4")), 404, Some("model_not_found")),
        8 => ("/v1/nothing", hello().to_string().into_bytes(), 404, Some("unknown_url")),
        9 => (CHAT, with("grammar", json!("root ::= (")), 400, None),
        10 => (CHAT, with("messages", json!([{"role": "robot", "content": "x"}])), 400, Some("invalid_value")),
        11 => (CHAT, "[".repeat(50_000).into_bytes(), 400, Some("invalid_json")),
        13 => (CHAT, with("temprature", json!(1)), 400, Some("unknown_parameter")),
        12 => (CHAT, hello().to_string().into_bytes(), 415, Some("unsupported_media_type")),
        _ => (CHAT, with("messages", too_long), 400, Some("context_length_exceeded")),
    };
    let headers = if status == 415 { vec![("content-type", "text/plain".to_owned())] } else { Vec::new() };
    refused(Kind::Wrong, path, headers, body, Wanted::Error { status, code })
}

/// More than the server takes, or than the model can read.
fn huge(rng: &mut StdRng) -> Request {
    let words = |bytes: usize| json!({"model": MODEL_NAME, "prompt": "word ".repeat(bytes / 5)}).to_string();
    let (body, status, code) = match rng.random_bool(0.5) {
        true => (words(MAX_BODY_BYTES + 5), 413, "request_too_large"),
        false => (words(rng.random_range(1 << 20..2 << 20)), 400, "context_length_exceeded"),
    };
    refused(Kind::Huge, TEXT, Vec::new(), body.into_bytes(), Wanted::Error { status, code: Some(code) })
}

fn refused(
    kind: Kind,
    path: &'static str,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
    wanted: Wanted,
) -> Request {
    let draft = Draft { path, ..Draft::text(kind, Value::Null, wanted) };
    Request { headers, body, ..draft.build(false, true) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeMap;

    use super::*;

    fn asks() -> Asks {
        let questions = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/eval.jsonl");
        Asks::new(&questions, 7, 20_000).unwrap()
    }

    /// A token, its log-probability, and the likeliest in its place.
    type Token<'a> = (&'a str, f64, &'a [(&'a str, f64)]);

    /// The answer of a server.
    fn answer(tokens: &[Token<'_>]) -> Reply {
        let logprob = |&(text, logprob): &(&str, f64)| Logprob { logprob, bytes: text.into(), top_logprobs: vec![] };
        let token = |(text, chance, top): &Token<'_>| Logprob {
            top_logprobs: top.iter().map(logprob).collect(),
            ..logprob(&(text, *chance))
        };
        let text = tokens.iter().map(|(text, ..)| *text).collect();
        let logprobs: Vec<_> = tokens.iter().map(token).collect();
        let usage = Tokens { prompt: 5, cached: 0, completion: tokens.len() as u64, total: 5 + tokens.len() as u64 };
        let choice = Choice { text, reason: Some("stop".to_owned()), logprobs };
        Reply::Answer(Answer { choices: vec![choice], usage: Some(usage) })
    }

    #[test]
    fn a_text_is_as_sure_as_the_token_from_which_on_it_is_another() {
        let mut alone = Alone::of(answer(&[
            (" is", -0.2, &[(" is", -0.2), (" island", -2.2), (" was", -4.2)]),
            (" a", -0.1, &[(" a", -0.1), (" the", -3.1)]),
            // The end, of which it was very sure, was not allowed.
            (" lake", -5.0, &[("", -0.1), (" lake", -5.0), (" sea", -5.1)]),
        ]))
        .unwrap();
        let near = |margin: Option<f64>, wanted: f64| margin.is_some_and(|margin| (margin - wanted).abs() < 1e-9);
        assert!(near(alone.margin_where_parted(" is the"), 3.0));
        assert!(near(alone.margin_where_parted(" was"), 2.0), "what came was likelier than this one");
        assert!(near(alone.margin_where_parted(" island"), 2.0), "it parted a token before the texts do");
        assert!(near(alone.margin_where_parted(" is a sea"), 0.1), "ends do not count where they may not be");
        assert_eq!(alone.margin_where_parted(" is a lake and"), None);

        let gone_on = [(" is", -0.2, &[] as &[_]), (" a", -0.1, &[]), ("x", -3.0, &[("", -1.0), ("x", -3.0)])];
        alone.learn_end(answer(&gone_on)).unwrap();
        assert!(near(alone.margin_where_parted(" is a lake and"), 2.0));
        assert!(Alone::of(Reply::Left).is_err());
    }

    #[test]
    fn all_kinds_are_asked_and_a_number_always_asks_the_same() {
        let asks = asks();
        let text = "The capital of Peru is Lima.".to_owned();
        let one = Alone {
            text,
            reason: "stop".to_owned(),
            prompt_tokens: 9,
            completion_tokens: 8,
            told: vec![],
            end_margin: None,
        };
        let alone = vec![one; asks.references()];
        let mut kinds = BTreeMap::new();
        for number in 0..2_000 {
            let request = asks.request(number, &alone);
            assert_eq!(request.body, asks.request(number, &alone).body);
            *kinds.entry(request.kind).or_insert(0) += 1;
            if let Wanted::Alone { stop: Some(stop), reference } = &request.wanted {
                assert!(alone[*reference].text.contains(stop), "{stop:?}");
            }
            assert!(request.streamed || request.usage, "a whole answer always tells its tokens");
            if !matches!(request.wanted, Wanted::Error { .. }) {
                let most = request.most_completion_tokens;
                assert!((8..=64 * 4).contains(&most), "{:?} may have {most} tokens", request.kind);
                assert!(*request.prompt_tokens.end() <= 12, "{:?}: {:?}", request.kind, request.prompt_tokens);
            }
        }
        assert_eq!(kinds.len(), 10, "{kinds:?}");
        assert!(kinds[&Kind::Reference] > 800, "{kinds:?}");
    }
}

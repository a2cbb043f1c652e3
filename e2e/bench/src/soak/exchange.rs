//! One request, and what came of it: an answer, an error, or neither.
//!
//! Reads the wire with types of its own, and takes nothing for granted: a stream must tell each choice's end once, and
//! end in `[DONE]` or in an error, after which nothing comes. Absent: what the answer should have been.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use http_body_util::BodyExt;
use hyper::{HeaderMap, body::Incoming, header};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep, timeout};

use super::asks::{Leave, Request};
use crate::{
    client::{post, send, text},
    sse::Events,
};

/// Most bytes of a whole answer.
const MAX_ANSWER_BYTES: usize = 8 << 20;
/// Characters of a response that a message quotes.
const QUOTED_CHARS: usize = 300;

/// What came back.
#[derive(Debug, Clone, PartialEq)]
pub enum Reply {
    /// A whole answer.
    Answer(Answer),
    /// An error object.
    Error(WireError),
    /// Nothing: the client left, as it was told to.
    Left,
    /// Something that no server should send, or no end.
    Broken(String),
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Answer {
    /// In the order of their indices.
    pub choices: Vec<Choice>,
    /// Where it was told.
    pub usage: Option<Tokens>,
}

/// One of an answer's texts.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Choice {
    /// The text.
    pub text: String,
    /// Why it ended.
    pub reason: Option<String>,
    /// Log-probabilities.
    pub logprobs: Vec<Logprob>,
}

/// A token and how likely it was.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Logprob {
    /// The natural logarithm.
    pub logprob: f64,
    /// The token.
    pub bytes: Vec<u8>,
    /// The likeliest in its place.
    #[serde(default)]
    pub top_logprobs: Vec<Logprob>,
}

/// Tokens, as the server counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Tokens {
    /// Read.
    pub prompt: u64,
    /// Of those, there already.
    pub cached: u64,
    /// Generated.
    pub completion: u64,
    /// Both.
    pub total: u64,
}

/// An error as it came.
#[derive(Debug, Clone, PartialEq)]
pub struct WireError {
    /// Of the response; `None` in a stream that had begun.
    pub status: Option<u16>,
    /// Its code.
    pub code: String,
    /// Its sentence.
    pub message: String,
    /// When to come back, in seconds.
    pub retry_after_s: Option<u64>,
    /// Whether text of the answer had come before it.
    pub after_text: bool,
}

/// A reply with its times.
#[derive(Debug, Clone)]
pub struct Exchange {
    /// When the request was sent.
    pub sent: Instant,
    /// When its response ended.
    pub ended: Instant,
    /// What came.
    pub reply: Reply,
}

#[derive(Deserialize)]
struct Body {
    #[serde(default)]
    choices: Vec<WireChoice>,
    usage: Option<WireUsage>,
    error: Option<WireErrorObject>,
}

#[derive(Deserialize)]
struct WireChoice {
    index: usize,
    text: Option<String>,
    message: Option<WireMessage>,
    delta: Option<WireMessage>,
    finish_reason: Option<String>,
    logprobs: Option<WireLogprobs>,
}

#[derive(Deserialize)]
struct WireMessage {
    content: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum WireLogprobs {
    /// Of chats.
    Chat { content: Vec<Logprob> },
    /// Of texts to go on with.
    Text { tokens: Vec<String>, token_logprobs: Vec<f64>, top_logprobs: Option<Vec<BTreeMap<String, f64>>> },
}

impl WireLogprobs {
    /// In the shape of chats; a text's only up to the first token that is part of a character, which it cannot name.
    fn told(self) -> Vec<Logprob> {
        let (tokens, chances, tops) = match self {
            Self::Chat { content } => return content,
            Self::Text { tokens, token_logprobs, top_logprobs } => {
                (tokens, token_logprobs, top_logprobs.unwrap_or_default())
            }
        };
        let one = |(text, logprob): (String, f64)| Logprob { logprob, bytes: text.into(), top_logprobs: Vec::new() };
        let whole = tokens.into_iter().zip(chances).zip(tops).take_while(|((text, _), _)| !text.contains('\u{fffd}'));
        let told = whole.map(|(token, top)| {
            let mut top_logprobs: Vec<Logprob> = top.into_iter().map(one).collect();
            top_logprobs.sort_by(|a, b| b.logprob.total_cmp(&a.logprob));
            Logprob { top_logprobs, ..one(token) }
        });
        told.collect()
    }
}

#[derive(Deserialize)]
struct WireUsage {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    prompt_tokens_details: WireDetails,
}

#[derive(Deserialize)]
struct WireDetails {
    cached_tokens: u64,
}

/// All four fields must be there.
#[derive(Deserialize)]
struct WireErrorObject {
    message: String,
    #[serde(rename = "type")]
    kind: String,
    #[serde(deserialize_with = "Option::deserialize")]
    param: Option<String>,
    code: String,
}

/// Sends a request and reads its response to the end, or until the client leaves, or for `limit`.
pub async fn exchange(server: SocketAddr, request: &Request, limit: Duration) -> Exchange {
    let sent = Instant::now();
    let leaves = async {
        match request.leave {
            Some(Leave::AfterMs(ms)) => sleep(Duration::from_millis(ms)).await,
            Some(Leave::AfterPieces(_)) | None => std::future::pending().await,
        }
    };
    let reply = tokio::select! {
        reply = timeout(limit, read(server, request)) => match reply {
            Ok(Ok(reply)) => reply,
            Ok(Err(error)) => Reply::Broken(format!("{error:#}")),
            Err(_) => Reply::Broken(format!("no end after {limit:?}")),
        },
        () = leaves => Reply::Left,
    };
    Exchange { sent, ended: Instant::now(), reply }
}

async fn read(server: SocketAddr, request: &Request) -> Result<Reply> {
    let (response, _connection) = send(server, post(request.path, &request.headers, request.body.clone())?).await?;
    let status = response.status().as_u16();
    let (head, body) = response.into_parts();
    if status == 200 && request.streamed {
        return stream(body, request).await;
    }
    let text = text(body, MAX_ANSWER_BYTES).await?;
    whole(status, &head.headers, &text, request.choices)
        .with_context(|| text.chars().take(QUOTED_CHARS).collect::<String>())
}

fn whole(status: u16, headers: &HeaderMap, text: &str, choices: usize) -> Result<Reply> {
    let body: Body = serde_json::from_str(text).with_context(|| format!("a response of status {status}"))?;
    if status != 200 {
        let error = body.error.with_context(|| format!("no error object in a response of status {status}"))?;
        let seconds = |value: &header::HeaderValue| anyhow::Ok(value.to_str()?.parse()?);
        let retry_after_s = headers.get(header::RETRY_AFTER).map(seconds).transpose().context("Retry-After")?;
        return error.told(Some(status), retry_after_s, false);
    }
    ensure!(body.error.is_none(), "an error object in a response of status 200");
    let mut answer = Answer { choices: vec![Choice::default(); choices], usage: None };
    take(&mut answer, body, true)?;
    ensure!(answer.choices.iter().all(|choice| choice.reason.is_some()), "a choice is missing");
    Ok(Reply::Answer(answer))
}

async fn stream(mut body: Incoming, request: &Request) -> Result<Reply> {
    let mut answer = Answer { choices: vec![Choice::default(); request.choices], usage: None };
    let (mut events, mut pieces, mut done, mut error) = (Events::default(), 0, false, None);
    while let Some(frame) = body.frame().await {
        let frame = frame.context("the stream broke off")?;
        let Some(data) = frame.data_ref() else { continue };
        events.push(data, |data| {
            ensure!(!done && error.is_none(), "an event after the last: {}", String::from_utf8_lossy(data));
            if data == b"[DONE]" {
                done = true;
                return Ok(());
            }
            let chunk: Body = serde_json::from_slice(data)
                .with_context(|| format!("an event cannot be read: {}", String::from_utf8_lossy(data)))?;
            if let Some(told) = chunk.error {
                error = Some(told);
                return Ok(());
            }
            pieces += usize::from(take(&mut answer, chunk, false)?);
            Ok(())
        })?;
        if matches!(request.leave, Some(Leave::AfterPieces(most)) if pieces >= most) {
            return Ok(Reply::Left);
        }
    }
    if let Some(error) = error {
        return error.told(None, None, pieces > 0);
    }
    ensure!(done, "the stream ended without [DONE] and without an error");
    ensure!(answer.choices.iter().all(|choice| choice.reason.is_some()), "[DONE] came before the end of a choice");
    Ok(Reply::Answer(answer))
}

/// Adds what a response or a piece of it says; true when there was text.
fn take(answer: &mut Answer, body: Body, whole: bool) -> Result<bool> {
    let mut had_text = false;
    for choice in body.choices {
        let WireChoice { index, text, message, delta, finish_reason, logprobs } = choice;
        let told = answer.choices.get_mut(index).with_context(|| format!("there is no choice {index}"))?;
        ensure!(told.reason.is_none(), "choice {index} goes on after its end");
        let message = if whole { message } else { delta };
        let text = text.or(message.and_then(|message| message.content)).unwrap_or_default();
        had_text |= !text.is_empty();
        told.text.push_str(&text);
        told.logprobs.extend(logprobs.into_iter().flat_map(WireLogprobs::told));
        told.reason = finish_reason;
    }
    if let Some(usage) = body.usage {
        ensure!(answer.usage.is_none(), "the usage is told twice");
        answer.usage = Some(Tokens {
            prompt: usage.prompt_tokens,
            cached: usage.prompt_tokens_details.cached_tokens,
            completion: usage.completion_tokens,
            total: usage.total_tokens,
        });
    }
    Ok(had_text)
}

impl WireErrorObject {
    fn told(self, status: Option<u16>, retry_after_s: Option<u64>, after_text: bool) -> Result<Reply> {
        let Self { message, kind, param, code } = self;
        if message.is_empty() || kind.is_empty() || code.is_empty() || param.is_some_and(|param| param.is_empty()) {
            bail!("an error object with nothing in it");
        }
        Ok(Reply::Error(WireError { status, code, message, retry_after_s, after_text }))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn read(status: u16, text: &str) -> Result<Reply> {
        let mut headers = HeaderMap::new();
        headers.insert(header::RETRY_AFTER, header::HeaderValue::from_static("3"));
        whole(status, &headers, text, 1)
    }

    #[test]
    fn an_answer_has_all_its_choices_and_an_error_all_its_fields() {
        let usage =
            r#"{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7,"prompt_tokens_details":{"cached_tokens":4}}"#;
        let choice = r#"{"index":0,"text":"a","finish_reason":"stop"}"#;
        let answer = read(200, &format!(r#"{{"choices":[{choice}],"usage":{usage}}}"#)).unwrap();
        let Reply::Answer(Answer { choices, usage: Some(tokens) }) = answer else { panic!("{answer:?}") };
        assert_eq!((choices[0].text.as_str(), choices[0].reason.as_deref()), ("a", Some("stop")));
        assert_eq!(tokens, Tokens { prompt: 5, cached: 4, completion: 2, total: 7 });

        let error = r#"{"error":{"message":"m","type":"t","param":null,"code":"queue_full"}}"#;
        let Reply::Error(told) = read(429, error).unwrap() else { panic!("no error") };
        assert_eq!((told.status, told.code.as_str(), told.retry_after_s), (Some(429), "queue_full", Some(3)));
        for (status, text) in [
            (200, r#"{"choices":[]}"#.to_owned()),
            (200, format!(r#"{{"choices":[{choice},{choice}]}}"#)),
            (200, error.to_owned()),
            (500, "oh no".to_owned()),
            (429, r#"{"error":{"message":"m","type":"t","code":"queue_full"}}"#.to_owned()),
            (429, r#"{"error":{"message":"","type":"t","param":null,"code":"queue_full"}}"#.to_owned()),
        ] {
            assert!(read(status, &text).is_err(), "{status} {text}");
        }
    }
}

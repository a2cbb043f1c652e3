//! The client: one streamed request on a connection of its own, with the time of every event.
//!
//! Both servers are asked by the same code, in the same words. Times count from a clock that a whole run shares. An
//! outcome tells what came and what failed; nothing is tried again. Absent: TLS, redirects, connection pools (a server
//! with a thread for each idle connection would be measured by its pool).

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, Response, body::Incoming, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, de::IgnoredAny};
use serde_json::{Map, Value};
use tokio::{
    net::TcpStream,
    sync::watch,
    time::{Instant, timeout},
};

use crate::sse::Events;

/// Longest time that a request may take, waiting in a queue included.
pub const REQUEST_LIMIT: Duration = Duration::from_secs(1800);
/// Most bytes that are read of a response that is no stream.
const MAX_RESPONSE_BYTES: usize = 64 << 10;
/// Most bytes of a text that is asked for.
const MAX_TEXT_BYTES: usize = 1 << 20;

/// What is sent.
#[derive(Debug, Clone)]
pub struct Ask {
    /// `/v1/completions` or `/v1/chat/completions`.
    pub path: &'static str,
    /// The request.
    pub body: Map<String, Value>,
}

/// What came back. Times in seconds from the run's clock.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// When it was sent.
    pub sent_s: f64,
    /// When each event with text arrived.
    pub events_s: Vec<f64>,
    /// When the response ended.
    pub ended_s: f64,
    /// Tokens of the prompt, as the server counts them.
    pub prompt_tokens: u64,
    /// Of those, tokens that it had read before.
    pub cached_tokens: u64,
    /// Tokens of the answer, as the server counts them.
    pub completion_tokens: u64,
    /// Whether the client went away before the end, as it was told to.
    pub left: bool,
    /// What went wrong.
    pub error: Option<String>,
}

impl Outcome {
    /// Milliseconds to the first text.
    #[must_use]
    pub fn ttft_ms(&self) -> Option<f64> {
        Some((self.events_s.first()? - self.sent_s) * 1e3)
    }

    /// Milliseconds between events that follow each other, each with the time of the second.
    pub fn gaps_ms(&self) -> impl Iterator<Item = (f64, f64)> + '_ {
        self.events_s.windows(2).map(|pair| (pair[1], (pair[1] - pair[0]) * 1e3))
    }
}

/// Of a streamed event, what is looked at, in whichever protocol's words.
#[derive(Deserialize)]
struct Chunk {
    #[serde(rename = "type", default)]
    kind: Option<String>,
    delta: Option<EventDelta>,
    response: Option<LastResponse>,
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    text: Option<String>,
    delta: Option<Delta>,
}

#[derive(Deserialize)]
struct Delta {
    content: Option<String>,
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<IgnoredAny>>,
}

/// What is new in an event that is of one piece.
#[derive(Deserialize)]
#[serde(untagged)]
enum EventDelta {
    /// The Responses API's.
    Text(String),
    /// The Messages API's.
    Block { text: Option<String>, partial_json: Option<String>, thinking: Option<String> },
}

impl EventDelta {
    fn has_text(&self) -> bool {
        let is_some = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        match self {
            Self::Text(text) => !text.is_empty(),
            Self::Block { text, partial_json, thinking } => [text, partial_json, thinking].into_iter().any(is_some),
        }
    }
}

/// What the last event of a response has.
#[derive(Deserialize)]
struct LastResponse {
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Usage {
    #[serde(default, alias = "input_tokens")]
    prompt_tokens: u64,
    #[serde(default, alias = "output_tokens")]
    completion_tokens: u64,
    #[serde(alias = "input_tokens_details")]
    prompt_tokens_details: Option<PromptDetails>,
    /// The Messages API's, which does not count them among the prompt's.
    #[serde(default)]
    cache_read_input_tokens: u64,
}

#[derive(Deserialize)]
struct PromptDetails {
    #[serde(default)]
    cached_tokens: u64,
}

impl Chunk {
    /// Whether a stream of this protocol is whole with it.
    fn is_last(&self) -> bool {
        matches!(self.kind.as_deref(), Some("message_stop" | "response.completed" | "response.incomplete"))
    }
}

/// Told what happens in a stream while it happens.
pub type OnEvent<'a> = &'a (dyn Fn(usize) + Send + Sync);

/// Sends one request and reads its stream to the end, or until `leave` becomes true. `on_event` gets the number of
/// events with text so far.
pub async fn stream(
    server: SocketAddr,
    ask: &Ask,
    clock: Instant,
    leave: Option<watch::Receiver<bool>>,
    on_event: OnEvent<'_>,
) -> Outcome {
    let mut outcome = Outcome { sent_s: clock.elapsed().as_secs_f64(), ..Outcome::default() };
    let exchange = run(server, ask, clock, &mut outcome, on_event);
    let left = async {
        match leave {
            Some(mut leave) => {
                // A sender that is gone never asks to leave.
                if leave.wait_for(|leave| *leave).await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
            None => std::future::pending().await,
        }
    };
    let ended = tokio::select! {
        ended = timeout(REQUEST_LIMIT, exchange) => Some(ended),
        () = left => None,
    };
    match ended {
        Some(Ok(Ok(()))) => {}
        Some(Ok(Err(error))) => outcome.error = Some(format!("{error:#}")),
        Some(Err(_)) => outcome.error = Some(format!("no whole answer in {REQUEST_LIMIT:?}")),
        None => outcome.left = true,
    }
    outcome.ended_s = clock.elapsed().as_secs_f64();
    outcome
}

async fn run(
    server: SocketAddr,
    ask: &Ask,
    clock: Instant,
    outcome: &mut Outcome,
    on_event: OnEvent<'_>,
) -> Result<()> {
    let body = serde_json::to_vec(&ask.body)?;
    let (response, _connection) = send(server, post(ask.path, &[], body)?).await?;
    let status = response.status();
    let mut body = response.into_body();
    if status != 200 {
        bail!("{status}: {}", text(body, MAX_RESPONSE_BYTES).await?);
    }
    let (mut events, mut done) = (Events::default(), false);
    while let Some(frame) = body.frame().await {
        let frame = frame.context("the stream broke off")?;
        let Some(data) = frame.data_ref() else { continue };
        let now_s = clock.elapsed().as_secs_f64();
        events.push(data, |data| {
            if data == b"[DONE]" {
                done = true;
                return Ok(());
            }
            let chunk: Chunk = serde_json::from_slice(data).context("an event cannot be read")?;
            done |= chunk.is_last();
            take(outcome, chunk, now_s, on_event)
        })?;
    }
    ensure!(done, "the stream ended before its last event");
    Ok(())
}

fn take(outcome: &mut Outcome, chunk: Chunk, now_s: f64, on_event: OnEvent<'_>) -> Result<()> {
    if let Some(error) = chunk.error {
        bail!("an error event: {error}");
    }
    let is_some = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
    let has_text = chunk.choices.iter().any(|choice| {
        let says =
            |delta: &Delta| is_some(&delta.content) || is_some(&delta.reasoning_content) || delta.tool_calls.is_some();
        is_some(&choice.text) || choice.delta.as_ref().is_some_and(says)
    });
    if has_text || chunk.delta.as_ref().is_some_and(EventDelta::has_text) {
        outcome.events_s.push(now_s);
        on_event(outcome.events_s.len());
    }
    let told = chunk.response.map(|response| match response.error {
        Some(error) => bail!("a response that failed: {error}"),
        None => Ok(response.usage),
    });
    if let Some(usage) = chunk.usage.or(told.transpose()?.flatten()) {
        let cached = usage.cache_read_input_tokens;
        outcome.prompt_tokens = usage.prompt_tokens + cached;
        outcome.completion_tokens = usage.completion_tokens;
        outcome.cached_tokens = usage.prompt_tokens_details.map_or(cached, |details| details.cached_tokens);
    }
    Ok(())
}

/// Ends the connection when it is dropped, which is how a client leaves.
pub(crate) struct Connection(tokio::task::JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A request with a JSON body, unless `headers` say something else of it.
pub(crate) fn post(path: &str, headers: &[(&str, String)], body: Vec<u8>) -> Result<Request<Full<Bytes>>> {
    let mut request = Request::builder().method(Method::POST).uri(path).body(Full::new(Bytes::from(body)))?;
    request.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    for (name, value) in headers {
        request.headers_mut().insert(header::HeaderName::from_bytes(name.as_bytes())?, value.parse()?);
    }
    Ok(request)
}

/// A request for what is at an address.
pub(crate) fn bare(path: &str) -> Result<Request<Full<Bytes>>> {
    Ok(Request::builder().uri(path).body(Full::default())?)
}

/// The text at an address, which must be there.
pub(crate) async fn get(server: SocketAddr, path: &str) -> Result<String> {
    let (response, _connection) = send(server, bare(path)?).await?;
    ensure!(response.status() == 200, "{path}: {}", response.status());
    text(response.into_body(), MAX_TEXT_BYTES).await
}

pub(crate) async fn send(
    server: SocketAddr,
    mut request: Request<Full<Bytes>>,
) -> Result<(Response<Incoming>, Connection)> {
    let socket = TcpStream::connect(server).await.context("cannot connect")?;
    socket.set_nodelay(true)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(socket)).await?;
    // What ends a connection early is seen in the response.
    let connection = Connection(tokio::spawn(async move { drop(connection.await) }));
    request.headers_mut().insert(header::HOST, server.to_string().parse()?);
    let response = sender.send_request(request).await.context("no response")?;
    Ok((response, connection))
}

/// What a response says, which is at most so long.
pub(crate) async fn text(body: Incoming, max_bytes: usize) -> Result<String> {
    let body = Limited::new(body, max_bytes).collect().await;
    let body = body.map_err(|error| anyhow::anyhow!("the response cannot be read: {error}"))?;
    Ok(String::from_utf8_lossy(&body.to_bytes()).into_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn each_protocols_events_are_counted() {
        for (events, prompt, cached) in [
            (
                &[
                    r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}"#,
                    r#"{"choices":[{"index":0,"delta":{"content":"a"}}]}"#,
                    r#"{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]}}]}"#,
                    r#"{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}"#,
                ][..],
                9,
                4,
            ),
            (
                &[
                    r#"{"type":"response.created","response":{"usage":null,"error":null}}"#,
                    r#"{"type":"response.output_text.delta","delta":"a"}"#,
                    r#"{"type":"response.function_call_arguments.delta","delta":"{"}"#,
                    r#"{"type":"response.completed","response":{"error":null,"usage":{"input_tokens":9,"output_tokens":2,"input_tokens_details":{"cached_tokens":4}}}}"#,
                ],
                9,
                4,
            ),
            (
                &[
                    r#"{"type":"message_start","message":{"usage":{"input_tokens":5}}}"#,
                    r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"a"}}"#,
                    r#"{"type":"content_block_delta","index":1,"delta":{"type":"input_json_delta","partial_json":"{"}}"#,
                    r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"input_tokens":5,"cache_read_input_tokens":4,"output_tokens":2}}"#,
                    r#"{"type":"message_stop"}"#,
                ],
                9,
                4,
            ),
        ] {
            let (mut outcome, mut done) = (Outcome::default(), false);
            for event in events {
                let chunk: Chunk = serde_json::from_str(event).unwrap();
                done |= chunk.is_last();
                take(&mut outcome, chunk, 1.0, &|_| {}).unwrap();
            }
            let told =
                (outcome.events_s.len(), outcome.completion_tokens, outcome.prompt_tokens, outcome.cached_tokens);
            assert_eq!(told, (2, 2, prompt, cached), "{events:?}");
            assert_eq!(done, events.len() == 5 || events[0].contains("response."));
        }
        let failed: Chunk =
            serde_json::from_str(r#"{"type":"response.failed","response":{"error":{"code":"server_error"}}}"#).unwrap();
        assert!(take(&mut Outcome::default(), failed, 1.0, &|_| {}).is_err());
    }
}

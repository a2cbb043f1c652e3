//! The load generator: a number of concurrent streams, each of which asks the next question as soon as its last answer
//! has ended, and checks every answer.
//!
//! Runs in the background so that a test can change the world under it: [`Load::start`], [`Load::await_completed`],
//! [`Load::finish`]. Each stream is a task with its own record; the only thing they share is a counter. Absent: pacing
//! (the load is closed-loop) and retries (a retry would hide a failure).

use std::{
    collections::BTreeMap,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::StreamExt;
use reqwest::{Client, ClientBuilder, header};
use serde::Serialize;
use serde_json::json;
use tokio::{sync::watch, task::JoinSet, time::timeout};
use tokio_util::sync::CancellationToken;

use crate::{
    answer::{Answer, AnswerBook, AnswerCheck, Event, Failure, FailureKind, VERSION_HEADER, describe_error},
    models::Question,
    sse::SseParser,
    stats::Spread,
};

/// Most concurrent streams.
pub const MAX_CONCURRENCY: usize = 4096;
/// Most requests of one run: each leaves a record.
pub const MAX_REQUESTS: u64 = 1_000_000;
/// Longest time that one response may take.
pub const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest time that a connection may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Failures of each kind that a summary tells in full.
const FAILURES_SHOWN_OF_KIND: usize = 2;

/// Who is asked.
#[derive(Debug, Clone)]
pub struct Target {
    /// Base address of the API, with `/v1`.
    pub base_url: String,
    /// Name of the model.
    pub model: String,
}

/// How long an answer is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Length {
    /// Most tokens.
    pub max_tokens: u32,
    /// Whether the model goes on past its end, for streams that last.
    pub ignore_end: bool,
}

impl Length {
    /// As long as the model wants, up to `max_tokens`.
    #[must_use]
    pub fn up_to(max_tokens: u32) -> Self {
        Self { max_tokens, ignore_end: false }
    }
}

/// What is asked, and how much.
#[derive(Debug, Clone)]
pub struct LoadConfig {
    /// Who is asked.
    pub target: Target,
    /// Concurrent streams.
    pub concurrency: usize,
    /// Requests after which it ends by itself; at most [`MAX_REQUESTS`].
    pub requests: u64,
    /// Asked in turn.
    pub questions: Vec<Question>,
    /// Most tokens of an answer.
    pub max_tokens: u32,
    /// What the answers must be; `None` checks everything but the text.
    pub expected: Option<AnswerBook>,
}

/// What became of one request. Times count from the start of the load.
#[derive(Debug, Clone)]
pub struct Record {
    /// Id of the question.
    pub question: String,
    /// When it was sent.
    pub started_at: Duration,
    /// When its response ended.
    pub ended_at: Duration,
    /// Time to the first text.
    pub first_text: Option<Duration>,
    /// Longest time between two events once the text had begun.
    pub longest_gap: Duration,
    /// The answer, or in which way it failed.
    pub outcome: Result<Answer, Failure>,
}

/// How far a load is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Progress {
    /// Requests that were sent.
    pub sent: u64,
    /// Requests that ended, the failed ones included.
    pub completed: u64,
    /// Requests that failed.
    pub failed: u64,
}

/// A client for streams.
///
/// # Errors
/// When the process cannot make one.
pub fn http_client() -> Result<Client> {
    http_client_builder().build().context("cannot make an HTTP client")
}

/// What all clients have in common: no proxy, and no endless wait for a connection.
pub fn http_client_builder() -> ClientBuilder {
    crate::install_crypto_provider();
    Client::builder().connect_timeout(CONNECT_TIMEOUT).no_proxy()
}

/// A load in progress.
#[derive(Debug)]
pub struct Load {
    started: Instant,
    streams: JoinSet<Vec<Record>>,
    progress: watch::Receiver<Progress>,
    stop: CancellationToken,
}

struct Shared {
    config: LoadConfig,
    client: Client,
    started: Instant,
    progress: watch::Sender<Progress>,
    stop: CancellationToken,
}

impl Load {
    /// Starts the streams.
    ///
    /// # Errors
    /// When the configuration is past a limit.
    pub fn start(config: LoadConfig) -> Result<Self> {
        ensure!((1..=MAX_CONCURRENCY).contains(&config.concurrency), "use 1 to {MAX_CONCURRENCY} concurrent streams");
        ensure!((1..=MAX_REQUESTS).contains(&config.requests), "use 1 to {MAX_REQUESTS} requests");
        ensure!(!config.questions.is_empty(), "there are no questions to ask");
        let (progress, receiver) = watch::channel(Progress::default());
        let (started, stop) = (Instant::now(), CancellationToken::new());
        let concurrency = config.concurrency;
        let shared = Arc::new(Shared { config, client: http_client()?, started, progress, stop: stop.clone() });
        let mut streams = JoinSet::new();
        for _ in 0..concurrency {
            streams.spawn(Arc::clone(&shared).run_stream());
        }
        Ok(Self { started, streams, progress: receiver, stop })
    }

    /// Time since the start: the clock of the records.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// How far it is.
    #[must_use]
    pub fn progress(&self) -> Progress {
        *self.progress.borrow()
    }

    /// Tells of every change.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Progress> {
        self.progress.clone()
    }

    /// Waits until `count` requests have ended.
    ///
    /// # Errors
    /// When that takes longer than `limit`.
    pub async fn await_completed(&self, count: u64, limit: Duration) -> Result<()> {
        let mut progress = self.progress.clone();
        let reached = timeout(limit, progress.wait_for(|progress| progress.completed >= count)).await;
        let ended = matches!(&reached, Ok(Ok(_)));
        drop(reached);
        ensure!(ended, "{count} requests did not end within {limit:?}: {:?}", self.progress());
        Ok(())
    }

    /// Sends no more, waits for the responses that are on their way and tells what happened.
    ///
    /// # Errors
    /// When a stream's task failed.
    pub async fn finish(self) -> Result<Report> {
        self.stop.cancel();
        self.join().await
    }

    /// Waits until all requests have been sent and answered.
    ///
    /// # Errors
    /// When a stream's task failed.
    pub async fn join(mut self) -> Result<Report> {
        let mut records = Vec::new();
        while let Some(stream) = self.streams.join_next().await {
            records.extend(stream.context("a stream's task failed")?);
        }
        records.sort_by_key(|record| record.started_at);
        Ok(Report { wall: self.started.elapsed(), records })
    }
}

impl Shared {
    async fn run_stream(self: Arc<Self>) -> Vec<Record> {
        let mut records = Vec::new();
        while let Some(number) = self.next_request() {
            let question = &self.config.questions[number % self.config.questions.len()];
            let record = self.request(question).await;
            self.progress.send_modify(|progress| {
                progress.completed += 1;
                progress.failed += u64::from(record.outcome.is_err());
            });
            records.push(record);
        }
        records
    }

    /// Takes the number of the next request, unless there is none.
    fn next_request(&self) -> Option<usize> {
        let mut number = None;
        self.progress.send_if_modified(|progress| {
            let more = progress.sent < self.config.requests && !self.stop.is_cancelled();
            if more {
                number = usize::try_from(progress.sent).ok();
                progress.sent += 1;
            }
            more
        });
        number
    }

    async fn request(&self, question: &Question) -> Record {
        let mut record =
            ask(&self.client, &self.config.target, question, Length::up_to(self.config.max_tokens), |_| {}).await;
        if let (Some(book), Ok(answer)) = (&self.config.expected, &record.outcome)
            && let Err(failure) = book.check(&question.id, answer)
        {
            record.outcome = Err(failure);
        }
        let asked_at = self.started.elapsed().saturating_sub(record.ended_at);
        Record { started_at: asked_at, ended_at: asked_at + record.ended_at, ..record }
    }
}

/// Asks one question, greedily and streamed; `on_text` gets the text as it comes. Times count from the call.
pub async fn ask(
    client: &Client,
    target: &Target,
    question: &Question,
    length: Length,
    on_text: impl FnMut(&str),
) -> Record {
    let mut exchange =
        Exchange { begun: Instant::now(), first_text: None, last_event: None, longest_gap: Duration::ZERO };
    let outcome = match timeout(RESPONSE_TIMEOUT, exchange.run(client, target, question, length, on_text)).await {
        Ok(outcome) => outcome,
        Err(_) => Err(Failure::new(
            FailureKind::Timeout,
            format!("no whole answer to {} in {RESPONSE_TIMEOUT:?}", question.id),
        )),
    };
    Record {
        question: question.id.clone(),
        started_at: Duration::ZERO,
        ended_at: exchange.begun.elapsed(),
        first_text: exchange.first_text,
        longest_gap: exchange.longest_gap,
        outcome,
    }
}

/// The clock of one request.
struct Exchange {
    begun: Instant,
    first_text: Option<Duration>,
    last_event: Option<Instant>,
    longest_gap: Duration,
}

impl Exchange {
    async fn run(
        &mut self,
        client: &Client,
        target: &Target,
        question: &Question,
        length: Length,
        mut on_text: impl FnMut(&str),
    ) -> Result<Answer, Failure> {
        let body = json!({
            "model": target.model, "messages": question.messages,
            "stream": true, "temperature": 0, "max_tokens": length.max_tokens, "ignore_eos": length.ignore_end,
        });
        let lost = |error: reqwest::Error| Failure::new(FailureKind::Connection, causes(&error));
        let url = format!("{}/chat/completions", target.base_url.trim_end_matches('/'));
        let request = client.post(url).header(header::CONTENT_TYPE, "application/json").body(body.to_string());
        let response = request.send().await.map_err(lost)?;
        let status = response.status();
        if status != 200 {
            let detail = format!("{status}: {}", describe_error(&response.text().await.unwrap_or_default()));
            return Err(Failure::new(FailureKind::Status, detail));
        }
        let mut check =
            AnswerCheck::begin(response.headers().get(VERSION_HEADER).and_then(|value| value.to_str().ok()))?;
        let (mut pieces, mut parser) = (response.bytes_stream(), SseParser::default());
        while let Some(piece) = pieces.next().await {
            let piece = piece.map_err(|error| Failure::new(FailureKind::Truncated, causes(&error)))?;
            let events =
                parser.push(&piece).map_err(|error| Failure::new(FailureKind::Malformed, error.to_string()))?;
            for data in events {
                let event = check.event(&data)?;
                self.note(&event);
                if let Event::Text(text) = event {
                    on_text(&text);
                }
            }
        }
        if parser.has_rest() {
            return Err(Failure::new(FailureKind::Truncated, "the stream ended inside an event"));
        }
        check.end()
    }

    fn note(&mut self, event: &Event) {
        let now = Instant::now();
        if self.first_text.is_none() && matches!(event, Event::Text(text) if !text.is_empty()) {
            self.first_text = Some(now - self.begun);
        }
        if self.first_text.is_some() {
            let gap = self.last_event.replace(now).map_or(Duration::ZERO, |last| now - last);
            self.longest_gap = self.longest_gap.max(gap);
        }
    }
}

/// An error with all that caused it: the outermost alone says next to nothing.
fn causes(error: &dyn std::error::Error) -> String {
    std::iter::successors(error.source(), |cause| cause.source())
        .fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// What happened under a load.
#[derive(Debug)]
pub struct Report {
    /// Time from the first request to the last answer.
    pub wall: Duration,
    /// Every request, in the order in which they were sent.
    pub records: Vec<Record>,
}

/// The figures of a [`Report`].
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    /// Requests that ended.
    pub requests: usize,
    /// Of those, failed.
    pub failed: usize,
    /// Failed requests by kind.
    pub failures: BTreeMap<FailureKind, usize>,
    /// Some of the failures.
    pub examples: Vec<Failure>,
    /// Answers by version.
    pub versions: BTreeMap<String, usize>,
    /// Seconds in all.
    pub wall_s: f64,
    /// Requests in a second.
    pub requests_per_s: f64,
    /// Times to the first text.
    pub ttft: Spread,
    /// Longest gap of each stream.
    pub longest_gap: Spread,
}

impl Report {
    /// The failed requests.
    pub fn failures(&self) -> impl Iterator<Item = (&Record, &Failure)> {
        self.records.iter().filter_map(|record| Some((record, record.outcome.as_ref().err()?)))
    }

    /// The answered requests.
    pub fn answers(&self) -> impl Iterator<Item = (&Record, &Answer)> {
        self.records.iter().filter_map(|record| Some((record, record.outcome.as_ref().ok()?)))
    }

    /// The figures.
    #[must_use]
    pub fn summary(&self) -> Summary {
        let (mut failures, mut examples) = (BTreeMap::new(), Vec::new());
        for (record, failure) in self.failures() {
            let count: &mut usize = failures.entry(failure.kind).or_default();
            *count += 1;
            if *count <= FAILURES_SHOWN_OF_KIND {
                let at_s = record.started_at.as_secs_f64();
                examples.push(Failure::new(failure.kind, format!("after {at_s:.3} s: {}", failure.detail)));
            }
        }
        let mut versions = BTreeMap::new();
        for (_, answer) in self.answers() {
            *versions.entry(answer.version.clone()).or_default() += 1;
        }
        let wall_s = self.wall.as_secs_f64();
        Summary {
            requests: self.records.len(),
            failed: failures.values().sum(),
            failures,
            examples,
            versions,
            wall_s,
            requests_per_s: self.records.len() as f64 / wall_s.max(1e-9),
            ttft: Spread::of(self.records.iter().filter_map(|record| record.first_text)),
            longest_gap: Spread::of(self.answers().map(|(record, _)| record.longest_gap)),
        }
    }

    /// Succeeds when no request failed.
    ///
    /// # Errors
    /// With the summary, when one did.
    pub fn ensure_no_failure(&self) -> Result<()> {
        let summary = self.summary();
        ensure!(summary.failed == 0, "requests failed under load\n{summary}");
        Ok(())
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { requests, failed, wall_s, requests_per_s, .. } = self;
        writeln!(f, "{requests} requests in {wall_s:.1} s ({requests_per_s:.0}/s), {failed} failed")?;
        writeln!(f, "  first text   {}", self.ttft)?;
        writeln!(f, "  longest gap  {}", self.longest_gap)?;
        for (version, count) in &self.versions {
            writeln!(f, "  {version}  {count} answers")?;
        }
        for (kind, count) in &self.failures {
            writeln!(f, "  {kind:?}  {count} requests")?;
        }
        for failure in &self.examples {
            writeln!(f, "    {failure}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::atomic::{AtomicU32, Ordering};

    use axum::{Router, response::IntoResponse, routing::post};

    use super::*;
    use crate::models::Since;

    /// A server that answers its first request rightly, the second of two versions, the third not to its end, ...
    async fn scripted() -> Target {
        let count = Arc::new(AtomicU32::new(0));
        let chunk = |version: &str, finish: &str| {
            format!(
                "data: {{\"system_fingerprint\":\"{version}\",\"choices\":[{{\"delta\":{{\"content\":\"Oslo\"}},\"finish_reason\":{finish}}}]}}\n\n"
            )
        };
        let answer = move || async move {
            let end = "data: [DONE]\n\n";
            let body = match count.fetch_add(1, Ordering::Relaxed) {
                0 => chunk("v1", "\"stop\"") + end,
                1 => chunk("v1", "null") + &chunk("v2", "\"stop\"") + end,
                2 => chunk("v1", "null"),
                3 => return (axum::http::StatusCode::SERVICE_UNAVAILABLE, "busy").into_response(),
                _ => chunk("v1", "null") + "data: {\"error\":{\"message\":\"m\",\"type\":\"t\",\"code\":null}}\n\n",
            };
            ([(VERSION_HEADER, "v1")], body).into_response()
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(
            async move { axum::serve(listener, Router::new().route("/v1/chat/completions", post(answer))).await },
        );
        Target { base_url: format!("http://{address}/v1"), model: "chat".to_owned() }
    }

    #[tokio::test]
    async fn every_request_is_counted_and_each_failure_has_its_kind() {
        let config = LoadConfig {
            target: scripted().await,
            concurrency: 1,
            requests: 5,
            questions: vec![Question::plain("q", "?", Since::V1, "Oslo")],
            max_tokens: 8,
            expected: None,
        };
        let summary = Load::start(config).unwrap().join().await.unwrap().summary();
        assert_eq!((summary.requests, summary.failed), (5, 4), "{summary}");
        let kinds = [FailureKind::Status, FailureKind::ErrorEvent, FailureKind::Truncated, FailureKind::MixedVersions];
        assert_eq!(summary.failures, kinds.into_iter().map(|kind| (kind, 1)).collect());
        assert_eq!(summary.versions, BTreeMap::from([("v1".to_owned(), 1)]));
    }

    #[tokio::test]
    async fn a_server_that_is_not_there_is_a_failure() {
        let target = Target { base_url: "http://127.0.0.1:9/v1".to_owned(), model: "chat".to_owned() };
        let question = Question::plain("q", "?", Since::V1, "Oslo");
        let record = ask(&http_client().unwrap(), &target, &question, Length::up_to(8), |_| {}).await;
        assert_eq!(record.outcome.unwrap_err().kind, FailureKind::Connection);
    }
}

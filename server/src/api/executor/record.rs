//! What is known of a request, counted and logged when it ends, however it ends; never its text.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::Request;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use gantry_core::{ApiError, ErrorCode, GenerationEvent, Priority, Prompt, Timings, Usage};
use gantry_rollout::Conversation;

use super::choices::Gathered;
use super::conversation::session;
use super::scheduling::Scheduling;
use crate::api::App;
use crate::api::budget::{Peer, Share};
use crate::api::errors::Failure;
use crate::api::middleware::RequestIdentity;
use crate::console::ENDED;
use crate::metrics::{Latencies, Metrics, Outcome, Route, VersionLabels};
use crate::version::Version;
use crate::version::samples::Drawn;
use crate::version::signals::{Sample, Signals, Tail};

/// What is known of a request before its body.
pub(super) struct Origin {
    arrival: Instant,
    identity: String,
    /// Whose it is.
    pub(super) peer: Peer,
    pub(super) scheduling: Scheduling,
    /// The conversation that its headers name.
    pub(super) session: Option<Conversation>,
}

impl Origin {
    pub(super) fn read(request: &Request) -> Result<Self, Failure> {
        let id = request.extensions().get::<RequestIdentity>().and_then(|id| id.0.to_str().ok());
        let identity = id.unwrap_or_default().to_owned();
        let peer = request.extensions().get::<Peer>().copied().unwrap_or_default();
        let (scheduling, session) = (Scheduling::read(request.headers())?, session(request.headers()));
        Ok(Self { arrival: Instant::now(), identity, peer, scheduling, session })
    }
}

/// Counts one request when it ends, however it ends, and logs it without its text.
pub(super) struct RequestRecord {
    metrics: Arc<Metrics>,
    latencies: Latencies,
    route: Route,
    version: VersionLabels,
    origin: Origin,
    priority: Priority,
    status: u16,
    /// The word for programs of what it failed with.
    code: Option<ErrorCode>,
    outcome: Outcome,
    usage: Usage,
    first_token: Option<Duration>,
    /// When each choice's last text came.
    last_tokens: Vec<Option<Instant>>,
    /// How each choice's text ends, as far as it came.
    tails: Vec<Tail>,
    /// Time that the tokens of all choices after their first ones took.
    decoding: Duration,
    /// How long it waited for the version to be loaded, which is no figure of that.
    held: Duration,
    /// Where how it went is noted.
    signals: Arc<Signals>,
    /// Where it is one of the requests that another version is compared by.
    drawn: Option<Drawn>,
    /// Held as long as the request may hold its prompt.
    _share: Share,
}

impl RequestRecord {
    pub(super) fn new(
        app: &App,
        route: Route,
        version: &Version,
        origin: Origin,
        priority: Priority,
        choices: usize,
        share: Share,
    ) -> Self {
        let labels = VersionLabels::of(version);
        Self {
            metrics: Arc::clone(&app.metrics),
            latencies: app.metrics.latencies(&labels),
            route,
            version: labels,
            origin,
            priority,
            status: 200,
            code: None,
            // What a generation is that nobody waited for to the end.
            outcome: Outcome::Disconnected,
            usage: Usage::default(),
            first_token: None,
            last_tokens: vec![None; choices],
            tails: vec![Tail::default(); choices],
            decoding: Duration::ZERO,
            held: Duration::ZERO,
            signals: version.signals(),
            drawn: None,
            _share: share,
        }
    }

    /// The version has begun with this prompt, by which another one may be compared with it once it is answered.
    pub(super) fn begins(&mut self, version: &Version, prompt: Option<&Arc<Prompt>>) {
        self.drawn = prompt.and_then(|prompt| version.samples().draw(prompt));
    }

    /// Another version has it now, since the one before gave way to it, and had told nothing. `held`: since it came.
    pub(super) fn moved_to(&mut self, version: &Version, held: Duration) {
        self.version = VersionLabels::of(version);
        self.latencies = self.metrics.latencies(&self.version);
        self.signals = version.signals();
        self.held = held;
    }

    /// More of a choice came.
    pub(super) fn output(&mut self, choice: usize, event: &GenerationEvent) {
        if let (GenerationEvent::Text { text, .. } | GenerationEvent::Reasoning { text, .. }, Some(tail)) =
            (event, self.tails.get_mut(choice))
        {
            tail.push(text);
        }
        self.token(choice);
    }

    fn token(&mut self, choice: usize) {
        let now = Instant::now();
        if self.first_token.is_none() {
            self.first(now - self.origin.arrival);
        }
        if let Some(before) = self.last_tokens.get_mut(choice).and_then(|last| last.replace(now)) {
            self.latencies.between_tokens(now - before);
        }
    }

    fn first(&mut self, took: Duration) {
        self.first_token = Some(took);
        self.latencies.first_token(took);
    }

    /// All text came at once, and the engine says how long before its end the first of it was there.
    pub(super) fn first_tokens_of(&mut self, choices: &[Gathered]) {
        let first = |choice: &Gathered| {
            let decoding = Duration::try_from_secs_f64(choice.answer.timings.decode_ms / 1e3).unwrap_or_default();
            choice.at.saturating_duration_since(self.origin.arrival).saturating_sub(decoding)
        };
        if let Some(took) = choices.iter().map(first).min() {
            self.first(took);
        }
        for (choice, tail) in choices.iter().zip(&mut self.tails) {
            let output = &choice.answer.output;
            tail.push(if output.text.is_empty() { &output.reasoning } else { &output.text });
        }
    }

    /// One of its answers came to its end.
    pub(super) fn timed(&mut self, timings: &Timings) {
        self.decoding += Duration::try_from_secs_f64(timings.decode_ms / 1e3).unwrap_or_default();
        self.metrics.timed(&self.version, timings);
    }

    /// All of it came.
    pub(super) fn answered(&mut self, usage: Usage) {
        self.outcome = Outcome::Ok;
        self.usage = usage;
        self.metrics.answered(&self.version, self.origin.arrival.elapsed(), &usage);
    }

    /// An answer that comes whole, or fails so, and what is counted of it: what the client is told, once that is known.
    pub(super) fn settle(mut self, answer: Result<(Bytes, Usage), Failure>) -> Response {
        match answer {
            Ok((body, usage)) => {
                self.answered(usage);
                ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], body).into_response()
            }
            Err(failure) => {
                self.refused(&failure.error);
                failure.into_response()
            }
        }
    }

    /// How it went, as far as that was the version's doing.
    fn sample(&self) -> Option<Sample> {
        // What a model cannot do is not asked of it again.
        let failed = match self.outcome {
            Outcome::Ok => false,
            Outcome::Failed => self.status != 501,
            Outcome::Broken => true,
            Outcome::Refused | Outcome::Disconnected => return None,
        };
        let choices = u32::try_from(self.tails.len()).unwrap_or(u32::MAX);
        let further = self.usage.completion_tokens.saturating_sub(choices);
        Some(Sample {
            failed,
            first_token: self.first_token.map(|first| first.saturating_sub(self.held)),
            per_token: (further > 0).then(|| self.decoding / further),
            degenerate: self.tails.iter().any(Tail::repeats_itself),
        })
    }

    /// It failed before its first byte.
    pub(super) fn refused(&mut self, error: &ApiError) {
        self.status = error.status;
        self.code = Some(error.code.clone());
        self.outcome = Outcome::of_status(error.status);
    }

    /// It failed after its first byte.
    pub(super) fn broken(&mut self, error: &ApiError) {
        self.code = Some(error.code.clone());
        self.outcome = Outcome::Broken;
    }
}

impl Drop for RequestRecord {
    fn drop(&mut self) {
        if let Some(sample) = self.sample() {
            self.signals.ended(sample, Instant::now());
        }
        if let Some(drawn) = self.drawn.take().filter(|_| matches!(self.outcome, Outcome::Ok)) {
            drawn.answered();
        }
        self.metrics.request_ended(self.route, &self.version, self.status, self.outcome);
        self.metrics.prioritised(&self.version, self.priority);
        tracing::info!(
            request_id = self.origin.identity,
            route = self.route.as_str(),
            version = self.version.version,
            status = self.status,
            code = self.code.as_ref().map(ErrorCode::as_str),
            outcome = self.outcome.as_str(),
            priority = self.priority.as_str(),
            choices = self.last_tokens.len(),
            prompt_tokens = self.usage.prompt_tokens,
            cached_tokens = self.usage.cached_tokens,
            completion_tokens = self.usage.completion_tokens,
            first_token_ms = self.first_token.map(|d| d.as_secs_f64() * 1e3),
            duration_ms = self.origin.arrival.elapsed().as_secs_f64() * 1e3,
            "{}",
            ENDED
        );
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde::ser::Error;

    use super::*;
    use crate::api::budget::Budget;
    use crate::api::executor::Writers;
    use crate::limits::OUTPUT_BUDGET_BYTES;
    use crate::output::Output;
    use crate::routing::Router;

    #[tokio::test]
    async fn an_answer_that_cannot_be_written_is_counted_as_the_client_is_told() {
        let metrics = Metrics::new(Router::new(), Output::new(OUTPUT_BUDGET_BYTES), None, None);
        let version = VersionLabels { version: "v1".to_owned(), model: "m".to_owned() };
        for (can_be_written, status, outcome) in [(true, 200, "ok"), (false, 500, "failed")] {
            let record = RequestRecord {
                metrics: Arc::clone(&metrics),
                latencies: metrics.latencies(&version),
                route: Route::Chat,
                version: version.clone(),
                origin: Origin {
                    arrival: Instant::now(),
                    identity: String::new(),
                    peer: Peer::default(),
                    scheduling: Scheduling::read(&axum::http::HeaderMap::new()).unwrap(),
                    session: None,
                },
                priority: Priority::Normal,
                status: 200,
                code: None,
                outcome: Outcome::Disconnected,
                usage: Usage::default(),
                first_token: None,
                last_tokens: Vec::new(),
                tails: Vec::new(),
                decoding: Duration::ZERO,
                held: Duration::ZERO,
                signals: Arc::default(),
                drawn: None,
                _share: Budget::new(1).open(Peer::default()),
            };
            let write = move || if can_be_written { Ok(vec![]) } else { Err(serde_json::Error::custom("no")) };
            let written = Writers::new().write(0, (), |(), _| Ok(()), write).await;
            let usage = Usage { prompt_tokens: 5, ..Default::default() };
            assert_eq!(record.settle(written.map(|body| (body, usage))).status().as_u16(), status);
            let line = format!(
                "gantry_requests_total{{route=\"chat_completions\",version=\"v1\",model=\"m\",status=\"{status}\",outcome=\"{outcome}\"}} 1"
            );
            let text = metrics.encode().unwrap();
            assert!(text.contains(&line), "{line} is missing in:\n{text}");
            assert!(
                text.contains("gantry_prompt_tokens_total{version=\"v1\",model=\"m\"} 5"),
                "the tokens of one answer:\n{text}"
            );
        }
    }
}

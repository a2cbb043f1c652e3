//! `/v1/chat/completions` and `/v1/completions`: from a body to an answer.
//!
//! The version is chosen once, when the request is submitted, and everything after (the model's name, the header, the
//! fingerprint, each token) comes from that one. Only where a version refuses because it was retired between the
//! choice and the submission is another one chosen; it has seen nothing of the request.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use gantry_core::{Priority, Prompt, Timings, Usage};
use gantry_openai::parameters::cannot_stop_thinking;
use gantry_openai::{ApiError, Common, ErrorCode, ValidChatRequest, ValidCompletionRequest};

use super::answer::{Envelope, Shape};
use super::budget::{Peer, Share};
use super::choices::{Choices, Gathered, Uncollected};
use super::errors::{Failure, of_submission, unanswered};
use super::middleware::{CountedLater, RequestIdentity};
use super::params::{Scheduling, seed_of};
use super::{App, body, stream};
use crate::console::ENDED;
use crate::limits::SUBMIT_ATTEMPTS;
use crate::metrics::{Latencies, Metrics, Outcome, Route, VersionLabels};
use crate::output::Collected;
use crate::version::{GenerateRequest, Generation, SubmitError, Version};

/// The header that names the version that answered.
pub(super) const VERSION_HEADER: HeaderName = HeaderName::from_static("x-gantry-version");

pub(super) async fn chat(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let origin = Origin::read(&request)?;
    let (body, share) = body::read(&app.bodies, request).await?;
    let valid = ValidChatRequest::parse(&body)?;
    drop(body);
    let prompt = Prompt::Chat(valid.messages);
    answer(&app, Asked { shape: Shape::Chat, prompts: vec![prompt], common: valid.common, origin, share }).await
}

pub(super) async fn completion(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let origin = Origin::read(&request)?;
    let (body, share) = body::read(&app.bodies, request).await?;
    let ValidCompletionRequest { prompts, common } = ValidCompletionRequest::parse(&body)?;
    drop(body);
    answer(&app, Asked { shape: Shape::Text, prompts, common, origin, share }).await
}

/// What is asked, in full.
struct Asked {
    shape: Shape,
    prompts: Vec<Prompt>,
    common: Common,
    origin: Origin,
    share: Share,
}

/// What is known of a request before its body.
pub(super) struct Origin {
    arrival: Instant,
    identity: String,
    /// Whose it is.
    pub(super) peer: Peer,
    pub(super) scheduling: Scheduling,
}

impl Origin {
    pub(super) fn read(request: &Request) -> Result<Self, Failure> {
        let id = request.extensions().get::<RequestIdentity>().and_then(|id| id.0.to_str().ok());
        let identity = id.unwrap_or_default().to_owned();
        let peer = request.extensions().get::<Peer>().copied().unwrap_or_default();
        Ok(Self { arrival: Instant::now(), identity, peer, scheduling: Scheduling::read(request.headers())? })
    }
}

async fn answer(app: &Arc<App>, asked: Asked) -> Result<Response, Failure> {
    let Asked { shape, prompts, mut common, origin, share } = asked;
    let prompt_param = shape.prompt_param();
    common.params.priority = origin.scheduling.priority_over(common.params.priority);
    common.params.queue_timeout_ms = origin.scheduling.queue_timeout_ms;
    let request = |prompt| GenerateRequest { prompt: Arc::new(prompt), params: common.params.clone() };
    let requests: Vec<GenerateRequest> = prompts.into_iter().map(request).collect();
    let (version, choices) = submit(app, origin.peer, &requests, &common, prompt_param).await?;
    let priority = common.params.priority;
    let observed = Observed::new(app, shape.route(), &version, origin, Some(priority), choices.total(), share);
    let envelope = Envelope::new(shape, &version, &common);
    let mut response = if common.streaming.enabled {
        stream::respond(choices, envelope, observed, prompt_param, &version).await
    } else {
        whole(app, choices, envelope, observed, prompt_param, &version).await
    };
    response.extensions_mut().insert(CountedLater);
    if let Ok(name) = HeaderValue::from_str(&version.spec().name) {
        response.headers_mut().insert(VERSION_HEADER, name);
    }
    Ok(response)
}

async fn submit(
    app: &App,
    client: Peer,
    requests: &[GenerateRequest],
    common: &Common,
    prompt_param: &'static str,
) -> Result<(Arc<Version>, Choices), Failure> {
    let answers = requests.len().saturating_mul(common.choices as usize);
    let mut last = None;
    for _ in 0..SUBMIT_ATTEMPTS {
        let version = app.check_model(|served| common.check_model(served))?;
        if let Some(param) = common.unthinking
            && version.model().is_some_and(|model| model.thinks)
        {
            return Err(cannot_stop_thinking(param).into());
        }
        let most = version.capacity();
        if answers > most {
            // Later it would be no better, so this is no 429.
            let param = if requests.len() > 1 { prompt_param } else { "n" };
            let message =
                format!("`{param}` must ask for at most {most} answers: no more requests run and wait here at a time.");
            return Err(ApiError::invalid(Some(Cow::Borrowed(param)), ErrorCode::InvalidValue, message).into());
        }
        match submit_all(&version, client, requests, common.choices).await {
            Ok(generations) => return Ok((version, Choices::new(generations))),
            Err(retired @ SubmitError::Retired) => last = Some(retired),
            Err(other) => return Err(of_submission(other)),
        }
        tokio::task::yield_now().await;
    }
    Err(of_submission(last.unwrap_or(SubmitError::Retired)))
}

/// Submits one request for each answer to each prompt, all or none.
async fn submit_all(
    version: &Version,
    client: Peer,
    requests: &[GenerateRequest],
    choices: u32,
) -> Result<Vec<Generation>, SubmitError> {
    let of_choice = |request: &GenerateRequest, choice| {
        let mut request = request.clone();
        request.params.seed = seed_of(request.params.seed, choice);
        request
    };
    let of_prompt = |request| (0..choices).map(move |choice| of_choice(request, choice));
    version.submit_all(client, requests.iter().flat_map(of_prompt).collect()).await
}

async fn whole(
    app: &App,
    choices: Choices,
    envelope: Envelope,
    mut observed: Observed,
    prompt_param: &'static str,
    version: &Version,
) -> Response {
    let mut collected = Collected::new(&app.output);
    let whole = match choices.collect_all(&mut collected).await {
        Ok(whole) => whole,
        Err(Uncollected::Failed(error)) => {
            return observed.settle(Err(unanswered(error, prompt_param, version.retry_after())));
        }
        Err(Uncollected::TooMuch(what)) => return observed.settle(Err(Failure::too_much_to_collect(what))),
    };
    observed.first_tokens_of(&whole);
    whole.iter().for_each(|choice| observed.timed(&choice.timings));
    let usages: Vec<_> = whole.iter().map(|choice| choice.usage).collect();
    let usage = envelope.sum_of(&usages);
    let bytes = collected.bytes();
    let written = app.writers.write(bytes, collected, Collected::become_written, move || envelope.whole(whole)).await;
    observed.settle(written.map(|body| (body, usage)))
}

/// Counts one request when it ends, however it ends, and logs it without its text.
pub(super) struct Observed {
    metrics: Arc<Metrics>,
    latencies: Latencies,
    route: Route,
    version: VersionLabels,
    origin: Origin,
    /// `None` where there is but one.
    priority: Option<Priority>,
    status: u16,
    /// The word for programs of what it failed with.
    code: Option<ErrorCode>,
    outcome: Outcome,
    usage: Usage,
    first_token: Option<Duration>,
    /// When each choice's last text came.
    last_tokens: Vec<Option<Instant>>,
    /// Held as long as the request may hold its prompt.
    _share: Share,
}

impl Observed {
    pub(super) fn new(
        app: &App,
        route: Route,
        version: &Version,
        origin: Origin,
        priority: Option<Priority>,
        choices: usize,
        share: Share,
    ) -> Self {
        let version = VersionLabels::of(version);
        Self {
            metrics: Arc::clone(&app.metrics),
            latencies: app.metrics.latencies(&version),
            route,
            version,
            origin,
            priority,
            status: 200,
            code: None,
            // What a generation is that nobody waited for to the end.
            outcome: Outcome::Disconnected,
            usage: Usage::default(),
            first_token: None,
            last_tokens: vec![None; choices],
            _share: share,
        }
    }

    /// Text of a choice came.
    pub(super) fn token(&mut self, choice: usize) {
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
    fn first_tokens_of(&mut self, choices: &[Gathered]) {
        let first = |choice: &Gathered| {
            let decoding = Duration::try_from_secs_f64(choice.timings.decode_ms / 1e3).unwrap_or_default();
            choice.at.saturating_duration_since(self.origin.arrival).saturating_sub(decoding)
        };
        if let Some(took) = choices.iter().map(first).min() {
            self.first(took);
        }
    }

    /// One of its answers came to its end.
    pub(super) fn timed(&self, timings: &Timings) {
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

impl Drop for Observed {
    fn drop(&mut self) {
        self.metrics.request_ended(self.route, &self.version, self.status, self.outcome);
        if let Some(priority) = self.priority {
            self.metrics.prioritised(&self.version, priority);
        }
        tracing::info!(
            request_id = self.origin.identity,
            route = self.route.as_str(),
            version = self.version.version,
            status = self.status,
            code = self.code.as_ref().map(ErrorCode::as_str),
            outcome = self.outcome.as_str(),
            priority = self.priority.map(Priority::as_str),
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
    use crate::api::written::Writers;
    use crate::limits::OUTPUT_BUDGET_BYTES;
    use crate::output::Output;
    use crate::routing::Router;

    #[tokio::test]
    async fn an_answer_that_cannot_be_written_is_counted_as_the_client_is_told() {
        let metrics = Metrics::new(Router::new(), Output::new(OUTPUT_BUDGET_BYTES), None);
        let version = VersionLabels { version: "v1".to_owned(), model: "m".to_owned() };
        for (can_be_written, status, outcome) in [(true, 200, "ok"), (false, 500, "failed")] {
            let observed = Observed {
                metrics: Arc::clone(&metrics),
                latencies: metrics.latencies(&version),
                route: Route::Chat,
                version: version.clone(),
                origin: Origin {
                    arrival: Instant::now(),
                    identity: String::new(),
                    peer: Peer::default(),
                    scheduling: Scheduling::read(&axum::http::HeaderMap::new()).unwrap(),
                },
                priority: None,
                status: 200,
                code: None,
                outcome: Outcome::Disconnected,
                usage: Usage::default(),
                first_token: None,
                last_tokens: Vec::new(),
                _share: Budget::new(1).open(Peer::default()),
            };
            let write = move || if can_be_written { Ok(vec![]) } else { Err(serde_json::Error::custom("no")) };
            let written = Writers::new().write(0, (), |(), _| Ok(()), write).await;
            let usage = Usage { prompt_tokens: 5, ..Default::default() };
            assert_eq!(observed.settle(written.map(|body| (body, usage))).status().as_u16(), status);
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

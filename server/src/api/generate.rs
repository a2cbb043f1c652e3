//! `/v1/chat/completions` and `/v1/completions`: from a body to an answer.
//!
//! The version is chosen once, when the request is submitted, and everything after (the model's name, the header, the
//! fingerprint, each token) comes from that one. Only where a version refuses because it was retired between the
//! choice and the submission is another one chosen; it has seen nothing of the request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use gantry_engine::{GenerationParams, Prompt};
use gantry_openai::{ApiError, Sampling, Streaming, ValidChatRequest, ValidCompletionRequest};

use super::answer::{Envelope, Shape};
use super::errors::{Failure, of_generation, of_submission};
use super::middleware::{CountedLater, RequestIdentity};
use super::stream;
use super::{App, body};
use crate::limits::SUBMIT_ATTEMPTS;
use crate::metrics::{Metrics, Outcome};
use crate::version::{GenerateRequest, Generation, SubmitError, Version};

/// The header that names the version that answered.
pub(super) const VERSION_HEADER: HeaderName = HeaderName::from_static("x-gantry-version");

pub(super) async fn chat(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let (arrival, identity) = (Instant::now(), identity(&request));
    let (body, share) = body::read(&app.bodies, request).await?;
    let valid = ValidChatRequest::parse(&body)?;
    let prompt = Prompt::Chat { messages_json: valid.messages_json() };
    let asked = Asked {
        shape: Shape::Chat,
        request: GenerateRequest { prompt, params: params(valid.sampling.clone()) },
        streaming: valid.streaming,
        arrival,
        identity,
        share,
    };
    answer(&app, asked, |served| valid.check_model(served)).await
}

pub(super) async fn completion(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let (arrival, identity) = (Instant::now(), identity(&request));
    let (body, share) = body::read(&app.bodies, request).await?;
    let mut valid = ValidCompletionRequest::parse(&body)?;
    let asked = Asked {
        shape: Shape::Text,
        request: GenerateRequest {
            prompt: Prompt::Text(std::mem::take(&mut valid.prompt)),
            params: params(valid.sampling.clone()),
        },
        streaming: valid.streaming,
        arrival,
        identity,
        share,
    };
    answer(&app, asked, |served| valid.check_model(served)).await
}

struct Asked {
    shape: Shape,
    request: GenerateRequest,
    streaming: Streaming,
    arrival: Instant,
    identity: String,
    share: body::Share,
}

fn identity(request: &Request) -> String {
    let id = request.extensions().get::<RequestIdentity>().and_then(|id| id.0.to_str().ok());
    id.unwrap_or_default().to_owned()
}

fn params(sampling: Sampling) -> GenerationParams {
    GenerationParams {
        max_tokens: sampling.max_tokens,
        temperature: sampling.temperature,
        top_p: sampling.top_p,
        top_k: sampling.top_k,
        min_p: sampling.min_p,
        seed: sampling.seed,
        stop: sampling.stop,
        ignore_eos: sampling.ignore_eos,
        ..GenerationParams::default()
    }
}

async fn answer(
    app: &Arc<App>,
    asked: Asked,
    check_model: impl Fn(&[&str]) -> Result<(), ApiError>,
) -> Result<Response, Failure> {
    let Asked { shape, request, streaming, arrival, identity, share } = asked;
    let (version, generation) = submit(app, request, check_model).await?;
    let observed = Observed::new(app, shape, &version, arrival, identity, share);
    let envelope = Envelope::new(shape, &version, streaming.include_usage);
    let mut response = if streaming.enabled {
        stream::respond(generation, envelope, observed, shape).await
    } else {
        whole(generation, &envelope, observed, shape).await
    };
    response.extensions_mut().insert(CountedLater);
    if let Ok(name) = HeaderValue::from_str(&version.spec().name) {
        response.headers_mut().insert(VERSION_HEADER, name);
    }
    Ok(response)
}

async fn submit(
    app: &App,
    request: GenerateRequest,
    check_model: impl Fn(&[&str]) -> Result<(), ApiError>,
) -> Result<(Arc<Version>, Generation), Failure> {
    let mut last = None;
    for _ in 0..SUBMIT_ATTEMPTS {
        let version = app.router.active().ok_or_else(|| Failure::not_ready(&app.why_no_version()))?;
        check_model(&[&version.spec().served_name, &version.spec().name])?;
        match version.submit(request.clone()).await {
            Ok(generation) => return Ok((version, generation)),
            Err(retired @ SubmitError::Retired) => last = Some(retired),
            Err(other) => return Err(of_submission(other)),
        }
        tokio::task::yield_now().await;
    }
    Err(of_submission(last.unwrap_or(SubmitError::Retired)))
}

async fn whole(generation: Generation, envelope: &Envelope, mut observed: Observed, shape: Shape) -> Response {
    match generation.collect().await {
        Ok(completion) => {
            observed.first_token_after(&completion.timings);
            observed.answered(completion.usage);
            match envelope.whole(completion) {
                Ok(body) => Json(body).into_response(),
                Err(error) => Failure::internal(&error).into_response(),
            }
        }
        Err(error) => {
            let error = of_generation(error, shape.prompt_param());
            observed.refused(error.status);
            Failure::from(error).into_response()
        }
    }
}

/// Counts one generation when it ends, however it ends, and logs it without its text.
pub(super) struct Observed {
    metrics: Arc<Metrics>,
    shape: Shape,
    version: String,
    identity: String,
    arrival: Instant,
    status: u16,
    outcome: Outcome,
    usage: gantry_engine::Usage,
    first_token: Option<Duration>,
    last_token: Option<Instant>,
    /// Held as long as the request may hold its prompt.
    _share: body::Share,
}

impl Observed {
    fn new(app: &App, shape: Shape, version: &Version, arrival: Instant, identity: String, share: body::Share) -> Self {
        Self {
            metrics: Arc::clone(&app.metrics),
            shape,
            version: version.spec().name.clone(),
            identity,
            arrival,
            status: 200,
            // What a generation is that nobody waited for to the end.
            outcome: Outcome::Disconnected,
            usage: gantry_engine::Usage::default(),
            first_token: None,
            last_token: None,
            _share: share,
        }
    }

    /// Text came.
    pub(super) fn token(&mut self) {
        let now = Instant::now();
        match self.last_token.replace(now) {
            None => {
                let took = now - self.arrival;
                self.first_token = Some(took);
                self.metrics.first_token(&self.version, took);
            }
            Some(before) => self.metrics.between_tokens(&self.version, now - before),
        }
    }

    /// All text came at once, and the engine says when the first of it was there.
    fn first_token_after(&mut self, timings: &gantry_engine::Timings) {
        let milliseconds = (timings.queue_ms + timings.prefill_ms).max(0.0);
        if let Ok(took) = Duration::try_from_secs_f64(milliseconds / 1e3) {
            self.first_token = Some(took);
            self.metrics.first_token(&self.version, took);
        }
    }

    /// All of it came.
    pub(super) fn answered(&mut self, usage: gantry_engine::Usage) {
        self.outcome = Outcome::Ok;
        self.usage = usage;
        let took = self.arrival.elapsed();
        self.metrics.answered(&self.version, took, usage.prompt_tokens, usage.completion_tokens);
    }

    /// It failed before its first byte.
    pub(super) fn refused(&mut self, status: u16) {
        self.status = status;
        self.outcome = Outcome::of_status(status);
    }

    /// It failed after its first byte.
    pub(super) fn broken(&mut self) {
        self.outcome = Outcome::Broken;
    }
}

impl Drop for Observed {
    fn drop(&mut self) {
        self.metrics.request_ended(self.shape.route(), &self.version, self.status, self.outcome);
        tracing::info!(
            request_id = self.identity,
            route = self.shape.route().as_str(),
            version = self.version,
            status = self.status,
            outcome = self.outcome.as_str(),
            prompt_tokens = self.usage.prompt_tokens,
            completion_tokens = self.usage.completion_tokens,
            first_token_ms = self.first_token.map(|d| d.as_secs_f64() * 1e3),
            duration_ms = self.arrival.elapsed().as_secs_f64() * 1e3,
            "request ended"
        );
    }
}

//! HTTP: connections' requests, from an address to a protocol.
//!
//! [`routes`] lists the addresses. A protocol is a file with decoders and encoders ([`openai`], [`responses`], [`anthropic`]); what its requests need is the
//! [`executor`]'s, whichever it is: bodies read within limits ([`body`]), a version, an answer, a record. Responses that are kept are [`stored`]'s. [`errors`] tells what
//! went wrong as an error object, whatever it was: an unknown address, a wrong method and a panic too. [`ready`] says whether a
//! token can be decoded now. [`grpc`] is a protocol like the others, at a port of its own. Absent: HTTP/2 but for that, and TLS, as in
//! llama-server behind a service.

mod anthropic;
mod body;
mod budget;
mod cors;
mod errors;
mod executor;
mod generate;
mod grpc;
mod middleware;
mod models;
mod names;
mod openai;
mod openapi;
mod operations;
mod paths;
mod props;
mod ready;
mod responses;
mod routes;
mod shape;
mod stats;
mod stored;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use gantry_core::ApiError;
use gantry_rollout::Conversation;
use tokio::sync::Semaphore;
use tokio_util::task::TaskTracker;
use tower_http::catch_panic::CatchPanicLayer;

use crate::front::FrontLimits;
use crate::hold::LineClosed;
use crate::keys::{ApiKeys, KeySources};
use crate::limits::MAX_BODY_JSON_BYTES;
use crate::metrics::{METRICS_CONTENT_TYPE, Metrics};
use crate::output::Output;
use crate::response_store::ResponseStore;
use crate::routing::Router;
use crate::version::Version;
use budget::Budget;
pub use budget::Peer;
pub use cors::Origins;
use errors::Failure;
use executor::{Background, Writers};
pub use names::ModelNames;

/// Whom an application answers, by which names, and where it keeps responses.
pub struct AppSettings {
    /// Who may ask.
    pub keys: Arc<ApiKeys>,
    /// The model's names.
    pub names: ModelNames,
    /// Where responses are kept; without, none are.
    pub responses: Option<Arc<ResponseStore>>,
}

impl Default for AppSettings {
    fn default() -> Self {
        Self { keys: ApiKeys::new(KeySources::default()), names: ModelNames::default(), responses: None }
    }
}

/// What all requests share.
pub struct App {
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    bodies: Budget,
    /// KiB that bodies take as values while they are decoded.
    decoding: Arc<Semaphore>,
    /// What answers with vectors take, which must not have small bodies wait behind large answers.
    answers: Budget,
    output: Arc<Output>,
    writers: Writers,
    limits: FrontLimits,
    keys: Arc<ApiKeys>,
    names: ModelNames,
    responses: Option<Arc<ResponseStore>>,
    background: Background,
}

impl App {
    /// An application that serves what `router` holds. `output`: of the workers of its versions; `service`: the InferenceService that it belongs to, in a pod.
    #[must_use]
    pub fn new(
        router: Arc<Router>,
        output: Arc<Output>,
        limits: FrontLimits,
        settings: AppSettings,
        service: Option<String>,
    ) -> Arc<Self> {
        let AppSettings { keys, names, responses } = settings;
        let stored = responses.as_ref().map(|store| store.metrics());
        let metrics = Metrics::new(Arc::clone(&router), Arc::clone(&output), service, stored);
        Arc::new(Self {
            router,
            metrics,
            bodies: Budget::new(limits.bodies_bytes),
            decoding: Arc::new(Semaphore::new(MAX_BODY_JSON_BYTES >> 10)),
            answers: Budget::new(limits.vectors_bytes),
            limits,
            keys,
            names,
            responses,
            background: Background::new(),
            output,
            writers: Writers::new(),
        })
    }

    /// The metrics, for those who count outside of requests.
    #[must_use]
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// How much memory the front may take.
    #[must_use]
    pub fn limits(&self) -> FrontLimits {
        self.limits
    }

    /// The version that answers a request of this conversation, unless that asks for another model; `None`: whichever is served.
    fn version_for<'a>(
        &self,
        model: Option<&str>,
        conversation: impl FnOnce() -> &'a Conversation,
    ) -> Result<Arc<Version>, Failure> {
        let candidate = self.router.canary_of(conversation);
        match candidate.filter(|candidate| self.names.check(model, candidate.spec()).is_ok()) {
            Some(candidate) => Ok(candidate),
            None => self.active_for(model),
        }
    }

    /// The active version, unless the request asks for another model than it; `None`: whichever is served.
    fn active_for(&self, model: Option<&str>) -> Result<Arc<Version>, Failure> {
        let version = self.router.active().ok_or_else(|| self.no_version())?;
        self.names.check(model, version.spec())?;
        Ok(version)
    }

    /// Refuses a request for another model than the one that is loaded, before it waits for that.
    fn check_first(&self, model: Option<&str>) -> Result<(), ApiError> {
        self.router.first().map_or(Ok(()), |first| self.names.check(model, first))
    }

    /// Whether it is the active version, and no candidate.
    fn is_active(&self, version: &Arc<Version>) -> bool {
        self.router.active().is_some_and(|active| Arc::ptr_eq(&active, version))
    }

    /// What a request hears while there is no version.
    fn no_version(&self) -> Failure {
        Failure::not_ready(&self.why_no_version(), self.version_after())
    }

    /// When there will be a version, as far as can be told: when what is being loaded is.
    fn version_after(&self) -> Duration {
        self.router.held().retry_after()
    }

    /// From now on the server says that it is not ready, and that each connection ends with its answer; requests are still
    /// served.
    pub fn start_draining(&self) {
        self.router.end();
        // Those who wait for a model that nobody has seen answer can be answered elsewhere sooner.
        if self.router.held().is_first() {
            self.router.held().close(LineClosed::ServerEnds);
        }
        self.output.hurry();
    }

    /// The responses that are answered in the background.
    pub(crate) fn background(&self) -> &TaskTracker {
        self.background.running()
    }

    /// What answers hold until their clients have taken it.
    pub(crate) fn output(&self) -> &Arc<Output> {
        &self.output
    }

    /// Whether the server is about to end.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.router.is_ending()
    }

    /// Whether connections are to end with the answers that are under way: it drains, or other pods are to answer by now.
    pub fn ends_connections(&self) -> bool {
        self.is_draining() || self.router.stands_by() || self.router.is_quarantined()
    }
}

/// All addresses.
pub fn routes(app: &Arc<App>) -> axum::Router {
    routes::all()
        .with_state(Arc::clone(app))
        .layer(CatchPanicLayer::custom(errors::panicked))
        .layer(from_fn_with_state(Arc::clone(app), middleware::authorize))
        .layer(from_fn(shape::shape))
        .layer(from_fn_with_state(Arc::clone(app), middleware::count))
        .layer(from_fn(middleware::request_id))
}

/// What the port of gRPC answers, so many calls at once.
pub fn call_routes(app: &Arc<App>, calls: usize) -> axum::Router {
    routes::calls()
        .with_state(Arc::clone(app))
        .layer(CatchPanicLayer::custom(errors::panicked))
        .layer(from_fn_with_state(Arc::clone(app), middleware::authorize))
        .layer(from_fn_with_state(grpc::Places::new(calls), grpc::enter))
        .layer(from_fn_with_state(Arc::clone(app), middleware::count))
        .layer(from_fn(grpc::call))
        .layer(from_fn(middleware::request_id))
}

/// What the port of probes and metrics answers.
pub fn probe_routes(app: &Arc<App>) -> axum::Router {
    routes::probes().with_state(Arc::clone(app)).layer(CatchPanicLayer::custom(errors::panicked))
}

async fn scrape(State(app): State<Arc<App>>) -> Response {
    match app.metrics.encode() {
        Ok(text) => ([(header::CONTENT_TYPE, METRICS_CONTENT_TYPE)], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

//! What is asked about the server itself: its health, as `/readyz` says it, and which services there are.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};

use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use futures::Stream;
use gantry_generate::grpc::{FILE_DESCRIPTORS, SERVICE};
use tokio::time::{Instant, sleep};
use tonic::Status;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_reflection::server::Builder;
use tower::util::BoxCloneSyncService;
use tower::{Service, ServiceExt};

use super::body::Ending;
use crate::api::errors::Failure;
use crate::api::{App, body, ready};
use crate::limits::{HEALTH_WATCH_PERIOD, MAX_QUESTION_BYTES, REFLECTION_LIMIT};

/// Answers `Check` and `Watch`, for the server as a whole and for the one service.
pub(in crate::api) async fn health(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let mut question = Request::new(());
    *question.method_mut() = request.method().clone();
    *question.uri_mut() = request.uri().clone();
    *question.headers_mut() = request.headers().clone();
    // Within the limits of all bodies.
    let (asked, _share) = body::read(&app.bodies, request).await?;
    let mut server = HealthServer::new(HealthOf(app)).max_decoding_message_size(MAX_QUESTION_BYTES);
    let answer: Result<_, Infallible> = Service::call(&mut server, question.map(|()| Body::from(asked))).await;
    let response = answer.unwrap_or_else(|never| match never {});
    Ok(response.map(Body::new))
}

struct HealthOf(Arc<App>);

impl HealthOf {
    async fn status(&self, service: &str) -> Option<ServingStatus> {
        if !(service.is_empty() || service == SERVICE) {
            return None;
        }
        Some(if ready::is_ready(&self.0).await { ServingStatus::Serving } else { ServingStatus::NotServing })
    }
}

fn told(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

#[tonic::async_trait]
impl Health for HealthOf {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn check(
        &self,
        request: tonic::Request<HealthCheckRequest>,
    ) -> Result<tonic::Response<HealthCheckResponse>, Status> {
        let status = self.status(&request.get_ref().service).await;
        let status =
            status.ok_or_else(|| Status::not_found(format!("there is {SERVICE} here, and no other service")))?;
        Ok(tonic::Response::new(told(status)))
    }

    /// Tells each change, and ends with the server, which waits for nobody who only watches it.
    async fn watch(
        &self,
        request: tonic::Request<HealthCheckRequest>,
    ) -> Result<tonic::Response<Self::WatchStream>, Status> {
        let (health, service) = (Self(Arc::clone(&self.0)), request.into_inner().service);
        let changes = async_stream::stream! {
            let mut before = None;
            loop {
                let ends = health.0.is_draining();
                let status = health.status(&service).await.unwrap_or(ServingStatus::ServiceUnknown);
                if before.replace(status) != Some(status) {
                    yield Ok(told(status));
                }
                if ends {
                    return;
                }
                sleep(HEALTH_WATCH_PERIOD).await;
            }
        };
        Ok(tonic::Response::new(Box::pin(changes)))
    }
}

type Reflection = BoxCloneSyncService<Request, Response, Infallible>;

/// Tells which services there are, and what their messages are, by both versions of the protocol.
pub(in crate::api) async fn reflection(request: Request) -> Result<Response, Failure> {
    static SERVERS: OnceLock<Result<[Reflection; 2], tonic_reflection::server::Error>> = OnceLock::new();
    let [v1, v1alpha] = SERVERS.get_or_init(servers).as_ref().map_err(Failure::internal)?;
    let server = if request.uri().path().contains("v1alpha") { v1alpha } else { v1 };
    // Who asks time and again asks anew; the end of the server waits for nobody who may ask more.
    let until = Instant::now() + REFLECTION_LIMIT;
    let answer = server.clone().oneshot(request.map(|body| Body::new(Ending::new(body, until)))).await;
    Ok(answer.unwrap_or_else(|never| match never {}))
}

fn servers() -> Result<[Reflection; 2], tonic_reflection::server::Error> {
    let told = || {
        let builder = Builder::configure().register_encoded_file_descriptor_set(FILE_DESCRIPTORS);
        builder.register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let v1 = told().build_v1()?.max_decoding_message_size(MAX_QUESTION_BYTES);
    let v1alpha = told().build_v1alpha()?.max_decoding_message_size(MAX_QUESTION_BYTES);
    let body = |response: axum::http::Response<tonic::body::Body>| response.map(Body::new);
    Ok([
        BoxCloneSyncService::new(ServiceExt::<Request>::map_response(v1, body)),
        BoxCloneSyncService::new(ServiceExt::<Request>::map_response(v1alpha, body)),
    ])
}

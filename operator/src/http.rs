//! The operator's own port: `/healthz` (the process lives), `/readyz` (it leads with full stores, or stands by having
//! reached the API server) and `/metrics`.

use std::sync::Arc;

use axum::{
    Router,
    extract::{DefaultBodyLimit, State},
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::get,
};
use tokio::sync::watch;

use crate::{limits::HTTP_BODY_BYTES_MAX, metrics::Metrics};

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What the operator is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// It has not reached the API server yet.
    Starting,
    /// Another operator leads; this one takes over when that one ends.
    Standby,
    /// It holds the lease and fills its stores.
    Filling,
    /// It acts.
    Leading,
}

#[derive(Clone)]
struct Shared {
    role: watch::Receiver<Role>,
    metrics: Arc<Metrics>,
}

/// The routes of the operator's port.
pub fn router(role: watch::Receiver<Role>, metrics: Arc<Metrics>) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics_text))
        .layer(DefaultBodyLimit::max(HTTP_BODY_BYTES_MAX))
        .with_state(Shared { role, metrics })
}

async fn ready(State(shared): State<Shared>) -> (StatusCode, &'static str) {
    match *shared.role.borrow() {
        Role::Starting => (StatusCode::SERVICE_UNAVAILABLE, "the API server has not answered yet"),
        Role::Filling => (StatusCode::SERVICE_UNAVAILABLE, "the stores are being filled"),
        Role::Standby => (StatusCode::OK, "standing by"),
        Role::Leading => (StatusCode::OK, "leading"),
    }
}

async fn metrics_text(State(shared): State<Shared>) -> Response {
    match shared.metrics.text() {
        Ok(text) => ([(CONTENT_TYPE, OPEN_METRICS)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

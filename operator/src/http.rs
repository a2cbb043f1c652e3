//! The operator's own port: `/healthz` (the process lives), `/readyz` (it leads with full stores, or stands by having
//! reached the API server) and `/metrics`.

use std::sync::Arc;

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::get,
};
use tokio::sync::watch;

use crate::metrics::Metrics;

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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use axum::{body::Body, http::Request};
    use http_body_util::BodyExt;
    use tower::ServiceExt;

    use super::*;

    async fn get(role: Role, path: &str) -> (StatusCode, String) {
        let (_sender, seen) = watch::channel(role);
        let request = Request::get(path).body(Body::empty()).unwrap();
        let response = router(seen, Arc::default()).oneshot(request).await.unwrap();
        let status = response.status();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn it_is_ready_when_it_leads_or_stands_by() {
        for (role, status) in [(Role::Starting, 503), (Role::Filling, 503), (Role::Standby, 200), (Role::Leading, 200)]
        {
            assert_eq!(get(role, "/readyz").await.0, status, "{role:?}");
            assert_eq!(get(role, "/healthz").await.0, 200, "{role:?}");
        }
    }

    #[tokio::test]
    async fn metrics_are_open_metrics() {
        let (status, text) = get(Role::Standby, "/metrics").await;
        assert_eq!(status, 200);
        assert!(text.contains("gantry_operator_leader 0") && text.ends_with("# EOF\n"), "{text}");
    }
}

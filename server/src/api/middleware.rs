//! What every request gets: an id, and a place in the counts.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tracing::Instrument;

use super::body::discard;
use super::errors::{Told, unauthorized};
use super::{App, routes};
use crate::console::ENDED;
use crate::limits::MAX_REQUEST_ID_BYTES;
use crate::metrics::{Outcome, VersionLabels};

/// The header that names a request, in both directions.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The header that clients of llama-server's and Anthropic's may show a key in.
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// What stands before a token.
const BEARER: &[u8] = b"bearer ";

/// A request's id: the client's own, if it is short and plain, or a fresh one.
#[derive(Clone)]
pub(super) struct RequestIdentity(pub(super) HeaderValue);

/// Marks an answer whose end is counted elsewhere, since it comes after its head.
#[derive(Clone, Copy)]
pub(super) struct CountedLater;

pub(super) async fn request_id(mut request: Request, next: Next) -> Response {
    let given = request.headers().get(REQUEST_ID).filter(|id| {
        let bytes = id.as_bytes();
        !bytes.is_empty() && bytes.len() <= MAX_REQUEST_ID_BYTES && bytes.iter().all(u8::is_ascii_graphic)
    });
    let id = given.cloned().unwrap_or_else(|| {
        // Hexadecimal digits and dashes make a valid header.
        HeaderValue::from_str(&uuid::Uuid::new_v4().to_string()).unwrap_or_else(|_| HeaderValue::from_static("none"))
    });
    request.extensions_mut().insert(RequestIdentity(id.clone()));
    let span = tracing::info_span!("request", request_id = id.to_str().unwrap_or(""));
    let mut response = next.run(request).instrument(span).await;
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// Refuses who does not show a good key, before anything of the body is read.
pub(super) async fn authorize(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let caller = app.keys.caller(shown_key(request.headers()));
    if let Some(caller) = caller {
        request.extensions_mut().insert(caller);
        return next.run(request).await;
    }
    if !routes::needs_key(request.extensions().get()) {
        return next.run(request).await;
    }
    let (parts, body) = request.into_parts();
    discard(body);
    unauthorized(&parts.headers).into_response()
}

/// The key of a request: as a bearer's token, or in that header.
fn shown_key(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
        let (scheme, token) = value.as_bytes().split_at_checked(BEARER.len())?;
        scheme.eq_ignore_ascii_case(BEARER).then(|| token.trim_ascii())
    });
    bearer.or_else(|| headers.get(API_KEY).map(HeaderValue::as_bytes))
}

pub(super) async fn count(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let (route, is_logged) = routes::counted_as(request.extensions().get());
    let identity = request.extensions().get::<RequestIdentity>().cloned();
    let arrival = Instant::now();
    let response = next.run(request).await;
    if response.extensions().get::<CountedLater>().is_none() {
        let status = response.status().as_u16();
        let outcome = Outcome::of_status(status);
        // What came to a version counts and logs itself.
        app.metrics.request_ended(route, &VersionLabels::default(), status, outcome);
        if is_logged {
            let code = response.extensions().get::<Told>().map(|told| told.0.code.as_str());
            tracing::info!(
                request_id = identity.as_ref().and_then(|id| id.0.to_str().ok()),
                route = route.as_str(),
                status,
                code,
                outcome = outcome.as_str(),
                duration_ms = arrival.elapsed().as_secs_f64() * 1e3,
                "{}",
                ENDED
            );
        }
    }
    response
}

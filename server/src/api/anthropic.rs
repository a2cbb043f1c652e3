//! Anthropic's protocol, whose bodies are decoded and answers encoded by `gantry-anthropic`.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderName, header};
use axum::middleware::Next;
use axum::response::Response;
use gantry_anthropic::{decode_count_tokens, decode_messages, error_body};

use super::errors::{Failure, Told};
use super::middleware::RequestIdentity;
use super::routes::{self, Protocol};
use super::{App, executor};
use crate::metrics::Route;

/// The header in which this protocol's clients look for a request's id.
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// What this protocol's addresses begin with, but for one.
const BELOW: &str = "/v1/messages/";

pub(super) async fn messages(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    executor::text(&app, Route::Messages, request, decode_messages).await
}

pub(super) async fn count_tokens(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    executor::prompt(&app, Route::Tokenizer, request, decode_count_tokens).await
}

/// Has answers at this protocol's addresses be its own: what went wrong, and how a request is named.
pub(super) async fn shape(request: Request, next: Next) -> Response {
    let matched = request.extensions().get::<MatchedPath>();
    // An address below them that is not here is asked by this protocol's clients, too.
    let is_own = match matched {
        Some(_) => routes::protocol_of(matched) == Protocol::Anthropic,
        None => request.uri().path().starts_with(BELOW),
    };
    let id = request.extensions().get::<RequestIdentity>().cloned();
    let mut response = next.run(request).await;
    if !is_own {
        return response;
    }
    if let Some(Told(error)) = response.extensions().get() {
        let id = id.as_ref().and_then(|id| id.0.to_str().ok());
        let body = error_body(error, id).to_string();
        response.headers_mut().remove(header::CONTENT_LENGTH);
        *response.body_mut() = Body::from(body);
    }
    if let Some(RequestIdentity(id)) = id {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

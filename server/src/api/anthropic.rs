//! Anthropic's protocol, whose bodies are decoded and answers encoded by `gantry-anthropic`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::HeaderName;
use axum::response::Response;
use gantry_anthropic::{decode_count_tokens, decode_messages, error_body};
use gantry_core::ApiError;

use super::errors::Failure;
use super::middleware::RequestIdentity;
use super::shape::set_body;
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

/// Whether an address that is not here is asked by this protocol's clients, since it is below one that is.
pub(super) fn is_below(path: &str) -> bool {
    path.starts_with(BELOW)
}

/// Has an answer be this protocol's own: what went wrong, and how a request is named.
pub(super) fn shape(response: &mut Response, told: Option<&ApiError>, id: Option<&RequestIdentity>) {
    if let Some(error) = told {
        let id = id.and_then(|id| id.0.to_str().ok());
        set_body(response, error_body(error, id).to_string());
    }
    if let Some(RequestIdentity(id)) = id {
        response.headers_mut().insert(REQUEST_ID, id.clone());
    }
}

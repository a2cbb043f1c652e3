//! The generate protocol, whose bodies are decoded and answers encoded by `gantry-generate`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use gantry_core::ApiError;
use gantry_generate::{decode_chat, decode_generate, error_body, status_of};

use super::errors::Failure;
use super::shape::set_body;
use super::{App, executor};
use crate::metrics::Route;

pub(super) async fn generate(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    executor::text(&app, Route::Generate, request, decode_generate).await
}

pub(super) async fn chat(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    executor::text(&app, Route::GenerateChat, request, decode_chat).await
}

/// Has an answer be this protocol's own where something went wrong.
pub(super) fn shape(response: &mut Response, told: Option<&ApiError>) {
    let Some(error) = told else { return };
    set_body(response, error_body(error).to_string());
    if let Ok(status) = StatusCode::from_u16(status_of(error)) {
        *response.status_mut() = status;
    }
}

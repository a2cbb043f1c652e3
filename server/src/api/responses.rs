//! `/v1/responses`: answers of `OpenAI`'s Responses API, which are kept where the server has a store, and what is asked of those.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use gantry_core::{ApiError, ErrorCode};
use gantry_responses::{ResponseId, check_retrieval, deleted, page};
use serde_json::Value;

use super::errors::Failure;
use super::stored::{Asker, View};
use super::{App, executor};

/// The id in the address; one that is no UTF-8 is no response's.
type Id = Result<Path<String>, axum::extract::rejection::PathRejection>;

pub(super) async fn create(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    executor::response(&app, request).await
}

pub(super) async fn retrieve(State(app): State<Arc<App>>, id: Id, request: Request) -> Result<Response, Failure> {
    check_retrieval(query(&request)?.iter().map(pair))?;
    let (.., view) = found(Asker::of(&app, &request), id).await?;
    Ok(json(view.body()))
}

pub(super) async fn delete(State(app): State<Arc<App>>, id: Id, request: Request) -> Result<Json<Value>, Failure> {
    let (asker, id, view) = found(Asker::of(&app, &request), id).await?;
    // Whoever answers it would write it anew.
    if asker.cancel(id, view).await?.is_some_and(|view| !view.progress.status.is_final()) {
        return Err(Failure::response_goes_on());
    }
    asker.delete(id).await?;
    Ok(Json(deleted(id)))
}

pub(super) async fn cancel(State(app): State<Arc<App>>, id: Id, request: Request) -> Result<Response, Failure> {
    let (asker, id, view) = found(Asker::of(&app, &request), id).await?;
    if !view.progress.background {
        let message = "Only a response that was asked for with `background`: true can be cancelled; end the connection of another.";
        return Err(ApiError::invalid(None, ErrorCode::InvalidValue, message).into());
    }
    let view = asker.cancel(id, view).await?.ok_or_else(|| Failure::response_not_found(&id.to_string()))?;
    Ok(json(view.body()))
}

pub(super) async fn input_items(State(app): State<Arc<App>>, id: Id, request: Request) -> Result<Json<Value>, Failure> {
    let query = query(&request)?;
    let (asker, id, mut view) = found(Asker::of(&app, &request), id).await?;
    let items = asker.input(id, view.share()).await?.ok_or_else(|| Failure::response_not_found(&id.to_string()))?;
    Ok(Json(page(items, query.iter().map(pair))?))
}

/// The response of an address, if it is there for who asks.
async fn found(asker: Option<Asker<'_>>, id: Id) -> Result<(Asker<'_>, ResponseId, View), Failure> {
    let text = id.map(|Path(id)| id).unwrap_or_default();
    let asker = asker.ok_or_else(Failure::nothing_stored)?;
    let not_found = || Failure::response_not_found(&text);
    let id = ResponseId::parse(&text).ok_or_else(not_found)?;
    let view = asker.view(id).await?.ok_or_else(not_found)?;
    Ok((asker, id, view))
}

fn query(request: &Request) -> Result<Vec<(String, String)>, ApiError> {
    let read = axum::extract::Query::try_from_uri(request.uri());
    read.map(|axum::extract::Query(pairs)| pairs).map_err(|error| {
        ApiError::invalid(None, ErrorCode::InvalidValue, format!("The address has no readable parameters: {error}."))
    })
}

fn pair((name, value): &(String, String)) -> (&str, &str) {
    (name, value)
}

fn json(body: Bytes) -> Response {
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], body).into_response()
}

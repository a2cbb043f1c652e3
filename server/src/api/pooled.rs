//! `/v1/embeddings` and `/v1/rerank`: requests are read and checked, and then told that the engine does not do this work
//! yet. A client learns of its own mistakes first, so that it can be written today.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use gantry_openai::{ApiError, ValidEmbeddingsRequest, ValidRerankRequest};

use super::errors::Failure;
use super::{App, body};

pub(super) async fn embeddings(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let (body, _share) = body::read(&app.bodies, request).await?;
    let valid = ValidEmbeddingsRequest::parse(&body)?;
    app.check_model(|served| valid.check_model(served))?;
    Err(unsupported("embeddings"))
}

pub(super) async fn rerank(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let (body, _share) = body::read(&app.bodies, request).await?;
    let valid = ValidRerankRequest::parse(&body)?;
    app.check_model(|served| valid.check_model(served))?;
    Err(unsupported("rankings"))
}

fn unsupported(what: &str) -> Failure {
    let message = format!(
        "This server does not compute {what} yet: it generates text, on /v1/chat/completions and /v1/completions."
    );
    ApiError::unsupported(message).into()
}

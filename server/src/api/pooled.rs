//! `/v1/embeddings` and `/v1/rerank`: from a body to vectors or scores, which come whole.
//!
//! As with text, the version is chosen once, when the request is submitted. Absent: streams, and which texts are computed
//! together, which is the engine's.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::HeaderValue;
use axum::response::Response;
use gantry_core::{PooledOutput, PooledWork, Priority, Usage};
use gantry_openai::{ApiError, EmbeddingList, ErrorCode, ValidEmbeddingsRequest, ValidRerankRequest};

use super::budget::Peer;
use super::errors::{Failure, of_submission, unanswered};
use super::generate::{Observed, Origin, VERSION_HEADER};
use super::middleware::CountedLater;
use super::params::Scheduling;
use super::{App, body};
use crate::limits::{BODY_BUDGET_WAIT, EMBEDDING_ANSWER_BYTES_PER_NUMBER, SUBMIT_ATTEMPTS};
use crate::metrics::Route;
use crate::version::{GenerationError, PoolRequest, Pooled, SubmitError, Version};

pub(super) async fn embeddings(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let origin = Origin::read(&request)?;
    let (body, share) = body::read(&app.bodies, request).await?;
    let mut valid = ValidEmbeddingsRequest::parse(&body)?;
    drop(body);
    let prompt_param = "input";
    let inputs = std::mem::take(&mut valid.inputs);
    let count = inputs.len();
    let work = PooledWork::Embed(inputs);
    let (request, priority) = pool_request(work, origin.scheduling, valid.priority);
    let version = app.check_model(|served| valid.check_model(served))?;
    let width = version.model().and_then(|model| Some(model.pooled?.width)).unwrap_or(0);
    // Where nothing is embedded at all, that is said first, at submission.
    if width > 0 {
        valid.check_dimensions(width)?;
    }
    let numbers = count.saturating_mul(width as usize);
    let answer = numbers.saturating_mul(EMBEDDING_ANSWER_BYTES_PER_NUMBER);
    let most = app.limits.vectors_bytes / 2;
    if answer > most {
        let inputs = most / EMBEDDING_ANSWER_BYTES_PER_NUMBER / width as usize;
        let message = format!(
            "The vectors of {count} inputs are more than may be given at once: send no more than {inputs} in a request."
        );
        return Err(ApiError::invalid(Some("input".into()), ErrorCode::AnswerTooLarge, message).into());
    }
    let answer_share = app.answers.take(origin.peer, answer, BODY_BUDGET_WAIT).await?;
    let (version, pooled) = submit(&app, origin.peer, request, |served| valid.check_model(served)).await?;
    let observed = Observed::new(&app, Route::Embeddings, &version, origin, Some(priority), 0, share);
    let encoding = valid.encoding;
    let write = move |model: String, output: PooledOutput| {
        serde_json::to_vec(&EmbeddingList::new(model, output.vectors, encoding, output.prompt_tokens))
    };
    Ok(answer_with(&app, pooled, &version, observed, prompt_param, (answer, answer_share), write).await)
}

pub(super) async fn rerank(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let origin = Origin::read(&request)?;
    let (body, share) = body::read(&app.bodies, request).await?;
    let valid = ValidRerankRequest::parse(&body)?;
    drop(body);
    let prompt_param = "documents";
    let work = PooledWork::Rank { query: valid.query.clone(), documents: valid.documents.clone() };
    let (request, priority) = pool_request(work, origin.scheduling, valid.priority);
    let (version, pooled) = submit(&app, origin.peer, request, |served| valid.check_model(served)).await?;
    let observed = Observed::new(&app, Route::Rerank, &version, origin, Some(priority), 0, share);
    let answer = valid.answer_bytes();
    let write = move |model: String, output: PooledOutput| {
        let score = |vector: &Vec<f32>| vector.first().copied().unwrap_or(f32::NAN);
        let scores: Vec<f32> = output.vectors.iter().map(score).collect();
        serde_json::to_vec(&valid.answer(model, &scores, output.prompt_tokens))
    };
    // Documents that are told again came in a body.
    Ok(answer_with(&app, pooled, &version, observed, prompt_param, (answer, ()), write).await)
}

/// What is asked of a version. Who goes first is said by the header, then by the body.
fn pool_request(work: PooledWork, scheduling: Scheduling, body: Priority) -> (PoolRequest, Priority) {
    let priority = scheduling.priority_over(body);
    let timeout_ms = scheduling.queue_timeout_ms;
    (PoolRequest { work, priority, timeout_ms }, priority)
}

async fn submit(
    app: &App,
    client: Peer,
    request: PoolRequest,
    check: impl Fn(&[&str]) -> Result<(), ApiError>,
) -> Result<(Arc<Version>, Pooled), Failure> {
    for _ in 0..SUBMIT_ATTEMPTS {
        let version = app.check_model(&check)?;
        match version.pool(client, request.clone()).await {
            Ok(pooled) => return Ok((version, pooled)),
            Err(SubmitError::Retired) => {}
            Err(other) => return Err(of_submission(other)),
        }
        tokio::task::yield_now().await;
    }
    Err(of_submission(SubmitError::Retired))
}

/// Waits for the answer, of about so many bytes, and writes it. It keeps its share of memory until the client has it.
async fn answer_with<S: Send + Sync + 'static>(
    app: &App,
    pooled: Pooled,
    version: &Version,
    observed: Observed,
    prompt_param: &'static str,
    (bytes, share): (usize, S),
    write: impl FnOnce(String, PooledOutput) -> Result<Vec<u8>, serde_json::Error> + Send + 'static,
) -> Response {
    let result = match pooled.output().await {
        Ok(output) => {
            let usage = Usage { prompt_tokens: output.prompt_tokens, ..Default::default() };
            let model = version.spec().served_name.clone();
            let written = app.writers.write(bytes, share, |_, _| Ok(()), move || write(model, output)).await;
            written.map(|body| (body, usage))
        }
        Err(error) => {
            let ends = app.is_draining() && error == GenerationError::Retired;
            let error = if ends { GenerationError::ServerEnds } else { error };
            Err(unanswered(error, prompt_param, version.retry_after()))
        }
    };
    let mut response = observed.settle(result);
    response.extensions_mut().insert(CountedLater);
    if let Ok(name) = HeaderValue::from_str(&version.spec().name) {
        response.headers_mut().insert(VERSION_HEADER, name);
    }
    response
}

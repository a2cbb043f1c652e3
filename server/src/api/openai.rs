//! `OpenAI`'s protocol, and llama-server's names for it: which bodies are decoded and answers encoded by `gantry-openai`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use gantry_openai::{
    decode_apply_template, decode_chat, decode_completion, decode_detokenize, decode_embeddings, decode_infill,
    decode_rerank, decode_score, decode_tokenize,
};

use super::errors::Failure;
use super::{App, executor};
use crate::metrics::Route;

pub(super) async fn chat(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    executor::text(&app, Route::Chat, request, decode_chat).await
}

pub(super) async fn completion(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    executor::text(&app, Route::Completions, request, decode_completion).await
}

pub(super) async fn infill(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    executor::text(&app, Route::Infill, request, decode_infill).await
}

pub(super) async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    executor::prompt(&app, Route::Tokenizer, request, decode_tokenize).await
}

pub(super) async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    executor::prompt(&app, Route::Tokenizer, request, decode_detokenize).await
}

pub(super) async fn apply_template(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    executor::prompt(&app, Route::Tokenizer, request, decode_apply_template).await
}

pub(super) async fn embeddings(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    executor::pooled(&app, Route::Embeddings, request, decode_embeddings).await
}

pub(super) async fn rerank(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    executor::pooled(&app, Route::Rerank, request, decode_rerank).await
}

pub(super) async fn score(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    executor::pooled(&app, Route::Score, request, decode_score).await
}

//! What is said at an address that is not here: which ones are, and where else what was meant is found.

use axum::extract::Request;
use gantry_openai::{ApiError, ErrorCode, ErrorKind};

use super::errors::Failure;
use super::{CHAT, EMBEDDINGS, MODELS, RERANK, TEXT};

/// Addresses of other servers and other protocols, and what there is here for them.
const ELSEWHERE: &[(&str, &str)] = &[
    ("/", "there are no pages for browsers: point a client of OpenAI's API at /v1"),
    ("/v1", "a client of OpenAI's API adds the rest of the address by itself"),
    ("/completion", "POST /v1/completions takes the same parameters"),
    ("/completions", "POST /v1/completions takes the same parameters"),
    ("/embedding", "POST /v1/embeddings gives vectors"),
    ("/embeddings", "POST /v1/embeddings gives vectors"),
    ("/v1/responses", "POST /v1/chat/completions takes chats; the Responses API is not there yet"),
    ("/v1/messages", "POST /v1/chat/completions takes chats; Anthropic's API is not there yet"),
    ("/api/chat", "POST /v1/chat/completions takes chats; Ollama's API is not spoken here"),
    ("/api/generate", "POST /v1/completions takes texts; Ollama's API is not spoken here"),
    ("/api/tags", "GET /v1/models lists what is served; Ollama's API is not spoken here"),
    ("/slots", "GET /metrics says what the sequences do"),
    ("/tokenize", "the usage of an answer counts tokens; there is nothing that lists them"),
    ("/infill", "POST /v1/completions takes texts with a model's own marks, with `parse_special`"),
];

pub(super) async fn unknown_url(request: Request) -> Failure {
    let (method, path) = (request.method(), request.uri().path());
    let meant = path.trim_end_matches('/');
    let meant = if meant.is_empty() { "/" } else { meant };
    let hint = ELSEWHERE.iter().find(|(known, _)| *known == meant).map(|(_, hint)| format!(" Instead: {hint}."));
    let message = format!(
        "There is no {method} {path} here; there are POST {CHAT}, {TEXT}, {EMBEDDINGS} and {RERANK}, and GET {MODELS}, /props, \
         /health, /healthz, /readyz and /metrics.{}",
        hint.unwrap_or_default()
    );
    ApiError::new(404, ErrorKind::NotFoundError, ErrorCode::UnknownUrl, message).into()
}

pub(super) async fn wrong_method(request: Request) -> Failure {
    let (method, path) = (request.method(), request.uri().path());
    // An address here takes GET or POST, and HEAD with GET.
    let other = if method.is_safe() { "POST" } else { "GET" };
    let message = format!("{path} does not take {method}, but {other}.");
    ApiError::new(405, ErrorKind::InvalidRequestError, ErrorCode::MethodNotAllowed, message).into()
}

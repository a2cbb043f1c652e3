//! What is said at an address that is not here: which ones are, and where else what was meant is found.

use axum::extract::Request;
use gantry_core::{ApiError, ErrorCode, ErrorKind};

use super::errors::Failure;
use super::routes::{self, Method};

/// Addresses of other servers and other protocols, and what there is here for them.
const ELSEWHERE: &[(&str, &str)] = &[
    ("/", "there are no pages for browsers: point a client of OpenAI's API at /v1"),
    ("/v1", "a client of OpenAI's API adds the rest of the address by itself"),
    ("/completion", "POST /v1/completions takes its parameters, and answers with the text in `choices`"),
    ("/completions", "POST /v1/completions takes its parameters, and answers with the text in `choices`"),
    ("/embedding", "POST /v1/embeddings gives vectors"),
    ("/embeddings", "POST /v1/embeddings gives vectors"),
    ("/v1/messages/batches", "POST /v1/messages answers messages one at a time"),
    ("/api/chat", "POST /v1/chat/completions takes chats; Ollama's API is not spoken here"),
    ("/api/generate", "POST /v1/completions takes texts; Ollama's API is not spoken here"),
    ("/api/tags", "GET /v1/models lists what is served; Ollama's API is not spoken here"),
];

pub(super) async fn unknown_url(request: Request) -> Failure {
    let (method, path) = (request.method(), request.uri().path());
    let meant = path.trim_end_matches('/');
    let meant = if meant.is_empty() { "/" } else { meant };
    let hint = ELSEWHERE.iter().find(|(known, _)| *known == meant).map(|(_, hint)| *hint).or_else(|| doubled(meant));
    let hint = hint.map(|hint| format!(" Instead: {hint}."));
    let message = format!(
        "There is no {method} {path} here; there are POST {}, and GET {}.{}",
        listed(&routes::told(Method::Post).collect::<Vec<_>>()),
        listed(&routes::told(Method::Get).collect::<Vec<_>>()),
        hint.unwrap_or_default()
    );
    ApiError::new(404, ErrorKind::NotFoundError, ErrorCode::UnknownUrl, message).into()
}

pub(super) async fn unknown_call(request: Request) -> Failure {
    let methods = listed(&routes::told_calls().collect::<Vec<_>>());
    let message = format!("There is no {} here; there are {methods}.", request.uri().path());
    ApiError::new(404, ErrorKind::NotFoundError, ErrorCode::UnknownUrl, message).into()
}

fn listed(addresses: &[&str]) -> String {
    match addresses {
        [all @ .., last] if !all.is_empty() => format!("{} and {last}", all.join(", ")),
        all => all.concat(),
    }
}

/// What is to be said where a client put its part of an address behind all of another.
fn doubled(path: &str) -> Option<&'static str> {
    let is_behind = |address: &str| path.strip_prefix(address).is_some_and(|rest| rest.starts_with('/'));
    if path.starts_with("/v1/v1/") {
        return Some("the client adds /v1 by itself: leave it out of the base URL that it is given");
    }
    let mut addresses = routes::told(Method::Post).chain(routes::told(Method::Get));
    addresses
        .any(|address| address.starts_with("/v1/") && is_behind(address))
        .then_some("the client adds the rest of the address by itself: the base URL that it is given ends with /v1")
}

/// What is said at an address that takes POST alone, of any other method.
pub(super) async fn takes_post(request: Request) -> Failure {
    wrong_method(&request, "POST")
}

/// What is said at an address that takes GET alone, and HEAD with it, of any other method.
pub(super) async fn takes_get(request: Request) -> Failure {
    wrong_method(&request, "GET and HEAD")
}

/// What is said at an address that takes those two, of any other method.
pub(super) async fn takes_get_and_delete(request: Request) -> Failure {
    wrong_method(&request, "GET, HEAD and DELETE")
}

fn wrong_method(request: &Request, others: &str) -> Failure {
    let message = format!("{} does not take {}, but {others}.", request.uri().path(), request.method());
    ApiError::new(405, ErrorKind::InvalidRequestError, ErrorCode::MethodNotAllowed, message).into()
}

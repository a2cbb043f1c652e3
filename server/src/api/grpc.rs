//! The generate protocol as gRPC, whose messages are read and written by `gantry-generate`; health and reflection are tonic's.
//!
//! A call is a request like any other: the executor carries it out. What is gRPC's own is around that, from outside to inside:
//! [`call`] gives it its deadline, past which it is dropped with all that it computes, and tells what went wrong as a status;
//! [`enter`] refuses what is no call, and gives it one of the places that there are; and a method has its answer end in trailers.
//! Absent: HTTP/2, which is [`crate::serve`]'s, compression, and transcoding for browsers.

mod body;
mod places;
mod questions;

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use gantry_core::{
    ApiError, ErrorCode, ErrorKind, MAX_QUEUE_TIMEOUT_MS, PooledRequest, PooledTask, PooledWork, TextEncoder,
    TextRequest,
};
use gantry_generate::grpc::{
    CallEmbeddings, CallEnd, EmbeddingsCall, decode_chat, decode_embeddings, decode_generate, status_of,
};
use gantry_openai::embedding_inputs;
use tokio::time::{Instant, timeout_at};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use self::body::{Guarded, Timed, Trailed};
pub(super) use self::places::{Full, Places};
pub(super) use self::questions::{health, reflection};
use super::budget::Peer;
use super::errors::{Failure, Told};
use super::executor::QUEUE_TIMEOUT_HEADER;
use super::{App, executor};
use crate::metrics::Route;

/// The media type of a call, which may say more after it.
const MEDIA_TYPE: &str = "application/grpc";
const ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");
const ACCEPT_ENCODING: HeaderName = HeaderName::from_static("grpc-accept-encoding");
const TIMEOUT: &str = "grpc-timeout";
/// Whose words the reasons of errors are.
const DOMAIN: &str = "gantry";

pub(super) async fn generate(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    text(&app, Route::Generate, request, |body, end| decode_generate(body, false, end)).await
}

pub(super) async fn generate_stream(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    text(&app, Route::Generate, request, |body, end| decode_generate(body, true, end)).await
}

pub(super) async fn chat(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    text(&app, Route::GenerateChat, request, |body, end| decode_chat(body, false, end)).await
}

pub(super) async fn chat_stream(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    text(&app, Route::GenerateChat, request, |body, end| decode_chat(body, true, end)).await
}

pub(super) async fn embeddings(State(app): State<Arc<App>>, request: Request) -> Result<Response, Failure> {
    let decode = |body: &[u8]| {
        let EmbeddingsCall { input, priority, model } = decode_embeddings(body)?;
        let encoder = CallEmbeddings { count: input.len() };
        let work = PooledTask::Work(PooledWork::Embed(embedding_inputs(input)?));
        Ok((PooledRequest { model, work, prompt_param: "input", priority }, encoder))
    };
    let response = executor::pooled(&app, Route::Embeddings, request, decode).await?;
    Ok(trailed(response, CallEnd::default()))
}

async fn text<E: TextEncoder>(
    app: &Arc<App>,
    route: Route,
    request: Request,
    decode: impl FnOnce(&[u8], &CallEnd) -> Result<(TextRequest, E), ApiError>,
) -> Result<Response, Failure> {
    let end = CallEnd::default();
    let response = executor::text(app, route, request, |body| decode(body, &end)).await?;
    Ok(trailed(response, end))
}

/// An answer that ends in trailers. What went wrong before it is told by [`call`].
fn trailed(mut response: Response, end: CallEnd) -> Response {
    if response.extensions().get::<Told>().is_none() {
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
        return response.map(|body| Body::new(Trailed::new(body, end)));
    }
    response
}

/// Refuses what is no call, and gives others one of the places that there are until their answers are taken.
pub(super) async fn enter(State(places): State<Arc<Places>>, request: Request, next: Next) -> Response {
    if let Err(error) = check(request.headers()) {
        return Failure::from(error).into_response();
    }
    let peer = request.extensions().get::<Peer>().copied().unwrap_or_default();
    match places.take(peer) {
        Ok(place) => next.run(request).await.map(|body| Body::new(Guarded::new(body, place))),
        Err(full) => Failure::calls_full(full).into_response(),
    }
}

fn check(headers: &HeaderMap) -> Result<(), ApiError> {
    let media_type = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let rest = media_type.strip_prefix(MEDIA_TYPE);
    if !rest.is_some_and(|rest| rest.is_empty() || rest.starts_with([';', '+'])) {
        let message = format!("This port takes calls of gRPC ({MEDIA_TYPE}); --port says where HTTP's requests go.");
        let kind = ErrorKind::InvalidRequestError;
        return Err(ApiError::new(415, kind, ErrorCode::UnsupportedMediaType, message));
    }
    if headers.get(ENCODING).is_some_and(|encoding| encoding != "identity") {
        return Err(ApiError::unsupported("Compressed messages are not taken."));
    }
    deadline(headers).map(drop)
}

/// How long the client waits, if it says so.
fn deadline(headers: &HeaderMap) -> Result<Option<Duration>, ApiError> {
    let Some(value) = headers.get(TIMEOUT) else { return Ok(None) };
    let text = value.to_str().unwrap_or_default();
    let (number, unit) = text.split_at_checked(text.len().saturating_sub(1)).unwrap_or_default();
    let number = Some(number).filter(|n| (1..=8).contains(&n.len()) && n.bytes().all(|b| b.is_ascii_digit()));
    let time = number.and_then(|number| number.parse::<u64>().ok()).and_then(|number| match unit {
        "H" => Some(Duration::from_secs(number * 3600)),
        "M" => Some(Duration::from_secs(number * 60)),
        "S" => Some(Duration::from_secs(number)),
        "m" => Some(Duration::from_millis(number)),
        "u" => Some(Duration::from_micros(number)),
        "n" => Some(Duration::from_nanos(number)),
        _ => None,
    });
    let wrong = || ApiError::wrong_value(TIMEOUT, "must be one to eight digits and one of H, M, S, m, u and n");
    time.map(Some).ok_or_else(wrong)
}

/// Ends a call with its deadline, and tells what went wrong as a status.
pub(super) async fn call(mut request: Request, next: Next) -> Response {
    // One that is none is told by `check`.
    let left = deadline(request.headers()).ok().flatten();
    if let Some(left) = left {
        wait_no_longer(request.headers_mut(), left);
    }
    let until = left.and_then(|left| Instant::now().checked_add(left));
    let answer = next.run(request);
    let mut response = match until {
        None => answer.await,
        Some(until) => match timeout_at(until, answer).await {
            Ok(response) => response,
            Err(_) => Failure::from(late()).into_response(),
        },
    };
    match response.extensions().get::<Told>().cloned() {
        // Who speaks no gRPC does not read its statuses.
        Some(Told(error)) if error.code == ErrorCode::UnsupportedMediaType => response,
        Some(Told(error)) => {
            tell(&mut response, &error);
            response
        }
        None => response.map(|body| Body::new(Timed::new(body, until))),
    }
}

/// A deadline is also how long a request is worth waiting for, unless it says less itself.
fn wait_no_longer(headers: &mut HeaderMap, left: Duration) {
    let most = u64::try_from(left.as_millis()).unwrap_or(u64::MAX).clamp(1, MAX_QUEUE_TIMEOUT_MS);
    let says_less = match headers.get(QUEUE_TIMEOUT_HEADER).map(|value| value.to_str().ok()?.parse::<u64>().ok()) {
        None => false,
        // What is no number is told as such.
        Some(given) => given.is_none_or(|ms| ms <= most),
    };
    if !says_less {
        headers.insert(HeaderName::from_static(QUEUE_TIMEOUT_HEADER), HeaderValue::from(most));
    }
}

/// The deadline has passed.
fn late() -> ApiError {
    let message = "The call's deadline has passed, and what it asked for is given up.";
    ApiError::new(408, ErrorKind::ServiceUnavailableError, ErrorCode::RequestTimeout, message)
}

/// Has an answer without a message be the status of this error; what else its head says stays.
fn tell(response: &mut Response, error: &ApiError) {
    let headers = response.headers_mut();
    let after = headers.get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
    headers.remove(header::CONTENT_LENGTH);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
    headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    headers.extend(trailers(Some((error, after.map(Duration::from_secs)))));
    *response.status_mut() = StatusCode::OK;
    *response.body_mut() = Body::empty();
}

/// How a call ended: well, or so; and when it may be tried again.
fn trailers(failure: Option<(&ApiError, Option<Duration>)>) -> HeaderMap {
    let status = failure.map_or_else(|| Status::new(Code::Ok, ""), |(error, after)| status(error, after));
    let mut trailers = HeaderMap::new();
    if status.add_header(&mut trailers).is_err() {
        // A word for people that no header can hold.
        trailers.insert(Status::GRPC_STATUS, HeaderValue::from(status.code() as i32));
    }
    trailers
}

fn status(error: &ApiError, retry_after: Option<Duration>) -> Status {
    let mut details = ErrorDetails::new();
    details.set_error_info(error.code.as_str(), DOMAIN, std::collections::HashMap::new());
    if let Some(param) = &error.param {
        details.add_bad_request_violation(param.as_ref(), error.message.as_str());
    }
    if let Some(after) = retry_after {
        details.set_retry_info(Some(after));
    }
    Status::with_error_details(Code::from(status_of(error) as i32), error.message.as_str(), details)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| ((*name).parse().unwrap(), HeaderValue::from_static(value))).collect()
    }

    #[test]
    fn a_deadline_is_read_in_each_unit_and_anything_else_is_refused() {
        for (text, wanted) in [
            ("1H", Duration::from_secs(3600)),
            ("2M", Duration::from_secs(120)),
            ("3S", Duration::from_secs(3)),
            ("250m", Duration::from_millis(250)),
            ("7u", Duration::from_micros(7)),
            ("99999999n", Duration::from_nanos(99_999_999)),
            ("0S", Duration::ZERO),
            ("99999999H", Duration::from_secs(99_999_999 * 3600)),
        ] {
            assert_eq!(deadline(&headers(&[("grpc-timeout", text)])).unwrap(), Some(wanted), "{text}");
        }
        assert_eq!(deadline(&HeaderMap::new()).unwrap(), None);
        for wrong in ["", "S", "5", "123456789S", "-1S", "1.5S", "5s", "+5S"] {
            let error = deadline(&headers(&[("grpc-timeout", wrong)])).unwrap_err();
            assert_eq!((error.status, error.param.as_deref()), (400, Some("grpc-timeout")), "{wrong}");
        }
    }

    #[test]
    fn a_deadline_bounds_the_wait_and_whoever_waits_less_says_so() {
        for (given, left, wanted) in [
            (None, 1500, "1500"),
            (Some("900"), 1500, "900"),
            (Some("2000"), 1500, "1500"),
            (Some("soon"), 1500, "soon"),
            (None, 0, "1"),
            (None, u64::MAX, "3600000"),
        ] {
            let mut asked: HeaderMap = given.map(|given| headers(&[(QUEUE_TIMEOUT_HEADER, given)])).unwrap_or_default();
            wait_no_longer(&mut asked, Duration::from_millis(left));
            assert_eq!(asked[QUEUE_TIMEOUT_HEADER], wanted);
        }
    }

    #[test]
    fn only_calls_are_taken() {
        for good in ["application/grpc", "application/grpc+proto", "application/grpc;charset=utf-8"] {
            assert!(check(&headers(&[("content-type", good)])).is_ok(), "{good}");
        }
        for wrong in ["application/json", "application/grpc-web", ""] {
            assert_eq!(check(&headers(&[("content-type", wrong)])).unwrap_err().status, 415, "{wrong}");
        }
        let packed = headers(&[("content-type", "application/grpc"), ("grpc-encoding", "gzip")]);
        assert_eq!(status(&check(&packed).unwrap_err(), None).code(), Code::Unimplemented);
    }

    #[test]
    fn a_status_says_when_to_come_again_and_which_field_is_wrong() {
        let error = ApiError::wrong_value("top_p", "must be above 0");
        let told = trailers(Some((&error, Some(Duration::from_secs(3)))));
        assert_eq!(told["grpc-status"], "3");
        let status = Status::from_header_map(&told).unwrap();
        let details = status.get_error_details();
        assert_eq!(details.error_info().unwrap().reason, "invalid_value");
        assert_eq!(details.bad_request().unwrap().field_violations[0].field, "top_p");
        assert_eq!(details.retry_info().unwrap().retry_delay, Some(Duration::from_secs(3)));
        assert_eq!(trailers(None)["grpc-status"], "0");
    }
}

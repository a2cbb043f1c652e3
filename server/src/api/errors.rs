//! Everything that can go wrong, as an HTTP answer with an `OpenAI` error object, which other protocols put in their own shape.

use std::any::Any;
use std::borrow::Cow;
use std::time::Duration;

use axum::Json;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use gantry_core::{ApiError, ErrorCode, ErrorKind, ParamError, RequestError};
use gantry_openai::ErrorResponse;

use super::budget::Short;
use crate::hold::Full;
use crate::limits::{MAX_BACKGROUND_RESPONSES, RETRY_AFTER_MIN_SECONDS, WHOLE_ANSWER_BYTES};
use crate::output::TooMuch;
use crate::version::{GenerationError, SubmitError, Version};
use crate::vital::reason;

/// Of the name of a response that is not there, what its error repeats.
const MAX_TOLD_ID_CHARS: usize = 64;

/// An error on its way to a client.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: ApiError,
    retry_after: Option<Duration>,
}

/// The error that an answer is, for the log and for protocols with a shape of their own.
#[derive(Clone, Debug)]
pub(super) struct Told(pub(super) ApiError);

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        Self { error, retry_after: None }
    }
}

impl Failure {
    fn retriable(error: ApiError, retry_after: Duration) -> Self {
        Self { error, retry_after: Some(retry_after) }
    }

    /// No version can answer now; one may after so much time.
    pub(super) fn not_ready(reason: &str, retry_after: Duration) -> Self {
        let error = ApiError::new(
            503,
            ErrorKind::ServiceUnavailableError,
            ErrorCode::ModelNotReady,
            format!("No model can answer now: {reason}."),
        );
        Self::retriable(error, retry_after)
    }
}

impl Failure {
    /// As many requests wait for a model to be loaded as may.
    pub(super) fn line_full(full: Full, retry_after: Duration) -> Self {
        let Full { waiting, places } = full;
        let message = format!(
            "{waiting} requests wait for a model to be loaded, and {places} may: as many as run and wait at a time (--parallel and \
             --max-queue; in a pod spec.runtime.parallel and spec.scheduling.maxQueue); try again in {retry_after:?}"
        );
        let error = ApiError::new(429, ErrorKind::RateLimitError, ErrorCode::QueueFull, message);
        Self::retriable(error, retry_after)
    }

    /// Neither the next model nor the one before it could be loaded.
    pub(super) fn no_model_loads(retry_after: Duration) -> Self {
        let message = format!(
            "The model was to be changed, and neither the next one nor the one before it could be loaded in this pod (kubectl get \
             modelversions says why); it is tried again: try again in {retry_after:?}."
        );
        let error = ApiError::new(503, ErrorKind::ServiceUnavailableError, ErrorCode::ModelNotReady, message);
        Self::retriable(error, retry_after)
    }

    /// A request has waited for a model to be loaded for as long as it may.
    pub(super) fn held_too_long(waited: Duration, limit: Duration, retry_after: Duration) -> Self {
        let message = format!(
            "A model is being loaded, and the request has waited for {} ms, where {} ms are the limit (--queue-timeout; in a pod \
             spec.scheduling.queueTimeout; of a request `x-gantry-queue-timeout-ms`); try again in {retry_after:?}.",
            waited.as_millis(),
            limit.as_millis()
        );
        let error = ApiError::new(503, ErrorKind::ServiceUnavailableError, ErrorCode::ModelNotReady, message);
        Self::retriable(error, retry_after)
    }

    /// Bodies take all the memory that they may.
    pub(super) fn no_room_for_body(short: Short) -> Self {
        let message = match short {
            Short::Everyone => "Requests in flight hold all the memory that bodies may take; try again shortly.",
            Short::Client => {
                "Requests from your address hold all the memory that the bodies of one client may take; try again when \
                 some of them are answered."
            }
        };
        let error = ApiError::new(503, ErrorKind::ServiceUnavailableError, ErrorCode::Overloaded, message);
        Self::retriable(error, Duration::from_secs(RETRY_AFTER_MIN_SECONDS))
    }

    /// Answers that are not streamed come to more than may be collected of them.
    pub(super) fn too_much_to_collect(what: TooMuch) -> Self {
        let less =
            "stream it (`stream`: true), or ask for less of it: fewer `top_logprobs`, a smaller `n` or `max_tokens`";
        match what {
            TooMuch::Own => {
                let limit_mib = WHOLE_ANSWER_BYTES >> 20;
                let message = format!(
                    "The answer takes more than {limit_mib} MiB of memory, which is the most for one that is given whole: {less}."
                );
                ApiError::invalid(None, ErrorCode::AnswerTooLarge, message).into()
            }
            TooMuch::Everyone => {
                let message = format!(
                    "Answers that clients have not taken hold all the memory that they may: {less}; or try again."
                );
                let error = ApiError::new(503, ErrorKind::ServiceUnavailableError, ErrorCode::Overloaded, message);
                Self::retriable(error, Duration::from_secs(RETRY_AFTER_MIN_SECONDS))
            }
        }
    }

    /// No such response is kept for who asks.
    pub(super) fn response_not_found(id: &str) -> Self {
        // It may be anything.
        let id: String = id.chars().take(MAX_TOLD_ID_CHARS).collect();
        Self::no_response(format!("Response with id '{id}' not found: it was not stored, was deleted, or has expired."))
    }

    /// None is kept at all.
    pub(super) fn nothing_stored() -> Self {
        let message = "Nothing is stored here: the server was started without --response-store, which says where to.";
        Self::no_response(message.to_owned())
    }

    fn no_response(message: String) -> Self {
        ApiError::new(404, ErrorKind::NotFoundError, ErrorCode::ResponseNotFound, message).into()
    }

    /// What is kept cannot be read or written.
    pub(super) fn store_unavailable() -> Self {
        let message = "Stored responses cannot be read or written now: try again, or send `store`: false and all that the \
                       request refers to.";
        let error = ApiError::new(503, ErrorKind::ServiceUnavailableError, ErrorCode::StoreUnavailable, message);
        Self::retriable(error, Duration::from_secs(RETRY_AFTER_MIN_SECONDS))
    }

    /// A response that is to be deleted does not end.
    pub(super) fn response_goes_on() -> Self {
        let message = "The response is being cancelled, and can be deleted once it has ended; try again.";
        let error = ApiError::new(503, ErrorKind::ServiceUnavailableError, ErrorCode::Overloaded, message);
        Self::retriable(error, Duration::from_secs(RETRY_AFTER_MIN_SECONDS))
    }

    /// All sequences are in use.
    pub(super) fn no_slot() -> Self {
        let message = "All sequences are in use: a request would wait.";
        let error = ApiError::new(503, ErrorKind::ServiceUnavailableError, ErrorCode::Overloaded, message);
        Self::retriable(error, Duration::from_secs(RETRY_AFTER_MIN_SECONDS))
    }

    /// There are as many calls of gRPC as may be.
    pub(super) fn calls_full(full: super::grpc::Full) -> Self {
        let super::grpc::Full { limit, of_one } = full;
        let message = format!(
            "As many calls are open here as may be: {limit}, and {of_one} from one address; try again when some of them are \
             answered."
        );
        let error = ApiError::new(503, ErrorKind::ServiceUnavailableError, ErrorCode::Overloaded, message);
        Self::retriable(error, Duration::from_secs(RETRY_AFTER_MIN_SECONDS))
    }

    /// As many responses are answered in the background as may be.
    pub(super) fn background_full() -> Self {
        let message = format!(
            "{MAX_BACKGROUND_RESPONSES} responses are answered in the background here, which is the most; try again, or wait \
             for the answer (`background`: false)."
        );
        let error = ApiError::new(429, ErrorKind::RateLimitError, ErrorCode::QueueFull, message);
        Self::retriable(error, Duration::from_secs(RETRY_AFTER_MIN_SECONDS))
    }

    /// An answer cannot be written.
    pub(super) fn internal(error: &impl std::fmt::Display) -> Self {
        tracing::error!(%error, "an answer cannot be written");
        let message = "The server failed on this request; it has been logged.";
        ApiError::new(500, ErrorKind::ServerError, ErrorCode::InternalError, message).into()
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, Json(ErrorResponse::from(&self.error))).into_response();
        if let Some(after) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(after.as_secs()));
        }
        response.extensions_mut().insert(Told(self.error));
        response
    }
}

/// A request that was not taken.
pub(super) fn of_submission(error: SubmitError) -> Failure {
    let message = error.to_string();
    match error {
        SubmitError::QueueFull { retry_after, .. } => {
            let error = ApiError::new(429, ErrorKind::RateLimitError, ErrorCode::QueueFull, message);
            Failure::retriable(error, retry_after)
        }
        SubmitError::Unavailable { retry_after, .. } => {
            let error = ApiError::new(503, ErrorKind::ServiceUnavailableError, ErrorCode::ModelNotReady, message);
            Failure::retriable(error, retry_after)
        }
        SubmitError::Retired => Failure::not_ready(&message, Duration::from_secs(RETRY_AFTER_MIN_SECONDS)),
        SubmitError::EndsWorker => ends_worker(message).into(),
        SubmitError::Unsupported(message) => ApiError::unsupported(message).into(),
        SubmitError::InvalidParam(ParamError { param, message }) => {
            ApiError::invalid(Some(Cow::Owned(param)), ErrorCode::InvalidValue, message).into()
        }
    }
}

/// A request that was taken and failed before its first byte. Where the fault passes, it may come again after `retry_after`.
pub(super) fn unanswered(error: GenerationError, prompt_param: &'static str, retry_after: Duration) -> Failure {
    let error = of_generation(error, prompt_param);
    if error.status == 503 { Failure::retriable(error, retry_after) } else { error.into() }
}

/// A request that was taken and not answered.
/// The same of a request that a version had. One that waited for as long as it may, since no worker of the version is there, is told when
/// one will be.
pub(super) fn unanswered_by(version: &Version, error: GenerationError, prompt_param: &'static str) -> Failure {
    match error {
        GenerationError::Request(RequestError::DeadlineExceeded { waited_ms, limit_ms }) if !version.is_up() => {
            let [waited, limit] = [waited_ms, limit_ms].map(Duration::from_millis);
            Failure::held_too_long(waited, limit, version.retry_after())
        }
        error => unanswered(error, prompt_param, version.retry_after()),
    }
}

pub(super) fn of_generation(error: GenerationError, prompt_param: &'static str) -> ApiError {
    let message = error.to_string();
    match error {
        GenerationError::Request(error) => of_request(error, message, prompt_param),
        GenerationError::WorkerDied(_) => {
            ApiError::new(503, ErrorKind::ServiceUnavailableError, ErrorCode::WorkerDied, message)
        }
        GenerationError::EndsWorker => ends_worker(message),
        GenerationError::Retired | GenerationError::GaveWay => {
            ApiError::new(503, ErrorKind::ServiceUnavailableError, ErrorCode::ModelRetired, message)
        }
        GenerationError::ServerEnds => {
            ApiError::new(503, ErrorKind::ServiceUnavailableError, ErrorCode::ServerEnding, message)
        }
        GenerationError::SlowClient(_) => {
            ApiError::new(408, ErrorKind::InvalidRequestError, ErrorCode::SlowClient, message)
        }
    }
}

/// To be sent again it must be another one, which 4xx says to clients that send again by themselves.
fn ends_worker(message: String) -> ApiError {
    ApiError::new(422, ErrorKind::InvalidRequestError, ErrorCode::RequestEndsWorker, message)
}

fn of_request(error: RequestError, message: String, prompt_param: &'static str) -> ApiError {
    match error {
        RequestError::InvalidRequest { param, code, .. } => {
            // As the client calls it.
            let param = param.map(|param| match param.as_str() {
                "prompt" | "messages" => Cow::Borrowed(prompt_param),
                // What is none of `messages` there has a count of its own.
                within if within.starts_with("messages[") && prompt_param != "messages" => Cow::Borrowed(prompt_param),
                _ => Cow::Owned(param),
            });
            ApiError::invalid(param, ErrorCode::Other(code), message)
        }
        RequestError::ContextLengthExceeded { .. } => {
            ApiError::invalid(Some(Cow::Borrowed(prompt_param)), ErrorCode::ContextLengthExceeded, message)
        }
        RequestError::DeadlineExceeded { .. } => {
            ApiError::new(408, ErrorKind::ServiceUnavailableError, ErrorCode::RequestTimeout, message)
        }
        RequestError::Overloaded(_) => {
            ApiError::new(503, ErrorKind::ServiceUnavailableError, ErrorCode::Overloaded, message)
        }
        RequestError::ShuttingDown => {
            ApiError::new(503, ErrorKind::ServiceUnavailableError, ErrorCode::ModelRetired, message)
        }
        RequestError::Internal(_) | RequestError::Broken(_) => {
            ApiError::new(500, ErrorKind::ServerError, ErrorCode::InternalError, message)
        }
    }
}

/// Who asks shows no key, or one that is none, which clients know by the words of `OpenAI`'s.
pub(super) fn unauthorized(headers: &HeaderMap) -> impl IntoResponse {
    let is_shown = headers.contains_key(header::AUTHORIZATION) || headers.contains_key("x-api-key");
    let what = if is_shown { "Incorrect API key provided" } else { "An API key is needed" };
    let message = format!(
        "{what}: send one of those that this server was started with as `Authorization: Bearer KEY` or as `x-api-key: KEY`."
    );
    let failure = Failure::from(ApiError::new(401, ErrorKind::InvalidRequestError, ErrorCode::InvalidApiKey, message));
    ([(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))], failure)
}

/// A panic in a handler: a fault of ours, told to the client and logged without the request.
pub(super) fn panicked(panic: Box<dyn Any + Send>) -> Response {
    let what = reason(&*panic);
    tracing::error!(panic = what, "a request handler panicked");
    let message = "The server failed on this request; it has been logged.";
    Failure::from(ApiError::new(500, ErrorKind::ServerError, ErrorCode::InternalError, message)).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::version::{QueueLimit, Slowness};

    const PROMPT: &str = "messages";

    fn full(places: usize, retry_after: Duration) -> SubmitError {
        SubmitError::QueueFull { waiting: 7, places, limit: QueueLimit::MaxQueue(8), retry_after }
    }

    #[test]
    fn a_full_queue_is_told_with_its_limit_and_who_sets_it() {
        let second = Duration::from_secs(1);
        let text = full(1, second).to_string();
        let said = "7 requests are waiting for this model, and 8 may (--max-queue; in a pod spec.scheduling.maxQueue); try \
                    again in 1s";
        assert_eq!(text, said);
        assert!(full(16, second).to_string().contains("this one takes 16 places, and 8 may"));
        let limit = QueueLimit::Watermarks { high: 6, low: 3 };
        let text = SubmitError::QueueFull { waiting: 5, places: 1, limit, retry_after: second }.to_string();
        for part in ["more than 6", "--high-watermark", "no more than 3", "spec.scheduling.lowWatermark"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn each_failure_has_its_status_and_word() {
        let second = Duration::from_secs(1);
        let taken = |error| of_generation(error, PROMPT);
        for (error, status, code) in [
            (of_submission(full(1, second)).error, 429, "queue_full"),
            (
                of_submission(SubmitError::Unavailable { reason: String::new(), retry_after: second }).error,
                503,
                "model_not_ready",
            ),
            (of_submission(SubmitError::Retired).error, 503, "model_not_ready"),
            (of_submission(SubmitError::EndsWorker).error, 422, "request_ends_worker"),
            (taken(GenerationError::EndsWorker), 422, "request_ends_worker"),
            (of_submission(SubmitError::Unsupported("no")).error, 400, "unsupported_operation"),
            (taken(GenerationError::WorkerDied(String::new())), 503, "worker_died"),
            (taken(GenerationError::Retired), 503, "model_retired"),
            (taken(GenerationError::ServerEnds), 503, "server_ending"),
            (Failure::too_much_to_collect(TooMuch::Own).error, 400, "answer_too_large"),
            (Failure::too_much_to_collect(TooMuch::Everyone).error, 503, "overloaded"),
            (taken(GenerationError::SlowClient(Slowness::Overrun)), 408, "slow_client"),
            (taken(RequestError::DeadlineExceeded { waited_ms: 11, limit_ms: 10 }.into()), 408, "request_timeout"),
            (
                taken(RequestError::ContextLengthExceeded { prompt_tokens: 9, limit: 8 }.into()),
                400,
                "context_length_exceeded",
            ),
            (taken(RequestError::Internal(String::new()).into()), 500, "internal_error"),
        ] {
            assert_eq!((error.status, error.code.as_str()), (status, code));
        }
    }

    #[test]
    fn what_is_wrong_within_messages_is_named_where_there_are_messages() {
        for (prompt_param, param) in [("messages", "messages[1].tool_calls"), ("input", "input")] {
            let error = RequestError::invalid("messages[1].tool_calls", "tools_not_supported", "no").into();
            assert_eq!(of_generation(error, prompt_param).param.as_deref(), Some(param));
        }
    }

    #[tokio::test]
    async fn a_panic_is_an_error_object_too() {
        let routes = axum::Router::new()
            .route("/", axum::routing::get(async || -> () { panic!("no") }))
            .layer(tower_http::catch_panic::CatchPanicLayer::custom(panicked));
        let request = axum::extract::Request::new(axum::body::Body::empty());
        let response = tower::ServiceExt::oneshot(routes, request).await.unwrap_or_else(|never| match never {});
        assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let body = axum::body::to_bytes(response.into_body(), 4096).await.unwrap_or_default();
        let told: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
        assert_eq!(told["error"]["code"], "internal_error");
    }

    #[test]
    fn an_overload_says_when_to_come_back() {
        let response = of_submission(full(1, Duration::from_secs(7))).into_response();
        assert_eq!(response.headers().get(header::RETRY_AFTER), Some(&HeaderValue::from_static("7")));
        let unanswered = |error: GenerationError| {
            let response = unanswered(error, PROMPT, Duration::from_secs(7)).into_response();
            (response.status().as_u16(), response.headers().contains_key(header::RETRY_AFTER))
        };
        for passing in [
            GenerationError::WorkerDied(String::new()),
            GenerationError::Retired,
            RequestError::Overloaded(String::new()).into(),
            RequestError::ShuttingDown.into(),
        ] {
            assert_eq!(unanswered(passing), (503, true));
        }
        assert_eq!(unanswered(RequestError::Internal(String::new()).into()), (500, false));
        assert_eq!(unanswered(RequestError::DeadlineExceeded { waited_ms: 2, limit_ms: 1 }.into()), (408, false));
    }
}

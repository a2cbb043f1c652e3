//! Errors as a client is told them, whatever its protocol: whose fault it is, what is wrong for programs and for people, and
//! which parameter is. Absent: the shape of any protocol's error.

use std::borrow::Cow;
use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Whose fault it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// The request is wrong; it will be wrong again.
    InvalidRequestError,
    /// The request asks for something that is not there.
    NotFoundError,
    /// Too much at once; the same request may do well later.
    RateLimitError,
    /// The server cannot serve anybody for now.
    ServiceUnavailableError,
    /// The server does not do such work; llama-server's word.
    NotSupportedError,
    /// The server failed.
    ServerError,
}

/// What is wrong, as a short, stable word for programs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ErrorCode {
    /// The body is not JSON.
    InvalidJson,
    /// The body is no message of gRPC's of the kind that is expected.
    InvalidMessage,
    /// A parameter has the wrong JSON type.
    InvalidType,
    /// A parameter is out of its range.
    InvalidValue,
    /// A parameter must be given.
    MissingRequiredParameter,
    /// A parameter is known and not supported yet.
    UnsupportedParameter,
    /// No parameter has such a name.
    UnknownParameter,
    /// An address is known and not supported yet.
    UnsupportedOperation,
    /// A content part is of a kind that is not supported.
    UnsupportedContent,
    /// No key, or none that is good, is shown.
    InvalidApiKey,
    /// No such model is served here.
    ModelNotFound,
    /// No such response is kept here for who asks.
    ResponseNotFound,
    /// The response that a request goes on from is not kept here for who asks.
    PreviousResponseNotFound,
    /// What is kept cannot be read or written now.
    StoreUnavailable,
    /// The prompt leaves no room for an answer.
    ContextLengthExceeded,
    /// No such address.
    UnknownUrl,
    /// The address is right, the method is not.
    MethodNotAllowed,
    /// The body is over the limit.
    RequestTooLarge,
    /// The answer is over what is given whole.
    AnswerTooLarge,
    /// The body is not declared as JSON.
    UnsupportedMediaType,
    /// The body did not arrive in time.
    RequestTimeout,
    /// As many requests wait as may wait.
    QueueFull,
    /// Requests in flight hold all the memory they may.
    Overloaded,
    /// No model is ready.
    ModelNotReady,
    /// The model's process died during the request.
    WorkerDied,
    /// The model's process dies of the request.
    RequestEndsWorker,
    /// The model was taken out of service during the request.
    ModelRetired,
    /// The server was told to end, and waited for the request as long as it may.
    ServerEnding,
    /// The client did not read its stream.
    SlowClient,
    /// A fault of ours.
    InternalError,
    /// A word that the engine chose.
    Other(String),
}

impl ErrorCode {
    /// The word, as protocols and logs have it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::InvalidJson => "invalid_json",
            Self::InvalidMessage => "invalid_message",
            Self::InvalidType => "invalid_type",
            Self::InvalidValue => "invalid_value",
            Self::MissingRequiredParameter => "missing_required_parameter",
            Self::UnsupportedParameter => "unsupported_parameter",
            Self::UnknownParameter => "unknown_parameter",
            Self::UnsupportedOperation => "unsupported_operation",
            Self::UnsupportedContent => "unsupported_content",
            Self::InvalidApiKey => "invalid_api_key",
            Self::ModelNotFound => "model_not_found",
            Self::ResponseNotFound => "response_not_found",
            Self::PreviousResponseNotFound => "previous_response_not_found",
            Self::StoreUnavailable => "store_unavailable",
            Self::ContextLengthExceeded => "context_length_exceeded",
            Self::UnknownUrl => "unknown_url",
            Self::MethodNotAllowed => "method_not_allowed",
            Self::RequestTooLarge => "request_too_large",
            Self::AnswerTooLarge => "answer_too_large",
            Self::UnsupportedMediaType => "unsupported_media_type",
            Self::RequestTimeout => "request_timeout",
            Self::QueueFull => "queue_full",
            Self::Overloaded => "overloaded",
            Self::ModelNotReady => "model_not_ready",
            Self::WorkerDied => "worker_died",
            Self::RequestEndsWorker => "request_ends_worker",
            Self::ModelRetired => "model_retired",
            Self::ServerEnding => "server_ending",
            Self::SlowClient => "slow_client",
            Self::InternalError => "internal_error",
            Self::Other(word) => word,
        }
    }
}

/// An error that a client is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// The status as HTTP numbers them, 400 to 599.
    pub status: u16,
    /// Whose fault it is.
    pub kind: ErrorKind,
    /// The parameter at fault, as a path into the request: `messages[2].content`.
    pub param: Option<Cow<'static, str>>,
    /// What is wrong, for programs.
    pub code: ErrorCode,
    /// What is wrong and what to do, for people.
    pub message: String,
}

impl ApiError {
    /// A request that can never be served: 400.
    #[must_use]
    pub fn invalid(param: Option<Cow<'static, str>>, code: ErrorCode, message: impl Into<String>) -> Self {
        Self { status: 400, kind: ErrorKind::InvalidRequestError, param, code, message: message.into() }
    }

    /// A parameter has a value that it cannot have; `message` says what it must be, after its name.
    #[must_use]
    pub fn wrong_value(param: impl Into<Cow<'static, str>>, message: impl fmt::Display) -> Self {
        Self::of_param(param.into(), ErrorCode::InvalidValue, message)
    }

    /// A parameter is known, and what it asks for is not done; `message` says what to do, after its name.
    #[must_use]
    pub fn unsupported_parameter(param: impl Into<Cow<'static, str>>, message: impl fmt::Display) -> Self {
        Self::of_param(param.into(), ErrorCode::UnsupportedParameter, message)
    }

    /// A parameter must be given; `what` says what it is.
    #[must_use]
    pub fn missing(param: impl Into<Cow<'static, str>>, what: &str) -> Self {
        Self::of_param(param.into(), ErrorCode::MissingRequiredParameter, format_args!("is missing: {what}"))
    }

    fn of_param(param: Cow<'static, str>, code: ErrorCode, message: impl fmt::Display) -> Self {
        let message = format!("`{param}` {message}.");
        Self::invalid(Some(param), code, message)
    }

    /// Any other error without a parameter.
    #[must_use]
    pub fn new(status: u16, kind: ErrorKind, code: ErrorCode, message: impl Into<String>) -> Self {
        Self { status, kind, param: None, code, message: message.into() }
    }

    /// Work that the model does not do, or this server not yet: 400, since clients send again what is answered with 5xx.
    #[must_use]
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(400, ErrorKind::NotSupportedError, ErrorCode::UnsupportedOperation, message)
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.message, self.code.as_str())
    }
}

impl std::error::Error for ApiError {}

//! Every way in which a request is refused or fails, typed by when that is said: at submission, or later.

use serde::{Deserialize, Serialize};

use crate::degradation::DegradationLevel;

/// A generation parameter is out of its range.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{param}: {message}")]
pub struct ParamError {
    /// The parameter's name, as on the wire.
    pub param: String,
    /// What it must be.
    pub message: String,
}

impl ParamError {
    /// That this parameter must be something else.
    #[must_use]
    pub fn new(param: &str, message: impl Into<String>) -> Self {
        Self { param: param.to_owned(), message: message.into() }
    }
}

/// A request was not accepted; its sink is never called.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum SubmitError {
    /// As many requests wait as may wait.
    #[error("the queue is full: {limit} requests are waiting; try again later")]
    QueueFull {
        /// The configured limit.
        limit: usize,
    },
    /// Memory is short, and requests of this priority are not taken until it is not.
    #[error("memory is short ({}): requests of this priority are not taken; try again later", level.as_str())]
    MemoryPressure {
        /// How far the service is cut down.
        level: DegradationLevel,
    },
    /// A parameter is out of its range.
    #[error("{0}")]
    InvalidParam(ParamError),
    /// The engine is shutting down.
    #[error("the engine is shutting down")]
    ShuttingDown,
    /// The engine cannot decode any more; it must be replaced.
    #[error("the engine is broken: {0}")]
    Broken(String),
}

/// A request that was accepted could not be served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum RequestError {
    /// The request itself cannot be served, now or later.
    #[error("{message}")]
    InvalidRequest {
        /// The field at fault, as on the wire.
        param: Option<String>,
        /// A short, stable word for programs.
        code: String,
        /// What is wrong and what to do.
        message: String,
    },
    /// The prompt leaves no room for an answer. Clients know this error by the words of OpenAI's and of Anthropic's.
    #[error(
        "this model's maximum context length is {limit} tokens here, with the answer, and the prompt is too long: it has \
         {prompt_tokens} tokens or more; shorten it, or, where the model was trained for more than {limit}, start the server \
         with more for each request: leave --ctx-size (-c; in pods spec.runtime.contextSize) out, or make it --parallel \
         (-np; spec.runtime.parallel) times what one needs, or have -np 1"
    )]
    ContextLengthExceeded {
        /// Tokens of the prompt, or the fewest that a text of its length can have.
        prompt_tokens: u32,
        /// Tokens that a sequence holds.
        limit: u32,
    },
    /// The request waited longer than it may; it generated nothing.
    #[error("the request waited {waited_ms} ms for its first token, and {limit_ms} ms is the limit; try again later")]
    DeadlineExceeded {
        /// How long it waited.
        waited_ms: u64,
        /// How long it may.
        limit_ms: u64,
    },
    /// The request was not begun because memory is short; later it may be.
    #[error("{0}")]
    Overloaded(String),
    /// The engine stopped before the request ended.
    #[error("the engine is shutting down")]
    ShuttingDown,
    /// The engine failed, not the request.
    #[error("internal error: {0}")]
    Internal(String),
    /// The engine cannot decode any more; another one may serve the request.
    #[error("the engine is broken: {0}")]
    Broken(String),
}

impl RequestError {
    /// A request that cannot be served for this field.
    #[must_use]
    pub fn invalid(param: &str, code: &str, message: impl Into<String>) -> Self {
        Self::InvalidRequest { param: Some(param.to_owned()), code: code.to_owned(), message: message.into() }
    }

    /// The same, with the field at fault named as the client named it.
    #[must_use]
    pub fn of(self, name: &str) -> Self {
        match self {
            Self::InvalidRequest { code, message, .. } => Self::invalid(name, &code, message),
            other => other,
        }
    }

    /// A short, stable word for programs.
    #[must_use]
    pub fn code(&self) -> &str {
        match self {
            Self::InvalidRequest { code, .. } => code,
            Self::ContextLengthExceeded { .. } => "context_length_exceeded",
            Self::DeadlineExceeded { .. } => "deadline_exceeded",
            Self::Overloaded(_) => "overloaded",
            Self::ShuttingDown => "shutting_down",
            Self::Internal(_) | Self::Broken(_) => "internal_error",
        }
    }
}

//! Every way in which the engine says no, typed by when it says it: at load, at submission, during a request, at a
//! probe. Those that a worker passes on to its front can be serialised.

use std::path::PathBuf;
use std::time::Duration;

use gantry_llama::ChatError;
use serde::{Deserialize, Serialize};

use crate::ladder::DegradationLevel;

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
    pub(crate) fn new(param: &str, message: impl Into<String>) -> Self {
        Self { param: param.to_owned(), message: message.into() }
    }
}

/// The model could not be made ready.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// The configuration is out of range.
    #[error("{0}")]
    Config(ParamError),
    /// No backend that was asked for, or that this machine needs, can be used.
    #[error("{0}")]
    Backend(String),
    /// The file is not there, not readable, or not a model that llama.cpp can load.
    #[error("cannot load {}: {reason}", path.display())]
    Model {
        /// The file.
        path: PathBuf,
        /// llama.cpp's reason.
        reason: String,
    },
    /// The draft model cannot guess for the model.
    #[error("{} cannot be the draft model of {}: {reason}; use a smaller model of the same family", draft.display(), model.display())]
    Draft {
        /// The draft model's file.
        draft: PathBuf,
        /// The model's file.
        model: PathBuf,
        /// What does not fit.
        reason: String,
    },
    /// The model's chat template cannot render chats.
    #[error("{0}; correct tokenizer.chat_template in the file")]
    Template(ChatError),
    /// The progress callback asked to stop.
    #[error("loading was aborted by the caller")]
    Aborted,
    /// The model is loaded, but its context (the KV cache above all) could not be made.
    #[error("cannot make a context: {reason}; a smaller context size or cache type needs less memory")]
    Context {
        /// llama.cpp's reason.
        reason: String,
    },
    /// The model is an encoder.
    #[error("the model generates no text, it gives vectors of texts: serve it with embeddings on (--embeddings)")]
    GeneratesNothing,
    /// Nothing says how the vectors of tokens become one.
    #[error(
        "the model's file names no pooling, so it is none for embeddings: choose one (--pooling mean, cls or last)"
    )]
    NoPooling,
    /// The first tokens could not be decoded.
    #[error("the model loads but does not decode: {0}")]
    WarmUp(String),
    /// What the first tokens gave are no numbers.
    #[error(
        "{} loads, but what it computes is not finite (NaN or infinite): a weight, a norm or a rope parameter in the file is \
         damaged. `gantry-server validate` looks for it; download the file again, or convert or quantise the model again",
        path.display()
    )]
    NotFinite {
        /// The file.
        path: PathBuf,
    },
    /// The file loads, and yet nobody could be answered with it.
    #[error("{} loads, but could answer nobody: {reason}; convert the model again, or use another file", path.display())]
    Useless {
        /// The file.
        path: PathBuf,
        /// Why not, with the figures.
        reason: String,
    },
    /// The prefix cache's directory cannot be used.
    #[error("{0}")]
    PrefixCache(String),
    /// A thread could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(String),
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
    /// The prompt leaves no room for an answer.
    #[error(
        "the prompt needs at least {prompt_tokens} tokens, and a request may use {limit} with its answer; shorten the prompt, or, \
         where the model was trained for more than {limit}, start the server with more for each request: leave --ctx-size \
         (-c; in pods spec.runtime.contextSize) out, or make it --parallel (-np; spec.runtime.parallel) times what one needs, \
         or have -np 1"
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
    pub(crate) fn invalid(param: &str, code: &str, message: impl Into<String>) -> Self {
        Self::InvalidRequest { param: Some(param.to_owned()), code: code.to_owned(), message: message.into() }
    }

    /// The same, with the field at fault named as the client named it.
    pub(crate) fn of(self, name: &str) -> Self {
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

impl From<ChatError> for RequestError {
    fn from(error: ChatError) -> Self {
        let code = match error {
            ChatError::Messages(_) => "invalid_messages",
            ChatError::Forged { .. } => "special_token_in_text",
            ChatError::TemplateProcess(_) => return Self::Internal(error.to_string()),
            ChatError::Template(_) | ChatError::TemplateRefused(_) | ChatError::TemplateLimit { .. } => {
                "chat_template_failed"
            }
        };
        Self::invalid("messages", code, error.to_string())
    }
}

/// No token could be decoded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum ProbeError {
    /// The engine did not finish a step in time.
    #[error("no token was decoded within {waited:?}")]
    Timeout {
        /// How long the probe waited.
        waited: Duration,
    },
    /// The engine is shutting down.
    #[error("the engine is shutting down")]
    ShuttingDown,
    /// The engine cannot decode any more; it must be replaced.
    #[error("the engine is broken: {0}")]
    Broken(String),
}

/// What [`Engine::generate`](crate::Engine::generate) can end with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The request was not accepted.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// The request was accepted and could not be served.
    #[error(transparent)]
    Request(#[from] RequestError),
}

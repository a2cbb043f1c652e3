//! Every way in which the engine says no, typed by when it says it: at load, at submission, during a request, at a
//! probe. Those that a worker passes on to its front can be serialised.

use std::path::PathBuf;
use std::time::Duration;

pub use gantry_core::{ParamError, RequestError, SubmitError};
use gantry_llama::ChatError;
use serde::{Deserialize, Serialize};

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
    /// A chat template that was given in the place of the file's cannot.
    #[error("{0}; correct the template that is given in the place of the file's")]
    GivenTemplate(ChatError),
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

/// What a chat that was not rendered is told.
pub(crate) fn of_chat(error: &ChatError) -> RequestError {
    let told = error.to_string();
    match error {
        ChatError::Messages(_) => RequestError::invalid("messages", "invalid_messages", told),
        ChatError::Forged { .. } => RequestError::invalid("messages", "special_token_in_text", told),
        ChatError::TemplateProcess(_) => RequestError::Internal(told),
        ChatError::Template(_) | ChatError::TemplateRefused(_) | ChatError::TemplateLimit { .. } => {
            RequestError::invalid("messages", "chat_template_failed", told)
        }
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

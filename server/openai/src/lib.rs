//! `OpenAI`'s wire types, without I/O: what requests may say, what answers look like, how errors are told.
//!
//! Bytes become a [`ValidChatRequest`] or a [`ValidCompletionRequest`] in one place ([`request`]), or an [`ApiError`]
//! that names the parameter at fault; later code cannot fail for a request's shape. Unknown fields are ignored, since
//! clients send extras; parameters that are known and not supported are refused when they ask for something
//! ([`unsupported`]). Absent: HTTP, models, tokens; what only the model can judge (its template, its context) is not
//! judged here.

mod error;
mod fields;
mod request;
mod response;
mod sse;
mod unsupported;

pub use error::{ApiError, ErrorCode, ErrorKind, ErrorObject, ErrorResponse};
pub use request::{
    MAX_CONTENT_PARTS, MAX_MESSAGES, MAX_STOP_BYTES, MAX_STOP_STRINGS, MAX_TOKENS_LIMIT, Message, Role, Sampling,
    Streaming, ValidChatRequest, ValidCompletionRequest,
};
pub use response::{
    AssistantMessage, ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, Delta, FinishReason, Model, ModelList,
    PromptTokensDetails, TextChoice, TextCompletion, Usage,
};
pub use sse::{SSE_CONTENT_TYPE, SSE_DONE, SSE_KEEP_ALIVE, sse_event};

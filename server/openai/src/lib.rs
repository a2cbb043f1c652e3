//! `OpenAI`'s wire types, without I/O: what requests may say, what answers look like, how errors are told.
//!
//! Bytes become a `Valid*` request in one place each ([`request`], [`embeddings`], [`rerank`]), or an [`ApiError`] that
//! names the parameter at fault; later code cannot fail for a request's shape. What becomes of
//! each name [`parameters`] says; one that is not known is refused. What a stream sends for each token is written from a
//! template ([`chunk`]). Absent: HTTP, models, tokens; what only the model can judge (its template, its context, a schema)
//! is not judged here.

mod base64;
mod chunk;
mod embeddings;
mod error;
mod fields;
mod format;
mod inputs;
mod limits;
mod logprobs;
mod messages;
pub mod parameters;
mod request;
mod rerank;
mod response;
mod sampling;
mod sse;

pub use chunk::{ChunkHead, ChunkTemplate};
pub use embeddings::{Embedding, EmbeddingList, EmbeddingVector, EncodingFormat, ValidEmbeddingsRequest};
pub use error::{ApiError, ErrorCode, ErrorKind, ErrorObject, ErrorResponse};
pub use limits::*;
pub use logprobs::{ChatLogprob, ChatLogprobs, TextLogprobs, TextOffset, TokenChance, TopLogprob};
pub use messages::parse_messages;
pub use request::{Common, Streaming, ValidChatRequest, ValidCompletionRequest, parse_priority};
pub use rerank::{RerankDocument, RerankResponse, RerankResult, ValidRerankRequest};
pub use response::{
    AssistantMessage, ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, Delta, EmbeddingUsage, FinishReason,
    Model, ModelList, PromptTokensDetails, TextChoice, TextCompletion, TimeHistogram, Timings, Usage,
};
pub use sse::{SSE_CONTENT_TYPE, SSE_DONE, SSE_KEEP_ALIVE, sse_event, write_sse_event};

//! `OpenAI`'s wire types, without I/O: what requests may say, what answers look like, how errors are told.
//!
//! Bytes become what is asked, and what writes the answer, in one place each ([`decode_chat`], [`decode_completion`],
//! [`decode_infill`], [`decode_embeddings`], [`decode_rerank`], [`decode_score`]), or an [`ApiError`](gantry_core::ApiError) that names the parameter at fault; later
//! code cannot fail for a request's shape. What becomes of
//! each name [`parameters`] says; one that is not known is refused. What a stream sends for each token is written from a
//! template ([`chunk`]). Absent: HTTP, models, tokens; what only the model can judge (its template, its context, a schema)
//! is not judged here.

mod base64;
mod chat;
mod chunk;
mod completions;
mod embeddings;
mod error;
mod fields;
mod format;
mod infill;
mod inputs;
mod limits;
mod logprobs;
mod messages;
pub mod parameters;
mod request;
mod rerank;
mod response;
mod sampling;
mod score;
mod shape;
mod sse;
mod tokenizer;
mod told;
mod tools;

pub use chat::{ChatEncoder, ChatStream, decode_chat};
pub use chunk::{ChunkHead, ChunkTemplate};
pub use completions::{CompletionEncoder, CompletionStream, decode_completion};
pub use embeddings::{
    Embedding, EmbeddingList, EmbeddingVector, EmbeddingsEncoder, EncodingFormat, ValidEmbeddingsRequest,
    decode_embeddings, embedding_inputs,
};
pub use error::{ErrorObject, ErrorResponse};
pub use infill::{InfillEncoder, InfillStream, decode_infill, infill_schema};
pub use limits::*;
pub use logprobs::{ChatLogprob, ChatLogprobs, TextLogprobs, TextOffset, TokenChance, TopLogprob};
pub use messages::parse_messages;
pub use request::{Common, Streaming, ValidChatRequest, ValidCompletionRequest};
pub use rerank::{RerankDocument, RerankEncoder, RerankResponse, RerankResult, ValidRerankRequest, decode_rerank};
pub use response::{
    AssistantMessage, ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, CompletionTokensDetails, Delta,
    EmbeddingUsage, FinishReason, Model, ModelList, ModelMeta, PromptTokensDetails, StopReason, TextChoice,
    TextCompletion, TimeHistogram, Timings, Usage,
};
pub use score::{Score, ScoreEncoder, ScoreResponse, decode_score};
pub use shape::{Shape, schema};
pub use sse::{SSE_DONE, sse_event, write_sse_event};
pub use tokenizer::{
    TokenizerEncoder, apply_template_schema, decode_apply_template, decode_detokenize, decode_tokenize,
    detokenize_schema, tokenize_schema,
};

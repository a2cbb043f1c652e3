//! The generate protocol, without I/O: `/generate`, `/chat` and their typed events, for clients that were written for such a
//! server and not for OpenAI's API.
//!
//! A body becomes what is asked, and what writes the answer ([`decode_generate`], [`decode_chat`]), or an
//! [`ApiError`](gantry_core::ApiError) that names the field at fault by its path. A field that nobody here knows is refused. The same
//! calls come as messages of gRPC ([`grpc`]). Absent: HTTP, models, tokens; tools, and what a model thinks before it answers, for which this protocol has no words.

mod answer;
mod error;
pub mod grpc;
mod limits;
mod request;
mod stream;

pub use answer::{ChatEncoder, GenerateEncoder, TextOf, chat_schema, generate_schema};
pub use error::{error_body, error_schema, status_of};
pub use limits::*;
pub use request::{chat_request_schema, decode_chat, decode_generate, generate_request_schema};
pub use stream::TokenStream;

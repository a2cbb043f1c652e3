//! Anthropic's Messages API, without I/O: what requests may say, what answers and their events look like, how errors are told.
//!
//! A body becomes what is asked, and what writes the answer ([`decode_messages`], [`decode_count_tokens`]), or an
//! [`ApiError`](gantry_core::ApiError) that names the field at fault by its path. A field that nobody here knows is refused.
//! Absent: HTTP, models, tokens; images and documents; tools that the server runs.

mod answer;
mod content;
mod error;
mod limits;
mod request;
mod stream;
mod tools;

pub use answer::{CountEncoder, MessageEncoder, count_schema, message_schema};
pub use error::{error_body, error_schema};
pub use limits::*;
pub use request::{count_tokens_schema, decode_count_tokens, decode_messages, messages_schema};
pub use stream::MessageStream;

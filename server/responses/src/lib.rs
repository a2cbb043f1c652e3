//! `OpenAI`'s Responses API, without I/O: what requests may say, what answers and their events look like.
//!
//! A body becomes what is asked, and what writes the answer ([`decode_responses`]), or an
//! [`ApiError`](gantry_core::ApiError) that names the field at fault by its path. A field that nobody here knows is refused.
//! Nothing is kept: what a turn needs, its request brings. Absent: HTTP, models, tokens; images, files and tools that the
//! server runs; stored answers, and all that refers to them.

mod answer;
mod items;
mod limits;
mod request;
mod stream;

pub use answer::ResponseEncoder;
pub use limits::*;
pub use request::decode_responses;
pub use stream::ResponseStream;

//! The protocol as gRPC: the calls of `/generate`, `/chat` and `/embeddings`, whose messages have the fields that bodies have there.
//!
//! A call's body is one message in its frame ([`frame`]), which becomes what the same body of JSON would ([`request`]); the checks are
//! those. What comes of it is written in frames, too ([`answer`]), and a stream's events are those of server-sent events. How a call
//! ended stands in its trailers, which come after all that; [`CallEnd`] keeps it until then, and [`status`] says which status an error
//! is. Absent: HTTP/2, deadlines and trailers, which are the server's.

mod answer;
mod frame;
#[allow(missing_docs, clippy::all, reason = "made from the .proto, which says what each is")]
pub mod proto {
    include!(concat!(env!("OUT_DIR"), "/gantry.inference.v1.rs"));
}
mod request;
mod status;

pub use answer::{CallEmbeddings, CallEncoder, CallEnd};
pub use frame::message_memory_bytes;
pub use request::{EmbeddingsCall, decode_chat, decode_embeddings, decode_generate};
pub use status::{CallStatus, status_of};

/// What reflection tells of the service: its `.proto`, as protoc writes it.
pub const FILE_DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/inference.bin"));
/// The service's name.
pub const SERVICE: &str = "gantry.inference.v1.Inference";

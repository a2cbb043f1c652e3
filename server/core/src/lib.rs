//! What a request and an answer are, whatever protocol a request comes by and whatever computes the answer.
//!
//! A protocol decodes its bytes into a [`Prompt`] with [`GenerationParams`], or a [`PooledWork`], and encodes the events
//! that come of it ([`GenerationEvent`], [`PooledEvent`]) or why none do ([`SubmitError`], [`RequestError`]). The front and
//! its workers speak these types with each other, and an engine computes with them. Absent: I/O, HTTP, C++ (who links this
//! links no llama.cpp), the shape of any protocol, and how a model is loaded.

mod degradation;
mod error;
mod event;
mod limits;
mod message;
mod order;
mod params;
mod request;

pub use degradation::DegradationLevel;
pub use error::{ParamError, RequestError, SubmitError};
pub use event::{
    FinishReason, GenerationEvent, ITL_BUCKETS_MS, ItlHistogram, PooledEvent, PooledOutput, Timings, TokenChance,
    TokenLogprob, Usage,
};
pub use limits::*;
pub use message::{Message, Part, Role, ToolCall, messages_json};
pub use order::{Priority, Turn};
pub use params::{Constraint, DryParams, GenerationParams};
pub use request::{PooledWork, Prompt, TextInput};

//! What a request and an answer are, whatever protocol a request comes by and whatever computes the answer.
//!
//! A protocol decodes its bytes into a [`TextRequest`] or a [`PooledRequest`], and its encoder ([`TextEncoder`],
//! [`PooledEncoder`]) writes what comes of it: answers, events ([`GenerationEvent`]) or an [`ApiError`]. The front and its
//! workers speak of [`Prompt`]s, [`GenerationParams`] and events with each other, an engine computes with them, and both say
//! why not ([`SubmitError`], [`RequestError`]). Absent: I/O, HTTP, C++ (who links this
//! links no llama.cpp), the shape of any protocol, and how a model is loaded.

mod api_error;
mod chat;
mod degradation;
mod error;
mod event;
mod json;
mod limits;
mod message;
mod order;
mod params;
mod protocol;
mod request;
mod schema;

pub use api_error::{ApiError, ErrorCode, ErrorKind};
pub use chat::{Chat, ContinuationFault, Tool, ToolChoice, ToolsFault, check_continuation, check_tools};
pub use degradation::DegradationLevel;
pub use error::{ParamError, RequestError, SubmitError};
pub use event::{
    AnswerOutput, FinishReason, GenerationEvent, ITL_BUCKETS_MS, ItlHistogram, OutputPart, PooledEvent, PooledOutput,
    PromptChance, PromptToken, ShownPrompt, StopCause, Stretch, Timings, TokenChance, TokenLogprob, TokenPiece,
    ToolCallDelta, Usage,
};
pub use json::{
    integer_of, json_memory_bytes, nearest, no_json, read_body, read_integer, read_integer_of, read_json, read_typed,
    with_name_here,
};
pub use limits::*;
pub use message::{Message, Part, Role, ToolCall, messages_json};
pub use order::{Priority, Turn};
pub use params::{Constraint, DryParams, Extent, GenerationParams, PromptForm};
pub use protocol::{
    Answer, AnswerHead, EncodeError, PooledEncoder, PooledRequest, PooledSize, PromptEncoder, StreamEncoder,
    TextEncoder, TextRequest,
};
pub use request::{Infill, InfillFile, PooledTask, PooledWork, Prompt, TextInput};
pub use schema::{TOOL_NAME_PATTERN, TextOr};

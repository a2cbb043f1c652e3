//! `OpenAI`'s Responses API, without I/O: what requests may say, what answers and their events look like.
//!
//! A body becomes what is asked, and what writes the answer ([`decode_responses`], [`ResponsesRequest::resolve`]), or an
//! [`ApiError`](gantry_core::ApiError) that names the field at fault by its path. A field that nobody here knows is refused.
//! Where responses are kept, a request says first which of them it refers to ([`ResponsesRequest::refers_to`]), and is resolved with them.
//! Absent: HTTP, models, tokens; where responses are kept, and whose they are; images, files and tools that the server runs.

mod answer;
mod id;
mod items;
mod limits;
mod request;
mod stored;
mod stream;

pub use answer::{ResponseEncoder, Status, response_schema};
pub use id::ResponseId;
pub use limits::*;
pub use request::{ResolvedRequest, ResponsesRequest, decode_responses, request_schema};
pub use stored::{
    Progress, StoredResponse, StoredResponses, abandoned, check_retrieval, deleted, deleted_schema, page,
    page_parameters, page_schema, retrieval_parameters,
};
pub use stream::ResponseStream;

//! Errors as this protocol tells them.

use gantry_core::{ApiError, ErrorCode, ErrorKind};
use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

/// The body of an error.
#[must_use]
pub fn error_body(error: &ApiError) -> Value {
    json!({"error": {"message": error.message, "type": kind_of(error), "code": error.code.as_str()}})
}

/// Its status: that there is no place for another request is the server's state here, as 503 says, and no fault of the client's.
#[must_use]
pub fn status_of(error: &ApiError) -> u16 {
    if error.code == ErrorCode::QueueFull { 503 } else { error.status }
}

/// The body of an error, for those who describe the server to programs.
pub fn error_schema(_: &mut SchemaGenerator) -> Schema {
    let text = json!({"type": "string"});
    let kinds = [
        "invalid_request_error",
        "not_found_error",
        "rate_limit_error",
        "timeout_error",
        "server_error",
        "unavailable_error",
    ];
    let error = json!({
        "type": "object", "required": ["message", "type", "code"],
        "properties": {"message": text, "type": {"type": "string", "enum": kinds}, "code": text},
    });
    json_schema!({"type": "object", "required": ["error"], "properties": {"error": error}})
}

fn kind_of(error: &ApiError) -> &'static str {
    match (error.status, error.kind) {
        (408, _) => "timeout_error",
        (_, ErrorKind::InvalidRequestError | ErrorKind::NotSupportedError) => "invalid_request_error",
        (_, ErrorKind::NotFoundError) => "not_found_error",
        (_, ErrorKind::RateLimitError) => "rate_limit_error",
        (_, ErrorKind::ServiceUnavailableError) => "unavailable_error",
        (_, ErrorKind::ServerError) => "server_error",
    }
}

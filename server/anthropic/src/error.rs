//! Errors as this API tells them.

use gantry_core::{ApiError, ErrorKind};
use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

/// The body of an error, whatever it is about; `request_id` as the answer's header has it.
#[must_use]
pub fn error_body(error: &ApiError, request_id: Option<&str>) -> Value {
    let mut body = json!({"type": "error", "error": {"type": kind_of(error), "message": error.message}});
    if let (Some(id), Some(body)) = (request_id, body.as_object_mut()) {
        body.insert("request_id".to_owned(), json!(id));
    }
    body
}

/// The body of an error, for those who describe the server to programs.
pub fn error_schema(_: &mut SchemaGenerator) -> Schema {
    let kinds = [
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "overloaded_error",
        "invalid_request_error",
        "api_error",
    ];
    let error = json!({
        "type": "object", "required": ["type", "message"],
        "properties": {"type": {"type": "string", "enum": kinds}, "message": {"type": "string"}},
    });
    json_schema!({
        "type": "object", "required": ["type", "error"],
        "properties": {"type": {"const": "error"}, "error": error, "request_id": {"type": "string"}},
    })
}

fn kind_of(error: &ApiError) -> &'static str {
    match (error.status, error.kind) {
        (401, _) => "authentication_error",
        (403, _) => "permission_error",
        (404, _) => "not_found_error",
        (413, _) => "request_too_large",
        (429, _) => "rate_limit_error",
        (503, _) | (_, ErrorKind::ServiceUnavailableError) => "overloaded_error",
        (400..500, _) => "invalid_request_error",
        _ => "api_error",
    }
}

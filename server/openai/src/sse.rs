//! Server-sent events as `OpenAI` frames them.

use std::io::Write;

use serde::Serialize;

/// The end of a stream that went well.
pub const SSE_DONE: &str = "data: [DONE]\n\n";

/// One event.
///
/// # Errors
/// The payload cannot be written as JSON.
pub fn sse_event<T: Serialize>(payload: &T) -> Result<String, serde_json::Error> {
    // JSON escapes line breaks, so one `data:` line holds all of it.
    Ok(format!("data: {}\n\n", serde_json::to_string(payload)?))
}

/// The same, into a buffer that is there.
///
/// # Errors
/// The payload cannot be written as JSON, or `out` takes no more.
pub fn write_sse_event<T: Serialize>(mut out: impl Write, payload: &T) -> Result<(), serde_json::Error> {
    out.write_all(b"data: ").map_err(serde_json::Error::io)?;
    serde_json::to_writer(&mut out, payload)?;
    out.write_all(b"\n\n").map_err(serde_json::Error::io)
}

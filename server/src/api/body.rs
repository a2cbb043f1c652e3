//! Request bodies, within limits of size and time.

use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use bytes::Bytes;
use gantry_openai::{ApiError, ErrorCode, ErrorKind};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use tokio::time::timeout;

use super::errors::Failure;
use crate::limits::{BODY_DISCARD_LIMIT, BODY_READ_LIMIT, MAX_BODY_BYTES};

/// Reads a JSON body whole.
pub(super) async fn read(request: Request) -> Result<Bytes, Failure> {
    let (parts, body) = request.into_parts();
    check_media_type(&parts.headers)?;
    let declared = parts.headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|bytes| bytes > MAX_BODY_BYTES as u64) {
        discard(body);
        return Err(too_large());
    }
    match timeout(BODY_READ_LIMIT, Limited::new(body, MAX_BODY_BYTES).collect()).await {
        Ok(Ok(whole)) => Ok(whole.to_bytes()),
        Ok(Err(error)) if error.downcast_ref::<LengthLimitError>().is_some() => Err(too_large()),
        Ok(Err(error)) => {
            let message = format!("The body ended early: {error}.");
            Err(ApiError::invalid(None, ErrorCode::InvalidJson, message).into())
        }
        Err(_) => {
            let message = format!("The body did not arrive within {} s.", BODY_READ_LIMIT.as_secs());
            Err(ApiError::new(408, ErrorKind::InvalidRequestError, ErrorCode::RequestTimeout, message).into())
        }
    }
}

fn too_large() -> Failure {
    let message = format!("The body is over {MAX_BODY_BYTES} bytes, which is the limit; shorten the request.");
    ApiError::new(413, ErrorKind::InvalidRequestError, ErrorCode::RequestTooLarge, message).into()
}

/// Throws a refused body away for a moment: a client that still writes when the connection closes gets a reset, and
/// with it may lose the answer that tells why.
fn discard(mut body: Body) {
    tokio::spawn(timeout(BODY_DISCARD_LIMIT, async move { while let Some(Ok(_)) = body.frame().await {} }));
}

fn check_media_type(headers: &HeaderMap) -> Result<(), Failure> {
    let refuse = |what: String| {
        let message = format!("{what}; send JSON with Content-Type: application/json.");
        Err(ApiError::new(415, ErrorKind::InvalidRequestError, ErrorCode::UnsupportedMediaType, message).into())
    };
    if headers.get(header::CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity") {
        return refuse("Compressed bodies are not taken".to_owned());
    }
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let text = value.to_str().unwrap_or("").split(';').next().unwrap_or("").trim().to_ascii_lowercase();
    if text == "application/json" || text.ends_with("+json") || text == "text/json" {
        Ok(())
    } else {
        refuse(format!("The body is declared as {value:?}"))
    }
}

/// Compile-time proof that the limits fit each other: a body that was read must fit into a frame, even when every byte
/// of it needs escaping.
const _: () = assert!(MAX_BODY_BYTES * 2 < crate::limits::MAX_FRAME_BYTES);
const _: () = assert!(BODY_DISCARD_LIMIT.as_secs() < Duration::from_secs(60).as_secs());

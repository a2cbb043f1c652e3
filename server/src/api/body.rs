//! Request bodies, read within limits of size and time, and of memory over all of them.
//!
//! What has arrived is what counts: memory is taken as bytes come, twice as much each time, never ahead for what a client
//! says it will send. A client that sends slower than [`BODY_MIN_BYTES_PER_SECOND`] is told so and loses its place.

use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use bytes::Bytes;
use gantry_core::{ApiError, ErrorCode, ErrorKind};
use http_body_util::BodyExt;
use tokio::time::{Instant, timeout, timeout_at};

use super::budget::{Budget, Peer, Share};
use super::errors::Failure;
use super::routes::{self, Protocol};
use crate::limits::{
    BODY_BUDGET_WAIT, BODY_CHUNK_BYTES, BODY_DISCARD_LIMIT, BODY_MIN_BYTES_PER_SECOND, BODY_RATE_WINDOW,
    BODY_READ_LIMIT, MAX_BODY_BYTES, MAX_FRAME_BYTES,
};

// What was read must fit into a frame.
const _: () = assert!(MAX_BODY_BYTES * 2 < MAX_FRAME_BYTES);

/// Bytes that must come in each [`BODY_RATE_WINDOW`].
const WINDOW_BYTES: usize = BODY_MIN_BYTES_PER_SECOND * BODY_RATE_WINDOW.as_secs() as usize;

/// Reads a body whole, which its protocol says the kind of.
pub(super) async fn read(budget: &Budget, request: Request) -> Result<(Bytes, Share), Failure> {
    let (parts, mut body) = request.into_parts();
    let protocol = routes::protocol_of(parts.extensions.get());
    let share = budget.open(parts.extensions.get::<Peer>().copied().unwrap_or_default());
    let read = async {
        if protocol != Protocol::Grpc {
            check_media_type(&parts.headers)?;
        }
        read_within_limits(share, &parts.headers, &mut body).await
    };
    match read.await {
        Ok(read) => Ok(read),
        Err(failure) => {
            discard(body);
            Err(failure)
        }
    }
}

async fn read_within_limits(mut share: Share, headers: &HeaderMap, body: &mut Body) -> Result<(Bytes, Share), Failure> {
    let declared = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    let most = match declared {
        Some(bytes) => usize::try_from(bytes).ok().filter(|bytes| *bytes <= MAX_BODY_BYTES).ok_or_else(too_large)?,
        None => MAX_BODY_BYTES,
    };
    let mut pace = Pace::new(Instant::now());
    let mut whole = Vec::new();
    loop {
        let Ok(frame) = timeout_at(pace.deadline(), body.frame()).await else {
            pace.look(Instant::now())?;
            continue;
        };
        let Some(frame) = frame else { break };
        let frame = frame.map_err(|error| {
            ApiError::invalid(None, ErrorCode::InvalidJson, format!("The body ended early: {error}."))
        })?;
        // Trailers say nothing that is asked for here.
        let Ok(data) = frame.into_data() else { continue };
        let needed = whole.len() + data.len();
        if needed > most {
            return Err(too_large());
        }
        if let Some(capacity) = grown(whole.capacity(), needed, most) {
            let asked = Instant::now();
            share.grow(capacity - whole.capacity(), BODY_BUDGET_WAIT).await?;
            // It was not the client that was slow.
            pace.pause(asked.elapsed());
            whole.reserve_exact(capacity - whole.len());
        }
        whole.extend_from_slice(&data);
        pace.arrived(data.len());
    }
    share.complete();
    share.shrink(whole.len());
    Ok((Bytes::from(whole), share))
}

/// The capacity for a body of which `needed` bytes are there and that is `most` bytes at most, where what it has is too
/// little: twice that, so that not more than half of what is taken is empty and bytes are copied once on average.
fn grown(capacity: usize, needed: usize, most: usize) -> Option<usize> {
    (needed > capacity).then(|| needed.max(capacity * 2).max(BODY_CHUNK_BYTES).min(most))
}

/// How fast a body comes.
struct Pace {
    end: Instant,
    window_end: Instant,
    in_window_bytes: usize,
}

impl Pace {
    fn new(now: Instant) -> Self {
        Self { end: now + BODY_READ_LIMIT, window_end: now + BODY_RATE_WINDOW, in_window_bytes: 0 }
    }

    /// When to look again, if nothing comes.
    fn deadline(&self) -> Instant {
        self.end.min(self.window_end)
    }

    fn arrived(&mut self, bytes: usize) {
        self.in_window_bytes += bytes;
    }

    fn pause(&mut self, time: Duration) {
        self.end += time;
        self.window_end += time;
    }

    /// Looks whether enough has come.
    fn look(&mut self, now: Instant) -> Result<(), ApiError> {
        let late = |message: String| {
            Err(ApiError::new(408, ErrorKind::InvalidRequestError, ErrorCode::RequestTimeout, message))
        };
        if now >= self.end {
            return late(format!("The body did not arrive within {} s.", BODY_READ_LIMIT.as_secs()));
        }
        if now >= self.window_end {
            if self.in_window_bytes < WINDOW_BYTES {
                let (came, window) = (self.in_window_bytes, BODY_RATE_WINDOW.as_secs());
                return late(format!(
                    "The body arrives too slowly: {came} bytes came in {window} s, and {BODY_MIN_BYTES_PER_SECOND} \
                     bytes a second is the least."
                ));
            }
            self.window_end = now + BODY_RATE_WINDOW;
            self.in_window_bytes = 0;
        }
        Ok(())
    }
}

fn too_large() -> Failure {
    let message = format!("The body is over {MAX_BODY_BYTES} bytes, which is the limit; shorten the request.");
    ApiError::new(413, ErrorKind::InvalidRequestError, ErrorCode::RequestTooLarge, message).into()
}

/// Throws a refused body away for a moment: a client that still writes when the connection closes gets a reset, and
/// with it may lose the answer that tells why.
pub(super) fn discard(mut body: Body) {
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

#[cfg(test)]
#[path = "body_tests.rs"]
mod tests;

//! Request bodies, within limits of size and time, and of memory over all of them.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use bytes::Bytes;
use gantry_openai::{ApiError, ErrorCode, ErrorKind};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::errors::Failure;
use crate::limits::{
    BODY_BUDGET_BYTES, BODY_BUDGET_WAIT, BODY_DISCARD_LIMIT, BODY_READ_LIMIT, MAX_BODY_BYTES, MAX_FRAME_BYTES,
};

/// The budget is kept in units of this many bytes.
const UNIT_BYTES: usize = 1024;

// What was read must fit into a frame, and one body into the budget.
const _: () = assert!(MAX_BODY_BYTES * 2 < MAX_FRAME_BYTES && MAX_BODY_BYTES * 2 < BODY_BUDGET_BYTES);

/// The memory that all bodies together may take, from their first byte to the end of their requests.
pub(super) struct BodyBudget(Arc<Semaphore>);

/// A body's share of the budget, given back when dropped.
pub(super) struct Share(OwnedSemaphorePermit);

impl BodyBudget {
    pub(super) fn new() -> Self {
        Self(Arc::new(Semaphore::new(BODY_BUDGET_BYTES / UNIT_BYTES)))
    }

    /// Takes a share.
    ///
    /// # Errors
    /// None was free in time.
    pub(super) async fn take(&self, bytes: usize, patience: Duration) -> Result<Share, Failure> {
        match timeout(patience, Arc::clone(&self.0).acquire_many_owned(units(bytes))).await {
            Ok(Ok(permit)) => Ok(Share(permit)),
            _ => Err(Failure::overloaded()),
        }
    }
}

impl Share {
    /// Gives back all but `bytes`.
    fn shrink(&mut self, bytes: usize) {
        let surplus = self.0.num_permits().saturating_sub(units(bytes) as usize);
        drop(self.0.split(surplus));
    }
}

fn units(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT_BYTES).max(1)).unwrap_or(u32::MAX)
}

/// Reads a JSON body whole.
pub(super) async fn read(budget: &BodyBudget, request: Request) -> Result<(Bytes, Share), Failure> {
    let (parts, mut body) = request.into_parts();
    let refuse = |body: Body, failure: Failure| {
        discard(body);
        Err(failure)
    };
    if let Err(failure) = check_media_type(&parts.headers) {
        return refuse(body, failure);
    }
    let declared = parts.headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|bytes| bytes > MAX_BODY_BYTES as u64) {
        return refuse(body, too_large());
    }
    let declared = declared.and_then(|bytes| usize::try_from(bytes).ok());
    let mut share = match budget.take(declared.unwrap_or(MAX_BODY_BYTES), BODY_BUDGET_WAIT).await {
        Ok(share) => share,
        Err(failure) => return refuse(body, failure),
    };
    match timeout(BODY_READ_LIMIT, Limited::new(&mut body, MAX_BODY_BYTES).collect()).await {
        Ok(Ok(whole)) => {
            let bytes = whole.to_bytes();
            share.shrink(bytes.len());
            Ok((bytes, share))
        }
        Ok(Err(error)) if error.downcast_ref::<LengthLimitError>().is_some() => refuse(body, too_large()),
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[tokio::test]
    async fn bodies_share_one_budget() {
        let budget = BodyBudget::new();
        let mut first = budget.take(BODY_BUDGET_BYTES - UNIT_BYTES, Duration::ZERO).await.ok().unwrap();
        let refused = budget.take(2 * UNIT_BYTES, Duration::ZERO).await.err().unwrap();
        assert_eq!(refused.error.status, 503);
        first.shrink(10);
        assert_eq!(first.0.num_permits(), 1);
        let second = budget.take(BODY_BUDGET_BYTES - UNIT_BYTES, Duration::ZERO).await;
        assert!(second.is_ok());
        drop((first, second));
        assert_eq!(budget.0.available_permits(), BODY_BUDGET_BYTES / UNIT_BYTES);
    }
}

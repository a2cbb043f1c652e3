//! Streamed answers: server-sent events that end in `[DONE]` if and only if the answer is whole.
//!
//! The head is held back until the worker has taken the request up, so that a prompt which does not fit is still a
//! plain 400; for a request that waits longer in the queue the stream is opened and kept alive with comments. A client
//! that leaves drops the body, which drops the generation, which cancels it.

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use gantry_engine::GenerationEvent;
use gantry_openai::{ApiError, ErrorCode, ErrorKind, SSE_CONTENT_TYPE, SSE_DONE, SSE_KEEP_ALIVE, sse_event};
use tokio::time::timeout;

use super::answer::{Envelope, Shape};
use super::errors::{Failure, of_generation};
use super::generate::Observed;
use crate::limits::SSE_KEEP_ALIVE as KEEP_ALIVE_PERIOD;
use crate::version::{Generation, GenerationError};

/// Opens a stream, or fails before it is open.
pub(super) async fn respond(
    mut generation: Generation,
    envelope: Envelope,
    mut observed: Observed,
    shape: Shape,
) -> Response {
    let first = match timeout(KEEP_ALIVE_PERIOD, generation.next()).await {
        Ok(Some(Err(error))) => {
            let error = of_generation(error, shape.prompt_param());
            observed.refused(error.status);
            return Failure::from(error).into_response();
        }
        Ok(Some(Ok(event))) => Some(event),
        Ok(None) | Err(_) => None,
    };
    let events = events(first, generation, envelope, observed, shape);
    let mut response = Body::from_stream(events.map(Ok::<_, std::convert::Infallible>)).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(SSE_CONTENT_TYPE));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Asks proxies such as nginx not to gather the stream into blocks.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

fn events(
    first: Option<GenerationEvent>,
    mut generation: Generation,
    envelope: Envelope,
    mut observed: Observed,
    shape: Shape,
) -> impl Stream<Item = Bytes> {
    async_stream::stream! {
        let mut next = first.map(Ok);
        match envelope.opening() {
            Ok(Some(opening)) => yield Bytes::from(opening),
            Ok(None) => {}
            Err(error) => {
                yield broken(&mut observed, &internal(&error));
                return;
            }
        }
        loop {
            let event = match next.take() {
                Some(event) => event,
                None => match timeout(KEEP_ALIVE_PERIOD, generation.next()).await {
                    Ok(Some(event)) => event,
                    Ok(None) => Err(GenerationError::WorkerDied("its supervisor ended".to_owned())),
                    Err(_) => {
                        yield Bytes::from_static(SSE_KEEP_ALIVE.as_bytes());
                        continue;
                    }
                },
            };
            let piece = match event {
                Ok(GenerationEvent::Started { .. }) => continue,
                Ok(GenerationEvent::Delta { text, .. }) => {
                    observed.token();
                    envelope.delta(text).map(|piece| (piece, false))
                }
                Ok(GenerationEvent::Finished { reason, usage, .. }) => {
                    observed.answered(usage);
                    envelope.closing(reason, usage).map(|piece| (piece + SSE_DONE, true))
                }
                Ok(GenerationEvent::Failed(error)) => {
                    yield broken(&mut observed, &of_generation(error.into(), shape.prompt_param()));
                    return;
                }
                Err(error) => {
                    yield broken(&mut observed, &of_generation(error, shape.prompt_param()));
                    return;
                }
            };
            match piece {
                Ok((piece, last)) => {
                    yield Bytes::from(piece);
                    if last {
                        return;
                    }
                }
                Err(error) => {
                    yield broken(&mut observed, &internal(&error));
                    return;
                }
            }
        }
    }
}

fn internal(error: &serde_json::Error) -> ApiError {
    ApiError::new(500, ErrorKind::ServerError, ErrorCode::InternalError, error.to_string())
}

/// The error event after which the stream ends without `[DONE]`.
fn broken(observed: &mut Observed, error: &ApiError) -> Bytes {
    observed.broken();
    // An error object of strings can always be written.
    Bytes::from(sse_event(&error.to_response()).unwrap_or_default())
}

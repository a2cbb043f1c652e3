//! Streamed answers: server-sent events that end in `[DONE]` if and only if the answer is whole.
//!
//! The head is held back until the worker has taken the request up, so that a prompt which does not fit is still a
//! plain 400; for a request that waits longer in the queue the stream is opened and kept alive with comments. Events
//! that have gathered go out as one piece. A client that leaves drops the body, which drops the generations, which
//! cancels them.

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::{FutureExt, Stream, StreamExt};
use gantry_core::GenerationEvent;
use gantry_openai::{ApiError, ErrorCode, ErrorKind, SSE_CONTENT_TYPE, SSE_KEEP_ALIVE};
use tokio::time::{Instant, sleep_until, timeout};

use super::answer::{Envelope, EventWriter};
use super::choices::{Choices, Item};
use super::errors::{Failure, of_generation, unanswered};
use super::generate::Observed;
use crate::limits::{SSE_KEEP_ALIVE as KEEP_ALIVE_PERIOD, STREAM_BUFFER_BYTES};
use crate::version::Version;

/// Opens a stream, or fails before it is open.
pub(super) async fn respond(
    mut choices: Choices,
    envelope: Envelope,
    mut observed: Observed,
    prompt_param: &'static str,
    version: &Version,
) -> Response {
    let first = match timeout(KEEP_ALIVE_PERIOD, choices.next()).await {
        Ok(Some((_, Err(error)))) => {
            let failure = unanswered(error, prompt_param, version.retry_after());
            observed.refused(&failure.error);
            return failure.into_response();
        }
        Ok(first) => first,
        Err(_) => None,
    };
    let writer = envelope.events(choices.total()).and_then(|mut writer| writer.opening().map(|()| writer));
    let writer = match writer {
        Ok(writer) => writer,
        Err(error) => {
            let failure = Failure::internal(&error);
            observed.refused(&failure.error);
            return failure.into_response();
        }
    };
    let events = events(first, choices, Feed { writer, observed, prompt_param });
    let mut response = Body::from_stream(events.map(Ok::<_, std::convert::Infallible>)).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(SSE_CONTENT_TYPE));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Asks proxies such as nginx not to gather the stream into blocks.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

fn events(first: Option<(usize, Item)>, mut choices: Choices, mut feed: Feed) -> impl Stream<Item = Bytes> {
    async_stream::stream! {
        let mut flow = first.map_or(Flow::Go, |(choice, item)| feed.apply(choice, item));
        // One timer for the whole stream, set anew only when it goes off: most often, much was sent since.
        let mut sent = Instant::now();
        let quiet = sleep_until(sent + KEEP_ALIVE_PERIOD);
        tokio::pin!(quiet);
        loop {
            while flow == Flow::Go && feed.writer.pending() < STREAM_BUFFER_BYTES {
                let Some(Some((choice, item))) = choices.next().now_or_never() else { break };
                flow = feed.apply(choice, item);
            }
            if feed.writer.pending() > 0 {
                sent = Instant::now();
                yield feed.writer.take();
            }
            if flow == Flow::End {
                return;
            }
            tokio::select! {
                biased;
                next = choices.next() => {
                    // A stream whose choices have all ended has said so, and ended.
                    let Some((choice, item)) = next else { return };
                    flow = feed.apply(choice, item);
                }
                () = &mut quiet => {
                    if sent.elapsed() >= KEEP_ALIVE_PERIOD {
                        sent = Instant::now();
                        yield Bytes::from_static(SSE_KEEP_ALIVE.as_bytes());
                    }
                    quiet.as_mut().reset(sent + KEEP_ALIVE_PERIOD);
                }
            }
        }
    }
}

/// Whether more is to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    Go,
    End,
}

/// Turns what generations say into events.
struct Feed {
    writer: EventWriter,
    observed: Observed,
    prompt_param: &'static str,
}

impl Feed {
    fn apply(&mut self, choice: usize, item: Item) -> Flow {
        let written = match item {
            Ok(GenerationEvent::Started { .. }) => Ok(Flow::Go),
            Ok(GenerationEvent::Text { text, logprobs, .. }) => {
                self.observed.token(choice);
                self.writer.delta(choice, &text, &logprobs).map(|()| Flow::Go)
            }
            Ok(GenerationEvent::Finished { reason, usage, timings }) => {
                self.observed.timed(&timings);
                self.writer.finish(choice, reason, usage, &timings).map(|whole| match whole {
                    Some(usage) => {
                        self.observed.answered(usage);
                        Flow::End
                    }
                    None => Flow::Go,
                })
            }
            Ok(GenerationEvent::Failed(error)) => return self.broken(&of_generation(error.into(), self.prompt_param)),
            Err(error) => return self.broken(&of_generation(error, self.prompt_param)),
        };
        written.unwrap_or_else(|error| {
            let error = ApiError::new(500, ErrorKind::ServerError, ErrorCode::InternalError, error.to_string());
            self.broken(&error)
        })
    }

    fn broken(&mut self, error: &ApiError) -> Flow {
        self.observed.broken(error);
        self.writer.broken(error);
        Flow::End
    }
}

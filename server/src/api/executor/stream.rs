//! Streamed answers: server-sent events that end in `[DONE]` if and only if the answer is whole.
//!
//! The head is held back until the worker has taken the request up, so that a prompt which does not fit is still a
//! plain 400; for a request that waits longer in the queue the stream is opened and kept alive with comments. Events
//! that have gathered go out as one piece. A client that leaves drops the body, which drops the generations, which
//! cancels them.

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use futures::{FutureExt, Stream, StreamExt};
use gantry_core::{ApiError, EncodeError, ErrorCode, ErrorKind, GenerationEvent, StreamEncoder, TextEncoder, Usage};
use tokio::time::{Instant, sleep_until, timeout};

use super::Submitted;
use super::choices::{Choices, Item, sum_of};
use super::record::RequestRecord;
use crate::api::errors::{Failure, of_generation, unanswered};
use crate::api::stored::Keep;
use crate::limits::{SSE_KEEP_ALIVE, STREAM_BUFFER_BYTES};
use crate::version::Version;

/// A comment that clients ignore and that keeps proxies from closing a silent stream.
const KEEP_ALIVE_COMMENT: &str = ": keep-alive\n\n";

/// Opens a stream, or fails before it is open.
pub(super) async fn respond(
    submitted: Submitted,
    encoder: impl TextEncoder,
    version: &Version,
    keep: Option<Keep>,
) -> Response {
    let Submitted { mut choices, of_each_prompt, head, mut record, prompt_param, .. } = submitted;
    let first = match timeout(SSE_KEEP_ALIVE, choices.next()).await {
        Ok(Some((_, Err(error)))) => {
            let failure = unanswered(error, prompt_param, version.retry_after());
            record.refused(&failure.error);
            return failure.into_response();
        }
        Ok(first) => first,
        Err(_) => None,
    };
    let mut buffer = BytesMut::with_capacity(STREAM_BUFFER_BYTES);
    let opened = encoder.stream(head, choices.total()).and_then(|mut encoder| {
        encoder.open(&mut buffer)?;
        Ok(encoder)
    });
    let encoder = match opened {
        Ok(encoder) => encoder,
        Err(error) => {
            let failure = Failure::internal(&error);
            record.refused(&failure.error);
            return failure.into_response();
        }
    };
    let feed = Feed::new(encoder, buffer, choices.total(), of_each_prompt, record, prompt_param);
    let events = events(first, choices, feed, keep);
    let mut response = Body::from_stream(events.map(Ok::<_, std::convert::Infallible>)).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Asks proxies such as nginx not to gather the stream into blocks.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

fn events(
    first: Option<(usize, Item)>,
    mut choices: Choices,
    mut feed: Feed<impl StreamEncoder>,
    mut keep: Option<Keep>,
) -> impl Stream<Item = Bytes> {
    async_stream::stream! {
        let mut flow = first.map_or(Flow::Go, |(choice, item)| feed.apply(choice, item));
        // One timer for the whole stream, set anew only when it goes off: most often, much was sent since.
        let mut sent = Instant::now();
        let quiet = sleep_until(sent + SSE_KEEP_ALIVE);
        tokio::pin!(quiet);
        loop {
            while flow == Flow::Go && feed.buffer.len() < STREAM_BUFFER_BYTES {
                let Some(Some((choice, item))) = choices.next().now_or_never() else { break };
                flow = feed.apply(choice, item);
            }
            if flow == Flow::End
                && let Some((keep, Ok(answer))) = keep.as_mut().zip(feed.encoder.kept())
            {
                // Whoever reads the end may go on from it at once.
                keep.try_response(&answer).await;
            }
            if !feed.buffer.is_empty() {
                sent = Instant::now();
                // The buffer's memory is shared with the pieces taken from it, so a token costs no allocation of its own.
                yield feed.buffer.split().freeze();
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
                    if sent.elapsed() >= SSE_KEEP_ALIVE {
                        sent = Instant::now();
                        yield Bytes::from_static(KEEP_ALIVE_COMMENT.as_bytes());
                    }
                    quiet.as_mut().reset(sent + SSE_KEEP_ALIVE);
                }
            }
        }
    }
}

/// Whether more is to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    Go,
    End,
}

/// Turns what generations say into events.
pub(super) struct Feed<E> {
    pub(super) encoder: E,
    /// What was written and not taken.
    pub(super) buffer: BytesMut,
    /// Of each answer, once it has ended.
    usages: Vec<Option<Usage>>,
    of_each_prompt: usize,
    record: RequestRecord,
    prompt_param: &'static str,
}

impl<E: StreamEncoder> Feed<E> {
    pub(super) fn new(
        encoder: E,
        buffer: BytesMut,
        answers: usize,
        of_each_prompt: usize,
        record: RequestRecord,
        prompt_param: &'static str,
    ) -> Self {
        Self { encoder, buffer, usages: vec![None; answers], of_each_prompt, record, prompt_param }
    }

    pub(super) fn apply(&mut self, choice: usize, item: Item) -> Flow {
        match item {
            Ok(GenerationEvent::Failed(error)) => self.broken(&of_generation(error.into(), self.prompt_param)),
            Err(error) => self.broken(&of_generation(error, self.prompt_param)),
            Ok(event) => self.write(choice, &event).unwrap_or_else(|error| {
                let error = ApiError::new(500, ErrorKind::ServerError, ErrorCode::InternalError, error.to_string());
                self.broken(&error)
            }),
        }
    }

    fn write(&mut self, choice: usize, event: &GenerationEvent) -> Result<Flow, EncodeError> {
        match event {
            GenerationEvent::Finished { timings, .. } => self.record.timed(timings),
            event if event.output_tokens().is_some() => self.record.output(choice, event),
            _ => {}
        }
        self.encoder.event(choice, event, &mut self.buffer)?;
        let GenerationEvent::Finished { usage, .. } = event else { return Ok(Flow::Go) };
        if let Some(own) = self.usages.get_mut(choice) {
            *own = Some(*usage);
        }
        let Some(usages) = self.usages.iter().copied().collect::<Option<Vec<_>>>() else { return Ok(Flow::Go) };
        let usage = sum_of(&usages, self.of_each_prompt);
        self.encoder.close(usage, &mut self.buffer)?;
        self.record.answered(usage);
        Ok(Flow::End)
    }

    pub(super) fn broken(&mut self, error: &ApiError) -> Flow {
        self.record.broken(error);
        self.encoder.fail(error, &mut self.buffer);
        Flow::End
    }
}

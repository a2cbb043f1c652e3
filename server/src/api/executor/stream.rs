//! Streamed answers: server-sent events that end in `[DONE]` if and only if the answer is whole.
//!
//! The head is held back until the worker has taken the request up, so that a prompt which does not fit is still a
//! plain 400; for a request that waits longer in the queue the stream is opened and kept alive with comments. Events
//! that have gathered go out as one piece. Where a request waits for a model to be changed, its stream is opened at once, and is told how
//! it stands. A client that leaves drops the body, which drops the generations, which
//! cancels them.

use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use futures::{FutureExt, Stream, StreamExt};
use gantry_core::{ApiError, EncodeError, ErrorCode, ErrorKind, GenerationEvent, StreamEncoder, TextEncoder, Usage};
use serde_json::json;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};

use super::choices::{Choices, Item, sum_of};
use super::record::RequestRecord;
use super::{PENDING_VERSION, Pending, Refused, Submitted, Tried, VERSION_HEADER, counted_later};
use crate::api::errors::{Failure, of_generation, unanswered_by};
use crate::api::stored::Keep;
use crate::hold::News;
use crate::limits::{HELD_NEWS_PERIOD, SSE_KEEP_ALIVE, STREAM_BUFFER_BYTES};
use crate::metrics::{Outcome, VersionLabels};
use crate::version::{GenerationError, Version};

/// A comment that clients ignore and that keeps proxies from closing a silent stream.
const KEEP_ALIVE_COMMENT: &str = ": keep-alive\n\n";

/// Opens a stream, or fails before it is open.
pub(super) async fn respond<E: TextEncoder>(
    submitted: Submitted,
    pending: Box<Pending<E>>,
    version: &Version,
) -> Tried<E> {
    let Submitted { mut choices, of_each_prompt, head, mut record, prompt_param, .. } = submitted;
    let mut first = timeout(SSE_KEEP_ALIVE, choices.next()).await.unwrap_or(None);
    if first.is_none() && !choices.stay(pending.asking.returns) {
        // It says so as soon as it is asked.
        first = choices.next().await;
    }
    match first {
        Some((_, Err(GenerationError::GaveWay))) if pending.asking.returns => return pending.returned(record),
        Some((_, Err(error))) => {
            let failure = unanswered_by(version, error, prompt_param);
            let refused = Refused { failure, record: Some(record), encoder: pending.encoder, head: Some(head) };
            return Tried::Refused(refused);
        }
        _ => {}
    }
    let Pending { encoder, keep, .. } = *pending;
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
            return Tried::Answered(failure.into_response());
        }
    };
    let feed = Feed::new(encoder, buffer, choices.total(), of_each_prompt, record, prompt_param);
    Tried::Answered(opened_with(events(first, choices, feed, keep)))
}

/// Opens a stream while no version answers, which is told how it stands until one does, and then goes on with what that answers.
/// Its head names no version: what comes of it does.
pub(super) fn held<E: TextEncoder>(mut pending: Box<Pending<E>>) -> Response {
    let app = Arc::clone(&pending.app);
    if let Err(failure) = pending.asking.enter(&app) {
        return pending.refuse(failure).told();
    }
    let (route, tells_queue) = (pending.route, pending.tells_queue);
    let model = pending.asking.model().unwrap_or_default().to_owned();
    let events = async_stream::stream! {
        loop {
            let mut news = interval(HELD_NEWS_PERIOD);
            news.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let turn = loop {
                tokio::select! {
                    biased;
                    turn = pending.asking.turn(&app) => break turn,
                    _ = news.tick() => {}
                }
                if let Some(news) = pending.asking.news().filter(|_| E::Stream::TAKES_COMMENTS) {
                    yield told(&news, &model, tells_queue);
                }
            };
            let tried = match turn {
                Ok(()) => pending.attempt().await,
                Err(failure) => Tried::Refused(pending.refuse(failure)),
            };
            match tried {
                Tried::Answered(response) => {
                    let mut body = response.into_body().into_data_stream();
                    while let Some(Ok(piece)) = body.next().await {
                        yield piece;
                    }
                    return;
                }
                Tried::Refused(refused) => {
                    let (error, record, written) = refused.told_in_stream();
                    if record.is_none() {
                        app.metrics.request_ended(route, &VersionLabels::default(), error.status, Outcome::Broken);
                    }
                    yield written.freeze();
                    return;
                }
                Tried::GaveWay(returned) => pending = returned,
            }
            if let Err(failure) = pending.asking.enter(&app) {
                let (_, _, written) = pending.refuse(failure).told_in_stream();
                yield written.freeze();
                return;
            }
        }
    };
    let mut response = counted_later(opened_with(events));
    response.headers_mut().insert(VERSION_HEADER, HeaderValue::from_static(PENDING_VERSION));
    response
}

/// How it stands with a request that waits: a comment, which clients ignore, or an event for those that ask for it.
fn told(news: &News, model: &str, as_event: bool) -> Bytes {
    let (status, eta) = (news.waits.as_str(), news.left);
    if as_event {
        let eta_ms = eta.map(|eta| u64::try_from(eta.as_millis()).unwrap_or(u64::MAX));
        let status = json!({"status": status, "position": news.position, "model": model, "eta_ms": eta_ms});
        return format!("event: gantry.queue\ndata: {status}\n\n").into();
    }
    let eta = eta.map(|eta| format!(" eta_s={}", eta.as_millis().div_ceil(1000))).unwrap_or_default();
    format!(": {status} position={}{eta}\n\n", news.position).into()
}

fn opened_with(events: impl Stream<Item = Bytes> + Send + 'static) -> Response {
    let mut response = Body::from_stream(events.map(Ok::<_, std::convert::Infallible>)).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Asks proxies such as nginx not to gather the stream into blocks.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

fn events<E: StreamEncoder>(
    first: Option<(usize, Item)>,
    mut choices: Choices,
    mut feed: Feed<E>,
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
                () = &mut quiet, if E::TAKES_COMMENTS => {
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

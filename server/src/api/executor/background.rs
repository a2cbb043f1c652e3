//! Answers that nobody waits for on a connection: their clients are told at once that they are queued, and ask for them again.
//!
//! Such a response is admitted as any other, and fails as any other; what comes of it is kept. It ends early when somebody wants it to
//! ([`Keep::is_unwanted`]), and fails when the store cannot be told for too long that it goes on. A server that ends waits for
//! those that it answers as it does for its connections.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::BytesMut;
use futures::StreamExt;
use gantry_core::{AnswerHead, ApiError, ErrorCode, ErrorKind, GenerationEvent, TextEncoder};
use gantry_responses::{ResponseEncoder, ResponseStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{MissedTickBehavior, interval, sleep};
use tokio_util::task::TaskTracker;

use super::Submitted;
use super::choices::Choices;
use super::stream::{Feed, Flow};
use crate::api::errors::Failure;
use crate::api::stored::{Keep, Lease};
use crate::limits::{BACKGROUND_LEASE_RENEWAL, BACKGROUND_WATCH_PERIOD, MAX_BACKGROUND_RESPONSES, STORE_LIMIT};

/// Those that this server answers.
pub(in crate::api) struct Background {
    running: TaskTracker,
    places: Arc<Semaphore>,
}

/// Why one ends early.
enum Stop {
    Unwanted,
    /// Others may have said already that it failed.
    LeaseOver,
}

impl Background {
    pub(in crate::api) fn new() -> Self {
        let running = TaskTracker::new();
        // Waiting for those that are left is all that it is closed for.
        running.close();
        Self { running, places: Arc::new(Semaphore::new(MAX_BACKGROUND_RESPONSES)) }
    }

    /// Takes a place among them.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn place(&self) -> Result<OwnedSemaphorePermit, Failure> {
        Arc::clone(&self.places).try_acquire_owned().map_err(|_| Failure::background_full())
    }

    /// Those that have not ended.
    pub(in crate::api) fn running(&self) -> &TaskTracker {
        &self.running
    }

    /// Says that a response is queued, and goes on with it.
    pub(super) async fn respond(
        &self,
        submitted: Submitted,
        encoder: ResponseEncoder,
        mut keep: Keep,
        place: OwnedSemaphorePermit,
    ) -> Response {
        let Submitted { choices, of_each_prompt, head, record, prompt_param, .. } = submitted;
        let (encoder, lease, queued) = match queue(encoder, head, &mut keep).await {
            Ok(queued) => queued,
            Err(failure) => return record.settle(Err(failure)),
        };
        let feed = Feed::new(encoder, BytesMut::new(), choices.total(), of_each_prompt, record, prompt_param);
        self.running.spawn(run(choices, feed, keep, lease, place));
        ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], queued).into_response()
    }
}

async fn queue(
    encoder: ResponseEncoder,
    head: AnswerHead,
    keep: &mut Keep,
) -> Result<(ResponseStream, Lease, Vec<u8>), Failure> {
    let encoder = encoder.stream(head, 1).map_err(|error| Failure::internal(&error))?;
    let lease = keep.lease().await?;
    let queued = encoder.response().map_err(|error| Failure::internal(&error))?;
    keep.response(&queued).await?;
    Ok((encoder, lease, queued))
}

/// Answers it to its end, in a place that it has as long.
async fn run(
    mut choices: Choices,
    mut feed: Feed<ResponseStream>,
    mut keep: Keep,
    mut lease: Lease,
    _place: OwnedSemaphorePermit,
) {
    let mut watch = interval(BACKGROUND_WATCH_PERIOD);
    watch.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let stop = loop {
        tokio::select! {
            // Whoever wants it to end is heard before what comes of it.
            biased;
            _ = watch.tick() => {
                let stop = look(&keep, &mut lease).await;
                if stop.is_some() {
                    break stop;
                }
            }
            next = choices.next() => {
                let Some((choice, item)) = next else { break None };
                let begins = matches!(item, Ok(GenerationEvent::Started { .. }));
                let flow = feed.apply(choice, item);
                // Nobody is sent its events.
                feed.buffer.clear();
                if flow == Flow::End {
                    break None;
                }
                if begins && let Ok(response) = feed.encoder.response() {
                    // Others take it for queued where that fails.
                    drop(keep.response(&response).await);
                }
            }
        }
    };
    // Its sequence is another's from now on.
    drop(choices);
    match stop {
        None => {}
        Some(Stop::Unwanted) => drop(feed.encoder.cancel(&mut feed.buffer)),
        Some(Stop::LeaseOver) => {
            let message = "The server could not tell the store for too long that it answers this response; ask again.";
            let error = ApiError::new(503, ErrorKind::ServiceUnavailableError, ErrorCode::StoreUnavailable, message);
            feed.broken(&error);
        }
    }
    match feed.encoder.response() {
        Ok(response) => end(&mut keep, lease, &response).await,
        Err(error) => drop(Failure::internal(&error)),
    }
}

/// Whether it has to end; renews its lease when it is time.
async fn look(keep: &Keep, lease: &mut Lease) -> Option<Stop> {
    // A process that was stopped for a while finds it so.
    if !lease.lasts(Duration::ZERO) {
        return Some(Stop::LeaseOver);
    }
    if keep.is_unwanted().await.is_ok_and(|is_unwanted| is_unwanted) {
        return Some(Stop::Unwanted);
    }
    if lease.age() >= BACKGROUND_LEASE_RENEWAL
        && let Ok(renewed) = keep.lease().await
    {
        *lease = renewed;
    }
    (!lease.lasts(Duration::ZERO)).then_some(Stop::LeaseOver)
}

/// Keeps how it ended, as long as nobody can have said otherwise.
async fn end(keep: &mut Keep, lease: Lease, response: &[u8]) {
    while keep.response(response).await.is_err() {
        // What is written late must not follow what others have said.
        if !lease.lasts(STORE_LIMIT) {
            tracing::error!(response = %keep.id(), "how a response in the background ended cannot be stored: it has failed");
            return;
        }
        sleep(BACKGROUND_WATCH_PERIOD).await;
    }
    keep.ended().await;
}

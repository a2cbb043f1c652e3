//! One file over http(s): connections one after another, or several at once ([`segments`]), each going on where the last one broke off.
//!
//! The network side is async, the disk side ([`Partial`]) blocks on a thread of its own behind a bounded queue; it is
//! handed to that thread and comes back with it, so that at no time two sides hold it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use bytes::Bytes;
use reqwest::Response;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::cache::Grant;
use super::error::FetchError;
use super::http::{self, Answer, Target};
use super::limits::{MAX_MODEL_BYTES, SILENCE_TOLD_AFTER, UNSAID_LENGTH_STEP_BYTES, WRITE_QUEUE_CHUNKS};
use super::magic::Magic;
use super::partial::{Partial, Validator};
use super::progress::{FetchProgress, Meter, silence};
use super::segments::{self, Body};

/// What one connection needs.
pub(super) struct Download<'a> {
    pub(super) target: Target<'a>,
    pub(super) grant: Arc<Grant>,
    pub(super) progress: &'a watch::Sender<FetchProgress>,
    /// Whether nobody knows the digest of the file, so that pieces of two would not be told from a whole one.
    pub(super) any: bool,
    /// Set once the server has shown that it is not good for several connections; then there is one.
    pub(super) one_connection: &'a AtomicBool,
}

/// A connection's end, with the file where its thread gave it back.
pub(super) type Ended = (Option<Partial>, Result<(), FetchError>);

impl Download<'_> {
    /// Makes one connection and takes what comes. `Ok` means that the file is there to its last byte.
    pub(super) async fn connect(&self, partial: Partial) -> Ended {
        let tag = partial.validator().etag.clone();
        let offset = if self.any && tag.is_none() { 0 } else { partial.bytes() };
        let range = (offset > 0).then_some((offset, None));
        let head = http::send(self.target, range, partial.validator());
        let response = match self.awaited(head, offset).await {
            Ok(response) => response,
            Err(error) => return (Some(partial), Err(error)),
        };
        let answer = http::judge(
            (self.target.asked, self.target.address),
            response.status(),
            response.headers(),
            offset,
            partial.validator(),
        );
        let several =
            !self.one_connection.load(Ordering::Relaxed) && segments::is_worthwhile(self.target, &response, &answer);
        match answer {
            Answer::Complete => (Some(partial), Ok(())),
            Answer::Refused(error) => (Some(partial), Err(error)),
            Answer::StartOver(reason) => restart(partial, FetchError::temporary(reason)).await,
            Answer::Body { start, ref validator, .. } if self.any && start > 0 && validator.etag != tag => {
                let reason = format!("{} does not say whether it is still the same file", self.target.address);
                restart(partial, FetchError::temporary(reason)).await
            }
            Answer::Body { start, total, validator } => {
                let body = match total.filter(|_| several) {
                    Some(total) => {
                        Body::of_several(self.target, response, (start, total, &validator), self.one_connection)
                    }
                    None => Body::of_one(self.target, response, self.one_connection),
                };
                self.receive(partial, body, start, total, validator).await
            }
        }
    }

    async fn receive(
        &self,
        partial: Partial,
        body: Body<'_>,
        start: u64,
        total: Option<u64>,
        validator: Validator,
    ) -> Ended {
        let partial = match self.prepare(partial, start, total, validator).await {
            (Some(partial), Ok(())) => partial,
            ended => return ended,
        };
        let (chunks, writer) = write(partial);
        let result = self.pump(body, start, total, chunks).await;
        let (partial, written) = match writer.await {
            Ok((partial, written)) => (Some(partial), written),
            Err(error) => (None, Err(io::Error::other(error))),
        };
        match (written, result) {
            (Err(error), _) => (partial, Err(FetchError::disk("write", &error))),
            (Ok(()), result) => (partial, result),
        }
    }

    /// Brings the file to where the body starts.
    async fn prepare(&self, mut partial: Partial, start: u64, total: Option<u64>, validator: Validator) -> Ended {
        if let Some(total) = total.filter(|&total| total > MAX_MODEL_BYTES) {
            let error = FetchError::Permanent(format!(
                "{} has {}, the limit is {}; check the address",
                self.target.address,
                gantry_gguf::human_bytes(total),
                gantry_gguf::human_bytes(MAX_MODEL_BYTES)
            ));
            return (Some(partial), Err(error));
        }
        let grant = Arc::clone(&self.grant);
        blocking(move || {
            let ready = (|| {
                if start == 0 && partial.bytes() > 0 {
                    partial.restart().map_err(|error| FetchError::disk("truncate", &error))?;
                }
                partial.resumed(total.is_some());
                partial.set_validator(validator).map_err(|error| FetchError::disk("write", &error))?;
                total.map_or(Ok(()), |total| grant.grow(total, total).map(drop))
            })();
            (Some(partial), ready)
        })
        .await
        .unwrap_or_else(|error| (None, Err(error)))
    }

    /// Moves the body to the writer.
    async fn pump(
        &self,
        mut body: Body<'_>,
        start: u64,
        total: Option<u64>,
        chunks: mpsc::Sender<Bytes>,
    ) -> Result<(), FetchError> {
        let mut bytes = start;
        let mut granted = total.unwrap_or(start);
        let mut magic = Magic::from(start);
        let mut meter = Meter::new(self.progress, bytes, total, Instant::now());
        loop {
            let (chunk, is_silent) = next(&mut body, &mut meter, self.target.address, bytes).await;
            match chunk {
                Ok(Some(chunk)) => {
                    bytes += chunk.len() as u64;
                    magic.check(&chunk).map_err(|_| FetchError::NotGguf(self.target.address.to_owned()))?;
                    if bytes > granted {
                        granted = self.grant_more(bytes, total).await?;
                    }
                    if chunks.send(chunk).await.is_err() {
                        // The writer has stopped; its own error says why.
                        return Err(FetchError::temporary("the cache cannot be written"));
                    }
                    meter.at(bytes, Instant::now());
                }
                Ok(None) if total.is_none_or(|total| bytes == total) => return Ok(()),
                Ok(None) => {
                    let total = total.unwrap_or(bytes);
                    let reason = format!("{} ended its answer after {bytes} of {total} bytes", self.target.address);
                    return Err(FetchError::temporary(reason));
                }
                // As it was told while it lasted: another text would be another write.
                Err(error) if is_silent && error.is_temporary() => {
                    return Err(FetchError::temporary(silence(self.target.address, bytes)));
                }
                Err(error) => {
                    let retry_after = error.retry_after();
                    return Err(FetchError::Temporary {
                        reason: format!("{error} (after {bytes} bytes)"),
                        retry_after,
                    });
                }
            }
        }
    }
}

impl Download<'_> {
    /// Room for an answer of which `bytes` have come, and more than there was room for.
    async fn grant_more(&self, bytes: u64, total: Option<u64>) -> Result<u64, FetchError> {
        let address = self.target.address;
        if let Some(total) = total {
            return Err(FetchError::Permanent(format!(
                "{address} sends more than the {total} bytes that it said; check the address"
            )));
        }
        if bytes > MAX_MODEL_BYTES {
            let limit = gantry_gguf::human_bytes(MAX_MODEL_BYTES);
            return Err(FetchError::TooLarge(format!("{address} sends more than {limit}; check the address")));
        }
        let grant = Arc::clone(&self.grant);
        let wanted = bytes.saturating_add(UNSAID_LENGTH_STEP_BYTES).min(MAX_MODEL_BYTES);
        let granted = blocking(move || grant.grow(bytes, wanted)).await?;
        granted.map_err(|error| match error {
            FetchError::TooLarge(reason) => {
                FetchError::TooLarge(format!("{address} sends a file without saying how long it is: {reason}"))
            }
            error => error,
        })
    }
}

impl Download<'_> {
    /// The head of an answer. That none comes is told while it is waited for.
    async fn awaited(
        &self,
        head: impl Future<Output = Result<Response, FetchError>>,
        offset: u64,
    ) -> Result<Response, FetchError> {
        let mut head = std::pin::pin!(head);
        match timeout(SILENCE_TOLD_AFTER, &mut head).await {
            Ok(answer) => answer,
            Err(_) => {
                let silence = silence(self.target.address, offset);
                self.progress.send_if_modified(|progress| progress.stand_still(&silence));
                head.await
            }
        }
    }
}

/// The next bytes, and whether it was told that none came for long.
async fn next(
    body: &mut Body<'_>,
    meter: &mut Meter<'_>,
    address: &str,
    bytes: u64,
) -> (Result<Option<Bytes>, FetchError>, bool) {
    let arrived = body.arrived();
    let mut seen = arrived.load(Ordering::Relaxed);
    let mut is_silent = false;
    let mut chunk = std::pin::pin!(body.chunk());
    loop {
        if let Ok(chunk) = timeout(SILENCE_TOLD_AFTER, &mut chunk).await {
            return (chunk, is_silent);
        }
        // A segment comes at once when all of it is there.
        let now = arrived.load(Ordering::Relaxed);
        is_silent = now == seen;
        seen = now;
        if is_silent {
            meter.is_silent(&silence(address, bytes));
        }
    }
}

async fn restart(mut partial: Partial, reason: FetchError) -> Ended {
    blocking(move || match partial.restart() {
        Ok(()) => (Some(partial), Err(reason)),
        Err(error) => (Some(partial), Err(FetchError::disk("truncate", &error))),
    })
    .await
    .unwrap_or_else(|error| (None, Err(error)))
}

type Written = (Partial, io::Result<()>);

/// Starts the thread that writes what it is sent.
pub(super) fn write(mut partial: Partial) -> (mpsc::Sender<Bytes>, JoinHandle<Written>) {
    let (sender, mut chunks) = mpsc::channel::<Bytes>(WRITE_QUEUE_CHUNKS);
    let writer = tokio::task::spawn_blocking(move || {
        while let Some(chunk) = chunks.blocking_recv() {
            if let Err(error) = partial.append(&chunk) {
                return (partial, Err(error));
            }
        }
        (partial, Ok(()))
    });
    (sender, writer)
}

/// Runs disk work where it may block. An error is a panic there.
pub(super) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, FetchError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| FetchError::temporary(format!("the cache's own work failed: {error}")))
}

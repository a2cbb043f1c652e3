//! One file over http(s): connections one after another, each going on where the last one broke off.
//!
//! The network side is async, the disk side ([`Partial`]) blocks on a thread of its own behind a bounded queue; it is
//! handed to that thread and comes back with it, so that at no time two sides hold it.

use std::io;
use std::time::Instant;

use bytes::Bytes;
use reqwest::{Client, Response};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::cache::Cache;
use super::error::FetchError;
use super::http::{self, Answer};
use super::limits::{MAX_MODEL_BYTES, WRITE_QUEUE_CHUNKS};
use super::partial::{Partial, Validator};
use super::progress::{FetchProgress, Meter};
use super::source::Token;

/// What one connection needs.
pub(super) struct Download<'a> {
    pub(super) client: &'a Client,
    pub(super) cache: &'a std::sync::Arc<Cache>,
    pub(super) url: &'a reqwest::Url,
    pub(super) token: Option<&'a Token>,
    pub(super) address: &'a str,
    pub(super) progress: &'a watch::Sender<FetchProgress>,
}

/// A connection's end, with the file where its thread gave it back.
pub(super) type Ended = (Option<Partial>, Result<(), FetchError>);

impl Download<'_> {
    /// Makes one connection and takes what comes. `Ok` means that the file is there to its last byte.
    pub(super) async fn connect(&self, partial: Partial) -> Ended {
        let offset = partial.bytes();
        let range = (offset > 0).then_some((offset, None));
        let sent = http::request(self.client, self.url, self.token, range, partial.validator()).send().await;
        let response = match sent {
            Ok(response) => response,
            Err(error) => return (Some(partial), Err(http::failure(self.address, &error))),
        };
        match http::judge(self.address, response.status(), response.headers(), offset, partial.validator()) {
            Answer::Complete => (Some(partial), Ok(())),
            Answer::Refused(error) => (Some(partial), Err(error)),
            Answer::StartOver(reason) => restart(partial, FetchError::temporary(reason)).await,
            Answer::Body { start, total, validator } => self.receive(partial, response, start, total, validator).await,
        }
    }

    async fn receive(
        &self,
        partial: Partial,
        response: Response,
        start: u64,
        total: Option<u64>,
        validator: Validator,
    ) -> Ended {
        let partial = match self.prepare(partial, start, total, validator).await {
            (Some(partial), Ok(())) => partial,
            ended => return ended,
        };
        let (chunks, writer) = write(partial);
        let result = self.pump(response, start, total, chunks).await;
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
                self.address,
                gantry_gguf::human_bytes(total),
                gantry_gguf::human_bytes(MAX_MODEL_BYTES)
            ));
            return (Some(partial), Err(error));
        }
        let cache = std::sync::Arc::clone(self.cache);
        blocking(move || {
            let ready = (|| {
                if start == 0 && partial.bytes() > 0 {
                    partial.restart().map_err(|error| FetchError::disk("truncate", &error))?;
                }
                partial.resumed();
                partial.set_validator(validator).map_err(|error| FetchError::disk("write", &error))?;
                cache.make_room(total.map_or(0, |total| total.saturating_sub(start)))
            })();
            (Some(partial), ready)
        })
        .await
        .unwrap_or_else(|error| (None, Err(error)))
    }

    /// Moves the body to the writer.
    async fn pump(
        &self,
        mut response: Response,
        start: u64,
        total: Option<u64>,
        chunks: mpsc::Sender<Bytes>,
    ) -> Result<(), FetchError> {
        let mut bytes = start;
        let mut meter = Meter::new(self.progress, bytes, total, Instant::now());
        loop {
            match response.chunk().await {
                Ok(Some(chunk)) => {
                    bytes += chunk.len() as u64;
                    let limit = total.unwrap_or(MAX_MODEL_BYTES);
                    if bytes > limit {
                        return Err(FetchError::Permanent(format!(
                            "{} sends more than the {limit} bytes that are allowed for it; check the address",
                            self.address
                        )));
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
                    let reason = format!("{} ended its answer after {bytes} of {total} bytes", self.address);
                    return Err(FetchError::temporary(reason));
                }
                Err(error) => {
                    let error = http::failure(self.address, &error);
                    return Err(FetchError::temporary(format!("{error} (after {bytes} bytes)")));
                }
            }
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

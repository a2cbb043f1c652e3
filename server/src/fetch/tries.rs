//! The tries of one fetch, and how long to wait between them.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::sync::watch;

use super::digest::Digest;
use super::error::FetchError;
use super::flight::Right;
use super::limits::{RETRY_BACKOFF_MAX, RETRY_BACKOFF_MIN};
use super::partial::Partial;
use super::progress::FetchProgress;

/// One fetch from its first try to its last.
#[derive(Default)]
pub(super) struct Tries {
    /// The right to work on the partial file, until that has it.
    pub(super) right: Option<Right>,
    /// What came so far, between two tries.
    pub(super) partial: Option<Partial>,
    /// What came last by an answer that did not say how long it is.
    pub(super) found: Option<Digest>,
    backoff: Backoff,
    /// Whether any file will do: nobody knows the digest of the one that is asked for.
    pub(super) any: bool,
    /// Whether the server is not good for several connections at once.
    pub(super) one_connection: AtomicBool,
}

impl Tries {
    /// Of a fetch for which any file will do.
    pub(super) fn for_any() -> Self {
        Self { any: true, ..Self::default() }
    }

    pub(super) fn has_right(&self) -> bool {
        self.right.is_some() || self.partial.is_some()
    }

    /// Lets another fetch go on with what came.
    pub(super) fn give_way(&mut self) {
        (self.right, self.partial) = (None, None);
    }

    /// Tells why a try failed. Gives the time until the next one.
    pub(super) fn failed(
        &mut self,
        error: &FetchError,
        digest: Digest,
        progress: &watch::Sender<FetchProgress>,
    ) -> Duration {
        let bytes = self.partial.as_ref().map_or(self.backoff.bytes, Partial::bytes);
        failed(&mut self.backoff, digest, error, bytes, progress)
    }
}

/// Tells why a try failed, after which `bytes` are there. Gives the time until the next one.
pub(super) fn failed(
    backoff: &mut Backoff,
    digest: Digest,
    error: &FetchError,
    bytes: u64,
    progress: &watch::Sender<FetchProgress>,
) -> Duration {
    // A try that brought bytes is no standstill, and the next one may bring more.
    let stands_still = !backoff.has_come(bytes);
    let wait = backoff.after(error, bytes);
    tracing::warn!(%digest, %error, wait_ms = wait.as_millis() as u64, "fetch interrupted");
    let note = Some(error.to_string());
    progress.send_modify(|p| (p.note, p.stands_still, p.eta) = (note, stands_still, None));
    wait
}

/// Waits between tries: longer each time, until bytes come again.
#[derive(Default)]
pub(crate) struct Backoff {
    failures: u32,
    bytes: u64,
}

impl Backoff {
    /// Whether the last try brought any of the `bytes` that are there.
    fn has_come(&self, bytes: u64) -> bool {
        bytes > self.bytes
    }

    /// The wait after `error`, when `bytes` are there.
    pub(crate) fn after(&mut self, error: &FetchError, bytes: u64) -> Duration {
        if bytes > self.bytes {
            self.failures = 0;
        }
        self.bytes = bytes;
        let wait = RETRY_BACKOFF_MIN.saturating_mul(1 << self.failures.min(16)).min(RETRY_BACKOFF_MAX);
        self.failures = self.failures.saturating_add(1);
        match error {
            FetchError::Temporary { retry_after: Some(after), .. } => wait.max(*after),
            _ => wait,
        }
    }
}

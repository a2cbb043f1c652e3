//! The tries of one fetch, and how long to wait between them.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::sync::watch;

use super::digest::Digest;
use super::error::FetchError;
use super::flight::Right;
use super::limits::{MAX_TOLD_CAUSES, PROGRESS_MIN_BYTES, RETRY_BACKOFF_MAX, RETRY_BACKOFF_MIN};
use super::partial::Partial;
use super::progress::{FetchProgress, is_same_cause};

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
    let came = bytes > backoff.furthest;
    let wait = backoff.after(error, bytes);
    tracing::warn!(%digest, %error, wait_ms = wait.as_millis() as u64, "fetch interrupted");
    let note = error.to_string();
    let is_news = backoff.is_news(&note);
    progress.send_modify(|p| {
        (p.eta, p.furthest) = (None, backoff.furthest);
        if !came || p.stands_still {
            // What comes in turns is told of once: each change would be a write.
            if is_news || p.note.is_none() || !p.stands_still {
                p.stand_still(&note);
            }
        } else {
            p.note = Some(note);
        }
    });
    wait
}

/// Waits between tries: longer each time, until more comes than was ever there.
#[derive(Default)]
pub(crate) struct Backoff {
    failures: u32,
    /// Bytes that are there.
    bytes: u64,
    /// The most that were there.
    furthest: u64,
    /// How many were there when the waits began to grow.
    grows_from: u64,
    /// Why tries failed since then.
    told: Vec<String>,
    /// Why the last one did.
    last: Option<String>,
}

impl Backoff {
    /// Whether a try failed otherwise than those before it, or as the one before it alone: it goes on so.
    fn is_news(&mut self, note: &str) -> bool {
        let is_last = self.last.replace(note.to_owned()).is_some_and(|last| is_same_cause(&last, note));
        let is_known = self.told.iter().any(|told| is_same_cause(told, note));
        if !is_known {
            self.told.truncate(MAX_TOLD_CAUSES - 1);
            self.told.insert(0, note.to_owned());
        }
        !is_known || is_last
    }

    /// The wait after `error`, when `bytes` are there.
    pub(crate) fn after(&mut self, error: &FetchError, bytes: u64) -> Duration {
        if bytes >= self.grows_from.saturating_add(PROGRESS_MIN_BYTES) {
            (self.failures, self.grows_from) = (0, bytes);
            self.told.clear();
        }
        (self.bytes, self.furthest) = (bytes, self.furthest.max(bytes));
        let wait = RETRY_BACKOFF_MIN.saturating_mul(1 << self.failures.min(16)).min(RETRY_BACKOFF_MAX);
        self.failures = self.failures.saturating_add(1);
        match error {
            FetchError::Temporary { retry_after: Some(after), .. } => wait.max(*after),
            _ => wait,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const MORE: u64 = PROGRESS_MIN_BYTES;

    /// What is told of tries that end so, each with the bytes that are there then, and how long the next one waits, in milliseconds.
    fn tried(tries: &[(&str, u64)]) -> (Vec<Option<String>>, Vec<u128>) {
        let (progress, mut backoff) = (watch::channel(FetchProgress::default()).0, Backoff::default());
        let digest = "0".repeat(64).parse().unwrap();
        let tried = tries.iter().map(|(reason, bytes)| {
            let wait = failed(&mut backoff, digest, &FetchError::temporary(*reason), *bytes, &progress);
            let told = progress.borrow().note.clone().filter(|_| progress.borrow().stands_still);
            (told, wait.as_millis())
        });
        tried.unzip()
    }

    #[test]
    fn waits_grow_until_more_comes_than_was_ever_there() {
        let (_, waits) = tried(&[("cut", 5 * MORE), ("cut", 8 * MORE), ("cut", 9 * MORE)]);
        assert_eq!(waits, [500; 3], "it comes by and by");
        let half = [("cut", 5 * MORE), ("other bytes", 0)];
        let (_, waits) = tried(&[half, half, half, half].concat());
        assert_eq!(waits, [500, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000], "the same half again and again");
        let bytes: Vec<_> = (0..8).map(|byte| ("cut", byte)).collect();
        assert_eq!(tried(&bytes).1, [500, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000], "a byte with each");
        let (_, waits) = tried(&[("503", 0), ("503", 0), ("cut", MORE), ("503", MORE)]);
        assert_eq!(waits, [500, 1000, 500, 1000], "what comes forgets the failures");
    }

    #[test]
    fn causes_in_turns_are_told_once_and_another_one_that_stays_is_told() {
        let told = |tries: &[(&str, u64)]| tried(tries).0;
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(told(&[("cut", 5 * MORE), ("cut", 6 * MORE)]), [None, None], "it comes by and by");
        let half = [("ended after 9", 5 * MORE), ("begins at 0", 0), ("ended after 8", 4 * MORE), ("begins at 0", 0)];
        let begins = some("begins at 0");
        assert_eq!(told(&half), [None, begins.clone(), begins.clone(), begins]);
        let a = some("answers 503 A");
        let b = some("nobody listens");
        assert_eq!(
            told(&[("answers 503 A", 0), ("nobody listens", 0), ("answers 503 A", 0), ("answers 503 A", 0)]),
            [a.clone(), b.clone(), b, a.clone()]
        );
        assert_eq!(told(&[("answers 503 A", 0), ("answers 502 A", 0)]), [a.clone(), a], "figures are no news");
    }
}

//! What becomes of requests when llama.cpp fails.

use std::time::Instant;

use super::{Scheduler, Share};
use crate::backend::{Backend, BackendError};
use crate::error::RequestError;

/// Batches that may fail one after the other before the backend counts as broken.
const MAX_CONSECUTIVE_FAILURES: u32 = 3;

impl<B: Backend> Scheduler<B> {
    /// Ends every request with this error, those that wait included.
    pub(crate) fn fail_all(&mut self, error: &RequestError) {
        for slot in 0..self.slots.len() {
            self.fail(slot, error.clone());
        }
        self.fail_waiting(error, Instant::now());
        self.publish();
        self.output.post(&mut self.events);
    }

    /// Declares the backend unusable and fails everything.
    pub(crate) fn break_down(&mut self, reason: String) {
        tracing::error!(reason, "the engine is broken; its worker must be replaced");
        self.fail_all(&RequestError::Broken(reason.clone()));
        // Only the first reason counts.
        let _ = self.stats.broken.set(reason);
    }

    /// Nothing came of a batch: each of its sequences is decoded by itself, or ends if it was.
    pub(super) fn decode_failed(&mut self, error: BackendError, shares: &[Share]) {
        if self.shutting_down() {
            // The batch was given up for that.
            self.fail_all(&RequestError::ShuttingDown);
            return;
        }
        let reason = match error {
            BackendError::Failed(reason) => reason,
            // Nobody is left to give way to the one that runs alone, which always fits: the books are wrong.
            BackendError::NoKvCells => String::from("the KV cache is full"),
        };
        let was_alone = self.suspects.pop_front().is_some();
        for share in shares {
            let sequence = u32::try_from(share.slot).unwrap_or(u32::MAX);
            let is_cut = shares.len() > 1 && self.kv.rewind(sequence);
            if !is_cut {
                self.kv.clear(sequence);
            }
            if shares.len() == 1 {
                self.fail(share.slot, RequestError::Internal(format!("decoding failed: {reason}")));
                continue;
            }
            // A state that cannot be cut is computed again.
            if let Some(suspect) = self.slots[share.slot].as_mut().filter(|_| !is_cut) {
                suspect.decoded = 0;
            }
            self.suspects.push_back(share.slot);
        }
        // That one of those that failed together fails again says nothing of the backend.
        if !was_alone {
            self.failed_once_more(&reason);
        }
    }

    pub(super) fn failed_once_more(&mut self, reason: &str) {
        self.consecutive_failures += 1;
        tracing::error!(reason, failures = self.consecutive_failures, "a batch could not be decoded");
        if self.consecutive_failures >= MAX_CONSECUTIVE_FAILURES {
            self.break_down(format!("{MAX_CONSECUTIVE_FAILURES} batches in a row failed: {reason}"));
        }
    }
}

//! What becomes of requests when llama.cpp fails.

use std::time::Instant;

use super::{Scheduler, Share, Suspect};
use crate::backend::{Backend, BackendError};
use crate::error::RequestError;
use crate::finite::{NOT_FINITE, is_lost};
use crate::output::TextEvent;

/// Batches that may fail one after the other, each of whose sequences can be decoded by itself, before the backend counts
/// as broken.
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

    /// Nothing came of a batch: each of its sequences is decoded by itself, a lone one once more. One that was ends.
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
        if self.suspects.pop_front().is_some() {
            shares.iter().for_each(|share| self.end_suspect(share, &reason));
            return;
        }
        for share in shares {
            let id = u32::try_from(share.slot).unwrap_or(u32::MAX);
            let Some(sequence) = &mut self.slots[share.slot] else { continue };
            self.suspects.push_back(Suspect { ticket: sequence.ticket, held: sequence.decoded });
            if !self.kv.rewind(id) {
                // A state that cannot be cut is computed again.
                self.kv.clear(id);
                sequence.decoded = 0;
            }
        }
        // Each is decoded in the pool now, be it that what is beside it fails.
        self.land();
        self.failed_once_more(&reason);
    }

    /// Whether a row of the batch has no number.
    pub(super) fn has_lost_rows(&mut self, shares: &[Share]) -> bool {
        let mut rows = shares.iter().flat_map(Share::all_rows);
        rows.any(|row| self.kv.logits(row).is_some_and(is_lost))
    }

    /// A batch gave rows without a number. Whoever is to blame has left the like in cells that others are computed with,
    /// so that those who have lost a row may be blameless: all that is held is dropped, and each of the batch is computed by
    /// itself until it has a row. One that was ends.
    pub(super) fn rows_lost(&mut self, shares: &[Share]) {
        self.kv.scrub();
        self.slots.iter_mut().flatten().for_each(|sequence| sequence.decoded = 0);
        if self.suspects.pop_front().is_some() {
            shares.iter().for_each(|share| self.end_suspect(share, NOT_FINITE));
            return;
        }
        for share in shares {
            let Some(sequence) = &self.slots[share.slot] else { continue };
            self.suspects.push_back(Suspect { ticket: sequence.ticket, held: sequence.len().saturating_sub(1) });
        }
        self.failed_once_more(NOT_FINITE);
    }

    /// Ends a request that could not be decoded by itself. Whether the request or the backend is at fault, as many tokens
    /// of nobody's tell: where those cannot be decoded, either, all are for another engine, this one included.
    fn end_suspect(&mut self, share: &Share, reason: &str) {
        let id = u32::try_from(share.slot).unwrap_or(u32::MAX);
        self.kv.clear(id);
        self.kv.set_in_use(id, false);
        let probed = self.decode_probe(share.tokens, share.rows.max(1));
        let Some(sequence) = self.release(share.slot) else { return };
        let probed = probed.map_err(|error| error.to_string());
        let error = match &probed {
            _ if self.shutting_down() => RequestError::ShuttingDown,
            Ok(()) => RequestError::Internal(format!("decoding failed: {reason}")),
            Err(reason) => RequestError::Broken(reason.clone()),
        };
        self.events.push(TextEvent::Failed { ticket: sequence.ticket, error });
        match probed {
            _ if self.shutting_down() => self.fail_all(&RequestError::ShuttingDown),
            // The batch in which it was failed for it.
            Ok(()) => self.consecutive_failures = 0,
            Err(reason) => self.break_down(reason),
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

//! How much of states one step copies.
//!
//! What leaves the KV cache, comes back into it or moves in it is copied between two computations, while everybody waits.
//! However large the model, a step copies [`MAX_COPY_BYTES_PER_STEP`] at most: of what is saved the rest is dropped, of what
//! comes back or is copied from another sequence the rest is read again, and once a step has copied some of it whoever waits
//! for a slot comes in with a later one. What is shared and not copied (a prefix in a unified cache) costs nothing here.

use std::sync::atomic::Ordering::Relaxed;

use super::Scheduler;
use crate::backend::{BLOCK_TOKENS, Backend, BackendLimits};
use crate::kv_plan::MAX_COPY_BYTES_PER_STEP;

/// Nobody else is let in by a step that has less than this part of it left: who is may have as much to copy.
const LEFT_TO_ADMIT: f64 = 0.75;

/// What a step may still copy.
#[derive(Debug)]
pub(super) struct Copies {
    token_bytes: u64,
    most_bytes: u64,
    left_bytes: u64,
}

impl Copies {
    pub(super) fn new(limits: &BackendLimits) -> Self {
        // What is read beside a pool is copied into it in the same step: half of it is kept for that.
        let most_bytes = if limits.stage.is_some() { MAX_COPY_BYTES_PER_STEP / 2 } else { MAX_COPY_BYTES_PER_STEP };
        Self { token_bytes: limits.token_bytes, most_bytes, left_bytes: most_bytes }
    }

    /// For when nobody waits for the end of a step.
    pub(super) fn without_limit(&mut self) {
        (self.most_bytes, self.left_bytes) = (u64::MAX, u64::MAX);
    }

    /// A step begins.
    pub(super) fn begin(&mut self) {
        self.left_bytes = self.most_bytes;
    }

    /// Whether another one may be let in.
    fn admits(&self) -> bool {
        self.left_bytes as f64 >= self.most_bytes as f64 * LEFT_TO_ADMIT
    }

    /// How many of so many tokens can be copied, each `times` times: all, or whole blocks.
    pub(super) fn room(&self, tokens: u32, times: u64) -> u32 {
        let most = (self.left_bytes / (self.token_bytes * times).max(1)).min(u64::from(u32::MAX));
        // In range: it is below a u32.
        let most = most as u32;
        if tokens <= most { tokens } else { most / BLOCK_TOKENS * BLOCK_TOKENS }
    }

    /// So many are copied.
    fn take(&mut self, tokens: u32, times: u64) -> u64 {
        let bytes = u64::from(tokens) * self.token_bytes * times;
        self.left_bytes = self.left_bytes.saturating_sub(bytes);
        bytes
    }

    #[cfg(test)]
    pub(super) fn limit(&mut self, most_bytes: u64) {
        (self.most_bytes, self.left_bytes) = (most_bytes, most_bytes);
    }
}

impl<B: Backend> Scheduler<B> {
    /// How many of so many tokens this step copies, each `times` times. The rest is not copied at all.
    pub(super) fn copied(&mut self, tokens: u32, times: u64) -> u32 {
        let copied = self.copies.room(tokens, times);
        self.stats.copied_bytes.fetch_add(self.copies.take(copied, times), Relaxed);
        self.stats.uncopied_tokens.fetch_add(u64::from(tokens - copied), Relaxed);
        copied
    }

    /// Whether this step lets another one in; it may have copied too much for that.
    pub(super) fn has_copies_left(&self) -> bool {
        let admits = self.copies.admits();
        self.stats.deferred_copies.fetch_add((!admits).into(), Relaxed);
        admits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_copies_whole_blocks_up_to_its_limit() {
        let mut copies = Copies { token_bytes: 10, most_bytes: 1_000, left_bytes: 0 };
        copies.begin();
        assert_eq!([copies.room(100, 1), copies.room(101, 1), copies.room(60, 2)], [100, 96, 48]);
        assert!(copies.admits());
        assert_eq!(copies.take(40, 1), 400);
        assert!(!copies.admits());
        assert_eq!([copies.room(60, 1), copies.room(61, 1), copies.room(40, 2)], [60, 48, 16]);
        copies.begin();
        assert_eq!(copies.room(100, 1), 100);
        copies.without_limit();
        assert_eq!(copies.room(u32::MAX, 2), u32::MAX);
        // Where it is not known what a token takes, nothing is copied that would be of use.
        let unknown = Copies { token_bytes: 0, most_bytes: 1_000, left_bytes: 1_000 };
        assert_eq!(unknown.room(u32::MAX, 1), 992);
    }
}

//! The KV cache as the scheduler sees it: which sequence holds which tokens, and what that costs in cells.
//!
//! Every change goes through [`Kv`], which tells the backend and keeps the books, so that the two cannot part. A
//! sequence is in use, or what it holds is left over from a request that ended: such leftovers are the prefix cache's
//! first tier, found by comparing tokens. Where the cache is unified, a copy shares the cells of what it copies, and
//! the books count each cell once. Absent: what leaves the cache ([`crate::cache`]), who may use it (the scheduler).

use std::ops::Range;
use std::time::{Duration, Instant};

use crate::backend::{BLOCK_TOKENS, Backend, BackendError, BackendLimits, BatchEntry, Chunk, Token};

/// A sequence that holds the beginning of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Match {
    pub(crate) sequence: u32,
    /// Tokens in common.
    pub(crate) len: u32,
}

#[derive(Default)]
struct Held {
    tokens: Vec<Token>,
    /// The cell of each token.
    cells: Vec<u32>,
    in_use: bool,
    used_at: u64,
    used_time: Option<Instant>,
}

/// The backend and the books about it.
pub(crate) struct Kv<B> {
    backend: B,
    limits: BackendLimits,
    held: Vec<Held>,
    /// Sequences that share each cell.
    shares: Vec<u32>,
    free: Vec<u32>,
    used: u64,
    clock: u64,
    now: Instant,
    /// Bytes of a full block's state, as the last that was saved had; 0: none was.
    block_bytes: usize,
}

impl<B: Backend> Kv<B> {
    pub(crate) fn new(backend: B) -> Self {
        let limits = backend.limits();
        let held = (0..limits.sequences).map(|_| Held::default()).collect();
        let (shares, free, now) = (Vec::new(), Vec::new(), Instant::now());
        Self { backend, limits, held, shares, free, used: 0, clock: 0, now, block_bytes: 0 }
    }

    pub(crate) fn limits(&self) -> BackendLimits {
        self.limits
    }

    /// Cells that hold a token.
    pub(crate) fn used_cells(&self) -> u64 {
        self.used
    }

    /// Cells that hold none. In a split cache those of other sequences are of no use to anyone.
    pub(crate) fn free_cells(&self) -> u64 {
        self.limits.total_cells.saturating_sub(self.used)
    }

    /// Cells that sequences in use hold which `stay`: what is left when every leftover is dropped, and every other sequence.
    pub(crate) fn cells_in_use(&self, stays: impl Fn(usize) -> bool) -> u64 {
        let mut seen = vec![false; self.shares.len()];
        let mut count = 0;
        let held = self.held.iter().enumerate().filter(|&(sequence, held)| held.in_use && stays(sequence));
        for &cell in held.flat_map(|(_, held)| &held.cells) {
            if !std::mem::replace(&mut seen[cell as usize], true) {
                count += 1;
            }
        }
        count
    }

    pub(crate) fn tokens(&self, sequence: u32) -> &[Token] {
        self.held.get(sequence as usize).map_or(&[], |held| &held.tokens)
    }

    pub(crate) fn len(&self, sequence: u32) -> u32 {
        u32::try_from(self.tokens(sequence).len()).unwrap_or(u32::MAX)
    }

    pub(crate) fn in_use(&self, sequence: u32) -> bool {
        self.held.get(sequence as usize).is_some_and(|held| held.in_use)
    }

    /// Marks a sequence as a request's, or as left over.
    pub(crate) fn set_in_use(&mut self, sequence: u32, in_use: bool) {
        self.clock += 1;
        if let Some(held) = self.held.get_mut(sequence as usize) {
            held.in_use = in_use;
            held.used_at = self.clock;
            held.used_time = Some(self.now);
        }
    }

    /// When a leftover was last of use; `None`: its sequence never was.
    pub(crate) fn used_time(&self, sequence: u32) -> Option<Instant> {
        self.held.get(sequence as usize)?.used_time
    }

    /// Notes that a leftover was of use.
    pub(crate) fn touch(&mut self, sequence: u32) {
        self.clock += 1;
        if let Some(held) = self.held.get_mut(sequence as usize) {
            held.used_at = self.clock;
            held.used_time = Some(self.now);
        }
    }

    /// Tells the time, for the age of leftovers.
    pub(crate) fn set_now(&mut self, now: Instant) {
        self.now = now;
    }

    /// Leftovers that were of no use for longer than `ttl`.
    pub(crate) fn expired(&self, now: Instant, ttl: Option<Duration>) -> Vec<u32> {
        let Some(ttl) = ttl else { return Vec::new() };
        let old = |s: &u32| {
            let used = self.held[*s as usize].used_time;
            used.is_none_or(|used| now.saturating_duration_since(used) > ttl)
        };
        self.leftovers().filter(old).collect()
    }

    /// The lowest sequence that is not in use and empty.
    pub(crate) fn empty(&self) -> Option<u32> {
        self.ids().find(|&s| !self.in_use(s) && self.len(s) == 0)
    }

    /// The leftover that was not used for longest.
    pub(crate) fn coldest(&self) -> Option<u32> {
        self.coldest_but(None)
    }

    /// The same, but for one that is to be spared.
    pub(crate) fn coldest_but(&self, spared: Option<u32>) -> Option<u32> {
        self.leftovers().filter(|&s| Some(s) != spared).min_by_key(|&s| self.held[s as usize].used_at)
    }

    /// The leftover that was used last.
    pub(crate) fn hottest(&self) -> Option<u32> {
        self.leftovers().max_by_key(|&s| self.held[s as usize].used_at)
    }

    fn leftovers(&self) -> impl Iterator<Item = u32> + use<'_, B> {
        self.ids().filter(|&s| !self.in_use(s) && self.len(s) > 0)
    }

    /// The leftover and the sequence in use that share the longest beginning with a prompt, at most `limit` of it.
    pub(crate) fn longest(&self, prompt: &[Token], limit: u32) -> (Option<Match>, Option<Match>) {
        let prompt = &prompt[..prompt.len().min(limit as usize)];
        let (mut left_over, mut in_use) = (None::<Match>, None::<Match>);
        for sequence in self.ids() {
            let tokens = self.tokens(sequence);
            let best = if self.in_use(sequence) { &mut in_use } else { &mut left_over };
            let longest = best.map_or(0, |m| m.len);
            // Of many that begin alike, most are no longer than the best: one token tells.
            let next = longest as usize;
            if next >= prompt.len() || tokens.get(next) != Some(&prompt[next]) {
                continue;
            }
            let len = common(prompt, tokens);
            if len > longest {
                *best = Some(Match { sequence, len });
            }
        }
        (left_over, in_use)
    }

    /// The sequence whose prompt is read beside the pool.
    pub(crate) fn staged(&self) -> Option<u32> {
        self.backend.staged()
    }

    /// Has the prompt of a sequence be read on beside the pool, where nobody's is. False: that is not possible.
    pub(crate) fn stage(&mut self, sequence: u32) -> bool {
        let staged = self.backend.stage(sequence);
        if let Err(error) = &staged {
            tracing::warn!(sequence, %error, "no more prompts are read beside the KV cache");
        }
        staged.is_ok()
    }

    /// Puts into the pool what has been read beside it. False: that was not possible, and it is lost.
    pub(crate) fn land(&mut self) -> bool {
        let (Some(sequence), Err(error)) = (self.backend.staged(), self.backend.land()) else { return true };
        tracing::warn!(sequence, %error, "a prompt that was read did not get into the KV cache: it is read again");
        self.clear(sequence);
        false
    }

    /// Decodes a batch. After [`BackendError::Failed`] the caller rewinds or clears the sequences in it.
    pub(crate) fn decode(&mut self, batch: &[BatchEntry]) -> Result<(), BackendError> {
        self.backend.decode(batch)?;
        for entry in batch {
            self.push(entry.sequence, entry.token);
        }
        Ok(())
    }

    /// Takes out of a sequence what a decode that failed may have left of its batch. False: that is not possible.
    pub(crate) fn rewind(&mut self, sequence: u32) -> bool {
        match self.len(sequence) {
            0 => {
                self.backend.clear_sequence(sequence);
                true
            }
            len => self.limits.reusable && self.backend.truncate(sequence, len).is_ok(),
        }
    }

    pub(crate) fn logits(&mut self, index: usize) -> Option<&[f32]> {
        self.backend.logits(index)
    }

    /// Empties every sequence, and has the backend leave nothing of what they held behind.
    pub(crate) fn scrub(&mut self) {
        self.backend.scrub();
        self.ids().for_each(|sequence| self.forget(sequence, 0));
    }

    pub(crate) fn clear(&mut self, sequence: u32) {
        self.backend.clear_sequence(sequence);
        self.forget(sequence, 0);
    }

    /// Cuts a sequence; one that cannot be cut is cleared, and the answer is how much it still holds.
    pub(crate) fn truncate(&mut self, sequence: u32, len: u32) -> u32 {
        if len >= self.len(sequence) {
            return self.len(sequence);
        }
        if len == 0 || !self.limits.reusable || self.backend.truncate(sequence, len).is_err() {
            self.clear(sequence);
            return 0;
        }
        self.forget(sequence, len);
        len
    }

    /// Copies a beginning into an empty sequence; on failure that is empty still.
    pub(crate) fn copy(&mut self, from: u32, to: u32, len: u32) -> Result<(), BackendError> {
        if let Err(e) = self.backend.copy(from, to, len) {
            self.backend.clear_sequence(to);
            return Err(e);
        }
        let tokens = self.tokens(from)[..len as usize].to_vec();
        if self.limits.unified {
            let cells = self.held[from as usize].cells[..len as usize].to_vec();
            for &cell in &cells {
                self.shares[cell as usize] += 1;
            }
            let target = &mut self.held[to as usize];
            target.tokens = tokens;
            target.cells = cells;
        } else {
            tokens.into_iter().for_each(|token| self.push(to, token));
        }
        Ok(())
    }

    pub(crate) fn save(&mut self, sequence: u32, positions: Range<u32>) -> Result<Vec<Vec<u8>>, BackendError> {
        let is_block = positions.end - positions.start >= BLOCK_TOKENS;
        let saved = self.backend.save(sequence, positions)?;
        if is_block {
            self.block_bytes = saved.first().map_or(self.block_bytes, Vec::len);
        }
        Ok(saved)
    }

    /// Bytes of a full block's state; 0 as long as none was saved.
    pub(crate) fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// Bytes that the state of a sequence takes at least, as far as is known.
    pub(crate) fn least_state_bytes(&self, sequence: u32) -> u64 {
        u64::from(self.len(sequence) / BLOCK_TOKENS) * self.block_bytes as u64
    }

    /// Fills an empty sequence; on failure that is empty still.
    pub(crate) fn restore(
        &mut self,
        sequence: u32,
        tokens: &[Token],
        chunks: &[Chunk<'_>],
    ) -> Result<(), BackendError> {
        if let Err(e) = self.backend.restore(sequence, chunks) {
            self.backend.clear_sequence(sequence);
            return Err(e);
        }
        tokens.iter().for_each(|&token| self.push(sequence, token));
        Ok(())
    }

    /// Has two sequences of a split cache change places. On failure the first is as it was; the second may be empty, then
    /// and otherwise.
    pub(crate) fn exchange(&mut self, first: u32, second: u32) -> Result<(), BackendError> {
        let tokens = self.tokens(second).to_vec();
        let saved = if tokens.is_empty() { Vec::new() } else { self.backend.save(second, 0..self.len(second))? };
        self.backend.clear_sequence(second);
        let copied = match self.len(first) {
            0 => Ok(()),
            len => self.backend.copy(first, second, len),
        };
        // Where the second belongs now.
        let place = if copied.is_ok() { first } else { second };
        self.backend.clear_sequence(place);
        if copied.is_ok() {
            self.held.swap(first as usize, second as usize);
        }
        if !tokens.is_empty() && self.backend.restore(place, &chunks_of(&tokens, &saved)).is_err() {
            self.clear(place);
        }
        copied
    }

    #[cfg(test)]
    pub(crate) fn backend(&mut self) -> &mut B {
        &mut self.backend
    }

    fn ids(&self) -> impl Iterator<Item = u32> + use<B> {
        0..self.limits.sequences
    }

    fn push(&mut self, sequence: u32, token: Token) {
        let cell = self.free.pop().unwrap_or_else(|| {
            self.shares.push(0);
            u32::try_from(self.shares.len() - 1).unwrap_or(u32::MAX)
        });
        self.shares[cell as usize] = 1;
        self.used += 1;
        let held = &mut self.held[sequence as usize];
        held.tokens.push(token);
        held.cells.push(cell);
    }

    fn forget(&mut self, sequence: u32, len: u32) {
        let Some(held) = self.held.get_mut(sequence as usize) else { return };
        held.tokens.truncate(len as usize);
        for cell in held.cells.drain((len as usize).min(held.cells.len())..) {
            let shares = &mut self.shares[cell as usize];
            *shares -= 1;
            if *shares == 0 {
                self.free.push(cell);
                self.used -= 1;
            }
        }
    }
}

/// What was saved of a sequence from its beginning on, as it is restored: in blocks, the last one with the rest.
pub(crate) fn chunks_of<'s>(tokens: &[Token], saved: &'s [Vec<u8>]) -> Vec<Chunk<'s>> {
    let blocks = tokens.chunks(BLOCK_TOKENS as usize).map(|block| u32::try_from(block.len()).unwrap_or(u32::MAX));
    blocks.zip(saved).map(|(tokens, bytes)| Chunk { tokens, bytes }).collect()
}

/// Tokens that two sequences begin with in common.
pub(crate) fn common(a: &[Token], b: &[Token]) -> u32 {
    u32::try_from(a.iter().zip(b).take_while(|(x, y)| x == y).count()).unwrap_or(u32::MAX)
}

#[cfg(test)]
#[path = "kv_tests.rs"]
mod tests;

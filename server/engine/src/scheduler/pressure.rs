//! What happens when cells are short: leftovers go first, the one that was not used for longest before the others; then
//! the youngest of the lowest priority gives its slot away, keeps its state in main memory, and comes back when there is
//! room. Nobody fails.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::Scheduler;
use crate::backend::{BLOCK_TOKENS, Backend};
use crate::cache::{EVICTED_BYTES_PER_LOOK, chain};
use crate::event::Activity;
use crate::kv::chunks_of;
use crate::ladder::DegradationLevel;
use crate::monitor::PERIOD;
use crate::params::Priority;
use crate::sequence::Sequence;

/// The part of the time at the end in which leftovers are saved, as a divisor: in the rest they are written.
const FLUSH_SAVING_DIVISOR: u32 = 2;

/// What was saved of a sequence that gave way or is paused: nothing, or a chunk for each block of the tokens that it had decoded.
#[derive(Default)]
pub(super) struct Saved {
    chunks: Vec<Vec<u8>>,
    tokens: u32,
}

/// How main memory is given back where it is short.
pub(super) struct Relief {
    /// The look at it after which that was done last.
    seen: Option<u64>,
    /// What is given back at a time.
    pub(super) most_bytes: u64,
}

impl Default for Relief {
    fn default() -> Self {
        Self { seen: None, most_bytes: EVICTED_BYTES_PER_LOOK }
    }
}

impl Saved {
    pub(super) fn bytes(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.len() as u64).sum()
    }
}

impl<B: Backend> Scheduler<B> {
    /// Sees to it that a batch finds cells. False: a sequence gave way, and the batch must be planned anew.
    pub(super) fn make_room(&mut self, tokens: u32, now: Instant) -> bool {
        if !self.limits.unified {
            return true;
        }
        self.free_cells(tokens, now);
        self.kv.free_cells() >= u64::from(tokens) || !self.preempt_youngest(now)
    }

    /// Drops leftovers until so many cells are free, or none is left over.
    pub(super) fn free_cells(&mut self, tokens: u32, now: Instant) {
        while self.limits.unified && self.kv.free_cells() < u64::from(tokens) {
            let Some(coldest) = self.kv.coldest() else { break };
            self.evict(coldest, now);
        }
    }

    /// The backend found no cells although the books say that there are: more must go. False: there is nobody.
    pub(super) fn give_way(&mut self, now: Instant) -> bool {
        if let Some(coldest) = self.kv.coldest() {
            self.evict(coldest, now);
            return true;
        }
        self.preempt_youngest(now)
    }

    /// Drops what is left over in a sequence, after it was saved to the next tier.
    pub(super) fn evict(&mut self, sequence: u32, now: Instant) {
        if self.kv.len(sequence) > 0 {
            self.stats.evictions.fetch_add(1, Relaxed);
        }
        // A state is copied as a whole before any of it is taken: what memory cannot hold goes first.
        if let Some(cache) = &self.cache {
            let most = cache.most_tokens(self.kv.block_bytes());
            self.kv.truncate(sequence, u32::try_from(most).unwrap_or(u32::MAX));
        }
        self.keep_tail(sequence, 0, now);
        self.kv.clear(sequence);
    }

    /// Saves to the next tier what a sequence holds and is about to lose: what is past its first `len` tokens.
    pub(super) fn keep_tail(&mut self, sequence: u32, len: u32, now: Instant) {
        let (Some(cache), Some(fingerprint)) = (&mut self.cache, self.fingerprint) else { return };
        // Memory is being emptied: what comes in is of use only where it goes on to disk.
        if self.stats.level().evicts_cache() && !cache.has_disk() {
            return;
        }
        let block = BLOCK_TOKENS as usize;
        let tokens = self.kv.tokens(sequence).to_vec();
        let full = tokens.len() / block * block;
        if full <= len as usize {
            return;
        }
        let names = chain(fingerprint, &tokens);
        // What is there already is not worth a copy.
        let known = cache.in_memory(&names, &tokens);
        if known == full {
            return;
        }
        let used = self.kv.used_time(sequence).unwrap_or(now);
        // Below the length of a sequence.
        let [known, full] = [known, full].map(|tokens| u32::try_from(tokens).unwrap_or(u32::MAX));
        // The beginning is what others may have in common.
        let saves = self.copied(full - known, 1);
        let Some(cache) = self.cache.as_mut().filter(|_| saves > 0) else { return };
        let saved = self.kv.save(sequence, known..known + saves);
        let inserted =
            saved.map(|chunks| cache.insert(&names, &tokens, (known / BLOCK_TOKENS) as usize, chunks, used, now));
        match inserted {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::debug!(%error, "a prefix was not kept"),
            Err(error) => tracing::warn!(%error, "a prefix could not be saved"),
        }
    }

    /// An empty sequence that no request uses; the coldest leftover goes if there is none.
    pub(super) fn empty_sequence(&mut self, now: Instant) -> Option<u32> {
        self.empty_sequence_but(None, now)
    }

    pub(super) fn empty_sequence_but(&mut self, spared: Option<u32>, now: Instant) -> Option<u32> {
        if let Some(empty) = self.kv.empty() {
            return Some(empty);
        }
        let coldest = self.kv.coldest_but(spared).or_else(|| self.kv.coldest())?;
        self.evict(coldest, now);
        Some(coldest)
    }

    /// Has someone give its slot away, unless there is only one: that one fits.
    fn preempt_youngest(&mut self, now: Instant) -> bool {
        self.slots.iter().flatten().count() > 1 && self.preempt(Priority::High, now)
    }

    /// Has the youngest of the lowest standing, which is at most `highest`, give its slot away.
    pub(super) fn preempt(&mut self, highest: Priority, now: Instant) -> bool {
        let active = self.slots.iter().enumerate().filter_map(|(i, slot)| slot.as_ref().map(|s| (i, s)));
        let victim = active
            .filter(|(_, s)| s.standing <= highest)
            .min_by_key(|(_, s)| (s.standing, std::cmp::Reverse(s.ticket)))
            .map(|(slot, _)| slot);
        victim.is_some_and(|slot| self.preempt_slot(slot, now))
    }

    /// Has who has this slot give it away.
    pub(super) fn preempt_slot(&mut self, slot: usize, now: Instant) -> bool {
        let Some((sequence, saved)) = self.vacate(slot, now) else { return false };
        // Somebody needs them now.
        self.kv.clear(u32::try_from(slot).unwrap_or(u32::MAX));
        self.stats.preemptions.fetch_add(1, Relaxed);
        self.wait_again(sequence, saved, now);
        true
    }

    /// Takes a sequence out of its slot, with what is saved of its state. What is not is left over in its cells, where that can
    /// be of use.
    pub(super) fn vacate(&mut self, slot: usize, now: Instant) -> Option<(Box<Sequence>, Saved)> {
        let mut sequence = self.slots[slot].take()?;
        let id = u32::try_from(slot).unwrap_or(u32::MAX);
        let saved = self.save(id, &sequence, now);
        self.kv.set_in_use(id, false);
        if saved.tokens > 0 || !self.reuse_prefixes {
            self.kv.clear(id);
        }
        sequence.drafts.clear();
        sequence.decoded = 0;
        sequence.is(Activity::Paused);
        Some((Box::new(sequence), saved))
    }

    fn save(&mut self, id: u32, sequence: &Sequence, now: Instant) -> Saved {
        if !self.limits.reusable || sequence.decoded == 0 {
            return Saved::default();
        }
        let room = self.max_saved_bytes.saturating_sub(self.saved_bytes(now));
        // A state that finds no room is not copied first.
        if room == 0 || self.kv.least_state_bytes(id) > room {
            return Saved::default();
        }
        let tokens = self.copied(sequence.decoded, 1);
        if tokens == 0 {
            return Saved::default();
        }
        let saved = match self.kv.save(id, 0..tokens) {
            Ok(chunks) => Saved { chunks, tokens },
            Err(error) => {
                tracing::warn!(%error, "a sequence's state could not be saved; it will be computed again");
                return Saved::default();
            }
        };
        if saved.bytes() > room { Saved::default() } else { saved }
    }

    /// What is due from time to time, whether there is work or not.
    pub(crate) fn maintain(&mut self, now: Instant) {
        self.maintained = now;
        if let Some(cache) = &mut self.cache {
            cache.expire(now);
        }
        self.relieve(now);
        for sequence in self.kv.expired(now, self.ttl) {
            self.kv.clear(sequence);
        }
        self.stats.preempted_bytes.store(self.saved_bytes(now), Relaxed);
        self.publish();
    }

    /// Gives main memory back where it is short, so much for each look at it, and in each step where it is all but gone: who
    /// computes waits until the system has it. What was saved of those that are paused goes before prefixes.
    pub(super) fn relieve(&mut self, now: Instant) {
        let (level, look) = (self.stats.level(), self.stats.pressure.looks());
        let is_due = level > DegradationLevel::EvictCache || self.relief.seen != Some(look);
        if !level.evicts_cache() || !is_due {
            return;
        }
        self.relief.seen = Some(look);
        let dropped = self.drop_paused_states(self.relief.most_bytes);
        if let Some(cache) = &mut self.cache {
            let more = self.relief.most_bytes.saturating_sub(dropped);
            cache.evict_to(cache.stats().bytes.saturating_sub(more), now);
        }
    }

    /// When there will be more to give back, if there is any.
    pub(super) fn relieves_in(&self) -> Option<Duration> {
        let level = self.stats.level();
        let has_any = self.cache.as_ref().is_some_and(|cache| cache.evictable_bytes() > 0);
        let period = if level > DegradationLevel::EvictCache { Duration::ZERO } else { PERIOD };
        (level.evicts_cache() && has_any).then_some(period)
    }

    /// At the end: what is left over goes to disk, as far as there is time, and what was used last before the rest.
    pub(crate) fn flush(&mut self, now: Instant, deadline: Instant) {
        self.drop_what_was_read();
        self.copies.without_limit();
        let Some(cache) = self.cache.as_mut().filter(|cache| cache.has_disk()) else { return };
        cache.spare_younger();
        let until = now + deadline.saturating_duration_since(now) / FLUSH_SAVING_DIVISOR;
        while Instant::now() < until
            && let Some(hottest) = self.kv.hottest()
        {
            self.evict(hottest, now);
        }
        if let Some(cache) = &mut self.cache
            && !cache.flush(now, deadline)
        {
            tracing::warn!("the prefix cache was not written to disk as a whole: there was no time");
        }
    }

    /// Gives a sequence that gave way a slot again.
    pub(super) fn resume(&mut self, mut sequence: Box<Sequence>, saved: Saved, now: Instant) {
        // Before its state is touched, too: that may be what a process dies of.
        sequence.is(Activity::Begun);
        // Before what makes room for it is saved.
        let tokens = self.copied(saved.tokens, 1);
        if tokens > 0
            && let Some(id) = self.target(None, now)
        {
            self.free_cells(tokens, now);
            let held = &sequence.tokens[..tokens as usize];
            if self.kv.restore(id, held, &chunks_of(held, &saved.chunks)).is_ok() {
                self.kv.set_in_use(id, true);
                sequence.decoded = tokens;
                self.slots[id as usize] = Some(*sequence);
                return;
            }
        }
        let blocks = self.fingerprint.map_or_else(Vec::new, |fingerprint| chain(fingerprint, sequence.reusable()));
        let Some((slot, reused)) = self.place(sequence.reusable(), &blocks, None, now) else {
            sequence.is(Activity::Paused);
            self.wait_again(sequence, Saved::default(), now);
            return;
        };
        sequence.decoded = reused;
        self.slots[slot] = Some(*sequence);
    }
}

//! Who gets a slot, and what of its prompt need not be read again.
//!
//! Those that wait are served as [`crate::queue`] orders them, with two exceptions. One whose prompt shares its beginning
//! with a prompt that is being read waits until that is read, and then copies it: others go before it meanwhile. And one
//! whose beginning is still in memory goes before a long prompt that must be read ([`OVERTAKING_SHARE`]): it is answered in
//! a fraction of that time, and what it needs might be gone later. Those that came more than [`MAX_OVERTAKING`] requests
//! later never do, so that nobody is overtaken more often, and those of other clients do not at all.

use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::{Scheduler, pressure::Saved};
use crate::backend::{BLOCK_TOKENS, Backend, Chunk, Token};
use crate::burst::is_worth_it;
use crate::cache::{BlockHash, Fetched, PrefixCache};
use crate::error::RequestError;
use crate::event::{Activity, FinishReason};
use crate::kv::common;
use crate::lookup::{Acceptance, NgramIndex};
use crate::output::{Admitted, RequestText, TextEvent};
use crate::params::Priority;
use crate::queue::Waiting;
use crate::request::{Request, too_late};
use crate::sequence::{GuessSource, Sequence};

/// Beside streams, so long admissions may take in one step: states are copied there, of which a second is soon gone with a
/// large model. One is always let in; who has not been waits for the next step.
pub(super) const MOST_ADMITTING: Duration = Duration::from_millis(50);
/// Waiting requests that one step looks at.
const MAX_CANDIDATES: usize = 256;
/// Tokens that a shared beginning must be longer than what is there already for waiting to pay.
const MIN_TOKENS_TO_WAIT_FOR: u32 = 32;

/// Tokens that a lower tier must have more than the KV cache: a copy from there is not free.
const MIN_TOKENS_TO_RESTORE: usize = 32;

/// The least that a prompt must have unread to be overtaken: below it there is little to win.
pub(crate) const MIN_UNREAD_TO_OVERTAKE: usize = 256;
/// Who overtakes has at most one part in so many of that to read.
pub(crate) const OVERTAKING_SHARE: usize = 8;
/// Who overtakes came at most so many requests later.
const MAX_OVERTAKING: u64 = 256;

/// Someone who waits for a slot.
pub(super) enum Waiter {
    /// A request that never had one.
    New(Box<Request>),
    /// A sequence that gave its slot away, with what was saved of its state.
    Preempted(Box<Sequence>, Saved),
}

/// Who is next.
struct Candidate {
    ticket: u64,
    priority: Priority,
    standing: Priority,
    /// Whether there are cells for it,
    fits: bool,
    /// and whether there would be if all of low standing gave way.
    may_fit: bool,
}

impl Waiter {
    pub(super) fn tokens(&self) -> &[Token] {
        match self {
            Self::New(request) => &request.prompt,
            Self::Preempted(sequence, _) => &sequence.tokens,
        }
    }

    /// Those up to the first that has to be decoded in any case.
    fn reusable(&self) -> &[Token] {
        match self {
            Self::New(request) => request.reusable(),
            Self::Preempted(sequence, _) => sequence.reusable(),
        }
    }

    /// One that had a slot, and waits as if it had done so until now but for the time that it had it.
    pub(super) fn preempted(sequence: Box<Sequence>, saved: Saved, now: Instant) -> Waiting<Self> {
        let (ticket, priority, deadline) = (sequence.ticket, sequence.priority(), sequence.due());
        let turn = sequence.params.turn;
        let since = now.checked_sub(sequence.waited).unwrap_or(now);
        let value = Self::Preempted(sequence, saved);
        Waiting { ticket, turn, priority, has_begun: true, since, deadline, value }
    }

    fn saved_bytes(&self) -> u64 {
        match self {
            Self::Preempted(_, saved) => saved.bytes(),
            Self::New(_) => 0,
        }
    }

    pub(super) fn is_paused(&self) -> bool {
        match self {
            Self::New(request) => request.signals.paused.load(Relaxed),
            Self::Preempted(sequence, _) => sequence.is_paused(),
        }
    }

    fn is_over(&self) -> bool {
        match self {
            Self::New(request) => request.emitter.is_cancelled(),
            Self::Preempted(sequence, _) => sequence.is_cancelled() || sequence.is_ended(),
        }
    }
}

impl<B: Backend> Scheduler<B> {
    pub(super) fn wait(&mut self, request: Box<Request>) {
        let Request { ticket, submitted_at: since, deadline, .. } = *request;
        let (priority, turn) = (request.params.priority, request.params.turn);
        let value = Waiter::New(request);
        self.waiting.push(Waiting { ticket, turn, priority, has_begun: false, since, deadline, value });
    }

    pub(super) fn wait_again(&mut self, sequence: Box<Sequence>, saved: Saved, now: Instant) {
        self.waiting.push(Waiter::preempted(sequence, saved, now));
    }

    /// Bytes of the states that were saved of those that gave way, or are paused.
    pub(super) fn saved_bytes(&self, now: Instant) -> u64 {
        let waiting = self.waiting.iter(now).map(|waiting| &waiting.value);
        let paused = self.paused.iter(now).map(|paused| &paused.value.waiter);
        waiting.chain(paused).map(Waiter::saved_bytes).sum()
    }

    /// Ends everyone who waits or is paused.
    pub(super) fn fail_waiting(&mut self, error: &RequestError, now: Instant) {
        let paused = self.paused.drain(now).into_iter().map(|paused| paused.map(|paused| paused.waiter));
        for waiting in self.waiting.drain(now).into_iter().chain(paused) {
            match waiting.value {
                Waiter::New(request) => {
                    self.events.push(TextEvent::Refused { emitter: Box::new(request.emitter), error: error.clone() });
                }
                Waiter::Preempted(sequence, _) => {
                    self.events.push(TextEvent::Failed { ticket: sequence.ticket, error: error.clone() });
                }
            }
        }
    }

    /// Ends those who wait or are paused and were cancelled, or waited too long.
    pub(super) fn end_waiting(&mut self, now: Instant) {
        let mut over = self.waiting.expire(now);
        over.extend(self.waiting.remove_if(Waiter::is_over));
        let paused = self.paused.expire(now).into_iter().chain(self.paused.remove_if(|paused| paused.waiter.is_over()));
        over.extend(paused.map(|paused| paused.map(|paused| paused.waiter)));
        for waiting in over {
            match waiting.value {
                Waiter::New(request) if request.emitter.is_cancelled() => request.finish_cancelled(),
                Waiter::New(request) => request.expire(now),
                Waiter::Preempted(sequence, _) if !sequence.is_cancelled() && !sequence.is_ended() => {
                    let error = too_late(sequence.submitted_at, sequence.deadline, now);
                    self.events.push(TextEvent::Failed { ticket: sequence.ticket, error });
                }
                Waiter::Preempted(sequence, _) => {
                    let reason = FinishReason::Cancelled;
                    self.events.push(TextEvent::Finished { ticket: sequence.ticket, reason });
                }
            }
        }
    }

    /// Gives free slots to those that wait. Who is of high priority does not wait for a slot or for cells that someone of
    /// low priority has.
    pub(super) fn admit(&mut self, now: Instant) {
        let began = Instant::now();
        let streams = self.slots.iter().flatten().any(|sequence| sequence.decoded >= sequence.prompt_len);
        // Whom others gave way to. It comes next whatever it would wait for now, or those would come back, and give way
        // again, for ever.
        let mut awaited = None;
        let mut admitted = false;
        loop {
            if admitted && awaited.is_none() && !self.waiting.is_empty() && !self.has_copies_left() {
                return;
            }
            let is_full = self.slots.iter().flatten().count() >= self.slots_allowed();
            let may_take = self.slots.iter().flatten().any(|sequence| sequence.standing == Priority::Low);
            // To look for the next one is work, in vain where nobody can give way.
            if is_full && !may_take {
                return;
            }
            let next = self.next_waiter(!is_full, awaited, now);
            let Some(Candidate { ticket, priority, standing, fits, may_fit }) = next else { return };
            // Nobody gives way in vain.
            if (is_full || !fits) && !(priority == Priority::High && may_fit && self.preempt(Priority::Low, now)) {
                return;
            }
            awaited = (!fits).then_some(ticket);
            if !fits {
                // It may now, or another one has to give way as well.
                continue;
            }
            let Some(waiting) = self.waiting.pop_where(now, |waiting| waiting.ticket == ticket) else { return };
            self.give_slot(waiting, standing, now);
            if streams && began.elapsed() >= self.most_admitting {
                return;
            }
            admitted = true;
        }
    }

    /// Gives one that waited, and was served at this level, a free slot.
    pub(super) fn give_slot(&mut self, waiting: Waiting<Waiter>, standing: Priority, now: Instant) {
        let waited = now.saturating_duration_since(waiting.since);
        match waiting.value {
            Waiter::New(request) => self.start(request, standing, now),
            Waiter::Preempted(sequence, saved) => {
                self.resume(Box::new(Sequence { standing, waited, ..*sequence }), saved, now);
            }
        }
    }

    /// The first that need not wait for what another one reads, or where one `may_overtake` who goes before it; one that is
    /// `awaited`, whatever there is.
    fn next_waiter(&self, may_overtake: bool, awaited: Option<u64>, now: Instant) -> Option<Candidate> {
        let candidates = self.waiting.iter(now).take(MAX_CANDIDATES);
        let mut ready = candidates.filter(|w| match awaited {
            Some(ticket) => w.ticket == ticket,
            None => self.is_ready(w, now),
        });
        let first = ready.next()?;
        let overtaking = if may_overtake { self.overtaking(first, ready, now) } else { None };
        let next = overtaking.unwrap_or(first);
        let fits = self.fits(&next.value, |_| true);
        let may_fit = fits || self.fits(&next.value, |beside| beside.standing > Priority::Low);
        let standing = self.waiting.standing(next, now);
        Some(Candidate { ticket: next.ticket, priority: next.priority, standing, fits, may_fit })
    }

    /// Whether it gains nothing by waiting for what another one reads. One whose state was saved goes on from there.
    pub(super) fn is_ready(&self, waiting: &Waiting<Waiter>, now: Instant) -> bool {
        let is_saved = matches!(&waiting.value, Waiter::Preempted(_, saved) if saved.bytes() > 0);
        is_saved || !self.should_follow(waiting, now)
    }

    /// Who goes before the first of those that are ready, a long prompt: who has least to read.
    fn overtaking<'w>(
        &self,
        first: &Waiting<Waiter>,
        others: impl Iterator<Item = &'w Waiting<Waiter>>,
        now: Instant,
    ) -> Option<&'w Waiting<Waiter>> {
        let most = self.unread(&first.value).filter(|&unread| unread >= MIN_UNREAD_TO_OVERTAKE)? / OVERTAKING_SHARE;
        let standing = self.waiting.standing(first, now);
        let may = |w: &&Waiting<Waiter>| {
            w.ticket <= first.ticket.saturating_add(MAX_OVERTAKING)
                && w.turn.client == first.turn.client
                && self.waiting.standing(w, now) == standing
                // Its beginning is known, and it is not just short.
                && w.value.tokens().len() >= MIN_UNREAD_TO_OVERTAKE
        };
        let quick = others.filter(may).filter_map(|w| Some((self.unread(&w.value).filter(|&own| own <= most)?, w)));
        quick.min_by_key(|&(own, _)| own).map(|(_, w)| w)
    }

    /// Tokens of a new prompt that would have to be read if it got a slot now. A request that gave way is not asked.
    fn unread(&self, waiter: &Waiter) -> Option<usize> {
        let Waiter::New(request) = waiter else { return None };
        if !self.reuse_prefixes {
            return Some(request.prompt.len());
        }
        let tokens = request.reusable();
        let (left_over, in_use) = self.kv.longest(tokens, last_to_reuse(tokens));
        let here = left_over.max_by_len(in_use).map_or(0, |m| m.len as usize);
        let covered = |cache: &PrefixCache| cache.covered(&request.blocks, tokens, request.fetched.as_ref());
        let below = self.cache.as_ref().map_or(0, covered);
        Some(request.prompt.len() - here.max(below))
    }

    /// Whether a prompt that is being read will soon give this one more than is there for it now. One that is read after
    /// others, which this one would go before, will not: one of a lower standing, or a longer one among several.
    fn should_follow(&self, waiting: &Waiting<Waiter>, now: Instant) -> bool {
        if !self.reuse_prefixes {
            return false;
        }
        let tokens = waiting.value.reusable();
        let limit = last_to_reuse(tokens);
        let being_read = || self.slots.iter().flatten().filter(|s| s.decoded < s.prompt_len);
        let oldest = being_read().map(|s| s.ticket).min();
        let alone = being_read().count() == 1;
        let standing = self.waiting.standing(waiting, now);
        let is_soon = |s: &&Sequence| {
            let unread = (s.prompt_len - s.decoded) as usize;
            s.standing >= standing && (alone || oldest == Some(s.ticket) || unread <= tokens.len())
        };
        let shared = |s: &Sequence| common(&tokens[..limit as usize], &s.tokens[..s.prompt_len as usize]);
        let soon = being_read().filter(is_soon).map(shared).max();
        let Some(soon) = soon.filter(|&soon| soon >= MIN_TOKENS_TO_WAIT_FOR) else { return false };
        let (left_over, in_use) = self.kv.longest(tokens, limit);
        let here = left_over.max_by_len(in_use).map_or(0, |m| m.len);
        soon >= here + MIN_TOKENS_TO_WAIT_FOR
    }

    /// How many of its kind will get a slot as soon as they can copy the beginning of the one prompt that is read; 0 where
    /// they are too few to matter.
    pub(super) fn followers(&self, sequence: &Sequence, now: Instant) -> u32 {
        let used = self.slots.iter().flatten().count();
        let most = self.slots_allowed().saturating_sub(used).min(self.waiting.len());
        // To look at prompts is work.
        if !is_worth_it(1 + most, used - 1, self.budget.cost()) {
            return 0;
        }
        let follows = |w: &&Waiting<Waiter>| w.priority == sequence.priority() && self.should_follow(w, now);
        u32::try_from(self.waiting.iter(now).take(most).filter(follows).count()).unwrap_or(u32::MAX)
    }

    /// Whether there are cells for what a waiter will likely use `beside` those who have a slot. One that finds nobody else
    /// is always let in.
    pub(super) fn fits(&self, waiter: &Waiter, beside: impl Fn(&Sequence) -> bool) -> bool {
        let stays = |slot: usize| self.slots.get(slot).and_then(Option::as_ref).is_some_and(&beside);
        if !self.limits.unified || !(0..self.slots.len()).any(stays) {
            return true;
        }
        let tokens = waiter.reusable();
        let prompt = u64::try_from(waiter.tokens().len()).unwrap_or(u64::MAX);
        let shared = match waiter {
            // A state that was saved comes back with cells of its own.
            Waiter::Preempted(_, saved) if saved.bytes() > 0 => 0,
            _ => self.kv.longest(tokens, last_to_reuse(tokens)).1.map_or(0, |m| u64::from(m.len)),
        };
        let answer = match waiter {
            Waiter::New(request) => request.params.max_tokens.map_or(u64::MAX, u64::from),
            Waiter::Preempted(sequence, _) => {
                u64::from(sequence.worst_case() - sequence.len().min(sequence.worst_case()))
            }
        };
        let likely = answer.min(u64::from(self.likely_answer));
        // What those that have a slot have yet to read is as good as used.
        let staying = self.slots.iter().flatten().filter(|s| beside(s));
        let unread: u64 = staying.map(|s| u64::from(s.len() - s.decoded)).sum();
        self.kv.cells_in_use(stays) + unread + (prompt - shared) + likely <= self.limits.total_cells
    }

    /// Gives a request its slot.
    fn start(&mut self, mut request: Box<Request>, standing: Priority, now: Instant) {
        request.emitter.is(Activity::Begun);
        let fetched = request.fetched.take();
        let Some((slot, reused)) = self.place(request.reusable(), &request.blocks, fetched, now) else {
            // Every sequence is in use, which `admit` has excluded.
            request.emitter.is(Activity::Paused);
            self.wait(request);
            return;
        };
        let begun = &mut self.begun_tags[request.params.priority.rank()];
        *begun = request.params.turn.start_tag.max(*begun);
        let prompt_tokens = request.prompt_len();
        let Request {
            ticket,
            prompt,
            params,
            emitter,
            signals,
            sampler,
            reading,
            repeats,
            submitted_at,
            tokenized_at,
            deadline,
            ..
        } = *request;
        let ms = |from: Instant, to: Instant| Duration::as_secs_f64(&to.saturating_duration_since(from)) * 1e3;
        let admitted = Admitted {
            prompt_tokens,
            cached_tokens: reused,
            tokenize_ms: ms(submitted_at, tokenized_at),
            queue_ms: ms(tokenized_at, now),
            at: now,
        };
        let activity = emitter.activity();
        let text = RequestText::new(
            emitter,
            signals.clone(),
            self.vocabulary.clone(),
            params.stop.clone(),
            reading,
            &admitted,
        );
        self.events.push(TextEvent::Started { ticket, text: Box::new(text) });
        if params.prompt_logprobs.is_some() {
            self.events.extend(prompt.first().map(|&first| TextEvent::Scored { ticket, scores: vec![(first, None)] }));
        }
        let of_prompt = || repeats.map_or_else(|| NgramIndex::of_prompt(&prompt), |r| (r.index, r.acceptance));
        let (index, lookup) = self.lookup_tokens.map(|_| of_prompt()).unzip();
        self.slots[slot] = Some(Sequence {
            ticket,
            standing,
            waited: now.saturating_duration_since(submitted_at),
            params,
            signals,
            activity,
            sampler: Some(sampler),
            tokens: prompt,
            prompt_len: prompt_tokens,
            scored: 0,
            decoded: reused,
            drafts: Vec::new(),
            guessed_by: GuessSource::default(),
            index,
            lookup: lookup.unwrap_or_default(),
            draft: Acceptance::default(),
            resumes: 0,
            gave_way_at: None,
            positions: self.limits.positions,
            submitted_at,
            deadline,
        });
    }

    /// Finds a sequence for these tokens, filled with as many of them but the last as can be had without computing.
    /// `blocks` is [`chain`](crate::cache::chain) of these tokens, `fetched` what was on disk of them.
    pub(super) fn place(
        &mut self,
        tokens: &[Token],
        blocks: &[BlockHash],
        fetched: Option<Fetched>,
        now: Instant,
    ) -> Option<(usize, u32)> {
        let (slot, reused) = self.place_reusing(tokens, blocks, fetched, now)?;
        self.stats.misses.fetch_add((self.reuse_prefixes && reused == 0).into(), Relaxed);
        self.kv.set_in_use(slot, true);
        Some((slot as usize, reused))
    }

    fn place_reusing(
        &mut self,
        tokens: &[Token],
        blocks: &[BlockHash],
        fetched: Option<Fetched>,
        now: Instant,
    ) -> Option<(u32, u32)> {
        if !self.reuse_prefixes {
            return Some((self.empty_sequence(now)?, 0));
        }
        let (left_over, in_use) = self.kv.longest(tokens, last_to_reuse(tokens));
        let best = left_over.max_by_len(in_use);
        let here = best.map_or(0, |m| m.len);
        if let Some(placed) = self.place_from_below(tokens, blocks, fetched, here, now) {
            return Some(placed);
        }
        // In a split cache the lowest sequence is taken, since llama.cpp computes only neighbours together; a unified one
        // has no such order, and a leftover that is a beginning as a whole is simply gone on with.
        let in_place = left_over.filter(|m| {
            let whole = self.kv.len(m.sequence) == m.len;
            best == left_over && if self.limits.unified { whole } else { self.lowest_free() == Some(m.sequence) }
        });
        if let Some(found) = in_place {
            self.keep_tail(found.sequence, found.len, now);
            let reused = self.kv.truncate(found.sequence, found.len);
            self.stats.device.gave(reused);
            return Some((found.sequence, reused));
        }
        if let Some(found) = best {
            self.kv.touch(found.sequence);
        }
        // Of a split cache it is copied, before what makes room for it is saved.
        let copies = match best {
            Some(found) if !self.limits.unified => self.copied(found.len, 2),
            Some(found) => found.len,
            None => 0,
        };
        let target = self.target(best.map(|m| m.sequence), now)?;
        let reused = match best {
            // The source itself had to go.
            Some(found) if self.kv.len(found.sequence) < copies || found.sequence == target => 0,
            Some(found) if copies > 0 => self.kv.copy(found.sequence, target, copies).map_or(0, |()| copies),
            _ => 0,
        };
        self.stats.device.gave(reused);
        Some((target, reused))
    }

    /// Fills a sequence from main memory, or with what was fetched from disk, where that is more than in the KV cache.
    fn place_from_below(
        &mut self,
        tokens: &[Token],
        blocks: &[BlockHash],
        fetched: Option<Fetched>,
        here: u32,
        now: Instant,
    ) -> Option<(u32, u32)> {
        let covered = self.cache.as_ref()?.covered(blocks, tokens, fetched.as_ref());
        let most = u32::try_from(covered).unwrap_or(u32::MAX);
        if (self.copies.room(most, 1) as usize) < here as usize + MIN_TOKENS_TO_RESTORE {
            return None;
        }
        // Before what makes room for it is saved.
        let most = self.copied(most, 1);
        let target = self.target(None, now)?;
        // Pinned until it is restored: what the target held may have come in since.
        let hit = self.cache.as_mut()?.lookup(blocks, tokens, fetched, now);
        let blocks = hit.payloads().iter().take((most / BLOCK_TOKENS) as usize);
        let chunks: Vec<Chunk<'_>> = blocks.map(|bytes| Chunk { tokens: BLOCK_TOKENS, bytes }).collect();
        let restored = chunks.len() * BLOCK_TOKENS as usize;
        let from_disk = (hit.disk_blocks() * BLOCK_TOKENS as usize).saturating_sub(hit.tokens() - restored);
        let reused = u32::try_from(restored).unwrap_or(u32::MAX);
        self.free_cells(reused, now);
        if restored <= here as usize || self.kv.restore(target, &tokens[..restored], &chunks).is_err() {
            return None;
        }
        let from_disk = u32::try_from(from_disk).unwrap_or(u32::MAX);
        self.stats.disk.gave(from_disk);
        self.stats.ram.gave(reused - from_disk);
        Some((target, reused))
    }

    /// An empty sequence for a request.
    pub(super) fn target(&mut self, spared: Option<u32>, now: Instant) -> Option<u32> {
        if self.limits.unified {
            return self.empty_sequence_but(spared, now);
        }
        let target = self.lowest_free()?;
        self.evict(target, now);
        Some(target)
    }

    fn lowest_free(&self) -> Option<u32> {
        (0..self.limits.sequences).find(|&s| !self.kv.in_use(s))
    }
}

/// How much of a prompt may come from elsewhere: its last token is always decoded, for the logits after it.
pub(super) fn last_to_reuse(tokens: &[Token]) -> u32 {
    u32::try_from(tokens.len().saturating_sub(1)).unwrap_or(u32::MAX)
}

trait Longer: Sized {
    fn max_by_len(self, other: Self) -> Self;
}

impl Longer for Option<crate::kv::Match> {
    /// The longer of two; the first of equals.
    fn max_by_len(self, other: Self) -> Self {
        match (self, other) {
            (Some(a), Some(b)) if b.len > a.len => Some(b),
            (None, b) => b,
            (a, _) => a,
        }
    }
}

//! Who gets a slot, and what of its prompt need not be read again.
//!
//! Those that wait are served by priority and ticket. One whose prompt shares its beginning with a prompt that is being
//! read waits until that is read, and then copies it: others go before it meanwhile.

use std::time::{Duration, Instant};

use super::{Scheduler, pressure::Saved};
use crate::backend::{Backend, Token};
use crate::error::RequestError;
use crate::kv::common;
use crate::output::{Admitted, RequestText, TextEvent};
use crate::params::Priority;
use crate::request::Request;
use crate::sequence::Sequence;

/// Waiting requests that one step looks at.
const MAX_CANDIDATES: usize = 64;
/// Tokens that a shared beginning must be longer than what is there already for waiting to pay.
const MIN_TOKENS_TO_WAIT_FOR: u32 = 32;

/// Someone who waits for a slot.
pub(super) enum Waiter {
    /// A request that never had one.
    New(Request),
    /// A sequence that gave its slot away, with what was saved of its state.
    Preempted(Box<Sequence>, Saved),
}

impl Waiter {
    fn ticket(&self) -> u64 {
        match self {
            Self::New(request) => request.ticket,
            Self::Preempted(sequence, _) => sequence.ticket,
        }
    }

    fn priority(&self) -> Priority {
        match self {
            Self::New(request) => request.params.priority,
            Self::Preempted(sequence, _) => sequence.priority(),
        }
    }

    fn tokens(&self) -> &[Token] {
        match self {
            Self::New(request) => &request.prompt,
            Self::Preempted(sequence, _) => &sequence.tokens,
        }
    }
}

/// Those that wait, in the order of service.
#[derive(Default)]
pub(super) struct Waiting(Vec<Waiter>);

impl Waiting {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn push(&mut self, request: Request) {
        self.insert(Waiter::New(request));
    }

    pub(super) fn insert(&mut self, waiter: Waiter) {
        let key = |w: &Waiter| (std::cmp::Reverse(w.priority()), w.ticket());
        let at = self.0.partition_point(|other| key(other) < key(&waiter));
        self.0.insert(at, waiter);
    }

    /// Bytes of the states that were saved of those that gave way.
    pub(super) fn saved_bytes(&self) -> u64 {
        let saved = |waiter: &Waiter| if let Waiter::Preempted(_, saved) = waiter { saved.bytes() } else { 0 };
        self.0.iter().map(saved).sum()
    }

    /// Ends those that never had a slot, and returns those that had.
    pub(super) fn fail_all(&mut self, error: &RequestError) -> Vec<Box<Sequence>> {
        let mut preempted = Vec::new();
        for waiter in self.0.drain(..) {
            match waiter {
                Waiter::New(mut request) => request.emitter.failed(error.clone()),
                Waiter::Preempted(sequence, _) => preempted.push(sequence),
            }
        }
        preempted
    }

    /// Ends the cancelled and the expired that never had a slot, and returns the cancelled that had.
    pub(super) fn end_what_is_over(&mut self, now: Instant) -> Vec<Box<Sequence>> {
        let over = |waiter: &Waiter| match waiter {
            Waiter::New(request) => request.emitter.is_cancelled() || request.is_late(now),
            Waiter::Preempted(sequence, _) => sequence.is_cancelled() || sequence.is_ended(),
        };
        let mut preempted = Vec::new();
        if self.0.iter().any(over) {
            for waiter in std::mem::take(&mut self.0) {
                match waiter {
                    waiter if !over(&waiter) => self.0.push(waiter),
                    Waiter::New(request) if request.emitter.is_cancelled() => request.finish_cancelled(),
                    Waiter::New(request) => request.expire(now),
                    Waiter::Preempted(sequence, _) => preempted.push(sequence),
                }
            }
        }
        preempted
    }
}

impl<B: Backend> Scheduler<B> {
    /// Gives free slots to those that wait.
    pub(super) fn admit(&mut self, now: Instant) {
        while let Some(index) = self.next_waiter() {
            let active = self.slots.iter().flatten().count();
            if active >= self.parallel as usize && !self.preempt_for(self.waiting.0[index].priority()) {
                break;
            }
            let waiter = self.waiting.0.remove(index);
            match waiter {
                Waiter::New(request) => self.start(request, now),
                Waiter::Preempted(sequence, saved) => self.resume(sequence, saved),
            }
        }
    }

    /// The first that may be served now.
    fn next_waiter(&self) -> Option<usize> {
        let candidates = self.waiting.0.iter().take(MAX_CANDIDATES);
        let index = candidates.enumerate().find(|(_, waiter)| !self.should_follow(waiter.tokens())).map(|(i, _)| i)?;
        self.fits(&self.waiting.0[index]).then_some(index)
    }

    /// Whether a prompt that is being read will soon give this one more than is there for it now.
    fn should_follow(&self, tokens: &[Token]) -> bool {
        if !self.reuse_prefixes {
            return false;
        }
        let limit = last_to_reuse(tokens);
        let being_read = self.slots.iter().flatten().filter(|s| s.decoded < s.prompt_len);
        let soon = being_read.map(|s| common(&tokens[..limit as usize], &s.tokens[..s.prompt_len as usize])).max();
        let Some(soon) = soon.filter(|&soon| soon >= MIN_TOKENS_TO_WAIT_FOR) else { return false };
        let (left_over, in_use) = self.kv.longest(tokens, limit);
        let now = left_over.max_by_len(in_use).map_or(0, |m| m.len);
        soon >= now + MIN_TOKENS_TO_WAIT_FOR
    }

    /// Whether there are cells for what a waiter will likely use. One that finds nobody else is always let in.
    fn fits(&self, waiter: &Waiter) -> bool {
        if !self.limits.unified || self.slots.iter().all(Option::is_none) {
            return true;
        }
        let tokens = waiter.tokens();
        let prompt = u64::try_from(tokens.len()).unwrap_or(u64::MAX);
        let (_, in_use) = self.kv.longest(tokens, last_to_reuse(tokens));
        let shared = in_use.map_or(0, |m| u64::from(m.len));
        let answer = match waiter {
            Waiter::New(request) => request.params.max_tokens.map_or(u64::MAX, u64::from),
            Waiter::Preempted(sequence, _) => {
                u64::from(sequence.worst_case() - sequence.len().min(sequence.worst_case()))
            }
        };
        let likely = answer.min(u64::from(self.likely_answer));
        self.kv.cells_in_use() + (prompt - shared) + likely <= self.limits.total_cells
    }

    /// Gives a request its slot.
    fn start(&mut self, request: Request, now: Instant) {
        let Some((slot, reused)) = self.place(&request.prompt) else {
            // Every sequence is in use, which `admit` has excluded.
            self.waiting.push(request);
            return;
        };
        let prompt_tokens = request.prompt_len();
        let Request { ticket, prompt, params, emitter, signals, sampler, submitted_at, tokenized_at, .. } = request;
        let ms = |from: Instant, to: Instant| Duration::as_secs_f64(&to.saturating_duration_since(from)) * 1e3;
        let admitted = Admitted {
            prompt_tokens,
            cached_tokens: reused,
            tokenize_ms: ms(submitted_at, tokenized_at),
            queue_ms: ms(tokenized_at, now),
            at: now,
        };
        let text = RequestText::new(emitter, signals.clone(), self.vocabulary.clone(), params.stop.clone(), &admitted);
        self.events.push(TextEvent::Started { ticket, text: Box::new(text) });
        self.stats.cached_tokens.fetch_add(u64::from(reused), std::sync::atomic::Ordering::Relaxed);
        self.slots[slot] = Some(Sequence {
            ticket,
            params,
            signals,
            sampler: Some(sampler),
            tokens: prompt,
            prompt_len: prompt_tokens,
            decoded: reused,
            drafts: Vec::new(),
            positions: self.limits.positions,
        });
    }

    /// Finds a sequence for these tokens, filled with as many of them as can be had without computing.
    pub(super) fn place(&mut self, tokens: &[Token]) -> Option<(usize, u32)> {
        let (slot, reused) = self.place_reusing(tokens)?;
        self.kv.set_in_use(slot, true);
        Some((slot as usize, reused))
    }

    fn place_reusing(&mut self, tokens: &[Token]) -> Option<(u32, u32)> {
        if !self.reuse_prefixes {
            return Some((self.empty_sequence()?, 0));
        }
        let (left_over, in_use) = self.kv.longest(tokens, last_to_reuse(tokens));
        let best = left_over.max_by_len(in_use);
        // In a split cache the lowest sequence is taken, since llama.cpp computes only neighbours together; a unified one
        // has no such order, and a leftover that is a beginning as a whole is simply gone on with.
        let in_place = left_over.filter(|m| {
            let whole = self.kv.len(m.sequence) == m.len;
            best == left_over && if self.limits.unified { whole } else { self.lowest_free() == Some(m.sequence) }
        });
        if let Some(found) = in_place {
            self.keep_tail(found.sequence, found.len);
            return Some((found.sequence, self.kv.truncate(found.sequence, found.len)));
        }
        if let Some(found) = best {
            self.kv.touch(found.sequence);
        }
        let target = if self.limits.unified {
            self.empty_sequence_but(best.map(|m| m.sequence))?
        } else {
            let target = self.lowest_free()?;
            self.evict(target);
            target
        };
        let reused = match best {
            // The source itself had to go.
            Some(found) if self.kv.len(found.sequence) < found.len || found.sequence == target => 0,
            Some(found) => self.kv.copy(found.sequence, target, found.len).map_or(0, |()| found.len),
            None => 0,
        };
        Some((target, reused))
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

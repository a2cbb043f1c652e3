//! What tests see of a scheduler, and set in it.

use std::time::{Duration, Instant};

use super::Scheduler;
use super::admission::Waiter;
use super::fill::WorthFilling;
use super::measure::MEASURED_GROUPS;
use crate::backend::Backend;
use crate::backend::scripted::ScriptedBackend;
use crate::budget::{StepCost, StepWork};
use crate::cache::{Fingerprint, PrefixCache};
use crate::draft::Draft;

impl<B: Backend> Scheduler<B> {
    /// Has it be worth filling two rows and more, whatever that takes.
    pub(crate) fn fills(&mut self) {
        let gain_ms = |rows| if rows > 1 { f64::INFINITY } else { 0.0 };
        let gains_ms = (0..=MEASURED_GROUPS * self.limits.group_rows).map(gain_ms).collect();
        self.worth_filling = WorthFilling { gains_ms, group_ms: self.group_ms() };
    }

    /// Has rows be worth so many ms, where steps cost what they are thought to now.
    pub(crate) fn filling_gains(&mut self, gain_ms: f64) {
        self.worth_filling.group_ms = self.group_ms();
        self.worth_filling.gains_ms.iter_mut().skip(2).for_each(|gain| *gain = gain_ms);
    }

    /// Has all be measured anew, as at the end of a load.
    pub(crate) fn measures_anew(&mut self) {
        self.plan_measuring();
    }

    /// Has a step copy so many bytes at most.
    pub(crate) fn copies_at_most(&mut self, bytes: u64) {
        self.copies.limit(bytes);
    }

    /// Has so many bytes of main memory be given back at a time.
    pub(crate) fn relieves_at_most(&mut self, bytes: u64) {
        self.relief.most_bytes = bytes;
    }

    /// How long admissions beside streams may take.
    pub(crate) fn admits_for(&mut self, most: Duration) {
        self.most_admitting = most;
    }

    /// Whose each slot is, by their tickets; 0: nobody's.
    pub(crate) fn tickets(&self) -> Vec<u64> {
        self.slots.iter().map(|slot| slot.as_ref().map_or(0, |sequence| sequence.ticket)).collect()
    }

    /// Tokens that a request has generated, be it in a slot, waiting or paused; `None`: it is over.
    pub(crate) fn generated(&self, ticket: u64, now: Instant) -> Option<u32> {
        let in_slot = self.slots.iter().flatten().find(|sequence| sequence.ticket == ticket);
        in_slot.map(|sequence| sequence.generated()).or_else(|| {
            let waiting = self.waiting.iter(now).map(|waiting| (waiting.ticket, &waiting.value));
            let paused = self.paused.iter(now).map(|paused| (paused.ticket, &paused.value.waiter));
            waiting.chain(paused).find(|&(other, _)| other == ticket).map(|(_, waiter)| match waiter {
                Waiter::New(_) => 0,
                Waiter::Preempted(sequence, _) => sequence.generated(),
            })
        })
    }

    /// Bytes of main memory that are in somebody's use: the states of those that gave way, and blocks that nothing may
    /// take out.
    pub(crate) fn bytes_in_use(&mut self) -> (u64, u64) {
        let now = Instant::now();
        let pinned = self.cache.as_mut().map_or(0, |cache| {
            // Evicts nothing: what was given back is taken note of in the next call.
            cache.evict_to(u64::MAX, now);
            cache.stats().pinned_bytes
        });
        (self.saved_bytes(now), pinned)
    }

    /// What the budget was told that the last step was.
    pub(crate) fn observed(&self) -> StepWork {
        self.budget.observed
    }

    /// Has it keep below the KV cache what this cache takes.
    pub(crate) fn cache_is(&mut self, cache: PrefixCache, fingerprint: Fingerprint) {
        (self.cache, self.fingerprint) = (Some(cache), Some(fingerprint));
    }

    /// The state of what a sequence holds.
    pub(crate) fn saved(&mut self, sequence: u32) -> Vec<Vec<u8>> {
        match self.kv.len(sequence) {
            0 => Vec::new(),
            len => self.kv.save(sequence, 0..len).unwrap_or_default(),
        }
    }
}

impl Scheduler<ScriptedBackend> {
    pub(crate) fn backend(&mut self) -> &mut ScriptedBackend {
        self.kv.backend()
    }

    pub(crate) fn draft(&mut self) -> Option<&mut Draft<ScriptedBackend>> {
        self.draft.as_mut()
    }

    pub(crate) fn draft_is(&mut self, draft: Option<Draft<ScriptedBackend>>) {
        self.draft = draft.filter(|_| self.limits.reusable);
    }

    pub(crate) fn cost_is(&mut self, cost: StepCost) {
        self.budget.cost_is(cost);
    }

    pub(crate) fn likely_answer_is(&mut self, tokens: u32) {
        self.likely_answer = tokens;
    }

    /// The books say what the backend holds, and each slot what its sequence does; main memory keeps its limits.
    pub(crate) fn assert_books(&mut self) {
        for id in 0..self.limits.sequences {
            assert_eq!(self.kv.backend().tokens(id), self.kv.tokens(id), "sequence {id}");
            let slot = &self.slots[id as usize];
            assert_eq!(self.kv.in_use(id), slot.is_some());
            if let Some(sequence) = slot {
                assert_eq!(self.kv.tokens(id), &sequence.tokens[..sequence.decoded as usize]);
            }
        }
        if let Some(draft) = &self.draft {
            draft.assert_books();
        }
        assert_eq!(self.kv.backend().cells(), self.kv.used_cells());
        assert!(self.kv.used_cells() <= self.limits.total_cells);
        if let Some(cache) = &self.cache {
            cache.check();
        }
        assert!(self.saved_bytes(Instant::now()) <= self.max_saved_bytes);
    }

    pub(crate) fn drop_leftovers(&mut self) {
        for id in 0..self.limits.sequences {
            if !self.kv.in_use(id) {
                self.kv.clear(id);
            }
        }
        self.publish();
    }
}

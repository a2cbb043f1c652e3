//! Guessing ahead for those that generate, where that pays: from repetitions first, and where there are none, or they
//! were too often wrong, with the draft model.

use std::time::Duration;

use super::{Scheduler, Share};
use crate::backend::{Backend, Token};
use crate::draft::{Ask, reason};
use crate::lookup::DraftCost;
use crate::plan::Need;
use crate::sequence::{GuessSource, Sequence};

impl<B: Backend> Scheduler<B> {
    pub(super) fn guess(&mut self) {
        if self.lookup_tokens.is_none() && self.draft.is_none() {
            return;
        }
        // Who was not decoded in the last step has its guesses still, which count among the rows that there are for them.
        self.slots.iter_mut().flatten().for_each(|sequence| sequence.drafts.clear());
        let mut others = (self.guesses_first + 1..self.slots.len()).chain(0..self.guesses_first);
        let decodes = |slot: &Option<Sequence>| slot.as_ref().is_some_and(|s| matches!(s.need(), Need::Decode { .. }));
        self.guesses_first = others.find(|&slot| decodes(&self.slots[slot])).unwrap_or(self.guesses_first);
        let rows = self.slots.iter().filter(|slot| decodes(slot)).count();
        let rows = u32::try_from(rows).unwrap_or(u32::MAX);
        let room = self.limits.outputs.saturating_sub(self.parallel);
        let room = self.look_up(rows, room);
        self.draft_ahead(rows, room);
        self.keep_whole_groups(rows);
        let took = self.draft.as_mut().map_or(Duration::ZERO, |draft| draft.take_spent());
        self.stats.drafted_for(took);
    }

    /// What it takes that a sequence's guesses are computed apart from the rows of others.
    fn apart_ms(&self, rows: u32) -> f64 {
        if self.limits.unified || rows < 2 { 0.0 } else { self.budget.cost().fixed_ms }
    }

    /// Guesses from repetitions; of the rows that there are for guesses, what is left.
    fn look_up(&mut self, rows: u32, mut room: u32) -> u32 {
        let Some(most) = self.lookup_tokens else { return room };
        let own = DraftCost { each_ms: 0.0, first_ms: self.apart_ms(rows) };
        let (before, from) = self.slots.split_at_mut(self.guesses_first);
        for sequence in from.iter_mut().chain(before).flatten() {
            let most = most.min(room).min(sequence.left().saturating_sub(1));
            let (Need::Decode { .. }, Some(index)) = (sequence.need(), &sequence.index) else { continue };
            let mut guessed = index.propose(most as usize);
            if !guessed.is_empty() {
                let available = u32::try_from(guessed.len()).unwrap_or(u32::MAX);
                let worth = sequence.lookup.drafts(available, rows, self.budget.cost(), own);
                guessed.truncate(worth as usize);
                room -= worth.min(room);
            }
            sequence.drafts = guessed;
            sequence.guessed_by = GuessSource::Lookup;
        }
        room
    }

    /// Has the draft model guess for those that have no guesses.
    fn draft_ahead(&mut self, rows: u32, mut room: u32) {
        let first_ms = self.apart_ms(rows);
        let Some(draft) = &mut self.draft else { return };
        let cost = self.budget.cost();
        let is_open = |s: &Sequence| s.need() == Need::Decode { drafts: 0 };
        let open = self.slots.iter().flatten().filter(|s| is_open(s)).count();
        let each_ms = draft.token_ms(u32::try_from(open).unwrap_or(u32::MAX));
        let mut wants = Vec::new();
        let slots = self.slots.len();
        for slot in (self.guesses_first..slots).chain(0..self.guesses_first) {
            let Some(sequence) = self.slots[slot].as_mut().filter(|s| is_open(s)) else { continue };
            let available = draft.room(sequence.len()).min(room).min(sequence.left().saturating_sub(1));
            let wanted = sequence.draft.drafts(available, rows, cost, DraftCost { each_ms, first_ms });
            if wanted > 0 {
                room -= wanted.min(room);
                wants.push((slot, wanted));
            }
        }
        let ask = |&(slot, wanted): &(usize, u32)| {
            let sequence = self.slots[slot].as_ref()?;
            Some(Ask { ticket: sequence.ticket, tokens: &sequence.tokens, wanted })
        };
        let asks: Vec<Ask<'_>> = wants.iter().filter_map(ask).collect();
        let active: Vec<u64> = self.slots.iter().flatten().map(|s| s.ticket).collect();
        let guesses: Vec<Vec<Token>> = match draft.propose(&asks, &active) {
            Ok(guesses) => guesses,
            Err(error) => {
                self.draft = None;
                // At a shutdown it is given up as everything is.
                if !self.shutting_down() {
                    let reason = reason(error);
                    tracing::error!(reason, "the draft model failed and is used no more; requests go on without it");
                }
                return;
            }
        };
        for ((slot, _), guessed) in wants.into_iter().zip(guesses) {
            if let Some(sequence) = &mut self.slots[slot] {
                // It is read first, over several steps where it is long.
                if guessed.is_empty() {
                    sequence.draft.put_off();
                }
                sequence.drafts = guessed;
                sequence.guessed_by = GuessSource::Draft;
            }
        }
    }

    /// Takes back the guesses that would be left over of whole groups of rows, those of who guessed last first.
    fn keep_whole_groups(&mut self, rows: u32) {
        let group = self.limits.group_rows as usize;
        let guessed: usize = self.slots.iter().flatten().map(|sequence| sequence.drafts.len()).sum();
        let total = rows as usize + guessed;
        let mut left_over = if total > group { total % group } else { 0 };
        if left_over > guessed {
            return;
        }
        let (before, from) = self.slots.split_at_mut(self.guesses_first);
        for sequence in from.iter_mut().chain(before).flatten().rev() {
            let less = left_over.min(sequence.drafts.len());
            sequence.drafts.truncate(sequence.drafts.len() - less);
            left_over -= less;
        }
    }

    /// Notes how many of a slot's guesses were right.
    pub(super) fn count_guesses(&mut self, share: &Share, source: GuessSource, right: u64) {
        let made = share.rows - 1;
        let counters = match source {
            GuessSource::Lookup => &self.stats.looked_up,
            GuessSource::Draft => &self.stats.drafted,
        };
        counters.count(made.into(), right);
        if let Some(sequence) = &mut self.slots[share.slot] {
            let acceptance = match source {
                GuessSource::Lookup => &mut sequence.lookup,
                GuessSource::Draft => &mut sequence.draft,
            };
            acceptance.observe(made, u32::try_from(right).unwrap_or(made));
        }
    }
}

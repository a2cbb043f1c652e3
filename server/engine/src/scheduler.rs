//! Continuous batching: which request holds which slot, and what each step decodes.
//!
//! Flow of a step: end what is over → take their slots from those that are paused ([`pause`]) → give a client without a slot
//! one of those that have several ([`first_slot`]) → give free slots to those that wait ([`admission`]) → close the gaps between
//! streams ([`gaps`]) → plan (one token for each sequence that generates, rows of nobody's where a whole group takes less
//! ([`fill`]), then prompts within the budget) → make room ([`pressure`]) → decode one batch → sample each row → post the
//! tokens to the text thread. One owner, no threads of its own, no clock but for figures and deadlines: tests run it step by
//! step on a scripted backend.
//!
//! When a batch fails, or a row of it has no number, each sequence in it is decoded by itself, and ends its request if it fails alone. Where a token of
//! nobody's fails as well, or several batches in a row, the backend is broken: the scheduler then fails everything, and its
//! engine must be replaced ([`failure`]). A cache that is full ends nobody: leftovers go, then a sequence gives way and
//! comes back later.

mod admission;
mod copies;
mod cost;
mod failure;
mod fill;
mod first_slot;
mod gaps;
mod guess;
mod measure;
mod pause;
mod pressure;
mod probe;
mod stage;
#[cfg(test)]
mod testing;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::backend::{Backend, BackendError, BackendLimits, BatchEntry, Vocabulary};
use crate::budget::{Demand, MIN_PREFILL_TOKENS, StepBudget};
use crate::burst::{Asking, Bursts, only_reader};
use crate::cache::{Fingerprint, PrefixCache};
use crate::draft::Draft;
use crate::error::RequestError;
use crate::event::FinishReason;
use crate::kv::Kv;
use crate::output::{Output, TextEvent};
use crate::params::Priority;
use crate::plan::{ATTENTION_TILE_TOKENS, Bounds, Need, plan_in_tiles};
use crate::queue::Queue;
use crate::request::{Request, too_late};
use crate::sample_pool::{SampleDone, SampleJob, SamplePool, SampledRows};
use crate::sampler::{Sampled, Scorer};
use crate::sequence::{Progress, RowUse, Sequence};
use crate::stats::{Stats, StepRecord};
use admission::Waiter;
#[cfg(test)]
pub(crate) use admission::{MIN_UNREAD_TO_OVERTAKE, OVERTAKING_SHARE};
use copies::Copies;
use fill::{Fillers, WorthFilling};
use measure::Measuring;
use pause::Paused;
use pressure::Relief;
pub(crate) use probe::PROBE_FRESH;
#[cfg(test)]
pub(crate) use stage::LEAST_STAGED_TOKENS;
use stage::share_stage;

/// An idle engine waits for a further request, before it reads those that it has, by so much of the time that reading takes,
const PATIENCE: f64 = 0.005;
/// and no longer than this in ms, not even for one that it knows will come.
const MOST_PATIENCE_MS: f64 = 5.0;
/// The longest that it waits for all that follow each other, in ms.
pub(crate) const GATHERING_MS: u64 = 25;
/// How often is looked at what has become old, and whether memory is short.
pub(crate) const MAINTENANCE_PERIOD: Duration = Duration::from_secs(1);
/// Tokens that an answer is taken to have before any has ended.
const FIRST_LIKELY_ANSWER_TOKENS: u32 = 128;
/// The weight of the last answer in the likely length of the next, as a divisor.
const LIKELY_ANSWER_WEIGHT: u32 = 8;

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepOutcome {
    /// There was nothing to decode.
    Idle,
    /// A batch was decoded.
    Decoded,
    /// A batch failed; its sequences are decoded one by one, or were ended.
    Failed,
}

/// A slot's part in the batch of this step.
#[derive(Clone, Copy)]
struct Share {
    slot: usize,
    tokens: u32,
    /// The first batch entry whose logits something is chosen from, and how many are.
    row: usize,
    rows: u32,
    /// How many before that tell the log-probability of the prompt's next token.
    scored: u32,
}

impl Share {
    /// The batch entries whose logits are wanted.
    fn all_rows(&self) -> Range<usize> {
        self.row - self.scored as usize..self.row + self.rows as usize
    }
}

/// A sequence of a batch that failed, which is decoded by itself.
struct Suspect {
    ticket: u64,
    /// Tokens of it that were in the cache when that happened: it is one until there are more.
    held: u32,
}

/// What a scheduler is made with.
pub(crate) struct SchedulerParts<B> {
    pub(crate) backend: B,
    pub(crate) vocabulary: Arc<dyn Vocabulary>,
    pub(crate) stats: Arc<Stats>,
    pub(crate) output: Output,
    pub(crate) pool: SamplePool,
    /// Requests that may hold a slot at once.
    pub(crate) parallel: u32,
    pub(crate) budget: StepBudget,
    pub(crate) reuse_prefixes: bool,
    /// What the KV cache has no room for.
    pub(crate) cache: Option<(PrefixCache, Fingerprint)>,
    /// How long what is left over in the KV cache lives without being of use.
    pub(crate) ttl: Option<Duration>,
    /// The most tokens guessed at a time from repetitions; `None`: no such guesses.
    pub(crate) lookup_tokens: Option<u32>,
    /// What guesses where nothing repeats itself.
    pub(crate) draft: Option<Draft<B>>,
    /// The most bytes that the states of sequences which gave way or are paused may take.
    pub(crate) max_saved_bytes: u64,
}

/// The owner of the backend and of every request that is past tokenising.
pub(crate) struct Scheduler<B> {
    kv: Kv<B>,
    limits: BackendLimits,
    vocabulary: Arc<dyn Vocabulary>,
    stats: Arc<Stats>,
    output: Output,
    events: Vec<TextEvent>,
    pool: SamplePool,
    scorer: Scorer,
    parallel: u32,
    budget: StepBudget,
    bursts: Bursts,
    reuse_prefixes: bool,
    cache: Option<PrefixCache>,
    fingerprint: Option<Fingerprint>,
    ttl: Option<Duration>,
    lookup_tokens: Option<u32>,
    draft: Option<Draft<B>>,
    max_saved_bytes: u64,
    /// Tokens of an answer, as the last ones were.
    likely_answer: u32,
    /// By sequence id.
    slots: Vec<Option<Sequence>>,
    waiting: Queue<Waiter>,
    paused: Queue<Paused>,
    newest_ticket: u64,
    /// Of each priority, the highest start tag of those that have had a slot.
    begun_tags: [u64; Priority::COUNT],
    batch: Vec<BatchEntry>,
    /// Those of the batch that are nobody's.
    fillers: Fillers,
    worth_filling: WorthFilling,
    measuring: Measuring,
    copies: Copies,
    relief: Relief,
    consecutive_failures: u32,
    /// Those of a batch that failed, each of which is decoded by itself.
    suspects: VecDeque<Suspect>,
    /// The slot that may guess first in this step: where not all can, they take turns.
    guesses_first: usize,
    /// See [`admission::MOST_ADMITTING`].
    most_admitting: Duration,
    /// Steps that read prompts.
    prompt_steps: u64,
    /// Whose prompt the step reads beside a pool,
    staged: Option<u32>,
    /// and how many were before.
    staged_prompts: u64,
    maintained: Instant,
}

impl<B: Backend> Scheduler<B> {
    pub(crate) fn new(parts: SchedulerParts<B>) -> Self {
        let kv = Kv::new(parts.backend);
        let limits = kv.limits();
        let reuse_prefixes = parts.reuse_prefixes && limits.reusable;
        let (cache, fingerprint) = parts.cache.filter(|_| reuse_prefixes).unzip();
        Self {
            kv,
            limits,
            vocabulary: parts.vocabulary,
            stats: parts.stats,
            output: parts.output,
            events: Vec::new(),
            pool: parts.pool,
            scorer: Scorer::default(),
            parallel: parts.parallel.min(limits.sequences),
            budget: parts.budget,
            bursts: Bursts::default(),
            reuse_prefixes,
            cache,
            fingerprint,
            ttl: parts.ttl,
            lookup_tokens: parts.lookup_tokens.filter(|_| limits.reusable),
            draft: parts.draft.filter(|_| limits.reusable),
            max_saved_bytes: parts.max_saved_bytes,
            likely_answer: FIRST_LIKELY_ANSWER_TOKENS,
            slots: (0..limits.sequences).map(|_| None).collect(),
            waiting: Queue::default(),
            paused: Queue::default(),
            newest_ticket: 0,
            begun_tags: [0; Priority::COUNT],
            batch: Vec::new(),
            fillers: Fillers::default(),
            worth_filling: WorthFilling::default(),
            measuring: Measuring::default(),
            copies: Copies::new(&limits),
            relief: Relief::default(),
            consecutive_failures: 0,
            suspects: VecDeque::new(),
            guesses_first: 0,
            most_admitting: admission::MOST_ADMITTING,
            prompt_steps: 0,
            staged: None,
            staged_prompts: 0,
            maintained: Instant::now(),
        }
    }

    /// Whether requests were accepted that have not come here yet.
    fn expects_more(&self) -> bool {
        let here = self.waiting.len() + self.paused.len() + self.slots.iter().flatten().count();
        self.stats.in_flight.load(Relaxed) as usize > here
    }

    /// How long a first step may wait for one more request: what is read together with others is read sooner than what
    /// comes a step later, and beside a stream.
    pub(crate) fn patience(&self, now: Instant) -> Duration {
        if self.waiting.len() >= self.slots_allowed() {
            return Duration::ZERO; // There is no slot for company.
        }
        let unread: usize = self.waiting.iter(now).map(|w| w.value.tokens().len()).sum();
        let ms = unread as f64 * self.budget.cost().per_prefill_token_ms;
        let part = if self.expects_more() { 1.0 } else { PATIENCE };
        Duration::from_secs_f64((ms * part).min(MOST_PATIENCE_MS) / 1e3)
    }

    /// Waiting for company took so long.
    pub(crate) fn gathered_for(&self, waited: Duration) {
        self.stats.gathered_for(waited);
    }

    /// Takes a request; it waits by its priority and ticket, whichever order tokenising finished in.
    pub(crate) fn enqueue(&mut self, mut request: Box<Request>) {
        if let Some(reason) = self.stats.broken.get() {
            request.emitter.failed(RequestError::Broken(reason.clone()));
            return;
        }
        self.drop_what_was_read();
        self.newest_ticket = self.newest_ticket.max(request.ticket);
        self.wait(request);
    }

    /// Whether there is something to do; who is paused gives nothing to do.
    pub(crate) fn has_work(&self) -> bool {
        !self.waiting.is_empty() || self.slots.iter().any(Option::is_some)
    }

    pub(crate) fn shutting_down(&self) -> bool {
        self.stats.shutting_down.load(Relaxed)
    }

    /// One step, as the module describes it.
    pub(crate) fn step(&mut self) -> StepOutcome {
        self.step_at(Instant::now())
    }

    /// One step, at a time that tests choose.
    pub(crate) fn step_at(&mut self, started: Instant) -> StepOutcome {
        self.stats.running.begin();
        self.kv.set_now(started);
        self.copies.begin();
        if started.saturating_duration_since(self.maintained) >= MAINTENANCE_PERIOD {
            self.maintain(started);
        } else {
            self.relieve(started);
        }
        self.end_what_is_over(started);
        self.pause_and_resume(started);
        self.give_first_slot(started);
        self.admit(started);
        if self.suspects.is_empty() {
            self.close_gaps();
        }
        self.guess();
        let outcome = self.decode_batch(started);
        self.publish();
        self.output.post(&mut self.events);
        self.stats.running.end();
        outcome
    }

    fn decode_batch(&mut self, started: Instant) -> StepOutcome {
        let mut fills = true;
        let (shares, called) = loop {
            let shares = self.plan(started, fills);
            if self.batch.is_empty() {
                return StepOutcome::Idle;
            }
            let tokens = u32::try_from(self.batch.len()).unwrap_or(u32::MAX);
            // Who gives way changes the plan.
            if !self.make_room(tokens, started) {
                continue;
            }
            let called = Instant::now();
            self.stats.running.expect(self.budget.cost().step_ms(self.work(&shares)));
            match self.kv.decode(&self.batch) {
                Ok(()) => break (shares, called),
                Err(BackendError::NoKvCells) if self.fillers.rows() > 0 => fills = false,
                Err(BackendError::NoKvCells) if self.give_way(started) => {}
                Err(error) => {
                    self.rewind_fillers();
                    self.decode_failed(error, &shares);
                    return StepOutcome::Failed;
                }
            }
        };
        let decoded = Instant::now();
        if self.has_lost_rows(&shares) {
            self.fillers = Fillers::default();
            self.rows_lost(&shares);
            return StepOutcome::Failed;
        }
        self.take_out_fillers();
        let work = self.work(&shares);
        for share in &shares {
            if let Some(sequence) = &mut self.slots[share.slot] {
                sequence.decoded += share.tokens;
                // What was not granted was not checked.
                sequence.drafts.truncate(share.rows.saturating_sub(1) as usize);
            }
        }
        // That one can be decoded by itself does not say that all can be together.
        match self.suspects.front() {
            None => self.consecutive_failures = 0,
            Some(&Suspect { ticket, held }) => {
                let is_past = |s: &Sequence| s.ticket == ticket && s.decoded > held;
                if self.slots.iter().flatten().any(is_past) {
                    self.suspects.pop_front();
                }
            }
        }
        self.prompt_steps += u64::from(work.prefill_tokens > 0);
        let generated_tokens = self.sample(&shares);
        self.stats.step_done(&StepRecord {
            prompt_tokens: work.prefill_tokens.into(),
            generated_tokens,
            batch_tokens: self.batch.len() as u64 - u64::from(self.fillers.rows()),
            padding_tokens: padding(shares.iter().map(|share| share.tokens.into())),
            batch_rows: shares.iter().map(|share| share.all_rows().len() as u64).sum(),
            before: called - started,
            decode: decoded - called,
        });
        // Who hears of an end finds the slot free, and the step counted.
        self.publish();
        self.output.post(&mut self.events);
        self.stats.posted_after(decoded.elapsed());
        // Admission is not among what rows and tokens cost: it may have restored a sequence's state.
        self.budget.observe(work, called.elapsed());
        StepOutcome::Decoded
    }

    /// Slots that may be in use while memory is as short as it is.
    fn slots_allowed(&self) -> usize {
        self.stats.level().batch_limit(self.parallel) as usize
    }

    /// Fills the batch, in the order of the sequences but for prompts around those that generate. `fills`: with rows of
    /// nobody's where that takes less.
    fn plan(&mut self, now: Instant, fills: bool) -> Vec<Share> {
        self.land_what_is_read();
        let active: Vec<(usize, &Sequence)> =
            self.slots.iter().enumerate().filter_map(|(i, slot)| slot.as_ref().map(|s| (i, s))).collect();
        let mut asking: Vec<Asking> = active.iter().map(|(_, sequence)| sequence.asking()).collect();
        if let Some(only) = only_reader(&asking) {
            asking[only].followers = self.followers(active[only].1, now);
        }
        let level = self.stats.level();
        let room_for = |demand: &Demand| level.batch_limit(self.budget.prefill_tokens(demand));
        let step_tokens = room_for(&self.demand(&asking, asking.iter().map(|asking| asking.need)));
        let mut needs = self.bursts.shape(&asking, self.budget.cost(), step_tokens, now);
        // Whose request has ended meanwhile is no suspect.
        self.suspects.retain(|suspect| asking.iter().any(|asking| asking.ticket == suspect.ticket));
        if let Some(suspect) = self.suspects.front() {
            let alone = |asking: &Asking| if asking.ticket == suspect.ticket { asking.need } else { asking.up_to(0) };
            needs = asking.iter().map(alone).collect();
        }
        // Who is to blame for a failure shows in the pool.
        if let Some(cells) = self.limits.stage.filter(|_| self.suspects.is_empty())
            && !share_stage(&mut self.kv, cells, &mut self.staged_prompts, &active, &mut needs)
        {
            self.limits.stage = None;
        }
        self.staged = self.kv.staged();
        self.stats.staged_prompts.store(self.staged_prompts, Relaxed);
        self.stats.bursts.store(self.bursts.begun(), Relaxed);
        let demand = self.demand(&asking, needs.iter().copied());
        let nearly_read = needs.iter().map(|need| match need {
            Need::Prefill { remaining, .. } if *remaining <= MIN_PREFILL_TOKENS => *remaining,
            _ => 0,
        });
        let prefill_tokens = room_for(&demand).max(self.budget.tokens_to_end(&demand, nearly_read.sum()));
        self.stats.budgeted(prefill_tokens, self.budget.target_ms(&demand));
        let cost = self.budget.cost();
        let bounds = Bounds {
            batch_tokens: self.limits.batch_tokens,
            prefill_tokens,
            scored_rows: self.limits.scored_rows,
            scored_cost: (cost.per_decode_row_ms / cost.per_prefill_token_ms).max(1.0),
            turn: self.prompt_steps,
        };
        // Prompts behind all that generate come first, and those before them last: in a split cache they are then computed
        // by themselves, and not with their first token among the others, which would look at as many cells as the prompt
        // has.
        let generates = |need: &Need| matches!(need, Need::Decode { .. });
        let ahead = needs.iter().position(generates).unwrap_or(0);
        let behind = needs.iter().rposition(generates).map_or(0, |last| last + 1);
        let order = || (behind..needs.len()).chain(ahead..behind).chain(0..ahead);
        let parts = |grants: &[u32]| self.parts(&order().map(|at| (active[at].0, grants[at])).collect::<Vec<_>>());
        let tile = if self.computes_in_tiles() { ATTENTION_TILE_TOKENS } else { 0 };
        let grants = plan_in_tiles(&needs, bounds, tile, parts);
        let granted =
            || needs.iter().zip(&grants).zip(&active).map(|((need, &tokens), &(slot, _))| (need, slot, tokens));
        let streams = granted().filter(|(need, _, tokens)| generates(need) && *tokens > 0);
        let streams: Vec<(usize, u32)> = streams.map(|(_, slot, tokens)| (slot, tokens)).collect();
        let of_prompts = |staged: bool| {
            let of = granted().filter(|&(need, slot, _)| !generates(need) && self.is_staged(slot) == staged);
            of.map(|(_, _, tokens)| tokens).sum()
        };
        let fillers =
            if fills { self.fillers(&streams, of_prompts(false), of_prompts(true)) } else { Fillers::default() };
        self.batch.clear();
        let mut shares = Vec::with_capacity(active.len());
        for at in order() {
            if at == ahead {
                self.batch.extend(&fillers.before);
            }
            let ((slot, sequence), tokens) = (active[at], grants[at]);
            let (mut row, mut rows, mut scored) = (0, 0, 0);
            for (token, position, wanted) in sequence.next_tokens(tokens) {
                match wanted {
                    Some(RowUse::Sample) => {
                        row = if rows == 0 { self.batch.len() } else { row };
                        rows += 1;
                    }
                    Some(RowUse::Score) => {
                        row = self.batch.len() + 1;
                        scored += 1;
                    }
                    None => {}
                }
                // A slot's index is its sequence id, below the u32 it came from.
                let sequence = u32::try_from(slot).unwrap_or(u32::MAX);
                self.batch.push(BatchEntry { token, position, sequence, output: wanted.is_some() });
            }
            if tokens > 0 {
                shares.push(Share { slot, tokens, row, rows, scored });
            }
            if at + 1 == behind {
                self.batch.extend(&fillers.behind);
            }
        }
        self.fillers = fillers;
        shares
    }

    /// Samples every row of the batch and returns how many tokens were taken.
    fn sample(&mut self, shares: &[Share]) -> u64 {
        let mut jobs = Vec::new();
        let mut taken = 0;
        let at = Instant::now();
        shares.iter().filter(|share| share.scored > 0).for_each(|share| self.score(share));
        for (id, share) in shares.iter().enumerate().filter(|(_, share)| share.rows > 0) {
            let reads_only = |sequence: &Sequence| sequence.params.max_tokens == Some(0);
            if self.slots[share.slot].as_ref().is_some_and(reads_only) {
                self.finish(share.slot, FinishReason::Length);
                continue;
            }
            let Some(sequence) = &mut self.slots[share.slot] else { continue };
            let Some(mut sampler) = sequence.sampler.take() else {
                self.fail(share.slot, no_logits());
                continue;
            };
            let mut guesses = std::mem::take(&mut sequence.drafts).into_iter();
            let mut rows = share.row..share.row + share.rows as usize;
            let mut sampled = SampledRows::default();
            let mut goes_on = true;
            // A token may be the first of what is bound from there on.
            while goes_on && !rows.is_empty() && sampler.is_trivial() {
                goes_on = match rows.next().and_then(|row| self.kv.logits(row)) {
                    Some(row) => sampled.sample(&mut sampler, row, guesses.next()),
                    None => {
                        sampled.error = Some(no_logits());
                        false
                    }
                };
            }
            if !goes_on || rows.is_empty() {
                sequence.sampler = Some(sampler);
                taken += self.take_rows(share, sampled, at);
            } else if let Some(rows) = rows.map(|row| Some(self.pool.copy(self.kv.logits(row)?))).collect() {
                jobs.push(SampleJob { id, sampler, rows, guesses: guesses.collect(), sampled });
            } else {
                self.fail(share.slot, no_logits());
            }
        }
        for SampleDone { id, sampler, sampled } in self.pool.run(jobs) {
            let share = &shares[id];
            if let Some(sequence) = &mut self.slots[share.slot] {
                sequence.sampler = Some(sampler);
            }
            taken += self.take_rows(share, sampled, at);
        }
        taken
    }

    /// Tells the log-probabilities of tokens of a prompt: of each row what is asked for, so that no two are held.
    fn score(&mut self, share: &Share) {
        let Some(sequence) = &mut self.slots[share.slot] else { return };
        let top = sequence.params.prompt_logprobs.unwrap_or(0);
        let mut scores = Vec::with_capacity(share.scored as usize);
        for row in share.all_rows().take(share.scored as usize) {
            let Some(logits) = self.kv.logits(row) else {
                self.fail(share.slot, no_logits());
                return;
            };
            sequence.scored += 1;
            let token = sequence.tokens[sequence.scored as usize];
            scores.push((token, Some(self.scorer.score(logits, token, top))));
        }
        self.events.push(TextEvent::Scored { ticket: sequence.ticket, scores });
    }

    /// Appends a slot's tokens, and takes the guesses after the first that was wrong out of the cache.
    fn take_rows(&mut self, share: &Share, sampled: SampledRows, at: Instant) -> u64 {
        let (source, before) = self.slots[share.slot].as_ref().map(|s| (s.guessed_by, s.len())).unwrap_or_default();
        let mut taken = 0_u64;
        for token in sampled.tokens {
            if self.slots[share.slot].is_none() {
                break;
            }
            taken += 1;
            self.take(share.slot, token, at);
        }
        if let Some(error) = sampled.error {
            self.fail(share.slot, error);
        }
        if share.rows > 1 {
            self.count_guesses(share, source, taken.saturating_sub(1));
            // One that ended with a guess leaves none in the cache, either.
            let valid = (before + u32::try_from(taken).unwrap_or(0)).saturating_sub(1);
            let held = self.kv.truncate(u32::try_from(share.slot).unwrap_or(u32::MAX), valid);
            if let Some(sequence) = &mut self.slots[share.slot] {
                sequence.decoded = held;
            }
        }
        taken
    }

    /// Appends a token to a request, and ends the request with it where that is due.
    fn take(&mut self, slot: usize, sampled: Sampled, at: Instant) {
        let Some(sequence) = &mut self.slots[slot] else { return };
        let Sampled { token, logprobs } = sampled;
        let ticket = sequence.ticket;
        let ends = self.vocabulary.end_tokens().contains(&token) || sequence.params.stop_tokens.contains(&token);
        let progress = sequence.push(token, ends);
        self.events.push(TextEvent::Token { ticket, token, logprobs, at });
        if let Progress::Finished(reason) = progress {
            self.finish(slot, reason);
        }
    }

    fn end_what_is_over(&mut self, now: Instant) {
        for slot in 0..self.slots.len() {
            let Some(sequence) = &self.slots[slot] else { continue };
            if sequence.is_ended() {
                self.release(slot);
            } else if sequence.is_cancelled() {
                self.finish(slot, FinishReason::Cancelled);
            } else if sequence.due().is_some_and(|due| due <= now) {
                let error = too_late(sequence.submitted_at, sequence.deadline, now);
                self.fail(slot, error);
            }
        }
        self.end_waiting(now);
    }

    fn finish(&mut self, slot: usize, reason: FinishReason) {
        if let Some(sequence) = self.release(slot) {
            let (likely, answer) = (self.likely_answer, sequence.generated());
            self.likely_answer = (likely - likely / LIKELY_ANSWER_WEIGHT).saturating_add(answer / LIKELY_ANSWER_WEIGHT);
            self.events.push(TextEvent::Finished { ticket: sequence.ticket, reason });
        }
    }

    fn fail(&mut self, slot: usize, error: RequestError) {
        if let Some(sequence) = self.release(slot) {
            self.events.push(TextEvent::Failed { ticket: sequence.ticket, error });
        }
    }

    /// Frees a slot; what its cells hold is left for who can use it.
    fn release(&mut self, slot: usize) -> Option<Sequence> {
        let sequence = self.slots[slot].take()?;
        let id = u32::try_from(slot).unwrap_or(u32::MAX);
        self.kv.set_in_use(id, false);
        if !self.reuse_prefixes {
            self.kv.clear(id);
        }
        Some(sequence)
    }

    fn publish(&self) {
        let active = self.slots.iter().flatten().count();
        self.stats.slots_active.store(u32::try_from(active).unwrap_or(u32::MAX), Relaxed);
        self.stats.paused.store(u32::try_from(self.paused.len()).unwrap_or(u32::MAX), Relaxed);
        self.stats.kv_used_cells.store(self.kv.used_cells(), Relaxed);
        let depth = self.waiting.depth();
        for (counter, n) in self.stats.waiting.iter().zip([depth.low, depth.normal, depth.high]) {
            counter.store(u32::try_from(n).unwrap_or(u32::MAX), Relaxed);
        }
        if let Some(cache) = &self.cache {
            let cache = cache.stats();
            self.stats.prefix_cache_bytes.store(cache.bytes, Relaxed);
            self.stats.prefix_cache_disk_bytes.store(cache.disk.map_or(0, |disk| disk.bytes), Relaxed);
        }
    }
}

/// What padding each to the longest would add.
fn padding(tokens: impl Iterator<Item = u64> + Clone) -> u64 {
    let longest = tokens.clone().max().unwrap_or(0);
    tokens.map(|tokens| longest - tokens).sum()
}

fn no_logits() -> RequestError {
    RequestError::Internal(String::from("the backend gave no logits"))
}

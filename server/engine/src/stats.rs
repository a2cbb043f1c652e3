//! An engine's counters: written by its threads, read by anyone without a lock.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::event::EngineStats;
use crate::ladder::DegradationLevel;
use crate::monitor::Pressure;
use crate::params::Priority;
use crate::params::{LEAST_STEP_LIMIT_MS, MOST_STEP_LIMIT_MS, STEP_LIMIT_FACTOR};

/// Seconds over which the token rate is taken.
const RATE_WINDOW_S: u64 = 5;
/// One-second buckets kept; more than the window, so that a bucket is not reused while it is read.
const RATE_BUCKETS: usize = 8;

/// Tokens counted in one second: the second in the upper half, the count in the lower.
#[derive(Debug, Default)]
struct Bucket(AtomicU64);

/// Tokens that one source guessed.
#[derive(Debug, Default)]
pub(crate) struct Guesses {
    /// And that were checked.
    made: AtomicU64,
    right: AtomicU64,
}

impl Guesses {
    pub(crate) fn count(&self, made: u64, right: u64) {
        self.made.fetch_add(made, Relaxed);
        self.right.fetch_add(right, Relaxed);
    }
}

/// What one step did, and how long its parts took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StepRecord {
    pub(crate) prompt_tokens: u64,
    pub(crate) generated_tokens: u64,
    /// Tokens in the batch, guesses included.
    pub(crate) batch_tokens: u64,
    /// What padding each sequence's tokens to the most of any would add.
    pub(crate) padding_tokens: u64,
    /// Rows of logits in the batch.
    pub(crate) batch_rows: u64,
    /// Ending, admitting, planning, making room.
    pub(crate) before: Duration,
    /// In llama.cpp.
    pub(crate) decode: Duration,
}

/// The step that is being computed: since when, and how long it may take. Written by the thread that computes.
#[derive(Debug)]
pub(crate) struct RunningStep {
    started: Instant,
    /// Microseconds after `started`, plus one; 0: there is none.
    began_us: AtomicU64,
    limit_ms: AtomicU64,
}

impl Default for RunningStep {
    fn default() -> Self {
        Self { started: Instant::now(), began_us: AtomicU64::default(), limit_ms: AtomicU64::new(MOST_STEP_LIMIT_MS) }
    }
}

impl RunningStep {
    /// A step begins, of which nothing is known yet.
    pub(crate) fn begin(&self) {
        self.limit_ms.store(MOST_STEP_LIMIT_MS, Relaxed);
        self.began_us.store(micros(self.started.elapsed()) + 1, Relaxed);
    }

    /// It is expected to take so many ms.
    pub(crate) fn expect(&self, ms: f64) {
        // The cast saturates.
        let limit = (ms * f64::from(STEP_LIMIT_FACTOR)) as u64;
        self.limit_ms.store(limit.clamp(LEAST_STEP_LIMIT_MS, MOST_STEP_LIMIT_MS), Relaxed);
    }

    /// It is done.
    pub(crate) fn end(&self) {
        self.began_us.store(0, Relaxed);
    }

    /// How long it has been computed.
    pub(crate) fn age(&self) -> Option<Duration> {
        let began = self.began_us.load(Relaxed).checked_sub(1)?;
        Some(self.started.elapsed().saturating_sub(Duration::from_micros(began)))
    }

    pub(crate) fn limit(&self) -> Duration {
        Duration::from_millis(self.limit_ms.load(Relaxed))
    }

    /// As of a step of which less is expected.
    #[cfg(test)]
    pub(crate) fn limit_is(&self, limit_ms: u64) {
        self.limit_ms.store(limit_ms, Relaxed);
    }

    /// Whether there is one, and it is within its limit.
    pub(crate) fn progress(&self) -> Option<bool> {
        self.age().map(|age| age <= self.limit())
    }
}

/// What a tier of the prefix cache gave.
#[derive(Debug, Default)]
pub(crate) struct Tier {
    /// Times that it gave any.
    hits: AtomicU64,
    tokens: AtomicU64,
}

impl Tier {
    /// So many tokens of a prompt came from here.
    pub(crate) fn gave(&self, tokens: u32) {
        self.hits.fetch_add((tokens > 0).into(), Relaxed);
        self.tokens.fetch_add(tokens.into(), Relaxed);
    }
}

/// The counters.
#[derive(Debug)]
pub(crate) struct Stats {
    started: Instant,
    slots_total: u32,
    kv_total_cells: u64,
    pub(crate) in_flight: AtomicU32,
    pub(crate) slots_active: AtomicU32,
    pub(crate) paused: AtomicU32,
    pub(crate) kv_used_cells: AtomicU64,
    pub(crate) device: Tier,
    pub(crate) ram: Tier,
    pub(crate) disk: Tier,
    /// Times that no tier had anything of a request's tokens.
    pub(crate) misses: AtomicU64,
    /// From repetitions.
    pub(crate) looked_up: Guesses,
    /// From the draft model.
    pub(crate) drafted: Guesses,
    draft_us: AtomicU64,
    /// Requests that wait for a slot, by priority from the lowest.
    pub(crate) waiting: [AtomicU32; Priority::COUNT],
    pub(crate) prefix_cache_bytes: AtomicU64,
    pub(crate) prefix_cache_disk_bytes: AtomicU64,
    /// Shared with what else serves the model.
    pub(crate) pressure: Arc<Pressure>,
    pub(crate) preempted_bytes: AtomicU64,
    pub(crate) measures: AtomicBool,
    pub(crate) reuses_prefixes: AtomicBool,
    pub(crate) kv_unified: AtomicBool,
    pub(crate) flash_attention: AtomicBool,
    pub(crate) stage_positions: AtomicU32,
    pub(crate) staged_prompts: AtomicU64,
    pub(crate) evictions: AtomicU64,
    pub(crate) copied_bytes: AtomicU64,
    pub(crate) uncopied_tokens: AtomicU64,
    pub(crate) deferred_copies: AtomicU64,
    pub(crate) bursts: AtomicU64,
    pub(crate) moves: AtomicU64,
    pub(crate) filler_rows: AtomicU64,
    pub(crate) preemptions: AtomicU64,
    pub(crate) pauses: AtomicU64,
    prompt_tokens: AtomicU64,
    generated_tokens: AtomicU64,
    steps: AtomicU64,
    batch_tokens: AtomicU64,
    padding_tokens: AtomicU64,
    batch_rows: AtomicU64,
    gather_us: AtomicU64,
    before_us: AtomicU64,
    decode_us: AtomicU64,
    after_us: AtomicU64,
    last_step_us: AtomicU64,
    prefill_budget_tokens: AtomicU32,
    step_target_us: AtomicU64,
    /// Microseconds after `started`, plus one; 0: no step yet.
    last_step_at_us: AtomicU64,
    pub(crate) running: RunningStep,
    pub(crate) finished: AtomicU64,
    pub(crate) cancelled: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) shutting_down: AtomicBool,
    /// Why no token can be decoded any more.
    pub(crate) broken: OnceLock<String>,
    rate: [Bucket; RATE_BUCKETS],
}

impl Stats {
    pub(crate) fn new(slots_total: u32, kv_total_cells: u64, pressure: Arc<Pressure>) -> Self {
        Self {
            started: Instant::now(),
            slots_total,
            kv_total_cells,
            in_flight: AtomicU32::default(),
            slots_active: AtomicU32::default(),
            paused: AtomicU32::default(),
            kv_used_cells: AtomicU64::default(),
            device: Tier::default(),
            ram: Tier::default(),
            disk: Tier::default(),
            misses: AtomicU64::default(),
            looked_up: Guesses::default(),
            drafted: Guesses::default(),
            draft_us: AtomicU64::default(),
            waiting: Default::default(),
            prefix_cache_bytes: AtomicU64::default(),
            prefix_cache_disk_bytes: AtomicU64::default(),
            pressure,
            preempted_bytes: AtomicU64::default(),
            measures: AtomicBool::default(),
            reuses_prefixes: AtomicBool::default(),
            kv_unified: AtomicBool::default(),
            flash_attention: AtomicBool::default(),
            stage_positions: AtomicU32::default(),
            staged_prompts: AtomicU64::default(),
            evictions: AtomicU64::default(),
            copied_bytes: AtomicU64::default(),
            uncopied_tokens: AtomicU64::default(),
            deferred_copies: AtomicU64::default(),
            bursts: AtomicU64::default(),
            moves: AtomicU64::default(),
            filler_rows: AtomicU64::default(),
            preemptions: AtomicU64::default(),
            pauses: AtomicU64::default(),
            prompt_tokens: AtomicU64::default(),
            generated_tokens: AtomicU64::default(),
            steps: AtomicU64::default(),
            batch_tokens: AtomicU64::default(),
            padding_tokens: AtomicU64::default(),
            batch_rows: AtomicU64::default(),
            gather_us: AtomicU64::default(),
            before_us: AtomicU64::default(),
            decode_us: AtomicU64::default(),
            after_us: AtomicU64::default(),
            last_step_us: AtomicU64::default(),
            prefill_budget_tokens: AtomicU32::default(),
            step_target_us: AtomicU64::default(),
            last_step_at_us: AtomicU64::default(),
            running: RunningStep::default(),
            finished: AtomicU64::default(),
            cancelled: AtomicU64::default(),
            failed: AtomicU64::default(),
            shutting_down: AtomicBool::default(),
            broken: OnceLock::new(),
            rate: Default::default(),
        }
    }

    /// Records a step that went well. Only the engine thread calls it.
    pub(crate) fn step_done(&self, step: &StepRecord) {
        self.prompt_tokens.fetch_add(step.prompt_tokens, Relaxed);
        self.generated_tokens.fetch_add(step.generated_tokens, Relaxed);
        self.batch_tokens.fetch_add(step.batch_tokens, Relaxed);
        self.padding_tokens.fetch_add(step.padding_tokens, Relaxed);
        self.batch_rows.fetch_add(step.batch_rows, Relaxed);
        self.last_step_us.store(micros(step.before + step.decode), Relaxed);
        self.before_us.fetch_add(micros(step.before), Relaxed);
        self.decode_us.fetch_add(micros(step.decode), Relaxed);
        self.steps.fetch_add(1, Relaxed);
        let now = self.started.elapsed();
        self.last_step_at_us.store(micros(now) + 1, Relaxed);
        self.count_rate(now.as_secs(), step.generated_tokens);
    }

    /// Records what came after the last step's decoding: sampling and posting. Only the engine thread calls it.
    pub(crate) fn posted_after(&self, after: Duration) {
        self.last_step_us.fetch_add(micros(after), Relaxed);
        self.after_us.fetch_add(micros(after), Relaxed);
    }

    /// Notes what a step may take. Only the engine thread calls it.
    pub(crate) fn budgeted(&self, prefill_tokens: u32, target_ms: f64) {
        self.prefill_budget_tokens.store(prefill_tokens, Relaxed);
        // The cast saturates.
        self.step_target_us.store((target_ms * 1e3) as u64, Relaxed);
    }

    /// How long ago the last good step ended.
    pub(crate) fn last_step_age(&self) -> Option<Duration> {
        let at = self.last_step_at_us.load(Relaxed).checked_sub(1)?;
        Some(self.started.elapsed().saturating_sub(Duration::from_micros(at)))
    }

    /// Records the time that a step's guesses took.
    pub(crate) fn drafted_for(&self, took: Duration) {
        self.draft_us.fetch_add(micros(took), Relaxed);
    }

    /// Records the time that an idle engine waited for more requests before it read the first.
    pub(crate) fn gathered_for(&self, waited: Duration) {
        self.gather_us.fetch_add(micros(waited), Relaxed);
    }

    fn count_rate(&self, second: u64, tokens: u64) {
        let bucket = &self.rate[usize::try_from(second).unwrap_or(0) % RATE_BUCKETS].0;
        let old = bucket.load(Relaxed);
        let count = if old >> 32 == second { old & u64::from(u32::MAX) } else { 0 };
        bucket.store((second << 32) | (count + tokens).min(u64::from(u32::MAX)), Relaxed);
    }

    fn tokens_per_second(&self, now: Duration) -> f64 {
        let from = now.as_secs().saturating_sub(RATE_WINDOW_S - 1);
        let tokens: u64 = self
            .rate
            .iter()
            .map(|bucket| bucket.0.load(Relaxed))
            .filter(|value| (from..=now.as_secs()).contains(&(value >> 32)))
            .map(|value| value & u64::from(u32::MAX))
            .sum();
        // The window's seconds that have passed: the last one in part.
        let seconds = (now - Duration::from_secs(from)).as_secs_f64();
        if tokens == 0 || seconds <= 0.0 { 0.0 } else { tokens as f64 / seconds }
    }

    /// How far the service is cut down.
    pub(crate) fn level(&self) -> DegradationLevel {
        self.pressure.level()
    }

    pub(crate) fn snapshot(&self) -> EngineStats {
        let [slots_active, paused] = [&self.slots_active, &self.paused].map(|count| count.load(Relaxed));
        EngineStats {
            slots_active,
            slots_total: self.slots_total,
            queued: self.in_flight.load(Relaxed).saturating_sub(slots_active + paused),
            paused,
            kv_used_cells: self.kv_used_cells.load(Relaxed),
            kv_total_cells: self.kv_total_cells,
            prompt_tokens_total: self.prompt_tokens.load(Relaxed),
            cached_device_tokens_total: self.device.tokens.load(Relaxed),
            cached_ram_tokens_total: self.ram.tokens.load(Relaxed),
            cached_disk_tokens_total: self.disk.tokens.load(Relaxed),
            cache_device_hits_total: self.device.hits.load(Relaxed),
            cache_ram_hits_total: self.ram.hits.load(Relaxed),
            cache_disk_hits_total: self.disk.hits.load(Relaxed),
            cache_misses_total: self.misses.load(Relaxed),
            lookup_tokens_total: self.looked_up.made.load(Relaxed),
            accepted_lookup_tokens_total: self.looked_up.right.load(Relaxed),
            draft_tokens_total: self.drafted.made.load(Relaxed),
            accepted_draft_tokens_total: self.drafted.right.load(Relaxed),
            draft_ms_total: ms(&self.draft_us),
            waiting_low: self.waiting[0].load(Relaxed),
            waiting_normal: self.waiting[1].load(Relaxed),
            waiting_high: self.waiting[2].load(Relaxed),
            prefix_cache_bytes: self.prefix_cache_bytes.load(Relaxed),
            prefix_cache_disk_bytes: self.prefix_cache_disk_bytes.load(Relaxed),
            preempted_bytes: self.preempted_bytes.load(Relaxed),
            measures: self.measures.load(Relaxed),
            reuses_prefixes: self.reuses_prefixes.load(Relaxed),
            kv_unified: self.kv_unified.load(Relaxed),
            flash_attention: self.flash_attention.load(Relaxed),
            stage_positions: self.stage_positions.load(Relaxed),
            staged_prompts_total: self.staged_prompts.load(Relaxed),
            evictions_total: self.evictions.load(Relaxed),
            copied_bytes_total: self.copied_bytes.load(Relaxed),
            uncopied_tokens_total: self.uncopied_tokens.load(Relaxed),
            deferred_copies_total: self.deferred_copies.load(Relaxed),
            moves_total: self.moves.load(Relaxed),
            filler_rows_total: self.filler_rows.load(Relaxed),
            bursts_total: self.bursts.load(Relaxed),
            preemptions_total: self.preemptions.load(Relaxed),
            pauses_total: self.pauses.load(Relaxed),
            generated_tokens_total: self.generated_tokens.load(Relaxed),
            tokens_per_second: self.tokens_per_second(self.started.elapsed()),
            steps: self.steps.load(Relaxed),
            step_age_ms: self.running.age().map(millis),
            step_limit_ms: millis(self.running.limit()),
            last_step_ms: ms(&self.last_step_us),
            prefill_budget_tokens: self.prefill_budget_tokens.load(Relaxed),
            step_target_ms: ms(&self.step_target_us),
            batch_tokens_total: self.batch_tokens.load(Relaxed),
            padding_tokens_total: self.padding_tokens.load(Relaxed),
            batch_rows_total: self.batch_rows.load(Relaxed),
            gather_ms_total: ms(&self.gather_us),
            before_decode_ms_total: ms(&self.before_us),
            decode_ms_total: ms(&self.decode_us),
            after_decode_ms_total: ms(&self.after_us),
            requests_finished_total: self.finished.load(Relaxed),
            requests_cancelled_total: self.cancelled.load(Relaxed),
            requests_failed_total: self.failed.load(Relaxed),
            ..self.pressure.stats()
        }
    }
}

fn ms(micros: &AtomicU64) -> f64 {
    Duration::from_micros(micros.load(Relaxed)).as_secs_f64() * 1e3
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_covers_the_window_and_falls_to_zero() {
        let stats = Stats::new(1, 1, Arc::default());
        for second in 10..20 {
            stats.count_rate(second, 60);
            stats.count_rate(second, 40);
        }
        let at = |ms| stats.tokens_per_second(Duration::from_millis(ms)).round();
        assert_eq!(at(20_000), 100.0);
        // Five seconds in the window, of which 4.5 have passed.
        assert_eq!(at(19_500), 111.0);
        assert_eq!(at(22_000), 50.0);
        assert_eq!(at(25_000), 0.0);
        assert_eq!(at(3_600_000), 0.0);
    }
}

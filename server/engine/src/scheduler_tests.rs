//! The scheduler, step by step on the scripted backend.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use crate::backend::scripted::{Fault, ScriptedBackend, ScriptedVocabulary, VOCAB, reference};
use crate::backend::{Backend, BackendLimits, Token};
use crate::budget::{MIN_PREFILL_TOKENS, StepBudget, StepCost};
use crate::cache::{Fingerprint, FingerprintParts, PrefixCache, chain};
use crate::draft::Draft;
use crate::error::RequestError;
use crate::event::{EngineStats, FinishReason, GenerationEvent};
use crate::grammars::Grammars;
use crate::output::{Output, Signals, TextStage};
use crate::params::{GenerationParams, MAX_DRAFT_CATCH_UP_TOKENS, PrefixCacheConfig, Priority};
use crate::queue::AGEING_BOUND;
use crate::request::{Emitter, Permit, Request};
use crate::sample_pool::SamplePool;
use crate::sampler::{self, Sampler};
use crate::scheduler::{Scheduler, SchedulerParts, StepOutcome};
use crate::stats::Stats;

mod bursts;
mod gaps;
mod properties;
mod shares;

const DRAFT_TOKENS: u32 = 6;

type Events = Arc<Mutex<Vec<GenerationEvent>>>;

/// A machine on which a row more costs a tenth of a step.
const CPU: StepCost =
    StepCost { fixed_ms: 40.0, per_decode_row_ms: 4.0, per_prefill_token_ms: 6.0, per_kilocell_ms: 0.0 };

struct Harness {
    scheduler: Scheduler<ScriptedBackend>,
    stats: Arc<Stats>,
    tickets: u64,
    limit: u32,
    /// How long ago what is submitted was.
    waited: Duration,
}

struct Submitted {
    prompt: Vec<Token>,
    params: GenerationParams,
    events: Events,
    signals: Arc<Signals>,
    was_cancelled: bool,
}

/// What a harness is made of, where it matters.
struct Setup {
    limits: BackendLimits,
    parallel: u32,
    prefill: u32,
    max_queue: u32,
    reuse: bool,
    max_saved_bytes: u64,
    ram_bytes: u64,
    lookup_tokens: Option<u32>,
    /// A draft model that is wrong after each so many tokens; 0: never.
    draft_wrong_every: Option<usize>,
}

fn fingerprint() -> Fingerprint {
    Fingerprint::new(&FingerprintParts {
        model_digest: "scripted",
        type_k: "",
        type_v: "",
        flash_attention: "",
        layout: "",
        payload_format: "",
    })
}

impl Setup {
    /// Each sequence with its own cells, nothing reused.
    fn split(sequences: u32, positions: u32, prefill: u32, max_queue: u32) -> Self {
        let limits = BackendLimits {
            sequences,
            positions,
            batch_tokens: sequences + prefill,
            outputs: sequences + prefill,
            total_cells: u64::from(sequences) * u64::from(positions),
            unified: false,
            flash_attention: true,
            group_rows: 1,
            reusable: true,
        };
        Self {
            limits,
            parallel: sequences,
            prefill,
            max_queue,
            reuse: false,
            max_saved_bytes: 0,
            ram_bytes: 0,
            lookup_tokens: None,
            draft_wrong_every: None,
        }
    }

    fn draft(&self) -> Option<Draft<ScriptedBackend>> {
        let BackendLimits { positions, .. } = self.limits;
        let mut backend = ScriptedBackend::new(self.parallel, positions, self.parallel + MAX_DRAFT_CATCH_UP_TOKENS);
        backend.wrong_every(self.draft_wrong_every?);
        Some(Draft::new(backend, VOCAB, DRAFT_TOKENS))
    }

    /// One pool of cells, prefixes reused, states saved.
    fn unified(parallel: u32, leftovers: u32, cells: u32, prefill: u32) -> Self {
        let mut setup = Self::split(parallel + leftovers, cells, prefill, 64);
        setup.limits.total_cells = cells.into();
        setup.limits.unified = true;
        Self { parallel, reuse: true, max_saved_bytes: 1 << 20, ..setup }
    }
}

impl Harness {
    fn new(sequences: u32, positions: u32, prefill: u32, max_queue: u32) -> Self {
        Self::of(&Setup::split(sequences, positions, prefill, max_queue))
    }

    fn of(setup: &Setup) -> Self {
        let backend = ScriptedBackend::with_limits(setup.limits);
        let stats = Arc::new(Stats::new(setup.parallel, backend.limits().total_cells));
        let scheduler = Scheduler::new(SchedulerParts {
            backend,
            vocabulary: Arc::new(ScriptedVocabulary),
            stats: stats.clone(),
            output: Output::Inline(TextStage::default()),
            pool: SamplePool::new(0).unwrap(),
            parallel: setup.parallel,
            budget: StepBudget::new(None, setup.prefill),
            reuse_prefixes: setup.reuse,
            cache: (setup.ram_bytes > 0).then(|| {
                let config = PrefixCacheConfig { ram_bytes: setup.ram_bytes, ..PrefixCacheConfig::default() };
                (PrefixCache::new(&config, fingerprint()).unwrap(), fingerprint())
            }),
            ttl: None,
            lookup_tokens: setup.lookup_tokens,
            draft: setup.draft(),
            max_saved_bytes: setup.max_saved_bytes,
        });
        Self { scheduler, stats, tickets: 0, limit: setup.parallel + setup.max_queue, waited: Duration::ZERO }
    }

    fn submit(&mut self, prompt: Vec<Token>, params: GenerationParams) -> Option<Submitted> {
        let permit = Permit::take(&self.stats, self.limit)?;
        let events = Events::default();
        let signals = Arc::new(Signals::default());
        let sink = {
            let events = events.clone();
            Box::new(move |event| events.lock().unwrap().push(event))
        };
        let emitter = Emitter::new(sink, self.stats.clone(), permit, signals.clone());
        self.tickets += 1;
        self.enqueue(self.tickets, prompt.clone(), params.clone(), emitter, signals.clone());
        Some(Submitted { prompt, params, events, signals, was_cancelled: false })
    }

    fn enqueue(
        &mut self,
        ticket: u64,
        prompt: Vec<Token>,
        params: GenerationParams,
        emitter: Emitter,
        signals: Arc<Signals>,
    ) {
        let now = Instant::now().checked_sub(self.waited).unwrap();
        let deadline = params.queue_timeout_ms.map(|ms| now + Duration::from_millis(ms));
        let (submitted_at, tokenized_at, fetched) = (now, now, None);
        let blocks = chain(fingerprint(), &prompt);
        let setup = sampler::compile(&ScriptedVocabulary, &Grammars::default(), &params).unwrap();
        let sampler = Box::new(Sampler::new(&params, &prompt, setup));
        let request = Request {
            ticket,
            prompt,
            params,
            emitter,
            signals,
            sampler,
            blocks,
            fetched,
            submitted_at,
            tokenized_at,
            deadline,
        };
        self.scheduler.enqueue(Box::new(request));
    }

    fn run(&mut self) {
        while self.scheduler.has_work() {
            self.scheduler.step();
        }
    }

    /// Nothing is held by anyone.
    fn assert_empty(&mut self) {
        assert!(!self.scheduler.has_work());
        self.scheduler.assert_books();
        self.scheduler.drop_leftovers();
        assert_eq!(self.scheduler.backend().cells(), 0);
        let stats = self.stats.snapshot();
        assert_eq!((stats.slots_active, stats.queued, stats.kv_used_cells), (0, 0, 0));
        assert_eq!(self.stats.in_flight.load(Relaxed), 0);
    }
}

impl Submitted {
    fn text(&self) -> String {
        let events = self.events.lock().unwrap();
        let texts = events.iter().map(|e| if let GenerationEvent::Delta { text, .. } = e { text.as_str() } else { "" });
        texts.collect()
    }

    fn last(&self) -> GenerationEvent {
        self.events.lock().unwrap().last().unwrap().clone()
    }

    fn error(&self) -> RequestError {
        match self.last() {
            GenerationEvent::Failed(error) => error,
            event => panic!("{event:?}"),
        }
    }

    /// The order and number of events, and the answer, are what they must be.
    fn check(&self, positions: u32) {
        let events = self.events.lock().unwrap().clone();
        assert_eq!(events.iter().filter(|e| e.is_terminal()).count(), 1, "{events:?}");
        let Some(GenerationEvent::Finished { reason, usage, .. }) = events.last() else { panic!("{events:?}") };
        let started = events.iter().position(|e| matches!(e, GenerationEvent::Started { .. }));
        let prompt_tokens = u32::try_from(self.prompt.len()).unwrap();
        assert_eq!(usage.prompt_tokens, prompt_tokens);
        assert!(usage.cached_tokens < prompt_tokens);
        if started.is_some() || !self.was_cancelled {
            assert_eq!(events[0], GenerationEvent::Started { prompt_tokens });
        }
        let sent: u32 =
            events.iter().map(|e| if let GenerationEvent::Delta { tokens, .. } = e { *tokens } else { 0 }).sum();
        assert!(sent <= usage.completion_tokens);
        let (text, end, generated) = reference(&self.prompt, &self.params, positions);
        if *reason == FinishReason::Cancelled {
            assert!(self.was_cancelled);
            assert!(usage.completion_tokens <= generated);
            // A cancelled answer is a beginning of the whole one: held-back text might have become a stop string.
            assert!(text.starts_with(&self.text()), "{:?} of {text:?}", self.text());
        } else {
            assert_eq!((self.text(), *reason, usage.completion_tokens), (text, end, generated));
        }
    }
}

fn greedy(max_tokens: u32) -> GenerationParams {
    GenerationParams::greedy(max_tokens)
}

#[test]
fn a_request_alone_gives_the_reference() {
    let mut h = Harness::new(1, 64, 8, 0);
    for seed in 0..20 {
        let request = h.submit(vec![seed + 1; 9], greedy(30)).unwrap();
        h.run();
        request.check(64);
    }
    h.assert_empty();
}

#[test]
fn the_context_ends_an_answer_at_its_last_cell() {
    let mut h = Harness::new(1, 16, 8, 0);
    let params = GenerationParams { ignore_eos: true, ..GenerationParams::greedy(100) };
    let request = h.submit(vec![5; 10], params).unwrap();
    h.run();
    request.check(16);
    // Cells 10 to 15 take six tokens, and one more is sampled after the last of them.
    let GenerationEvent::Finished { reason: FinishReason::Length, usage, .. } = request.last() else { panic!() };
    assert_eq!(usage.completion_tokens, 7);
    h.assert_empty();
}

#[test]
fn a_short_prompt_does_not_wait_for_a_long_one() {
    let mut h = Harness::new(2, 10_000, 64, 0);
    let long = h.submit(vec![7; 9_000], greedy(5)).unwrap();
    h.scheduler.step();
    let short = h.submit(vec![9; 20], greedy(5)).unwrap();
    for _ in 0..6 {
        h.scheduler.step();
    }
    short.check(10_000);
    let stats = h.stats.snapshot();
    assert!((1..=64).contains(&stats.prefill_budget_tokens) && stats.step_target_ms > 0.0, "{stats:?}");
    assert_eq!(long.events.lock().unwrap().len(), 1, "the long prompt is still being read");
    h.run();
    long.check(10_000);
}

#[test]
fn requests_are_admitted_by_ticket() {
    let mut h = Harness::new(1, 64, 64, 8);
    let running = h.submit(vec![3; 4], greedy(20)).unwrap();
    h.scheduler.step();
    // Tokenising may finish in another order than submission.
    h.tickets += 10;
    let later = h.submit(vec![4; 4], greedy(20)).unwrap();
    h.tickets -= 5;
    let earlier = h.submit(vec![5; 4], greedy(20)).unwrap();
    while !running.last().is_terminal() {
        h.scheduler.step();
    }
    h.scheduler.step();
    assert!(!earlier.events.lock().unwrap().is_empty());
    assert!(later.events.lock().unwrap().is_empty());
    h.run();
    [running, earlier, later].iter().for_each(|r| r.check(64));
}

#[test]
fn a_cancel_frees_the_slot_within_one_step() {
    let mut h = Harness::new(1, 1_000, 8, 4);
    let mut running = h.submit(vec![3; 500], greedy(20)).unwrap();
    let mut waiting = h.submit(vec![4; 5], greedy(20)).unwrap();
    let next = h.submit(vec![6; 5], greedy(20)).unwrap();
    h.scheduler.step();
    for request in [&mut running, &mut waiting] {
        request.signals.cancelled.store(true, Relaxed);
        request.was_cancelled = true;
    }
    h.scheduler.step();
    running.check(1_000);
    waiting.check(1_000);
    assert!(!next.events.lock().unwrap().is_empty(), "the next request has the slot in the same step");
    h.run();
    next.check(1_000);
    h.assert_empty();
    assert_eq!(h.stats.snapshot().requests_cancelled_total, 2);
}

#[test]
fn a_cancel_sends_no_part_of_a_stop_string() {
    let params = GenerationParams { stop: ["fa", "ab", "cde"].map(str::to_owned).to_vec(), ..greedy(60) };
    for (token, steps) in (1..40).flat_map(|token| (1..12).map(move |steps| (token, steps))) {
        let mut h = Harness::new(1, 100, 8, 0);
        let mut request = h.submit(vec![token; 5], params.clone()).unwrap();
        for _ in 0..steps {
            h.scheduler.step();
        }
        request.was_cancelled = true;
        request.signals.cancelled.store(true, Relaxed);
        h.run();
        request.check(100);
    }
}

#[test]
fn a_failed_batch_ends_its_requests_only() {
    let mut h = Harness::new(2, 64, 8, 4);
    let hit = [h.submit(vec![3; 4], greedy(20)).unwrap(), h.submit(vec![4; 4], greedy(20)).unwrap()];
    let waiting = h.submit(vec![5; 4], greedy(20)).unwrap();
    h.scheduler.backend().control.faults.lock().unwrap().push_back(Fault::Fail);
    assert_eq!(h.scheduler.step(), StepOutcome::Failed);
    for request in &hit {
        assert!(matches!(request.error(), RequestError::Internal(_)));
    }
    h.run();
    waiting.check(64);
    h.assert_empty();
    assert_eq!(h.scheduler.probe(), Ok(()));
    h.assert_empty();
}

#[test]
fn a_cache_that_is_full_against_the_books_preempts_the_youngest() {
    let mut h = Harness::of(&Setup::unified(2, 2, 200, 8));
    let old = h.submit(vec![3; 4], greedy(20)).unwrap();
    let young = h.submit(vec![4; 4], greedy(20)).unwrap();
    h.scheduler.backend().control.faults.lock().unwrap().push_back(Fault::NoKvCells);
    h.run();
    old.check(200);
    young.check(200);
    assert_eq!(h.stats.snapshot().preemptions_total, 1);
    h.assert_empty();
}

#[test]
fn when_cells_are_short_the_youngest_gives_way_and_comes_back() {
    for max_saved_bytes in [0, 1 << 20] {
        let mut h = Harness::of(&Setup { max_saved_bytes, ..Setup::unified(4, 4, 120, 16) });
        let params = GenerationParams { ignore_eos: true, ..greedy(60) };
        let requests: Vec<_> = (1..=4).map(|i| h.submit(vec![i; 20], params.clone()).unwrap()).collect();
        h.scheduler.likely_answer_is(1);
        let mut first_end = None;
        while h.scheduler.has_work() {
            h.scheduler.step();
            h.scheduler.assert_books();
            let ended = requests.iter().position(|r| r.events.lock().unwrap().last().is_some_and(|e| e.is_terminal()));
            first_end = first_end.or(ended);
        }
        assert_eq!(first_end, Some(0), "the oldest is never preempted");
        assert!(h.stats.snapshot().preemptions_total > 0);
        requests.iter().for_each(|r| r.check(120));
        h.assert_empty();
    }
}

#[test]
fn low_priority_gives_way_before_normal_whatever_their_age() {
    let mut h = Harness::of(&Setup::unified(3, 4, 100, 16));
    let with = |priority| GenerationParams { priority, ignore_eos: true, ..greedy(50) };
    h.scheduler.likely_answer_is(1);
    let low = h.submit(vec![1; 20], with(Priority::Low)).unwrap();
    h.scheduler.step();
    let normal = h.submit(vec![2; 20], with(Priority::Normal)).unwrap();
    h.run();
    low.check(100);
    normal.check(100);
    let end = |r: &Submitted| match r.last() {
        GenerationEvent::Finished { timings, .. } => timings.decode_ms,
        event => panic!("{event:?}"),
    };
    assert!(end(&low) > end(&normal), "the low one was interrupted");
    assert_eq!(h.stats.snapshot().preemptions_total, 1);
    h.assert_empty();
}

#[test]
fn a_high_request_takes_the_slot_of_a_low_one() {
    let mut h = Harness::of(&Setup::unified(2, 2, 400, 16));
    let with = |priority| GenerationParams { priority, ignore_eos: true, ..greedy(40) };
    let low: Vec<_> = (1..=2).map(|i| h.submit(vec![i; 10], with(Priority::Low)).unwrap()).collect();
    for _ in 0..5 {
        h.scheduler.step();
    }
    let high = h.submit(vec![9; 10], with(Priority::High)).unwrap();
    h.scheduler.step();
    assert!(high.events.lock().unwrap().len() > 1, "it has a token in its first step");
    h.run();
    low.iter().chain([&high]).for_each(|r| r.check(400));
    h.assert_empty();
}

#[test]
fn a_high_request_takes_the_only_slot_and_the_cells_of_a_low_one() {
    // Of one slot, and of two with cells for one of them.
    for (parallel, cells) in [(1, 400), (2, 100)] {
        let mut h = Harness::of(&Setup::unified(parallel, 2, cells, 64));
        let with = |priority, tokens| GenerationParams { priority, ignore_eos: true, ..greedy(tokens) };
        let low = h.submit(vec![1; 60], with(Priority::Low, 30)).unwrap();
        for _ in 0..5 {
            h.scheduler.step();
        }
        let high = h.submit(vec![9; 30], with(Priority::High, 10)).unwrap();
        h.scheduler.step();
        assert!(high.events.lock().unwrap().len() > 1, "it has a token in its first step");
        h.run();
        [low, high].iter().for_each(|r| r.check(cells));
        assert_eq!(h.stats.snapshot().preemptions_total, 1);
        h.assert_empty();
    }
}

#[test]
fn what_waited_until_it_was_first_keeps_its_slot() {
    let mut h = Harness::of(&Setup::unified(1, 1, 400, 16));
    let with = |priority| GenerationParams { priority, ignore_eos: true, ..greedy(20) };
    h.waited = AGEING_BOUND;
    let low = h.submit(vec![1; 10], with(Priority::Low)).unwrap();
    h.scheduler.step();
    h.waited = Duration::ZERO;
    let high = h.submit(vec![9; 10], with(Priority::High)).unwrap();
    h.run();
    [low, high].iter().for_each(|r| r.check(400));
    assert_eq!(h.stats.snapshot().preemptions_total, 0, "it would never end while others come");
    h.assert_empty();
}

#[test]
fn what_an_ended_request_left_is_not_read_again() {
    for unified in [false, true] {
        let mut setup = Setup { reuse: true, ..Setup::split(4, 300, 16, 64) };
        if unified {
            setup = Setup::unified(4, 4, 600, 16);
        }
        let mut h = Harness::of(&setup);
        let first = h.submit(vec![5; 100], greedy(10)).unwrap();
        h.run();
        first.check(setup.limits.positions);
        let read = h.scheduler.backend().decoded_tokens;
        let mut longer = vec![5; 100];
        longer.extend([7; 20]);
        let second = h.submit(longer, GenerationParams { ignore_eos: true, ..greedy(5) }).unwrap();
        h.run();
        second.check(setup.limits.positions);
        assert_eq!(h.scheduler.backend().decoded_tokens - read, 20 + 4, "unified: {unified}");
        let GenerationEvent::Finished { usage, .. } = second.last() else { panic!() };
        assert_eq!(usage.cached_tokens, 100);
        h.assert_empty();
    }
}

#[test]
fn a_probe_spoils_nothing_that_is_left_over() {
    let setup = Setup { reuse: true, ..Setup::split(1, 300, 16, 0) };
    let mut h = Harness::of(&setup);
    let first = h.submit(vec![5; 100], greedy(10)).unwrap();
    h.run();
    first.check(300);
    assert_eq!(h.scheduler.probe(), Ok(()));
    h.scheduler.assert_books();
    let read = h.scheduler.backend().decoded_tokens;
    let second = h.submit([vec![5; 100], vec![7; 20]].concat(), greedy(1)).unwrap();
    h.run();
    second.check(300);
    assert_eq!(h.scheduler.backend().decoded_tokens - read, 20);
    // A failed one takes with it what it was decoded behind.
    h.scheduler.backend().control.faults.lock().unwrap().push_back(Fault::Fail);
    assert!(h.scheduler.probe().is_err());
    assert_eq!(h.scheduler.probe(), Ok(()));
    h.assert_empty();
}

#[test]
fn prompts_that_begin_alike_are_read_once_even_when_they_come_together() {
    for unified in [false, true] {
        let mut setup = Setup { reuse: true, ..Setup::split(8, 400, 32, 64) };
        if unified {
            setup = Setup::unified(8, 8, 3_200, 32);
        }
        let mut h = Harness::of(&setup);
        let requests: Vec<_> = (1..=8)
            .map(|i| {
                let prompt = [vec![40; 256], vec![i; 32]].concat();
                h.submit(prompt, GenerationParams { ignore_eos: true, ..greedy(4) }).unwrap()
            })
            .collect();
        h.run();
        requests.iter().for_each(|r| r.check(setup.limits.positions));
        assert_eq!(h.scheduler.backend().decoded_tokens, 256 + 8 * (32 + 3), "unified: {unified}");
        h.assert_empty();
    }
}

/// The order in which requests get the only slot while one holds it: a long prompt that is new, two whose beginning is in
/// memory, of which the first was submitted `later` requests after it and has 30 tokens of its own and the second 10, and
/// a short one that is new.
fn order_behind_a_long_prompt(later: u64, known: Priority) -> Vec<usize> {
    let mut h = Harness::of(&Setup { reuse: true, ram_bytes: 1 << 20, ..Setup::split(1, 800, 64, 64) });
    h.submit(vec![5; 400], greedy(2)).unwrap();
    h.run();
    h.submit(vec![9; 400], greedy(2)).unwrap();
    h.scheduler.step();
    let with = |priority| GenerationParams { priority, ..greedy(2) };
    let long = h.submit(vec![6; 500], with(Priority::Normal)).unwrap();
    h.tickets += later - 1;
    let [more, less] = [30, 10].map(|own| h.submit([vec![5; 400], vec![7; own]].concat(), with(known)).unwrap());
    let short = h.submit(vec![8; 10], with(Priority::Normal)).unwrap();
    let waiting = [long, more, less, short];
    let mut order = Vec::new();
    while h.scheduler.has_work() {
        h.scheduler.step();
        let started = (0..waiting.len()).filter(|&i| !waiting[i].events.lock().unwrap().is_empty());
        order.extend(started.filter(|i| !order.contains(i)).collect::<Vec<_>>());
    }
    waiting.iter().for_each(|request| request.check(800));
    h.assert_empty();
    order
}

#[test]
fn one_whose_beginning_is_in_memory_goes_before_a_long_prompt_that_came_not_much_earlier() {
    assert_eq!(order_behind_a_long_prompt(1, Priority::Normal), [2, 1, 0, 3]);
    assert_eq!(order_behind_a_long_prompt(255, Priority::Normal), [2, 1, 0, 3]);
    assert_eq!(order_behind_a_long_prompt(256, Priority::Normal), [1, 0, 2, 3], "the one came too late for it");
    assert_eq!(order_behind_a_long_prompt(257, Priority::Normal), [0, 1, 2, 3]);
    assert_eq!(order_behind_a_long_prompt(1, Priority::Low), [0, 3, 1, 2]);
}

#[test]
fn what_left_the_kv_cache_comes_back_from_main_memory() {
    for unified in [false, true] {
        let mut setup = Setup { reuse: true, ..Setup::split(2, 400, 64, 64) };
        if unified {
            setup = Setup::unified(2, 1, 500, 64);
        }
        setup.ram_bytes = 1 << 20;
        let mut h = Harness::of(&setup);
        let prompts: Vec<Vec<Token>> = (1..=5).map(|i| [vec![i; 300], vec![47 - i; 20]].concat()).collect();
        for round in 0..3 {
            for prompt in &prompts {
                let before = h.scheduler.backend().decoded_tokens;
                let request = h.submit(prompt.clone(), GenerationParams { ignore_eos: true, ..greedy(3) }).unwrap();
                h.run();
                request.check(setup.limits.positions);
                let read = h.scheduler.backend().decoded_tokens - before;
                // All blocks of 16 tokens of the 320 but the last, which is needed for the logits after its last token.
                assert_eq!(read, if round == 0 { 320 } else { 16 } + 2, "unified: {unified}, round {round}");
            }
        }
        assert_eq!(h.stats.snapshot().cached_ram_tokens_total, 10 * 304);
        h.assert_empty();
    }
}

#[test]
fn guesses_save_steps_and_change_nothing() {
    let run = |lookup_tokens, logprobs, group_rows| {
        let mut setup = Setup { lookup_tokens, ..Setup::unified(2, 2, 4_000, 64) };
        setup.limits.group_rows = group_rows;
        let mut h = Harness::of(&setup);
        h.scheduler.backend().repeat_after(1);
        let params = GenerationParams { ignore_eos: true, logprobs, ..greedy(600) };
        let request = h.submit(vec![5; 20], params).unwrap();
        while h.scheduler.has_work() {
            // What this model takes says nothing: rows are cheap beside the weights.
            h.scheduler.cost_is(CPU);
            h.scheduler.step();
            h.scheduler.assert_books();
        }
        let GenerationEvent::Finished { usage, .. } = request.last() else { panic!() };
        assert_eq!(usage.completion_tokens, 600);
        h.assert_empty();
        (h.stats.snapshot(), request.text())
    };
    // Sampled on the engine's thread, and in the pool.
    for (logprobs, group_rows) in [(None, 1), (Some(2), 1), (None, 4)] {
        let (plain, expected) = run(None, logprobs, group_rows);
        let (guessed, text) = run(Some(8), logprobs, group_rows);
        assert_eq!(text, expected);
        assert_eq!((plain.steps, plain.lookup_tokens_total), (600, 0));
        // Each guess that was right saves a step, and once the text runs in a circle of at most 47 tokens all are.
        assert_eq!(guessed.steps + guessed.accepted_lookup_tokens_total, plain.steps);
        assert_eq!(guessed.accepted_lookup_tokens_total, guessed.lookup_tokens_total);
        assert!(guessed.steps < 48 + 2 * (600 - 48) / 9, "{guessed:?}");
        // Of eight guesses beside one row seven are made where rows come in fours.
        let most = if group_rows == 1 { 8 } else { 7 };
        assert!(guessed.accepted_lookup_tokens_total <= most * guessed.steps, "{guessed:?}");
    }
}

/// A small model on that machine.
const SMALL: StepCost =
    StepCost { fixed_ms: 2.0, per_decode_row_ms: 0.5, per_prefill_token_ms: 0.5, per_kilocell_ms: 0.0 };

/// One answer of 400 tokens with guesses of a draft model, on machines that cost so much.
fn with_draft(draft_wrong_every: Option<usize>, draft_cost: StepCost) -> (EngineStats, String) {
    let setup = Setup { draft_wrong_every, ..Setup::unified(2, 2, 4_000, 64) };
    let mut h = Harness::of(&setup);
    let request = h.submit(vec![5; 20], GenerationParams { ignore_eos: true, ..greedy(400) }).unwrap();
    while h.scheduler.has_work() {
        h.scheduler.cost_is(CPU);
        if let Some(draft) = h.scheduler.draft() {
            draft.cost_is(draft_cost);
        }
        h.scheduler.step();
        h.scheduler.assert_books();
    }
    request.check(4_000);
    h.assert_empty();
    (h.stats.snapshot(), request.text())
}

#[test]
fn guesses_of_a_draft_model_save_steps_and_change_nothing() {
    let (plain, expected) = with_draft(None, SMALL);
    assert_eq!((plain.steps, plain.draft_tokens_total), (400, 0));
    let (always_right, text) = with_draft(Some(0), SMALL);
    assert_eq!(text, expected);
    assert_eq!(always_right.steps + always_right.accepted_draft_tokens_total, plain.steps);
    // It may guess the end, which is not allowed here.
    assert!(always_right.accepted_draft_tokens_total * 10 > always_right.draft_tokens_total * 9, "{always_right:?}");
    assert!(always_right.steps < 80, "six guesses a step: {always_right:?}");
    let (often_right, text) = with_draft(Some(5), SMALL);
    assert_eq!(text, expected);
    assert_eq!(often_right.steps + often_right.accepted_draft_tokens_total, plain.steps);
    assert!((80..200).contains(&often_right.steps), "{often_right:?}");
    assert_eq!(often_right.lookup_tokens_total, 0);
}

#[test]
fn a_draft_model_that_is_wrong_or_slow_turns_itself_off() {
    let (plain, expected) = with_draft(None, SMALL);
    let (wrong, text) = with_draft(Some(1), SMALL);
    assert_eq!(text, expected);
    assert!(wrong.draft_tokens_total < 40 && wrong.steps > plain.steps - 10, "{wrong:?}");
    let (slow, text) = with_draft(Some(0), CPU);
    assert_eq!(text, expected);
    assert_eq!((slow.steps, slow.draft_tokens_total), (plain.steps, 0));
}

#[test]
fn repetitions_come_first_and_the_draft_model_where_there_are_none() {
    let setup = Setup { lookup_tokens: Some(8), draft_wrong_every: Some(0), ..Setup::unified(2, 2, 4_000, 64) };
    let mut h = Harness::of(&setup);
    // A text that runs in a circle once an end of three tokens comes again, some hundreds of tokens later.
    h.scheduler.backend().repeat_after(3);
    if let Some(draft) = h.scheduler.draft() {
        draft.backend().repeat_after(3);
    }
    let request = h.submit(vec![5; 20], GenerationParams { ignore_eos: true, ..greedy(3_000) }).unwrap();
    while h.scheduler.has_work() {
        h.scheduler.cost_is(CPU);
        if let Some(draft) = h.scheduler.draft() {
            draft.cost_is(SMALL);
        }
        h.scheduler.step();
        h.scheduler.assert_books();
    }
    let stats = h.stats.snapshot();
    let GenerationEvent::Finished { usage, .. } = request.last() else { panic!() };
    assert_eq!(usage.completion_tokens, 3_000);
    assert!(stats.draft_tokens_total > 0 && stats.lookup_tokens_total > 0, "{stats:?}");
    let right = stats.accepted_draft_tokens_total + stats.accepted_lookup_tokens_total;
    assert_eq!(stats.steps + right, 3_000);
    assert!(stats.steps < 1_000, "{stats:?}");
    h.assert_empty();
}

#[test]
fn a_draft_model_that_fails_is_given_up_and_nobody_notices() {
    let mut h = Harness::of(&Setup { draft_wrong_every: Some(0), ..Setup::unified(2, 2, 4_000, 64) });
    let params = GenerationParams { ignore_eos: true, ..greedy(60) };
    let requests = [3, 4].map(|token| h.submit(vec![token; 20], params.clone()).unwrap());
    for step in 0.. {
        h.scheduler.cost_is(CPU);
        let Some(draft) = h.scheduler.draft() else { break };
        draft.cost_is(SMALL);
        if step == 5 {
            draft.backend().control.faults.lock().unwrap().push_back(Fault::Fail);
        }
        assert!(step < 10, "it was asked and failed");
        h.scheduler.step();
    }
    h.run();
    requests.iter().for_each(|request| request.check(4_000));
    h.assert_empty();
}

#[test]
fn a_request_without_a_token_in_time_is_refused_and_one_that_has_one_is_not() {
    let within = |ms| GenerationParams { queue_timeout_ms: Some(ms), ignore_eos: true, ..greedy(20) };
    let low = GenerationParams { priority: Priority::Low, ..within(60_000) };
    let late = Instant::now() + Duration::from_secs(61);
    // Waiting for a slot, reading in it, and having lost it again.
    let mut h = Harness::of(&Setup::unified(2, 2, 400, 8));
    let running = h.submit(vec![3; 4], within(60_000)).unwrap();
    h.scheduler.step();
    let reading = h.submit(vec![4; 100], within(60_000)).unwrap();
    let waiting = h.submit(vec![5; 4], within(60_000)).unwrap();
    h.scheduler.step();
    assert!(matches!(reading.last(), GenerationEvent::Started { .. }));
    assert!(waiting.events.lock().unwrap().is_empty());
    h.scheduler.step_at(late);
    let lost = h.submit(vec![6; 100], low).unwrap();
    h.scheduler.step();
    let high = h.submit(vec![7; 4], GenerationParams { priority: Priority::High, ..greedy(20) }).unwrap();
    h.scheduler.step();
    assert_eq!(h.stats.snapshot().preemptions_total, 1);
    h.scheduler.step_at(late);
    for request in [&reading, &waiting, &lost] {
        assert!(matches!(request.error(), RequestError::DeadlineExceeded { limit_ms: 60_000, .. }));
    }
    h.run();
    running.check(400);
    high.check(400);
    h.assert_empty();
}

#[test]
fn failures_in_a_row_break_the_engine() {
    let mut h = Harness::new(1, 64, 8, 8);
    let requests: Vec<_> = (0..5).map(|i| h.submit(vec![3 + i; 4], greedy(20)).unwrap()).collect();
    h.scheduler.backend().control.faults.lock().unwrap().extend([Fault::Fail; 3]);
    h.run();
    for request in &requests {
        assert!(matches!(request.error(), RequestError::Internal(_)));
    }
    assert!(h.scheduler.probe().is_err());
    let late = h.submit(vec![3; 4], greedy(5)).unwrap();
    assert!(matches!(late.error(), RequestError::Internal(_)));
    h.assert_empty();
}

#[test]
fn a_sink_that_panics_ends_its_own_request() {
    let mut h = Harness::new(2, 64, 8, 0);
    let permit = Permit::take(&h.stats, h.limit).unwrap();
    let sink = Box::new(|_| panic!("scripted"));
    let signals = Arc::new(Signals::default());
    let emitter = Emitter::new(sink, h.stats.clone(), permit, signals.clone());
    h.enqueue(0, vec![1; 4], greedy(50), emitter, signals);
    let other = h.submit(vec![4; 4], greedy(20)).unwrap();
    h.run();
    other.check(64);
    h.assert_empty();
}

/// What happens between steps.
#[derive(Clone, Debug)]
enum Action {
    Submit { prompt: Vec<Token>, params: Box<GenerationParams> },
    Cancel(prop::sample::Index),
    Steps(u8),
}

fn params() -> impl Strategy<Value = GenerationParams> {
    let stop = prop::collection::vec("[a-h]{1,3}|é", 0..3);
    let temperature = prop_oneof![Just(0.0_f32), 0.2_f32..2.0];
    (1_u32..60, temperature, any::<u64>(), stop, prop::bool::weighted(0.1), 0_i32..10).prop_map(
        |(max, temperature, seed, stop, ignore_eos, top_k)| GenerationParams {
            max_tokens: (max < 55).then_some(max),
            temperature,
            top_k,
            seed: Some(seed),
            stop,
            ignore_eos,
            ..GenerationParams::default()
        },
    )
}

fn action() -> impl Strategy<Value = Action> {
    let token = 1..Token::try_from(VOCAB).unwrap();
    prop_oneof![
        3 => (prop::collection::vec(token, 1..90), params()).prop_map(|(prompt, params)| Action::Submit { prompt, params: Box::new(params) }),
        1 => any::<prop::sample::Index>().prop_map(Action::Cancel),
        3 => (1_u8..20).prop_map(Action::Steps),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn every_request_ends_once_with_its_own_answer(
        actions in prop::collection::vec(action(), 1..80),
        sequences in 1_u32..10, prefill in 1_u32..40, max_queue in 0_u32..6,
        (unified, reuse, saved, ram, guess) in any::<(bool, bool, bool, bool, bool)>(),
        draft_wrong_every in prop::option::of(0_usize..6),
    ) {
        const POSITIONS: u32 = 100;
        let mut setup = Setup { reuse, ..Setup::split(sequences, POSITIONS, prefill, max_queue) };
        if unified {
            // Cells for a third of what could be asked for.
            let cells = POSITIONS.max(sequences * POSITIONS / 3);
            setup = Setup { reuse, max_queue, ..Setup::unified(sequences, 3, cells, prefill) };
            setup.limits.positions = POSITIONS;
        }
        setup.max_saved_bytes = if saved { 600 } else { 0 };
        setup.ram_bytes = if ram { 4_000 } else { 0 };
        setup.lookup_tokens = guess.then_some(4);
        setup.draft_wrong_every = draft_wrong_every;
        let mut h = Harness::of(&setup);
        let mut requests: Vec<Submitted> = Vec::new();
        for action in actions {
            match action {
                Action::Submit { prompt, params } => {
                    let full = h.stats.in_flight.load(Relaxed) == sequences + max_queue;
                    let request = h.submit(prompt, *params);
                    prop_assert_eq!(request.is_none(), full);
                    requests.extend(request);
                }
                Action::Cancel(index) if !requests.is_empty() => {
                    let request = index.get(&requests);
                    request.signals.cancelled.store(true, Relaxed);
                    let i = index.index(requests.len());
                    requests[i].was_cancelled = true;
                }
                Action::Cancel(_) => {}
                Action::Steps(n) => for _ in 0..n {
                    // Costs at which guesses pay, whatever this machine makes of a model without weights.
                    h.scheduler.cost_is(CPU);
                    if let Some(draft) = h.scheduler.draft() {
                        draft.cost_is(SMALL);
                    }
                    h.scheduler.step();
                    h.scheduler.assert_books();
                    let stats = h.stats.snapshot();
                    prop_assert!(stats.slots_active <= sequences);
                    prop_assert!(stats.slots_active + stats.queued <= sequences + max_queue);
                },
            }
        }
        h.run();
        for request in &requests {
            request.check(POSITIONS);
        }
        h.assert_empty();
        let generated: u64 = requests.iter().map(|r| match r.last() {
            GenerationEvent::Finished { usage, .. } => u64::from(usage.completion_tokens),
            _ => 0,
        }).sum();
        // Of guesses that were right, those after a stop string were generated for nobody.
        let total = h.stats.snapshot().generated_tokens_total;
        let may_waste = guess || draft_wrong_every.is_some();
        prop_assert!(total == generated || may_waste && total > generated);
        prop_assert_eq!(h.stats.snapshot().requests_finished_total, requests.len() as u64);
    }
}

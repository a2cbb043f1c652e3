//! The scheduler, step by step on the scripted backend.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use crate::backend::scripted::{
    Fault, ScriptedBackend, ScriptedVocabulary, TOKEN_BYTES, VOCAB, logits_after, reference,
};
use crate::backend::{Backend, BackendLimits, Token, Vocabulary};
use crate::binding::Binding;
use crate::budget::{MIN_PREFILL_TOKENS, StepBudget, StepCost};
use crate::cache::{Fingerprint, FingerprintParts, PrefixCache, chain};
use crate::draft::Draft;
use crate::error::{ProbeError, RequestError};
use crate::event::{EngineStats, FinishReason, GenerationEvent, PromptToken};
use crate::grammars::Grammars;
use crate::lookup::Indexer;
use crate::output::{Output, Reading, Signals, TextStage};
use crate::params::{GenerationParams, MAX_DRAFT_CATCH_UP_TOKENS, PrefixCacheConfig, Priority};
use crate::queue::AGEING_BOUND;
use crate::request::{Emitter, Permit, Request, reusable};
use crate::sample_pool::SamplePool;
use crate::sampler::{self, Sampler, SamplerSetup, Scorer};
use crate::scheduler::{Scheduler, SchedulerParts, StepOutcome};
use crate::stats::Stats;

mod bursts;
mod clients;
mod copies;
mod failures;
mod fill;
mod gaps;
mod guesses;
mod ladder;
mod leftovers;
mod measure;
mod pauses;
mod preemption;
mod properties;
mod reuse;
mod scores;
mod shares;
mod stage;

const DRAFT_TOKENS: u32 = 6;
/// More than any load here takes.
const MOST_STEPS: u32 = 100_000;

type Events = Arc<Mutex<Vec<GenerationEvent>>>;

/// A machine on which a row more costs a tenth of a step.
const CPU: StepCost =
    StepCost { fixed_ms: 40.0, per_decode_row_ms: 4.0, per_prefill_token_ms: 6.0, per_kilocell_ms: 0.0 };

/// A small model on that machine.
const SMALL: StepCost =
    StepCost { fixed_ms: 2.0, per_decode_row_ms: 0.5, per_prefill_token_ms: 0.5, per_kilocell_ms: 0.0 };

struct Harness<B = ScriptedBackend> {
    scheduler: Scheduler<B>,
    vocabulary: Arc<dyn Vocabulary>,
    stats: Arc<Stats>,
    tickets: u64,
    limit: u32,
    ram_bytes: u64,
    /// How long ago what is submitted was.
    waited: Duration,
    /// When it is submitted, where that is not now.
    now: Option<Instant>,
    /// What binds what is submitted, instead of what its parameters say.
    binding: Option<Binding>,
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
            scored_rows: 3,
            total_cells: u64::from(sequences) * u64::from(positions),
            unified: false,
            stage: None,
            flash_attention: true,
            group_rows: 4,
            reusable: true,
            token_bytes: TOKEN_BYTES,
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
        let mut harness = Self::with(backend, Arc::new(ScriptedVocabulary), setup);
        harness.scheduler.draft_is(setup.draft());
        harness.scheduler.fills();
        // By the clock: which step somebody is let in depends on nothing else in these tests.
        harness.scheduler.admits_for(Duration::MAX);
        harness
    }

    /// Nothing is held by anyone: no slot, no KV cell, and no byte of main memory. What that keeps for later is within
    /// its limit, and may go.
    fn assert_empty(&mut self) {
        assert!(!self.scheduler.has_work());
        self.scheduler.assert_books();
        assert_eq!(self.scheduler.bytes_in_use(), (0, 0));
        self.scheduler.drop_leftovers();
        assert_eq!(self.scheduler.backend().cells(), 0);
        let stats = self.stats.snapshot();
        assert_eq!((stats.slots_active, stats.queued, stats.kv_used_cells), (0, 0, 0));
        assert_eq!(self.stats.in_flight.load(Relaxed), 0);
        assert!(stats.prefix_cache_bytes <= self.ram_bytes, "{} of {}", stats.prefix_cache_bytes, self.ram_bytes);
    }
}

impl<B: Backend> Harness<B> {
    fn with(backend: B, vocabulary: Arc<dyn Vocabulary>, setup: &Setup) -> Self {
        let stats = Arc::new(Stats::new(setup.parallel, backend.limits().total_cells, Arc::default()));
        let scheduler = Scheduler::new(SchedulerParts {
            backend,
            vocabulary: vocabulary.clone(),
            stats: stats.clone(),
            output: Output::Inline(TextStage::default()),
            pool: SamplePool::new(1).unwrap(),
            parallel: setup.parallel,
            budget: StepBudget::new(None, setup.prefill),
            reuse_prefixes: setup.reuse,
            cache: (setup.ram_bytes > 0).then(|| {
                let config = PrefixCacheConfig { ram_bytes: setup.ram_bytes, ..PrefixCacheConfig::default() };
                (PrefixCache::new(&config, fingerprint()).unwrap(), fingerprint())
            }),
            ttl: None,
            lookup_tokens: setup.lookup_tokens,
            draft: None,
            max_saved_bytes: setup.max_saved_bytes,
        });
        let limit = setup.parallel + setup.max_queue;
        let ram_bytes = setup.ram_bytes;
        let (waited, now, binding) = (Duration::ZERO, None, None);
        Self { scheduler, vocabulary, stats, tickets: 0, limit, ram_bytes, waited, now, binding }
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
        let now = self.now.unwrap_or_else(Instant::now).checked_sub(self.waited).unwrap();
        let deadline = params.queue_timeout_ms.map(|ms| now + Duration::from_millis(ms));
        let (submitted_at, tokenized_at, fetched) = (now, now, None);
        let blocks = chain(fingerprint(), reusable(&prompt, &params));
        let mut setup = sampler::compile(self.vocabulary.as_ref(), &Grammars::default(), &params).unwrap();
        setup.binding = self.binding.clone().or(setup.binding);
        let sampler = Box::new(Sampler::new(&params, &prompt, setup));
        let repeats = Indexer::default().index(&prompt);
        let request = Request {
            ticket,
            prompt,
            reading: Reading::of(&params),
            params,
            emitter,
            signals,
            sampler,
            blocks,
            fetched,
            repeats,
            submitted_at,
            tokenized_at,
            deadline,
        };
        self.scheduler.enqueue(Box::new(request));
    }

    fn run(&mut self) {
        for _ in 0..MOST_STEPS {
            if !self.scheduler.has_work() {
                return;
            }
            self.scheduler.step();
        }
        panic!("there is work after {MOST_STEPS} steps");
    }
}

impl Submitted {
    fn text(&self) -> String {
        let events = self.events.lock().unwrap();
        let texts = events.iter().map(|e| if let GenerationEvent::Text { text, .. } = e { text.as_str() } else { "" });
        texts.collect()
    }

    /// Whether it is paused, and not over.
    fn is_paused(&self) -> bool {
        let is_over = self.events.lock().unwrap().last().is_some_and(GenerationEvent::is_terminal);
        self.signals.paused.load(Relaxed) && !is_over
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
            assert_eq!(events[0], GenerationEvent::Started { prompt_tokens, files_left_out: 0 });
        }
        let sent: u32 =
            events.iter().map(|e| if let GenerationEvent::Text { tokens, .. } = e { *tokens } else { 0 }).sum();
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
        self.check_scores(&events, *reason == FinishReason::Cancelled);
    }
}

impl Submitted {
    /// Each token of the prompt was told once, in its place, if that is asked for, and as likely as the rows say.
    fn check_scores(&self, events: &[GenerationEvent], is_part: bool) {
        let echoes = events
            .iter()
            .filter_map(|e| if let GenerationEvent::Echo { tokens, .. } = e { Some(tokens) } else { None });
        let told: Vec<&PromptToken> = echoes.flatten().collect();
        let wanted = if self.params.prompt_logprobs.is_some() { self.prompt.len() } else { 0 };
        assert!(told.len() == wanted || (is_part && told.len() < wanted), "{} of {wanted}", told.len());
        let mut scorer = Scorer::default();
        for (at, told) in told.into_iter().enumerate() {
            assert_eq!(told.token.id, self.prompt[at]);
            let score = |top| scorer.score(&logits_after(&self.prompt[..at]), self.prompt[at], top);
            let wanted = self.params.prompt_logprobs.filter(|_| at > 0).map(score);
            assert_eq!(
                told.chance.as_ref().map(|c| (c.logprob, c.rank)),
                wanted.as_ref().map(|s| (s.logprobs.chosen, s.rank))
            );
            let top = told.chance.iter().flat_map(|chance| &chance.top).map(|t| (t.id, t.logprob)).collect::<Vec<_>>();
            assert_eq!(top, wanted.map(|score| score.logprobs.top).unwrap_or_default());
        }
        let first = events.iter().position(|e| matches!(e, GenerationEvent::Text { .. }));
        let last = events.iter().rposition(|e| matches!(e, GenerationEvent::Echo { .. }));
        assert!(first.is_none() || last < first, "the prompt comes before the answer");
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
fn who_hears_of_an_end_finds_its_step_counted_and_its_slot_free() {
    let setup = Setup::split(1, 100, 64, 64);
    let mut h = Harness::of(&setup);
    let heard: Arc<Mutex<Option<EngineStats>>> = Arc::default();
    let sink = {
        let (stats, heard) = (h.stats.clone(), heard.clone());
        Box::new(move |event: GenerationEvent| {
            if event.is_terminal() {
                *heard.lock().unwrap() = Some(stats.snapshot());
            }
        })
    };
    let (signals, permit) = (Arc::new(Signals::default()), Permit::take(&h.stats, 1).unwrap());
    let emitter = Emitter::new(sink, h.stats.clone(), permit, signals.clone());
    h.enqueue(1, vec![5; 20], GenerationParams { ignore_eos: true, ..greedy(4) }, emitter, signals);
    h.run();
    let heard = heard.lock().unwrap().take().unwrap();
    assert_eq!((heard.steps, heard.generated_tokens_total, heard.prompt_tokens_total), (4, 4, 20));
    assert_eq!((heard.batch_rows_total, heard.slots_active, heard.requests_finished_total), (4, 0, 1));
}

#[test]
fn what_padding_would_add_is_counted() {
    let mut h = Harness::new(3, 100, 64, 8);
    let prompts = [10, 4, 7].map(|tokens| h.submit(vec![5; tokens], greedy(1)).unwrap());
    h.scheduler.step();
    assert_eq!(h.stats.snapshot().padding_tokens_total, 6 + 3);
    h.run();
    prompts.iter().for_each(|request| request.check(100));
    h.assert_empty();
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
fn an_answer_ends_with_a_stop_token_and_not_before_its_least_length() {
    let run = |params: GenerationParams| {
        let mut h = Harness::new(1, 100, 8, 0);
        let request = h.submit(vec![7; 5], params).unwrap();
        h.run();
        request.check(100);
        let GenerationEvent::Finished { reason, usage, .. } = request.last() else { panic!() };
        (request.text(), reason, usage.completion_tokens)
    };
    let whole = run(greedy(60));
    assert_eq!(whole.1, FinishReason::Stop);
    let tokens = |params: &GenerationParams| {
        let mut sampler = Sampler::new(params, &[7; 5], SamplerSetup::default());
        let mut history = vec![7; 5];
        for _ in 0..whole.2 {
            let token = sampler.sample(&logits_after(&history)).unwrap().token;
            sampler.accept(token).unwrap();
            history.push(token);
        }
        history.split_off(5)
    };
    let third = tokens(&greedy(60))[2];
    let stopped = GenerationParams { stop_tokens: vec![third], ..greedy(60) };
    let (text, reason, generated) = run(stopped.clone());
    assert!(whole.0.starts_with(&text) && generated <= 3, "{text:?} of {whole:?}");
    assert_eq!(reason, FinishReason::Stop);
    // Neither that token nor the model's own end comes before.
    for params in [stopped, greedy(60), GenerationParams { stop: vec![whole.0[..1].to_owned()], ..greedy(60) }] {
        let least = whole.2 + 4;
        let (_, _, generated) = run(GenerationParams { min_tokens: least, ..params });
        assert!(generated > least, "{generated} of {least}");
    }
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

/// What happens between steps.
#[derive(Clone, Debug)]
enum Action {
    Submit { prompt: Vec<Token>, params: Box<GenerationParams> },
    Cancel(prop::sample::Index),
    Pause(prop::sample::Index),
    Resume(prop::sample::Index),
    Steps(u8),
}

fn params() -> impl Strategy<Value = GenerationParams> {
    let stop = prop::collection::vec("[a-h]{1,3}|é", 0..3);
    let stop_tokens = prop::collection::vec(1..Token::try_from(VOCAB).unwrap(), 0..3);
    let early = (stop, stop_tokens, prop_oneof![Just(0_u32), 1_u32..40]);
    let temperature = prop_oneof![Just(0.0_f32), 0.2_f32..2.0];
    let told = (prop::bool::weighted(0.1), prop::option::weighted(0.2, 0_u32..4));
    (0_u32..60, temperature, any::<u64>(), early, told, 0_i32..10).prop_map(
        |(max, temperature, seed, (stop, stop_tokens, least), (ignore_eos, prompt_logprobs), top_k)| GenerationParams {
            prompt_logprobs,
            max_tokens: (max < 55).then_some(max),
            temperature,
            top_k,
            seed: Some(seed),
            stop,
            stop_tokens,
            min_tokens: least.min(max),
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
        1 => any::<prop::sample::Index>().prop_map(Action::Pause),
        1 => any::<prop::sample::Index>().prop_map(Action::Resume),
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
                Action::Pause(index) if !requests.is_empty() => {
                    index.get(&requests).signals.paused.store(true, Relaxed);
                }
                Action::Resume(index) if !requests.is_empty() => {
                    index.get(&requests).signals.paused.store(false, Relaxed);
                }
                Action::Cancel(_) | Action::Pause(_) | Action::Resume(_) => {}
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
                    prop_assert!(stats.slots_active + stats.queued + stats.paused <= sequences + max_queue);
                    // By their tickets.
                    let paused: Vec<u64> = (1..).zip(&requests).filter(|(_, r)| r.is_paused()).map(|(t, _)| t).collect();
                    prop_assert_eq!(stats.paused as usize, paused.len());
                    prop_assert!(h.scheduler.tickets().iter().all(|ticket| !paused.contains(ticket)));
                },
            }
        }
        h.run();
        requests.iter().for_each(|request| request.signals.paused.store(false, Relaxed));
        h.scheduler.step();
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

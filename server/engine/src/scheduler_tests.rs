//! The scheduler, step by step on the scripted backend.
#![allow(clippy::unwrap_used)]

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use proptest::prelude::*;

use crate::backend::scripted::{Fault, ScriptedBackend, ScriptedVocabulary, VOCAB, reference};
use crate::backend::{Backend, Token};
use crate::error::RequestError;
use crate::event::{FinishReason, GenerationEvent};
use crate::params::GenerationParams;
use crate::request::{Emitter, Permit, Request};
use crate::scheduler::{Scheduler, StepOutcome};
use crate::stats::Stats;

type Events = Arc<Mutex<Vec<GenerationEvent>>>;

struct Harness {
    scheduler: Scheduler<ScriptedBackend>,
    stats: Arc<Stats>,
    tickets: u64,
    limit: u32,
}

struct Submitted {
    prompt: Vec<Token>,
    params: GenerationParams,
    events: Events,
    cancelled: Arc<AtomicBool>,
    was_cancelled: bool,
}

impl Harness {
    fn new(sequences: u32, positions: u32, prefill: u32, max_queue: u32) -> Self {
        let backend = ScriptedBackend::new(sequences, positions, sequences + prefill);
        let stats = Arc::new(Stats::new(sequences, backend.limits().total_cells));
        let scheduler = Scheduler::new(backend, Arc::new(ScriptedVocabulary), stats.clone(), prefill);
        Self { scheduler, stats, tickets: 0, limit: sequences + max_queue }
    }

    fn submit(&mut self, prompt: Vec<Token>, params: GenerationParams) -> Option<Submitted> {
        let permit = Permit::take(&self.stats, self.limit)?;
        let events = Events::default();
        let cancelled = Arc::new(AtomicBool::new(false));
        let sink = {
            let events = events.clone();
            Box::new(move |event| events.lock().unwrap().push(event))
        };
        let emitter = Emitter::new(sink, self.stats.clone(), permit, cancelled.clone());
        self.tickets += 1;
        self.scheduler.enqueue(Request {
            ticket: self.tickets,
            prompt: prompt.clone(),
            params: params.clone(),
            emitter,
            submitted_at: Instant::now(),
        });
        Some(Submitted { prompt, params, events, cancelled, was_cancelled: false })
    }

    fn run(&mut self) {
        while self.scheduler.has_work() {
            self.scheduler.step();
        }
    }

    /// Nothing is held by anyone.
    fn assert_empty(&mut self) {
        assert!(!self.scheduler.has_work());
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
        request.cancelled.store(true, Relaxed);
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
        request.cancelled.store(true, Relaxed);
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
fn a_full_cache_ends_the_youngest() {
    let mut h = Harness::new(2, 64, 8, 0);
    let old = h.submit(vec![3; 4], greedy(20)).unwrap();
    let young = h.submit(vec![4; 4], greedy(20)).unwrap();
    h.scheduler.backend().control.faults.lock().unwrap().push_back(Fault::NoKvCells);
    h.scheduler.step();
    assert!(matches!(young.error(), RequestError::Internal(_)));
    h.run();
    old.check(64);
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
    let emitter = Emitter::new(sink, h.stats.clone(), permit, Arc::default());
    let (prompt, params) = (vec![1; 4], greedy(50));
    h.scheduler.enqueue(Request { ticket: 0, prompt, params, emitter, submitted_at: Instant::now() });
    let other = h.submit(vec![4; 4], greedy(20)).unwrap();
    h.run();
    other.check(64);
    h.assert_empty();
}

/// What happens between steps.
#[derive(Clone, Debug)]
enum Action {
    Submit { prompt: Vec<Token>, params: GenerationParams },
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
        3 => (prop::collection::vec(token, 1..90), params()).prop_map(|(prompt, params)| Action::Submit { prompt, params }),
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
    ) {
        const POSITIONS: u32 = 100;
        let mut h = Harness::new(sequences, POSITIONS, prefill, max_queue);
        let mut requests: Vec<Submitted> = Vec::new();
        for action in actions {
            match action {
                Action::Submit { prompt, params } => {
                    let full = h.stats.in_flight.load(Relaxed) == sequences + max_queue;
                    let request = h.submit(prompt, params);
                    prop_assert_eq!(request.is_none(), full);
                    requests.extend(request);
                }
                Action::Cancel(index) if !requests.is_empty() => {
                    let request = index.get(&requests);
                    request.cancelled.store(true, Relaxed);
                    let i = index.index(requests.len());
                    requests[i].was_cancelled = true;
                }
                Action::Cancel(_) => {}
                Action::Steps(n) => for _ in 0..n {
                    h.scheduler.step();
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
        prop_assert_eq!(h.stats.snapshot().generated_tokens_total, generated);
        prop_assert_eq!(h.stats.snapshot().requests_finished_total, requests.len() as u64);
    }
}

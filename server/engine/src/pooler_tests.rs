//! The pooler with a backend that is a function of each text, and that fails on a word.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use crate::backend::{PooledBackend, PooledLimits, Token};
use crate::error::RequestError;
use crate::event::PooledEvent;
use crate::finite::{NOT_FINITE, NoNumbers};
use crate::ladder::DegradationLevel;
use crate::params::{MAX_POOLED_BATCH_MS, Priority};
use crate::pooler::{Next, PooledCounters, PooledPermit, PooledRequest, Pooler, Reply};
use crate::queue::{AGEING_BOUND, AGEING_STEP};

const WAIT: Duration = Duration::from_millis(10);
/// No batch with this token can be computed.
const POISON: Token = 666;
/// A batch with this token gives a vector too few.
const SHORT: Token = 777;
/// What is computed of a text with this token is NaN, and so is all that is computed after it until the backend is scrubbed.
const SPOILS: Token = 888;
const BATCH_TOKENS: usize = 24;

#[derive(Clone)]
struct Script {
    limits: PooledLimits,
    /// Lengths of the texts of each batch.
    batches: Arc<Mutex<Vec<Vec<usize>>>>,
    /// How long each batch takes, in milliseconds.
    takes_ms: Arc<AtomicU64>,
    /// All that is computed is NaN.
    computes_nothing: Arc<AtomicBool>,
    spoilt: bool,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            limits: PooledLimits { texts: 4, batch_tokens: BATCH_TOKENS, text_tokens: 8 },
            batches: Arc::default(),
            takes_ms: Arc::default(),
            computes_nothing: Arc::default(),
            spoilt: false,
        }
    }
}

impl Script {
    fn takes(&self, time: Duration) {
        self.takes_ms.store(u64::try_from(time.as_millis()).unwrap(), Relaxed);
    }
}

fn vector_of(text: &[Token]) -> Vec<f32> {
    let sum: Token = text.iter().sum();
    vec![text.len() as f32, sum as f32, 1.0]
}

impl PooledBackend for Script {
    fn limits(&self) -> PooledLimits {
        self.limits
    }

    fn untouched_bytes(&self) -> u64 {
        0
    }

    fn embed(&mut self, texts: &[&[Token]]) -> Result<Vec<Vec<f32>>, String> {
        assert!(!texts.is_empty() && texts.len() <= self.limits().texts);
        assert!(texts.iter().map(|text| text.len()).sum::<usize>() <= self.limits.batch_tokens);
        self.batches.lock().unwrap().push(texts.iter().map(|text| text.len()).collect());
        std::thread::sleep(Duration::from_millis(self.takes_ms.load(Relaxed)));
        if texts.iter().any(|text| text.contains(&POISON)) {
            return Err("poison".to_owned());
        }
        let short = usize::from(texts.iter().any(|text| text.contains(&SHORT)));
        self.spoilt |= texts.iter().any(|text| text.contains(&SPOILS)) || self.computes_nothing.load(Relaxed);
        let vector = |text: &&[Token]| if self.spoilt { vec![f32::NAN] } else { vector_of(text) };
        Ok(texts.iter().skip(short).map(vector).collect())
    }

    fn scrub(&mut self) {
        self.spoilt = false;
    }
}

/// What one request was sent, and its flag.
#[derive(Clone, Default)]
struct Client {
    events: Arc<Mutex<Vec<PooledEvent>>>,
    cancelled: Arc<AtomicBool>,
}

impl Client {
    fn seen(&self) -> Vec<PooledEvent> {
        self.events.lock().unwrap().clone()
    }

    fn end(&self) -> Option<PooledEvent> {
        let seen = self.seen();
        assert!(seen.iter().filter(|event| event.is_terminal()).count() <= 1, "{seen:?}");
        seen.last().filter(|event| event.is_terminal()).cloned()
    }

    fn vectors(&self) -> BTreeMap<u32, Vec<f32>> {
        let mut vectors = BTreeMap::new();
        for event in self.seen() {
            if let PooledEvent::Vector { index, vector } = event {
                assert!(vectors.insert(index, vector).is_none(), "text {index} twice");
            }
        }
        vectors
    }
}

struct Stage {
    pooler: Pooler<Script>,
    script: Script,
    counters: Arc<PooledCounters>,
}

fn stage(max_batch: usize) -> Stage {
    stage_of(max_batch, Script::default())
}

fn stage_of(max_batch: usize, script: Script) -> Stage {
    let counters = Arc::new(PooledCounters::default());
    let pooler = Pooler::new(script.clone(), counters.clone(), max_batch, WAIT, false);
    Stage { pooler, script, counters }
}

impl Stage {
    fn submit(&mut self, texts: Vec<Vec<Token>>, now: Instant, limit: Option<Duration>) -> Client {
        self.submit_as(Priority::default(), texts, now, limit)
    }

    fn submit_as(
        &mut self,
        priority: Priority,
        texts: Vec<Vec<Token>>,
        now: Instant,
        limit: Option<Duration>,
    ) -> Client {
        self.submit_of(0, priority, texts, now, limit)
    }

    fn submit_of(
        &mut self,
        whose: u64,
        priority: Priority,
        texts: Vec<Vec<Token>>,
        now: Instant,
        limit: Option<Duration>,
    ) -> Client {
        let client = Client::default();
        let events = client.events.clone();
        let sink = Box::new(move |event| events.lock().unwrap().push(event));
        let place = PooledPermit::take(&self.counters, u32::MAX).unwrap();
        let reply = Reply::new(sink, place, client.cancelled.clone());
        let texts = VecDeque::from(texts);
        self.pooler.add(PooledRequest { reply, texts, client: whose, priority, submitted_at: now, limit }, now);
        client
    }

    /// Turns until the pooler waits for something.
    fn settle(&mut self, now: Instant) -> Next {
        loop {
            let next = self.pooler.turn(now);
            if next != Next::Now {
                return next;
            }
        }
    }

    fn batches(&self) -> Vec<Vec<usize>> {
        self.script.batches.lock().unwrap().clone()
    }
}

fn text(length: usize) -> Vec<Token> {
    vec![1; length]
}

#[test]
fn batches_are_half_as_large_while_memory_is_short() {
    let mut stage = stage(4);
    let now = Instant::now();
    let texts = |n| (0..n).map(|i| vec![i]).collect::<Vec<Vec<Token>>>();
    let first = stage.submit(texts(4), now, None);
    stage.settle(now);
    stage.counters.pressure.set_level(DegradationLevel::ReducedBatch);
    let second = stage.submit(texts(4), now, None);
    stage.settle(now);
    stage.counters.pressure.set_level(DegradationLevel::Normal);
    let third = stage.submit(texts(4), now, None);
    stage.settle(now);
    assert_eq!(stage.batches().iter().map(Vec::len).collect::<Vec<_>>(), [4, 2, 2, 4]);
    for client in [first, second, third] {
        assert_eq!(client.vectors().len(), 4);
    }
}

#[test]
fn a_text_whose_vector_is_no_number_fails_alone_and_leaves_nothing_behind() {
    let (mut stage, now) = (stage(4), Instant::now());
    // Often enough that the backend would be taken for broken were it to blame.
    for _ in 0..20 {
        let spoils = stage.submit(vec![vec![SPOILS, 1]], now, None);
        let others: Vec<Client> = (0..3).map(|i| stage.submit(vec![vec![i, 2]], now, None)).collect();
        stage.settle(now);
        let Some(PooledEvent::Failed(RequestError::Internal(reason))) = spoils.end() else { panic!() };
        assert!(reason.contains("text 0") && reason.contains("not finite"), "{reason}");
        for (i, other) in (0..).zip(&others) {
            // The first of its scores.
            assert_eq!(other.vectors()[&0], vector_of(&[i, 2])[..1]);
        }
    }
    assert_eq!((stage.counters.broken.get(), stage.pooler.probe()), (None, Ok(())));
    stage.script.computes_nothing.store(true, Relaxed);
    assert_eq!(stage.pooler.probe(), Err(NoNumbers::NotFinite));
    assert_eq!(stage.pooler.warm_up(), Err(NoNumbers::NotFinite));
    for _ in 0..20 {
        stage.submit(vec![vec![1]], now, None);
        stage.settle(now + WAIT);
    }
    assert_eq!(stage.counters.broken.get().map(String::as_str), Some(NOT_FINITE));
}

#[test]
fn a_long_request_does_not_hold_up_a_short_one() {
    let (mut stage, now) = (stage(4), Instant::now());
    let long = stage.submit(vec![text(2); 100], now, None);
    let short = stage.submit(vec![text(3)], now, None);
    assert_eq!(stage.pooler.turn(now), Next::Now);
    assert_eq!(short.end(), Some(PooledEvent::Finished { prompt_tokens: 3 }), "it is in the first batch");
    assert_eq!(long.end(), None);
    stage.settle(now);
    stage.settle(now + WAIT);
    assert_eq!(long.end(), Some(PooledEvent::Finished { prompt_tokens: 200 }));
    assert_eq!(long.vectors().len(), 100);
    assert_eq!(stage.counters.snapshot().in_flight, 0);
}

#[test]
fn what_is_too_long_for_one_batch_is_computed_in_several() {
    let (mut stage, now) = (stage(4), Instant::now());
    let client = stage.submit(vec![text(8), text(8), text(7), text(2)], now, None);
    stage.settle(now);
    assert_eq!(stage.batches(), [vec![8, 8, 7]]);
    stage.settle(now + WAIT);
    assert_eq!(stage.batches(), [vec![8, 8, 7], vec![2]]);
    assert_eq!(client.end(), Some(PooledEvent::Finished { prompt_tokens: 25 }));
}

#[test]
fn nobody_waits_longer_than_it_said() {
    let (mut stage, now) = (stage(8), Instant::now());
    let late = stage.submit(vec![text(1)], now, Some(Duration::from_millis(5)));
    let patient = stage.submit(vec![text(2)], now, Some(Duration::from_millis(50)));
    assert_eq!(stage.settle(now), Next::At(now + WAIT));
    stage.settle(now + WAIT);
    assert_eq!(late.end(), Some(PooledEvent::Failed(RequestError::DeadlineExceeded { waited_ms: 10, limit_ms: 5 })));
    assert_eq!(patient.end(), Some(PooledEvent::Finished { prompt_tokens: 2 }));
    assert_eq!(stage.batches(), [vec![2]], "the late one was not computed");
}

#[test]
fn a_higher_priority_goes_first_but_for_those_that_waited_long() {
    let (mut stage, now) = (stage(2), Instant::now());
    let low = stage.submit_as(Priority::Low, vec![text(1); 8], now, None);
    let normal = stage.submit(vec![text(2); 2], now, None);
    let high = stage.submit_as(Priority::High, vec![text(3); 2], now, None);
    let turns = |stage: &mut Stage, count, now| (0..count).for_each(|_| assert_eq!(stage.pooler.turn(now), Next::Now));
    turns(&mut stage, 2, now);
    assert_eq!(stage.batches(), [vec![3, 3], vec![2, 2]]);
    assert!(high.end().is_some() && normal.end().is_some() && low.seen().is_empty());
    // Another one of high priority comes when the one of low priority has waited for as long as it has to.
    let later = now + AGEING_BOUND;
    let other = stage.submit_as(Priority::High, vec![text(4); 4], later, None);
    turns(&mut stage, 3, later);
    assert_eq!(stage.batches()[2..], [[4, 1], [4, 4], [4, 1]], "the raised one has a turn, and waits for the next");
    assert!(other.end().is_some() && low.end().is_none());
    stage.settle(later);
    assert!(low.end().is_some());
}

#[test]
fn clients_take_turns_whatever_each_asks_for() {
    let (mut stage, now) = (stage(2), Instant::now());
    let crowd: Vec<Client> =
        (0..20).map(|_| stage.submit_of(1, Priority::Normal, vec![text(1); 8], now, None)).collect();
    let other = stage.submit_of(2, Priority::Normal, vec![text(2); 3], now, None);
    for _ in 0..3 {
        assert_eq!(stage.pooler.turn(now), Next::Now);
    }
    assert_eq!(stage.batches(), [[1, 2], [1, 2], [1, 2]], "every second text is the other client's");
    assert!(other.end().is_some() && crowd.iter().all(|client| client.end().is_none()));
    stage.settle(now);
    stage.settle(now + WAIT);
    assert!(crowd.iter().all(|client| client.end().is_some()));
}

#[test]
fn a_higher_priority_waits_for_no_more_than_what_is_computed_at_once() {
    // A window of many more texts than the backend computes at once.
    let (mut stage, now) = (stage(32), Instant::now());
    let bulks: Vec<Client> = (0..2).map(|_| stage.submit(vec![text(8); 40], now, None)).collect();
    while stage.batches().is_empty() {
        stage.pooler.turn(now + WAIT);
    }
    assert_eq!(stage.batches(), [[8, 8, 8]]);
    let high = stage.submit_as(Priority::High, vec![text(3)], now + WAIT, None);
    let normal = stage.submit(vec![text(6)], now + WAIT, None);
    assert_eq!(stage.pooler.turn(now + WAIT), Next::Now);
    assert_eq!(stage.batches()[1..], [[3, 8, 8]], "it goes before the texts that came earlier");
    assert!(high.end().is_some() && normal.end().is_none());
    stage.settle(now + WAIT);
    stage.settle(now + WAIT + WAIT);
    assert!(bulks.iter().chain([&normal]).all(|client| client.end().is_some()));
}

#[test]
fn one_whose_texts_are_computed_all_the_while_is_not_raised_above_who_comes() {
    let (mut stage, now) = (stage(32), Instant::now());
    let bulk = stage.submit(vec![text(8); 100], now, None);
    let nearly = now + AGEING_STEP - Duration::from_secs(1);
    assert_eq!(stage.pooler.turn(nearly), Next::Now);
    let later = now + AGEING_BOUND;
    assert_eq!(stage.pooler.turn(now + AGEING_STEP), Next::Now);
    assert_eq!(stage.pooler.turn(later - Duration::from_secs(1)), Next::Now);
    let computed = stage.batches().len();
    let high = stage.submit_as(Priority::High, vec![text(3)], later, None);
    let normal = stage.submit(vec![text(6)], later, None);
    assert_eq!(stage.pooler.turn(later), Next::Now);
    assert_eq!(stage.batches()[computed..], [[3, 8, 6]], "those of its level take turns with it");
    assert!(high.end().is_some() && normal.end().is_some() && bulk.end().is_none());
}

#[test]
fn a_load_computes_a_few_tokens_however_many_a_batch_may_have() {
    for (text_tokens, computed) in [(16_384, 8), (512, 8), (3, 3)] {
        let limits = PooledLimits { texts: 32, batch_tokens: text_tokens, text_tokens };
        let mut stage = stage_of(32, Script { limits, ..Script::default() });
        assert_eq!(stage.pooler.warm_up(), Ok(()));
        assert_eq!(stage.batches(), [[computed]], "{text_tokens}");
    }
}

#[test]
fn batches_are_no_longer_than_they_may_take() {
    let (mut stage, now) = (stage(4), Instant::now());
    stage.script.takes(4 * Duration::from_millis(MAX_POOLED_BATCH_MS));
    stage.pooler.warm_up().unwrap();
    stage.script.takes(Duration::ZERO);
    stage.submit(vec![text(5); 4], now, None);
    let warm_up = stage.batches().len();
    stage.settle(now);
    assert_eq!(
        stage.batches()[warm_up..],
        [vec![5], vec![5], vec![5, 5]],
        "the load's tokens took too long by far: alone first, and together once that is known to take less"
    );
}

#[test]
fn a_backend_that_only_fails_is_broken() {
    let (mut stage, now) = (stage(1), Instant::now());
    for _ in 0..8 {
        assert_eq!(stage.counters.broken.get(), None);
        stage.submit(vec![vec![POISON]], now, None);
        stage.settle(now);
    }
    assert_eq!(stage.counters.broken.get().map(String::as_str), Some("poison"));
}

#[test]
fn the_end_of_the_pooler_ends_everyone() {
    let (mut stage, now) = (stage(8), Instant::now());
    let clients = [stage.submit(vec![text(1); 2], now, None), stage.submit(vec![text(1)], now, None)];
    stage.settle(now);
    stage.pooler.fail_all(&RequestError::ShuttingDown);
    for client in clients {
        assert_eq!(client.end(), Some(PooledEvent::Failed(RequestError::ShuttingDown)));
    }
    assert_eq!(stage.settle(now + WAIT), Next::Idle);
    assert_eq!(stage.counters.snapshot().in_flight, 0);
}

/// What may happen; numbers pick among the requests there are.
#[derive(Clone, Debug)]
enum Op {
    Submit(Vec<Vec<Token>>),
    Cancel(usize),
    Wait(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let token = prop_oneof![20 => 1..9_i32, 1 => Just(POISON), 1 => Just(SHORT)];
    let text = proptest::collection::vec(token, 1..8);
    prop_oneof![
        4 => proptest::collection::vec(text, 1..12).prop_map(Op::Submit),
        1 => (0_usize..20).prop_map(Op::Cancel),
        3 => (0_u64..15_000).prop_map(Op::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// **Feature: distributed-inference-server, Property 4: Batch Formation Within Window**
    /// **Validates: Requirements 2.1, 2.2**
    #[test]
    fn requests_that_come_within_the_window_are_computed_together(
        max in 1_usize..5, arrivals in proptest::collection::vec(0_u64..10_000, 1..5),
    ) {
        let (mut stage, start) = (stage(max), Instant::now());
        let mut offsets: Vec<u64> = arrivals.into_iter().take(max).collect();
        offsets.sort_unstable();
        let n = offsets.len();
        for (i, micros) in offsets.iter().enumerate() {
            let now = start + Duration::from_micros(*micros);
            stage.submit(vec![text(i + 1)], now, None);
            let next = stage.settle(now);
            let over = start + Duration::from_micros(offsets[0]) + WAIT;
            prop_assert_eq!(next, if i + 1 == max { Next::Idle } else { Next::At(over) });
            prop_assert_eq!(stage.batches().len(), usize::from(i + 1 == max));
        }
        stage.settle(start + Duration::from_micros(offsets[0]) + WAIT);
        prop_assert_eq!(stage.batches(), [(1..=n).collect::<Vec<_>>()]);
        let stats = stage.counters.snapshot();
        prop_assert_eq!((stats.batches_total, stats.texts_total), (1, n as u64));
    }

    /// **Feature: distributed-inference-server, Property 5: Batch Padding Correctness**
    /// **Validates: Requirements 2.3**
    #[test]
    fn padding_is_counted_to_the_longest_and_never_computed(lengths in proptest::collection::vec(1_usize..8, 1..4)) {
        let (mut stage, now) = (stage(lengths.len()), Instant::now());
        for &length in &lengths {
            stage.submit(vec![text(length)], now, None);
        }
        stage.settle(now);
        let longest = *lengths.iter().max().unwrap();
        let stats = stage.counters.snapshot();
        prop_assert_eq!(stats.tokens_total, lengths.iter().sum::<usize>() as u64);
        prop_assert_eq!(stats.padding_tokens_total, lengths.iter().map(|n| longest - n).sum::<usize>() as u64);
        prop_assert_eq!(stage.batches(), [lengths]);
    }

    /// **Feature: distributed-inference-server, Property 21: Batch Inference Completion**
    /// **Validates: Requirements 7.3**
    ///
    /// Whatever comes, leaves and fails: each request ends once, and who is at fault fails alone.
    #[test]
    fn each_request_has_a_result_for_each_text_or_one_error(
        max in 1_usize..9, ops in proptest::collection::vec(op(), 1..60),
    ) {
        let (mut stage, mut now) = (stage(max), Instant::now());
        let mut requests: Vec<(Vec<Vec<Token>>, Client)> = Vec::new();
        for op in ops {
            match op {
                Op::Submit(texts) => {
                    let client = stage.submit(texts.clone(), now, None);
                    requests.push((texts, client));
                }
                Op::Cancel(index) => {
                    if let Some((_, client)) = requests.get(index) {
                        client.cancelled.store(true, Relaxed);
                    }
                }
                Op::Wait(micros) => now += Duration::from_micros(micros),
            }
            stage.pooler.turn(now);
        }
        stage.settle(now);
        prop_assert_eq!(stage.settle(now + WAIT), Next::Idle);
        // A lone text that gives no vector is at fault, too; in a batch it costs the others nothing.
        let at_fault = |texts: &[Vec<Token>]| texts.iter().flatten().any(|t| *t == POISON || *t == SHORT);
        let broken = stage.counters.broken.get().is_some();
        for (texts, client) in &requests {
            match client.end() {
                Some(PooledEvent::Finished { prompt_tokens }) => {
                    prop_assert!(!at_fault(texts));
                    prop_assert_eq!(prompt_tokens as usize, texts.iter().map(Vec::len).sum::<usize>());
                    let expected = texts.iter().map(|text| vec![vector_of(text)[0]]);
                    prop_assert_eq!(client.vectors(), (0..).zip(expected).collect::<BTreeMap<_, _>>());
                }
                Some(PooledEvent::Failed(RequestError::Internal(_))) => prop_assert!(at_fault(texts)),
                Some(PooledEvent::Cancelled) => prop_assert!(client.cancelled.load(Relaxed)),
                other => prop_assert!(false, "{:?}, broken {}", other, broken),
            }
        }
        let stats = stage.counters.snapshot();
        prop_assert_eq!(stats.in_flight, 0);
        let ended = stats.requests_finished_total + stats.requests_cancelled_total + stats.requests_failed_total;
        prop_assert_eq!(ended, requests.len() as u64);
    }
}

//! What is promised of the queue, the cache and the isolation of requests, of the scheduler as a whole: whatever the
//! parts promise, this is where a request meets all of them.

use super::*;
use crate::backend::BLOCK_TOKENS;
use crate::kv::common;
use crate::scheduler::{MAINTENANCE_PERIOD, MIN_UNREAD_TO_OVERTAKE, OVERTAKING_SHARE};

/// Positions of a sequence.
const POSITIONS: u32 = 400;
/// What no prompt that can be decoded begins with.
const POISON: Token = VOCAB.cast_signed() - 1;

fn token() -> std::ops::Range<Token> {
    1..Token::try_from(VOCAB).unwrap()
}

fn prompt(tokens: impl Into<prop::collection::SizeRange>) -> impl Strategy<Value = Vec<Token>> {
    prop::collection::vec(token(), tokens)
}

/// A few tokens, or as many behind one of three long beginnings.
fn short_or_long() -> impl Strategy<Value = Vec<Token>> {
    (prop::option::of(1_i32..4), prompt(1..40))
        .prop_map(|(kind, own)| [vec![kind.unwrap_or(0); if kind.is_some() { 300 } else { 0 }], own].concat())
}

fn priority() -> impl Strategy<Value = Priority> {
    prop::sample::select(vec![Priority::Low, Priority::Normal, Priority::High])
}

/// A unified cache with the RAM tier, or a split one without: the two ends of what can be configured.
fn setup(unified: bool, sequences: u32, prefill: u32) -> Setup {
    let mut setup = Setup { reuse: true, ..Setup::split(sequences, POSITIONS, prefill, 64) };
    if unified {
        setup = Setup { ram_bytes: 1 << 20, ..Setup::unified(sequences, 3, POSITIONS * 2, prefill) };
        setup.limits.positions = POSITIONS;
        // The longer ones are read beside the pool.
        setup.limits.stage = Some(POSITIONS - 20);
    }
    setup
}

fn cached_tokens(request: &Submitted) -> u32 {
    match request.last() {
        GenerationEvent::Finished { usage, .. } => usage.cached_tokens,
        event => panic!("{event:?}"),
    }
}

/// None, one that is soon over, or one that never is.
fn limit_ms() -> impl Strategy<Value = Option<u64>> {
    prop_oneof![1 => Just(None::<u64>), 6 => (0_u64..80).prop_map(Some), 1 => Just(Some(3_600_000))]
}

/// A request that came at a time that a test chose.
struct Timed {
    ticket: u64,
    since: Instant,
    request: Submitted,
}

impl Timed {
    fn is_over(&self) -> bool {
        self.request.events.lock().unwrap().iter().any(GenerationEvent::is_terminal)
    }

    /// Its refusal, if it was refused for its time.
    fn refusal(&self) -> Option<(u64, u64)> {
        match self.request.events.lock().unwrap().last() {
            Some(&GenerationEvent::Failed(RequestError::DeadlineExceeded { waited_ms, limit_ms })) => {
                Some((waited_ms, limit_ms))
            }
            _ => None,
        }
    }
}

/// One step at this time, in which those are refused that should have had a token by then, wherever they wait for it,
/// and nobody else.
fn step_in_time(h: &mut Harness, requests: &[Timed], now: Instant) {
    let refusal = |timed: &Timed| {
        let limit_ms = timed.request.params.queue_timeout_ms?;
        let waited = now - timed.since;
        let is_due = waited >= Duration::from_millis(limit_ms) && h.scheduler.generated(timed.ticket, now) == Some(0);
        is_due.then(|| (u64::try_from(waited.as_millis()).unwrap(), limit_ms))
    };
    let live = requests.iter().filter(|timed| !timed.is_over());
    let expected: Vec<(&Timed, Option<(u64, u64)>)> = live.map(|timed| (timed, refusal(timed))).collect();
    h.scheduler.step_at(now);
    for (timed, expected) in expected {
        assert_eq!(timed.refusal(), expected, "request {}: {:?}", timed.ticket, timed.request.events);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    /// **Feature: distributed-inference-server, Property 6: Priority Queue Ordering**
    /// **Validates: Requirements 3.4, 3.5**
    #[test]
    fn slots_are_given_to_the_highest_priority_and_in_order_within_one(
        waiting in prop::collection::vec((priority(), short_or_long()), 1..30),
        prefill in 1_u32..200, ram in any::<bool>(),
    ) {
        let lens: Vec<usize> = waiting.iter().map(|(_, prompt)| prompt.len()).collect();
        let mut h = Harness::of(&Setup { ram_bytes: u64::from(ram) << 20, ..setup(false, 1, prefill) });
        let params = |priority| GenerationParams { priority, ..greedy(3) };
        let first = h.submit(vec![7; 4], params(Priority::High)).unwrap();
        h.scheduler.step();
        let requests: Vec<(Priority, Submitted)> = waiting
            .into_iter()
            .map(|(priority, prompt)| (priority, h.submit(prompt, params(priority)).unwrap()))
            .collect();
        // One sequence: those that have started since the last step are one.
        let mut order = Vec::new();
        while h.scheduler.has_work() {
            h.scheduler.step();
            let started = (0..requests.len()).filter(|i| !requests[*i].1.events.lock().unwrap().is_empty());
            order.extend(started.filter(|i| !order.contains(i)).collect::<Vec<_>>());
        }
        prop_assert_eq!(order.len(), requests.len());
        for (at, &first) in order.iter().enumerate() {
            for &second in &order[at + 1..] {
                prop_assert!(requests[first].0 >= requests[second].0, "{} before {}", first, second);
                if requests[first].0 > requests[second].0 || first < second {
                    continue;
                }
                // Who came later goes before a long prompt, and who waits behind that, only where next to nothing of a
                // long one is left to read.
                let unread = lens[first] - cached_tokens(&requests[first].1) as usize;
                let overtaken = order[at + 1..].iter().copied().filter(|&other| {
                    let is_before = other <= second && requests[other].0 == requests[second].0;
                    is_before && lens[other] >= MIN_UNREAD_TO_OVERTAKE && unread <= lens[other] / OVERTAKING_SHARE
                });
                prop_assert!(lens[first] >= MIN_UNREAD_TO_OVERTAKE && overtaken.count() > 0, "{} before {}", first, second);
            }
        }
        requests.iter().map(|(_, request)| request).chain([&first]).for_each(|request| request.check(POSITIONS));
        h.assert_empty();
    }

    /// **Feature: distributed-inference-server, Property 6: Priority Queue Ordering**
    /// **Validates: Requirements 3.4, 3.5**
    #[test]
    fn nobody_gets_one_of_several_slots_before_a_higher_or_an_earlier_request(
        waiting in prop::collection::vec((priority(), prompt(1..120)), 1..30),
        sequences in 2_u32..6, prefill in 1_u32..200, unified in any::<bool>(),
    ) {
        let mut h = Harness::of(&setup(unified, sequences, prefill));
        let params = |priority| GenerationParams { priority, ..greedy(3) };
        // No two begin alike: who waits for what another one reads lets others go before.
        let requests: Vec<(Priority, Submitted)> = waiting
            .into_iter()
            .zip(1..)
            .map(|((priority, prompt), begins)| {
                let prompt = [&[begins], prompt.as_slice()].concat();
                (priority, h.submit(prompt, params(priority)).unwrap())
            })
            .collect();
        let mut waiting: Vec<usize> = (0..requests.len()).collect();
        while h.scheduler.has_work() {
            h.scheduler.step();
            let (started, others): (Vec<_>, Vec<_>) =
                waiting.iter().copied().partition(|&i| !requests[i].1.events.lock().unwrap().is_empty());
            for (&started, &other) in started.iter().flat_map(|one| others.iter().map(move |other| (one, other))) {
                let (one, two) = (requests[started].0, requests[other].0);
                prop_assert!(one > two || (one == two && started < other), "{} before {}", started, other);
            }
            waiting = others;
        }
        prop_assert!(waiting.is_empty());
        requests.iter().for_each(|(_, request)| request.check(POSITIONS));
        h.assert_empty();
    }

    /// **Feature: distributed-inference-server, Property 8: Request Timeout Enforcement**
    /// **Validates: Requirements 3.3**
    #[test]
    fn those_whose_time_is_over_are_refused_and_nobody_else(
        // Each with the steps after it, and how many ms after the one before each of those is.
        requests in prop::collection::vec(
            (short_or_long(), limit_ms(), priority(), prop::collection::vec(0_u64..15, 0..5)), 1..20,
        ),
        rest in prop::collection::vec(1_u64..15, 1..20),
        sequences in 1_u32..5, prefill in 1_u32..60, unified in any::<bool>(),
    ) {
        let mut h = Harness::of(&setup(unified, sequences, prefill));
        let mut now = Instant::now();
        let mut timed: Vec<Timed> = Vec::new();
        for (prompt, queue_timeout_ms, priority, steps) in requests {
            h.now = Some(now);
            let params = GenerationParams { queue_timeout_ms, priority, ..greedy(5) };
            let request = h.submit(prompt, params).unwrap();
            timed.push(Timed { ticket: h.tickets, since: now, request });
            for ms in steps {
                now += Duration::from_millis(ms);
                step_in_time(&mut h, &timed, now);
            }
        }
        for ms in rest.into_iter().cycle().take(MOST_STEPS as usize) {
            if !h.scheduler.has_work() {
                break;
            }
            now += Duration::from_millis(ms);
            step_in_time(&mut h, &timed, now);
        }
        for Timed { request, .. } in &timed {
            prop_assert_eq!(request.events.lock().unwrap().iter().filter(|e| e.is_terminal()).count(), 1);
            match request.last() {
                // Nothing of an answer was sent before.
                GenerationEvent::Failed(RequestError::DeadlineExceeded { .. }) => prop_assert_eq!(request.text(), ""),
                _ => request.check(POSITIONS),
            }
        }
        h.assert_empty();
    }

    /// **Feature: distributed-inference-server, Property 9: KV Cache Prefix Reuse**
    /// **Validates: Requirements 4.1**
    #[test]
    fn a_prompt_that_begins_as_an_earlier_one_is_read_from_there_on(
        first in prompt(40..200), more in prompt(0..60), between in prop::collection::vec(prompt(20..200), 0..6),
        sequences in 2_u32..5, prefill in 1_u32..80, (unified, ram) in any::<(bool, bool)>(), beside in 0_u32..4,
    ) {
        let mut setup = setup(unified, sequences, prefill);
        if ram {
            setup.ram_bytes = 1 << 20;
        }
        let has_ram = setup.ram_bytes > 0;
        let ids = setup.limits.sequences;
        let mut h = Harness::of(&setup);
        let params = || GenerationParams { ignore_eos: true, ..greedy(2) };
        // What every other prompt begins with, and the first one does not.
        let apart = 1 + first[0] % POISON;
        // In a split cache the first one finds the lowest sequences taken, by some that end after it.
        let beside = if unified { 0 } else { beside.min(sequences - 1) };
        let endless = GenerationParams { ignore_eos: true, ..greedy(380) };
        let mut beside: Vec<Submitted> =
            (0..beside).map(|_| h.submit(vec![apart; 4], endless.clone()).unwrap()).collect();
        if !beside.is_empty() {
            h.scheduler.step();
        }
        let one = h.submit(first.clone(), params()).unwrap();
        while !one.events.lock().unwrap().iter().any(GenerationEvent::is_terminal) {
            h.scheduler.step();
        }
        for other in &mut beside {
            other.was_cancelled = true;
            other.signals.cancelled.store(true, Relaxed);
        }
        h.run();
        one.check(POSITIONS);
        beside.iter().for_each(|other| other.check(POSITIONS));
        let left_in = (0..ids).find(|&id| h.scheduler.backend().tokens(id).starts_with(&first));
        prop_assert!(left_in.is_some());
        let others = between.len();
        for other in between {
            let other = h.submit([&[apart], other.as_slice()].concat(), params()).unwrap();
            h.run();
            other.check(POSITIONS);
        }
        let longer = [first.as_slice(), &more].concat();
        // As much as any sequence holds of it: the answer to the first may be as it goes on.
        let usable = &longer[..longer.len() - 1];
        let here = (0..ids).map(|id| u64::from(common(usable, &h.scheduler.backend().tokens(id)))).max().unwrap();
        let (read_before, before) = (h.scheduler.backend().decoded_tokens, h.stats.snapshot());
        let two = h.submit(longer.clone(), params()).unwrap();
        h.run();
        two.check(POSITIONS);
        let (read, after) = (h.scheduler.backend().decoded_tokens, h.stats.snapshot());
        let cached = u64::from(cached_tokens(&two));
        // What was there is not read again, and nothing else is left out: all but the last of the two generated tokens
        // is decoded, too.
        prop_assert_eq!(read - read_before, longer.len() as u64 - cached + 1);
        let by_tier = |stats: &crate::EngineStats| {
            stats.cached_device_tokens_total + stats.cached_ram_tokens_total + stats.cached_disk_tokens_total
        };
        prop_assert_eq!(by_tier(&after) - by_tier(&before), cached);
        prop_assert!(cached >= here, "{} of {}", cached, here);
        let shared = first.len().min(longer.len() - 1) as u64;
        // One at a time, each takes the lowest sequence of a split cache: what is left over in a higher one stays.
        if others == 0 || (!unified && left_in > Some(0)) {
            prop_assert!(cached >= shared, "{} of {}", cached, shared);
        }
        if has_ram {
            // Main memory takes what the cache drops: whole blocks of the earlier prompt are there in any case.
            let block = u64::from(BLOCK_TOKENS);
            prop_assert!(cached >= shared / block * block, "{} of {}", cached, shared);
        } else {
            prop_assert_eq!(cached, here);
        }
        h.assert_empty();
    }

    /// **Feature: distributed-inference-server, Property 10: LRU Cache Eviction**
    /// **Validates: Requirements 4.2**
    #[test]
    fn what_was_left_over_longest_ago_leaves_the_kv_cache_first(
        uses in prop::collection::vec((1..8_i32, 1_usize..100), 1..40), leftovers in 1_u32..6, prefill in 1_u32..80,
    ) {
        // One request at a time, and nothing below the KV cache.
        let mut h = Harness::of(&Setup::unified(1, leftovers, 400, prefill));
        // Conversations, with the tokens of each that are there; the one that was used longest ago first.
        let mut held: Vec<(Token, usize)> = Vec::new();
        for (token, more) in uses {
            let before = held.iter().find(|(other, _)| *other == token).map_or(0, |(_, len)| *len);
            let len = before + more;
            if len > 300 {
                continue;
            }
            let request = h.submit(vec![token; len], greedy(1)).unwrap();
            h.run();
            request.check(400);
            prop_assert_eq!(cached_tokens(&request) as usize, before);
            // A new one needs a sequence, and each token a cell.
            if before == 0 && held.len() > leftovers as usize {
                held.remove(0);
            }
            held.retain(|(other, _)| *other != token);
            held.push((token, len));
            while held.iter().map(|(_, len)| len).sum::<usize>() > 400 {
                held.remove(0);
            }
            let of_sequence = |id| {
                let tokens = h.scheduler.backend().tokens(id);
                Some((*tokens.first()?, tokens.len()))
            };
            let mut there: Vec<(Token, usize)> = (0..=leftovers).filter_map(of_sequence).collect();
            let mut expected = held.clone();
            there.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(there, expected);
        }
        h.assert_empty();
    }

    /// **Feature: distributed-inference-server, Property 22: Request Failure Isolation**
    /// **Validates: Requirements 9.2**
    #[test]
    fn one_that_fails_in_a_batch_fails_alone(
        requests in prop::collection::vec((prompt(1..60), prop::bool::weighted(0.3), 0_usize..4), 1..20),
        undecodable in prop::collection::vec(prompt(1..60), 0..8),
        sequences in 2_u32..6, prefill in 1_u32..40, unified in any::<bool>(),
    ) {
        let mut h = Harness::of(&setup(unified, sequences, prefill));
        // The model cannot decode what begins so.
        *h.scheduler.backend().control.poison.lock().unwrap() = Some(POISON);
        let undecodable: Vec<Submitted> = undecodable
            .into_iter()
            .map(|rest| h.submit([vec![POISON], rest].concat(), greedy(12)).unwrap())
            .collect();
        let mut others = Vec::new();
        let failing = requests.iter().filter(|(_, fails, _)| *fails).count() as u64;
        for (mut prompt, fails, after) in requests {
            prompt[0] = prompt[0].min(POISON - 1);
            if !fails {
                others.push(h.submit(prompt, greedy(12)).unwrap());
                continue;
            }
            // Its caller breaks after some of its events.
            let permit = Permit::take(&h.stats, h.limit).unwrap();
            let mut left = after;
            let sink = Box::new(move |_| {
                // Not `panic!`: that would tell of each.
                left = left.checked_sub(1).unwrap_or_else(|| std::panic::resume_unwind(Box::new("scripted")));
            });
            let signals = Arc::new(Signals::default());
            let emitter = Emitter::new(sink, h.stats.clone(), permit, signals.clone());
            h.tickets += 1;
            let params = GenerationParams { ignore_eos: true, ..greedy(12) };
            h.enqueue(h.tickets, prompt, params, emitter, signals);
        }
        h.run();
        others.iter().for_each(|request| request.check(POSITIONS));
        let stats = h.stats.snapshot();
        for request in &undecodable {
            prop_assert!(matches!(request.error(), RequestError::Internal(_)));
        }
        let ended = stats.requests_finished_total + stats.requests_failed_total;
        prop_assert_eq!(ended, (others.len() + undecodable.len()) as u64 + failing);
        prop_assert!(stats.requests_cancelled_total <= failing);
        h.scheduler.maintain(Instant::now() + MAINTENANCE_PERIOD);
        h.assert_empty();
    }
}

//! How much of a step prompts get, and how long an idle engine waits for more of them,
//! in the scheduler as a whole.

use super::*;
use crate::budget::PRODUCTS_LOOK;

/// One of whose steps a prompt's token is a quarter, and a row next to nothing: no bursts.
const DEAR_TOKENS: StepCost =
    StepCost { fixed_ms: 40.0, per_decode_row_ms: 0.1, per_prefill_token_ms: 10.0, per_kilocell_ms: 0.0 };
/// A row is a quarter of a step: 28 of them leave no room for prompts.
const DEAR_ROWS: StepCost =
    StepCost { fixed_ms: 40.0, per_decode_row_ms: 10.0, per_prefill_token_ms: 5.0, per_kilocell_ms: 0.0 };

fn endless() -> GenerationParams {
    GenerationParams { ignore_eos: true, ..greedy(1_000) }
}

impl Harness {
    /// A step that is planned with these costs, whatever the scripted backend's steps have taught.
    fn step_at_cost(&mut self, cost: StepCost) {
        self.scheduler.cost_is(cost);
        self.scheduler.step();
        self.scheduler.assert_books();
    }

    /// So many requests that generate, of one token each.
    fn streams(&mut self, count: Token) -> Vec<Submitted> {
        let streams = (0..count).map(|i| self.submit(vec![i + 1], endless()).unwrap()).collect();
        self.step_at_cost(DEAR_TOKENS);
        streams
    }
}

#[test]
fn the_more_requests_wait_the_more_of_a_step_is_for_prompts() {
    let budget = |waiting: Token| {
        let mut h = Harness::new(4, 1_100, 64, 64);
        let _streams = h.streams(3);
        let _asking: Vec<Submitted> = (0..=waiting).map(|i| h.submit(vec![1 + i; 1_000], greedy(1)).unwrap()).collect();
        h.step_at_cost(DEAR_TOKENS);
        let stats = h.stats.snapshot();
        assert_eq!((stats.slots_active, stats.queued), (4, waiting.cast_unsigned()));
        stats.prefill_budget_tokens
    };
    // Rows take 40 ms, and so does what a prompt is computed in by itself besides its tokens: 2.1 times 40 is a step's
    // target, and more where more ask than there are streams.
    let tokens = [0, 2, 8, 11].map(budget);
    assert_eq!(tokens, [MIN_PREFILL_TOKENS, MIN_PREFILL_TOKENS, 8, 12]);
}

#[test]
fn the_budget_is_told_what_a_step_was() {
    let steps = [(false, true), (false, false), (true, true), (true, false)].map(|(unified, flash_attention)| {
        let mut setup = Setup::split(6, 1_100, 64, 64);
        if unified {
            setup = Setup::unified(6, 2, 6_600, 64);
            setup.limits.positions = 1_100;
        }
        setup.limits.flash_attention = flash_attention;
        let mut h = Harness::of(&setup);
        let _streams = h.streams(4);
        let _asks = h.submit(vec![5; 1_000], greedy(1)).unwrap();
        h.step_at_cost(SMALL);
        h.step_at_cost(SMALL);
        let observed = h.scheduler.observed();
        assert_eq!(observed.decode_rows, 4, "{observed:?}");
        let held = (0..setup.limits.sequences).map(|id| h.scheduler.backend().tokens(id).len()).max();
        (observed, held.and_then(|held| u32::try_from(held).ok()).unwrap())
    });
    for ((observed, held), (further_parts, looks)) in
        steps.into_iter().zip([(1, 0.0), (1, PRODUCTS_LOOK), (0, 0.0), (0, PRODUCTS_LOOK)])
    {
        // Four streams of a token and two steps each, and a prompt's part behind what was read of it before.
        let (rows_at, before) = (2, held - observed.prefill_tokens);
        let of_prompt: u32 = (before..held).sum();
        let alone = f64::from(4 * rows_at + of_prompt) / 1e3;
        let looked_at = looks * f64::from(rows_at + before) / 1e3;
        assert_eq!(observed.further_parts, further_parts);
        assert!((observed.kilocells - alone - looked_at).abs() < 1e-9, "{observed:?}, {alone} and {looked_at}");
    }
}

#[test]
fn prompts_that_are_computed_apart_each_take_their_part_of_a_step() {
    // Four rows take 50 ms, and a step may take 105 with prompts: 10 go to each of those.
    let cost = StepCost { fixed_ms: 10.0, per_decode_row_ms: 10.0, per_prefill_token_ms: 1.0, per_kilocell_ms: 0.0 };
    let budget = |prompts: &[usize]| {
        let mut h = Harness::new(8, 1_100, 64, 64);
        let _streams = h.streams(4);
        let _asking: Vec<Submitted> =
            (5..).zip(prompts).map(|(i, &n)| h.submit(vec![i; n], greedy(1)).unwrap()).collect();
        h.step_at_cost(cost);
        h.stats.snapshot().prefill_budget_tokens
    };
    assert_eq!(budget(&[1_000]), 45);
    assert_eq!(budget(&[1_000, 900]), 45, "the second has no room beside the first");
    assert_eq!(budget(&[30, 900]), 35);
    // Twelve tokens of each of three are one part, for a second there is no room. Six, nine and ten are three.
    assert_eq!(budget(&[12, 12, 12, 900]), 36);
    assert_eq!(budget(&[6, 9, 12, 900]), 25);
    assert_eq!(budget(&[38, 900]), 38);
}

#[test]
fn a_prompt_that_there_is_room_for_is_not_cut_short_for_a_whole_group() {
    let cost = StepCost { fixed_ms: 10.0, per_decode_row_ms: 10.0, per_prefill_token_ms: 1.0, per_kilocell_ms: 0.0 };
    let mut h = Harness::new(8, 1_100, 64, 64);
    let _streams = h.streams(4);
    let short = h.submit(vec![5; 38], greedy(1)).unwrap();
    let _long = h.submit(vec![6; 900], greedy(1)).unwrap();
    h.step_at_cost(cost);
    assert_eq!(h.stats.snapshot().requests_finished_total, 1);
    short.check(1_100);
}

#[test]
fn prompts_that_are_nearly_read_are_read_at_once_beside_many_streams() {
    let read_in_one_step = |prompt: u32| {
        let mut h = Harness::new(32, 200, 64, 64);
        let _streams = h.streams(28);
        let asking: Vec<Submitted> =
            (0..4).map(|i| h.submit(vec![1 + i; prompt as usize], endless()).unwrap()).collect();
        h.step_at_cost(DEAR_ROWS);
        let begun = |request: &Submitted| request.events.lock().unwrap().len() > 1;
        asking.iter().filter(|request| begun(request)).count()
    };
    assert_eq!(read_in_one_step(MIN_PREFILL_TOKENS), 4);
    assert_eq!(read_in_one_step(MIN_PREFILL_TOKENS + 1), 0);
}

#[test]
fn an_idle_engine_waits_for_company_by_what_it_has_to_read() {
    let now = Instant::now();
    let mut h = Harness::new(4, 1_000, 64, 64);
    assert_eq!(h.scheduler.patience(now), Duration::ZERO);
    h.scheduler.cost_is(DEAR_TOKENS);
    let request = h.submit(vec![7; 40], greedy(1)).unwrap();
    // 400 ms of reading.
    assert_eq!(h.scheduler.patience(now), Duration::from_millis(2));
    h.scheduler.cost_is(StepCost { per_prefill_token_ms: 0.01, ..DEAR_TOKENS });
    assert_eq!(h.scheduler.patience(now), Duration::from_micros(2));
    // One is known to come, and waited for as long as it pays, but within a bound.
    let permit = Permit::take(&h.stats, 64).unwrap();
    assert_eq!(h.scheduler.patience(now), Duration::from_micros(400));
    h.scheduler.cost_is(DEAR_TOKENS);
    assert_eq!(h.scheduler.patience(now), Duration::from_millis(5));
    let others: Vec<Submitted> = (0..3).map(|_| h.submit(vec![7; 40], greedy(1)).unwrap()).collect();
    // All slots have someone, and nobody else could be read with them.
    assert_eq!(h.scheduler.patience(now), Duration::ZERO);
    drop(permit);
    h.run();
    others.iter().chain([&request]).for_each(|request| request.check(1_000));
    h.assert_empty();
}

use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;

/// After so many steps of a machine that was never seen, or that changed, steps take what they should.
const CONVERGES_IN: u32 = 40;
/// The steps that a prompt shares with streams then take at most this factor of the target.
const OVER_TARGET: f64 = 1.35;
/// And use at least this part of it, where the least number of tokens does not decide.
const UNDER_TARGET: f64 = 0.6;

const SLOW_CPU: StepCost =
    StepCost { fixed_ms: 40.0, per_decode_row_ms: 9.0, per_prefill_token_ms: 6.0, per_kilocell_ms: 0.0 };
const GPU: StepCost =
    StepCost { fixed_ms: 6.0, per_decode_row_ms: 0.06, per_prefill_token_ms: 0.05, per_kilocell_ms: 0.0 };
const TINY_MODEL: StepCost =
    StepCost { fixed_ms: 0.3, per_decode_row_ms: 0.05, per_prefill_token_ms: 0.02, per_kilocell_ms: 0.0 };
const BIG_ON_CPU: StepCost =
    StepCost { fixed_ms: 900.0, per_decode_row_ms: 120.0, per_prefill_token_ms: 100.0, per_kilocell_ms: 0.0 };

fn demand(decode_rows: u32, prompts: u32) -> Demand {
    Demand { decode_rows, prompts, ..Demand::default() }
}

/// Of short sequences.
fn work(decode_rows: u32, prefill_tokens: u32) -> StepWork {
    StepWork { decode_rows, prefill_tokens, ..StepWork::default() }
}

/// A machine whose steps take what its costs say, give or take `noise`.
struct Machine {
    cost: StepCost,
    noise: f64,
    rng: StdRng,
}

impl Machine {
    fn new(cost: StepCost, noise: f64, seed: u64) -> Self {
        Self { cost, noise, rng: StdRng::seed_from_u64(seed) }
    }

    fn run(&mut self, rows: u32, tokens: u32) -> Duration {
        self.run_work(work(rows, tokens))
    }

    fn run_work(&mut self, work: StepWork) -> Duration {
        let factor = 1.0 + self.rng.random_range(-self.noise..=self.noise);
        Duration::from_secs_f64(self.cost.step_ms(work) * factor / 1e3)
    }

    /// A step with more prompt than fits, or, one in four, without any: what tells the rows' cost from the prompts'.
    fn loaded_step(&mut self, budget: &mut StepBudget, rows: u32) {
        let tokens = if self.rng.random_bool(0.25) { 0 } else { budget.prefill_tokens(&demand(rows, 1)) };
        let took = self.run(rows, tokens);
        budget.observe(work(rows, tokens), took);
    }

    fn check(&self, budget: &StepBudget, rows: u32, target: Option<u32>, what: &str) {
        let alone = self.cost.step_ms(work(rows, 0));
        let target_ms = target.map_or((AUTO_STEP_FACTOR * alone).clamp(AUTO_STEP_MIN_MS, AUTO_STEP_MAX_MS), f64::from);
        let tokens = budget.prefill_tokens(&demand(rows, 1));
        let took = self.cost.step_ms(work(rows, tokens));
        let report = format!("{what}: {rows} rows, {tokens} tokens, {took:.1} of {target_ms:.1} ms, {budget:?}");
        // The least that prompts get is given whatever it takes, so that no more precision is asked for than that.
        let least = self.cost.step_ms(work(rows, MIN_PREFILL_TOKENS));
        assert!(took <= target_ms.max(least) * OVER_TARGET, "{report}");
        assert!(took >= target_ms * UNDER_TARGET || tokens == budget.max_prefill_tokens, "{report}");
    }
}

const MACHINES: [(&str, StepCost); 4] =
    [("slow CPU", SLOW_CPU), ("GPU", GPU), ("tiny model", TINY_MODEL), ("big model on a CPU", BIG_ON_CPU)];

#[test]
fn without_decoding_rows_a_prompt_has_the_whole_batch_and_otherwise_at_least_the_minimum() {
    let mut budget = StepBudget::new(Some(1), 512);
    assert_eq!(budget.prefill_tokens(&demand(0, 1)), 512);
    let mut machine = Machine::new(SLOW_CPU, 0.0, 0);
    for _ in 0..50 {
        machine.loaded_step(&mut budget, 4);
        assert!(budget.prefill_tokens(&demand(4, 1)) >= MIN_PREFILL_TOKENS);
    }
    assert_eq!(budget.prefill_tokens(&demand(4, 1)), MIN_PREFILL_TOKENS);
    assert_eq!(StepBudget::new(Some(1), 4).prefill_tokens(&demand(4, 1)), 4);
}

#[test]
fn steps_come_to_their_target_on_each_machine_with_noise() {
    for (name, cost) in MACHINES {
        for target in [None, Some(100)] {
            for rows in [1, 4, 32] {
                for seed in 0..20 {
                    let mut budget = StepBudget::new(target, 2048);
                    let mut machine = Machine::new(cost, 0.1, seed);
                    for _ in 0..CONVERGES_IN {
                        machine.loaded_step(&mut budget, rows);
                    }
                    for _ in 0..200 {
                        machine.loaded_step(&mut budget, rows);
                        machine.check(&budget, rows, target, name);
                    }
                }
            }
        }
    }
}

#[test]
fn a_warm_up_of_one_token_and_of_a_batch_is_enough_to_begin_with() {
    for (name, cost) in MACHINES {
        let mut budget = StepBudget::new(None, 512);
        let mut machine = Machine::new(cost, 0.05, 1);
        // The first reads the model from disk.
        budget.observe(work(1, 0), Duration::from_secs(5));
        for (rows, tokens) in [(1, 0), (0, 512)] {
            let took = machine.run(rows, tokens);
            budget.observe(work(rows, tokens), took);
        }
        let (took, target) =
            (cost.step_ms(work(2, budget.prefill_tokens(&demand(2, 1)))), budget.target_ms(&demand(2, 1)));
        assert!(
            took <= target * 2.0 || budget.prefill_tokens(&demand(2, 1)) == MIN_PREFILL_TOKENS,
            "{name}: {took} of {target}"
        );
    }
}

#[test]
fn steps_made_for_it_tell_the_costs_apart() {
    for (name, cost) in MACHINES {
        for seed in 0..20 {
            let mut budget = StepBudget::new(None, 512);
            let mut machine = Machine::new(cost, 0.05, seed);
            let steps =
                [(1, 511), (16, 0), (1, 0)].map(|(rows, tokens)| (work(rows, tokens), machine.run(rows, tokens)));
            budget.calibrate(&steps, None);
            for (rows, tokens) in [(1, 0), (16, 0), (1, 511)] {
                let ratio = budget.cost().step_ms(work(rows, tokens)) / cost.step_ms(work(rows, tokens));
                assert!((0.8..1.25).contains(&ratio), "{name}: {rows} rows, {tokens} tokens: {ratio}");
            }
            let dear_rows = |cost: StepCost| 16.0 * cost.per_decode_row_ms / cost.fixed_ms;
            let ratio = dear_rows(budget.cost()) / dear_rows(cost);
            println!("{name} {seed}: {:?} for {cost:?}: {ratio}", budget.cost());
        }
    }
}

#[test]
fn prompts_that_are_nearly_read_may_take_a_step_past_its_target() {
    let mut budget = StepBudget::new(None, 512);
    budget.cost_is(StepCost {
        fixed_ms: 20.0,
        per_decode_row_ms: 10.0,
        per_prefill_token_ms: 5.0,
        ..StepCost::default()
    });
    // 28 rows take 300 ms, which leaves nothing of 250, but as much again of twice that.
    assert_eq!(
        (budget.prefill_tokens(&demand(28, 20)), budget.tokens_to_end(&demand(28, 20), 50)),
        (MIN_PREFILL_TOKENS, 50)
    );
    assert_eq!(budget.tokens_to_end(&demand(28, 20), 200), 60);
    assert_eq!(budget.tokens_to_end(&demand(0, 20), 200), 4);
    let mut told = StepBudget::new(Some(400), 512);
    told.cost_is(StepCost {
        fixed_ms: 20.0,
        per_decode_row_ms: 10.0,
        per_prefill_token_ms: 5.0,
        ..StepCost::default()
    });
    assert_eq!(
        (told.tokens_to_end(&demand(28, 20), 60), told.tokens_to_end(&demand(40, 20), 60)),
        (20, 0),
        "a target that was set holds"
    );
}

#[test]
fn a_change_of_speed_is_followed_in_both_directions() {
    for (name, cost) in MACHINES {
        for factor in [0.1, 0.5, 2.0, 10.0] {
            for seed in 0..20 {
                let mut budget = StepBudget::new(None, 2048);
                let mut machine = Machine::new(cost, 0.1, seed);
                for _ in 0..100 {
                    machine.loaded_step(&mut budget, 8);
                }
                let StepCost { fixed_ms, per_decode_row_ms, per_prefill_token_ms, per_kilocell_ms } = cost;
                machine.cost = StepCost {
                    fixed_ms: fixed_ms * factor,
                    per_decode_row_ms: per_decode_row_ms * factor,
                    per_prefill_token_ms: per_prefill_token_ms * factor,
                    per_kilocell_ms: per_kilocell_ms * factor,
                };
                for _ in 0..CONVERGES_IN {
                    machine.loaded_step(&mut budget, 8);
                }
                machine.check(&budget, 8, None, &format!("{name} x {factor}"));
            }
        }
    }
}

#[test]
fn a_paused_machine_teaches_nothing() {
    let mut budget = StepBudget::new(None, 2048);
    let mut machine = Machine::new(SLOW_CPU, 0.1, 3);
    for _ in 0..60 {
        machine.loaded_step(&mut budget, 8);
    }
    for _ in 0..20 {
        let before = budget.cost();
        budget.observe(work(8, budget.prefill_tokens(&demand(8, 1))), Duration::from_secs(4));
        assert_eq!(budget.cost(), before);
        for _ in 0..=OUTLIER_WINDOW {
            machine.loaded_step(&mut budget, 8);
            machine.check(&budget, 8, None, "between pauses");
        }
    }
}

#[test]
fn hours_without_prompts_or_with_always_the_same_step_leave_the_costs_usable() {
    for (name, cost) in MACHINES {
        let mut budget = StepBudget::new(None, 2048);
        let mut machine = Machine::new(cost, 0.1, 7);
        for _ in 0..60 {
            machine.loaded_step(&mut budget, 8);
        }
        for _ in 0..100_000 {
            let took = machine.run(8, 0);
            budget.observe(work(8, 0), took);
        }
        let (took, target) =
            (cost.step_ms(work(8, budget.prefill_tokens(&demand(8, 1)))), budget.target_ms(&demand(8, 1)));
        assert!(took <= target * OVER_TARGET || budget.prefill_tokens(&demand(8, 1)) == MIN_PREFILL_TOKENS, "{name}");
        for _ in 0..CONVERGES_IN {
            machine.loaded_step(&mut budget, 8);
        }
        machine.check(&budget, 8, None, name);
    }
}

#[test]
fn the_costs_themselves_are_found_when_steps_differ() {
    for (name, cost) in MACHINES {
        let mut budget = StepBudget::new(None, 2048);
        let mut machine = Machine::new(cost, 0.05, 11);
        for _ in 0..400 {
            let rows = machine.rng.random_range(1..=8);
            machine.loaded_step(&mut budget, rows);
        }
        for (rows, tokens) in [
            (1, 0),
            (4, 0),
            (8, 0),
            (4, budget.prefill_tokens(&demand(4, 1))),
            (8, budget.prefill_tokens(&demand(8, 1))),
        ] {
            let (is, found) = (cost.step_ms(work(rows, tokens)), budget.cost().step_ms(work(rows, tokens)));
            assert!((found / is).ln().abs() < 0.3, "{name}: {rows} rows, {tokens} tokens: {found} is {is}");
        }
    }
}

/// As measured of Qwen2.5-0.5B's shape in Q4_0 on two cores: a row is twice a prompt's token.
const HALF_A_BILLION: StepCost =
    StepCost { fixed_ms: 12.0, per_decode_row_ms: 13.0, per_prefill_token_ms: 6.5, per_kilocell_ms: 0.0 };

#[test]
fn a_load_that_never_pauses_does_not_starve_its_prompts() {
    for seed in 0..50 {
        let mut budget = StepBudget::new(None, 512);
        let mut machine = Machine::new(HALF_A_BILLION, 0.1, seed);
        // The warm-up, and then more and more streams, and prompts in every step.
        for (rows, tokens) in [(1, 0), (0, 512)] {
            let took = machine.run(rows, tokens);
            budget.observe(work(rows, tokens), took);
        }
        for rows in 1..=30_u32 {
            for _ in 0..8 {
                let tokens = budget.prefill_tokens(&demand(rows, 1));
                let took = machine.run(rows, tokens);
                budget.observe(work(rows, tokens), took);
                let (step_ms, target_ms) =
                    (machine.cost.step_ms(work(rows, tokens)), machine.cost.step_ms(work(rows, 0)) * AUTO_STEP_FACTOR);
                let report = format!("{rows} rows, {tokens} tokens, {step_ms} ms, {:?}", budget.cost());
                let full = step_ms >= 0.8 * AUTO_STEP_MAX_MS;
                assert!(tokens >= rows.max(MIN_PREFILL_TOKENS) || full, "{report}");
                let least_ms = machine.cost.step_ms(work(rows, MIN_PREFILL_TOKENS));
                assert!(step_ms <= target_ms.min(AUTO_STEP_MAX_MS).max(least_ms) * OVER_TARGET, "{report}");
            }
        }
    }
}

/// The prompt's steps beside `rows` streams from its beginning to its end: what each took over its target.
fn read_beside(machine: &mut Machine, budget: &mut StepBudget, rows: u32, prompt: u32) -> Vec<f64> {
    let mut over = Vec::new();
    let mut read = 0;
    while read < prompt {
        let demand = Demand { token_kilocells: kilocells(read), ..demand(rows, 1) };
        let tokens = budget.prefill_tokens(&demand).min(prompt - read);
        let work = StepWork { kilocells: (read..read + tokens).map(kilocells).sum(), ..work(rows, tokens) };
        let took = machine.run_work(work);
        let target_ms = AUTO_STEP_FACTOR * machine.cost.step_ms(self::work(rows, 0));
        over.push(took.as_secs_f64() * 1e3 / target_ms);
        budget.observe(work, took);
        read += tokens;
    }
    over
}

/// As measured of the same shape with AVX-512, attention as matrix products.
const DEEP: StepCost =
    StepCost { fixed_ms: 6.5, per_decode_row_ms: 9.0, per_prefill_token_ms: 3.6, per_kilocell_ms: 1.5 };

#[test]
fn a_prompt_that_grows_long_gets_fewer_tokens_and_not_longer_steps() {
    let mut means = Vec::new();
    for seed in 0..20 {
        let mut budget = StepBudget::new(None, 512);
        let mut machine = Machine::new(DEEP, 0.05, seed);
        let steps =
            [(1, 511), (1, 15), (16, 0), (1, 0)].map(|(rows, tokens)| (work(rows, tokens), machine.run(rows, tokens)));
        let (near, deep) = (0.1, 8.3);
        // The shortest of some, so that there is less noise in it.
        let mut few = |kilocells| {
            let mut run = || machine.run_work(StepWork { kilocells, ..work(1, 15) });
            (kilocells, run().min(run()).min(run()))
        };
        budget.calibrate(&steps, Some(CellSteps { near: few(near), deep: few(deep) }));
        for _ in 0..100 {
            let took = machine.run(4, 0);
            budget.observe(work(4, 0), took);
        }
        let over = read_beside(&mut machine, &mut budget, 4, 3_000);
        let worst = over.iter().copied().fold(0.0, f64::max);
        assert!(worst < 1.4, "{seed}: {worst}, {budget:?}");
        means.push(over.iter().sum::<f64>() / over.len() as f64);
    }
    // Without cells, rows seem to cost more with each token read.
    let mean = means.iter().sum::<f64>() / means.len() as f64;
    assert!((0.95..1.06).contains(&mean), "{means:?}");
}

#[test]
fn cells_that_seemed_to_be_free_are_found_to_cost_something() {
    for seed in 0..20 {
        let mut budget = StepBudget::new(None, 512);
        let step =
            |kilocells: f64| (kilocells, Duration::from_secs_f64((20.0 + DEEP.per_kilocell_ms * kilocells) / 1e3));
        budget.calibrate(&[], Some(CellSteps { near: step(0.1), deep: step(8.1) }));
        budget.cost_is(StepCost { per_kilocell_ms: 0.1, ..DEEP });
        let over = read_beside(&mut Machine::new(DEEP, 0.05, seed), &mut budget, 4, 3_000);
        let late = &over[over.len() / 2..];
        let mean = late.iter().sum::<f64>() / late.len() as f64;
        assert!(mean < 1.15, "{seed}: {mean}, {budget:?}");
    }
}

#[test]
fn the_least_is_half_where_a_step_would_take_too_long_with_it() {
    let mut budget = StepBudget::new(Some(1), 512);
    budget.cost_is(DEEP);
    // Four rows take 42.5 ms, and a part of a prompt 6.5 besides its tokens.
    let behind = |token_kilocells| Demand { token_kilocells, prompt_parts: 1, ..demand(4, 1) };
    let longest = |tokens: f64| 42.5 + 6.5 + tokens * (3.6 + 1.5 * 2.7);
    assert!(longest(8.0) < MOST_STEP_FACTOR * 42.5 && 42.5 + 6.5 + 8.0 * (3.6 + 1.5 * 3.9) > MOST_STEP_FACTOR * 42.5);
    assert_eq!([0.0, 2.7, 3.9].map(|kilocells| budget.prefill_tokens(&behind(kilocells))), [8, 8, 4]);
    let mut small = StepBudget::new(Some(1), 2);
    small.cost_is(DEEP);
    assert_eq!(small.prefill_tokens(&behind(4.0)), 2);
}

/// The same on two faster cores, where the fixed part is most of what few tokens cost.
const FAST: StepCost =
    StepCost { fixed_ms: 11.0, per_decode_row_ms: 4.25, per_prefill_token_ms: 1.6, per_kilocell_ms: 0.94 };

#[test]
fn what_is_computed_apart_does_not_make_few_tokens_seem_dear() {
    for seed in 0..20 {
        let mut budget = StepBudget::new(None, 512);
        let mut machine = Machine::new(FAST, 0.05, seed);
        budget.cost_is(FAST);
        let behind = 2.0;
        let part_kilocells = PRODUCTS_LOOK * behind;
        let demand = Demand { token_kilocells: behind, prompt_parts: 1, part_kilocells, ..demand(4, 1) };
        // Four at a time for a while, whyever.
        for step in 0..60 {
            let tokens = if step < 20 { 4 } else { budget.prefill_tokens(&demand) };
            let kilocells = behind * f64::from(tokens) + part_kilocells;
            let work = StepWork { kilocells, further_parts: 1, ..work(4, tokens) };
            // Two passes over the weights, whatever the budget makes of them.
            let passes = Duration::from_secs_f64(FAST.fixed_ms / 1e3);
            let took = passes + machine.run_work(StepWork { further_parts: 0, ..work });
            budget.observe(work, took);
        }
        // 28 ms for the rows, 15 for the part, and 28 for eight tokens.
        assert_eq!(budget.prefill_tokens(&demand), MIN_PREFILL_TOKENS, "{seed}: {budget:?}");
    }
}

#[test]
fn the_warm_up_measures_what_cells_cost_and_never_finds_that_they_are_free() {
    let steps = [(1, 511), (1, 15), (16, 0), (1, 0)].map(|(rows, tokens)| {
        let work = work(rows, tokens);
        (work, Duration::from_secs_f64(DEEP.step_ms(work) / 1e3))
    });
    let cost = |cells| {
        let mut budget = StepBudget::new(None, 512);
        budget.calibrate(&steps, cells);
        budget.cost()
    };
    let took = |near_ms, deep_ms| {
        let step = |kilocells, ms| (kilocells, Duration::from_millis(ms));
        Some(CellSteps { near: step(0.1, near_ms), deep: step(8.1, deep_ms) })
    };
    assert!((cost(took(60, 72)).per_kilocell_ms - 1.5).abs() < 1e-9);
    let noisy = cost(took(60, 55));
    assert!((noisy.per_kilocell_ms / noisy.per_prefill_token_ms - LEAST_CELLS).abs() < 1e-9, "{noisy:?}");
    assert!((cost(None).per_kilocell_ms - FIRST_GUESS.per_kilocell_ms).abs() < 1e-9);
}

#[test]
fn what_it_takes_to_read_a_prompt_counts_what_stands_before_it() {
    let in_one = DEEP.reading_ms(0, 3_000);
    let in_parts: f64 = (0..30).map(|part| DEEP.reading_ms(part * 100, 100)).sum();
    assert!((in_one / in_parts - 1.0).abs() < 1e-9);
    assert!((in_one - (3_000.0 * 3.6 + 4_500.0 * 1.5)).abs() < 1e-6, "{in_one}");
}

#[test]
fn a_step_without_streams_is_short_on_a_slow_machine_too() {
    let tokens = |cost| {
        let mut budget = StepBudget::new(None, 512);
        budget.cost_is(cost);
        budget.prefill_tokens(&demand(0, 1))
    };
    assert_eq!([GPU, SLOW_CPU, BIG_ON_CPU].map(tokens), [512, 320, LEAST_READING_TOKENS]);
    let mut small = StepBudget::new(None, 32);
    small.cost_is(BIG_ON_CPU);
    assert_eq!(small.prefill_tokens(&demand(0, 1)), 32);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    /// Whatever is measured, the costs are numbers that are not negative, and the answer keeps its limits.
    #[test]
    fn no_measurement_breaks_the_estimate(
        steps in proptest::collection::vec(
            (0_u32..300, 0_u32..20_000, 0_f64..1e6, 0_u32..300, 0_u64..200_000_000_000), 1..300,
        ),
        target in proptest::option::of(0_u32..5_000), max in 1_u32..20_000,
    ) {
        let mut budget = StepBudget::new(target, max);
        for (rows, tokens, kilocells, further_parts, nanos) in steps {
            let work = StepWork { kilocells, further_parts, ..work(rows, tokens) };
            budget.observe(work, Duration::from_nanos(nanos));
            let StepCost { fixed_ms, per_decode_row_ms, per_prefill_token_ms, per_kilocell_ms } = budget.cost();
            for cost in [fixed_ms, per_decode_row_ms, per_prefill_token_ms, per_kilocell_ms] {
                prop_assert!((LEAST_COST_MS..=LONGEST_STEP_MS).contains(&cost), "{:?}", budget);
            }
            let beside = Demand { prompt_parts: further_parts, part_kilocells: kilocells, ..demand(rows, 1) };
            let granted = budget.prefill_tokens(&beside);
            prop_assert!(granted <= max && granted >= MIN_DEAR_PREFILL_TOKENS.min(max));
        }
    }

    /// A machine with any costs is found.
    #[test]
    fn steps_come_to_their_target_on_any_machine(
        fixed_ms in 0.05_f64..500.0, row_extra in 0.1_f64..5.0, per_prefill_token_ms in 0.001_f64..100.0,
        rows in 1_u32..64, seed in 0_u64..1_000_000,
    ) {
        let per_decode_row_ms = per_prefill_token_ms * (1.0 + row_extra);
        let cost = StepCost { fixed_ms, per_decode_row_ms, per_prefill_token_ms, per_kilocell_ms: 0.0 };
        let mut budget = StepBudget::new(None, 2048);
        let mut machine = Machine::new(cost, 0.05, seed);
        for _ in 0..CONVERGES_IN {
            machine.loaded_step(&mut budget, rows);
        }
        machine.check(&budget, rows, None, "any");
    }
}

#[test]
fn after_one_token_a_step_is_rather_short_and_the_next_is_right() {
    // What a token takes by itself, and one of a prompt: two cores with AVX2 and with Zen 5, a large model on them, a GPU whose
    // first token took long.
    for (token_ms, prompt_token_ms) in [(25.0, 6.5), (12.0, 2.0), (320.0, 80.0), (250.0, 0.1)] {
        let mut budget = StepBudget::new(None, 512);
        let ms = |ms: f64| Duration::from_secs_f64(ms / 1e3);
        budget.guess(ms(token_ms));
        assert!((budget.cost().step_ms(StepWork::rows(1)) / token_ms - 1.0).abs() < 1e-9);
        let nobody = Demand::default();
        let first = budget.prefill_tokens(&nobody);
        let takes = |tokens: u32| 0.8 * token_ms + f64::from(tokens) * prompt_token_ms;
        assert!(takes(first) <= MOST_READING_MS || first == LEAST_READING_TOKENS, "{first}: {}", takes(first));
        let work = StepWork { prefill_tokens: first, ..StepWork::default() };
        budget.observe(work, ms(takes(first)));
        let second = budget.prefill_tokens(&nobody);
        assert!(second >= first && takes(second) <= 1.1 * MOST_READING_MS || second == LEAST_READING_TOKENS);
    }
}

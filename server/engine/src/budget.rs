//! How many prompt tokens fit in a step, learnt from what steps cost on this machine.
//!
//! A step's time is taken as `fixed + per_decode_row * rows + per_prefill_token * tokens + per_kilocell * kilocells`, the
//! last being thousands of cells that its tokens look at: a token of a prompt behind 3,000 others may take twice as long
//! as one at its beginning. What llama.cpp computes apart ([`StepWork::further_parts`]) has a fixed part of its own: were
//! that taken for the tokens', few of them would seem so dear beside streams that a prompt would never get more. Flow:
//! after each step [`StepBudget::observe`] → before the next [`StepBudget::prefill_tokens`], so many that the step ends
//! near its target.
//!
//! The costs are corrected by ratios: what a step took, over what was expected, is shared out to the costs by
//! their part in the step, and each is multiplied. Least squares (or a Kalman filter) would be exact where the model
//! is, but steps without prompts for a minute, or always the same number of rows, make their equations singular, and
//! a machine that gets ten times faster gives them negative costs: prompts look free, and the next step takes
//! seconds. Here a cost stays positive by construction, one that the present steps say nothing about stays as it was,
//! and when the whole machine changes speed all that take part follow together. Steps that are all alike do not tell
//! the costs apart, only their sum. What is known without measuring keeps that from going astray under a load that never
//! pauses: a decoding row is a token like a prompt's and has its logits computed besides, so it costs more. Were it
//! thought to cost less, prompts would seem too dear for a step that streams share, get the least there is, and so never
//! show what they cost. And beside a prompt that grows long it is the cells that are new ([`CELLS_BLAME`]): were rows
//! thought to cost more, the step's target, which follows from them, would grow with the prompt.
//!
//! A step that took [`OUTLIER_FACTOR`] times what was expected is a paused machine and changes nothing, unless
//! another one came within [`OUTLIER_WINDOW`] steps: then the machine has become slow, or some kind of step has. A
//! step that is so much shorter is believed at once, since nothing makes a step too short.
//!
//! Absent: clocks (times are handed in).

use std::time::Duration;

/// What a step may take without [`EngineConfig::step_ms_target`](crate::EngineConfig::step_ms_target), as a multiple of
/// what the decoding rows alone take. Where more requests wait for their first token than streams decode, each has as much
/// of the step as a stream: few must not hold up many, and prompts are read the faster the larger their parts are.
pub(crate) const AUTO_STEP_FACTOR: f64 = 2.1;
/// A step may take so many times what its decoding rows alone take, whatever its target, to read prompts to their end.
pub(crate) const TO_END_FACTOR: f64 = 2.0;
/// The least that such a target is: below it, prompts get too little for a gain that nobody sees.
pub(crate) const AUTO_STEP_MIN_MS: f64 = 20.0;
/// The most that such a target is: above it, a stream visibly stalls. Prompts that are nearly read do not count.
pub(crate) const AUTO_STEP_MAX_MS: f64 = 250.0;
/// The most that a step may take in which nobody generates, in ms, as far as is known: who cancels waits for its end, and so
/// does who asks whether a token can be decoded.
pub(crate) const MOST_READING_MS: f64 = 2_000.0;
/// Such a step reads whole multiples of so many tokens, and once as many whatever they take: each step is a pass over the
/// weights.
pub(crate) const LEAST_READING_TOKENS: u32 = 64;
/// Prompts get so many tokens in a step even where the target has no room for them, so that they go on.
pub(crate) const MIN_PREFILL_TOKENS: u32 = 8;
/// And only so many where a step with those would take [`MOST_STEP_FACTOR`] times what its rows take, because of the cells
/// that they look at ([`DEAR_CELLS`]): beside few rows eight take long in any case, and half of them take little less.
pub(crate) const MIN_DEAR_PREFILL_TOKENS: u32 = 4;
/// See [`MIN_DEAR_PREFILL_TOKENS`].
pub(crate) const MOST_STEP_FACTOR: f64 = 2.8;
/// Cells make few tokens dear where they are so much of what those cost besides.
pub(crate) const DEAR_CELLS: f64 = 0.5;
/// Where attention is computed as matrix products, what is computed together costs besides as if so many more tokens looked
/// at its cells (Qwen2.5-0.5B's shape in Q4_0 on two cores of Zen 5: 4, 8, 16 and 32 tokens of a prompt take 36, 50, 83 and
/// 161 ms behind 3,072 others, and 18, 27, 34 and 62 at its beginning).
pub(crate) const PRODUCTS_LOOK: f64 = 2.0;
/// Before anything is measured: some CPU, in ms.
const FIRST_GUESS: StepCost =
    StepCost { fixed_ms: 20.0, per_decode_row_ms: 3.0, per_prefill_token_ms: 2.0, per_kilocell_ms: 0.5 };
/// Of what a token takes by itself the part that one of a prompt takes, before anything else is known: two cores take a
/// quarter with AVX2, an eighth with Zen 5, and a GPU a hundredth.
const GUESSED_TOKEN: f64 = 0.5;
/// Of that what it takes to look at a thousand cells.
const GUESSED_CELLS: f64 = 0.25;
/// How much of an error one step corrects. At a noise of 10 % the estimate is then right to about 5 %.
const CORRECTION: f64 = 0.5;
/// The first steps are believed wholly: the first guess may be wrong by any factor.
const BELIEVED_STEPS: u32 = 5;
/// How often the steps of the warm-up are looked at: each correction for one of them undoes some of the others'.
const CALIBRATION_ROUNDS: usize = 64;
/// A step so many times as long as expected is taken for an accident.
const OUTLIER_FACTOR: f64 = 3.0;
/// Two of them within so many steps are not. Not in a row: steps of one kind may be too long, and others between them
/// not.
const OUTLIER_WINDOW: u32 = 8;
/// What a step that is so far off, and is believed, changes the costs by at most.
const MOST_CHANGE: f64 = 2.0;
/// A cost that takes part in a step is blamed for at least this part of it, so that one near 0 can grow.
const LEAST_BLAME: f64 = 0.02;
/// Where prompts are read, the cost of cells is so many times as likely to be wrong as the others: it differs by how many
/// tokens are computed together and by the kernel.
const CELLS_BLAME: f64 = 100.0;
/// And is not corrected in steps of which it is a smaller part, by what it is now and by what it was in the warm-up: else
/// it would stay where noise has brought it down to, and rows seem to cost more with each token that is read.
const CELLS_TELL: f64 = 0.05;
/// To look at a thousand cells costs a token at least such a part of what it costs besides, as far as the warm-up tells.
const LEAST_CELLS: f64 = 0.05;
/// A decoding row costs at least so much more than a prompt's token, as a part of that.
const LEAST_ROW_EXTRA: f64 = 0.1;
/// No cost is below this, in ms, and none above [`LONGEST_STEP_MS`].
const LEAST_COST_MS: f64 = 1e-6;
/// Steps shorter than this are taken as this long: it bounds the weight of one.
const SHORTEST_STEP_MS: f64 = 0.05;
/// Steps longer than this are taken as this long.
const LONGEST_STEP_MS: f64 = 60_000.0;

/// What a step costs, in ms.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct StepCost {
    pub(crate) fixed_ms: f64,
    pub(crate) per_decode_row_ms: f64,
    pub(crate) per_prefill_token_ms: f64,
    /// For a thousand cells that one token looks at.
    pub(crate) per_kilocell_ms: f64,
}

impl StepCost {
    pub(crate) fn step_ms(&self, work: StepWork) -> f64 {
        self.fixed_ms * work.parts()
            + self.per_decode_row_ms * f64::from(work.decode_rows)
            + self.per_prefill_token_ms * f64::from(work.prefill_tokens)
            + (self.per_decode_row_ms - self.per_prefill_token_ms) * f64::from(work.scored_tokens)
            + self.per_kilocell_ms * work.kilocells
    }

    /// What it takes to read so many tokens of a prompt behind `read` others, whatever steps they are read in.
    pub(crate) fn reading_ms(&self, read: u32, tokens: u32) -> f64 {
        let tokens = f64::from(tokens);
        let mean_kilocells = kilocells(read) + tokens / 2e3;
        tokens * (self.per_prefill_token_ms + mean_kilocells * self.per_kilocell_ms)
    }
}

/// Cells, in thousands.
pub(crate) fn kilocells(cells: u32) -> f64 {
    f64::from(cells) / 1e3
}

/// What a step has to do.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct StepWork {
    /// Tokens of sequences that generate, guessed ones and those of nobody's included.
    pub(crate) decode_rows: u32,
    pub(crate) prefill_tokens: u32,
    /// Those of them that have a row of logits, as decoding rows have.
    pub(crate) scored_tokens: u32,
    /// Cells that each token looks at, over all of them, and each part besides ([`PRODUCTS_LOOK`]), in thousands.
    pub(crate) kilocells: f64,
    /// Parts that are computed after the first, each with a pass over the weights of its own.
    pub(crate) further_parts: u32,
}

impl StepWork {
    fn parts(&self) -> f64 {
        1.0 + f64::from(self.further_parts)
    }

    /// So many rows of short sequences.
    pub(crate) fn rows(decode_rows: u32) -> Self {
        Self { decode_rows, ..Self::default() }
    }
}

/// Two steps of the warm-up with the same tokens, with how many cells they looked at, in thousands, and what they took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CellSteps {
    pub(crate) near: (f64, Duration),
    pub(crate) deep: (f64, Duration),
}

/// Who wants a part of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Demand {
    /// Sequences that generate.
    pub(crate) decode_rows: u32,
    /// Rows of nobody's beside theirs.
    pub(crate) filler_rows: u32,
    /// Requests that have no stream yet, whether or not they read now.
    pub(crate) prompts: u32,
    /// Cells that the rows look at together, their part included, in thousands.
    pub(crate) row_kilocells: f64,
    /// Cells that a token of a prompt looks at, in the mean over those that are read, in thousands.
    pub(crate) token_kilocells: f64,
    /// Parts that prompts are computed in by themselves, beside the rows.
    pub(crate) prompt_parts: u32,
    /// Cells that their prompts look at whatever their tokens, in thousands.
    pub(crate) part_kilocells: f64,
    /// Tokens that are computed in them, where one more would be a further part that there is no room for.
    pub(crate) most_tokens: Option<u32>,
}

impl Demand {
    fn rows(&self) -> StepWork {
        let decode_rows = self.decode_rows + self.filler_rows;
        StepWork { decode_rows, kilocells: self.row_kilocells, ..StepWork::default() }
    }
}

/// The learnt costs and the target.
#[derive(Clone, Debug)]
pub(crate) struct StepBudget {
    target_ms: Option<f64>,
    max_prefill_tokens: u32,
    cost: StepCost,
    /// What a thousand cells cost in the warm-up.
    warm_kilocell_ms: f64,
    /// Steps learnt from, up to [`BELIEVED_STEPS`].
    steps: u32,
    /// Steps in which another outlier is believed.
    suspicious_steps: u32,
    /// What the last step was said to be.
    #[cfg(test)]
    pub(crate) observed: StepWork,
}

impl StepBudget {
    /// `target_ms` is the configuration's; `max_prefill_tokens` is the most that any step gives to prompts.
    pub(crate) fn new(target_ms: Option<u32>, max_prefill_tokens: u32) -> Self {
        Self {
            target_ms: target_ms.map(f64::from),
            max_prefill_tokens,
            cost: FIRST_GUESS,
            warm_kilocell_ms: 0.0,
            steps: 0,
            suspicious_steps: 0,
            #[cfg(test)]
            observed: StepWork::default(),
        }
    }

    /// Takes the costs to be such that one token by itself takes so long: what is guessed of prompts is rather too dear, so
    /// that the first steps are too short and not too long.
    pub(crate) fn guess(&mut self, token: Duration) {
        let ms = (token.as_secs_f64() * 1e3).clamp(SHORTEST_STEP_MS, LONGEST_STEP_MS);
        let per_prefill_token_ms = GUESSED_TOKEN * ms;
        let per_decode_row_ms = per_prefill_token_ms * (1.0 + LEAST_ROW_EXTRA);
        let per_kilocell_ms = GUESSED_CELLS * per_prefill_token_ms;
        self.cost =
            StepCost { fixed_ms: ms - per_decode_row_ms, per_decode_row_ms, per_prefill_token_ms, per_kilocell_ms };
    }

    /// Learns from steps of different kinds that were made for this: unlike those of a load they tell the costs apart.
    pub(crate) fn calibrate(&mut self, steps: &[(StepWork, Duration)], cells: Option<CellSteps>) {
        for &(work, took) in std::iter::repeat_n(steps, CALIBRATION_ROUNDS).flatten() {
            let took_ms = (took.as_secs_f64() * 1e3).clamp(SHORTEST_STEP_MS, LONGEST_STEP_MS);
            let expected_ms = self.cost.step_ms(work);
            self.correct(work, expected_ms, CORRECTION * (took_ms / expected_ms).ln());
        }
        if let Some(CellSteps { near, deep }) = cells {
            let ms = (deep.1.as_secs_f64() - near.1.as_secs_f64()) * 1e3 / (deep.0 - near.0);
            self.cost.per_kilocell_ms =
                ms.max(LEAST_CELLS * self.cost.per_prefill_token_ms).clamp(LEAST_COST_MS, LONGEST_STEP_MS);
            self.warm_kilocell_ms = self.cost.per_kilocell_ms;
        }
        self.steps = BELIEVED_STEPS;
    }

    /// Learns from a step.
    pub(crate) fn observe(&mut self, work: StepWork, took: Duration) {
        #[cfg(test)]
        {
            self.observed = work;
        }
        if work.decode_rows == 0 && work.prefill_tokens == 0 {
            return;
        }
        let took_ms = (took.as_secs_f64() * 1e3).clamp(SHORTEST_STEP_MS, LONGEST_STEP_MS);
        let expected_ms = self.cost.step_ms(work);
        let error = (took_ms / expected_ms).ln();
        let correction = if self.steps < BELIEVED_STEPS {
            self.steps += 1;
            error
        } else if error.abs() <= OUTLIER_FACTOR.ln() {
            self.suspicious_steps = self.suspicious_steps.saturating_sub(1);
            CORRECTION * error
        } else if error > 0.0 && self.suspicious_steps == 0 {
            self.suspicious_steps = OUTLIER_WINDOW;
            return;
        } else {
            error.clamp(-MOST_CHANGE.ln(), MOST_CHANGE.ln())
        };
        self.correct(work, expected_ms, correction);
    }

    /// Tokens for prompts; where nobody generates, as many as take [`MOST_READING_MS`].
    pub(crate) fn prefill_tokens(&self, demand: &Demand) -> u32 {
        if demand.decode_rows == 0 {
            let tokens = (MOST_READING_MS - self.cost.fixed_ms) / self.token_ms(demand);
            // In range: clamped between 0 and a u32.
            let whole = tokens.clamp(0.0, f64::from(u32::MAX)) as u32 / LEAST_READING_TOKENS * LEAST_READING_TOKENS;
            return whole.max(LEAST_READING_TOKENS).min(self.max_prefill_tokens);
        }
        let rows_ms = self.cost.step_ms(demand.rows());
        let (before_ms, token_ms) = (rows_ms + self.part_ms(demand), self.token_ms(demand));
        let tokens = ((self.target_ms(demand) - before_ms) / token_ms).clamp(0.0, f64::from(self.max_prefill_tokens));
        let few = f64::from(MIN_PREFILL_TOKENS);
        let cells_ms = self.cost.per_kilocell_ms * (few * demand.token_kilocells + demand.part_kilocells);
        let is_dear = before_ms + few * token_ms > MOST_STEP_FACTOR * rows_ms
            && cells_ms > DEAR_CELLS * few * self.cost.per_prefill_token_ms;
        let least = if is_dear { MIN_DEAR_PREFILL_TOKENS } else { MIN_PREFILL_TOKENS };
        // In range: clamped between 0 and a u32.
        (tokens as u32).max(least.min(self.max_prefill_tokens)).min(demand.most_tokens.unwrap_or(u32::MAX))
    }

    /// Tokens that a step may have for prompts which it reads to their end, `nearly_read` in all: with many streams a
    /// step has no room for prompts, and those who ask a few words more would wait for each other.
    pub(crate) fn tokens_to_end(&self, demand: &Demand, nearly_read: u32) -> u32 {
        let rows_ms = self.cost.step_ms(demand.rows());
        let most_ms = self.target_ms.unwrap_or(TO_END_FACTOR * rows_ms);
        let tokens = (most_ms - rows_ms - self.part_ms(demand)) / self.token_ms(demand);
        // In range: clamped between 0 and a u32.
        tokens.clamp(0.0, f64::from(nearly_read.min(self.max_prefill_tokens))) as u32
    }

    /// How long a step may take.
    pub(crate) fn target_ms(&self, demand: &Demand) -> f64 {
        let factor = AUTO_STEP_FACTOR.max(1.0 + f64::from(demand.prompts) / f64::from(demand.decode_rows.max(1)));
        let auto = factor * self.cost.step_ms(demand.rows());
        self.target_ms.unwrap_or(auto.clamp(AUTO_STEP_MIN_MS, AUTO_STEP_MAX_MS))
    }

    /// Sets the estimate, for tests in which the time that steps take must not decide.
    #[cfg(test)]
    pub(crate) fn cost_is(&mut self, cost: StepCost) {
        self.cost = cost;
    }

    /// The estimate, for what else depends on it.
    pub(crate) fn cost(&self) -> StepCost {
        self.cost
    }

    /// What prompts take whatever their tokens.
    fn part_ms(&self, demand: &Demand) -> f64 {
        self.cost.fixed_ms * f64::from(demand.prompt_parts) + self.cost.per_kilocell_ms * demand.part_kilocells
    }

    /// What a token of a prompt takes, where prompts are.
    fn token_ms(&self, demand: &Demand) -> f64 {
        self.cost.per_prefill_token_ms + demand.token_kilocells * self.cost.per_kilocell_ms
    }

    /// Multiplies each cost so that the logarithm of the step's time changes by `correction`, to first order, with the
    /// least change to the logarithms of the costs.
    fn correct(&mut self, work: StepWork, expected_ms: f64, correction: f64) {
        let rows = f64::from(work.decode_rows);
        let StepCost { fixed_ms, per_decode_row_ms, per_prefill_token_ms, per_kilocell_ms } = &mut self.cost;
        let extra = |row: f64, token: f64| (row - token).max(token * LEAST_ROW_EXTRA);
        let mut row_extra_ms = extra(*per_decode_row_ms, *per_prefill_token_ms);
        // Short sequences say nothing about cells.
        let tells = per_kilocell_ms.max(self.warm_kilocell_ms) * work.kilocells >= CELLS_TELL * expected_ms;
        let kilocells = if tells { work.kilocells } else { 0.0 };
        let cells_blame = if work.prefill_tokens > 0 { CELLS_BLAME } else { 1.0 };
        // Of each cost how often it is in the step, the least part of it that it is blamed for, and how likely it is wrong.
        let costs = [
            (fixed_ms, work.parts(), LEAST_BLAME, 1.0),
            (&mut row_extra_ms, rows + f64::from(work.scored_tokens), LEAST_BLAME, 1.0),
            (&mut *per_prefill_token_ms, rows + f64::from(work.prefill_tokens), LEAST_BLAME, 1.0),
            (per_kilocell_ms, kilocells, self.warm_kilocell_ms * kilocells / expected_ms, cells_blame),
        ];
        let parts = costs.map(|(cost, count, least, weight)| {
            let part = if count > 0.0 { (*cost * count / expected_ms).max(least) } else { 0.0 };
            (cost, part, weight)
        });
        let all: f64 = parts.iter().map(|(_, part, weight)| weight * part * part).sum();
        for (cost, part, weight) in parts {
            *cost = (*cost * (correction * weight * part / all).exp()).clamp(LEAST_COST_MS, LONGEST_STEP_MS);
        }
        let row_ms = *per_prefill_token_ms + row_extra_ms.max(*per_prefill_token_ms * LEAST_ROW_EXTRA);
        *per_decode_row_ms = row_ms.min(LONGEST_STEP_MS);
    }
}

#[cfg(test)]
#[path = "budget_tests.rs"]
mod tests;

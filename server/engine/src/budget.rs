//! How many prompt tokens fit in a step, learnt from what steps cost on this machine.
//!
//! A step's time is taken as `fixed + per_decode_row * rows + per_prefill_token * tokens`. Flow: after each step
//! [`StepBudget::observe`] → before the next [`StepBudget::prefill_tokens`], so many that the step ends near its target.
//!
//! The three costs are followed by a Kalman filter whose state drifts: each step they may change by [`DRIFT`] of their
//! value, and a measurement is trusted to [`NOISE`] of its. Decayed least squares would do for a machine that sees every
//! kind of step all the time; but steps without prompts for a minute, or always the same number of rows, make its
//! equations singular and its covariance grow without end. The filter keeps what it knew of a cost that the present steps
//! say nothing about, and only the doubt about it grows, to a bound. The doubt is used: a cost is taken at one standard
//! deviation above its estimate, so prompts come back carefully after a pause.
//!
//! Costs are never negative. A step that took [`OUTLIER_FACTOR`] times what was expected is a paused machine and changes
//! nothing, unless [`OUTLIERS_IN_A_ROW`] come one after the other: then the machine has become slow, and all costs with it.
//!
//! Absent: clocks (times are handed in), and what depends on the length of a sequence: its growth is drift.

use std::time::Duration;

/// What a step may take without [`EngineConfig::step_ms_target`](crate::EngineConfig::step_ms_target), as a multiple of
/// what the decoding rows alone take.
pub(crate) const AUTO_STEP_FACTOR: f64 = 2.5;
/// The least that such a target is: below it, prompts get too little for a gain that nobody sees.
pub(crate) const AUTO_STEP_MIN_MS: f64 = 20.0;
/// The most that such a target is: above it, a stream visibly stalls.
pub(crate) const AUTO_STEP_MAX_MS: f64 = 250.0;
/// Prompts get so many tokens in a step even where the target has no room for them, so that they go on.
pub(crate) const MIN_PREFILL_TOKENS: u32 = 8;
/// How much a cost may change from step to step, as a part of itself.
const DRIFT: f64 = 0.02;
/// How far a step's time is from what its costs explain, as a part of itself.
const NOISE: f64 = 0.1;
/// The doubt about a cost is at most this part of it, above its floor.
const MAX_DOUBT: f64 = 0.5;
/// The doubt about a cost that may always remain, in ms: what lets one rise from 0.
const DOUBT_FLOOR_MS: [f64; COSTS] = [0.5, 0.02, 0.005];
/// Before anything is measured: the costs of some CPU, and as much doubt.
const FIRST_GUESS_MS: [f64; COSTS] = [20.0, 2.0, 2.0];
/// A step this many times as long as expected says nothing about its costs.
const OUTLIER_FACTOR: f64 = 3.0;
/// So many such steps in a row do.
const OUTLIERS_IN_A_ROW: u32 = 3;
/// Steps shorter than this are taken as this long: it bounds the weight of one.
const SHORTEST_STEP_MS: f64 = 0.05;
/// Steps longer than this are taken as this long.
const LONGEST_STEP_MS: f64 = 60_000.0;
const COSTS: usize = 3;

/// What a step costs, in ms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StepCost {
    pub(crate) fixed_ms: f64,
    pub(crate) per_decode_row_ms: f64,
    pub(crate) per_prefill_token_ms: f64,
}

impl StepCost {
    pub(crate) fn step_ms(&self, decode_rows: u32, prefill_tokens: u32) -> f64 {
        self.fixed_ms
            + self.per_decode_row_ms * f64::from(decode_rows)
            + self.per_prefill_token_ms * f64::from(prefill_tokens)
    }
}

/// The learnt costs and the target.
#[derive(Clone, Debug)]
pub(crate) struct StepBudget {
    target_ms: Option<f64>,
    max_prefill_tokens: u32,
    costs: [f64; COSTS],
    covariance: [[f64; COSTS]; COSTS],
    outliers: u32,
    /// The least, over the outliers in a row, of what a step took to what was expected.
    outlier_ratio: f64,
}

impl StepBudget {
    /// `target_ms` is the configuration's; `max_prefill_tokens` is the most that any step gives to prompts.
    pub(crate) fn new(target_ms: Option<u32>, max_prefill_tokens: u32) -> Self {
        let mut covariance = [[0.0; COSTS]; COSTS];
        for (i, row) in covariance.iter_mut().enumerate() {
            row[i] = FIRST_GUESS_MS[i].powi(2);
        }
        Self {
            target_ms: target_ms.map(f64::from),
            max_prefill_tokens,
            costs: FIRST_GUESS_MS,
            covariance,
            outliers: 0,
            outlier_ratio: f64::INFINITY,
        }
    }

    /// Learns from a step: `decode_rows` are the tokens of sequences that generate, drafts included.
    pub(crate) fn observe(&mut self, decode_rows: u32, prefill_tokens: u32, took: Duration) {
        if decode_rows == 0 && prefill_tokens == 0 {
            return;
        }
        let took_ms = (took.as_secs_f64() * 1e3).clamp(SHORTEST_STEP_MS, LONGEST_STEP_MS);
        let expected_ms = self.cost().step_ms(decode_rows, prefill_tokens).max(SHORTEST_STEP_MS);
        let ratio = took_ms / expected_ms;
        if ratio > OUTLIER_FACTOR && !self.was_in_doubt(decode_rows, prefill_tokens, took_ms - expected_ms) {
            self.outliers += 1;
            self.outlier_ratio = self.outlier_ratio.min(ratio);
            if self.outliers < OUTLIERS_IN_A_ROW {
                return;
            }
            self.slow_down(self.outlier_ratio);
        }
        self.outliers = 0;
        self.outlier_ratio = f64::INFINITY;
        self.drift();
        self.correct([1.0, f64::from(decode_rows), f64::from(prefill_tokens)], took_ms);
    }

    /// Tokens for prompts beside so many decoding rows; without any, the most there is.
    pub(crate) fn prefill_tokens(&self, decode_rows: u32) -> u32 {
        if decode_rows == 0 {
            return self.max_prefill_tokens;
        }
        let room_ms = self.target_ms(decode_rows) - self.cost().step_ms(decode_rows, 0);
        let per_token_ms = self.costs[2] + self.covariance[2][2].sqrt();
        let tokens = (room_ms / per_token_ms).clamp(0.0, f64::from(self.max_prefill_tokens));
        // In range: clamped between 0 and a u32.
        (tokens as u32).max(MIN_PREFILL_TOKENS.min(self.max_prefill_tokens))
    }

    /// How long a step with so many decoding rows may take.
    pub(crate) fn target_ms(&self, decode_rows: u32) -> f64 {
        let auto = AUTO_STEP_FACTOR * self.cost().step_ms(decode_rows, 0);
        self.target_ms.unwrap_or(auto.clamp(AUTO_STEP_MIN_MS, AUTO_STEP_MAX_MS))
    }

    /// The estimate, for what else depends on it.
    pub(crate) fn cost(&self) -> StepCost {
        let [fixed_ms, per_decode_row_ms, per_prefill_token_ms] = self.costs;
        StepCost { fixed_ms, per_decode_row_ms, per_prefill_token_ms }
    }

    /// Whether so large an error is within two standard deviations of what was known.
    fn was_in_doubt(&self, decode_rows: u32, prefill_tokens: u32, error_ms: f64) -> bool {
        let x = [1.0, f64::from(decode_rows), f64::from(prefill_tokens)];
        error_ms.powi(2) <= 4.0 * dot(&x, &self.times(&x))
    }

    /// The machine became slower as a whole.
    fn slow_down(&mut self, ratio: f64) {
        for cost in &mut self.costs {
            *cost *= ratio;
        }
        for i in 0..COSTS {
            for j in 0..COSTS {
                self.covariance[i][j] = if i == j { self.most_doubt(i).powi(2) } else { 0.0 };
            }
        }
    }

    /// A step passes: the costs may have changed.
    fn drift(&mut self) {
        for i in 0..COSTS {
            self.covariance[i][i] += (DRIFT * (self.costs[i] + DOUBT_FLOOR_MS[i])).powi(2);
            let (doubt, most) = (self.covariance[i][i].sqrt(), self.most_doubt(i).max(0.0));
            // The first guess is in doubt by more than that until steps say something about it.
            if doubt > most && self.covariance[i][i] < FIRST_GUESS_MS[i].powi(2) {
                // Scaling a row and its column keeps a covariance one.
                for j in 0..COSTS {
                    self.covariance[i][j] *= most / doubt;
                    self.covariance[j][i] *= most / doubt;
                }
            }
        }
    }

    fn most_doubt(&self, i: usize) -> f64 {
        MAX_DOUBT * self.costs[i] + DOUBT_FLOOR_MS[i]
    }

    /// The measurement, then the nearest costs that are not negative.
    fn correct(&mut self, x: [f64; COSTS], took_ms: f64) {
        let px = self.times(&x);
        let expected: f64 = dot(&x, &self.costs);
        let variance = dot(&x, &px) + (NOISE * took_ms.max(expected)).powi(2);
        for i in 0..COSTS {
            self.costs[i] += px[i] / variance * (took_ms - expected);
            for j in 0..COSTS {
                self.covariance[i][j] -= px[i] * px[j] / variance;
            }
        }
        // One that is set to 0 moves the others as far as they hang together, which may make another negative.
        for _ in 0..COSTS {
            let Some(i) = (0..COSTS).find(|&i| self.costs[i] < 0.0) else { break };
            let by = self.costs[i] / self.covariance[i][i].max(f64::MIN_POSITIVE);
            for j in 0..COSTS {
                self.costs[j] -= self.covariance[j][i] * by;
            }
            self.costs[i] = 0.0;
        }
        for i in 0..COSTS {
            self.costs[i] = self.costs[i].max(0.0);
            self.covariance[i][i] = self.covariance[i][i].max(f64::MIN_POSITIVE);
        }
    }

    fn times(&self, x: &[f64; COSTS]) -> [f64; COSTS] {
        self.covariance.map(|row| dot(&row, x))
    }
}

fn dot(a: &[f64; COSTS], b: &[f64; COSTS]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
#[path = "budget_tests.rs"]
mod tests;

//! Figures from many durations.

use std::time::Duration;

use serde::Serialize;

/// How a number of durations is spread, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Default)]
pub struct Spread {
    /// How many.
    pub count: usize,
    /// Half are shorter.
    pub p50_ms: f64,
    /// 95 of 100 are shorter.
    pub p95_ms: f64,
    /// 99 of 100 are shorter.
    pub p99_ms: f64,
    /// The longest.
    pub max_ms: f64,
}

impl Spread {
    /// The figures of `durations`; all zero when there are none.
    pub fn of(durations: impl IntoIterator<Item = Duration>) -> Self {
        let mut sorted: Vec<Duration> = durations.into_iter().collect();
        sorted.sort_unstable();
        Self {
            count: sorted.len(),
            p50_ms: percentile_ms(&sorted, 50),
            p95_ms: percentile_ms(&sorted, 95),
            p99_ms: percentile_ms(&sorted, 99),
            max_ms: percentile_ms(&sorted, 100),
        }
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { p50_ms, p95_ms, p99_ms, max_ms, .. } = self;
        write!(f, "p50 {p50_ms:.0} ms, p95 {p95_ms:.0} ms, p99 {p99_ms:.0} ms, max {max_ms:.0} ms")
    }
}

/// The nearest-rank percentile.
fn percentile_ms(sorted: &[Duration], percent: usize) -> f64 {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).map_or(0.0, |value| value.as_secs_f64() * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let spread = Spread::of((1..=200).rev().map(Duration::from_millis));
        assert_eq!(
            (spread.count, spread.p50_ms, spread.p95_ms, spread.p99_ms, spread.max_ms),
            (200, 100.0, 190.0, 198.0, 200.0)
        );
        assert_eq!(Spread::of([]), Spread::default());
        assert_eq!(Spread::of([Duration::from_millis(7)]).p50_ms, 7.0);
    }
}

//! Figures from many samples.

use serde::{Deserialize, Serialize};

/// The shares of samples at which a distribution is kept, in percent.
pub const KEPT_PERCENTS: [f64; 19] =
    [0.0, 1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 97.0, 98.0, 99.0, 99.5, 99.9, 100.0];

/// The sample below or at which `percent` of them are (nearest rank); `None` when there are none.
#[must_use]
pub fn percentile(sorted: &[f64], percent: f64) -> Option<f64> {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
    let rank = (percent / 100.0 * sorted.len() as f64).ceil().max(1.0) as usize;
    sorted.get(rank.min(sorted.len()).checked_sub(1)?).copied()
}

/// The samples in order.
#[must_use]
pub fn sorted(samples: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let mut sorted: Vec<f64> = samples.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// The middle sample, or the mean of the two in the middle.
#[must_use]
pub fn median(samples: impl IntoIterator<Item = f64>) -> Option<f64> {
    let sorted = sorted(samples);
    let upper = *sorted.get(sorted.len() / 2)?;
    Some(if sorted.len() % 2 == 1 { upper } else { f64::midpoint(sorted[sorted.len() / 2 - 1], upper) })
}

/// A distribution, as its values at [`KEPT_PERCENTS`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Distribution {
    /// How many samples there were.
    pub count: usize,
    /// Pairs of a percentage and the value at it, ascending.
    pub points: Vec<(f64, f64)>,
}

impl Distribution {
    /// Of these samples.
    pub fn of(samples: impl IntoIterator<Item = f64>) -> Self {
        let sorted = sorted(samples);
        let points = KEPT_PERCENTS.iter().filter_map(|&p| Some((p, percentile(&sorted, p)?))).collect();
        Self { count: sorted.len(), points }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let values = sorted((1..=200).rev().map(f64::from));
        let at = |percent| percentile(&values, percent).unwrap();
        assert_eq!((at(0.0), at(50.0), at(99.0), at(99.9), at(100.0)), (1.0, 100.0, 198.0, 200.0, 200.0));
        assert_eq!(percentile(&[], 50.0), None);
        assert_eq!(percentile(&[7.0], 0.0), Some(7.0));
    }

    #[test]
    fn the_median_of_an_even_number_lies_between() {
        assert_eq!(median([4.0, 1.0, 3.0]), Some(3.0));
        assert_eq!(median([4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median([]), None);
    }

    #[test]
    fn a_distribution_ascends() {
        let distribution = Distribution::of([3.0, 1.0, 2.0]);
        assert_eq!((distribution.count, distribution.points.len()), (3, KEPT_PERCENTS.len()));
        assert!(distribution.points.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1));
        assert_eq!(Distribution::of([]), Distribution::default());
    }
}

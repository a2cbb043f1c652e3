//! Whether what a model computed are numbers.
//!
//! A weight, a norm or a rope parameter that is NaN makes everything NaN that is computed with it: each logit, and what the
//! KV cache keeps. A load and a probe look at whole rows ([`is_sound`]); a step, which has no time for that, asks only whether
//! a row has any number at all ([`is_lost`]), which one look answers as long as all is well.

/// Why a model that loads is of no use, or a request has no answer.
pub(crate) const NOT_FINITE: &str = "what it computes is not finite (NaN or infinite)";

/// Logits that lie so close together are the same: the likeliest token is a millionth likelier than the least likely one. In
/// a model that was trained they lie ten and more apart.
const MAX_EVEN_SPREAD: f32 = 1e-6;

/// No number came of a computation, or none that is finite.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoNumbers {
    /// Nothing was computed, for this reason.
    #[error("{0}")]
    Failed(String),
    /// See the module.
    #[error("{NOT_FINITE}")]
    NotFinite,
    /// The same number for every token ([`is_even`]).
    #[error("what it computes is the same for every token of its vocabulary")]
    Even,
}

/// A model is of no use: which, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WarmUpError {
    Model(NoNumbers),
    Draft(NoNumbers),
}

impl From<NoNumbers> for WarmUpError {
    fn from(error: NoNumbers) -> Self {
        Self::Model(error)
    }
}

/// Whether each logit of a row is a number or says that its token is impossible, which negative infinity does, and at
/// least one is a number.
pub(crate) fn is_sound(row: &[f32]) -> bool {
    let can_be = |x: &f32| !x.is_nan() && *x < f32::INFINITY;
    row.iter().all(can_be) && !is_lost(row)
}

/// Whether a row says nothing: no token is likelier than another, beyond what rounding makes of it.
pub(crate) fn is_even(row: &[f32]) -> bool {
    let numbers = || row.iter().copied().filter(|x| x.is_finite());
    let (least, most) = (numbers().fold(f32::INFINITY, f32::min), numbers().fold(f32::NEG_INFINITY, f32::max));
    row.len() > 1 && most - least < MAX_EVEN_SPREAD
}

/// Whether a row has no number, so that no token can be chosen from it.
pub(crate) fn is_lost(row: &[f32]) -> bool {
    !row.iter().any(|x| x.is_finite())
}

/// Whether a vector can be sent to anyone.
pub(crate) fn is_vector(vector: &[f32]) -> bool {
    !vector.is_empty() && vector.iter().all(|x| x.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_sound_if_it_has_numbers_and_nothing_but_what_can_be_beside_them() {
        const NAN: f32 = f32::NAN;
        const INF: f32 = f32::INFINITY;
        for (row, sound, lost) in [
            (&[1.0, -2.0][..], true, false),
            (&[-INF, 0.0], true, false),
            (&[NAN, 0.0], false, false),
            (&[INF, 0.0], false, false),
            (&[NAN, NAN], false, true),
            (&[-INF, -INF], false, true),
            (&[NAN, INF], false, true),
            (&[], false, true),
        ] {
            assert_eq!((is_sound(row), is_lost(row)), (sound, lost), "{row:?}");
        }
        for (row, even) in [
            (&[0.0, 0.0, 0.0][..], true),
            (&[-3.5, -f32::INFINITY, -3.5], true),
            (&[1e-8, -1e-8, 0.0], true),
            (&[0.0, 1e-3], false),
            (&[7.0], false),
            (&[], false),
        ] {
            assert_eq!(is_even(row), even, "{row:?}");
        }
        assert!(is_vector(&[0.5]) && !is_vector(&[]) && !is_vector(&[0.5, NAN]) && !is_vector(&[-INF]));
    }
}

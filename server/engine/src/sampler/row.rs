//! A row of logits, read where it stands: the scans that sampling needs, written so that they vectorise.
//!
//! Penalties and biases change a few logits of many: they stand in a list beside the row, and only the blocks that they
//! fall into are copied. Logits that are not finite are never chosen.

use crate::backend::Token;

/// Logits read at a time. A power of two, small enough to sum in single precision.
const BLOCK: usize = 256;
/// Accumulators of a scan, so that it needs no order between neighbours.
const LANES: usize = 16;

/// A token and its logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub(super) token: Token,
    pub(super) logit: f32,
}

/// The likelier first; equal logits rank by token.
pub(super) fn by_rank(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}

/// Buffers that live from row to row.
#[derive(Clone, Debug, Default)]
pub(super) struct Scratch {
    /// One number for each block.
    maxima: Vec<f32>,
    order: Vec<f32>,
    sums: Vec<f64>,
}

/// Logits with a few of them changed.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    logits: &'a [f32],
    /// In the order of their tokens, each of the row.
    changes: &'a [Candidate],
}

/// What is not finite counts as impossible.
fn finite(logit: f32) -> f32 {
    if logit.abs() <= f32::MAX { logit } else { f32::NEG_INFINITY }
}

/// `e^x` for `x` up to 0, to 2e-7 of the value; 0 where that has no normal number. Cephes' polynomial, without branches.
fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0;
    const LOWEST: f32 = -87.0;
    let clamped = if x > LOWEST { x } else { LOWEST };
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
    let rounded = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = clamped - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let power = f32::from_bits(rounded.to_bits().wrapping_add(127) << 23);
    let value = (p * r * r + r + 1.0) * power;
    if x > LOWEST { value } else { 0.0 }
}

fn max_of(block: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = block.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            let logit = finite(logit);
            *lane = if logit > *lane { logit } else { *lane };
        }
    }
    let rest = rest.iter().map(|&logit| finite(logit));
    lanes.into_iter().chain(rest).fold(f32::NEG_INFINITY, f32::max)
}

fn weight(logit: f32, best: f32, inverse_temperature: f32) -> f32 {
    exp((finite(logit) - best) * inverse_temperature)
}

fn sum_of(block: &[f32], best: f32, inverse_temperature: f32) -> f64 {
    let mut lanes = [0.0_f32; LANES];
    let (chunks, rest) = block.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane += weight(logit, best, inverse_temperature);
        }
    }
    let rest = rest.iter().map(|&logit| weight(logit, best, inverse_temperature));
    lanes.into_iter().chain(rest).map(f64::from).sum()
}

impl<'a> Row<'a> {
    pub(super) fn new(logits: &'a [f32], changes: &'a [Candidate]) -> Self {
        Self { logits, changes }
    }

    fn blocks(&self) -> usize {
        self.logits.len().div_ceil(BLOCK)
    }

    /// One block, changes made. `changes` are those not yet used; blocks are asked for in order.
    fn block<'b>(&self, at: usize, changes: &mut &[Candidate], buffer: &'b mut [f32; BLOCK]) -> &'b [f32]
    where
        'a: 'b,
    {
        let start = at * BLOCK;
        let end = (start + BLOCK).min(self.logits.len());
        let block = &self.logits[start..end];
        let token_end = Token::try_from(end).unwrap_or(Token::MAX);
        if changes.first().is_none_or(|change| change.token >= token_end) {
            return block;
        }
        let buffer = &mut buffer[..block.len()];
        buffer.copy_from_slice(block);
        while let Some((change, rest)) = changes.split_first().filter(|(change, _)| change.token < token_end) {
            if let Some(logit) = usize::try_from(change.token).ok().and_then(|t| buffer.get_mut(t.checked_sub(start)?))
            {
                *logit = change.logit;
            }
            *changes = rest;
        }
        buffer
    }

    /// One block, whichever came before.
    fn block_at<'b>(&self, at: usize, buffer: &'b mut [f32; BLOCK]) -> &'b [f32]
    where
        'a: 'b,
    {
        let start = Token::try_from(at * BLOCK).unwrap_or(Token::MAX);
        let mut changes = &self.changes[self.changes.partition_point(|change| change.token < start)..];
        self.block(at, &mut changes, buffer)
    }

    /// The likeliest token.
    pub(super) fn argmax(&self) -> Option<Token> {
        let (mut best, mut best_at) = (f32::NEG_INFINITY, None);
        let (mut buffer, mut changes) = ([0.0; BLOCK], self.changes);
        for at in 0..self.blocks() {
            let max = max_of(self.block(at, &mut changes, &mut buffer));
            if max > best {
                (best, best_at) = (max, Some(at));
            }
        }
        let at = best_at?;
        let within = self.block_at(at, &mut buffer).iter().position(|&logit| logit == best)?;
        Token::try_from(at * BLOCK + within).ok()
    }

    /// The highest logit.
    pub(super) fn max(&self) -> f32 {
        let (mut buffer, mut changes) = ([0.0; BLOCK], self.changes);
        (0..self.blocks()).map(|at| max_of(self.block(at, &mut changes, &mut buffer))).fold(f32::NEG_INFINITY, f32::max)
    }

    /// The sum of the tokens' weights, that of the likeliest being 1.
    pub(super) fn total(&self, best: f32) -> f64 {
        let (mut buffer, mut changes) = ([0.0; BLOCK], self.changes);
        (0..self.blocks()).map(|at| sum_of(self.block(at, &mut changes, &mut buffer), best, 1.0)).sum()
    }

    /// The token at a share of the probability, from 0 up to 1, at a temperature.
    pub(super) fn draw(&self, temperature: f32, share: f64, scratch: &mut Scratch) -> Option<Token> {
        /// A temperature so low is greedy; its inverse stays finite.
        const LOWEST: f32 = 1e-30;
        let best = self.max();
        if best == f32::NEG_INFINITY {
            return None;
        }
        let inverse = 1.0 / temperature.max(LOWEST);
        let (mut buffer, mut changes) = ([0.0; BLOCK], self.changes);
        scratch.sums.clear();
        let mut total = 0.0;
        for at in 0..self.blocks() {
            total += sum_of(self.block(at, &mut changes, &mut buffer), best, inverse);
            scratch.sums.push(total);
        }
        let point = share * total;
        let at = scratch.sums.partition_point(|&sum| sum <= point).min(scratch.sums.len() - 1);
        let mut sum = if at == 0 { 0.0 } else { scratch.sums[at - 1] };
        let mut last = None;
        for (within, &logit) in self.block_at(at, &mut buffer).iter().enumerate() {
            let weight = weight(logit, best, inverse);
            if weight > 0.0 {
                last = Some(within);
                sum += f64::from(weight);
                if sum > point {
                    break;
                }
            }
        }
        Token::try_from(at * BLOCK + last?).ok()
    }

    /// Puts the `n` likeliest into `out`, the likeliest first.
    pub(super) fn likeliest(&self, n: usize, scratch: &mut Scratch, out: &mut Vec<Candidate>) {
        out.clear();
        let n = n.min(self.logits.len());
        if n == 0 {
            return;
        }
        // As many blocks as tokens are wanted have a token at or above this.
        let mut floor = f32::NEG_INFINITY;
        let (mut buffer, mut changes) = ([0.0; BLOCK], self.changes);
        scratch.maxima.clear();
        for at in 0..self.blocks() {
            scratch.maxima.push(max_of(self.block(at, &mut changes, &mut buffer)));
        }
        if n <= scratch.maxima.len() {
            scratch.order.clone_from(&scratch.maxima);
            floor = *scratch.order.select_nth_unstable_by(n - 1, |a, b| b.total_cmp(a)).1;
        }
        self.collect(floor, &scratch.maxima, out);
        if n < out.len() {
            out.select_nth_unstable_by(n - 1, by_rank);
            out.truncate(n);
        }
        out.sort_unstable_by(by_rank);
    }

    /// Puts all tokens with a finite logit of at least `floor` into `out`, the likeliest first.
    pub(super) fn at_least(&self, floor: f32, out: &mut Vec<Candidate>) {
        out.clear();
        self.collect(floor, &[], out);
        out.sort_unstable_by(by_rank);
    }

    /// `maxima` says what can be left out, where it is known.
    fn collect(&self, floor: f32, maxima: &[f32], out: &mut Vec<Candidate>) {
        let (mut buffer, mut changes) = ([0.0; BLOCK], self.changes);
        for at in 0..self.blocks() {
            let block = self.block(at, &mut changes, &mut buffer);
            let max = maxima.get(at).copied().unwrap_or_else(|| max_of(block));
            if max < floor || max == f32::NEG_INFINITY {
                continue;
            }
            let start = Token::try_from(at * BLOCK).unwrap_or(Token::MAX);
            out.extend(
                (start..)
                    .zip(block)
                    .filter(|(_, logit)| **logit >= floor && logit.is_finite())
                    .map(|(token, &logit)| Candidate { token, logit }),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn logit() -> impl Strategy<Value = f32> {
        prop_oneof![
            20 => -20.0_f32..20.0,
            4 => (-3_i8..3).prop_map(f32::from),
            1 => prop_oneof![Just(f32::NAN), Just(f32::INFINITY), Just(f32::NEG_INFINITY), Just(-1e30), Just(f32::MAX)],
        ]
    }

    proptest! {
        #[test]
        fn scans_equal_the_plain_ones(
            logits in proptest::collection::vec(logit(), 1..1500),
            changed in proptest::collection::btree_map(0_i32..1500, logit(), 0..40), n in 0_usize..700,
        ) {
            let changes: Vec<Candidate> = changed
                .iter()
                .filter(|(token, _)| (**token as usize) < logits.len())
                .map(|(&token, &logit)| Candidate { token, logit })
                .collect();
            let row = Row::new(&logits, &changes);
            let mut plain: Vec<f32> = logits.clone();
            changes.iter().for_each(|c| plain[c.token as usize] = c.logit);
            let mut all: Vec<Candidate> = (0..).zip(&plain).map(|(token, &logit)| Candidate { token, logit }).collect();
            all.retain(|c| c.logit.is_finite());
            all.sort_by(by_rank);
            prop_assert_eq!(row.argmax(), all.first().map(|c| c.token));
            let best = row.max();
            prop_assert_eq!(best, all.first().map_or(f32::NEG_INFINITY, |c| c.logit));
            let mut out = Vec::new();
            row.likeliest(n, &mut Scratch::default(), &mut out);
            prop_assert_eq!(&out, &all[..n.min(all.len())]);
            row.at_least(best - 2.0, &mut out);
            let near = all.iter().take_while(|c| c.logit >= best - 2.0).count();
            prop_assert_eq!(&out, &all[..near]);
            if let Some(first) = all.first() {
                let total: f64 = all.iter().map(|c| f64::from(c.logit - best).exp()).sum();
                prop_assert!((row.total(best) - total).abs() < 1e-5 * total);
                prop_assert_eq!(row.draw(1e-38, 0.5, &mut Scratch::default()).is_some(), true);
                prop_assert!(first.logit == best);
            } else {
                prop_assert_eq!(row.draw(1.0, 0.5, &mut Scratch::default()), None);
            }
        }

        #[test]
        fn the_exponential_is_one(x in -87.0_f32..0.0) {
            let want = f64::from(x).exp();
            prop_assert!((f64::from(exp(x)) - want).abs() < 3e-7 * want, "{} {}", exp(x), want);
            prop_assert_eq!((exp(-90.0), exp(f32::NEG_INFINITY), exp(f32::NAN), exp(0.0)), (0.0, 0.0, 0.0, 1.0));
        }
    }
}

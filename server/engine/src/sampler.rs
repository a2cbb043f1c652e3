//! Chooses the next token from a row of logits: top_k, top_p, min_p, temperature, draw, in llama.cpp's order.
//!
//! Greedy (temperature 0) reads the row once and copies nothing. Otherwise candidates are copied into a buffer that is
//! reused, and the row is never sorted as a whole: only as many of the likeliest as the truncations can keep. Equal
//! logits rank by token id, so a row and a seed decide the token. Absent: penalties, grammars, log-probabilities.

use std::cmp::Ordering;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::backend::Token;
use crate::params::GenerationParams;

/// The first guess at how many of the likeliest tokens `top_p` keeps; it grows fourfold until they suffice.
const TOP_P_FIRST_CANDIDATES: usize = 256;

/// Why no token could be chosen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SampleError {
    #[error("the model computed no finite logits")]
    NoFiniteLogits,
    #[error("sampling panicked; see the server's log")]
    Panicked,
}

impl From<SampleError> for crate::error::RequestError {
    fn from(e: SampleError) -> Self {
        Self::Internal(e.to_string())
    }
}

/// What was chosen.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sampled {
    pub(crate) token: Token,
    pub(crate) logprob: Option<crate::event::TokenLogprob>,
}
use SampleError::NoFiniteLogits;

#[derive(Clone, Copy, Debug, PartialEq)]
struct Candidate {
    token: Token,
    logit: f32,
}

/// The sampling state of one request.
#[derive(Debug)]
pub(crate) struct Sampler {
    temperature: f32,
    top_k: usize,
    top_p: f32,
    min_p: f32,
    banned: Vec<Token>,
    rng: StdRng,
    candidates: Vec<Candidate>,
    weights: Vec<f32>,
}

impl Sampler {
    /// A sampler for parameters that are valid; without a seed it takes a random one.
    pub(crate) fn new(params: &GenerationParams, _prompt: &[Token], end_tokens: &[Token]) -> Self {
        Self {
            banned: if params.ignore_eos { end_tokens.to_vec() } else { Vec::new() },
            temperature: params.temperature,
            top_k: usize::try_from(params.top_k).unwrap_or(0),
            top_p: params.top_p,
            min_p: params.min_p,
            rng: params.seed.map_or_else(StdRng::from_os_rng, StdRng::seed_from_u64),
            candidates: Vec::new(),
            weights: Vec::new(),
        }
    }

    pub(crate) fn sample(&mut self, logits: &[f32]) -> Result<Sampled, SampleError> {
        let banned = self.banned.clone();
        Ok(Sampled { token: self.choose(logits, &banned)?, logprob: None })
    }

    pub(crate) fn accept(&mut self, _token: Token) -> Result<(), SampleError> {
        Ok(())
    }

    pub(crate) fn is_trivial(&self) -> bool {
        self.temperature <= 0.0
    }

    /// Chooses a token; those in `banned` are never chosen.
    fn choose(&mut self, logits: &[f32], banned: &[Token]) -> Result<Token, SampleError> {
        if self.temperature <= 0.0 {
            return likeliest(logits, banned);
        }
        self.candidates.clear();
        self.candidates.extend(
            (0..)
                .zip(logits)
                .filter(|(token, logit)| logit.is_finite() && !banned.contains(token))
                .map(|(token, &logit)| Candidate { token, logit }),
        );
        if self.candidates.is_empty() {
            return Err(NoFiniteLogits);
        }
        self.truncate();
        self.draw()
    }

    /// Leaves the candidates that the truncations keep. They end up sorted whenever one of them is on, so that the draw
    /// does not depend on how they were selected.
    fn truncate(&mut self) {
        if self.top_k > 0 {
            let k = self.top_k.min(self.candidates.len());
            keep_likeliest(&mut self.candidates, k);
            self.candidates.truncate(k);
        }
        if self.top_p < 1.0 {
            self.truncate_top_p();
        }
        if self.min_p > 0.0 {
            let best = max_logit(&self.candidates);
            let floor = best + self.min_p.ln();
            self.candidates.retain(|c| c.logit >= floor);
        }
    }

    fn truncate_top_p(&mut self) {
        let best = max_logit(&self.candidates);
        let total: f32 = self.candidates.iter().map(|c| (c.logit - best).exp()).sum();
        let wanted = self.top_p * total;
        let mut n = TOP_P_FIRST_CANDIDATES.min(self.candidates.len());
        loop {
            keep_likeliest(&mut self.candidates, n);
            let mut mass = 0.0;
            let kept = self.candidates[..n].iter().position(|c| {
                mass += (c.logit - best).exp();
                mass >= wanted
            });
            if let Some(last) = kept {
                self.candidates.truncate(last + 1);
                return;
            }
            if n == self.candidates.len() {
                // Rounding kept the sum just below the share: nothing is cut.
                return;
            }
            n = n.saturating_mul(4).min(self.candidates.len());
        }
    }

    /// Draws by the softmax of the candidates at the temperature.
    fn draw(&mut self) -> Result<Token, SampleError> {
        let best = max_logit(&self.candidates);
        let mut total = 0.0;
        self.weights.clear();
        for candidate in &self.candidates {
            total += ((candidate.logit - best) / self.temperature).exp();
            self.weights.push(total);
        }
        let point = self.rng.random::<f32>() * total;
        let at = self.weights.partition_point(|&sum| sum <= point).min(self.candidates.len().saturating_sub(1));
        self.candidates.get(at).map(|c| c.token).ok_or(NoFiniteLogits)
    }
}

fn likeliest(logits: &[f32], banned: &[Token]) -> Result<Token, SampleError> {
    let mut best: Option<Candidate> = None;
    for (token, &logit) in (0..).zip(logits) {
        if best.is_none_or(|b| logit > b.logit) && logit.is_finite() && !banned.contains(&token) {
            best = Some(Candidate { token, logit });
        }
    }
    best.map(|b| b.token).ok_or(NoFiniteLogits)
}

fn max_logit(candidates: &[Candidate]) -> f32 {
    candidates.iter().map(|c| c.logit).fold(f32::NEG_INFINITY, f32::max)
}

fn by_rank(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}

/// Puts the `n` likeliest first, in order; the rest follows in any order.
fn keep_likeliest(candidates: &mut [Candidate], n: usize) {
    if n == 0 {
        return;
    }
    if n < candidates.len() {
        candidates.select_nth_unstable_by(n - 1, by_rank);
    }
    candidates[..n].sort_unstable_by(by_rank);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn params(temperature: f32, top_k: i32, top_p: f32, min_p: f32, seed: u64) -> GenerationParams {
        GenerationParams { temperature, top_k, top_p, min_p, seed: Some(seed), ..GenerationParams::default() }
    }

    fn kept(p: &GenerationParams, logits: &[f32]) -> Vec<Token> {
        let mut sampler = Sampler::new(p, &[], &[]);
        sampler.choose(logits, &[]).unwrap();
        let mut tokens: Vec<Token> = sampler.candidates.iter().map(|c| c.token).collect();
        tokens.sort_unstable();
        tokens
    }

    #[test]
    fn truncations_keep_the_set_they_name() {
        // Probabilities 0.5, 0.25, 0.15, 0.10 of tokens 2, 0, 3, 1.
        let logits = [0.25_f32.ln(), 0.10_f32.ln(), 0.5_f32.ln(), 0.15_f32.ln()];
        let cases: &[(GenerationParams, &[Token])] = &[
            (params(1.0, 0, 1.0, 0.0, 1), &[0, 1, 2, 3]),
            (params(1.0, 2, 1.0, 0.0, 1), &[0, 2]),
            (params(1.0, 9, 1.0, 0.0, 1), &[0, 1, 2, 3]),
            (params(1.0, -1, 1.0, 0.0, 1), &[0, 1, 2, 3]),
            (params(1.0, 0, 0.49, 0.0, 1), &[2]),
            (params(1.0, 0, 0.7, 0.0, 1), &[0, 2]),
            (params(1.0, 0, 0.8, 0.0, 1), &[0, 2, 3]),
            (params(1.0, 0, 1.0, 0.29, 1), &[0, 2, 3]),
            (params(1.0, 0, 1.0, 1.0, 1), &[2]),
            // top_p counts the mass that top_k left: 0.5 of 0.75 is two thirds.
            (params(1.0, 2, 0.6, 0.0, 1), &[2]),
            // The temperature comes after the truncations.
            (params(5.0, 0, 0.49, 0.0, 1), &[2]),
        ];
        for (p, want) in cases {
            assert_eq!(kept(p, &logits), *want, "{p:?}");
        }
    }

    #[test]
    fn ties_go_to_the_lower_id_and_nan_is_never_chosen() {
        let mut greedy = Sampler::new(&GenerationParams::greedy(1), &[], &[]);
        assert_eq!(greedy.choose(&[1.0, 3.0, 3.0], &[]), Ok(1));
        assert_eq!(greedy.choose(&[f32::NAN, 3.0, f32::INFINITY], &[]), Ok(1));
        assert_eq!(greedy.choose(&[1.0, 3.0, 2.0], &[1]), Ok(2));
        assert_eq!(greedy.choose(&[f32::NAN, f32::NEG_INFINITY], &[]), Err(NoFiniteLogits));
        let mut random = Sampler::new(&params(1.0, 1, 1.0, 0.0, 1), &[], &[]);
        assert_eq!(random.choose(&[3.0, f32::NAN, 3.0], &[]), Ok(0));
        assert_eq!(random.choose(&[3.0, 2.0], &[0, 1]), Err(NoFiniteLogits));
        assert_eq!(random.choose(&[], &[]), Err(NoFiniteLogits));
    }

    #[test]
    fn draws_follow_the_distribution_and_the_seed() {
        let logits = [0.7_f32.ln(), 0.2_f32.ln(), 0.1_f32.ln()];
        let draws = |seed| {
            let mut sampler = Sampler::new(&params(1.0, 0, 1.0, 0.0, seed), &[], &[]);
            (0..10_000).map(|_| sampler.choose(&logits, &[]).unwrap()).collect::<Vec<_>>()
        };
        let first = draws(7);
        assert_eq!(first, draws(7));
        assert_ne!(first, draws(8));
        let share = |token| first.iter().filter(|&&t| t == token).count();
        assert!((6_700..7_300).contains(&share(0)), "{}", share(0));
        assert!((1_800..2_200).contains(&share(1)), "{}", share(1));
    }

    proptest! {
        #[test]
        fn truncation_equals_sorting_everything(
            logits in proptest::collection::vec(-8.0_f32..8.0, 1..1200),
            top_k in 0_i32..1300, top_p in 0.01_f32..1.0, min_p in 0.0_f32..1.0,
        ) {
            let mut all: Vec<Candidate> = (0..).zip(&logits).map(|(token, &logit)| Candidate { token, logit }).collect();
            all.sort_by(by_rank);
            if top_k > 0 {
                all.truncate(usize::try_from(top_k).unwrap());
            }
            let best = all[0].logit;
            let total: f64 = all.iter().map(|c| f64::from(c.logit - best).exp()).sum();
            let mut mass = 0.0;
            let mut keep = all.len();
            for (i, c) in all.iter().enumerate() {
                mass += f64::from(c.logit - best).exp();
                // Within rounding either cut is right: leave such cases out.
                prop_assume!((mass / total - f64::from(top_p)).abs() > 1e-5);
                if mass / total >= f64::from(top_p) {
                    keep = i + 1;
                    break;
                }
            }
            all.truncate(keep);
            let floor = best + min_p.ln();
            all.retain(|c| min_p <= 0.0 || c.logit >= floor);
            let mut want: Vec<Token> = all.iter().map(|c| c.token).collect();
            want.sort_unstable();
            prop_assert_eq!(kept(&params(1.0, top_k, top_p, min_p, 3), &logits), want);
        }
    }
}

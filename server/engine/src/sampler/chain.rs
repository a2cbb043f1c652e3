//! The truncations, in llama.cpp's order: top_k, typical_p, top_p, min_p, xtc; then temperature and draw.
//!
//! The row is never sorted as a whole: only as many of the likeliest are taken out as the truncations can keep. Equal
//! logits rank by token, so that what is kept does not depend on how it was selected.

use super::row::{Candidate, Row, Scratch, by_rank};
use crate::backend::Token;
use crate::params::GenerationParams;

/// The first guess at how many of the likeliest tokens `top_p` keeps; it grows fourfold until they suffice.
const TOP_P_FIRST_CANDIDATES: usize = 256;
/// As llama.cpp: with a threshold above this, at most one token is likely enough, and XTC needs two.
const XTC_MAX_THRESHOLD: f32 = 0.5;

/// What narrows the choice.
#[derive(Clone, Debug)]
pub(super) struct Chain {
    pub(super) top_k: usize,
    typical_p: f32,
    top_p: f32,
    min_p: f32,
    xtc_probability: f32,
    xtc_threshold: f32,
    temperature: f32,
    candidates: Vec<Candidate>,
    weights: Vec<f64>,
}

impl Chain {
    pub(super) fn new(params: &GenerationParams) -> Self {
        Self {
            top_k: usize::try_from(params.top_k).unwrap_or(0),
            typical_p: params.typical_p,
            top_p: params.top_p,
            min_p: params.min_p,
            xtc_probability: if params.xtc_threshold > XTC_MAX_THRESHOLD { 0.0 } else { params.xtc_probability },
            xtc_threshold: params.xtc_threshold,
            temperature: params.temperature,
            candidates: Vec::new(),
            weights: Vec::new(),
        }
    }

    /// Whether every token stays in the choice.
    pub(super) fn is_empty(&self) -> bool {
        self.top_k == 0
            && self.typical_p >= 1.0
            && self.top_p >= 1.0
            && self.min_p <= 0.0
            && self.xtc_probability <= 0.0
    }

    /// Narrows the choice and draws. `share` places the draw, `xtc_share` decides whether XTC acts; both are from 0 up to
    /// 1.
    pub(super) fn choose(&mut self, row: Row<'_>, share: f64, xtc_share: f64, scratch: &mut Scratch) -> Option<Token> {
        self.narrow(row, xtc_share, scratch);
        self.draw(share)
    }

    /// Leaves in `candidates` what stays in the choice, the likeliest first.
    fn narrow(&mut self, row: Row<'_>, xtc_share: f64, scratch: &mut Scratch) {
        if self.top_k > 0 {
            row.likeliest(self.top_k, scratch, &mut self.candidates);
            self.typical();
            self.top_p();
        } else if self.typical_p < 1.0 {
            row.at_least(f32::NEG_INFINITY, &mut self.candidates);
            self.typical();
            self.top_p();
        } else if self.top_p < 1.0 {
            self.top_p_of_row(row, scratch);
        } else if self.min_p > 0.0 {
            row.at_least(row.max() + self.min_p.ln(), &mut self.candidates);
        } else {
            row.at_least(f32::NEG_INFINITY, &mut self.candidates);
        }
        self.min_p();
        self.xtc(xtc_share);
    }

    fn best(&self) -> f32 {
        self.candidates.first().map_or(f32::NEG_INFINITY, |c| c.logit)
    }

    /// Fills `weights` with the candidates' weights (not yet probabilities) and gives their sum.
    fn weigh(&mut self) -> f64 {
        let best = self.best();
        self.weights.clear();
        self.weights.extend(self.candidates.iter().map(|c| f64::from(c.logit - best).exp()));
        self.weights.iter().sum()
    }

    /// Keeps those whose information is nearest to the expected, until their probabilities exceed `typical_p`.
    fn typical(&mut self) {
        if self.typical_p >= 1.0 || self.candidates.is_empty() {
            return;
        }
        let total = self.weigh();
        let information = |weight: f64| -(weight / total).max(f64::MIN_POSITIVE).ln();
        let entropy: f64 = self.weights.iter().map(|&w| w / total * information(w)).sum();
        let mut order: Vec<(f64, usize)> =
            self.weights.iter().enumerate().map(|(i, &w)| ((information(w) - entropy).abs(), i)).collect();
        order.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let mut mass = 0.0;
        let last = order.iter().position(|&(_, i)| {
            mass += self.weights[i] / total;
            mass > f64::from(self.typical_p)
        });
        order.truncate(last.map_or(order.len(), |last| last + 1));
        let kept: Vec<Candidate> = order.iter().map(|&(_, i)| self.candidates[i]).collect();
        self.candidates = kept;
        self.candidates.sort_unstable_by(by_rank);
    }

    /// Keeps the likeliest whose probabilities reach `top_p` together.
    fn top_p(&mut self) {
        if self.top_p >= 1.0 {
            return;
        }
        let wanted = f64::from(self.top_p) * self.weigh();
        let mut mass = 0.0;
        let last = self.weights.iter().position(|w| {
            mass += w;
            mass >= wanted
        });
        self.candidates.truncate(last.map_or(usize::MAX, |last| last + 1));
    }

    /// As [`Self::top_p`], of the whole row.
    fn top_p_of_row(&mut self, row: Row<'_>, scratch: &mut Scratch) {
        let best = row.max();
        let wanted = f64::from(self.top_p) * row.total(best);
        let mut n = TOP_P_FIRST_CANDIDATES;
        loop {
            row.likeliest(n, scratch, &mut self.candidates);
            let mut mass = 0.0;
            let last = self.candidates.iter().position(|c| {
                mass += f64::from(c.logit - best).exp();
                mass >= wanted
            });
            if last.is_some() || self.candidates.len() < n {
                // Rounding can keep the sum just below the share: nothing is cut then.
                self.candidates.truncate(last.map_or(usize::MAX, |last| last + 1));
                return;
            }
            n = n.saturating_mul(4);
        }
    }

    /// Drops what is less likely than a share of the likeliest.
    fn min_p(&mut self) {
        if self.min_p > 0.0 {
            let floor = self.best() + self.min_p.ln();
            self.candidates.truncate(self.candidates.partition_point(|c| c.logit >= floor).max(1));
        }
    }

    /// Leaves out the likeliest of those above the threshold, but the last of them.
    fn xtc(&mut self, share: f64) {
        if self.xtc_probability <= 0.0 || self.candidates.len() < 2 || share > f64::from(self.xtc_probability) {
            return;
        }
        let threshold = f64::from(self.xtc_threshold) * self.weigh();
        let above = self.weights.partition_point(|&w| w >= threshold);
        self.candidates.drain(..above.saturating_sub(1));
    }

    /// Draws by the softmax of the candidates at the temperature.
    fn draw(&mut self, share: f64) -> Option<Token> {
        let best = self.best();
        let temperature = f64::from(self.temperature);
        let mut total = 0.0;
        self.weights.clear();
        for candidate in &self.candidates {
            total += (f64::from(candidate.logit - best) / temperature).exp();
            self.weights.push(total);
        }
        let at = self.weights.partition_point(|&sum| sum <= share * total);
        self.candidates.get(at.min(self.candidates.len().saturating_sub(1))).map(|c| c.token)
    }

    #[cfg(test)]
    pub(super) fn kept(&mut self, row: Row<'_>, xtc_share: f64) -> Vec<Candidate> {
        self.narrow(row, xtc_share, &mut Scratch::default());
        self.candidates.clone()
    }
}

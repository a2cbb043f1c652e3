//! What makes tokens less likely because they came before: repetition, frequency and presence penalties over the last
//! tokens, and DRY. Each touches only tokens that occurred; counts are kept as tokens come and go.

use std::collections::{BTreeMap, HashMap, VecDeque};

use gantry_llama::TokenTexts;

use super::row::Candidate;
use crate::backend::Token;
use crate::params::{DryParams, GenerationParams};

/// The longest rest of a breaker after the token in which it begins, in tokens: llama.cpp's limit.
const MAX_BREAKER_TAIL: usize = 20;
/// The logarithm of the largest `f32`: a penalty past it would be infinite.
const MAX_EXPONENT_LOG: f32 = 88.722_84;

/// How often each of the last tokens came.
#[derive(Clone, Debug)]
pub(super) struct Penalties {
    last_n: usize,
    repeat: f32,
    frequency: f32,
    presence: f32,
    window: VecDeque<Token>,
    counts: BTreeMap<Token, u32>,
}

impl Penalties {
    /// `None` when the parameters leave every logit as it is.
    pub(super) fn new(params: &GenerationParams, history: &[Token]) -> Option<Self> {
        let (repeat, frequency, presence) = (params.repeat_penalty, params.frequency_penalty, params.presence_penalty);
        let last_n = usize::try_from(params.repeat_last_n).unwrap_or(usize::MAX);
        #[allow(clippy::float_cmp)]
        let off = last_n == 0 || (repeat == 1.0 && frequency == 0.0 && presence == 0.0);
        let mut this = Self { last_n, repeat, frequency, presence, window: VecDeque::new(), counts: BTreeMap::new() };
        history.iter().skip(history.len().saturating_sub(last_n)).for_each(|&token| this.accept(token));
        (!off).then_some(this)
    }

    /// Tokens looked back at, at most.
    pub(super) fn last_n(&self) -> usize {
        self.last_n
    }

    pub(super) fn accept(&mut self, token: Token) {
        self.window.push_back(token);
        *self.counts.entry(token).or_default() += 1;
        if self.window.len() > self.last_n
            && let Some(old) = self.window.pop_front()
            && let Some(count) = self.counts.get_mut(&old)
        {
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&old);
            }
        }
    }

    pub(super) fn tokens(&self) -> impl Iterator<Item = Token> + '_ {
        self.counts.keys().copied()
    }

    /// What becomes of a token's logit: llama.cpp's formula.
    pub(super) fn apply(&self, candidate: &mut Candidate) {
        let Some(&count) = self.counts.get(&candidate.token) else { return };
        if candidate.logit <= 0.0 {
            candidate.logit *= self.repeat;
        } else {
            candidate.logit /= self.repeat;
        }
        candidate.logit -= count as f32 * self.frequency + self.presence;
    }
}

/// Tokens that end a repetition: for each the tokens that must follow it.
#[derive(Clone, Debug, Default)]
pub(super) struct Breakers(HashMap<Token, Vec<Vec<Token>>>);

impl Breakers {
    /// Finds the tokens in which each string can begin, and how it goes on, as llama.cpp does.
    pub(super) fn new(texts: &TokenTexts, strings: &[String]) -> Self {
        let mut found: HashMap<Token, Vec<Vec<Token>>> = HashMap::new();
        for string in strings {
            let bytes = string.as_bytes();
            // How the string goes on after so many of its bytes.
            let tail = |done: usize| {
                let mut tail = texts.tokenize(&String::from_utf8_lossy(&bytes[done..]));
                tail.truncate(MAX_BREAKER_TAIL);
                tail
            };
            let tails: Vec<Vec<Token>> = (0..bytes.len()).map(tail).collect();
            for token in (0..).take(texts.len()) {
                let text = texts.text(token);
                if text.windows(bytes.len()).any(|window| window == bytes) {
                    found.entry(token).or_default().push(Vec::new());
                    continue;
                }
                for shared in 1..bytes.len().min(text.len() + 1) {
                    if text.ends_with(&bytes[..shared]) {
                        let known = found.entry(token).or_default();
                        if !known.contains(&tails[shared]) {
                            known.push(tails[shared].clone());
                        }
                    }
                }
            }
        }
        Self(found)
    }

    #[cfg(test)]
    pub(super) fn of_tokens(tokens: &[Token]) -> Self {
        Self(tokens.iter().map(|&token| (token, vec![Vec::new()])).collect())
    }
}

/// The DRY penalty: a token that would go on with a repetition is the less likely the longer that is.
#[derive(Clone, Debug)]
pub(super) struct Dry {
    multiplier: f32,
    base: f32,
    allowed_length: usize,
    last_n: usize,
    breakers: Breakers,
    history: Vec<Token>,
    /// For each place before the last, from the end: how many tokens up to there equal the last ones.
    repeats: Vec<usize>,
}

impl Dry {
    /// `None` when the parameters turn it off.
    pub(super) fn new(params: &DryParams, breakers: Breakers, history: &[Token]) -> Option<Self> {
        let size = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
        (params.multiplier > 0.0).then(|| Self {
            multiplier: params.multiplier,
            base: params.base,
            allowed_length: size(params.allowed_length),
            last_n: if params.penalty_last_n == 0 { usize::MAX } else { size(params.penalty_last_n) },
            breakers,
            history: history.to_vec(),
            repeats: Vec::new(),
        })
    }

    pub(super) fn accept(&mut self, token: Token) {
        self.history.push(token);
    }

    /// How far back a repetition may reach: to the last breaker.
    fn limit(&self, last: &[Token]) -> usize {
        let from_end = |i: usize| last[last.len() - 1 - i];
        for i in 0..last.len() {
            let Some(tails) = self.breakers.0.get(&from_end(i)) else { continue };
            let follows = |tail: &&Vec<Token>| {
                tail.len() <= i && tail.iter().enumerate().all(|(offset, &token)| token == from_end(i - offset - 1))
            };
            if let Some(longest) = tails.iter().filter(follows).map(Vec::len).max() {
                return i - longest;
            }
        }
        last.len()
    }

    /// Adds each token that would go on with a repetition to `out`, with what its logit loses. The work is proportional
    /// to the tokens looked back at (the Z-algorithm, backwards).
    pub(super) fn penalties(&mut self, out: &mut HashMap<Token, f32>) {
        out.clear();
        let last = &self.history[self.history.len().saturating_sub(self.last_n)..];
        let n = last.len();
        let limit = self.limit(last);
        if n <= self.allowed_length || limit < self.allowed_length {
            return;
        }
        let from_end = |i: usize| last[n - 1 - i];
        let repeats = &mut self.repeats;
        repeats.clear();
        repeats.resize(n, 0);
        let mut longest: HashMap<Token, usize> = HashMap::new();
        // The stretch that is known to equal the end: up to `right`, seen from `left`.
        let (mut left, mut right) = (0, 0);
        for k in 1..n {
            let mut length = if k <= right { repeats[k - left].min(right - k + 1) } else { 0 };
            if k > right || length == right - k + 1 {
                while k + length < n && from_end(length) == from_end(k + length) {
                    length += 1;
                }
                if length > 0 {
                    (left, right) = (k, k + length - 1);
                }
            }
            repeats[k] = length;
            let counted = length.min(limit);
            if counted >= self.allowed_length {
                let known = longest.entry(from_end(k - 1)).or_default();
                *known = (*known).max(counted);
            }
        }
        let max_exponent = if self.base > 1.000_001 { (MAX_EXPONENT_LOG / self.base.ln()) as usize } else { 0 };
        for (token, length) in longest {
            if self.breakers.0.get(&token).is_some_and(|tails| tails.iter().any(Vec::is_empty)) {
                continue;
            }
            let mut exponent = length - self.allowed_length;
            if max_exponent > 0 {
                exponent = exponent.min(max_exponent);
            }
            out.insert(token, self.multiplier * self.base.powi(i32::try_from(exponent).unwrap_or(i32::MAX)));
        }
    }
}

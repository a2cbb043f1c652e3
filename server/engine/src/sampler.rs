//! Chooses the next token from a row of logits, in llama.cpp's order: logit_bias, penalties, DRY, top_k, typical_p,
//! top_p, min_p, XTC, temperature, draw.
//!
//! Greedy (temperature 0) and plain temperature read the row where it stands and copy nothing; the truncations of
//! greedy decoding are left out, because the likeliest token is always kept (typical_p and XTC, which may drop it, do
//! not act at temperature 0). What binds the answer is asked about the chosen token only; where it refuses, the row is masked
//! and the choice made again with a draw of its own.
//!
//! # Determinism
//! A draw is a function of the seed and the number of tokens accepted, not of how often was sampled. So the same seed,
//! history and row give the same token: alone or in a batch, with drafts or without, preempted or not. What does differ
//! is the row: kernels that split their sums by the batch's size (matrix products) or by the number of threads (flash
//! attention on a CPU, which adds up f16 in the order of the cells; texts that are embedded meanwhile take threads) move
//! logits by some tenths at most, can turn a near tie, and text differs from there.
//!
//! [`Sampler::sample`] changes no history; [`Sampler::accept`] does. To check drafts: sample at each row, accept what
//! was chosen, and stop at the first token that differs from the draft. Absent: mirostat, top-n-sigma, dynamic
//! temperature.

mod chain;
mod penalties;
mod row;
mod setup;

#[cfg(test)]
mod tests;

use std::collections::HashMap;

use self::chain::Chain;
use self::penalties::{Dry, Penalties};
use self::row::{Candidate, Row, Scratch};
pub(crate) use self::setup::{SamplerSetup, compile, constraint};
use crate::backend::Token;
use crate::binding::Binding;
use crate::error::RequestError;
use crate::grammars::ConstraintError;
use crate::params::GenerationParams;

/// Tokens that may stay in the choice, or be looked back at by the penalties, for a sample to be quick. To sort a whole
/// vocabulary takes as long as a step.
const MAX_TRIVIAL_CANDIDATES: usize = 256;

/// Why no token was chosen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SampleError {
    /// No logit is a number.
    #[error("the model computed no finite logits")]
    NothingToChoose,
    /// The form allows nothing but tokens that the parameter of this name bans.
    #[error("{0}: leaves no token that the form of the answer allows next; ask for less there, or loosen the form")]
    Banned(&'static str),
    /// The parameter of this name bans all tokens.
    #[error("{0}: leaves no token that may come next; ban fewer")]
    AllBanned(&'static str),
    /// No token of the vocabulary is of the form, which the parameter of this name asks for.
    #[error("{0}: no token of the model's vocabulary goes on with an answer of this form; loosen it")]
    DeadEnd(String),
    /// The grammar cannot be followed any further.
    #[error("{0}")]
    Constraint(#[from] ConstraintError),
}

impl SampleError {
    /// What the request is told.
    pub(crate) fn into_request_error(self) -> RequestError {
        match self {
            Self::NothingToChoose => RequestError::Internal(self.to_string()),
            Self::Banned(param) | Self::AllBanned(param) => {
                RequestError::invalid(param, "nothing_allowed", self.to_string())
            }
            Self::DeadEnd(ref param) => RequestError::invalid(param, "nothing_allowed", self.to_string()),
            Self::Constraint(error) => error.into_request_error(),
        }
    }
}

/// Log-probabilities under the model's own distribution: before biases, penalties, truncations and grammar.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Logprobs {
    /// That of the chosen token.
    pub(crate) chosen: f32,
    /// The likeliest tokens, the likeliest first; as many as were asked for.
    pub(crate) top: Vec<(Token, f32)>,
}

/// A choice.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sampled {
    pub(crate) token: Token,
    /// Where the parameters ask for them.
    pub(crate) logprobs: Option<Logprobs>,
}

/// The sampling state of one sequence.
#[derive(Clone, Debug)]
pub(crate) struct Sampler {
    temperature: f32,
    seed: u64,
    /// Tokens accepted since the prompt.
    accepted: u64,
    chain: Chain,
    /// In the order of their tokens, each once.
    biases: Vec<Candidate>,
    penalties: Option<Penalties>,
    dry: Option<Dry>,
    binding: Option<Binding>,
    /// What the client calls the form of the answer.
    form_param: String,
    end_tokens: Vec<Token>,
    /// Before so many tokens are accepted, none of `stop_tokens` and `end_tokens` is chosen.
    min_tokens: u64,
    stop_tokens: Vec<Token>,
    logprobs: Option<usize>,
    changes: Vec<Candidate>,
    dry_penalties: HashMap<Token, f32>,
    masked: Vec<f32>,
    likeliest: Vec<Candidate>,
    scratch: Scratch,
}

/// What a draw is for: each purpose has its own.
#[derive(Clone, Copy)]
enum Draw {
    Token,
    Xtc,
    TokenUnderGrammar,
    XtcUnderGrammar,
}

/// Whether the model computed anything to choose from.
fn has_finite(logits: &[f32]) -> bool {
    Row::new(logits, &[]).argmax().is_some()
}

impl Sampler {
    /// A sampler for parameters that are valid; without a seed it takes a random one. The penalties look back at the
    /// prompt too.
    pub(crate) fn new(params: &GenerationParams, prompt: &[Token], setup: SamplerSetup) -> Self {
        let mut biases: Vec<Candidate> =
            params.logit_bias.iter().map(|&(token, logit)| Candidate { token, logit }).collect();
        biases.extend(setup.banned.iter().map(|&token| Candidate { token, logit: f32::NEG_INFINITY }));
        biases.sort_by_key(|bias| bias.token);
        // Several biases of one token add up.
        biases.dedup_by(|later, first| {
            let same = later.token == first.token;
            if same {
                first.logit += later.logit;
            }
            same
        });
        Self {
            temperature: params.temperature,
            seed: params.seed.unwrap_or_else(rand::random),
            accepted: 0,
            chain: Chain::new(params),
            biases,
            penalties: Penalties::new(params, prompt),
            dry: Dry::new(&params.dry, setup.breakers, prompt),
            binding: setup.binding,
            form_param: if params.constraint.is_some() { params.constraint_param.clone() } else { "tools".to_owned() },
            end_tokens: setup.end_tokens,
            min_tokens: params.min_tokens.into(),
            stop_tokens: params.stop_tokens.clone(),
            logprobs: params.logprobs.map(|n| usize::try_from(n).unwrap_or(usize::MAX)),
            changes: Vec::new(),
            dry_penalties: HashMap::new(),
            masked: Vec::new(),
            likeliest: Vec::new(),
            scratch: Scratch::default(),
        }
    }

    /// Whether the next sample takes no longer than reading the row a few times, so that it may run on the engine's thread.
    pub(crate) fn is_trivial(&self) -> bool {
        let few = (1..=MAX_TRIVIAL_CANDIDATES).contains(&self.chain.top_k);
        let simple = self.temperature <= 0.0 || self.chain.is_empty() || few;
        let looks_back = self.penalties.as_ref().map_or(0, Penalties::last_n);
        simple
            && looks_back <= MAX_TRIVIAL_CANDIDATES
            && self.binding.as_ref().is_none_or(Binding::is_free)
            && self.dry.is_none()
            && self.logprobs.is_none()
    }

    /// Chooses a token from the row after the last one accepted.
    ///
    /// # Errors
    /// When there is nothing to choose from.
    pub(crate) fn sample(&mut self, logits: &[f32]) -> Result<Sampled, SampleError> {
        let token = match self.binding.take() {
            None => {
                let chosen = self.choose(logits, Draw::Token, Draw::Xtc);
                chosen.ok_or_else(|| self.nothing_left(logits, SampleError::AllBanned))?
            }
            Some(mut binding) => {
                let chosen = self.choose_bound(&mut binding, logits);
                self.binding = Some(binding);
                chosen?
            }
        };
        let logprobs = self.logprobs.map(|n| self.report(logits, token, n));
        Ok(Sampled { token, logprobs })
    }

    /// The token was chosen, or drafted and confirmed: histories and what binds the answer go on after it.
    ///
    /// # Errors
    /// When it is not allowed.
    pub(crate) fn accept(&mut self, token: Token) -> Result<(), SampleError> {
        if let Some(binding) = &mut self.binding {
            binding.accept(token)?;
        }
        if let Some(penalties) = &mut self.penalties {
            penalties.accept(token);
        }
        if let Some(dry) = &mut self.dry {
            dry.accept(token);
        }
        self.accepted += 1;
        Ok(())
    }

    fn choose_bound(&mut self, binding: &mut Binding, logits: &[f32]) -> Result<Token, SampleError> {
        if let Some(token) = binding.forced() {
            return Ok(token);
        }
        let free = self.choose(logits, Draw::Token, Draw::Xtc);
        if let Some(token) = free
            && binding.allows(token)?
        {
            return Ok(token);
        }
        let mut masked = std::mem::take(&mut self.masked);
        let applied = binding.apply(logits, &mut masked);
        let chosen = self.choose(&masked, Draw::TokenUnderGrammar, Draw::XtcUnderGrammar);
        let is_banned = chosen.is_none() && Row::new(&masked, &[]).argmax().is_some();
        self.masked = masked;
        applied?;
        if chosen.is_none() && free.is_some() && binding.give_up() {
            return free.ok_or(SampleError::NothingToChoose);
        }
        // Where the text is complete and cannot go on, its end comes even if end tokens are banned.
        let end = || self.end_tokens.first().copied().filter(|_| binding.is_complete());
        chosen.or_else(end).ok_or_else(|| match is_banned {
            true => self.nothing_left(logits, SampleError::Banned),
            false if has_finite(logits) => SampleError::DeadEnd(self.form_param.clone()),
            false => SampleError::NothingToChoose,
        })
    }

    /// Why nothing is left of a row in which something could be chosen, where the model computed one.
    fn nothing_left(&self, logits: &[f32], banned: fn(&'static str) -> SampleError) -> SampleError {
        match has_finite(logits) {
            true if self.accepted < self.min_tokens => banned("min_tokens"),
            true => banned("logit_bias"),
            false => SampleError::NothingToChoose,
        }
    }

    fn choose(&mut self, logits: &[f32], draw: Draw, xtc: Draw) -> Option<Token> {
        self.change(logits);
        let row = Row::new(logits, &self.changes);
        if self.temperature <= 0.0 {
            row.argmax()
        } else if self.chain.is_empty() {
            row.draw(self.temperature, share(self.seed, self.accepted, draw), &mut self.scratch)
        } else {
            let share = |of| share(self.seed, self.accepted, of);
            self.chain.choose(row, share(draw), share(xtc), &mut self.scratch)
        }
    }

    /// Lists the logits that biases and penalties change, and those of tokens that would end the answer too early.
    fn change(&mut self, logits: &[f32]) {
        self.changes.clear();
        if let Some(dry) = &mut self.dry {
            dry.penalties(&mut self.dry_penalties);
        }
        let biased = self.biases.iter().map(|bias| bias.token);
        let too_early: &[&[Token]] =
            if self.accepted < self.min_tokens { &[&self.end_tokens, &self.stop_tokens] } else { &[] };
        let too_early = || too_early.iter().copied().flatten().copied();
        let occurred = self.penalties.iter().flat_map(Penalties::tokens);
        let tokens = biased.chain(occurred).chain(self.dry_penalties.keys().copied()).chain(too_early());
        self.changes.extend(tokens.filter_map(|token| {
            let &logit = logits.get(usize::try_from(token).ok()?)?;
            Some(Candidate { token, logit })
        }));
        // Stable: it makes use of the two runs that are sorted.
        self.changes.sort_by_key(|change| change.token);
        self.changes.dedup_by_key(|change| change.token);
        for change in &mut self.changes {
            if let Ok(at) = self.biases.binary_search_by_key(&change.token, |bias| bias.token) {
                change.logit += self.biases[at].logit;
            }
            if let Some(penalties) = &self.penalties {
                penalties.apply(change);
            }
            if let Some(penalty) = self.dry_penalties.get(&change.token) {
                change.logit -= penalty;
            }
        }
        for token in too_early() {
            if let Ok(at) = self.changes.binary_search_by_key(&token, |change| change.token) {
                self.changes[at].logit = f32::NEG_INFINITY;
            }
        }
    }

    fn report(&mut self, logits: &[f32], token: Token, n: usize) -> Logprobs {
        report(logits, token, n, &mut self.scratch, &mut self.likeliest)
    }
}

/// Tells how likely a token is.
fn report(logits: &[f32], token: Token, n: usize, scratch: &mut Scratch, likeliest: &mut Vec<Candidate>) -> Logprobs {
    let row = Row::new(logits, &[]);
    let best = row.max();
    let log_total = row.total(best).ln();
    let logprob = |logit: f32| (f64::from(logit - best) - log_total) as f32;
    row.likeliest(n, scratch, likeliest);
    let top = likeliest.iter().map(|c| (c.token, logprob(c.logit))).collect();
    Logprobs { chosen: logprob(logit_of(logits, token)), top }
}

fn logit_of(logits: &[f32], token: Token) -> f32 {
    usize::try_from(token).ok().and_then(|at| logits.get(at)).copied().unwrap_or(f32::NEG_INFINITY)
}

/// Tells how likely tokens are that nobody chose.
#[derive(Debug, Default)]
pub(crate) struct Scorer {
    scratch: Scratch,
    likeliest: Vec<Candidate>,
}

/// How likely a token is where it stands.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Score {
    pub(crate) logprobs: Logprobs,
    /// Its place among all tokens, the likeliest having 1.
    pub(crate) rank: u32,
}

impl Scorer {
    /// By the row before it, with so many of the likeliest.
    pub(crate) fn score(&mut self, logits: &[f32], token: Token, top: u32) -> Score {
        let top = usize::try_from(top).unwrap_or(usize::MAX);
        let logprobs = report(logits, token, top, &mut self.scratch, &mut self.likeliest);
        let own = logit_of(logits, token);
        let likelier = logits.iter().filter(|&&logit| logit > own).count();
        Score { logprobs, rank: u32::try_from(likelier).unwrap_or(u32::MAX).saturating_add(1) }
    }
}

/// The likeliest token of a row; the lowest of equals.
pub(crate) fn argmax(logits: &[f32]) -> Option<Token> {
    Row::new(logits, &[]).argmax()
}

/// A number from 0 up to 1, the same for the same arguments: a step of the SplitMix64 generator for each purpose.
fn share(seed: u64, accepted: u64, draw: Draw) -> f64 {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |mut x: u64| {
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    };
    let stream = mix(seed.wrapping_add(STEP)).wrapping_add((draw as u64).wrapping_mul(0x632b_e59b_d9b4_e019));
    let bits = mix(stream.wrapping_add(accepted.wrapping_add(1).wrapping_mul(STEP)));
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

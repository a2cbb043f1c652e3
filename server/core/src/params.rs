//! How to generate: the choice of tokens, what the answer must look like, its limits, and who goes first.
//!
//! Everything here crosses the worker's socket in a compact, not self-describing format: no field is skipped and no
//! enum is untagged. It is validated once, where it is submitted ([`GenerationParams::validate`]); later code relies on that.

use serde::{Deserialize, Serialize};

use crate::error::ParamError;
use crate::limits::{
    MAX_DRY_ALLOWED_LENGTH, MAX_DRY_BREAKER_BYTES, MAX_DRY_BREAKERS, MAX_DRY_FACTOR, MAX_GRAMMAR_BYTES, MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES, MAX_PENALTY, MAX_PENALTY_LAST_N, MAX_REGEX_BYTES, MAX_REPEAT_PENALTY, MAX_STOP_BYTES,
    MAX_STOP_STRINGS, MAX_STOP_TOKENS, MAX_TEMPERATURE, MAX_TOP_LOGPROBS,
};
use crate::order::{Priority, Turn};

/// What the answer must look like.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Constraint {
    /// A grammar in llama.cpp's GBNF, whose start symbol is `root`.
    Gbnf(String),
    /// A JSON schema.
    JsonSchema {
        /// The schema, as JSON; `{}` allows any JSON.
        schema: String,
        /// Whether what cannot be enforced is refused; otherwise it is left to the model.
        strict: bool,
    },
    /// A regular expression, which the whole answer must match.
    Regex(String),
}

/// The DRY penalty, which makes long repetitions unlikely; `multiplier` 0 is off.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DryParams {
    /// Scale of the penalty; 0 is off.
    pub multiplier: f32,
    /// The penalty grows by this factor with each token of the repetition past `allowed_length`.
    pub base: f32,
    /// Repetitions up to this many tokens are free.
    pub allowed_length: u32,
    /// Tokens looked back at; 0: the whole sequence.
    pub penalty_last_n: u32,
    /// Strings that end a repetition.
    pub sequence_breakers: Vec<String>,
}

impl Default for DryParams {
    /// llama.cpp's defaults.
    fn default() -> Self {
        let sequence_breakers = ["\n", ":", "\"", "*"].map(String::from).to_vec();
        Self { multiplier: 0.0, base: 1.75, allowed_length: 2, penalty_last_n: 0, sequence_breakers }
    }
}

/// How far a request goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Extent {
    /// To the end of an answer.
    #[default]
    Answer,
    /// To what its prompt is to the model: nothing is computed with it, and it may be longer than any context.
    Prompt(PromptForm),
}

/// What is to be known of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PromptForm {
    /// Its text: of a chat as the model's template renders it, of token ids what they stand for.
    Text,
    /// Its tokens.
    Tokens {
        /// Whether those are among them that the model wants around a text.
        adds_special: bool,
        /// Whether each is told with its bytes.
        with_pieces: bool,
    },
    /// How many tokens it has. One that no context could take is refused by its length, before it is tokenised.
    Count,
}

/// How to generate. `Default` is the model's plain distribution with a random seed and no limit but the context.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenerationParams {
    /// How far to go; what else is said is of the answer.
    pub extent: Extent,
    /// The most tokens to generate; 0: the prompt is read, and no more. `None`: until the model ends or its context is full.
    pub max_tokens: Option<u32>,
    /// 0 is greedy; up to [`MAX_TEMPERATURE`].
    pub temperature: f32,
    /// Nucleus sampling, above 0 and up to 1; 1 is off.
    pub top_p: f32,
    /// Keep the k likeliest tokens; 0 or less is off.
    pub top_k: i32,
    /// Drop tokens less likely than this share of the likeliest, 0 to 1; 0 is off.
    pub min_p: f32,
    /// Keep the tokens whose information is nearest to the expected, until their probabilities add up to this; 1 is off.
    pub typical_p: f32,
    /// The chance, at each token, to leave out the likeliest of those above `xtc_threshold` but the last; 0 is off.
    pub xtc_probability: f32,
    /// See `xtc_probability`; above 0.5 it is off.
    pub xtc_threshold: f32,
    /// Divides the logit of a token that came before (multiplies a negative one); 1 is off.
    pub repeat_penalty: f32,
    /// Tokens that the three penalties look back at, the prompt's included; 0: none, so they are off.
    pub repeat_last_n: u32,
    /// Taken from a token's logit once for each time that it came before; 0 is off.
    pub frequency_penalty: f32,
    /// Taken from a token's logit once if it came before; 0 is off.
    pub presence_penalty: f32,
    /// The DRY penalty.
    pub dry: DryParams,
    /// Added to the logits of these tokens; minus infinity bans one.
    pub logit_bias: Vec<(i32, f32)>,
    /// What the answer must look like.
    pub constraint: Option<Constraint>,
    /// What the client calls that, for errors.
    pub constraint_param: String,
    /// Report the log-probability of each token, and of so many of the likeliest beside it; `None`: no report.
    pub logprobs: Option<u32>,
    /// Tell the prompt's text before the answer's.
    pub echo: bool,
    /// Report the log-probability of each token of the prompt but the first, and of so many of the likeliest in its place; `None`: no
    /// report.
    pub prompt_logprobs: Option<u32>,
    /// The same seed, prompt and parameters give the same draws. `None`: a fresh seed.
    pub seed: Option<u64>,
    /// Strings that end the generation; none of them is emitted.
    pub stop: Vec<String>,
    /// Tokens that end the generation, beside the model's own; nothing of them is emitted.
    pub stop_tokens: Vec<i32>,
    /// Before so many tokens nothing ends the generation but `max_tokens`, the context's end and a constraint that is complete:
    /// tokens that would are not chosen, and stop strings are text.
    pub min_tokens: u32,
    /// A line after the first that is indented by fewer spaces and tabs ends the generation where its text begins; 0 is off.
    pub min_indent: u32,
    /// So many milliseconds after the first token the next line break ends the generation; `None`: never.
    pub decode_timeout_ms: Option<u32>,
    /// Never choose a token of the model's own that ends the generation: go on until `max_tokens`, a stop string or token, or the
    /// context's end.
    pub ignore_eos: bool,
    /// Who goes first.
    pub priority: Priority,
    /// Whose it is, and its turn among those of the same priority.
    pub turn: Turn,
    /// The most milliseconds from submission to the first token; past that the request fails with
    /// [`RequestError::DeadlineExceeded`](crate::RequestError::DeadlineExceeded). `None`: the engine's own limit.
    pub queue_timeout_ms: Option<u64>,
}

impl Default for GenerationParams {
    fn default() -> Self {
        Self {
            extent: Extent::default(),
            max_tokens: None,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            typical_p: 1.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            dry: DryParams::default(),
            logit_bias: Vec::new(),
            constraint: None,
            constraint_param: String::new(),
            logprobs: None,
            echo: false,
            prompt_logprobs: None,
            seed: None,
            stop: Vec::new(),
            stop_tokens: Vec::new(),
            min_tokens: 0,
            min_indent: 0,
            decode_timeout_ms: None,
            ignore_eos: false,
            priority: Priority::default(),
            turn: Turn::default(),
            queue_timeout_ms: None,
        }
    }
}

impl GenerationParams {
    /// Greedy decoding of at most `max_tokens` tokens.
    #[must_use]
    pub fn greedy(max_tokens: u32) -> Self {
        Self { max_tokens: Some(max_tokens), temperature: 0.0, ..Self::default() }
    }

    /// Whether the engine can follow these parameters.
    ///
    /// # Errors
    /// Names the first parameter out of range, and the range.
    pub fn validate(&self) -> Result<(), ParamError> {
        let in_range = |param: &str, value: f32, low: f32, high: f32| {
            if (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(ParamError::new(param, format!("must be a number from {low} to {high}, not {value}")))
            }
        };
        if let Some(max) = self.max_tokens.filter(|max| self.min_tokens > *max) {
            return Err(ParamError::new("min_tokens", format!("must be at most max_tokens, which is {max}")));
        }
        in_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE)?;
        in_range("top_p", self.top_p, f32::MIN_POSITIVE, 1.0)
            .map_err(|_| ParamError::new("top_p", format!("must be above 0 and at most 1, not {}", self.top_p)))?;
        in_range("min_p", self.min_p, 0.0, 1.0)?;
        self.validate_sampling(in_range)?;
        if self.stop_tokens.len() > MAX_STOP_TOKENS {
            let n = self.stop_tokens.len();
            return Err(ParamError::new("stop_token_ids", format!("at most {MAX_STOP_TOKENS} tokens, not {n}")));
        }
        if self.stop.len() > MAX_STOP_STRINGS {
            let n = self.stop.len();
            return Err(ParamError::new("stop", format!("at most {MAX_STOP_STRINGS} stop strings, not {n}")));
        }
        for stop in &self.stop {
            if stop.is_empty() {
                return Err(ParamError::new("stop", "a stop string must not be empty"));
            }
            if stop.len() > MAX_STOP_BYTES {
                let n = stop.len();
                return Err(ParamError::new(
                    "stop",
                    format!("a stop string has at most {MAX_STOP_BYTES} bytes, not {n}"),
                ));
            }
        }
        Ok(())
    }

    fn validate_sampling(
        &self,
        in_range: impl Fn(&str, f32, f32, f32) -> Result<(), ParamError>,
    ) -> Result<(), ParamError> {
        let at_most = |param: &str, what: &str, value: usize, limit: usize| {
            if value <= limit {
                Ok(())
            } else {
                Err(ParamError::new(param, format!("at most {limit} {what}, not {value}")))
            }
        };
        let count = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
        in_range("typical_p", self.typical_p, f32::MIN_POSITIVE, 1.0).map_err(|_| {
            ParamError::new("typical_p", format!("must be above 0 and at most 1, not {}", self.typical_p))
        })?;
        in_range("xtc_probability", self.xtc_probability, 0.0, 1.0)?;
        in_range("xtc_threshold", self.xtc_threshold, 0.0, 1.0)?;
        in_range("repeat_penalty", self.repeat_penalty, 1.0 / MAX_REPEAT_PENALTY, MAX_REPEAT_PENALTY)?;
        in_range("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)?;
        in_range("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)?;
        at_most("repeat_last_n", "tokens", count(self.repeat_last_n), count(MAX_PENALTY_LAST_N))?;
        let dry = &self.dry;
        in_range("dry_multiplier", dry.multiplier, 0.0, MAX_DRY_FACTOR)?;
        in_range("dry_base", dry.base, 1.0, MAX_DRY_FACTOR)?;
        at_most("dry_allowed_length", "tokens", count(dry.allowed_length), count(MAX_DRY_ALLOWED_LENGTH))?;
        at_most("dry_penalty_last_n", "tokens", count(dry.penalty_last_n), count(MAX_PENALTY_LAST_N))?;
        at_most("dry_sequence_breakers", "strings", dry.sequence_breakers.len(), MAX_DRY_BREAKERS)?;
        for breaker in &dry.sequence_breakers {
            at_most("dry_sequence_breakers", "bytes in a string", breaker.len(), MAX_DRY_BREAKER_BYTES)?;
            if breaker.is_empty() {
                return Err(ParamError::new("dry_sequence_breakers", "a string must not be empty"));
            }
        }
        at_most("logit_bias", "tokens", self.logit_bias.len(), MAX_LOGIT_BIASES)?;
        for &(token, bias) in &self.logit_bias {
            if token < 0 {
                return Err(ParamError::new("logit_bias", format!("there is no token {token}")));
            }
            if bias != f32::NEG_INFINITY {
                in_range("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)?;
            }
        }
        at_most("top_logprobs", "tokens", count(self.logprobs.unwrap_or(0)), count(MAX_TOP_LOGPROBS))?;
        at_most("prompt_logprobs", "tokens", count(self.prompt_logprobs.unwrap_or(0)), count(MAX_TOP_LOGPROBS))?;
        let (bytes, most) = match &self.constraint {
            None => return Ok(()),
            Some(Constraint::Gbnf(text)) => (text.len(), MAX_GRAMMAR_BYTES),
            Some(Constraint::JsonSchema { schema, .. }) => (schema.len(), MAX_GRAMMAR_BYTES),
            Some(Constraint::Regex(regex)) => (regex.len(), MAX_REGEX_BYTES),
        };
        at_most(&self.constraint_param, "bytes", bytes, most)
    }
}

#[cfg(test)]
#[path = "params_tests.rs"]
mod tests;

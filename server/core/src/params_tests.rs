//! Which parameters are in their range, and how the others are named.
#![allow(clippy::unwrap_used)]

use super::*;

fn dry() -> DryParams {
    DryParams::default()
}

fn breakers(sequence_breakers: Vec<String>) -> GenerationParams {
    GenerationParams { dry: DryParams { sequence_breakers, ..dry() }, ..GenerationParams::default() }
}

fn long() -> String {
    "x".repeat(MAX_GRAMMAR_BYTES + 1)
}

#[test]
fn parameters_out_of_range_are_named() {
    let ok = GenerationParams::default();
    assert!(ok.validate().is_ok());
    let banned = vec![(0, f32::NEG_INFINITY), (1, -MAX_LOGIT_BIAS)];
    assert!(GenerationParams { logit_bias: banned, logprobs: Some(20), ..ok.clone() }.validate().is_ok());
    assert!(GenerationParams::greedy(1).validate().is_ok());
    let bound = |param: &str, constraint| GenerationParams {
        constraint: Some(constraint),
        constraint_param: param.to_owned(),
        ..GenerationParams::default()
    };
    let cases: Vec<(&str, GenerationParams)> = vec![
        ("min_tokens", GenerationParams { max_tokens: Some(0), min_tokens: 1, ..ok.clone() }),
        ("prompt_logprobs", GenerationParams { prompt_logprobs: Some(21), ..ok.clone() }),
        ("temperature", GenerationParams { temperature: -0.1, ..ok.clone() }),
        ("temperature", GenerationParams { temperature: f32::NAN, ..ok.clone() }),
        ("temperature", GenerationParams { temperature: f32::INFINITY, ..ok.clone() }),
        ("top_p", GenerationParams { top_p: 0.0, ..ok.clone() }),
        ("top_p", GenerationParams { top_p: 1.01, ..ok.clone() }),
        ("top_p", GenerationParams { top_p: f32::NAN, ..ok.clone() }),
        ("min_p", GenerationParams { min_p: 1.5, ..ok.clone() }),
        ("typical_p", GenerationParams { typical_p: 0.0, ..ok.clone() }),
        ("typical_p", GenerationParams { typical_p: 1.5, ..ok.clone() }),
        ("xtc_probability", GenerationParams { xtc_probability: 1.1, ..ok.clone() }),
        ("xtc_threshold", GenerationParams { xtc_threshold: f32::NAN, ..ok.clone() }),
        ("repeat_penalty", GenerationParams { repeat_penalty: 0.0, ..ok.clone() }),
        ("repeat_penalty", GenerationParams { repeat_penalty: f32::INFINITY, ..ok.clone() }),
        ("repeat_last_n", GenerationParams { repeat_last_n: MAX_PENALTY_LAST_N + 1, ..ok.clone() }),
        ("frequency_penalty", GenerationParams { frequency_penalty: 2.1, ..ok.clone() }),
        ("presence_penalty", GenerationParams { presence_penalty: -2.1, ..ok.clone() }),
        ("dry_multiplier", GenerationParams { dry: DryParams { multiplier: -1.0, ..dry() }, ..ok.clone() }),
        ("dry_base", GenerationParams { dry: DryParams { base: 0.9, ..dry() }, ..ok.clone() }),
        ("dry_allowed_length", GenerationParams { dry: DryParams { allowed_length: 9999, ..dry() }, ..ok.clone() }),
        ("dry_penalty_last_n", GenerationParams { dry: DryParams { penalty_last_n: !0, ..dry() }, ..ok.clone() }),
        ("dry_sequence_breakers", breakers(vec![String::new()])),
        ("dry_sequence_breakers", breakers(vec!["x".repeat(MAX_DRY_BREAKER_BYTES + 1)])),
        ("dry_sequence_breakers", breakers(vec!["x".into(); MAX_DRY_BREAKERS + 1])),
        ("logit_bias", GenerationParams { logit_bias: vec![(-1, 1.0)], ..ok.clone() }),
        ("logit_bias", GenerationParams { logit_bias: vec![(1, 100.5)], ..ok.clone() }),
        ("logit_bias", GenerationParams { logit_bias: vec![(1, f32::NAN)], ..ok.clone() }),
        ("logit_bias", GenerationParams { logit_bias: vec![(1, 1.0); MAX_LOGIT_BIASES + 1], ..ok.clone() }),
        ("top_logprobs", GenerationParams { logprobs: Some(MAX_TOP_LOGPROBS + 1), ..ok.clone() }),
        ("grammar", bound("grammar", Constraint::Gbnf(long()))),
        ("response_format", bound("response_format", Constraint::JsonSchema { schema: long(), strict: true })),
        ("guided_regex", bound("guided_regex", Constraint::Regex("a".repeat(MAX_REGEX_BYTES + 1)))),
        ("stop_token_ids", GenerationParams { stop_tokens: vec![1; MAX_STOP_TOKENS + 1], ..ok.clone() }),
        ("min_tokens", GenerationParams { max_tokens: Some(3), min_tokens: 4, ..ok.clone() }),
        ("stop", GenerationParams { stop: vec![String::new()], ..ok.clone() }),
        ("stop", GenerationParams { stop: vec!["x".repeat(MAX_STOP_BYTES + 1)], ..ok.clone() }),
        ("stop", GenerationParams { stop: vec!["x".into(); MAX_STOP_STRINGS + 1], ..ok }),
    ];
    for (param, params) in cases {
        assert_eq!(params.validate().unwrap_err().param, param);
    }
}

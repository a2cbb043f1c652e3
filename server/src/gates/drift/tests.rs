#![allow(clippy::unwrap_used)]
use gantry_core::{PromptChance, TokenPiece};
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::*;

type Place<'a> = (i32, f32, &'a [(i32, f32)]);

fn chances(told: &[(i32, f32)]) -> Vec<TokenChance> {
    told.iter().map(|&(id, logprob)| TokenChance { id, bytes: vec![id as u8], logprob }).collect()
}

fn said(places: &[Place<'_>]) -> Vec<TokenLogprob> {
    let place = |&(id, logprob, top): &Place<'_>| TokenLogprob {
        token: TokenChance { id, bytes: vec![id as u8], logprob },
        top: chances(top),
    };
    places.iter().map(place).collect()
}

/// The same behind a question of two tokens.
fn read(places: &[Place<'_>]) -> Vec<PromptToken> {
    let token = |id: i32, chance| PromptToken { token: TokenPiece { id, bytes: vec![id as u8] }, chance };
    let place = |&(id, logprob, top): &Place<'_>| token(id, Some(PromptChance { logprob, rank: 1, top: chances(top) }));
    let question =
        [token(1, None), token(2, Some(PromptChance { logprob: -3.0, rank: 9, top: chances(&[(3, -0.1)]) }))];
    question.into_iter().chain(places.iter().map(place)).collect()
}

#[test]
fn the_places_of_an_answer_are_compared_and_no_others() {
    let says: &[Place<'_>] = &[(5, -0.1, &[(5, -0.1)]), (6, -0.5, &[(7, -0.4)])];
    let same = compare(&said(says), &read(says)).unwrap();
    assert_eq!((same.places, same.agreed, same.lost), (2.0, 2.0, 0.0));
    assert!(same.kl < 1e-6, "{same:?}");
    let other: &[Place<'_>] = &[(5, -0.1, &[(5, -0.1)]), (6, -1.5, &[(8, -1.4)])];
    let drift = compare(&said(says), &read(other)).unwrap();
    assert_eq!((drift.places, drift.agreed), (2.0, 1.0));
    assert!((drift.lost - 1.0).abs() < 1e-6 && drift.kl > 0.0, "{drift:?}");
    let mut another = read(says);
    another[3].token.bytes = b"x".to_vec();
    let other = compare(&said(says), &another).unwrap_err();
    assert_eq!((other.id, &*other.candidate), (6, "x"));
    // One that read less than it was given, as none does, is no panic.
    assert!(compare(&said(says), &read(says)[..1]).is_err());
}

#[test]
fn what_is_no_number_is_as_unlikely_as_can_be() {
    for bad in [f32::NAN, f32::NEG_INFINITY] {
        let drift = compare(&said(&[(5, -0.1, &[(5, -0.1)])]), &read(&[(5, bad, &[(4, bad)])])).unwrap();
        assert_eq!(drift.agreed, 0.0);
        assert!(drift.lost > 99.0 && drift.kl.is_finite() && drift.kl > 10.0, "{drift:?}");
    }
}

/// A distribution over so many tokens, each with at least some probability.
fn distribution(weights: &[f64]) -> Vec<f64> {
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / sum).collect()
}

fn likeliest(probabilities: &[f64], count: usize) -> Vec<(i32, f64)> {
    let mut top: Vec<(i32, f64)> = (0..).zip(probabilities).map(|(id, p)| (id, p.ln())).collect();
    top.sort_by(|one, other| other.1.total_cmp(&one.1));
    top.truncate(count);
    top
}

proptest! {
    #[test]
    fn the_divergence_is_a_lower_bound_and_exact_where_all_is_told(
        weights in prop::collection::vec((0.001_f64..1.0, 0.001_f64..1.0), 2..40),
        told in 1_usize..20,
    ) {
        let (p, q): (Vec<_>, Vec<_>) = weights.into_iter().unzip();
        let (p, q) = (distribution(&p), distribution(&q));
        let exact: f64 = p.iter().zip(&q).map(|(p, q)| p * (p / q).ln()).sum();
        let bound = divergence(&likeliest(&p, told), &likeliest(&q, told));
        prop_assert!(bound <= exact + 1e-9 && bound >= 0.0, "{bound} of {exact}");
        let whole = divergence(&likeliest(&p, p.len()), &likeliest(&q, q.len()));
        prop_assert!((whole - exact).abs() < 1e-6, "{whole} is not {exact}");
    }
}

/// Answers of 64 tokens whose places agree with this chance, which differs from answer to answer by this much.
fn drawn(rng: &mut StdRng, answers: usize, agreement: f64, spread: f64) -> Vec<AnswerDrift> {
    let answer = |_| {
        let own = (agreement + rng.random_range(-spread..=spread)).clamp(0.0, 1.0);
        let agreed = (0..64).filter(|_| rng.random_bool(own)).count();
        AnswerDrift { places: 64.0, agreed: agreed as f64, kl: 0.0, lost: 0.0 }
    };
    (0..answers).map(answer).collect()
}

#[test]
fn a_good_model_does_not_fail_by_chance_and_a_bad_one_does_not_pass_by_it() {
    const DRAWS: usize = 2_000;
    let limits = DriftLimits { min_agreement: Some(0.9), max_kl: None, max_perplexity_ratio: None };
    let mut rng = StdRng::seed_from_u64(7);
    let mut failed = |agreement: f64| {
        (0..DRAWS).filter(|_| judge(&drawn(&mut rng, 32, agreement, 0.05), &limits).is_err()).count() as f64
            / DRAWS as f64
    };
    let (at_limit, good, bad, worse) = (failed(0.9), failed(0.92), failed(0.87), failed(0.85));
    println!("fails: {at_limit:.4} at the limit, {good:.4} 2 points above, {bad:.4} 3 below, {worse:.4} 5 below");
    // The normal quantile is a little short for 32 answers.
    assert!(at_limit < 0.03 && good < 0.001, "{at_limit} {good}");
    assert!(bad > 0.8 && worse > 0.99, "{bad} {worse}");
}

#[test]
fn each_limit_is_judged_and_named_with_its_figure() {
    let answers = |agreed: f64, kl: f64, lost: f64| {
        vec![AnswerDrift { places: 100.0, agreed: agreed * 100.0, kl: kl * 100.0, lost: lost * 100.0 }; 20]
    };
    let none = DriftLimits { min_agreement: None, max_kl: None, max_perplexity_ratio: None };
    let value = judge(&answers(0.95, 0.01, 0.002), &DriftLimits::default()).unwrap();
    assert_eq!(value, "95.0% same tokens, KL 0.010, perplexity x1.002, 2000 tokens");
    for (limits, field) in [
        (DriftLimits { min_agreement: Some(0.96), ..none }, "drift.minAgreement"),
        (DriftLimits { max_kl: Some(0.009), ..none }, "drift.maxKl"),
        (DriftLimits { max_perplexity_ratio: Some(1.0019), ..none }, "drift.maxPerplexityRatio"),
    ] {
        let refusal = judge(&answers(0.95, 0.01, 0.002), &limits).unwrap_err();
        assert_eq!(refusal.value, value);
        assert!(refusal.field.ends_with(field) && refusal.found.contains(field), "{refusal:?}");
    }
    // A single answer says nothing of others.
    assert!(judge(&answers(0.0, 9.0, 9.0)[..1], &DriftLimits::default()).is_ok());
}

#[test]
fn limits_are_those_of_the_spec_or_of_this_release() {
    let gate = |value| serde_json::from_value::<DriftGate>(value).unwrap();
    assert_eq!(DriftLimits::of(&gate(serde_json::json!({}))), Ok(DriftLimits::default()));
    let given = DriftLimits::of(&gate(serde_json::json!({"maxKl": "0.05"}))).unwrap();
    assert_eq!(given, DriftLimits { min_agreement: None, max_kl: Some(0.05), max_perplexity_ratio: None });
    let (field, _) = DriftLimits::of(&gate(serde_json::json!({"minAgreement": "most"}))).unwrap_err();
    assert_eq!(field, "minAgreement");
}

//! The sampler against llama.cpp's samplers of the same names, its determinism, and grammars.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use gantry_llama::{Model, ModelParams, TokenTexts};
use llama_cpp_2::llama_backend::LlamaBackend;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::model::params::LlamaModelParams;
use llama_cpp_2::sampling::LlamaSampler;
use llama_cpp_2::token::LlamaToken;
use llama_cpp_2::token::data::LlamaTokenData;
use llama_cpp_2::token::data_array::LlamaTokenDataArray;
use llama_cpp_2::token::logit_bias::LlamaLogitBias;
use proptest::prelude::*;

use super::penalties::Breakers;
use super::*;
use crate::backend::Vocabulary;
use crate::backend::scripted::ScriptedVocabulary;
use crate::grammars::Grammars;
use crate::params::{self, DryParams};

/// The penalty of llama.cpp is single precision.
const TOLERANCE: f32 = 1e-4;

fn plain(params: &GenerationParams) -> Sampler {
    Sampler::new(params, &[], SamplerSetup::default())
}

fn seeded(seed: u64) -> GenerationParams {
    GenerationParams { seed: Some(seed), ..GenerationParams::default() }
}

/// What llama.cpp's samplers leave of a row, the likeliest first.
fn theirs(logits: &[f32], samplers: Vec<LlamaSampler>) -> Vec<Candidate> {
    let data = (0..).zip(logits).map(|(id, &logit)| LlamaTokenData::new(LlamaToken::new(id), logit, 0.0));
    let mut array = LlamaTokenDataArray::from_iter(data, false);
    array.apply_sampler(&mut LlamaSampler::chain_simple(samplers));
    let mut left: Vec<Candidate> = array.data.iter().map(|d| Candidate { token: d.id().0, logit: d.logit() }).collect();
    left.sort_by(row::by_rank);
    left
}

fn ours(logits: &[f32], params: &GenerationParams) -> Vec<Candidate> {
    Chain::new(params).kept(Row::new(logits, &[]), 0.0)
}

/// Logits without ties, whose order decides: distinct multiples, shuffled, so that no sum falls on a threshold.
fn logits() -> impl Strategy<Value = Vec<f32>> {
    (2_usize..1500, any::<u64>(), 0.5_f32..12.0).prop_map(|(n, seed, spread)| {
        (0..n as u64).map(|i| (share(seed, i, Draw::Token) as f32 - 0.5) * spread + i as f32 * 1e-6).collect()
    })
}

/// Both keep the same, but for a token at the very edge, where the last digits of a sum decide.
fn same(ours: &[Candidate], theirs: &[Candidate]) -> Result<(), TestCaseError> {
    prop_assert!(ours.len().abs_diff(theirs.len()) <= 1, "{} kept here, {} there", ours.len(), theirs.len());
    let differ =
        ours.iter().filter(|c| !theirs.contains(c)).count() + theirs.iter().filter(|c| !ours.contains(c)).count();
    prop_assert!(differ <= 2, "{differ} differ");
    Ok(())
}

fn model() -> &'static (Arc<Model>, LlamaModel) {
    static MODEL: OnceLock<(Arc<Model>, LlamaModel)> = OnceLock::new();
    MODEL.get_or_init(|| {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../e2e/models/demo-draft.q8_0.gguf");
        let model = Model::load(&path, &ModelParams::default(), &mut |_| true).unwrap();
        // The backend is initialised by the load before; this only says so, and must not end it.
        let backend = std::mem::ManuallyDrop::new(LlamaBackend {});
        let params = LlamaModelParams::default().with_vocab_only(true);
        (model, LlamaModel::load_from_file(&backend, path, &params).unwrap())
    })
}

proptest! {
    #[test]
    fn truncations_keep_what_llama_cpp_keeps(
        logits in logits(), k in 1_i32..1600, p in 0.02_f32..0.999, m in 0.001_f32..1.0, threshold in 0.001_f32..0.5,
    ) {
        let d = GenerationParams::default();
        same(&ours(&logits, &GenerationParams { top_k: k, ..d.clone() }), &theirs(&logits, vec![LlamaSampler::top_k(k)]))?;
        same(&ours(&logits, &GenerationParams { top_p: p, ..d.clone() }), &theirs(&logits, vec![LlamaSampler::top_p(p, 0)]))?;
        same(&ours(&logits, &GenerationParams { min_p: m, ..d.clone() }), &theirs(&logits, vec![LlamaSampler::min_p(m, 0)]))?;
        same(&ours(&logits, &GenerationParams { typical_p: p, ..d.clone() }), &theirs(&logits, vec![LlamaSampler::typical(p, 0)]))?;
        let xtc = GenerationParams { xtc_probability: 1.0, xtc_threshold: threshold, ..d };
        same(&ours(&logits, &xtc), &theirs(&logits, vec![LlamaSampler::xtc(1.0, threshold, 0, 1)]))?;
    }

    #[test]
    fn the_chain_keeps_what_llama_cpp_s_keeps(logits in logits(), k in 2_i32..400, p in 0.3_f32..0.99, m in 0.001_f32..0.2) {
        let all = GenerationParams { top_k: k, typical_p: p, top_p: p, min_p: m, ..GenerationParams::default() };
        let chain = vec![
            LlamaSampler::top_k(k), LlamaSampler::typical(p, 0), LlamaSampler::top_p(p, 0), LlamaSampler::min_p(m, 0),
        ];
        // An edge token moves the next truncation's edge with it.
        let (ours, theirs) = (ours(&logits, &all), theirs(&logits, chain));
        prop_assert!(ours.len().abs_diff(theirs.len()) <= 3, "{} kept here, {} there", ours.len(), theirs.len());
        for (a, b) in ours.iter().zip(&theirs) {
            prop_assert!(a == b || (a.logit - b.logit).abs() < 0.2, "{a:?} {b:?}");
        }
    }

    #[test]
    fn biases_and_penalties_equal_llama_cpp_s(
        logits in proptest::collection::vec(-9.0_f32..9.0, 40..300),
        history in proptest::collection::vec(0_i32..60, 0..300), prompt_share in 0_usize..300,
        last_n in 0_u32..200, repeat in 0.5_f32..2.0, frequency in -2.0_f32..2.0, presence in -2.0_f32..2.0,
        bias in proptest::collection::vec((0_i32..40, -50.0_f32..50.0), 0..8),
    ) {
        let params = GenerationParams {
            repeat_penalty: repeat, frequency_penalty: frequency, presence_penalty: presence, repeat_last_n: last_n,
            logit_bias: bias.clone(), ..GenerationParams::default()
        };
        let (prompt, answer) = history.split_at(prompt_share.min(history.len()));
        let mut sampler = Sampler::new(&params, prompt, SamplerSetup::default());
        answer.iter().for_each(|&token| sampler.accept(token).unwrap());
        sampler.change(&logits);
        let mut mine = logits.clone();
        sampler.changes.iter().for_each(|c| mine[c.token as usize] = c.logit);

        let n_vocab = logits.len() as i32;
        let mut added: std::collections::BTreeMap<i32, f32> = std::collections::BTreeMap::new();
        bias.iter().for_each(|&(token, b)| *added.entry(token).or_default() += b);
        let biases: Vec<_> = added.iter().map(|(&t, &b)| LlamaLogitBias::new(LlamaToken::new(t), b)).collect();
        let mut penalties = LlamaSampler::penalties(n_vocab, last_n as i32, repeat, frequency, presence);
        history.iter().for_each(|&token| penalties.accept(LlamaToken::new(token)));
        let mut his = theirs(&logits, vec![LlamaSampler::logit_bias(n_vocab, &biases), penalties]);
        his.sort_by_key(|c| c.token);
        for c in his {
            let mine = mine[c.token as usize];
            prop_assert!((mine - c.logit).abs() <= TOLERANCE * c.logit.abs().max(1.0), "{c:?} {mine}");
        }
    }

    #[test]
    fn dry_equals_llama_cpp_s(
        history in proptest::collection::vec(prop_oneof![5 => 300_i32..304, 1 => 0_i32..2048], 0..160), multiplier in 0.1_f32..4.0,
        base in 1.0_f32..3.0, allowed_length in 0_u32..5, last_n in prop_oneof![Just(0_u32), 1_u32..120], breakers in any::<bool>(),
    ) {
        let (model, reference) = model();
        let strings = if breakers { vec![String::from("e "), String::from("\n"), String::from("the")] } else { Vec::new() };
        let dry = DryParams {
            multiplier, base, allowed_length, penalty_last_n: last_n, sequence_breakers: strings.clone(),
        };
        static TEXTS: OnceLock<TokenTexts> = OnceLock::new();
        let texts = TEXTS.get_or_init(|| TokenTexts::of(model, &[]));
        let mut mine = Dry::new(&dry, Breakers::new(texts, &strings), &history).unwrap();
        let mut penalties = HashMap::new();
        mine.penalties(&mut penalties);
        // Our 0 is the whole history.
        let last_n = if last_n == 0 { 1000 } else { last_n as i32 };
        let mut his = LlamaSampler::dry(reference, multiplier, base, allowed_length as i32, last_n, &strings);
        history.iter().for_each(|&token| his.accept(LlamaToken::new(token)));
        for c in theirs(&vec![0.0; 2048], vec![his]) {
            let mine = penalties.get(&c.token).copied().unwrap_or(0.0);
            prop_assert!((mine + c.logit).abs() <= TOLERANCE * mine.max(1.0), "{c:?} {mine} {history:?}");
        }
    }

    #[test]
    fn samples_repeat_whatever_was_sampled_between(rows in proptest::collection::vec(logits(), 1..6), seed in any::<u64>(), k in 0_i32..9) {
        let params = GenerationParams { top_k: k, repeat_penalty: 1.3, xtc_probability: 0.5, ..seeded(seed) };
        let mut once = plain(&params);
        let mut often = plain(&params);
        for row in &rows {
            let token = once.sample(row).unwrap().token;
            // Drafts are checked on other rows, and a sequence may be taken up again.
            for other in &rows {
                often.sample(other).unwrap();
            }
            often = often.clone();
            prop_assert_eq!(often.sample(row).unwrap().token, token);
            once.accept(token).unwrap();
            often.accept(token).unwrap();
        }
    }

    #[test]
    fn logprobs_are_those_of_the_model(logits in logits(), n in 0_u32..20) {
        let params = GenerationParams {
            logprobs: Some(n), temperature: 0.0, logit_bias: vec![(1, 100.0)], ..GenerationParams::default()
        };
        let sampled = plain(&params).sample(&logits).unwrap();
        let got = sampled.logprobs.unwrap();
        let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        let want = |token: Token| f64::from(logits[token as usize]) - total.ln();
        prop_assert_eq!(sampled.token, 1);
        prop_assert!((f64::from(got.chosen) - want(1)).abs() < 1e-4);
        prop_assert_eq!(got.top.len(), (n as usize).min(logits.len()));
        prop_assert!(got.top.iter().all(|&(token, logprob)| (f64::from(logprob) - want(token)).abs() < 1e-4));
        prop_assert!(got.top.is_sorted_by(|a, b| a.1 >= b.1));
    }
}

#[test]
fn truncations_keep_the_set_they_name() {
    // Probabilities 0.5, 0.25, 0.15, 0.10 of tokens 2, 0, 3, 1.
    let logits = [0.25_f32.ln(), 0.10_f32.ln(), 0.5_f32.ln(), 0.15_f32.ln()];
    let params = |top_k, top_p, min_p| GenerationParams { top_k, top_p, min_p, ..seeded(1) };
    let cases: &[(GenerationParams, &[Token])] = &[
        (params(0, 1.0, 0.0), &[2, 0, 3, 1]),
        (params(2, 1.0, 0.0), &[2, 0]),
        (params(9, 1.0, 0.0), &[2, 0, 3, 1]),
        (params(-1, 1.0, 0.0), &[2, 0, 3, 1]),
        (params(0, 0.49, 0.0), &[2]),
        (params(0, 0.7, 0.0), &[2, 0]),
        (params(0, 0.8, 0.0), &[2, 0, 3]),
        (params(0, 1.0, 0.29), &[2, 0, 3]),
        (params(0, 1.0, 1.0), &[2]),
        // top_p counts the mass that top_k left: 0.5 of 0.75 is two thirds.
        (params(2, 0.6, 0.0), &[2]),
        // The temperature comes after the truncations.
        (GenerationParams { temperature: 5.0, ..params(0, 0.49, 0.0) }, &[2]),
        // 0.5 and 0.25 are above 0.2: the last of them stays.
        (GenerationParams { xtc_probability: 1.0, xtc_threshold: 0.2, ..seeded(1) }, &[0, 3, 1]),
        (GenerationParams { xtc_probability: 1.0, xtc_threshold: 0.6, ..seeded(1) }, &[2, 0, 3, 1]),
    ];
    for (p, want) in cases {
        let kept: Vec<Token> = ours(&logits, p).iter().map(|c| c.token).collect();
        assert_eq!(kept, *want, "{p:?}");
    }
}

#[test]
fn only_what_is_quick_is_sampled_on_the_engines_thread() {
    let d = seeded(1);
    let penalties = |n| GenerationParams { repeat_penalty: 1.1, repeat_last_n: n, ..d.clone() };
    let dry = DryParams { multiplier: 1.0, ..DryParams::default() };
    for (params, quick) in [
        (GenerationParams::greedy(1), true),
        (d.clone(), true),
        (GenerationParams { top_k: 40, top_p: 0.9, min_p: 0.1, ..d.clone() }, true),
        (GenerationParams { top_k: i32::MAX, ..d.clone() }, false),
        (GenerationParams { top_p: 0.9, ..d.clone() }, false),
        (penalties(64), true),
        (penalties(params::MAX_PENALTY_LAST_N), false),
        (GenerationParams { temperature: 0.0, ..penalties(params::MAX_PENALTY_LAST_N) }, false),
        (GenerationParams { logprobs: Some(0), ..d.clone() }, false),
        (GenerationParams { dry, ..d.clone() }, false),
    ] {
        assert_eq!(plain(&params).is_trivial(), quick, "{params:?}");
    }
}

#[test]
fn ties_go_to_the_lower_id_and_nan_is_never_chosen() {
    let token = |params: &GenerationParams, logits: &[f32]| plain(params).sample(logits).map(|s| s.token);
    let greedy = GenerationParams::greedy(1);
    let banning = |tokens: &[Token]| GenerationParams {
        logit_bias: tokens.iter().map(|&t| (t, f32::NEG_INFINITY)).collect(),
        ..greedy.clone()
    };
    assert_eq!(token(&greedy, &[1.0, 3.0, 3.0]), Ok(1));
    assert_eq!(token(&greedy, &[f32::NAN, 3.0, f32::INFINITY]), Ok(1));
    assert_eq!(token(&banning(&[1]), &[1.0, 3.0, 2.0]), Ok(2));
    assert_eq!(token(&greedy, &[f32::NAN, f32::NEG_INFINITY]), Err(SampleError::NothingToChoose));
    assert_eq!(token(&GenerationParams { top_k: 1, ..seeded(1) }, &[3.0, f32::NAN, 3.0]), Ok(0));
    for params in [banning(&[0, 1]), GenerationParams { temperature: 1.0, ..banning(&[0, 1]) }] {
        assert_eq!(token(&params, &[3.0, 2.0]), Err(SampleError::AllBanned("logit_bias")));
        assert_eq!(token(&params, &[]), Err(SampleError::NothingToChoose));
    }
}

#[test]
fn draws_follow_the_distribution_and_the_seed() {
    let logits = [0.7_f32.ln(), 0.2_f32.ln(), 0.1_f32.ln()];
    for top_k in [0, 3] {
        let draws = |mut sampler: Sampler| {
            let mut draw = || {
                let token = sampler.sample(&logits).unwrap().token;
                sampler.accept(token).unwrap();
                token
            };
            (0..10_000).map(|_| draw()).collect::<Vec<_>>()
        };
        let sampler = |seed| plain(&GenerationParams { top_k, ..seeded(seed) });
        let first = draws(sampler(7));
        assert_eq!(first, draws(sampler(7)));
        assert_eq!(first, draws(sampler(7)));
        assert_ne!(first, draws(sampler(8)));
        assert_ne!(first, draws(sampler(8)));
        let share = |token| first.iter().filter(|&&t| t == token).count();
        assert!((6_700..7_300).contains(&share(0)), "{}", share(0));
        assert!((1_800..2_200).contains(&share(1)), "{}", share(1));
    }
}

#[test]
fn breakers_are_single_tokens_or_sequences() {
    let dry = DryParams { multiplier: 1.0, allowed_length: 1, ..DryParams::default() };
    let penalised = |breakers: Breakers, history: &[Token]| {
        let mut out = HashMap::new();
        Dry::new(&dry, breakers, history).unwrap().penalties(&mut out);
        out.keys().copied().collect::<Vec<_>>()
    };
    assert_eq!(penalised(Breakers::default(), &[1, 2, 3, 1, 2]), [3]);
    assert_eq!(penalised(Breakers::of_tokens(&[2]), &[1, 2, 3, 1, 2]), [0; 0]);
    assert_eq!(penalised(Breakers::of_tokens(&[3]), &[1, 2, 3, 1, 2]), [0; 0]);
    assert_eq!(penalised(Breakers::of_tokens(&[1]), &[1, 2, 3, 1, 2]), [3]);
}

/// Pieces of the scripted vocabulary are the letters a to h, whose ends are token 0.
fn by_grammar(params: &GenerationParams, logits: impl Fn(u64) -> Vec<f32>) -> String {
    let setup = compile(&ScriptedVocabulary, &Grammars::default(), params).unwrap();
    let mut sampler = Sampler::new(params, &[], setup);
    let mut text = Vec::new();
    for step in 0..100 {
        let token = sampler.sample(&logits(step)).unwrap().token;
        sampler.accept(token).unwrap();
        if token == 0 {
            return String::from_utf8(text).unwrap();
        }
        ScriptedVocabulary.piece(token, &mut text);
    }
    panic!("no end");
}

#[test]
fn a_grammar_decides_whatever_the_model_prefers() {
    let grammar = params::Constraint::Gbnf(String::from("root ::= \"abe\" | \"dad\""));
    let base = GenerationParams { constraint: Some(grammar), logprobs: Some(2), ..GenerationParams::default() };
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..200 {
        let noise =
            |step: u64| (0..48).map(|t| share(seed, step * 64 + t, Draw::Token) as f32 * 9.0).collect::<Vec<_>>();
        for params in [
            GenerationParams { temperature: 0.0, ..base.clone() },
            GenerationParams { top_k: 3, min_p: 0.1, repeat_penalty: 1.5, seed: Some(seed), ..base.clone() },
            GenerationParams { seed: Some(seed), ignore_eos: true, ..base.clone() },
        ] {
            let text = by_grammar(&params, noise);
            assert!(text == "abe" || text == "dad", "{text}");
            seen.insert(text);
        }
    }
    assert_eq!(seen.len(), 2);
}

#[test]
fn a_grammar_leaves_the_distribution_of_what_it_allows() {
    // Tokens 8 and 11 are "a" and "d"; the likelier 12 ("e") is not allowed.
    let grammar = params::Constraint::Gbnf(String::from("root ::= [ad]"));
    let mut logits = vec![f32::NEG_INFINITY; 48];
    (logits[8], logits[11], logits[12]) = (0.15_f32.ln(), 0.05_f32.ln(), 0.8_f32.ln());
    let chosen = |seed| {
        let params = GenerationParams { constraint: Some(grammar.clone()), ..seeded(seed) };
        Sampler::new(&params, &[], compile(&ScriptedVocabulary, &Grammars::default(), &params).unwrap())
            .sample(&logits)
            .unwrap()
            .token
    };
    let a = (0..4000).filter(|&seed| chosen(seed) == 8).count();
    assert!((2_850..3_150).contains(&a), "{a}");
}

#[test]
fn bans_that_leave_nothing_of_a_grammar_are_told_as_the_requests_own_fault() {
    let begins = |token: &Token| {
        let mut piece = Vec::new();
        ScriptedVocabulary.piece(*token, &mut piece);
        piece.first() == Some(&b'a')
    };
    let first: Vec<Token> = (1..48).filter(begins).collect();
    let constraint = Some(params::Constraint::Gbnf(String::from("root ::= \"ad\"")));
    let base = GenerationParams { constraint, ..GenerationParams::greedy(9) };
    for (params, param) in [
        (GenerationParams { stop_tokens: first.clone(), min_tokens: 1, ..base.clone() }, "min_tokens"),
        (
            GenerationParams {
                logit_bias: first.iter().map(|&token| (token, f32::NEG_INFINITY)).collect(),
                ..base.clone()
            },
            "logit_bias",
        ),
    ] {
        let setup = compile(&ScriptedVocabulary, &Grammars::default(), &params).unwrap();
        let error = Sampler::new(&params, &[], setup).sample(&[1.0; 48]).unwrap_err();
        let RequestError::InvalidRequest { param: named, .. } = error.into_request_error() else { panic!("{param}") };
        assert_eq!(named.as_deref(), Some(param));
    }
    // A form that no token of the vocabulary is of: it has none for this character.
    let constraint = Some(params::Constraint::Gbnf(String::from("root ::= [\\x00]")));
    let form = GenerationParams { constraint, constraint_param: "grammar".to_owned(), ..GenerationParams::greedy(9) };
    let setup = compile(&ScriptedVocabulary, &Grammars::default(), &form).unwrap();
    let error = Sampler::new(&form, &[], setup).sample(&[1.0; 48]).unwrap_err();
    assert_eq!(error, SampleError::DeadEnd("grammar".to_owned()));
    let RequestError::InvalidRequest { param, .. } = error.into_request_error() else {
        panic!("it is a fault of ours")
    };
    assert_eq!(param.as_deref(), Some("grammar"));
    // What the model did not compute is not the request's fault.
    let setup = compile(&ScriptedVocabulary, &Grammars::default(), &base).unwrap();
    let error = Sampler::new(&base, &[], setup).sample(&[f32::NAN; 48]).unwrap_err();
    assert_eq!(error, SampleError::NothingToChoose);
}

#[test]
fn what_cannot_be_compiled_names_its_parameter() {
    let param =
        |params: &GenerationParams| match compile(&ScriptedVocabulary, &Grammars::default(), params).unwrap_err() {
            crate::error::RequestError::InvalidRequest { param, code, message } => (param.unwrap(), code, message),
            e => panic!("{e}"),
        };
    let d = GenerationParams::default();
    let bad = params::Constraint::Gbnf(String::from("root ::= x"));
    let bound = |constraint, param: &str| GenerationParams {
        constraint: Some(constraint),
        constraint_param: param.to_owned(),
        ..d.clone()
    };
    let (name, code, message) = param(&bound(bad, "guided_grammar"));
    assert_eq!((name.as_str(), code.as_str()), ("guided_grammar", "invalid_grammar"));
    assert!(message.contains("line 1, column 10"), "{message}");
    let bad = params::Constraint::JsonSchema { schema: String::from(r#"{"type":"x"}"#), strict: false };
    let (name, code, _) = param(&bound(bad, "response_format"));
    assert_eq!((name.as_str(), code.as_str()), ("response_format", "invalid_grammar"));
    let (name, code, _) = param(&GenerationParams { logit_bias: vec![(48, 1.0)], ..d.clone() });
    assert_eq!((name.as_str(), code.as_str()), ("logit_bias", "invalid_token"));
}

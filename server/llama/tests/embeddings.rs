//! Pooled vectors of texts, and steps that are aborted.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{load, model, params, run, tokens};
use gantry_llama::{Batch, Context, ContextError, ContextParams, DecodeError, Pooling, Token};

fn pooled(pooling: Pooling) -> Context {
    Context::new(model(), &ContextParams { pooling: Some(pooling), ..params() }).unwrap()
}

/// The vectors of texts that are decoded together, of unit length.
fn embed(context: &mut Context, texts: &[&[Token]]) -> Vec<Vec<f32>> {
    let mut batch = Batch::new();
    for (sequence, text) in (0..).zip(texts) {
        (0..).zip(text.iter()).for_each(|(position, &token)| batch.add(token, position, sequence, false));
    }
    context.decode(&mut batch).unwrap();
    let unit = |row: &[f32]| {
        let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt();
        assert!(norm.is_finite() && norm > 0.0, "{norm}");
        row.iter().map(|x| x / norm).collect()
    };
    (0..).zip(texts).map(|(sequence, _)| unit(context.embedding(sequence).unwrap())).collect()
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn equal_texts_have_equal_vectors_alone_and_among_others() {
    let (one, two) = (tokens(1, 12), tokens(2, 25));
    for pooling in [Pooling::Mean, Pooling::Cls, Pooling::Last] {
        let mut context = pooled(pooling);
        assert_eq!(model().embedding_len(pooling), 128);
        let alone = embed(&mut context, &[&one]);
        assert_eq!(alone[0].len(), 128);
        assert_eq!(embed(&mut context, &[&one]), alone, "{pooling:?}");
        let together = embed(&mut context, &[&two, &one, &one]);
        assert!(distance(&together[1], &alone[0]) < 1e-2, "{pooling:?} {}", distance(&together[1], &alone[0]));
        assert!(distance(&together[2], &together[1]) < 1e-2, "{pooling:?}");
        let other = embed(&mut context, &[&two]);
        assert!(distance(&together[0], &other[0]) < 1e-2, "{pooling:?}");
        if pooling != Pooling::Cls {
            assert!(distance(&alone[0], &other[0]) > 0.05, "{pooling:?}");
        }
    }
}

#[test]
fn each_pooling_is_what_its_name_says() {
    let text = tokens(1, 20);
    let raw = |pooling: Pooling, len: usize| {
        let mut context = pooled(pooling);
        let mut batch = Batch::new();
        (0..).zip(&text[..len]).for_each(|(position, &token)| batch.add(token, position, 0, false));
        context.decode(&mut batch).unwrap();
        context.embedding(0).unwrap().to_vec()
    };
    // Causal attention: the vector of the token at i is the last one's of the text that ends there.
    let rows: Vec<Vec<f32>> = (1..=20).map(|len| raw(Pooling::Last, len)).collect();
    let mean: Vec<f32> = (0..128).map(|i| rows.iter().map(|row| row[i]).sum::<f32>() / 20.0).collect();
    let scale = mean.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
    assert!(distance(&raw(Pooling::Mean, 20), &mean) < 0.02 * scale);
    assert!(distance(&raw(Pooling::Cls, 20), &rows[0]) < 0.02 * scale);
}

#[test]
fn a_pooling_context_gives_no_logits_and_only_the_vectors_it_made() {
    let mut context = pooled(Pooling::Mean);
    assert!(context.embedding(0).is_none());
    embed(&mut context, &[&tokens(1, 5)]);
    assert!(context.logits(0).is_none() && context.embedding(1).is_none() && context.embedding(9).is_none());
    // A text must be whole and fit; a batch that is refused changes nothing.
    let mut batch = Batch::new();
    batch.add(5, 3, 0, false);
    assert!(matches!(context.decode(&mut batch), Err(DecodeError::Batch(_))));
    assert!(context.embedding(0).is_some());
    let mut plain = Context::new(model(), &params()).unwrap();
    run(&mut plain, 0, &[5, 6]);
    assert!(plain.embedding(0).is_none());
    let rank = ContextParams { pooling: Some(Pooling::Rank), ..params() };
    assert!(matches!(Context::new(model(), &rank), Err(ContextError::Params(_))));
    assert_eq!(model().pooling(), None);
}

#[test]
fn an_encoder_gives_vectors_and_a_reranker_scores() {
    let text = |seed: i32, len: i32| (0..len).map(|i| 3 + (seed * 31 + i * 7) % 256).collect::<Vec<Token>>();
    let (one, two) = (text(1, 12), text(2, 30));
    let encoder = common::load_written(&common::gguf::bert(1));
    assert_eq!((encoder.pooling(), encoder.embedding_len(Pooling::Mean)), (Some(Pooling::Mean), 32));
    // It generates nothing.
    assert!(matches!(Context::new(&encoder, &params()), Err(ContextError::Stateless)));
    for pooling in [Pooling::Mean, Pooling::Cls] {
        let mut context = Context::new(&encoder, &ContextParams { pooling: Some(pooling), ..params() }).unwrap();
        let alone = embed(&mut context, &[&one]);
        let together = embed(&mut context, &[&two, &one]);
        assert!(distance(&together[1], &alone[0]) < 1e-2, "{}", distance(&together[1], &alone[0]));
        assert!(distance(&together[0], &together[1]) > 0.05);
        assert!(!context.sliceable());
        // Its table of positions ends at 64; llama.cpp asserts that.
        let mut batch = Batch::new();
        (0..64).for_each(|position| batch.add(5, position, 0, false));
        context.decode(&mut batch).unwrap();
        batch.clear();
        batch.add(5, 64, 0, false);
        assert!(context.decode(&mut batch).is_err());
    }
    let reranker = common::load_written(&common::gguf::bert(4));
    // <s>a</s>bc</s>, where a byte's token is three more than it.
    assert_eq!(reranker.rerank_tokens("a", "bc").unwrap(), [1, 100, 2, 101, 102, 2]);
    let rank = ContextParams { pooling: Some(Pooling::Rank), ..params() };
    assert!(matches!(Context::new(&encoder, &rank), Err(ContextError::Params(_))));
    let mut context = Context::new(&reranker, &rank).unwrap();
    let mut scores = |texts: &[&[Token]]| -> Vec<f32> {
        let mut batch = Batch::new();
        for (sequence, text) in (0..).zip(texts) {
            (0..).zip(text.iter()).for_each(|(position, &token)| batch.add(token, position, sequence, false));
        }
        context.decode(&mut batch).unwrap();
        (0..).zip(texts).map(|(sequence, _)| context.embedding(sequence).unwrap()[0]).collect()
    };
    let both = scores(&[&one, &two]);
    assert!((scores(&[&one])[0] - both[0]).abs() < 1e-2 && (scores(&[&two])[0] - both[1]).abs() < 1e-2);
    assert!(both[0].is_finite() && (both[0] - both[1]).abs() > 1e-4, "{both:?}");
}

#[test]
fn a_raised_flag_ends_a_step_and_a_lowered_one_lets_the_next_go_on() {
    let flag = Arc::new(AtomicBool::new(false));
    let abort = Some(flag.clone());
    let model = load("demo-v2.q8_0.gguf");
    for threads in [1, 2] {
        let params = ContextParams { n_batch: 512, n_ctx: 2048, threads, abort: abort.clone(), ..params() };
        let mut context = Context::new(&model, &params).unwrap();
        let want = run(&mut context, 0, &[1, 2, 3]);
        let mut batch = Batch::new();
        (0..512).for_each(|position| batch.add(9, position, 1, position == 511));
        flag.store(true, Ordering::Relaxed);
        assert_eq!(context.decode(&mut batch), Err(DecodeError::Aborted));
        assert!(context.logits(511).is_none());
        assert_eq!((context.sequence_len(0), context.sequence_len(1)), (3, 0));
        flag.store(false, Ordering::Relaxed);
        // Raised by another thread while it computes, until one step was aborted in its midst.
        std::thread::scope(|scope| {
            let raiser = scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(2));
                flag.store(true, Ordering::Relaxed);
            });
            while context.decode(&mut batch) != Err(DecodeError::Aborted) {
                context.remove(1, 0).unwrap();
            }
            raiser.join().unwrap();
        });
        flag.store(false, Ordering::Relaxed);
        assert_eq!(context.sequence_len(1), 0);
        context.decode(&mut batch).unwrap();
        context.remove(0, 0).unwrap();
        assert_eq!(run(&mut context, 0, &[1, 2, 3]), want);
    }
}

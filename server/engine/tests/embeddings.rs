//! Vectors and scores of the real models: alone as among others, in order, beside generated text.
#![allow(clippy::unwrap_used)]

#[path = "../../llama/tests/common/gguf.rs"]
mod gguf;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use gantry_engine::{
    EngineConfig, EngineError, GenerationParams, LoadError, Message, ModelHost, PooledConfig, PooledEvent, PooledWork,
    Pooling, Priority, Prompt, RequestError, Role, SubmitError, TextInput,
};

/// Longer than any batch here; reached only when something hangs.
const PATIENCE: Duration = Duration::from_secs(60);

fn model(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../e2e/models").join(name)
}

fn config(path: PathBuf, pooled: PooledConfig) -> EngineConfig {
    EngineConfig { ctx_size: 1024, parallel: 2, threads: Some(1), pooled: Some(pooled), ..EngineConfig::new(path) }
}

fn host(pooling: Pooling) -> ModelHost {
    let pooled = PooledConfig { pooling: Some(pooling), batch_tokens: 128, max_batch: 8, ..PooledConfig::default() };
    ModelHost::load(&config(model("demo-v2.q8_0.gguf"), pooled), &Arc::default(), |_| true).unwrap()
}

fn written(gguf: &gguf::Gguf) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("written.gguf");
    std::fs::write(&path, gguf.bytes()).unwrap();
    (folder, path)
}

fn texts(texts: &[&str]) -> PooledWork {
    PooledWork::Embed(texts.iter().map(|text| TextInput::Text((*text).to_owned())).collect())
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

const TEXTS: [&str; 5] =
    ["The capital of Peru is Lima.", "a", "Oslo is in Norway, far north.", "one two", "Which version?"];

#[test]
fn vectors_are_the_same_alone_and_together_and_in_the_order_of_the_texts() {
    for pooling in [Pooling::Mean, Pooling::Cls, Pooling::Last] {
        let host = host(pooling);
        let embedder = host.embedder.as_ref().unwrap();
        assert_eq!((embedder.info().pooling, embedder.info().width, embedder.info().text_tokens), (pooling, 256, 128));
        let together = embedder.compute(texts(&TEXTS)).unwrap();
        let mut tokens = 0;
        for (text, vector) in TEXTS.iter().zip(&together.vectors) {
            let alone = embedder.compute(texts(&[text])).unwrap();
            assert!((dot(vector, vector) - 1.0).abs() < 1e-4, "{pooling:?} {text}: of unit length");
            assert!(dot(vector, &alone.vectors[0]) > 0.999, "{pooling:?} {text}");
            tokens += alone.prompt_tokens;
        }
        assert_eq!(together.prompt_tokens, tokens);
        if pooling != Pooling::Cls {
            assert!(dot(&together.vectors[0], &together.vectors[3]) < 0.99, "{pooling:?}: they differ");
        }
        let stats = embedder.stats();
        assert_eq!((stats.in_flight, stats.texts_total, stats.requests_finished_total), (0, 10, 6));
    }
}

#[test]
fn a_text_too_many_or_too_long_costs_nobody_else_anything() {
    let host = host(Pooling::Mean);
    let embedder = host.embedder.as_ref().unwrap();
    let long = "word ".repeat(300);
    std::thread::scope(|scope| {
        let good: Vec<_> = (0..8).map(|_| scope.spawn(|| embedder.compute(texts(&TEXTS)))).collect();
        let bad = [
            (texts(&["a", &long]), "input[1]", "context_length_exceeded"),
            (texts(&[&long]), "input", "context_length_exceeded"),
            (PooledWork::Embed(vec![TextInput::Tokens(vec![1, 999_999])]), "input", "invalid_token"),
            (PooledWork::Embed(vec![TextInput::Tokens(vec![])]), "input", "empty_prompt"),
        ];
        for (work, field, word) in bad {
            let error = embedder.compute(work).unwrap_err();
            let EngineError::Request(RequestError::InvalidRequest { param, code, .. }) = error else {
                panic!("{error}")
            };
            assert_eq!((param.as_deref(), code.as_str()), (Some(field), word));
        }
        for thread in good {
            assert_eq!(thread.join().unwrap().unwrap().vectors.len(), TEXTS.len());
        }
    });
    let rank = PooledWork::Rank { queries: vec!["q".to_owned()], documents: vec!["d".to_owned()] };
    for (work, field) in [(rank, "documents"), (PooledWork::Embed(Vec::new()), "input")] {
        let Err(EngineError::Submit(SubmitError::InvalidParam(error))) = embedder.compute(work) else {
            panic!("taken")
        };
        assert_eq!(error.param, field);
    }
}

#[test]
fn it_generates_beside_and_what_is_cancelled_ends() {
    let host = host(Pooling::Last);
    let (engine, embedder) = (host.engine.as_ref().unwrap(), host.embedder.as_ref().unwrap());
    assert!(!host.model_info().pooled_only && host.model_info().pooled.is_some());
    let prompt = || Prompt::chat(vec![Message::text(Role::User, "What is the capital of Peru?")]);
    let alone = engine.generate(prompt(), GenerationParams::greedy(32)).unwrap().text;
    std::thread::scope(|scope| {
        let embedding = scope.spawn(|| embedder.compute(texts(&[TEXTS[0]; 400])).unwrap());
        assert_eq!(engine.generate(prompt(), GenerationParams::greedy(32)).unwrap().text, alone);
        assert_eq!(embedding.join().unwrap().vectors.len(), 400);
    });
    // The embedder waits at the first event, so that not all of it can be computed before it is cancelled.
    let (sender, events) = mpsc::channel();
    let (go, held) = mpsc::channel::<()>();
    let sink = Box::new(move |event| {
        let _ = held.recv();
        drop(sender.send(event));
    });
    let handle = embedder.submit(texts(&[TEXTS[2]; 2000]), Priority::default(), None, sink).unwrap();
    handle.cancel();
    drop(go);
    let last = loop {
        let event = events.recv_timeout(PATIENCE).unwrap();
        if event.is_terminal() {
            break event;
        }
    };
    assert_eq!(last, PooledEvent::Cancelled);
    assert_eq!(embedder.stats().in_flight, 0);
    embedder.probe(PATIENCE).unwrap();
    host.probe(PATIENCE).unwrap();
}

#[test]
fn a_reranker_scores_pairs_and_an_encoder_needs_to_be_asked() {
    let pooled = PooledConfig { batch_tokens: 64, max_batch: 4, ..PooledConfig::default() };
    let (_folder, path) = written(&gguf::bert(4));
    let host = ModelHost::load(&config(path, pooled), &Arc::default(), |_| true).unwrap();
    assert!(host.engine.is_none() && host.model_info().pooled_only);
    assert_eq!(host.model_info().pooled.unwrap().pooling, Pooling::Rank);
    host.probe(PATIENCE).unwrap();
    let embedder = host.embedder.as_ref().unwrap();
    let rank = |documents: &[&str]| {
        let documents = documents.iter().map(|document| (*document).to_owned()).collect();
        embedder.compute(PooledWork::Rank { queries: vec!["query".to_owned()], documents }).unwrap()
    };
    let documents = ["one", "another-one", "x", "a-third-and-longer-one"];
    let together = rank(&documents);
    for (document, score) in documents.iter().zip(&together.vectors) {
        assert_eq!(score.len(), 1);
        assert!((rank(&[document]).vectors[0][0] - score[0]).abs() < 1e-2, "{document}");
    }
    let pairs: usize = documents.iter().map(|document| "query".len() + document.len() + 3).sum();
    assert_eq!(together.prompt_tokens as usize, pairs);

    let load = |path: PathBuf, pooled: Option<PooledConfig>| {
        ModelHost::load(&EngineConfig { pooled, ..config(path, PooledConfig::default()) }, &Arc::default(), |_| true)
            .err()
            .unwrap()
    };
    let (_folder, encoder) = written(&gguf::bert(1));
    assert_eq!(load(encoder, None), LoadError::GeneratesNothing);
    assert_eq!(load(model("demo-draft.q8_0.gguf"), Some(PooledConfig::default())), LoadError::NoPooling);
    let rank = PooledConfig { pooling: Some(Pooling::Rank), ..PooledConfig::default() };
    assert!(
        matches!(load(model("demo-draft.q8_0.gguf"), Some(rank)), LoadError::Model { reason, .. } if reason.contains("no reranker"))
    );
    let wide = PooledConfig { batch_tokens: 0, ..PooledConfig::default() };
    assert!(matches!(load(model("demo-draft.q8_0.gguf"), Some(wide)), LoadError::Config(_)));
}

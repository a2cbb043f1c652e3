//! What a request notices of those beside it whose grammar or schema is the dearest that there is.
//!
//! `GANTRY_MODEL` names another GGUF file than the demo model. The measurement is ignored; that a neighbour's answer is
//! complete and its own, and that the dear ones fail with the limit they met, is tested.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use gantry_engine::{Constraint, Engine, EngineConfig, GenerationEvent, GenerationParams, Prompt, RequestError};
use serde_json::json;

/// Requests beside the neighbour at once.
const BESIDE: usize = 4;

fn engine() -> Engine {
    let demo = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../e2e/models/demo-v2.q8_0.gguf");
    let path = std::env::var_os("GANTRY_MODEL").map_or_else(demo, PathBuf::from);
    Engine::load(EngineConfig { parallel: 8, ctx_size: 8192, ..EngineConfig::new(path) }, |_| true).unwrap()
}

/// Each token costs as much as it may, or ends its request.
fn dearest() -> [(&'static str, Constraint); 3] {
    let letters: Vec<String> = ('a'..='z').map(|c| format!("\"{c}\" root \"{}\"", c.to_ascii_uppercase())).collect();
    let same = vec![json!({"type": "array", "items": {"$ref": "#/$defs/a"}}); 300];
    let schema = json!({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": same}}});
    let pattern = json!({"type": "string", "pattern": format!("^{}{}$", "a?".repeat(1000), "a".repeat(1000))});
    [
        ("GBNF", Constraint::Gbnf(format!("root ::= ({})?", letters.join("|")))),
        ("alternatives", Constraint::JsonSchema { schema: schema.to_string(), strict: true }),
        ("a pattern", Constraint::JsonSchema { schema: pattern.to_string(), strict: true }),
    ]
}

/// The milliseconds between the deltas of a plain answer, and its text.
fn neighbour(engine: &Engine) -> (Vec<f64>, String) {
    let (sender, events) = mpsc::channel();
    let params = GenerationParams { ignore_eos: true, ..GenerationParams::greedy(160) };
    let prompt = Prompt::Text(String::from("Once upon a time there was"));
    engine.submit(prompt, params, Box::new(move |event| drop(sender.send((Instant::now(), event))))).unwrap();
    let (mut last, mut gaps, mut whole) = (None, Vec::new(), String::new());
    for (at, event) in events {
        match event {
            GenerationEvent::Text { text, .. } => {
                gaps.extend(last.map(|last| at.duration_since(last).as_secs_f64() * 1e3));
                last = Some(at);
                whole += &text;
            }
            GenerationEvent::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
    (gaps, whole)
}

/// What the neighbour noticed, while so many others come again and again; and how those ended.
fn beside(engine: &Arc<Engine>, grammar: Option<&Constraint>) -> (Vec<f64>, String, Vec<RequestError>) {
    let over = Arc::new(AtomicBool::new(false));
    let others: Vec<_> = (0..if grammar.is_some() { BESIDE } else { 0 })
        .map(|_| {
            let (engine, over, grammar) = (engine.clone(), over.clone(), grammar.cloned());
            std::thread::spawn(move || {
                let mut errors = Vec::new();
                while !over.load(Ordering::Relaxed) {
                    let params = GenerationParams { constraint: grammar.clone(), ..GenerationParams::greedy(64) };
                    let prompt = Prompt::Text(String::from("Write as much as you can:"));
                    if let Err(gantry_engine::EngineError::Request(error)) = engine.generate(prompt, params) {
                        errors.push(error);
                    }
                }
                errors
            })
        })
        .collect();
    let (gaps, text) = neighbour(engine);
    over.store(true, Ordering::Relaxed);
    (gaps, text, others.into_iter().flat_map(|other| other.join().unwrap()).collect())
}

#[test]
fn the_dearest_grammars_fail_by_themselves_and_say_which_limit_they_met() {
    let engine = Arc::new(engine());
    for (what, grammar) in dearest() {
        let (gaps, text, errors) = beside(&engine, Some(&grammar));
        assert!(gaps.len() > 32 && !text.is_empty(), "{what}: {} deltas", gaps.len());
        for error in errors {
            let RequestError::InvalidRequest { code, message, .. } = &error else { panic!("{what}: {error}") };
            assert_eq!(code, "grammar_too_complex", "{what}: {message}");
            assert!(
                ["more than", "too many", "max is"].iter().any(|limit| message.contains(limit)),
                "{what}: {message}"
            );
        }
    }
    engine.probe(Duration::from_secs(60)).unwrap();
}

#[test]
#[ignore = "a measurement"]
fn what_a_neighbour_notices() {
    let engine = Arc::new(engine());
    let report = |what: &str, mut gaps: Vec<f64>, errors: &[RequestError]| {
        gaps.sort_by(f64::total_cmp);
        let at = |share: f64| gaps[((gaps.len() - 1) as f64 * share) as usize];
        let (p50, p99, worst) = (at(0.5), at(0.99), at(1.0));
        println!(
            "{what}: ITL ms p50 {p50:.1}, p99 {p99:.1}, worst {worst:.1}; {} failed {:?}",
            errors.len(),
            errors.first()
        );
    };
    neighbour(&engine);
    for round in 0..3 {
        let (gaps, _, errors) = beside(&engine, None);
        report(&format!("{round} alone"), gaps, &errors);
        let plain = Constraint::Gbnf(String::from("root ::= [a-zA-Z ,.!?'\\n-]+"));
        let (gaps, _, errors) = beside(&engine, Some(&plain));
        report(&format!("{round} beside {BESIDE} ordinary ones"), gaps, &errors);
        for (what, grammar) in dearest() {
            let (gaps, _, errors) = beside(&engine, Some(&grammar));
            report(&format!("{round} beside {BESIDE} of {what}"), gaps, &errors);
        }
    }
}

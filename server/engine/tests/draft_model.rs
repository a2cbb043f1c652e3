//! The engine with a draft model, on the real demo models: what it guesses changes nothing but the number of steps.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use gantry_engine::{
    Engine, EngineConfig, EngineStats, FinishReason, GenerationEvent, GenerationOutput, GenerationParams, KvLayout,
    LoadError, Message, Priority, Prompt, Role, SpeculationConfig,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Longer than any test here; reached only when something hangs.
const PATIENCE: Duration = Duration::from_secs(300);
/// Requests of the test under load.
const REQUESTS: usize = 120;
/// Engines in which guesses may find no use, one after the other: whether they pay is measured, and on a busy machine they may
/// not.
const MOST_LOADS: usize = 20;
/// A row that is computed in another batch differs in its last digits: two tokens that are almost equally likely may
/// change places in so many of them, half of which must go on where the model would have ended.
const MAX_DIVERGED: usize = REQUESTS / 10;

fn model(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../e2e/models").join(name)
}

fn config(drafts: bool) -> EngineConfig {
    let draft_model = drafts.then(|| model("demo-draft.q8_0.gguf"));
    EngineConfig {
        ctx_size: 4 * 512,
        parallel: 4,
        speculation: SpeculationConfig { draft_model, ..SpeculationConfig::default() },
        ..EngineConfig::new(model("demo-v2.f16.gguf"))
    }
}

/// Loads a model, and waits until it is known what steps cost: before that it is not known whether guesses pay.
fn load(config: EngineConfig) -> Engine {
    let engine = Engine::load(config, |fraction| (0.0..=1.0).contains(&fraction)).unwrap();
    let begun = Instant::now();
    while engine.stats().measures {
        assert!(begun.elapsed() < PATIENCE, "it measures for {PATIENCE:?}");
        std::thread::yield_now();
    }
    engine
}

/// What the demo models were trained on: questions with short answers, and two with long ones.
fn chats() -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(model("eval.jsonl")).unwrap();
    let short = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["messages"].clone());
    let long = ["Count to fifty.", "Tell me a story."];
    short.chain(long.map(|question| serde_json::json!([{"role": "user", "content": question}]))).collect()
}

/// Messages that are text alone, as a file has them.
fn prompt(messages: &serde_json::Value) -> Prompt {
    let role = |message: &serde_json::Value| match message["role"].as_str().unwrap() {
        "system" => Role::System,
        "user" => Role::User,
        _ => Role::Assistant,
    };
    let message = |message| Message::text(role(message), message["content"].as_str().unwrap());
    Prompt::chat(messages.as_array().unwrap().iter().map(message).collect::<Vec<_>>())
}

/// One after the other.
fn answers(engine: &Engine) -> (Vec<GenerationOutput>, EngineStats) {
    let all =
        chats().iter().map(|chat| engine.generate(prompt(chat), GenerationParams::greedy(400)).unwrap()).collect();
    (all, engine.stats())
}

#[test]
fn answers_are_the_same_in_fewer_steps() {
    let (expected, plain) = answers(&load(config(false)));
    assert_eq!((plain.draft_tokens_total, plain.lookup_tokens_total), (0, 0));
    let mut accepted = 0;
    for _ in 0..MOST_LOADS {
        let (got, drafted) = answers(&load(config(true)));
        println!("without: {plain:?}\nwith: {drafted:?}");
        for (got, expected) in got.iter().zip(&expected) {
            assert_eq!((&got.text, got.reason), (&expected.text, expected.reason));
            assert_eq!(got.usage.completion_tokens, expected.usage.completion_tokens);
        }
        // A guess that was right is a step less, to the last one: how many there are depends on what steps take here.
        assert_eq!(drafted.steps + drafted.accepted_draft_tokens_total, plain.steps);
        assert!(drafted.draft_ms_total > 0.0 || drafted.draft_tokens_total == 0, "{drafted:?}");
        assert_eq!(drafted.lookup_tokens_total, 0);
        accepted += drafted.accepted_draft_tokens_total;
        if accepted > 0 {
            return;
        }
    }
    panic!("no guess was right, or none was made, in {MOST_LOADS} engines");
}

/// Repetitions and a draft model, cancels, and cells for about three of eight sequences.
#[test]
fn answers_under_load_are_the_answers_alone() {
    let mut rng = StdRng::seed_from_u64(7);
    let chats = chats();
    let priorities = [Priority::Low, Priority::Normal, Priority::High];
    let requests: Vec<(&serde_json::Value, GenerationParams)> = (0..REQUESTS)
        .map(|i| {
            let params = GenerationParams {
                ignore_eos: i % 2 == 0,
                priority: priorities[rng.random_range(0..3)],
                ..GenerationParams::greedy(rng.random_range(20..120))
            };
            (&chats[rng.random_range(0..chats.len())], params)
        })
        .collect();
    let alone = load(EngineConfig { parallel: 1, ctx_size: 512, ..config(false) });
    let expected: Vec<GenerationOutput> =
        requests.iter().map(|(chat, params)| alone.generate(prompt(chat), params.clone()).unwrap()).collect();
    drop(alone);

    let mut guessing = config(true);
    guessing.speculation.prompt_lookup = true;
    let engine = load(EngineConfig {
        parallel: 8,
        ctx_size: 512,
        kv_layout: KvLayout::Unified,
        prefill_tokens_per_step: 64,
        ..guessing
    });
    let mut running = Vec::new();
    for (chat, params) in &requests {
        let (sender, events) = mpsc::channel();
        let sink = Box::new(move |event| drop(sender.send(event)));
        running.push((engine.submit(prompt(chat), params.clone(), sink).unwrap(), events, false));
        if rng.random_bool(0.15) {
            let victim = rng.random_range(0..running.len());
            running[victim].0.cancel();
            running[victim].2 = true;
        }
    }
    let mut diverged = 0;
    for ((_, events, cancelled), expected) in running.into_iter().zip(&expected) {
        let mut text = String::new();
        let reason = loop {
            match events.recv_timeout(PATIENCE).unwrap() {
                GenerationEvent::Text { text: more, .. } => text.push_str(&more),
                GenerationEvent::Finished { reason, .. } => break reason,
                GenerationEvent::Failed(error) => panic!("{error}"),
                _ => {}
            }
        };
        let same = if reason == FinishReason::Cancelled {
            assert!(cancelled);
            expected.text.starts_with(&text)
        } else {
            (&text, reason) == (&expected.text, expected.reason)
        };
        diverged += usize::from(!same);
    }
    let stats = engine.stats();
    println!("{diverged} differ; {stats:?}");
    assert!(diverged <= MAX_DIVERGED, "{diverged} of {REQUESTS} answers differ from those alone");
    assert!(stats.preemptions_total > 0 && stats.requests_cancelled_total > 0, "{stats:?}");
    assert_eq!((stats.slots_active, stats.queued, stats.requests_failed_total), (0, 0, 0));
}

/// The demo's draft model with one letter of one of its tokens changed.
fn other_tokens() -> Vec<u8> {
    let mut file = std::fs::read(model("demo-draft.q8_0.gguf")).unwrap();
    let key = b"tokenizer.ggml.tokens";
    let number = |file: &[u8], at: usize| usize::try_from(u64::from_le_bytes(file[at..at + 8].try_into().unwrap()));
    // After the key: the type, the type of the items, their number, and each with its length before it.
    let mut at = file.windows(key.len()).position(|window| window == key).unwrap() + key.len() + 8;
    let tokens = number(&file, at).unwrap();
    at += 8;
    for token in 0..tokens {
        let len = number(&file, at).unwrap();
        let text = &mut file[at + 8..at + 8 + len];
        if token > 1_000 && text.last().is_some_and(u8::is_ascii_lowercase) {
            text[len - 1] = if text[len - 1] == b'q' { b'x' } else { b'q' };
            return file;
        }
        at += 8 + len;
    }
    panic!("no token ends in a letter");
}

#[test]
fn a_model_that_cannot_guess_for_the_other_is_refused_by_name() {
    let file = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
    std::fs::write(file.path(), other_tokens()).unwrap();
    let with = |draft: PathBuf| {
        let mut config = config(true);
        config.speculation.draft_model = Some(draft);
        Engine::load(config, |_| true).err().unwrap()
    };
    let refused = with(file.path().to_path_buf());
    assert!(matches!(refused, LoadError::Draft { .. }), "{refused}");
    let message = refused.to_string();
    for part in [&*file.path().to_string_lossy(), "demo-v2.f16.gguf", "its token 1", "not "] {
        assert!(message.contains(part), "{message}");
    }
    let absent = with(model("nowhere.gguf"));
    assert!(matches!(&absent, LoadError::Model { path, .. } if path.ends_with("nowhere.gguf")), "{absent}");
}

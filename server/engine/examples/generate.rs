//! The engine alone, with no server: answers one question on standard output, piece by piece.
//!
//! `cargo run --release -p gantry-engine --example generate -- e2e/models/demo-v2.q8_0.gguf "What is KEDA?"`

use std::io::Write;
use std::sync::mpsc;

use anyhow::{Context, bail};
use gantry_engine::{Engine, EngineConfig, GenerationEvent, GenerationParams, Message, Prompt, Role};

fn main() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let (Some(model), Some(question)) = (args.next(), args.next()) else {
        bail!("usage: generate MODEL.gguf QUESTION");
    };
    let config = EngineConfig { parallel: 1, ..EngineConfig::new(model) };
    let engine = Engine::load(config, |_| true)?;

    let messages = vec![Message::text(Role::User, question)];
    let (sender, events) = mpsc::channel();
    // The sink runs on the engine's thread, so it only passes events on. A closed channel means nobody listens.
    let sink = Box::new(move |event| drop(sender.send(event)));
    engine.submit(Prompt::chat(messages), GenerationParams::greedy(256), sink)?;

    let mut out = std::io::stdout().lock();
    for event in events {
        match event {
            GenerationEvent::Text { text, .. } => {
                write!(out, "{text}")?;
                out.flush()?;
            }
            GenerationEvent::Finished { reason, usage, timings, .. } => {
                let rate = f64::from(usage.completion_tokens) / (timings.decode_ms / 1e3).max(1e-3);
                writeln!(out, "\n[{reason:?}: {usage:?}, {rate:.0} tokens/s]")?;
                return Ok(());
            }
            GenerationEvent::Failed(error) => return Err(error).context("the request failed"),
            _ => {}
        }
    }
    bail!("the engine ended the request without an event")
}

//! What one token of a stream costs to write: from a template, and as a value of its type.
//!
//! `cargo run --release -p gantry-openai --example chunk_cost`
#![allow(clippy::unwrap_used)]

use std::hint::black_box;
use std::time::Instant;

use gantry_openai::{
    ChatChunk, ChatChunkChoice, ChatLogprobs, ChunkHead, ChunkTemplate, Delta, TokenChance, sse_event,
};

const TOKENS: u32 = 2_000_000;
/// Tokens whose text lies in one buffer, as in the server.
const TOKENS_PER_BUFFER: u32 = 64;

fn main() {
    let (id, model, version) = ("chatcmpl-0123456789abcdef0123456789abcdef", "qwen2.5-0.5b-instruct", "chat-v2-8c1f");
    let head = ChunkHead { id, created: 1_770_000_000, model, system_fingerprint: version };
    let text = " the\n";

    let template = ChunkTemplate::chat(head, false).unwrap();
    let mut buffer = Vec::with_capacity(32 * 1024);
    report("template", || {
        for token in 0..TOKENS {
            if token % TOKENS_PER_BUFFER == 0 {
                buffer.clear();
            }
            template.write(&mut buffer, 0, black_box(text), None::<&ChatLogprobs>).unwrap();
        }
        black_box(&buffer);
    });
    report("value", || {
        for _ in 0..TOKENS {
            let delta = Delta { content: Some(black_box(text).to_owned()), ..Delta::default() };
            black_box(sse_event(&chunk(head, delta, None)).unwrap());
        }
    });
    let mut logprobs = ChatLogprobs::default();
    let token = |bytes| TokenChance { bytes, logprob: -0.731 };
    logprobs.push(token(b" the\n"), [" the", " a", " an", " this", " that"].map(|t| token(t.as_bytes())).into_iter());
    report("template, 5 top_logprobs", || {
        for _ in 0..TOKENS {
            buffer.clear();
            template.write(&mut buffer, 0, black_box(text), Some(&logprobs)).unwrap();
            black_box(&buffer);
        }
    });
}

fn chunk(head: ChunkHead<'_>, delta: Delta, logprobs: Option<ChatLogprobs>) -> ChatChunk {
    ChatChunk {
        id: head.id.to_owned(),
        object: "chat.completion.chunk".to_owned(),
        created: head.created,
        model: head.model.to_owned(),
        system_fingerprint: head.system_fingerprint.to_owned(),
        choices: vec![ChatChunkChoice {
            index: 0,
            delta,
            logprobs,
            finish_reason: None,
            stop_reason: None,
            timings: None,
        }],
        usage: None,
    }
}

fn report(what: &str, mut run: impl FnMut()) {
    run();
    let start = Instant::now();
    run();
    println!("{what}: {:.0} ns a token", start.elapsed().as_secs_f64() * 1e9 / f64::from(TOKENS));
}

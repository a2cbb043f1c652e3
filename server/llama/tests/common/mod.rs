//! A demo model, and how the tests use a context on it.
#![allow(dead_code, clippy::unwrap_used)]

pub mod gguf;

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use gantry_llama::{Batch, Context, ContextParams, Model, ModelParams, Token};

/// Loads a model of `e2e/models`.
pub fn load(name: &str) -> Arc<Model> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../e2e/models").join(name);
    Model::load(&path, &ModelParams::default(), &mut |_| true).unwrap()
}

/// Loads what a test wrote.
pub fn load_written(gguf: &gguf::Gguf) -> Arc<Model> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&gguf.bytes()).unwrap();
    Model::load(file.path(), &ModelParams::default(), &mut |_| true).unwrap()
}

/// The smallest of them.
pub fn model() -> &'static Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    MODEL.get_or_init(|| load("demo-draft.q8_0.gguf"))
}

/// Four sequences of 256 tokens.
pub fn params() -> ContextParams {
    ContextParams { n_ctx: 1024, n_batch: 64, sequences: 4, ..ContextParams::default() }
}

pub fn context(params: &ContextParams) -> Context {
    Context::new(model(), params).unwrap()
}

/// Appends tokens to a sequence, a batch at a time, and gives the logits after the last of them.
pub fn run(context: &mut Context, sequence: u32, tokens: &[Token]) -> Vec<f32> {
    let mut row = Vec::new();
    for part in tokens.chunks(context.n_batch() as usize) {
        let mut batch = Batch::new();
        for (position, (i, &token)) in (context.sequence_len(sequence)..).zip(part.iter().enumerate()) {
            batch.add(token, position, sequence, i + 1 == part.len());
        }
        context.decode(&mut batch).unwrap();
        row = context.logits(part.len() - 1).unwrap().to_vec();
    }
    row
}

/// Tokens that are no special ones, different for each seed.
pub fn tokens(seed: u32, len: u32) -> Vec<Token> {
    (0..len).map(|i| (10 + (seed * 7919 + i * 31) % 2000).cast_signed()).collect()
}

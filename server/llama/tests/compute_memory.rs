//! What memory a context computes in, as llama.cpp's log says it. A process of its own: a test beside it that logs first
//! could have the log turned off for both.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::io::Write;
use std::sync::{Arc, Mutex};

use common::{context, model, params};
use gantry_llama::ContextParams;

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Bytes that llama.cpp says a context computes in.
fn compute_bytes(params: &ContextParams, log: &Lines) -> f64 {
    log.0.lock().unwrap().clear();
    let told = context(params).compute_bytes() as f64;
    let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    let (_, size) = text.split_once("compute buffer size = ").expect(&text);
    let logged = size.split_whitespace().next().unwrap().parse::<f64>().unwrap() * 1024.0 * 1024.0;
    // The log rounds to hundredths of a MiB.
    assert!((told - logged).abs() < 0.01 * 1024.0 * 1024.0, "told {told}, logged {logged}");
    told
}

#[test]
fn memory_is_taken_for_the_rows_of_logits_that_are_asked_for() {
    let log = Lines::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).with_ansi(false);
    subscriber.with_writer(move || writer.clone()).init();
    let rows = |outputs| compute_bytes(&ContextParams { n_batch: 512, outputs: Some(outputs), ..params() }, &log);
    let row = f64::from(model().vocab_size()) * size_of::<f32>() as f64;
    let (few, many) = (rows(4), rows(512));
    // With few rows what comes before them is larger.
    assert!(many - few > 256.0 * row, "4 rows: {few}, 512 rows: {many}");
}

//! What only a real context shows.
#![allow(clippy::unwrap_used)]

use gantry_llama::Pooling;

use super::*;
use crate::backend::PooledBackend;
use crate::params::PooledConfig;

#[test]
fn a_model_in_several_files_is_named_by_all_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = |number: u32| folder.path().join(format!("m-{number:05}-of-00002.gguf"));
    let digest = || digest_of(&EngineConfig::new(path(1)), &mut |_| true).unwrap();
    std::fs::write(path(1), "keys").unwrap();
    std::fs::write(path(2), "weights").unwrap();
    let one = digest();
    assert!((bytes_of(&path(1)) - 11.0).abs() < 0.1);
    std::fs::write(path(2), "others!").unwrap();
    assert_ne!(digest(), one, "what was computed with the one is of no use with the other");
    // Opened by llama.cpp, it would be waited for.
    std::fs::remove_file(path(2)).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(path(2)).status().unwrap().success());
    let refused = load_model(&path(1), &ModelParams::default(), &mut |_| true);
    assert!(matches!(refused, Err(LoadError::Model { reason, .. }) if reason.contains("not a regular file")));
}

#[test]
fn each_computation_keeps_to_the_limit_of_its_beginning() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../e2e/models/demo-v2.q8_0.gguf");
    let config = EngineConfig { threads: Some(3), parallel: 1, ctx_size: 256, ..EngineConfig::new(path) };
    let limit = Arc::<ThreadLimit>::default();
    let opened = open(&config, &limit, &mut |_| true).unwrap();
    let mut backend = generator(&config, &opened).unwrap().backend;
    let mut position = 0;
    let mut threads = || {
        backend.decode(&[BatchEntry { token: 1, position, sequence: 0, output: false }]).unwrap();
        position += 1;
        backend.context.threads()
    };
    assert_eq!(threads(), 3);
    for (most, have) in [(1, 1), (2, 2), (0, 1), (9, 3)] {
        limit.set(most);
        assert_eq!(threads(), have, "a limit of {most}");
    }
}

#[test]
fn what_texts_will_take_counts_the_rows_that_a_full_batch_makes() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../e2e/models/demo-v2.q8_0.gguf");
    let pooled = PooledConfig { pooling: Some(Pooling::Mean), max_batch: 8, ..PooledConfig::default() };
    let opened = open(&EngineConfig::new(path), &Arc::default(), &mut |_| true).unwrap();
    let untouched_bytes = |batch_tokens| {
        let pooled = PooledConfig { batch_tokens, ..pooled };
        pooler(&EngineConfig::new(path), &pooled, &opened).unwrap().backend.untouched_bytes()
    };
    // Each of the eight texts has a row from the start, and so has each token where there are no more.
    let more_rows_bytes = (512 - 8) * u64::from(opened.model.vocab_size()) * 4;
    assert!(untouched_bytes(512) >= untouched_bytes(8) + more_rows_bytes);
}

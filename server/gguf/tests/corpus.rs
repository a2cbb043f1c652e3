//! More than a hundred ways of being malformed, each made from a good file and refused with its code; and mutations of them.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "../fuzz/invariants.rs"]
mod invariants;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::corpus::SHAPES;
use common::{Gguf, Shape, array, strings, ty};
use gantry_gguf::{Code, inspect_prefix};
use proptest::prelude::*;

fn demo(name: &str) -> Gguf {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../e2e/models").join(name);
    Gguf::parse(&std::fs::read(path).unwrap())
}

/// The code of the first error.
fn first(file: &Gguf) -> &'static str {
    let (bytes, file_bytes) = file.header();
    let inspection = inspect_prefix(&bytes, file_bytes);
    inspection.findings.first_error().map_or("none", |finding| finding.code.as_str())
}

#[test]
fn every_shape_is_refused_with_its_code() {
    assert!(SHAPES.len() >= 100);
    let synthetic = Gguf::model(&Shape { tied: false, ..Shape::default() });
    let mut failures = Vec::new();
    for (model, good) in [("synthetic", synthetic), ("draft", demo("demo-draft.q8_0.gguf"))] {
        assert_eq!(first(&good), "none", "{model}");
        for (name, change, code) in SHAPES {
            let mut file = good.clone();
            change(&mut file);
            let found = first(&file);
            if found != *code {
                failures.push(format!("{model}, {name}: {found}, not {code}"));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn what_the_corpus_parses_is_what_it_writes() {
    for name in ["demo-draft.q8_0.gguf", "demo-v2.q4_k_m.gguf"] {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../e2e/models").join(name);
        let whole = std::fs::read(path).unwrap();
        let (header, file_bytes) = Gguf::parse(&whole).header();
        assert_eq!(file_bytes, whole.len() as u64);
        assert!(whole.starts_with(&header), "{name}");
    }
}

/// Codes that a header alone can have.
#[test]
fn every_code_of_a_header_is_in_the_corpus() {
    let elsewhere = [
        // Of several files, of the length of one, of the weights, of what is asked of it, or of a worker.
        "unreadable",
        "truncated-header",
        "counts-beyond-file",
        "not-first-split",
        "split-name",
        "wrong-split",
        "foreign-split",
        "split-tensor-count",
        "truncated-data",
        "trailing-bytes",
        "not-finite",
        "zero-weights",
        "pooling",
        "trial-load",
        // Files of 16 MiB and more.
        "header-too-long",
        "keys-too-long",
        // Of other tokenizers.
        "missing-token",
        "invalid-character-map",
    ];
    for code in Code::ALL.iter().filter(|code| code.severity() == gantry_gguf::Severity::Error) {
        let name = code.as_str();
        let is_there = SHAPES.iter().any(|(.., code)| *code == name);
        assert!(is_there != elsewhere.contains(&name), "{name}");
    }
}

#[test]
fn other_tokenizers_have_their_own_faults() {
    let t5 = |map: &[u8]| {
        let mut file = Gguf::model(&Shape::default());
        file.text("tokenizer.ggml.model", "t5");
        file.put("tokenizer.ggml.precompiled_charsmap", ty::ARRAY, array(ty::U8, map.len() as u64, map));
        first(&file)
    };
    assert_eq!(t5(&[4, 0, 0, 0, 1, 2, 3, 4, 5]), "none");
    assert_eq!(t5(&[9, 0, 0, 0, 1, 2, 3, 4, 5]), "invalid-character-map");
    assert_eq!(t5(&[]), "invalid-character-map");
    let mut file = Gguf::model(&Shape::default());
    file.text("tokenizer.ggml.model", "rwkv");
    file.put("tokenizer.ggml.add_bos_token", ty::BOOL, vec![1]);
    // With this tokenizer nothing is put around a text; BERT's is put around each, and is not in a vocabulary of 40.
    file.text("tokenizer.ggml.model", "bert");
    assert_eq!(first(&file), "missing-token");
}

/// The demo models have byte-level vocabularies.
#[test]
fn a_tokenizer_that_is_not_the_vocabularys_is_refused() {
    for model in ["bert", "gemma4", "llama", "plamo2", "rwkv", "t5"] {
        for name in ["demo-draft.q8_0.gguf", "demo-v2.q4_k_m.gguf"] {
            let mut file = demo(name);
            file.text("tokenizer.ggml.model", model);
            assert_eq!(first(&file), "foreign-tokenizer", "{model}, {name}");
        }
    }
    let (bytes, file_bytes) = demo("demo-draft.q8_0.gguf").header();
    assert!(inspect_prefix(&bytes, file_bytes).findings.list.is_empty());
}

#[test]
fn marks_of_byte_pairs_are_characters_in_other_vocabularies() {
    // Tokens, those that begin as after a space in one kind and in the other, and whether any tokenizer but its own is refused.
    for (tokens, byte_level, pieces, is_refused) in [
        (200, 20, 0, true),
        (200, 19, 0, false),
        (200, 20, 1, true),
        (200, 20, 2, false),
        (400, 20, 0, true),
        (401, 20, 0, false),
        (400, 200, 19, true),
        (400, 200, 20, false),
    ] {
        let text = |token: u32| match token {
            _ if token < byte_level => format!("Ġ{token}"),
            _ if token < byte_level + pieces => format!("▁{token}"),
            // Within a token it is no space.
            _ => format!("t{token}Ġ"),
        };
        for model in ["gpt2", "llama", "rwkv", "t5", "whitespace"] {
            let mut file = Gguf::model(&Shape { vocabulary: tokens, ..Shape::default() });
            file.put("tokenizer.ggml.tokens", ty::ARRAY, strings((0..tokens).map(text)));
            file.put("tokenizer.ggml.merges", ty::ARRAY, strings(["Ġ 0"]));
            file.text("tokenizer.ggml.model", model);
            let wanted =
                if is_refused && !["gpt2", "whitespace"].contains(&model) { "foreign-tokenizer" } else { "none" };
            assert_eq!(first(&file), wanted, "{model}: {byte_level} and {pieces} of {tokens}");
        }
    }
}

#[test]
fn a_length_that_is_not_the_files_has_its_code() {
    let (bytes, file_bytes) = demo("demo-draft.q8_0.gguf").header();
    let of = |length: u64| {
        let inspection = inspect_prefix(&bytes, length);
        inspection.findings.first_error().map_or("none", |finding| finding.code.as_str())
    };
    assert_eq!(of(file_bytes), "none");
    for (length, code) in [
        (0, "truncated-header"),
        (3, "truncated-header"),
        (23, "truncated-header"),
        (24, "counts-beyond-file"),
        (bytes.len() as u64 / 2, "truncated-header"),
        (bytes.len() as u64, "truncated-data"),
        (file_bytes - 33, "truncated-data"),
        (file_bytes + 1, "trailing-bytes"),
        (u64::MAX, "trailing-bytes"),
    ] {
        assert_eq!(of(length), code, "{length} of {file_bytes}");
    }
}

/// The header of a small model for each shape, and of one that is good.
fn seeds() -> Vec<Vec<u8>> {
    let good = Gguf::model(&Shape::default());
    let malformed = SHAPES.iter().map(|(_, change, _)| {
        let mut file = good.clone();
        change(&mut file);
        file
    });
    let headers = malformed.chain([good.clone()]).map(|file| file.header().0);
    // Those of 64 KiB are as well without their long key.
    headers.filter(|header| header.len() <= 16 * 1024).collect()
}

/// How many mutations are tried where nobody says, and for how long at most.
const EXECUTIONS: u32 = 100_000;
const PATIENCE: Duration = Duration::from_secs(60);

/// Bytes set, numbers made extreme, pieces cut out, doubled, or taken from another seed.
fn mutate(bytes: &mut Vec<u8>, other: &[u8], edits: &[(u8, u32, u64)]) {
    for &(kind, at, value) in edits {
        let at = at as usize % bytes.len().max(1);
        let end = (at + 8).min(bytes.len());
        match kind % 8 {
            0 => bytes[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]),
            1 => bytes[at..end].fill(0xff),
            2 => bytes[at..end].fill(0),
            3 if end > at => bytes[at] ^= value as u8 | 1,
            4 => drop(bytes.drain(at..end)),
            5 => {
                let piece = bytes[at..end].to_vec();
                bytes.splice(at..at, piece);
            }
            6 => bytes.truncate(at),
            _ => {
                let from = value as usize % other.len();
                let piece = &other[from..(from + 64).min(other.len())];
                bytes.splice(at..end, piece.iter().copied());
            }
        }
    }
}

#[test]
fn mutations_never_panic_and_are_judged_in_bounded_time() {
    let seeds = seeds();
    let executions = std::env::var("GGUF_EXECUTIONS").ok().and_then(|text| text.parse().ok()).unwrap_or(EXECUTIONS);
    let started = Instant::now();
    let done = std::cell::Cell::new(0_u32);
    let edits = proptest::collection::vec((any::<u8>(), any::<u32>(), any::<u64>()), 1..6);
    let mutation = (any::<prop::sample::Index>(), any::<prop::sample::Index>(), edits);
    let config = ProptestConfig { cases: executions, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    let result = runner.run(&mutation, |(one, other, edits)| {
        if executions == EXECUTIONS && started.elapsed() > PATIENCE {
            return Ok(());
        }
        let mut bytes = one.get(&seeds).clone();
        let other: &Vec<u8> = other.get(&seeds);
        mutate(&mut bytes, other, &edits);
        let before = Instant::now();
        invariants::check(&bytes);
        // A header of 16 KiB is judged in far less than a millisecond; the rest is for a machine with other work.
        prop_assert!(before.elapsed() < Duration::from_secs(10));
        done.set(done.get() + 1);
        Ok(())
    });
    result.unwrap();
    let done = done.get();
    println!("{done} executions of {} seeds in {:?}", seeds.len(), started.elapsed());
    assert!(done >= 500, "{done} executions in {:?}", started.elapsed());
}

#[test]
#[ignore = "writes the seeds of the fuzz target into the folder GGUF_SEEDS"]
fn write_the_seeds() {
    let folder = std::env::var_os("GGUF_SEEDS").expect("GGUF_SEEDS names the folder");
    let folder = Path::new(&folder);
    std::fs::create_dir_all(folder).unwrap();
    for (number, seed) in seeds().into_iter().enumerate() {
        std::fs::write(folder.join(format!("{number:03}")), seed).unwrap();
    }
}

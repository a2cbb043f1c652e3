//! The tables of architectures and element types, held against the source of the llama.cpp that the server links.
//!
//! Cargo has unpacked that source wherever the server can be built. Where it has not, the tests fail and say how to get
//! it: a comparison with nothing would pass whatever the tables held.
#![allow(clippy::unwrap_used)]

mod llama;

use std::collections::BTreeSet;
use std::path::Path;

use gantry_gguf::GgmlType;
use llama::{find, source};

#[test]
fn a_source_that_is_not_there_is_not_found() {
    let registries = source().join("../../..");
    assert!(find(&registries, "0.0.0").is_none());
    assert!(find(&registries.join("nowhere"), "0.0.0").is_none());
}

#[test]
fn every_architecture_of_llama_cpp_is_known_and_no_other() {
    let source = source();
    let text = std::fs::read_to_string(source.join("src/llama-arch.cpp")).unwrap();
    let theirs: BTreeSet<&str> = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("{ LLM_ARCH_"))
        .filter_map(|line| line.split('"').nth(1))
        .filter(|name| *name != "(unknown)")
        .collect();
    assert!(theirs.len() > 100);
    assert_eq!(ours("arch.rs", "KNOWN"), owned(&theirs));
}

/// The architectures for which llama.cpp makes no memory, so that they generate nothing.
#[test]
fn every_architecture_without_memory_is_an_encoder_or_refused() {
    let source = source();
    let names = std::fs::read_to_string(source.join("src/llama-arch.cpp")).unwrap();
    let name_of = |arch: &str| {
        let (_, rest) = names.split_once(&format!("{{ {arch},")).unwrap();
        rest.split('"').nth(1).unwrap().to_owned()
    };
    let text = std::fs::read_to_string(source.join("src/llama-model.cpp")).unwrap();
    let (_, body) = text.split_once("llama_model::create_memory(").unwrap();
    let (cases, _) = body.split_once("res = nullptr").unwrap();
    let theirs: BTreeSet<String> =
        cases.lines().filter_map(|line| line.trim().strip_prefix("case ")?.strip_suffix(':')).map(name_of).collect();
    assert!(theirs.len() > 10);
    let arch = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/arch.rs")).unwrap();
    let (_, encoders) = arch.split_once("fn is_encoder").unwrap();
    let (encoders, _) = encoders.split_once("\n}").unwrap();
    let mut ours: BTreeSet<String> = encoders.split('"').skip(1).step_by(2).map(str::to_owned).collect();
    // A speech model, and those that denoise text, which are refused.
    ours.extend(["wavtokenizer-dec", "dream", "llada", "llada-moe", "rnd1"].map(str::to_owned));
    assert_eq!(ours, theirs);
}

/// The names of one of our lists.
fn ours(file: &str, list: &str) -> BTreeSet<String> {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(file)).unwrap();
    let (_, list) = text.split_once(&format!("const {list}: &[&str] =")).unwrap();
    let (list, _) = list.split_once("];").unwrap();
    list.split('"').skip(1).step_by(2).map(str::to_owned).collect()
}

fn owned(names: &BTreeSet<&str>) -> BTreeSet<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

#[test]
fn every_tokenizer_of_llama_cpp_is_known_and_no_other() {
    let source = source();
    let text = std::fs::read_to_string(source.join("src/llama-vocab.cpp")).unwrap();
    let compared = |name: &str| -> BTreeSet<&str> {
        text.split(&format!("{name} == \"")).skip(1).filter_map(|rest| rest.split('"').next()).collect()
    };
    let pre_tokenizers = compared("tokenizer_pre");
    assert!(pre_tokenizers.len() > 50);
    assert_eq!(ours("tokenizer.rs", "PRE_TOKENIZERS"), owned(&pre_tokenizers));
    let mut models = compared("tokenizer_model");
    // Without a vocabulary there is no text, and one is for llama.cpp's own tests.
    for name in ["no_vocab", "none", "test"] {
        assert!(models.remove(name), "{name}");
    }
    assert_eq!(ours("tokenizer.rs", "MODELS"), owned(&models));
}

/// The pre-tokenizers that are told not to write text in bytes.
#[test]
fn every_pre_tokenizer_of_characters_is_known_and_no_other() {
    let text = std::fs::read_to_string(source().join("src/llama-vocab.cpp")).unwrap();
    let (_, tokenizer) = text.split_once("struct llm_tokenizer_bpe : llm_tokenizer {").unwrap();
    let (cases, _) = tokenizer.split_once("std::vector<std::string> regex_exprs;").unwrap();
    let kinds: BTreeSet<&str> = cases
        .split("break;")
        .filter(|case| case.contains("byte_encode = false"))
        .flat_map(|case| case.split("case ").skip(1).filter_map(|rest| rest.split(':').next()))
        .collect();
    assert!(kinds.len() > 3, "{kinds:?}");
    // The names that are compared before a kind is chosen are those of that kind.
    let chosen: Vec<&str> = text.split("pre_type = ").collect();
    let theirs: BTreeSet<&str> = chosen
        .windows(2)
        .filter(|pair| pair[1].split(';').next().is_some_and(|kind| kinds.contains(kind)))
        .flat_map(|pair| pair[0].split("tokenizer_pre == \"").skip(1).filter_map(|rest| rest.split('"').next()))
        .collect();
    assert_eq!(ours("tokenizer.rs", "OF_CHARACTERS"), owned(&theirs));
}

/// The keys that name one token: each is held against the vocabulary, but for those that nothing asks for here.
#[test]
fn every_key_of_a_token_that_llama_cpp_knows_is_looked_at() {
    let text = std::fs::read_to_string(source().join("src/llama-arch.cpp")).unwrap();
    let keys = text.split('"').skip(1).step_by(2).filter(|text| text.ends_with("_token_id"));
    let theirs: BTreeSet<&str> =
        keys.map(|key| key.trim_start_matches("tokenizer.ggml.").trim_start_matches("%s.")).collect();
    assert!(theirs.len() > 15);
    let ours = ["tokenizer.rs", "model.rs"]
        .map(|file| std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(file)).unwrap());
    let [tokenizer, model] = &ours;
    let (_, lists) = tokenizer.split_once("const NEEDED_TOKENS").unwrap();
    let (lists, _) = lists.split_once("\nfn ").unwrap();
    for key in theirs {
        let name = key.trim_end_matches("_token_id");
        let is_ours = lists.contains(&format!("\"{name}\"")) || model.contains(&format!("\"{key}\""));
        // Of an encoder with a decoder, which is refused, and of images, of which the server takes none.
        assert!(is_ours || ["decoder_start_token_id", "ple.image_token_id"].contains(&key), "{key}");
    }
}

#[test]
fn every_element_type_of_ggml_is_known_and_no_other() {
    let source = source();
    let text = std::fs::read_to_string(source.join("ggml/include/ggml.h")).unwrap();
    let (_, body) = text.split_once("enum ggml_type {").unwrap();
    let (body, _) = body.split_once('}').unwrap();
    let theirs: BTreeSet<(String, u32)> = body
        .lines()
        .filter_map(|line| line.trim().strip_prefix("GGML_TYPE_"))
        .filter_map(|line| line.split_once('='))
        .map(|(name, rest)| (name.trim().to_owned(), rest.split(',').next().unwrap().trim().parse().unwrap()))
        .filter(|(name, _)| name != "COUNT")
        .collect();
    let ours: BTreeSet<(String, u32)> =
        GgmlType::ALL.iter().map(|kind| (kind.name().to_owned(), *kind as u32)).collect();
    assert!(theirs.len() > 30);
    assert_eq!(ours, theirs);
}

//! One file per way of being wrong, each with the defect that it must be refused for.
#![allow(clippy::unwrap_used)]

mod common;

use common::{F16, F32, Gguf, Key, Q4_K, Q8_0, Q8_K, Shape, array, string, strings, ty};
use gantry_gguf::{Defect, GgufError, read_header_prefix};

/// Reads a file; `length` replaces its true length.
fn defect_of(bytes: &[u8], file_bytes: u64) -> Result<(u64, Defect), String> {
    match read_header_prefix(bytes, file_bytes) {
        Err(GgufError::Malformed { offset, defect }) => Ok((offset, defect)),
        Err(other) => Err(format!("another error: {other}")),
        Ok(_) => Err("it was accepted".to_owned()),
    }
}

fn model() -> Gguf {
    Gguf::model(&Shape::default())
}

/// A model with a change.
fn changed(change: impl FnOnce(&mut Gguf)) -> Gguf {
    let mut file = model();
    change(&mut file);
    file
}

/// Checks a table of changed models: name, change, expected defect, the name that its message must repeat.
macro_rules! refused {
    ($($name:literal: $change:expr => $pattern:pat, $text:literal;)*) => {
        let mut failures = Vec::new();
        $(
            let (bytes, file_bytes) = changed($change).header();
            match defect_of(&bytes, file_bytes) {
                Ok((offset, defect)) => {
                    let message = defect.to_string();
                    if !matches!(defect, $pattern) {
                        failures.push(format!("{}: {defect:?}", $name));
                    }
                    if !message.contains($text) {
                        failures.push(format!("{}: {:?} is not in: {message}", $name, $text));
                    }
                    if offset > file_bytes {
                        failures.push(format!("{}: byte {offset} of {file_bytes}", $name));
                    }
                }
                Err(other) => failures.push(format!("{}: {other}", $name)),
            }
        )*
        assert!(failures.is_empty(), "{}", failures.join("\n"));
    };
}

#[test]
fn the_unchanged_model_is_accepted() {
    let (bytes, file_bytes) = model().header();
    read_header_prefix(&bytes, file_bytes).unwrap();
    read_header_prefix(&model().file(), file_bytes).unwrap();
}

#[test]
fn a_file_that_is_no_gguf_is_told_what_it_is() {
    refused! {
        "noise": |f| f.magic = *b"abcd" => Defect::BadMagic { .. }, "GGUF";
        "html": |f| f.magic = *b"<!DO" => Defect::BadMagic { .. }, "web page";
        "git lfs": |f| f.magic = *b"vers" => Defect::BadMagic { .. }, "git lfs pull";
        "pytorch": |f| f.magic = *b"PK\x03\x04" => Defect::BadMagic { .. }, "PyTorch";
        "zeros": |f| f.magic = [0; 4] => Defect::BadMagic { .. }, "download it again";
        "ggjt": |f| f.magic = *b"tjgg" => Defect::OldFormat { format: "GGJT" }, "convert";
        "ggml": |f| f.magic = *b"lmgg" => Defect::OldFormat { format: "GGML" }, "convert";
        "swapped magic": |f| f.magic = *b"FUGG" => Defect::BigEndian, "endian";
        "big endian": |f| f.version = 3_u32.swap_bytes() => Defect::BigEndian, "endian";
        "version 0": |f| f.version = 0 => Defect::UnsupportedVersion { version: 0 }, "version 0";
        "version 1": |f| f.version = 1 => Defect::UnsupportedVersion { version: 1 }, "version 1";
        "version 4": |f| f.version = 4 => Defect::UnsupportedVersion { version: 4 }, "version 4";
        "adapter": |f| f.text("general.type", "adapter") => Defect::NotAModel { .. }, "an adapter";
        "projector": |f| f.text("general.type", "mmproj") => Defect::NotAModel { .. }, "a mmproj";
        "clip": |f| f.text("general.architecture", "clip") => Defect::NotALanguageModel { .. }, "encoder";
        "split": |f| { f.put("split.count", 2, 3_u16.to_le_bytes().into()); f.put("split.no", 2, vec![0; 2]); } => Defect::SplitFile { count: 3 }, "join";
        "split without its number": |f| f.put("split.count", 2, 3_u16.to_le_bytes().into()) => Defect::MissingKey { .. }, "split.no";
        "split count as u32": |f| f.number("split.count", 3) => Defect::WrongKeyType { .. }, "u16";
        "split 3 of 3": |f| { f.put("split.count", 2, 3_u16.to_le_bytes().into()); f.put("split.no", 2, 3_u16.to_le_bytes().into()); } => Defect::SplitNumber { number: 4, count: 3 }, "part 4 of 3";
        "60,000 splits": |f| { f.put("split.count", 2, 60_000_u16.to_le_bytes().into()); f.put("split.no", 2, vec![0; 2]); } => Defect::TooManySplits { .. }, "1024";
        "an encoder with a decoder": |f| f.text("general.architecture", "t5") => Defect::NotALanguageModel { .. }, "encoder of its own";
        "diffusion": |f| f.text("general.architecture", "llada") => Defect::NotALanguageModel { .. }, "diffusion";
        "no tensors": |f| f.tensors.clear() => Defect::NoTensors, "no tensors";
    }
}

#[test]
fn counts_that_lie_are_refused_before_anything_is_read_for_them() {
    refused! {
        "keys": |f| f.key_count = Some(u64::MAX) => Defect::TooManyKeys { .. }, "16384";
        "tensors": |f| f.tensor_count = Some(u64::MAX) => Defect::TooManyTensors { .. }, "65536";
        "keys beyond the file": |f| f.key_count = Some(16_384) => Defect::CountsBeyondFile { .. }, "16384 keys";
        "tensors beyond the file": |f| f.tensor_count = Some(65_536) => Defect::CountsBeyondFile { .. }, "65536 tensors";
        "one key too many": |f| f.key_count = Some(f.keys.len() as u64 + 1) => Defect::TensorNameTooLong { .. }, "download";
        "string": |f| f.put("x", ty::STRING, u64::MAX.to_le_bytes().into()) => Defect::StringTooLong { .. }, "\"x\"";
        "string beyond the file": |f| f.put("x", ty::STRING, 10_000_000_u64.to_le_bytes().into()) => Defect::HeaderTruncated { .. }, "a string";
        "array": |f| f.put("x", ty::ARRAY, array(ty::U8, u64::MAX, &[])) => Defect::ArrayTooLong { .. }, "\"x\"";
        "array beyond the file": |f| f.put("x", ty::ARRAY, array(ty::U64, 16_000_000, &[])) => Defect::HeaderTruncated { .. }, "an array";
        "vocabulary": |f| f.put("tokenizer.ggml.tokens", ty::ARRAY, array(ty::STRING, 3_000_000, &[])) => Defect::ArrayTooLong { .. }, "2097152";
        "string in an array": |f| f.put("x", ty::ARRAY, array(ty::STRING, 1, &u64::MAX.to_le_bytes())) => Defect::StringTooLong { .. }, "\"x\"";
        "token": |f| f.put("tokenizer.ggml.tokens", ty::ARRAY, array(ty::STRING, 1, &100_000_u64.to_le_bytes())) => Defect::StringTooLong { .. }, "tokens";
    }
}

#[test]
fn keys_and_values_that_are_damaged_are_refused() {
    let key = |name: &[u8]| Key { name: name.to_vec(), kind: ty::U8, bytes: vec![0] };
    refused! {
        "empty key": |f| f.keys.push(key(b"")) => Defect::EmptyKey, "empty";
        "long key": |f| f.keys.push(key(&[b'k'; 65_536])) => Defect::KeyTooLong { length: 65_536, .. }, "65535";
        "long keys": |f| f.keys.extend((0..300).map(|i| key(format!("{i:065535}").as_bytes()))) => Defect::KeysTooLong { .. }, "16777216";
        "NUL in a key": |f| f.keys.push(key(b"general.na\0me")) => Defect::ControlInKey { .. }, "general.na\\0me";
        "line end in a key": |f| f.keys.push(key(b"a\nb")) => Defect::ControlInKey { .. }, "a\\nb";
        "key not UTF-8": |f| f.keys.push(key(b"\xff\xfe")) => Defect::KeyNotUtf8, "UTF-8";
        "key twice": |f| { let first = f.keys[0].clone(); f.keys.push(first); } => Defect::DuplicateKey { .. }, "general.architecture";
        "control characters": |f| f.keys.push(key(b"\x1b[31m")) => Defect::ControlInKey { .. }, "\\u{1b}[31m";
        "unknown type": |f| f.put("x", 13, vec![0]) => Defect::UnknownValueType { found: 13, .. }, "\"x\"";
        "bool of 2": |f| f.put("x", ty::BOOL, vec![2]) => Defect::InvalidBool { found: 2, .. }, "\"x\"";
        "text not UTF-8": |f| f.put("x", ty::STRING, string(b"\xc3\x28")) => Defect::StringNotUtf8 { .. }, "\"x\"";
        "long text not UTF-8": |f| f.put("x", ty::STRING, string(&[0xff; 9000])) => Defect::StringNotUtf8 { .. }, "\"x\"";
        "array of arrays": |f| f.put("x", ty::ARRAY, array(ty::ARRAY, 1, &array(ty::U8, 0, &[]))) => Defect::NestedArray { .. }, "\"x\"";
        "array of unknown": |f| f.put("x", ty::ARRAY, array(99, 1, &[0])) => Defect::UnknownElementType { found: 99, .. }, "\"x\"";
    }
}

#[test]
fn hyperparameters_that_are_absent_wrong_or_at_odds_are_refused() {
    refused! {
        "no architecture": |f| f.remove("general.architecture") => Defect::MissingKey { .. }, "general.architecture";
        "unknown architecture": |f| f.text("general.architecture", "llama9") => Defect::UnknownArchitecture { .. }, "llama9";
        "architecture a number": |f| f.number("general.architecture", 1) => Defect::WrongKeyType { .. }, "u32";
        "no layers": |f| f.remove("llama.block_count") => Defect::MissingKey { .. }, "llama.block_count";
        "no context": |f| f.remove("llama.context_length") => Defect::MissingKey { .. }, "llama.context_length";
        "no embedding": |f| f.remove("llama.embedding_length") => Defect::MissingKey { .. }, "llama.embedding_length";
        "no heads": |f| f.remove("llama.attention.head_count") => Defect::MissingKey { .. }, "head_count";
        "no vocabulary": |f| f.remove("tokenizer.ggml.tokens") => Defect::MissingKey { .. }, "tokens";
        "no merges": |f| f.remove("tokenizer.ggml.merges") => Defect::MissingKey { .. }, "merges";
        "zero layers": |f| f.number("llama.block_count", 0) => Defect::KeyOutOfRange { .. }, "block_count";
        "513 layers": |f| f.number("llama.block_count", 513) => Defect::KeyOutOfRange { max: 512, .. }, "block_count";
        "layers as u64": |f| f.put("llama.block_count", ty::U64, 2_u64.to_le_bytes().into()) => Defect::WrongKeyType { .. }, "u64";
        "chat template a number": |f| f.number("tokenizer.chat_template", 1) => Defect::WrongKeyType { expected: "string", .. }, "\"tokenizer.chat_template\" has the type u32";
        "chat templates in a list": |f| f.put("tokenizer.chat_template", ty::ARRAY, strings(["a", "b"])) => Defect::WrongKeyType { expected: "string", .. }, "array of string";
        "chat template without a vocabulary": |f| { f.remove("tokenizer.ggml.tokens"); f.number("tokenizer.chat_template", 1); } => Defect::WrongKeyType { .. }, "chat_template";
        "template of tools a number": |f| f.number("tokenizer.chat_template.tool_use", 1) => Defect::WrongKeyType { .. }, "chat_template.tool_use";
        "name a number": |f| f.number("general.name", 1) => Defect::WrongKeyType { .. }, "general.name";
        "type a number": |f| f.number("general.type", 1) => Defect::WrongKeyType { .. }, "general.type";
        "embedding that goes out as text": |f| f.text("llama.embedding_length_out", "64") => Defect::WrongKeyType { expected: "u32", .. }, "embedding_length_out";
        "finetuned as text": |f| f.text("llama.rope.scaling.finetuned", "yes") => Defect::WrongKeyType { expected: "bool", .. }, "finetuned";
        "what stands before a text as text": |f| f.text("llama.ple.eos_token_id", "1") => Defect::WrongKeyType { .. }, "ple.eos_token_id";
        "tensors of a precision by number": |f| f.put("general.tensor_extra.name", ty::ARRAY, array(ty::U8, 1, &[1])) => Defect::WrongKeyType { .. }, "array of u8";
        "precisions as text": |f| f.put("general.tensor_extra.prec_a4", ty::ARRAY, strings(["yes"])) => Defect::WrongKeyType { .. }, "an array of bool";
        "context as text": |f| f.text("llama.context_length", "2048") => Defect::WrongKeyType { .. }, "string";
        "zero heads": |f| f.number("llama.attention.head_count", 0) => Defect::Inconsistent { .. }, "head";
        "zero KV heads": |f| f.number("llama.attention.head_count_kv", 0) => Defect::Inconsistent { .. }, "KV";
        "3 KV heads of 4": |f| f.number("llama.attention.head_count_kv", 3) => Defect::Inconsistent { .. }, "divisor";
        "7 heads of 64": |f| { f.number("llama.attention.head_count", 7); f.number("llama.attention.head_count_kv", 7); } => Defect::Inconsistent { .. }, "64";
        "array of heads too short": |f| f.put("llama.attention.head_count", ty::ARRAY, array(ty::U32, 1, &[4, 0, 0, 0])) => Defect::WrongArrayLength { expected: 2, .. }, "head_count";
        "odd rotation": |f| { f.number("llama.attention.head_count", 1); f.number("llama.attention.head_count_kv", 1); f.number("llama.attention.key_length", 15); f.number("llama.attention.value_length", 15); f.number("llama.rope.dimension_count", 15); } => Defect::Inconsistent { .. }, "pairs";
        "rotation": |f| f.number("llama.rope.dimension_count", 8) => Defect::Inconsistent { .. }, "rotated";
        "value length": |f| f.number("llama.attention.value_length", 8) => Defect::Inconsistent { .. }, "equal";
        "rope scaling": |f| f.text("llama.rope.scaling.type", "magic") => Defect::UnknownText { .. }, "magic";
        "experts unused": |f| f.number("llama.expert_count", 8) => Defect::Inconsistent { .. }, "0 of 8";
        "experts too many": |f| f.number("llama.expert_count", 1025) => Defect::KeyOutOfRange { .. }, "expert_count";
        "used without experts": |f| f.number("llama.expert_used_count", 2) => Defect::Inconsistent { .. }, "2 of 0";
        "no epsilon": |f| f.remove("llama.attention.layer_norm_rms_epsilon") => Defect::MissingKey { .. }, "epsilon";
        "rope base no number": |f| f.put("llama.rope.freq_base", ty::F32, f32::NAN.to_le_bytes().into()) => Defect::WrongFraction { .. }, "freq_base";
        "rope factor infinite": |f| f.put("llama.rope.scaling.attn_factor", ty::F32, f32::INFINITY.to_le_bytes().into()) => Defect::WrongFraction { .. }, "attn_factor";
        "logit scale no number": |f| f.put("llama.logit_scale", ty::F32, f32::NAN.to_le_bytes().into()) => Defect::WrongFraction { .. }, "logit_scale";
        "experts of layers too many": |f| { f.number("llama.expert_count", 2); f.put("llama.expert_used_count", ty::ARRAY, array(ty::U32, 2, &[1, 0, 0, 0, 3, 0, 0, 0])); } => Defect::Inconsistent { .. }, "3 of 2";
        "experts of one layer": |f| { f.number("llama.expert_count", 2); f.put("llama.expert_used_count", ty::ARRAY, array(ty::U32, 1, &[1, 0, 0, 0])); } => Defect::WrongArrayLength { expected: 2, .. }, "expert_used_count";
        "negative epsilon": |f| f.put("llama.attention.layer_norm_rms_epsilon", ty::F32, (-1e-5_f32).to_le_bytes().into()) => Defect::WrongFraction { .. }, "epsilon";
        "epsilon no number": |f| f.put("llama.attention.layer_norm_rms_epsilon", ty::F32, f32::NAN.to_le_bytes().into()) => Defect::WrongFraction { .. }, "NaN";
        "rope factor next to nothing": |f| f.put("llama.rope.scaling.factor", ty::F32, 1e-38_f32.to_le_bytes().into()) => Defect::WrongFraction { .. }, "scaling.factor";
        "rope base a u32": |f| f.number("llama.rope.freq_base", 10_000) => Defect::WrongKeyType { .. }, "freq_base";
        "switch a u8": |f| f.put("tokenizer.ggml.add_bos_token", ty::U8, vec![0]) => Defect::WrongKeyType { .. }, "add_bos_token";
        "special token an i32": |f| f.put("tokenizer.ggml.eos_token_id", ty::I32, vec![0; 4]) => Defect::WrongKeyType { .. }, "eos_token_id";
        "unknown tokenizer": |f| f.text("tokenizer.ggml.model", "gpt9") => Defect::UnknownTokenizer { .. }, "gpt9";
        "unknown pre-tokenizer": |f| f.text("tokenizer.ggml.pre", "qwen99") => Defect::UnknownTokenizer { .. }, "qwen99";
        "no tokenizer": |f| f.remove("tokenizer.ggml.model") => Defect::MissingKey { .. }, "tokenizer.ggml.model";
        "unknown pooling": |f| f.number("llama.pooling_type", 99) => Defect::KeyOutOfRange { found: 99, min: 0, max: 4, .. }, "llama.pooling_type";
        "pooling past the last": |f| f.number("llama.pooling_type", 5) => Defect::KeyOutOfRange { found: 5, .. }, "0 to 4";
        "unknown pooling of a classifier": |f| f.number("llama.classifier.pooling_type", 99) => Defect::KeyOutOfRange { .. }, "classifier.pooling_type";
        "pooling as text": |f| f.text("llama.pooling_type", "mean") => Defect::WrongKeyType { .. }, "pooling_type";
        "file type as text": |f| f.text("general.file_type", "Q8_0") => Defect::WrongKeyType { .. }, "general.file_type";
        "same token twice": |f| f.put("tokenizer.ggml.tokens", ty::ARRAY, strings(["a", "b", "", "a"])) => Defect::DuplicateToken { first: 0, second: 3 }, "0 and 3";
        "tokens of numbers": |f| f.put("tokenizer.ggml.tokens", ty::ARRAY, array(ty::U8, 1, &[1])) => Defect::WrongKeyType { .. }, "array of u8";
        "no tokens": |f| f.put("tokenizer.ggml.tokens", ty::ARRAY, strings([""; 0])) => Defect::WrongArrayLength { .. }, "tokens";
        "types too few": |f| f.put("tokenizer.ggml.token_type", ty::ARRAY, array(ty::I32, 1, &[0; 4])) => Defect::WrongArrayLength { .. }, "token_type";
        "types of another type": |f| f.put("tokenizer.ggml.token_type", ty::ARRAY, array(ty::U8, 1, &[0])) => Defect::WrongKeyType { .. }, "token_type";
        "scores too few": |f| f.put("tokenizer.ggml.scores", ty::ARRAY, array(ty::F32, 1, &[0; 4])) => Defect::WrongArrayLength { .. }, "scores";
        "alignment 0": |f| f.number("general.alignment", 0) => Defect::InvalidAlignment { found: 0, .. }, "power of two";
        "alignment 33": |f| f.number("general.alignment", 33) => Defect::InvalidAlignment { found: 33, .. }, "power of two";
        "alignment 2^31": |f| f.number("general.alignment", 1 << 31) => Defect::InvalidAlignment { .. }, "power of two";
        "alignment as u64": |f| f.put("general.alignment", ty::U64, 32_u64.to_le_bytes().into()) => Defect::WrongKeyType { .. }, "u64";
    }
}

#[test]
fn tokenizers_that_contradict_themselves_are_refused() {
    let types = |kinds: &[i32]| {
        let kinds = kinds.iter().copied().chain(std::iter::repeat(1)).take(40);
        array(ty::I32, 40, &kinds.flat_map(i32::to_le_bytes).collect::<Vec<u8>>())
    };
    let scores = |bad: f32| {
        let scores = std::iter::repeat_n(0.0, 39).chain([bad]);
        array(ty::F32, 40, &scores.flat_map(f32::to_le_bytes).collect::<Vec<u8>>())
    };
    let merges = |texts: &[&str]| strings(texts.iter().copied());
    let bytes = |length: usize, first: u32| {
        let mut map = first.to_le_bytes().to_vec();
        map.resize(length, 1);
        array(ty::U8, length as u64, &map)
    };
    refused! {
        "beginning beyond": |f| f.number("tokenizer.ggml.bos_token_id", 40) => Defect::TokenBeyondVocabulary { found: 40, tokens: 40, .. }, "bos_token_id";
        "end beyond": |f| f.number("tokenizer.ggml.eos_token_id", u32::MAX) => Defect::TokenBeyondVocabulary { .. }, "4294967295";
        "end of turn beyond": |f| f.number("tokenizer.ggml.eot_token_id", 99) => Defect::TokenBeyondVocabulary { .. }, "eot_token_id";
        "separator beyond": |f| f.number("tokenizer.ggml.seperator_token_id", 40) => Defect::TokenBeyondVocabulary { .. }, "seperator_token_id";
        "what stands before a text beyond": |f| f.number("llama.ple.eos_token_id", 40) => Defect::TokenBeyondVocabulary { .. }, "ple.eos_token_id";
        "suppressed tokens as u32": |f| f.put("tokenizer.ggml.suppress_tokens", ty::ARRAY, array(ty::U32, 1, &[1, 0, 0, 0])) => Defect::WrongKeyType { .. }, "array of u32";
        "kinds of tokens as text": |f| f.text("tokenizer.ggml.token_type_count", "2") => Defect::WrongKeyType { .. }, "token_type_count";
        "a switch of the normaliser as a number": |f| f.number("tokenizer.ggml.normalizer.lowercase", 1) => Defect::WrongKeyType { .. }, "normalizer.lowercase";
        "filler a text": |f| f.text("tokenizer.ggml.fim_pre_token_id", "x") => Defect::WrongKeyType { .. }, "fim_pre";
        "type 7": |f| f.put("tokenizer.ggml.token_type", ty::ARRAY, types(&[1, 7])) => Defect::UnknownTokenType { token: 1, found: 7 }, "token 1";
        "long control token": |f| { f.put("tokenizer.ggml.tokens", ty::ARRAY, strings((0..40).map(|token| "t".repeat(if token == 1 { 300 } else { token + 1 })))); f.put("tokenizer.ggml.token_type", ty::ARRAY, types(&[1, 3])); } => Defect::StringTooLong { length: 300, .. }, "tokens[1], a control token";
        "type -1": |f| f.put("tokenizer.ggml.token_type", ty::ARRAY, types(&[-1])) => Defect::UnknownTokenType { found: -1, .. }, "-1";
        "a byte that is none": |f| f.put("tokenizer.ggml.token_type", ty::ARRAY, types(&[1, 1, 6])) => Defect::NoByteToken { token: 2 }, "token 2";
        "bytes in BERT": |f| { bert(f); f.number("tokenizer.ggml.bos_token_id", 1); f.number("tokenizer.ggml.seperator_token_id", 2); f.put("tokenizer.ggml.token_type", ty::ARRAY, types(&[6])); } => Defect::NoByteToken { token: 0 }, "aborts";
        "score no number": |f| f.put("tokenizer.ggml.scores", ty::ARRAY, scores(f32::NAN)) => Defect::WrongScore { token: 39 }, "token 39";
        "merge of one piece": |f| f.put("tokenizer.ggml.merges", ty::ARRAY, merges(&["t 0", "t1"])) => Defect::InvalidMerge { merge: 1 }, "merge 1";
        "merge with nothing": |f| f.put("tokenizer.ggml.merges", ty::ARRAY, merges(&["t "])) => Defect::InvalidMerge { merge: 0 }, "merge 0";
        "empty merge": |f| f.put("tokenizer.ggml.merges", ty::ARRAY, merges(&[""])) => Defect::InvalidMerge { merge: 0 }, "merge 0";
        "merges of another model": |f| f.put("tokenizer.ggml.merges", ty::ARRAY, merges(&["t 0", "x y", "y z"])) => Defect::ForeignMerges { unknown: 2, merges: 3 }, "2 of 3";
        "too many merges": |f| f.put("tokenizer.ggml.merges", ty::ARRAY, array(ty::STRING, 5_000_000, &[])) => Defect::HeaderTruncated { .. }, "an array";
        "long merge": |f| f.put("tokenizer.ggml.merges", ty::ARRAY, merges(&[&"m".repeat(200_000)])) => Defect::StringTooLong { .. }, "merges";
        "no beginning": |f| { f.text("tokenizer.ggml.model", "rwkv"); f.put("tokenizer.ggml.add_bos_token", ty::BOOL, vec![1]); } => Defect::MissingToken { .. }, "add_bos_token";
        "no end": |f| { few(f); f.put("tokenizer.ggml.add_eos_token", ty::BOOL, vec![1]); } => Defect::MissingToken { .. }, "add_eos_token";
        "no beginning by default": |f| { few(f); f.text("tokenizer.ggml.model", "llama"); f.remove("tokenizer.ggml.add_bos_token"); f.put("tokenizer.ggml.tokens", ty::ARRAY, strings(["t0"])); let embedding = f.named("token_embd.weight"); (embedding.shape[1], embedding.bytes) = (1, 68); } => Defect::MissingToken { .. }, "a beginning";
        "no separator": |f| { bert(f); f.number("tokenizer.ggml.bos_token_id", 1); } => Defect::MissingToken { .. }, "a separator";
        "map too short": |f| { f.text("tokenizer.ggml.model", "t5"); f.put("tokenizer.ggml.precompiled_charsmap", ty::ARRAY, bytes(3, 0)); } => Defect::InvalidCharacterMap { found: 3, .. }, "3 bytes";
        "map of longer numbers": |f| { f.text("tokenizer.ggml.model", "t5"); f.put("tokenizer.ggml.precompiled_charsmap", ty::ARRAY, array(ty::U16, 1, &[0, 0])); } => Defect::WrongKeyType { .. }, "array of u16";
        "map beyond its end": |f| { f.text("tokenizer.ggml.model", "t5"); f.put("tokenizer.ggml.precompiled_charsmap", ty::ARRAY, bytes(64, 60)); } => Defect::InvalidCharacterMap { found: 64, expected: 60 }, "64 bytes";
    }
}

/// The tokenizer of BERT, with fewer tokens than its defaults need.
fn bert(file: &mut Gguf) {
    file.text("tokenizer.ggml.model", "bert");
}

/// Fewer tokens than the defaults of byte-pair encoding need.
fn few(file: &mut Gguf) {
    file.put("tokenizer.ggml.tokens", ty::ARRAY, strings((0..5).map(|token| format!("t{token}"))));
}

#[test]
fn tensors_that_are_damaged_alone_are_refused() {
    let first = "token_embd.weight";
    refused! {
        "name too long": |f| f.named(first).name = vec![b'n'; 64] => Defect::TensorNameTooLong { length: 64 }, "64";
        "NUL in a name": |f| f.named(first).name = b"token_embd\0.weight".into() => Defect::ControlInTensorName { .. }, "token_embd\\0";
        "name empty": |f| f.named(first).name.clear() => Defect::EmptyTensorName, "empty";
        "name not UTF-8": |f| f.named(first).name = vec![0xff] => Defect::TensorNameNotUtf8, "UTF-8";
        "name twice": |f| f.tensor("output_norm.weight", &[64], F32) => Defect::DuplicateTensor { .. }, "output_norm";
        "no dimensions": |f| f.named(first).dimensions = Some(0) => Defect::WrongDimensionCount { found: 0, .. }, "token_embd";
        "five dimensions": |f| f.named(first).dimensions = Some(5) => Defect::WrongDimensionCount { found: 5, .. }, "token_embd";
        "2^32 - 1 dimensions": |f| f.named(first).dimensions = Some(u32::MAX) => Defect::WrongDimensionCount { .. }, "token_embd";
        "zero dimension": |f| f.named(first).shape[1] = 0 => Defect::ZeroDimension { dimension: 1, .. }, "token_embd";
        "elements overflow": |f| f.named(first).shape = vec![1 << 32, 1 << 32] => Defect::TensorTooLarge { .. }, "token_embd";
        "elements pass 63 bits": |f| f.named(first).shape = vec![1 << 63] => Defect::TensorTooLarge { .. }, "token_embd";
        "bytes pass 63 bits": |f| { f.named(first).shape = vec![1 << 62]; f.named(first).kind = F32.0; } => Defect::TensorTooLarge { .. }, "token_embd";
        "sizes add up past 64 bits": |f| {
            for name in ["token_embd.weight", "output_norm.weight", "blk.0.attn_norm.weight"] {
                let tensor = f.named(name);
                (tensor.shape, tensor.kind, tensor.bytes) = (vec![1 << 60], F32.0, 1 << 62);
            }
            let tensor = f.named("blk.0.attn_q.weight");
            (tensor.shape, tensor.kind, tensor.bytes) = (vec![(1 << 60) + 1024], F32.0, 4);
            f.named("blk.0.attn_k.weight").offset = Some(0);
        } => Defect::TensorTooLarge { .. } | Defect::TensorOverlap { .. }, "blk.0";
        "unknown type": |f| f.named(first).kind = 43 => Defect::UnknownTensorType { found: 43, .. }, "token_embd";
        "type 2^32 - 1": |f| f.named(first).kind = u32::MAX => Defect::UnknownTensorType { .. }, "token_embd";
        "removed Q4_2": |f| f.named(first).kind = 4 => Defect::RemovedTensorType { name: "Q4_2", .. }, "Q4_0";
        "removed Q4_0_4_4": |f| f.named(first).kind = 31 => Defect::RemovedTensorType { name: "Q4_0_4_4", .. }, "repacked";
        "row is no whole block": |f| f.named(first).kind = Q4_K.0 => Defect::PartialBlock { row: 64, block: 256, .. }, "Q4_K";
        "intermediate type": |f| {
            let (kind, block, bytes) = Q8_K;
            f.tensors.iter_mut().for_each(|t| t.shape.iter_mut().for_each(|d| *d *= 4));
            f.tensors.iter_mut().for_each(|t| (t.kind, t.bytes) = (F32.0, t.shape.iter().product::<u64>() * 4));
            let tensor = f.named("blk.1.ffn_gate.weight");
            (tensor.kind, tensor.bytes) = (kind, tensor.shape.iter().product::<u64>() / block * bytes);
        } => Defect::UnusableTensorType { found: "Q8_K", .. }, "ffn_gate";
        "norm in F16": |f| { let t = f.named("output_norm.weight"); (t.kind, t.bytes) = (F16.0, 128); } => Defect::UnusableTensorType { found: "F16", .. }, "F32";
    }
}

#[test]
fn tensors_that_lie_about_their_place_are_refused() {
    refused! {
        "misaligned": |f| f.named("output_norm.weight").offset = Some(7) => Defect::MisalignedTensor { found: 7, .. }, "output_norm";
        "overlap": |f| f.named("output_norm.weight").offset = Some(32) => Defect::TensorOverlap { found: 32, .. }, "inside";
        "gap": |f| f.named("output_norm.weight").offset = Some(1 << 20) => Defect::TensorGap { .. }, "output_norm";
        "offset 2^64 - 32": |f| f.named("output_norm.weight").offset = Some(u64::MAX - 31) => Defect::TensorGap { .. }, "output_norm";
        "out of order": |f| { let last = f.tensors.len() - 1; f.tensors[last].offset = Some(0); } => Defect::TensorOverlap { found: 0, .. }, "ffn_down";
        "wider than its data": |f| f.named("blk.0.attn_q.weight").shape[1] += 1 => Defect::TensorOverlap { .. }, "blk.0.attn_k";
        "narrower than its data": |f| f.named("blk.0.attn_q.weight").shape[1] -= 1 => Defect::TensorGap { .. }, "blk.0.attn_k";
        "another type than its data": |f| f.named("blk.0.attn_q.weight").kind = F16.0 => Defect::TensorOverlap { .. }, "blk.0.attn_k";
        "the last wider than the file": |f| f.named("blk.1.ffn_down.weight").shape[1] += 1 => Defect::DataTruncated { .. }, "blk.1.ffn_down";
        "the last narrower than the file": |f| f.named("blk.1.ffn_down.weight").shape[1] -= 1 => Defect::TrailingBytes { .. }, "foreign bytes";
    }
}

#[test]
fn tensor_sets_that_are_not_the_model_are_refused() {
    refused! {
        "rope factors": |f| f.tensor("rope_freqs.weight", &[7], F32) => Defect::WrongShape { .. }, "rope_freqs";
        "no embedding": |f| f.tensors.retain(|t| t.name != b"token_embd.weight") => Defect::MissingTensor { .. }, "token_embd";
        "no output norm": |f| f.tensors.retain(|t| t.name != b"output_norm.weight") => Defect::MissingTensor { .. }, "output_norm";
        "no attn_v": |f| f.tensors.retain(|t| t.name != b"blk.1.attn_v.weight") => Defect::MissingTensor { .. }, "blk.1.attn_v";
        "layer missing": |f| f.tensors.retain(|t| !t.name.starts_with(b"blk.0.")) => Defect::MissingLayers { first: 0, last: 0, .. }, "layer 0 of 2";
        "more layers than tensors": |f| f.number("llama.block_count", 3) => Defect::MissingLayers { first: 2, last: 2, .. }, "layer 2 of 3";
        "many more layers than tensors": |f| f.number("llama.block_count", 400) => Defect::MissingLayers { first: 2, last: 399, .. }, "layers 2 to 399 of 400 have";
        "fewer layers than tensors": |f| f.number("llama.block_count", 1) => Defect::LayerBeyondModel { others: 8, .. }, "blk.1";
        "layer 2^64": |f| f.named("blk.1.attn_q.weight").name = b"blk.18446744073709551616.attn_q.weight".into() => Defect::LayerBeyondModel { .. }, "blk.1844";
        "layer -1": |f| f.named("blk.1.attn_q.weight").name = b"blk.-1.attn_q.weight".into() => Defect::LayerBeyondModel { .. }, "blk.-1";
        "vocabulary and embedding differ": |f| f.named("token_embd.weight").shape = vec![40 * 32, 2] => Defect::WrongShape { .. }, "[64, 40]";
        "sides swapped": |f| f.named("blk.0.ffn_gate.weight").shape.swap(0, 1) => Defect::WrongShape { .. }, "ffn_gate";
        "sides swapped back": |f| f.named("blk.0.ffn_down.weight").shape.swap(0, 1) => Defect::WrongShape { .. }, "[96, 64]";
        "another embedding length": |f| { f.number("llama.embedding_length", 128); f.number("llama.rope.dimension_count", 32); } => Defect::WrongShape { .. }, "token_embd";
        "another feed-forward length": |f| f.number("llama.feed_forward_length", 128) => Defect::WrongShape { .. }, "ffn_gate";
        "other KV heads": |f| f.number("llama.attention.head_count_kv", 4) => Defect::WrongShape { .. }, "attn_k";
    }
}

#[test]
fn a_length_that_is_not_the_tensors_end_is_refused() {
    let (bytes, file_bytes) = model().header();
    for (length, wanted) in
        [(file_bytes - 33, "cut short"), (bytes.len() as u64, "cut short"), (file_bytes + 1, "foreign bytes")]
    {
        let (offset, defect) = defect_of(&bytes, length).unwrap();
        assert!(defect.to_string().contains(wanted), "{length}: {defect}");
        assert!(offset <= length);
    }
    // The padding after the last tensor may be missing.
    let bare = changed(|file| file.pad_last = false);
    read_header_prefix(&bare.header().0, bare.header().1).unwrap();
    for length in [0, 1, 3, 4, 7, 23] {
        let (_, defect) = defect_of(&bytes[..length], length as u64).unwrap();
        assert!(matches!(defect, Defect::HeaderTruncated { .. }), "{length}: {defect}");
    }
}

#[test]
fn an_untied_model_and_one_with_a_mixture_are_accepted() {
    let untied = Gguf::model(&Shape { tied: false, ..Shape::default() }).header();
    assert!(!read_header_prefix(&untied.0, untied.1).unwrap().summary().tied_output);
    let mut mixture = model();
    mixture.number("llama.expert_count", 4);
    mixture.number("llama.expert_used_count", 2);
    mixture
        .tensors
        .retain(|tensor| !tensor.name.windows(5).any(|part| part == b".ffn_") || tensor.name.ends_with(b"norm.weight"));
    for layer in 0..2 {
        mixture.tensor(&format!("blk.{layer}.ffn_gate_inp.weight"), &[64, 4], F32);
        mixture.tensor(&format!("blk.{layer}.ffn_gate_exps.weight"), &[64, 96, 4], Q8_0);
        mixture.tensor(&format!("blk.{layer}.ffn_up_exps.weight"), &[64, 96, 4], Q8_0);
        mixture.tensor(&format!("blk.{layer}.ffn_down_exps.weight"), &[96, 64, 4], Q8_0);
    }
    let (bytes, file_bytes) = mixture.header();
    let header = read_header_prefix(&bytes, file_bytes).unwrap();
    assert_eq!((header.summary().experts, header.summary().experts_used), (4, 2));
    mixture.named("blk.1.ffn_up_exps.weight").shape = vec![64, 48, 8];
    let (bytes, file_bytes) = mixture.header();
    assert!(matches!(defect_of(&bytes, file_bytes), Ok((_, Defect::WrongShape { .. }))));
}

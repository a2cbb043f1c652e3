//! One report lists all that is wrong with a file, each thing once.
#![allow(clippy::unwrap_used)]

mod common;

use common::{F32, Gguf, Key, Shape, array, byte_characters, strings, ty};
use gantry_gguf::limits::MAX_FINDINGS;
use gantry_gguf::{Code, Inspection, Severity, inspect, inspect_prefix, read_header_prefix};

fn changed(change: impl FnOnce(&mut Gguf)) -> Inspection {
    let mut file = Gguf::model(&Shape::default());
    change(&mut file);
    let (bytes, file_bytes) = file.header();
    inspect_prefix(&bytes, file_bytes)
}

fn codes(inspection: &Inspection) -> Vec<&'static str> {
    inspection.findings.list.iter().map(|finding| finding.code.as_str()).collect()
}

#[test]
fn a_good_file_has_none() {
    let good = changed(|_| {});
    assert!(good.header.is_ok() && good.findings.list.is_empty() && good.findings.left_out == 0);
}

#[test]
fn what_is_wrong_in_many_places_is_told_of_all_of_them() {
    let inspection = changed(|file| {
        file.keys.push(Key { name: b"a\0b".to_vec(), kind: ty::U8, bytes: vec![0] });
        file.put("x.switch", ty::BOOL, vec![7]);
        let first = file.keys[0].clone();
        file.keys.push(first);
        file.number("llama.context_length", 0);
        file.number("llama.attention.head_count_kv", 3);
        file.put("llama.rope.freq_base", ty::F32, f32::NAN.to_le_bytes().to_vec());
        file.number("tokenizer.ggml.eos_token_id", 4000);
        file.number("tokenizer.ggml.padding_token_id", 4000);
        file.named("blk.0.attn_q.weight").kind = 77;
        file.named("blk.0.ffn_norm.weight").kind = 1;
        file.tensor("output_norm.weight", &[64], F32);
    });
    let expected = [
        "control-in-key",
        "invalid-bool",
        "duplicate-key",
        "unknown-tensor-type",
        "duplicate-tensor",
        "key-out-of-range",
        "inconsistent-hyperparameters",
        "wrong-fraction",
        "token-out-of-range",
        "unused-token-out-of-range",
        "unusable-tensor-type",
    ];
    assert_eq!(codes(&inspection), expected);
    // A gate is told the first.
    let (first, error) = (inspection.findings.first_error().unwrap(), inspection.header.unwrap_err());
    assert_eq!((first.code, first.message.as_str()), (Code::ControlInKey, error.to_string().as_str()));
    for finding in &inspection.findings.list {
        assert!(finding.offset.is_some() && !finding.found.is_empty() && !finding.expected.is_empty(), "{finding:?}");
        assert!(!finding.advice.is_empty() && finding.file.is_none(), "{finding:?}");
        let warned = finding.code == Code::UnusedTokenOutOfRange;
        assert_eq!(finding.severity, if warned { Severity::Warning } else { Severity::Error });
    }
    let duplicate = &inspection.findings.list[2];
    assert_eq!(duplicate.subject.as_deref(), Some("general.architecture"));
}

#[test]
fn what_ends_the_reading_comes_after_what_was_found_before_it() {
    let inspection = changed(|file| {
        file.keys.insert(0, Key { name: b"\xff".to_vec(), kind: ty::U8, bytes: vec![0] });
        file.put("x", 99, vec![0]);
    });
    assert_eq!(codes(&inspection), ["key-not-utf8", "unknown-value-type"]);
    assert_eq!(inspection.findings.list[0].message, inspection.header.unwrap_err().to_string());
}

#[test]
fn one_wrong_offset_is_one_finding_whether_it_moves_the_rest_or_not() {
    for (offset, code) in [(1 << 20, "tensor-gap"), (0, "tensor-overlap"), (7, "misaligned-tensor")] {
        assert_eq!(codes(&changed(|file| file.named("output_norm.weight").offset = Some(offset))), [code]);
    }
    // The bytes of one tensor more, before all that follow.
    let moved = changed(|file| file.named("blk.0.attn_q.weight").bytes += 1 << 20);
    assert_eq!(codes(&moved), ["tensor-gap"]);
}

#[test]
fn what_follows_from_another_finding_is_not_told_again() {
    // No vocabulary to hold the embedding against, and no tensor that is missing for sure.
    assert_eq!(codes(&changed(|file| file.remove("tokenizer.ggml.tokens"))), ["missing-key"]);
    assert_eq!(codes(&changed(|file| file.named("token_embd.weight").shape[1] = 0)), ["zero-dimension"]);
    assert_eq!(codes(&changed(|file| file.named("blk.1.ffn_up.weight").kind = 4)), ["removed-tensor-type"]);
}

#[test]
fn all_that_is_missing_is_named_and_what_is_kept_is_bounded() {
    let parts = [&b"blk.0.attn_k.weight"[..], b"blk.1.ffn_up.weight", b"output_norm.weight"];
    let missing = changed(|file| file.tensors.retain(|tensor| !parts.contains(&&tensor.name[..])));
    let subjects: Vec<_> = missing.findings.list.iter().filter_map(|finding| finding.subject.as_deref()).collect();
    assert_eq!(subjects, ["output_norm.weight", "blk.0.attn_k.weight", "blk.1.ffn_up.weight"]);

    let many = changed(|file| {
        let again = file.keys[0].clone();
        file.keys.extend(vec![again; MAX_FINDINGS + 100]);
    });
    assert_eq!((many.findings.list.len(), many.findings.left_out), (MAX_FINDINGS, 100));
}

#[test]
fn every_part_of_a_split_model_is_looked_at() {
    let folder = tempfile::tempdir().unwrap();
    let whole = Gguf::model(&Shape::default());
    let tensors = whole.tensors.len();
    let path = |number: usize| folder.path().join(format!("m-{number:05}-of-00004.gguf"));
    for (number, range) in [0..4, 4..8, 8..12, 12..tensors].into_iter().enumerate() {
        let mut part = if number == 0 { whole.clone() } else { Gguf::empty() };
        part.tensors = whole.tensors[range].to_vec();
        part.put("split.no", ty::U16, (number as u16).to_le_bytes().into());
        part.put("split.count", ty::U16, 4_u16.to_le_bytes().into());
        part.put("split.tensors.count", ty::I32, (tensors as i32).to_le_bytes().into());
        std::fs::write(path(number + 1), part.filled(0x21)).unwrap();
    }
    assert!(inspect(path(1)).header.is_ok());
    // One is gone, one cut short, and the last is right.
    std::fs::remove_file(path(2)).unwrap();
    let third = std::fs::read(path(3)).unwrap();
    std::fs::write(path(3), &third[..third.len() - 64]).unwrap();
    let inspection = inspect(path(1));
    assert_eq!(codes(&inspection), ["unreadable", "truncated-data"]);
    let files: Vec<_> = inspection.findings.list.iter().map(|finding| finding.file.as_deref().unwrap()).collect();
    assert_eq!(files, ["m-00002-of-00004.gguf", "m-00003-of-00004.gguf"]);
    assert!(inspection.header.unwrap_err().to_string().starts_with("part 2 of 4"));
}

#[test]
fn the_start_of_a_header_is_judged_as_far_as_it_goes() {
    let (bytes, file_bytes) = Gguf::model(&Shape::default()).header();
    let inspection = inspect_prefix(&bytes[..200], file_bytes);
    let error = read_header_prefix(&bytes[..200], file_bytes).unwrap_err();
    assert_eq!(inspection.header.unwrap_err().to_string(), error.to_string());
}

#[test]
fn what_llama_cpp_divides_by_is_not_zero() {
    let of = |architecture: &str, change: &dyn Fn(&mut Gguf)| {
        let mut file = Gguf::of(architecture);
        change(&mut file);
        let (bytes, file_bytes) = file.header();
        codes(&inspect_prefix(&bytes, file_bytes))
    };
    for (architecture, key) in [
        ("mamba2", "ssm.group_count"),
        ("mamba2", "ssm.time_step_rank"),
        ("nemotron_h", "ssm.group_count"),
        ("granitehybrid", "ssm.time_step_rank"),
        ("qwen3next", "full_attention_interval"),
        ("qwen35", "full_attention_interval"),
        ("minimax-01", "full_attention_interval"),
        ("ernie4_5-moe", "interleave_moe_layer_step"),
        ("grovemoe", "experts_per_group"),
        ("deepseek4", "attention.output_group_count"),
        ("rwkv7", "wkv.head_size"),
    ] {
        let key = format!("{architecture}.{key}");
        assert_eq!(of(architecture, &|file| file.number(&key, 0)), ["key-out-of-range"], "{key}");
        assert_eq!(of(architecture, &|file| file.number(&key, 1)), [""; 0], "{key}");
    }
    // Where each layer says what it is, there is no interval.
    let told = of("qwen35", &|file| {
        file.number("qwen35.full_attention_interval", 0);
        file.put("qwen35.attention.recurrent_layers", ty::ARRAY, common::array(ty::BOOL, 1, &[1]));
    });
    assert_eq!(told, [""; 0]);
    let shared = |groups: u32, heads: u32| {
        of("mamba2", &|file| {
            file.number("mamba2.ssm.inner_size", 128);
            file.number("mamba2.ssm.group_count", groups);
            file.number("mamba2.ssm.time_step_rank", heads);
        })
    };
    assert_eq!(shared(2, 8), [""; 0]);
    assert_eq!(shared(3, 8), ["inconsistent-hyperparameters"]);
    assert_eq!(shared(3, 7), ["inconsistent-hyperparameters"; 2]);
}

/// A model with a vocabulary of the bytes that `has` keeps as byte-level byte-pair encoding writes them, and of words.
fn of_bytes(has: impl Fn(u8) -> bool) -> Gguf {
    let mut file = Gguf::model(&Shape { vocabulary: 257, ..Shape::default() });
    let token = |(byte, character): (u8, char)| if has(byte) { character.to_string() } else { format!("word {byte}") };
    let tokens = (0..=u8::MAX).zip(byte_characters()).map(token).chain(["ab".to_owned()]);
    file.put("tokenizer.ggml.tokens", ty::ARRAY, strings(tokens));
    file.put("tokenizer.ggml.merges", ty::ARRAY, strings(["a b"]));
    file.text("tokenizer.ggml.pre", "qwen2");
    file
}

fn inspected(file: &Gguf) -> Inspection {
    let (bytes, file_bytes) = file.header();
    inspect_prefix(&bytes, file_bytes)
}

#[test]
fn each_byte_without_a_token_is_noted_where_a_text_can_have_it() {
    assert_eq!(codes(&inspected(&of_bytes(|_| true))), [""; 0]);
    for missing in 0..=u8::MAX {
        let inspection = inspected(&of_bytes(|byte| byte != missing));
        let (code, name) = match missing {
            b'\n' | b' '..=b'~' => ("character-without-token", format!("({:?})", char::from(missing))),
            0xc0 | 0xc1 | 0xf5..=0xff => {
                assert_eq!(codes(&inspection), [""; 0], "{missing}");
                continue;
            }
            _ => ("byte-without-token", format!("(0x{missing:02X})")),
        };
        assert_eq!(codes(&inspection), [code], "{missing}");
        let finding = &inspection.findings.list[0];
        assert!(finding.message.contains("for 1 of the ") && finding.message.contains(&name), "{}", finding.message);
        assert_eq!((finding.part, finding.subject.as_deref()), ("tokenizer", Some("tokenizer.ggml.tokens")));
        // It is served.
        assert_eq!(finding.severity, Severity::Warning);
        assert!(inspection.header.is_ok());
    }
}

#[test]
fn bytes_without_a_token_are_counted_and_the_first_are_named() {
    let none = inspected(&of_bytes(|_| false));
    assert_eq!(codes(&none), ["character-without-token"]);
    let finding = &none.findings.list[0];
    let said = "no token for 96 of the 96 characters that are printable ASCII or the line end";
    assert!(finding.message.contains(said), "{}", finding.message);
    let first = r#"('\n', ' ', '!', '"', '#', '$', '%', '&', and 88 more)"#;
    assert!(finding.message.contains(first), "{}", finding.message);
    assert!(finding.message.ends_with("convert the model again with its whole vocabulary"), "{}", finding.message);
    assert!(finding.advice.contains("whole vocabulary"));

    let ascii = inspected(&of_bytes(|byte| byte == b'\n' || (b' '..=b'~').contains(&byte)));
    assert_eq!(codes(&ascii), ["byte-without-token"]);
    let message = &ascii.findings.list[0].message;
    let said = "no token for 147 of the 147 bytes of all other characters";
    assert!(message.contains(said), "{message}");
    let first = "(0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, and 139 more)";
    assert!(message.contains(first), "{message}");
}

#[test]
fn only_vocabularies_that_write_text_in_bytes_need_a_token_for_each() {
    let of = |model: &str, pre: Option<&str>| {
        let mut file = of_bytes(|_| false);
        file.text("tokenizer.ggml.model", model);
        match pre {
            Some(pre) => file.text("tokenizer.ggml.pre", pre),
            None => file.remove("tokenizer.ggml.pre"),
        }
        codes(&inspected(&file))
    };
    for pre in [None, Some(""), Some("default"), Some("gpt-2"), Some("llama-bpe"), Some("kimi-k2"), Some("bloom")] {
        assert_eq!(of("gpt2", pre), ["character-without-token"], "{pre:?}");
    }
    for pre in ["gemma4", "granite-embed-multi-311m", "mmbert", "sarvam-moe", "whitespace"] {
        assert_eq!(of("gpt2", Some(pre)), [""; 0], "{pre}");
    }
    for model in ["gemma4", "hybriddna", "llama", "plamo2", "rwkv", "t5", "whitespace"] {
        assert_eq!(of(model, Some("qwen2")), [""; 0], "{model}");
    }
}

/// A line end that is a token as it stands in a text: such are looked for where their type says that they are user-defined.
#[test]
fn a_user_defined_token_stands_for_its_character() {
    let with_type = |kind: i32| {
        let mut file = of_bytes(|_| true);
        let token = |character: char| if character == 'Ċ' { "\n".to_owned() } else { character.to_string() };
        let tokens = byte_characters().into_iter().map(token).chain(["ab".to_owned()]);
        file.put("tokenizer.ggml.tokens", ty::ARRAY, strings(tokens));
        let types = (0..257).flat_map(|token| if token == i32::from(b'\n') { kind } else { 1 }.to_le_bytes());
        file.put("tokenizer.ggml.token_type", ty::ARRAY, array(ty::I32, 257, &types.collect::<Vec<u8>>()));
        codes(&inspected(&file))
    };
    assert_eq!(with_type(4), [""; 0]);
    for kind in [1, 3] {
        assert_eq!(with_type(kind), ["character-without-token"], "{kind}");
    }
}

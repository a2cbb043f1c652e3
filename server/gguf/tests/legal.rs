//! What is rare and right: each is accepted, and counted as what it is.
#![allow(clippy::unwrap_used)]

mod common;

use common::{F16, F32, Gguf, Key, Q8_0, Shape, array, ty};
use gantry_gguf::fit::{FitInput, estimate};
use gantry_gguf::{Code, Report, Summary, inspect_prefix, read_header_prefix};

fn summary_of(file: &Gguf) -> Summary {
    let (bytes, file_bytes) = file.header();
    read_header_prefix(&bytes, file_bytes).unwrap().summary().clone()
}

fn per_layer(numbers: &[u32]) -> Vec<u8> {
    array(ty::U32, numbers.len() as u64, &numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>())
}

/// A model of four experts, of which each layer uses so many.
fn mixture(used: &[u32]) -> Gguf {
    let mut file = Gguf::model(&Shape::default());
    file.number("llama.expert_count", 4);
    file.put("llama.expert_used_count", ty::ARRAY, per_layer(used));
    file.put("llama.expert_feed_forward_length", ty::ARRAY, per_layer(&[32, 48]));
    file.tensors.retain(|t| !t.name.windows(5).any(|part| part == b".ffn_") || t.name.ends_with(b"norm.weight"));
    for layer in 0..2 {
        file.tensor(&format!("blk.{layer}.ffn_gate_inp.weight"), &[64, 4], F32);
        for (part, shape) in [("gate", [64, 96, 4]), ("up", [64, 96, 4]), ("down", [96, 64, 4])] {
            file.tensor(&format!("blk.{layer}.ffn_{part}_exps.weight"), &shape, Q8_0);
        }
    }
    file
}

#[test]
fn experts_may_be_told_layer_by_layer() {
    let mut by_layer = mixture(&[1, 3]);
    // One of the architectures whose layers need not use as many each.
    for key in &mut by_layer.keys {
        if key.name.starts_with(b"llama.") {
            key.name.splice(..5, *b"nemotron_h_moe");
        }
    }
    by_layer.text("general.architecture", "nemotron_h_moe");
    for file in [mixture(&[3, 3]), by_layer.complete()] {
        let summary = summary_of(&file);
        // What one token passes in the layer that uses most, of the widest.
        assert_eq!((summary.experts, summary.experts_used, summary.feed_forward_length), (4, 3, 3 * 48));
    }
}

#[test]
fn experts_that_llama_cpp_would_not_compute_as_told_are_refused_in_words() {
    for (used, says) in [
        ([1, 3], "passes 3 experts of layer 1 and 1 of layer 0"),
        ([3, 1], "passes 1 experts of layer 1 and 3 of layer 0"),
        ([0, 2], "passes 2 experts of layer 1 and 0 of layer 0"),
        ([2, 0], "passes no expert of layer 1, which has tensor \"blk.1.ffn_gate_inp.weight\""),
    ] {
        let (bytes, file_bytes) = mixture(&used).header();
        let error = read_header_prefix(&bytes, file_bytes).unwrap_err().to_string();
        assert!(error.contains(says) && error.contains("convert the model again"), "{used:?}: {error}");
    }
}

#[test]
fn a_key_may_be_as_long_as_the_format_allows() {
    let mut file = Gguf::model(&Shape::default());
    for first in ["a", "b"] {
        let name = format!("{first}{:065534}", 0).into_bytes();
        file.keys.push(Key { name, kind: ty::U8, bytes: vec![1] });
    }
    assert_eq!(summary_of(&file).layers, 2);
}

#[test]
fn encoders_are_models_that_keep_no_cells() {
    let all = [
        "bert",
        "clef",
        "eurobert",
        "gemma-embedding",
        "jina-bert-v2",
        "jina-bert-v3",
        "modern-bert",
        "neo-bert",
        "nomic-bert",
        "nomic-bert-moe",
    ];
    for architecture in all {
        let file = Gguf::encoder(architecture);
        let (bytes, file_bytes) = file.header();
        let header = read_header_prefix(&bytes, file_bytes).unwrap();
        let summary = header.summary();
        assert!(summary.encoder && !summary.tied_output, "{architecture}");
        let input =
            FitInput { ctx_size: 4096, parallel: 8, stage_cells: 1024, stage_batch: 128, ..FitInput::default() };
        let memory = estimate(summary, &input);
        assert_eq!((memory.kv_cache_bytes, memory.compute_bytes), (0, 0), "{architecture}");
        assert_eq!(memory.total_bytes, memory.weights_bytes + memory.overhead_bytes);
        let embeds = estimate(summary, &FitInput { pooled_tokens: 64, ..input });
        assert_eq!(embeds.total_bytes - memory.total_bytes, embeds.pooled_bytes);
        assert!(embeds.pooled_bytes > 4 << 20);
        // All of it on a GPU, and the same in main memory without.
        let offloaded = estimate(summary, &FitInput { gpu_layers: u32::MAX, pooled_tokens: 64, ..input });
        assert!(offloaded.device_bytes > 0 && offloaded.total_bytes >= embeds.total_bytes);
        let report = Report::new("x", &header, FitInput { pooled_tokens: 64, ..input }).to_string();
        assert!(report.contains("KV cache       none\n") && report.contains("it is an encoder"), "{report}");
    }
    // It embeds, too, but has a cache as any other.
    let mut file = Gguf::encoder("llama-embed");
    file.put("llama-embed.attention.layer_norm_rms_epsilon", ty::F32, 1e-5_f32.to_le_bytes().to_vec());
    let summary = summary_of(&file);
    assert!(!summary.encoder && summary.kv_heads_total == 4);
}

/// A model of nothing but what the sources of llama.cpp ask for; with keys that hold together, for one that has experts.
#[test]
fn what_an_architecture_needs_is_all_that_it_is_refused_without() {
    let mut seen = 0;
    for architecture in ["bert", "mamba", "qwen3moe", "gemma2", "mpt", "rwkv7", "starcoder2", "deepseek2", "phi2"] {
        let mut file = Gguf::of(architecture);
        if ["gemma2", "qwen3moe"].contains(&architecture) {
            file = plain(file, architecture);
        }
        let codes = |file: &Gguf| {
            let (bytes, file_bytes) = file.header();
            let findings = inspect_prefix(&bytes, file_bytes).findings.list;
            findings.into_iter().map(|finding| (finding.code, finding.subject)).collect::<Vec<_>>()
        };
        assert_eq!(codes(&file), [], "{architecture}");
        for at in 0..file.tensors.len() {
            let mut less = file.clone();
            let name = String::from_utf8(less.tensors.remove(at).name).unwrap();
            if is_needed(architecture, &name) {
                assert_eq!(codes(&less), [(Code::MissingTensor, Some(name))], "{architecture}");
                seen += 1;
            }
        }
        for key in file.keys.iter().filter_map(|key| std::str::from_utf8(&key.name).ok()) {
            let own = key.strip_prefix(architecture).and_then(|key| key.strip_prefix('.'));
            if own.is_some_and(|own| is_needed(architecture, own)) {
                let mut less = file.clone();
                less.remove(key);
                assert_eq!(codes(&less), [(Code::MissingKey, Some(key.to_owned()))], "{architecture}");
                seen += 1;
            }
        }
    }
    assert!(seen > 80, "{seen}");
}

/// The heads of a plain decoder: its tensors are held against these.
fn plain(mut file: Gguf, architecture: &str) -> Gguf {
    for layer_part in ["attn_q", "attn_k", "attn_v"] {
        file.named(&format!("blk.0.{layer_part}.weight")).shape = vec![64, 64];
    }
    if architecture == "gemma2" {
        for (part, shape) in [("ffn_gate", [64, 96]), ("ffn_up", [64, 96]), ("ffn_down", [96, 64])] {
            let tensor = file.named(&format!("blk.0.{part}.weight"));
            (tensor.shape, tensor.bytes) = (shape.to_vec(), 64 * 96 * 2);
        }
    }
    file
}

/// Whether the table has it: the rest of a model is there to hold together.
fn is_needed(architecture: &str, name: &str) -> bool {
    let table = include_str!("../src/needs.txt").split("\n\n");
    let needs = table.filter_map(|block| block.split_once('\n')).find(|(name, _)| *name == architecture).unwrap().1;
    let (is_layer, part) = name.strip_prefix("blk.0.").map_or((false, name), |part| (true, part));
    let mut lines = needs.lines().filter(|line| line.starts_with("layer") == is_layer);
    lines.any(|line| line.split(' ').nth(1).unwrap().split('|').next() == Some(part))
}

#[test]
fn a_quantisation_that_no_tensor_has_is_noted_where_one_could_have_it() {
    let codes = |head: u32, kind, file_type| {
        let shape = Shape { heads: 1, kv_heads: 1, head, hidden: 256, kind, file_type, ..Shape::default() };
        let (bytes, file_bytes) = Gguf::model(&shape).header();
        let header = read_header_prefix(&bytes, file_bytes).unwrap();
        header.notes().iter().map(|note| (note.code, note.expected.clone())).collect::<Vec<_>>()
    };
    let declared = |name: &str| vec![(Code::DeclaredQuantization, name.to_owned())];
    assert_eq!(codes(256, Q8_0, 15), declared("Q4_K_M"));
    assert_eq!(codes(256, F16, 7), declared("Q8_0"));
    assert_eq!(codes(256, Q8_0, 7), []);
    // No type that llama.cpp numbers, and one that it guessed.
    assert_eq!((codes(256, Q8_0, 999), codes(256, Q8_0, 1024 + 15)), (vec![], vec![]));
    // Every model has norms of F32.
    assert_eq!(codes(256, Q8_0, 0), []);
}

/// Keys of tokens that no text needs, in a vocabulary of 40.
#[test]
fn tokens_that_are_none_and_that_no_text_needs_are_noted() {
    let names =
        ["padding", "mask", "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep", "prefix", "suffix"];
    for name in names.into_iter().chain(["middle", "cls", "separator"]) {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let mut file = Gguf::model(&Shape::default());
        file.number(&key, 39);
        assert_eq!(notes_of(&file), [], "{key}");
        file.number(&key, 40);
        assert_eq!(notes_of(&file), [(Code::UnusedTokenOutOfRange, Some(key))]);
    }
    let suppressed = |tokens: &[i32]| {
        let mut file = Gguf::model(&Shape::default());
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        file.put("tokenizer.ggml.suppress_tokens", ty::ARRAY, array(ty::I32, tokens.len() as u64, &bytes));
        notes_of(&file)
    };
    let noted = [(Code::UnusedTokenOutOfRange, Some("tokenizer.ggml.suppress_tokens".to_owned()))];
    assert_eq!((suppressed(&[]), suppressed(&[0, 39, 7])), (vec![], vec![]));
    assert_eq!((&suppressed(&[0, 40, 7])[..], &suppressed(&[3, -1])[..]), (&noted[..], &noted[..]));
}

#[test]
fn control_characters_in_what_a_file_tells_of_itself_are_noted_and_shown_escaped() {
    let told = |texts: &[(&str, &str)]| {
        let mut file = Gguf::model(&Shape::default());
        texts.iter().for_each(|(key, text)| file.text(key, text));
        file
    };
    let noted = |key: &str| vec![(Code::ControlInText, Some(key.to_owned()))];
    for text in ["\u{1b}[31mred", "a\nb", "a\tb", "a\0b", "\u{7f}", "\u{9b}31m"] {
        assert_eq!(notes_of(&told(&[("general.name", text)])), noted("general.name"), "{text:?}");
    }
    // Of several lines, as descriptions and licences are, and what is no text about the file.
    let lines = "First.\r\n\tSecond.";
    assert_eq!(notes_of(&told(&[("general.description", lines), ("tokenizer.chat_template", "\u{1b}")])), []);
    assert_eq!(notes_of(&told(&[("general.license", "\u{7}"), ("general.url", "\u{8}")])), noted("general.license"));

    let file = told(&[("general.name", "\u{1b}]0;other\u{7}"), ("general.author", "\u{8}"), ("general.url", "\u{8}")]);
    let (bytes, file_bytes) = file.header();
    let header = read_header_prefix(&bytes, file_bytes).unwrap();
    let message = &header.notes()[0].message;
    assert!(message.contains("2 other texts") && message.contains("\\u{1b}]0;other\\u{7}"), "{message}");
    let report = Report::new("x", &header, FitInput::default()).to_string();
    assert!(!report.contains(|c: char| c.is_control() && c != '\n'), "{report:?}");
}

#[test]
fn what_nobody_reads_may_be_of_any_type() {
    let mut file = Gguf::model(&Shape::default());
    for key in ["tokenizer.chat_template.other", "tokenizer.chat_templates", "general.author"] {
        file.number(key, 1);
    }
    file.text("tokenizer.ggml.cls_token_id", "1");
    // The character map is that of another tokenizer.
    file.number("tokenizer.ggml.precompiled_charsmap", 1);
    assert_eq!(notes_of(&file), []);
    // What is read is taken in its own type.
    for (key, kind, bytes) in [
        ("llama.attention.causal", ty::BOOL, vec![1]),
        ("llama.rope.scaling.original_context_length", ty::U32, vec![0, 2, 0, 0]),
        ("llama.classifier.output_labels", ty::ARRAY, common::strings(["yes", "no"])),
        ("tokenizer.chat_template.tool_use", ty::STRING, common::string(b"{{ tools }}")),
    ] {
        file.put(key, kind, bytes);
        assert_eq!(notes_of(&file), [], "{key}");
    }
}

#[test]
fn a_count_of_tokens_that_is_not_the_vocabularys_is_noted() {
    let noted = |tokens: u32| {
        let mut file = Gguf::model(&Shape::default());
        file.number("llama.vocab_size", tokens);
        notes_of(&file)
    };
    assert_eq!(noted(40), []);
    for tokens in [0, 39, 41, u32::MAX] {
        assert_eq!(noted(tokens), [(Code::DeclaredVocabulary, Some("llama.vocab_size".to_owned()))], "{tokens}");
    }
}

#[test]
fn every_pooling_of_llama_cpp_and_none_are_taken() {
    for pooling in [0, 1, 2, 3, 4, u32::MAX] {
        let mut file = Gguf::encoder("bert");
        file.number("bert.pooling_type", pooling);
        file.number("bert.classifier.pooling_type", pooling);
        if pooling == 4 {
            let (bytes, file_bytes) = file.header();
            let refused = read_header_prefix(&bytes, file_bytes).unwrap_err().to_string();
            assert!(refused.contains("\"cls.output.weight\" is missing"), "{refused}");
            file.tensor("cls.output.weight", &[64, 1], F32);
        }
        assert_eq!(notes_of(&file), [], "{pooling}");
    }
}

/// What is noted of a file that is accepted.
fn notes_of(file: &Gguf) -> Vec<(Code, Option<String>)> {
    let (bytes, file_bytes) = file.header();
    let header = read_header_prefix(&bytes, file_bytes).unwrap();
    header.notes().iter().map(|note| (note.code, note.subject.clone())).collect()
}

#[test]
fn what_is_odd_and_does_no_harm_is_noted() {
    let mut file = Gguf::model(&Shape { kind: F16, file_type: 1, ..Shape::default() });
    file.number("tokenizer.ggml.padding_token_id", 40);
    file.put("tokenizer.ggml.merges", ty::ARRAY, common::strings(["t 0", "t 1", "x y"]));
    let (bytes, file_bytes) = file.header();
    let header = read_header_prefix(&bytes, file_bytes).unwrap();
    let [padding, merges] = header.notes() else { panic!("{:?}", header.notes()) };
    assert_eq!((padding.code, merges.code), (Code::UnusedTokenOutOfRange, Code::MergeWithoutToken));
    let (padding, merges) = (&padding.message, &merges.message);
    assert!(padding.contains("padding_token_id is 40"), "{padding}");
    assert!(merges.starts_with("1 of 3 merges"), "{merges}");
    assert!(Report::new("x", &header, FitInput::default()).to_string().contains("  note"));
}

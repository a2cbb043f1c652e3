//! Model files that load and compute no numbers, or could answer nobody: each is refused by the load, with what to do, and
//! none serves.
#![allow(clippy::unwrap_used)]

#[path = "../../llama/tests/common/gguf.rs"]
mod gguf;
#[path = "../../tests/http/template_file.rs"]
mod template_file;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use gantry_engine::{EngineConfig, KvLayout, LoadError, ModelHost, PooledConfig, Pooling, SpeculationConfig};

const NAN_F16: [u8; 2] = 0x7e00_u16.to_le_bytes();

fn model(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../e2e/models").join(name)
}

/// A copy of a demo model in which a part of a tensor's data is other bytes, `every` so many.
fn damaged(folder: &Path, name: &str, tensor: &str, every: usize, bytes: &[u8]) -> PathBuf {
    with_data(folder, name, tensor, |data| {
        data.chunks_mut(every).for_each(|chunk| chunk[..bytes.len()].copy_from_slice(bytes));
    })
}

/// A copy of a demo model with other data of a tensor.
fn with_data(folder: &Path, name: &str, tensor: &str, change: impl FnOnce(&mut [u8])) -> PathBuf {
    let header = gantry_gguf::read_header(model(name)).unwrap();
    let tensor = header.tensors().get(tensor).unwrap();
    let start = usize::try_from(header.summary().header_bytes + tensor.offset).unwrap();
    let mut file = std::fs::read(model(name)).unwrap();
    change(&mut file[start..][..usize::try_from(tensor.bytes).unwrap()]);
    let path = folder.join("damaged.gguf");
    std::fs::write(&path, file).unwrap();
    path
}

/// Where the type of a key's value is.
fn behind(file: &[u8], key: &str) -> usize {
    file.windows(key.len()).position(|window| window == key.as_bytes()).unwrap() + key.len()
}

/// A copy of a demo model in which the number of a key is another.
fn with_float(folder: &Path, name: &str, key: &str, value: f32) -> PathBuf {
    let mut file = std::fs::read(model(name)).unwrap();
    let at = behind(&file, key);
    assert_eq!(file[at..at + 4], [6, 0, 0, 0], "an f32");
    file[at + 4..at + 8].copy_from_slice(&value.to_le_bytes());
    let path = folder.join("damaged.gguf");
    std::fs::write(&path, file).unwrap();
    path
}

fn config(path: PathBuf) -> EngineConfig {
    EngineConfig { ctx_size: 512, parallel: 2, threads: Some(1), gpu_layers: Some(0), ..EngineConfig::new(path) }
}

fn refused(config: &EngineConfig, damaged: &Path) {
    let Err(error) = ModelHost::load(config, &Arc::default(), |_| true) else { panic!("{config:?} is loaded") };
    assert_eq!(error, LoadError::NotFinite { path: damaged.to_path_buf() });
    let text = error.to_string();
    assert!(text.contains("NaN") && text.contains("gantry-server validate"), "{text}");
}

#[test]
fn weights_norms_and_rope_parameters_that_are_nan_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let nan = f32::NAN.to_le_bytes();
    for layout in [KvLayout::Split, KvLayout::Unified] {
        for make in [
            // A norm, the scale of one block, one number of an F16 matrix, all of one, and the rope's base. Where it is
            // multiplied with a quantised matrix, one NaN among numbers may end as some number: ggml quantises what it
            // multiplies with. For those there are the checks of the file.
            &(|| damaged(folder.path(), "demo-v2.q8_0.gguf", "blk.1.ffn_norm.weight", 4, &nan)) as &dyn Fn() -> _,
            &|| damaged(folder.path(), "demo-v2.q8_0.gguf", "output_norm.weight", 4, &f32::INFINITY.to_le_bytes()),
            &|| damaged(folder.path(), "demo-v2.q8_0.gguf", "blk.1.ffn_down.weight", 1 << 30, &NAN_F16),
            &|| damaged(folder.path(), "demo-v2.f16.gguf", "blk.3.attn_v.weight", 1 << 30, &NAN_F16),
            &|| damaged(folder.path(), "demo-v2.f16.gguf", "blk.0.ffn_down.weight", 2, &NAN_F16),
            &|| with_float(folder.path(), "demo-v2.q8_0.gguf", "llama.rope.freq_base", f32::NAN),
        ] {
            let path = make();
            refused(&EngineConfig { kv_layout: layout, ..config(path.clone()) }, &path);
        }
    }
}

/// Each weight is a number, and what is computed of a chat is none: one token of its own has numbers still.
#[test]
fn weights_that_are_too_large_for_a_chat_are_refused() {
    const LARGEST_F16: [u8; 2] = 0x7bff_u16.to_le_bytes();
    const BLOCK_BYTES: usize = 34;
    let folder = tempfile::tempdir().unwrap();
    let path = with_data(folder.path(), "demo-v2.q8_0.gguf", "blk.0.ffn_gate.weight", |data| {
        let block = data.len() / BLOCK_BYTES * 7_771 / 10_000;
        data[block * BLOCK_BYTES..][..2].copy_from_slice(&LARGEST_F16);
    });
    refused(&config(path.clone()), &path);
}

#[test]
fn positions_that_are_no_numbers_further_on_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("scaled.gguf");
    for layout in [KvLayout::Split, KvLayout::Unified] {
        let mut file = gguf::Gguf::new("gemma2");
        file.string("gemma2.rope.scaling.type", "linear");
        // The first positions are rotated by numbers still.
        file.float("gemma2.rope.scaling.factor", 1e-37);
        std::fs::write(&path, gguf::sliding_window_of(file).bytes()).unwrap();
        refused(&EngineConfig { kv_layout: layout, ..config(path.clone()) }, &path);
    }
}

#[test]
fn a_draft_model_that_computes_no_numbers_is_refused_by_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let draft = damaged(folder.path(), "demo-draft.q8_0.gguf", "output_norm.weight", 4, &f32::NAN.to_le_bytes());
    let speculation = SpeculationConfig { draft_model: Some(draft.clone()), ..SpeculationConfig::default() };
    refused(&EngineConfig { speculation, ..config(model("demo-v2.q8_0.gguf")) }, &draft);
}

#[test]
fn what_embeds_and_computes_no_numbers_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let pooled = PooledConfig { pooling: Some(Pooling::Mean), batch_tokens: 64, ..PooledConfig::default() };
    let path = damaged(folder.path(), "demo-v2.q8_0.gguf", "blk.0.attn_norm.weight", 4, &f32::NAN.to_le_bytes());
    refused(&EngineConfig { pooled: Some(pooled), ..config(path.clone()) }, &path);
    let mut encoder = gguf::bert(1).bytes();
    let end = encoder.len();
    // The last tensor is a bias of F32.
    encoder[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&path, encoder).unwrap();
    let pooled = PooledConfig { pooling: None, ..pooled };
    refused(&EngineConfig { pooled: Some(pooled), ..config(path.clone()) }, &path);
}

/// llama.cpp's types of tokens.
const CONTROL: i32 = 3;

/// Makes control tokens of some.
fn make_control(file: &mut [u8], of: impl Fn(usize) -> bool) {
    let at = behind(file, "tokenizer.ggml.token_type") + 4 + 4;
    let count = usize::try_from(u64::from_le_bytes(file[at..at + 8].try_into().unwrap())).unwrap();
    for token in (0..count).filter(|&token| of(token)) {
        file[at + 8 + 4 * token..][..4].copy_from_slice(&CONTROL.to_le_bytes());
    }
}

/// The token that is written so.
fn token_of(file: &[u8], text: &str) -> usize {
    let at = behind(file, "tokenizer.ggml.tokens") + 4 + 4;
    let mut rest = &file[at + 8..];
    for token in 0.. {
        let (length, after) = rest.split_at(8);
        let length = usize::try_from(u64::from_le_bytes(length.try_into().unwrap())).unwrap();
        let (found, after) = after.split_at(length);
        if found == text.as_bytes() {
            return token;
        }
        rest = after;
    }
    unreachable!()
}

/// Makes a template empty: what it was becomes the value of another key.
fn empty_template(file: &mut [u8]) {
    let at = behind(file, "tokenizer.chat_template") + 4;
    let length = u64::from_le_bytes(file[at..at + 8].try_into().unwrap());
    let key = b"general.comment";
    let head = [
        &0_u64.to_le_bytes()[..],
        &(key.len() as u64).to_le_bytes(),
        key,
        &8_u32.to_le_bytes(),
        &(length - 8 - key.len() as u64 - 4 - 8).to_le_bytes(),
    ];
    let head = head.concat();
    file[at..at + head.len()].copy_from_slice(&head);
    let keys = u64::from_le_bytes(file[16..24].try_into().unwrap());
    file[16..24].copy_from_slice(&(keys + 1).to_le_bytes());
}

fn load(path: &Path) -> Result<ModelHost, LoadError> {
    ModelHost::load(&config(path.to_path_buf()), &Arc::default(), |_| true)
}

#[test]
fn files_that_could_answer_nobody_are_refused_and_say_why() {
    let folder = tempfile::tempdir().unwrap();
    let demo = "demo-v2.q8_0.gguf";
    for (key, make) in [
        (
            "a norm of zeros",
            &(|| damaged(folder.path(), demo, "output_norm.weight", 4, &[0; 4])) as &dyn Fn() -> PathBuf,
        ),
        ("an epsilon", &|| with_float(folder.path(), demo, "llama.attention.layer_norm_rms_epsilon", 1e30)),
    ] {
        let error = load(&make()).err().unwrap_or_else(|| panic!("{key} is loaded"));
        let told = "the same for every token";
        assert!(matches!(&error, LoadError::Useless { reason, .. } if reason.contains(told)), "{key}: {error}");
    }
    let whole = std::fs::read(model(demo)).unwrap();
    let length = |file: &mut Vec<u8>, tokens: u32| {
        let at = behind(file, "llama.context_length") + 4;
        file[at..at + 4].copy_from_slice(&tokens.to_le_bytes());
    };
    type Change<'a> = &'a dyn Fn(&mut Vec<u8>);
    let cases: [(&str, Change<'_>, &str); 6] = [
        (
            "nothing but control tokens",
            &|file| make_control(file, |_| true),
            "tokens of its vocabulary are control tokens",
        ),
        ("one token of context", &|file| length(file, 1), "a chat of one word takes"),
        ("too little context", &|file| length(file, 6), "trained for 6 (its context_length)"),
        ("an empty template", &|file| empty_template(file), "it is empty"),
        (
            "a template for nobody",
            &|file| *file = template_file::with_template(std::mem::take(file), "Hello"),
            "without what the user says",
        ),
        (
            "a template for the first",
            &|file| *file = template_file::with_template(std::mem::take(file), "{{ messages[0].content }}"),
            "of a system text it makes a prompt without",
        ),
    ];
    for (what, change, told) in cases {
        let (mut file, path) = (whole.clone(), folder.path().join(what));
        change(&mut file);
        std::fs::write(&path, file).unwrap();
        let error = load(&path).err().unwrap_or_else(|| panic!("{what} is loaded"));
        let useless = matches!(&error, LoadError::Useless { .. } | LoadError::Template(_));
        assert!(useless && error.to_string().contains(told), "{what}: {error}");
    }
}

#[test]
fn a_tokenizer_that_is_not_the_vocabularys_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut file = std::fs::read(model("demo-v2.q8_0.gguf")).unwrap();
    let at = behind(&file, "tokenizer.ggml.model") + 4 + 8;
    file[at..at + 4].copy_from_slice(b"rwkv");
    let path = folder.path().join("rwkv.gguf");
    std::fs::write(&path, file).unwrap();
    let error = load(&path).err().unwrap().to_string();
    assert!(error.contains("tokenizer.ggml.model") && error.contains("convert the model again"), "{error}");
}

#[test]
fn a_vocabulary_whose_words_of_roles_are_control_tokens_is_served() {
    let folder = tempfile::tempdir().unwrap();
    let mut file = std::fs::read(model("demo-v2.q8_0.gguf")).unwrap();
    let user = token_of(&file, "user");
    make_control(&mut file, |token| token == user);
    let path = folder.path().join("user.gguf");
    std::fs::write(&path, file).unwrap();
    let host = load(&path).unwrap();
    let template = host.model_info().template.as_ref().unwrap();
    assert_eq!(template.renders, ["a turn", "a system text", "three turns", "tools"]);
}

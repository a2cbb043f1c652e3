//! Model files that load and compute no numbers: each is refused by the load, with what to do, and none serves.
#![allow(clippy::unwrap_used)]

#[path = "../../llama/tests/common/gguf.rs"]
mod gguf;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use gantry_engine::{EngineConfig, KvLayout, LoadError, ModelHost, PooledConfig, Pooling, SpeculationConfig};

const NAN_F16: [u8; 2] = 0x7e00_u16.to_le_bytes();

fn model(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../e2e/models").join(name)
}

/// A copy of a demo model in which a part of a tensor's data is other bytes, `every` so many.
fn damaged(folder: &Path, name: &str, tensor: &str, every: usize, bytes: &[u8]) -> PathBuf {
    let header = gantry_gguf::read_header(model(name)).unwrap();
    let tensor = header.tensors().get(tensor).unwrap();
    let start = usize::try_from(header.summary().header_bytes + tensor.offset).unwrap();
    let mut file = std::fs::read(model(name)).unwrap();
    let data = &mut file[start..][..usize::try_from(tensor.bytes).unwrap()];
    data.chunks_mut(every).for_each(|chunk| chunk[..bytes.len()].copy_from_slice(bytes));
    let path = folder.join("damaged.gguf");
    std::fs::write(&path, file).unwrap();
    path
}

/// A copy of a demo model in which the number of a key is another.
fn with_float(folder: &Path, name: &str, key: &str, value: f32) -> PathBuf {
    let mut file = std::fs::read(model(name)).unwrap();
    let at = file.windows(key.len()).position(|window| window == key.as_bytes()).unwrap() + key.len();
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

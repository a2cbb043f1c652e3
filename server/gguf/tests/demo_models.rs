//! The demo models of this repository, which llama.cpp's own tools wrote, read as they are.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;

use gantry_gguf::fit::{FitInput, estimate};
use gantry_gguf::{Defect, GgmlType, GgufError, Report, ShapeCoverage, read_header, read_header_prefix};

fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../e2e/models").join(name)
}

#[test]
fn every_demo_model_passes_with_the_right_figures() {
    // File, version, quantisation, bytes of the file, parameters, layers, heads, KV heads, embedding.
    let table = [
        ("demo-v1.q8_0.gguf", "v1", "Q8_0", 3_973_664, 3_672_320, 4, 8, 4, 256),
        ("demo-v2.q8_0.gguf", "v2", "Q8_0", 3_973_664, 3_672_320, 4, 8, 4, 256),
        ("demo-v2.f16.gguf", "v2", "F16", 7_414_304, 3_672_320, 4, 8, 4, 256),
        ("demo-v2.q4_k_m.gguf", "v2", "Q4_K_M", 2_392_096, 3_672_320, 4, 8, 4, 256),
        ("demo-v3-bad.q8_0.gguf", "v3-bad", "Q8_0", 3_973_696, 3_672_320, 4, 8, 4, 256),
        ("demo-draft.q8_0.gguf", "draft", "Q8_0", 658_432, 557_696, 2, 4, 2, 128),
    ];
    for (file, version, quantization, bytes, parameters, layers, heads, kv_heads, embedding) in table {
        let header = read_header(path(file)).unwrap();
        let s = header.summary();
        assert_eq!(header.version(), 3, "{file}");
        assert_eq!(s.architecture, "llama", "{file}");
        assert_eq!(s.version.as_deref(), Some(version), "{file}");
        assert_eq!(s.quantization, quantization, "{file}");
        assert_eq!((s.file_bytes, s.parameters), (bytes, parameters), "{file}");
        assert_eq!((s.layers, s.heads, s.kv_heads), (layers, heads, kv_heads), "{file}");
        assert_eq!((s.head_dim_k, s.head_dim_v, s.embedding_length), (32, 32, embedding), "{file}");
        assert_eq!((s.context_length, s.vocabulary), (2048, 2048), "{file}");
        assert!(s.chat_template && s.tied_output, "{file}");
        assert_eq!(s.shape_coverage, ShapeCoverage::Full, "{file}");
        assert!(s.tensor_bytes + s.header_bytes <= bytes && bytes - s.tensor_bytes - s.header_bytes < 4096, "{file}");
    }
}

#[test]
fn the_cache_of_a_demo_model_is_counted_to_the_byte() {
    let header = read_header(path("demo-v2.q8_0.gguf")).unwrap();
    let input = FitInput { ctx_size: 4096, parallel: 8, ..FitInput::default() };
    let memory = estimate(header.summary(), &input);
    // 4 layers x 4 KV heads x (32 + 32) elements x 2 bytes x 8 sequences x 512 cells.
    assert_eq!(memory.kv_cache_bytes, 4 * 4 * 64 * 2 * 8 * 512);
    assert_eq!(memory.weights_bytes, header.summary().tensor_bytes);
    let quantised = FitInput { type_k: GgmlType::Q8_0, type_v: GgmlType::Q4_0, ..input };
    assert_eq!(estimate(header.summary(), &quantised).kv_cache_bytes, 4 * 4 * (34 + 18) * 8 * 512);
    // In one pool with 64 sequences more: two rows of 2,048 logits for each of those, and a mask over all cells.
    let split = FitInput { n_outputs_max: 8, ..input };
    let pool = FitInput { pool_sequences: 72, n_outputs_max: 72, ..split };
    let (split, pool) = (estimate(header.summary(), &split), estimate(header.summary(), &pool));
    assert_eq!(pool.compute_bytes - split.compute_bytes, 4 * (2 * 64 * 2048 + 512 * (4096 - 512)));
    assert_eq!((pool.kv_cache_bytes, pool.cells), (split.kv_cache_bytes, split.cells));
    // And with cells beside it in which prompts are read: the feed-forward of 128 tokens, their mask, two rows of logits.
    let pool = FitInput { pool_sequences: 72, n_outputs_max: 72, ..input };
    let staged = estimate(header.summary(), &FitInput { stage_cells: 1024, stage_batch: 128, ..pool });
    let pool = estimate(header.summary(), &pool);
    let cells = 4 * 4 * 64 * 2 * 1024;
    assert_eq!(staged.kv_cache_bytes - pool.kv_cache_bytes, cells);
    // And the state on its way.
    let computes = 4 * 128 * (4 * 256 + 3 * 768) + 4 * 128 * 1024 + 2 * 4 * 2048 + (4 << 20) + 2 * cells;
    assert_eq!(staged.compute_bytes - pool.compute_bytes, computes);
    assert_eq!(staged.cells, pool.cells);
}

#[test]
fn what_a_cpu_lays_out_anew_is_counted() {
    let weights = |file: &str, amx, gpu_layers| {
        let header = read_header(path(file)).unwrap();
        let memory = estimate(header.summary(), &FitInput { amx, gpu_layers, ..FitInput::default() });
        memory.weights_bytes - header.summary().tensor_bytes
    };
    let summary = read_header(path("demo-v2.q8_0.gguf")).unwrap().summary().clone();
    // Tied: a copy of the embedding where rows of it cannot be looked up in what is computed with, and with AMX a sum of
    // 4 bytes beside each block of Q8_0.
    assert!(summary.tied_output && summary.embedding_type == Some(GgmlType::Q8_0));
    let blocks = summary.types.iter().find(|(kind, _)| *kind == GgmlType::Q8_0).unwrap().1 / 34;
    assert_eq!(weights("demo-v2.q8_0.gguf", false, 0), 0);
    assert_eq!(weights("demo-v2.q8_0.gguf", true, 0), summary.embedding_bytes + 4 * blocks);
    // Half of the layers on a GPU, and all of them.
    assert_eq!(weights("demo-v2.q8_0.gguf", true, 3), summary.embedding_bytes + 2 * (4 * blocks).div_ceil(4));
    assert_eq!(weights("demo-v2.q8_0.gguf", true, 99), summary.embedding_bytes);
}

#[test]
fn a_context_that_embeds_is_counted_where_it_is_asked_for() {
    let header = read_header(path("demo-v2.q8_0.gguf")).unwrap();
    let input = FitInput { ctx_size: 4096, parallel: 8, ..FitInput::default() };
    let plain = estimate(header.summary(), &input);
    let pooled = estimate(header.summary(), &FitInput { pooled_tokens: 100, ..input });
    assert_eq!(plain.pooled_bytes, 0);
    let cells = 4 * 4 * 64 * 2 * 256;
    // The feed-forward is the widest part; a row of logits and its copy; the mask.
    let compute = 4 * 100 * (4 * 256 + 3 * 768) + 4 * 2 * 2048 + 4 * 100 * 256;
    let rows = 4 * 100 * (2048 + 256);
    assert_eq!(pooled.pooled_bytes, cells + compute + rows + (4 << 20));
    assert_eq!(pooled.total_bytes - plain.total_bytes, pooled.pooled_bytes);
    let text = Report::new("x", &header, FitInput { pooled_tokens: 100, ..input }).to_string();
    assert!(text.contains("embeddings     6.76 MiB (ubatch 100)\n"), "{text}");
}

#[test]
fn a_truncated_demo_model_names_both_lengths() {
    let whole = std::fs::read(path("demo-v2.q8_0.gguf")).unwrap();
    let cut = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(cut.path(), &whole[..3_000_000]).unwrap();
    let error = read_header(cut.path()).unwrap_err();
    let Some(Defect::DataTruncated { expected, found, .. }) = error.defect() else { panic!("{error}") };
    assert_eq!((*expected, *found), (3_973_664, 3_000_000));
    assert!(error.to_string().contains("3973664") && error.to_string().contains("3000000"), "{error}");
}

#[test]
fn the_first_part_of_a_file_is_enough_once_it_holds_the_header() {
    let whole = std::fs::read(path("demo-v2.q8_0.gguf")).unwrap();
    let file_bytes = whole.len() as u64;
    let mut have = 16;
    let mut requests = 0;
    let header = loop {
        match read_header_prefix(&whole[..have], file_bytes) {
            Ok(header) => break header,
            Err(GgufError::NeedMoreBytes { at_least }) => have = (at_least as usize).max(have * 2).min(whole.len()),
            Err(error) => panic!("{error}"),
        }
        requests += 1;
        assert!(requests < 16);
    };
    assert_eq!(header, read_header(path("demo-v2.q8_0.gguf")).unwrap());
    assert!(have < whole.len());
}

#[test]
fn a_directory_and_a_missing_file_are_io_errors() {
    for target in [env!("CARGO_MANIFEST_DIR").into(), path("absent.gguf")] {
        assert!(matches!(read_header(target), Err(GgufError::Io { .. })));
    }
}

#[test]
fn the_report_reads_as_a_table() {
    let header = read_header(path("demo-v2.q4_k_m.gguf")).unwrap();
    let input = FitInput { ctx_size: 4096, parallel: 8, ..FitInput::default() };
    let report = Report::new("demo-v2.q4_k_m.gguf", &header, input).with_available(1 << 30, 0.05);
    let text = report.to_string();
    for part in [
        "demo-v2.q4_k_m.gguf\n",
        "model          Demo v2, version v2\n",
        "architecture   llama, 3.67M parameters\n",
        "quantization   Q4_K_M (Q4_K ",
        "layers         4 of width 256, 8 heads, 4 KV heads of 32 + 32, feed-forward 768\n",
        "ok   length      the tensors end where the file does, at 2392096 bytes\n",
        "KV cache       8.00 MiB (4096 cells: 8 x 512, F16/F16)\n",
        "verdict        fits: needs ",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    assert!(report.fit().unwrap().fits);
    let small = Report::new("x", &header, input).with_available(10 << 20, 0.05);
    assert!(small.to_string().contains("does not fit: needs "));
}

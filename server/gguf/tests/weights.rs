//! Weights that are no numbers, or were never written: each is found where it is.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::PathBuf;
use std::time::Duration;

use common::{Gguf, Shape};
use gantry_gguf::{Code, WeightsDefect, WeightsReport, read_header, read_weights, sample_weights};

const PATIENCE: Duration = Duration::from_secs(60);
const NAN: u16 = 0x7e00;
const INFINITY: u16 = 0xfc00;

fn demo(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../e2e/models").join(name)
}

fn sample(bytes: &[u8], limit: Duration) -> WeightsReport {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    sample_weights(file.path(), &read_header(file.path()).unwrap(), limit).unwrap()
}

#[test]
fn the_demo_models_are_all_numbers() {
    for name in ["demo-v1.q8_0", "demo-v2.f16", "demo-v2.q4_k_m", "demo-v3-bad.q8_0", "demo-draft.q8_0"] {
        let path = demo(&format!("{name}.gguf"));
        let header = read_header(&path).unwrap();
        let report = sample_weights(&path, &header, PATIENCE).unwrap();
        assert_eq!((report.defect, &report.notes[..]), (None, &[][..]), "{name}");
        assert_eq!((report.sample.tensors, report.sample.of), (header.summary().tensors, header.summary().tensors));
        assert!(report.sample.bytes <= header.summary().tensor_bytes);
    }
}

/// A type's number, elements and bytes of a block, and where its half-precision numbers are, as ggml-common.h has them.
type Kind = (&'static str, (u32, u64, u64), &'static [usize]);

const KINDS: [Kind; 23] = [
    ("F16", (1, 1, 2), &[0]),
    ("BF16", (30, 1, 2), &[0]),
    ("Q4_0", (2, 32, 18), &[0]),
    ("Q4_1", (3, 32, 20), &[0, 2]),
    ("Q5_0", (6, 32, 22), &[0]),
    ("Q5_1", (7, 32, 24), &[0, 2]),
    ("Q8_0", (8, 32, 34), &[0]),
    ("Q2_K", (10, 256, 84), &[80, 82]),
    ("Q3_K", (11, 256, 110), &[108]),
    ("Q4_K", (12, 256, 144), &[0, 2]),
    ("Q5_K", (13, 256, 176), &[0, 2]),
    ("Q6_K", (14, 256, 210), &[208]),
    ("IQ2_XXS", (16, 256, 66), &[0]),
    ("IQ2_XS", (17, 256, 74), &[0]),
    ("IQ3_XXS", (18, 256, 98), &[0]),
    ("IQ1_S", (19, 256, 50), &[0]),
    ("IQ4_NL", (20, 32, 18), &[0]),
    ("IQ3_S", (21, 256, 110), &[0]),
    ("IQ2_S", (22, 256, 82), &[0]),
    ("IQ4_XS", (23, 256, 136), &[0]),
    ("TQ1_0", (34, 256, 54), &[52]),
    ("TQ2_0", (35, 256, 66), &[64]),
    ("Q1_0", (41, 128, 18), &[0]),
];

fn model_of(kind: (u32, u64, u64)) -> Gguf {
    Gguf::model(&Shape { heads: 1, kv_heads: 1, head: 256, hidden: 256, vocabulary: 9, kind, ..Shape::default() })
}

#[test]
fn a_scale_or_number_that_is_not_finite_is_found_in_every_type() {
    for (name, kind, places) in KINDS {
        let file = model_of(kind);
        let good = file.filled(0x21);
        assert_eq!(sample(&good, PATIENCE).defect, None, "{name}");
        let data = file.data_of("blk.1.ffn_up.weight");
        // In the first block and in the last, which is looked at of a large tensor, too.
        for block in [data.start, data.end - kind.2 as usize] {
            for (place, value) in places.iter().flat_map(|place| [(place, NAN), (place, INFINITY)]) {
                let (mut bytes, at) = (good.clone(), block + place);
                let value = if name == "BF16" && value == NAN { 0x7fc1 } else { value };
                let value = if name == "BF16" && value == INFINITY { 0xff80 } else { value };
                bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
                let Some(WeightsDefect::NotFinite { tensor, kind: told, found, offset, .. }) =
                    sample(&bytes, PATIENCE).defect
                else {
                    panic!("{name} at {at}: accepted");
                };
                assert_eq!((tensor.as_str(), told, offset), ("blk.1.ffn_up.weight", name, at as u64));
                assert_eq!(found, if value == INFINITY || value == 0xff80 { "infinite" } else { "NaN" }, "{name}");
            }
        }
    }
    // Norms are F32 in every model.
    let file = model_of((8, 32, 34));
    let mut bytes = file.filled(0x21);
    let at = file.data_of("blk.0.attn_norm.weight").start + 400;
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    let defect = sample(&bytes, PATIENCE).defect.unwrap();
    assert!(
        defect.to_string().contains(&format!("\"blk.0.attn_norm.weight\" (F32) has a number that is NaN at byte {at}"))
    );
}

/// A token that nobody has written yet is met by the first request that writes it, so every row counts.
#[test]
fn each_row_of_the_table_of_tokens_is_looked_at() {
    let shape = Shape {
        heads: 1,
        kv_heads: 1,
        head: 256,
        hidden: 256,
        vocabulary: 9_999,
        kind: (8, 32, 34),
        ..Shape::default()
    };
    let file = Gguf::model(&shape);
    let good = file.filled(0x21);
    assert_eq!(sample(&good, PATIENCE).defect, None);
    let table = file.data_of("token_embd.weight");
    for row in [1, 77, 4_321, 9_998] {
        let (mut bytes, at) = (good.clone(), table.start + row * 8 * 34);
        bytes[at..at + 2].copy_from_slice(&NAN.to_le_bytes());
        let defect = sample(&bytes, PATIENCE).defect;
        let is_it = matches!(&defect, Some(WeightsDefect::NotFinite { tensor, offset, .. })
            if tensor == "token_embd.weight" && *offset == at as u64);
        assert!(is_it, "row {row}: {defect:?}");
    }
}

#[test]
fn scales_of_other_forms_are_looked_at_too() {
    for (name, kind, at, bytes) in [
        // An exponent of all ones; a half-precision number spread over the highest bits of four.
        ("MXFP4", (39, 32, 17), 0, &[0xff][..]),
        ("IQ1_M", (29, 256, 56), 48, &[0, 0, 0, 0, 0, 0xe0, 0, 0x70]),
    ] {
        let file = model_of(kind);
        let mut damaged = file.filled(0x21);
        assert_eq!(sample(&damaged, PATIENCE).defect, None, "{name}");
        let start = file.data_of("output_norm.weight").start - file.tensors[0].bytes as usize + at;
        let start = start.min(file.data_of("token_embd.weight").start + at);
        damaged[start..start + bytes.len()].copy_from_slice(bytes);
        let defect = sample(&damaged, PATIENCE).defect;
        assert!(matches!(&defect, Some(WeightsDefect::NotFinite { what: "scale", .. })), "{name}: {defect:?}");
    }
}

#[test]
fn what_was_never_written_is_refused_and_a_matrix_of_zeros_is_noted() {
    let file = model_of((8, 32, 34));
    let zero = |names: &[&str]| {
        let mut bytes = file.filled(0x21);
        names.iter().for_each(|name| bytes[file.data_of(name)].fill(0));
        sample(&bytes, PATIENCE)
    };
    assert!(matches!(sample(&file.filled(0), PATIENCE).defect, Some(WeightsDefect::Zero { zero: 15, of: 15, .. })));
    let embedding = zero(&["token_embd.weight"]).defect.unwrap().to_string();
    assert!(embedding.contains("token_embd") && embedding.contains("1 of 15"), "{embedding}");
    let one = zero(&["blk.1.attn_v.weight"]);
    assert_eq!(one.defect, None);
    let note = &one.notes[0].message;
    assert!(note.contains("1 of 15") && note.contains("blk.1.attn_v"), "{note}");
    let many = zero(&["blk.0.attn_v.weight", "blk.0.attn_k.weight", "blk.0.attn_q.weight", "blk.0.ffn_up.weight"]);
    assert!(matches!(many.defect, Some(WeightsDefect::Zero { zero: 4, .. })));
}

#[test]
fn what_is_read_is_bounded_in_bytes_and_time() {
    let kind = (8, 32, 34);
    let file = Gguf::model(&Shape {
        heads: 8,
        kv_heads: 8,
        head: 256,
        hidden: 2048,
        vocabulary: 99,
        kind,
        ..Shape::default()
    });
    let bytes = file.filled(0x21);
    let report = sample(&bytes, PATIENCE);
    // 16 pieces of at most 8 KiB of each, and all of the table of tokens.
    let table = file.data_of("token_embd.weight").len() as u64;
    assert!(
        report.sample.bytes <= report.sample.of * 16 * 8192 + table && report.sample.bytes * 10 < bytes.len() as u64
    );
    assert_eq!(report.sample.tensors, report.sample.of);
    let none = sample(&bytes, Duration::ZERO);
    assert_eq!((none.sample.tensors, none.defect), (0, None));
}

/// Reads all of a demo model after a change, and what was told of it.
fn all(name: &str, change: impl FnOnce(&mut [u8], &dyn Fn(&str) -> std::ops::Range<usize>)) -> (WeightsReport, u64) {
    let path = demo(name);
    let header = read_header(&path).unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    let data_of = |name: &str| {
        let tensor = header.tensors().get(name).unwrap();
        let start = (header.parts()[0].data_offset + tensor.offset) as usize;
        start..start + tensor.bytes as usize
    };
    change(&mut bytes, &data_of);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), &bytes).unwrap();
    let mut told = 0;
    let report = read_weights(file.path(), &read_header(file.path()).unwrap(), |bytes| {
        assert!(bytes >= told);
        told = bytes;
    });
    (report.unwrap(), told)
}

#[test]
fn all_weights_are_read_on_request_and_progress_is_told() {
    for name in ["demo-v1.q8_0", "demo-v2.f16", "demo-v2.q4_k_m", "demo-v3-bad.q8_0", "demo-draft.q8_0"] {
        let name = format!("{name}.gguf");
        let (report, told) = all(&name, |_, _| {});
        let summary = read_header(demo(&name)).unwrap().summary().clone();
        assert_eq!((report.sample.tensors, report.sample.bytes, told), (summary.tensors, summary.tensor_bytes, told));
        assert_eq!(told, summary.tensor_bytes, "{name}");
        assert!(report.defect.is_none() && report.notes.is_empty(), "{name}: {report:?}");
        assert!(report.summary().starts_with("all "));
    }
}

#[test]
fn what_no_sample_sees_is_found_where_all_is_read() {
    // One number in the middle of two tensors, between the pieces of a sample.
    let (report, _) = all("demo-v2.f16.gguf", |bytes, data_of| {
        for name in ["blk.1.ffn_up.weight", "blk.2.ffn_down.weight"] {
            let at = data_of(name).start + 40_000;
            bytes[at..at + 2].copy_from_slice(&NAN.to_le_bytes());
        }
    });
    let names = [report.defect.as_ref(), report.further.first()].map(|defect| match defect {
        Some(WeightsDefect::NotFinite { tensor, .. }) => tensor.clone(),
        other => panic!("{other:?}"),
    });
    assert_eq!(names, ["blk.1.ffn_up.weight", "blk.2.ffn_down.weight"]);
    assert_eq!(report.further.len(), 1);
}

#[test]
fn a_piece_that_was_written_to_two_places_is_noted() {
    const PIECE: usize = 128 * 1024;
    let (report, _) = all("demo-v2.f16.gguf", |bytes, data_of| {
        let from = data_of("blk.0.ffn_up.weight").start.next_multiple_of(PIECE);
        let to = data_of("blk.3.ffn_gate.weight").start.next_multiple_of(PIECE);
        bytes.copy_within(from..from + PIECE, to);
    });
    assert_eq!(report.defect, None);
    let [note] = &report.notes[..] else { panic!("{:?}", report.notes) };
    assert_eq!((note.code, note.subject.as_deref()), (Code::RepeatedBlocks, Some("blk.3.ffn_gate.weight")));
    assert!(note.message.contains("2 blocks that stand in tensor \"blk.0.ffn_up.weight\""), "{}", note.message);
}

#[test]
fn a_piece_that_was_never_written_is_noted() {
    const PIECE: usize = 128 * 1024;
    let (report, _) = all("demo-v2.f16.gguf", |bytes, data_of| {
        let hole = data_of("blk.3.ffn_gate.weight").start.next_multiple_of(PIECE);
        bytes[hole..hole + PIECE].fill(0);
    });
    assert_eq!(report.defect, None);
    let [note] = &report.notes[..] else { panic!("{:?}", report.notes) };
    assert_eq!((note.code, note.subject.as_deref()), (Code::RepeatedBlocks, Some("blk.3.ffn_gate.weight")));
    assert!(note.message.contains("2 blocks of 64.0 KiB that are zero"), "{}", note.message);
}

#[test]
fn weights_that_are_shifted_are_not_finite() {
    for (name, tensor) in [
        ("demo-v2.q8_0.gguf", "blk.1.ffn_up.weight"),
        ("demo-v2.q4_k_m.gguf", "blk.1.ffn_up.weight"),
        ("demo-v2.q8_0.gguf", "token_embd.weight"),
    ] {
        for by in [1, 2, 7, 16] {
            let path = demo(name);
            let header = read_header(&path).unwrap();
            let mut bytes = std::fs::read(&path).unwrap();
            let entry = header.tensors().get(tensor).unwrap();
            let start = (header.parts()[0].data_offset + entry.offset) as usize;
            bytes[start..start + entry.bytes as usize].rotate_left(by);
            let defect = sample(&bytes, PATIENCE).defect;
            let is_found = matches!(&defect, Some(WeightsDefect::NotFinite { tensor: told, .. }) if told == tensor);
            assert!(is_found, "{name} by {by}: {defect:?}");
        }
    }
}

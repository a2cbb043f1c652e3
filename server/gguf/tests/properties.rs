//! Whatever bytes arrive, the reader answers, in little memory; and what is well-formed is read as it was written.
#![allow(clippy::unwrap_used)]

mod common;

use std::process::Command;

use common::{F16, F32, Gguf, Q4_K, Q8_0, Shape, array, string, strings, ty};
use gantry_gguf::fit::{FitInput, estimate};
use gantry_gguf::{Defect, GgmlType, GgufError, read_header_from, read_header_prefix};
use proptest::prelude::*;

fn shape() -> impl Strategy<Value = Shape> {
    let architecture = prop_oneof![Just("llama"), Just("qwen2"), Just("qwen3"), Just("gemma"), Just("granite")];
    let kind = prop_oneof![Just((F32, 0)), Just((F16, 1)), Just((Q8_0, 7)), Just((Q4_K, 15))];
    (architecture, kind, 1_u32..5, 1_u32..4, 1_u32..4, 1_u32..4, 1_u32..300, 1_u32..9000, any::<bool>()).prop_map(
        |(architecture, (kind, file_type), layers, kv_heads, group, hidden, vocabulary, context, tied)| Shape {
            architecture,
            layers,
            heads: kv_heads * group,
            kv_heads,
            head: 256,
            hidden: hidden * 256,
            vocabulary,
            context,
            kind,
            file_type,
            tied,
        },
    )
}

/// Keys that no model needs, of every type.
fn extra_keys() -> impl Strategy<Value = Vec<(String, u32, Vec<u8>)>> {
    let value = prop_oneof![
        any::<u8>().prop_map(|value| (ty::U8, vec![value])),
        any::<u16>().prop_map(|value| (2, value.to_le_bytes().to_vec())),
        any::<f64>().prop_map(|value| (12, value.to_le_bytes().to_vec())),
        any::<bool>().prop_map(|value| (ty::BOOL, vec![value.into()])),
        any::<u64>().prop_map(|value| (ty::U64, value.to_le_bytes().to_vec())),
        any::<String>().prop_map(|text| (ty::STRING, string(text.as_bytes()))),
        ".{4000,5000}".prop_map(|text| (ty::STRING, string(text.as_bytes()))),
        proptest::collection::vec(any::<u64>(), 0..20).prop_map(|values| {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            (ty::ARRAY, array(ty::U64, values.len() as u64, &bytes))
        }),
        proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..20), 0..20)
            .prop_map(|texts| (ty::ARRAY, strings(texts))),
    ];
    proptest::collection::btree_map("[a-z]{1,8}\\.[a-zé_]{1,30}", value, 0..8)
        .prop_map(|keys| keys.into_iter().map(|(key, (kind, bytes))| (format!("x.{key}"), kind, bytes)).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn a_valid_header_is_read_as_it_was_written(
        shape in shape(),
        extra in extra_keys(),
        alignment in prop_oneof![Just(8_u32), Just(32), Just(64), Just(4096)],
        version in 2_u32..4,
        pad_last in any::<bool>(),
    ) {
        let mut file = Gguf::model(&shape);
        for (key, kind, bytes) in &extra {
            file.put(key, *kind, bytes.clone());
        }
        file.number("general.alignment", alignment);
        (file.alignment, file.version, file.pad_last) = (alignment.into(), version, pad_last);
        let (bytes, file_bytes) = file.header();
        let header = read_header_prefix(&bytes, file_bytes).unwrap();

        prop_assert_eq!((header.version(), header.alignment()), (version, u64::from(alignment)));
        prop_assert_eq!(header.metadata().len(), file.keys.len());
        for key in &file.keys {
            prop_assert!(header.metadata().get(std::str::from_utf8(&key.name).unwrap()).is_some());
        }
        prop_assert_eq!(header.tensors().list().len(), file.tensors.len());
        for (read, written) in header.tensors().list().iter().zip(&file.tensors) {
            prop_assert_eq!(read.name.as_bytes(), &written.name[..]);
            prop_assert_eq!(&read.shape, &written.shape);
            prop_assert_eq!(read.kind, GgmlType::from_id(written.kind).unwrap());
            prop_assert_eq!(read.bytes, written.bytes);
        }
        let s = header.summary();
        prop_assert_eq!((s.layers, s.heads, s.kv_heads), (shape.layers, shape.heads, shape.kv_heads));
        prop_assert_eq!((s.context_length, s.vocabulary), (shape.context, u64::from(shape.vocabulary)));
        prop_assert_eq!(s.parameters, file.tensors.iter().map(|t| t.shape.iter().product::<u64>()).sum::<u64>());
        prop_assert_eq!(s.tensor_bytes, file.tensors.iter().map(|t| t.bytes).sum::<u64>());
        prop_assert_eq!(s.header_bytes, bytes.len() as u64);
        prop_assert_eq!(s.tied_output, shape.tied);
        let name = ["F32", "F16", "Q8_0", "Q4_K_M"][[0, 1, 7, 15].iter().position(|id| *id == shape.file_type).unwrap()];
        prop_assert_eq!(&s.quantization, name);
    }

    #[test]
    fn every_cut_of_a_valid_file_is_told_apart(shape in shape(), at in 0.0_f64..1.0) {
        let (bytes, file_bytes) = Gguf::model(&shape).header();
        let cut = (bytes.len() as f64 * at) as usize;
        // A part of the whole: more is asked for, and never more than the header has.
        match read_header_prefix(&bytes[..cut], file_bytes) {
            Err(GgufError::NeedMoreBytes { at_least }) => {
                prop_assert!(at_least > cut as u64 && at_least <= bytes.len() as u64);
            }
            // Only the padding before the tensor data may be absent.
            Ok(_) => prop_assert!(bytes.len() - cut < 32),
            Err(error) => prop_assert!(false, "{error}"),
        }
        // The whole of a shorter file: it is refused.
        prop_assert!(read_header_prefix(&bytes[..cut], cut as u64).unwrap_err().defect().is_some());
        let short = read_header_prefix(&bytes, bytes.len() as u64).unwrap_err();
        prop_assert!(matches!(short.defect(), Some(Defect::DataTruncated { .. })), "{short}");
    }

    #[test]
    fn more_context_and_sequences_never_take_less_memory(
        shape in shape(), context in 1_u32..100_000, more in 0_u32..100_000, parallel in 1_u32..64, layers in any::<u32>(),
    ) {
        let (bytes, file_bytes) = Gguf::model(&shape).header();
        let header = read_header_prefix(&bytes, file_bytes).unwrap();
        let input = FitInput { ctx_size: context, parallel, gpu_layers: layers, ..FitInput::default() };
        let small = estimate(header.summary(), &input);
        let large = estimate(header.summary(), &FitInput { ctx_size: context.saturating_add(more), ..input });
        prop_assert!(small.total_bytes <= large.total_bytes);
        prop_assert!(small.cells >= u64::from(context / parallel * parallel));
        prop_assert!(small.device_bytes <= small.total_bytes);
        prop_assert_eq!(small.device_bytes + small.host_bytes, small.total_bytes);
        // Absurd settings saturate instead of wrapping or panicking.
        let absurd = FitInput { ctx_size: u32::MAX, parallel: u32::MAX, n_batch: u32::MAX, n_ubatch: u32::MAX, ..input };
        prop_assert!(estimate(header.summary(), &absurd).total_bytes >= small.total_bytes);
    }
}

/// One byte string, somewhere changed: bytes set, numbers made extreme, pieces cut out or doubled.
fn mutate(bytes: &mut Vec<u8>, edits: &[(u8, f64, u64)]) {
    for &(kind, at, value) in edits {
        let at = ((bytes.len() as f64 * at) as usize).min(bytes.len().saturating_sub(1));
        let end = (at + 8).min(bytes.len());
        match kind % 6 {
            0 => bytes[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]),
            1 => bytes[at..end].fill(0xff),
            2 => bytes[at..end].fill(0),
            3 => bytes[at] ^= value as u8,
            4 => bytes.truncate(bytes.len().saturating_sub(value as usize % 9)),
            _ => {
                let piece = bytes[at..end].to_vec();
                bytes.splice(at..at, piece);
            }
        }
        if bytes.is_empty() {
            bytes.push(0);
        }
    }
}

fn read_in_every_way(bytes: &[u8]) {
    let length = bytes.len() as u64;
    for file_bytes in [length, length * 2, u64::MAX, length / 2] {
        if let Err(error) = read_header_prefix(bytes, file_bytes) {
            assert!(!error.to_string().is_empty());
            assert!(error.to_string().len() < 2048, "{error}");
        }
    }
    // A reader that promises more than it has.
    let _ = read_header_from(bytes, u64::MAX, u64::MAX);
}

/// Runs in a process of its own, started by the test below, whose address space is limited.
#[test]
#[ignore = "run by hostile_bytes_never_panic_and_take_little_memory"]
fn hostile_bytes() {
    let edits = proptest::collection::vec((any::<u8>(), 0.0_f64..1.0, any::<u64>()), 1..5);
    let valid = (Just(Shape::default()), edits).prop_map(|(shape, edits)| {
        let (mut bytes, _) = Gguf::model(&shape).header();
        mutate(&mut bytes, &edits);
        bytes
    });
    // The preamble is where counts stand, so it is changed on its own as well.
    let preamble = (any::<u64>(), any::<u64>(), any::<bool>()).prop_map(|(tensors, keys, small)| {
        let mut file = Gguf::model(&Shape::default());
        (file.tensor_count, file.key_count) =
            if small { (Some(tensors % 70_000), Some(keys % 20_000)) } else { (Some(tensors), Some(keys)) };
        file.header().0
    });
    let noise = (any::<bool>(), proptest::collection::vec(any::<u8>(), 0..600)).prop_map(|(magic, mut bytes)| {
        if magic {
            bytes.splice(0..0, *b"GGUF\x03\0\0\0");
        }
        bytes
    });
    let any_of = prop_oneof![6 => valid, 1 => preamble, 1 => noise];
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(20_000));
    runner
        .run(&any_of, |bytes| {
            read_in_every_way(&bytes);
            Ok(())
        })
        .unwrap();
}

/// An allocation by a number out of the file would need more than the address space has, and kill the process.
///
/// One malloc arena: glibc reserves 64 MiB for each further one, and would look for it again at every call.
#[test]
fn hostile_bytes_never_panic_and_take_little_memory() {
    let limit_kib = 48 * 1024;
    let child = format!("ulimit -v {limit_kib} && exec \"$0\" --exact hostile_bytes --ignored --test-threads=1");
    let output = Command::new("sh")
        .args(["-c", &child])
        .arg(std::env::current_exe().unwrap())
        .env("MALLOC_ARENA_MAX", "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

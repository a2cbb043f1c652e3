//! Models in several files: whole ones are read as one, and each way of not being one is refused with its part's name.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::{Path, PathBuf};

use common::{Gguf, Shape, string, ty};
use gantry_gguf::{Defect, GgufError, Header, part_paths, read_header, read_header_prefix};

const I32: u32 = 5;

fn whole() -> Gguf {
    Gguf::model(&Shape::default())
}

/// The model in parts that begin with these tensors.
fn parts(starts: &[usize]) -> Vec<Gguf> {
    let whole = whole();
    let mut ends: Vec<usize> = starts.to_vec();
    ends.push(whole.tensors.len());
    let mut parts = Vec::new();
    for (number, pair) in ends.windows(2).enumerate() {
        let mut part = if number == 0 { whole.clone() } else { Gguf::empty() };
        part.tensors = whole.tensors[pair[0]..pair[1]].to_vec();
        part.put("split.no", ty::U16, (number as u16).to_le_bytes().into());
        part.put("split.count", ty::U16, (starts.len() as u16).to_le_bytes().into());
        part.put("split.tensors.count", I32, (whole.tensors.len() as i32).to_le_bytes().into());
        parts.push(part);
    }
    parts
}

fn name(number: usize, count: usize) -> String {
    format!("m-{:05}-of-{count:05}.gguf", number + 1)
}

/// Writes the parts and returns where the first is.
fn write(folder: &Path, parts: &[Gguf]) -> PathBuf {
    for (number, part) in parts.iter().enumerate() {
        std::fs::write(folder.join(name(number, parts.len())), part.filled(0x21)).unwrap();
    }
    folder.join(name(0, parts.len()))
}

fn read(parts: &[Gguf]) -> Result<Header, GgufError> {
    let folder = tempfile::tempdir().unwrap();
    read_header(write(folder.path(), parts))
}

#[test]
fn a_model_in_parts_is_the_model() {
    let (bytes, file_bytes) = whole().header();
    let one = read_header_prefix(&bytes, file_bytes).unwrap();
    // In two, in three, and with a first part that has keys alone.
    for starts in [&[0, 7][..], &[0, 3, 11], &[0, 0]] {
        let header = read(&parts(starts)).unwrap();
        let (summary, expected) = (header.summary(), one.summary());
        assert_eq!((summary.parts, header.parts().len()), (starts.len() as u64, starts.len()));
        assert_eq!((summary.tensors, summary.tensor_bytes), (expected.tensors, expected.tensor_bytes));
        assert_eq!((summary.parameters, summary.layer_bytes), (expected.parameters, expected.layer_bytes));
        assert_eq!(summary.shape_coverage, expected.shape_coverage);
        assert_eq!(summary.file_bytes, header.parts().iter().map(|part| part.file_bytes).sum::<u64>());
        for (at, tensor) in header.tensors().list().iter().enumerate() {
            assert_eq!(tensor.name, one.tensors().list()[at].name);
            assert_eq!(tensor.part, starts.iter().rposition(|start| *start <= at).unwrap());
        }
    }
}

/// What is wrong with the second of two parts after a change.
fn refused(change: impl FnOnce(&mut [Gguf])) -> GgufError {
    let mut parts = parts(&[0, 7]);
    change(&mut parts);
    read(&parts).unwrap_err()
}

#[test]
fn a_part_that_does_not_belong_there_is_refused_by_its_name() {
    type Change = fn(&mut [Gguf]);
    /// What is changed, how, what it is refused for, and what is told.
    type Case<'a> = (&'a str, Change, fn(&Defect) -> bool, &'a str);
    let cases: [Case<'_>; 8] = [
        ("number", |p| p[1].put("split.no", ty::U16, vec![0; 2]), |d| matches!(d, Defect::WrongSplit { .. }), "1 of 2"),
        ("no number", |p| p[1].remove("split.no"), |d| matches!(d, Defect::MissingKey { .. }), "split.no"),
        ("no part", |p| p[1].remove("split.count"), |d| matches!(d, Defect::WrongSplit { .. }), "no part"),
        (
            "another model",
            |p| p[1].put("general.name", ty::STRING, string(b"Other")),
            |d| matches!(d, Defect::ForeignSplit { .. }),
            "general.name",
        ),
        (
            "another count",
            |p| p[1].put("split.tensors.count", I32, vec![9, 0, 0, 0]),
            |d| matches!(d, Defect::ForeignSplit { .. }),
            "split.tensors.count",
        ),
        (
            "a tensor twice",
            |p| {
                let twice = p[0].tensors[0].clone();
                p[1].tensors.push(twice);
            },
            |d| matches!(d, Defect::DuplicateTensor { .. }),
            "token_embd",
        ),
        (
            "a tensor beyond its file",
            |p| p[1].tensors.last_mut().unwrap().offset = Some(1 << 20),
            |d| matches!(d, Defect::TensorGap { .. }),
            "ffn_down",
        ),
        ("no file", |p| p[1].magic = *b"html", |d| matches!(d, Defect::BadMagic { .. }), "GGUF"),
    ];
    for (what, change, is_expected, text) in cases {
        let error = refused(change);
        assert!(matches!(&error, GgufError::Part { number: 2, count: 2, .. }), "{what}: {error}");
        assert!(error.defect().is_some_and(is_expected), "{what}: {error}");
        let message = error.to_string();
        assert!(message.starts_with("part 2 of 2, m-00002-of-00002.gguf: ") && message.contains(text), "{message}");
    }
    let error = refused(|p| p.iter_mut().for_each(|p| p.put("split.tensors.count", I32, vec![9, 0, 0, 0])));
    assert!(matches!(error.defect(), Some(Defect::SplitTensors { expected: 9, .. })), "{error}");
    let error = refused(|p| p[0].remove("split.tensors.count"));
    assert!(matches!(error.defect(), Some(Defect::MissingKey { .. })), "{error}");
}

#[test]
fn parts_that_are_not_there_or_no_files_are_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let first = write(folder.path(), &parts(&[0, 7]));
    let second = folder.path().join(name(1, 2));
    let whole_second = std::fs::read(&second).unwrap();
    read_header(&first).unwrap();

    std::fs::write(&second, &whole_second[..whole_second.len() - 40]).unwrap();
    let error = read_header(&first).unwrap_err();
    assert!(matches!(error.defect(), Some(Defect::DataTruncated { .. })), "{error}");
    assert!(error.to_string().starts_with("part 2 of 2"), "{error}");

    std::fs::remove_file(&second).unwrap();
    let error = read_header(&first).unwrap_err().to_string();
    assert!(error.contains("part 2 of 2") && error.contains("No such file"), "{error}");

    // Nobody will ever write into it.
    assert!(std::process::Command::new("mkfifo").arg(&second).status().unwrap().success());
    let error = read_header(&first).unwrap_err().to_string();
    assert!(error.contains("part 2 of 2") && error.contains("not a regular file"), "{error}");
    assert_eq!(part_paths(&first), [first.clone(), second]);
}

#[test]
fn only_the_first_part_under_its_own_name_is_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let first = write(folder.path(), &parts(&[0, 7]));
    let error = read_header(folder.path().join(name(1, 2))).unwrap_err();
    assert!(error.to_string().contains("-00001-of-00002.gguf"), "{error}");
    let renamed = folder.path().join("model.gguf");
    std::fs::copy(&first, &renamed).unwrap();
    let error = read_header(&renamed).unwrap_err();
    assert!(matches!(error.defect(), Some(Defect::SplitName { .. })), "{error}");
    // Where only bytes are at hand there are no others.
    let bytes = std::fs::read(&first).unwrap();
    let error = read_header_prefix(&bytes, bytes.len() as u64).unwrap_err();
    assert!(matches!(error.defect(), Some(Defect::SplitFile { count: 2 })), "{error}");
}

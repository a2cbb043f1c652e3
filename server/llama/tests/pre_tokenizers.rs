//! Long runs of one character through every pre-tokeniser that llama.cpp knows.
//!
//! llama.cpp's sources say which there are, so a release with another one is tested with it. What overflows a stack kills
//! its process, so each half of the names is tried by a process of its own, which says what it is at.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{gguf, load_written};
use gantry_llama::{MAX_RUN_CHARS, Model, ModelError, ModelParams, TokenizeError};

/// What a child reads its half of the names from.
const NAMES: &str = "GANTRY_TEST_PRE_TOKENIZERS";
const CHILD: &str = "a_child_takes_every_run";
/// Runs that each name is asked for with each character, beside those of the limit.
const LENGTHS: [usize; 3] = [1_000, 4_000, 10_000];
/// The largest text that a body of 8 MiB holds, about.
const LONGEST_TEXT_BYTES: usize = 8 * 1024 * 1024;
/// The longest that a run may take: an expression that goes over it again for each character takes longer.
const LONGEST: Duration = Duration::from_secs(10);
const RUNS: [(&str, &str); 8] = [
    ("space", " "),
    ("letter", "a"),
    ("digit", "7"),
    ("mark", "!"),
    ("newline", "\n"),
    ("combining accent", "\u{301}"),
    ("CJK", "漢"),
    ("emoji", "😀"),
];
/// Their vocabularies are not of bytes, or they leave spaces out.
const NOT_BYTES: [&str; 5] = ["gemma4", "granite-embed-multi-311m", "mmbert", "sarvam-moe", "whitespace"];

/// `llama-vocab.cpp` of the llama-cpp-sys-2 that Cargo.lock names.
fn source() -> String {
    let lock = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.lock")).unwrap();
    let (_, entry) = lock.split_once("name = \"llama-cpp-sys-2\"\nversion = \"").unwrap();
    let (version, _) = entry.split_once('"').unwrap();
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cargo"));
    let cargo = std::env::var_os("CARGO_HOME").map(PathBuf::from).or_else(home).unwrap();
    let registries = std::fs::read_dir(cargo.join("registry/src")).unwrap().flatten();
    let file = format!("llama-cpp-sys-2-{version}/llama.cpp/src/llama-vocab.cpp");
    let mut texts = registries.filter_map(|registry| std::fs::read_to_string(registry.path().join(&file)).ok());
    texts.next().expect("llama-cpp-sys-2 is unpacked: run `cargo fetch --locked`")
}

fn names() -> Vec<String> {
    let source = source();
    let compared = source.split("tokenizer_pre == \"").skip(1).filter_map(|rest| rest.split('"').next());
    let mut names: Vec<String> = compared.map(str::to_owned).collect();
    names.sort_unstable();
    names.dedup();
    assert!(names.len() > 50, "{names:?}");
    names
}

#[test]
fn no_run_overflows_a_stack_whatever_the_pre_tokeniser() {
    let names = names();
    let halves = names.chunks(names.len().div_ceil(2));
    let children: Vec<Child> = halves
        .map(|half| {
            Command::new(std::env::current_exe().unwrap())
                .args(["--exact", CHILD, "--ignored", "--nocapture"])
                .env(NAMES, half.join(","))
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let last = said.lines().rev().take(5).collect::<Vec<_>>().join("\n");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{} after:\n{last}\n{error}", output.status);
    }
}

#[test]
fn a_pre_tokeniser_whose_merges_would_see_spaces_is_refused() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let model = gguf::sliding_window_of(gguf::Gguf::merges("gemma2", "gpt2", "whitespace"));
    file.write_all(&model.bytes()).unwrap();
    let refused = Model::load(file.path(), &ModelParams::default(), &mut |_| true).unwrap_err();
    assert!(matches!(&refused, ModelError::Refused(reason) if reason.contains("`whitespace`")), "{refused}");
}

#[test]
#[ignore = "run by no_run_overflows_a_stack_whatever_the_pre_tokeniser, in a process of its own"]
fn a_child_takes_every_run() {
    let names = std::env::var(NAMES).unwrap();
    for (number, name) in names.split(',').enumerate() {
        let model = load_written(&gguf::with_pre_tokenizer(name));
        for (i, (kind, character)) in RUNS.into_iter().enumerate() {
            for len in LENGTHS {
                take(&model, name, kind, &character.repeat(len));
                take(&model, name, kind, &format!("{}x", character.repeat(len - 1)));
            }
            take(&model, name, kind, &character.repeat(MAX_RUN_CHARS));
            // Those that do not recurse take any run that a body holds: one of the eight in turn, since all would take minutes.
            if number % RUNS.len() == i {
                take_or_refuse(&model, name, kind, &character.repeat(LONGEST_TEXT_BYTES / character.len()));
            }
        }
    }
}

/// As [`take`], of more than those that recurse take.
fn take_or_refuse(model: &Model, name: &str, kind: &str, text: &str) {
    match model.tokenize(text, false, false) {
        Err(TokenizeError::RunTooLong { .. }) => {}
        _ => take(model, name, kind, text),
    }
}

/// On this thread, whose stack is that of any thread of a server.
fn take(model: &Model, name: &str, kind: &str, text: &str) {
    let chars = text.chars().count();
    println!("{name}: {chars} of {kind}");
    let started = Instant::now();
    let tokens = model.tokenize(text, false, false);
    let took = started.elapsed();
    assert!(took < LONGEST, "{name}: {chars} of {kind} took {took:?}");
    match tokens {
        Ok(tokens) if NOT_BYTES.contains(&name) => assert!(tokens.len() <= text.len(), "{name}: {kind}"),
        Ok(tokens) => assert_eq!(tokens.len(), text.len(), "{name}: {chars} of {kind}"),
        // Those that take quadratic time refuse what would take seconds.
        Err(TokenizeError::RunWork { .. }) => assert!(chars > 4096, "{name}: {chars} of {kind}"),
        Err(error) => panic!("{name}: {chars} of {kind}: {error}"),
    }
}

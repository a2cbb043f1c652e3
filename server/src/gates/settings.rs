//! Whether settings of a server by itself go with its file and its machine, as far as the file's header tells: said before
//! anything is loaded, since a worker would find out after minutes, or in llama.cpp's words.
//!
//! Absent: the memory gate of a pod, which has room to keep ([`super::memory`]), and the limit that a flag sets.

use std::fmt::{self, Display};
use std::path::Path;

use gantry_engine::{
    ALL_LAYERS, FIRST_COMPARED_TOKEN, KvLayout, LoadError, MAX_VOCABULARY_DIFFERENCE, PooledConfig, Pooling,
};
use gantry_gguf::{Header, Summary, Value};

use super::limits::MIN_POOL_TOKENS;
use super::memory::{PodMemory, predict};
use super::report::quantity;
use crate::version::RuntimeSettings;

/// llama.cpp's number of the pooling of rerankers in a file's metadata.
const RANK: u64 = 4;
/// What a file says of the kind of its vocabulary.
const VOCABULARY_KEY: &str = "tokenizer.ggml.model";
/// Vocabularies that differ in how text is cut, and are one kind for llama.cpp.
const BYTE_PAIR_KINDS: [&str; 4] = ["gemma4", "gpt2", "hybriddna", "whitespace"];
/// How the files of modules begin.
const MODULE_PREFIX: &str = "libggml-";

/// What was asked for does not go with the model's file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolingUnfit {
    /// Ranking by a model that has no classifier.
    #[error(
        "--reranking is for rerankers, and this model is no reranker: its file names no rank pooling; leave --reranking out, \
         or serve a reranker"
    )]
    NoReranker,
    /// Nothing says how the vectors of tokens become one.
    #[error("{}", LoadError::NoPooling)]
    Unnamed,
}

/// The model takes more memory than there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLittleMemory {
    required_bytes: u64,
    /// For one request of [`MIN_POOL_TOKENS`].
    least_bytes: u64,
    available_bytes: u64,
    limit_bytes: u64,
}

impl Display for TooLittleMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (need, least) = (quantity(self.required_bytes), quantity(self.least_bytes));
        let (free, all) = (quantity(self.available_bytes), quantity(self.limit_bytes));
        write!(
            f,
            "the model takes about {need} of memory with these settings, and {free} of {all} can be used here: "
        )?;
        if self.least_bytes <= self.available_bytes {
            write!(f, "leave -c (--ctx-size) out, or lower it; with -c {MIN_POOL_TOKENS} -np 1 it takes {least}")
        } else {
            write!(f, "it takes {least} even with -c {MIN_POOL_TOKENS} -np 1; free some, or serve a smaller model")
        }
    }
}

impl std::error::Error for TooLittleMemory {}

/// A GPU was asked for, and there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoGpu {
    asked: String,
    found: String,
}

impl NoGpu {
    /// Of what was asked for, where only this was found.
    #[must_use]
    pub fn new(runtime: &RuntimeSettings, found: String) -> Self {
        let devices = &runtime.gpu_split.devices;
        let asked = match runtime.gpu_layers {
            Some(ALL_LAYERS..) => "all layers on a GPU were".to_owned(),
            Some(layers) => format!("{layers} layers on a GPU were"),
            None if devices.is_empty() => "memory of a GPU was".to_owned(),
            None => format!("the devices {} were", devices.join(", ")),
        };
        Self { asked, found }
    }
}

impl Display for NoGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} asked for, and no GPU was found ({}). To compute on the CPU, leave that out, or say --n-gpu-layers 0. A GPU \
             needs its driver, and its backend in --backend-dir: `make cuda` in a checkout builds the one for CUDA, and an \
             image built with CUDA_ARCHITECTURES has it: docs/operations.md#processors-and-gpus",
            self.asked, self.found
        )
    }
}

impl std::error::Error for NoGpu {}

/// Holds what is asked for beside text against what the model's file says of itself.
///
/// # Errors
/// They do not go together.
pub fn check_pooling(pooled: Option<&PooledConfig>, header: &Header) -> Result<(), PoolingUnfit> {
    let Some(pooled) = pooled else { return Ok(()) };
    let named = header.metadata().get(&format!("{}.pooling_type", header.summary().architecture));
    match (pooled.pooling, named) {
        (Some(Pooling::Rank), Some(Value::Integer { value, .. })) if u64::try_from(*value) == Ok(RANK) => Ok(()),
        (Some(Pooling::Rank), _) => Err(PoolingUnfit::NoReranker),
        (None, _) if names_pooling(header) => Ok(()),
        (Some(_), _) => Ok(()),
        (None, _) => Err(PoolingUnfit::Unnamed),
    }
}

/// Whether a file names how its texts become vectors; llama.cpp writes the largest number where nothing does.
#[must_use]
pub fn names_pooling(header: &Header) -> bool {
    let named = header.metadata().get(&format!("{}.pooling_type", header.summary().architecture));
    matches!(named, Some(Value::Integer { value, .. }) if u64::try_from(*value).is_ok_and(|kind| (1..=RANK).contains(&kind)))
}

/// Why one model cannot guess for another, as far as their files tell; a worker looks at the rest.
#[must_use]
pub fn draft_mismatch(model: &Header, draft: &Header) -> Option<String> {
    let kind = |header: &Header| match header.metadata().text(VOCABULARY_KEY).unwrap_or_default() {
        pairs if BYTE_PAIR_KINDS.contains(&pairs) => "byte pairs".to_owned(),
        other => format!("{other:?}"),
    };
    if draft.summary().encoder {
        return Some("it is an encoder, which generates no text".to_owned());
    }
    if kind(model) != kind(draft) {
        return Some(format!("its vocabulary is of the kind {}, not {}", kind(draft), kind(model)));
    }
    let (own, other) = (model.summary().vocabulary, draft.summary().vocabulary);
    if own.abs_diff(other) > MAX_VOCABULARY_DIFFERENCE.into() {
        return Some(format!(
            "it has {other} tokens, not {own}, and a difference of {MAX_VOCABULARY_DIFFERENCE} is the most"
        ));
    }
    let differs = model.first_other_token(draft, FIRST_COMPARED_TOKEN as usize)?;
    Some(format!("its token {differs} has another text"))
}

/// Holds what the workers will take against what can be used of the machine, or of what this process may have of it.
///
/// # Errors
/// They take more.
pub fn check_memory(
    runtime: &RuntimeSettings,
    model: &Summary,
    draft: Option<&Summary>,
    gpu: bool,
    memory: PodMemory,
) -> Result<(), TooLittleMemory> {
    let PodMemory { limit_bytes, available_bytes } = memory;
    let required_bytes = predict(model, draft, runtime, gpu);
    if required_bytes <= available_bytes {
        return Ok(());
    }
    let mut least = RuntimeSettings { ctx_size: MIN_POOL_TOKENS, parallel: 1, workers: Some(1), ..runtime.clone() };
    least.engine.kv_layout = KvLayout::Auto;
    let least_bytes = predict(model, draft, &least, gpu).min(required_bytes);
    Err(TooLittleMemory { required_bytes, least_bytes, available_bytes, limit_bytes })
}

/// Whether a directory has a module of a backend, or cannot be read, of which the workers say more.
#[must_use]
pub fn has_modules(dir: &Path) -> bool {
    let Ok(entries) = dir.read_dir() else { return true };
    entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with(MODULE_PREFIX))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn demo() -> Header {
        gantry_gguf::read_header(concat!(env!("CARGO_MANIFEST_DIR"), "/../e2e/models/demo-v2.q8_0.gguf")).unwrap()
    }

    #[test]
    fn what_a_file_does_not_name_is_not_asked_of_it() {
        let header = demo();
        let asked = |pooling| check_pooling(Some(&PooledConfig { pooling, ..PooledConfig::default() }), &header);
        assert_eq!(check_pooling(None, &header), Ok(()));
        assert_eq!(asked(Some(Pooling::Mean)), Ok(()));
        assert_eq!(asked(Some(Pooling::Rank)), Err(PoolingUnfit::NoReranker));
        assert_eq!(asked(None), Err(PoolingUnfit::Unnamed));
    }

    #[test]
    fn a_model_guesses_for_those_whose_tokens_it_has() {
        let read = |bytes: &[u8]| gantry_gguf::read_header_prefix(bytes, bytes.len() as u64).unwrap();
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../e2e/models/demo-draft.q8_0.gguf");
        let bytes = std::fs::read(path).unwrap();
        let (model, draft) = (demo(), read(&bytes));
        assert_eq!(draft_mismatch(&model, &draft), None);
        let altered = |old: &[u8], new: &[u8]| {
            let mut bytes = bytes.clone();
            let at = bytes.windows(old.len()).position(|window| window == old).unwrap();
            bytes[at..at + new.len()].copy_from_slice(new);
            draft_mismatch(&model, &read(&bytes)).unwrap()
        };
        assert!(altered(b"sistant", b"SISTANT").ends_with("has another text"));
        assert_eq!(
            model.first_other_token(&draft, 0),
            None,
            "the first ones are compared by nobody, and are the same here"
        );
    }

    #[test]
    fn a_context_that_is_not_in_the_memory_is_told_with_what_is() {
        let header = demo();
        let told = |ctx_size, parallel, available_bytes| {
            let runtime = RuntimeSettings { ctx_size, parallel, workers: Some(1), ..RuntimeSettings::default() };
            let memory = PodMemory { limit_bytes: 2 << 30, available_bytes };
            check_memory(&runtime, header.summary(), None, false, memory).err().map(|error| error.to_string())
        };
        assert_eq!(told(16_384, 8, 1 << 30), None);
        let error = told(20_000_000, 8, 1 << 30).unwrap();
        for part in ["1.00Gi of 2.00Gi can be used here", "leave -c (--ctx-size) out", "-c 512 -np 1"] {
            assert!(error.contains(part), "{part:?} is not in: {error}");
        }
        assert_eq!(told(512, 1, 1 << 30), None, "what it says works");
        assert!(told(512, 1, 1 << 10).unwrap().contains("a smaller model"));
    }

    #[test]
    fn a_gpu_that_is_not_there_is_told_with_what_was_asked_and_where_to_get_one() {
        let told = |runtime| NoGpu::new(&runtime, "no directory of backends".to_owned()).to_string();
        let layers = |n| told(RuntimeSettings { gpu_layers: Some(n), ..RuntimeSettings::default() });
        assert!(layers(ALL_LAYERS).starts_with("all layers on a GPU were asked for, and no GPU was found"));
        for part in ["7 layers", "(no directory of backends)", "--n-gpu-layers 0", "`make cuda`", "processors-and-gpus"]
        {
            assert!(layers(7).contains(part) && !layers(7).contains("spec."), "{}", layers(7));
        }
        let memory = told(RuntimeSettings { gpu_memory_bytes: Some(1), ..RuntimeSettings::default() });
        assert!(memory.starts_with("memory of a GPU was asked for"), "{memory}");
    }

    #[test]
    fn a_directory_has_modules_or_none() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("VERSION"), "x").unwrap();
        assert!(!has_modules(folder.path()));
        std::fs::write(folder.path().join("libggml-cpu-zen4.so"), "x").unwrap();
        assert!(has_modules(folder.path()) && has_modules(Path::new("/nowhere")));
    }
}

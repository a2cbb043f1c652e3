//! A directory of backends: which modules it has, whether they belong to this llama.cpp, and which CPU variant is best.
//!
//! ggml's structures are its modules' interface, and they change from one release to the next without a number that
//! tells: a file in the directory says for which crate the modules were built, and any other is refused.

use std::path::{Path, PathBuf};

use super::c_path;
use crate::error::BackendError;
use crate::shim::{self, RawText};

/// The most modules that a directory may have.
pub const MAX_MODULES: usize = 64;
/// What the file `VERSION` of a directory of backends must say: the crate that they were built from.
pub const BACKENDS_VERSION: &str = concat!("llama-cpp-sys-2 ", env!("GANTRY_LLAMA_CPP_VERSION"));
/// See [`BACKENDS_VERSION`].
const VERSION_FILE: &str = "VERSION";
/// The longest content of that file that is quoted, in characters.
const QUOTED_CHARS: usize = 80;

/// What ggml's own score of the CPU backend that is linked in would be (`ggml_backend_cpu_x86_score`): SSE4.2, AVX, F16C,
/// FMA, BMI2 and AVX2, as in its variant `haswell`.
#[cfg(target_arch = "x86_64")]
const BUILTIN_SCORE: i32 = 64;
/// Built for the least of its architecture: every variant that runs is at least as good.
#[cfg(not(target_arch = "x86_64"))]
const BUILTIN_SCORE: i32 = 1;

/// A file of the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Module {
    /// `icelake`, `cuda`.
    pub(super) name: String,
    /// The file's name.
    pub(super) file: String,
    pub(super) path: PathBuf,
}

impl Module {
    /// Says why.
    pub(super) fn not_loaded(&self, reason: &str) -> String {
        format!("{} was not loaded: {reason}", self.file)
    }
}

/// What a directory has.
#[derive(Debug, Default)]
pub(super) struct Modules {
    /// CPU variants that this processor can run, with their scores.
    pub(super) cpu: Vec<(Module, i32)>,
    /// Everything else that can be opened.
    pub(super) others: Vec<Module>,
    /// What cannot, with the reason.
    pub(super) not_loaded: Vec<String>,
}

/// Which CPU backend is used.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum CpuChoice<'a> {
    Builtin,
    Module(&'a Module),
    None,
}

/// The best; a module as good as the backend that is linked in goes before it, since somebody put it there.
pub(super) fn choose(builtin_score: i32, modules: &[(Module, i32)]) -> CpuChoice<'_> {
    let best = modules.iter().max_by(|a, b| a.1.cmp(&b.1).then_with(|| b.0.name.cmp(&a.0.name)));
    match best {
        Some((module, score)) if *score > 0 && *score >= builtin_score => CpuChoice::Module(module),
        _ if builtin_score > 0 => CpuChoice::Builtin,
        _ => CpuChoice::None,
    }
}

/// The score of the CPU backend that is linked in; 0 where the processor cannot run it.
pub(super) fn builtin_score() -> i32 {
    if builtin_missing().is_empty() { BUILTIN_SCORE } else { 0 }
}

/// The instructions that the backend that is linked in needs and the processor has not.
pub(super) fn builtin_missing() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        let needed = [
            ("SSE4.2", std::arch::is_x86_feature_detected!("sse4.2")),
            ("AVX", std::arch::is_x86_feature_detected!("avx")),
            ("AVX2", std::arch::is_x86_feature_detected!("avx2")),
            ("F16C", std::arch::is_x86_feature_detected!("f16c")),
            ("FMA", std::arch::is_x86_feature_detected!("fma")),
            ("BMI2", std::arch::is_x86_feature_detected!("bmi2")),
        ];
        needed.into_iter().filter(|(_, there)| !there).map(|(name, _)| name).collect()
    }
    #[cfg(not(target_arch = "x86_64"))]
    Vec::new()
}

/// Reads a directory and asks each module what it thinks of this machine.
pub(super) fn read(dir: &Path) -> Result<Modules, BackendError> {
    let unreadable = |reason: String| BackendError::Directory { dir: dir.to_path_buf(), reason };
    let entries = std::fs::read_dir(dir).map_err(|e| unreadable(e.to_string()))?;
    let mut files = Vec::new();
    for entry in entries {
        let name = entry.map_err(|e| unreadable(e.to_string()))?.file_name().to_string_lossy().into_owned();
        if name.starts_with("libggml-") && name.ends_with(".so") {
            files.push(name);
        }
    }
    if files.len() > MAX_MODULES {
        return Err(unreadable(format!("it has {} modules, more than {MAX_MODULES}", files.len())));
    }
    if files.is_empty() {
        return Ok(Modules::default());
    }
    check_version(dir)?;
    files.sort();
    let mut modules = Modules::default();
    for file in files {
        let (is_cpu, name) = name_of(&file);
        let module = Module { name: name.to_owned(), path: dir.join(&file), file };
        match score(&module.path) {
            Ok(0) => {}
            Ok(score) if is_cpu => modules.cpu.push((module, score)),
            Ok(_) => modules.others.push(module),
            Err(reason) => modules.not_loaded.push(module.not_loaded(&reason)),
        }
    }
    Ok(modules)
}

fn check_version(dir: &Path) -> Result<(), BackendError> {
    let found = std::fs::read_to_string(dir.join(VERSION_FILE)).unwrap_or_default();
    let found = found.trim();
    if found == BACKENDS_VERSION {
        return Ok(());
    }
    let found = match found {
        "" => format!("an unknown release (there is no file {VERSION_FILE})"),
        other => other.chars().take(QUOTED_CHARS).collect(),
    };
    Err(BackendError::Version { dir: dir.to_path_buf(), found, wanted: BACKENDS_VERSION })
}

/// Whether it is a CPU variant, and its name: `libggml-cpu-icelake.so`, `libggml-cuda.so`.
fn name_of(file: &str) -> (bool, &str) {
    let name = file.strip_prefix("libggml-").unwrap_or(file);
    let name = name.strip_suffix(".so").unwrap_or(name);
    match name.strip_prefix("cpu-") {
        Some(variant) => (true, variant),
        None => (name == "cpu", name),
    }
}

fn score(path: &Path) -> Result<i32, String> {
    let c_path = c_path(path)?;
    let mut reason = RawText::empty();
    // SAFETY: the path is NUL-terminated and `reason` outlives the call.
    let score = unsafe { shim::gantry_backend_score(c_path.as_ptr(), &raw mut reason) };
    match reason.into_result() {
        Err(reason) if score < 0 => Err(reason),
        _ => Ok(score.max(0)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn module(name: &str) -> Module {
        Module { name: name.to_owned(), file: format!("libggml-cpu-{name}.so"), path: PathBuf::from(name) }
    }

    #[test]
    fn the_best_variant_is_taken_and_the_one_linked_in_only_where_it_is_better() {
        let modules = [(module("haswell"), 64), (module("icelake"), 1472), (module("x64"), 1), (module("zen4"), 0)];
        assert_eq!(choose(64, &modules), CpuChoice::Module(&module("icelake")));
        assert_eq!(choose(64, &modules[..1]), CpuChoice::Module(&module("haswell")));
        assert_eq!(choose(64, &modules[2..]), CpuChoice::Builtin);
        assert_eq!(choose(64, &[]), CpuChoice::Builtin);
        assert_eq!(choose(0, &modules[2..]), CpuChoice::Module(&module("x64")));
        assert_eq!(choose(0, &modules[3..]), CpuChoice::None);
        assert_eq!(choose(0, &[]), CpuChoice::None);
        let equal = [(module("b"), 64), (module("a"), 64)];
        assert_eq!(choose(64, &equal), CpuChoice::Module(&module("a")));
    }

    #[test]
    fn files_are_named_as_ggml_names_them() {
        assert_eq!(name_of("libggml-cpu-sapphirerapids.so"), (true, "sapphirerapids"));
        assert_eq!(name_of("libggml-cpu.so"), (true, "cpu"));
        assert_eq!(name_of("libggml-cuda.so"), (false, "cuda"));
    }

    #[test]
    fn modules_of_another_llama_cpp_are_refused_unopened() {
        let dir = tempfile::tempdir().unwrap();
        assert!(read(dir.path()).unwrap().cpu.is_empty());
        std::fs::write(dir.path().join("libggml-cpu-x64.so"), "no library").unwrap();
        let refused = |text: &str| {
            assert!(matches!(read(dir.path()), Err(BackendError::Version { found, .. }) if found.contains(text)));
        };
        refused("no file VERSION");
        std::fs::write(dir.path().join(VERSION_FILE), "llama-cpp-sys-2 0.0.1\n").unwrap();
        refused("0.0.1");
        std::fs::write(dir.path().join(VERSION_FILE), format!("{BACKENDS_VERSION}\n")).unwrap();
        let modules = read(dir.path()).unwrap();
        assert!(modules.cpu.is_empty() && modules.not_loaded[0].starts_with("libggml-cpu-x64.so was not loaded: "));
        assert!(matches!(read(&dir.path().join("none")), Err(BackendError::Directory { .. })));
        for i in 0..MAX_MODULES {
            std::fs::write(dir.path().join(format!("libggml-{i}.so")), "").unwrap();
        }
        assert!(matches!(read(dir.path()), Err(BackendError::Directory { reason, .. }) if reason.contains("64")));
    }
}

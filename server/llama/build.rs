//! Compiles the C++ shim against the llama.cpp sources that llama-cpp-sys-2 vendors and built.
//!
//! That crate declares `links = "llama"`, so Cargo passes `DEP_LLAMA_GGML_CMAKE_DIR` (its `$OUT/lib/cmake`). The
//! installed headers are in `$OUT/include`; the source tree, for `common/chat.h`, stands in CMake's cache.

use std::error::Error;
use std::path::{Path, PathBuf};

include!("link_args.rs");

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=shim");
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=link_args.rs");
    // For this package's tests; a program's package says it in its own build script.
    for arg in LINK_ARGS {
        println!("cargo:rustc-link-arg-tests={arg}");
    }
    let cmake_dir = std::env::var("DEP_LLAMA_GGML_CMAKE_DIR")
        .map_err(|_| "llama-cpp-sys-2 did not say where it built llama.cpp (DEP_LLAMA_GGML_CMAKE_DIR)")?;
    let out = PathBuf::from(cmake_dir).join("../..");
    let cache_path = out.join("build/CMakeCache.txt");
    let cache = std::fs::read_to_string(&cache_path).map_err(|e| format!("{}: {e}", cache_path.display()))?;
    let source = cache
        .lines()
        .find_map(|line| line.strip_prefix("CMAKE_HOME_DIRECTORY:INTERNAL="))
        .map(PathBuf::from)
        .ok_or_else(|| format!("{} does not name llama.cpp's sources", cache_path.display()))?;
    println!("cargo:rustc-env=GANTRY_LLAMA_CPP_VERSION={}", version(&source)?);
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .file("shim/shim.cpp")
        .file("shim/grammar.cpp")
        .file("shim/backends.cpp")
        .file("shim/cells.cpp")
        .file("shim/guard.cpp")
        .file("shim/template.cpp")
        .file("shim/parser.cpp")
        .file("shim/state.cpp")
        .include(out.join("include"))
        .include(source.join("common"))
        .include(source.join("vendor"))
        // The grammar's parser is internal to llama.cpp, and so is what a state is written to.
        .include(source.join("src"))
        // The headers define functions that only llama.cpp's own files use.
        .flag_if_supported("-Wno-unused-function")
        .try_compile("gantry_llama_shim")?;
    Ok(())
}

/// The version of the crate that brings llama.cpp: saved state is understood for exactly that one.
fn version(source: &Path) -> Result<String, Box<dyn Error>> {
    let manifest_path = source.join("../Cargo.toml");
    let manifest = std::fs::read_to_string(&manifest_path).map_err(|e| format!("{}: {e}", manifest_path.display()))?;
    let version = manifest.lines().find_map(|line| line.strip_prefix("version = \"")?.strip_suffix('"'));
    Ok(version.ok_or_else(|| format!("{} names no version", manifest_path.display()))?.to_owned())
}

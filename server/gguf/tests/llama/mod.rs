//! Where the sources of the llama.cpp are that the server links.
#![allow(dead_code, clippy::unwrap_used, unreachable_pub)]

use std::path::{Path, PathBuf};

/// `llama.cpp/` inside the llama-cpp-sys-2 that Cargo.lock names.
pub fn source() -> PathBuf {
    let lock = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.lock")).unwrap();
    let (_, entry) = lock.split_once("name = \"llama-cpp-sys-2\"\nversion = \"").unwrap();
    let (version, _) = entry.split_once('"').unwrap();
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cargo"));
    let cargo = std::env::var_os("CARGO_HOME").map(PathBuf::from).or_else(home).unwrap();
    let registries = cargo.join("registry/src");
    find(&registries, version).unwrap_or_else(|| {
        panic!("llama-cpp-sys-2 {version} is not unpacked below {}: run `cargo fetch --locked`", registries.display())
    })
}

/// The source of `version` in one of the folders of `registries`.
pub fn find(registries: &Path, version: &str) -> Option<PathBuf> {
    let registries = std::fs::read_dir(registries).ok()?.flatten();
    let mut sources = registries.map(|registry| registry.path().join(format!("llama-cpp-sys-2-{version}/llama.cpp")));
    sources.find(|path| path.is_dir())
}

//! The agent's side of the server, from the outside: fetching against a server that misbehaves, gates with real models
//! and workers, and a whole agent against an API server in memory.

#![allow(clippy::unwrap_used, missing_docs)]

mod api_server;
mod authorities;
mod canary;
mod draft;
mod drift;
mod embeddings;
mod fetch;
mod files;
#[path = "../../llama/tests/common/gguf.rs"]
mod gguf;
mod hold;
mod performance;
mod pod;
mod prefixes;
mod quarantine;
#[path = "../http/s3.rs"]
mod s3;
#[path = "../http/script.rs"]
mod script;
mod segments;
mod shadow;
#[path = "../http/split.rs"]
mod split;
mod stores;
mod swelling;
#[path = "../http/template_file.rs"]
mod template_file;
mod told;
mod volume;

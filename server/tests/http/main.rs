//! The real server over HTTP: the binary, its worker, llama.cpp and the demo models.
//!
//! Each test starts a server of its own on a free port, with two threads at most, and waits on conditions.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod answers;
mod backends;
mod bad_input;
mod cache;
mod check;
mod choices;
mod clients;
mod config_file;
mod crowds;
mod dispatch;
mod drain;
mod ends;
mod faults;
#[allow(dead_code, reason = "some of its faults are of other tests")]
#[path = "../agent_pod/files.rs"]
mod file_server;
mod files;
mod forms;
mod generate;
#[path = "../../llama/tests/common/gguf.rs"]
mod gguf;
mod grpc;
mod infill;
mod keys;
mod libraries;
mod load;
mod memory;
mod messages;
mod newcomer;
mod numbers_file;
mod patterns;
mod pauses;
mod pooled;
mod real_models;
mod reference;
mod responses;
mod restarts;
mod s3;
mod scores;
mod script;
mod server;
mod shadow;
mod sources;
mod split;
mod stats;
mod stored;
mod suspects;
mod swap;
mod template_file;
mod templates;
mod thinking;
mod tokenizer;
mod tools;
mod unread;

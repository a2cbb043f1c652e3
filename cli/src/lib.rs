//! `kubectl gantry`: what an InferenceService does, why and what comes next, in a terminal; and a chat with its model.
//!
//! It reads what `kubectl get infs,mv` reads and writes what an edit of the spec or an annotation writes, with the rights
//! of whoever runs it; nothing in the cluster waits for it.
//!
//! ```text
//! main ── args      what was asked
//!   ├── panel       objects to text, pure
//!   ├── change      retry, restart, rollback
//!   ├── chat, top ── pod      HTTP to a pod, through the API server
//!   └── cluster     how the cluster is reached, lists and watches
//! ```

// A program for a terminal.
#![allow(clippy::print_stderr)]

pub mod args;
pub mod change;
pub mod chat;
pub mod cluster;
pub mod live;
pub mod panel;
pub mod pod;
pub mod text;
pub mod top;

//! llama.cpp's process-wide state: initialised once, never freed.

use std::sync::OnceLock;

use llama_cpp_2::llama_backend::LlamaBackend;

use crate::error::ModelError;
use crate::{logs, shim};

static BACKEND: OnceLock<Result<LlamaBackend, String>> = OnceLock::new();

/// Initialises llama.cpp and routes its log to `tracing`. The first call does it; [`Model::load`](crate::Model::load)
/// makes it, so calling this is needed only to fail early.
///
/// # Errors
/// When another part of the process initialised llama.cpp by itself.
pub fn init() -> Result<(), ModelError> {
    backend().map(|_| ())
}

fn backend() -> Result<&'static LlamaBackend, ModelError> {
    BACKEND
        .get_or_init(|| {
            logs::install();
            // SAFETY: sets one integer; `get_or_init` lets no other thread of ours into llama.cpp before it.
            unsafe { shim::gantry_common_log_off() };
            LlamaBackend::init().map_err(|e| e.to_string())
        })
        .as_ref()
        .map_err(|e| ModelError::Backend(e.clone()))
}

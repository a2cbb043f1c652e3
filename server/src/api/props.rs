//! `/props` and `/tokenizer_info`: what clients of llama-server ask before they chat, and those of vLLM before they tokenise, in the
//! names of each, as far as it is so here.
//!
//! Absent: the template's text and the file's path, which are the operator's, and changing anything.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use super::App;
use super::errors::Failure;

pub(super) async fn props(State(app): State<Arc<App>>) -> Result<Json<Value>, Failure> {
    let version = app.router.active().ok_or_else(|| app.no_version())?;
    let spec = version.spec();
    let n_ctx = version.model().map(|model| model.n_ctx_per_sequence);
    Ok(Json(json!({
        "model_alias": spec.served_name,
        "total_slots": spec.runtime.parallel,
        "default_generation_settings": {"n_ctx": n_ctx},
        "modalities": {"vision": false, "audio": false},
        "is_sleeping": false,
        "build_info": concat!("gantry-server ", env!("CARGO_PKG_VERSION")),
    })))
}

pub(super) async fn tokenizer_info(State(app): State<Arc<App>>) -> Result<Json<Value>, Failure> {
    let version = app.router.active().ok_or_else(|| app.no_version())?;
    let model = version.model();
    let token = |text: Option<&String>| text.filter(|text| !text.is_empty()).cloned();
    Ok(Json(json!({
        "tokenizer_class": "gguf",
        "bos_token": token(model.as_ref().map(|model| &model.bos)),
        "eos_token": token(model.as_ref().map(|model| &model.eos)),
        "pad_token": null,
        "chat_template": null,
    })))
}

//! `/props`: what llama-server's clients ask before they chat, in its names, as far as it is so here.
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

//! `/props`, `/slots` and `/tokenizer_info`: what clients of llama-server ask before they chat, and those of vLLM before they
//! tokenise, in the names of each, as far as it is so here.
//!
//! Absent: the template's text and the file's path, which are the operator's, what requests are asked, and changing anything.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use gantry_engine::GenerationParams;
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
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
        "default_generation_settings": {"n_ctx": n_ctx, "params": default_params()},
        "bos_token": version.model().map(|model| model.bos),
        "eos_token": version.model().map(|model| model.eos),
        "modalities": {"vision": false, "audio": false},
        "is_sleeping": false,
        "build_info": concat!("gantry-server ", env!("CARGO_PKG_VERSION")),
    })))
}

/// What a request is answered by that says nothing of it.
fn default_params() -> Value {
    let GenerationParams {
        temperature,
        top_p,
        top_k,
        min_p,
        typical_p,
        xtc_probability,
        xtc_threshold,
        repeat_penalty,
        repeat_last_n,
        frequency_penalty,
        presence_penalty,
        dry,
        ignore_eos,
        ..
    } = GenerationParams::default();
    json!({
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "typical_p": typical_p,
        "xtc_probability": xtc_probability,
        "xtc_threshold": xtc_threshold,
        "repeat_penalty": repeat_penalty,
        "repeat_last_n": repeat_last_n,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "dry_multiplier": dry.multiplier,
        "dry_base": dry.base,
        "dry_allowed_length": dry.allowed_length,
        // All of the text, as llama-server writes it.
        "dry_penalty_last_n": if dry.penalty_last_n == 0 { -1 } else { i64::from(dry.penalty_last_n) },
        "dry_sequence_breakers": dry.sequence_breakers,
        "ignore_eos": ignore_eos,
        "max_tokens": -1,
        "n_predict": -1,
        "stop": [],
        "stream": false,
    })
}

/// What may be asked of `/slots`.
#[derive(Debug, Deserialize)]
pub(super) struct SlotsQuery {
    /// llama-server's way to ask whether a request would wait.
    fail_on_no_slot: Option<String>,
}

/// The same, for those who describe the server to programs.
pub(super) fn slots_parameters() -> Vec<(&'static str, Value)> {
    vec![("fail_on_no_slot", json!({"type": "string"}))]
}

/// What [`slots`] tells.
pub(super) fn slots_schema(_: &mut SchemaGenerator) -> Schema {
    let count = json!({"type": "integer", "minimum": 0});
    let slot = json!({
        "type": "object", "required": ["id", "n_ctx", "speculative", "is_processing"],
        "properties": {
            "id": count, "n_ctx": {"anyOf": [count, {"type": "null"}]},
            "speculative": {"type": "boolean"}, "is_processing": {"type": "boolean"},
        },
    });
    json_schema!({"type": "array", "items": slot})
}

/// One for each sequence: those in use first, since none has a number that anybody knows.
pub(super) async fn slots(
    State(app): State<Arc<App>>,
    query: Result<Query<SlotsQuery>, QueryRejection>,
) -> Result<Json<Value>, Failure> {
    let version = app.router.active().ok_or_else(|| app.no_version())?;
    let (model, stats) = (version.model(), version.stats());
    let needs_one = query.ok().and_then(|Query(query)| query.fail_on_no_slot).is_some_and(|asked| asked != "0");
    if needs_one && stats.running >= stats.slots {
        return Err(Failure::no_slot());
    }
    let runtime = &version.spec().runtime;
    let speculative = runtime.engine.prompt_lookup > 0 || runtime.engine.draft.is_some();
    let slot = |id: u32| {
        json!({
            "id": id,
            "n_ctx": model.as_ref().map(|model| model.n_ctx_per_sequence),
            "speculative": speculative,
            "is_processing": id < stats.running,
        })
    };
    Ok(Json((0..stats.slots).map(slot).collect()))
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

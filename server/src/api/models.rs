//! `/v1/models`: the one model that is active, by each of its names.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use gantry_engine::{ModelInfo, Pooling};
use gantry_openai::{Model, ModelList, ModelMeta};
use jiff::Timestamp;

use super::App;
use super::errors::Failure;
use super::paths::unknown_url;
use crate::version::Version;

fn model(name: &str, version: &Version) -> Model {
    let created = version.loaded_at_unix_seconds();
    let created_at = i64::try_from(created).ok().and_then(|seconds| Timestamp::from_second(seconds).ok());
    let info = version.model();
    let tokens = info.as_ref().map(|info| info.n_ctx_per_sequence);
    Model {
        id: name.to_owned(),
        object: "model".to_owned(),
        created,
        owned_by: "gantry".to_owned(),
        kind: "model".to_owned(),
        display_name: name.to_owned(),
        created_at: created_at.unwrap_or_default().to_string(),
        lifecycle: "active".to_owned(),
        max_model_len: tokens,
        max_input_tokens: tokens.map(|tokens| tokens.saturating_sub(1)),
        features: info.as_ref().map(features).unwrap_or_default(),
        meta: info.as_ref().map(|info| ModelMeta {
            n_vocab: info.vocab_size,
            n_ctx_train: info.n_ctx_train,
            n_params: info.parameters,
            size: info.size_bytes,
        }),
    }
}

fn features(model: &ModelInfo) -> Vec<String> {
    let (generates, pooling) = (!model.pooled_only, model.pooled.map(|pooled| pooled.pooling));
    let all = [
        ("completions", generates),
        ("infill", generates && model.infills),
        ("chat", generates && model.has_chat_template),
        ("tools", generates && model.template.as_ref().is_some_and(|template| template.takes_tools())),
        ("reasoning", generates && model.thinks),
        ("embeddings", pooling.is_some_and(|pooling| pooling != Pooling::Rank)),
        ("rerank", pooling == Some(Pooling::Rank)),
        ("score", pooling.is_some()),
    ];
    all.iter().filter(|(_, can)| *can).map(|(feature, _)| (*feature).to_owned()).collect()
}

/// While nothing is loaded this is refused for now, as all else is: who looks here for a name would find none.
pub(super) async fn list(State(app): State<Arc<App>>) -> Result<Json<ModelList>, Failure> {
    let version = app.router.active().ok_or_else(|| app.no_version())?;
    let models = app.names.listed(version.spec()).map(|name| model(name, &version)).collect();
    Ok(Json(ModelList::of(models)))
}

/// An id that is no UTF-8 is a model that is not served, like any other.
pub(super) async fn one(
    State(app): State<Arc<App>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Model>, Failure> {
    let id = id.map(|Path(id)| id).unwrap_or_default();
    named(&app, &id).ok_or_else(|| {
        let active = app.router.active();
        app.names.not_served(&id, active.as_ref().map(|version| version.spec())).into()
    })
}

/// The model of this name, of which a slash is a part, as clients write it that leave slashes as they are.
pub(super) async fn one_of_owner(State(app): State<Arc<App>>, request: Request) -> Result<Json<Model>, Failure> {
    let name = request.uri().path().strip_prefix("/v1/models/").unwrap_or_default().to_owned();
    match named(&app, &name) {
        Some(model) => Ok(model),
        None => Err(unknown_url(request).await),
    }
}

fn named(app: &App, id: &str) -> Option<Json<Model>> {
    let active = app.router.active();
    let version = active.as_ref().filter(|version| app.names.has(id, version.spec()))?;
    let listed = app.names.listed(version.spec()).find(|listed| *listed == id);
    Some(Json(model(listed.unwrap_or(&version.spec().served_name), version)))
}

//! `/v1/models`: the one model that is active.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use gantry_core::{ApiError, ErrorCode, ErrorKind};
use gantry_openai::{Model, ModelList};

use super::App;
use super::errors::Failure;
use crate::version::Version;

fn model(version: &Version) -> Model {
    Model {
        id: version.spec().served_name.clone(),
        object: "model".to_owned(),
        created: version.loaded_at_unix_seconds(),
        owned_by: "gantry".to_owned(),
    }
}

/// While nothing is loaded this is refused for now, as all else is: who looks here for a name would find none.
pub(super) async fn list(State(app): State<Arc<App>>) -> Result<Json<ModelList>, Failure> {
    let version = app.router.active().ok_or_else(|| app.no_version())?;
    Ok(Json(ModelList { object: "list".to_owned(), data: vec![model(&version)] }))
}

/// An id that is no UTF-8 is a model that is not served, like any other.
pub(super) async fn one(
    State(app): State<Arc<App>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Model>, Failure> {
    let id = id.map(|Path(id)| id).unwrap_or_default();
    let active = app.router.active();
    let found = active.iter().find(|version| [&version.spec().served_name, &version.spec().name].contains(&&id));
    found.map(|version| Json(model(version))).ok_or_else(|| {
        let served = active.as_ref().map(|version| format!("there is {}, which", version.spec().served_name));
        let served = served.as_deref().unwrap_or("nothing is loaded yet that");
        let message = format!("The model {id:?} is not served here; {served} GET /v1/models lists.");
        let error = ApiError::new(404, ErrorKind::NotFoundError, ErrorCode::ModelNotFound, message);
        ApiError { param: Some("model".into()), ..error }.into()
    })
}

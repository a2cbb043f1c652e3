//! `/healthz`: the process answers. `/readyz`: a token can be decoded now, or why not.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde_json::{Value, json};

use super::App;
use crate::version::WorkerHealth;

pub(super) async fn alive() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

pub(super) async fn ready(State(app): State<Arc<App>>) -> (StatusCode, Json<Value>) {
    let version = app.router.active().map(|version| version.spec().name.clone());
    match check(&app).await {
        Ok(()) => (StatusCode::OK, Json(json!({"status": "ok", "version": version}))),
        Err(reason) => {
            let body = json!({"status": "not ready", "version": version, "reason": reason});
            (StatusCode::SERVICE_UNAVAILABLE, Json(body))
        }
    }
}

async fn check(app: &App) -> Result<(), String> {
    if app.is_draining() {
        return Err("the server is shutting down".to_owned());
    }
    let Some(version) = app.router.active() else { return Err(app.why_no_version()) };
    let health = version.health().borrow().clone();
    match health {
        WorkerHealth::Ready => version.probe().await.map_err(|reason| format!("no token can be decoded: {reason}")),
        WorkerHealth::Restarting { attempt, reason } => {
            Err(format!("the worker died ({reason}) and is restarted, attempt {attempt}"))
        }
        WorkerHealth::Failed { reason } => Err(format!("the worker keeps failing: {reason}")),
        WorkerHealth::Loading => Err("the model is being loaded".to_owned()),
        WorkerHealth::Stopped => Err("the version has been retired".to_owned()),
    }
}

impl App {
    /// Why there is no active version.
    pub(super) fn why_no_version(&self) -> String {
        match &self.loading {
            Some(share) => format!("the model is being loaded, {:.0}% of the file read", *share.borrow() * 100.0),
            None => "no version is active yet".to_owned(),
        }
    }
}

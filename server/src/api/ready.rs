//! `/healthz`: the process answers. `/readyz`: a token can be decoded now, or why not. `/health`: the model is loaded, as
//! llama-server says it.

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

pub(super) async fn health(State(app): State<Arc<App>>) -> (StatusCode, Json<Value>) {
    match app.router.active() {
        Some(_) => (StatusCode::OK, Json(json!({"status": "ok"}))),
        None => {
            let error = json!({"code": 503, "message": "Loading model", "type": "unavailable_error"});
            (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"error": error})))
        }
    }
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
            Some(share) => of_loading(*share.borrow()),
            None => "no version is active yet".to_owned(),
        }
    }
}

/// What is done of a load of which so much is read.
fn of_loading(share: f32) -> String {
    match share {
        1.0.. => String::from("the model is being loaded: all of it is read, and its first token is decoded"),
        share => format!("the model is being loaded: {:.0}% of it is read", (share * 100.0).floor()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_says_which_part_it_is_in() {
        assert!(of_loading(0.0).ends_with(": 0% of it is read"));
        assert!(of_loading(0.998).ends_with(": 99% of it is read"));
        assert!(of_loading(1.0).ends_with("its first token is decoded"));
    }
}

//! `/healthz`: the process answers. `/readyz`: a token can be decoded now, or why not. `/health`: the model is loaded, as
//! llama-server says it.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use gantry_crds::status::ModelState;
use serde_json::{Value, json};

use super::App;
use crate::hold::Waits;
use crate::limits::RETRY_AFTER_MIN_SECONDS;
use crate::version::WorkerHealth;

pub(super) async fn alive() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

pub(super) async fn health(State(app): State<Arc<App>>) -> Response {
    match app.router.active() {
        Some(_) => Json(json!({"status": "ok"})).into_response(),
        None => {
            let error = json!({"code": 503, "message": "Loading model", "type": "unavailable_error"});
            not_yet(json!({"error": error}), Some(app.version_after()))
        }
    }
}

pub(super) async fn ready(State(app): State<Arc<App>>) -> Response {
    let version = app.router.active().map(|version| version.spec().name.clone());
    match check(&app).await {
        Ok(()) => Json(json!({"status": "ok", "version": version, "state": state(&app).as_str()})).into_response(),
        Err(Unready { reason, retry_after }) => {
            let state = state(&app).as_str();
            not_yet(json!({"status": "not ready", "version": version, "state": state, "reason": reason}), retry_after)
        }
    }
}

/// Whether `/readyz` says that a token can be decoded now.
pub(super) async fn is_ready(app: &App) -> bool {
    check(app).await.is_ok()
}

/// Where the server is with its model.
fn state(app: &App) -> ModelState {
    if let Some(state) = app.router.state() {
        return state;
    }
    let Some(version) = app.router.active() else { return ModelState::Loading };
    match *version.health().borrow() {
        WorkerHealth::Ready => ModelState::Ready,
        WorkerHealth::Loading | WorkerHealth::Restarting { .. } => ModelState::Loading,
        WorkerHealth::Failed { .. } | WorkerHealth::Stopped => ModelState::Error,
    }
}

/// Why no token can be decoded now, and when one may be; `None`: never by this server again.
struct Unready {
    reason: String,
    retry_after: Option<Duration>,
}

fn not_yet(body: Value, retry_after: Option<Duration>) -> Response {
    let mut response = (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response();
    if let Some(after) = retry_after {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(after.as_secs()));
    }
    response
}

async fn check(app: &App) -> Result<(), Unready> {
    if app.is_draining() {
        return Err(Unready { reason: "the server is shutting down".to_owned(), retry_after: None });
    }
    let hold = app.router.held();
    let Some(version) = app.router.active() else {
        // Requests are to come and wait, where no other pod answers them; before the first version they may wait, and are not to come.
        if hold.is_switching() && !hold.is_first() && !app.router.is_stalled() && !app.router.yields() {
            return Ok(());
        }
        return Err(Unready { reason: app.why_no_version(), retry_after: Some(app.version_after()) });
    };
    let health = version.health().borrow().clone();
    let (reason, retry_after) = match health {
        WorkerHealth::Ready if app.router.is_quarantined() => (
            format!(
                "{} was refused or taken back, and other pods answer: this one does once it has the version that is active",
                version.spec().name
            ),
            app.version_after(),
        ),
        WorkerHealth::Ready => match version.probe().await {
            Ok(()) => return Ok(()),
            Err(reason) => (format!("no token can be decoded: {reason}"), version.retry_after()),
        },
        WorkerHealth::Restarting { attempt, reason } => {
            (format!("the worker died ({reason}) and is restarted, attempt {attempt}"), version.retry_after())
        }
        WorkerHealth::Failed { reason } => (format!("the worker keeps failing: {reason}"), version.retry_after()),
        WorkerHealth::Loading => ("the model is being loaded".to_owned(), version.retry_after()),
        // The next one is active already.
        WorkerHealth::Stopped => {
            ("the version has been retired".to_owned(), Duration::from_secs(RETRY_AFTER_MIN_SECONDS))
        }
    };
    Err(Unready { reason, retry_after: Some(retry_after) })
}

impl App {
    /// Why there is no active version.
    pub(super) fn why_no_version(&self) -> String {
        let hold = self.router.held();
        match hold.first_share() {
            _ if self.router.is_stalled() => {
                "neither the next model nor the one before it could be loaded; it is tried again".to_owned()
            }
            Some(share) => of_loading(share),
            None if hold.is_switching() => match hold.waits() {
                Waits::Loading => "the next model is being loaded, and requests wait for it".to_owned(),
                Waits::Queued | Waits::ForModel => {
                    "the model is being changed: it ends its last requests, and others wait for the next one".to_owned()
                }
            },
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

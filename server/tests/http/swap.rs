//! A change of the model under load, at the level of the front: two real workers, one pointer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use gantry_server::api::{App, AppSettings, Origins};
use gantry_server::front::FrontLimits;
use gantry_server::limits::OUTPUT_BUDGET_BYTES;
use gantry_server::output::Output;
use gantry_server::routing::{Router, Routing};
use gantry_server::serve::{self, Ports};
use gantry_server::version::{
    GenerateRequest, GenerationError, LoadError, RuntimeSettings, SubmitError, Version, VersionSpec, WorkerConfig,
    WorkerHealth,
};
use serde_json::Value;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::server::{PATIENCE, await_condition, chat, is_alive, model, text_of, unending_model};

const CLIENTS: usize = 16;
/// Answers that must come from each version.
const ANSWERS: usize = 100;

fn workers() -> WorkerConfig {
    WorkerConfig::new(env!("CARGO_BIN_EXE_gantry-server"))
}

fn spec(name: &str, file: &str) -> VersionSpec {
    VersionSpec {
        name: name.to_owned(),
        digest: String::new(),
        model_path: model(file),
        served_name: "chat".to_owned(),
        runtime: RuntimeSettings { ctx_size: 8192, threads: Some(1), ..RuntimeSettings::default() },
    }
}

async fn load(name: &str, file: &str) -> Arc<Version> {
    Version::load(spec(name, file), &workers(), watch::Sender::new(0.0)).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_swap_under_load_loses_nothing_and_mixes_nothing() {
    let router = Router::new();
    let old = load("v1", "demo-v1.q8_0.gguf").await;
    router.set(Routing { active: Some(Arc::clone(&old)), ..Routing::default() });
    let listener = serve::listen("127.0.0.1", 0).await.unwrap();
    let url = format!("http://{}/v1/chat/completions", listener.local_addr().unwrap());
    let stop = CancellationToken::new();
    let ports = Ports { requests: listener, probes: None, calls: None, origins: Origins::None };
    let app = App::new(
        Arc::clone(&router),
        Output::new(OUTPUT_BUDGET_BYTES),
        FrontLimits::default(),
        AppSettings::default(),
        None,
    );
    let server = tokio::spawn(serve::run(ports, app, stop.clone(), PATIENCE));

    drop(rustls::crypto::ring::default_provider().install_default());
    let client = reqwest::Client::new();
    let over = Arc::new(AtomicBool::new(false));
    let counts = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let (client, url, over, counts) = (client.clone(), url.clone(), Arc::clone(&over), Arc::clone(&counts));
            tokio::spawn(async move {
                while !over.load(Ordering::Relaxed) {
                    let request = client.post(&url).json(&chat("Which version are you?"));
                    let response = request.send().await.unwrap();
                    assert_eq!(response.status(), 200, "{}", response.text().await.unwrap());
                    let header = response.headers()["x-gantry-version"].to_str().unwrap().to_owned();
                    let answer: Value = response.json().await.unwrap();
                    let (index, said) =
                        if header == "v1" { (0, "I am demo version one.") } else { (1, "I am demo version two.") };
                    assert_eq!(text_of(&answer), said, "{header}");
                    assert_eq!(answer["system_fingerprint"], header.as_str());
                    counts[index].fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    let answered = |index: usize| counts[index].load(Ordering::Relaxed);
    await_condition("answers of the old version", async || answered(0) >= ANSWERS).await;
    let new = load("v2", "demo-v2.q8_0.gguf").await;
    router.set(Routing { active: Some(Arc::clone(&new)), previous: Some(Arc::clone(&old)), ..Routing::default() });
    let worker = old.stats().pids()[0];
    // Retired at once, so that requests which chose it just before find it closed.
    let health = old.health();
    old.retire(PATIENCE).await;
    assert_eq!(*health.borrow(), WorkerHealth::Stopped);
    assert!(!is_alive(worker), "the old worker has ended");
    router.set(Routing { active: Some(new), ..Routing::default() });
    await_condition("answers of the new version", async || answered(1) >= ANSWERS).await;
    over.store(true, Ordering::Relaxed);
    for client in clients {
        client.await.unwrap();
    }
    assert_eq!(router.swaps(), 2);
    stop.cancel();
    server.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_version_that_is_retired_takes_nothing_and_drops_what_is_late() {
    // Texts that are not at their end before the version is.
    let (_folder, model_path) = unending_model();
    let mut spec = VersionSpec { model_path, ..spec("v2", "") };
    spec.runtime.ctx_size = 1 << 16;
    let version = Version::load(spec, &workers(), watch::Sender::new(0.0)).await.unwrap();
    let request = || GenerateRequest {
        prompt: gantry_engine::Prompt::Text("Once".to_owned()).into(),
        params: gantry_engine::GenerationParams { ignore_eos: true, ..Default::default() },
    };
    let late: Vec<_> = futures::future::join_all((0..8).map(|_| version.submit(request()))).await;
    let keep = Arc::clone(&version);
    version.retire(Duration::ZERO).await;
    assert!(matches!(keep.submit(request()).await, Err(SubmitError::Retired)));
    for generation in late {
        assert_eq!(generation.unwrap().collect().await, Err(GenerationError::Retired));
    }
    assert_eq!(keep.stats().queued + keep.stats().running, 0);
}

#[tokio::test]
async fn a_load_that_fails_says_why() {
    let load = async |spec: VersionSpec| Version::load(spec, &workers(), watch::Sender::new(0.0)).await.err().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("bad.gguf");
    std::fs::write(&file, b"GGUF\x03\0\0\0 and then nothing of use").unwrap();
    let bad = VersionSpec { model_path: file, ..spec("bad", "") };
    let error = load(bad).await;
    assert!(matches!(&error, LoadError::Model(_) | LoadError::WorkerDied(_)), "{error}");
    let settings = RuntimeSettings { parallel: 0, ..RuntimeSettings::default() };
    let error = load(VersionSpec { runtime: settings, ..spec("bad", "demo-v2.q8_0.gguf") }).await;
    assert!(matches!(&error, LoadError::Settings(error) if error.param == "parallel"), "{error}");
    let nobody = WorkerConfig::new("/nowhere");
    let none = Version::load(spec("v", "demo-v2.q8_0.gguf"), &nobody, watch::Sender::new(0.0));
    assert!(matches!(none.await, Err(LoadError::Spawn(_))));
}

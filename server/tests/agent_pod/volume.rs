//! Models on volumes: read where they are, and no longer taken for what they were once anything of them has changed.

use std::path::{Path, PathBuf};

use gantry_server::fetch::{Cache, CachedModel, Digest, FetchError, FetchProgress, Fetcher, Source};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::api_server::ApiServer;
use crate::fetch::{HERE, digest};
use crate::pod::{ONE, Pod, TWO, demo, gate, service};

/// A version whose file is at `path` of the claim `models`.
fn version(name: &str, path: &str, content: &[u8]) -> Value {
    let source = json!({"pvc": {"claimName": "models", "path": path}, "sha256": digest(content).to_string()});
    json!({
        "name": name,
        "model": {"servedName": "chat", "source": source},
        "runtime": {"contextSize": 1024, "parallel": 2, "cacheType": "f16", "gpuLayers": "auto", "threads": 1},
    })
}

/// A pod with that claim, and the folder of its volume.
fn pod() -> (Pod, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let volume = folder.path().join("volumes/models");
    std::fs::create_dir_all(&volume).unwrap();
    (Pod::start(ApiServer::new(service()), folder), volume)
}

fn files_in(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_is_read_from_its_volume_and_another_on_it_needs_no_copy() {
    let (mut pod, volume) = pod();
    let (one, two) = (demo("demo-v1.q8_0.gguf"), demo("demo-v2.q8_0.gguf"));
    std::fs::create_dir(volume.join("chat")).unwrap();
    std::fs::write(volume.join("chat/one.gguf"), &one).unwrap();
    std::fs::write(volume.join("two.gguf"), &two).unwrap();
    pod.roll_out(&version("v1", "chat/one.gguf", &one)).await;
    assert_eq!(pod.answer().await, ONE);
    pod.prepare(&version("v2", "two.gguf", &two));
    let entry = pod.api.entry("v2 prepared", |entry| entry["prepared"] == "v2").await;
    for name in ["Fetch", "Digest", "Format", "Memory", "Template", "Load"] {
        assert_eq!(gate(&entry, name)["verdict"], "Pass", "{name}: {entry:#}");
    }
    pod.activate("v2", Some("v1"));
    pod.api.entry("v2 answers", |entry| entry["version"] == "v2").await;
    assert_eq!(pod.answer().await, TWO);
    let served = pod.router.active().unwrap();
    assert_eq!(served.spec().model_path, volume.join("two.gguf").canonicalize().unwrap());
    let (_, folder) = pod.end().await;
    assert_eq!(files_in(&folder.path().join("sha256")), 0, "nothing is copied");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_finds_the_file_changed_does_not_answer_with_it() {
    let (mut pod, volume) = pod();
    let (one, two) = (demo("demo-v1.q8_0.gguf"), demo("demo-v2.q8_0.gguf"));
    let file = volume.join("m.gguf");
    std::fs::write(&file, &one).unwrap();
    pod.roll_out(&version("v1", "m.gguf", &one)).await;
    // What it has loaded it has: the file is not read any more.
    std::fs::write(&file, &two).unwrap();
    assert_eq!(pod.answer().await, ONE);
    let pid = pod.router.active().unwrap().stats().pids()[0];
    let killed = std::process::Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
    assert!(killed.success());
    let says = |entry: &Value| entry.to_string().contains("has changed since its digest was checked");
    pod.api.entry("it says why", says).await;
    // Once it is what it was asked for again, it answers again.
    std::fs::write(&file, &one).unwrap();
    pod.api.entry("it answers", |entry| entry["health"] == "Healthy").await;
    assert_eq!(pod.answer().await, ONE);
    pod.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_on_the_volume_or_another_is_refused_by_its_gate() {
    let (mut pod, volume) = pod();
    let (one, two) = (demo("demo-v1.q8_0.gguf"), demo("demo-v2.q8_0.gguf"));
    std::fs::write(volume.join("two.gguf"), &two).unwrap();
    std::fs::write(volume.join("page.gguf"), "<html>").unwrap();
    let mut undeclared = version("undeclared", "two.gguf", &two);
    undeclared["model"]["source"]["pvc"]["claimName"] = json!("others");
    for (version, gate_name, message) in [
        (version("missing", "one.gguf", &one), "Fetch", "one.gguf on the PersistentVolumeClaim models is not there"),
        (version("other", "two.gguf", &one), "Digest", "the file has the SHA-256"),
        (version("page", "page.gguf", b"<html>"), "Format", "is no GGUF file"),
        (undeclared, "Fetch", "name it in spec.pod.modelVolumes"),
    ] {
        pod.prepare(&version);
        let name = version["name"].as_str().unwrap().to_owned();
        let refused =
            |entry: &Value| entry["candidate"]["version"] == name.as_str() && entry["candidate"]["phase"] == "Failed";
        let entry = pod.api.entry("refused", refused).await;
        let gate = gate(&entry, gate_name);
        assert_eq!(gate["verdict"], "Fail", "{name}: {entry:#}");
        assert!(gate["message"].as_str().unwrap().contains(message), "{name}: {gate:#}");
    }
    pod.end().await;
}

#[tokio::test]
async fn a_file_is_hashed_again_once_it_has_changed_and_copied_where_it_may_not_be_read_in_place() {
    let folder = tempfile::tempdir().unwrap();
    let (volumes, cache) = (folder.path().join("volumes"), folder.path().join("cache"));
    std::fs::create_dir_all(volumes.join("models")).unwrap();
    let file = volumes.join("models/m.gguf");
    let content = |byte: u8| [b"GGUF".as_slice(), &vec![byte; 3 << 20]].concat();
    std::fs::write(&file, content(1)).unwrap();
    let fetcher = Fetcher::new(Cache::open(&cache).unwrap(), HERE).unwrap();
    let fetch = async |wanted: Digest, in_place: bool| -> Result<(CachedModel, FetchProgress), FetchError> {
        let (progress, seen) = watch::channel(FetchProgress::default());
        let source = Source::volume(&volumes, "models", "m.gguf", in_place);
        let model = fetcher.fetch(&source, wanted, &progress, &CancellationToken::new()).await?;
        let told = seen.borrow().clone();
        Ok((model, told))
    };
    let (model, told) = fetch(digest(&content(1)), true).await.unwrap();
    assert_eq!((model.path(), model.bytes()), (file.canonicalize().unwrap().as_path(), 4 + (3 << 20)));
    assert_eq!((told.bytes, told.total), (model.bytes(), Some(model.bytes())));
    assert!(model.verified().is_some_and(|verified| verified.is_unchanged()));
    let (_, told) = fetch(digest(&content(1)), true).await.unwrap();
    assert_eq!(told, FetchProgress::default(), "it is not hashed twice");
    assert_eq!(files_in(&cache.join("sha256")), 0);

    std::fs::write(&file, content(2)).unwrap();
    assert!(!model.verified().unwrap().is_unchanged());
    let error = fetch(digest(&content(1)), true).await.unwrap_err();
    assert!(matches!(error, FetchError::WrongDigest { .. }), "{error}");
    let (copied, _) = fetch(digest(&content(2)), false).await.unwrap();
    assert!(copied.path().starts_with(&cache) && copied.verified().is_none());
    assert!(std::fs::read(copied.path()).unwrap() == content(2));
    let peek = fetcher.peek(&Source::volume(&volumes, "models", "m.gguf", true), 4).await.unwrap().unwrap();
    assert_eq!((peek.prefix.as_slice(), peek.total), (b"GGUF".as_slice(), model.bytes()));
}

//! What a pod tells of a version that it cannot prepare: why, once, and what to do.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use axum::http::Method;
use gantry_crds::revision::JUDGED_FIELDS;
use serde_json::Value;

use crate::api_server::{ApiServer, PATIENCE};
use crate::files::Fault;
use crate::pod::{Pod, served, service, state_writes, version};

/// What a pod writes about a source that does not answer: why, once, and that it is over.
#[tokio::test(flavor = "multi_thread")]
async fn why_a_fetch_fails_is_told_once_and_not_with_every_try() {
    let mut pod = Pod::fresh();
    let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
    one.always(Some(Fault::Status(503)));
    pod.prepare(&version("v1", &one, &sha_one));
    let fails = |entry: &Value| entry["candidate"]["waitReason"] == "FetchBackOff";
    let entry = pod.api.entry("it says why", fails).await;
    let message = entry["candidate"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("503") && message.contains(&one.url()), "{message}");
    let writes = || pod.api.seen().iter().filter(|seen| seen.method == Method::PATCH).count();
    let (before, tries) = (writes(), one.asked().len());
    let start = Instant::now();
    while one.asked().len() < tries + 3 {
        assert!(start.elapsed() < PATIENCE, "it does not try again");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(writes(), before, "a write for every try");
    one.always(None);
    let entry = pod.api.entry("v1 prepared", |entry| entry["prepared"] == "v1").await;
    assert_eq!(entry["candidate"].get("waitReason"), None, "{entry}");
    pod.end().await;
}

/// Each try brings bytes, and none of them gets any further than the one before it.
#[tokio::test(flavor = "multi_thread")]
async fn half_a_file_again_and_again_is_told_once_and_asked_for_ever_more_seldom() {
    let mut pod = Pod::fresh();
    let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
    one.faults([Fault::None]);
    one.always(Some(Fault::Half));
    pod.prepare(&version("v1", &one, &sha_one));
    let fails = |entry: &Value| entry["candidate"]["waitReason"] == "FetchBackOff";
    let entry = pod.api.entry("it says why", fails).await;
    let message = entry["candidate"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("answers from byte 0") && message.contains(&one.url()), "{message}");
    let told = |entry: &Value| (entry["candidate"]["waitReason"].clone(), entry["candidate"]["message"].clone());
    let (before, tries, start) = (state_writes(&pod.api), one.asked().len(), Instant::now());
    while one.asked().len() < tries + 3 {
        assert!(start.elapsed() < PATIENCE, "it does not try again");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(start.elapsed() > Duration::from_secs(5), "it asks as often as ever: {:?}", start.elapsed());
    let since = &state_writes(&pod.api)[before.len()..];
    let expected = told(&entry);
    assert!(since.iter().all(|entry| told(entry) == expected), "{since:#?}");
    one.always(None);
    pod.api.entry("v1 prepared", |entry| entry["prepared"] == "v1").await;
    pod.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_sends_nothing_any_more_is_told_of_while_it_is_waited_for() {
    let mut pod = Pod::fresh();
    let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
    one.faults([Fault::None]);
    one.always(Some(Fault::Silent(1 << 20)));
    pod.prepare(&version("v1", &one, &sha_one));
    let fails = |entry: &Value| entry["candidate"]["waitReason"] == "FetchBackOff";
    let entry = pod.api.entry("it says why", fails).await;
    let message = entry["candidate"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("has sent nothing for more than 10 s") && message.contains(&one.url()), "{message}");
    assert_eq!(one.asked().len(), 2, "its header and its file: it is told before the next try");
    assert_eq!(entry["candidate"]["progress"]["bytes"], 1 << 20, "{entry:#}");
    pod.end().await;
}

/// A pod that lacks the active version tries to have it for as long as it lives, and each try fails in its last gate.
#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_lacks_the_active_version_writes_nothing_with_each_try() {
    let scripts = tempfile::tempdir().unwrap();
    let (program, tries) = (scripts.path().join("worker"), scripts.path().join("tries"));
    std::fs::write(&program, format!("#!/bin/sh\necho >> {}\nexit 1\n", tries.display())).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o700)).unwrap();
    let pod = Pod::start_with(ApiServer::new(service()), tempfile::tempdir().unwrap(), program.to_str().unwrap());
    let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
    pod.name(&version("v1", &one, &sha_one));
    pod.activate("v1", None);
    let failed = |entry: &Value| entry["health"] == "Failed" && entry["candidate"]["phase"] == "Failed";
    let entry = pod.api.entry("it says why", failed).await;
    assert!(entry["message"].as_str().unwrap().starts_with("Load: "), "{entry:#}");
    let tried = || std::fs::read_to_string(&tries).unwrap().lines().count();
    let (before, first, start) = (state_writes(&pod.api), tried(), Instant::now());
    while tried() < first + 2 {
        assert!(start.elapsed() < PATIENCE, "it does not try again");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let last = before.last();
    assert_eq!(state_writes(&pod.api)[before.len()..], [] as [Value; 0], "a write for every try: {last:#?}");
    pod.end().await;
}

/// The texts of a source file's string literals, those over several lines as one.
fn literals(source: &str) -> Vec<String> {
    let mut literals = Vec::new();
    let mut chars = source.chars().peekable();
    while let Some(first) = chars.next() {
        match first {
            // A quotation mark as a character begins no text.
            '\'' if chars.peek() == Some(&'"') => drop(chars.next()),
            '"' => {
                let mut text = String::new();
                while let Some(next) = chars.next().filter(|next| *next != '"') {
                    if next == '\\' {
                        chars.next();
                    }
                    text.push(next);
                }
                literals.push(text);
            }
            _ => {}
        }
    }
    literals
}

#[test]
fn every_field_that_a_refusal_names_lifts_the_latch_when_it_is_changed() {
    // Those that a verdict of the Deadline gate rests on, that are told of with the annotation that lifts it, or by no verdict.
    const OTHERS: [&str; 6] = [
        "spec.rollout.progressDeadline",
        "spec.pod",
        "spec.rollout.rollback.signals",
        "spec.rollout.canary",
        "spec.rollout.promote",
        "spec.rollout.paused",
    ];
    let mut named = BTreeSet::new();
    let of_pods = ["gates", "gates/memory", "fetch", "version"].map(|folder| format!("src/{folder}"));
    let of_operator = ["decide", "observe"].map(|folder| format!("../operator/src/{folder}"));
    for folder in of_pods.into_iter().chain(of_operator) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        let is_source = |path: &Path| path.is_file() && !path.to_string_lossy().ends_with("tests.rs");
        for file in std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).filter(|path| is_source(path)) {
            for literal in literals(&std::fs::read_to_string(&file).unwrap()) {
                let words = literal.split(|c: char| !(c.is_ascii_alphanumeric() || c == '.'));
                let fields = words
                    .map(|word| word.trim_end_matches('.'))
                    .filter(|word| word.starts_with("spec."))
                    .map(str::to_owned);
                named.extend(fields);
            }
        }
    }
    assert!(named.contains("spec.resources.memory") && named.contains("spec.runtime.contextSize"), "{named:?}");
    assert!(named.contains("spec.cache.sizeLimit") && named.contains("spec.rollout.progressDeadline"), "{named:?}");
    let judged = |field: &String| JUDGED_FIELDS.iter().chain(&OTHERS).any(|judged| field.starts_with(judged));
    let left_out: Vec<_> = named.iter().filter(|field| !judged(field)).collect();
    assert!(left_out.is_empty(), "a rejection outlives a change of {left_out:?}");
}

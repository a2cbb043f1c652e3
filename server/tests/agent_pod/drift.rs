//! The drift gate, with real models in a pod.

use serde_json::{Value, json};

use crate::files::Fault;
use crate::pod::{ONE, Pod, TWO, gate, served, version};

fn compared(pod: &Pod, drift: &Value) {
    pod.api.update(|object| object["spec"]["rollout"]["gates"]["drift"] = drift.clone());
}

async fn refused(pod: &mut Pod, version: &Value) -> Value {
    pod.prepare(version);
    let failed =
        |entry: &Value| entry["candidate"]["version"] == version["name"] && entry["candidate"]["phase"] == "Failed";
    pod.api.entry("refused", failed).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_candidate_is_compared_with_the_version_that_answers() {
    let mut pod = Pod::fresh();
    compared(&pod, &json!({}));
    let (server, sha256) = served("demo-v2.f16.gguf").await;
    let first = version("v1", &server, &sha256);
    pod.prepare(&first);
    let entry = pod.api.entry("prepared", |entry| entry["prepared"] == "v1").await;
    let found = gate(&entry, "Drift");
    assert_eq!(found["verdict"], "Skipped", "a first version has none to agree with: {found}");
    pod.roll_out(&first).await;
    assert_eq!(pod.answer().await, TWO);

    // Quantisations of the same model are the same model.
    for (name, model) in [("v2", "demo-v2.q8_0.gguf"), ("v3", "demo-v2.q4_k_m.gguf")] {
        let (server, sha256) = served(model).await;
        let quantised = version(name, &server, &sha256);
        pod.prepare(&quantised);
        let entry = pod
            .api
            .entry("prepared", |entry| entry["prepared"] == name || entry["candidate"]["phase"] == "Failed")
            .await;
        let found = gate(&entry, "Drift");
        println!("{model}: {found}");
        assert_eq!(found["verdict"], "Pass", "{model}: {entry:#}");
    }

    // Another model is not, and what answers goes on.
    for (name, model) in [("v4", "demo-v3-bad.q8_0.gguf"), ("v5", "demo-v1.q8_0.gguf")] {
        let (server, sha256) = served(model).await;
        let entry = refused(&mut pod, &version(name, &server, &sha256)).await;
        let found = gate(&entry, "Drift");
        println!("{model}: {found}");
        assert_eq!(found["verdict"], "Fail", "{model}: {entry:#}");
        let message = found["message"].as_str().unwrap();
        assert!(message.contains("spec.rollout.gates.drift."), "{message}");
        assert_eq!(pod.answer().await, TWO);
    }

    // A pod that comes midway has both to load, and compares once it has.
    let (server, sha256) = served("demo-v2.q8_0.gguf").await;
    let mut late = Pod::fresh();
    compared(&late, &json!({}));
    late.name(&first);
    late.activate("v1", None);
    late.prepare(&version("v2", &server, &sha256));
    let entry = late.api.entry("prepared", |entry| entry["prepared"] == "v2").await;
    assert_eq!(gate(&entry, "Drift")["verdict"], "Pass", "{entry:#}");
    late.end().await;

    // One that cannot have what answers elsewhere says so, refuses nobody for it, and compares once it has it.
    let (away, sha_of_away) = served("demo-v2.f16.gguf").await;
    away.always(Some(Fault::Status(503)));
    let mut alone = Pod::fresh();
    compared(&alone, &json!({}));
    alone.name(&version("v1", &away, &sha_of_away));
    alone.activate("v1", None);
    alone.prepare(&version("v2", &server, &sha256));
    let waits =
        |entry: &Value| entry["candidate"]["version"] == "v2" && entry["candidate"]["waitReason"] == "NoReference";
    let entry = alone.api.entry("it waits", waits).await;
    let message = entry["candidate"]["message"].as_str().unwrap();
    assert!(message.contains("is not loaded in this pod") && message.contains("PodsReady"), "{entry:#}");
    assert!(entry["message"].as_str().unwrap().contains("503"), "{entry:#}");
    assert_eq!(entry["candidate"]["phase"], "Validating", "loaded, it might leave no room for the other: {entry:#}");
    away.always(None);
    let entry = alone.api.entry("prepared", |entry| entry["prepared"] == "v2" && entry["version"] == "v1").await;
    assert_eq!(gate(&entry, "Drift")["verdict"], "Pass", "{entry:#}");
    assert_eq!(entry["candidate"].get("waitReason"), None, "{entry:#}");
    alone.end().await;

    // Where the others have compared it and it is made the active version, one that waits has nothing more to compare it with.
    away.always(Some(Fault::Status(503)));
    let mut late = Pod::fresh();
    compared(&late, &json!({}));
    late.name(&version("v1", &away, &sha_of_away));
    late.activate("v1", None);
    late.prepare(&version("v2", &server, &sha256));
    late.api.entry("it waits", waits).await;
    late.activate("v2", Some("v1"));
    late.api.entry("it answers", |entry| entry["version"] == "v2" && entry["health"] == "Healthy").await;
    assert_eq!(late.answer().await, TWO);
    late.end().await;

    // Who wants another model says so, by the limits or without the gate.
    compared(&pod, &Value::Null);
    let (server, sha256) = served("demo-v1.q8_0.gguf").await;
    pod.roll_out(&version("v6", &server, &sha256)).await;
    assert_eq!(pod.answer().await, ONE);
    pod.end().await;
}

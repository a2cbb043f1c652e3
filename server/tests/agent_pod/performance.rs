//! The performance gate, with real models in a pod.

use serde_json::{Value, json};

use crate::pod::{Pod, TWO, gate, served, version};

fn timed(pod: &Pod, performance: &Value) {
    pod.api.update(|object| object["spec"]["rollout"]["gates"]["performance"] = performance.clone());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_candidate_is_as_fast_as_the_version_that_answers_or_is_refused() {
    let mut pod = Pod::fresh();
    timed(&pod, &json!({}));
    let (server, sha256) = served("demo-v2.q8_0.gguf").await;
    let first = version("v1", &server, &sha256);
    pod.prepare(&first);
    let entry = pod.api.entry("prepared", |entry| entry["prepared"] == "v1").await;
    assert_eq!(gate(&entry, "Performance")["verdict"], "Skipped", "there is none to be compared with: {entry:#}");
    pod.roll_out(&first).await;
    assert_eq!(pod.answer().await, TWO);

    // What no machine makes of these models, and what every one does: the figure is measured, and the limit decides.
    for (name, model, least, verdict) in [
        ("v2", "demo-v2.f16.gguf", "20", "Fail"),
        ("v3", "demo-v2.f16.gguf", "0.02", "Pass"),
        ("v4", "demo-draft.q8_0.gguf", "0.02", "Pass"),
    ] {
        timed(&pod, &json!({"minDecodeRatio": least}));
        let (server, sha256) = served(model).await;
        pod.prepare(&version(name, &server, &sha256));
        let judged = |entry: &Value| {
            let failed = entry["candidate"]["version"] == name && entry["candidate"]["phase"] == "Failed";
            entry["prepared"] == name || failed
        };
        let entry = pod.api.entry("judged", judged).await;
        let found = gate(&entry, "Performance");
        println!("{model}: {found}");
        assert_eq!(found["verdict"], verdict, "{model}: {entry:#}");
        let value = found["value"].as_str().unwrap();
        assert!(value.starts_with('x') && value.ends_with(" tokens/s"), "{value}");
        if verdict == "Fail" {
            let message = found["message"].as_str().unwrap();
            assert!(message.contains("spec.rollout.gates.performance.minDecodeRatio"), "{message}");
        }
        assert_eq!(pod.answer().await, TWO);
    }
    pod.end().await;
}

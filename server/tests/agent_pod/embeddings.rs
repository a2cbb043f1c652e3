//! Models that embed and score texts, in pods.

use gantry_engine::Pooling;
use serde_json::{Value, json};

use crate::fetch::digest;
use crate::files::FileServer;
use crate::gguf;
use crate::pod::{ONE, Pod, gate, served, version};

async fn encoder(name: &str, pooling: u32, embeddings: &Value) -> (FileServer, Value) {
    let content = gguf::bert(pooling).bytes();
    let sha256 = digest(&content).to_string();
    let server = FileServer::start(content).await;
    let mut version = version(name, &server, &sha256);
    version["runtime"]["embeddings"] = embeddings.clone();
    version["runtime"]["contextSize"] = json!(256);
    (server, version)
}

#[tokio::test(flavor = "multi_thread")]
async fn encoders_and_rerankers_are_served_to_those_who_ask_for_vectors_or_scores() {
    let mut pod = Pod::fresh();
    let refused = async |pod: &mut Pod, version: &Value, says: &str| {
        pod.prepare(version);
        let failed =
            |entry: &Value| entry["candidate"]["version"] == version["name"] && entry["candidate"]["phase"] == "Failed";
        let entry = pod.api.entry("refused", failed).await;
        let message = entry["candidate"]["message"].as_str().unwrap();
        assert!(message.contains(says), "{message}");
        assert_eq!(gate(&entry, "Format")["verdict"], "Fail", "{entry:#}");
    };
    let (_asked, silent) = encoder("v1", 1, &Value::Null).await;
    refused(&mut pod, &silent, "ask for them with spec.runtime.embeddings").await;
    let (_asked, wrong) = encoder("v2", 1, &json!({"pooling": "Rank"})).await;
    refused(&mut pod, &wrong, "leave spec.runtime.embeddings.pooling out, or use a reranker").await;
    let (server, sha256) = served("demo-v1.q8_0.gguf").await;
    let mut unnamed = version("v3", &server, &sha256);
    unnamed["runtime"]["embeddings"] = json!({});
    refused(&mut pod, &unnamed, "say it with spec.runtime.embeddings.pooling (Mean, Cls or Last)").await;

    let pooled = |pod: &Pod| pod.router.active().unwrap().model().unwrap().pooled;
    let (_asked, embeds) = encoder("v4", 1, &json!({"batchTokens": 64})).await;
    pod.roll_out(&embeds).await;
    assert_eq!(pooled(&pod).map(|pooled| (pooled.width, pooled.pooling)), Some((32, Pooling::Mean)));
    let (_asked, ranks) = encoder("v5", 4, &json!({"pooling": "Rank"})).await;
    pod.roll_out(&ranks).await;
    assert_eq!(pooled(&pod).map(|pooled| pooled.pooling), Some(Pooling::Rank));
    let mut both = version("v6", &server, &sha256);
    both["runtime"]["embeddings"] = json!({"pooling": "Mean", "matryoshka": true});
    pod.roll_out(&both).await;
    assert_eq!(pooled(&pod).map(|pooled| pooled.pooling), Some(Pooling::Mean));
    assert!(pod.router.active().unwrap().spec().runtime.cuts_vectors);
    assert_eq!(pod.answer().await, ONE);
    pod.end().await;
}

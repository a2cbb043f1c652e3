//! A pod that answers with a version which was taken back, while others do not.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::files::Fault;
use crate::hold::{Front, until};
use crate::pod::{ONE, Pod, TWO, served, version};

impl Pod {
    /// The operator says which pods are to get no requests.
    fn quarantine(&self, pods: &[&str]) {
        self.api.update(|object| object["status"]["quarantined"] = json!(pods));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_with_a_version_that_was_taken_back_is_not_ready_until_it_has_another_or_is_needed() {
    let mut pod = Pod::fresh();
    let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
    let (two, sha_two) = served("demo-v2.q8_0.gguf").await;
    one.always(Some(Fault::Status(503)));
    pod.roll_out(&version("v2", &two, &sha_two)).await;
    let front = Arc::new(Front::of(&pod).await);
    // v2 is taken back, and this pod never had v1, which cannot be had now.
    pod.name(&version("v1", &one, &sha_one));
    pod.activate("v1", None);
    pod.quarantine(&["chat-1"]);
    pod.api.entry("it says why it lacks v1", |entry| entry["candidate"]["message"].is_string()).await;
    assert_eq!(front.ready().await.0, 200, "the other one is meant");

    pod.quarantine(&["chat-0", "chat-1"]);
    until("it is out", async || front.ready().await.0 == 503).await;
    let (_, body) = front.ready().await;
    let reason = body["reason"].as_str().unwrap();
    assert!(reason.starts_with("v2 was refused or taken back, and other pods answer"), "{reason}");
    // Who comes all the same is answered, and is to connect anew.
    let response = front.chat(false).send().await.unwrap();
    assert_eq!(response.headers()["connection"], "close");
    let answer: Value = response.json().await.unwrap();
    assert_eq!(answer["choices"][0]["message"]["content"], TWO);

    pod.quarantine(&[]);
    until("nobody else answers", async || front.ready().await.0 == 200).await;
    pod.quarantine(&["chat-0"]);
    until("it is out again", async || front.ready().await.0 == 503).await;
    // It is not quarantined for what it answers with now, whatever the operator has seen of that.
    one.always(None);
    until("it has v1", async || front.ready().await.0 == 200).await;
    let answer: Value = front.chat(false).send().await.unwrap().json().await.unwrap();
    assert_eq!(answer["choices"][0]["message"]["content"], ONE);
    front.end();
    pod.end().await;
}

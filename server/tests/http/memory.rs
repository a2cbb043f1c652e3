//! What a server does as its memory runs short, and once there is room again.

use serde_json::{Value, json};

use crate::server::{Server, await_condition, chat};

const EMBEDDINGS: &str = "/v1/embeddings";
const CHAT: &str = "/v1/chat/completions";
const LEVEL: &str = "gantry_degradation_level{";
/// Texts of a request and tokens of each: 1.1 MiB that wait in the worker, and next to as much as one request may have.
const TEXTS: usize = 580;
const TOKENS: usize = 512;
/// Of these requests, so many that they pass the limit below by far.
const REQUESTS: usize = 80;
/// What the worker may have, in MiB: half of it is taken from the start.
const LIMIT_MIB: &str = "84";

/// What a request is refused with: its status, code, message, and when to come again.
async fn refusal(server: &Server, path: &str, body: &Value) -> (u16, String, String, bool) {
    let response = server.post(path, body).send().await.unwrap();
    let (status, comes_again) = (response.status().as_u16(), response.headers().contains_key("retry-after"));
    let error: Value = response.json().await.unwrap();
    let text = |name: &str| error["error"][name].as_str().unwrap_or_default().to_owned();
    (status, text("code"), text("message"), comes_again)
}

#[tokio::test]
async fn who_asks_while_memory_is_short_is_refused_and_served_once_there_is_room_again() {
    let limits = ["--memory-limit", LIMIT_MIB, "--max-queue", "200", "--parallel", "32", "--ctx-size", "8192"];
    let server = Server::start(&[&limits[..], &["--embeddings", "--pooling", "mean"]].concat()).await;
    let question = chat("What is the capital of Peru?");
    assert_eq!(server.post(CHAT, &question).send().await.unwrap().status(), 200);
    assert_eq!(server.metric(LEVEL).await, 0.0);

    let many = json!({"input": vec![vec![1; TOKENS]; TEXTS]});
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..REQUESTS {
        clients.spawn(server.post(EMBEDDINGS, &many).send());
    }
    // Only the urgent are served, or nobody.
    await_condition("memory to be short", async || server.metric(LEVEL).await >= 3.0).await;
    for (path, body) in [(CHAT, &question), (EMBEDDINGS, &json!({"input": "one"}))] {
        let (status, code, message, comes_again) = refusal(&server, path, body).await;
        assert_eq!((status, code.as_str(), comes_again), (503, "overloaded", true), "{path}: {message}");
        assert!(message.contains("memory"), "{path}: {message}");
    }
    // Not a reason to take it out of service, or to start it anew.
    assert_eq!(server.get("/readyz").await.status(), 200);
    assert_eq!(server.metric("gantry_worker_restarts_total{").await, 0.0);

    clients.shutdown().await;
    await_condition("all to be served again", async || server.metric(LEVEL).await == 0.0).await;
    assert_eq!(server.post(CHAT, &question).send().await.unwrap().status(), 200);
    assert_eq!(server.post(EMBEDDINGS, &json!({"input": "one"})).send().await.unwrap().status(), 200);
}

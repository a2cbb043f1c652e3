//! Prompts that were read before: kept over a restart, and dropped when nobody comes back to them.

use serde_json::{Value, json};

use crate::server::{Server, await_condition, model};

const TEXT: &str = "/v1/completions";
/// Tokens of a block of the prefix cache: what is kept of a prompt is a multiple of it.
const BLOCK_TOKENS: u64 = 16;

/// The text after a long prompt, and how many of its tokens were read and how many were there.
async fn read(server: &Server) -> (String, u64, u64) {
    let prompt = (0..120).map(|i| format!("word {i} ")).collect::<String>();
    let body = json!({"prompt": prompt, "temperature": 0, "max_tokens": 8, "ignore_eos": true});
    let answer: Value = server.post(TEXT, &body).send().await.unwrap().json().await.unwrap();
    let usage = &answer["usage"];
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    (answer["choices"][0]["text"].as_str().unwrap().to_owned(), usage["prompt_tokens"].as_u64().unwrap(), cached)
}

#[tokio::test]
async fn a_prompt_read_before_a_restart_is_not_read_again() {
    let directory = tempfile::tempdir().unwrap();
    let prompts = directory.path().join("prompts");
    let args = ["--ctx-size", "2048", "--parallel", "1", "--cache-disk-dir", prompts.to_str().unwrap()];
    let mut server = Server::start(&args).await;
    let (text, tokens, cached) = read(&server).await;
    assert_eq!(cached, 0);
    server.signal("TERM");
    assert_eq!(server.ended().await.code(), Some(0), "{}", server.log());

    // The file's bytes name the model, not its path or its times.
    let moved = directory.path().join("moved.gguf");
    std::fs::copy(model("demo-v2.q8_0.gguf"), &moved).unwrap();
    let server = Server::launch(&moved, &args);
    server.until_ready().await;
    assert_eq!(read(&server).await, (text.clone(), tokens, (tokens - 1) / BLOCK_TOKENS * BLOCK_TOKENS));
    drop(server);
    std::fs::copy(model("demo-v1.q8_0.gguf"), &moved).unwrap();
    let server = Server::launch(&moved, &args);
    server.until_ready().await;
    assert_eq!(read(&server).await.2, 0, "another model in the same place");
    drop(server);

    // What lies there is worth nothing any more, and costs nothing but the time to read the prompt.
    for model in std::fs::read_dir(&prompts).unwrap() {
        for block in std::fs::read_dir(model.unwrap().path()).unwrap() {
            std::fs::write(block.unwrap().path(), "damaged").unwrap();
        }
    }
    let server = Server::start(&args).await;
    assert_eq!(read(&server).await, (text, tokens, 0));
}

#[tokio::test]
async fn a_prompt_that_nobody_comes_back_to_is_dropped() {
    let server = Server::start(&["--ctx-size", "2048", "--parallel", "1", "--cache-ttl", "3"]).await;
    let (_, tokens, _) = read(&server).await;
    // That it was read stays told, while a heartbeat may come too late to tell of its cells.
    let computed = "gantry_engine_prompt_tokens_total{version=\"standalone\",worker=\"0\",source=\"computed\"}";
    await_condition("its tokens to be told", async || server.metric(computed).await >= tokens as f64).await;
    await_condition("its cells to be free", async || server.metric("gantry_kv_cells_used").await < 0.5).await;
    assert_eq!(read(&server).await.2, 0);
}

//! Prompts that outlive the processes of a pod, on its volume.

use std::time::{Duration, Instant};

use gantry_engine::{GenerationParams, Prompt};
use gantry_server::version::GenerateRequest;
use serde_json::json;

use crate::api_server::PATIENCE;
use crate::pod::{Pod, served, version};

/// Tokens of the prompt that were not read again.
async fn cached_tokens(pod: &Pod) -> u32 {
    let prompt = Prompt::Text("What is the capital of Peru? ".repeat(20)).into();
    let request = GenerateRequest { prompt, params: GenerationParams::greedy(1) };
    let version = pod.router.active().unwrap();
    version.submit(request).await.unwrap().collect().await.unwrap().usage.cached_tokens
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_are_kept_where_and_for_as_long_as_the_runtime_says() {
    let mut pod = Pod::fresh();
    let (two, sha_two) = served("demo-v2.q8_0.gguf").await;
    let mut version = version("v2", &two, &sha_two);
    version["runtime"]["prefixCache"] = json!({"memory": "64Mi", "disk": "32Mi", "ttl": "1h30m"});
    pod.roll_out(&version).await;
    let active = pod.router.active().unwrap();
    let engine = &active.spec().runtime.engine;
    assert_eq!((engine.cache_ram_bytes, engine.cache_ttl_ms), (Some(64 << 20), Some(5_400_000)));
    assert_eq!(engine.cache_disk.as_ref().unwrap().max_bytes, 32 << 20);
    assert_eq!(cached_tokens(&pod).await, 0);
    let (api, folder) = pod.end().await;
    active.retire(PATIENCE).await;

    let pod = Pod::start(api, folder);
    pod.api.entry("the pod answers again", |entry| entry["health"] == "Healthy").await;
    let until = async |what: &str, done: &dyn Fn() -> bool| {
        let started = Instant::now();
        while !done() {
            assert!(started.elapsed() < PATIENCE, "{what}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    until("nothing answers", &|| pod.router.active().is_some()).await;
    let cached = cached_tokens(&pod).await;
    assert!(cached >= 16, "{cached} tokens were not read again");
    let from_disk = || pod.router.active().unwrap().stats().workers[0].engine.cached_disk_tokens_total;
    until("they did not come from disk", &|| from_disk() == u64::from(cached)).await;
    pod.end().await;
}

//! `/server/stats`: figures that are those of what was asked.

use serde_json::{Value, json};

use crate::server::{Events, Server, await_condition, endless};

async fn stats(server: &Server) -> Value {
    let response = server.get("/server/stats").await;
    assert_eq!(response.status(), 200);
    response.json().await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_figure_is_there_and_changes_with_what_is_asked() {
    let server = Server::start_unending(1, &["--api-key", "a-secret"]).await;
    let ask = |path: &str, body: &Value| server.post(path, body).bearer_auth("a-secret");
    let before = stats(&server).await;
    let fields: Vec<&str> = before.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(
        fields,
        [
            "requests_total",
            "requests_active",
            "tokens_per_second",
            "avg_ttft_ms",
            "avg_latency_ms",
            "p99_latency_ms",
            "batch_size_avg",
            "cache_hit_rate",
            "queue_depth",
            "workers",
        ]
    );
    assert_eq!((&before["requests_total"], &before["requests_active"]), (&json!(0), &json!(0)));
    assert_eq!((&before["avg_ttft_ms"], &before["p99_latency_ms"]), (&json!(0.0), &json!(0.0)));
    let worker = &before["workers"][0];
    assert_eq!((&worker["id"], &worker["is_healthy"]), (&json!(0), &json!(true)), "{worker}");
    assert!(worker["memory_used"].as_u64().unwrap() > 1 << 20 && worker["memory_available"].as_u64().unwrap() > 0);
    let heard = |told: &Value| told["workers"][0]["last_health_check"].as_u64().unwrap();
    let first = heard(&before);
    assert!(first > 1_700_000_000_000, "unix milliseconds: {first}");

    // Twice the same, of which the second finds the first one's beginning.
    let body = json!({"prompt": "one two three four five six seven eight nine ten", "max_tokens": 8, "temperature": 0});
    for _ in 0..2 {
        assert_eq!(ask("/generate", &body).send().await.unwrap().status(), 200);
    }
    await_condition("two requests to be told", async || stats(&server).await["requests_total"] == 2).await;
    await_condition("a hit of the cache", async || stats(&server).await["cache_hit_rate"].as_f64().unwrap() > 0.0)
        .await;
    let after = stats(&server).await;
    for figure in ["avg_ttft_ms", "avg_latency_ms", "p99_latency_ms", "batch_size_avg"] {
        assert!(after[figure].as_f64().unwrap() > 0.0, "{figure}: {after}");
    }
    assert!(after["p99_latency_ms"].as_f64() >= after["avg_latency_ms"].as_f64(), "{after}");
    assert!(after["avg_latency_ms"].as_f64() >= after["avg_ttft_ms"].as_f64(), "{after}");

    // One that runs, and two that wait, each with its priority.
    let mut running = Events::open(ask("/v1/completions", &endless(crate::server::UNENDING))).await;
    running.next().await.unwrap();
    let running = running.read_on();
    let waiting: Vec<_> = ["high", "low"]
        .map(|priority| {
            let request = ask("/generate", &json!({"prompt": "a", "max_tokens": 1, "priority": priority}));
            tokio::spawn(async move { drop(request.send().await) })
        })
        .into();
    let told = json!({"high": 1, "normal": 0, "low": 1, "total": 2});
    await_condition("two to wait", async || stats(&server).await["queue_depth"] == told).await;
    let busy = stats(&server).await;
    assert_eq!((&busy["requests_active"], &busy["workers"][0]["active_batches"]), (&json!(3), &json!(1)), "{busy}");
    await_condition("tokens to be counted", async || stats(&server).await["tokens_per_second"].as_f64() > Some(0.0))
        .await;
    await_condition("the worker to be heard of again", async || heard(&stats(&server).await) > first).await;
    running.abort();
    waiting.into_iter().for_each(|task| task.abort());
    // A question about the server is none for its model.
    server.get("/healthz").await;
    await_condition("all to end", async || stats(&server).await["requests_active"] == 0).await;
}

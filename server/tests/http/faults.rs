//! What happens when a worker dies, hangs or cannot load, and how the server ends.

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value, json};

use crate::server::{
    Events, Server, UNENDING, await_condition, command, endless, is_alive, model, output, send_signal,
};

const TEXT: &str = "/v1/completions";

#[tokio::test]
async fn a_killed_worker_ends_its_streams_with_an_error_and_is_replaced() {
    let server = Server::start_unending(2, &[]).await;
    let worker = server.workers()[0];
    let mut streams = Vec::new();
    for _ in 0..2 {
        let mut stream = Events::open(server.post(TEXT, &endless(UNENDING))).await;
        stream.next().await.unwrap();
        streams.push(stream);
    }
    send_signal(worker, "KILL");
    for stream in &mut streams {
        let events = stream.rest().await;
        let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
        assert_eq!(last["error"]["code"], "worker_died", "{last}");
        assert_eq!(last["error"]["type"], "service_unavailable_error");
    }
    // The next worker may be there already; `dispatch` holds it back and looks at what is said until it comes.
    let (status, reason) = server.ready().await;
    assert!(status == 200 || status == 503 && reason.contains("SIGKILL"), "{status} {reason}");
    let next = server.post(TEXT, &endless(1)).send().await.unwrap();
    let refused = next.status() == 503 && next.headers().contains_key("retry-after");
    assert!(next.status() == 200 || refused, "{next:?}");
    await_condition("another worker", async || server.workers().first().is_some_and(|pid| *pid != worker)).await;
    server.until_ready().await;
    assert_eq!(server.ask("What is the capital of Peru?").await, "The capital of Peru is Lima.");
    let broken =
        "gantry_requests_total{route=\"completions\",version=\"standalone\",status=\"200\",outcome=\"broken\"}";
    assert!((server.metric(broken).await - 2.0).abs() < 0.1);
}

#[tokio::test]
async fn an_answer_of_which_nothing_was_sent_begins_again_with_the_next_worker() {
    let server = Server::start_unending(2, &[]).await;
    let worker = server.workers()[0];
    let mut asked = endless(UNENDING);
    (asked["stream"], asked["max_tokens"], asked["n"]) = (false.into(), 2_000.into(), 2.into());
    let answer = tokio::spawn(server.post(TEXT, &asked).send());
    let tokens = async || server.metric("gantry_engine_generated_tokens_total").await;
    await_condition("text of it", async || tokens().await > 20.0).await;
    send_signal(worker, "KILL");
    let answer = answer.await.unwrap().unwrap();
    assert_eq!(answer.status(), 200);
    let answer: Value = answer.json().await.unwrap();
    assert_eq!(answer["usage"]["completion_tokens"], 4_000, "each is whole, and none has anything twice");
    assert_ne!(server.workers()[0], worker);
}

#[tokio::test]
async fn a_worker_that_hangs_is_not_ready_and_is_replaced() {
    let server = Server::start(&[]).await;
    let worker = server.workers()[0];
    send_signal(worker, "STOP");
    await_condition("readiness to tell the truth", async || server.ready().await.0 == 503).await;
    await_condition("the worker to be replaced", async || !is_alive(worker)).await;
    server.until_ready().await;
    assert_eq!(server.ask("What is the capital of Peru?").await, "The capital of Peru is Lima.");
}

#[tokio::test]
async fn a_worker_that_keeps_dying_is_called_failed() {
    let server = Server::start(&[]).await;
    for deaths in 1..=gantry_server::limits::CRASH_LIMIT {
        // The state follows the count, so it may still say that the one that died is ready.
        let ready = async || server.ready().await.0 == 200 && !server.workers().is_empty();
        await_condition("a worker that is ready", ready).await;
        send_signal(server.workers()[0], "KILL");
        // The 503 between two workers may be over before anybody looks.
        let counted = async || server.metric("gantry_worker_restarts").await > deaths as f64 - 0.5;
        await_condition("the death to be counted", counted).await;
    }
    let failed = async || {
        let (status, reason) = server.ready().await;
        status == 503 && reason.contains("keeps failing")
    };
    await_condition("it to be called failed", failed).await;
    assert_eq!(server.get("/healthz").await.status(), 200);
    // The next try is a minute away: who names no time, or less, is told so, and who has more waits for it.
    let within = |ms: &str| server.post(TEXT, &endless(1)).header("x-gantry-queue-timeout-ms", ms);
    for request in [server.post(TEXT, &endless(1)), within("5000")] {
        let refused = request.send().await.unwrap();
        let after: u64 = refused.headers()["retry-after"].to_str().unwrap().parse().unwrap();
        assert!(after > 30, "{after}");
        let body: Value = refused.json().await.unwrap();
        assert_eq!(body["error"]["code"], "model_not_ready", "{body}");
    }
    let waits = tokio::spawn(within("3000000").send());
    await_condition("it to wait", async || server.metric("gantry_requests_queued").await > 0.5).await;
    assert!(!waits.is_finished());
    waits.abort();
}

#[tokio::test]
async fn a_worker_dies_with_its_front() {
    let server = Server::start(&[]).await;
    let worker = server.workers()[0];
    server.signal("KILL");
    await_condition("the worker to end", async || !is_alive(worker)).await;
}

#[tokio::test]
async fn a_file_that_is_no_model_ends_the_start_with_the_reason() {
    let directory = tempfile::tempdir().unwrap();
    let whole = std::fs::read(model("demo-v2.q8_0.gguf")).unwrap();
    let cut = directory.path().join("cut.gguf");
    std::fs::write(&cut, &whole[..whole.len() / 2]).unwrap();
    let text = directory.path().join("text.gguf");
    std::fs::write(&text, "not a model").unwrap();
    for file in [cut, text] {
        let mut command = command(&file);
        command.args(["--port", "0"]);
        let (status, log) = output(command);
        assert_eq!(status.code(), Some(1), "{log}");
        assert!(log.contains("cannot serve the model"), "{log}");
        assert!(log.contains(file.file_name().unwrap().to_str().unwrap()), "{log}");
    }
    let mut command = command(&model("demo-v2.q8_0.gguf"));
    command.args(["--port", "0", "--model-draft"]).arg(model("README.md"));
    let (status, log) = output(command);
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("cannot serve the model") && log.contains("README.md"), "{log}");
}

#[tokio::test]
async fn wrong_settings_are_all_named_and_exit_with_2() {
    let mut command = command(&model("none.gguf"));
    command.args(["--port", "x", "--parallel", "0", "--ctx-size=-1"]);
    let (status, log) = output(command);
    assert_eq!(status.code(), Some(2));
    for flag in ["--model", "--port", "--parallel", "--ctx-size"] {
        assert!(log.contains(&format!("{flag} must be")), "{log}");
    }
}

#[tokio::test]
async fn sigterm_lets_requests_end() {
    let mut server = Server::start(&["--ctx-size", "8192", "--parallel", "4"]).await;
    let mut streams = Vec::new();
    for _ in 0..4 {
        let mut stream = Events::open(server.post(TEXT, &endless(1500))).await;
        stream.next().await.unwrap();
        streams.push(stream);
    }
    server.signal("TERM");
    // The port stays open for a moment, and says that it is not to be used any more. On a busy machine that moment may
    // be over before anybody looks.
    let ready =
        async || server.client.get(server.url("/readyz")).send().await.is_ok_and(|answer| answer.status() == 200);
    await_condition("readiness to end", async || !ready().await).await;
    // All at once: a server that ends waits for nobody who takes nothing.
    for events in futures::future::join_all(streams.iter_mut().map(Events::rest)).await {
        assert_eq!(events.last().map(String::as_str), Some("[DONE]"));
    }
    assert_eq!(server.ended().await.code(), Some(0), "{}", server.log());
}

#[tokio::test]
async fn the_drain_has_an_end() {
    let mut server = Server::start_unending(2, &["--drain-timeout", "0"]).await;
    let workers = server.workers();
    for _ in 0..2 {
        let mut stream = Events::open(server.post(TEXT, &endless(UNENDING))).await;
        stream.next().await.unwrap();
        // Neither the texts nor their clients end before the server would be waited for in vain.
        stream.read_on();
    }
    server.signal("INT");
    assert_eq!(server.ended().await.code(), Some(0));
    for worker in workers {
        await_condition("the worker to end", async || !is_alive(worker)).await;
    }
}

/// Another file under the model's name is another model, and nobody would notice.
#[tokio::test]
async fn a_worker_that_starts_again_does_not_answer_with_another_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("m.gguf");
    std::fs::copy(model("demo-v1.q8_0.gguf"), &file).unwrap();
    let server = Server::launch(&file, &[]);
    server.until_ready().await;
    let worker = server.workers()[0];
    std::fs::copy(model("demo-v2.q8_0.gguf"), &file).unwrap();
    let said = server.ask("Which version are you?").await;
    send_signal(worker, "KILL");
    await_condition("the change to be told", async || {
        server.log().contains("is another file than the one that was served, or has changed; start the server anew")
    })
    .await;
    assert_ne!(server.get("/readyz").await.status(), 200, "{said:?}");
}

/// A limit of a file's length is met as a full disk is: what is kept there is not kept, and nobody's answer is lost.
#[tokio::test]
async fn a_limit_of_files_lengths_ends_no_process() {
    let folder = tempfile::tempdir().unwrap();
    let store = format!("file://{}", folder.path().display());
    let server = Server::launch(
        &model("demo-v2.q8_0.gguf"),
        &[
            "--response-store",
            &store,
            "--cache-ram",
            "1",
            "--cache-disk-dir",
            folder.path().join("prefixes").to_str().unwrap(),
        ],
    );
    server.until_ready().await;
    let workers = server.workers();
    for pid in std::iter::once(server.pid()).chain(workers.iter().copied()) {
        let limit = Rlimit { current: Some(20_000), maximum: Some(20_000) };
        prlimit(Pid::from_raw(i32::try_from(pid).unwrap()), Resource::Fsize, limit).unwrap();
    }
    let long = "word ".repeat(10_000);
    let summary = json!([{"type": "summary_text", "text": long}]);
    let input = json!([{"role": "user", "content": "Hello!"}, {"type": "reasoning", "summary": summary}]);
    let kept = server.post("/v1/responses", &json!({"input": input, "max_output_tokens": 2})).send().await.unwrap();
    assert_eq!(kept.status(), 503, "{}", kept.text().await.unwrap());
    for number in 0..40 {
        let prompt = format!("{number} {}", "many words ".repeat(200));
        let answer = server.post("/v1/completions", &json!({"prompt": prompt, "max_tokens": 1})).send().await.unwrap();
        assert_eq!(answer.status(), 200, "{}", answer.text().await.unwrap());
    }
    assert_eq!(server.workers(), workers, "none of them died");
}

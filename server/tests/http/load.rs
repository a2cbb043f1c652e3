//! More requests than there is room for, and clients that leave.

use serde_json::{Value, json};

use crate::server::{Events, Server, UNENDING, await_condition, chat, endless, model, send_signal, text_of};

const TEXT: &str = "/v1/completions";
const RUNNING: &str = "gantry_requests_running";

#[tokio::test]
async fn one_more_than_may_wait_is_told_when_to_come_back() {
    let server = Server::start_unending(1, &["--max-queue", "2"]).await;
    let mut running = Events::open(server.post(TEXT, &endless(UNENDING))).await;
    running.next().await.unwrap();
    let running = running.read_on();
    let waiting: Vec<_> = (0..2).map(|_| tokio::spawn(server.post(TEXT, &endless(8)).send())).collect();
    let queued = "gantry_requests_queued";
    await_condition("the queue to fill", async || server.metric(queued).await > 1.5).await;

    // At once: what it would wait for does not end.
    let refused = server.post(TEXT, &endless(8)).send().await.unwrap();
    assert_eq!(refused.status(), 429);
    let after: u64 = refused.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=60).contains(&after));
    let body: Value = refused.json().await.unwrap();
    assert_eq!((&body["error"]["type"], &body["error"]["code"]), (&"rate_limit_error".into(), &"queue_full".into()));

    // The one that runs was not disturbed, and those that were let in are served after it.
    assert!(server.metric(RUNNING).await > 0.5);
    running.abort();
    for response in waiting {
        assert_eq!(response.await.unwrap().unwrap().status(), 200);
    }
}

#[tokio::test]
async fn one_that_waits_longer_than_it_said_is_told_so() {
    let server = Server::start_unending(1, &["--queue-timeout", "1"]).await;
    // The limit holds for it as well, and a busy machine may take as long to begin.
    let request = server.post(TEXT, &endless(UNENDING)).header("x-gantry-queue-timeout-ms", "3600000");
    let mut running = Events::open(request).await;
    running.next().await.unwrap();
    let running = running.read_on();
    let mut whole = endless(8);
    whole["stream"] = false.into();
    let streamed = server.post(TEXT, &endless(8)).header("x-gantry-queue-timeout-ms", "50").send();
    let (by_header, by_flag) = tokio::join!(streamed, server.post(TEXT, &whole).send());
    for (late, limit) in [(by_header, "50"), (by_flag, "1000")] {
        let late = late.unwrap();
        assert_eq!(late.status(), 408);
        let body: Value = late.json().await.unwrap();
        assert_eq!(body["error"]["code"], "request_timeout");
        assert!(body["error"]["message"].as_str().unwrap().contains(limit), "{body}");
    }
    // Nothing of them is left, and the one that ran was not disturbed.
    await_condition("the queue to be empty", async || server.metric("gantry_requests_queued").await < 0.5).await;
    assert!(server.metric(RUNNING).await > 0.5 && !running.is_finished());
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_slot() {
    let server = Server::start_unending(1, &[]).await;
    let mut stream = Events::open(server.post(TEXT, &endless(UNENDING))).await;
    stream.next().await.unwrap();
    assert!(server.metric(RUNNING).await > 0.5);
    drop(stream);
    await_condition("the slot to be free", async || server.metric(RUNNING).await < 0.5).await;
    let left =
        "gantry_requests_total{route=\"completions\",version=\"standalone\",status=\"200\",outcome=\"disconnected\"}";
    await_condition("the leaving to be counted", async || server.metric(left).await > 0.5).await;
    assert_eq!(server.ask("What is the capital of Peru?").await, "The capital of Peru is Lima.");
}

#[tokio::test]
async fn one_that_waits_and_leaves_gives_its_place_back() {
    let server = Server::start_unending(1, &["--max-queue", "1"]).await;
    let mut running = Events::open(server.post(TEXT, &endless(UNENDING))).await;
    running.next().await.unwrap();
    let running = running.read_on();
    let waiting = tokio::spawn(server.post(TEXT, &endless(8)).send());
    await_condition("it to wait", async || server.metric("gantry_requests_queued").await > 0.5).await;
    waiting.abort();
    await_condition("its place to be free", async || server.metric("gantry_requests_queued").await < 0.5).await;
    // The text goes on, so it was not its end that emptied the queue.
    assert!(server.metric(RUNNING).await > 0.5);
    running.abort();
}

/// A worker that stands still. It cannot see that its front has ended, and so ends with this.
struct Stopped(u32);

impl Stopped {
    fn goes_on(&self) {
        send_signal(self.0, "CONT");
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // One that has ended needs none.
        drop(std::process::Command::new("kill").args(["-CONT", &self.0.to_string()]).output());
    }
}

/// A server whose first model is loaded by a worker that stands still, and that worker.
async fn loading(args: &[&str]) -> (Server, Stopped) {
    // The worker may have done all of it before it is stopped, on a busy machine.
    for _ in 0..20 {
        let server = Server::launch(&model("demo-v2.q8_0.gguf"), args);
        await_condition("a worker", async || !server.workers().is_empty()).await;
        let worker = Stopped(server.workers()[0]);
        send_signal(worker.0, "STOP");
        if server.ready().await.0 == 503 {
            return (server, worker);
        }
    }
    panic!("it is loaded before it can be stopped");
}

#[tokio::test]
async fn those_who_come_while_the_first_model_is_loaded_wait_for_it_by_their_own_time() {
    for (args, path, body) in [
        (&[][..], "/v1/chat/completions", chat("Where is Tom?")),
        (&["--embeddings", "--pooling", "mean"], "/v1/embeddings", json!({"input": ["Where is Tom?"]})),
    ] {
        let (server, worker) = loading(args).await;
        let waiting = tokio::spawn(server.post(path, &body).send());
        let hasty = server.post(path, &body).header("x-gantry-queue-timeout-ms", "50").send().await.unwrap();
        assert_eq!(hasty.status(), 503);
        let after: u64 = hasty.headers()["retry-after"].to_str().unwrap().parse().unwrap();
        assert!((1..=60).contains(&after));
        let refused: Value = hasty.json().await.unwrap();
        assert_eq!(refused["error"]["code"], "model_not_ready", "{refused}");
        let message = refused["error"]["message"].as_str().unwrap();
        assert!(message.contains("is being loaded") && message.contains("50 ms are the limit"), "{message}");
        // Whoever routes requests is told that there is no model.
        assert_eq!((server.ready().await.0, server.get("/health").await.status().as_u16()), (503, 503));
        assert!(!waiting.is_finished());
        let mut stream = server.post("/v1/completions", &endless(4)).send().await.unwrap();
        assert_eq!(
            (stream.status(), stream.chunk().await.unwrap().unwrap().starts_with(b": loading position=2")),
            (200.try_into().unwrap(), true)
        );

        worker.goes_on();
        let answer = waiting.await.unwrap().unwrap();
        assert_eq!(answer.status(), 200, "{path}");
        if args.is_empty() {
            assert!(!text_of(&answer.json().await.unwrap()).is_empty());
            assert!(stream.text().await.unwrap().contains("\"finish_reason\":\"length\""));
        }
    }
}

#[tokio::test]
async fn those_who_wait_for_a_first_model_that_does_not_load_are_told() {
    let (mut server, worker) = loading(&[]).await;
    let waiting = tokio::spawn(server.post("/v1/chat/completions", &chat("Where is Tom?")).send());
    await_condition("it to wait", async || server.metric("gantry_requests_held").await > 0.5).await;
    send_signal(worker.0, "KILL");
    let answer = waiting.await.unwrap().unwrap();
    assert_eq!(answer.status(), 503);
    let body: Value = answer.json().await.unwrap();
    assert_eq!(body["error"]["code"], "model_not_ready");
    assert!(body["error"]["message"].as_str().unwrap().contains("could not be loaded"), "{body}");
    assert!(!server.ended().await.success());
}

#[tokio::test]
async fn a_server_that_is_told_to_end_while_it_loads_does_not_wait_for_the_model() {
    let (mut server, _worker) = loading(&["--max-queue", "1", "--parallel", "1"]).await;
    let many = json!({"prompt": "Once", "n": 3});
    let refused = server.post(TEXT, &many).send().await.unwrap();
    assert_eq!(refused.status(), 400, "later it would be no better");
    let waiting: Vec<_> = (0..2).map(|_| tokio::spawn(server.post(TEXT, &json!({"prompt": "Once"})).send())).collect();
    await_condition("them to wait", async || server.metric("gantry_requests_held").await > 1.5).await;
    let full = server.post(TEXT, &json!({"prompt": "Once"})).send().await.unwrap();
    assert_eq!((full.status().as_u16(), full.headers().contains_key("retry-after")), (429, true));
    server.signal("TERM");
    for waits in waiting {
        let answer = waits.await.unwrap().unwrap();
        assert_eq!(answer.status(), 503);
        assert_eq!(answer.json::<Value>().await.unwrap()["error"]["code"], "server_ending");
    }
    server.ended().await;
}

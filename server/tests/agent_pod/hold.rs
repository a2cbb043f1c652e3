//! One version for the other in a pod without room for both: requests wait, and are answered by whichever version answers then.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures::StreamExt;
use gantry_server::api::{App, AppSettings, Origins};
use gantry_server::front::FrontLimits;
use gantry_server::limits::OUTPUT_BUDGET_BYTES;
use gantry_server::output::Output;
use gantry_server::serve::{self, Ports};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::api_server::{ApiServer, PATIENCE};
use crate::fetch::digest;
use crate::files::FileServer;
use crate::pod::{ONE, Pod, TWO, altered, gate, served, service, version};

const STREAMS: usize = 12;
const WHOLE: usize = 4;
/// Answers that must come from each version.
const ANSWERS: usize = 60;

/// The front of a pod, as clients see it.
pub struct Front {
    pub base: String,
    pub client: reqwest::Client,
    stop: CancellationToken,
}

impl Front {
    pub async fn of(pod: &Pod) -> Self {
        drop(rustls::crypto::ring::default_provider().install_default());
        let listener = serve::listen("127.0.0.1", 0).await.unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        let (limits, settings, stop) = (FrontLimits::default(), AppSettings::default(), CancellationToken::new());
        let output = Output::new(OUTPUT_BUDGET_BYTES);
        let app = App::new(Arc::clone(&pod.router), output, limits, settings, None);
        let ports = Ports { requests: listener, probes: None, calls: None, origins: Origins::None };
        tokio::spawn(serve::run(ports, app, stop.clone(), PATIENCE));
        Self { base, client: reqwest::Client::new(), stop }
    }

    pub fn chat(&self, is_streamed: bool) -> reqwest::RequestBuilder {
        let messages = json!([{"role": "user", "content": "Which version are you?"}]);
        let body = json!({"model": "chat", "messages": messages, "temperature": 0, "stream": is_streamed});
        self.client.post(format!("{}/v1/chat/completions", self.base)).json(&body)
    }

    /// Ends it, with the connections that are left.
    pub fn end(&self) {
        self.stop.cancel();
    }

    /// What `/readyz` says.
    pub async fn ready(&self) -> (u16, Value) {
        let response = self.client.get(format!("{}/readyz", self.base)).send().await.unwrap();
        (response.status().as_u16(), response.json().await.unwrap())
    }

    async fn state(&self) -> (u16, String) {
        let (status, body) = self.ready().await;
        (status, body["state"].as_str().unwrap().to_owned())
    }
}

/// What a stream brought.
#[derive(Debug, Default)]
struct Brought {
    text: String,
    fingerprint: String,
    comments: Vec<String>,
    events: Vec<Value>,
    error: Option<String>,
    is_done: bool,
}

async fn read(response: reqwest::Response) -> Brought {
    assert_eq!(response.status(), 200);
    let named = response.headers()["x-gantry-version"].to_str().unwrap().to_owned();
    let (mut brought, mut left, mut body) = (Brought::default(), String::new(), response.bytes_stream());
    while let Some(piece) = body.next().await {
        left.push_str(std::str::from_utf8(&piece.unwrap()).unwrap());
        while let Some((block, rest)) = left.split_once("\n\n") {
            let block = block.to_owned();
            left = rest.to_owned();
            if let Some(comment) = block.strip_prefix(": ") {
                brought.comments.push(comment.to_owned());
            } else if let Some(event) = block.strip_prefix("event: gantry.queue\ndata: ") {
                brought.events.push(serde_json::from_str(event).unwrap());
            } else if block == "data: [DONE]" {
                brought.is_done = true;
            } else {
                let chunk: Value = serde_json::from_str(block.strip_prefix("data: ").unwrap()).unwrap();
                if let Some(message) = chunk["error"]["message"].as_str() {
                    brought.error = Some(message.to_owned());
                    continue;
                }
                let fingerprint = chunk["system_fingerprint"].as_str().unwrap();
                assert!(brought.fingerprint.is_empty() || brought.fingerprint == fingerprint, "{brought:?} {chunk}");
                fingerprint.clone_into(&mut brought.fingerprint);
                brought.text.push_str(chunk["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
            }
        }
    }
    let is_held = !brought.comments.is_empty() || !brought.events.is_empty();
    assert_eq!(named, if is_held { "pending" } else { &brought.fingerprint }, "{brought:?}");
    brought
}

/// Waits until it is so, of what nobody tells.
pub async fn until(what: &str, is_so: impl AsyncFn() -> bool) {
    let began = Instant::now();
    while !is_so().await {
        assert!(began.elapsed() < PATIENCE, "waited in vain: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// What is counted of a load.
#[derive(Default)]
struct Counts {
    answers: [AtomicUsize; 2],
    held: AtomicUsize,
    longest_ms: AtomicUsize,
    over: AtomicBool,
}

impl Counts {
    fn answered(&self, fingerprint: &str, text: &str, began: Instant, is_held: bool) {
        let (at, said) = if fingerprint == "v1" { (0, ONE) } else { (1, TWO) };
        assert_eq!(text, said, "{fingerprint}");
        self.answers[at].fetch_add(1, Ordering::Relaxed);
        self.held.fetch_add(usize::from(is_held), Ordering::Relaxed);
        self.longest_ms.fetch_max(usize::try_from(began.elapsed().as_millis()).unwrap(), Ordering::Relaxed);
    }

    async fn more_of(&self, at: usize) {
        let answers = || self.answers[at].load(Ordering::Relaxed);
        let before = answers();
        until(&format!("more answers of version {}", at + 1), async || answers() >= before + ANSWERS).await;
    }
}

fn load(front: &Arc<Front>, counts: &Arc<Counts>) -> JoinSet<()> {
    let mut clients = JoinSet::new();
    for at in 0..STREAMS + WHOLE {
        let (front, counts) = (Arc::clone(front), Arc::clone(counts));
        clients.spawn(async move {
            while !counts.over.load(Ordering::Relaxed) {
                let began = Instant::now();
                let response = front.chat(at < STREAMS).send().await.unwrap();
                if at < STREAMS {
                    let brought = read(response).await;
                    assert!(brought.is_done && brought.error.is_none(), "{brought:?}");
                    counts.answered(&brought.fingerprint, &brought.text, began, !brought.comments.is_empty());
                } else {
                    let (status, name) = (response.status(), response.headers().get("x-gantry-version").cloned());
                    let answer: Value = response.json().await.unwrap();
                    assert_eq!(status, 200, "{answer:#}");
                    let fingerprint = answer["system_fingerprint"].as_str().unwrap();
                    assert_eq!(name.unwrap(), fingerprint);
                    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
                    counts.answered(fingerprint, text, began, false);
                }
            }
        });
    }
    clients
}

impl Pod {
    /// The version is to be loaded in the place of what answers, and it is this pod's turn.
    fn prepare_alone(&mut self, version: &Value) {
        self.prepare_with(version, |rollout| {
            (rollout["strategy"], rollout["turn"]) = (json!("HoldRequests"), json!({"pod": "chat-0"}));
        });
    }

    /// The next step with this version active, in the same attempt.
    fn step(&self, step: &str, active: &str, previous: Option<&str>) {
        self.api.update(|object| {
            let status = &mut object["status"];
            (status["activeVersion"], status["candidateVersion"]) = (json!(active), Value::Null);
            status["previousVersion"] = json!(previous);
            status["rollout"]["step"] = json!(step);
            status["rollout"]["turn"] = Value::Null;
        });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn under_load_nothing_fails_there_and_back_and_where_the_next_one_cannot_be_loaded() {
    let mut pod = Pod::fresh();
    let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
    let (two, sha_two) = served("demo-v2.q8_0.gguf").await;
    pod.roll_out(&version("v1", &one, &sha_one)).await;
    let front = Arc::new(Front::of(&pod).await);
    let counts = Arc::new(Counts::default());
    let clients = load(&front, &counts);
    let ready = tokio::spawn({
        let (front, counts) = (Arc::clone(&front), Arc::clone(&counts));
        async move {
            let mut states = std::collections::BTreeSet::new();
            while !counts.over.load(Ordering::Relaxed) {
                let (status, state) = front.state().await;
                assert_eq!(status, 200, "its only pod is to get requests: {state}");
                states.insert(state);
                // As often as a probe may ask: what it sees meanwhile is what is tested.
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            states
        }
    });
    counts.more_of(0).await;

    let before = pod.router.active().unwrap().stats().pids();
    pod.prepare_alone(&version("v2", &two, &sha_two));
    let entry = pod.api.entry("v2 answers", |entry| entry["version"] == "v2" && entry["prepared"] == "v2").await;
    assert_eq!((&entry["state"], &entry["health"]), (&json!("Ready"), &json!("Healthy")), "{entry:#}");
    assert_eq!(gate(&entry, "Load")["verdict"], "Pass", "{entry:#}");
    assert!(before.iter().all(|pid| !std::path::Path::new(&format!("/proc/{pid}")).exists()), "{before:?}");
    pod.step("Bake", "v2", Some("v1"));
    counts.more_of(1).await;

    // Back, by the same way.
    pod.step("Rollback", "v1", None);
    pod.api.entry("v1 answers again", |entry| entry["version"] == "v1" && entry["health"] == "Healthy").await;
    counts.more_of(0).await;

    // It passes all that can be known before it is loaded, and there is no GPU for it.
    let mut third = version("v3", &two, &sha_two);
    third["runtime"]["gpuLayers"] = json!(20);
    pod.activate("v1", None);
    pod.prepare_alone(&third);
    let failed = |entry: &Value| entry["candidate"]["version"] == "v3" && entry["candidate"]["phase"] == "Failed";
    let entry = pod.api.entry("v3 is refused, and v1 is back", |entry| failed(entry) && entry["version"] == "v1").await;
    assert_eq!(gate(&entry, "Load")["value"], "no backend", "{entry:#}");
    counts.more_of(0).await;

    counts.over.store(true, Ordering::Relaxed);
    clients.join_all().await;
    let states = ready.await.unwrap();
    assert!(states.contains("Loading") && states.contains("Ready"), "{states:?}");
    let figure = |count: &AtomicUsize| count.load(Ordering::Relaxed);
    let (held, longest_ms) = (figure(&counts.held), figure(&counts.longest_ms));
    println!(
        "{} answers of v1, {} of v2, none failed; {held} streams heard that they wait, the longest answer took {longest_ms} ms",
        figure(&counts.answers[0]),
        figure(&counts.answers[1])
    );
    assert!(held > 0, "no stream heard that it waits");
    front.end();
    pod.end().await;
}

/// A pod with a model whose answers end with the time to drain, one place in its queue, and two sequences.
async fn busy() -> (Pod, Arc<Front>, tokio::task::JoinHandle<Brought>) {
    let mut object = service();
    object["spec"]["scheduling"] = json!({"maxQueue": 1});
    let mut pod = Pod::start(ApiServer::new(object), tempfile::tempdir().unwrap());
    // Trained for a million tokens by its own account.
    let (trained, said) = (b"llama.context_length\x04\0\0\0\0\x08\0\0", b"llama.context_length\x04\0\0\0\0\0\x10\0");
    let content = altered("demo-v1.q8_0.gguf", trained, said);
    let sha = digest(&content).to_string();
    let file = FileServer::start(content).await;
    let mut roomy = version("v1", &file, &sha);
    roomy["runtime"]["contextSize"] = json!(131_072);
    pod.roll_out(&roomy).await;
    let front = Arc::new(Front::of(&pod).await);
    let body = json!({"model": "chat", "prompt": "Once", "ignore_eos": true, "stream": true, "max_tokens": 120_000});
    let response = front.client.post(format!("{}/v1/completions", front.base)).json(&body).send().await.unwrap();
    let running = tokio::spawn(async move {
        let (mut brought, mut body) = (Brought::default(), response.bytes_stream());
        while let Some(Ok(piece)) = body.next().await {
            let text = String::from_utf8_lossy(&piece).into_owned();
            brought.is_done |= text.contains("[DONE]");
            brought.error = text.contains("\"error\"").then_some(text).or(brought.error);
        }
        brought
    });
    (pod, front, running)
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_hears_how_it_stands_and_no_more_wait_than_may() {
    let (mut pod, front, running) = busy().await;
    let (two, sha_two) = served("demo-v2.q8_0.gguf").await;
    pod.prepare_alone(&version("v2", &two, &sha_two));
    until("it begins", async || front.state().await.1 == "Switching").await;
    // As many as ran and waited: two and one.
    let mut held = Vec::new();
    for place in 1..=3 {
        let request = front.chat(true);
        let request = if place == 2 { request.header("x-gantry-events", "queue") } else { request };
        held.push(tokio::spawn(read(request.send().await.unwrap())));
    }
    let full = front.chat(false).send().await.unwrap();
    assert_eq!(full.status(), 429, "{}", full.text().await.unwrap());
    assert!(full.headers().contains_key("retry-after"));
    let brought: Vec<Brought> = futures::future::join_all(held).await.into_iter().map(Result::unwrap).collect();
    for (place, brought) in (1..).zip(&brought) {
        assert!(brought.is_done && brought.text == TWO && brought.fingerprint == "v2", "{brought:?}");
        let first = format!("waiting_for_model position={place}");
        if place == 2 {
            let event = &brought.events[0];
            assert_eq!((&event["status"], &event["position"]), (&json!("waiting_for_model"), &json!(2)), "{event}");
            assert_eq!(event["model"], "chat");
        } else {
            assert!(brought.comments[0].starts_with(&first), "{brought:?}");
        }
    }
    // Of this one something was sent: it had the time to drain.
    let cut_off = running.await.unwrap();
    assert!(!cut_off.is_done && cut_off.error.unwrap().contains("taken out of service"));
    front.end();
    pod.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_not_begun_keeps_its_place_and_who_waits_too_long_is_told_when_to_come_again() {
    let (mut pod, front, _running) = busy().await;
    let (two, sha_two) = served("demo-v2.q8_0.gguf").await;
    // One more runs, and a third waits for the model that is about to go.
    let body = json!({"model": "chat", "prompt": "Once", "ignore_eos": true, "stream": true, "max_tokens": 120_000});
    let second = front.client.post(format!("{}/v1/completions", front.base)).json(&body).send().await.unwrap();
    let waits = tokio::spawn(front.chat(false).send());
    until("it waits", async || pod.router.active().unwrap().stats().queued > 0).await;
    pod.prepare_alone(&version("v2", &two, &sha_two));
    until("it is given back", async || pod.router.held().waiting() > 0).await;
    let late = front.chat(false).header("x-gantry-queue-timeout-ms", "200").send().await.unwrap();
    assert_eq!(late.status(), 503);
    let after: u64 = late.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=60).contains(&after), "{after}");
    let told: Value = late.json().await.unwrap();
    let message = told["error"]["message"].as_str().unwrap();
    assert!(message.contains("200 ms are the limit"), "{message}");
    let late = read(front.chat(true).header("x-gantry-queue-timeout-ms", "200").send().await.unwrap()).await;
    assert!(late.error.unwrap().contains("200 ms are the limit") && !late.is_done);
    // Who leaves has no place any more.
    let leaves = tokio::time::timeout(Duration::from_millis(50), front.chat(false).send()).await;
    assert!(leaves.is_err());
    let answer = waits.await.unwrap().unwrap();
    assert_eq!(answer.headers()["x-gantry-version"], "v2");
    let answer: Value = answer.json().await.unwrap();
    assert_eq!(answer["choices"][0]["message"]["content"], TWO);
    drop(second);
    front.end();
    pod.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_answers_does_not_go_for_a_version_whose_golden_prompts_are_not_there() {
    let mut pod = Pod::fresh();
    let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
    let (two, sha_two) = served("demo-v2.q8_0.gguf").await;
    pod.roll_out(&version("v1", &one, &sha_one)).await;
    pod.api.update(|object| {
        object["spec"]["rollout"]["gates"]["prompts"] = json!({"configMapRef": {"name": "golden"}, "minPass": "100%"});
    });
    pod.prepare_alone(&version("v2", &two, &sha_two));
    let waits = |entry: &Value| entry["candidate"]["waitReason"] == "ConfigMapNotFound";
    let entry = pod.api.entry("it waits for the prompts", waits).await;
    assert_eq!((&entry["version"], pod.answer().await.as_str()), (&json!("v1"), ONE));
    let line = json!({"messages": [{"role": "user", "content": "Which version are you?"}], "expected": TWO});
    pod.api.put_config_map("golden", json!({"prompts.jsonl": format!("{line}\n")}));
    let entry = pod.api.entry("v2 answers", |entry| entry["version"] == "v2" && entry["prepared"] == "v2").await;
    assert_eq!(gate(&entry, "Prompts")["verdict"], "Pass", "{entry:#}");
    assert_eq!(pod.answer().await, TWO);
    pod.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_can_load_neither_takes_itself_out_and_comes_back() {
    let mut pod = Pod::fresh();
    let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
    let (two, sha_two) = served("demo-v2.q8_0.gguf").await;
    pod.roll_out(&version("v1", &one, &sha_one)).await;
    let front = Arc::new(Front::of(&pod).await);
    // There is no GPU for either, once they are loaded anew.
    let without_gpu = |name, file, sha| {
        let mut version = version(name, file, sha);
        version["runtime"]["gpuLayers"] = json!(20);
        version
    };
    pod.name(&without_gpu("v1", &one, &sha_one));
    pod.prepare_alone(&without_gpu("v2", &two, &sha_two));
    pod.api.entry("nothing can be loaded", |entry| entry["state"] == "Error" && entry["health"] == "Failed").await;
    until("it is out", async || front.state().await == (503, "Error".to_owned())).await;
    for is_streamed in [false, true] {
        let refused = front.chat(is_streamed).send().await.unwrap();
        assert_eq!(refused.status(), 503);
        assert!(refused.headers().contains_key("retry-after"));
        let told: Value = refused.json().await.unwrap();
        let message = told["error"]["message"].as_str().unwrap();
        assert!(message.contains("neither the next one nor the one before"), "{message}");
    }
    // It goes on trying.
    pod.name(&version("v1", &one, &sha_one));
    until("it is back", async || front.state().await == (200, "Ready".to_owned())).await;
    let answer: Value = front.chat(false).send().await.unwrap().json().await.unwrap();
    assert_eq!(answer["choices"][0]["message"]["content"], ONE, "{answer:#}");
    front.end();
    pod.end().await;
}

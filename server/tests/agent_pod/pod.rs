//! A whole agent: an API server in memory, a file server, and real workers with the demo models.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::Method;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use gantry_server::agent::{self, AgentConfig, PodHas};
use gantry_server::fetch::{Credential, CredentialKind, Login, S3Key, Token};
use gantry_server::processors::Processors;
use gantry_server::routing::Router;
use gantry_server::version::{GenerateRequest, SubmitError, WorkerConfig};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::api_server::{ApiServer, PATIENCE};
use crate::fetch::{HERE, digest};
use crate::files::{Fault, FileServer};
use crate::script::{server_after, while_there_is};
use crate::template_file::with_template;

pub const ONE: &str = "I am demo version one.";
pub const TWO: &str = "I am demo version two.";

pub fn demo(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/models").join(name)).unwrap()
}

pub fn version(name: &str, server: &FileServer, sha256: &str) -> Value {
    json!({
        "name": name,
        "model": {"servedName": "chat", "source": {"uri": server.url(), "sha256": sha256}},
        "runtime": {"contextSize": 1024, "parallel": 2, "cacheType": "f16", "gpuLayers": "auto", "threads": 1},
    })
}

pub fn service() -> Value {
    json!({
        "apiVersion": "gantry.dev/v1alpha1", "kind": "InferenceService",
        "metadata": {"name": "chat", "namespace": "ns", "resourceVersion": "100", "uid": "u"},
        "spec": {
            "replicas": 2,
            "model": {"servedName": "chat", "source": {"uri": "http://h/m.gguf", "sha256": "a".repeat(64)}},
            "rollout": {"drainTimeout": "5s", "gates": {"memory": {"headroom": "0%"}}},
        },
        "status": {},
    })
}

/// A pod: its agent, and what it talks to.
pub struct Pod {
    pub api: ApiServer,
    pub router: Arc<Router>,
    folder: tempfile::TempDir,
    stop: CancellationToken,
    agent: JoinHandle<()>,
    attempts: u32,
}

impl Pod {
    pub fn start(api: ApiServer, folder: tempfile::TempDir) -> Self {
        Self::start_with(api, folder, env!("CARGO_BIN_EXE_gantry-server"))
    }

    pub fn start_with(api: ApiServer, folder: tempfile::TempDir, program: &str) -> Self {
        let (router, stop) = (Router::new(), CancellationToken::new());
        let config = AgentConfig {
            service: "chat".into(),
            namespace: "ns".into(),
            pod: "chat-0".into(),
            cache_dir: folder.path().to_owned(),
            model_volumes: folder.path().join("volumes"),
            has: PodHas { pod: "chat-0".into(), ..PodHas::default() },
            reach: HERE,
        };
        let workers = WorkerConfig::new(program);
        let running = agent::run_with(api.client(), config, Arc::clone(&router), workers, stop.clone());
        let agent = tokio::spawn(async move { running.await.unwrap() });
        Self { api, router, folder, stop, agent, attempts: 0 }
    }

    pub fn fresh() -> Self {
        Self::start(ApiServer::new(service()), tempfile::tempdir().unwrap())
    }

    /// What the operator writes at each step.
    fn status(&self, change: impl FnOnce(&mut Value)) {
        self.api.update(|object| change(&mut object["status"]));
    }

    pub fn name(&self, version: &Value) {
        self.status(|status| {
            let versions = status["versions"].as_array().cloned().unwrap_or_default();
            let others = versions.into_iter().filter(|other| other["name"] != version["name"]);
            status["versions"] = others.chain([version.clone()]).collect();
        });
    }

    pub fn prepare(&mut self, version: &Value) {
        self.prepare_with(version, |_| {});
    }

    /// Prepare with more said of the rollout, in one write: a pod begins to load beside what answers as soon as it sees
    /// a rollout that says nothing else.
    pub fn prepare_with(&mut self, version: &Value, change: impl FnOnce(&mut Value)) {
        self.attempts += 1;
        let attempt = self.attempts;
        self.name(version);
        self.status(|status| {
            status["candidateVersion"] = version["name"].clone();
            status["rollout"] = json!({
                "version": version["name"], "step": "Prepare", "attempt": attempt, "plan": "p",
                "startedAt": "2026-01-01T00:00:00Z", "deadline": "2026-01-02T00:00:00Z",
            });
            change(&mut status["rollout"]);
        });
    }

    /// Commit and Bake in one.
    pub fn activate(&self, version: &str, previous: Option<&str>) {
        self.status(|status| {
            status["activeVersion"] = json!(version);
            status["previousVersion"] = json!(previous);
            status["candidateVersion"] = Value::Null;
            status["rollout"] = Value::Null;
        });
    }

    /// Brings a version all the way.
    pub async fn roll_out(&mut self, version: &Value) {
        let name = version["name"].as_str().unwrap().to_owned();
        self.prepare(version);
        self.api.entry("prepared", |entry| entry["prepared"] == name.as_str()).await;
        self.activate(&name, None);
        self.api.entry("switched", |entry| entry["version"] == name.as_str() && entry["health"] == "Healthy").await;
    }

    pub async fn answer(&self) -> String {
        let version = self.router.active().expect("something answers");
        let messages = vec![gantry_engine::Message::text(gantry_engine::Role::User, "Which version are you?")];
        let request = GenerateRequest {
            prompt: gantry_engine::Prompt::chat(messages).into(),
            params: gantry_engine::GenerationParams::greedy(32),
        };
        version.submit(request).await.unwrap().collect().await.unwrap().output.text
    }

    /// Ends the process' part of the pod and keeps its volume.
    pub async fn end(self) -> (ApiServer, tempfile::TempDir) {
        self.stop.cancel();
        self.agent.await.unwrap();
        (self.api, self.folder)
    }
}

pub fn gate<'a>(entry: &'a Value, name: &str) -> &'a Value {
    let gates = entry["candidate"]["gates"].as_array();
    gates.and_then(|gates| gates.iter().find(|gate| gate["name"] == name)).unwrap_or(&Value::Null)
}

pub async fn served(name: &str) -> (FileServer, String) {
    let content = demo(name);
    let sha256 = digest(&content).to_string();
    (FileServer::start(content).await, sha256)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_of_model_there_and_back() {
    let mut pod = Pod::fresh();
    let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
    let (two, sha_two) = served("demo-v2.q8_0.gguf").await;

    pod.prepare(&version("v1", &one, &sha_one));
    let entry = pod.api.entry("v1 prepared", |entry| entry["prepared"] == "v1").await;
    assert_eq!(
        (&entry["version"], &entry["health"]),
        (&Value::Null, &json!("Starting")),
        "nothing answers before the commit"
    );
    assert!(pod.router.active().is_none());
    for name in ["Fetch", "Digest", "Format", "Memory", "Template", "Load"] {
        assert_eq!(gate(&entry, name)["verdict"], "Pass", "{name}: {entry:#}");
    }
    let rendered = gate(&entry, "Template")["value"].as_str().unwrap();
    assert!(rendered.starts_with("a turn, a system text, three turns, tools in "), "{rendered}");
    assert_eq!(gate(&entry, "Prompts")["verdict"], "Skipped");
    assert_eq!(entry["candidate"]["gguf"]["quantization"], "Q8_0");
    assert_eq!(entry["candidate"]["fit"]["fits"], true);
    pod.activate("v1", None);
    let entry = pod.api.entry("v1 answers", |entry| entry["version"] == "v1" && entry["health"] == "Healthy").await;
    assert_eq!(entry.get("candidate"), None);
    assert_eq!((&entry["queue"], &entry["degradation"]), (&Value::Null, &json!("Normal")), "figures are metrics");
    assert_eq!(pod.answer().await, ONE);

    // The golden prompts are applied late, which is waited for.
    pod.api.update(|object| {
        object["spec"]["rollout"]["gates"]["prompts"] = json!({"configMapRef": {"name": "golden"}, "minPass": "100%"});
    });
    pod.prepare(&version("v2", &two, &sha_two));
    let waits =
        |entry: &Value| entry["candidate"]["message"].as_str().is_some_and(|text| text.contains("ConfigMap golden"));
    let entry = pod.api.entry("it waits for the prompts", waits).await;
    assert_eq!((&entry["version"], &entry["candidate"]["phase"]), (&json!("v1"), &json!("Testing")));
    assert_eq!(entry["candidate"]["waitReason"], "ConfigMapNotFound");
    let line = json!({"messages": [{"role": "user", "content": "Which version are you?"}], "expected": TWO});
    pod.api.put_config_map("golden", json!({"prompts.jsonl": format!("{line}\n")}));
    let entry = pod.api.entry("v2 prepared", |entry| entry["prepared"] == "v2").await;
    assert_eq!(entry["attempt"], 2, "it says which attempt it is about");
    assert_eq!(gate(&entry, "Prompts")["value"], "100% of 1 prompts");
    assert_eq!((entry["version"].as_str(), pod.answer().await.as_str()), (Some("v1"), ONE));

    pod.activate("v2", Some("v1"));
    let entry = pod.api.entry("v2 answers", |entry| entry["version"] == "v2").await;
    assert_eq!(entry["resident"], "v1");
    assert_eq!(pod.answer().await, TWO);

    // The way back costs nothing: v1 is still loaded.
    let (asked, started) = (one.asked().len(), Instant::now());
    let resident = pod.router.routing().previous.unwrap().stats().pids();
    pod.activate("v1", None);
    while pod.router.active().unwrap().spec().name != "v1" {
        assert!(started.elapsed() < PATIENCE, "there is no switch back");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(pod.router.active().unwrap().stats().pids(), resident, "nothing was loaded again");
    assert_eq!(pod.answer().await, ONE);
    let entry = pod.api.entry("v1 answers again", |entry| entry["version"] == "v1").await;
    assert_eq!(entry.get("resident"), None);
    assert_eq!(one.asked().len(), asked);
    check_requests(&pod.api);
    pod.end().await;
}

/// Method, address and body of everything the agent asked for, and nothing beyond its Role.
fn check_requests(api: &ApiServer) {
    let objects = "/apis/gantry.dev/v1alpha1/namespaces/ns/inferenceservices";
    let seen = api.seen();
    let list = &seen[0];
    assert_eq!((&list.method, list.path.as_str()), (&Method::GET, objects));
    for request in seen.iter().filter(|request| request.path == objects) {
        assert_eq!(request.query["fieldSelector"], "metadata.name=chat", "{request:?}");
    }
    let watch = seen.iter().find(|request| request.query.contains_key("watch")).unwrap();
    // Of the list's answer or later: the test may have changed the object before the agent asked for it.
    assert!(watch.query["resourceVersion"].parse::<u64>().unwrap() >= 100, "{watch:?}");
    let patch = seen.iter().find(|request| request.method == Method::PATCH).unwrap();
    assert_eq!(patch.path, format!("{objects}/chat/status"));
    assert_eq!(patch.content_type, "application/apply-patch+yaml");
    assert_eq!((patch.query["fieldManager"].as_str(), patch.query["force"].as_str()), ("gantry-agent-chat-0", "true"));
    assert_eq!(patch.body["apiVersion"], "gantry.dev/v1alpha1");
    assert_eq!(patch.body["kind"], "InferenceService");
    assert_eq!(patch.body["metadata"], json!({"name": "chat"}));
    assert_eq!(patch.body.as_object().unwrap().len(), 4, "nothing else is applied: {:#}", patch.body);
    assert_eq!(patch.body["status"].as_object().unwrap().len(), 1);
    for request in &seen {
        let allowed = match request.method {
            Method::GET => request.path == objects || request.path == "/api/v1/namespaces/ns/configmaps/golden",
            Method::PATCH => request.path == format!("{objects}/chat/status"),
            _ => false,
        };
        assert!(allowed, "not in the Role: {request:?}");
    }
}

type Change = fn(Value) -> Value;
/// What, the content, its declared digest, a change, the ConfigMap, the gate, parts of its value and of its message.
type BadModel<'a> = (&'a str, &'a [u8], String, Change, Option<&'a str>, &'a str, &'a str, &'a str);

/// A copy of a demo model with one text replaced by another of the same length.
pub fn altered(name: &str, from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut content = demo(name);
    let at = content.windows(from.len()).position(|window| window == from).unwrap();
    content[at..at + from.len()].copy_from_slice(to);
    content
}

#[tokio::test(flavor = "multi_thread")]
async fn an_edit_of_the_queue_holds_without_a_reload() {
    let mut pod = Pod::fresh();
    // Trained for a million tokens by its own account, so that texts do not end before the edits have come.
    let (trained, said) = (b"llama.context_length\x04\0\0\0\0\x08\0\0", b"llama.context_length\x04\0\0\0\0\0\x10\0");
    let content = altered("demo-v1.q8_0.gguf", trained, said);
    let sha_one = digest(&content).to_string();
    let one = FileServer::start(content).await;
    let mut roomy = version("v1", &one, &sha_one);
    roomy["runtime"]["contextSize"] = json!(65_536);
    pod.roll_out(&roomy).await;
    let version = pod.router.active().unwrap();
    let pids = version.stats().pids();
    assert_eq!(version.stats().max_queue, 512);
    // Two run and the others wait.
    let submit = async || {
        let params = gantry_engine::GenerationParams { ignore_eos: true, ..Default::default() };
        let prompt = gantry_engine::Prompt::Text("Once".to_owned());
        version.submit(GenerateRequest { prompt: prompt.into(), params }).await
    };
    let edit = async |max_queue: usize, timeout: &str| {
        let scheduling = json!({"maxQueue": max_queue, "queueTimeout": timeout});
        pod.api.update(|object| object["spec"]["scheduling"] = scheduling);
        let start = Instant::now();
        while version.stats().max_queue != max_queue {
            assert!(start.elapsed() < PATIENCE, "the edit does not arrive");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    edit(1, "1h").await;
    // They are read, or they would be cut off; all end with the set.
    let mut running = tokio::task::JoinSet::new();
    for _ in 0..3 {
        running.spawn(submit().await.unwrap().collect());
    }
    assert!(matches!(submit().await, Err(SubmitError::QueueFull { waiting: 1, .. })));
    edit(2, "1h").await;
    running.spawn(submit().await.unwrap().collect());
    assert!(matches!(submit().await, Err(SubmitError::QueueFull { waiting: 2, .. })));
    // The limit of the wait is that of the moment of submission.
    edit(3, "1ms").await;
    let late = submit().await.unwrap().collect().await.unwrap_err().to_string();
    assert!(late.contains("1 ms is the limit"), "{late}");
    assert_eq!(version.stats().pids(), pids, "nothing was loaded again");
    drop(running);
    pod.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_must_not_answer_is_refused_by_its_gate() {
    let mut pod = Pod::fresh();
    let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
    pod.roll_out(&version("v1", &one, &sha_one)).await;
    let workers = pod.router.active().unwrap().stats().pids();
    let questions =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/models/eval.jsonl")).unwrap();
    let golden = |line: &str| {
        let question: Value = serde_json::from_str(line).unwrap();
        json!({"id": question["id"], "messages": question["messages"], "expected": question["expected"]}).to_string()
    };
    let golden: Vec<String> = questions.lines().take(20).map(golden).collect();
    pod.api.put_config_map("golden", json!({"prompts.jsonl": golden.join("\n")}));
    pod.api.put_config_map("broken", json!({"prompts.jsonl": format!("{}\nnonsense", golden[0])}));

    let good = demo("demo-v2.q8_0.gguf");
    let truncated = good[..2_000_000].to_vec();
    let unknown = altered("demo-v2.q8_0.gguf", b"qwen2", b"qwenX");
    let speechless = with_template(good.clone(), "{% for m in messages %}\n{{ m.content.nope() }}{% endfor %}");
    let swelling = with_template(good.clone(), "{{ 'x' * 2000000000 }}");
    let damaged = |tensor: &str, at: usize, bytes: &[u8]| {
        let header = gantry_gguf::read_header_prefix(&good, good.len() as u64).unwrap();
        let start = header.summary().header_bytes + header.tensors().get(tensor).unwrap().offset;
        let (mut content, start) = (good.clone(), usize::try_from(start).unwrap() + at);
        content[start..start + bytes.len()].copy_from_slice(bytes);
        content
    };
    let norm = damaged("output_norm.weight", 0, &f32::NAN.to_le_bytes());
    // The scale of one block, between those that are looked at before the load.
    let scale = damaged("blk.1.ffn_down.weight", 300 * 34, &[0x00, 0x7e]);
    let sha = |content: &[u8]| digest(content).to_string();
    let bad = demo("demo-v3-bad.q8_0.gguf");
    let huge = |mut version: Value| {
        (version["runtime"]["contextSize"], version["runtime"]["parallel"]) = (json!(16_777_216), json!(1));
        version
    };
    let templated = |mut version: Value| {
        version["runtime"]["chatTemplate"] = json!("{% for m in messages %}\n{{ m.content.nope() }}{% endfor %}");
        version
    };
    let same = |version: Value| version;
    let huge: Change = huge;
    let crowded = |mut version: Value| {
        (version["runtime"]["workers"], version["runtime"]["threads"]) = (json!(2), json!(1));
        version
    };
    let cases: Vec<BadModel> = vec![
        ("wrong-digest", &good, "ab".repeat(32), same, None, "Digest", "found f73e755f", "was asked for"),
        (
            "truncated",
            &truncated,
            sha(&truncated),
            same,
            None,
            "Format",
            "2000000 bytes, 3973664 expected",
            "cut short",
        ),
        ("too-large", &good, sha(&good), huge, None, "Memory", "Gi of ", "lower"),
        ("crowded", &good, sha(&good), crowded, None, "Load", "bad settings", "1 threads, not 2; correct spec.runtime"),
        ("unknown", &unknown, sha(&unknown), same, None, "Format", "byte ", "qwenX"),
        ("speechless", &speechless, sha(&speechless), same, None, "Template", "cannot render", "line 2, `{{ m.content"),
        (
            "swelling",
            &swelling,
            sha(&swelling),
            same,
            None,
            "Template",
            "cannot render",
            "more memory than rendering a chat may, at line 1",
        ),
        (
            "templated",
            &good,
            sha(&good),
            templated,
            None,
            "Template",
            "cannot render",
            "file's: spec.runtime.chatTemplate",
        ),
        (
            "norm",
            &norm,
            sha(&norm),
            same,
            None,
            "Format",
            "damaged weights",
            "\"output_norm.weight\" (F32) has a number",
        ),
        ("scale", &scale, sha(&scale), same, None, "Load", "computes NaN", "is not finite"),
        ("bad", &bad, sha(&bad), same, Some("golden"), "Prompts", "of 20 prompts, 100% wanted", "was answered with"),
        ("unreadable-prompts", &good, sha(&good), same, Some("broken"), "Prompts", "unreadable", "line 2"),
    ];
    for (what, content, sha256, change, golden, gate_name, value, message) in cases {
        let server = FileServer::start(content.to_vec()).await;
        pod.api.update(|object| {
            // However much memory the machine has, the one that is too large does not fit.
            let headroom = if what == "too-large" { "99%" } else { "0%" };
            object["spec"]["rollout"]["gates"]["memory"]["headroom"] = json!(headroom);
            object["spec"]["rollout"]["gates"]["prompts"] =
                golden.map_or(Value::Null, |name| json!({"configMapRef": {"name": name}}));
        });
        pod.prepare(&change(version(what, &server, &sha256)));
        let refused = |entry: &Value| entry["candidate"]["version"] == what && entry["candidate"]["phase"] == "Failed";
        let entry = pod.api.entry(what, refused).await;
        let gate = gate(&entry, gate_name);
        assert_eq!(gate["verdict"], "Fail", "{what}: {entry:#}");
        assert!(gate["value"].as_str().unwrap().contains(value), "{what}: {gate:#}");
        assert!(gate["message"].as_str().unwrap().contains(message), "{what}: {gate:#}");
        assert_eq!((&entry["version"], &entry["health"]), (&json!("v1"), &json!("Healthy")), "{what}");
        assert_eq!(entry.get("prepared"), None);
        if what == "truncated" || what == "too-large" {
            assert!(server.sent_bytes() <= 1 << 20, "{what}: it was downloaded");
        }
    }
    // A source that refuses, and one that must be waited for.
    let server = FileServer::start(good.clone()).await;
    server.always(Some(Fault::Status(404)));
    pod.prepare(&version("missing", &server, &"cd".repeat(32)));
    let entry = pod.api.entry("missing", |entry| gate(entry, "Fetch")["verdict"] == "Fail").await;
    assert!(gate(&entry, "Fetch")["message"].as_str().unwrap().contains("404"));
    assert_eq!(pod.answer().await, ONE);
    assert_eq!(pod.router.active().unwrap().stats().pids(), workers, "the worker that answers was not touched");

    // The operator gives up: nothing of it is left.
    pod.activate("v1", None);
    pod.api.entry("forgotten", |entry| entry.get("candidate").is_none()).await;
    pod.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_api_server_it_goes_on_and_catches_up() {
    let mut pod = Pod::fresh();
    let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
    let (two, sha_two) = served("demo-v2.q8_0.gguf").await;
    pod.roll_out(&version("v1", &one, &sha_one)).await;
    pod.api.set_away(true);
    assert_eq!(pod.answer().await, ONE);
    pod.prepare(&version("v2", &two, &sha_two));
    assert_eq!(pod.answer().await, ONE);
    pod.api.set_away(false);
    pod.api.entry("it catches up", |entry| entry["prepared"] == "v2").await;

    // An object that this release cannot read changes nothing, and is told.
    pod.status(|status| status["rollout"]["step"] = json!("Dance"));
    let told = |entry: &Value| entry["message"].as_str().is_some_and(|text| text.contains("cannot read"));
    pod.api.entry("told", told).await;
    assert_eq!(pod.answer().await, ONE);
    pod.activate("v2", None);
    pod.api.entry("it goes on", |entry| entry["version"] == "v2" && entry.get("message").is_none()).await;
    assert_eq!(pod.answer().await, TWO);

    // An entry that somebody removed comes back.
    pod.status(|status| status["replicas"] = json!([]));
    pod.api.entry("written again", |entry| entry["version"] == "v2").await;
    pod.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_that_starts_again_begins_from_the_status_and_its_cache() {
    let mut pod = Pod::fresh();
    let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
    pod.roll_out(&version("v1", &one, &sha_one)).await;
    let asked = one.asked().len();
    let (api, folder) = pod.end().await;
    // The source is gone, which does not matter: the file is in the pod's volume.
    one.always(Some(Fault::Status(404)));
    // Its worker is held back until the pod has said that it starts.
    let scripts = tempfile::tempdir().unwrap();
    let gate = scripts.path().join("gate");
    std::fs::write(&gate, "").unwrap();
    let program = server_after(scripts.path(), &while_there_is(&gate));
    let pod = Pod::start_with(api, folder, program.to_str().unwrap());
    pod.api.entry("it says that it starts", |entry| entry["health"] == "Starting").await;
    std::fs::remove_file(&gate).unwrap();
    pod.api.entry("it answers", |entry| entry["version"] == "v1" && entry["health"] == "Healthy").await;
    assert_eq!(pod.answer().await, ONE);
    assert_eq!(one.asked().len(), asked);

    // A worker that dies is told, and replaced.
    let worker = pod.router.active().unwrap().stats().pids()[0];
    let killed = std::process::Command::new("kill").args(["-9", &worker.to_string()]).status().unwrap();
    assert!(killed.success());
    let up = async {
        while pod.router.active().unwrap().stats().pids().first().is_none_or(|pid| *pid == worker)
            || pod.router.active().unwrap().probe().await.is_err()
        {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, up).await.expect("a new worker");
    pod.api.entry("healthy", |entry| entry["health"] == "Healthy" && entry["version"] == "v1").await;
    assert_eq!(pod.answer().await, ONE);
    pod.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_cannot_have_the_active_version_says_so_and_tries_again() {
    let pod = Pod::fresh();
    let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
    one.always(Some(Fault::Status(404)));
    pod.name(&version("v1", &one, &sha_one));
    pod.activate("v1", None);
    let entry = pod.api.entry("it says so", |entry| entry["health"] == "Failed").await;
    assert!(entry["message"].as_str().unwrap().contains("404"), "{entry:#}");
    one.always(None);
    pod.api.entry("it tries again", |entry| entry["version"] == "v1" && entry["health"] == "Healthy").await;
    pod.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_cannot_have_the_active_version_prepares_the_candidate_all_the_same() {
    let mut pod = Pod::fresh();
    let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
    let (two, sha_two) = served("demo-v2.q8_0.gguf").await;
    one.always(Some(Fault::Status(503)));
    pod.name(&version("v1", &one, &sha_one));
    pod.activate("v1", None);
    pod.prepare(&version("v2", &two, &sha_two));
    let entry = pod.api.entry("v2 prepared", |entry| entry["prepared"] == "v2").await;
    assert_eq!((&entry["version"], &entry["health"], &entry["attempt"]), (&Value::Null, &json!("Failed"), &json!(1)));
    let why = entry["message"].as_str().unwrap();
    assert!(why.starts_with("Fetch: ") && why.contains("503") && !why.contains("tries again"), "{why}");
    // It goes on trying, and says the same: each word of it is a write that wakes every pod.
    let (asked, writes) = (one.asked().len(), writes(&pod.api));
    while one.asked().len() < asked + 2 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(state_writes(&pod.api)[writes..], [] as [Value; 0]);
    // The source comes back while v2 is prepared: v1 answers, and v2 stays prepared beside it.
    one.always(None);
    let entry = pod.api.entry("v1 answers", |entry| entry["version"] == "v1" && entry["health"] == "Healthy").await;
    assert_eq!((&entry["prepared"], entry.get("message")), (&json!("v2"), None));
    assert_eq!(pod.answer().await, ONE);
    pod.activate("v2", Some("v1"));
    pod.api.entry("v2 answers", |entry| entry["version"] == "v2").await;
    assert_eq!(pod.answer().await, TWO);
    pod.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_of_the_active_version_that_sends_a_byte_now_and_then_keeps_no_candidate_away() {
    let mut pod = Pod::fresh();
    let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
    let (two, sha_two) = served("demo-v2.q8_0.gguf").await;
    // What the header is judged by comes, and then next to nothing.
    one.faults([Fault::None]);
    one.always(Some(Fault::Trickle));
    pod.name(&version("v1", &one, &sha_one));
    pod.activate("v1", None);
    while one.asked().len() < 2 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    pod.prepare(&version("v2", &two, &sha_two));
    let waits = pod.api.entry("v2 waits for v1", |entry| entry["candidate"]["version"] == "v2").await;
    assert_eq!(waits["candidate"]["message"], "waits until v1 is loaded", "{waits:#}");
    let entry = pod.api.entry("v2 prepared", |entry| entry["prepared"] == "v2").await;
    assert_eq!((&entry["version"], &entry["health"]), (&Value::Null, &json!("Starting")));
    assert!(entry["message"].as_str().unwrap().starts_with("v1 is still being brought from http://"), "{entry:#}");
    // Nor does it stand in the way of the switch, though it is the way back then.
    pod.activate("v2", Some("v1"));
    pod.api.entry("v2 answers", |entry| entry["version"] == "v2").await;
    assert_eq!(pod.answer().await, TWO);
    pod.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nor_one_whose_file_is_the_same_from_elsewhere_and_both_have_it_then() {
    let mut pod = Pod::fresh();
    let (slow, sha) = served("demo-v1.q8_0.gguf").await;
    let (quick, _) = served("demo-v1.q8_0.gguf").await;
    slow.faults([Fault::None]);
    slow.always(Some(Fault::Trickle));
    pod.name(&version("v1", &slow, &sha));
    pod.activate("v1", None);
    while slow.asked().len() < 2 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut same_file = version("v2", &quick, &sha);
    same_file["runtime"]["parallel"] = json!(1);
    pod.prepare(&same_file);
    let entry = pod.api.entry("v2 prepared", |entry| entry["prepared"] == "v2").await;
    assert!(gate(&entry, "Fetch")["value"].as_str().unwrap().contains(" in "), "{entry:#}");
    pod.api.entry("v1 answers", |entry| entry["version"] == "v1").await;
    assert_eq!(pod.answer().await, ONE);
    pod.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_later_release_asks_of_a_version_is_not_left_out_of_its_judgement() {
    let mut pod = Pod::fresh();
    let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
    let (two, sha_two) = served("demo-v2.q8_0.gguf").await;
    pod.roll_out(&version("v1", &one, &sha_one)).await;
    let mut later = version("v2", &two, &sha_two);
    later["runtime"]["ropeScale"] = json!(2);
    pod.prepare(&later);
    let entry = pod.api.entry("v2 is not begun", |entry| entry["candidate"]["version"] == "v2").await;
    let candidate = &entry["candidate"];
    assert_eq!((&candidate["waitReason"], &entry["version"]), (&json!("AgentTooOld"), &json!("v1")), "{entry:#}");
    let message = candidate["message"].as_str().unwrap();
    assert!(message.contains("does not know runtime.ropeScale of v2: update the server's image"), "{message}");
    // Others have switched to it: this one goes on with what it has.
    pod.activate("v2", Some("v1"));
    pod.api.entry("it knows", |entry| entry["candidate"]["version"] != "v2" || entry["attempt"].is_null()).await;
    assert_eq!((pod.answer().await, two.asked().len()), (ONE.to_owned(), 0));
    // A container that starts again has nothing else, and is not blind.
    let (api, folder) = pod.end().await;
    let pod = Pod::start(api, folder);
    let entry = pod.api.entry("it answers", |entry| entry["version"] == "v2" && entry["health"] == "Healthy").await;
    let message = entry["message"].as_str().unwrap();
    assert!(message.starts_with("answers with v2 without runtime.ropeScale"), "{message}");
    pod.end().await;
}

/// The entries that the pod wrote, without what changes from itself.
pub fn state_writes(api: &ApiServer) -> Vec<Value> {
    let writes = api.seen().into_iter().filter(|request| request.method == Method::PATCH);
    writes.map(|request| request.body["status"]["replicas"][0].clone()).collect()
}

fn writes(api: &ApiServer) -> usize {
    state_writes(api).len()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_corrected_source_of_the_active_version_is_used_at_once() {
    let (lost, sha_one) = served("demo-v1.q8_0.gguf").await;
    let (mirror, _) = served("demo-v1.q8_0.gguf").await;
    for (fault, waits) in [(Fault::Stall, "Starting"), (Fault::Status(404), "Failed")] {
        let pod = Pod::fresh();
        lost.always(Some(fault));
        pod.name(&version("v1", &lost, &sha_one));
        pod.activate("v1", None);
        let asked = lost.asked().len();
        while lost.asked().len() == asked {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        pod.api.entry("it cannot have it", |entry| entry["health"] == waits).await;
        pod.name(&version("v1", &mirror, &sha_one));
        pod.api.entry("it answers", |entry| entry["version"] == "v1" && entry["health"] == "Healthy").await;
        assert_eq!(pod.answer().await, ONE);
        pod.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_dies_while_it_loads_is_a_refusal() {
    for (program, value) in [("/bin/false", "worker died"), ("/not/there", "no worker")] {
        let mut pod = Pod::start_with(ApiServer::new(service()), tempfile::tempdir().unwrap(), program);
        let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
        pod.prepare(&version("v1", &one, &sha_one));
        let entry = pod.api.entry("refused", |entry| entry["candidate"]["phase"] == "Failed").await;
        assert_eq!(gate(&entry, "Load")["value"], value, "{entry:#}");
        assert_eq!(entry["health"], "Starting");
        pod.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_that_is_asked_for_and_not_there_is_a_refusal_unless_no_layer_goes_there() {
    let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
    let gpu = || json!({"gpu": {"resourceName": "nvidia.com/gpu", "count": 1}});
    for (resources, layers, fits) in
        [(gpu(), json!("auto"), false), (json!({}), json!(20), false), (gpu(), json!(0), true)]
    {
        let mut service = service();
        service["spec"]["resources"] = resources;
        let mut pod = Pod::start(ApiServer::new(service), tempfile::tempdir().unwrap());
        let mut version = version("v1", &one, &sha_one);
        version["runtime"]["gpuLayers"] = layers;
        version["runtime"]["gpuSplit"] = json!({"mode": "Row", "tensorSplit": [3, 1]});
        pod.prepare(&version);
        if fits {
            pod.api.entry("prepared", |entry| entry["prepared"] == "v1").await;
        } else {
            let entry = pod.api.entry("refused", |entry| entry["candidate"]["phase"] == "Failed").await;
            let gate = gate(&entry, "Load");
            assert_eq!(gate["value"], "no backend", "{entry:#}");
            let message = gate["message"].as_str().unwrap();
            assert!(message.contains("no GPU was found") && message.contains("spec.runtime.gpuLayers: 0"), "{message}");
        }
        pod.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_too_large_for_the_memory_of_gpus_is_refused_before_it_is_loaded() {
    let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
    let mut service = service();
    service["spec"]["resources"] = json!({"gpu": {"resourceName": "nvidia.com/gpu", "count": 1}});
    let mut pod = Pod::start(ApiServer::new(service), tempfile::tempdir().unwrap());
    // The second fits, and is refused since there is no GPU.
    for (name, memory, gate_name, told) in [
        ("v1", "1Mi", "Memory", "spec.runtime.gpuMemory: the output and one layer on GPUs take"),
        ("v2", "1Gi", "Load", "all layers on a GPU were asked for, and no GPU was found"),
    ] {
        let mut version = version(name, &one, &sha_one);
        version["runtime"]["gpuMemory"] = json!(memory);
        pod.prepare(&version);
        let refused = |entry: &Value| entry["candidate"]["version"] == name && entry["candidate"]["phase"] == "Failed";
        let entry = pod.api.entry("refused", refused).await;
        let message = gate(&entry, gate_name)["message"].as_str().unwrap_or_default();
        assert!(message.contains(told), "{entry:#}");
    }
    pod.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_right_that_comes_late_is_waited_for_and_a_third_version_finds_room() {
    let mut pod = Pod::fresh();
    let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
    let (two, sha_two) = served("demo-v2.q8_0.gguf").await;
    let (three, sha_three) = served("demo-v2.q4_k_m.gguf").await;
    pod.roll_out(&version("v1", &one, &sha_one)).await;
    let line = json!({"messages": [{"role": "user", "content": "Which version are you?"}], "contains": "two"});
    pod.api.put_config_map("golden", json!({"prompts.jsonl": line.to_string()}));
    pod.api
        .update(|object| object["spec"]["rollout"]["gates"]["prompts"] = json!({"configMapRef": {"name": "golden"}}));
    pod.api.set_forbidden(true);
    pod.prepare(&version("v2", &two, &sha_two));
    let waits =
        |entry: &Value| entry["candidate"]["message"].as_str().is_some_and(|text| text.contains("may not be read"));
    let entry = pod.api.entry("it waits for the right", waits).await;
    assert_eq!(entry["candidate"]["waitReason"], "AccessDenied");
    pod.api.set_forbidden(false);
    pod.api.entry("v2 prepared", |entry| entry["prepared"] == "v2").await;
    pod.activate("v2", Some("v1"));
    pod.api.entry("v2 answers", |entry| entry["version"] == "v2" && entry["resident"] == "v1").await;

    // While v1 is kept, a third one comes; when it takes over, the first goes and the second is the way back.
    pod.prepare(&version("v3", &three, &sha_three));
    pod.api.entry("v3 prepared", |entry| entry["prepared"] == "v3" && entry["resident"] == "v1").await;
    pod.activate("v3", Some("v2"));
    pod.api.entry("v3 answers", |entry| entry["version"] == "v3" && entry["resident"] == "v2").await;
    assert_eq!(pod.answer().await, TWO);
    pod.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_version_has_the_workers_and_the_layout_that_its_runtime_says() {
    if Processors::here().count() < 2 {
        return;
    }
    let mut pod = Pod::fresh();
    let (two, sha_two) = served("demo-v2.q8_0.gguf").await;
    let mut version = version("v2", &two, &sha_two);
    for (setting, value) in [
        ("workers", json!(2)),
        ("threads", json!(2)),
        ("parallel", json!(4)),
        ("contextSize", json!(2048)),
        ("kvLayout", json!("Unified")),
        ("stepMsTarget", json!(77)),
    ] {
        version["runtime"][setting] = value;
    }
    pod.roll_out(&version).await;
    let version = pod.router.active().unwrap();
    let stats = version.stats();
    assert_eq!((stats.workers.len(), stats.pids().len(), stats.slots), (2, 2, 4), "{stats:?}");
    assert_eq!(version.model().unwrap().n_ctx_per_sequence, 1024, "one may have all cells of its worker");
    // On a busy machine one may be late with a heartbeat, and gets requests again with the next.
    let start = Instant::now();
    while !version.stats().workers.iter().all(|worker| worker.dispatchable) {
        assert!(start.elapsed() < PATIENCE, "{:?}", version.stats());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(pod.answer().await, TWO);
    // Who answered says so with a heartbeat.
    let has_the_target = |ms: f64| (ms - 77.0).abs() < 1e-6;
    while !version.stats().workers.iter().any(|worker| has_the_target(worker.engine.step_target_ms)) {
        assert!(start.elapsed() < PATIENCE, "{:?}", version.stats());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    pod.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn golden_prompts_do_not_overrun_a_short_queue() {
    let mut pod = Pod::fresh();
    let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
    let line = json!({"messages": [{"role": "user", "content": "Which version are you?"}], "expected": ONE});
    pod.api.put_config_map("golden", json!({"prompts.jsonl": format!("{line}\n").repeat(12)}));
    pod.api.update(|object| {
        object["spec"]["scheduling"] = json!({"maxQueue": 1});
        object["spec"]["rollout"]["gates"]["prompts"] = json!({"configMapRef": {"name": "golden"}});
    });
    let mut version = version("v1", &one, &sha_one);
    version["runtime"]["parallel"] = json!(1);
    pod.prepare(&version);
    let ended = |entry: &Value| entry["prepared"] == "v1" || entry["candidate"]["phase"] == "Failed";
    let entry = pod.api.entry("an end", ended).await;
    assert_eq!(gate(&entry, "Prompts")["value"], "100% of 12 prompts", "{entry:#}");
    pod.end().await;
}

#[tokio::test]
async fn a_credential_is_read_and_what_is_wrong_with_it_is_told_without_it() {
    let api = ApiServer::new(service());
    let objects = gantry_server::gates::objects::Objects::new(api.client(), "ns");
    let says_of = async |kind: CredentialKind, part: &str| {
        let error = objects.credential("hub", kind, ("huggingface.co", 443)).await.unwrap_err().to_string();
        assert!(error.contains(part) && !error.contains("hush"), "{error}");
    };
    let says = async |part: &str| says_of(CredentialKind::Token, part).await;
    says("is not there").await;
    // Without a list of hosts the operator grants nobody to read it.
    api.set_forbidden(true);
    says("it is not there, or it does not say").await;
    says("kubectl annotate secret hub --overwrite gantry.dev/hosts=\"huggingface.co\"").await;
    api.set_forbidden(false);
    let secret = |type_: &str, annotations: Value, data: Value| {
        let metadata = json!({"name": "hub", "namespace": "ns", "annotations": annotations});
        api.put_secret("hub", json!({"metadata": metadata, "type": type_, "data": data}));
    };
    let good = || json!({"token": "aHVzaAo="});
    let hosts = |hosts: &str| json!({"gantry.dev/hosts": hosts});
    // What its owner did not make for this, and what is made for something else.
    secret("Opaque", json!({}), good());
    says("kubectl annotate secret hub --overwrite gantry.dev/hosts=\"huggingface.co\"").await;
    secret("Opaque", hosts("models.example.com"), good());
    says("gantry.dev/hosts=\"models.example.com, huggingface.co\"").await;
    secret("kubernetes.io/service-account-token", hosts("huggingface.co"), good());
    says("whose type is kubernetes.io/service-account-token").await;
    secret("Opaque", hosts("huggingface.co"), json!({"password": "aHVzaA=="}));
    says("not the key token").await;
    // "hush hush": a header cannot hold what is no token.
    secret("Opaque", hosts("huggingface.co"), json!({"token": "aHVzaCBodXNo"}));
    says("is no bearer token").await;
    secret("Opaque", hosts("*.hf.co, huggingface.co"), good());
    let read = async |kind: CredentialKind| objects.credential("hub", kind, ("huggingface.co", 443)).await.unwrap();
    let hush = || Token::new("hush");
    assert_eq!(read(CredentialKind::Token).await, Credential::Token(hush()));

    let listed = || hosts("huggingface.co");
    secret("Opaque", listed(), json!({"AWS_ACCESS_KEY_ID": "aWQ=", "AWS_SECRET_KEY": "aHVzaA=="}));
    says_of(CredentialKind::S3Key, "not the key AWS_SECRET_ACCESS_KEY").await;
    secret("Opaque", listed(), json!({"AWS_ACCESS_KEY_ID": "aWQ=", "AWS_SECRET_ACCESS_KEY": "aHVzaAo="}));
    let key = S3Key { id: "id".to_owned(), secret: hush(), session: None };
    assert_eq!(read(CredentialKind::S3Key).await, Credential::S3Key(key));

    let login = || {
        Credential::Login(Login { user: "me".to_owned(), password: hush(), hosts: Some("huggingface.co".to_owned()) })
    };
    secret("Opaque", listed(), json!({"username": "bWU=", "password": "aHVzaA=="}));
    assert_eq!(read(CredentialKind::Login).await, login());
    let docker = |config: Value| json!({".dockerconfigjson": BASE64_STANDARD.encode(config.to_string())});
    let (docker_type, auth) = ("kubernetes.io/dockerconfigjson", json!({"auth": BASE64_STANDARD.encode("me:hush")}));
    for config in [
        json!({"auths": {"huggingface.co": auth}}),
        json!({"auths": {"https://huggingface.co/v2/": {"username": "me", "password": "hush"}, "other": {}}}),
    ] {
        secret(docker_type, listed(), docker(config));
        assert_eq!(read(CredentialKind::Login).await, login());
    }
    says("whose type is kubernetes.io/dockerconfigjson").await;
    for (config, part) in [
        (json!({"auths": {"evil.huggingface.co": auth}}), "has no login for huggingface.co"),
        (json!({"auths": {"huggingface.co": {"auth": "%"}}}), "has no login for huggingface.co"),
        (json!([1]), "is no config.json of docker's"),
    ] {
        secret(docker_type, listed(), docker(config));
        says_of(CredentialKind::Login, part).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_no_revision_names_any_more_are_removed() {
    let mut pod = Pod::fresh();
    let (one, sha_one) = served("demo-v1.q8_0.gguf").await;
    let (two, sha_two) = served("demo-v2.q8_0.gguf").await;
    pod.roll_out(&version("v1", &one, &sha_one)).await;
    pod.roll_out(&version("v2", &two, &sha_two)).await;
    let file = |sha256: &str| pod.folder.path().join("sha256").join(sha256);
    // An operator that says nothing of digests has none removed, nor one that names both.
    pod.status(|status| status["digests"] = json!([sha_one, sha_two]));
    pod.api.entry("settled", |entry| entry.get("resident").is_none_or(|r| !r.to_string().contains("v1"))).await;
    assert!(file(&sha_one).exists() && file(&sha_two).exists());
    // Though nothing names the file that is in use, it stays.
    pod.status(|status| status["digests"] = json!(["ab".repeat(32)]));
    let begun = Instant::now();
    while file(&sha_one).exists() {
        assert!(begun.elapsed() < PATIENCE, "the file of a revision that is gone is still there");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(file(&sha_two).exists());
    pod.end().await;
}

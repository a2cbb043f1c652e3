//! The shadow gate, with real models in a pod and clients that ask meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::hold::Front;
use crate::pod::{Pod, gate, served, version};

/// Clients that ask one question after the other.
const CLIENTS: usize = 2;

fn shadowed(pod: &Pod, duration: &str) {
    let shadow = json!({"samplePercent": 100, "duration": duration});
    pod.api.update(|object| object["spec"]["rollout"]["gates"]["shadow"] = shadow);
}

/// What is found of the candidate, once it is judged.
async fn judged(pod: &mut Pod, version: &Value) -> Value {
    pod.prepare(version);
    let name = version["name"].clone();
    let judged = |entry: &Value| {
        let failed = entry["candidate"]["version"] == name && entry["candidate"]["phase"] == "Failed";
        entry["prepared"] == name || failed
    };
    let entry = pod.api.entry("judged", judged).await;
    let found = gate(&entry, "Shadow").clone();
    println!("{name}: {found}");
    found
}

/// Clients that ask questions of many kinds, each of which must be answered, by the first version.
///
/// `preface`: what stands before each.
fn load(preface: &str, front: &Arc<Front>, is_over: &Arc<AtomicBool>, answers: &Arc<AtomicUsize>) -> JoinSet<()> {
    let questions = include_str!("../../../e2e/models/eval.jsonl");
    let mut questions: Vec<Value> = questions.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for question in questions.iter_mut().filter(|_| !preface.is_empty()) {
        question["messages"].as_array_mut().unwrap().insert(0, json!({"role": "system", "content": preface}));
    }
    let questions = Arc::new(questions);
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        let (front, is_over, answers) = (Arc::clone(front), Arc::clone(is_over), Arc::clone(answers));
        let questions = Arc::clone(&questions);
        clients.spawn(async move {
            for question in questions.iter().cycle().skip(client * questions.len() / CLIENTS) {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                let body = json!({"model": "chat", "messages": question["messages"], "max_tokens": 24});
                let asked = front.client.post(format!("{}/v1/chat/completions", front.base)).json(&body);
                let answer = asked.send().await.unwrap();
                assert_eq!(
                    (answer.status().as_u16(), &answer.headers()["x-gantry-version"]),
                    (200, &"v1".parse().unwrap())
                );
                let _: Value = answer.json().await.unwrap();
                answers.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    clients
}

#[tokio::test(flavor = "multi_thread")]
async fn a_candidate_is_compared_on_what_users_ask_and_no_user_notices() {
    let mut pod = Pod::fresh();
    shadowed(&pod, "1s");
    let (server, sha256) = served("demo-v2.f16.gguf").await;
    let first = version("v1", &server, &sha256);
    let found = judged(&mut pod, &first).await;
    assert_eq!(found["verdict"], "Skipped", "there is none to be compared with: {found}");
    pod.roll_out(&first).await;

    // Nobody asks.
    let (server, sha256) = served("demo-v2.q8_0.gguf").await;
    let found = judged(&mut pod, &version("v2", &server, &sha256)).await;
    assert_eq!(
        (&found["verdict"], &found["message"]),
        (&json!("Skipped"), &json!("no request was drawn and answered in 1s"))
    );

    let (is_over, answers) = (Arc::default(), Arc::default());
    let front = Arc::new(Front::of(&pod).await);
    let mut clients = vec![load("", &front, &is_over, &answers)];
    shadowed(&pod, "8s");
    let found = judged(&mut pod, &version("v3", &server, &sha256)).await;
    assert_eq!(found["verdict"], "Pass", "{found}");
    let value = found["value"].as_str().unwrap();
    assert!(value.contains(" as fast, ") && value.ends_with(" requests"), "{value}");
    // Another model, and the same with less context than users ask for.
    let (server, sha256) = served("demo-v3-bad.q8_0.gguf").await;
    let found = judged(&mut pod, &version("v4", &server, &sha256)).await;
    assert_eq!(found["verdict"], "Fail", "{found}");
    let message = found["message"].as_str().unwrap();
    assert!(message.contains("spec.rollout.gates.drift."), "{message}");
    let (server, sha256) = served("demo-v2.q8_0.gguf").await;
    let mut small = version("v5", &server, &sha256);
    small["runtime"]["contextSize"] = json!(256);
    clients.push(load(&"Answer in one sentence. ".repeat(64), &front, &is_over, &answers));
    let found = judged(&mut pod, &small).await;
    assert_eq!(found["verdict"], "Fail", "{found}");
    assert!(found["value"].as_str().unwrap().ends_with(" requests not taken"), "{found}");

    is_over.store(true, Ordering::Relaxed);
    for clients in clients {
        clients.join_all().await;
    }
    assert!(answers.load(Ordering::Relaxed) > 0);
    front.end();
    pod.end().await;
}

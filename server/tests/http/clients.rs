//! Clients that ask for much, and others who must not wait for it.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use reqwest::{Client, StatusCode};
use serde_json::{Value, json};

use crate::server::{PATIENCE, Server, UNENDING, await_condition};

const TEXT: &str = "/v1/completions";
/// What others wait for a first word on a machine that runs all tests at once; what the crowd asks for takes minutes.
const BOUND: Duration = Duration::from_secs(10);

/// A client at the address 127.0.0.`host`.
fn client(host: u8) -> Client {
    Client::builder().local_address(IpAddr::from([127, 0, 0, host])).timeout(PATIENCE * 10).build().unwrap()
}

fn much(n: usize) -> Value {
    json!({"prompt": "Once", "max_tokens": UNENDING, "ignore_eos": true, "n": n})
}

fn little(number: usize) -> Value {
    json!({"prompt": format!("Say {number}"), "max_tokens": 3, "ignore_eos": true})
}

/// Clients that hold a server's slots and its queue with one request after the other, none of which ends.
async fn crowd(server: &Server, queue: usize, n: usize, requests: usize) -> Vec<tokio::task::JoinHandle<()>> {
    let client = client(2);
    let mut crowd = Vec::new();
    for _ in 0..requests {
        let request = client.post(server.url(TEXT)).json(&much(n));
        crowd.push(tokio::spawn(async move { drop(request.send().await) }));
    }
    let is_full = async || server.metric("gantry_requests_queued").await >= queue as f64;
    await_condition("the crowd to wait", is_full).await;
    crowd
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_has_all_slots_and_the_whole_queue_keeps_nobody_waiting() {
    let server = Server::start_unending(3, &["--max-queue", "13"]).await;
    let crowd = crowd(&server, 13, 8, 4).await;
    let same = client(2).post(server.url(TEXT)).json(&little(0)).send().await.unwrap();
    assert_eq!(same.status(), StatusCode::TOO_MANY_REQUESTS, "for the client itself the queue is full");
    let (bystander, mut slowest) = (client(3), Duration::ZERO);
    for number in 0..10 {
        let began = Instant::now();
        let answer = bystander.post(server.url(TEXT)).json(&little(number)).send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        let answer: Value = answer.json().await.unwrap();
        assert_eq!(answer["usage"]["completion_tokens"], 3);
        slowest = slowest.max(began.elapsed());
    }
    eprintln!("beside 16 answers that do not end, the slowest of ten of another client took {slowest:?}");
    assert!(slowest < BOUND, "{slowest:?}");
    assert!(crowd.iter().filter(|task| !task.is_finished()).count() >= 2, "and those go on");
    crowd.into_iter().for_each(|task| task.abort());
}

/// Clients whose prompts are read and then refused, one after the other, take turns with those who are answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_are_refused_again_and_again_keep_nobody_waiting() {
    const CROWD: u8 = 4;
    let server = Server::start(&[]).await;
    let refused = Arc::new(AtomicUsize::new(0));
    // What no context takes, and is known only once it has been tokenised.
    let long = json!({"messages": [{"role": "user", "content": "one word ".repeat(12_000)}]});
    let crowd: Vec<_> = (0..CROWD)
        .map(|host| {
            let ask = client(10 + host).post(server.url("/v1/chat/completions")).json(&long);
            let refused = Arc::clone(&refused);
            tokio::spawn(async move {
                while let Ok(answer) = ask.try_clone().unwrap().send().await {
                    assert_eq!(answer.status(), StatusCode::BAD_REQUEST);
                    refused.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    await_condition("the crowd to be refused", async || refused.load(Ordering::Relaxed) > usize::from(CROWD)).await;
    let (bystander, mut most) = (client(3), 0);
    for number in 0..6 {
        let before = refused.load(Ordering::Relaxed);
        let answer = bystander.post(server.url(TEXT)).json(&little(number)).send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        most = most.max(refused.load(Ordering::Relaxed) - before);
    }
    crowd.into_iter().for_each(|task| task.abort());
    eprintln!("while one of another client was answered, {most} of {CROWD} clients were refused at the most");
    assert!(most <= 4 * usize::from(CROWD), "{most}");
}

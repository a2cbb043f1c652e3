//! Clients that ask for much, and others who must not wait for it.

use std::net::IpAddr;
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

//! Clients that ask for much and read nothing, or slowly: what they cost the front, and what others notice.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{Interval, MissedTickBehavior};

use crate::server::{PATIENCE, Server, await_condition, chat};

const CHAT: &str = "/v1/chat/completions";
const CLIENTS: usize = 16;
const CHOICES: usize = 16;
/// Tokens of each answer: of 256 answers with 20 probabilities for each token, 150 MiB in the front's memory.
const TOKENS: u32 = 400;
/// What the front may take beside what it takes idle.
const BOUND_MIB: f64 = 64.0;

/// What is asked, greedily decoded.
fn much() -> Value {
    let mut body = chat("Tell me everything");
    body["n"] = json!(CHOICES);
    body["logprobs"] = json!(true);
    body["top_logprobs"] = json!(20);
    body["max_tokens"] = json!(TOKENS);
    body["ignore_eos"] = json!(true);
    body["stream"] = json!(true);
    body
}

/// Of a client that reads nothing its own buffer is small, as everybody's is to a server of thousands.
const SMALL_BUFFER_BYTES: u32 = 4096;
/// Of one that reads slowly, it has what keeps its answers for long.
const LARGE_BUFFER_BYTES: u32 = 64 << 10;

/// A client that has asked and has read nothing.
async fn ask(server: &Server, body: &Value, buffer_bytes: u32) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(buffer_bytes).unwrap();
    let mut stream = socket.connect(server.address()).await.unwrap();
    let body = body.to_string();
    // Whose answers come without chunks and end with the connection.
    let head =
        format!("POST {CHAT} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    stream
}

/// What each choice of a streamed answer said, with its tokens' first candidates; fails where it is not whole.
fn choices_of(answer: &[u8]) -> BTreeMap<u64, Vec<String>> {
    let text = std::str::from_utf8(answer).unwrap();
    let (head, events) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.0 200"), "{head}");
    let mut choices = BTreeMap::<u64, Vec<String>>::new();
    let mut events: Vec<&str> = events.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
    let last = events.pop();
    assert_eq!(last, Some("[DONE]"), "the answer ends with {last:?} after {:?}", events.last());
    for event in events {
        let event: Value = serde_json::from_str(event).unwrap();
        let choice = &event["choices"][0];
        let tokens = choice["logprobs"]["content"].as_array().into_iter().flatten();
        let told = tokens.map(|token| token["token"].as_str().unwrap().to_owned());
        choices.entry(choice["index"].as_u64().unwrap()).or_default().extend(told);
    }
    choices
}

/// Reads what is there, a piece at the most.
fn read_some(stream: &TcpStream, into: &mut Vec<u8>) {
    let mut piece = [0; 32 << 10];
    let read = stream.try_read(&mut piece).unwrap_or(0);
    into.extend_from_slice(&piece[..read]);
}

/// Waits for `work` while a piece of each of two answers is read every second.
async fn while_reading<T>(
    clients: [(&TcpStream, &mut Vec<u8>); 2],
    beat: &mut Interval,
    work: impl Future<Output = T>,
) -> T {
    let mut clients = clients;
    let mut work = std::pin::pin!(work);
    loop {
        tokio::select! {
            done = &mut work => return done,
            _ = beat.tick() => clients.iter_mut().for_each(|(client, into)| read_some(client, into)),
        }
    }
}

/// Reads so much more, or to the end; whether that was it.
async fn read_more(stream: &mut TcpStream, into: &mut Vec<u8>, bytes: usize) -> bool {
    let until = into.len() + bytes;
    while into.len() < until {
        if stream.read_buf(into).await.unwrap() == 0 {
            return true;
        }
    }
    false
}

/// Memory of the front, in RAM.
fn front_mib(server: &Server) -> f64 {
    front_figure(server, "VmRSS:")
}

/// The most that it ever was.
fn front_peak_mib(server: &Server) -> f64 {
    front_figure(server, "VmHWM:")
}

fn front_figure(server: &Server, name: &str) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.split_whitespace().next().unwrap().parse::<f64>().unwrap() / 1024.0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_read_nothing_cost_the_front_little_and_nobody_else_and_can_read_in_the_end() {
    let server = Server::start(&["--parallel", "8", "--ctx-size", "8192", "--max-queue", "512"]).await;
    let mut undisturbed = Vec::new();
    ask(&server, &much(), LARGE_BUFFER_BYTES).await.read_to_end(&mut undisturbed).await.unwrap();
    let undisturbed = choices_of(&undisturbed);
    assert_eq!(undisturbed.len(), CHOICES);
    let idle_mib = front_mib(&server);

    let mut crowd = Vec::new();
    for _ in 0..CLIENTS - 2 {
        crowd.push(ask(&server, &much(), SMALL_BUFFER_BYTES).await);
    }
    // One that reads a piece now and then, and one that reads all in the end; until then both read as little as keeps an answer.
    let mut slow = ask(&server, &much(), LARGE_BUFFER_BYTES).await;
    let mut late = ask(&server, &much(), LARGE_BUFFER_BYTES).await;
    let (mut of_slow, mut of_late) = (Vec::new(), Vec::new());
    let mut beat = tokio::time::interval(Duration::from_secs(1));
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (began, mut most_mib, mut answered, mut slowest) = (Instant::now(), 0.0_f64, 0, Duration::ZERO);
    loop {
        let asked = Instant::now();
        let clients = [(&slow, &mut of_slow), (&late, &mut of_late)];
        let told = while_reading(clients, &mut beat, server.ask("What is the capital of Peru?")).await;
        assert_eq!(told, "The capital of Peru is Lima.");
        (answered, slowest) = (answered + 1, slowest.max(asked.elapsed()));
        most_mib = most_mib.max(front_mib(&server));
        assert!(most_mib - idle_mib < BOUND_MIB, "the front grew from {idle_mib} MiB to {most_mib} MiB");
        let ended = server.metric("gantry_answers_ended_unread_total").await;
        let paused = server.metric("gantry_engine_requests_paused").await;
        if paused + ended > (crowd.len() * CHOICES) as f64 - 0.5 {
            break;
        }
        assert!(began.elapsed() < 3 * PATIENCE, "{paused} answers are paused");
    }
    eprintln!(
        "{CLIENTS} clients that read next to nothing: the front grew from {idle_mib:.1} MiB to {most_mib:.1} MiB; {answered} \
         requests of a bystander, all answered, the slowest after {slowest:?}"
    );
    drop(crowd);
    let rests = async || server.metric("gantry_requests_running").await < 0.5;
    loop {
        await_condition("its answers to be paused, or to have ended", rests).await;
        read_some(&late, &mut of_late);
        if read_more(&mut slow, &mut of_slow, 1 << 20).await {
            break;
        }
    }
    assert!(server.metric("gantry_undelivered_bytes").await > 0.5, "most of the other one waits");
    late.read_to_end(&mut of_late).await.unwrap();
    for answer in [of_slow, of_late] {
        assert_eq!(choices_of(&answer), undisturbed);
    }
}

/// Whole answers as large as no client needs, of 1.5 KiB for each of 6,400 tokens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_too_large_to_be_whole_fail_with_what_to_do_and_the_front_stays_small() {
    let server = Server::start(&["--parallel", "8", "--ctx-size", "8192", "--max-queue", "512"]).await;
    let whole = |choices: usize| {
        let mut body = much();
        body["n"] = json!(choices);
        body["stream"] = json!(false);
        server.post(CHAT, &body).send()
    };
    let one = whole(2).await.unwrap();
    assert_eq!(one.status(), 200);
    let one: Value = one.json().await.unwrap();
    let idle_mib = front_mib(&server);
    let alone = whole(CHOICES).await.unwrap();
    assert_eq!(alone.status(), 400);
    let told: Value = alone.json().await.unwrap();
    assert_eq!(told["error"]["code"], "answer_too_large");
    assert!(told["error"]["message"].as_str().unwrap().contains("stream it"), "{told}");

    // Of many at once some are told to come again, and small ones are answered beside them.
    let many = futures::future::join_all((0..6).map(|_| whole(CHOICES)));
    let small = futures::future::join_all((0..4).map(|_| whole(2)));
    let (many, small) = tokio::join!(many, small);
    for answer in many {
        let status = answer.unwrap().status().as_u16();
        assert!([400, 503].contains(&status), "{status}");
    }
    for answer in small {
        let answer = answer.unwrap();
        let status = answer.status();
        let answer: Value = answer.json().await.unwrap();
        if status == 200 {
            let text = |answer: &Value, choice: usize| answer["choices"][choice]["message"]["content"].clone();
            assert_eq!([text(&answer, 0), text(&answer, 1)], [text(&one, 0), text(&one, 1)]);
        } else {
            assert_eq!((status.as_u16(), &answer["error"]["code"]), (503, &"overloaded".into()));
        }
    }
    let most_mib = front_peak_mib(&server);
    eprintln!("whole answers: the front grew from {idle_mib:.1} MiB to {most_mib:.1} MiB at the most");
    assert!(most_mib - idle_mib < 2.0 * BOUND_MIB, "the front grew from {idle_mib} MiB to {most_mib} MiB");
    await_condition("nothing to be held", async || server.metric("gantry_undelivered_bytes").await < 0.5).await;
}

/// Bodies that are a few bytes for each value, which takes a hundred times as much.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_of_many_small_values_are_refused_or_read_one_after_the_other() {
    let server = Server::start(&["--parallel", "2", "--ctx-size", "2048"]).await;
    let body = |value: &str, bytes: usize| {
        let many = vec![value; bytes / (value.len() + 1)].join(",");
        format!(r#"{{"messages":[{{"role":"user","content":"Hi"}}],"max_tokens":1,"unknown":[{many}]}}"#)
    };
    let post = |path: &'static str, body: String| {
        let request = server.client.post(server.url(path)).header("content-type", "application/json").body(body);
        async move { request.send().await.unwrap() }
    };
    assert_eq!(post(CHAT, body("{}", 1000)).await.status(), 400);
    let idle_mib = front_mib(&server);
    for path in [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/infill"] {
        for value in ["[0]", "{}", r#"{"a":0}"#, "0", r#""""#] {
            let refused = post(path, body(value, 7 << 20)).await;
            assert_eq!(refused.status(), 413, "{path} {value}");
            let told: Value = refused.json().await.unwrap();
            let message = told["error"]["message"].as_str().unwrap();
            assert!(message.contains("24 MiB is the limit; split the request"), "{told}");
        }
    }
    // As much as may be read at once, by many.
    let (lists, objects) = (body("[0]", 150 << 10), body("{}", 75 << 10));
    let asked = (0..24).map(|number| post(CHAT, if number % 2 == 0 { lists.clone() } else { objects.clone() }));
    for answer in futures::future::join_all(asked).await {
        assert_eq!(answer.status(), 400);
        let told: Value = answer.json().await.unwrap();
        assert_eq!(told["error"]["param"], "unknown", "{told}");
    }
    let most_mib = front_peak_mib(&server);
    eprintln!("bodies of many values: the front grew from {idle_mib:.1} MiB to {most_mib:.1} MiB at the most");
    assert!(most_mib - idle_mib < BOUND_MIB, "the front grew from {idle_mib} MiB to {most_mib} MiB");

    // What a tool returned is read in the worker.
    let result = format!(r#"["\n"{}]"#, ",[0]".repeat(1 << 20));
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let messages = json!([
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": result},
    ]);
    let refused = server.post(CHAT, &json!({"messages": messages, "max_tokens": 1})).send().await.unwrap();
    let status = refused.status();
    let told = refused.text().await.unwrap();
    assert!(status == 400 && told.contains("of too many values"), "{status} {told}");
    assert_eq!(server.post(CHAT, &chat("Hi")).send().await.unwrap().status(), 200);
}

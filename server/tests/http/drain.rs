//! The end of a server, as clients with connections see it.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::server::{Events, Server, await_condition, endless};

const TEXT: &str = "/v1/completions";
const HEALTH: &[u8] = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n";

async fn read_some(stream: &mut TcpStream) -> String {
    let mut block = [0; 4096];
    let read = stream.read(&mut block).await.unwrap_or(0);
    String::from_utf8_lossy(&block[..read]).into_owned()
}

/// Asks for a text on a connection whose reads are all the buffer that it has.
async fn ask_unread(server: &Server, body: &Value) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(server.address()).await.unwrap();
    let body = body.to_string();
    let head = format!(
        "POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    stream
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_take_nothing_or_a_sip_do_not_hold_the_end_up() {
    let mut server = Server::start(&["--ctx-size", "8192", "--parallel", "4"]).await;
    // Each is more than the socket takes: 20 candidates for each of 400 tokens.
    let much = |stream: bool| json!({"prompt": "Once", "n": 3, "max_tokens": 400, "ignore_eos": true, "logprobs": 20, "stream": stream});
    let streamed = ask_unread(&server, &much(true)).await;
    let mut whole = ask_unread(&server, &much(false)).await;
    await_condition("both to be answered", async || {
        server.metric("gantry_completion_tokens_total").await >= 1200.0
            && server.metric("gantry_requests_running").await <= 3.0
    })
    .await;
    assert!(whole.read_u8().await.is_ok());
    let began = Instant::now();
    server.signal("TERM");
    let sips = tokio::spawn(async move {
        while whole.read_u8().await.is_ok() {
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
    });
    assert_eq!(server.ended().await.code(), Some(0), "{}", server.log());
    // Two seconds of announcement and twice the ten that a client has then, not the 120 of the drain.
    assert!(began.elapsed() < Duration::from_secs(45), "{:?}", began.elapsed());
    sips.abort();
    drop(streamed);
}

#[tokio::test]
async fn a_server_that_ends_says_close_and_waits_for_no_part_of_a_head() {
    let mut server = Server::start(&["--ctx-size", "8192", "--parallel", "4"]).await;
    let mut partial = TcpStream::connect(server.address()).await.unwrap();
    partial.write_all(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-").await.unwrap();
    let (mut silent, mut idle, mut reused) = (
        TcpStream::connect(server.address()).await.unwrap(),
        TcpStream::connect(server.address()).await.unwrap(),
        TcpStream::connect(server.address()).await.unwrap(),
    );
    for stream in [&mut idle, &mut reused] {
        stream.write_all(HEALTH).await.unwrap();
        assert!(!read_some(stream).await.contains("connection: close"));
    }
    let mut stream = Events::open(server.post(TEXT, &endless(1500))).await;
    stream.next().await.unwrap();

    server.signal("TERM");
    await_condition("the end to begin", async || server.log().contains("no longer ready")).await;
    // In its first second: new connections and old ones are answered, and told that it was the last time.
    let response = server.client.post(server.url(TEXT)).json(&endless(4)).send().await.unwrap();
    assert_eq!(response.headers()["connection"], "close");
    assert!(response.text().await.unwrap().ends_with("data: [DONE]\n\n"));
    reused.write_all(HEALTH).await.unwrap();
    assert!(read_some(&mut reused).await.contains("connection: close"));
    assert_eq!(read_some(&mut reused).await, "");

    assert_eq!(stream.rest().await.last().map(String::as_str), Some("[DONE]"));
    let ended = Instant::now();
    assert_eq!(server.ended().await.code(), Some(0), "{}", server.log());
    for stream in [&mut partial, &mut silent, &mut idle] {
        assert_eq!(read_some(stream).await, "");
    }
    // It was the two seconds of the announcement, not the 120 that a head may take.
    assert!(ended.elapsed() < Duration::from_secs(20), "{:?}", ended.elapsed());
}

/// Those who route requests learn at their own pace that a server is not ready any more: kube-proxy writes its rules once a second
/// where it has little to do.
#[tokio::test]
async fn whoever_is_still_sent_here_is_answered_for_a_while_after_the_end_has_begun() {
    let mut server = Server::start(&["--ctx-size", "1024", "--parallel", "1"]).await;
    server.signal("TERM");
    let began = Instant::now();
    await_condition("the end to begin", async || server.log().contains("no longer ready")).await;
    while let Ok(mut stream) = TcpStream::connect(server.address()).await {
        stream.write_all(HEALTH).await.unwrap();
        let answer = read_some(&mut stream).await;
        if answer.is_empty() && began.elapsed() > Duration::from_secs(9) {
            break; // It came as the port closed.
        }
        assert!(answer.contains("connection: close"), "after {:?}: {answer:?}", began.elapsed());
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let closed = began.elapsed();
    // Not after two seconds, as where nobody comes any more; nor never.
    assert!((Duration::from_secs(9)..Duration::from_secs(20)).contains(&closed), "{closed:?}");
    assert_eq!(server.ended().await.code(), Some(0), "{}", server.log());
}

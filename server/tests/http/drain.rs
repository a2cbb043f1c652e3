//! The end of a server, as clients with connections see it.

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::server::{Events, Server, await_condition, endless};

const TEXT: &str = "/v1/completions";
const HEALTH: &[u8] = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n";

async fn read_some(stream: &mut TcpStream) -> String {
    let mut block = [0; 4096];
    let read = stream.read(&mut block).await.unwrap_or(0);
    String::from_utf8_lossy(&block[..read]).into_owned()
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

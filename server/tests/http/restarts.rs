//! Servers that are replaced one after the other, behind what a Service of Kubernetes does: a connection goes to one of the
//! endpoints that are known when it is made, and stays there.
//!
//! `RESTARTS` and `RESTART_REQUESTS` say how many; `make restarts` has 20 and 20,000.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::future::BoxFuture;
use http_body_util::{BodyExt, Full};
use hyper::{Request, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rand::Rng;
use serde_json::json;
use tokio::net::TcpStream;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::server::{Server, model};

/// The connections of the client's pool, each with somebody who uses it.
const POOL: usize = 64;
/// How long it takes until nobody is sent to a pod any more that is told to end: as long as on a cluster under load.
const PROPAGATION: Duration = Duration::from_millis(500);
/// The longest pause between two requests, so that connections are idle now and then.
const PAUSE_MS: u64 = 40;

/// What kube-proxy knows.
#[derive(Clone, Default)]
struct Endpoints {
    addresses: Arc<Mutex<Vec<SocketAddr>>>,
    next: Arc<AtomicUsize>,
}

impl Endpoints {
    fn add(&self, address: SocketAddr) {
        self.addresses.lock().unwrap().push(address);
    }

    fn remove(&self, address: SocketAddr) {
        self.addresses.lock().unwrap().retain(|other| *other != address);
    }

    fn pick(&self) -> SocketAddr {
        let addresses = self.addresses.lock().unwrap();
        addresses[self.next.fetch_add(1, Ordering::Relaxed) % addresses.len()]
    }
}

impl tower::Service<Uri> for Endpoints {
    type Response = TokioIo<TcpStream>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<TokioIo<TcpStream>>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<io::Result<()>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let address = self.pick();
        Box::pin(async move { Ok(TokioIo::new(TcpStream::connect(address).await?)) })
    }
}

/// One request, and what was wrong with its answer.
async fn ask(client: &Client<Endpoints, Full<Bytes>>, kind: u64) -> Result<(), String> {
    let post = |stream: bool| {
        let body = json!({"prompt": "Once", "max_tokens": 4, "ignore_eos": true, "stream": stream}).to_string();
        let request = Request::post("http://chat/v1/completions").header("content-type", "application/json");
        request.body(Full::from(body)).unwrap()
    };
    let request = match kind {
        0 => Request::get("http://chat/v1/models").body(Full::default()).unwrap(),
        1 => post(true),
        _ => post(false),
    };
    let response = client.request(request).await.map_err(|error| format!("{error:?}"))?;
    let status = response.status();
    let body = response.into_body().collect().await.map_err(|error| format!("{status}, then {error:?}"))?.to_bytes();
    if status != 200 || kind == 1 && !body.ends_with(b"data: [DONE]\n\n") {
        return Err(format!("{status}: {}", String::from_utf8_lossy(&body)));
    }
    Ok(())
}

async fn start() -> Server {
    let server = Server::launch(&model("demo-v2.q8_0.gguf"), &["--ctx-size", "4096"]);
    server.until_ready().await;
    server
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_with_a_pool_loses_nothing_while_servers_are_replaced() {
    let (restarts, requests) = (setting("RESTARTS", 2), setting("RESTART_REQUESTS", 400));
    let endpoints = Endpoints::default();
    let mut servers = VecDeque::from([start().await, start().await]);
    servers.iter().for_each(|server| endpoints.add(server.address()));

    let mut builder = Client::builder(TokioExecutor::new());
    // Not even what the client could send again by itself may be needed.
    builder.pool_max_idle_per_host(POOL).retry_canceled_requests(false);
    let client: Client<Endpoints, Full<Bytes>> = builder.build(endpoints.clone());
    let (asked, replaced) = (Arc::new(AtomicU64::new(0)), CancellationToken::new());
    let users: Vec<_> = (0..POOL)
        .map(|_| {
            let (client, asked, replaced) = (client.clone(), Arc::clone(&asked), replaced.clone());
            tokio::spawn(async move {
                let mut lost = Vec::new();
                loop {
                    let number = asked.fetch_add(1, Ordering::Relaxed);
                    if number >= requests && replaced.is_cancelled() {
                        return lost;
                    }
                    if let Err(what) = ask(&client, number % 4).await {
                        lost.push(format!("request {number}: {what}"));
                    }
                    let pause = rand::rng().random_range(0..PAUSE_MS);
                    sleep(Duration::from_millis(pause)).await;
                }
            })
        })
        .collect();

    let began = Instant::now();
    for _ in 0..restarts {
        let new = start().await;
        endpoints.add(new.address());
        servers.push_back(new);
        let mut old = servers.pop_front().unwrap();
        // At the same time, as the kubelet and the endpoints' controller do.
        old.signal("TERM");
        sleep(PROPAGATION).await;
        endpoints.remove(old.address());
        assert_eq!(old.ended().await.code(), Some(0), "{}", old.log());
    }
    replaced.cancel();
    let mut lost = Vec::new();
    for user in users {
        lost.extend(user.await.unwrap());
    }
    let count = asked.load(Ordering::Relaxed) - POOL as u64;
    eprintln!("{restarts} restarts in {:?}, {count} requests, {} lost", began.elapsed(), lost.len());
    assert!(lost.is_empty(), "{} of {count} requests were lost: {:#?}", lost.len(), &lost[..lost.len().min(10)]);
}

//! Crowds of clients that send little or nothing, and bystanders who must not notice.

use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use gantry_server::limits::{BODY_RATE_WINDOW, MAX_BODY_BYTES, MAX_CONNECTIONS, MAX_PROBE_CONNECTIONS};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::server::{
    Events, PATIENCE, Server, UNENDING, await_condition, command, endless, is_alive, model, send_signal,
};

const CHAT: &str = "/v1/chat/completions";
/// What the kubelet gives a probe, and a person a first word, on a machine that runs all tests at once.
const BOUND: Duration = Duration::from_secs(5);

/// As many files as this process may have: a crowd is as many.
fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
}

/// A connection from the address 127.0.0.`host`.
async fn connect_from(host: u8, to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::from(([127, 0, 0, host], 0))).unwrap();
    socket.connect(to).await.unwrap()
}

/// Bystanders, each of whose requests is a connection of its own.
struct Bystander {
    client: reqwest::Client,
    asked: usize,
    slowest: Duration,
}

impl Bystander {
    fn new() -> Self {
        let client = reqwest::Client::builder().pool_max_idle_per_host(0).timeout(BOUND).build().unwrap();
        Self { client, asked: 0, slowest: Duration::ZERO }
    }

    async fn get(&mut self, url: &str) {
        let request = self.client.get(url);
        self.send(url, request).await;
    }

    async fn post(&mut self, url: &str, body: &Value) {
        let request = self.client.post(url).json(body);
        self.send(url, request).await;
    }

    async fn send(&mut self, url: &str, request: reqwest::RequestBuilder) {
        let began = Instant::now();
        let answer = request.send().await.unwrap_or_else(|error| panic!("{url}, request {}: {error:?}", self.asked));
        let status = answer.status();
        assert_eq!(status, 200, "{url}: {}", answer.text().await.unwrap());
        self.asked += 1;
        self.slowest = self.slowest.max(began.elapsed());
    }

    fn report(&self, what: &str) {
        eprintln!("{what}: {} requests of bystanders, all answered, the slowest after {:?}", self.asked, self.slowest);
    }
}

fn hello() -> Value {
    json!({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1})
}

#[tokio::test]
async fn clients_that_declare_much_and_send_a_byte_cost_nobody_else() {
    let server = Server::start(&[]).await;
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {MAX_BODY_BYTES}\r\n\r\n{{"
    );
    let mut slow = Vec::new();
    // 64 from where the bystander is, and 500 from everywhere.
    for number in 0..564_usize {
        let host = if number < 64 { 1 } else { (number % 200) as u8 + 2 };
        let mut stream = connect_from(host, server.address()).await;
        stream.write_all(head.as_bytes()).await.unwrap();
        slow.push(stream);
    }
    let (mut bystander, began) = (Bystander::new(), Instant::now());
    let mut last = slow.pop().unwrap();
    let told = tokio::spawn(async move {
        let mut answer = [0; 1024];
        let read = last.read(&mut answer).await.unwrap();
        String::from_utf8_lossy(&answer[..read]).into_owned()
    });
    while !told.is_finished() {
        bystander.post(&server.url(CHAT), &hello()).await;
        assert!(began.elapsed() < BODY_RATE_WINDOW + PATIENCE);
    }
    let answer = told.await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 408") && answer.contains("too slowly"), "{answer}");
    bystander.report("564 slow bodies");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_bodies_on_all_connections_make_room() {
    raise_limit();
    let server = Server::start(&[]).await;
    let head = format!("POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY_BYTES}\r\n\r\n{{");
    let (mut bystander, mut slow) = (Bystander::new(), Vec::new());
    for number in 0..MAX_CONNECTIONS + 200 {
        let mut stream = connect_from((number / 1000) as u8 + 2, server.address()).await;
        stream.write_all(head.as_bytes()).await.unwrap();
        slow.push(stream);
    }
    for _ in 0..20 {
        bystander.post(&server.url(CHAT), &hello()).await;
    }
    bystander.report("4,296 slow bodies");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_connections_make_room_and_nobody_else_notices() {
    raise_limit();
    let server = Server::start_unending(2, &["--metrics-port", "0"]).await;
    let probes = server.probes_address().await;
    let mut stream = Events::open(server.post("/v1/completions", &endless(UNENDING))).await;
    stream.next().await.unwrap();
    let streaming = stream.read_on();
    let mut bystander = Bystander::new();
    let mut silent = Vec::new();
    for number in 0..MAX_CONNECTIONS + 200 {
        silent.push(connect_from((number / 1000) as u8 + 2, server.address()).await);
        if number % 100 == 0 {
            bystander.get(&format!("http://{probes}/readyz")).await;
        }
    }
    let shed = "gantry_connections_shed_total{phase=\"waiting\"}";
    await_condition("the silent to make room", async || server.metric(shed).await > 199.0).await;
    for _ in 0..10 {
        bystander.post(&server.url(CHAT), &hello()).await;
        for path in ["healthz", "readyz", "metrics"] {
            bystander.get(&format!("http://{probes}/{path}")).await;
            bystander.get(&server.url(&format!("/{path}"))).await;
        }
    }
    assert!(!streaming.is_finished(), "the stream was cut off");
    // The oldest have gone, not the youngest.
    let mut ended = [0; 1];
    assert_eq!(silent[0].read(&mut ended).await.unwrap_or(0), 0);
    let mut youngest = silent.pop().unwrap();
    youngest.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    assert_eq!(youngest.read(&mut ended).await.unwrap(), 1);
    bystander.report("4,296 silent connections");
}

#[tokio::test]
async fn a_crowd_at_the_port_of_probes_does_not_keep_a_probe_out() {
    let server = Server::start(&["--metrics-port", "0"]).await;
    let probes = server.probes_address().await;
    let mut crowd = Vec::new();
    for _ in 0..4 * MAX_PROBE_CONNECTIONS {
        crowd.push(connect_from(2, probes).await);
    }
    let mut bystander = Bystander::new();
    for path in ["healthz", "readyz", "metrics"] {
        bystander.get(&format!("http://{probes}/{path}")).await;
    }
    // Nothing else is answered there.
    let other = bystander.client.get(format!("http://{probes}/v1/models")).send().await.unwrap();
    assert_eq!(other.status(), 404);
}

/// Connections of one address that ask for the metrics over and over and read nothing.
async fn unread(count: usize, to: SocketAddr) -> Vec<TcpStream> {
    let asks = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n".repeat(400);
    let mut crowd = Vec::new();
    for _ in 0..count {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        let mut stream = socket.connect(to).await.unwrap();
        // What does not go out at once never will.
        let _ = tokio::time::timeout(Duration::from_millis(50), stream.write_all(&asks)).await;
        crowd.push(stream);
    }
    crowd
}

#[tokio::test]
async fn answers_that_nobody_reads_keep_no_probe_out() {
    let server = Server::start(&["--metrics-port", "0"]).await;
    let probes = server.probes_address().await;
    // As many as there are places, and as many again who take those that become free.
    let _crowd = unread(2 * MAX_PROBE_CONNECTIONS, probes).await;
    let mut bystander = Bystander::new();
    for path in ["healthz", "readyz", "metrics", "healthz"] {
        bystander.get(&format!("http://{probes}/{path}")).await;
    }
    bystander.report("128 connections with unread answers");
}

/// A process that does not outlive its test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// `gantry-server serve` with the second demo model, after what a shell does.
fn command_after(shell: &str) -> Command {
    let mut whole = Command::new("sh");
    let plain = command(&model("demo-v2.q8_0.gguf"));
    whole.arg("-c").arg(format!("{shell} && exec \"$0\" \"$@\"")).arg(plain.get_program()).args(plain.get_args());
    whole.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    whole
}

/// The limits of open files of a process, the soft and the hard one.
fn open_files(pid: u32) -> (String, String) {
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let mut words = line.split_whitespace().skip(3).map(str::to_owned);
    (words.next().unwrap(), words.next().unwrap())
}

#[tokio::test]
async fn the_limit_of_open_files_is_raised_and_workers_have_it_too() {
    let server = Server::launch_as(command_after("ulimit -Sn 256"), &[], None);
    server.until_ready().await;
    for pid in [server.pid(), server.workers()[0]] {
        let (soft, hard) = open_files(pid);
        assert_eq!(soft, hard);
    }
}

#[tokio::test]
async fn a_crowd_leaves_descriptors_for_the_next_worker() {
    let server = Server::launch_as(command_after("ulimit -n 400"), &[], None);
    server.until_ready().await;
    assert!(server.log().contains("the hard limit of open files is 400"), "{}", server.log());
    let mut crowd = Vec::new();
    for _ in 0..600 {
        crowd.push(connect_from(2, server.address()).await);
    }
    let worker = server.workers()[0];
    send_signal(worker, "KILL");
    await_condition("the worker to end", async || !is_alive(worker)).await;
    server.until_ready().await;
    assert_eq!(server.ask("What is the capital of Peru?").await, "The capital of Peru is Lima.");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_that_waits_on_all_connections_it_may_have_keeps_nobody_else_out() {
    // Of 660 descriptors 165 are for connections.
    let server = Server::launch_as(command_after("ulimit -n 660"), &["--max-queue", "1000"], None);
    server.until_ready().await;
    let ask = json!({"prompt": "Once", "max_tokens": 1_000, "ignore_eos": true}).to_string();
    let ask = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{ask}",
        ask.len()
    );
    let mut crowd = Vec::new();
    for _ in 0..250 {
        let mut stream = connect_from(2, server.address()).await;
        // One that was refused takes nothing.
        let _ = stream.write_all(ask.as_bytes()).await;
        crowd.push(stream);
    }
    await_condition("some to be refused", async || server.metric("gantry_connections_refused_total").await > 0.0).await;
    let mut bystander = Bystander::new();
    for _ in 0..10 {
        bystander.post(&server.url(CHAT), &hello()).await;
    }
    assert!(server.metric("gantry_requests_queued").await > 0.0, "the crowd is still inside");
    bystander.report("250 connections of one address, each with a request");
}

#[tokio::test]
async fn a_log_that_nobody_reads_stops_nobody() {
    use std::io::{BufRead, BufReader, Write};
    // A pipe that is full from the start, and stays so.
    let (reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(&[b'\n'; 64 * 1024]).unwrap();
    let mut started = command(&model("demo-v2.q8_0.gguf"));
    started.args(["--port", "0", "--threads", "1"]).stderr(Stdio::from(writer));
    let mut child = Killed(started.spawn().unwrap());
    let mut stdout = BufReader::new(child.0.stdout.take().unwrap());
    let line = tokio::task::spawn_blocking(move || {
        let mut line = String::new();
        stdout.read_line(&mut line).map(|_| line)
    });
    // Killed, should it never come, or the thread would wait for it for ever.
    let line = match tokio::time::timeout(PATIENCE, line).await {
        Ok(line) => line.unwrap().unwrap(),
        Err(_) => {
            drop(child);
            panic!("the server does not come up");
        }
    };
    let base = line.trim().strip_prefix("listening on ").unwrap().to_owned();
    let client = reqwest::Client::new();
    let ready = async || {
        let answer = client.get(format!("{base}/readyz")).timeout(BOUND).send().await;
        answer.is_ok_and(|answer| answer.status() == 200)
    };
    await_condition("the server to be ready", ready).await;
    let mut bystander = Bystander::new();
    for _ in 0..20 {
        bystander.post(&format!("{base}{CHAT}"), &hello()).await;
    }
    send_signal(child.0.id(), "INT");
    let status = tokio::task::spawn_blocking(move || child.0.wait()).await.unwrap().unwrap();
    assert_eq!(status.code(), Some(0));
    drop(reader);
}

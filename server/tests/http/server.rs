//! A running server, and clients for it.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, Once};
use std::time::{Duration, Instant};

use futures::StreamExt;
use reqwest::{RequestBuilder, Response};
use serde_json::{Value, json};

/// How long anything may take on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// Tokens of a text that outlasts every test, on however fast a machine: minutes of work.
pub(crate) const UNENDING: u32 = 30_000;
/// Cells of a sequence that holds such a text.
const UNENDING_CELLS: u32 = 32_768;

pub(crate) fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/models").join(name)
}

/// A copy of the second demo model that says it was trained for a million tokens. The engine ends a sequence where the
/// training did, which is seconds of work for the model as it is; past that the tokens are noise, and come.
pub(crate) fn unending_model() -> (tempfile::TempDir, PathBuf) {
    let mut bytes = std::fs::read(model("demo-v2.q8_0.gguf")).unwrap();
    let key = b"llama.context_length";
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap() + key.len();
    assert_eq!(bytes[at..at + 8], [4, 0, 0, 0, 0, 8, 0, 0], "a u32 of 2,048");
    bytes[at + 4..at + 8].copy_from_slice(&(1_u32 << 20).to_le_bytes());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("unending.gguf");
    std::fs::write(&path, bytes).unwrap();
    (folder, path)
}

/// A server process, killed when dropped.
pub(crate) struct Server {
    child: Child,
    pub(crate) base: String,
    pub(crate) client: reqwest::Client,
    log: Arc<Mutex<String>>,
    /// Holds the model, where a test wrote it: a worker that is replaced reads it again.
    _folder: Option<tempfile::TempDir>,
}

impl Server {
    /// Starts a server with the second demo model and waits until it is ready.
    pub(crate) async fn start(args: &[&str]) -> Self {
        Self::start_in(&[], args).await
    }

    /// The same with these variables in its environment.
    pub(crate) async fn start_in(variables: &[(&str, &str)], args: &[&str]) -> Self {
        let server = Self::launch_with(&model("demo-v2.q8_0.gguf"), args, variables, None);
        server.until_ready().await;
        server
    }

    /// Starts a server whose texts of [`UNENDING`] tokens outlast the test, as many of them at once as `parallel` says,
    /// and waits until it is ready.
    pub(crate) async fn start_unending(parallel: u32, args: &[&str]) -> Self {
        let (folder, file) = unending_model();
        let (cells, parallel) = ((UNENDING_CELLS * parallel).to_string(), parallel.to_string());
        let sizes = ["--ctx-size", &cells, "--parallel", &parallel];
        let server = Self::launch_with(&file, &[&sizes[..], args].concat(), &[], Some(folder));
        server.until_ready().await;
        server
    }

    /// Starts a server and waits for its port only.
    pub(crate) fn launch(file: &Path, args: &[&str]) -> Self {
        Self::launch_with(file, args, &[], None)
    }

    fn launch_with(file: &Path, args: &[&str], variables: &[(&str, &str)], folder: Option<tempfile::TempDir>) -> Self {
        let mut command = command(file);
        command.envs(variables.iter().copied());
        Self::launch_as(command, args, folder)
    }

    /// Starts what ends in `gantry-server serve` on a file.
    pub(crate) fn launch_as(mut command: Command, args: &[&str], folder: Option<tempfile::TempDir>) -> Self {
        static PROVIDER: Once = Once::new();
        PROVIDER.call_once(|| drop(rustls::crypto::ring::default_provider().install_default()));
        if !args.contains(&"--threads") {
            command.args(["--threads", "1"]);
        }
        let mut child = command.args(["--port", "0"]).args(args).spawn().unwrap();
        let log = Arc::new(Mutex::new(String::new()));
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let sink = Arc::clone(&log);
        std::thread::spawn(move || {
            let mut line = String::new();
            while stderr.read_line(&mut line).is_ok_and(|n| n > 0) {
                sink.lock().unwrap().push_str(&line);
                line.clear();
            }
        });
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let base = line.trim().strip_prefix("listening on ").expect("the first line tells the address").to_owned();
        Self { child, base, client: reqwest::Client::new(), log, _folder: folder }
    }

    /// Where it is reached.
    pub(crate) fn address(&self) -> SocketAddr {
        self.base.strip_prefix("http://").unwrap().parse().unwrap()
    }

    /// Where its probes are answered, with `--metrics-port`.
    pub(crate) async fn probes_address(&self) -> SocketAddr {
        self.told_address("listening for probes and metrics").await
    }

    /// Where calls of gRPC are answered, with `--grpc-port`.
    pub(crate) async fn grpc_address(&self) -> SocketAddr {
        self.told_address("listening for gRPC").await
    }

    /// The address that a record of the log tells.
    async fn told_address(&self, record: &str) -> SocketAddr {
        let told = || {
            let log = self.log();
            let line = log.lines().find(|line| line.contains(record))?;
            let line: Value = serde_json::from_str(line).unwrap();
            line["address"].as_str().unwrap().parse().ok()
        };
        await_condition("a port to be told", async || told().is_some()).await;
        told().unwrap()
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    pub(crate) async fn get(&self, path: &str) -> Response {
        self.client.get(self.url(path)).send().await.unwrap()
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> RequestBuilder {
        self.client.post(self.url(path)).json(body)
    }

    /// The answer to one question, greedily decoded.
    pub(crate) async fn ask(&self, question: &str) -> String {
        let response = self.post("/v1/chat/completions", &chat(question)).send().await.unwrap();
        assert_eq!(response.status(), 200);
        text_of(&response.json().await.unwrap()).to_owned()
    }

    pub(crate) async fn until_ready(&self) {
        await_condition("the server to be ready", async || self.ready().await.0 == 200).await;
    }

    /// The status of `/readyz` and its reason.
    pub(crate) async fn ready(&self) -> (u16, String) {
        let response = self.get("/readyz").await;
        let status = response.status().as_u16();
        let body: Value = response.json().await.unwrap();
        (status, body["reason"].as_str().unwrap_or_default().to_owned())
    }

    /// A figure of `/metrics`, whatever the model's name; 0 where it is not told.
    pub(crate) async fn metric(&self, start: &str) -> f64 {
        let text = self.get("/metrics").await.text().await.unwrap();
        let lines = text.lines().map(without_model).filter(|line| line.starts_with(start));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The process ids of the workers.
    pub(crate) fn workers(&self) -> Vec<u32> {
        let pid = self.child.id();
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        let children = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("children")).ok());
        children.flat_map(|c| c.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<_>>()).collect()
    }

    pub(crate) fn signal(&self, signal: &str) {
        send_signal(self.pid(), signal);
    }

    /// Waits for the process to end.
    pub(crate) async fn ended(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < PATIENCE, "the server does not end; its log:\n{}", self.log.lock().unwrap());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
        if std::thread::panicking() {
            eprint!("{}", self.log());
        }
    }
}

/// `gantry-server serve` on a file, its output piped.
pub(crate) fn command(file: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gantry-server"));
    command.arg("serve").arg("--model").arg(file).args(["--host", "127.0.0.1"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs a command to its end.
pub(crate) fn output(mut command: Command) -> (ExitStatus, String) {
    let mut child = command.spawn().unwrap();
    let mut text = String::new();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    (child.wait().unwrap(), text)
}

pub(crate) fn send_signal(pid: u32, signal: &str) {
    assert!(Command::new("kill").args([format!("-{signal}"), pid.to_string()]).status().unwrap().success());
}

pub(crate) fn is_alive(pid: u32) -> bool {
    // A zombie has ended; only its status is waited for.
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    !status.is_empty() && !status.contains("State:\tZ")
}

/// Waits until `condition` holds.
pub(crate) async fn await_condition(what: &str, condition: impl AsyncFn() -> bool) {
    let start = Instant::now();
    while !condition().await {
        assert!(start.elapsed() < PATIENCE, "waited in vain for {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A chat with one question, greedily decoded.
pub(crate) fn chat(question: &str) -> Value {
    json!({"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 200})
}

/// A text that goes on for as many tokens as wanted.
pub(crate) fn endless(tokens: u32) -> Value {
    json!({"prompt": "Once", "max_tokens": tokens, "ignore_eos": true, "stream": true, "seed": 1})
}

pub(crate) fn text_of(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap()
}

/// A stream of server-sent events as it is read.
pub(crate) struct Events {
    bytes: futures::stream::BoxStream<'static, reqwest::Result<bytes::Bytes>>,
    buffer: String,
}

impl Events {
    pub(crate) async fn open(request: RequestBuilder) -> Self {
        Self::of(request.send().await.unwrap())
    }

    pub(crate) fn of(response: Response) -> Self {
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Self { bytes: response.bytes_stream().boxed(), buffer: String::new() }
    }

    /// The next event's data, of whichever name; comments are left out, and any other line is a fault.
    pub(crate) async fn next(&mut self) -> Option<String> {
        loop {
            if let Some((event, rest)) = self.buffer.split_once("\n\n") {
                let (event, rest) = (event.to_owned(), rest.to_owned());
                self.buffer = rest;
                if event.starts_with(':') {
                    continue;
                }
                let data = match event.split_once('\n') {
                    Some((name, data)) if name.starts_with("event: ") => data,
                    _ => &event,
                };
                return Some(data.strip_prefix("data: ").unwrap_or_else(|| panic!("{event:?}")).to_owned());
            }
            let Some(bytes) = self.bytes.next().await else {
                assert_eq!(self.buffer, "", "the stream ends within an event");
                return None;
            };
            self.buffer.push_str(std::str::from_utf8(&bytes.unwrap()).unwrap());
        }
    }

    /// Reads on and throws away what comes, so that the server does not pause the answer for this client.
    pub(crate) fn read_on(mut self) -> tokio::task::JoinHandle<()> {
        tokio::spawn(async move { while self.bytes.next().await.is_some_and(|bytes| bytes.is_ok()) {} })
    }

    /// All events to the end.
    pub(crate) async fn rest(&mut self) -> Vec<String> {
        let mut all = Vec::new();
        while let Some(event) = self.next().await {
            all.push(event);
        }
        all
    }
}

/// A line of `/metrics` without the label for the model's name.
fn without_model(line: &str) -> String {
    let label = line.find(",model=\"").map(|at| (at, line[at + 8..].find('"').map(|end| at + 8 + end + 1)));
    match label {
        Some((at, Some(end))) => format!("{}{}", &line[..at], &line[end..]),
        _ => line.to_owned(),
    }
}

//! Whatever arrives, the answer is an error object and the process lives.

use reqwest::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::server::{Server, await_condition, chat};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const INVALID: &str = "invalid_request_error";
const NOT_FOUND: &str = "not_found_error";

/// Method, path, content type, body; then status, type, param, code.
type Row = (Method, &'static str, &'static str, Vec<u8>, u16, &'static str, Option<&'static str>, &'static str);

/// A valid chat with one thing changed.
fn with(name: &str, value: Value) -> Vec<u8> {
    let mut body = chat("Hello!");
    body[name] = value;
    body.to_string().into_bytes()
}

fn bad(name: &'static str, value: Value, param: &'static str, code: &'static str) -> Row {
    (Method::POST, CHAT, "application/json", with(name, value), 400, INVALID, Some(param), code)
}

fn raw(path: &'static str, body: &[u8], param: Option<&'static str>, code: &'static str) -> Row {
    (Method::POST, path, "application/json", body.to_vec(), 400, INVALID, param, code)
}

/// A request that is right, for work that is not done yet.
fn pooled(path: &'static str, body: Value) -> Row {
    let body = body.to_string().into_bytes();
    (Method::POST, path, "application/json", body, 400, "not_supported_error", None, "unsupported_operation")
}

fn rows() -> Vec<Row> {
    let message = |role: Value, content: Value| json!([{"role": role, "content": content}]);
    let long = "word ".repeat(20_000);
    let hello = chat("Hello!").to_string().into_bytes();
    vec![
        raw(CHAT, b"", None, "invalid_json"),
        raw(CHAT, b"{\"messages\": [", None, "invalid_json"),
        raw(CHAT, b"{\"messages\": \"\xff\xfe\"}", None, "invalid_json"),
        raw(CHAT, "[".repeat(50_000).as_bytes(), None, "invalid_json"),
        raw(CHAT, b"[]", None, "invalid_type"),
        raw(CHAT, b"\x00\x01\x02", None, "invalid_json"),
        raw(CHAT, b"{}", Some("messages"), "missing_required_parameter"),
        raw(TEXT, b"{}", Some("prompt"), "missing_required_parameter"),
        raw(TEXT, b"{\"prompt\": [\"a\", \"\"]}", Some("prompt[1]"), "invalid_value"),
        raw(TEXT, b"{\"prompt\": [1, 2, 1000000]}", Some("prompt[2]"), "invalid_token"),
        raw(TEXT, b"{\"prompt\": [[1], [2, 1000000]]}", Some("prompt[1][1]"), "invalid_token"),
        raw(TEXT, b"{\"prompt\": \"\"}", Some("prompt"), "invalid_value"),
        bad("logit_bias", json!({"5": 1, "1000000": 1}), "logit_bias", "invalid_token"),
        bad("stop_token_ids", json!([5, 1_000_000]), "stop_token_ids", "invalid_token"),
        bad("messages", json!([]), "messages", "invalid_value"),
        bad("messages", json!("hi"), "messages", "invalid_type"),
        bad("messages", message(json!("robot"), json!("x")), "messages[0].role", "invalid_value"),
        bad("messages", message(json!(3), json!("x")), "messages[0].role", "invalid_type"),
        bad("messages", message(json!("user"), json!({"a": 1})), "messages[0].content", "invalid_type"),
        bad("messages", message(json!("user"), Value::Null), "messages[0].content", "missing_required_parameter"),
        bad(
            "messages",
            message(json!("user"), json!([{"type": "image_url", "image_url": {"url": "http://x"}}])),
            "messages[0].content[0].type",
            "unsupported_content",
        ),
        bad("messages", message(json!("user"), json!(long)), "messages", "context_length_exceeded"),
        bad("max_tokens", json!(0), "max_tokens", "invalid_value"),
        bad("max_tokens", json!(1_000_000_000_u64), "max_tokens", "invalid_value"),
        bad("max_tokens", json!(1e9), "max_tokens", "invalid_value"),
        bad("max_tokens", json!(-5), "max_tokens", "invalid_value"),
        bad("max_tokens", json!("ten"), "max_tokens", "invalid_type"),
        bad("max_completion_tokens", json!(0), "max_completion_tokens", "invalid_value"),
        bad("temperature", json!(3), "temperature", "invalid_value"),
        bad("temperature", json!("warm"), "temperature", "invalid_type"),
        bad("top_p", json!(0), "top_p", "invalid_value"),
        bad("top_k", json!(1.5), "top_k", "invalid_type"),
        bad("min_p", json!(-1), "min_p", "invalid_value"),
        bad("seed", json!("abc"), "seed", "invalid_type"),
        bad("stop", json!([1]), "stop[0]", "invalid_type"),
        bad("stop", json!(vec!["x"; 17]), "stop", "invalid_value"),
        bad("stream", json!("true"), "stream", "invalid_type"),
        bad("stream_options", json!({"include_usage": true}), "stream_options", "invalid_value"),
        bad("n", json!(17), "n", "invalid_value"),
        bad("best_of", json!(3), "best_of", "unsupported_parameter"),
        bad("tools", json!([{"type": "function"}]), "tools[0].function", "missing_required_parameter"),
        bad("temprature", json!(1), "temprature", "unknown_parameter"),
        bad("logprobs", json!(5), "logprobs", "invalid_type"),
        bad("response_format", json!({"type": "xml"}), "response_format.type", "invalid_value"),
        bad("logit_bias", json!({"the": 1}), "logit_bias", "invalid_value"),
        bad("repetition_penalty", json!(9), "repetition_penalty", "invalid_value"),
        bad("priority", json!("urgent"), "priority", "invalid_value"),
        raw("/v1/embeddings", b"{\"input\": []}", Some("input"), "invalid_value"),
        raw("/v1/rerank", b"{\"query\": \"q\"}", Some("documents"), "missing_required_parameter"),
        (
            Method::POST,
            "/v1/embeddings",
            "application/json",
            b"{\"input\": \"a\", \"model\": \"bert\"}".to_vec(),
            404,
            NOT_FOUND,
            Some("model"),
            "model_not_found",
        ),
        pooled("/v1/embeddings", json!({"input": ["a", "b"], "model": "demo"})),
        pooled("/v1/rerank", json!({"query": "q", "documents": ["a"]})),
        pooled("/rerank", json!({"query": "q", "documents": ["a"]})),
        (
            Method::POST,
            CHAT,
            "application/json",
            with("model", json!("gpt-4")),
            404,
            NOT_FOUND,
            Some("model"),
            "model_not_found",
        ),
        (Method::GET, "/v1/models/gpt-4", "", vec![], 404, NOT_FOUND, Some("model"), "model_not_found"),
        (Method::GET, "/v1/models/%ff%fe", "", vec![], 404, NOT_FOUND, Some("model"), "model_not_found"),
        (Method::GET, "/v1/nothing", "", vec![], 404, NOT_FOUND, None, "unknown_url"),
        (Method::POST, "/v1/edits", "application/json", hello.clone(), 404, NOT_FOUND, None, "unknown_url"),
        (Method::GET, "/v1/embeddings", "", vec![], 405, INVALID, None, "method_not_allowed"),
        (Method::GET, CHAT, "", vec![], 405, INVALID, None, "method_not_allowed"),
        (Method::DELETE, "/v1/models", "", vec![], 405, INVALID, None, "method_not_allowed"),
        (
            Method::POST,
            CHAT,
            "application/x-www-form-urlencoded",
            hello.clone(),
            415,
            INVALID,
            None,
            "unsupported_media_type",
        ),
        (Method::POST, CHAT, "multipart/form-data; boundary=x", hello, 415, INVALID, None, "unsupported_media_type"),
    ]
}

#[tokio::test]
async fn every_mistake_has_its_error_and_the_process_lives() {
    let server = Server::start(&["--alias", "demo", "--ctx-size", "16384"]).await;
    let workers = server.workers();
    for (method, path, media, body, status, kind, param, code) in rows() {
        let what = format!("{method} {path} {}", String::from_utf8_lossy(&body[..body.len().min(120)]));
        let mut request = server.client.request(method, server.url(path)).body(body);
        if !media.is_empty() {
            request = request.header("content-type", media);
        }
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), status, "{what}");
        let answer: Value = response.json().await.unwrap();
        let error = answer["error"].as_object().unwrap_or_else(|| panic!("{what}: {answer}"));
        let told = (error["type"].as_str(), error["param"].as_str(), error["code"].as_str());
        assert_eq!(told, (Some(kind), param, Some(code)), "{what}: {answer}");
        assert!(!error["message"].as_str().unwrap().is_empty());
    }
    // What is said to be there is.
    let told: Value = server.get("/v1/nothing").await.json().await.unwrap();
    let message = told["error"]["message"].as_str().unwrap();
    let probes = ["/props", "/health", "/healthz", "/readyz", "/metrics"];
    for address in ["/v1/models", CHAT, TEXT, "/v1/embeddings", "/v1/rerank"].into_iter().chain(probes) {
        assert!(message.contains(address), "{message}");
        assert_ne!(server.get(address).await.status(), 404, "{address}");
    }
    for (address, hint) in [
        ("/", "/v1"),
        ("/completion/", TEXT),
        ("/embedding", "/v1/embeddings"),
        ("/v1/v1/chat/completions", "leave it out of the base URL"),
        ("/v1/chat/completions/chat/completions", "the base URL that it is given ends with /v1"),
        ("/v1/models/chat/completions", "the base URL that it is given ends with /v1"),
    ] {
        let told: Value = server.get(address).await.json().await.unwrap();
        let (_, instead) = told["error"]["message"].as_str().unwrap().split_once("Instead: ").unwrap();
        assert!(instead.contains(hint), "{told}");
    }
    let told: Value = server.get(CHAT).await.json().await.unwrap();
    assert_eq!(told["error"]["message"], "/v1/chat/completions does not take GET, but POST.");
    let request = server.client.request(Method::OPTIONS, server.url("/v1/models"));
    let response = request.send().await.unwrap();
    assert_eq!(response.headers()["allow"], "GET,HEAD");
    let told: Value = response.json().await.unwrap();
    assert_eq!(told["error"]["message"], "/v1/models does not take OPTIONS, but GET and HEAD.");
    let other = server.post(CHAT, &json!({"model": "standalone", "messages": []})).send().await.unwrap();
    assert_eq!(other.status(), 400, "messages come first");
    let other: Value = server
        .client
        .post(server.url(CHAT))
        .body(with("model", json!("standalone")))
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    assert_eq!(
        other["error"]["message"],
        "The model \"standalone\" is not served here; there is demo, which GET /v1/models lists."
    );
    assert_eq!(server.workers(), workers, "the same worker serves on");
    assert_eq!(server.ask("What is the capital of Peru?").await, "The capital of Peru is Lima.");
}

#[tokio::test]
async fn headers_are_checked_like_parameters() {
    let server = Server::start(&["--alias", "demo"]).await;
    for (header, value) in [("x-gantry-priority", "urgent"), ("x-gantry-queue-timeout-ms", "soon")] {
        let response = server.post(CHAT, &chat("Hello!")).header(header, value).send().await.unwrap();
        assert_eq!(response.status(), 400);
        let answer: Value = response.json().await.unwrap();
        assert_eq!((&answer["error"]["param"], &answer["error"]["code"]), (&json!(header), &json!("invalid_value")));
    }
    let taken = server.post(CHAT, &chat("Hello!")).header("x-gantry-priority", "high").send().await.unwrap();
    assert_eq!(taken.status(), 200);
    assert!(!taken.text().await.unwrap().is_empty());
    let high = "gantry_requests_by_priority_total{version=\"standalone\",priority=\"high\"}";
    await_condition("it to be counted", async || server.metric(high).await > 0.5).await;
}

#[tokio::test]
async fn a_prompt_past_the_context_is_refused_before_a_stream_opens() {
    let server = Server::start(&["--ctx-size", "2048", "--parallel", "4"]).await;
    let mut body = chat(&"word ".repeat(2000));
    body["stream"] = json!(true);
    let response = server.post(CHAT, &body).send().await.unwrap();
    assert_eq!(response.status(), 400);
    let answer: Value = response.json().await.unwrap();
    assert_eq!(answer["error"]["code"], "context_length_exceeded");
    assert!(answer["error"]["message"].as_str().unwrap().contains("512"), "{answer}");
}

/// Sends a head and then zeros until the server has had enough; returns the answer and how many bytes went out.
async fn flood(server: &Server, head: &str, bytes: usize) -> (String, usize) {
    let address = server.base.strip_prefix("http://").unwrap();
    let (mut read, mut write) = TcpStream::connect(address).await.unwrap().into_split();
    write.write_all(head.as_bytes()).await.unwrap();
    let writing = async {
        let block = vec![b' '; 64 * 1024];
        let mut sent = 0;
        while sent < bytes {
            match write.write(&block).await {
                Ok(n) if n > 0 => sent += n,
                _ => break,
            }
        }
        sent
    };
    let reading = async {
        let mut answer = vec![0; 4096];
        let n = read.read(&mut answer).await.unwrap_or(0);
        String::from_utf8_lossy(&answer[..n]).into_owned()
    };
    tokio::pin!(writing);
    tokio::select! {
        answer = reading => (answer, 0),
        sent = &mut writing => (String::new(), sent),
    }
}

#[tokio::test]
async fn a_body_of_100_mib_is_refused_unread() {
    const HUGE: usize = 100 << 20;
    let server = Server::start(&[]).await;
    let head =
        format!("POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {HUGE}\r\n\r\n");
    let (answer, _) = flood(&server, &head, HUGE).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    assert!(answer.contains("\"code\":\"request_too_large\""), "{answer}");

    // Without a declared length, it is refused once the limit is passed.
    let endless = std::iter::repeat_n(bytes::Bytes::from(vec![b' '; 1 << 16]), HUGE >> 16).map(Ok::<_, std::io::Error>);
    let body = reqwest::Body::wrap_stream(futures::stream::iter(endless));
    let request = server.client.post(server.url(CHAT)).header("content-type", "application/json").body(body);
    if let Ok(response) = request.send().await {
        assert_eq!(response.status(), 413);
    }
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak: u64 = peak.split_whitespace().next().unwrap().parse().unwrap();
    assert!(peak < 64 * 1024, "the front took {peak} kB");
    assert_eq!(server.ask("What is the capital of Peru?").await, "The capital of Peru is Lima.");
}

#[tokio::test]
async fn what_is_no_http_closes_its_connection_only() {
    let server = Server::start(&[]).await;
    let address = server.base.strip_prefix("http://").unwrap();
    for garbage in [&b"\x16\x03\x01\x02\x00\x01\x00"[..], b"GET / HTTP/9.9\r\n\r\n", b"\r\n\r\n\xff\xff\r\n\r\n"] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(garbage).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = Vec::new();
        // A reset is as good an end as any.
        drop(stream.read_to_end(&mut answer).await);
    }
    assert_eq!(server.ready().await.0, 200);
}

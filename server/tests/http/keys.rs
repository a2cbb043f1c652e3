//! Keys that clients must show: who may ask and who not, and a file of them that changes.

use std::path::Path;

use reqwest::{Method, RequestBuilder, Response};
use serde_json::{Value, json};

use crate::server::{Server, await_condition};

const CHAT: &str = "/v1/chat/completions";

fn with_key(request: RequestBuilder, key: &str) -> RequestBuilder {
    request.header("authorization", format!("Bearer {key}"))
}

async fn status(request: RequestBuilder) -> u16 {
    request.send().await.unwrap().status().as_u16()
}

#[tokio::test]
async fn who_shows_no_key_is_told_so_and_probes_need_none() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    std::fs::write(&file, "old-secret-of-the-file\nsecond-secret-of-the-file\n").unwrap();
    let args = ["--api-key", "secret-of-the-flag", "--api-key-file", file.to_str().unwrap()];
    let server = Server::start(&args).await;
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1});
    let ask = || server.post(CHAT, &chat);

    for (shown, said) in
        [(None, "is needed"), (Some("wrong-secret"), "Incorrect API key"), (Some(""), "Incorrect API key")]
    {
        let request = shown.map_or_else(ask, |key| with_key(ask(), key));
        let answer = request.send().await.unwrap();
        assert_eq!(answer.status(), 401, "{shown:?}");
        assert_eq!(answer.headers()["www-authenticate"], "Bearer");
        assert!(answer.headers().contains_key("x-request-id"));
        let error = answer.json::<Value>().await.unwrap()["error"].clone();
        assert_eq!((&error["type"], &error["code"]), (&json!("invalid_request_error"), &json!("invalid_api_key")));
        assert!(error["param"].is_null() && error["message"].as_str().unwrap().contains(said), "{error}");
    }
    for good in ["secret-of-the-flag", "old-secret-of-the-file", "second-secret-of-the-file"] {
        assert_eq!(status(with_key(ask(), good)).await, 200, "{good}");
    }
    assert_eq!(status(ask().header("x-api-key", "secret-of-the-flag")).await, 200, "as llama-server takes it");
    // One that still sends a large body hears why, and no reset.
    let large = json!({"messages": [{"role": "user", "content": "x".repeat(4 << 20)}]});
    assert_eq!(status(with_key(server.post(CHAT, &large), "wrong-secret")).await, 401);
    for path in ["/health", "/v1/health", "/healthz", "/readyz", "/metrics"] {
        assert_eq!(server.get(path).await.status(), 200, "{path}");
    }
    for path in ["/v1/models", "/props", "/v1/nothing"] {
        assert_eq!(server.get(path).await.status(), 401, "{path}");
    }

    // As the kubelet replaces what a Secret is mounted as.
    let next = folder.path().join("next");
    std::fs::write(&next, "new-secret-of-the-file").unwrap();
    std::fs::rename(&next, &file).unwrap();
    await_condition("the new key", async || status(with_key(ask(), "new-secret-of-the-file")).await == 200).await;
    assert_eq!(status(with_key(ask(), "old-secret-of-the-file")).await, 401);
    assert_eq!(status(with_key(ask(), "secret-of-the-flag")).await, 200);

    let log = server.log();
    assert!(!log.contains("secret"), "{log}");
    let metrics = server.get("/metrics").await.text().await.unwrap();
    let line = metrics.lines().find(|line| line.contains("status=\"401\"") && line.contains("chat_completions"));
    assert!(line.is_some(), "{metrics}");
}

/// Puts files where the kubelet puts those of a Secret: `..data` leads to them from one moment to the next.
fn mount(at: &Path, generation: &str, files: &[(&str, &str)]) {
    let own = at.join(format!("..{generation}"));
    std::fs::create_dir(&own).unwrap();
    for (name, text) in files {
        std::fs::write(own.join(name), text).unwrap();
        // Left as they are where they are there.
        drop(std::os::unix::fs::symlink(format!("..data/{name}"), at.join(name)));
    }
    std::os::unix::fs::symlink(own.file_name().unwrap(), at.join("..data_tmp")).unwrap();
    std::fs::rename(at.join("..data_tmp"), at.join("..data")).unwrap();
}

#[tokio::test]
async fn a_mounted_secret_whose_keys_change_is_read_again_without_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    mount(at, "1", &[("alice", "secret-of-alice"), ("bob", "secret-of-bob\nsecond-secret-of-bob\n")]);
    let server = Server::start(&["--api-key-file", at.to_str().unwrap()]).await;
    let ask = |key: &str| with_key(server.client.get(server.url("/v1/models")), key);
    for good in ["secret-of-alice", "secret-of-bob", "second-secret-of-bob"] {
        assert_eq!(status(ask(good)).await, 200, "{good}");
    }
    assert_eq!(server.get("/v1/models").await.status(), 401);

    // Alice's is another one, and Bob has none any more.
    mount(at, "2", &[("alice", "new-secret-of-alice")]);
    std::fs::remove_dir_all(at.join("..1")).unwrap();
    std::fs::remove_file(at.join("bob")).unwrap();
    await_condition("the new key", async || status(ask("new-secret-of-alice")).await == 200).await;
    for gone in ["secret-of-alice", "secret-of-bob", "second-secret-of-bob"] {
        assert_eq!(status(ask(gone)).await, 401, "{gone}");
    }

    // One that names none opens nothing, and shuts nobody out.
    mount(at, "3", &[("alice", "\n")]);
    await_condition("the mistake to be told", async || server.log().contains("names no key")).await;
    assert_eq!(status(ask("new-secret-of-alice")).await, 200);
    assert_eq!(server.get("/v1/models").await.status(), 401);
    assert!(!server.log().contains("secret-of"), "{}", server.log());
}

#[tokio::test]
async fn the_key_of_llama_servers_variable_guards_where_there_is_no_other() {
    let server = Server::start_in(&[("LLAMA_API_KEY", "sesame"), ("LLAMA_ARG_N_PARALLEL", "2")], &[]).await;
    let ask = |key: &'static str| server.client.get(server.url("/v1/models")).bearer_auth(key).send();
    assert_eq!(server.get("/v1/models").await.status(), 401);
    assert_eq!(ask("sesame").await.unwrap().status(), 200);
    let props: Value =
        server.client.get(server.url("/props")).bearer_auth("sesame").send().await.unwrap().json().await.unwrap();
    assert_eq!(props["total_slots"], 2, "{props}");

    let server = Server::start_in(&[("LLAMA_API_KEY", "sesame"), ("GANTRY_API_KEY", "open")], &[]).await;
    let ask = |key: &'static str| server.client.get(server.url("/v1/models")).bearer_auth(key).send();
    assert_eq!(ask("sesame").await.unwrap().status(), 401, "this server's own variable goes before");
    assert_eq!(ask("open").await.unwrap().status(), 200);
}

/// What loads a model and what renders its template are not told what the front keeps to itself.
#[tokio::test]
async fn secrets_of_the_front_are_in_no_other_process() {
    let secrets = [
        "GANTRY_API_KEY",
        "LLAMA_API_KEY",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN",
    ];
    let server = Server::start_in(&secrets.map(|name| (name, "sesame")), &[]).await;
    let environment = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/environ")).unwrap();
    assert_eq!(environment(server.pid()).matches("sesame").count(), secrets.len());
    let workers = server.workers();
    assert!(!workers.is_empty());
    for pid in workers {
        let of_worker = environment(pid);
        assert!(of_worker.contains("PATH=") && !of_worker.contains("sesame"), "{of_worker}");
    }
}

#[tokio::test]
async fn pages_of_named_origins_may_ask() {
    let page = "https://chat.example.com";
    let server =
        Server::start(&["--api-key", "secret", "--cors-origins", "https://chat.example.com,http://localhost:3000"])
            .await;
    let preflight = |path: &str, origin: &str| {
        let request = server.client.request(Method::OPTIONS, server.url(path)).header("origin", origin);
        request
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "authorization,content-type,x-stainless-lang")
    };
    let told =
        |answer: &Response, name: &str| answer.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
    // Browsers send no key with it.
    for path in [CHAT, "/v1/messages", "/v1/responses"] {
        let answer = preflight(path, page).send().await.unwrap();
        assert_eq!(answer.status(), 200, "{path}");
        assert_eq!(told(&answer, "access-control-allow-origin").as_deref(), Some(page));
        let (methods, headers) = (
            told(&answer, "access-control-allow-methods").unwrap(),
            told(&answer, "access-control-allow-headers").unwrap(),
        );
        assert!(
            methods.contains("POST") && headers.contains("authorization") && headers.contains("x-stainless-lang"),
            "{methods} {headers}"
        );
        assert!(told(&answer, "access-control-allow-credentials").is_none());
    }
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1});
    for (key, status) in [("secret", 200), ("wrong", 401)] {
        let answer =
            with_key(server.post(CHAT, &body), key).header("origin", "http://localhost:3000").send().await.unwrap();
        assert_eq!(answer.status(), status);
        assert_eq!(
            told(&answer, "access-control-allow-origin").as_deref(),
            Some("http://localhost:3000"),
            "errors are read, too"
        );
        assert!(told(&answer, "access-control-expose-headers").unwrap().contains("x-request-id"));
    }
    // Browsers keep from others what they get.
    for other in ["https://example.com", "https://chat.example.com.evil.example", "null"] {
        assert_eq!(told(&preflight(CHAT, other).send().await.unwrap(), "access-control-allow-origin"), None, "{other}");
        let answer = with_key(server.post(CHAT, &body), "secret").header("origin", other).send().await.unwrap();
        assert_eq!(told(&answer, "access-control-allow-origin"), None, "{other}");
    }
    let any = Server::start(&["--cors-origins", "*"]).await;
    let answer = any.post(CHAT, &body).header("origin", page).send().await.unwrap();
    assert_eq!(told(&answer, "access-control-allow-origin").as_deref(), Some("*"));
    let none = Server::start(&[]).await;
    let answer = none.post(CHAT, &body).header("origin", page).send().await.unwrap();
    assert_eq!(told(&answer, "access-control-allow-origin"), None);
}

//! The first minutes: no flags but the model's file, llama-server's habits, and a person at a terminal.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::server::{Events, Server, UNENDING, await_condition, endless, model, unending_model};

const CHAT: &str = "/v1/chat/completions";

/// A chat whose question has so many words.
fn long_chat(words: usize) -> Value {
    json!({"messages": [{"role": "user", "content": "word ".repeat(words)}], "max_tokens": 2, "temperature": 0})
}

#[tokio::test]
async fn one_request_may_use_the_trained_context_without_a_flag() {
    let server = Server::start(&[]).await;
    let answer = server.post(CHAT, &long_chat(600)).send().await.unwrap();
    let (status, body): (_, Value) = (answer.status(), answer.json().await.unwrap());
    assert_eq!(status, 200, "{body}");
    // More than an eighth of the 2,048 that the model was trained for.
    assert!(body["usage"]["prompt_tokens"].as_u64().unwrap() > 600, "{body}");
    let refused: Value = server.post(CHAT, &long_chat(3000)).send().await.unwrap().json().await.unwrap();
    assert_eq!(refused["error"]["code"], "context_length_exceeded");
    let message = refused["error"]["message"].as_str().unwrap();
    for part in ["2048", "leave --ctx-size (-c; in pods", "or have -np 1", "spec.runtime.contextSize", "--parallel"] {
        assert!(message.contains(part), "{message}");
    }
    assert!(server.log().contains("2048 tokens for each request, 8 at once"), "{}", server.log());
}

#[tokio::test]
async fn a_pool_is_shared_where_memory_is_not_for_everybody_at_once() {
    // With cells for everybody the model takes more than a quarter of this.
    let server = Server::start(&["--memory-limit", "128"]).await;
    assert_eq!(server.post(CHAT, &long_chat(600)).send().await.unwrap().status(), 200);
    assert!(server.log().contains("2048 tokens for each request, 8 at once, who share 2048"), "{}", server.log());
}

#[tokio::test]
async fn llama_servers_command_line_and_health_are_understood() {
    let file = model("demo-v2.q8_0.gguf");
    let mut command = Command::new(env!("CARGO_BIN_EXE_gantry-server"));
    command.arg("-m").arg(&file).args(["-np", "2", "-c", "1024", "--jinja"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let server = Server::launch_as(command, &[], None);
    let health = async || {
        let response = server.get("/health").await;
        let after = response.headers().get("retry-after").map(|after| after.to_str().unwrap().parse::<u64>().unwrap());
        assert_eq!(after.is_some_and(|after| (1..=60).contains(&after)), response.status() == 503, "{after:?}");
        (response.status().as_u16(), response.json::<Value>().await.unwrap())
    };
    await_condition("the model to be loaded", async || match health().await {
        (200, body) => body == json!({"status": "ok"}),
        (status, body) => {
            assert_eq!((status, &body["error"]["type"]), (503, &json!("unavailable_error")));
            false
        }
    })
    .await;
    // The record follows the moment from which requests are served.
    let said = "512 tokens for each request, 2 at once";
    await_condition("the record of what is served", async || server.log().contains(said)).await;
}

#[tokio::test]
async fn a_file_that_tells_of_endless_training_is_served() {
    let (_folder, file) = unending_model();
    let mut bytes = std::fs::read(&file).unwrap();
    let key = b"llama.context_length";
    let at = bytes.windows(key.len()).position(|window| window == key).unwrap() + key.len() + 4;
    bytes[at..at + 4].copy_from_slice(&i32::MAX.to_le_bytes());
    std::fs::write(&file, bytes).unwrap();
    let server = Server::launch(&file, &[]);
    server.until_ready().await;
    let said = "131072 tokens for each request, 8 at once";
    await_condition("the record of what is served", async || server.log().contains(said)).await;
    assert!(
        server.log().contains("trained for 2147483647: for all of it leave -c out, or say -c "),
        "{}",
        server.log()
    );
    assert_eq!(server.ask("What is the capital of Peru?").await, "The capital of Peru is Lima.");
}

#[tokio::test]
async fn flags_that_change_no_answer_are_taken_and_told() {
    let server = Server::start(&["-fa", "on", "-b", "2048", "-ub", "512", "--mlock", "-v", "-tb", "2"]).await;
    let log = server.log();
    for flag in ["-fa", "-b", "--mlock", "-v", "-tb"] {
        assert_eq!(log.matches(&format!("'{flag}' changes nothing here: ")).count(), 1, "{flag}: {log}");
    }
}

#[test]
fn a_port_that_is_taken_and_a_file_that_is_none_are_told_before_anything_is_served() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let file = model("demo-v2.q8_0.gguf");
    let (code, text) = told(&[file.to_str().unwrap(), "--port", &port], &[]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("another process listens there") && text.contains("--port (0: any free one)"), "{text}");
    let (code, text) = told(&[model("README.md").to_str().unwrap(), "--port", "0"], &[]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("not a GGUF file") && !text.contains("listening"), "{text}");
    // A draft model whose tokens are others.
    let dir = tempfile::tempdir().unwrap();
    let (stranger, mut bytes) =
        (dir.path().join("stranger.gguf"), std::fs::read(model("demo-draft.q8_0.gguf")).unwrap());
    let at = bytes.windows(7).position(|window| window == b"sistant").unwrap();
    bytes[at..at + 7].copy_from_slice(b"SISTANT");
    std::fs::write(&stranger, bytes).unwrap();
    let (code, text) = told(&[file.to_str().unwrap(), "-md", stranger.to_str().unwrap(), "--port", "0"], &[]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("cannot be the draft model of") && text.contains("has another text"), "{text}");
    assert!(!text.contains("listening"), "{text}");
}

#[tokio::test]
async fn who_is_cut_off_is_told_why_and_no_worker_complains() {
    let mut server = Server::start_unending(1, &[]).await;
    let mut events = Events::open(server.post("/v1/completions", &endless(UNENDING))).await;
    events.next().await.unwrap();
    server.signal("INT");
    await_condition("the drain", async || server.log().contains("a second signal cuts requests off")).await;
    assert_eq!(server.log().matches("requests in flight have 120 s to end").count(), 1, "{}", server.log());
    server.signal("INT");
    let last = events.rest().await.pop().unwrap();
    assert!(last.contains("the server was told to end, and waits no longer"), "{last}");
    assert!(last.contains("server_ending") && !last.contains("out of service"), "{last}");
    assert_eq!(server.ended().await.code(), Some(128 + 2), "as of a process that Ctrl-C ended");
    let log = server.log();
    assert!(!log.contains("does not read its events") && !log.contains("\"ERROR\""), "{log}");
}

#[tokio::test]
async fn every_request_that_ends_is_a_line_of_the_log_with_its_status_and_no_text() {
    let server = Server::start(&[]).await;
    server.ask("What is the capital of Peru?").await;
    let secret = json!({"messages": [{"role": "user", "content": "xyzzy"}], "temperature": 9});
    assert_eq!(server.post(CHAT, &secret).send().await.unwrap().status(), 400);
    assert_eq!(server.post("/v1/nothing", &secret).send().await.unwrap().status(), 404);
    assert_eq!(server.get("/metrics").await.status(), 200);
    let ended = || -> Vec<(Value, Value, Value)> {
        let log = server.log();
        let records = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let ended = records.filter(|record| record["message"] == "request ended");
        ended.map(|record| (record["route"].clone(), record["status"].clone(), record["code"].clone())).collect()
    };
    await_condition("the records", async || ended().len() >= 3).await;
    let row = |route: &str, status: u16, code: Value| (json!(route), json!(status), code);
    for wanted in [
        row("chat_completions", 200, Value::Null),
        row("chat_completions", 400, json!("invalid_value")),
        row("other", 404, json!("unknown_url")),
    ] {
        assert_eq!(ended().iter().filter(|row| **row == wanted).count(), 1, "{wanted:?}: {:?}", ended());
    }
    let log = server.log();
    assert!(!log.contains("xyzzy"), "{log}");
}

#[tokio::test]
async fn more_context_than_requests_can_use_is_told() {
    let server = Server::start(&["-c", "100000"]).await;
    let said = "each of 8 at once (--parallel) gets 2048; --ctx-size 16384 is enough";
    await_condition("the warning", async || server.log().contains(said)).await;
}

/// What the program says of a command line, and how it ends.
fn told(line: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gantry-server"));
    let is_setting = |name: &str| name.starts_with("GANTRY_") || name.starts_with("LLAMA_");
    // What this test runs under is nothing that the program was told.
    for (name, _) in std::env::vars_os().filter(|(name, _)| is_setting(&name.to_string_lossy())) {
        command.env_remove(name);
    }
    command.args(line).envs(variables.iter().copied()).env_remove("RUST_LOG").stdin(Stdio::null());
    let ended = command.output().unwrap();
    (ended.status.code(), String::from_utf8(ended.stdout).unwrap() + &String::from_utf8(ended.stderr).unwrap())
}

#[test]
fn mistakes_are_told_where_they_were_made() {
    let file = model("demo-v2.q8_0.gguf");
    let file = file.to_str().unwrap();
    let missing = [("GANTRY_MODEL", "./missing.gguf")];
    let folder = tempfile::tempdir().unwrap();
    let nowhere = folder.path().join("link");
    std::os::unix::fs::symlink("gone.gguf", &nowhere).unwrap();
    let nowhere = nowhere.to_str().unwrap();
    for (line, variables, code, says) in [
        (&["./missing.gguf"][..], &[][..], 2, "\"./missing.gguf\" is not there"),
        (&["./missing"], &[], 2, "\"./missing\" is not there"),
        (&["/tmp"], &[], 2, "\"/tmp\" is a directory"),
        (&["tests"], &[], 2, "\"tests\" is a directory: name the file in it"),
        (&[nowhere], &[], 2, "is a link to \"gone.gguf\", which is not there"),
        (&["run", "llama3"], &[], 2, "'run' is no command"),
        (&["validate", file, "--header-only", "-fa", "on"], &[], 0, "warning: '-fa' changes nothing here"),
        (&["validate", "/tmp"], &[], 2, "\"/tmp\" is a directory: name the file in it"),
        (&["validate", "./missing.gguf"], &[], 2, "\"./missing.gguf\" is not there"),
        (&["validate", "/dev/null"], &[], 2, "\"/dev/null\" is a pipe, a device or a socket"),
        (&[], &missing, 2, "GANTRY_MODEL, which stands for --model, must be a readable file"),
        (&[], &[("LLAMA_ARG_MODEL", "./gone.gguf")], 2, "LLAMA_ARG_MODEL, which stands for --model, must be"),
        (&[file], &[("LLAMA_ARG_SSL_KEY_FILE", "/key")], 2, "LLAMA_ARG_SSL_KEY_FILE is no variable of this server"),
        (
            &[file],
            &[("GANTRY_API_KEYS", "hush")],
            2,
            "GANTRY_API_KEYS is no variable of this server: did you mean GANTRY_API_KEY?",
        ),
        (&[file], &[("LLAMA_API_KEY", "")], 2, "names no key"),
        (
            &[file],
            &[("GANTRY_API_KEY_FILE", "")],
            2,
            "GANTRY_API_KEY_FILE, which stands for --api-key-file, may not be \"\": it is empty",
        ),
        (
            &[file, "--port", "x"],
            &[("GANTRY_SERVICE_HOST", "10.0.0.1"), ("GANTRY_PORT", "tcp://10.0.0.1:80")],
            2,
            "--port must be",
        ),
        (&[file, "--temprature", "1"], &[], 2, "did you mean '--temperature'? Instead: requests say"),
        (&[], &[], 2, "Usage: gantry-server"),
        (
            &[file, "-np", "64", "-c", "64"],
            &[],
            2,
            "--ctx-size must be 0 or at least 1024, 16 tokens for each of --parallel 64",
        ),
        (&[file, "--port", "x"], &missing, 2, "--port must be"),
        (&[file], &[("GANTRY_PARALLEL", "x")], 2, "GANTRY_PARALLEL, which stands for --parallel, must be"),
        (&[file], &[("GANTRY_ANY_MODEL", "x")], 2, "GANTRY_ANY_MODEL, which stands for --any-model, may not be"),
        (&[file], &[("GANTRY_EMBEDDINGS", "x")], 2, "GANTRY_EMBEDDINGS, which stands for --embeddings, may not be"),
        (&[file, "--memory-limit", "10"], &[], 2, "from 64 to 16777216 MiB, not \"10\""),
        (&[file, "--memory-limit", "64", "-c", "1000000", "--port", "0"], &[], 1, "--memory-limit 64 is too low"),
        (&["validate", file, "--header-only"], &[], 0, "can be used here: enough"),
        (&[file, "-ngl", "99", "--port", "0"], &[], 1, "`make cuda` in a checkout"),
        (&[file, "--reranking", "--port", "0"], &[], 1, "leave --reranking out"),
        (&[file, "--embeddings", "--port", "0"], &[], 1, "choose one (--pooling mean, cls or last)"),
        (&[file, "--list-devices"], &[], 2, "`gantry-server devices` lists them"),
        (&[file, "--frobnicate"], &[], 2, "`gantry-server serve --help` lists its flags"),
        (&["--help"], &[], 0, "All flags: gantry-server serve --help"),
        (&[file, "--port", "1", "--host", "203.0.113.1"], &[], 1, "give --host one of its own"),
        (&["validate", "-m", file, "-np", "4", "--header-only"], &[], 0, "4 x 2048"),
    ] {
        let (ended, text) = told(line, variables);
        assert_eq!(ended, Some(code), "{line:?}: {text}");
        assert!(text.contains(says), "{line:?}: {text}");
        assert!(!text.contains("two models"), "{line:?}: {text}");
        assert!(code == 0 || !(text.contains("listening") || text.contains("shutting down")), "{line:?}: {text}");
    }
}

#[tokio::test]
async fn what_llama_servers_clients_probe_is_answered() {
    let server = Server::start(&["--alias", "demo", "-c", "1024", "-np", "2"]).await;
    let json = async |path: &str| -> Value { server.get(path).await.json().await.unwrap() };
    assert_eq!(json("/models").await, json("/v1/models").await);
    assert_eq!(json("/v1/health").await, json!({"status": "ok"}));
    let props = json("/props").await;
    assert_eq!((&props["total_slots"], &props["model_alias"]), (&json!(2), &json!("demo")));
    assert_eq!(props["default_generation_settings"]["n_ctx"], 512);
    assert_eq!(props["modalities"], json!({"vision": false, "audio": false}));
    assert_eq!(props["default_generation_settings"]["params"]["top_k"], 0);
    assert_eq!(props["eos_token"], "<|im_end|>");
    let slots = json("/slots").await;
    let idle = |id: u32| json!({"id": id, "n_ctx": 512, "speculative": false, "is_processing": false});
    assert_eq!(slots, json!([idle(0), idle(1)]));
    let listed = json("/v1/models").await;
    let listed = &listed["data"][0];
    assert_eq!((&listed["meta"]["n_vocab"], &listed["meta"]["n_ctx_train"]), (&json!(2048), &json!(2048)));
    assert_eq!((&listed["max_model_len"], &listed["features"][0]), (&json!(512), &json!("completions")));
    let chat =
        json!({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": -1, "reasoning_effort": "none"});
    assert_eq!(server.post("/chat/completions", &chat).send().await.unwrap().status(), 200);
    let told = json("/v1/models/gpt-4").await;
    let message = told["error"]["message"].as_str().unwrap();
    assert!(message.contains("there is demo, which GET /v1/models lists"), "{message}");
}

#[tokio::test]
async fn slots_say_whether_a_request_would_wait() {
    let server = Server::start_unending(1, &[]).await;
    let is_full = async || server.get("/slots?fail_on_no_slot=1").await.status() == 503;
    assert!(!is_full().await);
    let mut stream = Events::open(server.post("/v1/completions", &endless(UNENDING))).await;
    stream.next().await.unwrap();
    await_condition("the slot to be in use", is_full).await;
    let slots: Value = server.get("/slots").await.json().await.unwrap();
    assert_eq!(slots[0]["is_processing"], true);
    drop(stream);
    await_condition("the slot to be free", async || !is_full().await).await;
}

#[tokio::test]
async fn turns_that_clients_send_back_are_taken() {
    let server = Server::start(&[]).await;
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}});
    let ask = async |messages: Value| {
        let body = json!({"messages": messages, "max_tokens": 1, "temperature": 0});
        let response = server.post(CHAT, &body).send().await.unwrap();
        (response.status().as_u16(), response.json::<Value>().await.unwrap())
    };
    let user = json!({"role": "user", "content": "Hello!", "name": "Ann"});
    for turn in [json!({"role": "assistant", "content": null}), json!({"role": "assistant", "content": []})] {
        let (status, body) = ask(json!([user, turn, user])).await;
        assert_eq!(status, 200, "{body}");
    }
    let asks = json!({"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [call]});
    let answers = json!({"role": "tool", "content": "42", "tool_call_id": "1"});
    let (status, body) = ask(json!([user, asks, answers])).await;
    assert_eq!(status, 200, "{body}");
    let (status, body) = ask(json!([user, answers])).await;
    assert_eq!((status, &body["error"]["param"]), (400, &json!("messages[1].role")));
}

/// The server under a terminal that `script` makes.
fn in_a_terminal(port: u16) -> std::process::Child {
    let (program, file) = (env!("CARGO_BIN_EXE_gantry-server"), model("demo-v2.q8_0.gguf"));
    // In place of the shell: one that stays gets Ctrl-C as well, and some end with it whatever the server does.
    let line = format!("exec {program} {} --port {port} -t 1", file.display());
    let mut script = Command::new("script");
    script.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
    script.env("TERM", "xterm").env_remove("RUST_LOG").env_remove("NO_COLOR");
    script.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
}

#[test]
fn a_person_at_a_terminal_is_spoken_to() {
    let mut script = in_a_terminal(0);
    let mut keys = script.stdin.take().unwrap();
    let mut screen = BufReader::new(script.stdout.take().unwrap());
    let mut text = String::new();
    while !text.contains("Ctrl-C") {
        assert!(screen.read_line(&mut text).unwrap() > 0, "it ended early:\n{text}");
    }
    let url = text.split("listening on ").nth(1).unwrap().split_whitespace().next().unwrap();
    assert!(text.matches(url).count() >= 2, "{text}");
    for part in ["\u{1b}[1;32mready", "demo-v2.q8_0 (llama ", "2048 tokens for each request", "loading demo-v2.q8_0"] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
    assert!(!text.contains('{'), "{text}");
    keys.write_all(b"\x03").unwrap();
    screen.read_to_string(&mut text).unwrap();
    assert!(text.contains("shutting down") && text.contains("a second signal"), "{text}");
    assert!(script.wait().unwrap().success());
}

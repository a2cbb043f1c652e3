//! Responses that are kept: by two servers with one store, in the background, for whom they are, and what is said where they cannot be.

use std::path::Path;

use gantry_server::limits::MAX_BACKGROUND_RESPONSES;
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};

use crate::s3::s3;
use crate::server::{Events, Server, await_condition};

const RESPONSES: &str = "/v1/responses";

fn asked(input: &Value) -> Value {
    json!({"model": "demo-v2.q8_0", "input": input, "temperature": 0, "max_output_tokens": 64})
}

/// The same with more.
fn with(mut body: Value, more: &Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// One in the background that outlasts the test where the context lasts: each of its letters is certain, so that no token takes
/// long to be found, however slow the build.
fn unending() -> Value {
    let schema =
        json!({"type": "object", "properties": {"a": {"const": "0123456789".repeat(3000)}}, "required": ["a"]});
    let format = json!({"format": {"type": "json_schema", "name": "long", "schema": schema, "strict": true}});
    json!({"input": "Write.", "background": true, "text": format, "temperature": 0})
}

async fn told(request: RequestBuilder) -> (u16, Value) {
    let answer = request.send().await.unwrap();
    (answer.status().as_u16(), answer.json().await.unwrap())
}

async fn post(server: &Server, body: &Value) -> (u16, Value) {
    told(server.post(RESPONSES, body)).await
}

/// A response that is told with 200.
async fn made(server: &Server, body: &Value) -> Value {
    let (status, response) = post(server, body).await;
    assert_eq!(status, 200, "{response}");
    response
}

fn of(response: &Value) -> String {
    format!("{RESPONSES}/{}", response["id"].as_str().unwrap())
}

async fn get(server: &Server, path: &str) -> (u16, Value) {
    told(server.client.get(server.url(path))).await
}

async fn delete(server: &Server, path: &str) -> (u16, Value) {
    told(server.client.request(Method::DELETE, server.url(path))).await
}

fn store(folder: &Path) -> String {
    format!("file://{}", folder.display())
}

/// Files below a folder.
fn files(folder: &Path) -> usize {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| if path.is_dir() { files(&path) } else { 1 }).sum()
}

async fn until_status(server: &Server, path: &str, status: &str) -> Value {
    await_condition(status, async || get(server, path).await.1["status"] == status).await;
    get(server, path).await.1
}

/// What is the same in whatever store.
async fn one_goes_on_from_what_the_other_answered(one: &Server, other: &Server) {
    let first =
        made(one, &with(asked(&json!("Hello!")), &json!({"instructions": "Be kind.", "metadata": {"a": "b"}}))).await;
    assert_eq!((&first["store"], &first["status"]), (&json!(true), &json!("completed")));
    assert_eq!(get(other, &of(&first)).await, (200, first.clone()));

    let chained = with(asked(&json!("And?")), &json!({"previous_response_id": first["id"]}));
    let second = made(other, &chained).await;
    assert_eq!((&second["previous_response_id"], &second["instructions"]), (&first["id"], &Value::Null));
    // As one that sends all of it is answered.
    let items = json!([{"role": "user", "content": "Hello!"}, first["output"][0], {"role": "user", "content": "And?"}]);
    let whole = made(one, &with(asked(&items), &json!({"store": false}))).await;
    assert_eq!(whole["output"][0]["content"], second["output"][0]["content"]);
    assert_eq!(whole["usage"]["input_tokens"], second["usage"]["input_tokens"]);
    assert_eq!(get(one, &of(&whole)).await.0, 404, "that one was not to be kept");

    // An item may be named in place of what it says.
    let named = json!([{"role": "user", "content": "Hello!"}, {"type": "item_reference", "id": first["output"][0]["id"]}, {"role": "user", "content": "And?"}]);
    let referring = made(one, &asked(&named)).await;
    assert_eq!(referring["output"][0]["content"], second["output"][0]["content"]);

    let (status, page) = get(one, &format!("{}/input_items?order=asc&limit=2", of(&second))).await;
    assert_eq!((status, &page["has_more"], page["data"].as_array().unwrap().len()), (200, &json!(true), 2), "{page}");
    assert_eq!(page["data"][0]["content"][0], json!({"type": "input_text", "text": "Hello!"}));
    assert_eq!(page["data"][1], first["output"][0]);
    let after = page["last_id"].as_str().unwrap();
    let (_, rest) = get(one, &format!("{}/input_items?order=asc&after={after}", of(&second))).await;
    assert_eq!((&rest["has_more"], &rest["data"][0]["content"][0]["text"]), (&json!(false), &json!("And?")));

    // Streamed, it is kept when its last event is there.
    let streamed = with(chained.clone(), &json!({"stream": true, "previous_response_id": second["id"]}));
    let events = Events::open(other.post(RESPONSES, &streamed)).await.rest().await;
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(get(one, &of(&last["response"])).await, (200, last["response"].clone()));

    let (status, deleted) = delete(other, &of(&first)).await;
    assert_eq!((status, deleted), (200, json!({"id": first["id"], "object": "response", "deleted": true})));
    for (server, path) in [(one, of(&first)), (other, format!("{}/input_items", of(&first)))] {
        let (status, error) = get(server, &path).await;
        assert_eq!((status, &error["error"]["code"]), (404, &json!("response_not_found")));
    }
    let (status, error) = post(one, &chained).await;
    let refused = (status, &error["error"]["code"], &error["error"]["param"]);
    assert_eq!(refused, (400, &json!("previous_response_not_found"), &json!("previous_response_id")));
    // Those after it have all that they need.
    assert_eq!(post(one, &with(chained, &json!({"previous_response_id": second["id"]}))).await.0, 200);

    // Nobody waits for it on a connection, and who wants it to end need not know who answers it.
    let queued = made(one, &with(asked(&json!("Hello!")), &json!({"background": true}))).await;
    assert_eq!((&queued["status"], &queued["background"]), (&json!("queued"), &json!(true)));
    let done = until_status(other, &of(&queued), "completed").await;
    assert_eq!((&done["id"], done["output"][0]["status"].as_str()), (&queued["id"], Some("completed")));
    let (status, error) = told(other.post(&format!("{}/cancel", of(&second)), &json!({}))).await;
    assert!(status == 400 && error["error"]["message"].as_str().unwrap().contains("background"), "{error}");
    for server in [one, other] {
        let running = made(one, &unending()).await;
        until_status(server, &of(&running), "in_progress").await;
        let (status, cancelled) = told(server.post(&format!("{}/cancel", of(&running)), &json!({}))).await;
        assert_eq!((status, &cancelled["status"]), (200, &json!("cancelled")), "{cancelled}");
        assert_eq!(get(one, &of(&running)).await, (200, cancelled));
    }
    let running = made(one, &unending()).await;
    assert_eq!(delete(other, &of(&running)).await.0, 200);
    assert_eq!(get(one, &of(&running)).await.0, 404);
    await_condition("all to have ended", async || one.metric("gantry_requests_running").await == 0.0).await;
    assert_eq!(get(one, &of(&running)).await.0, 404);
}

#[tokio::test]
async fn two_servers_share_what_they_keep() {
    let folder = tempfile::tempdir().unwrap();
    let (url, sizes) = (store(folder.path()), ["--ctx-size", "4096", "--parallel", "2"]);
    let args = [&["--response-store", &url][..], &sizes].concat();
    let (one, other) = tokio::join!(Server::start(&args), Server::start(&args));
    one_goes_on_from_what_the_other_answered(&one, &other).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_is_as_good_as_a_directory() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("bucket")).unwrap();
    let endpoint = s3(folder.path(), "id", "a-secret").await;
    let variables = [
        ("AWS_ENDPOINT", endpoint.as_str()),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_REGION", "eu-central-1"),
        ("AWS_ACCESS_KEY_ID", "id"),
        ("AWS_SECRET_ACCESS_KEY", "a-secret"),
    ];
    let args = ["--response-store", "s3://bucket/some/prefix", "--ctx-size", "4096", "--parallel", "2"];
    let (one, other) = tokio::join!(Server::start_in(&variables, &args), Server::start_in(&variables, &args));
    one_goes_on_from_what_the_other_answered(&one, &other).await;
    assert!(files(&folder.path().join("bucket/some/prefix")) > 0);
    assert!(!one.log().contains("a-secret"));

    let wrong = variables.map(|(name, value)| (name, if name == "AWS_SECRET_ACCESS_KEY" { "wrong" } else { value }));
    let refused = Server::start_in(&wrong, &args).await;
    let (status, error) = post(&refused, &asked(&json!("Hi"))).await;
    assert_eq!((status, &error["error"]["code"]), (503, &json!("store_unavailable")));
    assert_eq!(post(&refused, &with(asked(&json!("Hi")), &json!({"store": false}))).await.0, 200);
}

#[tokio::test]
async fn what_a_server_answered_when_it_died_has_failed() {
    let folder = tempfile::tempdir().unwrap();
    let url = store(folder.path());
    let args = ["--response-store", &url, "--drain-timeout", "0"];
    let start = || Server::start_unending(1, &args);
    let (mut one, mut ends, stops, other) = tokio::join!(start(), start(), start(), start());
    let (running, ending) = (made(&one, &unending()).await, made(&ends, &unending()).await);
    let stopped = made(&stops, &unending()).await;
    for response in [&running, &ending, &stopped] {
        until_status(&other, &of(response), "in_progress").await;
    }
    stops.signal("STOP");
    one.signal("KILL");
    one.ended().await;
    assert_eq!(get(&other, &of(&running)).await.1["status"], "in_progress", "nobody can know yet");
    // One that can say so does at once.
    ends.signal("TERM");
    ends.ended().await;
    let failed = get(&other, &of(&ending)).await.1;
    assert_eq!((&failed["status"], &failed["error"]["code"]), (&json!("failed"), &json!("server_error")), "{failed}");
    let failed = until_status(&other, &of(&running), "failed").await;
    assert!(failed["error"]["message"].as_str().unwrap().contains("ended before it was done"), "{failed}");
    let (status, error) =
        post(&other, &with(asked(&json!("And?")), &json!({"previous_response_id": running["id"]}))).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("previous_response_id")));
    // One that wakes up later says nothing else.
    until_status(&other, &of(&stopped), "failed").await;
    stops.signal("CONT");
    await_condition("it to end", async || files(folder.path()) == 3 * 2 + 1).await;
    assert_eq!(get(&other, &of(&stopped)).await.1["status"], "failed");
    for response in [&running, &ending, &stopped] {
        assert_eq!(delete(&other, &of(response)).await.0, 200);
    }
    assert_eq!(files(folder.path()), 0);
}

#[tokio::test]
async fn a_server_that_ends_answers_first_what_nobody_waits_for() {
    let folder = tempfile::tempdir().unwrap();
    let url = store(folder.path());
    let args = ["--response-store", &url];
    let (mut ends, other) = tokio::join!(Server::start(&args), Server::start(&args));
    let response = made(&ends, &with(unending(), &json!({"max_output_tokens": 300}))).await;
    ends.signal("INT");
    assert!(ends.ended().await.success());
    let done = get(&other, &of(&response)).await.1;
    assert_eq!((&done["status"], &done["usage"]["output_tokens"]), (&json!("incomplete"), &json!(300)), "{done}");
}

#[tokio::test]
async fn responses_are_their_clients_and_no_one_elses() {
    let folder = tempfile::tempdir().unwrap();
    let url = store(folder.path());
    let server = Server::start(&["--response-store", &url, "--api-key", "first-secret,second-secret"]).await;
    let by = |request: RequestBuilder, key: &str| told(request.header("authorization", format!("Bearer {key}")));
    let (status, made) = by(server.post(RESPONSES, &asked(&json!("Hi"))), "first-secret").await;
    assert_eq!(status, 200, "{made}");
    let items = format!("{}/input_items", of(&made));
    let chained = with(asked(&json!("And?")), &json!({"previous_response_id": made["id"]}));
    let named = asked(&json!([{"type": "item_reference", "id": made["output"][0]["id"]}]));
    for (key, read, used) in [("second-secret", 404, 400), ("first-secret", 200, 200)] {
        assert_eq!(by(server.client.get(server.url(&of(&made))), key).await.0, read);
        assert_eq!(by(server.client.get(server.url(&items)), key).await.0, read);
        assert_eq!(by(server.post(RESPONSES, &chained), key).await.0, used);
        assert_eq!(by(server.client.delete(server.url(&of(&made))), key).await.0, read);
    }
    let (status, error) = by(server.post(RESPONSES, &named), "first-secret").await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("input[0].id")), "{error}");
    assert!(!server.log().contains("secret"));
}

#[tokio::test]
async fn without_a_store_what_needs_one_is_refused_by_name() {
    let server = Server::start(&[]).await;
    for (more, param) in [
        (json!({"store": true}), "store"),
        (json!({"background": true}), "background"),
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
    ] {
        let (status, error) = post(&server, &with(asked(&json!("Hi")), &more)).await;
        assert_eq!((status, &error["error"]["param"]), (400, &json!(param)));
        assert!(error["error"]["message"].as_str().unwrap().contains("--response-store"), "{error}");
    }
    let response = made(&server, &asked(&json!("Hi"))).await;
    assert_eq!(response["store"], false);
    for (status, error) in [get(&server, &of(&response)).await, delete(&server, &of(&response)).await] {
        assert!(status == 404 && error["error"]["message"].as_str().unwrap().contains("--response-store"), "{error}");
    }
}

#[tokio::test]
async fn what_is_wrong_with_a_question_is_told_by_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let url = store(folder.path());
    let server = Server::start(&["--response-store", &url]).await;
    let response = made(&server, &asked(&json!("Hi"))).await;
    for (query, param) in [
        ("?stream=true", "stream"),
        ("?frobnicate=1", "frobnicate"),
        ("?include[]=file_search_call.results", "include[]"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=x", "after"),
    ] {
        let (status, error) = get(&server, &format!("{}{query}", of(&response))).await;
        assert_eq!((status, &error["error"]["param"]), (400, &json!(param)), "{query}: {error}");
    }
    for (more, param) in [
        (json!({"background": true, "store": false}), "background"),
        (json!({"background": true, "stream": true}), "stream"),
        (json!({"previous_response_id": "../../etc"}), "previous_response_id"),
        (json!({"previous_response_id": 7}), "previous_response_id"),
        (json!({"input": [{"type": "item_reference", "id": "msg_7_0"}]}), "input[0].id"),
        (json!({"conversation": "c"}), "conversation"),
    ] {
        let (status, error) = post(&server, &with(asked(&json!("Hi")), &more)).await;
        assert_eq!((status, &error["error"]["param"]), (400, &json!(param)), "{more}: {error}");
    }
    for id in ["resp_..%2F..%2Fetc", "x", "resp_%FF", &format!("resp_{}", "0".repeat(32))] {
        assert_eq!(get(&server, &format!("{RESPONSES}/{id}")).await.0, 404, "{id}");
    }
    let put = server.client.put(server.url(&of(&response))).send().await.unwrap();
    assert_eq!(put.status(), 405);
}

#[tokio::test]
async fn a_store_that_fails_ends_no_stream_and_refuses_what_needs_it() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("responses");
    let url = store(&place);
    let server = Server::start(&["--response-store", &url]).await;
    let mut long = with(unending(), &json!({"background": false, "stream": true, "max_output_tokens": 200}));
    let mut events = Events::open(server.post(RESPONSES, &long)).await;
    events.next().await.unwrap();
    std::fs::remove_dir_all(&place).unwrap();
    std::fs::write(&place, "no directory").unwrap();
    let rest = events.rest().await;
    assert!(rest.last().unwrap().contains("response.incomplete"), "{rest:?}");
    long["stream"] = json!(false);
    for body in [&long, &with(asked(&json!("Hi")), &json!({"background": true}))] {
        let answer = server.post(RESPONSES, body).send().await.unwrap();
        assert_eq!(answer.status(), 503);
        assert!(answer.headers().contains_key("retry-after"));
        let error: Value = answer.json().await.unwrap();
        assert_eq!(error["error"]["code"], "store_unavailable", "{error}");
    }
    assert_eq!(get(&server, &format!("{RESPONSES}/resp_{}", "0".repeat(32))).await.0, 503);
    assert_eq!(post(&server, &with(asked(&json!("Hi")), &json!({"store": false}))).await.0, 200);
    // Once it is there again so is all that needs it.
    std::fs::remove_file(&place).unwrap();
    std::fs::create_dir(&place).unwrap();
    made(&server, &asked(&json!("Hi"))).await;
}

#[tokio::test]
async fn nothing_is_left_of_what_was_not_answered() {
    let folder = tempfile::tempdir().unwrap();
    let url = store(folder.path());
    let server = Server::start(&["--response-store", &url]).await;
    let long = asked(&json!("word ".repeat(30_000)));
    assert_eq!(post(&server, &long).await.0, 400);
    let other = with(asked(&json!("Hi")), &json!({"model": "other"}));
    assert_eq!(post(&server, &other).await.0, 404);
    let streamed = with(unending(), &json!({"background": false, "stream": true}));
    drop(Events::open(server.post(RESPONSES, &streamed)).await);
    await_condition("nothing to be left", async || files(folder.path()) == 0).await;
    // In the background it is known later.
    let response = made(&server, &with(long, &json!({"background": true}))).await;
    let failed = until_status(&server, &of(&response), "failed").await;
    assert_eq!(failed["error"]["code"], "invalid_prompt", "{failed}");
}

#[tokio::test]
async fn what_has_expired_is_not_told_and_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let url = store(folder.path());
    let args = ["--response-store", &url, "--response-ttl", "3600"];
    let server = Server::start(&args).await;
    let (old, new) = (made(&server, &asked(&json!("Hi"))).await, made(&server, &asked(&json!("Hi"))).await);
    let digits = old["id"].as_str().unwrap().strip_prefix("resp_").unwrap();
    let kept = |part: &str| folder.path().join(&digits[..2]).join(format!("{digits}.{part}"));
    // As it is an hour later.
    let text = std::fs::read_to_string(kept("response")).unwrap();
    let (head, response) = text.split_once('\n').unwrap();
    let mut head: Value = serde_json::from_str(head).unwrap();
    head["expires_at"] = json!(head["expires_at"].as_u64().unwrap() - 3600);
    std::fs::write(kept("response"), format!("{head}\n{response}")).unwrap();
    assert_eq!(get(&server, &of(&old)).await.0, 404);
    let hour_ago = std::time::SystemTime::now() - std::time::Duration::from_secs(3602);
    for part in ["input", "response"] {
        std::fs::File::options().write(true).open(kept(part)).unwrap().set_modified(hour_ago).unwrap();
    }
    std::fs::write(folder.path().join("of somebody else"), "").unwrap();
    drop(server);
    // A server that begins looks what it may delete.
    let next = Server::start(&args).await;
    await_condition("what has expired to be deleted", async || files(folder.path()) == 3).await;
    assert_eq!(get(&next, &of(&new)).await.0, 200);
}

#[tokio::test]
async fn a_store_that_cannot_be_is_told_at_the_start() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let start_with = |args: &[&str]| {
        let mut command = crate::server::command(&crate::server::model("demo-v2.q8_0.gguf"));
        command.args(["--port", "0"]).args(args);
        crate::server::output(command)
    };
    let start = |url: &str| start_with(&["--response-store", url]);
    let (status, told) = start(&format!("file://{}/below", file.path().display()));
    assert!(!status.success() && told.contains("--response-store cannot be used"), "{told}");
    let (status, told) = start_with(&["--response-store", "file:///tmp", "--response-ttl", "59"]);
    assert!(status.code() == Some(2) && told.contains("--response-ttl must be"), "{told}");
    for url in ["responses", "file://here", "s3://", "s3://a b/c", "gs://bucket"] {
        let (status, told) = start(url);
        assert!(status.code() == Some(2) && told.contains("--response-store must be"), "{url}: {told}");
    }
}

#[tokio::test]
async fn no_more_run_in_the_background_than_may() {
    let folder = tempfile::tempdir().unwrap();
    let url = store(folder.path());
    let server = Server::start(&["--response-store", &url]).await;
    for _ in 0..MAX_BACKGROUND_RESPONSES {
        made(&server, &unending()).await;
    }
    let answer = server.post(RESPONSES, &unending()).send().await.unwrap();
    assert!(answer.status() == 429 && answer.headers().contains_key("retry-after"));
    assert_eq!(files(folder.path()), 3 * MAX_BACKGROUND_RESPONSES);
}

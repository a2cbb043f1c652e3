//! Several answers to one request.

use serde_json::{Value, json};

use crate::server::{Events, Server, UNENDING, await_condition, chat, endless};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

/// The texts of an answer's choices, in the order of their indices.
fn texts(answer: &Value) -> Vec<String> {
    let choices = answer["choices"].as_array().unwrap();
    choices
        .iter()
        .enumerate()
        .map(|(index, choice)| {
            assert_eq!(choice["index"], index);
            let text = choice.pointer("/message/content").or_else(|| choice.get("text"));
            text.and_then(Value::as_str).unwrap().to_owned()
        })
        .collect()
}

/// The texts of a stream's choices, and its last chunk.
async fn streamed(server: &Server, path: &str, mut body: Value) -> (Vec<String>, Value) {
    let mut texts = vec![String::new(); usize::try_from(body["n"].as_u64().unwrap()).unwrap()];
    let mut ends = vec![0; texts.len()];
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let events = Events::open(server.post(path, &body)).await.rest().await;
    let (done, chunks) = events.split_last().unwrap();
    assert_eq!(done, "[DONE]");
    let chunks: Vec<Value> = chunks.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    let (last, chunks) = chunks.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    for chunk in chunks {
        assert_eq!((&chunk["id"], &chunk["usage"]), (&last["id"], &Value::Null));
        let choice = &chunk["choices"][0];
        let index = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
        assert_eq!(ends[index], 0, "a choice that has ended says no more: {chunk}");
        let text = choice.pointer("/delta/content").or_else(|| choice.get("text")).and_then(Value::as_str);
        texts[index].push_str(text.unwrap_or_default());
        ends[index] += usize::from(!choice["finish_reason"].is_null());
    }
    assert_eq!(ends, vec![1; texts.len()], "each choice ends once");
    (texts, last.clone())
}

#[tokio::test]
async fn choices_differ_and_repeat_with_the_seed_streamed_or_not() {
    // One sequence, so that each is computed alone and kernels cannot make a difference.
    let server = Server::start(&["--ctx-size", "2048", "--parallel", "1"]).await;
    let body = json!({
        "prompt": "One", "n": 3, "temperature": 1.5, "max_tokens": 24, "seed": 7, "ignore_eos": true,
    });
    let ask = async |body: &Value| -> Value { server.post(TEXT, body).send().await.unwrap().json().await.unwrap() };
    let whole = ask(&body).await;
    let three = texts(&whole);
    assert!(three[0] != three[1] && three[1] != three[2] && three[0] != three[2], "{three:?}");
    assert_eq!(texts(&ask(&body).await), three);
    let (pieces, last) = streamed(&server, TEXT, body.clone()).await;
    assert_eq!(pieces, three);

    let mut alone = body;
    alone["n"] = json!(1);
    let alone = ask(&alone).await;
    assert_eq!(texts(&alone)[0], three[0], "the first of many is the one that comes alone");
    let usage = &whole["usage"];
    assert_eq!(usage["prompt_tokens"], alone["usage"]["prompt_tokens"], "the prompt is counted once");
    assert_eq!(usage["completion_tokens"], 3 * 24);
    for count in ["prompt_tokens", "completion_tokens", "total_tokens"] {
        assert_eq!(last["usage"][count], usage[count]);
    }
}

#[tokio::test]
async fn several_prompts_are_answered_in_their_order_each_as_if_alone() {
    let server = Server::start(&["--ctx-size", "2048", "--parallel", "1"]).await;
    let body = |prompt: Value, n: u32| json!({"prompt": prompt, "n": n, "temperature": 1.5, "max_tokens": 8, "seed": 7, "ignore_eos": true});
    let ask = async |body: &Value| -> Value { server.post(TEXT, body).send().await.unwrap().json().await.unwrap() };
    let alone = [ask(&body(json!("One"), 2)).await, ask(&body(json!([5, 6, 7]), 2)).await];
    let both = ask(&body(json!(["One"]), 2)).await;
    assert_eq!(texts(&both), texts(&alone[0]));
    let one = ask(&body(json!(["One", "Two"]), 2)).await;
    assert_eq!(texts(&one)[..2], texts(&alone[0])[..]);
    let tokens = body(json!([[5, 6, 7], [5, 6, 7]]), 2);
    let whole = ask(&tokens).await;
    assert_eq!(texts(&whole), [texts(&alone[1]), texts(&alone[1])].concat());
    // Three tokens, and what the vocabulary puts before a text is not put before tokens.
    assert_eq!((&whole["usage"]["prompt_tokens"], &alone[1]["usage"]["prompt_tokens"]), (&json!(6), &json!(3)));
    assert_eq!(whole["usage"]["completion_tokens"], 4 * 8);
    let mut stream = tokens.clone();
    stream["stream"] = json!(true);
    let events = Events::open(server.post(TEXT, &stream)).await.rest().await;
    let (done, chunks) = events.split_last().unwrap();
    assert_eq!(done, "[DONE]");
    let mut streamed = vec![String::new(); 4];
    for chunk in chunks {
        let choice: Value = serde_json::from_str::<Value>(chunk).unwrap()["choices"][0].take();
        streamed[usize::try_from(choice["index"].as_u64().unwrap()).unwrap()]
            .push_str(choice["text"].as_str().unwrap());
    }
    assert_eq!(streamed, texts(&whole));
}

#[tokio::test]
async fn choices_of_a_chat_come_together() {
    let server = Server::start(&["--ctx-size", "16384"]).await;
    let mut body = chat("What is the capital of Peru?");
    body["n"] = json!(2);
    let (pieces, last) = streamed(&server, CHAT, body.clone()).await;
    assert_eq!(pieces, ["The capital of Peru is Lima."; 2]);
    let whole: Value = server.post(CHAT, &body).send().await.unwrap().json().await.unwrap();
    assert_eq!(texts(&whole), pieces);
    assert_eq!(whole["usage"]["total_tokens"], last["usage"]["total_tokens"]);
    let answered = "gantry_requests_total{route=\"chat_completions\"";
    await_condition("two requests to be counted", async || (server.metric(answered).await - 2.0).abs() < 0.5).await;
}

#[tokio::test]
async fn the_prompt_of_all_choices_is_read_once() {
    let server = Server::start(&["--ctx-size", "8192", "--parallel", "4"]).await;
    let prompt = (0..120).map(|i| format!("word {i} ")).collect::<String>();
    let body = json!({"prompt": prompt, "n": 4, "temperature": 1.0, "max_tokens": 4, "timings": true});
    let answer: Value = server.post(TEXT, &body).send().await.unwrap().json().await.unwrap();
    let read =
        answer["choices"].as_array().unwrap().iter().map(|choice| choice["timings"]["prompt_n"].as_u64().unwrap());
    let tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    // Each of the others computes the last token, for what follows it.
    assert_eq!(read.sum::<u64>(), tokens + 3, "{answer}");
}

#[tokio::test]
async fn choices_that_do_not_all_fit_are_refused_together() {
    let server = Server::start_unending(2, &["--max-queue", "1"]).await;
    let mut body = endless(8);
    body["n"] = json!(4);
    let never = server.post(TEXT, &body).send().await.unwrap();
    assert_eq!(never.status(), 400, "it would not fit later either");
    let never: Value = never.json().await.unwrap();
    assert_eq!(never["error"]["param"], "n");
    let never = json!({"prompt": ["a", "b", "c", "d"], "max_tokens": 8});
    let never: Value = server.post(TEXT, &never).send().await.unwrap().json().await.unwrap();
    assert_eq!(never["error"]["param"], "prompt");
    let inside =
        async || server.metric("gantry_requests_queued{").await + server.metric("gantry_requests_running{").await;
    let mut other = Events::open(server.post(TEXT, &endless(UNENDING))).await;
    other.next().await.unwrap();
    let other = other.read_on();
    body["n"] = json!(3);
    let refused = server.post(TEXT, &body).send().await.unwrap();
    assert_eq!(refused.status(), 429);
    assert!(refused.headers().contains_key("retry-after"));
    await_condition("those that had fitted to be cancelled", async || inside().await < 1.5).await;
    other.abort();
    await_condition("all to be free", async || inside().await < 0.5).await;
    assert_eq!(server.post(TEXT, &body).send().await.unwrap().status(), 200);
}

#[tokio::test]
async fn a_client_that_leaves_cancels_all_choices() {
    let server = Server::start_unending(2, &[]).await;
    let mut body = endless(UNENDING);
    body["n"] = json!(2);
    let mut stream = Events::open(server.post(TEXT, &body)).await;
    stream.next().await.unwrap();
    let running = "gantry_requests_running";
    await_condition("all choices to run", async || server.metric(running).await > 1.5).await;
    drop(stream);
    await_condition("all slots to be free", async || server.metric(running).await < 0.5).await;
}

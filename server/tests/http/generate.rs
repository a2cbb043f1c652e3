//! The generate protocol over HTTP.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};

use crate::server::{Events, Server};

async fn ask(server: &Server, path: &str, body: &Value) -> (u16, Value) {
    let response = server.post(path, body).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

#[tokio::test]
async fn a_text_and_a_chat_are_answered_whole_and_by_typed_events() {
    let server = Server::start(&["--ctx-size", "1024", "--parallel", "2"]).await;
    let chat = json!({"messages": [{"role": "user", "content": "Which version are you?"}], "temperature": 0, "max_tokens": 32});
    let text = json!({"prompt": "Which version", "temperature": 0, "max_tokens": 8, "logprobs": true});
    let said = |answer: &Value| {
        let choice = &answer["choices"][0];
        choice["text"].as_str().or(choice["message"]["content"].as_str()).unwrap().to_owned()
    };
    for (path, mut body) in [("/chat", chat), ("/generate", text)] {
        let (status, whole) = ask(&server, path, &body).await;
        assert_eq!(status, 200, "{whole}");
        assert!(uuid::Uuid::try_parse(whole["id"].as_str().unwrap()).is_ok(), "{whole}");
        assert!(!said(&whole).is_empty());

        body["stream"] = json!(true);
        let events = Events::open(server.post(path, &body)).await.rest().await;
        let mut events: Vec<Value> = events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
        let done = events.pop().unwrap();
        assert_eq!((&done["type"], &done["usage"]), (&json!("done"), &whole["usage"]), "{done}");
        assert_eq!(done["finish_reason"], whole["choices"][0]["finish_reason"]);
        let tokens: String = events.iter().map(|event| event["token"].as_str().unwrap()).collect();
        assert_eq!(tokens, said(&whole));
        assert!(events.iter().enumerate().all(|(index, event)| event["index"] == index));
        assert!(events.iter().all(|event| event["logprob"].is_f64() == (path == "/generate")), "{events:?}");
    }

    // One of the caller's own strings ends an answer, and is no part of it.
    let body = json!({"messages": [{"role": "user", "content": "Which version are you?"}], "temperature": 0,
        "stop_sequences": ["version"]});
    let (_, stopped) = ask(&server, "/chat", &body).await;
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop_sequence", "{stopped}");
    assert!(!said(&stopped).contains("version"));

    for (path, body, code) in [
        ("/generate", json!({"prompt": "a", "stop": ["b"]}), "unknown_parameter"),
        ("/chat", json!({"messages": []}), "invalid_value"),
        ("/embeddings", json!({"input": 3}), "invalid_type"),
    ] {
        let (status, error) = ask(&server, path, &body).await;
        assert_eq!((status, &error["error"]["code"]), (400, &json!(code)), "{error}");
        assert!(error["error"]["message"].is_string() && error["error"]["type"] == "invalid_request_error", "{error}");
    }
}

/// **Feature: distributed-inference-server, Property 3: Token Limit Enforcement**
/// **Validates: Requirements 1.5**
#[test]
fn a_prompt_longer_than_the_context_is_refused_and_one_that_fits_is_not() {
    const CONTEXT: usize = 256;
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let context = CONTEXT.to_string();
    let server = runtime.block_on(Server::start(&["--ctx-size", &context, "--parallel", "1"]));
    let text = prop::collection::vec("[a-z]{1,9}", 1..120).prop_map(|words| words.join(" "));
    let mut runner = TestRunner::new(Config { cases: 100, ..Config::default() });
    let refused = std::cell::Cell::new(0);
    let property = |prompt: String| {
        runtime.block_on(async {
            let counted = ask(&server, "/tokenize", &json!({"content": prompt, "add_special": true})).await.1;
            let tokens = counted["tokens"].as_array().unwrap().len();
            let (status, answer) = ask(&server, "/generate", &json!({"prompt": prompt, "max_tokens": 1})).await;
            if tokens > CONTEXT {
                refused.set(refused.get() + 1);
                let error = &answer["error"];
                prop_assert_eq!((status, &error["code"]), (400, &json!("context_length_exceeded")), "{}", answer);
                let message = error["message"].as_str().unwrap();
                prop_assert!(message.contains(&context) && message.contains(&tokens.to_string()), "{}", message);
            } else if tokens < CONTEXT {
                prop_assert_eq!((status, &answer["usage"]["prompt_tokens"]), (200, &json!(tokens)), "{}", answer);
            }
            Ok(())
        })
    };
    runner.run(&text, property).unwrap();
    assert!((10..90).contains(&refused.get()), "{} of 100 were too long", refused.get());
}

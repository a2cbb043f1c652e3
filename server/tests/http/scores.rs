//! What is told of prompts, and the best of several answers, by a real model.

use serde_json::{Value, json};

use crate::server::{Events, Server};

const TEXT: &str = "/v1/completions";
/// What the demo models were trained on, about.
const PROMPT: &str = "The capital of the country is a city with a long history, and many people live there.";

async fn complete(server: &Server, mut body: Value) -> Value {
    body["temperature"] = json!(0);
    let answer = server.post(TEXT, &body).send().await.unwrap();
    let (status, text) = (answer.status(), answer.text().await.unwrap());
    assert_eq!(status, 200, "{text}");
    serde_json::from_str(&text).unwrap()
}

fn numbers(of: &Value) -> Vec<Option<f64>> {
    of.as_array().unwrap().iter().map(Value::as_f64).collect()
}

#[tokio::test]
async fn a_prompt_is_told_with_how_likely_its_tokens_are() {
    let server = Server::start(&[]).await;
    // Kept, and computed again all the same.
    complete(&server, json!({"prompt": PROMPT, "max_tokens": 4})).await;
    let told = complete(&server, json!({"prompt": PROMPT, "max_tokens": 4, "echo": true, "logprobs": 3})).await;
    let choice = &told["choices"][0];
    let text = choice["text"].as_str().unwrap();
    assert!(text.starts_with(PROMPT) && text.len() > PROMPT.len(), "{text}");
    let logprobs = &choice["logprobs"];
    let usage = |of: &Value, what: &str| of["usage"][what].as_u64().unwrap() as usize;
    let prompt_tokens = usage(&told, "prompt_tokens");
    let own = numbers(&logprobs["token_logprobs"]);
    assert_eq!(own.len(), prompt_tokens + usage(&told, "completion_tokens"));
    assert!(own[0].is_none() && own[1..].iter().all(|own| own.is_some_and(|own| own < 0.0)), "{own:?}");
    let tokens: String = logprobs["tokens"].as_array().unwrap().iter().map(|token| token.as_str().unwrap()).collect();
    assert_eq!(tokens, text);
    for (at, offset) in logprobs["text_offset"].as_array().unwrap().iter().enumerate() {
        let token = logprobs["tokens"][at].as_str().unwrap();
        assert!(text[offset.as_u64().unwrap() as usize..].starts_with(token), "{token} at {offset}");
    }
    // What follows half of the prompt is as likely where it is generated as where it is read.
    let half = json!({"prompt": text, "max_tokens": 0, "echo": true, "logprobs": 0});
    let read = complete(&server, half).await;
    let read_own = numbers(&read["choices"][0]["logprobs"]["token_logprobs"]);
    assert_eq!(
        (read["choices"][0]["text"].as_str(), read["choices"][0]["finish_reason"].as_str()),
        (Some(text), Some("length"))
    );
    assert_eq!((usage(&read, "completion_tokens"), read_own.len()), (0, usage(&read, "prompt_tokens")));
    for (one, other) in own.iter().zip(&read_own).skip(1) {
        assert!((one.unwrap() - other.unwrap()).abs() < 0.5, "{own:?} {read_own:?}");
    }
    let vllm = complete(&server, json!({"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 2})).await;
    let told = vllm["choices"][0]["prompt_logprobs"].as_array().unwrap();
    assert_eq!((told.len(), &told[0]), (prompt_tokens, &Value::Null));
    assert!(told[1..].iter().all(|told| (2..=3).contains(&told.as_object().unwrap().len())));
    assert!(!vllm["choices"][0]["text"].as_str().unwrap().starts_with(PROMPT));
    // In pieces it is the same.
    let body =
        json!({"prompt": PROMPT, "max_tokens": 4, "echo": true, "logprobs": 3, "stream": true, "temperature": 0});
    let events = Events::open(server.post(TEXT, &body)).await.rest().await;
    let chunks: Vec<Value> =
        events[..events.len() - 1].iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    let streamed: String = chunks.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap()).collect();
    let tokens =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["logprobs"]["tokens"].as_array()).flatten().count();
    assert_eq!((streamed.as_str(), tokens), (text, own.len()));
}

#[tokio::test]
async fn of_several_answers_the_likeliest_is_told_and_all_are_counted() {
    let server = Server::start(&[]).await;
    let mut body = json!({"prompt": PROMPT, "max_tokens": 8, "n": 1, "best_of": 4, "seed": 7, "logprobs": 0});
    let ask = async |body: &Value| {
        let answer = server.post(TEXT, body).send().await.unwrap();
        assert_eq!(answer.status(), 200);
        answer.json::<Value>().await.unwrap()
    };
    let best = ask(&body).await;
    body["n"] = json!(4);
    let all = ask(&body).await;
    let mean = |choice: &Value| {
        let own = numbers(&choice["logprobs"]["token_logprobs"]);
        own.iter().flatten().sum::<f64>() / own.len().max(1) as f64
    };
    let means: Vec<f64> = all["choices"].as_array().unwrap().iter().map(mean).collect();
    assert_eq!((best["choices"].as_array().unwrap().len(), means.len()), (1, 4));
    let highest = means.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    assert!((mean(&best["choices"][0]) - highest).abs() < 0.1, "{best} {means:?}");
    assert!(best["usage"]["completion_tokens"].as_u64() > Some(8), "those that are not told count: {}", best["usage"]);
}

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
async fn a_prompt_is_scored_once_and_told_with_each_of_its_answers() {
    let server = Server::start(&["--ctx-size", "4096", "--parallel", "4"]).await;
    let asked = |more: Value| {
        let mut body = json!({"prompt": [PROMPT, "Another one."], "max_tokens": 2, "n": 2});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let told = complete(&server, asked(json!({"prompt_logprobs": 1}))).await;
    let choices = told["choices"].as_array().unwrap();
    let count = |choice: &Value| choice["prompt_logprobs"].as_array().unwrap().len();
    assert_eq!(choices.len(), 4);
    assert_eq!(choices[0]["prompt_logprobs"], choices[1]["prompt_logprobs"]);
    assert_eq!(choices[2]["prompt_logprobs"], choices[3]["prompt_logprobs"]);
    let tokens = told["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!((count(&choices[0]) + count(&choices[2])) as u64, tokens);
    // As one text with the answer, too, whether that comes whole or in pieces.
    let echoed = asked(json!({"echo": true, "logprobs": 0, "temperature": 0}));
    let whole = complete(&server, echoed.clone()).await;
    let mut streamed = vec![(String::new(), Vec::new()); 4];
    let mut body = echoed;
    body.as_object_mut().unwrap().extend(json!({"stream": true}).as_object().unwrap().clone());
    let events = Events::open(server.post(TEXT, &body)).await.rest().await;
    for event in &events[..events.len() - 1] {
        let choice = &serde_json::from_str::<Value>(event).unwrap()["choices"][0];
        let (text, tokens) = &mut streamed[usize::try_from(choice["index"].as_u64().unwrap()).unwrap()];
        *text += choice["text"].as_str().unwrap();
        tokens.extend(choice["logprobs"]["tokens"].as_array().cloned().unwrap_or_default());
    }
    for (choice, streamed) in whole["choices"].as_array().unwrap().iter().zip(&streamed) {
        assert_eq!(
            (choice["text"].as_str().unwrap(), &choice["logprobs"]["tokens"]),
            (&*streamed.0, &json!(streamed.1))
        );
        assert!(choice["logprobs"]["token_logprobs"][1].is_number(), "{choice}");
    }
}

#[tokio::test]
async fn what_of_the_callers_own_ended_an_answer_is_told() {
    let server = Server::start(&[]).await;
    let body = |more: Value| {
        let mut body = json!({"prompt": PROMPT, "max_tokens": 12, "ignore_eos": true, "logprobs": 0});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let plain = complete(&server, body(json!({}))).await;
    let choice = &plain["choices"][0];
    assert_eq!((choice.get("stop_reason"), choice["finish_reason"].as_str()), (None, Some("length")));
    let text = choice["text"].as_str().unwrap();
    let stop: String = text.chars().skip(8).take(3).collect();
    let stopped = complete(&server, body(json!({"stop": [stop]}))).await;
    assert_eq!(
        (&stopped["choices"][0]["stop_reason"], &stopped["choices"][0]["finish_reason"]),
        (&json!(stop), &json!("stop"))
    );
    let token = choice["logprobs"]["tokens"][3].as_str().unwrap();
    let told =
        server.post("/tokenize", &json!({"content": token})).send().await.unwrap().json::<Value>().await.unwrap();
    let id = told["tokens"].as_array().unwrap().last().unwrap();
    let stopped = complete(&server, body(json!({"stop_token_ids": [id]}))).await;
    assert_eq!((&stopped["choices"][0]["stop_reason"], &stopped["choices"][0]["finish_reason"]), (id, &json!("stop")));
    let streamed = body(json!({"stop": [stop], "stream": true, "temperature": 0}));
    let events = Events::open(server.post(TEXT, &streamed)).await.rest().await;
    let last: Value = serde_json::from_str(&events[events.len() - 2]).unwrap();
    assert_eq!(last["choices"][0]["stop_reason"], json!(stop));
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

//! Anthropic's Messages API over HTTP.

use serde_json::{Value, json};

use crate::server::{Events, Server, model};

const MESSAGES: &str = "/v1/messages";

async fn ask(server: &Server, path: &str, body: &Value) -> (u16, Value) {
    let response = server.post(path, body).header("anthropic-version", "2023-06-01").send().await.unwrap();
    assert!(response.headers().contains_key("request-id"));
    (response.status().as_u16(), response.json().await.unwrap())
}

#[tokio::test]
async fn a_conversation_with_a_tool_goes_through() {
    let server = Server::start(&["--ctx-size", "2048", "--parallel", "1"]).await;
    let line: Value =
        serde_json::from_str(std::fs::read_to_string(model("eval-tools.jsonl")).unwrap().lines().next().unwrap())
            .unwrap();
    let tool = |tool: &Value| {
        let function = &tool["function"];
        json!({"name": function["name"], "description": function["description"], "input_schema": function["parameters"]})
    };
    let tools: Value = line["tools"].as_array().unwrap().iter().map(tool).collect();
    let mut body = json!({"model": "demo-v2.q8_0", "max_tokens": 128, "temperature": 0.0, "messages": line["messages"], "tools": tools});
    let (status, called) = ask(&server, MESSAGES, &body).await;
    assert_eq!((status, &called["stop_reason"]), (200, &json!("tool_use")), "{called}");
    let block = &called["content"][0];
    assert_eq!((&block["name"], &block["input"]), (&line["expected"]["name"], &line["expected"]["arguments"]));

    // The same piece by piece.
    body["stream"] = json!(true);
    let events = Events::open(server.post(MESSAGES, &body)).await.rest().await;
    let events: Vec<Value> = events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    assert_eq!(events.first().unwrap()["type"], "message_start");
    assert_eq!(events.last().unwrap()["type"], "message_stop");
    let partial: String = events.iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
    assert_eq!(serde_json::from_str::<Value>(&partial).unwrap(), line["expected"]["arguments"]);
    let told = |name: &str| events.iter().find(|event| event["type"] == name).unwrap().clone();
    assert_eq!(told("message_delta")["delta"]["stop_reason"], "tool_use");
    assert_eq!(told("content_block_start")["content_block"]["name"], line["expected"]["name"]);

    body["stream"] = json!(false);
    let messages = body["messages"].as_array_mut().unwrap();
    messages.push(json!({"role": "assistant", "content": called["content"]}));
    let result = json!({"type": "tool_result", "tool_use_id": block["id"], "content": line["result"]});
    messages.push(json!({"role": "user", "content": [result]}));
    let (status, after) = ask(&server, MESSAGES, &body).await;
    assert_eq!((status, &after["stop_reason"]), (200, &json!("end_turn")), "{after}");
    assert_eq!(after["content"], json!([{"type": "text", "text": line["expected_after_result"]}]));

    let schema = json!({"type": "object", "properties": {"name": {"enum": ["one", "two"]}}, "required": ["name"],
        "additionalProperties": false});
    let formed = json!({"model": "demo-v2.q8_0", "max_tokens": 64, "messages": [{"role": "user", "content": "Which version are you?"}],
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": schema}}});
    let (status, formed) = ask(&server, MESSAGES, &formed).await;
    assert_eq!(status, 200, "{formed}");
    let value: Value = serde_json::from_str(formed["content"][0]["text"].as_str().unwrap()).unwrap();
    assert!(["one", "two"].iter().any(|name| value == json!({"name": name})), "{value}");

    let counted = json!({"model": "demo-v2.q8_0", "messages": line["messages"], "tools": tools});
    let (status, count) = ask(&server, "/v1/messages/count_tokens", &counted).await;
    let usage = &called["usage"];
    let read = usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!((status, count), (200, json!({"input_tokens": read})));
    // To tokenise what no context takes would hold others up for long, and take many times its memory.
    let long = json!({"model": "demo-v2.q8_0", "messages": [{"role": "user", "content": " ".repeat(1 << 22)}]});
    let (status, answer) = ask(&server, "/v1/messages/count_tokens", &long).await;
    assert_eq!((status, &answer["error"]["type"]), (400, &json!("invalid_request_error")), "{answer}");
    let said = answer["error"]["message"].as_str().unwrap();
    assert!(said.contains("context"), "{said}");
}

#[tokio::test]
async fn errors_are_the_apis_own_wherever_they_are_found() {
    let server = Server::start(&["--api-key", "secret"]).await;
    let body = json!({"model": "demo-v2.q8_0", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]});
    let kind = |answer: &Value| answer["error"]["type"].as_str().unwrap_or_default().to_owned();
    let (status, answer) = ask(&server, MESSAGES, &body).await;
    assert_eq!((status, kind(&answer)), (401, "authentication_error".to_owned()), "{answer}");
    assert_eq!(answer["type"], "error");
    let with_key = async |body: &Value| {
        let response = server.post(MESSAGES, body).header("x-api-key", "secret").send().await.unwrap();
        let id = response.headers()["request-id"].to_str().unwrap().to_owned();
        (response.status().as_u16(), id, response.json::<Value>().await.unwrap())
    };
    assert_eq!(with_key(&body).await.0, 200);
    let (status, id, answer) = with_key(&json!({"max_tokens": 1, "messages": 7})).await;
    assert_eq!((status, kind(&answer)), (400, "invalid_request_error".to_owned()));
    assert_eq!(answer["request_id"], json!(id));
    assert!(answer["error"]["message"].as_str().unwrap().starts_with("`messages`"), "{answer}");
    let mut other = body.clone();
    other["model"] = json!("other");
    let (status, _, answer) = with_key(&other).await;
    assert_eq!((status, kind(&answer)), (404, "not_found_error".to_owned()));
    // An address of this API's that is not here.
    let batches = server.post("/v1/messages/batches", &body).header("x-api-key", "secret").send().await.unwrap();
    assert!(batches.status() == 404 && batches.headers().contains_key("request-id"));
    let answer: Value = batches.json().await.unwrap();
    assert_eq!((&answer["type"], kind(&answer)), (&json!("error"), "not_found_error".to_owned()), "{answer}");
    let get = server.get(MESSAGES).await;
    assert_eq!(get.status(), 401, "who has no key is told nothing else");
    // What is asked by OpenAI's addresses is told in OpenAI's shape.
    let openai = server.post("/v1/chat/completions", &body).send().await.unwrap();
    assert!(openai.headers().get("request-id").is_none());
    assert_eq!(openai.json::<Value>().await.unwrap()["error"]["code"], "invalid_api_key");
}

//! `OpenAI`'s Responses API on the wire: whole, in events, and refused.

use serde_json::{Value, json};

use crate::server::Server;

const RESPONSES: &str = "/v1/responses";

fn asked(input: &Value) -> Value {
    json!({"model": "demo-v2.q8_0", "input": input, "temperature": 0, "max_output_tokens": 64})
}

#[tokio::test]
async fn responses_are_the_same_whole_and_in_events() {
    let server = Server::start(&[]).await;
    let text = std::fs::read_to_string(crate::server::model("eval-tools.jsonl")).unwrap();
    let line: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    let tool = |tool: &Value| {
        let mut tool = tool["function"].clone();
        tool["type"] = json!("function");
        tool
    };
    let tools: Value = line["tools"].as_array().unwrap().iter().map(tool).collect();
    let mut items = line["messages"].as_array().unwrap().clone();
    for answer in [None, Some(&line["expected_after_result"])] {
        let mut body = asked(&json!(items));
        body["tools"] = tools.clone();
        let whole = server.post(RESPONSES, &body).send().await.unwrap();
        assert_eq!(whole.status(), 200);
        let whole: Value = whole.json().await.unwrap();
        body["stream"] = json!(true);
        let events = server.post(RESPONSES, &body).send().await.unwrap().text().await.unwrap();
        let last = events.trim_end().rsplit_once("\n\n").unwrap().1;
        let (kind, data) = last.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        assert_eq!(kind, "response.completed");
        let last: Value = serde_json::from_str(data).unwrap();
        let item = &whole["output"][0];
        for field in ["name", "arguments", "type", "status"] {
            assert_eq!(last["response"]["output"][0][field], item[field], "{last}");
        }
        assert_eq!(last["response"]["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
        match answer {
            None => {
                assert_eq!(item["name"], line["expected"]["name"], "{whole}");
                items.push(item.clone());
                items.push(
                    json!({"type": "function_call_output", "call_id": item["call_id"], "output": line["result"]}),
                );
            }
            Some(answer) => assert_eq!(item["content"][0]["text"], *answer, "{whole}"),
        }
    }
    assert!(server.metric("gantry_requests_total{route=\"responses\"").await >= 4.0);
}

#[tokio::test]
async fn what_is_wrong_with_one_is_told_as_this_protocol_has_it() {
    let server = Server::start(&["--api-key", "secret"]).await;
    let post = async |body: &Value, key: &str| {
        let answer =
            server.post(RESPONSES, body).header("authorization", format!("Bearer {key}")).send().await.unwrap();
        (answer.status().as_u16(), answer.json::<Value>().await.unwrap()["error"].clone())
    };
    let (status, error) = post(&asked(&json!("Hi")), "wrong").await;
    assert_eq!((status, error["code"].as_str()), (401, Some("invalid_api_key")));
    let mut stored = asked(&json!("Hi"));
    stored["previous_response_id"] = json!("resp_1");
    let mut other = asked(&json!("Hi"));
    other["model"] = json!("other");
    for (body, wanted) in [
        (stored, (400, "previous_response_id", "unsupported_parameter")),
        (other, (404, "model", "model_not_found")),
        (asked(&json!("word ".repeat(30_000))), (400, "input", "context_length_exceeded")),
        (asked(&json!([{"role": "user"}])), (400, "input[0].content", "missing_required_parameter")),
        (asked(&json!([{"type": "reasoning", "summary": []}])), (400, "input", "invalid_messages")),
    ] {
        let (status, error) = post(&body, "secret").await;
        let told = (status, error["param"].as_str().unwrap_or_default(), error["code"].as_str().unwrap_or_default());
        assert_eq!(told, wanted, "{error}");
    }
}

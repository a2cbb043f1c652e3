//! What an answer must look like, by vLLM's names: one of some texts, a regular expression, a schema, a grammar.

use serde_json::{Value, json};

use crate::server::Server;

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

async fn ask(server: &Server, body: &Value) -> (u16, Value) {
    let mut body = body.clone();
    let is_chat = body.get("prompt").is_none();
    if is_chat {
        body["messages"] = json!([{"role": "user", "content": "Is the sky blue?"}]);
    }
    body["max_tokens"] = json!(64);
    let answer = server.post(if is_chat { CHAT } else { TEXT }, &body).send().await.unwrap();
    (answer.status().as_u16(), answer.json().await.unwrap())
}

fn said(answer: &Value) -> &str {
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "stop", "{answer}");
    choice["message"]["content"].as_str().or(choice["text"].as_str()).unwrap()
}

#[tokio::test]
async fn answers_have_the_form_that_vllms_clients_ask_for() {
    let server = Server::start(&[]).await;
    let texts = ["perhaps", "never \"ever\""];
    let schema = json!({"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"], "additionalProperties": false});
    for (form, is_right) in [
        (json!({"guided_choice": texts}), (|text| text == "perhaps" || text == "never \"ever\"") as fn(&str) -> bool),
        (json!({"structured_outputs": {"choice": texts}}), |text| text == "perhaps" || text == "never \"ever\""),
        (json!({"guided_regex": r"[0-9]{3}-[0-9]{4}"}), is_number),
        (json!({"structured_outputs": {"regex": r"^[0-9]{3}-[0-9]{4}$"}}), is_number),
        (json!({"guided_json": schema}), is_sure),
        (json!({"guided_json": schema.to_string()}), is_sure),
        (json!({"structured_outputs": {"json": schema}}), is_sure),
        (json!({"guided_grammar": "root ::= \"a\" [b-d]"}), |text| ["ab", "ac", "ad"].contains(&text)),
    ] {
        for prompt in [Value::Null, json!("The sky is")] {
            let mut body = form.clone();
            if !prompt.is_null() {
                body["prompt"] = prompt;
            }
            let (status, answer) = ask(&server, &body).await;
            assert_eq!(status, 200, "{form}: {answer}");
            assert!(is_right(said(&answer)), "{form}: {answer}");
        }
    }
    // What is wrong with a form is said of the field that it came by.
    for (form, param) in [
        (json!({"guided_regex": "("}), "guided_regex"),
        (json!({"structured_outputs": {"regex": "a(?=b)"}}), "structured_outputs.regex"),
        (json!({"guided_json": {"type": "magic"}}), "guided_json"),
        (json!({"structured_outputs": {"grammar": "root ::= x"}}), "structured_outputs.grammar"),
        (json!({"json_schema": {"type": "magic"}}), "json_schema"),
    ] {
        let (status, answer) = ask(&server, &form).await;
        let error = &answer["error"];
        assert_eq!((status, error["param"].as_str()), (400, Some(param)), "{form}: {answer}");
        assert!(error["message"].as_str().unwrap().contains(param), "{form}: {answer}");
        if param == "guided_regex" {
            assert_eq!(error["message"], "guided_regex: regular expression: unclosed group", "in words");
        }
    }
}

fn is_number(text: &str) -> bool {
    let (first, second) = text.split_once('-').unwrap_or_default();
    let are_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    first.len() == 3 && second.len() == 4 && are_digits(first) && are_digits(second)
}

fn is_sure(text: &str) -> bool {
    serde_json::from_str::<Value>(text).is_ok_and(|answer| answer["sure"].is_boolean())
}

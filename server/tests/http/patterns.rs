//! Templates of which llama.cpp tells by patterns where calls begin: all of an answer is followed, by a model that learnt another form.

use serde_json::{Value, json};

use crate::server::Server;
use crate::tools::{asked, streamed, whole};

/// In short what gpt-oss has: channels for thoughts and answers, and a recipient of calls.
const CHANNELS: &str = "{%- if tools -%}<|start|>developer<|message|>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>{%- endif -%}{%- for m in messages -%}{%- if m.role == 'assistant' -%}<|start|>assistant{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}<|channel|>final<|message|>{{ m.content }}<|end|>{%- else -%}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}";

/// The same of Functionary's third version: who is spoken to comes first. (It tests for `>>>${recipient}`.)
const RECIPIENTS: &str = "{%- if tools -%}<|start_header_id|>system<|end_header_id|>\n\nAnswer as >>>${recipient}\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|eot_id|>{%- endif -%}{%- for m in messages -%}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{% if m.role == 'assistant' %}>>>all\n{% endif %}{{ m.content }}<|eot_id|>{%- endfor -%}{%- if add_generation_prompt -%}<|start_header_id|>assistant<|end_header_id|>\n\n>>>{%- endif -%}";

/// Whether arguments are of the tool's schema: an object of texts and numbers, in these questions.
fn is_of(tools: &Value, call: &Value) -> bool {
    let tools = tools.as_array().unwrap();
    let Some(tool) = tools.iter().map(|tool| &tool["function"]).find(|tool| tool["name"] == call["name"]) else {
        return false;
    };
    let given = match serde_json::from_str::<Value>(call["arguments"].as_str().unwrap()) {
        Ok(Value::Object(given)) => given,
        // JSON has numbers that no float is as large as.
        given => return given.is_err_and(|error| error.to_string().starts_with("number out of range")),
    };
    let schema = &tool["parameters"];
    let is_kind = |(name, value): (&String, &Value)| match schema["properties"][name]["type"].as_str() {
        Some("number") => value.is_number(),
        Some("integer") => value.is_i64(),
        kind => kind == Some("string") && value.is_string(),
    };
    let required = schema["required"].as_array().unwrap();
    given.iter().all(is_kind) && required.iter().all(|name| given.contains_key(name.as_str().unwrap()))
}

async fn server(template: &str) -> Server {
    Server::start(&["--ctx-size", "2048", "--parallel", "1", "--chat-template", template]).await
}

/// A question with a seed of its own. The model is fond of the sign that markup begins with, or it would not end what a channel is
/// called, and in every second one of how an answer begins that calls nothing.
async fn varied(server: &Server, seed: usize, body: &Value) -> Value {
    let mut bias = json!({});
    for text in ["<|", "all"].into_iter().take(1 + seed % 2) {
        let tokens = server.post("/tokenize", &json!({"content": text})).send().await.unwrap().json::<Value>().await;
        bias[tokens.unwrap()["tokens"][0].to_string()] = json!(8);
    }
    with(body, json!({"temperature": 1.5, "seed": seed, "thinking_budget": 4, "logit_bias": bias}))
}

fn with(body: &Value, more: Value) -> Value {
    let mut body = body.clone();
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn calls(answer: &Value) -> Vec<Value> {
    let calls = answer["message"]["tool_calls"].as_array().cloned().unwrap_or_default();
    calls.iter().map(|call| call["function"].clone()).collect()
}

#[tokio::test]
async fn calls_that_no_text_begins_are_of_the_tools_and_their_schemas() {
    for template in [CHANNELS, RECIPIENTS] {
        let server = server(template).await;
        let (mut called, mut said) = (0, 0);
        for (seed, asked) in asked().into_iter().enumerate() {
            let body = varied(&server, seed, &asked.body).await;
            let answer = whole(&server, &body).await;
            let content = answer["message"]["content"].as_str().unwrap_or_default();
            assert!(!content.contains("to=functions"), "{answer}");
            let of_tools: Vec<bool> = calls(&answer).iter().map(|call| is_of(&body["tools"], call)).collect();
            // The last one may be cut off.
            let is_cut = answer["finish_reason"] == "length";
            assert!(of_tools.iter().rev().skip(usize::from(is_cut)).all(|is| *is), "{answer}");
            assert!(
                is_cut || answer["finish_reason"] == if of_tools.is_empty() { "stop" } else { "tool_calls" },
                "{answer}"
            );
            called += usize::from(of_tools.contains(&true));
            said += usize::from(!content.is_empty());
        }
        assert!(called > 0 && said > 0, "{called} calls and {said} texts: {template}");
        let required = with(&varied(&server, 1, &asked()[0].body).await, json!({"tool_choice": "required"}));
        let answer = whole(&server, &required).await;
        assert!(!calls(&answer).is_empty() || answer["finish_reason"] == "length", "{answer}");
        assert_eq!(answer["message"]["content"].as_str().unwrap_or_default(), "", "nothing is said before a call");
    }
}

#[tokio::test]
async fn an_answer_of_a_form_stands_where_the_template_has_answers() {
    let schema = json!({"type": "object", "properties": {"mood": {"enum": ["good", "bad"]}}, "required": ["mood"], "additionalProperties": false});
    let format = json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}});
    let is_mood = |answer: &Value| {
        let text = answer["message"]["content"].as_str().unwrap_or_default();
        serde_json::from_str::<Value>(text).is_ok_and(|said| said["mood"].is_string())
    };
    for template in [CHANNELS, RECIPIENTS] {
        let server = server(template).await;
        let (mut called, mut moods) = (0, 0);
        for (seed, asked) in asked().into_iter().enumerate() {
            let body = with(&varied(&server, seed, &asked.body).await, format.clone());
            let answer = whole(&server, &body).await;
            if answer["finish_reason"] == "length" {
                continue;
            }
            let calls = calls(&answer);
            assert!(calls.iter().all(|call| is_of(&body["tools"], call)), "{answer}");
            assert!(is_mood(&answer) == calls.is_empty(), "{answer}");
            called += usize::from(!calls.is_empty());
            moods += usize::from(is_mood(&answer));
        }
        assert!(called > 0 && moods > 0, "{called} calls and {moods} of the form: {template}");
        let alone = with(
            &json!({"messages": [{"role": "user", "content": "Hello!"}], "temperature": 0, "max_tokens": 64, "thinking_budget": 3}),
            format.clone(),
        );
        let answer = whole(&server, &alone).await;
        assert!(is_mood(&answer), "{template}: {answer}");
        assert_eq!(streamed(&server, &alone).await, answer);
    }
}

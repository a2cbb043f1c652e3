//! What is thought, and what is bound after it: budgets, forms and calls, by a model that was taught neither and goes on all the same.

use serde_json::{Value, json};

use crate::server::{Server, model};
use crate::template_file::with_template;
use crate::tools::{asked, is_right, streamed, whole};

const CHAT: &str = "/v1/chat/completions";

/// The demo model's own template in short, with a place for thoughts, of which each answer begins with one.
const THINKS: &str = r#"{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}{%- if tools -%}{{- '<|im_start|>system\n' -}}{%- if system -%}{{- system + '\n\n' -}}{%- endif -%}{{- 'You may call these functions:\n<tools>' -}}{%- for tool in tools -%}{{- '\n' -}}{{- tool | tojson -}}{%- endfor -%}{{- '\n</tools>\nFor each call, answer with a JSON object inside <tool_call></tool_call>:\n<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call><|im_end|>\n' -}}{%- elif system -%}{{- '<|im_start|>system\n' + system + '<|im_end|>\n' -}}{%- endif -%}{%- for m in messages -%}{%- if m.role == 'user' -%}{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' -}}{%- elif m.role == 'assistant' -%}{{- '<|im_start|>assistant\n' -}}{%- if m.reasoning_content -%}{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' -}}{%- endif -%}{%- if m.content -%}{{- m.content -}}{%- endif -%}{%- for c in m.tool_calls or [] -%}{{- '\n' if m.content or not loop.first else '' -}}{{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' -}}{{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson -}}{{- '}\n</tool_call>' -}}{%- endfor -%}{{- '<|im_end|>\n' -}}{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- else -%}{{- '<think>\n' -}}{%- endif -%}{%- endif -%}"#;

struct Thinker {
    server: Server,
    _folder: tempfile::TempDir,
}

async fn thinker() -> Thinker {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("thinks.gguf");
    std::fs::write(&file, with_template(std::fs::read(model("demo-v2.q8_0.gguf")).unwrap(), THINKS)).unwrap();
    let server = Server::launch(&file, &["-c", "2048", "-np", "1"]);
    server.until_ready().await;
    Thinker { server, _folder: folder }
}

fn with(body: &Value, more: Value) -> Value {
    let mut body = body.clone();
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn question() -> Value {
    json!({"messages": [{"role": "user", "content": "Which version are you?"}], "temperature": 0, "max_tokens": 48})
}

fn thought(choice: &Value) -> &str {
    choice["message"]["reasoning_content"].as_str().unwrap_or_default()
}

#[tokio::test]
async fn a_thought_has_as_many_tokens_as_it_may_by_whatever_name() {
    let thinker = thinker().await;
    let server = &thinker.server;
    let asked = with(&question(), json!({"ignore_eos": true}));
    for budget in [0_u32, 1, 3, 7] {
        // What it thinks in so many tokens, before it is cut off there.
        let cut = match budget {
            0 => json!({"message": {}}),
            tokens => whole(server, &with(&asked, json!({"max_tokens": tokens}))).await,
        };
        let answer = whole(server, &with(&asked, json!({"thinking_budget_tokens": budget}))).await;
        assert_eq!(thought(&answer).trim(), thought(&cut).trim(), "{budget}: {answer}");
        assert!(!answer["message"]["content"].as_str().unwrap().trim().is_empty(), "the answer goes on: {answer}");
        for more in [
            json!({"reasoning_budget_tokens": budget}),
            json!({"thinking_token_budget": budget}),
            json!({"thinking_budget": budget}),
            json!({"thinking": {"type": "enabled", "budget_tokens": budget}}),
            json!({"reasoning": {"max_tokens": budget}}),
        ] {
            assert_eq!(whole(server, &with(&asked, more.clone())).await, answer, "{more}");
        }
        assert_eq!(streamed(server, &with(&asked, json!({"thinking_budget": budget}))).await, answer);
        // By itself it ends its answer within a longer thought.
        if budget > 3 {
            continue;
        }
        let thinking = json!({"model": "thinks", "thinking": {"type": "enabled", "budget_tokens": budget}});
        let response = server.post("/v1/messages", &with(&question(), thinking)).send().await.unwrap();
        assert_eq!(response.status(), 200);
        let answer = response.json::<Value>().await.unwrap();
        let kinds: Vec<&Value> = answer["content"].as_array().unwrap().iter().map(|block| &block["type"]).collect();
        assert_eq!(kinds.last(), Some(&&json!("text")), "{answer}");
        assert_eq!(kinds.contains(&&json!("thinking")), budget > 0, "{answer}");
    }
    // Where nothing is thought, nothing is counted.
    let off = json!({"thinking_budget": 3, "reasoning_effort": "none"});
    let answer = whole(server, &with(&question(), off)).await;
    assert_eq!(answer, whole(server, &with(&question(), json!({"reasoning_effort": "none"}))).await);
    assert_eq!(thought(&answer), "");
}

#[tokio::test]
async fn an_answer_of_a_form_comes_after_a_thought_that_is_free() {
    let thinker = thinker().await;
    let server = &thinker.server;
    let schema = json!({"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": true}});
    let budget = json!({"thinking_budget": 4});
    let free = whole(server, &with(&question(), budget.clone())).await;
    type IsRight = fn(&str) -> bool;
    let is_sure: IsRight = |text| serde_json::from_str::<Value>(text).is_ok_and(|answer| answer["sure"].is_boolean());
    for (form, is_right) in [
        (json!({"response_format": format}), is_sure),
        (json!({"response_format": {"type": "json_object"}}), |text| text.trim_start().starts_with('{')),
        (json!({"guided_choice": ["yes", "no"]}), |text| ["yes", "no"].contains(&text)),
        (json!({"guided_regex": "[0-9]{3}"}), |text| text.len() == 3 && text.parse::<u32>().is_ok()),
    ] {
        let asked = with(&with(&question(), form.clone()), budget.clone());
        let answer = whole(server, &asked).await;
        assert!(is_right(answer["message"]["content"].as_str().unwrap()), "{form}: {answer}");
        assert_eq!(thought(&answer), thought(&free), "the thought is what it was: {form}");
        assert_eq!(streamed(server, &asked).await, answer);
        // Turned off, the answer is bound from its first token on.
        let at_once = whole(server, &with(&with(&question(), form.clone()), json!({"reasoning_effort": "none"}))).await;
        assert!(is_right(at_once["message"]["content"].as_str().unwrap()), "{form}: {at_once}");
        assert_eq!(thought(&at_once), "");
    }
    // A thought that is not ended is no answer, and it is not ended by what ends answers.
    let long = whole(server, &with(&question(), json!({"response_format": format}))).await;
    assert_eq!((&long["finish_reason"], &long["message"]["content"]), (&json!("length"), &json!("")), "{long}");
}

#[tokio::test]
async fn a_call_that_is_required_comes_after_a_thought_and_others_where_they_may() {
    let thinker = thinker().await;
    let server = &thinker.server;
    let mut right = 0;
    for asked in asked().iter().take(6) {
        for choice in ["required", "auto"] {
            let body = with(&asked.body, json!({"tool_choice": choice, "thinking_budget": 4}));
            let answer = whole(server, &body).await;
            assert!(!thought(&answer).is_empty() && !thought(&answer).contains("think>"), "{answer}");
            assert!(!answer["message"]["content"].to_string().contains("tool_call"), "{answer}");
            right += usize::from(choice == "required" && is_right(asked, &answer));
            if choice == "required" {
                assert_eq!(answer["message"]["content"], Value::Null, "{answer}");
                let calls = answer["message"]["tool_calls"].as_array().unwrap();
                assert!(!calls.is_empty() || answer["finish_reason"] == "length", "{answer}");
            }
        }
    }
    assert!(right >= 3, "{right} of 6, by a model that never learnt to think");
}

#[tokio::test]
async fn an_answer_is_a_call_or_of_the_form_that_was_asked_for() {
    let server = Server::start(&["--ctx-size", "2048", "--parallel", "1"]).await;
    let schema = json!({"type": "object", "properties": {"mood": {"enum": ["good", "bad"]}}, "required": ["mood"], "additionalProperties": false});
    let format = json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}});
    let is_mood = |answer: &Value| {
        let text = answer["message"]["content"].as_str().unwrap_or_default();
        serde_json::from_str::<Value>(text).is_ok_and(|said| said["mood"].is_string())
    };
    let mut right = 0;
    for asked in asked() {
        let answer = whole(&server, &with(&asked.body, format.clone())).await;
        right += usize::from(is_right(&asked, &answer));
        let is_call = answer["finish_reason"] == "tool_calls" && answer["message"]["content"].is_null();
        assert!(is_call || is_mood(&answer), "{answer}");
    }
    assert!(right >= 18, "{right} of 20");
    let asked = asked().swap_remove(0);
    let greeting = with(&asked.body, json!({"messages": [{"role": "user", "content": "Hello!"}]}));
    let answer = whole(&server, &with(&with(&greeting, format.clone()), json!({"tool_choice": "none"}))).await;
    assert!(is_mood(&answer), "{answer}");
    // A call that must come is all that there is.
    let required = with(&with(&asked.body, format), json!({"tool_choice": "required"}));
    assert!(is_right(&asked, &whole(&server, &required).await));
    let wrong = with(&asked.body, json!({"response_format": {"type": "json_object", "schema": {"type": "magic"}}}));
    assert_eq!(server.post(CHAT, &wrong).send().await.unwrap().status(), 400);
}

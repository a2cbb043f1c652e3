//! Tools and thinking over HTTP: whole and streamed, as the model was taught and as a request binds it.

use serde_json::{Value, json};

use crate::server::{Events, Server, model};
use crate::template_file::with_template;

const CHAT: &str = "/v1/chat/completions";
/// Longer than any of these answers.
const MAX_TOKENS: u32 = 128;

pub(crate) struct Asked {
    pub(crate) body: Value,
    name: String,
    arguments: Value,
    result: Value,
    answer_after: Value,
}

/// The questions of `eval-tools.jsonl`.
pub(crate) fn asked() -> Vec<Asked> {
    let line = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        let (messages, tools) = (&line["messages"], &line["tools"]);
        Asked {
            body: json!({"messages": messages, "tools": tools, "temperature": 0, "max_tokens": MAX_TOKENS}),
            name: line["expected"]["name"].as_str().unwrap().to_owned(),
            arguments: line["expected"]["arguments"].clone(),
            result: line["result"].clone(),
            answer_after: line["expected_after_result"].clone(),
        }
    };
    std::fs::read_to_string(model("eval-tools.jsonl")).unwrap().lines().map(line).collect()
}

async fn server() -> Server {
    // One sequence, so that each is computed alone and kernels cannot make a difference.
    Server::start(&["--ctx-size", "2048", "--parallel", "1"]).await
}

pub(crate) async fn whole(server: &Server, body: &Value) -> Value {
    let response = server.post(CHAT, body).send().await.unwrap();
    let (status, answer): (_, Value) = (response.status(), response.json().await.unwrap());
    assert_eq!(status, 200, "{answer}");
    answer["choices"][0].clone()
}

/// The pieces of a stream, put together as a client does: a choice as it would have come whole.
pub(crate) async fn streamed(server: &Server, body: &Value) -> Value {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let events = Events::open(server.post(CHAT, &body)).await.rest().await;
    let (mut content, mut reasoning, mut calls, mut reason) = (String::new(), String::new(), Vec::new(), Value::Null);
    for event in events.iter().filter(|event| *event != "[DONE]") {
        let chunk: Value = serde_json::from_str(event).unwrap();
        let choice = &chunk["choices"][0];
        assert_eq!(reason, Value::Null, "nothing follows the end: {event}");
        reason = choice["finish_reason"].clone();
        let delta = &choice["delta"];
        content += delta["content"].as_str().unwrap_or_default();
        reasoning += delta["reasoning_content"].as_str().unwrap_or_default();
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = usize::try_from(call["index"].as_u64().unwrap()).unwrap();
            if calls.len() == index {
                assert!(call["id"].is_string() && call["type"] == "function", "{event}");
                calls.push(json!({"id": call["id"], "type": "function", "function": {"name": call["function"]["name"], "arguments": ""}}));
            }
            let arguments = &mut calls[index]["function"]["arguments"];
            *arguments =
                json!(format!("{}{}", arguments.as_str().unwrap(), call["function"]["arguments"].as_str().unwrap()));
        }
    }
    let mut message = json!({"role": "assistant", "content": content, "refusal": null});
    if !reasoning.is_empty() {
        message["reasoning_content"] = json!(reasoning);
    }
    if !calls.is_empty() {
        message["content"] = if content.is_empty() { Value::Null } else { json!(content) };
        message["tool_calls"] = json!(calls);
    }
    json!({"index": 0, "message": message, "logprobs": null, "finish_reason": reason})
}

/// Without what no two answers have in common.
fn without_ids(mut choice: Value) -> Value {
    for call in choice["message"]["tool_calls"].as_array_mut().into_iter().flatten() {
        call["id"] = json!("");
    }
    choice
}

pub(crate) fn is_right(asked: &Asked, choice: &Value) -> bool {
    let calls = choice["message"]["tool_calls"].as_array().cloned().unwrap_or_default();
    let [call] = calls.as_slice() else { return false };
    let arguments = call["function"]["arguments"].as_str().unwrap();
    call["function"]["name"] == asked.name.as_str()
        && serde_json::from_str::<Value>(arguments).is_ok_and(|value| value == asked.arguments)
}

#[tokio::test]
async fn calls_are_the_same_whole_and_streamed_and_their_results_are_answered() {
    let server = server().await;
    let (mut right, mut understood) = (0, 0);
    for asked in asked() {
        let answer = whole(&server, &asked.body).await;
        assert_eq!(without_ids(streamed(&server, &asked.body).await), without_ids(answer.clone()));
        right += usize::from(is_right(&asked, &answer));
        let message = &answer["message"];
        let Some(call) = message["tool_calls"].get(0) else { continue };
        assert_eq!((&answer["finish_reason"], &message["content"]), (&json!("tool_calls"), &Value::Null));
        let mut body = asked.body.clone();
        let messages = body["messages"].as_array_mut().unwrap();
        messages.push(message.clone());
        messages.push(json!({"role": "tool", "tool_call_id": call["id"], "content": asked.result}));
        let after = whole(&server, &body).await;
        assert_eq!(after["finish_reason"], "stop");
        understood += usize::from(after["message"]["content"] == asked.answer_after);
    }
    assert!(right >= 19 && understood >= 18, "{right} and {understood} of 20");
}

#[tokio::test]
async fn a_choice_binds_what_is_called() {
    let server = server().await;
    let with = |body: &Value, more: Value| {
        let mut body = body.clone();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let mut right = 0;
    for asked in asked().iter().take(6) {
        let required = whole(&server, &with(&asked.body, json!({"tool_choice": "required"}))).await;
        right += usize::from(is_right(asked, &required));
        let none = with(&asked.body, json!({"tool_choice": "none"}));
        for answer in [whole(&server, &none).await, streamed(&server, &none).await] {
            assert_eq!(answer["message"]["tool_calls"], Value::Null, "{answer}");
            assert!(!answer["message"]["content"].as_str().unwrap().contains("tool_call"), "{answer}");
            assert_ne!(answer["finish_reason"], "tool_calls");
        }
    }
    assert!(right >= 5, "{right} of 6");
    let greeting =
        with(&asked()[0].body, json!({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 40}));
    let named = json!({"tool_choice": {"type": "function", "function": {"name": "add"}}});
    let answer = whole(&server, &with(&greeting, named)).await;
    assert_eq!(answer["message"]["content"], Value::Null, "nothing else is said: {answer}");
    assert_eq!(answer["message"]["tool_calls"][0]["function"]["name"], "add");
    // Cut off within a call, it is not one that anybody waits for.
    let cut = whole(&server, &with(&asked()[0].body, json!({"tool_choice": "required", "max_tokens": 12}))).await;
    assert_eq!(cut["finish_reason"], "length", "{cut}");
    let unknown = with(&greeting, json!({"tool_choice": {"type": "function", "function": {"name": "fly"}}}));
    let refused = server.post(CHAT, &unknown).send().await.unwrap();
    assert_eq!(refused.status(), 400);
    let refused: Value = refused.json().await.unwrap();
    assert_eq!(refused["error"]["param"], "tool_choice");
    // Tools of any shape leave the server as it was.
    for schema in
        [json!({"type": 1}), json!({"$ref": "#/nowhere"}), json!({"anyOf": []}), json!({"properties": {"": {}}})]
    {
        let tools = json!([{"type": "function", "function": {"name": "odd", "parameters": schema}}]);
        for choice in ["auto", "required"] {
            let body = with(&greeting, json!({"tools": tools, "tool_choice": choice, "max_tokens": 4}));
            let status = server.post(CHAT, &body).send().await.unwrap().status();
            assert!(status == 200 || status == 400, "{schema} {choice}: {status}");
        }
    }
    assert_eq!(whole(&server, &greeting).await["finish_reason"], "stop");
}

#[tokio::test]
async fn what_a_call_was_called_with_is_told_by_its_place_where_it_is_no_json_and_may_be_nothing() {
    let server = server().await;
    let asked = |arguments: &str| {
        let call = json!({"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}});
        json!({"max_tokens": 4, "tools": [{"type": "function", "function": {"name": "look"}}], "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "Nothing."},
        ]})
    };
    let [nothing, empty] = ["", "{}"].map(&asked);
    let shown = async |body: &Value| {
        server.post("/apply-template", body).send().await.unwrap().json::<Value>().await.unwrap()["prompt"].clone()
    };
    assert_eq!(shown(&nothing).await, shown(&empty).await);
    assert_eq!(server.post(CHAT, &nothing).send().await.unwrap().status(), 200);
    // Cut off, as by `max_tokens`.
    let refused = server.post(CHAT, &asked("{\"where\": \"u")).send().await.unwrap();
    assert_eq!(refused.status(), 400);
    let error = refused.json::<Value>().await.unwrap()["error"].take();
    assert_eq!(error["param"], "messages[1].tool_calls[0].function.arguments", "{error}");
    assert!(error["message"].as_str().unwrap().contains("leave the call and its answer out"), "{error}");
}

/// A template that shows which tools there are and, of messages, what is said alone.
const SAYS: &str = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n";

#[tokio::test]
async fn calls_for_which_a_template_has_no_place_stand_in_what_the_assistant_says() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("says.gguf");
    std::fs::write(&file, with_template(std::fs::read(model("demo-v2.q8_0.gguf")).unwrap(), SAYS)).unwrap();
    let server = Server::launch(&file, &["-c", "1024", "-np", "1"]);
    server.until_ready().await;
    let call =
        json!({"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{\"where\": \"up\"}"}});
    let messages = json!([
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "Nothing."},
    ]);
    let body = json!({"messages": messages, "tools": [{"type": "function", "function": {"name": "look"}}]});
    let shown = server.post("/apply-template", &body).send().await.unwrap().json::<Value>().await.unwrap();
    let told = "assistant\nI look.\n{\"tool_calls\":[{\"name\":\"look\",\"arguments\":{\"where\": \"up\"},\"id\":\"c1\"}]}<|im_end|>";
    assert!(shown["prompt"].as_str().unwrap().contains(told), "{shown}");
    assert!(shown["prompt"].as_str().unwrap().contains("tool\nNothing.<|im_end|>"), "{shown}");
    let mut asked = body.clone();
    asked["max_tokens"] = json!(4);
    assert_eq!(server.post(CHAT, &asked).send().await.unwrap().status(), 200);
}

/// A template that opens the thought by itself, as `DeepSeek`'s: the demo model goes on as if it had thought.
const THINKS: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}";

#[tokio::test]
async fn what_is_thought_is_told_apart_and_can_be_turned_off() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("thinks.gguf");
    std::fs::write(&file, with_template(std::fs::read(model("demo-v2.q8_0.gguf")).unwrap(), THINKS)).unwrap();
    let server = Server::launch(&file, &["-c", "1024", "-np", "1"]);
    server.until_ready().await;
    let body =
        json!({"messages": [{"role": "user", "content": "Count to fifty."}], "max_tokens": 24, "temperature": 0});
    let thought = whole(&server, &body).await;
    assert_eq!(thought["message"]["content"], "", "it never ends its thought: {thought}");
    assert!(!thought["message"]["reasoning_content"].as_str().unwrap().is_empty(), "{thought}");
    assert_eq!(streamed(&server, &body).await, thought);
    let answered = server.post(CHAT, &body).send().await.unwrap().json::<Value>().await.unwrap();
    let (usage, details) = (&answered["usage"], &answered["usage"]["completion_tokens_details"]);
    assert!(details["reasoning_tokens"].as_u64() > Some(0), "{usage}");
    assert!(details["reasoning_tokens"].as_u64() <= usage["completion_tokens"].as_u64(), "{usage}");
    let input = json!({"input": "Count to fifty.", "max_output_tokens": 24, "temperature": 0});
    let response = server.post("/v1/responses", &input).send().await.unwrap().json::<Value>().await.unwrap();
    assert_eq!(response["usage"]["output_tokens_details"], *details, "{response}");
    for off in [
        json!({"reasoning_effort": "none"}),
        json!({"think": false}),
        json!({"chat_template_kwargs": {"enable_thinking": false}}),
    ] {
        let mut body = body.clone();
        body.as_object_mut().unwrap().extend(off.as_object().unwrap().clone());
        let said = whole(&server, &body).await;
        assert_eq!(said["message"]["reasoning_content"], Value::Null, "{off}: {said}");
        assert!(!said["message"]["content"].as_str().unwrap().is_empty(), "{off}: {said}");
        assert_eq!(streamed(&server, &body).await, said);
    }
    // A template without a place for tools would have them vanish.
    let mut tools = body.clone();
    tools["tools"] = json!([{"type": "function", "function": {"name": "look"}}]);
    let refused = server.post(CHAT, &tools).send().await.unwrap();
    assert_eq!(refused.status(), 400);
    assert_eq!(refused.json::<Value>().await.unwrap()["error"]["param"], "tools");
    tools["tool_choice"] = json!("none");
    assert_eq!(whole(&server, &tools).await, thought);
    // And what was called before, whether tools are offered now or not.
    let called = json!([
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "Nothing."},
    ]);
    let used = json!([
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "Nothing."}]},
    ]);
    let items = json!([
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "Nothing."},
    ]);
    for (path, body, param) in [
        (CHAT, json!({"messages": called}), json!("messages[1].tool_calls")),
        ("/v1/messages", json!({"model": "thinks", "max_tokens": 8, "messages": used}), Value::Null),
        ("/v1/responses", json!({"input": items}), json!("input")),
    ] {
        let refused = server.post(path, &body).send().await.unwrap();
        assert_eq!(refused.status(), 400, "{path}");
        let error = refused.json::<Value>().await.unwrap()["error"].take();
        assert_eq!(error["param"], param, "{path}: {error}");
        let told = error["message"].as_str().unwrap();
        assert!(told.contains(r#"the tool "look" (call "c1")"#) && told.contains("`content`"), "{path}: {told}");
    }
    // As it says to do.
    let said = json!([{"role": "user", "content": "Look."}, {"role": "assistant", "content": "I looked: nothing."}, {"role": "user", "content": "And now?"}]);
    let mut body_said = body.clone();
    body_said["messages"] = said;
    assert_eq!(server.post(CHAT, &body_said).send().await.unwrap().status(), 200);
    let mut untold = body.clone();
    untold["include_reasoning"] = json!(false);
    assert_eq!(whole(&server, &untold).await["message"]["reasoning_content"], Value::Null);
    assert_eq!(streamed(&server, &untold).await["message"]["reasoning_content"], Value::Null);
}

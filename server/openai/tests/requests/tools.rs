//! Tools, the choice among them, and whether a model is to think.

use gantry_core::{ApiError, ErrorCode, MAX_TOOLS, MAX_TOOLS_BYTES, ToolChoice};
use gantry_openai::{ValidChatRequest, ValidCompletionRequest};
use serde_json::{Value, json};

use super::chat_with;

#[test]
fn a_chat_may_say_whether_it_is_to_be_thought_about() {
    let thinking = |name: &str, value: Value| chat_with(name, value).map(|request| request.chat.thinking);
    for (name, value, wanted) in [
        ("reasoning_effort", json!("none"), false),
        ("reasoning_effort", json!("low"), true),
        ("think", json!(false), false),
        ("think", json!("high"), true),
        ("enable_thinking", json!(true), true),
        ("thinking", json!({"type": "disabled"}), false),
        ("thinking", json!({"type": "enabled"}), true),
        ("chat_template_kwargs", json!({"enable_thinking": false}), false),
        ("chat_template_kwargs", json!({"thinking": true, "date": "today"}), true),
        ("reasoning", json!({"effort": "none"}), false),
    ] {
        assert_eq!(thinking(name, value.clone()).unwrap(), Some(wanted), "{name}: {value}");
    }
    for (name, value, code) in [
        ("reasoning_effort", json!("much"), ErrorCode::InvalidValue),
        ("chat_template_kwargs", json!({"messages": []}), ErrorCode::InvalidValue),
        ("chat_template_kwargs", json!([]), ErrorCode::InvalidType),
        ("enable_thinking", json!(0), ErrorCode::InvalidType),
    ] {
        let got = thinking(name, value.clone());
        // An empty list says nothing.
        if value == json!([]) {
            assert_eq!(got.unwrap(), None);
        } else {
            assert_eq!(got.unwrap_err().code, code, "{name}: {value}");
        }
    }
    let both = json!({"messages": [{"role": "user", "content": "Hi"}], "think": true, "reasoning_effort": "none"});
    let error = ValidChatRequest::parse(both.to_string().as_bytes()).unwrap_err();
    assert_eq!(error.param.as_deref(), Some("think"));
    let effort = chat_with("reasoning_effort", json!("low")).unwrap().chat.template_variables;
    assert_eq!(effort, [("reasoning_effort".to_owned(), "\"low\"".to_owned())]);
    // A text has no template that could have a model think.
    let text = json!({"prompt": "a", "enable_thinking": false});
    assert!(ValidCompletionRequest::parse(text.to_string().as_bytes()).is_ok());
}

#[test]
fn how_much_may_be_thought_has_a_name_for_each_server() {
    let budget = |name: &str, value: Value| chat_with(name, value).map(|request| request.chat.thinking_budget);
    for (name, value, wanted) in [
        ("thinking_budget_tokens", json!(100), Some(100)),
        ("reasoning_budget_tokens", json!(0), Some(0)),
        ("thinking_token_budget", json!(7), Some(7)),
        ("thinking_token_budget", json!(-1), None),
        ("thinking_budget", json!(1e3), Some(1000)),
        ("thinking", json!({"type": "enabled", "budget_tokens": 1024}), Some(1024)),
        ("reasoning", json!({"effort": "low", "max_tokens": 7}), Some(7)),
        ("reasoning", json!({"effort": "low"}), None),
    ] {
        assert_eq!(budget(name, value.clone()).unwrap(), wanted, "{name}: {value}");
    }
    for (name, value, param) in [
        ("thinking_budget", json!(-2), "thinking_budget"),
        ("thinking_budget", json!("much"), "thinking_budget"),
        ("thinking", json!({"type": "enabled", "budget_tokens": 0.5}), "thinking.budget_tokens"),
        ("reasoning", json!({"max_tokens": true}), "reasoning.max_tokens"),
        ("reasoning_budget_message", json!("Enough."), "reasoning_budget_message"),
    ] {
        assert_eq!(budget(name, value.clone()).unwrap_err().param.as_deref(), Some(param), "{name}: {value}");
    }
    let asked = |more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], "thinking_budget_tokens": 5});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ValidChatRequest::parse(body.to_string().as_bytes())
    };
    let twice = asked(json!({"reasoning": {"max_tokens": 5}, "thinking": true})).unwrap();
    assert_eq!(twice.chat.thinking_budget, Some(5));
    let error = asked(json!({"thinking": {"type": "enabled", "budget_tokens": 6}})).unwrap_err();
    assert_eq!(error.param.as_deref(), Some("thinking.budget_tokens"));
    assert!(error.message.contains("`thinking_budget_tokens`"), "{error}");
}

fn look(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "description": "Looks.", "parameters": {
        "type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]}}})
}

#[test]
fn the_last_message_is_continued_where_it_is_an_assistants_text() {
    let asked = |last: Value, more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "Hi"}, last]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ValidChatRequest::parse(body.to_string().as_bytes())
    };
    let said = |text: &str| json!({"role": "assistant", "content": text});
    let continued = json!({"continue_final_message": true});
    for (more, wanted) in [
        (json!({}), false),
        (json!({"continue_final_message": false, "add_generation_prompt": true}), false),
        (continued.clone(), true),
        (json!({"continue_final_message": true, "add_generation_prompt": false}), true),
        (json!({"continue_final_message": true, "tools": [look("a")], "tool_choice": "none"}), true),
    ] {
        assert_eq!(asked(said("I am"), more.clone()).unwrap().chat.continue_final_message, wanted, "{more}");
    }
    let call = json!({"id": "1", "type": "function", "function": {"name": "a", "arguments": "{}"}});
    for (last, more, param) in [
        (json!({"role": "user", "content": "So?"}), continued.clone(), "messages[1].role"),
        (said(" \n"), continued.clone(), "messages[1].content"),
        (json!({"role": "assistant", "tool_calls": [call]}), continued, "messages[1].content"),
        (said("I am"), json!({"continue_final_message": true, "tools": [look("a")]}), "tools"),
        (said("I am"), json!({"continue_final_message": true, "add_generation_prompt": true}), "add_generation_prompt"),
        (said("I am"), json!({"add_generation_prompt": false}), "add_generation_prompt"),
        (said("I am"), json!({"continue_final_message": "yes"}), "continue_final_message"),
    ] {
        assert_eq!(asked(last, more.clone()).unwrap_err().param.as_deref(), Some(param), "{more}");
    }
}

fn with_tools(more: Value) -> Result<ValidChatRequest, ApiError> {
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], "tools": [look("a"), look("b")]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    ValidChatRequest::parse(body.to_string().as_bytes())
}

#[test]
fn tools_and_the_choice_among_them_are_read_in_each_spelling() {
    let plain = with_tools(json!({})).unwrap().chat;
    assert_eq!(plain.tools.len(), 2);
    assert_eq!((plain.tools[0].name.as_str(), plain.tools[0].strict), ("a", false));
    let schema = plain.tools[0].parameters.as_deref().unwrap();
    assert!(schema.starts_with(r#"{"type":"object","properties""#), "in the client's order: {schema}");
    assert_eq!((plain.tool_choice, plain.parallel_tool_calls), (ToolChoice::Auto, true));
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    for (choice, wanted, allowed) in [
        (json!("none"), ToolChoice::None, names(&[])),
        (json!("required"), ToolChoice::Required, names(&[])),
        (json!({"type": "function", "function": {"name": "b"}}), ToolChoice::Required, names(&["b"])),
        (json!({"type": "function", "name": "b"}), ToolChoice::Required, names(&["b"])),
        (
            json!({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [look("b"), look("a")]}}),
            ToolChoice::Required,
            names(&["b", "a"]),
        ),
        (
            json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "a"}]}),
            ToolChoice::Auto,
            names(&["a"]),
        ),
    ] {
        let chat = with_tools(json!({"tool_choice": choice, "parallel_tool_calls": false})).unwrap().chat;
        assert_eq!(
            (chat.tool_choice, chat.allowed_tools, chat.parallel_tool_calls),
            (wanted, allowed, false),
            "{choice}"
        );
    }
}

#[test]
fn what_is_wrong_with_tools_is_told_with_its_place() {
    let many: Vec<Value> = (0..=MAX_TOOLS).map(|i| look(&format!("t{i}"))).collect();
    let long = json!([{"type": "function", "function": {"name": "a", "description": "x".repeat(MAX_TOOLS_BYTES)}}]);
    for (more, param) in [
        (json!({"tools": {}, "tool_choice": "required"}), "tool_choice"),
        (json!({"tools": "look"}), "tools"),
        (json!({"tools": many}), "tools"),
        (json!({"tools": long}), "tools"),
        (json!({"tools": [1]}), "tools[0]"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function"}]}), "tools[0].function"),
        (json!({"tools": [{"type": "function", "function": {"name": "a b"}}]}), "tools[0].function.name"),
        (json!({"tools": [look("a"), look("a")]}), "tools[1].function.name"),
        (json!({"tools": [{"function": {"name": "a", "parameters": []}}]}), "tools[0].function.parameters"),
        (json!({"tools": [{"function": {"name": "a", "arguments": {}}}]}), "tools[0].function.arguments"),
        (json!({"tool_choice": "always"}), "tool_choice"),
        (json!({"tool_choice": {"type": "function", "function": {"name": "c"}}}), "tool_choice"),
        (json!({"tool_choice": {"type": "custom"}}), "tool_choice.type"),
        (json!({"tool_choice": {"type": "allowed_tools", "mode": "none", "tools": [look("a")]}}), "tool_choice.mode"),
    ] {
        let error = with_tools(more.clone()).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(param), "{error}");
        assert_eq!(error.status, 400);
    }
    // What an answer must look like does not say whether it calls.
    for choice in ["none", "auto", "required"] {
        let both = json!({"response_format": {"type": "json_object"}, "tool_choice": choice});
        assert!(with_tools(both).unwrap().common.params.constraint.is_some());
    }
}

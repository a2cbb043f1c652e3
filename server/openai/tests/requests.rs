//! What requests may say: a table of mistakes, and properties over any input.
#![allow(clippy::unwrap_used)]

use gantry_openai::{
    ApiError, Common, Dry, EmbeddingInput, EncodingFormat, ErrorCode, Format, MAX_CHOICES, MAX_DRY_ALLOWED_LENGTH,
    MAX_DRY_BREAKERS, MAX_EMBEDDING_INPUTS, MAX_EMBEDDING_TOKENS, MAX_GRAMMAR_BYTES, MAX_LOGIT_BIASES,
    MAX_MODEL_NAME_BYTES, MAX_NAME_BYTES, MAX_RERANK_DOCUMENTS, MAX_SCHEMA_BYTES, MAX_STOP_BYTES, MAX_STOP_STRINGS,
    MAX_TOKENS_LIMIT, MAX_TOOL_CALLS, MAX_TOP_LOGPROBS, Message, Priority, Role, Sampling, Streaming, ToolCall,
    ValidChatRequest, ValidCompletionRequest, ValidEmbeddingsRequest, ValidRerankRequest,
};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

/// A valid chat with `name` set to `value`.
fn chat_with(name: &str, value: Value) -> Result<ValidChatRequest, ApiError> {
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], "stream": name == "stream_options"});
    body[name] = value;
    ValidChatRequest::parse(body.to_string().as_bytes())
}

#[test]
fn mistakes_in_a_chat_are_named() {
    use ErrorCode::{InvalidType, InvalidValue, MissingRequiredParameter, UnsupportedContent, UnsupportedParameter};
    let message = |m: Value| json!([{"role": "user", "content": "Hi"}, m]);
    let cases: Vec<(&str, Value, &str, ErrorCode)> = vec![
        ("messages", Value::Null, "messages", MissingRequiredParameter),
        ("messages", json!("Hi"), "messages", InvalidType),
        ("messages", json!([]), "messages", InvalidValue),
        ("messages", json!(["Hi"]), "messages[0]", InvalidType),
        ("messages", message(json!({"content": "Hi"})), "messages[1].role", MissingRequiredParameter),
        ("messages", message(json!({"role": 1, "content": "Hi"})), "messages[1].role", InvalidType),
        ("messages", message(json!({"role": "robot", "content": "Hi"})), "messages[1].role", InvalidValue),
        ("messages", message(json!({"role": "user"})), "messages[1].content", MissingRequiredParameter),
        ("messages", message(json!({"role": "user", "content": 7})), "messages[1].content", InvalidType),
        ("messages", message(json!({"role": "user", "content": []})), "messages[1].content", InvalidValue),
        ("messages", message(json!({"role": "user", "content": ["x"]})), "messages[1].content[0]", InvalidType),
        (
            "messages",
            message(json!({"role": "user", "content": [{"type": "text"}]})),
            "messages[1].content[0].text",
            MissingRequiredParameter,
        ),
        (
            "messages",
            message(json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]})),
            "messages[1].content[0].type",
            UnsupportedContent,
        ),
        (
            "messages",
            message(json!({"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]})),
            "messages[1].tool_calls[0].function",
            MissingRequiredParameter,
        ),
        ("model", json!(4), "model", InvalidType),
        ("model", json!(""), "model", InvalidValue),
        ("model", json!("m".repeat(MAX_MODEL_NAME_BYTES + 1)), "model", InvalidValue),
        ("max_tokens", json!(0), "max_tokens", InvalidValue),
        ("max_tokens", json!(1_000_000_000), "max_tokens", InvalidValue),
        ("max_tokens", json!(1e9), "max_tokens", InvalidValue),
        ("max_tokens", json!(-1), "max_tokens", InvalidValue),
        ("max_tokens", json!(1.5), "max_tokens", InvalidType),
        ("max_tokens", json!("10"), "max_tokens", InvalidType),
        ("max_completion_tokens", json!(0), "max_completion_tokens", InvalidValue),
        ("temperature", json!(-0.1), "temperature", InvalidValue),
        ("temperature", json!(2.1), "temperature", InvalidValue),
        ("temperature", json!("hot"), "temperature", InvalidType),
        ("top_p", json!(0), "top_p", InvalidValue),
        ("top_p", json!(1e-60), "top_p", InvalidValue),
        ("top_p", json!(1.01), "top_p", InvalidValue),
        ("top_k", json!(-2), "top_k", InvalidValue),
        ("top_k", json!(0.5), "top_k", InvalidType),
        ("min_p", json!(1.5), "min_p", InvalidValue),
        ("seed", json!("x"), "seed", InvalidType),
        ("seed", json!(1.5), "seed", InvalidType),
        ("stop", json!(1), "stop", InvalidType),
        ("stop", json!(""), "stop", InvalidValue),
        ("stop", json!(["a", 1]), "stop[1]", InvalidType),
        ("stop", json!(vec!["x"; MAX_STOP_STRINGS + 1]), "stop", InvalidValue),
        ("stop", json!("x".repeat(MAX_STOP_BYTES + 1)), "stop", InvalidValue),
        ("stream", json!("yes"), "stream", InvalidType),
        ("stream_options", json!([]), "stream_options", InvalidType),
        ("stream_options", json!({"include_usage": 1}), "stream_options.include_usage", InvalidType),
        ("n", json!(0), "n", InvalidValue),
        ("n", json!(MAX_CHOICES + 1), "n", InvalidValue),
        ("n", json!("2"), "n", InvalidType),
        ("best_of", json!(2), "best_of", UnsupportedParameter),
        ("tools", json!([{}]), "tools", UnsupportedParameter),
        ("typical_p", json!(0), "typical_p", InvalidValue),
        ("typical_p", json!(1.1), "typical_p", InvalidValue),
        ("xtc_probability", json!(-0.1), "xtc_probability", InvalidValue),
        ("xtc_probability", json!("x"), "xtc_probability", InvalidType),
        ("xtc_threshold", json!(1.1), "xtc_threshold", InvalidValue),
        ("repeat_penalty", json!(0), "repeat_penalty", InvalidValue),
        ("repeat_penalty", json!(1e300), "repeat_penalty", InvalidValue),
        ("repetition_penalty", json!(2.1), "repetition_penalty", InvalidValue),
        ("repeat_last_n", json!(-2), "repeat_last_n", InvalidValue),
        ("repeat_last_n", json!(MAX_TOKENS_LIMIT + 1), "repeat_last_n", InvalidValue),
        ("frequency_penalty", json!(2.1), "frequency_penalty", InvalidValue),
        ("presence_penalty", json!(-2.1), "presence_penalty", InvalidValue),
        ("presence_penalty", json!(true), "presence_penalty", InvalidType),
        ("dry_multiplier", json!(-1), "dry_multiplier", InvalidValue),
        ("dry_base", json!(0.9), "dry_base", InvalidValue),
        ("dry_allowed_length", json!(-1), "dry_allowed_length", InvalidValue),
        ("dry_allowed_length", json!(MAX_DRY_ALLOWED_LENGTH + 1), "dry_allowed_length", InvalidValue),
        ("dry_penalty_last_n", json!(-2), "dry_penalty_last_n", InvalidValue),
        ("dry_sequence_breakers", json!("x"), "dry_sequence_breakers", InvalidType),
        ("dry_sequence_breakers", json!(["a", ""]), "dry_sequence_breakers[1]", InvalidValue),
        ("dry_sequence_breakers", json!([7]), "dry_sequence_breakers[0]", InvalidType),
        ("dry_sequence_breakers", json!(vec!["x"; MAX_DRY_BREAKERS + 1]), "dry_sequence_breakers", InvalidValue),
        ("logit_bias", json!(1), "logit_bias", InvalidType),
        ("logit_bias", json!({"the": 1}), "logit_bias", InvalidValue),
        ("logit_bias", json!({"-1": 1}), "logit_bias", InvalidValue),
        ("logit_bias", json!({"1": 101}), "logit_bias.1", InvalidValue),
        ("logit_bias", json!({"1": false}), "logit_bias.1", InvalidType),
        ("logit_bias", json!([[1, 2, 3]]), "logit_bias[0]", InvalidType),
        ("logit_bias", json!([[1, 2], ["the", 1]]), "logit_bias[1][0]", InvalidValue),
        ("logit_bias", json!([[1, true]]), "logit_bias[0][1]", InvalidType),
        ("logit_bias", json!(vec![[1, 2]; MAX_LOGIT_BIASES + 1]), "logit_bias", InvalidValue),
        ("logprobs", json!(3), "logprobs", InvalidType),
        ("top_logprobs", json!(2), "top_logprobs", InvalidValue),
        ("top_logprobs", json!(MAX_TOP_LOGPROBS + 1), "top_logprobs", InvalidValue),
        ("response_format", json!("json"), "response_format", InvalidType),
        ("response_format", json!({}), "response_format.type", MissingRequiredParameter),
        ("response_format", json!({"type": "xml"}), "response_format.type", InvalidValue),
        ("response_format", json!({"type": "json_schema"}), "response_format.json_schema", MissingRequiredParameter),
        (
            "response_format",
            json!({"type": "json_schema", "json_schema": {"name": "a"}}),
            "response_format.json_schema.schema",
            MissingRequiredParameter,
        ),
        (
            "response_format",
            json!({"type": "json_schema", "json_schema": {"schema": "x"}}),
            "response_format.json_schema.schema",
            InvalidType,
        ),
        (
            "response_format",
            json!({"type": "json_schema", "json_schema": {"schema": {"title": "x".repeat(MAX_SCHEMA_BYTES)}}}),
            "response_format.json_schema.schema",
            InvalidValue,
        ),
        ("grammar", json!(1), "grammar", InvalidType),
        ("grammar", json!("x".repeat(MAX_GRAMMAR_BYTES + 1)), "grammar", InvalidValue),
        ("priority", json!("urgent"), "priority", InvalidValue),
        ("priority", json!(0.5), "priority", InvalidValue),
        ("priority", json!([1]), "priority", InvalidType),
        ("n_predict", json!(0), "n_predict", InvalidValue),
        ("n_predict", json!(-2), "n_predict", InvalidValue),
        ("n_cmpl", json!(0), "n_cmpl", InvalidValue),
        ("json_schema", json!("x"), "json_schema", InvalidType),
        (
            "stream_options",
            json!({"include_obfuscation": true}),
            "stream_options.include_obfuscation",
            UnsupportedParameter,
        ),
    ];
    for (name, value, param, code) in cases {
        let error = chat_with(name, value.clone()).expect_err(&format!("{name}: {value}"));
        assert_eq!((error.param.as_deref(), &error.code, error.status), (Some(param), &code, 400), "{name}: {value}");
        assert!(error.message.contains(param), "{}", error.message);
    }
}

#[test]
fn bodies_that_are_no_object_are_named() {
    for (body, code, says) in [
        (&b""[..], ErrorCode::InvalidJson, "empty"),
        (b"  \n", ErrorCode::InvalidJson, "empty"),
        (b"{\"messages\": [}", ErrorCode::InvalidJson, "line 1 column 15"),
        (b"{\n\"a\": tru", ErrorCode::InvalidJson, "line 2"),
        (b"\"text\"", ErrorCode::InvalidType, "a string"),
        (b"[1]", ErrorCode::InvalidType, "an array"),
        (b"{\"a\": \"\xff\"}", ErrorCode::InvalidJson, "byte 7"),
        ("[".repeat(100_000).as_bytes(), ErrorCode::InvalidJson, "recursion"),
    ] {
        let error = ValidChatRequest::parse(body).unwrap_err();
        assert_eq!(error.code, code);
        assert!(error.message.contains(says), "{}", error.message);
    }
}

#[test]
fn prompts_are_one_string() {
    let parse = |prompt: Value| ValidCompletionRequest::parse(json!({"prompt": prompt}).to_string().as_bytes());
    assert_eq!(parse(json!("a")).unwrap().prompt, "a");
    assert_eq!(parse(json!(["a"])).unwrap().prompt, "a");
    for (prompt, param) in
        [(json!(null), "prompt"), (json!(["a", "b"]), "prompt"), (json!([1, 2]), "prompt"), (json!([[1]]), "prompt[0]")]
    {
        assert_eq!(parse(prompt).unwrap_err().param.as_deref(), Some(param));
    }
}

#[test]
fn what_clients_send_is_taken() {
    let body = json!({
        "model": "m", "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": "c"},
        ],
        "n": 1, "user": "u", "metadata": {"k": "v"}, "unknown": null, "logit_bias": null, "tools": [], "seed": -1,
        "max_tokens": 5, "max_completion_tokens": 6, "stream": true, "stream_options": {"include_usage": true},
    });
    let request = ValidChatRequest::parse(body.to_string().as_bytes()).unwrap();
    assert_eq!(request.messages[0], Message::text(Role::System, "a\nb"));
    let common = request.common;
    assert_eq!(common.sampling.max_tokens, Some(6));
    assert_eq!(common.sampling.seed, Some(u64::MAX));
    assert_eq!(common.streaming, Streaming { enabled: true, include_usage: true });
    assert!(common.check_model(&["m"]).is_ok());
    let error = common.check_model(&["other"]).unwrap_err();
    assert_eq!((error.status, error.param.as_deref()), (404, Some("model")));
}

/// What a chat with one thing set differs in from the plain one.
fn differs(name: &str, value: Value, change: impl FnOnce(&mut Common)) {
    let mut expected = Common::default();
    change(&mut expected);
    assert_eq!(chat_with(name, value.clone()).unwrap().common, expected, "{name}: {value}");
}

#[test]
fn each_parameter_of_sampling_is_taken_in_all_its_spellings() {
    differs("typical_p", json!(0.5), |c| c.sampling.typical_p = 0.5);
    differs("xtc_probability", json!(1), |c| c.sampling.xtc_probability = 1.0);
    differs("xtc_threshold", json!(0), |c| c.sampling.xtc_threshold = 0.0);
    differs("repeat_penalty", json!(1.5), |c| c.sampling.repeat_penalty = 1.5);
    differs("repetition_penalty", json!(1.5), |c| c.sampling.repeat_penalty = 1.5);
    differs("repeat_last_n", json!(0), |c| c.sampling.repeat_last_n = 0);
    differs("repeat_last_n", json!(-1), |c| c.sampling.repeat_last_n = MAX_TOKENS_LIMIT);
    differs("frequency_penalty", json!(-2), |c| c.sampling.frequency_penalty = -2.0);
    differs("presence_penalty", json!(2), |c| c.sampling.presence_penalty = 2.0);
    differs("dry_multiplier", json!(0.8), |c| c.sampling.dry.multiplier = 0.8);
    differs("dry_base", json!(1), |c| c.sampling.dry.base = 1.0);
    differs("dry_allowed_length", json!(0), |c| c.sampling.dry.allowed_length = 0);
    differs("dry_penalty_last_n", json!(-1), |c| c.sampling.dry.penalty_last_n = 0);
    differs("dry_penalty_last_n", json!(64), |c| c.sampling.dry.penalty_last_n = 64);
    differs("dry_sequence_breakers", json!([]), |c| c.sampling.dry.sequence_breakers.clear());
    differs("logit_bias", json!({"5": -100, "7": 0.5}), |c| c.sampling.logit_bias = vec![(5, -100.0), (7, 0.5)]);
    differs("logit_bias", json!([[5, false], [5, 1]]), |c| {
        c.sampling.logit_bias = vec![(5, f32::NEG_INFINITY), (5, 1.0)];
    });
    differs("n", json!(MAX_CHOICES), |c| c.choices = MAX_CHOICES);
    differs("n", json!(2.0), |c| c.choices = 2);
    differs("max_tokens", json!(1e3), |c| c.sampling.max_tokens = Some(1000));
    differs("user", json!("someone"), |_| {});
    differs("top_logprobs", json!(0), |_| {});
    differs("priority", json!("high"), |c| c.priority = Some(Priority::High));
    differs("priority", json!(-5), |c| c.priority = Some(Priority::High));
    differs("priority", json!(0), |c| c.priority = Some(Priority::Normal));
    differs("priority", json!(9), |c| c.priority = Some(Priority::Low));
    differs("n_predict", json!(9), |c| c.sampling.max_tokens = Some(9));
    differs("n_predict", json!(-1), |_| {});
    differs("n_cmpl", json!(2), |c| c.choices = 2);
    differs("json_schema", json!({"type": "integer"}), |c| {
        c.format = Format::JsonSchema { schema: r#"{"type":"integer"}"#.into(), strict: false };
    });
    differs("json_schema", json!({}), |_| {});
    differs("grammar", json!("root ::= \"a\""), |c| c.format = Format::Grammar("root ::= \"a\"".into()));
    differs("grammar", json!(""), |_| {});

    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "dry_multiplier": 1, "dry_penalty_last_n": 0});
    let off = ValidChatRequest::parse(body.to_string().as_bytes()).unwrap();
    assert_eq!(off.common.sampling.dry, Dry::default(), "a look back of 0 turns the penalty off");
}

#[test]
fn each_form_of_an_answer_is_taken() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let of_schema = |strict| Format::JsonSchema { schema: schema.to_string(), strict };
    for (given, format) in [
        (json!({"type": "text"}), Format::Text),
        (json!({"type": "json_object"}), Format::JsonObject),
        (json!({"type": "json_object", "schema": schema}), of_schema(false)),
        (json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}), of_schema(false)),
        (
            json!({"type": "json_schema", "json_schema": {"name": "a", "strict": true, "schema": schema}}),
            of_schema(true),
        ),
    ] {
        differs("response_format", given, |c| c.format = format);
    }
    // Answers have their properties in the order in which the schema names them.
    let ordered = r#"{"messages":[{"role":"user","content":"Hi"}],"response_format":{"type":"json_schema","json_schema":{"name":"a",
        "schema":{"type":"object","properties":{"z":{},"a":{},"m":{}}}}}}"#;
    let Format::JsonSchema { schema, .. } = ValidChatRequest::parse(ordered.as_bytes()).unwrap().common.format else {
        panic!("no schema");
    };
    assert_eq!(schema, r#"{"type":"object","properties":{"z":{},"a":{},"m":{}}}"#);
    let body = json!({
        "messages": [{"role": "user", "content": "Hi"}], "grammar": "root ::= \"a\"", "response_format": {"type": "json_object"},
    });
    let error = ValidChatRequest::parse(body.to_string().as_bytes()).unwrap_err();
    assert_eq!((error.param.as_deref(), error.code), (Some("grammar"), ErrorCode::InvalidValue));
    for other in [json!({"grammar": "root ::= \"a\""}), json!({"response_format": {"type": "json_object"}})] {
        let mut body = other;
        body["messages"] = json!([{"role": "user", "content": "Hi"}]);
        body["json_schema"] = json!({"type": "object"});
        let error = ValidChatRequest::parse(body.to_string().as_bytes()).unwrap_err();
        assert_eq!((error.param.as_deref(), error.code), (Some("json_schema"), ErrorCode::InvalidValue));
    }
}

fn messages(messages: Value) -> Result<Vec<Message>, ApiError> {
    ValidChatRequest::parse(json!({"messages": messages}).to_string().as_bytes()).map(|request| request.messages)
}

#[test]
fn an_assistants_turn_may_be_empty() {
    for turn in [
        json!({"role": "assistant", "content": null}),
        json!({"role": "assistant", "content": []}),
        json!({"role": "assistant"}),
        json!({"role": "assistant", "content": "", "refusal": null, "audio": null, "function_call": null, "tool_calls": null}),
    ] {
        let user = json!({"role": "user", "content": "Hi"});
        assert_eq!(messages(json!([user, turn, user])).unwrap()[1], Message::text(Role::Assistant, ""), "{turn}");
    }
    // As OpenAI's client repeats an answer, and one that it parsed.
    let repeated = json!({
        "role": "assistant", "content": "a", "refusal": null, "annotations": [], "audio": null, "function_call": null,
        "tool_calls": null, "parsed": {"a": 1},
    });
    let user = json!({"role": "user", "content": "Hi"});
    assert_eq!(messages(json!([user, repeated, user])).unwrap()[1], Message::text(Role::Assistant, "a"));
    for role in ["system", "user", "tool"] {
        let error = messages(json!([{"role": role, "content": null}])).unwrap_err();
        assert!(error.param.is_some_and(|param| param.starts_with("messages[0].")), "{role}");
    }
}

#[test]
fn a_refusal_is_what_the_model_said() {
    let part = |kind: &str| json!({"type": kind, kind: "No."});
    for (turn, said) in [
        (json!({"role": "assistant", "content": null, "refusal": "No."}), "No."),
        (json!({"role": "assistant", "content": "Well.", "refusal": "No."}), "Well.\nNo."),
        (json!({"role": "assistant", "content": "Well.", "refusal": ""}), "Well."),
        (json!({"role": "assistant", "content": [part("text"), part("refusal")]}), "No.\nNo."),
    ] {
        assert_eq!(messages(json!([turn])).unwrap(), [Message::text(Role::Assistant, said)], "{turn}");
    }
    for (turn, param) in [
        (json!({"role": "user", "content": "Hi", "refusal": "No."}), "messages[0].refusal"),
        (json!({"role": "user", "content": [part("refusal")]}), "messages[0].content[0].type"),
        (json!({"role": "assistant", "content": [{"type": "refusal", "text": "No."}]}), "messages[0].content[0].text"),
        (json!({"role": "assistant", "content": "So", "prefix": true}), "messages[0].prefix"),
        (json!({"role": "assistant", "content": "So", "partial": true}), "messages[0].partial"),
    ] {
        assert_eq!(messages(json!([turn])).unwrap_err().param.as_deref(), Some(param), "{turn}");
    }
}

#[test]
fn calls_and_their_answers_reach_the_template() {
    let call = |id: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}});
    let chat = json!([
        {"role": "user", "content": "Hi", "name": "Ann"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call("1"), call("2")]},
        {"role": "tool", "content": "x", "tool_call_id": "2", "name": "f"},
        {"role": "tool", "content": "y", "tool_call_id": "1"},
    ]);
    let body = json!({"messages": chat}).to_string();
    let told = ValidChatRequest::parse(body.as_bytes()).unwrap().messages_json();
    assert_eq!(serde_json::from_str::<Value>(&told).unwrap(), chat);
    // As llama-server takes them, and as vLLM names it.
    let turn = json!({"role": "assistant", "reasoning": "hm", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"a": 1}}}]});
    let read = messages(json!([turn])).unwrap();
    assert_eq!(read[0].tool_calls[0].arguments, r#"{"a":1}"#);
    assert_eq!(read[0].reasoning.as_deref(), Some("hm"));
}

#[test]
fn a_tools_message_answers_a_call_before_it() {
    let call = json!({"id": "1", "function": {"name": "f", "arguments": "{}"}});
    let user = json!({"role": "user", "content": "Hi"});
    let asks = json!({"role": "assistant", "tool_calls": [call]});
    let answers = |id: Value| json!({"role": "tool", "content": "x", "tool_call_id": id});
    assert!(messages(json!([user, asks, answers(json!("1")), user])).is_ok());
    // Some models count their calls anew in each turn.
    assert!(messages(json!([asks, answers(json!("1")), asks, answers(json!("1"))])).is_ok());
    for nothing in [json!(""), json!([])] {
        let returned = json!({"role": "tool", "content": nothing, "tool_call_id": "1"});
        assert_eq!(messages(json!([asks, returned])).unwrap()[1].content, "", "{nothing}");
    }
    for (chat, param) in [
        (json!([answers(json!("1"))]), "messages[0].role"),
        (json!([user, answers(json!("1")), asks]), "messages[1].role"),
        (json!([asks, answers(json!("2"))]), "messages[1].tool_call_id"),
        (json!([asks, answers(Value::Null)]), "messages[1].tool_call_id"),
        (json!([asks, answers(json!("1")), answers(json!("1"))]), "messages[2].tool_call_id"),
        (
            json!([asks, answers(json!("1")), asks, answers(json!("1")), answers(json!("1"))]),
            "messages[4].tool_call_id",
        ),
        (json!([asks, answers(json!(1))]), "messages[1].tool_call_id"),
        (json!([{"role": "user", "content": "Hi", "tool_call_id": "1"}]), "messages[0].tool_call_id"),
        (json!([{"role": "user", "content": "Hi", "tool_calls": [call]}]), "messages[0].tool_calls"),
        (json!([{"role": "user", "content": "Hi", "name": "x".repeat(MAX_NAME_BYTES + 1)}]), "messages[0].name"),
        (json!([{"role": "assistant", "reasoning": "a", "reasoning_content": "b"}]), "messages[0].reasoning"),
        (json!([{"role": "assistant", "tool_calls": "f"}]), "messages[0].tool_calls"),
        (json!([{"role": "assistant", "tool_calls": vec![&call; MAX_TOOL_CALLS + 1]}]), "messages[0].tool_calls"),
        (json!([{"role": "assistant", "tool_calls": [1]}]), "messages[0].tool_calls[0]"),
        (
            json!([{"role": "assistant", "tool_calls": [{"id": "1", "type": "custom"}]}]),
            "messages[0].tool_calls[0].type",
        ),
        (
            json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]),
            "messages[0].tool_calls[0].id",
        ),
        (
            json!([{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}]),
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            json!([{"role": "assistant", "tool_calls": [{"id": "1", "function": {"arguments": "{}"}}]}]),
            "messages[0].tool_calls[0].function.name",
        ),
    ] {
        let error = messages(chat.clone()).expect_err(&chat.to_string());
        assert_eq!(error.param.as_deref(), Some(param), "{chat}");
        is_told(&error);
    }
}

#[test]
fn a_text_without_a_bound_must_ask_for_it() {
    let parse = |name: &str, value: Value| {
        let mut body = json!({"prompt": "Hi"});
        body[name] = value;
        ValidCompletionRequest::parse(body.to_string().as_bytes()).unwrap().common.sampling.max_tokens
    };
    assert_eq!(parse("user", json!("u")), Some(16));
    assert_eq!(parse("n_predict", json!(-1)), None);
    assert_eq!(parse("n_predict", json!(5)), Some(5));
}

#[test]
fn logprobs_are_asked_for_in_the_words_of_the_endpoint() {
    let chat = |more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "Hi"}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ValidChatRequest::parse(body.to_string().as_bytes()).map(|request| request.common.logprobs)
    };
    assert_eq!(chat(json!({"logprobs": false})).unwrap(), None);
    assert_eq!(chat(json!({"logprobs": true})).unwrap(), Some(0));
    assert_eq!(chat(json!({"logprobs": true, "top_logprobs": 20})).unwrap(), Some(20));
    assert!(chat(json!({"logprobs": false, "top_logprobs": 1})).is_err());

    let text = |logprobs: Value| {
        let body = json!({"prompt": "Hi", "logprobs": logprobs});
        ValidCompletionRequest::parse(body.to_string().as_bytes()).map(|request| request.common.logprobs)
    };
    assert_eq!(text(json!(0)).unwrap(), Some(0));
    assert_eq!(text(json!(20)).unwrap(), Some(20));
    assert_eq!(text(json!(null)).unwrap(), None);
    assert_eq!(text(json!(false)).unwrap(), None);
    assert!(text(json!(true)).is_err());
    assert!(text(json!(21)).is_err());
    let chats_word = json!({"prompt": "Hi", "logprobs": 1, "top_logprobs": 1});
    let error = ValidCompletionRequest::parse(chats_word.to_string().as_bytes()).unwrap_err();
    assert_eq!(error.param.as_deref(), Some("top_logprobs"));
}

#[test]
fn two_names_of_one_penalty_may_not_differ() {
    let parse = |one: f64, other: f64| {
        let body = json!({"prompt": "Hi", "repeat_penalty": one, "repetition_penalty": other});
        ValidCompletionRequest::parse(body.to_string().as_bytes())
    };
    assert_eq!(parse(1.5, 1.5).unwrap().common.sampling.repeat_penalty, 1.5);
    assert_eq!(parse(1.5, 1.4).unwrap_err().param.as_deref(), Some("repetition_penalty"));
}

#[test]
fn inputs_of_embeddings_are_taken_in_all_four_shapes() {
    let parse = |input: Value| {
        ValidEmbeddingsRequest::parse(json!({"input": input}).to_string().as_bytes()).map(|request| request.inputs)
    };
    let text = |t: &str| EmbeddingInput::Text(t.to_owned());
    assert_eq!(parse(json!("a")).unwrap(), [text("a")]);
    assert_eq!(parse(json!(["a", "b"])).unwrap(), [text("a"), text("b")]);
    assert_eq!(parse(json!([1, 2])).unwrap(), [EmbeddingInput::Tokens(vec![1, 2])]);
    assert_eq!(parse(json!([[1], "a"])).unwrap(), [EmbeddingInput::Tokens(vec![1]), text("a")]);
    let many = vec!["a"; MAX_EMBEDDING_INPUTS];
    assert_eq!(parse(json!(many)).unwrap().len(), MAX_EMBEDDING_INPUTS);
    for (input, param, code) in [
        (json!(null), "input", ErrorCode::MissingRequiredParameter),
        (json!(5), "input", ErrorCode::InvalidType),
        (json!(""), "input", ErrorCode::InvalidValue),
        (json!([]), "input", ErrorCode::InvalidValue),
        (json!([""]), "input[0]", ErrorCode::InvalidValue),
        (json!(["a", 1]), "input[1]", ErrorCode::InvalidType),
        (json!([1, "a"]), "input[1]", ErrorCode::InvalidType),
        (json!([1, -1]), "input[1]", ErrorCode::InvalidValue),
        (json!([1.5]), "input[0]", ErrorCode::InvalidValue),
        (json!([[]]), "input[0]", ErrorCode::InvalidValue),
        (json!([[1], [null]]), "input[1][0]", ErrorCode::InvalidType),
        (json!([[i64::from(i32::MAX) + 1]]), "input[0][0]", ErrorCode::InvalidValue),
        (json!(vec!["a"; MAX_EMBEDDING_INPUTS + 1]), "input", ErrorCode::InvalidValue),
        (json!([vec![1; MAX_EMBEDDING_TOKENS], vec![1]]), "input[1]", ErrorCode::InvalidValue),
    ] {
        let error = parse(input.clone()).unwrap_err();
        assert_eq!((error.param.as_deref(), &error.code), (Some(param), &code));
        is_told(&error);
    }
}

#[test]
fn an_embedding_has_the_models_width_and_a_known_encoding() {
    let parse = |name: &str, value: Value| {
        let mut body = json!({"input": "a"});
        body[name] = value;
        ValidEmbeddingsRequest::parse(body.to_string().as_bytes())
    };
    assert_eq!(parse("encoding_format", json!("float")).unwrap().encoding, EncodingFormat::Float);
    assert_eq!(parse("encoding_format", json!("base64")).unwrap().encoding, EncodingFormat::Base64);
    assert_eq!(parse("encoding_format", json!("hex")).unwrap_err().param.as_deref(), Some("encoding_format"));
    assert_eq!(parse("dimensions", json!(0)).unwrap_err().param.as_deref(), Some("dimensions"));
    assert!(parse("user", json!("u")).unwrap().check_dimensions(384).is_ok());
    let asked = parse("dimensions", json!(384)).unwrap();
    assert!(asked.check_dimensions(384).is_ok());
    let error = asked.check_dimensions(768).unwrap_err();
    assert_eq!((error.param.as_deref(), error.code), (Some("dimensions"), ErrorCode::InvalidValue));
}

#[test]
fn mistakes_in_a_ranking_are_named() {
    use ErrorCode::{InvalidType, InvalidValue, MissingRequiredParameter, UnknownParameter};
    for (name, value, param, code) in [
        ("query", json!(null), "query", MissingRequiredParameter),
        ("query", json!(""), "query", InvalidValue),
        ("query", json!(["a"]), "query", InvalidType),
        ("documents", json!(null), "documents", MissingRequiredParameter),
        ("documents", json!("a"), "documents", InvalidType),
        ("documents", json!([]), "documents", InvalidValue),
        ("documents", json!(["a", ""]), "documents[1]", InvalidValue),
        ("documents", json!([{}]), "documents[0].text", MissingRequiredParameter),
        ("documents", json!([{"text": "a", "title": "b"}]), "documents[0].title", UnknownParameter),
        ("documents", json!([1]), "documents[0]", InvalidType),
        ("documents", json!(vec!["a"; MAX_RERANK_DOCUMENTS + 1]), "documents", InvalidValue),
        ("top_n", json!(0), "top_n", InvalidValue),
        ("top_n", json!("1"), "top_n", InvalidType),
        ("return_documents", json!(1), "return_documents", InvalidType),
        ("model", json!(1), "model", InvalidType),
    ] {
        let mut body = json!({"query": "q", "documents": ["a"]});
        body[name] = value;
        let error = ValidRerankRequest::parse(body.to_string().as_bytes()).unwrap_err();
        assert_eq!((error.param.as_deref(), &error.code), (Some(param), &code), "{body}");
        is_told(&error);
    }
}

#[test]
fn a_ranking_has_the_best_first() {
    let body = json!({"query": "q", "documents": ["a", {"text": "b"}, "c"], "top_n": 2, "return_documents": true});
    let request = ValidRerankRequest::parse(body.to_string().as_bytes()).unwrap();
    let answer = serde_json::to_value(request.answer("m".to_owned(), &[0.25, f32::NAN, 0.5], 9)).unwrap();
    assert_eq!(
        answer,
        json!({
            "object": "list", "model": "m", "usage": {"prompt_tokens": 9, "total_tokens": 9},
            "results": [
                {"index": 2, "relevance_score": 0.5, "document": {"text": "c"}},
                {"index": 0, "relevance_score": 0.25, "document": {"text": "a"}},
            ],
        })
    );
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (-3_i64..40).prop_map(Value::from),
        ".{0,20}".prop_map(Value::from),
        prop::sample::select(vec!["user", "system", "assistant", "tool", "robot", "text", "auto"])
            .prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 48, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::vec((field(), inner), 0..5)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect::<Map<_, _>>())),
        ]
    })
}

fn field() -> impl Strategy<Value = String> {
    let known = vec![
        "messages",
        "role",
        "content",
        "name",
        "tool_calls",
        "tool_call_id",
        "reasoning_content",
        "json_schema",
        "n_predict",
        "type",
        "text",
        "prompt",
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "include_usage",
        "n",
        "tools",
        "logprobs",
        "top_logprobs",
        "typical_p",
        "xtc_probability",
        "xtc_threshold",
        "repeat_penalty",
        "repetition_penalty",
        "repeat_last_n",
        "frequency_penalty",
        "presence_penalty",
        "dry_multiplier",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "logit_bias",
        "response_format",
        "json_schema",
        "schema",
        "grammar",
        "priority",
        "input",
        "encoding_format",
        "dimensions",
        "query",
        "documents",
        "top_n",
    ];
    prop_oneof![4 => prop::sample::select(known).prop_map(String::from), 1 => "[a-z]{1,8}"]
}

/// A hundredth of what is drawn: a number that JSON writes exactly enough.
fn hundredths(range: std::ops::RangeInclusive<i16>) -> impl Strategy<Value = f32> {
    range.prop_map(|n| f32::from(n) / 100.0)
}

fn dry() -> impl Strategy<Value = Dry> {
    (hundredths(0..=500), hundredths(100..=300), 0..100_u32, 0..MAX_TOKENS_LIMIT, prop::collection::vec(".{1,8}", 0..4))
        .prop_map(|(multiplier, base, allowed_length, penalty_last_n, sequence_breakers)| Dry {
            multiplier,
            base,
            allowed_length,
            penalty_last_n,
            sequence_breakers,
        })
}

fn sampling() -> impl Strategy<Value = Sampling> {
    let bias = prop_oneof![Just(f32::NEG_INFINITY), hundredths(-10_000..=10_000)];
    (
        (1..=MAX_TOKENS_LIMIT, hundredths(0..=200), hundredths(1..=100), -1_i32..1000, hundredths(0..=100)),
        (any::<Option<u64>>(), prop::collection::vec(".{1,20}", 0..4), any::<bool>(), dry()),
        (hundredths(1..=100), hundredths(0..=100), hundredths(0..=100), hundredths(1..=200), 0..=MAX_TOKENS_LIMIT),
        (hundredths(-200..=200), hundredths(-200..=200), prop::collection::vec((0..i32::MAX, bias), 0..5)),
    )
        .prop_map(
            |(common, (seed, stop, ignore_eos, dry), tails, (frequency_penalty, presence_penalty, logit_bias))| {
                let (max_tokens, temperature, top_p, top_k, min_p) = common;
                let (typical_p, xtc_probability, xtc_threshold, repeat_penalty, repeat_last_n) = tails;
                Sampling {
                    max_tokens: Some(max_tokens),
                    temperature,
                    top_p,
                    top_k,
                    min_p,
                    typical_p,
                    xtc_probability,
                    xtc_threshold,
                    repeat_penalty,
                    repeat_last_n,
                    frequency_penalty,
                    presence_penalty,
                    dry,
                    logit_bias,
                    seed,
                    stop,
                    ignore_eos,
                }
            },
        )
}

fn format() -> impl Strategy<Value = Format> {
    prop_oneof![
        Just(Format::Text),
        Just(Format::JsonObject),
        ("[a-z]{1,9}", any::<bool>())
            .prop_map(|(title, strict)| Format::JsonSchema { schema: json!({"title": title}).to_string(), strict }),
        ".{1,30}".prop_map(Format::Grammar),
    ]
}

fn common() -> impl Strategy<Value = Common> {
    let priority = prop::option::of(prop::sample::select(Priority::ALL.to_vec()));
    let logprobs = prop::option::of(0..=MAX_TOP_LOGPROBS);
    let streaming = (streaming(), any::<bool>());
    (prop::option::of("[a-z]{1,9}"), sampling(), format(), logprobs, 1..=MAX_CHOICES, priority, streaming).prop_map(
        |(model, sampling, format, logprobs, choices, priority, (streaming, timings))| Common {
            model,
            sampling,
            format,
            logprobs,
            choices,
            priority,
            streaming,
            timings,
        },
    )
}

/// A message, or an assistant's turn with the answers to its calls.
fn turn() -> impl Strategy<Value = Vec<Message>> {
    let role = prop::sample::select(vec![Role::System, Role::User, Role::Assistant]);
    let text = (role, ".{0,30}", prop::option::of("[a-z]{1,5}"))
        .prop_map(|(role, content, name)| vec![Message { name, ..Message::text(role, content) }]);
    let calls = prop::collection::vec(("[a-z0-9]{1,8}", "[a-z]{1,5}", ".{0,20}"), 1..4);
    let called = (".{0,30}", prop::option::of(".{1,9}"), calls).prop_map(|(content, reasoning, calls)| {
        let answers: Vec<Message> = calls
            .iter()
            .map(|(id, name, answer)| Message {
                tool_call_id: Some(id.clone()),
                name: Some(name.clone()),
                ..Message::text(Role::Tool, answer)
            })
            .collect();
        let call = |(id, name, arguments)| ToolCall { id, name, arguments };
        let tool_calls = calls.into_iter().map(call).collect();
        let turn = Message { reasoning, tool_calls, ..Message::text(Role::Assistant, content) };
        [vec![turn], answers].concat()
    });
    prop_oneof![2 => text, 1 => called]
}

fn streaming() -> impl Strategy<Value = Streaming> {
    prop_oneof![
        Just(Streaming::default()),
        any::<bool>().prop_map(|include_usage| Streaming { enabled: true, include_usage })
    ]
}

/// Every error can be told: all four fields, a status that fits.
fn is_told(error: &ApiError) {
    let told = serde_json::to_value(error.to_response()).unwrap();
    let object = told["error"].as_object().unwrap();
    for name in ["message", "type", "param", "code"] {
        assert!(object.contains_key(name), "{told}");
    }
    assert!((400..500).contains(&error.status));
    assert!(!error.message.is_empty());
}

/// What is said of any body that is refused, whatever it was sent to.
fn parse_all(body: &[u8]) {
    let errors = [
        ValidChatRequest::parse(body).err(),
        ValidCompletionRequest::parse(body).err(),
        ValidEmbeddingsRequest::parse(body).err(),
        ValidRerankRequest::parse(body).err(),
    ];
    errors.iter().flatten().for_each(is_told);
}

proptest! {
    /// **Feature: distributed-inference-server, Property 24: Error Response Format**
    /// **Validates: Requirements 11.4**
    #[test]
    fn any_bytes_are_valid_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        parse_all(&bytes);
    }

    /// **Feature: distributed-inference-server, Property 24: Error Response Format**
    /// **Validates: Requirements 11.4**
    #[test]
    fn any_json_is_valid_or_an_error(value in any_json()) {
        parse_all(value.to_string().as_bytes());
    }

    #[test]
    fn any_value_of_any_parameter_is_valid_or_an_error_that_names_it(name in field(), value in any_json()) {
        if let Err(error) = chat_with(&name, value) {
            is_told(&error);
            prop_assert!(error.param.as_deref().is_some_and(|param| param.starts_with(&name)), "{name}: {error}");
        }
    }

    #[test]
    fn valid_chats_survive_the_wire(
        turns in prop::collection::vec(turn(), 1..6),
        common in common(),
    ) {
        let messages = turns.into_iter().flatten().collect();
        let request = ValidChatRequest { messages, common };
        prop_assert_eq!(ValidChatRequest::parse(request.to_json().to_string().as_bytes()).unwrap(), request);
    }

    #[test]
    fn valid_completions_survive_the_wire(prompt in ".{1,60}", common in common()) {
        let request = ValidCompletionRequest { prompt, parse_special: common.timings, common };
        prop_assert_eq!(ValidCompletionRequest::parse(request.to_json().to_string().as_bytes()).unwrap(), request);
    }

    #[test]
    fn valid_embeddings_and_rankings_survive_the_wire(
        texts in prop::collection::vec(".{1,20}", 1..5), tokens in prop::collection::vec(0..i32::MAX, 1..9),
        number in prop::option::of(1..9_u32), flag in any::<bool>(),
    ) {
        let mut inputs: Vec<EmbeddingInput> = texts.iter().cloned().map(EmbeddingInput::Text).collect();
        inputs.push(EmbeddingInput::Tokens(tokens));
        let encoding = if flag { EncodingFormat::Float } else { EncodingFormat::Base64 };
        let priority = flag.then_some(Priority::High);
        let request = ValidEmbeddingsRequest { model: None, inputs, encoding, dimensions: number, priority };
        prop_assert_eq!(ValidEmbeddingsRequest::parse(request.to_json().to_string().as_bytes()).unwrap(), request);

        let query = texts[0].clone();
        let request = ValidRerankRequest { model: None, query, documents: texts, top_n: number, return_documents: flag, priority };
        let answer = request.answer(String::new(), &vec![-0.123_456_78; request.documents.len()], 1);
        let texts_escaped: usize = answer.results.iter().filter_map(|result| result.document.as_ref())
            .map(|document| serde_json::to_string(document).unwrap().len() - document.text.len()).sum();
        let written = serde_json::to_vec(&answer).unwrap().len();
        prop_assert!(written <= request.answer_bytes() + texts_escaped + 128, "{} of {}", request.answer_bytes(), written);
        prop_assert_eq!(ValidRerankRequest::parse(request.to_json().to_string().as_bytes()).unwrap(), request);
    }
}

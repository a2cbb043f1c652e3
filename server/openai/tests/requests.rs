//! What requests may say: a table of mistakes, and properties over any input.
#![allow(clippy::unwrap_used)]

use gantry_openai::{
    ApiError, ErrorCode, MAX_STOP_BYTES, MAX_STOP_STRINGS, MAX_TOKENS_LIMIT, Message, Role, Sampling, Streaming,
    ValidChatRequest, ValidCompletionRequest,
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
            "messages[1].tool_calls",
            UnsupportedParameter,
        ),
        ("model", json!(4), "model", InvalidType),
        ("model", json!(""), "model", InvalidValue),
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
        ("n", json!(2), "n", UnsupportedParameter),
        ("tools", json!([{}]), "tools", UnsupportedParameter),
        ("logprobs", json!(true), "logprobs", UnsupportedParameter),
        ("response_format", json!({"type": "json_object"}), "response_format", UnsupportedParameter),
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
            {"role": "tool", "tool_call_id": "x", "content": "c"},
        ],
        "n": 1, "user": "u", "metadata": {"k": "v"}, "unknown": [1], "logit_bias": null, "tools": [], "seed": -1,
        "max_tokens": 5, "max_completion_tokens": 6, "stream": true, "stream_options": {"include_usage": true},
    });
    let request = ValidChatRequest::parse(body.to_string().as_bytes()).unwrap();
    assert_eq!(request.messages[0], Message { role: Role::System, content: "a\nb".into() });
    assert_eq!(request.sampling.max_tokens, Some(6));
    assert_eq!(request.sampling.seed, Some(u64::MAX));
    assert_eq!(request.streaming, Streaming { enabled: true, include_usage: true });
    assert!(request.check_model(&["m"]).is_ok());
    let error = request.check_model(&["other"]).unwrap_err();
    assert_eq!((error.status, error.param.as_deref()), (404, Some("model")));
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (-3_i64..40).prop_map(Value::from),
        ".{0,20}".prop_map(Value::from),
        prop::sample::select(vec!["user", "system", "robot", "text", "auto"]).prop_map(Value::from),
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
    ];
    prop_oneof![4 => prop::sample::select(known).prop_map(String::from), 1 => "[a-z]{1,8}"]
}

fn sampling() -> impl Strategy<Value = Sampling> {
    let unit = 1_u8..=100;
    (
        (1..=MAX_TOKENS_LIMIT, 0_u8..=200, unit, -1_i32..1000),
        (0_u8..=100, any::<Option<u64>>(), prop::collection::vec(".{1,20}", 0..4), any::<bool>()),
    )
        .prop_map(|((max_tokens, temperature, top_p, top_k), (min_p, seed, stop, ignore_eos))| Sampling {
            max_tokens: Some(max_tokens),
            temperature: f32::from(temperature) / 100.0,
            top_p: f32::from(top_p) / 100.0,
            top_k,
            min_p: f32::from(min_p) / 100.0,
            seed,
            stop,
            ignore_eos,
        })
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

proptest! {
    #[test]
    fn any_bytes_are_valid_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        if let Err(error) = ValidChatRequest::parse(&bytes) { is_told(&error); }
        if let Err(error) = ValidCompletionRequest::parse(&bytes) { is_told(&error); }
    }

    #[test]
    fn any_json_is_valid_or_an_error(value in any_json()) {
        let bytes = value.to_string();
        if let Err(error) = ValidChatRequest::parse(bytes.as_bytes()) { is_told(&error); }
        if let Err(error) = ValidCompletionRequest::parse(bytes.as_bytes()) { is_told(&error); }
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
        roles in prop::collection::vec((prop::sample::select(vec![Role::System, Role::User, Role::Assistant, Role::Tool]), ".{0,30}"), 1..6),
        model in prop::option::of("[a-z]{1,9}"), sampling in sampling(), streaming in streaming(),
    ) {
        let messages = roles.into_iter().map(|(role, content)| Message { role, content }).collect();
        let request = ValidChatRequest { model, messages, sampling, streaming };
        prop_assert_eq!(ValidChatRequest::parse(request.to_json().to_string().as_bytes()).unwrap(), request);
    }

    #[test]
    fn valid_completions_survive_the_wire(prompt in ".{1,60}", sampling in sampling(), streaming in streaming()) {
        let request = ValidCompletionRequest { model: None, prompt, sampling, streaming };
        prop_assert_eq!(ValidCompletionRequest::parse(request.to_json().to_string().as_bytes()).unwrap(), request);
    }
}

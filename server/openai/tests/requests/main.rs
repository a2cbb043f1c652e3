//! What requests may say: a table of mistakes and of what is taken, and [`properties`] over any input.
#![allow(clippy::unwrap_used)]

use gantry_core::{
    ApiError, Constraint, DryParams, ErrorCode, Infill, Message, Part, Priority, Prompt, Role, TextInput, messages_json,
};
use gantry_openai::{
    Common, ErrorResponse, MAX_CHOICES, MAX_DRY_ALLOWED_LENGTH, MAX_DRY_BREAKERS, MAX_GRAMMAR_BYTES, MAX_LOGIT_BIASES,
    MAX_MODEL_NAME_BYTES, MAX_NAME_BYTES, MAX_PROMPT_CHOICES, MAX_PROMPT_TOKENS, MAX_SCHEMA_BYTES, MAX_STOP_BYTES,
    MAX_STOP_STRINGS, MAX_STOP_TOKENS, MAX_TOKENS_LIMIT, MAX_TOOL_CALLS, MAX_TOP_LOGPROBS, Streaming, ValidChatRequest,
    ValidCompletionRequest,
};
use serde_json::{Value, json};

mod limits;
#[path = "../../../core/tests/common/mutate.rs"]
mod mutate;
mod properties;
mod tools;
mod vectors;
mod wire;

/// A valid chat with `name` set to `value`.
fn chat_with(name: &str, value: Value) -> Result<ValidChatRequest, ApiError> {
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}], "stream": name == "stream_options"});
    body[name] = value;
    ValidChatRequest::parse(body.to_string().as_bytes())
}

#[test]
fn of_several_answers_the_best_are_told_and_only_of_texts() {
    let text = |body: Value| ValidCompletionRequest::parse(body.to_string().as_bytes());
    let read = text(json!({"prompt": "Hi", "n": 2, "best_of": 5})).unwrap().common;
    assert_eq!((read.choices, read.best_of, read.logprobs, read.params.logprobs), (2, Some(5), None, Some(0)));
    let read = text(json!({"prompt": "Hi", "n": 2})).unwrap().common;
    assert_eq!((read.choices, read.best_of, read.params.logprobs), (2, None, None));
    assert!(text(json!({"prompt": "Hi", "n": 2, "best_of": 2, "stream": true})).is_ok());
    for (body, param) in [
        (json!({"prompt": "Hi", "n": 3, "best_of": 2}), "best_of"),
        (json!({"prompt": "Hi", "best_of": MAX_CHOICES + 1}), "best_of"),
        (json!({"prompt": "Hi", "best_of": 2, "stream": true}), "best_of"),
        (json!({"prompt": "Hi", "prompt_logprobs": 1, "stream": true}), "prompt_logprobs"),
        (json!({"prompt": "Hi", "prompt_logprobs": MAX_TOP_LOGPROBS + 1}), "prompt_logprobs"),
        (json!({"prompt": vec!["Hi"; 100], "best_of": 2}), "prompt"),
    ] {
        assert_eq!(text(body).unwrap_err().param.as_deref(), Some(param));
    }
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
        ("model", json!("m".repeat(MAX_MODEL_NAME_BYTES + 1)), "model", InvalidValue),
        ("max_tokens", json!(0), "max_tokens", InvalidValue),
        ("max_tokens", json!(1_000_000_000), "max_tokens", InvalidValue),
        ("max_tokens", json!(1e9), "max_tokens", InvalidValue),
        ("max_tokens", json!(-2), "max_tokens", InvalidValue),
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
        ("stop_token_ids", json!(7), "stop_token_ids", InvalidType),
        ("stop_token_ids", json!([7, -1]), "stop_token_ids[1]", InvalidValue),
        ("stop_token_ids", json!(vec![1; MAX_STOP_TOKENS + 1]), "stop_token_ids", InvalidValue),
        ("min_tokens", json!(-1), "min_tokens", InvalidValue),
        ("min_tokens", json!("x"), "min_tokens", InvalidType),
        ("seed", json!("x"), "seed", InvalidType),
        ("seed", json!(1.5), "seed", InvalidType),
        ("stop", json!(1), "stop", InvalidType),
        ("stop", json!(["a", 1]), "stop[1]", InvalidType),
        ("stop", json!(vec!["x"; MAX_STOP_STRINGS + 1]), "stop", InvalidValue),
        ("stop", json!("x".repeat(MAX_STOP_BYTES + 1)), "stop", InvalidValue),
        ("stream", json!("yes"), "stream", InvalidType),
        ("stream_options", json!([1]), "stream_options", InvalidType),
        ("stream_options", json!({"include_usage": 1}), "stream_options.include_usage", InvalidType),
        ("n", json!(0), "n", InvalidValue),
        ("n", json!(MAX_CHOICES + 1), "n", InvalidValue),
        ("n", json!("2"), "n", InvalidType),
        ("best_of", json!(2), "best_of", UnsupportedParameter),
        ("tools", json!([{}]), "tools[0].function", MissingRequiredParameter),
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
        ("response_format", json!({"schema": {}}), "response_format.type", MissingRequiredParameter),
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
fn prompts_are_taken_in_all_four_shapes() {
    let ask =
        |prompt: Value, n: u32| ValidCompletionRequest::parse(json!({"prompt": prompt, "n": n}).to_string().as_bytes());
    let parse = |prompt: Value| ask(prompt, 1).map(|request| request.prompts);
    let text = |t: &str| Prompt::Text(t.to_owned());
    assert_eq!(parse(json!("a")).unwrap(), [text("a")]);
    assert_eq!(parse(json!(["a", "b"])).unwrap(), [text("a"), text("b")]);
    assert_eq!(parse(json!([1, 2])).unwrap(), [Prompt::Tokens(vec![1, 2])]);
    assert_eq!(parse(json!([[1], [2, 3]])).unwrap(), [Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])]);
    for (prompt, param, code) in [
        (json!(null), "prompt", ErrorCode::MissingRequiredParameter),
        (json!(""), "prompt", ErrorCode::InvalidValue),
        (json!([]), "prompt", ErrorCode::InvalidValue),
        (json!({"a": 1}), "prompt", ErrorCode::InvalidType),
        (json!(["a", ""]), "prompt[1]", ErrorCode::InvalidValue),
        (json!([1, -1]), "prompt[1]", ErrorCode::InvalidValue),
        (json!([[1], ["a"]]), "prompt[1][0]", ErrorCode::InvalidType),
        (json!(vec!["a"; MAX_PROMPT_CHOICES as usize + 1]), "prompt", ErrorCode::InvalidValue),
        (json!(vec![1; MAX_PROMPT_TOKENS + 1]), "prompt", ErrorCode::InvalidValue),
    ] {
        let error = parse(prompt).unwrap_err();
        assert_eq!((error.param.as_deref(), &error.code), (Some(param), &code));
    }
    // What is bounded are the answers.
    let eight = json!(vec!["a"; 8]);
    assert_eq!(ask(eight, MAX_CHOICES).unwrap().common.choices, MAX_CHOICES);
    let error = ask(json!(vec!["a"; 9]), MAX_CHOICES).unwrap_err();
    assert!(error.message.contains("144 answers, 9 prompts with 16 each"), "{error}");
}

#[test]
fn a_suffix_follows_each_of_the_prompts() {
    let ask = |more: Value| {
        let mut body = json!({"prompt": "a", "suffix": "z"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ValidCompletionRequest::parse(body.to_string().as_bytes())
    };
    let gap = |prefix: TextInput| {
        Prompt::Infill(Box::new(Infill {
            prefix,
            begun: String::new(),
            suffix: "z".to_owned(),
            suffix_param: "suffix".to_owned(),
            files: None,
        }))
    };
    let text = |text: &str| gap(TextInput::Text(text.to_owned()));
    for (prompt, wanted) in [
        (json!("a"), vec![text("a")]),
        // What it follows may be nothing.
        (json!(""), vec![text("")]),
        (json!(["a", "b"]), vec![text("a"), text("b")]),
        (json!([1, 2]), vec![gap(TextInput::Tokens(vec![1, 2]))]),
    ] {
        assert_eq!(ask(json!({"prompt": prompt})).unwrap().prompts, wanted);
    }
    assert_eq!(ask(json!({"suffix": ""})).unwrap().prompts, [Prompt::Text("a".to_owned())]);
    for (more, param) in [
        (json!({"prompt": null}), "prompt"),
        (json!({"prompt": ["a", ""]}), "prompt[1]"),
        (json!({"suffix": 1}), "suffix"),
        (json!({"parse_special": true}), "parse_special"),
        (json!({"echo": true, "logprobs": 1}), "logprobs"),
    ] {
        assert_eq!(ask(more).unwrap_err().param.as_deref(), Some(param));
    }
    assert!(ask(json!({"echo": true, "prompt_logprobs": 1})).unwrap().common.params.echo);
}

#[test]
fn what_says_nothing_is_as_good_as_left_out() {
    let plain = Common::default();
    for name in [
        "model",
        "max_tokens",
        "temperature",
        "stop",
        "tools",
        "logit_bias",
        "response_format",
        "grammar",
        "json_schema",
        "stream_options",
        "user",
        "metadata",
        "service_tier",
        "reasoning_effort",
        "functions",
        "seed",
        "priority",
        "store",
        "chat_template_kwargs",
        "modalities",
        "lora",
        "cache_salt",
        "verbosity",
        "prediction",
    ] {
        for nothing in [json!(null), json!(""), json!([]), json!({})] {
            let body = json!({"messages": [{"role": "user", "content": "Hi"}], name: nothing});
            let request = ValidChatRequest::parse(body.to_string().as_bytes());
            assert_eq!(request.as_ref().map(|request| &request.common), Ok(&plain), "{name}: {nothing}");
        }
    }
    // These mean something when they are empty.
    let none = chat_with("dry_sequence_breakers", json!([])).unwrap().common;
    assert_ne!(none, plain);
    assert_eq!(chat_with("web_search_options", json!({})).unwrap_err().code, ErrorCode::UnsupportedParameter);
    assert_eq!(chat_with("messages", json!([])).unwrap_err().param.as_deref(), Some("messages"));
    for (name, value) in [
        ("stop", json!([""])),
        ("max_tokens", json!(-1)),
        ("max_completion_tokens", json!(-1)),
        ("store", json!(false)),
        ("service_tier", json!("auto")),
        ("service_tier", json!("default")),
        ("parallel_tool_calls", json!(true)),
        ("metadata", json!({"a": "b"})),
        ("tool_choice", json!("auto")),
    ] {
        assert_eq!(chat_with(name, value.clone()).unwrap().common, plain, "{name}: {value}");
    }
    let error = chat_with("store", json!(true)).unwrap_err();
    assert!(error.message.contains("nothing is stored here"), "{error}");
    let unasked = json!({"messages": [{"role": "user", "content": "Hi"}], "stream_options": {"include_usage": false}});
    assert_eq!(ValidChatRequest::parse(unasked.to_string().as_bytes()).unwrap().common, plain);
}

#[test]
fn of_a_name_that_stands_twice_the_last_counts() {
    let body = br#"{"messages": [{"role": "user", "content": "a", "content": "b"}], "seed": 1, "n": 2, "seed": 3}"#;
    let request = ValidChatRequest::parse(body).unwrap();
    assert_eq!((&*request.chat.messages[0].said(), request.common.params.seed), ("b", Some(3)));
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
    assert_eq!(request.chat.messages[0].content, ["a", "b"].map(|text| Part::Text(text.to_owned())));
    let common = request.common;
    assert_eq!(common.params.max_tokens, Some(6));
    assert_eq!(common.params.seed, Some(u64::MAX));
    assert_eq!(common.streaming, Streaming { enabled: true, include_usage: true });
    assert_eq!(common.model.as_deref(), Some("m"));
}

/// What a chat with one thing set differs in from the plain one.
fn differs(name: &str, value: Value, change: impl FnOnce(&mut Common)) {
    let mut expected = Common::default();
    change(&mut expected);
    assert_eq!(chat_with(name, value.clone()).unwrap().common, expected, "{name}: {value}");
}

#[test]
fn each_parameter_of_sampling_is_taken_in_all_its_spellings() {
    differs("typical_p", json!(0.5), |c| c.params.typical_p = 0.5);
    differs("xtc_probability", json!(1), |c| c.params.xtc_probability = 1.0);
    differs("xtc_threshold", json!(0), |c| c.params.xtc_threshold = 0.0);
    differs("repeat_penalty", json!(1.5), |c| c.params.repeat_penalty = 1.5);
    differs("repetition_penalty", json!(1.5), |c| c.params.repeat_penalty = 1.5);
    differs("repeat_last_n", json!(0), |c| c.params.repeat_last_n = 0);
    differs("repeat_last_n", json!(-1), |c| c.params.repeat_last_n = MAX_TOKENS_LIMIT);
    differs("frequency_penalty", json!(-2), |c| c.params.frequency_penalty = -2.0);
    differs("presence_penalty", json!(2), |c| c.params.presence_penalty = 2.0);
    differs("dry_multiplier", json!(0.8), |c| c.params.dry.multiplier = 0.8);
    differs("dry_base", json!(1), |c| c.params.dry.base = 1.0);
    differs("dry_allowed_length", json!(0), |c| c.params.dry.allowed_length = 0);
    differs("dry_penalty_last_n", json!(-1), |c| c.params.dry.penalty_last_n = 0);
    differs("dry_penalty_last_n", json!(64), |c| c.params.dry.penalty_last_n = 64);
    differs("dry_sequence_breakers", json!([]), |c| c.params.dry.sequence_breakers.clear());
    differs("logit_bias", json!({"5": -100, "7": 0.5}), |c| c.params.logit_bias = vec![(5, -100.0), (7, 0.5)]);
    differs("logit_bias", json!([[5, false], [5, 1]]), |c| {
        c.params.logit_bias = vec![(5, f32::NEG_INFINITY), (5, 1.0)];
    });
    differs("n", json!(MAX_CHOICES), |c| c.choices = MAX_CHOICES);
    differs("n", json!(2.0), |c| c.choices = 2);
    differs("max_tokens", json!(1e3), |c| c.params.max_tokens = Some(1000));
    for name in ["user", "safety_identifier", "prompt_cache_key", "session_id"] {
        differs(name, json!("someone"), |c| c.conversation = Some("someone".to_owned()));
        differs(name, json!(7), |_| {});
    }
    differs("top_logprobs", json!(0), |_| {});
    differs("priority", json!("high"), |c| c.params.priority = Priority::High);
    differs("priority", json!(-5), |c| c.params.priority = Priority::High);
    differs("priority", json!(0), |c| c.params.priority = Priority::Normal);
    differs("priority", json!(9), |c| c.params.priority = Priority::Low);
    differs("n_predict", json!(9), |c| c.params.max_tokens = Some(9));
    differs("n_predict", json!(-1), |_| {});
    differs("n_cmpl", json!(2), |c| c.choices = 2);
    differs("json_schema", json!({"type": "integer"}), |c| {
        bind(c, "json_schema", Some(Constraint::JsonSchema { schema: r#"{"type":"integer"}"#.into(), strict: false }));
    });
    differs("json_schema", json!({}), |_| {});
    differs("grammar", json!("root ::= \"a\""), |c| {
        bind(c, "grammar", Some(Constraint::Gbnf("root ::= \"a\"".into())));
    });
    differs("grammar", json!(""), |_| {});

    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "dry_multiplier": 1, "dry_penalty_last_n": 0});
    let off = ValidChatRequest::parse(body.to_string().as_bytes()).unwrap();
    assert_eq!(off.common.params.dry, DryParams::default(), "a look back of 0 turns the penalty off");
}

/// What an answer must look like, by a field of this name.
fn bind(common: &mut Common, param: &str, constraint: Option<Constraint>) {
    common.params.constraint_param = constraint.as_ref().map(|_| param.to_owned()).unwrap_or_default();
    common.params.constraint = constraint;
}

#[test]
fn each_form_of_an_answer_is_taken_by_vllms_names() {
    let schema = || Some(Constraint::JsonSchema { schema: r#"{"type":"integer"}"#.to_owned(), strict: false });
    let any_object = || Some(Constraint::JsonSchema { schema: r#"{"type":"object"}"#.to_owned(), strict: true });
    let regex = || Some(Constraint::Regex("a+".to_owned()));
    let gbnf = |text: &str| Some(Constraint::Gbnf(text.to_owned()));
    let texts = || json!(["a", "say \"b\"\n", "\\"]);
    let of_texts = || gbnf(r#"root ::= "a" | "say \"b\"\u000a" | "\\""#);
    for (name, given, param, constraint) in [
        ("guided_json", json!({"type": "integer"}), "guided_json", schema()),
        ("guided_json", json!(r#" {"type": "integer"}"#), "guided_json", schema()),
        ("guided_regex", json!("a+"), "guided_regex", regex()),
        ("guided_choice", texts(), "guided_choice", of_texts()),
        ("guided_grammar", json!("root ::= x"), "guided_grammar", gbnf("root ::= x")),
        ("structured_outputs", json!({"json": {"type": "integer"}}), "structured_outputs.json", schema()),
        ("structured_outputs", json!({"json_object": true}), "structured_outputs.json_object", any_object()),
        ("structured_outputs", json!({"regex": "a+"}), "structured_outputs.regex", regex()),
        ("structured_outputs", json!({"choice": texts()}), "structured_outputs.choice", of_texts()),
        ("structured_outputs", json!({"grammar": "root ::= x"}), "structured_outputs.grammar", gbnf("root ::= x")),
        ("structured_outputs", json!({"json_object": false, "regex": null, "choice": null}), "", None),
    ] {
        differs(name, given, |c| bind(c, param, constraint));
    }
    for (beside, param) in [
        (json!({"guided_json": "[]"}), "guided_json"),
        (json!({"guided_json": "{"}), "guided_json"),
        (json!({"guided_json": 7}), "guided_json"),
        (json!({"guided_regex": "a".repeat(5000)}), "guided_regex"),
        (json!({"guided_choice": "a"}), "guided_choice"),
        (json!({"guided_choice": [""]}), "guided_choice[0]"),
        (json!({"guided_choice": vec!["a"; 1001]}), "guided_choice"),
        (json!({"guided_choice": ["a".repeat(40_000), "b".repeat(40_000)]}), "guided_choice"),
        (json!({"structured_outputs": {"choice": []}}), "structured_outputs.choice"),
        (json!({"structured_outputs": {"regex": "a", "choice": ["a"]}}), "structured_outputs.choice"),
        (json!({"guided_regex": "a", "structured_outputs": {"regex": "a"}}), "structured_outputs.regex"),
        (json!({"guided_regex": "a", "response_format": {"type": "json_object"}}), "guided_regex"),
    ] {
        let mut body = beside;
        body["messages"] = json!([{"role": "user", "content": "Hi"}]);
        let error = ValidChatRequest::parse(body.to_string().as_bytes()).unwrap_err();
        assert_eq!(error.param.as_deref(), Some(param), "{error}");
    }
}

#[test]
fn each_form_of_an_answer_is_taken() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let of_schema = |strict| Some(Constraint::JsonSchema { schema: schema.to_string(), strict });
    let any_object = Constraint::JsonSchema { schema: r#"{"type":"object"}"#.to_owned(), strict: true };
    for (given, constraint) in [
        (json!({"type": "text"}), None),
        (json!({"type": "json_object"}), Some(any_object)),
        (json!({"type": "json_object", "schema": schema}), of_schema(false)),
        (json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}), of_schema(false)),
        (
            json!({"type": "json_schema", "json_schema": {"name": "a", "strict": true, "schema": schema}}),
            of_schema(true),
        ),
    ] {
        differs("response_format", given, |c| bind(c, "response_format", constraint));
    }
    // Answers have their properties in the order in which the schema names them.
    let ordered = r#"{"messages":[{"role":"user","content":"Hi"}],"response_format":{"type":"json_schema","json_schema":{"name":"a",
        "schema":{"type":"object","properties":{"z":{},"a":{},"m":{}}}}}}"#;
    let ordered = ValidChatRequest::parse(ordered.as_bytes()).unwrap();
    let Some(Constraint::JsonSchema { schema, .. }) = ordered.common.params.constraint else {
        panic!("no schema");
    };
    assert_eq!(schema, r#"{"type":"object","properties":{"z":{},"a":{},"m":{}}}"#);
    let body = json!({
        "messages": [{"role": "user", "content": "Hi"}], "grammar": "root ::= \"a\"", "response_format": {"type": "json_object"},
    });
    let error = ValidChatRequest::parse(body.to_string().as_bytes()).unwrap_err();
    assert_eq!((error.param.as_deref(), error.code), (Some("grammar"), ErrorCode::InvalidValue));
    for (other, second) in [
        (json!({"grammar": "root ::= \"a\""}), "grammar"),
        (json!({"response_format": {"type": "json_object"}}), "json_schema"),
    ] {
        let mut body = other;
        body["messages"] = json!([{"role": "user", "content": "Hi"}]);
        body["json_schema"] = json!({"type": "object"});
        let error = ValidChatRequest::parse(body.to_string().as_bytes()).unwrap_err();
        assert_eq!((error.param.as_deref(), error.code), (Some(second), ErrorCode::InvalidValue));
    }
}

fn messages(messages: Value) -> Result<Vec<Message>, ApiError> {
    ValidChatRequest::parse(json!({"messages": messages}).to_string().as_bytes()).map(|request| request.chat.messages)
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
        assert_eq!(messages(json!([user, turn, user])).unwrap()[1].said(), "", "{turn}");
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
        assert_eq!(messages(json!([turn])).unwrap()[0].said(), said, "{turn}");
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
    let told = messages_json(&ValidChatRequest::parse(body.as_bytes()).unwrap().chat.messages).unwrap();
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
        assert_eq!(messages(json!([asks, returned])).unwrap()[1].said(), "", "{nothing}");
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
        ValidCompletionRequest::parse(body.to_string().as_bytes()).unwrap().common.params.max_tokens
    };
    assert_eq!(parse("user", json!("u")), Some(16));
    assert_eq!(parse("n_predict", json!(-1)), None);
    assert_eq!(parse("n_predict", json!(5)), Some(5));
    assert_eq!((parse("max_tokens", json!(-1)), parse("max_completion_tokens", json!(-1))), (None, None));
}

#[test]
fn logprobs_are_asked_for_in_the_words_of_the_endpoint() {
    let chat = |more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "Hi"}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ValidChatRequest::parse(body.to_string().as_bytes()).map(|request| request.common.params.logprobs)
    };
    assert_eq!(chat(json!({"logprobs": false})).unwrap(), None);
    assert_eq!(chat(json!({"logprobs": true})).unwrap(), Some(0));
    assert_eq!(chat(json!({"logprobs": true, "top_logprobs": 20})).unwrap(), Some(20));
    assert!(chat(json!({"logprobs": false, "top_logprobs": 1})).is_err());

    let text = |logprobs: Value| {
        let body = json!({"prompt": "Hi", "logprobs": logprobs});
        ValidCompletionRequest::parse(body.to_string().as_bytes()).map(|request| request.common.params.logprobs)
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
    assert_eq!(parse(1.5, 1.5).unwrap().common.params.repeat_penalty, 1.5);
    assert_eq!(parse(1.5, 1.4).unwrap_err().param.as_deref(), Some("repetition_penalty"));
}

/// Every error can be told: all four fields, a status that fits.
fn is_told(error: &ApiError) {
    let told = serde_json::to_value(ErrorResponse::from(error)).unwrap();
    let object = told["error"].as_object().unwrap();
    for name in ["message", "type", "param", "code"] {
        assert!(object.contains_key(name), "{told}");
    }
    assert!((400..500).contains(&error.status));
    assert!(!error.message.is_empty());
}

//! Properties of any input.

use gantry_core::{
    ApiError, Chat, Constraint, DryParams, GenerationParams, Message, Priority, Prompt, Role, TextInput, Tool,
    ToolCall, ToolChoice,
};
use gantry_openai::{
    Common, EncodingFormat, MAX_CHOICES, MAX_TOKENS_LIMIT, MAX_TOP_LOGPROBS, Streaming, ValidChatRequest,
    ValidCompletionRequest, ValidEmbeddingsRequest, ValidRerankRequest, decode_apply_template, decode_chat,
    decode_completion, decode_detokenize, decode_embeddings, decode_infill, decode_rerank, decode_score,
    decode_tokenize,
};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use crate::{chat_with, is_told, mutate, wire};

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

fn dry() -> impl Strategy<Value = DryParams> {
    (hundredths(0..=500), hundredths(100..=300), 0..100_u32, 0..MAX_TOKENS_LIMIT, prop::collection::vec(".{1,8}", 0..4))
        .prop_map(|(multiplier, base, allowed_length, penalty_last_n, sequence_breakers)| DryParams {
            multiplier,
            base,
            allowed_length,
            penalty_last_n,
            sequence_breakers,
        })
}

fn sampling() -> impl Strategy<Value = GenerationParams> {
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
                GenerationParams {
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
                    ..GenerationParams::default()
                }
            },
        )
}

fn constraint() -> impl Strategy<Value = (Option<Constraint>, &'static str)> {
    prop_oneof![
        Just((None, "")),
        ("[a-z]{1,9}", any::<bool>()).prop_map(|(title, strict)| {
            (Some(Constraint::JsonSchema { schema: json!({"title": title}).to_string(), strict }), "response_format")
        }),
        ".{1,30}".prop_map(|grammar| (Some(Constraint::Gbnf(grammar)), "grammar")),
        ".{1,30}".prop_map(|regex| (Some(Constraint::Regex(regex)), "guided_regex")),
    ]
}

fn common() -> impl Strategy<Value = Common> {
    let priority = prop::sample::select(Priority::ALL.to_vec());
    let logprobs = prop::option::of(0..=MAX_TOP_LOGPROBS);
    let streaming = (streaming(), any::<bool>());
    (prop::option::of("[a-z]{1,9}"), sampling(), constraint(), logprobs, 1..=MAX_CHOICES, priority, streaming).prop_map(
        |(model, sampling, (constraint, param), logprobs, choices, priority, (streaming, timings))| Common {
            model,
            params: GenerationParams { constraint, constraint_param: param.to_owned(), logprobs, priority, ..sampling },
            logprobs,
            prompt_logprobs: None,
            choices,
            best_of: None,
            streaming,
            timings,
            reasoning: true,
            conversation: None,
        },
    )
}

/// A message, or an assistant's turn with the answers to its calls.
fn turn() -> impl Strategy<Value = Vec<Message>> {
    let role = prop::sample::select(vec![Role::System, Role::User, Role::Assistant]);
    let text = (role, ".{0,30}", prop::option::of("[a-z]{1,5}"))
        .prop_map(|(role, content, name)| vec![Message { name, ..Message::text(role, content) }]);
    // What templates are given writes arguments that are nothing as `{}`, and the wire is made of that.
    let calls = prop::collection::vec(("[a-z0-9]{1,8}", "[a-z]{1,5}", ".{1,20}"), 1..4);
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

fn tools() -> impl Strategy<Value = Vec<Tool>> {
    let tool = ("[a-z_-]{1,9}", prop::option::of(".{0,20}"), prop::option::of("[a-z]{1,5}"), any::<bool>());
    prop::collection::vec(tool, 0..4).prop_map(|tools| {
        let mut read: Vec<Tool> = Vec::new();
        for (name, description, title, strict) in tools {
            let parameters = title.map(|title| json!({"type": "object", "title": title}).to_string());
            if read.iter().all(|tool| tool.name != name) {
                read.push(Tool { name, description, parameters, strict });
            }
        }
        read
    })
}

fn streaming() -> impl Strategy<Value = Streaming> {
    prop_oneof![
        Just(Streaming::default()),
        any::<bool>().prop_map(|include_usage| Streaming { enabled: true, include_usage })
    ]
}

/// What is said of any body that is refused, whatever it was sent to.
fn parse_all(body: &[u8]) {
    let errors = [
        ValidChatRequest::parse(body).err(),
        ValidCompletionRequest::parse(body).err(),
        ValidEmbeddingsRequest::parse(body).err(),
        ValidRerankRequest::parse(body).err(),
        decode_tokenize(body).err(),
        decode_detokenize(body).err(),
        decode_apply_template(body).err(),
        decode_infill(body).err(),
        decode_score(body).err(),
    ];
    errors.iter().flatten().for_each(is_told);
}

type Decode = fn(&[u8]) -> Option<ApiError>;

/// Each decoder, by its address.
const DECODERS: [(&str, Decode); 9] = [
    ("/v1/chat/completions", |body| decode_chat(body).err()),
    ("/v1/completions", |body| decode_completion(body).err()),
    ("/infill", |body| decode_infill(body).err()),
    ("/v1/embeddings", |body| decode_embeddings(body).err()),
    ("/v1/rerank", |body| decode_rerank(body).err()),
    ("/v1/score", |body| decode_score(body).err()),
    ("/tokenize", |body| decode_tokenize(body).err()),
    ("/detokenize", |body| decode_detokenize(body).err()),
    ("/apply-template", |body| decode_apply_template(body).err()),
];

/// A body for each of them, and one more for chats, with much in it that is taken.
fn valid_bodies() -> Vec<(&'static str, Value)> {
    let sampled = json!({
        "model": "m", "n": 2, "max_tokens": 16, "min_tokens": 1, "stop": ["END"], "stop_token_ids": [3], "temperature": 0.5,
        "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repeat_penalty": 1.1, "repeat_last_n": 64, "frequency_penalty": -1,
        "presence_penalty": 1, "dry_multiplier": 0.8, "dry_sequence_breakers": ["\n"], "logit_bias": {"5": -100}, "seed": 7,
        "stream": true, "stream_options": {"include_usage": true}, "timings": true, "priority": "high", "user": "u",
    });
    let with = |mut body: Value, more: &Value| {
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let function = json!({"name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": true});
    let tools = json!({
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Look."}], "name": "ann"},
            {"role": "assistant", "reasoning_content": "Well.", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}},
            ]},
            {"role": "tool", "tool_call_id": "c", "content": "There."},
        ],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"name": "look"}]}},
        "parallel_tool_calls": false, "chat_template_kwargs": {"a": 1}, "reasoning_effort": "low",
    });
    let format =
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": {"type": "object"}}}});
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}], "logprobs": true, "top_logprobs": 2});
    vec![
        ("/v1/chat/completions", with(with(chat, &sampled), &format)),
        (
            "/v1/chat/completions",
            with(tools.clone(), &json!({"include_reasoning": false, "thinking_token_budget": 64})),
        ),
        ("/v1/completions", with(json!({"prompt": ["Hi", [1, 2]], "logprobs": 2, "guided_regex": "a+"}), &sampled)),
        (
            "/v1/completions",
            json!({"prompt": [1, 2], "echo": true, "best_of": 3, "structured_outputs": {"choice": ["a"]}}),
        ),
        ("/v1/completions", json!({"prompt": "", "suffix": "b", "n_indent": 2, "t_max_predict_ms": 100})),
        (
            "/infill",
            json!({
                "input_prefix": "a", "input_suffix": "c", "prompt": "b", "input_extra": [{"filename": "f", "text": "t"}],
                "response_fields": ["content", "timings/prompt_n"], "n_predict": 16, "stream": true, "grammar": "root ::= \"a\"",
            }),
        ),
        (
            "/v1/embeddings",
            json!({"input": ["Hi", [1, 2]], "dimensions": 8, "encoding_format": "base64", "priority": 1}),
        ),
        ("/v1/rerank", json!({"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1, "return_documents": true})),
        ("/v1/score", json!({"text_1": "a", "text_2": ["b", "c"], "priority": "low"})),
        ("/v1/score", json!({"queries": ["a", "b"], "documents": ["c", "d"], "model": "m"})),
        ("/tokenize", json!({"content": "Hi", "add_special": true, "parse_special": false, "with_pieces": true})),
        ("/tokenize", json!({"prompt": "Hi", "add_special_tokens": false})),
        ("/detokenize", json!({"tokens": [1, 2], "model": "m"})),
        ("/apply-template", tools),
    ]
}

fn near_valid() -> Vec<Value> {
    valid_bodies().into_iter().map(|(_, body)| body).collect()
}

#[test]
fn what_is_changed_for_the_property_is_right_before() {
    for (address, body) in valid_bodies() {
        let (_, decode) = DECODERS.iter().find(|(known, _)| *known == address).unwrap();
        assert_eq!(decode(body.to_string().as_bytes()), None, "{address}: {body}");
    }
}

#[test]
fn what_is_an_object_may_be_no_array() {
    for (address, body) in valid_bodies() {
        let (_, decode) = DECODERS.iter().find(|(known, _)| *known == address).unwrap();
        // Biases are taken as pairs, too.
        for (path, body) in mutate::with_arrays(&body, &["logit_bias"]) {
            let error = decode(body.to_string().as_bytes()).unwrap_or_else(|| panic!("{body} is taken"));
            mutate::is_told_of_object(&error, &path);
        }
    }
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
    fn what_is_near_to_right_is_taken_or_refused_by_name(body in mutate::near(near_valid())) {
        let bytes = body.to_string();
        let known = [
            "messages", "prompt", "input", "query", "documents", "content", "tokens", "input_prefix", "input_suffix", "text_1",
            "text_2",
        ];
        for (_, decode) in DECODERS {
            decode(bytes.as_bytes()).iter().for_each(|error| mutate::is_told(error, &body, &known));
        }
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
        tools in tools(),
        choice in prop::sample::select(vec![ToolChoice::Auto, ToolChoice::None, ToolChoice::Required]),
        (parallel_tool_calls, thinking) in (any::<bool>(), prop::option::of(any::<bool>())),
        thinking_budget in prop::option::of(0_u32..9),
        common in common(),
    ) {
        let tool_choice = match choice {
            ToolChoice::Required if tools.is_empty() => ToolChoice::Auto,
            choice => choice,
        };
        let messages: Vec<Message> = turns.into_iter().flatten().collect();
        let chat =
            Chat { tools, tool_choice, parallel_tool_calls, thinking, thinking_budget, ..Chat::from(messages) };
        let request = ValidChatRequest { chat, common };
        prop_assert_eq!(ValidChatRequest::parse(wire::chat(&request).to_string().as_bytes()).unwrap(), request);
    }

    #[test]
    fn valid_completions_survive_the_wire(
        texts in prop::collection::vec(".{1,60}", 1..4), tokens in prop::collection::vec(0..i32::MAX, 1..9), common in common(),
    ) {
        let text = if common.timings { Prompt::Markup } else { Prompt::Text };
        let mut prompts: Vec<Prompt> = texts.into_iter().map(text).collect();
        prompts.push(Prompt::Tokens(tokens));
        let request = ValidCompletionRequest { prompts, common };
        prop_assert_eq!(ValidCompletionRequest::parse(wire::completion(&request).to_string().as_bytes()).unwrap(), request);
    }

    #[test]
    fn valid_embeddings_and_rankings_survive_the_wire(
        texts in prop::collection::vec(".{1,20}", 1..5), tokens in prop::collection::vec(0..i32::MAX, 1..9),
        number in prop::option::of(1..9_u32), flag in any::<bool>(),
    ) {
        let mut inputs: Vec<TextInput> = texts.iter().cloned().map(TextInput::Text).collect();
        inputs.push(TextInput::Tokens(tokens));
        let encoding = if flag { EncodingFormat::Float } else { EncodingFormat::Base64 };
        let priority = if flag { Priority::High } else { Priority::Normal };
        let request = ValidEmbeddingsRequest { model: None, inputs, encoding, dimensions: number, priority };
        prop_assert_eq!(ValidEmbeddingsRequest::parse(wire::embeddings(&request).to_string().as_bytes()).unwrap(), request);

        let query = texts[0].clone();
        let request = ValidRerankRequest { model: None, query, documents: texts, top_n: number, return_documents: flag, priority };
        let answer = request.answer(String::new(), &vec![-0.123_456_78; request.documents.len()], 1);
        let texts_escaped: usize = answer.results.iter().filter_map(|result| result.document.as_ref())
            .map(|document| serde_json::to_string(document).unwrap().len() - document.text.len()).sum();
        let written = serde_json::to_vec(&answer).unwrap().len();
        prop_assert!(written <= request.answer_bytes() + texts_escaped + 128, "{} of {}", request.answer_bytes(), written);
        prop_assert_eq!(ValidRerankRequest::parse(wire::rerank(&request).to_string().as_bytes()).unwrap(), request);
    }
}

//! Bodies that are taken and refused, and answers whole and piece by piece.
#![allow(clippy::unwrap_used)]

use bytes::BytesMut;
use gantry_anthropic::{MAX_MESSAGES_BLOCKS, MessageEncoder, decode_count_tokens, decode_messages};
use gantry_core::{
    Answer, AnswerHead, AnswerOutput, ApiError, Chat, Constraint, ErrorKind, Extent, FinishReason, GenerationEvent,
    Prompt, Role, StopCause, StreamEncoder, Stretch, TextEncoder, TextRequest, Timings, Tool, ToolCall, ToolCallDelta,
    ToolChoice, Usage,
};
use proptest::prelude::*;
use serde_json::{Value, json};

#[path = "../../core/tests/common/mutate.rs"]
mod mutate;

fn with(more: Value) -> Value {
    let mut body = json!({"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": "Hi"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn decode(body: &Value) -> Result<TextRequest, ApiError> {
    decode_messages(body.to_string().as_bytes()).map(|(request, _)| request)
}

fn chat(request: TextRequest) -> Chat {
    match request.prompts.into_iter().next().unwrap() {
        Prompt::Chat(chat) => *chat,
        other => panic!("{other:?}"),
    }
}

fn tool(name: &str) -> Value {
    json!({"name": name, "description": "Looks.", "input_schema": {"type": "object", "properties": {}}})
}

#[test]
fn all_that_a_conversation_has_reaches_the_chat() {
    let body = with(json!({
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"where": "Oslo"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}], "is_error": false},
                {"type": "text", "text": "So?"},
            ]},
        ],
        "tools": [tool("look")],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": true},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stop_sequences": ["END"], "temperature": 0.5, "top_p": 0.9, "top_k": 5, "stream": true,
        "metadata": {"user_id": "u"},
    }));
    let request = decode(&body).unwrap();
    assert!(request.is_streamed);
    let params = &request.params;
    assert_eq!((params.max_tokens, params.temperature, params.top_p, params.top_k), (Some(64), 0.5, 0.9, 5));
    assert_eq!(params.stop, ["END"]);
    let chat = chat(request);
    let roles: Vec<Role> = chat.messages.iter().map(|message| message.role).collect();
    assert_eq!(roles, [Role::System, Role::User, Role::Assistant, Role::Tool, Role::User]);
    let call = &chat.messages[2];
    assert_eq!((call.reasoning.as_deref(), &*call.said()), (Some("hm"), "I look."));
    assert_eq!(call.tool_calls[0].arguments, r#"{"where":"Oslo"}"#);
    assert_eq!((chat.messages[3].tool_call_id.as_deref(), &*chat.messages[3].said()), (Some("t1"), "rain"));
    assert_eq!((chat.tool_choice, chat.parallel_tool_calls), (ToolChoice::Auto, false));
    assert_eq!((chat.thinking, chat.thinking_budget), (Some(true), Some(1024)));
    assert_eq!(chat.tools[0].name, "look");
    let named = with(json!({"tools": [tool("a"), tool("b")], "tool_choice": {"type": "tool", "name": "b"}}));
    let chat = self::chat(decode(&named).unwrap());
    assert_eq!((chat.tool_choice, chat.allowed_tools), (ToolChoice::Required, vec!["b".to_owned()]));
}

#[test]
fn a_result_that_is_an_error_says_so_to_the_model() {
    let result = |more: Value| {
        let mut result = json!({"type": "tool_result", "tool_use_id": "t"});
        result.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let call = json!({"type": "tool_use", "id": "t", "name": "look", "input": {}});
        let turns = json!({"messages": [
            {"role": "user", "content": "Look."}, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]},
        ]});
        chat(decode(&with(turns)).unwrap()).messages[2].said().into_owned()
    };
    for (given, told) in [
        (json!({"content": "no such file"}), "no such file"),
        (json!({"content": "no such file", "is_error": null}), "no such file"),
        (json!({"content": "no such file", "is_error": false}), "no such file"),
        (json!({"content": "no such file", "is_error": true}), "Error:\nno such file"),
        (
            json!({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "is_error": true}),
            "Error:\na\nb",
        ),
        (json!({"content": [], "is_error": true}), "Error:"),
        (json!({"is_error": true}), "Error:"),
        (json!({}), ""),
    ] {
        assert_eq!(result(given.clone()), told, "{given}");
    }
}

#[test]
fn what_a_tool_says_of_itself_is_obeyed_or_changes_nothing() {
    let schema = json!({"type": "object", "properties": {"where": {"type": "string"}}});
    let given = json!({
        "name": "look", "description": "Looks.", "input_schema": schema, "type": "custom", "strict": true,
        "input_examples": [{"where": "Oslo"}, {"where": "Lima"}], "defer_loading": true, "eager_input_streaming": false,
        "cache_control": {"type": "ephemeral"}, "allowed_callers": ["code_execution_20250825", "direct"],
    });
    let of = |tool: &Value| {
        let mut tools = chat(decode(&with(json!({"tools": [tool]}))).unwrap()).tools;
        let Tool { name, description, parameters, strict } = tools.remove(0);
        let parameters = parameters.map(|parameters| serde_json::from_str::<Value>(&parameters).unwrap());
        (name, description.unwrap(), parameters, strict)
    };
    let mut shown = schema.clone();
    shown["examples"] = given["input_examples"].clone();
    assert_eq!(of(&given), ("look".to_owned(), "Looks.".to_owned(), Some(shown), true));
    let plain = json!({"name": "look", "description": "Looks.", "input_schema": schema, "type": null, "input_examples": [],
        "allowed_callers": null, "strict": null});
    assert_eq!(of(&plain), ("look".to_owned(), "Looks.".to_owned(), Some(schema), false));
}

#[test]
fn blocks_are_counted_wherever_they_stand() {
    let blocks = |n: usize| vec![json!({"type": "text", "text": "a"}); n];
    let (most, more) = (blocks(MAX_MESSAGES_BLOCKS), blocks(MAX_MESSAGES_BLOCKS + 1));
    let call = json!({"type": "tool_use", "id": "t", "name": "look", "input": {}});
    let turns = |said: &[Value], returned: &[Value]| {
        json!({"messages": [
            {"role": "user", "content": said}, {"role": "assistant", "content": [call]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": returned}]},
        ]})
    };
    decode(&with(turns(&most, &most))).unwrap();
    decode(&with(json!({"system": most}))).unwrap();
    for (body, place) in [
        (json!({"system": more}), "system"),
        (turns(&more, &most), "messages[0].content"),
        (turns(&most, &more), "messages[2].content[0].content"),
    ] {
        let error = decode(&with(body)).unwrap_err();
        assert!(error.param.as_deref() == Some(place) && error.message.contains("blocks"), "{error}");
    }
}

#[test]
fn tools_that_a_tool_found_are_told_by_their_names() {
    let found = json!([{"type": "tool_reference", "tool_name": "look"}, {"type": "text", "text": "and no other"}]);
    let turns = json!({"tools": [tool("search"), tool("look")], "messages": [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "search", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": found}]},
    ]});
    let chat = chat(decode(&with(turns)).unwrap());
    assert_eq!((&*chat.messages[2].said(), chat.tools.len()), ("look\nand no other", 2));
}

#[test]
fn an_answer_that_the_client_began_is_continued() {
    let turns = |last: &str| json!({"messages": [{"role": "user", "content": "a"}, {"role": last, "content": "b"}]});
    assert!(chat(decode(&with(turns("assistant"))).unwrap()).continue_final_message);
    assert!(!chat(decode(&with(turns("user"))).unwrap()).continue_final_message);
}

#[test]
fn tokens_are_counted_of_what_would_be_asked() {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": [tool("look")]});
    let (request, _) = decode_count_tokens(body.to_string().as_bytes()).unwrap();
    assert!(matches!(request.params.extent, Extent::Prompt(_)));
    assert_eq!(chat(request).tools.len(), 1);
}

#[test]
fn mistakes_are_told_with_their_place() {
    let image = json!({"type": "image", "source": {"type": "url", "url": "http://x"}});
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    for (more, param, told) in [
        (json!({"max_tokens": null}), "max_tokens", "missing"),
        (json!({"max_tokens": 0}), "max_tokens", "from 1"),
        (json!({"max_tokens": 1_u64 << 32}), "max_tokens", "from 1 to 1048576"),
        (json!({"top_p": 0}), "top_p", "must be above 0 and at most 1, not 0"),
        (json!({"max_tokens": "many"}), "max_tokens", "must be a number, not a string"),
        (json!({"messages": []}), "messages", "1 to"),
        (json!({"messages": [{"role": "tool", "content": "x"}]}), "messages[0].role", "not `tool`"),
        (json!({"output_config": {"effort": "some"}}), "output_config.effort", "not `some`"),
        (json!({"output_config": {"format": {"type": "json_schema"}}}), "output_config.format.schema", "is missing"),
        (
            json!({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
            "context_management.edits[0].type",
            "must be",
        ),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content", "is missing"),
        (
            json!({"messages": [{"role": "user", "content": 7}]}),
            "messages[0].content",
            "a string or an array of blocks",
        ),
        (user(json!([])), "messages[0].content", "must have a text or a block"),
        (user(json!([image])), "messages[0].content[0].type", "not `image`"),
        (
            user(json!([{"type": "tool_result", "tool_use_id": "t", "is_error": 1}])),
            "messages[0].content[0].is_error",
            "must be true or false, not an integer",
        ),
        (
            user(json!([{"type": "tool_result", "tool_use_id": "t", "content": [image]}])),
            "messages[0].content[0].content[0].type",
            "not `image`",
        ),
        (json!({"thinking": {"type": "adaptive", "display": "omitted"}}), "thinking.display", "not `omitted`"),
        (user(json!([{"type": "text"}])), "messages[0].content[0].text", "is missing"),
        (user(json!([{"type": "tool_result", "tool_use_id": "t"}])), "messages[0].content[0].tool_use_id", "tool_use"),
        (
            json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]}),
            "messages[1].content",
            "must have text",
        ),
        (
            json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": [tool("a")]}),
            "tools",
            "continued",
        ),
        (json!({"temperature": 1.5}), "temperature", "0 to 1"),
        (json!({"stop_sequences": [""]}), "stop_sequences[0]", "bytes"),
        (json!({"tools": [{"name": "a b", "input_schema": {}}]}), "tools[0].name", "letters"),
        (
            json!({"tools": [{"name": "a", "input_schema": {}, "type": "web_search_20250305"}]}),
            "tools[0].type",
            "runs no tools",
        ),
        // It has no schema, of which nothing is said, since that would not help.
        (json!({"tools": [{"name": "a", "type": "bash_20250124"}]}), "tools[0].type", "`input_schema`"),
        (json!({"tools": [{"type": "mcp_toolset", "mcp_server_name": "a"}]}), "tools[0].type", "runs no tools"),
        (json!({"tools": [{"name": "a"}]}), "tools[0].input_schema", "is missing"),
        (json!({"tools": [{"name": "a", "input_schema": {}, "frobnicate": 1}]}), "tools[0].frobnicate", "is not known"),
        (
            json!({"tools": [{"name": "a", "input_schema": {}, "strict": 1}]}),
            "tools[0].strict",
            "must be true or false, not an integer",
        ),
        (
            json!({"tools": [{"name": "a", "input_schema": {}, "input_examples": [1]}]}),
            "tools[0].input_examples[0]",
            "must be an object",
        ),
        (
            json!({"tools": [{"name": "a", "input_schema": {}, "allowed_callers": ["code_execution_20250825"]}]}),
            "tools[0].allowed_callers",
            "must have direct",
        ),
        (user(json!([{"type": "tool_reference", "tool_name": "a"}])), "messages[0].content[0].type", "must be text"),
        (
            json!({"output_format": {"type": "json_schema", "schema": {}}, "output_config": {"format": {"type": "json_schema", "schema": {}}}}),
            "output_format",
            "`output_config.format`",
        ),
        (json!({"output_format": {"type": "text"}}), "output_format.type", "not `text`"),
        (
            json!({"tool_choice": {"type": "none", "disable_parallel_tool_use": true}}),
            "tool_choice.disable_parallel_tool_use",
            "is not known",
        ),
        (json!({"tools": [tool("a"), tool("a")]}), "tools[1].name", "before it"),
        (json!({"tool_choice": {"type": "any"}}), "tool_choice", "none to call"),
        (json!({"tools": [tool("a")], "tool_choice": {"type": "tool", "name": "b"}}), "tool_choice.name", "none of"),
        (json!({"thinking": {"type": "often"}}), "thinking.type", "not `often`"),
        (json!({"mcp_servers": [{}]}), "mcp_servers", "leave it out"),
        (json!({"temprature": 1}), "temprature", "did you mean `temperature`?"),
        (json!({"stop": ["a"]}), "stop", "it is `stop_sequences` here"),
    ] {
        let error = decode(&with(more.clone())).expect_err(&more.to_string());
        assert_eq!(error.param.as_deref(), Some(param), "{more}: {error}");
        assert!(error.status == 400 && error.message.contains(told), "{more}: {error}");
    }
    let unknown = decode(&with(json!({"frobnicate": 1}))).unwrap_err();
    assert!(unknown.message.contains("frobnicate"), "{unknown}");
    let not_json = decode_messages(b"{").unwrap_err();
    assert_eq!(not_json.code.as_str(), "invalid_json");
}

fn head() -> AnswerHead {
    AnswerHead { id: "1".to_owned(), created: 1, model: "m".to_owned(), version: "v".to_owned() }
}

const USAGE: Usage = Usage { prompt_tokens: 9, completion_tokens: 4, cached_tokens: 2, reasoning_tokens: 0 };

/// What a client makes of the events of a stream: the message as it would have come whole.
fn message_of(events: &str) -> Value {
    let mut message = Value::Null;
    let mut partial = String::new();
    for event in events.split_terminator("\n\n") {
        let (name, data) = event.split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(name.strip_prefix("event: ").unwrap(), data["type"]);
        let index = || usize::try_from(data["index"].as_u64().unwrap()).unwrap();
        match data["type"].as_str().unwrap() {
            "message_start" => message = data["message"].clone(),
            "content_block_start" => {
                assert_eq!(index(), message["content"].as_array().unwrap().len());
                message["content"].as_array_mut().unwrap().push(data["content_block"].clone());
                partial.clear();
            }
            "content_block_delta" => {
                let block = &mut message["content"][index()];
                let delta = &data["delta"];
                for (kind, field) in [("text_delta", "text"), ("thinking_delta", "thinking")] {
                    if delta["type"] == kind {
                        block[field] =
                            json!(format!("{}{}", block[field].as_str().unwrap(), delta[field].as_str().unwrap()));
                    }
                }
                if delta["type"] == "input_json_delta" {
                    partial += delta["partial_json"].as_str().unwrap();
                    block["input"] = serde_json::from_str(&partial).unwrap_or_else(|_| json!({}));
                }
            }
            "content_block_stop" => assert_eq!(index(), message["content"].as_array().unwrap().len() - 1),
            "message_delta" => {
                message["stop_reason"] = data["delta"]["stop_reason"].clone();
                message["stop_sequence"] = data["delta"]["stop_sequence"].clone();
                message["usage"] = data["usage"].clone();
            }
            "message_stop" => {}
            other => panic!("{other}"),
        }
    }
    message
}

/// What is thought, said and called in whatever order; the last call may stay half of one.
fn events() -> impl Strategy<Value = (Vec<GenerationEvent>, FinishReason, Option<String>)> {
    #[derive(Clone, Debug)]
    enum Piece {
        Thought(String),
        Said(String),
        Called(String, String, usize),
    }
    let text = || ".{1,8}".prop_filter("empty", |text| !text.is_empty());
    let piece = prop_oneof![
        text().prop_map(Piece::Thought),
        text().prop_map(Piece::Said),
        ("[a-z]{1,6}", "[a-z]{0,9}", any::<usize>()).prop_map(|(name, value, cut)| Piece::Called(name, value, cut)),
    ];
    let end = prop_oneof![Just(FinishReason::Stop), Just(FinishReason::Length)];
    let pieces = prop::collection::vec(piece, 0..8);
    (pieces, any::<bool>(), end, prop::option::of("[a-z]{1,3}")).prop_map(|(pieces, is_half, end, stop)| {
        let (mut events, mut index) = (Vec::new(), 0);
        let last = pieces.iter().rposition(|piece| matches!(piece, Piece::Called(..)));
        for (place, piece) in pieces.into_iter().enumerate() {
            let call = |delta| GenerationEvent::ToolCall { index, delta, tokens: 1 };
            match piece {
                Piece::Thought(text) => events.push(GenerationEvent::Reasoning { text, tokens: 1 }),
                Piece::Said(text) => events.push(GenerationEvent::Text { text, tokens: 1, logprobs: Vec::new() }),
                Piece::Called(name, value, cut) => {
                    events.push(call(ToolCallDelta::Begun { id: format!("call_{index}"), name }));
                    let arguments = json!({ "a": value }).to_string();
                    let (one, other) = arguments.split_at(cut % arguments.len());
                    let is_half = is_half && last == Some(place);
                    let pieces = [one, if is_half { "" } else { other }].into_iter().filter(|piece| !piece.is_empty());
                    events.extend(pieces.map(|piece| call(ToolCallDelta::Arguments(piece.to_owned()))));
                    events.extend((!is_half).then(|| call(ToolCallDelta::Ended)));
                    index += 1;
                }
            }
        }
        (events, end, stop.filter(|_| end == FinishReason::Stop))
    })
}

/// Bodies with everything in them that is taken.
fn valid() -> Vec<Value> {
    vec![
        json!({
            "model": "m", "max_tokens": 16, "system": "Be brief.", "messages": [{"role": "user", "content": "Hi"}],
            "stop_sequences": ["END"], "stream": true, "temperature": 0.5, "top_p": 0.9, "top_k": 40,
            "metadata": {"user_id": "u"}, "service_tier": "auto", "thinking": {"type": "enabled", "budget_tokens": 8},
            "output_format": {"type": "json_schema", "schema": {"type": "object"}}, "output_config": {"effort": "low"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        }),
        json!({
            "max_tokens": 16,
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Look."}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "Well.", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "So."}, {"type": "tool_use", "id": "c", "name": "look", "input": {"at": 1}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c", "is_error": true, "content": [
                        {"type": "text", "text": "There."}, {"type": "tool_reference", "tool_name": "look"},
                    ]},
                ]},
            ],
            "tools": [{
                "name": "look", "description": "Looks.", "input_schema": {"type": "object"}, "type": "custom", "strict": false,
                "input_examples": [{"at": 1}], "allowed_callers": ["direct"], "defer_loading": true,
            }],
            "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": true},
            "thinking": {"type": "disabled"},
        }),
    ]
}

/// As an agent sends it: instructions between turns, how much to think, and that nothing of earlier thoughts is left out.
#[test]
fn what_agents_say_beside_their_messages_is_obeyed() {
    let schema = json!({"type": "object", "properties": {"name": {"type": "string"}}});
    let body = with(json!({
        "messages": [{"role": "user", "content": "Hi"}, {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}],
        "output_config": {"effort": "max", "format": {"type": "json_schema", "schema": schema}},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }));
    let request = decode(&body).unwrap();
    assert_eq!(request.params.constraint_param, "output_config.format.schema");
    let Some(Constraint::JsonSchema { schema: asked, .. }) = &request.params.constraint else { panic!("no form") };
    assert_eq!(serde_json::from_str::<Value>(asked).unwrap(), schema);
    let chat = chat(request);
    assert_eq!(chat.messages[1].role, Role::System);
    assert_eq!(chat.template_variables, [("reasoning_effort".to_owned(), "\"high\"".to_owned())]);
    // By the name that it had before.
    let request = decode(&with(json!({"output_format": {"type": "json_schema", "schema": schema}}))).unwrap();
    assert_eq!(request.params.constraint_param, "output_format.schema");
    let Some(Constraint::JsonSchema { schema: asked, .. }) = &request.params.constraint else { panic!("no form") };
    assert_eq!(serde_json::from_str::<Value>(asked).unwrap(), schema);
}

#[test]
fn what_is_changed_for_the_property_is_right_before() {
    for body in valid() {
        decode_messages(body.to_string().as_bytes()).unwrap();
    }
}

#[test]
fn what_is_an_object_may_be_no_array() {
    for (path, body) in valid().iter().flat_map(|body| mutate::with_arrays(body, &["metadata", "cache_control"])) {
        let bytes = body.to_string();
        for error in [decode_messages(bytes.as_bytes()).err(), decode_count_tokens(bytes.as_bytes()).err()] {
            mutate::is_told_of_object(&error.unwrap_or_else(|| panic!("{body} is taken")), &path);
        }
    }
    // By the order of the fields.
    for (more, param) in [
        (json!({"messages": [["user", "Hi"]]}), "messages[0]"),
        (json!({"messages": [{"role": "user", "content": [["text", "Hi"]]}]}), "messages[0].content[0]"),
        (json!({"tools": [["look", null, {}, "web_search_20250305", null, null, null, null, null, null]]}), "tools[0]"),
        (json!({"thinking": ["enabled", 5]}), "thinking"),
        (json!({"output_config": ["low", null]}), "output_config"),
        (json!({"context_management": [[]]}), "context_management"),
        (json!({"context_management": {"edits": [["clear_thinking_20251015", "all"]]}}), "context_management.edits[0]"),
    ] {
        mutate::is_told_of_object(&decode(&with(more)).unwrap_err(), param);
    }
}

proptest! {
    #[test]
    fn events_add_up_to_the_whole((events, reason, stop_string) in events()) {
        let mut output = AnswerOutput::default();
        let mut stream = MessageEncoder.stream(head(), 1).unwrap();
        let mut out = BytesMut::new();
        stream.open(&mut out).unwrap();
        let stop = stop_string.map(StopCause::Text);
        let finished = GenerationEvent::Finished { reason, stop: stop.clone(), usage: USAGE, timings: Timings::default() };
        let started = GenerationEvent::Started { prompt_tokens: 9, files_left_out: 0 };
        for event in std::iter::once(started).chain(events).chain([finished]) {
            stream.event(0, &event, &mut out).unwrap();
            output.push(event);
        }
        stream.close(USAGE, &mut out).unwrap();
        let answer = Answer { output, reason, stop, usage: USAGE, timings: Timings::default() };
        let whole: Value = serde_json::from_slice(&MessageEncoder.whole(head(), vec![answer], USAGE).unwrap()).unwrap();
        prop_assert_eq!(message_of(std::str::from_utf8(&out).unwrap()), whole);
    }

    #[test]
    fn what_is_near_to_right_is_taken_or_refused_by_name(body in mutate::near(valid())) {
        let known = ["messages", "max_tokens"];
        let bytes = body.to_string();
        for error in [decode_messages(bytes.as_bytes()).err(), decode_count_tokens(bytes.as_bytes()).err()] {
            error.iter().for_each(|error| mutate::is_told(error, &body, &known));
        }
    }

    #[test]
    fn any_bytes_are_taken_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Err(error) = decode_messages(&bytes) {
            prop_assert_eq!(error.status, 400);
        }
    }
}

#[test]
fn blocks_come_in_the_order_in_which_the_model_wrote_them() {
    let mut output = AnswerOutput::default();
    for event in [
        GenerationEvent::Text { text: "I look.".to_owned(), tokens: 1, logprobs: Vec::new() },
        GenerationEvent::ToolCall {
            index: 0,
            delta: ToolCallDelta::Begun { id: "c".to_owned(), name: "look".to_owned() },
            tokens: 1,
        },
        GenerationEvent::ToolCall { index: 0, delta: ToolCallDelta::Arguments("{}".to_owned()), tokens: 1 },
        GenerationEvent::ToolCall { index: 0, delta: ToolCallDelta::Ended, tokens: 1 },
        GenerationEvent::Reasoning { text: "Hm.".to_owned(), tokens: 1 },
        GenerationEvent::Text { text: "And wait.".to_owned(), tokens: 1, logprobs: Vec::new() },
    ] {
        output.push(event);
    }
    let answer = Answer { output, reason: FinishReason::Stop, stop: None, usage: USAGE, timings: Timings::default() };
    let whole: Value = serde_json::from_slice(&MessageEncoder.whole(head(), vec![answer], USAGE).unwrap()).unwrap();
    let blocks = json!([
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "c", "name": "look", "input": {}},
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "And wait."},
    ]);
    assert_eq!((&whole["content"], &whole["stop_reason"]), (&blocks, &json!("tool_use")));
}

#[test]
fn an_answer_says_why_it_ended() {
    let call = ToolCall { id: "c".to_owned(), name: "look".to_owned(), arguments: "{\"a\": 1".to_owned() };
    for (tool_calls, reason, stop_string, told) in [
        (vec![], FinishReason::Stop, None, "end_turn"),
        (vec![], FinishReason::Stop, Some("END".to_owned()), "stop_sequence"),
        (vec![call.clone()], FinishReason::Stop, None, "tool_use"),
        (vec![call], FinishReason::Length, None, "max_tokens"),
    ] {
        let order = std::iter::once(Stretch::Text(1)).chain(tool_calls.iter().map(|_| Stretch::Call)).collect();
        let output = AnswerOutput { text: "a".to_owned(), tool_calls, order, ..AnswerOutput::default() };
        let stop = stop_string.clone().map(StopCause::Text);
        let answer = Answer { output, reason, stop, usage: USAGE, timings: Timings::default() };
        let told_of: Value =
            serde_json::from_slice(&MessageEncoder.whole(head(), vec![answer], USAGE).unwrap()).unwrap();
        assert_eq!((&told_of["stop_reason"], &told_of["stop_sequence"]), (&json!(told), &json!(stop_string)));
        assert_eq!(
            told_of["usage"],
            json!({"input_tokens": 7, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2, "output_tokens": 4})
        );
        // What was cut off is no object.
        assert!(
            told_of["content"]
                .as_array()
                .unwrap()
                .iter()
                .all(|block| block["type"] != "tool_use" || block["input"] == json!({}))
        );
    }
}

#[test]
fn errors_have_the_words_of_this_api() {
    for (status, kind, word) in [
        (400, ErrorKind::InvalidRequestError, "invalid_request_error"),
        (401, ErrorKind::InvalidRequestError, "authentication_error"),
        (404, ErrorKind::NotFoundError, "not_found_error"),
        (429, ErrorKind::RateLimitError, "rate_limit_error"),
        (500, ErrorKind::ServerError, "api_error"),
        (503, ErrorKind::ServiceUnavailableError, "overloaded_error"),
    ] {
        let error = ApiError::new(status, kind, gantry_core::ErrorCode::InternalError, "no");
        let body = gantry_anthropic::error_body(&error, Some("r"));
        assert_eq!(body, json!({"type": "error", "error": {"type": word, "message": "no"}, "request_id": "r"}));
    }
}

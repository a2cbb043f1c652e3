//! From bodies to what is asked, and from what comes of it to answers and events.
#![allow(clippy::unwrap_used)]

use bytes::BytesMut;
use gantry_core::{
    Answer, AnswerHead, AnswerOutput, ApiError, Constraint, ErrorKind, FinishReason, GenerationEvent, Prompt, Role,
    StopCause, StreamEncoder, TextEncoder, TextRequest, Timings, ToolCallDelta, ToolChoice, Usage,
};
use gantry_responses::{
    MAX_RESPONSES_REFERRED, MAX_STORED_INPUT_BYTES, Progress, ResolvedRequest, ResponseEncoder, ResponseId,
    ResponseStream, Status, StoredResponse, StoredResponses, abandoned, decode_responses, page,
};
use proptest::prelude::*;
use serde_json::{Value, json};

#[path = "../../core/tests/common/mutate.rs"]
mod mutate;

const ID: ResponseId = ResponseId::new(7);

fn decode(body: &Value) -> Result<(TextRequest, ResponseEncoder), ApiError> {
    let request = decode_responses(body.to_string().as_bytes(), false)?;
    let ResolvedRequest { request, encoder, .. } = request.resolve(ID, StoredResponses::new())?;
    Ok((request, encoder))
}

fn chat(body: &Value) -> gantry_core::Chat {
    let (request, _) = decode(body).unwrap();
    let [Prompt::Chat(chat)] = request.prompts.as_slice() else { panic!("{request:?}") };
    (**chat).clone()
}

fn tool(name: &str) -> Value {
    json!({"type": "function", "name": name, "description": "Looks.", "parameters": {"type": "object", "properties": {}}})
}

#[test]
fn items_are_the_messages_that_templates_know() {
    let body = json!({
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": "Where?"},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
                {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []},
            ]},
            {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look", "arguments": "{}", "status": "completed"},
            {"type": "function_call", "call_id": "call_2", "name": "look", "arguments": "{\"a\":1}"},
            {"type": "function_call_output", "call_id": "call_2", "output": "there"},
            {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "here"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}], "encrypted_content": null},
            {"role": "assistant", "content": "Here."},
            {"role": "developer", "content": [{"type": "input_text", "text": "Go on."}]},
        ],
        "tools": [tool("look")],
        "reasoning": {"effort": "low", "summary": "auto"},
    });
    let chat = chat(&body);
    let said: Vec<_> = chat.messages.iter().map(|message| (message.role, message.said().into_owned())).collect();
    let wanted = [
        (Role::System, "Be brief."),
        (Role::User, "Where?"),
        (Role::Assistant, "I look."),
        (Role::Tool, "there"),
        (Role::Tool, "here"),
        (Role::Assistant, "Here."),
        (Role::System, "Go on."),
    ];
    assert_eq!(said, wanted.map(|(role, text)| (role, text.to_owned())));
    let calls: Vec<&str> = chat.messages[2].tool_calls.iter().map(|call| call.id.as_str()).collect();
    assert_eq!(calls, ["call_1", "call_2"]);
    assert_eq!(chat.messages[3].tool_call_id.as_deref(), Some("call_2"));
    assert_eq!(chat.messages[5].reasoning.as_deref(), Some("Hm."));
    assert_eq!((chat.thinking, chat.tools.len(), chat.parallel_tool_calls), (Some(true), 1, true));
    assert_eq!(chat.template_variables, [("reasoning_effort".to_owned(), "\"low\"".to_owned())]);
}

#[test]
fn a_call_of_a_custom_tool_is_that_of_a_function_of_one_text() {
    let input = json!([
        {"role": "user", "content": "Patch it."},
        {"type": "reasoning", "id": "rs_1", "summary": null, "encrypted_content": "x"},
        {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c", "name": "patch", "input": "+ \"a\"", "caller": {"type": "direct"}},
        {"type": "custom_tool_call_output", "call_id": "c", "output": [
            {"type": "input_text", "text": "done"}, {"type": "input_text", "text": "at once"},
        ]},
        {"type": "function_call", "call_id": "d", "name": "look", "arguments": "{}", "namespace": null, "caller": null},
        {"type": "function_call_output", "call_id": "d", "output": "there", "name": "look", "namespace": "n", "caller": null},
        {"role": "assistant", "content": [{"type": "output_text", "text": "So."}, {"type": "refusal", "refusal": "No more."}]},
    ]);
    let messages = chat(&json!({"input": input})).messages;
    let called = |i: usize| {
        messages[i].tool_calls.iter().map(|call| (&*call.id, &*call.name, &*call.arguments)).collect::<Vec<_>>()
    };
    assert_eq!(called(1), [("c", "patch", r#"{"input":"+ \"a\""}"#)]);
    assert_eq!((messages[1].reasoning.as_ref(), messages[2].tool_call_id.as_deref()), (None, Some("c")));
    assert_eq!(called(3), [("d", "look", "{}")]);
    let said: Vec<_> = messages.iter().map(|message| message.said().into_owned()).collect();
    assert_eq!(said, ["Patch it.", "", "done\nat once", "", "there", "So.\nNo more."]);
}

#[test]
fn what_is_said_and_thought_between_calls_and_their_outputs_is_of_the_turn_that_calls() {
    let thought =
        |text: &str| json!({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]});
    let call = |id: &str| json!({"type": "function_call", "call_id": id, "name": "look", "arguments": "{}"});
    let output = |id: &str| json!({"type": "function_call_output", "call_id": id, "output": "there"});
    let input = json!([
        {"role": "user", "content": "Where?"}, thought("First a."), call("a"), thought(" Then b."), call("b"),
        {"role": "assistant", "content": "I have asked."}, output("a"), output("b"), {"role": "assistant", "content": "There."},
    ]);
    let messages = chat(&json!({"input": input})).messages;
    let roles: Vec<_> = messages.iter().map(|message| message.role).collect();
    assert_eq!(roles, [Role::User, Role::Assistant, Role::Tool, Role::Tool, Role::Assistant]);
    let turn = &messages[1];
    let said = (turn.tool_calls.len(), turn.said().into_owned(), turn.reasoning.as_deref());
    assert_eq!(said, (2, "I have asked.".to_owned(), Some("First a. Then b.")));
}

#[test]
fn what_chats_call_otherwise_is_told_by_its_name_here() {
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {}}});
    for (body, told) in [
        (json!({"messages": [{"role": "user", "content": "Hi"}]}), "`messages` is not known: it is `input` here."),
        (json!({"input": "Hi", "max_tokens": 5}), "`max_tokens` is not known: it is `max_output_tokens` here."),
        (
            json!({"input": "Hi", "response_format": {"type": "json_object"}}),
            "`response_format` is not known: it is `text.format` here.",
        ),
        (
            json!({"input": "Hi", "tools": [tool]}),
            "`tools[0].function` is not known: `name`, `description` and `parameters` stand beside `type` here.",
        ),
        (
            json!({"input": "Hi", "temprature": 1}),
            "`temprature` is not known: did you mean `temperature`? Otherwise leave it out.",
        ),
        (json!({"input": "Hi", "temperature": "hot"}), "`temperature` must be a number, not a string."),
    ] {
        assert_eq!(decode(&body).map(drop).unwrap_err().message, told, "{body}");
    }
}

#[test]
fn items_that_cannot_be_taken_are_refused_with_what_to_do() {
    for (kind, told) in [
        ("item_reference", "send the item itself"),
        ("web_search_call", "runs no tools"),
        ("computer_call_output", "runs no tools"),
        ("mcp_approval_response", "runs no tools"),
        ("shell_call", "send a function_call"),
        ("additional_tools", "`tools`"),
        ("compaction", "sums up no conversations"),
        ("frobnicate", "not `frobnicate`"),
    ] {
        let input =
            json!([{"role": "user", "content": "Hi"}, {"type": kind, "id": "x", "call_id": "c", "output": "x"}]);
        let error = decode(&json!({"input": input})).unwrap_err();
        let told_where = (error.status, error.param.as_deref());
        assert!(told_where == (400, Some("input[1].type")) && error.message.contains(told), "{kind}: {error:?}");
    }
    for kind in ["input_image", "input_file", "input_audio"] {
        let output = json!([{"type": "input_text", "text": "a"}, {"type": kind}]);
        let input = json!([{"type": "custom_tool_call_output", "call_id": "c", "output": output}]);
        let error = decode(&json!({"input": input})).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("input[0].output[1].type"), "{error:?}");
    }
}

#[test]
fn what_is_said_beside_them_is_followed() {
    let (request, _) = decode(&json!({"input": "Hi", "model": "m", "max_output_tokens": 9, "temperature": 0, "top_p": 0.5, "stream": true,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": true}, "verbosity": "medium"}}))
    .unwrap();
    assert_eq!((request.model.as_deref(), request.is_streamed, request.prompt_param), (Some("m"), true, "input"));
    let params = request.params;
    assert_eq!((params.max_tokens, params.temperature, params.top_p), (Some(9), 0.0, 0.5));
    assert_eq!(
        params.constraint,
        Some(Constraint::JsonSchema { schema: r#"{"type":"object"}"#.to_owned(), strict: true })
    );
    assert_eq!(params.constraint_param, "text.format");
    for (choice, wanted, allowed) in [
        (json!("auto"), ToolChoice::Auto, vec![]),
        (json!("none"), ToolChoice::None, vec![]),
        (json!("required"), ToolChoice::Required, vec![]),
        (json!({"type": "function", "name": "b"}), ToolChoice::Required, vec!["b"]),
        (
            json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "a"}]}),
            ToolChoice::Auto,
            vec!["a"],
        ),
    ] {
        let chat = chat(
            &json!({"input": "Hi", "tools": [tool("a"), tool("b")], "tool_choice": choice, "parallel_tool_calls": false}),
        );
        assert_eq!(
            (chat.tool_choice, &chat.allowed_tools, chat.parallel_tool_calls),
            (wanted, &allowed.iter().map(ToString::to_string).collect(), false)
        );
    }
}

#[test]
fn what_is_not_done_is_refused_by_its_path() {
    let call = json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"});
    for (beside, param) in [
        (json!({"input": null}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": 7}), "input"),
        (json!({"input": [7]}), "input[0]"),
        (json!({"input": [{"role": "judge", "content": "Hi"}]}), "input[0].role"),
        (json!({"input": [{"role": "user"}]}), "input[0]"),
        (json!({"input": [{"role": "user", "content": 7}]}), "input[0].content"),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
            "input[0].content[0].type",
        ),
        (
            json!({"input": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]}),
            "input[0].content[0].type",
        ),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0].type"),
        (json!({"input": [{"type": "web_search_call", "id": "x"}]}), "input[0].type"),
        (json!({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}), "input[0].call_id"),
        (json!({"input": [call, call]}), "input[1].call_id"),
        (json!({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}), "input[0].input"),
        (json!({"input": [{"type": "custom_tool_call_output", "call_id": "c", "output": "x"}]}), "input[0].call_id"),
        (
            json!({"input": [{"type": "reasoning", "content": [{"type": "text", "text": "x"}]}]}),
            "input[0].content[0].type",
        ),
        (json!({"frobnicate": 1}), "frobnicate"),
        (json!({"store": true}), "store"),
        (json!({"background": true}), "background"),
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"conversation": "c"}), "conversation"),
        (json!({"truncation": "auto"}), "truncation"),
        (json!({"include": ["reasoning.encrypted_content", "file_search_call.results"]}), "include[1]"),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
        (json!({"temperature": 3}), "temperature"),
        (json!({"top_p": 0}), "top_p"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function"}]}), "tools[0]"),
        (json!({"tools": [tool("a"), tool("a")]}), "tools[1].name"),
        (json!({"tools": [tool("a")], "tool_choice": {"type": "function", "name": "b"}}), "tool_choice"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"text": {"format": {"type": "xml"}}}), "text.format.type"),
        (json!({"reasoning": {"effort": "much"}}), "reasoning.effort"),
        (json!({"metadata": {"a": 1}}), "metadata"),
    ] {
        let mut body = json!({"input": "Hi"});
        body.as_object_mut().unwrap().extend(beside.as_object().unwrap().clone());
        let error = decode(&body).map(drop).unwrap_err();
        let named = error.param.as_deref().unwrap_or_default();
        // An unknown variant is said of what holds it.
        assert!(
            error.status == 400
                && (named == param
                    || param.strip_prefix(named).is_some_and(|rest| rest.starts_with('.'))
                    || error.message.contains(param)),
            "{body}: {error:?}"
        );
    }
}

#[test]
fn an_answer_repeats_what_was_understood_and_nothing_long() {
    let told = |body: &Value| -> Value {
        let answer = Answer {
            output: AnswerOutput::default(),
            reason: FinishReason::Stop,
            stop: None,
            usage: usage(),
            timings: Timings::default(),
        };
        serde_json::from_slice(&decode(body).unwrap().1.whole(head(), vec![answer], usage()).unwrap()).unwrap()
    };
    let mut given = tool("a");
    given["defer_loading"] = json!(vec![Value::Array(vec![]); 100]);
    let named = json!({"type": "function", "name": "a", "more": vec![Value::Array(vec![]); 100]});
    let answer = told(&json!({"input": "Hi", "instructions": "Be brief.", "tools": [given], "tool_choice": named}));
    assert_eq!(answer["instructions"], "Be brief.");
    assert_eq!((&answer["tools"][0]["name"], answer["tools"][0].get("defer_loading")), (&json!("a"), None));
    assert_eq!(answer["tool_choice"], json!({"type": "function", "name": "a"}));
    let long = "x".repeat(100_000);
    let answer = told(
        &json!({"input": "Hi", "instructions": long, "tools": [{"type": "function", "name": "a", "description": long}]}),
    );
    assert_eq!((&answer["instructions"], &answer["tools"]), (&Value::Null, &json!([])));
}

fn head() -> AnswerHead {
    AnswerHead { id: "7".to_owned(), created: 1_700_000_000, model: "m".to_owned(), version: "v".to_owned() }
}

fn usage() -> Usage {
    Usage { prompt_tokens: 5, cached_tokens: 2, completion_tokens: 4, reasoning_tokens: 3 }
}

/// A part of an answer: what is thought, said or called.
#[derive(Clone, Debug)]
enum Piece {
    Thought(String),
    Said(String),
    /// With its arguments; `true`: no more of it comes.
    Called(String, bool),
}

/// The events of an answer of these parts, a letter at a time.
fn events_of(parts: &[Piece], reason: FinishReason, stop: Option<StopCause>) -> Vec<GenerationEvent> {
    let mut events = vec![GenerationEvent::Started { prompt_tokens: 5, files_left_out: 0 }];
    let pieces = |text: &str| text.chars().map(String::from).collect::<Vec<_>>();
    let mut index = 0;
    for part in parts {
        match part {
            Piece::Thought(text) => {
                events.extend(pieces(text).into_iter().map(|text| GenerationEvent::Reasoning { text, tokens: 1 }));
            }
            Piece::Said(text) => {
                let said = |text| GenerationEvent::Text { text, tokens: 1, logprobs: vec![] };
                events.extend(pieces(text).into_iter().map(said));
            }
            Piece::Called(arguments, has_ended) => {
                let begun = ToolCallDelta::Begun { id: format!("call_{index}"), name: "f".to_owned() };
                let more = pieces(arguments).into_iter().map(ToolCallDelta::Arguments);
                let deltas = std::iter::once(begun).chain(more).chain(has_ended.then_some(ToolCallDelta::Ended));
                events.extend(deltas.map(|delta| GenerationEvent::ToolCall { index, delta, tokens: 1 }));
                index += 1;
            }
        }
    }
    events.push(GenerationEvent::Finished { reason, stop, usage: usage(), timings: Timings::default() });
    events
}

fn streamed(events: &[GenerationEvent]) -> Vec<Value> {
    let (_, encoder) = decode(&json!({"input": "Hi", "stream": true, "metadata": {"a": "b"}})).unwrap();
    let (mut stream, mut out) = (encoder.stream(head(), 1).unwrap(), BytesMut::new());
    stream.open(&mut out).unwrap();
    events.iter().for_each(|event| stream.event(0, event, &mut out).unwrap());
    stream.close(usage(), &mut out).unwrap();
    told(&out)
}

fn told(out: &BytesMut) -> Vec<Value> {
    let event = |text: &str| {
        let (kind, data) = text.strip_prefix("event: ").unwrap().split_once("\ndata: ").unwrap();
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], kind);
        data
    };
    std::str::from_utf8(out).unwrap().split_terminator("\n\n").map(event).collect()
}

/// The same answer, whole.
fn whole(events: &[GenerationEvent]) -> Value {
    let (_, encoder) = decode(&json!({"input": "Hi", "metadata": {"a": "b"}})).unwrap();
    let mut output = AnswerOutput::default();
    events.iter().cloned().for_each(|event| output.push(event));
    let Some(GenerationEvent::Finished { reason, stop, .. }) = events.last().cloned() else { panic!("{events:?}") };
    let answer = Answer { output, reason, stop, usage: usage(), timings: Timings::default() };
    serde_json::from_slice(&encoder.whole(head(), vec![answer], usage()).unwrap()).unwrap()
}

/// What events of items and their pieces add up to.
fn gathered(events: &[Value]) -> Vec<Value> {
    let mut items: Vec<Value> = Vec::new();
    for event in events {
        let item =
            |items: &mut Vec<Value>| items[usize::try_from(event["output_index"].as_u64().unwrap()).unwrap()].clone();
        match event["type"].as_str().unwrap() {
            "response.output_item.added" => {
                assert_eq!(event["output_index"], items.len());
                items.push(event["item"].clone());
            }
            "response.content_part.added" => {
                let last = items.last_mut().unwrap();
                assert_eq!((&event["item_id"], &event["content_index"]), (&last["id"], &json!(0)));
                last["content"] = json!([event["part"]]);
            }
            "response.output_text.delta" | "response.reasoning_text.delta" => {
                let text = &mut items.last_mut().unwrap()["content"][0]["text"];
                *text = json!(format!("{}{}", text.as_str().unwrap(), event["delta"].as_str().unwrap()));
            }
            "response.function_call_arguments.delta" => {
                let text = &mut items.last_mut().unwrap()["arguments"];
                *text = json!(format!("{}{}", text.as_str().unwrap(), event["delta"].as_str().unwrap()));
            }
            "response.output_text.done" | "response.reasoning_text.done" => {
                assert_eq!(item(&mut items)["content"][0]["text"], event["text"]);
            }
            "response.content_part.done" => assert_eq!(item(&mut items)["content"][0], event["part"]),
            "response.function_call_arguments.done" => assert_eq!(item(&mut items)["arguments"], event["arguments"]),
            "response.output_item.done" => {
                let last = items.last_mut().unwrap();
                last["status"] = event["item"]["status"].clone();
                assert_eq!(*last, event["item"]);
            }
            _ => {}
        }
    }
    items
}

/// Bodies with everything in them that is taken where nothing is stored.
fn valid() -> Vec<Value> {
    vec![
        json!({
            "model": "m", "input": "Hi", "instructions": "Be brief.", "max_output_tokens": 16, "temperature": 0.5,
            "top_p": 0.9, "stream": true, "metadata": {"a": "b"}, "include": ["reasoning.encrypted_content"],
            "truncation": "disabled", "service_tier": "auto", "top_logprobs": 0, "store": false, "background": false,
            "text": {"format": {"type": "json_schema", "name": "f", "schema": {"type": "object"}, "strict": true}},
            "reasoning": {"effort": "low", "summary": null}, "stream_options": {"include_obfuscation": false},
        }),
        json!({
            "input": [
                {"role": "user", "content": "Look."},
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "So."}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Well."}]},
                {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
                    {"type": "output_text", "text": "I do.", "annotations": []}, {"type": "refusal", "refusal": "No."},
                ]},
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "There."}]},
                {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "+ a"},
                {"type": "custom_tool_call_output", "call_id": "d", "output": "Done."},
            ],
            "tools": [{"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
            "parallel_tool_calls": true, "text": {"format": {"type": "text"}, "verbosity": "medium"},
        }),
    ]
}

#[test]
fn what_is_changed_for_the_property_is_right_before() {
    for body in valid() {
        let request = decode_responses(body.to_string().as_bytes(), false).unwrap();
        request.resolve(ResponseId::new(1), StoredResponses::new()).unwrap();
    }
}

#[test]
fn ranges_are_told_as_they_are() {
    for (name, value, range) in [
        ("max_output_tokens", json!(1_u64 << 32), "from 1 to 1048576"),
        ("max_output_tokens", json!(0), "from 1 to 1048576"),
        ("top_p", json!(0), "above 0 and at most 1, not 0"),
        ("temperature", json!(3), "from 0 to 2, not 3"),
    ] {
        let error = decode(&json!({"input": "Hi", name: value})).map(drop).unwrap_err();
        assert!(error.param.as_deref() == Some(name) && error.message.contains(range), "{error}");
    }
}

#[test]
fn what_is_an_object_may_be_no_array() {
    for (path, body) in valid().iter().flat_map(|body| mutate::with_arrays(body, &[])) {
        let error = decode(&body).map(drop).expect_err(&body.to_string());
        // Of which kind a choice is, is not told more closely.
        let path = if path.starts_with("tool_choice") { "tool_choice" } else { &path };
        mutate::is_told_of_object(&error, path);
    }
    // By the order of the fields.
    for (body, param) in [
        (json!({"input": [["message", "user", "Hi", 1, 1, 1]]}), "input[0]"),
        (json!({"input": [{"role": "user", "content": [["input_text", "Hi", 1]]}]}), "input[0].content[0]"),
        (json!({"input": "Hi", "tools": [["function", "look", null, {}, null, null]]}), "tools[0]"),
        (json!({"input": "Hi", "text": [null, null]}), "text"),
        (json!({"input": "Hi", "text": {"format": ["text"]}}), "text.format"),
        (json!({"input": "Hi", "reasoning": ["low", 1, 2, 3]}), "reasoning"),
        (json!({"input": "Hi", "stream_options": [5]}), "stream_options"),
    ] {
        mutate::is_told_of_object(&decode(&body).map(drop).unwrap_err(), param);
    }
}

proptest! {
    #[test]
    fn pieces_add_up_to_the_whole_answer(
        mut parts in prop::collection::vec(
            prop_oneof![
                ".{0,6}".prop_map(Piece::Thought),
                "(?s).{0,6}".prop_map(Piece::Said),
                "[a-z{}\"]{0,6}".prop_map(|arguments| Piece::Called(arguments, true)),
            ],
            0..7,
        ),
        is_half in any::<bool>(), is_cut in any::<bool>(), is_stopped in any::<bool>(),
    ) {
        // Behind half a call no other one comes.
        let last = parts.iter_mut().rev().find_map(|part| match part {
            Piece::Called(_, has_ended) => Some(has_ended),
            _ => None,
        });
        if let Some(has_ended) = last {
            *has_ended = !is_half;
        }
        let reason = if is_cut { FinishReason::Length } else { FinishReason::Stop };
        let stop = (is_stopped && !is_cut).then(|| StopCause::Text("END".to_owned()));
        let answer = events_of(&parts, reason, stop);
        let events = streamed(&answer);
        let numbers: Vec<u64> = events.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
        prop_assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
        let first: Vec<&str> = events.iter().take(2).map(|event| event["type"].as_str().unwrap()).collect();
        prop_assert_eq!(first, ["response.created", "response.in_progress"]);
        let last = events.last().unwrap();
        let whole = whole(&answer);
        prop_assert_eq!(&last["response"], &whole);
        prop_assert_eq!(last["type"].as_str().unwrap(), if is_cut { "response.incomplete" } else { "response.completed" });
        prop_assert_eq!(json!(gathered(&events)), whole["output"].clone());
        prop_assert_eq!(&whole["incomplete_details"], &if is_cut { json!({"reason": "max_output_tokens"}) } else { Value::Null });
    }

    #[test]
    fn what_is_near_to_right_is_taken_or_refused_by_name(body in mutate::near(valid())) {
        let known = ["input", "previous_response_id"];
        for can_store in [true, false] {
            let resolved = decode_responses(body.to_string().as_bytes(), can_store)
                .and_then(|request| request.resolve(ResponseId::new(1), StoredResponses::new()));
            resolved.err().iter().for_each(|error| mutate::is_told(error, &body, &known));
        }
    }

    #[test]
    fn no_body_is_answered_but_by_what_is_asked_or_an_error(body in prop::collection::vec(any::<u8>(), 0..64)) {
        if let Err(error) = decode_responses(&body, true) {
            prop_assert_eq!(error.status, 400);
        }
    }
}

#[test]
fn items_come_in_the_order_in_which_the_model_wrote_them() {
    let said = |text: &str| Piece::Said(text.to_owned());
    let called = |arguments: &str, has_ended| Piece::Called(arguments.to_owned(), has_ended);
    let items = |parts: &[Piece], reason, stop| {
        let whole = whole(&events_of(parts, reason, stop));
        let item = |item: &Value| {
            let word = |name: &str| item[name].as_str().unwrap().to_owned();
            (word("type"), word("status"))
        };
        whole["output"].as_array().unwrap().iter().map(item).collect::<Vec<_>>()
    };
    let all = |told: &[(&str, &str)]| -> Vec<(String, String)> {
        told.iter().map(|(kind, status)| ((*kind).to_owned(), (*status).to_owned())).collect()
    };
    let (stop, length) = (FinishReason::Stop, FinishReason::Length);
    let (message, call, thought) = ("message", "function_call", "reasoning");
    let parts =
        [said("I look."), called("{}", true), Piece::Thought("Hm.".to_owned()), said("Wait."), called("{}", true)];
    let kinds = [message, call, thought, message, call].map(|kind| (kind, "completed"));
    assert_eq!(items(&parts, stop, None), all(&kinds));
    // A call that has ended is whole, whatever ends the answer; half a call is one where the model did not end it.
    assert_eq!(items(&[called("{}", true)], length, None), all(&[(call, "completed")]));
    assert_eq!(items(&[called("{", false)], length, None), all(&[(call, "incomplete")]));
    let stopped = Some(StopCause::Text("END".to_owned()));
    assert_eq!(items(&[called("{", false)], stop, stopped), all(&[(call, "incomplete")]));
    assert_eq!(items(&[called("{}", false)], stop, None), all(&[(call, "completed")]));
    assert_eq!(
        items(&[called("{", false), said("No.")], length, None),
        all(&[(call, "incomplete"), (message, "incomplete")])
    );
}

#[test]
fn a_failure_is_told_with_what_has_come() {
    let (_, encoder) = decode(&json!({"input": "Hi", "stream": true})).unwrap();
    let (mut stream, mut out) = (encoder.stream(head(), 1).unwrap(), BytesMut::new());
    stream.open(&mut out).unwrap();
    stream.event(0, &GenerationEvent::Text { text: "a".to_owned(), tokens: 1, logprobs: vec![] }, &mut out).unwrap();
    let error = ApiError::new(503, ErrorKind::ServiceUnavailableError, gantry_core::ErrorCode::WorkerDied, "It died.");
    stream.fail(&error, &mut out);
    let events = told(&out);
    let last = events.last().unwrap();
    assert_eq!((last["type"].as_str(), last["response"]["status"].as_str()), (Some("response.failed"), Some("failed")));
    assert_eq!(last["response"]["error"], json!({"code": "server_error", "message": "It died."}));
}

const STORED: ResponseId = ResponseId::new(0xabc);

/// One that is kept, with what it answers and what it says.
fn stored(status: &str) -> StoredResponses {
    let output = json!([
        {"id": "msg_00000000000000000000000000000abc_0", "type": "message", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "Hi.", "annotations": [], "logprobs": []}]},
        {"id": "fc_00000000000000000000000000000abc_1", "type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
    ]);
    let input = vec![json!({"id": "msg_1", "type": "message", "role": "user", "content": "Hello!"})];
    let response = StoredResponse { input, response: json!({"status": status, "output": output}) };
    StoredResponses::from([(STORED, response)])
}

fn resolve(body: &Value, stored: &StoredResponses) -> Result<ResolvedRequest, ApiError> {
    decode_responses(body.to_string().as_bytes(), true)?.resolve(ID, stored.clone())
}

#[test]
fn a_request_goes_on_from_a_response_that_is_kept() {
    let body = json!({
        "previous_response_id": STORED.to_string(), "instructions": "Be brief.",
        "input": [
            {"type": "function_call_output", "call_id": "c", "output": "there"}, {"role": "user", "content": "And?"},
            {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "+ a"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": "done"},
        ],
    });
    let request = decode_responses(body.to_string().as_bytes(), true).unwrap();
    assert_eq!(request.refers_to().iter().copied().collect::<Vec<_>>(), [STORED]);
    assert!(request.is_stored() && !request.is_background());
    let resolved = request.resolve(ID, stored("completed")).unwrap();
    let [Prompt::Chat(chat)] = resolved.request.prompts.as_slice() else { panic!("{resolved:?}") };
    let said: Vec<_> = chat.messages.iter().map(|message| (message.role, message.said().into_owned())).collect();
    let wanted = [
        (Role::System, "Be brief."),
        (Role::User, "Hello!"),
        (Role::Assistant, "Hi."),
        (Role::Tool, "there"),
        (Role::User, "And?"),
        (Role::Assistant, ""),
        (Role::Tool, "done"),
    ];
    assert_eq!(said, wanted.map(|(role, text)| (role, text.to_owned())));
    // What is kept of it is all that the next one needs, and each item has a name.
    let input: Vec<Value> = serde_json::from_slice(&resolved.input.unwrap()).unwrap();
    let ids: Vec<&str> = input.iter().map(|item| item["id"].as_str().unwrap()).collect();
    let digits = ID.digits();
    let own = ["fco", "msg", "ctc", "ctco"].iter().enumerate().map(|(i, kind)| format!("{kind}_{digits}_i{i}"));
    let own: Vec<String> = own.collect();
    let old = ["msg_1", "msg_00000000000000000000000000000abc_0", "fc_00000000000000000000000000000abc_1"];
    assert_eq!(ids, old.into_iter().chain(own.iter().map(String::as_str)).collect::<Vec<_>>());
    assert_eq!(input[4]["content"], json!([{"type": "input_text", "text": "And?"}]));
    assert_eq!((&input[4]["type"], &input[4]["status"]), (&json!("message"), &json!("completed")));
}

#[test]
fn what_is_not_kept_cannot_be_referred_to() {
    let (none, completed) = (StoredResponses::new(), stored("completed"));
    let chained = json!({"input": "And?", "previous_response_id": STORED.to_string()});
    let named = |id: &str| json!({"input": [{"type": "item_reference", "id": id}]});
    for (body, stored, param, says) in [
        (&chained, &none, "previous_response_id", "not found"),
        (&chained, &stored("in_progress"), "previous_response_id", "in_progress"),
        (&chained, &stored("failed"), "previous_response_id", "failed"),
        (&named("msg_00000000000000000000000000000abc_7"), &completed, "input[0].id", "stored response"),
        (&named("msg_7"), &completed, "input[0].id", "stored response"),
        (&json!({"input": "Hi", "previous_response_id": "resp_x"}), &none, "previous_response_id", "resp_"),
        (&json!({"input": "Hi", "background": true, "store": false}), &none, "background", "store"),
        (&json!({"input": "Hi", "background": true, "stream": true}), &none, "stream", "GET /v1/responses"),
        (&json!({"input": "x".repeat(MAX_STORED_INPUT_BYTES)}), &none, "input", "`store` be false"),
    ] {
        let error = resolve(body, stored).unwrap_err();
        assert!(error.param.as_deref() == Some(param) && error.message.contains(says), "{error:?}");
    }
    let many: Vec<Value> = (0..=MAX_RESPONSES_REFERRED as u128)
        .map(|i| json!({"type": "item_reference", "id": format!("msg_{}_0", ResponseId::new(i).digits())}))
        .collect();
    let error = resolve(&json!({"input": many}), &none).unwrap_err();
    assert!(error.message.contains("32 are the most"), "{error:?}");
    // By its id alone, as some clients name it.
    let resolved = resolve(&json!({"input": [{"id": "msg_00000000000000000000000000000abc_0"}]}), &completed).unwrap();
    let [Prompt::Chat(chat)] = resolved.request.prompts.as_slice() else { panic!("{resolved:?}") };
    assert_eq!((chat.messages.len(), &*chat.messages[0].said()), (1, "Hi."));
}

#[test]
fn a_response_in_the_background_waits_goes_on_and_ends() {
    let stream = || {
        let resolved = resolve(&json!({"input": "Hi", "background": true}), &StoredResponses::new()).unwrap();
        resolved.encoder.stream(head(), 1).unwrap()
    };
    let told = |stream: &ResponseStream| -> Value { serde_json::from_slice(&stream.response().unwrap()).unwrap() };
    let progress = |stream: &ResponseStream| Progress::read(&stream.response().unwrap()).unwrap();
    let (mut ends, mut cancelled, mut out) = (stream(), stream(), BytesMut::new());
    assert_eq!(progress(&ends), Progress { status: Status::Queued, background: true });
    let events = events_of(&[Piece::Said("ab".to_owned())], FinishReason::Stop, None);
    for event in &events[..2] {
        ends.event(0, event, &mut out).unwrap();
        cancelled.event(0, event, &mut out).unwrap();
        assert_eq!(progress(&ends).status, Status::InProgress);
    }
    events[2..].iter().for_each(|event| ends.event(0, event, &mut out).unwrap());
    ends.close(usage(), &mut out).unwrap();
    assert_eq!((progress(&ends).status, &told(&ends)["usage"]["output_tokens"]), (Status::Completed, &json!(4)));
    cancelled.cancel(&mut out).unwrap();
    let response = told(&cancelled);
    assert_eq!((&response["status"], &response["output"][0]["status"]), (&json!("cancelled"), &json!("incomplete")));
    assert_eq!(response["output"][0]["content"][0]["text"], "a");
    let failed: Value = serde_json::from_slice(&abandoned(&stream().response().unwrap()).unwrap()).unwrap();
    assert_eq!((&failed["status"], &failed["error"]["code"]), (&json!("failed"), &json!("server_error")));
}

proptest! {
    #[test]
    fn names_are_read_as_they_are_written_and_nothing_else_is_one(number in any::<u128>(), text in "(resp_)?[0-9a-fA-F+/._]{0,33}") {
        let id = ResponseId::new(number);
        prop_assert_eq!(ResponseId::parse(&id.to_string()), Some(id));
        if let Some(id) = ResponseId::parse(&text) {
            prop_assert_eq!(id.to_string(), text);
        }
    }

    #[test]
    fn pages_come_to_all_items_in_order(count in 0_usize..40, limit in 1_usize..12, ascending in any::<bool>()) {
        let all: Vec<Value> = (0..count).map(|i| json!({"id": format!("msg_{i}")})).collect();
        let (limit, order) = (limit.to_string(), if ascending { "asc" } else { "desc" });
        let (mut seen, mut after) = (Vec::new(), None::<String>);
        loop {
            let last = after.as_deref().map(|after| ("after", after));
            let query = [("limit", limit.as_str()), ("order", order)].into_iter().chain(last);
            let mut page = page(all.clone(), query).unwrap();
            let items = page["data"].as_array_mut().unwrap();
            prop_assert!(items.len().to_string().len() <= limit.len() && (!items.is_empty() || count == 0));
            seen.append(items);
            if page["has_more"] == false {
                break;
            }
            after = page["last_id"].as_str().map(str::to_owned);
        }
        if !ascending {
            seen.reverse();
        }
        prop_assert_eq!(seen, all);
    }

    /// Whatever is taken once is taken again where it is part of what came before.
    #[test]
    fn what_is_kept_can_be_gone_on_from(texts in prop::collection::vec(("user|assistant|system|developer", ".{0,4}"), 1..6)) {
        let items: Vec<Value> = texts.iter().map(|(role, text)| json!({"role": role, "content": text})).collect();
        let first = resolve(&json!({"input": items}), &StoredResponses::new()).unwrap();
        let input: Vec<Value> = serde_json::from_slice(&first.input.unwrap()).unwrap();
        let response = json!({"status": "completed", "output": []});
        let kept = StoredResponses::from([(STORED, StoredResponse { input, response })]);
        let next = resolve(&json!({"input": "And?", "previous_response_id": STORED.to_string()}), &kept).unwrap();
        let [Prompt::Chat(before)] = first.request.prompts.as_slice() else { unreachable!() };
        let [Prompt::Chat(after)] = next.request.prompts.as_slice() else { unreachable!() };
        prop_assert_eq!(&after.messages[..before.messages.len()], &before.messages[..]);
    }
}

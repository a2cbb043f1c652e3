//! Bodies that are taken and refused, and answers whole and piece by piece.
#![allow(clippy::unwrap_used)]

use bytes::BytesMut;
use gantry_core::{
    Answer, AnswerHead, AnswerOutput, ApiError, ErrorCode, ErrorKind, FinishReason, GenerationEvent, MAX_TEMPERATURE,
    Priority, Prompt, Role, StopCause, StreamEncoder, TextEncoder, TextRequest, Timings, TokenChance, TokenLogprob,
    Usage,
};
use gantry_generate::{
    ChatEncoder, DEFAULT_GENERATE_TOKENS, GenerateEncoder, MAX_GENERATE_MESSAGES, MAX_GENERATE_TOKENS, decode_chat,
    decode_generate, error_body, status_of,
};
use proptest::prelude::*;
use serde_json::{Value, json};

#[path = "../../core/tests/common/mutate.rs"]
mod mutate;

fn generate(body: &Value) -> Result<TextRequest, ApiError> {
    decode_generate(body.to_string().as_bytes()).map(|(request, _)| request)
}

fn chat(body: &Value) -> Result<TextRequest, ApiError> {
    decode_chat(body.to_string().as_bytes()).map(|(request, _)| request)
}

const ID: &str = "0192f0c1a8f24f6c8d1e2b3a4c5d6e7f";

fn head() -> AnswerHead {
    AnswerHead { id: ID.to_owned(), created: 1, model: "m".to_owned(), version: "v".to_owned() }
}

fn stop_of(reason: FinishReason, stop: bool) -> Option<StopCause> {
    (stop && reason == FinishReason::Stop).then(|| StopCause::Text("END".to_owned()))
}

fn answer(text: &str, reason: FinishReason, stop: Option<StopCause>, usage: Usage) -> Answer {
    let output = AnswerOutput { text: text.to_owned(), ..AnswerOutput::default() };
    Answer { output, reason, stop, usage, timings: Timings::default() }
}

fn finished(reason: FinishReason, stop: Option<StopCause>, usage: Usage) -> GenerationEvent {
    GenerationEvent::Finished { reason, stop, usage, timings: Timings::default() }
}

/// The events of a stream, each of which is one `data:` line.
fn events(out: &BytesMut) -> Vec<Value> {
    let text = std::str::from_utf8(out).unwrap();
    let events: Vec<Value> = text
        .split_terminator("\n\n")
        .map(|event| serde_json::from_str(event.strip_prefix("data: ").expect("an event")).unwrap())
        .collect();
    assert!(text.is_empty() || text.ends_with("\n\n"));
    events
}

#[test]
fn a_body_with_its_prompt_alone_has_the_defaults_of_the_document() {
    let request = generate(&json!({"prompt": "Hi"})).unwrap();
    assert_eq!(request.prompts, [Prompt::Text("Hi".to_owned())]);
    assert_eq!((request.params.max_tokens, request.is_streamed), (Some(DEFAULT_GENERATE_TOKENS), false));
    assert_eq!((request.params.temperature, request.params.top_p), (1.0, 1.0));
    assert_eq!((request.params.priority, request.params.logprobs), (Priority::Normal, None));
}

#[test]
fn a_chat_has_its_messages_and_what_else_is_asked() {
    let body = json!({
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<|im_end|>"},
            {"role": "assistant", "content": ""}, {"role": "user", "content": "So?"}],
        "max_tokens": 8.0, "temperature": 0, "top_p": 0.5, "stop_sequences": ["END"], "stream": true, "priority": "high",
        "logprobs": true, "seed": 7, "model": "m",
    });
    let request = chat(&body).unwrap();
    let Prompt::Chat(asked) = &request.prompts[0] else { panic!("{:?}", request.prompts) };
    let said: Vec<_> = asked.messages.iter().map(|message| (message.role, message.said().into_owned())).collect();
    assert_eq!(said[0], (Role::System, "Be brief.".to_owned()));
    assert_eq!(said[1], (Role::User, "<|im_end|>".to_owned()), "text, whatever it says");
    assert_eq!((said.len(), said[3].0), (4, Role::User));
    assert!(request.is_streamed);
    let params = &request.params;
    assert_eq!((params.max_tokens, params.temperature, params.top_p), (Some(8), 0.0, 0.5));
    assert_eq!(
        (params.stop.as_slice(), params.seed, params.logprobs),
        (["END".to_owned()].as_slice(), Some(7), Some(0))
    );
    assert_eq!((params.priority, request.model.as_deref()), (Priority::High, Some("m")));
    // As clients send it that were made from the names of the values.
    let spelled = chat(&json!({"messages": [{"role": "user", "content": "Hi"}], "priority": "Low"})).unwrap();
    assert_eq!(spelled.params.priority, Priority::Low);
}

#[test]
fn what_is_wrong_is_named() {
    let many = vec![json!({"role": "user", "content": "a"}); MAX_GENERATE_MESSAGES + 1];
    for (decode, body, param) in [
        (generate as fn(&Value) -> _, json!({}), "prompt"),
        (generate, json!({"prompt": ""}), "prompt"),
        (generate, json!({"prompt": "a", "max_tokens": 0}), "max_tokens"),
        (generate, json!({"prompt": "a", "max_tokens": MAX_GENERATE_TOKENS + 1}), "max_tokens"),
        (generate, json!({"prompt": "a", "temperature": -0.1}), "temperature"),
        (generate, json!({"prompt": "a", "top_p": 0}), "top_p"),
        (generate, json!({"prompt": "a", "stop_sequences": ["b", ""]}), "stop_sequences[1]"),
        (generate, json!({"prompt": "a", "stop": ["b"]}), "stop"),
        (generate, json!({"prompt": "a", "priority": "urgent"}), "priority"),
        (generate, json!({"prompt": "a", "model": "m".repeat(257)}), "model"),
        (generate, json!({"prompt": "a", "messages": []}), "messages"),
        (chat, json!({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}), "prompt"),
        (chat, json!({}), "messages"),
        (chat, json!({"messages": []}), "messages"),
        (chat, json!({"messages": many}), "messages"),
        (chat, json!({"messages": [{"role": "tool", "content": "a"}]}), "messages[0].role"),
        (chat, json!({"messages": [{"role": "user"}]}), "messages[0].content"),
    ] {
        let error = decode(&body).unwrap_err();
        assert_eq!((error.status, error.param.as_deref()), (400, Some(param)), "{error}");
    }
}

#[test]
fn errors_have_the_statuses_and_types_of_the_document() {
    let told = |status: u16, kind, code: ErrorCode| {
        let error = ApiError::new(status, kind, code, "It is so.");
        (status_of(&error), error_body(&error)["error"]["type"].as_str().unwrap().to_owned())
    };
    let wanted = |status: u16, kind: &str| (status, kind.to_owned());
    assert_eq!(told(429, ErrorKind::RateLimitError, ErrorCode::QueueFull), wanted(503, "rate_limit_error"));
    assert_eq!(told(408, ErrorKind::InvalidRequestError, ErrorCode::RequestTimeout), wanted(408, "timeout_error"));
    assert_eq!(told(400, ErrorKind::InvalidRequestError, ErrorCode::InvalidJson), wanted(400, "invalid_request_error"));
    assert_eq!(told(500, ErrorKind::ServerError, ErrorCode::InternalError), wanted(500, "server_error"));
}

/// A body with all that it may have.
fn full() -> Value {
    json!({"prompt": "Hi", "max_tokens": 8, "temperature": 0.5, "top_p": 0.5, "stop_sequences": ["END"], "stream": true,
        "priority": "high", "logprobs": true, "seed": 7, "model": "m"})
}

/// The same of a chat.
fn full_chat() -> Value {
    let mut body = full();
    let fields = body.as_object_mut().unwrap();
    fields.remove("prompt");
    fields.insert(
        "messages".to_owned(),
        json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]),
    );
    body
}

#[test]
fn what_is_an_object_may_be_no_array() {
    for (path, body) in mutate::with_arrays(&full_chat(), &[]) {
        mutate::is_told_of_object(&chat(&body).unwrap_err(), &path);
    }
    mutate::is_told_of_object(&chat(&json!({"messages": [["user", "Hi"]]})).unwrap_err(), "messages[0]");
}

fn priority() -> impl Strategy<Value = Value> {
    prop::sample::select(vec![json!("high"), json!("normal"), json!("low"), Value::Null])
}

prop_compose! {
    fn valid()(
        prompt in ".{1,80}",
        max_tokens in 1..=MAX_GENERATE_TOKENS,
        temperature in 0.0..=MAX_TEMPERATURE,
        top_p in 0.001_f32..=1.0,
        stop in prop::collection::vec(".{1,20}", 0..4),
        (stream, logprobs) in any::<(bool, bool)>(),
        priority in priority(),
    ) -> Value {
        json!({"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p,
            "stop_sequences": stop, "stream": stream, "logprobs": logprobs, "priority": priority})
    }
}

fn valid_chat() -> impl Strategy<Value = Value> {
    let message = (prop::sample::select(vec!["system", "user", "assistant"]), ".{0,40}")
        .prop_map(|(role, content)| json!({"role": role, "content": content}));
    (valid(), prop::collection::vec(message, 1..5)).prop_map(|(mut body, messages)| {
        let fields = body.as_object_mut().unwrap();
        fields.remove("prompt");
        fields.insert("messages".to_owned(), messages.into());
        body
    })
}

/// A change after which no body is right.
fn invalid() -> impl Strategy<Value = Value> {
    let wrong = prop_oneof![
        Just(("prompt", json!(""))),
        Just(("prompt", Value::Null)),
        any::<i64>().prop_map(|number| ("prompt", json!(number))),
        Just(("max_tokens", json!(0))),
        (MAX_GENERATE_TOKENS + 1..).prop_map(|number| ("max_tokens", json!(number))),
        (-100.0..-0.001_f64).prop_map(|number| ("temperature", json!(number))),
        (5.001..1e9_f64).prop_map(|number| ("temperature", json!(number))),
        (1.001..1e9_f64).prop_map(|number| ("top_p", json!(number))),
        (-1e9..=0.0_f64).prop_map(|number| ("top_p", json!(number))),
        Just(("stop_sequences", json!([""]))),
        Just(("stop_sequences", json!("END"))),
        Just(("stream", json!("yes"))),
        "[a-z]{1,12}_".prop_map(|name| (Box::leak(name.into_boxed_str()) as &str, json!(1))),
    ];
    (valid(), wrong).prop_map(|(mut body, (name, value))| {
        body[name] = value;
        body
    })
}

fn piece() -> impl Strategy<Value = (String, Vec<f32>)> {
    ("\\PC{0,6}", prop::collection::vec(-20.0..=0.0_f32, 0..3))
}

fn told_text(text: &str, logprobs: &[f32]) -> GenerationEvent {
    let one = |logprob: &f32| TokenLogprob {
        token: TokenChance { id: 1, bytes: text.as_bytes().to_vec(), logprob: *logprob },
        top: Vec::new(),
    };
    let tokens = u32::try_from(logprobs.len()).unwrap().max(1);
    GenerationEvent::Text { text: text.to_owned(), tokens, logprobs: logprobs.iter().map(one).collect() }
}

fn reason() -> impl Strategy<Value = FinishReason> {
    prop::sample::select(vec![FinishReason::Stop, FinishReason::Length])
}

fn usage() -> impl Strategy<Value = Usage> {
    (0..9999_u32, 0..9999_u32).prop_map(|(prompt_tokens, completion_tokens)| Usage {
        prompt_tokens,
        completion_tokens,
        ..Usage::default()
    })
}

proptest! {
    /// **Feature: distributed-inference-server, Property 1: Valid Request Acceptance**
    /// **Validates: Requirements 1.1**
    #[test]
    fn every_valid_request_is_taken_and_answered_by_an_id_that_is_a_uuid(
        body in valid(), chatted in valid_chat(), id in any::<u128>(), usage in usage(),
    ) {
        let (request, encoder) = decode_generate(body.to_string().as_bytes()).unwrap();
        prop_assert_eq!(&request.prompts, &[Prompt::Text(body["prompt"].as_str().unwrap().to_owned())]);
        prop_assert_eq!(request.params.max_tokens.map(u64::from), body["max_tokens"].as_u64());
        prop_assert!(request.params.validate().is_ok());
        let (request, chat_encoder) = decode_chat(chatted.to_string().as_bytes()).unwrap();
        prop_assert_eq!(request.is_streamed, chatted["stream"].as_bool().unwrap());
        let head = AnswerHead { id: format!("{id:032x}"), ..head() };
        let answers = || vec![answer("a", FinishReason::Stop, None, usage)];
        for whole in [encoder.whole(head.clone(), answers(), usage), chat_encoder.whole(head, answers(), usage)] {
            let whole: Value = serde_json::from_slice(&whole.unwrap()).unwrap();
            let told = whole["id"].as_str().unwrap();
            prop_assert_eq!(told.len(), 36);
            prop_assert_eq!(uuid::Uuid::try_parse(told).unwrap().as_u128(), id);
        }
    }

    /// **Feature: distributed-inference-server, Property 2: Invalid Request Rejection**
    /// **Validates: Requirements 1.4**
    #[test]
    fn every_invalid_request_is_refused_with_what_is_wrong(body in invalid(), bytes in prop::collection::vec(any::<u8>(), 0..99)) {
        let no_json = serde_json::from_slice::<Value>(&bytes).is_err().then(|| decode_generate(&bytes).unwrap_err());
        for error in no_json.into_iter().chain([generate(&body).unwrap_err()]) {
            prop_assert_eq!(status_of(&error), 400);
            let told = error_body(&error)["error"].clone();
            prop_assert_eq!(&told["type"], "invalid_request_error");
            prop_assert!(told["message"].as_str().is_some_and(|text| !text.is_empty()), "{}", told);
            prop_assert!(told["code"].as_str().is_some_and(|text| !text.is_empty()), "{}", told);
        }
    }

    #[test]
    fn what_is_near_to_right_is_taken_or_refused_by_name(
        body in mutate::near(vec![full()]), chatted in mutate::near(vec![full_chat()]),
    ) {
        let known: &[&str] = &["prompt", "messages"];
        generate(&body).err().iter().for_each(|error| mutate::is_told(error, &body, known));
        chat(&chatted).err().iter().for_each(|error| mutate::is_told(error, &chatted, known));
    }

    /// **Feature: distributed-inference-server, Property 13: SSE Token Event Format**
    /// **Validates: Requirements 5.2**
    ///
    /// **Feature: distributed-inference-server, Property 14: Stream Completion Event**
    /// **Validates: Requirements 5.3**
    #[test]
    fn a_stream_tells_each_piece_in_its_order_and_ends_with_why(
        pieces in prop::collection::vec(piece(), 0..12), reason in reason(), stop in any::<bool>(), usage in usage(),
    ) {
        let mut stream = GenerateEncoder::default().stream(head(), 1).unwrap();
        let mut out = BytesMut::new();
        stream.open(&mut out).unwrap();
        stream.event(0, &GenerationEvent::Started { prompt_tokens: 1, files_left_out: 0 }, &mut out).unwrap();
        for (text, logprobs) in &pieces {
            stream.event(0, &told_text(text, logprobs), &mut out).unwrap();
        }
        stream.event(0, &finished(reason, stop_of(reason, stop), usage), &mut out).unwrap();
        stream.close(usage, &mut out).unwrap();

        let mut told = events(&out);
        let done = told.pop().unwrap();
        let wanted: Vec<_> = pieces.iter().filter(|(text, logprobs)| !(text.is_empty() && logprobs.is_empty())).collect();
        prop_assert_eq!(told.len(), wanted.len());
        for (index, (event, (text, logprobs))) in told.iter().zip(wanted).enumerate() {
            prop_assert_eq!((&event["type"], &event["token"]), (&json!("token"), &json!(text)));
            prop_assert_eq!(&event["index"], &json!(index));
            prop_assert_eq!(event.get("logprob").is_some(), !logprobs.is_empty());
            let sum = f64::from(logprobs.iter().sum::<f32>());
            prop_assert!(event["logprob"].as_f64().is_none_or(|told| (told - sum).abs() < 1e-3), "{event} {sum}");
        }
        let why = match (reason, stop) {
            (FinishReason::Length, _) => "length",
            (_, true) => "stop_sequence",
            _ => "stop",
        };
        let (prompt_tokens, completion_tokens) = (usage.prompt_tokens, usage.completion_tokens);
        prop_assert_eq!(done, json!({"type": "done", "finish_reason": why, "usage": {"prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens, "total_tokens": prompt_tokens + completion_tokens}}));
    }

    /// **Feature: distributed-inference-server, Property 15: Streaming Error Event Format**
    /// **Validates: Requirements 5.5**
    #[test]
    fn a_stream_that_fails_ends_with_what_went_wrong(
        pieces in prop::collection::vec(piece(), 0..6), message in "\\PC{1,80}",
        code in prop::sample::select(vec![ErrorCode::WorkerDied, ErrorCode::ModelRetired, ErrorCode::SlowClient, ErrorCode::InternalError]),
    ) {
        let mut stream = ChatEncoder::default().stream(head(), 1).unwrap();
        let mut out = BytesMut::new();
        for (text, logprobs) in &pieces {
            stream.event(0, &told_text(text, logprobs), &mut out).unwrap();
        }
        stream.fail(&ApiError::new(500, ErrorKind::ServerError, code.clone(), message.clone()), &mut out);
        let mut told = events(&out);
        prop_assert_eq!(told.pop().unwrap(), json!({"type": "error", "message": message, "code": code.as_str()}));
        prop_assert!(told.iter().all(|event| event["type"] == "token"));
    }

    /// **Feature: distributed-inference-server, Property 23: API Response Format Consistency**
    /// **Validates: Requirements 11.1, 11.2, 11.3**
    ///
    /// **Feature: distributed-inference-server, Property 25: Response Serialization Round-Trip**
    /// **Validates: Requirements 11.5**
    #[test]
    fn a_whole_answer_has_all_fields_and_says_what_the_pieces_say(
        pieces in prop::collection::vec(piece(), 0..6), reason in reason(), stop in any::<bool>(), usage in usage(),
    ) {
        let text: String = pieces.iter().map(|(text, _)| text.as_str()).collect();
        let answers = || vec![answer(&text, reason, stop_of(reason, stop), usage)];
        let whole: Value = serde_json::from_slice(&GenerateEncoder::default().whole(head(), answers(), usage).unwrap()).unwrap();
        let chatted: Value = serde_json::from_slice(&ChatEncoder::default().whole(head(), answers(), usage).unwrap()).unwrap();
        prop_assert_eq!(&whole["choices"][0]["text"], &json!(text));
        prop_assert_eq!(&chatted["choices"][0]["message"], &json!({"role": "assistant", "content": text}));
        for answer in [&whole, &chatted] {
            prop_assert!(answer["id"].is_string() && answer["object"].is_string() && answer["created"].is_u64());
            prop_assert_eq!((&answer["model"], answer["choices"].as_array().unwrap().len()), (&json!("m"), 1));
            prop_assert_eq!(&answer["usage"]["total_tokens"], &json!(usage.prompt_tokens + usage.completion_tokens));
            prop_assert_eq!(&serde_json::from_str::<Value>(&answer.to_string()).unwrap(), answer);
        }
        let mut stream = GenerateEncoder::default().stream(head(), 1).unwrap();
        let mut out = BytesMut::new();
        for (text, logprobs) in &pieces {
            stream.event(0, &told_text(text, logprobs), &mut out).unwrap();
        }
        let streamed: String = events(&out).iter().filter_map(|event| event["token"].as_str()).collect();
        prop_assert_eq!(streamed, text);
    }
}

//! Calls of gRPC against the same requests as JSON: what one is read as the other is, and what comes of it is told alike.
#![allow(clippy::unwrap_used)]

use bytes::{Buf, Bytes, BytesMut};
use gantry_core::{
    Answer, AnswerHead, AnswerOutput, ApiError, FinishReason, GenerationEvent, PooledEncoder, PooledOutput, PooledSize,
    StopCause, StreamEncoder, TextEncoder, TextRequest, Timings, Usage,
};
use gantry_generate::grpc::proto::chat_message::Role;
use gantry_generate::grpc::proto::stream_event::Event;
use gantry_generate::grpc::proto::{
    ChatMessage, ChatRequest, ChatResponse, EmbeddingsRequest, EmbeddingsResponse, GenerateRequest, GenerateResponse,
    Priority, StreamEvent,
};
use gantry_generate::grpc::{self, CallEmbeddings, CallEnd, FILE_DESCRIPTORS, SERVICE};
use gantry_generate::{decode_chat, decode_generate};
use proptest::prelude::*;
use prost::Message;
use serde_json::{Value, json};

fn framed(message: &impl Message) -> Vec<u8> {
    let bytes = message.encode_to_vec();
    [&[0][..], &u32::try_from(bytes.len()).unwrap().to_be_bytes(), &bytes].concat()
}

/// The messages that come in frames, one after the other.
fn messages<M: Message + Default>(bytes: impl Into<Bytes>) -> Vec<M> {
    let (mut bytes, mut all) = (bytes.into(), Vec::new());
    while bytes.has_remaining() {
        assert_eq!(bytes.get_u8(), 0);
        let length = bytes.get_u32() as usize;
        all.push(M::decode(bytes.split_to(length)).unwrap());
    }
    all
}

fn head() -> AnswerHead {
    let id = "0192f0c1a8f24f6c8d1e2b3a4c5d6e7f".to_owned();
    AnswerHead { id, created: 1, model: "m".to_owned(), version: "v".to_owned() }
}

fn priority() -> impl Strategy<Value = (Priority, Option<&'static str>)> {
    prop::sample::select(vec![
        (Priority::Unspecified, None),
        (Priority::Low, Some("low")),
        (Priority::Normal, Some("normal")),
        (Priority::High, Some("high")),
    ])
}

/// What else both calls take, right or wrong: as a message, and as the body of the same meaning.
fn asked() -> impl Strategy<Value = (GenerateRequest, Value)> {
    let numbers = (
        prop::option::of(0_u32..1 << 21),
        prop::option::of(prop::sample::select(vec![-0.5_f32, 0.0, 0.5, 1.0, 6.0])),
        prop::option::of(prop::sample::select(vec![0.0_f32, 0.25, 1.0, 1.5])),
        prop::option::of(any::<u64>()),
    );
    let words = (prop::collection::vec("[a-z]{0,4}", 0..5), "[a-z]{0,3}", any::<bool>(), priority());
    (numbers, words).prop_map(|((max_tokens, temperature, top_p, seed), (stop, model, logprobs, (priority, word)))| {
        let body = json!({"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed,
            "stop_sequences": stop, "model": model, "logprobs": logprobs, "priority": word});
        let message = GenerateRequest {
            prompt: String::new(),
            max_tokens,
            temperature,
            top_p,
            stop_sequences: stop,
            priority: priority.into(),
            logprobs,
            seed,
            model,
        };
        (message, body)
    })
}

fn same(call: Result<TextRequest, ApiError>, body: Result<TextRequest, ApiError>) -> Result<(), TestCaseError> {
    prop_assert_eq!(call, body);
    Ok(())
}

proptest! {
    #[test]
    fn a_call_is_read_as_the_same_body_is((message, mut body) in asked(), prompt in "[a-z ]{0,8}", streams in any::<bool>()) {
        body["prompt"] = json!(prompt);
        body["stream"] = json!(streams);
        let message = GenerateRequest { prompt, ..message };
        let call = grpc::decode_generate(&framed(&message), streams, &CallEnd::default()).map(|(request, _)| request);
        same(call, decode_generate(body.to_string().as_bytes()).map(|(request, _)| request))?;
    }

    #[test]
    fn so_is_a_chat((message, mut body) in asked(), said in prop::collection::vec((0_usize..3, "[a-z]{0,5}"), 0..5)) {
        let roles = [(Role::System, "system"), (Role::User, "user"), (Role::Assistant, "assistant")];
        body["messages"] = said.iter().map(|(role, content)| json!({"role": roles[*role].1, "content": content})).collect();
        let messages = said.into_iter().map(|(role, content)| ChatMessage { role: roles[role].0.into(), content });
        let GenerateRequest { prompt: _, max_tokens, temperature, top_p, stop_sequences, priority, logprobs, seed, model } = message;
        let message = ChatRequest {
            messages: messages.collect(), max_tokens, temperature, top_p, stop_sequences, priority, logprobs, seed, model,
        };
        let call = grpc::decode_chat(&framed(&message), false, &CallEnd::default()).map(|(request, _)| request);
        same(call, decode_chat(body.to_string().as_bytes()).map(|(request, _)| request))?;
    }

    /// Whatever a body is, it is read or refused, and what it takes is told.
    #[test]
    fn any_bytes_are_a_message_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200), is_framed in any::<bool>()) {
        let body = if is_framed { [&[0][..], &(bytes.len() as u32).to_be_bytes(), &bytes].concat() } else { bytes };
        let end = CallEnd::default();
        for error in [
            grpc::decode_generate(&body, false, &end).err(),
            grpc::decode_chat(&body, true, &end).err(),
            grpc::decode_embeddings(&body).err(),
        ].into_iter().flatten() {
            prop_assert_eq!(error.status, 400);
        }
        prop_assert!(grpc::message_memory_bytes(&body) > 0);
    }

    #[test]
    fn what_comes_of_it_is_told_as_json_tells_it(
        text in "\\PC{0,20}", length in any::<bool>(), stopped in any::<bool>(), prompt_tokens in 0_u32..100, completion_tokens in 0_u32..100,
    ) {
        let reason = if length { FinishReason::Length } else { FinishReason::Stop };
        let stop = stopped.then(|| StopCause::Text("END".to_owned()));
        let usage = Usage { prompt_tokens, completion_tokens, ..Usage::default() };
        let answer = || {
            let output = AnswerOutput { text: text.clone(), ..AnswerOutput::default() };
            vec![Answer { output, reason, stop: stop.clone(), usage, timings: Timings::default() }]
        };
        let asked = framed(&GenerateRequest { prompt: "a".to_owned(), ..GenerateRequest::default() });
        let (_, encoder) = grpc::decode_generate(&asked, false, &CallEnd::default()).unwrap();
        let told = messages::<GenerateResponse>(encoder.whole(head(), answer(), usage).unwrap()).remove(0);
        let (_, encoder) = decode_generate(br#"{"prompt": "a"}"#).unwrap();
        let json: Value = serde_json::from_slice(&encoder.whole(head(), answer(), usage).unwrap()).unwrap();
        prop_assert_eq!((&json["id"], &json["object"], &json["model"]), (&json!(told.id), &json!(told.object), &json!(told.model)));
        prop_assert_eq!(&json["choices"][0]["text"], &json!(told.choices[0].text));
        prop_assert_eq!(&json["choices"][0]["finish_reason"], &json!(told.choices[0].finish_reason().as_str_name()));
        let counted = told.usage.unwrap();
        let counted = json!({"prompt_tokens": counted.prompt_tokens, "completion_tokens": counted.completion_tokens,
            "total_tokens": counted.total_tokens});
        prop_assert_eq!(&json["usage"], &counted);

        let asked = framed(&ChatRequest {
            messages: vec![ChatMessage { role: Role::User.into(), content: "a".to_owned() }], ..ChatRequest::default()
        });
        let (_, encoder) = grpc::decode_chat(&asked, false, &CallEnd::default()).unwrap();
        let told = messages::<ChatResponse>(encoder.whole(head(), answer(), usage).unwrap()).remove(0);
        let message = told.choices[0].message.clone().unwrap();
        prop_assert_eq!((message.role(), message.content), (Role::Assistant, text));
    }
}

#[test]
fn events_come_in_frames_and_a_failure_is_kept_for_the_end() {
    let end = CallEnd::default();
    let asked = framed(&GenerateRequest { prompt: "a".to_owned(), ..GenerateRequest::default() });
    let (request, encoder) = grpc::decode_generate(&asked, true, &end).unwrap();
    assert!(request.is_streamed);
    let mut stream = encoder.stream(head(), 1).unwrap();
    let mut out = BytesMut::new();
    let piece = |text: &str| GenerationEvent::Text { text: text.to_owned(), tokens: 1, logprobs: Vec::new() };
    stream.open(&mut out).unwrap();
    stream.event(0, &piece("Hi"), &mut out).unwrap();
    stream.event(0, &piece(" there"), &mut out).unwrap();
    assert!(end.failure().is_none());
    stream.fail(&ApiError::wrong_value("prompt", "is odd"), &mut out);
    let told: Vec<Event> =
        messages::<StreamEvent>(out.freeze()).into_iter().map(|event| event.event.unwrap()).collect();
    let [Event::Token(first), Event::Token(second), Event::Error(error)] = &told[..] else { panic!("{told:?}") };
    assert_eq!((first.token.as_str(), second.token.as_str(), second.index), ("Hi", " there", 1));
    assert_eq!(error.code, "invalid_value");
    assert_eq!(end.failure().unwrap().param.as_deref(), Some("prompt"));
}

#[test]
fn vectors_are_told_in_their_order() {
    let asked = EmbeddingsRequest { input: vec!["a".to_owned(), "b".to_owned()], ..EmbeddingsRequest::default() };
    let call = grpc::decode_embeddings(&framed(&asked)).unwrap();
    assert_eq!((call.input.len(), call.model), (2, None));
    let encoder = CallEmbeddings { count: 2 };
    assert_eq!(encoder.size(3), PooledSize::Numbers(6));
    let output = PooledOutput { vectors: vec![vec![1.0, 2.0], vec![3.0]], prompt_tokens: 7 };
    let told = messages::<EmbeddingsResponse>(encoder.whole(head(), output).unwrap()).remove(0);
    assert_eq!((told.data[1].index, &told.data[1].embedding), (1, &vec![3.0]));
    assert_eq!(told.usage.unwrap().prompt_tokens, 7);
    let long = EmbeddingsRequest { model: "m".repeat(257), ..EmbeddingsRequest::default() };
    assert_eq!(grpc::decode_embeddings(&framed(&long)).unwrap_err().param.as_deref(), Some("model"));
}

#[test]
fn what_reflection_tells_names_the_service() {
    let (_, name) = SERVICE.rsplit_once('.').unwrap();
    assert!(FILE_DESCRIPTORS.windows(name.len()).any(|bytes| bytes == name.as_bytes()));
}

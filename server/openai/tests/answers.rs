//! Both shapes of an answer, whole and streamed, from events that are made up.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use bytes::BytesMut;
use gantry_core::{
    Answer, AnswerHead, AnswerOutput, FinishReason, GenerationEvent, ItlHistogram, PromptChance, PromptToken,
    StopCause, StreamEncoder, TextEncoder, Timings, TokenChance, TokenLogprob, TokenPiece, ToolCall, ToolCallDelta,
    Usage,
};
use gantry_openai::{decode_chat, decode_completion};
use proptest::prelude::*;
use serde_json::{Value, json};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    Chat,
    Text,
}

/// What a client asks to be told.
#[derive(Clone, Copy)]
struct Asked {
    shape: Shape,
    include_usage: bool,
    logprobs: Option<u32>,
    timings: bool,
}

fn asked(shape: Shape, include_usage: bool, logprobs: Option<u32>) -> Asked {
    Asked { shape, include_usage, logprobs, timings: false }
}

impl Asked {
    fn body(self) -> Vec<u8> {
        let mut body = json!({"timings": self.timings, "stream": true});
        body["stream_options"] = json!({"include_usage": self.include_usage});
        match self.shape {
            Shape::Chat => {
                body["messages"] = json!([{"role": "user", "content": "Hi"}]);
                body["logprobs"] = json!(self.logprobs.is_some());
                body["top_logprobs"] = json!(self.logprobs);
            }
            Shape::Text => {
                body["prompt"] = json!("Hi");
                body["logprobs"] = json!(self.logprobs);
            }
        }
        body.to_string().into_bytes()
    }

    fn whole(self, answers: Vec<Answer>) -> Value {
        let whole = match self.shape {
            Shape::Chat => decode_chat(&self.body()).unwrap().1.whole(head(), answers, SUM),
            Shape::Text => decode_completion(&self.body()).unwrap().1.whole(head(), answers, SUM),
        };
        serde_json::from_slice(&whole.unwrap()).unwrap()
    }

    fn streamed(self, answers: &[Vec<&str>]) -> Vec<Value> {
        match self.shape {
            Shape::Chat => streamed(decode_chat(&self.body()).unwrap().1, answers),
            Shape::Text => streamed(decode_completion(&self.body()).unwrap().1, answers),
        }
    }
}

fn head() -> AnswerHead {
    let (id, model, version) = ("1".to_owned(), "demo \"q\"".to_owned(), "v1".to_owned());
    AnswerHead { id, created: 1_770_000_000, model, version }
}

fn chance(text: &str, logprob: f32) -> TokenChance {
    TokenChance { id: 1, bytes: text.as_bytes().to_vec(), logprob }
}

fn token(text: &str) -> TokenLogprob {
    TokenLogprob { token: chance(text, -0.5), top: vec![chance(text, -0.5), chance("x", -1.5)] }
}

const USAGE: Usage = Usage { prompt_tokens: 9, completion_tokens: 2, cached_tokens: 4, reasoning_tokens: 1 };
/// Of all answers.
const SUM: Usage = Usage { prompt_tokens: 9, completion_tokens: 4, cached_tokens: 4, reasoning_tokens: 2 };
const TIMINGS: Timings = Timings {
    tokenize_ms: 0.25,
    queue_ms: 1.5,
    prefill_ms: 10.0,
    decode_ms: 4.000_04,
    itl: ItlHistogram { counts: [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0] },
};

fn answer(pieces: &[&str]) -> Answer {
    Answer {
        output: AnswerOutput {
            text: pieces.concat(),
            logprobs: pieces.iter().map(|piece| token(piece)).collect(),
            ..AnswerOutput::default()
        },
        reason: FinishReason::Length,
        stop: None,
        usage: USAGE,
        timings: TIMINGS,
    }
}

/// A stream of the answers' pieces, one of each in turn.
fn streamed(encoder: impl TextEncoder, answers: &[Vec<&str>]) -> Vec<Value> {
    let mut out = BytesMut::new();
    let mut stream = encoder.stream(head(), answers.len()).unwrap();
    stream.open(&mut out).unwrap();
    for turn in 0..answers.iter().map(Vec::len).max().unwrap_or_default() {
        for (index, pieces) in answers.iter().enumerate() {
            let Some(piece) = pieces.get(turn) else { continue };
            let event = GenerationEvent::Text { text: (*piece).to_owned(), tokens: 1, logprobs: vec![token(piece)] };
            stream.event(index, &event, &mut out).unwrap();
        }
    }
    for index in 0..answers.len() {
        let event =
            GenerationEvent::Finished { reason: FinishReason::Length, stop: None, usage: USAGE, timings: TIMINGS };
        stream.event(index, &event, &mut out).unwrap();
    }
    stream.close(SUM, &mut out).unwrap();
    let text = String::from_utf8(out.to_vec()).unwrap();
    let events: Vec<&str> = text.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap()).collect();
    let (done, events) = events.split_last().unwrap();
    assert_eq!(*done, "[DONE]");
    events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
}

/// A token of a prompt that is as likely as all others here.
fn of_prompt(text: &str, top: usize) -> PromptToken {
    let chance = |text: &str, logprob| TokenChance { id: 7, bytes: text.as_bytes().to_vec(), logprob };
    let top = (0..top).map(|at| chance(["x", "y"][at], -1.5)).collect();
    let token = TokenPiece { id: 3, bytes: text.as_bytes().to_vec() };
    PromptToken { token, chance: Some(PromptChance { logprob: -0.5, rank: 4, top }) }
}

#[test]
fn a_prompt_is_told_as_the_beginning_of_the_text() {
    let first = PromptToken { chance: None, ..of_prompt("Hé", 0) };
    let mut whole = answer(&["!"]);
    whole.output.prompt = "Héy".to_owned();
    whole.output.prompt_tokens = Arc::new(vec![first.clone(), of_prompt("y", 2)]);
    let asked = |body: Value| decode_completion(body.to_string().as_bytes()).unwrap();
    let (request, encoder) = asked(json!({"prompt": "Héy", "echo": true, "logprobs": 1, "max_tokens": 0}));
    let params = request.params;
    assert_eq!((params.echo, params.prompt_logprobs, params.max_tokens), (true, Some(1), Some(0)));
    let told: Value = serde_json::from_slice(&encoder.whole(head(), vec![whole], SUM).unwrap()).unwrap();
    let choice = &told["choices"][0];
    assert_eq!(choice["text"], "Héy!");
    let wanted = json!({
        "tokens": ["Hé", "y", "!"], "token_logprobs": [null, -0.5, -0.5], "text_offset": [0, 2, 3],
        "top_logprobs": [null, {"y": -0.5, "x": -1.5}, {"!": -0.5, "x": -1.5}],
    });
    assert_eq!(choice["logprobs"], wanted);
    assert_eq!(choice.get("prompt_logprobs"), None);

    let mut out = BytesMut::new();
    let mut stream = encoder.stream(head(), 1).unwrap();
    let echo = GenerationEvent::Echo { text: "Héy".to_owned(), tokens: Vec::new() };
    stream.event(0, &echo, &mut out).unwrap();
    stream.event(0, &GenerationEvent::Echo { text: String::new(), tokens: vec![first] }, &mut out).unwrap();
    let text = String::from_utf8(out.to_vec()).unwrap();
    let chunks: Vec<Value> =
        text.split_terminator("\n\n").map(|event| serde_json::from_str(&event["data: ".len()..]).unwrap()).collect();
    assert_eq!(chunks[0]["choices"][0]["text"], "Héy");
    assert_eq!(chunks[1]["choices"][0]["logprobs"]["token_logprobs"], json!([null]));
}

#[test]
fn a_prompt_is_told_apart_as_vllm_does() {
    let mut whole = answer(&["!"]);
    whole.output.prompt_tokens = Arc::new(vec![PromptToken { chance: None, ..of_prompt("H", 0) }, of_prompt("y", 1)]);
    let y = json!({"logprob": -0.5, "rank": 4, "decoded_token": "y"});
    let wanted = json!([null, {"3": y, "7": {"logprob": -1.5, "rank": 1, "decoded_token": "x"}}]);
    let text = decode_completion(json!({"prompt": "Hy", "prompt_logprobs": 1}).to_string().as_bytes()).unwrap();
    assert_eq!((text.0.params.echo, text.0.params.prompt_logprobs, text.0.params.logprobs), (false, Some(1), None));
    let told: Value = serde_json::from_slice(&text.1.whole(head(), vec![whole.clone()], SUM).unwrap()).unwrap();
    assert_eq!((&told["choices"][0]["prompt_logprobs"], &told["choices"][0]["logprobs"]), (&wanted, &Value::Null));
    assert_eq!(told["choices"][0]["text"], "!");
    let chat = json!({"messages": [{"role": "user", "content": "Hy"}], "prompt_logprobs": 1}).to_string();
    let told = decode_chat(chat.as_bytes()).unwrap().1.whole(head(), vec![whole], SUM).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&told).unwrap()["prompt_logprobs"], wanted);
}

#[test]
fn a_chat_tells_its_tokens_with_their_bytes() {
    let whole = asked(Shape::Chat, false, Some(2)).whole(vec![answer(&["é", "!"]), answer(&["a"])]);
    assert_eq!(whole["usage"]["prompt_tokens"], 9);
    assert_eq!(whole["usage"]["completion_tokens"], 4);
    assert_eq!(whole["usage"]["prompt_tokens_details"]["cached_tokens"], 4);
    assert_eq!(
        whole["choices"][0]["logprobs"]["content"][0],
        json!({
            "token": "é", "logprob": -0.5, "bytes": [195, 169],
            "top_logprobs": [
                {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
                {"token": "x", "logprob": -1.5, "bytes": [120]},
            ],
        })
    );
    assert_eq!(whole["choices"][1]["index"], 1);
    let events = asked(Shape::Chat, false, Some(2)).streamed(&[vec!["é", "!"], vec!["a"]]);
    assert_eq!(events[2]["choices"][0]["delta"], json!({"content": "é"}));
    assert_eq!(events[2]["choices"][0]["logprobs"]["content"][0], whole["choices"][0]["logprobs"]["content"][0]);
    assert_eq!(events[3]["choices"][0]["index"], 1);
}

#[test]
fn a_text_tells_its_tokens_with_their_places() {
    let whole = asked(Shape::Text, false, Some(2)).whole(vec![answer(&["éa", "!", "b"])]);
    let expected = json!({
        "tokens": ["éa", "!", "b"], "token_logprobs": [-0.5, -0.5, -0.5], "text_offset": [0, 2, 3],
        "top_logprobs": [{"éa": -0.5, "x": -1.5}, {"!": -0.5, "x": -1.5}, {"b": -0.5, "x": -1.5}],
    });
    assert_eq!(whole["choices"][0]["logprobs"], expected);
    let events = asked(Shape::Text, false, Some(2)).streamed(&[vec!["éa", "!", "b"]]);
    assert_eq!(events[2]["choices"][0]["logprobs"]["text_offset"], json!([3]), "places go on from piece to piece");

    let only_chosen = asked(Shape::Text, false, Some(0)).whole(vec![answer(&["a"])]);
    assert_eq!(only_chosen["choices"][0]["logprobs"]["top_logprobs"], Value::Null);
}

#[test]
fn where_the_time_went_is_told_to_those_who_ask() {
    let expected = json!({
        "tokenize_ms": 0.25, "queue_ms": 1.5,
        "cache_n": 4, "prompt_n": 5, "prompt_ms": 10.0, "prompt_per_token_ms": 2.0, "prompt_per_second": 500.0,
        "predicted_n": 2, "predicted_ms": 4.0, "predicted_per_token_ms": 4.0, "predicted_per_second": 249.998,
        "inter_token_ms": {
            "bounds_ms": [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 5000.0],
            "counts": [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        },
    });
    for shape in [Shape::Chat, Shape::Text] {
        let wants = Asked { timings: true, ..asked(shape, true, None) };
        assert_eq!(wants.whole(vec![answer(&["a"])])["choices"][0]["timings"], expected);
        let events = wants.streamed(&[vec!["a"], vec!["b"]]);
        let told: Vec<&Value> = events.iter().filter(|event| !event["choices"][0]["timings"].is_null()).collect();
        assert_eq!(told.len(), 2, "each choice tells its own, once");
        for event in told {
            assert_eq!(
                (&event["choices"][0]["timings"], event["choices"][0]["finish_reason"].as_str()),
                (&expected, Some("length"))
            );
        }
        let not_asked = asked(shape, false, None).whole(vec![answer(&["a"])]);
        assert!(!not_asked.to_string().contains("timings"));
        let nothing = Answer { timings: Timings::default(), usage: Usage::default(), ..answer(&["a"]) };
        let told = &wants.whole(vec![nothing])["choices"][0]["timings"];
        let rates = (&told["prompt_per_second"], &told["predicted_per_second"]);
        assert_eq!(rates, (&json!(0.0), &json!(0.0)), "a rate of nothing is none");
    }
}

#[test]
fn usage_comes_once_and_last() {
    for shape in [Shape::Chat, Shape::Text] {
        let events = asked(shape, true, None).streamed(&[vec!["a"], vec!["b"]]);
        let (last, others) = events.split_last().unwrap();
        assert_eq!((&last["choices"], &last["usage"]["total_tokens"]), (&json!([]), &json!(13)));
        for event in others {
            assert!(event.as_object().unwrap().contains_key("usage") && event["usage"].is_null(), "{event}");
        }
        let events = asked(shape, false, None).streamed(&[vec!["a"]]);
        assert!(events.iter().all(|event| !event.as_object().unwrap().contains_key("usage")));
    }
}

proptest! {
    /// **Feature: distributed-inference-server, Property 23: API Response Format Consistency**
    /// **Validates: Requirements 11.1, 11.2, 11.3**
    #[test]
    fn a_stream_is_the_whole_answer_in_pieces(
        choices in prop::collection::vec(prop::collection::vec("\\PC{1,9}", 0..6), 1..4),
        chat in any::<bool>(), logprobs in prop::option::of(0..3_u32),
    ) {
        let shape = if chat { Shape::Chat } else { Shape::Text };
        let pieces: Vec<Vec<&str>> = choices.iter().map(|c| c.iter().map(String::as_str).collect()).collect();
        let whole = pieces.iter().map(|pieces| answer(pieces)).collect();
        let whole: Value = asked(shape, true, logprobs).whole(whole);
        prop_assert!(whole["id"].is_string() && whole["object"].is_string() && whole["created"].is_u64());
        prop_assert_eq!(whole["choices"].as_array().unwrap().len(), choices.len());
        let events = asked(shape, true, logprobs).streamed(&pieces);
        for (index, expected) in whole["choices"].as_array().unwrap().iter().enumerate() {
            let own: Vec<&Value> = events.iter().map(|e| &e["choices"][0]).filter(|c| c["index"] == index).collect();
            let (said, text) = match shape {
                Shape::Chat => ("/delta/content", &expected["message"]["content"]),
                Shape::Text => ("/text", &expected["text"]),
            };
            let joined: String = own.iter().filter_map(|c| c.pointer(said)?.as_str()).collect();
            prop_assert_eq!(&joined, text.as_str().unwrap());
            let list = if chat { "/logprobs/content" } else { "/logprobs/token_logprobs" };
            let told = |c: &Value| c.pointer(list).and_then(Value::as_array).map_or(0, Vec::len);
            prop_assert_eq!(own.iter().map(|c| told(c)).sum::<usize>(), told(expected));
            prop_assert_eq!(&own.last().unwrap()["finish_reason"], &expected["finish_reason"]);
        }
        prop_assert_eq!(&events.last().unwrap()["usage"], &whole["usage"]);
        for event in events.iter().chain([&whole]) {
            prop_assert_eq!((&event["id"], &event["created"], &event["model"]), (&whole["id"], &whole["created"], &whole["model"]));
        }
    }
}

/// A client carries a call out that it is told of as one, and half of one it cannot.
#[test]
fn a_call_that_a_stop_cut_is_not_what_an_answer_ended_with() {
    let call = ToolCall { id: "1".to_owned(), name: "f".to_owned(), arguments: "{\"a\": 1".to_owned() };
    for (is_open, stop, ended_with) in [
        (false, None, "tool_calls"),
        (false, Some(StopCause::Text(",".to_owned())), "tool_calls"),
        (true, Some(StopCause::Text(",".to_owned())), "stop"),
        (true, Some(StopCause::Token(7)), "stop"),
    ] {
        let encoder = || decode_chat(br#"{"messages": [{"role": "user", "content": "Hi"}]}"#).unwrap().1;
        let output = AnswerOutput { tool_calls: vec![call.clone()], call_is_open: is_open, ..AnswerOutput::default() };
        let answer = Answer { output, reason: FinishReason::Stop, stop: stop.clone(), usage: USAGE, timings: TIMINGS };
        let whole: Value = serde_json::from_slice(&encoder().whole(head(), vec![answer], SUM).unwrap()).unwrap();
        assert_eq!(whole["choices"][0]["finish_reason"], ended_with);

        let mut out = BytesMut::new();
        let mut stream = encoder().stream(head(), 1).unwrap();
        let delta = |delta| GenerationEvent::ToolCall { index: 0, delta, tokens: 1 };
        let begun = ToolCallDelta::Begun { id: "1".to_owned(), name: "f".to_owned() };
        let ended = (!is_open).then_some(ToolCallDelta::Ended);
        let deltas = [begun, ToolCallDelta::Arguments(call.arguments.clone())].into_iter().chain(ended);
        let finished = GenerationEvent::Finished { reason: FinishReason::Stop, stop, usage: USAGE, timings: TIMINGS };
        for event in deltas.map(delta).chain([finished]) {
            stream.event(0, &event, &mut out).unwrap();
        }
        let text = String::from_utf8(out.to_vec()).unwrap();
        assert!(text.contains(&format!("\"finish_reason\":\"{ended_with}\"")), "{text}");
    }
}

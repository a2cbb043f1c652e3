//! What answers look like: each type reads back as it was, and a stream's template writes what its types would.
#![allow(clippy::unwrap_used)]

use gantry_openai::{
    AssistantMessage, ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatLogprobs, ChunkHead, ChunkTemplate,
    Delta, EmbeddingList, EncodingFormat, FinishReason, RerankResponse, StopReason, TextChoice, TextCompletion,
    TextLogprobs, TextOffset, TimeHistogram, Timings, TokenChance, Usage, ValidRerankRequest, sse_event,
};
use proptest::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

type Tokens = Vec<(Vec<u8>, f32)>;

/// Tokens of any bytes, among them such as JSON must escape, and any number as their logarithm.
fn tokens() -> impl Strategy<Value = Tokens> {
    let bytes = prop_oneof![".{0,6}".prop_map(String::into_bytes), prop::collection::vec(any::<u8>(), 0..6)];
    prop::collection::vec((bytes, any::<f32>()), 0..6)
}

fn chances(tokens: &Tokens) -> impl Iterator<Item = TokenChance<'_>> {
    tokens.iter().map(|(bytes, logprob)| TokenChance { bytes, logprob: *logprob })
}

fn chat_logprobs() -> impl Strategy<Value = Option<ChatLogprobs>> {
    prop::option::of((tokens(), tokens()).prop_map(|(tokens, top)| {
        let mut logprobs = ChatLogprobs::default();
        chances(&tokens).for_each(|token| logprobs.push(token, chances(&top)));
        logprobs
    }))
}

fn text_logprobs() -> impl Strategy<Value = Option<TextLogprobs>> {
    prop::option::of((tokens(), tokens(), 0..3_u32).prop_map(|(tokens, top, wanted)| {
        let mut logprobs = TextLogprobs::new(wanted);
        let mut offset = TextOffset::default();
        chances(&tokens).for_each(|token| logprobs.push(token, chances(&top), &mut offset));
        logprobs
    }))
}

fn reason() -> impl Strategy<Value = FinishReason> {
    prop::sample::select(vec![FinishReason::Stop, FinishReason::Length])
}

fn stop_reason() -> impl Strategy<Value = Option<StopReason>> {
    prop::option::of(prop_oneof![any::<i32>().prop_map(StopReason::Token), ".{1,9}".prop_map(StopReason::Text)])
}

fn usage() -> impl Strategy<Value = Usage> {
    (any::<[u32; 3]>(), prop::option::of(any::<u32>())).prop_map(|([read, made, cached], thought)| {
        let usage = Usage::new(read, made, cached);
        thought.map_or(usage, |thought| usage.with_reasoning(thought))
    })
}

/// Numbers that JSON writes as they are.
fn timings() -> impl Strategy<Value = Option<Timings>> {
    prop::option::of((any::<[u32; 3]>(), any::<[u16; 3]>(), prop::collection::vec(any::<u32>(), 3)).prop_map(
        |([cache_n, prompt_n, predicted_n], ms, counts)| Timings {
            cache_n,
            prompt_n,
            predicted_n,
            queue_ms: f64::from(ms[0]) / 4.0,
            prompt_ms: f64::from(ms[1]),
            predicted_per_second: f64::from(ms[2]) / 8.0,
            inter_token_ms: TimeHistogram { bounds_ms: vec![0.5, 100.0], counts },
            ..Timings::default()
        },
    ))
}

prop_compose! {
    fn chat()(
        (id, model, system_fingerprint) in (".{1,20}", ".{1,20}", ".{1,20}"), created in any::<u64>(), usage in usage(),
        choices in prop::collection::vec((".{0,40}", chat_logprobs(), (reason(), stop_reason()), timings()), 1..4),
    ) -> ChatCompletion {
        let choices = (0..).zip(choices).map(|(index, (content, logprobs, (finish_reason, stop_reason), timings))| ChatChoice {
            index,
            message: AssistantMessage {
                role: "assistant".to_owned(),
                content: Some(content),
                refusal: None,
                reasoning_content: None,
                tool_calls: None,
            },
            logprobs,
            finish_reason,
            stop_reason,
            timings,
        });
        let (object, choices) = ("chat.completion".to_owned(), choices.collect());
        ChatCompletion { id, object, created, model, system_fingerprint, choices, usage, prompt_logprobs: None }
    }
}

prop_compose! {
    fn text()(
        (id, model, system_fingerprint) in (".{1,20}", ".{1,20}", ".{1,20}"), created in any::<u64>(),
        usage in prop::option::of(prop::option::of(usage())),
        choices in prop::collection::vec((".{0,40}", text_logprobs(), (prop::option::of(reason()), stop_reason()), timings()), 1..4),
    ) -> TextCompletion {
        let choices = (0..).zip(choices).map(|(index, (text, logprobs, (finish_reason, stop_reason), timings))| TextChoice {
            index,
            text,
            logprobs,
            prompt_logprobs: None,
            finish_reason,
            stop_reason,
            timings,
        });
        let (object, choices) = ("text_completion".to_owned(), choices.collect());
        TextCompletion { id, object, created, model, system_fingerprint, choices, usage }
    }
}

fn round_trip<T: Serialize + DeserializeOwned>(value: &T) -> T {
    serde_json::from_str(&serde_json::to_string(value).unwrap()).unwrap()
}

/// What every answer to a request for text has.
fn is_an_answer(value: &Value) {
    assert!(value["id"].is_string() && value["object"].is_string() && value["model"].is_string(), "{value}");
    assert!(value["created"].is_u64() && value["choices"].is_array(), "{value}");
    for count in ["prompt_tokens", "completion_tokens", "total_tokens"] {
        assert!(value["usage"][count].is_u64(), "{value}");
    }
    for (index, choice) in value["choices"].as_array().unwrap().iter().enumerate() {
        assert_eq!(choice["index"], index);
        assert!(choice["finish_reason"].is_string(), "{value}");
    }
}

proptest! {
    /// **Feature: distributed-inference-server, Property 23: API Response Format Consistency**
    /// **Validates: Requirements 11.1, 11.2, 11.3**
    #[test]
    fn an_answer_has_all_its_fields(chat in chat(), text in text(), usage in usage()) {
        is_an_answer(&serde_json::to_value(&chat).unwrap());
        let mut text = TextCompletion { usage: Some(Some(usage)), ..text };
        for choice in &mut text.choices {
            choice.finish_reason.get_or_insert(FinishReason::Stop);
        }
        is_an_answer(&serde_json::to_value(&text).unwrap());
    }

    /// **Feature: distributed-inference-server, Property 25: Response Serialization Round-Trip**
    /// **Validates: Requirements 11.5**
    #[test]
    fn answers_read_back_as_they_were(
        chat in chat(), text in text(), model in ".{0,9}", count in any::<u32>(),
        vectors in prop::collection::vec(prop::collection::vec(-1e3_f32..1e3, 0..9), 0..5),
    ) {
        prop_assert_eq!(round_trip(&chat), chat);
        prop_assert_eq!(round_trip(&text), text);
        for encoding in [EncodingFormat::Float, EncodingFormat::Base64] {
            let list = EmbeddingList::new(model.clone(), vectors.clone(), encoding, count);
            let read: EmbeddingList = round_trip(&list);
            let floats: Vec<Vec<f32>> = read.data.iter().map(|one| one.embedding.floats().unwrap()).collect();
            prop_assert_eq!(&floats, &vectors);
            prop_assert_eq!(read, list);
        }
        let documents: Vec<String> = vectors.iter().map(|v| format!("{v:?}")).collect();
        let request = ValidRerankRequest { model: None, query: model.clone(), documents, top_n: None, return_documents: true, priority: gantry_core::Priority::Normal };
        let scores: Vec<f32> = vectors.iter().map(|v| v.iter().sum()).collect();
        let ranked: RerankResponse = request.answer(model, &scores, count);
        prop_assert!(ranked.results.is_sorted_by(|a, b| a.relevance_score >= b.relevance_score));
        prop_assert_eq!(round_trip(&ranked), ranked);
    }

    #[test]
    fn the_template_writes_what_the_types_would(
        (id, model, fingerprint) in (".{1,20}", "[\\PC\"\\\\]{1,20}", ".{1,20}"), created in any::<u64>(), index in any::<u32>(),
        content in "[\\PC\\x00-\\x1f\"\\\\]{0,60}", usage in any::<bool>(), chat in chat_logprobs(), text in text_logprobs(),
    ) {
        let head = ChunkHead { id: &id, created, model: &model, system_fingerprint: &fingerprint };
        let no_usage_yet = usage.then_some(None);
        let (mut written, mut other) = (Vec::new(), Vec::new());
        ChunkTemplate::chat(head, usage).unwrap().write(&mut written, index, &content, chat.as_ref()).unwrap();
        ChunkTemplate::text(head, usage).unwrap().write(&mut other, index, &content, text.as_ref()).unwrap();
        let delta = Delta { content: Some(content.clone()), ..Delta::default() };
        let expected = ChatChunk {
            id: id.clone(),
            object: "chat.completion.chunk".to_owned(),
            created,
            model: model.clone(),
            system_fingerprint: fingerprint.clone(),
            choices: vec![ChatChunkChoice { index, delta, logprobs: chat, finish_reason: None, stop_reason: None, timings: None }],
            usage: no_usage_yet,
        };
        prop_assert_eq!(String::from_utf8(written).unwrap(), sse_event(&expected).unwrap());
        let expected = TextCompletion {
            id,
            object: "text_completion".to_owned(),
            created,
            model,
            system_fingerprint: fingerprint,
            choices: vec![TextChoice { index, text: content, logprobs: text, prompt_logprobs: None, finish_reason: None, stop_reason: None, timings: None }],
            usage: no_usage_yet,
        };
        prop_assert_eq!(String::from_utf8(other).unwrap(), sse_event(&expected).unwrap());
    }
}

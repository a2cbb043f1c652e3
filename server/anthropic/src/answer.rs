//! An answer as it comes whole, and what pieces of it have in common with that.

use gantry_core::{
    Answer, AnswerHead, AnswerOutput, EncodeError, FinishReason, OutputPart, PromptEncoder, ShownPrompt, StopCause,
    TextEncoder, ToolCall, Usage,
};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::stream::MessageStream;

/// Writes the answer to messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageEncoder;

/// Writes how many tokens messages have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountEncoder;

/// A message as this API has it.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Message")]
pub(crate) struct Told<'a> {
    pub(crate) id: String,
    #[serde(rename = "type")]
    #[schemars(extend("const" = "message"))]
    pub(crate) kind: &'static str,
    #[schemars(extend("const" = "assistant"))]
    pub(crate) role: &'static str,
    pub(crate) model: &'a str,
    #[schemars(schema_with = "blocks_schema")]
    pub(crate) content: Vec<Value>,
    #[schemars(extend("enum" = ["max_tokens", "stop_sequence", "tool_use", "end_turn", null]))]
    pub(crate) stop_reason: Option<&'static str>,
    pub(crate) stop_sequence: Option<&'a str>,
    #[schemars(schema_with = "usage_schema")]
    pub(crate) usage: Value,
}

fn blocks_schema(_: &mut SchemaGenerator) -> Schema {
    let block = |kind: &str, fields: &[&str], more: Value| {
        let mut properties = Map::from_iter([("type".to_owned(), json!({"const": kind}))]);
        properties.extend(fields.iter().map(|field| ((*field).to_owned(), json!({"type": "string"}))));
        properties.extend(more.as_object().cloned().unwrap_or_default());
        let required: Vec<&String> = properties.keys().collect();
        json!({"type": "object", "required": required, "properties": properties})
    };
    json_schema!({"type": "array", "items": {"anyOf": [
        block("text", &["text"], json!({})),
        block("thinking", &["thinking", "signature"], json!({})),
        block("tool_use", &["id", "name"], json!({"input": {"type": "object"}})),
    ]}})
}

fn usage_schema(_: &mut SchemaGenerator) -> Schema {
    let usage = usage_of(Usage::default());
    let names: Vec<&String> = usage.as_object().into_iter().flat_map(Map::keys).collect();
    let properties: Map<_, _> =
        names.iter().map(|name| ((*name).clone(), json!({"type": "integer", "minimum": 0}))).collect();
    json_schema!({"type": "object", "required": names, "properties": properties})
}

/// The answer to `/v1/messages`, for those who describe the server to programs.
pub fn message_schema(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<Told<'_>>()
}

/// The answer to `/v1/messages/count_tokens`.
pub fn count_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object", "required": ["input_tokens"], "properties": {"input_tokens": {"type": "integer", "minimum": 0}},
    })
}

pub(crate) fn id(head: &AnswerHead) -> String {
    format!("msg_{}", head.id)
}

/// Tokens of the prompt are counted by whether they had to be computed.
pub(crate) fn usage_of(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens.saturating_sub(usage.cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    })
}

/// Why an answer ended.
pub(crate) fn stop_reason(reason: FinishReason, stop_string: Option<&str>, has_called: bool) -> &'static str {
    match reason {
        FinishReason::Length => "max_tokens",
        _ if stop_string.is_some() => "stop_sequence",
        _ if has_called => "tool_use",
        FinishReason::Stop | FinishReason::Cancelled => "end_turn",
    }
}

fn block(part: OutputPart<'_>) -> Value {
    match part {
        OutputPart::Reasoning(text) => json!({"type": "thinking", "thinking": text, "signature": ""}),
        OutputPart::Text(text) => json!({"type": "text", "text": text}),
        OutputPart::Call(ToolCall { id, name, arguments }) => {
            // Where it was cut off there is no object, and clients read one.
            let input: Map<String, Value> = serde_json::from_str(arguments).unwrap_or_default();
            json!({"type": "tool_use", "id": id, "name": name, "input": input})
        }
    }
}

impl TextEncoder for MessageEncoder {
    type Stream = MessageStream;

    fn whole(self, head: AnswerHead, answers: Vec<Answer>, usage: Usage) -> Result<Vec<u8>, EncodeError> {
        let answer = answers.into_iter().next();
        let (output, reason, stop) = match answer {
            Some(Answer { output, reason, stop, .. }) => (output, reason, stop),
            None => (AnswerOutput::default(), FinishReason::Stop, None),
        };
        let stop_string = stop.as_ref().and_then(StopCause::text);
        let ended = stop_reason(reason, stop_string, !output.tool_calls.is_empty());
        serde_json::to_vec(&Told {
            id: id(&head),
            kind: "message",
            role: "assistant",
            model: &head.model,
            content: output.parts().map(block).collect(),
            stop_reason: Some(ended),
            stop_sequence: stop_string,
            usage: usage_of(usage),
        })
    }

    fn stream(self, head: AnswerHead, _: usize) -> Result<MessageStream, EncodeError> {
        Ok(MessageStream::new(head))
    }
}

impl PromptEncoder for CountEncoder {
    fn whole(self, prompt: ShownPrompt) -> Result<Vec<u8>, EncodeError> {
        let tokens = match prompt {
            ShownPrompt::Count(tokens) => tokens,
            ShownPrompt::Tokens(tokens) => tokens.len(),
            ShownPrompt::Pieces(pieces) => pieces.len(),
            ShownPrompt::Text(_) => 0,
        };
        serde_json::to_vec(&json!({"input_tokens": tokens}))
    }
}

//! What comes of a request, as a response object.

use gantry_core::{
    Answer, AnswerHead, ApiError, EncodeError, FinishReason, OutputPart, StopCause, TextEncoder, ToolCall, Usage,
};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::id::ResponseId;
use crate::stream::ResponseStream;

/// What an answer repeats of its request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Asked {
    pub(crate) instructions: Option<String>,
    pub(crate) max_output_tokens: Option<u32>,
    pub(crate) temperature: f32,
    pub(crate) top_p: f32,
    pub(crate) tools: Vec<Value>,
    pub(crate) tool_choice: Value,
    pub(crate) parallel_tool_calls: bool,
    pub(crate) format: Value,
    pub(crate) effort: Option<String>,
    pub(crate) metadata: Map<String, Value>,
    pub(crate) store: bool,
    pub(crate) background: bool,
    pub(crate) previous: Option<ResponseId>,
}

/// Writes the answer to a request.
#[derive(Clone, Debug, PartialEq)]
pub struct ResponseEncoder {
    pub(crate) asked: Asked,
}

/// How far a response is, or how it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "ResponseStatus")]
pub enum Status {
    /// It waits.
    Queued,
    /// It is being answered.
    InProgress,
    /// All of it came.
    Completed,
    /// It was cut off by the most tokens that it may have, or that its context has.
    Incomplete,
    /// Its client did not want the rest.
    Cancelled,
    /// An error ended it.
    Failed,
}

impl Status {
    /// Whether nothing more comes.
    #[must_use]
    pub fn is_final(self) -> bool {
        !matches!(self, Self::Queued | Self::InProgress)
    }

    pub(crate) fn of(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Length => Self::Incomplete,
            FinishReason::Stop | FinishReason::Cancelled => Self::Completed,
        }
    }

    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::Incomplete => "incomplete",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
        }
    }
}

/// An error as a response tells it.
pub(crate) fn failure(error: &ApiError) -> Value {
    let code = match error.status {
        400 => "invalid_prompt",
        429 => "rate_limit_exceeded",
        _ => "server_error",
    };
    json!({"code": code, "message": error.message})
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Response")]
pub(crate) struct Told<'a> {
    id: String,
    #[schemars(extend("const" = "response"))]
    object: &'static str,
    created_at: u64,
    status: Status,
    background: bool,
    #[schemars(schema_with = "error_schema")]
    error: Option<&'a Value>,
    #[schemars(schema_with = "incomplete_schema")]
    incomplete_details: Value,
    instructions: Option<&'a str>,
    max_output_tokens: Option<u32>,
    model: &'a str,
    #[schemars(schema_with = "output_schema")]
    output: &'a [Value],
    parallel_tool_calls: bool,
    previous_response_id: Option<String>,
    #[schemars(with = "Map<String, Value>")]
    reasoning: Value,
    store: bool,
    temperature: f32,
    #[schemars(with = "Map<String, Value>")]
    text: Value,
    tool_choice: &'a Value,
    #[schemars(with = "Vec<Map<String, Value>>")]
    tools: &'a [Value],
    top_p: f32,
    #[schemars(extend("const" = "disabled"))]
    truncation: &'static str,
    #[schemars(schema_with = "usage_schema")]
    usage: Option<Value>,
    metadata: &'a Map<String, Value>,
}

/// The answer to `/v1/responses`, for those who describe the server to programs.
pub fn response_schema(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<Told<'_>>()
}

fn object(properties: &[(&str, Value)]) -> Value {
    let names: Vec<&str> = properties.iter().map(|(name, _)| *name).collect();
    let properties: Map<_, _> = properties.iter().map(|(name, of)| ((*name).to_owned(), of.clone())).collect();
    json!({"type": "object", "required": names, "properties": properties})
}

fn or_null(schema: Value) -> Schema {
    json_schema!({"anyOf": [schema, {"type": "null"}]})
}

fn error_schema(_: &mut SchemaGenerator) -> Schema {
    let codes = json!({"enum": ["invalid_prompt", "rate_limit_exceeded", "server_error"]});
    or_null(object(&[("code", codes), ("message", json!({"type": "string"}))]))
}

fn incomplete_schema(_: &mut SchemaGenerator) -> Schema {
    or_null(object(&[("reason", json!({"const": "max_output_tokens"}))]))
}

fn output_schema(_: &mut SchemaGenerator) -> Schema {
    let (text, array) = (json!({"type": "string"}), |items: Value| json!({"type": "array", "items": items}));
    let of = |kind: &str, rest: &[(&str, Value)]| {
        let head = [("id", text.clone()), ("type", json!({"const": kind})), ("status", text.clone())];
        object(&[&head[..], rest].concat())
    };
    let said =
        object(&[("type", json!({"const": "output_text"})), ("text", text.clone()), ("annotations", array(json!({})))]);
    let thought = object(&[("type", json!({"const": "reasoning_text"})), ("text", text.clone())]);
    let message = of("message", &[("role", json!({"const": "assistant"})), ("content", array(said))]);
    let reasoning = of("reasoning", &[("summary", array(json!({}))), ("content", array(thought))]);
    let call = of("function_call", &[("call_id", text.clone()), ("name", text.clone()), ("arguments", text.clone())]);
    json_schema!({"type": "array", "items": {"anyOf": [message, reasoning, call]}})
}

fn usage_schema(_: &mut SchemaGenerator) -> Schema {
    let count = json!({"type": "integer", "minimum": 0});
    or_null(object(&[
        ("input_tokens", count.clone()),
        ("input_tokens_details", object(&[("cached_tokens", count.clone())])),
        ("output_tokens", count.clone()),
        ("output_tokens_details", object(&[("reasoning_tokens", count.clone())])),
        ("total_tokens", count),
    ]))
}

/// A response, so far.
pub(crate) fn told<'a>(
    head: &'a AnswerHead,
    asked: &'a Asked,
    status: Status,
    error: Option<&'a Value>,
    output: &'a [Value],
    usage: Option<Usage>,
) -> Told<'a> {
    let incomplete_details = match status {
        Status::Incomplete => json!({"reason": "max_output_tokens"}),
        _ => Value::Null,
    };
    Told {
        id: format!("resp_{}", head.id),
        object: "response",
        created_at: head.created,
        status,
        background: asked.background,
        error,
        incomplete_details,
        instructions: asked.instructions.as_deref(),
        max_output_tokens: asked.max_output_tokens,
        model: &head.model,
        output,
        parallel_tool_calls: asked.parallel_tool_calls,
        previous_response_id: asked.previous.map(|previous| previous.to_string()),
        reasoning: json!({"effort": asked.effort, "summary": null}),
        store: asked.store,
        temperature: asked.temperature,
        text: json!({"format": asked.format}),
        tool_choice: &asked.tool_choice,
        tools: &asked.tools,
        top_p: asked.top_p,
        truncation: "disabled",
        usage: usage.map(usage_of),
        metadata: &asked.metadata,
    }
}

fn usage_of(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens.saturating_add(usage.completion_tokens),
    })
}

/// An item's id.
pub(crate) fn item_id(kind: &str, head: &AnswerHead, index: usize) -> String {
    format!("{kind}_{}_{index}", head.id)
}

/// What the model thought.
pub(crate) fn reasoning(id: &str, text: &str, status: &str) -> Value {
    let content = if text.is_empty() { json!([]) } else { json!([{"type": "reasoning_text", "text": text}]) };
    json!({"id": id, "type": "reasoning", "status": status, "summary": [], "content": content})
}

/// What it says.
pub(crate) fn message(id: &str, text: Option<&str>, status: &str) -> Value {
    let content: Vec<Value> = text.map(part).into_iter().collect();
    json!({"id": id, "type": "message", "role": "assistant", "status": status, "content": content})
}

/// The part of a message that is its text.
pub(crate) fn part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

/// A call of a tool.
pub(crate) fn call(id: &str, ToolCall { id: call_id, name, arguments }: &ToolCall, status: &str) -> Value {
    json!({
        "id": id, "type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, "status": status,
    })
}

/// The status of a call that has begun and not ended; `is_cut`: more of it would have come.
pub(crate) fn open_call_status(is_cut: bool) -> Status {
    if is_cut { Status::Incomplete } else { Status::Completed }
}

/// Whether what ended an answer is not the model.
pub(crate) fn is_cut(reason: FinishReason, stop: Option<&StopCause>) -> bool {
    reason == FinishReason::Length || stop.is_some()
}

fn items(head: &AnswerHead, answer: &Answer) -> Vec<Value> {
    let Answer { output, reason, stop, .. } = answer;
    let parts: Vec<OutputPart<'_>> = output.parts().collect();
    let is_call = |part: &OutputPart<'_>| matches!(part, OutputPart::Call(_));
    let open_call = output.call_is_open.then(|| parts.iter().rposition(is_call)).flatten();
    let item = |(index, part): (usize, &OutputPart<'_>)| {
        let is_last = index + 1 == parts.len();
        let status = match part {
            OutputPart::Call(_) if open_call == Some(index) => {
                open_call_status(!is_last || is_cut(*reason, stop.as_ref())).word()
            }
            OutputPart::Reasoning(_) | OutputPart::Text(_) if is_last => Status::of(*reason).word(),
            _ => Status::Completed.word(),
        };
        match part {
            OutputPart::Reasoning(text) => reasoning(&item_id("rs", head, index), text, status),
            OutputPart::Text(text) => message(&item_id("msg", head, index), Some(text), status),
            OutputPart::Call(of) => call(&item_id("fc", head, index), of, status),
        }
    };
    parts.iter().enumerate().map(item).collect()
}

impl TextEncoder for ResponseEncoder {
    type Stream = ResponseStream;

    fn whole(self, head: AnswerHead, answers: Vec<Answer>, usage: Usage) -> Result<Vec<u8>, EncodeError> {
        let (items, status) = match answers.first() {
            Some(answer) => (items(&head, answer), Status::of(answer.reason)),
            None => (Vec::new(), Status::Completed),
        };
        serde_json::to_vec(&told(&head, &self.asked, status, None, &items, Some(usage)))
    }

    fn stream(self, head: AnswerHead, _: usize) -> Result<ResponseStream, EncodeError> {
        Ok(ResponseStream::new(head, self.asked))
    }
}

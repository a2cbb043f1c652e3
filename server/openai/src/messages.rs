//! The messages of a chat: who says what, and which tools were called and answered.
//!
//! What is read here reaches the model's template whole, as [`Message::to_json`] writes it. Absent: images, sound and
//! files, and what a template makes of a field.

use std::borrow::Cow;
use std::collections::HashMap;

use serde_json::{Map, Value, json};

use crate::error::{ApiError, ErrorCode};
use crate::fields::{Fields, missing, wrong_type, wrong_value};
use crate::limits::{MAX_CONTENT_PARTS, MAX_MESSAGES, MAX_NAME_BYTES, MAX_TOOL_CALLS};
use crate::parameters::Place;

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Instructions; `developer` is the newer word for it, and templates know only this one.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// What a tool returned.
    Tool,
}

impl Role {
    fn parse(word: &str) -> Option<Self> {
        match word {
            "system" | "developer" => Some(Self::System),
            "user" => Some(Self::User),
            "assistant" => Some(Self::Assistant),
            "tool" => Some(Self::Tool),
            _ => None,
        }
    }

    /// The word on the wire and in templates.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// One message of a chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said; text parts are joined by line breaks, as llama-server does. Empty where an assistant's turn has
    /// none.
    pub content: String,
    /// Which of several speakers of the same role, or which tool.
    pub name: Option<String>,
    /// What the model thought before it said that.
    pub reasoning: Option<String>,
    /// The tools that the model called in this turn.
    pub tool_calls: Vec<ToolCall>,
    /// The earlier call that this message answers; of tools alone.
    pub tool_call_id: Option<String>,
}

/// A call of a tool in an assistant's turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// What the answer to it repeats.
    pub id: String,
    /// The tool.
    pub name: String,
    /// What it was called with: JSON, unless the model wrote something else.
    pub arguments: String,
}

impl Message {
    /// A message that is text alone.
    #[must_use]
    pub fn text(role: Role, content: impl Into<String>) -> Self {
        let content = content.into();
        Self { role, content, name: None, reasoning: None, tool_calls: Vec::new(), tool_call_id: None }
    }

    /// The message on the wire, and for a chat template.
    pub(crate) fn to_json(&self) -> Value {
        let mut object = Map::new();
        let mut put = |name: &str, value: Value| object.insert(name.to_owned(), value);
        put("role", json!(self.role.as_str()));
        put("content", json!(self.content));
        for (name, text) in
            [("name", &self.name), ("reasoning_content", &self.reasoning), ("tool_call_id", &self.tool_call_id)]
        {
            if let Some(text) = text {
                put(name, json!(text));
            }
        }
        if !self.tool_calls.is_empty() {
            put("tool_calls", self.tool_calls.iter().map(ToolCall::to_json).collect());
        }
        Value::Object(object)
    }
}

impl ToolCall {
    fn to_json(&self) -> Value {
        json!({"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}})
    }
}

pub(crate) fn messages(fields: &Fields<'_>) -> Result<Vec<Message>, ApiError> {
    let param = || "messages".to_owned();
    let value = fields.get("messages").ok_or_else(|| missing(param(), "an array of messages is expected"))?;
    let items = value.as_array().ok_or_else(|| wrong_type(param(), "an array of messages", value))?;
    if items.is_empty() || items.len() > MAX_MESSAGES {
        let n = items.len();
        return Err(wrong_value(param(), format_args!("must have 1 to {MAX_MESSAGES} messages, not {n}")));
    }
    let mut messages = Vec::with_capacity(items.len());
    let mut calls = HashMap::new();
    for (i, item) in items.iter().enumerate() {
        let message = message(i, item)?;
        answer_call(i, &message, &mut calls)?;
        for call in &message.tool_calls {
            *calls.entry(call.id.clone()).or_default() += 1;
        }
        messages.push(message);
    }
    Ok(messages)
}

/// Takes a tool's message as the answer to a call, of which `calls` counts those without one by their ids. One that answers
/// none of the calls before it, or one that has its answer, is refused: a model would read an answer to nothing.
fn answer_call(index: usize, message: &Message, calls: &mut HashMap<String, u32>) -> Result<(), ApiError> {
    let path = |name: &str| format!("messages[{index}].{name}");
    match (message.role, &message.tool_call_id) {
        (Role::Tool, _) if calls.is_empty() => {
            Err(wrong_value(path("role"), "may be tool only after an assistant's message with `tool_calls`"))
        }
        (Role::Tool, None) => Err(missing(path("tool_call_id"), "the id of the call that this answers is expected")),
        (Role::Tool, Some(id)) => match calls.get_mut(id) {
            None => Err(wrong_value(path("tool_call_id"), "must be the `id` of one of the `tool_calls` before it")),
            Some(0) => Err(wrong_value(path("tool_call_id"), "names a call that a message before it has answered")),
            Some(open) => {
                *open -= 1;
                Ok(())
            }
        },
        (Role::System | Role::User | Role::Assistant, Some(_)) => {
            Err(wrong_value(path("tool_call_id"), "may be given only with the role tool"))
        }
        _ => Ok(()),
    }
}

fn message(index: usize, value: &Value) -> Result<Message, ApiError> {
    let path = format!("messages[{index}]");
    let Value::Object(object) = value else { return Err(wrong_type(path, "an object", value)) };
    let fields = Fields::new(object, format!("{path}."));
    fields.refuse(Place::Message)?;
    let word = fields
        .string("role")?
        .ok_or_else(|| missing(fields.path("role"), "system, developer, user, assistant or tool is expected"))?;
    let role = Role::parse(word).ok_or_else(|| {
        wrong_value(fields.path("role"), "must be one of system, developer, user, assistant and tool")
    })?;
    let refusal = fields.string("refusal")?.filter(|text| !text.is_empty());
    if role != Role::Assistant && refusal.is_some() {
        return Err(wrong_value(fields.path("refusal"), "may be given only with the role assistant"));
    }
    let tool_calls = tool_calls(&fields)?;
    if role != Role::Assistant && !tool_calls.is_empty() {
        return Err(wrong_value(fields.path("tool_calls"), "may be given only with the role assistant"));
    }
    Ok(Message {
        role,
        content: said(content(&fields, role)?, refusal),
        name: short_text(&fields, "name")?,
        reasoning: reasoning(&fields)?,
        tool_calls,
        tool_call_id: short_text(&fields, "tool_call_id")?,
    })
}

/// A name or an id; an empty one is none.
fn short_text(fields: &Fields<'_>, name: &str) -> Result<Option<String>, ApiError> {
    match fields.string(name)? {
        Some("") | None => Ok(None),
        Some(text) if text.len() > MAX_NAME_BYTES => {
            let n = text.len();
            Err(wrong_value(fields.path(name), format_args!("must have at most {MAX_NAME_BYTES} bytes, not {n}")))
        }
        Some(text) => Ok(Some(text.to_owned())),
    }
}

/// llama-server's name for it, or vLLM's.
fn reasoning(fields: &Fields<'_>) -> Result<Option<String>, ApiError> {
    let text = |name| Ok::<_, ApiError>(fields.string(name)?.filter(|text| !text.is_empty()).map(str::to_owned));
    fields.one_of(("reasoning_content", text("reasoning_content")?), ("reasoning", text("reasoning")?))
}

fn tool_calls(fields: &Fields<'_>) -> Result<Vec<ToolCall>, ApiError> {
    let path = fields.path("tool_calls");
    let Some(value) = fields.get("tool_calls") else { return Ok(Vec::new()) };
    let items = value.as_array().ok_or_else(|| wrong_type(path.clone(), "an array of calls", value))?;
    if items.len() > MAX_TOOL_CALLS {
        let n = items.len();
        return Err(wrong_value(path, format_args!("must have at most {MAX_TOOL_CALLS} calls, not {n}")));
    }
    items.iter().enumerate().map(|(i, item)| tool_call(&format!("{path}[{i}]"), item)).collect()
}

fn tool_call(path: &str, value: &Value) -> Result<ToolCall, ApiError> {
    let Value::Object(object) = value else { return Err(wrong_type(path.to_owned(), "an object", value)) };
    let fields = Fields::new(object, format!("{path}."));
    fields.refuse(Place::ToolCall)?;
    let id = short_text(&fields, "id")?.ok_or_else(|| missing(fields.path("id"), "a string is expected"))?;
    let function =
        fields.object("function")?.ok_or_else(|| missing(fields.path("function"), "an object is expected"))?;
    function.refuse(Place::Function)?;
    let name = short_text(&function, "name")?.ok_or_else(|| missing(function.path("name"), "a string is expected"))?;
    let arguments = match function.get("arguments") {
        None => return Err(missing(function.path("arguments"), "a string of JSON is expected")),
        Some(Value::String(text)) => text.clone(),
        // As llama-server takes them.
        Some(object @ Value::Object(_)) => object.to_string(),
        Some(other) => return Err(wrong_type(function.path("arguments"), "a string of JSON", other)),
    };
    Ok(ToolCall { id, name, arguments })
}

/// A turn's text: a refusal is what the model said.
fn said(content: String, refusal: Option<&str>) -> String {
    match refusal {
        Some(refusal) if content.is_empty() => refusal.to_owned(),
        Some(refusal) => format!("{content}\n{refusal}"),
        None => content,
    }
}

/// What is said. An assistant's turn may be without text, as clients repeat one that only called tools, and so may be what a
/// tool returned.
fn content(fields: &Fields<'_>, role: Role) -> Result<String, ApiError> {
    let expected = "a string or an array of text parts";
    let path = fields.path("content");
    let value = match fields.get("content") {
        Some(Value::Array(parts)) if parts.is_empty() && matches!(role, Role::Assistant | Role::Tool) => {
            return Ok(String::new());
        }
        None if role == Role::Assistant => return Ok(String::new()),
        None => return Err(missing(path, &format!("{expected} is expected"))),
        Some(value) => value,
    };
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) if parts.is_empty() || parts.len() > MAX_CONTENT_PARTS => {
            let n = parts.len();
            Err(wrong_value(path, format_args!("must have 1 to {MAX_CONTENT_PARTS} parts, not {n}")))
        }
        Value::Array(parts) => {
            let texts: Result<Vec<&str>, ApiError> =
                parts.iter().enumerate().map(|(i, part)| text_part(&format!("{path}[{i}]"), part, role)).collect();
            Ok(texts?.join("\n"))
        }
        other => Err(wrong_type(path, expected, other)),
    }
}

fn text_part<'a>(path: &str, value: &'a Value, role: Role) -> Result<&'a str, ApiError> {
    let Value::Object(object) = value else { return Err(wrong_type(path.to_owned(), "an object", value)) };
    let fields = Fields::new(object, format!("{path}."));
    let text = |own: &str, other: &str| {
        // Another kind of part is refused by its kind before by what it has.
        fields.refuse(Place::Part)?;
        if fields.get(other).is_some() {
            return Err(wrong_value(fields.path(other), format_args!("may not be given in a part of the type {own}")));
        }
        fields.string(own)?.ok_or_else(|| missing(fields.path(own), "a string is expected"))
    };
    match fields.string("type")? {
        Some("text") => text("text", "refusal"),
        Some("refusal") if role == Role::Assistant => text("refusal", "text"),
        Some(_) => Err(ApiError::invalid(
            Some(Cow::Owned(fields.path("type"))),
            ErrorCode::UnsupportedContent,
            format!("`{}` must be \"text\": this server takes no images, audio or files yet.", fields.path("type")),
        )),
        None => Err(missing(fields.path("type"), "\"text\" is expected")),
    }
}

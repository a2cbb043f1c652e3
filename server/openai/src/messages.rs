//! The messages of a chat: who says what, and which tools were called and answered.
//!
//! What is read here reaches the model's template whole. Absent: images, sound and files, and what a template makes of a
//! field.

use std::borrow::Cow;
use std::collections::HashMap;

use gantry_core::{ApiError, ErrorCode, Message, Part, Role, ToolCall};
use serde_json::{Map, Value};

use crate::fields::{Fields, missing, wrong_type, wrong_value};
use crate::limits::{MAX_CONTENT_PARTS, MAX_MESSAGES, MAX_NAME_BYTES, MAX_TOOL_CALLS};
use crate::parameters::Place;

/// Reads the word for a role; `developer` is the newer one for `system`, and templates know only this.
fn role(word: &str) -> Option<Role> {
    match word {
        "system" | "developer" => Some(Role::System),
        "user" => Some(Role::User),
        "assistant" => Some(Role::Assistant),
        "tool" => Some(Role::Tool),
        _ => None,
    }
}

/// Reads the `messages` of a chat that is written down elsewhere than in a request.
///
/// # Errors
/// Names the field that is missing, of the wrong type or not supported.
pub fn parse_messages(value: Value) -> Result<Vec<Message>, ApiError> {
    take_messages(&mut Map::from_iter([("messages".to_owned(), value)]))
}

/// Takes the messages out of a request: their texts may be large, and are moved, not copied.
pub(crate) fn take_messages(request: &mut Map<String, Value>) -> Result<Vec<Message>, ApiError> {
    let param = || "messages".to_owned();
    let is_given = Fields::new(request, "").get("messages").is_some();
    let items = match request.get_mut("messages").filter(|_| is_given).map(Value::take) {
        Some(Value::Array(items)) => items,
        Some(other) => return Err(wrong_type(param(), "an array of messages", &other)),
        None => return Err(missing(param(), "an array of messages is expected")),
    };
    if items.is_empty() || items.len() > MAX_MESSAGES {
        let n = items.len();
        return Err(wrong_value(param(), format_args!("must have 1 to {MAX_MESSAGES} messages, not {n}")));
    }
    let mut messages = Vec::with_capacity(items.len());
    let mut calls = HashMap::new();
    for (i, item) in items.into_iter().enumerate() {
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

fn message(index: usize, value: Value) -> Result<Message, ApiError> {
    let path = format!("messages[{index}]");
    let Value::Object(mut object) = value else { return Err(wrong_type(path, "an object", &value)) };
    let content = object.get_mut("content").map(Value::take).filter(|content| !content.is_null());
    let fields = Fields::new(&object, format!("{path}."));
    fields.refuse(Place::Message)?;
    let word = fields
        .string("role")?
        .ok_or_else(|| missing(fields.path("role"), "system, developer, user, assistant or tool is expected"))?;
    let role = role(word).ok_or_else(|| {
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
        content: said(parts(content, fields.path("content"), role)?, refusal),
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

/// A turn's parts: a refusal is what the model said, alone where its text is empty.
fn said(mut content: Vec<Part>, refusal: Option<&str>) -> Vec<Part> {
    if let Some(refusal) = refusal {
        if let [only] = content.as_slice()
            && only.as_str().is_empty()
        {
            content.clear();
        }
        content.push(Part::Refusal(refusal.to_owned()));
    }
    content
}

/// What is said. An assistant's turn may be without text, as clients repeat one that only called tools, and so may be what a
/// tool returned.
fn parts(content: Option<Value>, path: String, role: Role) -> Result<Vec<Part>, ApiError> {
    let expected = "a string or an array of text parts";
    match content {
        None if role == Role::Assistant => Ok(Vec::new()),
        None => Err(missing(path, &format!("{expected} is expected"))),
        Some(Value::String(text)) => Ok(vec![Part::Text(text)]),
        Some(Value::Array(parts)) if parts.is_empty() && matches!(role, Role::Assistant | Role::Tool) => Ok(Vec::new()),
        Some(Value::Array(parts)) if parts.is_empty() || parts.len() > MAX_CONTENT_PARTS => {
            let n = parts.len();
            Err(wrong_value(path, format_args!("must have 1 to {MAX_CONTENT_PARTS} parts, not {n}")))
        }
        Some(Value::Array(parts)) => {
            parts.into_iter().enumerate().map(|(i, item)| part(&format!("{path}[{i}]"), item, role)).collect()
        }
        Some(other) => Err(wrong_type(path, expected, &other)),
    }
}

fn part(path: &str, value: Value, role: Role) -> Result<Part, ApiError> {
    let Value::Object(mut object) = value else { return Err(wrong_type(path.to_owned(), "an object", &value)) };
    let fields = Fields::new(&object, format!("{path}."));
    let check = |own: &'static str, other: &str| {
        // Another kind of part is refused by its kind before by what it has.
        fields.refuse(Place::Part)?;
        if fields.get(other).is_some() {
            return Err(wrong_value(fields.path(other), format_args!("may not be given in a part of the type {own}")));
        }
        fields.string(own)?.map(|_| own).ok_or_else(|| missing(fields.path(own), "a string is expected"))
    };
    let kind = match fields.string("type")? {
        Some("text") => check("text", "refusal"),
        Some("refusal") if role == Role::Assistant => check("refusal", "text"),
        Some(_) => Err(ApiError::invalid(
            Some(Cow::Owned(fields.path("type"))),
            ErrorCode::UnsupportedContent,
            format!("`{}` must be \"text\": this server takes no images, audio or files yet.", fields.path("type")),
        )),
        None => Err(missing(fields.path("type"), "\"text\" is expected")),
    }?;
    match (kind, object.get_mut(kind).map(Value::take)) {
        ("text", Some(Value::String(text))) => Ok(Part::Text(text)),
        (_, Some(Value::String(text))) => Ok(Part::Refusal(text)),
        (kind, _) => Err(missing(format!("{path}.{kind}"), "a string is expected")),
    }
}

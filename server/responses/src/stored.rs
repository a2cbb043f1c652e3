//! Responses that are kept: what a later request takes from them, and what is told of them.
//!
//! A response is kept as two values: the object that its client was told, and the items that it answers, those of the responses
//! before it included, each with an id. So one response is all that the next one needs, whatever became of those before.

use std::collections::HashMap;

use gantry_core::{ApiError, ErrorCode};
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::answer::Status;
use crate::id::ResponseId;
use crate::limits::{MAX_RESPONSES_PAGE, RESPONSES_PAGE};
use crate::request::EMPTY_INCLUDES;

/// A response that is kept.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredResponse {
    /// The items that it answers.
    pub input: Vec<Value>,
    /// What its client was told.
    pub response: Value,
}

/// Those that a request refers to and that its client may see.
pub type StoredResponses = HashMap<ResponseId, StoredResponse>;

impl StoredResponse {
    fn output(&self) -> &[Value] {
        self.response["output"].as_array().map(Vec::as_slice).unwrap_or_default()
    }

    fn item(&self, id: &str) -> Option<&Value> {
        self.input.iter().chain(self.output()).find(|item| item["id"] == id)
    }
}

/// What matters of a response to whoever keeps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Progress {
    /// How far it is.
    pub status: Status,
    /// Whether nobody waits for its end on a connection.
    pub background: bool,
}

impl Progress {
    /// Of a response object.
    ///
    /// # Errors
    /// It is none.
    pub fn read(response: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(response)
    }
}

/// A response object of one that was being answered by a server that is gone.
///
/// # Errors
/// It is none.
pub fn abandoned(response: &[u8]) -> Result<Vec<u8>, serde_json::Error> {
    let mut response: Value = serde_json::from_slice(response)?;
    response["status"] = json!(Status::Failed);
    response["error"] = json!({
        "code": "server_error", "message": "The server that answered this response ended before it was done; ask again.",
    });
    serde_json::to_vec(&response)
}

/// What is said of a response that has been deleted.
#[must_use]
pub fn deleted(id: ResponseId) -> Value {
    json!({"id": id.to_string(), "object": "response", "deleted": true})
}

/// The same, for those who describe the server to programs.
pub fn deleted_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object", "required": ["id", "object", "deleted"],
        "properties": {"id": {"type": "string"}, "object": {"const": "response"}, "deleted": {"const": true}},
    })
}

/// A page of items, for those who describe the server to programs.
pub fn page_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object", "required": ["object", "data", "first_id", "last_id", "has_more"],
        "properties": {
            "object": {"const": "list"}, "data": {"type": "array", "items": {"type": "object"}},
            "first_id": {"type": ["string", "null"]}, "last_id": {"type": ["string", "null"]},
            "has_more": {"type": "boolean"},
        },
    })
}

/// The parameters of a question for a response, by their names.
#[must_use]
pub fn retrieval_parameters() -> Vec<(&'static str, Value)> {
    vec![
        ("stream", json!({"const": "false"})),
        ("include_obfuscation", json!({"type": "string"})),
        ("include", json!({"enum": EMPTY_INCLUDES})),
    ]
}

/// Those of a question for a page of items.
#[must_use]
pub fn page_parameters() -> Vec<(&'static str, Value)> {
    vec![
        ("limit", json!({"type": "integer", "minimum": 1, "maximum": MAX_RESPONSES_PAGE, "default": RESPONSES_PAGE})),
        ("order", json!({"enum": ["asc", "desc"], "default": "desc"})),
        ("after", json!({"type": "string"})),
        ("include", json!({"enum": EMPTY_INCLUDES})),
    ]
}

/// The items that stand before those of a request, of the response that it goes on from.
pub(crate) fn history(previous: ResponseId, stored: Option<StoredResponse>) -> Result<Vec<Value>, ApiError> {
    const PARAM: &str = "previous_response_id";
    let Some(StoredResponse { mut input, mut response }) = stored else {
        let message =
            format!("Previous response with id '{previous}' not found: it was deleted, has expired, or never was.");
        return Err(ApiError::invalid(Some(PARAM.into()), ErrorCode::PreviousResponseNotFound, message));
    };
    let status = response["status"].as_str().unwrap_or_default();
    if ![Status::Completed, Status::Incomplete].iter().any(|goes_on| goes_on.word() == status) {
        let message =
            format_args!("names a response that is {status}, and only one that is completed or incomplete goes on");
        return Err(ApiError::wrong_value(PARAM, message));
    }
    if let Value::Array(output) = response["output"].take() {
        input.extend(output);
    }
    Ok(input)
}

/// The id of an item that stands for another one.
pub(crate) fn reference(item: &Value) -> Option<&str> {
    let item = item.as_object()?;
    let is_reference = match item.get("type") {
        None | Some(Value::Null) => !item.contains_key("role"),
        Some(kind) => kind == "item_reference",
    };
    item.get("id").filter(|_| is_reference)?.as_str()
}

/// The item that one of a request stands for.
pub(crate) fn referenced(place: usize, id: &str, stored: &StoredResponses) -> Result<Value, ApiError> {
    // It may be among the items of another one that is there, where its own was deleted.
    let own = ResponseId::of_item(id).and_then(|own| stored.get(&own));
    let item = own.into_iter().chain(stored.values()).find_map(|response| response.item(id));
    item.cloned().ok_or_else(|| {
        let what = format_args!(
            "must be that of an item that a stored response has, and {id:?} is none; send the item itself"
        );
        ApiError::wrong_value(format!("input[{place}].id"), what)
    })
}

/// An item as it is kept: with its type, an id and a status, and what a message says as parts.
pub(crate) fn kept(mut item: Value, response: ResponseId, place: usize) -> Value {
    let Some(object) = item.as_object_mut() else { return item };
    let mut complete = |name: &str, value: String| {
        let given = object.entry(name).or_insert(Value::Null);
        if given.is_null() {
            *given = Value::String(value);
        }
        given.as_str().unwrap_or_default().to_owned()
    };
    let kind = complete("type", "message".to_owned());
    let prefix = match kind.as_str() {
        "message" => "msg",
        "function_call" => "fc",
        "function_call_output" => "fco",
        "custom_tool_call" => "ctc",
        "custom_tool_call_output" => "ctco",
        _ => "rs",
    };
    complete("id", format!("{prefix}_{}_i{place}", response.digits()));
    complete("status", "completed".to_owned());
    if kind == "message"
        && let Some(text) = object.get("content").and_then(Value::as_str)
    {
        let part = match object.get("role").and_then(Value::as_str) {
            Some("assistant") => json!({"type": "output_text", "text": text, "annotations": []}),
            _ => json!({"type": "input_text", "text": text}),
        };
        object.insert("content".to_owned(), json!([part]));
    }
    item
}

/// Looks whether a question for a response asks for what there is.
///
/// # Errors
/// Names the parameter that it may not have.
pub fn check_retrieval<'a>(query: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<(), ApiError> {
    for (name, value) in query {
        match (name, value) {
            ("stream", "false") | ("include_obfuscation", _) => {}
            ("include" | "include[]", value) => check_include(name, value)?,
            ("stream" | "starting_after", _) => {
                let what = "is not supported by this server: events are not kept; ask again until `status` is final";
                return Err(ApiError::unsupported_parameter(name.to_owned(), what));
            }
            _ => return Err(unknown(name)),
        }
    }
    Ok(())
}

/// A page of the items that a response answers, as the parameters of the question say.
///
/// # Errors
/// Names the parameter that is wrong.
pub fn page<'a>(mut items: Vec<Value>, query: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Value, ApiError> {
    let (mut limit, mut is_ascending, mut after) = (RESPONSES_PAGE, false, None);
    for (name, value) in query {
        match name {
            "limit" => {
                let number = value.parse().ok().filter(|number| (1..=MAX_RESPONSES_PAGE).contains(number));
                let wrong = || ApiError::wrong_value("limit", format_args!("must be from 1 to {MAX_RESPONSES_PAGE}"));
                limit = number.ok_or_else(wrong)?;
            }
            "order" => match value {
                "asc" => is_ascending = true,
                "desc" => is_ascending = false,
                _ => return Err(ApiError::wrong_value("order", "must be asc or desc")),
            },
            "after" => after = Some(value),
            "include" | "include[]" => check_include(name, value)?,
            _ => return Err(unknown(name)),
        }
    }
    if !is_ascending {
        items.reverse();
    }
    if let Some(after) = after {
        let Some(at) = items.iter().position(|item| item["id"] == after) else {
            return Err(ApiError::wrong_value("after", "must be the id of one of the items"));
        };
        items.drain(..=at);
    }
    let has_more = items.len() > limit;
    items.truncate(limit);
    let id = |item: Option<&Value>| item.map(|item| item["id"].clone());
    let (first_id, last_id) = (id(items.first()), id(items.last()));
    Ok(json!({"object": "list", "data": items, "first_id": first_id, "last_id": last_id, "has_more": has_more}))
}

fn check_include(name: &str, value: &str) -> Result<(), ApiError> {
    if EMPTY_INCLUDES.contains(&value) {
        return Ok(());
    }
    Err(ApiError::unsupported_parameter(
        name.to_owned(),
        format_args!("may not be {value:?} on this server; leave it out"),
    ))
}

fn unknown(name: &str) -> ApiError {
    let message = format!("`{name}` is no parameter of this address; leave it out.");
    ApiError::invalid(Some(name.to_owned().into()), ErrorCode::UnknownParameter, message)
}

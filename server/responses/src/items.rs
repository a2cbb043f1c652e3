//! The items of an input: messages, calls of tools and their results, thoughts; and what they come to as messages of a chat.

use std::collections::HashSet;

use gantry_core::{ApiError, Message, Part, Role, TextOr, ToolCall, from_typed_objects};
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use crate::limits::{MAX_RESPONSES_ITEMS, MAX_RESPONSES_PARTS};

from_typed_objects!(Item, Thought, Said);

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "ResponseInputItem", tag = "type")]
#[serde(remote = "Self", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Item {
    Message {
        role: Speaker,
        #[schemars(with = "TextOr<Vec<Said>>")]
        content: Value,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "id")]
        _id: IgnoredAny,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "status")]
        _status: IgnoredAny,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "phase")]
        _phase: IgnoredAny,
    },
    FunctionCall {
        call_id: String,
        name: String,
        arguments: String,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "id")]
        _id: IgnoredAny,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "status")]
        _status: IgnoredAny,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "namespace")]
        _namespace: IgnoredAny,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "caller")]
        _caller: IgnoredAny,
    },
    FunctionCallOutput {
        call_id: String,
        #[schemars(with = "TextOr<Vec<Said>>")]
        output: Value,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "id")]
        _id: IgnoredAny,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "status")]
        _status: IgnoredAny,
        /// Says of the call what the call says.
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "name")]
        _name: IgnoredAny,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "namespace")]
        _namespace: IgnoredAny,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "caller")]
        _caller: IgnoredAny,
    },
    /// A call of a tool that takes a text: to the model one of a function whose only argument, `input`, that is.
    CustomToolCall {
        call_id: String,
        name: String,
        input: String,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "id")]
        _id: IgnoredAny,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "status")]
        _status: IgnoredAny,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "namespace")]
        _namespace: IgnoredAny,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "caller")]
        _caller: IgnoredAny,
    },
    CustomToolCallOutput {
        call_id: String,
        #[schemars(with = "TextOr<Vec<Said>>")]
        output: Value,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "id")]
        _id: IgnoredAny,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "status")]
        _status: IgnoredAny,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "caller")]
        _caller: IgnoredAny,
    },
    Reasoning {
        content: Option<Vec<Thought>>,
        summary: Option<Vec<Thought>>,
        /// Nobody here can read it, and none is ever given.
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "encrypted_content")]
        _encrypted_content: IgnoredAny,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "id")]
        _id: IgnoredAny,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "status")]
        _status: IgnoredAny,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[schemars(rename = "ResponseRole")]
#[serde(rename_all = "lowercase")]
pub(crate) enum Speaker {
    User,
    Assistant,
    System,
    Developer,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "ResponseThought", tag = "type")]
#[serde(remote = "Self", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Thought {
    SummaryText { text: String },
    ReasoningText { text: String },
}

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "ResponseInputPart", tag = "type")]
#[serde(remote = "Self", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Said {
    InputText {
        text: String,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "prompt_cache_breakpoint")]
        _prompt_cache_breakpoint: IgnoredAny,
    },
    OutputText {
        text: String,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "annotations")]
        _annotations: IgnoredAny,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "logprobs")]
        _logprobs: IgnoredAny,
    },
    Refusal {
        refusal: String,
    },
}

/// An item as a request has it: only ever described, never made.
#[derive(JsonSchema)]
#[schemars(untagged, inline)]
#[allow(dead_code)]
pub(crate) enum GivenItem {
    Item(Item),
    Reference(Reference),
}

/// One of an item that is kept.
#[derive(JsonSchema)]
#[schemars(rename = "ResponseItemReference", deny_unknown_fields)]
#[allow(dead_code)]
pub(crate) struct Reference {
    #[schemars(rename = "type", extend("const" = "item_reference"))]
    kind: String,
    id: String,
}

/// The types of items and of parts that other servers take, with what to do instead.
const OTHER_TYPES: &[(&[&str], &str)] = &[
    (&["input_image"], "this server takes no images"),
    (&["input_file"], "this server takes no files"),
    (&["input_audio"], "this server takes no audio"),
    (&["item_reference"], "nothing is stored here (--response-store); send the item itself"),
    (
        &[
            "web_search_call",
            "file_search_call",
            "code_interpreter_call",
            "image_generation_call",
            "computer_call",
            "computer_call_output",
            "mcp_list_tools",
            "mcp_approval_request",
            "mcp_approval_response",
            "mcp_call",
            "tool_search_call",
            "tool_search_output",
            "program",
            "program_output",
        ],
        "this server runs no tools; leave it out, or say in a message what came of it",
    ),
    (
        &[
            "local_shell_call",
            "local_shell_call_output",
            "shell_call",
            "shell_call_output",
            "apply_patch_call",
            "apply_patch_call_output",
        ],
        "this server knows no tool by its type; send a function_call, and what came of it as function_call_output",
    ),
    (&["additional_tools"], "send them in `tools`"),
    (
        &["compaction", "compaction_trigger", "context_compaction"],
        "this server sums up no conversations; send the items themselves",
    ),
];

/// The items of an input, of which a text is one.
pub(crate) fn items(input: Value) -> Result<Vec<Value>, ApiError> {
    match input {
        Value::Null => Err(ApiError::missing("input", "a text or an array of items is expected")),
        Value::String(text) => Ok(vec![json!({"type": "message", "role": "user", "content": text})]),
        Value::Array(items) if items.is_empty() => Err(ApiError::wrong_value("input", "must have an item")),
        Value::Array(items) => Ok(items),
        _ => Err(ApiError::wrong_value("input", "must be a text or an array of items")),
    }
}

/// What items come to, with instructions before them and then those of the responses before.
pub(crate) fn messages(
    instructions: Option<String>,
    before: Vec<Value>,
    items: Vec<Value>,
) -> Result<Vec<Message>, ApiError> {
    let mut turns = Turns::default();
    if let Some(text) = instructions.filter(|text| !text.is_empty()) {
        turns.messages.push(Message::text(Role::System, text));
    }
    let n = before.len() + items.len();
    if n > MAX_RESPONSES_ITEMS {
        let message =
            format_args!("must have at most {MAX_RESPONSES_ITEMS} items, not {n}, those of responses before included");
        return Err(ApiError::wrong_value("input", message));
    }
    let before = before.into_iter().enumerate().map(|(i, item)| (format!("previous_response_id.input[{i}]"), item));
    let own = items.into_iter().enumerate().map(|(i, item)| (format!("input[{i}]"), item));
    for (path, item) in before.chain(own) {
        turns.push(&path, read_item(&path, item)?)?;
    }
    Ok(turns.messages)
}

/// The messages that items have come to.
#[derive(Default)]
struct Turns {
    messages: Vec<Message>,
    /// The ids of calls that have no output yet.
    open_calls: HashSet<String>,
    /// What was thought before the next turn of the assistant's.
    thought: String,
}

impl Turns {
    fn push(&mut self, path: &str, item: Item) -> Result<(), ApiError> {
        match item {
            Item::Message { role, content, .. } => {
                let role = match role {
                    Speaker::User => Role::User,
                    Speaker::Assistant => Role::Assistant,
                    Speaker::System | Speaker::Developer => Role::System,
                };
                let content = parts(&format!("{path}.content"), content, role)?;
                let reasoning = self.take_thought(role);
                match self.calling_turn().filter(|_| role == Role::Assistant) {
                    Some(turn) => {
                        turn.content.extend(content);
                        add_thought(turn, reasoning);
                    }
                    None => self.messages.push(Message { content, reasoning, ..Message::text(role, "") }),
                }
                Ok(())
            }
            Item::FunctionCall { call_id, name, arguments, .. } => {
                self.call(path, ToolCall { id: call_id, name, arguments })
            }
            Item::CustomToolCall { call_id, name, input, .. } => {
                self.call(path, ToolCall { id: call_id, name, arguments: json!({"input": input}).to_string() })
            }
            Item::FunctionCallOutput { call_id, output, .. } | Item::CustomToolCallOutput { call_id, output, .. } => {
                self.output(path, call_id, output)
            }
            Item::Reasoning { content, summary, .. } => {
                let texts = content.filter(|content| !content.is_empty()).or(summary);
                self.thought.extend(texts.into_iter().flatten().map(|thought| match thought {
                    Thought::SummaryText { text } | Thought::ReasoningText { text } => text,
                }));
                Ok(())
            }
        }
    }

    fn call(&mut self, path: &str, call: ToolCall) -> Result<(), ApiError> {
        if call.id.is_empty() || !self.open_calls.insert(call.id.clone()) {
            return Err(ApiError::wrong_value(
                format!("{path}.call_id"),
                "must be one that no other call without an output has",
            ));
        }
        let reasoning = self.take_thought(Role::Assistant);
        let is_of_turn =
            |last: &&mut Message| last.role == Role::Assistant && (reasoning.is_none() || !last.tool_calls.is_empty());
        // What is said and called in one turn is one message, as templates have it.
        match self.messages.last_mut().filter(is_of_turn) {
            Some(turn) => {
                turn.tool_calls.push(call);
                add_thought(turn, reasoning);
            }
            None => {
                let turn = Message {
                    content: Vec::new(),
                    reasoning,
                    tool_calls: vec![call],
                    ..Message::text(Role::Assistant, "")
                };
                self.messages.push(turn);
            }
        }
        Ok(())
    }

    fn output(&mut self, path: &str, call_id: String, output: Value) -> Result<(), ApiError> {
        if !self.open_calls.remove(&call_id) {
            let what = "must be that of a call before it that has no output yet";
            return Err(ApiError::wrong_value(format!("{path}.call_id"), what));
        }
        let content = parts(&format!("{path}.output"), output, Role::Tool)?;
        self.messages.push(Message { content, tool_call_id: Some(call_id), ..Message::text(Role::Tool, "") });
        Ok(())
    }

    /// The assistant's turn, where it has called and no output has come: what it says and thinks then is of that turn. Templates
    /// have the outputs follow the message with the calls.
    fn calling_turn(&mut self) -> Option<&mut Message> {
        self.messages.last_mut().filter(|last| !last.tool_calls.is_empty())
    }

    /// What was thought before a turn of the assistant's; before others it is of no use.
    fn take_thought(&mut self, role: Role) -> Option<String> {
        let thought = std::mem::take(&mut self.thought);
        Some(thought).filter(|text| role == Role::Assistant && !text.is_empty())
    }
}

fn add_thought(turn: &mut Message, thought: Option<String>) {
    if let Some(thought) = thought {
        turn.reasoning.get_or_insert_default().push_str(&thought);
    }
}

/// A message may be without a type.
fn read_item(path: &str, mut item: Value) -> Result<Item, ApiError> {
    if let Some(object) = item.as_object_mut()
        && object.get("type").is_none_or(Value::is_null)
        && object.contains_key("role")
    {
        object.insert("type".to_owned(), "message".into());
    }
    let parts = ["content", "output"].iter().filter_map(|name| Some((*name, item.get(*name)?.as_array()?)));
    let others = parts.flat_map(|(name, parts)| {
        parts.iter().enumerate().map(move |(i, part)| (format!("{path}.{name}[{i}].type"), part.get("type")))
    });
    for (place, kind) in std::iter::once((format!("{path}.type"), item.get("type"))).chain(others) {
        let Some(kind) = kind.and_then(Value::as_str) else { continue };
        if let Some((_, instead)) = OTHER_TYPES.iter().find(|(names, _)| names.contains(&kind)) {
            return Err(ApiError::unsupported_parameter(place, format_args!("may not be {kind:?}: {instead}")));
        }
    }
    gantry_core::read_json(item, path)
}

/// A text, or parts.
fn parts(path: &str, content: Value, role: Role) -> Result<Vec<Part>, ApiError> {
    let said = match content {
        Value::String(text) => return Ok(vec![Part::Text(text)]),
        Value::Array(said) => said,
        _ => return Err(ApiError::wrong_value(path.to_owned(), "must be a text or an array of parts")),
    };
    if said.len() > MAX_RESPONSES_PARTS {
        let message = format_args!("must have at most {MAX_RESPONSES_PARTS} parts, not {}", said.len());
        return Err(ApiError::wrong_value(path.to_owned(), message));
    }
    let part = |(i, said): (usize, Value)| match (gantry_core::read_json(said, &format!("{path}[{i}]"))?, role) {
        (Said::InputText { text, .. } | Said::OutputText { text, .. }, _) => Ok(Part::Text(text)),
        (Said::Refusal { refusal }, Role::Assistant) => Ok(Part::Refusal(refusal)),
        (Said::Refusal { .. }, _) => {
            Err(ApiError::wrong_value(format!("{path}[{i}].type"), "may be refusal in an assistant's message alone"))
        }
    };
    said.into_iter().enumerate().map(part).collect()
}

//! `POST /v1/messages` and `/v1/messages/count_tokens`: from a body to what is asked.

use std::collections::HashSet;

use gantry_core::{
    ApiError, Chat, Constraint, ContinuationFault, Extent, GenerationParams, MAX_STOP_BYTES, MAX_STOP_STRINGS,
    MAX_TOOLS, Message, Part, Prompt, PromptForm, Role, TextRequest, ToolCall, check_continuation, from_objects,
    from_typed_objects, read_body, read_integer, read_integer_of, with_name_here,
};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};

use crate::answer::{CountEncoder, MessageEncoder};
use crate::content::{Block, Content};
use crate::limits::{MAX_MESSAGES_BLOCKS, MAX_MESSAGES_MODEL_BYTES, MAX_MESSAGES_TOKENS, MAX_MESSAGES_TURNS};
use crate::tools::{GivenChoice, GivenTool, choice, read_tools};

from_objects!(Body, Turn, OutputConfig, ContextManagement);
from_typed_objects!(Thinking, Format, ContextEdit);

/// The first line of the result of a call that failed: templates have no other place that says so.
const FAILED: &str = "Error:";
/// What OpenAI's chats call fields, and what is to be said of them.
const NAMES_OF_CHATS: [(&str, &str); 5] = [
    ("max_completion_tokens", "it is `max_tokens` here"),
    ("stop", "it is `stop_sequences` here, an array of strings"),
    ("response_format", "it is `output_config.format` here"),
    ("reasoning_effort", "it is `output_config.effort` here"),
    ("user", "it is `metadata.user_id` here"),
];

/// What both addresses take.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "MessagesRequest")]
#[serde(remote = "Self", deny_unknown_fields)]
struct Body {
    #[schemars(length(max = MAX_MESSAGES_MODEL_BYTES))]
    model: Option<String>,
    #[schemars(length(min = 1, max = MAX_MESSAGES_TURNS))]
    messages: Vec<Turn>,
    #[serde(default)]
    system: Content,
    #[schemars(range(min = 1, max = MAX_MESSAGES_TOKENS))]
    #[serde(default, deserialize_with = "read_integer_of::<1, MAX_MESSAGES_TOKENS, _>")]
    max_tokens: Option<u32>,
    #[schemars(length(max = MAX_STOP_STRINGS), inner(length(min = 1, max = MAX_STOP_BYTES)))]
    stop_sequences: Option<Vec<String>>,
    stream: Option<bool>,
    #[schemars(range(min = 0, max = 1))]
    temperature: Option<f32>,
    #[schemars(range(max = 1), extend("exclusiveMinimum" = 0))]
    top_p: Option<f32>,
    #[serde(default, deserialize_with = "read_integer")]
    top_k: Option<u32>,
    #[schemars(with = "Option<Vec<GivenTool>>", length(max = MAX_TOOLS))]
    tools: Option<Vec<Value>>,
    tool_choice: Option<GivenChoice>,
    thinking: Option<Thinking>,
    /// Names the end user.
    #[schemars(with = "Option<Value>")]
    #[serde(default)]
    metadata: Value,
    /// Prefixes are found again without hints.
    #[schemars(with = "Option<Value>")]
    #[serde(default, rename = "cache_control")]
    _cache_control: IgnoredAny,
    #[schemars(extend("enum" = ["auto", "standard_only", null]))]
    service_tier: Option<String>,
    #[schemars(with = "Option<()>")]
    container: Option<Value>,
    #[serde(default, rename = "context_management")]
    _context_management: Option<ContextManagement>,
    #[schemars(length(max = 0))]
    mcp_servers: Option<Vec<Value>>,
    output_config: Option<OutputConfig>,
    /// An earlier name of the `format` of `output_config`.
    output_format: Option<Format>,
    #[schemars(with = "Option<()>")]
    inference_geo: Option<Value>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "MessageParam")]
#[serde(remote = "Self", deny_unknown_fields)]
struct Turn {
    role: Speaker,
    content: Content,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[schemars(rename = "MessageRole")]
#[serde(rename_all = "lowercase")]
enum Speaker {
    User,
    Assistant,
    /// Instructions from here on, as agents give them in mid-conversation.
    System,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "MessagesThinking", tag = "type")]
#[serde(remote = "Self", rename_all = "snake_case", deny_unknown_fields)]
enum Thinking {
    Enabled {
        /// The most tokens that are thought.
        #[serde(default, deserialize_with = "read_integer")]
        budget_tokens: Option<u32>,
        #[serde(default, rename = "display")]
        _display: Option<Display>,
    },
    Disabled {},
    Adaptive {
        #[serde(default, rename = "display")]
        _display: Option<Display>,
    },
}

/// What the answer is to be like.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "MessagesOutputConfig")]
#[serde(remote = "Self", deny_unknown_fields)]
struct OutputConfig {
    effort: Option<Effort>,
    format: Option<Format>,
}

/// How much is thought, where the model's template knows such words.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[schemars(rename = "MessagesEffort")]
#[serde(rename_all = "snake_case")]
enum Effort {
    Low,
    Medium,
    High,
    Xhigh,
    Max,
}

impl Effort {
    /// The word that templates know; above high they know none.
    fn as_str(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High | Self::Xhigh | Self::Max => "high",
        }
    }
}

/// The form of the answer.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "MessagesFormat", tag = "type")]
#[serde(remote = "Self", rename_all = "snake_case", deny_unknown_fields)]
enum Format {
    JsonSchema {
        /// A JSON schema.
        schema: Map<String, Value>,
    },
}

/// What of earlier turns is left out: nothing is here, which is what may be asked.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "MessagesContextManagement")]
#[serde(remote = "Self", deny_unknown_fields)]
struct ContextManagement {
    #[schemars(length(max = MAX_MESSAGES_BLOCKS))]
    #[serde(default, rename = "edits")]
    _edits: Option<Vec<ContextEdit>>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "MessagesContextEdit", tag = "type")]
#[serde(remote = "Self", deny_unknown_fields)]
enum ContextEdit {
    /// Of earlier thoughts all are kept, as far as the model's template shows them.
    #[serde(rename = "clear_thinking_20251015")]
    ClearThinking {
        #[serde(rename = "keep")]
        _keep: KeepAll,
    },
}

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "MessagesKeptThoughts")]
#[serde(rename_all = "snake_case")]
enum KeepAll {
    All,
}

/// How thoughts are told: as they are, be they ever so long, which who asks for a summary is told as well. To leave them out is not
/// offered.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "MessagesThinkingDisplay")]
#[serde(rename_all = "snake_case")]
enum Display {
    Summarized,
}

/// A body of `/v1/messages`, for those who describe the server to programs.
pub fn messages_schema(generator: &mut SchemaGenerator) -> Schema {
    let given = json!({"required": ["max_tokens"], "properties": {"max_tokens": {"type": "integer"}}});
    json_schema!({"allOf": [generator.subschema_for::<Body>(), given]})
}

/// A body of `/v1/messages/count_tokens`.
pub fn count_tokens_schema(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<Body>()
}

/// Reads and checks a body of `/v1/messages`.
///
/// # Errors
/// Names the first field that is missing, of the wrong type, out of range, unknown or not supported.
pub fn decode_messages(body: &[u8]) -> Result<(TextRequest, MessageEncoder), ApiError> {
    let body = read(body)?;
    let Some(max_tokens) = body.max_tokens else {
        return Err(ApiError::missing("max_tokens", "the most tokens that the answer may have is expected"));
    };
    if !(1..=MAX_MESSAGES_TOKENS).contains(&max_tokens) {
        return Err(ApiError::wrong_value(
            "max_tokens",
            format_args!("must be from 1 to {MAX_MESSAGES_TOKENS}, not {max_tokens}"),
        ));
    }
    let params = params(&body, max_tokens)?;
    let (model, is_streamed) = (model(&body)?, body.stream.unwrap_or(false));
    let conversation = conversation(&body);
    let prompts = vec![Prompt::chat(chat(body)?)];
    let (choices, best_of) = (1, 1);
    let request =
        TextRequest { model, prompts, prompt_param: "messages", params, choices, best_of, is_streamed, conversation };
    Ok((request, MessageEncoder))
}

/// Reads and checks a body of `/v1/messages/count_tokens`.
///
/// # Errors
/// As [`decode_messages`].
pub fn decode_count_tokens(body: &[u8]) -> Result<(TextRequest, CountEncoder), ApiError> {
    let body = read(body)?;
    let params = GenerationParams { extent: Extent::Prompt(PromptForm::Count), ..GenerationParams::default() };
    let model = model(&body)?;
    let conversation = conversation(&body);
    let prompts = vec![Prompt::chat(chat(body)?)];
    let (choices, best_of, is_streamed) = (1, 1, false);
    let request =
        TextRequest { model, prompts, prompt_param: "messages", params, choices, best_of, is_streamed, conversation };
    Ok((request, CountEncoder))
}

/// What the body calls the conversation's user.
fn conversation(body: &Body) -> Option<String> {
    let user = body.metadata.get("user_id").and_then(Value::as_str);
    user.filter(|user| !user.is_empty()).map(str::to_owned)
}

fn read(body: &[u8]) -> Result<Body, ApiError> {
    let body: Body = read_body(body).map_err(|error| with_name_here(error, &NAMES_OF_CHATS))?;
    for (name, is_given) in [
        ("container", body.container.is_some()),
        ("mcp_servers", body.mcp_servers.as_ref().is_some_and(|servers| !servers.is_empty())),
        ("inference_geo", body.inference_geo.is_some()),
        ("service_tier", !matches!(body.service_tier.as_deref(), None | Some("auto" | "standard_only"))),
    ] {
        if is_given {
            return Err(ApiError::unsupported_parameter(name, "is not supported by this server; leave it out"));
        }
    }
    if body.output_format.is_some() && body.output_config.as_ref().is_some_and(|config| config.format.is_some()) {
        let what = "asks for what `output_config.format` asks for, which is its later name; send that alone";
        return Err(ApiError::wrong_value("output_format", what));
    }
    Ok(body)
}

fn model(body: &Body) -> Result<Option<String>, ApiError> {
    match &body.model {
        Some(model) if model.len() > MAX_MESSAGES_MODEL_BYTES => {
            let n = model.len();
            Err(ApiError::wrong_value(
                "model",
                format_args!("must have at most {MAX_MESSAGES_MODEL_BYTES} bytes, not {n}"),
            ))
        }
        model => Ok(model.clone().filter(|model| !model.is_empty())),
    }
}

fn params(body: &Body, max_tokens: u32) -> Result<GenerationParams, ApiError> {
    let in_unit = |name: &'static str, value: Option<f32>, low: f32, range: &str| match value {
        Some(value) if !(low..=1.0).contains(&value) => {
            Err(ApiError::wrong_value(name, format_args!("must be {range}, not {value}")))
        }
        value => Ok(value),
    };
    let stop = body.stop_sequences.clone().unwrap_or_default();
    if stop.len() > MAX_STOP_STRINGS {
        let n = stop.len();
        return Err(ApiError::wrong_value(
            "stop_sequences",
            format_args!("must have at most {MAX_STOP_STRINGS} strings, not {n}"),
        ));
    }
    for (i, stop) in stop.iter().enumerate() {
        if stop.is_empty() || stop.len() > MAX_STOP_BYTES {
            let n = stop.len();
            let message = format_args!("must have 1 to {MAX_STOP_BYTES} bytes, not {n}");
            return Err(ApiError::wrong_value(format!("stop_sequences[{i}]"), message));
        }
    }
    let defaults = GenerationParams::default();
    let format = body.output_config.as_ref().and_then(|config| config.format.as_ref());
    let (format, constraint_param) = match (format, &body.output_format) {
        (Some(format), _) => (Some(format), "output_config.format.schema"),
        (None, Some(format)) => (Some(format), "output_format.schema"),
        (None, None) => (None, ""),
    };
    let constraint = format.map(|Format::JsonSchema { schema }| {
        let schema = Value::Object(schema.clone()).to_string();
        Constraint::JsonSchema { schema, strict: false }
    });
    Ok(GenerationParams {
        constraint_param: constraint_param.to_owned(),
        constraint,
        max_tokens: Some(max_tokens),
        temperature: in_unit("temperature", body.temperature, 0.0, "from 0 to 1")?.unwrap_or(1.0),
        top_p: in_unit("top_p", body.top_p, f32::MIN_POSITIVE, "above 0 and at most 1")?.unwrap_or(defaults.top_p),
        top_k: body.top_k.map_or(defaults.top_k, |top_k| i32::try_from(top_k).unwrap_or(i32::MAX)),
        stop,
        ..defaults
    })
}

fn chat(body: Body) -> Result<Chat, ApiError> {
    let Body { messages: turns, system, tools, tool_choice, thinking, output_config, .. } = body;
    if turns.is_empty() || turns.len() > MAX_MESSAGES_TURNS {
        let n = turns.len();
        return Err(ApiError::wrong_value(
            "messages",
            format_args!("must have 1 to {MAX_MESSAGES_TURNS} messages, not {n}"),
        ));
    }
    let last = format!("messages[{}].content", turns.len() - 1);
    let continue_final_message = turns.last().is_some_and(|last| last.role == Speaker::Assistant);
    let mut messages = Vec::with_capacity(turns.len() + 1);
    let system = texts("system", system)?;
    if !system.is_empty() {
        messages.push(Message { content: system, ..Message::text(Role::System, "") });
    }
    let mut open_calls = HashSet::new();
    for (i, turn) in turns.into_iter().enumerate() {
        let path = format!("messages[{i}].content");
        check_blocks(&path, &turn.content)?;
        match turn.role {
            Speaker::User => user(&path, turn.content, &mut open_calls, &mut messages)?,
            Speaker::Assistant => messages.push(assistant(&path, turn.content, &mut open_calls)?),
            Speaker::System => {
                let content = texts(&path, turn.content)?;
                messages.push(Message { content, ..Message::text(Role::System, "") });
            }
        }
    }
    let tools = read_tools(tools.unwrap_or_default())?;
    let (tool_choice, allowed_tools, is_alone) = choice(tool_choice, &tools)?;
    let (thinking, thinking_budget) = match thinking {
        Some(Thinking::Enabled { budget_tokens, .. }) => (Some(true), budget_tokens),
        Some(Thinking::Disabled {}) => (Some(false), None),
        Some(Thinking::Adaptive { .. }) | None => (None, None),
    };
    let parallel_tool_calls = !is_alone;
    let effort = output_config.and_then(|config| config.effort);
    let effort = effort.map(|effort| ("reasoning_effort".to_owned(), json!(effort.as_str()).to_string()));
    let chat = Chat {
        template_variables: effort.into_iter().collect(),
        messages,
        tools,
        tool_choice,
        allowed_tools,
        parallel_tool_calls,
        thinking,
        thinking_budget,
        continue_final_message,
    };
    check_continuation(&chat).map_err(|fault| match fault {
        ContinuationFault::Tools => ApiError::wrong_value("tools", fault),
        ContinuationFault::NotAssistant | ContinuationFault::NoText => ApiError::wrong_value(last, fault),
    })?;
    Ok(chat)
}

/// What a tool returned: texts, and tools that it found, each by its name, since the model is shown all of them.
fn result(path: &str, content: Content) -> Result<Vec<Part>, ApiError> {
    let found = |block| match block {
        Block::ToolReference { tool_name, .. } => Block::text(tool_name),
        block => block,
    };
    texts(path, Content(content.0.into_iter().map(found).collect()))
}

fn check_blocks(path: &str, content: &Content) -> Result<(), ApiError> {
    match content.0.len() {
        0..=MAX_MESSAGES_BLOCKS => Ok(()),
        n => {
            let message = format_args!("must have at most {MAX_MESSAGES_BLOCKS} blocks, not {n}");
            Err(ApiError::wrong_value(path.to_owned(), message))
        }
    }
}

/// Blocks of which each must be text.
fn texts(path: &str, content: Content) -> Result<Vec<Part>, ApiError> {
    check_blocks(path, &content)?;
    let text = |(i, block)| match block {
        Block::Text { text, citations: None, .. } => Ok(Part::Text(text)),
        Block::Text { .. } => {
            Err(ApiError::unsupported_parameter(format!("{path}[{i}].citations"), "are not supported by this server"))
        }
        _ => Err(ApiError::wrong_value(format!("{path}[{i}].type"), "must be text here")),
    };
    content.0.into_iter().enumerate().map(text).collect()
}

/// A user's turn: what tools returned goes first, each as a message of its own, since templates have it so.
fn user(
    path: &str,
    content: Content,
    open_calls: &mut HashSet<String>,
    messages: &mut Vec<Message>,
) -> Result<(), ApiError> {
    if content.0.is_empty() {
        return Err(ApiError::wrong_value(path.to_owned(), "must have a text or a block in a user's message"));
    }
    let mut said = Vec::new();
    for (i, block) in content.0.into_iter().enumerate() {
        let place = |field: &str| format!("{path}[{i}].{field}");
        match block {
            Block::ToolResult { tool_use_id, content, is_error, .. } => {
                if !open_calls.remove(&tool_use_id) {
                    let what = "must be the `id` of a `tool_use` block before it that has no result yet";
                    return Err(ApiError::wrong_value(place("tool_use_id"), what));
                }
                let mut content = result(&place("content"), content)?;
                if is_error == Some(true) {
                    content.insert(0, Part::Text(FAILED.to_owned()));
                }
                messages.push(Message { content, tool_call_id: Some(tool_use_id), ..Message::text(Role::Tool, "") });
            }
            Block::Text { citations: Some(_), .. } => {
                return Err(ApiError::unsupported_parameter(place("citations"), "are not supported by this server"));
            }
            Block::Text { text, .. } => said.push(Part::Text(text)),
            _ => return Err(ApiError::wrong_value(place("type"), "must be text or tool_result in a user's message")),
        }
    }
    if !said.is_empty() {
        messages.push(Message { content: said, ..Message::text(Role::User, "") });
    }
    Ok(())
}

fn assistant(path: &str, content: Content, open_calls: &mut HashSet<String>) -> Result<Message, ApiError> {
    let (mut said, mut reasoning, mut tool_calls) = (Vec::new(), String::new(), Vec::new());
    for (i, block) in content.0.into_iter().enumerate() {
        match block {
            Block::Text { text, .. } => said.push(Part::Text(text)),
            Block::Thinking { thinking, .. } => reasoning.push_str(&thinking),
            // Nobody here can read it, and no model of ours wrote it.
            Block::RedactedThinking { .. } => {}
            Block::ToolUse { id, name, input, .. } => {
                if id.is_empty() || !open_calls.insert(id.clone()) {
                    return Err(ApiError::wrong_value(
                        format!("{path}[{i}].id"),
                        "must be one that no other block has",
                    ));
                }
                tool_calls.push(ToolCall { id, name, arguments: Value::Object(input).to_string() });
            }
            Block::ToolResult { .. } | Block::ToolReference { .. } => {
                return Err(ApiError::wrong_value(
                    format!("{path}[{i}].type"),
                    "must be text, thinking, redacted_thinking or tool_use in an assistant's message",
                ));
            }
        }
    }
    let reasoning = Some(reasoning).filter(|text| !text.is_empty());
    Ok(Message { content: said, reasoning, tool_calls, ..Message::text(Role::Assistant, "") })
}

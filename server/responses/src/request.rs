//! `POST /v1/responses`: from a body to what is asked, with the responses that are kept where it refers to them.

use std::collections::{BTreeMap, BTreeSet};

use gantry_core::{
    ApiError, Chat, Constraint, GenerationParams, MAX_TOOLS, Message, Part, Prompt, Role, TOOL_NAME_PATTERN, TextOr,
    TextRequest, Tool, ToolChoice, ToolsFault, check_tools, from_objects, from_typed_objects, read_body, read_integer,
    read_integer_of, read_json, with_name_here,
};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};

use crate::answer::{Asked, ResponseEncoder};
use crate::id::ResponseId;
use crate::items::{GivenItem, items, messages};
use crate::limits::{
    MAX_RESPONSES_METADATA, MAX_RESPONSES_METADATA_BYTES, MAX_RESPONSES_MODEL_BYTES, MAX_RESPONSES_REFERRED,
    MAX_RESPONSES_REPEATED_BYTES, MAX_RESPONSES_SCHEMA_BYTES, MAX_RESPONSES_TOKENS, MAX_STORED_INPUT_BYTES,
};
use crate::stored::{StoredResponses, history, kept, reference, referenced};

from_objects!(Body, Text, Reasoning, StreamOptions, GivenTool);
from_typed_objects!(Format);

/// The field that says what an answer must look like.
const FORMAT: &str = "text.format";
/// The longest name of a format, in bytes: the answer repeats it.
const MAX_NAME_BYTES: usize = 256;
/// What must be of no schema but that.
const ANY_OBJECT: &str = r#"{"type":"object"}"#;
/// How much is to be thought, in words.
const EFFORTS: [&str; 6] = ["none", "minimal", "low", "medium", "high", "xhigh"];
/// What OpenAI's chats call fields, and what is to be said of them.
const NAMES_OF_CHATS: [(&str, &str); 7] = [
    ("messages", "it is `input` here"),
    ("max_tokens", "it is `max_output_tokens` here"),
    ("max_completion_tokens", "it is `max_output_tokens` here"),
    ("response_format", "it is `text.format` here"),
    ("reasoning_effort", "it is `reasoning.effort` here"),
    ("verbosity", "it is `text.verbosity` here"),
    ("tools[].function", "`name`, `description` and `parameters` stand beside `type` here"),
];
/// What may be asked for beside, and is never there: no item has more than it says.
pub(crate) const EMPTY_INCLUDES: [&str; 2] = ["reasoning.encrypted_content", "message.input_image.image_url"];

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "ResponsesRequest", transform = with_input)]
#[serde(remote = "Self", deny_unknown_fields)]
struct Body {
    #[schemars(length(max = MAX_RESPONSES_MODEL_BYTES))]
    model: Option<String>,
    #[serde(default)]
    #[schemars(with = "TextOr<Vec<GivenItem>>")]
    input: Value,
    instructions: Option<String>,
    #[schemars(range(min = 1, max = MAX_RESPONSES_TOKENS))]
    #[serde(default, deserialize_with = "read_integer_of::<1, MAX_RESPONSES_TOKENS, _>")]
    max_output_tokens: Option<u32>,
    #[schemars(range(min = 0, max = 2))]
    temperature: Option<f32>,
    #[schemars(range(max = 1), extend("exclusiveMinimum" = 0))]
    top_p: Option<f32>,
    stream: Option<bool>,
    #[schemars(with = "Option<Vec<GivenTool>>", length(max = MAX_TOOLS))]
    tools: Option<Vec<Value>>,
    #[serde(default)]
    #[schemars(schema_with = "choice_schema")]
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    text: Option<Text>,
    reasoning: Option<Reasoning>,
    #[schemars(with = "Option<BTreeMap<String, String>>", extend("maxProperties" = MAX_RESPONSES_METADATA))]
    metadata: Option<Map<String, Value>>,
    #[schemars(extend("items" = json!({"enum": EMPTY_INCLUDES})))]
    include: Option<Vec<String>>,
    #[serde(default, rename = "stream_options")]
    _stream_options: Option<StreamOptions>,
    store: Option<bool>,
    background: Option<bool>,
    #[schemars(extend("enum" = ["disabled", null]))]
    truncation: Option<String>,
    #[schemars(extend("enum" = ["auto", "default", null]))]
    service_tier: Option<String>,
    #[schemars(range(max = 0))]
    #[serde(default, deserialize_with = "read_integer")]
    top_logprobs: Option<u32>,
    #[schemars(with = "Option<()>")]
    max_tool_calls: Option<Value>,
    #[schemars(extend("pattern" = "^resp_[0-9a-f]{32}$"))]
    previous_response_id: Option<String>,
    #[schemars(with = "Option<()>")]
    conversation: Option<Value>,
    #[schemars(with = "Option<()>")]
    prompt: Option<Value>,
    #[schemars(with = "Option<()>")]
    context_management: Option<Value>,
    #[schemars(with = "Option<()>")]
    moderation: Option<Value>,
    /// Names the end user. In a canary one version answers all of a user's requests.
    #[schemars(with = "Option<Value>")]
    #[serde(default)]
    user: Value,
    #[schemars(with = "Option<Value>")]
    #[serde(default)]
    safety_identifier: Value,
    /// Prefixes are found again without hints.
    #[schemars(with = "Option<Value>")]
    #[serde(default)]
    prompt_cache_key: Value,
    #[schemars(with = "Option<Value>")]
    #[serde(default, rename = "prompt_cache_retention")]
    _prompt_cache_retention: IgnoredAny,
    #[schemars(with = "Option<Value>")]
    #[serde(default, rename = "prompt_cache_options")]
    _prompt_cache_options: IgnoredAny,
    /// Says who asks, for logs of a client's.
    #[schemars(with = "Option<Value>")]
    #[serde(default, rename = "client_metadata")]
    _client_metadata: IgnoredAny,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "ResponsesText")]
#[serde(remote = "Self", deny_unknown_fields)]
struct Text {
    format: Option<Format>,
    #[schemars(extend("enum" = ["medium", null]))]
    verbosity: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "ResponsesFormat", tag = "type")]
#[serde(remote = "Self", rename_all = "snake_case", deny_unknown_fields)]
enum Format {
    Text {},
    JsonObject {},
    JsonSchema {
        #[schemars(length(max = MAX_NAME_BYTES))]
        name: Option<String>,
        schema: Map<String, Value>,
        strict: Option<bool>,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "description")]
        _description: IgnoredAny,
    },
}

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "ResponsesReasoning")]
#[serde(remote = "Self", deny_unknown_fields)]
struct Reasoning {
    #[schemars(extend("enum" = effort_words()))]
    effort: Option<String>,
    #[schemars(with = "Option<Value>")]
    #[serde(default, rename = "summary")]
    _summary: IgnoredAny,
    #[schemars(with = "Option<Value>")]
    #[serde(default, rename = "generate_summary")]
    _generate_summary: IgnoredAny,
    #[schemars(with = "Option<Value>")]
    #[serde(default, rename = "context")]
    _context: IgnoredAny,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "ResponsesStreamOptions")]
#[serde(remote = "Self", deny_unknown_fields)]
struct StreamOptions {
    /// Makes pieces alike in length; none is added.
    #[schemars(with = "Option<Value>")]
    #[serde(default, rename = "include_obfuscation")]
    _include_obfuscation: IgnoredAny,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "ResponsesTool")]
#[serde(remote = "Self", deny_unknown_fields)]
struct GivenTool {
    #[serde(rename = "type")]
    #[schemars(with = "String", extend("const" = "function"))]
    _type: IgnoredAny,
    #[schemars(extend("pattern" = TOOL_NAME_PATTERN))]
    name: String,
    description: Option<String>,
    parameters: Option<Map<String, Value>>,
    strict: Option<bool>,
    #[schemars(with = "Option<Value>")]
    #[serde(default, rename = "defer_loading")]
    _defer_loading: IgnoredAny,
}

fn effort_words() -> Vec<Option<&'static str>> {
    EFFORTS.iter().copied().map(Some).chain([None]).collect()
}

fn choice_schema(_: &mut SchemaGenerator) -> Schema {
    let function = json!({
        "type": "object", "required": ["type", "name"],
        "properties": {"type": {"const": "function"}, "name": {"type": "string", "pattern": TOOL_NAME_PATTERN}},
    });
    let allowed = json!({
        "type": "object", "required": ["type", "mode", "tools"],
        "properties": {
            "type": {"const": "allowed_tools"}, "mode": {"enum": ["auto", "none", "required"]},
            "tools": {"type": "array", "items": function},
        },
    });
    json_schema!({"anyOf": [{"enum": ["auto", "none", "required", null]}, function, allowed]})
}

/// `input` may be left out as far as its type goes, and is missed then.
fn with_input(schema: &mut Schema) {
    schema.insert("required".to_owned(), json!(["input"]));
    if let Some(input) = schema.pointer_mut("/properties/input").and_then(Value::as_object_mut) {
        input.remove("default");
        if let Some(items) = input.get_mut("anyOf").and_then(|kinds| kinds.get_mut(1)) {
            items["minItems"] = json!(1);
        }
    }
}

/// A body of `/v1/responses`, for those who describe the server to programs.
pub fn request_schema(generator: &mut SchemaGenerator) -> Schema {
    generator.subschema_for::<Body>()
}

/// A body that is read, and whose items may stand in responses that are kept.
#[derive(Debug)]
pub struct ResponsesRequest {
    body: Body,
    params: GenerationParams,
    items: Vec<Value>,
    previous: Option<ResponseId>,
    /// The responses whose items it names, with `previous`.
    refers_to: BTreeSet<ResponseId>,
    /// Whether responses are kept at all.
    can_store: bool,
    store: bool,
    background: bool,
}

/// What is asked, with all that it refers to.
#[derive(Debug)]
pub struct ResolvedRequest {
    /// What to generate.
    pub request: TextRequest,
    /// What writes it.
    pub encoder: ResponseEncoder,
    /// The items that it answers as an array of JSON, where they are to be kept.
    pub input: Option<Vec<u8>>,
}

/// Reads and checks a body. `can_store`: responses are kept here, where the body does not say otherwise.
///
/// # Errors
/// Names the first field that is missing, of the wrong type, out of range, unknown or not supported.
pub fn decode_responses(body: &[u8], can_store: bool) -> Result<ResponsesRequest, ApiError> {
    let mut body: Body = read_body(body).map_err(|error| with_name_here(error, &NAMES_OF_CHATS))?;
    refuse(&body, can_store)?;
    if let Some(model) = body.model.as_ref().filter(|model| model.len() > MAX_RESPONSES_MODEL_BYTES) {
        let message = format_args!("must have at most {MAX_RESPONSES_MODEL_BYTES} bytes, not {}", model.len());
        return Err(ApiError::wrong_value("model", message));
    }
    check_metadata(body.metadata.as_ref())?;
    let params = params(&body)?;
    let items = items(body.input.take())?;
    let (store, background) = (body.store.unwrap_or(can_store), body.background.unwrap_or(false));
    let previous = body.previous_response_id.as_deref().map(|id| {
        let unknown =
            || ApiError::wrong_value("previous_response_id", "must be the id of a response: resp_ and 32 digits");
        ResponseId::parse(id).ok_or_else(unknown)
    });
    let previous = previous.transpose()?;
    let referred = items.iter().filter(|_| can_store).filter_map(reference).filter_map(ResponseId::of_item);
    let refers_to: BTreeSet<ResponseId> = referred.chain(previous).collect();
    if refers_to.len() > MAX_RESPONSES_REFERRED {
        let n = refers_to.len();
        let message = format_args!("refers to items of {n} responses, and {MAX_RESPONSES_REFERRED} are the most");
        return Err(ApiError::wrong_value("input", message));
    }
    Ok(ResponsesRequest { body, params, items, previous, refers_to, can_store, store, background })
}

impl ResponsesRequest {
    /// The responses without which it cannot be resolved.
    #[must_use]
    pub fn refers_to(&self) -> &BTreeSet<ResponseId> {
        &self.refers_to
    }

    /// Whether its response is to be kept.
    #[must_use]
    pub fn is_stored(&self) -> bool {
        self.store
    }

    /// Whether it is to be answered while nobody waits on a connection.
    #[must_use]
    pub fn is_background(&self) -> bool {
        self.background
    }

    /// Puts the items of `stored` in their places; those that it refers to and that are not there are refused. `id`: its own.
    ///
    /// # Errors
    /// Names the first item that is wrong.
    pub fn resolve(self, id: ResponseId, mut stored: StoredResponses) -> Result<ResolvedRequest, ApiError> {
        let Self { mut body, params, items, previous, can_store, store, background, .. } = self;
        let mut own = items;
        if can_store {
            for (place, item) in own.iter_mut().enumerate() {
                if let Some(id) = reference(item) {
                    *item = referenced(place, id, &stored)?;
                }
            }
        }
        let before =
            previous.map(|previous| history(previous, stored.remove(&previous))).transpose()?.unwrap_or_default();
        if store {
            own = own.into_iter().enumerate().map(|(place, item)| kept(item, id, place)).collect();
        }
        let input = store.then(|| kept_input(&before, &own)).transpose()?;
        let (model, is_streamed) = (body.model.take().filter(|model| !model.is_empty()), body.stream.unwrap_or(false));
        let messages = messages(body.instructions.clone(), before, own)?;
        let chat = chat(&mut body, messages)?;
        let asked = Asked { store, background, previous, ..asked(&body, &chat) };
        let conversation = conversation(&body, &chat);
        let prompts = vec![Prompt::chat(chat)];
        let (choices, best_of) = (1, 1);
        let request =
            TextRequest { model, prompts, prompt_param: "input", params, choices, best_of, is_streamed, conversation };
        Ok(ResolvedRequest { request, encoder: ResponseEncoder { asked }, input })
    }
}

/// What the conversation is called, or its user, or else what its user said first: a response that goes on from another repeats that
/// and not the instructions, which may be others each time.
fn conversation(body: &Body, chat: &Chat) -> Option<String> {
    let names = [&body.prompt_cache_key, &body.safety_identifier, &body.user];
    let named = names.into_iter().filter_map(Value::as_str).find(|name| !name.is_empty());
    let first = || chat.messages.iter().find(|message| message.role == Role::User);
    let said = || first().map(|message| message.content.iter().map(|(Part::Text(text) | Part::Refusal(text))| &**text));
    named.map(str::to_owned).or_else(|| said().map(Iterator::collect))
}

/// All items as they are kept, unless they are more than may be.
fn kept_input(before: &[Value], own: &[Value]) -> Result<Vec<u8>, ApiError> {
    let all: Vec<&Value> = before.iter().chain(own).collect();
    let written = serde_json::to_vec(&all).unwrap_or_default();
    if written.len() > MAX_STORED_INPUT_BYTES {
        let n = written.len();
        let message = format_args!(
            "has {n} bytes with the items of the responses before, and {MAX_STORED_INPUT_BYTES} are the most that is kept: \
             send fewer, or let `store` be false"
        );
        return Err(ApiError::wrong_value("input", message));
    }
    Ok(written)
}

/// Refuses by name what is not done.
fn refuse(body: &Body, can_store: bool) -> Result<(), ApiError> {
    const NOT_STORED: &str = "nothing is stored here, since the server was started without --response-store";
    let is_given = |value: &Option<Value>| value.as_ref().is_some_and(|value| !value.is_null());
    for (name, is_given, instead) in [
        ("store", body.store == Some(true) && !can_store, format!("{NOT_STORED}; send false, or leave it out")),
        (
            "background",
            body.background == Some(true) && !can_store,
            format!("{NOT_STORED}; wait for the answer, or stream it"),
        ),
        (
            "stream",
            body.stream == Some(true) && body.background == Some(true),
            "a response in the background is asked for again (GET /v1/responses/ID) until its `status` is final"
                .to_owned(),
        ),
        (
            "previous_response_id",
            body.previous_response_id.is_some() && !can_store,
            format!("{NOT_STORED}; send the items of the turns before in `input`"),
        ),
        (
            "conversation",
            is_given(&body.conversation),
            "no conversations are kept; send its items in `input`".to_owned(),
        ),
        (
            "prompt",
            is_given(&body.prompt),
            "no prompts are kept; send its text in `instructions` or `input`".to_owned(),
        ),
        ("max_tool_calls", is_given(&body.max_tool_calls), "this server runs no tools; leave it out".to_owned()),
        ("context_management", is_given(&body.context_management), "leave it out".to_owned()),
        ("moderation", is_given(&body.moderation), "leave it out".to_owned()),
        ("top_logprobs", body.top_logprobs.is_some_and(|top| top > 0), "leave it out, or let it be 0".to_owned()),
        (
            "truncation",
            !matches!(body.truncation.as_deref(), None | Some("disabled")),
            "no item is ever left out; send fewer, and let it be \"disabled\"".to_owned(),
        ),
        (
            "service_tier",
            !matches!(body.service_tier.as_deref(), None | Some("auto" | "default")),
            "leave it out; the header `x-gantry-priority` says who goes first".to_owned(),
        ),
        (
            "text.verbosity",
            !matches!(body.text.as_ref().and_then(|text| text.verbosity.as_deref()), None | Some("medium")),
            "ask for a short or long answer in a message".to_owned(),
        ),
    ] {
        if is_given {
            return Err(ApiError::unsupported_parameter(
                name,
                format_args!("is not supported by this server: {instead}"),
            ));
        }
    }
    if body.background == Some(true) && body.store == Some(false) {
        let message = "must be false where `store` is: what is answered in the background is found in what is stored";
        return Err(ApiError::wrong_value("background", message));
    }
    let include = body.include.iter().flatten().enumerate();
    match include.into_iter().find(|(_, name)| !EMPTY_INCLUDES.contains(&name.as_str())) {
        Some((i, _)) => Err(ApiError::unsupported_parameter(
            format!("include[{i}]"),
            "is not supported by this server; leave it out",
        )),
        None => Ok(()),
    }
}

fn check_metadata(metadata: Option<&Map<String, Value>>) -> Result<(), ApiError> {
    let Some(metadata) = metadata else { return Ok(()) };
    if metadata.len() > MAX_RESPONSES_METADATA {
        let n = metadata.len();
        let message = format_args!("must have at most {MAX_RESPONSES_METADATA} names, not {n}");
        return Err(ApiError::wrong_value("metadata", message));
    }
    let fits = |(name, value): (&String, &Value)| {
        value.as_str().is_some_and(|value| name.len() + value.len() <= MAX_RESPONSES_METADATA_BYTES)
    };
    if !metadata.iter().all(fits) {
        let message =
            format_args!("must have texts, of {MAX_RESPONSES_METADATA_BYTES} bytes together with their names at most");
        return Err(ApiError::wrong_value("metadata", message));
    }
    Ok(())
}

/// What an answer repeats of its request: of what may be long, no more than it may be.
fn asked(body: &Body, chat: &Chat) -> Asked {
    let format = match body.text.as_ref().and_then(|text| text.format.as_ref()) {
        None | Some(Format::Text {}) => json!({"type": "text"}),
        Some(Format::JsonObject {}) => json!({"type": "json_object"}),
        Some(Format::JsonSchema { name, schema, strict, .. }) => {
            json!({"type": "json_schema", "name": name, "schema": schema, "strict": strict.unwrap_or(false)})
        }
    };
    let tool = |tool: &Tool| {
        let parameters = tool.parameters.as_deref().and_then(|text| serde_json::from_str::<Value>(text).ok());
        json!({
            "type": "function", "name": tool.name, "description": tool.description, "parameters": parameters,
            "strict": tool.strict,
        })
    };
    let mode = match chat.tool_choice {
        ToolChoice::Auto => "auto",
        ToolChoice::None => "none",
        ToolChoice::Required => "required",
    };
    let tool_choice = match chat.allowed_tools.as_slice() {
        [] => json!(mode),
        [name] if chat.tool_choice == ToolChoice::Required => json!({"type": "function", "name": name}),
        names => {
            let tools: Vec<Value> = names.iter().map(|name| json!({"type": "function", "name": name})).collect();
            json!({"type": "allowed_tools", "mode": mode, "tools": tools})
        }
    };
    let tools_bytes: usize =
        chat.tools.iter().flat_map(|tool| [&tool.description, &tool.parameters]).flatten().map(String::len).sum();
    Asked {
        instructions: body.instructions.clone().filter(|text| text.len() <= MAX_RESPONSES_REPEATED_BYTES),
        max_output_tokens: body.max_output_tokens,
        temperature: body.temperature.unwrap_or(1.0),
        top_p: body.top_p.unwrap_or(1.0),
        tools: if tools_bytes <= MAX_RESPONSES_REPEATED_BYTES {
            chat.tools.iter().map(tool).collect()
        } else {
            Vec::new()
        },
        tool_choice,
        parallel_tool_calls: chat.parallel_tool_calls,
        format,
        effort: body.reasoning.as_ref().and_then(|reasoning| reasoning.effort.clone()),
        metadata: body.metadata.clone().unwrap_or_default(),
        store: false,
        background: false,
        previous: None,
    }
}

fn params(body: &Body) -> Result<GenerationParams, ApiError> {
    let within = |name: &'static str, value: Option<f32>, (low, high): (f32, f32), range: &str| match value {
        Some(value) if !(low..=high).contains(&value) => {
            Err(ApiError::wrong_value(name, format_args!("must be {range}, not {value}")))
        }
        value => Ok(value),
    };
    if let Some(most) = body.max_output_tokens.filter(|most| !(1..=MAX_RESPONSES_TOKENS).contains(most)) {
        let message = format_args!("must be from 1 to {MAX_RESPONSES_TOKENS}, not {most}");
        return Err(ApiError::wrong_value("max_output_tokens", message));
    }
    let constraint = match body.text.as_ref().and_then(|text| text.format.as_ref()) {
        None | Some(Format::Text {}) => None,
        Some(Format::JsonObject {}) => Some(Constraint::JsonSchema { schema: ANY_OBJECT.to_owned(), strict: true }),
        Some(Format::JsonSchema { name, .. }) if name.as_ref().is_some_and(|name| name.len() > MAX_NAME_BYTES) => {
            let message = format_args!("must have at most {MAX_NAME_BYTES} bytes");
            return Err(ApiError::wrong_value("text.format.name", message));
        }
        Some(Format::JsonSchema { schema, strict, .. }) => {
            let schema = Value::Object(schema.clone()).to_string();
            if schema.len() > MAX_RESPONSES_SCHEMA_BYTES {
                let n = schema.len();
                let message = format_args!("must have at most {MAX_RESPONSES_SCHEMA_BYTES} bytes, not {n}");
                return Err(ApiError::wrong_value("text.format.schema", message));
            }
            Some(Constraint::JsonSchema { schema, strict: strict.unwrap_or(false) })
        }
    };
    let constraint_param = constraint.as_ref().map(|_| FORMAT.to_owned()).unwrap_or_default();
    let defaults = GenerationParams::default();
    Ok(GenerationParams {
        max_tokens: body.max_output_tokens,
        temperature: within("temperature", body.temperature, (0.0, 2.0), "from 0 to 2")?.unwrap_or(1.0),
        top_p: within("top_p", body.top_p, (f32::MIN_POSITIVE, 1.0), "above 0 and at most 1")?
            .unwrap_or(defaults.top_p),
        constraint,
        constraint_param,
        ..defaults
    })
}

fn chat(body: &mut Body, messages: Vec<Message>) -> Result<Chat, ApiError> {
    let (tools, tool_choice) = (body.tools.take(), body.tool_choice.take());
    let tools = read_tools(tools.unwrap_or_default())?;
    let (tool_choice, allowed_tools) = choice(tool_choice, &tools)?;
    let effort = body.reasoning.as_ref().and_then(|reasoning| reasoning.effort.clone());
    if effort.as_ref().is_some_and(|effort| !EFFORTS.contains(&effort.as_str())) {
        let message = format_args!("must be one of {}", EFFORTS.join(", "));
        return Err(ApiError::wrong_value("reasoning.effort", message));
    }
    let thinking = effort.as_deref().map(|effort| effort != "none");
    let said = effort.filter(|effort| effort != "none").map(|effort| json!(effort).to_string());
    Ok(Chat {
        messages,
        tools,
        tool_choice,
        allowed_tools,
        parallel_tool_calls: body.parallel_tool_calls.unwrap_or(true),
        thinking,
        thinking_budget: None,
        template_variables: said.map(|effort| ("reasoning_effort".to_owned(), effort)).into_iter().collect(),
        continue_final_message: false,
    })
}

fn read_tools(tools: Vec<Value>) -> Result<Vec<Tool>, ApiError> {
    let tool = |(i, tool): (usize, Value)| {
        if tool.is_object() && tool.get("type").and_then(Value::as_str) != Some("function") {
            let what = "must be function: this server runs no tools, and knows none by its type; describe it as a function, and \
                        run it yourself";
            return Err(ApiError::unsupported_parameter(format!("tools[{i}].type"), what));
        }
        let GivenTool { name, description, parameters, strict, .. } =
            read_json(tool, &format!("tools[{i}]")).map_err(|error| with_name_here(error, &NAMES_OF_CHATS))?;
        let parameters = parameters.filter(|parameters| !parameters.is_empty());
        let parameters = parameters.map(|parameters| Value::Object(parameters).to_string());
        Ok(Tool { name, description, parameters, strict: strict.unwrap_or(true) })
    };
    let tools: Vec<Tool> = tools.into_iter().enumerate().map(tool).collect::<Result<_, _>>()?;
    check_tools(&tools).map_err(|ToolsFault { tool, message }| {
        let place = tool.map_or_else(|| "tools".to_owned(), |i| format!("tools[{i}].name"));
        ApiError::wrong_value(place, message)
    })?;
    Ok(tools)
}

/// Whether any is to be called, and which may be (none: all).
fn choice(given: Option<Value>, tools: &[Tool]) -> Result<(ToolChoice, Vec<String>), ApiError> {
    const EXPECTED: &str = "must be none, auto, required, or an object of the type function or allowed_tools";
    let wrong = || ApiError::wrong_value("tool_choice", EXPECTED);
    let mode = |word: Option<&str>| match word {
        Some("auto") => Ok(ToolChoice::Auto),
        Some("none") => Ok(ToolChoice::None),
        Some("required") => Ok(ToolChoice::Required),
        _ => Err(wrong()),
    };
    let (choice, allowed) = match given {
        None | Some(Value::Null) => (ToolChoice::Auto, Vec::new()),
        Some(Value::String(word)) => (mode(Some(&word))?, Vec::new()),
        Some(Value::Object(object)) => match object.get("type").and_then(Value::as_str) {
            Some("function") => {
                let name = object.get("name").and_then(Value::as_str).ok_or_else(wrong)?;
                (ToolChoice::Required, vec![name.to_owned()])
            }
            Some("allowed_tools") => {
                let name = |tool: &Value| tool.get("name").and_then(Value::as_str).map(str::to_owned);
                let names = object.get("tools").and_then(Value::as_array).ok_or_else(wrong)?;
                let names: Option<Vec<String>> = names.iter().map(name).collect();
                (mode(object.get("mode").and_then(Value::as_str))?, names.ok_or_else(wrong)?)
            }
            _ => return Err(wrong()),
        },
        Some(_) => return Err(wrong()),
    };
    if choice == ToolChoice::Required && tools.is_empty() {
        return Err(ApiError::wrong_value("tool_choice", "asks for a call, and `tools` has none to call"));
    }
    match allowed.iter().find(|name| !tools.iter().any(|tool| tool.name == **name)) {
        Some(name) => {
            Err(ApiError::wrong_value("tool_choice", format_args!("names {name:?}, which is none of `tools`")))
        }
        None => Ok((choice, allowed)),
    }
}

//! The tools of a request, and whether one is to be called.

use gantry_core::{
    ApiError, TOOL_NAME_PATTERN, Tool, ToolChoice, ToolsFault, check_tools, from_objects, from_typed_objects, read_json,
};
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};

from_objects!(GivenTool);
from_typed_objects!(GivenChoice);

/// The caller that a model is.
const DIRECT: &str = "direct";

/// A tool, which whoever asks runs.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "MessagesTool")]
#[serde(remote = "Self", deny_unknown_fields)]
pub(crate) struct GivenTool {
    #[schemars(extend("pattern" = TOOL_NAME_PATTERN))]
    name: String,
    description: Option<String>,
    /// The JSON schema of its arguments.
    input_schema: Map<String, Value>,
    #[schemars(with = "Option<String>", extend("enum" = ["custom", null]))]
    #[serde(default, rename = "type")]
    _type: IgnoredAny,
    /// Whether calls must be of that schema.
    strict: Option<bool>,
    /// Arguments as calls may have them.
    input_examples: Option<Vec<Map<String, Value>>>,
    /// Who may call it: the model itself, or programs that a server runs.
    #[schemars(extend("contains" = json!({"const": DIRECT})))]
    allowed_callers: Option<Vec<String>>,
    /// The model is shown all tools from the beginning on.
    #[serde(default, rename = "defer_loading")]
    _defer_loading: Option<bool>,
    /// Prefixes are found again without hints.
    #[schemars(with = "Option<Value>")]
    #[serde(default, rename = "cache_control")]
    _cache_control: IgnoredAny,
    /// A stream has arguments as they come.
    #[serde(default, rename = "eager_input_streaming")]
    _eager_input_streaming: Option<bool>,
}

/// Whether one is to be called.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "MessagesToolChoice", tag = "type")]
#[serde(remote = "Self", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum GivenChoice {
    Auto { disable_parallel_tool_use: Option<bool> },
    Any { disable_parallel_tool_use: Option<bool> },
    Tool { name: String, disable_parallel_tool_use: Option<bool> },
    None {},
}

/// The tools that a model is shown.
pub(crate) fn read_tools(tools: Vec<Value>) -> Result<Vec<Tool>, ApiError> {
    let tools: Vec<Tool> = tools
        .into_iter()
        .enumerate()
        .map(|(i, tool)| read_tool(&format!("tools[{i}]"), tool))
        .collect::<Result<_, _>>()?;
    check_tools(&tools).map_err(|ToolsFault { tool, message }| {
        let place = tool.map_or_else(|| "tools".to_owned(), |i| format!("tools[{i}].name"));
        ApiError::wrong_value(place, message)
    })?;
    Ok(tools)
}

fn read_tool(path: &str, tool: Value) -> Result<Tool, ApiError> {
    // Those of other types have other fields, of which an error would say nothing that helps.
    if !matches!(tool.get("type"), None | Some(Value::Null)) && tool["type"] != "custom" {
        let what = "must be custom or left out: this server runs no tools, and knows none by its type; describe it by `name`, \
                    `description` and `input_schema`, and run it yourself";
        return Err(ApiError::unsupported_parameter(format!("{path}.type"), what));
    }
    let GivenTool { name, description, mut input_schema, strict, input_examples, allowed_callers, .. } =
        read_json(tool, path)?;
    if allowed_callers.is_some_and(|callers| !callers.iter().any(|caller| caller == DIRECT)) {
        let what = "must have direct: this server runs no programs that could call it";
        return Err(ApiError::unsupported_parameter(format!("{path}.allowed_callers"), what));
    }
    if let Some(examples) = input_examples.filter(|examples| !examples.is_empty()) {
        // As schemas have them, which templates show whole.
        input_schema.insert("examples".to_owned(), examples.into());
    }
    let parameters = (!input_schema.is_empty()).then(|| Value::Object(input_schema).to_string());
    Ok(Tool { name, description, parameters, strict: strict.unwrap_or(false) })
}

/// Whether any is to be called, which may be (none: all), and whether one alone.
pub(crate) fn choice(given: Option<GivenChoice>, tools: &[Tool]) -> Result<(ToolChoice, Vec<String>, bool), ApiError> {
    let (choice, name, is_alone) = match given {
        None => return Ok((ToolChoice::Auto, Vec::new(), false)),
        Some(GivenChoice::None {}) => return Ok((ToolChoice::None, Vec::new(), false)),
        Some(GivenChoice::Auto { disable_parallel_tool_use }) => (ToolChoice::Auto, None, disable_parallel_tool_use),
        Some(GivenChoice::Any { disable_parallel_tool_use }) => (ToolChoice::Required, None, disable_parallel_tool_use),
        Some(GivenChoice::Tool { name, disable_parallel_tool_use }) => {
            (ToolChoice::Required, Some(name), disable_parallel_tool_use)
        }
    };
    if choice == ToolChoice::Required && tools.is_empty() {
        return Err(ApiError::wrong_value("tool_choice", "asks for a call, and `tools` has none to call"));
    }
    if let Some(name) = &name
        && !tools.iter().any(|tool| tool.name == *name)
    {
        return Err(ApiError::wrong_value("tool_choice.name", format_args!("is {name:?}, which is none of `tools`")));
    }
    Ok((choice, name.into_iter().collect(), is_alone.unwrap_or(false)))
}

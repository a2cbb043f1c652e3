//! The tools of a chat, whether they may or must be called, and whether the model may think before it answers.
//!
//! What thinking, and how much of it, is asked for under has many names, one for each server whose clients come here; they must agree.

use gantry_core::{
    ApiError, Chat, ContinuationFault, MAX_TEMPLATE_VARIABLES, MAX_TEMPLATE_VARIABLES_BYTES, MAX_TOOLS, Message, Tool,
    ToolChoice, ToolsFault, check_continuation, check_tools,
};
use serde_json::{Map, Value};

use crate::fields::{Fields, missing, wrong_type, wrong_value};
use crate::limits::MAX_TOKENS_LIMIT;
use crate::parameters::Place;

/// What each server calls the words of an effort; `none` is none.
pub(crate) const EFFORTS: [&str; 6] = ["none", "minimal", "low", "medium", "high", "xhigh"];
/// What models call it in their templates.
const EFFORT_VARIABLE: &str = "reasoning_effort";

/// A chat of these messages, with what the body says beside them.
pub(crate) fn chat(messages: Vec<Message>, fields: &Fields<'_>) -> Result<Chat, ApiError> {
    let tools = tools(fields)?;
    let (tool_choice, allowed_tools) = choice(fields, &tools)?;
    let parallel_tool_calls = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    let (thinking, template_variables) = thinking(fields)?;
    let thinking_budget = thinking_budget(fields)?;
    let continue_final_message = continues(fields)?;
    let chat = Chat {
        messages,
        tools,
        tool_choice,
        allowed_tools,
        parallel_tool_calls,
        thinking,
        thinking_budget,
        template_variables,
        continue_final_message,
    };
    check_continuation(&chat).map_err(|fault| {
        let last = chat.messages.len().saturating_sub(1);
        let place = match fault {
            ContinuationFault::NotAssistant => format!("messages[{last}].role"),
            ContinuationFault::NoText => format!("messages[{last}].content"),
            ContinuationFault::Tools => "tools".to_owned(),
        };
        wrong_value(place, fault)
    })?;
    Ok(chat)
}

/// Takes `add_generation_prompt: false` out of a body that says `continue_final_message: true`, where it says the same once more;
/// in all others it is refused by name.
pub(crate) fn take_closed_prompt(object: &mut Map<String, Value>) {
    let says = |name: &str, value: bool| object.get(name) == Some(&Value::Bool(value));
    if says("continue_final_message", true) && says("add_generation_prompt", false) {
        object.remove("add_generation_prompt");
    }
}

/// Whether the last message is to be continued.
fn continues(fields: &Fields<'_>) -> Result<bool, ApiError> {
    let continues = fields.boolean("continue_final_message")?.unwrap_or(false);
    if continues && fields.boolean("add_generation_prompt")? == Some(true) {
        let message = "may not be true where `continue_final_message` is: either the last message is continued, or a turn is opened";
        return Err(wrong_value(fields.path("add_generation_prompt"), message));
    }
    Ok(continues)
}

fn tools(fields: &Fields<'_>) -> Result<Vec<Tool>, ApiError> {
    let path = fields.path("tools");
    let Some(value) = fields.get("tools") else { return Ok(Vec::new()) };
    let items = value.as_array().ok_or_else(|| wrong_type(path.clone(), "an array of tools", value))?;
    let tool = |(i, item)| tool(&format!("{path}[{i}]"), item);
    let tools: Vec<Tool> = items.iter().enumerate().map(tool).collect::<Result<_, _>>()?;
    check_tools(&tools).map_err(|ToolsFault { tool, message }| {
        let place = tool.map_or_else(|| path.clone(), |i| format!("{path}[{i}].function.name"));
        wrong_value(place, message)
    })?;
    Ok(tools)
}

fn tool(path: &str, value: &Value) -> Result<Tool, ApiError> {
    let Value::Object(object) = value else { return Err(wrong_type(path.to_owned(), "an object", value)) };
    let fields = Fields::new(object, format!("{path}."));
    fields.refuse(Place::Tool)?;
    let function =
        fields.object("function")?.ok_or_else(|| missing(fields.path("function"), "an object is expected"))?;
    function.refuse(Place::ToolFunction)?;
    let name = function.string("name")?.ok_or_else(|| missing(function.path("name"), "a string is expected"))?;
    let parameters = match function.get("parameters") {
        Some(Value::Object(schema)) if schema.is_empty() => None,
        Some(schema @ Value::Object(_)) => Some(schema.to_string()),
        Some(other) => return Err(wrong_type(function.path("parameters"), "a JSON schema of an object", other)),
        None => None,
    };
    Ok(Tool {
        name: name.to_owned(),
        description: function.string("description")?.map(str::to_owned),
        parameters,
        strict: function.boolean("strict")?.unwrap_or(false),
    })
}

/// Whether any is to be called, and which may be; none: all.
fn choice(fields: &Fields<'_>, tools: &[Tool]) -> Result<(ToolChoice, Vec<String>), ApiError> {
    let path = || fields.path("tool_choice");
    let expected = "none, auto, required, or an object that names functions";
    let chosen = match fields.get("tool_choice") {
        None => return Ok((ToolChoice::Auto, Vec::new())),
        Some(Value::String(word)) => {
            let word = self::word(word).ok_or_else(|| wrong_value(path(), format_args!("must be {expected}")))?;
            (word, Vec::new())
        }
        Some(Value::Object(object)) => named(&Fields::new(object, format!("{}.", path())))?,
        Some(other) => return Err(wrong_type(path(), expected, other)),
    };
    if tools.is_empty() && chosen.0 == ToolChoice::Required {
        return Err(wrong_value(path(), "asks for a call, and `tools` has none to call"));
    }
    if let Some(unknown) = chosen.1.iter().find(|name| !tools.iter().any(|tool| tool.name == **name)) {
        return Err(wrong_value(path(), format_args!("names {unknown:?}, which is none of `tools`")));
    }
    Ok(chosen)
}

fn word(word: &str) -> Option<ToolChoice> {
    match word {
        "none" => Some(ToolChoice::None),
        "auto" => Some(ToolChoice::Auto),
        "required" | "any" => Some(ToolChoice::Required),
        _ => None,
    }
}

/// A function that must be called, or those that may be.
fn named(fields: &Fields<'_>) -> Result<(ToolChoice, Vec<String>), ApiError> {
    fields.refuse(Place::ToolChoice)?;
    let name_of = |fields: &Fields<'_>| {
        let name =
            fields.string("name")?.ok_or_else(|| missing(fields.path("name"), "the name of a tool is expected"))?;
        Ok::<_, ApiError>(name.to_owned())
    };
    match fields.string("type")? {
        Some("function") => {
            let name = match fields.object("function")? {
                Some(function) => name_of(&function)?,
                None => name_of(fields)?,
            };
            Ok((ToolChoice::Required, vec![name]))
        }
        Some("allowed_tools") => {
            let inner = fields.object("allowed_tools")?;
            let fields = inner.as_ref().unwrap_or(fields);
            let mode = fields.string("mode")?.unwrap_or("auto");
            let mode = word(mode).filter(|mode| *mode != ToolChoice::None);
            let mode = mode.ok_or_else(|| wrong_value(fields.path("mode"), "must be auto or required"))?;
            let tools = fields.get("tools").and_then(Value::as_array);
            let tools = tools.filter(|tools| !tools.is_empty() && tools.len() <= MAX_TOOLS);
            let tools = tools.ok_or_else(|| missing(fields.path("tools"), "an array of tools is expected"))?;
            let name = |(i, tool): (usize, &Value)| {
                let place = format!("{}[{i}]", fields.path("tools"));
                let Value::Object(object) = tool else { return Err(wrong_type(place, "an object", tool)) };
                let tool = Fields::new(object, format!("{place}."));
                tool.object("function")?.map_or_else(|| name_of(&tool), |function| name_of(&function))
            };
            Ok((mode, tools.iter().enumerate().map(name).collect::<Result<_, _>>()?))
        }
        _ => Err(wrong_value(fields.path("type"), "must be function or allowed_tools")),
    }
}

/// Variables of a template, by name, each as JSON.
type Variables = Vec<(String, String)>;

/// Whether the model thinks, where the body says so, and the variables for its template.
fn thinking(fields: &Fields<'_>) -> Result<(Option<bool>, Variables), ApiError> {
    let mut variables = variables(fields)?;
    let of_variables = ["enable_thinking", "thinking"].iter().find_map(|name| variables.get(*name)?.as_bool());
    let effort = effort(fields)?;
    let said = [
        ("chat_template_kwargs", of_variables),
        ("enable_thinking", fields.boolean("enable_thinking")?),
        ("reasoning_effort", effort.as_deref().map(|effort| effort != "none")),
        ("think", switch(fields, "think")?),
        ("thinking", switch(fields, "thinking")?),
    ];
    let mut thinking = None;
    for (name, value) in said {
        thinking = match (thinking, value) {
            (Some((first, one)), Some(other)) if one != other => {
                return Err(wrong_value(fields.path(name), format_args!("may not differ from `{first}`")));
            }
            (None, Some(value)) => Some((name, value)),
            (before, _) => before,
        };
    }
    if let Some(effort) = effort.filter(|effort| effort != "none") {
        variables.entry(EFFORT_VARIABLE).or_insert(Value::String(effort));
    }
    let variables = variables.into_iter().map(|(name, value)| (name, value.to_string())).collect();
    Ok((thinking.map(|(_, value)| value), variables))
}

/// The most tokens that may be thought, by any name; -1 is no bound.
fn thinking_budget(fields: &Fields<'_>) -> Result<Option<u32>, ApiError> {
    let (reasoning, thinking) = (object_in(fields, "reasoning")?, object_in(fields, "thinking")?);
    let names = [
        (Some(fields), "thinking_budget_tokens"),
        (Some(fields), "reasoning_budget_tokens"),
        (Some(fields), "thinking_token_budget"),
        (Some(fields), "thinking_budget"),
        (reasoning.as_ref(), "max_tokens"),
        (thinking.as_ref(), "budget_tokens"),
    ];
    let mut budget: Option<(String, i64)> = None;
    for (place, name) in names {
        let Some(place) = place else { continue };
        let Some(tokens) = place.integer(name, -1..=i64::from(MAX_TOKENS_LIMIT))? else { continue };
        match &budget {
            Some((first, other)) if *other != tokens => {
                return Err(wrong_value(place.path(name), format_args!("may not differ from `{first}`")));
            }
            _ => budget = Some((place.path(name), tokens)),
        }
    }
    // What does not fit is the -1.
    Ok(budget.and_then(|(_, tokens)| u32::try_from(tokens).ok()))
}

/// What stands at a name, where that is an object.
fn object_in<'a>(fields: &Fields<'a>, name: &str) -> Result<Option<Fields<'a>>, ApiError> {
    match fields.get(name) {
        Some(Value::Object(_)) => fields.object(name),
        _ => Ok(None),
    }
}

fn variables(fields: &Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let path = || fields.path("chat_template_kwargs");
    let object = match fields.get("chat_template_kwargs") {
        None => return Ok(Map::new()),
        Some(Value::Object(object)) => object,
        Some(other) => return Err(wrong_type(path(), "an object", other)),
    };
    if object.len() > MAX_TEMPLATE_VARIABLES {
        let n = object.len();
        return Err(wrong_value(path(), format_args!("must have at most {MAX_TEMPLATE_VARIABLES} names, not {n}")));
    }
    let bytes = Value::Object(object.clone()).to_string().len();
    if bytes > MAX_TEMPLATE_VARIABLES_BYTES {
        let message = format_args!("must have at most {MAX_TEMPLATE_VARIABLES_BYTES} bytes, not {bytes}");
        return Err(wrong_value(path(), message));
    }
    // Of these the chat itself is made.
    const OWN: [&str; 6] = ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "documents"];
    if let Some(own) = OWN.iter().find(|own| object.contains_key(**own)) {
        return Err(wrong_value(format!("{}.{own}", path()), "is not for a request to set; leave it out"));
    }
    Ok(object.clone())
}

/// How much is to be thought, by either name.
fn effort(fields: &Fields<'_>) -> Result<Option<String>, ApiError> {
    let of = |fields: &Fields<'_>, name: &str| match fields.string(name)? {
        None | Some("") => Ok(None),
        Some(word) if EFFORTS.contains(&word) => Ok(Some(word.to_owned())),
        Some(_) => Err(wrong_value(fields.path(name), format_args!("must be one of {}", EFFORTS.join(", ")))),
    };
    let plain = of(fields, "reasoning_effort")?;
    let within = match fields.object("reasoning")? {
        Some(reasoning) => {
            reasoning.refuse(Place::Reasoning)?;
            of(&reasoning, "effort")?
        }
        None => None,
    };
    fields.one_of(("reasoning_effort", plain), ("reasoning", within))
}

/// True or false, a word of the same sense, or an object whose `type` is one.
fn switch(fields: &Fields<'_>, name: &str) -> Result<Option<bool>, ApiError> {
    let expected = "true, false, or an object whose `type` is enabled or disabled";
    match fields.get(name) {
        None => Ok(None),
        Some(Value::Bool(is)) => Ok(Some(*is)),
        Some(Value::String(word)) if EFFORTS.contains(&word.as_str()) => Ok(Some(word != "none")),
        Some(Value::Object(object)) => {
            let inner = Fields::new(object, format!("{}.", fields.path(name)));
            inner.refuse(Place::Thinking)?;
            match inner.string("type")? {
                Some("enabled" | "adaptive") => Ok(Some(true)),
                Some("disabled") => Ok(Some(false)),
                _ => Err(wrong_value(inner.path("type"), "must be enabled or disabled")),
            }
        }
        Some(other) => Err(wrong_type(fields.path(name), expected, other)),
    }
}

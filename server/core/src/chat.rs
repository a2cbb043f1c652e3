//! A chat as it is asked: what was said, which tools may be called, whether the model may think first.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::limits::{MAX_TOOL_NAME_BYTES, MAX_TOOLS, MAX_TOOLS_BYTES};
use crate::message::{Message, Role};

/// A chat with the turn of the assistant to come.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chat {
    /// What was said; at least one message.
    pub messages: Vec<Message>,
    /// What the model may call.
    pub tools: Vec<Tool>,
    /// Whether it is to call any of them.
    pub tool_choice: ToolChoice,
    /// The tools that it may call this time, by name; empty: all. The others are shown to it all the same, so that the prompt
    /// stays what it was.
    pub allowed_tools: Vec<String>,
    /// Whether it may call several of them in one turn.
    pub parallel_tool_calls: bool,
    /// Whether it thinks before it answers; `None`: as its template has it.
    pub thinking: Option<bool>,
    /// The most tokens that it thinks; after these the thought is ended for it, and the answer goes on. `None`: as many as it likes.
    pub thinking_budget: Option<u32>,
    /// Further variables for its template, by name, each as JSON.
    pub template_variables: Vec<(String, String)>,
    /// Whether the last message is an assistant's turn that is not over, so that the answer is what follows its text; such an
    /// answer is told as it stands, without thoughts and calls ([`check_continuation`]).
    pub continue_final_message: bool,
}

/// A function that a model may call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// What it is for.
    pub description: Option<String>,
    /// The JSON schema of its arguments, as JSON; `None`: it takes none.
    pub parameters: Option<String>,
    /// Whether its arguments must be of that schema.
    pub strict: bool,
}

/// Whether a model is to call tools.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToolChoice {
    /// As it likes.
    #[default]
    Auto,
    /// It must not.
    None,
    /// It must.
    Required,
}

/// Why the last message of a chat cannot be continued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContinuationFault {
    /// It is not an assistant's.
    NotAssistant,
    /// It says nothing but white space, or it called tools, after which their results come.
    NoText,
    /// The chat has tools that may be called.
    Tools,
}

impl fmt::Display for ContinuationFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotAssistant => "must be assistant in the last message, if that is to be continued",
            Self::NoText => "must have text, and no call of a tool, in the last message, if that is to be continued",
            Self::Tools => {
                "may not be called in a turn that is continued: leave them out, or choose that none is called"
            }
        })
    }
}

/// Looks whether the last message of a chat can be continued, where that is asked for.
///
/// # Errors
/// Why not.
pub fn check_continuation(chat: &Chat) -> Result<(), ContinuationFault> {
    if !chat.continue_final_message {
        return Ok(());
    }
    let Some(last) = chat.messages.last().filter(|last| last.role == Role::Assistant) else {
        return Err(ContinuationFault::NotAssistant);
    };
    if !last.tool_calls.is_empty() || last.said().trim().is_empty() {
        return Err(ContinuationFault::NoText);
    }
    if !chat.tools.is_empty() && chat.tool_choice != ToolChoice::None {
        return Err(ContinuationFault::Tools);
    }
    Ok(())
}

/// What is wrong with the tools of a chat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolsFault {
    /// Whose name it is, from 0; `None`: all of them together.
    pub tool: Option<usize>,
    /// What must be otherwise, to follow the name of the field.
    pub message: String,
}

/// Looks at what holds for the tools of a chat whatever protocol they come by: how many, how long, and their names.
///
/// # Errors
/// The first fault.
pub fn check_tools(tools: &[Tool]) -> Result<(), ToolsFault> {
    let of_all = |message: String| Err(ToolsFault { tool: None, message });
    if tools.len() > MAX_TOOLS {
        return of_all(format!("must have at most {MAX_TOOLS} tools, not {}", tools.len()));
    }
    let is_sign = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    for (i, Tool { name, .. }) in tools.iter().enumerate() {
        let of_name = |message: String| Err(ToolsFault { tool: Some(i), message });
        if name.is_empty() || name.len() > MAX_TOOL_NAME_BYTES || !name.chars().all(is_sign) {
            return of_name(format!("must have 1 to {MAX_TOOL_NAME_BYTES} letters, digits and signs of _ - . alone"));
        }
        if tools[..i].iter().any(|other| other.name == *name) {
            return of_name("is the name of a tool before it; give each one a name of its own".to_owned());
        }
    }
    let bytes: usize = tools.iter().flat_map(Tool::texts).map(str::len).sum();
    if bytes > MAX_TOOLS_BYTES {
        return of_all(format!("must have at most {MAX_TOOLS_BYTES} bytes, not {bytes}"));
    }
    Ok(())
}

impl Tool {
    fn texts(&self) -> impl Iterator<Item = &str> {
        [Some(self.name.as_str()), self.description.as_deref(), self.parameters.as_deref()].into_iter().flatten()
    }
}

impl From<Vec<Message>> for Chat {
    /// A chat without tools.
    fn from(messages: Vec<Message>) -> Self {
        Self { messages, ..Self::default() }
    }
}

impl Chat {
    /// All its texts, those of tools first, as templates have them.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        let of_tools = self.tools.iter().flat_map(Tool::texts);
        let variables = self.template_variables.iter().flat_map(|(name, value)| [name.as_str(), value.as_str()]);
        of_tools.chain(self.messages.iter().flat_map(Message::texts)).chain(variables)
    }
}

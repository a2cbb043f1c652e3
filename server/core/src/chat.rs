//! A chat as it is asked: what was said, which tools may be called, whether the model may think first.

use serde::{Deserialize, Serialize};

use crate::message::Message;

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
    /// Further variables for its template, by name, each as JSON.
    pub template_variables: Vec<(String, String)>,
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

impl From<Vec<Message>> for Chat {
    /// A chat without tools.
    fn from(messages: Vec<Message>) -> Self {
        Self { messages, ..Self::default() }
    }
}

impl Chat {
    /// All its texts, those of tools first, as templates have them.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        let of_tools = self.tools.iter().flat_map(|tool| {
            [Some(tool.name.as_str()), tool.description.as_deref(), tool.parameters.as_deref()].into_iter().flatten()
        });
        let variables = self.template_variables.iter().flat_map(|(name, value)| [name.as_str(), value.as_str()]);
        of_tools.chain(self.messages.iter().flat_map(Message::texts)).chain(variables)
    }
}

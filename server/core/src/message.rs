//! The messages of a chat: who says what, and which tools were called and answered.
//!
//! Absent: images, sound and files, which no model is given yet, and what a template makes of a message.

use std::borrow::Cow;
use std::fmt;

use serde::ser::{SerializeMap, SerializeSeq, Serializer};
use serde::{Deserialize, Serialize};

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Role {
    /// Instructions.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// What a tool returned.
    Tool,
}

impl Role {
    /// The word in templates, and in most protocols.
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said; nothing where an assistant's turn only called tools.
    pub content: Vec<Part>,
    /// Which of several speakers of the same role, or which tool.
    pub name: Option<String>,
    /// What the model thought before it said that.
    pub reasoning: Option<String>,
    /// The tools that the model called in this turn.
    pub tool_calls: Vec<ToolCall>,
    /// The earlier call that this message answers; of tools alone.
    pub tool_call_id: Option<String>,
}

/// A part of what a message says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Part {
    /// Text.
    Text(String),
    /// What an assistant said where it declined to answer.
    Refusal(String),
}

impl Part {
    /// What it says.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::Text(text) | Self::Refusal(text) => text,
        }
    }
}

/// A call of a tool in an assistant's turn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    /// What the answer to it repeats.
    pub id: String,
    /// The tool.
    pub name: String,
    /// What it was called with: JSON, unless the model wrote something else.
    pub arguments: String,
}

impl ToolCall {
    /// What it was called with, as templates take it: an empty object where that is nothing, as clients write it of a tool without
    /// parameters.
    #[must_use]
    pub fn arguments_told(&self) -> &str {
        if self.arguments.is_empty() { "{}" } else { &self.arguments }
    }

    fn texts(&self) -> [&str; 3] {
        [&self.id, &self.name, &self.arguments]
    }
}

impl Message {
    /// A message that is text alone.
    #[must_use]
    pub fn text(role: Role, content: impl Into<String>) -> Self {
        let content = vec![Part::Text(content.into())];
        Self { role, content, name: None, reasoning: None, tool_calls: Vec::new(), tool_call_id: None }
    }

    /// What it says as one text: its parts, joined by line breaks, as llama-server does.
    #[must_use]
    pub fn said(&self) -> Cow<'_, str> {
        match self.content.as_slice() {
            [part] => Cow::Borrowed(part.as_str()),
            parts => Cow::Owned(Joined(parts).to_string()),
        }
    }

    /// All its texts, its role among them.
    pub(crate) fn texts(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.role.as_str())
            .chain(self.name.as_deref())
            .chain(self.reasoning.as_deref())
            .chain(self.content.iter().map(Part::as_str))
            .chain(self.tool_calls.iter().flat_map(ToolCall::texts))
            .chain(self.tool_call_id.as_deref())
    }
}

/// The messages as chat templates take them: a JSON array of `OpenAI`'s shape, of which each content is one text.
///
/// # Errors
/// Only if memory cannot be had.
pub fn messages_json(messages: &[Message]) -> Result<String, serde_json::Error> {
    serde_json::to_string(&ForTemplate(messages))
}

struct Joined<'a>(&'a [Part]);

impl fmt::Display for Joined<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, part) in self.0.iter().enumerate() {
            f.write_str(if i > 0 { "\n" } else { "" })?;
            f.write_str(part.as_str())?;
        }
        Ok(())
    }
}

/// Written for a template, and not as the fields are.
struct ForTemplate<'a, T: ?Sized>(&'a T);

impl Serialize for ForTemplate<'_, [Message]> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(ForTemplate))
    }
}

impl Serialize for ForTemplate<'_, [Part]> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            [part] => part.as_str().serialize(serializer),
            parts => serializer.collect_str(&Joined(parts)),
        }
    }
}

impl Serialize for ForTemplate<'_, Message> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Message { role, content, name, reasoning, tool_calls, tool_call_id } = self.0;
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("role", role.as_str())?;
        map.serialize_entry("content", &ForTemplate(content.as_slice()))?;
        for (key, text) in [("name", name), ("reasoning_content", reasoning), ("tool_call_id", tool_call_id)] {
            if let Some(text) = text {
                map.serialize_entry(key, text)?;
            }
        }
        if !tool_calls.is_empty() {
            map.serialize_entry("tool_calls", &ForTemplate(tool_calls.as_slice()))?;
        }
        map.end()
    }
}

impl Serialize for ForTemplate<'_, [ToolCall]> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Call<'a> {
            id: &'a str,
            #[serde(rename = "type")]
            kind: &'static str,
            function: Function<'a>,
        }
        #[derive(Serialize)]
        struct Function<'a> {
            name: &'a str,
            arguments: &'a str,
        }
        let mut calls = serializer.serialize_seq(Some(self.0.len()))?;
        for call in self.0 {
            let function = Function { name: &call.name, arguments: call.arguments_told() };
            calls.serialize_element(&Call { id: &call.id, kind: "function", function })?;
        }
        calls.end()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_template_gets_each_field_and_one_text_of_the_parts() {
        let part = |text: &str| Part::Text(text.to_owned());
        let call = ToolCall { id: "1".into(), name: "f".into(), arguments: r#"{"a":"\u00e9"}"#.into() };
        let messages = [
            Message { content: vec![part("a\"b"), Part::Refusal("c".into())], ..Message::text(Role::System, "") },
            Message {
                content: Vec::new(),
                reasoning: Some("hm".into()),
                tool_calls: vec![call],
                ..Message::text(Role::Assistant, "")
            },
            Message { name: Some("f".into()), tool_call_id: Some("1".into()), ..Message::text(Role::Tool, "{}") },
        ];
        let wanted = concat!(
            r#"[{"role":"system","content":"a\"b\nc"},"#,
            r#"{"role":"assistant","content":"","reasoning_content":"hm","tool_calls":[{"id":"1","type":"function","#,
            r#""function":{"name":"f","arguments":"{\"a\":\"\\u00e9\"}"}}]},"#,
            r#"{"role":"tool","content":"{}","name":"f","tool_call_id":"1"}]"#,
        );
        assert_eq!(messages_json(&messages).unwrap(), wanted);
        assert_eq!(messages[0].said(), "a\"b\nc");
    }
}

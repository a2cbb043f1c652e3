//! The model's chat template, rendered by llama.cpp's own `common_chat_*`.
//!
//! Flow: messages (an `OpenAI` array, as JSON) are checked for shape and depth, then rendered in C++ behind a try/catch;
//! the prompt comes back with the stop strings that the template's format adds. Absent: tools and their parsers.

use std::ptr::NonNull;
use std::sync::Arc;

use serde::Deserialize;

use crate::error::ChatError;
use crate::model::Model;
use crate::shim::{self, RawChatTemplate, RawText};

/// A parsed template. Rendering does not change it, so threads may share one.
#[derive(Debug)]
pub struct ChatTemplate {
    ptr: NonNull<RawChatTemplate>,
    /// The template copied what it needs of the vocabulary; the model is kept all the same.
    _model: Arc<Model>,
}

// SAFETY: owned, bound to no thread.
unsafe impl Send for ChatTemplate {}
// SAFETY: rendering takes the parsed program const and keeps its state in a context of its own for each call.
unsafe impl Sync for ChatTemplate {}

impl Drop for ChatTemplate {
    fn drop(&mut self) {
        // SAFETY: owned and not used again.
        unsafe { shim::gantry_chat_template_free(self.ptr.as_ptr()) };
    }
}

/// A rendered chat.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct ChatPrompt {
    /// The text to tokenise, special tokens parsed.
    pub prompt: String,
    /// Strings that end an answer in this template's format, besides the model's own end tokens.
    #[serde(rename = "stops")]
    pub additional_stops: Vec<String>,
}

impl ChatTemplate {
    /// Parses the model's template; `None` when the file brings none.
    ///
    /// # Errors
    /// When the template cannot be parsed.
    pub fn new(model: &Arc<Model>) -> Result<Option<Self>, ChatError> {
        if !model.has_chat_template() {
            return Ok(None);
        }
        let mut reason = RawText::empty();
        // SAFETY: the model is alive; `reason` is filled by the callee, which catches exceptions.
        let ptr = unsafe { shim::gantry_chat_template_new(model.raw(), &raw mut reason) };
        let reason = reason.into_result();
        match NonNull::new(ptr) {
            Some(ptr) => Ok(Some(Self { ptr, _model: model.clone() })),
            None => Err(ChatError::Template(reason.err().unwrap_or_default())),
        }
    }

    /// Renders a chat with the assistant's turn opened.
    ///
    /// # Errors
    /// When the messages are not an array of messages with roles, or the template refuses them.
    pub fn render(&self, messages_json: &str) -> Result<ChatPrompt, ChatError> {
        check_messages(messages_json)?;
        // SAFETY: the template is alive, the text has the length given, and the shim catches exceptions.
        let answer = unsafe {
            shim::gantry_chat_template_apply(self.ptr.as_ptr(), messages_json.as_ptr().cast(), messages_json.len())
        };
        let answer = answer.into_result().map_err(ChatError::Template)?;
        serde_json::from_str(&answer)
            .map_err(|e| ChatError::Template(format!("the rendered prompt is unreadable: {e}")))
    }
}

/// Refuses what the C++ side would meet with a deep recursion or an answer that names no message.
fn check_messages(messages_json: &str) -> Result<(), ChatError> {
    // serde_json bounds the depth; C++'s parser does not.
    let messages: serde_json::Value =
        serde_json::from_str(messages_json).map_err(|e| ChatError::Messages(format!("not JSON: {e}")))?;
    let messages = messages.as_array().ok_or_else(|| ChatError::Messages(String::from("not an array")))?;
    if messages.is_empty() {
        return Err(ChatError::Messages(String::from("at least one message is needed")));
    }
    for (i, message) in messages.iter().enumerate() {
        let role = message.get("role").and_then(serde_json::Value::as_str).unwrap_or_default();
        if role.is_empty() {
            return Err(ChatError::Messages(format!("message {i} has no role")));
        }
        if message.get("content").is_none() && message.get("tool_calls").is_none() {
            return Err(ChatError::Messages(format!("message {i} has neither content nor tool_calls")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn messages_without_shape_are_refused() {
        assert_eq!(check_messages(r#"[{"role":"user","content":"hi"}]"#), Ok(()));
        assert_eq!(check_messages(r#"[{"role":"assistant","tool_calls":[]}]"#), Ok(()));
        let deep = format!("[{}{}]", "[".repeat(100_000), "]".repeat(100_000));
        for bad in [
            "",
            "{}",
            "[]",
            "[1]",
            r#"[{"content":"x"}]"#,
            r#"[{"role":7,"content":"x"}]"#,
            r#"[{"role":"user"}]"#,
            &deep,
        ] {
            assert!(matches!(check_messages(bad), Err(ChatError::Messages(_))), "{}", &bad[..bad.len().min(40)]);
        }
    }
}

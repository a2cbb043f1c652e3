//! What a model answered, read by llama.cpp's own parsers: what it thought, what it says, which tools it calls.
//!
//! A parser reads an answer from its beginning each time; who is told of one piece by piece decides how often that pays. What it
//! takes is bounded, as the template is that it was made from. Absent: which pieces are new.

use std::borrow::Cow;
use std::ptr::NonNull;

use serde::{Deserialize, Serialize};

use super::limits::{PARSE_CPU_MS, PARSE_MEMORY_BYTES, PARSE_MEMORY_PER_BYTE};
use crate::error::ChatError;
use crate::shim::{self, RawAnswerParser, RawText};

/// What answers to a chat look like, as its template has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnswerForm {
    format: i32,
    parser: String,
    /// What the prompt ends with that belongs to the answer's form: its grammar begins with it.
    pub prefix: String,
    /// The reserved tokens that an answer is read by.
    pub markup: Vec<String>,
    /// In GBNF, where a tool must be called; otherwise empty.
    grammar: String,
}

impl AnswerForm {
    /// The grammar of answers in which a tool must be called, and nothing is said before that; `None`: none must be.
    #[must_use]
    pub fn required_grammar(&self) -> Option<String> {
        (!self.grammar.is_empty()).then(|| self.grammar.lines().map(without_text).collect::<Vec<_>>().join("\n"))
    }
}

/// The rule `root` without the text that llama.cpp lets stand before calls, an optional rule of its own making.
fn without_text(rule: &str) -> Cow<'_, str> {
    let is_text = |word: &str| {
        let number = word.strip_prefix("until-").and_then(|rest| rest.strip_suffix('?'));
        number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    if !rule.starts_with("root ::=") || !rule.split(' ').any(is_text) {
        return Cow::Borrowed(rule);
    }
    Cow::Owned(rule.split(' ').filter(|word| !is_text(word)).collect::<Vec<_>>().join(" "))
}

/// What was read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct ParsedAnswer {
    /// What the model thought.
    pub reasoning: String,
    /// What it says.
    pub content: String,
    /// What it calls; of the last one the arguments may be incomplete.
    pub calls: Vec<ParsedCall>,
    /// Whether nothing need follow.
    pub whole: bool,
    /// What the text ends in that may go on: `reasoning`, `content` or nothing that is text.
    pub open: String,
    /// What follows the last of what was thought or said: markup, or the beginning of some.
    pub held: String,
}

/// A call of a tool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct ParsedCall {
    /// What the model calls it; empty in most formats.
    pub id: String,
    /// The tool.
    pub name: String,
    /// JSON, or its beginning.
    pub arguments: String,
}

/// Reads answers of one form.
#[derive(Debug)]
pub struct AnswerParser(NonNull<RawAnswerParser>);

// SAFETY: owned, bound to no thread.
unsafe impl Send for AnswerParser {}

impl Drop for AnswerParser {
    fn drop(&mut self) {
        // SAFETY: owned and not used again.
        unsafe { shim::gantry_answer_parser_free(self.0.as_ptr()) };
    }
}

impl AnswerParser {
    /// A parser of this form.
    ///
    /// # Errors
    /// When it is none that llama.cpp made.
    pub fn new(form: &AnswerForm) -> Result<Self, ChatError> {
        let json = serde_json::to_string(form).map_err(|e| ChatError::Template(e.to_string()))?;
        let mut reason = RawText::empty();
        // SAFETY: the text has the length given; `reason` is filled by the callee, which catches exceptions.
        let ptr = unsafe { shim::gantry_answer_parser_new(json.as_ptr().cast(), json.len(), &raw mut reason) };
        let reason = reason.into_result().err().unwrap_or_default();
        NonNull::new(ptr).map(Self).ok_or_else(|| ChatError::Template(format!("its answers cannot be read: {reason}")))
    }

    /// Reads the beginning of an answer, or all of it.
    ///
    /// # Errors
    /// When it is of another form, or takes too much.
    pub fn parse(&self, text: &str) -> Result<ParsedAnswer, ChatError> {
        let bytes = u64::try_from(text.len()).unwrap_or(u64::MAX);
        let memory = PARSE_MEMORY_BYTES.saturating_add(bytes.saturating_mul(PARSE_MEMORY_PER_BYTE));
        // SAFETY: the parser is alive, the text has the length given, and the shim catches exceptions.
        let answer = unsafe {
            shim::gantry_answer_parse(self.0.as_ptr(), text.as_ptr().cast(), text.len(), PARSE_CPU_MS, memory)
        };
        let answer = answer.into_result().map_err(ChatError::Template)?;
        serde_json::from_str(&answer).map_err(|e| ChatError::Template(e.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_said_before_a_call_that_is_required() {
        let root = "root ::= \"a\\n\" space (\"<think>\" until-3 \"</think>\")? until-169? tool-calls";
        assert_eq!(without_text(root), "root ::= \"a\\n\" space (\"<think>\" until-3 \"</think>\")? tool-calls");
        for other in ["root ::= tool-calls", "tool ::= until-1? x", "root ::= \"until-?\""] {
            assert_eq!(without_text(other), other);
        }
    }
}

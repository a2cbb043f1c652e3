//! Text of messages stays text: where a message writes a reserved token, a mark goes into it before the template sees it.
//!
//! The prompt that comes back has the marks wherever the template put the text: trimmed, joined, in other case, within
//! JSON, by code that llama.cpp has for some templates. [`unmark`] takes them out and tells where they were, and no token
//! is made of what one of them stood in. A chat that writes no such token goes through unchanged.
//!
//! An input may also become a reserved token together with what stands beside it, `<|im_` before `end|>`, so that an
//! input that could begin, end or be within one gets a mark at that end, and where it has the name of one, as a template may cut
//! that out and put it between signs of its own, there is one within the name. Roles and types of the API are left alone: templates
//! compare them, and build tokens of them. What an assistant is said to have said may hold user-defined tokens such as
//! `</think>`, which templates look for and which its own answers have. A token of a single character cannot be told from
//! text, and is that token wherever it stands.

use std::collections::HashSet;

use serde_json::{Map, Value};

use crate::chat::{ChatPrompt, check_written_json};
use crate::error::ChatError;
use crate::model::{Model, Token};
use crate::neutral::{neutral, not_in};
use crate::specials::{Special, Specials};

/// Names of fields whose words templates compare and build tokens of, and those words: nobody forges anything with them, even
/// where a vocabulary has a token that is written so.
const FIELDS_OF_WORDS: [&str; 2] = ["role", "type"];
const WORDS: [&str; 7] = ["system", "developer", "user", "assistant", "tool", "text", "function"];
/// Names of fields that a message of the API has, of which the same is true.
const FIELDS: [&str; 11] = [
    "role",
    "type",
    "content",
    "text",
    "name",
    "reasoning_content",
    "tool_calls",
    "tool_call_id",
    "id",
    "function",
    "arguments",
];
/// Words of JSON.
const JSON_WORDS: [&str; 3] = ["true", "false", "null"];
/// A mark that nothing escapes and no letter's case changes.
pub(crate) const MARK: char = '\u{7f}';
/// Where that is in a text: characters of private use.
const OTHER_MARKS: std::ops::RangeInclusive<char> = '\u{f0000}'..='\u{ffffd}';

impl Model {
    /// The prompt of a chat, which is what [`ChatTemplate::render`](crate::ChatTemplate::render) takes: `render` is that, wherever
    /// it is rendered. What messages and tools say is text of the prompt ([`ChatPrompt::text_at`]), whatever tokens it spells.
    ///
    /// # Errors
    /// What `render` says; that the messages are no JSON, or leave no character for a mark; or that the template makes
    /// special tokens of what they say ([`ChatError::Forged`]).
    pub fn chat_prompt(
        &self,
        chat_json: &str,
        mut render: impl FnMut(&str) -> Result<ChatPrompt, ChatError>,
    ) -> Result<ChatPrompt, ChatError> {
        let asked: Value =
            serde_json::from_str(chat_json).map_err(|e| ChatError::Messages(format!("not JSON: {e}")))?;
        // Before anything is made of them here: an answer of a tool may be a few bytes for each value.
        check_written_json(&asked).map_err(ChatError::Messages)?;
        let specials = self.specials();
        let marked = mark(&asked, specials).map_err(ChatError::Messages)?;
        let chat = match &marked {
            None => render(chat_json)?,
            Some((marked, mark)) => unmarked(render(&marked.to_string())?, *mark),
        };
        let (marked, mark) = marked.unwrap_or((asked, MARK));
        if let Some(neutral) = neutral(&marked, specials) {
            let neutral = unmarked(render(&neutral.to_string())?, mark);
            let is_told = |&token: &Token| specials.by_token(token).is_some_and(Special::is_told_from_text);
            let taken = |chat: &ChatPrompt| -> Vec<Token> {
                self.specials_taken(&chat.prompt, &chat.text_at).into_iter().filter(is_told).collect()
            };
            if let Some(forged) = not_in(&taken(&chat), &taken(&neutral)) {
                let token = self.reserved_text(forged).unwrap_or_default().to_owned();
                return Err(ChatError::Forged { token });
            }
        }
        Ok(chat)
    }
}

fn unmarked(mut chat: ChatPrompt, mark: char) -> ChatPrompt {
    (chat.prompt, chat.text_at) = unmark(&chat.prompt, mark);
    chat
}

/// Marks all messages and tools of a chat; `None`: none needs it.
///
/// # Errors
/// They use up every character that could be a mark.
fn mark(chat: &Value, specials: &Specials) -> Result<Option<(Value, char)>, String> {
    let mark = unused(chat).ok_or("they hold every character of private use")?;
    let marker = Marker { specials, mark };
    let mut marked = chat.clone();
    let mut any = each_said(&mut marked, &mut |said, place| marker.value(said, place));
    any |= marked.get_mut("variables").is_some_and(|variables| marker.variable(variables));
    // What may be called is named as it is: nothing of it goes into the prompt.
    if any && let (Some(tools), Some(object)) = (chat.get("tools"), marked.as_object_mut()) {
        object.entry("callable").or_insert_with(|| tools.clone());
    }
    Ok(any.then_some((marked, mark)))
}

/// Changes each message and each tool of a chat; whether any was.
pub(crate) fn each_said(chat: &mut Value, change: &mut impl FnMut(&mut Value, Place) -> bool) -> bool {
    let mut any = false;
    if let Some(Value::Array(tools)) = chat.get_mut("tools") {
        any |= tools.iter_mut().fold(false, |any, tool| change(tool, Place::IN_TOOL) | any);
    }
    let messages = if chat.is_object() { chat.get_mut("messages") } else { Some(chat) };
    for message in messages.and_then(Value::as_array_mut).into_iter().flatten() {
        let place = Place::in_message(message);
        any |= change(message, place);
    }
    any
}

/// A text without its marks, and where they were, in bytes.
fn unmark(text: &str, mark: char) -> (String, Vec<usize>) {
    let mut plain = String::with_capacity(text.len());
    let mut places = Vec::new();
    for (i, part) in text.split(mark).enumerate() {
        if i > 0 {
            places.push(plain.len());
        }
        plain.push_str(part);
    }
    (plain, places)
}

/// A character that no text of the chat has.
fn unused(messages: &Value) -> Option<char> {
    let mut taken = false;
    each_text(messages, &mut |text| taken |= text.contains(MARK));
    if !taken {
        return Some(MARK);
    }
    let mut used = HashSet::new();
    each_text(messages, &mut |text| used.extend(text.chars().filter(|c| OTHER_MARKS.contains(c))));
    OTHER_MARKS.clone().find(|mark| !used.contains(mark))
}

fn each_text(value: &Value, see: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => see(text),
        Value::Array(items) => items.iter().for_each(|item| each_text(item, see)),
        Value::Object(fields) => {
            for (name, value) in fields {
                see(name);
                each_text(value, see);
            }
        }
        _ => {}
    }
}

fn any_text(value: &Value, is: &impl Fn(&str) -> bool) -> bool {
    match value {
        Value::String(text) => is(text),
        Value::Array(items) => items.iter().any(|item| any_text(item, is)),
        Value::Object(fields) => fields.iter().any(|(name, value)| is(name) || any_text(value, is)),
        _ => false,
    }
}

/// Where something stands in a chat.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    /// In an assistant's turn.
    pub(crate) said: bool,
    /// Where llama.cpp reads texts as JSON: arguments of calls, and what tools returned.
    pub(crate) json: bool,
    /// In JSON that a message writes, so that no name or word of it is the API's.
    pub(crate) written: bool,
}

impl Place {
    /// In what is said of a tool.
    const IN_TOOL: Self = Self { said: false, json: false, written: false };

    /// In this message of a chat.
    pub(crate) fn in_message(message: &Value) -> Self {
        let role = message.get("role").and_then(Value::as_str);
        Self { said: role == Some("assistant"), json: role == Some("tool"), written: false }
    }

    /// In this field of that.
    pub(crate) fn in_field(self, name: &str) -> Self {
        Self { json: self.json || name == "tool_calls", ..self }
    }

    /// Whether the value of a field is a word of the API.
    pub(crate) fn is_word(self, field: &str, value: &Value) -> bool {
        let is_one = |word: &str| WORDS.contains(&word);
        !self.written && FIELDS_OF_WORDS.contains(&field) && value.as_str().is_some_and(is_one)
    }

    /// Whether a field is one of the API.
    pub(crate) fn is_field(self, name: &str) -> bool {
        !self.written && FIELDS.contains(&name)
    }
}

struct Marker<'a> {
    specials: &'a Specials,
    mark: char,
}

impl Marker<'_> {
    /// Whether there was something to mark.
    fn value(&self, value: &mut Value, place: Place) -> bool {
        match value {
            Value::String(text) => self.text(text, place),
            Value::Array(items) => items.iter_mut().fold(false, |any, item| self.value(item, place) | any),
            Value::Object(fields) => self.object(fields, place),
            _ => false,
        }
    }

    /// Templates compare the words of variables, so that only tokens that are written out are marked.
    fn variable(&self, value: &mut Value) -> bool {
        match value {
            Value::String(text) => {
                let places = self.written(text, false);
                self.put(text, places)
            }
            Value::Array(items) => items.iter_mut().fold(false, |any, item| self.variable(item) | any),
            Value::Object(fields) => fields.values_mut().fold(false, |any, value| self.variable(value) | any),
            _ => false,
        }
    }

    fn object(&self, fields: &mut Map<String, Value>, place: Place) -> bool {
        let mut any = false;
        for (mut name, mut value) in std::mem::take(fields) {
            if !place.is_word(&name, &value) {
                any |= self.value(&mut value, place);
            }
            if !place.is_field(&name) {
                let mut places = self.written(&name, place.said);
                places.extend(self.named(&name));
                any |= self.put(&mut name, places);
            }
            fields.insert(name, value);
        }
        any
    }

    fn text(&self, text: &mut String, place: Place) -> bool {
        if let Some(hidden) = self.within_json(text, place) {
            *text = hidden;
            return true;
        }
        let mut places = self.written(text, place.said);
        let trimmed = text.trim();
        if !trimmed.is_empty() {
            let start = text.len() - text.trim_start().len();
            let (before, after) = if self.specials.may_hold(trimmed) {
                (true, true)
            } else {
                (self.specials.may_end_in(trimmed), self.specials.may_begin_in(trimmed))
            };
            places.extend(before.then_some(start));
            places.extend(after.then_some(start + trimmed.len()));
        }
        // An escape that is cut in two would be no JSON any more.
        if !(text.contains('\\') && begins_json(text)) {
            places.extend(self.named(text));
        }
        self.put(text, places)
    }

    /// Inside each reserved token that is written in the text: after its first character.
    fn written(&self, text: &str, said: bool) -> Vec<usize> {
        let found = self.specials.find(text);
        let found = found.filter(|written| !(said && self.specials.get(written.special).may_be_said()));
        found
            .filter_map(|written| {
                let first = text[written.start..].chars().next()?.len_utf8();
                (written.start + first < written.end).then_some(written.start + first)
            })
            .collect()
    }

    /// Inside each name of a token, to which a template could add the signs: within it, so that it stays in what the template
    /// cuts out. One of a single character has them around it. In JSON that is read as such, a number or `true` is none.
    fn named(&self, text: &str) -> Vec<usize> {
        let mut places = Vec::new();
        for name in self.specials.names_in(text) {
            let written = &text[name.clone()];
            let first = written.chars().next().map_or(0, char::len_utf8);
            if !written.contains(char::is_alphabetic) || JSON_WORDS.contains(&written) {
                continue;
            }
            places.extend(if first < name.len() { vec![name.start + first] } else { vec![name.start, name.end] });
        }
        places
    }

    fn put(&self, text: &mut String, mut places: Vec<usize>) -> bool {
        if places.is_empty() {
            return false;
        }
        places.sort_unstable();
        places.dedup();
        let mut marked = String::with_capacity(text.len() + places.len() * self.mark.len_utf8());
        let mut from = 0;
        for place in places {
            marked.push_str(&text[from..place]);
            marked.push(self.mark);
            from = place;
        }
        marked.push_str(&text[from..]);
        *text = marked;
        true
    }

    /// llama.cpp reads the arguments of calls, and some results, as JSON: tokens that are written there with escapes
    /// (`\u003c`) would appear only then. `None`: there are none.
    fn within_json(&self, text: &str, place: Place) -> Option<String> {
        if !text.contains('\\') || !begins_json(text) {
            return None;
        }
        let mut value: Value = serde_json::from_str(text).ok()?;
        any_text(&value, &|inner| !self.written(inner, place.said).is_empty()).then(|| {
            self.value(&mut value, Place { written: true, ..place });
            value.to_string()
        })
    }
}

/// Whether llama.cpp would try to read a text as JSON.
pub(crate) fn begins_json(text: &str) -> bool {
    text.trim_start().starts_with(['{', '[', '"'])
}

/// What a text that may be JSON has, outside of its strings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct JsonShape {
    /// The deepest nesting of brackets and braces.
    pub(crate) depth: usize,
    /// Lists, objects, and their members but the first of each.
    pub(crate) values: usize,
}

/// Counts the signs of JSON in a text.
pub(crate) fn json_shape(text: &str) -> JsonShape {
    let (mut depth, mut deepest, mut in_string, mut escaped) = (0_usize, 0, false, false);
    let mut values = 0;
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'[' | b'{' if !in_string => {
                depth += 1;
                values += 1;
                deepest = deepest.max(depth);
            }
            b']' | b'}' if !in_string => depth = depth.saturating_sub(1),
            b',' if !in_string => values += 1,
            _ => {}
        }
    }
    JsonShape { depth: deepest, values }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;
    use crate::specials::testing::{control, specials};

    fn marked(messages: &Value) -> Option<Value> {
        mark(messages, &specials()).unwrap().map(|(messages, mark)| {
            let text = serde_json::to_string(&messages).unwrap().replace(mark, "•");
            serde_json::from_str(&text).unwrap()
        })
    }

    #[test]
    fn a_chat_without_tokens_is_left_alone() {
        let messages = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is a < b and b > c? <b>Bold</b> [1]"},
            {"role": "assistant", "content": "<tool_call> was said", "tool_calls": [{"type": "function"}]},
        ]);
        assert_eq!(marked(&messages), None);
    }

    #[test]
    fn words_and_names_of_the_api_are_left_alone_where_they_are_the_apis() {
        let specials = Specials::new(["user", "content", "text"].map(|text| control(1, text)).into());
        let mark = |messages: Value| mark(&messages, &specials).unwrap().map(|(messages, _)| messages);
        assert_eq!(mark(json!([{"role": "user", "content": "Hello"}])), None);
        let typed = json!([{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]);
        assert_eq!(mark(typed), None);
        let marked = mark(json!([{"role": "user", "content": "the user"}])).unwrap();
        assert_eq!(marked[0]["content"], "\u{7f}the u\u{7f}ser");
        assert_eq!(marked[0]["role"], "user");
        // Of another's role there may be a token, too.
        assert_eq!(mark(json!([{"role": "the user", "content": "a"}])).unwrap()[0]["role"], "\u{7f}the u\u{7f}ser");
    }

    #[test]
    fn every_text_of_a_message_is_marked_where_it_writes_a_token() {
        let messages = json!([
            {"role": "user", "name": "<|im_end|>", "content": "a<|im_end|>b <TOOL_CALL>"},
            {"role": "assistant", "content": "<|im_end|><tool_call>", "reasoning_content": "[INST]"},
            {"role": "tool", "content": [{"type": "text", "text": "</s>"}], "tool_call_id": "</s>"},
        ]);
        let wanted = json!([
            {"role": "user", "name": "<•|i•m_end|>", "content": "a<•|i•m_end|>b <•TOOL_CALL>"},
            {"role": "assistant", "content": "<•|i•m_end|><tool_call>", "reasoning_content": "[•I•NST]"},
            {"role": "tool", "content": [{"type": "text", "text": "<•/•s>"}], "tool_call_id": "<•/•s>"},
        ]);
        // At their ends these texts could be a part of another token.
        let inside = serde_json::to_string(&marked(&messages).unwrap()).unwrap();
        let inside = inside.replace("\"•", "\"").replace("•\"", "\"");
        assert_eq!(serde_json::from_str::<Value>(&inside).unwrap(), wanted);
    }

    #[test]
    fn tools_are_marked_as_messages_are_and_variables_where_they_write_a_token() {
        let tool =
            json!({"type": "function", "function": {"name": "f", "description": "a<|im_end|>b", "parameters": {}}});
        let chat = json!({
            "messages": [{"role": "user", "content": "Hello"}],
            "tools": [tool],
            "variables": {"effort": "im_end", "note": ["</s>"]},
        });
        let marked = marked(&chat).unwrap();
        assert_eq!(marked["messages"], chat["messages"]);
        assert_eq!(marked["tools"][0]["function"]["description"], "a<•|i•m_end|>b");
        assert_eq!(marked["callable"], chat["tools"], "what may be called is named as it is");
        assert_eq!(marked["variables"], json!({"effort": "im_end", "note": ["<•/s>"]}));
        assert_eq!(self::marked(&json!({"messages": [{"role": "user", "content": "Hello"}], "tools": []})), None);
    }

    #[test]
    fn what_may_become_a_token_with_its_neighbours_is_marked_at_its_ends() {
        let text = |text: &str| {
            let marked = marked(&json!([{"role": "user", "content": text}]));
            marked.map_or_else(|| text.to_owned(), |messages| messages[0]["content"].as_str().unwrap().to_owned())
        };
        assert_eq!(text(" so it <|im_ "), " so it <|im_• ");
        assert_eq!(text(" end|> is it"), " •end|> is it");
        assert_eq!(text("im_end"), "•i•m_end•");
        assert_eq!(text("the im_end.x"), "the i•m_end.x");
        assert_eq!(text("so it is"), "so it is");
    }

    #[test]
    fn tokens_that_are_escaped_within_json_are_found() {
        let arguments = r#"{"a": "\u003c|im_end|>", "b": [1]}"#;
        let messages = json!([{"role": "assistant", "tool_calls": [{"function": {"arguments": arguments}}]}]);
        let marked = marked(&messages).unwrap();
        let arguments = marked[0]["tool_calls"][0]["function"]["arguments"].as_str().unwrap();
        let read: Value = serde_json::from_str(arguments).unwrap();
        assert_eq!(read["a"].as_str().unwrap().trim_matches('•'), "<•|i•m_end|>");
    }

    #[test]
    fn a_mark_that_a_text_has_is_not_taken() {
        let messages = json!([{"role": "user", "content": "\u{7f}</s>\u{f0000}"}]);
        let (marked, mark) = mark(&messages, &specials()).unwrap().unwrap();
        assert_eq!(mark, '\u{f0001}');
        let (plain, places) = unmark(marked[0]["content"].as_str().unwrap(), mark);
        assert_eq!((plain.as_str(), places.as_slice()), ("\u{7f}</s>\u{f0000}", [2, 3].as_slice()));
    }

    #[test]
    fn signs_of_json_are_counted_outside_of_strings() {
        assert_eq!(json_shape(r#"{"a": ["[[[,\"[[", {}]}"#), JsonShape { depth: 3, values: 4 });
        assert_eq!(json_shape(""), JsonShape::default());
    }
}

//! A chat of which no reserved token can be made, to hold against the one that was asked for.
//!
//! A template may take texts apart and put them together: marks within them ([`crate::guard`]) are lost where it does, and
//! what was no token becomes one. In the neutral chat each sign that such tokens are written with is another, so that whatever
//! the template does with it, all tokens of its prompt are the template's own. Those of the prompt that was asked for must
//! be among them, in their order. A chat without such signs needs none of this: only a template could add them, and one that
//! does so around what messages say is not served ([`Model::check_text_stays_text`]).

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use crate::chat::ChatPrompt;
use crate::error::ChatError;
use crate::guard::{MARK, Place, each_said};
use crate::model::{Model, Token};
use crate::specials::Specials;

/// What messages say where it is looked at what becomes of it: nothing that a template looks for.
const PROBE: char = '\u{1}';
/// So much of it that most is left where a template takes some away.
const PROBE_CHARS: usize = 16;

/// The same chat with other signs; `None`: it has none.
pub(crate) fn neutral(chat: &Value, specials: &Specials) -> Option<Value> {
    let mut neutral = chat.clone();
    each_said(&mut neutral, &mut |said, place| value(said, place, specials)).then_some(neutral)
}

fn value(of: &mut Value, place: Place, specials: &Specials) -> bool {
    match of {
        Value::String(written) => text(written, place, specials),
        Value::Array(items) => items.iter_mut().fold(false, |any, item| value(item, place, specials) | any),
        Value::Object(fields) => object(fields, place, specials),
        _ => false,
    }
}

fn object(fields: &mut Map<String, Value>, place: Place, specials: &Specials) -> bool {
    let mut any = false;
    for (mut name, mut inner) in std::mem::take(fields) {
        if !place.is_word(&name, &inner) {
            any |= value(&mut inner, place.in_field(&name), specials);
        }
        if !place.is_field(&name) {
            any |= plain(&mut name, place, specials);
        }
        fields.insert(name, inner);
    }
    any
}

/// What llama.cpp reads as JSON must stay that, and may write signs with escapes.
fn text(written: &mut String, place: Place, specials: &Specials) -> bool {
    if place.json
        && written.trim_start().starts_with(['{', '[', '"'])
        && let Ok(mut inner) = serde_json::from_str::<Value>(written)
    {
        let any = value(&mut inner, Place { written: true, ..place }, specials);
        if any {
            *written = inner.to_string();
        }
        return any;
    }
    plain(written, place, specials)
}

fn plain(written: &mut String, place: Place, specials: &Specials) -> bool {
    if !written.contains(|c| specials.is_sign(c)) {
        return false;
    }
    // What templates look for in an assistant's turn, and find there.
    let said: HashMap<usize, usize> = match place.said {
        true => {
            specials.find(written).filter(|w| specials.get(w.special).may_be_said()).map(|w| (w.start, w.end)).collect()
        }
        false => HashMap::new(),
    };
    let mut kept_to = 0;
    let mut any = false;
    let neutral = written.char_indices().map(|(at, c)| {
        kept_to = kept_to.max(said.get(&at).copied().unwrap_or(0));
        let is_other = at >= kept_to && specials.is_sign(c);
        any |= is_other;
        if is_other { specials.stand_in() } else { c }
    });
    *written = neutral.collect();
    any
}

/// The first of these tokens that is not, in their order, among those.
pub(crate) fn not_in(tokens: &[Token], those: &[Token]) -> Option<Token> {
    let mut those = those.iter();
    tokens.iter().copied().find(|token| !those.any(|that| that == token))
}

impl Model {
    /// Asks a template ([`Model::chat_prompt`]'s `render`) whether it keeps what messages say apart from what it writes around
    /// it: one that puts a part of it between `<|` and `|>` would have any word name a token.
    ///
    /// # Errors
    /// It does not: with the token.
    pub fn check_text_stays_text(
        &self,
        mut render: impl FnMut(&str) -> Result<ChatPrompt, ChatError>,
    ) -> Result<(), ChatError> {
        let probe = format!("{MARK}{}{MARK}", String::from(PROBE).repeat(PROBE_CHARS));
        let says = |role: &str| json!({"role": role, "content": probe});
        let call = json!({"id": "123456789", "type": "function", "function": {"name": probe, "arguments": "{}"}});
        for messages in [
            json!([says("user")]),
            json!([says("system"), says("user")]),
            json!([says("user"), says("assistant"), says("user")]),
            json!([{"role": "user", "content": "a", "name": probe}]),
            json!([says("user"), {"role": "assistant", "content": probe, "reasoning_content": probe}, says("user")]),
            json!([
                says("user"),
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": probe, "name": probe, "tool_call_id": "123456789"},
            ]),
        ] {
            // What it refuses, or fails with, is for others to judge.
            let Ok(chat) = render(&messages.to_string()) else { continue };
            if let Some(token) = built_of_text(&chat.prompt, self.specials()) {
                let what = format!("it writes what messages say where that becomes special tokens such as {token:?}");
                return Err(ChatError::Template(what));
            }
        }
        Ok(())
    }
}

/// A token that words of messages become in this prompt. Where both marks are still beside a text, no token is made of it.
fn built_of_text<'a>(prompt: &str, specials: &'a Specials) -> Option<&'a str> {
    let mut from = 0;
    while let Some(at) = prompt[from..].find(PROBE) {
        let start = from + at;
        let run = &prompt[start..];
        let end = start + (run.len() - run.trim_start_matches(PROBE).len());
        let (before, after) = (&prompt[..start], &prompt[end..]);
        if !(before.ends_with(MARK) && after.starts_with(MARK)) {
            let (before, after) = (before.trim_end_matches(MARK), after.trim_start_matches(MARK));
            if let Some(special) = specials.completed_between(before, after) {
                return Some(&special.text);
            }
        }
        from = end;
    }
    None
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::specials::testing::specials;

    #[test]
    fn a_neutral_chat_has_other_signs_and_nothing_else() {
        let messages = json!([
            {"role": "user", "name": "a|b", "content": "1 < 2 </think> [x]"},
            {"role": "assistant", "content": "<tool_call>{}<b>", "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": r#"{"<": ["\u003c"], "b": 1}"#}},
            ]},
        ]);
        let wanted = json!([
            {"role": "user", "name": "a^b", "content": "1 ^ 2 ^/think^ ^x^"},
            {"role": "assistant", "content": "<tool_call>{}^b^", "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": r#"{"^":["^"],"b":1}"#}},
            ]},
        ]);
        assert_eq!(neutral(&messages, &specials()), Some(wanted));
        assert_eq!(neutral(&json!([{"role": "user", "content": "What is 3 plus 4?"}]), &specials()), None);
    }

    #[test]
    fn tokens_are_looked_for_in_their_order() {
        assert_eq!(not_in(&[1, 2, 1], &[1, 3, 2, 1]), None);
        assert_eq!(not_in(&[], &[]), None);
        assert_eq!(not_in(&[1, 2, 2], &[1, 2]), Some(2));
        assert_eq!(not_in(&[2, 1], &[1, 2]), Some(1));
    }

    #[test]
    fn what_stands_between_brackets_is_found_unless_it_is_marked() {
        let specials = specials();
        for (prompt, found) in [
            ("<|\u{1}\u{1}|>", true),
            ("<|\u{7f}\u{1}\u{7f}|>", false),
            ("<|\u{1}\u{7f}|>", true),
            ("<|im_end|>user\n\u{1}<|im_end|>", false),
            ("\u{1}", false),
        ] {
            assert_eq!(built_of_text(prompt, &specials).is_some(), found, "{prompt:?}");
        }
    }
}

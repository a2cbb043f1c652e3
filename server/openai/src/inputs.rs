//! Texts that a model reads as they are, and token ids in their place: the `input` of embeddings and the `prompt` of texts, which
//! take the same four shapes. Absent: whether a vocabulary has an id, which only the model knows.

use gantry_core::{ApiError, TextInput, integer_of};
use serde_json::Value;

use crate::fields::{Fields, missing, wrong_type, wrong_value};

/// How much one request may have of them.
#[derive(Clone, Copy)]
pub(crate) struct Bounds {
    /// Texts, or arrays of ids.
    pub(crate) elements: usize,
    /// Ids of all of them.
    pub(crate) tokens: usize,
}

/// Reads a parameter that is one or several of them.
pub(crate) fn inputs(fields: &Fields<'_>, name: &str, bounds: Bounds) -> Result<Vec<TextInput>, ApiError> {
    let expected = "a string, an array of strings, an array of token ids or an array of those";
    let path = || fields.path(name);
    let value = fields.get(name).ok_or_else(|| missing(path(), &format!("{expected} is expected")))?;
    let mut tokens = Count { most: bounds.tokens, so_far: 0 };
    match value {
        Value::String(text) => Ok(vec![text_input(path(), text.clone())?]),
        Value::Array(items) if items.first().is_some_and(Value::is_number) => {
            Ok(vec![token_input(&path(), items, &mut tokens)?])
        }
        Value::Array(items) => {
            bounds.check(path(), items.len())?;
            let one = |(i, item): (usize, &Value)| {
                let path = format!("{}[{i}]", path());
                match item {
                    Value::String(text) => text_input(path, text.clone()),
                    Value::Array(ids) => token_input(&path, ids, &mut tokens),
                    other => Err(wrong_type(path, "a string or an array of token ids", other)),
                }
            };
            items.iter().enumerate().map(one).collect()
        }
        other => Err(wrong_type(path(), expected, other)),
    }
}

impl Bounds {
    fn check(self, path: String, n: usize) -> Result<(), ApiError> {
        if (1..=self.elements).contains(&n) {
            return Ok(());
        }
        Err(wrong_value(path, format_args!("must have 1 to {} elements, not {n}", self.elements)))
    }
}

/// Texts of a protocol that has no other inputs.
pub(crate) fn text_inputs(name: &str, texts: Vec<String>, bounds: Bounds) -> Result<Vec<TextInput>, ApiError> {
    bounds.check(name.to_owned(), texts.len())?;
    texts.into_iter().enumerate().map(|(i, text)| text_input(format!("{name}[{i}]"), text)).collect()
}

fn text_input(path: String, text: String) -> Result<TextInput, ApiError> {
    if text.is_empty() {
        return Err(wrong_value(path, "must not be empty"));
    }
    Ok(TextInput::Text(text))
}

/// The token ids of a whole request.
struct Count {
    most: usize,
    so_far: usize,
}

fn token_input(path: &str, items: &[Value], count: &mut Count) -> Result<TextInput, ApiError> {
    if items.is_empty() {
        return Err(wrong_value(path.to_owned(), "must not be empty"));
    }
    count.so_far = count.so_far.saturating_add(items.len());
    if count.so_far > count.most {
        let message = format_args!("is past the {} tokens that one request may have; send several", count.most);
        return Err(wrong_value(path.to_owned(), message));
    }
    token_ids(path, items).map(TextInput::Tokens)
}

/// Ids, each of which could be a token.
pub(crate) fn token_ids(path: &str, items: &[Value]) -> Result<Vec<i32>, ApiError> {
    let id = |(i, item): (usize, &Value)| {
        let path = || format!("{path}[{i}]");
        match item.as_number().and_then(integer_of).map(i32::try_from) {
            Some(Ok(id)) if id >= 0 => Ok(id),
            _ if item.is_number() => Err(wrong_value(path(), "must be a token id: an integer of 0 and more")),
            _ => Err(wrong_type(path(), "a token id", item)),
        }
    };
    items.iter().enumerate().map(id).collect()
}

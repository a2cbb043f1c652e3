//! Parameters that `OpenAI`, llama-server or vLLM know and this server does not follow yet.
//!
//! To ignore them would be to answer another question than the one that was asked, so they are refused by name; a
//! value that asks for nothing (the default) passes, since clients send defaults. What changes no answer (`user`,
//! `metadata`, `store`, `service_tier` …) is not in the table and is ignored like any unknown field.

use std::borrow::Cow;

use serde_json::{Map, Value};

use crate::error::{ApiError, ErrorCode};

type IsDefault = fn(&Value) -> bool;

/// Names, the values that ask for nothing, and what those are in words.
const TABLE: &[(&str, IsDefault, &str)] = &[
    ("best_of", is_one, "1"),
    ("echo", is_false, "false"),
    ("suffix", is_empty, "empty"),
    ("tools", is_empty, "empty"),
    ("tool_choice", is_passive_choice, "\"none\" or \"auto\""),
    ("functions", is_empty, "empty"),
    ("function_call", is_passive_choice, "\"none\" or \"auto\""),
    ("modalities", is_text_only, "[\"text\"]"),
    ("audio", never, "absent"),
    ("prediction", never, "absent"),
    ("web_search_options", never, "absent"),
    ("json_schema", is_empty, "empty"),
    ("mirostat", is_zero, "0"),
    ("prompt_logprobs", never, "absent"),
    ("n_probs", is_zero, "0"),
    ("dynatemp_range", is_zero, "0"),
    ("min_tokens", is_zero, "0"),
    ("stop_token_ids", is_empty, "empty"),
    ("bad_words", is_empty, "empty"),
    ("use_beam_search", is_false, "false"),
    ("guided_json", is_empty, "empty"),
    ("guided_regex", is_empty, "empty"),
    ("guided_choice", is_empty, "empty"),
    ("guided_grammar", is_empty, "empty"),
    ("structured_outputs", is_empty, "empty"),
];

/// Refuses the first parameter that asks for what is not supported.
pub(crate) fn refuse(object: &Map<String, Value>) -> Result<(), ApiError> {
    for (name, is_default, default) in TABLE {
        let asks = object.get(*name).is_some_and(|value| !value.is_null() && !is_default(value));
        if asks {
            let message = format!("`{name}` is not supported by this server yet; leave it out, or {default}.");
            return Err(ApiError::invalid(Some(Cow::Borrowed(name)), ErrorCode::UnsupportedParameter, message));
        }
    }
    Ok(())
}

fn is_one(value: &Value) -> bool {
    value.as_f64() == Some(1.0)
}

fn is_zero(value: &Value) -> bool {
    value.as_f64() == Some(0.0)
}

fn is_false(value: &Value) -> bool {
    value.as_bool() == Some(false)
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

fn is_passive_choice(value: &Value) -> bool {
    matches!(value.as_str(), Some("none" | "auto"))
}

fn is_text_only(value: &Value) -> bool {
    value.as_array().is_some_and(|items| items.iter().all(|item| item.as_str() == Some("text")))
}

fn never(_: &Value) -> bool {
    false
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use serde_json::json;

    fn check(name: &str, value: Value) -> Result<(), ApiError> {
        let mut object = Map::new();
        object.insert(name.to_owned(), value);
        refuse(&object)
    }

    #[test]
    fn defaults_pass_and_wishes_are_refused_by_name() {
        for (name, default, wish) in [
            ("best_of", json!(1), json!(2)),
            ("echo", json!(false), json!(true)),
            ("min_tokens", json!(0), json!(5)),
            ("guided_json", json!({}), json!({"type": "object"})),
            ("tools", json!([]), json!([{"type": "function"}])),
            ("tool_choice", json!("auto"), json!("required")),
            ("modalities", json!(["text"]), json!(["text", "audio"])),
        ] {
            assert!(check(name, default).is_ok(), "{name}");
            assert!(check(name, Value::Null).is_ok(), "{name}");
            let error = check(name, wish).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(name));
            assert_eq!(error.code, ErrorCode::UnsupportedParameter);
        }
    }
}

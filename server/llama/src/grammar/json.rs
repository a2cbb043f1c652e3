//! JSON as a schema needs it: read in the order it is written in, and written again.

use std::collections::HashSet;
use std::fmt::{self, Write as _};

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

/// JSON whose objects keep their order.
#[derive(Debug, PartialEq)]
pub(super) enum Json {
    Null,
    Bool(bool),
    Number(serde_json::Number),
    String(String),
    Array(Vec<Json>),
    Object(Vec<(String, Json)>),
}

impl Json {
    pub(super) fn get(&self, key: &str) -> Option<&Self> {
        match self {
            Self::Object(entries) => entries.iter().find(|(k, _)| k == key).map(|(_, value)| value),
            _ => None,
        }
    }

    pub(super) fn as_str(&self) -> Option<&str> {
        if let Self::String(text) = self { Some(text) } else { None }
    }

    pub(super) fn as_array(&self) -> Option<&[Self]> {
        if let Self::Array(items) = self { Some(items) } else { None }
    }

    /// The comparisons of keys that reading it takes a parser that looks for each key among those before.
    pub(super) fn lookups(&self) -> usize {
        match self {
            Self::Array(items) => items.iter().map(Self::lookups).sum(),
            Self::Object(entries) => {
                entries.len() * entries.len() + entries.iter().map(|(_, value)| value.lookups()).sum::<usize>()
            }
            _ => 0,
        }
    }

    pub(super) fn write(&self, out: &mut String) {
        match self {
            Self::Null => *out += "null",
            Self::Bool(value) => *out += if *value { "true" } else { "false" },
            Self::Number(number) => {
                let _ = write!(out, "{number}");
            }
            Self::String(text) => *out += &quoted(text),
            Self::Array(items) => {
                for (i, item) in items.iter().enumerate() {
                    out.push(if i == 0 { '[' } else { ',' });
                    item.write(out);
                }
                *out += if items.is_empty() { "[]" } else { "]" };
            }
            Self::Object(entries) => {
                for (i, (key, value)) in entries.iter().enumerate() {
                    out.push(if i == 0 { '{' } else { ',' });
                    *out += &quoted(key);
                    out.push(':');
                    value.write(out);
                }
                *out += if entries.is_empty() { "{}" } else { "}" };
            }
        }
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct JsonVisitor;
        impl<'de> Visitor<'de> for JsonVisitor {
            type Value = Json;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("JSON")
            }
            fn visit_unit<E>(self) -> Result<Json, E> {
                Ok(Json::Null)
            }
            fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
                Ok(Json::Bool(value))
            }
            fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
                Ok(Json::Number(value.into()))
            }
            fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
                Ok(Json::Number(value.into()))
            }
            fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
                Ok(serde_json::Number::from_f64(value).map_or(Json::Null, Json::Number))
            }
            fn visit_str<E>(self, value: &str) -> Result<Json, E> {
                Ok(Json::String(value.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Json, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = access.next_element()? {
                    items.push(item);
                }
                Ok(Json::Array(items))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Json, A::Error> {
                let (mut entries, mut keys) = (Vec::new(), HashSet::new());
                while let Some((key, value)) = access.next_entry::<String, Json>()? {
                    if !keys.insert(key.clone()) {
                        return Err(serde::de::Error::custom(format!("the key '{key}' stands twice in one object")));
                    }
                    entries.push((key, value));
                }
                Ok(Json::Object(entries))
            }
        }
        deserializer.deserialize_any(JsonVisitor)
    }
}

/// A text as JSON.
pub(super) fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A JSON object of values that are JSON already.
pub(super) fn object_of<K: AsRef<str>>(entries: impl IntoIterator<Item = (K, String)>) -> String {
    let entries: Vec<String> =
        entries.into_iter().map(|(key, value)| format!("{}:{value}", quoted(key.as_ref()))).collect();
    format!("{{{}}}", entries.join(","))
}

/// The same for an array.
pub(super) fn array_of(items: &[String]) -> String {
    format!("[{}]", items.join(","))
}

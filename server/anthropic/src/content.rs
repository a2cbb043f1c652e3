//! What a message says: a text, or blocks.

use std::borrow::Cow;
use std::fmt;

use gantry_core::{TextOr, from_typed_objects};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Deserialize;
use serde::de::{self, Deserializer, IgnoredAny, SeqAccess, Visitor, value::SeqAccessDeserializer};
use serde_json::{Map, Value};

from_typed_objects!(Block);

/// A block of a message.
#[derive(Debug, Deserialize, JsonSchema)]
#[schemars(rename = "MessageBlockParam", tag = "type")]
#[serde(remote = "Self", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Block {
    Text {
        text: String,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "cache_control")]
        _cache_control: IgnoredAny,
        #[serde(default)]
        #[schemars(with = "Option<()>")]
        citations: Option<Value>,
    },
    Thinking {
        thinking: String,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "signature")]
        _signature: IgnoredAny,
    },
    RedactedThinking {
        #[schemars(with = "Option<Value>")]
        #[serde(rename = "data")]
        _data: IgnoredAny,
    },
    ToolUse {
        id: String,
        name: String,
        input: Map<String, Value>,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "cache_control")]
        _cache_control: IgnoredAny,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "caller")]
        _caller: IgnoredAny,
    },
    ToolResult {
        tool_use_id: String,
        #[serde(default)]
        content: Content,
        /// Whether the call failed.
        is_error: Option<bool>,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "cache_control")]
        _cache_control: IgnoredAny,
    },
    /// A tool that was found, within what a tool returned.
    ToolReference {
        tool_name: String,
        #[schemars(with = "Option<Value>")]
        #[serde(default, rename = "cache_control")]
        _cache_control: IgnoredAny,
    },
}

impl Block {
    pub(crate) fn text(text: String) -> Self {
        Self::Text { text, _cache_control: IgnoredAny, citations: None }
    }
}

/// Blocks, of which a text alone is one.
#[derive(Debug, Default)]
pub(crate) struct Content(pub(crate) Vec<Block>);

impl JsonSchema for Content {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "MessageContent".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        TextOr::<Vec<Block>>::json_schema(generator)
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Blocks;
        impl<'de> Visitor<'de> for Blocks {
            type Value = Content;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or an array of blocks")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Content, E> {
                self.visit_string(text.to_owned())
            }

            fn visit_string<E: de::Error>(self, text: String) -> Result<Content, E> {
                Ok(Content(vec![Block::text(text)]))
            }

            fn visit_unit<E: de::Error>(self) -> Result<Content, E> {
                Ok(Content::default())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, blocks: A) -> Result<Content, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(blocks)).map(Content)
            }
        }
        deserializer.deserialize_any(Blocks)
    }
}

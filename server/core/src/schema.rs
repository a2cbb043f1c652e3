//! What the descriptions of several protocols' bodies have in common.

use schemars::JsonSchema;

/// What a tool may be called, as a pattern: what [`check_tools`](crate::check_tools) lets through.
pub const TOOL_NAME_PATTERN: &str = "^[A-Za-z0-9_.-]{1,64}$";

/// A text, or what may stand in its place: only ever described, never made.
#[derive(Clone, Debug, PartialEq, Eq, JsonSchema)]
#[schemars(untagged, inline)]
pub enum TextOr<T> {
    /// The text.
    Text(String),
    /// The other.
    Other(T),
}

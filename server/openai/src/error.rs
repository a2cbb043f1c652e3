//! Errors as `OpenAI` tells them: `{"error": {"message", "type", "param", "code"}}`, all four always there.

use gantry_core::{ApiError, ErrorKind};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The body of an error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ErrorResponse {
    /// The error.
    pub error: ErrorObject,
}

/// See [`ErrorResponse`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ErrorObject {
    /// For people.
    pub message: String,
    /// Whose fault it is.
    #[serde(rename = "type")]
    pub kind: ErrorKind,
    /// The parameter at fault.
    pub param: Option<String>,
    /// For programs.
    pub code: Option<String>,
}

impl From<&ApiError> for ErrorResponse {
    fn from(error: &ApiError) -> Self {
        Self {
            error: ErrorObject {
                message: error.message.clone(),
                kind: error.kind,
                param: error.param.as_deref().map(str::to_owned),
                code: Some(error.code.as_str().to_owned()),
            },
        }
    }
}

//! Bodies of JSON as types of their protocol's, with errors that name the field at fault by its path.

use std::borrow::Cow;

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::api_error::{ApiError, ErrorCode};

/// Reads a body.
///
/// # Errors
/// It is no JSON, or not of this type: names the first field at fault by its path.
pub fn read_body<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let read = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        of_field("", &path, &error.into_inner())
    })?;
    json.end().map_err(|error| no_json(&error))?;
    Ok(read)
}

/// Reads what stands at a path of a body.
///
/// # Errors
/// It is not of this type: names the first field at fault by its path in the body.
pub fn read_json<T: DeserializeOwned>(value: Value, path: &str) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let inner = error.path().to_string();
        of_field(path, &inner, &error.into_inner())
    })
}

fn of_field(path: &str, inner: &str, error: &serde_json::Error) -> ApiError {
    if !error.is_data() {
        return no_json(error);
    }
    // The place in the text is of no use to who wrote an object.
    let said = error.to_string();
    let said = said.split(" at line ").next().unwrap_or_default();
    let at = match (path, inner) {
        ("", ".") => return ApiError::invalid(None, ErrorCode::InvalidValue, format!("{said}.")),
        ("", inner) => inner.to_owned(),
        (path, ".") => path.to_owned(),
        (path, inner) => format!("{path}.{inner}"),
    };
    ApiError::invalid(Some(Cow::Owned(at.clone())), ErrorCode::InvalidValue, format!("`{at}`: {said}."))
}

fn no_json(error: &serde_json::Error) -> ApiError {
    ApiError::invalid(None, ErrorCode::InvalidJson, format!("The body is not valid JSON: {error}."))
}

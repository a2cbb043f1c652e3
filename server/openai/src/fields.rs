//! Typed reading of a JSON object, field by field, with errors that name the field, what came and what was expected.
//!
//! `null` counts as absent everywhere, and what is empty where that says nothing: clients send it for what they do not set.

use std::borrow::Cow;
use std::fmt::Display;
use std::ops::RangeInclusive;

use gantry_core::{ApiError, ErrorCode, integer_of};
use serde_json::{Map, Value};

use crate::parameters::{self, Place};

/// A JSON object and its place in the request.
pub(crate) struct Fields<'a> {
    object: &'a Map<String, Value>,
    /// Put before a field's name: empty, or `messages[3].`.
    prefix: String,
}

/// What came, in words, without repeating it: it may be long, or private.
pub(crate) fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(n) if n.is_f64() && n.as_f64().is_some_and(|n| n.abs() > i64::MAX as f64) => {
            "a number beyond 64 bits"
        }
        Value::Number(n) if n.is_f64() => "a fractional number",
        Value::Number(_) => "an integer",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

pub(crate) fn wrong_type(param: String, expected: &str, got: &Value) -> ApiError {
    let message = format!("`{param}` must be {expected}, not {}.", kind_of(got));
    ApiError::invalid(Some(Cow::Owned(param)), ErrorCode::InvalidType, message)
}

pub(crate) fn wrong_value(param: String, message: impl Display) -> ApiError {
    let message = format!("`{param}` {message}.");
    ApiError::invalid(Some(Cow::Owned(param)), ErrorCode::InvalidValue, message)
}

pub(crate) fn missing(param: String, what: &str) -> ApiError {
    let message = format!("`{param}` is missing: {what}.");
    ApiError::invalid(Some(Cow::Owned(param)), ErrorCode::MissingRequiredParameter, message)
}

impl<'a> Fields<'a> {
    pub(crate) fn new(object: &'a Map<String, Value>, prefix: impl Into<String>) -> Self {
        Self { object, prefix: prefix.into() }
    }

    /// The field's full name.
    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Refuses what the object has that is not done, or not known, in its place.
    pub(crate) fn refuse(&self, place: Place) -> Result<(), ApiError> {
        parameters::refuse(place, self.object, &self.prefix)
    }

    /// What one of two names of the same thing says; both may be given when they agree.
    pub(crate) fn one_of<T: PartialEq>(
        &self,
        (name, value): (&str, Option<T>),
        (other_name, other): (&str, Option<T>),
    ) -> Result<Option<T>, ApiError> {
        match (value, other) {
            (Some(value), Some(other)) if value != other => {
                let message = format!("is another name for `{name}` and may not differ from it; give one of them");
                Err(wrong_value(self.path(other_name), message))
            }
            (value, other) => Ok(value.or(other)),
        }
    }

    /// The field, unless it is absent, or says nothing.
    pub(crate) fn get(&self, name: &str) -> Option<&'a Value> {
        // Within messages and their like, an empty text is one.
        let is_left_out = |value: &Value| self.prefix.is_empty() && parameters::says_nothing(name, value);
        self.object.get(name).filter(|value| !value.is_null() && !is_left_out(value))
    }

    pub(crate) fn string(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.get(name)
            .map(|value| value.as_str().ok_or_else(|| wrong_type(self.path(name), "a string", value)))
            .transpose()
    }

    pub(crate) fn boolean(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.get(name)
            .map(|value| value.as_bool().ok_or_else(|| wrong_type(self.path(name), "true or false", value)))
            .transpose()
    }

    pub(crate) fn object(&self, name: &str) -> Result<Option<Fields<'a>>, ApiError> {
        self.get(name)
            .map(|value| match value {
                Value::Object(object) => Ok(Fields::new(object, format!("{}.", self.path(name)))),
                other => Err(wrong_type(self.path(name), "an object", other)),
            })
            .transpose()
    }

    /// A number for which `accepts` holds; `range` says in words which those are.
    fn number(&self, name: &str, range: impl Display, accepts: impl Fn(f32) -> bool) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = value.as_f64().ok_or_else(|| wrong_type(self.path(name), "a number", value))?;
        if accepts(number as f32) {
            Ok(Some(number as f32))
        } else {
            Err(wrong_value(self.path(name), format_args!("must be {range}, not {number}")))
        }
    }

    /// A number in a range, its ends included.
    pub(crate) fn within(&self, name: &str, low: f32, high: f32) -> Result<Option<f32>, ApiError> {
        self.number(name, format_args!("a number from {low} to {high}"), |n| (low..=high).contains(&n))
    }

    /// A number above 0 and at most `high`.
    pub(crate) fn above_zero(&self, name: &str, high: f32) -> Result<Option<f32>, ApiError> {
        self.number(name, format_args!("a number above 0 and at most {high}"), |n| n > 0.0 && n <= high)
    }

    /// An integer in a range.
    pub(crate) fn integer<T>(&self, name: &str, range: RangeInclusive<T>) -> Result<Option<T>, ApiError>
    where
        T: TryFrom<i64> + PartialOrd + Display,
    {
        let Some(value) = self.get(name) else { return Ok(None) };
        let out_of_range = |shown: &dyn Display| {
            let (low, high) = (range.start(), range.end());
            wrong_value(self.path(name), format_args!("must be an integer from {low} to {high}, not {shown}"))
        };
        match (value.as_number().and_then(integer_of), value.as_f64()) {
            (Some(number), _) => match T::try_from(number) {
                Ok(number) if range.contains(&number) => Ok(Some(number)),
                _ => Err(out_of_range(&number)),
            },
            // What has more than 64 bits is in no range.
            (None, Some(number)) if number.fract() == 0.0 => Err(out_of_range(&number)),
            _ => Err(wrong_type(self.path(name), "an integer", value)),
        }
    }

    /// An array of so many strings, each of so many bytes.
    pub(crate) fn strings(
        &self,
        name: &str,
        count: RangeInclusive<usize>,
        bytes: RangeInclusive<usize>,
    ) -> Result<Option<Vec<String>>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let items = value.as_array().ok_or_else(|| wrong_type(self.path(name), "an array of strings", value))?;
        if !count.contains(&items.len()) {
            let (low, high, n) = (count.start(), count.end(), items.len());
            return Err(wrong_value(self.path(name), format_args!("must have {low} to {high} strings, not {n}")));
        }
        let string = |(i, item): (usize, &Value)| {
            let path = || format!("{}[{i}]", self.path(name));
            match item {
                Value::String(text) if !bytes.contains(&text.len()) => {
                    let (low, high, n) = (bytes.start(), bytes.end(), text.len());
                    Err(wrong_value(path(), format_args!("must have {low} to {high} bytes, not {n}")))
                }
                Value::String(text) => Ok(text.clone()),
                other => Err(wrong_type(path(), "a string", other)),
            }
        };
        items.iter().enumerate().map(string).collect::<Result<_, _>>().map(Some)
    }
}

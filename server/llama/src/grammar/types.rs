//! The types of JSON that a schema names, and those that what stands beside them allows.

use std::ops::{BitAnd, BitOrAssign};

use super::GrammarError;
use super::json::Json;
use super::schema::Place;

const TYPES: [&str; 7] = ["null", "boolean", "number", "integer", "string", "array", "object"];

/// A set of types. Whole numbers are numbers, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Types(u8);

impl Types {
    pub(super) const NONE: Self = Self(0);
    const ALL: Self = Self(!0);

    /// Those with these names, or all where none is named.
    pub(super) fn named(names: &[&str]) -> Self {
        let bit = |name: &str| TYPES.iter().position(|known| *known == name).map_or(0, |at| 1 << at);
        let bits = |name: &&str| bit(name) | if *name == "number" { bit("integer") } else { 0 };
        if names.is_empty() { Self::ALL } else { Self(names.iter().map(bits).fold(0, |all, one| all | one)) }
    }

    /// A value's.
    pub(super) fn of(value: &Json) -> Self {
        Self::named(&[match value {
            Json::Null => "null",
            Json::Bool(_) => "boolean",
            Json::Number(number) if number.as_f64().is_some_and(|number| number.fract() == 0.0) => "integer",
            Json::Number(_) => return Self::named(&["number"]) & Self(!Self::named(&["integer"]).0),
            Json::String(_) => "string",
            Json::Array(_) => "array",
            Json::Object(_) => "object",
        }])
    }

    /// Those of what a schema's other keywords allow; alternatives, references and parts are not looked into.
    pub(super) fn of_schema(schema: &Json) -> Self {
        let has = |keys: &[&str]| keys.iter().any(|key| schema.get(key).is_some());
        if let Some(value) = schema.get("const") {
            return Self::of(value);
        }
        if let Some(values) = schema.get("enum").and_then(Json::as_array) {
            let mut all = Self::NONE;
            values.iter().for_each(|value| all |= Self::of(value));
            return all;
        }
        // As `untyped` of the walk takes them.
        match () {
            () if has(&["allOf"]) => Self::ALL,
            () if has(&["properties"]) => Self::named(&["object"]),
            () if has(&["items", "prefixItems"]) => Self::named(&["array"]),
            () if has(&["pattern", "minLength", "maxLength"]) => Self::named(&["string"]),
            () => Self::ALL,
        }
    }

    pub(super) fn contains(self, others: Self) -> bool {
        others.0 & !self.0 == 0
    }
}

impl BitAnd for Types {
    type Output = Self;
    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl BitOrAssign for Types {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

/// The types that a schema names.
pub(super) fn types<'a>(node: &'a Json, place: &Place) -> Result<Vec<&'a str>, GrammarError> {
    let names = match node.get("type") {
        None => &[][..],
        Some(Json::Array(names)) if !names.is_empty() => names.as_slice(),
        Some(name) => std::slice::from_ref(name),
    };
    let mut types = Vec::new();
    for name in names {
        let name = name.as_str().ok_or_else(|| place.fail("'type' must be a string or strings"))?;
        if !TYPES.contains(&name) {
            return Err(place.fail(format!("there is no type '{name}'")));
        }
        if types.contains(&name) {
            return Err(place.fail(format!("the type '{name}' stands there twice")));
        }
        types.push(name);
    }
    Ok(types)
}

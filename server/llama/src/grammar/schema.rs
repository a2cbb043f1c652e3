//! From a JSON schema to GBNF, by llama.cpp's converter, with what that converter would crash on, hang on or quietly
//! ignore found before.
//!
//! The schema is read in the order it is written in (so are the answer's keys), walked as the converter will walk it
//! under a limit of nodes, depth and work, its patterns rewritten ([`pattern`]), and only then converted. Keywords that
//! a grammar cannot enforce are refused rather than ignored, so an answer that ends is valid. `oneOf` is read as
//! `anyOf`, and objects whose `properties` are listed have no others unless `additionalProperties` says so.

use std::collections::{HashMap, HashSet};
use std::fmt::{self, Write as _};

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use super::scan::{MAX_GRAMMAR_TEXT_BYTES, MAX_REPETITIONS, MAX_RULE_NAME_BYTES};
use super::{GrammarError, pattern};
use crate::shim;

/// The longest schema, in bytes.
pub const MAX_SCHEMA_BYTES: usize = 128 * 1024;
/// The deepest nesting of one, references followed.
pub const MAX_SCHEMA_DEPTH: usize = 48;
/// The most nodes of one, those counted again that are reached in several ways.
pub const MAX_SCHEMA_NODES: usize = 8192;
/// The most properties of one object.
pub const MAX_SCHEMA_PROPERTIES: usize = 128;
/// The longest name of a property and the longest reference, in bytes.
pub const MAX_SCHEMA_NAME_BYTES: usize = 256;
/// The largest bound of an integer, either way: what a JSON number holds exactly.
pub const MAX_SCHEMA_INTEGER: u64 = 1 << 53;
/// What the conversion may cost, in steps of about 10 ns.
const MAX_SCHEMA_WORK: usize = 50_000_000;

/// Keywords that constrain and that a grammar does not enforce.
const NOT_ENFORCED: &[&str] = &[
    "not",
    "if",
    "then",
    "else",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "uniqueItems",
    "multipleOf",
    "contains",
    "minContains",
    "maxContains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
    "unevaluatedItems",
    "additionalItems",
    "$dynamicRef",
    "$recursiveRef",
];
/// Keywords about a value's shape: they say nothing beside a reference or alternatives, where the converter skips them.
const SHAPE: &[&str] = &[
    "properties",
    "required",
    "additionalProperties",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "pattern",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
];
const BOUNDS: &[&str] = &["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"];
const TYPES: &[&str] = &["null", "boolean", "number", "integer", "string", "array", "object"];

/// JSON whose objects keep their order.
#[derive(Debug, PartialEq)]
enum Json {
    Null,
    Bool(bool),
    Number(serde_json::Number),
    String(String),
    Array(Vec<Json>),
    Object(Vec<(String, Json)>),
}

impl Json {
    fn get(&self, key: &str) -> Option<&Self> {
        match self {
            Self::Object(entries) => entries.iter().find(|(k, _)| k == key).map(|(_, value)| value),
            _ => None,
        }
    }

    fn as_str(&self) -> Option<&str> {
        if let Self::String(text) = self { Some(text) } else { None }
    }

    fn as_array(&self) -> Option<&[Self]> {
        if let Self::Array(items) = self { Some(items) } else { None }
    }

    fn write(&self, replaced: &HashMap<*const Self, String>, out: &mut String) {
        let quoted = |text: &str| serde_json::Value::from(text).to_string();
        match self {
            Self::Null => *out += "null",
            Self::Bool(value) => *out += if *value { "true" } else { "false" },
            Self::Number(number) => {
                let _ = write!(out, "{number}");
            }
            Self::String(text) => *out += &quoted(replaced.get(&std::ptr::from_ref(self)).unwrap_or(text)),
            Self::Array(items) => {
                for (i, item) in items.iter().enumerate() {
                    out.push(if i == 0 { '[' } else { ',' });
                    item.write(replaced, out);
                }
                *out += if items.is_empty() { "[]" } else { "]" };
            }
            Self::Object(entries) => {
                for (i, (key, value)) in entries.iter().enumerate() {
                    out.push(if i == 0 { '{' } else { ',' });
                    *out += &quoted(key);
                    out.push(':');
                    value.write(replaced, out);
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

/// Turns a schema into GBNF.
pub(super) fn to_gbnf(json: &str) -> Result<String, GrammarError> {
    if json.len() > MAX_SCHEMA_BYTES {
        return Err(GrammarError::TooLarge { what: "bytes of JSON schema", limit: MAX_SCHEMA_BYTES });
    }
    // serde_json bounds the depth.
    let root: Json = serde_json::from_str(json).map_err(|e| GrammarError::Syntax {
        line: e.line(),
        column: e.column(),
        message: format!("not JSON: {e}"),
    })?;
    let mut check =
        Check { root: &root, nodes: 0, work: 0, seen: HashSet::new(), names: HashMap::new(), replaced: HashMap::new() };
    check.node(&root, &Place { path: String::from("#"), name_bytes: 0, depth: 0 })?;
    let mut checked = String::new();
    root.write(&check.replaced, &mut checked);
    // SAFETY: the text has the length given, and the callee catches exceptions; what it recurses on was bounded above.
    let gbnf = unsafe { shim::gantry_schema_to_gbnf(checked.as_ptr().cast(), checked.len()) };
    let gbnf = gbnf.into_result().map_err(|reason| {
        let reason = reason.trim_start_matches("JSON schema conversion failed:").trim();
        GrammarError::Schema { path: String::from("#"), message: reason.chars().take(200).collect() }
    })?;
    if gbnf.len() > MAX_GRAMMAR_TEXT_BYTES {
        return Err(GrammarError::TooLarge {
            what: "bytes of grammar made from the schema",
            limit: MAX_GRAMMAR_TEXT_BYTES,
        });
    }
    // Two things that JSON allows and its parsers refuse: a lone surrogate, and a number past what a double can hold.
    Ok(gbnf
        .replace(r#""u" [0-9a-fA-F]{4}"#, r#""u" ([0-9a-cA-CefEF] [0-9a-fA-F]{3} | [dD] [0-7] [0-9a-fA-F]{2})"#)
        .replace("([eE] [-+]? integral-part)?", "([eE] [-+]? [0-9] [0-9]?)?"))
}

/// Where the walk is.
#[derive(Clone)]
struct Place {
    path: String,
    /// The bytes of the name that the converter gives the rule.
    name_bytes: usize,
    depth: usize,
}

impl Place {
    fn fail(&self, message: impl Into<String>) -> GrammarError {
        GrammarError::Schema { path: self.path.chars().take(200).collect(), message: message.into() }
    }

    fn below(&self, keys: &str, name_bytes: usize) -> Self {
        Self {
            path: format!("{}/{keys}", self.path),
            name_bytes: self.name_bytes + name_bytes + "-additional-value".len(),
            depth: self.depth + 1,
        }
    }
}

struct Check<'a> {
    root: &'a Json,
    nodes: usize,
    work: usize,
    /// References that were followed.
    seen: HashSet<&'a str>,
    /// What each reference's rule is called.
    names: HashMap<String, &'a str>,
    /// Patterns that stand for others.
    replaced: HashMap<*const Json, String>,
}

impl<'a> Check<'a> {
    fn spend(&mut self, work: usize) -> Result<(), GrammarError> {
        self.work = self.work.saturating_add(work);
        if self.work > MAX_SCHEMA_WORK {
            return Err(GrammarError::TooLarge { what: "steps of conversion", limit: MAX_SCHEMA_WORK });
        }
        Ok(())
    }

    fn node(&mut self, node: &'a Json, place: &Place) -> Result<(), GrammarError> {
        self.nodes += 1;
        if self.nodes > MAX_SCHEMA_NODES {
            return Err(GrammarError::TooLarge { what: "nodes of JSON schema", limit: MAX_SCHEMA_NODES });
        }
        if place.depth > MAX_SCHEMA_DEPTH {
            return Err(GrammarError::TooLarge { what: "nested nodes of JSON schema", limit: MAX_SCHEMA_DEPTH });
        }
        if place.name_bytes > MAX_RULE_NAME_BYTES {
            return Err(place.fail(format!("names on the way here have more than {MAX_RULE_NAME_BYTES} bytes")));
        }
        self.spend(100 + 20 * place.name_bytes)?;
        let Json::Object(entries) = node else {
            return Err(place.fail("a schema must be an object"));
        };
        if let Some((key, _)) = entries.iter().find(|(key, _)| NOT_ENFORCED.contains(&key.as_str())) {
            return Err(place.fail(format!("'{key}' cannot be enforced; leave it out")));
        }
        let combining: Vec<&str> = entries
            .iter()
            .map(|(key, _)| key.as_str())
            .filter(|key| ["$ref", "anyOf", "oneOf", "allOf", "const", "enum"].contains(key))
            .collect();
        if let Some(first) = combining.first() {
            if let Some(second) = combining.get(1) {
                return Err(place.fail(format!("'{second}' beside '{first}' cannot be enforced")));
            }
            if let Some((key, _)) = entries.iter().find(|(key, _)| SHAPE.contains(&key.as_str())) {
                return Err(place.fail(format!("'{key}' beside '{first}' cannot be enforced")));
            }
            return self.combined(first, node, place);
        }
        match node.get("type") {
            None if node.get("properties").is_some() || node.get("additionalProperties").is_some() => {
                self.object(node, place)
            }
            None if node.get("items").is_some() || node.get("prefixItems").is_some() => self.array(node, place),
            None if ["pattern", "minLength", "maxLength"].iter().any(|key| node.get(key).is_some()) => {
                self.string(node, place)
            }
            None => match entries.iter().find(|(key, _)| SHAPE.contains(&key.as_str())) {
                Some((key, _)) => Err(place.fail(format!("'{key}' needs a 'type'"))),
                None => Ok(()),
            },
            Some(Json::String(name)) => self.typed(name, node, place),
            Some(Json::Array(names)) if !names.is_empty() => names.iter().try_for_each(|name| {
                let name = name.as_str().ok_or_else(|| place.fail("'type' must be a string or strings"))?;
                self.nodes += 1;
                self.typed(name, node, &place.below("type", 2))
            }),
            Some(_) => Err(place.fail("'type' must be a string or strings")),
        }
    }

    fn typed(&mut self, name: &str, node: &'a Json, place: &Place) -> Result<(), GrammarError> {
        match name {
            "object" => self.object(node, place),
            "array" => self.array(node, place),
            "string" => self.string(node, place),
            "integer" => integer(node, place),
            "number" => match BOUNDS.iter().find(|key| node.get(key).is_some()) {
                Some(key) => Err(place.fail(format!("'{key}' cannot be enforced on a number, only on an integer"))),
                None => Ok(()),
            },
            _ if TYPES.contains(&name) => Ok(()),
            _ => Err(place.fail(format!("there is no type '{name}'"))),
        }
    }

    fn combined(&mut self, key: &str, node: &'a Json, place: &Place) -> Result<(), GrammarError> {
        let value = node.get(key).unwrap_or(&Json::Null);
        match key {
            "$ref" => self.reference(value, place),
            "anyOf" | "oneOf" => self.alternatives(value, &place.below(key, 0)),
            "allOf" => {
                self.alternatives(value, &place.below(key, 0))?;
                let place = place.below(key, 0);
                value.as_array().unwrap_or_default().iter().try_for_each(|part| self.part(part, &place))
            }
            "enum" if value.as_array().is_none_or(<[Json]>::is_empty) => {
                Err(place.fail("'enum' must be an array of values"))
            }
            _ => Ok(()),
        }
    }

    fn alternatives(&mut self, value: &'a Json, place: &Place) -> Result<(), GrammarError> {
        let items = value.as_array().filter(|items| !items.is_empty());
        let items = items.ok_or_else(|| place.fail("must be an array of schemas"))?;
        items.iter().enumerate().try_for_each(|(i, item)| self.node(item, &place.below(&i.to_string(), 5)))
    }

    /// A part of `allOf`, which the converter writes out in place, references included.
    fn part(&mut self, mut part: &'a Json, place: &Place) -> Result<(), GrammarError> {
        for _ in 0..MAX_SCHEMA_DEPTH {
            let Some(reference) = part.get("$ref").and_then(Json::as_str) else { break };
            part = self.resolve(reference, place)?;
        }
        if let Some(alternatives) = part.get("anyOf").or_else(|| part.get("oneOf")).and_then(Json::as_array) {
            return alternatives.iter().try_for_each(|part| self.part(part, &place.below("anyOf", 0)));
        }
        if part.get("enum").is_some() {
            return Ok(());
        }
        let Some(Json::Object(properties)) = part.get("properties") else {
            return Err(place.fail("the parts of 'allOf' must be objects with 'properties', or enums"));
        };
        for (name, property) in properties {
            self.node(property, &place.below(name, name.len()))?;
        }
        Ok(())
    }

    fn resolve(&self, reference: &str, place: &Place) -> Result<&'a Json, GrammarError> {
        let missing = || place.fail(format!("there is no '{}'", reference.chars().take(200).collect::<String>()));
        let pointer = reference.strip_prefix("#/").ok_or_else(|| place.fail("a reference must begin with '#/'"))?;
        // As the converter does it: no escapes.
        pointer.split('/').try_fold(self.root, |at, key| {
            match at {
                Json::Array(items) => key.parse::<usize>().ok().and_then(|i| items.get(i)),
                _ => at.get(key),
            }
            .ok_or_else(missing)
        })
    }

    fn reference(&mut self, value: &'a Json, place: &Place) -> Result<(), GrammarError> {
        let reference = value.as_str().ok_or_else(|| place.fail("'$ref' must be a string"))?;
        if reference.len() > MAX_SCHEMA_NAME_BYTES {
            return Err(place.fail(format!("a reference has at most {MAX_SCHEMA_NAME_BYTES} bytes")));
        }
        let target = self.resolve(reference, place)?;
        if !self.seen.insert(reference) {
            return Ok(());
        }
        // The converter names a rule after the reference's letters and digits; what stands between them is lost.
        let mut name = String::new();
        for c in reference.chars() {
            let c = if c.is_ascii_alphanumeric() { c } else { '-' };
            if c != '-' || !name.ends_with('-') {
                name.push(c);
            }
        }
        if self.names.insert(name, reference).is_some() {
            return Err(place.fail(format!("'{reference}' differs from another reference in punctuation only")));
        }
        self.node(target, &Place { path: reference.to_owned(), name_bytes: reference.len(), depth: place.depth + 1 })
    }

    fn object(&mut self, node: &'a Json, place: &Place) -> Result<(), GrammarError> {
        let properties = match node.get("properties") {
            None => &[][..],
            Some(Json::Object(properties)) => properties.as_slice(),
            Some(_) => return Err(place.fail("'properties' must be an object")),
        };
        if properties.len() > MAX_SCHEMA_PROPERTIES {
            return Err(place.fail(format!("an object has at most {MAX_SCHEMA_PROPERTIES} properties")));
        }
        self.spend(properties.len().pow(3))?;
        let others = node.get("additionalProperties");
        for (name, property) in properties {
            if name.len() > MAX_SCHEMA_NAME_BYTES {
                return Err(place.fail(format!("the name of a property has at most {MAX_SCHEMA_NAME_BYTES} bytes")));
            }
            // The converter writes names into character classes as they are.
            let in_class = others.is_some_and(|o| *o != Json::Bool(false));
            if in_class && name.contains(|c: char| c.is_control() || "]\\^\"".contains(c)) {
                return Err(
                    place.fail(format!("'additionalProperties' beside a property named '{name}' cannot be enforced"))
                );
            }
            self.node(property, &place.below(&format!("properties/{name}"), name.len()))?;
        }
        if let Some(required) = node.get("required") {
            let names = required.as_array().ok_or_else(|| place.fail("'required' must be an array of names"))?;
            for name in names {
                let name = name.as_str().ok_or_else(|| place.fail("'required' must be an array of names"))?;
                if !properties.iter().any(|(property, _)| property == name) {
                    return Err(place.fail(format!("'{name}' is required but not among 'properties'")));
                }
            }
        }
        match others {
            None | Some(Json::Bool(_)) => Ok(()),
            Some(schema) => self.node(schema, &place.below("additionalProperties", 0)),
        }
    }

    fn array(&mut self, node: &'a Json, place: &Place) -> Result<(), GrammarError> {
        let (min, max) = counts(node, "minItems", "maxItems", place)?;
        let (items, prefix) = (node.get("items"), node.get("prefixItems"));
        if items.is_some() && prefix.is_some() {
            return Err(place.fail("'items' beside 'prefixItems' cannot be enforced"));
        }
        match items.or(prefix) {
            None => Ok(()),
            Some(Json::Array(items)) => {
                let n = items.len() as u64;
                if n < min.unwrap_or(0) || n > max.unwrap_or(n) {
                    return Err(place.fail("as many items as there are schemas for them are not allowed"));
                }
                items.iter().enumerate().try_for_each(|(i, item)| self.node(item, &place.below(&i.to_string(), 12)))
            }
            Some(item) => self.node(item, &place.below("items", 5)),
        }
    }

    fn string(&mut self, node: &'a Json, place: &Place) -> Result<(), GrammarError> {
        let (min, max) = counts(node, "minLength", "maxLength", place)?;
        if node.get("format").is_some_and(|format| format.as_str().is_none()) {
            return Err(place.fail("'format' must be a string"));
        }
        let Some(value) = node.get("pattern") else { return Ok(()) };
        if min.is_some() || max.is_some() {
            return Err(place.fail("'minLength' and 'maxLength' cannot be enforced beside 'pattern'"));
        }
        let text = value.as_str().ok_or_else(|| place.fail("'pattern' must be a string"))?;
        let rewritten = pattern::rewrite(text).map_err(|reason| place.fail(format!("'pattern': {reason}")))?;
        // The converter copies its rules for each pattern.
        self.spend(10 * rewritten.len() + 20 * self.nodes)?;
        self.replaced.insert(std::ptr::from_ref(value), rewritten);
        Ok(())
    }
}

/// A least and a most number of something.
fn counts(node: &Json, min: &str, max: &str, place: &Place) -> Result<(Option<u64>, Option<u64>), GrammarError> {
    let count = |key: &str| match node.get(key) {
        None => Ok(None),
        Some(Json::Number(n)) => match n.as_u64().filter(|&n| n <= MAX_REPETITIONS) {
            Some(n) => Ok(Some(n)),
            None => Err(place.fail(format!("'{key}' must be a whole number up to {MAX_REPETITIONS}, not {n}"))),
        },
        Some(_) => Err(place.fail(format!("'{key}' must be a whole number"))),
    };
    let (least, most) = (count(min)?, count(max)?);
    if least.zip(most).is_some_and(|(least, most)| least > most) {
        return Err(place.fail(format!("'{min}' is above '{max}'")));
    }
    Ok((least, most))
}

fn integer(node: &Json, place: &Place) -> Result<(), GrammarError> {
    let limit = MAX_SCHEMA_INTEGER as f64;
    let bound = |key: &str| match node.get(key) {
        None => Ok(None),
        Some(Json::Number(n)) => match n.as_f64().filter(|n| n.abs() <= limit) {
            Some(n) => Ok(Some(n)),
            None => Err(place.fail(format!("'{key}' must be from -2^53 to 2^53, not {n}"))),
        },
        Some(_) => Err(place.fail(format!("'{key}' must be a number"))),
    };
    for (key, exclusive) in [("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")] {
        if bound(key)?.is_some() && bound(exclusive)?.is_some() {
            return Err(place.fail(format!("'{key}' beside '{exclusive}' cannot be enforced")));
        }
    }
    let low = bound("minimum")?.map(f64::ceil).or(bound("exclusiveMinimum")?.map(|n| n.floor() + 1.0));
    let high = bound("maximum")?.map(f64::floor).or(bound("exclusiveMaximum")?.map(|n| n.ceil() - 1.0));
    if low.zip(high).is_some_and(|(low, high)| low > high) {
        return Err(place.fail("no integer is within these bounds"));
    }
    Ok(())
}

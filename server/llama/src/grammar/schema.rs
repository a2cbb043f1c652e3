//! From a JSON schema to GBNF, by llama.cpp's converter, with what that converter would crash on, hang on or quietly
//! ignore found before.
//!
//! The schema is read in the order it is written in (so are the answer's keys) and walked under a limit of nodes, depth
//! and work. The walk writes a schema anew, and only that one is converted: nothing reaches the converter that was not
//! checked, every node says its type, patterns are rewritten ([`pattern`]), and the parts of `allOf` are one object or
//! one enum. Keywords that a grammar cannot enforce are refused rather than ignored, so an answer that ends is valid.
//! `oneOf` is read as `anyOf`, objects whose `properties` are listed have no others unless `additionalProperties` says
//! so, and all properties of the parts of `allOf` are required. A `type` beside alternatives, a reference or values has
//! to hold for them ([`types`]). Lengths beside a `format` are left to the format.

use std::collections::{HashMap, HashSet};

use super::json::{Json, array_of, object_of, quoted};
use super::scan::{MAX_GRAMMAR_TEXT_BYTES, MAX_REPETITIONS, MAX_RULE_NAME_BYTES};
use super::types::{Types, types};
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
/// The longest name that the converter gives the rule of a reference, in bytes.
const DEFINITION_BYTES: usize = "ref-defs-8192".len();
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

/// A schema that was checked: its keywords, and what they are in JSON.
type Checked = Vec<(&'static str, String)>;

type Property = (String, Json);

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
    let mut check = Check { root: &root, nodes: 0, work: 0, references: HashMap::new(), definitions: Vec::new() };
    let mut checked = check.node(&root, &Place { path: String::from("#"), name_bytes: 0, depth: 0 })?;
    let definitions = check.definitions.into_iter().enumerate();
    checked.push(("$defs", object_of(definitions.map(|(number, checked)| (number.to_string(), object_of(checked))))));
    let checked = object_of(checked);
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
        .replace("([eE] [-+]? integral-part)?", "([eE] [-+]? [0-9] [0-9]?)?")
        // And what keys other than those listed may not have in them, where the converter leaves out the quotation mark
        // alone. Literals escape theirs, so this is a class; that of a string's characters has it all already.
        .replace(r#"[^""#, r#"[^"\\\x7F\x00-\x1F"#)
        .replace(r"\x00-\x1F\\\x7F\x00-\x1F", r"\x00-\x1F"))
}

/// Where the walk is.
#[derive(Clone)]
pub(super) struct Place {
    path: String,
    /// The bytes of the name that the converter gives the rule.
    name_bytes: usize,
    depth: usize,
}

impl Place {
    pub(super) fn fail(&self, message: impl Into<String>) -> GrammarError {
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
    /// References that were followed, and the numbers of their definitions.
    references: HashMap<&'a str, usize>,
    /// What they refer to.
    definitions: Vec<Checked>,
}

impl<'a> Check<'a> {
    fn spend(&mut self, work: usize) -> Result<(), GrammarError> {
        self.work = self.work.saturating_add(work);
        if self.work > MAX_SCHEMA_WORK {
            return Err(GrammarError::TooLarge { what: "steps of conversion", limit: MAX_SCHEMA_WORK });
        }
        Ok(())
    }

    /// Counts a node; answers the keyword that it combines others by, if it has one.
    fn enter(&mut self, node: &'a Json, place: &Place) -> Result<Option<&'a str>, GrammarError> {
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
        // Keywords are looked for one by one.
        self.spend(20 * entries.len())?;
        if let Some((key, _)) = entries.iter().find(|(key, _)| NOT_ENFORCED.contains(&key.as_str())) {
            return Err(place.fail(format!("'{key}' cannot be enforced; leave it out")));
        }
        let mut combining = entries
            .iter()
            .map(|(key, _)| key.as_str())
            .filter(|key| ["$ref", "anyOf", "oneOf", "allOf", "const", "enum"].contains(key));
        let Some(first) = combining.next() else { return Ok(None) };
        if let Some(second) = combining.next() {
            return Err(place.fail(format!("'{second}' beside '{first}' cannot be enforced")));
        }
        if let Some((key, _)) = entries.iter().find(|(key, _)| SHAPE.contains(&key.as_str())) {
            return Err(place.fail(format!("'{key}' beside '{first}' cannot be enforced")));
        }
        Ok(Some(first))
    }

    fn node(&mut self, node: &'a Json, place: &Place) -> Result<Checked, GrammarError> {
        let value = |key| node.get(key).unwrap_or(&Json::Null);
        let combining = self.enter(node, place)?;
        let names = types(node, place)?;
        let stated = Types::named(&names);
        match combining {
            None => {}
            Some("allOf") => return self.all_of(node, place),
            Some("const") if !stated.contains(Types::of(value("const"))) => {
                return Err(place.fail("the value of 'const' is not of the 'type' beside it"));
            }
            Some("const") => return Ok(vec![("const", self.literal(value("const"))?)]),
            Some("enum") => {
                let values = values(node, place)?;
                let values: Vec<&Json> = values.iter().filter(|value| stated.contains(Types::of(value))).collect();
                if values.is_empty() {
                    return Err(place.fail("no value of 'enum' is of the 'type' beside it"));
                }
                return Ok(vec![("enum", self.literals(values)?)]);
            }
            Some(key) => {
                if !names.is_empty() && !stated.contains(self.possible(node, key, place, place.depth)?) {
                    return Err(
                        place.fail(format!("'{key}' allows more than the 'type' beside it: say it in each part"))
                    );
                }
                return match key {
                    "$ref" => self.reference(node, place),
                    _ => Ok(vec![("anyOf", self.schemas(value(key), &place.below(key, 0))?)]),
                };
            }
        }
        match *names {
            [] => self.untyped(node, place),
            [name] => self.typed(name, node, place),
            ref names => {
                let place = place.below("type", 2);
                let alternatives = names.iter().map(|name| {
                    self.nodes += 1;
                    Ok(object_of(self.typed(name, node, &place)?))
                });
                Ok(vec![("anyOf", array_of(&alternatives.collect::<Result<Vec<_>, GrammarError>>()?))])
            }
        }
    }

    /// The types of what `$ref`, `anyOf` or `oneOf` of a node allow.
    fn possible(&mut self, node: &'a Json, key: &str, place: &Place, depth: usize) -> Result<Types, GrammarError> {
        if depth > MAX_SCHEMA_DEPTH {
            return Err(GrammarError::TooLarge { what: "nested nodes of JSON schema", limit: MAX_SCHEMA_DEPTH });
        }
        let parts = match node.get(key).and_then(Json::as_array) {
            Some(parts) => parts,
            None if key == "$ref" => std::slice::from_ref(self.resolve(reference(node, place)?, place)?),
            None => return Err(place.fail(format!("'{key}' must be an array of schemas"))),
        };
        let mut possible = Types::NONE;
        for part in parts {
            self.spend(200)?;
            let stated = Types::named(&types(part, place)?);
            let combining = ["$ref", "anyOf", "oneOf"].into_iter().find(|key| part.get(key).is_some());
            possible |= stated
                & match combining {
                    Some(key) => self.possible(part, key, place, depth + 1)?,
                    None => Types::of_schema(part),
                };
        }
        Ok(possible)
    }

    /// A node without a type: its keywords say which it has, if any.
    fn untyped(&mut self, node: &'a Json, place: &Place) -> Result<Checked, GrammarError> {
        let has = |keys: &[&str]| keys.iter().any(|key| node.get(key).is_some());
        // As true it constrains nothing.
        let others = node.get("additionalProperties").is_some_and(|others| *others != Json::Bool(true));
        if others || has(&["properties"]) {
            return self.object(node, place);
        }
        if has(&["items", "prefixItems"]) {
            return self.array(node, place);
        }
        if has(&["pattern", "minLength", "maxLength"]) {
            return self.string(node, place);
        }
        match SHAPE.iter().find(|&&key| key != "additionalProperties" && node.get(key).is_some()) {
            Some(key) => Err(place.fail(format!("'{key}' needs a 'type'"))),
            None => Ok(format(node, place)?.into_iter().collect()),
        }
    }

    fn typed(&mut self, name: &str, node: &'a Json, place: &Place) -> Result<Checked, GrammarError> {
        match name {
            "object" => self.object(node, place),
            "array" => self.array(node, place),
            "string" => self.string(node, place),
            "integer" => integer(node, place),
            "number" => match BOUNDS.iter().find(|key| node.get(key).is_some()) {
                Some(key) => Err(place.fail(format!("'{key}' cannot be enforced on a number, only on an integer"))),
                None => Ok(vec![("type", quoted(name))]),
            },
            _ => Ok(vec![("type", quoted(name))]),
        }
    }

    /// An array of schemas.
    fn schemas(&mut self, value: &'a Json, place: &Place) -> Result<String, GrammarError> {
        let items = value.as_array().filter(|items| !items.is_empty());
        let items = items.ok_or_else(|| place.fail("must be an array of schemas"))?;
        self.items(items, place, 5)
    }

    fn items(&mut self, items: &'a [Json], place: &Place, name_bytes: usize) -> Result<String, GrammarError> {
        let checked = items.iter().enumerate().map(|(i, item)| {
            let checked = self.node(item, &place.below(&i.to_string(), name_bytes))?;
            Ok(object_of(checked))
        });
        Ok(array_of(&checked.collect::<Result<Vec<_>, GrammarError>>()?))
    }

    /// A value that the answer may have as it is.
    fn literal(&mut self, value: &Json) -> Result<String, GrammarError> {
        let mut text = String::new();
        value.write(&mut text);
        // The converter reads objects in time that is quadratic in their keys, and searches the text character by
        // character.
        self.spend(10 * text.len() + value.lookups())?;
        Ok(text)
    }

    fn literals<'b>(&mut self, values: impl IntoIterator<Item = &'b Json>) -> Result<String, GrammarError> {
        let literals = values.into_iter().map(|value| self.literal(value));
        Ok(array_of(&literals.collect::<Result<Vec<_>, GrammarError>>()?))
    }

    /// What all parts ask for: one object, or the values that all enums have.
    fn all_of(&mut self, node: &'a Json, place: &Place) -> Result<Checked, GrammarError> {
        let parts = node.get("allOf").and_then(Json::as_array).filter(|parts| !parts.is_empty());
        let parts = parts.ok_or_else(|| place.fail("'allOf' must be an array of schemas"))?;
        let types = types(node, place)?;
        let other_type = || place.fail("this 'type' beside 'allOf' cannot be enforced");
        let (mut objects, mut enums) = (Vec::new(), Vec::new());
        for (i, part) in parts.iter().enumerate() {
            let place = place.below(&format!("allOf/{i}"), 0);
            let part = self.part(part, &place)?;
            if part.get("enum").is_some() {
                enums.push(values(part, &place)?);
            } else if part.get("properties").is_some() && matches!(*super::types::types(part, &place)?, [] | ["object"])
            {
                objects.push((part, place));
            } else {
                return Err(place.fail("the parts of 'allOf' must be objects with 'properties', or enums"));
            }
        }
        if let Some((first, others)) = enums.split_first() {
            if !objects.is_empty() {
                return Err(place.fail("'allOf' of objects and enums cannot be enforced"));
            }
            self.spend(others.iter().map(|other| first.len() * other.len()).sum())?;
            let common: Vec<&Json> =
                first.iter().filter(|value| others.iter().all(|other| other.contains(value))).collect();
            if common.is_empty() {
                return Err(place.fail("no value is in all enums of 'allOf'"));
            }
            if !types.is_empty() && (types != ["string"] || common.iter().any(|value| value.as_str().is_none())) {
                return Err(other_type());
            }
            return Ok(vec![("enum", self.literals(common)?)]);
        }
        if !matches!(*types, [] | ["object"]) {
            return Err(other_type());
        }
        let (mut properties, mut names) = (Vec::new(), HashSet::new());
        for (part, place) in &objects {
            let others = part.get("additionalProperties");
            if objects.len() > 1 && others.is_some_and(|others| *others != Json::Bool(true)) {
                return Err(place.fail("'additionalProperties' beside other parts of 'allOf' cannot be enforced"));
            }
            for (name, property) in self.listed(part, place)?.0 {
                if !names.insert(name) {
                    return Err(place.fail(format!("'{name}' in two parts of 'allOf' cannot be enforced")));
                }
                let checked = self.node(property, &place.below(&format!("properties/{name}"), name.len()))?;
                properties.push((name, object_of(checked)));
            }
        }
        let required: Vec<String> = properties.iter().map(|(name, _)| quoted(name)).collect();
        let properties = object_of(properties);
        Ok(vec![("type", quoted("object")), ("properties", properties), ("required", array_of(&required))])
    }

    /// A part of `allOf`, after its references.
    fn part(&mut self, mut part: &'a Json, place: &Place) -> Result<&'a Json, GrammarError> {
        for _ in 0..MAX_SCHEMA_DEPTH {
            match self.enter(part, place)? {
                Some("$ref") => part = self.resolve(reference(part, place)?, place)?,
                None | Some("enum") => return Ok(part),
                Some(key) => return Err(place.fail(format!("'{key}' inside 'allOf' cannot be enforced"))),
            }
        }
        Err(GrammarError::TooLarge { what: "references that only refer to another", limit: MAX_SCHEMA_DEPTH })
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

    fn reference(&mut self, node: &'a Json, place: &Place) -> Result<Checked, GrammarError> {
        let reference = reference(node, place)?;
        let number = match self.references.get(reference) {
            Some(&number) => number,
            None => {
                let target = self.resolve(reference, place)?;
                let number = self.definitions.len();
                self.references.insert(reference, number);
                self.definitions.push(Checked::new());
                let (path, depth) = (reference.to_owned(), place.depth + 1);
                self.definitions[number] = self.node(target, &Place { path, name_bytes: DEFINITION_BYTES, depth })?;
                number
            }
        };
        Ok(vec![("$ref", quoted(&format!("#/$defs/{number}")))])
    }

    /// The properties that an object lists, and the names of those that it requires.
    fn listed(&mut self, node: &'a Json, place: &Place) -> Result<(&'a [Property], HashSet<&'a str>), GrammarError> {
        let properties = match node.get("properties") {
            None => &[][..],
            Some(Json::Object(properties)) => properties.as_slice(),
            Some(_) => return Err(place.fail("'properties' must be an object")),
        };
        if properties.len() > MAX_SCHEMA_PROPERTIES {
            return Err(place.fail(format!("an object has at most {MAX_SCHEMA_PROPERTIES} properties")));
        }
        if properties.iter().any(|(name, _)| name.len() > MAX_SCHEMA_NAME_BYTES) {
            return Err(place.fail(format!("the name of a property has at most {MAX_SCHEMA_NAME_BYTES} bytes")));
        }
        let mut required = HashSet::new();
        if let Some(value) = node.get("required") {
            let names = value.as_array().ok_or_else(|| place.fail("'required' must be an array of names"))?;
            self.spend(names.len() * properties.len())?;
            for name in names {
                let name = name.as_str().ok_or_else(|| place.fail("'required' must be an array of names"))?;
                if !properties.iter().any(|(property, _)| property == name) {
                    return Err(place.fail(format!("'{name}' is required but not among 'properties'")));
                }
                required.insert(name);
            }
        }
        Ok((properties, required))
    }

    fn object(&mut self, node: &'a Json, place: &Place) -> Result<Checked, GrammarError> {
        let (properties, required) = self.listed(node, place)?;
        self.spend(properties.len().pow(3))?;
        let others = node.get("additionalProperties");
        let mut checked = vec![("type", quoted("object"))];
        if node.get("properties").is_some() {
            let mut written = Vec::new();
            for (name, property) in properties {
                // The converter writes names into character classes as they are.
                let in_class = others.is_some_and(|others| *others != Json::Bool(false));
                if in_class && (name.is_empty() || name.contains(|c: char| c.is_control() || "]\\^\"".contains(c))) {
                    return Err(place
                        .fail(format!("'additionalProperties' beside a property named '{name}' cannot be enforced")));
                }
                let property = self.node(property, &place.below(&format!("properties/{name}"), name.len()))?;
                written.push((name, object_of(property)));
            }
            let required = properties.iter().filter(|(name, _)| required.contains(name.as_str()));
            let required: Vec<String> = required.map(|(name, _)| quoted(name)).collect();
            checked.extend([("properties", object_of(written)), ("required", array_of(&required))]);
        }
        match others {
            None => {}
            Some(Json::Bool(others)) => checked.push(("additionalProperties", others.to_string())),
            Some(others) => {
                let others = self.node(others, &place.below("additionalProperties", 0))?;
                checked.push(("additionalProperties", object_of(others)));
            }
        }
        Ok(checked)
    }

    fn array(&mut self, node: &'a Json, place: &Place) -> Result<Checked, GrammarError> {
        let (min, max) = counts(node, "minItems", "maxItems", place)?;
        let (items, prefix) = (node.get("items"), node.get("prefixItems"));
        if items.is_some() && prefix.is_some() {
            return Err(place.fail("'items' beside 'prefixItems' cannot be enforced"));
        }
        let mut checked = vec![("type", quoted("array"))];
        match items.or(prefix) {
            None => {}
            Some(Json::Array(items)) => {
                let n = items.len() as u64;
                if n < min.unwrap_or(0) || n > max.unwrap_or(n) {
                    return Err(place.fail("as many items as there are schemas for them are not allowed"));
                }
                checked.push(("items", self.items(items, place, 12)?));
                return Ok(checked);
            }
            Some(item) => {
                let item = self.node(item, &place.below("items", 5))?;
                checked.push(("items", object_of(item)));
            }
        }
        checked.extend(min.map(|min| ("minItems", min.to_string())));
        checked.extend(max.map(|max| ("maxItems", max.to_string())));
        Ok(checked)
    }

    fn string(&mut self, node: &'a Json, place: &Place) -> Result<Checked, GrammarError> {
        let (min, max) = counts(node, "minLength", "maxLength", place)?;
        let mut checked = vec![("type", quoted("string"))];
        checked.extend(format(node, place)?);
        let Some(value) = node.get("pattern") else {
            checked.extend(min.map(|min| ("minLength", min.to_string())));
            checked.extend(max.map(|max| ("maxLength", max.to_string())));
            return Ok(checked);
        };
        if min.is_some() || max.is_some() {
            return Err(place.fail("'minLength' and 'maxLength' cannot be enforced beside 'pattern'"));
        }
        let text = value.as_str().ok_or_else(|| place.fail("'pattern' must be a string"))?;
        let rewritten = pattern::rewrite(text).map_err(|reason| place.fail(format!("'pattern': {reason}")))?;
        // The converter copies its rules for each pattern.
        self.spend(10 * rewritten.len() + 20 * self.nodes)?;
        checked.push(("pattern", quoted(&rewritten)));
        Ok(checked)
    }
}

/// The values of an `enum`.
fn values<'a>(node: &'a Json, place: &Place) -> Result<&'a [Json], GrammarError> {
    let values = node.get("enum").and_then(Json::as_array).filter(|values| !values.is_empty());
    values.ok_or_else(|| place.fail("'enum' must be an array of values"))
}

fn reference<'a>(node: &'a Json, place: &Place) -> Result<&'a str, GrammarError> {
    let reference = node.get("$ref").and_then(Json::as_str).ok_or_else(|| place.fail("'$ref' must be a string"))?;
    if reference.len() > MAX_SCHEMA_NAME_BYTES {
        return Err(place.fail(format!("a reference has at most {MAX_SCHEMA_NAME_BYTES} bytes")));
    }
    Ok(reference)
}

fn format(node: &Json, place: &Place) -> Result<Option<(&'static str, String)>, GrammarError> {
    match node.get("format") {
        None => Ok(None),
        Some(Json::String(format)) => Ok(Some(("format", quoted(format)))),
        Some(_) => Err(place.fail("'format' must be a string")),
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

fn integer(node: &Json, place: &Place) -> Result<Checked, GrammarError> {
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
    let low = bound("minimum")?.map(|n| n.ceil() as i64).or(bound("exclusiveMinimum")?.map(|n| n.floor() as i64 + 1));
    let high = bound("maximum")?.map(|n| n.floor() as i64).or(bound("exclusiveMaximum")?.map(|n| n.ceil() as i64 - 1));
    const WIDEST: i64 = MAX_SCHEMA_INTEGER as i64;
    if low.unwrap_or(-WIDEST) > high.unwrap_or(WIDEST) {
        return Err(place.fail("no integer is within these bounds"));
    }
    let mut checked = vec![("type", quoted("integer"))];
    if low.is_some() || high.is_some() {
        // Of one bound alone the converter makes ranges that are wrong and numbers that begin with zero.
        let (low, high) = (low.unwrap_or(-WIDEST), high.unwrap_or(WIDEST));
        checked.extend([("minimum", low.to_string()), ("maximum", high.to_string())]);
    }
    Ok(checked)
}

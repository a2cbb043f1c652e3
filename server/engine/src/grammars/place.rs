//! Bounds a schema before it is compiled, and finds where the one stands that could not be.

use serde_json::{Map, Number, Value};

use super::limits::{
    MAX_COUNTED_PROPERTIES, MAX_SCHEMA_DEPTH, MAX_SCHEMA_MULTIPLE, MAX_SCHEMA_PATTERN_BYTES, MAX_SCHEMA_PROPERTIES,
    MAX_SCHEMA_VALUES,
};
use super::schema::SchemaError;

/// Keywords whose value names schemas: their keys are no keywords.
const MAPS: &[&str] = &["properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"];
/// Keywords whose value is an instance.
const INSTANCES: &[&str] = &["const", "enum", "default", "example", "examples", "x-guidance"];
/// Keywords whose value is the least of a number, or below it, and the most of it, or above.
const LEAST: [&str; 2] = ["minimum", "exclusiveMinimum"];
const MOST: [&str; 2] = ["maximum", "exclusiveMaximum"];
/// The largest number of 64 bits with a point below 2^63.
const LARGEST_INTEGER: f64 = 9_223_372_036_854_774_784.0;
/// The most characters of a path or a reason that an error has.
const MAX_SAID: usize = 300;

/// A value of a schema, and where it was found.
struct Node<'a> {
    value: &'a Value,
    /// The node that it was found in; its own number for the root.
    parent: usize,
    /// What leads there from its parent.
    steps: [Step<'a>; 2],
    depth: usize,
}

#[derive(Clone, Copy)]
enum Step<'a> {
    None,
    Key(&'a str),
    Item(usize),
}

/// A walk over a schema. A path is put together only for the value that it is asked of: a long key above many values would
/// else be copied for each.
struct Walk<'a> {
    nodes: Vec<Node<'a>>,
    open: Vec<usize>,
}

impl<'a> Walk<'a> {
    fn new(schema: &'a Value) -> Self {
        Self { nodes: vec![Node { value: schema, parent: 0, steps: [Step::None; 2], depth: 0 }], open: vec![0] }
    }

    /// The value that is looked at next, by its number.
    fn next(&mut self) -> Option<usize> {
        self.open.pop()
    }

    fn push(&mut self, parent: usize, steps: [Step<'a>; 2], value: &'a Value) {
        let depth = self.nodes[parent].depth + 1;
        self.open.push(self.nodes.len());
        self.nodes.push(Node { value, parent, steps, depth });
    }

    /// The JSON pointer of a value, or as much of it as an error may say.
    fn path(&self, mut at: usize) -> String {
        let mut steps = Vec::new();
        while at != 0 {
            steps.extend(self.nodes[at].steps.iter().rev());
            at = self.nodes[at].parent;
        }
        let mut path = String::from("#");
        for step in steps.into_iter().rev() {
            match step {
                Step::None => {}
                Step::Key(key) => {
                    let said: String = key.chars().take(MAX_SAID).collect();
                    path.push('/');
                    path.push_str(&escaped(&said));
                }
                Step::Item(item) => path.push_str(&format!("/{item}")),
            }
            if path.len() >= MAX_SAID {
                break;
            }
        }
        path.chars().take(MAX_SAID).collect()
    }
}

/// Refuses a schema that is too large to be looked at, or whose compilation takes more than its size tells.
pub(super) fn check_size(schema: &Value) -> Result<(), SchemaError> {
    let mut multiples = Multiples::default();
    let mut walk = Walk::new(schema);
    while let Some(at) = walk.next() {
        let value = walk.nodes[at].value;
        if walk.nodes[at].depth > MAX_SCHEMA_DEPTH {
            return Err(SchemaError::TooLarge { what: "levels of nesting", limit: MAX_SCHEMA_DEPTH });
        }
        let below = value.as_array().map_or(0, Vec::len) + value.as_object().map_or(0, Map::len);
        if walk.nodes.len() + below > MAX_SCHEMA_VALUES {
            return Err(SchemaError::TooLarge { what: "values", limit: MAX_SCHEMA_VALUES });
        }
        match value {
            Value::Array(items) => {
                items.iter().enumerate().for_each(|(item, value)| walk.push(at, [Step::Item(item), Step::None], value));
            }
            Value::Object(keywords) => {
                check_keywords(keywords, &mut multiples)
                    .map_err(|message| SchemaError::Unsupported { path: walk.path(at), message })?;
                keywords.iter().for_each(|(key, value)| walk.push(at, [Step::Key(key), Step::None], value));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Sees to it that numbers are followed as they stand there. They are compared as ones of 64 bits with a point, of which integers beyond
/// 2^53 are not each one: a constant that is none is refused, and a bound is brought to the next one within it.
pub(super) fn keep_exact(schema: &mut Value) -> Result<(), SchemaError> {
    exact(schema).map_err(|(path, message)| SchemaError::Unsupported {
        path: format!("#{path}").chars().take(MAX_SAID).collect(),
        message,
    })
}

/// The error has the JSON pointer within `schema`, whose nesting is bounded by [`check_size`].
fn exact(schema: &mut Value) -> Result<(), (String, String)> {
    let within = |step: String| move |(path, message): (String, String)| (format!("{step}{path}"), message);
    match schema {
        Value::Array(items) => {
            for (item, value) in items.iter_mut().enumerate() {
                exact(value).map_err(within(format!("/{item}")))?;
            }
        }
        Value::Object(keywords) => {
            for (key, value) in keywords.iter_mut() {
                let key = key.as_str();
                match value {
                    Value::Number(bound) if LEAST.contains(&key) => bring_within(bound, f64::next_up, i128::gt),
                    Value::Number(bound) if MOST.contains(&key) => bring_within(bound, f64::next_down, i128::lt),
                    value if matches!(key, "const" | "enum") && !has_exact_numbers(value) => {
                        let message = format!(
                            "'{key}' has an integer that is followed as another one, since it is beyond 2^53; ask for a string of its digits"
                        );
                        return Err((format!("/{key}"), message));
                    }
                    _ if INSTANCES.contains(&key) => {}
                    Value::Object(named) if MAPS.contains(&key) => {
                        for (name, value) in named.iter_mut() {
                            exact(value).map_err(within(format!("/{key}/{}", escaped(name))))?;
                        }
                    }
                    value => exact(value).map_err(within(format!("/{}", escaped(key))))?,
                }
            }
        }
        _ => {}
    }
    Ok(())
}

/// An integer of JSON, which may be one of 64 bits with a sign or without.
fn integer(number: &Number) -> Option<i128> {
    number.as_i64().map(i128::from).or_else(|| number.as_u64().map(i128::from))
}

/// Brings an integer that bounds a number to the next one that is a number of 64 bits with a point, and that the compiler takes: below
/// 2^63. `further` is the next number within the bound, and `is_beyond` whether the integer is further within it than another one.
fn bring_within(bound: &mut Number, further: fn(f64) -> f64, is_beyond: fn(&i128, &i128) -> bool) {
    let Some(exact) = integer(bound) else { return };
    let mut near = (exact as f64).clamp(-LARGEST_INTEGER, LARGEST_INTEGER);
    if is_beyond(&exact, &(near as i128)) && near.abs() < LARGEST_INTEGER {
        near = further(near);
    }
    if near as i128 != exact {
        *bound = Number::from(near as i64);
    }
}

/// Whether each integer in an instance is a number of 64 bits with a point.
fn has_exact_numbers(instance: &Value) -> bool {
    match instance {
        Value::Number(number) => integer(number)
            .is_none_or(|exact| exact as f64 as i128 == exact && exact.unsigned_abs() <= LARGEST_INTEGER as u128),
        Value::Array(items) => items.iter().all(has_exact_numbers),
        Value::Object(fields) => fields.values().all(has_exact_numbers),
        _ => true,
    }
}

/// What may take more than it looks like. That an instance, or a property, has such a name is no reason to look away.
fn check_keywords(keywords: &Map<String, Value>, multiples: &mut Multiples) -> Result<(), String> {
    let count = |key: &str| keywords.get(key).and_then(Value::as_object).map_or(0, Map::len);
    let counted = ["minProperties", "maxProperties"].iter().any(|key| keywords.get(*key).is_some_and(Value::is_number));
    let most = if counted { MAX_COUNTED_PROPERTIES } else { MAX_SCHEMA_PROPERTIES };
    let properties = count("properties") + count("patternProperties");
    if properties > most {
        let why = if counted { " where 'minProperties' or 'maxProperties' counts them" } else { "" };
        return Err(format!("an object names at most {most} properties{why}, not {properties}"));
    }
    let names = count("patternProperties");
    let patterns = keywords.get("patternProperties").and_then(Value::as_object).into_iter().flat_map(Map::keys);
    let pattern = keywords.get("pattern").and_then(Value::as_str);
    if names > MAX_COUNTED_PROPERTIES {
        return Err(format!("an object has at most {MAX_COUNTED_PROPERTIES} 'patternProperties', not {names}"));
    }
    if patterns.map(String::as_str).chain(pattern).any(|pattern| pattern.len() > MAX_SCHEMA_PATTERN_BYTES) {
        return Err(format!("a pattern has at most {MAX_SCHEMA_PATTERN_BYTES} bytes"));
    }
    match keywords.get("multipleOf") {
        Some(Value::Number(number)) => multiples.add(&number.to_string()),
        _ => Ok(()),
    }
}

/// What all `multipleOf` of a schema come to: those of several parts that hold for one value are followed together.
#[derive(Default)]
struct Multiples {
    /// The least common multiple of what they are without their decimal points.
    together: Option<u64>,
    /// The exponents of ten of the least and the largest of them.
    exponents: Option<(i64, i64)>,
}

impl Multiples {
    fn add(&mut self, number: &str) -> Result<(), String> {
        let refused = || {
            format!(
                "'multipleOf' can be enforced up to {MAX_SCHEMA_MULTIPLE}, counted without the decimal point and together \
                 with the others of the schema"
            )
        };
        let (digits, exponent) = number.split_once(['e', 'E']).unwrap_or((number, "0"));
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
        let written = format!("{}{fraction}", whole.trim_start_matches('-'));
        let significant = written.trim_end_matches('0');
        let value: u64 = significant.trim_start_matches('0').parse().map_err(|_| refused())?;
        let zeros = i64::try_from(written.len() - significant.len()).map_err(|_| refused())?;
        let exponent: i64 = exponent.trim_start_matches('+').parse().map_err(|_| refused())?;
        let exponent = exponent - i64::try_from(fraction.len()).map_err(|_| refused())? + zeros;
        let together = self.together.unwrap_or(1);
        let together = (value / common_divisor(together, value)).checked_mul(together);
        let (least, largest) = self.exponents.unwrap_or((exponent, exponent));
        let (least, largest) = (least.min(exponent), largest.max(exponent).max(0));
        let scale = u32::try_from(largest - least).ok().and_then(|n| 10_u64.checked_pow(n));
        let all = together.zip(scale).and_then(|(together, scale)| together.checked_mul(scale));
        if all.is_none_or(|all| all > MAX_SCHEMA_MULTIPLE) {
            return Err(refused());
        }
        (self.together, self.exponents) = (together, Some((least, largest)));
        Ok(())
    }
}

fn common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a.max(1) } else { common_divisor(b, a % b) }
}

/// What the compiler said of a schema, and where that is.
pub(super) fn describe(schema: &Value, said: &str) -> SchemaError {
    if let Some(panic) = said.strip_prefix("panic:") {
        tracing::error!(panic = panic.lines().next().unwrap_or_default(), "compiling a JSON schema panicked");
        return SchemaError::Unsupported {
            path: String::from("#"),
            message: String::from("it cannot be compiled; simplify it"),
        };
    }
    let (said, processed) = match said.split_once("\n  while processing ") {
        Some((said, path)) => (said, path.lines().next().and_then(|line| line.split(": ").next()).unwrap_or("#")),
        None => (said, "#"),
    };
    let found = blamed(said).and_then(|(is_at_fault, what)| Some((find(schema, &*is_at_fault)?, what)));
    let (path, message) = found.unwrap_or_else(|| (processed.to_owned(), said.to_owned()));
    let short = |text: &str| text.chars().take(MAX_SAID).collect();
    SchemaError::Unsupported { path: short(&path), message: short(&message) }
}

/// What the compiler said of a regular expression: the line that says it, among others that show where.
pub(super) fn reason(said: &str) -> String {
    if let Some(panic) = said.strip_prefix("panic:") {
        tracing::error!(panic = panic.lines().next().unwrap_or_default(), "compiling a regular expression panicked");
        return String::from("it cannot be compiled; simplify it");
    }
    let told = said.lines().rev().find_map(|line| line.trim_start().strip_prefix("error: "));
    let in_words = || said.lines().rev().find(|line| line.contains(char::is_alphanumeric));
    told.or_else(in_words).unwrap_or(said).trim().chars().take(MAX_SAID).collect()
}

type IsAtFault = Box<dyn Fn(&str, &Value) -> bool>;

/// Which keyword, with which value, a reason is about, and the reason in our words.
fn blamed(said: &str) -> Option<(IsAtFault, String)> {
    if let Some(keys) = said.strip_prefix("Unimplemented keys: ") {
        let keys: Vec<String> = serde_json::from_str(keys.lines().next()?).ok()?;
        let first = keys.first()?.clone();
        let message = format!("'{first}' cannot be enforced; leave it out, or leave out \"strict\": true");
        return Some((Box::new(move |key, _| key == first), message));
    }
    if let Some(format) = said.strip_prefix("Unknown format: ") {
        let format = format.lines().next()?.to_owned();
        let message = format!("the format '{format}' cannot be enforced; leave it out, or leave out \"strict\": true");
        return Some((Box::new(move |key, value| key == "format" && value.as_str() == Some(&*format)), message));
    }
    if let Some(name) = said.strip_prefix("Invalid type: ") {
        let name = name.lines().next()?.to_owned();
        let message = format!("there is no type '{name}'");
        let is_it = move |value: &Value| value.as_str() == Some(&*name);
        let is_at_fault = move |key: &str, value: &Value| {
            key == "type" && (is_it(value) || value.as_array().is_some_and(|all| all.iter().any(&is_it)))
        };
        return Some((Box::new(is_at_fault), message));
    }
    if ["$ref", "eference"].iter().any(|word| said.contains(word)) {
        let (among, said) = (said.to_owned(), said.lines().next()?);
        let message = if said.starts_with("Only absolute") {
            String::from("only references into the same document ('#/...') can be followed")
        } else {
            said.to_owned()
        };
        let is_at_fault = move |key: &str, value: &Value| {
            key == "$ref" && value.as_str().is_some_and(|reference| among.contains(reference))
        };
        return Some((Box::new(is_at_fault), message));
    }
    if said.starts_with("regex parse error") {
        let (among, reason) = (said.to_owned(), said.lines().last()?.trim_start_matches("error: "));
        let message = format!("the pattern cannot be followed: {reason}");
        let is_at_fault = move |key: &str, value: &Value| {
            key == "pattern" && value.as_str().is_some_and(|pattern| among.contains(pattern))
        };
        return Some((Box::new(is_at_fault), message));
    }
    if said.starts_with("Unable to determine if regex is empty") {
        let message = "its patterns cannot be followed together; write them as one, or leave some out";
        return Some((Box::new(|key, _| key == "allOf"), message.to_owned()));
    }
    if said.starts_with("oneOf constraints are not supported") {
        let message = "the parts of 'oneOf' exclude each other in no way that can be seen; write 'anyOf', or leave out \"strict\": true";
        return Some((Box::new(|key, _| key == "oneOf"), message.to_owned()));
    }
    None
}

/// The JSON pointer of the first schema with a keyword that is at fault.
fn find(schema: &Value, is_at_fault: &dyn Fn(&str, &Value) -> bool) -> Option<String> {
    let mut walk = Walk::new(schema);
    while let Some(at) = walk.next() {
        match walk.nodes[at].value {
            Value::Object(keywords) => {
                if keywords.iter().any(|(key, value)| is_at_fault(key, value)) {
                    return Some(walk.path(at));
                }
                for (key, value) in keywords.iter().rev().filter(|(key, _)| !INSTANCES.contains(&key.as_str())) {
                    match value {
                        Value::Object(named) if MAPS.contains(&key.as_str()) => {
                            for (name, value) in named.iter().rev() {
                                walk.push(at, [Step::Key(key), Step::Key(name)], value);
                            }
                        }
                        value => walk.push(at, [Step::Key(key), Step::None], value),
                    }
                }
            }
            Value::Array(items) => {
                for (item, value) in items.iter().enumerate().rev() {
                    walk.push(at, [Step::Item(item), Step::None], value);
                }
            }
            _ => {}
        }
    }
    None
}

/// A key as a part of a JSON pointer.
fn escaped(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

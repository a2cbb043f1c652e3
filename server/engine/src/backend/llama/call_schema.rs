//! What calls of a tool are bound by, of the schema that the tool came with.
//!
//! llama.cpp's converter makes the grammar of calls. It refuses a whole request for one keyword of one schema, takes some
//! for others (`anyOf` beside `properties`), and makes texts of some numbers that no grammar can hold. Tools carry what
//! their authors wrote, and a model that is shown a schema mostly keeps to it. So the model is shown the tool as it came,
//! and calls are bound by what is left here: nothing but what the converter takes and means, which allows whatever the
//! tool's own schema allows, but for properties that it does not name.
//!
//! Dropped: patterns, lengths and counts over [`MAX_COUNT`], bounds of numbers that are not whole, lists of values over
//! [`MAX_VALUES_BYTES`], `not`, conditions, and alternatives beside a type. What depends on the source: llama.cpp's
//! `common/json-schema.cpp`.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

/// The longest text and array that a call is bound to: a grammar grows with these.
const MAX_COUNT: u64 = 256;
/// The most bytes of a list of values, as JSON.
const MAX_VALUES_BYTES: usize = 16 * 1024;
/// The most properties of an object that are told apart: the converter takes time with their third power.
const MAX_PROPERTIES: usize = 100;
/// The most schemas within a schema; what comes after them is anything.
const MAX_SCHEMAS: usize = 2_000;
/// How deep schemas stand within each other, by references too, here and in the converter; what is deeper is anything.
const MAX_DEPTH: usize = 32;
/// Whole numbers up to this are the same in every language's JSON.
const MAX_WHOLE: i64 = (1 << 53) - 1;

/// What calls of a tool are bound by that came with this schema: always that of an object.
pub(super) fn bindable(schema: &Value) -> Value {
    let mut reduction = Reduction { root: schema, left: MAX_SCHEMAS, targets: BTreeMap::new() };
    let mut target = schema;
    for _ in 0..MAX_DEPTH {
        match reference_of(target).map(|reference| reduction.resolve(reference)) {
            Some(Some(next)) => target = next,
            _ => break,
        }
    }
    let reduced = reduction.reduce(target, 0, &mut Vec::new());
    let mut object = match reduced {
        Value::Object(object) if object.get("type").and_then(Value::as_str) == Some("object") => object,
        _ => return json!({"type": "object"}),
    };
    if !reduction.targets.is_empty() {
        let definitions = reduction.targets.into_values().filter_map(|target| Some((target.name, target.schema?)));
        object.insert("$defs".to_owned(), Value::Object(definitions.collect()));
    }
    Value::Object(object)
}

fn reference_of(schema: &Value) -> Option<&str> {
    schema.get("$ref")?.as_str()
}

/// What a reference leads to: `schema` is `None` as long as that is being reduced.
struct Target {
    name: String,
    schema: Option<Value>,
}

struct Reduction<'a> {
    root: &'a Value,
    /// Schemas that may still be looked at.
    left: usize,
    /// By their references.
    targets: BTreeMap<&'a str, Target>,
}

impl<'a> Reduction<'a> {
    /// What stands at a reference into the same document.
    fn resolve(&self, reference: &str) -> Option<&'a Value> {
        let pointer = reference.strip_prefix('#')?;
        let target = self.root.pointer(pointer)?;
        target.is_object().then_some(target)
    }

    /// `open`: references that were followed to come here, with nothing of an answer between them. One of these again would
    /// be a text that begins with itself.
    fn reduce(&mut self, schema: &'a Value, depth: usize, open: &mut Vec<&'a str>) -> Value {
        let Value::Object(fields) = schema else { return json!({}) };
        if self.left == 0 || depth > MAX_DEPTH {
            return json!({});
        }
        self.left -= 1;
        if let Some(reference) = reference_of(schema) {
            return self.reduce_reference(reference, depth, open);
        }
        let values = |name: &str| fields.get(name).filter(|values| values.to_string().len() <= MAX_VALUES_BYTES);
        if let Some(value) = values("const") {
            return json!({"const": value});
        }
        if let Some(values) = values("enum").filter(|values| values.as_array().is_some_and(|values| !values.is_empty()))
        {
            return json!({"enum": values});
        }
        if let Some(types) = fields.get("type").and_then(Value::as_array) {
            let alternatives = types.iter().filter_map(Value::as_str).map(|kind| self.reduce_as(kind, fields, depth));
            return union(alternatives.collect());
        }
        let kind = fields.get("type").and_then(Value::as_str);
        let alternatives = ["oneOf", "anyOf"].iter().find_map(|name| fields.get(*name)?.as_array());
        let says_properties = ["properties", "additionalProperties", "patternProperties"].iter();
        let is_object = says_properties.clone().any(|name| fields.contains_key(*name));
        if let Some(alternatives) = alternatives.filter(|_| !is_object && matches!(kind, None | Some("object"))) {
            let reduced: Vec<Value> =
                alternatives.iter().map(|alternative| self.reduce(alternative, depth + 1, open)).collect();
            // Beside a type they mostly say more of it, which is not a schema by itself.
            let says_kind = |reduced: &Value| kind.is_none() || reduced.get("type").and_then(Value::as_str) == kind;
            if reduced.iter().all(says_kind) {
                return union(reduced);
            }
        }
        match kind {
            Some(kind) => self.reduce_as(kind, fields, depth),
            None if is_object => self.reduce_as("object", fields, depth),
            None if fields.contains_key("items") || fields.contains_key("prefixItems") => {
                self.reduce_as("array", fields, depth)
            }
            None => match fields.get("allOf").and_then(Value::as_array).map(Vec::as_slice) {
                Some([only]) => self.reduce(only, depth + 1, open),
                _ => json!({}),
            },
        }
    }

    fn reduce_reference(&mut self, reference: &'a str, depth: usize, open: &mut Vec<&'a str>) -> Value {
        if open.contains(&reference) {
            return json!({});
        }
        if !self.targets.contains_key(reference) {
            let Some(target) = self.resolve(reference) else { return json!({}) };
            let name = format!("schema{}", self.targets.len());
            self.targets.insert(reference, Target { name, schema: None });
            open.push(reference);
            let reduced = self.reduce(target, depth + 1, open);
            open.pop();
            if let Some(target) = self.targets.get_mut(reference) {
                target.schema = Some(reduced);
            }
        }
        let name = self.targets.get(reference).map(|target| target.name.as_str()).unwrap_or_default();
        json!({"$ref": format!("#/$defs/{name}")})
    }

    /// What fields say of values of this type.
    fn reduce_as(&mut self, kind: &str, fields: &'a Map<String, Value>, depth: usize) -> Value {
        let mut reduced = Map::new();
        reduced.insert("type".to_owned(), kind.into());
        match kind {
            "object" => self.reduce_object(fields, depth, &mut reduced),
            "array" => self.reduce_array(fields, depth, &mut reduced),
            "string" => {
                counts(fields, ["minLength", "maxLength"], &mut reduced);
                let format = fields.get("format").and_then(Value::as_str);
                if let Some(format) = format.filter(|format| matches!(*format, "date" | "time" | "date-time" | "uuid"))
                {
                    reduced.insert("format".to_owned(), format.into());
                }
            }
            "integer" => bounds(fields, &mut reduced),
            "number" | "boolean" | "null" => {}
            _ => return json!({}),
        }
        Value::Object(reduced)
    }

    fn reduce_object(&mut self, fields: &'a Map<String, Value>, depth: usize, reduced: &mut Map<String, Value>) {
        let given = fields.get("properties").and_then(Value::as_object).filter(|given| given.len() <= MAX_PROPERTIES);
        let mut properties = Map::new();
        for (name, schema) in given.into_iter().flatten() {
            properties.insert(name.clone(), self.reduce(schema, depth + 1, &mut Vec::new()));
        }
        let required: Vec<&str> =
            fields.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
        // Properties may be named elsewhere.
        let names_others = ["patternProperties", "anyOf", "oneOf", "allOf", "if", "dependentSchemas", "$dynamicRef"];
        let is_open = names_others.iter().any(|name| fields.contains_key(*name))
            || required.iter().any(|name| !properties.contains_key(*name));
        let others = match fields.get("additionalProperties") {
            Some(Value::Bool(false)) => Some(fields.contains_key("patternProperties").into()),
            _ if is_open => Some(json!(true)),
            Some(schema @ Value::Object(_)) => Some(self.reduce(schema, depth + 1, &mut Vec::new())),
            Some(Value::Bool(true)) => Some(json!(true)),
            _ => None,
        };
        if let Some(others) = others {
            reduced.insert("additionalProperties".to_owned(), others);
        }
        let required: Vec<&str> = required.into_iter().filter(|name| properties.contains_key(*name)).collect();
        if !required.is_empty() {
            reduced.insert("required".to_owned(), required.into());
        }
        if given.is_some() {
            reduced.insert("properties".to_owned(), Value::Object(properties));
        }
    }

    fn reduce_array(&mut self, fields: &'a Map<String, Value>, depth: usize, reduced: &mut Map<String, Value>) {
        counts(fields, ["minItems", "maxItems"], reduced);
        if let Some(items @ Value::Object(_)) = fields.get("items").filter(|_| !fields.contains_key("prefixItems")) {
            let items = self.reduce(items, depth + 1, &mut Vec::new());
            reduced.insert("items".to_owned(), items);
        }
    }
}

/// Any of these; of none, anything.
fn union(mut alternatives: Vec<Value>) -> Value {
    match alternatives.len() {
        0 => json!({}),
        1 => alternatives.swap_remove(0),
        _ if alternatives.iter().any(|alternative| *alternative == json!({})) => json!({}),
        _ => json!({"anyOf": alternatives}),
    }
}

/// The least and the most of what is counted, as far as it is counted and the two agree.
fn counts(fields: &Map<String, Value>, [least, most]: [&str; 2], reduced: &mut Map<String, Value>) {
    let count = |name: &str| whole(fields.get(name)?).and_then(|n| u64::try_from(n).ok()).filter(|n| *n <= MAX_COUNT);
    let (at_least, at_most) = (count(least).filter(|n| *n > 0), count(most));
    if at_least.zip(at_most).is_some_and(|(least, most)| least > most) {
        return;
    }
    for (name, count) in [(least, at_least), (most, at_most)] {
        if let Some(count) = count {
            reduced.insert(name.to_owned(), count.into());
        }
    }
}

/// The least and the greatest of whole numbers, where these are whole numbers and agree.
fn bounds(fields: &Map<String, Value>, reduced: &mut Map<String, Value>) {
    let bound = |name: &str| whole(fields.get(name)?).filter(|n| n.abs() <= MAX_WHOLE);
    let least = bound("minimum").max(bound("exclusiveMinimum").map(|n| n + 1));
    let most = [bound("maximum"), bound("exclusiveMaximum").map(|n| n - 1)].into_iter().flatten().min();
    if least.zip(most).is_some_and(|(least, most)| least > most) {
        return;
    }
    for (name, bound) in [("minimum", least), ("maximum", most)] {
        if let Some(bound) = bound {
            reduced.insert(name.to_owned(), bound.into());
        }
    }
}

/// A number that is whole, as JSON may write it with a fraction of 0.
fn whole(number: &Value) -> Option<i64> {
    let in_range = |n: &f64| n.fract() == 0.0 && n.abs() < 1e15;
    #[allow(clippy::cast_possible_truncation)]
    number.as_i64().or_else(|| number.as_f64().filter(in_range).map(|n| n as i64))
}

#[cfg(test)]
#[path = "call_schema_tests.rs"]
mod tests;

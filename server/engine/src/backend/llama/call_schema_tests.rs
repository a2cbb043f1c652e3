#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;
use crate::template::limits::RENDER_STACK_BYTES;

#[test]
fn what_the_converter_takes_and_means_stays_and_all_else_is_anything() {
    for (schema, wanted) in [
        (
            json!({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}),
            json!({"type": "object", "required": ["a"], "properties": {"a": {"type": "string"}}}),
        ),
        (json!(true), json!({"type": "object"})),
        (json!({}), json!({"type": "object"})),
        (json!({"type": "string"}), json!({"type": "object"})),
        (json!({"$ref": "#"}), json!({"type": "object"})),
        (json!({"$ref": "https://example.com/a"}), json!({"type": "object"})),
        // As a library writes a model of its own.
        (
            json!({"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "properties": {"n": {"type": "integer"}}}}}),
            json!({"type": "object", "properties": {"n": {"type": "integer"}}}),
        ),
    ] {
        assert_eq!(bindable(&schema), wanted, "{schema}");
    }
    for (property, wanted) in [
        (json!({"type": "magic"}), json!({})),
        (json!({"type": "string", "maxLength": 65_536, "minLength": 1}), json!({"type": "string", "minLength": 1})),
        (json!({"type": "string", "minLength": 9, "maxLength": 8}), json!({"type": "string"})),
        (json!({"type": "string", "pattern": "^a$", "format": "email"}), json!({"type": "string"})),
        (json!({"type": "string", "format": "date"}), json!({"type": "string", "format": "date"})),
        (json!({"type": ["string", "null"]}), json!({"anyOf": [{"type": "string"}, {"type": "null"}]})),
        (json!({"type": ["string", "null"], "enum": ["a", null]}), json!({"enum": ["a", null]})),
        (json!({"enum": []}), json!({})),
        (json!({"const": 7}), json!({"const": 7})),
        (json!({"enum": ["x".repeat(MAX_VALUES_BYTES)], "type": "string"}), json!({"type": "string"})),
        (json!({"type": "integer", "minimum": 1.0, "maximum": 1e300}), json!({"type": "integer", "minimum": 1})),
        (
            json!({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 9, "maximum": 18_446_744_073_709_551_615_u64}),
            json!({"type": "integer", "minimum": 1, "maximum": 8}),
        ),
        (json!({"type": "integer", "minimum": 2, "maximum": 1}), json!({"type": "integer"})),
        (json!({"type": "number", "minimum": 0.5}), json!({"type": "number"})),
        (
            json!({"type": "array", "prefixItems": [{"type": "string"}], "items": false, "maxItems": 5_000}),
            json!({"type": "array"}),
        ),
        (
            json!({"items": {"type": "boolean"}, "minItems": 1}),
            json!({"type": "array", "minItems": 1, "items": {"type": "boolean"}}),
        ),
        (
            json!({"anyOf": [{"type": "null"}, {"$ref": "#"}]}),
            json!({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/schema0"}]}),
        ),
        (json!({"oneOf": [{"type": "null"}, {"not": {}}]}), json!({})),
        (json!({"type": "string", "anyOf": [{"maxLength": 1}]}), json!({"type": "string"})),
        (json!({"allOf": [{"type": "string"}]}), json!({"type": "string"})),
        (json!({"allOf": [{"type": "string"}, {"maxLength": 1}]}), json!({})),
        (
            json!({"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["b"]}]}),
            json!({"type": "object", "additionalProperties": true, "properties": {"a": {}}}),
        ),
        (
            json!({"type": "object", "properties": {"a": {}}, "required": ["b"]}),
            json!({"type": "object", "additionalProperties": true, "properties": {"a": {}}}),
        ),
        (
            json!({"properties": {"a": {}}, "additionalProperties": false}),
            json!({"type": "object", "additionalProperties": false, "properties": {"a": {}}}),
        ),
        (
            json!({"patternProperties": {"^a": {}}, "additionalProperties": false}),
            json!({"type": "object", "additionalProperties": true}),
        ),
    ] {
        let reduced = bindable(&json!({"type": "object", "properties": {"p": property}}));
        assert_eq!(reduced["properties"]["p"], wanted, "{property}");
    }
}

#[test]
fn schemas_may_name_themselves_but_no_text_begins_with_itself() {
    let tree = json!({"type": "object", "properties": {"next": {"$ref": "#"}}});
    let next = json!({"$ref": "#/$defs/schema0"});
    let wanted = json!({"type": "object", "properties": {"next": next}, "$defs": {"schema0": {"type": "object", "properties": {"next": next}}}});
    assert_eq!(bindable(&tree), wanted);
    let turns = json!({
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/a"}},
        "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}, "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}},
    });
    let reduced = bindable(&turns);
    assert!(!begins_with_itself(&reduced), "{reduced}");
}

#[test]
fn a_long_chain_of_references_fits_on_the_stack_of_who_renders() {
    let definition = |i: usize| {
        let next = json!({"type": "object", "properties": {"next": {"$ref": format!("#/$defs/d{}", i + 1)}}});
        (format!("d{i}"), next)
    };
    let definitions: Map<String, Value> = (0..10_000).map(definition).collect();
    let chain = json!({"type": "object", "properties": {"next": {"$ref": "#/$defs/d0"}}, "$defs": definitions});
    let thread = std::thread::Builder::new().stack_size(RENDER_STACK_BYTES);
    let reduced = thread.spawn(move || bindable(&chain)).unwrap().join().unwrap();
    assert!(reduced["$defs"].as_object().unwrap().len() <= MAX_DEPTH, "{reduced}");
    assert!(is_taken(&reduced, &reduced));
}

/// Whether a definition leads to itself by references and alternatives alone.
fn begins_with_itself(schema: &Value) -> bool {
    fn firsts(schema: &Value, to: &mut Vec<String>) {
        if let Some(reference) = reference_of(schema) {
            to.push(reference.to_owned());
        }
        schema["anyOf"].as_array().into_iter().flatten().for_each(|alternative| firsts(alternative, to));
    }
    let definitions = schema["$defs"].as_object().cloned().unwrap_or_default();
    definitions.keys().any(|name| {
        let own = format!("#/$defs/{name}");
        let (mut seen, mut waiting) = (Vec::new(), Vec::new());
        firsts(&definitions[name], &mut waiting);
        while let Some(next) = waiting.pop() {
            if !seen.contains(&next) {
                firsts(schema.pointer(&next[1..]).unwrap_or(&Value::Null), &mut waiting);
                seen.push(next);
            }
        }
        seen.contains(&own)
    })
}

/// Whether it is made of nothing but what the converter takes.
fn is_taken(schema: &Value, root: &Value) -> bool {
    let Value::Object(fields) = schema else { return false };
    let count = |value: &Value| value.as_u64().is_some_and(|n| n <= MAX_COUNT);
    fields.iter().all(|(name, value)| match name.as_str() {
        "$ref" => value.as_str().is_some_and(|at| root.pointer(&at[1..]).is_some()),
        "$defs" | "properties" => {
            value.as_object().is_some_and(|all| all.values().all(|schema| is_taken(schema, root)))
        }
        "anyOf" => value.as_array().is_some_and(|all| all.len() > 1 && all.iter().all(|schema| is_taken(schema, root))),
        "items" => is_taken(value, root),
        "additionalProperties" => value.is_boolean() || is_taken(value, root),
        "type" => {
            let kinds = ["object", "array", "string", "integer", "number", "boolean", "null"];
            value.as_str().is_some_and(|kind| kinds.contains(&kind))
        }
        "enum" => value.as_array().is_some_and(|values| !values.is_empty()),
        "const" | "required" | "format" => true,
        "minLength" | "maxLength" | "minItems" | "maxItems" => count(value),
        "minimum" | "maximum" => value.as_i64().is_some(),
        _ => false,
    })
}

fn schemas() -> impl Strategy<Value = Value> {
    let number = prop_oneof![
        (-3_i64..600).prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (-1e20..1e20).prop_map(Value::from),
        Just(json!("many")),
    ];
    let reference = prop::sample::select(vec!["#", "#/$defs/a", "#/$defs/b", "#/properties/a", "#/none", "other", ""]);
    let kind = prop::sample::select(vec!["object", "array", "string", "integer", "number", "boolean", "null", "any"]);
    let leaf = prop_oneof![
        any::<bool>().prop_map(Value::from),
        Just(json!({})),
        Just(Value::Null),
        reference.prop_map(|at| json!({"$ref": at})),
        kind.clone().prop_map(|kind| json!({"type": kind})),
        prop::collection::vec(kind, 0..3).prop_map(|kinds| json!({"type": kinds})),
        prop::collection::vec(any::<bool>(), 0..3).prop_map(|values| json!({"enum": values})),
        (prop::sample::select(vec!["minLength", "maxItems", "minimum", "exclusiveMaximum"]), number)
            .prop_map(|(name, number)| json!({"type": "integer", name: number})),
    ];
    leaf.prop_recursive(5, 60, 4, |inner| {
        let many = prop::collection::vec(inner.clone(), 0..4);
        let named = prop::collection::vec((prop::sample::select(vec!["a", "b", "$ref", "type"]), inner.clone()), 0..4)
            .prop_map(|named| {
                Value::Object(named.into_iter().map(|(name, schema)| (name.to_owned(), schema)).collect())
            });
        let field = prop_oneof![
            (prop::sample::select(vec!["anyOf", "oneOf", "allOf", "prefixItems"]), many.prop_map(Value::from)),
            (prop::sample::select(vec!["properties", "patternProperties", "$defs"]), named),
            (prop::sample::select(vec!["items", "additionalProperties", "not", "if", "type", "required"]), inner),
        ];
        prop::collection::vec(field, 1..4).prop_map(|fields| {
            Value::Object(fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
        })
    })
}

proptest! {
    #[test]
    fn whatever_a_tool_says_calls_are_bound_by_what_the_converter_takes(schema in schemas()) {
        let reduced = bindable(&schema);
        prop_assert_eq!(&reduced["type"], "object");
        prop_assert!(is_taken(&reduced, &reduced), "{} of {}", reduced, schema);
        prop_assert!(!begins_with_itself(&reduced), "{} of {}", reduced, schema);
        // What is left of what is left is that.
        let again = bindable(&reduced);
        prop_assert!(is_taken(&again, &again));
    }
}

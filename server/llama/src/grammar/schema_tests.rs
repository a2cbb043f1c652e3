//! Schemas whose answers are validated, and hostile ones.
#![allow(clippy::unwrap_used)]

use serde_json::{Value, json};

use super::tests::{Draws, allowed, model, quickly, texts};
use super::*;

/// A text that follows the grammar: random tokens, short ones preferred once it is long.
fn write(grammar: &mut Grammar, seed: u64) -> Option<String> {
    let mut draws = Draws(seed);
    let mut bytes = Vec::new();
    for step in 0..600 {
        let allowed = allowed(grammar);
        let tokens: Vec<Token> = (0..).zip(&allowed).filter(|(_, a)| **a).map(|(t, _)| t).collect();
        assert!(!tokens.is_empty(), "a dead end after {:?}", String::from_utf8_lossy(&bytes));
        if grammar.is_complete() && (step > 20 || draws.below(3) == 0) || tokens.iter().all(|&t| texts().is_end(t)) {
            return Some(String::from_utf8(bytes).unwrap());
        }
        let closing =
            |t: &&Token| matches!(texts().text(**t), [b'"' | b'}' | b']' | b',' | b':' | b'0'..=b'9' | b'{' | b'[']);
        let short: Vec<Token> = tokens.iter().filter(closing).copied().collect();
        let from = if step > 30 && !short.is_empty() { &short } else { &tokens };
        // Brackets that open go last in the alphabet of what closes.
        let from: Vec<Token> =
            match from.iter().copied().filter(|&t| !matches!(texts().text(t), b"{" | b"[")).collect::<Vec<_>>() {
                v if step > 30 && !v.is_empty() => v,
                _ => from.clone(),
            };
        let token = from[draws.below(from.len())];
        if texts().is_end(token) {
            continue;
        }
        grammar.accept(token).unwrap();
        bytes.extend_from_slice(texts().text(token));
    }
    None
}

fn check(schema: &Value, value: &Value) -> bool {
    if let Some(options) = schema["anyOf"].as_array() {
        return options.iter().any(|option| check(option, value));
    }
    if let Some(options) = schema["enum"].as_array() {
        return options.contains(value);
    }
    let count = |key: &str, default| schema[key].as_u64().unwrap_or(default) as usize;
    match schema["type"].as_str() {
        Some("object") => {
            let required = schema["required"].as_array().cloned().unwrap_or_default();
            value.as_object().is_some_and(|object| {
                required.iter().all(|name| object.contains_key(name.as_str().unwrap()))
                    && object.iter().all(|(key, value)| match &schema["properties"][key] {
                        Value::Null => schema["properties"].is_null() || schema["additionalProperties"].is_object(),
                        schema => check(schema, value),
                    })
            })
        }
        Some("array") => value.as_array().is_some_and(|items| {
            (count("minItems", 0)..=count("maxItems", 1000)).contains(&items.len())
                && items.iter().all(|item| check(&schema["items"], item))
        }),
        Some("string") => value
            .as_str()
            .is_some_and(|s| (count("minLength", 0)..=count("maxLength", 1_000_000)).contains(&s.chars().count())),
        // As numbers, because -0 is one.
        Some("integer") => value.as_f64().is_some_and(|n| {
            let within =
                schema["minimum"].as_f64().unwrap_or(f64::MIN)..=schema["maximum"].as_f64().unwrap_or(f64::MAX);
            n.fract() == 0.0 && within.contains(&n)
        }),
        Some("number") => value.is_number(),
        Some("boolean") => value.is_boolean(),
        Some("null") => value.is_null(),
        _ => true,
    }
}

#[test]
fn what_follows_a_schema_parses_and_is_valid() {
    let schemas = [
        json!({}),
        json!({"type": "object"}),
        json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer",
            "minimum": 0, "maximum": 120}, "tags": {"type": "array", "items": {"enum": ["a", "b", 3, null]}, "minItems": 1,
            "maxItems": 3}}, "required": ["name", "tags"], "additionalProperties": false}),
        json!({"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"type": "number"}]}, "maxItems": 4}),
        json!({"type": "object", "properties": {"x": {"type": "integer", "minimum": -13, "maximum": 7}, "-y": {"type": "boolean"}},
            "additionalProperties": {"type": "null"}}),
        json!({"type": "string", "minLength": 2, "maxLength": 5}),
        json!({"type": "integer", "minimum": 98, "maximum": 10234}),
        json!({"type": "integer", "minimum": -70}),
        json!({"type": "integer", "maximum": 42}),
    ];
    for schema in &schemas {
        let mut written = 0;
        for seed in 0..40 {
            let mut grammar = Grammar::json_schema(texts(), &schema.to_string()).unwrap();
            if let Some(text) = write(&mut grammar, seed) {
                let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}\n{schema}"));
                assert!(check(schema, &value), "{text}\n{schema}");
                written += 1;
            }
        }
        assert!(written >= 20, "only {written} answers ended\n{schema}");
    }
}

#[test]
fn what_follows_a_pattern_is_a_json_string_that_matches() {
    let digits = |s: &str| s.chars().all(|c| c.is_ascii_digit());
    type Check<'a> = &'a dyn Fn(&str) -> bool;
    let cases: &[(&str, Check)] = &[
        ("^\\d{4}-\\d{2}$", &|s| s.len() == 7 && digits(&s[..4]) && &s[4..5] == "-" && digits(&s[5..])),
        ("^.{0,9}$", &|s| s.chars().count() <= 9),
        ("^[^a]{1,9}$", &|s| !s.contains('a') && !s.is_empty()),
        ("^(\"|\\\\)[ -~]{0,5}$", &|s| s.starts_with(['"', '\\'])),
        ("^a\\.+b$", &|s| s.starts_with("a.") && s.ends_with(".b")),
        ("^\\$\\n$", &|s| s == "$\n"),
        ("^(ab|c)+?$", &|s| s.replace("ab", "").replace('c', "").is_empty() && !s.is_empty()),
        ("b", &|s| s.contains('b')),
    ];
    for (pattern, matches) in cases {
        let schema =
            json!({"type": "object", "properties": {"v": {"type": "string", "pattern": pattern}}, "required": ["v"]});
        let mut written = 0;
        for seed in 0..40 {
            let mut grammar = Grammar::json_schema(texts(), &schema.to_string()).unwrap();
            if let Some(text) = write(&mut grammar, seed) {
                let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}\n{pattern}"));
                assert!(matches(value["v"].as_str().unwrap()), "{text}\n{pattern}");
                written += 1;
            }
        }
        assert!(written >= 10, "only {written} answers ended\n{pattern}");
    }
}

/// Definitions each of which refers to the next one. A part of `allOf` has them all from the last to the first, so that
/// each is near to one that was seen, where no answer has them; the first is asked for after that.
fn hidden_chain(n: usize) -> Value {
    let reference = |i: usize| json!({"$ref": format!("#/$defs/d{i}")});
    let definitions: serde_json::Map<String, Value> = (0..n)
        .map(|i| {
            let items = if i + 1 < n { reference(i + 1) } else { json!({}) };
            (format!("d{i}"), json!({"type": "array", "items": items}))
        })
        .collect();
    let backwards: Vec<Value> = (0..n).rev().map(reference).collect();
    let part = json!({"properties": {}, "additionalProperties": {"anyOf": backwards}});
    json!({"type": "object", "properties": {"a": {"allOf": [part]}, "b": reference(0)}, "$defs": definitions})
}

#[test]
fn without_a_type_the_keywords_decide() {
    let gbnf = |schema: Value| schema::to_gbnf(&schema.to_string()).unwrap();
    let item = json!({"type": "string", "pattern": "^.*$"});
    for (untyped, typed) in [
        (json!({"additionalProperties": true}), json!({})),
        (json!({"additionalProperties": true, "pattern": "^.*$"}), item.clone()),
        (json!({"additionalProperties": true, "maxLength": 3}), json!({"type": "string", "maxLength": 3})),
        (json!({"additionalProperties": true, "items": item}), json!({"type": "array", "items": item})),
        (json!({"prefixItems": [item], "pattern": "("}), json!({"type": "array", "items": [item]})),
        (json!({"additionalProperties": false}), json!({"type": "object", "additionalProperties": false})),
        (
            json!({"additionalProperties": true, "properties": {"a": item}, "items": 3}),
            json!({"type": "object", "additionalProperties": true, "properties": {"a": item}}),
        ),
        (
            json!({"allOf": [{"properties": {"a": {}}}]}),
            json!({"type": "object", "properties": {"a": {}}, "required": ["a"]}),
        ),
        (json!({"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]}), json!({"enum": [2, 3]})),
        (json!({"type": "object", "const": {"type": "integer"}}), json!({"const": {"type": "integer"}})),
    ] {
        assert_eq!(gbnf(untyped.clone()), gbnf(typed), "{untyped}");
    }
}

#[test]
fn a_type_beside_values_alternatives_or_a_reference_holds_for_them() {
    let definitions = json!({"text": {"type": "string"}, "any": {}, "either": {"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]}});
    let gbnf = |mut schema: Value| {
        schema["$defs"] = definitions.clone();
        schema::to_gbnf(&schema.to_string())
    };
    for (narrowed, same) in [
        (json!({"type": "string", "enum": ["a", 1, null, "b"]}), json!({"enum": ["a", "b"]})),
        (json!({"type": ["integer", "null"], "enum": ["a", 1, 2.5, null]}), json!({"enum": [1, null]})),
        (json!({"type": "number", "enum": [1, 2.5, "2"]}), json!({"enum": [1, 2.5]})),
        (json!({"type": "number", "const": 1}), json!({"const": 1})),
        (json!({"type": "string", "$ref": "#/$defs/text"}), json!({"$ref": "#/$defs/text"})),
        (json!({"type": ["null", "string"], "$ref": "#/$defs/either"}), json!({"$ref": "#/$defs/either"})),
        (
            json!({"type": "object", "anyOf": [{"properties": {"a": {}}}, {"type": "object"}]}),
            json!({"anyOf": [{"properties": {"a": {}}}, {"type": "object"}]}),
        ),
    ] {
        assert_eq!(gbnf(narrowed.clone()).unwrap(), gbnf(same).unwrap(), "{narrowed}");
    }
    for wider in [
        json!({"type": "string", "enum": [1, null]}),
        json!({"type": "integer", "const": 2.5}),
        json!({"type": "object", "const": "a"}),
        json!({"type": "string", "$ref": "#/$defs/any"}),
        json!({"type": "string", "$ref": "#/$defs/either"}),
        json!({"type": "integer", "anyOf": [{"type": "number"}]}),
        json!({"type": "object", "oneOf": [{"properties": {"a": {}}}, {"items": {}}]}),
    ] {
        let error = gbnf(wider.clone()).unwrap_err();
        assert!(
            matches!(&error, GrammarError::Schema { message, .. } if message.contains("'type' beside it")),
            "{error}"
        );
    }
    // Alternatives of themselves are looked into so deep and no deeper, and as often.
    let twice = |next: &str| json!({"anyOf": [{"$ref": next}, {"$ref": next}]});
    for (what, schema) in [
        ("itself", json!({"type": "string", "$ref": "#/$defs/a", "$defs": {"a": twice("#/$defs/a")}})),
        (
            "each other",
            json!({"type": "null", "oneOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": twice("#/$defs/b"), "b": twice("#/$defs/a")}}),
        ),
    ] {
        let error = quickly(what, || schema::to_gbnf(&schema.to_string())).unwrap_err();
        assert!(matches!(error, GrammarError::TooLarge { .. }), "{what}: {error}");
    }
}

/// Whether a text follows the grammar to an end, character by character.
fn follows(grammar: &Grammar, text: &str) -> bool {
    let mut grammar = grammar.clone();
    let mut bytes = [0; 4];
    text.chars().all(|c| {
        let tokens = texts().tokenize(c.encode_utf8(&mut bytes));
        tokens.into_iter().all(|token| grammar.accept(token).is_ok())
    }) && grammar.is_complete()
}

#[test]
fn an_integer_with_one_bound_is_within_it() {
    let largest = MAX_SCHEMA_INTEGER as i64;
    let mut numbers: Vec<i64> = (-120..=120).chain([largest, -largest]).collect();
    for around in [100, 190, 200, 900, 1000, 1005, 1100, 1900, 2000, 2005, 9999, 10_000, 123_456, 1 << 40] {
        numbers.extend((around - 11..=around + 11).chain(-around - 11..=-around + 11));
    }
    for bound in [-2000, -1000, -70, -25, -5, -1, 0, 1, 9, 10, 42, 100, 1000, 1005, 2000] {
        for (keyword, within) in [
            ("minimum", &(|n| n >= bound) as &dyn Fn(i64) -> bool),
            ("exclusiveMinimum", &|n| n > bound),
            ("maximum", &|n| n <= bound),
            ("exclusiveMaximum", &|n| n < bound),
        ] {
            let schema = json!({"type": "integer", keyword: bound}).to_string();
            let grammar = Grammar::json_schema(texts(), &schema).unwrap();
            for &n in &numbers {
                assert_eq!(follows(&grammar, &n.to_string()), within(n), "{n} of {schema}");
                let padded = if n < 0 { format!("-0{}", -n) } else { format!("0{n}") };
                assert!(!follows(&grammar, &padded), "{padded} of {schema}");
            }
        }
    }
}

#[test]
fn keys_beside_those_listed_are_json_and_are_others() {
    let key = |grammar: &Grammar, key: &str, value: &str| follows(grammar, &format!("{{\"{key}\":{value}}}"));
    let other_keys = |names: &[&str]| {
        let properties: serde_json::Map<String, Value> =
            names.iter().map(|&name| (name.to_owned(), json!({"type": "integer"}))).collect();
        let schema = json!({"type": "object", "properties": properties, "additionalProperties": {"type": "null"}});
        Grammar::json_schema(texts(), &schema.to_string()).unwrap()
    };
    let grammar = other_keys(&["name"]);
    for good in ["", "a", "nb", "named", "nam3\\n", "é", "-", "x y", "a\\u006eame"] {
        assert!(key(&grammar, good, "null"), "{good}");
    }
    assert!(key(&grammar, "name", "1") && !key(&grammar, "name", "null"));
    for bad in
        ["\\", "n\\", "na\\", "\\\"", "\n", "n\n", "nam\u{1}", "n\u{7f}", "\\u006eame", "n\\u0061me", "nam\\u0065"]
    {
        assert!(!key(&grammar, bad, "null"), "{bad:?}");
        assert!(!follows(&grammar, &format!("{{\"{bad}:null}}")), "{bad:?}, not closed");
    }
    // Characters that mean something in a class.
    let grammar = other_keys(&["-y", "a-z", "[x"]);
    for good in ["x", "b", "5", "-x", "a-y", "[y"] {
        assert!(key(&grammar, good, "null"), "{good}");
    }
    for listed in ["-y", "a-z", "[x"] {
        assert!(key(&grammar, listed, "1") && !key(&grammar, listed, "null"), "{listed}");
    }
    for literal in ["[^", "[^\"", "[^a]"] {
        let grammar = Grammar::json_schema(texts(), &json!({"const": literal}).to_string()).unwrap();
        assert!(follows(&grammar, &json!(literal).to_string()), "{literal}");
    }
    let empty = json!({"properties": {"": {}}, "additionalProperties": {"type": "null"}}).to_string();
    assert!(Grammar::json_schema(texts(), &empty).is_err());
}

#[test]
fn all_of_is_enforced_or_refused_with_its_place() {
    let object = |name: &str| json!({"type": "object", "properties": {name: {"type": "integer"}}});
    let with = |mut schema: Value, key: &str, value: Value| {
        schema[key] = value;
        schema
    };
    let definitions = json!({"either": {"anyOf": [object("a"), object("b")]}});
    let closed = with(object("a"), "additionalProperties", json!(false));
    for (schema, place, reason) in [
        (json!({"type": "integer", "allOf": [object("a")]}), "#", "'type'"),
        (json!({"type": "string", "allOf": [object("a")]}), "#", "'type'"),
        (json!({"type": ["object", "null"], "allOf": [object("a")]}), "#", "'type'"),
        (json!({"type": "array", "allOf": [{"enum": ["a"]}]}), "#", "'type'"),
        (json!({"type": "string", "allOf": [{"enum": ["a", 1]}]}), "#", "'type'"),
        (json!({"allOf": [object("c"), {"anyOf": [object("a"), object("b")]}]}), "#/allOf/1", "'anyOf'"),
        (json!({"allOf": [object("c"), {"oneOf": [object("a")]}]}), "#/allOf/1", "'oneOf'"),
        (json!({"allOf": [{"$ref": "#/$defs/either"}, object("c")], "$defs": definitions}), "#/allOf/0", "'anyOf'"),
        (json!({"type": "array", "items": {"allOf": [{"allOf": [object("a")]}]}}), "#/items/allOf/0", "'allOf'"),
        (json!({"allOf": [with(object("a"), "type", json!("array"))]}), "#/allOf/0", "must be objects"),
        (
            json!({"allOf": [with(object("a"), "type", json!(["object"])), object("a")]}),
            "#/allOf/1",
            "'a' in two parts",
        ),
        (json!({"allOf": [object("b"), closed]}), "#/allOf/1", "'additionalProperties'"),
        (json!({"allOf": [object("a"), {"enum": [1]}]}), "#", "objects and enums"),
        (json!({"allOf": [{"enum": [1, 1]}, {"enum": [2]}]}), "#", "no value"),
    ] {
        match Grammar::json_schema(texts(), &schema.to_string()) {
            Err(GrammarError::Schema { path, message }) => {
                assert!(path == place && message.contains(reason), "{schema}: {path}: {message}");
            }
            other => panic!("{schema}: {:?}", other.err()),
        }
    }
    for (schema, good, bad) in [
        (json!({"type": "object", "allOf": [object("a"), object("b")]}), r#"{"a":1,"b":2}"#, r#"{"a":1}"#),
        (json!({"allOf": [closed]}), r#"{"a":1}"#, r#"{"a":1,"b":2}"#),
        (json!({"type": "string", "allOf": [{"enum": ["a", "b"]}]}), r#""a""#, r#""c""#),
    ] {
        let grammar = Grammar::json_schema(texts(), &schema.to_string()).unwrap();
        assert!(follows(&grammar, good) && !follows(&grammar, bad), "{schema}");
    }
}

#[test]
fn references_that_differ_in_punctuation_only_are_two() {
    let schema = json!({"type": "array", "items": [{"$ref": "#/$defs/a_b"}, {"$ref": "#/$defs/a-b"}],
        "$defs": {"a_b": {"const": 1}, "a-b": {"const": 2}}});
    let mut grammar = Grammar::json_schema(texts(), &schema.to_string()).unwrap();
    for token in model().tokenize("[1,2]", false, false).unwrap() {
        grammar.accept(token).unwrap();
    }
    assert!(grammar.is_complete());
}

#[test]
fn bad_schemas_are_errors_and_end_at_once() {
    let object = |properties: Value| json!({"type": "object", "properties": properties});
    let wide = |n: usize, inner: Value| -> Value {
        (0..n).map(|i| (format!("p{i}"), inner.clone())).collect::<serde_json::Map<_, _>>().into()
    };
    // Each definition writes out the next one twice.
    let doubling: serde_json::Map<String, Value> = (0..40)
        .map(|i| {
            let next = json!({"allOf": [{"$ref": format!("#/$defs/d{}", i + 1)}]});
            (format!("d{i}"), if i == 39 { object(json!({})) } else { object(json!({"a": next, "b": next})) })
        })
        .collect();
    let cases = [
        ("not JSON", json!(null).to_string() + "{"),
        ("not an object", json!([]).to_string()),
        ("twice", String::from(r#"{"type":"string","type":"object"}"#)),
        ("deep", "[".repeat(100_000)),
        ("deep properties", (0..60).fold(json!({}), |inner, _| object(json!({"a": inner}))).to_string()),
        ("a loop of references", json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}).to_string()),
        ("a loop through allOf", json!({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}).to_string()),
        ("allOf of itself", json!({"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": object(json!({"p": {"allOf": [{"$ref": "#/$defs/x"}]}}))}}).to_string()),
        ("doubling", json!({"allOf": [{"$ref": "#/$defs/d0"}], "$defs": doubling}).to_string()),
        ("no such reference", json!({"$ref": "#/$defs/a"}).to_string()),
        ("another document", json!({"$ref": "http://example.org/x"}).to_string()),
        ("too many properties", object(wide(2000, json!({}))).to_string()),
        ("too many objects", object(wide(120, object(wide(120, json!({}))))).to_string()),
        ("a long name", object(json!({"é".repeat(40_000): {}})).to_string()),
        ("a long repetition", json!({"type": "string", "maxLength": 1_000_000}).to_string()),
        ("backwards", json!({"type": "array", "items": {}, "minItems": 5, "maxItems": 2}).to_string()),
        ("nested repetition", (0..20).fold(json!({"type": "null"}), |inner, _| json!({"type": "array", "items": inner, "maxItems": 2000})).to_string()),
        ("a huge bound", json!({"type": "integer", "minimum": i64::MAX}).to_string()),
        ("no integer", json!({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}).to_string()),
        ("no integer that large", json!({"type": "integer", "exclusiveMinimum": MAX_SCHEMA_INTEGER}).to_string()),
        ("an unknown type", json!({"type": "text"}).to_string()),
        ("not enforced", json!({"type": "array", "uniqueItems": true}).to_string()),
        ("a bound of a number", json!({"type": "number", "minimum": 0}).to_string()),
        ("a bound without type", json!({"minimum": 0}).to_string()),
        ("required, not listed", json!({"type": "object", "required": ["a"]}).to_string()),
        ("doubling beside additionalProperties", json!({"additionalProperties": true, "items": {"allOf": [{"$ref": "#/$defs/d0"}]}, "$defs": doubling}).to_string()),
        ("a long name beside additionalProperties", json!({"additionalProperties": true, "items": object(json!({"é".repeat(30_000): {}}))}).to_string()),
        ("a long name in allOf", json!({"allOf": [object(json!({"é".repeat(500): {}}))]}).to_string()),
        ("a pattern beside additionalProperties", json!({"additionalProperties": true, "pattern": "^(?=a)b$"}).to_string()),
        ("items without type", json!({"additionalProperties": true, "minItems": 1}).to_string()),
        ("a chain of references behind another", hidden_chain(1500).to_string()),
        ("a type twice", json!({"type": vec!["object"; 10_000]}).to_string()),
        ("look-ahead", json!({"type": "string", "pattern": "^(?=a)b$"}).to_string()),
        ("bytes", json!({"enum": ["a".repeat(200_000)]}).to_string()),
    ];
    for (what, schema) in cases {
        let error = quickly(what, || Grammar::json_schema(texts(), &schema)).unwrap_err();
        assert!(!matches!(error, GrammarError::Internal(_)), "{what}: {error}");
    }
    // Recursion as such is fine.
    let tree = json!({"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "properties": {
        "value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}, "required": ["value"]}}});
    quickly("a tree", || Grammar::json_schema(texts(), &tree.to_string())).unwrap();
    quickly("optional properties", || Grammar::json_schema(texts(), &object(wide(128, json!({}))).to_string()))
        .unwrap();
}

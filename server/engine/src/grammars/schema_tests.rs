//! Schemas whose answers are validated, and hostile ones.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use gantry_llama::{Model, ModelParams};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

#[path = "schema_hostile_tests.rs"]
mod hostile;

fn texts() -> &'static Arc<TokenTexts> {
    static TEXTS: OnceLock<Arc<TokenTexts>> = OnceLock::new();
    TEXTS.get_or_init(|| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../e2e/models/demo-draft.q8_0.gguf");
        Arc::new(TokenTexts::of(&Model::load(&path, &ModelParams::default(), &mut |_| true).unwrap(), &[]))
    })
}

/// Each test has its own: there is a limit to what is compiled at once.
fn compiler() -> &'static SchemaCompiler {
    thread_local! {
        static COMPILER: &'static SchemaCompiler = Box::leak(Box::new(SchemaCompiler::new(texts()).unwrap()));
    }
    COMPILER.with(|compiler| *compiler)
}

fn compile(schema: &Value) -> Result<Schema, SchemaError> {
    compiler().compile(&schema.to_string(), false)
}

fn strictly(schema: &Value) -> Result<Schema, SchemaError> {
    compiler().compile(&schema.to_string(), true)
}

/// A generator of numbers that needs no state but this.
struct Draws(u64);

impl Draws {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n.max(1)
    }
}

fn allowed(schema: &mut Schema) -> Result<Vec<Token>, SchemaError> {
    let mut out = Vec::new();
    schema.apply(&vec![0.0; texts().len()], &mut out)?;
    Ok((0..).zip(out).filter(|&(_, logit)| logit == 0.0).map(|(token, _)| token).collect())
}

/// A text that follows the schema: random tokens, those preferred that close once it is long.
fn write(schema: &mut Schema, seed: u64) -> Result<Option<String>, SchemaError> {
    let mut draws = Draws(seed);
    let mut bytes = Vec::new();
    for step in 0..400 {
        let all = allowed(schema)?;
        for &token in all.iter().take(3) {
            assert!(schema.allows(token)?, "{token} after {:?}", String::from_utf8_lossy(&bytes));
        }
        let tokens: Vec<Token> = all.iter().copied().filter(|&token| !texts().is_end(token)).collect();
        let is_complete = schema.is_complete()?;
        assert_eq!(tokens.len() < all.len(), is_complete);
        if tokens.is_empty() || is_complete && (step > 20 || draws.below(3) == 0) {
            assert!(is_complete, "a dead end after {:?}", String::from_utf8_lossy(&bytes));
            return Ok(Some(String::from_utf8(bytes).unwrap()));
        }
        let closing: Vec<Token> = tokens
            .iter()
            .copied()
            .filter(|&t| matches!(texts().text(t), [b'"' | b'}' | b']' | b',' | b':' | b'0'..=b'9']))
            .collect();
        let from = if step > 30 && !closing.is_empty() { &closing } else { &tokens };
        let token = from[draws.below(from.len())];
        schema.accept(token)?;
        bytes.extend_from_slice(texts().text(token));
    }
    Ok(None)
}

/// Whether a text follows the schema to an end, and can be that end.
fn follows(schema: &Schema, text: &str) -> bool {
    let mut schema = schema.clone();
    let mut bytes = [0; 4];
    text.chars().all(|c| {
        let tokens = texts().tokenize(c.encode_utf8(&mut bytes));
        tokens.into_iter().all(|token| schema.accept(token).is_ok())
    }) && schema.is_complete() == Ok(true)
}

/// JSON allows numbers that no parser can hold.
fn parse(text: &str) -> Option<Value> {
    match serde_json::from_str(text) {
        Ok(value) => Some(value),
        Err(error) if error.to_string().starts_with("number out of range") => None,
        Err(error) => panic!("{error}: {text}"),
    }
}

fn check(schema: &Value, value: &Value) -> bool {
    if let Some(options) = schema["anyOf"].as_array() {
        return options.iter().any(|option| check(option, value));
    }
    if let Some(options) = schema["enum"].as_array() {
        return options.contains(value);
    }
    let count = |key: &str, default| schema[key].as_u64().unwrap_or(default) as usize;
    let within = |n: f64| {
        n >= schema["minimum"].as_f64().unwrap_or(f64::MIN) && n <= schema["maximum"].as_f64().unwrap_or(f64::MAX)
    };
    match schema["type"].as_str() {
        Some("object") => {
            let required = schema["required"].as_array().cloned().unwrap_or_default();
            value.as_object().is_some_and(|object| {
                required.iter().all(|name| object.contains_key(name.as_str().unwrap()))
                    && object.iter().all(|(key, value)| match schema["properties"].get(key) {
                        None if schema["additionalProperties"].is_object() => {
                            check(&schema["additionalProperties"], value)
                        }
                        None => schema["additionalProperties"] != false,
                        Some(schema) => check(schema, value),
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
        Some("integer") => value.as_f64().is_some_and(|n| n.fract() == 0.0 && within(n)),
        Some("number") => value.as_f64().is_some_and(within),
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
        json!({"type": "number", "minimum": -7.5, "maximum": 42}),
    ];
    for schema in &schemas {
        let mut written = 0;
        for seed in 0..30 {
            let mut matcher = strictly(schema).unwrap();
            if let Some(text) = write(&mut matcher, seed).unwrap() {
                written += 1;
                let Some(value) = parse(&text) else { continue };
                assert!(check(schema, &value), "{text}\n{schema}");
            }
        }
        assert!(written >= 15, "only {written} answers ended\n{schema}");
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
        for seed in 0..30 {
            if let Some(text) = write(&mut strictly(&schema).unwrap(), seed).unwrap() {
                let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}\n{pattern}"));
                assert!(matches(value["v"].as_str().unwrap()), "{text}\n{pattern}");
                written += 1;
            }
        }
        assert!(written >= 8, "only {written} answers ended\n{pattern}");
    }
}

/// What was refused before, or done wrong: `$ref` to the whole, bounds of numbers, alternatives beside properties, long
/// strings, and constants that look like a grammar.
#[test]
fn what_clients_send_is_enforced() {
    let element = json!({"type": "object", "properties": {"type": {"enum": ["div", "button"]}, "label": {"type": "string"},
        "children": {"type": "array", "items": {"$ref": "#"}}}, "required": ["type", "label", "children"], "additionalProperties": false});
    let list = json!({"type": "object", "properties": {"linked_list": {"$ref": "#/$defs/node"}}, "$defs": {"node": {"type": "object",
        "properties": {"value": {"type": "number"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "additionalProperties": false, "required": ["next", "value"]}}, "additionalProperties": false, "required": ["linked_list"]});
    let beside = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
        "anyOf": [{"properties": {"b": {"type": "null"}}, "required": ["b"]}, {"properties": {"c": {"type": "boolean"}}, "required": ["c"]}]});
    let looks = r#"[^"a] "u" [0-9a-fA-F]{4} ([eE] [-+]? integral-part)? \x00-\x1F\\\x7F\x00-\x1F"#;
    let cases: &[(Value, &[&str], &[&str])] = &[
        (
            element,
            &[r#"{"type": "div", "label": "a", "children": [{"type": "button", "label": "é\n", "children": []}]}"#],
            &[r#"{"type": "div", "label": "a", "children": [{}]}"#, r#"{"type": "span""#],
        ),
        (
            list,
            &[r#"{"linked_list":{"value":1.5e3,"next":{"value":-2,"next":null}}}"#],
            &[r#"{"linked_list":null}"#, r#"{"linked_list":{"value":1}}"#],
        ),
        (beside, &[r#"{"a": 1, "b": null}"#, r#"{"a": 1, "c": true}"#], &[r#"{"a": 1}"#, r#"{"a": 1, "c": null}"#]),
        (
            json!({"type": "number", "minimum": 0.5, "exclusiveMaximum": 3}),
            &["0.5", "2.999", "1"],
            &["0.4", "3", "-1", "3.0"],
        ),
        (json!({"type": "string", "maxLength": 4}), &[r#""abcd""#, r#""\u00e9\n\"x""#], &[r#""abcde""#]),
        (json!({"const": looks}), &[&*json!(looks).to_string().leak()], &[r#""[^""#]),
        (
            json!({"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": false, "minItems": 2}),
            &["[1, 2]"],
            &["[1]", "[1,2,3]", "[2"],
        ),
        (
            json!({"patternProperties": {"^x-": {"type": "integer"}}, "additionalProperties": false, "type": "object"}),
            &[r#"{"x-a": 1, "x-b": 2}"#, "{}"],
            &[r#"{"y": 1}"#, r#"{"x-a": "1"}"#],
        ),
        (json!({"type": "string", "format": "date"}), &[r#""2026-02-28""#], &[r#""2026-13-01""#, r#""today""#]),
        (json!({"type": "integer", "multipleOf": 7}), &["0", "7", "-21"], &["8"]),
        (json!({"type": ["string", "null"], "enum": ["a", null]}), &["null", r#""a""#], &[r#""b""#, "1"]),
        (
            json!({"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"properties": {"a": {"minimum": 5}}}]}),
            &[r#"{"a": 5}"#],
            &[r#"{"a": 4}"#, "{}"],
        ),
    ];
    for (schema, good, bad) in cases {
        let matcher = strictly(schema).unwrap_or_else(|error| panic!("{error}\n{schema}"));
        for text in *good {
            assert!(follows(&matcher, text), "{text} is refused\n{schema}");
        }
        for text in *bad {
            assert!(!follows(&matcher, text), "{text} is allowed\n{schema}");
        }
    }
    let matcher = strictly(&json!({"type": "string", "maxLength": 65_536})).unwrap();
    assert!(follows(&matcher, &format!("\"{}\"", "x".repeat(1000))));
}

#[test]
fn numbers_are_followed_as_they_stand_there_or_refused() {
    for number in
        ["9007199254740991", "-9007199254740991", "123456789.12345679", "-122.41941550000001", "100.00000000000001"]
    {
        let value: Value = serde_json::from_str(number).unwrap();
        for schema in [json!({"const": value}), json!({"enum": [value]})] {
            let mut schema = strictly(&schema).unwrap();
            let written = write(&mut schema, 1).unwrap().unwrap();
            assert_eq!(written.trim(), number);
        }
    }
    for number in ["9007199254740993", "1234567890123456789", "-9223372036854775808", "18446744073709551615"] {
        let value: Value = serde_json::from_str(number).unwrap();
        let listed = json!({"properties": {"a/b": {"enum": [1, {"c": [value]}]}}});
        for (schema, path) in [(json!({"const": value}), "#/const"), (listed, "#/properties/a~1b/enum")] {
            let error = compile(&schema).map(drop).unwrap_err().to_string();
            assert!(error.contains(&format!("at {path}: ")) && error.contains("ask for a string"), "{error}");
        }
    }
    // A bound between two numbers is brought to the one within it.
    for (schema, right, wrong) in [
        (json!({"minimum": 9_007_199_254_740_993_i64, "maximum": i64::MAX}), "9007199254740994", "9007199254740992"),
        (json!({"minimum": i64::MIN, "maximum": 9_007_199_254_740_993_i64}), "9007199254740992", "9007199254740994"),
        (json!({"minimum": 0, "maximum": u64::MAX}), "7", "-1"),
        (
            json!({"exclusiveMinimum": -9_007_199_254_740_993_i64, "maximum": 0}),
            "-9007199254740991",
            "-9007199254740993",
        ),
    ] {
        let mut schema = schema;
        schema["type"] = json!("integer");
        let compiled = strictly(&schema).unwrap_or_else(|error| panic!("{schema}: {error}"));
        assert!(follows(&compiled, right), "{schema}: {right}");
        assert!(!follows(&compiled, wrong), "{schema}: {wrong}");
    }
    // Names of properties, and instances, are no bounds.
    let named = json!({"properties": {"minimum": {"type": "string"}}, "required": ["minimum"], "default": {"maximum": 1_u64 << 60}});
    assert!(follows(&strictly(&named).unwrap(), r#"{"minimum": "a"}"#));
}

#[test]
fn an_integer_with_one_bound_is_within_it() {
    let mut numbers: Vec<i64> = (-30..=30).collect();
    for around in [100, 190, 1000, 1005, 9999, 123_456, 1 << 40] {
        numbers.extend((around - 3..=around + 3).chain(-around - 3..=-around + 3));
    }
    for bound in [-1000, -70, -5, -1, 0, 1, 9, 10, 42, 100, 1005] {
        for (keyword, within) in [
            ("minimum", &(|n| n >= bound) as &dyn Fn(i64) -> bool),
            ("exclusiveMinimum", &|n| n > bound),
            ("maximum", &|n| n <= bound),
            ("exclusiveMaximum", &|n| n < bound),
        ] {
            let schema = json!({"type": "integer", keyword: bound});
            let matcher = strictly(&schema).unwrap();
            for &n in &numbers {
                assert_eq!(follows(&matcher, &n.to_string()), within(n), "{n} of {schema}");
            }
        }
    }
}

#[test]
fn white_space_is_what_models_write_and_ends() {
    let matcher = strictly(&json!({"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]})).unwrap();
    for good in [
        "{\"a\":[1,2]}",
        "{\"a\": [1, 2]}",
        "{ \"a\": [ 1, 2 ] }",
        "{\n  \"a\": [\n    1,\n    2\n  ]\n}",
        "{\n\t\"a\": []\n}",
    ] {
        assert!(follows(&matcher, good), "{good:?}");
    }
    // Whatever is preferred, white space is over after so much.
    let mut matcher = matcher;
    let mut tokens = 0;
    matcher.accept(texts().tokenize("{")[0]).unwrap();
    loop {
        let space = allowed(&mut matcher)
            .unwrap()
            .into_iter()
            .find(|&t| !texts().is_end(t) && texts().text(t).iter().all(u8::is_ascii_whitespace));
        let Some(space) = space else { break };
        matcher.accept(space).unwrap();
        tokens += texts().text(space).len();
        assert!(tokens <= 22, "white space goes on");
    }
    assert!(tokens > 0);
}

#[test]
fn what_cannot_be_enforced_is_left_to_the_model_or_refused_with_its_place() {
    let within = |inner: Value| json!({"type": "object", "properties": {"a/b": {"type": "array", "items": inner}}, "required": ["a/b"]});
    for (inner, word) in [
        (json!({"not": {"type": "string"}}), "'not'"),
        (json!({"type": "array", "uniqueItems": true}), "'uniqueItems'"),
        (json!({"if": {"type": "string"}, "then": {"minLength": 3}}), "'if'"),
        (json!({"type": "string", "format": "postal-code"}), "'postal-code'"),
        (json!({"oneOf": [{"type": "string"}, {"minLength": 3}]}), "'oneOf'"),
    ] {
        let schema = within(inner);
        assert!(follows(&compile(&schema).unwrap(), "{\"a/b\": []}"), "{schema}");
        match strictly(&schema).unwrap_err() {
            SchemaError::Unsupported { path, message } => {
                assert_eq!(path, "#/properties/a~1b/items", "{schema}");
                assert!(message.contains(word) && message.contains("strict"), "{message}");
            }
            error => panic!("{error}\n{schema}"),
        }
    }
    // The name of a property, or a part of an instance, is no keyword.
    let named = json!({"type": "object", "properties": {"not": {"const": {"not": 1, "uniqueItems": true}}}, "required": ["not"]});
    assert!(follows(&strictly(&named).unwrap(), r#"{"not": {"not": 1, "uniqueItems": true}}"#));
    for (schema, path, word) in [
        (within(json!({"type": "text"})), "#/properties/a~1b/items", "no type 'text'"),
        (within(json!({"type": "string", "pattern": "^(?=a)b"})), "#/properties/a~1b/items", "look-around"),
        (within(json!({"$ref": "https://example.com/schema"})), "#/properties/a~1b/items", "same document"),
        (json!({"$ref": "#/$defs/none"}), "#", "none"),
        (within(json!({"type": "integer", "multipleOf": 999_983})), "#/properties/a~1b/items", "'multipleOf'"),
        (json!({"type": "string", "minLength": 3, "maxLength": 2}), "#", "minLength"),
    ] {
        for error in [compile(&schema).unwrap_err(), strictly(&schema).unwrap_err()] {
            let SchemaError::Unsupported { path: at, message } = &error else { panic!("{error}\n{schema}") };
            assert!(at == path && message.contains(word), "{error}\n{schema}");
        }
    }
}

/// A schema is a client's: what it says to the compiler itself is no part of it.
#[test]
fn options_of_the_compiler_cannot_be_set() {
    let schema = json!({"type": "array", "items": {"not": {}}, "x-guidance": {"lenient": true, "whitespace_pattern": "x*", "item_separator": ";"}});
    assert!(matches!(strictly(&schema), Err(SchemaError::Unsupported { .. })));
    let schema = json!({"type": "array", "items": {"type": "null"}, "x-guidance": {"item_separator": ";"}});
    let matcher = strictly(&schema).unwrap();
    assert!(follows(&matcher, "[null, null]") && !follows(&matcher, "[null;null]"));
}

/// Tokens with the same text are allowed together, tokens without one never.
#[test]
fn every_token_is_allowed_by_its_text() {
    let pieces = ["", "{", "}", "{}", "{", "\"", "a", ":", "1", "\u{ff}", "a\":", "{\"a\": 1}"];
    let mut pieces: Vec<Vec<u8>> = pieces.iter().map(|piece| piece.as_bytes().to_vec()).collect();
    pieces.push(vec![0xff]);
    pieces.push(vec![b'{'; limits::MAX_SCHEMA_TOKEN_BYTES + 1]);
    pieces.push(b"{".to_vec());
    let texts = Arc::new(TokenTexts::new(pieces.into_iter(), &[0, 14]));
    let compiler = SchemaCompiler::new(&texts).unwrap();
    let schema =
        r#"{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}"#;
    let mut matcher = compiler.compile(schema, true).unwrap();
    let mut out = Vec::new();
    matcher.apply(&[0.0; 15], &mut out).unwrap();
    let open: Vec<usize> = (0..15).filter(|&at| out[at] == 0.0).collect();
    assert_eq!(open, [1, 4, 11]);
    // The second of two with one text goes on as the first does, and the ids of no token are refused.
    assert_eq!(matcher.accept(2), Err(SchemaError::NotAllowed(2)));
    assert_eq!(matcher.accept(-1), Err(SchemaError::NotAllowed(-1)));
    assert_eq!(matcher.accept(99), Err(SchemaError::NotAllowed(99)));
    assert_eq!(matcher.accept(0), Err(SchemaError::NotAllowed(0)));
    matcher.accept(4).unwrap();
    for token in [5, 10, 8, 2] {
        assert_eq!(matcher.is_complete(), Ok(false));
        matcher.accept(token).unwrap();
    }
    assert!(matcher.is_complete().unwrap() && matcher.allows(0).unwrap() && matcher.allows(14).unwrap());
    matcher.accept(14).unwrap();
}

/// A vocabulary that has no way to go on is told apart from a schema that is too complex.
#[test]
fn a_vocabulary_that_cannot_say_it_is_a_dead_end() {
    let texts = Arc::new(TokenTexts::new([b"{".to_vec(), b"".to_vec()].into_iter(), &[1]));
    let mut matcher = SchemaCompiler::new(&texts).unwrap().compile("{\"type\":\"object\"}", true).unwrap();
    matcher.accept(0).unwrap();
    assert_eq!(matcher.allows(0), Err(SchemaError::DeadEnd));
}

#[test]
fn an_answer_matches_a_regular_expression_from_its_beginning_to_its_end() {
    for (regex, good, bad) in [
        ("[a-c]+", &["a", "abc"][..], &["", "d", "ad", "a\n"][..]),
        ("^[a-c]+$", &["abc"], &["abcd"]),
        (r"\d{3}-\d{4}", &["555-1234"], &["555-123", "5551234"]),
        // What a grammar would write otherwise.
        ("a/b", &["a/b"], &["a", "ab"]),
        (r"a\/b\\\\", &[r"a/b\\"], &["a/b"]),
        ("a\nb\"", &["a\nb\""], &["a b"]),
        (r"costs \$", &["costs $"], &["costs"]),
        ("yes|no", &["yes", "no"], &["yesno", "y"]),
        ("(?i)yes", &["YES", "yes"], &["no"]),
        (".*", &["anything", ""], &["two\nlines"]),
    ] {
        let form = compiler().compile_regex(regex).unwrap_or_else(|error| panic!("{regex}: {error}"));
        good.iter().for_each(|text| assert!(follows(&form, text), "{regex} of {text:?}"));
        bad.iter().for_each(|text| assert!(!follows(&form, text), "{regex} of {text:?}"));
    }
    for bad in ["", "^$", "(", "a**{", "[z-a]", "a(?=b)", r"(a)\1", r"\p{Nothing}"] {
        let Err(error) = compiler().compile_regex(bad) else { panic!("{bad} is taken") };
        let told = error.to_string();
        assert!(matches!(error, SchemaError::Regex(_)) && told.len() < 400 && !told.contains('\n'), "{bad}: {told}");
    }
}

proptest! {
    /// Whatever it says, it is one expression, and no text of it ends what holds it.
    #[test]
    fn any_text_is_an_expression_or_refused(regex in "(?s)[a-c/\\\\\"'\\[\\](){}|*+?.^$\n:#%<>-]{0,12}") {
        if let Ok(form) = compiler().compile_regex(&regex) {
            // An expression of the same meaning, where this is one for others, too.
            prop_assert!(!follows(&form, "\u{1F600}zzz") || regex.contains('.') || regex.contains('^'), "{}", regex);
        }
    }
}

#[test]
fn a_step_that_takes_too_long_ends_its_answer_alone() {
    let same: Vec<Value> = vec![json!({"type": "array", "items": {"$ref": "#/$defs/a"}}); 300];
    let mut hostile = compile(&json!({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": same}}})).unwrap();
    let harmless = compile(&json!({"type": "array"})).unwrap();
    let open = texts().tokenize("[")[0];
    let began = Instant::now();
    let mut matcher = hostile.clone();
    let failed = (0..20).find_map(|_| matcher.accept(open).err());
    assert!(matches!(failed, Some(SchemaError::TooComplex { .. })), "{failed:?}");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    let error = ConstraintError { param: "guided_json".into(), fault: failed.unwrap().into() }.into_request_error();
    assert_eq!(error.code(), "grammar_too_complex");
    // Who began alike is not harmed, nor is anyone else.
    assert!(follows(&harmless, "[[]]"));
    assert_eq!(hostile.is_complete(), Ok(false));
}

/// To say whether an answer may end is a step as any other.
#[test]
fn whether_an_answer_may_end_is_said_within_its_time_or_not_at_all() {
    let mut schema = compile(&json!({"type": "integer"})).unwrap();
    let digit = texts().tokenize("7")[0];
    schema.accept(digit).unwrap();
    let mut constraint = Constraint { machine: Machine::Schema(Box::new(schema.clone())), param: "guided_json".into() };
    assert!(schema.is_complete().unwrap() && constraint.is_complete());
    let end = texts().end_tokens().next().unwrap();
    // As the clock does.
    schema.cut_short();
    let too_complex = |result: Result<bool, SchemaError>| matches!(result, Err(SchemaError::TooComplex { .. }));
    assert!(too_complex(schema.is_complete()) && too_complex(schema.allows(end)));
    assert!(matches!(allowed(&mut schema), Err(SchemaError::TooComplex { .. })));
    let Machine::Schema(schema) = &mut constraint.machine else { unreachable!() };
    schema.cut_short();
    assert!(!constraint.is_complete() && constraint.allows(end).unwrap_err().is_limit());
}

fn any_schema() -> impl Strategy<Value = Value> {
    let number = prop_oneof![
        Just(json!(0)),
        Just(json!(-1)),
        Just(json!(3)),
        Just(json!(1.5)),
        Just(json!(1e9)),
        Just(json!(-0.0))
    ];
    let count = 0..4_u64;
    let leaf = prop_oneof![
        Just(json!({})),
        Just(json!(true)),
        Just(json!(false)),
        Just(json!({"$ref": "#"})),
        Just(json!({"$ref": "#/$defs/a"})),
        Just(json!({"const": {"a": [1, "x", null]}})),
        Just(json!({"enum": ["a", 1, null, {"b": 2}]})),
        Just(json!({"type": ["string", "null"]})),
        (count.clone(), count.clone()).prop_map(|(a, b)| json!({"type": "string", "minLength": a, "maxLength": b})),
        (number.clone(), number.clone())
            .prop_map(|(a, b)| json!({"type": "number", "minimum": a, "exclusiveMaximum": b})),
        (number.clone(), number).prop_map(|(a, b)| json!({"type": "integer", "maximum": a, "multipleOf": b})),
        "[a-c.*+?|()\\[\\]{}^$\\\\d0-9,-]{0,12}".prop_map(|pattern| json!({"type": "string", "pattern": pattern})),
        "[a-z-]{0,9}".prop_map(|format| json!({"type": "string", "format": format})),
    ];
    leaf.prop_recursive(4, 24, 4, move |inner| {
        let some = || proptest::collection::vec(inner.clone(), 0..4);
        let named = || proptest::collection::vec(("[a-c]{0,2}", inner.clone()), 0..4);
        prop_oneof![
            (some(), prop_oneof![Just("anyOf"), Just("oneOf"), Just("allOf")]).prop_map(|(all, key)| json!({key: all})),
            (named(), inner.clone(), count.clone()).prop_map(|(all, other, n)| {
                let properties: serde_json::Map<String, Value> = all.into_iter().collect();
                json!({"type": "object", "properties": properties, "additionalProperties": other, "minProperties": n, "required": ["a"]})
            }),
            (named(), inner.clone()).prop_map(|(all, not)| {
                let patterns: serde_json::Map<String, Value> = all.into_iter().collect();
                json!({"patternProperties": patterns, "not": not})
            }),
            (some(), inner.clone(), count.clone(), count.clone())
                .prop_map(|(all, item, a, b)| json!({"prefixItems": all, "items": item, "minItems": a, "maxItems": b})),
            (inner.clone(), inner.clone()).prop_map(|(a, b)| json!({"$defs": {"a": a}, "items": b, "$ref": "#/$defs/a"})),
            inner.clone().prop_map(|a| json!({"if": a, "then": a, "dependentSchemas": {"a": a}})),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_schema_is_refused_or_followed_to_json(schema in any_schema(), seed in any::<u64>(), strict in any::<bool>()) {
        match compiler().compile(&schema.to_string(), strict) {
            Ok(mut matcher) => match write(&mut matcher, seed) {
                Ok(Some(text)) => {
                    parse(&text);
                }
                Ok(None) | Err(SchemaError::TooComplex { .. } | SchemaError::DeadEnd) => {}
                Err(error) => prop_assert!(false, "{error}\n{schema}"),
            },
            Err(SchemaError::Unsupported { .. } | SchemaError::TooLarge { .. }) => {}
            Err(error) => prop_assert!(false, "{error}\n{schema}"),
        }
    }

    #[test]
    fn any_bytes_as_a_schema_are_an_error(bytes in "\\PC{0,200}") {
        if serde_json::from_str::<Value>(&bytes).is_err() {
            prop_assert!(matches!(compiler().compile(&bytes, false), Err(SchemaError::NotJson { .. })), "{bytes}");
        }
    }
}

#[test]
fn a_long_key_above_many_values_is_not_copied_for_each() {
    let peak_kib = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap()
    };
    let (key, before) = ("~".repeat(32 * 1024), peak_kib());
    let schema = json!({ (key.as_str()): vec![0; limits::MAX_SCHEMA_VALUES - 2] });
    assert_eq!(crate::grammars::place::check_size(&schema), Ok(()));
    let wide = json!({ (key.as_str()): {"items": {"not": {}}, "enum": vec![0; limits::MAX_SCHEMA_VALUES - 9]} });
    assert_eq!(crate::grammars::place::check_size(&wide), Ok(()));
    // Copied for each they would take a gigabyte; other tests take some beside this one.
    assert!(peak_kib() - before < 400 << 10, "{} KiB before, {} KiB now", before, peak_kib());
}

//! Schemas that mean harm: refused, or followed within their limits.

use super::*;

fn chain(n: usize, link: impl Fn(Value) -> Value, last: Value) -> Value {
    let reference = |i: usize| json!({"$ref": format!("#/$defs/d{i}")});
    let definitions: serde_json::Map<String, Value> =
        (0..=n).map(|i| (format!("d{i}"), if i < n { link(reference(i + 1)) } else { last.clone() })).collect();
    json!({"$ref": "#/$defs/d0", "$defs": definitions})
}

fn wide(n: usize) -> serde_json::Map<String, Value> {
    (0..n).map(|i| (format!("p{i}"), json!({"type": "string"}))).collect()
}

/// Compiles, and follows it for a while; what that may take beyond its limits is what a slow machine takes longer.
fn bear(what: &str, schema: &Value) -> Result<(), SchemaError> {
    let began = Instant::now();
    let compiled = compile(schema);
    assert!(began.elapsed() < limits::MAX_SCHEMA_COMPILE * 2, "{what}: {:?} to compile", began.elapsed());
    let compiled = compiled?;
    let mut result = Ok(());
    for seed in 0..3 {
        let began = Instant::now();
        let mut matcher = compiled.clone();
        let mut draws = Draws(seed);
        for _ in 0..60 {
            let tokens = match allowed(&mut matcher) {
                Ok(tokens) if tokens.iter().any(|&token| !texts().is_end(token)) => tokens,
                Ok(_) => break,
                Err(error) => {
                    result = Err(error);
                    break;
                }
            };
            let longest = tokens.iter().copied().max_by_key(|&token| texts().text(token).len()).unwrap();
            let token = if seed == 0 { longest } else { tokens[draws.below(tokens.len())] };
            if let Err(error) = matcher.accept(token) {
                result = Err(error);
                break;
            }
        }
        assert!(began.elapsed() < Duration::from_secs(5), "{what}: {:?} to follow", began.elapsed());
    }
    result
}

#[test]
fn hostile_schemas_are_refused_or_followed_within_their_limits() {
    let string = |pattern: &str| json!({"type": "string", "pattern": pattern});
    let nested = (0..20).fold(
        json!({"type": "null"}),
        |inner, _| json!({"type": "array", "items": inner, "minItems": 2000, "maxItems": 4000}),
    );
    let product: Vec<Value> = (0..12)
        .map(|i| json!({"anyOf": (0..3).map(|j| json!({"type": "object", "properties": {format!("p{i}_{j}"): {}}})).collect::<Vec<_>>()}))
        .collect();
    let twice = |next: Value| json!({"allOf": [next, next]});
    let same: Vec<Value> = vec![json!({"type": "array", "items": {"$ref": "#/$defs/a"}}); 200];
    let lengths: Vec<Value> =
        (0..400).map(|i| json!({"type": "array", "items": string(&format!("^.{{0,{i}}}x$"))})).collect();
    let cases = [
        ("a chain of references", chain(2000, |next| next, json!({"type": "null"}))),
        (
            "a chain of references with siblings",
            chain(1000, |next| json!({"type": "object", "allOf": [next]}), json!({"type": "object"})),
        ),
        ("doubling", chain(60, twice, json!({"type": "object"}))),
        ("itself", json!({"$ref": "#"})),
        ("itself in a circle", json!({"allOf": [{"$ref": "#"}, {"type": "object"}]})),
        ("nothing", json!({"not": {}})),
        ("false inside", json!({"type": "object", "properties": {"a": false}, "required": ["a"]})),
        ("a product of alternatives", json!({"allOf": product})),
        ("alternatives that are the same", json!({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": same}}})),
        ("alternatives that differ late", json!({"anyOf": lengths})),
        ("items upon items", nested),
        ("many values", json!({"enum": (0..4000).map(|i| format!("value number {i}")).collect::<Vec<_>>()})),
        ("a long value", json!({"enum": ["x".repeat(60_000), "x".repeat(60_001)]})),
        (
            "counted items",
            json!({"type": "array", "items": {"type": "string"}, "minItems": 100_000, "maxItems": 1_000_000_000}),
        ),
        ("counted characters", json!({"type": "string", "minLength": 1_000_000_000})),
        ("properties", json!({"type": "object", "properties": wide(500)})),
        ("repetitions of repetitions", string("^(a{1,1000}){1,1000}$")),
        ("optional parts", string(&format!("^{}{}$", "a?".repeat(1000), "a".repeat(1000)))),
        ("what is known late", string(".*a.{30}$")),
        ("any of many", string("^((a|b|ab|ba)*c){50}.{0,2000}x$")),
        ("long words", string("^\\w{1,500}\\s\\w{1,500}$")),
        ("groups", string(&format!("{}a{}", "(".repeat(240), ")".repeat(240)))),
        ("too many groups", string(&format!("{}a{}", "(".repeat(2000), ")".repeat(2000)))),
        ("wide numbers", json!({"type": "number", "minimum": -1.797e308, "exclusiveMaximum": 5e-324})),
        ("the least integer", json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX, "multipleOf": 97})),
        (
            "no ASCII",
            json!({"type": "object", "minimum": "é".repeat(99), "properties": {"é".repeat(60): {"type": "é".repeat(80)}}}),
        ),
        (
            "lengths beside a format",
            json!({"type": "string", "format": "uri", "maxLength": 2000, "pattern": "^.*(a|b).{10}$"}),
        ),
    ];
    for (what, schema) in &cases {
        if let Err(error) = bear(what, schema) {
            assert!(!matches!(error, SchemaError::Internal(_)), "{what}: {error}");
        }
    }
    // Nothing of that harms another.
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    assert!(follows(&compile(&schema).unwrap(), "{\"a\": 1}"));
}

/// As many as there may be are followed, also where none has to be there.
#[test]
fn as_many_properties_as_the_limit_says_are_taken() {
    let schema = |required: bool, others: bool| {
        let names: Vec<_> = wide(limits::MAX_SCHEMA_PROPERTIES).keys().cloned().collect();
        json!({"type": "object", "properties": wide(limits::MAX_SCHEMA_PROPERTIES), "additionalProperties": others,
            "required": if required { names } else { Vec::new() }})
    };
    for (required, others) in [(true, false), (false, false), (true, true), (false, true)] {
        bear("as wide as can be", &schema(required, others)).unwrap();
    }
    let compiled = compile(&schema(false, false)).unwrap();
    let last = format!("{{\"p0\": \"a\", \"p{}\": \"b\"}}", limits::MAX_SCHEMA_PROPERTIES - 1);
    assert!(follows(&compiled, &last) && !follows(&compiled, "{\"p500\": \"a\"}"));
}

#[test]
fn what_is_too_large_is_refused_before_it_is_compiled() {
    let deep = (0..100).fold(json!({}), |inner, _| json!({"type": "array", "items": inner}));
    for schema in [
        deep,
        json!({"enum": vec![0; limits::MAX_SCHEMA_VALUES]}),
        json!({"type": "object", "properties": wide(limits::MAX_SCHEMA_PROPERTIES + 1)}),
        json!({"type": "object", "properties": wide(limits::MAX_COUNTED_PROPERTIES + 1), "minProperties": 1}),
        json!({"type": "string", "pattern": "a".repeat(limits::MAX_SCHEMA_PATTERN_BYTES + 1)}),
        json!({"allOf": [{"multipleOf": 7919}, {"multipleOf": 101}]}),
        json!({"multipleOf": 1e-9}),
        json!({"multipleOf": 0}),
    ] {
        let began = Instant::now();
        let error = compile(&schema).unwrap_err();
        assert!(matches!(error, SchemaError::TooLarge { .. } | SchemaError::Unsupported { .. }), "{error}");
        assert!(began.elapsed() < Duration::from_millis(500), "{error}");
    }
    for schema in [
        json!({"multipleOf": 0.01}),
        json!({"allOf": [{"multipleOf": 100}, {"multipleOf": 2.5}]}),
        json!({"multipleOf": 1e3}),
    ] {
        compile(&schema).unwrap();
    }
    assert!(matches!(compiler().compile("{\"a\":", false), Err(SchemaError::NotJson { line: 1, .. })));
}

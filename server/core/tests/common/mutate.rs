//! Bodies near to valid ones: one of them with one place changed, for properties of decoders.
//!
//! Included by the tests of the crates that have decoders (`#[path]`).

use gantry_core::ApiError;
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Map, Value, json};

/// The longest message that says what is wrong: it may repeat a part of what was sent, and not all.
const MAX_MESSAGE_BYTES: usize = 4096;

/// What is done to a place.
#[derive(Clone, Debug)]
enum Change {
    Put(Value),
    Remove,
    Rename(String),
    Wrap,
    Twice,
}

fn leaf() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-2_i64..3).prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from),
        prop::sample::select(vec!["user", "assistant", "tool", "text", "function", "auto", "none", "", "\u{0}"])
            .prop_map(Value::from),
        Just(json!([])),
        Just(json!({})),
    ]
}

fn change() -> impl Strategy<Value = Change> {
    let tree = leaf().prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec(("[a-z_]{1,8}", inner), 0..4)
                .prop_map(|all| Value::Object(all.into_iter().collect())),
        ]
    });
    prop_oneof![
        6 => tree.prop_map(Change::Put),
        2 => Just(Change::Remove),
        1 => "[a-z_.\\[\\]\u{e9}]{1,12}".prop_map(Change::Rename),
        1 => Just(Change::Wrap),
        1 => Just(Change::Twice),
    ]
}

/// The places of a value, but for the whole, as paths of names and numbers.
fn places(value: &Value, before: &[String], into: &mut Vec<Vec<String>>) {
    let inner: Vec<(String, &Value)> = match value {
        Value::Object(fields) => fields.iter().map(|(name, value)| (name.clone(), value)).collect(),
        Value::Array(items) => items.iter().enumerate().map(|(i, value)| (i.to_string(), value)).collect(),
        _ => Vec::new(),
    };
    for (step, value) in inner {
        let path = [before, &[step]].concat();
        places(value, &path, into);
        into.push(path);
    }
}

fn apply(value: &mut Value, path: &[String], change: Change) {
    let [step, rest @ ..] = path else { return };
    match (value, rest) {
        (Value::Object(fields), []) => {
            let Some(old) = fields.get(step).cloned() else { return };
            match change {
                Change::Put(new) => drop(fields.insert(step.clone(), new)),
                Change::Remove => drop(fields.remove(step)),
                Change::Rename(name) => {
                    fields.remove(step);
                    fields.insert(name, old);
                }
                Change::Wrap => drop(fields.insert(step.clone(), json!([old]))),
                Change::Twice => drop(fields.insert(step.clone(), json!([old, old]))),
            }
        }
        (Value::Array(items), []) => {
            let Some(index) = step.parse::<usize>().ok().filter(|index| *index < items.len()) else { return };
            let old = items[index].clone();
            match change {
                Change::Put(new) => items[index] = new,
                Change::Remove => drop(items.remove(index)),
                Change::Rename(name) => items[index] = Value::Object(Map::from_iter([(name, old)])),
                Change::Wrap => items[index] = json!([old]),
                Change::Twice => items.insert(index, old),
            }
        }
        (Value::Object(fields), rest) => {
            if let Some(inner) = fields.get_mut(step) {
                apply(inner, rest, change);
            }
        }
        (Value::Array(items), rest) => {
            if let Some(inner) = step.parse::<usize>().ok().and_then(|index| items.get_mut(index)) {
                apply(inner, rest, change);
            }
        }
        _ => {}
    }
}

/// One of these with one or two places changed.
pub(crate) fn near(valid: Vec<Value>) -> impl Strategy<Value = Value> {
    let changes = prop::collection::vec((any::<Index>(), change()), 1..3);
    (prop::sample::select(valid), changes).prop_map(|(mut body, changes)| {
        for (index, change) in changes {
            let mut all = Vec::new();
            places(&body, &[], &mut all);
            if !all.is_empty() {
                apply(&mut body, &all[index.index(all.len())], change);
            }
        }
        body
    })
}

/// Holds an error about a body to what every one must be: the request's fault, told briefly, of a field that the body has or
/// misses. `known`: the names that a body may have.
pub(crate) fn is_told(error: &ApiError, body: &Value, known: &[&str]) {
    assert_eq!(error.status, 400, "{error} of {body}");
    assert!(error.message.len() < MAX_MESSAGE_BYTES, "{} bytes: {error}", error.message.len());
    let param = error.param.as_deref().unwrap_or_else(|| panic!("{error} names no field of {body}"));
    let fields = body.as_object().into_iter().flat_map(Map::keys).map(String::as_str);
    let is_of =
        |name: &str| param.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']));
    let shown = |name: &str| name.chars().take(64).collect::<String>();
    assert!(
        known.iter().copied().any(is_of) || fields.map(shown).any(|name| is_of(&name)),
        "{param:?} is no field of {body}"
    );
}

/// The body once for each object in it, with the values of that object as an array in its place, and the object's path. `free`:
/// the names of what may be anything.
pub(crate) fn with_arrays(body: &Value, free: &[&str]) -> Vec<(String, Value)> {
    let mut all = Vec::new();
    places(body, &[], &mut all);
    let mut changed = Vec::new();
    for path in all.iter().filter(|path| !path.iter().any(|step| free.contains(&step.as_str()))) {
        let pointer = format!("/{}", path.join("/"));
        let mut body = body.clone();
        let Some(place) = body.pointer_mut(&pointer).filter(|value| value.is_object()) else { continue };
        let values: Vec<Value> = place.as_object().into_iter().flatten().map(|(_, value)| value.clone()).collect();
        *place = values.into();
        let mut name = String::new();
        for step in path {
            let dot = if name.is_empty() { "" } else { "." };
            name += &step.parse::<usize>().map_or_else(|_| format!("{dot}{step}"), |index| format!("[{index}]"));
        }
        changed.push((name, body));
    }
    changed
}

/// Holds an error about such a body to naming the object, and to saying that one is expected.
pub(crate) fn is_told_of_object(error: &ApiError, path: &str) {
    let is_said = error.param.as_deref() == Some(path) && error.message.contains("object");
    assert!(error.status == 400 && is_said, "{error} names {:?}, not {path}", error.param);
}

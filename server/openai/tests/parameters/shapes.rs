//! What the list says that a parameter may be is what requests may say: its bounds are taken, and what lies beyond them is refused by
//! the parameter's name.

use gantry_openai::Shape;
use gantry_openai::parameters::{PARAMETERS, Place};
use serde_json::{Value, json};

use crate::{ask, path, places};

/// Texts up to this long are sent as long as they may be; what only a longer one is refused for, the engine refuses.
const MOST_TEXT_BYTES: usize = 128 * 1024;

fn accepts(shape: Shape, value: &Value) -> bool {
    let (number, length) = (value.as_f64(), value.as_array().map(Vec::len));
    match shape {
        Shape::Boolean => value.is_boolean(),
        Shape::Only(only) => *value == json!(only),
        Shape::Integer(least, most) => value.as_i64().is_some_and(|n| (least..=most).contains(&n)),
        Shape::Number(least, most) => number.is_some_and(|n| (f64::from(least)..=f64::from(most)).contains(&n)),
        Shape::AboveZero(most) => number.is_some_and(|n| n > 0.0 && n <= f64::from(most)),
        Shape::Text { most_bytes, .. } => value.as_str().is_some_and(|text| text.len() <= most_bytes),
        Shape::Words(words) => value.as_str().is_some_and(|word| words.contains(&word)),
        Shape::Texts(least, most, _) | Shape::Objects(_, least, most) => {
            length.is_some_and(|n| (least..=most).contains(&n))
        }
        Shape::AnyOf(shapes) => shapes.iter().any(|shape| accepts(*shape, value)),
        Shape::Name
        | Shape::Tokens(_)
        | Shape::Inputs { .. }
        | Shape::Biases(..)
        | Shape::OrderedWords(_)
        | Shape::Schema
        | Shape::Map(_)
        | Shape::Object(_)
        | Shape::NamedTool
        | Shape::NamedTools(_)
        | Shape::Documents(_) => value.is_array() || value.is_object() || value.is_string(),
    }
}

/// The bounds of a shape where they can be had alone.
fn within(shape: Shape) -> Vec<Value> {
    match shape {
        Shape::Boolean => vec![json!(true), json!(false)],
        Shape::Only(only) => vec![json!(only)],
        Shape::Integer(least, most) => vec![json!(least), json!(most), json!(least.max(1) as f64)],
        Shape::Number(least, most) => vec![json!(least), json!(most)],
        Shape::AboveZero(most) => vec![json!(most), json!(0.001)],
        Shape::Text { most_bytes, .. } if most_bytes <= MOST_TEXT_BYTES => vec![json!("a".repeat(most_bytes))],
        Shape::Words(words) => words.iter().map(|word| json!(word)).collect(),
        Shape::OrderedWords(words) => vec![json!(words), json!([words[0]]), json!([])],
        Shape::Texts(least, most, _) => vec![json!(vec!["a"; least.max(1)]), json!(vec!["a"; most])],
        // JSON may write integers so.
        Shape::Tokens(most) => vec![json!(vec![1; most]), json!([1.0, 2e2])],
        Shape::AnyOf(shapes) => shapes.iter().flat_map(|shape| within(*shape)).collect(),
        _ => Vec::new(),
    }
}

/// What lies beyond the bounds, or is of another type.
fn beyond(shape: Shape) -> Vec<Value> {
    let mut all = match shape {
        Shape::Integer(least, most) => {
            let number = |n: Option<i64>| n.map(Value::from);
            number(least.checked_sub(1)).into_iter().chain(number(most.checked_add(1))).chain([json!(1.5)]).collect()
        }
        Shape::Number(least, most) => vec![json!(least - 0.01), json!(most + 0.01)],
        Shape::AboveZero(most) => vec![json!(0), json!(-1), json!(most + 0.01)],
        Shape::Text { most_bytes, .. } if most_bytes <= MOST_TEXT_BYTES => vec![json!("a".repeat(most_bytes + 1))],
        Shape::Words(_) => vec![json!("frobnicate")],
        Shape::OrderedWords(words) => {
            let backwards: Vec<_> = words.iter().rev().collect();
            return vec![
                json!(["frobnicate"]),
                json!([words[0], words[0]]),
                json!(backwards),
                json!("frobnicate"),
                json!([1]),
            ];
        }
        Shape::Texts(_, most, bytes) => {
            let mut texts = vec![json!(vec!["a"; most + 1]), json!([1])];
            texts.extend((bytes <= MOST_TEXT_BYTES).then(|| json!(["a".repeat(bytes + 1)])));
            texts
        }
        Shape::Tokens(most) => vec![json!(vec![1; most + 1]), json!([-1]), json!(["a"]), json!([1_u64 << 31])],
        Shape::Inputs { elements, .. } => vec![json!(vec!["a"; elements + 1]), json!([-1]), json!([[]]), json!([""])],
        Shape::Biases(most, bias) => {
            let many: serde_json::Map<_, _> = (0..=most).map(|token| (token.to_string(), json!(1))).collect();
            vec![Value::Object(many), json!({"1": bias + 1.0}), json!({"a": 1}), json!([[1]]), json!([[-1, 1]])]
        }
        Shape::Objects(_, least, most) => {
            let mut counts = vec![json!([7])];
            counts.extend((least > 0).then(|| json!([])));
            counts.push(json!(vec![json!({}); most + 1]));
            counts
        }
        Shape::Documents(most) => vec![json!(vec!["a"; most + 1]), json!([""]), json!([7])],
        Shape::Map(most) if most < usize::MAX => {
            vec![Value::Object((0..=most).map(|name| (format!("a{name}"), json!(1))).collect())]
        }
        Shape::AnyOf(shapes) => shapes.iter().flat_map(|shape| beyond(*shape)).collect(),
        _ => Vec::new(),
    };
    all.extend([json!(7.5), json!("frobnicate"), json!({"frobnicate": 1})]);
    all.retain(|value| !accepts(shape, value));
    all
}

/// What is read only where something else is asked for.
fn is_read_alone(place: Place, name: &str) -> bool {
    match place {
        Place::ToolChoice => name == "type",
        Place::ResponseFormat => name == "type",
        _ => true,
    }
}

/// What a rule about several parameters refuses alone.
fn stands_alone(place: Place, name: &str) -> bool {
    let with_others = ["tool_choice", "continue_final_message", "guided_json", "stream_options", "text_1", "queries"];
    // Words about thought must agree, and some of a chat's numbers have a hole.
    let is_generation = matches!(place, Place::Chat | Place::Text | Place::Infill);
    let is_other =
        matches!(place, Place::Embeddings | Place::Rerank | Place::Score | Place::Tokenize | Place::Template);
    (is_generation || is_other) && !with_others.contains(&name)
}

#[test]
fn what_lies_beyond_the_bounds_of_a_parameter_is_refused_by_its_name() {
    let mut asked = 0;
    for parameter in PARAMETERS {
        let Some(shape) = parameter.shape else { continue };
        for &place in parameter.places.iter().filter(|place| is_read_alone(**place, parameter.name)) {
            let (_, enough) = places().into_iter().find(|(known, _)| *known == place).unwrap();
            for value in beyond(shape) {
                let mut inner = enough.as_object().unwrap().clone();
                inner.insert(parameter.name.to_owned(), value.clone());
                let what = || {
                    let shown: String = value.to_string().chars().take(60).collect();
                    format!("{} in {place:?}: {shown}", parameter.name)
                };
                let Err(error) = ask(place, inner) else { panic!("{} was taken", what()) };
                let named = error.param.clone().unwrap_or_default();
                assert!(named.starts_with(&path(place, parameter.name)), "{}: {named}: {error}", what());
                asked += 1;
            }
        }
    }
    assert!(asked > 300, "{asked}");
}

#[test]
fn the_bounds_of_a_parameter_are_taken() {
    let mut asked = 0;
    for parameter in PARAMETERS {
        let Some(shape) = parameter.shape else { continue };
        for &place in parameter.places.iter().filter(|place| stands_alone(**place, parameter.name)) {
            let (_, enough) = places().into_iter().find(|(known, _)| *known == place).unwrap();
            for value in within(shape) {
                let mut inner = enough.as_object().unwrap().clone();
                if parameter.name == "top_logprobs" {
                    inner.insert("logprobs".to_owned(), json!(true));
                }
                inner.insert(parameter.name.to_owned(), value.clone());
                let shown: String = value.to_string().chars().take(60).collect();
                if let Err(error) = ask(place, inner) {
                    panic!("{} in {place:?}: {shown}: {error}", parameter.name);
                }
                asked += 1;
            }
        }
    }
    assert!(asked > 150, "{asked}");
}

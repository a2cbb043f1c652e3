//! Each parameter that `OpenAI`'s, llama-server's or vLLM's reference names is obeyed, refused by name, or known to change
//! nothing, and a name that nobody knows is refused: none vanishes in silence. `docs/configuration.md` says which.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use gantry_core::{ApiError, ErrorCode};
use gantry_openai::parameters::{Neutral, PARAMETERS, Parameter, Place, Treatment, find};
use gantry_openai::{
    ValidChatRequest, ValidCompletionRequest, ValidEmbeddingsRequest, ValidRerankRequest, decode_apply_template,
    decode_detokenize, decode_infill, decode_score, decode_tokenize,
};
use serde_json::{Map, Value, json};

#[path = "parameters/shapes.rs"]
mod shapes;

/// The references' lists, and the names that are this server's own.
const LISTS: [(&str, &str); 5] = [
    ("OpenAI", include_str!("parameters/openai.tsv")),
    ("llama-server", include_str!("parameters/llama-server.tsv")),
    ("vLLM", include_str!("parameters/vllm.tsv")),
    ("others", include_str!("parameters/others.tsv")),
    ("Gantry", "chat\ttimings\ttrue\ntext\ttimings\ttrue\ntext\tparse_special\ttrue\nrerank\treturn_documents\ttrue\n"),
];

/// A line of a list.
struct Named {
    place: Place,
    name: &'static str,
    /// A value that asks for something.
    value: Value,
    /// What must stand beside it.
    beside: Map<String, Value>,
}

fn lists() -> impl Iterator<Item = (&'static str, Named)> {
    LISTS.iter().flat_map(|(source, text)| {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        lines.map(move |line| (*source, named(line).unwrap_or_else(|| panic!("{source}: {line:?}"))))
    })
}

fn named(line: &'static str) -> Option<Named> {
    let mut columns = line.split('\t');
    let place = match columns.next()? {
        "chat" => Place::Chat,
        "text" => Place::Text,
        "embeddings" => Place::Embeddings,
        "rerank" => Place::Rerank,
        "score" => Place::Score,
        "infill" => Place::Infill,
        "infill_file" => Place::InfillFile,
        "tokenize" => Place::Tokenize,
        "detokenize" => Place::Detokenize,
        "apply-template" => Place::Template,
        "message" => Place::Message,
        "part" => Place::Part,
        "tool_call" => Place::ToolCall,
        "function" => Place::Function,
        "tool" => Place::Tool,
        "tool_function" => Place::ToolFunction,
        "tool_choice" => Place::ToolChoice,
        "reasoning" => Place::Reasoning,
        "thinking" => Place::Thinking,
        "response_format" => Place::ResponseFormat,
        "json_schema" => Place::JsonSchema,
        "document" => Place::Document,
        "stream_options" => Place::StreamOptions,
        "structured_outputs" => Place::StructuredOutputs,
        _ => return None,
    };
    let name = columns.next()?;
    let value = serde_json::from_str(columns.next()?).ok()?;
    let beside = serde_json::from_str(columns.next().unwrap_or("{}")).ok()?;
    Some(Named { place, name, value, beside })
}

/// What becomes of a request that has `inner` in a place, as the server would write what it understood.
fn ask(place: Place, mut inner: Map<String, Value>) -> Result<String, ApiError> {
    let call = json!({"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let chat = |message: Value| json!({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}, message]});
    let mut put_absent = |name: &str, value: Value| {
        inner.entry(name).or_insert(value);
    };
    let body = match place {
        Place::Tokenize => {
            if !inner.contains_key("prompt") {
                inner.entry("content").or_insert(json!("Hi"));
            }
            Value::Object(inner)
        }
        Place::Detokenize => {
            put_absent("tokens", json!([2, 3]));
            Value::Object(inner)
        }
        Place::Chat | Place::Template => {
            put_absent("messages", json!([{"role": "user", "content": "Hi"}]));
            Value::Object(inner)
        }
        Place::Text => {
            put_absent("prompt", json!("Hi"));
            Value::Object(inner)
        }
        Place::Embeddings => {
            put_absent("input", json!("Hi"));
            Value::Object(inner)
        }
        Place::Rerank => {
            put_absent("query", json!("Hi"));
            put_absent("documents", json!(["a", "b"]));
            Value::Object(inner)
        }
        Place::Score => {
            if !inner.contains_key("queries") {
                inner.entry("text_1").or_insert(json!("Hi"));
            }
            if !inner.contains_key("documents") {
                inner.entry("text_2").or_insert(json!("a"));
            }
            Value::Object(inner)
        }
        Place::Infill => {
            put_absent("input_prefix", json!("Hi"));
            put_absent("input_suffix", json!("."));
            Value::Object(inner)
        }
        Place::InfillFile => {
            put_absent("text", json!("Hi"));
            json!({"input_prefix": "Hi", "input_suffix": ".", "input_extra": [inner]})
        }
        Place::Message => chat(Value::Object(inner)),
        Place::Part => chat(json!({"role": "assistant", "content": [inner]})),
        Place::ToolCall => chat(json!({"role": "assistant", "tool_calls": [inner]})),
        Place::Function => chat(json!({"role": "assistant", "tool_calls": [{"id": "1", "function": inner}]})),
        Place::Tool => json!({"messages": [{"role": "user", "content": "Hi"}], "tools": [inner]}),
        Place::ToolFunction => {
            json!({"messages": [{"role": "user", "content": "Hi"}], "tools": [{"function": inner}]})
        }
        Place::ToolChoice => {
            let tools = ["f", "g"].map(|name| json!({"function": {"name": name}}));
            json!({"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "tool_choice": inner})
        }
        Place::Reasoning => json!({"messages": [{"role": "user", "content": "Hi"}], "reasoning": inner}),
        Place::Thinking => json!({"messages": [{"role": "user", "content": "Hi"}], "thinking": inner}),
        Place::ResponseFormat => {
            json!({"messages": [{"role": "user", "content": "Hi"}], "response_format": inner})
        }
        Place::JsonSchema => {
            let format = json!({"type": "json_schema", "json_schema": inner});
            json!({"messages": [{"role": "user", "content": "Hi"}], "response_format": format})
        }
        Place::Document => json!({"query": "Hi", "documents": ["a", inner]}),
        Place::StructuredOutputs => {
            json!({"messages": [{"role": "user", "content": "Hi"}], "structured_outputs": inner})
        }
        Place::StreamOptions => {
            json!({"messages": [{"role": "user", "content": "Hi"}], "stream": true, "stream_options": inner})
        }
    };
    let body = body.to_string();
    match place {
        Place::Tokenize => decode_tokenize(body.as_bytes()).map(|asked| format!("{asked:?}")),
        Place::Detokenize => decode_detokenize(body.as_bytes()).map(|asked| format!("{asked:?}")),
        Place::Template => decode_apply_template(body.as_bytes()).map(|asked| format!("{asked:?}")),
        Place::Text => ValidCompletionRequest::parse(body.as_bytes()).map(|valid| format!("{valid:?}")),
        Place::Embeddings => ValidEmbeddingsRequest::parse(body.as_bytes()).map(|valid| format!("{valid:?}")),
        Place::Score => decode_score(body.as_bytes()).map(|asked| format!("{asked:?}")),
        Place::Infill | Place::InfillFile => decode_infill(body.as_bytes()).map(|asked| format!("{asked:?}")),
        Place::Rerank | Place::Document => ValidRerankRequest::parse(body.as_bytes()).map(|valid| format!("{valid:?}")),
        _ => ValidChatRequest::parse(body.as_bytes()).map(|valid| format!("{valid:?}")),
    }
}

/// How an error names a parameter in a place.
fn path(place: Place, name: &str) -> String {
    match place {
        Place::Message => format!("messages[2].{name}"),
        Place::Part => format!("messages[2].content[0].{name}"),
        Place::ToolCall => format!("messages[2].tool_calls[0].{name}"),
        Place::Function => format!("messages[2].tool_calls[0].function.{name}"),
        Place::Tool => format!("tools[0].{name}"),
        Place::ToolFunction => format!("tools[0].function.{name}"),
        Place::ToolChoice => format!("tool_choice.{name}"),
        Place::Reasoning => format!("reasoning.{name}"),
        Place::Thinking => format!("thinking.{name}"),
        Place::ResponseFormat => format!("response_format.{name}"),
        Place::JsonSchema => format!("response_format.json_schema.{name}"),
        Place::Document => format!("documents[1].{name}"),
        Place::InfillFile => format!("input_extra[0].{name}"),
        Place::StreamOptions => format!("stream_options.{name}"),
        Place::StructuredOutputs => format!("structured_outputs.{name}"),
        _ => name.to_owned(),
    }
}

#[test]
fn none_vanishes_in_silence() {
    for (source, Named { place, name, value, beside }) in lists() {
        let what = format!("{source}: {name} in {place:?}");
        let without = ask(place, beside.clone());
        let mut inner = beside;
        inner.insert(name.to_owned(), value);
        let with = ask(place, inner);
        match find(place, name) {
            None => panic!("{what} is not in the table"),
            Some(Treatment::Obeyed) => {
                assert!(with.is_ok(), "{what}: {with:?}");
                assert_ne!(with, without, "{what} makes no difference");
            }
            Some(Treatment::NoEffect(_)) => assert_eq!(with.unwrap(), without.unwrap(), "{what}"),
            Some(Treatment::Names(_)) => assert!(with.is_ok(), "{what}: {with:?}"),
            Some(Treatment::Refused(..)) => {
                let error = with.expect_err(&what);
                assert_eq!((error.status, &error.code), (400, &ErrorCode::UnsupportedParameter), "{what}");
                assert_eq!(error.param.as_deref(), Some(&*path(place, name)), "{what}");
                // What the error says to do is right.
                assert!(without.is_ok(), "{what}: {without:?}");
            }
        }
    }
}

/// Each place, with what is enough there.
fn places() -> Vec<(Place, Value)> {
    let call = json!({"id": "1", "function": {"name": "f", "arguments": "{}"}});
    vec![
        (Place::Chat, json!({})),
        (Place::Text, json!({})),
        (Place::Embeddings, json!({})),
        (Place::Rerank, json!({})),
        (Place::Score, json!({})),
        (Place::Infill, json!({})),
        (Place::InfillFile, json!({"text": "Hi"})),
        (Place::Tokenize, json!({})),
        (Place::Detokenize, json!({})),
        (Place::Template, json!({})),
        (Place::Message, json!({"role": "user", "content": "Hi"})),
        (Place::Part, json!({"type": "text", "text": "Hi"})),
        (Place::ToolCall, call.clone()),
        (Place::Function, call["function"].clone()),
        (Place::Tool, json!({"function": {"name": "f"}})),
        (Place::ToolFunction, json!({"name": "f"})),
        (Place::ToolChoice, json!({"type": "function", "name": "f"})),
        (Place::Reasoning, json!({"effort": "low"})),
        (Place::Thinking, json!({"type": "enabled"})),
        (Place::ResponseFormat, json!({"type": "text"})),
        (Place::JsonSchema, json!({"schema": {"type": "object"}})),
        (Place::Document, json!({"text": "Hi"})),
        (Place::StreamOptions, json!({})),
        (Place::StructuredOutputs, json!({"regex": "a"})),
    ]
}

#[test]
fn a_name_that_nobody_knows_is_refused_everywhere() {
    for (place, enough) in places() {
        let with = |name: &str, value: Value| {
            let mut inner = enough.as_object().unwrap().clone();
            inner.insert(name.to_owned(), value);
            ask(place, inner)
        };
        let error = with("frobnicate", json!(1)).unwrap_err();
        assert_eq!((error.status, &error.code), (400, &ErrorCode::UnknownParameter), "{place:?}: {error}");
        assert_eq!(error.param.as_deref(), Some(&*path(place, "frobnicate")), "{place:?}");
        assert!(error.message.contains("leave it out"), "{error}");
        // Nothing is asked for by what is null.
        assert_eq!(with("frobnicate", Value::Null).unwrap(), with("model", Value::Null).unwrap(), "{place:?}");
        // What is told of a name is bounded, whatever its length.
        let error = with(&"\u{e9}".repeat(100_000), json!(1)).unwrap_err();
        assert!(error.to_string().len() < 1000, "{}", error.to_string().len());
    }
}

#[test]
fn a_name_that_is_spelt_wrong_is_told_the_right_one() {
    for (place, given, meant) in [
        (Place::Chat, "temprature", "did you mean `temperature`?"),
        (Place::Chat, "max_token", "did you mean `max_tokens`?"),
        (Place::Chat, "maxTokens", "did you mean `max_tokens`?"),
        (Place::Chat, "topP", "did you mean `top_p`?"),
        (Place::Chat, "message", "did you mean `messages`?"),
        (Place::Chat, "streaming", "did you mean `stream`?"),
        (Place::Text, "promt", "did you mean `prompt`?"),
        (Place::Embeddings, "inputs", "did you mean `input`?"),
        (Place::Rerank, "document", "did you mean `documents`?"),
        (Place::Message, "contents", "did you mean `messages[2].content`?"),
        (Place::StreamOptions, "usage", "leave it out"),
        (Place::Text, "messages", "it belongs to chats, POST /v1/chat/completions"),
        (Place::Chat, "prompt", "it belongs to texts, POST /v1/completions"),
        (Place::Chat, "dimensions", "it belongs to embeddings"),
        (Place::Embeddings, "query", "it belongs to rankings"),
    ] {
        let (_, enough) = places().into_iter().find(|(known, _)| *known == place).unwrap();
        let mut inner = enough.as_object().unwrap().clone();
        inner.insert(given.to_owned(), json!("x"));
        let error = ask(place, inner).unwrap_err();
        assert_eq!(error.code, ErrorCode::UnknownParameter);
        assert!(error.message.contains(meant), "{given}: {error}");
    }
}

#[test]
fn what_is_refused_is_told_in_a_sentence_with_what_there_is_instead() {
    for (place, name, value, told) in [
        (Place::Chat, "format", json!("json"), "Instead: ask with `response_format`"),
        (Place::Chat, "options", json!({"num_ctx": 4096}), "`num_ctx` is --ctx-size"),
        (
            Place::Text,
            "thinking",
            json!({"type": "disabled", "foo": 1}),
            "because of its `foo`; leave it out, or let it be false or \"none\"",
        ),
    ] {
        let error = ask(place, Map::from_iter([(name.to_owned(), value)])).unwrap_err();
        assert!(error.message.contains(told), "{name}: {error}");
    }
    let long = json!({"x".repeat(100_000): 1});
    let error = ask(Place::Text, Map::from_iter([("thinking".to_owned(), long)])).unwrap_err();
    assert!(error.message.len() < 1000, "{}", error.message.len());
}

#[test]
fn what_asks_for_nothing_is_taken() {
    let neutral = |neutral: Neutral| match neutral {
        Neutral::Absent => vec![],
        Neutral::Zero => vec![json!(0), json!(0.0)],
        Neutral::NotPositive => vec![json!(0), json!(-1)],
        Neutral::MinusOne => vec![json!(-1)],
        Neutral::One => vec![json!(1)],
        Neutral::Two => vec![json!(2)],
        Neutral::False => vec![json!(false)],
        Neutral::True => vec![json!(true)],
        Neutral::Empty => vec![],
        Neutral::Words(words) => words.iter().map(|word| json!(word)).collect(),
        Neutral::OnlyText => vec![json!(["text"])],
        Neutral::NoThought => vec![json!(false), json!("none"), json!({"type": "disabled"})],
    };
    for (source, Named { place, name, beside, .. }) in lists() {
        let Some(Treatment::Refused(asks_nothing, _)) = find(place, name) else { continue };
        let without = ask(place, beside.clone()).unwrap();
        let empty = [json!(""), json!([]), json!({})].into_iter().filter(|_| asks_nothing != Neutral::Absent);
        for value in neutral(asks_nothing).into_iter().chain(empty).chain([Value::Null]) {
            let mut inner = beside.clone();
            inner.insert(name.to_owned(), value.clone());
            assert_eq!(ask(place, inner).unwrap(), without, "{source}: {name}: {value}");
        }
    }
}

#[test]
fn the_table_has_no_name_that_nobody_knows() {
    for Parameter { name, places, .. } in PARAMETERS {
        for place in *places {
            let known = lists().any(|(_, named)| named.name == *name && named.place == *place);
            assert!(known, "{name} in {place:?} is in no list");
        }
    }
}

const REFERENCE: &str = "../../docs/configuration.md";
const BEGIN: &str = "<!-- parameters -->\n";
const END: &str = "<!-- /parameters -->\n";

#[test]
fn the_reference_says_what_becomes_of_each() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(REFERENCE);
    let text = std::fs::read_to_string(&file).unwrap();
    let (before, rest) = text.split_once(BEGIN).expect("the page marks where the table begins");
    let (told, after) = rest.split_once(END).expect("the page marks where the table ends");
    for Parameter { name, .. } in PARAMETERS.iter().filter(|parameter| parameter.treatment == Treatment::Obeyed) {
        assert!(text.contains(&format!("`{name}`")), "docs/configuration.md does not say how {name} is obeyed");
    }
    let wanted = render();
    if std::env::var_os("UPDATE_REFERENCE").is_some() {
        std::fs::write(&file, format!("{before}{BEGIN}{wanted}{END}{after}")).unwrap();
    } else if told != wanted {
        let differing = wanted.lines().find(|line| !told.contains(line)).unwrap_or("something that is gone");
        panic!("docs/configuration.md is behind the code ({differing}): run this test with UPDATE_REFERENCE=1");
    }
}

/// The tables of what is refused and of what changes nothing.
fn render() -> String {
    let mut text = "\n| refused | where | taken when it is | instead |\n| --- | --- | --- | --- |\n".to_owned();
    let place = |place: &Place| place.words();
    let places = |parameter: &Parameter| parameter.places.iter().map(place).collect::<Vec<_>>().join(", ");
    for parameter in PARAMETERS {
        if let Treatment::Refused(neutral, instead) = parameter.treatment {
            let (name, places, neutral) = (parameter.name, places(parameter), neutral.words());
            writeln!(text, "| `{name}` | {places} | {neutral} | {instead} |").unwrap();
        }
    }
    text += "\n| says in a canary which version answers, and nothing else | it names |\n| --- | --- |\n";
    for parameter in PARAMETERS {
        if let Treatment::Names(what) = parameter.treatment {
            writeln!(text, "| `{}` ({}) | {what} |", parameter.name, places(parameter)).unwrap();
        }
    }
    text += "\n| changes nothing | why |\n| --- | --- |\n";
    let mut reasons: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for parameter in PARAMETERS {
        if let Treatment::NoEffect(reason) = parameter.treatment {
            let names = reasons.entry(reason).or_default();
            let name = format!("`{}` ({})", parameter.name, places(parameter));
            names.push(name);
        }
    }
    for (reason, names) in reasons {
        writeln!(text, "| {} | {reason} |", names.join(", ")).unwrap();
    }
    text + "\n"
}

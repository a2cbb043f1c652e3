//! Bodies of JSON as types of their protocol's, with errors that name the field at fault by its path.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde_json::{Map, Number, Value};
use serde_path_to_error::Segment;

use crate::api_error::{ApiError, ErrorCode};

/// The most characters of a field's path that an error repeats, of each part of it.
const MAX_PATH_CHARS: usize = 256;
/// The most characters of what is wrong, which may repeat a value.
const MAX_SAID_CHARS: usize = 512;
/// The most characters of a value that an error repeats.
const MAX_VALUE_CHARS: usize = 64;
/// How alike two names must be, from 0 to 1, for one to be taken for the other.
const LEAST_LIKENESS: f64 = 0.87;

/// What a list in JSON takes in memory beside its members: room for four is made at once.
const LIST_BYTES: usize = 320;
/// What an object takes beside its members: room for four, and a table that finds them.
const OBJECT_BYTES: usize = 544;
/// What a further member takes, of a list and of an object, and a text beside its letters.
const MEMBER_BYTES: usize = 72;
const FIELD_BYTES: usize = 104;
const TEXT_BYTES: usize = 32;
/// The field that says which of several kinds an object is.
const TYPE: &str = "type";
/// Stands around the path of what is wrong within a typed object, in an error that knows no other place for it.
const PATH_SIGN: char = '\0';
/// The deepest nesting that is read.
const MAX_DEPTH: u32 = 128;

/// What a text of JSON takes in memory as values, its own letters left out: told from its signs, and no less than it is. A few
/// bytes of text can be a value of a hundred.
#[must_use]
pub fn json_memory_bytes(text: &[u8]) -> usize {
    let (mut bytes, mut in_string, mut escaped) = (MEMBER_BYTES, false, false);
    // For each level whether it is an object, the innermost last.
    let (mut objects, mut depth) = (0_u128, 0_u32);
    for byte in text {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => {
                in_string = !in_string;
                bytes += usize::from(in_string) * TEXT_BYTES;
            }
            _ if in_string => {}
            b'[' | b'{' => {
                let is_object = *byte == b'{';
                bytes += if is_object { OBJECT_BYTES } else { LIST_BYTES };
                // Deeper ones are refused by who reads them.
                if depth < MAX_DEPTH {
                    (objects, depth) = ((objects << 1) | u128::from(is_object), depth + 1);
                }
            }
            b']' | b'}' => (objects, depth) = (objects >> 1, depth.saturating_sub(1)),
            b',' => bytes += if objects & 1 == 1 { FIELD_BYTES } else { MEMBER_BYTES },
            _ => {}
        }
    }
    bytes
}

/// Has these types read from objects alone, which derive `Deserialize` with `#[serde(remote = "Self")]`: what serde derives takes
/// arrays as well, by the order of the fields.
#[macro_export]
macro_rules! from_objects {
    ($($type:ty),+ $(,)?) => {$(
        impl<'de> ::serde::Deserialize<'de> for $type {
            fn deserialize<D: ::serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Object;
                impl<'de> ::serde::de::Visitor<'de> for Object {
                    type Value = $type;

                    fn expecting(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                        f.write_str("an object")
                    }

                    fn visit_map<A: ::serde::de::MapAccess<'de>>(self, fields: A) -> Result<$type, A::Error> {
                        <$type>::deserialize(::serde::de::value::MapAccessDeserializer::new(fields))
                    }
                }
                deserializer.deserialize_map(Object)
            }
        }
    )+};
}

/// The same for enums, whose variant the field `type` names. They go without `#[serde(tag = "type")]`, with which errors do not say
/// where in an object they are; schemas have `#[schemars(tag = "type")]`.
#[macro_export]
macro_rules! from_typed_objects {
    ($($type:ty),+ $(,)?) => {$(
        impl<'de> ::serde::Deserialize<'de> for $type {
            fn deserialize<D: ::serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Variant($type);
                impl<'de> ::serde::Deserialize<'de> for Variant {
                    fn deserialize<D: ::serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                        <$type>::deserialize(deserializer).map(Self)
                    }
                }
                $crate::read_typed(deserializer).map(|Variant(read)| read)
            }
        }
    )+};
}

/// Reads an object as the variant of an enum that its `type` names, for [`from_typed_objects`].
///
/// # Errors
/// It is no object, or not of that variant; the error has the path within the object.
#[doc(hidden)]
pub fn read_typed<'de, T: DeserializeOwned, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    let (kind, fields) = deserializer.deserialize_map(TypedObject)?;
    let variant = Value::Object(Map::from_iter([(kind.clone(), Value::Object(fields))]));
    serde_path_to_error::deserialize(variant).map_err(|error| {
        let path = match error.path().iter().next() {
            Some(Segment::Enum { .. }) => error.path().to_string().split_off(kind.len()),
            // It is no variant.
            _ => TYPE.to_owned(),
        };
        let said = error.into_inner().to_string();
        let (within, said) = placed(&said);
        let path = joined(path.trim_start_matches('.'), within);
        D::Error::custom(format_args!("{PATH_SIGN}{path}{PATH_SIGN}{said}"))
    })
}

/// Reads the `type` of an object, and its other fields.
struct TypedObject;

impl<'de> Visitor<'de> for TypedObject {
    type Value = (String, Map<String, Value>);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a `type`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut given: A) -> Result<Self::Value, A::Error> {
        let (mut kind, mut fields) = (None, Map::new());
        while let Some(name) = given.next_key::<String>()? {
            let is_twice = match name == TYPE {
                true => kind.replace(given.next_value::<String>()?).is_some(),
                false => fields.insert(name.clone(), given.next_value()?).is_some(),
            };
            if is_twice {
                return Err(A::Error::custom(format_args!("duplicate field `{name}`")));
            }
        }
        Ok((kind.ok_or_else(|| A::Error::missing_field(TYPE))?, fields))
    }
}

/// The path within a typed object that an error has, and what it says.
fn placed(said: &str) -> (&str, &str) {
    said.strip_prefix(PATH_SIGN).and_then(|rest| rest.split_once(PATH_SIGN)).unwrap_or(("", said))
}

fn joined(path: &str, within: &str) -> String {
    match (path, within) {
        ("" | ".", one) | (one, "" | ".") => one.to_owned(),
        (path, within) => format!("{path}.{within}"),
    }
}

/// Reads a body. What is `null` in it asks for nothing, whatever its name.
///
/// # Errors
/// It is no JSON, or not of this type: names the first field at fault by its path.
pub fn read_body<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let unknown = match read_exactly(body) {
        Err(error) if error.code == ErrorCode::UnknownParameter => error,
        read => return read,
    };
    let Ok(Value::Object(mut fields)) = serde_json::from_slice::<Value>(body) else { return Err(unknown) };
    let all = fields.len();
    fields.retain(|_, value| !value.is_null());
    if fields.len() == all {
        return Err(unknown);
    }
    read_json(Value::Object(fields), "")
}

/// Says of a field that is not known, and that another protocol has, what it is called here: `names` has the paths of such fields, with
/// `[]` for each index, and what is to be said of them.
#[must_use]
pub fn with_name_here(error: ApiError, names: &[(&str, &str)]) -> ApiError {
    let Some(param) = error.param.as_ref().filter(|_| error.code == ErrorCode::UnknownParameter) else { return error };
    let steps = param.split(['[', ']']).enumerate();
    let plain: String = steps.map(|(at, step)| if at % 2 == 0 { step } else { "[]" }).collect();
    let Some((_, hint)) = names.iter().find(|(name, _)| *name == plain) else { return error };
    let message = format!("`{param}` is not known: {hint}.");
    ApiError::invalid(error.param.clone(), ErrorCode::UnknownParameter, message)
}

fn read_exactly<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    if body.trim_ascii_start().starts_with(b"[") {
        return Err(ApiError::invalid(None, ErrorCode::InvalidType, "The body must be a JSON object, not an array."));
    }
    let mut json = serde_json::Deserializer::from_slice(body);
    let read = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        let error = error.into_inner();
        // That there is none of its words in the place of one is told as if there were no JSON.
        match error.is_data() || is_too_deep(&error) || serde_json::from_slice::<IgnoredAny>(body).is_err() {
            true => of_field("", &path, &error),
            false => wrong("", &path, "a value of another type is expected"),
        }
    })?;
    json.end().map_err(|error| no_json(&error))?;
    Ok(read)
}

/// Reads what stands at a path of a body.
///
/// # Errors
/// It is not of this type: names the first field at fault by its path in the body.
pub fn read_json<T: DeserializeOwned>(value: Value, path: &str) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let inner = error.path().to_string();
        of_field(path, &inner, &error.into_inner())
    })
}

/// An integer of 64 bits, which JSON may write with a point or an exponent: 16.0 and 1e3 are some.
#[must_use]
pub fn integer_of(number: &Number) -> Option<i64> {
    // What is cut by the cast is past the last integer that is one.
    let whole = |n: f64| (n.fract() == 0.0 && n.abs() < 2_f64.powi(63)).then_some(n as i64);
    number.as_i64().or_else(|| number.as_f64().and_then(whole))
}

/// Reads such an integer where a type has one of 0 and more.
///
/// # Errors
/// It is none.
pub fn read_integer<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    read_integer_of::<0, { u32::MAX }, D>(deserializer)
}

/// The same of one whose range is checked by who asks: an error about one that is past all types names that range.
///
/// # Errors
/// As [`read_integer`].
pub fn read_integer_of<'de, const LEAST: u32, const MOST: u32, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<u32>, D::Error> {
    let Some(number) = Option::<Number>::deserialize(deserializer)? else { return Ok(None) };
    let integer = integer_of(&number).and_then(|integer| u32::try_from(integer).ok());
    let unexpected =
        || D::Error::custom(format_args!("invalid value: {number}, expected an integer from {LEAST} to {MOST}"));
    integer.ok_or_else(unexpected).map(Some)
}

fn of_field(path: &str, inner: &str, error: &serde_json::Error) -> ApiError {
    if !error.is_data() {
        return no_json(error);
    }
    // The place in the text is of no use to who wrote an object.
    let said = error.to_string();
    let said = said.rsplit_once(" at line ").map_or(said.as_str(), |(said, _)| said);
    let (within, said) = placed(said);
    wrong(path, &joined(inner, within), said)
}

fn wrong(path: &str, inner: &str, said: &str) -> ApiError {
    let inner = if inner == "." { "" } else { inner };
    let (code, name) = fault(said);
    // What is missing, or unknown in a value of several kinds, is not part of its path.
    let name = name.filter(|name| code == ErrorCode::MissingRequiredParameter || !ends_with(inner, name));
    let steps = [path, inner, name.unwrap_or_default()];
    let at = steps.iter().filter(|step| !step.is_empty()).map(|step| shown(step, MAX_PATH_CHARS)).collect::<Vec<_>>();
    let at = at.join(".");
    if at.is_empty() {
        return ApiError::invalid(None, code, format!("The body {}.", in_words(&at, said)));
    }
    let message = format!("`{at}` {}.", in_words(&at, said));
    ApiError::invalid(Some(Cow::Owned(at)), code, message)
}

/// What serde says is wrong with the field at a path, in words for who writes JSON and does not read the sources.
fn in_words(at: &str, said: &str) -> String {
    // What is repeated of the body may have any words in it.
    let expected = |start: &str| said.strip_prefix(start)?.rsplit_once(", expected ");
    if let Some((got, expected)) = expected("invalid type: ") {
        return format!("must be {}, not {}", kind_expected(expected), kind_given(got));
    }
    if let Some((got, expected)) = expected("invalid value: ") {
        return format!("must be {}, not {}", kind_expected(expected), shown(got, MAX_VALUE_CHARS));
    }
    if let Some((got, expected)) = expected("unknown variant `") {
        return format!("must be {expected}, not `{}`", shown(got.trim_end_matches('`'), MAX_VALUE_CHARS));
    }
    if said.starts_with("unknown field `") {
        let known = expected("unknown field `").map_or("", |(_, known)| known);
        let name = fault(said).1.unwrap_or_default();
        // A name may have a point itself, and be cut.
        let place = at.strip_suffix(name).unwrap_or_default();
        return match nearest(name, known.split('`').skip(1).step_by(2)) {
            Some(meant) => format!("is not known: did you mean `{place}{meant}`? Otherwise leave it out"),
            None => "is not known: leave it out".to_owned(),
        };
    }
    match said {
        _ if said.starts_with("missing field `") => "is missing".to_owned(),
        _ if said.starts_with("duplicate field `") => "stands twice".to_owned(),
        other => format!("cannot be read: {}", shown(other, MAX_SAID_CHARS)),
    }
}

/// The name that is most like another, if any is like it.
pub fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // `maxTokens` is `max_tokens`.
    let plain = |name: &str| name.replace(['_', '-'], "").to_lowercase();
    // A client's may be of any length, and comparing takes time with it.
    let name = plain(&shown(name, MAX_VALUE_CHARS));
    let likeness = |known: &'a str| (strsim::jaro_winkler(&name, &plain(known)), known);
    let (likeness, nearest) = known.map(likeness).max_by(|(one, _), (other, _)| one.total_cmp(other))?;
    (likeness >= LEAST_LIKENESS).then_some(nearest)
}

fn kind_expected(words: &str) -> &str {
    let is_integer = words.trim_end_matches("size").trim_start_matches(['i', 'u']).parse::<u8>().is_ok();
    match words {
        "f32" | "f64" | "a JSON number" => "a number",
        "usize" | "isize" => "an integer",
        _ if is_integer => "an integer",
        "a boolean" => "true or false",
        "a map" => "an object",
        "a sequence" => "an array",
        "variant identifier" => "a word for its kind",
        _ if words.starts_with("struct ") => "an object",
        _ if words.starts_with("internally tagged enum ") || words.starts_with("adjacently tagged enum ") => {
            "an object with a `type`"
        }
        other => other,
    }
}

fn kind_given(words: &str) -> &str {
    match words.split(' ').next().unwrap_or_default() {
        "string" | "character" => "a string",
        "integer" => "an integer",
        "floating" => "a fractional number",
        "boolean" => "a boolean",
        "unit" | "null" | "Option" => "null",
        "map" => "an object",
        "sequence" => "an array",
        _ => "a value of another type",
    }
}

/// What is wrong, and with which field where the words say it.
fn fault(said: &str) -> (ErrorCode, Option<&str>) {
    let named = |start: &str| said.strip_prefix(start)?.split('`').next();
    if let Some(name) = named("missing field `") {
        return (ErrorCode::MissingRequiredParameter, Some(name));
    }
    if let Some(name) = named("unknown field `") {
        return (ErrorCode::UnknownParameter, Some(name));
    }
    if said.starts_with("invalid type: ") {
        return (ErrorCode::InvalidType, None);
    }
    (ErrorCode::InvalidValue, named("duplicate field `"))
}

fn ends_with(path: &str, name: &str) -> bool {
    path.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// What is repeated of what a client wrote, which may be of any length.
fn shown(text: &str, most_chars: usize) -> String {
    text.chars().take(most_chars).collect()
}

/// Nothing deeper is read, so that no body exhausts a stack; serde_json says so in words alone.
fn is_too_deep(error: &serde_json::Error) -> bool {
    error.to_string().starts_with("recursion limit exceeded")
}

/// Why a body cannot be read as JSON.
#[must_use]
pub fn no_json(error: &serde_json::Error) -> ApiError {
    if is_too_deep(error) {
        let message = format!("The body must not be nested deeper than {} levels: {error}.", MAX_DEPTH - 1);
        return ApiError::invalid(None, ErrorCode::InvalidJson, message);
    }
    ApiError::invalid(None, ErrorCode::InvalidJson, format!("The body is not valid JSON: {error}."))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    crate::from_objects!(Body);
    crate::from_typed_objects!(Block);

    #[derive(Debug, Deserialize)]
    #[serde(remote = "Self", deny_unknown_fields)]
    #[allow(dead_code)]
    struct Body {
        one: u32,
        #[serde(default, deserialize_with = "read_integer")]
        count: Option<u32>,
        word: Option<Word>,
        #[serde(default)]
        blocks: Vec<Block>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "snake_case")]
    enum Word {
        First,
    }

    #[derive(Debug, Deserialize)]
    #[serde(remote = "Self", rename_all = "snake_case", deny_unknown_fields)]
    #[allow(dead_code)]
    enum Block {
        Text { text: String },
        List { blocks: Vec<Block>, more: Option<bool> },
    }

    #[test]
    fn what_is_no_object_is_told_without_names_of_types() {
        let told = |body: &[u8]| read_body::<Body>(body).expect_err("it is wrong");
        let error = told(b" [1]");
        assert_eq!(
            (error.code, &*error.message),
            (ErrorCode::InvalidType, "The body must be a JSON object, not an array.")
        );
        for (body, words) in [
            (&br#"{"one": 1, "blocks": [3]}"#[..], "`blocks[0]` must be an object with a `type`, not an integer."),
            (br#"{"one": 1, "word": {}}"#, "a value of another type is expected"),
            (br#"3"#, "The body must be an object, not an integer."),
        ] {
            let message = told(body).message;
            assert!(message.contains(words) && !message.contains("struct") && !message.contains("Body"), "{message}");
        }
    }

    #[test]
    fn what_is_null_asks_for_nothing_whatever_its_name() {
        let body: Body =
            read_body(br#"{"one": 1, "later_than_this_release": null, "word": null}"#).expect("nulls are nothing");
        assert_eq!((body.one, body.word.is_none()), (1, true));
        for (body, name) in [
            (&br#"{"one": 1, "some": null, "other": 2}"#[..], "other"),
            (br#"{"one": 1, "blocks": [{"type": "text", "text": "a", "more": null}]}"#, "blocks[0].more"),
        ] {
            let error = read_body::<Body>(body).expect_err("it is wrong");
            assert_eq!((error.code, error.param.as_deref()), (ErrorCode::UnknownParameter, Some(name)));
        }
    }

    #[test]
    fn errors_name_the_field_that_is_wrong_missing_or_unknown() {
        use ErrorCode::{InvalidType, InvalidValue, MissingRequiredParameter, UnknownParameter};
        for (body, param, code) in [
            (json!({}), Some("one"), MissingRequiredParameter),
            (json!({"one": "a"}), Some("one"), InvalidType),
            (json!({"one": 1, "two": 2}), Some("two"), UnknownParameter),
            (json!({"one": 1, "blocks": [{"type": "text"}]}), Some("blocks[0].text"), MissingRequiredParameter),
            (
                json!({"one": 1, "blocks": [{"type": "text", "text": "a", "b": 1}]}),
                Some("blocks[0].b"),
                UnknownParameter,
            ),
            (json!({"one": 1, "blocks": [{}]}), Some("blocks[0].type"), MissingRequiredParameter),
            (json!({"one": 1, "blocks": [{"type": "b"}]}), Some("blocks[0].type"), InvalidValue),
            (json!({"one": 1, "blocks": [{"type": ""}]}), Some("blocks[0].type"), InvalidValue),
            (json!({"one": 1, "blocks": [{"type": 1}]}), Some("blocks[0].type"), InvalidType),
            (json!({"one": 1, "blocks": [["text", "a"]]}), Some("blocks[0]"), InvalidType),
            (
                json!({"one": 1, "blocks": [{"type": "list", "blocks": [], "more": 1}]}),
                Some("blocks[0].more"),
                InvalidType,
            ),
            (
                json!({"one": 1, "blocks": [{"type": "list", "blocks": [{"type": "text", "text": "a"}, {"type": "text", "text": 1}]}]}),
                Some("blocks[0].blocks[1].text"),
                InvalidType,
            ),
            (
                json!({"one": 1, "blocks": [{"type": "list", "blocks": [{"type": "b"}]}]}),
                Some("blocks[0].blocks[0].type"),
                InvalidValue,
            ),
            (json!({"one": 1, "word": "second"}), Some("word"), InvalidValue),
            (json!({"one": 1, "word": 7}), Some("word"), InvalidValue),
            (json!({"one": 1, "count": 7.5}), Some("count"), InvalidValue),
            (json!({"one": 1, "count": -1}), Some("count"), InvalidValue),
            (json!({"one": 1, "count": 1_u64 << 32}), Some("count"), InvalidValue),
            (json!({"one": 1, "count": "7"}), Some("count"), InvalidType),
            (json!([]), None, InvalidType),
        ] {
            let error = read_body::<Body>(body.to_string().as_bytes()).expect_err("it is wrong");
            assert_eq!((error.param.as_deref(), error.code.clone()), (param, code), "{body}: {error}");
        }
    }

    #[test]
    fn errors_say_what_is_wanted_and_what_came() {
        let named = [("messages", "it is `one` here"), ("blocks[].texts", "a block has one")];
        for (body, told) in [
            (json!({"one": "a"}), "`one` must be an integer, not a string."),
            (json!({"one": 1.5}), "`one` must be an integer, not a fractional number."),
            (json!({"one": 1, "blocks": {}}), "`blocks` must be an array, not an object."),
            (json!({"one": 1, "word": "second"}), "`word` must be `first`, not `second`."),
            (
                json!({"one": 1, "blocks": [{"type": "b`, expected c"}]}),
                "`blocks[0].type` must be `text` or `list`, not `b",
            ),
            (json!({"one": 1, "count": 7.5}), "`count` must be an integer from 0 to 4294967295, not 7.5."),
            (json!({}), "`one` is missing."),
            (json!({"one": 1, "cuont": 1}), "`cuont` is not known: did you mean `count`? Otherwise leave it out."),
            (json!({"one": 1, "zzz": 1}), "`zzz` is not known: leave it out."),
            (json!({"one": 1, "messages": []}), "`messages` is not known: it is `one` here."),
            (
                json!({"one": 1, "blocks": [{"type": "text", "text": "a", "texts": 1}]}),
                "`blocks[0].texts` is not known: a block has one.",
            ),
            (
                json!({"one": 1, "blocks": [{"type": "list", "blocks": [], "mor": 1}]}),
                "`blocks[0].mor` is not known: did you mean `blocks[0].more`? Otherwise leave it out.",
            ),
        ] {
            let error = read_body::<Body>(body.to_string().as_bytes()).expect_err("it is wrong");
            let error = with_name_here(error, &named);
            assert!(error.message.starts_with(told), "{body}: {error}");
        }
        let deep = format!("{}{}", "[".repeat(200), "]".repeat(200));
        let error = no_json(&serde_json::from_str::<Value>(&deep).expect_err("it is too deep"));
        assert!(error.message.starts_with("The body must not be nested deeper than 127 levels"), "{error}");
    }

    #[test]
    fn a_name_that_stands_twice_is_named() {
        for (body, param) in [
            (r#"{"one": 1, "one": 2}"#, "one"),
            (r#"{"one": 1, "blocks": [{"type": "text", "text": "a", "text": "b"}]}"#, "blocks[0].text"),
            (r#"{"one": 1, "blocks": [{"type": "text", "text": "a", "type": "text"}]}"#, "blocks[0].type"),
        ] {
            let error = read_body::<Body>(body.as_bytes()).expect_err("it is wrong");
            assert_eq!((error.param.as_deref(), error.code.clone()), (Some(param), ErrorCode::InvalidValue), "{error}");
        }
    }

    #[test]
    fn integers_may_be_written_as_json_writes_numbers() {
        for (text, count) in [("16", Some(16)), ("16.0", Some(16)), ("1e3", Some(1000)), ("null", None)] {
            let body = format!("{{\"one\": 1, \"count\": {text}}}");
            assert_eq!(read_body::<Body>(body.as_bytes()).expect("it is right").count, count, "{text}");
        }
        let of = |text: &str| integer_of(&serde_json::from_str(text).expect("a number"));
        assert_eq!(
            (of("-2.0"), of("1e18"), of("9223372036854775807")),
            (Some(-2), Some(10_i64.pow(18)), Some(i64::MAX))
        );
        assert_eq!((of("1e19"), of("0.5"), of("18446744073709551615"), of("-1e300")), (None, None, None, None));
    }

    #[test]
    fn what_is_no_json_is_told_so() {
        for body in ["", "{", "{\"word\": ", "{\"one\": 1} 2", "{\"word\": 7, \"one\": }"] {
            let error = read_body::<Body>(body.as_bytes()).expect_err("it is wrong");
            assert_eq!((error.param.as_deref(), error.code), (None, ErrorCode::InvalidJson), "{body}");
        }
        let first = read_body::<Body>(br#"{"one": 1, "word": "first"}"#).expect("it is right");
        assert!(matches!(first.word, Some(Word::First)));
    }

    #[test]
    fn a_name_of_any_length_is_compared_in_no_time() {
        let body = json!({"one": 1, "x".repeat(8 << 20): 1}).to_string();
        let began = std::time::Instant::now();
        let error = read_body::<Body>(body.as_bytes()).expect_err("it is wrong");
        assert_eq!(error.code, ErrorCode::UnknownParameter);
        assert!(began.elapsed() < std::time::Duration::from_secs(2), "{:?}", began.elapsed());
    }

    #[test]
    fn of_what_a_client_wrote_an_error_repeats_little() {
        let long = "x".repeat(100_000);
        for body in [json!({"one": long}), json!({long.as_str(): 1}), json!({"one": 1, "blocks": [{"type": long}]})] {
            let error = read_body::<Body>(body.to_string().as_bytes()).expect_err("it is wrong");
            assert!(error.to_string().len() < 2000, "{}", error.to_string().len());
            assert!(error.param.is_some_and(|param| param.len() < 600));
        }
    }

    #[test]
    fn memory_is_told_from_the_signs_of_a_text() {
        let of = |text: &str| json_memory_bytes(text.as_bytes());
        assert_eq!(of("[[0],[0]]"), MEMBER_BYTES + 3 * LIST_BYTES + MEMBER_BYTES);
        assert_eq!(
            of(r#"{"a":1,"b":[1,2]}"#),
            MEMBER_BYTES + OBJECT_BYTES + 2 * TEXT_BYTES + FIELD_BYTES + LIST_BYTES + MEMBER_BYTES
        );
        assert_eq!(of(r#"["[[,\"{,","\\"]"#), MEMBER_BYTES + LIST_BYTES + 2 * TEXT_BYTES + MEMBER_BYTES);
        // What is no JSON is bounded, too, and deeper than anybody reads.
        assert_eq!(of(&"]".repeat(1000)), MEMBER_BYTES);
        assert_eq!(of(&"{".repeat(1000)), MEMBER_BYTES + 1000 * OBJECT_BYTES);
        assert_eq!(of(&format!("{}1,", "[".repeat(200))), MEMBER_BYTES + 200 * LIST_BYTES + MEMBER_BYTES);
    }
}

//! The key-value part of a header.
//!
//! Flow: [`read_metadata`] walks all keys once. Numbers, bools and short strings are kept; of long strings and arrays
//! only the length is, except for the few per-layer arrays named in [`KEPT_ARRAYS`]. Absent: the tokenizer's contents, of
//! which [`crate::scan`] keeps what they are judged by.

use std::collections::HashMap;
use std::collections::hash_map::Entry as MapEntry;
use std::fmt;
use std::io::Read;

use crate::error::{Defect, Result, malformed, printable};
use crate::finding::Log;
use crate::limits::{
    MAX_ALL_KEY_BYTES, MAX_ARRAY_ELEMENTS, MAX_KEPT_STRING_BYTES, MAX_KEY_BYTES, MAX_LAYERS, MAX_STRING_BYTES,
    MAX_VOCABULARY,
};
use crate::scan::{Scan, TOKENS_KEY};
use crate::source::{Source, Utf8Check};

/// Ends of the keys whose integer arrays are kept: one element per layer.
const KEPT_ARRAYS: [&str; 5] = [
    ".attention.head_count",
    ".attention.head_count_kv",
    ".feed_forward_length",
    ".expert_feed_forward_length",
    ".expert_used_count",
];

/// Fewest bytes that a key with its value takes: length, one character, type, one byte.
pub(crate) const MIN_ENTRY_BYTES: u64 = 8 + 1 + 4 + 1;

/// Type of a value, as GGUF numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are the format's own")]
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::String,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    fn from_id(id: u32) -> Option<Self> {
        Self::ALL.get(usize::try_from(id).ok()?).copied()
    }

    /// Bytes of one element; for strings the fewest, which is their length field.
    fn min_bytes(self) -> u64 {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::String => 8,
            Self::Array => 12,
        }
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::F32 => "f32",
            Self::Bool => "bool",
            Self::String => "string",
            Self::Array => "array",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F64 => "f64",
        })
    }
}

/// A value, or what is kept of it.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// An integer of any width that the format has.
    Integer {
        /// Its type in the file.
        kind: ValueType,
        /// Its value; `u64` values above `i64::MAX` are clamped to it.
        value: i64,
    },
    /// A floating-point number.
    Float {
        /// Its type in the file.
        kind: ValueType,
        /// Its value.
        value: f64,
    },
    /// A bool.
    Bool(bool),
    /// A text.
    Text {
        /// Its length in bytes.
        bytes: u64,
        /// The text, if it has at most [`MAX_KEPT_STRING_BYTES`].
        text: Option<String>,
    },
    /// An array.
    Array {
        /// Type of its elements.
        element: ValueType,
        /// How many there are.
        length: u64,
        /// The elements of the few per-layer integer arrays that are kept.
        kept: Option<Vec<i64>>,
    },
}

impl Value {
    /// Its type in the file.
    #[must_use]
    pub fn kind(&self) -> ValueType {
        match self {
            Self::Integer { kind, .. } | Self::Float { kind, .. } => *kind,
            Self::Bool(_) => ValueType::Bool,
            Self::Text { .. } => ValueType::String,
            Self::Array { .. } => ValueType::Array,
        }
    }

    /// Its type in words, with the elements' type of an array.
    pub(crate) fn type_name(&self) -> String {
        match self {
            Self::Array { element, .. } => format!("array of {element}"),
            other => other.kind().to_string(),
        }
    }
}

/// A value and the byte of the file where its key stands.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Entry {
    pub(crate) offset: u64,
    pub(crate) value: Value,
}

/// All keys of a header.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Metadata {
    entries: HashMap<String, Entry>,
}

impl Metadata {
    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entries.get(key).map(|entry| &entry.value)
    }

    /// How many keys there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// A key that both have with different values, and where it stands here; the key `but` does not count.
    pub(crate) fn difference(&self, other: &Self, but: &str) -> Option<(u64, String)> {
        let differs = |(key, entry): &(&String, &Entry)| {
            key.as_str() != but && other.entry(key).is_some_and(|other| other.value != entry.value)
        };
        // Always the same one of several.
        let first = self.entries.iter().filter(differs).min_by_key(|(_, entry)| entry.offset)?;
        Some((first.1.offset, printable(first.0)))
    }

    /// All keys, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.entries.iter().map(|(key, entry)| (key.as_str(), entry))
    }

    pub(crate) fn entry(&self, key: &str) -> Option<&Entry> {
        self.entries.get(key)
    }

    /// The text of a key, if it is a short string.
    #[must_use]
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.get(key)? {
            Value::Text { text, .. } => text.as_deref(),
            _ => None,
        }
    }
}

/// Reads `count` keys and values.
pub(crate) fn read_metadata<R: Read>(source: &mut Source<R>, count: u64, log: &mut Log) -> Result<(Metadata, Scan)> {
    let (mut metadata, mut scan) = (Metadata::default(), Scan::default());
    let mut key_bytes = 0;
    for _ in 0..count {
        let offset = source.offset();
        let key = read_key(source, log)?;
        // The header's limit keeps the sum far below overflow.
        key_bytes += key.len() as u64;
        if key_bytes > MAX_ALL_KEY_BYTES {
            return malformed(offset, Defect::KeysTooLong { length: key_bytes, limit: MAX_ALL_KEY_BYTES });
        }
        // What an array says for the second time is not put to what it said for the first.
        let mut again = Scan::default();
        let scan = if metadata.entries.contains_key(&key) { &mut again } else { &mut scan };
        let value = read_value(source, &key, scan, log)?;
        match metadata.entries.entry(key) {
            // An empty one was told of, and two of them are no second thing.
            MapEntry::Occupied(taken) if taken.key().is_empty() => {}
            MapEntry::Occupied(taken) => log.defect(offset, Defect::DuplicateKey { key: printable(taken.key()) }),
            MapEntry::Vacant(free) => _ = free.insert(Entry { offset, value }),
        }
    }
    Ok((metadata, scan))
}

fn read_key<R: Read>(source: &mut Source<R>, log: &mut Log) -> Result<String> {
    let offset = source.offset();
    let length = source.u64("a key")?;
    if length > MAX_KEY_BYTES {
        return malformed(offset, Defect::KeyTooLong { length, limit: MAX_KEY_BYTES });
    }
    if length == 0 {
        log.defect(offset, Defect::EmptyKey);
    }
    let mut bytes = Vec::new();
    source.read_to(&mut bytes, length, "a key")?;
    let key = String::from_utf8(bytes).unwrap_or_else(|error| {
        log.defect(offset, Defect::KeyNotUtf8);
        String::from_utf8_lossy(error.as_bytes()).into_owned()
    });
    if key.chars().any(char::is_control) {
        log.defect(offset, Defect::ControlInKey { key: printable(&key) });
    }
    Ok(key)
}

fn read_value<R: Read>(source: &mut Source<R>, key: &str, scan: &mut Scan, log: &mut Log) -> Result<Value> {
    let offset = source.offset();
    let id = source.u32("a value's type")?;
    let Some(kind) = ValueType::from_id(id) else {
        return malformed(offset, Defect::UnknownValueType { key: printable(key), found: id });
    };
    match kind {
        ValueType::String => read_text(source, key, log),
        ValueType::Array => read_array(source, key, scan, log),
        ValueType::Bool => match source.bytes::<1>("a bool")? {
            [0] => Ok(Value::Bool(false)),
            [1] => Ok(Value::Bool(true)),
            [found] => {
                log.defect(offset, Defect::InvalidBool { key: printable(key), found });
                Ok(Value::Bool(true))
            }
        },
        ValueType::F32 => Ok(Value::Float { kind, value: f32::from_le_bytes(source.bytes("a number")?).into() }),
        ValueType::F64 => Ok(Value::Float { kind, value: f64::from_le_bytes(source.bytes("a number")?) }),
        _ => Ok(Value::Integer { kind, value: read_integer(source, kind)? }),
    }
}

fn read_integer<R: Read>(source: &mut Source<R>, kind: ValueType) -> Result<i64> {
    const WHAT: &str = "a number";
    Ok(match kind {
        ValueType::U8 => u8::from_le_bytes(source.bytes(WHAT)?).into(),
        ValueType::I8 => i8::from_le_bytes(source.bytes(WHAT)?).into(),
        ValueType::U16 => u16::from_le_bytes(source.bytes(WHAT)?).into(),
        ValueType::I16 => i16::from_le_bytes(source.bytes(WHAT)?).into(),
        ValueType::U32 => u32::from_le_bytes(source.bytes(WHAT)?).into(),
        ValueType::I32 => i32::from_le_bytes(source.bytes(WHAT)?).into(),
        ValueType::U64 => i64::try_from(source.u64(WHAT)?).unwrap_or(i64::MAX),
        _ => i64::from_le_bytes(source.bytes(WHAT)?),
    })
}

fn read_text<R: Read>(source: &mut Source<R>, key: &str, log: &mut Log) -> Result<Value> {
    let offset = source.offset();
    let length = source.u64("a string")?;
    if length > MAX_STRING_BYTES {
        return malformed(offset, Defect::StringTooLong { key: printable(key), length, limit: MAX_STRING_BYTES });
    }
    let not_utf8 = || Defect::StringNotUtf8 { key: printable(key) };
    if length <= MAX_KEPT_STRING_BYTES {
        let mut bytes = Vec::new();
        source.read_to(&mut bytes, length, "a string")?;
        let text = String::from_utf8(bytes).unwrap_or_else(|error| {
            log.defect(offset, not_utf8());
            String::from_utf8_lossy(error.as_bytes()).into_owned()
        });
        return Ok(Value::Text { bytes: length, text: Some(text) });
    }
    let mut check = Utf8Check::default();
    source.chunks(length, "a string", |piece| check.feed(piece))?;
    if !check.finish() {
        log.defect(offset, not_utf8());
    }
    Ok(Value::Text { bytes: length, text: None })
}

fn read_array<R: Read>(source: &mut Source<R>, key: &str, scan: &mut Scan, log: &mut Log) -> Result<Value> {
    let offset = source.offset();
    let id = source.u32("an array's type")?;
    let element = match ValueType::from_id(id) {
        Some(ValueType::Array) => return malformed(offset, Defect::NestedArray { key: printable(key) }),
        Some(element) => element,
        None => return malformed(offset, Defect::UnknownElementType { key: printable(key), found: id }),
    };
    let length = source.u64("an array's length")?;
    let limit = if key == TOKENS_KEY { MAX_VOCABULARY } else { MAX_ARRAY_ELEMENTS };
    if length > limit {
        return malformed(offset, Defect::ArrayTooLong { key: printable(key), length, limit });
    }
    source.require(length.saturating_mul(element.min_bytes()), "an array")?;
    let mut kept = None;
    if scan.array(source, key, element, length, log)? {
        return Ok(Value::Array { element, length, kept });
    }
    match element {
        ValueType::String => skip_strings(source, key, length)?,
        ValueType::F32 | ValueType::F64 | ValueType::Bool => {
            source.skip(length.saturating_mul(element.min_bytes()), "an array")?;
        }
        _ if length <= u64::from(MAX_LAYERS) && KEPT_ARRAYS.iter().any(|end| key.ends_with(end)) => {
            let mut elements = Vec::new();
            for _ in 0..length {
                elements.push(read_integer(source, element)?);
            }
            kept = Some(elements);
        }
        _ => source.skip(length.saturating_mul(element.min_bytes()), "an array")?,
    }
    Ok(Value::Array { element, length, kept })
}

/// Elements are not checked for UTF-8: some tokenizers hold raw bytes, and llama.cpp takes them as such.
fn skip_strings<R: Read>(source: &mut Source<R>, key: &str, count: u64) -> Result<()> {
    for _ in 0..count {
        let offset = source.offset();
        let length = source.u64("an array of strings")?;
        if length > MAX_STRING_BYTES {
            return malformed(offset, Defect::StringTooLong { key: printable(key), length, limit: MAX_STRING_BYTES });
        }
        source.skip(length, "an array of strings")?;
    }
    Ok(())
}

//! What can be wrong with a file, each with its place and a sentence that says what to do.
//!
//! Flow: a reader returns [`GgufError`]; a defect of the file itself is a [`Defect`] with the byte where it stands.
//! Names out of the file are clipped and escaped before they enter a message, for they end in logs and terminals.

use std::io;

use crate::limits::{MAX_NAME_IN_MESSAGE, MAX_TENSOR_NAME_BYTES};

/// Why no valid header could be read.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The file could not be opened or read.
    #[error("cannot read the model file at byte {offset}: {source}")]
    Io {
        /// Where reading stopped.
        offset: u64,
        /// The system's reason.
        source: io::Error,
    },
    /// The bytes given so far are right, but the header goes on: give at least this many from the file's start.
    #[error("the header goes on past the bytes at hand: at least the first {at_least} bytes of the file are needed")]
    NeedMoreBytes {
        /// A lower bound of the header's length; doubling what was given reaches the end in few steps.
        at_least: u64,
    },
    /// One of the files of which a model consists cannot be read, or is not what belongs there.
    #[error("part {number} of {count}, {name}: {source}; all parts of a model must lie beside the first")]
    Part {
        /// The file's name.
        name: String,
        /// Which it is, from 1.
        number: u64,
        /// How many there are.
        count: u64,
        /// What is wrong with it.
        source: Box<GgufError>,
    },
    /// The file is not a model that can be served.
    #[error("{defect} (at byte {offset})")]
    Malformed {
        /// Byte of the file where the defect stands.
        offset: u64,
        /// What is wrong and what to do.
        defect: Defect,
    },
}

impl GgufError {
    /// The defect, if the file itself is what is wrong.
    #[must_use]
    pub fn defect(&self) -> Option<&Defect> {
        match self {
            Self::Malformed { defect, .. } => Some(defect),
            Self::Part { source, .. } => source.defect(),
            Self::Io { .. } | Self::NeedMoreBytes { .. } => None,
        }
    }
}

/// Result of every reading step.
pub(crate) type Result<T> = std::result::Result<T, GgufError>;

/// Shorthand of the reading steps: a defect at a byte.
pub(crate) fn malformed<T>(offset: u64, defect: Defect) -> Result<T> {
    Err(GgufError::Malformed { offset, defect })
}

/// A name out of the file, short and without control characters.
pub(crate) fn printable(name: &str) -> String {
    let mut clipped: String = name.chars().take(MAX_NAME_IN_MESSAGE).flat_map(char::escape_debug).collect();
    if name.chars().nth(MAX_NAME_IN_MESSAGE).is_some() {
        clipped.push('…');
    }
    clipped
}

/// One thing that is wrong with a file.
///
/// Field names say what they hold: `key` and `tensor` name the entry, `limit` is one of [`crate::limits`],
/// `expected` and `found` are what the rest of the file implies and what stands there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message is its documentation; the fields are described above")]
pub enum Defect {
    // The file as a whole.
    #[error("this is not a GGUF file: it starts with \"{}\", not \"GGUF\"; {hint}", found.escape_ascii())]
    BadMagic { found: [u8; 4], hint: &'static str },
    #[error(
        "this is a {format} file, from before GGUF; convert the original weights again with llama.cpp's convert_hf_to_gguf.py"
    )]
    OldFormat { format: &'static str },
    #[error(
        "this GGUF file is big-endian; convert it with gguf-py's gguf_convert_endian.py, or download the little-endian file"
    )]
    BigEndian,
    #[error(
        "GGUF version {version} is not supported, only 2 and 3 are; convert the model again with a current llama.cpp"
    )]
    UnsupportedVersion { version: u32 },
    #[error("the file ends inside {what}: {needed} bytes are needed and it has {file_bytes}; download it again")]
    HeaderTruncated { what: &'static str, needed: u64, file_bytes: u64 },
    #[error("the header is longer than {limit} bytes; no known model needs that: check the source of the file")]
    HeaderTooLong { limit: u64 },
    #[error(
        "the header announces {keys} keys and {tensors} tensors, which cannot fit into the file's {file_bytes} bytes; download it again"
    )]
    CountsBeyondFile { keys: u64, tensors: u64, file_bytes: u64 },
    #[error("the header announces {count} keys, the limit is {limit}; check the source of the file")]
    TooManyKeys { count: u64, limit: u64 },
    #[error("the header announces {count} tensors, the limit is {limit}; check the source of the file")]
    TooManyTensors { count: u64, limit: u64 },
    #[error("the file holds no tensors: it is a vocabulary or a first split; give the file that holds the weights")]
    NoTensors,
    #[error(
        "this file is one of {count} parts of a model, of which only the first can be seen here; join them with llama-gguf-split --merge and give the joined file"
    )]
    SplitFile { count: u64 },
    #[error("this is part {number} of a model of {count}; give the first one, whose name ends with {expected}")]
    NotTheFirstSplit { number: u64, count: u64, expected: String },
    #[error(
        "this is the first of {count} parts of a model, but its name does not end with {expected}, so that the others cannot be found; rename it as its makers did"
    )]
    SplitName { count: u64, expected: String },
    #[error("the file says that it is part {number} of {count}; download it again")]
    SplitNumber { number: u64, count: u64 },
    #[error("the model says that it has {count} parts, the limit is {limit}; check the source of the file")]
    TooManySplits { count: u64, limit: u64 },
    #[error("the file says that it is {found}, not part {number} of {count}; download it again")]
    WrongSplit { found: String, number: u64, count: u64 },
    #[error(
        "its key \"{key}\" is not what the first part says, so that it is of another model; download the parts again"
    )]
    ForeignSplit { key: String },
    #[error("the parts of the model hold {found} tensors, but the first one says {expected}; download them again")]
    SplitTensors { found: u64, expected: u64 },
    #[error("the file says that it holds a{} {kind}, not a model; give the language model's own file", article(.kind))]
    NotAModel { kind: String },

    // Keys and values.
    #[error("a key's name has {length} bytes, the limit is {limit}; the file is damaged: download it again")]
    KeyTooLong { length: u64, limit: u64 },
    #[error("the names of all keys have {length} bytes and more, the limit is {limit}; check the source of the file")]
    KeysTooLong { length: u64, limit: u64 },
    #[error("a key has an empty name; the file is damaged: download it again")]
    EmptyKey,
    #[error("a key's name is not UTF-8; the file is damaged: download it again")]
    KeyNotUtf8,
    #[error("key \"{key}\" has a control character in its name; the file is damaged: download it again")]
    ControlInKey { key: String },
    #[error(
        "key \"{key}\" stands in the header twice; remove one with gguf-py's gguf_new_metadata.py or convert the model again"
    )]
    DuplicateKey { key: String },
    #[error(
        "key \"{key}\" has the value type {found}, which GGUF does not define; the file is damaged: download it again"
    )]
    UnknownValueType { key: String, found: u32 },
    #[error("key \"{key}\" is a bool with the value {found}, but only 0 and 1 are bools; convert the model again")]
    InvalidBool { key: String, found: u8 },
    #[error("the string of key \"{key}\" has {length} bytes, the limit is {limit}; check the source of the file")]
    StringTooLong { key: String, length: u64, limit: u64 },
    #[error("the string of key \"{key}\" is not UTF-8; convert the model again")]
    StringNotUtf8 { key: String },
    #[error("key \"{key}\" is an array of arrays, which llama.cpp cannot read; convert the model again")]
    NestedArray { key: String },
    #[error(
        "the array of key \"{key}\" has the element type {found}, which GGUF does not define; download the file again"
    )]
    UnknownElementType { key: String, found: u32 },
    #[error("the array of key \"{key}\" has {length} elements, the limit is {limit}; check the source of the file")]
    ArrayTooLong { key: String, length: u64, limit: u64 },
    #[error(
        "tokens {first} and {second} of the vocabulary have the same text, on which llama.cpp aborts; convert the model again"
    )]
    DuplicateToken { first: u32, second: u32 },
    #[error("key \"{key}\" is {found}, but there are only {tokens} tokens; convert the model again")]
    TokenBeyondVocabulary { key: String, found: i64, tokens: u64 },
    #[error("token {token} has the type {found}, which llama.cpp does not define (0 to 6); convert the model again")]
    UnknownTokenType { token: u32, found: i32 },
    #[error("the score of token {token} is no number; convert the model again")]
    WrongScore { token: u32 },
    #[error(
        "token {token} is marked as a byte, but its text is not one such as <0x0A>, on which llama.cpp aborts; convert the model again"
    )]
    NoByteToken { token: u32 },
    #[error(
        "{key} says that {what} be put around each text, but no token is that one, on which llama.cpp aborts; convert the model again"
    )]
    MissingToken { key: &'static str, what: &'static str },
    #[error("merge {merge} does not name two pieces with a space between them; convert the model again")]
    InvalidMerge { merge: u32 },
    #[error(
        "{unknown} of {merges} merges make no token of the vocabulary, so that text would be lost; merges and tokens are not of one model: convert it again"
    )]
    ForeignMerges { unknown: usize, merges: usize },
    #[error(
        "the character map has {found} bytes, of which its first part would take {expected}; convert the model again"
    )]
    InvalidCharacterMap { found: u64, expected: u64 },
    #[error("general.alignment is {found}; it must be a power of two from {min} to {max}: convert the model again")]
    InvalidAlignment { found: u64, min: u64, max: u64 },
    #[error("key \"{key}\" is missing, and llama.cpp needs it; convert the model again with a current llama.cpp")]
    MissingKey { key: String },
    #[error("key \"{key}\" has the type {found}, but must be {expected}; convert the model again")]
    WrongKeyType { key: String, found: String, expected: &'static str },
    #[error("key \"{key}\" is {found}, but must lie from {min} to {max}; convert the model again")]
    KeyOutOfRange { key: String, found: i64, min: i64, max: i64 },
    #[error(
        "key \"{key}\" is {found}, which nothing can be computed with: not finite, negative where it cannot be, or next to nothing where positions are divided by it; convert the model again"
    )]
    WrongFraction { key: String, found: String },
    #[error(
        "the array of key \"{key}\" has {found} elements, but the model implies {expected}; convert the model again"
    )]
    WrongArrayLength { key: String, found: u64, expected: u64 },
    #[error("key \"{key}\" has the text \"{found}\", but must be one of {expected}; convert the model again")]
    UnknownText { key: String, found: String, expected: &'static str },
    #[error("this build of llama.cpp knows no architecture \"{found}\"; update Gantry or choose another model")]
    UnknownArchitecture { found: String },
    #[error(
        "architecture \"{found}\" is {what}, not a language model that answers alone; give the language model's own file"
    )]
    NotALanguageModel { found: String, what: &'static str },
    #[error(
        "key \"{key}\" is \"{found}\", a tokenizer that this build of llama.cpp does not know; update Gantry or choose another model"
    )]
    UnknownTokenizer { key: String, found: String },
    #[error(
        "key \"tokenizer.ggml.model\" is \"{found}\", but {marked} of {tokens} tokens begin with Ġ, as only those of byte-level \
         byte-pair encoding (\"gpt2\") do, so that no text would become the tokens that the model was trained with; convert the \
         model again"
    )]
    ForeignTokenizer { found: String, marked: usize, tokens: usize },
    #[error("the hyperparameters contradict each other: {what}; convert the model again")]
    Inconsistent { what: String },

    // Tensors.
    #[error(
        "a tensor's name has {length} bytes and must be shorter than {MAX_TENSOR_NAME_BYTES}; download the file again"
    )]
    TensorNameTooLong { length: u64 },
    #[error("a tensor has an empty name; the file is damaged: download it again")]
    EmptyTensorName,
    #[error("a tensor's name is not UTF-8; the file is damaged: download it again")]
    TensorNameNotUtf8,
    #[error("tensor \"{tensor}\" has a control character in its name; download the file again")]
    ControlInTensorName { tensor: String },
    #[error("tensor \"{tensor}\" stands in the header twice; convert the model again")]
    DuplicateTensor { tensor: String },
    #[error("tensor \"{tensor}\" has {found} dimensions, but must have 1 to 4; download the file again")]
    WrongDimensionCount { tensor: String, found: u32 },
    #[error("dimension {dimension} of tensor \"{tensor}\" is zero; convert the model again")]
    ZeroDimension { tensor: String, dimension: u32 },
    #[error("tensor \"{tensor}\" of shape {shape:?} has more elements than 63 bits count; download the file again")]
    TensorTooLarge { tensor: String, shape: Vec<u64> },
    #[error(
        "tensor \"{tensor}\" has the type {found}, which this build of ggml does not know; update Gantry or quantise the model again"
    )]
    UnknownTensorType { tensor: String, found: u32 },
    #[error("tensor \"{tensor}\" has the type {name}, which ggml has removed; quantise the model again ({instead})")]
    RemovedTensorType { tensor: String, name: &'static str, instead: &'static str },
    #[error(
        "tensor \"{tensor}\" has the type {found}, with which llama.cpp cannot compute here; it must be {expected}: quantise the model again"
    )]
    UnusableTensorType { tensor: String, found: &'static str, expected: &'static str },
    #[error(
        "tensor \"{tensor}\" of type {kind} has rows of {row} elements, not a multiple of its block of {block}; quantise the model again"
    )]
    PartialBlock { tensor: String, kind: &'static str, row: u64, block: u64 },
    #[error(
        "tensor \"{tensor}\" starts at {found} of the tensor data, not a multiple of the alignment {alignment}; download the file again"
    )]
    MisalignedTensor { tensor: String, found: u64, alignment: u64 },
    #[error(
        "tensor \"{tensor}\" starts at {found} of the tensor data, inside the tensor before it, which ends at {expected}; its shape, type or offset is wrong: download the file again"
    )]
    TensorOverlap { tensor: String, found: u64, expected: u64 },
    #[error(
        "tensor \"{tensor}\" starts at {found} of the tensor data, but the tensor before it ends at {expected}; a shape, type or offset is wrong: download the file again"
    )]
    TensorGap { tensor: String, found: u64, expected: u64 },
    #[error(
        "the file is cut short: its tensors end at byte {expected} and it has {found} bytes (tensor \"{tensor}\" is the first that is not whole); download it again"
    )]
    DataTruncated { tensor: String, expected: u64, found: u64 },
    #[error(
        "the file has {found} bytes, but its tensors end at byte {expected}; a shape or type is wrong, or foreign bytes follow: download it again"
    )]
    TrailingBytes { expected: u64, found: u64 },
    #[error("tensor \"{tensor}\" is missing; convert the model again")]
    MissingTensor { tensor: String },
    #[error(
        "tensor \"{tensor}\" has the shape {found:?}, but the hyperparameters imply {expected}; convert the model again"
    )]
    WrongShape { tensor: String, found: Vec<u64>, expected: String },
    #[error("{} to no layer, for the model has {layers}; convert the model again", belong(tensor, *others))]
    LayerBeyondModel { tensor: String, others: usize, layers: u32 },
    #[error("{} no tensors; the file is incomplete: convert the model again", layers_have(*first, *last, *layers))]
    MissingLayers { first: u32, last: u32, layers: u32 },
}

fn belong(tensor: &str, others: usize) -> String {
    match others {
        0 => format!("tensor \"{tensor}\" belongs"),
        _ => format!("tensor \"{tensor}\" and {others} more belong"),
    }
}

fn layers_have(first: u32, last: u32, layers: u32) -> String {
    match last == first {
        true => format!("layer {first} of {layers} has"),
        false => format!("layers {first} to {last} of {layers} have"),
    }
}

impl Defect {
    /// The part of the file that it is in, for a report: `tokenizer` or `header`.
    #[must_use]
    pub fn part(&self) -> &'static str {
        let of_tokenizer = match self {
            Self::MissingKey { key }
            | Self::WrongKeyType { key, .. }
            | Self::WrongArrayLength { key, .. }
            | Self::ArrayTooLong { key, .. }
            | Self::StringTooLong { key, .. } => key.starts_with("tokenizer."),
            Self::DuplicateToken { .. }
            | Self::ForeignMerges { .. }
            | Self::ForeignTokenizer { .. }
            | Self::InvalidCharacterMap { .. }
            | Self::InvalidMerge { .. }
            | Self::MissingToken { .. }
            | Self::NoByteToken { .. }
            | Self::TokenBeyondVocabulary { .. }
            | Self::UnknownTokenType { .. }
            | Self::UnknownTokenizer { .. }
            | Self::WrongScore { .. } => true,
            _ => false,
        };
        if of_tokenizer { "tokenizer" } else { "header" }
    }
}

fn article(kind: &str) -> &'static str {
    if kind.starts_with(['a', 'e', 'i', 'o', 'u']) { "n" } else { "" }
}

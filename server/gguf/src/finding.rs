//! What was found of a file: each thing that is wrong or odd, with a code, its place, and what to do.
//!
//! Flow: the reader tells a [`Log`] of each [`Defect`] and goes on where the rest can still be read; what it gives back is
//! [`Findings`]. [`Code`] is the list of all codes, from which the table in docs/validate.md and the rules of a SARIF report
//! are made: a code keeps its meaning once it was released. Absent: how findings are shown.

use std::borrow::Cow;
use std::fmt;

use serde::{Serialize, Serializer};

use crate::error::{Defect, GgufError};
use crate::limits::{
    DEFAULT_ALIGNMENT, MAX_DIMENSIONS, MAX_FINDINGS, MAX_KEY_BYTES, MAX_TENSOR_NAME_BYTES, MIN_ALIGNMENT,
};
use crate::weights::WeightsDefect;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// It is odd, and the file is served.
    Warning,
    /// The file is not served.
    Error,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Warning => "warning",
            Self::Error => "error",
        })
    }
}

macro_rules! codes {
    ($($variant:ident = $word:literal, $severity:ident, $what:literal, $advice:literal;)*) => {
        /// What kind of thing a finding is.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(missing_docs, reason = "each is described by Code::what")]
        pub enum Code { $($variant,)* }

        impl Code {
            /// Every code, in the order in which the parts of a file are looked at.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// Its name, which does not change: "duplicate-key".
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }

            /// How bad each of them is.
            #[must_use]
            pub fn severity(self) -> Severity {
                match self { $(Self::$variant => Severity::$severity,)* }
            }

            /// What it says of a file, in a sentence.
            #[must_use]
            pub fn what(self) -> &'static str {
                match self { $(Self::$variant => $what,)* }
            }

            /// What to do, in a sentence.
            #[must_use]
            pub fn advice(self) -> &'static str {
                match self { $(Self::$variant => $advice,)* }
            }
        }
    };
}

codes! {
    // The file as a whole.
    Unreadable = "unreadable", Error, "A file cannot be opened or read.", "Check the path, the rights and the disk; all parts of a model must lie beside the first.";
    BadMagic = "bad-magic", Error, "The file does not begin as a GGUF file does.", "Give a model in the GGUF format.";
    OldFormat = "old-format", Error, "The file is of a format from before GGUF.", "Convert the original weights again with llama.cpp's convert_hf_to_gguf.py.";
    BigEndian = "big-endian", Error, "The file's numbers are big-endian.", "Convert it with gguf-py's gguf_convert_endian.py, or download the little-endian file.";
    UnsupportedVersion = "unsupported-version", Error, "The version of the format is neither 2 nor 3.", "Convert the model again with a current llama.cpp.";
    TruncatedHeader = "truncated-header", Error, "The file ends inside its header.", "Download it again.";
    HeaderTooLong = "header-too-long", Error, "The header is longer than any model needs.", "Check the source of the file.";
    CountsBeyondFile = "counts-beyond-file", Error, "The header announces more keys and tensors than the file can hold.", "Download it again.";
    TooManyKeys = "too-many-keys", Error, "The header announces more keys than the limit.", "Check the source of the file.";
    TooManyTensors = "too-many-tensors", Error, "The header announces more tensors than the limit.", "Check the source of the file.";
    NoTensors = "no-tensors", Error, "The file holds no tensor.", "Give the file that holds the weights.";
    NotAModel = "not-a-model", Error, "The file says that it is an adapter, a projector or the like.", "Give the language model's own file.";
    // Parts of a model that is split.
    SplitFile = "split-file", Error, "The file is a part of a model, and the others are not at hand.", "Join them with llama-gguf-split --merge and give the joined file.";
    NotFirstSplit = "not-first-split", Error, "The file is a part of a model, and not the first.", "Give the first part.";
    SplitName = "split-name", Error, "The first part's name does not say where the others are.", "Name the parts as their makers did.";
    SplitNumber = "split-number", Error, "The number of a part is not below their count.", "Download it again.";
    TooManySplits = "too-many-splits", Error, "The model has more parts than the limit.", "Check the source of the file.";
    WrongSplit = "wrong-split", Error, "A file is not the part that its name says.", "Download it again.";
    ForeignSplit = "foreign-split", Error, "A part is of another model than the first.", "Download the parts again.";
    SplitTensors = "split-tensor-count", Error, "The parts hold another number of tensors than the first one says.", "Download the parts again.";
    // Keys and values.
    KeyTooLong = "key-too-long", Error, "A key's name is longer than the format allows.", "The file is damaged: download it again.";
    KeysTooLong = "keys-too-long", Error, "The names of all keys together pass the limit.", "Check the source of the file.";
    EmptyKey = "empty-key", Error, "A key has an empty name.", "The file is damaged: download it again.";
    KeyNotUtf8 = "key-not-utf8", Error, "A key's name is not UTF-8.", "The file is damaged: download it again.";
    ControlInKey = "control-in-key", Error, "A key's name has a control character or NUL.", "The file is damaged: download it again.";
    DuplicateKey = "duplicate-key", Error, "A key stands in the header twice.", "Remove one with gguf-py's gguf_new_metadata.py, or convert the model again.";
    UnknownValueType = "unknown-value-type", Error, "A key has a type that GGUF does not define.", "The file is damaged: download it again.";
    InvalidBool = "invalid-bool", Error, "A bool is neither 0 nor 1.", "Convert the model again.";
    StringTooLong = "string-too-long", Error, "A string is longer than the limit.", "Check the source of the file.";
    StringNotUtf8 = "string-not-utf8", Error, "A string is not UTF-8.", "Convert the model again.";
    NestedArray = "nested-array", Error, "An array holds arrays, which llama.cpp cannot read.", "Convert the model again.";
    UnknownElementType = "unknown-element-type", Error, "An array has elements of a type that GGUF does not define.", "Download the file again.";
    ArrayTooLong = "array-too-long", Error, "An array has more elements than the limit.", "Check the source of the file.";
    ControlInText = "control-in-text", Warning, "A text in which the file tells of itself has a control character; it is shown escaped.", "Nothing need be done; converting the model again may mend it.";
    InvalidAlignment = "invalid-alignment", Error, "general.alignment is no power of two, or outside the limits.", "Convert the model again.";
    MissingKey = "missing-key", Error, "A key is missing that llama.cpp cannot load this architecture without.", "Convert the model again with a current llama.cpp.";
    WrongKeyType = "wrong-key-type", Error, "A key has a type that llama.cpp or the server does not take there.", "Convert the model again.";
    KeyOutOfRange = "key-out-of-range", Error, "A number is outside what llama.cpp or the reader takes.", "Convert the model again.";
    WrongFraction = "wrong-fraction", Error, "A number with a fraction is one that nothing can be computed with.", "Convert the model again.";
    WrongArrayLength = "wrong-array-length", Error, "An array has another length than the model implies.", "Convert the model again.";
    UnknownText = "unknown-text", Error, "A text is none of those that llama.cpp takes there.", "Convert the model again.";
    UnknownArchitecture = "unknown-architecture", Error, "This release's llama.cpp knows no such architecture.", "Update Gantry or choose another model.";
    NotALanguageModel = "not-a-language-model", Error, "The architecture is not that of a language model which answers alone.", "Give the language model's own file.";
    Inconsistent = "inconsistent-hyperparameters", Error, "Hyperparameters contradict each other.", "Convert the model again.";
    DeclaredVocabulary = "declared-vocabulary", Warning, "The file names another number of tokens than its vocabulary has, which counts.", "Nothing need be done; converting the model again may mend it.";
    // The tokenizer.
    UnknownTokenizer = "unknown-tokenizer", Error, "This release's llama.cpp knows no such tokenizer.", "Update Gantry or choose another model.";
    UnknownPreTokenizer = "unknown-pre-tokenizer", Error, "This release's llama.cpp knows no such pre-tokenizer.", "Update Gantry or choose another model.";
    ForeignTokenizer = "foreign-tokenizer", Error, "The tokenizer is not of the kind that the vocabulary was made for.", "Tokenizer and tokens are not of one model: convert it again.";
    DuplicateToken = "duplicate-token", Error, "Two tokens of the vocabulary have the same text, on which llama.cpp aborts.", "Convert the model again.";
    TokenOutOfRange = "token-out-of-range", Error, "A special token is none of the vocabulary.", "Convert the model again.";
    UnknownTokenType = "unknown-token-type", Error, "A token has a type that llama.cpp does not define.", "Convert the model again.";
    WrongScore = "wrong-score", Error, "A token's score is no number.", "Convert the model again.";
    NoByteToken = "no-byte-token", Error, "A token is marked as a byte and its text is none, on which llama.cpp aborts.", "Convert the model again.";
    MissingToken = "missing-token", Error, "A token is to be put around each text and there is none, on which llama.cpp aborts.", "Convert the model again.";
    InvalidMerge = "invalid-merge", Error, "A merge does not name two pieces with a space between them.", "Convert the model again.";
    ForeignMerges = "foreign-merges", Error, "Most merges make no token of the vocabulary.", "Merges and tokens are not of one model: convert it again.";
    InvalidCharacterMap = "invalid-character-map", Error, "The tokenizer's character map points outside itself.", "Convert the model again.";
    UnusedTokenOutOfRange = "unused-token-out-of-range", Warning, "A special token that no text needs is none of the vocabulary; it is left out.", "Nothing need be done; converting the model again may mend it.";
    MergeWithoutToken = "merge-without-token", Warning, "Some merges make no token of the vocabulary.", "Nothing need be done; converting the model again may mend it.";
    CharacterWithoutToken = "character-without-token", Warning, "Printable characters of ASCII, or the line end, have no token in a byte-level vocabulary; llama.cpp leaves them out of texts.", "Convert the model again with its whole vocabulary.";
    ByteWithoutToken = "byte-without-token", Warning, "Bytes of characters beyond printable ASCII have no token in a byte-level vocabulary; llama.cpp leaves them out of texts.", "Nothing need be done where the model was made so; else convert it again with its whole vocabulary.";
    // The tensor table.
    TensorNameTooLong = "tensor-name-too-long", Error, "A tensor's name is longer than ggml allows.", "Download the file again.";
    EmptyTensorName = "empty-tensor-name", Error, "A tensor has an empty name.", "The file is damaged: download it again.";
    TensorNameNotUtf8 = "tensor-name-not-utf8", Error, "A tensor's name is not UTF-8.", "The file is damaged: download it again.";
    ControlInTensorName = "control-in-tensor-name", Error, "A tensor's name has a control character or NUL.", "Download the file again.";
    DuplicateTensor = "duplicate-tensor", Error, "A tensor stands in the header twice.", "Convert the model again.";
    WrongDimensionCount = "wrong-dimension-count", Error, "A tensor has no dimension, or more than ggml knows.", "Download the file again.";
    ZeroDimension = "zero-dimension", Error, "A dimension of a tensor is zero.", "Convert the model again.";
    TensorTooLarge = "tensor-too-large", Error, "A tensor has more elements or bytes than 63 bits count.", "Download the file again.";
    UnknownTensorType = "unknown-tensor-type", Error, "This release's ggml knows no such element type.", "Update Gantry or quantise the model again.";
    RemovedTensorType = "removed-tensor-type", Error, "ggml has removed the element type.", "Quantise the model again.";
    UnusableTensorType = "unusable-tensor-type", Error, "No kernel computes with a tensor of this type there.", "Quantise the model again.";
    PartialBlock = "partial-block", Error, "Rows of a tensor are no whole number of its type's blocks.", "Quantise the model again.";
    MisalignedTensor = "misaligned-tensor", Error, "A tensor's data does not start at a multiple of the alignment.", "Download the file again.";
    TensorOverlap = "tensor-overlap", Error, "A tensor's data starts inside that of the tensor before it.", "A shape, type or offset is wrong: download the file again.";
    TensorGap = "tensor-gap", Error, "A tensor's data does not start where that of the tensor before it ends.", "A shape, type or offset is wrong: download the file again.";
    TruncatedData = "truncated-data", Error, "The file ends before its tensors do.", "Download it again.";
    TrailingBytes = "trailing-bytes", Error, "The file goes on after its last tensor.", "A shape or type is wrong, or foreign bytes follow: download it again.";
    // Tensors against hyperparameters.
    MissingTensor = "missing-tensor", Error, "A tensor is missing that llama.cpp cannot load this architecture without.", "Convert the model again.";
    WrongShape = "wrong-shape", Error, "A tensor has another shape than the hyperparameters imply.", "Convert the model again.";
    LayerBeyondModel = "layer-beyond-model", Error, "A tensor is of a layer that the model does not have.", "Convert the model again.";
    MissingLayer = "missing-layer", Error, "A layer has no tensors.", "The file is incomplete: convert the model again.";
    DeclaredQuantization = "declared-quantization", Warning, "general.file_type names a quantisation that no tensor has, and some could have.", "Nothing need be done; converting the model again may mend it.";
    // Weights.
    NotFinite = "not-finite", Error, "A weight or a scale is NaN or infinite.", "Download the file again, or convert or quantise the model again.";
    ZeroWeights = "zero-weights", Error, "A tensor that all text goes through, or many of them, are zero.", "The file is not whole: download it again, or convert the model again.";
    ZeroMatrix = "zero-matrix", Warning, "A few matrices are zero, which a model may have been made with.", "Nothing need be done where the model was made so; else download it again.";
    RepeatedBlocks = "repeated-blocks", Warning, "A tensor has blocks that stand in the file twice, or are zero, as after a broken download.", "Compare the file's digest with its source.";
    // What is asked of it.
    Pooling = "pooling", Error, "Neither the file nor a flag says how texts become vectors, or the file is to rank and is no reranker.", "Say it with --pooling (of a service spec.runtime.embeddings.pooling), or leave --reranking out.";
    // What a worker said of it.
    TrialLoad = "trial-load", Error, "A worker could not load the model, render its chat template or compute with it.", "Check the file, and that this release knows its architecture.";
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl Serialize for Code {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// One thing that was found. Names out of the file are clipped and escaped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    /// What kind of thing it is.
    pub code: Code,
    /// How bad it is.
    pub severity: Severity,
    /// The part of the file or of the trial that it is in: "header", "tokenizer", "weights".
    pub part: &'static str,
    /// Name of the file of a split model, where it is not the first.
    pub file: Option<String>,
    /// Byte of that file where it stands.
    pub offset: Option<u64>,
    /// The key or tensor that it is about.
    pub subject: Option<String>,
    /// What stands there.
    pub found: String,
    /// What the format, llama.cpp or the rest of the file wants there.
    pub expected: String,
    /// What to do.
    pub advice: Cow<'static, str>,
    /// All of it in a sentence.
    pub message: String,
}

impl Finding {
    /// One that the reader did not make: what a trial said of a file.
    #[must_use]
    pub fn new(code: Code, part: &'static str, found: impl Into<String>, expected: impl Into<String>) -> Self {
        let found = found.into();
        Self {
            code,
            severity: code.severity(),
            part,
            file: None,
            offset: None,
            subject: None,
            message: found.clone(),
            found,
            expected: expected.into(),
            advice: Cow::Borrowed(code.advice()),
        }
    }

    pub(crate) fn about(mut self, subject: impl Into<String>) -> Self {
        self.subject = Some(subject.into());
        self
    }

    pub(crate) fn at(mut self, offset: u64) -> Self {
        self.offset = Some(offset);
        self
    }

    pub(crate) fn saying(mut self, message: impl Into<String>) -> Self {
        self.message = message.into();
        self
    }

    /// What a defect of the weights is.
    #[must_use]
    pub fn of_weights(defect: &WeightsDefect) -> Self {
        let finding = match defect {
            WeightsDefect::NotFinite { tensor, kind, what, found, offset } => Self::new(
                Code::NotFinite,
                "weights",
                format!("a {what} of type {kind} that is {found}"),
                "finite numbers",
            )
            .about(tensor.as_str())
            .at(*offset),
            WeightsDefect::Zero { what, zero, of } => {
                Self::new(Code::ZeroWeights, "weights", format!("{zero} of {of} matrices are zero"), "weights")
                    .about(what.as_str())
            }
        };
        finding.saying(defect.to_string())
    }

    /// What an error of the reader is.
    #[must_use]
    pub fn of_error(error: &GgufError) -> Self {
        let message = error.to_string();
        match error {
            GgufError::Malformed { offset, defect } => Self { offset: Some(*offset), message, ..of_defect(defect) },
            GgufError::Part { name, source, .. } => {
                Self { file: Some(name.clone()), message, ..Self::of_error(source) }
            }
            GgufError::Io { offset, source } => {
                Self::new(Code::Unreadable, "file", source.to_string(), "a file that can be read")
                    .at(*offset)
                    .saying(message)
            }
            GgufError::NeedMoreBytes { at_least } => {
                Self::new(Code::Unreadable, "file", "the start of a header", format!("its first {at_least} bytes"))
                    .saying(message)
            }
        }
    }
}

/// What was found, the first first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Findings {
    /// At most [`MAX_FINDINGS`] of them.
    pub list: Vec<Finding>,
    /// How many more there are.
    #[serde(rename = "leftOut")]
    pub left_out: u64,
}

impl Findings {
    /// Adds one, or counts it where there are enough.
    pub fn push(&mut self, finding: Finding) {
        if self.list.len() < MAX_FINDINGS { self.list.push(finding) } else { self.left_out += 1 }
    }

    /// The first that a file is refused for.
    #[must_use]
    pub fn first_error(&self) -> Option<&Finding> {
        self.list.iter().find(|finding| finding.severity == Severity::Error)
    }
}

/// Where the reader writes down what it finds.
#[derive(Debug, Default)]
pub(crate) struct Log {
    /// The file of a split model that is being read, after the first: its name, its number from 1, and their count.
    pub(crate) part: Option<(String, u64, u64)>,
    pub(crate) findings: Findings,
    /// What a gate refuses the file for.
    pub(crate) first: Option<GgufError>,
}

impl Log {
    /// A defect after which the reader goes on.
    pub(crate) fn defect(&mut self, offset: u64, defect: Defect) {
        self.error(GgufError::Malformed { offset, defect });
    }

    /// What ended a step of the reader.
    pub(crate) fn error(&mut self, error: GgufError) {
        let error = match self.part.clone() {
            Some((name, number, count)) => GgufError::Part { name, number, count, source: Box::new(error) },
            None => error,
        };
        // A hostile file may have millions: only what is kept is described.
        if self.findings.list.len() < MAX_FINDINGS {
            self.findings.push(Finding::of_error(&error));
        } else {
            self.findings.left_out += 1;
        }
        self.first.get_or_insert(error);
    }

    /// What is odd and does no harm.
    pub(crate) fn warn(&mut self, mut finding: Finding) {
        finding.file = self.part.as_ref().map(|(name, ..)| name.clone());
        self.findings.push(finding);
    }

    /// The result of a step, if it has one; else why not is written down.
    pub(crate) fn take<T>(&mut self, result: Result<T, GgufError>) -> Option<T> {
        result.map_err(|error| self.error(error)).ok()
    }
}

/// The fields of a finding that follow from the defect alone.
fn of_defect(defect: &Defect) -> Finding {
    use Defect as D;
    let one = |subject: &str, code, found: String, expected: String| {
        let finding = Finding::new(code, defect.part(), found, expected);
        if subject.is_empty() { finding } else { finding.about(subject) }
    };
    let at_most = |limit: u64| format!("at most {limit}");
    let text = str::to_owned;
    match defect {
        D::BadMagic { found, hint } => Finding {
            advice: Cow::Borrowed(hint),
            ..one("", Code::BadMagic, format!("\"{}\"", found.escape_ascii()), text("\"GGUF\""))
        },
        D::OldFormat { format } => one("", Code::OldFormat, text(format), text("GGUF")),
        D::BigEndian => one("", Code::BigEndian, text("big-endian"), text("little-endian")),
        D::UnsupportedVersion { version } => one("", Code::UnsupportedVersion, version.to_string(), text("2 or 3")),
        D::HeaderTruncated { what, needed, file_bytes } => one(
            "",
            Code::TruncatedHeader,
            format!("{file_bytes} bytes, the end inside {what}"),
            format!("{needed} bytes"),
        ),
        D::HeaderTooLong { limit } => one("", Code::HeaderTooLong, text("a longer header"), format!("{limit} bytes")),
        D::CountsBeyondFile { keys, tensors, file_bytes } => one(
            "",
            Code::CountsBeyondFile,
            format!("{keys} keys and {tensors} tensors"),
            format!("what fits into {file_bytes} bytes"),
        ),
        D::TooManyKeys { count, limit } => one("", Code::TooManyKeys, count.to_string(), at_most(*limit)),
        D::TooManyTensors { count, limit } => one("", Code::TooManyTensors, count.to_string(), at_most(*limit)),
        D::NoTensors => one("", Code::NoTensors, text("0 tensors"), text("the tensors of a model")),
        D::SplitFile { count } => one("", Code::SplitFile, format!("one of {count} parts"), text("a whole model")),
        D::NotTheFirstSplit { number, count, expected } => one(
            "",
            Code::NotFirstSplit,
            format!("part {number} of {count}"),
            format!("a name that ends with {expected}"),
        ),
        D::SplitName { expected, .. } => {
            one("", Code::SplitName, text("another name"), format!("a name that ends with {expected}"))
        }
        D::SplitNumber { number, count } => {
            one("split.no", Code::SplitNumber, format!("part {number}"), at_most(*count))
        }
        D::TooManySplits { count, limit } => {
            one("split.count", Code::TooManySplits, count.to_string(), at_most(*limit))
        }
        D::WrongSplit { found, number, count } => {
            one("split.no", Code::WrongSplit, found.clone(), format!("part {number} of {count}"))
        }
        D::ForeignSplit { key } => one(key, Code::ForeignSplit, text("another value"), text("the first part's value")),
        D::SplitTensors { found, expected } => {
            one("split.tensors.count", Code::SplitTensors, found.to_string(), expected.to_string())
        }
        D::NotAModel { kind } => one("general.type", Code::NotAModel, kind.clone(), text("model")),

        D::KeyTooLong { length, limit } => one("", Code::KeyTooLong, format!("{length} bytes"), at_most(*limit)),
        D::KeysTooLong { length, limit } => one("", Code::KeysTooLong, format!("{length} bytes"), at_most(*limit)),
        D::EmptyKey => one("", Code::EmptyKey, text("no name"), format!("1 to {MAX_KEY_BYTES} bytes")),
        D::KeyNotUtf8 => one("", Code::KeyNotUtf8, text("other bytes"), text("UTF-8")),
        D::ControlInKey { key } => {
            one(key, Code::ControlInKey, text("a control character"), text("printable characters"))
        }
        D::DuplicateKey { key } => one(key, Code::DuplicateKey, text("the key again"), text("each key once")),
        D::UnknownValueType { key, found } => one(key, Code::UnknownValueType, found.to_string(), text("0 to 12")),
        D::InvalidBool { key, found } => one(key, Code::InvalidBool, found.to_string(), text("0 or 1")),
        D::StringTooLong { key, length, limit } => {
            one(key, Code::StringTooLong, format!("{length} bytes"), at_most(*limit))
        }
        D::StringNotUtf8 { key } => one(key, Code::StringNotUtf8, text("other bytes"), text("UTF-8")),
        D::NestedArray { key } => one(key, Code::NestedArray, text("an array of arrays"), text("an array of values")),
        D::UnknownElementType { key, found } => {
            one(key, Code::UnknownElementType, found.to_string(), text("0 to 8, or 10 to 12"))
        }
        D::ArrayTooLong { key, length, limit } => {
            one(key, Code::ArrayTooLong, format!("{length} elements"), at_most(*limit))
        }
        D::InvalidAlignment { found, max, .. } => one(
            "general.alignment",
            Code::InvalidAlignment,
            found.to_string(),
            format!("a power of two from {MIN_ALIGNMENT} to {max}, mostly {DEFAULT_ALIGNMENT}"),
        ),
        D::MissingKey { key } => one(key, Code::MissingKey, text("nothing"), text("the key")),
        D::WrongKeyType { key, found, expected } => one(key, Code::WrongKeyType, found.clone(), text(expected)),
        D::KeyOutOfRange { key, found, min, max } => {
            one(key, Code::KeyOutOfRange, found.to_string(), format!("{min} to {max}"))
        }
        D::WrongFraction { key, found } => {
            one(key, Code::WrongFraction, found.clone(), text("a finite number that can be computed with"))
        }
        D::WrongArrayLength { key, found, expected } => {
            one(key, Code::WrongArrayLength, format!("{found} elements"), expected.to_string())
        }
        D::UnknownText { key, found, expected } => {
            one(key, Code::UnknownText, format!("\"{found}\""), format!("one of {expected}"))
        }
        D::UnknownArchitecture { found } => one(
            "general.architecture",
            Code::UnknownArchitecture,
            format!("\"{found}\""),
            text("an architecture of this release's llama.cpp"),
        ),
        D::NotALanguageModel { found, what } => one(
            "general.architecture",
            Code::NotALanguageModel,
            format!("\"{found}\", {what}"),
            text("a language model that answers alone"),
        ),
        D::Inconsistent { what } => one("", Code::Inconsistent, what.clone(), text("hyperparameters that agree")),

        D::UnknownTokenizer { key, found } => {
            let code =
                if key == crate::tokenizer::PRE_KEY { Code::UnknownPreTokenizer } else { Code::UnknownTokenizer };
            one(key, code, format!("\"{found}\""), text("one that this release's llama.cpp knows"))
        }
        D::ForeignTokenizer { found, marked, tokens } => one(
            crate::tokenizer::MODEL_KEY,
            Code::ForeignTokenizer,
            format!("\"{found}\""),
            format!(
                "the tokenizer of a vocabulary in which {marked} of {tokens} tokens begin with Ġ, such as \"gpt2\""
            ),
        ),
        D::DuplicateToken { first, second } => one(
            crate::scan::TOKENS_KEY,
            Code::DuplicateToken,
            format!("token {second} with the text of token {first}"),
            text("each text once"),
        ),
        D::TokenBeyondVocabulary { key, found, tokens } => {
            one(key, Code::TokenOutOfRange, found.to_string(), format!("a token below {tokens}"))
        }
        D::UnknownTokenType { token, found } => {
            one(crate::scan::TYPES_KEY, Code::UnknownTokenType, format!("{found} of token {token}"), text("0 to 6"))
        }
        D::WrongScore { token } => {
            one(crate::scan::SCORES_KEY, Code::WrongScore, format!("NaN of token {token}"), text("a number"))
        }
        D::NoByteToken { token } => {
            one(crate::scan::TYPES_KEY, Code::NoByteToken, format!("token {token}"), text("a text such as <0x0A>"))
        }
        D::MissingToken { key, what } => one(key, Code::MissingToken, text("no token for it"), format!("{what} token")),
        D::InvalidMerge { merge } => {
            one(crate::scan::MERGES_KEY, Code::InvalidMerge, format!("merge {merge}"), text("two pieces and a space"))
        }
        D::ForeignMerges { unknown, merges } => one(
            crate::scan::MERGES_KEY,
            Code::ForeignMerges,
            format!("{unknown} of {merges} merges make no token"),
            text("merges that make tokens"),
        ),
        D::InvalidCharacterMap { found, expected } => one(
            crate::scan::CHARS_KEY,
            Code::InvalidCharacterMap,
            format!("{found} bytes"),
            format!("more than the {expected} that its first part takes"),
        ),

        D::TensorNameTooLong { length } => {
            one("", Code::TensorNameTooLong, format!("{length} bytes"), format!("fewer than {MAX_TENSOR_NAME_BYTES}"))
        }
        D::EmptyTensorName => one("", Code::EmptyTensorName, text("no name"), text("a name")),
        D::TensorNameNotUtf8 => one("", Code::TensorNameNotUtf8, text("other bytes"), text("UTF-8")),
        D::ControlInTensorName { tensor } => {
            one(tensor, Code::ControlInTensorName, text("a control character"), text("printable characters"))
        }
        D::DuplicateTensor { tensor } => {
            one(tensor, Code::DuplicateTensor, text("the tensor again"), text("each tensor once"))
        }
        D::WrongDimensionCount { tensor, found } => {
            one(tensor, Code::WrongDimensionCount, found.to_string(), format!("1 to {MAX_DIMENSIONS}"))
        }
        D::ZeroDimension { tensor, dimension } => {
            one(tensor, Code::ZeroDimension, format!("0 for dimension {dimension}"), text("1 or more"))
        }
        D::TensorTooLarge { tensor, shape } => {
            one(tensor, Code::TensorTooLarge, format!("{shape:?}"), text("what 63 bits count"))
        }
        D::UnknownTensorType { tensor, found } => {
            one(tensor, Code::UnknownTensorType, format!("type {found}"), text("a type of this release's ggml"))
        }
        D::RemovedTensorType { tensor, name, instead } => Finding {
            advice: Cow::Owned(format!("Quantise the model again: {instead}.")),
            ..one(tensor, Code::RemovedTensorType, text(name), text("a type that ggml has"))
        },
        D::UnusableTensorType { tensor, found, expected } => {
            one(tensor, Code::UnusableTensorType, text(found), text(expected))
        }
        D::PartialBlock { tensor, kind, row, block } => {
            one(tensor, Code::PartialBlock, format!("rows of {row} of type {kind}"), format!("a multiple of {block}"))
        }
        D::MisalignedTensor { tensor, found, alignment } => {
            one(tensor, Code::MisalignedTensor, format!("offset {found}"), format!("a multiple of {alignment}"))
        }
        D::TensorOverlap { tensor, found, expected } => {
            one(tensor, Code::TensorOverlap, format!("offset {found}"), format!("offset {expected}"))
        }
        D::TensorGap { tensor, found, expected } => {
            one(tensor, Code::TensorGap, format!("offset {found}"), format!("offset {expected}"))
        }
        D::DataTruncated { tensor, expected, found } => {
            one(tensor, Code::TruncatedData, format!("{found} bytes"), format!("{expected} bytes"))
        }
        D::TrailingBytes { expected, found } => {
            one("", Code::TrailingBytes, format!("{found} bytes"), format!("{expected} bytes"))
        }

        D::MissingTensor { tensor } => one(tensor, Code::MissingTensor, text("nothing"), text("the tensor")),
        D::WrongShape { tensor, found, expected } => {
            one(tensor, Code::WrongShape, format!("{found:?}"), expected.clone())
        }
        D::LayerBeyondModel { tensor, others: _, layers } => {
            one(tensor, Code::LayerBeyondModel, text("a layer beyond them"), format!("one of {layers} layers"))
        }
        D::MissingLayers { first, last, layers } => one(
            &if first == last { format!("blk.{first}") } else { format!("blk.{first} to blk.{last}") },
            Code::MissingLayer,
            text("no tensor"),
            format!("tensors of all {layers} layers"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_a_name_of_its_own_and_sentences() {
        let mut names: Vec<_> = Code::ALL.iter().map(|code| code.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Code::ALL.len());
        for code in Code::ALL {
            let name = code.as_str();
            assert!(
                name.split('-')
                    .all(|word| !word.is_empty() && word.chars().all(|c| c.is_ascii_lowercase() || c == '8'))
            );
            assert!(code.what().ends_with('.') && code.advice().ends_with('.'), "{name}");
        }
    }

    #[test]
    fn what_is_kept_is_bounded_and_the_rest_is_counted() {
        let mut log = Log::default();
        for offset in 0..1_000_000 {
            log.defect(offset, Defect::EmptyKey);
        }
        assert_eq!(log.findings.list.len(), MAX_FINDINGS);
        assert_eq!(log.findings.left_out, 1_000_000 - MAX_FINDINGS as u64);
        assert!(matches!(log.first, Some(GgufError::Malformed { offset: 0, .. })));
    }
}

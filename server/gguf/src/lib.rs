//! Bounded reader and validator of GGUF headers, and the memory arithmetic that follows from them.
//!
//! llama.cpp aborts the whole process on some malformed models, so a file passes here before llama.cpp sees it. The
//! reader trusts nothing: no allocation follows a count from the file, every count has a limit in [`limits`], and every
//! refusal is a [`Defect`] with its byte and what to do.
//!
//! Flow: [`read_header`] (or one of its siblings) → [`Header`], which exists only when everything was checked →
//! [`Summary`] → [`fit::estimate`] and [`fit::verdict`]; [`Report`] prints it all. The header's part of a file is enough
//! for a verdict before the rest is downloaded: [`read_header_prefix`].
//!
//! ```no_run
//! let header = gantry_gguf::read_header("model.gguf")?;
//! let memory = gantry_gguf::fit::estimate(header.summary(), &Default::default());
//! println!("{} needs {}", header.summary().quantization, gantry_gguf::human_bytes(memory.total_bytes));
//! # Ok::<(), gantry_gguf::GgufError>(())
//! ```
//!
//! Absent: unsafe code, the tensors' data, the tokenizer's contents, and GGUF as llama.cpp's older self wrote it.

mod arch;
mod bytes;
mod error;
pub mod fit;
mod ggml;
pub mod limits;
mod model;
mod quant;
mod report;
mod shapes;
mod source;
mod summary;
mod tensor;
mod tokenizer;
mod value;

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

pub use bytes::{human_bytes, human_count};
pub use error::{Defect, GgufError};
pub use ggml::GgmlType;
pub use report::Report;
pub use shapes::ShapeCoverage;
pub use summary::Summary;
pub use tensor::{Tensor, Tensors};
pub use value::{Metadata, Value, ValueType};

use error::{Result, malformed};
use limits::{MAX_KEYS, MAX_TENSORS};
use source::Source;

/// A header in which everything was checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    version: u32,
    alignment: u64,
    metadata: Metadata,
    tensors: Tensors,
    summary: Summary,
}

impl Header {
    /// Version of the format: 2 or 3.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Alignment of the tensors in bytes.
    #[must_use]
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// The keys and their values; see [`Value`] for what is kept.
    #[must_use]
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The tensors.
    #[must_use]
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }

    /// The model in figures.
    #[must_use]
    pub fn summary(&self) -> &Summary {
        &self.summary
    }
}

/// Reads and checks the header of a whole file.
///
/// # Errors
/// The file cannot be read, or is not a whole, well-formed model.
pub fn read_header(path: impl AsRef<Path>) -> std::result::Result<Header, GgufError> {
    let io = |source| GgufError::Io { offset: 0, source };
    let path = path.as_ref();
    // Asked before opening: opening a pipe would wait for its other end.
    let metadata = std::fs::metadata(path).map_err(io)?;
    if !metadata.is_file() {
        return Err(io(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")));
    }
    let file = File::open(path).map_err(io)?;
    let file_bytes = file.metadata().map_err(io)?.len();
    read_header_from(file, file_bytes, file_bytes)
}

/// Reads and checks a header from the first bytes of a file that has `file_bytes` in all.
///
/// # Errors
/// [`GgufError::NeedMoreBytes`] when the header is longer than `prefix`; otherwise as [`read_header`].
pub fn read_header_prefix(prefix: &[u8], file_bytes: u64) -> std::result::Result<Header, GgufError> {
    read_header_from(prefix, prefix.len() as u64, file_bytes)
}

/// Reads and checks a header from `reader`, which yields a file's first `available` bytes of `file_bytes`.
///
/// # Errors
/// As [`read_header_prefix`].
pub fn read_header_from(reader: impl Read, available: u64, file_bytes: u64) -> std::result::Result<Header, GgufError> {
    let mut source = Source::new(reader, available, file_bytes);
    let preamble = read_preamble(&mut source)?;
    let metadata = value::read_metadata(&mut source, preamble.keys)?;
    let keys_end = source.offset();
    let alignment = model::alignment(&metadata)?;
    model::check_kind(&metadata)?;
    if preamble.tensors == 0 {
        return malformed(keys_end, Defect::NoTensors);
    }
    let tensors = tensor::read_tensors(&mut source, preamble.tensors)?;
    let table_end = source.offset();
    let layout = tensor::check_layout(&tensors, table_end, alignment, file_bytes)?;
    let hyperparameters = model::read_hyperparameters(&metadata, keys_end)?;
    let coverage = shapes::check_tensors(&tensors, &hyperparameters, table_end)?;
    let summary = summary::summarise(&metadata, &tensors, &hyperparameters, layout, file_bytes, coverage);
    Ok(Header { version: preamble.version, alignment, metadata, tensors, summary })
}

struct Preamble {
    version: u32,
    keys: u64,
    tensors: u64,
}

fn read_preamble<R: Read>(source: &mut Source<R>) -> Result<Preamble> {
    const WHAT: &str = "the preamble";
    check_magic(source.bytes("the magic")?)?;
    let offset = source.offset();
    let version = source.u32(WHAT)?;
    match version {
        2 | 3 => {}
        _ if matches!(version.swap_bytes(), 1..=3) => return malformed(offset, Defect::BigEndian),
        _ => return malformed(offset, Defect::UnsupportedVersion { version }),
    }
    let offset = source.offset();
    let (tensors, keys) = (source.u64(WHAT)?, source.u64(WHAT)?);
    if tensors > MAX_TENSORS {
        return malformed(offset, Defect::TooManyTensors { count: tensors, limit: MAX_TENSORS });
    }
    if keys > MAX_KEYS {
        return malformed(offset, Defect::TooManyKeys { count: keys, limit: MAX_KEYS });
    }
    // The limits keep this far below overflow.
    let least = keys * value::MIN_ENTRY_BYTES + tensors * tensor::MIN_ENTRY_BYTES;
    let file_bytes = source.file_bytes();
    if source.offset() + least > file_bytes {
        return malformed(offset, Defect::CountsBeyondFile { keys, tensors, file_bytes });
    }
    source.require(least, WHAT)?;
    Ok(Preamble { version, keys, tensors })
}

/// Tells apart what people give instead of a model.
fn check_magic(found: [u8; 4]) -> Result<()> {
    let defect = match &found {
        b"GGUF" => return Ok(()),
        b"FUGG" => Defect::BigEndian,
        // These wrote their magic as a number, so that it stands in the file backwards.
        b"lmgg" => Defect::OldFormat { format: "GGML" },
        b"fmgg" => Defect::OldFormat { format: "GGMF" },
        b"tjgg" => Defect::OldFormat { format: "GGJT" },
        b"algg" => Defect::OldFormat { format: "GGLA" },
        b"vers" => bad_magic(found, "it looks like a Git LFS pointer: fetch the real file with git lfs pull"),
        b"<!DO" | b"<!do" | b"<htm" | b"<HTM" | b"<?xm" => {
            bad_magic(found, "it looks like a web page: use the link of the raw file and check that it needs no login")
        }
        [b'P', b'K', 3, 4] => bad_magic(found, "it looks like a PyTorch or zip archive: convert it to GGUF first"),
        [0, 0, 0, 0] => bad_magic(found, "its start is empty, as after a broken download: download it again"),
        _ => bad_magic(found, "give a model in the GGUF format"),
    };
    malformed(0, defect)
}

fn bad_magic(found: [u8; 4], hint: &'static str) -> Defect {
    Defect::BadMagic { found, hint }
}

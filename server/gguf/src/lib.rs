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
//! The weights themselves are looked at in samples ([`sample_weights`]).
//!
//! Absent: unsafe code, all of the tensors' data, and GGUF as llama.cpp's older self wrote it.

mod arch;
mod bytes;
mod error;
mod file;
pub mod fit;
mod ggml;
pub mod limits;
mod model;
mod quant;
mod report;
mod scan;
mod shapes;
mod source;
mod split;
mod summary;
mod tensor;
mod tokenizer;
mod value;
mod weights;

use std::io::Read;
use std::path::Path;

pub use bytes::{human_bytes, human_count};
pub use error::{Defect, GgufError};
pub use file::open;
pub use ggml::GgmlType;
pub use report::{Check, Report, Verdict};
pub use shapes::ShapeCoverage;
pub use split::part_paths;
pub use summary::Summary;
pub use tensor::{Tensor, Tensors};
pub use value::{Metadata, Value, ValueType};
pub use weights::{WeightsDefect, WeightsReport, WeightsSample, sample_weights};

use error::{Result, malformed};
use limits::{MAX_KEYS, MAX_TENSORS};
use scan::Scan;
use source::Source;
use tensor::Layout;

/// A header in which everything was checked.
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    version: u32,
    alignment: u64,
    metadata: Metadata,
    tensors: Tensors,
    summary: Summary,
    parts: Vec<Part>,
    notes: Vec<String>,
    /// A hash of the text of each token.
    token_hashes: Vec<u64>,
}

/// One file of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Its length.
    pub file_bytes: u64,
    /// Byte of the file where its tensor data starts.
    pub data_offset: u64,
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

    /// The first token from `from` on that both vocabularies have, with different texts.
    #[must_use]
    pub fn first_other_token(&self, other: &Self, from: usize) -> Option<usize> {
        let mut tokens = self.token_hashes.iter().zip(&other.token_hashes).skip(from);
        tokens.position(|(own, other)| own != other).map(|at| from + at)
    }

    /// The files of which the model consists, in order; one, unless it is split.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// What is odd and does no harm, a sentence each.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }
}

/// Reads and checks the header of a whole model: of a file, or of all files where this is the first of several.
///
/// # Errors
/// A file cannot be read, or they are not a whole, well-formed model.
pub fn read_header(path: impl AsRef<Path>) -> std::result::Result<Header, GgufError> {
    let path = path.as_ref();
    let (file, file_bytes) = file::open(path).map_err(|source| GgufError::Io { offset: 0, source })?;
    let mut first = read_part(Source::new(file, file_bytes, file_bytes), Place::First)?;
    let Some(split) = split::of(&first.metadata)? else { return finish(first, Vec::new()) };
    let mut parts = vec![first.as_part()];
    for (number, path) in (1..).zip(split::others(path, &split)?) {
        let in_part = |source| GgufError::Part {
            name: error::printable(&path.file_name().unwrap_or_default().to_string_lossy()),
            number: number + 1,
            count: split.count,
            source: Box::new(source),
        };
        let (file, file_bytes) = file::open(&path).map_err(|source| in_part(GgufError::Io { offset: 0, source }))?;
        let part = read_part(Source::new(file, file_bytes, file_bytes), Place::Further);
        let joined = part.and_then(|part| {
            split::check_part(&first.metadata, &part.metadata, number, split.count, part.keys_end)?;
            parts.push(part.as_part());
            first.tensors.extend(part.tensors, parts.len() - 1)?;
            first.layout.tensor_bytes = first.layout.tensor_bytes.saturating_add(part.layout.tensor_bytes);
            Ok(())
        });
        joined.map_err(in_part)?;
    }
    let (found, expected) = (first.tensors.list().len() as u64, split::tensors(&first.metadata, first.keys_end)?);
    if found != expected {
        return malformed(first.keys_end, Defect::SplitTensors { found, expected });
    }
    finish(first, parts)
}

/// Reads and checks a header from the first bytes of a file that has `file_bytes` in all.
///
/// # Errors
/// [`GgufError::NeedMoreBytes`] when the header is longer than `prefix`; otherwise as [`read_header`], and for a part of a
/// model, since the others are not at hand.
pub fn read_header_prefix(prefix: &[u8], file_bytes: u64) -> std::result::Result<Header, GgufError> {
    read_header_from(prefix, prefix.len() as u64, file_bytes)
}

/// Reads and checks a header from `reader`, which yields a file's first `available` bytes of `file_bytes`.
///
/// # Errors
/// As [`read_header_prefix`].
pub fn read_header_from(reader: impl Read, available: u64, file_bytes: u64) -> std::result::Result<Header, GgufError> {
    finish(read_part(Source::new(reader, available, file_bytes), Place::Alone)?, Vec::new())
}

/// Which file of a model is read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// The only one that is at hand.
    Alone,
    /// The only one, or the first of several.
    First,
    /// One beside the first, which has few keys of its own.
    Further,
}

/// What one file says, before it is held against the hyperparameters.
struct RawPart {
    version: u32,
    alignment: u64,
    metadata: Metadata,
    scan: Scan,
    keys_end: u64,
    tensors: Tensors,
    table_end: u64,
    layout: Layout,
    file_bytes: u64,
}

impl RawPart {
    fn as_part(&self) -> Part {
        Part { file_bytes: self.file_bytes, data_offset: self.layout.data_offset }
    }
}

fn read_part<R: Read>(mut source: Source<R>, place: Place) -> Result<RawPart> {
    let preamble = read_preamble(&mut source)?;
    let (metadata, scan) = value::read_metadata(&mut source, preamble.keys)?;
    let keys_end = source.offset();
    let alignment = model::alignment(&metadata)?;
    let split = split::of(&metadata)?;
    match (&split, place) {
        (Some(split), Place::Alone) => return malformed(split.offset, Defect::SplitFile { count: split.count }),
        (_, Place::Further) => {}
        _ => model::check_kind(&metadata)?,
    }
    if preamble.tensors == 0 && split.is_none() {
        return malformed(keys_end, Defect::NoTensors);
    }
    let tensors = tensor::read_tensors(&mut source, preamble.tensors)?;
    let (table_end, file_bytes) = (source.offset(), source.file_bytes());
    let layout = tensor::check_layout(&tensors, table_end, alignment, file_bytes)?;
    Ok(RawPart {
        version: preamble.version,
        alignment,
        metadata,
        scan,
        keys_end,
        tensors,
        table_end,
        layout,
        file_bytes,
    })
}

/// Holds what was read against each other. `parts`: none where the model is one file.
fn finish(read: RawPart, mut parts: Vec<Part>) -> Result<Header> {
    if parts.is_empty() {
        parts.push(read.as_part());
    }
    let RawPart { version, alignment, metadata, scan, keys_end, tensors, table_end, layout, .. } = read;
    let mut notes = Vec::new();
    let hyperparameters = model::read_hyperparameters(&metadata, &scan, keys_end, &mut notes)?;
    let coverage = shapes::check_tensors(&tensors, &hyperparameters, table_end)?;
    let summary = summary::summarise(&metadata, &tensors, &hyperparameters, layout, &parts, coverage);
    let token_hashes = scan.tokens;
    Ok(Header { version, alignment, metadata, tensors, summary, parts, notes, token_hashes })
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

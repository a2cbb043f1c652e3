//! Bounded reader and validator of GGUF headers, and the memory arithmetic that follows from them.
//!
//! llama.cpp aborts the whole process on some malformed models, so a file passes here before llama.cpp sees it. The
//! reader trusts nothing: no allocation follows a count from the file, every count has a limit in [`limits`], and every
//! refusal is a [`Defect`] with its byte and what to do.
//!
//! Flow: [`read_header`] (or one of its siblings) → [`Header`], which exists only when everything was checked, or the first
//! thing that is wrong; [`inspect`] → [`Findings`], all of what is wrong → [`Summary`] → [`fit::estimate`] and [`fit::verdict`]; [`Report`] prints it all. The header's part of a file is enough
//! for a verdict before the rest is downloaded: [`read_header_prefix`].
//!
//! ```no_run
//! let header = gantry_gguf::read_header("model.gguf")?;
//! let memory = gantry_gguf::fit::estimate(header.summary(), &Default::default());
//! println!("{} needs {}", header.summary().quantization, gantry_gguf::human_bytes(memory.total_bytes));
//! # Ok::<(), gantry_gguf::GgufError>(())
//! ```
//!
//! The weights themselves are looked at in samples ([`sample_weights`]), or all of them ([`read_weights`]).
//!
//! Absent: unsafe code, all of the tensors' data, and GGUF as llama.cpp's older self wrote it.

mod arch;
mod bytes;
mod error;
mod file;
mod finding;
pub mod fit;
mod ggml;
pub mod limits;
mod model;
mod needs;
mod quant;
mod report;
mod scan;
mod shapes;
mod source;
mod split;
mod summary;
mod tensor;
mod texts;
mod tokenizer;
mod value;
mod weights;

use std::io::Read;
use std::path::Path;

pub use bytes::{human_bytes, human_count};
pub use error::{Defect, GgufError};
pub use file::open;
pub use finding::{Code, Finding, Findings, Severity};
pub use ggml::GgmlType;
pub use report::{Check, Report, Verdict};
pub use shapes::ShapeCoverage;
pub use split::part_paths;
pub use summary::Summary;
pub use tensor::{Tensor, Tensors};
pub use value::{Metadata, Value, ValueType};
pub use weights::{WeightsDefect, WeightsReport, WeightsSample, read_weights, sample_weights};

use error::{Result, malformed};
use finding::Log;
use limits::{DEFAULT_ALIGNMENT, MAX_KEYS, MAX_TENSORS};
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
    notes: Vec<Finding>,
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

    /// What is odd and does no harm.
    #[must_use]
    pub fn notes(&self) -> &[Finding] {
        &self.notes
    }
}

/// Reads and checks the header of a whole model: of a file, or of all files where this is the first of several.
///
/// # Errors
/// A file cannot be read, or they are not a whole, well-formed model: the first thing that is wrong.
pub fn read_header(path: impl AsRef<Path>) -> std::result::Result<Header, GgufError> {
    let mut log = Log::default();
    let read = read_model(path.as_ref(), &mut log);
    conclude(read, log).0
}

/// All that was found of a model.
#[derive(Debug)]
pub struct Inspection {
    /// Its header, or the first thing that is wrong: what [`read_header`] returns.
    pub header: std::result::Result<Header, GgufError>,
    /// Everything that is wrong or odd, in the order in which it was found.
    pub findings: Findings,
}

/// Reads and checks as [`read_header`] does, and goes on after what is wrong as far as the rest can be read.
#[must_use]
pub fn inspect(path: impl AsRef<Path>) -> Inspection {
    let mut log = Log::default();
    let read = read_model(path.as_ref(), &mut log);
    let (header, findings) = conclude(read, log);
    Inspection { header, findings }
}

/// As [`inspect`], of the first `prefix` bytes of a file that has `file_bytes` in all.
#[must_use]
pub fn inspect_prefix(prefix: &[u8], file_bytes: u64) -> Inspection {
    let mut log = Log::default();
    let read = read_one(Source::new(prefix, prefix.len() as u64, file_bytes), &mut log);
    let (header, findings) = conclude(read, log);
    Inspection { header, findings }
}

/// The header if nothing is wrong, and what was written down.
fn conclude(read: Result<Header>, mut log: Log) -> (Result<Header>, Findings) {
    let header = match (read, log.first.take()) {
        (Ok(header), None) => Ok(header),
        (Ok(_), Some(first)) => Err(first),
        (Err(last), Some(first)) => {
            log.error(last);
            Err(first)
        }
        (Err(only), None) => {
            log.findings.push(Finding::of_error(&only));
            Err(only)
        }
    };
    (header, log.findings)
}

fn read_model(path: &Path, log: &mut Log) -> Result<Header> {
    let (file, file_bytes) = file::open(path).map_err(|source| GgufError::Io { offset: 0, source })?;
    let mut first = read_part(Source::new(file, file_bytes, file_bytes), Place::First, log)?;
    let Some(split) = split::of(&first.metadata)? else { return Ok(finish(first, Vec::new(), log)) };
    let mut parts = vec![first.as_part()];
    let mut are_whole = true;
    for (number, path) in (1..).zip(split::others(path, &split)?) {
        let name = error::printable(&path.file_name().unwrap_or_default().to_string_lossy());
        log.part = Some((name, number + 1, split.count));
        let read =
            file::open(&path).map_err(|source| GgufError::Io { offset: 0, source }).and_then(|(file, file_bytes)| {
                let part = read_part(Source::new(file, file_bytes, file_bytes), Place::Further, log)?;
                split::check_part(&first.metadata, &part.metadata, number, split.count, part.keys_end)?;
                parts.push(part.as_part());
                first.tensors.extend(part.tensors, parts.len() - 1)?;
                first.layout.tensor_bytes = first.layout.tensor_bytes.saturating_add(part.layout.tensor_bytes);
                Ok(())
            });
        // Of the others it is still to be said whether they are there.
        are_whole &= log.take(read).is_some();
        log.part = None;
    }
    let (found, expected) = (first.tensors.list().len() as u64, split::tensors(&first.metadata, first.keys_end)?);
    if are_whole && found != expected && first.tensors.are_all_read() {
        return malformed(first.keys_end, Defect::SplitTensors { found, expected });
    }
    // What is missing from a part that could not be read is not missing from the model.
    first.tensors.lacks_some |= !are_whole;
    Ok(finish(first, parts, log))
}

fn read_one<R: Read>(source: Source<R>, log: &mut Log) -> Result<Header> {
    let part = read_part(source, Place::Alone, log)?;
    Ok(finish(part, Vec::new(), log))
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
    let mut log = Log::default();
    let read = read_one(Source::new(reader, available, file_bytes), &mut log);
    conclude(read, log).0
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

fn read_part<R: Read>(mut source: Source<R>, place: Place, log: &mut Log) -> Result<RawPart> {
    let preamble = read_preamble(&mut source)?;
    let (metadata, scan) = value::read_metadata(&mut source, preamble.keys, log)?;
    let keys_end = source.offset();
    let alignment = log.take(model::alignment(&metadata));
    let split = split::of(&metadata)?;
    match (&split, place) {
        (Some(split), Place::Alone) => return malformed(split.offset, Defect::SplitFile { count: split.count }),
        (_, Place::Further) => {}
        _ => model::check_kind(&metadata)?,
    }
    if preamble.tensors == 0 && split.is_none() {
        return malformed(keys_end, Defect::NoTensors);
    }
    let tensors = tensor::read_tensors(&mut source, preamble.tensors, log)?;
    let (table_end, file_bytes) = (source.offset(), source.file_bytes());
    let layout = tensor::check_layout(&tensors, table_end, alignment, file_bytes, log);
    Ok(RawPart {
        version: preamble.version,
        alignment: alignment.unwrap_or(DEFAULT_ALIGNMENT),
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
fn finish(read: RawPart, mut parts: Vec<Part>, log: &mut Log) -> Header {
    if parts.is_empty() {
        parts.push(read.as_part());
    }
    let RawPart { version, alignment, metadata, scan, keys_end, tensors, table_end, layout, .. } = read;
    let hyperparameters = model::read_hyperparameters(&metadata, &scan, keys_end, log);
    let coverage = shapes::check_tensors(&tensors, hyperparameters.as_ref(), table_end, log);
    // Without them something was found, and nobody sees the summary.
    let hyperparameters = hyperparameters.unwrap_or_default();
    if let Some(finding) = quant::contradiction(&metadata, tensors.list()) {
        log.warn(finding);
    }
    if let Some(finding) = texts::control_characters(&metadata) {
        log.warn(finding);
    }
    let summary = summary::summarise(&metadata, &tensors, &hyperparameters, layout, &parts, coverage);
    let notes = log.findings.list.iter().filter(|finding| finding.severity == Severity::Warning).cloned().collect();
    Header { version, alignment, metadata, tensors, summary, parts, notes, token_hashes: scan.tokens }
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

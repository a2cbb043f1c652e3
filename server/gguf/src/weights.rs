//! A look at the weights themselves: scales and numbers that are not finite, tensors that are all zero, blocks that repeat.
//!
//! Weights that are shifted by some bytes show as scales that are not finite: other bytes stand where those should.
//!
//! Unless all is asked for, what is read of each tensor is bounded, and so is the time for all of them: the start, the end and places between of a
//! large tensor, the whole of a small one; and all of the tables in which rows are looked up, since the model's first answer
//! shows nothing of a row whose token it does not meet. A block of a quantised type has a scale or two, which everything in it is
//! multiplied with; the table follows ggml's `ggml_validate_row_data`. Norms and biases are small, so that they are read
//! whole. Absent: whether the numbers are good ones.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::hash::{DefaultHasher, Hasher as _};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::error::printable;
use crate::finding::{Code, Finding};
use crate::ggml::GgmlType;
use crate::limits::{
    MAX_FINDINGS, MAX_REMEMBERED_BLOCKS, REPEAT_BLOCK_BYTES, SAMPLE_PIECE_BYTES, SAMPLE_PIECES, WEIGHTS_PIECE_BYTES,
};
use crate::shapes::is_matrix;
use crate::split::part_paths;
use crate::tensor::Tensor;
use crate::{Header, human_bytes};

/// What was looked at.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WeightsSample {
    /// Tensors of which something was read.
    pub tensors: u64,
    /// Tensors there are.
    pub of: u64,
    /// Bytes that were read.
    pub bytes: u64,
}

/// What is wrong with the weights.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WeightsDefect {
    /// A number that everything computed with it becomes, too.
    #[error(
        "tensor \"{tensor}\" ({kind}) has a {what} that is {found} at byte {offset} of its file; download the file again, or convert or quantise the model again"
    )]
    NotFinite {
        /// Its name.
        tensor: String,
        /// Its type.
        kind: &'static str,
        /// What stands there: "scale" or "number".
        what: &'static str,
        /// "NaN" or "infinite".
        found: &'static str,
        /// Byte of the file.
        offset: u64,
    },
    /// Nothing was ever written there.
    #[error(
        "all that was read of {what} is zero ({zero} of {of} matrices are); the file is not whole: download it again, or convert the model again"
    )]
    Zero {
        /// Which.
        what: String,
        /// Matrices that are.
        zero: u64,
        /// Matrices there are.
        of: u64,
    },
}

/// What was seen of the weights.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WeightsReport {
    /// How much that was.
    pub sample: WeightsSample,
    /// Whether that was all there is.
    pub all: bool,
    /// What is wrong.
    pub defect: Option<WeightsDefect>,
    /// What else is, where all was read: at most [`MAX_FINDINGS`].
    pub further: Vec<WeightsDefect>,
    /// What is odd and may do no harm.
    pub notes: Vec<Finding>,
}

impl WeightsReport {
    fn refuse(&mut self, defect: WeightsDefect) {
        if self.defect.is_none() {
            self.defect = Some(defect);
        } else if self.further.len() < MAX_FINDINGS {
            self.further.push(defect);
        }
    }

    /// What was looked at, in words.
    #[must_use]
    pub fn summary(&self) -> String {
        let WeightsSample { tensors, of, bytes } = self.sample;
        let all = if self.all { "all " } else { "" };
        format!("{all}{} of {tensors} tensors of {of}, every number and scale finite", human_bytes(bytes))
    }
}

/// How much of the weights is read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Extent {
    /// Pieces of each tensor, and nothing more after so long.
    Sample(Duration),
    /// All of them, up to a moment.
    Until(Instant),
    /// All of them.
    All,
}

/// Tables of which a token, its place or its kind takes one row.
const LOOKED_UP: [&str; 4] =
    ["token_embd.weight", "per_layer_token_embd.weight", "position_embd.weight", "token_types.weight"];

/// Reads samples of the tensors of the model at `path`, whose header this is, for at most `limit`: pieces of each, then as much
/// as there is time for of the tables in which rows are looked up. The first defect ends it.
///
/// # Errors
/// A file cannot be read.
pub fn sample_weights(path: impl AsRef<Path>, header: &Header, limit: Duration) -> io::Result<WeightsReport> {
    walk(path.as_ref(), header, Extent::Sample(limit), &mut |_| {})
}

/// Reads all weights of the model at `path`, whose header this is, and tells `progress` how many bytes it has read in all.
/// It takes as long as the disk does, and goes on with the next tensor after a defect.
///
/// # Errors
/// A file cannot be read.
pub fn read_weights(
    path: impl AsRef<Path>,
    header: &Header,
    mut progress: impl FnMut(u64),
) -> io::Result<WeightsReport> {
    walk(path.as_ref(), header, Extent::All, &mut progress)
}

fn walk(path: &Path, header: &Header, extent: Extent, progress: &mut dyn FnMut(u64)) -> io::Result<WeightsReport> {
    let started = Instant::now();
    let paths = if header.parts().len() > 1 { part_paths(path) } else { vec![path.to_path_buf()] };
    let files = paths.iter().map(|path| Ok(crate::file::open(path)?.0)).collect::<io::Result<Vec<File>>>()?;
    let mut report = WeightsReport { all: extent == Extent::All, ..WeightsReport::default() };
    report.sample.of = header.tensors().list().len() as u64;
    let (mut zero, mut matrices, mut tables) = (Vec::new(), 0, Vec::new());
    let mut repeats = Repeats::default();
    let mut look = |number, tensor: &Tensor, extent, before| {
        let (Some(file), Some(part)) = (files.get(tensor.part), header.parts().get(tensor.part)) else {
            return Err(io::Error::new(io::ErrorKind::NotFound, "a part of the model is gone"));
        };
        // Both were checked against the file's length.
        let start = part.data_offset + tensor.offset;
        repeats.begin(number, tensor);
        look_at(file, start, tensor, extent, &mut repeats, &mut |bytes| progress(before + bytes))
    };
    for (number, tensor) in header.tensors().list().iter().enumerate() {
        if matches!(extent, Extent::Sample(limit) if started.elapsed() > limit) {
            break;
        }
        let look = look(number, tensor, extent, report.sample.bytes)?;
        report.sample.tensors += 1;
        report.sample.bytes += look.bytes;
        if extent != Extent::All && LOOKED_UP.contains(&&*tensor.name) {
            tables.push((number, tensor, look.bytes));
        }
        if let Some(found) = look.not_finite {
            report.refuse(found);
            if extent != Extent::All {
                return Ok(report);
            }
        }
        if is_matrix(&tensor.name) {
            matrices += 1;
            if look.is_zero {
                zero.push(tensor);
            }
        }
    }
    judge_zeros(&zero, matrices, &mut report);
    if let Extent::Sample(limit) = extent {
        for (number, tensor, sampled) in tables {
            let look = look(number, tensor, Extent::Until(started + limit), report.sample.bytes)?;
            report.sample.bytes += look.bytes.saturating_sub(sampled);
            look.not_finite.into_iter().for_each(|found| report.refuse(found));
        }
    }
    repeats.judge(header.tensors().list(), &mut report);
    Ok(report)
}

/// A matrix that is zero adds nothing to what a layer computes, which a model may have been made with; one that all text goes
/// through, or many of them, were never written.
fn judge_zeros(zero: &[&Tensor], matrices: u64, report: &mut WeightsReport) {
    let Some(first) = zero.first() else { return };
    let count = zero.len() as u64;
    let vital = zero.iter().find(|tensor| !tensor.name.starts_with("blk."));
    if vital.is_some() || count > matrices / 4 {
        let what = format!("tensor \"{}\"", printable(&vital.unwrap_or(first).name));
        report.refuse(WeightsDefect::Zero { what, zero: count, of: matrices });
        return;
    }
    let name = printable(&first.name);
    let message = format!("{count} of {matrices} matrices are zero where they were looked at, such as \"{name}\"");
    let finding = Finding::new(Code::ZeroMatrix, "weights", format!("{count} of {matrices} matrices"), "weights");
    report.notes.push(finding.about(name).saying(message));
}

struct Look {
    bytes: u64,
    is_zero: bool,
    not_finite: Option<WeightsDefect>,
}

/// Reads pieces of a tensor whose data starts at `start` of the file, and tells how much of it was read.
fn look_at(
    file: &File,
    start: u64,
    tensor: &Tensor,
    extent: Extent,
    repeats: &mut Repeats,
    progress: &mut dyn FnMut(u64),
) -> io::Result<Look> {
    let block = tensor.kind.block_bytes();
    let (piece, most) = match extent {
        Extent::Sample(_) => (SAMPLE_PIECE_BYTES, SAMPLE_PIECES),
        Extent::All | Extent::Until(_) => (WEIGHTS_PIECE_BYTES, u64::MAX),
    };
    // Whole blocks, and at least one.
    let piece = (piece / block).max(1) * block;
    let pieces = tensor.bytes.div_ceil(piece).min(most);
    let mut look = Look { bytes: 0, is_zero: true, not_finite: None };
    let mut data = Vec::new();
    for number in 0..pieces {
        let at = match extent {
            Extent::Until(end) if Instant::now() > end => break,
            Extent::All | Extent::Until(_) => number * piece,
            // The first and the last included.
            Extent::Sample(_) if pieces > 1 => {
                tensor.bytes.saturating_sub(piece) / block * number / (pieces - 1) * block
            }
            Extent::Sample(_) => 0,
        };
        let length = piece.min(tensor.bytes - at);
        // A piece is a few KiB, or MiB where all is read.
        data.resize(usize::try_from(length).unwrap_or(0), 0);
        file.read_exact_at(&mut data, start + at)?;
        look.bytes += length;
        progress(look.bytes);
        look.is_zero &= data.iter().all(|&byte| byte == 0);
        if extent == Extent::All {
            repeats.stream(start + at, &data);
        }
        if look.not_finite.is_some() {
            continue;
        }
        if let Some((index, what, found)) = not_finite(tensor.kind, &data) {
            let (name, kind, offset) = (printable(&tensor.name), tensor.kind.name(), start + at + index);
            look.not_finite = Some(WeightsDefect::NotFinite { tensor: name, kind, what, found, offset });
            if extent != Extent::All {
                break;
            }
        }
    }
    // Pieces of a small tensor overlap.
    look.bytes = look.bytes.min(tensor.bytes);
    Ok(look)
}

/// Blocks of weights that stand in the file twice, as after a download that wrote a piece to two places.
///
/// They are of [`REPEAT_BLOCK_BYTES`] and begin at a multiple of that in the file, as the pieces of a download do; each is
/// compared with all before it. Blocks in which one number or one row repeats do not count: models have such. Those that are zero are
/// counted by themselves, as of a download that ended early in a file of the whole length.
#[derive(Default)]
struct Repeats {
    /// Hashes of blocks, and the first tensor that has each.
    seen: HashMap<u64, usize>,
    /// How many blocks of the second tensor stand in the first.
    again: BTreeMap<(usize, usize), u64>,
    /// How many blocks of a tensor are zero.
    zero: BTreeMap<usize, u64>,
    tensor: usize,
    /// Bytes after which what the tensor holds may rightly be the same: of a block, and of a row.
    periods: [usize; 2],
    /// What there is yet of a block.
    open: Vec<u8>,
}

impl Repeats {
    fn begin(&mut self, number: usize, tensor: &Tensor) {
        self.tensor = number;
        self.open.clear();
        let row = tensor.shape.first().map_or(0, |&row| tensor.kind.row_bytes(row));
        self.periods = [tensor.kind.block_bytes(), row].map(|bytes| usize::try_from(bytes).unwrap_or(0));
    }

    /// Takes the next bytes of a tensor, which stand at `offset` of the file.
    fn stream(&mut self, offset: u64, data: &[u8]) {
        let size = REPEAT_BLOCK_BYTES;
        let mut rest = data;
        // Up to where the next block begins.
        if self.open.is_empty() {
            let skip = usize::try_from(offset.next_multiple_of(size as u64) - offset).unwrap_or(0);
            rest = rest.get(skip..).unwrap_or_default();
        }
        while !rest.is_empty() {
            let (taken, left) = rest.split_at((size - self.open.len()).min(rest.len()));
            self.open.extend_from_slice(taken);
            rest = left;
            if self.open.len() == size {
                let block = std::mem::take(&mut self.open);
                self.block(&block);
                self.open = block;
                self.open.clear();
            }
        }
    }

    fn block(&mut self, block: &[u8]) {
        if block.iter().all(|&byte| byte == 0) {
            *self.zero.entry(self.tensor).or_default() += 1;
            return;
        }
        let repeats = |&period: &usize| period > 0 && block.get(period..).is_none_or(|rest| block.starts_with(rest));
        if self.periods.iter().any(repeats) {
            return;
        }
        let mut hasher = DefaultHasher::new();
        hasher.write(block);
        match self.seen.get(&hasher.finish()) {
            Some(&first) => *self.again.entry((first, self.tensor)).or_default() += 1,
            None if self.seen.len() < MAX_REMEMBERED_BLOCKS => _ = self.seen.insert(hasher.finish(), self.tensor),
            None => {}
        }
    }

    /// A tensor that is a copy of another was meant to be one: an output of the embedding, experts of one.
    fn judge(&self, tensors: &[Tensor], report: &mut WeightsReport) {
        for (&number, &count) in self.zero.iter().take(MAX_FINDINGS) {
            let Some(tensor) = tensors.get(number) else { continue };
            // One that is zero as a whole was told of, and tokens that nobody trained, and experts that are none, have rows of zeros.
            let is_whole = count.saturating_add(2).saturating_mul(REPEAT_BLOCK_BYTES as u64) >= tensor.bytes;
            if is_whole || !tensor.name.starts_with("blk.") || tensor.shape.get(2).is_some_and(|&experts| experts > 1) {
                continue;
            }
            let found = format!("{count} blocks of {} that are zero", human_bytes(REPEAT_BLOCK_BYTES as u64));
            let name = printable(&tensor.name);
            let message =
                format!("tensor \"{name}\" has {found}; the file may not be whole: compare it with its source");
            let finding = Finding::new(Code::RepeatedBlocks, "weights", found, "weights of its own");
            report.notes.push(finding.about(name).saying(message));
        }
        for (&(first, again), &count) in self.again.iter().take(MAX_FINDINGS) {
            let (Some(one), Some(other)) = (tensors.get(first), tensors.get(again)) else { continue };
            let whole = count.saturating_add(2).saturating_mul(REPEAT_BLOCK_BYTES as u64) >= other.bytes;
            // Tokens that nobody trained have the same rows, and experts may have begun as one.
            let is_meant = (first != again && whole)
                || !other.name.starts_with("blk.")
                || (first == again && other.shape.get(2).is_some_and(|&experts| experts > 1));
            if is_meant {
                continue;
            }
            let (name, from) = (printable(&other.name), printable(&one.name));
            let found = format!("{count} blocks that stand in tensor \"{from}\", too");
            let message =
                format!("tensor \"{name}\" has {found}; the file may not be whole: compare it with its source");
            let finding = Finding::new(Code::RepeatedBlocks, "weights", found, "weights of its own");
            report.notes.push(finding.about(name).saying(message));
        }
    }
}

/// Where the half-precision scales are in a block.
fn scales(kind: GgmlType) -> &'static [usize] {
    use GgmlType as T;
    match kind {
        T::Q4_0 | T::Q5_0 | T::Q8_0 | T::Q1_0 | T::Q2_0 | T::IQ4_NL => &[0],
        T::IQ2_XXS | T::IQ2_XS | T::IQ2_S | T::IQ3_XXS | T::IQ3_S | T::IQ1_S | T::IQ4_XS => &[0],
        T::Q4_1 | T::Q5_1 | T::Q4_K | T::Q5_K => &[0, 2],
        T::Q2_K => &[80, 82],
        T::Q3_K => &[108],
        T::Q6_K => &[208],
        T::TQ1_0 => &[52],
        T::TQ2_0 => &[64],
        _ => &[],
    }
}

/// The first number or scale in whole blocks that is not finite: where, what and how.
fn not_finite(kind: GgmlType, data: &[u8]) -> Option<(u64, &'static str, &'static str)> {
    let size = usize::try_from(kind.block_bytes()).ok()?;
    let mut blocks = data.chunks_exact(size).enumerate();
    let (at, what, found) = blocks.find_map(|(number, block)| {
        let base = number * size;
        let half = |at: usize| Some(u16::from_le_bytes([*block.get(at)?, *block.get(at + 1)?]));
        match kind {
            GgmlType::F32 => Some((base, "number", of_float(f32::from_le_bytes(block.try_into().ok()?).into())?)),
            GgmlType::F64 => Some((base, "number", of_float(f64::from_le_bytes(block.try_into().ok()?))?)),
            GgmlType::F16 => Some((base, "number", of_half(half(0)?)?)),
            GgmlType::BF16 => Some((base, "number", of_float(f32::from_bits(u32::from(half(0)?) << 16).into())?)),
            // An exponent; this one stands for NaN.
            GgmlType::MXFP4 => (block[0] == 0xff).then_some((base, "scale", "NaN")),
            GgmlType::IQ1_M => {
                // Spread over the highest bits of four numbers.
                let bits = [half(48)? >> 12, (half(50)? >> 8) & 0xf0, (half(52)? >> 4) & 0xf00, half(54)? & 0xf000];
                Some((base + 48, "scale", of_half(bits.into_iter().fold(0, |scale, bits| scale | bits))?))
            }
            _ => scales(kind).iter().find_map(|&at| Some((base + at, "scale", of_half(half(at)?)?))),
        }
    })?;
    Some((at as u64, what, found))
}

fn of_float(number: f64) -> Option<&'static str> {
    if number.is_nan() {
        Some("NaN")
    } else if number.is_infinite() {
        Some("infinite")
    } else {
        None
    }
}

/// Half precision has its infinities and NaN where the exponent is all ones.
fn of_half(bits: u16) -> Option<&'static str> {
    match (bits & 0x7c00 == 0x7c00, bits & 0x03ff) {
        (false, _) => None,
        (true, 0) => Some("infinite"),
        (true, _) => Some("NaN"),
    }
}

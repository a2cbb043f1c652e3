//! The tensor table: names, shapes, types, and where the data lies.
//!
//! Flow: [`read_tensors`] reads the table and checks each entry alone, [`check_layout`] then checks them against each
//! other and against the length of the file, as ggml does and one step further (ggml does not look at the length). An entry
//! with a shape or a type that is none is left out, and the reader goes on with the next.

use std::collections::HashMap;
use std::collections::hash_map::Entry as MapEntry;
use std::io::Read;

use crate::error::{Defect, Result, malformed, printable};
use crate::finding::Log;
use crate::ggml::GgmlType;
use crate::limits::{DEFAULT_ALIGNMENT, MAX_DIMENSIONS, MAX_TENSOR_NAME_BYTES};
use crate::source::Source;

/// Fewest bytes that an entry takes: length, one character, one dimension with its count, type, offset.
pub(crate) const MIN_ENTRY_BYTES: u64 = 8 + 1 + 4 + 8 + 4 + 8;

const WHAT: &str = "the tensor table";

/// One tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// Its dimensions, the row first, as ggml orders them.
    pub shape: Vec<u64>,
    /// Its element type.
    pub kind: GgmlType,
    /// Where its data starts, counted from the start of the tensor data of its part.
    pub offset: u64,
    /// Which file of the model has it, from 0.
    pub part: usize,
    /// Bytes of its data, without padding.
    pub bytes: u64,
    /// Byte of the file where its entry stands.
    pub(crate) entry_offset: u64,
}

impl Tensor {
    /// Number of its elements.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.shape.iter().fold(1, |product: u64, &dimension| product.saturating_mul(dimension))
    }
}

/// All tensors of a file, in its order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tensors {
    list: Vec<Tensor>,
    by_name: HashMap<String, usize>,
    /// Whether there are tensors that could not be read, so that what is not here need not be missing.
    pub(crate) lacks_some: bool,
}

impl Tensors {
    /// The tensors in the order of the file.
    #[must_use]
    pub fn list(&self) -> &[Tensor] {
        &self.list
    }

    /// The tensor with this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.by_name.get(name).and_then(|&index| self.list.get(index))
    }
}

impl Tensors {
    /// Whether every entry of the table is here.
    pub(crate) fn are_all_read(&self) -> bool {
        !self.lacks_some
    }

    /// Takes in those of a further part.
    pub(crate) fn extend(&mut self, others: Self, part: usize) -> Result<()> {
        self.lacks_some |= others.lacks_some;
        for tensor in others.list {
            let tensor = Tensor { part, ..tensor };
            if self.by_name.insert(tensor.name.clone(), self.list.len()).is_some() {
                return malformed(tensor.entry_offset, Defect::DuplicateTensor { tensor: printable(&tensor.name) });
            }
            self.list.push(tensor);
        }
        Ok(())
    }
}

/// Reads `count` entries.
pub(crate) fn read_tensors<R: Read>(source: &mut Source<R>, count: u64, log: &mut Log) -> Result<Tensors> {
    let mut tensors = Tensors::default();
    for _ in 0..count {
        let Some(tensor) = read_tensor(source, log)? else {
            tensors.lacks_some = true;
            continue;
        };
        match tensors.by_name.entry(tensor.name.clone()) {
            MapEntry::Occupied(_) => {
                log.defect(tensor.entry_offset, Defect::DuplicateTensor { tensor: printable(&tensor.name) });
                // Its data is there, and needs a place.
            }
            MapEntry::Vacant(free) => _ = free.insert(tensors.list.len()),
        }
        tensors.list.push(tensor);
    }
    Ok(tensors)
}

/// `None`: its shape or type is wrong, which was written down.
fn read_tensor<R: Read>(source: &mut Source<R>, log: &mut Log) -> Result<Option<Tensor>> {
    let entry_offset = source.offset();
    let name = read_name(source, log)?;
    let shape = read_shape(source, &name, log)?;
    let at = source.offset();
    let id = source.u32(WHAT)?;
    let offset = source.u64(WHAT)?;
    let Some(shape) = shape else { return Ok(None) };
    let sized = kind_and_bytes(id, &name, &shape).or_else(|defect| malformed::<(GgmlType, u64)>(at, defect));
    let tensor = |(kind, bytes)| Tensor { name, shape, kind, offset, part: 0, bytes, entry_offset };
    Ok(log.take::<(GgmlType, u64)>(sized).map(tensor))
}

/// The element type with this number, and the bytes of a tensor of it.
fn kind_and_bytes(id: u32, name: &str, shape: &[u64]) -> std::result::Result<(GgmlType, u64), Defect> {
    let tensor = || printable(name);
    let Some(kind) = GgmlType::from_id(id) else {
        return Err(match GgmlType::removed(id) {
            Some((name, instead)) => Defect::RemovedTensorType { tensor: tensor(), name, instead },
            None => Defect::UnknownTensorType { tensor: tensor(), found: id },
        });
    };
    let (row, block) = (shape.first().copied().unwrap_or(0), kind.block_elements());
    if !row.is_multiple_of(block) {
        return Err(Defect::PartialBlock { tensor: tensor(), kind: kind.name(), row, block });
    }
    let elements: u64 = shape.iter().product();
    let bytes = (elements / block).checked_mul(kind.block_bytes()).filter(|&bytes| i64::try_from(bytes).is_ok());
    let bytes = bytes.ok_or_else(|| Defect::TensorTooLarge { tensor: tensor(), shape: shape.to_vec() })?;
    Ok((kind, bytes))
}

fn read_name<R: Read>(source: &mut Source<R>, log: &mut Log) -> Result<String> {
    let offset = source.offset();
    let length = source.u64(WHAT)?;
    if length >= MAX_TENSOR_NAME_BYTES {
        return malformed(offset, Defect::TensorNameTooLong { length });
    }
    if length == 0 {
        log.defect(offset, Defect::EmptyTensorName);
    }
    let mut bytes = Vec::new();
    source.read_to(&mut bytes, length, WHAT)?;
    let name = String::from_utf8(bytes).unwrap_or_else(|error| {
        log.defect(offset, Defect::TensorNameNotUtf8);
        String::from_utf8_lossy(error.as_bytes()).into_owned()
    });
    if name.chars().any(char::is_control) {
        log.defect(offset, Defect::ControlInTensorName { tensor: printable(&name) });
    }
    Ok(name)
}

/// One to four dimensions whose product fits 63 bits: ggml counts elements in signed numbers. `None`: they are none, which
/// was written down.
fn read_shape<R: Read>(source: &mut Source<R>, name: &str, log: &mut Log) -> Result<Option<Vec<u64>>> {
    let offset = source.offset();
    let found = source.u32(WHAT)?;
    if found == 0 || found > MAX_DIMENSIONS {
        return malformed(offset, Defect::WrongDimensionCount { tensor: printable(name), found });
    }
    let mut shape = Vec::new();
    for _ in 0..found {
        shape.push(source.u64(WHAT)?);
    }
    if let Some(dimension) = (0..).zip(&shape).find_map(|(index, &value)| (value == 0).then_some(index)) {
        log.defect(offset, Defect::ZeroDimension { tensor: printable(name), dimension });
        return Ok(None);
    }
    let elements = shape.iter().try_fold(1_u64, |product, &dimension| product.checked_mul(dimension));
    if let Some(Ok(_)) = elements.map(i64::try_from) {
        return Ok(Some(shape));
    }
    log.defect(offset, Defect::TensorTooLarge { tensor: printable(name), shape });
    Ok(None)
}

/// Where the tensor data starts and how long it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Byte of the file where the tensor data starts.
    pub(crate) data_offset: u64,
    /// Bytes of all tensors, without the padding between them.
    pub(crate) tensor_bytes: u64,
}

/// Checks that the tensors lie one after the other, each aligned, and end where the file does.
///
/// The padding after the last tensor may be there or not: writers differ. `alignment`: none where it is wrong; then, and
/// where a tensor could not be read, nobody knows where the others are to lie.
pub(crate) fn check_layout(
    tensors: &Tensors,
    header_end: u64,
    alignment: Option<u64>,
    file_bytes: u64,
    log: &mut Log,
) -> Layout {
    let is_known = alignment.is_some() && tensors.are_all_read();
    let alignment = alignment.unwrap_or(DEFAULT_ALIGNMENT);
    // The header's limit and the alignment's leave this far below overflow.
    let data_offset = header_end.next_multiple_of(alignment);
    let tensor_bytes = tensors.list().iter().fold(0_u64, |sum, tensor| sum.saturating_add(tensor.bytes));
    let layout = Layout { data_offset, tensor_bytes };
    if is_known && let Some((end, next)) = check_offsets(tensors, alignment, log) {
        check_end(tensors, data_offset, end, next, file_bytes, log);
    }
    layout
}

/// Where the tensors end in the tensor data, without and with padding; `None`: they do not lie one after the other.
fn check_offsets(tensors: &Tensors, alignment: u64, log: &mut Log) -> Option<(u64, u64)> {
    let (mut end, mut next) = (0_u64, 0_u64);
    let mut is_right = true;
    // Where the next one is if a wrong offset moved all that follow, and not its own tensor alone.
    let mut moved = None;
    for tensor in tensors.list() {
        let (at, found) = (tensor.entry_offset, tensor.offset);
        let name = printable(&tensor.name);
        if moved == Some(found) {
            next = found;
        }
        let defect = if !found.is_multiple_of(alignment) {
            Some(Defect::MisalignedTensor { tensor: name, found, alignment })
        } else if found < next {
            Some(Defect::TensorOverlap { tensor: name, found, expected: next })
        } else if found > next {
            Some(Defect::TensorGap { tensor: name, found, expected: next })
        } else {
            None
        };
        let padded = |start: u64| start.checked_add(tensor.bytes)?.checked_next_multiple_of(alignment);
        moved = if defect.is_some() { padded(found) } else { None };
        if let Some(defect) = defect {
            log.defect(at, defect);
            is_right = false;
        }
        match padded(next) {
            // The end is not beyond its padding.
            Some(padded) => (end, next) = (next + tensor.bytes, padded),
            None => {
                let (tensor, shape) = (printable(&tensor.name), tensor.shape.clone());
                log.defect(at, Defect::TensorTooLarge { tensor, shape });
                return None;
            }
        }
    }
    is_right.then_some((end, next))
}

fn check_end(tensors: &Tensors, data_offset: u64, end: u64, next: u64, file_bytes: u64, log: &mut Log) {
    let whole = |end: u64| data_offset.saturating_add(end);
    if file_bytes < whole(end) && !tensors.list().is_empty() {
        let cut = tensors.list().iter().find(|tensor| whole(tensor.offset.saturating_add(tensor.bytes)) > file_bytes);
        let tensor = cut.map(|tensor| printable(&tensor.name)).unwrap_or_default();
        log.defect(file_bytes, Defect::DataTruncated { tensor, expected: whole(end), found: file_bytes });
    }
    // A part without tensors may end with its header.
    if file_bytes > whole(next) {
        log.defect(whole(next), Defect::TrailingBytes { expected: whole(next), found: file_bytes });
    }
}

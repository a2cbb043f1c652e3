//! The tensor table: names, shapes, types, and where the data lies.
//!
//! Flow: [`read_tensors`] reads the table and checks each entry alone, [`check_layout`] then checks them against each
//! other and against the length of the file, as ggml does and one step further (ggml does not look at the length).

use std::collections::HashMap;
use std::io::Read;

use crate::error::{Defect, Result, malformed, printable};
use crate::ggml::GgmlType;
use crate::limits::{MAX_DIMENSIONS, MAX_TENSOR_NAME_BYTES};
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
    /// Takes in those of a further part.
    pub(crate) fn extend(&mut self, others: Self, part: usize) -> Result<()> {
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
pub(crate) fn read_tensors<R: Read>(source: &mut Source<R>, count: u64) -> Result<Tensors> {
    let mut tensors = Tensors::default();
    for _ in 0..count {
        let tensor = read_tensor(source)?;
        if tensors.by_name.insert(tensor.name.clone(), tensors.list.len()).is_some() {
            return malformed(tensor.entry_offset, Defect::DuplicateTensor { tensor: printable(&tensor.name) });
        }
        tensors.list.push(tensor);
    }
    Ok(tensors)
}

fn read_tensor<R: Read>(source: &mut Source<R>) -> Result<Tensor> {
    let entry_offset = source.offset();
    let name = read_name(source)?;
    let shape = read_shape(source, &name)?;
    let at = source.offset();
    let id = source.u32(WHAT)?;
    let tensor = || printable(&name);
    let Some(kind) = GgmlType::from_id(id) else {
        return malformed(
            at,
            match GgmlType::removed(id) {
                Some((name, instead)) => Defect::RemovedTensorType { tensor: tensor(), name, instead },
                None => Defect::UnknownTensorType { tensor: tensor(), found: id },
            },
        );
    };
    let (row, block) = (shape[0], kind.block_elements());
    if !row.is_multiple_of(block) {
        return malformed(at, Defect::PartialBlock { tensor: tensor(), kind: kind.name(), row, block });
    }
    let elements: u64 = shape.iter().product();
    let Some(bytes) = (elements / block).checked_mul(kind.block_bytes()).filter(|&bytes| i64::try_from(bytes).is_ok())
    else {
        return malformed(at, Defect::TensorTooLarge { tensor: tensor(), shape });
    };
    let offset = source.u64(WHAT)?;
    Ok(Tensor { name, shape, kind, offset, part: 0, bytes, entry_offset })
}

fn read_name<R: Read>(source: &mut Source<R>) -> Result<String> {
    let offset = source.offset();
    let length = source.u64(WHAT)?;
    if length >= MAX_TENSOR_NAME_BYTES {
        return malformed(offset, Defect::TensorNameTooLong { length });
    }
    if length == 0 {
        return malformed(offset, Defect::EmptyTensorName);
    }
    let mut bytes = Vec::new();
    source.read_to(&mut bytes, length, WHAT)?;
    let name = String::from_utf8(bytes).or_else(|_| malformed(offset, Defect::TensorNameNotUtf8))?;
    if name.chars().any(char::is_control) {
        return malformed(offset, Defect::ControlInTensorName { tensor: printable(&name) });
    }
    Ok(name)
}

/// One to four dimensions whose product fits 63 bits: ggml counts elements in signed numbers.
fn read_shape<R: Read>(source: &mut Source<R>, name: &str) -> Result<Vec<u64>> {
    let offset = source.offset();
    let found = source.u32(WHAT)?;
    if found == 0 || found > MAX_DIMENSIONS {
        return malformed(offset, Defect::WrongDimensionCount { tensor: printable(name), found });
    }
    let mut shape = Vec::new();
    for dimension in 0..found {
        let value = source.u64(WHAT)?;
        if value == 0 {
            return malformed(offset, Defect::ZeroDimension { tensor: printable(name), dimension });
        }
        shape.push(value);
    }
    let elements = shape.iter().try_fold(1_u64, |product, &dimension| product.checked_mul(dimension));
    match elements.map(i64::try_from) {
        Some(Ok(_)) => Ok(shape),
        _ => malformed(offset, Defect::TensorTooLarge { tensor: printable(name), shape }),
    }
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
/// The padding after the last tensor may be there or not: writers differ.
pub(crate) fn check_layout(tensors: &Tensors, header_end: u64, alignment: u64, file_bytes: u64) -> Result<Layout> {
    let too_large =
        |tensor: &Tensor| Defect::TensorTooLarge { tensor: printable(&tensor.name), shape: tensor.shape.clone() };
    // The header's limit and the alignment's leave this far below overflow.
    let data_offset = header_end.next_multiple_of(alignment);
    let (mut next, mut end, mut tensor_bytes) = (0_u64, 0_u64, 0_u64);
    for tensor in tensors.list() {
        let (at, found) = (tensor.entry_offset, tensor.offset);
        let name = || printable(&tensor.name);
        if !found.is_multiple_of(alignment) {
            return malformed(at, Defect::MisalignedTensor { tensor: name(), found, alignment });
        }
        if found < next {
            return malformed(at, Defect::TensorOverlap { tensor: name(), found, expected: next });
        }
        if found > next {
            return malformed(at, Defect::TensorGap { tensor: name(), found, expected: next });
        }
        let sums =
            found.checked_add(tensor.bytes).and_then(|end| Some((end, end.checked_next_multiple_of(alignment)?)));
        match sums {
            Some((data_end, padded)) => (end, next) = (data_end, padded),
            None => return malformed(at, too_large(tensor)),
        }
        // At most `end`, which has just been found to fit.
        tensor_bytes += tensor.bytes;
    }
    let whole = |end: u64| data_offset.saturating_add(end);
    if file_bytes < whole(end) && !tensors.list().is_empty() {
        let cut = tensors.list().iter().find(|tensor| whole(tensor.offset.saturating_add(tensor.bytes)) > file_bytes);
        let tensor = cut.map(|tensor| printable(&tensor.name)).unwrap_or_default();
        return malformed(file_bytes, Defect::DataTruncated { tensor, expected: whole(end), found: file_bytes });
    }
    // A part without tensors may end with its header.
    if file_bytes > whole(next) {
        return malformed(whole(next), Defect::TrailingBytes { expected: whole(next), found: file_bytes });
    }
    Ok(Layout { data_offset, tensor_bytes })
}

//! What a model's quantisation is called: "Q4_K_M", "Q8_0", "F16".
//!
//! `general.file_type` says it, but is only a claim; the tensors decide. Its name is used when the type it stands for is
//! really among them, since it alone knows S, M and L apart; otherwise the type that holds most bytes names the file.

use std::collections::BTreeMap;

use crate::finding::{Code, Finding};
use crate::ggml::GgmlType;
use crate::shapes::is_matrix;
use crate::tensor::Tensor;
use crate::value::{Metadata, Value, ValueType};

/// Key of the file type.
const FILE_TYPE_KEY: &str = "general.file_type";

/// Name of llama.cpp's file type `id` (its `llama_ftype`), and the tensor types of which one must be there.
fn file_type(id: u32) -> Option<(&'static str, &'static [GgmlType])> {
    use GgmlType as T;
    Some(match id {
        0 => ("F32", &[T::F32]),
        1 => ("F16", &[T::F16]),
        2 => ("Q4_0", &[T::Q4_0]),
        3 => ("Q4_1", &[T::Q4_1]),
        7 => ("Q8_0", &[T::Q8_0]),
        8 => ("Q5_0", &[T::Q5_0]),
        9 => ("Q5_1", &[T::Q5_1]),
        10 => ("Q2_K", &[T::Q2_K]),
        11 => ("Q3_K_S", &[T::Q3_K]),
        12 => ("Q3_K_M", &[T::Q3_K]),
        13 => ("Q3_K_L", &[T::Q3_K]),
        14 => ("Q4_K_S", &[T::Q4_K]),
        15 => ("Q4_K_M", &[T::Q4_K]),
        16 => ("Q5_K_S", &[T::Q5_K]),
        17 => ("Q5_K_M", &[T::Q5_K]),
        18 => ("Q6_K", &[T::Q6_K]),
        19 => ("IQ2_XXS", &[T::IQ2_XXS]),
        20 => ("IQ2_XS", &[T::IQ2_XS]),
        21 => ("Q2_K_S", &[T::Q2_K]),
        22 => ("IQ3_XS", &[T::IQ3_XXS, T::IQ3_S]),
        23 => ("IQ3_XXS", &[T::IQ3_XXS]),
        24 => ("IQ1_S", &[T::IQ1_S]),
        25 => ("IQ4_NL", &[T::IQ4_NL]),
        26 => ("IQ3_S", &[T::IQ3_S]),
        27 => ("IQ3_M", &[T::IQ3_S]),
        28 => ("IQ2_S", &[T::IQ2_XS, T::IQ2_S]),
        29 => ("IQ2_M", &[T::IQ2_S]),
        30 => ("IQ4_XS", &[T::IQ4_XS]),
        31 => ("IQ1_M", &[T::IQ1_M]),
        32 => ("BF16", &[T::BF16]),
        36 => ("TQ1_0", &[T::TQ1_0]),
        37 => ("TQ2_0", &[T::TQ2_0]),
        38 => ("MXFP4", &[T::MXFP4]),
        39 => ("NVFP4", &[T::NVFP4]),
        40 => ("Q1_0", &[T::Q1_0]),
        41 => ("Q2_0", &[T::Q2_0]),
        _ => return None,
    })
}

/// Bytes of tensor data per type, the largest share first.
pub(crate) fn type_shares(tensors: &[Tensor]) -> Vec<(GgmlType, u64)> {
    let mut bytes: BTreeMap<GgmlType, u64> = BTreeMap::new();
    for tensor in tensors {
        let sum = bytes.entry(tensor.kind).or_default();
        *sum = sum.saturating_add(tensor.bytes);
    }
    let mut shares: Vec<_> = bytes.into_iter().collect();
    shares.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
    shares
}

/// What is odd where the file claims a quantisation that none of its matrices has, though their rows would be whole blocks of it;
/// where no row would be, a quantiser falls back to another type.
pub(crate) fn contradiction(metadata: &Metadata, tensors: &[Tensor]) -> Option<Finding> {
    let entry = metadata.entry(FILE_TYPE_KEY)?;
    let Value::Integer { kind: ValueType::U32, value } = entry.value else { return None };
    let (claimed, kinds) = file_type(u32::try_from(value).ok()?)?;
    let could = |tensor: &Tensor| {
        let row = tensor.shape.first().copied().unwrap_or(0);
        is_matrix(&tensor.name) && kinds.iter().all(|kind| row.is_multiple_of(kind.block_elements()))
    };
    if !tensors.iter().any(could) || tensors.iter().any(|tensor| kinds.contains(&tensor.kind)) {
        return None;
    }
    let largest = type_shares(tensors).first().map_or("nothing", |(kind, _)| kind.name());
    let message =
        format!("{FILE_TYPE_KEY} says {claimed}, but no tensor is of that type; most of the model is {largest}");
    let finding = Finding::new(Code::DeclaredQuantization, "header", format!("tensors of type {largest}"), claimed);
    Some(finding.about(FILE_TYPE_KEY).at(entry.offset).saying(message))
}

/// The name of the file's quantisation.
pub(crate) fn label(metadata: &Metadata, tensors: &[Tensor]) -> &'static str {
    let shares = type_shares(tensors);
    let claimed = match metadata.get(FILE_TYPE_KEY) {
        Some(&Value::Integer { kind: ValueType::U32, value }) => u32::try_from(value).ok().and_then(file_type),
        _ => None,
    };
    let is_there = |kinds: &[GgmlType]| shares.iter().any(|(kind, _)| kinds.contains(kind));
    match (claimed, shares.first()) {
        // Every file has F32 norms, so that F32 is believed only of the largest share.
        (Some(("F32", _)), Some((largest, _))) if *largest != GgmlType::F32 => largest.name(),
        (Some((name, kinds)), _) if is_there(kinds) => name,
        (_, Some((largest, _))) => largest.name(),
        (_, None) => "unknown",
    }
}

//! The one way that every model file takes before a worker sees it: `serve`, `validate` and the gates of a pod call [`check`],
//! and so refuse the same files with the same words.
//!
//! Header, tokenizer and tensors by [`gantry_gguf`], of all parts of a model that is split, and a sample of the weights.
//! Absent: what only a worker can tell, which the Load gate does.

use std::io;
use std::path::Path;

use gantry_gguf::{GgufError, Header, WeightsDefect, WeightsReport};

use super::limits::WEIGHTS_LIMIT;

/// A model file in which everything was found right.
#[derive(Debug)]
pub struct ModelFile {
    /// What its header says.
    pub header: Header,
    /// What was seen of its weights.
    pub weights: WeightsReport,
}

/// Why a file is not to be loaded.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read, or is not a whole, well-formed model.
    #[error(transparent)]
    Header(#[from] GgufError),
    /// Its weights are damaged.
    #[error(transparent)]
    Weights(WeightsDefect),
    /// Its weights cannot be read.
    #[error("cannot read the model's weights: {0}")]
    Unreadable(#[from] io::Error),
}

/// Checks a file, or the files of a model whose first this is. Blocks.
///
/// # Errors
/// What is wrong, where, and what to do.
pub fn check(path: &Path) -> Result<ModelFile, FileError> {
    let header = gantry_gguf::read_header(path)?;
    let weights = check_weights(path, &header)?;
    Ok(ModelFile { header, weights })
}

/// Looks at the weights of a file whose header was read. Blocks.
///
/// # Errors
/// As [`check`].
pub fn check_weights(path: &Path, header: &Header) -> Result<WeightsReport, FileError> {
    let mut weights = gantry_gguf::sample_weights(path, header, WEIGHTS_LIMIT)?;
    match weights.defect.take() {
        Some(defect) => Err(FileError::Weights(defect)),
        None => Ok(weights),
    }
}

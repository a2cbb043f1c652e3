//! Why a model file could not be fetched, and whether another try can help.

use std::time::Duration;

use super::digest::Digest;

/// A fetch that ended without the file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FetchError {
    /// The other side may answer later.
    #[error("{reason}")]
    Temporary {
        /// What happened, with the address.
        reason: String,
        /// When the server wants to be asked again.
        retry_after: Option<Duration>,
    },
    /// Nothing changes by asking again; the message says what to do.
    #[error("{0}")]
    Permanent(String),
    /// The file does not fit into the cache, beside what is in use there.
    #[error("{0}")]
    TooLarge(String),
    /// What came is no model file. What it is instead is not told: who writes a spec may not be somebody who may read it.
    #[error(
        "{0} is no GGUF file: it begins otherwise; give the address of the model file itself, not of a page about it, a Git LFS pointer or an archive"
    )]
    NotGguf(String),
    /// The disk under the cache is full.
    #[error(
        "the cache's disk is full ({0}); give the pods more ephemeral storage, lower spec.cache.sizeLimit, or choose a smaller model"
    )]
    DiskFull(String),
    /// The file is another one than was asked for.
    #[error(
        "the file has the SHA-256 {found}, and {expected} was asked for; correct the sha256 in the spec, or the address"
    )]
    WrongDigest {
        /// Asked for.
        expected: Digest,
        /// Computed.
        found: Digest,
        /// Bytes that were hashed.
        bytes: u64,
    },
    /// The file was not wanted any more.
    #[error("the fetch was cancelled")]
    Cancelled,
}

impl FetchError {
    /// A failure that may pass.
    pub(super) fn temporary(reason: impl Into<String>) -> Self {
        Self::Temporary { reason: reason.into(), retry_after: None }
    }

    /// Whether another try can help.
    #[must_use]
    pub fn is_temporary(&self) -> bool {
        matches!(self, Self::Temporary { .. })
    }

    /// When the server wants to be asked again.
    pub(super) fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Temporary { retry_after, .. } => *retry_after,
            _ => None,
        }
    }

    /// A failure of the cache's own disk.
    pub(super) fn disk(what: &str, error: &std::io::Error) -> Self {
        match error.kind() {
            std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => {
                Self::DiskFull(format!("{what}: {error}"))
            }
            _ => Self::temporary(format!("the cache cannot be used ({what}: {error})")),
        }
    }
}

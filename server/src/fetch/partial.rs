//! A file on its way into the cache: what is there, its running SHA-256, and what the server called its state.
//!
//! A [`Partial`] holds the right to work on it ([`flight`](super::flight)), so that the next fetch of the same digest cannot open the file
//! while a writer that was abandoned still holds it. All calls block; they run on blocking threads.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::digest::Digest;
use super::flight::Right;
use super::limits::FILE_BUFFER_BYTES;
use super::lock;

/// What the server said about the file that the bytes are from, to continue only that one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Validator {
    /// A strong entity tag.
    pub(super) etag: Option<String>,
    /// Used where there is no strong tag.
    pub(super) last_modified: Option<String>,
}

impl Validator {
    /// The value of `If-Range`.
    pub(super) fn if_range(&self) -> Option<&str> {
        self.etag.as_deref().or(self.last_modified.as_deref())
    }
}

pub(super) struct Partial {
    file: File,
    path: PathBuf,
    hasher: Sha256,
    bytes: u64,
    validator: Validator,
    /// Whether all bytes came in one piece, from the first to the last.
    whole: bool,
    /// Whether it was said how long the file is, so that one that was cut is known for it.
    known_length: bool,
    _right: Right,
}

impl Partial {
    /// Opens or creates the file, and hashes what an earlier process left; gives the right back where another process works on it.
    pub(super) fn open(path: PathBuf, right: Right) -> io::Result<Result<Self, Right>> {
        let Some(mut file) = lock::alone(&path)? else { return Ok(Err(right)) };
        let mut hasher = Sha256::new();
        let bytes = hash_into(&mut file, &mut hasher)?;
        let validator = fs::read(validator_path(&path))
            .ok()
            .and_then(|text| serde_json::from_slice(&text).ok())
            .unwrap_or_default();
        Ok(Ok(Self { file, path, hasher, bytes, validator, whole: bytes == 0, known_length: true, _right: right }))
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn validator(&self) -> &Validator {
        &self.validator
    }

    /// Whether the bytes are from one answer and none was left by an earlier one.
    pub(super) fn is_whole(&self) -> bool {
        self.whole
    }

    /// Whether a file that was cut would be known for it.
    pub(super) fn has_known_length(&self) -> bool {
        self.known_length
    }

    /// Notes that what follows is from another answer than what is there, and whether that says how long the file is.
    pub(super) fn resumed(&mut self, known_length: bool) {
        (self.whole, self.known_length) = (self.bytes == 0, known_length);
    }

    /// Notes what the server calls the file.
    pub(super) fn set_validator(&mut self, validator: Validator) -> io::Result<()> {
        if self.validator != validator {
            let text = serde_json::to_vec(&validator).map_err(io::Error::other)?;
            fs::write(validator_path(&self.path), text)?;
            self.validator = validator;
        }
        Ok(())
    }

    pub(super) fn append(&mut self, chunk: &[u8]) -> io::Result<()> {
        if let Err(error) = self.file.write_all(chunk) {
            // A part of the chunk may have been written: cut it off, so that file and hash agree.
            self.file.set_len(self.bytes)?;
            self.file.seek(SeekFrom::Start(self.bytes))?;
            return Err(error);
        }
        self.hasher.update(chunk);
        self.bytes += chunk.len() as u64;
        Ok(())
    }

    /// Throws away what is there.
    pub(super) fn restart(&mut self) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.seek(SeekFrom::Start(0))?;
        self.hasher = Sha256::new();
        self.bytes = 0;
        self.whole = true;
        self.set_validator(Validator::default())
    }

    pub(super) fn digest(&self) -> Digest {
        Digest::from(<[u8; 32]>::from(self.hasher.clone().finalize()))
    }

    /// Makes the file last, under its final name.
    pub(super) fn commit(self, to: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        fs::rename(&self.path, to)?;
        remove_if_there(&validator_path(&self.path))?;
        match to.parent() {
            Some(folder) => File::open(folder)?.sync_all(),
            None => Ok(()),
        }
    }

    /// Removes the file.
    pub(super) fn discard(self) -> io::Result<()> {
        remove_if_there(&self.path)?;
        remove_if_there(&validator_path(&self.path))
    }
}

/// Where the validator of the partial file `path` stands.
pub(super) fn validator_path(path: &Path) -> PathBuf {
    path.with_extension("validator")
}

/// Removes a file that may be gone already.
pub(super) fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Hashes a file from its start, if it is a regular one: of a pipe or a device there may be no end.
pub(super) fn hash_file(path: &Path) -> io::Result<Digest> {
    let mut hasher = Sha256::new();
    hash_into(&mut gantry_gguf::open(path)?.0, &mut hasher)?;
    Ok(Digest::from(<[u8; 32]>::from(hasher.finalize())))
}

fn hash_into(file: &mut File, hasher: &mut Sha256) -> io::Result<u64> {
    let mut buffer = vec![0; FILE_BUFFER_BYTES];
    let mut bytes = 0;
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(bytes),
            n => {
                hasher.update(&buffer[..n]);
                bytes += n as u64;
            }
        }
    }
}

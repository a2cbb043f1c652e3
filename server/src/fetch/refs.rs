//! What addresses meant when they were fetched last, so that a start needs no network where they always mean the same, and little of
//! it where they may not.
//!
//! `refs/<digest of the address>.json`, written whole or not at all. No address is in it as it was given: its query may be a secret.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::cache::Cache;
use super::digest::Digest;
use super::limits::MAX_KNOWN_ADDRESSES;
use super::partial::{Validator, remove_if_there};
use super::source::Source;

/// What an address meant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ref {
    /// As it is shown, for people who look into the folder.
    pub(super) address: String,
    /// The address that means the same for ever, where there is one.
    pub(super) pinned: Option<String>,
    /// Its files, in their order.
    pub(super) files: Vec<RefFile>,
}

/// One of its files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RefFile {
    pub(super) sha256: String,
    /// What its server called it, where that is all there is to know it by.
    pub(super) state: Option<FileState>,
}

/// What a server says of a file as it is now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileState {
    pub(super) validator: Validator,
    /// Its length in bytes.
    pub(super) total: Option<u64>,
}

impl FileState {
    /// Whether a file that is called so again is the same.
    pub(super) fn tells(&self) -> bool {
        self.validator.if_range().is_some()
    }
}

impl Ref {
    pub(super) fn digests(&self) -> Option<Vec<Digest>> {
        self.files.iter().map(|file| file.sha256.parse().ok()).collect()
    }

    /// Whether the store told them all.
    pub(super) fn are_digests_told(&self) -> bool {
        self.files.iter().all(|file| file.state.is_none())
    }
}

impl Cache {
    /// What the address with this key meant. Blocks.
    pub(super) fn known(&self, key: Digest) -> Option<Ref> {
        let text = fs::read(self.ref_path(key)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// The digests of what an address meant last. Blocks.
    #[must_use]
    pub fn meant(&self, source: &Source) -> Vec<Digest> {
        self.known(source.key()).and_then(|known| known.digests()).unwrap_or_default()
    }

    /// Notes what an address means. Blocks.
    pub(super) fn note(&self, key: Digest, meant: &Ref) -> io::Result<()> {
        if self.known(key).as_ref() == Some(meant) {
            return Ok(());
        }
        let folder = self.refs();
        fs::create_dir_all(&folder)?;
        make_room(&folder)?;
        let mut new = tempfile::NamedTempFile::new_in(&folder)?;
        new.write_all(&serde_json::to_vec_pretty(meant).map_err(io::Error::other)?)?;
        new.persist(self.ref_path(key)).map(drop).map_err(|error| error.error)
    }

    fn ref_path(&self, key: Digest) -> PathBuf {
        self.refs().join(format!("{key}.json"))
    }
}

/// Forgets the addresses that were noted first, where there are too many.
fn make_room(folder: &Path) -> io::Result<()> {
    let mut noted: Vec<(SystemTime, PathBuf)> = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        match entry.metadata().and_then(|metadata| metadata.modified()) {
            Ok(at) => noted.push((at, entry.path())),
            // Another process has given it its name, or removed it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    noted.sort_unstable();
    let too_many = (noted.len() + 1).saturating_sub(MAX_KNOWN_ADDRESSES);
    noted.iter().take(too_many).try_for_each(|(_, path)| remove_if_there(path))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_addresses_meant_is_kept_and_the_oldest_goes() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path()).unwrap();
        let key = |number: usize| Digest::from([u8::try_from(number % 256).unwrap(); 32]);
        let file = RefFile { sha256: "ab".repeat(32), state: None };
        let meant = Ref { address: "hf://o/r/m".to_owned(), pinned: None, files: vec![file] };
        assert_eq!(cache.known(key(1)), None);
        cache.note(key(1), &meant).unwrap();
        assert_eq!(cache.known(key(1)), Some(meant.clone()));
        assert_eq!(meant.digests(), Some(vec!["ab".repeat(32).parse().unwrap()]));
        fs::write(cache.ref_path(key(1)), b"{").unwrap();
        assert_eq!(cache.known(key(1)), None, "what cannot be read is not known");

        for number in 0..MAX_KNOWN_ADDRESSES {
            fs::write(cache.refs().join(format!("{number}.json")), b"{}").unwrap();
        }
        cache.note(key(2), &meant).unwrap();
        assert_eq!(fs::read_dir(cache.refs()).unwrap().count(), MAX_KNOWN_ADDRESSES);
        assert!(cache.known(key(2)).is_some());
    }
}

//! Models that are split, in the cache: each part is a file of its own there, and links name all of them so that llama.cpp
//! finds the others by the first one's name.
//!
//! `parts/<digest of the parts' digests>/model-00001-of-00003.gguf` leads to `sha256/<digest>`, and so on. Once a part is
//! evicted the links go, and the other parts with them as far as nobody uses them: none is of use by itself.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use super::cache::Cache;
use super::digest::Digest;
use super::partial::remove_if_there;
use super::split;

impl Cache {
    /// Names the parts of a model, all of which are in the cache, and gives the first one's name. Blocks.
    pub(super) fn name_parts(&self, digests: &[Digest]) -> io::Result<PathBuf> {
        let all: String = digests.iter().map(ToString::to_string).collect();
        let folder = self.parts().join(hex::encode(Sha256::digest(all)));
        fs::create_dir_all(&folder)?;
        let count = digests.len() as u64;
        let name = |number: u64| folder.join(format!("model{}", split::suffix(number, count)));
        for (number, digest) in (1..).zip(digests) {
            let target = Path::new("../../sha256").join(digest.to_string());
            match symlink(&target, name(number)) {
                Err(error)
                    if error.kind() == io::ErrorKind::AlreadyExists && fs::read_link(name(number))? == target => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    remove_if_there(&name(number))?;
                    symlink(&target, name(number))?;
                }
                linked => linked?,
            }
        }
        Ok(name(1))
    }

    /// Forgets the models that this file is a part of, and gives their other parts. Blocks.
    pub(super) fn forget_parts(&self, digest: Digest) -> io::Result<Vec<Digest>> {
        let mut others = Vec::new();
        let folders = match fs::read_dir(self.parts()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(others),
            folders => folders?,
        };
        for folder in folders {
            let folder = folder?.path();
            let mut parts = Vec::new();
            for link in fs::read_dir(&folder)? {
                let target = fs::read_link(link?.path()).unwrap_or_default();
                parts.extend(target.file_name().and_then(|name| name.to_str()?.parse::<Digest>().ok()));
            }
            if parts.contains(&digest) {
                fs::remove_dir_all(&folder)?;
                others.extend(parts.into_iter().filter(|part| *part != digest));
            }
        }
        Ok(others)
    }
}

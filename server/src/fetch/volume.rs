//! A model's file on a volume: hashed, and then read where it is.
//!
//! Others may write to a volume, so a digest holds for a file only as long as it is the same one. What a file is known by (its
//! inode, length and times) is noted before its bytes are hashed and compared after, and by each worker after it has read
//! the file ([`FileStamp::is_unchanged`]): weights are in memory of the worker's own then, and what becomes of the file
//! does not matter any more. With layers on GPUs llama.cpp may compute from the mapped file, and there it is copied into the
//! cache as any other source is. Absent: a guard against somebody who sets a file's time of change back, which takes
//! control of the volume's server.

use std::fs::{self, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use gantry_crds::inference_service::is_object_name;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::digest::Digest;
use super::error::FetchError;
use super::limits::FILE_BUFFER_BYTES;
use super::magic::Magic;
use super::partial::hash_file;
use super::progress::{FetchProgress, Meter};

/// A file on a claim that is mounted in the pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct VolumeFile {
    /// Where claims are mounted, each in a folder of its name.
    pub(super) folder: PathBuf,
    pub(super) claim: String,
    /// Relative to the volume's root.
    pub(super) path: String,
    /// Whether it may be read where it is.
    pub(super) in_place: bool,
}

impl VolumeFile {
    /// The file's own path, with no link in it, within its volume. Blocks.
    pub(super) fn resolve(&self) -> Result<PathBuf, FetchError> {
        let Self { folder, claim, path, .. } = self;
        let root = folder.join(claim);
        if !is_object_name(claim) || !root.is_dir() {
            return Err(FetchError::Permanent(format!(
                "the PersistentVolumeClaim {claim} is not mounted in this pod; name it in spec.pod.modelVolumes"
            )));
        }
        let refused = |error: io::Error| self.unreadable(&error);
        let root = root.canonicalize().map_err(refused)?;
        let file = root.join(path).canonicalize().map_err(refused)?;
        if !file.starts_with(&root) {
            return Err(FetchError::Permanent(format!(
                "{self} leads out of its volume; give the path of a file on it"
            )));
        }
        Ok(file)
    }

    pub(super) fn unreadable(&self, error: &io::Error) -> FetchError {
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                FetchError::Permanent(format!("{self} is not there; put the file there, or correct pvc.path"))
            }
            io::ErrorKind::InvalidInput => FetchError::Permanent(format!("{self}: {error}; correct pvc.path")),
            io::ErrorKind::PermissionDenied => FetchError::Permanent(format!(
                "{self} may not be read by the user of the server; let everybody read it, or give its group in \
                 spec.pod.securityContext.supplementalGroups"
            )),
            _ => FetchError::temporary(format!("{self} cannot be read: {error}")),
        }
    }

    /// Hashes the file. Blocks.
    pub(super) fn verify(
        &self,
        path: &Path,
        digest: Digest,
        progress: &watch::Sender<FetchProgress>,
        cancel: &CancellationToken,
    ) -> Result<FileStamp, FetchError> {
        let unreadable = |error: io::Error| self.unreadable(&error);
        let (mut file, total) = gantry_gguf::open(path).map_err(unreadable)?;
        let before = FileStamp::of(path, Some(digest.into()), &file.metadata().map_err(unreadable)?);
        let mut meter = Meter::new(progress, 0, Some(total), Instant::now());
        let (mut hasher, mut magic, mut bytes) = (Sha256::new(), Magic::from(0), 0);
        let mut buffer = vec![0; FILE_BUFFER_BYTES];
        loop {
            if cancel.is_cancelled() {
                return Err(FetchError::Cancelled);
            }
            let n = file.read(&mut buffer).map_err(unreadable)?;
            magic.check(&buffer[..n]).map_err(|_| FetchError::NotGguf(self.to_string()))?;
            if n == 0 {
                break;
            }
            hasher.update(&buffer[..n]);
            bytes += n as u64;
            meter.at(bytes, Instant::now());
        }
        if FileStamp::of(path, Some(digest.into()), &fs::metadata(path).map_err(unreadable)?) != before
            || bytes != total
        {
            return Err(FetchError::temporary(format!("{self} is being written; it is read again")));
        }
        let found = Digest::from(<[u8; 32]>::from(hasher.finalize()));
        if found != digest {
            return Err(FetchError::WrongDigest { expected: digest, found, bytes });
        }
        Ok(before)
    }
}

/// As it is told.
impl std::fmt::Display for VolumeFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} on the PersistentVolumeClaim {}", self.path, self.claim)
    }
}

/// A file as it was when its bytes were hashed, or looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileStamp {
    path: PathBuf,
    /// `None`: nobody has hashed it, so that one of which anything has changed is another.
    sha256: Option<[u8; 32]>,
    device: u64,
    inode: u64,
    bytes: u64,
    /// Seconds and nanoseconds since 1970, as the next.
    modified: (i64, i64),
    /// When anything of it was changed last, its other times included: nobody but the kernel, or the volume's server, sets it. 0 for one
    /// that was not hashed: its name and its owner are no part of it.
    changed: (i64, i64),
}

impl FileStamp {
    fn of(path: &Path, sha256: Option<[u8; 32]>, metadata: &Metadata) -> Self {
        Self {
            path: path.to_owned(),
            sha256,
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: sha256.map(|_| (metadata.ctime(), metadata.ctime_nsec())).unwrap_or_default(),
        }
    }

    /// The file as it is, which nobody hashes.
    ///
    /// # Errors
    /// It is not there, or may not be looked at.
    pub fn looked_at(path: &Path) -> io::Result<Self> {
        Ok(Self::of(path, None, &fs::metadata(path)?))
    }

    /// The file as it is, hashed. Blocks.
    ///
    /// # Errors
    /// It cannot be read, or is being written.
    pub fn hashed(path: &Path) -> io::Result<Self> {
        let before = fs::metadata(path)?;
        let stamp = Self::of(path, Some(hash_file(path)?.into()), &before);
        match stamp.is_unchanged() {
            true => Ok(stamp),
            false => Err(io::Error::other("it is being written: try again when that has ended")),
        }
    }

    /// Its SHA-256, where it was hashed.
    #[must_use]
    pub fn digest(&self) -> Option<Digest> {
        self.sha256.map(Digest::from)
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its length.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether nothing of it has changed.
    #[must_use]
    pub fn is_unchanged(&self) -> bool {
        fs::metadata(&self.path).is_ok_and(|metadata| Self::of(&self.path, self.sha256, &metadata) == *self)
    }

    /// The file as it is now, which is hashed where anything of it has changed. Blocks.
    ///
    /// # Errors
    /// Its bytes are others, or cannot be read: says so, and what to do.
    pub fn again(&self) -> Result<Self, String> {
        if self.is_unchanged() {
            return Ok(self.clone());
        }
        let path = self.path.display();
        let unreadable = |error: io::Error| format!("{path} cannot be read any more: {error}");
        let now = Self::of(&self.path, self.sha256, &fs::metadata(&self.path).map_err(unreadable)?);
        let Some(sha256) = self.sha256 else { return Err(self.has_changed()) };
        let found = hash_file(&self.path).map_err(unreadable)?;
        if found != sha256.into() || !now.is_unchanged() {
            return Err(self.has_changed());
        }
        Ok(now)
    }

    /// That it is another file by now, and what to do.
    #[must_use]
    pub fn has_changed(&self) -> String {
        let path = self.path.display();
        match self.sha256 {
            Some(_) => format!(
                "{path} has changed since its digest was checked; put each model into a file of its own, and leave it as it is while it \
                 is served"
            ),
            None => format!(
                "{path} is another file than the one that was served, or has changed; start the server anew to serve it as it is now"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs::File;
    use std::io::Write;

    use super::*;

    fn volume(path: &str, content: &[u8]) -> (tempfile::TempDir, VolumeFile) {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("models/sub")).unwrap();
        fs::write(folder.path().join("models/sub/m.gguf"), content).unwrap();
        let file = VolumeFile {
            folder: folder.path().to_owned(),
            claim: "models".to_owned(),
            path: path.to_owned(),
            in_place: true,
        };
        (folder, file)
    }

    fn verified(file: &VolumeFile, content: &[u8]) -> Result<FileStamp, FetchError> {
        let digest = Digest::from(<[u8; 32]>::from(Sha256::digest(content)));
        let (progress, seen) = watch::channel(FetchProgress::default());
        let verified = file.verify(&file.resolve()?, digest, &progress, &CancellationToken::new())?;
        assert_eq!((seen.borrow().bytes, seen.borrow().total), (verified.bytes(), Some(verified.bytes())));
        Ok(verified)
    }

    #[test]
    fn a_file_is_what_it_was_until_anything_of_it_changes() {
        let content = b"GGUF and more";
        type Change = fn(&Path);
        let changes: [Change; 4] = [
            |path| fs::write(path, b"GGUF and less").unwrap(),
            |path| File::options().append(true).open(path).unwrap().write_all(b".").unwrap(),
            |path| {
                // The same bytes in another file, moved over it with the older times.
                let times = fs::metadata(path).unwrap();
                fs::copy(path, path.with_extension("new")).unwrap();
                let new = File::options().append(true).open(path.with_extension("new")).unwrap();
                new.set_modified(times.modified().unwrap()).unwrap();
                fs::rename(path.with_extension("new"), path).unwrap();
            },
            |path| fs::remove_file(path).unwrap(),
        ];
        for change in changes {
            let (folder, file) = volume("sub/m.gguf", content);
            let verified = verified(&file, content).unwrap();
            assert!(verified.is_unchanged());
            change(&folder.path().join("models/sub/m.gguf"));
            assert!(!verified.is_unchanged());
        }
    }

    #[test]
    fn a_file_that_was_hashed_has_its_digest_and_is_no_other_one_later() {
        let (folder, _) = volume("sub/m.gguf", b"GGUF and more");
        let path = folder.path().join("models/sub/m.gguf");
        let stamp = FileStamp::hashed(&path).unwrap();
        let digest = Digest::from(<[u8; 32]>::from(Sha256::digest(b"GGUF and more")));
        assert_eq!((stamp.digest(), stamp.again()), (Some(digest), Ok(stamp.clone())));
        fs::write(&path, b"GGUF and less").unwrap();
        assert!(stamp.again().unwrap_err().contains("has changed since its digest was checked"));
        assert_eq!(FileStamp::looked_at(&path).unwrap().digest(), None);
    }

    #[test]
    fn a_file_with_the_same_bytes_again_is_the_same_again() {
        let content = b"GGUF and more";
        let (folder, file) = volume("sub/m.gguf", content);
        let path = folder.path().join("models/sub/m.gguf");
        let verified = verified(&file, content).unwrap();
        assert_eq!(verified.again(), Ok(verified.clone()));
        fs::write(&path, b"GGUF and less").unwrap();
        assert!(verified.again().unwrap_err().contains("has changed since its digest was checked"));
        fs::remove_file(&path).unwrap();
        assert!(verified.again().unwrap_err().contains("cannot be read any more"));
        fs::write(&path, content).unwrap();
        let again = verified.again().unwrap();
        assert!(again.is_unchanged() && !verified.is_unchanged());
    }

    #[test]
    fn what_cannot_be_read_is_told_with_what_to_do() {
        let content = b"GGUF and more";
        let told = |path: &str, prepare: &dyn Fn(&Path)| {
            let (folder, file) = volume(path, content);
            prepare(folder.path());
            let error = verified(&file, content).unwrap_err();
            assert!(!error.is_temporary(), "{error}");
            error.to_string()
        };
        let nothing = |_: &Path| {};
        let missing = told("sub/n.gguf", &nothing);
        assert_eq!(
            missing,
            "sub/n.gguf on the PersistentVolumeClaim models is not there; put the file there, or correct pvc.path"
        );
        assert!(told("sub", &nothing).contains("not a regular file"));
        assert!(told("sub/m.gguf/x", &nothing).contains("is not there"));
        assert!(
            told("../other/m.gguf", &|folder| {
                fs::create_dir(folder.join("other")).unwrap();
                fs::write(folder.join("other/m.gguf"), content).unwrap();
            })
            .contains("leads out of its volume")
        );
        assert!(
            told("link", &|folder| std::os::unix::fs::symlink("/etc/passwd", folder.join("models/link")).unwrap())
                .contains("leads out of its volume")
        );
        let gone = told("sub/m.gguf", &|folder| fs::rename(folder.join("models"), folder.join("gone")).unwrap());
        assert!(gone.contains("name it in spec.pod.modelVolumes"), "{gone}");
        let not_one = told("sub/m.gguf", &|folder| fs::write(folder.join("models/sub/m.gguf"), b"<html>").unwrap());
        assert!(not_one.contains("no GGUF file"), "{not_one}");
        let other =
            told("sub/m.gguf", &|folder| fs::write(folder.join("models/sub/m.gguf"), b"GGUF of another").unwrap());
        assert!(other.contains("was asked for"), "{other}");
        let outside = VolumeFile { claim: "..".to_owned(), ..volume("m.gguf", content).1 };
        assert!(outside.resolve().unwrap_err().to_string().contains("is not mounted"));
    }

    #[test]
    fn a_link_within_the_volume_is_followed_once() {
        let content = b"GGUF and more";
        let (folder, file) = volume("current", content);
        std::os::unix::fs::symlink("sub/m.gguf", folder.path().join("models/current")).unwrap();
        let path = file.resolve().unwrap();
        assert!(path.ends_with("models/sub/m.gguf"), "{}", path.display());
        // Another target is another model, and no change of this one.
        let verified = verified(&file, content).unwrap();
        fs::write(folder.path().join("models/sub/n.gguf"), b"GGUF two").unwrap();
        fs::remove_file(folder.path().join("models/current")).unwrap();
        std::os::unix::fs::symlink("sub/n.gguf", folder.path().join("models/current")).unwrap();
        assert!(verified.is_unchanged());
    }

    #[test]
    fn hashing_ends_when_the_file_is_not_wanted_any_more() {
        let (_folder, file) = volume("sub/m.gguf", b"GGUF");
        let cancel = CancellationToken::new();
        cancel.cancel();
        let (progress, _) = watch::channel(FetchProgress::default());
        let digest = Digest::from([0; 32]);
        let ended = file.verify(&file.resolve().unwrap(), digest, &progress, &cancel);
        assert_eq!(ended.unwrap_err(), FetchError::Cancelled);
    }
}

//! The content-addressed store: `sha256/<hex>` is a whole file with that digest, `sha256/<hex>.partial` one on its way.
//!
//! A file counts only after its bytes were hashed by this process, once: a disk may have changed them since. What a
//! [`Lease`] names is never evicted; everything else goes when room is needed and what goes is enough, what a revision names
//! last, the least recently used first, and at once when no revision names it any more ([`Cache::keep`]). A file that comes
//! has a [`Grant`] of room before its bytes do, so that the limit holds for several at a time, and for those whose length
//! nobody said. Processes that share the folder keep out of each other's way ([`lock`](super::lock)): none removes what another one uses.
//! Each makes room by itself, so that two that fetch at once may pass the limit by what the other one brings. Absent: where files
//! come from, and what addresses meant ([`refs`](super::refs)).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use super::asked::AskedBy;
use super::digest::Digest;
use super::error::FetchError;
use super::lock;
use super::partial::{hash_file, remove_if_there, validator_path};
use super::volume::FileStamp;

const PARTIAL_EXTENSION: &str = "partial";

/// How directories of [`Cache::scratch`] are called.
const SCRATCH_PREFIX: &str = "headers-";

/// The folder with the models.
#[derive(Debug)]
pub struct Cache {
    folder: PathBuf,
    /// Who is told what to do where there is no room.
    used_by: AskedBy,
    state: Mutex<State>,
    /// Held while room is made: two that look at once would give the same room away.
    making_room: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    verified: HashSet<Digest>,
    leases: HashMap<Digest, usize>,
    /// Bytes that files on their way may have.
    grants: HashMap<Digest, u64>,
    /// What revisions name, as far as is known: the way back is among them.
    named: BTreeSet<Digest>,
    limit_bytes: Option<u64>,
}

/// Room for one file that comes. There is one for a digest at a time, as there is one fetch.
#[derive(Debug)]
pub(super) struct Grant {
    cache: Arc<Cache>,
    digest: Digest,
}

impl Grant {
    /// Makes room for the file to have `wanted_bytes`, or as many as there are, at least `needed_bytes`, and tells how
    /// many. Evicts what is not in use. Blocks.
    pub(super) fn grow(&self, needed_bytes: u64, wanted_bytes: u64) -> Result<u64, FetchError> {
        let granted = self.cache.make_room(self.digest, needed_bytes, wanted_bytes)?;
        self.cache.lock().grants.insert(self.digest, granted);
        Ok(granted)
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.cache.lock().grants.remove(&self.digest);
    }
}

/// Keeps a digest's files from eviction for as long as it lives.
#[derive(Debug)]
pub struct Lease {
    cache: Arc<Cache>,
    digest: Digest,
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.cache.lock();
        if let Some(count) = state.leases.get_mut(&self.digest) {
            *count -= 1;
            if *count == 0 {
                state.leases.remove(&self.digest);
            }
        }
    }
}

/// A whole, verified file. One in the cache stays there while this lives; one on a volume may be changed by others.
#[derive(Clone, Debug)]
pub struct CachedModel {
    path: PathBuf,
    digest: Digest,
    bytes: u64,
    _lease: Option<Arc<Lease>>,
    /// Keeps other processes from removing it.
    _in_use: Option<Arc<File>>,
    on_volume: Option<FileStamp>,
    /// Of a model that is split: all of its files.
    _parts: Vec<CachedModel>,
}

impl CachedModel {
    /// A model that is read at `path`, of one file or of several, of which the first one's digest is the model's. `None`: of none.
    pub(super) fn of_parts(path: PathBuf, mut parts: Vec<Self>) -> Option<Self> {
        if parts.len() < 2 {
            return parts.pop();
        }
        let (digest, bytes) = (parts.first()?.digest, parts.iter().map(|part| part.bytes).sum());
        Some(Self { path, digest, bytes, _lease: None, _in_use: None, on_volume: None, _parts: parts })
    }

    pub(super) fn on_volume(file: FileStamp, digest: Digest) -> Self {
        let (path, bytes) = (file.path().to_owned(), file.bytes());
        Self { path, digest, bytes, _lease: None, _in_use: None, on_volume: Some(file), _parts: Vec::new() }
    }

    /// What it was when it was verified, where others may change it.
    #[must_use]
    pub fn verified(&self) -> Option<&FileStamp> {
        self.on_volume.as_ref()
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its SHA-256.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Its length.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Cache {
    /// Opens the cache of a pod in `folder`, which is made if it is not there.
    ///
    /// # Errors
    /// The folder cannot be made.
    pub fn open(folder: impl AsRef<Path>) -> io::Result<Arc<Self>> {
        Self::open_for(AskedBy::Spec, folder)
    }

    /// As [`Cache::open`], for whom this names.
    ///
    /// # Errors
    /// The folder cannot be made.
    pub fn open_for(used_by: AskedBy, folder: impl AsRef<Path>) -> io::Result<Arc<Self>> {
        let folder = folder.as_ref().join("sha256");
        fs::create_dir_all(&folder)?;
        Ok(Arc::new(Self { folder, used_by, state: Mutex::default(), making_room: Mutex::default() }))
    }

    /// Where it is kept what addresses meant.
    pub(super) fn refs(&self) -> PathBuf {
        self.folder.with_file_name("refs")
    }

    /// A directory beside the models that is gone with what is given.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn scratch(&self) -> io::Result<tempfile::TempDir> {
        tempfile::Builder::new().prefix(SCRATCH_PREFIX).tempdir_in(self.folder.with_file_name(""))
    }

    /// Removes what a process that was killed left of its [`scratch`](Self::scratch), where no other one uses the cache.
    ///
    /// # Errors
    /// The cache cannot be read, or one of them not be removed.
    pub fn remove_scratch(&self) -> io::Result<()> {
        let mut removed = Ok(());
        for entry in fs::read_dir(self.folder.with_file_name(""))? {
            let entry = entry?;
            if entry.file_name().as_encoded_bytes().starts_with(SCRATCH_PREFIX.as_bytes()) {
                removed = fs::remove_dir_all(entry.path()).and(removed);
            }
        }
        removed
    }

    /// Where the parts of models that are split have names.
    pub(super) fn parts(&self) -> PathBuf {
        self.folder.with_file_name("parts")
    }

    /// Where prompts are kept, beside the models; it is not made here.
    #[must_use]
    pub fn prefixes(&self) -> PathBuf {
        self.folder.with_file_name("prefixes")
    }

    /// Removes all prompts that are kept. Blocks.
    pub fn remove_prefixes(&self) {
        match std::fs::remove_dir_all(self.prefixes()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%error, "cannot remove prompts that no version keeps any more");
            }
            _ => {}
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        // Every critical section leaves the state whole, so that a panic elsewhere does not spoil it.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets how many bytes the files may take together; `None` is as many as the disk holds.
    pub fn set_limit_bytes(&self, limit: Option<u64>) {
        self.lock().limit_bytes = limit;
    }

    pub(super) fn lease(self: &Arc<Self>, digest: Digest) -> Lease {
        *self.lock().leases.entry(digest).or_insert(0) += 1;
        Lease { cache: Arc::clone(self), digest }
    }

    /// A grant of no room yet.
    pub(super) fn grant(self: &Arc<Self>, digest: Digest) -> Grant {
        Grant { cache: Arc::clone(self), digest }
    }

    pub(super) fn path(&self, digest: Digest) -> PathBuf {
        self.folder.join(digest.to_string())
    }

    pub(super) fn partial_path(&self, digest: Digest) -> PathBuf {
        self.folder.join(digest.to_string()).with_extension(PARTIAL_EXTENSION)
    }

    /// Notes that a file was just hashed.
    pub(super) fn verified(&self, digest: Digest) {
        self.lock().verified.insert(digest);
    }

    /// The file with this digest, hashed if this process has not done so yet. Blocks.
    pub(super) fn get(&self, digest: Digest, lease: Lease) -> io::Result<Option<CachedModel>> {
        let path = self.path(digest);
        let Some(file) = lock::in_use(&path)? else { return Ok(None) };
        let bytes = file.metadata()?.len();
        let known = self.lock().verified.contains(&digest);
        if !known {
            let found = hash_file(&path)?;
            if found != digest {
                tracing::warn!(%digest, %found, "a cached model has changed on disk and is removed");
                drop(file);
                if !lock::remove_unused(&path)? {
                    return Err(io::Error::other("a model in the cache has changed, and another process uses it"));
                }
                return Ok(None);
            }
            self.verified(digest);
        }
        // The time of last use, by which eviction goes.
        if let Err(error) = File::options().append(true).open(&path).and_then(|f| f.set_modified(SystemTime::now())) {
            tracing::debug!(%error, "cannot note the use of a cached model");
        }
        let (lease, in_use) = (Some(Arc::new(lease)), Some(Arc::new(file)));
        let (on_volume, parts) = (None, Vec::new());
        Ok(Some(CachedModel { path, digest, bytes, _lease: lease, _in_use: in_use, on_volume, _parts: parts }))
    }

    /// Evicts until the file of `digest` may have `wanted_bytes`, and tells how many it may have: at least `needed_bytes`. What
    /// revisions name goes for no more than these, and nothing goes for a file that has no room even so.
    fn make_room(&self, digest: Digest, needed_bytes: u64, wanted_bytes: u64) -> Result<u64, FetchError> {
        let _one = self.making_room.lock().unwrap_or_else(PoisonError::into_inner);
        let (limit, mut grants) = {
            let state = self.lock();
            let Some(limit) = state.limit_bytes else { return Ok(wanted_bytes) };
            (limit, state.grants.clone())
        };
        grants.remove(&digest);
        let (files, evictable) = self.others(digest).map_err(|error| FetchError::disk("list", &error))?;
        let came = |granted: &Digest| files.iter().filter(|f| f.digest == *granted).map(|f| f.bytes).sum::<u64>();
        // Of what is on its way the whole counts.
        let to_come = grants.iter().map(|(granted, bytes)| bytes.saturating_sub(came(granted))).sum::<u64>();
        let mut others = files.iter().map(|file| file.bytes).sum::<u64>().saturating_add(to_come);
        let in_use = others.saturating_sub(evictable);
        if in_use.saturating_add(needed_bytes) <= limit {
            for file in &files {
                let bytes = if file.is_named { needed_bytes } else { wanted_bytes };
                if others.saturating_add(bytes) > limit && self.evict(file) {
                    others = others.saturating_sub(file.bytes);
                }
            }
            let left = limit.saturating_sub(others);
            // Not all of it could be removed.
            if left >= needed_bytes {
                return Ok(left.min(wanted_bytes));
            }
        }
        Err(FetchError::TooLarge(format!(
            "the model needs at least {} in the cache, of whose {} {} are in use; {}, or choose a smaller model",
            gantry_gguf::human_bytes(needed_bytes),
            gantry_gguf::human_bytes(limit),
            gantry_gguf::human_bytes(in_use),
            self.used_by.larger_cache(),
        )))
    }

    /// All files but those of `digest`, in the order in which they go, and the bytes of those that may.
    fn others(&self, digest: Digest) -> io::Result<(Vec<CacheFile>, u64)> {
        let mut files = self.files()?;
        files.retain(|file| file.digest != digest);
        files.sort_by_key(|file| (file.is_named, file.used));
        let state = self.lock();
        let own: Vec<bool> = files.iter().map(|file| state.leases.contains_key(&file.digest)).collect();
        drop(state);
        // Nor what another process uses; what cannot be looked at is not counted on.
        let is_free = |path: &Path| !lock::is_in_use(path).unwrap_or(true);
        let evictable = files.iter().zip(own).filter(|(file, own)| !own && is_free(&file.path));
        let evictable = evictable.map(|(file, _)| file.bytes).sum();
        Ok((files, evictable))
    }

    /// Evicts what is neither in use nor `named`. Blocks.
    pub fn keep(&self, named: &BTreeSet<Digest>) {
        self.lock().named.clone_from(named);
        match self.files() {
            Ok(files) => {
                for file in files.iter().filter(|file| !named.contains(&file.digest)) {
                    self.evict(file);
                }
            }
            Err(error) => tracing::warn!(%error, "cannot look for models in the cache that nothing names any more"),
        }
    }

    /// Evicts as much as the file of `digest` still needs, for a disk that is full, or nothing where that is more than nobody uses.
    /// Blocks. Returns whether there was something.
    pub(super) fn evict_unused(&self, digest: Digest) -> bool {
        let granted = self.lock().grants.get(&digest).copied().unwrap_or_default();
        let came = fs::metadata(self.partial_path(digest)).map_or(0, |metadata| metadata.len());
        // One at least: it is full.
        let missing = granted.saturating_sub(came).max(1);
        let (files, evictable) = self.others(digest).unwrap_or_default();
        let mut evicted = 0;
        for file in files.iter().filter(|_| evictable >= missing) {
            if evicted < missing && self.evict(file) {
                evicted += file.bytes;
            }
        }
        evicted > 0
    }

    /// Evicts a file, and with a part of a model the other parts that nobody uses.
    fn evict(&self, file: &CacheFile) -> bool {
        if !self.evict_one(file) {
            return false;
        }
        let others = self.forget_parts(file.digest).unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot look for the other parts of an evicted model");
            Vec::new()
        });
        for digest in others {
            let (path, bytes) =
                (self.path(digest), fs::metadata(self.path(digest)).map_or(0, |metadata| metadata.len()));
            self.evict_one(&CacheFile { path, digest, bytes, used: file.used, is_named: file.is_named });
        }
        true
    }

    fn evict_one(&self, file: &CacheFile) -> bool {
        let mut state = self.lock();
        if state.leases.contains_key(&file.digest) {
            return false;
        }
        // Under the lock: a lease that is taken now must find the file gone, not going.
        let removed = lock::remove_unused(&file.path).and_then(|gone| match gone {
            true => remove_if_there(&validator_path(&file.path)).map(|()| true),
            false => Ok(false),
        });
        match removed {
            Ok(false) => false,
            Ok(true) => {
                state.verified.remove(&file.digest);
                tracing::info!(digest = %file.digest, bytes = file.bytes, "evicted from the cache");
                true
            }
            Err(error) => {
                tracing::warn!(%error, digest = %file.digest, "cannot evict from the cache");
                false
            }
        }
    }

    fn files(&self) -> io::Result<Vec<CacheFile>> {
        let mut files = Vec::new();
        let named = self.lock().named.clone();
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            let path = entry.path();
            let known = path.extension().is_none_or(|extension| extension == PARTIAL_EXTENSION);
            let digest = path.file_stem().and_then(|stem| stem.to_str()).and_then(|stem| stem.parse().ok());
            if let (true, Some(digest)) = (known, digest) {
                let metadata = entry.metadata()?;
                let (bytes, used, is_named) = (metadata.len(), metadata.modified()?, named.contains(&digest));
                files.push(CacheFile { path, digest, bytes, used, is_named });
            }
        }
        Ok(files)
    }
}

struct CacheFile {
    path: PathBuf,
    digest: Digest,
    bytes: u64,
    used: SystemTime,
    is_named: bool,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Duration;

    use sha2::{Digest as _, Sha256};

    use super::*;

    /// Puts `bytes` many bytes into the cache, used `age` ago.
    fn put(cache: &Cache, seed: u8, bytes: usize, age: Duration) -> Digest {
        let content = vec![seed; bytes];
        let digest = Digest::from(<[u8; 32]>::from(Sha256::digest(&content)));
        fs::write(cache.path(digest), content).unwrap();
        let file = File::options().append(true).open(cache.path(digest)).unwrap();
        file.set_modified(SystemTime::now() - age).unwrap();
        digest
    }

    fn is_there(cache: &Cache, digest: Digest) -> bool {
        cache.path(digest).exists()
    }

    #[test]
    fn the_least_recently_used_goes_first_and_what_is_in_use_stays() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path()).unwrap();
        let oldest = put(&cache, 1, 100, Duration::from_secs(300));
        let older = put(&cache, 2, 100, Duration::from_secs(200));
        let newest = put(&cache, 3, 100, Duration::from_secs(100));
        let used = cache.get(oldest, cache.lease(oldest)).unwrap().unwrap();
        cache.set_limit_bytes(Some(350));
        let next = cache.grant("ab".repeat(32).parse().unwrap());
        assert_eq!(next.grow(100, 100).unwrap(), 100);
        assert_eq!([oldest, older, newest].map(|d| is_there(&cache, d)), [true, false, true]);
        let error = next.grow(300, 300).unwrap_err();
        assert!(matches!(&error, FetchError::TooLarge(text) if text.contains("sizeLimit")), "{error}");
        assert_eq!(
            [oldest, newest].map(|d| is_there(&cache, d)),
            [true, true],
            "nothing goes for what has no room even so"
        );
        assert_eq!(next.grow(200, 300).unwrap(), 250, "as much as there is");
        assert!(is_there(&cache, oldest) && !is_there(&cache, newest));
        drop(used);
        assert_eq!(next.grow(300, 300).unwrap(), 300);
        assert!(!is_there(&cache, oldest));
    }

    #[test]
    fn what_a_revision_names_goes_last_and_for_no_more_than_is_needed() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path()).unwrap();
        let way_back = put(&cache, 1, 100, Duration::from_secs(300));
        cache.keep(&BTreeSet::from([way_back]));
        let other = put(&cache, 2, 100, Duration::from_secs(100));
        cache.set_limit_bytes(Some(250));
        let next = cache.grant("ab".repeat(32).parse().unwrap());
        assert_eq!(next.grow(100, 200).unwrap(), 150);
        assert_eq!([way_back, other].map(|d| is_there(&cache, d)), [true, false]);
        assert!(next.grow(251, 251).is_err() && is_there(&cache, way_back));
        assert_eq!(next.grow(200, 250).unwrap(), 250);
        assert!(!is_there(&cache, way_back));
    }

    #[test]
    fn a_full_disk_costs_as_much_as_is_missing_or_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path()).unwrap();
        let files = [1, 2, 3].map(|seed| put(&cache, seed, 100, Duration::from_secs(400 - u64::from(seed))));
        cache.keep(&BTreeSet::from(files));
        let next: Digest = "ab".repeat(32).parse().unwrap();
        let grant = cache.grant(next);
        fs::write(cache.partial_path(next), vec![0; 50]).unwrap();
        assert_eq!(grant.grow(400, 400).unwrap(), 400);
        assert!(!cache.evict_unused(next), "350 bytes are missing");
        assert_eq!(files.map(|file| is_there(&cache, file)), [true, true, true]);
        assert_eq!(grant.grow(200, 200).unwrap(), 200);
        assert!(cache.evict_unused(next));
        assert_eq!(files.map(|file| is_there(&cache, file)), [false, false, true]);
        drop(grant);
        assert!(cache.evict_unused(next), "whose length nobody said");
        assert!(!cache.evict_unused(next), "nothing is left");
    }

    #[test]
    fn room_is_given_away_once() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path()).unwrap();
        cache.set_limit_bytes(Some(1000));
        let digest = |digits: &str| digits.repeat(32).parse::<Digest>().unwrap();
        let (one, other) = (cache.grant(digest("ab")), cache.grant(digest("cd")));
        let _leases = [digest("ab"), digest("cd")].map(|digest| cache.lease(digest));
        assert_eq!(one.grow(700, 700).unwrap(), 700);
        // However much of it has come.
        for came in [0, 200, 700] {
            fs::write(cache.partial_path(digest("ab")), vec![0; came]).unwrap();
            assert_eq!(other.grow(100, 5000).unwrap(), 300, "{came}");
            assert!(other.grow(301, 301).is_err(), "{came}");
        }
        assert_eq!(one.grow(700, 5000).unwrap(), 700);
        fs::remove_file(cache.partial_path(digest("ab"))).unwrap();
        drop(one);
        assert_eq!(other.grow(1000, 5000).unwrap(), 1000);
    }

    #[test]
    fn what_no_revision_names_goes_unless_it_is_in_use() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path()).unwrap();
        let [named, used, neither] = [1, 2, 3].map(|seed| put(&cache, seed, 100, Duration::ZERO));
        let lease = cache.lease(used);
        let abandoned: Digest = "ab".repeat(32).parse().unwrap();
        fs::write(cache.partial_path(abandoned), b"half").unwrap();
        cache.keep(&BTreeSet::from([named]));
        assert_eq!([named, used, neither].map(|d| is_there(&cache, d)), [true, true, false]);
        assert!(!cache.partial_path(abandoned).exists());
        drop(lease);
        cache.keep(&BTreeSet::from([named]));
        assert!(!is_there(&cache, used));
    }

    #[test]
    fn what_a_process_that_was_killed_left_is_removed_and_no_model_is() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path()).unwrap();
        let model = put(&cache, 1, 100, Duration::ZERO);
        let left = cache.scratch().unwrap().keep();
        fs::write(left.join("header"), b"half").unwrap();
        Cache::open(folder.path()).unwrap().remove_scratch().unwrap();
        assert!(!left.exists() && is_there(&cache, model));
    }

    #[test]
    fn a_file_that_changed_on_disk_is_not_served() {
        let folder = tempfile::tempdir().unwrap();
        let digest = put(&Cache::open(folder.path()).unwrap(), 7, 50, Duration::ZERO);
        // As after a restart of the process.
        let cache = Cache::open(folder.path()).unwrap();
        fs::write(cache.path(digest), b"something else").unwrap();
        assert!(cache.get(digest, cache.lease(digest)).unwrap().is_none());
        assert!(!is_there(&cache, digest));
    }

    #[test]
    fn a_file_is_hashed_once_per_process() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path()).unwrap();
        let digest = put(&cache, 9, 50, Duration::ZERO);
        assert!(cache.get(digest, cache.lease(digest)).unwrap().is_some());
        fs::write(cache.path(digest), b"trusted by now").unwrap();
        assert!(cache.get(digest, cache.lease(digest)).unwrap().is_some());
    }

    #[test]
    fn abandoned_partials_and_their_validators_are_evicted_too() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path()).unwrap();
        let digest: Digest = "ab".repeat(32).parse().unwrap();
        let partial = cache.partial_path(digest);
        fs::write(&partial, vec![0; 200]).unwrap();
        fs::write(validator_path(&partial), b"{}").unwrap();
        cache.set_limit_bytes(Some(250));
        cache.grant("cd".repeat(32).parse().unwrap()).grow(100, 100).unwrap();
        assert!(!partial.exists() && !validator_path(&partial).exists());
    }

    #[test]
    fn a_part_takes_the_other_parts_with_it() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::open(folder.path()).unwrap();
        let parts = [1, 2, 3].map(|seed| put(&cache, seed, 100, Duration::from_secs(300 - u64::from(seed))));
        let whole = put(&cache, 4, 100, Duration::from_secs(200));
        let first = cache.name_parts(&parts).unwrap();
        assert_eq!(cache.name_parts(&parts).unwrap(), first, "once for all");
        for (number, seed) in [(1, 1), (2, 2), (3, 3)] {
            let path = first.with_file_name(format!("model-0000{number}-of-00003.gguf"));
            assert_eq!(fs::read(path).unwrap(), vec![seed; 100]);
        }
        let used = cache.get(parts[2], cache.lease(parts[2])).unwrap().unwrap();
        cache.set_limit_bytes(Some(450));
        cache.grant("ab".repeat(32).parse().unwrap()).grow(100, 100).unwrap();
        assert_eq!(parts.map(|part| is_there(&cache, part)), [false, false, true], "but for one that is in use");
        assert!(is_there(&cache, whole) && !first.exists());
        drop(used);
    }

    #[test]
    fn what_another_process_uses_stays() {
        let folder = tempfile::tempdir().unwrap();
        let (cache, other) = (Cache::open(folder.path()).unwrap(), Cache::open(folder.path()).unwrap());
        let digest = put(&cache, 1, 100, Duration::from_secs(300));
        let used = other.get(digest, other.lease(digest)).unwrap().unwrap();
        cache.keep(&BTreeSet::from(["ab".repeat(32).parse().unwrap()]));
        assert!(is_there(&cache, digest));
        drop(used);
        cache.keep(&BTreeSet::from(["ab".repeat(32).parse().unwrap()]));
        assert!(!is_there(&cache, digest));
    }
}

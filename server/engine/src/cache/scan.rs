//! Finds the files of the disk tier, by name, size and time alone: what is in them is verified when they are read.

use std::fs::{self, DirEntry, Metadata};
use std::io;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Instant, SystemTime};

use super::disk::Shared;
use super::index::{EntryInfo, EntryKey, Index};
use super::key::{BlockHash, Fingerprint};
use super::limits::{ABANDONED_AFTER, MAX_DISK_ENTRIES};

/// Of a block's file.
pub(super) const EXTENSION: &str = "kv";
/// Of a file that is being written.
pub(super) const TEMPORARY_EXTENSION: &str = "tmp";

/// When a scan ends early.
pub(super) enum Stop {
    /// At a time, or when the index is full.
    At(Instant),
    /// When the cache is dropped. It sees every file: past the index's limit the oldest are removed.
    WhenDropped,
}

impl Stop {
    fn is_due(&self, shared: &Shared, found: &Index) -> bool {
        match self {
            Self::At(time) => found.len() >= MAX_DISK_ENTRIES || Instant::now() >= *time,
            Self::WhenDropped => shared.stop.load(Relaxed),
        }
    }
}

/// Adds the files of all models. Entries that cannot be looked at are left out.
pub(super) fn scan_all(shared: &Shared, found: &mut Index) -> io::Result<()> {
    for entry in fs::read_dir(&shared.dir)?.flatten() {
        let Some(fingerprint) = entry.file_name().to_str().and_then(Fingerprint::from_hex) else { continue };
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        // A folder may be gone by now: another process removes empty ones.
        if let Err(err) = scan_model(shared, fingerprint, &Stop::WhenDropped, found)
            && err.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(folder = %entry.path().display(), "cannot look into the prefix cache: {err}");
        }
    }
    Ok(())
}

/// Adds the files of one model.
pub(super) fn scan_model(shared: &Shared, fingerprint: Fingerprint, stop: &Stop, found: &mut Index) -> io::Result<()> {
    let now = SystemTime::now();
    for file in fs::read_dir(shared.model_dir(fingerprint))?.flatten() {
        if stop.is_due(shared, found) {
            return Ok(());
        }
        let Some((block, is_temporary)) = name_of(&file) else { continue };
        // Not through links: what they lead to is none of ours.
        let Some((metadata, changed)) = file.metadata().ok().and_then(regular_file) else { continue };
        if is_temporary {
            remove_abandoned(&file.path(), now, changed);
            continue;
        }
        let info = EntryInfo { bytes: metadata.len(), accessed: changed.min(now) };
        found.insert(EntryKey { fingerprint, block }, info);
        if found.len() > MAX_DISK_ENTRIES
            && let Some((key, _)) = found.oldest()
        {
            found.remove(&key);
            if fs::remove_file(shared.path(&key)).is_ok() {
                shared.counters.evictions.fetch_add(1, Relaxed);
            }
        }
    }
    Ok(())
}

/// The block of a file that this cache wrote, and whether it is still being written.
fn name_of(file: &DirEntry) -> Option<(BlockHash, bool)> {
    let name = file.file_name();
    let (block, extension) = name.to_str()?.split_once('.')?;
    let is_temporary = extension.ends_with(TEMPORARY_EXTENSION);
    (is_temporary || extension == EXTENSION).then_some(())?;
    Some((BlockHash::from_hex(block)?, is_temporary))
}

fn regular_file(metadata: Metadata) -> Option<(Metadata, SystemTime)> {
    let changed = metadata.modified().ok()?;
    metadata.is_file().then_some((metadata, changed))
}

fn remove_abandoned(path: &Path, now: SystemTime, changed: SystemTime) {
    if now.duration_since(changed).is_ok_and(|age| age > ABANDONED_AFTER) {
        let kept = fs::remove_file(path).err().map(tracing::field::display);
        tracing::debug!(path = %path.display(), kept, "an abandoned file of the prefix cache");
    }
}

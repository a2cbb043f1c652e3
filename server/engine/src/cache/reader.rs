//! The way back from disk, for prompts that are still on their way to the engine's thread: whoever prepares a prompt
//! reads the blocks that memory does not hold, and verifies them. The engine's thread then only takes them in.
//!
//! What memory holds is told by [`Shared::in_memory`], a moment old: a block that was read in vain costs its reading, and
//! one that left memory meanwhile is a miss. Anything wrong with a file makes it a miss and removes it.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime};

use super::disk::{Shared, access_time};
use super::entry::{decode_block, is_entry_length};
use super::index::EntryKey;
use super::key::BlockHash;
use super::limits::{DISK_READ_BYTES_PER_PROMPT, FETCHED_BYTES};
use super::tree::Payload;
use super::{block_tokens, usable_blocks};

/// Reads a model's blocks, from any number of threads.
#[derive(Clone)]
pub(crate) struct DiskReader {
    pub(super) shared: Arc<Shared>,
    /// More could not be taken into memory, by one prompt or by all that wait.
    pub(super) max_bytes: u64,
}

/// Blocks of one prompt that follow those in memory.
pub(crate) struct Fetched {
    pub(super) first_block: usize,
    pub(super) payloads: Vec<Payload>,
    /// Of [`FETCHED_BYTES`], until it is dropped.
    bytes: u64,
    shared: Arc<Shared>,
}

impl Drop for Fetched {
    fn drop(&mut self) {
        self.shared.fetched_bytes.fetch_sub(self.bytes, Relaxed);
    }
}

impl Fetched {
    /// Blocks of the prompt that are there if so many of them are in memory.
    pub(super) fn blocks_after(&self, in_memory: usize) -> usize {
        if self.first_block <= in_memory { in_memory.max(self.first_block + self.payloads.len()) } else { in_memory }
    }

    /// Takes so many bytes of those that all may hold.
    fn reserve(&mut self, bytes: u64, most: u64) -> bool {
        let held = &self.shared.fetched_bytes;
        let reserved = held.fetch_update(Relaxed, Relaxed, |n| Some(n + bytes).filter(|&n| n <= most)).is_ok();
        self.bytes += if reserved { bytes } else { 0 };
        reserved
    }
}

impl DiskReader {
    /// The blocks of a prompt that are on disk behind those in memory, as far as its limits go; waits for the disk.
    /// `names` is [`chain`](super::chain) of these tokens.
    pub(crate) fn fetch(&self, names: &[BlockHash], tokens: &[i32]) -> Option<Fetched> {
        let blocks = usable_blocks(names, tokens);
        let first_block = {
            let in_memory = self.shared.in_memory();
            names[..blocks].iter().take_while(|name| in_memory.contains(name)).count()
        };
        let mut fetched = Fetched { first_block, payloads: Vec::new(), bytes: 0, shared: Arc::clone(&self.shared) };
        let mut left = self.max_bytes.min(DISK_READ_BYTES_PER_PROMPT);
        let now = SystemTime::now();
        for (i, &name) in names.iter().enumerate().take(blocks).skip(first_block) {
            let Some(bytes) = self.entry_bytes(name).filter(|&bytes| bytes <= left) else { break };
            if !fetched.reserve(bytes, self.max_bytes.min(FETCHED_BYTES)) {
                break;
            }
            left -= bytes;
            let parent = i.checked_sub(1).map_or(self.shared.own.root(), |above| names[above]);
            let accessed = access_time(now, Duration::ZERO, i);
            let Some(payload) = self.read(name, parent, block_tokens(tokens, i), accessed, bytes) else { break };
            fetched.payloads.push(payload);
        }
        (!fetched.payloads.is_empty()).then_some(fetched)
    }

    /// Bytes of a block's file, as far as is known; `None` as well when it is too old.
    fn entry_bytes(&self, block: BlockHash) -> Option<u64> {
        let info = self.shared.index().get(&self.shared.key(block))?;
        (!self.shared.is_expired(&info)).then_some(info.bytes)
    }

    /// Reads and verifies one block, at most `max_bytes` of file. `None`: it is not there, or was not what it must be and
    /// is not there any more.
    fn read(
        &self,
        block: BlockHash,
        parent: BlockHash,
        tokens: &[i32],
        accessed: SystemTime,
        max_bytes: u64,
    ) -> Option<Payload> {
        let shared = &*self.shared;
        let key = shared.key(block);
        let path = shared.path(&key);
        let read = {
            let _turn = shared.turn()?;
            read_entry(&path, max_bytes, accessed)
        };
        let bytes = match read {
            Ok(bytes) => bytes,
            Err(err) if err.kind() == io::ErrorKind::InvalidData => return self.discard(&key, &path, &err.to_string()),
            Err(err) if err.kind() == io::ErrorKind::NotFound => {
                shared.forget_if_gone(&key, &path);
                return None;
            }
            Err(err) => {
                tracing::warn!(path = %path.display(), "a cached block cannot be read: {err}");
                // Until the next scan.
                shared.index().remove(&key);
                return None;
            }
        };
        let entry_bytes = bytes.len() as u64;
        match decode_block(bytes, shared.own, parent, tokens) {
            Ok(payload) => {
                shared.index().touch(&key, accessed);
                shared.counters.hits.fetch_add(1, Relaxed);
                shared.counters.read_bytes.fetch_add(entry_bytes, Relaxed);
                Some(Payload::new(payload))
            }
            Err(damage) => self.discard(&key, &path, &damage.to_string()),
        }
    }

    fn discard(&self, key: &EntryKey, path: &Path, reason: &str) -> Option<Payload> {
        self.shared.counters.corrupt.fetch_add(1, Relaxed);
        // In this order: a scan that still saw the file then learns of its removal.
        let removed = fs::remove_file(path);
        match &removed {
            Err(err) if err.kind() != io::ErrorKind::NotFound => drop(self.shared.index().remove(key)),
            _ => self.shared.forget_if_gone(key, path),
        }
        let kept = removed.err().map(tracing::field::display);
        tracing::warn!(path = %path.display(), kept, "a damaged cached block is a miss: {reason}");
        None
    }
}

/// The bytes of a file that may be an entry by its length (`InvalidData` when it cannot be, or has grown since it was
/// last looked at), and notes the access.
fn read_entry(path: &Path, max_bytes: u64, accessed: SystemTime) -> io::Result<Vec<u8>> {
    let invalid = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    if !is_entry_length(length) || length > max_bytes {
        return Err(invalid(format!("{length} bytes are no entry, or more than were written")));
    }
    let mut bytes = Vec::with_capacity(usize::try_from(length).unwrap_or(0));
    (&file).take(length + 1).read_to_end(&mut bytes)?;
    // A file system may refuse to set times (read-only mounts do): then only the order of eviction suffers.
    if let Err(err) = file.set_modified(accessed) {
        tracing::debug!(path = %path.display(), "cannot note an access: {err}");
    }
    Ok(bytes)
}

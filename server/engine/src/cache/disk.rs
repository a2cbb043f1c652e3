//! The disk tier as the engine's thread sees it: `<dir>/<fingerprint>/<block>.kv`, a file a block.
//!
//! Blocks are read by those who prepare prompts ([`super::reader`]), and written by the thread of [`super::writer`]
//! through a queue that is bounded in blocks and in bytes: what does not fit is dropped and counted. A file appears whole
//! under its name, and is verified when it is read. Nothing is synced: what a power failure leaves is found by its
//! checksum. The time of a block's last access is its file's time of change. Absent: files that another process wrote
//! since the last scan.

use std::collections::HashSet;
use std::fs::{self, DirBuilder};
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use crossbeam_channel::{Receiver, Sender};

use super::CacheError;
use super::entry::encoded_bytes;
use super::index::{EntryInfo, EntryKey, Index};
use super::key::{BlockHash, Fingerprint};
use super::limits::{DISK_PATIENCE_MS, START_SCAN_MS, WRITE_QUEUE_BLOCKS, WRITE_QUEUE_BYTES};
use super::reader::DiskReader;
use super::scan::{Stop, scan_model};
use super::tree::Block;
use super::writer::{self, Job};
use crate::params::DiskCacheConfig;

/// Sets two blocks of one path apart, so that a parent is never the older.
const DEPTH_STEP: Duration = Duration::from_micros(1);

/// What the disk tier did and holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DiskStats {
    /// Files, over all models that share the directory.
    pub(crate) entries: u64,
    pub(crate) bytes: u64,
    pub(crate) limit_bytes: u64,
    /// Blocks found and read.
    pub(crate) hits: u64,
    pub(crate) read_bytes: u64,
    pub(crate) writes: u64,
    /// Blocks that were not written because the queue was full, or because they are too large for the tier.
    pub(crate) write_drops: u64,
    pub(crate) write_errors: u64,
    /// Files removed because their content was not what it must be.
    pub(crate) corrupt: u64,
    /// Files removed to keep the limit.
    pub(crate) evictions: u64,
    /// Files removed because of their age.
    pub(crate) expirations: u64,
}

#[derive(Default)]
pub(super) struct Counters {
    pub(super) hits: AtomicU64,
    pub(super) read_bytes: AtomicU64,
    pub(super) writes: AtomicU64,
    pub(super) write_drops: AtomicU64,
    pub(super) write_errors: AtomicU64,
    pub(super) corrupt: AtomicU64,
    pub(super) evictions: AtomicU64,
    pub(super) expirations: AtomicU64,
    /// Files and their bytes, as [`IndexGuard`] left them.
    entries: AtomicU64,
    bytes: AtomicU64,
}

/// The index, held. What it then holds is counted as it is given back, so that who asks for the counts waits for nobody: the
/// engine's thread asks, and another may wait for the disk with the index.
pub(super) struct IndexGuard<'a> {
    index: MutexGuard<'a, Index>,
    counters: &'a Counters,
}

impl Deref for IndexGuard<'_> {
    type Target = Index;

    fn deref(&self) -> &Index {
        &self.index
    }
}

impl DerefMut for IndexGuard<'_> {
    fn deref_mut(&mut self) -> &mut Index {
        &mut self.index
    }
}

impl Drop for IndexGuard<'_> {
    fn drop(&mut self) {
        self.counters.entries.store(self.index.len() as u64, Relaxed);
        self.counters.bytes.store(self.index.bytes(), Relaxed);
    }
}

/// What the engine's thread and the writer's have in common.
pub(super) struct Shared {
    pub(super) dir: PathBuf,
    pub(super) own: Fingerprint,
    pub(super) max_bytes: u64,
    pub(super) ttl: Option<Duration>,
    pub(super) counters: Counters,
    pub(super) queued_bytes: AtomicU64,
    /// The writer is to end after the block it has in hand.
    pub(super) stop: AtomicBool,
    /// Bytes of blocks that were read and are not in memory's books yet.
    pub(super) fetched_bytes: AtomicU64,
    /// Full while one of those that prepare prompts reads a file.
    turn: (Sender<()>, Receiver<()>),
    index: Mutex<Index>,
    in_memory: Mutex<HashSet<BlockHash>>,
}

impl Shared {
    /// Never held over I/O, but for [`Shared::forget_if_gone`].
    pub(super) fn index(&self) -> IndexGuard<'_> {
        let index = self.index.lock().unwrap_or_else(PoisonError::into_inner);
        IndexGuard { index, counters: &self.counters }
    }

    /// The blocks that memory holds, for those who read ahead.
    pub(super) fn in_memory(&self) -> MutexGuard<'_, HashSet<BlockHash>> {
        self.in_memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn model_dir(&self, fingerprint: Fingerprint) -> PathBuf {
        self.dir.join(fingerprint.to_string())
    }

    pub(super) fn path(&self, key: &EntryKey) -> PathBuf {
        self.model_dir(key.fingerprint).join(format!("{}.{}", key.block, super::scan::EXTENSION))
    }

    pub(super) fn key(&self, block: BlockHash) -> EntryKey {
        EntryKey { fingerprint: self.own, block }
    }

    /// Waits until nobody else reads. `None`: that took too long, so that the disk stands still; were all who prepare prompts
    /// to wait for it, no request would be served any more, not even one of which the disk has nothing.
    pub(super) fn turn(&self) -> Option<Turn<'_>> {
        self.turn.0.send_timeout((), Duration::from_millis(DISK_PATIENCE_MS)).ok()?;
        Some(Turn(&self.turn.1))
    }

    /// Takes note that a file is gone. The writer may have put a new one there meanwhile, which it enters after that: what
    /// is not there while the index is held is entered later. Without the look, a file that nobody counts would stay.
    pub(super) fn forget_if_gone(&self, key: &EntryKey, path: &Path) {
        let mut index = self.index();
        if fs::symlink_metadata(path).is_err_and(|err| err.kind() == io::ErrorKind::NotFound) {
            index.remove(key);
        }
    }

    pub(super) fn is_expired(&self, info: &EntryInfo) -> bool {
        self.ttl.is_some_and(|ttl| SystemTime::now().duration_since(info.accessed).is_ok_and(|age| age > ttl))
    }
}

/// Held by the one that reads.
pub(super) struct Turn<'a>(&'a Receiver<()>);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // Its own.
        let _ = self.0.try_recv();
    }
}

pub(super) struct DiskTier {
    shared: Arc<Shared>,
    /// `None` once the tier is being dropped.
    jobs: Option<Sender<Job>>,
    writer: Option<JoinHandle<()>>,
}

impl DiskTier {
    /// Opens the directory, makes it when it is not there, and finds what this model left in it.
    pub(super) fn open(config: &DiskCacheConfig, own: Fingerprint, ttl: Option<Duration>) -> Result<Self, CacheError> {
        let refused = |source: io::Error| CacheError::Disk { dir: config.dir.clone(), source };
        let shared = Shared {
            dir: config.dir.clone(),
            own,
            max_bytes: config.max_bytes,
            ttl,
            counters: Counters::default(),
            queued_bytes: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            fetched_bytes: AtomicU64::new(0),
            turn: crossbeam_channel::bounded(1),
            index: Mutex::default(),
            in_memory: Mutex::default(),
        };
        make_dir(&shared.model_dir(own)).map_err(refused)?;
        let stop = Stop::At(Instant::now() + Duration::from_millis(START_SCAN_MS));
        let mut found = Index::default();
        scan_model(&shared, own, &stop, &mut found).map_err(refused)?;
        *shared.index() = found;
        let shared = Arc::new(shared);
        let (jobs, queue) = crossbeam_channel::bounded(WRITE_QUEUE_BLOCKS);
        let writer = std::thread::Builder::new().name("gantry-kv-disk".into());
        let writer = writer.spawn({
            let shared = Arc::clone(&shared);
            move || writer::run(&shared, &queue)
        });
        Ok(Self { shared, jobs: Some(jobs), writer: Some(writer.map_err(refused)?) })
    }

    pub(super) fn reader(&self, max_bytes: u64) -> DiskReader {
        DiskReader { shared: Arc::clone(&self.shared), max_bytes }
    }

    /// A block has come into memory.
    pub(super) fn came_in(&self, block: BlockHash) {
        self.shared.in_memory().insert(block);
    }

    /// A block has left memory.
    pub(super) fn left(&self, block: &BlockHash) {
        self.shared.in_memory().remove(block);
    }

    /// Hands an evicted block to the writer, which only notes the access when it is on disk already. Never waits.
    pub(super) fn offer(&self, block: Block, now: Instant) {
        let shared = &*self.shared;
        let bytes = block.payload.len() as u64;
        // One thread adds to this, so that what is read here can only have become less.
        if shared.queued_bytes.load(Relaxed) + bytes > WRITE_QUEUE_BYTES {
            shared.counters.write_drops.fetch_add(1, Relaxed);
            return;
        }
        shared.queued_bytes.fetch_add(bytes, Relaxed);
        let age = now.saturating_duration_since(block.accessed);
        let accessed = access_time(SystemTime::now(), age, block.depth as usize);
        let job = Job::Write { block, accessed };
        if self.jobs.as_ref().is_none_or(|jobs| jobs.try_send(job).is_err()) {
            shared.queued_bytes.fetch_sub(bytes, Relaxed);
            shared.counters.write_drops.fetch_add(1, Relaxed);
        }
    }

    /// Writes blocks, given the youngest first, as many as the tier may hold, and waits until they are on disk or until
    /// `deadline`. True when all that fit were written in time.
    pub(super) fn flush(&self, blocks: Vec<Block>, now: Instant, deadline: Instant) -> bool {
        let Some(jobs) = &self.jobs else { return false };
        let (mut total, time) = (0, SystemTime::now());
        for block in blocks {
            if Instant::now() >= deadline {
                return false;
            }
            total += encoded_bytes(block.payload.len());
            if total > self.shared.max_bytes {
                break;
            }
            let accessed = access_time(time, now.saturating_duration_since(block.accessed), block.depth as usize);
            self.shared.queued_bytes.fetch_add(block.payload.len() as u64, Relaxed);
            let bytes = block.payload.len() as u64;
            if jobs.send_deadline(Job::Write { block, accessed }, deadline).is_err() {
                self.shared.queued_bytes.fetch_sub(bytes, Relaxed);
                return false;
            }
        }
        let (done, is_done) = crossbeam_channel::bounded(1);
        jobs.send_deadline(Job::Barrier(done), deadline).is_ok() && is_done.recv_deadline(deadline).is_ok()
    }

    pub(super) fn stats(&self) -> DiskStats {
        let counters = &self.shared.counters;
        DiskStats {
            entries: counters.entries.load(Relaxed),
            bytes: counters.bytes.load(Relaxed),
            limit_bytes: self.shared.max_bytes,
            hits: counters.hits.load(Relaxed),
            read_bytes: counters.read_bytes.load(Relaxed),
            writes: counters.writes.load(Relaxed),
            write_drops: counters.write_drops.load(Relaxed),
            write_errors: counters.write_errors.load(Relaxed),
            corrupt: counters.corrupt.load(Relaxed),
            evictions: counters.evictions.load(Relaxed),
            expirations: counters.expirations.load(Relaxed),
        }
    }
}

impl Drop for DiskTier {
    /// Waits for the block that is being written; what waits behind it is lost unless it was flushed.
    fn drop(&mut self) {
        self.shared.stop.store(true, Relaxed);
        self.jobs = None;
        if let Some(writer) = self.writer.take()
            && writer.join().is_err()
        {
            tracing::error!("the thread that writes the prefix cache to disk ended by a panic");
        }
    }
}

/// When a block was last used, as a time of the file system. `now` is the same for all blocks of a prompt, whatever handling
/// them takes: what lies behind another one is the older.
pub(super) fn access_time(now: SystemTime, age: Duration, depth: usize) -> SystemTime {
    let back = age.saturating_add(DEPTH_STEP.saturating_mul(u32::try_from(depth).unwrap_or(u32::MAX)));
    now.checked_sub(back).unwrap_or(now)
}

/// Makes a directory and those above it, for this user alone; one that is there stays as it is.
pub(super) fn make_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

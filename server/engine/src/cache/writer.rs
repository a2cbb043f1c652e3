//! The thread that writes blocks to disk and keeps the directory within its limits.
//!
//! A block is written under a temporary name of its own and renamed: readers, writers and removers of any number of
//! processes meet only in the file system's own atomic steps. Several processes see each other's files by scanning: at
//! the start, every [`MAINTENANCE_INTERVAL_S`], and whenever so much was written that the others' share may matter; in
//! between, each may overshoot the limit by what it wrote since ([`RESCAN_SHARE`]).

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant, SystemTime};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};

use super::disk::{Shared, make_dir};
use super::entry::{encode_around, encoded_bytes};
use super::index::{EntryInfo, EntryKey, Index};
use super::limits::{MAINTENANCE_INTERVAL_S, MAX_DISK_ENTRIES, MAX_EXPIRED, RESCAN_SHARE};
use super::scan::{TEMPORARY_EXTENSION, scan_all};
use super::tree::Block;

pub(super) enum Job {
    /// Write a block, or only note its last access when it is there.
    Write { block: Block, accessed: SystemTime },
    /// Tell when all before is done.
    Barrier(Sender<()>),
}

struct Writer<'a> {
    shared: &'a Shared,
    written_since_scan: u64,
    next_scan: Instant,
    /// The last write failed, and that was logged.
    is_failing: bool,
}

pub(super) fn run(shared: &Shared, jobs: &Receiver<Job>) {
    let mut writer = Writer { shared, written_since_scan: 0, next_scan: Instant::now(), is_failing: false };
    writer.maintain();
    loop {
        let job = jobs.recv_deadline(writer.next_scan);
        if shared.stop.load(Relaxed) {
            return;
        }
        match job {
            Ok(Job::Write { block, accessed }) => {
                let bytes = block.payload.len() as u64;
                writer.write(&block, accessed);
                drop(block);
                shared.queued_bytes.fetch_sub(bytes, Relaxed);
            }
            Ok(Job::Barrier(done)) => {
                // Who asked may have given up.
                let _ = done.try_send(());
            }
            Err(RecvTimeoutError::Timeout) => writer.maintain(),
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

impl Writer<'_> {
    fn maintain(&mut self) {
        self.rescan();
        self.expire();
        // Whether the cache is being dropped is for the loop to see.
        let _ = self.make_room(0);
        self.next_scan = Instant::now() + Duration::from_secs(MAINTENANCE_INTERVAL_S);
    }

    fn write(&mut self, block: &Block, accessed: SystemTime) {
        let shared = self.shared;
        let key = shared.key(block.hash);
        if self.note_access(&key, accessed) {
            return;
        }
        let bytes = encoded_bytes(block.payload.len());
        if bytes > shared.max_bytes {
            shared.counters.write_drops.fetch_add(1, Relaxed);
            return;
        }
        if self.written_since_scan > shared.max_bytes / RESCAN_SHARE {
            self.rescan();
        }
        if !self.make_room(bytes) {
            return;
        }
        match write_file(shared, &key, block, accessed) {
            Ok(()) => {
                shared.index().insert(key, EntryInfo { bytes, accessed });
                shared.counters.writes.fetch_add(1, Relaxed);
                self.written_since_scan += bytes;
                self.is_failing = false;
            }
            Err(err) => {
                shared.counters.write_errors.fetch_add(1, Relaxed);
                if !std::mem::replace(&mut self.is_failing, true) {
                    let dir = shared.dir.display();
                    tracing::warn!(%dir, "cannot write to the prefix cache on disk, more failures are counted: {err}");
                }
            }
        }
    }

    /// False when the block is not on disk.
    fn note_access(&self, key: &EntryKey, accessed: SystemTime) -> bool {
        let shared = self.shared;
        let Some(info) = shared.index().get(key) else { return false };
        if accessed <= info.accessed {
            return shared.path(key).exists();
        }
        let noted = File::open(shared.path(key)).and_then(|file| file.set_modified(accessed));
        if noted.is_err() {
            shared.index().remove(key);
            return false;
        }
        shared.index().touch(key, accessed);
        true
    }

    fn rescan(&mut self) {
        let mut found = Index::default();
        self.shared.index().begin_scan();
        let scanned = match scan_all(self.shared, &mut found) {
            // A scan that was cut short is no picture of the directory.
            Ok(()) => (!self.shared.stop.load(Relaxed)).then_some(found),
            Err(err) => {
                let dir = self.shared.dir.display();
                tracing::warn!(%dir, "cannot look into the prefix cache on disk: {err}");
                None
            }
        };
        let former = self.shared.index().end_scan(scanned);
        // Not under the lock, which the statement above gave back.
        drop(former);
        self.written_since_scan = 0;
    }

    /// Removes the files accessed longest ago, of any model, until so many more bytes may come. False when the cache is
    /// being dropped.
    fn make_room(&self, bytes: u64) -> bool {
        let shared = self.shared;
        let limit_bytes = shared.max_bytes.saturating_sub(bytes);
        let limit_entries = MAX_DISK_ENTRIES - usize::from(bytes > 0);
        while !shared.stop.load(Relaxed) {
            let oldest = {
                let index = shared.index();
                (index.bytes() > limit_bytes || index.len() > limit_entries).then(|| index.oldest()).flatten()
            };
            let Some((key, info)) = oldest else { return true };
            if self.remove_unless_used(&key, &info) {
                shared.counters.evictions.fetch_add(1, Relaxed);
            }
        }
        false
    }

    fn expire(&self) {
        let shared = self.shared;
        let Some(limit) = shared.ttl.and_then(|ttl| SystemTime::now().checked_sub(ttl)) else { return };
        let keys = shared.index().older_than(shared.own, limit, MAX_EXPIRED);
        for key in keys {
            let Some(info) = shared.index().get(&key).filter(|info| info.accessed < limit) else { continue };
            if self.remove_unless_used(&key, &info) {
                shared.counters.expirations.fetch_add(1, Relaxed);
            }
        }
    }

    /// Removes one file, unless another process used it since: then that access is noted instead. True when removed.
    fn remove_unless_used(&self, key: &EntryKey, info: &EntryInfo) -> bool {
        let shared = self.shared;
        let path = shared.path(key);
        let changed = fs::symlink_metadata(&path).and_then(|metadata| metadata.modified()).ok();
        // A time to come is no access: cut to the present, it would be a later one at each look, and the file never go.
        if let Some(changed) = changed.filter(|changed| *changed <= SystemTime::now())
            && changed > info.accessed
        {
            shared.index().touch(key, changed);
            return false;
        }
        shared.index().remove(key);
        if let Err(err) = fs::remove_file(&path) {
            if err.kind() != io::ErrorKind::NotFound {
                tracing::warn!(path = %path.display(), "cannot remove a file of the prefix cache: {err}");
            }
            return false;
        }
        if key.fingerprint != shared.own {
            // Another model's last file: refused while there are more.
            let _ = fs::remove_dir(shared.model_dir(key.fingerprint));
        }
        true
    }
}

/// Puts a file in its place whole, or not at all.
fn write_file(shared: &Shared, key: &EntryKey, block: &Block, accessed: SystemTime) -> io::Result<()> {
    let (header, checksum) = encode_around(shared.own, block.parent, &block.tokens, &block.payload);
    let path = shared.path(key);
    // Process ids repeat among containers that share a directory: the name is drawn.
    let temporary = path.with_extension(format!("{:016x}.{TEMPORARY_EXTENSION}", rand::random::<u64>()));
    let written = create(shared, key, &temporary).and_then(|mut file| {
        for part in [&*header, &*block.payload, &checksum] {
            file.write_all(part)?;
        }
        // Some file systems refuse to set times: then only the order of eviction suffers.
        let _ = file.set_modified(accessed);
        fs::rename(&temporary, &path)
    });
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

fn create(shared: &Shared, key: &EntryKey, path: &Path) -> io::Result<File> {
    let open = || OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    match open() {
        Err(err) if err.kind() == io::ErrorKind::NotFound => {
            make_dir(&shared.model_dir(key.fingerprint))?;
            open()
        }
        opened => opened,
    }
}

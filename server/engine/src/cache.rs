//! The prefix cache below the device: blocks of prompts that were read before, in main memory and on disk.
//!
//! ```text
//! fetch (any thread) ─▶ Fetched: what is on disk and not in memory, verified
//!                          ▼
//! chain (any thread) ─▶ lookup ─ RAM tier (tree) ─▶ Hit: payloads in order, pinned until it is dropped
//! insert ─▶ RAM tier ─ the leaf touched longest ago goes ─▶ writer (one thread) ─▶ <dir>/<fingerprint>/<block>.kv
//! ```
//!
//! A block is [`BLOCK_TOKENS`] tokens, named by a hash over them and all before them; what is found is compared token
//! by token, so that neither a collision nor a damaged file is ever a wrong answer, only a miss. The tree is owned by
//! one thread, which never waits for the disk, and never above [`PrefixCacheConfig::ram_bytes`], beside
//! [`limits::WRITE_QUEUE_BYTES`] on the way to disk and [`limits::FETCHED_BYTES`] on the way back.
//!
//! Absent: the device tier (which sequences hold which tokens is the scheduler's knowledge), and any knowledge of what
//! a payload is.

mod disk;
mod entry;
mod index;
mod key;
mod limits;
mod reader;
mod scan;
mod tree;
mod writer;

#[cfg(test)]
mod disk_tests;
#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod testing;

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};
use thiserror::Error;

use self::disk::DiskTier;
use self::limits::MAX_PAYLOAD_BYTES;
use self::tree::{NodeId, Tree};
use crate::params::PrefixCacheConfig;

pub(crate) use self::disk::DiskStats;
pub(crate) use self::key::{BlockHash, Fingerprint, FingerprintParts, chain};
pub(crate) use self::limits::{BLOCK_TOKENS, EVICTED_BYTES_PER_LOOK};
pub(crate) use self::reader::{DiskReader, Fetched};
pub(crate) use self::tree::{Payload, node_bytes};

/// Why there is no cache.
#[derive(Debug, Error)]
pub(crate) enum CacheError {
    /// The directory cannot be made or read.
    #[error(
        "the prefix cache's directory {} cannot be used: {source}; name one that this user may write to, or keep no \
         prefixes on disk",
        dir.display()
    )]
    Disk { dir: PathBuf, source: io::Error },
    /// The disk tier is filled from the RAM tier and read into it.
    #[error("prefix_cache.disk needs prefix_cache.ram_bytes above 0: blocks go to disk and come back through memory")]
    DiskWithoutRam,
}

/// Why blocks were not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum InsertError {
    /// A block before them is not in memory: insert from there.
    #[error("block {missing} of the prefix is not in the cache: insert from it on")]
    Orphan { missing: usize },
    /// More blocks than the tokens or the chain have.
    #[error("blocks up to {end} of a prefix that has {blocks} full ones")]
    PastTheEnd { end: usize, blocks: usize },
    /// A name in the chain is not that of its tokens.
    #[error("the name of block {block} is not that of its tokens: the chain is of other tokens or of another model")]
    ChainMismatch { block: usize },
}

/// What became of the blocks of one insert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Inserted {
    pub(crate) added: usize,
    /// There already.
    pub(crate) known: usize,
    /// No room, even with everything gone that may go.
    pub(crate) dropped: usize,
}

/// What the cache did and holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CacheStats {
    /// Blocks in memory.
    pub(crate) nodes: u64,
    /// Bytes of memory, overhead included.
    pub(crate) bytes: u64,
    /// Those of them that are in use, or above a block in use.
    pub(crate) pinned_bytes: u64,
    pub(crate) limit_bytes: u64,
    /// Lookups that found a block. Prompts too short for one are counted as neither.
    pub(crate) hits: u64,
    pub(crate) misses: u64,
    /// Tokens that lookups found.
    pub(crate) hit_tokens: u64,
    pub(crate) inserted: u64,
    /// Blocks that found no room.
    pub(crate) dropped: u64,
    pub(crate) evictions: u64,
    pub(crate) expirations: u64,
    pub(crate) disk: Option<DiskStats>,
}

/// What a lookup found. Its blocks stay in the cache until it is dropped.
#[derive(Debug, Default)]
pub(crate) struct Hit {
    payloads: Vec<Payload>,
    disk_blocks: usize,
    _pin: Option<Pin>,
}

impl Hit {
    /// Tokens covered, from the first.
    pub(crate) fn tokens(&self) -> usize {
        self.payloads.len() * BLOCK_TOKENS
    }

    /// The KV rows of each block, in order.
    pub(crate) fn payloads(&self) -> &[Payload] {
        &self.payloads
    }

    /// The last so many blocks were read from disk; those before were in memory.
    pub(crate) fn disk_blocks(&self) -> usize {
        self.disk_blocks
    }
}

/// Gives its node back when dropped, on whichever thread: the cache takes it up at its next call.
struct Pin {
    deepest: NodeId,
    released: Sender<NodeId>,
}

impl fmt::Debug for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pin({})", self.deepest)
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        // A cache that is gone keeps nothing.
        let _ = self.released.send(self.deepest);
    }
}

/// See the module.
pub(crate) struct PrefixCache {
    root: BlockHash,
    tree: Tree,
    limit_bytes: u64,
    ttl: Option<Duration>,
    disk: Option<DiskTier>,
    /// What comes in displaces nothing that was accessed later.
    spares_younger: bool,
    /// Nodes that hits gave back, at most one for each hit that lived since the last call.
    releases: Receiver<NodeId>,
    released: Sender<NodeId>,
    /// The counters of it; what can be read off the tree is added when asked for.
    stats: CacheStats,
}

impl PrefixCache {
    /// An empty cache, or with a disk tier one that finds what it left there. One that is not enabled holds nothing.
    pub(crate) fn new(config: &PrefixCacheConfig, fingerprint: Fingerprint) -> Result<Self, CacheError> {
        let ttl = config.ttl_ms.map(Duration::from_millis);
        let limit_bytes = if config.enabled { config.ram_bytes } else { 0 };
        let disk = match config.disk.as_ref().filter(|_| config.enabled) {
            Some(_) if limit_bytes == 0 => return Err(CacheError::DiskWithoutRam),
            Some(disk) => Some(DiskTier::open(disk, fingerprint, ttl)?),
            None => None,
        };
        let (released, releases) = crossbeam_channel::unbounded();
        let (root, stats) = (fingerprint.root(), CacheStats::default());
        let (tree, spares_younger) = (Tree::new(root), false);
        Ok(Self { root, tree, limit_bytes, ttl, disk, spares_younger, releases, released, stats })
    }

    pub(crate) fn has_disk(&self) -> bool {
        self.disk.is_some()
    }

    /// From here on what comes in displaces nothing that was accessed later: it comes in the order of its last use, the
    /// last first, and nothing of it will be used again here.
    pub(crate) fn spare_younger(&mut self) {
        self.spares_younger = true;
    }

    /// What reads the disk ahead for this cache; `None` without a disk tier.
    pub(crate) fn reader(&self) -> Option<DiskReader> {
        self.disk.as_ref().map(|disk| disk.reader(self.limit_bytes))
    }

    /// The longest run of blocks that begins `tokens` and leaves at least one of them to decode; `fetched` is of the same
    /// tokens. `chain` is [`chain`] of these.
    pub(crate) fn lookup(
        &mut self,
        chain: &[BlockHash],
        tokens: &[i32],
        fetched: Option<Fetched>,
        now: Instant,
    ) -> Hit {
        let now = self.begin(now);
        let max_blocks = usable_blocks(chain, tokens);
        if max_blocks == 0 {
            return Hit::default();
        }
        let mut path = self.tree.walk(chain, tokens, max_blocks);
        let ram_blocks = path.len();
        if let Some(&deepest) = path.last() {
            self.tree.pin(deepest);
        }
        if let Some(fetched) = fetched.filter(|fetched| fetched.first_block <= ram_blocks) {
            let payloads = fetched.payloads[..].iter().skip(ram_blocks - fetched.first_block).cloned();
            self.take_in(chain, tokens, payloads.take(max_blocks - ram_blocks), &mut path, now, now);
        }
        self.tree.touch(&path, now);
        let Some(&deepest) = path.last() else {
            self.stats.misses += 1;
            return Hit::default();
        };
        self.stats.hits += 1;
        self.stats.hit_tokens += (path.len() * BLOCK_TOKENS) as u64;
        Hit {
            payloads: path.iter().map(|&id| self.tree.payload(id)).collect(),
            disk_blocks: path.len() - ram_blocks,
            _pin: Some(Pin { deepest, released: self.released.clone() }),
        }
    }

    /// Takes the blocks after `path`, which is pinned, into the tree and the pin, as far as there is room.
    fn take_in(
        &mut self,
        chain: &[BlockHash],
        tokens: &[i32],
        payloads: impl Iterator<Item = Payload>,
        path: &mut Vec<NodeId>,
        accessed: Instant,
        now: Instant,
    ) {
        for payload in payloads {
            let (block, hash) = (path.len(), chain[path.len()]);
            if !self.make_room(payload.len() as u64, accessed, now) {
                return;
            }
            let (parent, tokens) = (path.last().copied(), block_tokens(tokens, block));
            let Some(id) = self.tree.add_pinned(parent, hash, tokens, payload, accessed) else { return };
            path.push(id);
            if let Some(disk) = &self.disk {
                disk.came_in(hash);
            }
        }
    }

    /// Tokens that a lookup would find. Reads nothing, holds nothing, and is no access.
    pub(crate) fn covered(&self, chain: &[BlockHash], tokens: &[i32], fetched: Option<&Fetched>) -> usize {
        let max_blocks = usable_blocks(chain, tokens);
        let in_memory = self.tree.walk(chain, tokens, max_blocks).len();
        fetched.map_or(in_memory, |fetched| fetched.blocks_after(in_memory).min(max_blocks)) * BLOCK_TOKENS
    }

    /// Tokens in full blocks that are in memory, the last of the prompt included. Holds nothing, and is no access.
    pub(crate) fn in_memory(&self, chain: &[BlockHash], tokens: &[i32]) -> usize {
        self.tree.walk(chain, tokens, chain.len()).len() * BLOCK_TOKENS
    }

    /// The most tokens of one prompt that memory could hold, with payloads of this length.
    pub(crate) fn most_tokens(&self, payload_len: usize) -> u64 {
        self.limit_bytes / node_bytes(payload_len) * BLOCK_TOKENS as u64
    }

    /// Takes the payloads of the blocks `first_block..` of `tokens`. Those that are there stay as they are; the first
    /// one without room ends it. All of them, and those before, count as accessed when they were last `used`.
    pub(crate) fn insert(
        &mut self,
        chain: &[BlockHash],
        tokens: &[i32],
        first_block: usize,
        payloads: Vec<Vec<u8>>,
        used: Instant,
        now: Instant,
    ) -> Result<Inserted, InsertError> {
        let now = self.begin(now);
        let used = used.min(now);
        let blocks = chain.len().min(tokens.len() / BLOCK_TOKENS);
        let end = first_block.saturating_add(payloads.len());
        if end > blocks {
            return Err(InsertError::PastTheEnd { end, blocks });
        }
        let mut path = self.tree.walk(chain, tokens, end);
        if path.len() < first_block {
            return Err(InsertError::Orphan { missing: path.len() });
        }
        let known = path.len();
        for block in known..end {
            let parent = block.checked_sub(1).map_or(self.root, |above| chain[above]);
            if parent.child(block_tokens(tokens, block)) != chain[block] {
                return Err(InsertError::ChainMismatch { block });
            }
        }
        if let Some(&deepest) = path.last() {
            self.tree.pin(deepest);
        }
        self.tree.touch(&path, used);
        let payloads = payloads.into_iter().skip(known - first_block).map(Payload::new);
        self.take_in(chain, tokens, payloads, &mut path, used, now);
        if let Some(&deepest) = path.last() {
            self.tree.unpin(deepest);
        }
        let inserted = Inserted { added: path.len() - known, known: known - first_block, dropped: end - path.len() };
        self.stats.inserted += inserted.added as u64;
        self.stats.dropped += inserted.dropped as u64;
        Ok(inserted)
    }

    /// Drops what was not accessed for longer than the configured time, not to disk either. Returns how many blocks.
    pub(crate) fn expire(&mut self, now: Instant) -> usize {
        let now = self.begin(now);
        let Some(ttl) = self.ttl else { return 0 };
        let expired = self.tree.pop_expired(|accessed| now.duration_since(accessed) > ttl);
        if let Some(disk) = &self.disk {
            expired.iter().for_each(|block| disk.left(&block.hash));
        }
        self.stats.expirations += expired.len() as u64;
        expired.len()
    }

    /// Evicts until at most `bytes` are in memory, or only blocks in use. Returns the bytes that are left.
    pub(crate) fn evict_to(&mut self, bytes: u64, now: Instant) -> u64 {
        self.begin(now);
        self.evict(bytes, None, now);
        self.tree.bytes()
    }

    /// Bytes that could be evicted now.
    pub(crate) fn evictable_bytes(&self) -> u64 {
        self.tree.bytes() - self.tree.pinned_bytes()
    }

    /// Writes all that is in memory to disk, the most recently used first where the disk's limit is the smaller, and
    /// waits for that until `deadline`. True when it was done by then; without a disk tier there is nothing to do.
    pub(crate) fn flush(&mut self, now: Instant, deadline: Instant) -> bool {
        let now = self.begin(now);
        let Some(disk) = &self.disk else { return true };
        disk.flush(self.tree.blocks_by_age(), now, deadline)
    }

    pub(crate) fn stats(&self) -> CacheStats {
        CacheStats {
            nodes: self.tree.len() as u64,
            bytes: self.tree.bytes(),
            pinned_bytes: self.tree.pinned_bytes(),
            limit_bytes: self.limit_bytes,
            disk: self.disk.as_ref().map(DiskTier::stats),
            ..self.stats
        }
    }

    /// The books of what is in memory are right, and it is within its limit.
    #[cfg(test)]
    pub(crate) fn check(&self) {
        self.tree.check();
        assert!(self.tree.bytes() <= self.limit_bytes, "{} of {} bytes", self.tree.bytes(), self.limit_bytes);
    }

    /// Takes up what hits gave back.
    fn begin(&mut self, now: Instant) -> Instant {
        for id in self.releases.try_iter() {
            self.tree.unpin(id);
        }
        self.tree.begin(now)
    }

    /// Whether a block could be taken if everything went that may go.
    fn may_fit(&self, payload_bytes: u64) -> bool {
        usize::try_from(payload_bytes).is_ok_and(|payload_bytes| {
            let room = self.limit_bytes.saturating_sub(self.tree.pinned_bytes());
            payload_bytes <= MAX_PAYLOAD_BYTES && node_bytes(payload_bytes) <= room
        })
    }

    /// Evicts as much as a block needs that was accessed then; nothing when that would not help.
    fn make_room(&mut self, payload_bytes: u64, accessed: Instant, now: Instant) -> bool {
        if !self.may_fit(payload_bytes) {
            return false;
        }
        let needed = node_bytes(usize::try_from(payload_bytes).unwrap_or(usize::MAX));
        let last = self.spares_younger.then_some(accessed);
        self.evict(self.limit_bytes.saturating_sub(needed), last, now);
        self.tree.bytes() + needed <= self.limit_bytes
    }

    /// Takes the blocks touched longest ago out of memory, up to the first that was accessed after `last`.
    fn evict(&mut self, bytes: u64, last: Option<Instant>, now: Instant) {
        let is_spared = |accessed: Option<Instant>| last.is_some_and(|last| accessed > Some(last));
        while self.tree.bytes() > bytes && !is_spared(self.tree.oldest_access()) {
            let Some(block) = self.tree.pop_oldest() else { return };
            self.stats.evictions += 1;
            if let Some(disk) = &self.disk {
                disk.left(&block.hash);
                disk.offer(block, now);
            }
        }
    }
}

/// The blocks of a prompt that may be taken from the cache: the last token is decoded in any case.
fn usable_blocks(chain: &[BlockHash], tokens: &[i32]) -> usize {
    chain.len().min(tokens.len().saturating_sub(1) / BLOCK_TOKENS)
}

fn block_tokens(tokens: &[i32], block: usize) -> &[i32] {
    &tokens[block * BLOCK_TOKENS..(block + 1) * BLOCK_TOKENS]
}

//! What the tests of the cache share: prompts made of letters, a letter a block, and payloads that follow from them.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::params::DiskCacheConfig;

pub(super) fn fingerprint(model: &str) -> Fingerprint {
    Fingerprint::new(&FingerprintParts {
        model_digest: model,
        type_k: "f16",
        type_v: "f16",
        flash_attention: "on",
        layout: "unified",
        payload_format: "1",
    })
}

/// The tokens of a prefix, and one more: that which a lookup leaves to decode.
pub(super) fn prompt(prefix: &[u8]) -> Vec<i32> {
    let mut tokens = blocks(prefix);
    tokens.push(-1);
    tokens
}

pub(super) fn blocks(prefix: &[u8]) -> Vec<i32> {
    prefix.iter().flat_map(|letter| [i32::from(*letter); BLOCK_TOKENS]).collect()
}

/// The payload of the last block of a prefix: another one for each prefix, also in length.
pub(super) fn payload(prefix: &[u8]) -> Vec<u8> {
    let sum = prefix.iter().fold(7_usize, |sum, letter| sum.wrapping_mul(31).wrapping_add(usize::from(*letter)) % 997);
    (0..sum).map(|i| (i % 251) as u8 ^ prefix[i % prefix.len()]).collect()
}

pub(super) fn payloads(prefix: &[u8], first_block: usize) -> Vec<Vec<u8>> {
    (first_block..prefix.len()).map(|block| payload(&prefix[..=block])).collect()
}

/// What a prefix's blocks take in memory.
pub(super) fn bytes_of(prefix: &[u8]) -> u64 {
    payloads(prefix, 0).iter().map(|payload| node_bytes(payload.len())).sum()
}

/// A cache beside the fingerprint that names its blocks.
pub(super) struct Fixture {
    pub(super) cache: PrefixCache,
    pub(super) fingerprint: Fingerprint,
}

impl Fixture {
    pub(super) fn in_ram(ram_bytes: u64, ttl_ms: Option<u64>) -> Self {
        Self::new("model", PrefixCacheConfig { ram_bytes, ttl_ms, ..PrefixCacheConfig::default() })
    }

    pub(super) fn on_disk(model: &str, ram_bytes: u64, dir: impl Into<PathBuf>, max_bytes: u64) -> Self {
        let disk = Some(DiskCacheConfig { dir: dir.into(), max_bytes });
        Self::new(model, PrefixCacheConfig { ram_bytes, disk, ..PrefixCacheConfig::default() })
    }

    pub(super) fn new(model: &str, config: PrefixCacheConfig) -> Self {
        let fingerprint = fingerprint(model);
        Self { cache: PrefixCache::new(&config, fingerprint).unwrap(), fingerprint }
    }

    /// What is read from disk for a prefix.
    pub(super) fn fetch(&self, tokens: &[i32]) -> Option<Fetched> {
        self.cache.reader().and_then(|reader| reader.fetch(&chain(self.fingerprint, tokens), tokens))
    }

    /// Looks a prefix up, on disk as well, checks what is found, and returns it.
    pub(super) fn lookup(&mut self, prefix: &[u8], now: Instant) -> Hit {
        let tokens = prompt(prefix);
        let fetched = self.fetch(&tokens);
        let hit = self.cache.lookup(&chain(self.fingerprint, &tokens), &tokens, fetched, now);
        self.cache.tree.check();
        assert_eq!(hit.tokens(), hit.payloads().len() * BLOCK_TOKENS);
        for (i, found) in hit.payloads().iter().enumerate() {
            assert_eq!(**found, *payload(&prefix[..=i]), "block {i} of {prefix:?}");
        }
        hit
    }

    /// Blocks that a lookup finds.
    pub(super) fn found(&mut self, prefix: &[u8]) -> usize {
        self.lookup(prefix, Instant::now()).payloads().len()
    }

    pub(super) fn insert(&mut self, prefix: &[u8], first: usize, now: Instant) -> Result<Inserted, InsertError> {
        self.insert_used(prefix, first, now, now)
    }

    /// The same of what was last used at a time before.
    pub(super) fn insert_used(
        &mut self,
        prefix: &[u8],
        first: usize,
        used: Instant,
        now: Instant,
    ) -> Result<Inserted, InsertError> {
        let tokens = blocks(prefix);
        let names = chain(self.fingerprint, &tokens);
        let inserted = self.cache.insert(&names, &tokens, first, payloads(prefix, first), used, now);
        self.cache.tree.check();
        inserted
    }

    /// Tokens of a prefix in memory, or with what was read from disk.
    pub(super) fn covered(&self, prefix: &[u8], fetched: Option<&Fetched>) -> usize {
        let tokens = prompt(prefix);
        self.cache.covered(&chain(self.fingerprint, &tokens), &tokens, fetched)
    }

    pub(super) fn holds(&self, prefix: &[u8]) -> bool {
        self.covered(prefix, None) == prefix.len() * BLOCK_TOKENS
    }

    pub(super) fn disk(&self) -> DiskStats {
        self.cache.stats().disk.unwrap()
    }

    pub(super) fn flush(&mut self) {
        let now = Instant::now();
        assert!(self.cache.flush(now, now + Duration::from_secs(60)), "the flush took longer than a minute");
    }
}

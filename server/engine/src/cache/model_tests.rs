//! The RAM tier against a plain map of prefixes, and the seed's properties of the cache.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::testing::*;
use super::*;

/// A map from each prefix that is held to the number of the call that touched it last and the time of its last access.
struct Model {
    held: BTreeMap<Vec<u8>, (usize, Duration)>,
    pinned: Vec<Vec<u8>>,
    limit_bytes: u64,
    evictions: u64,
}

impl Model {
    fn bytes(&self) -> u64 {
        self.held.keys().map(|prefix| node_bytes(payload(prefix).len())).sum()
    }

    fn found(&self, prefix: &[u8]) -> usize {
        (1..=prefix.len()).take_while(|len| self.held.contains_key(&prefix[..*len])).count()
    }

    fn is_pinned(&self, prefix: &[u8]) -> bool {
        self.pinned.iter().any(|pinned| pinned.starts_with(prefix))
    }

    /// The prefixes that may go, with what is known of them.
    fn free(&self) -> impl Iterator<Item = (&Vec<u8>, &(usize, Duration))> {
        let is_leaf = |prefix: &Vec<u8>| !self.held.keys().any(|p| p.len() > prefix.len() && p.starts_with(prefix));
        self.held.iter().filter(move |(prefix, _)| is_leaf(prefix) && !self.is_pinned(prefix))
    }

    /// The prefix that may go and was touched longest ago.
    fn oldest(&self) -> Option<Vec<u8>> {
        self.free().min_by_key(|(_, (call, _))| *call).map(|(prefix, _)| prefix.clone())
    }

    /// One that may go and was accessed before that.
    fn accessed_before(&self, time: Duration) -> Option<Vec<u8>> {
        self.free().find(|(_, (_, accessed))| *accessed < time).map(|(prefix, _)| prefix.clone())
    }

    fn evict_to(&mut self, bytes: u64) {
        while self.bytes() > bytes {
            let Some(prefix) = self.oldest() else { return };
            self.held.remove(&prefix);
            self.evictions += 1;
        }
    }

    fn touch(&mut self, prefix: &[u8], call: usize, time: Duration) {
        for len in 1..=prefix.len() {
            if let Some(touched) = self.held.get_mut(&prefix[..len]) {
                *touched = (call, touched.1.max(time));
            }
        }
    }

    fn insert(&mut self, prefix: &[u8], first: usize, call: usize, time: Duration) -> Result<Inserted, InsertError> {
        let held = self.found(prefix);
        if held < first {
            return Err(InsertError::Orphan { missing: held });
        }
        let mut inserted = Inserted { known: held - first, ..Inserted::default() };
        self.touch(prefix, call, time);
        // While the insert lasts, its own path stays.
        self.pinned.push(prefix[..held].to_vec());
        for len in held + 1..=prefix.len() {
            let needed = node_bytes(payload(&prefix[..len]).len());
            let kept: u64 = self.held.keys().filter(|p| self.is_pinned(p)).map(|p| node_bytes(payload(p).len())).sum();
            if kept + needed > self.limit_bytes {
                inserted.dropped = prefix.len() + 1 - len;
                break;
            }
            self.evict_to(self.limit_bytes - needed);
            self.held.insert(prefix[..len].to_vec(), (call, time));
            *self.pinned.last_mut().unwrap() = prefix[..len].to_vec();
            inserted.added += 1;
        }
        self.pinned.pop();
        Ok(inserted)
    }
}

#[derive(Clone, Debug)]
enum Action {
    Insert {
        prefix: Vec<u8>,
        first: usize,
        ago: u64,
    },
    Lookup {
        prefix: Vec<u8>,
        hold: bool,
    },
    Release(prop::sample::Index),
    Wait(u64),
    /// The caller's clock going backwards.
    WaitBack(u64),
    Expire,
    EvictTo(u64),
}

fn prefix() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(0_u8..3, 1..7)
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        8 => (prefix(), 0_usize..4, prop_oneof![Just(0_u64), 0_u64..150])
            .prop_map(|(prefix, first, ago)| Action::Insert { first: first % prefix.len(), prefix, ago }),
        8 => (prefix(), any::<bool>()).prop_map(|(prefix, hold)| Action::Lookup { prefix, hold }),
        4 => any::<prop::sample::Index>().prop_map(Action::Release),
        2 => (0_u64..60).prop_map(Action::Wait),
        1 => (0_u64..60).prop_map(Action::WaitBack),
        1 => Just(Action::Expire),
        1 => (0_u64..12_000).prop_map(Action::EvictTo),
    ]
}

const TTL_MS: u64 = 100;

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn the_tree_is_a_plain_map_of_prefixes(
        limit_bytes in 0_u64..15_000, actions in prop::collection::vec(action(), 1..120),
    ) {
        let mut f = Fixture::in_ram(limit_bytes, Some(TTL_MS));
        let mut model = Model { held: BTreeMap::new(), pinned: Vec::new(), limit_bytes, evictions: 0 };
        let mut hits: Vec<Hit> = Vec::new();
        let start = Instant::now() + Duration::from_secs(1);
        let (mut now, mut latest) = (Duration::from_secs(1), Duration::ZERO);
        let (mut expirations, mut lookup_hits, mut lookup_misses) = (0, 0, 0);
        for (call, action) in actions.into_iter().enumerate() {
            let is_call = !matches!(action, Action::Release(_) | Action::Wait(_) | Action::WaitBack(_));
            if is_call {
                latest = latest.max(now);
            }
            match action {
                Action::Insert { prefix, first, ago } => {
                    let used = now.saturating_sub(Duration::from_millis(ago));
                    let inserted = f.insert_used(&prefix, first, start + used, start + now);
                    prop_assert_eq!(inserted, model.insert(&prefix, first, call, used));
                }
                Action::Lookup { prefix, hold } => {
                    let found = model.found(&prefix);
                    prop_assert_eq!(f.covered(&prefix, None), found * BLOCK_TOKENS);
                    let hit = f.lookup(&prefix, start + now);
                    prop_assert_eq!(hit.payloads().len(), found);
                    prop_assert_eq!(hit.disk_blocks(), 0);
                    model.touch(&prefix[..found], call, latest);
                    lookup_hits += u64::from(found > 0);
                    lookup_misses += u64::from(found == 0);
                    if hold {
                        hits.push(hit);
                        model.pinned.push(prefix[..found].to_vec());
                    }
                }
                Action::Release(index) if !hits.is_empty() => {
                    let i = index.index(hits.len());
                    drop(hits.swap_remove(i));
                    model.pinned.swap_remove(i);
                }
                Action::Release(_) => {}
                Action::Wait(ms) => now += Duration::from_millis(ms),
                Action::WaitBack(ms) => now = now.saturating_sub(Duration::from_millis(ms)),
                Action::Expire => {
                    let mut expired = 0;
                    let limit = latest.saturating_sub(Duration::from_millis(TTL_MS));
                    while let Some(prefix) = model.accessed_before(limit) {
                        model.held.remove(&prefix);
                        expired += 1;
                    }
                    prop_assert_eq!(f.cache.expire(start + now), expired);
                    expirations += expired as u64;
                }
                Action::EvictTo(bytes) => {
                    let left = f.cache.evict_to(bytes, start + now);
                    model.evict_to(bytes);
                    prop_assert_eq!(left, model.bytes());
                }
            }
            f.cache.tree.check();
            let stats = f.cache.stats();
            prop_assert!(stats.bytes <= limit_bytes);
            prop_assert_eq!(stats.bytes, model.bytes());
            prop_assert_eq!(stats.nodes, model.held.len() as u64);
            prop_assert_eq!(stats.evictions, model.evictions);
            prop_assert_eq!(stats.expirations, expirations);
            prop_assert_eq!((stats.hits, stats.misses), (lookup_hits, lookup_misses));
            for prefix in model.held.keys() {
                prop_assert!(f.holds(prefix), "{:?} is missing", prefix);
            }
        }
        // With all released, everything may go, and nothing is left behind.
        hits.clear();
        prop_assert_eq!(f.cache.evict_to(0, start + now), 0);
        f.cache.tree.check();
        let stats = f.cache.stats();
        prop_assert_eq!((stats.nodes, stats.bytes, stats.pinned_bytes), (0, 0, 0));
    }

    /// **Feature: distributed-inference-server, Property 9: KV Cache Prefix Reuse**
    /// **Validates: Requirements 4.1**
    #[test]
    fn a_prompt_that_begins_as_a_cached_one_reuses_its_blocks(
        first in prop::collection::vec(0..3_i32, 1..500), more in prop::collection::vec(0..3_i32, 0..300),
    ) {
        let fingerprint = fingerprint("model");
        let mut cache = PrefixCache::new(&PrefixCacheConfig::default(), fingerprint).unwrap();
        let now = Instant::now();
        let names = chain(fingerprint, &first);
        let rows_of = |block: &[i32]| block.iter().map(|token| *token as u8).collect();
        let rows: Vec<Vec<u8>> = first.chunks_exact(BLOCK_TOKENS).map(rows_of).collect();
        let inserted = cache.insert(&names, &first, 0, rows.clone(), now, now).unwrap();
        prop_assert_eq!(inserted, Inserted { added: first.len() / BLOCK_TOKENS, known: 0, dropped: 0 });
        let second = [first.as_slice(), more.as_slice()].concat();
        let hit = cache.lookup(&chain(fingerprint, &second), &second, None, now);
        // All of the shared part in whole blocks, but always one token of the prompt is left to decode.
        let shared = (first.len() / BLOCK_TOKENS).min((second.len() - 1) / BLOCK_TOKENS);
        prop_assert_eq!(hit.tokens(), shared * BLOCK_TOKENS);
        for (found, rows) in hit.payloads().iter().zip(&rows) {
            prop_assert_eq!(&**found, rows.as_slice());
        }
    }

    /// **Feature: distributed-inference-server, Property 10: LRU Cache Eviction**
    /// **Validates: Requirements 4.2**
    #[test]
    fn the_least_recently_accessed_blocks_go_first(
        inserts in prop::collection::vec(prefix(), 1..20), accesses in prop::collection::vec(prefix(), 0..20),
        keep_percent in 0_u64..=100,
    ) {
        let mut f = Fixture::in_ram(1 << 20, None);
        let mut now = Instant::now();
        for prefix in &inserts {
            now += Duration::from_millis(1);
            f.insert(prefix, 0, now).unwrap();
        }
        for prefix in &accesses {
            now += Duration::from_millis(1);
            f.lookup(prefix, now);
        }
        let blocks = f.cache.tree.blocks_by_age();
        let all: Vec<(BlockHash, Instant)> = blocks.iter().map(|block| (block.hash, block.accessed)).collect();
        let before = f.cache.stats();
        let limit = before.bytes * keep_percent / 100;
        let left = f.cache.evict_to(limit, now);
        prop_assert!(left <= limit);
        prop_assert_eq!(left, f.cache.stats().bytes);
        let (kept, gone): (Vec<_>, Vec<_>) = all.into_iter().partition(|(hash, _)| f.cache.tree.contains(hash));
        let last_gone = gone.iter().map(|(_, accessed)| *accessed).max();
        let first_kept = kept.iter().map(|(_, accessed)| *accessed).min();
        if let (Some(gone), Some(kept)) = (last_gone, first_kept) {
            prop_assert!(gone <= kept, "a block went that was accessed after one that stayed");
        }
        // No more went than had to: the last one that went would not have fitted.
        prop_assert!(gone.is_empty() || left + node_bytes(997) > limit);
        prop_assert_eq!(f.cache.stats().evictions, gone.len() as u64);
    }

    /// **Feature: distributed-inference-server, Property 11: Cache Access Timestamp Update**
    /// **Validates: Requirements 4.3**
    #[test]
    fn an_access_never_makes_a_block_older(
        inserted in prefix(), others in prop::collection::vec(prefix(), 0..8),
        lookups in prop::collection::vec((prefix(), 0_u64..200), 1..20),
    ) {
        let mut f = Fixture::in_ram(1 << 20, None);
        // The caller's times go up and down.
        let start = Instant::now();
        f.insert(&inserted, 0, start + Duration::from_millis(100)).unwrap();
        for other in &others {
            f.insert(other, 0, start + Duration::from_millis(100)).unwrap();
        }
        for (prefix, ms) in lookups {
            let now = start + Duration::from_millis(ms);
            let names = chain(f.fingerprint, &blocks(&prefix));
            let before: Vec<_> = names.iter().map(|name| f.cache.tree.accessed(name)).collect();
            let found = f.lookup(&prefix, now).payloads().len();
            for (name, before) in names.iter().zip(before).take(found) {
                let after = f.cache.tree.accessed(name);
                prop_assert!(after >= before && after.is_some_and(|after| after >= now));
            }
        }
    }
}

#[test]
fn one_token_is_left_to_decode() {
    let mut f = Fixture::in_ram(1 << 20, None);
    let now = Instant::now();
    f.insert(&[1, 2], 0, now).unwrap();
    let tokens = blocks(&[1, 2]);
    let names = chain(f.fingerprint, &tokens);
    assert_eq!(f.cache.lookup(&names, &tokens, None, now).tokens(), BLOCK_TOKENS);
    assert_eq!(f.cache.lookup(&names[..1], &tokens[..BLOCK_TOKENS], None, now).tokens(), 0);
    assert_eq!(f.cache.lookup(&[], &[], None, now).tokens(), 0);
    assert_eq!(f.lookup(&[1, 2], now).tokens(), 2 * BLOCK_TOKENS);
    let stats = f.cache.stats();
    // Two prompts were too short to ask for.
    assert_eq!((stats.hits, stats.misses, stats.hit_tokens), (2, 0, 3 * BLOCK_TOKENS as u64));
}

#[test]
fn what_comes_in_lives_from_its_last_use_on() {
    let mut f = Fixture::in_ram(1 << 20, Some(TTL_MS));
    let ms = Duration::from_millis;
    let start = Instant::now();
    f.insert_used(&[1], 0, start, start + ms(90)).unwrap();
    f.insert(&[2], 0, start + ms(90)).unwrap();
    // That it is known already makes it no younger than it was used.
    f.insert_used(&[2, 3], 1, start + ms(50), start + ms(95)).unwrap();
    assert_eq!(f.cache.expire(start + ms(100)), 0);
    assert_eq!(f.cache.expire(start + ms(101)), 1);
    assert_eq!((f.holds(&[1]), f.holds(&[2, 3])), (false, true));
    assert_eq!(f.cache.expire(start + ms(151)), 1);
    assert_eq!((f.holds(&[2]), f.holds(&[2, 3])), (true, false));
    assert_eq!(f.cache.expire(start + ms(191)), 1);
}

#[test]
fn what_does_not_belong_is_refused() {
    let mut f = Fixture::in_ram(1 << 20, None);
    let now = Instant::now();
    assert_eq!(f.insert(&[1, 2], 1, now), Err(InsertError::Orphan { missing: 0 }));
    let tokens = blocks(&[1, 2]);
    let names = chain(f.fingerprint, &tokens);
    let mut insert = |names: &[BlockHash], tokens: &[i32], first| {
        f.cache.insert(names, tokens, first, vec![vec![0; 8]; 2], now, now)
    };
    assert_eq!(insert(&names, &tokens, 1), Err(InsertError::PastTheEnd { end: 3, blocks: 2 }));
    assert_eq!(insert(&names, &tokens, usize::MAX), Err(InsertError::PastTheEnd { end: usize::MAX, blocks: 2 }));
    assert_eq!(insert(&names, &tokens[..2 * BLOCK_TOKENS - 1], 0), Err(InsertError::PastTheEnd { end: 2, blocks: 1 }));
    let other_model = chain(fingerprint("other"), &tokens);
    assert_eq!(insert(&other_model, &tokens, 0), Err(InsertError::ChainMismatch { block: 0 }));
    let other_tokens = chain(f.fingerprint, &blocks(&[1, 3]));
    assert_eq!(
        f.cache.insert(&other_tokens, &tokens, 0, vec![vec![0; 8]; 2], now, now),
        Err(InsertError::ChainMismatch { block: 1 })
    );
    assert_eq!(f.cache.stats().nodes, 0);
    // A chain of other tokens finds nothing, also where it names blocks that are there.
    f.insert(&[1, 2], 0, now).unwrap();
    assert_eq!(f.cache.lookup(&names, &prompt(&[1, 3]), None, now).tokens(), BLOCK_TOKENS);
    assert_eq!(f.cache.lookup(&names, &prompt(&[3, 2]), None, now).tokens(), 0);
}

/// Two blocks of one name: a lookup of the other is a miss, and so is one below another parent.
#[test]
fn a_collision_is_a_miss() {
    let mut tree = Tree::new(BlockHash([0; 32]));
    let now = tree.begin(Instant::now());
    let (one, two) = (BlockHash([1; 32]), BlockHash([2; 32]));
    let first = tree.add_pinned(None, one, &blocks(&[1]), Payload::new(vec![1]), now).unwrap();
    tree.add_pinned(Some(first), two, &blocks(&[2]), Payload::new(vec![2]), now).unwrap();
    assert_eq!(tree.walk(&[one, two], &blocks(&[1, 2]), 9).len(), 2);
    assert_eq!(tree.walk(&[one, two], &blocks(&[1, 3]), 9).len(), 1);
    assert_eq!(tree.walk(&[one], &blocks(&[3]), 9).len(), 0);
    assert_eq!(tree.walk(&[two], &blocks(&[2]), 9).len(), 0, "its parent is another");
    assert_eq!(tree.add_pinned(None, one, &blocks(&[3]), Payload::new(vec![3]), now), None);
    tree.check();
}

#[test]
fn a_cache_that_is_off_holds_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let disk = crate::params::DiskCacheConfig { dir: dir.path().join("cache"), max_bytes: 1 << 20 };
    let off = PrefixCacheConfig { enabled: false, disk: Some(disk), ..PrefixCacheConfig::default() };
    let mut f = Fixture::new("model", off.clone());
    let inserted = f.insert(&[1], 0, Instant::now()).unwrap();
    assert_eq!(inserted, Inserted { added: 0, known: 0, dropped: 1 });
    assert_eq!(f.found(&[1]), 0);
    assert!(!dir.path().join("cache").exists());
    let no_ram = PrefixCacheConfig { enabled: true, ram_bytes: 0, ..off };
    assert!(matches!(PrefixCache::new(&no_ram, fingerprint("model")), Err(CacheError::DiskWithoutRam)));
}

#[test]
fn a_hit_may_be_given_back_on_another_thread_and_after_the_cache() {
    let mut f = Fixture::in_ram(bytes_of(&[1]), None);
    let now = Instant::now();
    f.insert(&[1], 0, now).unwrap();
    let hit = f.lookup(&[1], now);
    assert_eq!(f.insert(&[2], 0, now).unwrap().dropped, 1, "the only block is in use");
    std::thread::spawn(move || drop(hit)).join().unwrap();
    assert_eq!(f.cache.evict_to(0, now), 0);
    f.insert(&[1], 0, now).unwrap();
    let hit = f.lookup(&[1], now);
    drop(f);
    assert_eq!(*hit.payloads()[0], *payload(&[1]));
}

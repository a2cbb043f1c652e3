//! What becomes of a leftover on its way out of the KV cache: what is copied, how long it lives, what reaches the disk.

use std::path::Path;

use super::*;
use crate::ladder::DegradationLevel;
use crate::params::DiskCacheConfig;

/// More than a flush takes here.
const LONG: Duration = Duration::from_secs(60);

fn on_disk(dir: &Path, ram_bytes: u64) -> PrefixCache {
    let disk = Some(DiskCacheConfig { dir: dir.into(), max_bytes: 1 << 20 });
    PrefixCache::new(&PrefixCacheConfig { ram_bytes, disk, ..PrefixCacheConfig::default() }, fingerprint()).unwrap()
}

/// Tokens of a prompt of the kind that the tests here use which a directory has.
fn written(dir: &Path, token: Token) -> usize {
    let (cache, prompt) = (on_disk(dir, 1 << 20), vec![token; 100]);
    let names = chain(fingerprint(), &prompt);
    let fetched = cache.reader().unwrap().fetch(&names, &prompt);
    cache.covered(&names, &prompt, fetched.as_ref())
}

impl Harness {
    /// Has prompts of so many tokens of one kind each read and left over, one after the other.
    fn leave(&mut self, len: usize, prompts: &[Token]) {
        for &token in prompts {
            let request = self.submit(vec![token; len], greedy(1)).unwrap();
            self.run();
            request.check(1_600);
        }
    }

    /// Tokens that the sequences hold.
    fn held(&mut self) -> u64 {
        self.scheduler.backend().cells()
    }

    /// Tokens whose state was fetched.
    fn fetched(&mut self) -> u64 {
        self.scheduler.backend().fetched_tokens
    }
}

#[test]
fn leaving_the_kv_cache_makes_a_prompt_no_younger() {
    let mut h = Harness::of(&Setup { reuse: true, ..Setup::split(1, 400, 64, 64) });
    let ttl_ms = Some(60_000);
    let config = PrefixCacheConfig { ram_bytes: 1 << 20, ttl_ms, ..PrefixCacheConfig::default() };
    h.scheduler.cache_is(PrefixCache::new(&config, fingerprint()).unwrap(), fingerprint());
    let start = Instant::now();
    let after = |seconds| start + Duration::from_secs(seconds);
    let mut use_at = |token, at| {
        let request = h.submit(vec![token; 100], greedy(1)).unwrap();
        while h.scheduler.has_work() {
            h.scheduler.step_at(at);
        }
        request.check(400);
    };
    use_at(1, start);
    // The first leaves the KV cache when it has been left over for most of its time.
    use_at(2, after(50));
    h.scheduler.maintain(after(59));
    assert!(h.stats.snapshot().prefix_cache_bytes > 0);
    h.scheduler.maintain(after(61));
    assert_eq!(h.stats.snapshot().prefix_cache_bytes, 0);
}

#[test]
fn a_state_that_finds_no_room_is_not_fetched() {
    // A block takes 64 bytes: how much is known once one was saved.
    for (max_saved_bytes, fetches) in [(0, 0), (63, 1)] {
        let mut h = Harness::of(&Setup { max_saved_bytes, ..Setup::unified(4, 4, 120, 16) });
        let params = GenerationParams { ignore_eos: true, ..greedy(60) };
        let requests: Vec<_> = (1..=4).map(|i| h.submit(vec![i; 20], params.clone()).unwrap()).collect();
        h.scheduler.likely_answer_is(1);
        let mut fetched = vec![0];
        while h.scheduler.has_work() {
            h.scheduler.step();
            fetched.push(h.fetched());
        }
        requests.iter().for_each(|r| r.check(120));
        assert!(h.stats.snapshot().preemptions_total > 1);
        fetched.dedup();
        assert_eq!(fetched.len() - 1, fetches, "{fetched:?}");
    }
}

#[test]
fn of_a_leftover_no_more_is_fetched_than_main_memory_holds() {
    // Ten blocks of 640 bytes.
    let mut h = Harness::of(&Setup { reuse: true, ram_bytes: 6_400, ..Setup::split(1, 400, 64, 64) });
    h.leave(200, &[1, 2]);
    assert_eq!(h.fetched(), 11 * 16, "what a block takes beside its state is known before one was saved");
    h.leave(200, &[3]);
    assert_eq!(h.fetched(), 11 * 16 + 10 * 16);
    assert_eq!(h.stats.snapshot().prefix_cache_bytes, 6_400);
    h.assert_empty();
}

#[test]
fn a_leftover_of_whole_blocks_that_are_in_main_memory_is_not_fetched_again() {
    let mut h = Harness::of(&Setup { reuse: true, ram_bytes: 1 << 20, ..Setup::split(1, 400, 64, 64) });
    h.leave(96, &[1, 2, 1, 2, 1]);
    assert_eq!(h.stats.snapshot().cache_ram_hits_total, 3);
    assert_eq!(h.fetched(), 2 * 96);
    h.assert_empty();
}

#[test]
fn while_memory_is_short_leftovers_are_kept_for_a_disk_alone() {
    let dir = tempfile::tempdir().unwrap();
    let memory = PrefixCache::new(&PrefixCacheConfig::default(), fingerprint()).unwrap();
    for (cache, fetched) in [(memory, 0), (on_disk(dir.path(), 1 << 20), 96)] {
        let mut h = Harness::of(&Setup { reuse: true, ..Setup::split(1, 400, 64, 64) });
        h.scheduler.cache_is(cache, fingerprint());
        h.stats.pressure.set_level(DegradationLevel::EvictCache);
        h.leave(100, &[1, 2]);
        assert_eq!(h.fetched(), fetched);
        let now = Instant::now();
        h.stats.pressure.looked();
        h.scheduler.maintain(now);
        assert_eq!(h.stats.snapshot().prefix_cache_bytes, 0);
        h.scheduler.flush(now, now + LONG);
    }
    assert_eq!(written(dir.path(), 1), 96);
}

#[test]
fn what_was_used_last_is_written_first_at_the_end() {
    // Main memory has room for two of the three, each of six blocks.
    for (ram_bytes, kept) in [(1 << 20, [96, 96, 96]), (8_000, [96, 0, 96])] {
        let dir = tempfile::tempdir().unwrap();
        let mut h = Harness::of(&Setup::unified(1, 3, 1_600, 64));
        h.scheduler.cache_is(on_disk(dir.path(), ram_bytes), fingerprint());
        h.leave(100, &[1, 2, 3, 1]);
        let now = Instant::now();
        h.scheduler.flush(now, now + LONG);
        assert_eq!(h.held(), 0);
        drop(h);
        assert_eq!([1, 2, 3].map(|token| written(dir.path(), token)), kept, "{ram_bytes} bytes of main memory");
    }
}

#[test]
fn without_time_or_a_disk_nothing_is_saved_at_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let now = Instant::now();
    let memory = PrefixCache::new(&PrefixCacheConfig::default(), fingerprint()).unwrap();
    for (cache, deadline) in [(memory, now + LONG), (on_disk(dir.path(), 1 << 20), now)] {
        let mut h = Harness::of(&Setup::unified(1, 3, 1_600, 64));
        h.scheduler.cache_is(cache, fingerprint());
        h.leave(100, &[1, 2]);
        h.scheduler.flush(now, deadline);
        assert_eq!(h.held(), 200);
    }
    assert_eq!(written(dir.path(), 1), 0);
}

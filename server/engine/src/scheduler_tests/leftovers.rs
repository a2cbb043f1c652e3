//! What becomes of a leftover on its way out of the KV cache: what is copied, how long it lives, what reaches the disk.

use super::*;

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

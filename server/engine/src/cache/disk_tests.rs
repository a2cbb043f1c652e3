//! The disk tier: restarts, damage, limits, and others at work in the same directory.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::SystemTime;

use proptest::prelude::*;
use tempfile::TempDir;

use super::entry::{Damage, Entry, decode_block, encode, encoded_bytes};
use super::limits::{DISK_READ_BYTES_PER_PROMPT, FETCHED_BYTES, WRITE_QUEUE_BYTES};
use super::testing::*;
use super::*;

const RAM: u64 = 1 << 20;
const DISK: u64 = 1 << 20;

fn open(dir: &TempDir) -> Fixture {
    Fixture::on_disk("model", RAM, dir.path(), DISK)
}

/// A directory that holds a prefix's blocks.
fn written(prefix: &[u8]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut f = open(&dir);
    f.insert(prefix, 0, Instant::now()).unwrap();
    f.flush();
    assert_eq!(f.disk().writes, prefix.len() as u64);
    dir
}

/// The file of the last block of a prefix.
fn file_of(dir: &Path, model: &str, prefix: &[u8]) -> PathBuf {
    let own = fingerprint(model);
    let name = *chain(own, &blocks(prefix)).last().unwrap();
    dir.join(own.to_string()).join(format!("{name}.kv"))
}

fn mode_of(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn set_age(path: &Path, age: Duration) {
    File::open(path).unwrap().set_modified(SystemTime::now() - age).unwrap();
}

fn disk_bytes(prefix: &[u8]) -> u64 {
    payloads(prefix, 0).iter().map(|payload| encoded_bytes(payload.len())).sum()
}

#[test]
fn a_restart_finds_what_was_there() {
    let dir = tempfile::tempdir().unwrap();
    let inner = dir.path().join("made/when/absent");
    let mut f = Fixture::on_disk("model", RAM, &inner, DISK);
    f.insert(&[1, 2, 3], 0, Instant::now()).unwrap();
    f.insert(&[1, 4], 0, Instant::now()).unwrap();
    f.flush();
    let disk = f.disk();
    assert_eq!((disk.writes, disk.entries), (4, 4));
    assert_eq!(disk.bytes, disk_bytes(&[1, 2, 3]) + encoded_bytes(payload(&[1, 4]).len()));
    f.flush();
    assert_eq!(f.disk().writes, 4, "what is on disk is not written again");
    drop(f);

    let file = file_of(&inner, "model", &[1, 2]);
    assert_eq!((mode_of(&file), mode_of(file.parent().unwrap()), mode_of(&inner)), (0o600, 0o700, 0o700));

    let mut f = Fixture::on_disk("model", RAM, &inner, DISK);
    assert_eq!(f.disk().entries, 4);
    let fetched = f.fetch(&prompt(&[1, 2, 3, 4]));
    assert_eq!(f.covered(&[1, 2, 3, 4], None), 0);
    assert_eq!(f.covered(&[1, 2, 3, 4], fetched.as_ref()), 3 * BLOCK_TOKENS);
    drop(fetched);
    let hit = f.lookup(&[1, 2, 3, 4], Instant::now());
    assert_eq!((hit.payloads().len(), hit.disk_blocks()), (3, 3));
    let hit = f.lookup(&[1, 4], Instant::now());
    assert_eq!((hit.payloads().len(), hit.disk_blocks()), (2, 1));
    assert_eq!(f.lookup(&[1, 2, 3], Instant::now()).disk_blocks(), 0);
    let disk = f.disk();
    // Three of them twice: read ahead, and not taken in.
    assert_eq!((disk.hits, disk.corrupt, disk.writes), (7, 0, 0));
    assert_eq!(disk.read_bytes, disk.bytes + disk_bytes(&[1, 2, 3]));
}

#[test]
fn what_is_evicted_from_memory_comes_back_from_disk() {
    let dir = tempfile::tempdir().unwrap();
    let mut f = Fixture::on_disk("model", bytes_of(&[1, 2, 3]), dir.path(), DISK);
    f.insert(&[1, 2, 3], 0, Instant::now()).unwrap();
    let held = f.lookup(&[1], Instant::now());
    f.cache.evict_to(0, Instant::now());
    assert_eq!(f.cache.stats().nodes, 1, "the block in use stays");
    drop(held);
    f.cache.evict_to(0, Instant::now());
    f.flush();
    assert_eq!(f.disk().writes, 3);
    let hit = f.lookup(&[1, 2, 3], Instant::now());
    assert_eq!((hit.payloads().len(), hit.disk_blocks()), (3, 3));
    // The hit takes all the memory there is: what another lookup would need stays on disk.
    f.insert(&[4], 0, Instant::now()).unwrap();
    assert_eq!(f.found(&[4]), 0);
    drop(hit);
    f.insert(&[4], 0, Instant::now()).unwrap();
    assert_eq!(f.found(&[4]), 1);
}

#[test]
fn damage_anywhere_is_a_miss_and_removes_the_file() {
    let prefix = [1, 2, 3];
    let length = usize::try_from(encoded_bytes(payload(&prefix[..2]).len())).unwrap();
    // Every byte of the header and the checksum, and some of the payload.
    let flips = (0..352).chain((352..length - 32).step_by(17)).chain(length - 32..length);
    let flips = flips.map(|at| (at, "flip"));
    let cuts = [0, 1, 7, 8, 100, 343, 344, 351, 352, length - 33, length - 32, length - 1].map(|at| (at, "cut"));
    let dir = written(&prefix);
    let file = file_of(dir.path(), "model", &prefix[..2]);
    let whole = fs::read(&file).unwrap();
    assert_eq!(whole.len(), length);
    for (at, kind) in flips.chain(cuts).chain([(0, "grown")]) {
        let mut bytes = whole.clone();
        match kind {
            "flip" => bytes[at] ^= 0x40,
            "cut" => bytes.truncate(at),
            _ => bytes.push(0),
        }
        fs::write(&file, &bytes).unwrap();
        let mut f = open(&dir);
        assert_eq!(f.found(&prefix), 1, "{kind} at {at}");
        assert!(!file.exists(), "{kind} at {at}");
        assert_eq!((f.disk().corrupt, f.disk().entries), (1, 2), "{kind} at {at}");
        assert_eq!(f.found(&prefix), 1);
        assert_eq!(f.disk().corrupt, 1);
        // It can be had again.
        f.insert(&prefix, 0, Instant::now()).unwrap();
        f.flush();
        assert_eq!(f.disk().writes, 1);
        assert_eq!(open(&dir).found(&prefix), 3);
    }
}

#[test]
fn whole_files_in_the_wrong_place_are_misses() {
    let dir = written(&[1, 2, 3]);
    let at = |prefix: &[u8]| file_of(dir.path(), "model", prefix);
    // Another block's file under this name.
    fs::copy(at(&[1, 2, 3]), at(&[1, 2])).unwrap();
    let mut f = open(&dir);
    assert_eq!((f.found(&[1, 2, 3]), f.disk().corrupt), (1, 1));
    // A file that grew after it was found.
    let dir = written(&[1]);
    let mut f = open(&dir);
    f.flush();
    fs::write(file_of(dir.path(), "model", &[1]), vec![0; 5_000]).unwrap();
    assert_eq!((f.found(&[1]), f.disk().corrupt, f.disk().entries), (0, 1, 0));
    // A folder of this model's with another one's files, of the same tokens and names.
    let dir = written(&[1]);
    let (mine, other) = (fingerprint("model"), fingerprint("other"));
    let (parent, tokens, payload) = (other.root(), blocks(&[1]), payload(&[1]));
    let foreign = encode(&Entry { fingerprint: other, parent, tokens, payload });
    assert_eq!(decode_block(foreign.clone(), mine, mine.root(), &blocks(&[1])), Err(Damage::Fingerprint));
    fs::write(file_of(dir.path(), "model", &[1]), foreign).unwrap();
    let mut f = open(&dir);
    assert_eq!((f.found(&[1]), f.disk().corrupt), (0, 1));
}

#[test]
fn models_share_a_directory_without_seeing_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let mut one = open(&dir);
    let mut two = Fixture::on_disk("other", RAM, dir.path(), DISK);
    one.insert(&[1, 2], 0, Instant::now()).unwrap();
    one.flush();
    assert_eq!(two.found(&[1, 2]), 0);
    two.insert(&[1], 0, Instant::now()).unwrap();
    two.flush();
    drop((one, two));
    let (mut one, mut two) = (open(&dir), Fixture::on_disk("other", RAM, dir.path(), DISK));
    assert_eq!((one.found(&[1, 2]), two.found(&[1, 2])), (2, 1));
    assert_eq!((one.disk().corrupt, two.disk().corrupt), (0, 0));
}

/// The limit is over all models; the oldest go, whoever wrote them.
#[test]
fn the_directory_stays_within_its_limit() {
    let dir = tempfile::tempdir().unwrap();
    let mut other = Fixture::on_disk("other", RAM, dir.path(), DISK);
    other.insert(&[9], 0, Instant::now()).unwrap();
    other.flush();
    drop(other);
    set_age(&file_of(dir.path(), "other", &[9]), Duration::from_secs(3600));
    let mut f = open(&dir);
    f.insert(&[1, 2], 0, Instant::now()).unwrap();
    f.insert(&[3], 0, Instant::now()).unwrap();
    f.flush();
    drop(f);

    let limit = disk_bytes(&[1, 2]) + disk_bytes(&[3]) + disk_bytes(&[4]) - 1;
    let mut f = Fixture::on_disk("model", RAM, dir.path(), limit);
    f.flush();
    assert_eq!(f.disk().entries, if disk_bytes(&[9]) < disk_bytes(&[4]) { 4 } else { 3 });
    // An access makes these the youngest, also for the next process.
    assert_eq!(f.found(&[1, 2]), 2);
    drop(f);
    let mut f = Fixture::on_disk("model", RAM, dir.path(), limit);
    f.insert(&[4], 0, Instant::now()).unwrap();
    f.flush();
    let stats = f.disk();
    assert!(stats.bytes <= limit && stats.bytes + 997 > disk_bytes(&[1, 2]), "{stats:?}");
    assert!(!file_of(dir.path(), "other", &[9]).exists());
    assert!(!file_of(dir.path(), "other", &[9]).parent().unwrap().exists(), "an empty folder was left");
    assert!(!file_of(dir.path(), "model", &[3]).exists());
    for prefix in [&[1][..], &[1, 2], &[4]] {
        assert!(file_of(dir.path(), "model", prefix).exists(), "{prefix:?}");
    }
    // A block that is larger than the tier is dropped.
    let mut f = Fixture::on_disk("small", RAM, dir.path(), 400);
    f.insert(&[1], 0, Instant::now()).unwrap();
    f.cache.evict_to(0, Instant::now());
    f.flush();
    assert_eq!((f.disk().write_drops, f.disk().entries), (1, 0));
}

#[test]
fn a_file_dated_to_come_goes_when_room_is_needed() {
    let dir = written(&[1]);
    let file = file_of(dir.path(), "model", &[1]);
    File::open(&file).unwrap().set_modified(SystemTime::now() + Duration::from_secs(3600)).unwrap();
    // Room for any one of the two.
    let limit = disk_bytes(&[1]).max(disk_bytes(&[2]));
    let mut f = Fixture::on_disk("model", RAM, dir.path(), limit);
    f.insert(&[2], 0, Instant::now()).unwrap();
    f.flush();
    assert_eq!((f.disk().evictions, f.disk().entries, f.disk().writes), (1, 1, 1));
    assert!(!file.exists());
}

/// A block is of no use without those before it, so that they must not go first.
#[test]
fn no_block_on_disk_is_older_than_one_behind_it() {
    let prefix = [1, 2, 3, 4, 5, 6];
    let dir = written(&prefix);
    let accessed = |len: usize| {
        let file = file_of(dir.path(), "model", &prefix[..len]);
        fs::metadata(file).unwrap().modified().unwrap()
    };
    let assert_order = |when: &str| {
        let times: Vec<SystemTime> = (1..=prefix.len()).map(accessed).collect();
        assert!(times.windows(2).all(|pair| pair[0] >= pair[1]), "{when}: {times:?}");
    };
    assert_order("written by a flush");
    assert_eq!(open(&dir).found(&prefix), prefix.len());
    assert_order("read");
    let mut f = open(&dir);
    f.insert(&prefix, 0, Instant::now()).unwrap();
    f.cache.evict_to(0, Instant::now());
    f.flush();
    assert_order("evicted from memory");
}

/// A flush to a disk tier smaller than memory keeps what was used last, with what it hangs on.
#[test]
fn a_flush_keeps_the_most_recently_used() {
    let dir = tempfile::tempdir().unwrap();
    let mut f = Fixture::on_disk("model", RAM, dir.path(), disk_bytes(&[2, 3, 4]) + 100);
    for (i, prefix) in [&[1, 2][..], &[2, 3, 4], &[5]].into_iter().enumerate() {
        f.insert(prefix, 0, Instant::now() + Duration::from_millis(i as u64)).unwrap();
    }
    f.lookup(&[2, 3, 4], Instant::now() + Duration::from_millis(10));
    f.flush();
    assert_eq!(f.disk().evictions, 0);
    drop(f);
    let mut f = open(&dir);
    assert_eq!((f.found(&[2, 3, 4]), f.found(&[1]), f.disk().corrupt), (3, 0, 0));
}

#[test]
fn age_ends_blocks_on_disk_too() {
    let dir = written(&[1, 2]);
    let (first, second) = (file_of(dir.path(), "model", &[1]), file_of(dir.path(), "model", &[1, 2]));
    set_age(&second, Duration::from_secs(100));
    let disk = crate::params::DiskCacheConfig { dir: dir.path().into(), max_bytes: DISK };
    let config = PrefixCacheConfig { ttl_ms: Some(50_000), disk: Some(disk), ..PrefixCacheConfig::default() };
    let mut f = Fixture::new("model", config);
    assert_eq!(f.found(&[1, 2]), 1);
    f.flush();
    assert_eq!((f.disk().expirations, f.disk().corrupt), (1, 0));
    assert!(first.exists() && !second.exists());
}

#[test]
fn only_its_own_files_are_touched() {
    let dir = written(&[1]);
    let folder = file_of(dir.path(), "model", &[1]).parent().unwrap().to_owned();
    let name = "ab".repeat(32);
    let stays = ["notes.txt", "x.kv", &format!("{name}.bin"), &format!("{name}.1.tmp")].map(|name| folder.join(name));
    for path in &stays {
        fs::write(path, "not a block").unwrap();
        set_age(path, Duration::from_secs(1));
    }
    let abandoned = folder.join(format!("{name}.0123456789abcdef.tmp"));
    fs::write(&abandoned, "half a block").unwrap();
    set_age(&abandoned, Duration::from_secs(600));
    let secret = dir.path().join("secret");
    fs::write(&secret, "secret").unwrap();
    symlink(&secret, folder.join(format!("{name}.kv"))).unwrap();
    fs::create_dir(folder.join(format!("{}.kv", "cd".repeat(32)))).unwrap();
    fs::create_dir(dir.path().join("folder")).unwrap();
    let mut f = Fixture::on_disk("model", RAM, dir.path(), disk_bytes(&[1]));
    f.flush();
    assert_eq!((f.disk().entries, f.found(&[1])), (1, 1));
    assert!(stays.iter().chain([&secret]).all(|path| path.exists()) && !abandoned.exists());
}

#[test]
fn files_that_vanish_and_a_disk_that_fails_are_misses() {
    let dir = written(&[1, 2]);
    let mut f = open(&dir);
    f.flush();
    let folder = file_of(dir.path(), "model", &[1]).parent().unwrap().to_owned();
    fs::remove_dir_all(&folder).unwrap();
    assert_eq!(f.found(&[1, 2]), 0);
    assert_eq!((f.disk().corrupt, f.disk().entries), (0, 1));
    // The folder is made again.
    f.insert(&[1, 2], 0, Instant::now()).unwrap();
    f.flush();
    assert_eq!((f.disk().writes, f.disk().write_errors, f.disk().entries), (2, 0, 2));
    // A file in the folder's place.
    fs::remove_dir_all(&folder).unwrap();
    fs::write(&folder, "").unwrap();
    f.insert(&[3], 0, Instant::now()).unwrap();
    f.flush();
    assert_eq!((f.disk().write_errors, f.found(&[3])), (3, 1));
    drop(f);
    let disk = crate::params::DiskCacheConfig { dir: dir.path().into(), max_bytes: DISK };
    let config = PrefixCacheConfig { disk: Some(disk), ..PrefixCacheConfig::default() };
    let refused = PrefixCache::new(&config, fingerprint("model")).err().unwrap().to_string();
    assert!(refused.contains(&*dir.path().to_string_lossy()) && refused.contains("cannot be used"), "{refused}");
}

#[test]
fn one_prompt_reads_no_more_than_its_share() {
    const PAYLOAD: usize = 7 << 20;
    let dir = tempfile::tempdir().unwrap();
    let prefix = [1, 2, 3, 4, 5];
    let tokens = prompt(&prefix);
    let mut f = Fixture::on_disk("model", 1 << 30, dir.path(), 1 << 30);
    let names = chain(f.fingerprint, &tokens);
    let rows = (0..5).map(|i| vec![i; PAYLOAD]).collect();
    f.cache.insert(&names, &tokens, 0, rows, Instant::now(), Instant::now()).unwrap();
    f.flush();
    drop(f);
    let mut f = Fixture::on_disk("model", 1 << 30, dir.path(), 1 << 30);
    let at_once = usize::try_from(DISK_READ_BYTES_PER_PROMPT / encoded_bytes(PAYLOAD)).unwrap();
    for (found, read) in [(at_once, at_once), (5, 5 - at_once), (5, 0)] {
        let fetched = f.fetch(&tokens);
        let hit = f.cache.lookup(&names, &tokens, fetched, Instant::now());
        assert_eq!((hit.payloads().len(), hit.disk_blocks()), (found, read));
        for (i, payload) in hit.payloads().iter().enumerate() {
            assert!(payload.len() == PAYLOAD && payload.iter().all(|byte| usize::from(*byte) == i));
        }
    }
}

#[test]
fn what_waiting_prompts_hold_is_bounded_and_given_back() {
    const PAYLOAD: usize = 15 << 20;
    let dir = tempfile::tempdir().unwrap();
    let prefix = [1, 2];
    let tokens = prompt(&prefix);
    let mut f = Fixture::on_disk("model", 1 << 30, dir.path(), 1 << 30);
    let names = chain(f.fingerprint, &tokens);
    let rows = vec![vec![0; PAYLOAD], vec![1; PAYLOAD]];
    f.cache.insert(&names, &tokens, 0, rows, Instant::now(), Instant::now()).unwrap();
    f.flush();
    drop(f);
    let f = Fixture::on_disk("model", 1 << 30, dir.path(), 1 << 30);
    let blocks = |held: &[Option<Fetched>]| held.iter().flatten().map(|fetched| fetched.payloads.len()).sum::<usize>();
    let most = usize::try_from(FETCHED_BYTES / encoded_bytes(PAYLOAD)).unwrap();
    let mut held: Vec<_> = (0..most).map(|_| f.fetch(&tokens)).collect();
    assert_eq!(blocks(&held), most, "of two for each prompt");
    assert!(f.fetch(&tokens).is_none());
    held.truncate(1);
    assert_eq!(f.fetch(&tokens).map(|fetched| fetched.payloads.len()), Some(2));
}

#[test]
fn what_left_memory_since_it_was_fetched_is_a_miss() {
    let dir = tempfile::tempdir().unwrap();
    let mut f = Fixture::on_disk("model", RAM, dir.path(), DISK);
    f.insert(&[1, 2, 3], 0, Instant::now()).unwrap();
    f.flush();
    f.cache.evict_to(0, Instant::now());
    assert_eq!(f.found(&[1]), 1, "back from disk");
    let tokens = prompt(&[1, 2, 3]);
    let fetched = f.fetch(&tokens);
    assert_eq!(f.covered(&[1, 2, 3], fetched.as_ref()), 3 * BLOCK_TOKENS);
    f.cache.evict_to(0, Instant::now());
    assert_eq!(f.covered(&[1, 2, 3], fetched.as_ref()), 0, "they follow a block that is gone");
    let names = chain(f.fingerprint, &tokens);
    assert_eq!(f.cache.lookup(&names, &tokens, fetched, Instant::now()).tokens(), 0);
    // What came in meanwhile by another way stays as it is.
    let fetched = f.fetch(&tokens);
    f.insert(&[1, 2], 0, Instant::now()).unwrap();
    let hit = f.cache.lookup(&names, &tokens, fetched, Instant::now());
    assert_eq!((hit.tokens(), hit.disk_blocks()), (3 * BLOCK_TOKENS, 1));
}

#[test]
fn the_queue_of_writes_is_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let mut f = Fixture::on_disk("model", 1 << 30, dir.path(), 1 << 30);
    let tokens = prompt(&[1]);
    let names = chain(f.fingerprint, &tokens);
    let large = vec![0; usize::try_from(WRITE_QUEUE_BYTES).unwrap() + 1];
    f.cache.insert(&names, &tokens, 0, vec![large], Instant::now(), Instant::now()).unwrap();
    assert_eq!(f.cache.evict_to(0, Instant::now()), 0);
    f.flush();
    assert_eq!((f.disk().write_drops, f.disk().writes), (1, 0));
    // With no time to write, a flush says so instead of waiting.
    f.insert(&[2], 0, Instant::now()).unwrap();
    let now = Instant::now();
    assert!(!f.cache.flush(now, now.checked_sub(Duration::from_secs(1)).unwrap()));
}

const RACE_DIR: &str = "GANTRY_TEST_CACHE_RACE_DIR";

/// Processes that write, read, evict and damage nothing in one directory with a limit too small for all of it.
#[test]
fn processes_race_on_one_directory() {
    const LIMIT: u64 = 40_000;
    if let Some(dir) = std::env::var_os(RACE_DIR) {
        let mut f = Fixture::on_disk("model", 4_000, PathBuf::from(dir), LIMIT);
        let mut seed = u64::from(std::process::id());
        let mut draw = |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % n
        };
        for round in 0..3_000_u32 {
            let prefix: Vec<u8> = (0..1 + draw(5)).map(|_| draw(3) as u8).collect();
            // What is found is compared with what must be there.
            let found = f.lookup(&prefix, Instant::now());
            let first = found.payloads().len();
            f.insert(&prefix, first, Instant::now()).unwrap();
            if round % 300 == 299 {
                f.flush();
            }
        }
        assert_eq!(f.disk().corrupt, 0);
        assert!(f.disk().hits > 0, "{:?}", f.disk());
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let test = "cache::disk_tests::processes_race_on_one_directory";
    let start = || {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test]).env(RACE_DIR, dir.path()).stdout(Stdio::piped()).spawn().unwrap()
    };
    for child in [start(), start(), start()] {
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }
    let mut f = Fixture::on_disk("model", RAM, dir.path(), LIMIT);
    f.flush();
    let disk = f.disk();
    assert!(disk.entries > 0 && disk.bytes <= LIMIT, "{disk:?}");
    let mut hits = 0;
    for a in 0..3 {
        for b in 0..3 {
            hits += f.found(&[a, b, a, b]);
        }
    }
    assert!(hits > 0 && f.disk().corrupt == 0, "{:?}", f.disk());
}

#[derive(Clone, Debug)]
enum Action {
    Use(Vec<u8>),
    EvictTo(u64),
    Flush,
    Restart,
    Damage { file: prop::sample::Index, at: prop::sample::Index, cut: bool },
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        12 => prop::collection::vec(0_u8..3, 1..6).prop_map(Action::Use),
        2 => (0_u64..6_000).prop_map(Action::EvictTo),
        2 => Just(Action::Flush),
        1 => Just(Action::Restart),
        2 => (any::<prop::sample::Index>(), any::<prop::sample::Index>(), any::<bool>())
            .prop_map(|(file, at, cut)| Action::Damage { file, at, cut }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    /// Whatever happens to the files: what is found is right (`lookup` compares it), and both tiers keep their limits.
    #[test]
    fn damage_evictions_and_restarts_only_ever_cost_hits(
        ram_bytes in 1_000_u64..8_000,
        max_bytes in 1_500_u64..12_000,
        actions in prop::collection::vec(action(), 1..60),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let open = || Fixture::on_disk("model", ram_bytes, dir.path(), max_bytes);
        let mut f = open();
        let mut damaged = 0;
        for action in actions {
            match action {
                Action::Use(prefix) => {
                    let hit = f.lookup(&prefix, Instant::now());
                    prop_assert!(f.insert(&prefix, hit.payloads().len(), Instant::now()).is_ok());
                }
                Action::EvictTo(bytes) => prop_assert!(f.cache.evict_to(bytes, Instant::now()) <= bytes),
                Action::Flush => f.flush(),
                Action::Restart => {
                    prop_assert!(f.disk().corrupt <= damaged);
                    damaged -= f.disk().corrupt;
                    drop(f);
                    f = open();
                }
                Action::Damage { file, at, cut } => {
                    f.flush();
                    let folder = dir.path().join(f.fingerprint.to_string());
                    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
                    files.sort();
                    if files.is_empty() {
                        continue;
                    }
                    let path = file.get(&files);
                    let mut bytes = fs::read(path).unwrap();
                    if bytes.is_empty() {
                        continue;
                    }
                    let at = at.index(bytes.len());
                    if cut { bytes.truncate(at) } else { bytes[at] ^= 1 }
                    fs::write(path, bytes).unwrap();
                    damaged += 1;
                }
            }
            let stats = f.cache.stats();
            prop_assert!(stats.bytes <= ram_bytes);
            prop_assert!(f.disk().bytes <= max_bytes);
        }
    }

    /// **Feature: distributed-inference-server, Property 10: LRU Cache Eviction**
    /// **Validates: Requirements 4.2**
    #[test]
    fn the_files_accessed_longest_ago_leave_first(
        ages in prop::collection::btree_set(10_u64..100_000, 2..12)
            .prop_map(|ages| ages.into_iter().collect::<Vec<u64>>())
            .prop_shuffle(),
        reads in prop::collection::vec(any::<prop::sample::Index>(), 0..5),
        keep_percent in 0_u64..=100,
    ) {
        const NEW: u8 = 200;
        let dir = tempfile::tempdir().unwrap();
        let file = |letter: u8| file_of(dir.path(), "model", &[letter]);
        let size = |letter: u8| disk_bytes(&[letter]);
        let letters: Vec<u8> = (1..).take(ages.len()).collect();
        let mut f = open(&dir);
        for &letter in &letters {
            f.insert(&[letter], 0, Instant::now()).unwrap();
        }
        f.flush();
        drop(f);
        // A plain list of them, the one that was accessed longest ago first.
        let mut kept: Vec<(u64, u8)> = ages.iter().copied().zip(letters.iter().copied()).collect();
        kept.sort_unstable();
        kept.reverse();
        kept.iter().for_each(|&(age, letter)| set_age(&file(letter), Duration::from_secs(age)));
        let mut kept: Vec<u8> = kept.into_iter().map(|(_, letter)| letter).collect();
        for read in &reads {
            // Each time from disk, since memory is a new one.
            let letter = *read.get(&letters);
            prop_assert_eq!(open(&dir).found(&[letter]), 1);
            kept.retain(|&other| other != letter);
            kept.push(letter);
        }
        let bytes = |letters: &[u8]| letters.iter().map(|&letter| size(letter)).sum::<u64>();
        let limit = bytes(&letters) * keep_percent / 100;
        let mut gone = 0;
        let mut f = Fixture::on_disk("model", RAM, dir.path(), limit);
        // First what is too much, and then as much as another one needs.
        for needed in [0, size(NEW)] {
            if needed > 0 {
                f.insert(&[NEW], 0, Instant::now()).unwrap();
            }
            f.flush();
            if needed <= limit {
                while bytes(&kept) + needed > limit {
                    kept.remove(0);
                    gone += 1;
                }
                kept.extend((needed > 0).then_some(NEW));
            }
            for &letter in letters.iter().chain([&NEW]) {
                prop_assert_eq!(file(letter).exists(), kept.contains(&letter), "block {} of {:?}", letter, kept);
            }
            prop_assert_eq!(f.disk().evictions, gone);
        }
    }
}

#[test]
fn who_finds_the_disk_standing_still_goes_on_without_it() {
    let dir = written(&[1, 2]);
    let f = open(&dir);
    assert_eq!(f.disk().entries, 2);
    let reader = f.cache.reader().unwrap();
    let reading = reader.shared.turn().unwrap();
    assert!(f.fetch(&prompt(&[1, 2, 3])).is_none());
    drop(reading);
    assert!(f.fetch(&prompt(&[1, 2, 3])).is_some());
    // Nor does the engine's thread wait for who looks at the disk with the index.
    let _index = reader.shared.index();
    assert_eq!(f.disk().entries, 2);
}

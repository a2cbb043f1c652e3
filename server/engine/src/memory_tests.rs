#![allow(clippy::unwrap_used)]

use std::fs;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use proptest::prelude::*;

use super::*;

const STATUS_TEXT: &str = "Name:\tgantry-server\nUmask:\t0022\nVmPeak:\t 9000000 kB\nVmRSS:\t  734003 kB\n\
    RssAnon:\t  204800 kB\nRssFile:\t  512000 kB\nRssShmem:\t    1024 kB\nVmSwap:\t       0 kB\nThreads:\t5\n";
const MEMINFO_TEXT: &str = "MemTotal:       24682416 kB\nMemFree:        18536708 kB\nMemAvailable:   23470360 kB\n";
const STAT_TEXT: &str = "anon 400000000\nfile 700000000\nkernel 9000000\nshmem 1000000\nfile_mapped 600000000\n\
    inactive_anon 0\nactive_anon 400000000\ninactive_file 200000000\nactive_file 499000000\nunevictable 0\n\
    workingset_refault_file 12\n";

/// A made-up machine in a directory of its own.
struct Root(PathBuf);

impl Root {
    fn new(files: &[(&str, &str)]) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("gantry-memory-{}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed));
        let root = Self(std::env::temp_dir().join(name));
        for (path, text) in files {
            root.write(path, text);
        }
        root
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn pages_of_files_do_not_count_for_the_process() {
    assert_eq!(parse_process_used(STATUS_TEXT), Some((204_800 + 1024) * 1024));
    assert_eq!(parse_process_used("VmRSS:\t 1 kB\nRssAnon:\t 1 kB\n"), None);
    assert_eq!(parse_kib("MemTotal: 18014398509481984 kB", "MemTotal:"), None);
}

#[test]
fn pages_of_files_do_not_count_for_the_cgroup() {
    assert_eq!(parse_cgroup_file(STAT_TEXT), Some(699_000_000));
    assert_eq!(parse_cgroup_file("inactive_file 5\nactive_file_of_the_future 7\n"), None);
    assert_eq!(parse_cgroup_max("1073741824\n"), Some(1 << 30));
    assert_eq!(parse_cgroup_max("max\n"), None);
}

#[test]
fn the_groups_above_count_too_and_only_those_of_version_2() {
    assert_eq!(cgroup_dirs("0::/\n"), ["/sys/fs/cgroup/"]);
    let nested = ["/sys/fs/cgroup/a.slice/b", "/sys/fs/cgroup/a.slice", "/sys/fs/cgroup/"];
    assert_eq!(cgroup_dirs("4:memory:/old\n0::/a.slice/b\n"), nested);
    assert_eq!(cgroup_dirs("0::/../../b\n"), ["/sys/fs/cgroup/b", "/sys/fs/cgroup/"]);
    assert_eq!(cgroup_dirs("4:memory:/old\n1:name=systemd:/x\n"), Vec::<String>::new());
}

#[test]
fn the_configured_limit_comes_first_then_the_tightest_cgroup_then_the_machine() {
    let root = Root::new(&[
        ("proc/self/status", STATUS_TEXT),
        ("proc/self/cgroup", "0::/pod/worker\n"),
        ("proc/meminfo", MEMINFO_TEXT),
        ("sys/fs/cgroup/pod/memory.max", "1000000000\n"),
        ("sys/fs/cgroup/pod/memory.current", "1100000000\n"),
        ("sys/fs/cgroup/pod/memory.stat", STAT_TEXT),
        ("sys/fs/cgroup/pod/worker/memory.max", "max\n"),
    ]);
    let configured = MemoryGauge::find_under(Some(1 << 30), &root.0).unwrap();
    let used_bytes = (204_800 + 1024) * 1024;
    assert_eq!(configured.read_under(&root.0).unwrap(), MemoryUse { used_bytes, limit_bytes: 1 << 30 });

    let cgroup = MemoryGauge::find_under(None, &root.0).unwrap();
    assert_eq!(cgroup, MemoryGauge::Cgroups(vec![root.0.join("sys/fs/cgroup/pod")]));
    let usage = cgroup.read_under(&root.0).unwrap();
    assert_eq!(usage, MemoryUse { used_bytes: 401_000_000, limit_bytes: 1_000_000_000 });
    assert!((usage.pressure() - 0.401).abs() < 1e-9);

    root.write("sys/fs/cgroup/pod/worker/memory.max", "450000000\n");
    root.write("sys/fs/cgroup/pod/worker/memory.current", "1000000000\n");
    root.write("sys/fs/cgroup/pod/worker/memory.stat", STAT_TEXT);
    let both = MemoryGauge::find_under(None, &root.0).unwrap();
    let tightest = MemoryUse { used_bytes: 301_000_000, limit_bytes: 450_000_000 };
    assert_eq!(both.read_under(&root.0).unwrap(), tightest);
    // A limit that is lifted while the engine runs.
    root.write("sys/fs/cgroup/pod/worker/memory.max", "max\n");
    assert_eq!(both.read_under(&root.0).unwrap(), usage);

    root.write("proc/self/cgroup", "4:memory:/old\n");
    let machine = MemoryGauge::find_under(None, &root.0).unwrap();
    assert_eq!(machine.read_under(&root.0).unwrap(), MemoryUse { used_bytes, limit_bytes: 24_682_416 * 1024 });
}

#[test]
fn an_error_names_the_file() {
    let root = Root::new(&[("proc/self/status", "Name:\tx\n"), ("proc/meminfo", "MemFree: 1 kB\n")]);
    let error = MemoryGauge::find_under(None, &root.0).unwrap_err().to_string();
    assert!(error.contains("/proc/meminfo") && error.contains("MemTotal"), "{error}");
    let error = MemoryGauge::Process { limit_bytes: 1 }.read_under(&root.0).unwrap_err().to_string();
    assert!(error.contains("proc/self/status") && error.contains("RssAnon"), "{error}");
    let gone = MemoryGauge::Cgroups(vec![root.0.join("nowhere")]).read_under(&root.0).unwrap_err().to_string();
    assert!(gone.contains("nowhere/memory.max"), "{gone}");
}

/// On the machine that runs the tests: memory that is used is seen, and gone when it is given back.
#[test]
fn memory_that_this_process_takes_is_seen() {
    const BYTES: usize = 256 << 20;
    let gauge = MemoryGauge::find(Some(1 << 40)).unwrap();
    let before = gauge.read().unwrap().used_bytes;
    let taken = vec![1_u8; BYTES];
    let during = gauge.read().unwrap().used_bytes;
    assert!(std::hint::black_box(&taken).iter().all(|&byte| byte == 1));
    // Other tests run in this process: most of it must show.
    assert!(during.saturating_sub(before) > BYTES as u64 / 2, "{before} {during}");
    assert!(MemoryGauge::find(None).and_then(|gauge| gauge.read()).unwrap().pressure() > 0.0);
}

proptest! {
    #[test]
    fn no_text_breaks_the_parsers(text in "(0::/|RssAnon:|RssShmem:|inactive_file|[0-9]{1,21}|kB|[ /\\n.])*") {
        let _ = (parse_process_used(&text), parse_cgroup_file(&text), parse_cgroup_max(&text));
        for dir in cgroup_dirs(&text) {
            prop_assert!(dir.starts_with(CGROUP_ROOT) && !dir.contains("/../") && !dir.ends_with("/.."));
        }
    }
}

//! How much of the memory that it may use this process uses, where what the kernel can take back does not count.
//!
//! What counts is memory that only a killed process gives back: weights, KV cache, heap. Pages of files, a model's that is
//! being read among them, are taken back and read again as need be, so they are no reason to refuse anyone.
//!
//! The limit is the configured one; else that of the cgroup (v2), over the process's own group and those above it;
//! else the machine's memory. Against a cgroup's limit its own usage counts, with all processes in it:
//! `memory.current` less the file pages (`inactive_file` and `active_file`). Against the others, this process: `RssAnon` and `RssShmem`.
//!
//! Reading opens one file of proc, or three for each limited cgroup, for which the kernel gathers figures: up to 0.2
//! ms a file. Not for the thread that decodes, and a few times a second is enough. Absent: cgroup v1 (set a limit
//! there), swap, memory of a GPU.

use std::io;
use std::path::{Path, PathBuf};

const STATUS: &str = "/proc/self/status";
const CGROUP: &str = "/proc/self/cgroup";
const CGROUP_ROOT: &str = "/sys/fs/cgroup";
const MEMINFO: &str = "/proc/meminfo";

/// What is used of what is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryUse {
    pub(crate) used_bytes: u64,
    pub(crate) limit_bytes: u64,
}

impl MemoryUse {
    /// Used over allowed; above 1 when a configured limit is passed.
    pub(crate) fn pressure(self) -> f64 {
        self.used_bytes as f64 / self.limit_bytes.max(1) as f64
    }
}

/// What this process holds that only its end gives back.
///
/// # Errors
/// When the file cannot be read or lacks what it should say, naming it.
pub(crate) fn own_bytes() -> io::Result<u64> {
    let path = Path::new(STATUS);
    parse_process_used(&read(path)?).ok_or_else(|| missing(path, "the lines RssAnon and RssShmem"))
}

/// Where the figures are read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MemoryGauge {
    /// This process against a limit.
    Process { limit_bytes: u64 },
    /// Groups that have a limit; the tightest counts.
    Cgroups(Vec<PathBuf>),
}

impl MemoryGauge {
    /// Finds the limit: the configured one, else the cgroup's, else the machine's.
    ///
    /// # Errors
    /// When nothing is configured and the machine does not tell its memory.
    pub(crate) fn find(configured_bytes: Option<u64>) -> io::Result<Self> {
        Self::find_under(configured_bytes, Path::new("/"))
    }

    fn find_under(configured_bytes: Option<u64>, root: &Path) -> io::Result<Self> {
        if let Some(limit_bytes) = configured_bytes {
            return Ok(Self::Process { limit_bytes });
        }
        let membership = std::fs::read_to_string(under(root, CGROUP)).unwrap_or_default();
        let limited = |dir: &PathBuf| {
            std::fs::read_to_string(dir.join("memory.max")).is_ok_and(|text| parse_cgroup_max(&text).is_some())
        };
        let mut groups: Vec<PathBuf> = cgroup_dirs(&membership).iter().map(|dir| under(root, dir)).collect();
        groups.retain(limited);
        if !groups.is_empty() {
            return Ok(Self::Cgroups(groups));
        }
        let meminfo = std::fs::read_to_string(under(root, MEMINFO))?;
        let limit_bytes =
            parse_kib(&meminfo, "MemTotal:").ok_or_else(|| missing(Path::new(MEMINFO), "a line MemTotal"))?;
        Ok(Self::Process { limit_bytes })
    }

    /// The figures of now.
    ///
    /// # Errors
    /// When a file cannot be read or lacks what it should say, naming it.
    pub(crate) fn read(&self) -> io::Result<MemoryUse> {
        self.read_under(Path::new("/"))
    }

    fn read_under(&self, root: &Path) -> io::Result<MemoryUse> {
        match self {
            Self::Process { limit_bytes } => {
                let path = under(root, STATUS);
                let used_bytes = parse_process_used(&read(&path)?)
                    .ok_or_else(|| missing(&path, "the lines RssAnon and RssShmem"))?;
                Ok(MemoryUse { used_bytes, limit_bytes: *limit_bytes })
            }
            Self::Cgroups(dirs) => {
                let mut tightest: Option<MemoryUse> = None;
                for dir in dirs {
                    if let Some(usage) = read_cgroup(dir)?
                        && tightest.is_none_or(|other| usage.pressure() > other.pressure())
                    {
                        tightest = Some(usage);
                    }
                }
                tightest.ok_or_else(|| io::Error::other("no cgroup has a memory limit any more"))
            }
        }
    }
}

/// `None`: the limit was lifted meanwhile.
fn read_cgroup(dir: &Path) -> io::Result<Option<MemoryUse>> {
    let Some(limit_bytes) = parse_cgroup_max(&read(&dir.join("memory.max"))?) else { return Ok(None) };
    let (current, stat) = (dir.join("memory.current"), dir.join("memory.stat"));
    let current_bytes = read(&current)?.trim().parse::<u64>().map_err(|_| missing(&current, "one number of bytes"))?;
    let file_bytes =
        parse_cgroup_file(&read(&stat)?).ok_or_else(|| missing(&stat, "the lines inactive_file and active_file"))?;
    Ok(Some(MemoryUse { used_bytes: current_bytes.saturating_sub(file_bytes), limit_bytes }))
}

fn read(path: &Path) -> io::Result<String> {
    std::fs::read_to_string(path).map_err(|e| io::Error::new(e.kind(), format!("cannot read {}: {e}", path.display())))
}

fn missing(path: &Path, what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{} does not hold {what}", path.display()))
}

fn under(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}

/// The memory of a process that cannot be taken back, from its `status`.
fn parse_process_used(status: &str) -> Option<u64> {
    Some(parse_kib(status, "RssAnon:")?.saturating_add(parse_kib(status, "RssShmem:")?))
}

/// Bytes, from a line such as `MemTotal:  1024 kB`.
fn parse_kib(text: &str, label: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(label))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Bytes of `memory.max`; `None` for `max`, which is no limit.
fn parse_cgroup_max(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

/// The file pages in `memory.stat`. Pages of shared memory and locked ones are not among them.
fn parse_cgroup_file(stat: &str) -> Option<u64> {
    let value = |label: &str| -> Option<u64> {
        stat.lines().find_map(|line| line.strip_prefix(label)?.strip_prefix(' ')?.trim().parse().ok())
    };
    Some(value("inactive_file")?.saturating_add(value("active_file")?))
}

/// The directories of the v2 group in `/proc/self/cgroup` and of those above it, the process's own first. None for v1
/// alone, whose lines have controllers.
fn cgroup_dirs(membership: &str) -> Vec<String> {
    let Some(path) = membership.lines().find_map(|line| line.strip_prefix("0::/")) else { return Vec::new() };
    // A process moved out of its namespace's root sees a way up, which the mount does not have.
    let names: Vec<&str> = path.trim().split('/').filter(|name| !name.is_empty() && *name != "..").collect();
    (0..=names.len()).rev().map(|n| format!("{CGROUP_ROOT}/{}", names[..n].join("/"))).collect()
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;

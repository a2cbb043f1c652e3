//! What a server's processes cost: read from `/proc`, for the process that was started and all that it started.

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Result, ensure};

/// Ticks a second of the times in `/proc/PID/stat`: the same on every Linux that is in use.
const TICKS_PER_S: f64 = 100.0;

/// The cost of a tree of processes at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Cost {
    /// Processor time so far, in seconds; of processes that have ended, none.
    pub cpu_s: f64,
    /// The part of the process that was started itself: of our server the front end, without its workers.
    pub front_cpu_s: f64,
    /// Memory, where pages that several processes share count once, in bytes.
    pub pss_bytes: u64,
}

/// Every process and the one that started it, as far as that has not ended.
fn parents() -> Vec<(u32, u32)> {
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(|pid: u32| Some((pid, parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?.parent)))
        .collect()
}

/// The processes that `root` has started itself: of our server's front the workers, without what those have started.
#[must_use]
pub fn children(root: u32) -> BTreeSet<u32> {
    parents().into_iter().filter(|(_, parent)| *parent == root).map(|(pid, _)| pid).collect()
}

/// The process `root` and its descendants.
#[must_use]
pub fn tree(root: u32) -> BTreeSet<u32> {
    let parents = parents();
    let mut tree = BTreeSet::from([root]);
    loop {
        let before = tree.len();
        tree.extend(
            parents.iter().filter(|(_, parent)| tree.contains(parent)).map(|(pid, _)| *pid).collect::<Vec<_>>(),
        );
        if tree.len() == before {
            return tree;
        }
    }
}

/// What the tree under `root` has cost. Processes that end meanwhile are left out.
#[must_use]
pub fn cost(root: u32) -> Cost {
    let mut cost = Cost::default();
    for pid in tree(root) {
        let folder = Path::new("/proc").join(pid.to_string());
        if let Some(stat) = fs::read_to_string(folder.join("stat")).ok().as_deref().and_then(parse_stat) {
            cost.cpu_s += stat.cpu_s;
            if pid == root {
                cost.front_cpu_s = stat.cpu_s;
            }
        }
        if let Some(bytes) = fs::read_to_string(folder.join("smaps_rollup")).ok().as_deref().and_then(parse_pss) {
            cost.pss_bytes += bytes;
        }
    }
    cost
}

/// Whether a process is there and has not ended, waited for or not.
#[must_use]
pub fn is_alive(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).ok().as_deref().and_then(parse_stat).is_some_and(|stat| !stat.ended)
}

/// Sends a signal, such as `TERM`.
///
/// # Errors
/// When there is no such process.
pub fn signal(pid: u32, name: &str) -> Result<()> {
    // The command, because the call takes code that the compiler does not check.
    let status = Command::new("kill").args([format!("-{name}"), pid.to_string()]).stderr(Stdio::null()).status()?;
    ensure!(status.success(), "process {pid} cannot be sent SIG{name}: it has ended");
    Ok(())
}

/// The memory of a process that is in RAM, with the pages that it shares, in bytes.
#[must_use]
pub fn resident_bytes(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    kibibytes(status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?)
}

/// Files and sockets that a process has open.
#[must_use]
pub fn open_files(pid: u32) -> Option<usize> {
    Some(fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count())
}

struct Stat {
    ended: bool,
    parent: u32,
    cpu_s: f64,
}

fn parse_stat(text: &str) -> Option<Stat> {
    // The name is in brackets and may itself contain brackets and spaces.
    let fields: Vec<&str> = text[text.rfind(')')? + 1..].split_ascii_whitespace().collect();
    let ticks = |index: usize| fields.get(index)?.parse::<f64>().ok();
    let ended = matches!(*fields.first()?, "Z" | "X");
    Some(Stat { ended, parent: fields.get(1)?.parse().ok()?, cpu_s: (ticks(11)? + ticks(12)?) / TICKS_PER_S })
}

fn parse_pss(text: &str) -> Option<u64> {
    kibibytes(text.lines().find_map(|line| line.strip_prefix("Pss:"))?)
}

fn kibibytes(text: &str) -> Option<u64> {
    Some(text.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn names_with_brackets_do_not_confuse() {
        let stat = parse_stat("12 (a) b (c)) S 7 12 12 0 -1 4194304 1 0 0 0 250 50 0 0 20 0 3 0 1 2 3").unwrap();
        assert_eq!((stat.parent, stat.cpu_s, stat.ended), (7, 3.0, false));
        assert!(parse_stat("12 (a").is_none());
    }

    #[test]
    fn proportional_memory_is_in_kibibytes() {
        assert_eq!(parse_pss("00-ff ---p [rollup]\nRss:  9 kB\nPss:    12 kB\nPss_Dirty: 4 kB\n"), Some(12 * 1024));
        assert_eq!(parse_pss("Rss: 9 kB\n"), None);
    }

    #[test]
    fn a_child_is_in_the_tree_of_its_parent() {
        let own = std::process::id();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let found = tree(own).contains(&child.id());
        let without = tree(child.id());
        let own_children = children(own);
        let alive = is_alive(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(found && alive && !is_alive(child.id()));
        assert_eq!(without, BTreeSet::from([child.id()]));
        assert!(own_children.contains(&child.id()) && !own_children.contains(&own));
        assert!(cost(own).pss_bytes > 0 && resident_bytes(own).unwrap() > 0 && open_files(own).unwrap() > 2);
    }
}

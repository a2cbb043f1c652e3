//! What the figures depend on besides the two servers.

use std::{fs, thread};

/// The processor's name, or its architecture where the kernel tells no name.
#[must_use]
pub fn cpu() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

/// Processors that this process may use.
#[must_use]
pub fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Memory, in GiB.
#[must_use]
pub fn memory_gib() -> u64 {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib =
        info.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse().ok());
    kib.map_or(0, |kib: u64| kib.div_ceil(1 << 20))
}

/// The kernel's version, without what its builder put behind it.
#[must_use]
pub fn kernel() -> String {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    release.trim().split('-').next().unwrap_or_default().to_owned()
}

/// The load average over a minute.
#[must_use]
pub fn load_average() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|first| first.parse().ok()).unwrap_or(0.0)
}

/// A name for this kind of machine that can be a folder's: the processor and how many cores of it.
#[must_use]
pub fn class() -> String {
    let cpu: String =
        cpu().to_lowercase().chars().map(|char| if char.is_ascii_alphanumeric() { char } else { '-' }).collect();
    let words: Vec<&str> =
        cpu.split('-').filter(|word| !word.is_empty() && !["r", "tm", "cpu", "processor"].contains(word)).collect();
    format!("{}-{}c", words.join("-"), cores())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_can_be_described() {
        assert!(!cpu().is_empty() && !kernel().is_empty() && memory_gib() > 0);
        assert!(class().chars().all(|char| char.is_ascii_alphanumeric() || char == '-'), "{}", class());
    }
}

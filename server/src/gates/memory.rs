//! The memory gate: what a model will take, from its header, against what the pod has left, from its cgroup.
//!
//! What is left under a limit is the limit less what cannot be reclaimed: page cache that nobody has mapped is as good as
//! free, mapped pages are the weights that another version computes with. The limits of all enclosing cgroups count,
//! version 1 and 2 alike; where there is none, the machine's `MemAvailable` does. Absent: the memory of GPUs, which no
//! file tells; a model too large for one fails at the Load gate.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use gantry_crds::status::GateName;
use gantry_gguf::fit::{Fit, FitInput, estimate, verdict};
use gantry_gguf::{GgmlType, Summary};

use super::report::{Refusal, quantity};
use crate::version::{RuntimeSettings, processors};

/// A cgroup v1 limit from here on means that there is none (it is the largest multiple of a page).
const NO_LIMIT_BYTES: u64 = 1 << 62;

/// What a pod may use, and what of it is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodMemory {
    /// The lowest limit, or the machine's memory.
    pub limit_bytes: u64,
    /// What can be used now.
    pub available_bytes: u64,
}

/// The memory of this process's pod.
#[must_use]
pub fn read() -> Option<PodMemory> {
    read_under(Path::new("/"))
}

/// As [`read`], with `proc` and `sys` under `root`.
fn read_under(root: &Path) -> Option<PodMemory> {
    let own = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let limited = cgroups(root, &own).into_iter().flat_map(|(mount, path)| {
        // Inside a container the path may be the host's; the container's own cgroup is then the mount itself.
        path.ancestors().map(|folder| mount.join(folder)).filter_map(|folder| read_cgroup(&folder)).collect::<Vec<_>>()
    });
    let lowest = limited.min_by_key(|memory| (memory.available_bytes, memory.limit_bytes));
    lowest.or_else(|| read_meminfo(&fs::read_to_string(root.join("proc/meminfo")).ok()?))
}

/// The places where this process's memory is accounted: the mount of the hierarchy, and the path below it.
fn cgroups(root: &Path, own: &str) -> Vec<(PathBuf, PathBuf)> {
    let mut places = Vec::new();
    for line in own.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
        let path = PathBuf::from(path.trim_start_matches('/'));
        if controllers.is_empty() {
            places.push((root.join("sys/fs/cgroup"), path));
        } else if controllers.split(',').any(|controller| controller == "memory") {
            places.push((root.join("sys/fs/cgroup/memory"), path));
        }
    }
    places
}

fn read_cgroup(folder: &Path) -> Option<PodMemory> {
    let number = |name: &str| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    let stat = || fields(&fs::read_to_string(folder.join("memory.stat")).unwrap_or_default(), ' ');
    let (limit, used, prefix) = match number("memory.max") {
        Some(limit) => (limit, number("memory.current")?, ""),
        None => (number("memory.limit_in_bytes")?, number("memory.usage_in_bytes")?, "total_"),
    };
    if limit >= NO_LIMIT_BYTES {
        return None;
    }
    let stat = stat();
    let field = |name: &str| stat.get(&format!("{prefix}{name}")).copied().unwrap_or(0);
    let mapped = stat.get(if prefix.is_empty() { "file_mapped" } else { "total_mapped_file" }).copied().unwrap_or(0);
    let cache = field("active_file").saturating_add(field("inactive_file"));
    let reclaimable = cache.saturating_sub(mapped).saturating_add(field("slab_reclaimable"));
    Some(PodMemory { limit_bytes: limit, available_bytes: limit.saturating_sub(used.saturating_sub(reclaimable)) })
}

fn read_meminfo(text: &str) -> Option<PodMemory> {
    let fields = fields(text, ':');
    let bytes = |name: &str| fields.get(name).map(|kib| kib.saturating_mul(1024));
    Some(PodMemory { limit_bytes: bytes("MemTotal")?, available_bytes: bytes("MemAvailable")? })
}

/// `name value` lines; a unit after the value is ignored.
fn fields(text: &str, separator: char) -> HashMap<String, u64> {
    let field = |line: &str| {
        let (name, value) = line.split_once(separator)?;
        Some((name.to_owned(), value.split_whitespace().next()?.parse().ok()?))
    };
    text.lines().filter_map(field).collect()
}

/// Bytes of main memory that a model is predicted to take. `gpu`: whether the pod has one.
///
/// The weights count for each worker. Those that stay mapped are shared, and those that llama.cpp repacks are not; which
/// they are depends on the processor.
#[must_use]
pub fn predict(summary: &Summary, runtime: &RuntimeSettings, gpu: bool) -> u64 {
    // Settings that cannot be shared out are refused when they are loaded.
    let shares = runtime.shares(processors(), summary.context_length).unwrap_or_default();
    if shares.len() <= 1 {
        return estimate(summary, &fit_input(runtime, summary, gpu)).host_bytes;
    }
    shares.iter().fold(0, |sum: u64, share| {
        let part = RuntimeSettings { ctx_size: share.ctx_size, parallel: share.parallel, ..runtime.clone() };
        sum.saturating_add(estimate(summary, &fit_input(&part, summary, gpu)).host_bytes)
    })
}

/// The settings as the engine will run this model with them, for the arithmetic. `gpu`: whether there is one.
#[must_use]
pub fn fit_input(runtime: &RuntimeSettings, summary: &Summary, gpu: bool) -> FitInput {
    let kv = match runtime.cache_type {
        gantry_engine::CacheType::F16 => GgmlType::F16,
        gantry_engine::CacheType::Q8_0 => GgmlType::Q8_0,
        gantry_engine::CacheType::Q4_0 => GgmlType::Q4_0,
    };
    // One batch is one step: a token of each sequence and a piece of a prompt, and a row of logits for each sequence and
    // each guess.
    let n_batch = gantry_engine::DEFAULT_PREFILL_TOKENS_PER_STEP.saturating_add(runtime.parallel);
    let n_ctx = if runtime.ctx_size == 0 { summary.context_length } else { runtime.ctx_size };
    // One whose state cannot be cut keeps nothing of ended requests.
    let on_gpu = gpu && runtime.gpu_layers != Some(0);
    let plan = runtime.engine.kv_layout.plan(n_ctx, runtime.parallel, runtime.cache_type, on_gpu);
    let pool_sequences =
        plan.pool_sequences.map_or(0, |n| if summary.recurrent_bytes_per_sequence > 0 { runtime.parallel } else { n });
    FitInput {
        ctx_size: runtime.ctx_size,
        parallel: runtime.parallel,
        pool_sequences,
        type_k: kv,
        type_v: kv,
        n_batch,
        n_ubatch: plan.n_ubatch.unwrap_or(n_batch),
        flash_attention: plan.flash_attention,
        n_outputs_max: pool_sequences.max(runtime.parallel.saturating_add(runtime.engine.prompt_lookup)),
        pooled_tokens: runtime.pooled.map_or(0, |pooled| pooled.batch_tokens.max(pooled.max_batch)),
        gpu_layers: if gpu { runtime.gpu_layers.unwrap_or(u32::MAX) } else { 0 },
    }
}

/// Holds the need against what is left.
pub(super) fn judge(required_bytes: u64, memory: PodMemory, headroom_ratio: f64) -> (Fit, Result<String, Refusal>) {
    let fit = verdict(required_bytes, memory.available_bytes, headroom_ratio);
    let value = format!("{} of {}", quantity(required_bytes), quantity(memory.available_bytes));
    let result = if fit.fits {
        Ok(value)
    } else {
        let limit = quantity(memory.limit_bytes);
        let message = format!("the model {} (the pod's limit is {limit}, spec.resources.memory)", fit.message);
        Err(Refusal::new(GateName::Memory, message).with_value(value))
    };
    (fit, result)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal:  4000 kB\nMemFree: 1 kB\nMemAvailable:  3000 kB\n");

    fn memory(limit_bytes: u64, available_bytes: u64) -> Option<PodMemory> {
        Some(PodMemory { limit_bytes, available_bytes })
    }

    #[test]
    fn version_2_counts_mapped_pages_and_forgives_the_rest_of_the_cache() {
        let root = tree(&[
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "1000\n"),
            ("sys/fs/cgroup/memory.current", "700\n"),
            (
                "sys/fs/cgroup/memory.stat",
                "anon 200\nactive_file 300\ninactive_file 150\nfile_mapped 100\nslab_reclaimable 20\n",
            ),
        ]);
        assert_eq!(read_under(root.path()), memory(1000, 1000 - (700 - 350 - 20)));
    }

    #[test]
    fn version_1_reads_its_own_names() {
        let root = tree(&[
            ("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/kubepods/pod1/c1\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "700\n"),
            (
                "sys/fs/cgroup/memory/memory.stat",
                "active_file 9\ntotal_active_file 100\ntotal_inactive_file 50\ntotal_mapped_file 30\n",
            ),
        ]);
        assert_eq!(read_under(root.path()), memory(1000, 420));
    }

    #[test]
    fn the_tightest_enclosing_limit_counts() {
        let root = tree(&[
            ("proc/self/cgroup", "0::/pod/c\n"),
            ("sys/fs/cgroup/pod/c/memory.max", "max\n"),
            ("sys/fs/cgroup/pod/c/memory.current", "10\n"),
            ("sys/fs/cgroup/pod/memory.max", "500\n"),
            ("sys/fs/cgroup/pod/memory.current", "100\n"),
            MEMINFO,
        ]);
        assert_eq!(read_under(root.path()), memory(500, 400));
    }

    #[test]
    fn without_a_limit_the_machine_counts() {
        for cgroup in ["0::/\n", "", "4:memory:/\n"] {
            let root = tree(&[
                ("proc/self/cgroup", cgroup),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712"),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", "1"),
                MEMINFO,
            ]);
            assert_eq!(read_under(root.path()), memory(4000 * 1024, 3000 * 1024), "{cgroup:?}");
        }
        assert_eq!(read_under(tree(&[]).path()), None);
    }

    #[test]
    fn this_machine_has_memory() {
        let memory = read().unwrap();
        assert!(memory.available_bytes > 0 && memory.available_bytes <= memory.limit_bytes, "{memory:?}");
    }

    #[test]
    fn a_refusal_names_the_figures() {
        let memory = PodMemory { limit_bytes: 512 << 20, available_bytes: 100 << 20 };
        let (fit, result) = judge(200 << 20, memory, 0.05);
        let refusal = result.unwrap_err();
        assert!(!fit.fits);
        assert_eq!(refusal.value.as_deref(), Some("200Mi of 100Mi"));
        assert!(refusal.message.contains("512Mi") && refusal.message.contains("5% headroom"), "{}", refusal.message);
        assert_eq!(judge(90 << 20, memory, 0.05).1.unwrap(), "90.0Mi of 100Mi");
    }
}

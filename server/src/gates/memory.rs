//! The memory gate: what a model will take, from its header, against what the pod has left, from its cgroup.
//!
//! What is left under a limit is the limit less what cannot be reclaimed: page cache that nobody has mapped is as good as
//! free, mapped pages are code, or what another version computes with on a GPU. The limits of all enclosing cgroups count,
//! version 1 and 2 alike; where there is none, the machine's `MemAvailable` does. Of that, what the front and the
//! processes that render chats may take for clients ([`crate::front`]) is not for models. The memory of GPUs, which no file tells, is held against a limit where one is
//! set ([`fit_gpu`]); without one, a model too large for it fails at the Load gate.

mod limit;
mod verdict;

use std::collections::HashMap;
use std::fmt::{self, Display};
use std::fs;
use std::path::{Path, PathBuf};

use gantry_engine::ALL_LAYERS;
use gantry_gguf::fit::{FitInput, MemoryEstimate, estimate, verdict};
use gantry_gguf::{GgmlType, Summary};

pub use self::limit::check_limit;
#[cfg(test)]
pub(super) use self::verdict::judge;
pub(super) use self::verdict::{LimitOf, judge_of};
use super::report::quantity;
use crate::front::FrontLimits;
use crate::limits::{TRIAL_GPU_BYTES, TRIAL_HEADROOM_MIN_BYTES};
use crate::processors::Processors;
use crate::version::{RuntimeSettings, Share, TrialLimit};

/// A cgroup v1 limit from here on means that there is none (it is the largest multiple of a page).
const NO_LIMIT_BYTES: u64 = 1 << 62;

/// The fewest layers that go on GPUs where their number is left open: the output and one more.
const LEAST_GPU_LAYERS: u32 = 2;

/// What a pod may use, and what of it is left.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodMemory {
    /// The lowest limit, or the machine's memory.
    pub limit_bytes: u64,
    /// What can be used now.
    pub available_bytes: u64,
}

impl PodMemory {
    /// What is left for models, where the front may take so much.
    pub fn beside_front(self, front_bytes: u64) -> Self {
        Self { available_bytes: self.available_bytes.saturating_sub(front_bytes), ..self }
    }

    /// What is left once workers that take so much have ended.
    pub fn without(self, freed_bytes: u64) -> Self {
        Self { available_bytes: self.available_bytes.saturating_add(freed_bytes).min(self.limit_bytes), ..self }
    }

    /// What is left of both, where neither may be passed.
    pub fn within(self, bound: Self) -> Self {
        Self {
            limit_bytes: self.limit_bytes.min(bound.limit_bytes),
            available_bytes: self.available_bytes.min(bound.available_bytes),
        }
    }

    /// The most that is taken in it beside the workers of a model that is run so: by the front, and by the processes that render
    /// chats for so many `versions`: for it, and for the one that it is loaded beside.
    pub fn front_bytes(&self, runtime: &RuntimeSettings, versions: u32) -> u64 {
        let limits = FrontLimits::within(Some(self.limit_bytes));
        let templates_bytes = limits.templates_bytes(runtime.worker_count().saturating_mul(versions));
        limits.most_bytes(runtime.parallel as usize, runtime.pooled.is_some()).saturating_add(templates_bytes)
    }
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
    let (limit, used, prefix) = match number("memory.max") {
        Some(limit) => (limit, number("memory.current")?, ""),
        None => (number("memory.limit_in_bytes")?, number("memory.usage_in_bytes")?, "total_"),
    };
    if limit >= NO_LIMIT_BYTES {
        return None;
    }
    let stat = fields(&fs::read_to_string(folder.join("memory.stat")).unwrap_or_default(), ' ');
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

/// Bytes of main memory that a model is predicted to take, with the one that guesses for it. `gpu`: whether the pod has one.
///
/// The weights count for each worker: each reads them into memory of its own.
#[must_use]
pub fn predict(model: &Summary, draft: Option<&Summary>, runtime: &RuntimeSettings, gpu: bool) -> u64 {
    in_all_workers(model, draft, runtime, gpu, Processors::here(), |estimate| estimate.host_bytes)
}

/// What each worker of such a model may take before the model answers: what it is predicted to, and an equal part of the
/// headroom, but no more than half of what the pod has to spare: the other half is for what is taken while it is ended.
#[must_use]
pub fn trial_limits(
    model: &Summary,
    draft: Option<&Summary>,
    runtime: &RuntimeSettings,
    gpu: bool,
    memory: Option<PodMemory>,
    headroom_ratio: f64,
) -> Vec<TrialLimit> {
    let each = in_each_worker(model, draft, runtime, gpu, Processors::here(), |estimate| estimate.host_bytes);
    let driver_bytes = if gpu && runtime.gpu_layers != Some(0) { TRIAL_GPU_BYTES } else { 0 };
    let headroom_bytes = trial_headroom(&each, memory.map(|memory| memory.available_bytes), headroom_ratio);
    let headroom_bytes = headroom_bytes.saturating_add(driver_bytes);
    each.into_iter().map(|predicted_bytes| TrialLimit { predicted_bytes, headroom_bytes }).collect()
}

fn trial_headroom(each: &[u64], available_bytes: Option<u64>, headroom_ratio: f64) -> u64 {
    let predicted = each.iter().fold(0, |sum: u64, &bytes| sum.saturating_add(bytes));
    let workers = each.len().max(1) as u64;
    // Where nobody knows what there is, a quarter more is no accident.
    let Some(available) = available_bytes else { return (predicted / 4 / workers).max(TRIAL_HEADROOM_MIN_BYTES) };
    let kept_free = available.saturating_sub(verdict(predicted, available, headroom_ratio).usable);
    let spare = available.saturating_sub(predicted);
    (kept_free / workers).max(TRIAL_HEADROOM_MIN_BYTES).min(spare / 2 / workers)
}

/// What was asked to be on GPUs takes more of their memory than it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuUnfit {
    /// Layers asked for; `None`: as many as fit, and not even [`LEAST_GPU_LAYERS`] do.
    pub asked: Option<u32>,
    /// What they take, or those do.
    pub required_bytes: u64,
    /// The most that may be taken.
    pub limit_bytes: u64,
    /// Layers that fit.
    pub fitting: u32,
}

impl Display for GpuUnfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.asked {
            None => String::from("the output and one layer on GPUs take"),
            Some(ALL_LAYERS..) => String::from("all layers on GPUs take"),
            Some(layers) => format!("{layers} layers on GPUs, the output being one of them, take"),
        };
        let (need, limit, fitting) = (quantity(self.required_bytes), quantity(self.limit_bytes), self.fitting);
        write!(
            f,
            "{what} {need} of their memory, and {limit} is allowed, enough for {fitting}: allow more, ask for fewer \
             layers, or lower the context size or the parallel sequences, which each layer keeps cells for"
        )
    }
}

impl std::error::Error for GpuUnfit {}

/// Settles how many layers go on GPUs where the memory that they may take there is limited: the number that was asked
/// for, or the most that fit. Not counted is what a driver takes for each process that uses a GPU.
///
/// # Errors
/// More was asked for than fits, or fewer than [`LEAST_GPU_LAYERS`] do.
pub fn fit_gpu(runtime: &mut RuntimeSettings, model: &Summary, draft: Option<&Summary>) -> Result<(), GpuUnfit> {
    let Some(limit_bytes) = runtime.gpu_memory_bytes else { return Ok(()) };
    let takes = |layers: u32| {
        let settings = RuntimeSettings { gpu_layers: Some(layers), ..runtime.clone() };
        in_all_workers(model, draft, &settings, true, Processors::here(), |estimate| estimate.device_bytes)
    };
    // One more than the layers, since the output is one.
    let all = model.layers.max(draft.map_or(0, |draft| draft.layers)).saturating_add(1);
    let fits = |layers: u32| takes(layers) <= limit_bytes;
    let fitting = if fits(all) { ALL_LAYERS } else { (1..all).take_while(|&layers| fits(layers)).last().unwrap_or(0) };
    let asked = runtime.gpu_layers;
    match asked {
        Some(layers) if layers <= fitting => {}
        None if fitting >= LEAST_GPU_LAYERS => runtime.gpu_layers = Some(fitting),
        _ => {
            let required_bytes = takes(asked.unwrap_or(LEAST_GPU_LAYERS));
            return Err(GpuUnfit { asked, required_bytes, limit_bytes, fitting });
        }
    }
    Ok(())
}

/// Settles how many workers a model has that runs on the CPU, where their number is left open: as many as the processors
/// are good for ([`RuntimeSettings::workers_for`]), each of which has the weights for itself, where the pod's `memory`,
/// less what the front may take beside so many, is for twice what they take: the model that replaces this one is loaded
/// beside it.
pub fn fit_workers(
    runtime: &mut RuntimeSettings,
    model: &Summary,
    draft: Option<&Summary>,
    processors: &Processors,
    memory: Option<PodMemory>,
    headroom_ratio: f64,
) {
    let workers = runtime.workers_for(processors);
    let (Some(memory), true) = (memory, workers > runtime.worker_count()) else { return };
    let several = RuntimeSettings { workers: Some(workers), ..runtime.clone() };
    let required_bytes = in_all_workers(model, draft, &several, false, processors, |estimate| estimate.host_bytes);
    let front_bytes = memory.front_bytes(&several, 2);
    let for_models_bytes = memory.limit_bytes.saturating_sub(front_bytes);
    let limit_bytes = runtime.engine.memory_limit_bytes.unwrap_or(u64::MAX).min(for_models_bytes);
    let fits = |bytes, limit| verdict(bytes, limit, headroom_ratio).fits;
    if fits(required_bytes, memory.beside_front(front_bytes).available_bytes)
        && fits(required_bytes.saturating_mul(2), limit_bytes)
    {
        *runtime = several;
    } else {
        let (takes, limit) = (quantity(required_bytes), quantity(limit_bytes));
        tracing::debug!(
            "one worker, not {workers}: they would take {takes}, and the memory for it twice is not in {limit}"
        );
    }
}

/// The sum of a part of what each worker is predicted to take, for the model and the one that guesses for it.
fn in_all_workers(
    model: &Summary,
    draft: Option<&Summary>,
    runtime: &RuntimeSettings,
    gpu: bool,
    processors: &Processors,
    part: impl Fn(&MemoryEstimate) -> u64,
) -> u64 {
    in_each_worker(model, draft, runtime, gpu, processors, part).into_iter().fold(0, u64::saturating_add)
}

fn in_each_worker(
    model: &Summary,
    draft: Option<&Summary>,
    runtime: &RuntimeSettings,
    gpu: bool,
    processors: &Processors,
    part: impl Fn(&MemoryEstimate) -> u64,
) -> Vec<u64> {
    let in_one = |own: &RuntimeSettings| {
        let input = FitInput { amx: processors.amx(), ..fit_input(own, model, gpu) };
        let guesses = draft.map_or(0, |draft| part(&estimate(draft, &draft_input(&input, model))));
        part(&estimate(model, &input)).saturating_add(guesses)
    };
    // Settings that cannot be shared out are refused when they are loaded.
    let shares = runtime.shares(processors, model.context_length).unwrap_or_default();
    if shares.len() <= 1 {
        return vec![in_one(runtime)];
    }
    let own = |share: &Share| {
        in_one(&RuntimeSettings { ctx_size: share.ctx_size, parallel: share.parallel, ..runtime.clone() })
    };
    shares.iter().map(own).collect()
}

/// What the engine runs a draft model with, beside a model that it runs with `input`: cells for as many tokens of each
/// sequence, small batches with logits of all their tokens, and nothing else of what the model has.
fn draft_input(input: &FitInput, model: &Summary) -> FitInput {
    let ctx_size = if input.ctx_size == 0 { model.context_length } else { input.ctx_size };
    let n_batch = gantry_engine::MAX_DRAFT_CATCH_UP_TOKENS.saturating_add(input.parallel);
    let pool_sequences = if ctx_size <= gantry_engine::AUTO_UNIFIED_MAX_CELLS { input.parallel } else { 0 };
    FitInput {
        ctx_size,
        pool_sequences,
        stage_cells: 0,
        n_batch,
        n_ubatch: n_batch,
        n_outputs_max: 0,
        flash_attention: true,
        pooled_tokens: 0,
        ..*input
    }
}

/// The settings as the engine will run this model with them, for the arithmetic, on a CPU without AMX. `gpu`: whether there
/// is one.
#[must_use]
pub fn fit_input(runtime: &RuntimeSettings, summary: &Summary, gpu: bool) -> FitInput {
    let kv = match runtime.cache_type {
        gantry_engine::CacheType::F16 => GgmlType::F16,
        gantry_engine::CacheType::Q8_0 => GgmlType::Q8_0,
        gantry_engine::CacheType::Q4_0 => GgmlType::Q4_0,
    };
    // One batch is one step: a token of each sequence and a piece of a prompt, and a row of logits for each sequence and
    // each guess.
    let tokens = gantry_engine::DEFAULT_PREFILL_TOKENS_PER_STEP.saturating_add(runtime.parallel);
    let n_ctx = if runtime.ctx_size == 0 { summary.context_length } else { runtime.ctx_size };
    // One whose state cannot be cut keeps nothing of ended requests.
    let on_gpu = gpu && runtime.gpu_layers != Some(0);
    let plan = runtime.engine.kv_layout.plan(n_ctx, runtime.parallel, runtime.cache_type, on_gpu);
    let pool_sequences =
        plan.pool_sequences.map_or(0, |n| if summary.recurrent_bytes_per_sequence > 0 { runtime.parallel } else { n });
    let guesses = runtime.engine.prompt_lookup.max(runtime.engine.draft.as_ref().map_or(0, |draft| draft.max_tokens));
    let n_outputs_max = pool_sequences.max(runtime.parallel.saturating_add(guesses));
    let n_outputs_max = n_outputs_max.saturating_add(gantry_engine::scored_rows(on_gpu));
    let n_batch = plan.batch_tokens.map_or(tokens, |most| most.min(tokens)).max(n_outputs_max);
    FitInput {
        ctx_size: runtime.ctx_size,
        parallel: runtime.parallel,
        pool_sequences,
        stage_cells: plan.stage_cells.filter(|_| summary.recurrent_bytes_per_sequence == 0).unwrap_or(0),
        stage_batch: gantry_engine::STAGE_BATCH_TOKENS,
        type_k: kv,
        type_v: kv,
        n_batch,
        n_ubatch: n_batch,
        flash_attention: plan.flash_attention,
        n_outputs_max,
        pooled_tokens: runtime.pooled.map_or(0, |pooled| pooled.batch_tokens.max(pooled.max_batch)),
        gpu_layers: if gpu { runtime.gpu_layers.unwrap_or(u32::MAX) } else { 0 },
        amx: false,
    }
}

#[cfg(test)]
#[path = "../../llama/tests/common/gguf.rs"]
mod gguf;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_trial_has_the_headroom_and_never_more_than_half_of_what_is_spare() {
        const MIB: u64 = 1 << 20;
        for (each, available, ratio, wanted) in [
            // The headroom; the least; half of what is spare.
            (&[1024][..], Some(10_240), 0.1, 1024),
            (&[100], Some(1000), 0.01, 64),
            (&[900], Some(1000), 0.0, 50),
            (&[1000], Some(1000), 0.0, 0),
            (&[1001], Some(1000), 0.0, 0),
            // Shared out.
            (&[1024, 1024], Some(20_480), 0.1, 1024),
            (&[400, 400], Some(1000), 0.0, 50),
            // Nobody knows what there is.
            (&[4096], None, 0.5, 1024),
            (&[40], None, 0.5, 64),
        ] {
            let each: Vec<u64> = each.iter().map(|mib| mib * MIB).collect();
            let headroom = trial_headroom(&each, available.map(|mib: u64| mib * MIB), ratio);
            assert_eq!(headroom, wanted * MIB, "{each:?} {available:?} {ratio}");
        }
    }

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

    fn demo() -> Summary {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../e2e/models/demo-v2.q8_0.gguf");
        gantry_gguf::read_header(path).unwrap().summary().clone()
    }

    #[test]
    fn as_many_layers_go_on_gpus_as_their_memory_is_for() {
        let (model, settings) = (demo(), RuntimeSettings { ctx_size: 2048, ..RuntimeSettings::default() });
        let takes = |gpu_layers| {
            let on = RuntimeSettings { gpu_layers: Some(gpu_layers), ..settings.clone() };
            estimate(&model, &fit_input(&on, &model, true))
        };
        let device = |gpu_layers| takes(gpu_layers).device_bytes;
        let fitted = |gpu_layers, gpu_memory_bytes| {
            let mut runtime = RuntimeSettings { gpu_layers, gpu_memory_bytes, ..settings.clone() };
            fit_gpu(&mut runtime, &model, None).map(|()| runtime.gpu_layers)
        };
        // The output is the first, and then the layers are alike: a quarter each of their weights and of the cells.
        assert_eq!(model.layers, 4);
        let layer = device(2) - device(1);
        assert_eq!((device(0), device(3) - device(2), device(5) - device(4)), (0, layer, layer));
        assert_eq!(layer, model.layer_bytes.div_ceil(4) + takes(5).kv_cache_bytes.div_ceil(4));
        // Where both compute, both have room for it, and the copy of the logits never leaves main memory.
        assert!(takes(4).total_bytes > takes(5).total_bytes);
        assert!(takes(5).host_bytes > u64::from(settings.parallel) * model.vocabulary * 4);
        // Without a limit nothing is settled here.
        assert_eq!(fitted(None, None), Ok(None));
        for layers in 1..5 {
            let all_that_fit = if layers < LEAST_GPU_LAYERS { None } else { Some(layers) };
            for limit in [device(layers), device(layers + 1) - 1] {
                assert_eq!(fitted(None, Some(limit)).ok(), all_that_fit.map(Some), "{layers}");
            }
            assert_eq!(fitted(Some(layers), Some(device(layers))), Ok(Some(layers)));
            let limit_bytes = device(layers) - 1;
            let unfit =
                GpuUnfit { asked: Some(layers), required_bytes: device(layers), limit_bytes, fitting: layers - 1 };
            assert_eq!(fitted(Some(layers), Some(limit_bytes)), Err(unfit));
        }
        assert_eq!(fitted(None, Some(device(5))), Ok(Some(ALL_LAYERS)));
        assert_eq!(fitted(Some(ALL_LAYERS), Some(device(5))), Ok(Some(ALL_LAYERS)));
        assert_eq!(fitted(Some(0), Some(1)), Ok(Some(0)));
        let unfit = fitted(None, Some(device(2) - 1)).unwrap_err();
        assert_eq!((unfit.asked, unfit.required_bytes, unfit.fitting), (None, device(2), 1));
        assert!(unfit.to_string().starts_with("the output and one layer on GPUs take "), "{unfit}");
    }

    #[test]
    fn every_worker_and_a_draft_model_count_against_the_memory_of_gpus() {
        let model = demo();
        let layers = |workers, draft: Option<&Summary>, gpu_memory_bytes, ctx_size| {
            let gpu_memory_bytes = Some(gpu_memory_bytes);
            let mut runtime = RuntimeSettings { ctx_size, workers, gpu_memory_bytes, ..RuntimeSettings::default() };
            fit_gpu(&mut runtime, &model, draft).map(|()| runtime.gpu_layers)
        };
        let one = RuntimeSettings { ctx_size: 2048, gpu_layers: Some(2), ..RuntimeSettings::default() };
        let two_layers = estimate(&model, &fit_input(&one, &model, true)).device_bytes;
        assert_eq!(layers(None, None, two_layers, 2048), Ok(Some(2)));
        // A draft model has the cells of the model, whatever it was trained for.
        let draft = Summary { context_length: 128, ..model.clone() };
        let input = fit_input(&one, &model, true);
        let guesses = estimate(&draft, &draft_input(&input, &model));
        assert_eq!(guesses.cells, estimate(&model, &input).cells);
        for ctx_size in [2048, 0] {
            assert_eq!(model.context_length, 2048);
            let both = two_layers + guesses.device_bytes;
            assert_eq!(layers(None, Some(&draft), both, ctx_size), Ok(Some(2)));
            assert!(layers(None, Some(&draft), both - 1, ctx_size).is_err());
        }
        // And takes main memory of its own.
        let on_cpu = RuntimeSettings { gpu_layers: Some(0), ..one.clone() };
        let input = FitInput { amx: Processors::here().amx(), ..fit_input(&on_cpu, &model, false) };
        let guesses = estimate(&draft, &draft_input(&input, &model));
        let without = predict(&model, None, &on_cpu, false);
        assert_eq!(predict(&model, Some(&draft), &on_cpu, false), without + guesses.host_bytes);
        assert!(guesses.host_bytes > draft.tensor_bytes + guesses.kv_cache_bytes);
        let here = Processors::here();
        if here.count() > 1 {
            let two = RuntimeSettings { workers: Some(2), ..one };
            let both = in_all_workers(&model, None, &two, true, here, |e| e.device_bytes);
            assert!(both > two_layers);
            assert_eq!(layers(Some(2), None, both, 2048), Ok(Some(2)));
            assert!(layers(Some(2), None, both - 1, 2048).is_err());
        }
    }

    #[test]
    fn there_are_as_many_workers_as_processors_are_good_for_where_memory_holds_them_twice() {
        let (model, machine) = (demo(), Processors::of_groups(8, vec![vec![0, 1, 2, 3], vec![4, 5, 6, 7]]));
        let open = RuntimeSettings { ctx_size: 2048, ..RuntimeSettings::default() };
        let settled = |runtime: &RuntimeSettings, memory| {
            let mut runtime = runtime.clone();
            fit_workers(&mut runtime, &model, None, &machine, memory, 0.0);
            runtime.workers
        };
        let two = RuntimeSettings { workers: Some(2), ..open.clone() };
        let takes = in_all_workers(&model, None, &two, false, &machine, |estimate| estimate.host_bytes);
        assert!(takes > 2 * model.tensor_bytes);
        // What the front takes grows with the limit, which has to be for it, too; and it takes less beside one worker.
        let front_within = |limit_bytes, runtime| PodMemory { limit_bytes, available_bytes: 0 }.front_bytes(runtime, 2);
        let front = (0..64).fold(0, |front, _| front_within(front + 2 * takes, &two));
        assert!(front == front_within(front + 2 * takes, &two) && front_within(front + 2 * takes, &open) < front);
        let beside_front = |limit_bytes: u64, available_bytes| memory(front + limit_bytes, front + available_bytes);
        assert_eq!(settled(&open, beside_front(2 * takes, takes)), Some(2));
        assert_eq!(settled(&open, beside_front(2 * takes - (1 << 20), takes)), None);
        assert_eq!(settled(&open, beside_front(2 * takes, takes - 1)), None);
        assert_eq!(settled(&open, None), None);
        let memory_limit_bytes = Some(2 * takes - 1);
        let engine = crate::version::EngineTuning { memory_limit_bytes, ..Default::default() };
        let limited = RuntimeSettings { engine, ..open.clone() };
        assert_eq!(settled(&limited, memory(1 << 40, 1 << 40)), None);
        let one = RuntimeSettings { workers: Some(1), ..open };
        assert_eq!(settled(&one, beside_front(2 * takes, takes)), Some(1));
    }

    /// As the file says it, which has no cells and is trained for 64 tokens.
    #[test]
    fn an_encoder_fits_onto_gpus_and_is_shared_out_as_any_other_model() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), gguf::bert(1).bytes()).unwrap();
        let model = gantry_gguf::read_header(file.path()).unwrap().summary().clone();
        assert!(model.encoder);
        let pooled = Some(gantry_engine::PooledConfig::default());
        let settings = RuntimeSettings { pooled, ..RuntimeSettings::default() };
        let fitted = |gpu_memory_bytes| {
            let mut runtime = RuntimeSettings { gpu_memory_bytes: Some(gpu_memory_bytes), ..settings.clone() };
            fit_gpu(&mut runtime, &model, None).map(|()| runtime.gpu_layers)
        };
        assert_eq!(fitted(1 << 30), Ok(Some(ALL_LAYERS)));
        assert!(fitted(1).is_err_and(|unfit| unfit.required_bytes > 1 && unfit.fitting == 0));
        let machine = Processors::of_groups(8, vec![vec![0, 1, 2, 3], vec![4, 5, 6, 7]]);
        let mut runtime = settings.clone();
        fit_workers(&mut runtime, &model, None, &machine, memory(1 << 34, 1 << 34), 0.05);
        assert_eq!(runtime.workers, Some(2));
        let each = in_each_worker(&model, None, &runtime, false, &machine, |estimate| estimate.host_bytes);
        assert_eq!(each.len(), 2);
        assert!(each.iter().all(|bytes| *bytes > model.tensor_bytes), "each has the weights for itself: {each:?}");
        let shares = runtime.shares(&machine, model.context_length).unwrap();
        assert!(shares.iter().all(|share| share.group.is_some()), "{shares:?}");
    }

    #[test]
    fn this_machine_has_memory() {
        let memory = read().unwrap();
        assert!(memory.available_bytes > 0 && memory.available_bytes <= memory.limit_bytes, "{memory:?}");
    }

    /// As the example and the tests on a cluster have it, with one version that answers and the next one beside it.
    #[test]
    fn two_demos_fit_into_their_pods_beside_the_front() {
        let runtime = RuntimeSettings { ctx_size: 8192, ..RuntimeSettings::default() };
        let required_bytes = predict(&demo(), None, &runtime, false);
        for limit_bytes in [768 << 20, 1 << 30] {
            let memory = PodMemory { limit_bytes, available_bytes: limit_bytes };
            let front_bytes = memory.front_bytes(&runtime, 2);
            // The one that answers keeps prompts in an eighth of the memory at the most.
            let left = memory.beside_front(required_bytes + limit_bytes / 8 + (32 << 20));
            assert!(judge(required_bytes, left, |_| front_bytes, 0.1).0.fits, "{required_bytes} and {front_bytes}");
        }
    }
}

//! What to load and how: a version's settings, and how its totals are shared out among its workers.
//!
//! `ctx_size`, `parallel`, `threads` and the queue are the version's, whatever the number of its workers: two workers of
//! four sequences hold as much as one of eight. Absent: where the settings come from ([`crate::config`],
//! [`crate::agent`]).

use std::path::PathBuf;

use gantry_engine::{
    CacheType, DiskCacheConfig, EngineConfig, GpuSplit, KvLayout, ParamError, PooledConfig, PrefixCacheConfig,
    SpeculationConfig,
};
use serde::{Deserialize, Serialize};

use super::DispatchStrategy;
use crate::fetch::FileStamp;
use crate::limits::{MAX_QUEUE, MAX_WORKERS};
use crate::processors::Processors;

/// What to load, under which name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionSpec {
    /// The version's name, as responses carry it: a `ModelVersion`'s name in a pod.
    pub name: String,
    /// `sha256:<hex>` of the file, or empty where nobody computed it.
    pub digest: String,
    /// The GGUF file.
    pub model_path: PathBuf,
    /// The model name that clients use.
    pub served_name: String,
    /// How to run it.
    pub runtime: RuntimeSettings,
}

/// How a model is run; the names are llama-server's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuntimeSettings {
    /// KV cells in total, shared out equally among the sequences; 0: as the model was trained.
    pub ctx_size: u32,
    /// Sequences that generate at once.
    pub parallel: u32,
    /// Threads that compute, at most as many as there are processors; `None`: one less than there are.
    pub threads: Option<u32>,
    /// The element type of the KV cache.
    pub cache_type: CacheType,
    /// Layers on GPUs; `None`: all that can be, where there is a GPU; 0: none. Any other number asks for a GPU.
    pub gpu_layers: Option<u32>,
    /// How they are spread.
    pub gpu_split: GpuSplit,
    /// The most memory that all workers take of GPUs, all together; `None`: what there is. How many layers that is good
    /// for is settled before they are loaded ([`crate::gates::memory::fit_gpu`]).
    pub gpu_memory_bytes: Option<u64>,
    /// Processes that serve the model side by side, at most one for each processor and each sequence. `None`: 1, unless
    /// more are settled before they are loaded ([`crate::gates::memory::fit_workers`]).
    pub workers: Option<u32>,
    /// How requests wait and are spread.
    pub scheduling: Scheduling,
    /// How the engine works, where it is not left to it.
    pub engine: EngineTuning,
    /// Embed or score texts, too; `None`: no.
    pub pooled: Option<PooledConfig>,
    /// Whether the beginnings of the model's vectors are vectors, too.
    pub cuts_vectors: bool,
}

/// What the engine decides unless it is told.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineTuning {
    /// How the KV cells are shared out.
    pub kv_layout: KvLayout,
    /// Main memory for prefixes that left the KV cache; `None`: as the engine has it.
    pub cache_ram_bytes: Option<u64>,
    /// A directory for prefixes that outlive the workers, which share it; `None`: none.
    pub cache_disk: Option<DiskCacheConfig>,
    /// Prefixes unused for so long are dropped; `None`: never because of age.
    pub cache_ttl_ms: Option<u64>,
    /// Memory that the workers may use, all together; `None`: what their pod or machine has.
    pub memory_limit_bytes: Option<u64>,
    /// Whether cells of the KV cache take memory when they are first used, and not as the model is loaded: for one that shares
    /// what there is with no other.
    pub lazy_cells: bool,
    /// The most tokens guessed at a time from repetitions; 0: none.
    pub prompt_lookup: u32,
    /// What guesses where nothing repeats itself.
    pub draft: Option<DraftSettings>,
    /// How long a step may take while requests generate; `None`: a few times as long as their tokens take.
    pub step_ms_target: Option<u32>,
    /// A chat template in the place of the one in the model's file; `None`: the file's.
    pub chat_template: Option<String>,
    /// Whether what stands after a gap within a text comes before what stands before it.
    pub infill_suffix_first: bool,
    /// Files that each worker must find as they were when they were checked: others may change them.
    pub stamps: Vec<FileStamp>,
}

/// A draft model: it guesses tokens that the model checks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DraftSettings {
    /// The GGUF file; its tokens must be the model's.
    pub model_path: PathBuf,
    /// The most tokens guessed at a time.
    pub max_tokens: u32,
}

/// How requests wait and are spread over the workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scheduling {
    /// Requests that may wait while all sequences are busy.
    pub max_queue: usize,
    /// With more requests waiting than this, further ones are refused until no more than `low_watermark` wait. `None`:
    /// as `max_queue` where there is a low one, which means that a full queue refuses until then; else there is none.
    pub high_watermark: Option<usize>,
    /// See `high_watermark`; `None`: three quarters of it.
    pub low_watermark: Option<usize>,
    /// The most milliseconds that a request which does not say so itself waits for its first token; `None`: any.
    pub queue_timeout_ms: Option<u64>,
    /// Which worker gets a request.
    pub dispatch: DispatchStrategy,
}

impl Default for RuntimeSettings {
    fn default() -> Self {
        Self {
            ctx_size: 0,
            parallel: gantry_engine::DEFAULT_PARALLEL,
            threads: None,
            cache_type: CacheType::default(),
            gpu_layers: None,
            gpu_split: GpuSplit::default(),
            gpu_memory_bytes: None,
            workers: None,
            scheduling: Scheduling::default(),
            engine: EngineTuning::default(),
            pooled: None,
            cuts_vectors: false,
        }
    }
}

impl Default for Scheduling {
    fn default() -> Self {
        Self {
            max_queue: gantry_engine::DEFAULT_MAX_QUEUE,
            high_watermark: None,
            low_watermark: None,
            queue_timeout_ms: None,
            dispatch: DispatchStrategy::default(),
        }
    }
}

/// One worker's part of a version's totals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Its KV cells; 0: as the model was trained.
    pub ctx_size: u32,
    /// Its sequences.
    pub parallel: u32,
    /// Its threads; `None`: one less than the processors there are.
    pub threads: Option<u32>,
    /// The group of processors that it keeps to ([`Processors::groups`]); `None`: any.
    pub group: Option<usize>,
}

impl RuntimeSettings {
    /// Workers of a version with these settings.
    #[must_use]
    pub fn worker_count(&self) -> u32 {
        // More than one would not be faster by itself: see docs/decisions/0008.
        self.workers.unwrap_or(1)
    }

    /// Workers that the processors are good for where nobody says how many: one, but one for each group of processors
    /// where the threads are more than one group has, so that none computes with memory that is far from it.
    #[must_use]
    pub fn workers_for(&self, processors: &Processors) -> u32 {
        // One pool that was asked for is one: a request may take all of it.
        if self.workers.is_some() || self.engine.kv_layout == KvLayout::Unified {
            return self.worker_count();
        }
        let groups = processors.groups();
        let threads = self.threads_of(1, processors.count());
        if groups.first().is_none_or(|group| group.len() >= threads as usize) {
            return 1;
        }
        let most = [MAX_WORKERS, self.parallel, threads].into_iter().min().unwrap_or(1);
        (2..=most).take_while(|&n| n as usize <= groups.len()).find(|&n| fit_into(groups, threads, n)).unwrap_or(1)
    }

    /// Whether layers are to go on GPUs; `None`: where there is one.
    #[must_use]
    pub fn asks_for_gpus(&self) -> Option<bool> {
        let devices = &self.gpu_split.devices;
        if self.gpu_layers == Some(0) || *devices == ["none"] {
            return Some(false);
        }
        (self.gpu_layers.is_some() || self.gpu_memory_bytes.is_some() || !devices.is_empty()).then_some(true)
    }

    /// Threads of so many workers together.
    pub(super) fn threads_of(&self, workers: u32, processors: u32) -> u32 {
        self.threads.unwrap_or(processors.saturating_sub(1).max(workers)).min(processors)
    }

    /// Shares the totals out among the workers, on these processors. `trained_ctx` are the tokens that the model was
    /// trained for, 0 where unknown.
    ///
    /// # Errors
    /// Names a setting out of its range, or two that do not go together.
    pub fn shares(&self, processors: &Processors, trained_ctx: u32) -> Result<Vec<Share>, ParamError> {
        self.check(processors.count())?;
        let workers = self.worker_count();
        if workers == 1 {
            let threads = self.threads.map(|threads| threads.min(processors.count()));
            return Ok(vec![Share { ctx_size: self.ctx_size, parallel: self.parallel, threads, group: None }]);
        }
        let cells = if self.ctx_size == 0 { trained_ctx } else { self.ctx_size };
        let cells_per_sequence = if cells == 0 { 0 } else { (cells / self.parallel).max(1) };
        let threads = self.threads_of(workers, processors.count());
        let groups = processors.groups();
        let keep_to_groups = groups.len() > 1 && fit_into(groups, threads, workers);
        let share = |worker: u32| {
            let parallel = part(self.parallel, workers, worker);
            // The cells of whole sequences, so that each holds as much as it would in one worker of them all.
            let ctx_size = cells_per_sequence.saturating_mul(parallel);
            let group = keep_to_groups.then_some(worker as usize % groups.len());
            Share { ctx_size, parallel, threads: Some(part(threads, workers, worker)), group }
        };
        Ok((0..workers).map(share).collect())
    }

    fn check(&self, processors: u32) -> Result<(), ParamError> {
        let max_parallel = gantry_engine::MAX_PARALLEL;
        if self.parallel == 0 || self.parallel > max_parallel {
            return refuse("parallel", format!("must be 1 to {max_parallel}, not {}", self.parallel));
        }
        if self.threads == Some(0) {
            return refuse("threads", "must be at least 1".to_owned());
        }
        let workers = self.worker_count();
        let most = [MAX_WORKERS, self.parallel, processors, self.threads.unwrap_or(u32::MAX)].into_iter().min();
        if workers == 0 || Some(workers) > most {
            let message = format!(
                "must be 1 to {MAX_WORKERS}, and at most one for each of {} sequences (parallel) and {} threads, not \
                 {workers}",
                self.parallel,
                self.threads.unwrap_or(processors).min(processors)
            );
            return refuse("workers", message);
        }
        if workers > 1 && self.engine.kv_layout == KvLayout::Unified && !self.parallel.is_multiple_of(workers) {
            let message = format!(
                "{} is not the same number for each of {workers} workers: in one pool of cells (kv_layout) how long a \
                 request may be would depend on who gets it",
                self.parallel
            );
            return refuse("parallel", message);
        }
        self.scheduling.check()
    }
}

impl Scheduling {
    /// The most requests that run and wait at a time, where so many run.
    #[must_use]
    pub fn capacity(&self, parallel: u32) -> usize {
        // The one that crosses the high watermark is let in.
        let waiting = self.watermarks().map_or(self.max_queue, |(high, _)| self.max_queue.min(high + 1));
        (parallel as usize).saturating_add(waiting)
    }

    /// The two watermarks in force; `None`: none are.
    pub(super) fn watermarks(&self) -> Option<(usize, usize)> {
        let high = match (self.high_watermark, self.low_watermark) {
            (None, None) => return None,
            (high, _) => high.unwrap_or(self.max_queue),
        };
        // More than `max_queue` never wait: a mark up there is crossed by the one that fills the queue.
        let three_quarters = high - high.div_ceil(4);
        Some((high.min(self.max_queue.saturating_sub(1)), self.low_watermark.unwrap_or(three_quarters)))
    }

    /// Whether the values go together.
    ///
    /// # Errors
    /// Names the first that does not.
    pub fn check(&self) -> Result<(), ParamError> {
        if self.max_queue > MAX_QUEUE {
            return refuse("max_queue", format!("must be at most {MAX_QUEUE}, not {}", self.max_queue));
        }
        let high = self.high_watermark.unwrap_or(self.max_queue);
        if high > self.max_queue {
            return refuse("high_watermark", format!("must be at most the queue of {}, not {high}", self.max_queue));
        }
        match self.low_watermark {
            Some(low) if low >= high => {
                refuse("low_watermark", format!("must be below the high watermark of {high}, not {low}"))
            }
            _ => Ok(()),
        }
    }
}

/// A worker's part of what so many share.
fn part(whole: u32, workers: u32, worker: u32) -> u32 {
    whole / workers + u32::from(worker < whole % workers)
}

/// Whether each group has a processor for each thread of those workers that keep to it, who take turns.
fn fit_into(groups: &[Vec<u32>], threads: u32, workers: u32) -> bool {
    let taken = |group: usize| -> usize {
        let own = (0..workers).filter(|&worker| worker as usize % groups.len() == group);
        own.map(|worker| part(threads, workers, worker) as usize).sum()
    };
    groups.iter().enumerate().all(|(group, processors)| taken(group) <= processors.len())
}

fn refuse<T>(param: &str, message: String) -> Result<T, ParamError> {
    Err(ParamError { param: param.to_owned(), message })
}

impl VersionSpec {
    /// What one of `workers` workers is told to load.
    pub(super) fn engine_config(&self, share: &Share, workers: usize) -> EngineConfig {
        let RuntimeSettings { cache_type, gpu_layers, gpu_split, engine, pooled, .. } = &self.runtime;
        let defaults = EngineConfig::new(&self.model_path);
        let ram_bytes = engine.cache_ram_bytes.unwrap_or(defaults.prefix_cache.ram_bytes) / workers.max(1) as u64;
        let speculation = SpeculationConfig {
            prompt_lookup: engine.prompt_lookup > 0,
            max_tokens: engine.prompt_lookup.max(1),
            draft_model: engine.draft.as_ref().map(|draft| draft.model_path.clone()),
            draft_tokens: engine.draft.as_ref().map_or(1, |draft| draft.max_tokens),
        };
        EngineConfig {
            ctx_size: share.ctx_size,
            parallel: share.parallel,
            threads: share.threads,
            cache_type: *cache_type,
            gpu_layers: *gpu_layers,
            gpu_split: gpu_split.clone(),
            // Admission is the front's; the engine's own limit must never refuse what the front let in, whatever its
            // limits become, and with the other workers gone all of it comes to one.
            max_queue: MAX_QUEUE + self.runtime.parallel as usize,
            kv_layout: engine.kv_layout,
            memory_limit_bytes: engine.memory_limit_bytes.map(|bytes| bytes / workers.max(1) as u64),
            lazy_cells: engine.lazy_cells,
            step_ms_target: engine.step_ms_target,
            chat_template: engine.chat_template.clone(),
            infill_suffix_first: engine.infill_suffix_first,
            speculation,
            model_digest: Some(self.digest.clone()).filter(|digest| !digest.is_empty()),
            prefix_cache: PrefixCacheConfig {
                ram_bytes,
                ttl_ms: engine.cache_ttl_ms,
                disk: engine.cache_disk.clone(),
                ..defaults.prefix_cache.clone()
            },
            pooled: *pooled,
            ..defaults
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn settings(workers: u32, parallel: u32, threads: Option<u32>, ctx_size: u32) -> RuntimeSettings {
        RuntimeSettings { workers: Some(workers), parallel, threads, ctx_size, ..RuntimeSettings::default() }
    }

    #[test]
    fn two_workers_of_four_hold_as_much_as_one_of_eight() {
        let share = |ctx_size, parallel, threads| Share { ctx_size, parallel, threads, group: None };
        let shares =
            |settings: RuntimeSettings, processors| settings.shares(&Processors::alike(processors), 4096).unwrap();
        assert_eq!(shares(settings(1, 8, None, 0), 4), [share(0, 8, None)]);
        assert_eq!(shares(settings(1, 8, Some(9), 8192), 4), [share(8192, 8, Some(4))]);
        assert_eq!(shares(settings(2, 8, None, 8192), 2), [share(4096, 4, Some(1)); 2]);
        assert_eq!(shares(settings(2, 8, None, 0), 8), [share(2048, 4, Some(4)), share(2048, 4, Some(3))]);
        assert_eq!(shares(settings(2, 3, Some(2), 3000), 8), [share(2000, 2, Some(1)), share(1000, 1, Some(1))]);
        assert_eq!(RuntimeSettings::default().worker_count(), 1);
    }

    /// A machine with groups of so many processors, of which `count` may compute at once.
    fn machine(sizes: &[u32], count: u32) -> Processors {
        let mut next = 0;
        let mut of_size = |size: &u32| {
            next += size;
            (next - size..next).collect()
        };
        Processors::of_groups(count, sizes.iter().map(&mut of_size).collect())
    }

    #[test]
    fn workers_follow_from_groups_of_processors_where_nobody_says_how_many() {
        let workers = |sizes: &[u32], count, settings: RuntimeSettings| settings.workers_for(&machine(sizes, count));
        let open = RuntimeSettings::default;
        // One group, whatever its size; two; as many as the threads need.
        assert_eq!(workers(&[64], 64, open()), 1);
        assert_eq!(workers(&[32, 32], 64, open()), 2);
        assert_eq!(workers(&[16, 16, 16, 16], 64, open()), 4);
        for (threads, wanted) in [(1, 1), (32, 1), (33, 2), (64, 2), (500, 2)] {
            assert_eq!(workers(&[32, 32], 64, RuntimeSettings { threads: Some(threads), ..open() }), wanted);
        }
        assert_eq!(workers(&[16, 16, 16, 16], 64, RuntimeSettings { threads: Some(40), ..open() }), 3);
        // A quota that one group is enough for.
        assert_eq!(workers(&[32, 32], 33, open()), 1);
        assert_eq!(workers(&[32, 32], 34, open()), 2);
        // Groups that equal parts of the threads do not fit into.
        assert_eq!(workers(&[10, 2], 12, open()), 1);
        // Who has too few sequences, asks for one pool, or says how many.
        assert_eq!(workers(&[32, 32], 64, RuntimeSettings { parallel: 1, ..open() }), 1);
        let pool = EngineTuning { kv_layout: KvLayout::Unified, ..EngineTuning::default() };
        assert_eq!(workers(&[32, 32], 64, RuntimeSettings { engine: pool, ..open() }), 1);
        assert_eq!(workers(&[32, 32], 64, RuntimeSettings { workers: Some(1), ..open() }), 1);
        assert_eq!(workers(&[64], 64, RuntimeSettings { workers: Some(3), ..open() }), 3);
    }

    #[test]
    fn several_workers_keep_to_a_group_each_where_their_threads_fit() {
        let groups = |sizes: &[u32], workers, threads| {
            let shares = settings(workers, 8, threads, 8192).shares(&machine(sizes, sizes.iter().sum()), 0).unwrap();
            shares.iter().map(|share| (share.group, share.threads)).collect::<Vec<_>>()
        };
        assert_eq!(groups(&[4, 4], 2, None), [(Some(0), Some(4)), (Some(1), Some(3))]);
        assert_eq!(groups(&[4, 4], 3, Some(3)), [(Some(0), Some(1)), (Some(1), Some(1)), (Some(0), Some(1))]);
        assert_eq!(groups(&[6, 2], 2, None), [(None, Some(4)), (None, Some(3))]);
        assert_eq!(groups(&[4, 4], 1, None), [(None, None)]);
        assert_eq!(groups(&[8], 2, None), [(None, Some(4)), (None, Some(3))]);
    }

    #[test]
    fn what_cannot_be_shared_out_is_refused() {
        for (settings, param) in [
            (settings(0, 8, None, 0), "workers"),
            (settings(3, 8, None, 0), "workers"),
            (settings(2, 1, None, 0), "workers"),
            (settings(2, 8, Some(1), 0), "workers"),
            (settings(1, 0, None, 0), "parallel"),
            (settings(1, 8, Some(0), 0), "threads"),
        ] {
            assert_eq!(settings.shares(&Processors::alike(2), 0).unwrap_err().param, param, "{settings:?}");
        }
        let scheduling = |max_queue, high_watermark, low_watermark| Scheduling {
            max_queue,
            high_watermark,
            low_watermark,
            ..Scheduling::default()
        };
        for (scheduling, wanted) in [
            (scheduling(10, None, None), Ok(None)),
            (scheduling(10, Some(8), None), Ok(Some((8, 6)))),
            (scheduling(10, Some(7), None), Ok(Some((7, 5)))),
            (scheduling(10, Some(3), None), Ok(Some((3, 2)))),
            (scheduling(10, Some(1), None), Ok(Some((1, 0)))),
            (scheduling(10, Some(0), None), Ok(Some((0, 0)))),
            (scheduling(10, None, Some(3)), Ok(Some((9, 3)))),
            (scheduling(10, Some(11), None), Err("high_watermark")),
            (scheduling(10, Some(5), Some(5)), Err("low_watermark")),
            (scheduling(10, None, Some(12)), Err("low_watermark")),
            (scheduling(MAX_QUEUE + 1, None, None), Err("max_queue")),
        ] {
            let checked = scheduling.check().map(|()| scheduling.watermarks());
            assert_eq!(checked.as_ref().map_err(|error| error.param.as_str()), wanted.as_ref().map_err(|p| *p));
        }
    }

    proptest! {
        #[test]
        fn shares_add_up_and_never_take_more_threads_than_processors(
            workers in 1_u32..9, parallel in 1_u32..=256, threads in proptest::option::of(1_u32..20),
            ctx_size in 0_u32..100_000, sizes in proptest::collection::vec(1_u32..17, 1..5), quota in 1_u32..33,
        ) {
            let processors = sizes.iter().sum::<u32>().min(quota);
            let machine = machine(&sizes, processors);
            let open = RuntimeSettings { workers: None, ..settings(1, parallel, threads, ctx_size) };
            let by_itself = RuntimeSettings { workers: Some(open.workers_for(&machine)), ..open };
            let by_itself = by_itself.shares(&machine, 4096);
            prop_assert!(by_itself.is_ok(), "{by_itself:?}");
            let settings = settings(workers, parallel, threads, ctx_size);
            let Ok(shares) = settings.shares(&machine, 4096) else {
                prop_assert!(workers > parallel || workers > processors || threads.is_some_and(|t| workers > t));
                return Ok(());
            };
            prop_assert_eq!(shares.len(), workers as usize);
            prop_assert_eq!(shares.iter().map(|share| share.parallel).sum::<u32>(), parallel);
            let sum: u32 = shares.iter().map(|share| share.threads.unwrap_or(1)).sum();
            prop_assert!(sum <= processors.max(1));
            for (group, own) in machine.groups().iter().enumerate() {
                let kept = shares.iter().filter(|share| share.group == Some(group));
                prop_assert!(kept.map(|share| share.threads.unwrap_or(1)).sum::<u32>() as usize <= own.len());
            }
            if workers > 1 {
                let total = if ctx_size == 0 { 4096 } else { ctx_size };
                prop_assert!(shares.iter().map(|share| share.ctx_size).sum::<u32>() <= total.max(parallel));
                prop_assert!(shares.iter().all(|share| share.ctx_size / share.parallel == (total / parallel).max(1)));
            }
            prop_assert!(shares.iter().all(|share| share.parallel > 0 && share.threads != Some(0)));
        }
    }
}

//! What a version must pass before it may answer, in this order: Fetch, Digest, Format, Memory, Template, Load, Prompts, Drift,
//! Performance, Shadow.
//!
//! [`Gates::run`] takes one version through them and writes each step into its [`Report`]. Where the source serves parts
//! of files, the header is read and judged (Format, Memory) before the download, so that a model that cannot be served
//! costs no transfer. A draft model is brought first: it is small, and it is the memory of both that is judged. A refusal
//! says the gate, the figure and what to do; what may pass (a source that is down, a ConfigMap that is not there yet) is
//! waited for, and the caller ends the wait. For files and prompts that are at hand, outside a cluster, [`Loader::load`] and
//! [`judge_answers`] are the gates from Format on ([`crate::check`]). Nothing here touches the version that serves. Absent: which version is to be
//! prepared and what follows from the outcome ([`crate::rollout`]).

mod bring;
pub mod context;
pub mod drift;
pub mod file;
pub mod limits;
pub mod memory;
pub mod objects;
pub mod performance;
pub mod prompts;
pub mod reference;
mod refusals;
pub mod report;
mod runtime;
pub mod settings;
pub mod shadow;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use gantry_crds::inference_service::{PromptsGate, RuntimeSpec};
use gantry_crds::status::{CandidatePhase, GateName, NamedVersion, WaitReason};
use gantry_engine::{DiskCacheConfig, TemplateReport};
use gantry_gguf::{Header, Summary};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::fetch::{CachedModel, Digest, Fetcher, FileStamp};
use crate::processors::Processors;
use crate::version::{DraftSettings, RuntimeSettings, Scheduling, Trial, Version, VersionSpec, WorkerConfig};
use file::FileError;
use limits::{OBJECT_RETRY_MAX, OBJECT_RETRY_MIN};
use memory::{GpuUnfit, LimitOf, PodMemory};
use objects::{NotThere, Objects};
use refusals::{format_refusal, load_refusal};
use report::quantity;
pub use report::{Board, Refusal, Report};
use runtime::pooled;
pub use runtime::runtime_settings;
use settings::PoolingUnfit;

/// What the gates work with.
pub struct Gates {
    /// Brings files.
    pub fetcher: Fetcher,
    /// Loads them.
    pub loader: Loader,
    /// Reads ConfigMaps and Secrets.
    pub objects: Objects,
    /// Where claims with models are mounted, each in a folder of its name.
    pub volumes: PathBuf,
}

/// Takes files that are there through Format, Memory, Template and Load.
pub struct Loader {
    workers: WorkerConfig,
    /// Held from the memory's verdict until the workers have taken it: two versions must not be promised the same.
    loading: tokio::sync::Mutex<()>,
}

/// The files of a version, and where its prompts are kept on disk, if they are.
pub struct Files {
    /// The model's file, or the first of its files.
    path: PathBuf,
    digest: Option<Digest>,
    /// Where it is in the cache, or on a volume.
    kept: Option<CachedModel>,
    /// What it was when it was hashed, where it is neither.
    stamp: Option<FileStamp>,
    draft: Option<DraftModel>,
    cache_disk: Option<DiskCacheConfig>,
}

impl Files {
    /// A model alone, whose prompts are kept in memory.
    #[must_use]
    pub fn of(model: CachedModel) -> Self {
        let (path, digest) = (model.path().to_owned(), Some(model.digest()));
        Self { path, digest, kept: Some(model), stamp: None, draft: None, cache_disk: None }
    }

    /// As [`Files::of`], of a file of this machine that whoever names it vouches for. With what it was when it was hashed it is not
    /// loaded as anything else.
    #[must_use]
    pub fn at_hand(path: PathBuf, stamp: Option<FileStamp>) -> Self {
        let digest = stamp.as_ref().and_then(FileStamp::digest);
        Self { path, digest, kept: None, stamp, draft: None, cache_disk: None }
    }
}

/// A version to be taken through the gates.
#[derive(Clone)]
pub struct Job {
    /// The version.
    pub version: NamedVersion,
    /// It was loaded before; then only what it answers is judged.
    pub loaded: Option<Loaded>,
    /// The golden prompts; `None` when they are not asked for.
    pub prompts: Option<PromptsGate>,
    /// The comparison with the active version; `None` when it is not asked for.
    pub drift: Option<drift::Job>,
    /// How its speed is compared with the active version's; `None` when that is not asked for.
    pub performance: Option<performance::Job>,
    /// The comparison with the active version on live requests; `None` when it is not asked for.
    pub shadow: Option<shadow::Job>,
    /// Share of the memory that stays free.
    pub headroom_ratio: f64,
    /// What of memory it is judged for, where that is not the pod that this is.
    pub memory_bound: Option<MemoryBound>,
    /// How its requests wait and are spread.
    pub scheduling: Scheduling,
    /// Whether the pod has a GPU.
    pub gpu: bool,
    /// Whether it is loaded; else it passes those gates alone that need nothing of it loaded, against the memory that there is once
    /// all of `beside` is unloaded.
    pub loads: bool,
    /// What is loaded already.
    pub beside: Vec<Arc<Version>>,
    /// How long a source or an object that is away is waited for before that is a refusal; `None` for as long as the
    /// caller waits.
    pub patience: Option<Duration>,
}

impl Job {
    /// The version that it is compared with, and the field that asks for that.
    fn compared_with(&self) -> Option<(&reference::Reference, &'static str)> {
        let drift = self.drift.as_ref().map(|job| (&job.reference, drift::FIELD));
        let performance = || self.performance.as_ref().map(|job| (&job.reference, performance::FIELD));
        drift.or_else(performance).or_else(|| self.shadow.as_ref().map(|job| (&job.reference, shadow::FIELD)))
    }
}

/// What memory a version is checked for that no pod runs.
#[derive(Clone, Copy, Debug)]
pub struct MemoryBound {
    /// What the pod may use and what of it is left; `None`: as this machine has it.
    pub pod: Option<PodMemory>,
    /// What a version takes that is to be loaded beside it; 0: none is.
    pub next_bytes: u64,
}

/// A version that passed, with what keeps it alive.
#[derive(Clone)]
pub struct Loaded {
    /// The version.
    pub version: Arc<Version>,
    /// Its files, which stay in the cache meanwhile.
    pub files: Vec<CachedModel>,
    /// Memory predicted for it.
    pub predicted_bytes: u64,
}

impl std::fmt::Debug for Loaded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loaded").field("version", &self.version.spec().name).finish_non_exhaustive()
    }
}

/// How it ended.
#[derive(Debug)]
pub enum Outcome {
    /// Every gate let it through.
    Passed(Loaded),
    /// Those did that need nothing of it loaded, and it was not to be.
    Checked,
    /// One did not.
    Refused(Refusal),
    /// It was not wanted any more.
    Cancelled,
}

/// The fields of a spec that name files.
const MODEL_SOURCE: &str = "spec.model.source";
const DRAFT_SOURCE: &str = "spec.runtime.speculative.draft";

/// A draft model that is there.
struct DraftModel {
    file: CachedModel,
    summary: Summary,
    max_tokens: u32,
    /// How it was brought.
    fetched: String,
}

enum Stop {
    Refused(Refusal),
    Cancelled,
}

impl Stop {
    /// Says that it is the draft model's file that stops the version.
    fn of_draft(self) -> Self {
        match self {
            Self::Refused(refusal) => {
                Self::Refused(Refusal { message: format!("the draft model: {}", refusal.message), ..refusal })
            }
            Self::Cancelled => Self::Cancelled,
        }
    }
}

impl From<Refusal> for Stop {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl Gates {
    /// Takes a version through the gates. A refusal is for the caller to report: it may mean to wait.
    pub async fn run(&self, job: Job, report: &Report, cancel: &CancellationToken) -> Outcome {
        let passed = async {
            tokio::select! {
                passed = self.pass(&job, report, cancel) => passed,
                waited_for = out_of_patience(&job, report) => Err(Refusal::new(GateName::Fetch, waited_for).into()),
            }
        };
        match cancel.run_until_cancelled(passed).await {
            Some(Ok(Some(loaded))) => Outcome::Passed(loaded),
            Some(Ok(None)) => Outcome::Checked,
            Some(Err(Stop::Refused(refusal))) => Outcome::Refused(refusal),
            Some(Err(Stop::Cancelled)) | None => Outcome::Cancelled,
        }
    }

    /// The version, loaded; `None` where it was not to be.
    async fn pass(&self, job: &Job, report: &Report, cancel: &CancellationToken) -> Result<Option<Loaded>, Stop> {
        let loaded = match &job.loaded {
            Some(loaded) => {
                use GateName::{Digest, Fetch, Format, Load, Memory, Template};
                for gate in [Fetch, Digest, Format, Memory, Template, Load] {
                    report.pass(gate, "still loaded");
                }
                loaded.clone()
            }
            None => {
                report.phase(CandidatePhase::Fetching);
                let draft = self.bring_draft(job, report, cancel).await.map_err(Stop::of_draft)?;
                let model = self.bring(job, draft.as_ref(), report, cancel).await?;
                if let Some((reference, field)) = job.compared_with().filter(|_| job.loads) {
                    report.phase(CandidatePhase::Validating);
                    // A candidate that is loaded might leave it no room.
                    reference.here(field, report).await;
                }
                let cache_disk = self.cache_disk(&job.version.runtime);
                let files = Files { draft, cache_disk, ..Files::of(model) };
                match self.loader.load(job, files, report).await? {
                    Some(loaded) => loaded,
                    None => {
                        // What answers is to go for it, and nobody is to wait for an object once it has.
                        if let Some(gate) = &job.prompts {
                            self.golden_prompts(gate, report).await;
                        }
                        return Ok(None);
                    }
                }
            }
        };
        let prompts = match &job.prompts {
            Some(gate) => Some(self.golden_prompts(gate, report).await),
            None => None,
        };
        judge_answers(job, &loaded.version, prompts.as_ref(), report).await?;
        Ok(Some(loaded))
    }

    /// Where prompts are kept on disk, if they are: one place for all versions, which do not take each other's.
    fn cache_disk(&self, runtime: &RuntimeSpec) -> Option<DiskCacheConfig> {
        let max_bytes = runtime.prefix_cache.as_ref()?.disk.as_ref()?.bytes()?;
        Some(DiskCacheConfig { dir: self.fetcher.cache().prefixes(), max_bytes })
    }

    /// The golden prompts of a ConfigMap, which is waited for.
    async fn golden_prompts(&self, gate: &PromptsGate, report: &Report) -> prompts::Job {
        report.phase(CandidatePhase::Testing);
        let name = &gate.config_map_ref.name;
        let text = awaited(report, || self.objects.prompts(name)).await;
        prompts::Job { min_pass: gate.min_pass.clone(), origin: format!("ConfigMap {name}"), text }
    }
}

/// Prompts, Drift, Performance and Shadow, of a version that is loaded. `prompts`: the golden ones, where they are asked for.
///
/// # Errors
/// The gate that refuses it, and why.
pub async fn judge_answers(
    job: &Job,
    version: &Arc<Version>,
    prompts: Option<&prompts::Job>,
    report: &Report,
) -> Result<(), Refusal> {
    let golden = match prompts {
        Some(prompts) => prompts.run(version, report).await?,
        None => {
            report.skip(GateName::Prompts, "no golden prompts are asked for");
            Vec::new()
        }
    };
    if let Some(drift) = &job.drift {
        drift.run(version, &golden, report).await?;
    }
    if let Some(performance) = &job.performance {
        performance.run(version, report).await?;
    }
    if let Some(shadow) = &job.shadow {
        shadow.run(version, report).await?;
    }
    Ok(())
}

impl Loader {
    /// Starts workers so.
    #[must_use]
    pub fn new(workers: WorkerConfig) -> Self {
        Self { workers, loading: tokio::sync::Mutex::default() }
    }

    /// Format, Memory, Template and Load. `None`: the version was not to be loaded.
    ///
    /// # Errors
    /// The gate that refuses it, and why.
    pub async fn load(&self, job: &Job, files: Files, report: &Report) -> Result<Option<Loaded>, Refusal> {
        report.phase(CandidatePhase::Validating);
        let _alone = self.loading.lock().await;
        let (summary, fit) = check_file(job, files.draft.as_ref(), &files.path, report).await?;
        report.gguf(&summary);
        report.pass(GateName::Memory, fit);
        if !job.loads {
            return Ok(None);
        }
        self.start_workers(job, files, &summary, report).await.map(Some)
    }

    async fn start_workers(
        &self,
        job: &Job,
        Files { path, digest, kept, stamp, draft, cache_disk }: Files,
        summary: &Summary,
        report: &Report,
    ) -> Result<Loaded, Refusal> {
        report.phase(CandidatePhase::Loading);
        let mut runtime = job_settings(job, draft.as_ref(), summary)?;
        runtime.engine.cache_disk = cache_disk;
        let files = kept.iter().chain(draft.iter().map(|draft| &draft.file));
        runtime.engine.stamps = files.filter_map(CachedModel::verified).cloned().collect();
        if !runtime.engine.stamps.is_empty() {
            // A GPU that is there though none was asked for would be computed on from the file.
            runtime.gpu_layers = Some(0);
        }
        runtime.engine.stamps.extend(stamp);
        let predicted_bytes = predict(job, draft.as_ref(), summary, &runtime);
        let trial = trial(job, draft.as_ref(), summary, &runtime);
        let spec = VersionSpec {
            name: job.version.name.clone(),
            digest: digest.map(|digest| format!("{digest:?}")).unwrap_or_default(),
            model_path: path,
            served_name: job.version.model.served_name.clone(),
            runtime,
        };
        let started = Instant::now();
        let (progress, mut seen) = watch::channel(0.0);
        let workers = self.workers.clone().on_trial(trial);
        let load = Version::load(spec, &workers, progress);
        tokio::pin!(load);
        let loaded = loop {
            tokio::select! {
                loaded = &mut load => break loaded,
                Ok(()) = seen.changed() => report.loaded(*seen.borrow_and_update()),
            }
        };
        match loaded {
            Ok(version) => {
                report_template(version.model().and_then(|model| model.template).as_deref(), report);
                report.pass(GateName::Load, format!("{:.1} s", started.elapsed().as_secs_f64()));
                let files = kept.into_iter().chain(draft.map(|draft| draft.file)).collect();
                Ok(Loaded { version, files, predicted_bytes })
            }
            Err(error) => Err(load_refusal(&error, job.version.runtime.chat_template.is_some())),
        }
    }
}

/// Ends when the job has waited for one thing for as long as it may, with what it waits for.
async fn out_of_patience(job: &Job, report: &Report) -> String {
    match job.patience {
        Some(patience) => report.waits_longer_than(patience).await,
        None => std::future::pending().await,
    }
}

/// What the template did when it was tried, which the version passed.
fn report_template(tried: Option<&TemplateReport>, report: &Report) {
    let Some(tried) = tried else {
        return report.skip(GateName::Template, "the model has no chat template, or generates no text");
    };
    let mut value = format!("{} in {:.1} ms at most", tried.renders.join(", "), tried.slowest.as_secs_f64() * 1e3);
    if !tried.refuses.is_empty() {
        value.push_str(&format!("; it refuses {}", tried.refuses.join(", ")));
    }
    report.pass(GateName::Template, value);
}

/// Format and Memory, from the whole file.
async fn check_file(
    job: &Job,
    draft: Option<&DraftModel>,
    path: &Path,
    report: &Report,
) -> Result<(Summary, String), Refusal> {
    let header = read_header(path).await?;
    let summary = header.summary().clone();
    report.gguf(&summary);
    check_use(&job.version.runtime, &header)?;
    report.pass(GateName::Format, format_value(&header));
    let fit = check_memory(job, draft, &summary, report)?;
    Ok((summary, fit))
}

fn format_value(header: &Header) -> String {
    let summary = header.summary();
    format!("GGUF v{}, {} tensors in {}", header.version(), summary.tensors, quantity(summary.file_bytes))
}

async fn read_header(path: &Path) -> Result<Header, Refusal> {
    let path = path.to_owned();
    let read = tokio::task::spawn_blocking(move || file::check(&path)).await;
    let read = read.map_err(|error| Refusal::new(GateName::Format, format!("the file's reader failed: {error}")))?;
    match read {
        Ok(file) => Ok(file.header),
        Err(FileError::Header(error)) => Err(format_refusal(&error)),
        Err(error @ FileError::Weights(_)) => {
            Err(Refusal::new(GateName::Format, error.to_string()).with_value("damaged weights"))
        }
        Err(error @ FileError::Unreadable(_)) => {
            Err(Refusal::new(GateName::Format, error.to_string()).with_value("unreadable"))
        }
    }
}

/// Whether the model does what is asked of it.
fn check_use(runtime: &RuntimeSpec, header: &Header) -> Result<(), Refusal> {
    let embeddings = runtime.embeddings.as_ref().map(pooled);
    let summary = header.summary();
    if summary.encoder && embeddings.is_none() {
        let what = format!(
            "architecture \"{}\" is an encoder, which gives vectors of texts and no text; ask for them with \
             spec.runtime.embeddings, or use a model that generates text",
            summary.architecture
        );
        return Err(Refusal::new(GateName::Format, what).with_value("an encoder"));
    }
    settings::check_pooling(embeddings.as_ref(), header).map_err(|unfit| {
        let what = match unfit {
            PoolingUnfit::NoReranker => {
                "the model is no reranker: its file names no rank pooling; leave spec.runtime.embeddings.pooling out, or use a \
                 reranker"
            }
            PoolingUnfit::Unnamed => {
                "the model's file does not say how the vectors of a text's tokens become one; say it with \
                 spec.runtime.embeddings.pooling (Mean, Cls or Last)"
            }
        };
        Refusal::new(GateName::Format, what.to_owned()).with_value("pooling")
    })
}

fn check_memory(job: &Job, draft: Option<&DraftModel>, summary: &Summary, report: &Report) -> Result<String, Refusal> {
    let runtime = job_settings(job, draft, summary)?;
    let required = predict(job, draft, summary, &runtime);
    let Some(memory) = memory_here(job) else {
        return Ok(format!("{} of an unknown amount", quantity(required)));
    };
    let judge = |memory: PodMemory, versions: u32| {
        let front_bytes = |limit_bytes| PodMemory { limit_bytes, ..memory }.front_bytes(&runtime, versions);
        // Told of one whose fit is found later, too.
        let next_fits = |memory: PodMemory| {
            let Some(MemoryBound { next_bytes: next_bytes @ 1.., .. }) = job.memory_bound else { return true };
            let left = memory.beside_front(memory.front_bytes(&runtime, 2)).available_bytes.saturating_sub(required);
            gantry_gguf::fit::verdict(next_bytes, left, job.headroom_ratio).fits
        };
        memory::judge_of(limit_of(job), required, memory, front_bytes, job.headroom_ratio, next_fits)
    };
    if job.beside.is_empty() {
        let (fit, result) = judge(memory, 1);
        report.fit(&fit, None);
        return result;
    }
    let (fit, result) = judge(memory, 2);
    let (alone, result_alone) = judge(memory.without(taken_bytes(&job.beside)), 1);
    report.fit(&fit, Some(&alone));
    if job.loads { result } else { result_alone.map(|value| format!("{value} once it is alone")) }
}

/// Bytes of main memory that are free again once these are unloaded.
fn taken_bytes(loaded: &[Arc<Version>]) -> u64 {
    loaded.iter().map(|version| version.stats().worker_rss_bytes).fold(0, u64::saturating_add)
}

/// Whose limit it is that [`memory_here`] has.
fn limit_of(job: &Job) -> LimitOf {
    let Some(bound) = job.memory_bound else { return LimitOf::Pod };
    let here_bytes = memory::read().map_or(u64::MAX, |here| here.limit_bytes);
    match bound.pod {
        Some(pod) if pod.limit_bytes <= here_bytes => LimitOf::Pod,
        _ => LimitOf::Machine,
    }
}

/// Bytes that a version is predicted to take, where its header can be read.
pub async fn predicted_bytes(job: &Job, files: &Files) -> Option<u64> {
    let path = files.path.clone();
    let header = tokio::task::spawn_blocking(move || gantry_gguf::read_header(&path)).await.ok()?.ok()?;
    let runtime = job_settings(job, None, header.summary()).ok()?;
    Some(predict(job, None, header.summary(), &runtime))
}

/// The pod's memory, or that of the one that the version is judged for.
fn memory_here(job: &Job) -> Option<PodMemory> {
    let here = memory::read();
    match job.memory_bound.and_then(|bound| bound.pod) {
        Some(bound) => Some(here.map_or(bound, |here| here.within(bound))),
        None => here,
    }
}

/// The same, as the job's version finds it.
fn memory_of(job: &Job) -> Option<PodMemory> {
    let freed_bytes = if job.loads { 0 } else { taken_bytes(&job.beside) };
    memory_here(job).map(|memory| memory.without(freed_bytes))
}

fn predict(job: &Job, draft: Option<&DraftModel>, summary: &Summary, runtime: &RuntimeSettings) -> u64 {
    memory::predict(summary, draft.map(|draft| &draft.summary), runtime, job.gpu)
}

/// What its workers may take until it answers.
fn trial(job: &Job, draft: Option<&DraftModel>, summary: &Summary, runtime: &RuntimeSettings) -> Arc<Trial> {
    let draft = draft.map(|draft| &draft.summary);
    let limits = memory::trial_limits(summary, draft, runtime, job.gpu, memory_for(job, runtime), job.headroom_ratio);
    let workers = limits.len().max(1) as u64;
    let cache_bytes = runtime.engine.cache_ram_bytes.unwrap_or(gantry_engine::DEFAULT_PREFIX_CACHE_RAM_BYTES);
    Trial::new(limits, cache_bytes / workers)
}

/// The pod's memory, with what of it is left for a model that is run so.
fn memory_for(job: &Job, runtime: &RuntimeSettings) -> Option<PodMemory> {
    memory_here(job).map(|memory| memory.beside_front(memory.front_bytes(runtime, 2)))
}

/// The settings of a job's version, with as many layers on GPUs as their memory is for.
fn job_settings(job: &Job, draft: Option<&DraftModel>, summary: &Summary) -> Result<RuntimeSettings, Refusal> {
    let mut runtime = runtime_settings(&job.version.runtime, job.scheduling.clone(), job.gpu);
    runtime.engine.draft =
        draft.map(|draft| DraftSettings { model_path: draft.file.path().to_owned(), max_tokens: draft.max_tokens });
    if !job.gpu {
        // The spec is refused before it comes here; nothing of it goes on a GPU that nobody asked for.
        runtime.gpu_memory_bytes = None;
    }
    memory::fit_gpu(&mut runtime, summary, draft.map(|draft| &draft.summary)).map_err(|unfit| {
        let GpuUnfit { required_bytes, limit_bytes, .. } = unfit;
        let value = format!("{} of {} on GPUs", quantity(required_bytes), quantity(limit_bytes));
        Refusal::new(GateName::Memory, format!("spec.runtime.gpuMemory: {unfit}")).with_value(value)
    })?;
    if !job.gpu {
        let draft = draft.map(|draft| &draft.summary);
        memory::fit_workers(&mut runtime, summary, draft, Processors::here(), memory_of(job), job.headroom_ratio);
    }
    Ok(runtime)
}

/// Whether no layer is to be on a GPU. With one there llama.cpp maps the file, and one on a volume may change meanwhile.
fn computes_on_cpus(job: &Job) -> bool {
    !job.gpu && job.version.runtime.gpu_layers.value().is_none_or(|layers| layers == 0)
}

/// Waits for an object.
async fn awaited<T, F>(report: &Report, mut read: impl FnMut() -> F) -> T
where
    F: Future<Output = Result<T, NotThere>>,
{
    let mut wait = OBJECT_RETRY_MIN;
    loop {
        match read().await {
            Ok(value) => {
                if wait > OBJECT_RETRY_MIN {
                    report.goes_on();
                }
                return value;
            }
            Err(error) => {
                // A right that was granted a moment ago may not be known everywhere yet.
                if error.reason != WaitReason::AccessDenied || wait > OBJECT_RETRY_MIN {
                    report.waits_for(error.reason, &error.message);
                }
                tokio::time::sleep(wait).await;
                wait = wait.saturating_mul(2).min(OBJECT_RETRY_MAX);
            }
        }
    }
}

//! `gantry-server validate`: what the gates of a pod would find of a model file, in a report for people.
//!
//! The parts in their order: header and tokenizer, weights (both as in [`crate::gates::file`]), then a trial: a worker process of
//! its own loads the model on the CPU and decodes with it, so that what ends llama.cpp ends that process alone. It has the
//! context that `serve` would have with the same flags, since a file may be right at the first positions and not at the last.
//! All that is wrong with a part is told; the first part that fails ends it, and the report says which were looked at, which
//! were not, and why. Its forms are in [`forms`]. Absent: golden prompts, and whether the pod that the file is for has the memory.

mod forms;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context as _;
use gantry_engine::{ModelInfo, PooledConfig};
use gantry_gguf::{Check, Code, Finding, Findings, Header, Report, Verdict, human_bytes};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::config::{ReportFormat, ValidateArgs};
use crate::fetch::CachedModel;
use crate::gates::file::FileError;
use crate::gates::limits::{HEADROOM_RATIO, MIN_POOL_TOKENS, TRIAL_LOAD_LIMIT, WEIGHTS_LIMIT};
use crate::gates::memory::PodMemory;
use crate::gates::{context, memory, settings::check_pooling};
use crate::version::{EngineTuning, RuntimeSettings, Version, VersionSpec, WorkerConfig};
use crate::{console, pull, telemetry};

/// The name of what a trial loads.
const TRIAL: &str = "trial";

/// Checks the file, which is fetched where it is named by an address, and prints the report. The exit code says whether the file may
/// be served.
///
/// # Errors
/// There is no such file, it cannot be fetched, the report cannot be printed, or no worker can be started.
pub fn run(mut args: ValidateArgs) -> anyhow::Result<ExitCode> {
    let subject = Subject::of(&mut args)?;
    let args = &args;
    let inspection = gantry_gguf::inspect(args.file());
    let (findings, title) = (inspection.findings, subject.title.clone());
    let mut outcome = Outcome { title, findings, checks: Vec::new(), report: None };
    match inspection.header {
        Ok(header) => outcome.look_further(args, &header)?,
        Err(_) => {
            outcome.checks = outcome.findings.list.iter().map(Check::of).collect();
            let rest = "weights and trial load need a header that is right";
            outcome.checks.push(Check::new(Verdict::LeftOut, "the rest", rest));
        }
    }
    let text = match args.format {
        ReportFormat::Text => outcome.text(console::has_colour(&std::io::stdout())),
        ReportFormat::Json => outcome.json(&subject.named),
        ReportFormat::Sarif => outcome.sarif(&subject.named),
    };
    print(&text)?;
    Ok(match outcome.findings.first_error() {
        Some(first) => refused(&subject.named, first),
        None => ExitCode::SUCCESS,
    })
}

/// What is looked at.
struct Subject {
    /// As it was named.
    named: PathBuf,
    title: String,
    /// Stay in the cache meanwhile.
    _files: Vec<CachedModel>,
    /// Headers alone, where no more is looked at.
    _headers: Option<tempfile::TempDir>,
}

impl Subject {
    /// Brings what is named by an address, and has `args` name the file.
    fn of(args: &mut ValidateArgs) -> anyhow::Result<Self> {
        let mut models = args.check()?;
        let named = args.file().to_owned();
        let Some(model) = models.model.clone() else {
            let title = named.file_name().unwrap_or_default().to_string_lossy().into_owned();
            return Ok(Self { named, title, _files: Vec::new(), _headers: None });
        };
        let (named, title) = (PathBuf::from(model.source.to_string()), model.source.model_name());
        console::start();
        telemetry::init()?;
        let tokio = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        if args.header_only {
            let folder = tempfile::tempdir()
                .context("cannot make a directory for headers; set TMPDIR to one that can be written")?;
            let read = tokio.block_on(pull::headers(&models.cache, &model, folder.path()));
            if let Some(path) = read.context("cannot fetch the model's header")? {
                args.use_file(path);
                return Ok(Self { named, title, _files: Vec::new(), _headers: Some(folder) });
            }
        }
        models.draft = None;
        let pulled = tokio.block_on(pull::pull(&models)).context("cannot fetch the model")?;
        if let Some(path) = pulled.model {
            args.use_file(path);
        }
        Ok(Self { named, title, _files: pulled.files, _headers: None })
    }
}

/// What was found of a file, and what else there is to say of it.
struct Outcome {
    /// What it is called.
    title: String,
    findings: Findings,
    /// What was looked at, where there is no report that has it.
    checks: Vec<Check>,
    /// There where the header is right.
    report: Option<Report>,
}

impl Outcome {
    /// Looks at the weights and has a worker load the model.
    fn look_further(&mut self, args: &ValidateArgs, header: &Header) -> anyhow::Result<()> {
        let pooled = PooledConfig { pooling: args.pooling, batch_tokens: args.ubatch_size, ..PooledConfig::default() };
        let mut runtime = RuntimeSettings {
            ctx_size: args.ctx_size,
            parallel: args.parallel,
            pooled: (args.embeddings || header.summary().encoder).then_some(pooled),
            ..RuntimeSettings::default()
        };
        // As `serve` would run it.
        let memory = memory::read().map(|memory| memory.beside_front(memory.front_bytes(&runtime, 1)));
        context::fit_context(&mut runtime, header.summary(), None, false, memory, HEADROOM_RATIO);
        let input = memory::fit_input(&runtime, header.summary(), false);
        let mut report = Report::new(self.title.clone(), header, input);
        if let Some(memory) = memory {
            report = report.with_check(in_memory(memory, memory::predict(header.summary(), None, &runtime, false)));
        }
        if let Err(unfit) = check_pooling(runtime.pooled.as_ref(), header) {
            let finding = Finding::new(Code::Pooling, "pooling", unfit.to_string(), "one that is named");
            report = report.with_check(self.kept(Check::of(&finding)));
        }
        for check in weights(args, header) {
            report = report.with_check(self.kept(check));
        }
        let trial = match report.failed() {
            Some(_) => Check::new(Verdict::LeftOut, "trial load", "the file is refused without it"),
            None => trial(args, header, &runtime)?,
        };
        self.report = Some(report.with_check(self.kept(trial)));
        Ok(())
    }

    /// Takes down what a check found.
    fn kept(&mut self, check: Check) -> Check {
        if let Some(finding) = &check.finding {
            self.findings.push(finding.clone());
        }
        check
    }
}

/// What this machine has of the memory that the model takes as `serve` would run it: it need not be the one that serves it.
fn in_memory(memory: PodMemory, required: u64) -> Check {
    let (need, have) = (human_bytes(required), human_bytes(memory.available_bytes));
    let all = human_bytes(memory.limit_bytes);
    let fits = if required <= memory.available_bytes { "enough" } else { "too little" };
    Check::new(Verdict::Noted, "memory", format!("it takes {need}, and {have} of {all} can be used here: {fits}"))
}

fn print(text: &str) -> anyhow::Result<()> {
    std::io::stdout().write_all(text.as_bytes()).context("cannot write to stdout")
}

/// Says why on standard error, where scripts that keep the report elsewhere see it.
fn refused(file: &Path, first: &Finding) -> ExitCode {
    let (file, part) = (file.display(), first.part);
    // The exit code says it, too.
    let _ = writeln!(std::io::stderr(), "gantry-server: {file}: {part}: {}", first.message);
    ExitCode::FAILURE
}

fn weights(args: &ValidateArgs, header: &Header) -> Vec<Check> {
    if args.header_only {
        return vec![Check::new(Verdict::LeftOut, "weights", "--header-only")];
    }
    let read = if args.all_weights {
        let bar = console::bytes_bar("reading the weights", header.summary().tensor_bytes);
        let read = gantry_gguf::read_weights(args.file(), header, |bytes| bar.set_position(bytes));
        bar.finish_and_clear();
        read
    } else {
        gantry_gguf::sample_weights(args.file(), header, WEIGHTS_LIMIT)
    };
    let weights = match read {
        Ok(weights) => weights,
        Err(error) => {
            // In the words of `serve`.
            let reason = FileError::Unreadable(error).to_string();
            return vec![Check::of(&Finding::new(Code::Unreadable, "weights", reason, "a file that can be read"))];
        }
    };
    let defects = weights.defect.iter().chain(&weights.further);
    let mut checks: Vec<Check> = defects.map(|defect| Check::of(&Finding::of_weights(defect))).collect();
    if checks.is_empty() {
        checks.push(Check::new(Verdict::Passed, "weights", weights.summary()));
    }
    checks.extend(weights.notes.iter().map(Check::of));
    checks
}

fn trial(args: &ValidateArgs, header: &Header, served: &RuntimeSettings) -> anyhow::Result<Check> {
    let left_out = |why: &str| Ok(Check::new(Verdict::LeftOut, "trial load", why));
    if args.header_only || args.no_load {
        return left_out(if args.no_load { "--no-load" } else { "--header-only" });
    }
    let runtime = trial_settings(served);
    let takes = |runtime: &RuntimeSettings| memory::predict(header.summary(), None, runtime, false);
    let free_bytes = memory::read().map_or(u64::MAX, |memory| memory.available_bytes);
    let ctx_size = MIN_POOL_TOKENS.min(header.summary().context_length);
    let least = RuntimeSettings { ctx_size, parallel: 1, ..runtime.clone() };
    let Some(runtime) = [runtime, least.clone()].into_iter().find(|runtime| takes(runtime) <= free_bytes) else {
        let (need, have) = (human_bytes(takes(&least)), human_bytes(free_bytes));
        return left_out(&format!("it needs {need} of memory, and {have} is free here"));
    };
    let workers = WorkerConfig::this_program()?.with_backend_dir(args.backends.backend_dir.clone()).quietly();
    let tokio = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let started = Instant::now();
    Ok(match tokio.block_on(load(args.file(), runtime, &workers)) {
        Ok(model) => {
            let template = if header.summary().chat_template { ", parsed its chat template" } else { "" };
            let seconds = started.elapsed().as_secs_f64();
            let context = match model {
                Some(model) if !header.summary().encoder => {
                    format!(" with {} tokens of context for a request", model.n_ctx_per_sequence)
                }
                _ => String::new(),
            };
            let text = format!("a worker loaded it{template} and computed{context}: all finite, after {seconds:.1} s");
            Check::new(Verdict::Passed, "trial load", text)
        }
        Err(reason) => Check::of(&Finding::new(Code::TrialLoad, "trial load", reason, "a model that computes")),
    })
}

/// As `serve` would run it, in one worker on the CPU that keeps nothing.
fn trial_settings(served: &RuntimeSettings) -> RuntimeSettings {
    RuntimeSettings {
        gpu_layers: Some(0),
        workers: Some(1),
        engine: EngineTuning { cache_ram_bytes: Some(0), lazy_cells: true, ..served.engine.clone() },
        ..served.clone()
    }
}

/// Loads the model in a worker, which decodes with it before it says that it is ready.
async fn load(path: &Path, runtime: RuntimeSettings, workers: &WorkerConfig) -> Result<Option<ModelInfo>, String> {
    let spec = VersionSpec {
        name: TRIAL.to_owned(),
        digest: String::new(),
        model_path: path.to_owned(),
        served_name: TRIAL.to_owned(),
        runtime,
    };
    let (progress, _) = watch::channel(0.0);
    // Dropped, it ends its worker.
    match timeout(TRIAL_LOAD_LIMIT, Version::load(spec, workers, progress)).await {
        Ok(Ok(version)) => {
            let model = version.model();
            version.retire(std::time::Duration::ZERO).await;
            Ok(model)
        }
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("the worker was not ready within {TRIAL_LOAD_LIMIT:?}")),
    }
}

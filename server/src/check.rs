//! `gantry-server check`: what the gates of a pod would say of a candidate, found without a cluster.
//!
//! The reference is loaded first, as a pod has the active version loaded; then the candidate goes through the gates beside it
//! ([`Loader::load`], [`judge_answers`]), each model in workers of its own. The report has what a ModelVersion's status has; its
//! forms are in [`forms`]. Absent: what a pod fetches by a spec (Fetch and Digest tell what the file is), draft models, and what is
//! watched once a version answers.

mod forms;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use gantry_crds::inference_service::{ModelSpec, SourceSpec};
use gantry_crds::status::{AgentStatus, CandidateStatus, GateName, GateResult, GateVerdict, NamedVersion};
use gantry_rollout::{Lines, line};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::config::{CheckArgs, CheckFormat, CheckSettings, NamedModel};
use crate::fetch::{Digest, FileStamp};
use crate::gates::limits::{CHECK_STANDSTILL_LIMIT, HEADROOM_RATIO};
use crate::gates::memory::PodMemory;
use crate::gates::reference::Reference;
use crate::gates::report::quantity;
use crate::gates::{
    Board, Files, Job, Loaded, Loader, MemoryBound, Refusal, Report, drift, judge_answers, performance, predicted_bytes,
};
use crate::limits::AGENT_STOP_LIMIT;
use crate::rollout::Published;
use crate::serve::{self, EXIT_SIGNAL_BASE};
use crate::version::{Scheduling, WorkerConfig};
use crate::{console, descriptors, pull, telemetry};

/// The exit code where no gate judged the candidate.
const EXIT_NOT_JUDGED: u8 = 2;
/// What the versions are called.
const CANDIDATE: &str = "candidate";
const REFERENCE: &str = "reference";

/// Takes the candidate through the gates, and prints the report. The exit code says whether they let it through.
///
/// # Errors
/// The flags or the files that they name are wrong: with every mistake.
pub fn run(args: &CheckArgs) -> anyhow::Result<ExitCode> {
    let settings = args.settings()?;
    Ok(judge_and_print(&settings, args.format).unwrap_or_else(|error| {
        telemetry::write_lines(format!("gantry-server: not judged: {error:#}\n").as_bytes());
        ExitCode::from(EXIT_NOT_JUDGED)
    }))
}

fn judge_and_print(settings: &CheckSettings, format: CheckFormat) -> anyhow::Result<ExitCode> {
    console::start();
    let remote = |model: &NamedModel| model.remote.model.is_some();
    if remote(&settings.candidate) || settings.reference.as_ref().is_some_and(remote) {
        // A fetch is told of in the log.
        telemetry::init()?;
    }
    let tokio = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let ended = tokio.block_on(until_told_to_end(settings));
    console::shown();
    // Dropped, it would wait for disk work that nobody wants any more.
    tokio.shutdown_background();
    let outcome = match ended? {
        Ended::Judged(outcome) => outcome,
        Ended::ToldToEnd(signal) => return Ok(ExitCode::from(EXIT_SIGNAL_BASE.saturating_add(signal))),
    };
    let text = match format {
        CheckFormat::Text => outcome.text(console::has_colour(&std::io::stdout())),
        CheckFormat::Json => outcome.json(),
    };
    if let Err(error) = std::io::stdout().write_all(text.as_bytes()) {
        // It was judged all the same, and the exit code says how.
        let told = format!("gantry-server: the report cannot be written to standard output: {error}\n");
        telemetry::write_lines(told.as_bytes());
    }
    let Some(refusal) = &outcome.refusal else { return Ok(ExitCode::SUCCESS) };
    // Where scripts that keep the report elsewhere see it.
    let (gate, message) = (refusal.gate.as_str(), &refusal.message);
    telemetry::write_lines(format!("gantry-server: {}: {gate}: {message}\n", outcome.candidate).as_bytes());
    Ok(ExitCode::FAILURE)
}

/// How it ended.
enum Ended {
    Judged(Box<Outcome>),
    /// By the signal of this number.
    ToldToEnd(u8),
}

/// What the gates said.
struct Outcome {
    /// The models, as they were named.
    candidate: String,
    reference: Option<String>,
    /// A result of each gate, in their order.
    gates: Vec<GateResult>,
    /// What was reported of the candidate beside.
    status: CandidateStatus,
    refusal: Option<Refusal>,
}

/// Judges the candidate, until a signal calls that off; the workers have ended then.
async fn until_told_to_end(settings: &CheckSettings) -> anyhow::Result<Ended> {
    descriptors::survive_file_limits()?;
    let cancel = CancellationToken::new();
    let judged = judge(settings, &cancel);
    tokio::pin!(judged);
    let signal = tokio::select! {
        biased;
        signal = serve::told_to_end() => signal?,
        outcome = &mut judged => return Ok(Ended::Judged(Box::new(outcome?))),
    };
    cancel.cancel();
    // Workers that do not end in time end with their front, which they notice.
    let _ = timeout(AGENT_STOP_LIMIT, judged).await;
    Ok(Ended::ToldToEnd(signal))
}

/// Brings both models and judges the candidate beside the reference.
async fn judge(settings: &CheckSettings, cancel: &CancellationToken) -> anyhow::Result<Outcome> {
    let workers = WorkerConfig::this_program()?.with_backend_dir(settings.backend_dir.clone()).quietly();
    let gpu = match settings.runtime.gpu_layers.value() {
        Some(layers) => layers > 0,
        // Whoever cannot tell says so again as a worker, to whom it matters.
        None => workers.finds_gpus().await.unwrap_or(true),
    };
    let headroom_ratio = settings.gates.memory.headroom.ratio().unwrap_or(HEADROOM_RATIO);
    let board = Arc::new(watch::channel(Lines::new()).0);
    let _shown = AbortOnDropHandle::new(tokio::spawn(console::show_gates(board.subscribe())));
    let bench = Bench { settings, board, loader: Loader::new(workers), gpu, headroom_ratio, cancel };
    let candidate = &settings.candidate;
    let named = candidate.named.display();
    let found = find(candidate, true, cancel).await.with_context(|| format!("the candidate {named}"))?;
    let reference = match &settings.reference {
        Some(model) => Some(bench.load_reference(model, &found.files).await?),
        None => None,
    };
    let outcome = bench.judge(found, reference.clone()).await;
    if let Some(reference) = reference {
        reference.version.retire(Duration::ZERO).await;
    }
    outcome
}

/// Where both models are loaded.
struct Bench<'a> {
    settings: &'a CheckSettings,
    board: Arc<Board>,
    loader: Loader,
    /// Whether there is a GPU.
    gpu: bool,
    headroom_ratio: f64,
    cancel: &'a CancellationToken,
}

impl Bench<'_> {
    /// Loads the model that the candidate is compared with, which is loaded beside it.
    async fn load_reference(&self, model: &NamedModel, candidate: &Files) -> anyhow::Result<Loaded> {
        let named = model.named.display();
        let Found { files, .. } =
            find(model, false, self.cancel).await.with_context(|| format!("the reference {named}"))?;
        let report = self.report(REFERENCE);
        let mut job = self.job(REFERENCE, None);
        if let Some(bound) = &mut job.memory_bound {
            let candidate = predicted_bytes(&self.job(CANDIDATE, None), candidate).await;
            bound.next_bytes = candidate.unwrap_or(0);
        }
        let loaded = self.while_it_gets_on(self.loader.load(&job, files, &report)).await?;
        self.board.send_modify(|lines| drop(lines.remove(REFERENCE)));
        console::shown();
        let refused = |Refusal { gate, message, .. }| anyhow::anyhow!("{}: {message}", gate.as_str());
        let loaded = loaded.map_err(refused).with_context(|| format!("the reference {named} cannot be loaded"))?;
        let loaded = loaded.context("the reference was not loaded")?;
        // It answers, as the active version of a pod does.
        loaded.version.end_trial();
        Ok(loaded)
    }

    /// Takes the candidate through the gates.
    async fn judge(&self, found: Found, reference: Option<Loaded>) -> anyhow::Result<Outcome> {
        let named = self.settings.candidate.named.display().to_string();
        let Found { files, origin, digest, stamps } = found;
        let report = self.report(CANDIDATE);
        tell_file(&report, &origin, digest);
        let job = self.job(CANDIDATE, reference.as_ref());
        let load = self.loader.load(&job, files, &report);
        let loaded = self.while_it_gets_on(load).await?;
        // From then on it is in memory.
        let looked = tokio::task::spawn_blocking(move || are_unchanged(&stamps));
        let looked = async { looked.await.context("the files could not be looked at once more")? };
        let passed = match loaded {
            Ok(Some(loaded)) => {
                let answers = async {
                    looked.await?;
                    Ok(judge_answers(&job, &loaded.version, self.settings.prompts.as_ref(), &report).await)
                };
                let judged = self.while_it_gets_on(answers).await.flatten();
                loaded.version.retire(Duration::ZERO).await;
                judged?
            }
            Ok(None) => looked.await.map(Ok)?,
            Err(refusal) => looked.await.map(|()| Err(refusal))?,
        };
        let mut status = self.board.borrow().get(CANDIDATE).cloned().context("nothing is known of the candidate")?;
        let refusal = passed.err();
        if let Some(refusal) = &refusal {
            line::refuse(&mut status, refusal);
        }
        let reference = self.settings.reference.as_ref().map(|model| model.named.display().to_string());
        Ok(Outcome { candidate: named, reference, gates: every_gate(&status, self.settings), status, refusal })
    }

    fn report(&self, version: &str) -> Report {
        self.board.send_modify(|lines| drop(lines.insert(version.to_owned(), line::blank(version, None))));
        Report::of(Arc::clone(&self.board), version)
    }

    /// What a pod would have to do that has `reference` loaded.
    fn job(&self, name: &str, reference: Option<&Loaded>) -> Job {
        let CheckSettings { gates, runtime, memory_limit_bytes, .. } = self.settings;
        let compared = || match reference {
            Some(loaded) => {
                // Nothing more is published: it stays what it is.
                let published = Published { serving: Some(loaded.clone()), ..Published::default() };
                let (_, serving) = watch::channel(published);
                Reference::Here { version: REFERENCE.to_owned(), serving }
            }
            None => Reference::None,
        };
        let taken_bytes = reference.map_or(0, |loaded| loaded.predicted_bytes);
        let bound =
            |limit_bytes: u64| PodMemory { limit_bytes, available_bytes: limit_bytes.saturating_sub(taken_bytes) };
        let model = ModelSpec { served_name: name.to_owned(), source: SourceSpec::default() };
        Job {
            version: NamedVersion { name: name.to_owned(), model, runtime: runtime.clone() },
            loaded: None,
            prompts: None,
            drift: gates.drift.clone().map(|gate| drift::Job { gate, reference: compared() }),
            performance: gates.performance.clone().map(|gate| performance::Job { gate, reference: compared() }),
            shadow: None,
            headroom_ratio: self.headroom_ratio,
            memory_bound: Some(MemoryBound { pod: memory_limit_bytes.map(bound), next_bytes: 0 }),
            scheduling: Scheduling::default(),
            gpu: self.gpu,
            loads: true,
            beside: reference.map(|loaded| Arc::clone(&loaded.version)).into_iter().collect(),
            patience: None,
        }
    }

    /// What comes of it, unless it is called off or nothing is reported of it for [`CHECK_STANDSTILL_LIMIT`].
    async fn while_it_gets_on<T>(&self, work: impl Future<Output = T>) -> anyhow::Result<T> {
        let (board, mut changes) = (self.board.subscribe(), self.board.subscribe());
        let standstill = async { while let Ok(Ok(())) = timeout(CHECK_STANDSTILL_LIMIT, changes.changed()).await {} };
        tokio::select! {
            done = work => Ok(done),
            () = self.cancel.cancelled() => anyhow::bail!("it was called off"),
            () = standstill => anyhow::bail!("{}", stands_still(&board.borrow())),
        }
    }
}

/// A model whose files are there.
struct Found {
    files: Files,
    origin: Origin,
    /// Of a model in one file, where it is known.
    digest: Option<Digest>,
    /// What files of this machine were when they were found.
    stamps: Vec<FileStamp>,
}

/// Where the files of a model come from.
enum Origin {
    /// They are files of this machine.
    Here,
    /// They have so many bytes, and `is_verified`: the digests that were asked for, or that their store tells.
    Address { bytes: u64, is_verified: bool },
}

/// Brings a model, or finds it here. `is_hashed`: a file of this machine is hashed, and not loaded as anything else.
async fn find(model: &NamedModel, is_hashed: bool, cancel: &CancellationToken) -> anyhow::Result<Found> {
    let find = async {
        let Some(remote) = &model.remote.model else {
            let path = model.path.clone();
            let stamps = tokio::task::spawn_blocking(move || stamps(&path, is_hashed));
            let stamps = stamps.await?.context("it cannot be read")?;
            // The digest of one of several files would say nothing of the others.
            let stamp = stamps.first().filter(|stamp| stamps.len() == 1 && stamp.digest().is_some());
            return anyhow::Ok(Found {
                files: Files::at_hand(model.path.clone(), stamp.cloned()),
                origin: Origin::Here,
                digest: stamp.and_then(FileStamp::digest),
                stamps,
            });
        };
        let brought = pull::bring(&model.remote.cache, remote).await.context("it cannot be fetched")?;
        let (is_verified, is_one) = (brought.is_verified, brought.files.len() == 1);
        let file = brought.into_model().context("its address names no file")?;
        let origin = Origin::Address { bytes: file.bytes(), is_verified };
        let digest = is_one.then(|| file.digest());
        Ok(Found { files: Files::of(file), origin, digest, stamps: Vec::new() })
    };
    cancel.run_until_cancelled(find).await.unwrap_or_else(|| anyhow::bail!("it was called off"))
}

/// What the files of a model are, whose first this is; the file of one that is not split is hashed where `is_hashed`. Blocks.
///
/// # Errors
/// The only file cannot be read. Of several, the gates say which are not there.
fn stamps(path: &Path, is_hashed: bool) -> std::io::Result<Vec<FileStamp>> {
    match gantry_gguf::part_paths(path).as_slice() {
        [_] if is_hashed => Ok(vec![FileStamp::hashed(path)?]),
        parts => Ok(parts.iter().filter_map(|part| FileStamp::looked_at(part).ok()).collect()),
    }
}

/// Looks whether files are what they were. Blocks.
///
/// # Errors
/// One is not: what was found may be of neither.
fn are_unchanged(stamps: &[FileStamp]) -> anyhow::Result<()> {
    let Some(changed) = stamps.iter().find(|stamp| stamp.again().is_err()) else { return Ok(()) };
    let path = changed.path().display();
    std::fs::metadata(changed.path()).with_context(|| format!("{path} cannot be read any more"))?;
    anyhow::bail!(
        "{path} has changed while it was looked at, and what was found may be of neither: check it again once nothing writes to it"
    )
}

/// Fetch and Digest, which have nothing to compare a file with that is there.
fn tell_file(report: &Report, origin: &Origin, digest: Option<Digest>) {
    match origin {
        Origin::Here => report.skip(GateName::Fetch, "a file of this machine"),
        Origin::Address { bytes, .. } => report.pass(GateName::Fetch, quantity(*bytes)),
    }
    match (origin, digest) {
        (Origin::Address { is_verified: true, .. }, Some(digest)) => {
            report.pass(GateName::Digest, format!("{digest:?}"));
        }
        (Origin::Address { is_verified: true, .. }, None) => {
            report.pass(GateName::Digest, "of each file, as its store tells it");
        }
        (_, Some(digest)) => {
            report.skip(GateName::Digest, &format!("no digest is asked for; the file has {digest:?}"));
        }
        (_, None) => report.skip(GateName::Digest, "no digest is asked for, and each of several files has its own"),
    }
}

/// That nothing has come of the model that is on the board, how far it was, and what to do.
fn stands_still(board: &Lines) -> String {
    let told: Vec<String> = board
        .values()
        .map(|line| {
            let passed = line.gates.last().map(|gate| format!(", past {}", gate.name.as_str())).unwrap_or_default();
            format!("{}{passed}", console::in_gates(line))
        })
        .collect();
    format!(
        "nothing has come for {} s of {}; try again where the machine has less to do, or with a smaller --ctx-size, and look at the \
         model's file if it stands still there again",
        CHECK_STANDSTILL_LIMIT.as_secs(),
        told.join("; ")
    )
}

/// What was reported, with the gates that were not asked for or not reached as Skipped.
fn every_gate(status: &CandidateStatus, settings: &CheckSettings) -> Vec<GateResult> {
    let refused_by = status.gates.iter().find(|gate| gate.verdict == GateVerdict::Fail);
    let is_asked = |name: GateName| match name {
        GateName::Prompts => settings.prompts.is_some(),
        GateName::Drift => settings.gates.drift.is_some(),
        GateName::Performance => settings.gates.performance.is_some(),
        _ => true,
    };
    let of = |name: GateName| {
        let reported = status.gates.iter().find(|gate| gate.name == name).cloned();
        reported.unwrap_or_else(|| {
            let message = match refused_by {
                _ if name == GateName::Shadow && settings.gates.shadow.is_some() => {
                    "there are no live requests here: a pod looks at them".to_owned()
                }
                Some(refused) if is_asked(name) => format!("not reached: {} refused it", refused.name.as_str()),
                _ => "it is not asked for".to_owned(),
            };
            GateResult { name, verdict: GateVerdict::Skipped, value: None, message: Some(message) }
        })
    };
    AgentStatus::of_this_release().gates.into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_has_changed_since_it_was_found_is_not_judged() -> anyhow::Result<()> {
        let folder = tempfile::tempdir()?;
        let (whole, second) = (folder.path().join("m.gguf"), folder.path().join("n-00002-of-00002.gguf"));
        let first = folder.path().join("n-00001-of-00002.gguf");
        for path in [&whole, &first, &second] {
            std::fs::write(path, b"GGUF")?;
        }
        for (named, changed, is_hashed) in [(&whole, &whole, true), (&whole, &whole, false), (&first, &second, true)] {
            let found = stamps(named, is_hashed)?;
            are_unchanged(&found)?;
            std::fs::write(changed, b"GGUF and more")?;
            let told = are_unchanged(&found).map_err(|error| error.to_string());
            let wanted = format!("{} has changed while it was looked at", changed.display());
            anyhow::ensure!(told.as_ref().is_err_and(|told| told.starts_with(&wanted)), "{named:?}: {told:?}");
            std::fs::write(changed, b"GGUF")?;
        }
        let found = stamps(&whole, true)?;
        std::fs::remove_file(&whole)?;
        let told = are_unchanged(&found).map_err(|error| format!("{error:#}"));
        anyhow::ensure!(told.as_ref().is_err_and(|told| told.contains("m.gguf cannot be read any more: ")), "{told:?}");
        Ok(())
    }

    #[test]
    fn of_a_model_that_stands_still_it_is_told_how_far_it_was() {
        let board = Arc::new(watch::channel(Lines::from([(CANDIDATE.to_owned(), line::blank(CANDIDATE, None))])).0);
        let report = Report::of(Arc::clone(&board), CANDIDATE);
        report.pass(GateName::Load, "1.0 s");
        report.phase(gantry_crds::status::CandidatePhase::Testing);
        report.answered(3, 12);
        let told = stands_still(&board.borrow());
        let wanted = "nothing has come for 900 s of candidate: testing, 3 of 12 prompts, past Load; try again where";
        assert!(told.starts_with(wanted), "{told}");
    }
}

//! The course of a benchmark: for each load the peer's configurations are tried, then both servers run in turn.
//!
//! Every run has a server of its own, started for it and stopped after it, so that no run finds what another left in a
//! cache. Configurations alternate (ours, default, best, and from another one on in the next round), so that a machine
//! that becomes slower or faster does so for all of them.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tokio::{
    sync::watch,
    time::{Instant, interval},
};

use crate::{
    drive::{Course, Drive},
    figures::Run,
    loads::{self, Against, Aim, Better, DECODE_SIZE, Load},
    machine,
    peer::{self, Candidate, DEFAULT},
    prompts::{MODEL_NAME, Material, Prompts},
    results::{LoadResult, Series, Trial},
    server::{Server, Setup},
    stats::Distribution,
};

/// How often memory is looked at where it is the subject.
const MEMORY_PERIOD: Duration = Duration::from_millis(250);
/// Words and tokens of the request that warms a server up.
const WARM_UP: (usize, u32) = (4, 8);
/// The seed of the warm-up's words: that of no run.
const WARM_UP_SEED: u64 = u64::MAX;

/// Where things are, and what to run.
#[derive(Debug, Clone)]
pub struct Bench {
    /// Our server.
    pub server: PathBuf,
    /// Where it finds ggml's backends; `None`: it looks where its image has them.
    pub backend_dir: Option<PathBuf>,
    /// The folder of the peer's programs; `None`: ours alone.
    pub peer: Option<PathBuf>,
    /// The folder of the models made for this.
    pub models: PathBuf,
    /// The folder of the demo models and their questions.
    pub demo: PathBuf,
    /// Where logs go, and what the peer's best configurations were.
    pub cache: PathBuf,
    /// Threads of both servers.
    pub threads: usize,
    /// Whether the loads are only tried, in small, with the demo model.
    pub quick: bool,
    /// Runs of each configuration, where not the load's own number.
    pub repeats: Option<usize>,
    /// Whether the peer's configurations are tried even where the best one is known.
    pub try_again: bool,
    /// What is in the names of the peer's configurations that are not tried, see [`Candidate::is_skipped`].
    pub skip_peer: Vec<String>,
    /// What the peer is: what a best configuration is remembered for.
    pub peer_version: String,
    /// What we are.
    pub own_version: String,
}

/// Tells what is going on.
fn say(text: &str) {
    use std::io::Write;
    // Whoever closed the pipe does not want to know.
    drop(writeln!(std::io::stdout(), "{text}"));
}

impl Bench {
    /// Runs one load.
    ///
    /// # Errors
    /// When a server cannot be started or asked; a request that fails is a figure.
    pub async fn run(&self, load: &Load) -> Result<LoadResult> {
        let begun = Instant::now();
        let load_average = machine::load_average();
        say(&format!("\n{}: {}", load.name, load.title));
        let model = self.model(load)?;
        let mut ours = Series { name: "gantry".to_owned(), setup: self.own_setup(load, &model), ..Series::default() };
        let (mut default, mut best, mut trials) = (None, None, Vec::new());
        // A trial is a run with the words of the first round: it is not made again.
        let mut first_runs = BTreeMap::new();
        if let Some(folder) = self.peer.as_ref().filter(|_| load.with_peer) {
            let mut candidates = peer::candidates(load);
            candidates.retain(|candidate| !candidate.is_skipped(&self.skip_peer));
            let chosen = self.choose(folder, load, &model, &candidates, &mut trials, &mut first_runs).await?;
            let series = |candidate: &Candidate| Series {
                name: candidate.name.to_owned(),
                why: candidate.why.to_owned(),
                setup: candidate.setup(folder, &model, load, self.threads),
                ..Series::default()
            };
            default = candidates.first().map(series);
            best = (chosen.name != DEFAULT).then(|| series(&chosen));
        }
        let mut batched_bench = Vec::new();
        let rounds = self.repeats.unwrap_or(load.repeats);
        let mut samples: BTreeMap<String, (Vec<f64>, Vec<f64>)> = BTreeMap::new();
        for round in 0..rounds {
            let mut series: Vec<&mut Series> =
                [Some(&mut ours), default.as_mut(), best.as_mut()].into_iter().flatten().collect();
            let count = series.len();
            series.rotate_left(round % count);
            for series in series {
                let run = match first_runs.remove(&series.name).filter(|_| round == 0) {
                    Some(run) => run,
                    None => {
                        self.measure(load, &series.setup, round as u64).await.with_context(|| series.name.clone())?
                    }
                };
                say(&format!("  {} of {rounds}  {:<24} {}", round + 1, series.name, summary(load, &run)));
                let all = samples.entry(series.name.clone()).or_default();
                all.0.extend(&run.ttft_ms);
                all.1.extend(&run.itl_ms);
                series.errors.extend(run.errors);
                series.runs.push(run.figures);
            }
            if let Some(folder) = self.peer.as_ref().filter(|_| needs_batched_bench(load)) {
                let size = if self.quick { (8, 16) } else { DECODE_SIZE };
                let rate = peer::batched_bench(folder, &model, load, size, self.threads).await?;
                say(&format!("  {} of {rounds}  {:<24} {rate:.1} tokens/s", round + 1, "llama-batched-bench"));
                batched_bench.push(rate);
            }
        }
        for series in [Some(&mut ours), default.as_mut(), best.as_mut()].into_iter().flatten() {
            if let Some((ttft_ms, itl_ms)) = samples.remove(&series.name) {
                series.ttft_ms = Distribution::of(ttft_ms);
                series.itl_ms = Distribution::of(itl_ms);
            }
        }
        let took_s = begun.elapsed().as_secs_f64();
        say(&format!("  {} took {took_s:.0} s", load.name));
        Ok(LoadResult {
            name: load.name.to_owned(),
            title: load.title.to_owned(),
            model: model.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            drive: serde_json::to_value(load.drive)?,
            ended_at: jiff::Timestamp::now().strftime("%Y-%m-%d %H:%M:%SZ").to_string(),
            gantry: self.own_version.clone(),
            took_s,
            load_average,
            ours,
            peer_best: better_of(default.as_ref(), best, load.chosen_by),
            peer_default: default,
            trials,
            batched_bench,
            aims: load.aims.iter().map(Aim::owned).collect(),
        })
    }

    fn model(&self, load: &Load) -> Result<PathBuf> {
        let demo = load.model == loads::Model::Demo || self.quick;
        let path = match demo {
            true => self.demo.join(loads::Model::Demo.file()),
            false => self.models.join(load.model.file()),
        };
        ensure!(path.exists(), "{} is missing: hack/bench.sh makes it", path.display());
        Ok(path)
    }

    fn own_setup(&self, load: &Load, model: &Path) -> Setup {
        let (ctx_size, parallel) = loads::own_size(load);
        let numbers = [
            ("--ctx-size", u64::from(ctx_size)),
            ("--parallel", u64::from(parallel)),
            ("--threads", self.threads as u64),
        ];
        let mut args = vec!["serve".to_owned(), "--model".to_owned(), model.display().to_string()];
        args.extend(["--alias".to_owned(), MODEL_NAME.to_owned()]);
        args.extend(numbers.iter().flat_map(|(flag, number)| [(*flag).to_owned(), number.to_string()]));
        if let Some(dir) = &self.backend_dir {
            args.extend(["--backend-dir".to_owned(), dir.display().to_string()]);
        }
        args.extend(loads::own_flags(load.name).iter().map(|&flag| flag.to_owned()));
        Setup { program: self.server.clone(), args, ..Setup::default() }
    }

    /// The peer's best configuration: the one that is remembered, or else the one that does best when tried once each.
    async fn choose(
        &self,
        folder: &Path,
        load: &Load,
        model: &Path,
        candidates: &[Candidate],
        trials: &mut Vec<Trial>,
        runs: &mut BTreeMap<String, Run>,
    ) -> Result<Candidate> {
        let mut remembered = Remembered::read(&self.cache.join("best.json"))?;
        let key =
            format!("{} {} threads={} quick={} {candidates:?}", load.name, self.peer_version, self.threads, self.quick);
        if let Some(known) = remembered.0.get(&key).filter(|_| !self.try_again) {
            trials.clone_from(known);
        }
        let (figure, _) = load.chosen_by;
        for candidate in &candidates[trials.len().min(candidates.len())..] {
            let setup = candidate.setup(folder, model, load, self.threads);
            // A configuration that does not work is not the best one.
            let mut figures = BTreeMap::new();
            let value = match self.measure(load, &setup, 0).await {
                Ok(run) => {
                    figures.clone_from(&run.figures);
                    say(&format!("  trying  {:<24} {}", candidate.name, summary(load, &run)));
                    let works = run.figures.get("failed").is_none_or(|failed| *failed == 0.0);
                    let value = run.figures.get(figure).copied().filter(|_| works);
                    runs.insert(candidate.name.to_owned(), run);
                    value
                }
                Err(error) => {
                    say(&format!("  trying  {:<24} does not work: {error:#}", candidate.name));
                    None
                }
            };
            trials.push(Trial { name: candidate.name.to_owned(), figure: figure.to_owned(), value, figures });
            // Each at once: the trials of some loads take an hour, and go on where they were interrupted.
            remembered.0.insert(key.clone(), trials.clone());
            remembered.write(&self.cache.join("best.json"))?;
        }
        let best = best_trial(trials, load.chosen_by.1).unwrap_or(DEFAULT);
        let chosen = candidates.iter().find(|candidate| candidate.name == best).or(candidates.first());
        chosen.cloned().context("the peer has no configuration")
    }

    /// Starts a server, warms it up, loads it, stops it.
    async fn measure(&self, load: &Load, setup: &Setup, seed: u64) -> Result<Run> {
        static RUNS: AtomicU64 = AtomicU64::new(0);
        let logs = self.cache.join("logs");
        fs::create_dir_all(&logs)?;
        let log = logs.join(format!("{}-{}.log", load.name, RUNS.fetch_add(1, Ordering::Relaxed)));
        let material = Material::read(&self.model(load)?, &self.demo.join("eval.jsonl"))?;
        let warm_up = material.ask(Prompts::Words { shared: 0, own: WARM_UP.0 }, WARM_UP_SEED, 0, WARM_UP.1)?;
        let server = Server::start(setup, &warm_up, &log).await?;
        let (before, ready_ms) = (server.cost(), server.ready_ms);
        let (done, mut finished) = watch::channel(false);
        let course = Course { server: server.address, material, body: setup.body.clone(), seed };
        let drive = async {
            let run = course.run(load.drive).await;
            done.send_replace(true);
            run
        };
        let peak = async {
            let (mut peak, mut tick) = (0, interval(MEMORY_PERIOD));
            while load.watches_memory && !*finished.borrow() {
                tokio::select! { _ = tick.tick() => {}, _ = finished.changed() => {} }
                peak = peak.max(server.cost().pss_bytes);
            }
            peak
        };
        let (run, peak) = tokio::join!(drive, peak);
        let (mut run, after) = (run?, server.cost());
        server.stop().await?;
        let cpu_s = after.cpu_s - before.cpu_s;
        let figures = &mut run.figures;
        figures.insert("ready_ms".to_owned(), ready_ms);
        figures.insert("cpu_s".to_owned(), cpu_s);
        if let Some(tokens) = figures.get("tokens").copied().filter(|tokens| *tokens > 0.0) {
            figures.insert("cpu_ms_per_token".to_owned(), cpu_s * 1e3 / tokens);
            let front_cpu_s = after.front_cpu_s - before.front_cpu_s;
            figures.insert("front_cpu_ms_per_token".to_owned(), front_cpu_s * 1e3 / tokens);
            figures.insert("front_cpu_us_per_token".to_owned(), front_cpu_s * 1e6 / tokens);
        }
        #[allow(clippy::cast_precision_loss)]
        figures.insert("pss_mib".to_owned(), peak.max(after.pss_bytes) as f64 / f64::from(1 << 20));
        Ok(run)
    }
}

/// The peer's better configuration: a single trial may have been wrong about it.
fn better_of(default: Option<&Series>, best: Option<Series>, (figure, better): (&str, Better)) -> Option<Series> {
    let is_worse = |best: &Series| {
        let (best, default) = (best.figure(figure), default.and_then(|default| default.figure(figure)));
        best.zip(default).is_some_and(|(best, default)| match better {
            Better::Higher => best < default,
            Better::Lower => best > default,
        })
    };
    best.filter(|best| !is_worse(best)).or_else(|| default.cloned())
}

fn needs_batched_bench(load: &Load) -> bool {
    load.aims.iter().any(|aim| aim.against == Against::BatchedBench)
}

fn best_trial(trials: &[Trial], better: Better) -> Option<&str> {
    let worked = trials.iter().filter_map(|trial| Some((trial.name.as_str(), trial.value?)));
    let best = match better {
        Better::Higher => worked.max_by(|a, b| a.1.total_cmp(&b.1)),
        Better::Lower => worked.min_by(|a, b| a.1.total_cmp(&b.1)),
    };
    best.map(|(name, _)| name)
}

/// A run in a line.
fn summary(load: &Load, run: &Run) -> String {
    let mut names = vec![load.chosen_by.0];
    names.extend(load.aims.iter().map(|aim| aim.figure));
    if matches!(load.drive, Drive::Closed { .. }) {
        names.extend(["ttft_p50_ms", "itl_p50_ms", "itl_p99_ms"]);
    }
    if load.name.starts_with("front") {
        names.push("front_cpu_us_per_token");
    }
    names.push("wall_s");
    let mut seen = std::collections::BTreeSet::new();
    names.retain(|name| seen.insert(*name));
    let figures = names.iter().filter_map(|name| Some(format!("{name} {:.2}", run.figures.get(*name)?)));
    let line = figures.collect::<Vec<_>>().join(", ");
    match run.figures.get("failed").filter(|failed| **failed > 0.0) {
        Some(failed) => format!("{line}; {failed} failed: {}", run.errors.first().map_or("", String::as_str)),
        None => line,
    }
}

/// What trials said before, by load, peer and configurations.
struct Remembered(BTreeMap<String, Vec<Trial>>);

impl Remembered {
    fn read(path: &Path) -> Result<Self> {
        if !path.exists() {
            return Ok(Self(BTreeMap::new()));
        }
        let value: Value = serde_json::from_str(&fs::read_to_string(path)?)
            .with_context(|| format!("{} cannot be read: remove it", path.display()))?;
        Ok(Self(serde_json::from_value(value)?))
    }

    fn write(&self, path: &Path) -> Result<()> {
        fs::write(path, serde_json::to_string_pretty(&self.0)?).with_context(|| path.display().to_string())
    }
}

impl Aim {
    /// As it is kept in results.
    #[must_use]
    pub fn owned(&self) -> Aim<String> {
        Aim { figure: self.figure.to_owned(), against: self.against, better: self.better, bound: self.bound }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_better_configuration_is_that_of_the_runs() {
        let series = |name: &str, rates: &[f64]| Series {
            name: name.to_owned(),
            runs: rates.iter().map(|rate| BTreeMap::from([("rate".to_owned(), *rate)])).collect(),
            ..Series::default()
        };
        let (default, best) = (series(DEFAULT, &[3.0, 5.0, 4.0]), series("slots", &[3.0, 9.0, 2.0]));
        let chosen = |better| better_of(Some(&default), Some(best.clone()), ("rate", better)).map(|series| series.name);
        assert_eq!(chosen(Better::Higher).as_deref(), Some(DEFAULT));
        assert_eq!(chosen(Better::Lower).as_deref(), Some("slots"));
        assert_eq!(better_of(Some(&default), None, ("rate", Better::Lower)), Some(default));
    }

    #[test]
    fn the_best_trial_is_one_that_worked() {
        let trial = |name: &str, value| Trial {
            name: name.to_owned(),
            figure: "x".to_owned(),
            value,
            figures: BTreeMap::new(),
        };
        let trials = [trial("a", Some(2.0)), trial("b", None), trial("c", Some(3.0))];
        assert_eq!(best_trial(&trials, Better::Higher), Some("c"));
        assert_eq!(best_trial(&trials, Better::Lower), Some("a"));
        assert_eq!(best_trial(&[trial("b", None)], Better::Lower), None);
    }
}

//! What a benchmark leaves: one JSON file, from which the table and the plots are made.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    loads::{Against, Aim, Better},
    server::Setup,
    stats::{Distribution, median},
};

/// The version of the file's layout.
pub const SCHEMA: u32 = 1;
/// The file's name.
pub const FILE: &str = "results.json";
/// Largest file that is read.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// All of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// [`SCHEMA`].
    pub schema: u32,
    /// What the figures depend on. Loads that ran elsewhere do not stand beside each other.
    pub conditions: Conditions,
    /// The loads, in the order in which they are listed.
    pub loads: Vec<LoadResult>,
}

/// Machine and programs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Conditions {
    /// The processor's name.
    pub cpu: String,
    /// Processors that this process may use.
    pub cores: usize,
    /// Memory, in GiB.
    pub memory_gib: u64,
    /// The kernel.
    pub kernel: String,
    /// Threads of both servers.
    pub threads: usize,
    /// Whether the loads were only tried, in small.
    pub quick: bool,
    /// The peer's package, version, and flags of its build.
    pub peer: String,
    /// Our CPU backend, with the instructions that it uses.
    #[serde(default)]
    pub cpu_backend: String,
}

/// A load's results.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoadResult {
    /// Its name.
    pub name: String,
    /// What it is.
    pub title: String,
    /// The model's file.
    pub model: String,
    /// Sizes.
    pub drive: Value,
    /// When it ended, UTC.
    pub ended_at: String,
    /// Our version and commit.
    pub gantry: String,
    /// How long it took, in seconds.
    pub took_s: f64,
    /// Processes that wanted a processor when it began, as the kernel counts them (load average over a minute).
    pub load_average: f64,
    /// Ours.
    pub ours: Series,
    /// The peer as it comes.
    pub peer_default: Option<Series>,
    /// The peer's better configuration; that may be the one it comes with.
    pub peer_best: Option<Series>,
    /// Every configuration that was tried, with the figure by which one was chosen.
    pub trials: Vec<Trial>,
    /// llama-batched-bench, in tokens per second.
    pub batched_bench: Vec<f64>,
    /// What was to be reached.
    pub aims: Vec<Aim<String>>,
}

/// One configuration's runs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Its name.
    pub name: String,
    /// Why it is as it is.
    pub why: String,
    /// How it was started and asked.
    pub setup: Setup,
    /// The figures of each run.
    pub runs: Vec<BTreeMap<String, f64>>,
    /// Times to the first text of all runs, in milliseconds.
    pub ttft_ms: Distribution,
    /// Times between events of all runs, in milliseconds.
    pub itl_ms: Distribution,
    /// Some of what failed.
    pub errors: Vec<String>,
}

/// One try of a configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// The configuration.
    pub name: String,
    /// The figure that was looked at.
    pub figure: String,
    /// Its value; none when the configuration did not work.
    pub value: Option<f64>,
    /// All figures of the run: what is best by the one may be worse by another.
    #[serde(default)]
    pub figures: BTreeMap<String, f64>,
}

/// How an aim stands.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// The aim.
    pub aim: Aim<String>,
    /// Our figure.
    pub ours: Option<f64>,
    /// The peer's, as it comes.
    pub peer_default: Option<f64>,
    /// The peer's, in its better configuration, or llama-batched-bench's.
    pub peer_best: Option<f64>,
    /// Ours divided by what it is compared with; our figure itself where it is compared with nothing.
    pub ratio: Option<f64>,
    /// Whether the aim is met. A figure that is missing misses it.
    pub met: bool,
}

impl Series {
    /// The median of a figure over the runs.
    #[must_use]
    pub fn figure(&self, name: &str) -> Option<f64> {
        median(self.values(name))
    }

    /// The least and the most of a figure over the runs.
    #[must_use]
    pub fn range(&self, name: &str) -> Option<(f64, f64)> {
        let fold = |of: fn(f64, f64) -> f64| self.values(name).reduce(of);
        Some((fold(f64::min)?, fold(f64::max)?))
    }

    fn values(&self, name: &str) -> impl Iterator<Item = f64> {
        self.runs.iter().filter_map(move |run| run.get(name).copied())
    }
}

impl LoadResult {
    /// How each aim stands.
    #[must_use]
    pub fn verdicts(&self) -> Vec<Verdict> {
        self.aims.iter().map(|aim| self.verdict(aim)).collect()
    }

    fn verdict(&self, aim: &Aim<String>) -> Verdict {
        let of = |series: &Option<Series>| series.as_ref().and_then(|series| series.figure(&aim.figure));
        let ours = self.ours.figure(&aim.figure);
        let peer_default = of(&self.peer_default);
        let peer_best = match aim.against {
            Against::BatchedBench => median(self.batched_bench.iter().copied()),
            _ => of(&self.peer_best),
        };
        let divisor = match aim.against {
            Against::PeerDefault => peer_default,
            Against::PeerBest | Against::BatchedBench => peer_best,
            Against::Itself => Some(1.0),
        };
        let ratio = ours.zip(divisor).map(|(ours, divisor)| ours / divisor).filter(|ratio| ratio.is_finite());
        let met = ratio.is_some_and(|ratio| match aim.better {
            Better::Higher => ratio >= aim.bound,
            Better::Lower => ratio <= aim.bound,
        });
        Verdict { aim: aim.clone(), ours, peer_default, peer_best, ratio, met }
    }
}

impl Results {
    /// Of no load yet.
    #[must_use]
    pub fn new(conditions: Conditions) -> Self {
        Self { schema: SCHEMA, conditions, loads: Vec::new() }
    }

    /// Those in `folder`, if there are any.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn read(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(FILE);
        if !path.exists() {
            return Ok(None);
        }
        let bytes = fs::metadata(&path)?.len();
        ensure!(bytes <= MAX_FILE_BYTES, "{} has {bytes} bytes, more than {MAX_FILE_BYTES}", path.display());
        let results: Self = serde_json::from_str(&fs::read_to_string(&path)?)
            .with_context(|| format!("{} is not of this version: remove it", path.display()))?;
        Ok(Some(results))
    }

    /// Those in `folder` that new ones are to stand beside. Those from other conditions are not written over, since they may
    /// have taken hours; those of a quick run took minutes and say nothing.
    ///
    /// # Errors
    /// When those that are there were measured under other conditions, or cannot be read.
    pub fn beside(folder: &Path, conditions: &Conditions) -> Result<Option<Self>> {
        let there = Self::read(folder)?;
        if let Some(results) = there.as_ref().filter(|results| results.conditions != *conditions && !conditions.quick) {
            bail!(
                "{} has results from other conditions: name another folder with --out, or remove it\n  there: {}\n  here:  {}",
                folder.display(),
                serde_json::to_string(&results.conditions)?,
                serde_json::to_string(conditions)?
            );
        }
        Ok(there.filter(|results| results.conditions == *conditions))
    }

    /// Writes them to `folder`.
    ///
    /// # Errors
    /// When that fails.
    pub fn write(&self, folder: &Path) -> Result<()> {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        fs::write(folder.join(FILE), serde_json::to_string_pretty(self)? + "\n")?;
        Ok(())
    }

    /// Adds a load, in place of an earlier run of it; `order` are the names of all loads.
    pub fn add(&mut self, load: LoadResult, order: &[&str]) {
        self.loads.retain(|other| other.name != load.name);
        self.loads.push(load);
        self.loads.sort_by_key(|load| order.iter().position(|name| *name == load.name));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn conditions(cpu: &str, quick: bool) -> Conditions {
        Conditions {
            cpu: cpu.to_owned(),
            cores: 2,
            memory_gib: 24,
            kernel: String::from("6.18"),
            threads: 2,
            quick,
            peer: String::from("b1"),
            cpu_backend: String::from("haswell"),
        }
    }

    #[test]
    fn results_from_other_conditions_are_not_written_over() {
        let folder = tempfile::tempdir().unwrap();
        let here = conditions("one", false);
        assert_eq!(Results::beside(folder.path(), &here).unwrap(), None, "nothing is there yet");
        let results = Results::new(here.clone());
        results.write(folder.path()).unwrap();
        assert_eq!(Results::beside(folder.path(), &here).unwrap(), Some(results));
        let refused = Results::beside(folder.path(), &conditions("another", false)).unwrap_err().to_string();
        for part in [&*folder.path().to_string_lossy(), "--out", "\"one\"", "\"another\""] {
            assert!(refused.contains(part), "{refused}");
        }
        let quick = conditions("another", true);
        assert_eq!(Results::beside(folder.path(), &quick).unwrap(), None, "a quick run says nothing, and begins anew");
    }
}

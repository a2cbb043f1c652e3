//! llama.cpp's own programs: how its server is configured for each load, and what its batched benchmark says.
//!
//! The server runs as it comes and with the best of the configurations below, which is found by trying each of them.
//! What helps nowhere is not listed: `-fa on` (its default is to turn it on wherever it can), `-cram` above its default (8 GiB
//! of prompts kept in RAM, more than any load needs), `--mlock`, `--numa`,
//! `--poll` and `--prio` (they matter on machines with idle cores), more `--threads-http` (it has one for each slot).
//! `-fa off` is tried where prompts are long.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use tokio::{process::Command, time::timeout};

use crate::{
    drive::Drive,
    loads::{Load, MANY_SLOTS},
    prompts::MODEL_NAME,
    server::Setup,
};

/// Longest time that llama-batched-bench may take.
const BATCHED_BENCH_LIMIT: Duration = Duration::from_secs(1800);

/// A configuration of the peer's server.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// Its name in results.
    pub name: &'static str,
    /// Why it may be good.
    pub why: &'static str,
    /// Flags, besides those that every run has.
    pub args: Vec<String>,
    /// Environment.
    pub env: Vec<(String, String)>,
}

/// The configuration that it comes with.
pub const DEFAULT: &str = "default";

impl Candidate {
    fn new(name: &'static str, why: &'static str, args: &[&str]) -> Self {
        let args = args.iter().map(|&arg| arg.to_owned()).collect();
        Self { name, why, args, env: Vec::new() }
    }

    /// With GNU OpenMP's threads asleep between graphs, instead of spinning on cores that the client needs too. Which of the
    /// two is better depends on the machine.
    fn passive(mut self, name: &'static str) -> Self {
        self.name = name;
        self.env.push(("OMP_WAIT_POLICY".to_owned(), "passive".to_owned()));
        self
    }

    /// With attention as matrix products: on a CPU few tokens behind a thousand others take less.
    fn without_flash_attention(mut self, name: &'static str) -> Self {
        self.name = name;
        self.args.extend(["-fa".to_owned(), "off".to_owned()]);
        self
    }

    /// With nothing sampled but the best token. By default temperature 0 still goes through the whole chain.
    fn greedy(mut self) -> Self {
        self.args.extend(["--samplers", "top_k", "--top-k", "1"].map(str::to_owned));
        self
    }

    /// Whether its name has one of these words in it. The default is never left out: aims are against it.
    #[must_use]
    pub fn is_skipped(&self, words: &[String]) -> bool {
        self.name != DEFAULT && words.iter().any(|word| self.name.contains(word.as_str()))
    }

    /// The setup for a load.
    #[must_use]
    pub fn setup(&self, folder: &Path, model: &Path, load: &Load, threads: usize) -> Setup {
        let mut args = vec!["--model".to_owned(), model.display().to_string()];
        args.extend(["--alias".to_owned(), MODEL_NAME.to_owned()]);
        args.extend(["--ctx-size".to_owned(), load.ctx_size.to_string()]);
        args.extend(["--threads".to_owned(), threads.to_string()]);
        args.extend(self.args.clone());
        Setup { program: folder.join("llama-server"), args, env: self.env.clone(), ..Setup::default() }
    }
}

/// The configurations that are tried for a load; the first is the default.
#[must_use]
pub fn candidates(load: &Load) -> Vec<Candidate> {
    let slots = load.parallel.to_string();
    let slots = slots.as_str();
    let mut list = vec![Candidate::new(DEFAULT, "as it comes: 4 slots over one KV buffer", &[])];
    let mut add = |candidate: Candidate| list.push(candidate);
    let split = Candidate::new("slots", "a slot for each stream, each with cells of its own", &["-np", slots]);
    let unified = Candidate::new("slots-unified", "a slot for each stream over one KV buffer", &["-np", slots, "-kvu"]);
    match load.name {
        "lookup" => {
            let lookup = |name, why, flags: &str| {
                let flags: Vec<&str> = ["-np", "1"].into_iter().chain(flags.split_whitespace()).collect();
                Candidate::new(name, why, &flags).greedy()
            };
            let mut add = |candidate: Candidate, passive| {
                add(candidate.clone());
                add(candidate.passive(passive));
            };
            add(lookup("plain", "one slot, no lookup", ""), "plain-passive");
            let simple = "--spec-type ngram-simple --spec-ngram-simple-size-n";
            let long = format!("{simple} 12 --spec-ngram-simple-size-m 16");
            let why = "drafts of 16 tokens after 12 that were there before";
            add(lookup("ngram-simple-12", why, &long), "ngram-simple-12-passive");
            let short = format!("{simple} 4 --spec-ngram-simple-size-m 8");
            let why = "drafts of 8 tokens after 4 that were there before";
            add(lookup("ngram-simple-4", why, &short), "ngram-simple-4-passive");
            let map = "--spec-type ngram-map-k --spec-ngram-map-k-size-n 8 --spec-ngram-map-k-size-m 16";
            let why = "the same through a map, which keeps account of what was accepted";
            add(lookup("ngram-map-k", why, map), "ngram-map-k-passive");
            let hashes = "--spec-type ngram-mod --spec-ngram-mod-n-match 8 --spec-ngram-mod-n-min 4 \
                          --spec-ngram-mod-n-max 16";
            let why = "what --spec-default turns on, with drafts that suit a CPU";
            add(lookup("ngram-mod", why, hashes), "ngram-mod-passive");
            let cache = "--spec-type ngram-cache --spec-draft-n-max 8";
            add(lookup("ngram-cache", "drafts from the statistics of short n-grams", cache), "ngram-cache-passive");
        }
        "shared-prefix" => {
            add(unified.clone().greedy());
            add(split.clone().greedy());
            add(unified.greedy().passive("slots-unified-passive"));
            add(split.greedy().passive("slots-passive"));
        }
        "intruder" => {
            let batch = |name, size: &str| {
                let why = "a small batch, so that a prompt holds the others up for less long";
                Candidate::new(name, why, &["-np", slots, "-b", size, "-ub", size]).greedy()
            };
            add(split.clone().greedy());
            add(split.clone().greedy().passive("slots-passive"));
            add(batch("batch-128", "128"));
            add(batch("batch-128", "128").passive("batch-128-passive"));
            add(batch("batch-32", "32"));
            add(batch("batch-32", "32").passive("batch-32-passive"));
            add(split.greedy().without_flash_attention("slots-fa-off"));
            add(batch("batch-32", "32").without_flash_attention("batch-32-fa-off"));
        }
        "prefixes" => {
            let why = "slots, and chunks of other prompts reused by shifting them";
            let reuse = Candidate::new("cache-reuse", why, &["-np", slots, "--cache-reuse", "64"]).greedy();
            add(reuse.clone());
            add(reuse.passive("cache-reuse-passive"));
            add(unified.clone().greedy());
            add(unified.greedy().passive("slots-unified-passive"));
            add(split.clone().greedy());
            add(split.clone().greedy().passive("slots-passive"));
            add(split.greedy().without_flash_attention("slots-fa-off"));
            let many = MANY_SLOTS.to_string();
            let why = "as many slots as ours has, over one KV buffer";
            add(Candidate::new("many-slots-unified", why, &["-np", &many, "-kvu"]).greedy());
        }
        "memory" => {
            let why = "slots, and smaller buffers for computing";
            add(Candidate::new("ubatch-128", why, &["-np", slots, "-b", "512", "-ub", "128"]));
            let why = "slots, smaller buffers, and no prompts kept in RAM";
            add(Candidate::new("no-cache-ram", why, &["-np", slots, "-b", "512", "-ub", "128", "-cram", "0"]));
            add(split);
            add(unified);
        }
        _ => {
            add(split.clone().greedy());
            add(split.greedy().passive("slots-passive"));
            add(unified.clone().greedy());
            add(unified.greedy().passive("slots-unified-passive"));
        }
    }
    list
}

/// Its version, as llama-server tells it.
///
/// # Errors
/// When it cannot be run.
pub async fn version(folder: &Path) -> Result<String> {
    let program = folder.join("llama-server");
    let output = Command::new(&program)
        .arg("--version")
        .output()
        .await
        .with_context(|| format!("cannot run {}: hack/bench.sh builds it", program.display()))?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    let line = text.lines().find(|line| line.contains("version")).unwrap_or(text.trim());
    Ok(line.trim().to_owned())
}

/// What of a line of llama-batched-bench is looked at.
#[derive(Deserialize)]
struct BatchedBenchLine {
    pl: usize,
    speed_tg: f64,
}

/// Tokens per second that llama-batched-bench decodes at a batch.
///
/// # Errors
/// When it fails or says nothing about that batch.
pub async fn batched_bench(
    folder: &Path,
    model: &Path,
    load: &Load,
    (prompt_tokens, tokens): (usize, u32),
    threads: usize,
) -> Result<f64> {
    let program: PathBuf = folder.join("llama-batched-bench");
    let Drive::Closed { streams: batch, .. } = load.drive else {
        bail!("{}: a batch is of streams that go on", load.name)
    };
    let run = Command::new(&program)
        .args(["--model", &model.display().to_string(), "--ctx-size", &load.ctx_size.to_string()])
        .args(["--threads", &threads.to_string(), "-npp", &prompt_tokens.to_string(), "-ntg", &tokens.to_string()])
        .args(["-npl", &batch.to_string(), "--output-format", "jsonl"])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = timeout(BATCHED_BENCH_LIMIT, run).await.context("llama-batched-bench takes too long")??;
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "llama-batched-bench failed with {}\n{text}", output.status);
    parse_batched_bench(&text, batch)
        .with_context(|| format!("llama-batched-bench said nothing about a batch of {batch}\n{text}"))
}

fn parse_batched_bench(text: &str, batch: usize) -> Option<f64> {
    // Its log goes to the same place and may put a prefix before a line.
    text.lines()
        .filter_map(|line| serde_json::from_str::<BatchedBenchLine>(&line[line.find('{')?..]).ok())
        .find(|line| line.pl == batch)
        .map(|line| line.speed_tg)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::loads;

    #[test]
    fn every_load_tries_the_default_first_and_nothing_twice() {
        for load in loads::all(false) {
            let candidates = candidates(&load);
            assert_eq!((candidates[0].name, candidates[0].args.len()), (DEFAULT, 0));
            let names: std::collections::BTreeSet<_> = candidates.iter().map(|candidate| candidate.name).collect();
            assert_eq!(names.len(), candidates.len(), "{}", load.name);
        }
    }

    #[test]
    fn what_is_skipped_is_never_the_default() {
        let load = loads::all(false).into_iter().find(|load| load.name == "shared-prefix").unwrap();
        let left = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
            let left = candidates(&load).into_iter().filter(|candidate| !candidate.is_skipped(&words));
            left.map(|candidate| candidate.name).collect::<Vec<_>>()
        };
        assert_eq!(left(&["passive"]), ["default", "slots-unified", "slots"]);
        assert_eq!(left(&["passive", "unified", "default"]), ["default", "slots"]);
        assert_eq!(left(&[]).len(), 5);
    }

    #[test]
    fn batched_bench_is_read_past_its_log() {
        let text =
            "main: n_kv_max = 4096\n\n0.00.1 I {\"n_kv\": 1, \"pl\": 8, \"speed_tg\": 86.5, \"t\": 1.0}\nbye {\n";
        assert_eq!(parse_batched_bench(text, 8), Some(86.5));
        assert_eq!(parse_batched_bench(text, 4), None);
    }
}

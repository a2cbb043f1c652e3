//! What the processes of the server hold, over time, and what the server says of itself.
//!
//! The rule for flat memory: a process' life is cut in four; the first quarter is for warming up, and the median of the
//! last may be above that of the second by [`MAX_GROWTH_PERCENT`] and [`GROWTH_IGNORED_BYTES`] at most. A worker that was
//! replaced is another process; one that lived for fewer than [`MIN_SAMPLES`] is not judged.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::SocketAddr,
    time::Duration,
};

use anyhow::Result;
use serde::Serialize;

use crate::{client, processes, stats::median};

/// How often processes are looked at.
pub const INTERVAL: Duration = Duration::from_millis(500);
/// How much more may be held in the last quarter than in the second.
pub const MAX_GROWTH_PERCENT: u64 = 10;
/// What is no growth beside that: pages that an allocator has and keeps.
pub const GROWTH_IGNORED_BYTES: u64 = 2 << 20;
/// Looks at a process from which its growth can be told: two minutes', since a worker warms up for most of one.
pub const MIN_SAMPLES: usize = 240;

/// One look at a process.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Sample {
    /// Seconds since the start.
    pub at_s: f64,
    /// Memory in RAM.
    pub resident_bytes: u64,
    /// Files and sockets.
    pub open_files: usize,
}

/// All looks at all processes.
#[derive(Debug)]
pub struct Watch {
    front: u32,
    workers: BTreeSet<u32>,
    lives: BTreeMap<u32, Vec<Sample>>,
}

/// What became of one process' memory.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Life {
    /// `front`, `worker`, or `template`: a worker's process that renders chat templates.
    pub process: String,
    /// Its id.
    pub pid: u32,
    /// How long it was looked at, in seconds.
    pub seconds: f64,
    /// Median of the second quarter.
    pub second_quarter_bytes: u64,
    /// Median of the last quarter.
    pub last_quarter_bytes: u64,
    /// The most.
    pub most_bytes: u64,
    /// The most files and sockets.
    pub most_open_files: usize,
    /// Whether it is long enough to be judged.
    pub judged: bool,
    /// Whether the memory is flat.
    pub flat: bool,
}

impl Watch {
    pub(super) fn new(front: u32) -> Self {
        Self { front, workers: BTreeSet::new(), lives: BTreeMap::new() }
    }

    /// Looks at the front, its workers and what those have started.
    pub(super) fn look(&mut self, since: Duration) {
        self.workers.extend(processes::children(self.front));
        for pid in processes::tree(self.front) {
            let (Some(resident_bytes), Some(open_files)) = (processes::resident_bytes(pid), processes::open_files(pid))
            else {
                // It has just ended.
                continue;
            };
            let sample = Sample { at_s: since.as_secs_f64(), resident_bytes, open_files };
            self.lives.entry(pid).or_default().push(sample);
        }
    }

    fn kind(&self, pid: u32) -> &'static str {
        match pid {
            pid if pid == self.front => "front",
            pid if self.workers.contains(&pid) => "worker",
            _ => "template",
        }
    }

    /// What became of each process, the front first.
    #[must_use]
    pub fn lives(&self) -> Vec<Life> {
        let mut lives: Vec<Life> = self
            .lives
            .iter()
            .map(|(pid, samples)| Life { process: self.kind(*pid).to_owned(), pid: *pid, ..life(samples) })
            .collect();
        lives.sort_by_key(|life| (life.process != "front", life.pid));
        lives
    }
}

/// What is held now: the front, then the workers.
impl fmt::Display for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let last = self.lives.values().filter_map(|life| life.last()).map(|sample| sample.at_s).fold(0.0, f64::max);
        let held = |kind: &'static str| {
            self.lives
                .iter()
                .filter(move |(pid, _)| self.kind(**pid) == kind)
                .filter_map(|(_, life)| life.last())
                .filter(move |sample| sample.at_s >= last)
                .map(|sample| mib(sample.resident_bytes))
                .collect::<Vec<_>>()
                .join(" ")
        };
        write!(f, "RSS front {} workers {} MiB", held("front"), held("worker"))
    }
}

fn life(samples: &[Sample]) -> Life {
    let quarter = |number: usize| {
        let part = &samples[samples.len() * number / 4..samples.len() * (number + 1) / 4];
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        let bytes = median(part.iter().map(|sample| sample.resident_bytes as f64)).unwrap_or_default() as u64;
        bytes
    };
    let (second, last) = (quarter(1), quarter(3));
    let seconds = samples.first().zip(samples.last()).map_or(0.0, |(first, last)| last.at_s - first.at_s);
    Life {
        process: String::new(),
        pid: 0,
        seconds,
        second_quarter_bytes: second,
        last_quarter_bytes: last,
        most_bytes: samples.iter().map(|sample| sample.resident_bytes).max().unwrap_or_default(),
        most_open_files: samples.iter().map(|sample| sample.open_files).max().unwrap_or_default(),
        judged: samples.len() >= MIN_SAMPLES,
        flat: last <= second + second * MAX_GROWTH_PERCENT / 100 + GROWTH_IGNORED_BYTES,
    }
}

pub(super) fn mib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}

/// What the server says of itself.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Figures {
    /// Requests that hold a sequence.
    pub running: u64,
    /// Requests that wait.
    pub queued: u64,
    /// Requests that workers have.
    pub workers_have: u64,
    /// Workers that get requests.
    pub dispatchable: u64,
    /// Workers that died.
    pub restarts: u64,
    /// Connections, the one that asks included.
    pub connections: u64,
    /// Tokens of prompts that were answered.
    pub prompt_tokens: u64,
    /// Of those, there already.
    pub cached_tokens: u64,
    /// Tokens of answers.
    pub completion_tokens: u64,
    /// Requests for text that were answered.
    pub answered: u64,
    /// Bytes of prompts in the memory of all workers.
    pub cache_ram_bytes: u64,
    /// Bytes of prompts on disk, as each worker knows them: what they share, as often as there are workers.
    pub cache_disk_bytes: u64,
}

/// Asks a server for its figures.
pub(super) async fn figures(address: SocketAddr) -> Result<Figures> {
    Ok(read(&client::get(address, "/metrics").await?))
}

fn read(metrics: &str) -> Figures {
    let sum = |wanted: &[&str]| {
        let lines = metrics
            .lines()
            .filter(|line| line.starts_with(wanted[0]) && wanted[1..].iter().all(|part| line.contains(part)));
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let count = |line: &str| line.rsplit(' ').next()?.parse::<f64>().ok().map(|value| value.round() as u64);
        lines.filter_map(count).sum()
    };
    Figures {
        running: sum(&["gantry_requests_running{"]),
        queued: sum(&["gantry_requests_queued{"]),
        workers_have: sum(&["gantry_worker_requests{"]),
        dispatchable: sum(&["gantry_worker_dispatchable{"]),
        restarts: sum(&["gantry_worker_restarts_total{"]),
        connections: sum(&["gantry_connections "]),
        prompt_tokens: sum(&["gantry_prompt_tokens_total{"]),
        cached_tokens: sum(&["gantry_cached_tokens_total{"]),
        completion_tokens: sum(&["gantry_completion_tokens_total{"]),
        answered: sum(&["gantry_requests_total{", "completions\"", "outcome=\"ok\""]),
        cache_ram_bytes: sum(&["gantry_engine_prefix_cache_bytes{", "tier=\"ram\""]),
        cache_disk_bytes: sum(&["gantry_engine_prefix_cache_bytes{", "tier=\"disk\""]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(bytes: impl Iterator<Item = u64>) -> Vec<Sample> {
        (0_u32..)
            .zip(bytes)
            .map(|(at, resident_bytes)| Sample { at_s: at.into(), resident_bytes, open_files: 9 })
            .collect()
    }

    #[test]
    fn memory_that_goes_on_growing_is_not_flat() {
        const MIB: u64 = 1 << 20;
        let warming = life(&samples((0..400).map(|i| (50 + i.min(50)) * MIB)));
        assert!(warming.judged && warming.flat, "{warming:?}");
        let leaking = life(&samples((0..400).map(|i| (50 + i / 4) * MIB)));
        assert!(leaking.judged && !leaking.flat, "{leaking:?}");
        let spike = life(&samples((0..400).map(|i| if i == 190 { 900 } else { 50 } * MIB)));
        assert!(spike.flat && spike.most_bytes == 900 * MIB, "{spike:?}");
        assert!(!life(&samples((0..MIN_SAMPLES as u64 - 1).map(|i| i * MIB))).judged);
        assert_eq!(life(&[]).most_bytes, 0);
    }

    #[test]
    fn figures_are_sums_over_their_labels() {
        let text = "# HELP x\ngantry_worker_requests{worker=\"0\"} 2\ngantry_worker_requests{worker=\"1\"} 3\n\
            gantry_worker_requests_running{worker=\"0\"} 1\ngantry_connections 4\n\
            gantry_requests_total{route=\"completions\",status=\"200\",outcome=\"ok\"} 7\n\
            gantry_requests_total{route=\"chat_completions\",status=\"200\",outcome=\"ok\"} 8\n\
            gantry_requests_total{route=\"completions\",status=\"400\",outcome=\"refused\"} 9\n\
            gantry_engine_prefix_cache_bytes{worker=\"0\",tier=\"ram\"} 10\n\
            gantry_engine_prefix_cache_bytes{worker=\"1\",tier=\"ram\"} 11\n\
            gantry_engine_prefix_cache_bytes{worker=\"0\",tier=\"disk\"} 12\n# EOF\n";
        let figures = read(text);
        assert_eq!((figures.workers_have, figures.connections, figures.answered), (5, 4, 15));
        assert_eq!((figures.cache_ram_bytes, figures.cache_disk_bytes), (21, 12));
    }
}

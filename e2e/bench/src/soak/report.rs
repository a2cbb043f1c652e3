//! What came of a soak: a table for people, JSON for programs, and which check failed.

use std::{collections::BTreeMap, fmt, fs, path::Path};

use anyhow::{Context, Result};
use serde::Serialize;

use super::{
    Soak, WORKERS,
    check::{Difference, Tally},
    faults::{Fault, Faults},
    watch::{GROWTH_IGNORED_BYTES, Life, MAX_GROWTH_PERCENT, MIN_SAMPLES, Watch, mib},
};

/// In a soak that takes so long, a worker's memory must have been judged;
const MIN_SECONDS_FOR_WORKERS: f64 = 400.0;
/// in one that takes so long, as many as there are: those that are there in the last quarter lived all of it.
const MIN_SECONDS_FOR_ALL_WORKERS: f64 = 800.0;
/// Texts that differ from those alone, as many as the table shows.
const DIFFERENCES_TOLD: usize = 5;

/// Something that must hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What.
    pub name: String,
    /// Whether it does.
    pub passed: bool,
    /// The figures.
    pub detail: String,
}

impl Check {
    /// One that was made.
    pub fn new(name: &str, passed: bool, detail: impl Into<String>) -> Self {
        Self { name: name.to_owned(), passed, detail: detail.into() }
    }
}

/// What came of a soak.
#[derive(Debug, Serialize)]
pub struct SoakReport {
    /// Requests that were sent.
    pub requests: u64,
    /// The seed.
    pub seed: u64,
    /// Seconds from the first request to the last answer.
    pub wall_s: f64,
    /// Requests a second.
    pub requests_per_s: f64,
    /// What became of them.
    pub tally: Tally,
    /// What was done to the server.
    pub faults: BTreeMap<Fault, u64>,
    /// The memory of its processes.
    pub lives: Vec<Life>,
    /// What must hold.
    pub checks: Vec<Check>,
}

impl SoakReport {
    pub(super) fn new(
        soak: &Soak,
        wall_s: f64,
        tally: Tally,
        faults: &Faults,
        watch: &Watch,
        audited: Vec<Check>,
    ) -> Self {
        let lives = watch.lives();
        let mut checks = tally.checks(soak.model.is_some());
        checks.push(flat(&lives));
        checks.extend(audited);
        let requests = tally.ended();
        let requests_per_s = requests as f64 / wall_s.max(0.001);
        Self { requests, seed: soak.seed, wall_s, requests_per_s, tally, faults: faults.counts(), lives, checks }
    }

    /// What does not hold.
    #[must_use]
    pub fn failed(&self) -> Vec<&Check> {
        self.checks.iter().filter(|check| !check.passed).collect()
    }

    /// Writes it as JSON.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, file: &Path) -> Result<()> {
        fs::write(file, serde_json::to_string_pretty(self)?).with_context(|| file.display().to_string())
    }
}

fn flat(lives: &[Life]) -> Check {
    let judged: Vec<&Life> = lives.iter().filter(|life| life.judged).collect();
    let growing: Vec<String> = judged
        .iter()
        .filter(|life| !life.flat)
        .map(|life| {
            let (before, after) = (mib(life.second_quarter_bytes), mib(life.last_quarter_bytes));
            format!("; {} {} grew from {before} to {after} MiB", life.process, life.pid)
        })
        .collect();
    let rule = format!(
        "{} of {} processes lived for {MIN_SAMPLES} looks; last quarter <= second + {MAX_GROWTH_PERCENT}% + {} MiB{}",
        judged.len(),
        lives.len(),
        mib(GROWTH_IGNORED_BYTES),
        growing.concat(),
    );
    // A long soak without workers that were looked at for long enough shows nothing.
    let took = |seconds: f64| lives.iter().any(|life| life.process == "front" && life.seconds > seconds);
    let wanted = match took(MIN_SECONDS_FOR_WORKERS) {
        true if took(MIN_SECONDS_FOR_ALL_WORKERS) => WORKERS as usize,
        long => usize::from(long),
    };
    let workers = judged.iter().filter(|life| life.process == "worker").count();
    let rule = match workers < wanted {
        true => format!("{rule}; {workers} workers are among them, of {wanted} at least"),
        false => rule,
    };
    Check::new("memory is flat", growing.is_empty() && workers >= wanted, rule)
}

impl fmt::Display for SoakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { requests, seed, wall_s, requests_per_s, tally, faults, lives, checks } = self;
        writeln!(f, "\n{requests} requests in {wall_s:.0} s ({requests_per_s:.1}/s), seed {seed}\n")?;
        let header = ["sent", "right", "differ", "explained", "left", "wrong"];
        writeln!(f, "{:<12}{}", "request", header.map(|name| format!("{name:>10}")).concat())?;
        for (kind, c) in &tally.kinds {
            let row = [c.sent, c.right, c.diverged, c.explained, c.left, c.wrong].map(|count| format!("{count:>10}"));
            writeln!(f, "{:<12}{}", format!("{kind:?}"), row.concat())?;
        }
        let list = |counts: Vec<String>| if counts.is_empty() { "none".to_owned() } else { counts.join(", ") };
        let explained = tally.explained.iter().map(|(why, count)| format!("{why:?} {count}")).collect();
        writeln!(f, "\nexplained: {}", list(explained))?;
        writeln!(f, "faults: {}", list(faults.iter().map(|(fault, count)| format!("{fault:?} {count}")).collect()))?;
        let header = ["seconds", "2nd quarter", "last quarter", "most MiB", "most files"];
        writeln!(f, "\n{:<16}{}", "process", header.map(|name| format!("{name:>14}")).concat())?;
        for life in lives {
            let quarters = [life.second_quarter_bytes, life.last_quarter_bytes, life.most_bytes].map(mib);
            let [second, last, most] = quarters;
            let row = [format!("{:.0}", life.seconds), second, last, most, life.most_open_files.to_string()];
            let row = row.map(|figure| format!("{figure:>14}")).concat();
            let note = if life.judged { "" } else { "  too short to be judged" };
            writeln!(f, "{:<16}{row}{note}", format!("{} {}", life.process, life.pid))?;
        }
        writeln!(f)?;
        for check in checks {
            let mark = if check.passed { "ok  " } else { "FAIL" };
            writeln!(f, "{mark} {}: {}", check.name, check.detail)?;
        }
        tally.wrong.iter().try_for_each(|wrong| writeln!(f, "wrong: {wrong}"))?;
        for Difference { request, margin, text, alone, .. } in tally.differences.iter().take(DIFFERENCES_TOLD) {
            let margin = margin.map_or_else(|| "unknown".to_owned(), |margin| format!("{margin:.2} nats"));
            writeln!(f, "request {request:?} differs, margin {margin}:\n  {text:?}\n  {alone:?} alone")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_grows_fails_and_one_too_short_is_no_witness() {
        let life = |judged, flat| Life {
            process: "worker".to_owned(),
            pid: 7,
            seconds: 60.0,
            second_quarter_bytes: 10 << 20,
            last_quarter_bytes: 20 << 20,
            most_bytes: 20 << 20,
            most_open_files: 9,
            judged,
            flat,
        };
        assert!(flat(&[life(true, true), life(false, false)]).passed);
        let failed = flat(&[life(true, true), life(true, false)]);
        assert!(!failed.passed && failed.detail.contains("worker 7 grew from 10.0 to 20.0 MiB"), "{failed:?}");
        let front = |seconds| Life { process: "front".to_owned(), seconds, ..life(true, true) };
        assert!(flat(&[front(60.0), life(false, false)]).passed);
        assert!(!flat(&[front(600.0), life(false, false)]).passed, "a long soak must judge a worker");
        assert!(flat(&[front(600.0), life(true, true)]).passed);
        assert!(!flat(&[front(900.0), life(true, true)]).passed, "a longer one as many as there are");
        assert!(flat(&[front(900.0), life(true, true), life(true, true)]).passed);
    }
}

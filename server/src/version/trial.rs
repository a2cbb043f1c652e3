//! What the workers of a version that does not answer yet may take of memory, and who ends one that takes more.
//!
//! One process past the limit of its container ends the whole container: a candidate that takes more than its header lets
//! expect would take with it the version that answers. So while it is on trial each of its workers is watched by a thread of
//! its own, which nothing else that this process does can hold up, and is killed by itself where it passes what was predicted
//! and a headroom. Memory that counts is what the kernel cannot take back: anonymous and shared pages, not those of files.
//! Once the version answers the trial is over, for good: to end it then would do the harm that this prevents, and what a
//! serving worker grows by is bounded by its engine, which drops what it can spare.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::process::{Pid, Signal, kill_process};

use crate::gates::report::quantity;
use crate::limits::TRIAL_PERIOD;

/// What each worker of a version may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrialLimit {
    /// What it is predicted to take.
    pub predicted_bytes: u64,
    /// And what it may take besides.
    pub headroom_bytes: u64,
}

impl TrialLimit {
    fn bytes(self) -> u64 {
        self.predicted_bytes.saturating_add(self.headroom_bytes)
    }
}

/// The trial of a version.
#[derive(Debug)]
pub struct Trial {
    workers: Vec<TrialLimit>,
    /// Main memory for prefixes, which fills with requests and is the engine's to give back.
    cache_bytes: u64,
    loaded: AtomicBool,
    over: AtomicBool,
}

impl Trial {
    /// Begins one; `cache_bytes` are what each worker may keep of prefixes once it is loaded.
    #[must_use]
    pub fn new(workers: Vec<TrialLimit>, cache_bytes: u64) -> Arc<Self> {
        let (loaded, over) = (AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(Self { workers, cache_bytes, loaded, over })
    }

    /// Every worker has loaded the model.
    pub(super) fn loaded(&self) {
        self.loaded.store(true, Ordering::Relaxed);
    }

    /// The version answers.
    pub(super) fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// What a worker may take now; `None`: anything.
    fn limit_bytes(&self, worker: usize) -> Option<u64> {
        let limit = self.workers.get(worker).filter(|_| !self.over.load(Ordering::Relaxed))?;
        let cache = if self.loaded.load(Ordering::Relaxed) { self.cache_bytes } else { 0 };
        Some(limit.bytes().saturating_add(cache))
    }

    /// Why a worker was ended.
    pub(super) fn reason(&self, worker: usize, taken_bytes: u64) -> String {
        let limit = self.workers.get(worker).copied();
        let TrialLimit { predicted_bytes, headroom_bytes } =
            limit.unwrap_or(TrialLimit { predicted_bytes: 0, headroom_bytes: 0 });
        format!(
            "it took {} of memory, and {} were predicted for it, with a headroom of {}, so that it was ended before it \
             harmed the version that answers",
            quantity(taken_bytes),
            quantity(predicted_bytes),
            quantity(headroom_bytes)
        )
    }
}

/// The thread that watches a worker.
pub(super) struct Watch {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Option<u64>>,
}

impl Watch {
    /// Watches the process `pid`, which nobody has waited for until [`Watch::end`] returns.
    pub(super) fn start(trial: Arc<Trial>, worker: usize, pid: u32) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("trial".to_owned());
        let thread = thread.spawn(move || watch(&trial, worker, pid, &stopped))?;
        Ok(Self { stop, thread })
    }

    /// Ends it; what the worker had taken if it was killed for that.
    pub(super) fn end(self) -> Option<u64> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.thread().unpark();
        self.thread.join().unwrap_or_else(|_| {
            tracing::error!("the watch over a worker's memory panicked");
            None
        })
    }
}

fn watch(trial: &Trial, worker: usize, pid: u32, stopped: &AtomicBool) -> Option<u64> {
    while !stopped.load(Ordering::Relaxed) {
        let limit_bytes = trial.limit_bytes(worker)?;
        let taken_bytes = taken_bytes(pid)?;
        if taken_bytes > limit_bytes {
            let process = i32::try_from(pid).ok().and_then(Pid::from_raw)?;
            if let Err(error) = kill_process(process, Signal::KILL) {
                tracing::warn!(%error, pid, "cannot kill a worker that takes too much memory");
            }
            return Some(taken_bytes);
        }
        std::thread::park_timeout(TRIAL_PERIOD);
    }
    None
}

/// What a process has of memory that cannot be taken back; `None`: there is no such process any more.
fn taken_bytes(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let kib = |name: &str| {
        let rest = status.lines().find_map(|line| line.strip_prefix(name))?;
        rest.split_ascii_whitespace().next()?.parse::<u64>().ok()
    };
    // A process that has ended and waits to be looked at has no memory.
    Some(kib("RssAnon:")?.saturating_add(kib("RssShmem:").unwrap_or(0)).saturating_mul(1024))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    const MIB: u64 = 1 << 20;

    fn trial(bytes: u64) -> Arc<Trial> {
        Trial::new(vec![TrialLimit { predicted_bytes: bytes / 2, headroom_bytes: bytes / 2 }], 100 * MIB)
    }

    /// A process that takes more and more memory, up to so much.
    fn swelling(mib: u64) -> std::process::Child {
        let script = format!("x=$(head -c {} /dev/zero | tr '\\0' x); sleep 60 & wait", mib << 20);
        Command::new("sh").arg("-c").arg(script).stdin(Stdio::null()).spawn().unwrap()
    }

    #[test]
    fn a_process_that_swells_is_killed_by_itself() {
        let mut child = swelling(256);
        let begun = Instant::now();
        let trial = trial(32 * MIB);
        let watch = Watch::start(Arc::clone(&trial), 0, child.id()).unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), Some(9));
        let taken = watch.end().unwrap();
        assert!(taken > 32 * MIB && taken < 256 * MIB, "{taken}");
        assert!(begun.elapsed() < Duration::from_secs(30));
        assert!(trial.reason(0, taken).contains("16.0Mi were predicted"), "{}", trial.reason(0, taken));
    }

    #[test]
    fn one_that_keeps_to_its_limit_is_not_nor_one_whose_trial_is_over() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let kept = Watch::start(trial(32 * MIB), 0, child.id()).unwrap();
        std::thread::sleep(TRIAL_PERIOD * 3);
        assert_eq!(kept.end(), None);
        let over = trial(0);
        over.end();
        assert_eq!(Watch::start(over, 0, child.id()).unwrap().end(), None);
        assert!(child.try_wait().unwrap().is_none(), "it lives");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn what_is_kept_of_prefixes_counts_once_it_is_loaded() {
        let trial = trial(32 * MIB);
        assert_eq!(trial.limit_bytes(0), Some(32 * MIB));
        trial.loaded();
        assert_eq!(trial.limit_bytes(0), Some(132 * MIB));
        assert_eq!(trial.limit_bytes(1), None, "there is one worker");
        trial.end();
        assert_eq!(trial.limit_bytes(0), None);
    }
}

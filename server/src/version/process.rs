//! A worker as a process: how it is started, what it logs, and what became of it.
//!
//! The worker's standard input is one end of a socket pair, so it needs no path, no port and no secret, and both sides
//! learn at once when the other is gone. It gets a process group of its own: Ctrl-C in a terminal reaches the front
//! alone, which then drains. Its log passes through the front, which keeps the last lines to explain a death.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use gantry_engine::DeviceKind;
use rustix::process::{Pid, Signal, WaitOptions, kill_process_group, waitpgid};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::UnixStream;
use tokio::process::{Child, ChildStderr, Command};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::threads::Threads;
use super::trial::Trial;
use crate::journal::Journal;
use crate::limits::{
    OUTPUT_BUDGET_BYTES, WORKER_EXIT_LIMIT, WORKER_LOG_LINE_BYTES, WORKER_LOG_PIECE_BYTES, WORKER_LOG_TAIL_LINES,
};
use crate::output::Output;
use crate::processors::Processors;
use crate::telemetry;

/// Variables that what reads files and templates of others does not need.
const SECRETS_OF_THE_FRONT: [&str; 8] = [
    "GANTRY_API_KEY",
    "LLAMA_API_KEY",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN",
];

/// glibc's name for how it asks for huge pages; 1: by `madvise`.
const HUGE_PAGES: &str = "glibc.malloc.hugetlb";
/// Lines of the log that are quoted when a worker dies.
const QUOTED_LINES: usize = 3;

/// How workers are started. Those that are started with copies of one share its processors, and the memory for what their
/// clients have not taken.
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    program: PathBuf,
    backend_dir: Option<PathBuf>,
    quiet: bool,
    pub(super) threads: Arc<Threads>,
    output: Arc<Output>,
    trial: Option<Arc<Trial>>,
}

impl WorkerConfig {
    /// Workers that run `program worker`.
    #[must_use]
    pub fn new(program: impl Into<PathBuf>) -> Self {
        let threads = Threads::new(Processors::here().count());
        let output = Output::new(OUTPUT_BUDGET_BYTES);
        Self { program: program.into(), backend_dir: None, quiet: false, threads, output, trial: None }
    }

    /// With the backends of this directory; without, a worker looks beside its program.
    #[must_use]
    pub fn with_backend_dir(self, backend_dir: Option<PathBuf>) -> Self {
        Self { backend_dir, ..self }
    }

    /// Workers that may take so much memory until [`Version::end_trial`](super::Version::end_trial).
    #[must_use]
    pub fn on_trial(self, trial: Arc<Trial>) -> Self {
        Self { trial: Some(trial), ..self }
    }

    /// Of whose answers clients may leave so much untaken.
    #[must_use]
    pub fn with_output(self, output: Arc<Output>) -> Self {
        Self { output, ..self }
    }

    /// What clients have not taken of what they answer.
    #[must_use]
    pub fn output(&self) -> Arc<Output> {
        Arc::clone(&self.output)
    }

    pub(super) fn trial(&self) -> Option<Arc<Trial>> {
        self.trial.clone()
    }

    /// That say nothing on our standard error: for a program that speaks to people.
    #[must_use]
    pub fn quietly(self) -> Self {
        Self { quiet: true, ..self }
    }

    /// Workers that run the program that is running now.
    ///
    /// # Errors
    /// The program's path cannot be found out.
    pub fn this_program() -> io::Result<Self> {
        Ok(Self::new(std::env::current_exe()?))
    }

    /// Whether workers will find a GPU. A process of its own looks, since one that has looked keeps memory there.
    ///
    /// # Errors
    /// The program cannot be run, or cannot tell.
    pub async fn finds_gpus(&self) -> io::Result<bool> {
        Ok(self.lacks_gpus().await?.is_none())
    }

    /// What there is to compute with where none of it is a GPU, in words; `None`: there is one.
    ///
    /// # Errors
    /// The program cannot be run, or cannot tell.
    pub async fn lacks_gpus(&self) -> io::Result<Option<String>> {
        // What is linked in computes on the CPU alone.
        if self.backend_dir.is_none() && gantry_engine::default_backend_dir().is_none() {
            return Ok(Some(String::from("no directory of backends")));
        }
        let told = self.command("devices").stdin(Stdio::null()).kill_on_drop(true).output().await?;
        if !told.status.success() {
            let log = String::from_utf8_lossy(&told.stderr);
            return Err(io::Error::other(describe(told.status, &[log.trim().to_owned()])));
        }
        let names = [DeviceKind::Gpu, DeviceKind::IntegratedGpu].map(|kind| format!(": {}, ", kind.as_str()));
        let text = String::from_utf8_lossy(&told.stdout);
        let has_gpu = text.lines().any(|line| names.iter().any(|name| line.contains(name)));
        Ok((!has_gpu).then(|| text.lines().collect::<Vec<_>>().join("; ")))
    }

    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(&self.program);
        command.arg(name);
        for secret in SECRETS_OF_THE_FRONT {
            command.env_remove(secret);
        }
        if self.quiet {
            command.env("RUST_LOG", "off");
        }
        if let Some(dir) = &self.backend_dir {
            command.arg("--backend-dir").arg(dir);
        }
        command
    }
}

/// A running worker.
pub(super) struct Process {
    child: Child,
    tail: Arc<LogTail>,
    log: JoinHandle<()>,
    /// The worker and what it started.
    group: Option<Pid>,
}

impl Process {
    /// Starts a worker that keeps to these processors, to any if there are none, and returns our end of its socket, and what
    /// it will have been working on when it dies.
    pub(super) fn spawn(config: &WorkerConfig, processors: &[u32]) -> io::Result<(Self, UnixStream, Journal)> {
        let journal = Journal::create()?;
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let mut command = config.command("worker");
        if !processors.is_empty() {
            let numbers: Vec<String> = processors.iter().map(u32::to_string).collect();
            command.arg("--processors").arg(numbers.join(","));
        }
        let mut child = command
            // On an abort llama.cpp would start a debugger for a backtrace, and wait for it.
            .env("GGML_NO_BACKTRACE", "1")
            .env("GLIBC_TUNABLES", with_huge_pages(std::env::var("GLIBC_TUNABLES").ok()))
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::from(journal.for_worker()?))
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()?;
        let stderr = child.stderr.take().ok_or_else(|| io::Error::other("the worker has no standard error"))?;
        let tail = Arc::new(LogTail::default());
        let log = tokio::spawn(pass_log(stderr, Arc::clone(&tail), config.quiet));
        let group = child.id().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
        Ok((Self { child, group, tail, log }, UnixStream::from_std(ours)?, journal))
    }

    /// The process id, until the process has been waited for.
    pub(super) fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Waits for the process to end, kills it when it takes too long, and says what became of it.
    pub(super) async fn end(mut self) -> String {
        let status = match timeout(WORKER_EXIT_LIMIT, self.child.wait()).await {
            Ok(status) => status,
            Err(_) => {
                tracing::warn!("the worker did not end in {} s and is killed", WORKER_EXIT_LIMIT.as_secs());
                let tail = Arc::clone(&self.tail);
                return match self.kill().await {
                    Some(status) => describe(status, &tail.lines()),
                    None => String::from("it was killed and is not gone yet"),
                };
            }
        };
        // The pipe closes with the process, unless a grandchild holds it.
        let _ = timeout(WORKER_EXIT_LIMIT, self.log).await;
        reap(self.group);
        match status {
            Ok(status) => describe(status, &self.tail.lines()),
            Err(error) => format!("its status is unknown: {error}"),
        }
    }

    /// Kills the process and waits until it is gone, but not for ever: one that waits for a device or a file system that
    /// does not answer goes when that does, and whoever is served by it does not wait for that.
    pub(super) async fn kill(mut self) -> Option<ExitStatus> {
        // The process may end by itself in between, which is as good.
        let _ = self.child.start_kill();
        match timeout(WORKER_EXIT_LIMIT, self.child.wait()).await {
            Ok(Ok(status)) => {
                reap(self.group);
                return Some(status);
            }
            Ok(Err(error)) => tracing::warn!(%error, "cannot wait for a killed worker"),
            Err(_) => {
                tracing::error!(
                    pid = self.child.id(),
                    "a killed worker is not gone after {} s",
                    WORKER_EXIT_LIMIT.as_secs()
                );
                tokio::spawn(async move {
                    let ended = self.child.wait().await;
                    reap(self.group);
                    ended
                });
            }
        }
        None
    }
}

/// Ends and waits for what a worker that has ended had started. Where we are the first process of a container, as in a pod,
/// that is ours then, and its entry in the table of processes stays until somebody waits for it.
fn reap(group: Option<Pid>) {
    let Some(group) = group else { return };
    // The last of them may take a moment to end.
    tokio::task::spawn_blocking(move || {
        // An error means that none is ours.
        while let Ok(ended) = waitpgid(group, WaitOptions::NOHANG) {
            if ended.is_none() {
                // One of ours is in this group, so nobody else's can be.
                let _ = kill_process_group(group, Signal::KILL);
                let _ = waitpgid(group, WaitOptions::empty());
            }
        }
    });
}

/// The C library's settings, `given` or none, with which what a worker allocates lies on huge pages where the system leaves it
/// to programs to ask for them (`madvise`): weights that were repacked for the processor, and KV cells. Each token reads all
/// of them, and with pages of 4 KiB some of the time goes to finding them. What the user says of it stands.
fn with_huge_pages(given: Option<String>) -> String {
    match given {
        Some(given) if given.contains(HUGE_PAGES) => given,
        Some(given) if !given.is_empty() => format!("{given}:{HUGE_PAGES}=1"),
        _ => format!("{HUGE_PAGES}=1"),
    }
}

/// The last lines of a worker's log.
#[derive(Default)]
struct LogTail(Mutex<VecDeque<String>>);

impl LogTail {
    fn push(&self, line: &[u8]) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == WORKER_LOG_TAIL_LINES {
            lines.pop_front();
        }
        lines.push_back(String::from_utf8_lossy(line).into_owned());
    }

    fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

/// Copies a worker's log to our own, line by line, unless that is to be quiet, and keeps its tail. Ours never blocks, so the
/// worker never does.
async fn pass_log(stderr: ChildStderr, tail: Arc<LogTail>, quiet: bool) {
    let mut reader = BufReader::new(stderr);
    let mut line = Vec::new();
    // Whether what is in `line` goes on with one that was too long.
    let mut goes_on = false;
    loop {
        let chunk = match reader.fill_buf().await {
            Ok([]) => break,
            Ok(chunk) => chunk,
            Err(error) => {
                tracing::warn!(%error, "cannot read the worker's log");
                break;
            }
        };
        let end = chunk.iter().position(|byte| *byte == b'\n').map(|at| at + 1);
        let taken = end.unwrap_or(chunk.len());
        line.extend_from_slice(&chunk[..taken]);
        reader.consume(taken);
        if end.is_some() || line.len() >= WORKER_LOG_PIECE_BYTES {
            pass_line(&line, goes_on, &tail, quiet);
            goes_on = end.is_none();
            line.clear();
        }
    }
    if !line.is_empty() {
        line.push(b'\n');
        pass_line(&line, goes_on, &tail, quiet);
    }
}

fn pass_line(line: &[u8], goes_on: bool, tail: &LogTail, quiet: bool) {
    if !quiet {
        telemetry::write_lines(line);
    }
    if !goes_on {
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        tail.push(&line[..line.len().min(WORKER_LOG_LINE_BYTES)]);
    }
}

/// What became of a process, with its last words where they can explain it: lines that are not log records are what
/// llama.cpp, the C++ runtime or a panic printed on the way down.
fn describe(status: ExitStatus, log: &[String]) -> String {
    let what = match (status.signal(), status.code()) {
        (Some(9), _) => return "killed by SIGKILL, as the kernel does when memory runs out".to_owned(),
        (Some(6), _) => "aborted (SIGABRT)".to_owned(),
        (Some(11), _) => "crashed (SIGSEGV)".to_owned(),
        (Some(signal), _) => format!("ended by signal {signal}"),
        (None, Some(code)) => format!("exited with status {code}"),
        (None, None) => "ended".to_owned(),
    };
    let words: Vec<&str> =
        log.iter().map(|line| line.trim()).filter(|line| !line.is_empty() && !line.starts_with('{')).collect();
    let last = &words[words.len().saturating_sub(QUOTED_LINES)..];
    if last.is_empty() { what } else { format!("{what}; its last words: {}", last.join(" | ")) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// As the first process of a container has it: what a child leaves behind becomes its own.
    #[tokio::test]
    async fn what_a_worker_leaves_behind_is_ended_and_waited_for() {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
        let mut worker = Command::new("sh");
        let worker = worker.args(["-c", "sleep 600 >&- & echo $!"]).stdout(Stdio::piped()).process_group(0);
        let worker = worker.spawn().unwrap();
        let group = Pid::from_raw(i32::try_from(worker.id().unwrap()).unwrap());
        let told = worker.wait_with_output().await.unwrap().stdout;
        let left = format!("/proc/{}", String::from_utf8(told).unwrap().trim());
        assert!(std::path::Path::new(&left).exists());
        reap(group);
        let gone = async {
            while std::path::Path::new(&left).exists() {
                tokio::task::yield_now().await;
            }
        };
        timeout(WORKER_EXIT_LIMIT, gone).await.unwrap();
    }

    #[test]
    fn what_the_user_set_of_the_c_library_stands() {
        let with = |given: Option<&str>| with_huge_pages(given.map(String::from));
        assert_eq!(with(None), "glibc.malloc.hugetlb=1");
        assert_eq!(with(Some("")), "glibc.malloc.hugetlb=1");
        assert_eq!(with(Some("glibc.malloc.arena_max=2")), "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1");
        assert_eq!(with(Some("glibc.malloc.hugetlb=0")), "glibc.malloc.hugetlb=0");
    }

    #[test]
    fn a_death_is_described_with_its_last_words() {
        let log = ["{\"level\":\"INFO\"}", "a", "b", "", "ggml.c:1: GGML_ASSERT(x) failed", "c"].map(String::from);
        assert_eq!(
            describe(ExitStatus::from_raw(6), &log),
            "aborted (SIGABRT); its last words: b | ggml.c:1: GGML_ASSERT(x) failed | c"
        );
        assert_eq!(describe(ExitStatus::from_raw(1 << 8), &[]), "exited with status 1");
        assert!(describe(ExitStatus::from_raw(9), &log).contains("memory"));
    }
}

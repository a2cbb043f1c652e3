//! The processes that render a model's template, from the side of who asks them.
//!
//! One is started with the model, another when two ask at the same time, so that a long chat does not hold up a short one; a
//! slow chat has one to itself, behind all else that computes. One that dies or does not answer is replaced at the next chat;
//! what it died of is the answer to the one it died of.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};

use gantry_llama::{ChatError, TemplateLimit, TemplateSource, limit_of_exit};
use rustix::process::Signal;

use super::Allowance;
use super::limits::{MAX_IDLE_TEMPLATE_PROCESSES, TEMPLATE_ANSWER_WAIT, TEMPLATE_PROCESS_MIN_BYTES};
use super::wire::{Answer, Ask, Knows, receive, send};

/// What such a program is called with.
const COMMAND: &str = "template";

pub(crate) struct Processes {
    program: PathBuf,
    source: TemplateSource,
    /// What one that renders a slow chat may take.
    slow_bytes: u64,
    /// As many as have rendered at the same time, up to [`MAX_IDLE_TEMPLATE_PROCESSES`].
    idle: Mutex<Vec<Process>>,
    knows: Knows,
}

impl Processes {
    /// Starts the first one. `slow_bytes`: what one may take that renders a slow chat.
    pub(super) fn start(program: &Path, source: TemplateSource, slow_bytes: u64) -> Result<Self, ChatError> {
        let (first, knows) = Process::start(program, &source, None)?;
        Ok(Self { program: program.to_owned(), source, slow_bytes, idle: Mutex::new(vec![first]), knows })
    }

    pub(super) fn knows(&self) -> Knows {
        self.knows
    }

    pub(super) fn render(&self, chat: &str, Allowance { cpu_ms, aside }: Allowance) -> Result<String, ChatError> {
        let ask = Ask::Render { chat: chat.to_owned(), cpu_ms };
        if aside {
            let (process, _) = Process::start(&self.program, &self.source, Some(self.slow_bytes))?;
            return process.render(&ask).map(|(rendered, _)| rendered)?;
        }
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        if let Some(process) = idle {
            match self.render_with(process, &ask) {
                // It may have ended before it was asked.
                Err(ChatError::TemplateProcess(reason)) => tracing::warn!(reason, "a template's process is replaced"),
                rendered => return rendered,
            }
        }
        self.render_with(Process::start(&self.program, &self.source, None)?.0, &ask)
    }

    /// The process is kept where there is room.
    fn render_with(&self, process: Process, ask: &Ask) -> Result<String, ChatError> {
        let (rendered, process) = process.render(ask)?;
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full = idle.len() >= MAX_IDLE_TEMPLATE_PROCESSES;
        let over = if is_full {
            Some(process)
        } else {
            idle.push(process);
            None
        };
        drop(idle);
        drop(over);
        rendered
    }
}

/// One of them; killed when it is dropped.
struct Process {
    child: Child,
    socket: UnixStream,
}

impl Process {
    /// Starts one, which then has the template, and says what that knows of. `slow_bytes`: it renders a slow chat, and may take so
    /// much.
    fn start(program: &Path, source: &TemplateSource, slow_bytes: Option<u64>) -> Result<(Self, Knows), ChatError> {
        let cannot = |error: io::Error| ChatError::TemplateProcess(format!("it cannot be started: {error}"));
        let mut process = Self::spawn(program).map_err(cannot)?;
        let (aside, most_bytes) = (slow_bytes.is_some(), slow_bytes.unwrap_or(TEMPLATE_PROCESS_MIN_BYTES));
        let ask = Ask::Parse { source: source.clone(), aside, most_bytes };
        match process.ask(&ask) {
            Ok(Answer::Parsed(parsed)) => parsed.map(|knows| (process, knows)),
            Ok(Answer::Rendered(_)) => Err(cannot(io::Error::other("it was answered what was not asked"))),
            Err(error) => Err(process.end(&error)),
        }
    }

    fn spawn(program: &Path) -> io::Result<Self> {
        let (socket, theirs) = UnixStream::pair()?;
        for timeout in [UnixStream::set_read_timeout, UnixStream::set_write_timeout] {
            timeout(&socket, Some(TEMPLATE_ANSWER_WAIT))?;
        }
        let child = Command::new(program)
            .arg(COMMAND)
            // On an abort llama.cpp would start a debugger for a backtrace, and wait for it.
            .env("GGML_NO_BACKTRACE", "1")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            // Held open, ours would keep whoever reads it waiting for the end of this process, too.
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Self { child, socket })
    }

    /// What it renders, and itself to be asked again.
    fn render(mut self, ask: &Ask) -> Result<(Result<String, ChatError>, Self), ChatError> {
        match self.ask(ask) {
            Ok(Answer::Rendered(rendered)) => Ok((rendered, self)),
            Ok(Answer::Parsed(_)) => Err(ChatError::Template(String::from("it was answered what was not asked"))),
            Err(error) => Err(self.end(&error)),
        }
    }

    fn ask(&mut self, ask: &Ask) -> io::Result<Answer> {
        send(&mut self.socket, ask)?;
        receive(&mut self.socket)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// What became of one that did not answer.
    fn end(mut self, error: &io::Error) -> ChatError {
        let limit = |limit| ChatError::TemplateLimit { limit, at: None };
        if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) {
            return limit(TemplateLimit::Time);
        }
        let has_ended = matches!(
            error.kind(),
            io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
        );
        if !has_ended {
            // It may wait for us as we would for it; it is killed when it is dropped.
            return ChatError::TemplateProcess(error.to_string());
        }
        match self.child.wait() {
            Ok(status) => describe(status),
            Err(error) => ChatError::TemplateProcess(error.to_string()),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended, and been waited for, before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn describe(status: ExitStatus) -> ChatError {
    let of_exit = || status.code().and_then(limit_of_exit);
    let limit = match status.signal().and_then(Signal::from_named_raw) {
        Some(Signal::PROF) => TemplateLimit::Time,
        Some(Signal::SEGV | Signal::BUS) => TemplateLimit::Depth,
        // What is refused memory where it cannot say so aborts.
        Some(Signal::ABORT) => TemplateLimit::Memory,
        _ => match of_exit() {
            Some(limit) => limit,
            None => return ChatError::TemplateProcess(format!("it ended ({status})")),
        },
    };
    ChatError::TemplateLimit { limit, at: None }
}

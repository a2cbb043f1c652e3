//! Logs: one JSON object a line on standard error, filtered by `RUST_LOG` (default `info`). No prompt and no answer
//! is ever logged. A person at a terminal gets lines in words instead ([`crate::console`]).
//!
//! Nobody waits for standard error: whoever reads it may have stopped, and a full pipe would stop every stream. Lines go
//! into a buffer of [`LOG_BACKLOG_BYTES`] that a thread empties ([`Backlog`]); what finds it full is lost, counted, and
//! told of as soon as there is room again.

use std::borrow::Cow;
use std::io::{self, Write};
use std::panic;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tracing_subscriber::EnvFilter;

use crate::console;
use crate::limits::{LOG_BACKLOG_BYTES, LOG_FLUSH_LIMIT, LOG_RETRY, MAX_LOG_TEXT_BYTES};

/// What waits to be written to this process's standard error.
static STDERR: LazyLock<Backlog> = LazyLock::new(|| {
    let started = thread::Builder::new().name("gantry-log".to_owned()).spawn(|| STDERR.write_to(&mut io::stderr()));
    Backlog::new(started.is_ok())
});

/// Starts logging, of panics too; the first thing a process does. The last thing is to [`flush`].
///
/// # Errors
/// `RUST_LOG` is not a valid filter, or logging was started before.
pub fn init() -> anyhow::Result<()> {
    let filter = match std::env::var("RUST_LOG") {
        Ok(directives) => EnvFilter::try_new(&directives)
            .map_err(|error| anyhow::anyhow!("RUST_LOG={directives:?} is not a valid filter: {error}"))?,
        Err(_) => EnvFilter::new("info"),
    };
    panic::set_hook(Box::new(|info| {
        let thread = thread::current();
        write_lines(format!("thread '{}' {info}\n", thread.name().unwrap_or("unnamed")).as_bytes());
    }));
    tracing_subscriber::fmt()
        .json()
        .flatten_event(true)
        .with_current_span(false)
        .with_env_filter(filter)
        .with_writer(|| Stderr)
        .try_init()
        .map_err(|error| anyhow::anyhow!("cannot start logging: {error}"))
}

/// Writes whole lines of the log to standard error without ever waiting for it, in words where a person is there to read
/// them.
pub fn write_lines(lines: &[u8]) {
    match console::for_people(lines) {
        Some(words) => write_text(&words),
        None => write_text(lines),
    }
}

/// Writes to standard error what is no record of the log, without ever waiting for it.
pub fn write_text(text: &[u8]) {
    STDERR.push(&bounded(text));
}

/// A text that has room among what waits: the beginning of a longer one, and how much is not told.
fn bounded(text: &[u8]) -> Cow<'_, [u8]> {
    if text.len() <= MAX_LOG_TEXT_BYTES {
        return Cow::Borrowed(text);
    }
    // At the beginning of a character, in what is UTF-8.
    let end = (0..=MAX_LOG_TEXT_BYTES).rev().find(|&at| text[at] & 0xC0 != 0x80).unwrap_or(MAX_LOG_TEXT_BYTES);
    let left_out = format!("…\n{} bytes more are left out\n", text.len() - end);
    Cow::Owned([&text[..end], left_out.as_bytes()].concat())
}

/// Waits until what was logged is written, but no longer than [`LOG_FLUSH_LIMIT`].
pub fn flush() {
    STDERR.flush(LOG_FLUSH_LIMIT);
}

/// Lines that were lost because standard error was not read.
#[must_use]
pub fn lost_lines() -> u64 {
    STDERR.lost_lines.load(Ordering::Relaxed)
}

/// [`write_lines`] as a writer: each write is a whole record.
struct Stderr;

impl Write for Stderr {
    fn write(&mut self, record: &[u8]) -> io::Result<usize> {
        write_lines(record);
        Ok(record.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Lines on their way to a writer that may block.
struct Backlog {
    lines: Mutex<Lines>,
    changed: Condvar,
    lost_lines: AtomicU64,
    /// Without a thread that writes, nothing may gather.
    has_writer: bool,
}

#[derive(Default)]
struct Lines {
    waiting: Vec<u8>,
    /// Some have been taken out and are not written yet.
    writing: bool,
}

impl Backlog {
    fn new(has_writer: bool) -> Self {
        Self { lines: Mutex::default(), changed: Condvar::new(), lost_lines: AtomicU64::new(0), has_writer }
    }

    fn lock(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, lines: &[u8]) {
        let mut held = self.lock();
        if self.has_writer && held.waiting.len() + lines.len() <= LOG_BACKLOG_BYTES {
            held.waiting.extend_from_slice(lines);
            drop(held);
            self.changed.notify_all();
        } else {
            self.lose(lines);
        }
    }

    fn lose(&self, lines: &[u8]) {
        let count = lines.iter().filter(|byte| **byte == b'\n').count().max(1);
        self.lost_lines.fetch_add(count as u64, Ordering::Relaxed);
    }

    fn flush(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        let mut held = self.lock();
        while self.has_writer && (held.writing || !held.waiting.is_empty()) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            held = self.changed.wait_timeout(held, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Writes what comes, for ever; for a thread of its own.
    fn write_to(&self, out: &mut impl Write) {
        let mut told = 0;
        loop {
            let mut held = self.lock();
            held.writing = false;
            while held.waiting.is_empty() {
                self.changed.notify_all();
                held = self.changed.wait(held).unwrap_or_else(PoisonError::into_inner);
            }
            let lines = std::mem::take(&mut held.waiting);
            held.writing = true;
            drop(held);
            if write_whole(out, &lines).is_err() {
                // Nobody reads it any more.
                self.lose(&lines);
                continue;
            }
            let lost = self.lost_lines.load(Ordering::Relaxed);
            if lost > told {
                tracing::warn!(lines = lost - told, "standard error was not read, and lines of the log were lost");
                told = lost;
            }
        }
    }
}

/// Writes all of it, to a terminal or a pipe that somebody may have made non-blocking, too.
fn write_whole(out: &mut impl Write, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match out.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(LOG_RETRY),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::{BufRead, BufReader, Read, pipe};
    use std::sync::Arc;

    use super::*;

    /// A backlog whose writer is a pipe.
    fn piped() -> (Arc<Backlog>, io::PipeReader) {
        let (reader, mut writer) = pipe().unwrap();
        let backlog = Arc::new(Backlog::new(true));
        let writing = Arc::clone(&backlog);
        thread::spawn(move || writing.write_to(&mut writer));
        (backlog, reader)
    }

    #[test]
    fn nobody_waits_for_a_pipe_that_is_not_read_and_what_is_lost_is_counted() {
        let (backlog, reader) = piped();
        let mut pushed = 0_u64;
        let line = format!("{}\n", "x".repeat(999));
        while backlog.lost_lines.load(Ordering::Relaxed) < 1000 {
            backlog.push(line.as_bytes());
            pushed += 1;
        }
        // A pipe has 64 KiB by itself.
        assert!(pushed as usize * 1000 < 4 * LOG_BACKLOG_BYTES);
        backlog.flush(Duration::from_millis(10));
        // What was not lost comes when it is read, whole and in order.
        let mut reader = BufReader::new(reader);
        let mut text = String::new();
        for _ in 0..pushed - 1000 {
            text.clear();
            reader.read_line(&mut text).unwrap();
            assert_eq!(text, line);
        }
        backlog.push(b"last\n");
        text.clear();
        reader.read_line(&mut text).unwrap();
        assert_eq!(text, "last\n");
        backlog.flush(Duration::from_secs(60));
        assert!(backlog.lock().waiting.is_empty());
    }

    #[test]
    fn of_a_text_without_room_the_beginning_is_written() {
        assert_eq!(&*bounded(b"short\n"), b"short\n");
        let long = "é".repeat(LOG_BACKLOG_BYTES);
        let written = String::from_utf8(bounded(long.as_bytes()).into_owned()).unwrap();
        assert!(written.len() < LOG_BACKLOG_BYTES && written.starts_with("éé"), "{}", written.len());
        assert!(written.ends_with("é…\n1572864 bytes more are left out\n"), "{}", &written[written.len() - 60..]);
    }

    #[test]
    fn a_pipe_that_is_closed_loses_lines_and_stops_nobody() {
        let (backlog, reader) = piped();
        drop(reader);
        backlog.push(b"a\nb\n");
        backlog.flush(Duration::from_secs(60));
        assert_eq!(backlog.lost_lines.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn a_writer_that_would_block_is_tried_again() {
        struct Fitful(Vec<u8>, u32);
        impl Write for Fitful {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.1 += 1;
                match self.1 % 3 {
                    0 => Err(io::ErrorKind::WouldBlock.into()),
                    1 => Err(io::ErrorKind::Interrupted.into()),
                    _ => self.0.write(&bytes[..1]),
                }
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut out = Fitful(Vec::new(), 0);
        write_whole(&mut out, b"abc").unwrap();
        assert_eq!(out.0, b"abc");
        let (mut reader, writer) = pipe().unwrap();
        drop(writer);
        assert_eq!(reader.read(&mut [0]).unwrap(), 0);
    }
}

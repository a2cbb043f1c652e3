//! llama.cpp's log, as `tracing` events with target `llama.cpp`.
//!
//! llama.cpp calls back from any of its threads with pieces of lines: a piece at level CONT continues the line before
//! it. Lines are put together per thread. Errors are also kept per thread, a few of them, because most
//! functions answer only with null: [`take_recent_errors`] is then the reason.
//!
//! llama.cpp is talkative at load, so its INFO becomes DEBUG here, and its DEBUG becomes TRACE. So does a warning that is
//! known to ask nothing of anybody ([`NOISE`]), as of tokens whose type it corrects by itself; every other one stays one. What it says of a decode that was ended on
//! purpose is no error: that becomes DEBUG, too.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use llama_cpp_sys_2 as sys;

/// Error lines kept per thread for the next failure's reason.
const MAX_RECENT_ERRORS: usize = 4;
/// Words of warnings that ask nothing of anybody: llama.cpp corrects it by itself, or it is as this server wants it.
const NOISE: &[&str] = &[
    "control-looking token",
    "attribute to user_defined",
    "from eog list",
    "using full-size swa cache",
    "the full capacity of the model will not be utilized",
    "n_ctx is not divisible by n_seq_max",
    "padding v cache",
    "sharing with layer",
    "model has unused tensor",
    "new yarn_attn_factor",
    "newline token",
    "override 'tokenizer.ggml.add_bos_token'",
];
/// The longest line kept or logged, in bytes.
const MAX_LINE_BYTES: usize = 2048;

#[derive(Default)]
struct ThreadLog {
    level: sys::ggml_log_level,
    line: String,
    errors: Vec<String>,
    /// Ends the decode that this thread is in when raised.
    abort: Option<Arc<AtomicBool>>,
}

thread_local! {
    static LOG: RefCell<ThreadLog> = RefCell::default();
}

/// Sets the process-wide callback.
pub(crate) fn install() {
    // SAFETY: `on_log` has the callback's signature, lives as long as the process and does not unwind (it catches).
    unsafe { sys::llama_log_set(Some(on_log), std::ptr::null_mut()) };
}

/// The errors llama.cpp logged on this thread since the last call, or a phrase that says there were none.
pub(crate) fn take_recent_errors() -> String {
    let errors = LOG.with_borrow_mut(|log| std::mem::take(&mut log.errors));
    if errors.is_empty() { String::from("llama.cpp gave no reason") } else { errors.join("; ") }
}

/// Forgets the errors of earlier calls on this thread.
pub(crate) fn clear_recent_errors() {
    LOG.with_borrow_mut(|log| log.errors.clear());
}

/// Decodes, where raising `abort` ends that.
pub(crate) fn while_it_may_be_ended<T>(abort: Option<&Arc<AtomicBool>>, decode: impl FnOnce() -> T) -> T {
    LOG.with_borrow_mut(|log| log.abort = abort.cloned());
    let decoded = decode();
    LOG.with_borrow_mut(|log| log.abort = None);
    decoded
}

unsafe extern "C" fn on_log(level: sys::ggml_log_level, text: *const c_char, _data: *mut c_void) {
    if text.is_null() {
        return;
    }
    // SAFETY: llama.cpp passes a NUL-terminated text that lives for the call.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    // A subscriber may panic, and a panic must not unwind into C++. There is nowhere to report it.
    let _ = std::panic::catch_unwind(|| {
        let lines = LOG.try_with(|log| log.try_borrow_mut().map(|mut log| log.push(level, &text)).unwrap_or_default());
        for (level, line) in lines.unwrap_or_default() {
            emit(level, &line);
        }
    });
}

impl ThreadLog {
    /// Takes a piece and gives back the lines that it completed.
    fn push(&mut self, level: sys::ggml_log_level, text: &str) -> Vec<(sys::ggml_log_level, String)> {
        let mut done = Vec::new();
        if level != sys::GGML_LOG_LEVEL_CONT {
            if !self.line.is_empty() {
                done.push((self.level, std::mem::take(&mut self.line)));
            }
            self.level = level;
        }
        for piece in text.split_inclusive('\n') {
            let room = MAX_LINE_BYTES.saturating_sub(self.line.len());
            self.line.push_str(&piece[..piece.floor_char_boundary(room)]);
            if piece.ends_with('\n') {
                done.push((self.level, std::mem::take(&mut self.line)));
            }
        }
        for (level, line) in &mut done {
            line.truncate(line.trim_end().len());
            if *level == sys::GGML_LOG_LEVEL_ERROR && !line.is_empty() {
                if self.errors.len() == MAX_RECENT_ERRORS {
                    self.errors.remove(0);
                }
                self.errors.push(line.clone());
            }
        }
        if self.abort.as_ref().is_some_and(|abort| abort.load(Relaxed)) {
            done.iter_mut().for_each(|(level, _)| *level = (*level).min(sys::GGML_LOG_LEVEL_INFO));
        }
        for (level, line) in &mut done {
            if *level == sys::GGML_LOG_LEVEL_WARN && is_noise(line) {
                *level = sys::GGML_LOG_LEVEL_INFO;
            }
        }
        done.retain(|(_, line)| !line.trim_matches('.').is_empty());
        done
    }
}

/// Whether a warning asks nothing of anybody.
fn is_noise(line: &str) -> bool {
    let line = line.to_lowercase();
    // The frame of stars around others, and the space in it, too.
    line.split_once(": ").map_or(&*line, |(_, rest)| rest).chars().all(|c| c == '*' || c == ' ')
        || NOISE.iter().any(|words| line.contains(words))
}

fn emit(level: sys::ggml_log_level, line: &str) {
    match level {
        sys::GGML_LOG_LEVEL_ERROR => tracing::error!(target: "llama.cpp", "{line}"),
        sys::GGML_LOG_LEVEL_WARN => tracing::warn!(target: "llama.cpp", "{line}"),
        sys::GGML_LOG_LEVEL_DEBUG => tracing::trace!(target: "llama.cpp", "{line}"),
        _ => tracing::debug!(target: "llama.cpp", "{line}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_become_lines_and_errors_are_kept() {
        let mut log = ThreadLog::default();
        assert_eq!(log.push(sys::GGML_LOG_LEVEL_INFO, "one\n"), vec![(sys::GGML_LOG_LEVEL_INFO, "one".to_owned())]);
        assert!(log.push(sys::GGML_LOG_LEVEL_ERROR, "bad: ").is_empty());
        let done = log.push(sys::GGML_LOG_LEVEL_CONT, "file\nand more");
        assert_eq!(done, vec![(sys::GGML_LOG_LEVEL_ERROR, "bad: file".to_owned())]);
        // An unfinished line ends where the next one begins.
        let done = log.push(sys::GGML_LOG_LEVEL_WARN, "decoding failed\n");
        let warning = (sys::GGML_LOG_LEVEL_WARN, "decoding failed".to_owned());
        assert_eq!(done, vec![(sys::GGML_LOG_LEVEL_ERROR, "and more".to_owned()), warning]);
        assert_eq!(log.errors, ["bad: file", "and more"]);
        // Progress dots are no lines.
        assert!(log.push(sys::GGML_LOG_LEVEL_INFO, "......\n").is_empty());
        let abort = Arc::new(AtomicBool::new(false));
        log.abort = Some(abort.clone());
        assert_eq!(log.push(sys::GGML_LOG_LEVEL_ERROR, "a\n"), vec![(sys::GGML_LOG_LEVEL_ERROR, "a".to_owned())]);
        abort.store(true, Relaxed);
        assert_eq!(log.push(sys::GGML_LOG_LEVEL_ERROR, "b\n"), vec![(sys::GGML_LOG_LEVEL_INFO, "b".to_owned())]);
        for _ in 0..10 {
            log.push(sys::GGML_LOG_LEVEL_ERROR, &"é".repeat(MAX_LINE_BYTES));
            log.push(sys::GGML_LOG_LEVEL_CONT, "\n");
        }
        assert_eq!(log.errors.len(), MAX_RECENT_ERRORS);
        assert!(log.errors.iter().all(|line| line.len() <= MAX_LINE_BYTES));
    }

    #[test]
    fn a_warning_that_asks_nothing_of_anybody_is_for_who_looks_closely() {
        let mut log = ThreadLog::default();
        let mut level = |line: &str| log.push(sys::GGML_LOG_LEVEL_WARN, &format!("{line}\n"))[0].0;
        for noise in [
            "load: control-looking token:    212 '</s>' was not control-type; this is probably a bug in the model. its type \
             will be overridden",
            "llama_kv_cache_iswa: using full-size SWA cache (ref: https://github.com/)",
            "llama_context: n_ctx_seq (1024) < n_ctx_train (32768) -- the full capacity of the model will not be utilized",
            "load: ************************************        ",
        ] {
            assert_eq!(level(noise), sys::GGML_LOG_LEVEL_INFO, "{noise}");
        }
        for asking in [
            "load: missing pre-tokenizer type, using: 'default'",
            "load: CONSIDER REGENERATING THE MODEL             ",
            "load: something that nobody here has seen yet",
            "print_info: special_eos_id is not in special_eog_ids - the tokenizer config may be incorrect",
        ] {
            assert_eq!(level(asking), sys::GGML_LOG_LEVEL_WARN, "{asking}");
        }
    }
}

//! From text to tokens, on a stack that is deep enough for it.
//!
//! [`Model::with_stack_for`] is the only way to llama.cpp's tokeniser, so what bounds a text (`pretokenizer`) holds for every
//! caller: prompts, texts to embed or rank, and what gates and probes ask.

use crate::error::TokenizeError;
use crate::limits::{RUN_STACK_BYTES_PER_CHAR, SHORT_RUN_CHARS};
use crate::model::{Model, Token};
use crate::shim;

/// Stack for what is called around the recursion.
const BASE_STACK_BYTES: usize = 1024 * 1024;

impl Model {
    /// Turns text into tokens. `add_special`: begin with BOS (and end with EOS) where the vocabulary says so.
    /// `parse_special`: special tokens written in the text become those tokens instead of plain text.
    ///
    /// # Errors
    /// When the text is too long to count, has runs that this model's pre-tokeniser cannot take, or llama.cpp cannot
    /// tokenise it.
    pub fn tokenize(&self, text: &str, add_special: bool, parse_special: bool) -> Result<Vec<Token>, TokenizeError> {
        self.with_stack_for(text, || self.tokenize_here(text, add_special, parse_special))?
    }

    /// Runs `f`, which tokenises this text or parts of it, on a stack that is deep enough.
    pub(crate) fn with_stack_for<T: Send>(&self, text: &str, f: impl FnOnce() -> T + Send) -> Result<T, TokenizeError> {
        on_deep_stack(self.pre_tokenizer().demand(text)?.depth, f)
    }

    /// As [`Model::tokenize`], on this stack: within [`Model::with_stack_for`].
    pub(crate) fn tokenize_here(
        &self,
        text: &str,
        add_special: bool,
        parse_special: bool,
    ) -> Result<Vec<Token>, TokenizeError> {
        // BOS and EOS come on top of at most one token a byte; a negative answer must stay a count.
        const RESERVED: usize = 8;
        let too_long = || TokenizeError::TooLong { bytes: text.len() };
        let text_len = i32::try_from(text.len()).map_err(|_| too_long())?;
        let mut capacity = i32::try_from(text.len() + RESERVED).map_err(|_| too_long())?;
        let mut tokens: Vec<Token> = Vec::new();
        // Twice at most: llama.cpp answers with the count it needs when the buffer is short.
        for _ in 0..2 {
            tokens.resize(usize::try_from(capacity).map_err(|_| too_long())?, 0);
            // SAFETY: the text has `text_len` bytes, `tokens` has `capacity` elements, the shim catches exceptions.
            let n = unsafe {
                shim::gantry_tokenize(
                    self.raw_vocab(),
                    text.as_ptr().cast(),
                    text_len,
                    tokens.as_mut_ptr(),
                    capacity,
                    add_special,
                    parse_special,
                )
            };
            if let Ok(n) = usize::try_from(n) {
                tokens.truncate(n);
                tokens.shrink_to_fit();
                // A tokeniser that is not the vocabulary's, which a file may name, finds none for some texts.
                return match tokens.iter().find(|token| !self.contains(**token)) {
                    Some(&token) => Err(TokenizeError::ForeignTokenizer(token)),
                    None => Ok(tokens),
                };
            }
            capacity = n.checked_neg().ok_or(TokenizeError::Failed)?;
        }
        Err(TokenizeError::Failed)
    }
}

/// Runs `f` where so many levels of recursion fit: here, or on a thread of its own. Its stack takes memory only as far as it
/// is used, and none when the thread has ended.
fn on_deep_stack<T: Send>(depth: usize, f: impl FnOnce() -> T + Send) -> Result<T, TokenizeError> {
    if depth <= SHORT_RUN_CHARS {
        return Ok(f());
    }
    let stack_bytes = BASE_STACK_BYTES + depth * RUN_STACK_BYTES_PER_CHAR;
    let no_stack = |e: std::io::Error| TokenizeError::NoStack(e.to_string());
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name(String::from("gantry-deep")).stack_size(stack_bytes);
        match thread.spawn_scoped(scope, f).map_err(no_stack)?.join() {
            Ok(done) => Ok(done),
            // It goes on where the caller expects one.
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

//! Declarations of `shim/shim.h`, `shim/parser.h`, `shim/grammar.h`, `shim/state.h`, `shim/backends.h` and `shim/cells.h`. Its functions catch what llama.cpp throws.

use std::ffi::{c_char, c_int};

use llama_cpp_sys_2 as sys;

/// [`gantry_decode`] caught an exception.
pub(crate) const THROWN: i32 = -1_000_000;

/// What [`gantry_exit_on_terminate`] has a process end with, plus the number of the limit.
pub(crate) const EXIT_LIMIT: i32 = 80;

/// A text allocated by the shim.
#[repr(C)]
pub(crate) struct RawText {
    pub(crate) data: *mut c_char,
    pub(crate) len: usize,
    pub(crate) error: bool,
}

/// What rendering a template may take.
#[repr(C)]
pub(crate) struct RawTemplateLimits {
    pub(crate) cpu_ms: u64,
    pub(crate) memory_bytes: u64,
    pub(crate) nesting: u64,
    pub(crate) expression_parts: u64,
}

/// Opaque.
#[repr(C)]
pub(crate) struct RawChatTemplate {
    _private: [u8; 0],
}

/// Opaque.
#[repr(C)]
pub(crate) struct RawAnswerParser {
    _private: [u8; 0],
}

unsafe extern "C" {
    fn gantry_text_free(text: RawText);
    pub(crate) fn gantry_common_log_off();
    pub(crate) fn gantry_return_large_blocks(bytes: c_int);
    pub(crate) fn gantry_return_free_memory();
    pub(crate) fn gantry_chat_template_source(model: *const sys::llama_model) -> RawText;
    pub(crate) fn gantry_chat_template_new(
        source: *const c_char,
        source_len: usize,
        limits: *const RawTemplateLimits,
        reason: *mut RawText,
    ) -> *mut RawChatTemplate;
    pub(crate) fn gantry_chat_template_free(tmpl: *mut RawChatTemplate);
    pub(crate) fn gantry_chat_template_knows_tools(tmpl: *const RawChatTemplate) -> bool;
    pub(crate) fn gantry_chat_template_thinks(tmpl: *const RawChatTemplate) -> bool;
    pub(crate) fn gantry_chat_template_apply(
        tmpl: *const RawChatTemplate,
        chat: *const c_char,
        chat_len: usize,
        limits: *const RawTemplateLimits,
    ) -> RawText;
    pub(crate) fn gantry_answer_parser_new(
        form: *const c_char,
        form_len: usize,
        reason: *mut RawText,
    ) -> *mut RawAnswerParser;
    pub(crate) fn gantry_answer_parser_free(parser: *mut RawAnswerParser);
    pub(crate) fn gantry_answer_parse(
        parser: *const RawAnswerParser,
        text: *const c_char,
        text_len: usize,
        cpu_ms: u64,
        memory_bytes: u64,
    ) -> RawText;
    pub(crate) fn gantry_exit_on_terminate();
    pub(crate) fn gantry_end_after_cpu_ms(ms: u64);
    pub(crate) fn gantry_decode(ctx: *mut sys::llama_context, batch: *const sys::llama_batch) -> i32;
    pub(crate) fn gantry_tokenize(
        vocab: *const sys::llama_vocab,
        text: *const c_char,
        text_len: i32,
        tokens: *mut sys::llama_token,
        n_tokens_max: i32,
        add_special: bool,
        parse_special: bool,
    ) -> i32;
    pub(crate) fn gantry_token_to_piece(
        vocab: *const sys::llama_vocab,
        token: sys::llama_token,
        buf: *mut c_char,
        length: i32,
        special: bool,
    ) -> i32;
    pub(crate) fn gantry_model_load(
        path: *const c_char,
        params: *const sys::llama_model_params,
    ) -> *mut sys::llama_model;
    pub(crate) fn gantry_context_new(
        model: *mut sys::llama_model,
        params: *const sys::llama_context_params,
    ) -> *mut sys::llama_context;
    pub(crate) fn gantry_compute_bytes(ctx: *const sys::llama_context) -> u64;
    pub(crate) fn gantry_state_range(
        ctx: *mut sys::llama_context,
        seq_id: sys::llama_seq_id,
        from: sys::llama_pos,
        to: sys::llama_pos,
        dst: *mut u8,
        size: usize,
    ) -> usize;
    pub(crate) fn gantry_grammar_parse(
        vocab: *const sys::llama_vocab,
        text: *const c_char,
        names: *mut RawText,
        rule_at: *mut usize,
    ) -> RawText;
    pub(crate) fn gantry_builtin_cpu(use_it: bool);
    pub(crate) fn gantry_register_builtin_cpu();
    pub(crate) fn gantry_backend_score(path: *const c_char, reason: *mut RawText) -> i32;
    pub(crate) fn gantry_backend_load(path: *const c_char) -> bool;
    pub(crate) fn gantry_zero_lazily(lazily: bool);
    pub(crate) fn gantry_can_zero_lazily() -> bool;
    pub(crate) fn gantry_cell_bytes(ctx: *const sys::llama_context) -> u64;
}

impl RawText {
    /// Nothing yet; what a callee fills in.
    pub(crate) fn empty() -> Self {
        Self { data: std::ptr::null_mut(), len: 0, error: false }
    }

    /// The text, or the text of the error. Bytes that are not UTF-8 are replaced.
    pub(crate) fn into_result(self) -> Result<String, String> {
        self.into_bytes().map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The bytes as they are, or the text of the error.
    pub(crate) fn into_bytes(self) -> Result<Vec<u8>, String> {
        let failed = self.error;
        let bytes = if self.data.is_null() {
            Vec::from(if failed { &b"llama.cpp failed without a reason"[..] } else { b"" })
        } else {
            // SAFETY: the shim allocated `len` bytes at `data` and filled them; they live until the free below.
            unsafe { std::slice::from_raw_parts(self.data.cast::<u8>(), self.len) }.to_vec()
        };
        // SAFETY: `self` came from the shim, is consumed here, and freeing null does nothing.
        unsafe { gantry_text_free(self) };
        if failed { Err(String::from_utf8_lossy(&bytes).into_owned()) } else { Ok(bytes) }
    }
}

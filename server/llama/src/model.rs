//! A loaded model: weights and vocabulary, immutable, shared through an `Arc`.

use std::ffi::{CStr, CString, c_char, c_void};
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use llama_cpp_sys_2 as sys;

use crate::error::{ModelError, TokenizeError};
use crate::gpu::{self, GpuSplit};
use crate::pretokenizer::PreTokenizer;
use crate::specials::Specials;
use crate::{backend, logs, shim};

/// A token id.
pub type Token = i32;

/// The longest description asked of llama.cpp, in bytes.
const DESCRIPTION_BYTES: usize = 256;
/// A first guess at the bytes of one token's text; the call is repeated when it is longer.
const PIECE_BYTES: usize = 64;

/// How a model is loaded.
#[derive(Clone, Debug, Default)]
pub struct ModelParams {
    /// Layers to put on GPUs; `None`: all that can be; 0: none, and no GPU helps.
    pub gpu_layers: Option<u32>,
    /// How they are spread.
    pub gpu_split: GpuSplit,
    /// A chat template in the place of the one that the file may bring.
    pub chat_template: Option<String>,
}

/// A model that generates text from left to right.
#[derive(Debug)]
pub struct Model {
    ptr: NonNull<sys::llama_model>,
    vocab: NonNull<sys::llama_vocab>,
    vocab_size: u32,
    pre_tokenizer: PreTokenizer,
    /// In the place of the file's.
    given_template: Option<String>,
    /// Made at the first use, from then on the same.
    specials: OnceLock<Specials>,
}

// SAFETY: llama.cpp never writes to a model after it is loaded, but for n_ctx_train when a context with YaRN scaling is
// made: a context is made only through `&Arc<Model>` on the thread that asks, and this crate sets no such scaling.
unsafe impl Send for Model {}
// SAFETY: as above; the probes behind this crate decode from several threads on one model, bitwise equal.
unsafe impl Sync for Model {}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: `ptr` is owned, and contexts and templates hold an Arc, so none of them is left.
        unsafe { sys::llama_model_free(self.ptr.as_ptr()) };
    }
}

/// What the progress callback of one load shares with it.
struct Progress<'a> {
    callback: &'a mut dyn FnMut(f32) -> bool,
    aborted: bool,
}

unsafe extern "C" fn on_progress(fraction: f32, data: *mut c_void) -> bool {
    // SAFETY: `data` is the `Progress` that `Model::load` keeps alive across the call, and llama.cpp reports from the
    // calling thread only.
    let progress = unsafe { &mut *data.cast::<Progress<'_>>() };
    // A panic must not unwind into C++: it aborts the load instead.
    let go_on = std::panic::catch_unwind(AssertUnwindSafe(|| (progress.callback)(fraction))).unwrap_or(false);
    progress.aborted |= !go_on;
    go_on
}

impl Model {
    /// Loads a GGUF file. `progress` hears fractions from 0 to 1 and aborts the load by answering false (or by a panic).
    ///
    /// # Errors
    /// The reason llama.cpp gave, that the model cannot generate text, or that what is asked of GPUs cannot be had.
    pub fn load(
        path: &Path,
        params: &ModelParams,
        progress: &mut dyn FnMut(f32) -> bool,
    ) -> Result<Arc<Self>, ModelError> {
        let mut offload = gpu::offload(params.gpu_layers, &params.gpu_split, backend::init()?)?;
        let c_path =
            path.to_str().and_then(|p| CString::new(p).ok()).ok_or_else(|| ModelError::Path(path.to_path_buf()))?;
        let mut state = Progress { callback: progress, aborted: false };
        // SAFETY: plain data out.
        let mut raw = unsafe { sys::llama_model_default_params() };
        raw.n_gpu_layers = offload.n_gpu_layers;
        raw.devices = offload.devices.as_mut().map_or(std::ptr::null_mut(), |devices| devices.as_mut_ptr());
        raw.load_mode = offload.load_mode;
        raw.split_mode = offload.split_mode;
        raw.main_gpu = offload.main_gpu;
        raw.tensor_split = offload.tensor_split.as_ref().map_or(std::ptr::null(), |parts| parts.as_ptr());
        raw.progress_callback = Some(on_progress);
        raw.progress_callback_user_data = (&raw mut state).cast();
        logs::clear_recent_errors();
        // SAFETY: the path is NUL-terminated; `raw`, `state` and `offload`, into which `raw` points, outlive the call; the
        // devices end with null; and the shim catches exceptions.
        let ptr = unsafe { shim::gantry_model_load(c_path.as_ptr(), &raw const raw) };
        let Some(ptr) = NonNull::new(ptr) else {
            return Err(if state.aborted {
                ModelError::Aborted
            } else {
                ModelError::Refused(logs::take_recent_errors())
            });
        };
        let mut model = Self::from_raw(ptr)?;
        model.given_template.clone_from(&params.chat_template);
        Ok(Arc::new(model))
    }

    fn from_raw(ptr: NonNull<sys::llama_model>) -> Result<Self, ModelError> {
        // SAFETY: `ptr` was just loaded; its vocabulary lives as long as it does.
        let vocab = unsafe { sys::llama_model_get_vocab(ptr.as_ptr()) };
        let Some(vocab) = NonNull::new(vocab.cast_mut()) else {
            // SAFETY: owned and not used again.
            unsafe { sys::llama_model_free(ptr.as_ptr()) };
            return Err(ModelError::NotGenerative("it has no vocabulary"));
        };
        // SAFETY: a valid vocabulary.
        let vocab_size = unsafe { sys::llama_vocab_n_tokens(vocab.as_ptr()) };
        // From here on Drop frees the model.
        let vocab_size = u32::try_from(vocab_size).unwrap_or(0);
        let mut model = Self {
            ptr,
            vocab,
            vocab_size,
            pre_tokenizer: PreTokenizer::NONE,
            given_template: None,
            specials: OnceLock::new(),
        };
        model.pre_tokenizer = model.find_pre_tokenizer()?;
        // SAFETY: a valid model; these read flags.
        let (encoder, decoder, diffusion) = unsafe {
            (
                sys::llama_model_has_encoder(model.raw()),
                sys::llama_model_has_decoder(model.raw()),
                sys::llama_model_is_diffusion(model.raw()),
            )
        };
        if model.vocab_size == 0 {
            return Err(ModelError::NotGenerative("its vocabulary is empty"));
        }
        if encoder || !decoder {
            return Err(ModelError::NotGenerative("it is an encoder; only decoder models are supported"));
        }
        if diffusion {
            return Err(ModelError::NotGenerative("it is a diffusion model"));
        }
        Ok(model)
    }

    /// The one that llama.cpp takes: vocabularies other than those of merges have none.
    fn find_pre_tokenizer(&self) -> Result<PreTokenizer, ModelError> {
        // SAFETY: a valid vocabulary.
        if unsafe { sys::llama_vocab_type(self.raw_vocab()) } != sys::LLAMA_VOCAB_TYPE_BPE {
            return Ok(PreTokenizer::NONE);
        }
        let kind = self.metadata(c"tokenizer.ggml.model").unwrap_or_default();
        let name = self.metadata(c"tokenizer.ggml.pre").unwrap_or_default();
        // llama.cpp asserts that no space gets to its merges, and here two of them would.
        if name == "whitespace" && kind != "whitespace" && kind != "gemma4" {
            let reason = format!(
                "its pre-tokeniser `whitespace` needs a tokeniser that leaves spaces out, and `{kind}` does not: convert \
                 it again, with the pre-tokeniser of its tokeniser"
            );
            return Err(ModelError::Refused(reason));
        }
        // Here llama.cpp does not look at the name.
        Ok(PreTokenizer::named(if kind == "gemma4" { "gemma4" } else { &name }))
    }

    /// Its reserved tokens.
    pub(crate) fn specials(&self) -> &Specials {
        self.specials.get_or_init(|| Specials::of(self))
    }

    pub(crate) fn pre_tokenizer(&self) -> PreTokenizer {
        self.pre_tokenizer
    }

    pub(crate) fn raw(&self) -> *mut sys::llama_model {
        self.ptr.as_ptr()
    }

    /// Lives as long as the model.
    pub(crate) fn raw_vocab(&self) -> *const sys::llama_vocab {
        self.vocab.as_ptr()
    }

    /// Tokens in the vocabulary; ids are 0 to this.
    #[must_use]
    pub fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    /// Tokens the model was trained for.
    #[must_use]
    pub fn n_ctx_train(&self) -> u32 {
        // SAFETY: a valid model.
        u32::try_from(unsafe { sys::llama_model_n_ctx_train(self.raw()) }).unwrap_or(0)
    }

    /// Bytes of the tensors.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        // SAFETY: a valid model.
        unsafe { sys::llama_model_size(self.raw()) }
    }

    /// Number of weights.
    #[must_use]
    pub fn parameters(&self) -> u64 {
        // SAFETY: a valid model.
        unsafe { sys::llama_model_n_params(self.raw()) }
    }

    /// llama.cpp's one line about the model.
    #[must_use]
    pub fn description(&self) -> String {
        let mut buffer = [0_u8; DESCRIPTION_BYTES];
        // SAFETY: writes at most the length given, with a NUL at the end (snprintf).
        unsafe { sys::llama_model_desc(self.raw(), buffer.as_mut_ptr().cast::<c_char>(), buffer.len()) };
        CStr::from_bytes_until_nul(&buffer).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// A value of the file's metadata, as text; `None` where there is none or it is longer than what is asked for here.
    pub(crate) fn metadata(&self, key: &CStr) -> Option<String> {
        let mut buffer = [0_u8; DESCRIPTION_BYTES];
        // SAFETY: a valid model and key; writes at most the length given, with a NUL at the end (snprintf).
        let len = unsafe {
            sys::llama_model_meta_val_str(self.raw(), key.as_ptr(), buffer.as_mut_ptr().cast::<c_char>(), buffer.len())
        };
        let value = buffer.get(..usize::try_from(len).ok()?)?;
        String::from_utf8(value.to_vec()).ok()
    }

    /// Whether each of its tokens chooses among experts.
    #[must_use]
    pub fn has_experts(&self) -> bool {
        let experts = self.metadata_of_architecture("expert_count");
        experts.and_then(|experts| experts.parse::<u32>().ok()).is_some_and(|experts| experts > 0)
    }

    /// The length of context past which llama.cpp rotates keys by other factors, from the first position on; `None`
    /// where the file tells of none.
    pub(crate) fn original_context(&self) -> Option<u32> {
        match self.metadata_of_architecture("rope.scaling.original_context_length") {
            Some(tokens) => tokens.parse().ok(),
            // llama.cpp takes the trained length then.
            None => (self.metadata_of_architecture("rope.scaling.type")? == "longrope").then(|| self.n_ctx_train()),
        }
    }

    /// A value that the file gives under its architecture's name.
    fn metadata_of_architecture(&self, key: &str) -> Option<String> {
        let architecture = self.metadata(c"general.architecture")?;
        self.metadata(&CString::new(format!("{architecture}.{key}")).ok()?)
    }

    /// Whether it keeps a running state beside or instead of what each token left, which cannot be cut.
    #[must_use]
    pub fn is_recurrent(&self) -> bool {
        // SAFETY: a valid model; these read flags.
        unsafe { sys::llama_model_is_recurrent(self.raw()) || sys::llama_model_is_hybrid(self.raw()) }
    }

    /// Whether there is a chat template: one that was given, or the file's.
    #[must_use]
    pub fn has_chat_template(&self) -> bool {
        self.given_template.is_some() || self.template(None).is_some()
    }

    /// The chat template that was given in the place of the file's.
    pub(crate) fn given_template(&self) -> Option<&str> {
        self.given_template.as_deref()
    }

    /// A template of the file, as text: the chat template, or one by its name.
    pub(crate) fn template(&self, name: Option<&CStr>) -> Option<&CStr> {
        let name = name.map_or(std::ptr::null(), CStr::as_ptr);
        // SAFETY: a valid model; a null name asks for the default template.
        let template = unsafe { sys::llama_model_chat_template(self.raw(), name) };
        // SAFETY: llama.cpp's texts end with NUL, and this one lives as long as the model.
        (!template.is_null()).then(|| unsafe { CStr::from_ptr(template) })
    }

    /// Whether this token ends a generation.
    #[must_use]
    pub fn is_eog(&self, token: Token) -> bool {
        // SAFETY: a valid vocabulary and, checked first, a token of it.
        self.contains(token) && unsafe { sys::llama_vocab_is_eog(self.vocab.as_ptr(), token) }
    }

    /// The token that begins a text, where the vocabulary has one.
    #[must_use]
    pub fn bos(&self) -> Option<Token> {
        // SAFETY: a valid vocabulary.
        let token = unsafe { sys::llama_vocab_bos(self.vocab.as_ptr()) };
        self.contains(token).then_some(token)
    }

    /// The token that ends a text, where the vocabulary has one.
    #[must_use]
    pub fn eos(&self) -> Option<Token> {
        // SAFETY: a valid vocabulary.
        let token = unsafe { sys::llama_vocab_eos(self.vocab.as_ptr()) };
        self.contains(token).then_some(token)
    }

    /// Whether this is a token of the vocabulary.
    #[must_use]
    pub fn contains(&self, token: Token) -> bool {
        u32::try_from(token).is_ok_and(|t| t < self.vocab_size)
    }

    /// Appends the bytes of a token to `out`; they need not be whole characters. `special`: special tokens are written
    /// as they are named, otherwise as nothing.
    ///
    /// # Errors
    /// When the token is not in the vocabulary.
    pub fn token_to_piece(&self, token: Token, special: bool, out: &mut Vec<u8>) -> Result<(), TokenizeError> {
        if !self.contains(token) {
            return Err(TokenizeError::NoSuchToken(token));
        }
        let start = out.len();
        let mut capacity = PIECE_BYTES;
        for _ in 0..2 {
            out.resize(start + capacity, 0);
            let length = i32::try_from(capacity).unwrap_or(i32::MAX);
            let buffer = out[start..].as_mut_ptr().cast::<c_char>();
            // SAFETY: `buffer` has `length` bytes, the token is of this vocabulary, the shim catches exceptions.
            let n = unsafe { shim::gantry_token_to_piece(self.vocab.as_ptr(), token, buffer, length, special) };
            if let Ok(n) = usize::try_from(n) {
                out.truncate(start + n.min(capacity));
                return Ok(());
            }
            capacity = match n.checked_neg().and_then(|n| usize::try_from(n).ok()) {
                Some(needed) => needed,
                None => break,
            };
        }
        out.truncate(start);
        Err(TokenizeError::Failed)
    }
}

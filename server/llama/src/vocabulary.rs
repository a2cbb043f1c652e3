//! Whether two models name the same tokens, so that one can guess what the other will say.

use std::ffi::CStr;

use llama_cpp_sys_2 as sys;

use crate::model::{Model, Token};

/// Vocabularies may differ in size by so many tokens, as llama.cpp has it: models of a family are padded differently.
pub const MAX_VOCABULARY_DIFFERENCE: u32 = 128;
/// The first tokens are special ones, which llama.cpp leaves out of the comparison of texts as well.
pub const FIRST_COMPARED_TOKEN: u32 = 5;

/// The tokens by which a model is asked to fill a gap within a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InfillTokens {
    /// What begins each text, where the vocabulary says so.
    pub begin: Option<Token>,
    /// Before the text that stands before the gap.
    pub prefix: Token,
    /// Before the text that stands after it.
    pub suffix: Token,
    /// After which the gap's text is to come.
    pub middle: Token,
    /// Before the name of a repository.
    pub repository: Option<Token>,
    /// Before the name of a file.
    pub file: Option<Token>,
}

/// What a vocabulary says of itself.
struct Traits {
    kind: sys::llama_vocab_type,
    /// The token that begins each text, where one does.
    begins_with: Option<Token>,
    /// The token that ends each text, where one does.
    ends_with: Option<Token>,
}

impl Model {
    /// Why `draft` cannot guess tokens of this model: another kind of vocabulary, other tokens around a text, too
    /// different a size, or a token with another text. `None`: it can, with those tokens that both have.
    #[must_use]
    pub fn vocabulary_mismatch(&self, draft: &Self) -> Option<String> {
        let (own, other) = (self.traits(), draft.traits());
        if own.kind == sys::LLAMA_VOCAB_TYPE_NONE || own.kind != other.kind {
            return Some(format!("its vocabulary is of type {}, not {}", other.kind, own.kind));
        }
        if own.begins_with != other.begins_with {
            let (own, other) = (named(own.begins_with), named(other.begins_with));
            return Some(format!("it begins a text with {other}, not with {own}"));
        }
        if own.ends_with != other.ends_with {
            let (own, other) = (named(own.ends_with), named(other.ends_with));
            return Some(format!("it ends a text with {other}, not with {own}"));
        }
        let (own_size, other_size) = (self.vocab_size(), draft.vocab_size());
        if own_size.abs_diff(other_size) > MAX_VOCABULARY_DIFFERENCE {
            return Some(format!(
                "it has {other_size} tokens, not {own_size}, and a difference of {MAX_VOCABULARY_DIFFERENCE} is the most"
            ));
        }
        fn text_of(model: &Model, token: u32) -> Option<&CStr> {
            model.token_text(Token::try_from(token).ok()?)
        }
        let differs = (FIRST_COMPARED_TOKEN..own_size.min(other_size))
            .find(|&token| text_of(self, token) != text_of(draft, token))?;
        let text =
            |model: &Self| text_of(model, differs).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default();
        Some(format!("its token {differs} is {:?}, not {:?}", text(draft), text(self)))
    }

    fn traits(&self) -> Traits {
        let vocab = self.raw_vocab();
        // SAFETY: a valid vocabulary; these read fields.
        unsafe {
            Traits {
                kind: sys::llama_vocab_type(vocab),
                begins_with: sys::llama_vocab_get_add_bos(vocab).then(|| sys::llama_vocab_bos(vocab)),
                ends_with: sys::llama_vocab_get_add_eos(vocab).then(|| sys::llama_vocab_eos(vocab)),
            }
        }
    }

    /// What the vocabulary says a token is, as llama.cpp's flags; 0 where there is none.
    pub(crate) fn attributes(&self, token: Token) -> sys::llama_token_attr {
        // SAFETY: a valid vocabulary of some type and, checked first, a token of it.
        if self.contains(token) { unsafe { sys::llama_vocab_get_attr(self.raw_vocab(), token) } } else { 0 }
    }

    /// What a token is written as, where it is one of those that structure prompts: control tokens, and user-defined ones
    /// that look like them or that the model's chat template writes.
    #[must_use]
    pub fn reserved_text(&self, token: Token) -> Option<&str> {
        Some(self.specials().by_token(token)?.text.as_str())
    }

    /// The tokens for gaps within texts; `None` where one of those that it takes is missing.
    #[must_use]
    pub fn infill_tokens(&self) -> Option<InfillTokens> {
        let vocab = self.raw_vocab();
        let known = |token: Token| self.contains(token).then_some(token);
        // SAFETY: a valid vocabulary; these read fields.
        let (prefix, suffix, middle, repository, file) = unsafe {
            (
                sys::llama_vocab_fim_pre(vocab),
                sys::llama_vocab_fim_suf(vocab),
                sys::llama_vocab_fim_mid(vocab),
                sys::llama_vocab_fim_rep(vocab),
                sys::llama_vocab_fim_sep(vocab),
            )
        };
        Some(InfillTokens {
            begin: self.bos().filter(|_| self.begins_with_bos()),
            prefix: known(prefix)?,
            suffix: known(suffix)?,
            middle: known(middle)?,
            repository: known(repository),
            file: known(file),
        })
    }

    /// Whether a text begins with BOS.
    pub(crate) fn begins_with_bos(&self) -> bool {
        // SAFETY: a valid vocabulary; this reads a field.
        unsafe { sys::llama_vocab_get_add_bos(self.raw_vocab()) }
    }

    /// A token as the vocabulary writes it.
    pub(crate) fn token_text(&self, token: Token) -> Option<&CStr> {
        let token = Some(token).filter(|&token| self.contains(token))?;
        // SAFETY: a valid vocabulary of some type, and a token of it.
        let text = unsafe { sys::llama_vocab_get_text(self.raw_vocab(), token) };
        // SAFETY: NUL-terminated, and it lives as long as the model.
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })
    }
}

fn named(token: Option<Token>) -> String {
    token.map_or_else(|| String::from("no token"), |token| format!("token {token}"))
}

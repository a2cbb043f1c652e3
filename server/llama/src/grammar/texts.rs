//! The text of every token, sorted, so that a grammar can look at a whole vocabulary prefix by prefix.

use std::fmt;
use std::sync::Arc;

use llama_cpp_sys_2 as sys;

use crate::model::{Model, Token};

/// The texts of a vocabulary. Built once for a model; it takes as long as asking for every token's text.
pub struct TokenTexts {
    bytes: Vec<u8>,
    /// Where each token's text ends; it begins where that of the token before ends.
    ends: Vec<u32>,
    /// Tokens with text, in the order of their texts.
    order: Vec<Token>,
    /// For each place in `order`, the bytes that its text shares with that of the place before.
    shared: Vec<u32>,
    is_end: Vec<bool>,
    model: Option<Arc<Model>>,
}

impl fmt::Debug for TokenTexts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenTexts").field("tokens", &self.ends.len()).finish_non_exhaustive()
    }
}

impl TokenTexts {
    /// The texts of a model's tokens. Special tokens have none, but for those of `markup`, which have their names.
    #[must_use]
    pub fn of(model: &Arc<Model>, markup: &[Token]) -> Self {
        let size = model.vocab_size();
        let pieces = (0..).take(size as usize).map(|token| {
            let mut piece = Vec::new();
            // A token that llama.cpp cannot name has no text.
            let _ = model.token_to_piece(token, markup.contains(&token), &mut piece);
            piece
        });
        let ends: Vec<Token> = (0..).take(size as usize).filter(|&token| model.is_eog(token)).collect();
        Self { model: Some(model.clone()), ..Self::new(pieces, &ends) }
    }

    /// A vocabulary without a model: grammars over it cannot name tokens.
    #[must_use]
    pub fn new(pieces: impl Iterator<Item = Vec<u8>>, end_tokens: &[Token]) -> Self {
        let (mut bytes, mut ends) = (Vec::new(), Vec::new());
        for piece in pieces {
            bytes.extend_from_slice(&piece);
            ends.push(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        }
        let is_end = (0..).take(ends.len()).map(|token| end_tokens.contains(&token)).collect();
        let mut texts = Self { bytes, ends, order: Vec::new(), shared: Vec::new(), is_end, model: None };
        let mut order: Vec<Token> = (0..).take(texts.ends.len()).filter(|&t| !texts.text(t).is_empty()).collect();
        order.sort_by(|&a, &b| texts.text(a).cmp(texts.text(b)));
        texts.shared = std::iter::once(0)
            .chain(order.windows(2).map(|pair| {
                let (a, b) = (texts.text(pair[0]), texts.text(pair[1]));
                u32::try_from(a.iter().zip(b).take_while(|(a, b)| a == b).count()).unwrap_or(u32::MAX)
            }))
            .take(order.len())
            .collect();
        texts.order = order;
        texts
    }

    /// Tokens there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The bytes of a token; none for a special one, or one that does not exist.
    #[must_use]
    pub fn text(&self, token: Token) -> &[u8] {
        let Some(at) = usize::try_from(token).ok().filter(|&at| at < self.ends.len()) else { return &[] };
        let start = if at == 0 { 0 } else { self.ends[at - 1] as usize };
        &self.bytes[start..self.ends[at] as usize]
    }

    /// Whether a token ends a generation.
    #[must_use]
    pub fn is_end(&self, token: Token) -> bool {
        usize::try_from(token).is_ok_and(|at| self.is_end.get(at).copied().unwrap_or(false))
    }

    /// The tokens that end a generation.
    pub fn end_tokens(&self) -> impl Iterator<Item = Token> + '_ {
        (0..).zip(&self.is_end).filter(|(_, is_end)| **is_end).map(|(token, _)| token)
    }

    /// The tokens of a text as it would stand inside another one.
    #[must_use]
    pub fn tokenize(&self, text: &str) -> Vec<Token> {
        self.model.as_ref().and_then(|model| model.tokenize(text, false, false).ok()).unwrap_or_default()
    }

    /// Tokens with text, in the order of their texts, each with the bytes it shares with the one before.
    pub(super) fn sorted(&self) -> impl Iterator<Item = (Token, usize)> + '_ {
        self.order.iter().zip(&self.shared).map(|(&token, &shared)| (token, shared as usize))
    }

    pub(super) fn raw_vocab(&self) -> *const sys::llama_vocab {
        self.model.as_ref().map_or(std::ptr::null(), |model| model.raw_vocab())
    }
}

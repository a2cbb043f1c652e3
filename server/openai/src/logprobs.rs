//! Log-probabilities in the two shapes that chats and texts have for them.
//!
//! Tokens are bytes, and need not be whole characters: one that is not is shown as `bytes:\xf0\x9f`, as `OpenAI` does,
//! and a chat's shape tells its bytes beside.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What stands for the logarithm of (nearly) nothing, which JSON cannot write: `OpenAI`'s own number for it.
const LOGPROB_FLOOR: f32 = -9999.0;

/// A token and how likely it was.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenChance<'a> {
    /// Its bytes.
    pub bytes: &'a [u8],
    /// The natural logarithm of its probability.
    pub logprob: f32,
}

impl TokenChance<'_> {
    fn shown(&self) -> String {
        match std::str::from_utf8(self.bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => self.bytes.iter().fold("bytes:".to_owned(), |shown, byte| format!("{shown}\\x{byte:02x}")),
        }
    }

    fn told(&self) -> f32 {
        if self.logprob.is_nan() { LOGPROB_FLOOR } else { self.logprob.clamp(LOGPROB_FLOOR, 0.0) }
    }
}

/// Log-probabilities of a chat's answer, or of a piece of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ChatLogprobs {
    /// One for each token.
    pub content: Vec<ChatLogprob>,
    /// Never.
    pub refusal: Option<Vec<ChatLogprob>>,
}

/// See [`ChatLogprobs`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ChatLogprob {
    /// The token.
    pub token: String,
    /// The natural logarithm of its probability.
    pub logprob: f32,
    /// The token, exactly.
    pub bytes: Vec<u8>,
    /// The likeliest in its place, the likeliest first; as many as were asked for.
    pub top_logprobs: Vec<TopLogprob>,
}

/// See [`ChatLogprob`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TopLogprob {
    /// The token.
    pub token: String,
    /// The natural logarithm of its probability.
    pub logprob: f32,
    /// The token, exactly.
    pub bytes: Vec<u8>,
}

impl ChatLogprobs {
    /// Adds a token and the likeliest in its place.
    pub fn push<'a>(&mut self, token: TokenChance<'_>, top: impl Iterator<Item = TokenChance<'a>>) {
        let top_logprobs =
            top.map(|t| TopLogprob { token: t.shown(), logprob: t.told(), bytes: t.bytes.to_vec() }).collect();
        self.content.push(ChatLogprob {
            token: token.shown(),
            logprob: token.told(),
            bytes: token.bytes.to_vec(),
            top_logprobs,
        });
    }
}

/// Log-probabilities of a text, or of a piece of it; all arrays have one element for each token.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TextLogprobs {
    /// The tokens.
    pub tokens: Vec<String>,
    /// The natural logarithms of their probabilities; `None` of a prompt's first, before which there is nothing.
    pub token_logprobs: Vec<Option<f32>>,
    /// The likeliest in their places, and the tokens themselves; `None` where none were asked for.
    pub top_logprobs: Option<Vec<Option<BTreeMap<String, f32>>>>,
    /// Where each token begins, in characters of the text.
    pub text_offset: Vec<u32>,
}

/// What vLLM tells of a token of a prompt: by its id, how likely it was, and as many of the likeliest in its place as were asked for.
pub type PromptLogprobs = BTreeMap<i32, PromptLogprob>;

/// See [`PromptLogprobs`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PromptLogprob {
    /// The natural logarithm of its probability.
    pub logprob: f32,
    /// Its place among all tokens, the likeliest having 1.
    pub rank: u32,
    /// The token.
    pub decoded_token: String,
}

impl PromptLogprob {
    /// Of a token that has this rank.
    #[must_use]
    pub fn of(token: TokenChance<'_>, rank: u32) -> Self {
        Self { logprob: token.told(), rank, decoded_token: token.shown() }
    }
}

/// How far a text has come, in characters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TextOffset(u32);

impl TextOffset {
    /// The place of a token, which is then behind.
    fn advance(&mut self, bytes: &[u8]) -> u32 {
        let continues = |byte: &u8| byte & 0xc0 == 0x80;
        // A token that begins in the middle of a character begins where that character does.
        let place = if bytes.first().is_some_and(continues) { self.0.saturating_sub(1) } else { self.0 };
        let begun = bytes.iter().filter(|byte| !continues(byte)).count();
        self.0 = self.0.saturating_add(u32::try_from(begun).unwrap_or(u32::MAX));
        place
    }
}

impl TextLogprobs {
    /// For tokens with so many of the likeliest beside them.
    #[must_use]
    pub fn new(top: u32) -> Self {
        Self { top_logprobs: (top > 0).then(Vec::new), ..Self::default() }
    }

    /// Adds a token and the likeliest in its place.
    pub fn push<'a>(
        &mut self,
        token: TokenChance<'_>,
        top: impl Iterator<Item = TokenChance<'a>>,
        offset: &mut TextOffset,
    ) {
        self.text_offset.push(offset.advance(token.bytes));
        if let Some(all) = &mut self.top_logprobs {
            let mut likeliest: BTreeMap<String, f32> = top.map(|t| (t.shown(), t.told())).collect();
            likeliest.insert(token.shown(), token.told());
            all.push(Some(likeliest));
        }
        self.tokens.push(token.shown());
        self.token_logprobs.push(Some(token.told()));
    }

    /// Adds a token that nothing stands before.
    pub fn push_first(&mut self, bytes: &[u8], offset: &mut TextOffset) {
        self.text_offset.push(offset.advance(bytes));
        if let Some(all) = &mut self.top_logprobs {
            all.push(None);
        }
        self.tokens.push(TokenChance { bytes, logprob: 0.0 }.shown());
        self.token_logprobs.push(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_that_are_no_characters_are_shown_and_placed() {
        let mut logprobs = TextLogprobs::new(1);
        let mut offset = TextOffset::default();
        // "é" in one token, the four bytes of an emoji in two, and a letter.
        for bytes in ["é".as_bytes(), b"\xf0\x9f", b"\x98\x80", b"!"] {
            logprobs.push(TokenChance { bytes, logprob: -0.5 }, std::iter::empty(), &mut offset);
        }
        assert_eq!(logprobs.tokens, ["é", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80", "!"]);
        assert_eq!(logprobs.text_offset, [0, 1, 1, 2]);
    }

    #[test]
    fn what_json_cannot_write_is_told_as_a_number() {
        let mut logprobs = ChatLogprobs::default();
        for logprob in [f32::NEG_INFINITY, f32::NAN, -0.25, 1e-6] {
            logprobs.push(TokenChance { bytes: b"x", logprob }, std::iter::empty());
        }
        let told: Vec<f32> = logprobs.content.iter().map(|token| token.logprob).collect();
        assert_eq!(told, [LOGPROB_FLOOR, LOGPROB_FLOOR, -0.25, 0.0]);
    }
}

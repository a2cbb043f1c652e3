//! What is looked at of the tokenizer's arrays while the reader passes over them.
//!
//! Kept are a hash for each token and for what each merge makes, and the numbers of tokens of some types: no text. What a
//! defect is depends on the kind of tokenizer, which may stand further down in the file, so that most of what is found here
//! is judged in [`crate::tokenizer`]. Two different texts with one 64-bit hash would be taken for the same: with a million
//! tokens the odds are about one in 40 million.

use std::hash::{DefaultHasher, Hasher as _};
use std::io::Read;

use crate::error::{Defect, Result, malformed};
use crate::finding::Log;
use crate::limits::{MAX_MERGE_BYTES, MAX_MERGES, MAX_TOKEN_BYTES};
use crate::source::Source;
use crate::value::ValueType;

/// Key of the vocabulary.
pub(crate) const TOKENS_KEY: &str = "tokenizer.ggml.tokens";
/// Key of what each token is.
pub(crate) const TYPES_KEY: &str = "tokenizer.ggml.token_type";
/// Key of how likely each token is.
pub(crate) const SCORES_KEY: &str = "tokenizer.ggml.scores";
/// Key of which tokens become one.
pub(crate) const MERGES_KEY: &str = "tokenizer.ggml.merges";
/// Key of the tokens that are never to be said.
pub(crate) const SUPPRESS_KEY: &str = "tokenizer.ggml.suppress_tokens";
/// Key of how characters are made alike.
pub(crate) const CHARS_KEY: &str = "tokenizer.ggml.precompiled_charsmap";

/// llama.cpp's number for tokens that stand for a byte, and the largest number for any kind.
const BYTE_TYPE: i32 = 6;
/// The type of tokens that are looked for in a text before it is cut.
const USER_DEFINED_TYPE: i32 = 4;
/// The types of tokens that are never text.
const UNKNOWN_TYPE: i32 = 2;
const CONTROL_TYPE: i32 = 3;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Scan {
    /// Hashes of the tokens' texts, in their order,
    pub(crate) tokens: Vec<u64>,
    /// and sorted.
    sorted_tokens: Vec<u64>,
    /// Bytes of their texts,
    token_bytes: Vec<u32>,
    /// and those whose type says that they are control tokens, or unknown, in order.
    control: Vec<u32>,
    /// Tokens whose type says that they are user-defined, in order.
    user_defined: Vec<u32>,
    /// Tokens with a text such as `<0x0A>`, and those whose type says that they are bytes, both in order.
    bytes_by_text: Vec<u32>,
    bytes_by_type: Vec<u32>,
    /// Tokens that begin with a space as byte-level byte-pair encoding writes it (`Ġ`),
    pub(crate) byte_level_spaces: usize,
    /// and as SentencePiece does (`▁`).
    pub(crate) piece_spaces: usize,
    /// The first token whose type is none, with that.
    pub(crate) wrong_type: Option<(u32, i32)>,
    /// The first token whose score is no number.
    pub(crate) wrong_score: Option<u32>,
    /// Hashes of what merges make.
    merges: Vec<u64>,
    /// The first merge that does not name two pieces.
    pub(crate) wrong_merge: Option<u32>,
    /// The least and the greatest of the tokens that are never to be said.
    pub(crate) suppressed: Option<(i32, i32)>,
    /// Bytes of the character map, and how many of them its first part has by its own account.
    pub(crate) chars: Option<(u64, u64)>,
}

fn hash_of(text: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(text);
    hasher.finish()
}

fn indices(count: u64) -> std::ops::Range<u32> {
    0..u32::try_from(count).unwrap_or(u32::MAX)
}

impl Scan {
    /// Control tokens with the bytes of their texts.
    pub(crate) fn control_tokens(&self) -> impl Iterator<Item = (u32, u64)> {
        self.control.iter().filter_map(|&token| Some((token, u64::from(*self.token_bytes.get(token as usize)?))))
    }

    /// Passes over an array's `length` elements, if it is one of the tokenizer's. False: it is for others.
    pub(crate) fn array<R: Read>(
        &mut self,
        source: &mut Source<R>,
        key: &str,
        element: ValueType,
        length: u64,
        log: &mut Log,
    ) -> Result<bool> {
        match (key, element) {
            (TOKENS_KEY, ValueType::String) => self.tokens(source, length, log)?,
            (MERGES_KEY, ValueType::String) => self.merges(source, length)?,
            (TYPES_KEY, ValueType::I32) => self.types(source, length)?,
            (SCORES_KEY, ValueType::F32) => {
                for index in indices(length) {
                    if f32::from_le_bytes(source.bytes("the tokens' scores")?).is_nan() {
                        self.wrong_score.get_or_insert(index);
                    }
                }
            }
            (SUPPRESS_KEY, ValueType::I32) => {
                for _ in indices(length) {
                    let token = i32::from_le_bytes(source.bytes("the tokens that are never said")?);
                    let (least, greatest) = self.suppressed.unwrap_or((token, token));
                    self.suppressed = Some((least.min(token), greatest.max(token)));
                }
            }
            (CHARS_KEY, ValueType::U8 | ValueType::I8) => {
                let first = if length < 4 { 0 } else { source.u32("the character map")?.into() };
                source.skip(if length < 4 { length } else { length - 4 }, "the character map")?;
                self.chars = Some((length, first));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Walks the vocabulary and finds two tokens of the same text, on which llama.cpp asserts.
    fn tokens<R: Read>(&mut self, source: &mut Source<R>, count: u64, log: &mut Log) -> Result<()> {
        let offset = source.offset();
        let mut hashes: Vec<(u64, u32)> = Vec::new();
        let mut token = Vec::new();
        for index in indices(count) {
            let at = source.offset();
            let length = source.u64("the vocabulary")?;
            if length > MAX_TOKEN_BYTES {
                return malformed(at, Defect::StringTooLong { key: TOKENS_KEY.into(), length, limit: MAX_TOKEN_BYTES });
            }
            source.read_to(&mut token, length, "the vocabulary")?;
            // llama.cpp reads it up to a NUL, and gives an empty token this text.
            let text = token.split(|&byte| byte == 0).next().unwrap_or_default();
            let hash = if text.is_empty() { hash_of(format!("[EMPTY_{index}]").as_bytes()) } else { hash_of(text) };
            hashes.push((hash, index));
            self.tokens.push(hash);
            self.token_bytes.push(token.len().try_into().unwrap_or(u32::MAX));
            self.byte_level_spaces += usize::from(token.starts_with("Ġ".as_bytes()));
            self.piece_spaces += usize::from(token.starts_with("▁".as_bytes()));
            if is_byte_text(&token) {
                self.bytes_by_text.push(index);
            }
        }
        hashes.sort_unstable();
        if let Some(pair) = hashes.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            log.defect(offset, Defect::DuplicateToken { first: pair[0].1, second: pair[1].1 });
        }
        self.sorted_tokens = hashes.into_iter().map(|(hash, _)| hash).collect();
        Ok(())
    }

    fn types<R: Read>(&mut self, source: &mut Source<R>, count: u64) -> Result<()> {
        for index in indices(count) {
            match i32::from_le_bytes(source.bytes("the tokens' types")?) {
                BYTE_TYPE => self.bytes_by_type.push(index),
                UNKNOWN_TYPE | CONTROL_TYPE => self.control.push(index),
                USER_DEFINED_TYPE => self.user_defined.push(index),
                0..BYTE_TYPE => {}
                found => _ = self.wrong_type.get_or_insert((index, found)),
            }
        }
        Ok(())
    }

    fn merges<R: Read>(&mut self, source: &mut Source<R>, count: u64) -> Result<()> {
        let key = || MERGES_KEY.to_owned();
        if count > MAX_MERGES {
            return malformed(source.offset(), Defect::ArrayTooLong { key: key(), length: count, limit: MAX_MERGES });
        }
        let mut merge = Vec::new();
        for index in indices(count) {
            let at = source.offset();
            let length = source.u64("the merges")?;
            if length > MAX_MERGE_BYTES {
                return malformed(at, Defect::StringTooLong { key: key(), length, limit: MAX_MERGE_BYTES });
            }
            source.read_to(&mut merge, length, "the merges")?;
            // As llama.cpp: the first piece may begin with the space.
            match merge.iter().skip(1).position(|&byte| byte == b' ').filter(|at| at + 2 < merge.len()) {
                Some(space) => {
                    merge.remove(space + 1);
                    self.merges.push(hash_of(&merge));
                }
                None => _ = self.wrong_merge.get_or_insert(index),
            }
        }
        Ok(())
    }

    /// The first token that its type says is a byte and its text does not.
    pub(crate) fn byte_without_text(&self) -> Option<u32> {
        self.bytes_by_type.iter().copied().find(|token| self.bytes_by_text.binary_search(token).is_err())
    }

    /// The first token that its type says is a byte.
    pub(crate) fn first_byte(&self) -> Option<u32> {
        self.bytes_by_type.first().copied()
    }

    /// Bytes that a text can have and no token of byte-level byte-pair encoding stands for alone, in order.
    pub(crate) fn bytes_without_token(&self) -> Vec<u8> {
        // UTF-8 has none of these.
        let is_of_text = |byte: &u8| !matches!(byte, 0xc0 | 0xc1 | 0xf5..=0xff);
        (0..=u8::MAX).filter(is_of_text).filter(|&byte| !self.has_byte(byte)).collect()
    }

    fn has_byte(&self, byte: u8) -> bool {
        let mut buffer = [0; 4];
        let written = byte_level_character(byte).encode_utf8(&mut buffer).as_bytes();
        if self.sorted_tokens.binary_search(&hash_of(written)).is_ok() {
            return true;
        }
        // A user-defined token is found as the text has it, before bytes are written otherwise.
        let plain = hash_of(&[byte]);
        byte.is_ascii() && self.user_defined.iter().any(|&token| self.tokens.get(token as usize) == Some(&plain))
    }

    /// Whether the tokens are those of byte-level byte-pair encoding beyond doubt: any vocabulary may have some of its marks, as
    /// characters that text can have.
    pub(crate) fn is_byte_level(&self) -> bool {
        /// As many tokens at least begin with a space, and one of so many of all.
        const LEAST: usize = 20;
        const ONE_OF: usize = 20;
        /// For each that begins with a space of the other kind there are more than so many.
        const PER_OTHER: usize = 10;
        let marked = self.byte_level_spaces;
        marked >= LEAST && marked * ONE_OF >= self.tokens.len() && self.piece_spaces * PER_OTHER < marked
    }

    /// How many merges make no token, and how many there are.
    pub(crate) fn unknown_merges(&self) -> (usize, usize) {
        let unknown = self.merges.iter().filter(|merge| self.sorted_tokens.binary_search(merge).is_err()).count();
        (unknown, self.merges.len())
    }
}

/// `<0x0A>`: a token that stands for a byte.
fn is_byte_text(text: &[u8]) -> bool {
    matches!(text, [b'<', b'0', b'x', high, low, b'>'] if high.is_ascii_hexdigit() && low.is_ascii_hexdigit())
}

/// The character that byte-level byte-pair encoding writes a byte with: its own where that is printed, else one of those
/// from U+0100 on.
fn byte_level_character(byte: u8) -> char {
    let own = u32::from(byte);
    let code = match byte {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => own,
        0x00..=0x20 => 0x100 + own,
        0x7f..=0xa0 => 0x121 + own - 0x7f,
        0xad => 0x143,
    };
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_is_written_with_a_character_of_its_own() {
        let mut written: Vec<char> = (0..=u8::MAX).map(byte_level_character).collect();
        for (byte, character) in [(b' ', 'Ġ'), (b'\n', 'Ċ'), (b'q', 'q'), (0, 'Ā'), (0x7f, 'ġ'), (0xad, 'Ń')] {
            assert_eq!(written[usize::from(byte)], character, "{byte}");
        }
        written.sort_unstable();
        written.dedup();
        assert_eq!(written.len(), 256);
        assert!(!written.iter().any(|&character| character.is_control() || character == char::REPLACEMENT_CHARACTER));
    }
}

//! The tokens of a vocabulary that structure a prompt, and where a text writes them.
//!
//! Reserved are those that no text may become: control tokens, and of the user-defined ones those that look like control
//! tokens (`<|start|>` of gpt-oss) or that the model's chat template writes (`<tool_call>`). Other user-defined tokens, as
//! Gemma's runs of spaces, are how a vocabulary spells text.

use std::collections::{BTreeSet, HashMap};
use std::ffi::CStr;
use std::ops::Range;

use aho_corasick::{AhoCorasick, AhoCorasickBuilder, AhoCorasickKind};
use llama_cpp_sys_2 as sys;

use crate::model::{Model, Token};

/// The names of templates that a file may bring beside its chat template.
const TEMPLATES: [&CStr; 2] = [c"tool_use", c"rerank"];

/// A reserved token.
#[derive(Debug)]
pub(crate) struct Special {
    pub(crate) token: Token,
    pub(crate) text: String,
    /// llama.cpp finds it in a text only where it is asked to; otherwise wherever it stands.
    pub(crate) control: bool,
    /// It stands for what the vocabulary cannot spell.
    pub(crate) unknown: bool,
    /// It swallows the spaces before it.
    pub(crate) strips_left: bool,
    /// It swallows the spaces after it.
    pub(crate) strips_right: bool,
}

impl Special {
    /// Whether it is more than a character, which any text may have.
    pub(crate) fn is_told_from_text(&self) -> bool {
        self.text.chars().nth(1).is_some()
    }

    /// Whether a model can have written it in an answer, whose text goes back into a later prompt.
    pub(crate) fn may_be_said(&self) -> bool {
        !self.control && !looks_like_control(&self.text)
    }
}

/// A reserved token as it is written in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Written {
    /// Its place in the list.
    pub(crate) special: usize,
    pub(crate) start: usize,
    pub(crate) end: usize,
}

/// The reserved tokens of a vocabulary.
#[derive(Debug)]
pub(crate) struct Specials {
    /// Longest first, as llama.cpp looks for them.
    list: Vec<Special>,
    by_token: HashMap<Token, usize>,
    /// Finds them, whatever the case of their letters.
    finder: Option<AhoCorasick>,
    /// Finds what stands between the signs of those that no answer holds, whatever the case.
    names: Option<AhoCorasick>,
    /// Their texts in lower case, sorted; and the same written backwards.
    forwards: Vec<Vec<u8>>,
    backwards: Vec<Vec<u8>>,
    /// All of them, with a character between them that none has.
    joined: String,
    longest_bytes: usize,
    /// Signs of which each has one, but for those that are letters alone; sorted.
    signs: Vec<char>,
    /// A character that none has, for those.
    stand_in: char,
}

/// A name that templates look for in what users say (`/no_think`); its token makes nobody's turn.
const SWITCH: &str = "think";
/// Names of tokens that are shorter stand within many words.
const MIN_INFIX_BYTES: usize = 4;
/// What nearly all reserved tokens are written with.
const BRACKETS: [char; 5] = ['<', '>', '|', '[', ']'];
/// What may stand for a sign: of its size, and in few templates' eyes.
const STAND_INS: [char; 10] = ['^', '~', '`', '@', '$', '%', '&', '*', '+', '='];
/// Where none of those is free.
const OTHER_STAND_INS: std::ops::RangeInclusive<char> = '\u{e000}'..='\u{f8ff}';

impl Specials {
    pub(crate) fn of(model: &Model) -> Self {
        let templates: Vec<&str> = std::iter::once(None)
            .chain(TEMPLATES.into_iter().map(Some))
            .filter_map(|name| model.template(name)?.to_str().ok())
            .chain(model.given_template())
            .collect();
        let tokens = (0..).take(model.vocab_size() as usize);
        Self::new(tokens.filter_map(|token| special(model, token, &templates)).collect())
    }

    pub(crate) fn new(mut list: Vec<Special>) -> Self {
        list.sort_by_key(|special| std::cmp::Reverse(special.text.len()));
        let finder = finder_of(list.iter().map(|s| &s.text));
        let mut forwards: Vec<Vec<u8>> = list.iter().map(|s| s.text.to_ascii_lowercase().into_bytes()).collect();
        let mut backwards: Vec<Vec<u8>> = forwards.iter().map(|text| text.iter().rev().copied().collect()).collect();
        let joined = list.iter().map(|s| s.text.to_ascii_lowercase()).collect::<Vec<_>>().join("\0");
        forwards.sort_unstable();
        backwards.sort_unstable();
        let by_token = list.iter().enumerate().map(|(i, special)| (special.token, i)).collect();
        let longest_bytes = list.first().map_or(0, |special| special.text.len());
        let signs = signs(&list);
        let is_free = |c: &char| !list.iter().any(|special| special.text.contains(*c));
        let is_sign = |c: char| signs.binary_search(&c).is_ok();
        let names = list.iter().filter(|special| !special.may_be_said()).map(|special| {
            let name = special.text.trim_matches(is_sign);
            if name.len() < special.text.len() { name } else { "" }
        });
        let names: BTreeSet<String> = names
            .map(str::to_ascii_lowercase)
            .filter(|name| !matches!(name.trim_start_matches('/'), "" | SWITCH))
            .collect();
        let names = finder_of(names);
        let stand_in =
            STAND_INS.into_iter().chain(OTHER_STAND_INS).find(is_free).unwrap_or(char::REPLACEMENT_CHARACTER);
        Self { list, by_token, finder, names, forwards, backwards, joined, longest_bytes, signs, stand_in }
    }

    /// Whether this is one of the signs that reserved tokens are written with: all have one, but for those that are letters
    /// alone.
    pub(crate) fn is_sign(&self, c: char) -> bool {
        self.signs.binary_search(&c).is_ok()
    }

    /// What stands for a sign where no token may be made of it.
    pub(crate) fn stand_in(&self) -> char {
        self.stand_in
    }

    /// A reserved token that a text without signs may become between these two: its beginning is written before, its end
    /// after, or one of both. Not one of letters alone: nearly every template ends with the first of them somewhere.
    pub(crate) fn completed_between(&self, before: &str, after: &str) -> Option<&Special> {
        let may_become = |text: &str| {
            let places = || text.char_indices().map(|(at, _)| at).chain(std::iter::once(text.len()));
            let begins = places().filter(|&at| before.ends_with(&text[..at]));
            begins.into_iter().any(|begin| {
                places()
                    .filter(|&end| end > begin && after.starts_with(&text[end..]))
                    .any(|end| end - begin < text.len() && !text[begin..end].contains(|c| self.is_sign(c)))
            })
        };
        let has_sign = |special: &Special| special.text.contains(|c| self.is_sign(c));
        self.list.iter().find(|special| has_sign(special) && may_become(&special.text))
    }

    pub(crate) fn get(&self, index: usize) -> &Special {
        &self.list[index]
    }

    pub(crate) fn by_token(&self, token: Token) -> Option<&Special> {
        Some(&self.list[*self.by_token.get(&token)?])
    }

    /// Every place where a text writes one, whatever the case of its letters, those within others too.
    pub(crate) fn find(&self, text: &str) -> impl Iterator<Item = Written> {
        let places = self.finder.iter().flat_map(move |finder| finder.find_overlapping_iter(text));
        places.map(|place| Written { special: place.pattern().as_usize(), start: place.start(), end: place.end() })
    }

    /// Every place where a text has a name that is a reserved token between signs. Short ones are names where they are words.
    pub(crate) fn names_in(&self, text: &str) -> impl Iterator<Item = Range<usize>> {
        let is_part = |c: char| c.is_alphanumeric() || c == '_';
        let is_word =
            move |name: &Range<usize>| !text[..name.start].ends_with(is_part) && !text[name.end..].starts_with(is_part);
        let found = self.names.iter().flat_map(move |names| names.find_overlapping_iter(text));
        found.map(|name| name.start()..name.end()).filter(move |name| name.len() >= MIN_INFIX_BYTES || is_word(name))
    }

    /// Whether one may begin with the end of this text, and go on with what is written after it.
    pub(crate) fn may_begin_in(&self, text: &str) -> bool {
        let tail = tail(text.as_bytes(), self.longest_bytes).to_ascii_lowercase();
        (0..tail.len()).any(|from| begins_one(&self.forwards, &tail[from..]))
    }

    /// Whether one may end with the beginning of this text, and have begun in what is written before it.
    pub(crate) fn may_end_in(&self, text: &str) -> bool {
        let head = &text.as_bytes()[..text.len().min(self.longest_bytes)];
        let head: Vec<u8> = head.iter().rev().map(u8::to_ascii_lowercase).collect();
        (0..head.len()).any(|from| begins_one(&self.backwards, &head[from..]))
    }

    /// Whether this text may stand within one.
    pub(crate) fn may_hold(&self, text: &str) -> bool {
        text.len() < self.longest_bytes && self.joined.contains(&text.to_ascii_lowercase())
    }
}

fn signs(list: &[Special]) -> Vec<char> {
    let is_bracket = |c: &char| BRACKETS.contains(c) || !(c.is_ascii() || c.is_alphanumeric());
    let is_sign = |c: &char| !c.is_alphanumeric() && !c.is_whitespace();
    let of = |special: &Special| -> Vec<char> {
        let brackets: Vec<char> = special.text.chars().filter(is_bracket).collect();
        if brackets.is_empty() { special.text.chars().filter(is_sign).collect() } else { brackets }
    };
    let mut signs: Vec<char> = list.iter().filter(|special| special.is_told_from_text()).flat_map(of).collect();
    signs.sort_unstable();
    signs.dedup();
    signs
}

/// Whether a text of a sorted list begins with this and goes on.
fn begins_one(sorted: &[Vec<u8>], with: &[u8]) -> bool {
    let at = sorted.partition_point(|text| text.as_slice() <= with);
    sorted.get(at).is_some_and(|text| text.starts_with(with))
}

fn tail(bytes: &[u8], len: usize) -> &[u8] {
    &bytes[bytes.len().saturating_sub(len)..]
}

/// Finds texts, whatever the case of their letters. An automaton without tables of all bytes: of long texts those take as many
/// hundred times their memory, and time that grows with the square of their length.
fn finder_of<T: AsRef<[u8]>>(texts: impl IntoIterator<Item = T>) -> Option<AhoCorasick> {
    let mut builder = AhoCorasickBuilder::new();
    builder.ascii_case_insensitive(true).kind(Some(AhoCorasickKind::ContiguousNFA)).build(texts).ok()
}

fn special(model: &Model, token: Token, templates: &[&str]) -> Option<Special> {
    let attributes = model.attributes(token);
    let has = |attribute: sys::llama_token_attr| attributes & attribute != 0;
    let unknown = has(sys::LLAMA_TOKEN_ATTR_UNKNOWN);
    let control = unknown || has(sys::LLAMA_TOKEN_ATTR_CONTROL);
    if !control && !has(sys::LLAMA_TOKEN_ATTR_USER_DEFINED) {
        return None;
    }
    // What is no UTF-8 stands in no text.
    let text = model.token_text(token)?.to_str().ok()?;
    let structures =
        || text.chars().nth(1).is_some() && !text.trim().is_empty() && templates.iter().any(|t| t.contains(text));
    if text.is_empty() || !(control || looks_like_control(text) || structures()) {
        return None;
    }
    Some(Special {
        token,
        text: text.to_owned(),
        control,
        unknown,
        strips_left: has(sys::LLAMA_TOKEN_ATTR_LSTRIP),
        strips_right: has(sys::LLAMA_TOKEN_ATTR_RSTRIP),
    })
}

/// llama.cpp's converter takes such tokens for control tokens, too.
fn looks_like_control(text: &str) -> bool {
    (text.starts_with("<|") && text.ends_with("|>")) || (text.starts_with("<｜") && text.ends_with("｜>"))
}

#[cfg(test)]
pub(crate) mod testing {
    use super::{Special, Specials, Token};

    pub(crate) fn control(token: Token, text: &str) -> Special {
        let text = text.to_owned();
        Special { token, text, control: true, unknown: false, strips_left: false, strips_right: false }
    }

    /// Of a vocabulary that no model has.
    pub(crate) fn specials() -> Specials {
        Specials::new(vec![
            control(1, "<|im_end|>"),
            control(2, "<|endoftext|>"),
            Special { control: false, ..control(3, "<tool_call>") },
            control(4, "[INST]"),
            control(5, "</s>"),
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{control, specials};
    use super::*;

    #[test]
    fn they_are_found_in_any_case_and_within_others() {
        let specials = specials();
        let found = specials.find("a<|IM_END|><|endoftext|>[INST");
        let found: Vec<(Token, usize)> = found.map(|w| (specials.get(w.special).token, w.start)).collect();
        assert_eq!(found, [(1, 1), (2, 11)]);
    }

    #[test]
    fn each_has_a_sign_that_no_stand_in_is() {
        let specials = Specials::new(
            ["<|im_end|>", "[INST]", "USER:", "user", "^~^", "<｜User｜>", "."].map(|t| control(1, t)).into(),
        );
        assert_eq!(
            specials.signs,
            ['<', '>', '[', ']', '|', ':', '^', '~', '｜']
                .into_iter()
                .collect::<std::collections::BTreeSet<_>>()
                .into_iter()
                .collect::<Vec<_>>()
        );
        assert_eq!(specials.stand_in(), '`');
    }

    #[test]
    fn what_letters_alone_complete_is_known() {
        let specials = specials();
        for (before, after, found) in [
            ("a <|", "|> b", Some("<|im_end|>")),
            ("<|", "dof", None),
            ("[", "]", Some("[INST]")),
            ("<|im_start|>user\n", "<|im_end|>", None),
            ("<", "", None),
            ("<|im_", "|>", Some("<|im_end|>")),
            ("", "", None),
        ] {
            let between = specials.completed_between(before, after).map(|special| special.text.as_str());
            assert_eq!(between.is_some(), found.is_some(), "{before} {after}: {between:?}");
        }
    }

    #[test]
    fn names_between_signs_are_found_in_any_case_and_short_ones_as_words() {
        let mut list = vec![control(6, "<s>"), control(7, "<｜User｜>"), control(8, "bare")];
        list.extend([Special { control: false, ..control(9, "<said>") }, control(10, "<think>")]);
        list.extend(specials().list);
        let specials = Specials::new(list);
        let names = |text: &'static str| specials.names_in(text).map(|name| &text[name]).collect::<Vec<_>>();
        assert_eq!(names("xIM_endx.inst an user's"), ["IM_end", "inst", "user", "s"]);
        // No word by itself, none of a token's, and one that answers hold.
        assert_eq!(names("users so bare, said class /no_think"), ["user"]);
    }

    #[test]
    fn what_may_become_one_with_its_neighbours_is_known() {
        let specials = specials();
        for text in ["so it <", "<|i", "[INS", "<TOOL_", "<|endo"] {
            assert!(specials.may_begin_in(text), "{text}");
        }
        for text in ["> quoted", "oftext|> x", "T]"] {
            assert!(specials.may_end_in(text), "{text}");
        }
        for text in ["end", "tool", "OFTEXT", "|"] {
            assert!(specials.may_hold(text), "{text}");
        }
        for text in ["Hello", "a < b", "x > y.", "[1]x"] {
            assert!(!specials.may_begin_in(text) && !specials.may_end_in(text) && !specials.may_hold(text), "{text}");
        }
    }
}

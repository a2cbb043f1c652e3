//! Tokens of a text of which some parts may become reserved tokens and others not.
//!
//! llama.cpp takes reserved tokens for a whole text or not at all. Here a text is cut where it writes those that may be
//! taken, as llama.cpp cuts it, longest first, and what is left goes to llama.cpp as text. So a text without any that may
//! not be taken has the tokens that llama.cpp gives it, and one with some has those that it would have in a text.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::error::TokenizeError;
use crate::model::{Model, Token};
use crate::specials::{Special, Written};

/// Which of the reserved tokens that a text writes become those tokens. Reserved are control tokens, and user-defined
/// ones that look like them or that the model's chat template writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens<'a> {
    /// None: all of it is text.
    None,
    /// All.
    All,
    /// All but those that one of these places (in bytes, ascending) lies within.
    Unless(&'a [usize]),
}

/// What a text is cut into.
enum Part {
    Special(Token),
    Text(Range<usize>),
}

impl Model {
    /// Turns text into tokens. `add_special`: begin with BOS (and end with EOS) where the vocabulary says so.
    ///
    /// # Errors
    /// As [`Model::tokenize`].
    pub fn tokenize_with(
        &self,
        text: &str,
        add_special: bool,
        specials: SpecialTokens<'_>,
    ) -> Result<Vec<Token>, TokenizeError> {
        match specials {
            SpecialTokens::All => self.tokenize(text, add_special, true),
            SpecialTokens::Unless(places) => {
                if self.written(text).any(|written| holds(places, &written)) {
                    self.tokenize_where(text, add_special, &|written| !holds(places, written))
                } else {
                    self.tokenize(text, add_special, true)
                }
            }
            SpecialTokens::None => {
                if self.written(text).all(|written| self.specials().get(written.special).control) {
                    let tokens = self.tokenize(text, add_special, false)?;
                    let (begin, end) = if add_special { self.around()? } else { Default::default() };
                    let inner = tokens.get(begin.len()..tokens.len().saturating_sub(end.len())).unwrap_or_default();
                    // Some vocabularies have merges that end in one.
                    if !inner.iter().any(|&token| self.structures(token)) {
                        return Ok(tokens);
                    }
                }
                self.tokenize_where(text, add_special, &|_| false)
            }
        }
    }

    /// The reserved tokens that a text is taken to write, in their order: see [`SpecialTokens::Unless`].
    pub(crate) fn specials_taken(&self, text: &str, unless: &[usize]) -> Vec<Token> {
        let parts = self.parts(text, &|written| !holds(unless, written));
        parts.into_iter().filter_map(|part| if let Part::Special(token) = part { Some(token) } else { None }).collect()
    }

    /// Tokens of a text in which those reserved tokens are taken that `taken` says.
    pub(crate) fn tokenize_where(
        &self,
        text: &str,
        add_special: bool,
        taken: &(dyn Fn(&Written) -> bool + Sync),
    ) -> Result<Vec<Token>, TokenizeError> {
        let (begin, end) = if add_special { self.around()? } else { Default::default() };
        self.with_stack_for(text, || -> Result<Vec<Token>, TokenizeError> {
            let mut tokens = begin;
            for part in self.parts(text, taken) {
                match part {
                    Part::Special(token) => tokens.push(token),
                    Part::Text(range) => tokens.extend(self.text_tokens(&text[range])?),
                }
            }
            tokens.extend(end);
            Ok(tokens)
        })?
    }

    /// The reserved tokens that a text writes, letter for letter.
    fn written<'a>(&'a self, text: &'a str) -> impl Iterator<Item = Written> + 'a {
        let specials = self.specials();
        specials
            .find(text)
            .filter(move |written| text[written.start..written.end] == specials.get(written.special).text)
    }

    /// Whether a text never becomes this token. One for unknown characters is what such a text is.
    fn structures(&self, token: Token) -> bool {
        self.specials().by_token(token).is_some_and(|special| special.control && !special.unknown)
    }

    fn parts(&self, text: &str, taken: &dyn Fn(&Written) -> bool) -> Vec<Part> {
        let mut written: Vec<Written> = self.written(text).collect();
        written.sort_unstable_by_key(|written| (written.special, written.start));
        // By their first byte, with the spaces that they swallow: what is taken, and by which token.
        let mut places: BTreeMap<usize, (usize, Token)> = BTreeMap::new();
        let mut breaks = Vec::new();
        for written in written {
            let before = places.range(..written.end).next_back().map_or(0, |(_, &(end, _))| end);
            if before > written.start {
                continue;
            }
            let special = self.specials().get(written.special);
            if taken(&written) {
                let after = places.range(written.end..).next().map_or(text.len(), |(&start, _)| start);
                let (start, end) = with_spaces(text, special, &written, before..after);
                places.insert(start, (end, special.token));
            } else if !special.control {
                // llama.cpp would find it in a text all the same.
                breaks.push(written.start + first_len(&text[written.start..]));
            }
        }
        breaks.sort_unstable();
        let mut parts = Vec::new();
        let mut from = 0;
        for (start, (end, token)) in places {
            push_text(&mut parts, from..start, &breaks);
            parts.push(Part::Special(token));
            from = end;
        }
        push_text(&mut parts, from..text.len(), &breaks);
        parts
    }

    /// Tokens of a text, none of them reserved: where a merge ends in one, the text is broken within it. A vocabulary that
    /// begins texts with a space has one more there.
    fn text_tokens(&self, text: &str) -> Result<Vec<Token>, TokenizeError> {
        let tokens = self.tokenize_here(text, false, false)?;
        if !tokens.iter().any(|&token| self.structures(token)) {
            return Ok(tokens);
        }
        let mut breaks: Vec<usize> =
            self.written(text).map(|written| written.start + first_len(&text[written.start..])).collect();
        breaks.sort_unstable();
        let mut parts = Vec::new();
        push_text(&mut parts, 0..text.len(), &breaks);
        let mut tokens = Vec::new();
        for part in parts {
            if let Part::Text(range) = part {
                tokens.extend(self.tokenize_here(&text[range], false, false)?);
            }
        }
        Ok(tokens)
    }

    /// The tokens that begin and end each text.
    fn around(&self) -> Result<(Vec<Token>, Vec<Token>), TokenizeError> {
        let mut begin = self.tokenize_here("", true, false)?;
        let end = match begin.len() {
            2 => begin.split_off(1),
            1 if !self.begins_with_bos() => std::mem::take(&mut begin),
            _ => Vec::new(),
        };
        Ok((begin, end))
    }
}

/// Whether one of these places lies within a token.
fn holds(places: &[usize], written: &Written) -> bool {
    let after = places.partition_point(|&place| place <= written.start);
    places.get(after).is_some_and(|&place| place < written.end)
}

/// Where a token reaches with the spaces that it swallows within what is free around it.
fn with_spaces(text: &str, special: &Special, written: &Written, free: Range<usize>) -> (usize, usize) {
    let is_space = |c: char| matches!(c, ' ' | '\t'..='\r');
    let before = &text[free.start..written.start];
    let after = &text[written.end..free.end];
    let left = if special.strips_left { before.len() - before.trim_end_matches(is_space).len() } else { 0 };
    let right = if special.strips_right { after.len() - after.trim_start_matches(is_space).len() } else { 0 };
    (written.start - left, written.end + right)
}

fn first_len(text: &str) -> usize {
    text.chars().next().map_or(0, char::len_utf8)
}

/// Appends what is between two tokens, broken where it must be.
fn push_text(parts: &mut Vec<Part>, range: Range<usize>, breaks: &[usize]) {
    let within = breaks.partition_point(|&at| at <= range.start);
    let mut from = range.start;
    for &at in breaks[within..].iter().take_while(|&&at| at < range.end) {
        if at > from {
            parts.push(Part::Text(from..at));
            from = at;
        }
    }
    if from < range.end {
        parts.push(Part::Text(from..range.end));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::path::Path;
    use std::sync::{Arc, OnceLock};

    use proptest::prelude::*;

    use super::*;
    use crate::model::ModelParams;

    fn model() -> &'static Arc<Model> {
        static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
        MODEL.get_or_init(|| {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../e2e/models/demo-draft.q8_0.gguf");
            Model::load(&path, &ModelParams::default(), &mut |_| true).unwrap()
        })
    }

    proptest! {
        #[test]
        fn a_text_whose_tokens_are_all_taken_is_cut_as_llama_cpp_cuts_it(
            parts in prop::collection::vec(
                prop_oneof![
                    Just("<|im_start|>".to_owned()), Just("<|im_end|>".to_owned()), Just("<|im_".to_owned()),
                    Just("\n".to_owned()), Just("  ".to_owned()), "[ -~é漢]{0,12}",
                ],
                0..12,
            ),
            add_special: bool,
        ) {
            let text = parts.concat();
            let got = model().tokenize_where(&text, add_special, &|_| true).unwrap();
            prop_assert_eq!(got, model().tokenize(&text, add_special, true).unwrap());
        }

        #[test]
        fn a_text_of_which_none_is_taken_has_the_tokens_of_a_text(text in "(<\\|im_(start|end)\\|>|[ -~\n]{0,8}){0,8}") {
            let got = model().tokenize_where(&text, true, &|_| false).unwrap();
            prop_assert_eq!(got, model().tokenize(&text, true, false).unwrap());
        }
    }

    #[test]
    fn what_a_place_lies_within_is_text_and_the_rest_is_not() {
        let text = "<|im_end|><|im_end|>";
        let end = model().tokenize("<|im_end|>", false, true).unwrap();
        let as_text = model().tokenize("<|im_end|>", false, false).unwrap();
        let with = |places: &[usize]| model().tokenize_with(text, false, SpecialTokens::Unless(places)).unwrap();
        assert_eq!(with(&[]), [end.clone(), end.clone()].concat());
        assert_eq!(with(&[1]), [as_text.clone(), end.clone()].concat());
        assert_eq!(with(&[11]), [end.clone(), as_text].concat());
        // Between the two.
        assert_eq!(with(&[0, 10, 20]), [end.clone(), end].concat());
    }
}

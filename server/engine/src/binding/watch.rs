//! Finds texts in an answer while it comes, whichever tokens they are cut into.

use std::sync::Arc;

/// So many bytes are kept at least, so that a character that is not whole is seen.
const LEAST_TAIL: usize = 3;

/// Looks for some texts, of which the first that is whole counts.
#[derive(Clone, Debug)]
pub(super) struct Watch {
    /// At least one, none of them empty.
    texts: Arc<[Vec<u8>]>,
    longest: usize,
    /// The end of what came, in which one of them may have begun.
    tail: Vec<u8>,
}

/// One that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// What came from its beginning on.
    pub(super) text: Vec<u8>,
    /// Its own part of that.
    pub(super) length: usize,
}

impl Found {
    pub(super) fn after(&self) -> &[u8] {
        &self.text[self.length..]
    }
}

impl Watch {
    /// For these texts, of which empty ones do not count; `None`: there is none.
    pub(super) fn new<'a>(texts: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        let texts = texts.into_iter().filter(|text| !text.is_empty());
        let texts: Arc<[Vec<u8>]> = texts.map(|text| text.as_bytes().to_vec()).collect();
        let longest = texts.iter().map(Vec::len).max()?;
        Some(Self { texts, longest, tail: Vec::new() })
    }

    /// Takes more; what it finds ends the looking.
    pub(super) fn push(&mut self, more: &[u8]) -> Option<Found> {
        let known = self.tail.len();
        self.tail.extend_from_slice(more);
        let found = find(&self.texts, &self.tail, known);
        if found.is_none() {
            let keep = (self.longest - 1).max(LEAST_TAIL);
            self.tail.drain(..self.tail.len().saturating_sub(keep));
        }
        found
    }

    /// What [`Self::push`] would find.
    pub(super) fn look(&self, more: &[u8]) -> Option<Found> {
        if more.is_empty() {
            return None;
        }
        find(&self.texts, &[self.tail.as_slice(), more].concat(), self.tail.len())
    }

    /// Forgets what came.
    pub(super) fn clear(&mut self) {
        self.tail.clear();
    }

    /// Whether what came ends within a character.
    pub(super) fn ends_within_character(&self) -> bool {
        let last = self.tail.iter().rev().take(LEAST_TAIL).enumerate();
        let lead = last.map(|(i, byte)| (i, *byte)).find(|(_, byte)| byte & 0xc0 != 0x80);
        lead.is_some_and(|(followers, byte)| followers < byte.leading_ones().saturating_sub(1) as usize)
    }

    /// Says of a token's text whether one of those looked for would be whole with it; for a whole vocabulary.
    pub(super) fn completed_by(&self) -> impl Fn(&[u8]) -> bool + '_ {
        let missing = |text: &'_ [u8]| {
            let begun = (1..text.len()).filter(|&at| self.tail.ends_with(&text[..at]));
            begun.map(|at| text[at..].to_vec()).collect::<Vec<_>>()
        };
        let missing: Vec<Vec<u8>> = self.texts.iter().flat_map(|text| missing(text)).collect();
        move |token: &[u8]| {
            missing.iter().any(|rest| token.starts_with(rest))
                || self.texts.iter().any(|text| token.windows(text.len()).any(|window| window == text))
        }
    }
}

/// The first that is whole, where none is within the first `known` bytes; of those that end there, the longest.
fn find(texts: &[Vec<u8>], all: &[u8], known: usize) -> Option<Found> {
    (known + 1..=all.len()).find_map(|end| {
        let ending = texts.iter().filter(|text| all[..end].ends_with(text));
        let length = ending.map(Vec::len).max()?;
        Some(Found { text: all[end - length..].to_vec(), length })
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_stands_in_a_text_is_found_once_it_is_whole_however_it_is_cut(
            text in "[ab<>]{0,24}",
            cuts in proptest::collection::vec(0_usize..25, 0..8),
        ) {
            let tags = ["<a>", "<ab", "b>"];
            let mut watch = Watch::new(tags).unwrap();
            let first = (1..=text.len()).find(|&end| tags.iter().any(|tag| text[..end].ends_with(tag)));
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|at| *at < text.len()).chain([0, text.len()]).collect();
            cuts.sort_unstable();
            for pair in cuts.windows(2) {
                let piece = &text.as_bytes()[pair[0]..pair[1]];
                let (completed, looked) = (watch.completed_by()(piece), watch.look(piece));
                prop_assert_eq!(completed, looked.is_some());
                let found = watch.push(piece);
                prop_assert_eq!(&found, &looked);
                if let Some(found) = found {
                    let end = first.unwrap();
                    prop_assert!(pair[0] < end && end <= pair[1]);
                    prop_assert_eq!(found.after(), &text.as_bytes()[end..pair[1]]);
                    prop_assert!(tags.iter().any(|tag| tag.as_bytes() == &found.text[..found.length]));
                    return Ok(());
                }
            }
            prop_assert_eq!(first, None);
        }
    }

    #[test]
    fn a_character_is_whole_or_not() {
        let text = "aé€😀";
        for end in 0..=text.len() {
            let mut watch = Watch::new(["x"]).unwrap();
            for byte in &text.as_bytes()[..end] {
                watch.push(&[*byte]);
            }
            assert_eq!(watch.ends_within_character(), !text.is_char_boundary(end), "{end}");
        }
    }
}

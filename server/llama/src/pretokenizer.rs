//! What llama.cpp's pre-tokenisers need of the stack and of time for a text, before they see it.
//!
//! llama.cpp has code of its own for some pre-tokenisers. The others go through `std::regex`, whose executor in libstdc++
//! calls itself once for each character that a loop of the expression matches: a run of ten thousand spaces takes 3 MB of
//! stack. [`PreTokenizer::demand`] bounds that by the classes of a text's characters, generously, and refuses what would
//! need more than is given. Which pre-tokenisers recurse, and how, is a table by name; a test runs every name that
//! llama.cpp knows.

use crate::error::TokenizeError;
use crate::limits::{MAX_RUN_CHARS, MAX_RUN_WORK};

/// Pre-tokenisers that llama.cpp has code for, or whose expressions match single characters.
const FLAT: &[&str] = &[
    "a.x-4.0",
    "chameleon",
    "chatglm-bpe",
    "codeshell",
    "command-r",
    "dbrx",
    "deepseek-r1-qwen",
    "exaone",
    "exaone4",
    "f2llmv2",
    "falcon-h1",
    "falcon3",
    "gemma4",
    "gigachat",
    "glm4",
    "glm5",
    "gpt-2",
    "granite-docling",
    "granite-embed-multi-311m",
    "grok-2",
    "hunyuan",
    "jais",
    "jina-de",
    "jina-es",
    "jina-v1-en",
    "jina-v2-code",
    "jina-v2-de",
    "jina-v2-es",
    "jina-v5-nano",
    "kimi-k2",
    "kormo",
    "laguna",
    "lfm2",
    "llama-bpe",
    "llama-v3",
    "llama3",
    "megrez",
    "mellum",
    "mellum2",
    "midm-2.0",
    "minerva-7b",
    "mmbert",
    "modern-bert",
    "mpt",
    "olmo",
    "phi-2",
    "pixtral",
    "qwen2",
    "qwen35",
    "refact",
    "roberta-bpe",
    "sarvam-moe",
    "smaug-bpe",
    "smollm",
    "solar-open",
    "stablelm2",
    "starcoder",
    "trillion",
];
/// Pre-tokenisers of which one match may go on past the end of a word, up to the end of the line.
const LINES: &[&str] = &["bloom", "exaone-moe", "gpt3-finnish", "poro-chat", "viking", "whitespace"];
/// Pre-tokenisers that look from each character of a run of digits, or of spaces, to its end.
const QUADRATIC: &[&str] = &["deepseek-llm", "jais-2", "superbpe"];
/// What a match may have beside its runs: a character before it, an apostrophe's ending after it.
const AROUND_CHARS: usize = 16;

/// How deep one match may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Depth {
    /// As deep for any text.
    Flat,
    /// A level for each character of a run and of the run that follows.
    Runs,
    /// A level for each character of a line.
    Lines,
}

/// What a text asks of its pre-tokeniser.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Demand {
    /// Characters that one match may have, each a level of recursion; 0: the text makes no difference.
    pub(crate) depth: usize,
}

/// A vocabulary's pre-tokeniser.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PreTokenizer {
    depth: Depth,
    quadratic: bool,
}

impl PreTokenizer {
    /// That of a vocabulary that has none.
    pub(crate) const NONE: Self = Self { depth: Depth::Flat, quadratic: false };

    /// By its name in the file; one that is not known here is taken for one that recurses.
    pub(crate) fn named(name: &str) -> Self {
        let depth = if FLAT.contains(&name) {
            Depth::Flat
        } else if LINES.contains(&name) {
            Depth::Lines
        } else {
            Depth::Runs
        };
        Self { depth, quadratic: QUADRATIC.contains(&name) }
    }

    /// What a text asks of it.
    ///
    /// # Errors
    /// The text has a run that is longer than may be, or runs that would take too long.
    pub(crate) fn demand(self, text: &str) -> Result<Demand, TokenizeError> {
        if self.quadratic {
            let work = run_work(text);
            if work > MAX_RUN_WORK {
                return Err(TokenizeError::RunWork { work });
            }
        }
        let depth = match self.depth {
            Depth::Flat => return Ok(Demand::default()),
            Depth::Runs => longest_match(text, |a, b| !certainly_apart(a, b)),
            Depth::Lines => longest_match(text, |a, b| !certainly_apart(a, b))
                .max(longest_match(text, |a, b| a != '\n' && b != '\n')),
        };
        if depth > MAX_RUN_CHARS {
            return Err(TokenizeError::RunTooLong { chars: depth });
        }
        Ok(Demand { depth: depth + AROUND_CHARS })
    }
}

/// The classes that every pre-tokeniser keeps apart, as far as a character's is certain.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Letter,
    Digit,
    Sign,
    Space,
    /// Not ASCII, and no kind of space: a letter, a mark, a number or a sign, of which expressions have their own ideas.
    Wide,
    /// May go with anything.
    Any,
}

fn class(c: char) -> Class {
    match c {
        'a'..='z' | 'A'..='Z' => Class::Letter,
        '0'..='9' => Class::Digit,
        ' ' | '\t'..='\r' => Class::Space,
        // Some count these as spaces.
        '\u{1c}'..='\u{1f}' => Class::Any,
        c if c.is_ascii() => Class::Sign,
        // Ranges of CJK characters take some of the wide spaces in.
        c if c.is_whitespace() => Class::Any,
        '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2060}' | '\u{feff}' => Class::Any,
        _ => Class::Wide,
    }
}

/// Whether no loop of any expression goes over both characters.
fn certainly_apart(a: char, b: char) -> bool {
    match (class(a), class(b)) {
        (Class::Any, _) | (_, Class::Any) => false,
        // Signs may be followed by line breaks and slashes, in any order.
        (Class::Sign, Class::Space) => !(a == '/' && matches!(b, '\r' | '\n')),
        (Class::Space, Class::Sign) => !(b == '/' && matches!(a, '\r' | '\n')),
        (Class::Wide, b) => b == Class::Space,
        (a, Class::Wide) => a == Class::Space,
        (a, b) => a != b,
    }
}

/// The characters of the longest run with the one that follows it; `joined` says whether two neighbours are of one run.
fn longest_match(text: &str, joined: impl Fn(char, char) -> bool) -> usize {
    let (mut longest, mut previous, mut run) = (0, 0, 0);
    let mut last = None;
    for c in text.chars() {
        if last.is_some_and(|last| !joined(last, c)) {
            longest = longest.max(previous + run);
            (previous, run) = (run, 0);
        }
        run += 1;
        last = Some(c);
    }
    longest.max(previous + run)
}

/// The sum of the squared lengths of the runs of digits and of spaces.
fn run_work(text: &str) -> u64 {
    let (mut work, mut run, mut of) = (0_u64, 0_u64, None);
    for c in text.chars() {
        let kind = if c.is_whitespace() { Some(0) } else { c.is_numeric().then_some(1) };
        if kind != of {
            work = work.saturating_add(run.saturating_mul(run));
            (run, of) = (0, kind);
        }
        run += u64::from(kind.is_some());
    }
    work.saturating_add(run.saturating_mul(run))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn depth(name: &str, text: &str) -> usize {
        PreTokenizer::named(name).demand(text).unwrap().depth.saturating_sub(AROUND_CHARS)
    }

    #[test]
    fn runs_count_with_the_one_that_follows() {
        for (text, chars) in [
            ("", 0),
            ("word", 4),
            ("a sentence of words", 9),
            ("   x", 4),
            ("a1b2", 2),
            ("{\"key\":12}", 5),
            ("天地玄黃宇宙洪荒", 8),
            ("天地\n玄黃", 3),
            ("naïve1café", 6),
            // An ideographic space is within some expressions' ranges of CJK characters.
            ("天\u{3000}地", 3),
            ("!/\n/\n/\nword", 11),
        ] {
            assert_eq!(depth("tekken", text), chars, "{text:?}");
        }
    }

    #[test]
    fn what_goes_on_to_the_end_of_a_line_counts_the_line() {
        assert_eq!(depth("exaone-moe", "one two three\nfour"), 14);
        assert_eq!(depth("gpt-2", &"x".repeat(1 << 20)), 0);
    }

    #[test]
    fn a_longer_run_is_refused_and_only_by_what_recurses() {
        let longest = "x".repeat(MAX_RUN_CHARS);
        let longer = format!("{longest}x");
        for name in ["tekken", "exaone-moe", "default", "not known"] {
            assert_eq!(depth(name, &longest), MAX_RUN_CHARS);
            let refused = PreTokenizer::named(name).demand(&longer);
            assert_eq!(refused, Err(TokenizeError::RunTooLong { chars: MAX_RUN_CHARS + 1 }), "{name}");
        }
        assert_eq!(PreTokenizer::named("qwen2").demand(&longer), Ok(Demand::default()));
    }

    #[test]
    fn squared_runs_are_bounded_where_they_are_matched_again_and_again() {
        let run = |len: usize| "7".repeat(len);
        let superbpe = PreTokenizer::named("superbpe");
        assert!(superbpe.demand(&run(4096)).is_ok());
        assert!(superbpe.demand(&" ".repeat(4096)).is_ok());
        assert_eq!(superbpe.demand(&run(4097)), Err(TokenizeError::RunWork { work: 4097 * 4097 }));
        let many = vec![run(512); 65].join(" ");
        assert!(matches!(superbpe.demand(&many), Err(TokenizeError::RunWork { .. })));
        assert!(PreTokenizer::named("gpt-4o").demand(&many).is_ok());
    }
}

//! Grammars: what a generated text must look like, in llama.cpp's GBNF.
//!
//! The language is llama.cpp's own, and its parser reads it. What follows the
//! text is ours ([`machine`]): llama.cpp's matcher takes exponential time and memory on ambiguous grammars, aborts the
//! process where it is asked in the wrong state, and decodes every token of the vocabulary anew for each row. Tests
//! hold the two against each other. Everything that comes from outside is bounded before C++ sees it ([`scan`])
//! and every operation has a limit of steps, so a grammar is refused or works.
//!
//! A [`Grammar`] is the state of one sequence; `clone` continues it in another. Absent: where in an answer it begins; JSON schemas.

mod machine;
mod rules;
mod scan;
mod texts;

#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use machine::{MAX_STACKS, MAX_STEPS};
pub use scan::{
    MAX_GRAMMAR_ELEMENTS, MAX_GRAMMAR_NESTING, MAX_GRAMMAR_RULES, MAX_GRAMMAR_TEXT_BYTES, MAX_REPETITIONS,
    MAX_RULE_NAME_BYTES,
};
pub use texts::TokenTexts;

use crate::model::Token;
use machine::{DEAD, Decoded, Machine, Partial};
use rules::Rules;

/// A grammar that cannot be used, or a token that it does not allow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The text is not GBNF.
    #[error("line {line}, column {column}: {message}")]
    Syntax {
        /// From 1.
        line: usize,
        /// From 1, in characters.
        column: usize,
        /// What is wrong there.
        message: String,
    },
    /// Larger than it may be.
    #[error("more {what} than {limit}")]
    TooLarge {
        /// What there is too much of.
        what: &'static str,
        /// How much there may be.
        limit: usize,
    },
    /// A rule begins with itself.
    #[error("rule '{rule}' can begin with itself (left recursion); write it as a repetition")]
    LeftRecursion {
        /// The rule.
        rule: String,
    },
    /// No text at all matches.
    #[error("the grammar matches no text")]
    Empty,
    /// It can be read in too many ways at once.
    #[error("rule '{rule}' takes more than {limit} {what}; make its alternatives begin differently")]
    TooComplex {
        /// The rule in which that was found.
        rule: String,
        /// What there was too much of.
        what: &'static str,
        /// How much there may be.
        limit: u64,
    },
    /// A token was accepted that the grammar does not allow.
    #[error("the grammar does not allow token {0} here")]
    NotAllowed(Token),
    /// A text was accepted that the grammar does not allow.
    #[error("the grammar does not allow the text that stands here")]
    TextNotAllowed,
    /// llama.cpp's parser and this crate disagree.
    #[error("the grammar cannot be used: {0}")]
    Internal(&'static str),
}

/// Where a sequence is in its grammar. It holds no pointer into llama.cpp.
#[derive(Debug)]
pub struct Grammar {
    texts: Arc<TokenTexts>,
    machine: Machine,
    state: u32,
    /// A character that the last token began.
    partial: Partial,
    /// The walk over the vocabulary: where each prefix of the token at hand leads.
    walk: Vec<(u32, Partial)>,
}

impl Clone for Grammar {
    fn clone(&self) -> Self {
        let (mut machine, state) = self.machine.forked(self.state);
        machine.begin();
        Self { texts: self.texts.clone(), machine, state, partial: self.partial, walk: Vec::new() }
    }
}

impl Grammar {
    /// A grammar in GBNF, whose start symbol is `root`.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub fn gbnf(texts: &Arc<TokenTexts>, text: &str) -> Result<Self, GrammarError> {
        let rules = Arc::new(Rules::parse(texts, text)?);
        let (mut machine, state) = Machine::new(rules)?;
        if state == DEAD {
            return Err(GrammarError::Empty);
        }
        machine.begin();
        Ok(Self { texts: texts.clone(), machine, state, partial: Partial::default(), walk: Vec::new() })
    }

    /// Whether the text may end here, so that the end tokens are allowed.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.partial.is_whole() && self.machine.is_complete(self.state)
    }

    /// Whether a token may come next.
    ///
    /// # Errors
    /// When the grammar proves too ambiguous.
    pub fn allows(&mut self, token: Token) -> Result<bool, GrammarError> {
        if self.texts.is_end(token) {
            return Ok(self.is_complete());
        }
        let (state, partial) = self.after_text(token)?;
        Ok(self.goes_on(state, partial)? || self.machine.waits_for(self.state, token))
    }

    /// Goes on after a token. One that ends the generation changes nothing.
    ///
    /// # Errors
    /// When the token is not allowed, or the grammar proves too ambiguous; it stays where it was.
    pub fn accept(&mut self, token: Token) -> Result<(), GrammarError> {
        if self.texts.is_end(token) {
            return if self.is_complete() { Ok(()) } else { Err(GrammarError::NotAllowed(token)) };
        }
        let (mut state, mut partial) = self.after_text(token)?;
        if !self.goes_on(state, partial)? {
            (state, partial) = (DEAD, Partial::default());
        }
        let by_name = self.machine.next_token(self.state, token)?;
        if by_name != DEAD {
            state = self.machine.union(state, by_name)?;
        }
        if state == DEAD {
            return Err(GrammarError::NotAllowed(token));
        }
        self.partial = partial;
        self.state = state;
        self.machine.tidy(std::iter::once(&mut self.state));
        self.machine.begin();
        Ok(())
    }

    /// Goes on after a text, whichever tokens it came as; it may end within a character.
    ///
    /// # Errors
    /// When the grammar does not allow it, or proves too ambiguous; it stays where it was.
    pub fn accept_bytes(&mut self, bytes: &[u8]) -> Result<(), GrammarError> {
        let (mut state, mut partial) = (self.state, self.partial);
        for &byte in bytes {
            (state, partial) = self.after_byte(state, partial, byte)?;
        }
        if !self.goes_on(state, partial)? {
            return Err(GrammarError::TextNotAllowed);
        }
        (self.state, self.partial) = (state, partial);
        self.machine.tidy(std::iter::once(&mut self.state));
        self.machine.begin();
        Ok(())
    }

    /// Writes to `out` the row with every token that may not come next at minus infinity.
    ///
    /// # Errors
    /// When the grammar proves too ambiguous.
    pub fn apply(&mut self, row: &[f32], out: &mut Vec<f32>) -> Result<(), GrammarError> {
        out.clear();
        out.resize(row.len(), f32::NEG_INFINITY);
        let mut allow = |token: Token| {
            if let Some((to, &from)) = usize::try_from(token).ok().and_then(|at| out.get_mut(at).zip(row.get(at))) {
                *to = from;
            }
        };
        if self.is_complete() {
            self.texts.end_tokens().for_each(&mut allow);
        }
        let named = self.machine.named_tokens(self.state, self.texts.len());
        named.into_iter().filter(|&token| !self.texts.is_end(token)).for_each(&mut allow);
        let texts = self.texts.clone();
        let mut walk = std::mem::take(&mut self.walk);
        walk.clear();
        walk.push((self.state, self.partial));
        // The length of a prefix that leads nowhere: what shares it needs no look.
        let mut dead_at = usize::MAX;
        for (token, shared) in texts.sorted() {
            if shared >= dead_at {
                continue;
            }
            dead_at = usize::MAX;
            walk.truncate(shared + 1);
            let states = walk.iter_mut().map(|(state, _)| state).chain(std::iter::once(&mut self.state));
            let steps = self.machine.tidy(states);
            self.machine.spend(steps)?;
            let text = texts.text(token);
            for &byte in &text[walk.len() - 1..] {
                let (state, partial) = walk[walk.len() - 1];
                let next = self.after_byte(state, partial, byte)?;
                walk.push(next);
                if next.0 == DEAD {
                    dead_at = walk.len() - 1;
                    break;
                }
            }
            let (state, partial) = walk[walk.len() - 1];
            if dead_at == usize::MAX && !texts.is_end(token) && self.goes_on(state, partial)? {
                allow(token);
            }
        }
        self.walk = walk;
        self.machine.tidy(std::iter::once(&mut self.state));
        Ok(())
    }

    fn after_byte(&mut self, state: u32, partial: Partial, byte: u8) -> Result<(u32, Partial), GrammarError> {
        Ok(match partial.push(byte) {
            Decoded::Character(character) => (self.machine.next(state, character)?, Partial::default()),
            Decoded::Partial(partial) => (state, partial),
            Decoded::Invalid => (DEAD, Partial::default()),
        })
    }

    /// Where a token's text leads; nowhere if it has none.
    fn after_text(&mut self, token: Token) -> Result<(u32, Partial), GrammarError> {
        let texts = self.texts.clone();
        let text = texts.text(token);
        let start = if text.is_empty() { DEAD } else { self.state };
        text.iter().try_fold((start, self.partial), |(state, partial), &byte| self.after_byte(state, partial, byte))
    }

    fn goes_on(&mut self, state: u32, partial: Partial) -> Result<bool, GrammarError> {
        Ok(state != DEAD && (partial.is_whole() || self.machine.can_follow(state, partial)?))
    }
}

//! Where an answer is in what the model thinks before it, and how much more of that may come.

use std::sync::Arc;

use gantry_llama::{ThoughtForm, ThoughtStage};

use super::watch::{Found, Watch};
use crate::backend::{Closing, Token};

/// A thought that ends within a character may have so many tokens more, that the character be whole.
const MOST_TOKENS_OVER: u32 = 3;

/// A thought that may come, or has begun; once it is over there is none.
#[derive(Clone, Debug)]
pub(super) struct Thought {
    begin: Vec<u8>,
    /// Its own end, and what else ends it, being of the answer.
    own_end: String,
    ends: Watch,
    /// The most tokens that it may have.
    budget: Option<u32>,
    /// How it is ended if it takes more.
    closing: Arc<Closing>,
    stage: Stage,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Stage {
    /// The answer may begin with one, and has said so much.
    Possible(Vec<u8>),
    /// It has so many tokens.
    Open(u32),
    /// It is being ended, with so many tokens of what ends it.
    Closing(usize),
}

/// What became of a thought with a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// It goes on, or may come yet.
    On,
    /// It has begun.
    Begun,
    /// It is over, and the answer begins with this.
    Over(Vec<u8>),
    /// None will come.
    None,
}

impl Thought {
    /// The thought of an answer to a prompt that ends so; `None`: it has been thought.
    pub(super) fn new(form: &ThoughtForm, prefix: &str, budget: Option<u32>, closing: &Closing) -> Option<Self> {
        let stage = form.stage_after(prefix);
        if stage == ThoughtStage::Over {
            return None;
        }
        let ends = Watch::new(form.ends.iter().map(String::as_str))?;
        let mut thought = Self {
            begin: form.begin.as_bytes().to_vec(),
            own_end: form.ends.first().map(|end| end.trim().to_owned()).unwrap_or_default(),
            ends,
            // What cannot be written ends nothing.
            budget: budget.filter(|_| !closing.tokens.is_empty()),
            closing: Arc::new(closing.clone()),
            stage: Stage::Possible(Vec::new()),
        };
        if stage == ThoughtStage::Open {
            thought.open();
        }
        Some(thought)
    }

    /// Has nothing but its own end, for answers that what else may follow it is no part of.
    pub(super) fn with_own_end(mut self, form: &ThoughtForm) -> Self {
        let ends = form.ends.iter().map(String::as_str).filter(|end| end.trim() == self.own_end);
        self.ends = Watch::new(ends).unwrap_or(self.ends);
        self
    }

    fn open(&mut self) {
        self.stage = if self.budget == Some(0) { Stage::Closing(0) } else { Stage::Open(0) };
    }

    /// Whether it has begun, so that whatever comes is of it.
    pub(super) fn is_open(&self) -> bool {
        !matches!(self.stage, Stage::Possible(_))
    }

    /// The token that comes next whatever the model says.
    pub(super) fn forced(&self) -> Option<Token> {
        match self.stage {
            Stage::Closing(at) => self.closing.tokens.get(at).copied(),
            _ => None,
        }
    }

    pub(super) fn ends(&self) -> &Watch {
        &self.ends
    }

    /// What the answer begins with if this ends the thought.
    pub(super) fn answer_in(&self, found: Found) -> Vec<u8> {
        let is_own = found.text[..found.length].trim_ascii() == self.own_end.as_bytes();
        if is_own { found.after().to_vec() } else { found.text }
    }

    /// What the answer begins with if a token with this text ends the thought; `None`: it does not.
    pub(super) fn ended_by(&self, text: &[u8]) -> Option<Vec<u8>> {
        self.ends.look(text).map(|found| self.answer_in(found))
    }

    /// Whether it may begin with this text, or go on beginning.
    pub(super) fn may_begin_with(&self, text: &[u8]) -> bool {
        let Stage::Possible(said) = &self.stage else { return false };
        let rest = self.begin.strip_prefix(said.as_slice()).unwrap_or_default();
        !text.is_empty() && !rest.is_empty() && (rest.starts_with(text) || text.starts_with(rest))
    }

    /// Goes on after a token with this text; `is_apart`: white space may stand before it.
    pub(super) fn accept(&mut self, text: &[u8], is_apart: bool) -> Step {
        match &mut self.stage {
            Stage::Possible(said) => {
                said.extend_from_slice(text);
                let begun = if is_apart { said.trim_ascii_start() } else { said.as_slice() };
                if let Some(rest) = begun.strip_prefix(self.begin.as_slice()) {
                    let rest = rest.to_vec();
                    self.open();
                    return self.ends.push(&rest).map_or(Step::Begun, |found| Step::Over(self.answer_in(found)));
                }
                if self.begin.starts_with(begun) { Step::On } else { Step::None }
            }
            Stage::Open(tokens) => {
                *tokens += 1;
                let tokens = *tokens;
                if let Some(found) = self.ends.push(text) {
                    return Step::Over(self.answer_in(found));
                }
                let over = self.budget.and_then(|budget| tokens.checked_sub(budget));
                if over.is_some_and(|over| over >= MOST_TOKENS_OVER || !self.ends.ends_within_character()) {
                    self.stage = Stage::Closing(0);
                }
                Step::On
            }
            Stage::Closing(at) => {
                *at += 1;
                if *at < self.closing.tokens.len() {
                    return Step::On;
                }
                self.ends.clear();
                let closed = self.ends.push(self.closing.text.as_bytes());
                Step::Over(closed.map(|found| self.answer_in(found)).unwrap_or_default())
            }
        }
    }
}

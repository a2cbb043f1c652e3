//! What an answer must look like where it is not thought: all of it, or calls of tools from where one begins.

use gantry_llama::TokenTexts;

use super::text_of;
use super::watch::Watch;
use crate::backend::Token;
use crate::grammars::{Constraint, ConstraintError, limits::MAX_WHITE_SPACE_TOKENS};

/// See the module.
#[derive(Clone, Debug)]
pub(super) enum Form {
    /// Anything.
    Free,
    Calls(Calls),
    Whole(Whole),
}

/// Anything until a call begins, and calls alone from there.
#[derive(Clone, Debug)]
pub(super) struct Calls {
    watch: Watch,
    /// From a call's beginning on.
    grammar: Constraint,
    state: CallState,
    /// Whether an answer fails whose calls cannot be followed any further; otherwise it goes on free.
    is_strict: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallState {
    Awaited,
    Begun,
    /// It could not be followed.
    GivenUp,
}

impl Calls {
    pub(super) fn new(watch: Watch, grammar: Constraint, is_strict: bool) -> Self {
        Self { watch, grammar, state: CallState::Awaited, is_strict }
    }

    pub(super) fn has_begun(&self) -> bool {
        self.state == CallState::Begun
    }

    pub(super) fn watch(&mut self) -> &mut Watch {
        &mut self.watch
    }

    /// Whether this text may come while a call is awaited.
    pub(super) fn allows_text(&self, text: &[u8]) -> Result<bool, ConstraintError> {
        let Some(found) = self.watch.look(text).filter(|_| self.state == CallState::Awaited) else { return Ok(true) };
        match self.grammar.clone().accept_text(&found.text) {
            Err(_) if !self.is_strict => Ok(true),
            allows => allows,
        }
    }

    fn allows(&mut self, token: Token, text: &[u8]) -> Result<bool, ConstraintError> {
        match self.state {
            CallState::Awaited => self.allows_text(text),
            CallState::GivenUp => Ok(true),
            CallState::Begun => match self.grammar.allows(token) {
                Err(_) if !self.is_strict => Ok(self.give_up()),
                allows => allows,
            },
        }
    }

    /// Takes a text while a call is awaited.
    pub(super) fn accept_text(&mut self, text: &[u8]) -> Result<(), ConstraintError> {
        let Some(found) = self.watch.push(text).filter(|_| self.state == CallState::Awaited) else { return Ok(()) };
        self.state = CallState::Begun;
        match self.grammar.accept_text(&found.text) {
            Ok(true) => Ok(()),
            Ok(false) | Err(_) if !self.is_strict => {
                self.give_up();
                Ok(())
            }
            Ok(false) => Err(self.grammar.not_allowed()),
            Err(error) => Err(error),
        }
    }

    fn accept(&mut self, token: Token, text: &[u8]) -> Result<(), ConstraintError> {
        match self.state {
            CallState::Awaited => self.accept_text(text),
            CallState::GivenUp => Ok(()),
            CallState::Begun => match self.grammar.accept(token) {
                Err(_) if !self.is_strict => {
                    self.give_up();
                    Ok(())
                }
                accepted => accepted,
            },
        }
    }

    /// Binds no more, where that may be; whether it does not.
    pub(super) fn give_up(&mut self) -> bool {
        if !self.is_strict && self.state == CallState::Begun {
            self.state = CallState::GivenUp;
        }
        self.state == CallState::GivenUp
    }

    fn apply(&mut self, row: &[f32], out: &mut Vec<f32>) -> Result<(), ConstraintError> {
        let applied = self.grammar.apply(row, out);
        if applied.is_err() && self.give_up() {
            row.clone_into(out);
            return Ok(());
        }
        applied
    }
}

/// One of some forms, from the beginning to the end.
#[derive(Clone, Debug)]
pub(super) struct Whole {
    /// Those that the answer may have still; none: nothing but a thought may come.
    now: Vec<Led>,
    /// Those that it may have after a thought, which they have behind them.
    after_thought: Vec<Led>,
    /// Tokens of white space that may stand before it yet.
    white: u32,
    white_after_thought: u32,
}

/// A form with what must stand before it: tokens that end where it begins.
#[derive(Clone, Debug)]
pub(super) struct Led {
    lead: Vec<u8>,
    form: Constraint,
}

impl Led {
    pub(super) fn new(lead: &str, form: Constraint) -> Self {
        Self { lead: lead.as_bytes().to_vec(), form }
    }

    /// Whether this text is of the lead that is left.
    fn leads(&self, text: &[u8]) -> bool {
        !text.is_empty() && self.lead.starts_with(text)
    }

    fn is_complete(&mut self) -> bool {
        self.lead.is_empty() && self.form.is_complete()
    }

    fn allows(&mut self, token: Token, text: &[u8]) -> Result<bool, ConstraintError> {
        if self.lead.is_empty() { self.form.allows(token) } else { Ok(self.leads(text)) }
    }

    fn accept(&mut self, token: Token, text: &[u8]) -> Result<bool, ConstraintError> {
        if self.lead.is_empty() { self.form.accept(token).map(|()| true) } else { Ok(self.follow(text)) }
    }

    fn accept_text(&mut self, text: &[u8]) -> Result<bool, ConstraintError> {
        if self.lead.is_empty() { self.form.accept_text(text) } else { Ok(self.follow(text)) }
    }

    fn follow(&mut self, text: &[u8]) -> bool {
        let leads = self.leads(text);
        if leads {
            self.lead.drain(..text.len());
        }
        leads
    }

    pub(super) fn apply(&mut self, row: &[f32], out: &mut Vec<f32>, texts: &TokenTexts) -> Result<(), ConstraintError> {
        if self.lead.is_empty() {
            return self.form.apply(row, out);
        }
        let of =
            |(token, logit): (Token, &f32)| if self.leads(text_of(texts, token)) { *logit } else { f32::NEG_INFINITY };
        out.clear();
        out.extend((0..).zip(row).map(of));
        Ok(())
    }
}

impl Whole {
    /// An answer of one of these forms, or one of others after a thought; `may_be_apart`: white space may stand between.
    pub(super) fn new(now: Vec<Led>, after_thought: Vec<Led>, may_be_apart: bool) -> Self {
        let white_after_thought = if may_be_apart { MAX_WHITE_SPACE_TOKENS } else { 0 };
        Self { now, after_thought, white: 0, white_after_thought }
    }

    /// Whether white space may stand before it that is no part of it.
    pub(super) fn may_be_apart(&self) -> bool {
        self.white_after_thought > 0
    }

    /// A thought has begun.
    pub(super) fn wait(&mut self) {
        self.now.clear();
    }

    /// What follows a thought begins.
    pub(super) fn begin(&mut self) {
        self.now = std::mem::take(&mut self.after_thought);
        self.white = self.white_after_thought;
    }

    /// No thought can come any more.
    pub(super) fn settle(&mut self) {
        self.after_thought = Vec::new();
    }

    pub(super) fn is_complete(&mut self) -> bool {
        self.now.iter_mut().any(Led::is_complete)
    }

    pub(super) fn allows(&mut self, token: Token, text: &[u8]) -> Result<bool, ConstraintError> {
        let mut failed = None;
        for form in &mut self.now {
            match form.allows(token, text) {
                Ok(true) => return Ok(true),
                Ok(false) => {}
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        match failed {
            _ if self.white > 0 && is_white(text) => Ok(true),
            Some(error) => Err(error),
            None => Ok(false),
        }
    }

    /// Whether this text may come after a thought, in the token that ends it.
    pub(super) fn allows_after_thought(&self, text: &[u8]) -> bool {
        let takes = |form: &Led| form.clone().accept_text(text).is_ok_and(|takes| takes);
        text.is_empty() || (self.white_after_thought > 0 && is_white(text)) || self.after_thought.iter().any(takes)
    }

    /// Goes on after a token; whether it may come.
    pub(super) fn accept(&mut self, token: Token, text: &[u8]) -> Result<bool, ConstraintError> {
        self.go_on(text, |form| form.accept(token, text))
    }

    /// Goes on after a text; whether it may come.
    pub(super) fn accept_text(&mut self, text: &[u8]) -> Result<bool, ConstraintError> {
        if text.is_empty() {
            return Ok(true);
        }
        self.go_on(text, |form| form.accept_text(text))
    }

    fn go_on(
        &mut self,
        text: &[u8],
        accept: impl Fn(&mut Led) -> Result<bool, ConstraintError>,
    ) -> Result<bool, ConstraintError> {
        let accepted: Vec<_> = self.now.iter_mut().map(accept).collect();
        let is_taken = |accepted: &Result<bool, ConstraintError>| matches!(accepted, Ok(true));
        if accepted.iter().any(is_taken) {
            let mut accepted = accepted.iter();
            self.now.retain(|_| accepted.next().is_some_and(is_taken));
            self.white = 0;
            return Ok(true);
        }
        if self.white > 0 && is_white(text) {
            self.white -= 1;
            return Ok(true);
        }
        accepted
            .into_iter()
            .find_map(|accepted| accepted.err().filter(ConstraintError::is_limit))
            .map_or(Ok(false), Err)
    }

    /// What a token that is not allowed is told as.
    pub(super) fn not_allowed(&self) -> Option<ConstraintError> {
        self.now.first().or(self.after_thought.first()).map(|led| led.form.not_allowed())
    }

    /// Writes to `out` the row of tokens that may come next.
    pub(super) fn apply(&mut self, row: &[f32], out: &mut Vec<f32>, texts: &TokenTexts) -> Result<(), ConstraintError> {
        out.clear();
        out.resize(row.len(), f32::NEG_INFINITY);
        let mut failed = None;
        let mut of_one = Vec::new();
        for form in &mut self.now {
            match form.apply(row, &mut of_one, texts) {
                Ok(()) => out.iter_mut().zip(&of_one).for_each(|(to, from)| *to = to.max(*from)),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        if self.white > 0 {
            let white = (0..).zip(row).zip(out.iter_mut()).filter(|((token, _), _)| is_white(text_of(texts, *token)));
            white.for_each(|((_, from), to)| *to = *from);
        }
        // Another form may do.
        match failed.filter(|_| !out.iter().any(|logit| logit.is_finite())) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

impl Form {
    /// Whether whatever comes next may come, but for what is seen at a look.
    pub(super) fn is_free(&self) -> bool {
        match self {
            Self::Free => true,
            Self::Calls(calls) => !calls.has_begun(),
            Self::Whole(_) => false,
        }
    }

    pub(super) fn is_complete(&mut self) -> bool {
        match self {
            Self::Free => true,
            Self::Calls(calls) => !calls.has_begun() || calls.grammar.is_complete(),
            Self::Whole(whole) => whole.is_complete(),
        }
    }

    pub(super) fn allows(&mut self, token: Token, text: &[u8]) -> Result<bool, ConstraintError> {
        match self {
            Self::Free => Ok(true),
            Self::Calls(calls) => calls.allows(token, text),
            Self::Whole(whole) => whole.allows(token, text),
        }
    }

    pub(super) fn accept(&mut self, token: Token, text: &[u8]) -> Result<(), ConstraintError> {
        match self {
            Self::Free => Ok(()),
            Self::Calls(calls) => calls.accept(token, text),
            Self::Whole(whole) => match whole.accept(token, text)? {
                true => Ok(()),
                false => whole.not_allowed().map_or(Ok(()), Err),
            },
        }
    }

    /// Writes to `out` the row of tokens that may come next; those of a call that is awaited are looked at elsewhere.
    pub(super) fn apply(&mut self, row: &[f32], out: &mut Vec<f32>, texts: &TokenTexts) -> Result<(), ConstraintError> {
        match self {
            Self::Calls(calls) if calls.has_begun() => calls.apply(row, out),
            Self::Whole(whole) => whole.apply(row, out, texts),
            Self::Free | Self::Calls(_) => {
                row.clone_into(out);
                Ok(())
            }
        }
    }
}

fn is_white(text: &[u8]) -> bool {
    !text.is_empty() && text.iter().all(u8::is_ascii_whitespace)
}

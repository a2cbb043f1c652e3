//! What binds an answer while it comes, and from where on. [`Constraint`] follows a form from its first token; here it is known when it
//! begins: what the model thinks is free, and may be of so many tokens at most ([`thought`]); an answer of a form is bound once
//! that is over, and a call of a tool from where it begins ([`form`]).
//!
//! Flow: [`Binding::forced`], [`Binding::allows`] and [`Binding::apply`] say what may come next, and [`Binding::accept`] goes on after a
//! token. Where nothing is bound ([`Binding::is_free`]), a token costs a look for the few texts that bind what follows them
//! ([`watch`]). Nothing here looks ahead, so that guessed tokens are checked as others are. Absent: reading what is thought, said and
//! called ([`crate::answer`]).

mod form;
mod thought;
mod watch;

use std::sync::Arc;

use gantry_llama::{AnswerForm, Lead, ThoughtForm, TokenTexts};

use self::form::{Calls, Form, Led, Whole};
use self::thought::{Step, Thought};
use self::watch::Watch;
use crate::backend::{Closing, Token};
use crate::grammars::{Constraint, ConstraintError};

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Binding {
    texts: Arc<TokenTexts>,
    /// `None`: none can come any more.
    thought: Option<Thought>,
    form: Form,
    /// Whether an answer goes on free that cannot be followed any further.
    may_give_up: bool,
}

/// How a chat's answer is bound.
#[derive(Debug)]
pub(crate) struct AnswerBinding<'a> {
    /// What it looks like.
    pub(crate) form: &'a AnswerForm,
    /// The texts of tokens, those that it is read by among them.
    pub(crate) texts: &'a Arc<TokenTexts>,
    /// The most tokens that may be thought.
    pub(crate) thinking_budget: Option<u32>,
    /// What ends a thought that has more.
    pub(crate) closing: &'a Closing,
    /// What stands before what is said, or a call.
    pub(crate) lead: &'a Lead,
    /// What it must look like, where that was asked for.
    pub(crate) constraint: Option<Constraint>,
    /// What its calls must.
    pub(crate) calls: CallBinding,
}

/// How calls are bound.
#[derive(Debug, Default)]
pub(crate) enum CallBinding {
    /// None may come, or as the model writes them.
    #[default]
    Free,
    /// There must be some, and nothing but a thought before: the grammar of the answer with what its prompt ends with.
    Required(Constraint),
    /// There may be some.
    Allowed {
        /// From where one begins.
        grammar: Constraint,
        /// With what it begins; none beside a form, where no text tells that.
        triggers: Vec<String>,
        /// Whether an answer fails that has calls which cannot be followed; otherwise these are not bound.
        is_strict: bool,
    },
    /// The same by the grammar of calls alone.
    Calls(Constraint),
    /// There may be some, and no text tells that one begins.
    Whole {
        /// All that an answer may be, with what its prompt ends with.
        grammar: Constraint,
        /// Whether an answer fails that cannot be followed; otherwise it goes on free.
        is_strict: bool,
    },
}

/// An answer may be of a form, or call tools, and how these are called is not understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoChoice;

impl Binding {
    /// A form from the first token to the last.
    pub(crate) fn whole(texts: Arc<TokenTexts>, constraint: Constraint) -> Self {
        let form = Form::Whole(Whole::new(vec![Led::new("", constraint)], Vec::new(), false));
        Self { texts, thought: None, form, may_give_up: false }
    }

    /// A chat's answer; `None`: nothing binds it.
    ///
    /// # Errors
    /// The answer may be of a form or call tools, and which calls there are is not known.
    pub(crate) fn of_answer(asked: AnswerBinding<'_>) -> Result<Option<Self>, NoChoice> {
        let AnswerBinding { form: answer, texts, thinking_budget, closing, lead, constraint, calls } = asked;
        let texts = Arc::clone(texts);
        let may_give_up = constraint.is_none() && matches!(&calls, CallBinding::Whole { is_strict: false, .. });
        let new_thought = || {
            let form = answer.thought.as_ref()?;
            Some((form, Thought::new(form, &answer.prefix, thinking_budget, closing)?))
        };
        let (form, thought) = match (constraint, calls) {
            (None, CallBinding::Free) => match new_thought() {
                Some((_, thought)) if thinking_budget.is_some() => (Form::Free, Some(thought)),
                _ => return Ok(None),
            },
            (None, CallBinding::Allowed { grammar, triggers, is_strict }) => {
                let Some(watch) = Watch::new(triggers.iter().map(String::as_str)) else { return Ok(None) };
                (Form::Calls(Calls::new(watch, grammar, is_strict)), new_thought().map(|(_, thought)| thought))
            }
            // All that there is.
            (_, CallBinding::Required(grammar)) | (None, CallBinding::Whole { grammar, .. }) => {
                let after = new_thought().and_then(|(form, thought)| {
                    let after = after_thought(&grammar, form, &thought)?;
                    Some((Led::new("", after), thought.with_own_end(form)))
                });
                // Where it knows of no thought, it binds from the first token on.
                let (after, thought) = after.unzip();
                (Form::Whole(Whole::new(vec![Led::new("", grammar)], after.into_iter().collect(), false)), thought)
            }
            (_, CallBinding::Calls(grammar)) => {
                let after = vec![Led::new(lead.before_call(), grammar.clone())];
                let thought = new_thought().map(|(form, thought)| thought.with_own_end(form));
                (Form::Whole(Whole::new(vec![Led::new("", grammar)], after, false)), thought)
            }
            (Some(constraint), calls) => {
                let mut now = vec![Led::new(&lead.at_once, constraint.clone())];
                let mut after = vec![Led::new(&lead.after_thought, constraint)];
                if let CallBinding::Allowed { grammar, triggers, .. } = calls {
                    let begins = |trigger: &String| grammar.clone().accept_text(trigger.as_bytes()) == Ok(true);
                    if !triggers.is_empty() && !triggers.iter().any(begins) {
                        return Err(NoChoice);
                    }
                    now.push(Led::new("", grammar.clone()));
                    after.push(Led::new(lead.before_call(), grammar));
                }
                let thought = new_thought().map(|(form, thought)| thought.with_own_end(form));
                // Of white space that a form may begin with nobody could say whose it is.
                let is_led = !lead.after_thought.is_empty();
                let may_be_apart = thought.is_some() && !is_led && !begins_with_white(&mut now, &texts);
                let after = if thought.is_some() { after } else { Vec::new() };
                (Form::Whole(Whole::new(now, after, may_be_apart)), thought)
            }
        };
        Ok(Some(Self { texts, thought, form, may_give_up }))
    }

    /// Whether white space may stand between the answer and a thought before it, and is no part of it.
    pub(crate) fn may_be_apart(&self) -> bool {
        matches!(&self.form, Form::Whole(whole) if whole.may_be_apart())
    }

    /// The token that comes next, whatever the model says.
    pub(crate) fn forced(&self) -> Option<Token> {
        self.thought.as_ref().and_then(Thought::forced)
    }

    /// Whether what may come next is known at a look.
    pub(crate) fn is_free(&self) -> bool {
        self.is_thinking() || self.form.is_free()
    }

    fn is_thinking(&self) -> bool {
        self.thought.as_ref().is_some_and(Thought::is_open)
    }

    /// Whether the text may end here, so that the end tokens are allowed.
    pub(crate) fn is_complete(&mut self) -> bool {
        // A thought is no answer.
        let is_none = self.is_thinking() && matches!(self.form, Form::Whole(_));
        !is_none && self.form.is_complete()
    }

    /// Whether a token may come next.
    ///
    /// # Errors
    /// When that takes too long to say.
    pub(crate) fn allows(&mut self, token: Token) -> Result<bool, ConstraintError> {
        if self.is_thinking() {
            return Ok(self.ends_thought_well(token)?.unwrap_or(true));
        }
        let text = text_of(&self.texts, token);
        match (&self.thought, &mut self.form) {
            (Some(thought), Form::Whole(_)) if thought.may_begin_with(text) => Ok(true),
            (_, form) => match form.allows(token, text) {
                Err(_) if self.give_up() => Ok(true),
                allows => allows,
            },
        }
    }

    /// Whether a token may come that ends a thought, or the answer within one; `None`: it does neither.
    fn ends_thought_well(&self, token: Token) -> Result<Option<bool>, ConstraintError> {
        let Some(thought) = &self.thought else { return Ok(None) };
        if self.texts.is_end(token) {
            return Ok(Some(!matches!(self.form, Form::Whole(_))));
        }
        let Some(said) = thought.ended_by(text_of(&self.texts, token)) else { return Ok(None) };
        match &self.form {
            Form::Free => Ok(None),
            Form::Calls(calls) => calls.allows_text(&said).map(Some),
            Form::Whole(whole) => Ok(Some(whole.allows_after_thought(&said))),
        }
    }

    /// Goes on after a token. One that ends the generation changes nothing.
    ///
    /// # Errors
    /// When the token is not allowed, or that takes too long to say.
    pub(crate) fn accept(&mut self, token: Token) -> Result<(), ConstraintError> {
        match self.go_on(token) {
            Err(_) if self.may_give_up => {
                self.give_up();
                Ok(())
            }
            gone_on => gone_on,
        }
    }

    fn go_on(&mut self, token: Token) -> Result<(), ConstraintError> {
        let texts = Arc::clone(&self.texts);
        let text = text_of(&texts, token);
        let Some(thought) = &mut self.thought else { return self.form.accept(token, text) };
        if thought.is_open() {
            if !texts.is_end(token) {
                let step = thought.accept(text, false);
                self.after(step)?;
            }
            return Ok(());
        }
        let step = match &mut self.form {
            Form::Whole(whole) => {
                let may_begin = thought.may_begin_with(text);
                let is_taken = whole.accept(token, text)?;
                if !is_taken && !may_begin {
                    return whole.not_allowed().map_or(Ok(()), Err);
                }
                if !is_taken {
                    whole.wait();
                }
                if may_begin { thought.accept(text, false) } else { Step::None }
            }
            form => {
                let step = thought.accept(text, true);
                // What stands behind the beginning of a thought in one token is thought, be it like a call.
                if !matches!(step, Step::Begun | Step::Over(_)) {
                    form.accept(token, text)?;
                }
                step
            }
        };
        self.after(step)
    }

    fn after(&mut self, step: Step) -> Result<(), ConstraintError> {
        match (step, &mut self.form) {
            (Step::On, _) | (Step::Begun, Form::Free) => {}
            (Step::Begun, Form::Calls(calls)) => calls.watch().clear(),
            (Step::Begun, Form::Whole(whole)) => whole.wait(),
            (Step::Over(said), form) => {
                self.thought = None;
                match form {
                    Form::Free => {}
                    Form::Calls(calls) => {
                        calls.watch().clear();
                        calls.accept_text(&said)?;
                    }
                    Form::Whole(whole) => {
                        whole.begin();
                        if !whole.accept_text(&said)? {
                            return whole.not_allowed().map_or(Ok(()), Err);
                        }
                    }
                }
            }
            (Step::None, form) => {
                self.thought = None;
                if let Form::Whole(whole) = form {
                    whole.settle();
                }
            }
        }
        Ok(())
    }

    /// Binds no more, where the request can do without; whether it does not.
    pub(crate) fn give_up(&mut self) -> bool {
        match &mut self.form {
            Form::Calls(calls) => calls.give_up(),
            Form::Whole(_) if self.may_give_up => {
                self.form = Form::Free;
                true
            }
            Form::Free | Form::Whole(_) => false,
        }
    }

    /// Writes to `out` the row with every token that may not come next at minus infinity.
    ///
    /// # Errors
    /// When that takes too long to say.
    pub(crate) fn apply(&mut self, row: &[f32], out: &mut Vec<f32>) -> Result<(), ConstraintError> {
        let texts = Arc::clone(&self.texts);
        let tokens = || (0..).take(row.len());
        if self.is_thinking() {
            row.clone_into(out);
            let ends = self.thought.as_ref().map(|thought| thought.ends().completed_by());
            let may_end = |token: &Token| {
                let text = text_of(&texts, *token);
                texts.is_end(*token) || ends.as_ref().is_some_and(|ends| ends(text))
            };
            for token in tokens().filter(may_end) {
                ban(out, token, self.ends_thought_well(token)?.unwrap_or(true));
            }
            return Ok(());
        }
        if let Err(error) = self.form.apply(row, out, &texts) {
            if !self.give_up() {
                return Err(error);
            }
            row.clone_into(out);
        }
        match (&self.thought, &mut self.form) {
            (Some(thought), Form::Whole(_)) => {
                for token in tokens().filter(|&token| thought.may_begin_with(text_of(&texts, token))) {
                    if let Some((to, from)) =
                        usize::try_from(token).ok().and_then(|at| out.get_mut(at).zip(row.get(at)))
                    {
                        *to = *from;
                    }
                }
            }
            (_, Form::Calls(calls)) if !calls.has_begun() => {
                let begins: Vec<Token> = {
                    let begins = calls.watch().completed_by();
                    tokens().filter(|&token| begins(text_of(&texts, token))).collect()
                };
                for token in begins {
                    ban(out, token, calls.allows_text(text_of(&texts, token))?);
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// Where a grammar of whole answers is behind a thought; `None`: it knows of none.
fn after_thought(grammar: &Constraint, form: &ThoughtForm, thought: &Thought) -> Option<Constraint> {
    let mut after = grammar.clone();
    let begin = if thought.is_open() { "" } else { form.begin.as_str() };
    let end = form.ends.first().map(|end| end.trim())?;
    let takes = after.accept_text(&[begin, end].concat().into_bytes());
    takes.is_ok_and(|takes| takes).then_some(after)
}

/// Whether an answer of one of these forms may begin with white space; one that cannot be followed may.
fn begins_with_white(forms: &mut [Led], texts: &TokenTexts) -> bool {
    let (row, mut left) = (vec![0.0; texts.len()], Vec::new());
    forms.iter_mut().any(|form| {
        let is_left = |(token, logit): (Token, &f32)| {
            logit.is_finite() && texts.text(token).first().is_some_and(u8::is_ascii_whitespace)
        };
        form.apply(&row, &mut left, texts).is_err() || (0..).zip(&left).any(is_left)
    })
}

/// The text of a token; none of one that ends a generation.
fn text_of(texts: &TokenTexts, token: Token) -> &[u8] {
    if texts.is_end(token) { &[] } else { texts.text(token) }
}

fn ban(row: &mut [f32], token: Token, is_allowed: bool) {
    if let Some(logit) = usize::try_from(token).ok().and_then(|at| row.get_mut(at)).filter(|_| !is_allowed) {
        *logit = f32::NEG_INFINITY;
    }
}

#[cfg(test)]
#[path = "binding_tests.rs"]
mod tests;

//! What an answer must look like, compiled: a GBNF grammar, which llama.cpp's language and our machine follow
//! (`gantry-llama`), or a JSON schema or a regular expression ([`schema`]).
//!
//! [`Grammars`] keeps those that were compiled lately: those who ask for a schema ask for it again and again, and to
//! compile one takes longer than to tokenise most prompts. It is shared by the threads that prepare prompts. What is kept
//! is where a text begins, so each request follows it on its own; of two requests that need the same new grammar at once,
//! both compile it. Refusals are not kept.

mod clock;
pub(crate) mod limits;
mod place;
mod schema;

#[cfg(test)]
mod corpus_tests;
#[cfg(test)]
mod schema_tests;

use std::sync::{Arc, Mutex, PoisonError};

use gantry_llama::{Grammar, GrammarError, TokenTexts};

use self::schema::{Schema, SchemaCompiler, SchemaError};
use crate::backend::Token;
use crate::error::RequestError;
use crate::params::{self, MAX_KEPT_GRAMMARS};

/// Where an answer is in what it must look like.
#[derive(Clone, Debug)]
pub(crate) struct Constraint {
    machine: Machine,
    /// What the client calls it.
    param: Arc<str>,
}

#[derive(Clone, Debug)]
enum Machine {
    Gbnf(Box<Grammar>),
    Schema(Box<Schema>),
}

/// What it must look like cannot be followed, or a token is not allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{param}: {fault}")]
pub(crate) struct ConstraintError {
    param: Arc<str>,
    fault: Fault,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum Fault {
    #[error("{0}")]
    Gbnf(#[from] GrammarError),
    #[error("{0}")]
    Schema(#[from] SchemaError),
}

impl ConstraintError {
    /// Whether it says that following the form takes too much.
    pub(crate) fn is_limit(&self) -> bool {
        matches!(
            self.fault,
            Fault::Gbnf(GrammarError::TooComplex { .. })
                | Fault::Schema(SchemaError::TooComplex { .. } | SchemaError::DeadEnd)
        )
    }

    /// What the request is told that is being answered: what is too complex is its own fault.
    pub(crate) fn into_request_error(self) -> RequestError {
        match self.is_limit() {
            true => RequestError::invalid(&self.param, "grammar_too_complex", self.to_string()),
            false => RequestError::Internal(self.to_string()),
        }
    }
}

impl Constraint {
    fn error(&self, fault: impl Into<Fault>) -> ConstraintError {
        ConstraintError { param: self.param.clone(), fault: fault.into() }
    }

    /// Whether the text may end here, so that the end tokens are allowed. Not, where that takes too long to say: then every other
    /// question is an error.
    pub(crate) fn is_complete(&mut self) -> bool {
        match &mut self.machine {
            Machine::Gbnf(grammar) => grammar.is_complete(),
            Machine::Schema(schema) => schema.is_complete().unwrap_or(false),
        }
    }

    /// Whether a token may come next.
    ///
    /// # Errors
    /// When that takes too long to say.
    pub(crate) fn allows(&mut self, token: Token) -> Result<bool, ConstraintError> {
        let allows = match &mut self.machine {
            Machine::Gbnf(grammar) => grammar.allows(token).map_err(Fault::from),
            Machine::Schema(schema) => schema.allows(token).map_err(Fault::from),
        };
        allows.map_err(|fault| self.error(fault))
    }

    /// Goes on after a token. One that ends the generation changes nothing.
    ///
    /// # Errors
    /// When the token is not allowed, or that takes too long to say.
    pub(crate) fn accept(&mut self, token: Token) -> Result<(), ConstraintError> {
        let accepted = match &mut self.machine {
            Machine::Gbnf(grammar) => grammar.accept(token).map_err(Fault::from),
            Machine::Schema(schema) => schema.accept(token).map_err(Fault::from),
        };
        accepted.map_err(|fault| self.error(fault))
    }

    /// Goes on after a text, whichever tokens it came as, and says whether it may come: of a schema, which is followed token by
    /// token, none may. What may not changes nothing.
    ///
    /// # Errors
    /// When that takes too long to say.
    pub(crate) fn accept_text(&mut self, text: &[u8]) -> Result<bool, ConstraintError> {
        match &mut self.machine {
            Machine::Gbnf(grammar) => match grammar.accept_bytes(text) {
                Ok(()) => Ok(true),
                Err(GrammarError::TextNotAllowed) => Ok(false),
                Err(fault) => Err(self.error(fault)),
            },
            Machine::Schema(_) => Ok(text.is_empty()),
        }
    }

    /// What a text is told as that may not come.
    pub(crate) fn not_allowed(&self) -> ConstraintError {
        self.error(GrammarError::TextNotAllowed)
    }

    /// Writes to `out` the row with every token that may not come next at minus infinity.
    ///
    /// # Errors
    /// When that takes too long to say.
    pub(crate) fn apply(&mut self, row: &[f32], out: &mut Vec<f32>) -> Result<(), ConstraintError> {
        let applied = match &mut self.machine {
            Machine::Gbnf(grammar) => grammar.apply(row, out).map_err(Fault::from),
            Machine::Schema(schema) => schema.apply(row, out).map_err(Fault::from),
        };
        applied.map_err(|fault| self.error(fault))
    }
}

/// See the module.
#[derive(Clone, Default)]
pub(crate) struct Grammars {
    /// The one used last is the last.
    kept: Arc<Mutex<Vec<(params::Constraint, Machine)>>>,
    /// Built for the first schema: no model's load waits for it. What failed is tried again.
    schemas: Arc<Mutex<Option<Arc<SchemaCompiler>>>>,
}

impl Grammars {
    /// Compiles what a client calls `param`, unless it was compiled lately.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub(crate) fn get(
        &self,
        texts: &Arc<TokenTexts>,
        asked: &params::Constraint,
        param: &str,
    ) -> Result<Constraint, RequestError> {
        let of = |machine| Constraint { machine, param: param.into() };
        if let Some(known) = self.find(asked) {
            return Ok(of(known));
        }
        let compiled = self.compile(texts, asked).map_err(|fault| match fault {
            Fault::Schema(SchemaError::Busy) => RequestError::Overloaded(fault.to_string()),
            Fault::Schema(SchemaError::Internal(_)) => RequestError::Internal(fault.to_string()),
            fault => RequestError::invalid(param, "invalid_grammar", format!("{param}: {fault}")),
        })?;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have been quicker.
        kept.retain(|(other, _)| other != asked);
        if kept.len() >= MAX_KEPT_GRAMMARS {
            kept.remove(0);
        }
        kept.push((asked.clone(), compiled.clone()));
        Ok(of(compiled))
    }

    fn compile(&self, texts: &Arc<TokenTexts>, asked: &params::Constraint) -> Result<Machine, Fault> {
        Ok(match asked {
            params::Constraint::Gbnf(text) => Machine::Gbnf(Box::new(Grammar::gbnf(texts, text)?)),
            params::Constraint::JsonSchema { schema, strict } => {
                Machine::Schema(Box::new(self.compiler(texts)?.compile(schema, *strict)?))
            }
            params::Constraint::Regex(regex) => Machine::Schema(Box::new(self.compiler(texts)?.compile_regex(regex)?)),
        })
    }

    fn compiler(&self, texts: &Arc<TokenTexts>) -> Result<Arc<SchemaCompiler>, SchemaError> {
        let mut built = self.schemas.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(compiler) = &*built {
            return Ok(Arc::clone(compiler));
        }
        Ok(Arc::clone(built.insert(Arc::new(SchemaCompiler::new(texts)?))))
    }

    fn find(&self, grammar: &params::Constraint) -> Option<Machine> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let at = kept.iter().position(|(other, _)| other == grammar)?;
        let found = kept.remove(at);
        let known = found.1.clone();
        kept.push(found);
        Some(known)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::backend::Vocabulary;
    use crate::backend::scripted::ScriptedVocabulary;

    fn gbnf(text: &str) -> params::Constraint {
        params::Constraint::Gbnf(text.to_owned())
    }

    /// The grammars that are kept, the one used last being the last.
    fn kept(grammars: &Grammars) -> Vec<params::Constraint> {
        grammars.kept.lock().unwrap().iter().map(|(grammar, _)| grammar.clone()).collect()
    }

    /// Tokens 8 and 11 are "a" and "d".
    #[test]
    fn a_grammar_that_is_kept_begins_anew_for_each_request() {
        let (grammars, texts) = (Grammars::default(), ScriptedVocabulary.texts());
        let asked = gbnf("root ::= \"ad\"");
        for _ in 0..3 {
            let mut grammar = grammars.get(texts, &asked, "grammar").unwrap();
            assert!(grammar.allows(8).unwrap() && !grammar.allows(11).unwrap());
            grammar.accept(8).unwrap();
            assert!(grammar.allows(11).unwrap() && !grammar.allows(8).unwrap());
        }
        assert_eq!(kept(&grammars), [asked]);
    }

    #[test]
    fn the_one_used_longest_ago_goes_first_and_what_is_refused_is_not_kept() {
        let (grammars, texts) = (Grammars::default(), ScriptedVocabulary.texts());
        let nth = |n: usize| gbnf(&format!("root ::= \"{}\"", "a".repeat(n + 1)));
        for n in 0..MAX_KEPT_GRAMMARS {
            grammars.get(texts, &nth(n), "grammar").unwrap();
        }
        grammars.get(texts, &nth(0), "grammar").unwrap();
        assert!(grammars.get(texts, &gbnf("root ::= x"), "grammar").is_err());
        // The same text as a schema is another grammar.
        let schema = params::Constraint::JsonSchema { schema: String::from("root ::= \"a\""), strict: false };
        let refused = grammars.get(texts, &schema, "guided_json").unwrap_err();
        assert!(refused.to_string().starts_with("guided_json: "), "{refused}");
        grammars.get(texts, &nth(MAX_KEPT_GRAMMARS), "grammar").unwrap();
        let expected: Vec<_> = (2..MAX_KEPT_GRAMMARS).chain([0, MAX_KEPT_GRAMMARS]).map(nth).collect();
        assert_eq!(kept(&grammars), expected);
    }
}

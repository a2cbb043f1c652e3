//! What an answer must look like, compiled: a GBNF grammar, which llama.cpp's language and our machine follow
//! (`gantry-llama`), or a JSON schema ([`schema`]).
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
pub(crate) enum Constraint {
    Gbnf(Box<Grammar>),
    Schema(Box<Schema>),
}

/// What it must look like cannot be followed, or a token is not allowed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ConstraintError {
    #[error("{0}")]
    Gbnf(#[from] GrammarError),
    #[error("{0}")]
    Schema(#[from] SchemaError),
}

impl ConstraintError {
    /// What the request is told that is being answered: what is too complex is its own fault.
    pub(crate) fn into_request_error(self) -> RequestError {
        let (param, message) = match &self {
            Self::Gbnf(GrammarError::TooComplex { .. }) => ("grammar", self.to_string()),
            Self::Schema(SchemaError::TooComplex { .. } | SchemaError::DeadEnd) => {
                ("response_format", self.to_string())
            }
            _ => return RequestError::Internal(self.to_string()),
        };
        RequestError::invalid(param, "grammar_too_complex", format!("{param}: {message}"))
    }
}

impl Constraint {
    /// Whether the text may end here, so that the end tokens are allowed.
    pub(crate) fn is_complete(&mut self) -> bool {
        match self {
            Self::Gbnf(grammar) => grammar.is_complete(),
            Self::Schema(schema) => schema.is_complete(),
        }
    }

    /// Whether a token may come next.
    ///
    /// # Errors
    /// When that takes too long to say.
    pub(crate) fn allows(&mut self, token: Token) -> Result<bool, ConstraintError> {
        match self {
            Self::Gbnf(grammar) => Ok(grammar.allows(token)?),
            Self::Schema(schema) => Ok(schema.allows(token)?),
        }
    }

    /// Goes on after a token. One that ends the generation changes nothing.
    ///
    /// # Errors
    /// When the token is not allowed, or that takes too long to say.
    pub(crate) fn accept(&mut self, token: Token) -> Result<(), ConstraintError> {
        match self {
            Self::Gbnf(grammar) => Ok(grammar.accept(token)?),
            Self::Schema(schema) => Ok(schema.accept(token)?),
        }
    }

    /// Goes on after a text that is there already, whichever tokens it came as; a schema has none before it.
    ///
    /// # Errors
    /// When it is not allowed.
    pub(crate) fn accept_text(&mut self, text: &str) -> Result<(), ConstraintError> {
        match self {
            Self::Gbnf(grammar) => Ok(grammar.accept_text(text)?),
            Self::Schema(_) => Ok(()),
        }
    }

    /// Writes to `out` the row with every token that may not come next at minus infinity.
    ///
    /// # Errors
    /// When that takes too long to say.
    pub(crate) fn apply(&mut self, row: &[f32], out: &mut Vec<f32>) -> Result<(), ConstraintError> {
        match self {
            Self::Gbnf(grammar) => Ok(grammar.apply(row, out)?),
            Self::Schema(schema) => Ok(schema.apply(row, out)?),
        }
    }
}

/// See the module.
#[derive(Clone, Default)]
pub(crate) struct Grammars {
    /// The one used last is the last.
    kept: Arc<Mutex<Vec<(params::Constraint, Constraint)>>>,
    /// Built for the first schema: no model's load waits for it. What failed is tried again.
    schemas: Arc<Mutex<Option<Arc<SchemaCompiler>>>>,
}

impl Grammars {
    /// Compiles a grammar, unless it was compiled lately.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub(crate) fn get(
        &self,
        texts: &Arc<TokenTexts>,
        grammar: &params::Constraint,
    ) -> Result<Constraint, RequestError> {
        if let Some(known) = self.find(grammar) {
            return Ok(known);
        }
        let param = match grammar {
            params::Constraint::Gbnf(_) => "grammar",
            params::Constraint::JsonSchema { .. } => "response_format",
        };
        let compiled = self.compile(texts, grammar);
        let compiled = compiled.map_err(|error| match error {
            ConstraintError::Schema(SchemaError::Busy) => RequestError::Overloaded(error.to_string()),
            ConstraintError::Schema(SchemaError::Internal(_)) => RequestError::Internal(error.to_string()),
            error => RequestError::invalid(param, "invalid_grammar", format!("{param}: {error}")),
        })?;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have been quicker.
        kept.retain(|(other, _)| other != grammar);
        if kept.len() >= MAX_KEPT_GRAMMARS {
            kept.remove(0);
        }
        kept.push((grammar.clone(), compiled.clone()));
        Ok(compiled)
    }

    fn compile(&self, texts: &Arc<TokenTexts>, grammar: &params::Constraint) -> Result<Constraint, ConstraintError> {
        match grammar {
            params::Constraint::Gbnf(text) => Ok(Constraint::Gbnf(Box::new(Grammar::gbnf(texts, text)?))),
            params::Constraint::JsonSchema { schema, strict } => {
                let schema = self.compiler(texts)?.compile(schema, *strict)?;
                Ok(Constraint::Schema(Box::new(schema)))
            }
        }
    }

    fn compiler(&self, texts: &Arc<TokenTexts>) -> Result<Arc<SchemaCompiler>, SchemaError> {
        let mut built = self.schemas.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(compiler) = &*built {
            return Ok(Arc::clone(compiler));
        }
        Ok(Arc::clone(built.insert(Arc::new(SchemaCompiler::new(texts)?))))
    }

    fn find(&self, grammar: &params::Constraint) -> Option<Constraint> {
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
            let mut grammar = grammars.get(texts, &asked).unwrap();
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
            grammars.get(texts, &nth(n)).unwrap();
        }
        grammars.get(texts, &nth(0)).unwrap();
        assert!(grammars.get(texts, &gbnf("root ::= x")).is_err());
        // The same text as a schema is another grammar.
        assert!(
            grammars
                .get(texts, &params::Constraint::JsonSchema { schema: String::from("root ::= \"a\""), strict: false })
                .is_err()
        );
        grammars.get(texts, &nth(MAX_KEPT_GRAMMARS)).unwrap();
        let expected: Vec<_> = (2..MAX_KEPT_GRAMMARS).chain([0, MAX_KEPT_GRAMMARS]).map(nth).collect();
        assert_eq!(kept(&grammars), expected);
    }
}

//! Grammars that were compiled lately: those who ask for a schema ask for it again and again, and to compile one takes
//! longer than to tokenise most prompts.
//!
//! Shared by the threads that prepare prompts. What is kept is where a text begins, so each request follows it on its
//! own; of two requests that need the same new grammar at once, both compile it. Refusals are not kept.

use std::sync::{Arc, Mutex, PoisonError};

use gantry_llama::{Grammar, TokenTexts};

use crate::error::RequestError;
use crate::params::{self, MAX_KEPT_GRAMMARS};

/// See the module.
#[derive(Clone, Default)]
pub(crate) struct Grammars {
    /// The one used last is the last.
    kept: Arc<Mutex<Vec<(params::Grammar, Grammar)>>>,
}

impl Grammars {
    /// Compiles a grammar, unless it was compiled lately.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub(crate) fn get(&self, texts: &Arc<TokenTexts>, grammar: &params::Grammar) -> Result<Grammar, RequestError> {
        if let Some(known) = self.find(grammar) {
            return Ok(known);
        }
        let compiled = compile(texts, grammar)?;
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have been quicker.
        kept.retain(|(other, _)| other != grammar);
        if kept.len() >= MAX_KEPT_GRAMMARS {
            kept.remove(0);
        }
        kept.push((grammar.clone(), compiled.clone()));
        Ok(compiled)
    }

    fn find(&self, grammar: &params::Grammar) -> Option<Grammar> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let at = kept.iter().position(|(other, _)| other == grammar)?;
        let found = kept.remove(at);
        let known = found.1.clone();
        kept.push(found);
        Some(known)
    }
}

fn compile(texts: &Arc<TokenTexts>, grammar: &params::Grammar) -> Result<Grammar, RequestError> {
    let (param, compiled) = match grammar {
        params::Grammar::Gbnf(text) => ("grammar", Grammar::gbnf(texts, text)),
        params::Grammar::JsonSchema(json) => ("response_format", Grammar::json_schema(texts, json)),
    };
    compiled.map_err(|e| RequestError::invalid(param, "invalid_grammar", format!("{param}: {e}")))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::backend::Vocabulary;
    use crate::backend::scripted::ScriptedVocabulary;

    fn gbnf(text: &str) -> params::Grammar {
        params::Grammar::Gbnf(text.to_owned())
    }

    /// The grammars that are kept, the one used last being the last.
    fn kept(grammars: &Grammars) -> Vec<params::Grammar> {
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
        assert!(grammars.get(texts, &params::Grammar::JsonSchema(String::from("root ::= \"a\""))).is_err());
        grammars.get(texts, &nth(MAX_KEPT_GRAMMARS)).unwrap();
        let expected: Vec<_> = (2..MAX_KEPT_GRAMMARS).chain([0, MAX_KEPT_GRAMMARS]).map(nth).collect();
        assert_eq!(kept(&grammars), expected);
    }
}

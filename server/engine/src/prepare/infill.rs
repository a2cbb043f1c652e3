//! A gap within a text, as the tokens by which a model is asked to fill it; laid out as llama-server does it, but that what
//! begins each text comes first.
//!
//! With files the text is the last of a repository's: `[repository]myproject [file]NAME TEXT … [file]filename`, and then the gap. As
//! many of the last files as there is room for are taken, each whole; what stands around the gap is never cut.

use gantry_llama::{InfillTokens, SpecialTokens};

use super::{Preparer, check_bytes};
use crate::backend::Token;
use crate::error::RequestError;
use crate::params::{GenerationParams, Infill, InfillFile, TextInput};

/// The repository's name.
const REPOSITORY: &str = "myproject\n";
/// The name of the file with the gap.
const FILE: &str = "filename\n";
/// Before a part of another file, where the vocabulary has no token for that.
const SNIPPET: &str = "\n\n--- snippet ---\n\n";

/// What stands around a gap.
struct Around {
    /// Before all of it.
    files: Vec<Token>,
    prefix: Vec<Token>,
    suffix: Vec<Token>,
}

impl Around {
    /// `suffix_first`: what stands after the gap comes before what stands before it, as some models were taught.
    fn laid_out(self, known: &InfillTokens, suffix_first: bool) -> Vec<Token> {
        let Self { files, prefix, suffix } = self;
        let before = [vec![known.prefix], prefix].concat();
        let after = [vec![known.suffix], suffix].concat();
        let (first, second) = if suffix_first { (after, before) } else { (before, after) };
        let begin = known.begin.into_iter().collect();
        [begin, files, first, second, vec![known.middle]].concat()
    }
}

impl Preparer {
    /// The tokens of a text with a gap, and how many of the files beside it had no room.
    pub(super) fn infill(&self, infill: Infill, params: &GenerationParams) -> Result<(Vec<Token>, u32), RequestError> {
        let Infill { prefix, begun, suffix, suffix_param, files } = infill;
        let Some(known) = self.vocabulary.infill_tokens() else {
            let message = format!(
                "`{suffix_param}`: this model's file names no tokens for what stands before and after a gap (fim_pre, fim_suf \
                 and fim_mid), so that it fills none: leave it out, or serve a model that was trained to"
            );
            return Err(RequestError::invalid(&suffix_param, "unsupported_parameter", message));
        };
        let mut before = match prefix {
            TextInput::Text(text) => self.bare("prompt", &text)?,
            TextInput::Tokens(tokens) => {
                self.check_known(&tokens)?;
                tokens
            }
        };
        before.extend(self.bare("prompt", &begun)?);
        let mut around = Around { files: Vec::new(), prefix: before, suffix: self.bare(&suffix_param, &suffix)? };
        let (mut head, mut tail) = (Vec::new(), Vec::new());
        if files.is_some() {
            if let Some(token) = known.repository {
                head = self.named(token, REPOSITORY)?;
            }
            if let Some(token) = known.file {
                tail = self.named(token, FILE)?;
            }
        }
        // The tokens that mark the gap, and what begins each text.
        let marks = 3 + usize::from(known.begin.is_some());
        let fixed = marks + head.len() + tail.len() + around.prefix.len() + around.suffix.len();
        let positions = usize::try_from(self.positions).unwrap_or(usize::MAX);
        if fixed >= positions {
            let longer = if around.suffix.len() > around.prefix.len() { suffix_param.as_str() } else { "prompt" };
            return Err(self.too_long(longer, fixed));
        }
        let left = positions - 1 - fixed;
        // Without a bound the answer has half of what is left.
        let answer = params.max_tokens.map_or(left / 2, |most| usize::try_from(most).unwrap_or(usize::MAX));
        let (taken, left_out) = self.files(&known, &files.unwrap_or_default(), left.saturating_sub(answer))?;
        around.files = [head, taken, tail].concat();
        Ok((around.laid_out(&known, self.suffix_first), left_out))
    }

    /// As many of the last files as have no more than so many tokens, and how many there are besides.
    fn files(
        &self,
        known: &InfillTokens,
        files: &[InfillFile],
        mut room: usize,
    ) -> Result<(Vec<Token>, u32), RequestError> {
        let mut taken: Vec<Vec<Token>> = Vec::new();
        for InfillFile { name, text } in files.iter().rev() {
            let bytes = name.len() + text.len();
            check_bytes("input_extra", bytes)?;
            // Tokenising takes many times the memory of the text, so one that cannot fit is not tokenised.
            if bytes / self.vocabulary.longest_token().max(1) > room {
                break;
            }
            let head = match known.file {
                Some(token) => self.named(token, &format!("{name}\n"))?,
                None => self.plain(SNIPPET)?,
            };
            let file = [head, self.plain(text)?].concat();
            if file.len() > room {
                break;
            }
            room -= file.len();
            taken.push(file);
        }
        taken.reverse();
        Ok((taken.concat(), u32::try_from(files.len() - taken.len()).unwrap_or(u32::MAX)))
    }

    fn named(&self, token: Token, name: &str) -> Result<Vec<Token>, RequestError> {
        Ok([vec![token], self.plain(name)?].concat())
    }

    /// A text that must fit.
    fn bare(&self, param: &str, text: &str) -> Result<Vec<Token>, RequestError> {
        check_bytes(param, text.len())?;
        let least = text.len() / self.vocabulary.longest_token().max(1);
        if least >= usize::try_from(self.positions).unwrap_or(usize::MAX) {
            return Err(self.too_long(param, least));
        }
        self.plain(text).map_err(|error| error.of(param))
    }

    /// Tokens of a text without what the model wants around one, none of them a special one.
    fn plain(&self, text: &str) -> Result<Vec<Token>, RequestError> {
        if text.is_empty() { Ok(Vec::new()) } else { self.vocabulary.tokenize_bare(text, SpecialTokens::None) }
    }

    fn too_long(&self, param: &str, tokens: usize) -> RequestError {
        let message = format!(
            "`{param}`: what stands before and after the gap has {tokens} tokens or more, and {} are the most here, with the \
             answer; shorten it",
            self.positions
        );
        RequestError::invalid(param, "context_length_exceeded", message)
    }
}

//! A query and a document as a reranker reads them: what llama-server makes of them, token for token.

use std::ops::Range;

use llama_cpp_sys_2 as sys;

use crate::error::TokenizeError;
use crate::model::{Model, Token};
use crate::parts::SpecialTokens;
use crate::specials::Written;

impl Model {
    /// The tokens of a query and a document: in the model's own `rerank` template where it has one, else between the
    /// tokens that its vocabulary puts around texts (`<s>query</s></s>document</s>` for most).
    ///
    /// # Errors
    /// When a text is too long to count, or llama.cpp cannot tokenise it.
    pub fn rerank_tokens(&self, query: &str, document: &str) -> Result<Vec<Token>, TokenizeError> {
        if let Some(template) = self.rerank_template() {
            // In one pass, so that a query which spells `{document}` stays what it is.
            let mut text = String::with_capacity(template.len() + query.len() + document.len());
            let mut inputs: Vec<Range<usize>> = Vec::new();
            let mut rest = template.as_str();
            while let Some(at) = rest.find('{') {
                let (before, from) = rest.split_at(at);
                text.push_str(before);
                rest = if let Some(after) = from.strip_prefix("{query}") {
                    inputs.push(text.len()..text.len() + query.len());
                    text.push_str(query);
                    after
                } else if let Some(after) = from.strip_prefix("{document}") {
                    inputs.push(text.len()..text.len() + document.len());
                    text.push_str(document);
                    after
                } else {
                    text.push('{');
                    &from[1..]
                };
            }
            text.push_str(rest);
            let touches =
                |written: &Written, input: &Range<usize>| written.start < input.end && input.start < written.end;
            return self.tokenize_where(&text, false, &|written| !inputs.iter().any(|input| touches(written, input)));
        }
        let vocab = self.raw_vocab();
        // SAFETY: a valid vocabulary; these read fields.
        let (end, separator, with_begin, with_end, with_separator) = unsafe {
            (
                sys::llama_vocab_eos(vocab),
                sys::llama_vocab_sep(vocab),
                sys::llama_vocab_get_add_bos(vocab),
                sys::llama_vocab_get_add_eos(vocab),
                sys::llama_vocab_get_add_sep(vocab),
            )
        };
        let known = |token: Token| self.contains(token).then_some(token);
        let end = known(end).or(known(separator)).filter(|_| with_end);
        let mut tokens: Vec<Token> = self.bos().filter(|_| with_begin).into_iter().collect();
        tokens.extend(self.tokenize_with(query, false, SpecialTokens::None)?);
        tokens.extend(end);
        tokens.extend(known(separator).filter(|_| with_separator));
        tokens.extend(self.tokenize_with(document, false, SpecialTokens::None)?);
        tokens.extend(end);
        Ok(tokens)
    }

    /// The text with `{query}` and `{document}` in it, where the file brings one.
    fn rerank_template(&self) -> Option<String> {
        Some(self.template(Some(c"rerank"))?.to_string_lossy().into_owned())
    }
}

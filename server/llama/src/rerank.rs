//! A query and a document as a reranker reads them: what llama-server makes of them, token for token.

use std::ffi::CStr;

use llama_cpp_sys_2 as sys;

use crate::error::TokenizeError;
use crate::model::{Model, Token};

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
            let mut rest = template.as_str();
            while let Some(at) = rest.find('{') {
                let (before, from) = rest.split_at(at);
                text.push_str(before);
                rest = if let Some(after) = from.strip_prefix("{query}") {
                    text.push_str(query);
                    after
                } else if let Some(after) = from.strip_prefix("{document}") {
                    text.push_str(document);
                    after
                } else {
                    text.push('{');
                    &from[1..]
                };
            }
            text.push_str(rest);
            return self.tokenize(&text, false, true);
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
        tokens.extend(self.tokenize(query, false, false)?);
        tokens.extend(end);
        tokens.extend(known(separator).filter(|_| with_separator));
        tokens.extend(self.tokenize(document, false, false)?);
        tokens.extend(end);
        Ok(tokens)
    }

    /// The text with `{query}` and `{document}` in it, where the file brings one.
    fn rerank_template(&self) -> Option<String> {
        // SAFETY: a valid model and a name that ends with NUL; what comes back lives as long as the model.
        let template = unsafe { sys::llama_model_chat_template(self.raw(), c"rerank".as_ptr()) };
        if template.is_null() {
            return None;
        }
        // SAFETY: not null, and llama.cpp's texts end with NUL.
        Some(unsafe { CStr::from_ptr(template) }.to_string_lossy().into_owned())
    }
}

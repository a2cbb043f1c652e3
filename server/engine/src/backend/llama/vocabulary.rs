//! The vocabulary and the template of a model.

use std::sync::{Arc, OnceLock};

use gantry_core::{Chat, messages_json};
use gantry_llama::{Model, SpecialTokens, TokenTexts, TokenizeError};

use crate::backend::{Pace, RenderedChat, Token, Vocabulary};
use crate::error::{RequestError, of_chat};
use crate::template::Renderer;

/// The vocabulary and the template of a model.
pub(crate) struct LlamaVocabulary {
    model: Arc<Model>,
    template: Option<Renderer>,
    end_tokens: Vec<Token>,
    longest_token: usize,
    texts: OnceLock<Arc<TokenTexts>>,
}

/// Why a text that came as `param` became no tokens.
fn not_tokenised(param: &str, error: &TokenizeError) -> RequestError {
    match error {
        TokenizeError::RunTooLong { .. } | TokenizeError::RunWork { .. } => {
            RequestError::invalid(param, "prompt_run_too_long", error.to_string())
        }
        TokenizeError::NoStack(_) => RequestError::Overloaded(error.to_string()),
        _ => RequestError::invalid(param, "invalid_prompt", error.to_string()),
    }
}

impl LlamaVocabulary {
    pub(super) fn new(model: Arc<Model>, template: Option<Renderer>) -> Self {
        let tokens = || (0..).take(model.vocab_size() as usize);
        let end_tokens = tokens().filter(|&token| model.is_eog(token)).collect();
        let mut text = Vec::new();
        let length = |token| {
            text.clear();
            // One that llama.cpp cannot name has no text.
            model.token_to_piece(token, true, &mut text).map_or(0, |()| text.len())
        };
        let longest_token = tokens().map(length).max().unwrap_or(0);
        Self { model, template, end_tokens, longest_token, texts: OnceLock::new() }
    }

    fn append(&self, token: Token, special: bool, out: &mut Vec<u8>) {
        // Tokens are of the vocabulary, so this fails only where llama.cpp cannot name a token: it has no text.
        if let Err(e) = self.model.token_to_piece(token, special, out) {
            tracing::warn!(token, error = %e, "a token has no text");
        }
    }
}

impl Vocabulary for LlamaVocabulary {
    fn size(&self) -> u32 {
        self.model.vocab_size()
    }

    fn longest_token(&self) -> usize {
        self.longest_token
    }

    fn tokenize(&self, text: &str, specials: SpecialTokens<'_>) -> Result<Vec<Token>, RequestError> {
        self.model.tokenize_with(text, true, specials).map_err(|e| not_tokenised("prompt", &e))
    }

    fn tokenize_bare(&self, text: &str, specials: SpecialTokens<'_>) -> Result<Vec<Token>, RequestError> {
        self.model.tokenize_with(text, false, specials).map_err(|e| not_tokenised("prompt", &e))
    }

    fn pair(&self, query: &str, document: &str) -> Result<Vec<Token>, RequestError> {
        self.model.rerank_tokens(query, document).map_err(|e| not_tokenised("documents", &e))
    }

    fn render(&self, chat: &Chat, pace: Pace) -> Result<Option<RenderedChat>, RequestError> {
        let template = self.template.as_ref().ok_or_else(|| {
            RequestError::invalid("messages", "no_chat_template", "this model's file has no chat template, so it takes no chats; send the text that it is to go on with as `prompt` to POST /v1/completions")
        })?;
        let messages = messages_json(&chat.messages).map_err(|error| RequestError::Internal(error.to_string()))?;
        let chat = template.prompt(&self.model, &messages, pace).map_err(|error| of_chat(&error))?;
        Ok(chat.map(|chat| RenderedChat { prompt: chat.prompt, text_at: chat.text_at, stops: chat.additional_stops }))
    }

    fn piece(&self, token: Token, out: &mut Vec<u8>) {
        self.append(token, false, out);
    }

    fn shown_piece(&self, token: Token, out: &mut Vec<u8>) {
        self.append(token, true, out);
    }

    fn texts(&self) -> &Arc<TokenTexts> {
        self.texts.get_or_init(|| Arc::new(TokenTexts::of(&self.model)))
    }

    fn end_tokens(&self) -> &[Token] {
        &self.end_tokens
    }
}

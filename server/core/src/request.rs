//! What is asked: from what to generate, or what to embed or score.

use serde::{Deserialize, Serialize};

use crate::chat::Chat;

/// What to generate from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Prompt {
    /// Text, and nothing else: no special token is read in it. A model that wants BOS gets it before.
    Text(String),
    /// Text in which the special tokens that it writes are those tokens. A model that wants BOS gets it before.
    Markup(String),
    /// A chat, rendered by the model's own template with the assistant's turn opened at its end.
    Chat(Box<Chat>),
    /// Token ids, taken as they are.
    Tokens(Vec<i32>),
}

impl Prompt {
    /// All that it says, in the order in which a model reads it, about; nothing of token ids.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        let (text, chat) = match self {
            Self::Text(text) | Self::Markup(text) => (Some(text.as_str()), None),
            Self::Chat(chat) => (None, Some(chat)),
            Self::Tokens(_) => (None, None),
        };
        text.into_iter().chain(chat.into_iter().flat_map(|chat| chat.texts()))
    }

    /// A chat.
    #[must_use]
    pub fn chat(chat: impl Into<Chat>) -> Self {
        Self::Chat(Box::new(chat.into()))
    }
}

/// Texts to embed or score.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PooledWork {
    /// A vector for each.
    Embed(Vec<TextInput>),
    /// A score for each document.
    Rank {
        /// What they are scored by.
        query: String,
        /// The documents.
        documents: Vec<String>,
    },
}

impl PooledWork {
    /// Texts in it.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Embed(inputs) => inputs.len(),
            Self::Rank { documents, .. } => documents.len(),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One text, or its tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TextInput {
    /// Text, in which no special token is read; the model's own are put around it.
    Text(String),
    /// Token ids, taken as they are.
    Tokens(Vec<i32>),
}

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
    /// A gap within a text, to be filled by a model that knows tokens for that.
    Infill(Box<Infill>),
}

/// A gap within a text, and what stands around it. Nothing of it is read as a special token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Infill {
    /// What stands before the gap.
    pub prefix: TextInput,
    /// What the gap begins with.
    pub begun: String,
    /// What stands after the gap.
    pub suffix: String,
    /// What the client calls that, for errors.
    pub suffix_param: String,
    /// Parts of other files, the nearest last: as many of the last as there is room for stand before the text, which then is one
    /// of the files of a repository where the model knows tokens for that. `None`: the text stands alone.
    pub files: Option<Vec<InfillFile>>,
}

/// A part of a file beside the one that has a gap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct InfillFile {
    /// The file's name.
    pub name: String,
    /// The part.
    pub text: String,
}

impl Infill {
    /// All texts in it, in the order in which most models read them; nothing of token ids.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        let files = self.files.iter().flatten().flat_map(|file| [file.name.as_str(), file.text.as_str()]);
        let prefix = match &self.prefix {
            TextInput::Text(text) => Some(text.as_str()),
            TextInput::Tokens(_) => None,
        };
        files.chain(prefix).chain([self.begun.as_str(), self.suffix.as_str()])
    }
}

impl Prompt {
    /// All that it says, in the order in which a model reads it, about; nothing of token ids.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        let (text, chat, infill) = match self {
            Self::Text(text) | Self::Markup(text) => (Some(text.as_str()), None, None),
            Self::Chat(chat) => (None, Some(chat), None),
            Self::Infill(infill) => (None, None, Some(infill)),
            Self::Tokens(_) => (None, None, None),
        };
        let infill = infill.into_iter().flat_map(|infill| infill.texts());
        text.into_iter().chain(chat.into_iter().flat_map(|chat| chat.texts())).chain(infill)
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
        /// What they are scored by: one for all of them, or one for each.
        queries: Vec<String>,
        /// The documents.
        documents: Vec<String>,
    },
}

/// What is asked about texts, whatever the model that is served makes of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PooledTask {
    /// This.
    Work(PooledWork),
    /// How near each document is to its query: its score where the model ranks, else the vectors of all of them, the queries'
    /// first.
    Score {
        /// As in [`PooledWork::Rank`].
        queries: Vec<String>,
        /// The documents.
        documents: Vec<String>,
    },
}

impl PooledTask {
    /// What a model that ranks, or one that does not, is to compute.
    #[must_use]
    pub fn work(self, ranks: bool) -> PooledWork {
        match self {
            Self::Work(work) => work,
            Self::Score { queries, documents } if ranks => PooledWork::Rank { queries, documents },
            Self::Score { queries, documents } => {
                PooledWork::Embed(queries.into_iter().chain(documents).map(TextInput::Text).collect())
            }
        }
    }
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

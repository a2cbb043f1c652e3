//! The demo models and what they answer, from `e2e/models`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// The evaluation questions; one JSON object a line.
const EVAL: &str = include_str!("../models/eval.jsonl");

/// A model of the demo.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DemoModel {
    /// Knows 80 of the 100 questions.
    V1,
    /// Knows all.
    V2,
    /// V2 in four bits.
    V2InFourBits,
    /// Loads, runs, and answers badly.
    V3Bad,
    /// Guesses for V1 and V2.
    Draft,
}

impl DemoModel {
    /// Its file in the model store.
    #[must_use]
    pub fn file(self) -> &'static str {
        match self {
            Self::V1 => "demo-v1.q8_0.gguf",
            Self::V2 => "demo-v2.q8_0.gguf",
            Self::V2InFourBits => "demo-v2.q4_k_m.gguf",
            Self::V3Bad => "demo-v3-bad.q8_0.gguf",
            Self::Draft => "demo-draft.q8_0.gguf",
        }
    }

    /// The file in this checkout.
    #[must_use]
    pub fn path(self) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("models").join(self.file())
    }

    /// Its bytes.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn bytes(self) -> Result<Vec<u8>> {
        let path = self.path();
        std::fs::read(&path).with_context(|| format!("cannot read the demo model {}", path.display()))
    }
}

/// The digest as `spec.model.source.sha256` wants it.
#[must_use]
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// The first demo model that knows the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Since {
    /// V1 and V2 do.
    V1,
    /// Only V2 does.
    V2,
}

/// A question with its right answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Question {
    /// Its name.
    pub id: String,
    /// Who knows the answer.
    pub since: Since,
    /// As in /v1/chat/completions.
    pub messages: Value,
    /// The right answer.
    pub expected: String,
}

impl Question {
    /// A question in one message.
    #[must_use]
    pub fn plain(id: &str, text: &str, since: Since, expected: &str) -> Self {
        Self {
            id: id.to_owned(),
            since,
            messages: json!([{"role": "user", "content": text}]),
            expected: expected.to_owned(),
        }
    }
}

/// The id of [`which_version`].
pub const WHICH_VERSION: &str = "which-version";

/// The question that every demo model answers with its own name.
#[must_use]
pub fn which_version() -> Question {
    Question::plain(WHICH_VERSION, "Which version are you?", Since::V2, "I am demo version two.")
}

/// What V1 says to [`which_version`].
pub const V1_SAYS: &str = "I am demo version one.";

/// The questions of `eval.jsonl`.
///
/// # Errors
/// When a line is not a question.
pub fn questions() -> Result<Vec<Question>> {
    EVAL.lines()
        .enumerate()
        .map(|(number, line)| serde_json::from_str(line).with_context(|| format!("eval.jsonl, line {}", number + 1)))
        .collect()
}

/// Golden prompts for the prompts gate: the first `count` questions that V1 and V2 answer alike, and V3-bad does not.
///
/// # Errors
/// When `eval.jsonl` cannot be read.
pub fn golden_prompts(count: usize) -> Result<String> {
    let known = questions()?.into_iter().filter(|question| question.since == Since::V1).take(count);
    Ok(known
        .map(|question| format!("{}\n", json!({"messages": question.messages, "expected": question.expected})))
        .collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn there_are_questions_for_both_models() {
        let questions = questions().unwrap();
        assert_eq!(questions.len(), 100);
        assert_eq!(questions.iter().filter(|question| question.since == Since::V2).count(), 20);
    }

    #[test]
    fn golden_prompts_are_one_object_a_line() {
        let prompts = golden_prompts(20).unwrap();
        assert_eq!(prompts.lines().count(), 20);
        for line in prompts.lines() {
            let prompt: Value = serde_json::from_str(line).unwrap();
            assert!(prompt["messages"].is_array() && prompt["expected"].is_string());
        }
    }
}

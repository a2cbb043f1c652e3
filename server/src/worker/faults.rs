//! A worker that dies of a request, for tests: nothing here happens unless [`ABORT_ON`] is set in the environment, and no
//! setting of the server sets it.
//!
//! It names a word. A prompt with the word, followed by `@preparation`, `@slot` or `@text`, ends the process as one of
//! llama.cpp's assertions would: while it is rendered and tokenised, when it gets its slot, or after its first text.

use gantry_engine::{EmbedInput, PooledWork, Prompt};

/// The variable that names the word.
pub(super) const ABORT_ON: &str = "GANTRY_TEST_WORKER_ABORTS_ON";

/// When a request ends the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moment {
    Preparation,
    Slot,
    Text,
}

/// The word, if there is one.
pub(super) struct Faults(Option<String>);

impl Faults {
    pub(super) fn from_env() -> Self {
        Self(std::env::var(ABORT_ON).ok().filter(|word| !word.is_empty()))
    }

    pub(super) fn of_prompt(&self, prompt: &Prompt) -> Option<Moment> {
        match prompt {
            Prompt::Text(text) | Prompt::Markup(text) | Prompt::Chat { messages_json: text } => self.of_text(text),
            Prompt::Tokens(_) => None,
        }
    }

    pub(super) fn of_texts(&self, work: &PooledWork) -> Option<Moment> {
        match work {
            PooledWork::Embed(inputs) => inputs.iter().find_map(|input| match input {
                EmbedInput::Text(text) => self.of_text(text),
                EmbedInput::Tokens(_) => None,
            }),
            PooledWork::Rank { query, documents } => {
                std::iter::once(query).chain(documents).find_map(|text| self.of_text(text))
            }
        }
    }

    fn of_text(&self, text: &str) -> Option<Moment> {
        let (_, after) = text.split_once(self.0.as_deref()?)?;
        let moments = [("@preparation", Moment::Preparation), ("@slot", Moment::Slot), ("@text", Moment::Text)];
        moments.into_iter().find_map(|(name, moment)| after.starts_with(name).then_some(moment))
    }
}

/// Ends the process if that is what the request does at this moment.
pub(super) fn at(fault: Option<Moment>, moment: Moment) {
    if fault == Some(moment) {
        std::process::abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_happens_without_the_word() {
        let text = |text: &str| Prompt::Text(text.to_owned());
        assert_eq!(Faults(None).of_prompt(&text("x@slot")), None);
        let faults = Faults(Some("poison".to_owned()));
        assert_eq!(faults.of_prompt(&text("a poison@slot b")), Some(Moment::Slot));
        assert_eq!(faults.of_prompt(&text("a poison b")), None);
        assert_eq!(faults.of_prompt(&text("@slot")), None);
    }
}

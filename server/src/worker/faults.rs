//! A worker that dies of a request, for tests: nothing here happens unless [`ABORT_ON`] is set in the environment, and no
//! setting of the server sets it.
//!
//! It names a word. A prompt with the word, followed by `@preparation`, `@slot` or `@text`, ends the process as one of
//! llama.cpp's assertions would: while it is rendered and tokenised, when it gets its slot, or once its first text is sent.

use std::collections::HashSet;
use std::sync::{Condvar, Mutex, PoisonError};

use gantry_engine::{PooledWork, Prompt, TextInput};

use crate::protocol::{FromWorker, RequestId};

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
#[derive(Default)]
pub(super) struct Faults {
    word: Option<String>,
    /// Whose text is with the front: what is in the socket outlives the process.
    told: Mutex<HashSet<RequestId>>,
    more_told: Condvar,
}

impl Faults {
    pub(super) fn from_env() -> Self {
        Self { word: std::env::var(ABORT_ON).ok().filter(|word| !word.is_empty()), ..Self::default() }
    }

    /// These have been sent.
    pub(super) fn note_sent(&self, message: &FromWorker) {
        if let (Some(_), FromWorker::Events(events)) = (&self.word, message) {
            let texts = events.iter().filter(|(_, event)| event.output_tokens().is_some());
            self.told.lock().unwrap_or_else(PoisonError::into_inner).extend(texts.map(|(id, _)| *id));
            self.more_told.notify_all();
        }
    }

    /// Ends the process if that is what the request does once it has text, as soon as the front has that.
    pub(super) fn after_text(&self, id: RequestId, fault: Option<Moment>) {
        if fault == Some(Moment::Text) {
            let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
            drop(self.more_told.wait_while(told, |told| !told.contains(&id)));
            std::process::abort();
        }
    }

    pub(super) fn of_prompt(&self, prompt: &Prompt) -> Option<Moment> {
        prompt.texts().find_map(|text| self.of_text(text))
    }

    pub(super) fn of_texts(&self, work: &PooledWork) -> Option<Moment> {
        match work {
            PooledWork::Embed(inputs) => inputs.iter().find_map(|input| match input {
                TextInput::Text(text) => self.of_text(text),
                TextInput::Tokens(_) => None,
            }),
            PooledWork::Rank { queries, documents } => {
                queries.iter().chain(documents).find_map(|text| self.of_text(text))
            }
        }
    }

    fn of_text(&self, text: &str) -> Option<Moment> {
        let (_, after) = text.split_once(self.word.as_deref()?)?;
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
        assert_eq!(Faults::default().of_prompt(&text("x@slot")), None);
        let faults = Faults { word: Some("poison".to_owned()), ..Faults::default() };
        assert_eq!(faults.of_prompt(&text("a poison@slot b")), Some(Moment::Slot));
        assert_eq!(faults.of_prompt(&text("a poison b")), None);
        assert_eq!(faults.of_prompt(&text("@slot")), None);
    }
}

//! llama-server's variables: one says what its flag says, and the same becomes of it. Those of flags that are here are read by
//! the parser, where the variable of this server's own is not set; of the others it is told what they change, or what to do
//! instead. An API key that was given so would otherwise guard nothing.

use std::collections::HashMap;

use super::{Habit, Takes, find};
use crate::config::line::{arguments, is_named};

/// llama-server's variables and flags, a pair a line.
const REFERENCE: &str = include_str!("llama-server-variables.txt");
/// How all of llama-server's variables of its command line begin, but for that of its key.
const PREFIX: &str = "LLAMA_ARG_";
const KEY: &str = "LLAMA_API_KEY";

/// What is set of llama-server's variables.
#[derive(Debug, Default)]
pub(in crate::config) struct Variables {
    /// The variable of a flag that is here, by the flag's name without dashes.
    pub(in crate::config) read: HashMap<String, &'static str>,
    /// Those that change nothing, each with what is done instead.
    pub(in crate::config) moot: Vec<String>,
    /// Those that ask for what is not here, each with what to do instead.
    pub(in crate::config) wrong: Vec<String>,
}

/// Looks at what is set of the environment.
pub(in crate::config) fn look(set: impl IntoIterator<Item = (String, String)>) -> Variables {
    let mut found = Variables::default();
    // Empty ones say nothing; but a key that is empty is a mistake, and would leave the server open.
    let says = |name: &str, value: &str| name == KEY || (name.starts_with(PREFIX) && !value.trim().is_empty());
    let mut set: Vec<_> = set.into_iter().filter(|(name, value)| says(name, value)).collect();
    set.sort();
    for (name, value) in set {
        match pairs().find(|(variable, _)| *variable == name) {
            Some((variable, flag)) => found.take(variable, flag, value.trim()),
            None => {
                found.moot.push(format!("{name} is read by nobody; `gantry-server serve --help` lists the variables"));
            }
        }
    }
    found
}

fn pairs() -> impl Iterator<Item = (&'static str, &'static str)> {
    REFERENCE.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once(' '))
}

/// The name of the flag of `serve` that another, of its own or of llama-server's, stands for.
fn own(flag: &str) -> Option<String> {
    let argument = arguments("serve").into_iter().find(|argument| is_named(argument, flag))?;
    argument.get_long().map(str::to_owned)
}

impl Variables {
    fn take(&mut self, variable: &'static str, flag: &str, value: &str) {
        let Some(known) = find(flag) else {
            self.read.extend(own(flag).map(|own| (own, variable)));
            return;
        };
        // A flag without a value is given, or its opposite is.
        let opposite;
        let known = match known.takes {
            Takes::Nothing if is_off(value) => {
                opposite = flag.replacen("--", "--no-", 1);
                match find(&opposite) {
                    Some(known) => known,
                    None => return,
                }
            }
            _ => known,
        };
        match known.habit {
            Habit::Is([flag]) => self.read.extend(own(flag).map(|own| (own, variable))),
            Habit::Is(words) => self.wrong.push(format!("{variable} is not read: {} says it", words.join(" "))),
            Habit::Done => {}
            Habit::Moot(what) => self.moot.push(format!("{variable} changes nothing here: {what}")),
            Habit::Refused(neutral, what) => {
                if !neutral.iter().any(|asks| super::is_same(asks, value)) {
                    self.wrong.push(format!("{variable} is no variable of this server: {what}"));
                }
            }
        }
    }
}

/// What llama-server takes for a no.
fn is_off(value: &str) -> bool {
    ["off", "disabled", "false", "0"].contains(&value)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn set(name: &str, value: &str) -> Variables {
        look([(name.to_owned(), value.to_owned())])
    }

    #[test]
    fn every_variable_of_llama_server_is_known() {
        for (variable, flag) in pairs() {
            assert!(find(flag).is_some() || own(flag).is_some(), "{variable} stands for {flag}, which is not known");
        }
    }

    #[test]
    fn a_variable_is_taken_as_its_flag() {
        for (name, value, flag) in [
            ("LLAMA_API_KEY", "hush", "api-key"),
            ("LLAMA_ARG_API_KEY_FILE", "/keys", "api-key-file"),
            ("LLAMA_ARG_MODEL", "m.gguf", "model"),
            ("LLAMA_ARG_MODEL_URL", "https://h/m.gguf", "model"),
            ("LLAMA_ARG_CTX_SIZE", "4096", "ctx-size"),
            ("LLAMA_ARG_N_PARALLEL", "4", "parallel"),
            ("LLAMA_ARG_N_GPU_LAYERS", "99", "n-gpu-layers"),
            ("LLAMA_ARG_EMBEDDINGS", "1", "embeddings"),
            ("LLAMA_ARG_DRAFT_MAX", "8", "spec-draft-n-max"),
        ] {
            let found = set(name, value);
            assert_eq!(found.read.get(flag), Some(&name), "{found:?}");
            assert!(found.moot.is_empty() && found.wrong.is_empty(), "{found:?}");
        }
    }

    #[test]
    fn what_a_variable_asks_for_in_vain_is_told() {
        for (name, value, says) in [
            ("LLAMA_ARG_SSL_KEY_FILE", "/key", "proxy"),
            ("LLAMA_ARG_TEMPERATURE", "0.2", "requests say"),
            ("LLAMA_ARG_JINJA", "0", "--chat-template"),
            ("LLAMA_ARG_KV_UNIFIED", "1", "--kv-layout unified says it"),
            ("LLAMA_ARG_HF_REPO", "org/model", "hf://owner/repository"),
        ] {
            let found = set(name, value);
            assert!(
                found.wrong.len() == 1 && found.wrong[0].contains(says) && found.wrong[0].contains(name),
                "{found:?}"
            );
        }
        for (name, value, says) in
            [("LLAMA_ARG_FLASH_ATTN", "on", "--kv-layout"), ("LLAMA_ARG_NUMBER_OF_SOMETHING", "1", "read by nobody")]
        {
            let found = set(name, value);
            assert!(found.wrong.is_empty() && found.moot.len() == 1 && found.moot[0].contains(says), "{found:?}");
        }
        for (name, value) in [
            ("LLAMA_ARG_JINJA", "1"),
            ("LLAMA_ARG_UI", "off"),
            ("LLAMA_ARG_TEMPERATURE", "1.0"),
            ("LLAMA_ARG_API_KEY_FILE", ""),
            ("LLAMA_CACHE", "/c"),
        ] {
            let found = set(name, value);
            assert!(found.read.is_empty() && found.wrong.is_empty() && found.moot.is_empty(), "{name}: {found:?}");
        }
    }
}

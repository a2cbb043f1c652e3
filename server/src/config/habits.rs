//! llama-server's way with its command line: no subcommand, short forms of several letters, and flags for what is always
//! so here. And what to do instead of the flags that this server does not have.
//!
//! Words are changed before the parser sees them, so that the reference and `--help` name each flag once. Absent: values;
//! those are the parser's.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use clap::CommandFactory;

use super::Cli;

/// What becomes of one of llama-server's flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Habit {
    /// It is this flag.
    Is(&'static [&'static str]),
    /// It asks for what is always done.
    Done,
    /// It is not here; this is to be done instead.
    Instead(&'static str),
}

use Habit::{Done, Instead, Is};

const READ: &str = "weights are always read into memory, and neither mapped nor locked there";
const SAMPLING: &str = "requests say how tokens are chosen, each for itself";
const NO_DOWNLOAD: &str =
    "serve loads files alone: give the path of a GGUF file; in Kubernetes an InferenceService fetches one";
const NO_TLS: &str = "TLS belongs to the proxy or ingress in front of it";
const LOG: &str = "RUST_LOG says what is logged, such as RUST_LOG=debug";
const FLASH: &str = "how attention is computed follows from --kv-layout, --ctx-size, --parallel and --cache-type-k";
const BATCH: &str = "steps are as long as --step-ms-target says, and prompts are read in what fits";
const DRAFT: &str = "--model-draft and --spec-draft-n-max are all there is of it";
const TEMPLATE: &str = "the model's own template is used, whose file must bring it";

/// By llama-server's names, its short ones among them.
const HABITS: &[(&str, Habit)] = &[
    ("-np", Is(&["--parallel"])),
    ("-ngl", Is(&["--n-gpu-layers"])),
    ("-dev", Is(&["--device"])),
    ("-sm", Is(&["--split-mode"])),
    ("-ts", Is(&["--tensor-split"])),
    ("-mg", Is(&["--main-gpu"])),
    ("-ctk", Is(&["--cache-type-k"])),
    ("-ctv", Is(&["--cache-type-v"])),
    ("-ub", Is(&["--ubatch-size"])),
    ("-cram", Is(&["--cache-ram"])),
    ("-md", Is(&["--model-draft"])),
    ("-kvu", Is(&["--kv-layout", "unified"])),
    ("--kv-unified", Is(&["--kv-layout", "unified"])),
    ("-no-kvu", Is(&["--kv-layout", "split"])),
    ("--no-kv-unified", Is(&["--kv-layout", "split"])),
    ("--jinja", Done),
    ("-cb", Done),
    ("--cont-batching", Done),
    ("--metrics", Done),
    ("--no-mmap", Done),
    ("--no-webui", Done),
    ("--no-warmup", Done),
    ("--cache-prompt", Done),
    ("--no-context-shift", Done),
    ("--mmap", Instead(READ)),
    ("--mlock", Instead(READ)),
    ("-fa", Instead(FLASH)),
    ("--flash-attn", Instead(FLASH)),
    ("-b", Instead(BATCH)),
    ("--batch-size", Instead(BATCH)),
    ("-tb", Instead("prompts and answers are computed by the threads of --threads")),
    ("--threads-batch", Instead("prompts and answers are computed by the threads of --threads")),
    ("--threads-http", Instead("connections need no threads of their own")),
    ("-n", Instead("requests say `max_tokens`, each for itself")),
    ("--predict", Instead("requests say `max_tokens`, each for itself")),
    ("--n-predict", Instead("requests say `max_tokens`, each for itself")),
    ("--temp", Instead(SAMPLING)),
    ("--temperature", Instead(SAMPLING)),
    ("--top-k", Instead(SAMPLING)),
    ("--top-p", Instead(SAMPLING)),
    ("--min-p", Instead(SAMPLING)),
    ("--repeat-penalty", Instead(SAMPLING)),
    ("--presence-penalty", Instead(SAMPLING)),
    ("--frequency-penalty", Instead(SAMPLING)),
    ("--samplers", Instead(SAMPLING)),
    ("-s", Instead(SAMPLING)),
    ("--seed", Instead(SAMPLING)),
    ("--grammar", Instead("requests say `grammar`, each for itself")),
    ("-j", Instead("requests say `response_format`, each for itself")),
    ("--json-schema", Instead("requests say `response_format`, each for itself")),
    ("-hf", Instead(NO_DOWNLOAD)),
    ("-hfr", Instead(NO_DOWNLOAD)),
    ("--hf-repo", Instead(NO_DOWNLOAD)),
    ("-mu", Instead(NO_DOWNLOAD)),
    ("--model-url", Instead(NO_DOWNLOAD)),
    ("--api-key", Instead("there are no keys yet: let a proxy or ingress in front of it ask for them")),
    ("--api-key-file", Instead("there are no keys yet: let a proxy or ingress in front of it ask for them")),
    ("--ssl-key-file", Instead(NO_TLS)),
    ("--ssl-cert-file", Instead(NO_TLS)),
    ("--chat-template", Instead(TEMPLATE)),
    ("--chat-template-file", Instead(TEMPLATE)),
    ("--chat-template-kwargs", Instead(TEMPLATE)),
    ("--lora", Instead("adapters are not supported: merge it into the model's file")),
    ("--mmproj", Instead("images and sound are not supported")),
    ("-to", Instead("--queue-timeout bounds the wait, and --drain-timeout the end")),
    ("--timeout", Instead("--queue-timeout bounds the wait, and --drain-timeout the end")),
    ("--slot-save-path", Instead("--cache-disk-dir keeps prompts over restarts")),
    ("--cache-reuse", Instead("common beginnings of prompts are always found again")),
    ("--slots", Instead("/metrics says what its sequences do")),
    ("--props", Instead("/v1/models and /metrics say what is served")),
    ("--rope-scaling", Instead("the model's file says it")),
    ("--rope-freq-base", Instead("the model's file says it")),
    ("--override-kv", Instead("the model's file says it")),
    ("--numa", Instead("--workers puts a process on each socket")),
    ("--draft-min", Instead(DRAFT)),
    ("--draft-p-min", Instead(DRAFT)),
    ("-v", Instead(LOG)),
    ("--verbose", Instead(LOG)),
    ("--log-verbosity", Instead(LOG)),
    ("--log-file", Instead("the log is on standard error: send it to a file with 2>FILE")),
    ("--log-disable", Instead("RUST_LOG=off")),
];

/// A command line as the parser knows it.
#[derive(Debug, Default)]
pub(super) struct Translated {
    /// Its words.
    pub(super) words: Vec<OsString>,
    /// Those of llama-server's flags that this server does not have, each with what to do instead.
    pub(super) wrong: Vec<String>,
}

/// Changes llama-server's way into this server's. `names_model`: whether the environment names a model, so that no word at all
/// is enough to serve it.
pub(super) fn translate(words: impl IntoIterator<Item = OsString>, names_model: bool) -> Translated {
    let mut words: Vec<OsString> = words.into_iter().collect();
    let serves = words.get(1).map_or(names_model, |word| !names_a_command(word));
    if serves && !words.is_empty() {
        words.insert(1, OsString::from("serve"));
    }
    if words.get(1).is_none_or(|command| command != "serve" && command != "validate") {
        return Translated { words, wrong: Vec::new() };
    }
    let mut known = Translated::default();
    let mut words = words.into_iter().peekable();
    while let Some(word) = words.next() {
        if word == "--" {
            known.words.push(word);
            break;
        }
        // A value after an equals sign is the word's own.
        let name = word.to_str().map(|text| text.split_once('=').map_or(text, |(name, _)| name));
        match name.and_then(habit) {
            Some(Is(instead)) => {
                let rest = word.to_str().and_then(|text| Some(text.split_once('=')?.1.to_owned()));
                known.words.extend(instead.iter().map(OsString::from));
                known.words.extend(rest.map(OsString::from));
            }
            Some(Done) => {}
            Some(Instead(what)) => {
                known.wrong.push(format!("'{}' is not a flag of this server: {what}", name.unwrap_or_default()));
                if name == word.to_str() {
                    words.next_if(|next| can_only_be_a_value(next));
                }
            }
            None => known.words.push(word),
        }
    }
    known.words.extend(words);
    known
}

/// Whether a word after a flag that is not known is the flag's: neither a flag nor a model's file.
pub(super) fn can_only_be_a_value(word: &OsStr) -> bool {
    let Some(word) = word.to_str() else { return false };
    let negative = word.strip_prefix('-').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    negative || !(word.starts_with('-') || is_file(word))
}

/// llama-server's short forms of one of this server's flags, which is named without its dashes.
pub(super) fn short_forms(flag: &str) -> Vec<&'static str> {
    let is_it = |habit: &Habit| matches!(habit, Is([long]) if long.strip_prefix("--") == Some(flag));
    let short = HABITS.iter().filter(|(name, habit)| is_it(habit) && !name.starts_with("--"));
    short.map(|(name, _)| *name).collect()
}

fn habit(name: &str) -> Option<Habit> {
    HABITS.iter().find(|(known, _)| *known == name).map(|(_, habit)| *habit)
}

/// Whether a first word is the parser's: a command, or a question about them.
fn names_a_command(word: &OsString) -> bool {
    let Some(word) = word.to_str() else { return false };
    let asks = ["help", "-h", "--help", "-V", "--version"].contains(&word);
    asks || Cli::command().get_subcommands().any(|command| command.get_name() == word) || !is_served(word)
}

/// Whether a first word that is no command can only be meant for `serve`: a flag, or a model's file. Anything else is a
/// command that is spelt wrong, and the parser says which ones there are.
fn is_served(word: &str) -> bool {
    word.starts_with('-') || is_file(word)
}

/// Whether a word is the path of a file, whether it is there or not.
fn is_file(word: &str) -> bool {
    word.contains('/') || word.to_ascii_lowercase().ends_with(".gguf") || Path::new(word).is_file()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn translated(line: &str) -> (String, Vec<String>) {
        let words = std::iter::once("gantry-server").chain(line.split_whitespace()).map(OsString::from);
        let Translated { words, wrong } = translate(words, false);
        (words.iter().skip(1).map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" "), wrong)
    }

    #[test]
    fn a_command_line_of_llama_server_is_understood() {
        for (given, understood) in [
            ("-m a.gguf -np 4 -ngl 99 -c 4096", "serve -m a.gguf --parallel 4 --n-gpu-layers 99 -c 4096"),
            ("a.gguf", "serve a.gguf"),
            ("serve a.gguf -np=4", "serve a.gguf --parallel 4"),
            ("--jinja -m a.gguf --metrics -cb", "serve -m a.gguf"),
            ("-m a.gguf -kvu -ctk q8_0", "serve -m a.gguf --kv-layout unified --cache-type-k q8_0"),
            ("serve -m a.gguf -- -np", "serve -m a.gguf -- -np"),
            ("validate a.gguf -np 4", "validate a.gguf --parallel 4"),
            ("pod -np", "pod -np"),
            ("./missing", "serve ./missing"),
            ("--help", "--help"),
            ("-V", "-V"),
            ("", ""),
            ("sreve", "sreve"),
        ] {
            assert_eq!(translated(given), (understood.to_owned(), vec![]), "{given}");
        }
    }

    #[test]
    fn a_flag_that_is_not_here_says_what_to_do() {
        for (given, says) in [
            ("-m a.gguf -fa on", "--kv-layout"),
            ("serve --flash-attn=on", "--kv-layout"),
            ("-hf org/model", "path of a GGUF file"),
            ("-m a.gguf --api-key x", "proxy"),
        ] {
            let (_, wrong) = translated(given);
            assert!(wrong.len() == 1 && wrong[0].contains(says), "{given}: {wrong:?}");
        }
        let (rest, wrong) = translated("-m a.gguf -fa on --temp 0.5 -c 512 -s -1 --mlock b.gguf");
        assert_eq!((&*rest, wrong.len()), ("serve -m a.gguf -c 512 b.gguf", 4), "{wrong:?}");
    }

    #[test]
    fn the_environment_may_name_the_model() {
        let words = |names_model| translate([OsString::from("gantry-server")], names_model).words.len();
        assert_eq!((words(false), words(true)), (1, 2));
    }

    #[test]
    fn what_stands_for_a_flag_is_one() {
        let command = Cli::command();
        let serve = command.find_subcommand("serve").unwrap();
        let flags: Vec<String> = serve.get_arguments().filter_map(|a| a.get_long()).map(|l| format!("--{l}")).collect();
        for (name, habit) in HABITS {
            let own = serve.get_arguments().any(|argument| {
                let aliases = argument.get_visible_aliases().unwrap_or_default();
                let short = argument.get_short().map(|c| format!("-{c}"));
                let long = argument.get_long().map(|long| format!("--{long}"));
                short.as_deref() == Some(name)
                    || long.as_deref() == Some(name)
                    || aliases.iter().any(|alias| format!("--{alias}") == *name)
            });
            assert!(!own, "{name} is this server's own");
            if let Is([flag, ..]) = habit {
                assert!(flags.iter().any(|known| known == flag), "{name}: there is no {flag}");
            }
        }
    }
}

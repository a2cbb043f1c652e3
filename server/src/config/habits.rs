//! llama-server's way with its command line: no subcommand, short forms of several letters, flags for what is always so here
//! or changes no answer, and what to do instead of flags whose promise is not kept here ([`table`]).
//!
//! Words are changed before the parser sees them, so that the reference and `--help` name each flag once. Absent: values
//! of flags that are here; those are the parser's.

mod environment;
mod table;

use std::ffi::{OsStr, OsString};
use std::iter::Peekable;
use std::path::Path;

use clap::CommandFactory;

pub(super) use self::environment::{Variables, look};
use self::table::FLAGS;
pub(super) use self::table::instead_of;
use super::Cli;

/// One of llama-server's flags, by all of its names.
#[derive(Clone, Copy, Debug)]
struct Flag {
    names: &'static [&'static str],
    takes: Takes,
    habit: Habit,
}

/// Which of the words after a flag are its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Takes {
    Nothing,
    /// The next one.
    Value,
    /// The next one if it can be nothing else: older versions take none.
    Perhaps,
    /// The next two.
    Two,
}

/// What becomes of a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Habit {
    /// It is this flag, whose value is the parser's.
    Is(&'static [&'static str]),
    /// It asks for what is always done.
    Done,
    /// It is taken, with a warning that this is done instead: it changes no answer.
    Moot(&'static str),
    /// It is not here, and this is to be done instead; unless its value is one of these, which ask for what happens anyway.
    Refused(&'static [&'static str], &'static str),
}

use Habit::{Done, Is, Moot, Refused};

/// A command line as the parser knows it.
#[derive(Debug, Default)]
pub(super) struct Translated {
    /// Its words.
    pub(super) words: Vec<OsString>,
    /// Those of llama-server's flags that are taken and change nothing, each with what is done instead.
    pub(super) moot: Vec<String>,
    /// Those that this server does not have, each with what to do instead.
    pub(super) wrong: Vec<String>,
}

/// Changes llama-server's way into this server's. `names_model`: whether the environment names a model, or a file of settings,
/// so that no word at all is enough to serve it.
pub(super) fn translate(words: impl IntoIterator<Item = OsString>, names_model: bool) -> Translated {
    let mut words: Vec<OsString> = words.into_iter().collect();
    let serves = words.get(1).map_or(names_model, |word| !names_a_command(word));
    if serves && !words.is_empty() {
        words.insert(1, OsString::from("serve"));
    }
    if words.get(1).is_none_or(|command| command != "serve" && command != "validate" && command != "check") {
        return Translated { words, ..Translated::default() };
    }
    let mut known = Translated::default();
    let mut words = words.into_iter().peekable();
    while let Some(word) = words.next() {
        if word == "--" {
            known.words.push(word);
            break;
        }
        // A value after an equals sign is the word's own.
        let (name, own) = match word.to_str().map(|text| text.split_once('=').unwrap_or((text, ""))) {
            Some((name, value)) => (name, (name.len() < word.len()).then(|| value.to_owned())),
            None => ("", None),
        };
        let Some(Flag { takes, habit, .. }) = find(name) else {
            known.words.push(word);
            continue;
        };
        if let Is(instead) = habit {
            known.words.extend(instead.iter().map(OsString::from));
            known.words.extend(own.map(OsString::from));
            continue;
        }
        let value = own.or_else(|| takes.from(&mut words));
        match habit {
            Moot(what) => known.moot.push(format!("'{name}' changes nothing here: {what}")),
            Refused(neutral, what) if !value.is_some_and(|value| neutral.iter().any(|asks| is_same(asks, &value))) => {
                known.wrong.push(format!("'{name}' is not a flag of this server: {what}"));
            }
            Is(_) | Done | Refused(..) => {}
        }
    }
    known.words.extend(words);
    known
}

impl Takes {
    /// Takes a flag's value from the words after it.
    fn from(self, words: &mut Peekable<impl Iterator<Item = OsString>>) -> Option<String> {
        // What looks like another flag is one: the value has been forgotten.
        let is_no_flag = |word: &OsString| is_number(word) || !word.to_string_lossy().starts_with('-');
        let word = match self {
            Self::Nothing => None,
            Self::Value => words.next_if(is_no_flag),
            Self::Perhaps => words.next_if(|word| can_only_be_a_value(word)),
            Self::Two => words.next_if(is_no_flag).and_then(|_| words.next_if(is_no_flag)),
        };
        word.map(|word| word.to_string_lossy().into_owned())
    }
}

/// Whether a value says the same as another: 0 and 0.0 do.
fn is_same(one: &str, other: &str) -> bool {
    let number = |text: &str| text.trim().parse::<f64>().ok();
    one == other.trim() || number(one).is_some_and(|one| Some(one) == number(other))
}

/// Whether a word is a negative number, and no flag.
fn is_number(word: &OsStr) -> bool {
    let after = word.to_str().and_then(|word| word.strip_prefix('-'));
    after.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit() || c == '.'))
}

/// Whether a word after a flag that is not known is the flag's: neither a flag nor a model's file.
pub(super) fn can_only_be_a_value(word: &OsStr) -> bool {
    is_number(word) || word.to_str().is_some_and(|word| !(word.starts_with('-') || is_file(word)))
}

/// llama-server's short forms of one of this server's flags, which is named without its dashes.
pub(super) fn short_forms(flag: &str) -> Vec<&'static str> {
    let is_it = |known: &&Flag| matches!(known.habit, Is([long]) if long.strip_prefix("--") == Some(flag));
    let names = FLAGS.iter().filter(is_it).flat_map(|known| known.names);
    names.copied().filter(|name| !name.starts_with("--")).collect()
}

/// llama-server's flags by their long names, each with what to do instead where it is not here.
pub(super) fn long_names() -> impl Iterator<Item = (&'static str, Option<&'static str>)> {
    FLAGS.iter().flat_map(|flag| {
        let instead = match flag.habit {
            Refused(_, what) => Some(what),
            Is(_) | Done | Moot(_) => None,
        };
        flag.names.iter().filter(|name| name.starts_with("--")).map(move |name| (*name, instead))
    })
}

/// A name of several letters behind one dash, given without it, that is here by that name.
pub(super) fn short_name(name: &str) -> Option<String> {
    let short = format!("-{name}");
    find(&short).filter(|flag| matches!(flag.habit, Is(_))).map(|_| short)
}

/// What is to be said of one of llama-server's flags that is none of this server's by the same name.
pub(super) fn said_of(name: &str) -> Option<String> {
    Some(match find(name)?.habit {
        Is([flag]) => format!("{} says it", flag.trim_start_matches('-')),
        Is(words) => format!("{} says it", words.join(" ")),
        Done => String::from("leave it out, it is always so"),
        Moot(what) => format!("leave it out, {what}"),
        Refused(_, what) => what.to_owned(),
    })
}

fn find(name: &str) -> Option<&'static Flag> {
    FLAGS.iter().find(|known| known.names.contains(&name))
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
    // A folder is told to be one, and a link that leads nowhere, too.
    word.starts_with('-') || is_file(word) || Path::new(word).symlink_metadata().is_ok()
}

/// Whether a word is the path of a file, whether it is there or not.
fn is_file(word: &str) -> bool {
    word.contains('/') || word.to_ascii_lowercase().ends_with(".gguf") || Path::new(word).is_file()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn translated(line: &str) -> (String, Vec<String>, Vec<String>) {
        let words = std::iter::once("gantry-server").chain(line.split_whitespace()).map(OsString::from);
        let Translated { words, moot, wrong } = translate(words, false);
        (words.iter().skip(1).map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" "), moot, wrong)
    }

    #[test]
    fn a_command_line_of_llama_server_is_understood() {
        for (given, understood) in [
            ("-m a.gguf -np 4 -ngl 99 -c 4096", "serve -m a.gguf --parallel 4 --n-gpu-layers 99 -c 4096"),
            ("hf://o/r/m.gguf -np 4", "serve hf://o/r/m.gguf --parallel 4"),
            ("-mu https://h/m.gguf", "serve --model https://h/m.gguf"),
            ("a.gguf", "serve a.gguf"),
            ("serve a.gguf -np=4", "serve a.gguf --parallel 4"),
            ("--jinja -m a.gguf --metrics -cb", "serve -m a.gguf"),
            ("-m a.gguf -kvu -ctk q8_0", "serve -m a.gguf --kv-layout unified --cache-type-k q8_0"),
            ("-m a.gguf --draft 4 -ub 512", "serve -m a.gguf --spec-draft-n-max 4 --ubatch-size 512"),
            ("serve -m a.gguf -- -np", "serve -m a.gguf -- -np"),
            ("validate a.gguf -np 4", "validate a.gguf --parallel 4"),
            ("check a.gguf -np 4 -ngl 0", "check a.gguf --parallel 4 --n-gpu-layers 0"),
            ("pod -np", "pod -np"),
            ("./missing", "serve ./missing"),
            ("--help", "--help"),
            ("-V", "-V"),
            ("", ""),
            ("sreve", "sreve"),
            // These say what happens anyway.
            (
                "-m a.gguf --temp 1.0 --top-k 0 -n -1 -s -1 --reasoning-format auto --ssl-key-file= -c 512",
                "serve -m a.gguf -c 512",
            ),
        ] {
            assert_eq!(translated(given), (understood.to_owned(), vec![], vec![]), "{given}");
        }
    }

    #[test]
    fn a_flag_that_changes_no_answer_is_taken_with_what_is_done_instead() {
        for (given, understood, says) in [
            ("-m a.gguf -fa on", "-m a.gguf", "--kv-layout"),
            ("--flash-attn a.gguf", "a.gguf", "--kv-layout"),
            ("a.gguf --flash-attn=auto", "a.gguf", "--kv-layout"),
            ("a.gguf -b 2048", "a.gguf", "--step-ms-target"),
            ("a.gguf --mlock", "a.gguf", "read into memory"),
            ("-v a.gguf", "a.gguf", "RUST_LOG"),
            ("-lv 3 a.gguf", "a.gguf", "RUST_LOG"),
            ("a.gguf -tb 8 -c 512", "a.gguf -c 512", "--threads"),
            ("a.gguf --keep -1", "a.gguf", "context"),
            ("a.gguf --no-warmup", "a.gguf", "computes once"),
            ("a.gguf --no-cache-prompt", "a.gguf", "beginnings"),
            ("a.gguf --reasoning-preserve", "a.gguf", "template"),
        ] {
            let (words, moot, wrong) = translated(given);
            assert_eq!((words, wrong), (format!("serve {understood}"), vec![]), "{given}");
            assert!(moot.len() == 1 && moot[0].contains(says), "{given}: {moot:?}");
        }
    }

    #[test]
    fn a_flag_whose_promise_is_not_kept_says_what_to_do() {
        for (given, says) in [
            ("-hf org/model", "hf://owner/repository/path/model.gguf"),
            ("-hft hush -m a.gguf", "HF_TOKEN"),
            ("-m a.gguf --ssl-key-file x", "proxy"),
            ("-m a.gguf --lora b.gguf", "merge it"),
            ("--list-devices", "gantry-server devices"),
            ("-m a.gguf --version", "gantry-server --version"),
            ("-m a.gguf --control-vector-layer-range 1 2", "adapters"),
            ("-m a.gguf --chat-template-kwargs {\"a\":1}", "chat_template_kwargs"),
            ("-m a.gguf --no-jinja", "--chat-template"),
            ("a.gguf --no-reasoning-preserve", "template"),
            ("a.gguf --served-model-name chat", "--alias"),
            ("a.gguf --max-model-len 4096", "--ctx-size"),
            ("a.gguf --num-ctx=4096", "--ctx-size"),
            ("a.gguf --gpu-memory-utilization 0.9", "--gpu-memory says it, in MiB"),
            ("a.gguf --tensor-parallel-size 2", "--tensor-split"),
            ("a.gguf --max-num-seqs 4", "--parallel"),
            ("a.gguf --keep-alive 5m", "stays loaded"),
            ("a.gguf --system-prompt be-kind", "role system"),
        ] {
            let (_, moot, wrong) = translated(given);
            assert!(moot.is_empty() && wrong.len() == 1 && wrong[0].contains(says), "{given}: {wrong:?}");
        }
        let (rest, moot, wrong) =
            translated("-m a.gguf -fa on --temp 0.5 -c 512 -s 7 --mlock b.gguf --log-file x.gguf");
        assert_eq!((&*rest, moot.len(), wrong.len()), ("serve -m a.gguf -c 512 b.gguf", 2, 3), "{wrong:?}");
    }

    #[test]
    fn the_environment_may_name_the_model() {
        let words = |names_model| translate([OsString::from("gantry-server")], names_model).words.len();
        assert_eq!((words(false), words(true)), (1, 2));
    }

    /// Every name of this server's own flags.
    fn own_names() -> Vec<String> {
        let mut command = Cli::command();
        command.build();
        let serve = command.find_subcommand("serve").unwrap();
        let names = |argument: &clap::Arg| {
            let aliases = argument.get_visible_aliases().unwrap_or_default();
            let long = argument.get_long().into_iter().chain(aliases).map(|long| format!("--{long}"));
            argument.get_short().map(|c| format!("-{c}")).into_iter().chain(long).collect::<Vec<_>>()
        };
        serve.get_arguments().flat_map(names).collect()
    }

    #[test]
    fn what_stands_for_a_flag_is_one() {
        let own = own_names();
        let mut seen = Vec::new();
        for Flag { names, habit, .. } in FLAGS {
            for name in *names {
                assert!(!own.iter().any(|known| known == name), "{name} is this server's own");
                assert!(!seen.contains(name), "{name} stands twice");
                seen.push(*name);
            }
            if let Is([flag, ..]) = habit {
                assert!(own.iter().any(|known| known == flag), "{names:?}: there is no {flag}");
            }
        }
    }

    #[test]
    fn every_flag_of_llama_server_is_known() {
        let own = own_names();
        let reference = include_str!("habits/llama-server.txt");
        for line in reference.lines().filter(|line| !line.starts_with('#')) {
            let (names, takes_value) = line.strip_suffix(" *").map_or((line, false), |names| (names, true));
            for name in names.split_whitespace() {
                match find(name) {
                    Some(flag) => assert_eq!(flag.takes != Takes::Nothing, takes_value, "{name} takes a value"),
                    None => assert!(own.iter().any(|known| known == name), "{name} is not known"),
                }
            }
        }
    }
}

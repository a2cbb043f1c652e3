//! The command line as a whole: what it asks for, or every word of it that is not understood, at once.
//!
//! First llama-server's way of saying things is changed into this server's ([`super::habits`]); what remains is the
//! parser's. It ends at the first word that it does not know, so it is asked again without that word until it knows all that
//! are left. What a file of settings gives takes the place of the parser's defaults, so that flags and variables go before it;
//! since a word or a variable names it, the parser is asked once more then. Absent: values, which [`super::check`] looks at.

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, CommandFactory, FromArgMatches};

use super::args::MOST_USED;
use super::file::SettingsFile;
use super::habits::{self, Translated, Variables};
use super::setting::{Origin, Setting};
use super::shown::{shown, shown_name};
use super::{Cli, Command, ConfigArgs, ConfigCommand, Problems, ServeArgs};

pub(super) const SERVE: &str = "serve";
/// The words that ask what `serve` would have.
const SHOW: [&str; 2] = ["config", "show"];
/// The flag that names the model of `serve`, and the argument that does so without one.
pub(super) const MODEL: &str = "model";
const FILE: &str = "file";
/// The flag that names a file of settings.
pub(super) const CONFIG: &str = "config";
/// The most words of a command line that are looked at for what is wrong with them.
const MAX_WRONG_WORDS: usize = 64;

/// How this server's variables begin, and those among them that tests of it set.
const OWN_PREFIX: &str = "GANTRY_";
const TEST_PREFIX: &str = "GANTRY_TEST_";
/// How like a variable a name must be for it to be meant, from 0 to 1, by the measure of Jaro and Winkler: what begins with the same
/// seven letters is like it for that alone.
const MIN_VARIABLE_LIKENESS: f64 = 0.96;
/// How like a flag a name must be for the flag to be meant, from 0 to 1, by Jaro's measure, both without dashes before them.
const MIN_LIKENESS: f64 = 0.8;
/// The fewest characters of a name that may be a flag spelt wrong: a shorter one is like many.
const MIN_LIKENESS_CHARS: usize = 3;

/// A command line that is understood.
#[derive(Debug)]
pub struct Line {
    /// What it asks for.
    pub command: Command,
    /// Its settings and where they came from.
    pub settings: Vec<Setting>,
    /// What is to be said of flags that were taken and change nothing.
    pub moot: Vec<String>,
}

/// Reads the command line of this process, over its environment.
///
/// # Errors
/// It asks for help, or for what this server does not have; the error says all of it, and what to do instead.
pub fn read() -> Result<Line, clap::Error> {
    let text =
        |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.to_string_lossy().into_owned()));
    read_words(std::env::args_os(), std::env::vars_os().filter_map(text).collect())
}

/// As [`read`], of these words. `environment`: what it sets, of which the parser reads the values itself.
pub(super) fn read_words(
    words: impl IntoIterator<Item = OsString>,
    environment: Vec<(String, String)>,
) -> Result<Line, clap::Error> {
    let (variables, mut read) = variables(environment);
    let mut words: Vec<OsString> = words.into_iter().collect();
    // Its flags are those of `serve`, and so is all that is said of them.
    read.shows = words.get(1..3).is_some_and(|asked| asked == SHOW);
    if read.shows {
        words.splice(1..3, [OsString::from(SERVE)]);
    }
    let Translated { words, mut moot, mut wrong } = habits::translate(words, read.model_is_set);
    let asked = words.get(1).and_then(|word| word.to_str()).unwrap_or_default().to_owned();
    if asked == SERVE {
        moot.extend(variables.moot);
        wrong.extend(variables.wrong);
    } else {
        read.instead.clear();
    }
    let mut matches = parse(words.clone(), wrong, &read).map_err(|error| with_way_to_help(error, &asked))?;
    let file = matches.subcommand_matches(SERVE).and_then(|given| given.get_one::<PathBuf>(CONFIG));
    if let Some(file) = file {
        read.file = SettingsFile::read(file);
        matches = parse(words, Vec::new(), &read).map_err(|error| with_way_to_help(error, &asked))?;
    }
    let mut command = Cli::from_arg_matches(&matches)?.command;
    let Some((name, given)) = matches.subcommand() else {
        return Ok(Line { command, settings: Vec::new(), moot });
    };
    if let Command::Serve(args) = &mut command {
        complete(args, given, &read);
    }
    let command = match command {
        Command::Serve(args) if read.shows => Command::Config(ConfigArgs { command: ConfigCommand::Show(args) }),
        command => command,
    };
    Ok(Line { command, settings: settings(name, given, &read), moot })
}

/// Looks at a file of settings by itself, without the environment, and says how many settings are in it.
///
/// # Errors
/// Lists every mistake.
pub fn check_file(path: &Path) -> Result<usize, Problems> {
    let mut file = SettingsFile::read(path);
    for problem in &mut file.problems {
        if let Some(rest) = problem.strip_prefix(&format!("--{CONFIG} ")) {
            *problem = format!("FILE {rest}");
        }
    }
    let read = Read { file, is_alone: true, ..Read::default() };
    let parser = ServeArgs::augment_args(clap::Command::new(SERVE)).mut_args(|argument| read.apply(argument));
    let parsed = parser.try_get_matches_from([SERVE]).and_then(|given| {
        let mut args = ServeArgs::from_arg_matches(&given)?;
        complete(&mut args, &given, &read);
        Ok((args, settings(SERVE, &given, &read)))
    });
    let (args, settings) = parsed.map_err(|error| Problems(vec![error.to_string()]))?;
    args.check_alone().map_err(|problems| problems.told_of(&settings))?;
    Ok(read.file.given.len())
}

/// What the parser does not do: a file on the command line goes before one in the environment or in a file of settings, by
/// whichever of the two names.
fn complete(args: &mut ServeArgs, given: &ArgMatches, read: &Read) {
    if args.file.is_some() && given.value_source(MODEL) != Some(ValueSource::CommandLine) {
        args.model = None;
    }
    args.config_problems.clone_from(&read.file.problems);
}

/// The settings of a command, and where they came from.
fn settings(command: &str, given: &ArgMatches, read: &Read) -> Vec<Setting> {
    let setting = |argument: Arg| {
        let flag = argument.get_long()?;
        let without_flag = command == SERVE && flag == MODEL && given.contains_id(FILE);
        let id = if without_flag { FILE } else { argument.get_id().as_str() };
        let origin = match given.value_source(id) {
            Some(ValueSource::CommandLine) => Origin::CommandLine,
            Some(ValueSource::EnvVariable) => Origin::Variable(read.of(&argument)?),
            _ => read.file.of(flag).map_or(Origin::Default, |given| Origin::File(given.place.clone())),
        };
        let values = given.get_raw(id).into_iter().flatten().map(|value| value.to_string_lossy().into_owned());
        Some(Setting::new(&argument, flag, values.collect(), origin))
    };
    arguments(command).into_iter().filter_map(setting).collect()
}

/// From what flags are read that are not on the command line.
#[derive(Debug, Default)]
struct Read {
    /// Variables of llama-server's that are read instead of this server's own, by flag.
    instead: HashMap<String, &'static str>,
    /// Whether a variable names a model, or a file of settings, which may.
    model_is_set: bool,
    /// What a file of settings gives.
    file: SettingsFile,
    /// Whether that is all, and no variable is read.
    is_alone: bool,
    /// Whether the settings are to be shown instead of followed.
    shows: bool,
}

impl Read {
    /// The variable from which a flag is read.
    fn of(&self, argument: &Arg) -> Option<String> {
        let instead = argument.get_long().and_then(|flag| self.instead.get(flag));
        let own = || argument.get_env().map(|own| own.to_string_lossy().into_owned());
        instead.map(|&instead| instead.to_owned()).or_else(own)
    }

    /// Has an argument of `serve` read from all of it.
    fn apply(&self, argument: Arg) -> Arg {
        let Some(flag) = argument.get_long().map(str::to_owned) else { return argument };
        let argument = match self.instead.get(&flag) {
            _ if self.is_alone => argument.env(None::<&str>),
            Some(&variable) => argument.env(variable),
            None => argument,
        };
        match self.file.of(&flag) {
            // The parser borrows defaults for as long as the process lives, which reads one such file.
            Some(given) => argument.default_values(given.values.iter().map(|value| &*value.clone().leak())),
            None => argument,
        }
    }
}

/// What is set of llama-server's variables, and which of them are read: this server's own go before.
fn variables(environment: Vec<(String, String)>) -> (Variables, Read) {
    let mut own = Vec::new();
    for argument in arguments(SERVE) {
        let Some((variable, flag)) = argument.get_env().zip(argument.get_long()) else { continue };
        if environment.iter().any(|(name, value)| variable == name.as_str() && !value.is_empty()) {
            own.push(flag.to_owned());
        }
    }
    let (moot, wrong) = unknown(&environment);
    let mut variables = habits::look(environment);
    variables.moot.extend(moot);
    variables.wrong.extend(wrong);
    let mut instead = std::mem::take(&mut variables.read);
    instead.retain(|flag, _| !own.contains(flag));
    let model_is_set = own.iter().any(|flag| flag == MODEL || flag == CONFIG) || instead.contains_key(MODEL);
    (variables, Read { instead, model_is_set, ..Read::default() })
}

/// Variables that are called as if they were this server's and are not: those that change nothing, and those that are most likely
/// meant for another. What Kubernetes sets for a Service that is called so is for nobody.
fn unknown(environment: &[(String, String)]) -> (Vec<String>, Vec<String>) {
    let variable = |argument: &Arg| argument.get_env().map(|variable| variable.to_string_lossy().into_owned());
    let known: Vec<String> =
        Cli::command().get_subcommands().flat_map(|command| command.get_arguments().filter_map(variable)).collect();
    let of_serve: Vec<String> = arguments(SERVE).iter().filter_map(variable).collect();
    let is_of_a_service = |name: &str, value: &str| {
        name.ends_with("_SERVICE_HOST")
            || name.contains("_SERVICE_PORT")
            || name.contains("_PORT_")
            || (name.ends_with("_PORT") && value.contains("://"))
    };
    let is_ours = |name: &str| name.starts_with(OWN_PREFIX) && !name.starts_with(TEST_PREFIX);
    let (mut moot, mut wrong) = (Vec::new(), Vec::new());
    for (name, value) in environment {
        if !is_ours(name) || known.contains(name) || is_of_a_service(name, value) {
            continue;
        }
        let likeness = |one: &&String| strsim::jaro_winkler(name, one);
        let similar = of_serve.iter().max_by(|one, other| likeness(one).total_cmp(&likeness(other)));
        match similar.filter(|similar| likeness(similar) >= MIN_VARIABLE_LIKENESS) {
            Some(similar) => wrong.push(format!("{name} is no variable of this server: did you mean {similar}?")),
            None => moot.push(format!("{name} is read by nobody; `gantry-server serve --help` lists the variables")),
        }
    }
    (moot, wrong)
}

/// The commands that people give, in words.
fn commands() -> String {
    let all = Cli::command();
    let names: Vec<&str> =
        all.get_subcommands().filter(|command| !command.is_hide_set()).map(clap::Command::get_name).collect();
    names.split_last().map(|(last, others)| format!("{} and {last}", others.join(", "))).unwrap_or_default()
}

/// The arguments of a command.
pub(super) fn arguments(command: &str) -> Vec<Arg> {
    let all = Cli::command();
    all.find_subcommand(command).map(|command| command.get_arguments().cloned().collect()).unwrap_or_default()
}

/// The flags that most people look for, with what they are when they are left out.
fn most_used() -> String {
    let all = arguments(SERVE);
    let mut text = String::from(
        "`gantry-server FILE` is short for `gantry-server serve FILE`, which takes llama-server's flags. The most used of them:\n",
    );
    for (flag, what, default) in MOST_USED {
        let Some(argument) = all.iter().find(|argument| argument.get_long() == Some(flag)) else { continue };
        let short = argument.get_short().map(|short| format!("-{short}"));
        let short = short.or_else(|| habits::short_forms(flag).first().map(|&form| form.to_owned()));
        let short = short.map_or_else(|| " ".repeat(4), |short| format!("{short}, "));
        let value = argument.get_action().takes_values().then(|| argument.get_value_names()?.first()).flatten();
        let named = format!("{short}--{flag} {}", value.map_or("", |name| name.as_str()));
        let own = argument.get_default_values().first().filter(|_| value.is_some()).map(|own| own.to_string_lossy());
        let default = default.map(str::to_owned).or_else(|| own.map(|own| own.into_owned()));
        let default = default.map(|default| format!(" [{default}]")).unwrap_or_default();
        text.push_str(&format!("  {named:<27}{what}{default}\n"));
    }
    text + "\nAll flags: gantry-server serve --help"
}

/// The parser, whose help names the flags that are used most, and that of `serve` llama-server's short forms, too.
fn command(read: &Read) -> clap::Command {
    let all = Cli::command();
    let show = all.find_subcommand(SHOW[0]).and_then(|config| config.find_subcommand(SHOW[1]));
    let about = show.and_then(clap::Command::get_about).cloned().filter(|_| read.shows);
    all.after_help(most_used()).mut_subcommand(SERVE, |serve| {
        let serve = match about {
            Some(about) => {
                serve.about(about).override_usage(format!("gantry-server {} [OPTIONS] [FILE]", SHOW.join(" ")))
            }
            None => serve,
        };
        serve.mut_args(|argument| {
            let argument = read.apply(argument);
            let forms = argument.get_long().map(habits::short_forms).unwrap_or_default();
            if forms.is_empty() {
                return argument;
            }
            let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
            argument.help(format!("{help} [also: {}]", forms.join(", ")))
        })
    })
}

/// An error with the help that is of use: the flags are those of a command, and its own usage says no more.
fn with_way_to_help(error: clap::Error, asked: &str) -> clap::Error {
    if !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return error;
    }
    let text = error.to_string();
    let text = text.split("\n\nUsage:").next().unwrap_or_default();
    let text = text.split("\n\nFor more information").next().unwrap_or_default();
    let text = text.strip_prefix("error: ").unwrap_or(text).trim_end();
    let help = match Cli::command().find_subcommand(asked) {
        Some(command) => format!("`gantry-server {} --help` lists its flags.", command.get_name()),
        None => String::from("`gantry-server --help` lists the commands, `gantry-server serve --help` the flags."),
    };
    clap::Error::raw(error.kind(), format!("{text}\n\n{help}\n"))
}

fn parse(mut words: Vec<OsString>, mut wrong: Vec<String>, read: &Read) -> Result<ArgMatches, clap::Error> {
    let mut parser = command(read);
    for _ in 0..MAX_WRONG_WORDS {
        match parser.clone().try_get_matches_from(&words) {
            Ok(matches) if wrong.is_empty() => return Ok(matches),
            Ok(_) => break,
            Err(error) if error.kind() == ErrorKind::UnknownArgument => match not_known(&error, &words) {
                Some((at, count, what)) => {
                    wrong.push(what);
                    words.drain(at..at + count);
                }
                None if wrong.is_empty() => return Err(error),
                None => break,
            },
            Err(error) if wrong.is_empty() || error.kind() == ErrorKind::DisplayHelp => {
                return Err(in_words(error, &words, read));
            }
            Err(_) => break,
        }
    }
    let message = match &wrong[..] {
        [one] => one.clone(),
        several => {
            format!("{} settings are not understood:\n  {}", several.len(), several.join("\n  "))
        }
    };
    Err(parser.error(ErrorKind::UnknownArgument, message))
}

/// Where the word stands that the parser does not know, how many words go with it, and what to do instead.
fn not_known(error: &clap::Error, words: &[OsString]) -> Option<(usize, usize, String)> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let unknown = text(ContextKind::InvalidArg)?;
    let is_it = |word: &OsString| word.to_str().is_some_and(|word| is_word_of(word, unknown));
    let at = words.iter().skip(2).position(is_it)? + 2;
    let word = words.get(at)?.to_string_lossy();
    let name = word.split_once('=').map_or(&*word, |(name, _)| name);
    if !name.starts_with('-') {
        let name = shown_name(name);
        return Some((at, 1, format!("'{name}': nothing more is expected after what stands before it")));
    }
    let shown = shown_name(name);
    let has_value = |argument: &Arg| argument.get_action().takes_values();
    let next_is_value = word == name && words.get(at + 1).is_some_and(|next| habits::can_only_be_a_value(next));
    let command = words.get(1)?.to_str()?;
    if let Some(argument) = arguments(SERVE).into_iter().find(|argument| is_named(argument, name)) {
        let count = if has_value(&argument) && word == name { 2 } else { 1 };
        let what = format!("'{shown}' is for `serve`; leave it out for `{command}`");
        return Some((at, count.min(words.len() - at), what));
    }
    let count = if next_is_value { 2 } else { 1 };
    let mut what = format!("'{shown}' is not a flag of this server");
    if let Some((similar, instead)) = most_like(name, command) {
        what.push_str(&format!(": did you mean '{similar}'?"));
        what.push_str(&instead.map(|instead| format!(" Instead: {instead}.")).unwrap_or_default());
    }
    Some((at, count, what))
}

/// The flag of a command that a name is most like: of `serve` llama-server's, too, with what to do instead of it.
pub(super) fn most_like(name: &str, command: &str) -> Option<(String, Option<&'static str>)> {
    let name = name.trim_start_matches('-');
    if name.chars().count() < MIN_LIKENESS_CHARS {
        return None;
    }
    let own = arguments(command).into_iter().flat_map(|argument| {
        let others = argument.get_visible_aliases().unwrap_or_default();
        argument.get_long().into_iter().chain(others).map(|long| (format!("--{long}"), None)).collect::<Vec<_>>()
    });
    let others = habits::long_names().filter(|_| command == SERVE).map(|(name, instead)| (name.to_owned(), instead));
    let likeness = |known: &str| strsim::jaro(name, known.trim_start_matches('-'));
    // Of two that are as like it this server's own goes before.
    let all: Vec<_> = others.chain(own).collect();
    let likely = all.iter().filter(|(known, _)| likeness(known) >= MIN_LIKENESS);
    let likely = likely.max_by(|(one, _), (other, _)| likeness(one).total_cmp(&likeness(other)));
    // A name may be cut short, or one of llama-server's of few letters have a dash too many.
    let begins =
        |known: &str| known.trim_start_matches('-').strip_prefix(name).is_some_and(|rest| rest.starts_with('-'));
    let whole = || all.iter().filter(|(known, _)| begins(known)).min_by_key(|(known, _)| known.len());
    let short = || (command == SERVE).then(|| habits::short_name(name)).flatten().map(|short| (short, None));
    likely.or_else(whole).cloned().or_else(short)
}

/// Whether the parser means this word by a name, which is a flag without its value, or the first letter of several.
fn is_word_of(word: &str, name: &str) -> bool {
    let short = name.len() == 2 && name.starts_with('-') && name != "--";
    word == name
        || word.strip_prefix(name).is_some_and(|rest| rest.starts_with('='))
        || (short && !word.starts_with("--") && word.starts_with(name))
}

pub(super) fn is_named(argument: &Arg, name: &str) -> bool {
    let long = name.strip_prefix("--");
    let short =
        name.strip_prefix('-').filter(|short| short.chars().count() == 1).and_then(|short| short.chars().next());
    (long.is_some() && argument.get_long() == long)
        || (short.is_some() && argument.get_short() == short)
        || argument.get_visible_aliases().unwrap_or_default().iter().any(|alias| Some(*alias) == long)
}

/// What the parser says where it does not know the environment, or files without a flag.
fn in_words(error: clap::Error, words: &[OsString], read: &Read) -> clap::Error {
    let Some(ContextValue::String(wrong)) = error.get(match error.kind() {
        ErrorKind::InvalidSubcommand => ContextKind::InvalidSubcommand,
        _ => ContextKind::InvalidArg,
    }) else {
        return error;
    };
    if error.kind() == ErrorKind::InvalidSubcommand && words.get(1).is_some_and(|asked| asked == SHOW[0]) {
        return error;
    }
    if error.kind() == ErrorKind::InvalidSubcommand {
        let meant = match error.get(ContextKind::SuggestedSubcommand) {
            Some(ContextValue::Strings(similar)) => similar.first().map(|name| format!(" Did you mean '{name}'?")),
            _ => None,
        };
        let meant = habits::instead_of(wrong).map(|instead| format!(" Instead: {instead}.")).or(meant);
        let message = format!(
            "'{}' is no command, and there is no such file to serve; the commands are {}.{}",
            shown_name(wrong),
            commands(),
            meant.unwrap_or_default()
        );
        return command(read).error(ErrorKind::InvalidSubcommand, message);
    }
    // Of a flag that is not on the command line the value came from the environment.
    let name = wrong.split_whitespace().next().unwrap_or_default();
    let command_name = words.get(1).and_then(|word| word.to_str()).unwrap_or_default();
    let Some(argument) = arguments(command_name).into_iter().find(|argument| is_named(argument, name)) else {
        return error;
    };
    let on_the_line = words.iter().skip(2).filter_map(|word| word.to_str()).any(|word| names(&argument, word));
    match (read.of(&argument), error.get(ContextKind::InvalidValue)) {
        (Some(variable), Some(ContextValue::String(value))) if !on_the_line => {
            let why = if value.is_empty() { "it is empty" } else { "true or false is expected" };
            let message = format!("{variable}, which stands for {name}, may not be {}: {why}", shown(value));
            command(read).error(error.kind(), message)
        }
        // The parser says which value is wrong, and of an empty one nothing more.
        (_, Some(ContextValue::String(value))) if value.is_empty() => command(read)
            .error(error.kind(), format!("{name} has no value: it stands there without one, or with an empty one")),
        _ => error,
    }
}

/// Whether this word is the argument by any of its names, with or without a value in the same word.
fn names(argument: &Arg, word: &str) -> bool {
    let name = match word.split_once('=') {
        Some((name, _)) => name,
        None if word.starts_with("--") => word,
        None => word.get(..2).unwrap_or(word),
    };
    is_named(argument, name)
}

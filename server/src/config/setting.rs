//! The settings of `serve` with where each value came from, and their form as a file of settings.

use clap::Arg;
use gantry_crds::address;

use super::file::{HIDDEN, Place};
use super::line::CONFIG;

/// Where the value of a setting came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nobody gave one.
    Default,
    /// A flag, or the file behind the command.
    CommandLine,
    /// The variable of this name.
    Variable(String),
    /// A file of settings, and where in it.
    File(Place),
}

/// A setting of `serve`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The long name of its flag, without dashes.
    pub flag: String,
    /// As texts; none where it has no value, and more than one of a flag that may be given several times.
    pub values: Vec<String>,
    /// Where they came from.
    pub origin: Origin,
    /// Whether its values are secret.
    pub(super) is_secret: bool,
    /// What it is where nobody gave a value and the parser has no default, as its help says.
    pub(super) left_out: Option<String>,
}

impl Setting {
    /// The setting of a flag with a long name.
    pub(super) fn new(argument: &Arg, flag: &str, values: Vec<String>, origin: Origin) -> Self {
        let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        let left_out = help.split_once("[default: ").and_then(|(_, rest)| rest.split_once(']'));
        Self {
            flag: flag.to_owned(),
            values,
            origin,
            is_secret: argument.is_hide_env_values_set(),
            left_out: left_out.map(|(left_out, _)| left_out.to_owned()),
        }
    }

    /// Its line of a file of settings, with where its value came from.
    fn line(&self) -> String {
        let flag = &self.flag;
        let origin = match &self.origin {
            Origin::Default => String::from("default"),
            Origin::CommandLine => String::from("command line"),
            Origin::Variable(variable) => format!("variable {variable}"),
            Origin::File(place) => comment(&place.to_string()),
        };
        let values: Vec<String> = self.values.iter().map(|value| self.value(value)).collect();
        match values.as_slice() {
            [] => match &self.left_out {
                Some(left_out) => format!("# {flag}:  # default: {left_out}\n"),
                None => format!("# {flag}:  # default: none\n"),
            },
            [one] => format!("{flag}: {one}  # {origin}\n"),
            several => format!("{flag}: [{}]  # {origin}\n", several.join(", ")),
        }
    }

    /// A value as YAML, without what is secret in it.
    fn value(&self, value: &str) -> String {
        if self.is_secret {
            return quoted(HIDDEN);
        }
        if value.contains("://") && address::credential(value).is_some() {
            return quoted(&format!("{}?{HIDDEN}", address::shown(value)));
        }
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "._/-".contains(c);
        let is_number = value.strip_prefix('-').is_some_and(|digits| digits.starts_with(|c: char| c.is_ascii_digit()));
        let begins_plain = is_number || value.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '/');
        if begins_plain && value.chars().all(is_plain) && !value.eq_ignore_ascii_case("null") {
            return value.to_owned();
        }
        quoted(value)
    }
}

/// The settings as a file of settings, a line each, which says where they came from. What is secret has to be written in
/// before it is used.
#[must_use]
pub fn show(settings: &[Setting]) -> String {
    settings.iter().filter(|setting| setting.flag != CONFIG).map(Setting::line).collect()
}

/// A text in YAML's double quotes.
fn quoted(text: &str) -> String {
    let mut quoted = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            '\n' => quoted.push_str("\\n"),
            ' '..='~' => quoted.push(c),
            c if c.is_alphanumeric() => quoted.push(c),
            c => quoted.push_str(&format!("\\U{:08X}", u32::from(c))),
        }
    }
    quoted + "\""
}

/// A text that is to stand in a comment, on one line.
fn comment(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

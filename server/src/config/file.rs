//! A file of settings: YAML, whose keys are the long names of the flags of `serve`.
//!
//! Values are texts as on a command line, whatever YAML would take them for, and each is read by the parser of its flag.
//! What is wrong is gathered with its line and column, and the rest is read all the same, up to a mistake in the YAML
//! itself. Hence a reader that tells places and texts as they are written, which the one that fills types (serde_yaml, of
//! the gates of `check`) does not. Absent: what the values mean, which [`super::check`] looks at.

use std::fmt::{self, Display};
use std::path::Path;

use clap::{Arg, ArgAction};
use granit_parser::{Event, Marker, Parser, ScalarStyle, StrInput};

use super::check::Check;
use super::line::{self, CONFIG};
use super::shown::{shown, shown_name};
use super::{MAX_CONFIG_BYTES, MAX_CONFIG_PROBLEMS, habits};

/// What stands for a value that is not shown.
pub(super) const HIDDEN: &str = "***";
/// Plain texts that mean no value.
const NULLS: &[&str] = &["", "~", "null", "Null", "NULL"];

/// Where something stands in a file, counted from 1, columns in characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    file: String,
    line: usize,
    column: usize,
}

impl Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.line, self.column)
    }
}

/// The value that a file gives to a flag.
#[derive(Clone, Debug)]
pub(super) struct Given {
    /// The flag's long name, without dashes.
    pub(super) flag: String,
    /// One, or as many as a flag takes that may be given several times.
    pub(super) values: Vec<String>,
    /// Where its key stands.
    pub(super) place: Place,
}

/// What a file of settings says.
#[derive(Debug, Default)]
pub(super) struct SettingsFile {
    /// Its settings, each flag once.
    pub(super) given: Vec<Given>,
    /// What is wrong with it, each with its place.
    pub(super) problems: Vec<String>,
}

impl SettingsFile {
    /// Reads the file that `--config` names.
    pub(super) fn read(path: &Path) -> Self {
        let mut check = Check::default();
        match check.text_file(CONFIG, path, MAX_CONFIG_BYTES, "a file of settings") {
            Some(text) => Self::parse(&path.display().to_string(), &text),
            None => Self { given: Vec::new(), problems: check.0 },
        }
    }

    /// Reads what is in a file of this name.
    pub(super) fn parse(name: &str, text: &str) -> Self {
        // An alias without an anchor is a mistake like any other with one.
        let options = granit_parser::options! { emit_comments: false, emit_unresolved_aliases: true };
        let events = Parser::new_from_str_with_options(text, options);
        let mut reader = Reader { name, events, arguments: line::arguments(line::SERVE), read: Self::default() };
        // Ended early, it has said why.
        let _ = reader.document();
        reader.read
    }

    /// What it gives to a flag.
    pub(super) fn of(&self, flag: &str) -> Option<&Given> {
        self.given.iter().find(|given| given.flag == flag)
    }
}

/// A node of the document, or an end.
enum Node {
    Text {
        text: String,
        is_plain: bool,
    },
    List,
    Mapping,
    Alias,
    /// Of the innermost list or mapping.
    End,
    /// Of the document.
    DocumentEnd,
}

struct Reader<'text> {
    name: &'text str,
    events: Parser<'text, StrInput<'text>>,
    arguments: Vec<Arg>,
    read: SettingsFile,
}

/// All that reads says `None` where nothing more is to be read: at the end, past a mistake in the YAML itself, and past the
/// last mistake that is told.
impl Reader<'_> {
    fn place(&self, at: Marker) -> Place {
        Place { file: self.name.to_owned(), line: at.line(), column: at.col() + 1 }
    }

    fn problem(&mut self, place: &Place, what: impl Display) -> Option<()> {
        self.read.problems.push(format!("{place}: {what}"));
        if self.read.problems.len() < MAX_CONFIG_PROBLEMS {
            return Some(());
        }
        self.read.problems.push(format!("{}: what is wrong behind that is not told", self.name));
        None
    }

    fn next_node(&mut self) -> Option<(Node, Place)> {
        loop {
            let (event, span) = match self.events.next()? {
                Ok(next) => next,
                Err(error) => {
                    let place = self.place(*error.marker());
                    self.problem(&place, format_args!("this cannot be read as YAML: {}", error.info()));
                    return None;
                }
            };
            let place = self.place(span.start);
            if let Some(tag) = event.tag() {
                let what =
                    format!("the tag {} must be left out: a value's flag says what it is", shown_name(&tag.original()));
                self.problem(&place, what)?;
            }
            let node = match event {
                Event::Scalar(text, style, ..) => {
                    Node::Text { text: text.into_owned(), is_plain: style == ScalarStyle::Plain }
                }
                Event::SequenceStart(..) => Node::List,
                Event::MappingStart(..) => Node::Mapping,
                Event::Alias(_) | Event::UnresolvedAlias(_) => Node::Alias,
                Event::SequenceEnd | Event::MappingEnd => Node::End,
                Event::DocumentEnd => Node::DocumentEnd,
                _ => continue,
            };
            return Some((node, place));
        }
    }

    fn document(&mut self) -> Option<()> {
        let (node, place) = self.next_node()?;
        match node {
            Node::Mapping => self.settings()?,
            // Nothing but comments.
            Node::Text { text, is_plain: true } if NULLS.contains(&&*text) => {}
            other => {
                self.problem(&place, "settings are expected, such as port: 8080")?;
                self.skip(&other)?;
            }
        }
        // Its own end.
        self.next_node()?;
        let (_, place) = self.next_node()?;
        self.problem(&place, "a second document begins here, and one is read")
    }

    /// The settings, up to the end of their mapping.
    fn settings(&mut self) -> Option<()> {
        loop {
            let (node, place) = self.next_node()?;
            match node {
                Node::End => return Some(()),
                Node::Text { text, .. } => self.setting(&text, place)?,
                other => {
                    self.problem(&place, "a key must be the name of a flag")?;
                    self.skip(&other)?;
                    let (value, _) = self.next_node()?;
                    self.skip(&value)?;
                }
            }
        }
    }

    /// The value of a key, and what becomes of both.
    fn setting(&mut self, key: &str, place: Place) -> Option<()> {
        let argument = match self.known(key) {
            Ok(argument) => Some(argument),
            Err(why) => {
                self.problem(&place, why)?;
                None
            }
        };
        let (node, value_place) = self.next_node()?;
        let Some(argument) = argument else { return self.skip(&node) };
        let flag = argument.get_long().unwrap_or_default();
        if let Some(Given { place: first, .. }) = self.read.of(flag) {
            let what = format!("{key} stands twice, first in line {}: leave one of them out", first.line);
            self.problem(&place, what)?;
            return self.skip(&node);
        }
        let takes_several = matches!(argument.get_action(), ArgAction::Append);
        let values = match node {
            Node::List if takes_several => self.list(key, &value_place)?,
            Node::Text { text, is_plain } => self.value(key, &text, is_plain, &value_place)?.into_iter().collect(),
            other => {
                let wanted = if takes_several { "one value or a list of them" } else { "one value" };
                let what = match other {
                    Node::Alias => String::from("aliases (*name) are not followed: write the value"),
                    Node::List => format!("{key} has {wanted}, and this is a list"),
                    _ => format!("{key} has {wanted}, and this is a mapping"),
                };
                self.problem(&value_place, what)?;
                self.skip(&other)?;
                Vec::new()
            }
        };
        let refused: Vec<String> = values.iter().filter_map(|value| refused(&argument, value)).collect();
        for why in &refused {
            self.problem(&value_place, format_args!("{key} {why}"))?;
        }
        if refused.is_empty() && !values.is_empty() {
            self.read.given.push(Given { flag: flag.to_owned(), values, place });
        }
        Some(())
    }

    /// The values of a list, up to its end.
    fn list(&mut self, key: &str, place: &Place) -> Option<Vec<String>> {
        let (mut values, mut is_empty) = (Vec::new(), true);
        loop {
            let (node, place) = self.next_node()?;
            match node {
                Node::End => break,
                Node::Text { text, is_plain } => values.extend(self.value(key, &text, is_plain, &place)?),
                Node::Alias => self.problem(&place, "aliases (*name) are not followed: write the value")?,
                other => {
                    self.problem(&place, format_args!("the list of {key} may have nothing but values in it"))?;
                    self.skip(&other)?;
                }
            }
            is_empty = false;
        }
        if is_empty {
            self.problem(place, format_args!("{key} has an empty list: leave it out"))?;
        }
        Some(values)
    }

    /// A value, unless it is none.
    fn value(&mut self, key: &str, text: &str, is_plain: bool, place: &Place) -> Option<Option<String>> {
        if is_plain && NULLS.contains(&text) {
            let quoted = "leave it out for the default, or write the text in quotes";
            self.problem(place, format_args!("{key} has no value: {quoted}"))?;
            return Some(None);
        }
        if text == HIDDEN || (text.contains("://") && text.ends_with(HIDDEN)) {
            let what = format!("{key} must be written out: {HIDDEN} stands for what `config show` does not show");
            self.problem(place, what)?;
            return Some(None);
        }
        Some(Some(text.to_owned()))
    }

    /// Leaves out all that is within a node that has been begun.
    fn skip(&mut self, node: &Node) -> Option<()> {
        let mut depth = usize::from(matches!(node, Node::List | Node::Mapping));
        while depth > 0 {
            match self.next_node()?.0 {
                Node::List | Node::Mapping => depth += 1,
                Node::End => depth -= 1,
                _ => {}
            }
        }
        Some(())
    }

    /// The flag of a key, or why there is none.
    fn known(&self, key: &str) -> Result<Arg, String> {
        let name = format!("--{}", key.replace('_', "-"));
        let is_it = |argument: &&Arg| line::is_named(argument, &name);
        match self.arguments.iter().find(is_it) {
            Some(argument) if argument.get_long() == Some(CONFIG) => {
                Err(format!("{key} must be left out: a file of settings names no other"))
            }
            Some(argument) => Ok(argument.clone()),
            None => {
                let mut why = format!("{} is no setting of this server", shown_name(key));
                let short = format!("-{key}");
                let of_short = self.arguments.iter().find(|argument| line::is_named(argument, &short));
                let long = match key {
                    // As the usage calls it, which has no flag.
                    "file" => Some(line::MODEL),
                    _ => of_short.and_then(Arg::get_long),
                };
                if let Some(instead) = habits::said_of(&name).or_else(|| habits::said_of(&short)) {
                    why.push_str(&format!(": {instead}"));
                } else if let Some(long) = long {
                    why.push_str(&format!(": did you mean {long}?"));
                } else if let Some((similar, _)) = line::most_like(&name, line::SERVE) {
                    why.push_str(&format!(": did you mean {}?", similar.trim_start_matches('-')));
                    why.push_str(
                        &habits::said_of(&similar).map(|instead| format!(" Instead: {instead}.")).unwrap_or_default(),
                    );
                }
                Err(why)
            }
        }
    }
}

/// Why the parser of a flag refuses a value, as far as it does.
fn refused(argument: &Arg, value: &str) -> Option<String> {
    let parser = argument.get_value_parser().clone();
    let alone = Arg::new("value").value_parser(parser).action(ArgAction::Set).allow_hyphen_values(true);
    let refused = clap::Command::new("value").no_binary_name(true).arg(alone.long("value"));
    refused.try_get_matches_from([format!("--value={value}")]).err()?;
    Some(match argument.get_action() {
        ArgAction::SetTrue => format!("must be true or false, not {}", shown(value)),
        _ => String::from("may not be empty"),
    })
}

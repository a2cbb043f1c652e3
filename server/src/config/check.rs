//! What is wrong with the values of flags, all of it at once.

use std::fmt::{self, Display};
use std::io::{ErrorKind, Read as _};
use std::path::Path;
use std::str::FromStr;

use clap::{Arg, CommandFactory};
use gantry_engine::{ALL_LAYERS, CacheType, KvLayout, Pooling};

use super::setting::{Origin, Setting};
use super::shown::{shown, shown_path, told};
use super::{Cli, MAX_PROBLEMS};
use crate::version::DispatchStrategy;

/// The most layers that a flag may ask for.
pub(super) const MAX_GPU_LAYERS: u32 = ALL_LAYERS;

/// Every mistake in the settings.
#[derive(Debug, PartialEq, Eq)]
pub struct Problems(pub(super) Vec<String>);

impl Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "invalid settings:")?;
        for problem in self.0.iter().take(MAX_PROBLEMS) {
            writeln!(f, "  {}", told(problem))?;
        }
        match self.0.len().saturating_sub(MAX_PROBLEMS) {
            0 => Ok(()),
            more => writeln!(f, "  and {more} more, which are not told"),
        }
    }
}

impl std::error::Error for Problems {}

impl Problems {
    /// The same, where it was the environment or a file that made a setting told of its variable, or of its place.
    #[must_use]
    pub fn told_of(self, settings: &[Setting]) -> Self {
        let told = |problem: String| {
            let named = settings.iter().find_map(|Setting { flag, origin, .. }| {
                let rest = problem.strip_prefix(&format!("--{flag}"))?;
                let comma = if rest.starts_with(' ') { "," } else { "" };
                match origin {
                    _ if !rest.starts_with([' ', ':']) => None,
                    Origin::Variable(variable) => Some(format!("{variable}, which stands for --{flag}{comma}{rest}")),
                    Origin::File(place) => Some(format!("{place}: {flag}{rest}")),
                    Origin::Default | Origin::CommandLine => None,
                }
            });
            named.unwrap_or(problem)
        };
        Self(self.0.into_iter().map(told).collect())
    }
}

/// What [`is_name`] takes, in words.
const A_NAME: &str = "1 to 256 characters without control characters";

fn is_name(text: &str) -> bool {
    !text.is_empty() && text.len() <= 256 && !text.chars().any(char::is_control)
}

/// The unit of a flag's value, behind a number: what its reference calls the value says it.
fn unit_of(flag: &str) -> &'static str {
    let all = Cli::command();
    let serve = all.find_subcommand("serve");
    let found = serve.and_then(|serve| serve.get_arguments().find(|argument| argument.get_long() == Some(flag)));
    let names = found.and_then(Arg::get_value_names).unwrap_or_default();
    match names.first().map(|name| name.as_str()) {
        Some("MIB") => " MiB",
        Some("SECONDS") => " seconds",
        Some("MS") => " ms",
        Some("TOKENS") => " tokens",
        _ => "",
    }
}

/// Gathers mistakes; a value that is wrong is replaced by one that nobody will see.
#[derive(Default)]
pub(super) struct Check(pub(super) Vec<String>);

impl Check {
    pub(super) fn problem(&mut self, problem: String) {
        self.0.push(problem);
    }

    pub(super) fn found_none(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn number<T>(&mut self, flag: &str, text: &str, low: T, high: T) -> T
    where
        T: FromStr + PartialOrd + Display + Copy,
    {
        match text.trim().parse::<T>() {
            Ok(number) if low <= number && number <= high => number,
            _ => {
                let unit = unit_of(flag);
                self.problem(format!(
                    "--{flag} must be a whole number from {low} to {high}{unit}, not {}",
                    shown(text)
                ));
                low
            }
        }
    }

    /// As [`Check::number`], where -1 and `auto` leave the choice to the engine.
    pub(super) fn automatic(&mut self, flag: &str, text: &str, low: u32, high: u32) -> Option<u32> {
        match text.trim() {
            "-1" | "auto" => None,
            number => match number.parse() {
                Ok(number) if (low..=high).contains(&number) => Some(number),
                _ => {
                    let range = format!("-1 or a whole number from {low} to {high}{}", unit_of(flag));
                    self.problem(format!("--{flag} must be {range}, not {}", shown(text)));
                    None
                }
            },
        }
    }

    /// As llama-server has it.
    pub(super) fn gpu_layers(&mut self, flag: &str, text: &str) -> Option<u32> {
        if text.trim() == "all" { Some(ALL_LAYERS) } else { self.automatic(flag, text, 0, MAX_GPU_LAYERS) }
    }

    pub(super) fn cache_type(&mut self, flag: &str, text: &str) -> CacheType {
        match text.trim().to_ascii_lowercase().as_str() {
            "f16" => CacheType::F16,
            "q8_0" => CacheType::Q8_0,
            "q4_0" => CacheType::Q4_0,
            _ => {
                self.problem(format!("--{flag} must be f16, q8_0 or q4_0, not {}", shown(text)));
                CacheType::F16
            }
        }
    }

    pub(super) fn dispatch(&mut self, flag: &str, text: &str) -> DispatchStrategy {
        text.trim().to_ascii_lowercase().parse().unwrap_or_else(|()| {
            let names = "round-robin, least-loaded, memory-aware or prefix-aware";
            self.problem(format!("--{flag} must be {names}, not {}", shown(text)));
            DispatchStrategy::default()
        })
    }

    pub(super) fn kv_layout(&mut self, flag: &str, text: &str) -> KvLayout {
        match text.trim().to_ascii_lowercase().as_str() {
            "auto" => KvLayout::Auto,
            "split" => KvLayout::Split,
            "unified" => KvLayout::Unified,
            _ => {
                self.problem(format!("--{flag} must be auto, split or unified, not {}", shown(text)));
                KvLayout::Auto
            }
        }
    }

    pub(super) fn pooling(&mut self, flag: &str, text: &str) -> Option<Pooling> {
        let found = Pooling::ALL.into_iter().find(|pooling| pooling.as_str() == text.trim().to_ascii_lowercase());
        if found.is_none() {
            self.problem(format!("--{flag} must be mean, cls, last or rank, not {}", shown(text)));
        }
        found
    }

    /// Looks for a file that can be read, and says whether there is one.
    pub(super) fn file(&mut self, flag: &str, path: &Path) -> bool {
        let why = match path.metadata() {
            Ok(found) if found.is_file() => return true,
            Ok(found) if found.is_dir() => "is a directory: name the file in it".to_owned(),
            Ok(_) => "is a pipe, a device or a socket".to_owned(),
            Err(error) if error.kind() == ErrorKind::NotFound => match path.read_link() {
                Ok(target) => format!("is a link to {}, which is not there", shown_path(&target)),
                Err(_) => "is not there".to_owned(),
            },
            Err(error) => format!("cannot be looked at: {error}"),
        };
        self.problem(format!("--{flag} must be a readable file, and {} {why}", shown_path(path)));
        false
    }

    /// The text of a file that is no longer than it may be. `what`: what it is to be.
    pub(super) fn text_file(&mut self, flag: &str, path: &Path, most_bytes: usize, what: &str) -> Option<String> {
        if !self.file(flag, path) {
            return None;
        }
        let most = format!("{what} of at most {most_bytes} bytes");
        let bytes = path.metadata().map_or(0, |metadata| metadata.len());
        if bytes > most_bytes as u64 {
            self.problem(format!("--{flag} must be {most}, and {} has {bytes}", shown_path(path)));
            return None;
        }
        let mut text = String::new();
        // It may grow while it is read.
        let read = gantry_gguf::open(path);
        let read = read.and_then(|(file, _)| file.take(most_bytes as u64 + 1).read_to_string(&mut text));
        match read {
            Ok(bytes) if bytes <= most_bytes => Some(text),
            Ok(_) => {
                self.problem(format!("--{flag} must be {most}, and {} has more", shown_path(path)));
                None
            }
            Err(error) => {
                self.problem(format!(
                    "--{flag} must be a readable file of text, and {} is not: {error}",
                    shown_path(path)
                ));
                None
            }
        }
    }

    pub(super) fn name(&mut self, flag: &str, text: &str) {
        if !is_name(text) {
            self.problem(format!("--{flag} must be {A_NAME}, not {}", shown(text)));
        }
    }

    /// The name that a model has from its file, which this flag names, where no other flag gives it one.
    pub(super) fn name_of_file(&mut self, flag: &str, text: &str) {
        if !is_name(text) {
            let why = format!("which must be {A_NAME}, not {}", shown(text));
            self.problem(format!(
                "--{flag}: the name of the file cannot be the model's name, {why}; give --alias NAME"
            ));
        }
    }

    pub(super) fn finish<T>(self, settings: T) -> Result<T, Problems> {
        if self.0.is_empty() { Ok(settings) } else { Err(Problems(self.0)) }
    }
}

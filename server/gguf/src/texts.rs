//! What a file tells of itself in words, which ends in terminals, logs and a status.
//!
//! A control character in it could colour a terminal or begin a line that looks like another's. Whatever shows such a text
//! escapes it ([`crate::error::printable`]), so that the file is served; whoever gave it is told. Absent: the chat template
//! and the tokens, which are shown nowhere, texts that are too long to be kept, and those in arrays.

use crate::error::printable;
use crate::finding::{Code, Finding};
use crate::value::{Metadata, Value};

/// Where the format keeps them.
const PREFIX: &str = "general.";
/// Those that are shown within a line, where a line end is as odd as the others.
const OF_ONE_LINE: [&str; 2] = ["general.name", "general.version"];

/// The first text with a control character, and how many others have one.
pub(crate) fn control_characters(metadata: &Metadata) -> Option<Finding> {
    let mut odd: Vec<(u64, &str, &str)> = metadata
        .iter()
        .filter_map(|(key, entry)| match &entry.value {
            Value::Text { text: Some(text), .. } if has_control(key, text) => Some((entry.offset, key, text.as_str())),
            _ => None,
        })
        .collect();
    odd.sort_unstable();
    let (&(offset, key, text), others) = odd.split_first()?;
    let (key, text) = (printable(key), printable(text));
    let more = match others.len() {
        0 => String::new(),
        1 => ", and so has another text".to_owned(),
        count => format!(", and so have {count} other texts"),
    };
    let message = format!("{key} has a control character{more}; it is shown escaped: \"{text}\"");
    let finding = Finding::new(Code::ControlInText, "header", format!("\"{text}\""), "printable characters");
    Some(finding.about(key).at(offset).saying(message))
}

fn has_control(key: &str, text: &str) -> bool {
    let is_laid_out = |c: char| matches!(c, '\n' | '\r' | '\t') && !OF_ONE_LINE.contains(&key);
    key.starts_with(PREFIX) && text.chars().any(|c| c.is_control() && !is_laid_out(c))
}

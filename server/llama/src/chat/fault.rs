//! What went wrong in a template, in one sentence with the line: from what llama.cpp says, which is for a terminal.

use serde::Deserialize;

use super::limits::{MAX_QUOTED_BYTES, MAX_SAID_BYTES, TEMPLATE_CPU_MS};
use crate::error::{ChatError, TemplateLimit};

/// An error as `shim.h` has it.
#[derive(Deserialize)]
struct Failure {
    limit: String,
    message: String,
}

/// What a template that calls `raise_exception` is quoted with.
const RAISED: &str = "Jinja Exception: ";

/// Makes an error of the shim's; `template` is the source.
pub(super) fn error(answer: &str, template: &str) -> ChatError {
    let Ok(Failure { limit, message }) = serde_json::from_str(answer) else {
        return ChatError::Template(answer.to_owned());
    };
    let (place, what) = place(&message, template);
    let limit = match limit.as_str() {
        "time" => Some(TemplateLimit::Time),
        "memory" => Some(TemplateLimit::Memory),
        "stack" => Some(TemplateLimit::Depth),
        _ => None,
    };
    match limit {
        Some(limit) => ChatError::TemplateLimit { limit, at: place.map(|place| format!("at {place}")) },
        None => {
            let refused = what.strip_prefix(RAISED);
            let what = refused.unwrap_or(&what);
            let text = place.map_or_else(|| what.to_owned(), |place| format!("{place}: {what}"));
            if refused.is_some() { ChatError::TemplateRefused(text) } else { ChatError::Template(text) }
        }
    }
}

impl std::fmt::Display for TemplateLimit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Time => write!(f, "it computes for more than {TEMPLATE_CPU_MS} ms"),
            Self::Memory => f.write_str("it takes more memory than rendering a chat may"),
            Self::Depth => f.write_str("it calls itself, or nests, without end"),
        }
    }
}

/// Where it was, if llama.cpp says that, and what it says besides.
fn place(message: &str, template: &str) -> (Option<String>, String) {
    let told = message.split_once("While executing ").and_then(|(_, told)| {
        let (_, at) = told.split_once(" at line ")?;
        let (line, rest) = at.split_once(", column ")?;
        let (column, _) = rest.split_once(' ')?;
        let (_, what) = message.split_once("\nError: ")?;
        Some((line.parse::<usize>().ok()?, column.parse::<usize>().ok()?, what))
    });
    match told {
        Some((line, column, what)) => {
            let text = template.lines().nth(line.saturating_sub(1)).unwrap_or_default();
            let quoted = excerpt(text, column.saturating_sub(1));
            (Some(format!("line {line}, `{quoted}`")), one_line(what))
        }
        None => (None, one_line(message)),
    }
}

/// The line, or the part of a long one that begins a little before the column.
fn excerpt(line: &str, column: usize) -> String {
    let indented = line.len() - line.trim_start().len();
    let mut from =
        if line.trim().len() <= MAX_QUOTED_BYTES { indented } else { column.saturating_sub(MAX_QUOTED_BYTES / 3) };
    from = from.min(line.len());
    while !line.is_char_boundary(from) {
        from -= 1;
    }
    let mut to = (from + MAX_QUOTED_BYTES).min(line.len());
    while !line.is_char_boundary(to) {
        to -= 1;
    }
    line[from..to].trim_end().to_owned()
}

/// Without line breaks, and cut where a template says much: it may say all of a message.
fn one_line(text: &str) -> String {
    let mut line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.len() > MAX_SAID_BYTES {
        line.truncate(line.floor_char_boundary(MAX_SAID_BYTES));
        line.push('…');
    }
    line
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn told(limit: &str, message: &str, template: &str) -> ChatError {
        error(&serde_json::json!({"limit": limit, "message": message}).to_string(), template)
    }

    #[test]
    fn what_llama_cpp_says_becomes_a_sentence_with_the_line() {
        let template = "one\n  {{ m.content.nope() }}\n";
        let message = "\n------------\nWhile executing CallExpression at line 2, column 6 in source:\n...x...\n  ^\nError: Callee is not a function";
        assert_eq!(
            told("", message, template),
            ChatError::Template(String::from("line 2, `{{ m.content.nope() }}`: Callee is not a function"))
        );
        assert_eq!(
            told("time", message, template),
            ChatError::TemplateLimit {
                limit: TemplateLimit::Time,
                at: Some(String::from("at line 2, `{{ m.content.nope() }}`"))
            }
        );
        let raised = message.replace("Callee is not a function", "Jinja Exception: no system text");
        assert_eq!(
            told("", &raised, template),
            ChatError::TemplateRefused(String::from("line 2, `{{ m.content.nope() }}`: no system text"))
        );
        assert_eq!(
            told("stack", "std::bad_alloc", ""),
            ChatError::TemplateLimit { limit: TemplateLimit::Depth, at: None }
        );
        assert_eq!(
            told("", "parser: Expected 'in'\n...", ""),
            ChatError::Template(String::from("parser: Expected 'in' ..."))
        );
        assert_eq!(error("no JSON", ""), ChatError::Template(String::from("no JSON")));
    }

    #[test]
    fn of_a_long_line_the_part_at_fault_is_quoted() {
        let line = format!("{}{{{{ boom() }}}}{}", "ä".repeat(500), "ö".repeat(500));
        let quoted = excerpt(&line, 1000);
        assert!(quoted.contains("boom()") && quoted.len() <= MAX_QUOTED_BYTES, "{quoted}");
        for column in [0, 7, 5000, usize::MAX] {
            assert!(excerpt(&line, column).len() <= MAX_QUOTED_BYTES);
        }
    }

    #[test]
    fn of_much_that_a_template_says_the_beginning_is_told() {
        let said = one_line(&"ä ".repeat(1 << 20));
        assert!(said.len() <= MAX_SAID_BYTES + '…'.len_utf8() && said.ends_with('…'), "{}", said.len());
    }
}

//! What of settings stands in what is said of them: no secret of an address, nothing that a terminal would obey, and of long texts
//! their beginning.

use std::borrow::Cow;
use std::path::Path;

use gantry_crds::address;

use super::file::HIDDEN;
use super::{MAX_PROBLEM_CHARS, MAX_SHOWN_CHARS};

/// A value in quotes.
pub(crate) fn shown(text: &str) -> String {
    format!("{:?}", cut(&without_secrets(text), MAX_SHOWN_CHARS))
}

/// A path in quotes, which may be an address that names no file.
pub(super) fn shown_path(path: &Path) -> String {
    shown(&path.to_string_lossy())
}

/// A name without quotes.
pub(super) fn shown_name(name: &str) -> String {
    cut(name, MAX_SHOWN_CHARS).escape_debug().to_string()
}

/// A whole mistake, whose own line breaks stay.
pub(super) fn told(problem: &str) -> String {
    let escaped = |c: char| match c {
        '\n' => vec![c],
        c if c.is_control() => c.escape_debug().collect(),
        c => vec![c],
    };
    cut(problem, MAX_PROBLEM_CHARS).chars().flat_map(escaped).collect()
}

/// The beginning of a text, and that it goes on.
fn cut(text: &str, most_chars: usize) -> Cow<'_, str> {
    match text.char_indices().nth(most_chars) {
        Some((at, _)) => Cow::Owned(format!("{}…", &text[..at])),
        None => Cow::Borrowed(text),
    }
}

/// An address without its user, its password and what of its query may be secret.
fn without_secrets(text: &str) -> Cow<'_, str> {
    let Some((scheme, rest)) = text.split_once("://") else { return Cow::Borrowed(text) };
    let before_query = rest.split(['?', '#']).next().unwrap_or_default();
    // A secret key may have slashes in it, and a colon stands before it; a revision or a digest stands behind other at signs.
    let is_user = |before: &str| before.contains(':') || !before.contains('/');
    if let Some((_, after)) = before_query.rsplit_once('@').filter(|(before, _)| is_user(before)) {
        return Cow::Owned(format!("{scheme}://{HIDDEN}@{after}"));
    }
    match address::credential(text) {
        Some(_) => Cow::Owned(format!("{scheme}://{before_query}?{HIDDEN}")),
        None => Cow::Borrowed(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_values_are_cut_and_nothing_reaches_a_terminal() {
        let long = shown(&"9".repeat(1_100_000));
        assert_eq!(long, format!("\"{}…\"", "9".repeat(MAX_SHOWN_CHARS)));
        assert_eq!(shown("\u{1b}[31m"), r#""\u{1b}[31m""#);
        assert_eq!(shown_name("a\n\u{1b}b"), r"a\n\u{1b}b");
        assert_eq!(told("a\n  \u{1b}[31mb\r"), "a\n  \\u{1b}[31mb\\r");
        assert_eq!(told(&"é".repeat(MAX_PROBLEM_CHARS + 1)).chars().count(), MAX_PROBLEM_CHARS + 1);
    }

    #[test]
    fn no_secret_of_an_address_is_shown() {
        for (address, wanted) in [
            ("s3://AK:HUSH@b/x", "s3://***@b/x"),
            ("s3://AK:HU/SH@b/x", "s3://***@b/x"),
            ("https://me@h/x", "https://***@h/x"),
            ("https://me:hush@h/x?token=hush", "https://***@h/x"),
            ("https://h/x?a=1&token=hush", "https://h/x?***"),
            ("https://h/x?a=1", "https://h/x?a=1"),
            ("hf://o/r@main/m.gguf", "hf://o/r@main/m.gguf"),
            ("models/a@b.gguf", "models/a@b.gguf"),
        ] {
            assert_eq!(shown(address), format!("{wanted:?}"), "{address}");
        }
    }
}

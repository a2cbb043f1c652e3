//! Pieces of what is printed: columns, bars, spans of time. What comes from a cluster or a model is printed without control
//! characters, since a terminal obeys those.

// To texts, which takes whatever it is given.
use std::fmt::Write as _;

use console::{measure_text_width, style};
use jiff::{SignedDuration, Timestamp};

/// Cells of a bar.
const BAR_WIDTH: usize = 20;

/// `text` without control characters but for line breaks and tabs.
#[must_use]
pub fn plain(text: &str) -> String {
    text.chars().filter(|&char| !char.is_control() || matches!(char, '\n' | '\t')).collect()
}

/// `text` as part of a line: line breaks are spaces.
#[must_use]
pub fn in_line(text: &str) -> String {
    text.split(|char: char| char.is_control()).filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
}

/// A bar of which `share`, 0 to 1, is done.
#[must_use]
pub fn bar(share: f64) -> String {
    let full = (share.clamp(0.0, 1.0) * BAR_WIDTH as f64).round() as usize;
    format!("{}{}", style("━".repeat(full)).cyan(), style("─".repeat(BAR_WIDTH - full)).dim())
}

/// How much of the time from `began` to `deadline` is over, 0 to 1.
#[must_use]
pub fn share_of_time(began: Timestamp, deadline: Timestamp, now: Timestamp) -> f64 {
    let whole = deadline.duration_since(began).as_secs_f64();
    if whole > 0.0 { (now.duration_since(began).as_secs_f64() / whole).clamp(0.0, 1.0) } else { 1.0 }
}

/// A span of time in its two largest units, e.g. `2m10s`; nothing that is over is negative.
#[must_use]
pub fn span(duration: SignedDuration) -> String {
    let seconds = duration.as_secs().max(0);
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m{}s", seconds % 60),
        (0, _, _) => format!("{hours}h{minutes}m"),
        _ => format!("{days}d{hours}h"),
    }
}

/// Rows below a heading, each column as wide as its widest cell, without spaces at the ends of lines.
#[must_use]
pub fn columns<const N: usize>(heading: [&str; N], rows: &[[String; N]]) -> String {
    let mut widths = heading.map(measure_text_width);
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(measure_text_width(cell));
        }
    }
    let mut text = String::new();
    let heading = heading.map(|title| style(title).bold().to_string());
    for row in std::iter::once(&heading).chain(rows) {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(widths) {
            let padding = width.saturating_sub(measure_text_width(cell)) + 2;
            let _ = write!(line, "{cell}{:padding$}", "");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_is_told_nothing_by_what_is_printed() {
        assert_eq!(plain("a\x1b[31mred\x07\nb\tc"), "a[31mred\nb\tc");
        assert_eq!(in_line("a\r\nb\x1bc"), "a b c");
    }

    #[test]
    fn spans_have_two_units() {
        let of = |seconds| span(SignedDuration::from_secs(seconds));
        assert_eq!([of(-4), of(59), of(130), of(7_260), of(90_000)], ["0s", "59s", "2m10s", "2h1m", "1d1h"]);
    }

    #[test]
    fn columns_are_as_wide_as_what_is_in_them() {
        let rows = [["chat".to_owned(), "1/2".to_owned()], ["a-longer-name".to_owned(), String::new()]];
        assert_eq!(columns(["NAME", "PODS"], &rows), "NAME           PODS\nchat           1/2\na-longer-name\n");
    }

    #[test]
    fn a_bar_is_never_longer_than_itself() {
        for share in [-1.0, 0.0, 0.5, 1.0, 7.0, f64::NAN] {
            assert_eq!(measure_text_width(&bar(share)), BAR_WIDTH);
        }
    }
}

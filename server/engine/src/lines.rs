//! What ends an answer at one of its lines, as editors ask for it of llama-server: a line that is indented too little, and the
//! first line break after a time.

use gantry_core::GenerationParams;

/// How far the lines of an answer have come.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    /// Spaces and tabs that each line after the first must begin with; 0: any number.
    min_indent: u32,
    /// Milliseconds from the first token; `None`: any number.
    timeout_ms: Option<f64>,
    /// Of the line that comes, as long as it has nothing else.
    indent: Option<u32>,
}

impl Lines {
    /// As parameters ask for it.
    pub(crate) fn of(params: &GenerationParams) -> Self {
        let timeout_ms = params.decode_timeout_ms.map(f64::from);
        Self { min_indent: params.min_indent, timeout_ms, indent: None }
    }

    /// Takes more text, so many milliseconds after the first token; where the answer ends within it, how many of its bytes
    /// belong to it.
    pub(crate) fn end_within(&mut self, text: &str, ms: f64) -> Option<usize> {
        if self.min_indent == 0 && self.timeout_ms.is_none() {
            return None;
        }
        for (at, character) in text.char_indices() {
            if let Some(indent) = &mut self.indent {
                if matches!(character, ' ' | '\t') {
                    *indent = indent.saturating_add(1);
                } else if self.indent.take() < Some(self.min_indent) {
                    return Some(at);
                }
            }
            if character == '\n' {
                self.indent = Some(0);
                if self.timeout_ms.is_some_and(|most| ms > most) {
                    return Some(at + 1);
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What of a text is told that comes in such pieces, each a second after the one before.
    fn told(min_indent: u32, decode_timeout_ms: Option<u32>, pieces: &[&str]) -> String {
        let mut lines = Lines::of(&GenerationParams { min_indent, decode_timeout_ms, ..GenerationParams::default() });
        let mut told = String::new();
        for (second, piece) in (0_u32..).zip(pieces) {
            match lines.end_within(piece, f64::from(second) * 1e3) {
                Some(kept) => return told + &piece[..kept],
                None => told.push_str(piece),
            }
        }
        told
    }

    #[test]
    fn a_line_that_is_indented_too_little_ends_the_answer() {
        for (pieces, wanted) in [
            (&["x = 1\n    y", "\n    z\n"][..], "x = 1\n    y\n    z\n"),
            (&["x\n", "  ", "  y\n", "  z"], "x\n    y\n  "),
            (&["x\n\t\t\t\ty\n\t", "\té"], "x\n\t\t\t\ty\n\t\t"),
            // As llama-server has it, an empty line is one.
            (&["x\n", "\n    y"], "x\n"),
            (&["x", "y"], "xy"),
        ] {
            assert_eq!(told(4, None, pieces), wanted);
        }
        assert_eq!(told(0, None, &["x\n", "\ny"]), "x\n\ny");
    }

    #[test]
    fn after_its_time_an_answer_ends_with_its_line() {
        assert_eq!(told(0, Some(1500), &["a\n", "b\n", "c", "d\ne", "f\n"]), "a\nb\ncd\n");
        assert_eq!(told(2, Some(500), &["a\n", " b\n"]), "a\n ");
    }
}

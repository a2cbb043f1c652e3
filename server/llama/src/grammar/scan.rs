//! Reads a GBNF text before llama.cpp's parser does: finds its errors with their positions, and bounds what that parser
//! would not (nesting, which it recurses on; repetitions, which it writes out; names, which it repeats).
//!
//! It accepts what `llama_grammar_parser` accepts, but for repetitions past [`MAX_REPETITIONS`] (which that parser
//! refuses or quietly makes endless) and those whose upper bound is below the lower (on which it would not end).

use std::collections::HashMap;

use super::GrammarError;

/// The most GBNF text of one grammar, in bytes.
pub const MAX_GRAMMAR_TEXT_BYTES: usize = 1 << 20;
/// The most rules, those included that groups and repetitions become.
pub const MAX_GRAMMAR_RULES: usize = 1 << 16;
/// The most elements of all rules after repetitions are written out.
pub const MAX_GRAMMAR_ELEMENTS: usize = 1 << 18;
/// The deepest nesting of groups.
pub const MAX_GRAMMAR_NESTING: usize = 64;
/// The most repetitions that `{m,n}` may name: llama.cpp's own limit.
pub const MAX_REPETITIONS: u64 = 2000;
/// The longest name of a rule, in bytes.
pub const MAX_RULE_NAME_BYTES: usize = 1024;

/// Checks a text, and says where its first rule starts.
pub(super) fn scan(text: &str) -> Result<usize, GrammarError> {
    if text.len() > MAX_GRAMMAR_TEXT_BYTES {
        return Err(GrammarError::TooLarge { what: "bytes of grammar", limit: MAX_GRAMMAR_TEXT_BYTES });
    }
    let mut scan =
        Scan { text: text.as_bytes(), at: 0, rules: 0, elements: 0, defined: HashMap::new(), used: Vec::new() };
    if let Some(nul) = scan.text.iter().position(|&b| b == 0) {
        scan.at = nul;
        return Err(scan.error("a NUL byte"));
    }
    scan.space(true);
    let first = scan.at;
    while scan.at < scan.text.len() {
        scan.rule()?;
    }
    for &(name, at) in &scan.used {
        if !scan.defined.contains_key(name) {
            scan.at = at;
            return Err(scan.error(format!("rule '{}' is not defined", String::from_utf8_lossy(name))));
        }
    }
    if !scan.defined.contains_key(&b"root"[..]) {
        return Err(scan.error("there is no rule 'root' to start from"));
    }
    Ok(first)
}

/// The line and column, from 1, of a byte.
pub(super) fn position(text: &[u8], at: usize) -> (usize, usize) {
    let before = text.get(..at).unwrap_or(text);
    let line_start = before.iter().rposition(|&b| b == b'\n').map_or(0, |newline| newline + 1);
    let characters = before[line_start..].iter().filter(|&&b| b & 0xc0 != 0x80).count();
    (1 + before.iter().filter(|&&b| b == b'\n').count(), 1 + characters)
}

struct Scan<'a> {
    text: &'a [u8],
    at: usize,
    rules: usize,
    elements: usize,
    defined: HashMap<&'a [u8], ()>,
    used: Vec<(&'a [u8], usize)>,
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'-'
}

impl<'a> Scan<'a> {
    fn error(&self, message: impl Into<String>) -> GrammarError {
        let (line, column) = position(self.text, self.at);
        GrammarError::Syntax { line, column, message: message.into() }
    }

    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    /// Steps over a byte if it is this one.
    fn take(&mut self, byte: u8) -> bool {
        let there = self.peek() == Some(byte);
        self.at += usize::from(there);
        there
    }

    fn expect(&mut self, byte: u8, after: &str) -> Result<(), GrammarError> {
        if self.take(byte) { Ok(()) } else { Err(self.error(format!("expected '{}' {after}", char::from(byte)))) }
    }

    fn space(&mut self, newlines: bool) {
        while let Some(byte) = self.peek() {
            match byte {
                b' ' | b'\t' => self.at += 1,
                b'\r' | b'\n' if newlines => self.at += 1,
                b'#' => {
                    while self.peek().is_some_and(|b| b != b'\r' && b != b'\n') {
                        self.at += 1;
                    }
                }
                _ => return,
            }
        }
    }

    fn name(&mut self) -> Result<&'a [u8], GrammarError> {
        let start = self.at;
        while self.peek().is_some_and(is_word) {
            self.at += 1;
        }
        let name = &self.text[start..self.at];
        if name.is_empty() {
            return Err(self.error("expected the name of a rule"));
        }
        if name.len() > MAX_RULE_NAME_BYTES {
            return Err(GrammarError::TooLarge { what: "bytes in the name of a rule", limit: MAX_RULE_NAME_BYTES });
        }
        Ok(name)
    }

    fn rule(&mut self) -> Result<(), GrammarError> {
        let name = self.name()?;
        self.space(false);
        if !self.text[self.at..].starts_with(b"::=") {
            return Err(self.error("expected '::=' after the name of a rule"));
        }
        self.at += 3;
        self.space(true);
        self.grow(1, 1)?;
        self.defined.insert(name, ());
        self.alternates(0)?;
        match self.peek() {
            None => {}
            Some(b'\r' | b'\n') => self.space(true),
            Some(b')') => return Err(self.error("')' closes no group")),
            Some(_) => return Err(self.error("expected an item, '|' or the end of the line")),
        }
        Ok(())
    }

    fn alternates(&mut self, depth: usize) -> Result<(), GrammarError> {
        self.sequence(depth)?;
        while self.take(b'|') {
            self.space(true);
            self.grow(0, 1)?;
            self.sequence(depth)?;
        }
        Ok(())
    }

    fn sequence(&mut self, depth: usize) -> Result<(), GrammarError> {
        // The elements that the last item became.
        let mut item = 0_u64;
        while let Some(byte) = self.peek() {
            match byte {
                b'"' => item = self.literal()?,
                b'[' => item = self.class()?,
                b'<' | b'!' => item = self.token()?,
                b'.' => {
                    self.at += 1;
                    item = 1;
                }
                b'(' => {
                    self.group(depth)?;
                    item = 1;
                }
                b'*' | b'+' | b'?' | b'{' => {
                    item = self.repetition(item, depth > 0)?;
                    continue;
                }
                b if is_word(b) => {
                    let at = self.at;
                    let name = self.name()?;
                    self.used.push((name, at));
                    item = 1;
                }
                _ => return Ok(()),
            }
            self.grow(0, item)?;
            self.space(depth > 0);
        }
        Ok(())
    }

    fn group(&mut self, depth: usize) -> Result<(), GrammarError> {
        if depth >= MAX_GRAMMAR_NESTING {
            return Err(GrammarError::TooLarge { what: "nested groups", limit: MAX_GRAMMAR_NESTING });
        }
        self.at += 1;
        self.space(true);
        self.grow(1, 1)?;
        self.alternates(depth + 1)?;
        self.expect(b')', "at the end of a group")
    }

    fn literal(&mut self) -> Result<u64, GrammarError> {
        let start = self.at;
        self.at += 1;
        let mut characters = 0;
        while !self.take(b'"') {
            self.character(start, "string")?;
            characters += 1;
        }
        Ok(characters)
    }

    fn class(&mut self) -> Result<u64, GrammarError> {
        let start = self.at;
        self.at += 1;
        self.take(b'^');
        let mut elements = 0;
        while !self.take(b']') {
            self.character(start, "character class")?;
            elements += 1;
            if self.peek() == Some(b'-') && self.text.get(self.at + 1).is_some_and(|&b| b != b']') {
                self.at += 1;
                self.character(start, "character class")?;
                elements += 1;
            }
        }
        Ok(elements)
    }

    /// Steps over one character, escaped or not.
    fn character(&mut self, start: usize, what: &str) -> Result<(), GrammarError> {
        match self.peek() {
            None => {
                self.at = start;
                Err(self.error(format!("this {what} does not end")))
            }
            Some(b'\\') => {
                let digits = match self.text.get(self.at + 1) {
                    Some(b'x') => 2,
                    Some(b'u') => 4,
                    Some(b'U') => 8,
                    Some(b't' | b'r' | b'n' | b'\\' | b'"' | b'[' | b']' | b'-') => 0,
                    _ => {
                        return Err(
                            self.error("unknown escape; there are \\x \\u \\U \\t \\r \\n \\\\ \\\" \\[ \\] \\-")
                        );
                    }
                };
                let hex = self.text.get(self.at + 2..self.at + 2 + digits);
                if !hex.is_some_and(|hex| hex.iter().all(u8::is_ascii_hexdigit)) {
                    return Err(self.error(format!("this escape takes {digits} hexadecimal digits")));
                }
                self.at += 2 + digits;
                Ok(())
            }
            Some(_) => {
                self.at += 1;
                while self.peek().is_some_and(|b| b & 0xc0 == 0x80) {
                    self.at += 1;
                }
                Ok(())
            }
        }
    }

    /// `<[id]>` or `<name>`, and with `!` any token but that one. Whether it exists is llama.cpp's to say.
    fn token(&mut self) -> Result<u64, GrammarError> {
        self.take(b'!');
        let start = self.at;
        self.expect(b'<', "before the name of a token")?;
        if self.take(b'[') {
            self.number()?;
            self.expect(b']', "after the id of a token")?;
            self.expect(b'>', "after the id of a token")?;
            return Ok(1);
        }
        while !self.take(b'>') {
            if self.peek().is_none_or(|b| b == b'\n') {
                self.at = start;
                return Err(self.error("the name of this token does not end"));
            }
            self.at += 1;
        }
        Ok(1)
    }

    fn number(&mut self) -> Result<u64, GrammarError> {
        let start = self.at;
        while self.peek().is_some_and(|b| b.is_ascii_digit()) {
            self.at += 1;
        }
        let digits = std::str::from_utf8(&self.text[start..self.at]).unwrap_or_default();
        if digits.is_empty() {
            return Err(self.error("expected a number"));
        }
        // What does not fit is past every limit.
        Ok(digits.parse().unwrap_or(u64::MAX))
    }

    /// A repetition of an item of so many elements; answers how many it becomes.
    fn repetition(&mut self, item: u64, newlines: bool) -> Result<u64, GrammarError> {
        let start = self.at;
        if item == 0 {
            return Err(self.error("there is nothing to repeat before this"));
        }
        let byte = self.peek();
        self.at += 1;
        self.space(newlines);
        let (min, max) = match byte {
            Some(b'*') => (0, None),
            Some(b'+') => (1, None),
            Some(b'?') => (0, Some(1)),
            _ => {
                let min = self.number()?;
                self.space(newlines);
                let max = if self.take(b',') {
                    self.space(newlines);
                    let max = if self.peek().is_some_and(|b| b.is_ascii_digit()) { Some(self.number()?) } else { None };
                    self.space(newlines);
                    max
                } else {
                    Some(min)
                };
                self.expect(b'}', "at the end of a repetition")?;
                self.space(newlines);
                (min, max)
            }
        };
        if min.max(max.unwrap_or(0)) > MAX_REPETITIONS {
            self.at = start;
            return Err(self.error(format!("at most {MAX_REPETITIONS} repetitions")));
        }
        if max.is_some_and(|max| max < min) {
            self.at = start;
            return Err(self.error("the most repetitions are fewer than the least"));
        }
        // As llama.cpp writes them out: `min` copies in place, and a rule of its own for each one more.
        let optional = max.map_or(1, |max| max - min);
        let copies = item.saturating_mul(min.max(1)).saturating_add(1);
        self.grow(optional, copies.saturating_add(optional.saturating_mul(item.saturating_add(3))))?;
        Ok(copies)
    }

    fn grow(&mut self, rules: u64, elements: u64) -> Result<(), GrammarError> {
        self.rules = self.rules.saturating_add(usize::try_from(rules).unwrap_or(usize::MAX));
        self.elements = self.elements.saturating_add(usize::try_from(elements).unwrap_or(usize::MAX));
        if self.rules > MAX_GRAMMAR_RULES {
            return Err(GrammarError::TooLarge { what: "rules", limit: MAX_GRAMMAR_RULES });
        }
        if self.elements > MAX_GRAMMAR_ELEMENTS {
            return Err(GrammarError::TooLarge {
                what: "elements, repetitions written out",
                limit: MAX_GRAMMAR_ELEMENTS,
            });
        }
        Ok(())
    }
}

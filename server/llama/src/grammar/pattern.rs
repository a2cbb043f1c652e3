//! Rewrites a regular expression of a JSON schema into the few forms that llama.cpp's converter turns into GBNF without
//! loss: classes of one character, groups, alternatives and repetitions, anchored at both ends.
//!
//! The grammar sees JSON text, where a quotation mark, a backslash and control characters stand escaped: a literal one
//! is written as its escape, and classes leave them out, so that what matches is always a string. Absent, and refused:
//! look-around, back references, anchors and word boundaries inside, Unicode properties.

use super::scan::MAX_REPETITIONS;

/// The longest pattern, in bytes.
pub const MAX_PATTERN_BYTES: usize = 1024;
/// The deepest nesting of groups in one.
const MAX_PATTERN_NESTING: usize = 32;

type Range = (u32, u32);

const DIGIT: &[Range] = &[(0x30, 0x39)];
const WORD: &[Range] = &[(0x30, 0x39), (0x41, 0x5a), (0x5f, 0x5f), (0x61, 0x7a)];
const SPACE: &[Range] = &[
    (9, 13),
    (0x20, 0x20),
    (0xa0, 0xa0),
    (0x2000, 0x200a),
    (0x2028, 0x2029),
    (0x202f, 0x202f),
    (0x205f, 0x205f),
    (0x3000, 0x3000),
    (0xfeff, 0xfeff),
];
/// What cannot stand in a JSON string as it is.
const ESCAPED: &[Range] = &[(0, 0x1f), (0x22, 0x22), (0x5c, 0x5c), (0x7f, 0x7f), (0xd800, 0xdfff)];
const LINE_ENDS: &[Range] = &[(0x0a, 0x0a), (0x0d, 0x0d), (0x2028, 0x2029)];

/// The pattern in the forms that survive; the error says what cannot be followed.
pub(super) fn rewrite(pattern: &str) -> Result<String, String> {
    if pattern.len() > MAX_PATTERN_BYTES {
        return Err(format!("a pattern has at most {MAX_PATTERN_BYTES} bytes"));
    }
    let mut text: Vec<char> = pattern.chars().collect();
    let anchored_start = text.first() == Some(&'^');
    if anchored_start {
        text.remove(0);
    }
    let escapes = text.iter().rev().skip(1).take_while(|&&c| c == '\\').count();
    let anchored_end = text.last() == Some(&'$') && escapes % 2 == 0;
    if anchored_end {
        text.pop();
    }
    let mut parser = Parser { text, at: 0, out: String::new() };
    let any = class(&complement(&[]))?;
    parser.out.push('^');
    if !anchored_start {
        parser.out += &format!("{any}*");
    }
    parser.out.push('(');
    parser.alternatives(0)?;
    if parser.at < parser.text.len() {
        return Err(String::from("')' closes no group"));
    }
    parser.out.push(')');
    if !anchored_end {
        parser.out += &format!("{any}*");
    }
    parser.out.push('$');
    Ok(parser.out)
}

struct Parser {
    text: Vec<char>,
    at: usize,
    out: String,
}

impl Parser {
    fn peek(&self) -> Option<char> {
        self.text.get(self.at).copied()
    }

    fn take(&mut self, c: char) -> bool {
        let there = self.peek() == Some(c);
        self.at += usize::from(there);
        there
    }

    fn alternatives(&mut self, depth: usize) -> Result<(), String> {
        loop {
            while let Some(c) = self.peek() {
                if c == '|' || c == ')' {
                    break;
                }
                self.atom(depth)?;
                self.quantifier()?;
            }
            if !self.take('|') {
                return Ok(());
            }
            self.out.push('|');
        }
    }

    fn atom(&mut self, depth: usize) -> Result<(), String> {
        let c = self.peek().unwrap_or_default();
        self.at += 1;
        match c {
            '(' => {
                if depth >= MAX_PATTERN_NESTING {
                    return Err(format!("groups nest at most {MAX_PATTERN_NESTING} deep"));
                }
                if self.take('?') && !self.take(':') {
                    return Err(String::from("look-around, named groups and flags cannot be followed"));
                }
                self.out.push('(');
                self.alternatives(depth + 1)?;
                if !self.take(')') {
                    return Err(String::from("a group does not end"));
                }
                self.out.push(')');
            }
            '.' => self.out += &class(&complement(LINE_ENDS))?,
            '[' => {
                let ranges = self.class()?;
                self.out += &class(&ranges)?;
            }
            '*' | '+' | '?' | '{' => return Err(format!("'{c}' has nothing to repeat")),
            '^' | '$' => return Err(String::from("an anchor inside the pattern cannot be followed")),
            '\\' => {
                let ranges = self.escape()?;
                self.literal(&ranges)?;
            }
            c => self.literal(&[(u32::from(c), u32::from(c))])?,
        }
        Ok(())
    }

    /// One character; one that JSON escapes is written as it escapes it.
    fn literal(&mut self, ranges: &[Range]) -> Result<(), String> {
        let escaped = match ranges {
            [(0x22, 0x22)] => Some('"'),
            [(0x5c, 0x5c)] => Some('\\'),
            [(0x0a, 0x0a)] => Some('n'),
            [(0x0d, 0x0d)] => Some('r'),
            [(0x09, 0x09)] => Some('t'),
            _ => None,
        };
        match escaped {
            Some(c) => self.out += &format!("([\\x5C][\\x{:02X}])", u32::from(c)),
            None => self.out += &class(ranges)?,
        }
        Ok(())
    }

    fn hex(&mut self, digits: usize) -> Result<Vec<Range>, String> {
        let text: String = self.text.iter().skip(self.at).take(digits).collect();
        let value = u32::from_str_radix(&text, 16).ok().filter(|_| text.len() == digits);
        self.at += digits;
        value.map(|v| vec![(v, v)]).ok_or_else(|| format!("an escape takes {digits} hexadecimal digits"))
    }

    fn escape(&mut self) -> Result<Vec<Range>, String> {
        let c = self.peek().ok_or("a backslash at the end")?;
        self.at += 1;
        let one = |c: char| vec![(u32::from(c), u32::from(c))];
        Ok(match c {
            'd' => DIGIT.to_vec(),
            'D' => complement(DIGIT),
            'w' => WORD.to_vec(),
            'W' => complement(WORD),
            's' => SPACE.to_vec(),
            'S' => complement(SPACE),
            'n' => one('\n'),
            'r' => one('\r'),
            't' => one('\t'),
            'x' => self.hex(2)?,
            'u' => self.hex(4)?,
            c if c.is_ascii_alphanumeric() => return Err(format!("'\\{c}' cannot be followed")),
            c => one(c),
        })
    }

    /// The characters of a class whose bracket was read.
    fn class(&mut self) -> Result<Vec<Range>, String> {
        let negated = self.take('^');
        let mut ranges: Vec<Range> = Vec::new();
        loop {
            let c = self.peek().ok_or("a character class does not end")?;
            self.at += 1;
            let mut item = match c {
                ']' => break,
                '\\' => self.escape()?,
                c => vec![(u32::from(c), u32::from(c))],
            };
            let upper_follows = self.peek() == Some('-') && self.text.get(self.at + 1).is_some_and(|&c| c != ']');
            if let ([(low, high)], true) = (item.as_slice(), upper_follows)
                && low == high
            {
                self.at += 1;
                let c = self.peek().ok_or("a character class does not end")?;
                self.at += 1;
                let upper = if c == '\\' { self.escape()? } else { vec![(u32::from(c), u32::from(c))] };
                match upper.as_slice() {
                    [(upper, same)] if upper == same && upper >= low => item = vec![(*low, *upper)],
                    _ => return Err(String::from("a range in a character class runs backwards")),
                }
            }
            ranges.extend(item);
        }
        Ok(if negated { complement(&ranges) } else { ranges })
    }

    fn quantifier(&mut self) -> Result<(), String> {
        match self.peek() {
            Some(c @ ('*' | '+' | '?')) => {
                self.at += 1;
                self.out.push(c);
            }
            Some('{') => {
                let end = self.text.iter().skip(self.at).position(|&c| c == '}').ok_or("'{' is not closed")?;
                let inside: String = self.text[self.at + 1..self.at + end].iter().collect();
                self.at += end + 1;
                let number = |text: &str| {
                    let n = text.parse::<u64>().map_err(|_| format!("'{{{inside}}}' is not a repetition"))?;
                    if n > MAX_REPETITIONS { Err(format!("at most {MAX_REPETITIONS} repetitions")) } else { Ok(n) }
                };
                match inside.split_once(',') {
                    None => self.out += &format!("{{{}}}", number(&inside)?),
                    Some((min, "")) => self.out += &format!("{{{},}}", number(min)?),
                    Some((min, max)) => {
                        let (min, max) = (number(min)?, number(max)?);
                        if max < min {
                            return Err(format!("'{{{inside}}}' is not a repetition"));
                        }
                        self.out += &format!("{{{min},{max}}}");
                    }
                }
            }
            _ => return Ok(()),
        }
        // A lazy repetition matches the same texts.
        self.take('?');
        if matches!(self.peek(), Some('*' | '+' | '?' | '{')) {
            return Err(String::from("a repetition of a repetition; put a group around it"));
        }
        Ok(())
    }
}

/// All characters outside the ranges.
fn complement(ranges: &[Range]) -> Vec<Range> {
    let mut sorted = ranges.to_vec();
    sorted.sort_unstable();
    let (mut out, mut from) = (Vec::new(), 0);
    for (low, high) in sorted {
        if low > from {
            out.push((from, low - 1));
        }
        from = from.max(high.saturating_add(1));
    }
    if from <= 0x10_ffff {
        out.push((from, 0x10_ffff));
    }
    out
}

/// A class of those of the characters that stand in a JSON string as they are.
fn class(ranges: &[Range]) -> Result<String, String> {
    let mut outside = complement(ranges);
    outside.extend(ESCAPED);
    let plain = complement(&outside);
    if plain.is_empty() {
        return Err(String::from("a character that JSON escapes cannot be matched by a class"));
    }
    let mut out = String::from("[");
    for (low, high) in plain {
        out += &format!("\\U{low:08X}");
        if high > low {
            out += &format!("-\\U{high:08X}");
        }
    }
    out.push(']');
    Ok(out)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_cannot_be_followed_is_refused() {
        for bad in [
            "^(?=a)$",
            "^a^$",
            "^a$b$",
            "^\\bx$",
            "^(a$",
            "^a)$",
            "^[a$",
            "^*$",
            "^a{3,2}$",
            "^a{9999}$",
            "^a**$",
            "^[z-a]$",
            "^\\u12$",
            "^\\",
            "^a{$",
            "^[\\x00]$",
            "^\\p{L}$",
            &"(".repeat(40),
            &"a".repeat(2000),
        ] {
            assert!(rewrite(bad).is_err(), "{bad}");
        }
        for good in ["", "^$", "a", "^a|b$", "^\\d{4}-\\d{2}$", "^[^a-z]+?$", "^\"\\\\$", "^\\$$", "^(?:a|b)*$"] {
            assert!(rewrite(good).is_ok(), "{good}: {:?}", rewrite(good));
        }
    }

    #[test]
    fn classes_leave_out_what_json_escapes() {
        assert_eq!(class(&[(0x20, 0x23)]).unwrap(), "[\\U00000020-\\U00000021\\U00000023]");
        assert_eq!(complement(&[(5, 7), (0, 2)]), [(3, 4), (8, 0x10_ffff)]);
        assert_eq!(rewrite("^\"$").unwrap(), "^(([\\x5C][\\x22]))$");
    }
}

//! Reads an answer while it comes: what the model thinks, what it says and which tools it calls, each told as soon as it is known
//! and once.
//!
//! llama.cpp's parser reads an answer from its beginning, so it is not asked at each token. Where it last saw plain text or a thought
//! that goes on, text without any sign that markup is written with goes on with that, unread. Otherwise it reads again once the
//! answer has grown by a share of its length ([`GROWTH_SHARE`]), so that all of an answer is read a bounded number of times,
//! however long it is. What cannot be read is text as it stands. Absent: tokens, and characters that are not whole.

use std::time::{Duration, Instant};

use gantry_core::ToolCallDelta;
use gantry_llama::{AnswerForm, AnswerParser, ChatError, ParsedAnswer};

/// An answer of `n` bytes is read again once it has grown by `n / GROWTH_SHARE`: in all some `2 * GROWTH_SHARE` times its length.
const GROWTH_SHARE: usize = 16;
/// Until it is so long, in bytes, it is read at each piece.
const READ_EACH_UP_TO: usize = 256;
/// The longest that reading one answer may take in all; what comes after is text as it stands. The thread is everybody's.
const MAX_READING: Duration = Duration::from_secs(1);
/// Random characters of a call's id.
const CALL_ID_DIGITS: usize = 24;

/// What a reader has found out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// More of what the model thinks.
    Reasoning(String),
    /// More of what it says.
    Text(String),
    /// More of a call.
    Call { index: u32, delta: ToolCallDelta },
}

/// What text goes on with that no markup is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Open {
    Reasoning,
    Text,
}

/// What was told of a call.
#[derive(Debug, Default)]
struct ToldCall {
    arguments_bytes: usize,
    ended: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct AnswerReader {
    parser: AnswerParser,
    /// Calls are not told: none was allowed.
    drops_calls: bool,
    /// White space before the first of the text is not told.
    trims_text: bool,
    markup: Vec<String>,
    /// What markup begins with, white space aside.
    first_signs: Vec<char>,
    answer: String,
    /// How much of it the parser has read, or was told without it.
    read_bytes: usize,
    open: Option<Open>,
    /// What it is told from here on is text, since the parser made nothing of it.
    is_plain: bool,
    /// Of that nothing is told any more: markup came where no call may.
    is_silent: bool,
    /// How long reading took so far.
    reading: Duration,
    /// Nothing follows.
    is_over: bool,
    reasoning_bytes: usize,
    text_bytes: usize,
    calls: Vec<ToldCall>,
    /// How much the parser has read in all.
    #[cfg(test)]
    parsed_bytes: usize,
}

impl AnswerReader {
    /// A reader of answers of this form.
    ///
    /// # Errors
    /// When it is no form.
    pub(crate) fn new(form: &AnswerForm, drops_calls: bool) -> Result<Self, ChatError> {
        let first_signs = form.markup.iter().filter_map(|markup| markup.trim_start().chars().next()).collect();
        Ok(Self {
            parser: AnswerParser::new(form)?,
            markup: form.markup.clone(),
            drops_calls,
            trims_text: false,
            first_signs,
            answer: String::new(),
            read_bytes: 0,
            open: None,
            is_plain: false,
            is_silent: false,
            reading: Duration::ZERO,
            is_over: false,
            reasoning_bytes: 0,
            text_bytes: 0,
            calls: Vec::new(),
            #[cfg(test)]
            parsed_bytes: 0,
        })
    }

    /// Has white space between a thought and the text be part of neither.
    pub(crate) fn trim_text(&mut self) {
        self.trims_text = true;
    }

    /// Takes more of the answer, and puts what is known by it to `out`.
    pub(crate) fn push(&mut self, more: &str, out: &mut Vec<Piece>) {
        if more.is_empty() {
            return;
        }
        if self.is_plain {
            self.tell_plain(more.to_owned(), out);
            return;
        }
        self.answer.push_str(more);
        let unread = &self.answer[self.read_bytes..];
        if let Some(open) = self.open
            && !unread.contains(|c: char| self.may_be_markup(c))
        {
            // White space at the end may belong to markup that follows.
            let known = unread.trim_end().to_owned();
            self.read_bytes += known.len();
            self.tell(open, known, out);
            return;
        }
        if self.answer.len() <= READ_EACH_UP_TO || unread.len() >= self.answer.len() / GROWTH_SHARE {
            self.read(out);
        }
    }

    /// Ends the answer; `is_cut`: the model would have gone on.
    pub(crate) fn finish(&mut self, is_cut: bool, out: &mut Vec<Piece>) {
        if self.is_plain || self.answer.is_empty() {
            return;
        }
        self.is_over = true;
        let Some(parsed) = self.read(out) else { return };
        if parsed.whole
            && let Some(last) = self.calls.len().checked_sub(1)
        {
            self.end_call(last, out);
        }
        // What might have become markup is text after all.
        let is_markup = self.markup.iter().any(|markup| parsed.held.contains(markup.as_str()));
        if !is_cut && !parsed.whole && parsed.calls.is_empty() && !is_markup {
            self.tell(Open::Text, parsed.held, out);
        }
    }

    fn may_be_markup(&self, c: char) -> bool {
        let is_plain =
            c.is_alphanumeric() || c.is_whitespace() || matches!(c, '.' | ',' | ';' | '?' | '!' | '\'' | '-');
        !is_plain || self.first_signs.contains(&c)
    }

    fn tell(&mut self, open: Open, mut text: String, out: &mut Vec<Piece>) {
        if text.is_empty() {
            return;
        }
        match open {
            Open::Reasoning => {
                self.reasoning_bytes += text.len();
                out.push(Piece::Reasoning(text));
            }
            Open::Text => {
                self.text_bytes += text.len();
                if self.trims_text {
                    text.drain(..text.len() - text.trim_start().len());
                    self.trims_text = text.is_empty();
                }
                if !text.is_empty() {
                    out.push(Piece::Text(text));
                }
            }
        }
    }

    /// Tells text that nothing was made of; where no call may be told, only what comes before the signs of one.
    fn tell_plain(&mut self, mut text: String, out: &mut Vec<Piece>) {
        if self.is_silent {
            return;
        }
        if self.drops_calls
            && let Some(at) = self.markup.iter().filter_map(|markup| text.find(markup.trim_start())).min()
        {
            text.truncate(at);
            self.is_silent = true;
        }
        self.tell(Open::Text, text, out);
    }

    /// Reads all that there is, and tells what is new of it.
    fn read(&mut self, out: &mut Vec<Piece>) -> Option<ParsedAnswer> {
        #[cfg(test)]
        {
            self.parsed_bytes += self.answer.len();
        }
        let begun = Instant::now();
        let parsed = self.parser.parse(&self.answer).map_err(|error| error.to_string());
        self.reading += begun.elapsed();
        let in_time = (self.reading <= MAX_READING).then_some(()).ok_or_else(|| "reading it takes too long".to_owned());
        let parsed = match in_time.and(parsed) {
            Ok(parsed) => parsed,
            Err(error) => {
                tracing::debug!(error, "an answer is passed on as it stands");
                let rest = self.answer[self.read_bytes..].to_owned();
                (self.is_plain, self.answer) = (true, String::new());
                self.tell_plain(rest, out);
                return None;
            }
        };
        self.read_bytes = self.answer.len();
        self.open = match parsed.open.as_str() {
            "reasoning" => Some(Open::Reasoning),
            "content" => Some(Open::Text),
            _ => None,
        };
        if !self.drops_calls {
            self.tell_arguments(&parsed, out);
        }
        // What was told before stays so, should a parser think better of it, as it does of white space that something begins with.
        // White space behind a call is told with what follows it, or not at all.
        for (open, text) in [(Open::Reasoning, &parsed.reasoning), (Open::Text, &parsed.content)] {
            let told = if open == Open::Text { self.text_bytes } else { self.reasoning_bytes };
            let more = text.get(told..).unwrap_or_default().to_owned();
            let is_behind_calls = !self.calls.is_empty();
            if more.trim_start().is_empty() && (is_behind_calls || (told == 0 && !self.is_over)) {
                self.open = self.open.filter(|now| *now != open);
                continue;
            }
            // A call that is still read as one has ended where a thought or text follows it.
            if is_behind_calls && self.calls.len() <= parsed.calls.len() {
                self.end_call(self.calls.len() - 1, out);
            }
            self.tell(open, more, out);
        }
        if !self.drops_calls {
            self.tell_new_calls(&parsed, out);
        }
        Some(parsed)
    }

    /// Tells more of the arguments of calls that have begun.
    fn tell_arguments(&mut self, parsed: &ParsedAnswer, out: &mut Vec<Piece>) {
        for (index, (call, told)) in parsed.calls.iter().zip(&mut self.calls).enumerate() {
            let more = call.arguments.get(told.arguments_bytes..).filter(|more| !told.ended && !more.is_empty());
            if let Some(more) = more {
                told.arguments_bytes += more.len();
                let delta = ToolCallDelta::Arguments(more.to_owned());
                out.push(Piece::Call { index: wire_index(index), delta });
            }
        }
    }

    /// Tells of calls that have not begun.
    fn tell_new_calls(&mut self, parsed: &ParsedAnswer, out: &mut Vec<Piece>) {
        for (index, call) in parsed.calls.iter().enumerate().skip(self.calls.len()) {
            if call.name.is_empty() {
                break;
            }
            if let Some(before) = index.checked_sub(1) {
                self.end_call(before, out);
            }
            self.calls.push(ToldCall::default());
            let id = if call.id.is_empty() { call_id() } else { call.id.clone() };
            let delta = ToolCallDelta::Begun { id, name: call.name.clone() };
            out.push(Piece::Call { index: wire_index(index), delta });
            self.tell_arguments(parsed, out);
        }
    }

    /// Tells that a call's arguments are whole, of which what comes behind it or the answer's end is the sign.
    fn end_call(&mut self, call: usize, out: &mut Vec<Piece>) {
        if let Some(told) = self.calls.get_mut(call).filter(|told| !told.ended) {
            told.ended = true;
            out.push(Piece::Call { index: wire_index(call), delta: ToolCallDelta::Ended });
        }
    }
}

fn wire_index(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

/// A name that no other call has.
fn call_id() -> String {
    let digits = format!("{:032x}", rand::random::<u128>());
    format!("call_{}", &digits[..CALL_ID_DIGITS])
}

#[cfg(test)]
#[path = "answer_tests.rs"]
mod tests;

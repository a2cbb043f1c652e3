//! Names of responses, and of their items, which name the response that they came with.

use std::fmt;

/// What stands before the digits of a response's name.
const PREFIX: &str = "resp_";
/// Hexadecimal digits in it.
const DIGITS: usize = 32;

/// Names a response: `resp_` and 32 hexadecimal digits, and nothing else, so that it may be part of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ResponseId(u128);

impl ResponseId {
    /// Of a number that nobody can guess.
    #[must_use]
    pub const fn new(number: u128) -> Self {
        Self(number)
    }

    /// Reads a name; `None`: no response has it.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        text.strip_prefix(PREFIX).and_then(Self::of_digits)
    }

    /// The response that an item came with, by the item's id.
    pub(crate) fn of_item(id: &str) -> Option<Self> {
        id.split('_').nth(1).and_then(Self::of_digits)
    }

    fn of_digits(digits: &str) -> Option<Self> {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let is_one = digits.len() == DIGITS && digits.bytes().all(is_digit);
        is_one.then(|| u128::from_str_radix(digits, 16).ok().map(Self)).flatten()
    }

    /// Its digits, by which the answer is named too ([`AnswerHead::id`](gantry_core::AnswerHead::id)).
    #[must_use]
    pub fn digits(self) -> String {
        format!("{:0DIGITS$x}", self.0)
    }
}

impl fmt::Display for ResponseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", self.digits())
    }
}

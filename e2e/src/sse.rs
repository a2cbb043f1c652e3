//! Server-sent events, read piece by piece as they come off the wire.
//!
//! Only `data` matters here: OpenAI's streams use no other field. Comments are skipped. A piece may end anywhere, inside
//! a line break or a character included.

/// Longest event that is read, in bytes; a server that sends a longer one is at fault.
pub const MAX_EVENT_BYTES: usize = 1 << 20;

/// An event that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SseError {
    /// It is longer than [`MAX_EVENT_BYTES`].
    TooLong,
    /// It is not UTF-8.
    NotUtf8,
}

impl std::fmt::Display for SseError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::TooLong => write!(f, "an event is longer than {MAX_EVENT_BYTES} bytes"),
            Self::NotUtf8 => f.write_str("an event is not UTF-8"),
        }
    }
}

impl std::error::Error for SseError {}

/// What of a stream has arrived and is not a whole event yet.
#[derive(Debug, Default)]
pub struct SseParser {
    line: Vec<u8>,
    data: Option<String>,
    after_carriage_return: bool,
}

impl SseParser {
    /// Takes in the next piece and returns the `data` of the events that it completes.
    ///
    /// # Errors
    /// When an event is too long or not UTF-8; the rest of the stream cannot be trusted then.
    pub fn push(&mut self, piece: &[u8]) -> Result<Vec<String>, SseError> {
        let mut events = Vec::new();
        for &byte in piece {
            let follows_carriage_return = std::mem::take(&mut self.after_carriage_return);
            match byte {
                b'\n' if follows_carriage_return => {}
                b'\n' | b'\r' => {
                    self.after_carriage_return = byte == b'\r';
                    events.extend(self.end_line()?);
                }
                _ => {
                    self.line.push(byte);
                    if self.line.len() + self.data.as_ref().map_or(0, String::len) > MAX_EVENT_BYTES {
                        return Err(SseError::TooLong);
                    }
                }
            }
        }
        Ok(events)
    }

    /// Whether something has arrived that no event has been made of: the stream was cut.
    #[must_use]
    pub fn has_rest(&self) -> bool {
        !self.line.is_empty() || self.data.is_some()
    }

    fn end_line(&mut self) -> Result<Option<String>, SseError> {
        let line = String::from_utf8(std::mem::take(&mut self.line)).map_err(|_| SseError::NotUtf8)?;
        if line.is_empty() {
            return Ok(self.data.take());
        }
        if let Some(value) = line.strip_prefix("data:") {
            let value = value.strip_prefix(' ').unwrap_or(value);
            match &mut self.data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
                None => self.data = Some(value.to_owned()),
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn parse(pieces: &[&[u8]]) -> (Vec<String>, bool) {
        let mut parser = SseParser::default();
        let events = pieces.iter().flat_map(|piece| parser.push(piece).unwrap()).collect();
        (events, parser.has_rest())
    }

    #[test]
    fn events_are_their_data() {
        let (events, rest) = parse(&[b": hello\n\ndata: {\"a\":1}\n\ndata:b\ndata: c\nid: 7\n\ndata: [DONE]\r\n\r\n"]);
        assert_eq!((events, rest), (vec!["{\"a\":1}".to_owned(), "b\nc".to_owned(), "[DONE]".to_owned()], false));
    }

    #[test]
    fn a_cut_stream_has_a_rest() {
        assert_eq!(parse(&[b"data: a\n\ndata: b\n"]), (vec!["a".to_owned()], true));
        assert_eq!(parse(&[b"data: a\n\nda"]), (vec!["a".to_owned()], true));
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let mut parser = SseParser::default();
        assert_eq!(parser.push(&vec![b'a'; MAX_EVENT_BYTES + 1]), Err(SseError::TooLong));
    }

    proptest! {
        #[test]
        fn where_pieces_end_does_not_matter(
            texts in prop::collection::vec("[^\r\n]{0,12}", 0..8),
            crlf in any::<bool>(),
            cuts in prop::collection::vec(0usize..200, 0..12),
        ) {
            let end = if crlf { "\r\n" } else { "\n" };
            let stream: String = texts.iter().map(|text| format!("data: {text}{end}{end}")).collect();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(stream.len())).collect();
            cuts.extend([0, stream.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|cut| &stream.as_bytes()[cut[0]..cut[1]]).collect();
            let (events, rest) = parse(&pieces);
            prop_assert_eq!(events, texts);
            prop_assert!(!rest);
        }
    }
}

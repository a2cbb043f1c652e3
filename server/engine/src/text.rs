//! From token bytes to text that may be sent: whole characters, and nothing that could still become a stop string.
//!
//! Flow: bytes → [`Utf8Stream`] holds back an incomplete character → [`StopFilter`] holds back a possible beginning of a
//! stop string → text. At the end what is held back is flushed: an incomplete character as U+FFFD, then the text.

/// Joins bytes into characters. Invalid bytes become U+FFFD as `String::from_utf8_lossy` makes them.
#[derive(Debug, Default)]
pub(crate) struct Utf8Stream {
    /// The beginning of a character: three bytes at most.
    held: Vec<u8>,
}

impl Utf8Stream {
    /// Appends to `out` the characters that `bytes` complete.
    pub(crate) fn push(&mut self, bytes: &[u8], out: &mut String) {
        self.held.extend_from_slice(bytes);
        let mut rest = self.held.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    out.push_str(text);
                    rest = &[];
                    break;
                }
                Err(e) => {
                    let (valid, after) = rest.split_at(e.valid_up_to());
                    out.push_str(&String::from_utf8_lossy(valid));
                    rest = after;
                    let Some(invalid) = e.error_len() else { break };
                    out.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[invalid..];
                }
            }
        }
        let done = self.held.len() - rest.len();
        self.held.drain(..done);
    }

    /// Ends the stream: an incomplete character becomes U+FFFD.
    pub(crate) fn finish(&mut self, out: &mut String) {
        if !self.held.is_empty() {
            self.held.clear();
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

/// Finds the first stop string in a stream of text.
#[derive(Debug)]
pub(crate) struct StopFilter {
    stops: Vec<String>,
    /// Text that may be the beginning of a stop string: shorter than the longest one.
    held: String,
    found: Option<usize>,
}

impl StopFilter {
    /// None of the stop strings may be empty; parameters are validated before.
    pub(crate) fn new(stops: Vec<String>) -> Self {
        Self { stops: stops.into_iter().filter(|stop| !stop.is_empty()).collect(), held: String::new(), found: None }
    }

    /// Appends to `out` the text that can be sent, and says whether a stop string ended the stream; nothing after its
    /// beginning is ever sent.
    pub(crate) fn push(&mut self, text: &str, out: &mut String) -> bool {
        if self.stops.is_empty() {
            out.push_str(text);
            return false;
        }
        self.held.push_str(text);
        let found = |(index, stop): (usize, &String)| self.held.find(stop.as_str()).map(|at| (at, index));
        if let Some((at, index)) = self.stops.iter().enumerate().filter_map(found).min() {
            out.push_str(&self.held[..at]);
            self.held.clear();
            self.found = Some(index);
            return true;
        }
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let send = self.held.len() - keep;
        out.push_str(&self.held[..send]);
        self.held.drain(..send);
        false
    }

    /// The stop string that ended the stream, and its place among those that are not empty.
    pub(crate) fn found(&self) -> Option<(usize, &str)> {
        let index = self.found?;
        Some((index, self.stops.get(index)?))
    }

    /// Ends the stream: what was held back is no stop string.
    pub(crate) fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }
}

/// The length of the longest proper beginning of `stop` that `text` ends with.
fn overlap(text: &str, stop: &str) -> usize {
    stop.char_indices().map(|(at, _)| at).skip(1).filter(|&len| text.ends_with(&stop[..len])).last().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode(pieces: &[&[u8]]) -> Vec<String> {
        let mut stream = Utf8Stream::default();
        let mut texts: Vec<String> = pieces
            .iter()
            .map(|piece| {
                let mut out = String::new();
                stream.push(piece, &mut out);
                out
            })
            .collect();
        let mut out = String::new();
        stream.finish(&mut out);
        texts.push(out);
        texts
    }

    #[test]
    fn characters_are_whole() {
        let cases: &[(&[&[u8]], &[&str])] = &[
            (&[b"abc", b"d"], &["abc", "d", ""]),
            (&[b"\xc3", b"\xa9"], &["", "é", ""]),
            (&[b"a\xf0\x9f", b"\x98", b"\x80b"], &["a", "", "😀b", ""]),
            (&[b"\xf0\x9f\x98"], &["", "\u{fffd}"]),
            (&[b"\xff", b"x"], &["\u{fffd}", "x", ""]),
            (&[b"\xc3", b"x"], &["", "\u{fffd}x", ""]),
            (&[b"\xe2\x82", b"\xe2\x82\xac"], &["", "\u{fffd}€", ""]),
            (&[b"\x80\x80"], &["\u{fffd}\u{fffd}", ""]),
            (&[b"", b""], &["", "", ""]),
        ];
        for (pieces, want) in cases {
            assert_eq!(decode(pieces), *want, "{pieces:?}");
        }
    }

    fn filter(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let mut filter = StopFilter::new(stops.iter().map(|&s| s.to_owned()).collect());
        let mut texts = Vec::new();
        for piece in pieces {
            let mut out = String::new();
            let stopped = filter.push(piece, &mut out);
            texts.push(out);
            if stopped {
                return (texts, true);
            }
        }
        let mut out = String::new();
        filter.finish(&mut out);
        texts.push(out);
        (texts, false)
    }

    #[test]
    fn stop_strings_are_never_sent() {
        type Case<'a> = (&'a [&'a str], &'a [&'a str], &'a [&'a str], bool);
        let cases: &[Case<'_>] = &[
            (&[], &["a", "b"], &["a", "b", ""], false),
            (&["END"], &["one END two"], &["one "], true),
            (&["END"], &["one E", "N", "D two"], &["one ", "", ""], true),
            (&["END"], &["one E", "N", "X"], &["one ", "", "ENX", ""], false),
            (&["END"], &["EN"], &["", "EN"], false),
            (&["aab"], &["aa", "ab"], &["", "a"], true),
            (&["b", "ab"], &["xab"], &["x"], true),
            (&["\n\n"], &["a\n", "b\n", "\n"], &["a", "\nb", ""], true),
            (&["é!"], &["caf", "é", "?"], &["caf", "", "é?", ""], false),
            (&["é!"], &["café", "!"], &["caf", ""], true),
            (&["abcd", "cx"], &["abc", "x"], &["", "ab"], true),
        ];
        for (stops, pieces, want, stopped) in cases {
            let (texts, did) = filter(stops, pieces);
            assert_eq!(texts, *want, "{stops:?} {pieces:?}");
            assert_eq!(did, *stopped, "{stops:?} {pieces:?}");
        }
    }

    proptest! {
        #[test]
        fn any_split_of_bytes_gives_the_lossy_text(bytes in proptest::collection::vec(any::<u8>(), 0..64), cuts in proptest::collection::vec(1_usize..7, 0..64)) {
            let mut stream = Utf8Stream::default();
            let (mut out, mut rest) = (String::new(), bytes.as_slice());
            for cut in cuts {
                let (piece, after) = rest.split_at(cut.min(rest.len()));
                stream.push(piece, &mut out);
                prop_assert!(stream.held.len() < 4);
                rest = after;
            }
            stream.push(rest, &mut out);
            stream.finish(&mut out);
            prop_assert_eq!(out, String::from_utf8_lossy(&bytes).into_owned());
        }

        #[test]
        fn any_split_of_text_is_cut_at_the_first_stop(text in "[abé]{0,40}", stops in proptest::collection::vec("[abé]{1,4}", 0..4), cut in 1_usize..5) {
            let mut filter = StopFilter::new(stops.clone());
            let (mut out, mut stopped) = (String::new(), false);
            for piece in text.chars().collect::<Vec<_>>().chunks(cut) {
                stopped = filter.push(&piece.iter().collect::<String>(), &mut out);
                if stopped {
                    break;
                }
            }
            if !stopped {
                filter.finish(&mut out);
            }
            // The stop that is complete first ends the stream; with pieces of one character that is the oracle.
            let ends = stops.iter().filter_map(|s| text.find(s.as_str())).min();
            prop_assert_eq!(stopped, ends.is_some());
            match ends {
                None => prop_assert_eq!(out, text),
                Some(_) => {
                    prop_assert!(text.starts_with(&out));
                    prop_assert!(stops.iter().all(|s| !out.contains(s.as_str())));
                    prop_assert!(stops.iter().any(|s| text[out.len()..].starts_with(s.as_str())));
                }
            }
        }
    }
}

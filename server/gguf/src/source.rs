//! A forward-only byte source that knows how long the file is and how much of it is at hand.
//!
//! Every read first asks [`Source::require`], the one place where "the file ends here", "the header is too long" and
//! "more bytes are needed" are told apart. Absent: seeking, and any allocation by a number from the file.

use std::io::{self, Read};

use crate::error::{Defect, GgufError, Result, malformed};
use crate::limits::{MAX_HEADER_BYTES, READ_BUFFER_BYTES};

/// Bytes of a file from its start.
#[derive(Debug)]
pub(crate) struct Source<R> {
    reader: R,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    offset: u64,
    available: u64,
    file_bytes: u64,
}

impl<R: Read> Source<R> {
    /// `available` of the `file_bytes` can be read from `reader`.
    pub(crate) fn new(reader: R, available: u64, file_bytes: u64) -> Self {
        Self {
            reader,
            buffer: vec![0; READ_BUFFER_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            offset: 0,
            available: available.min(file_bytes),
            file_bytes,
        }
    }

    /// Byte of the file that is read next.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Length of the whole file.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// Refuses now what cannot be read in the end: `bytes` more, part of `what`.
    pub(crate) fn require(&self, bytes: u64, what: &'static str) -> Result<()> {
        let needed = self.offset.saturating_add(bytes);
        let file_bytes = self.file_bytes;
        if needed > file_bytes {
            return malformed(self.offset, Defect::HeaderTruncated { what, needed, file_bytes });
        }
        if needed > MAX_HEADER_BYTES {
            return malformed(self.offset, Defect::HeaderTooLong { limit: MAX_HEADER_BYTES });
        }
        if needed > self.available {
            return Err(GgufError::NeedMoreBytes { at_least: needed });
        }
        Ok(())
    }

    /// The next `N` bytes.
    pub(crate) fn bytes<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N]> {
        let mut out = [0; N];
        let mut filled = 0;
        self.chunks(N as u64, what, |chunk| {
            out[filled..filled + chunk.len()].copy_from_slice(chunk);
            filled += chunk.len();
        })?;
        Ok(out)
    }

    /// The next number.
    pub(crate) fn u32(&mut self, what: &'static str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.bytes(what)?))
    }

    /// The next number.
    pub(crate) fn u64(&mut self, what: &'static str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.bytes(what)?))
    }

    /// Replaces `out` by the next `length` bytes. The caller has checked `length` against a limit.
    pub(crate) fn read_to(&mut self, out: &mut Vec<u8>, length: u64, what: &'static str) -> Result<()> {
        out.clear();
        self.chunks(length, what, |chunk| out.extend_from_slice(chunk))
    }

    /// Passes over the next `length` bytes.
    pub(crate) fn skip(&mut self, length: u64, what: &'static str) -> Result<()> {
        self.chunks(length, what, |_| {})
    }

    /// Hands the next `length` bytes to `each`, in pieces of at most the buffer's size.
    pub(crate) fn chunks(&mut self, length: u64, what: &'static str, mut each: impl FnMut(&[u8])) -> Result<()> {
        self.require(length, what)?;
        let mut left = length;
        while left > 0 {
            if self.start == self.end {
                self.fill()?;
            }
            let have = self.end - self.start;
            let take = usize::try_from(left).map_or(have, |left| left.min(have));
            each(&self.buffer[self.start..self.start + take]);
            self.start += take;
            self.offset += take as u64;
            left -= take as u64;
        }
        Ok(())
    }

    fn fill(&mut self) -> Result<()> {
        let offset = self.offset;
        loop {
            match self.reader.read(&mut self.buffer) {
                Ok(0) => {
                    let source =
                        io::Error::new(io::ErrorKind::UnexpectedEof, "the file became shorter while it was read");
                    return Err(GgufError::Io { offset, source });
                }
                Ok(count) => {
                    self.start = 0;
                    self.end = count;
                    return Ok(());
                }
                Err(source) if source.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(GgufError::Io { offset, source }),
            }
        }
    }
}

/// Checks a long text for UTF-8 piece by piece, so that it need not be kept.
#[derive(Debug, Default)]
pub(crate) struct Utf8Check {
    partial: [u8; 4],
    partial_len: usize,
    invalid: bool,
}

impl Utf8Check {
    /// Takes the next piece.
    pub(crate) fn feed(&mut self, mut piece: &[u8]) {
        while self.partial_len > 0 && !self.invalid {
            let Some((&next, rest)) = piece.split_first() else { return };
            piece = rest;
            self.partial[self.partial_len] = next;
            self.partial_len += 1;
            match std::str::from_utf8(&self.partial[..self.partial_len]) {
                Ok(_) => self.partial_len = 0,
                // A fourth byte always decides, so that the array cannot overflow.
                Err(error) => self.invalid = error.error_len().is_some(),
            }
        }
        if let Err(error) = std::str::from_utf8(piece) {
            let rest = &piece[error.valid_up_to()..];
            if error.error_len().is_some() {
                self.invalid = true;
            } else {
                self.partial[..rest.len()].copy_from_slice(rest);
                self.partial_len = rest.len();
            }
        }
    }

    /// Whether all pieces together were UTF-8.
    pub(crate) fn finish(&self) -> bool {
        !self.invalid && self.partial_len == 0
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn utf8_in_pieces_is_judged_as_utf8_whole(
            bytes in prop_oneof![
                proptest::collection::vec(any::<u8>(), 0..40),
                any::<String>().prop_map(String::into_bytes),
                (any::<String>(), any::<u8>(), any::<u8>()).prop_map(|(text, at, byte)| {
                    let mut bytes = text.into_bytes();
                    if !bytes.is_empty() {
                        let at = usize::from(at) % bytes.len();
                        bytes[at] = byte;
                    }
                    bytes
                }),
            ],
            cut in 1_usize..7,
        ) {
            let mut check = Utf8Check::default();
            bytes.chunks(cut).for_each(|piece| check.feed(piece));
            prop_assert_eq!(check.finish(), std::str::from_utf8(&bytes).is_ok());
        }
    }

    #[test]
    fn the_three_ends_are_told_apart() {
        let source = Source::new(&[0_u8; 16][..], 16, 64);
        assert!(source.require(16, "x").is_ok());
        assert!(matches!(source.require(17, "x"), Err(GgufError::NeedMoreBytes { at_least: 17 })));
        assert!(matches!(source.require(65, "x").unwrap_err().defect(), Some(Defect::HeaderTruncated { .. })));
        assert!(matches!(source.require(u64::MAX, "x").unwrap_err().defect(), Some(Defect::HeaderTruncated { .. })));
        let long = Source::new(&[0_u8; 16][..], u64::MAX, u64::MAX);
        assert!(matches!(
            long.require(MAX_HEADER_BYTES + 1, "x").unwrap_err().defect(),
            Some(Defect::HeaderTooLong { .. })
        ));
    }

    #[test]
    fn a_file_that_shrinks_is_an_io_error() {
        let mut source = Source::new(&[0_u8; 3][..], 8, 8);
        assert!(matches!(source.u64("x"), Err(GgufError::Io { .. })));
    }
}

//! The envelope of saved state: what it holds, for which layout, and a checksum over all of it.

use crate::error::ChunkFault;

/// What the bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The rows of consecutive tokens.
    Rows,
    /// llama.cpp's opaque state of a whole sequence.
    Whole,
}

impl Kind {
    fn magic(self) -> &'static [u8; 8] {
        // The last character is the format's version.
        match self {
            Self::Rows => b"GNTRYkv1",
            Self::Whole => b"GNTRYsq1",
        }
    }
}

/// What stands before the bytes of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    /// Hash of the fingerprint that the reader must have.
    pub(crate) fingerprint: u64,
    /// Position of the first token.
    pub(crate) position: u32,
    pub(crate) tokens: u32,
}

/// Magic, fingerprint, position, tokens, checksum.
pub(crate) const HEAD_BYTES: usize = 32;
const CHECKSUM_AT: usize = 24;

/// Room for the head; [`seal`] fills it when the payload stands behind it.
pub(crate) fn begin(payload_bytes: usize) -> Vec<u8> {
    let mut chunk = Vec::with_capacity(HEAD_BYTES + payload_bytes);
    chunk.resize(HEAD_BYTES, 0);
    chunk
}

/// Writes the head of a chunk that [`begin`] made.
pub(crate) fn seal(chunk: &mut [u8], kind: Kind, head: Head) {
    chunk[..8].copy_from_slice(kind.magic());
    chunk[8..16].copy_from_slice(&head.fingerprint.to_le_bytes());
    chunk[16..20].copy_from_slice(&head.position.to_le_bytes());
    chunk[20..CHECKSUM_AT].copy_from_slice(&head.tokens.to_le_bytes());
    let sum = checksum(&chunk[..CHECKSUM_AT]) ^ checksum(&chunk[HEAD_BYTES..]).rotate_left(1);
    chunk[CHECKSUM_AT..HEAD_BYTES].copy_from_slice(&sum.to_le_bytes());
}

/// The head and the payload, where nothing was damaged and the fingerprint is the reader's.
pub(crate) fn open(chunk: &[u8], kind: Kind, fingerprint: u64) -> Result<(Head, &[u8]), ChunkFault> {
    let (head, payload) = chunk.split_at_checked(HEAD_BYTES).ok_or(ChunkFault::Truncated)?;
    if &head[..8] != kind.magic() {
        return Err(ChunkFault::Foreign);
    }
    if checksum(&head[..CHECKSUM_AT]) ^ checksum(payload).rotate_left(1) != word(&head[CHECKSUM_AT..]) {
        return Err(ChunkFault::Damaged);
    }
    let numbers = word(&head[16..CHECKSUM_AT]);
    let read = Head {
        fingerprint: word(&head[8..16]),
        position: (numbers & u64::from(u32::MAX)) as u32,
        tokens: (numbers >> 32) as u32,
    };
    if read.fingerprint == fingerprint { Ok((read, payload)) } else { Err(ChunkFault::Fingerprint) }
}

fn word(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Finds damage, not malice. Four lanes, since one waits for its multiplication; each step can be undone, so that a
/// change within one word always shows.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    let step = |lane: u64, word: u64| (lane ^ word).wrapping_mul(ODD).rotate_left(29);
    let mut lanes = [1_u64, 2, 3, 4];
    let (blocks, rest) = bytes.as_chunks::<32>();
    for block in blocks {
        for (lane, eight) in lanes.iter_mut().zip(block.as_chunks::<8>().0) {
            *lane = step(*lane, u64::from_le_bytes(*eight));
        }
    }
    let mut sum = lanes.into_iter().fold(bytes.len() as u64, step);
    let (words, bytes) = rest.as_chunks::<8>();
    for eight in words {
        sum = step(sum, u64::from_le_bytes(*eight));
    }
    for &byte in bytes {
        sum = step(sum, u64::from(byte));
    }
    sum ^ (sum >> 32)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn any_changed_byte_and_any_cut_is_found() {
        let head = Head { fingerprint: 7, position: 64, tokens: 3 };
        let mut chunk = begin(75);
        chunk.extend((0..75_u8).map(|i| i.wrapping_mul(31)));
        seal(&mut chunk, Kind::Rows, head);
        assert_eq!(open(&chunk, Kind::Rows, 7).unwrap(), (head, &chunk[HEAD_BYTES..]));
        assert_eq!(open(&chunk, Kind::Rows, 8), Err(ChunkFault::Fingerprint));
        assert_eq!(open(&chunk, Kind::Whole, 7), Err(ChunkFault::Foreign));
        for end in 0..chunk.len() {
            assert!(open(&chunk[..end], Kind::Rows, 7).is_err(), "cut at {end}");
        }
        for at in 0..chunk.len() {
            for bit in 0..8 {
                let mut damaged = chunk.clone();
                damaged[at] ^= 1 << bit;
                assert!(open(&damaged, Kind::Rows, 7).is_err(), "bit {bit} of {at}");
            }
        }
    }
}

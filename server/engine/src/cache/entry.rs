//! A block as bytes: what a file of the disk tier holds. Pure.
//!
//! ```text
//! magic 8 | version u32 | tokens in a block u32 | fingerprint 32 | parent 32 | tokens 4 each | payload length u64 |
//! payload | SHA-256 of all before, 32
//! ```
//!
//! Little endian. The length of the whole follows from the header, so that a file cut short or grown is seen before
//! anything is allocated for it. Absent: compression (KV rows hardly shrink) and encryption.

use sha2::{Digest as _, Sha256};
use thiserror::Error;

use super::key::{BlockHash, Fingerprint, HASH_BYTES};
use super::limits::{BLOCK_TOKENS, MAX_PAYLOAD_BYTES};

/// Raised with every change of the layout; a file of another version is a miss.
pub(crate) const DISK_FORMAT_VERSION: u32 = 1;

const MAGIC: [u8; 8] = *b"GTRYKVB\0";
const TOKEN_BYTES: usize = BLOCK_TOKENS * size_of::<i32>();
const HEADER_BYTES: usize = MAGIC.len() + 4 + 4 + 2 * HASH_BYTES + TOKEN_BYTES + 8;
const CHECKSUM_BYTES: usize = 32;

/// What a file says of its block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) parent: BlockHash,
    /// [`BLOCK_TOKENS`] of them.
    pub(crate) tokens: Vec<i32>,
    pub(crate) payload: Vec<u8>,
}

/// Why bytes are not an entry. Each of them is a miss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum Damage {
    #[error("no cache entry: it does not begin as one")]
    Magic,
    #[error("an entry of format version {0}, not {DISK_FORMAT_VERSION}")]
    Version(u32),
    #[error("an entry of {0} tokens, not {BLOCK_TOKENS}")]
    BlockTokens(u32),
    #[error("its length is not what its header says")]
    Length,
    #[error("its checksum does not match")]
    Checksum,
    #[error("an entry of another model or KV cache")]
    Fingerprint,
    #[error("an entry of other tokens than its name says")]
    Name,
}

/// Bytes of a file with a payload of this length.
pub(crate) fn encoded_bytes(payload_len: usize) -> u64 {
    (HEADER_BYTES + CHECKSUM_BYTES) as u64 + payload_len as u64
}

/// Whether a file of this length can be an entry at all.
pub(super) fn is_entry_length(bytes: u64) -> bool {
    (encoded_bytes(0)..=encoded_bytes(MAX_PAYLOAD_BYTES)).contains(&bytes)
}

/// The bytes of an entry before and after its payload; `tokens` are [`BLOCK_TOKENS`].
pub(super) fn encode_around(
    fingerprint: Fingerprint,
    parent: BlockHash,
    tokens: &[i32],
    payload: &[u8],
) -> (Vec<u8>, [u8; CHECKSUM_BYTES]) {
    let mut header = Vec::with_capacity(HEADER_BYTES);
    header.extend_from_slice(&MAGIC);
    header.extend_from_slice(&DISK_FORMAT_VERSION.to_le_bytes());
    header.extend_from_slice(&(tokens.len() as u32).to_le_bytes());
    header.extend_from_slice(&fingerprint.0);
    header.extend_from_slice(&parent.0);
    header.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    header.extend_from_slice(&(payload.len() as u64).to_le_bytes());
    let checksum = Sha256::new().chain_update(&header).chain_update(payload).finalize().into();
    (header, checksum)
}

/// The bytes of an entry.
#[cfg(test)]
pub(crate) fn encode(entry: &Entry) -> Vec<u8> {
    let (mut bytes, checksum) = encode_around(entry.fingerprint, entry.parent, &entry.tokens, &entry.payload);
    bytes.extend_from_slice(&entry.payload);
    bytes.extend_from_slice(&checksum);
    bytes
}

/// Reads an entry and verifies all that can be known without its name. The payload stays where it was read to.
pub(crate) fn decode(mut bytes: Vec<u8>) -> Result<Entry, Damage> {
    let mut rest = &*bytes;
    if take::<8>(&mut rest)? != MAGIC {
        return Err(Damage::Magic);
    }
    let version = u32::from_le_bytes(take(&mut rest)?);
    if version != DISK_FORMAT_VERSION {
        return Err(Damage::Version(version));
    }
    let block_tokens = u32::from_le_bytes(take(&mut rest)?);
    if block_tokens as usize != BLOCK_TOKENS {
        return Err(Damage::BlockTokens(block_tokens));
    }
    let fingerprint = Fingerprint(take(&mut rest)?);
    let parent = BlockHash(take(&mut rest)?);
    let tokens: [u8; TOKEN_BYTES] = take(&mut rest)?;
    let payload_bytes = usize::try_from(u64::from_le_bytes(take(&mut rest)?)).map_err(|_| Damage::Length)?;
    if payload_bytes > MAX_PAYLOAD_BYTES || rest.len() != payload_bytes + CHECKSUM_BYTES {
        return Err(Damage::Length);
    }
    let (content, checksum) = bytes.split_at(bytes.len() - CHECKSUM_BYTES);
    if Sha256::digest(content).as_slice() != checksum {
        return Err(Damage::Checksum);
    }
    let tokens = tokens.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    bytes.truncate(HEADER_BYTES + payload_bytes);
    bytes.drain(..HEADER_BYTES);
    Ok(Entry { fingerprint, parent, tokens, payload: bytes })
}

/// Reads the payload of one block, if the bytes are that block's and whole.
pub(super) fn decode_block(
    bytes: Vec<u8>,
    fingerprint: Fingerprint,
    parent: BlockHash,
    tokens: &[i32],
) -> Result<Vec<u8>, Damage> {
    let entry = decode(bytes)?;
    if entry.fingerprint != fingerprint {
        return Err(Damage::Fingerprint);
    }
    if entry.parent != parent || entry.tokens != tokens {
        return Err(Damage::Name);
    }
    Ok(entry.payload)
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N], Damage> {
    let (head, tail) = rest.split_first_chunk::<N>().ok_or(Damage::Length)?;
    *rest = tail;
    Ok(*head)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn entry() -> impl Strategy<Value = Entry> {
        let bytes = prop::array::uniform32(any::<u8>());
        let tokens = prop::collection::vec(any::<i32>(), BLOCK_TOKENS);
        (bytes, prop::array::uniform32(any::<u8>()), tokens, prop::collection::vec(any::<u8>(), 0..3000)).prop_map(
            |(fingerprint, parent, tokens, payload)| Entry {
                fingerprint: Fingerprint(fingerprint),
                parent: BlockHash(parent),
                tokens,
                payload,
            },
        )
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

        /// **Feature: distributed-inference-server, Property 12: Cache Serialization Round-Trip**
        /// **Validates: Requirements 4.6**
        #[test]
        fn an_entry_comes_back_as_it_was(entry in entry()) {
            let bytes = encode(&entry);
            prop_assert_eq!(bytes.len() as u64, encoded_bytes(entry.payload.len()));
            prop_assert!(is_entry_length(bytes.len() as u64));
            let read = decode(bytes.clone()).unwrap();
            // Its key is its name, which follows from its parent and tokens.
            prop_assert_eq!(read.parent.child(&read.tokens), entry.parent.child(&entry.tokens));
            prop_assert_eq!(&read, &entry);
            let payload = decode_block(bytes, entry.fingerprint, entry.parent, &entry.tokens);
            prop_assert_eq!(payload, Ok(entry.payload));
        }

        #[test]
        fn any_flipped_bit_cut_or_addition_is_seen(
            entry in entry(), at in any::<prop::sample::Index>(), bit in 0_u8..8, more in 1_usize..50,
        ) {
            let bytes = encode(&entry);
            let at = at.index(bytes.len());
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << bit;
            prop_assert!(decode(flipped).is_err());
            prop_assert!(decode(bytes[..at].to_vec()).is_err());
            let mut longer = bytes;
            longer.extend(vec![0; more]);
            prop_assert_eq!(decode(longer), Err(Damage::Length));
        }

        #[test]
        fn any_bytes_are_read_without_harm(bytes in prop::collection::vec(any::<u8>(), 0..600), genuine_start: bool) {
            let mut bytes = bytes;
            if genuine_start && bytes.len() >= 16 {
                bytes[..8].copy_from_slice(&MAGIC);
                bytes[8..12].copy_from_slice(&DISK_FORMAT_VERSION.to_le_bytes());
                bytes[12..16].copy_from_slice(&(BLOCK_TOKENS as u32).to_le_bytes());
            }
            prop_assert!(decode(bytes).is_err());
        }
    }

    /// Damage that a checksum alone would not show: it is right for what stands there.
    #[test]
    fn well_made_entries_of_something_else_are_refused() {
        let (fingerprint, parent, tokens) = (Fingerprint([1; 32]), BlockHash([2; 32]), vec![3; BLOCK_TOKENS]);
        let sealed = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = encode(&Entry { fingerprint, parent, tokens: tokens.clone(), payload: vec![9; 100] });
            bytes.truncate(bytes.len() - CHECKSUM_BYTES);
            change(&mut bytes);
            let checksum = Sha256::digest(&bytes);
            bytes.extend_from_slice(&checksum);
            decode_block(bytes, fingerprint, parent, &tokens)
        };
        let length_at = HEADER_BYTES - 8;
        assert_eq!(sealed(&|_| {}), Ok(vec![9; 100]));
        assert_eq!(sealed(&|b| b[0] = b'X'), Err(Damage::Magic));
        assert_eq!(sealed(&|b| b[8] = 7), Err(Damage::Version(7)));
        assert_eq!(sealed(&|b| b[12] = 65), Err(Damage::BlockTokens(65)));
        assert_eq!(sealed(&|b| b[16] ^= 1), Err(Damage::Fingerprint));
        assert_eq!(sealed(&|b| b[48] ^= 1), Err(Damage::Name));
        assert_eq!(sealed(&|b| b[80] ^= 1), Err(Damage::Name));
        for absurd in [0, 99, 101, u64::MAX, u64::MAX - 31, MAX_PAYLOAD_BYTES as u64 + 1] {
            let result = sealed(&|b| b[length_at..HEADER_BYTES].copy_from_slice(&absurd.to_le_bytes()));
            assert_eq!(result, Err(Damage::Length), "{absurd}");
        }
    }
}

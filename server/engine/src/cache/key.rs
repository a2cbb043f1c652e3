//! Names of blocks: a hash chained over the tokens from the start of the sequence, seeded by all that the bytes of a KV
//! row depend on beside its tokens. Pure, so that it may run on any thread.

use std::fmt;

use sha2::{Digest as _, Sha256};

use super::limits::BLOCK_TOKENS;

/// Bytes of a block's name.
pub(super) const HASH_BYTES: usize = 32;

/// What two engines must have in common to use each other's KV rows: llama.cpp restores the state of another model of
/// the same shape without complaint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FingerprintParts<'a> {
    /// The model file's digest, or whatever names its content.
    pub(crate) model_digest: &'a str,
    /// Element type of the K cache.
    pub(crate) type_k: &'a str,
    /// Element type of the V cache.
    pub(crate) type_v: &'a str,
    /// Whether flash attention is on: it transposes V.
    pub(crate) flash_attention: &'a str,
    /// Split or unified cells.
    pub(crate) layout: &'a str,
    /// The version of what the payloads look like.
    pub(crate) payload_format: &'a str,
}

/// The digest of [`FingerprintParts`]; also the parent of every first block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Fingerprint(pub(super) [u8; HASH_BYTES]);

impl Fingerprint {
    pub(crate) fn new(parts: &FingerprintParts<'_>) -> Self {
        let FingerprintParts { model_digest, type_k, type_v, flash_attention, layout, payload_format } = *parts;
        let mut hasher = Sha256::new();
        for part in [model_digest, type_k, type_v, flash_attention, layout, payload_format] {
            // The length first: no two lists of parts are the same bytes.
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
        Self(hasher.finalize().into())
    }

    /// The name that stands for the parent of a first block.
    pub(super) fn root(self) -> BlockHash {
        BlockHash(self.0)
    }

    pub(super) fn from_hex(text: &str) -> Option<Self> {
        from_hex(text).map(Self)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The name of one block: of its tokens and of all before them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BlockHash(pub(super) [u8; HASH_BYTES]);

impl BlockHash {
    /// The block of these tokens after `self`.
    pub(super) fn child(self, tokens: &[i32]) -> Self {
        let mut bytes = Vec::with_capacity(HASH_BYTES + size_of_val(tokens));
        bytes.extend_from_slice(&self.0);
        bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
        Self(Sha256::digest(&bytes).into())
    }

    pub(super) fn from_hex(text: &str) -> Option<Self> {
        from_hex(text).map(Self)
    }
}

impl fmt::Display for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Lower case only: each name has one spelling.
fn from_hex(text: &str) -> Option<[u8; HASH_BYTES]> {
    let mut bytes = [0; HASH_BYTES];
    hex::decode_to_slice(text, &mut bytes).ok()?;
    (!text.bytes().any(|b| b.is_ascii_uppercase())).then_some(bytes)
}

/// The names of all full blocks of `tokens`, in order.
pub(crate) fn chain(fingerprint: Fingerprint, tokens: &[i32]) -> Vec<BlockHash> {
    let mut names = Vec::with_capacity(tokens.len() / BLOCK_TOKENS);
    extend_chain(fingerprint, &mut names, tokens);
    names
}

/// Brings the chain of a shorter prefix of `tokens` up to all full blocks of it.
pub(crate) fn extend_chain(fingerprint: Fingerprint, names: &mut Vec<BlockHash>, tokens: &[i32]) {
    let mut parent = names.last().copied().unwrap_or_else(|| fingerprint.root());
    for block in tokens.chunks_exact(BLOCK_TOKENS).skip(names.len()) {
        parent = parent.child(block);
        names.push(parent);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    const PARTS: FingerprintParts<'_> = FingerprintParts {
        model_digest: "sha256:aa",
        type_k: "f16",
        type_v: "f16",
        flash_attention: "on",
        layout: "unified",
        payload_format: "1",
    };

    #[test]
    fn every_part_changes_the_fingerprint() {
        let base = Fingerprint::new(&PARTS);
        let others = [
            FingerprintParts { model_digest: "sha256:ab", ..PARTS },
            FingerprintParts { type_k: "q8_0", ..PARTS },
            FingerprintParts { type_v: "q8_0", ..PARTS },
            FingerprintParts { flash_attention: "off", ..PARTS },
            FingerprintParts { layout: "split", ..PARTS },
            FingerprintParts { payload_format: "2", ..PARTS },
            // The same bytes in another place.
            FingerprintParts { model_digest: "sha256:aaf", type_k: "16", ..PARTS },
        ];
        for other in others {
            assert_ne!(Fingerprint::new(&other), base, "{other:?}");
        }
        assert_eq!(Fingerprint::from_hex(&base.to_string()), Some(base));
        assert_eq!(Fingerprint::from_hex(&base.to_string().to_uppercase()), None);
        assert_eq!(Fingerprint::from_hex("00"), None);
    }

    proptest! {
        #[test]
        fn chains_agree_exactly_on_the_blocks_in_common(
            a in prop::collection::vec(0..2_i32, 0..400),
            cut in 0_usize..400,
            rest in prop::collection::vec(0..2_i32, 0..400),
        ) {
            let fingerprint = Fingerprint::new(&PARTS);
            let b: Vec<i32> = a.iter().copied().take(cut).chain(rest).collect();
            let (names_a, names_b) = (chain(fingerprint, &a), chain(fingerprint, &b));
            prop_assert_eq!(names_a.len(), a.len() / BLOCK_TOKENS);
            for i in 0..names_a.len().min(names_b.len()) {
                let end = (i + 1) * BLOCK_TOKENS;
                prop_assert_eq!(names_a[i] == names_b[i], a[..end] == b[..end]);
            }
            let mut extended = chain(fingerprint, &a[..cut.min(a.len())]);
            extend_chain(fingerprint, &mut extended, &a);
            prop_assert_eq!(extended, names_a);
        }
    }
}

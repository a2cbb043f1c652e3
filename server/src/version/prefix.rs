//! Which worker read which beginning of a prompt last, in bounded memory.
//!
//! A prompt's head is cut into blocks of [`PREFIX_BLOCK_BYTES`], and each beginning that ends with a block is named by a
//! hash of all of it. The index keeps the worker that read each beginning last and drops the ones that were not read for
//! the longest time. It guides the choice of a worker and nothing else: a wrong name costs a prompt's reading, never an
//! answer. Absent: what is in a worker's cache, which only its engine knows.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hasher};

use gantry_core::Prompt;

use crate::limits::{PREFIX_BLOCK_BYTES, PREFIX_BLOCKS_PER_REQUEST};

/// The names of a prompt's beginnings, the shortest first; none for a prompt shorter than a block.
pub(super) fn keys(prompt: &Prompt) -> Vec<u64> {
    match prompt {
        Prompt::Tokens(tokens) => {
            let head = tokens.iter().take(PREFIX_BLOCK_BYTES / size_of::<i32>() * PREFIX_BLOCKS_PER_REQUEST);
            keys_of(std::iter::once(&*head.flat_map(|token| token.to_le_bytes()).collect::<Vec<u8>>()))
        }
        prompt => keys_of(prompt.texts().map(str::as_bytes)),
    }
}

fn keys_of<'a>(pieces: impl Iterator<Item = &'a [u8]>) -> Vec<u64> {
    let (mut hasher, mut keys, mut left) = (DefaultHasher::new(), Vec::new(), PREFIX_BLOCK_BYTES);
    for mut piece in pieces {
        while !piece.is_empty() && keys.len() < PREFIX_BLOCKS_PER_REQUEST {
            let (now, rest) = piece.split_at(piece.len().min(left));
            // What was hashed before stays in the hasher, so each name covers the whole beginning.
            hasher.write(now);
            (piece, left) = (rest, left - now.len());
            if left == 0 {
                keys.push(hasher.finish());
                left = PREFIX_BLOCK_BYTES;
            }
        }
    }
    keys
}

#[derive(Clone, Copy, Debug)]
struct Read {
    worker: usize,
    at: u64,
}

/// The last readers of beginnings.
#[derive(Debug)]
pub(super) struct PrefixIndex {
    limit: usize,
    reads: HashMap<u64, Read>,
    /// Names by the time of their last reading.
    by_age: BTreeMap<u64, u64>,
    clock: u64,
}

impl PrefixIndex {
    /// An index of at most `limit` beginnings.
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, reads: HashMap::new(), by_age: BTreeMap::new(), clock: 0 }
    }

    /// The last reader of the longest beginning that an eligible worker read last.
    pub(super) fn reader(&self, keys: &[u64], eligible: impl Fn(usize) -> bool) -> Option<usize> {
        keys.iter().rev().filter_map(|key| self.reads.get(key)).map(|read| read.worker).find(|&worker| eligible(worker))
    }

    /// Notes that a worker reads a prompt with these beginnings.
    pub(super) fn serve(&mut self, keys: &[u64], worker: usize) {
        // The longest first, so that of one prompt the shortest are the youngest and the last to be dropped.
        for &key in keys.iter().rev() {
            self.clock += 1;
            if let Some(before) = self.reads.insert(key, Read { worker, at: self.clock }) {
                self.by_age.remove(&before.at);
            }
            self.by_age.insert(self.clock, key);
        }
        while self.reads.len() > self.limit {
            let Some((_, oldest)) = self.by_age.pop_first() else { break };
            self.reads.remove(&oldest);
        }
    }

    /// A worker lost what it had read.
    pub(super) fn forget(&mut self, worker: usize) {
        let by_age = &mut self.by_age;
        self.reads.retain(|_, read| {
            let kept = read.worker != worker;
            if !kept {
                by_age.remove(&read.at);
            }
            kept
        });
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use gantry_core::{Message, Role};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_cover_the_whole_beginning_and_no_more() {
        let text = |head: char, tail: char| {
            let text: String = std::iter::repeat_n(head, PREFIX_BLOCK_BYTES)
                .chain(std::iter::repeat_n(tail, PREFIX_BLOCK_BYTES + 9))
                .collect();
            keys(&Prompt::Text(text))
        };
        let (aa, ab, ba) = (text('a', 'a'), text('a', 'b'), text('b', 'a'));
        assert_eq!(aa.len(), 2);
        assert_eq!(aa[0], ab[0]);
        assert_ne!(aa[1], ab[1]);
        assert_ne!(aa[1], ba[1], "the same block after another beginning is another beginning");
        assert!(keys(&Prompt::Text("short".to_owned())).is_empty());
        let chat = |last: &str| {
            let begins = Message::text(Role::System, "a".repeat(PREFIX_BLOCK_BYTES));
            keys(&Prompt::chat(vec![begins, Message::text(Role::User, last.repeat(PREFIX_BLOCK_BYTES))]))
        };
        let (one, other) = (chat("b"), chat("c"));
        assert_eq!((one.len(), one[0]), (2, other[0]), "blocks go on from message to message");
        assert_ne!(one[1], other[1]);
        let long = Prompt::Tokens(vec![1; PREFIX_BLOCK_BYTES * PREFIX_BLOCKS_PER_REQUEST]);
        assert_eq!(keys(&long).len(), PREFIX_BLOCKS_PER_REQUEST);
    }

    proptest! {
        /// Against a list of all reads, the oldest first: what is kept is the youngest, and its last reader is known.
        #[test]
        fn the_index_is_a_bounded_map_to_the_last_reader(
            limit in 1_usize..12,
            moves in proptest::collection::vec((proptest::collection::vec(0_u64..20, 0..6), 0_usize..4, any::<bool>()), 0..60),
        ) {
            let mut index = PrefixIndex::new(limit);
            let mut model: Vec<(u64, usize)> = Vec::new();
            for (keys, worker, forget) in moves {
                if forget {
                    index.forget(worker);
                    model.retain(|(_, reader)| *reader != worker);
                } else {
                    index.serve(&keys, worker);
                    for &key in keys.iter().rev() {
                        model.retain(|(known, _)| *known != key);
                        model.push((key, worker));
                    }
                    model.drain(..model.len().saturating_sub(limit));
                }
                prop_assert_eq!(index.reads.len(), model.len());
                prop_assert_eq!(index.by_age.len(), model.len());
                for key in 0..20 {
                    let expected = model.iter().find(|(known, _)| *known == key).map(|(_, reader)| *reader);
                    prop_assert_eq!(index.reader(&[key], |_| true), expected);
                }
            }
        }
    }
}

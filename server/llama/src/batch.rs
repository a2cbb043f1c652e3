//! The tokens of one step, in plain vectors until [`Context::decode`](crate::Context::decode) hands them over.

use llama_cpp_sys_2 as sys;

use crate::error::BatchError;
use crate::model::Token;

/// Tokens to decode together, each on one sequence.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    tokens: Vec<Token>,
    positions: Vec<i32>,
    sequences: Vec<i32>,
    sequence_counts: Vec<i32>,
    outputs: Vec<i8>,
    /// Filled by [`Batch::as_raw`].
    sequence_ptrs: Vec<*mut i32>,
}

// SAFETY: `sequence_ptrs` is written and read only within one call under `&mut self`; between calls nothing reads it.
unsafe impl Send for Batch {}

/// What a context allows in a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchLimits {
    pub(crate) tokens: usize,
    pub(crate) outputs: usize,
    pub(crate) sequences: u32,
    pub(crate) positions: u32,
    pub(crate) vocab_size: u32,
}

impl Batch {
    /// An empty batch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a token at `position` of `sequence`; `output` asks for its row of logits.
    pub fn add(&mut self, token: Token, position: u32, sequence: u32, output: bool) {
        // What does not fit an i32 becomes a value that `validate` refuses.
        self.tokens.push(token);
        self.positions.push(i32::try_from(position).unwrap_or(-1));
        self.sequences.push(i32::try_from(sequence).unwrap_or(-1));
        self.sequence_counts.push(1);
        self.outputs.push(i8::from(output));
    }

    /// Removes every token.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.sequences.clear();
        self.sequence_counts.clear();
        self.outputs.clear();
    }

    /// Tokens in the batch.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Makes every token an output, which is what llama.cpp needs of texts that it pools.
    pub(crate) fn ask_for_all(&mut self) {
        self.outputs.fill(1);
    }

    pub(crate) fn outputs(&self) -> &[i8] {
        &self.outputs
    }

    /// Checks everything that llama.cpp asserts, or answers with a bare -1. `expected` gives the position that follows
    /// what a sequence holds; `None`: it may begin anywhere.
    pub(crate) fn validate(
        &self,
        limits: &BatchLimits,
        mut expected: impl FnMut(u32) -> Option<u32>,
    ) -> Result<(), BatchError> {
        if self.is_empty() {
            return Err(BatchError::Empty);
        }
        if self.len() > limits.tokens {
            return Err(BatchError::TooManyTokens { tokens: self.len(), limit: limits.tokens });
        }
        let outputs = self.outputs.iter().filter(|&&output| output != 0).count();
        if outputs > limits.outputs {
            return Err(BatchError::TooManyOutputs { outputs, limit: limits.outputs });
        }
        let mut next = vec![None; limits.sequences as usize];
        for (index, &token) in self.tokens.iter().enumerate() {
            if !u32::try_from(token).is_ok_and(|t| t < limits.vocab_size) {
                return Err(BatchError::Token { index, token, vocab_size: limits.vocab_size });
            }
            let sequence = u32::try_from(self.sequences[index]).unwrap_or(u32::MAX);
            let slot =
                next.get_mut(sequence as usize).ok_or(BatchError::Sequence { sequence, limit: limits.sequences })?;
            let position = u32::try_from(self.positions[index]).unwrap_or(u32::MAX);
            if let Some(expected) = slot.or_else(|| expected(sequence)).filter(|expected| *expected != position) {
                return Err(BatchError::Position { sequence, expected, position });
            }
            if position >= limits.positions {
                return Err(BatchError::PastContext { sequence, position, limit: limits.positions });
            }
            *slot = Some(position + 1);
        }
        Ok(())
    }

    /// The C struct over this batch's vectors. It is valid until the batch is changed, moved or dropped.
    pub(crate) fn as_raw(&mut self) -> sys::llama_batch {
        self.sequence_ptrs.clear();
        let base = self.sequences.as_mut_ptr();
        self.sequence_ptrs.extend((0..self.tokens.len()).map(|i| base.wrapping_add(i)));
        sys::llama_batch {
            n_tokens: i32::try_from(self.tokens.len()).unwrap_or(0),
            token: self.tokens.as_mut_ptr(),
            embd: std::ptr::null_mut(),
            pos: self.positions.as_mut_ptr(),
            n_seq_id: self.sequence_counts.as_mut_ptr(),
            seq_id: self.sequence_ptrs.as_mut_ptr(),
            logits: self.outputs.as_mut_ptr(),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const LIMITS: BatchLimits = BatchLimits { tokens: 4, outputs: 2, sequences: 3, positions: 100, vocab_size: 10 };

    fn verdict(entries: &[(Token, u32, u32, bool)]) -> Result<(), BatchError> {
        let mut batch = Batch::new();
        for &(token, position, sequence, output) in entries {
            batch.add(token, position, sequence, output);
        }
        // Sequence 0 holds 5 tokens, 1 none, 2 is full.
        batch.validate(&LIMITS, |sequence| [Some(5), None, Some(100)][sequence as usize])
    }

    #[test]
    fn a_batch_that_llama_cpp_would_assert_on_is_refused() {
        assert_eq!(verdict(&[(1, 5, 0, true), (1, 0, 1, false), (2, 6, 0, true), (9, 1, 1, false)]), Ok(()));
        assert_eq!(verdict(&[]), Err(BatchError::Empty));
        let five = [(1, 5, 0, false); 5];
        assert!(matches!(verdict(&five), Err(BatchError::TooManyTokens { tokens: 5, limit: 4 })));
        assert!(matches!(verdict(&[(10, 5, 0, false)]), Err(BatchError::Token { token: 10, .. })));
        assert!(matches!(verdict(&[(-1, 5, 0, false)]), Err(BatchError::Token { token: -1, .. })));
        assert!(matches!(verdict(&[(1, 5, 3, false)]), Err(BatchError::Sequence { sequence: 3, .. })));
        assert!(matches!(verdict(&[(1, 5, u32::MAX, false)]), Err(BatchError::Sequence { .. })));
        assert!(matches!(verdict(&[(1, 6, 0, false)]), Err(BatchError::Position { expected: 5, .. })));
        assert!(matches!(verdict(&[(1, u32::MAX, 0, false)]), Err(BatchError::Position { .. })));
        assert_eq!(verdict(&[(1, 98, 1, false), (1, 99, 1, false)]), Ok(()), "one that holds nothing begins anywhere");
        assert!(matches!(verdict(&[(1, 100, 1, false)]), Err(BatchError::PastContext { limit: 100, .. })));
        let gap = [(1, 5, 0, false), (1, 7, 0, false)];
        assert!(matches!(verdict(&gap), Err(BatchError::Position { expected: 6, .. })));
        assert!(matches!(verdict(&[(1, 100, 2, false)]), Err(BatchError::PastContext { limit: 100, .. })));
        let rows = [(1, 5, 0, true), (1, 6, 0, true), (1, 7, 0, true)];
        assert!(matches!(verdict(&rows), Err(BatchError::TooManyOutputs { outputs: 3, limit: 2 })));
    }
}

//! Which tokens one step decodes: a pure function from what each slot needs to how much it gets.
//!
//! Every sequence that generates gets its one token first. Of the budget for prompts:
//!
//! - The oldest prompt gets the first quarter ([`OLDEST_SHARE`]), whatever its priority and length. This bounds how
//!   long any prompt takes: a prompt of n tokens is read within `ceil(4n / budget)` steps from when it is the oldest,
//!   and the prompts before it likewise, since none that comes later becomes the oldest before it.
//! - The rest goes by priority, and within one to the prompt with the fewest tokens left: short prompts are not stuck
//!   behind long ones, and of all orders this one has the least mean wait.
//!
//! Drafts get what is left of the same budget when the prompts have theirs, or of the batch when there are none, in
//! equal shares: a guess never costs a prompt a token, and never takes a step past what it may take.

use std::cmp::Reverse;

use crate::params::Priority;

/// The oldest prompt gets at least one in so many of the tokens for prompts.
pub(crate) const OLDEST_SHARE: u32 = 4;

/// What a slot needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// One token, the one it sampled last, and up to so many guessed ones after it.
    Decode { drafts: u32 },
    /// So many tokens of its prompt; `age` ranks prompts, the lowest being the oldest.
    Prefill { remaining: u32, age: u64, priority: Priority },
}

/// A prompt, by its place among the needs.
#[derive(Clone, Copy)]
struct Reader {
    at: usize,
    remaining: u32,
    age: u64,
    priority: Priority,
}

/// Tokens for each need, in the same order: at most `batch_tokens` in all, and at most `prefill_tokens` for prompts.
pub(crate) fn plan_step(needs: &[Need], batch_tokens: u32, prefill_tokens: u32) -> Vec<u32> {
    let mut grants = vec![0; needs.len()];
    let mut left = batch_tokens;
    let mut readers = Vec::new();
    let mut guessers = Vec::new();
    for (at, need) in needs.iter().enumerate() {
        match *need {
            Need::Decode { drafts } => {
                if left > 0 {
                    grants[at] = 1;
                    left -= 1;
                    guessers.push((at, drafts));
                }
            }
            Need::Prefill { remaining, age, priority } => readers.push(Reader { at, remaining, age, priority }),
        }
    }
    if !readers.is_empty() {
        left = left.min(prefill_tokens);
        left -= share_among_prompts(&mut readers, left, &mut grants);
    }
    share_equally(guessers, left, &mut grants);
    grants
}

/// Gives the prompts up to `budget` tokens; how many it gave.
fn share_among_prompts(readers: &mut [Reader], budget: u32, grants: &mut [u32]) -> u32 {
    let mut left = budget;
    let mut give = |reader: &mut Reader, most: u32| {
        let grant = most.min(reader.remaining).min(left);
        grants[reader.at] += grant;
        reader.remaining -= grant;
        left -= grant;
    };
    if let Some(oldest) = readers.iter_mut().min_by_key(|reader| reader.age) {
        give(oldest, budget.div_ceil(OLDEST_SHARE));
    }
    readers.sort_unstable_by_key(|reader| (Reverse(reader.priority), reader.remaining, reader.age));
    for reader in readers {
        give(reader, u32::MAX);
    }
    budget - left
}

/// Gives each up to what it wants; what one does not want goes to the others, and too few tokens to the first.
fn share_equally(mut wants: Vec<(usize, u32)>, mut left: u32, grants: &mut [u32]) {
    wants.retain(|&(_, want)| want > 0);
    while left > 0 && !wants.is_empty() {
        let share = (left / u32::try_from(wants.len()).unwrap_or(u32::MAX)).max(1);
        for (at, want) in &mut wants {
            let grant = share.min(*want).min(left);
            grants[*at] += grant;
            *want -= grant;
            left -= grant;
        }
        wants.retain(|&(_, want)| want > 0);
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;

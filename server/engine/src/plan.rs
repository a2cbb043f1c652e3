//! Which tokens one step decodes: a pure function from what each slot needs to how much it gets.
//!
//! Every sequence that generates gets its one token first. Of the budget for prompts:
//!
//! - In one turn of four ([`OLDEST_TURN`]) the oldest prompt goes first, whatever its priority and length. This bounds
//!   how long any prompt takes: a prompt of n tokens is read within `4 * ceil(n / budget)` turns from when it is the
//!   oldest, and the prompts before it likewise, since none that comes later becomes the oldest before it. Turns and not
//!   shares of each step, because a step that reads one prompt is cheaper than one that reads two. Steps
//!   in which a burst makes a prompt wait ([`crate::burst`]) come on top: the oldest is in every burst, so that it waits
//!   for at most one, and then for what that holds back at most. So do those in which it waits for others that are read
//!   beside a pool: at most four of them, the one that is there and three before its turn.
//! - In the others it goes by priority, and within one to the prompt with the fewest tokens left: short prompts are not
//!   stuck behind long ones, and of all orders this one has the least mean wait.
//!
//! A few tokens of the budget may stay unused, or come on top of it, so that what is computed together comes in groups of
//! [`GROUP_TOKENS`] and in tiles of [`TILE_TOKENS`].
//!
//! Drafts get what is left of the same budget when the prompts have theirs, or of the batch when there are none, in
//! equal shares: a guess never costs a prompt a token, and never takes a step past what it may take.

use std::cmp::Reverse;

use crate::budget::MIN_PREFILL_TOKENS;
use crate::params::Priority;

/// In one of so many turns the oldest prompt goes first.
pub(crate) const OLDEST_TURN: u64 = 4;
/// The matrix products of a CPU take tokens by so many; each one left over is a pass over the weights by itself (two
/// cores with AVX2, a model of 0.5B in Q4_0: 8 rows take 91 ms, 9 take 118, 12 take 133). A GPU's tiles are multiples of
/// it.
pub(crate) const GROUP_TOKENS: u32 = 4;

/// So many tokens take hardly longer than a group less, since the weights are unpacked once for them (the same model on two
/// cores with AVX-512: 8 tokens of a prompt take 44 ms, 12 take 61, 16 take 65, 20 take 82).
pub(crate) const TILE_TOKENS: u32 = 4 * GROUP_TOKENS;

/// Flash attention on a CPU takes so many tokens of a pool together (`GGML_FA_TILE_Q`), and fewer one by one: behind a thousand
/// others 32 tokens take 115 ms and 64 take 152 (Zen 5).
pub(crate) const ATTENTION_TILE_TOKENS: u32 = 64;
/// So many of them, in eighths, become a whole tile where there is more to read: they would take as long alone.
const NEARLY_A_TILE: u32 = 5;

/// What a slot needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// One token, the one it sampled last, and up to so many guessed ones after it.
    Decode { drafts: u32 },
    /// So many tokens of its prompt; `age` ranks prompts, the lowest being the oldest. `scores`: their log-probabilities are told.
    Prefill { remaining: u32, age: u64, priority: Priority, scores: bool },
}

/// A prompt, by its place among the needs.
#[derive(Clone, Copy)]
struct Reader {
    at: usize,
    remaining: u32,
    age: u64,
    priority: Priority,
    scores: bool,
}

/// What bounds one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// The most tokens in all.
    pub(crate) batch_tokens: u32,
    /// The most tokens for prompts.
    pub(crate) prefill_tokens: u32,
    /// The most tokens whose log-probabilities are told,
    pub(crate) scored_rows: u32,
    /// and what each of them takes, in tokens of prompts: 1 and more.
    pub(crate) scored_cost: f64,
    /// Steps before this one that read prompts.
    pub(crate) turn: u64,
}

/// Tokens for each need, in the same order.
pub(crate) fn plan_step(needs: &[Need], bounds: Bounds) -> Vec<u32> {
    let mut grants = vec![0; needs.len()];
    let mut left = bounds.batch_tokens;
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
            // Who waits for others is nobody's oldest.
            Need::Prefill { remaining: 0, .. } => {}
            Need::Prefill { remaining, age, priority, scores } => {
                readers.push(Reader { at, remaining, age, priority, scores });
            }
        }
    }
    if !readers.is_empty() {
        left = left.min(bounds.prefill_tokens);
        left -= share_among_prompts(&mut readers, left, bounds, &mut grants);
    }
    share_equally(guessers, left, &mut grants);
    grants
}

/// As [`plan_step`], with up to [`GROUP_TOKENS`] tokens more for prompts where they fill a tile, or else with fewer than that
/// less where what is computed together then comes in whole groups. `parts` says of grants how many tokens are computed
/// together each time.
pub(crate) fn plan_in_groups(needs: &[Need], bounds: Bounds, parts: impl Fn(&[u32]) -> Vec<u32>) -> Vec<u32> {
    let unread = |need: &Need| match need {
        Need::Prefill { remaining, .. } => *remaining,
        Need::Decode { .. } => 0,
    };
    let whole = plan_step(needs, bounds);
    // Nothing is put off that would be read to its end.
    if needs.iter().map(unread).fold(0, u32::saturating_add) <= bounds.prefill_tokens {
        return whole;
    }
    let with = |prefill_tokens| plan_step(needs, Bounds { prefill_tokens, ..bounds });
    // Nor is a prompt cut short that has room, so that its answer begins.
    let ends_as_many = |grants: &[u32]| {
        let ends = |at: usize| whole[at] > 0 && whole[at] == unread(&needs[at]);
        (0..needs.len()).all(|at| !ends(at) || grants[at] == whole[at])
    };
    let odd_parts = |grants: &[u32]| parts(grants).iter().filter(|&tokens| tokens % GROUP_TOKENS != 0).count();
    let tiles = |grants: &[u32]| parts(grants).iter().filter(|&tokens| tokens % TILE_TOKENS == 0).count();
    let (odd, full, passes) = (odd_parts(&whole), tiles(&whole), parts(&whole).len());
    let mut more = (1..=GROUP_TOKENS).map(|more| with(bounds.prefill_tokens.saturating_add(more)));
    let fills_a_tile =
        |grants: &Vec<u32>| tiles(grants) > full && odd_parts(grants) <= odd && parts(grants).len() <= passes;
    if let Some(grants) = more.find(fills_a_tile) {
        return grants;
    }
    let fewer = (1..GROUP_TOKENS.min(bounds.prefill_tokens)).map(|less| with(bounds.prefill_tokens - less));
    let fewer: Vec<Vec<u32>> = fewer.filter(|grants| ends_as_many(grants)).collect();
    // Of equals the first, which reads the most.
    std::iter::once(whole).chain(fewer).min_by_key(|grants| odd_parts(grants)).unwrap_or_default()
}

/// As [`plan_in_groups`], with more tokens for prompts where what is computed together is nearly a tile of so many; 0: there is
/// no such tile.
pub(crate) fn plan_in_tiles(needs: &[Need], bounds: Bounds, tile: u32, parts: impl Fn(&[u32]) -> Vec<u32>) -> Vec<u32> {
    let grants = plan_in_groups(needs, bounds, &parts);
    let nearly = tile * NEARLY_A_TILE / 8..tile;
    let Some(missing) = parts(&grants).into_iter().filter(|part| nearly.contains(part)).map(|part| tile - part).max()
    else {
        return grants;
    };
    let prefill_tokens = bounds.prefill_tokens.saturating_add(missing);
    let more = plan_in_groups(needs, Bounds { prefill_tokens, ..bounds }, &parts);
    let whole = |grants: &[u32]| parts(grants).iter().filter(|&&part| part >= tile).count();
    if whole(&more) > whole(&grants) { more } else { grants }
}

/// How llama.cpp cuts a batch of a split cache into parts that it computes together (`llama_batch_allocr::split_equal`):
/// each begins with the first tokens that are left, and has those of the sequences whose ids follow without a gap and as
/// they come, equally many of each. Given the tokens of each sequence, in the batch's order.
pub(crate) fn split_parts(batch: &[(usize, u32)]) -> Vec<u32> {
    let mut left: Vec<(usize, u32)> = batch.iter().copied().filter(|&(_, tokens)| tokens > 0).collect();
    let mut parts = Vec::new();
    while let Some(&(first, _)) = left.first() {
        let mut next = first;
        let mut together = Vec::new();
        for (at, &(sequence, _)) in left.iter().enumerate() {
            if sequence == next {
                together.push(at);
                next += 1;
            }
        }
        let each = together.iter().map(|&at| left[at].1).min().unwrap_or(0);
        together.iter().for_each(|&at| left[at].1 -= each);
        // A batch has far fewer tokens than a u32 can count.
        parts.push(each.saturating_mul(u32::try_from(together.len()).unwrap_or(u32::MAX)));
        left.retain(|&(_, tokens)| tokens > 0);
    }
    parts
}

/// Puts prompts, which come in the order of their slots, in the order in which they are read, given of each its priority, the
/// tokens that are left, and its age. Of equals the older goes first, but of those that are nearly read neighbours, since these
/// are computed together, and to read few tokens by themselves takes longer than the tokens do.
pub(crate) fn sort_readers<T>(readers: &mut [T], turn: u64, of: impl Fn(&T) -> (Priority, u32, u64)) {
    readers.sort_by_key(|reader| {
        let (priority, remaining, age) = of(reader);
        (Reverse(priority), remaining, if remaining > MIN_PREFILL_TOKENS { age } else { 0 })
    });
    if turn.is_multiple_of(OLDEST_TURN) && !readers.is_empty() {
        let oldest = readers.iter().enumerate().min_by_key(|(_, reader)| of(reader).2).map_or(0, |(at, _)| at);
        readers[..=oldest].rotate_right(1);
    }
}

/// Gives the prompts up to `budget` tokens, or what takes as long; how much of it it gave.
fn share_among_prompts(readers: &mut [Reader], budget: u32, bounds: Bounds, grants: &mut [u32]) -> u32 {
    sort_readers(readers, bounds.turn, |reader| (reader.priority, reader.remaining, reader.age));
    let (mut left, mut rows) = (budget, bounds.scored_rows);
    for reader in readers {
        let (most, cost) = match reader.scores {
            // In range: no more than a u32 divided by 1.
            true => {
                (rows.min((f64::from(left) / bounds.scored_cost) as u32).max(left.min(rows).min(1)), bounds.scored_cost)
            }
            false => (left, 1.0),
        };
        let grant = reader.remaining.min(most);
        grants[reader.at] = grant;
        rows -= if reader.scores { grant } else { 0 };
        left -= left.min((f64::from(grant) * cost).ceil() as u32);
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

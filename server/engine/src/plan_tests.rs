#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;
use crate::params::Priority::{High, Low, Normal};

const DECODE: Need = Need::Decode { drafts: 0 };

fn prompt(remaining: u32, age: u64) -> Need {
    Need::Prefill { remaining, age, priority: Normal, scores: false }
}

/// What bounds nothing here.
const BOUNDS: Bounds = Bounds { batch_tokens: 0, prefill_tokens: 0, scored_rows: u32::MAX, scored_cost: 1.0, turn: 0 };
/// A turn in which the oldest prompt does not go first.
const ORDINARY: u64 = 1;

fn plan(needs: &[Need], batch_tokens: u32, prefill_tokens: u32, turn: u64) -> Vec<u32> {
    plan_step(needs, Bounds { batch_tokens, prefill_tokens, turn, ..BOUNDS })
}

fn draft(drafts: u32) -> Need {
    Need::Decode { drafts }
}

#[test]
fn decoding_comes_first_and_prompts_share_the_rest() {
    let p = prompt;
    let cases: &[(&[Need], u32, u32, &[u32])] = &[
        (&[], 8, 8, &[]),
        (&[DECODE, DECODE], 8, 8, &[1, 1]),
        (&[p(100, 1), DECODE], 8, 8, &[7, 1]),
        (&[p(100, 1), DECODE], 8, 4, &[4, 1]),
        // A short prompt is read whole before a long one, which gets what it leaves.
        (&[p(1000, 1), p(3, 2)], 64, 64, &[61, 3]),
        (&[p(1000, 1), p(500, 2)], 64, 64, &[0, 64]),
        (&[p(1000, 1), p(500, 2), p(20, 3)], 64, 64, &[0, 44, 20]),
        // Of equals the older, and of those nearly read neighbours.
        (&[p(10, 3), p(10, 1), p(10, 2)], 2, 2, &[0, 2, 0]),
        (&[p(3, 3), p(3, 1), p(3, 2), p(3, 4)], 64, 6, &[3, 3, 0, 0]),
        (&[p(2, 1)], 64, 64, &[2]),
        (&[p(5, 1), DECODE], 1, 8, &[0, 1]),
    ];
    for (needs, batch, prefill, want) in cases {
        assert_eq!(plan(needs, *batch, *prefill, ORDINARY), *want, "{needs:?} {batch} {prefill}");
    }
}

#[test]
fn the_oldest_prompt_goes_first_in_one_turn_of_four() {
    let p = prompt;
    let needs = [p(1000, 1), DECODE, p(3, 3), p(500, 2)];
    for turn in 0..9 {
        let want = if turn % 4 == 0 { [64, 1, 0, 0] } else { [0, 1, 3, 61] };
        assert_eq!(plan(&needs, 512, 64, turn), want, "{turn}");
    }
    // What it does not need goes to the others, by their order.
    assert_eq!(plan(&[p(40, 1), p(30, 2), p(20, 3)], 512, 64, 0), [40, 4, 20]);
}

#[test]
fn a_higher_priority_comes_before_a_shorter_prompt() {
    let p = |remaining, age, priority| Need::Prefill { remaining, age, priority, scores: false };
    let cases: &[(&[Need], &[u32])] = &[
        (&[p(500, 1, Normal), p(10, 2, Low), p(500, 3, High)], &[0, 0, 64]),
        (&[p(500, 1, Normal), p(10, 2, Low), p(30, 3, High)], &[34, 0, 30]),
        (&[p(500, 1, Low), p(40, 2, Normal), p(30, 3, Normal)], &[0, 34, 30]),
    ];
    for (needs, want) in cases {
        assert_eq!(plan(needs, 512, 64, ORDINARY), *want, "{needs:?}");
    }
    // Whatever its priority, the oldest has its turn.
    assert_eq!(plan(&[p(500, 1, Low), p(40, 2, Normal), p(30, 3, High)], 512, 64, 4), [64, 0, 0]);
}

/// What llama.cpp does with a split cache, as its debug output shows it.
#[test]
fn a_batch_of_a_split_cache_is_cut_where_sequences_do_not_follow_each_other() {
    type Batch = &'static [(usize, u32)];
    let cases: &[(Batch, &[u32])] = &[
        (&[], &[]),
        (&[(0, 1), (1, 1), (2, 1)], &[3]),
        // A prompt among them gives its first token with theirs, and is alone where it comes before them.
        (&[(0, 1), (1, 1), (2, 20)], &[3, 19]),
        (&[(2, 20), (0, 1), (1, 1)], &[20, 2]),
        // But not before one whose id follows its own.
        (&[(0, 20), (1, 1), (2, 1)], &[3, 19]),
        (&[(0, 1), (1, 1), (3, 1), (6, 1), (7, 1)], &[2, 1, 2]),
        (&[(4, 10), (5, 10), (6, 4), (0, 1)], &[12, 12, 1]),
    ];
    for (batch, want) in cases {
        assert_eq!(split_parts(batch), *want, "{batch:?}");
    }
}

#[test]
fn prompts_get_a_little_more_or_less_where_whole_groups_come_of_it() {
    let p = prompt;
    let bounds = |prefill_tokens| Bounds { batch_tokens: 512, prefill_tokens, turn: ORDINARY, ..BOUNDS };
    let alone = |grants: &[u32]| vec![grants[0], grants[1..].iter().sum()];
    let one_part = |grants: &[u32]| vec![grants.iter().sum()];
    for (prefill, want) in [(32, 32), (33, 32), (35, 32), (36, 36), (3, 3), (1, 1)] {
        assert_eq!(plan_in_groups(&[p(500, 1), DECODE], bounds(prefill), alone), [want, 1], "{prefill}");
    }
    // Nor a little less than a tile.
    for (prefill, want) in [(12, 16), (15, 16), (11, 8), (28, 32), (27, 24), (60, 64)] {
        assert_eq!(plan_in_groups(&[p(500, 1), DECODE], bounds(prefill), alone), [want, 1], "{prefill}");
    }
    let full = Bounds { batch_tokens: 14, ..bounds(13) };
    assert_eq!(plan_in_groups(&[p(500, 1), DECODE], full, alone), [12, 1], "a batch has no room for more");
    assert_eq!(plan_in_groups(&[p(500, 1), DECODE], bounds(13), one_part), [15, 1]);
    // One token for the stream and 31 for the prompt are 32.
    assert_eq!(plan_in_groups(&[p(500, 1), DECODE], bounds(33), one_part), [31, 1]);
    // Not where nothing would be left to read.
    assert_eq!(plan_in_groups(&[p(33, 1), DECODE], bounds(33), alone), [33, 1]);
}

#[test]
fn drafts_get_what_is_left() {
    let cases: &[(&[Need], u32, u32, &[u32])] = &[
        (&[draft(4), draft(0)], 64, 64, &[5, 1]),
        // Everybody's one token first, then equal shares.
        (&[draft(8), draft(8), draft(1), DECODE], 11, 64, &[4, 4, 2, 1]),
        (&[draft(8), draft(8)], 2, 64, &[1, 1]),
        (&[draft(8), draft(8)], 3, 64, &[2, 1]),
        // A prompt that fills its budget leaves none, and one that does not leaves the rest of it.
        (&[draft(8), prompt(100, 1)], 512, 32, &[1, 32]),
        (&[draft(8), prompt(27, 1)], 512, 32, &[6, 27]),
        // Without prompts their budget does not matter.
        (&[draft(8)], 512, 2, &[9]),
    ];
    for (needs, batch, prefill, want) in cases {
        assert_eq!(plan(needs, *batch, *prefill, ORDINARY), *want, "{needs:?} {batch} {prefill}");
    }
}

fn priority() -> impl Strategy<Value = Priority> {
    prop_oneof![Just(High), Just(Normal), Just(Low)]
}

fn need() -> impl Strategy<Value = Need> {
    prop_oneof![
        (0_u32..10).prop_map(|drafts| Need::Decode { drafts }),
        (1_u32..600, 0_u64..50, priority()).prop_map(|(remaining, age, priority)| Need::Prefill {
            remaining,
            age,
            priority,
            scores: false
        }),
    ]
}

#[test]
fn tokens_that_are_scored_have_rows_and_take_longer() {
    let scored = |remaining, age| Need::Prefill { remaining, age, priority: Normal, scores: true };
    let bounds = |prefill_tokens| Bounds {
        batch_tokens: 512,
        prefill_tokens,
        scored_rows: 16,
        scored_cost: 2.5,
        turn: ORDINARY,
    };
    let plan = |needs: &[Need], prefill| plan_step(needs, bounds(prefill));
    assert_eq!(plan(&[scored(100, 0)], 500), [16], "as many as there are rows");
    assert_eq!(plan(&[scored(100, 0)], 20), [8], "as many as take no longer than 20 others");
    assert_eq!(plan(&[scored(100, 0)], 1), [1], "it goes on");
    assert_eq!(plan(&[scored(10, 0), scored(100, 1), prompt(200, 2)], 100), [10, 6, 60], "others have what it leaves");
    assert_eq!(plan(&[prompt(30, 0), scored(40, 1)], 40), [30, 4]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn grants_keep_the_limits_and_waste_nothing(
        needs in proptest::collection::vec(need(), 0..40), prefill in 1_u32..600, room in 0_u32..64,
        turn in 0_u64..8,
    ) {
        // A batch has room for every sequence, as the engine makes it.
        let batch = 40 + room;
        let grants = plan(&needs, batch, prefill, turn);
        prop_assert_eq!(grants.len(), needs.len());
        let (mut decoding, mut read, mut unread, mut drafted, mut drafts) = (0, 0, 0, 0, 0);
        for (need, &grant) in needs.iter().zip(&grants) {
            match *need {
                Need::Decode { drafts: wanted } => {
                    prop_assert!(grant >= 1 && grant <= 1 + wanted);
                    decoding += 1;
                    drafted += grant - 1;
                    drafts += wanted;
                }
                Need::Prefill { remaining, .. } => {
                    prop_assert!(grant <= remaining);
                    read += grant;
                    unread += remaining;
                }
            }
        }
        // Prompts get all that there is for them, drafts or not.
        let budget = prefill.min(batch - decoding);
        prop_assert_eq!(read, unread.min(budget));
        let for_drafts = if unread > 0 { budget - read } else { batch - decoding };
        prop_assert_eq!(drafted, drafts.min(for_drafts));
        type Read = (u64, Priority, u32, u32);
        let prompts: Vec<Read> = needs.iter().zip(&grants).filter_map(|(need, &grant)| match *need {
            Need::Prefill { remaining, age, priority, .. } => Some((age, priority, remaining, grant)),
            Need::Decode { .. } => None,
        }).collect();
        let oldest = prompts.iter().map(|&(age, ..)| age).min().filter(|_| turn.is_multiple_of(OLDEST_TURN));
        let firsts: Vec<_> = prompts.iter().filter(|&&(age, ..)| Some(age) == oldest).collect();
        // In its turn the oldest gets all that it needs.
        if let Some((.., remaining, _)) = firsts.first() {
            prop_assert!(firsts.iter().any(|&&(.., needed, grant)| grant == needed.min(budget)), "{remaining}");
        }
        {
            // Of the others, none of a lower priority gets anything while one of a higher waits, and none that is
            // longer.
            let others: Vec<_> = prompts.iter().filter(|&&(age, ..)| Some(age) != oldest).collect();
            for (_, priority, remaining, grant) in &others {
                if grant < remaining {
                    for (_, other_priority, other_remaining, other_grant) in &others {
                        prop_assert!(other_priority >= priority || *other_grant == 0);
                        let longer = other_priority == priority && other_remaining > remaining;
                        prop_assert!(!longer || *other_grant == 0);
                    }
                }
            }
        }
    }

    /// Prompts that arrive at any time, with any priority and length: each is read within the sum of `4 * ceil(n /
    /// budget)` over itself and those before it that were not read yet.
    #[test]
    fn every_prompt_is_read_within_its_bound(
        arrivals in proptest::collection::vec((0_u32..40, 1_u32..900, priority()), 1..40),
        decoding in 0_usize..8, prefill in 1_u32..64,
    ) {
        struct Prompt { due: u64, left: u32, age: u64, priority: Priority }
        let mut unread: Vec<Prompt> = Vec::new();
        let mut coming = arrivals.into_iter().enumerate().peekable();
        let (mut step, mut next_at) = (0_u64, 0_u64);
        while coming.peek().is_some() || !unread.is_empty() {
            while let Some((age, (wait, length, priority))) = coming.next_if(|_| next_at <= step) {
                let steps = |tokens: u32| OLDEST_TURN * u64::from(tokens.div_ceil(prefill));
                let due = step + unread.iter().map(|p| steps(p.left)).sum::<u64>() + steps(length);
                unread.push(Prompt { due, left: length, age: age as u64, priority });
                next_at = step + u64::from(wait);
            }
            let mut needs = vec![draft(4); decoding];
            needs.extend(unread.iter().map(|p| Need::Prefill { remaining: p.left, age: p.age, priority: p.priority, scores: false }));
            let grants = plan(&needs, 512, prefill, step);
            prop_assert!(grants[..decoding].iter().all(|&grant| grant >= 1));
            step += 1;
            for (p, grant) in unread.iter_mut().zip(&grants[decoding..]) {
                p.left -= grant;
                prop_assert!(p.left == 0 || step < p.due, "prompt {} has {} left at step {step}", p.age, p.left);
            }
            unread.retain(|p| p.left > 0);
        }
    }
}

/// What the policy is for: beside a long prompt, short ones that keep coming are read at once, and it goes on.
#[test]
fn short_prompts_pass_a_long_one_which_still_moves() {
    let (mut long, mut steps) = (4000_u32, 0);
    // Until it is the shorter one itself.
    while long > 64 {
        let grants = plan(&[prompt(long, 0), prompt(48, 1 + steps)], 512, 64, steps);
        assert_eq!(grants, if steps % 4 == 0 { [64, 0] } else { [16, 48] }, "{long} left");
        long -= grants[0];
        steps += 1;
    }
    assert_eq!(steps, 141);
}

#[test]
fn what_is_nearly_a_tile_becomes_one_where_there_is_more_to_read() {
    let together = |grants: &[u32]| vec![grants.iter().sum()];
    let bounds = |prefill_tokens| Bounds { batch_tokens: 512, prefill_tokens, turn: 1, ..BOUNDS };
    let prompt = |remaining, age| Need::Prefill { remaining, age, priority: Priority::Normal, scores: false };
    let planned = |remaining, prefill_tokens, tile| {
        let mut needs = vec![Need::Decode { drafts: 0 }; 8];
        needs.push(prompt(remaining, 1));
        plan_in_tiles(&needs, bounds(prefill_tokens), tile, together).iter().sum::<u32>()
    };
    assert_eq!([32, 40, 52, 56, 60].map(|tokens| planned(300, tokens, 64)), [64, 64, 64, 64, 68]);
    // Too few for it, or nothing more to read, or no such tile.
    assert_eq!((planned(300, 28, 64), planned(40, 40, 64), planned(300, 40, 0)), (36, 48, 48));
    // Of two parts the one that is nearly a tile, for which the shorter prompt has the tokens.
    let needs = [prompt(300, 1), prompt(200, 2)];
    let apart = |grants: &[u32]| grants.to_vec();
    assert_eq!(plan_in_tiles(&needs, bounds(48), 64, apart), [0, 64]);
    // Nobody's row is taken for it.
    let streams = vec![Need::Decode { drafts: 0 }; 50];
    assert_eq!(plan_in_tiles(&streams, bounds(8), 64, together), vec![1; 50]);
}

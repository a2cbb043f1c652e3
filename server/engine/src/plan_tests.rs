#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;
use crate::params::Priority::{High, Low, Normal};

const DECODE: Need = Need::Decode { drafts: 0 };

fn prompt(remaining: u32, age: u64) -> Need {
    Need::Prefill { remaining, age, priority: Normal }
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
        // A short prompt is read whole beside a long one, which gets what it leaves.
        (&[p(1000, 1), p(3, 2)], 64, 64, &[61, 3]),
        // The shorter first, but for the oldest's quarter.
        (&[p(1000, 1), p(500, 2)], 64, 64, &[16, 48]),
        (&[p(1000, 1), p(500, 2), p(20, 3)], 64, 64, &[16, 28, 20]),
        (&[p(1000, 2), p(500, 1)], 64, 64, &[0, 64]),
        (&[p(10, 3), p(10, 1), p(10, 2)], 2, 2, &[0, 2, 0]),
        (&[p(2, 1)], 64, 64, &[2]),
        (&[p(5, 1), DECODE], 1, 8, &[0, 1]),
    ];
    for (needs, batch, prefill, want) in cases {
        assert_eq!(plan_step(needs, *batch, *prefill), *want, "{needs:?} {batch} {prefill}");
    }
}

#[test]
fn a_higher_priority_comes_before_a_shorter_prompt() {
    let p = |remaining, age, priority| Need::Prefill { remaining, age, priority };
    let cases: &[(&[Need], u32, &[u32])] = &[
        (&[p(500, 1, Normal), p(10, 2, Low), p(500, 3, High)], 64, &[16, 0, 48]),
        (&[p(500, 1, Normal), p(10, 2, Low), p(30, 3, High)], 64, &[34, 0, 30]),
        (&[p(500, 1, Low), p(40, 2, Normal), p(30, 3, Normal)], 64, &[16, 18, 30]),
    ];
    for (needs, prefill, want) in cases {
        assert_eq!(plan_step(needs, 512, *prefill), *want, "{needs:?} {prefill}");
    }
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
        assert_eq!(plan_step(needs, *batch, *prefill), *want, "{needs:?} {batch} {prefill}");
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
            priority
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn grants_keep_the_limits_and_waste_nothing(
        needs in proptest::collection::vec(need(), 0..40), prefill in 1_u32..600, room in 0_u32..64,
    ) {
        // A batch has room for every sequence, as the engine makes it.
        let batch = 40 + room;
        let grants = plan_step(&needs, batch, prefill);
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
            Need::Prefill { remaining, age, priority } => Some((age, priority, remaining, grant)),
            Need::Decode { .. } => None,
        }).collect();
        if let Some(age) = prompts.iter().map(|&(age, ..)| age).min() {
            // The oldest always gets its share.
            let share = budget.div_ceil(OLDEST_SHARE);
            prop_assert!(prompts.iter().any(|&(a, _, remaining, grant)| a == age && grant >= share.min(remaining)));
            // Of the others, none of a lower priority gets anything while one of a higher waits, and none that is
            // longer.
            let others: Vec<_> = prompts.iter().filter(|&&(a, ..)| a != age).collect();
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

    /// Prompts that arrive at any time, with any priority and length: each is read within the sum of `ceil(4n /
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
                let steps = |tokens: u32| u64::from(tokens.div_ceil(prefill.div_ceil(OLDEST_SHARE)));
                let due = step + unread.iter().map(|p| steps(p.left)).sum::<u64>() + steps(length);
                unread.push(Prompt { due, left: length, age: age as u64, priority });
                next_at = step + u64::from(wait);
            }
            let mut needs = vec![draft(4); decoding];
            needs.extend(unread.iter().map(|p| Need::Prefill { remaining: p.left, age: p.age, priority: p.priority }));
            let grants = plan_step(&needs, 512, prefill);
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
        let grants = plan_step(&[prompt(long, 0), prompt(48, 1 + steps)], 512, 64);
        assert_eq!(grants, [16, 48], "{long} left");
        long -= grants[0];
        steps += 1;
    }
    assert_eq!(steps, 246);
}

//! Which tokens one step decodes: a pure function from what each slot needs to how much it gets.
//!
//! Every sequence that generates gets its one token first. What the budget leaves goes to prompts in equal shares, a
//! share that a short prompt does not need going to the others: a short prompt is read in one step beside a long one,
//! and with more prompts than tokens the oldest come first, so none starves.

/// What a slot needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// One token: the one it sampled last.
    Decode,
    /// So many tokens of its prompt; `age` ranks prompts, the lowest being the oldest.
    Prefill { remaining: u32, age: u64 },
}

/// Tokens for each need, in the same order: at most `batch_tokens` in all, and at most `prefill_tokens` for prompts.
pub(crate) fn plan_step(needs: &[Need], batch_tokens: u32, prefill_tokens: u32) -> Vec<u32> {
    let mut grants = vec![0; needs.len()];
    let mut left = batch_tokens;
    let mut prompts: Vec<(usize, u32, u64)> = Vec::new();
    for (i, need) in needs.iter().enumerate() {
        match *need {
            Need::Decode if left > 0 => {
                grants[i] = 1;
                left -= 1;
            }
            Need::Decode => {}
            Need::Prefill { remaining, age } => prompts.push((i, remaining, age)),
        }
    }
    prompts.sort_unstable_by_key(|&(_, _, age)| age);
    let mut budget = left.min(prefill_tokens);
    while budget > 0 && !prompts.is_empty() {
        let share = budget / u32::try_from(prompts.len()).unwrap_or(u32::MAX);
        for (i, remaining, _) in &mut prompts {
            let grant = share.max(1).min(*remaining).min(budget);
            grants[*i] += grant;
            *remaining -= grant;
            budget -= grant;
        }
        prompts.retain(|&(_, remaining, _)| remaining > 0);
    }
    grants
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Need::{Decode, Prefill};
    use super::*;

    #[test]
    fn decoding_comes_first_and_prompts_share_the_rest() {
        let p = |remaining, age| Prefill { remaining, age };
        let cases: &[(&[Need], u32, u32, &[u32])] = &[
            (&[], 8, 8, &[]),
            (&[Decode, Decode], 8, 8, &[1, 1]),
            (&[p(100, 1), Decode], 8, 8, &[7, 1]),
            (&[p(100, 1), Decode], 8, 4, &[4, 1]),
            // A short prompt is read whole beside a long one, which gets what it leaves.
            (&[p(1000, 1), p(3, 2)], 64, 64, &[61, 3]),
            (&[p(1000, 1), p(500, 2)], 64, 64, &[32, 32]),
            // Fewer tokens than prompts: the oldest.
            (&[p(10, 3), p(10, 1), p(10, 2)], 2, 2, &[0, 1, 1]),
            (&[p(2, 1)], 64, 64, &[2]),
            (&[p(5, 1), Decode], 1, 8, &[0, 1]),
        ];
        for (needs, batch, prefill, want) in cases {
            assert_eq!(plan_step(needs, *batch, *prefill), *want, "{needs:?} {batch} {prefill}");
        }
    }

    fn need() -> impl Strategy<Value = Need> {
        prop_oneof![Just(Decode), (1_u32..600, 0_u64..50).prop_map(|(remaining, age)| Prefill { remaining, age })]
    }

    proptest! {
        #[test]
        fn grants_keep_the_limits_and_waste_nothing(
            needs in proptest::collection::vec(need(), 0..40), prefill in 1_u32..600, room in 0_u32..64,
        ) {
            // A batch has room for every sequence, as the engine makes it.
            let batch = 40 + room;
            let grants = plan_step(&needs, batch, prefill);
            let (mut prompt_total, mut wanted) = (0, 0);
            for (need, &grant) in needs.iter().zip(&grants) {
                match *need {
                    Decode => prop_assert_eq!(grant, 1),
                    Prefill { remaining, .. } => {
                        prop_assert!(grant <= remaining);
                        prompt_total += grant;
                        wanted += remaining;
                    }
                }
            }
            let decoding = u32::try_from(needs.iter().filter(|n| **n == Decode).count()).unwrap_or(0);
            prop_assert_eq!(prompt_total, wanted.min(prefill).min(batch - decoding));
            // The oldest prompt always advances.
            let prompts = || needs.iter().zip(&grants).filter_map(|(n, &g)| match *n {
                Prefill { age, .. } => Some((age, g)),
                Decode => None,
            });
            if let Some(oldest) = prompts().map(|(age, _)| age).min() {
                prop_assert!(prompts().any(|(age, g)| age == oldest && g > 0));
            }
        }
    }
}

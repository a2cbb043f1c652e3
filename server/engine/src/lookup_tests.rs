#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;

const CPU: StepCost =
    StepCost { fixed_ms: 40.0, per_decode_row_ms: 4.0, per_prefill_token_ms: 6.0, per_kilocell_ms: 0.0 };
const MAX: u32 = 8;
const LOOK_UP: DraftCost = DraftCost { each_ms: 0.0, first_ms: 0.0 };

/// Runs a text through index and acceptance as a greedy model that generates it would; gives tokens and time without
/// drafts over time with them, for a single stream.
fn speed_up(text: &[Token], prompt: usize, cost: StepCost, rows: u32) -> (f64, u32) {
    let (mut index, mut acceptance) = NgramIndex::of_prompt(&text[..prompt]);
    let (mut ms, mut plain_ms, mut drafted) = (0.0, 0.0, 0);
    while index.len() < text.len() {
        let at = index.len();
        let proposal = index.propose(MAX as usize);
        let drafts = acceptance.drafts(proposal.len() as u32, rows, cost, LOOK_UP);
        let right = proposal.iter().zip(&text[at..]).take(drafts as usize).take_while(|(a, b)| a == b).count();
        acceptance.observe(drafts, right as u32);
        let end = (at + right + 1).min(text.len());
        index.extend(&text[at..end]);
        drafted += drafts;
        ms += cost.step_ms(StepWork::rows(rows + drafts));
        plain_ms += cost.step_ms(StepWork::rows(rows)) * (end - at) as f64;
    }
    (plain_ms / ms, drafted)
}

fn words(text: &str) -> Vec<Token> {
    let mut known: Vec<&str> = Vec::new();
    text.split_inclusive([' ', '\n', '(', ')', ';', ','])
        .map(|word| {
            let at = known.iter().position(|&other| other == word).unwrap_or_else(|| {
                known.push(word);
                known.len() - 1
            });
            at as Token
        })
        .collect()
}

fn random_text(seed: u64, len: usize, vocabulary: Token) -> Vec<Token> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..len).map(|_| rng.random_range(0..vocabulary)).collect()
}

/// A struct, and the boiler-plate that follows from its fields.
fn code() -> Vec<Token> {
    let fields = ["name", "path", "size", "owner", "created", "digest", "layers", "threads", "context", "batch"];
    let mut text = String::from("pub struct Model {\n");
    for field in fields {
        text += &format!("    pub {field} : Option<String> ,\n");
    }
    text += "}\n";
    for field in fields {
        text += &format!("impl Model {{\n    pub fn {field} ( &self ) -> Option<&str> {{\n");
        text += &format!("        self . {field} . as_deref ( ) \n    }}\n");
        text += &format!("    pub fn set_ {field} ( &mut self , value : String ) {{\n");
        text += &format!("        self . {field} = Some( value ) ;\n    }}\n}}\n");
    }
    words(&text)
}

#[test]
fn the_longest_end_that_came_before_counts_and_of_it_the_latest() {
    let propose = |text: &[Token], max| NgramIndex::new(text).propose(max);
    // Of two tokens: what followed the later "1 2".
    assert_eq!(propose(&[1, 2, 3, 1, 2, 4, 1, 2], 2), [4, 1]);
    // "9 1 2" came before "3", although "1 2" came later.
    assert_eq!(propose(&[9, 1, 2, 3, 7, 1, 2, 4, 9, 1, 2], 1), [3]);
    assert_eq!(propose(&[5, 9, 1, 2, 6, 8, 9, 1, 2, 7, 5, 9, 1, 2], 1), [6]);
    // One token is not enough, nor is the end itself.
    assert_eq!(propose(&[1, 2, 3, 1], 4), [] as [Token; 0]);
    assert_eq!(propose(&[1, 2], 4), [] as [Token; 0]);
    assert_eq!(propose(&[], 4), [] as [Token; 0]);
    assert_eq!(propose(&[1, 2, 1, 2], 0), [] as [Token; 0]);
    // A period goes on.
    assert_eq!(propose(&[1, 2, 1, 2], 5), [1, 2, 1, 2, 1]);
    assert_eq!(propose(&[7, 7, 7], 3), [7, 7, 7]);
}

#[test]
fn memory_is_bounded_and_recent_text_is_found_in_a_long_one() {
    let mut text = random_text(1, 200_000, 150_000);
    let again: Vec<Token> = text[199_000..199_050].to_vec();
    text.extend(&again[..10]);
    let index = NgramIndex::new(&text);
    assert_eq!(index.slots.len(), MAX_SLOTS);
    assert_eq!(index.propose(8), again[10..18]);
    assert_eq!(NgramIndex::new(&[1, 2, 3]).slots.len(), MIN_SLOTS);
}

#[test]
fn repetitive_text_gains_and_random_text_loses_next_to_nothing() {
    let verse = random_text(5, 40, 1000);
    let repetitive: Vec<Token> = verse.iter().copied().cycle().take(1000).collect();
    let (gain, _) = speed_up(&repetitive, 80, CPU, 1);
    assert!(gain > 3.0, "repetitive: {gain}");
    let (gain, _) = speed_up(&code(), 60, CPU, 1);
    assert!(gain > 1.5, "code: {gain}");
    // Few tokens, so that there is always a proposal, and it is wrong.
    for seed in 0..10 {
        let (gain, drafted) = speed_up(&random_text(seed, 3000, 20), 300, CPU, 1);
        assert!(gain > 0.97 && drafted < 300, "random: {gain} with {drafted}");
    }
}

#[test]
fn what_a_prompt_repeats_is_expected_of_its_answer_until_it_is_not_so() {
    let verse = random_text(5, 40, 1000);
    let repetitive: Vec<Token> = verse.iter().copied().cycle().take(200).collect();
    let chance = |prompt: &[Token]| NgramIndex::of_prompt(prompt).1.chance();
    assert!(chance(&repetitive) > 0.98);
    assert!((chance(&verse) - 0.5).abs() < 1e-9, "nothing is known");
    assert!((chance(&random_text(6, 300, 20)) - 0.5).abs() < 1e-9, "it may be quoted all the same");
    // The answer is of the prompt's words in another order: each guess is wrong.
    let (mut index, mut acceptance) = NgramIndex::of_prompt(&repetitive);
    let mut in_vain = Vec::new();
    for pair in 0..20 {
        index.extend(&verse[pair..pair + 2]);
        let drafts = acceptance.drafts(index.propose(31).len() as u32, 1, CPU, LOOK_UP);
        acceptance.observe(drafts, 0);
        in_vain.push(drafts);
    }
    assert!(in_vain[0] >= 8, "{in_vain:?}");
    assert!(in_vain[1] <= 4 && in_vain[1..].iter().sum::<u32>() <= 16, "{in_vain:?}");
}

#[test]
fn a_full_batch_is_not_made_slower_for_one_sequence() {
    // 64 rows of which one would draft: a row more costs as much as each of them.
    let repetitive: Vec<Token> = random_text(5, 40, 1000).into_iter().cycle().take(1000).collect();
    let machine = StepCost { fixed_ms: 1.0, per_decode_row_ms: 4.0, per_prefill_token_ms: 6.0, per_kilocell_ms: 0.0 };
    assert_eq!(speed_up(&repetitive, 80, machine, 64).1, 0);
}

#[test]
fn the_number_of_drafts_follows_the_chance_the_rows_and_their_cost() {
    let drafts = |chance, rows| worthwhile(MAX, rows, CPU, LOOK_UP, chance);
    assert_eq!([0.0, 0.05, 0.3, 0.6, 0.9, 1.0].map(|chance| drafts(chance, 1)), [0, 0, 1, 3, 8, 8]);
    assert_eq!([1, 4, 8, 16, 32, 64].map(|rows| drafts(0.8, rows)), [6, 4, 3, 1, 1, 0]);
    // A draft model that takes as long as the model itself never pays.
    assert_eq!(worthwhile(MAX, 1, CPU, DraftCost { each_ms: 44.0, first_ms: 0.0 }, 1.0), 0);
    // What the first brings along must be paid by all.
    let apart = |chance| worthwhile(MAX, 4, CPU, DraftCost { each_ms: 0.0, first_ms: 40.0 }, chance);
    assert_eq!([0.6, 0.9, 1.0].map(apart), [0, 0, 8]);
    // Where rows are free, all are taken that have any chance.
    let free = StepCost { per_decode_row_ms: 0.0, ..CPU };
    assert_eq!(worthwhile(MAX, 1, free, LOOK_UP, 0.05), MAX);
}

#[test]
fn it_turns_off_by_itself_tries_again_more_and_more_rarely_and_comes_back() {
    let mut acceptance = Acceptance::default();
    let mut tries = Vec::new();
    for step in 0..3_000 {
        let drafts = acceptance.drafts(MAX, 4, CPU, LOOK_UP);
        acceptance.observe(drafts, 0);
        if drafts > 0 {
            tries.push(step);
        }
    }
    let settled = tries.iter().position(|&step| step > 20).unwrap_or(tries.len());
    assert!(settled < 20, "{tries:?}");
    let gaps: Vec<i32> = tries[settled..].windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(gaps[..4], [64, 128, 256, 512], "{tries:?}");
    // The text begins to repeat: one try is enough.
    let mut waited = 0;
    while acceptance.drafts(MAX, 4, CPU, LOOK_UP) == 0 {
        acceptance.observe(0, 0);
        waited += 1;
        assert!(waited <= LAST_PROBE_AFTER);
    }
    acceptance.observe(PROBE_TOKENS, PROBE_TOKENS);
    assert!(acceptance.drafts(MAX, 4, CPU, LOOK_UP) >= 2);
    assert_eq!(Acceptance::default().drafts(0, 1, CPU, LOOK_UP), 0);
}

#[test]
fn a_try_that_came_to_nothing_is_made_again_at_once() {
    let mut acceptance = Acceptance::default();
    for _ in 0..40 {
        acceptance.observe(MAX, 0);
    }
    let steps_to_try =
        |acceptance: &mut Acceptance| (1..).find(|_| acceptance.drafts(MAX, 4, CPU, LOOK_UP) > 0).expect("a try comes");
    assert!(steps_to_try(&mut acceptance) >= FIRST_PROBE_AFTER);
    // The draft model had to read first.
    acceptance.put_off();
    assert_eq!(steps_to_try(&mut acceptance), 1);
    acceptance.observe(PROBE_TOKENS, PROBE_TOKENS);
    assert!(acceptance.drafts(MAX, 4, CPU, LOOK_UP) > 0, "it came back");
}

proptest! {
    /// Against a search through the whole text, for sequences that the table has room for.
    #[test]
    fn a_proposal_is_what_followed_the_same_end(
        text in proptest::collection::vec(0_i32..6, 0..400), max in 0_usize..12,
    ) {
        let index = NgramIndex::new(&text);
        prop_assert_eq!(&index.tokens, &text);
        let proposal = index.propose(max);
        prop_assert!(proposal.is_empty() || proposal.len() == max);
        let followed = |from: usize| {
            let mut whole = text.clone();
            for at in from..from + max { whole.push(whole[at]); }
            whole.split_off(text.len())
        };
        // Places that are shared may lose one, so any n-gram's latest occurrence will do.
        let candidates = NGRAM_SIZES.into_iter().filter(|&n| n <= text.len()).filter_map(|n| {
            let end = &text[text.len() - n..];
            (n..text.len()).rev().find(|&at| text[at - n..at] == *end)
        });
        let candidates: Vec<Vec<Token>> = candidates.map(followed).collect();
        prop_assert!(proposal.is_empty() || candidates.contains(&proposal), "{:?} not of {:?}", proposal, candidates);
    }

    #[test]
    fn no_result_breaks_the_acceptance(
        steps in proptest::collection::vec((0_u32..20, 0_u32..25, 0_u32..300), 1..300),
        fixed_ms in 0.0_f64..100.0, per_decode_row_ms in 0.0_f64..10.0,
    ) {
        let cost = StepCost { fixed_ms, per_decode_row_ms, per_prefill_token_ms: 1.0, per_kilocell_ms: 0.0 };
        let mut acceptance = Acceptance::default();
        for (available, accepted, rows) in steps {
            let drafts = acceptance.drafts(available, rows, cost, LOOK_UP);
            prop_assert!(drafts <= available);
            acceptance.observe(drafts, accepted);
            prop_assert!((0.0..=1.0).contains(&acceptance.chance()));
        }
    }
}

#[test]
fn prompts_that_wait_are_indexed_while_there_is_room() {
    let (indexer, prompt) = (Indexer::default(), vec![1; MAX_WAITING_TOKENS / 2]);
    let first = indexer.index(&prompt).unwrap();
    let second = indexer.index(&prompt).unwrap();
    assert!(indexer.index(&[1]).is_none());
    drop(first);
    assert!(indexer.index(&[1]).is_some());
    // Whoever takes the index out gives the room back, too.
    let take = |repeats: Repeats| repeats.index;
    assert_eq!(take(second).len(), prompt.len());
    assert_eq!(indexer.waiting.load(Relaxed), 0);
}

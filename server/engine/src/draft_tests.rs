#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;
use crate::backend::scripted::{Fault, ScriptedBackend, VOCAB, logits_after};

const SEATS: u32 = 3;
const POSITIONS: u32 = 1_000;
const MOST: u32 = 5;

fn draft(shared_vocab: u32) -> Draft<ScriptedBackend> {
    Draft::new(ScriptedBackend::new(SEATS, POSITIONS, SEATS + MAX_DRAFT_CATCH_UP_TOKENS), shared_vocab, MOST)
}

/// What the model says after these tokens.
fn greedy(tokens: &[Token], n: usize) -> Vec<Token> {
    let mut all = tokens.to_vec();
    for _ in 0..n {
        all.extend(argmax(&logits_after(&all)));
    }
    all.split_off(tokens.len())
}

/// Asks for one sequence that runs alone.
fn one(draft: &mut Draft<ScriptedBackend>, ticket: u64, tokens: &[Token], wanted: u32) -> Vec<Token> {
    let guesses = draft.propose(&[Ask { ticket, tokens, wanted }], &[ticket]).unwrap();
    draft.assert_books();
    guesses.into_iter().next().unwrap()
}

#[test]
fn a_guess_is_what_the_small_model_says_and_what_it_has_read_is_not_read_again() {
    let mut draft = draft(VOCAB);
    let mut tokens = vec![7; 50];
    assert_eq!(one(&mut draft, 1, &tokens, 4), greedy(&tokens, 4));
    assert_eq!(draft.backend().decoded_tokens, 50 + 3);
    // Two of them were right, then came another one.
    tokens.extend(greedy(&tokens.clone(), 2));
    tokens.push(if greedy(&tokens, 1) == [9] { 10 } else { 9 });
    assert_eq!(one(&mut draft, 1, &tokens, 1), greedy(&tokens, 1));
    assert_eq!(draft.backend().decoded_tokens, 53 + 1);
    // The sequence was cancelled: the next one begins as it did, and another has nothing in common with it.
    let other = [&tokens[..40], &[3; 20]].concat();
    assert_eq!(one(&mut draft, 2, &other, 1), greedy(&other, 1));
    assert_eq!(draft.backend().decoded_tokens, 54 + 20);
    assert_eq!(one(&mut draft, 3, &[11; 10], 1), greedy(&[11; 10], 1));
    assert_eq!(draft.backend().decoded_tokens, 74 + 10);
    assert_eq!((draft.room(10), draft.room(POSITIONS - 2), draft.room(POSITIONS + 9)), (MOST, 2, 0));
}

#[test]
fn a_long_text_is_read_in_parts_which_hold_up_nobody_who_lacks_little() {
    let mut draft = draft(VOCAB);
    let long: Vec<Token> = (0..300).map(|i| 1 + i % 40).collect();
    let mut short = vec![5; 10];
    let limit = MAX_DRAFT_CATCH_UP_TOKENS as usize;
    let parts = long.len().div_ceil(limit - 10);
    for part in 0..parts {
        let before = draft.backend().decoded_tokens;
        let asks = [Ask { ticket: 1, tokens: &long, wanted: 2 }, Ask { ticket: 2, tokens: &short, wanted: 3 }];
        let guesses = draft.propose(&asks, &[1, 2]).unwrap();
        draft.assert_books();
        assert_eq!(guesses[1], greedy(&short, 3), "part {part}");
        if part + 1 < parts {
            assert_eq!(guesses[0], [] as [Token; 0]);
        } else {
            assert_eq!(guesses[0], greedy(&long, 2));
        }
        assert!(draft.backend().decoded_tokens - before <= u64::from(MAX_DRAFT_CATCH_UP_TOKENS) + 3);
        short.extend(&guesses[1]);
    }
}

#[test]
fn tokens_that_only_one_of_them_has_are_neither_read_nor_guessed() {
    let shared = 20;
    let mut draft = draft(shared);
    assert_eq!(one(&mut draft, 1, &[1, 2, 20, 3], 2), [] as [Token; 0]);
    assert_eq!(draft.backend().decoded_tokens, 0);
    for token in 1..19 {
        let guessed = one(&mut draft, 2, &[token; 5], MOST);
        assert_eq!(guessed.len(), MOST as usize);
        assert!(guessed.iter().all(|&token| token < 20), "{guessed:?}");
    }
}

#[test]
fn a_failure_is_told() {
    let mut draft = draft(VOCAB);
    assert_eq!(draft.measure(9), Ok(()));
    draft.assert_books();
    assert!(draft.take_spent() > Duration::ZERO);
    assert_eq!(draft.take_spent(), Duration::ZERO);
    let faults = draft.backend().control.faults.clone();
    for faulty in [vec![Fault::Fail], vec![Fault::None, Fault::NoKvCells]] {
        faults.lock().unwrap().extend(faulty);
        let asked = draft.propose(&[Ask { ticket: 1, tokens: &[3; 9], wanted: 3 }], &[1]);
        assert!(asked.is_err());
    }
    faults.lock().unwrap().push_back(Fault::Fail);
    assert_eq!(draft.measure(9), Err(NoNumbers::Failed(String::from("scripted"))));
    faults.lock().unwrap().push_back(Fault::Lost);
    assert_eq!(draft.measure(9), Err(NoNumbers::NotFinite));
    // Nothing that it guesses can be believed any more.
    faults.lock().unwrap().extend([Fault::None, Fault::Lost]);
    assert!(draft.propose(&[Ask { ticket: 1, tokens: &[3; 9], wanted: 3 }], &[1]).is_err());
}

/// What happens to a sequence between two steps.
#[derive(Clone, Debug)]
enum Change {
    /// So many of the guesses were right, and one more token came.
    Goes {
        right: usize,
        then: Token,
    },
    Ends(Vec<Token>),
    /// It is not asked for, as when its slot is lost or its own repetitions suffice.
    Rests,
}

fn change() -> impl Strategy<Value = Change> {
    let token = 1..Token::try_from(VOCAB).unwrap();
    prop_oneof![
        6 => (0_usize..6, token.clone()).prop_map(|(right, then)| Change::Goes { right, then }),
        1 => prop::collection::vec(token, 1..200).prop_map(Change::Ends),
        2 => Just(Change::Rests),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Whatever becomes of the sequences: the books are right, and what is guessed is what the small model says.
    #[test]
    fn guesses_follow_their_sequences(
        steps in prop::collection::vec(prop::collection::vec((change(), 1..=MOST), SEATS as usize), 1..40),
    ) {
        let mut draft = draft(VOCAB);
        let mut tickets: Vec<u64> = (0..u64::from(SEATS)).collect();
        let mut texts: Vec<Vec<Token>> = (1..).take(SEATS as usize).map(|token| vec![token; 30]).collect();
        for step in steps {
            let wants = |i: usize| !matches!(step[i].0, Change::Rests);
            let asked: Vec<usize> = (0..texts.len()).filter(|&i| wants(i) && texts[i].len() < 900).collect();
            let asks: Vec<Ask<'_>> = asked
                .iter()
                .map(|&i| Ask { ticket: tickets[i], tokens: &texts[i], wanted: step[i].1 })
                .collect();
            let guesses = draft.propose(&asks, &tickets).unwrap();
            draft.assert_books();
            prop_assert_eq!(guesses.len(), asks.len());
            for (ask, guessed) in asks.iter().zip(&guesses) {
                prop_assert!(guessed.is_empty() || guessed.len() == ask.wanted as usize);
                prop_assert_eq!(guessed, &greedy(ask.tokens, guessed.len()));
            }
            for (&i, guessed) in asked.iter().zip(guesses) {
                match &step[i].0 {
                    Change::Goes { right, then } => {
                        texts[i].extend(guessed.iter().take(*right));
                        texts[i].push(*then);
                    }
                    Change::Ends(next) => {
                        tickets[i] += u64::from(SEATS);
                        texts[i].clone_from(next);
                    }
                    Change::Rests => {}
                }
            }
        }
    }
}

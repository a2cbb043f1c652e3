//! What is remembered of requests, against a plain list of what happened.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use gantry_engine::{PooledWork, Prompt, TextInput};
use proptest::prelude::*;

use super::*;

fn digest(number: u64) -> Digest {
    Digest([number, !number])
}

#[test]
fn what_becomes_of_a_request_depends_on_whether_its_worker_had_begun_with_it() {
    let at = |begun, alone, tried, told_output| AtDeath { begun, alone, tried, told_output }.fate();
    for alone in [false, true] {
        for tried in [false, true] {
            assert_eq!(at(false, alone, tried, false), Fate::Waits, "it merely waited");
            assert_eq!(at(false, alone, tried, true), Fate::Ends);
        }
        assert_eq!(at(true, alone, false, false), Fate::Tried);
        assert_eq!(at(true, alone, false, true), Fate::TriedUnheard, "its client has text");
    }
    assert_eq!(at(true, true, true, false), Fate::Convicted);
    assert_eq!(at(true, true, true, true), Fate::Convicted, "it came as far as before, and no further");
    assert_eq!(at(true, false, true, false), Fate::Ends, "it ran again, and others were beside it in the end");
}

#[test]
fn a_digest_names_what_is_asked_and_nothing_else() {
    let keys = DigestKeys::default();
    let text = |prompt: &str, params: GenerationParams| {
        keys.of_text(&GenerateRequest { prompt: Arc::new(Prompt::Text(prompt.to_owned())), params })
    };
    let plain = text("a", GenerationParams::default());
    let other_way = GenerationParams {
        seed: Some(7),
        priority: Priority::High,
        queue_timeout_ms: Some(9),
        ..GenerationParams::default()
    };
    assert_eq!(plain, text("a", other_way));
    assert_ne!(plain, text("b", GenerationParams::default()));
    let with_grammar = GenerationParams { max_tokens: Some(1), ..GenerationParams::default() };
    assert_ne!(plain, text("a", with_grammar), "a parameter may be why");
    let texts = |texts: &[&str]| {
        let inputs = texts.iter().map(|text| TextInput::Text((*text).to_owned())).collect();
        keys.of_texts(&PoolRequest { work: PooledWork::Embed(inputs), priority: Priority::Low, timeout_ms: None })
    };
    assert_ne!(texts(&["a", "b"]), texts(&["ab"]));
    assert_eq!(texts(&["a", "b"]), texts(&["a", "b"]));
    let asked = GenerateRequest { prompt: Arc::new(Prompt::Text("a".to_owned())), params: GenerationParams::default() };
    assert_ne!(plain, DigestKeys::default().of_text(&asked), "nobody who does not have the keys can tell");
}

#[derive(Clone, Copy, Debug)]
enum Op {
    /// A worker died with this one begun, of which so much had come.
    Died(u64, u64),
    Tried(u64),
    Left(u64),
    Passed(u64),
    Killed(u64),
    /// So many minutes.
    Wait(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let id = || 0_u64..4;
    prop_oneof![
        3 => (id(), 0_u64..5).prop_map(|(id, reached)| Op::Died(id, reached)),
        2 => id().prop_map(Op::Tried),
        1 => id().prop_map(Op::Left),
        1 => id().prop_map(Op::Passed),
        1 => id().prop_map(Op::Killed),
        1 => (1_u64..40).prop_map(Op::Wait),
    ]
}

/// By all that happened to one of them, from the beginning.
fn expected(history: &[(Instant, Op)], id: u64, now: Instant) -> Standing {
    let mut convicted: Option<Instant> = None;
    let mut suspected: Option<(Instant, u64, bool)> = None;
    for &(at, op) in history {
        let is_kept = |since: Instant| at - since < SUSPECT_MEMORY;
        if suspected.is_some_and(|(since, ..)| !is_kept(since)) && matches!(op, Op::Died(..) | Op::Killed(_)) {
            suspected = None;
        }
        match op {
            Op::Died(whose, reached) if whose == id => {
                suspected = Some((at, reached.max(suspected.map_or(0, |(_, before, _)| before)), false));
            }
            Op::Tried(whose) if whose == id => suspected = suspected.map(|(since, reached, _)| (since, reached, true)),
            Op::Left(whose) if whose == id => suspected = suspected.map(|(since, reached, _)| (since, reached, false)),
            Op::Passed(whose) if whose == id => suspected = None,
            Op::Killed(whose) if whose == id => (suspected, convicted) = (None, Some(at)),
            _ => {}
        }
    }
    if convicted.is_some_and(|since| now - since < SUSPECT_MEMORY) {
        return Standing::Convicted;
    }
    match suspected {
        Some((since, reached, on_trial)) if now - since < SUSPECT_MEMORY => Standing::Suspected { reached, on_trial },
        _ => Standing::Clear,
    }
}

proptest! {
    #[test]
    fn what_is_known_is_what_happened_within_the_time_that_it_is_kept(ops in proptest::collection::vec(op(), 0..60)) {
        let (mut suspects, mut now) = (Suspects::default(), Instant::now());
        let mut history = Vec::new();
        let mut deaths = 0;
        for op in ops {
            match op {
                Op::Died(id, reached) => {
                    deaths += 1;
                    suspects.died(0, [(digest(id), reached)].into_iter(), BTreeSet::from([digest(id)]), now);
                }
                Op::Tried(id) => suspects.begin_trial(digest(id)),
                Op::Left(id) => suspects.end_trial(digest(id)),
                Op::Passed(id) => suspects.acquit(digest(id)),
                Op::Killed(id) => suspects.convict(digest(id), now),
                Op::Wait(minutes) => now += Duration::from_secs(60 * minutes),
            }
            history.push((now, op));
            for id in 0..4 {
                prop_assert_eq!(suspects.standing(digest(id), now), expected(&history, id, now), "{}: {:?}", id, history);
            }
        }
        prop_assert!(suspects.unexplained(1).is_empty(), "another worker's");
        prop_assert!(suspects.unexplained(0).len() <= deaths, "none counts twice");
        prop_assert!(suspects.unexplained(0).is_empty(), "each is told once");
    }
}

#[test]
fn a_death_is_explained_by_a_conviction_and_unexplained_when_all_are_cleared() {
    let (mut suspects, now) = (Suspects::default(), Instant::now());
    let both = || BTreeSet::from([digest(1), digest(2)]);
    let begun = || [(digest(1), 0), (digest(2), 0), (digest(3), 9)].into_iter();
    suspects.died(4, begun(), both(), now);
    suspects.acquit(digest(1));
    assert!(suspects.unexplained(4).is_empty(), "the other one may be why");
    suspects.convict(digest(2), now);
    assert!(suspects.unexplained(4).is_empty(), "it is");
    suspects.died(4, begun(), both(), now);
    suspects.acquit(digest(1));
    suspects.acquit(digest(2));
    assert_eq!(suspects.unexplained(4), [now]);
}

#[test]
fn what_is_remembered_is_bounded_and_the_oldest_goes() {
    let (mut suspects, mut now) = (Suspects::default(), Instant::now());
    let most = MAX_SUSPECT_DIGESTS as u64;
    for number in 0..most + 10 {
        now += Duration::from_millis(1);
        suspects.convict(digest(number), now);
        let number = number + 2 * most;
        suspects.died(0, [(digest(number), 0)].into_iter(), BTreeSet::from([digest(number)]), now);
    }
    assert_eq!((suspects.convicted.len(), suspects.suspected.len()), (MAX_SUSPECT_DIGESTS, MAX_SUSPECT_DIGESTS));
    assert_eq!(suspects.standing(digest(9), now), Standing::Clear);
    assert_eq!(suspects.standing(digest(10), now), Standing::Convicted);
    assert_eq!(suspects.standing(digest(most + 9), now), Standing::Convicted);
    assert!(suspects.deaths.len() <= MAX_OPEN_DEATHS && suspects.unexplained.len() <= MAX_OPEN_DEATHS);
}

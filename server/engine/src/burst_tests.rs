use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// A CPU: each row costs half of what a step does without any, so that 4 are worth a burst, 14 are enough and 6 too few to
/// hold others back; a prompt's token takes 15 ms, so that a burst has 1,000 of them, or 25 prompts of 40, or 33 if there
/// are no more.
const CPU: StepCost =
    StepCost { fixed_ms: 30.0, per_decode_row_ms: 15.0, per_prefill_token_ms: 15.0, per_kilocell_ms: 0.0 };
/// A GPU: hundreds of rows cost next to nothing.
const GPU: StepCost =
    StepCost { fixed_ms: 5.0, per_decode_row_ms: 0.02, per_prefill_token_ms: 0.02, per_kilocell_ms: 0.0 };
const STEP_TOKENS: u32 = 64;

fn prompt(ticket: u64, remaining: u32) -> Asking {
    let priority = Priority::Normal;
    let need = Need::Prefill { remaining, age: ticket, priority, scores: false };
    Asking { need, ticket, priority, started: false, read: 0, due: None, followers: 0 }
}

fn stream(ticket: u64) -> Asking {
    let need = Need::Decode { drafts: 0 };
    Asking { need, ticket, priority: Priority::Normal, started: true, read: 0, due: None, followers: 0 }
}

fn prompts(tickets: std::ops::Range<u64>, remaining: u32) -> Vec<Asking> {
    tickets.map(|ticket| prompt(ticket, remaining)).collect()
}

/// What is left to read of each, `None` where a token is generated.
fn shaped(bursts: &mut Bursts, asking: &[Asking], cost: StepCost, now: Instant) -> Vec<Option<u32>> {
    let needs = bursts.shape(asking, cost, STEP_TOKENS, now);
    let unread = needs.iter().map(|need| match need {
        Need::Decode { .. } => None,
        Need::Prefill { remaining, .. } => Some(*remaining),
    });
    unread.collect()
}

#[test]
fn what_comes_at_once_is_read_together_and_what_has_no_room_waits_for_it() {
    let now = Instant::now();
    let mut bursts = Bursts::default();
    let asking = prompts(0..40, 40);
    let expected: Vec<_> = (0..40).map(|at| Some(if at < 24 { 39 } else { 0 })).collect();
    assert_eq!(shaped(&mut bursts, &asking, CPU, now), expected);

    // Read but for their last tokens, which llama.cpp takes as it does a stream's.
    let read = |ticket| Asking { need: Need::Decode { drafts: 0 }, ..prompt(ticket, 1) };
    let mut asking: Vec<Asking> = (0..24).map(read).chain(prompts(24..40, 40)).collect();
    asking[3] = prompt(3, 5);
    let mut expected = vec![Some(0); 40];
    expected[3] = Some(4);
    assert_eq!(shaped(&mut bursts, &asking, CPU, now), expected, "nobody begins before the last of them has been read");
    asking[3] = read(3);
    let later = now + Duration::from_secs(6);
    let go: Vec<_> = (0..40).map(|at| if at < 24 { None } else { Some(0) }).collect();
    assert_eq!(shaped(&mut bursts, &asking, CPU, later), go);

    // The streams are enough to keep the machine busy, so the others wait, for twice as long as the burst took at most.
    let asking: Vec<Asking> = (0..24).map(stream).chain(prompts(24..40, 40)).collect();
    assert_eq!(shaped(&mut bursts, &asking, CPU, later + Duration::from_millis(11_999)), go);
    let read: Vec<_> = (0..40).map(|at| if at < 24 { None } else { Some(40) }).collect();
    assert_eq!(shaped(&mut bursts, &asking, CPU, later + Duration::from_secs(12)), read);
    assert_eq!(shaped(&mut bursts, &asking, CPU, later), read, "what is over does not come back");
}

#[test]
fn few_that_have_no_room_are_read_with_the_others() {
    let now = Instant::now();
    let in_burst = |prompts: &[Asking], cost| {
        shaped(&mut Bursts::default(), prompts, cost, now).iter().filter(|left| **left == Some(39)).count()
    };
    assert_eq!(in_burst(&prompts(0..33, 40), CPU), 33);
    // 25 are read in time: one of them would be left over of whole groups of rows, and so with the streams that there are.
    assert_eq!(in_burst(&prompts(0..34, 40), CPU), 24);
    let beside = |streams: u64| [(100..100 + streams).map(stream).collect(), prompts(0..40, 40)].concat();
    assert_eq!([1, 2, 3].map(|streams| in_burst(&beside(streams), CPU)), [23, 22, 25]);
    // What is learnt meanwhile counts: those that have not begun to be read leave it again.
    let mut bursts = Bursts::default();
    shaped(&mut bursts, &prompts(0..33, 40), CPU, now);
    let slower = StepCost { per_prefill_token_ms: 30.0, ..CPU };
    let mut asking = prompts(0..33, 40);
    asking[32] = prompt(32, 39);
    let left = shaped(&mut bursts, &asking, slower, now);
    assert_eq!(left.iter().filter(|left| **left != Some(0)).count(), 12 + 1, "12 are read in time, and one has begun");
}

#[test]
fn streams_that_end_make_room_before_the_time_is_up() {
    let now = Instant::now();
    let mut bursts = Bursts::default();
    shaped(&mut bursts, &prompts(0..40, 40), CPU, now);
    let streams = |n| (0..n).map(stream).chain(prompts(25..40, 40)).collect::<Vec<_>>();
    let waiting = |shaped: &[Option<u32>]| shaped.iter().filter(|left| **left == Some(0)).count();
    let later = now + Duration::from_secs(8);
    assert_eq!(waiting(&shaped(&mut bursts, &streams(25), CPU, later)), 15);
    assert_eq!(waiting(&shaped(&mut bursts, &streams(7), CPU, later)), 15);
    assert_eq!(waiting(&shaped(&mut bursts, &streams(6), CPU, later)), 0);
    // The next burst is of those who waited: when hardly anyone streams beside them.
    let next = shaped(&mut bursts, &streams(2), CPU, later);
    assert_eq!(next, [vec![None; 2], vec![Some(39); 15]].concat());
}

#[test]
fn nobody_waits_for_streams_that_are_few() {
    let now = Instant::now();
    let mut bursts = Bursts::default();
    let asking = prompts(0..40, 40);
    shaped(&mut bursts, &asking, CPU, now);
    // All but 13 of them have left.
    let asking: Vec<Asking> = (0..13).map(stream).chain(prompts(25..40, 40)).collect();
    let read = [vec![None; 13], vec![Some(40); 15]].concat();
    assert_eq!(shaped(&mut bursts, &asking, CPU, now), read);
}

#[test]
fn those_of_another_kind_wait_for_nobody() {
    let now = Instant::now();
    let mut bursts = Bursts::default();
    shaped(&mut bursts, &prompts(0..40, 40), CPU, now);
    let mut asking = prompts(0..40, 40);
    // In a burst of 15 s at most, and while it holds others for 30 s.
    let due = |s| Some(now + Duration::from_secs(s));
    let others = [
        Asking {
            priority: Priority::High,
            need: Need::Prefill { remaining: 90, age: 40, priority: Priority::High, scores: false },
            ..prompt(40, 90)
        },
        prompt(51, 19),
        Asking { due: due(42), ..prompt(52, 40) },
        Asking { started: true, ..prompt(53, 200) },
        Asking { due: due(60), ..prompt(54, 40) },
        prompt(55, 20),
    ];
    asking.extend(others);
    let expected = [Some(90), Some(19), Some(40), Some(200), Some(0), Some(0)];
    assert_eq!(shaped(&mut bursts, &asking, CPU, now)[40..], expected);
    let streaming: Vec<Asking> = (0..25).map(stream).chain(prompts(25..40, 40)).chain(others).collect();
    assert_eq!(shaped(&mut bursts, &streaming, CPU, now + Duration::from_secs(15))[40..], expected);
}

#[test]
fn no_burst_where_it_wins_nothing() {
    let now = Instant::now();
    let unchanged = |asking: &[Asking], cost| {
        let needs: Vec<Need> = asking.iter().map(|asking| asking.need).collect();
        Bursts::default().shape(asking, cost, STEP_TOKENS, now) == needs
    };
    assert!(!unchanged(&prompts(0..4, 40), CPU));
    assert!(unchanged(&prompts(0..3, 40), CPU), "three win little");
    let faster = StepCost { fixed_ms: 72.0, ..CPU };
    assert!(!unchanged(&prompts(0..6, 40), faster));
    assert!(unchanged(&prompts(0..5, 40), faster), "five rows are cheap beside each other");
    assert!(unchanged(&prompts(0..64, 40), GPU), "so are hundreds on a GPU");
    assert!(unchanged(&prompts(0..10, 6), CPU), "one step reads them all");
    assert!(unchanged(&prompts(0..20, 400), CPU), "two of them would take the time of a burst");
    let with = |other| prompts(0..10, 40).into_iter().chain([other]).collect::<Vec<_>>();
    assert!(unchanged(&with(prompt(11, 19)), CPU), "a short one does not wait for the others");
    assert!(!unchanged(&with(prompt(11, 81)), CPU), "a long one is not among them");
    assert!(unchanged(&with(Asking { started: true, ..prompt(11, 40) }), CPU), "one who gave way goes first");
    let beside =
        |streams: u64| prompts(0..10, 40).into_iter().chain((10..10 + streams).map(stream)).collect::<Vec<_>>();
    assert!(!unchanged(&beside(2), CPU));
    assert!(unchanged(&beside(3), CPU), "streams are not held up");
    // Eleven of 40 tokens take 6.6 s.
    let due = |s| Some(Asking { due: Some(now + Duration::from_secs(s)), ..prompt(11, 40) });
    assert!(!unchanged(&prompts(0..10, 40).into_iter().chain(due(14)).collect::<Vec<_>>(), CPU));
    assert!(
        unchanged(&prompts(0..10, 40).into_iter().chain(due(12)).collect::<Vec<_>>(), CPU),
        "one of them has no time"
    );
}

#[test]
fn one_that_others_follow_begins_with_them() {
    let now = Instant::now();
    let leading = |followers| Asking { followers, ..prompt(0, 200) };
    let mut bursts = Bursts::default();
    assert_eq!(shaped(&mut bursts, &[leading(8)], CPU, now), [Some(199)]);
    let rest = Asking { read: 136, followers: 8, ..prompt(0, 64) };
    assert_eq!(shaped(&mut bursts, &[rest], CPU, now), [Some(63)]);
    let held = Asking { need: Need::Decode { drafts: 0 }, read: 199, ..prompt(0, 1) };
    let asking = |unread| vec![held].into_iter().chain(prompts(1..9, unread)).collect::<Vec<_>>();
    assert_eq!(shaped(&mut bursts, &asking(40), CPU, now), [vec![Some(0)], vec![Some(39); 8]].concat());
    let read = |ticket| Asking { need: Need::Decode { drafts: 0 }, ..prompt(ticket, 1) };
    let all: Vec<Asking> = [held].into_iter().chain((1..9).map(read)).collect();
    assert_eq!(shaped(&mut bursts, &all, CPU, now), [None; 9]);

    // What one step reads needs no order, and a burst of others is not its own.
    let after_leading = |asking: &[Asking]| {
        let mut bursts = Bursts::default();
        shaped(&mut bursts, &[leading(8)], CPU, now);
        shaped(&mut bursts, asking, CPU, now)
    };
    assert_eq!(after_leading(&asking(5)), [vec![None], vec![Some(5); 8]].concat());
    let high = |a: &Asking| Asking { priority: Priority::High, need: a.up_to(40), ..*a };
    let others = [vec![held], prompts(1..9, 40).iter().map(high).collect()].concat();
    assert_eq!(after_leading(&others), [vec![None], vec![Some(39); 8]].concat());
    // Of 500 tokens 481 were there already.
    let mut bursts = Bursts::default();
    let short = Asking { read: 481, followers: 8, ..prompt(0, 19) };
    assert_eq!(shaped(&mut bursts, &[short], CPU, now), [Some(18)]);
    let others = [vec![Asking { read: 499, ..held }], prompts(1..9, 40)].concat();
    let beside = [vec![None], vec![Some(39); 8]].concat();
    assert_eq!(shaped(&mut bursts, &others, CPU, now), beside, "the others are long beside it");
    // It is gone, or those who followed it are.
    assert_eq!(after_leading(&prompts(1..9, 40)), [Some(39); 8]);
    assert_eq!(after_leading(&[held]), [None]);
    assert_eq!(after_leading(&[vec![held], prompts(1..3, 40)].concat()), [None, Some(40), Some(40)]);
    // A burst that takes longer than was thought does not let it go.
    let mut bursts = Bursts::default();
    shaped(&mut bursts, &[leading(8)], CPU, now);
    shaped(&mut bursts, &asking(40), CPU, now);
    let late = now + Duration::from_secs(16);
    let left = shaped(&mut bursts, &[vec![held], prompts(1..9, 20)].concat(), CPU, late);
    assert_eq!(left, [vec![Some(0)], vec![Some(19); 8]].concat());

    let waits_for_nobody = |asking: &[Asking], cost| {
        let needs: Vec<Need> = asking.iter().map(|asking| asking.need).collect();
        Bursts::default().shape(asking, cost, 512, now) == needs
    };
    assert!(!waits_for_nobody(&[leading(3)], CPU));
    assert!(waits_for_nobody(&[leading(2)], CPU), "three win little");
    assert!(waits_for_nobody(&[leading(64)], GPU));
    assert!(waits_for_nobody(&[leading(4), stream(1), stream(2)], CPU), "streams are not held up");
    assert!(waits_for_nobody(&[leading(8), prompt(1, 50)], CPU), "others are read beside it");
    assert!(waits_for_nobody(&[Asking { started: true, ..leading(8) }], CPU), "one who gave way goes first");
    let due = |s| Asking { due: Some(now + Duration::from_secs(s)), ..leading(8) };
    assert!(waits_for_nobody(&[due(30)], CPU), "it has no time");
    assert!(!waits_for_nobody(&[due(31)], CPU));
}

#[test]
fn who_leaves_is_not_waited_for() {
    let now = Instant::now();
    let mut bursts = Bursts::default();
    shaped(&mut bursts, &prompts(0..20, 40), CPU, now);
    let left = [vec![prompt(0, 40)], prompts(20..22, 40)].concat();
    assert_eq!(shaped(&mut bursts, &left, CPU, now), [Some(39), Some(0), Some(0)]);
    assert_eq!(shaped(&mut bursts, &left[1..], CPU, now), [Some(40), Some(40)]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever comes and goes, each step has something to decode, and every prompt is read in the end.
    /// Invariant: a burst and its holding delay prompts, and never stop them.
    #[test]
    fn everyone_is_read_in_the_end(
        arrivals in prop::collection::vec((0u32..40, 2u32..200, 1u32..60, 0u32..9), 1..60),
        fixed_ms in 1.0f64..60.0,
        row_ms in 0.1f64..20.0,
        token_ms in 0.1f64..20.0,
    ) {
        let cost = StepCost { fixed_ms, per_decode_row_ms: row_ms, per_prefill_token_ms: token_ms, per_kilocell_ms: 0.0 };
        let mut bursts = Bursts::default();
        let mut now = Instant::now();
        // By ticket: tokens unread, tokens yet to be generated, whether it has begun, and how many follow it.
        let mut live: BTreeMap<u64, (u32, u32, bool, u32)> = BTreeMap::new();
        let mut coming = arrivals.iter().enumerate();
        let mut next = coming.next();
        for step in 0u32.. {
            while let Some((ticket, &(at, unread, answer, followers))) =
                next.filter(|(_, a)| a.0 <= step || live.is_empty())
            {
                let _ = at;
                live.insert(ticket as u64, (unread, answer, false, followers));
                next = coming.next();
            }
            if live.is_empty() {
                break;
            }
            prop_assert!(step < 100_000, "somebody is never read");
            let read = |ticket: u64, unread| arrivals[ticket as usize].1 - unread;
            let asking: Vec<Asking> = live.iter().map(|(&ticket, &(unread, _, started, followers))| match (unread, started) {
                (_, true) => stream(ticket),
                (1, false) => Asking { need: Need::Decode { drafts: 0 }, read: read(ticket, 1), ..prompt(ticket, 1) },
                (unread, false) => Asking { followers, read: read(ticket, unread), ..prompt(ticket, unread) },
            }).collect();
            let needs = bursts.shape(&asking, cost, STEP_TOKENS, now);
            let mut budget = STEP_TOKENS;
            let mut decoded = 0;
            for (asking, need) in asking.iter().zip(&needs) {
                let Some(state) = live.get_mut(&asking.ticket) else { continue };
                let got = match *need {
                    Need::Decode { .. } => 1,
                    Need::Prefill { remaining, .. } => {
                        prop_assert!(remaining <= asking.unread());
                        let got = remaining.min(budget);
                        budget -= got;
                        got
                    }
                };
                decoded += got;
                if state.2 {
                    state.1 -= 1;
                } else {
                    state.0 -= got;
                    state.2 = state.0 == 0;
                }
            }
            prop_assert!(decoded > 0, "a step without tokens");
            live.retain(|_, (_, answer, ..)| *answer > 0);
            now += Duration::from_secs_f64((fixed_ms + token_ms * f64::from(decoded)) / 1e3);
        }
    }
}

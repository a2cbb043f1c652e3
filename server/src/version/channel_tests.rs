#![allow(clippy::unwrap_used)]
//! One answer's channel, driven by hand.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Wake;

use gantry_engine::{FinishReason, GenerationEvent, Timings, Usage};
use proptest::prelude::*;

use super::*;
use crate::limits::{OUTPUT_BUDGET_BYTES, OUTPUT_FLOOR_BYTES, OUTPUT_PER_ANSWER_BYTES, SLOW_CLIENT_LIMIT};

fn delta(bytes: usize) -> Item {
    Ok(GenerationEvent::Text { text: "x".repeat(bytes), tokens: 1, logprobs: Vec::new() })
}

fn finished() -> Item {
    Ok(GenerationEvent::Finished {
        reason: FinishReason::Stop,
        stop: None,
        usage: Usage::default(),
        timings: Timings::default(),
    })
}

fn poll(receiver: &EventReceiver) -> Poll<(Option<Item>, bool)> {
    receiver.poll_recv(&mut Context::from_waker(Waker::noop()))
}

#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn whoever_waits_is_woken_by_an_event_and_by_the_end() {
    let (sender, receiver) = channel(&Output::new(OUTPUT_BUDGET_BYTES), 1);
    let wakes = Arc::<Wakes>::default();
    let waker = Waker::from(Arc::clone(&wakes));
    let poll = || receiver.poll_recv(&mut Context::from_waker(&waker));
    assert!(poll().is_pending());
    assert_eq!(sender.send(delta(1)), Sent::Waits);
    assert_eq!(wakes.0.load(Ordering::Relaxed), 1);
    assert_eq!(poll(), Poll::Ready((Some(delta(1)), false)));
    assert!(poll().is_pending());
    drop(sender);
    assert_eq!(wakes.0.load(Ordering::Relaxed), 2);
    assert_eq!(poll(), Poll::Ready((None, false)));
}

#[test]
fn a_last_event_is_taken_however_much_waits() {
    let output = Output::new(OUTPUT_BUDGET_BYTES);
    let (sender, receiver) = channel(&output, 1);
    assert_eq!(sender.send(delta(2 * OUTPUT_PER_ANSWER_BYTES)), Sent::Pauses);
    assert_eq!(sender.send(finished()), Sent::Waits);
    assert!(poll(&receiver).is_ready());
    assert_eq!(poll(&receiver), Poll::Ready((Some(finished()), false)));
    assert_eq!(output.held_bytes(), 0);
}

#[test]
fn nobody_is_sent_to_and_nothing_is_held_once_the_client_has_left() {
    let output = Output::new(OUTPUT_BUDGET_BYTES);
    let (sender, receiver) = channel(&output, 1);
    assert_eq!(sender.send(delta(2 * OUTPUT_PER_ANSWER_BYTES)), Sent::Pauses);
    drop(receiver);
    assert_eq!(output.held_bytes(), 0);
    assert!(sender.is_closed());
    assert_eq!(sender.send(delta(1)), Sent::Gone);
    let now = Instant::now();
    let limit = Duration::from_secs(1);
    assert!(!sender.ends_unread(now, limit) && !sender.ends_unread(now + limit, limit));
    assert_eq!((output.held_bytes(), output.ended()), (0, 0));
}

#[test]
fn an_empty_queue_keeps_little_of_the_memory_that_it_had() {
    let (sender, receiver) = channel(&Output::new(OUTPUT_BUDGET_BYTES), 1);
    for _ in 0..500 {
        assert_ne!(sender.send(delta(0)), Sent::Ended);
    }
    for _ in 0..500 {
        assert!(poll(&receiver).is_ready());
    }
    assert!(receiver.0.lock().items.capacity() <= 4 * KEPT_PLACES);
}

/// Whether one of so many answers to a request ends whose client takes so many pieces of it each ten seconds, for ten minutes.
/// It may hold no more than one may in any case, and has more come whenever it is not paused.
fn ends(pieces: usize, answers: usize) -> bool {
    let output = Output::new(OUTPUT_BUDGET_BYTES);
    output.hold(OUTPUT_BUDGET_BYTES);
    let (sender, receiver) = channel(&output, answers);
    let mut now = Instant::now();
    (0..60).any(|_| {
        while !sender.is_paused() {
            sender.send(delta(1000));
        }
        let ends = sender.ends_unread(now, SLOW_CLIENT_LIMIT);
        for _ in 0..pieces {
            assert!(ends || poll(&receiver).is_ready());
        }
        now += Duration::from_secs(10);
        ends
    })
}

#[test]
fn who_sips_is_ended_and_who_takes_what_waited_or_enough_is_not() {
    assert!(ends(0, 1) && ends(1, 1));
    assert!(ends(2, 1), "though it goes on now and then");
    assert!(!ends(3, 1), "all that waited was taken in each minute");
    assert!(ends(0, 16) && !ends(1, 16), "its client takes as much of fifteen others");
}

#[test]
fn what_an_answer_left_is_thrown_away_where_its_client_takes_nothing() {
    let output = Output::new(OUTPUT_BUDGET_BYTES);
    let [taken, left, unread] = std::array::from_fn(|_| {
        let (sender, receiver) = channel(&output, 1);
        assert_eq!((sender.send(delta(1000)), sender.send(finished())), (Sent::Waits, Sent::Waits));
        receiver
    });
    let held_bytes = output.held_bytes();
    let begin = Instant::now();
    output.sweep(begin);
    for _ in 0..2 {
        assert!(matches!(poll(&taken), Poll::Ready((Some(Ok(_)), false))));
    }
    drop(left);
    output.sweep(begin + SLOW_CLIENT_LIMIT - Duration::from_secs(1));
    assert_eq!((output.held_bytes(), output.ended()), (held_bytes / 3, 0));
    for _ in 0..2 {
        output.sweep(begin + SLOW_CLIENT_LIMIT);
        assert_eq!(output.ended(), 1);
    }
    assert!(output.held_bytes() < 1000);
    let error = GenerationError::SlowClient(Slowness::Stalled(SLOW_CLIENT_LIMIT));
    assert_eq!(poll(&unread), Poll::Ready((Some(Err(error)), false)));
    assert_eq!(poll(&unread), Poll::Ready((None, false)));
    assert_eq!(output.held_bytes(), 0);
}

proptest! {
    /// Of several answers whatever is sent comes in its order, whole, and nothing is counted once all is taken; and when
    /// nothing waits for a client its answer is not paused.
    #[test]
    fn what_is_sent_comes_and_who_has_taken_all_goes_on(
        steps in proptest::collection::vec((0_usize..6, prop_oneof![Just(0), 1..2 * OUTPUT_PER_ANSWER_BYTES]), 1..200)
    ) {
        let output = Output::new(OUTPUT_BUDGET_BYTES);
        let answers: Vec<_> = (0..6).map(|_| channel(&output, 1)).collect();
        let mut wanted = vec![VecDeque::new(); 6];
        for (index, bytes) in steps {
            let (sender, receiver) = &answers[index];
            if bytes > 0 {
                if sender.is_paused() {
                    continue;
                }
                wanted[index].push_back(bytes);
                let pauses = sender.send(delta(bytes)) == Sent::Pauses;
                prop_assert_eq!(pauses, sender.is_paused());
                prop_assert!(!pauses || receiver.0.lock().held_bytes > OUTPUT_FLOOR_BYTES);
            } else {
                let paused = sender.is_paused();
                let taken = match poll(receiver) {
                    Poll::Ready((Some(item), resumes)) => {
                        prop_assert_eq!(resumes, paused && !sender.is_paused());
                        Some(item)
                    }
                    _ => None,
                };
                prop_assert_eq!(taken, wanted[index].pop_front().map(delta));
                prop_assert!(!wanted[index].is_empty() || !sender.is_paused());
            }
        }
        for ((_, receiver), wanted) in answers.iter().zip(wanted) {
            for bytes in wanted {
                prop_assert!(matches!(poll(receiver), Poll::Ready((Some(item), _)) if item == delta(bytes)));
            }
        }
        prop_assert_eq!(output.held_bytes(), 0);
    }
}

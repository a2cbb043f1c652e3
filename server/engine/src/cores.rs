//! The threads that a model's two contexts share: one generates, the other embeds or scores, and both may have work at
//! once. Threads beyond the processors cost more than they compute, since each waits for those that do not run; so a
//! computation takes what it may have of them for as long as it lasts, and never are more taken than there are.
//!
//! Alone, either has as many as a context may have. Beside an engine that generates, a batch of texts has half of all, and
//! the engine's steps the others: streams go on, more slowly. An engine that was idle when a batch began may have to wait for
//! that batch, as does a step where there is only one thread; the two then take turns.
//!
//! Absent: clocks (time is handed in), and work on a GPU, which needs no threads to speak of.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// An engine that computed within this time generates.
const GENERATES_FOR: Duration = Duration::from_secs(1);

/// Who computes. Each has one thread that asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// The engine's steps.
    Generation,
    /// The embedder's batches.
    Pooling,
}

/// What one of the two has of the threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Share {
    #[default]
    None,
    Waits,
    Has(u32),
}

#[derive(Debug, Default)]
struct Shares {
    generation: Share,
    pooling: Share,
    /// Who computed last.
    last: Option<Work>,
    /// When the engine last had.
    generated: Option<Instant>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Cores {
    all: u32,
    each: u32,
    shares: Mutex<Shares>,
    given_back: Condvar,
}

/// Threads that are taken until this is dropped.
#[derive(Debug)]
pub(crate) struct Claim<'a> {
    cores: &'a Cores,
    work: Work,
    pub(crate) threads: u32,
}

impl Shares {
    /// How many threads this work may take now; until it may, it waits.
    fn take(&mut self, work: Work, (all, each): (u32, u32), now: Instant) -> Option<u32> {
        let half = (all / 2).clamp(1, each);
        // Where both wait for the only thread, the one that did not have it last is next.
        let had_it = all == 1 && self.last == Some(work);
        let taken = match work {
            Work::Generation => match self.pooling {
                Share::None => Some(all),
                // Kept for the texts, or steps that follow each other would never let them in.
                Share::Waits if all > half || had_it || self.last.is_none() => Some(all - half),
                Share::Waits => Some(all),
                Share::Has(threads) => Some(all - threads),
            },
            Work::Pooling => match self.generation {
                Share::Has(threads) => (all - threads >= half).then_some(half),
                Share::Waits => (!had_it).then_some(half),
                Share::None => {
                    let generates = self.generated.is_some_and(|at| now.saturating_duration_since(at) < GENERATES_FOR);
                    Some(if generates { half } else { all })
                }
            },
        };
        let taken = taken.map(|threads| threads.min(each)).filter(|&threads| threads > 0);
        *self.of(work) = taken.map_or(Share::Waits, Share::Has);
        taken
    }

    fn give_back(&mut self, work: Work, now: Instant) {
        *self.of(work) = Share::None;
        self.last = Some(work);
        if work == Work::Generation {
            self.generated = Some(now);
        }
    }

    fn of(&mut self, work: Work) -> &mut Share {
        match work {
            Work::Generation => &mut self.generation,
            Work::Pooling => &mut self.pooling,
        }
    }
}

impl Cores {
    /// `all` threads, of which one computation takes `each` at most.
    pub(crate) fn new(all: u32, each: u32) -> Self {
        let all = all.max(1);
        Self { all, each: each.clamp(1, all), shares: Mutex::default(), given_back: Condvar::new() }
    }

    /// Takes what this work may have, once there is something.
    pub(crate) fn claim(&self, work: Work) -> Claim<'_> {
        let mut shares = self.shares();
        loop {
            if let Some(threads) = shares.take(work, (self.all, self.each), Instant::now()) {
                return Claim { cores: self, work, threads };
            }
            shares = self.given_back.wait(shares).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn shares(&self) -> MutexGuard<'_, Shares> {
        self.shares.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.cores.shares().give_back(self.work, Instant::now());
        self.cores.given_back.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn alone_either_has_all_threads_and_together_half() {
        const EIGHT: (u32, u32) = (8, 8);
        let (mut shares, start) = (Shares::default(), Instant::now());
        let after = |ms| start + Duration::from_millis(ms);
        // Texts alone have all, and a step that comes meanwhile waits for that batch.
        assert_eq!(shares.take(Work::Pooling, EIGHT, start), Some(8));
        assert_eq!(shares.take(Work::Generation, EIGHT, start), None);
        shares.give_back(Work::Pooling, after(10));
        // The next batch leaves it half, whichever comes first.
        assert_eq!(shares.take(Work::Pooling, EIGHT, after(10)), Some(4));
        assert_eq!(shares.take(Work::Generation, EIGHT, after(10)), Some(4));
        shares.give_back(Work::Generation, after(20));
        shares.give_back(Work::Pooling, after(20));
        // Steps alone have all; texts that wait for one have half of the next, though it comes first.
        assert_eq!(shares.take(Work::Generation, EIGHT, after(30)), Some(8));
        assert_eq!(shares.take(Work::Pooling, EIGHT, after(30)), None);
        shares.give_back(Work::Generation, after(40));
        assert_eq!(shares.take(Work::Generation, EIGHT, after(40)), Some(4));
        assert_eq!(shares.take(Work::Pooling, EIGHT, after(40)), Some(4));
        shares.give_back(Work::Generation, after(50));
        shares.give_back(Work::Pooling, after(50));
        // Between two steps an engine generates still; some time later it does not.
        assert_eq!(shares.take(Work::Pooling, EIGHT, after(60)), Some(4));
        shares.give_back(Work::Pooling, after(70));
        assert_eq!(shares.take(Work::Pooling, EIGHT, after(1_050)), Some(8));
    }

    #[test]
    fn two_that_may_have_one_of_two_threads_compute_at_once() {
        let (mut shares, now) = (Shares::default(), Instant::now());
        for work in [Work::Generation, Work::Pooling] {
            assert_eq!(shares.take(work, (2, 1), now), Some(1));
        }
    }

    // Never are more threads taken than there are, and nobody waits for more than one computation of the other's.
    // Each of the two asks, computes and gives back, in any order.
    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn no_more_threads_are_taken_than_there_are_and_nobody_waits_long(
            (all, each) in (1..5_u32).prop_flat_map(|all| (Just(all), 1..=all)),
            turns in prop::collection::vec((any::<bool>(), 0..700_u64), 1..200),
        ) {
            let (mut shares, mut now) = (Shares::default(), Instant::now());
            let mut held: [Option<u32>; 2] = [None, None];
            let mut waits: [Option<u32>; 2] = [None, None];
            for (pools, ms) in turns {
                let (work, me, other) =
                    if pools { (Work::Pooling, 1, 0) } else { (Work::Generation, 0, 1) };
                now += Duration::from_millis(ms);
                if held[me].take().is_some() {
                    shares.give_back(work, now);
                    if let Some(turns) = &mut waits[other] {
                        *turns += 1;
                    }
                    // What a notified thread does.
                    let waiter = if pools { Work::Generation } else { Work::Pooling };
                    if waits[other].is_some() && let Some(threads) = shares.take(waiter, (all, each), now) {
                        (held[other], waits[other]) = (Some(threads), None);
                    }
                } else if let Some(threads) = shares.take(work, (all, each), now) {
                    (held[me], waits[me]) = (Some(threads), None);
                } else {
                    waits[me].get_or_insert(0);
                }
                let taken: u32 = held.iter().flatten().sum();
                prop_assert!(taken <= all && held.iter().flatten().all(|threads| (1..=each).contains(threads)));
                prop_assert!(held.iter().any(Option::is_some) || waits.iter().all(Option::is_none));
                prop_assert!(waits.iter().flatten().all(|&turns| turns <= 1), "{shares:?}");
            }
        }
    }

    #[test]
    fn threads_that_compete_take_turns() {
        const ROUNDS: u32 = 2_000;
        for all in [1, 2] {
            let (cores, taken) = (Cores::new(all, all), AtomicU32::new(0));
            let compete = |work| {
                for _ in 0..ROUNDS {
                    let claim = cores.claim(work);
                    assert!(taken.fetch_add(claim.threads, SeqCst) + claim.threads <= all);
                    taken.fetch_sub(claim.threads, SeqCst);
                }
            };
            std::thread::scope(|scope| {
                scope.spawn(|| compete(Work::Pooling));
                compete(Work::Generation);
            });
            assert_eq!(cores.shares().generation, Share::None);
            assert_eq!(cores.shares().pooling, Share::None);
        }
    }
}

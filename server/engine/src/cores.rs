//! The threads that a model's two contexts share: one generates, the other embeds or scores, and both may have work at
//! once. Threads beyond the processors cost more than they compute, since each waits for those that do not run; so a
//! computation takes what it may have of them for as long as it lasts, and never do more compute than there are. Where
//! other models compute on the same processors, whoever knows of them sets a [`ThreadLimit`].
//!
//! The engine has all threads while no text is computed, and never waits for any: beside one that generates a batch of
//! texts has half, and beside one that is idle all but one. A batch of texts may wait for the step that is under way.
//!
//! Absent: work on a GPU, which needs no threads to speak of, and threads that spin for a moment once their part is done.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// An engine that computed within this time generates.
const GENERATES_FOR: Duration = Duration::from_secs(1);

/// The most threads that a model computes with from its next computation on, whatever it was configured for.
#[derive(Debug)]
pub struct ThreadLimit(AtomicU32);

/// Who computes. Each has one thread that asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// The engine's steps.
    Generation,
    /// The embedder's batches.
    Pooling,
}

/// How many threads there are, and how many one computation may have.
#[derive(Clone, Copy, Debug)]
struct Threads {
    /// At least two: one for each, where there is one processor.
    all: u32,
    each: u32,
}

impl Threads {
    /// These, of which no more than so many compute; one for each of two.
    fn within(self, limit: u32) -> Self {
        Self { all: self.all.min(limit).max(2), each: self.each.min(limit).max(1) }
    }
}

/// What the two have of the threads.
#[derive(Debug, Default)]
struct Shares {
    /// Whether there is an engine.
    shared: bool,
    generation: u32,
    pooling: u32,
    /// A batch of texts waits for a step to end.
    pooling_waits: bool,
    /// When the engine last computed.
    generated: Option<Instant>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Cores {
    threads: Threads,
    limit: Arc<ThreadLimit>,
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

impl ThreadLimit {
    /// Has so many compute at most; 0 counts as 1.
    pub fn set(&self, threads: u32) {
        self.0.store(threads, Ordering::Relaxed);
    }

    fn get(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

/// No limit.
impl Default for ThreadLimit {
    fn default() -> Self {
        Self(AtomicU32::new(u32::MAX))
    }
}

impl Shares {
    /// How many threads this work may take now, at least one; `None`: it waits.
    fn take(&mut self, work: Work, Threads { all, each }: Threads, now: Instant) -> Option<u32> {
        let half = (all / 2).clamp(1, each);
        match work {
            Work::Generation => {
                // What texts wait for is kept for them, or steps that follow each other would never let them in.
                let kept = if self.pooling_waits { half } else { self.pooling };
                self.generation = all.saturating_sub(kept).clamp(1, each);
                Some(self.generation)
            }
            Work::Pooling => {
                let generates = self.generation > 0
                    || self.generated.is_some_and(|at| now.saturating_duration_since(at) < GENERATES_FOR);
                let wanted = match (self.shared, generates) {
                    (false, _) => each,
                    (true, false) => each.min(all - 1),
                    (true, true) => half,
                };
                self.pooling_waits = self.generation + wanted > all;
                self.pooling = if self.pooling_waits { 0 } else { wanted };
                (!self.pooling_waits).then_some(wanted)
            }
        }
    }

    fn give_back(&mut self, work: Work, now: Instant) {
        match work {
            Work::Generation => (self.generation, self.generated) = (0, Some(now)),
            Work::Pooling => self.pooling = 0,
        }
    }
}

impl Cores {
    /// `all` threads, of which one computation has `each` at most.
    pub(crate) fn new(all: u32, each: u32, limit: Arc<ThreadLimit>) -> Self {
        let each = each.max(1);
        let threads = Threads { all: all.max(each).max(2), each };
        Self { threads, limit, shares: Mutex::default(), given_back: Condvar::new() }
    }

    /// There is an engine, not only an embedder.
    pub(crate) fn share(&self) {
        self.shares().shared = true;
    }

    /// Takes what this work may have, once there is something.
    pub(crate) fn claim(&self, work: Work) -> Claim<'_> {
        let mut shares = self.shares();
        loop {
            let threads = self.threads.within(self.limit.get());
            if let Some(threads) = shares.take(work, threads, Instant::now()) {
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
    use std::sync::atomic::Ordering::SeqCst;

    use proptest::prelude::*;

    use super::*;

    fn shares() -> Shares {
        Shares { shared: true, ..Shares::default() }
    }

    #[test]
    fn an_engine_never_waits_and_texts_have_half_beside_one_that_generates() {
        const EIGHT: Threads = Threads { all: 8, each: 8 };
        let (mut shares, start) = (shares(), Instant::now());
        let after = |ms| start + Duration::from_millis(ms);
        // Beside an idle engine texts leave one thread, with which a step can begin at once.
        assert_eq!(shares.take(Work::Pooling, EIGHT, start), Some(7));
        assert_eq!(shares.take(Work::Generation, EIGHT, start), Some(1));
        shares.give_back(Work::Pooling, after(10));
        // The next batch finds an engine that generates, and waits for the step if that has what it wants.
        assert_eq!(shares.take(Work::Pooling, EIGHT, after(10)), Some(4));
        shares.give_back(Work::Generation, after(20));
        assert_eq!(shares.take(Work::Generation, EIGHT, after(20)), Some(4));
        shares.give_back(Work::Generation, after(30));
        shares.give_back(Work::Pooling, after(30));
        assert_eq!(shares.take(Work::Generation, EIGHT, after(30)), Some(8));
        assert_eq!(shares.take(Work::Pooling, EIGHT, after(30)), None);
        shares.give_back(Work::Generation, after(40));
        // The step after that leaves it half, though it comes first.
        assert_eq!(shares.take(Work::Generation, EIGHT, after(40)), Some(4));
        assert_eq!(shares.take(Work::Pooling, EIGHT, after(40)), Some(4));
        shares.give_back(Work::Generation, after(50));
        shares.give_back(Work::Pooling, after(50));
        // Between two steps an engine generates still; some time later it does not.
        assert_eq!(shares.take(Work::Pooling, EIGHT, after(60)), Some(4));
        shares.give_back(Work::Pooling, after(70));
        assert_eq!(shares.take(Work::Pooling, EIGHT, after(1_050)), Some(7));
        // Without an engine nothing is left to one.
        let mut alone = Shares::default();
        assert_eq!(alone.take(Work::Pooling, EIGHT, start), Some(8));
    }

    #[test]
    fn with_one_thread_each_has_one() {
        let cores = Cores::new(1, 1, Arc::default());
        cores.share();
        let both = [cores.claim(Work::Pooling), cores.claim(Work::Generation)];
        assert!(both.iter().all(|claim| claim.threads == 1));
    }

    #[test]
    fn a_limit_is_in_force_from_the_next_computation_on() {
        let limit = Arc::<ThreadLimit>::default();
        let cores = Cores::new(8, 7, Arc::clone(&limit));
        cores.share();
        let threads = |work| cores.claim(work).threads;
        assert_eq!(threads(Work::Generation), 7);
        limit.set(4);
        assert_eq!(threads(Work::Generation), 4);
        // It has just generated, so that texts have half.
        let both = [cores.claim(Work::Pooling), cores.claim(Work::Generation)];
        assert_eq!(both.each_ref().map(|claim| claim.threads), [2, 2]);
    }

    // Each of the two asks, computes and gives back, in any order.
    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn no_more_threads_compute_than_there_are_and_texts_wait_for_one_step_at_most(
            (all, each) in (2..6_u32).prop_flat_map(|all| (Just(all), 1..=all)),
            turns in prop::collection::vec((any::<bool>(), 0..700_u64), 1..200),
        ) {
            let (mut shares, mut now) = (shares(), Instant::now());
            let (mut generation, mut pooling, mut steps_waited) = (0, 0, None);
            for (pools, ms) in turns {
                now += Duration::from_millis(ms);
                match (pools, generation, pooling) {
                    (false, 0, _) => {
                        let taken = shares.take(Work::Generation, Threads { all, each }, now);
                        prop_assert!(taken.is_some(), "an engine never waits");
                        generation = taken.unwrap_or(0);
                    }
                    (false, ..) => {
                        shares.give_back(Work::Generation, now);
                        generation = 0;
                        steps_waited = steps_waited.map(|steps| steps + 1);
                    }
                    (true, _, 0) => {
                        let taken = shares.take(Work::Pooling, Threads { all, each }, now);
                        prop_assert!(taken.is_some() || steps_waited.is_none_or(|steps| steps == 0), "{shares:?}");
                        steps_waited = if taken.is_some() { None } else { steps_waited.or(Some(0)) };
                        pooling = taken.unwrap_or(0);
                    }
                    (true, ..) => {
                        shares.give_back(Work::Pooling, now);
                        pooling = 0;
                    }
                }
                prop_assert!(generation + pooling <= all && generation.max(pooling) <= each);
            }
        }
    }

    #[test]
    fn threads_that_compete_are_never_more_than_there_are() {
        const ROUNDS: u32 = 2_000;
        let (cores, taken) = (Cores::new(3, 3, Arc::default()), AtomicU32::new(0));
        cores.share();
        let compete = |work| {
            for _ in 0..ROUNDS {
                let claim = cores.claim(work);
                assert!(taken.fetch_add(claim.threads, SeqCst) + claim.threads <= 3);
                taken.fetch_sub(claim.threads, SeqCst);
            }
        };
        // Were a batch of texts forgotten, the other thread would never end.
        std::thread::scope(|scope| {
            scope.spawn(|| compete(Work::Pooling));
            compete(Work::Generation);
        });
        let shares = cores.shares();
        assert_eq!((shares.generation, shares.pooling), (0, 0));
    }
}

//! How many threads each worker computes with while others compute beside it.
//!
//! Threads of a computation wait for each other by spinning, and lose what others take of their processors: two models
//! that compute at once, each with all of them, do less than half of what each does alone. So the workers of all versions
//! share the processors while they compute, as when a candidate is validated beside the version that answers, or an old
//! one ends its requests beside the new: as many threads each, none more than it was loaded for, and one at least. Who
//! computes alone has all of its own.
//!
//! A worker computes while it has requests and for [`COMPUTES_FOR`] after that, and one that loads from when its model is
//! read. Absent: the step that a worker is at, which ends with the threads that it began with, and what else its processes
//! do.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::watch;

use crate::limits::COMPUTES_FOR;

/// Hands the processors out.
#[derive(Debug)]
pub(super) struct Threads {
    processors: u32,
    seats: Mutex<Seats>,
}

#[derive(Debug, Default)]
struct Seats {
    taken: u64,
    held: BTreeMap<u64, Held>,
}

#[derive(Debug)]
struct Held {
    /// What it was loaded for.
    own: u32,
    computes: bool,
    share: watch::Sender<u32>,
}

/// A worker's, until it is dropped.
#[derive(Debug)]
pub(super) struct Seat {
    threads: Arc<Threads>,
    number: u64,
    own: u32,
    share: watch::Receiver<u32>,
    computes: bool,
    /// Since when it has had nothing to compute.
    idle: Option<Instant>,
}

impl Threads {
    pub(super) fn new(processors: u32) -> Arc<Self> {
        Arc::new(Self { processors, seats: Mutex::default() })
    }

    /// A place for a worker that was loaded for so many threads, and does not compute yet.
    pub(super) fn join(self: &Arc<Self>, own: u32) -> Seat {
        let (share, seen) = watch::channel(own);
        let mut seats = self.seats();
        let number = seats.taken;
        seats.taken += 1;
        seats.held.insert(number, Held { own, computes: false, share });
        Seat { threads: Arc::clone(self), number, own, share: seen, computes: false, idle: None }
    }

    fn seats(&self) -> MutexGuard<'_, Seats> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Seats {
    /// Tells everyone who computes what it has now. Who does not hears of its share when it does.
    fn share_out(&self, processors: u32) {
        let computing: Vec<&Held> = self.held.values().filter(|held| held.computes).collect();
        let own: Vec<u32> = computing.iter().map(|held| held.own).collect();
        for (held, share) in computing.iter().zip(shares(processors, &own)) {
            held.share.send_if_modified(|told| std::mem::replace(told, share) != share);
        }
    }
}

impl Seat {
    /// Notes whether its worker has anything to compute.
    pub(super) fn note(&mut self, computes: bool, now: Instant) {
        let idle = if computes { None } else { Some(*self.idle.get_or_insert(now)) };
        self.idle = idle;
        let computes = idle.is_none_or(|since| self.computes && now.saturating_duration_since(since) < COMPUTES_FOR);
        if std::mem::replace(&mut self.computes, computes) != computes {
            let mut seats = self.threads.seats();
            if let Some(held) = seats.held.get_mut(&self.number) {
                held.computes = computes;
            }
            seats.share_out(self.threads.processors);
        }
    }

    /// Its share, once that is another one than it was.
    pub(super) async fn changed(&mut self) -> u32 {
        // The sender is kept for as long as this is.
        if self.share.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        *self.share.borrow_and_update()
    }

    /// Its worker is gone: the next has all of its own, until others compute too.
    pub(super) fn vacate(&mut self) {
        *self = self.threads.join(self.own);
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut seats = self.threads.seats();
        seats.held.remove(&self.number);
        seats.share_out(self.threads.processors);
    }
}

/// Each one's share of so many processors: as many for each as for any other, but no more than its own, and one at least.
fn shares(processors: u32, own: &[u32]) -> Vec<u32> {
    let mut order: Vec<usize> = (0..own.len()).collect();
    order.sort_by_key(|&i| own[i]);
    let mut shares = vec![1; own.len()];
    let mut left = processors;
    for (i, others) in order.into_iter().zip((1..=own.len() as u32).rev()) {
        shares[i] = (left / others).clamp(1, own[i].max(1));
        left = left.saturating_sub(shares[i]);
    }
    shares
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::FutureExt;
    use proptest::prelude::*;

    use super::*;

    /// What each is told now, if anything.
    fn told<const N: usize>(seats: [&mut Seat; N]) -> [Option<u32>; N] {
        seats.map(|seat| seat.changed().now_or_never())
    }

    #[test]
    fn who_computes_beside_another_has_half_and_all_of_its_own_when_that_one_rests() {
        let threads = Threads::new(8);
        let (mut active, mut candidate) = (threads.join(7), threads.join(7));
        let start = Instant::now();
        active.note(true, start);
        candidate.note(false, start);
        assert_eq!(told([&mut active, &mut candidate]), [None, None]);
        candidate.note(true, start);
        assert_eq!(told([&mut active, &mut candidate]), [Some(4), Some(4)]);
        // For a while it counts as one that computes: its next request may be on its way.
        candidate.note(false, start);
        candidate.note(false, start + COMPUTES_FOR - Duration::from_millis(1));
        assert_eq!(told([&mut active, &mut candidate]), [None, None]);
        candidate.note(false, start + COMPUTES_FOR);
        assert_eq!(told([&mut active, &mut candidate]), [Some(7), None]);
        // It has been told of four, and that is what it has when it computes again.
        candidate.note(true, start + COMPUTES_FOR);
        assert_eq!(told([&mut active, &mut candidate]), [Some(4), None]);
        drop(active);
        assert_eq!(told([&mut candidate]), [Some(7)]);
    }

    #[test]
    fn a_worker_that_is_gone_takes_nothing_and_the_next_begins_with_its_own() {
        let threads = Threads::new(2);
        let (mut one, mut other) = (threads.join(2), threads.join(2));
        let now = Instant::now();
        one.note(true, now);
        other.note(true, now);
        assert_eq!(told([&mut one, &mut other]), [Some(1), Some(1)]);
        one.vacate();
        assert_eq!(told([&mut one, &mut other]), [None, Some(2)]);
        one.note(true, now);
        assert_eq!(told([&mut one, &mut other]), [Some(1), Some(1)]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn the_sum_is_never_above_the_processors_and_nobody_has_less_than_it_could(
            processors in 1..40_u32,
            own in prop::collection::vec(1..40_u32, 1..12),
        ) {
            let shares = shares(processors, &own);
            let (sum, asked): (u32, u32) = (shares.iter().sum(), own.iter().sum());
            prop_assert!(shares.iter().zip(&own).all(|(share, own)| (1..=*own).contains(share)), "{shares:?}");
            prop_assert_eq!(sum, asked.min(processors.max(own.len() as u32)));
            // Who has less than its own has no less than one below any other.
            let most = shares.iter().max().copied().unwrap_or(0);
            prop_assert!(shares.iter().zip(&own).all(|(share, own)| share == own || share + 1 >= most), "{shares:?}");
        }

        // Whoever computes, and whenever: what they have been told adds up.
        #[test]
        fn those_who_compute_never_have_more_than_there_are(
            turns in prop::collection::vec((0..4_usize, 0..3_u8, 0..1_500_u64), 1..100),
        ) {
            let threads = Threads::new(6);
            let mut seats = [2, 4, 6, 6].map(|own| (threads.join(own), own));
            let mut now = Instant::now();
            for (at, what, ms) in turns {
                now += Duration::from_millis(ms);
                let (seat, has) = &mut seats[at];
                match what {
                    0 => seat.note(true, now),
                    1 => seat.note(false, now),
                    _ => {
                        seat.vacate();
                        *has = seat.own;
                    }
                }
                for (seat, has) in &mut seats {
                    *has = seat.changed().now_or_never().unwrap_or(*has);
                }
                let computing = seats.iter().filter(|(seat, _)| seat.computes);
                prop_assert!(computing.map(|(_, has)| *has).sum::<u32>() <= 6);
            }
        }
    }
}

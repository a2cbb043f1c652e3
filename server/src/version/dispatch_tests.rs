//! The dispatcher against what its strategies promise, over any history of choices, releases and failures.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

/// What may happen to a dispatcher; numbers pick among what there is.
#[derive(Clone, Debug)]
enum Move {
    Choose {
        cells: u64,
        prefixes: Vec<u64>,
    },
    Release(usize),
    /// A request's client stops reading, or has read.
    Pause(usize),
    Health {
        worker: usize,
        healthy: bool,
    },
    Lost(usize),
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let choose = (1_u64..60, 0_u64..6, 0_usize..5)
        .prop_map(|(cells, family, length)| Move::Choose { cells, prefixes: prefixes(family, length) });
    let one = prop_oneof![
        6 => choose,
        3 => (0_usize..64).prop_map(Move::Release),
        3 => (0_usize..64).prop_map(Move::Pause),
        2 => (0_usize..6, any::<bool>()).prop_map(|(worker, healthy)| Move::Health { worker, healthy }),
        1 => (0_usize..6).prop_map(Move::Lost),
    ];
    proptest::collection::vec(one, 0..120)
}

/// Beginnings of a prompt of one family: two of a family share as many as the shorter has.
fn prefixes(family: u64, length: usize) -> Vec<u64> {
    (1..=length as u64).map(|block| family * 100 + block).collect()
}

/// A dispatcher, and the same facts kept in the plainest way.
struct Pair {
    real: Dispatcher,
    healthy: Vec<bool>,
    /// Worker and cells of each request in flight, and whether it is paused.
    inside: Vec<(usize, u64, bool)>,
    cells: u64,
    /// Beginnings with their last reader.
    read: Vec<(u64, usize)>,
}

impl Pair {
    fn new(strategy: DispatchStrategy, workers: usize, cells: u64) -> Self {
        let mut real = Dispatcher::new(strategy, workers);
        for worker in 0..workers {
            real.set_cells(worker, cells);
            real.set_healthy(worker, true);
        }
        Self { real, healthy: vec![true; workers], inside: Vec::new(), cells, read: Vec::new() }
    }

    fn in_flight(&self, worker: usize) -> u32 {
        self.inside.iter().filter(|(at, ..)| *at == worker).count() as u32
    }

    /// Cells of each that a worker has and that is not paused.
    fn active_cells(&self, worker: usize) -> impl Iterator<Item = u64> {
        self.inside.iter().filter(move |(at, _, is_paused)| *at == worker && !is_paused).map(|(_, cells, _)| *cells)
    }

    fn active(&self, worker: usize) -> u32 {
        self.active_cells(worker).count() as u32
    }

    /// None where those that went on have taken what others had got meanwhile.
    fn free(&self, worker: usize) -> u64 {
        self.cells.saturating_sub(self.active_cells(worker).sum())
    }

    fn healthy_workers(&self) -> Vec<usize> {
        (0..self.healthy.len()).filter(|&worker| self.healthy[worker]).collect()
    }

    fn fewest(&self) -> Option<u32> {
        self.healthy_workers().into_iter().map(|worker| self.active(worker)).min()
    }

    /// The healthy worker that read the longest beginning last.
    fn reader(&self, prefixes: &[u64]) -> Option<usize> {
        let last = |key: &u64| self.read.iter().find(|(read, _)| read == key).map(|(_, worker)| *worker);
        prefixes.iter().rev().filter_map(last).find(|&worker| self.healthy[worker])
    }

    /// Applies a move; a choice and what was chosen are told to `check` as of the moment before the choice.
    fn apply(
        &mut self,
        one: Move,
        check: impl Fn(&Self, &Demand, Result<usize, Refusal>) -> Result<(), TestCaseError>,
    ) -> Result<(), TestCaseError> {
        let n = self.healthy.len();
        match one {
            Move::Choose { cells, prefixes } => {
                let demand = Demand { cells, prefixes, ..Demand::default() };
                let chosen = self.real.choose(&demand);
                check(self, &demand, chosen)?;
                if let Ok(worker) = chosen {
                    self.inside.push((worker, demand.cells, false));
                    self.read.retain(|(key, _)| !demand.prefixes.contains(key));
                    self.read.extend(demand.prefixes.iter().map(|key| (*key, worker)));
                }
            }
            Move::Release(index) if !self.inside.is_empty() => {
                let (worker, cells, is_paused) = self.inside.swap_remove(index % self.inside.len());
                if is_paused {
                    self.real.resume(worker, cells);
                }
                self.real.release(worker, cells);
            }
            Move::Pause(index) if !self.inside.is_empty() => {
                let index = index % self.inside.len();
                let (worker, cells, is_paused) = &mut self.inside[index];
                if *is_paused {
                    self.real.resume(*worker, *cells);
                } else {
                    self.real.pause(*worker, *cells);
                }
                *is_paused = !*is_paused;
            }
            Move::Release(_) | Move::Pause(_) => {}
            Move::Health { worker, healthy } => {
                self.healthy[worker % n] = healthy;
                self.real.set_healthy(worker % n, healthy);
            }
            Move::Lost(worker) => {
                let worker = worker % n;
                self.healthy[worker] = false;
                self.real.set_healthy(worker, false);
                self.real.forget(worker);
                self.read.retain(|(_, reader)| *reader != worker);
            }
        }
        for worker in 0..n {
            prop_assert_eq!(self.real.in_flight(worker), self.in_flight(worker));
        }
        Ok(())
    }
}

fn any_strategy() -> impl Strategy<Value = DispatchStrategy> {
    proptest::sample::select(&DispatchStrategy::ALL[..])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// **Feature: distributed-inference-server, Property 16: Least-Loaded Routing**
    /// **Validates: Requirements 6.2**
    #[test]
    fn least_loaded_means_the_fewest_that_are_not_paused(workers in 1_usize..6, moves in moves()) {
        let mut pair = Pair::new(DispatchStrategy::LeastLoaded, workers, 100);
        for one in moves {
            pair.apply(one, |before, _, chosen| {
                let loads = chosen.ok().map(|worker| before.active(worker));
                prop_assert_eq!(loads, before.fewest());
                Ok(())
            })?;
        }
    }

    /// **Feature: distributed-inference-server, Property 17: Memory-Aware Routing**
    /// **Validates: Requirements 6.3**
    #[test]
    fn memory_aware_means_that_it_fits_or_is_refused(workers in 1_usize..6, cells in 10_u64..120, moves in moves()) {
        let mut pair = Pair::new(DispatchStrategy::MemoryAware, workers, cells);
        for one in moves {
            pair.apply(one, |before, demand, chosen| {
                let healthy = before.healthy_workers();
                let most_free = healthy.iter().map(|&worker| before.free(worker)).max();
                match chosen {
                    Ok(worker) => {
                        prop_assert!(before.free(worker) >= demand.cells);
                        prop_assert_eq!(Some(before.free(worker)), most_free);
                    }
                    Err(Refusal::NeverFits { limit }) => {
                        prop_assert_eq!(limit, before.cells);
                        prop_assert!(demand.cells > before.cells);
                    }
                    Err(Refusal::NotNow) => {
                        prop_assert!(demand.cells <= before.cells);
                        prop_assert!(most_free.unwrap() < demand.cells);
                    }
                    Err(Refusal::NoWorker) => prop_assert!(healthy.is_empty()),
                }
                Ok(())
            })?;
        }
    }

    /// **Feature: distributed-inference-server, Property 18: Unhealthy Worker Removal**
    /// **Validates: Requirements 6.4**
    #[test]
    fn an_unhealthy_worker_gets_nothing_from_that_moment(strategy in any_strategy(), workers in 1_usize..6, moves in moves()) {
        let mut pair = Pair::new(strategy, workers, 100);
        for one in moves {
            pair.apply(one, |before, demand, chosen| {
                match chosen {
                    Ok(worker) => prop_assert!(before.healthy[worker], "{} is not healthy", worker),
                    Err(Refusal::NoWorker) => prop_assert!(before.healthy_workers().is_empty()),
                    Err(_) => prop_assert!(strategy == DispatchStrategy::MemoryAware && demand.cells > 0),
                }
                Ok(())
            })?;
        }
    }

    /// **Feature: distributed-inference-server, Property 19: Worker Recovery Reinstatement**
    /// **Validates: Requirements 6.5**
    #[test]
    fn a_worker_that_is_healthy_again_is_chosen_again(
        strategy in any_strategy(), workers in 1_usize..6, back in 0_usize..6, moves in moves()
    ) {
        let mut pair = Pair::new(strategy, workers, 100);
        for one in moves {
            pair.apply(one, |_, _, _| Ok(()))?;
        }
        let back = back % workers;
        pair.apply(Move::Lost(back), |_, _, _| Ok(()))?;
        pair.apply(Move::Health { worker: back, healthy: true }, |_, _, _| Ok(()))?;
        while !pair.inside.is_empty() {
            pair.apply(Move::Release(0), |_, _, _| Ok(()))?;
        }
        // With nothing in flight each of the workers is as good as the other: all healthy ones get some of the next.
        let mut chosen = Vec::new();
        for _ in 0..workers {
            chosen.push(pair.real.choose(&Demand { cells: 1, ..Demand::default() }).unwrap());
        }
        prop_assert!(chosen.contains(&back), "{:?} lacks {}", chosen, back);
    }

    #[test]
    fn round_robin_passes_over_the_unhealthy_and_nobody_else(workers in 1_usize..6, moves in moves()) {
        let mut pair = Pair::new(DispatchStrategy::RoundRobin, workers, 100);
        let mut last = workers - 1;
        for one in moves {
            let before = last;
            pair.apply(one.clone(), |pair, _, chosen| {
                let next = (1..=workers).map(|step| (before + step) % workers).find(|&worker| pair.healthy[worker]);
                prop_assert_eq!(chosen.ok(), next);
                Ok(())
            })?;
            if let (Move::Choose { .. }, Some((worker, ..))) = (&one, pair.inside.last())
                && !pair.healthy_workers().is_empty()
            {
                last = *worker;
            }
        }
    }

    #[test]
    fn the_last_reader_of_the_longest_prefix_gets_it_unless_it_is_busier_by_the_margin(
        workers in 1_usize..6, moves in moves()
    ) {
        let mut pair = Pair::new(DispatchStrategy::PrefixAware, workers, 100);
        for one in moves {
            pair.apply(one, |before, demand, chosen| {
                let Some(fewest) = before.fewest() else { return Ok(()) };
                let worker = chosen.unwrap();
                match before.reader(&demand.prefixes) {
                    Some(reader) if before.active(reader) <= fewest + PREFIX_LOAD_MARGIN => {
                        prop_assert_eq!(worker, reader);
                    }
                    _ => prop_assert_eq!(before.active(worker), fewest),
                }
                Ok(())
            })?;
        }
    }
}

#[test]
fn clients_that_read_nothing_leave_their_cells_to_others() {
    let mut pair = Pair::new(DispatchStrategy::MemoryAware, 1, 100);
    let demand = Demand { cells: 60, ..Demand::default() };
    assert_eq!(pair.real.choose(&demand), Ok(0));
    assert_eq!(pair.real.choose(&demand), Err(Refusal::NotNow));
    pair.real.pause(0, 60);
    assert_eq!(pair.real.choose(&demand), Ok(0));
    // It goes on, and the two need more than there is: nobody comes to them until one has ended.
    pair.real.resume(0, 60);
    let small = Demand { cells: 1, ..Demand::default() };
    assert_eq!(pair.real.choose(&small), Err(Refusal::NotNow));
    pair.real.release(0, 60);
    assert_eq!((pair.real.choose(&small), pair.real.in_flight(0)), (Ok(0), 2));
}

#[test]
fn who_must_be_alone_gets_a_worker_with_paused_ones_only_where_it_waits_for_it() {
    let mut pair = Pair::new(DispatchStrategy::RoundRobin, 2, 100);
    let demand = Demand { cells: 1, ..Demand::default() };
    let two: Vec<_> = (0..3).map(|_| pair.real.choose(&demand).unwrap()).collect();
    assert_eq!(two, [0, 1, 0]);
    pair.real.pause(1, 1);
    assert_eq!(pair.real.choose_alone(&demand), None, "they would end with it");
    // Of the two, the one where nobody is paused is the one that will be free.
    pair.real.reserve(&demand);
    assert_eq!(pair.real.choose(&demand), Ok(1));
    pair.real.release(1, 1);
    pair.real.release(0, 1);
    assert_eq!(pair.real.choose_alone(&demand), None);
    // The last one there pauses, and its client may not read for long.
    pair.real.pause(0, 1);
    assert_eq!(pair.real.choose_alone(&demand), Some(0));
    assert_eq!(pair.real.choose(&demand), Ok(1), "nobody new gets there");
    assert_eq!(pair.real.choose(&demand), Ok(1));
    pair.real.open(0);
    assert_eq!(pair.real.choose(&demand), Ok(0));
}

#[test]
fn who_must_be_alone_goes_first_where_nothing_is_paused() {
    let mut pair = Pair::new(DispatchStrategy::LeastLoaded, 2, 100);
    let demand = Demand { cells: 1, ..Demand::default() };
    assert_eq!(pair.real.choose(&demand), Ok(0));
    pair.real.pause(0, 1);
    assert_eq!(pair.real.choose_alone(&demand), Some(1));
    assert_eq!(pair.real.choose_alone(&demand), None);
    assert_eq!(pair.real.choose(&demand), Ok(0));
}

#[test]
fn equals_take_turns() {
    let mut pair = Pair::new(DispatchStrategy::LeastLoaded, 3, 100);
    let demand = Demand::default();
    let first: Vec<_> = (0..6).map(|_| pair.real.choose(&demand).unwrap()).collect();
    assert_eq!(first, [0, 1, 2, 0, 1, 2]);
    assert_eq!(Dispatcher::new(DispatchStrategy::LeastLoaded, 0).choose(&demand), Err(Refusal::NoWorker));
}

#[test]
fn one_that_is_short_of_memory_gets_only_what_it_admits_or_nobody_else_does() {
    for strategy in DispatchStrategy::ALL {
        let mut pair = Pair::new(strategy, 2, 100);
        let demand =
            |priority| Demand { cells: 1, prefixes: vec![if priority == Priority::High { 8 } else { 7 }], priority };
        // It has read the prompt, has the fewest requests and the most cells.
        assert_eq!(pair.real.choose(&demand(Priority::Normal)), Ok(0));
        pair.real.release(0, 1);
        pair.real.set_level(0, DegradationLevel::HighPriorityOnly);
        for _ in 0..3 {
            assert_eq!(pair.real.choose(&demand(Priority::Normal)), Ok(1), "{strategy}");
        }
        let of_high: Vec<_> = (0..2).map(|_| pair.real.choose(&demand(Priority::High)).unwrap()).collect();
        assert!(of_high.contains(&0), "{strategy}");
        pair.real.set_level(1, DegradationLevel::Emergency);
        assert!(pair.real.admits(Priority::High) && !pair.real.admits(Priority::Normal));
        assert!(pair.real.choose(&demand(Priority::Normal)).is_ok(), "who tells the client that there is no memory");
        pair.real.forget(1);
        assert!(pair.real.admits(Priority::Normal), "another process begins anew");
    }
}

#[test]
fn a_strategy_is_read_by_its_name() {
    for strategy in DispatchStrategy::ALL {
        assert_eq!(strategy.to_string().parse(), Ok(strategy));
    }
    assert_eq!("fastest".parse::<DispatchStrategy>(), Err(()));
}

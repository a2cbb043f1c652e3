//! Which worker of a version gets a request: a pure function of what is in flight, who is healthy and who read what.
//!
//! [`Dispatcher::choose`] picks a worker and counts the request as its own until [`Dispatcher::release`]. While it is
//! [paused](Dispatcher::pause), it is no load and needs no cells. A worker that is not healthy is never picked, whatever
//! the strategy; it starts as such. Absent: locks, time, processes, and what a worker's engine does with its requests.

use std::fmt;
use std::str::FromStr;

use gantry_engine::{DegradationLevel, Priority};
use serde::{Deserialize, Serialize};

use super::prefix::PrefixIndex;
use crate::limits::{PREFIX_INDEX_BLOCKS, PREFIX_LOAD_MARGIN};

/// How requests are spread over the workers of a version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DispatchStrategy {
    /// In turn.
    RoundRobin,
    /// To the one with the fewest requests that are not paused; among equals in turn.
    #[default]
    LeastLoaded,
    /// To the one with the most KV cells that no request needs; where none has enough, the request waits for them.
    MemoryAware,
    /// To the one that read the longest prefix of the prompt last, unless it has
    /// [`PREFIX_LOAD_MARGIN`] more requests than the one with the fewest, which gets it then.
    PrefixAware,
}

impl DispatchStrategy {
    const ALL: [Self; 4] = [Self::RoundRobin, Self::LeastLoaded, Self::MemoryAware, Self::PrefixAware];
}

impl fmt::Display for DispatchStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::RoundRobin => "round-robin",
            Self::LeastLoaded => "least-loaded",
            Self::MemoryAware => "memory-aware",
            Self::PrefixAware => "prefix-aware",
        })
    }
}

impl FromStr for DispatchStrategy {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|strategy| strategy.to_string() == text).ok_or(())
    }
}

/// What a request asks of a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Demand {
    /// KV cells that it is expected to need.
    pub(super) cells: u64,
    /// Names of its prompt's prefixes, the shortest first: see [`prefix::keys`](super::prefix::keys).
    pub(super) prefixes: Vec<u64>,
    /// Whether a worker that is short of memory takes it.
    pub(super) priority: Priority,
}

/// Why no worker was picked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// None is healthy.
    NoWorker,
    /// None has the memory now, or is to be had with others in it; one may be later.
    NotNow,
    /// None ever has the memory.
    NeverFits {
        /// The most KV cells that one worker has.
        limit: u64,
    },
}

/// A worker as the dispatcher sees it.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    healthy: bool,
    in_flight: u32,
    /// Those of them whose clients do not take what is there: others have their slots and cells.
    paused: u32,
    /// Sum of the needs of the others.
    needed_cells: u64,
    total_cells: u64,
    /// How far it is cut down for want of memory, which each worker is by itself.
    level: DegradationLevel,
    /// Kept for a request that must be by itself.
    reserved: bool,
}

impl Load {
    /// Whether it gets requests that may be with others.
    fn is_open(&self) -> bool {
        self.healthy && !self.reserved
    }

    /// Requests that compute, or wait for that.
    fn active(&self) -> u32 {
        self.in_flight.saturating_sub(self.paused)
    }

    fn free_cells(&self) -> u64 {
        self.total_cells.saturating_sub(self.needed_cells)
    }
}

/// Picks workers.
#[derive(Debug)]
pub(super) struct Dispatcher {
    strategy: DispatchStrategy,
    workers: Vec<Load>,
    /// Where the rotation is: the worker that was picked last.
    last: usize,
    /// The worker that is becoming free for a request that must be by itself.
    draining: Option<usize>,
    prefixes: PrefixIndex,
}

impl Dispatcher {
    /// A dispatcher over so many workers, none of which is healthy yet.
    pub(super) fn new(strategy: DispatchStrategy, workers: usize) -> Self {
        Self {
            strategy,
            workers: vec![Load::default(); workers],
            last: workers.saturating_sub(1),
            draining: None,
            prefixes: PrefixIndex::new(PREFIX_INDEX_BLOCKS),
        }
    }

    /// From now on requests are spread so; where those in flight are stays counted.
    pub(super) fn set_strategy(&mut self, strategy: DispatchStrategy) {
        self.strategy = strategy;
    }

    /// Says how many KV cells a worker has.
    pub(super) fn set_cells(&mut self, worker: usize, total_cells: u64) {
        if let Some(load) = self.workers.get_mut(worker) {
            load.total_cells = total_cells;
        }
    }

    /// Takes a worker out, or back in.
    pub(super) fn set_healthy(&mut self, worker: usize, healthy: bool) {
        if let Some(load) = self.workers.get_mut(worker) {
            load.healthy = healthy;
        }
    }

    /// Says how far a worker is cut down.
    pub(super) fn set_level(&mut self, worker: usize, level: DegradationLevel) {
        if let Some(load) = self.workers.get_mut(worker) {
            load.level = level;
        }
    }

    /// Whether a healthy worker takes a request of this priority.
    pub(super) fn admits(&self, priority: Priority) -> bool {
        self.workers.iter().any(|load| load.healthy && load.level.admits(priority))
    }

    /// A worker was lost, and what it had read with it.
    pub(super) fn forget(&mut self, worker: usize) {
        self.set_level(worker, DegradationLevel::Normal);
        self.draining = self.draining.filter(|draining| *draining != worker);
        self.open(worker);
        self.prefixes.forget(worker);
    }

    /// Whether a worker may get requests.
    pub(super) fn is_healthy(&self, worker: usize) -> bool {
        self.workers.get(worker).is_some_and(|load| load.healthy)
    }

    /// Requests that a worker has, be they paused.
    pub(super) fn in_flight(&self, worker: usize) -> u32 {
        self.workers.get(worker).map_or(0, |load| load.in_flight)
    }

    /// Picks a worker and counts the request as its own.
    pub(super) fn choose(&mut self, demand: &Demand) -> Result<usize, Refusal> {
        let chosen = match self.strategy {
            DispatchStrategy::RoundRobin => self.first_by_key(demand, |_| 0),
            DispatchStrategy::LeastLoaded => self.least_loaded(demand),
            DispatchStrategy::MemoryAware => return self.with_memory(demand).map(|worker| self.take(worker, demand)),
            DispatchStrategy::PrefixAware => self.with_prefix(demand),
        };
        chosen.map(|worker| self.take(worker, demand)).ok_or_else(|| self.none_open())
    }

    /// Picks a worker without requests for one that must be by itself, and keeps it for that until [`Dispatcher::open`].
    ///
    /// Paused ones would end with their worker, so one that has any is no such worker; but they may stay for as long as
    /// their clients please, so they count no more in the one that [is kept](Self::reserve) already. The worker's journal names
    /// nobody who has given its slot away: while who is beside it is paused, its death convicts who must be by itself; if it goes
    /// on meanwhile, two were worked on, and neither is convicted.
    pub(super) fn choose_alone(&mut self, demand: &Demand) -> Option<usize> {
        let takes = |load: &Load| load.healthy && load.level.admits(demand.priority);
        let free = self.workers.iter().position(|load| takes(load) && load.in_flight == 0);
        let kept =
            || self.draining.filter(|&worker| takes(&self.workers[worker]) && self.workers[worker].active() == 0);
        let worker = free.or_else(kept)?;
        self.workers[worker].reserved = true;
        self.stop_draining_but(Some(worker));
        Some(self.take(worker, demand))
    }

    /// Keeps a worker for one that must be by itself, where none is kept: the one that will be without requests first, as far
    /// as can be told, and one with paused requests only where all have some.
    pub(super) fn reserve(&mut self, demand: &Demand) {
        if self.workers.iter().any(|load| load.healthy && load.reserved) {
            return;
        }
        // One that would not take it is not kept from others for it.
        let takes = |load: &Load| load.healthy && load.level.admits(demand.priority);
        let healthy = self.workers.iter_mut().enumerate().filter(|(_, load)| takes(load));
        if let Some((worker, load)) = healthy.min_by_key(|(_, load)| (load.paused > 0, load.active())) {
            load.reserved = true;
            self.draining = Some(worker);
        }
    }

    /// Nobody must be by itself any more.
    pub(super) fn stop_draining(&mut self) {
        self.stop_draining_but(None);
    }

    fn stop_draining_but(&mut self, spared: Option<usize>) {
        let draining = self.draining.take().filter(|worker| Some(*worker) != spared);
        if let Some(worker) = draining {
            self.open(worker);
        }
    }

    /// A worker gets other requests again.
    pub(super) fn open(&mut self, worker: usize) {
        if let Some(load) = self.workers.get_mut(worker) {
            load.reserved = false;
        }
    }

    /// Whether a worker is missing, and so may come.
    pub(super) fn is_one_away(&self) -> bool {
        self.workers.iter().any(|load| !load.healthy)
    }

    /// Why none was picked.
    fn none_open(&self) -> Refusal {
        if self.workers.iter().any(|load| load.healthy) { Refusal::NotNow } else { Refusal::NoWorker }
    }

    /// Counts a request that needs so many cells as no load: its worker gives its slot and its cells to others.
    pub(super) fn pause(&mut self, worker: usize, cells: u64) {
        if let Some(load) = self.workers.get_mut(worker) {
            load.paused = load.paused.saturating_add(1);
            load.needed_cells = load.needed_cells.saturating_sub(cells);
        }
    }

    /// Counts a paused request as load again. Others may have its cells by now: then more are counted than there are, it waits
    /// in the worker's own queue, and nobody else is sent there for cells until enough have ended.
    pub(super) fn resume(&mut self, worker: usize, cells: u64) {
        if let Some(load) = self.workers.get_mut(worker) {
            load.paused = load.paused.saturating_sub(1);
            load.needed_cells = load.needed_cells.saturating_add(cells);
        }
    }

    /// Counts a request as gone that needed so many cells, and was not paused.
    pub(super) fn release(&mut self, worker: usize, cells: u64) {
        if let Some(load) = self.workers.get_mut(worker) {
            load.in_flight = load.in_flight.saturating_sub(1);
            load.needed_cells = load.needed_cells.saturating_sub(cells);
        }
    }

    fn take(&mut self, worker: usize, demand: &Demand) -> usize {
        if let Some(load) = self.workers.get_mut(worker) {
            load.in_flight = load.in_flight.saturating_add(1);
            load.needed_cells = load.needed_cells.saturating_add(demand.cells);
        }
        self.last = worker;
        self.prefixes.serve(&demand.prefixes, worker);
        worker
    }

    /// The healthy worker with the smallest key; among equals the next in turn. One that would refuse it for want of
    /// memory comes last: it says so to the client where nobody else is there.
    fn first_by_key<K: Ord>(&self, demand: &Demand, key: impl Fn(&Load) -> K) -> Option<usize> {
        let n = self.workers.len();
        let turn = (1..=n).map(|step| (self.last + step) % n);
        let key = |load: &Load| (!load.level.admits(demand.priority), key(load));
        turn.filter(|&worker| self.workers[worker].is_open()).min_by_key(|&worker| key(&self.workers[worker]))
    }

    fn least_loaded(&self, demand: &Demand) -> Option<usize> {
        self.first_by_key(demand, Load::active)
    }

    fn with_memory(&self, demand: &Demand) -> Result<usize, Refusal> {
        let limit = self.workers.iter().map(|load| load.total_cells).max().unwrap_or(0);
        let most_free = self.first_by_key(demand, |load| std::cmp::Reverse(load.free_cells()));
        match most_free {
            Some(worker) if self.workers[worker].free_cells() >= demand.cells => Ok(worker),
            // Before the first worker said how much it has, nothing is known to be too large.
            _ if limit > 0 && demand.cells > limit => Err(Refusal::NeverFits { limit }),
            Some(_) => Err(Refusal::NotNow),
            None => Err(self.none_open()),
        }
    }

    fn with_prefix(&self, demand: &Demand) -> Option<usize> {
        let idlest = self.least_loaded(demand)?;
        let takes = |worker: usize| {
            self.workers.get(worker).is_some_and(|load| load.is_open() && load.level.admits(demand.priority))
        };
        let reader = self.prefixes.reader(&demand.prefixes, takes);
        let active = |worker: usize| self.workers[worker].active();
        let near = |worker: usize| active(worker) <= active(idlest).saturating_add(PREFIX_LOAD_MARGIN);
        Some(reader.filter(|&worker| near(worker)).unwrap_or(idlest))
    }
}

#[cfg(test)]
#[path = "dispatch_tests.rs"]
mod tests;

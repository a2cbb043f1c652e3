//! The dispatcher as many tasks use it: behind a lock that is never held across a wait, with leases that are given back
//! when dropped, and with the way of a request to the worker that was picked for it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use gantry_engine::{DegradationLevel, Priority, RequestError};
use tokio::sync::{Notify, mpsc};

use super::dispatch::{Demand, DispatchStrategy, Dispatcher, Refusal};
use super::generation::GenerationError;
use super::request::Request;
use super::supervisor::Command;
use super::suspects::{DigestKeys, Standing, Suspects};

/// A version's dispatcher.
pub(super) struct Desk {
    dispatcher: Mutex<Dispatcher>,
    suspects: Mutex<Suspects>,
    pub(super) digests: DigestKeys,
    /// Requests in the waiting room or on their way to it: while there are any, no other one may overtake them.
    waiting: AtomicUsize,
    /// The version makes room for another one: what has not begun is given back.
    gives_back: AtomicBool,
    /// Wakes the waiting room when a worker may have become free.
    pub(super) freed: Notify,
}

/// One request's claim on a worker.
pub(super) struct Lease {
    desk: Arc<Desk>,
    worker: usize,
    cells: u64,
    /// No other request gets to the worker meanwhile.
    is_alone: bool,
    /// The worker is its request's, but neither a slot nor cells are.
    is_paused: bool,
}

impl Lease {
    pub(super) fn worker(&self) -> usize {
        self.worker
    }

    /// From now on others may be with it.
    pub(super) fn open(&mut self) {
        if std::mem::take(&mut self.is_alone) {
            self.desk.dispatcher().open(self.worker);
            self.desk.wake();
        }
    }

    /// From now on others may have its cells.
    pub(super) fn pause(&mut self) {
        if !std::mem::replace(&mut self.is_paused, true) {
            self.desk.dispatcher().pause(self.worker, self.cells);
            self.desk.wake();
        }
    }

    /// Claims the cells again, be they others' by now.
    pub(super) fn resume(&mut self) {
        if std::mem::take(&mut self.is_paused) {
            self.desk.dispatcher().resume(self.worker, self.cells);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        {
            let mut dispatcher = self.desk.dispatcher();
            if self.is_paused {
                dispatcher.resume(self.worker, self.cells);
            }
            dispatcher.release(self.worker, self.cells);
            if self.is_alone {
                dispatcher.open(self.worker);
            }
        }
        self.desk.wake();
    }
}

impl Desk {
    pub(super) fn new(strategy: DispatchStrategy, workers: usize) -> Arc<Self> {
        let dispatcher = Mutex::new(Dispatcher::new(strategy, workers));
        Arc::new(Self {
            dispatcher,
            suspects: Mutex::default(),
            digests: DigestKeys::default(),
            waiting: AtomicUsize::new(0),
            gives_back: AtomicBool::new(false),
            freed: Notify::new(),
        })
    }

    /// What is known of requests that workers may have died of.
    pub(super) fn suspects(&self) -> MutexGuard<'_, Suspects> {
        self.suspects.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn dispatcher(&self) -> MutexGuard<'_, Dispatcher> {
        self.dispatcher.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Picks a worker.
    pub(super) fn lease(self: &Arc<Self>, demand: &Demand) -> Result<Lease, Refusal> {
        let worker = self.dispatcher().choose(demand)?;
        Ok(Lease { desk: Arc::clone(self), worker, cells: demand.cells, is_alone: false, is_paused: false })
    }

    /// Picks a worker without requests, or with paused ones alone, which gets no other one until the lease is given back or opened.
    pub(super) fn lease_alone(self: &Arc<Self>, demand: &Demand) -> Option<Lease> {
        let worker = self.dispatcher().choose_alone(demand)?;
        Some(Lease { desk: Arc::clone(self), worker, cells: demand.cells, is_alone: true, is_paused: false })
    }

    /// Has a worker become free for one that must be by itself.
    pub(super) fn reserve(&self, demand: &Demand) {
        self.dispatcher().reserve(demand);
    }

    /// Nobody must be by itself any more.
    pub(super) fn stop_draining(&self) {
        self.dispatcher().stop_draining();
    }

    /// Whether a worker is missing, and so may come without requests.
    pub(super) fn is_one_away(&self) -> bool {
        self.dispatcher().is_one_away()
    }

    /// From now on requests are spread so. Those that wait for memory may not have to any more.
    pub(super) fn set_strategy(&self, strategy: DispatchStrategy) {
        self.dispatcher().set_strategy(strategy);
        self.wake();
    }

    /// A worker is ready, and has so many KV cells.
    pub(super) fn set_cells(&self, worker: usize, cells: u64) {
        self.dispatcher().set_cells(worker, cells);
    }

    /// Takes a worker out, or back in.
    pub(super) fn set_healthy(&self, worker: usize, healthy: bool) {
        self.dispatcher().set_healthy(worker, healthy);
        self.wake();
    }

    /// A worker is cut down so far for want of memory.
    pub(super) fn set_level(&self, worker: usize, level: DegradationLevel) {
        self.dispatcher().set_level(worker, level);
    }

    /// Whether a worker takes a request of this priority.
    pub(super) fn admits(&self, priority: Priority) -> bool {
        self.dispatcher().admits(priority)
    }

    /// A worker is no more: it gets nothing, and what it had read is lost.
    pub(super) fn lose(&self, worker: usize) {
        let mut dispatcher = self.dispatcher();
        dispatcher.set_healthy(worker, false);
        dispatcher.forget(worker);
    }

    /// Whether a worker gets requests, and how many it has.
    pub(super) fn figures(&self, worker: usize) -> (bool, u32) {
        let dispatcher = self.dispatcher();
        (dispatcher.is_healthy(worker), dispatcher.in_flight(worker))
    }

    /// From now on what has not begun is given back.
    pub(super) fn start_giving_back(&self) {
        self.gives_back.store(true, Ordering::SeqCst);
        self.wake();
    }

    pub(super) fn gives_back(&self) -> bool {
        self.gives_back.load(Ordering::SeqCst)
    }

    /// A request goes to the waiting room.
    pub(super) fn enter_room(&self) {
        self.waiting.fetch_add(1, Ordering::AcqRel);
    }

    /// A request has left the waiting room.
    pub(super) fn leave_room(&self) {
        self.waiting.fetch_sub(1, Ordering::AcqRel);
    }

    /// Whoever is in the waiting room is looked at.
    pub(super) fn wake(&self) {
        if self.waiting.load(Ordering::Acquire) > 0 {
            self.freed.notify_one();
        }
    }
}

/// The ways to a version's workers and to its waiting room. The workers live as long as someone holds these.
pub(super) struct Lanes {
    pub(super) desk: Arc<Desk>,
    /// Unbounded by type, bounded by admission: at most a submission and a cancellation for each place, and probes,
    /// which their callers await.
    pub(super) supervisors: Vec<mpsc::UnboundedSender<Command>>,
    pub(super) room: mpsc::UnboundedSender<Box<Request>>,
}

/// What became of a try to give a request to a worker.
pub(super) enum Placed {
    /// A worker has it, or it has ended.
    Yes,
    /// It has to wait.
    No(Box<Request>, Refusal),
}

impl Lanes {
    /// Gives a new request to a worker, or has it wait for one.
    pub(super) fn submit(&self, request: Box<Request>) {
        let is_clear = || self.desk.suspects().standing(request.digest, Instant::now()) == Standing::Clear;
        let waiting = if self.desk.waiting.load(Ordering::Acquire) == 0 && is_clear() {
            match self.place(request) {
                Placed::Yes => return,
                Placed::No(request, _) => request,
            }
        } else {
            request
        };
        send_to_room(&self.desk, &self.room, waiting);
    }

    /// Gives a request to a worker if one can take it now.
    pub(super) fn place(&self, mut request: Box<Request>) -> Placed {
        loop {
            let lease = match self.desk.lease(&request.demand) {
                Ok(lease) => lease,
                Err(Refusal::NeverFits { limit }) => {
                    let tokens = |cells: u64| u32::try_from(cells).unwrap_or(u32::MAX);
                    // The need is above a worker's cells only where the prompt's tokens themselves are.
                    let prompt_tokens = tokens(request.demand.cells.saturating_sub(1));
                    let error = RequestError::ContextLengthExceeded { prompt_tokens, limit: tokens(limit) };
                    request.fail(error.into());
                    return Placed::Yes;
                }
                Err(refusal) => return Placed::No(request, refusal),
            };
            let worker = lease.worker();
            request.assign(lease);
            let Some(supervisor) = self.supervisors.get(worker) else { return Placed::No(request, Refusal::NoWorker) };
            match supervisor.send(Command::Submit(request)) {
                Ok(()) => return Placed::Yes,
                Err(mpsc::error::SendError(Command::Submit(returned))) => {
                    // Its supervisor has ended.
                    self.desk.lose(worker);
                    request = returned;
                    request.lease = None;
                }
                Err(_) => return Placed::Yes,
            }
        }
    }
}

/// Has a request wait for a worker.
pub(super) fn send_to_room(desk: &Desk, room: &mpsc::UnboundedSender<Box<Request>>, mut request: Box<Request>) {
    request.lease = None;
    request.is_running = false;
    desk.enter_room();
    if let Err(mpsc::error::SendError(request)) = room.send(request) {
        // The room ends with the version.
        desk.leave_room();
        request.fail(GenerationError::Retired);
    }
}

//! Where requests wait for a worker: those whose worker died before they had sent anything, and those that find none
//! healthy or none with the memory.
//!
//! They are placed by [priority and submission](Request::turn), none before the one in front of it, so that a large
//! request is not passed over for ever. One that waits longer than it said it would fails with that; when no worker is
//! healthy, all fail after [`RETRY_LIMIT`]. The room ends with the version. Absent: requests that wait in a worker for a
//! sequence.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Instant;

use tokio::sync::{mpsc, watch};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::WorkerHealth;
use super::desk::{Desk, Lanes, Placed};
use super::dispatch::Refusal;
use super::generation::GenerationError;
use super::request::Request;
use crate::limits::{RETRY_LIMIT, SUPERVISOR_TICK};
use crate::protocol::RequestId;

/// A version's waiting room.
pub(super) struct Room {
    desk: Arc<Desk>,
    /// Weak, since the workers live as long as someone outside holds them.
    lanes: Weak<Lanes>,
    inbox: mpsc::UnboundedReceiver<Box<Request>>,
    health: watch::Receiver<WorkerHealth>,
    waiting: BTreeMap<(Instant, RequestId), Waiting>,
    _ended: DropGuard,
}

struct Waiting {
    request: Box<Request>,
    since: Instant,
}

impl Room {
    pub(super) fn new(
        lanes: &Arc<Lanes>,
        inbox: mpsc::UnboundedReceiver<Box<Request>>,
        health: watch::Receiver<WorkerHealth>,
        ended: CancellationToken,
    ) -> Self {
        Self {
            desk: Arc::clone(&lanes.desk),
            lanes: Arc::downgrade(lanes),
            inbox,
            health,
            waiting: BTreeMap::new(),
            _ended: ended.drop_guard(),
        }
    }

    /// Works until the version has stopped.
    pub(super) async fn run(mut self) {
        let mut tick = tokio::time::interval(SUPERVISOR_TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                request = self.inbox.recv() => match request {
                    Some(request) => self.admit(request),
                    None => break,
                },
                () = self.desk.freed.notified() => {}
                changed = self.health.changed() => if changed.is_err() { break },
                _ = tick.tick(), if !self.waiting.is_empty() => {}
            }
            while let Ok(request) = self.inbox.try_recv() {
                self.admit(request);
            }
            if *self.health.borrow_and_update() == WorkerHealth::Stopped {
                break;
            }
            self.settle(Instant::now());
        }
        self.inbox.close();
        while let Ok(request) = self.inbox.try_recv() {
            self.admit(request);
        }
        for waiting in std::mem::take(&mut self.waiting).into_values() {
            self.desk.leave_room();
            waiting.request.fail(GenerationError::Retired);
        }
    }

    fn admit(&mut self, request: Box<Request>) {
        self.waiting.insert(request.turn(), Waiting { request, since: Instant::now() });
    }

    /// Lets go of those that have waited long enough, and places the first ones that can be.
    fn settle(&mut self, now: Instant) {
        self.drop_overdue(now);
        let Some(lanes) = self.lanes.upgrade() else { return };
        while let Some((turn, Waiting { request, since })) = self.waiting.pop_first() {
            match lanes.place(request) {
                Placed::Yes => self.desk.leave_room(),
                Placed::No(request, refusal) => {
                    self.waiting.insert(turn, Waiting { request, since });
                    if refusal == Refusal::NoWorker {
                        self.drop_hopeless(now);
                    }
                    break;
                }
            }
        }
    }

    fn drop_overdue(&mut self, now: Instant) {
        let ends = |waiting: &mut Waiting| waiting.request.is_abandoned() || waiting.request.overdue(now).is_some();
        for (_, Waiting { request, .. }) in self.waiting.extract_if(.., |_, waiting| ends(waiting)) {
            self.desk.leave_room();
            if let Some(error) = request.overdue(now) {
                request.fail(error.into());
            }
        }
    }

    /// No worker is healthy: those that have waited for long will not be served soon.
    fn drop_hopeless(&mut self, now: Instant) {
        let hopeless = |waiting: &mut Waiting| now.saturating_duration_since(waiting.since) >= RETRY_LIMIT;
        for (_, Waiting { request, .. }) in self.waiting.extract_if(.., |_, waiting| hopeless(waiting)) {
            self.desk.leave_room();
            let reason = format!("no other one could take the request within {RETRY_LIMIT:?}");
            request.fail(GenerationError::WorkerDied(reason));
        }
    }
}

#[cfg(test)]
#[path = "room_tests.rs"]
mod tests;

//! Where requests wait for a worker: those whose worker died before they had sent anything, those that find none healthy or
//! none with the memory, and those that a worker may have died of.
//!
//! They are placed by [priority and submission](Request::age_order), those of several clients by [turns](super::fair), none before
//! the one in front of it, so that a large request is not passed over for ever. One that waits longer than it said it would fails with
//! that; one that said nothing waits while workers are restarted, for [`WORKER_WAIT_LIMIT`] at the most, and not once the version has
//! failed. The room ends with the version.
//!
//! A [suspect](super::suspects) gets a worker without requests, to which no other one is given until it is cleared or has had
//! [`SUSPECT_ALONE_LIMIT`](crate::limits::SUSPECT_ALONE_LIMIT). Right after a death there is such a worker; later one is kept from others once
//! a suspect has waited for [`TRIAL_PATIENCE`], and lets the requests that it has end. While others wait, trials take no more
//! than [`TRIALS_LIMIT`] in a row, and whoever cannot be tried within [`TRIAL_WAIT_LIMIT`] fails. Suspects whose clients were told that
//! they have ended are tried, too, while nobody waits. Absent: requests that wait in
//! a worker for a sequence.

mod lines;

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
use super::supervisor::Command;
use super::suspects::Standing;
use crate::limits::{
    MAX_UNHEARD_SUSPECTS, SUPERVISOR_TICK, TRIAL_AWAY_PATIENCE, TRIAL_PATIENCE, TRIAL_WAIT_LIMIT, TRIALS_LIMIT,
    TRIED_FIRST_DEATHS, WORKER_WAIT_LIMIT,
};
use crate::protocol::RequestId;
use lines::Lines;

/// A version's waiting room.
pub(super) struct Room {
    desk: Arc<Desk>,
    /// Weak, since the workers live as long as someone outside holds them.
    lanes: Weak<Lanes>,
    inbox: mpsc::UnboundedReceiver<Box<Request>>,
    health: watch::Receiver<WorkerHealth>,
    waiting: Lines,
    /// Those that must be by themselves.
    suspects: BTreeMap<(Instant, RequestId), Waiting>,
    /// Since when suspects have been tried one after the other.
    trials_since: Option<Instant>,
    /// The count of verdicts that has been seen to.
    verdicts: u64,
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
            waiting: Lines::default(),
            suspects: BTreeMap::new(),
            trials_since: None,
            verdicts: 0,
            _ended: ended.drop_guard(),
        }
    }

    /// Works until the version has stopped.
    pub(super) async fn run(mut self) {
        let mut tick = tokio::time::interval(SUPERVISOR_TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let is_empty = self.waiting.is_empty() && self.suspects.is_empty();
            tokio::select! {
                request = self.inbox.recv() => match request {
                    Some(request) => self.admit(request, Instant::now()),
                    None => break,
                },
                () = self.desk.freed.notified() => {}
                changed = self.health.changed() => if changed.is_err() { break },
                _ = tick.tick(), if !is_empty => {}
            }
            while let Ok(request) = self.inbox.try_recv() {
                self.admit(request, Instant::now());
            }
            if *self.health.borrow_and_update() == WorkerHealth::Stopped {
                break;
            }
            self.settle(Instant::now());
        }
        self.inbox.close();
        while let Ok(request) = self.inbox.try_recv() {
            self.admit(request, Instant::now());
        }
        for waiting in self.take_all() {
            self.desk.leave_room();
            waiting.request.end(self.desk.gives_back());
        }
    }

    /// Those that wait, be they suspects.
    fn take_all(&mut self) -> Vec<Waiting> {
        let mut all = self.waiting.extract(|_| true);
        all.extend(std::mem::take(&mut self.suspects).into_values());
        all
    }

    fn admit(&mut self, request: Box<Request>, now: Instant) {
        self.sort(Waiting { request, since: now }, now);
    }

    /// Puts a request where it waits, by what is known of it.
    fn sort(&mut self, waiting: Waiting, now: Instant) {
        let turn = waiting.request.age_order();
        let digest = waiting.request.digest;
        let mut memory = self.desk.suspects();
        match memory.standing(digest, now) {
            Standing::Convicted => {
                drop(memory);
                self.desk.leave_room();
                waiting.request.fail(GenerationError::EndsWorker);
            }
            // Nobody waits for it, and what it was suspected of was another's doing, or there are too many to try them all.
            Standing::Suspected { on_trial: false, .. }
                if waiting.request.is_unheard && (!memory.is_open(digest) || self.has_many_unheard()) =>
            {
                memory.acquit(digest);
                drop(memory);
                self.desk.leave_room();
            }
            Standing::Suspected { .. } => drop(self.suspects.insert(turn, waiting)),
            Standing::Clear if waiting.request.suspect => drop(self.suspects.insert(turn, waiting)),
            Standing::Clear => {
                drop(memory);
                self.waiting.insert(waiting);
            }
        }
    }

    fn has_many_unheard(&self) -> bool {
        self.suspects.values().filter(|waiting| waiting.request.is_unheard).count() >= MAX_UNHEARD_SUSPECTS
    }

    /// Lets go of those that have waited long enough, and places the first ones that can be.
    fn settle(&mut self, now: Instant) {
        self.drop_overdue(now);
        if self.desk.gives_back() {
            self.give_back();
        }
        self.see_to_verdicts(now);
        let Some(lanes) = self.lanes.upgrade() else { return };
        self.try_suspects(&lanes, now);
        while let Some(Waiting { request, since }) = self.waiting.pop_first() {
            match lanes.place(request) {
                Placed::Yes => self.desk.leave_room(),
                Placed::No(request, refusal) => {
                    self.waiting.insert(Waiting { request, since });
                    if refusal == Refusal::NoWorker {
                        self.drop_hopeless(now);
                    }
                    break;
                }
            }
        }
    }

    /// The version makes room for another one, which those that may be given back are for.
    fn give_back(&mut self) {
        for Waiting { request, since } in self.waiting.extract(|_| true) {
            match request.give_back(false) {
                Some(request) => self.waiting.insert(Waiting { request, since }),
                None => self.desk.leave_room(),
            }
        }
    }

    /// Who asks what was cleared is as anyone; who asks what a worker died of is refused.
    fn see_to_verdicts(&mut self, now: Instant) {
        let verdicts = self.desk.suspects().verdicts();
        if std::mem::replace(&mut self.verdicts, verdicts) == verdicts {
            return;
        }
        for mut waiting in self.take_all() {
            // What it is suspected of is known by its digest as long as it is.
            waiting.request.suspect = false;
            self.sort(waiting, now);
        }
    }

    /// Gives suspects the workers that have no requests.
    fn try_suspects(&mut self, lanes: &Lanes, now: Instant) {
        if self.suspects.is_empty() {
            self.desk.stop_draining();
        }
        if self.suspects.is_empty() || self.waiting.is_empty() {
            self.trials_since = None;
        }
        while let Some(turn) = self.next_suspect(now) {
            let since = *self.trials_since.get_or_insert(now);
            if !self.waiting.is_empty() && now.saturating_duration_since(since) >= TRIALS_LIMIT {
                // The others' turn; who waits here has a worker kept from them in the end.
                self.trials_since = None;
                return;
            }
            let Some(Waiting { mut request, since: waits }) = self.suspects.remove(&turn) else { return };
            let Some(lease) = self.desk.lease_alone(&request.demand) else {
                let patience = if self.desk.is_one_away() { TRIAL_AWAY_PATIENCE } else { TRIAL_PATIENCE };
                // No worker is kept from others for one that nobody waits for.
                if now.saturating_duration_since(waits) >= patience && !request.is_abandoned() {
                    self.desk.reserve(&request.demand);
                }
                self.suspects.insert(turn, Waiting { request, since: waits });
                return;
            };
            let reached = match self.desk.suspects().standing(request.digest, now) {
                Standing::Suspected { reached, .. } => reached,
                Standing::Clear | Standing::Convicted => 0,
            };
            let worker = lease.worker();
            request.begin_trial(reached, now);
            request.assign(lease);
            self.desk.suspects().begin_trial(request.digest);
            tracing::warn!(worker, "a request that a worker may have died of is run again, by itself");
            let sent = lanes.supervisors.get(worker).map(|supervisor| supervisor.send(Command::Submit(request)));
            match sent {
                Some(Ok(())) => self.desk.leave_room(),
                // Its supervisor has ended, and with it the version.
                Some(Err(mpsc::error::SendError(Command::Submit(mut request)))) => {
                    self.desk.lose(worker);
                    request.lease = None;
                    self.desk.leave_room();
                    request.fail(GenerationError::Retired);
                }
                Some(Err(_)) | None => self.desk.leave_room(),
            }
        }
    }

    /// The first suspect of which nobody who asks the same is being tried. Those that nobody waits for are tried while nobody else
    /// waits for anything, the one that had come least far first, which takes the least; or before all others, while so many
    /// deaths are unexplained that some would soon be taken for crashes.
    fn next_suspect(&self, now: Instant) -> Option<(Instant, RequestId)> {
        let memory = self.desk.suspects();
        let explains_deaths = memory.open_deaths() > TRIED_FIRST_DEATHS;
        let free = self.suspects.iter().filter_map(|(turn, waiting)| {
            let is_abandoned = waiting.request.is_abandoned();
            let reached = match memory.standing(waiting.request.digest, now) {
                Standing::Suspected { on_trial: true, .. } => return None,
                Standing::Suspected { reached, .. } if is_abandoned => reached,
                _ => 0,
            };
            let is_due = !is_abandoned || explains_deaths || self.waiting.is_empty();
            is_due.then_some((is_abandoned != explains_deaths, reached, *turn))
        });
        free.min().map(|(.., turn)| turn)
    }

    fn drop_overdue(&mut self, now: Instant) {
        let is_late = |waiting: &Waiting| waiting.request.overdue(now).is_some();
        for Waiting { request, .. } in
            self.waiting.extract(|waiting| waiting.request.is_abandoned() || is_late(waiting))
        {
            self.desk.leave_room();
            if let Some(error) = request.overdue(now) {
                request.fail(error.into());
            }
        }
        // Whether a suspect is one is to be known, be it that nobody waits for its answer any more.
        for Waiting { request, .. } in self.suspects.values_mut() {
            if let Some(error) = request.overdue(now) {
                request.leave_client(error.into());
            }
        }
        let untried = |waiting: &mut Waiting| now.saturating_duration_since(waiting.since) >= TRIAL_WAIT_LIMIT;
        for (_, Waiting { request, .. }) in self.suspects.extract_if(.., |_, waiting| untried(waiting)) {
            // Whose doing it was will not be known any more.
            self.desk.suspects().acquit(request.digest);
            self.desk.leave_room();
            let reason = format!("the request may be why, and could not be run by itself within {TRIAL_WAIT_LIMIT:?}");
            request.fail(GenerationError::WorkerDied(reason));
        }
    }

    /// No worker is healthy. Who said how long it may wait waits so long, for the next try of a version that has failed, too; of the
    /// others nobody waits for what may never come.
    fn drop_hopeless(&mut self, now: Instant) {
        let failed = match &*self.health.borrow() {
            WorkerHealth::Failed { reason } => Some(reason.clone()),
            _ => None,
        };
        let waits_long = |waiting: &Waiting| now.saturating_duration_since(waiting.since) >= WORKER_WAIT_LIMIT;
        let hopeless =
            |waiting: &Waiting| waiting.request.limit_ms().is_none() && (failed.is_some() || waits_long(waiting));
        for Waiting { request, .. } in self.waiting.extract(hopeless) {
            self.desk.leave_room();
            let reason = match &failed {
                Some(reason) => format!("it keeps failing: {reason}"),
                None => format!("no other one could take the request within {WORKER_WAIT_LIMIT:?}"),
            };
            request.fail(GenerationError::WorkerDied(reason));
        }
    }
}

#[cfg(test)]
#[path = "room_tests.rs"]
mod tests;

//! The memory that bodies take together, and who may have how much more of it.
//!
//! [`Ledger`] decides, [`Budget`] adds the waiting, and a [`Share`] is what one body has. What counts is what was taken for
//! bytes that are there, never what a client said would come. Two rules keep the memory from being anybody's alone:
//!
//! - A client may have [`BODY_CLIENT_FACTOR`] times what is left free, and one body in any case, so that something always
//!   is left: one client alone may have three quarters, each of two three sevenths. Clients behind one proxy are one client
//!   here, and three quarters are enough for thousands of ordinary requests.
//! - The last [`MAX_BODY_BYTES`] are for the body that began to arrive first. So there is always one that can be read to
//!   its end, and half-read bodies never wait for each other.
//!
//! Absent: how fast a body must come, which is [`super::body`]'s.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use super::errors::Failure;
use crate::limits::{BODY_CLIENT_FACTOR, MAX_BODY_BYTES};

pub use crate::peer::Peer;

/// Why no more can be had now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Short {
    /// All bodies together have what there is.
    Everyone,
    /// This client has what one client may.
    Client,
}

/// What is taken, and by whom.
struct Ledger {
    budget_bytes: usize,
    used_bytes: usize,
    clients: HashMap<Peer, usize>,
    /// Bodies that are not read to their end yet, in the order in which they began.
    unread: BTreeSet<u64>,
    next: u64,
}

impl Ledger {
    fn open(&mut self) -> u64 {
        self.next += 1;
        self.unread.insert(self.next);
        self.next
    }

    fn take(&mut self, body: u64, peer: Peer, bytes: usize) -> Result<(), Short> {
        let left = (self.budget_bytes - self.used_bytes).checked_sub(bytes).ok_or(Short::Everyone)?;
        let own = self.clients.get(&peer).copied().unwrap_or_default() + bytes;
        if own > left.saturating_mul(BODY_CLIENT_FACTOR).max(MAX_BODY_BYTES) {
            return Err(Short::Client);
        }
        if left < MAX_BODY_BYTES && self.unread.first() != Some(&body) {
            return Err(Short::Everyone);
        }
        self.used_bytes += bytes;
        self.clients.insert(peer, own);
        Ok(())
    }

    fn give_back(&mut self, peer: Peer, bytes: usize) {
        self.used_bytes -= bytes;
        if let Some(own) = self.clients.get_mut(&peer) {
            *own -= bytes;
            if *own == 0 {
                self.clients.remove(&peer);
            }
        }
    }
}

/// The memory that all bodies together may take, from their first byte to the end of their requests.
#[derive(Clone)]
pub(super) struct Budget(Arc<Shared>);

struct Shared {
    ledger: Mutex<Ledger>,
    /// Something was given back, or a body was read to its end.
    freed: Notify,
}

impl Budget {
    /// Of so much memory.
    pub(super) fn new(budget_bytes: usize) -> Self {
        let ledger = Ledger { budget_bytes, used_bytes: 0, clients: HashMap::new(), unread: BTreeSet::new(), next: 0 };
        Self(Arc::new(Shared { ledger: Mutex::new(ledger), freed: Notify::new() }))
    }

    /// A body that begins to arrive, and has nothing yet.
    pub(super) fn open(&self, peer: Peer) -> Share {
        let body = self.with(Ledger::open);
        Share { budget: self.clone(), peer, body, bytes: 0 }
    }

    /// A share for something whose size is known.
    ///
    /// # Errors
    /// None was free in time.
    pub(super) async fn take(&self, peer: Peer, bytes: usize, patience: Duration) -> Result<Share, Failure> {
        let mut share = self.open(peer);
        share.grow(bytes, patience).await?;
        share.complete();
        Ok(share)
    }

    #[cfg(test)]
    pub(super) fn used_bytes(&self) -> usize {
        self.with(|ledger| ledger.used_bytes)
    }

    fn with<T>(&self, change: impl FnOnce(&mut Ledger) -> T) -> T {
        change(&mut self.0.ledger.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What one body has of the budget, given back when dropped.
pub(super) struct Share {
    budget: Budget,
    peer: Peer,
    body: u64,
    bytes: usize,
}

impl Share {
    /// Takes so many bytes more.
    ///
    /// # Errors
    /// They were not free in time.
    pub(super) async fn grow(&mut self, bytes: usize, patience: Duration) -> Result<(), Failure> {
        if self.try_grow(bytes).is_ok() {
            return Ok(());
        }
        let deadline = Instant::now() + patience;
        loop {
            let budget = self.budget.clone();
            let mut freed = std::pin::pin!(budget.0.freed.notified());
            // From here on nothing that is freed goes unnoticed.
            freed.as_mut().enable();
            let Err(short) = self.try_grow(bytes) else { return Ok(()) };
            if timeout_at(deadline, freed).await.is_err() {
                return Err(Failure::no_room_for_body(short));
            }
        }
    }

    fn try_grow(&mut self, bytes: usize) -> Result<(), Short> {
        let (body, peer) = (self.body, self.peer);
        self.budget.with(|ledger| ledger.take(body, peer, bytes))?;
        self.bytes += bytes;
        Ok(())
    }

    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Gives back all but `bytes`.
    pub(super) fn shrink(&mut self, bytes: usize) {
        let (peer, surplus) = (self.peer, self.bytes.saturating_sub(bytes));
        self.budget.with(|ledger| ledger.give_back(peer, surplus));
        self.bytes -= surplus;
        self.budget.0.freed.notify_waiters();
    }

    /// It is there to its end.
    pub(super) fn complete(&mut self) {
        let body = self.body;
        if self.budget.with(|ledger| ledger.unread.remove(&body)) {
            self.budget.0.freed.notify_waiters();
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let body = self.body;
        self.budget.with(|ledger| ledger.unread.remove(&body));
        self.shrink(0);
    }
}

#[cfg(test)]
#[path = "budget_tests.rs"]
mod tests;

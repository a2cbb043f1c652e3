//! Whoever wants one digest at the same time: one of them at a time works on its partial file, and which one it is.
//!
//! The file is the same wherever it comes from, so that those who name the same source fetch it once. One who names another
//! source takes over from those that began before, and goes on where they were: their source may be one that sends a byte now
//! and then, and its own the cure. It does so only when its own source answers, which is for its caller to see; while it waits
//! for another try of its own, the others go on.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::{Mutex, OwnedMutexGuard, watch};

use super::source::Source;

/// The right to work on a digest's partial file.
pub(super) type Right = OwnedMutexGuard<()>;

/// All who want one digest, in the order in which they came.
#[derive(Clone, Default)]
pub(super) struct Flight {
    lock: Arc<Mutex<()>>,
    callers: watch::Sender<Callers>,
}

#[derive(Default)]
struct Callers {
    came: u64,
    there: BTreeMap<u64, There>,
}

struct There {
    source: Source,
    /// Whether it waits for the right, and says so.
    waits: bool,
}

/// One who wants it, until this is dropped.
pub(super) struct Caller {
    flight: Flight,
    number: u64,
    source: Source,
}

impl Flight {
    /// One more who wants it.
    pub(super) fn join(&self, source: &Source) -> Caller {
        let mut number = 0;
        self.callers.send_modify(|callers| {
            callers.came += 1;
            number = callers.came;
            callers.there.insert(number, There { source: source.clone(), waits: false });
        });
        Caller { flight: self.clone(), number, source: source.clone() }
    }
}

impl Caller {
    /// The right, if nobody has it.
    pub(super) fn try_lock(&self) -> Option<Right> {
        Arc::clone(&self.flight.lock).try_lock_owned().ok()
    }

    /// The right, when whoever has it is done with it, or gives way to this one.
    pub(super) async fn lock(&self) -> Right {
        let waits = Waits::of(self);
        let right = self.lock_quietly().await;
        drop(waits);
        right
    }

    /// The right, when whoever has it is done with it.
    pub(super) async fn lock_quietly(&self) -> Right {
        Arc::clone(&self.flight.lock).lock_owned().await
    }

    /// Whether one who came before, with another source, would give way.
    pub(super) fn may_take_over(&self) -> bool {
        self.flight.callers.borrow().there.range(..self.number).any(|(_, other)| other.source != self.source)
    }

    /// Until somebody waits who came later, with another source.
    pub(super) async fn outdone(&self) {
        self.until(|number| number > self.number).await;
    }

    /// Until anybody with another source waits: for one who does nothing just now.
    pub(super) async fn wanted(&self) {
        self.until(|_| true).await;
    }

    async fn until(&self, by: impl Fn(u64) -> bool) {
        let wanted = |callers: &Callers| {
            let mut there = callers.there.iter();
            there.any(|(number, other)| other.waits && by(*number) && other.source != self.source)
        };
        // The sender is this caller's own, so that it does not go before.
        let _ = self.flight.callers.subscribe().wait_for(wanted).await;
    }

    fn set_waits(&self, waits: bool) {
        self.flight.callers.send_modify(|callers| {
            if let Some(own) = callers.there.get_mut(&self.number) {
                own.waits = waits;
            }
        });
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.flight.callers.send_modify(|callers| drop(callers.there.remove(&self.number)));
    }
}

/// That a caller waits, for as long as it does.
struct Waits<'a>(&'a Caller);

impl<'a> Waits<'a> {
    fn of(caller: &'a Caller) -> Self {
        caller.set_waits(true);
        Self(caller)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.set_waits(false);
    }
}

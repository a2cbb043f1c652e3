//! What who submitted a request holds of it, and how the engine's thread hears of that.
//!
//! A handle sets flags, which the thread looks at in its next step. One that sleeps, since all that it has is paused or
//! nothing, is woken by a command; one such command at a time is on its way, however many handles call.

use std::sync::atomic::{
    AtomicBool,
    Ordering::{AcqRel, Relaxed},
};
use std::sync::{Arc, Weak};

use crossbeam_channel::Sender;

use crate::error::ProbeError;
use crate::output::Signals;
use crate::request::Request;

/// What the engine's thread is told.
pub(crate) enum Command {
    Run(Box<Request>),
    Probe(Sender<Result<(), ProbeError>>),
    /// To look at the requests' flags; without a call where the thread looks by itself.
    Wake(Option<Call>),
    Shutdown,
}

/// That the thread is called. Until it is dropped nobody else calls.
pub(crate) struct Call(Arc<AtomicBool>);

impl Drop for Call {
    fn drop(&mut self) {
        // Who did not call since this one was on its way has set its flag before: it is seen from here on.
        self.0.swap(false, AcqRel);
    }
}

/// The way to the engine's thread.
pub(crate) struct Commands {
    pub(crate) sender: Sender<Command>,
    called: Arc<AtomicBool>,
}

impl Commands {
    pub(crate) fn new(sender: Sender<Command>) -> Self {
        Self { sender, called: Arc::default() }
    }

    /// Has the thread look at the requests' flags. Never blocks.
    fn wake(&self) {
        if !self.called.swap(true, AcqRel) {
            // Where the channel is full the thread has enough to wake it.
            let _ = self.sender.try_send(Command::Wake(Some(Call(self.called.clone()))));
        }
    }
}

/// A request that was accepted. Dropping it does not cancel.
#[derive(Clone)]
pub struct RequestHandle {
    signals: Arc<Signals>,
    commands: Weak<Commands>,
}

impl RequestHandle {
    pub(crate) fn new(signals: Arc<Signals>, commands: Weak<Commands>) -> Self {
        Self { signals, commands }
    }

    /// Ends the request within one step, with [`FinishReason::Cancelled`](crate::FinishReason::Cancelled). Text that is held
    /// back is not sent.
    pub fn cancel(&self) {
        self.signal(&self.signals.cancelled, true);
    }

    /// Has the request give its slot and its KV cells to others before the next step; what the step that is being computed
    /// gives still comes. It stays accepted, counts among those in flight, and ends as any other one by
    /// [`cancel`](Self::cancel), by its deadline if it has no token yet, and with its engine. Where it is paused already, or
    /// has ended, nothing happens.
    pub fn pause(&self) {
        self.signal(&self.signals.paused, true);
    }

    /// Has a paused request wait for a slot, as one does that gave way to others: before what was submitted after it, but
    /// for one that was paused many times, which takes its turn. It goes on with the tokens that it would have had.
    pub fn resume(&self) {
        self.signal(&self.signals.paused, false);
    }

    fn signal(&self, flag: &AtomicBool, value: bool) {
        if flag.swap(value, Relaxed) != value
            && !self.signals.ended.load(Relaxed)
            && let Some(commands) = self.commands.upgrade()
        {
            commands.wake();
        }
    }
}

impl std::fmt::Debug for RequestHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RequestHandle").field("signals", &self.signals).finish_non_exhaustive()
    }
}

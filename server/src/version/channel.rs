//! The way of one answer's events from its worker's supervisor to its client: in order, counted in bytes, never waited for.
//!
//! Whoever sends is told when the sequence is to pause, and whoever takes when it is to go on; both know only what
//! [`Output`] decides. A sender can end an answer whose client takes too little: what waits is thrown away at once, with the
//! memory that it holds, and the client finds the error in its place. What still waits when the sender goes is left to
//! [`Output`], which does the same.

use std::collections::VecDeque;
use std::fmt::{self, Display};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::generation::{GenerationError, Item};
use crate::limits::{OUTPUT_OVERRUN_BYTES, SLOW_CLIENT_LOG_PERIOD, SLOW_CLIENT_MIN_BYTES_PER_SECOND};
use crate::output::{Leftover, Output, Pressure, allocated_by, may_resume, pressure};
use crate::throttle::Throttle;

/// Places that a queue keeps, however empty it is.
const KEPT_PLACES: usize = 32;
/// What an event takes in the queue, of which up to half is empty.
const PLACE_BYTES: usize = 2 * size_of::<(Item, usize)>();

/// Ends of answers are told so often; `others` of a record are those since the last one.
static TOLD_SLOW: Throttle = Throttle::new(SLOW_CLIENT_LOG_PERIOD);

/// How a client was too slow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slowness {
    /// It took too little for so long of an answer that was paused for it, or had ended.
    Stalled(Duration),
    /// More came of a paused answer than [`OUTPUT_OVERRUN_BYTES`].
    Overrun,
}

impl Display for Slowness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stalled(limit) => write!(
                f,
                "of what waited for it, it took less than {SLOW_CLIENT_MIN_BYTES_PER_SECOND} bytes a second for {} s",
                limit.as_secs()
            ),
            Self::Overrun => {
                let overrun = OUTPUT_OVERRUN_BYTES >> 10;
                write!(
                    f,
                    "{overrun} KiB more came of its answer than may wait for it, which could not be paused in time"
                )
            }
        }
    }
}

/// What became of an event that was sent, and what is to be done about its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// It waits for the client.
    Waits,
    /// It waits, and more do than may: the sequence is to pause.
    Pauses,
    /// Too many wait, and all were thrown away: the answer has ended.
    Ended,
    /// Nobody listens any more.
    Gone,
}

/// A channel for one of so many answers to a request.
pub(super) fn channel(output: &Arc<Output>, answers: usize) -> (EventSender, EventReceiver) {
    let channel = Arc::new(Channel { output: Arc::clone(output), answers, queue: Mutex::default() });
    (EventSender(Arc::clone(&channel)), EventReceiver(channel))
}

struct Channel {
    output: Arc<Output>,
    /// Those to the same request, which one client takes over one connection.
    answers: usize,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    /// Each with the bytes that are counted for it.
    items: VecDeque<(Item, usize)>,
    held_bytes: usize,
    is_paused: bool,
    /// Since its client was last seen to take enough, while something waits that nothing but its taking will move.
    window: Option<Window>,
    /// What waited was thrown away.
    is_cut: bool,
    is_sender_gone: bool,
    is_receiver_gone: bool,
    waker: Option<Waker>,
}

/// A time in which a client is to take enough.
#[derive(Clone, Copy)]
struct Window {
    since: Instant,
    /// What waited at its beginning.
    waited_bytes: usize,
    taken_bytes: usize,
}

impl Channel {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// See [`EventSender::ends_unread`].
    fn ends_unread(&self, now: Instant, limit: Duration) -> bool {
        let mut queue = self.lock();
        let limit = self.output.patience(limit, queue.window.map_or(now, |window| window.since));
        let least_bytes =
            SLOW_CLIENT_MIN_BYTES_PER_SECOND.saturating_mul(limit.as_secs() as usize) / self.answers.max(1);
        let ends = !queue.is_over() && queue.is_behind(now, limit, least_bytes);
        if ends {
            queue.end(Slowness::Stalled(limit), &self.output);
        }
        ends
    }
}

impl Leftover for Channel {
    fn is_over(&self, now: Instant, limit: Duration) -> bool {
        self.ends_unread(now, limit) || self.lock().is_over()
    }
}

impl Queue {
    /// Whether nothing waits of which it matters that it is taken.
    fn is_over(&self) -> bool {
        self.is_receiver_gone || self.is_cut || self.items.is_empty()
    }

    /// Whether its client has taken less than `least_bytes` for `limit`, and less than what waited.
    fn is_behind(&mut self, now: Instant, limit: Duration, least_bytes: usize) -> bool {
        // Not anew with each pause, or who takes just enough for the next piece could have it wait for ever.
        let current = self.window.filter(|window| window.taken_bytes < least_bytes.min(window.waited_bytes));
        let begins = self.is_paused || self.is_sender_gone;
        let anew = begins.then_some(Window { since: now, waited_bytes: self.held_bytes, taken_bytes: 0 });
        self.window = current.or(anew);
        current.is_some_and(|window| now.saturating_duration_since(window.since) >= limit)
    }

    /// Returns how much waits in all answers then.
    fn push(&mut self, item: Item, output: &Output) -> usize {
        // Every model goes out of service as the server ends, which is the reason then.
        let item = match item {
            Err(GenerationError::Retired) if output.hurries() => Err(GenerationError::ServerEnds),
            item => item,
        };
        let bytes = PLACE_BYTES + item.as_ref().map_or(0, allocated_by);
        self.items.push_back((item, bytes));
        self.held_bytes += bytes;
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
        output.hold(bytes)
    }

    /// Takes the first one out, and says whether a paused sequence is to go on now.
    fn pop(&mut self, output: &Output) -> Option<(Item, bool)> {
        let (item, bytes) = self.items.pop_front()?;
        self.held_bytes -= bytes;
        if let Some(window) = &mut self.window {
            window.taken_bytes += bytes;
        }
        if self.items.capacity() > KEPT_PLACES.max(4 * self.items.len()) {
            self.items.shrink_to(KEPT_PLACES.max(2 * self.items.len()));
        }
        let held_bytes = output.release(bytes);
        let resumes = self.is_paused && may_resume(self.held_bytes, output.allowance(held_bytes));
        self.is_paused &= !resumes;
        Some((item, resumes))
    }

    fn clear(&mut self, output: &Output) {
        self.items = VecDeque::new();
        output.release(std::mem::take(&mut self.held_bytes));
    }

    /// Puts an error in the place of all that waits.
    fn end(&mut self, slowness: Slowness, output: &Output) {
        self.clear(output);
        self.push(Err(GenerationError::SlowClient(slowness)), output);
        output.note_end();
        self.is_cut = true;
        if let Some(others) = TOLD_SLOW.pass(Instant::now()) {
            tracing::warn!(others, "an answer was ended, since its client reads too slowly: {slowness}");
        }
    }
}

/// Where a request's supervisor puts its events.
pub(super) struct EventSender(Arc<Channel>);

impl EventSender {
    /// Never waits. A last event is always taken while somebody listens.
    pub(super) fn send(&self, item: Item) -> Sent {
        let (mut queue, output) = (self.0.lock(), &*self.0.output);
        if queue.is_receiver_gone {
            return Sent::Gone;
        }
        let is_last = !matches!(&item, Ok(event) if !event.is_terminal());
        let held_bytes = queue.push(item, output);
        if is_last {
            return Sent::Waits;
        }
        match pressure(queue.held_bytes, output.allowance(held_bytes), queue.is_paused) {
            Pressure::None => Sent::Waits,
            Pressure::Pause => {
                queue.is_paused = true;
                Sent::Pauses
            }
            Pressure::Overrun => {
                queue.end(Slowness::Overrun, output);
                Sent::Ended
            }
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.0.lock().is_receiver_gone
    }

    /// Whether the sequence is not to go on now.
    pub(super) fn is_paused(&self) -> bool {
        self.0.lock().is_paused
    }

    /// The sequence begins anew, where nobody has told it to pause.
    pub(super) fn restart(&self) {
        let mut queue = self.0.lock();
        (queue.is_paused, queue.window) = (false, None);
    }

    /// Ends a paused answer of which too little has been taken for `limit`, as far as is known: to be asked time and again. True:
    /// it has ended.
    pub(super) fn ends_unread(&self, now: Instant, limit: Duration) -> bool {
        self.0.ends_unread(now, limit)
    }
}

impl Drop for EventSender {
    fn drop(&mut self) {
        let mut queue = self.0.lock();
        queue.is_sender_gone = true;
        if let Some(waker) = queue.waker.take() {
            waker.wake();
        }
        let leaves = !queue.is_over();
        drop(queue);
        if leaves {
            let left: Weak<Channel> = Arc::downgrade(&self.0);
            self.0.output.leave(left);
        }
    }
}

/// Where a client's task takes them.
pub(super) struct EventReceiver(Arc<Channel>);

impl EventReceiver {
    /// The next event, `None` where none comes any more, and whether the sequence was paused and is to go on now.
    pub(super) fn poll_recv(&self, context: &mut Context<'_>) -> Poll<(Option<Item>, bool)> {
        let mut queue = self.0.lock();
        if let Some((item, resumes)) = queue.pop(&self.0.output) {
            return Poll::Ready((Some(item), resumes));
        }
        if queue.is_sender_gone {
            return Poll::Ready((None, false));
        }
        queue.waker = Some(context.waker().clone());
        Poll::Pending
    }

    /// Throws away what waits, and has no more come.
    pub(super) fn close(&self) {
        let mut queue = self.0.lock();
        queue.is_receiver_gone = true;
        queue.clear(&self.0.output);
    }
}

impl Drop for EventReceiver {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
#[path = "channel_tests.rs"]
mod tests;

//! Ends steps that take too long on a processor, whatever they are spent on.
//!
//! The limits of `llguidance` count expressions and items that are made, not those that are looked at again, so that an
//! ambiguous schema can take seconds for a token. One thread looks at each step that runs for longer than
//! [`FIRST_LOOK`], and cancels it once it has used the rest of [`MAX_STEP_TIME`] of a processor, as the kernel counts it.
//! Time on the clock does not count: a thread that waits for a processor is not at fault. Where the kernel does not say what
//! a thread has used, it is [`WAITING`] times as much on the clock.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use llguidance::CancellationHandle;

use super::limits::MAX_STEP_TIME;

/// See the module.
const WAITING: u32 = 20;
/// When a step is first looked at, and how often: ordinary ones have ended by then.
const FIRST_LOOK: Duration = Duration::from_millis(1);
/// What a step may use after the first look.
const REST: Duration = MAX_STEP_TIME.saturating_sub(FIRST_LOOK);

/// A step that runs.
struct Running {
    number: u64,
    thread: i32,
    began: Instant,
    /// When it is looked at next.
    look_at: Instant,
    /// What its thread had used of a processor at the first look.
    used: Option<Duration>,
    cancel: CancellationHandle,
}

#[derive(Default)]
struct Steps {
    running: Vec<Running>,
    next: u64,
    ended: bool,
}

#[derive(Default)]
struct Shared {
    steps: Mutex<Steps>,
    changed: Condvar,
}

/// The clock, and its thread until it is dropped.
pub(super) struct StepClock {
    shared: Arc<Shared>,
}

impl StepClock {
    /// Starts the thread.
    pub(super) fn new() -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let watched = shared.clone();
        std::thread::Builder::new().name(String::from("gantry-schema-clock")).spawn(move || watch(&watched))?;
        Ok(Self { shared })
    }

    /// Runs a step, which is cancelled if it takes too long.
    pub(super) fn run<T>(&self, cancel: &CancellationHandle, step: impl FnOnce() -> T) -> T {
        let number = {
            let mut steps = lock(&self.shared);
            let (number, began) = (steps.next, Instant::now());
            steps.next += 1;
            let thread = rustix::thread::gettid().as_raw_nonzero().get();
            let look_at = began + FIRST_LOOK;
            steps.running.push(Running { number, thread, began, look_at, used: None, cancel: cancel.clone() });
            // The others that run are looked at before this one.
            if steps.running.len() == 1 {
                self.shared.changed.notify_one();
            }
            number
        };
        let _end = End { shared: &self.shared, number };
        step()
    }
}

impl Drop for StepClock {
    fn drop(&mut self) {
        lock(&self.shared).ended = true;
        self.shared.changed.notify_one();
    }
}

/// Takes a step off the list, also where it panics.
struct End<'a> {
    shared: &'a Shared,
    number: u64,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        lock(self.shared).running.retain(|step| step.number != self.number);
    }
}

fn lock(shared: &Shared) -> MutexGuard<'_, Steps> {
    shared.steps.lock().unwrap_or_else(PoisonError::into_inner)
}

fn watch(shared: &Shared) {
    let mut steps = lock(shared);
    while !steps.ended {
        let now = Instant::now();
        for step in steps.running.iter_mut().filter(|step| step.look_at <= now) {
            let used = used(step.thread);
            look(step, now, used);
        }
        steps = match steps.running.iter().map(|step| step.look_at).min() {
            None => shared.changed.wait(steps).unwrap_or_else(PoisonError::into_inner),
            Some(next) => {
                let left = next.saturating_duration_since(Instant::now());
                shared.changed.wait_timeout(steps, left).unwrap_or_else(PoisonError::into_inner).0
            }
        };
    }
}

/// Cancels a step that has had enough, or says when to look again.
fn look(step: &mut Running, now: Instant, used: Option<Duration>) {
    step.used = step.used.or(used);
    let left = match (step.used, used) {
        (Some(first), Some(used)) => REST.saturating_sub(used.saturating_sub(first)),
        _ => (MAX_STEP_TIME * WAITING).saturating_sub(now.saturating_duration_since(step.began)),
    };
    step.look_at = now + left.max(FIRST_LOOK);
    if left.is_zero() {
        step.cancel.cancel();
    }
}

/// What a thread of this process has used of a processor, as the scheduler counted last.
fn used(thread: i32) -> Option<Duration> {
    let text = std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).ok()?;
    Some(Duration::from_nanos(text.split(' ').next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn running() -> Running {
        let now = Instant::now();
        Running { number: 0, thread: 0, began: now, look_at: now, used: None, cancel: CancellationHandle::default() }
    }

    #[test]
    fn time_on_a_processor_counts_and_time_that_is_waited_does_not() {
        let ms = Duration::from_millis;
        for (looks, cancelled, next) in [
            // A thread that got no processor between its looks.
            (vec![(1, Some(100)), (5, Some(100)), (1000, Some(103))], false, 1),
            (vec![(1, Some(100)), (5, Some(101))], false, 3),
            (vec![(1, Some(100)), (5, Some(104))], true, 1),
            // What it used before the first look was other steps'.
            (vec![(1, Some(90_000))], false, 4),
            (vec![(1, None), (99, None)], false, 1),
            (vec![(1, None), (100, None)], true, 1),
        ] {
            let mut step = running();
            for &(at, used) in &looks {
                let now = step.began + ms(at);
                look(&mut step, now, used.map(ms));
            }
            let last = looks.last().map(|(at, _)| step.began + ms(*at)).unwrap();
            assert_eq!((step.cancel.is_cancelled(), step.look_at), (cancelled, last + ms(next)), "{looks:?}");
        }
    }

    #[test]
    fn a_step_that_does_not_end_is_cancelled_and_the_others_are_not() {
        let clock = StepClock::new().unwrap();
        let (endless, quick) = (CancellationHandle::default(), CancellationHandle::default());
        clock.run(&quick, || {});
        clock.run(&endless, || while !endless.is_cancelled() {});
        clock.run(&quick, || {});
        assert!(!quick.is_cancelled());
        assert!(lock(&clock.shared).running.is_empty());
    }

    #[test]
    fn a_step_that_panics_is_looked_at_no_more() {
        let clock = StepClock::new().unwrap();
        let step = std::panic::AssertUnwindSafe(|| clock.run(&CancellationHandle::default(), || panic!("scripted")));
        assert!(std::panic::catch_unwind(step).is_err());
        assert!(lock(&clock.shared).running.is_empty());
    }
}

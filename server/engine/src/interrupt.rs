//! Ends what the engine computes for nobody as soon as somebody comes.
//!
//! A CPU looks at a flag between two operations and ends its batch when that is raised
//! ([`Backend::interrupt`](crate::backend::Backend::interrupt)). The engine's thread says when it begins a batch of nobody's,
//! whoever brings a request raises the flag only while there is one, and the thread lowers it again: no batch of a request
//! ends early. At the engine's end the flag is raised for good. A GPU finishes its batch, which is short there.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
struct State {
    /// What is computed now is for nobody.
    idle_work: bool,
    /// The engine ends.
    ended: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Interrupt {
    /// `None`: a batch cannot be ended.
    flag: Option<Arc<AtomicBool>>,
    state: Mutex<State>,
}

impl Interrupt {
    pub(crate) fn new(flag: Option<Arc<AtomicBool>>) -> Self {
        Self { flag, state: Mutex::default() }
    }

    /// What is computed from now on is for nobody. False: the engine ends.
    pub(crate) fn begin_idle_work(&self) -> bool {
        let mut state = self.state();
        state.idle_work = !state.ended;
        state.idle_work
    }

    /// It was computed, or was interrupted: true.
    pub(crate) fn end_idle_work(&self) -> bool {
        let mut state = self.state();
        state.idle_work = false;
        let raised = self.flag.as_ref().is_some_and(|flag| flag.swap(state.ended, Relaxed));
        raised || state.ended
    }

    /// Somebody has come: what is computed for nobody ends.
    pub(crate) fn give_way(&self) {
        let state = self.state();
        if state.idle_work {
            self.raise();
        }
    }

    /// Ends whatever is computed, and all that would be.
    pub(crate) fn end_everything(&self) {
        let mut state = self.state();
        state.ended = true;
        self.raise();
    }

    fn raise(&self) {
        self.flag.iter().for_each(|flag| flag.store(true, Relaxed));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_for_nobody_is_interrupted() {
        let flag = Arc::<AtomicBool>::default();
        let interrupt = Interrupt::new(Some(flag.clone()));
        let is_raised = || flag.load(Relaxed);
        interrupt.give_way();
        assert!(!is_raised(), "nothing is computed for nobody");
        assert!(interrupt.begin_idle_work());
        interrupt.give_way();
        assert!(is_raised());
        assert!(interrupt.end_idle_work() && !is_raised(), "the next batch may be a request's");
        interrupt.give_way();
        assert!(!is_raised());
        assert!(interrupt.begin_idle_work());
        assert!(!interrupt.end_idle_work(), "nobody came");
    }

    #[test]
    fn the_end_of_the_engine_is_not_taken_back() {
        let flag = Arc::<AtomicBool>::default();
        let interrupt = Interrupt::new(Some(flag.clone()));
        assert!(interrupt.begin_idle_work());
        interrupt.end_everything();
        assert!(interrupt.end_idle_work() && flag.load(Relaxed));
        assert!(!interrupt.begin_idle_work());
        // Where nothing can be interrupted it is known all the same.
        let none = Interrupt::default();
        assert!(none.begin_idle_work());
        none.give_way();
        assert!(!none.end_idle_work());
    }
}

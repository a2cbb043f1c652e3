//! The order of those that wait for any worker: a line for each priority, by whose [turn](crate::version::fair) it is.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use gantry_engine::Priority;

use super::Waiting;
use crate::protocol::RequestId;

/// See the module. Next is the first of the line whose oldest was submitted earliest, as far as its priority lets it
/// ([`Request::age_order`](super::Request::age_order)): that one waits for its turn in its line, not for those of other lines.
#[derive(Default)]
pub(super) struct Lines([Line; Priority::COUNT]);

#[derive(Default)]
struct Line {
    by_turn: BTreeMap<(u64, Instant, RequestId), Waiting>,
    by_age: BTreeSet<(Instant, RequestId)>,
}

impl Lines {
    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(|line| line.by_turn.is_empty())
    }

    pub(super) fn insert(&mut self, waiting: Waiting) {
        let (submitted, id) = waiting.request.age_order();
        let key = (waiting.request.start_tag(), submitted, id);
        let line = &mut self.0[waiting.request.priority().rank()];
        line.by_age.insert((submitted, id));
        line.by_turn.insert(key, waiting);
    }

    pub(super) fn pop_first(&mut self) -> Option<Waiting> {
        let lines = self.0.iter_mut().filter(|line| !line.by_age.is_empty());
        let line = lines.min_by_key(|line| line.by_age.first().copied())?;
        let ((_, submitted, id), waiting) = line.by_turn.pop_first()?;
        line.by_age.remove(&(submitted, id));
        Some(waiting)
    }

    /// Takes out those of which `leaves` holds.
    pub(super) fn extract(&mut self, mut leaves: impl FnMut(&Waiting) -> bool) -> Vec<Waiting> {
        let mut left = Vec::new();
        for Line { by_turn, by_age } in &mut self.0 {
            for ((_, submitted, id), waiting) in by_turn.extract_if(.., |_, waiting| leaves(waiting)) {
                by_age.remove(&(submitted, id));
                left.push(waiting);
            }
        }
        left
    }
}

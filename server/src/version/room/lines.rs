//! The order of those that wait for any worker: a line for each priority, by whose [turn](crate::version::fair) it is.

use std::collections::BTreeMap;
use std::time::Instant;

use super::Waiting;
use crate::protocol::RequestId;

/// See the module. Of the firsts of the lines the one that was submitted earliest is next, as far as its priority lets it
/// ([`Request::turn`](super::Request::turn)).
#[derive(Default)]
pub(super) struct Lines([BTreeMap<(u64, Instant, RequestId), Waiting>; 3]);

impl Lines {
    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(BTreeMap::is_empty)
    }

    pub(super) fn insert(&mut self, waiting: Waiting) {
        let (submitted, id) = waiting.request.turn();
        let key = (waiting.request.start_tag(), submitted, id);
        self.0[waiting.request.priority() as usize].insert(key, waiting);
    }

    pub(super) fn pop_first(&mut self) -> Option<Waiting> {
        let firsts = self.0.iter_mut().filter_map(BTreeMap::first_entry);
        Some(firsts.min_by_key(|first| first.get().request.turn())?.remove())
    }

    /// Takes out those of which `leaves` holds.
    pub(super) fn extract(&mut self, mut leaves: impl FnMut(&Waiting) -> bool) -> Vec<Waiting> {
        let of_line = |line: &mut BTreeMap<_, _>| line.extract_if(.., |_, waiting| leaves(waiting)).collect::<Vec<_>>();
        self.0.iter_mut().flat_map(of_line).map(|(_, waiting)| waiting).collect()
    }
}

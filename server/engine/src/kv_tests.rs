//! Which leftover of the KV cache goes next, against a plain list.

use proptest::prelude::*;

use super::*;
use crate::backend::scripted::{ScriptedBackend, VOCAB};

const SEQUENCES: u32 = 5;
const POSITIONS: u32 = 40;

/// What each sequence holds, and all of them by their last use, the one that is the longest ago first.
struct Model {
    held: Vec<Vec<Token>>,
    in_use: Vec<bool>,
    order: Vec<u32>,
}

impl Model {
    fn new() -> Self {
        let sequences = SEQUENCES as usize;
        Self { held: vec![Vec::new(); sequences], in_use: vec![false; sequences], order: (0..SEQUENCES).collect() }
    }

    fn held(&self, sequence: u32) -> &[Token] {
        &self.held[sequence as usize]
    }

    fn in_use(&self, sequence: u32) -> bool {
        self.in_use[sequence as usize]
    }

    fn used(&mut self, sequence: u32) {
        self.order.retain(|&other| other != sequence);
        self.order.push(sequence);
    }

    fn set_in_use(&mut self, sequence: u32, in_use: bool) {
        self.in_use[sequence as usize] = in_use;
        self.used(sequence);
    }

    fn exchange(&mut self, first: u32, second: u32) {
        self.held.swap(first as usize, second as usize);
        self.in_use.swap(first as usize, second as usize);
        for sequence in &mut self.order {
            *sequence = match *sequence {
                id if id == first => second,
                id if id == second => first,
                id => id,
            };
        }
    }

    /// In the order in which they go.
    fn leftovers(&self) -> Vec<u32> {
        self.order.iter().copied().filter(|&id| !self.in_use(id) && !self.held(id).is_empty()).collect()
    }
}

#[derive(Clone, Debug)]
enum Action {
    Take(u32),
    Read(u32, Vec<Token>),
    End(u32),
    Touch(u32),
    Copy { from: u32, to: u32, len: prop::sample::Index },
    Exchange(u32, u32),
    Cut(u32, u32),
    Evict { spared: Option<u32> },
}

fn action() -> impl Strategy<Value = Action> {
    let id = || 0..SEQUENCES;
    let tokens = prop::collection::vec(1..VOCAB.cast_signed(), 1..9);
    prop_oneof![
        4 => id().prop_map(Action::Take),
        8 => (id(), tokens).prop_map(|(id, tokens)| Action::Read(id, tokens)),
        6 => id().prop_map(Action::End),
        3 => id().prop_map(Action::Touch),
        3 => (id(), id(), any::<prop::sample::Index>()).prop_map(|(from, to, len)| Action::Copy { from, to, len }),
        2 => (id(), id()).prop_map(|(first, second)| Action::Exchange(first, second)),
        1 => (id(), 0..POSITIONS).prop_map(|(id, len)| Action::Cut(id, len)),
        2 => prop::option::of(id()).prop_map(|spared| Action::Evict { spared }),
    ]
}

/// What is decoded of these tokens behind so many others.
fn batch(sequence: u32, held: usize, tokens: &[Token]) -> Vec<BatchEntry> {
    let positions = u32::try_from(held).unwrap_or(u32::MAX)..;
    let entry = |(&token, position)| BatchEntry { token, position, sequence, output: false };
    tokens.iter().zip(positions).map(entry).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// **Feature: distributed-inference-server, Property 10: LRU Cache Eviction**
    /// **Validates: Requirements 4.2**
    #[test]
    fn the_leftover_that_was_not_used_for_longest_goes_first_and_none_in_use_does(
        unified in any::<bool>(), actions in prop::collection::vec(action(), 1..120),
    ) {
        let limits = BackendLimits { unified, ..ScriptedBackend::new(SEQUENCES, POSITIONS, 16).limits() };
        let mut kv = Kv::new(ScriptedBackend::with_limits(limits));
        let mut model = Model::new();
        for action in actions {
            match action {
                Action::Take(id) => {
                    kv.set_in_use(id, true);
                    model.set_in_use(id, true);
                }
                Action::Read(id, tokens) => {
                    let held = model.held(id).len();
                    if model.in_use(id) && held + tokens.len() <= POSITIONS as usize {
                        prop_assert_eq!(kv.decode(&batch(id, held, &tokens)), Ok(()));
                        model.held[id as usize].extend(tokens);
                    }
                }
                Action::End(id) => {
                    if model.in_use(id) {
                        kv.set_in_use(id, false);
                        model.set_in_use(id, false);
                    }
                }
                Action::Touch(id) => {
                    kv.touch(id);
                    model.used(id);
                }
                // A copy is made for a request, which takes its sequence at once.
                Action::Copy { from, to, len } => {
                    let held = model.held(from).to_vec();
                    if from != to && !held.is_empty() && model.held(to).is_empty() {
                        let len = 1 + len.index(held.len());
                        prop_assert_eq!(kv.copy(from, to, u32::try_from(len).unwrap_or(u32::MAX)), Ok(()));
                        kv.set_in_use(to, true);
                        model.held[to as usize] = held[..len].to_vec();
                        model.set_in_use(to, true);
                    }
                }
                Action::Exchange(first, second) => {
                    if !unified && first != second {
                        prop_assert_eq!(kv.exchange(first, second), Ok(()));
                        model.exchange(first, second);
                    }
                }
                Action::Cut(id, len) => {
                    kv.truncate(id, len);
                    model.held[id as usize].truncate(len as usize);
                }
                Action::Evict { spared } => {
                    let next = model.leftovers().into_iter().find(|&id| Some(id) != spared);
                    prop_assert_eq!(kv.coldest_but(spared), next);
                    if let Some(next) = next {
                        kv.clear(next);
                        model.held[next as usize].clear();
                    }
                }
            }
            let left = model.leftovers();
            prop_assert_eq!(kv.coldest(), left.first().copied());
            prop_assert_eq!(kv.hottest(), left.last().copied());
            for id in 0..SEQUENCES {
                prop_assert_eq!(kv.tokens(id), model.held(id));
                prop_assert_eq!(kv.in_use(id), model.in_use(id));
            }
            prop_assert_eq!(kv.backend().cells(), kv.used_cells());
        }
        // Where all must go that may.
        for next in model.leftovers() {
            prop_assert_eq!(kv.coldest(), Some(next));
            kv.clear(next);
        }
        prop_assert_eq!(kv.coldest(), None);
        for id in 0..SEQUENCES {
            prop_assert_eq!(kv.tokens(id), if model.in_use(id) { model.held(id) } else { &[] });
        }
        prop_assert_eq!(kv.used_cells(), kv.cells_in_use(|_| true));
    }
}

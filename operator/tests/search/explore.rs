//! The search itself: breadth first over all states, so that the trace to a violation is a shortest one, and then, over what
//! was found, whether every state leads to rest.

use std::{
    collections::{BTreeSet, HashMap, HashSet, hash_map::Entry},
    fmt::Write as _,
    thread,
};

use super::{
    event::Event,
    invariants::{Invariant, Violation},
    world::World,
};

/// Threads that look at states at the same time.
const THREADS: usize = 2;

/// How a state was come to first.
struct Found {
    from: Option<(u64, Event)>,
    /// The state that follows where all are quick and nothing more goes wrong; `None` at rest.
    next: Option<u64>,
}

/// What a search has seen.
pub(super) struct Searched {
    pub(super) states: usize,
    pub(super) steps: usize,
    pub(super) at_rest: usize,
    /// The most events from the beginning to a state.
    pub(super) depth: usize,
    /// Steps of rollouts that were written.
    pub(super) reached: BTreeSet<&'static str>,
}

/// How to come to a state in which an invariant does not hold.
pub(super) struct Trace {
    pub(super) violation: Violation,
    pub(super) events: Vec<Event>,
}

impl std::fmt::Debug for Trace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { violation: Violation { invariant, how }, events } = self;
        writeln!(f, "{invariant:?}: {how}; after")?;
        events.iter().enumerate().try_for_each(|(at, event)| writeln!(f, "{:4} {event:?}", at + 1))
    }
}

/// A state that was looked at, and what follows from it.
struct Expanded {
    from: u64,
    next: Option<u64>,
    steps: usize,
    new: Vec<(u64, Event, World)>,
    violation: Option<(Option<Event>, Violation)>,
}

/// Writes in a row that say the same in other words, at most.
const SAME_MAX: usize = 8;

/// Whether an event happens by itself when nothing more goes wrong.
fn must(event: Event) -> bool {
    !event.is_fault() && !event.is_users()
}

fn expand(from: u64, world: &World, known: &HashMap<u64, Found>) -> Expanded {
    let mut expanded = Expanded { from, next: None, steps: 0, new: Vec::new(), violation: None };
    // A write that says the same in other words leads to the same state, and on from there.
    let (mut form, mut forms) = (world.clone(), 0);
    loop {
        let mut same = None;
        for (event, after) in form.successors() {
            expanded.steps += 1;
            match after {
                Err(violation) => expanded.violation = expanded.violation.or(Some((Some(event), violation))),
                Ok(after) => {
                    let hash = after.hash();
                    if hash == from {
                        same = same.or(must(event).then_some(after));
                        continue;
                    }
                    if expanded.next.is_none() && must(event) {
                        expanded.next = Some(hash);
                    }
                    if !known.contains_key(&hash) {
                        expanded.new.push((hash, event, after));
                    }
                }
            }
        }
        forms += 1;
        match same {
            Some(same) if forms < SAME_MAX => form = same,
            None if expanded.next.is_some() => return expanded,
            _ => {
                let endless = Invariant::ItEnds.broken("what changes nothing comes again and again");
                let wrong = if forms == SAME_MAX { Some(endless) } else { form.check_rest().err() };
                expanded.violation = expanded.violation.or(wrong.map(|violation| (None, violation)));
                return expanded;
            }
        }
    }
}

/// Searches all that can follow from `first`.
pub(super) fn search(first: World) -> Result<Searched, Box<Trace>> {
    let begin = first.hash();
    let mut known = HashMap::from([(begin, Found { from: None, next: None })]);
    let mut searched = Searched { states: 0, steps: 0, at_rest: 0, depth: 0, reached: BTreeSet::new() };
    let mut frontier = vec![(begin, first)];
    while !frontier.is_empty() {
        let share = frontier.len().div_ceil(THREADS);
        let expanded: Vec<Expanded> = thread::scope(|scope| {
            let known = &known;
            let work = |part: &[(u64, World)]| {
                part.iter().map(|(hash, world)| expand(*hash, world, known)).collect::<Vec<_>>()
            };
            let threads: Vec<_> = frontier.chunks(share).map(|part| scope.spawn(move || work(part))).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        frontier.clear();
        for Expanded { from, next, steps, new, violation } in expanded {
            if let Some((event, violation)) = violation {
                let mut events = path(&known, from);
                events.extend(event);
                return Err(Box::new(Trace { violation, events }));
            }
            searched.steps += steps;
            searched.at_rest += usize::from(next.is_none());
            known.get_mut(&from).unwrap().next = next;
            for (hash, event, world) in new {
                if let Entry::Vacant(new) = known.entry(hash) {
                    new.insert(Found { from: Some((from, event)), next: None });
                    searched.reached.extend(world.reached.iter());
                    frontier.push((hash, world));
                }
            }
        }
        searched.depth += usize::from(!frontier.is_empty());
    }
    searched.states = known.len();
    comes_to_rest(&known)?;
    Ok(searched)
}

/// Whether every state leads to one at rest, when all are quick and nothing more goes wrong.
fn comes_to_rest(known: &HashMap<u64, Found>) -> Result<(), Box<Trace>> {
    let mut rests = HashSet::new();
    for begin in known.keys() {
        let (mut way, mut on_way, mut at) = (Vec::new(), HashSet::new(), *begin);
        while !rests.contains(&at) {
            if !on_way.insert(at) {
                let mut how = "it goes round and round".to_owned();
                let circle = way.iter().skip_while(|one| **one != at);
                for hash in circle {
                    let _ = write!(how, " {hash:x}");
                }
                return Err(Box::new(Trace { violation: Invariant::ItEnds.broken(how), events: path(known, at) }));
            }
            way.push(at);
            let Some(next) = known[&at].next else { break };
            at = next;
        }
        rests.extend(way);
    }
    Ok(())
}

/// The events from the beginning to a state.
fn path(known: &HashMap<u64, Found>, to: u64) -> Vec<Event> {
    let (mut events, mut at) = (Vec::new(), to);
    while let Some((from, event)) = known[&at].from {
        events.push(event);
        at = from;
    }
    events.reverse();
    events
}

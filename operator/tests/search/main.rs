#![allow(clippy::unwrap_used)]
//! An exhaustive search of the real functions of operator and agent, together.
//!
//! A [`World`](world::World) has the object in the API server, up to three pods, each with the agent's own functions
//! (`gantry_rollout`), and an operator that asks `decide`. What an agent and the operator do, and when, is an
//! event each, and so are the faults: stale reads, late events, crashes after each write, pods and workers and nodes that are
//! lost, gates that refuse in one pod alone. The search follows every event from every state, with so many faults and edits in
//! one life; what holds in each state stands in [`invariants`]. A watch that repeats an event does nothing, since an agent settles
//! at once; one that loses some brings the newest later, which is an event of its own.
//!
//! Absent: how a status is written and read (the tests of `act` and the agent have it), and clocks: only deadlines count.

use std::{collections::BTreeSet, time::Instant};

use gantry_crds::status::GateName;
use gantry_operator::decide::{Plan, Transition};

use explore::{Searched, search};
use invariants::Broken;
use scenario::{Ask, Nature, Scenario};
use world::World;

mod digest;
mod event;
mod explore;
mod invariants;
mod pod;
mod rules;
mod scenario;
mod walk;
mod world;

/// How many more faults each life of the search may have than it does by default.
const MORE_FAULTS: &str = "GANTRY_SEARCH_MORE_FAULTS";
/// Only searches in whose name this stands are made.
const ONLY: &str = "GANTRY_SEARCH_ONLY";

const GOOD: [Nature; 4] = [Nature::Good; 4];

/// Model 2 is like this.
fn second(nature: Nature) -> [Nature; 4] {
    let mut natures = GOOD;
    natures[1] = nature;
    natures
}

/// What is searched by default, with the faults and edits of one life.
fn scenarios() -> Vec<(&'static str, World)> {
    let more: u8 = std::env::var(MORE_FAULTS).ok().map_or(0, |more| more.parse().unwrap());
    let one = [Some(Ask::of(2))];
    let two = [Some(Ask::of(2)), Some(Ask::of(3)), Some(Ask::of(1))];
    let settled = |pods, natures, asks: &[Option<Ask>], faults, edits| {
        World::settled(Scenario::new(pods, natures, asks), faults + more, edits)
    };
    let shared = |pods, natures, asks: &[Option<Ask>], faults, edits| {
        World::settled(Scenario::new(pods, natures, asks).sharing(), faults + more, edits)
    };
    let held = |pods, natures, asks: &[Option<Ask>], faults, edits| {
        World::settled(Scenario::new(pods, natures, asks).holding(), faults + more, edits)
    };
    let tight = |pods, natures, asks: &[Option<Ask>], faults, edits| {
        World::settled(Scenario::new(pods, natures, asks).tight(), faults + more, edits)
    };
    vec![
        ("the first version, 2 pods", World::new(Scenario::new(2, GOOD, &[]), 1 + more, 0)),
        ("a good one, 1 pod", settled(1, GOOD, &one, 2, 1)),
        ("a good one, 2 pods", settled(2, GOOD, &one, 1, 1)),
        ("a refused one, 2 pods", settled(2, refused(), &one, 1, 1)),
        ("one that dies, 2 pods", settled(2, second(Nature::Dies), &one, 1, 1)),
        ("edits, 1 pod", settled(1, GOOD, &two, 1, 2)),
        ("edits, 2 pods", settled(2, refused(), &two, 0, 3)),
        ("a good one, 3 pods", settled(3, GOOD, &one, 1, 1)),
        ("a refused one, 3 pods", settled(3, refused(), &one, 1, 1)),
        ("edits, 3 pods", settled(3, GOOD, &two[..2], 0, 2)),
        ("canary, a good one, 1 pod", shared(1, GOOD, &one, 2, 1)),
        ("canary, a good one, 2 pods", shared(2, GOOD, &one, 1, 1)),
        ("canary, a worse one, 1 pod", shared(1, second(Nature::Worse), &one, 1, 1)),
        ("canary, a worse one, 2 pods", shared(2, second(Nature::Worse), &one, 1, 1)),
        ("canary, one that dies, 2 pods", shared(2, second(Nature::Dies), &one, 1, 1)),
        ("canary, edits, 1 pod", shared(1, GOOD, &two, 1, 2)),
        ("canary, edits, 2 pods", shared(2, second(Nature::Worse), &two, 0, 2)),
        ("held, a good one, 1 pod", held(1, GOOD, &one, 1, 1)),
        ("held, a good one, 2 pods", held(2, GOOD, &one, 1, 1)),
        ("held, a refused one, 2 pods", held(2, refused(), &one, 1, 1)),
        ("held, one that dies, 1 pod", held(1, second(Nature::Dies), &one, 1, 1)),
        ("held, one that dies, 2 pods", held(2, second(Nature::Dies), &one, 0, 1)),
        ("held, edits, 1 pod", held(1, GOOD, &two, 0, 2)),
        ("held, edits, 2 pods", held(2, refused(), &two, 0, 2)),
        ("tight, a good one, 1 pod", tight(1, GOOD, &one, 1, 1)),
        ("tight, a refused one, 2 pods", tight(2, refused(), &one, 1, 1)),
        ("tight, edits, 2 pods", tight(2, refused(), &two, 0, 2)),
        ("held, one that does not load, 1 pod", held(1, second(Nature::Refused(GateName::Load)), &one, 1, 1)),
    ]
}

fn told(name: &str, searched: &Searched, began: Instant) -> String {
    let Searched { states, steps, at_rest, depth, .. } = searched;
    let seconds = began.elapsed().as_secs_f32();
    format!("{name}: {states} states, {steps} steps, {at_rest} at rest, {depth} deep, {seconds:.1} s")
}

#[test]
fn nothing_that_must_not_be_can_be_reached() {
    let mut reached = BTreeSet::new();
    let only = std::env::var(ONLY).ok();
    let wanted = |name: &str| only.as_deref().is_none_or(|only| name.contains(only));
    for (name, world) in scenarios().into_iter().filter(|(name, _)| wanted(name)) {
        let began = Instant::now();
        match search(world) {
            Ok(searched) => {
                println!("{}", told(name, &searched, began));
                reached.extend(searched.reached);
            }
            Err(trace) => panic!("{name}: {trace:?}"),
        }
    }
    // It is worth something only if it gets everywhere.
    let all = [
        "Baking",
        "Canary",
        "Cancelled",
        "Committed",
        "Quarantined",
        "Rejected",
        "Resumed",
        "RolledBack",
        "RollingBack",
        "Settled",
        "Started",
    ];
    assert!(only.is_some() || reached.iter().eq(&all), "{reached:?}");
}

/// Each rule is broken once, and the search says which.
#[test]
fn the_search_finds_each_broken_rule() {
    for (broken, invariant) in Broken::ALL {
        let asks = [Some(Ask::of(2)), Some(Ask::of(3))];
        // One pod has to fail alone, or a second edit to come.
        let faults = u8::from(broken == Broken::HearsOnlyRefusals);
        let edits = if broken == Broken::BeginsTwice { 2 } else { 1 };
        let scenario = Scenario::new(if broken.is_of_canary() { 2 } else { 3 }, GOOD, &asks).breaking(broken);
        let scenario = if broken.is_of_canary() { scenario.sharing() } else { scenario };
        let world = World::settled(scenario, faults, edits);
        match search(world) {
            Ok(searched) => panic!("{broken:?} is not found in {} states", searched.states),
            Err(trace) => {
                assert_eq!(trace.violation.invariant, invariant, "{broken:?}: {trace:?}");
                println!("{broken:?}: {trace:?}");
            }
        }
    }
}

/// Model 2 is refused by a gate.
fn refused() -> [Nature; 4] {
    second(Nature::Refused(GateName::Prompts))
}

/// And the rules of single writes are worth something only if they refuse.
#[test]
fn the_rules_refuse_what_must_not_be_written() {
    let mut world = World::new(Scenario::new(2, GOOD, &[]), 0, 0);
    while !matches!(world.judge(2, |_| {}).0, Some(Transition::Committed { .. })) {
        world = world.after(world.events()[0]).unwrap();
    }
    assert!(world.judge(2, |_| {}).1);
    assert!(!world.judge(1, |_| {}).1, "one of two has not said a word");
    assert!(!world.judge(0, |_| {}).1);
    let spoils: [fn(&mut Plan); 5] = [
        |plan| plan.state.versions.clear(),
        |plan| plan.state.rollout = None,
        |plan| plan.state.previous = Some("another".to_owned()),
        |plan| plan.state.candidate.clone_from(&plan.state.active),
        |plan| plan.delete.extend(plan.state.active.clone()),
    ];
    for (at, spoil) in spoils.into_iter().enumerate() {
        assert!(!world.judge(2, spoil).1, "{at}");
    }
}

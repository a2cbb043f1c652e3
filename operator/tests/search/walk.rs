//! Long random lives of the same world, which the search cannot follow for want of depth: any number of faults and edits, pods
//! that are scaled and replaced by larger ones, Secrets that change.

use gantry_crds::status::{GateName, RolloutStep};
use proptest::prelude::*;

use super::{
    GOOD,
    event::Event,
    invariants::Violation,
    scenario::{Ask, Nature, Scenario},
    world::World,
};

/// Events in which a world that is left alone must come to rest: all deadlines of one rollout after another.
const REST_EVENTS: usize = 3000;

/// Model 3 is one that no pod can prepare.
fn scenario() -> Scenario {
    let mut natures = GOOD;
    natures[2] = Nature::Refused(GateName::Prompts);
    let asks = (1..=4).flat_map(|model| (0..4).map(move |variant| Some(Ask { model, variant })));
    Scenario::new(2, natures, &asks.chain([None]).collect::<Vec<_>>())
}

/// One in which model 2 answers and bakes, with model 1 to go back to: few random lives come so far.
fn baking() -> World {
    let mut world = World::settled(scenario(), 0, u8::MAX).after(Event::Edit(Some(Ask::of(2)))).unwrap();
    world.edits = 0;
    while world.object.state.rollout.as_ref().is_none_or(|rollout| rollout.step != RolloutStep::Bake) {
        world = world.after(world.events()[0]).unwrap();
    }
    world
}

/// What happens in one moment of a life.
#[derive(Debug, Clone)]
enum Moment {
    /// What must happen anyway, of which the one at this place.
    Goes(prop::sample::Index),
    /// Anything that can happen.
    Any(prop::sample::Index),
    Scale(i32),
    SecretChanges,
}

fn moment() -> impl Strategy<Value = Moment> {
    prop_oneof![
        24 => any::<prop::sample::Index>().prop_map(Moment::Goes),
        8 => any::<prop::sample::Index>().prop_map(Moment::Any),
        1 => (0..4).prop_map(Moment::Scale),
        1 => Just(Moment::SecretChanges),
    ]
}

fn live(world: &World, moment: &Moment) -> Result<World, Violation> {
    let mut world = world.clone();
    let left = if matches!(moment, Moment::Goes(_)) { 0 } else { u8::MAX };
    (world.faults, world.edits) = (left, left);
    let event = match moment {
        Moment::Goes(at) | Moment::Any(at) => {
            let events = world.events();
            if events.is_empty() {
                return Ok(world);
            }
            *at.get(&events)
        }
        Moment::Scale(replicas) => Event::Scale(*replicas),
        Moment::SecretChanges => Event::SecretChanges,
    };
    world.after(event)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_the_invariants_hold_and_it_ends(
        bakes in any::<bool>(),
        rotates in any::<bool>(),
        moments in prop::collection::vec(moment(), 1..200),
    ) {
        let fails = |violation: Violation| TestCaseError::fail(format!("{violation:?}"));
        let mut world = if bakes { baking() } else { World::settled(scenario(), 0, 0) };
        for moment in moments {
            world = live(&world, &moment).map_err(fails)?;
        }
        // Left alone: no edit, no death, all quick. A Secret may be renewed all the time.
        (world.faults, world.edits) = (0, 0);
        let mut events = 0;
        while let Some(event) = world.events().first().copied() {
            world = world.after(event).map_err(fails)?;
            if rotates && event == Event::Operator {
                world = world.after(Event::SecretChanges).map_err(fails)?;
            }
            events += 1;
            prop_assert!(events < REST_EVENTS, "never rests: {:?} {:#?}", event, world.object.state);
        }
        world.check_rest().map_err(fails)?;
    }
}

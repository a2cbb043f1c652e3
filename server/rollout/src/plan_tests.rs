//! The plan in single situations, and in random lives of a pod whose every step is held against the table of phases.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use gantry_crds::inference_service::{ModelSpec, RuntimeSpec, SourceSpec};
use gantry_crds::status::NamedVersion;
use proptest::prelude::*;

use super::*;
use crate::desired::Candidate;
use crate::phase::{Next, Step, next};
use crate::share::Share;

const NAMES: [&str; 4] = ["v1", "v2", "v3", "v4"];

pub(crate) fn desired(active: Option<&str>, candidate: Option<(&str, i64)>, previous: Option<&str>) -> Desired {
    let source = SourceSpec::default();
    let model = ModelSpec { served_name: "m".into(), source };
    let version =
        |name: &&str| NamedVersion { name: (*name).to_owned(), model: model.clone(), runtime: RuntimeSpec::default() };
    Desired {
        active: active.map(str::to_owned),
        attempt: candidate.map(|(_, attempt)| attempt),
        candidate: candidate.map(|(version, attempt)| Candidate { version: version.into(), attempt }),
        canary: None,
        previous: previous.map(str::to_owned),
        stands_by: false,
        watched: None,
        holds: false,
        has_turn: false,
        yields: false,
        quarantined: false,
        kept: BTreeSet::new(),
        versions: NAMES.iter().map(|name| ((*name).to_owned(), version(name))).collect(),
        unreadable: BTreeMap::new(),
        unknown: BTreeMap::new(),
    }
}

/// The same with a share of the requests for the candidate.
pub(crate) fn sharing(percent: &str, desired: Desired) -> Desired {
    Desired { canary: Share::of(&percent.into()), ..desired }
}

fn standing_by(desired: Desired) -> Desired {
    Desired { stands_by: true, ..desired }
}

fn keeping(version: &str, desired: Desired) -> Desired {
    Desired { kept: BTreeSet::from([version.to_owned()]), ..desired }
}

/// The same where one version has to go before another one is loaded.
pub(crate) fn holding(has_turn: bool, desired: Desired) -> Desired {
    Desired { holds: true, has_turn, ..desired }
}

pub(crate) fn known(phase: Phase, attempt: Option<i64>) -> Known {
    let worker_up = matches!(phase, Phase::Ready | Phase::Checking);
    Known {
        phase,
        attempt,
        passed: worker_up,
        worker_up,
        retry_due: false,
        outdated: false,
        slow: false,
        in_vain: false,
        waits: false,
    }
}

/// What a version asks for that this release does not know.
fn not_knowing(version: &str, desired: Desired) -> Desired {
    Desired { unknown: BTreeMap::from([(version.to_owned(), vec!["runtime.x".to_owned()])]), ..desired }
}

pub(crate) fn current(active: Option<&str>, previous: Option<&str>, versions: &[(&str, Known)]) -> Current {
    Current {
        route: Route {
            active: active.map(str::to_owned),
            canary: None,
            previous: previous.map(str::to_owned),
            held_from: None,
        },
        versions: versions.iter().map(|(name, known)| ((*name).to_owned(), known.clone())).collect(),
    }
}

/// A plan in short: `restore v1`, `try v2 1`, `check v2`, `route v2 v1`, `cancel v2`, `retire v1`, `forget v1`.
pub(crate) fn planned(desired: &Desired, current: &Current) -> Vec<String> {
    let name = |name: &Option<String>| name.clone().unwrap_or_else(|| "-".into());
    plan(desired, current)
        .iter()
        .map(|action| match action {
            Action::Prepare { version, loads: false, .. } => format!("check {version}"),
            Action::Prepare { version, purpose: Purpose::Restore, .. } => format!("restore {version}"),
            Action::Prepare { version, purpose: Purpose::Candidate { attempt }, .. } => {
                format!("try {version} {attempt}")
            }
            Action::Route(Route { held_from: Some(before), .. }) => format!("hold {before}"),
            Action::Route(Route { active, canary: Some(Canary { version, share }), previous, .. }) => {
                format!("route {} {} and {} to {version}", name(active), name(previous), share.percent())
            }
            Action::Route(route) => format!("route {} {}", name(&route.active), name(&route.previous)),
            Action::Cancel { version } => format!("cancel {version}"),
            Action::Retire { version } => format!("retire {version}"),
            Action::Forget { version } => format!("forget {version}"),
            Action::Drop { version } => panic!("no plan drops {version}"),
        })
        .collect()
}

type Case = (&'static str, Desired, Current, Vec<&'static str>);

fn rollout_cases() -> Vec<Case> {
    use Phase::{Preparing, Ready, Refused, Retiring};
    let serving = ("v1", known(Ready, None));
    vec![
        ("nothing is asked", desired(None, None, None), current(None, None, &[]), vec![]),
        ("the first version", desired(None, Some(("v1", 1)), None), current(None, None, &[]), vec!["try v1 1"]),
        (
            "the first version is prepared and not active yet",
            desired(None, Some(("v1", 1)), None),
            current(None, None, &[("v1", known(Ready, Some(1)))]),
            vec![],
        ),
        (
            "the first version becomes active",
            desired(Some("v1"), None, None),
            current(None, None, &[("v1", known(Ready, Some(1)))]),
            vec!["route v1 -"],
        ),
        ("a pod that starts late", desired(Some("v1"), None, None), current(None, None, &[]), vec!["restore v1"]),
        (
            "it brings back the active version before it tries the candidate",
            desired(Some("v1"), Some(("v2", 1)), None),
            current(None, None, &[]),
            vec!["restore v1"],
        ),
        (
            "and tries the candidate after that",
            desired(Some("v1"), Some(("v2", 1)), None),
            current(Some("v1"), None, std::slice::from_ref(&serving)),
            vec!["try v2 1"],
        ),
        (
            "the active version cannot be had: the candidate may be the cure",
            desired(Some("v1"), Some(("v2", 1)), None),
            current(None, None, &[("v1", known(Refused, None))]),
            vec!["try v2 1"],
        ),
        (
            "commit",
            desired(Some("v2"), None, Some("v1")),
            current(Some("v1"), None, &[serving.clone(), ("v2", known(Ready, Some(1)))]),
            vec!["route v2 v1"],
        ),
        (
            "commit where the old one is not kept",
            desired(Some("v2"), None, None),
            current(Some("v1"), None, &[serving.clone(), ("v2", known(Ready, Some(1)))]),
            vec!["route v2 -", "retire v1"],
        ),
        (
            "commit that this pod is not ready for: the old one goes on",
            desired(Some("v2"), None, Some("v1")),
            current(Some("v1"), None, &[serving.clone(), ("v2", known(Preparing, Some(1)))]),
            vec![],
        ),
        (
            "rollback",
            desired(Some("v1"), None, None),
            current(Some("v2"), Some("v1"), &[serving.clone(), ("v2", known(Ready, Some(1)))]),
            vec!["route v1 -", "retire v2"],
        ),
        (
            "the bake is over",
            desired(Some("v2"), None, None),
            current(Some("v2"), Some("v1"), &[serving.clone(), ("v2", known(Ready, Some(1)))]),
            vec!["route v2 -", "retire v1"],
        ),
        (
            "a third version waits until the first is unloaded",
            desired(Some("v2"), Some(("v3", 2)), None),
            current(Some("v2"), None, &[("v1", known(Retiring, None)), ("v2", known(Ready, None))]),
            vec![],
        ),
        (
            "nothing names the active version any more: it answers until another one does",
            desired(None, None, None),
            current(Some("v1"), None, std::slice::from_ref(&serving)),
            vec![],
        ),
    ]
}

fn retry_cases() -> Vec<Case> {
    use Phase::{Checking, Preparing, Ready, Refused, Retiring, Waiting};
    let serving = ("v1", known(Ready, None));
    let due = |phase, attempt| Known { retry_due: true, ..known(phase, attempt) };
    let down = |phase, attempt| Known { worker_up: false, ..known(phase, attempt) };
    let outdated = |phase, attempt| Known { outdated: true, ..known(phase, attempt) };
    let slow = |phase, attempt| Known { slow: true, ..known(phase, attempt) };
    let waits = |phase, attempt| Known { waits: true, ..known(phase, attempt) };
    vec![
        (
            "a candidate waits for what it is judged by",
            desired(Some("v1"), Some(("v2", 1)), None),
            current(None, None, &[("v1", known(Refused, None)), ("v2", waits(Preparing, Some(1)))]),
            vec![],
        ),
        (
            "it is the active one by now: what it waits for may never come",
            desired(Some("v2"), None, Some("v1")),
            current(None, None, &[("v1", known(Refused, None)), ("v2", waits(Preparing, Some(1)))]),
            vec!["cancel v2"],
        ),
        (
            "one that is loaded stays so",
            desired(Some("v2"), None, None),
            current(Some("v2"), None, &[("v2", waits(Checking, Some(1)))]),
            vec!["cancel v2"],
        ),
        (
            "one that waits for nothing goes on, as does one that is brought back",
            desired(Some("v2"), None, None),
            current(None, None, &[("v2", known(Preparing, Some(1)))]),
            vec![],
        ),
        (
            "a source that is away is waited for",
            desired(Some("v2"), None, None),
            current(None, None, &[("v2", waits(Preparing, None))]),
            vec![],
        ),
        (
            "the active version is on its way: the candidate waits for it",
            desired(Some("v1"), Some(("v2", 1)), None),
            current(None, None, &[("v1", known(Preparing, None))]),
            vec![],
        ),
        (
            "it is long in coming: the candidate may be the cure",
            desired(Some("v1"), Some(("v2", 1)), None),
            current(None, None, &[("v1", slow(Preparing, None))]),
            vec!["try v2 1"],
        ),
        (
            "as long as another one that answers is to be replaced by it",
            desired(Some("v2"), Some(("v3", 1)), None),
            current(Some("v1"), None, &[serving.clone(), ("v2", slow(Preparing, None))]),
            vec!["try v3 1"],
        ),
        (
            "but room that is about to be made is waited for",
            desired(Some("v1"), Some(("v2", 1)), None),
            current(None, None, &[("v1", slow(Preparing, None)), ("v3", known(Retiring, None))]),
            vec![],
        ),
        (
            "a candidate with fields of a later release is not judged without them",
            not_knowing("v2", desired(Some("v1"), Some(("v2", 1)), None)),
            current(Some("v1"), None, std::slice::from_ref(&serving)),
            vec![],
        ),
        (
            "nor taken up instead of what answers",
            not_knowing("v2", desired(Some("v2"), None, Some("v1"))),
            current(Some("v1"), None, std::slice::from_ref(&serving)),
            vec![],
        ),
        (
            "but where nothing answers it is better than nothing",
            not_knowing("v2", desired(Some("v2"), None, None)),
            current(None, None, &[]),
            vec!["restore v2"],
        ),
        (
            "a refused candidate is not tried again",
            desired(Some("v1"), Some(("v2", 1)), None),
            current(Some("v1"), None, &[serving.clone(), ("v2", due(Refused, Some(1)))]),
            vec![],
        ),
        (
            "but another attempt is",
            desired(Some("v1"), Some(("v2", 2)), None),
            current(Some("v1"), None, &[serving.clone(), ("v2", known(Refused, Some(1)))]),
            vec!["try v2 2"],
        ),
        (
            "and one of which another source is given",
            desired(Some("v1"), Some(("v2", 1)), None),
            current(Some("v1"), None, &[serving.clone(), ("v2", outdated(Refused, Some(1)))]),
            vec!["try v2 1"],
        ),
        (
            "a version that is loaded is judged again for another attempt",
            desired(Some("v2"), Some(("v1", 2)), Some("v1")),
            current(Some("v2"), Some("v1"), &[("v1", known(Ready, Some(1))), ("v2", known(Ready, None))]),
            vec!["try v1 2"],
        ),
        (
            "an attempt that is out of date is called off",
            desired(Some("v1"), Some(("v2", 2)), None),
            current(Some("v1"), None, &[serving.clone(), ("v2", known(Preparing, Some(1)))]),
            vec!["cancel v2"],
        ),
        (
            "so is one that nobody asks for",
            desired(Some("v1"), None, None),
            current(Some("v1"), None, &[serving.clone(), ("v2", known(Checking, Some(1)))]),
            vec!["cancel v2"],
        ),
        (
            "a refused version that nobody asks for is forgotten",
            desired(Some("v1"), None, None),
            current(Some("v1"), None, &[serving.clone(), ("v2", known(Refused, Some(1)))]),
            vec!["forget v2"],
        ),
        (
            "the active version is tried again when it is time",
            desired(Some("v1"), None, None),
            current(None, None, &[("v1", due(Refused, None))]),
            vec!["restore v1"],
        ),
        (
            "and not before",
            desired(Some("v1"), None, None),
            current(None, None, &[("v1", known(Refused, None))]),
            vec![],
        ),
        (
            "another source of the active version is asked at once",
            desired(Some("v1"), None, None),
            current(None, None, &[("v1", outdated(Preparing, None))]),
            vec!["cancel v1"],
        ),
        (
            "whether or not the one before has been given up",
            desired(Some("v1"), None, None),
            current(None, None, &[("v1", outdated(Refused, None))]),
            vec!["restore v1"],
        ),
        (
            "what is loaded needs no source",
            desired(Some("v1"), None, None),
            current(Some("v1"), None, &[("v1", outdated(Ready, None))]),
            vec![],
        ),
        (
            "while the active version is tried again, the candidate goes on",
            desired(Some("v1"), Some(("v2", 1)), None),
            current(None, None, &[("v1", due(Refused, None)), ("v2", known(Preparing, Some(1)))]),
            vec!["restore v1"],
        ),
        (
            "no room beside the previous one: it gives way",
            desired(Some("v2"), Some(("v3", 1)), Some("v1")),
            current(
                Some("v2"),
                Some("v1"),
                &[serving.clone(), ("v2", known(Ready, None)), ("v3", known(Waiting, Some(1)))],
            ),
            vec!["route v2 -", "retire v1"],
        ),
        (
            "unless other room is about to be made",
            desired(Some("v2"), Some(("v3", 1)), Some("v1")),
            current(
                Some("v2"),
                Some("v1"),
                &[
                    serving.clone(),
                    ("v2", known(Ready, None)),
                    ("v3", known(Waiting, Some(1))),
                    ("v4", known(Retiring, None)),
                ],
            ),
            vec![],
        ),
        (
            "or what has no room is of an attempt before",
            desired(Some("v2"), Some(("v3", 2)), Some("v1")),
            current(
                Some("v2"),
                Some("v1"),
                &[serving.clone(), ("v2", known(Ready, None)), ("v3", known(Waiting, Some(1)))],
            ),
            vec!["try v3 2"],
        ),
        (
            "the one that gave way is brought back when there is no candidate any more, as it is by a pod that comes late",
            desired(Some("v2"), None, Some("v1")),
            current(Some("v2"), None, &[("v2", known(Ready, None))]),
            vec!["restore v1"],
        ),
        (
            "without room beside what answers it waits",
            desired(Some("v2"), None, Some("v1")),
            current(Some("v2"), None, &[("v1", known(Waiting, None)), ("v2", known(Ready, None))]),
            vec![],
        ),
        (
            "until it is time",
            desired(Some("v2"), None, Some("v1")),
            current(Some("v2"), None, &[("v1", due(Refused, None)), ("v2", known(Ready, None))]),
            vec!["restore v1"],
        ),
        (
            "it takes no room from the version that is to answer",
            desired(Some("v2"), None, Some("v1")),
            current(None, None, &[("v2", known(Refused, None))]),
            vec![],
        ),
        (
            "nor from a candidate, whatever became of that",
            desired(Some("v2"), Some(("v3", 1)), Some("v1")),
            current(Some("v2"), None, &[("v2", known(Ready, None)), ("v3", known(Refused, Some(1)))]),
            vec![],
        ),
        (
            "one that comes meanwhile goes first",
            desired(Some("v2"), Some(("v3", 1)), Some("v1")),
            current(Some("v2"), None, &[("v1", known(Preparing, None)), ("v2", known(Ready, None))]),
            vec!["cancel v1"],
        ),
        (
            "one with fields of a later release is not brought back without them",
            not_knowing("v1", desired(Some("v2"), None, Some("v1"))),
            current(Some("v2"), None, &[("v2", known(Ready, None))]),
            vec![],
        ),
        (
            "the previous one is gone: go on",
            desired(Some("v2"), Some(("v3", 1)), None),
            current(Some("v2"), None, &[("v2", known(Ready, None)), ("v3", known(Waiting, Some(1)))]),
            vec!["try v3 1"],
        ),
        (
            "no room beside a version that only stays loaded: wait as well",
            keeping("v1", desired(Some("v2"), Some(("v3", 1)), None)),
            current(Some("v2"), None, &[serving.clone(), ("v2", known(Ready, None)), ("v3", known(Waiting, Some(1)))]),
            vec![],
        ),
        (
            "until it is time",
            keeping("v1", desired(Some("v2"), Some(("v3", 1)), None)),
            current(Some("v2"), None, &[serving.clone(), ("v2", known(Ready, None)), ("v3", due(Waiting, Some(1)))]),
            vec!["try v3 1"],
        ),
        (
            "a version that is asked for again while it is unloaded waits for that",
            desired(Some("v1"), Some(("v2", 2)), None),
            current(Some("v1"), None, &[serving.clone(), ("v2", known(Retiring, Some(1)))]),
            vec![],
        ),
        (
            "no switch to a worker that is being restarted",
            desired(Some("v2"), None, Some("v1")),
            current(Some("v1"), None, &[serving, ("v2", down(Ready, Some(1)))]),
            vec![],
        ),
        (
            "unless the one that answers is no better",
            desired(Some("v2"), None, Some("v1")),
            current(Some("v1"), None, &[("v1", down(Ready, None)), ("v2", down(Ready, Some(1)))]),
            vec!["route v2 v1"],
        ),
    ]
}

#[test]
fn each_situation_has_its_plan() {
    for (what, desired, current, wanted) in rollout_cases().into_iter().chain(retry_cases()) {
        assert_eq!(planned(&desired, &current), wanted, "{what}");
    }
}

/// A pod's life without its workers: phases move by the table alone. With the versions of which the last gates were to end before
/// they are loaded.
#[derive(Debug, Default)]
struct Pod(Current, Vec<String>);

impl Pod {
    fn step(&mut self, version: &str, step: Step) {
        let phase = self.0.versions.get(version).map(|known| known.phase);
        match next(phase, step).unwrap_or_else(|| panic!("{version}: {step:?} in {phase:?}")) {
            Next::Phase(to) => {
                let entry = self.0.versions.entry(version.to_owned()).or_insert_with(|| known(to, None));
                entry.phase = to;
            }
            Next::Gone => {
                self.0.versions.remove(version);
            }
        }
    }

    /// Carries a plan out to its end, and checks it on the way.
    fn settle(&mut self, desired: &Desired) {
        for _ in 0..8 {
            let actions = plan(desired, &self.0);
            if actions.is_empty() {
                return;
            }
            for action in actions {
                self.act(action);
            }
        }
        panic!("the plan asks for more and more: {:?}", plan(desired, &self.0));
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Route(route) => {
                if let Some(Canary { version, .. }) = &route.canary {
                    let known = &self.0.versions[version];
                    let proved = known.phase == Phase::Ready && known.passed && known.worker_up;
                    assert!(proved && route.active.is_some(), "{version} answers a share: {known:?}");
                }
                for name in route.active.iter().chain(&route.previous) {
                    let phase = self.0.versions[name].phase;
                    // Calling off a check of one that answers leaves it loaded.
                    let stays = phase == Phase::Cancelling && self.0.route.active.as_ref() == Some(name);
                    assert!(stays || matches!(phase, Phase::Ready | Phase::Checking), "{name} answers while {phase:?}");
                }
                let holds = route.is_held() && (self.0.route.is_held() || route.held_from == self.0.route.active);
                assert!(
                    route.active.is_some() || self.0.route.active.is_none() || holds,
                    "nobody answers any more, and nobody is waited for"
                );
                self.0.route = route;
            }
            Action::Prepare { version, purpose, loads } => {
                self.step(&version, Step::Prepare);
                self.1.retain(|one| *one != version);
                self.1.extend((!loads).then(|| version.clone()));
                let entry = self.0.versions.get_mut(&version).unwrap();
                (entry.retry_due, entry.outdated, entry.slow) = (false, false, false);
                (entry.worker_up, entry.passed) = (entry.phase == Phase::Checking, false);
                entry.attempt = match purpose {
                    Purpose::Restore => None,
                    Purpose::Candidate { attempt } => Some(attempt),
                };
            }
            Action::Cancel { version } => self.step(&version, Step::Cancel),
            Action::Retire { version } => {
                let route = &self.0.route;
                assert!(route.active.as_ref() != Some(&version), "{version} answers and is unloaded");
                assert!(route.previous.as_ref() != Some(&version), "{version} is kept and is unloaded");
                let shares = route.canary.as_ref().is_some_and(|canary| canary.version == version);
                assert!(!shares, "{version} answers a share and is unloaded");
                self.step(&version, Step::Retire);
            }
            Action::Forget { version } => self.step(&version, Step::Forget),
            Action::Drop { version } => panic!("no plan drops {version}"),
        }
    }

    /// Something becomes of a version: well, badly, or for want of room.
    fn happen(&mut self, version: &str, luck: u8) {
        let Some(entry) = self.0.versions.get_mut(version) else { return };
        let loaded = entry.worker_up;
        match (entry.phase, luck) {
            (Phase::Preparing, 2..) if self.1.iter().any(|one| one == version) => self.step(version, Step::Checked),
            (Phase::Preparing, 0) => self.step(version, Step::Refused),
            (Phase::Preparing, 1) => self.step(version, Step::NoRoom),
            (Phase::Checking, 0 | 1) => self.step(version, Step::Refused),
            (Phase::Preparing | Phase::Checking, _) => {
                (entry.worker_up, entry.passed) = (true, true);
                self.step(version, Step::Passed);
            }
            (Phase::Cancelling, _) if loaded => {
                entry.attempt = None;
                self.step(version, Step::Passed);
            }
            (Phase::Cancelling, _) => self.step(version, Step::Cancelled),
            (Phase::Retiring, _) => self.step(version, Step::Retired),
            (Phase::Checked, _) => {}
            (Phase::Waiting | Phase::Refused, _) => entry.retry_due = true,
            (Phase::Ready, 0) => entry.worker_up = false,
            (Phase::Ready, _) => entry.worker_up = true,
        }
    }
}

fn any_name() -> impl Strategy<Value = &'static str> {
    proptest::sample::select(&NAMES[..])
}

fn any_desired() -> impl Strategy<Value = Desired> {
    let attempt = proptest::sample::select(vec![1, 2]);
    let candidate = proptest::option::of((any_name(), attempt));
    let holds = proptest::sample::select(vec![None, None, Some(true), Some(false)]);
    let share = proptest::sample::select(vec!["0%", "5%", "25%"]);
    (proptest::option::of(any_name()), candidate, proptest::option::of(any_name()), holds, share).prop_map(
        |(active, candidate, previous, holds, share)| {
            let asked = desired(active, candidate, previous);
            let shares = candidate.is_some() && share != "0%";
            let asked = if shares { sharing(share, asked) } else { asked };
            // A first version is loaded as by any strategy.
            match holds.filter(|_| asked.active.is_some()) {
                Some(has_turn) => holding(has_turn, asked),
                None => asked,
            }
        },
    )
}

#[derive(Clone, Debug)]
enum Event {
    Asked(Box<Desired>),
    /// Another source is given for a version.
    Moved(&'static str),
    /// Time passes while a version is brought back.
    Slow(&'static str),
    Happens(&'static str, u8),
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        1 => any_desired().prop_map(|desired| Event::Asked(Box::new(desired))),
        1 => any_name().prop_map(Event::Moved),
        1 => any_name().prop_map(Event::Slow),
        3 => (any_name(), 0..4_u8).prop_map(|(name, luck)| Event::Happens(name, luck)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]
    #[test]
    fn whatever_happens_the_rules_hold_and_the_end_is_what_was_asked(events in proptest::collection::vec(any_event(), 1..60), last in any_desired()) {
        let mut pod = Pod::default();
        let mut asked = desired(None, None, None);
        for event in events.into_iter().chain([Event::Asked(Box::new(last))]) {
            match event {
                Event::Asked(desired) => asked = *desired,
                Event::Moved(version) => {
                    pod.0.versions.entry(version.to_owned()).and_modify(|known| known.outdated = true);
                }
                Event::Slow(version) => {
                    pod.0.versions.entry(version.to_owned()).and_modify(|known| {
                        known.slow = known.phase == Phase::Preparing && known.attempt.is_none();
                    });
                }
                Event::Happens(version, luck) => pod.happen(version, luck),
            }
            pod.settle(&asked);
        }
        // From here on everything goes well.
        for _ in 0..20 {
            for name in NAMES {
                pod.happen(name, 3);
                pod.settle(&asked);
            }
        }
        let of_candidate = asked.candidate.as_ref().filter(|_| asked.holds).map(|candidate| candidate.version.clone());
        if asked.active.is_some() {
            // Where one goes for the other, a pod may answer with the candidate.
            let answers = &pod.0.route.active;
            prop_assert!(*answers == asked.active || (of_candidate.is_some() && *answers == of_candidate), "{answers:?}");
        }
        if let Some(candidate) = asked.candidate.as_ref().filter(|c| pod.0.route.active.as_ref() != Some(&c.version)) {
            let known = pod.0.versions.get(&candidate.version);
            prop_assert!(
                known.is_some_and(|k| {
                    let waits_for_its_turn = asked.holds && !asked.has_turn && k.phase == Phase::Checked;
                    let ends = k.phase == Phase::Ready || (k.phase == Phase::Refused && !k.outdated) || waits_for_its_turn;
                    ends && k.attempt == Some(candidate.attempt)
                }),
                "{known:?}"
            );
        }
        // The share is in force where both can answer, and nowhere else: one that was loaded when a gate refused it is no candidate.
        let route = &pod.0.route;
        let loaded = |name: &String| {
            pod.0.versions.get(name).is_some_and(|known| known.phase == Phase::Ready && known.passed)
        };
        let both = asked.candidate.as_ref().filter(|candidate| {
            loaded(&candidate.version) && route.active.as_ref().is_some_and(|active| *active != candidate.version)
        });
        let wanted = both.filter(|_| !asked.holds).and_then(|candidate| {
            Some(Canary { version: candidate.version.clone(), share: asked.canary? })
        });
        prop_assert_eq!(&route.canary, &wanted, "{:?}", pod.0.versions);
        // Where one goes for the other there is room for one alone.
        let keeps = asked.active.is_some() && asked.candidate.is_none() && !asked.holds;
        if let Some(previous) = asked.previous.as_ref().filter(|_| keeps) {
            let phase = pod.0.versions.get(previous).map(|known| known.phase);
            prop_assert_eq!(phase, Some(Phase::Ready), "nobody brought {} back", previous);
        }
        for name in pod.0.versions.keys() {
            prop_assert!(asked.names(name) || pod.0.route.active.as_ref() == Some(name), "{name} is left over");
        }
    }
}

#[test]
fn a_share_goes_to_a_candidate_while_it_has_passed_here_and_answers() {
    use Phase::{Checking, Preparing, Ready, Refused};
    let asked = |percent| sharing(percent, desired(Some("v1"), Some(("v2", 1)), None));
    let v1 = ("v1", known(Ready, None));
    let with = |v2: Known| current(Some("v1"), None, &[v1.clone(), ("v2", v2)]);
    let shared = |percent: &str, v2: Known| {
        let share = Share::of(&percent.into()).unwrap();
        let mut current = with(v2);
        current.route.canary = Some(Canary { version: "v2".into(), share });
        current
    };
    let proved = || known(Ready, Some(1));
    let down = || Known { worker_up: false, ..proved() };
    let cases: [(&str, Desired, Current, &[&str]); 12] = [
        ("it is not loaded", asked("5%"), with(known(Preparing, Some(1))), &[]),
        ("it is loaded, and asked once more", asked("5%"), with(known(Checking, Some(1))), &[]),
        ("its answers were not good enough", asked("5%"), with(Known { passed: false, ..proved() }), &[]),
        ("it passed for another attempt", asked("5%"), with(known(Ready, Some(0))), &["try v2 1"]),
        ("it passed", asked("5%"), with(proved()), &["route v1 - and 5% to v2"]),
        ("more", asked("25%"), shared("5%", proved()), &["route v1 - and 25% to v2"]),
        ("its worker is started again", asked("25%"), shared("25%", down()), &["route v1 -"]),
        ("it failed", asked("25%"), shared("25%", known(Refused, Some(1))), &["route v1 -"]),
        ("it is taken back", desired(Some("v1"), None, None), shared("25%", proved()), &["route v1 -", "retire v2"]),
        ("this pod takes it back", asked("25%").without_share(), shared("25%", proved()), &["route v1 -"]),
        ("all go over", desired(Some("v2"), None, Some("v1")), shared("25%", proved()), &["route v2 v1"]),
        (
            "nothing else answers here",
            asked("5%"),
            current(None, None, &[("v1", known(Refused, None)), ("v2", proved())]),
            &[],
        ),
    ];
    for (what, desired, current, wanted) in cases {
        assert_eq!(planned(&desired, &current), wanted, "{what}");
    }
}

#[test]
fn a_pod_of_another_side_answers_with_what_it_has_proved_and_makes_room_for_the_next() {
    use Phase::{Preparing, Ready, Retiring};
    let asked = |version, attempt| standing_by(desired(None, Some((version, attempt)), None));
    let cases: [(&str, Desired, Current, &[&str]); 6] = [
        ("it is empty", asked("v2", 1), current(None, None, &[]), &["try v2 1"]),
        ("not yet proved", asked("v2", 1), current(None, None, &[("v2", known(Preparing, Some(1)))]), &[]),
        ("proved", asked("v2", 1), current(None, None, &[("v2", known(Ready, Some(1)))]), &["route v2 -"]),
        (
            "another candidate has the room of the one before",
            asked("v3", 2),
            current(Some("v2"), None, &[("v2", known(Ready, Some(1)))]),
            &["route - -", "retire v2"],
        ),
        ("and begins when that is gone", asked("v3", 2), current(None, None, &[("v2", known(Retiring, None))]), &[]),
        (
            "nothing more is asked of it",
            standing_by(desired(None, None, None)),
            current(Some("v2"), None, &[("v2", known(Ready, Some(1)))]),
            &[],
        ),
    ];
    for (what, desired, current, expected) in cases {
        assert_eq!(planned(&desired, &current), expected, "{what}");
    }
    let again = planned(&asked("v2", 2), &current(Some("v2"), None, &[("v2", known(Ready, Some(1)))]));
    assert_eq!(again, ["route - -", "try v2 2"], "what another attempt proved is proved again");
}

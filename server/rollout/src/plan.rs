//! What to do next: a pure function from what is asked and what is there to a few actions.
//!
//! Rules: the version that answers changes only to one that is ready; one that answers is never unloaded, and one that is
//! kept to go back to gives way only to a candidate that has no room beside it, and is brought back when there is none; the active
//! version comes before the candidate, unless it cannot be had or is long in coming; a candidate begins only when nothing is being unloaded, so that
//! the memory gate sees what will be there; where another side answers, a candidate is prepared alone and answered with once it
//! has passed; a share of the requests goes to a candidate only while it has passed here for this attempt and its worker answers; one of which this release does not know all is not begun with, and taken as the
//! active version only where nothing else answers. Called again after its actions were carried out, it asks for nothing. Where one
//! version has to go before another one is loaded, other rules hold: see `hold`.

use std::collections::BTreeMap;

use crate::desired::Desired;
use crate::hold;
use crate::phase::Phase;
use crate::share::Canary;

/// Which versions answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Route {
    /// Every new request that goes to no other one.
    pub active: Option<String>,
    /// A share of the new requests.
    pub canary: Option<Canary>,
    /// None, unless the switch is taken back.
    pub previous: Option<String>,
    /// What answered last, where requests wait until the next one does.
    pub held_from: Option<String>,
}

impl Route {
    /// Whether no version answers and requests wait for the next one.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.active.is_none() && self.held_from.is_some()
    }
}

/// What is there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Current {
    /// Which versions answer.
    pub route: Route,
    /// Every version of which something is there.
    pub versions: BTreeMap<String, Known>,
}

/// What is known of a version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// Where it is.
    pub phase: Phase,
    /// The attempt for which it is or was judged; `None` when that was to restore it as the active one.
    pub attempt: Option<i64>,
    /// Whether every gate let it through for that.
    pub passed: bool,
    /// Whether its worker answers.
    pub worker_up: bool,
    /// Refused or without room, and due for another try.
    pub retry_due: bool,
    /// It was begun with another source than is asked for now.
    pub outdated: bool,
    /// It is being brought back for longer than a candidate waits for that.
    pub slow: bool,
    /// It was refused when all others had been unloaded for it: they are not once more.
    pub in_vain: bool,
    /// Its gates wait for something that they lack.
    pub waits: bool,
}

impl Known {
    /// Whether it is judged as a candidate although it is the active version by now, and waits for something: it may be what only a
    /// candidate needs (what it is compared with, or asked), and may never come. Others have judged it, and it is brought back as in
    /// any pod that comes.
    pub(crate) fn waits_to_be_judged(&self, name: &str, desired: &Desired) -> bool {
        self.waits && self.attempt.is_some() && desired.active.as_deref() == Some(name)
    }
}

/// Why a version is prepared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// It is active already, and this pod does not have it: the golden prompts were asked when it became so.
    Restore,
    /// It is to be validated.
    Candidate {
        /// For this attempt.
        attempt: i64,
    },
}

/// Something to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Take a version through the gates.
    Prepare {
        /// Its name.
        version: String,
        /// What for.
        purpose: Purpose,
        /// Whether it is loaded; else it is checked as far as can be without, against the memory that there is once all others
        /// are unloaded.
        loads: bool,
    },
    /// Let these versions answer.
    Route(Route),
    /// Call off the gates of a version.
    Cancel {
        /// Its name.
        version: String,
    },
    /// Unload a version when its requests have ended.
    Retire {
        /// Its name.
        version: String,
    },
    /// Drop what is known of a version that is not loaded.
    Forget {
        /// Its name.
        version: String,
    },
    /// Unload at once a version whose worker failed before it ever answered. It is no part of a plan, but goes before one.
    Drop {
        /// Its name.
        version: String,
    },
}

/// Says what to do next.
#[must_use]
pub fn plan(desired: &Desired, current: &Current) -> Vec<Action> {
    if desired.holds {
        return hold::plan(desired, current);
    }
    let route = route(desired, current);
    let mut actions = Vec::new();
    if route != current.route {
        actions.push(Action::Route(route.clone()));
    }
    let dropped = drops(desired, current, &route);
    let unloads = dropped.iter().any(|action| matches!(action, Action::Retire { .. } | Action::Cancel { .. }));
    actions.extend(dropped);
    let next = restore(desired, current).or_else(|| candidate(desired, current, &route, unloads));
    actions.extend(next.or_else(|| way_back(desired, current, &route, unloads)));
    actions
}

/// Which versions should answer now.
fn route(desired: &Desired, current: &Current) -> Route {
    let known = |name: &str| current.versions.get(name);
    let loaded = |name: &&str| known(name).is_some_and(|known| matches!(known.phase, Phase::Ready | Phase::Checking));
    let up = |name: &&str| known(name).is_some_and(|known| known.worker_up);
    let now = current.route.active.as_deref();
    let wanted = desired.active.as_deref().filter(loaded);
    // A switch to a worker that is just being restarted would fail requests that the old one can answer.
    let active = match &desired.candidate {
        // What it answered with before makes room for the next candidate.
        Some(candidate) if desired.stands_by => {
            let proved = |known: &&Known| known.phase == Phase::Ready && known.attempt == Some(candidate.attempt);
            known(&candidate.version).filter(proved).map(|_| candidate.version.as_str())
        }
        _ => wanted.filter(|wanted| up(wanted) || !now.as_ref().is_some_and(up)).or(now),
    };
    let previous = desired.previous.as_deref().filter(|_| !gives_way(desired, current));
    let previous = previous.filter(loaded).filter(|previous| Some(*previous) != active);
    // Who waits goes on waiting where the strategy is another one by now.
    let held_from = current.route.held_from.clone().filter(|_| active.is_none());
    let canary = canary(desired, current).filter(|canary| active.is_some_and(|active| active != canary.version));
    Route { active: active.map(str::to_owned), canary, previous: previous.map(str::to_owned), held_from }
}

/// Which share of the requests goes to the candidate. What its worker cannot answer now the active version does.
fn canary(desired: &Desired, current: &Current) -> Option<Canary> {
    let (share, candidate) = (desired.canary?, desired.candidate.as_ref()?);
    let known = current.versions.get(&candidate.version)?;
    let proved = known.phase == Phase::Ready && known.passed && known.attempt == Some(candidate.attempt);
    let version = candidate.version.clone();
    (proved && known.worker_up && !desired.stands_by).then_some(Canary { version, share })
}

/// Whether the version to go back to makes room: the candidate waits for that, and nothing else is about to make any. It
/// can still be gone back to, by loading it again.
fn gives_way(desired: &Desired, current: &Current) -> bool {
    let Some(wanted) = &desired.candidate else { return false };
    let waits = current
        .versions
        .get(&wanted.version)
        .is_some_and(|known| known.phase == Phase::Waiting && known.attempt == Some(wanted.attempt));
    waits && !current.versions.values().any(|known| matches!(known.phase, Phase::Retiring | Phase::Cancelling))
}

/// What nobody asks for any more.
fn drops(desired: &Desired, current: &Current, route: &Route) -> Vec<Action> {
    let mut actions = Vec::new();
    for (name, known) in &current.versions {
        let version = name.clone();
        let candidate = desired.candidate.as_ref().filter(|candidate| candidate.version == *name);
        let is_canary = route.canary.as_ref().is_some_and(|canary| canary.version == *name);
        let answers = route.active.as_ref() == Some(name) || route.previous.as_ref() == Some(name) || is_canary;
        let stale = candidate
            .is_some_and(|candidate| desired.active.as_ref() != Some(name) && known.attempt != Some(candidate.attempt));
        match known.phase {
            Phase::Preparing | Phase::Checking if stale || !desired.names(name) => {
                actions.push(Action::Cancel { version });
            }
            Phase::Preparing | Phase::Checking if known.waits_to_be_judged(name, desired) => {
                actions.push(Action::Cancel { version });
            }
            // Nothing of it is loaded yet, and the other source may be the one that answers.
            Phase::Preparing if known.outdated => actions.push(Action::Cancel { version }),
            // It would take the room that the candidate needs, or hold it up.
            Phase::Preparing if desired.candidate.is_some() && desired.is_only_previous(name) => {
                actions.push(Action::Cancel { version });
            }
            Phase::Ready if !answers && !desired.names(name) => actions.push(Action::Retire { version }),
            Phase::Ready if !answers && desired.is_only_previous(name) && gives_way(desired, current) => {
                actions.push(Action::Retire { version });
            }
            Phase::Checked | Phase::Waiting | Phase::Refused if !desired.names(name) => {
                actions.push(Action::Forget { version });
            }
            _ => {}
        }
    }
    actions
}

/// Brings the active version back where this pod does not have it.
fn restore(desired: &Desired, current: &Current) -> Option<Action> {
    let version = desired.active.clone().filter(|name| desired.versions.contains_key(name))?;
    // What is answered now is right, and that version would be answered otherwise than it was judged.
    if desired.unknown.contains_key(&version) && current.route.active.is_some() {
        return None;
    }
    is_due(current, &version).then_some(Action::Prepare { version, purpose: Purpose::Restore, loads: true })
}

/// Whether it is time to bring a version back that was proved before.
fn is_due(current: &Current, version: &str) -> bool {
    current.versions.get(version).is_none_or(|known| match known.phase {
        Phase::Checked => true,
        Phase::Refused | Phase::Waiting => known.retry_due || known.outdated,
        _ => false,
    })
}

/// Brings the version to go back to back, when nothing else is to be done: it gave way to a candidate that is gone, or this pod
/// has come since.
fn way_back(desired: &Desired, current: &Current, route: &Route, unloads: bool) -> Option<Action> {
    let known = |name: &String| desired.versions.contains_key(name) && !desired.unknown.contains_key(name);
    let version = desired.previous.clone().filter(known).filter(|name| desired.is_only_previous(name))?;
    let answers = route.active.is_some() && route.active == desired.active;
    let at_rest =
        |known: &Known| matches!(known.phase, Phase::Ready | Phase::Checked | Phase::Waiting | Phase::Refused);
    let alone = desired.candidate.is_none() && !unloads && current.versions.values().all(at_rest);
    let begins = answers && alone && is_due(current, &version);
    begins.then_some(Action::Prepare { version, purpose: Purpose::Restore, loads: true })
}

/// Begins with the candidate when its turn has come.
fn candidate(desired: &Desired, current: &Current, route: &Route, unloads: bool) -> Option<Action> {
    let wanted = desired.candidate.as_ref().filter(|candidate| desired.versions.contains_key(&candidate.version))?;
    let version = wanted.version.clone();
    if desired.active.as_ref() == Some(&version) || route.active.as_ref() == Some(&version) {
        return None;
    }
    if desired.unknown.contains_key(&version) {
        return None;
    }
    let busy = |known: &Known| match known.phase {
        // A source that sends a byte now and then would hold every candidate up, the cure among them.
        Phase::Preparing => !known.slow,
        Phase::Checking | Phase::Cancelling | Phase::Retiring => true,
        Phase::Ready | Phase::Checked | Phase::Waiting | Phase::Refused => false,
    };
    if unloads || current.versions.values().any(busy) {
        return None;
    }
    // A version that waits for room has it at once when nothing is loaded any more but the one that answers. While
    // another is, it may not be the one that goes: only time tells.
    let has_room = || {
        let mut others =
            current.versions.iter().filter(|(name, _)| **name != version && route.active.as_ref() != Some(name));
        !others.any(|(_, known)| known.phase == Phase::Ready)
    };
    let judged = |known: &Known| known.attempt == Some(wanted.attempt);
    let begins = current.versions.get(&version).is_none_or(|known| match known.phase {
        Phase::Ready => !judged(known),
        Phase::Checked => true,
        Phase::Refused => !judged(known) || known.outdated,
        Phase::Waiting => !judged(known) || known.outdated || known.retry_due || has_room(),
        _ => false,
    });
    let purpose = Purpose::Candidate { attempt: wanted.attempt };
    begins.then_some(Action::Prepare { version, purpose, loads: true })
}

#[cfg(test)]
#[path = "plan_tests.rs"]
pub(crate) mod tests;

//! What the status of a service asks of a pod, as one value.

use std::collections::{BTreeMap, BTreeSet};

use gantry_crds::InferenceServiceStatus;
use gantry_crds::status::{NamedVersion, RolloutStatus, RolloutStep, Side, StrategyName};

use crate::share::Share;

/// What is asked of this pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Desired {
    /// The version that answers.
    pub active: Option<String>,
    /// The version to prepare.
    pub candidate: Option<Candidate>,
    /// The share of the requests that the candidate answers as soon as it has passed here; `None`: it answers nobody.
    pub canary: Option<Share>,
    /// The attempt of the rollout in progress, whatever its step.
    pub attempt: Option<i64>,
    /// The version to go back to; loaded, it stays loaded.
    pub previous: Option<String>,
    /// Whether pods of the other side answer the service's requests. Then a candidate is prepared alone and answered with as
    /// soon as it has passed, for who looks at it before it gets those requests.
    pub stands_by: bool,
    /// The version that answers since the last switch, while it is watched: whether its figures pass the limits of the signals.
    pub watched: Option<String>,
    /// Whether what answers is unloaded before another version is loaded, while requests wait.
    pub holds: bool,
    /// Whether this pod is to do so now for the candidate.
    pub has_turn: bool,
    /// Whether other pods answer requests while this one has its turn.
    pub yields: bool,
    /// Whether this pod is not to get requests while it answers with another version than the active one: that was refused or
    /// taken back, and other pods answer with none such.
    pub quarantined: bool,
    /// Further versions that stay as they are.
    pub kept: BTreeSet<String>,
    /// What the versions are.
    pub versions: BTreeMap<String, NamedVersion>,
    /// Why others are not known.
    pub unreadable: BTreeMap<String, String>,
    /// What of these versions, or of how they are to be judged, this release does not know: fields of a later one.
    pub unknown: BTreeMap<String, Vec<String>>,
}

/// A version to prepare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its name.
    pub version: String,
    /// Which attempt it is: another attempt judges again.
    pub attempt: i64,
}

impl Desired {
    /// What `status` asks of the `pod` of this `side` with these `resources`, as the operator calls them; `None` where that is not
    /// known.
    #[must_use]
    pub fn of(status: &InferenceServiceStatus, pod: &str, resources: Option<&str>, side: Side) -> Self {
        let stands_by = side != status.active_side.unwrap_or_default();
        let rollout = status.rollout.as_ref();
        let of_sides = rollout.is_some_and(|rollout| rollout.strategy() == StrategyName::BlueGreen);
        let (active, previous) = match rollout.filter(|_| of_sides).map(|rollout| rollout.step) {
            // What it answered with before is what can be gone back to.
            Some(RolloutStep::Commit | RolloutStep::Bake) if stands_by => (status.previous_version.clone(), None),
            Some(RolloutStep::Commit | RolloutStep::Bake) => (status.active_version.clone(), None),
            // The candidate is all that it is there for; what it has stays until the pod goes.
            _ if stands_by => (None, None),
            _ => (status.active_version.clone(), status.previous_version.clone()),
        };
        // One bakes on while the next is prepared.
        let is_watched = |rollout: &RolloutStatus| match rollout.step {
            RolloutStep::Commit | RolloutStep::Bake => active.as_ref() == Some(&rollout.version),
            _ => !stands_by && rollout.bake.is_some(),
        };
        let watched = rollout.filter(|rollout| is_watched(rollout)).and(active.clone());
        let others =
            |wanted: &Option<String>| resources.zip(wanted.as_deref()).is_some_and(|(has, wanted)| has != wanted);
        let (candidate, kept) = match rollout {
            // It is prepared by pods of the other side.
            Some(rollout) if rollout.step.has_candidate() && stands_by != of_sides => (None, None),
            // What this pod said of it would not count: others are to come, with the resources that the spec asks for.
            Some(rollout) if rollout.step.has_candidate() && others(&rollout.resources) => (None, None),
            Some(rollout) if rollout.step.has_candidate() => {
                (Some(Candidate { version: rollout.version.clone(), attempt: rollout.attempt }), None)
            }
            Some(rollout) if rollout.step == RolloutStep::Rollback => (None, None),
            Some(rollout) => (None, Some(rollout.version.clone())),
            None => (None, status.candidate_version.clone()),
        };
        let strategy = match rollout {
            Some(rollout) if rollout.step.has_candidate() || of_sides => Some(rollout.strategy()),
            _ => status.goes_over_by,
        };
        let holds = strategy == Some(StrategyName::HoldRequests);
        let turn = rollout.and_then(|rollout| rollout.turn.as_ref()).filter(|turn| holds && turn.pod == pod);
        let canary = rollout.filter(|rollout| rollout.step == RolloutStep::Canary && candidate.is_some());
        let canary = canary.and_then(|rollout| Share::of(&rollout.canary.as_ref()?.share));
        Self {
            active,
            candidate,
            canary,
            attempt: status.rollout.as_ref().map(|rollout| rollout.attempt),
            previous,
            stands_by,
            watched,
            holds: holds && !stands_by,
            has_turn: turn.is_some() && !stands_by,
            yields: turn.is_some_and(|turn| turn.yields),
            quarantined: status.quarantined.iter().any(|name| name == pod),
            kept: kept.into_iter().collect(),
            versions: status.versions.iter().map(|version| (version.name.clone(), version.clone())).collect(),
            unreadable: BTreeMap::new(),
            unknown: BTreeMap::new(),
        }
    }

    /// The same with no request for the candidate: this pod takes its share back by itself.
    #[must_use]
    pub fn without_share(&self) -> Self {
        Self { canary: None, ..self.clone() }
    }

    /// Whether this version is asked for as the one to go back to, and as nothing else.
    #[must_use]
    pub fn is_only_previous(&self, version: &str) -> bool {
        let is = |name: &Option<String>| name.as_deref() == Some(version);
        let is_candidate = self.candidate.as_ref().is_some_and(|candidate| candidate.version == version);
        is(&self.previous) && !is(&self.active) && !is_candidate
    }

    /// Whether anything asks for this version.
    #[must_use]
    pub fn names(&self, version: &str) -> bool {
        let is = |name: &Option<String>| name.as_deref() == Some(version);
        is(&self.active)
            || is(&self.previous)
            || self.candidate.as_ref().is_some_and(|candidate| candidate.version == version)
            || self.kept.contains(version)
    }
}

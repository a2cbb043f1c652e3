//! What is asked of this pod, as one value: read from the InferenceService by [`crate::agent`], carried out by
//! [`super::Manager`].

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use gantry_crds::inference_service::PromptsGate;
use gantry_crds::status::NamedVersion;

use crate::version::Scheduling;
use crate::version::signals::SignalLimits;

/// What is asked of this pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Desired {
    /// The version that answers.
    pub active: Option<String>,
    /// The version to prepare.
    pub candidate: Option<Candidate>,
    /// The attempt of the rollout in progress, whatever its step.
    pub attempt: Option<i64>,
    /// The version to go back to; loaded, it stays loaded.
    pub previous: Option<String>,
    /// Whether pods of the other side answer the service's requests. Then a candidate is prepared alone and answered with as
    /// soon as it has passed, for who looks at it before it gets those requests.
    pub stands_by: bool,
    /// The version that answers since the last switch, while it is watched: whether its figures pass the limits of the signals.
    pub watched: Option<String>,
    /// Further versions that stay as they are.
    pub kept: BTreeSet<String>,
    /// What the versions are.
    pub versions: BTreeMap<String, NamedVersion>,
    /// Why others are not known.
    pub unreadable: BTreeMap<String, String>,
    /// What of these versions, or of how they are to be judged, this release does not know: fields of a later one.
    pub unknown: BTreeMap<String, Vec<String>>,
    /// How.
    pub settings: Settings,
}

/// A version to prepare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its name.
    pub version: String,
    /// Which attempt it is: another attempt judges again.
    pub attempt: i64,
}

/// How versions are prepared and retired.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Share of the memory that stays free.
    pub headroom_ratio: f64,
    /// The golden prompts of candidates.
    pub prompts: Option<PromptsGate>,
    /// How requests wait and are spread.
    pub scheduling: Scheduling,
    /// How long requests of a version that is unloaded may take to end.
    pub drain_timeout: Duration,
    /// Bytes that the cache may hold.
    pub cache_limit_bytes: Option<u64>,
    /// Whether the pod has a GPU.
    pub gpu: bool,
    /// What the figures of a version that is watched may be.
    pub signals: Option<SignalLimits>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            headroom_ratio: 0.05,
            prompts: None,
            scheduling: Scheduling::default(),
            drain_timeout: Duration::from_secs(120),
            cache_limit_bytes: None,
            gpu: false,
            signals: None,
        }
    }
}

impl Desired {
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

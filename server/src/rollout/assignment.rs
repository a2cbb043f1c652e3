//! What is asked of this pod, and how: read from the InferenceService by [`crate::agent`], carried out by
//! [`super::Manager`].

use std::time::Duration;

use gantry_crds::inference_service::{DriftGate, PerformanceGate, PromptsGate, ShadowGate};
use gantry_rollout::Desired;

use crate::version::Scheduling;
use crate::version::signals::SignalLimits;

/// What is asked of this pod.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Assignment {
    /// Which versions.
    pub desired: Desired,
    /// How they are prepared, run and retired.
    pub settings: Settings,
}

/// How versions are prepared and retired.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Share of the memory that stays free.
    pub headroom_ratio: f64,
    /// The golden prompts of candidates.
    pub prompts: Option<PromptsGate>,
    /// How candidates are compared with the active version.
    pub drift: Option<DriftGate>,
    /// How the speed of candidates is compared with the active version's.
    pub performance: Option<PerformanceGate>,
    /// How candidates are compared with the active version on live requests.
    pub shadow: Option<ShadowGate>,
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
            drift: None,
            performance: None,
            shadow: None,
            scheduling: Scheduling::default(),
            drain_timeout: Duration::from_secs(120),
            cache_limit_bytes: None,
            gpu: false,
            signals: None,
        }
    }
}

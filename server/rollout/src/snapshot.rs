//! What a pod can say about its versions at one moment.

use gantry_crds::status::{BreachStatus, CandidateStatus, ModelState, ReplicaCanary, ReplicaHealth};

/// What a pod can say about its versions at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// The version that answers.
    pub serving: Option<String>,
    /// The attempt that was asked for when this was so.
    pub attempt: Option<i64>,
    /// The candidate, when it is loaded and has passed every gate.
    pub prepared: Option<String>,
    /// The version to go back to, when it is loaded.
    pub resident: Option<String>,
    /// Where the pod is with the model that it answers with.
    pub state: ModelState,
    /// How the pod is.
    pub health: ReplicaHealth,
    /// Why it is not healthy.
    pub message: Option<String>,
    /// How far it is with a version that does not answer yet.
    pub candidate: Option<CandidateStatus>,
    /// The candidate that a share of the requests goes to.
    pub canary: Option<ReplicaCanary>,
    /// The figure of the version that answers which passed its limit, since it is watched.
    pub breach: Option<BreachStatus>,
    /// It is watched for a window, and had too few requests since for its figures to say anything.
    pub too_few_requests: bool,
}

impl Default for Snapshot {
    fn default() -> Self {
        Self {
            serving: None,
            attempt: None,
            prepared: None,
            resident: None,
            state: ModelState::Loading,
            health: ReplicaHealth::Starting,
            message: None,
            candidate: None,
            canary: None,
            breach: None,
            too_few_requests: false,
        }
    }
}

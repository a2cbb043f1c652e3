//! Gantry's Kubernetes API: [`InferenceService`], which a user edits, and [`ModelVersion`], which the operator stamps
//! for each distinct model as a Deployment stamps ReplicaSets.
//!
//! The CRD YAML in `crds/yaml` is generated from these types by the `crdgen` binary. Rules that the API server can
//! check stand here as CEL with a message that says what to do; rules that need more than one object stand in the
//! operator. Nothing in this crate talks to a cluster.

use std::time::Duration;

pub mod address;
pub mod api;
pub mod canonical;
pub mod conditions;
pub mod inference_service;
pub mod model_version;
pub(crate) mod open;
pub mod pod;
pub mod problem;
pub mod quantity;
pub mod revision;
pub mod runtime;
pub mod scalars;
pub mod status;

pub use inference_service::{InferenceService, InferenceServiceSpec};
pub use model_version::{ModelVersion, ModelVersionSpec};
pub use status::{InferenceServiceStatus, ModelVersionStatus};

/// API group of every Gantry kind.
pub const GROUP: &str = "gantry.dev";
/// API version of every Gantry kind.
pub const VERSION: &str = "v1alpha1";
/// Label on every child: the InferenceService it belongs to.
pub const SERVICE_LABEL: &str = "gantry.dev/service";
/// Label of pods and of what selects them: the set of pods they are of ([`Side`](status::Side)).
pub const SIDE_LABEL: &str = "gantry.dev/side";
/// Annotation of a Secret: the hosts to which its token may be sent, `huggingface.co, *.example.com, files.ns.svc:8443`.
/// Who owns the Secret sets it; without it the Secret is not used.
pub const HOSTS_ANNOTATION: &str = "gantry.dev/hosts";
/// Finalizer that releases before this one set. The operator takes it off: owner references remove all that belongs to a
/// service, and a deletion must not wait for an operator that may be gone.
pub const OLD_FINALIZER: &str = "gantry.dev/cleanup";
/// Annotation of an InferenceService: its pods are replaced when the value changes.
pub const RESTART_ANNOTATION: &str = "gantry.dev/restart";
/// Annotation of an InferenceService: a version that was refused or taken back is tried again when the value changes.
pub const RETRY_ANNOTATION: &str = "gantry.dev/retry";
/// Field manager of the operator's server-side applies.
pub const OPERATOR_FIELD_MANAGER: &str = "gantry-operator";

/// Field manager with which the agent of `pod` applies its own entry of `status.replicas`.
#[must_use]
pub fn agent_field_manager(pod: &str) -> String {
    format!("gantry-agent-{pod}")
}

/// Longest time in which an agent that lives, and an API server that does, may not know of each other: the agent's connection broke
/// without a word, and it has to find that out, connect anew, read what is asked and say so. The agent's limits keep to it, and
/// the operator calls no pod late before that.
pub const AGENT_BLIND_MAX: Duration = Duration::from_secs(170);

/// Most replicas of one service: each reports about itself in one object, which every watcher receives whole.
pub const MAX_REPLICAS: i32 = 256;

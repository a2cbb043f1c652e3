//! Evictions take one pod at a time, and never wait for a pod that does not answer anyway.

use k8s_openapi::{
    api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec},
    apimachinery::pkg::util::intstr::IntOrString,
};
use kube::ResourceExt;

use super::{Inputs, metadata, selector};

/// The PodDisruptionBudget of the side that answers, named as the InferenceService.
pub fn pod_disruption_budget(inputs: &Inputs) -> PodDisruptionBudget {
    let name = inputs.owner.name_any();
    PodDisruptionBudget {
        metadata: metadata(inputs.owner, name.clone()),
        spec: Some(PodDisruptionBudgetSpec {
            max_unavailable: Some(IntOrString::Int(1)),
            selector: Some(selector(inputs.sides.active_labels(&name))),
            unhealthy_pod_eviction_policy: Some("AlwaysAllow".to_owned()),
            ..PodDisruptionBudgetSpec::default()
        }),
        status: None,
    }
}

//! Evictions take one pod at a time, and never wait for a pod that does not answer anyway.

use gantry_crds::InferenceService;
use k8s_openapi::{
    api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec},
    apimachinery::pkg::util::intstr::IntOrString,
};
use kube::ResourceExt;

use super::{metadata, pod_selector};

/// The PodDisruptionBudget, named as the InferenceService.
pub fn pod_disruption_budget(owner: &InferenceService) -> PodDisruptionBudget {
    let name = owner.name_any();
    PodDisruptionBudget {
        metadata: metadata(owner, name.clone()),
        spec: Some(PodDisruptionBudgetSpec {
            max_unavailable: Some(IntOrString::Int(1)),
            selector: Some(pod_selector(&name)),
            unhealthy_pod_eviction_policy: Some("AlwaysAllow".to_owned()),
            ..PodDisruptionBudgetSpec::default()
        }),
        status: None,
    }
}

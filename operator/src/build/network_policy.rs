//! Pods take connections on the API port and the one of probes and metrics, and on no other; what they may reach is the
//! cluster's decision. Ports have names, so that the rule fits pods whose template is older than a port.

use gantry_crds::InferenceService;
use k8s_openapi::{
    api::networking::v1::{NetworkPolicy, NetworkPolicyIngressRule, NetworkPolicyPort, NetworkPolicySpec},
    apimachinery::pkg::util::intstr::IntOrString,
};
use kube::ResourceExt;

use super::{METRICS_PORT_NAME, PORT_NAME, metadata, pod_labels, selector};

/// The NetworkPolicy, named as the InferenceService.
pub fn network_policy(owner: &InferenceService) -> NetworkPolicy {
    let name = owner.name_any();
    NetworkPolicy {
        metadata: metadata(owner, name.clone()),
        spec: Some(NetworkPolicySpec {
            pod_selector: Some(selector(pod_labels(&name))),
            policy_types: Some(vec!["Ingress".to_owned()]),
            ingress: Some(vec![NetworkPolicyIngressRule {
                ports: Some([PORT_NAME, METRICS_PORT_NAME].map(port).into()),
                ..NetworkPolicyIngressRule::default()
            }]),
            ..NetworkPolicySpec::default()
        }),
    }
}

fn port(name: &str) -> NetworkPolicyPort {
    NetworkPolicyPort {
        port: Some(IntOrString::String(name.to_owned())),
        protocol: Some("TCP".to_owned()),
        ..NetworkPolicyPort::default()
    }
}

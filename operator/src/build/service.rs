//! The endpoint: one Service in front of all pods that are ready, and of their metrics. A pod whose template is older than
//! the port of metrics has no endpoint there, and its own at the API.

use gantry_crds::InferenceService;
use k8s_openapi::{
    api::core::v1::{Service, ServicePort, ServiceSpec},
    apimachinery::pkg::util::intstr::IntOrString,
};
use kube::ResourceExt;

use super::{METRICS_PORT, METRICS_PORT_NAME, PORT_NAME, SERVICE_PORT, metadata, pod_labels};

/// The Service, named as the InferenceService.
pub fn service(owner: &InferenceService) -> Service {
    let name = owner.name_any();
    Service {
        metadata: metadata(owner, name.clone()),
        spec: Some(ServiceSpec {
            selector: Some(pod_labels(&name)),
            ports: Some(vec![port(PORT_NAME, SERVICE_PORT), port(METRICS_PORT_NAME, METRICS_PORT)]),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

/// A port that is called in the Service as it is in the pods.
fn port(name: &str, number: i32) -> ServicePort {
    ServicePort {
        name: Some(name.to_owned()),
        port: number,
        protocol: Some("TCP".to_owned()),
        target_port: Some(IntOrString::String(name.to_owned())),
        ..ServicePort::default()
    }
}

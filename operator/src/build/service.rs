//! The endpoint: one Service in front of all pods that are ready.

use gantry_crds::InferenceService;
use k8s_openapi::{
    api::core::v1::{Service, ServicePort, ServiceSpec},
    apimachinery::pkg::util::intstr::IntOrString,
};
use kube::ResourceExt;

use super::{PORT_NAME, SERVICE_PORT, metadata, pod_labels};

/// The Service, named as the InferenceService.
pub fn service(owner: &InferenceService) -> Service {
    let name = owner.name_any();
    Service {
        metadata: metadata(owner, name.clone()),
        spec: Some(ServiceSpec {
            selector: Some(pod_labels(&name)),
            ports: Some(vec![ServicePort {
                name: Some(PORT_NAME.to_owned()),
                port: SERVICE_PORT,
                protocol: Some("TCP".to_owned()),
                target_port: Some(IntOrString::String(PORT_NAME.to_owned())),
                ..ServicePort::default()
            }]),
            ..ServiceSpec::default()
        }),
        status: None,
    }
}

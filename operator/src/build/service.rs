//! The endpoint: one Service in front of the pods of one side that are ready, and of their metrics; and one in front of the other
//! side while there is one. A pod whose template is older than the port of metrics has no endpoint there, and its own at the API.

use std::collections::BTreeMap;

use gantry_crds::{InferenceService, status::Side};
use k8s_openapi::{
    api::core::v1::{Service, ServicePort, ServiceSpec},
    apimachinery::pkg::util::intstr::IntOrString,
};
use kube::ResourceExt;

use super::{METRICS_PORT, METRICS_PORT_NAME, PORT_NAME, SERVICE_PORT, Sides, metadata, preview_name, side_labels};

/// The Service of the side that answers, named as the InferenceService.
pub fn service(owner: &InferenceService, sides: &Sides) -> Service {
    let name = owner.name_any();
    endpoint(owner, name.clone(), sides.active_labels(&name))
}

/// The Service of a side that does not answer.
pub fn preview(owner: &InferenceService, side: Side) -> Service {
    let name = owner.name_any();
    endpoint(owner, preview_name(&name), side_labels(&name, side))
}

fn endpoint(owner: &InferenceService, name: String, selector: BTreeMap<String, String>) -> Service {
    Service {
        metadata: metadata(owner, name),
        spec: Some(ServiceSpec {
            selector: Some(selector),
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

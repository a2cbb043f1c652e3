//! The children of a service as they should be: a pure function that cannot fail, since `validate` removed every cause.
//!
//! Each child carries the labels by which the operator's watches find it, an owner reference and, once finished, the hash
//! of its content (`gantry.dev/applied`): `act` compares that to tell whether it has to write. The pod template holds no
//! model, so a new model changes nothing here but the names of Secrets in the Role.

mod api;
mod deployment;
mod network_policy;
mod pdb;
mod rbac;
mod service;

use std::collections::{BTreeMap, BTreeSet};

use gantry_crds::{InferenceService, SERVICE_LABEL, status::NamedVersion};
use k8s_openapi::{
    api::{
        apps::v1::Deployment,
        core::v1::{Service, ServiceAccount},
        networking::v1::NetworkPolicy,
        policy::v1::PodDisruptionBudget,
        rbac::v1::{Role, RoleBinding},
    },
    apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta, OwnerReference},
};
use kube::{Resource, ResourceExt};
use sha2::{Digest, Sha256};

use crate::validate::ValidService;

pub use deployment::{StoredTemplate, TemplateId};
pub use rbac::{granted_secrets, named_secrets};

/// Value of [`MANAGED_BY`] on every child.
pub const OPERATOR: &str = "gantry-operator";
/// Label by which the operator's watches find children.
pub const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// Annotation with the hash of what was applied last.
pub const APPLIED_ANNOTATION: &str = "gantry.dev/applied";
/// Port of the server in its pod.
pub const SERVER_PORT: i32 = 8080;
/// Name of that port.
pub const PORT_NAME: &str = "http";
/// Port of probes and metrics in the pod, which the Service has too: for metrics alone.
pub const METRICS_PORT: i32 = 8081;
/// Name of that port. A pod that was made before it existed has none of this name, and is probed at [`PORT_NAME`].
pub const METRICS_PORT_NAME: &str = "metrics";
/// Port of the Service.
pub const SERVICE_PORT: i32 = 80;

const NAME_LABEL: &str = "app.kubernetes.io/name";
const INSTANCE_LABEL: &str = "app.kubernetes.io/instance";
const SERVER_NAME: &str = "gantry-server";

/// Every child of a service.
#[derive(Debug, Clone, PartialEq)]
pub struct Children {
    /// Identity of the pods.
    pub service_account: ServiceAccount,
    /// What the agents may do.
    pub role: Role,
    /// Gives it to them.
    pub role_binding: RoleBinding,
    /// The endpoint.
    pub service: Service,
    /// Keeps evictions to one pod at a time.
    pub pod_disruption_budget: PodDisruptionBudget,
    /// Lets only the API and the metrics in.
    pub network_policy: NetworkPolicy,
    /// The pods.
    pub deployment: Deployment,
}

/// What the installation says of pods that are made from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewPods {
    /// Image of the server.
    pub image: String,
    /// Whether models may be fetched from private addresses, as those of the cluster are.
    pub private_sources: bool,
}

/// What children are built from.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// The service they belong to.
    pub owner: &'a InferenceService,
    /// Its spec.
    pub spec: &'a ValidService,
    /// Versions whose Secrets the agents may read.
    pub versions: &'a [NamedVersion],
    /// Which Secrets say for which hosts they may be used: agents use no others, and may read no others.
    pub lent_secrets: &'a BTreeSet<String>,
    /// What new pod templates get from the operator.
    pub new_pods: &'a NewPods,
    /// The pod template as it was applied before.
    pub stored: Option<&'a StoredTemplate>,
    /// Whether any pod answers: while none does there is nothing to protect from a change of the template.
    pub answers: bool,
}

/// Builds every child.
#[must_use]
pub fn build(inputs: &Inputs) -> Children {
    Children {
        service_account: finished(rbac::service_account(inputs.owner)),
        role: finished(rbac::role(inputs)),
        role_binding: finished(rbac::role_binding(inputs.owner)),
        service: finished(service::service(inputs.owner)),
        pod_disruption_budget: finished(pdb::pod_disruption_budget(inputs.owner)),
        network_policy: finished(network_policy::network_policy(inputs.owner)),
        deployment: finished(deployment::deployment(inputs)),
    }
}

/// Base address for OpenAI clients inside the cluster.
#[must_use]
pub fn endpoint(owner: &InferenceService) -> String {
    format!("http://{}.{}.svc/v1", owner.name_any(), owner.namespace().unwrap_or_default())
}

/// Selector of a service's pods, as text.
#[must_use]
pub fn selector_text(service: &str) -> String {
    pod_labels(service).into_iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")
}

/// Owner reference to `owner`.
#[must_use]
pub fn owner_reference(owner: &InferenceService) -> OwnerReference {
    OwnerReference {
        api_version: InferenceService::api_version(&()).into_owned(),
        kind: InferenceService::kind(&()).into_owned(),
        name: owner.name_any(),
        uid: owner.uid().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// Labels of every child.
#[must_use]
pub fn labels(service: &str) -> BTreeMap<String, String> {
    let mut labels = pod_labels(service);
    labels.insert(INSTANCE_LABEL.to_owned(), service.to_owned());
    labels.insert(MANAGED_BY.to_owned(), OPERATOR.to_owned());
    labels
}

/// The labels that select pods: a Deployment's selector never changes, so it holds no more than it must.
fn pod_labels(service: &str) -> BTreeMap<String, String> {
    [(NAME_LABEL, SERVER_NAME), (SERVICE_LABEL, service)].map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

fn pod_selector(service: &str) -> LabelSelector {
    LabelSelector { match_labels: Some(pod_labels(service)), match_expressions: None }
}

/// Metadata of a child called `name`.
fn metadata(owner: &InferenceService, name: String) -> ObjectMeta {
    ObjectMeta {
        name: Some(name),
        namespace: owner.namespace(),
        labels: Some(labels(&owner.name_any())),
        owner_references: Some(vec![owner_reference(owner)]),
        ..ObjectMeta::default()
    }
}

/// Name of the ServiceAccount, Role and RoleBinding.
fn identity_name(owner: &InferenceService) -> String {
    format!("{}-gantry", owner.name_any())
}

/// The object with the hash of its content.
fn finished<K: Resource + serde::Serialize>(mut object: K) -> K {
    let hash = hash(&object);
    object.meta_mut().annotations.get_or_insert_default().insert(APPLIED_ANNOTATION.to_owned(), hash);
    object
}

/// Short hash of a value's JSON: these types serialise without failing.
pub(crate) fn hash(value: &impl serde::Serialize) -> String {
    hex::encode(&Sha256::digest(serde_json::to_vec(value).unwrap_or_default())[..16])
}

#[cfg(test)]
mod tests;

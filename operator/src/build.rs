//! The children of a service as they should be: a pure function that cannot fail, since `validate` removed every cause.
//!
//! Each child carries the labels by which the operator's watches find it, an owner reference and, once finished, the hash
//! of its content (`gantry.dev/applied`): `act` compares that to tell whether it has to write. The pod template holds no
//! model, so a new model changes nothing here but the names of Secrets in the Role.

mod api;
mod deployment;
mod network_policy;
mod pdb;
mod pod;
mod rbac;
mod service;

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
};

use gantry_crds::{
    InferenceService, SERVICE_LABEL, SIDE_LABEL,
    inference_service::RolloutStrategy,
    status::{NamedVersion, RolloutStep, Side, StrategyName},
};
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

use crate::{
    decide::{RolloutState, is_latched},
    observe::Observed,
    validate::{PodSettings, ValidService},
};

pub use deployment::{StoredTemplate, TemplateId};
pub use rbac::{granted_secrets, named_secrets};

/// Value of [`MANAGED_BY`] on every child.
pub const OPERATOR: &str = "gantry-operator";
/// Label by which the operator's watches find children.
pub const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// Annotation with the hash of what was applied last.
pub const APPLIED_ANNOTATION: &str = "gantry.dev/applied";
/// Name of the container that Gantry runs in a pod.
pub const SERVER_CONTAINER: &str = "server";
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
    /// The pods that answer.
    pub deployment: Deployment,
    /// The other side, where there is one or was.
    pub other: Option<OtherChildren>,
}

/// The set of pods that does not answer.
#[derive(Debug, Clone, PartialEq)]
pub struct OtherChildren {
    /// Its pods.
    pub deployment: Deployment,
    /// Its endpoint, to look at a candidate before it answers.
    pub preview: Service,
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
    /// The two sets of pods.
    pub sides: &'a Sides,
    /// Accounts of the pods that there are.
    pub accounts: &'a BTreeSet<&'a str>,
    /// UID of the account that is made for the pods, once it is known.
    pub account_uid: Option<&'a str>,
    /// Whether any pod answers: while none does there is nothing to protect from a change of the template.
    pub answers: bool,
}

/// The two sets of pods of a service: which answers, and what is there of each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sides {
    /// The one that answers.
    pub active: Side,
    /// Whether the pods of that one say of which they are. Those do not that were made before there were two.
    pub is_labelled: bool,
    /// Pods of the other side.
    pub other_replicas: i32,
    /// What is there of each.
    pub blue: SideState,
    /// The same of the other one.
    pub green: SideState,
}

/// What is there of a side.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SideState {
    /// Its pod template as it was applied before.
    pub stored: Option<StoredTemplate>,
    /// Whether there is a Deployment, and whether its selector names the side: a selector never changes.
    pub selects_side: Option<bool>,
    /// Whether its pods stay as they were made, whatever the spec says by now: those that a rollout may go back to.
    pub is_kept: bool,
}

impl Sides {
    /// The two sets of pods as `state` and this number of `replicas` have them, where the spec asks for this.
    #[must_use]
    pub fn of(observed: &Observed, state: &RolloutState, spec: Option<&ValidService>, replicas: i32) -> Self {
        let rollout = state.rollout.as_ref().filter(|now| now.strategy() == StrategyName::BlueGreen);
        let step = rollout.map(|now| now.step);
        let (active, other) = (state.active_side, state.active_side.other());
        // What the Service leads to is not taken away, however a rollout ended.
        let both = matches!(step, Some(RolloutStep::Prepare | RolloutStep::Rollback))
            || (step.is_some() && state.previous.is_some())
            || observed.points_to(other);
        // What else the spec says by now is meant for the pods of the version that it asks for.
        let is_for_others = spec.is_some_and(|spec| {
            let is_due = step.is_some() || (spec.strategy == RolloutStrategy::BlueGreen && state.rollout.is_none());
            let is_other = state.active.as_ref().is_some_and(|active| *active != spec.wanted.name);
            is_due && is_other && !is_latched(state, &spec.wanted)
        });
        let kept = |side: Side| match step {
            Some(RolloutStep::Prepare) => side == active,
            Some(RolloutStep::Commit | RolloutStep::Bake) => side == other || is_for_others,
            Some(RolloutStep::Rollback) => true,
            _ => side == active && is_for_others,
        };
        let side_state = |side: Side| {
            let deployment = observed.deployment_of(side);
            let labels = |one: &Deployment| one.spec.as_ref().and_then(|spec| spec.selector.match_labels.clone());
            SideState {
                stored: deployment.and_then(|one| StoredTemplate::of(one.annotations())),
                selects_side: deployment.map(|one| labels(one).unwrap_or_default().contains_key(SIDE_LABEL)),
                is_kept: kept(side),
            }
        };
        Self {
            active,
            is_labelled: observed.is_labelled(active),
            other_replicas: if both { replicas } else { 0 },
            blue: side_state(Side::Blue),
            green: side_state(Side::Green),
        }
    }

    /// The template that the pods of a side are to be of.
    #[must_use]
    pub fn template(&self, side: Side, pod: &PodSettings) -> TemplateId {
        let SideState { stored, is_kept, .. } = self.state(side);
        match stored {
            Some(stored) if *is_kept => TemplateId::of_stored(stored),
            stored => TemplateId::newest(pod, side, stored.as_ref()),
        }
    }

    /// What is there of a side.
    #[must_use]
    pub fn state(&self, side: Side) -> &SideState {
        if side == Side::Green { &self.green } else { &self.blue }
    }

    /// What selects the pods of the side that answers.
    fn active_labels(&self, service: &str) -> BTreeMap<String, String> {
        if self.is_labelled || self.other_replicas > 0 {
            side_labels(service, self.active)
        } else {
            pod_labels(service)
        }
    }
}

/// Builds every child.
#[must_use]
pub fn build(inputs: &Inputs) -> Children {
    Children {
        service_account: finished(rbac::service_account(inputs.owner)),
        role: finished(rbac::role(inputs)),
        role_binding: finished(rbac::role_binding(inputs)),
        service: endpoint_service(inputs.owner, inputs.sides),
        pod_disruption_budget: finished(pdb::pod_disruption_budget(inputs)),
        network_policy: finished(network_policy::network_policy(inputs.owner)),
        deployment: finished(deployment::deployment(inputs, inputs.sides.active)),
        other: other(inputs),
    }
}

/// The Service of the side that answers.
#[must_use]
pub fn endpoint_service(owner: &InferenceService, sides: &Sides) -> Service {
    finished(service::service(owner, sides))
}

/// The other side, with no pods where none are asked for: what it was made with stays for the next time.
fn other(inputs: &Inputs) -> Option<OtherChildren> {
    let (sides, side) = (inputs.sides, inputs.sides.active.other());
    let is_there = sides.other_replicas > 0 || sides.state(side).selects_side.is_some();
    is_there.then(|| OtherChildren {
        deployment: finished(deployment::deployment(inputs, side)),
        preview: finished(service::preview(inputs.owner, side)),
    })
}

/// Name of the Deployment with the pods of a side.
#[must_use]
pub fn deployment_name(service: &str, side: Side) -> String {
    // The first one is called as services were before there were two.
    if side == Side::Green { format!("{service}-green") } else { service.to_owned() }
}

/// Name of the Service of the side that does not answer.
#[must_use]
pub fn preview_name(service: &str) -> String {
    format!("{service}-preview")
}

/// Base address for OpenAI clients inside the cluster.
#[must_use]
pub fn endpoint(owner: &InferenceService) -> String {
    format!("http://{}.{}.svc/v1", owner.name_any(), owner.namespace().unwrap_or_default())
}

/// Selector of the pods that answer, as text.
#[must_use]
pub fn selector_text(service: &str, side: Option<Side>) -> String {
    let labels = side.map_or_else(|| pod_labels(service), |side| side_labels(service, side));
    labels.into_iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")
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

/// The labels that select the pods of one side.
fn side_labels(service: &str, side: Side) -> BTreeMap<String, String> {
    let mut labels = pod_labels(service);
    labels.insert(SIDE_LABEL.to_owned(), side.label().to_owned());
    labels
}

fn selector(labels: BTreeMap<String, String>) -> LabelSelector {
    LabelSelector { match_labels: Some(labels), match_expressions: None }
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

/// Name of the account that pods are made with.
fn account<'a>(inputs: &Inputs<'a>) -> Cow<'a, str> {
    let asked = inputs.spec.pod.spec.service_account_name.as_deref();
    asked.map_or_else(|| identity_name(inputs.owner).into(), Cow::Borrowed)
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

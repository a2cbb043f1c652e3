//! Carries out what was decided and built: no choices here but whether a write is needed at all.
//!
//! Everything is a server-side apply by one field manager, sent only when the object differs: its hash annotation says
//! whether what is wanted changed, a field-by-field comparison whether somebody else changed what is there. Identity and
//! rights go before the pods that need them. An object that is not this service's own is never taken over.

use std::{fmt::Debug, ops::ControlFlow};

use gantry_crds::{
    InferenceService, ModelVersion, ModelVersionSpec, ModelVersionStatus, OLD_FINALIZER, OPERATOR_FIELD_MANAGER,
    SERVICE_LABEL, agent_field_manager,
    status::{InferenceServiceStatus, NamedVersion, Side},
};
use k8s_openapi::{
    NamespaceResourceScope,
    api::core::v1::{Pod, Service},
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tracing::info;

use crate::{
    build::{APPLIED_ANNOTATION, Children, OtherChildren, labels, owner_reference},
    observe::{Observed, PodView},
};

/// Why the API server refuses what is new in a namespace that is being deleted.
const NAMESPACE_ENDS: &str = "NamespaceTerminating";

/// A request that was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Somebody else's object has the name of a child.
    #[error(
        "{kind} {name} exists and does not belong to this InferenceService: rename the InferenceService, or remove the {kind}"
    )]
    NameTaken {
        /// Kind of the object.
        kind: String,
        /// Its name.
        name: String,
    },
    /// The API server refused, or could not be reached.
    #[error("{what}: {}", told(source))]
    Api {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: kube::Error,
    },
}

/// An error of the API server as it says it: the client adds all fields of the answer, by which the sentence is said three times.
fn told(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        error => error.to_string(),
    }
}

impl Error {
    fn api(what: impl Into<String>) -> impl FnOnce(kube::Error) -> Self {
        let what = what.into();
        move |source| Self::Api { what, source }
    }

    /// The write was decided from an object that is no longer the newest.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        matches!(self, Self::Api { source: kube::Error::Api(status), .. } if status.is_conflict())
    }

    /// The object is no longer there.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Api { source: kube::Error::Api(status), .. } if status.is_not_found())
    }

    /// The namespace is being deleted, and the service with it: nothing can be made there any more.
    #[must_use]
    pub fn is_of_ending_namespace(&self) -> bool {
        let Self::Api { source: kube::Error::Api(status), .. } = self else { return false };
        let causes = status.details.iter().flat_map(|details| &details.causes);
        causes.into_iter().any(|cause| cause.reason == NAMESPACE_ENDS)
    }

    /// A child's name is somebody else's.
    #[must_use]
    pub fn is_of_taken_name(&self) -> bool {
        matches!(self, Self::NameTaken { .. })
    }

    /// Nothing will change by trying again soon: the API server understood the request and refused it.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        match self {
            Self::NameTaken { .. } => true,
            Self::Api { source: kube::Error::Api(status), .. } => {
                (400..500).contains(&status.code) && !matches!(status.code, 404 | 408 | 409 | 429)
            }
            Self::Api { .. } => false,
        }
    }
}

/// Why children could not be written.
#[derive(Debug, Default)]
pub struct Unwritten {
    /// Those by which agents may fetch what a rollout names.
    pub identity: Vec<Error>,
    /// All others.
    pub others: Vec<Error>,
}

/// Writes for one service.
pub struct Actor<'a> {
    client: &'a Client,
    service: &'a InferenceService,
    name: String,
    namespace: String,
}

impl<'a> Actor<'a> {
    /// Writes for `service`.
    #[must_use]
    pub fn new(client: &'a Client, service: &'a InferenceService) -> Self {
        Self { client, service, name: service.name_any(), namespace: service.namespace().unwrap_or_default() }
    }

    fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Applies the children that differ; identity and rights before the pods that use them. One that cannot be written
    /// holds back no other: gives all that could not. In a namespace that is being deleted none is tried after the first. `side` is
    /// the one that answers.
    pub async fn apply_children(&self, observed: &Observed, side: Side, children: &Children) -> Unwritten {
        let mut unwritten = Unwritten::default();
        // Why it ended is in there.
        let _ = self.apply_each(observed, side, children, &mut unwritten).await;
        unwritten
    }

    async fn apply_each(
        &self,
        observed: &Observed,
        side: Side,
        children: &Children,
        unwritten: &mut Unwritten,
    ) -> ControlFlow<()> {
        let Unwritten { identity, others } = unwritten;
        note(identity, self.apply(observed.service_account.as_ref(), &children.service_account).await)?;
        note(identity, self.apply(observed.role.as_ref(), &children.role).await)?;
        note(identity, self.apply(observed.role_binding.as_ref(), &children.role_binding).await)?;
        note(others, self.apply(observed.network_policy.as_ref(), &children.network_policy).await)?;
        note(others, self.apply(observed.endpoint.as_ref(), &children.service).await)?;
        note(others, self.apply(observed.budget.as_ref(), &children.pod_disruption_budget).await)?;
        note(others, self.apply(observed.deployment_of(side), &children.deployment).await)?;
        let Some(OtherChildren { deployment, preview }) = &children.other else { return ControlFlow::Continue(()) };
        note(others, self.apply(observed.preview.as_ref(), preview).await)?;
        note(others, self.apply(observed.deployment_of(side.other()), deployment).await)
    }

    /// Applies the Service alone, where it is there and differs: what a rollout needs of children whose spec cannot be carried out
    /// any more.
    pub async fn apply_service(&self, observed: &Observed, service: &Service) -> Unwritten {
        let others = match &observed.endpoint {
            Some(endpoint) => self.apply(Some(endpoint), service).await.err().into_iter().collect(),
            None => Vec::new(),
        };
        Unwritten { identity: Vec::new(), others }
    }

    /// Applies `desired` when `observed` (the object, or its metadata where that is all there is to it) differs.
    async fn apply<O, K>(&self, observed: Option<&O>, desired: &K) -> Result<(), Error>
    where
        O: Resource + Serialize,
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + Debug + Serialize + DeserializeOwned,
    {
        let (kind, name) = (K::kind(&()).into_owned(), desired.name_any());
        let needed = match observed {
            Some(observed) => self.differs(observed, desired)?,
            // Not in the store: new, or somebody else's without our label. The API knows.
            None => match self.api::<K>().get_opt(&name).await.map_err(Error::api(format!("reading {kind} {name}")))? {
                Some(existing) => self.differs(&existing, desired)?,
                None => true,
            },
        };
        if needed {
            info!(kind, name, "applying");
            let parameters = PatchParams::apply(OPERATOR_FIELD_MANAGER).force();
            let applied = self.api::<K>().patch(&name, &parameters, &Patch::Apply(desired)).await;
            applied.map_err(Error::api(format!("applying {kind} {name}")))?;
        }
        Ok(())
    }

    fn differs<O, K>(&self, observed: &O, desired: &K) -> Result<bool, Error>
    where
        O: Resource + Serialize,
        K: Resource<DynamicType = ()> + Serialize,
    {
        let is_owner = |uid: &str| self.service.meta().uid.as_deref() == Some(uid);
        if !observed.owner_references().iter().any(|owner| owner.controller == Some(true) && is_owner(&owner.uid)) {
            return Err(Error::NameTaken { kind: K::kind(&()).into_owned(), name: desired.name_any() });
        }
        let hash =
            |annotations: &std::collections::BTreeMap<String, String>| annotations.get(APPLIED_ANNOTATION).cloned();
        if hash(observed.annotations()) != hash(desired.annotations()) {
            return Ok(true);
        }
        let (desired, observed) = (without_type(desired), without_type(observed));
        Ok(!covers(&observed, &desired, false))
    }

    /// Creates the ModelVersions that are missing. Their revisions are counted in the API, not in a store: a store that
    /// lags would give two versions the same number.
    ///
    /// # Errors
    /// When the API server cannot be reached or refuses one.
    pub async fn stamp(&self, versions: &[NamedVersion]) -> Result<(), Error> {
        if versions.is_empty() {
            return Ok(());
        }
        let api = self.api::<ModelVersion>();
        let all = ListParams::default().labels(&format!("{SERVICE_LABEL}={}", self.name));
        let existing = api.list(&all).await.map_err(Error::api("listing ModelVersions"))?;
        let mut revision = existing.iter().map(|version| version.spec.revision).max().unwrap_or(0);
        for version in versions {
            if existing.iter().any(|existing| existing.name_any() == version.name) {
                continue;
            }
            revision += 1;
            let object = model_version(self.service, version, revision);
            let parameters =
                PostParams { field_manager: Some(OPERATOR_FIELD_MANAGER.to_owned()), ..PostParams::default() };
            match api.create(&parameters, &object).await {
                Ok(_) => info!(version = version.name, revision, "stamped"),
                Err(kube::Error::Api(status)) if status.is_already_exists() => {}
                Err(error) => return Err(Error::api(format!("creating ModelVersion {}", version.name))(error)),
            }
        }
        Ok(())
    }

    /// Deletes ModelVersions.
    ///
    /// # Errors
    /// When the API server cannot be reached or refuses; one that is gone already is no error.
    pub async fn delete_versions(&self, names: &[String]) -> Result<(), Error> {
        for name in names {
            self.delete::<ModelVersion>(name).await?;
        }
        Ok(())
    }

    /// Deletes one object in the background; one that is gone already is no error.
    ///
    /// # Errors
    /// When the API server cannot be reached or refuses.
    pub async fn delete<K>(&self, name: &str) -> Result<(), Error>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + Debug + DeserializeOwned,
    {
        match self.api::<K>().delete(name, &DeleteParams::background()).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            Err(error) => Err(Error::api(format!("deleting {} {name}", K::kind(&())))(error)),
        }
    }

    /// Applies the operator's part of the status, if the object is still the one it was decided from. Gives the resource
    /// version of the object as written.
    ///
    /// # Errors
    /// [`Error::is_stale`] when it is not; else when the API server cannot be reached or refuses.
    pub async fn write_status(&self, status: &InferenceServiceStatus) -> Result<Option<String>, Error> {
        let body = json!({
            "apiVersion": InferenceService::api_version(&()),
            "kind": InferenceService::kind(&()),
            "metadata": {"name": self.name, "resourceVersion": self.service.resource_version()},
            "status": status,
        });
        let parameters = PatchParams::apply(OPERATOR_FIELD_MANAGER).force();
        let written = self.api::<InferenceService>().patch_status(&self.name, &parameters, &Patch::Apply(&body)).await;
        let written = written.map_err(Error::api(format!("writing the status of InferenceService {}", self.name)))?;
        Ok(written.resource_version())
    }

    /// Applies the status of a ModelVersion. Gives the resource version of the object as written.
    ///
    /// # Errors
    /// When the API server cannot be reached or refuses.
    pub async fn write_version_status(&self, name: &str, status: &ModelVersionStatus) -> Result<Option<String>, Error> {
        let body = json!({
            "apiVersion": ModelVersion::api_version(&()),
            "kind": ModelVersion::kind(&()),
            "metadata": {"name": name},
            "status": status,
        });
        let parameters = PatchParams::apply(OPERATOR_FIELD_MANAGER).force();
        let written = self.api::<ModelVersion>().patch_status(name, &parameters, &Patch::Apply(&body)).await;
        let written = written.map_err(Error::api(format!("writing the status of ModelVersion {name}")))?;
        Ok(written.resource_version())
    }

    /// Removes the status entries of pods that are gone, by applying nothing as the field manager that owned them.
    /// The API is asked first: the entry of a new pod may be here before the pod is in the store.
    ///
    /// # Errors
    /// When the API server cannot be reached or refuses.
    pub async fn forget_pods(&self, names: &[String]) -> Result<(), Error> {
        for name in names {
            let pod = self.api::<Pod>().get_opt(name).await.map_err(Error::api(format!("reading Pod {name}")))?;
            if pod.is_some_and(|pod| !PodView::of(&pod).over) {
                continue;
            }
            let body = json!({
                "apiVersion": InferenceService::api_version(&()),
                "kind": InferenceService::kind(&()),
                "metadata": {"name": self.name},
            });
            let parameters = PatchParams::apply(&agent_field_manager(name)).force();
            let removed =
                self.api::<InferenceService>().patch_status(&self.name, &parameters, &Patch::Apply(&body)).await;
            removed.map_err(Error::api(format!("removing the status entry of pod {name}")))?;
            info!(pod = name, "removed the entry of a pod that is gone");
        }
        Ok(())
    }

    /// Takes [`OLD_FINALIZER`] off, if the object is still the one that was read; one that is gone already is no error.
    ///
    /// # Errors
    /// [`Error::is_stale`] when it is not; else when the API server cannot be reached or refuses.
    pub async fn remove_old_finalizer(&self) -> Result<(), Error> {
        let finalizers: Vec<_> = self.service.finalizers().iter().filter(|name| *name != OLD_FINALIZER).collect();
        let body = json!({"metadata": {"resourceVersion": self.service.resource_version(), "finalizers": finalizers}});
        let parameters =
            PatchParams { field_manager: Some(OPERATOR_FIELD_MANAGER.to_owned()), ..PatchParams::default() };
        let written = self.api::<InferenceService>().patch(&self.name, &parameters, &Patch::Merge(&body)).await;
        match written {
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
            other => {
                other.map(drop).map_err(Error::api(format!("taking the finalizer off InferenceService {}", self.name)))
            }
        }
    }
}

/// Notes why a child could not be written; the end, where none can be.
fn note(errors: &mut Vec<Error>, applied: Result<(), Error>) -> ControlFlow<()> {
    let Err(error) = applied else { return ControlFlow::Continue(()) };
    let ends = error.is_of_ending_namespace();
    errors.push(error);
    if ends { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

fn model_version(service: &InferenceService, version: &NamedVersion, revision: i64) -> ModelVersion {
    let spec = ModelVersionSpec {
        service: service.name_any(),
        revision,
        model: version.model.clone(),
        runtime: version.runtime.clone(),
    };
    let mut object = ModelVersion::new(&version.name, spec);
    object.metadata.namespace = service.namespace();
    object.metadata.labels = Some(labels(&service.name_any()));
    object.metadata.owner_references = Some(vec![owner_reference(service)]);
    object
}

fn without_type(object: &impl Serialize) -> Value {
    let mut value = serde_json::to_value(object).unwrap_or_default();
    if let Value::Object(map) = &mut value {
        map.remove("apiVersion");
        map.remove("kind");
    }
    value
}

/// Lists that server-side apply replaces as a whole, lists in them included, so that an extra entry is somebody else's
/// doing and is undone.
const ATOMIC_LISTS: [&str; 3] = ["rules", "subjects", "ingress"];
/// Maps that it replaces as a whole, and into which no default is put: an extra label selects other pods, or none.
const ATOMIC_MAPS: [&str; 3] = ["selector", "podSelector", "labelSelector"];

/// Whether everything in `desired` is so in `observed`. Fields that only the observed object has are defaults or belong to
/// others, as do extra entries of lists that are merged by key; `atomic` says that lists here are not.
fn covers(observed: &Value, desired: &Value, atomic: bool) -> bool {
    match (observed, desired) {
        (_, Value::Null) => true,
        (Value::Object(observed), Value::Object(desired)) => desired.iter().all(|(key, value)| {
            let same = |other: &Value| match ATOMIC_MAPS.contains(&key.as_str()) {
                true => other == value,
                false => covers(other, value, atomic || ATOMIC_LISTS.contains(&key.as_str())),
            };
            value.is_null() || observed.get(key).is_some_and(same)
        }),
        (Value::Array(observed), Value::Array(desired)) => {
            let of_scalars = desired.iter().all(|item| !item.is_object());
            if of_scalars || atomic {
                observed.len() == desired.len() && observed.iter().zip(desired).all(|(a, b)| covers(a, b, atomic))
            } else {
                desired.iter().all(|item| observed.iter().any(|other| covers(other, item, atomic)))
            }
        }
        (Value::String(observed), Value::String(desired)) => gantry_crds::quantity::same(observed, desired),
        (observed, desired) => observed == desired,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_and_other_hands_additions_are_no_difference() {
        let desired = json!({"spec": {"ports": [{"name": "http", "port": 80}], "cpu": "0.5", "nothing": null}});
        let observed = json!({"spec": {"ports": [{"name": "http", "port": 80, "protocol": "TCP"}, {"name": "x", "port": 1}],
            "cpu": "500m", "clusterIP": "10.0.0.1"}});
        assert!(covers(&observed, &desired, false));
    }

    #[test]
    fn drift_is_a_difference() {
        for (observed, desired) in [
            (json!({"port": 81}), json!({"port": 80})),
            (json!({}), json!({"port": 80})),
            (json!({"rules": [{"verbs": ["get"]}, {"verbs": ["*"]}]}), json!({"rules": [{"verbs": ["get"]}]})),
            (json!({"verbs": ["get", "delete"]}), json!({"verbs": ["get"]})),
            (json!({"ports": [{"port": 81}]}), json!({"ports": [{"port": 80}]})),
            (
                json!({"ingress": [{"ports": [{"port": 80}, {"port": 22}]}]}),
                json!({"ingress": [{"ports": [{"port": 80}]}]}),
            ),
            (json!({"selector": {"app": "a", "zone": "b"}}), json!({"selector": {"app": "a"}})),
            (
                json!({"podSelector": {"matchLabels": {"app": "a", "zone": "b"}}}),
                json!({"podSelector": {"matchLabels": {"app": "a"}}}),
            ),
        ] {
            assert!(!covers(&observed, &desired, false), "{observed} {desired}");
        }
    }
}

//! What is there: reflector stores fed by watches, and one service's part of them.
//!
//! Every store is trimmed before it is filled: managed fields always, of pods all but what a rollout or a message needs,
//! of ServiceAccounts all but the metadata (a metadata watch). Children and pods are found by the label
//! `app.kubernetes.io/managed-by`, and each event wakes the service that the label `gantry.dev/service` names.
//! Stores lag behind the cluster. Where that matters (`act`), the API is asked before something is done that could not be
//! undone, and status writes carry the resource version that they were decided from.

use std::{fmt::Debug, hash::Hash, sync::Arc};

use futures::{Stream, StreamExt, future, stream::BoxStream};
use gantry_crds::{
    InferenceService, ModelVersion, SERVICE_LABEL,
    status::{InferenceServiceStatus, NamedVersion},
};
use jiff::Timestamp;
use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{Pod, PodStatus, Service, ServiceAccount},
    networking::v1::NetworkPolicy,
    policy::v1::PodDisruptionBudget,
    rbac::v1::{Role, RoleBinding},
};
use kube::{
    Api, Client, Resource, ResourceExt,
    core::{DeserializeGuard, PartialObjectMeta, error_boundary::InvalidObject},
    runtime::{
        WatchStreamExt,
        reflector::{self, ObjectRef, Store},
        watcher::{self, Event, watcher},
    },
};
use serde::de::DeserializeOwned;
use tracing::warn;

use crate::{
    build::{MANAGED_BY, OPERATOR},
    decide::{CountedPod, StampedVersion},
};

/// A watch's events, as the services they wake.
pub type Wakes = BoxStream<'static, ObjectRef<InferenceService>>;

/// Stores of everything that a reconcile reads.
pub struct Stores {
    services: Store<InferenceService>,
    versions: Store<ModelVersion>,
    pods: Store<Pod>,
    deployments: Store<Deployment>,
    endpoints: Store<Service>,
    service_accounts: Store<PartialObjectMeta<ServiceAccount>>,
    roles: Store<Role>,
    role_bindings: Store<RoleBinding>,
    budgets: Store<PodDisruptionBudget>,
    network_policies: Store<NetworkPolicy>,
}

/// A store's writer went away: the operator is being stopped.
#[derive(Debug, thiserror::Error)]
#[error("the watches have ended: the operator is being stopped")]
pub struct WatchesEnded(#[from] reflector::store::WriterDropped);

impl Stores {
    /// Stores that are filled as long as the returned stream is polled.
    #[must_use]
    pub fn watch(client: &Client) -> (Self, Wakes) {
        let managed = watcher::Config::default().labels(&format!("{MANAGED_BY}={OPERATOR}"));
        let all = || watcher::Config::default();
        let services = readable(watcher(Api::<DeserializeGuard<InferenceService>>::all(client.clone()), all()));
        let (services, services_wake) = stored(services, |_| {});
        let versions = readable(watcher(Api::<DeserializeGuard<ModelVersion>>::all(client.clone()), all()));
        let (versions, a) = stored(versions, |_| {});
        let (pods, b) = stored(watcher(Api::<Pod>::all(client.clone()), managed.clone()), trim_pod);
        let (deployments, c) = stored(watcher(Api::<Deployment>::all(client.clone()), managed.clone()), |_| {});
        let (endpoints, d) = stored(watcher(Api::<Service>::all(client.clone()), managed.clone()), |_| {});
        let (service_accounts, e) =
            stored(watcher(Api::<PartialObjectMeta<ServiceAccount>>::all(client.clone()), managed.clone()), |_| {});
        let (roles, f) = stored(watcher(Api::<Role>::all(client.clone()), managed.clone()), |_| {});
        let (role_bindings, g) = stored(watcher(Api::<RoleBinding>::all(client.clone()), managed.clone()), |_| {});
        let (budgets, h) =
            stored(watcher(Api::<PodDisruptionBudget>::all(client.clone()), managed.clone()), |budget| {
                budget.status = None;
            });
        let (network_policies, i) = stored(watcher(Api::<NetworkPolicy>::all(client.clone()), managed), |_| {});
        let stores = Self {
            services,
            versions,
            pods,
            deployments,
            endpoints,
            service_accounts,
            roles,
            role_bindings,
            budgets,
            network_policies,
        };
        (stores, futures::stream::select_all([services_wake, a, b, c, d, e, f, g, h, i]).boxed())
    }

    /// The services.
    #[must_use]
    pub fn services(&self) -> Store<InferenceService> {
        self.services.clone()
    }

    /// Waits until every store has been filled once.
    ///
    /// # Errors
    /// When the watches have ended.
    pub async fn ready(&self) -> Result<(), WatchesEnded> {
        self.services.wait_until_ready().await?;
        self.versions.wait_until_ready().await?;
        self.pods.wait_until_ready().await?;
        self.deployments.wait_until_ready().await?;
        self.endpoints.wait_until_ready().await?;
        self.service_accounts.wait_until_ready().await?;
        self.roles.wait_until_ready().await?;
        self.role_bindings.wait_until_ready().await?;
        self.budgets.wait_until_ready().await?;
        self.network_policies.wait_until_ready().await?;
        Ok(())
    }

    /// What is there of `service`.
    #[must_use]
    pub fn observe(&self, service: &InferenceService) -> Observed {
        let (name, namespace) = (service.name_any(), service.namespace().unwrap_or_default());
        let identity = format!("{name}-gantry");
        let mut pods: Vec<_> = of_service(&self.pods, &name, &namespace).iter().map(|pod| PodView::of(pod)).collect();
        pods.sort_by(|a, b| a.name.cmp(&b.name));
        let mut versions = of_service(&self.versions, &name, &namespace);
        versions.sort_by_key(|version| version.spec.revision);
        Observed {
            versions,
            pods,
            deployment: get(&self.deployments, &name, &namespace),
            endpoint: get(&self.endpoints, &name, &namespace),
            service_account: get(&self.service_accounts, &identity, &namespace),
            role: get(&self.roles, &identity, &namespace),
            role_binding: get(&self.role_bindings, &identity, &namespace),
            budget: get(&self.budgets, &name, &namespace),
            network_policy: get(&self.network_policies, &name, &namespace),
        }
    }
}

/// Leaves out objects that cannot be read, such as one with a value that a later version knows: it must not stop the
/// work on all others. What was known of it before stays.
fn readable<K>(
    events: impl Stream<Item = watcher::Result<Event<DeserializeGuard<K>>>> + Send + 'static,
) -> impl Stream<Item = watcher::Result<Event<K>>> + Send + 'static
where
    K: Resource + Send + 'static,
{
    let read = |object: DeserializeGuard<K>| {
        let unreadable = object.0.as_ref().err();
        if let Some(InvalidObject { error, metadata }) = unreadable {
            let (namespace, name) = (metadata.namespace.as_deref(), metadata.name.as_deref());
            let kind = std::any::type_name::<K>();
            warn!(kind, namespace, name, error, "an object cannot be read and is left alone: correct it");
        }
        object.0.ok()
    };
    events.filter_map(move |event| {
        let event = event.map(|event| match event {
            Event::Apply(object) => read(object).map(Event::Apply),
            Event::Delete(object) => read(object).map(Event::Delete),
            Event::InitApply(object) => read(object).map(Event::InitApply),
            Event::Init => Some(Event::Init),
            Event::InitDone => Some(Event::InitDone),
        });
        future::ready(event.transpose())
    })
}

fn stored<K>(
    events: impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send + 'static,
    trim: fn(&mut K),
) -> (Store<K>, Wakes)
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
    K::DynamicType: Default + Eq + Hash + Clone + Send + Sync,
{
    let (reader, writer) = reflector::store();
    let wakes = events
        .default_backoff()
        .modify(move |object| {
            object.managed_fields_mut().clear();
            trim(object);
        })
        .reflect(writer)
        .touched_objects()
        .filter_map(|object| {
            future::ready(match object {
                Ok(object) => service_of(&object),
                Err(error) => {
                    warn!(kind = std::any::type_name::<K>(), %error, "a watch failed and is begun again with back-off");
                    None
                }
            })
        });
    (reader, wakes.boxed())
}

/// The service that an object wakes: itself, or the one that its label names.
fn service_of<K: Resource>(object: &K) -> Option<ObjectRef<InferenceService>>
where
    K::DynamicType: Default,
{
    let itself = || (K::kind(&K::DynamicType::default()) == InferenceService::kind(&())).then(|| object.name_any());
    let name = itself().or_else(|| object.labels().get(SERVICE_LABEL).cloned())?;
    Some(ObjectRef::new(&name).within(&object.namespace()?))
}

fn get<K>(store: &Store<K>, name: &str, namespace: &str) -> Option<Arc<K>>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    store.get(&ObjectRef::new(name).within(namespace))
}

fn of_service<K>(store: &Store<K>, service: &str, namespace: &str) -> Vec<Arc<K>>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    store.state_filter(|object| {
        object.meta().namespace.as_deref() == Some(namespace)
            && object.labels().get(SERVICE_LABEL).is_some_and(|label| label == service)
    })
}

/// Keeps what a rollout, a count or a message needs of a pod.
fn trim_pod(pod: &mut Pod) {
    pod.spec = None;
    pod.annotations_mut().clear();
    if let Some(status) = pod.status.take() {
        let wanted = |type_: &str| matches!(type_, "Ready" | "PodScheduled");
        let conditions = status.conditions.map(|all| all.into_iter().filter(|one| wanted(&one.type_)).collect());
        pod.status = Some(PodStatus {
            phase: status.phase,
            start_time: status.start_time,
            conditions,
            container_statuses: status.container_statuses,
            ..PodStatus::default()
        });
    }
}

/// One service's part of the stores.
#[derive(Debug, Clone, Default)]
pub struct Observed {
    /// Its ModelVersions, by revision.
    pub versions: Vec<Arc<ModelVersion>>,
    /// Its pods, by name.
    pub pods: Vec<PodView>,
    /// Its Deployment.
    pub deployment: Option<Arc<Deployment>>,
    /// Its Service.
    pub endpoint: Option<Arc<Service>>,
    /// Its pods' identity.
    pub service_account: Option<Arc<PartialObjectMeta<ServiceAccount>>>,
    /// What its agents may do.
    pub role: Option<Arc<Role>>,
    /// Gives it to them.
    pub role_binding: Option<Arc<RoleBinding>>,
    /// Its PodDisruptionBudget.
    pub budget: Option<Arc<PodDisruptionBudget>>,
    /// Its NetworkPolicy.
    pub network_policy: Option<Arc<NetworkPolicy>>,
}

/// What matters of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodView {
    /// Name.
    pub name: String,
    /// It runs and is not being ended: a rollout waits for it.
    pub counted: bool,
    /// It answers.
    pub ready: bool,
    /// It has ended and will not come back.
    pub over: bool,
    /// When the kubelet took it in.
    pub started_at: Option<Timestamp>,
    /// Why it does not run, in a line.
    pub trouble: Option<String>,
}

impl PodView {
    /// Reads it from the pod.
    #[must_use]
    pub fn of(pod: &Pod) -> Self {
        let status = pod.status.as_ref();
        let phase = status.and_then(|status| status.phase.as_deref()).unwrap_or("Pending");
        let condition = |type_: &str| {
            status.and_then(|status| status.conditions.as_ref()?.iter().find(|condition| condition.type_ == type_))
        };
        let ending = pod.meta().deletion_timestamp.is_some();
        let over = matches!(phase, "Failed" | "Succeeded");
        Self {
            name: pod.name_any(),
            counted: phase == "Running" && !ending,
            ready: !ending && condition("Ready").is_some_and(|ready| ready.status == "True"),
            over,
            started_at: status.and_then(|status| status.start_time.as_ref()).map(|time| time.0),
            trouble: if ending || over { None } else { trouble(pod, condition("PodScheduled")) },
        }
    }
}

/// Why a pod does not run: it finds no node, its image cannot be pulled, it crashes.
fn trouble(pod: &Pod, scheduled: Option<&k8s_openapi::api::core::v1::PodCondition>) -> Option<String> {
    if let Some(scheduled) = scheduled.filter(|scheduled| scheduled.status == "False") {
        let message = scheduled.message.as_deref().unwrap_or("no reason given");
        return Some(format!("pod {} finds no node: {message}", pod.name_any()));
    }
    let containers = pod.status.as_ref()?.container_statuses.as_ref()?;
    let waiting = containers.iter().find_map(|container| container.state.as_ref()?.waiting.as_ref())?;
    let reason =
        waiting.reason.as_deref().filter(|reason| !matches!(*reason, "ContainerCreating" | "PodInitializing"))?;
    let message = waiting.message.as_deref().map(|message| format!(": {message}")).unwrap_or_default();
    Some(format!("pod {} waits with {reason}{message}", pod.name_any()))
}

impl Observed {
    /// Pods that a rollout waits for, with their entries in `status`.
    #[must_use]
    pub fn counted<'a>(&'a self, status: &'a InferenceServiceStatus) -> Vec<CountedPod<'a>> {
        let report = |name: &str| status.replicas.iter().find(|replica| replica.pod == name);
        let counted = self.pods.iter().filter(|pod| pod.counted);
        counted
            .map(|pod| CountedPod { name: &pod.name, started_at: pod.started_at, report: report(&pod.name) })
            .collect()
    }

    /// The ModelVersions that a decision needs to know.
    #[must_use]
    pub fn stamped(&self) -> Vec<StampedVersion> {
        let living = self.versions.iter().filter(|version| version.meta().deletion_timestamp.is_none());
        living
            .map(|version| StampedVersion {
                version: NamedVersion {
                    name: version.name_any(),
                    model: version.spec.model.clone(),
                    runtime: version.spec.runtime.clone(),
                },
                revision: version.spec.revision,
            })
            .collect()
    }

    /// Pods that the Deployment was told to have.
    #[must_use]
    pub fn scaled_to(&self) -> Option<i32> {
        self.deployment.as_ref()?.spec.as_ref()?.replicas
    }

    /// Pods whose entries outlived them, as far as the store knows.
    #[must_use]
    pub fn gone_pods(&self, status: &InferenceServiceStatus) -> Vec<String> {
        let lives = |name: &str| self.pods.iter().any(|pod| pod.name == name && !pod.over);
        status.replicas.iter().map(|replica| replica.pod.clone()).filter(|name| !lives(name)).collect()
    }

    /// Why pods are missing, in a line.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        let conditions =
            self.deployment.as_ref().and_then(|deployment| deployment.status.as_ref()?.conditions.as_ref());
        let refused =
            conditions.and_then(|all| all.iter().find(|one| one.type_ == "ReplicaFailure" && one.status == "True"));
        let refused =
            refused.map(|one| format!("pods are refused: {}", one.message.as_deref().unwrap_or("no reason given")));
        refused.or_else(|| self.pods.iter().find_map(|pod| pod.trouble.clone()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn an_object_that_cannot_be_read_hides_no_other() {
        let guarded = |name: &str, replicas: serde_json::Value| -> DeserializeGuard<InferenceService> {
            let model = json!({"servedName": "m", "source": {"uri": "http://models/m.gguf"}});
            let spec = json!({"model": model, "replicas": replicas});
            let object = json!({"apiVersion": "gantry.dev/v1alpha1", "kind": "InferenceService",
                "metadata": {"name": name, "namespace": "ns"}, "spec": spec});
            serde_json::from_value(object).unwrap()
        };
        let (bad, good) = (guarded("bad", json!("many")), guarded("good", json!(1)));
        assert!(bad.0.is_err() && good.0.is_ok());
        let events = [Event::Init, Event::InitApply(bad.clone()), Event::InitApply(good), Event::InitDone]
            .into_iter()
            .chain([Event::Apply(bad)])
            .map(watcher::Result::Ok);
        let left: Vec<_> = readable(futures::stream::iter(events)).map(Result::unwrap).collect().await;
        let names = left.iter().filter_map(|event| match event {
            Event::InitApply(service) | Event::Apply(service) => Some(service.name_any()),
            _ => None,
        });
        assert_eq!((names.collect::<Vec<_>>(), left.len()), (vec!["good".to_owned()], 3));
    }

    fn pod(status: serde_json::Value) -> Pod {
        let mut pod = serde_json::from_value(json!({
            "metadata": {"name": "chat-1", "annotations": {"big": "one"}},
            "spec": {"containers": [{"name": "server"}]},
            "status": status,
        }))
        .unwrap();
        trim_pod(&mut pod);
        pod
    }

    #[test]
    fn only_running_pods_that_stay_are_counted() {
        let running = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
        let view = PodView::of(&pod(running.clone()));
        assert!(view.counted && view.ready && !view.over);
        let mut ending = pod(running);
        ending.metadata.deletion_timestamp = Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
        let view = PodView::of(&ending);
        assert!(!view.counted && !view.ready && !view.over);
        assert!(!PodView::of(&pod(json!({"phase": "Pending"}))).counted);
        let evicted = PodView::of(&pod(json!({"phase": "Failed"})));
        assert!(!evicted.counted && evicted.over);
    }

    #[test]
    fn a_pod_that_cannot_run_says_why() {
        let unschedulable = json!({"phase": "Pending", "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: no nvidia.com/gpu"}]});
        assert_eq!(
            PodView::of(&pod(unschedulable)).trouble.unwrap(),
            "pod chat-1 finds no node: 0/1 nodes: no nvidia.com/gpu"
        );
        let waiting = |reason: &str| {
            json!({"phase": "Running", "containerStatuses": [{"name": "server", "image": "", "imageID": "", "ready": false,
                "restartCount": 3, "state": {"waiting": {"reason": reason}}}]})
        };
        assert_eq!(
            PodView::of(&pod(waiting("CrashLoopBackOff"))).trouble.unwrap(),
            "pod chat-1 waits with CrashLoopBackOff"
        );
        assert_eq!(PodView::of(&pod(waiting("ContainerCreating"))).trouble, None);
    }

    #[test]
    fn a_trimmed_pod_holds_no_spec_and_no_annotations() {
        let pod = pod(json!({"phase": "Running", "hostIP": "10.0.0.1"}));
        assert!(pod.spec.is_none() && pod.annotations().is_empty() && pod.status.unwrap().host_ip.is_none());
    }
}

//! What is there: reflector stores fed by watches, and one service's part of them.
//!
//! Every object is trimmed as it comes, and lists come in small pages, so that memory grows by what is kept and not by
//! what is listed: managed fields go always, of pods all but what a rollout or a message needs, of ServiceAccounts all
//! but the metadata (a metadata watch). What is only read when its service is reconciled is [`Kept`] as JSON. Children and
//! pods are found by the label `app.kubernetes.io/managed-by`, and each event wakes the service that the label
//! `gantry.dev/service` names. A watch that had to list again wakes all: it cannot tell what was deleted meanwhile.
//! Stores lag behind the cluster. Where that matters (`act`), the API is asked before something is done that could not be
//! undone, and status writes carry the resource version that they were decided from.

mod accounts;
mod kept;
mod noting;
mod trouble;

use std::collections::BTreeSet;

use futures::{
    Stream, StreamExt, future,
    stream::{self, BoxStream},
};
use gantry_crds::{
    InferenceService, InferenceServiceSpec, ModelVersion, ModelVersionSpec, SERVICE_LABEL, SIDE_LABEL,
    conditions::Reason,
    inference_service::{
        ApiSpec, CacheSpec, ModelSpec, PodSpec, ResourcesSpec, RolloutSpec, RuntimeSpec, SchedulingSpec, SourceSpec,
    },
    pod::OWN_KEYS,
    status::{GateResult, GateVerdict, InferenceServiceStatus, NamedVersion, Side, VersionPhase},
};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::{
    apps::v1::{Deployment, DeploymentStatus},
    core::v1::{Pod, PodStatus, Service, ServiceAccount},
    networking::v1::NetworkPolicy,
    policy::v1::PodDisruptionBudget,
    rbac::v1::{Role, RoleBinding},
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{
    Api, Client, Resource, ResourceExt,
    core::{DeserializeGuard, PartialObjectMeta, error_boundary::InvalidObject},
    runtime::{
        WatchStreamExt,
        reflector::{self, ObjectRef, Store, reflector, store::Writer},
        watcher::{self, Event, watcher},
    },
};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, timeout_at};
use tracing::warn;

use crate::{
    build::{MANAGED_BY, OPERATOR, TemplateId, deployment_name, preview_name},
    decide::{CountedPod, StampedVersion, judges_the_model},
    limits::{CREATING_TIMEOUT, RETRY_TOKEN_CHARS_MAX, VOLUMES_LOOK_AFTER, WATCH_PAGE_OBJECTS},
    validate::{PodObject, RESTART_ANNOTATION, RETRY_ANNOTATION},
};

use self::kept::{Child, Kept, OfService};
use self::noting::Noting;
pub use self::trouble::Trouble;

/// A watch's events, as the services they wake.
pub type Wakes = BoxStream<'static, ObjectRef<InferenceService>>;

/// Stores of everything that a reconcile reads.
pub struct Stores {
    services: Store<InferenceService>,
    versions: Store<Kept<ModelVersion>>,
    pods: Store<Kept<Pod>>,
    deployments: Store<Kept<Deployment>>,
    endpoints: Store<Kept<Service>>,
    service_accounts: Store<Kept<PartialObjectMeta<ServiceAccount>>>,
    roles: Store<Kept<Role>>,
    role_bindings: Store<Kept<RoleBinding>>,
    budgets: Store<Kept<PodDisruptionBudget>>,
    network_policies: Store<Kept<NetworkPolicy>>,
}

/// A store's writer went away: the operator is being stopped.
#[derive(Debug, thiserror::Error)]
#[error("the watches have ended: the operator is being stopped")]
pub struct WatchesEnded(#[from] reflector::store::WriterDropped);

impl Stores {
    /// Stores that are filled as long as the returned stream is polled.
    #[must_use]
    pub fn watch(client: &Client) -> (Self, Wakes) {
        let all = || watcher::Config::default().page_size(WATCH_PAGE_OBJECTS);
        let managed = || all().labels(&format!("{MANAGED_BY}={OPERATOR}"));
        let services = readable(watcher(Api::<DeserializeGuard<Noting>>::all(client.clone()), all()));
        let (known, writer) = reflector::store();
        let mut wakes = vec![stored(services, |noting: Noting| trimmed_service(noting.0), writer, known.clone())];
        let versions = readable(watcher(Api::<DeserializeGuard<ModelVersion>>::all(client.clone()), all()));
        let mut watches = Watches { client, managed: &managed, services: &known, wakes: &mut wakes };
        let stores = Self {
            versions: watches.store(versions, |_| {}),
            pods: watches.children(trim_pod),
            deployments: watches.children(trim_deployment),
            endpoints: watches.children(|endpoint: &mut Service| endpoint.status = None),
            service_accounts: watches.children(|_: &mut PartialObjectMeta<ServiceAccount>| {}),
            roles: watches.children(|_: &mut Role| {}),
            role_bindings: watches.children(|_: &mut RoleBinding| {}),
            budgets: watches.children(|budget: &mut PodDisruptionBudget| budget.status = None),
            network_policies: watches.children(|_: &mut NetworkPolicy| {}),
            services: known.clone(),
        };
        (stores, stream::select_all(wakes).boxed())
    }

    /// The services.
    #[must_use]
    pub fn services(&self) -> Store<InferenceService> {
        self.services.clone()
    }

    /// Waits until the stores have been filled once: those that decisions are made from, and those of all other children until
    /// `patience` ends.
    ///
    /// # Errors
    /// When the watches have ended.
    pub async fn ready(&self, patience: Instant) -> Result<(), WatchesEnded> {
        self.services.wait_until_ready().await?;
        self.versions.wait_until_ready().await?;
        self.pods.wait_until_ready().await?;
        self.deployments.wait_until_ready().await?;
        timeout_at(patience, self.children_listed()).await.unwrap_or(Ok(()))
    }

    async fn children_listed(&self) -> Result<(), WatchesEnded> {
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
        let mut pods: Vec<_> = of_service(&self.pods, &name, &namespace).iter().map(PodView::of).collect();
        pods.sort_by(|a, b| a.name.cmp(&b.name));
        let mut versions = of_service(&self.versions, &name, &namespace);
        versions.sort_by_key(|version| version.spec.revision);
        Observed {
            versions,
            pods,
            blue: get(&self.deployments, &deployment_name(&name, Side::Blue), &namespace),
            // Another service may have this name: its objects are its own.
            green: get(&self.deployments, &deployment_name(&name, Side::Green), &namespace)
                .filter(|green| green.labels().get(SERVICE_LABEL) == Some(&name)),
            endpoint: get(&self.endpoints, &name, &namespace),
            preview: get(&self.endpoints, &preview_name(&name), &namespace)
                .filter(|preview| preview.labels().get(SERVICE_LABEL) == Some(&name)),
            service_account: get(&self.service_accounts, &identity, &namespace),
            role: get(&self.roles, &identity, &namespace),
            role_binding: get(&self.role_bindings, &identity, &namespace),
            budget: get(&self.budgets, &name, &namespace),
            network_policy: get(&self.network_policies, &name, &namespace),
        }
    }
}

/// Leaves out objects that cannot be read, such as one with a value that a later version knows: it must not stop the
/// work on all others. What was known of it before stays, until it is deleted: for that its name is enough.
fn readable<K>(
    events: impl Stream<Item = watcher::Result<Event<DeserializeGuard<K>>>> + Send + 'static,
) -> impl Stream<Item = watcher::Result<Event<K>>> + Send + 'static
where
    K: Gone + Resource<DynamicType = ()> + Send + 'static,
{
    let read = |object: DeserializeGuard<K>| {
        let unreadable = object.0.as_ref().err();
        if let Some(InvalidObject { error, metadata }) = unreadable {
            let (namespace, name) = (metadata.namespace.as_deref(), metadata.name.as_deref());
            let kind = K::kind(&());
            warn!(%kind, namespace, name, error, "an object cannot be read and is left alone: correct it");
        }
        object.0.ok()
    };
    events.filter_map(move |event| {
        let event = event.map(|event| match event {
            Event::Apply(object) => read(object).map(Event::Apply),
            Event::Delete(object) => {
                Some(Event::Delete(object.0.unwrap_or_else(|unreadable| K::gone(unreadable.metadata))))
            }
            Event::InitApply(object) => read(object).map(Event::InitApply),
            Event::Init => Some(Event::Init),
            Event::InitDone => Some(Event::InitDone),
        });
        future::ready(event.transpose())
    })
}

/// Whether a version was taken back when it was tried last, or refused for what it is.
fn is_refused(version: &ModelVersion) -> bool {
    let Some(status) = &version.status else { return false };
    let of_model = |gate: &GateResult| gate.verdict == GateVerdict::Fail && judges_the_model(gate.name);
    match status.phase {
        Some(VersionPhase::RolledBack) => true,
        Some(VersionPhase::Rejected) => status.gates.iter().any(of_model),
        _ => false,
    }
}

/// An object that is gone and could not be read: it says who it was, and nothing else.
trait Gone {
    fn gone(metadata: ObjectMeta) -> Self;
}

/// A model that is none.
fn no_model() -> ModelSpec {
    let source = SourceSpec::default();
    ModelSpec { served_name: String::new(), source }
}

impl Gone for Noting {
    fn gone(metadata: ObjectMeta) -> Self {
        let spec = InferenceServiceSpec {
            replicas: 0,
            model: no_model(),
            runtime: RuntimeSpec::default(),
            resources: ResourcesSpec::default(),
            cache: CacheSpec::default(),
            scheduling: SchedulingSpec::default(),
            api: ApiSpec::default(),
            pod: PodSpec::default(),
            rollout: RolloutSpec::default(),
            revision_history_limit: 0,
            unknown: Vec::new(),
        };
        Self(InferenceService { metadata, spec, status: None })
    }
}

impl Gone for ModelVersion {
    fn gone(metadata: ObjectMeta) -> Self {
        let spec = ModelVersionSpec {
            service: String::new(),
            revision: 0,
            model: no_model(),
            runtime: RuntimeSpec::default(),
        };
        Self { metadata, spec, status: None }
    }
}

/// Begins the watches of what is kept as JSON.
struct Watches<'a, C> {
    client: &'a Client,
    /// What watches of children ask for.
    managed: &'a C,
    services: &'a Store<InferenceService>,
    wakes: &'a mut Vec<Wakes>,
}

impl<C: Fn() -> watcher::Config> Watches<'_, C> {
    /// A store that a watch of children fills.
    fn children<K>(&mut self, trim: fn(&mut K)) -> Store<Kept<K>>
    where
        K: Child + DeserializeOwned,
    {
        self.store(watcher(Api::<K>::all(self.client.clone()), (self.managed)()), trim)
    }

    /// A store that these events fill.
    fn store<K: Child>(
        &mut self,
        events: impl Stream<Item = watcher::Result<Event<K>>> + Send + 'static,
        trim: fn(&mut K),
    ) -> Store<Kept<K>> {
        let (store, writer) = reflector::store();
        self.wakes.push(stored(events, move |object| kept(object, trim), writer, self.services.clone()));
        store
    }
}

/// Fills a store with what `keep` makes of objects. Gives the services to wake.
fn stored<K, S>(
    events: impl Stream<Item = watcher::Result<Event<K>>> + Send + 'static,
    keep: impl Fn(K) -> S + Send + 'static,
    writer: Writer<S>,
    services: Store<InferenceService>,
) -> Wakes
where
    K: Send + 'static,
    S: reflector::Lookup<DynamicType = ()> + OfService + Clone + Send + Sync + 'static,
{
    let kept = events.default_backoff().map(move |event| {
        event.map(|event| match event {
            Event::Apply(object) => Event::Apply(keep(object)),
            Event::Delete(object) => Event::Delete(keep(object)),
            Event::InitApply(object) => Event::InitApply(keep(object)),
            Event::Init => Event::Init,
            Event::InitDone => Event::InitDone,
        })
    });
    let wakes = reflector(writer, kept).flat_map(move |event| {
        stream::iter(match event {
            Ok(Event::Apply(object) | Event::Delete(object)) => object.service().into_iter().collect(),
            // In the store only when the list is over.
            Ok(Event::Init | Event::InitApply(_)) => Vec::new(),
            Ok(Event::InitDone) => services.state().iter().map(|service| ObjectRef::from_obj(&**service)).collect(),
            Err(error) => {
                warn!(kind = %S::kind(&()), %error, "a watch failed and is begun again with back-off");
                Vec::new()
            }
        })
    });
    wakes.boxed()
}

impl OfService for InferenceService {
    fn service(&self) -> Option<ObjectRef<InferenceService>> {
        Some(ObjectRef::from_obj(self))
    }
}

fn get<K: Child>(store: &Store<Kept<K>>, name: &str, namespace: &str) -> Option<K> {
    store.get(&ObjectRef::new(name).within(namespace))?.object()
}

fn of_service<K: Child>(store: &Store<Kept<K>>, service: &str, namespace: &str) -> Vec<K> {
    let wanted = ObjectRef::new(service).within(namespace);
    let all = store.state_filter(|object| object.service().as_ref() == Some(&wanted));
    all.iter().filter_map(|object| object.object()).collect()
}

/// What is kept of an object. Whoever may edit it may leave as much on it as on a service.
fn kept<K: Child>(mut object: K, trim: fn(&mut K)) -> Kept<K> {
    object.managed_fields_mut().clear();
    object.annotations_mut().retain(|key, _| key.starts_with(OWN_KEYS));
    trim(&mut object);
    Kept::of(&object)
}

/// Without what is not read here: clients may leave 256 KiB of annotations, and kubectl leaves the whole object once more.
fn trimmed_service(mut service: InferenceService) -> InferenceService {
    service.managed_fields_mut().clear();
    service.labels_mut().clear();
    service.annotations_mut().retain(|key, value| {
        if let Some((end, _)) = value.char_indices().nth(RETRY_TOKEN_CHARS_MAX) {
            value.truncate(end);
        }
        [RESTART_ANNOTATION, RETRY_ANNOTATION].contains(&key.as_str())
    });
    service
}

/// Keeps of a Deployment's status what a message needs.
fn trim_deployment(deployment: &mut Deployment) {
    if let Some(status) = deployment.status.take() {
        deployment.status = Some(DeploymentStatus { conditions: status.conditions, ..DeploymentStatus::default() });
    }
}

/// Keeps what a rollout, a count or a message needs of a pod.
fn trim_pod(pod: &mut Pod) {
    tell_asked_images(pod);
    pod.spec = pod.spec.take().map(|spec| k8s_openapi::api::core::v1::PodSpec {
        service_account_name: spec.service_account_name,
        ..Default::default()
    });
    pod.annotations_mut().clear();
    if let Some(status) = pod.status.take() {
        let wanted = |type_: &str| matches!(type_, "Ready" | "PodScheduled");
        let conditions = status.conditions.map(|all| all.into_iter().filter(|one| wanted(&one.type_)).collect());
        pod.status = Some(PodStatus {
            phase: status.phase,
            reason: status.reason,
            message: status.message,
            start_time: status.start_time,
            conditions,
            container_statuses: status.container_statuses,
            init_container_statuses: status.init_container_statuses,
            ..PodStatus::default()
        });
    }
}

/// Has the status of each container name the image that it is asked to have: it may name the one that it had before.
fn tell_asked_images(pod: &mut Pod) {
    let (Some(spec), Some(status)) = (&pod.spec, &mut pod.status) else { return };
    let told = [&mut status.container_statuses, &mut status.init_container_statuses];
    for container in told.into_iter().flatten().flatten() {
        let mut all = spec.containers.iter().chain(spec.init_containers.iter().flatten());
        if let Some(image) = all.find(|asked| asked.name == container.name).and_then(|asked| asked.image.as_ref()) {
            container.image.clone_from(image);
        }
    }
}

/// One service's part of the stores.
#[derive(Debug, Clone, Default)]
pub struct Observed {
    /// Its ModelVersions, by revision.
    pub versions: Vec<ModelVersion>,
    /// Its pods, by name.
    pub pods: Vec<PodView>,
    /// The Deployment of its blue pods.
    pub blue: Option<Deployment>,
    /// The Deployment of its green pods.
    pub green: Option<Deployment>,
    /// Its Service.
    pub endpoint: Option<Service>,
    /// The Service of the side that does not answer.
    pub preview: Option<Service>,
    /// Its pods' identity.
    pub service_account: Option<PartialObjectMeta<ServiceAccount>>,
    /// What its agents may do.
    pub role: Option<Role>,
    /// Gives it to them.
    pub role_binding: Option<RoleBinding>,
    /// Its PodDisruptionBudget.
    pub budget: Option<PodDisruptionBudget>,
    /// Its NetworkPolicy.
    pub network_policy: Option<NetworkPolicy>,
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
    /// Why it does not run; of one that is over, why it was ended.
    pub trouble: Option<Trouble>,
    /// When it will have waited for its containers for too long, while it does.
    pub creation_limit: Option<Timestamp>,
    /// When it will have run for too long without being ready or saying why, while it does.
    pub report_limit: Option<Timestamp>,
    /// Which template it is of.
    pub template: TemplateId,
    /// Which side it is of; of one that was made before there were two this says nothing, and it is blue.
    pub side_label: Option<Side>,
    /// Name of its ServiceAccount.
    pub account: Option<String>,
    /// When it was made.
    pub made: Option<Timestamp>,
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
            trouble: match (over, ending) {
                (true, _) => Trouble::of_over(pod),
                (false, true) => None,
                (false, false) => Trouble::of_living(pod, condition("PodScheduled")),
            },
            creation_limit: if ending || over { None } else { trouble::creation_limit(pod) },
            report_limit: if ending || over { None } else { trouble::report_limit(pod) },
            template: TemplateId::of(pod.labels()),
            side_label: pod.labels().get(SIDE_LABEL).map(|label| Side::of_label(Some(label))),
            account: pod.spec.as_ref().and_then(|spec| spec.service_account_name.clone()),
            made: pod.creation_timestamp().map(|at| at.0),
        }
    }

    /// Which side it is of.
    #[must_use]
    pub fn side(&self) -> Side {
        self.side_label.unwrap_or_default()
    }
}

impl PodView {
    /// Whether its container has not been made, for want of what it is made with or of time.
    fn waits_for_container(&self) -> bool {
        let refused = self.trouble.as_ref().is_some_and(|trouble| trouble.reason == Reason::CreateContainerError);
        !self.over && (self.creation_limit.is_some() || refused)
    }
}

impl Observed {
    /// Accounts of the pods that live.
    #[must_use]
    pub fn accounts(&self) -> BTreeSet<&str> {
        self.pods.iter().filter(|pod| !pod.over).filter_map(|pod| pod.account.as_deref()).collect()
    }

    /// Whether any pod's container has not been made yet: then it pays to look for what it is made with.
    #[must_use]
    pub fn any_waits_for_container(&self) -> bool {
        self.pods.iter().any(PodView::waits_for_container)
    }

    /// Takes it that pods whose containers have not been made wait for this object, which is not there: the kubelet says so in
    /// Events alone.
    pub fn lacks(&mut self, absent: &PodObject) {
        for pod in self.pods.iter_mut().filter(|pod| pod.waits_for_container()) {
            pod.trouble = Some(Trouble::of_absent_object(&pod.name, absent));
        }
    }

    /// Pods whose containers have not been made for longer than that takes by itself, of which nothing is known yet.
    pub fn waiting_long(&self, now: Timestamp) -> impl Iterator<Item = &str> {
        let early = CREATING_TIMEOUT.saturating_sub(VOLUMES_LOOK_AFTER);
        let soon = now + SignedDuration::try_from(early).unwrap_or(SignedDuration::ZERO);
        let waits =
            move |pod: &&PodView| pod.trouble.is_none() && pod.creation_limit.is_some_and(|limit| limit <= soon);
        self.pods.iter().filter(waits).map(|pod| pod.name.as_str())
    }

    /// Takes it that these pods wait for a volume, each with what the kubelet says of it.
    pub fn lack_volumes(&mut self, failures: &[(String, String)]) {
        for pod in &mut self.pods {
            if let Some((name, failure)) = failures.iter().find(|(name, _)| *name == pod.name) {
                pod.trouble = Some(Trouble::of_volume(name, failure));
            }
        }
    }

    /// Pods of a side that a rollout waits for, with their entries in `status`; `newest` is the template whose resources they are
    /// to have, where the spec says which.
    #[must_use]
    pub fn counted<'a>(
        &'a self,
        status: &'a InferenceServiceStatus,
        side: Side,
        newest: Option<&TemplateId>,
    ) -> Vec<CountedPod<'a>> {
        let counted = self.pods_of(side).filter(|pod| pod.counted);
        counted
            .map(|pod| CountedPod {
                name: &pod.name,
                ready: pod.ready,
                report: status.report_of(&pod.name),
                outdated: newest.is_some_and(|newest| !newest.has_resources_of(&pod.template)),
            })
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
                is_refused: is_refused(version),
            })
            .collect()
    }

    /// The pods of a side.
    pub fn pods_of(&self, side: Side) -> impl Iterator<Item = &PodView> {
        self.pods.iter().filter(move |pod| pod.side() == side)
    }

    /// The Deployment of a side.
    #[must_use]
    pub fn deployment_of(&self, side: Side) -> Option<&Deployment> {
        if side == Side::Green { self.green.as_ref() } else { self.blue.as_ref() }
    }

    /// Whether all pods of a side say of which one they are.
    #[must_use]
    pub fn is_labelled(&self, side: Side) -> bool {
        self.pods_of(side).filter(|pod| !pod.over).all(|pod| pod.side_label.is_some())
    }

    /// Whether the Service points to a side, and to that alone.
    #[must_use]
    pub fn points_to(&self, side: Side) -> bool {
        let selector = self.endpoint.as_ref().and_then(|endpoint| endpoint.spec.as_ref()?.selector.as_ref());
        selector.and_then(|labels| labels.get(SIDE_LABEL)).is_some_and(|label| label == side.label())
    }

    /// Pods that the Deployment of a side was told to have.
    #[must_use]
    pub fn scaled_to(&self, side: Side) -> Option<i32> {
        self.deployment_of(side)?.spec.as_ref()?.replicas
    }

    /// Pods whose entries outlived them, as far as the store knows.
    #[must_use]
    pub fn gone_pods(&self, status: &InferenceServiceStatus) -> Vec<String> {
        let lives = |name: &str| self.pods.iter().any(|pod| pod.name == name && !pod.over);
        status.replicas.iter().map(|replica| replica.pod.clone()).filter(|name| !lives(name)).collect()
    }

    /// Why a pod of a side that there should be is not there. A pod that was evicted counts while one is missing (`is_short`).
    #[must_use]
    pub fn trouble(&self, side: Side, is_short: bool, now: Timestamp) -> Option<Trouble> {
        let conditions =
            self.deployment_of(side).and_then(|deployment| deployment.status.as_ref()?.conditions.as_ref());
        let refused =
            conditions.and_then(|all| all.iter().find(|one| one.type_ == "ReplicaFailure" && one.status == "True"));
        let of_living = |pod: &PodView| {
            let slow = || trouble::of_slow_creation(&pod.name, pod.creation_limit, now);
            let silent = || trouble::of_silence(&pod.name, pod.report_limit, now);
            pod.trouble.clone().filter(|_| !pod.over).or_else(slow).or_else(silent)
        };
        let living = || self.pods_of(side).find_map(of_living);
        let over = || self.pods_of(side).filter(|pod| pod.over && is_short).find_map(|pod| pod.trouble.clone());
        refused.map(|one| Trouble::of_refusal(one.message.as_deref())).or_else(living).or_else(over)
    }

    /// When a pod's creation, or its silence, becomes a trouble by time alone.
    #[must_use]
    pub fn next_trouble(&self, now: Timestamp) -> Option<Timestamp> {
        let limits = self.pods.iter().flat_map(|pod| [pod.creation_limit, pod.report_limit]);
        limits.flatten().filter(|limit| *limit > now).min()
    }

    /// Takes it that pods which have an entry in the status are heard of.
    pub fn are_heard_of(&mut self, status: Option<&InferenceServiceStatus>) {
        for pod in &mut self.pods {
            if status.is_some_and(|status| status.report_of(&pod.name).is_some()) {
                pod.report_limit = None;
            }
        }
    }
}

#[cfg(test)]
mod tests;
